"""Link prediction on a share: splits, negatives, decoders, heads and scores of one process."""

from __future__ import annotations

import copy
import importlib.util
import random

import alike
import pytest
import tiers
import torch
import torch_geometric.nn
import torch_geometric.transforms as T
import torch_geometric.utils as U
import worlds
from problems import GRAPHS, owners
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch_geometric import seed_everything

import pyg_distcomm as pdc
import pyg_distcomm.nn

pytestmark = pytest.mark.usefixtures("place")


def seeded(make, *args, **kwargs):
    torch.manual_seed(5)
    return make(*args, **kwargs)


def slopes(loss, *modules):
    loss.backward()
    return [loss.detach(), *(p.grad for m in modules for p in m.parameters())]


def relations(d):
    return (d.edge_attr[:, 0] > 0).long() + (d.edge_attr[:, 1] > 0).long()


def dots(z, edges):
    return (z[edges[0]] * z[edges[1]]).sum(dim=-1)


def _trained(nn, train):
    """As PyG's example: negatives drawn anew, behind the positives."""
    encoder = seeded(nn.GCN, 7, 8, 2, 4)
    z = encoder(train.x, train.edge_index)
    count = train.edge_label_index.size(1)
    negative = U.negative_sampling(train.edge_index, train.num_nodes, count)
    edges = torch.cat([train.edge_label_index, negative], dim=-1)
    zeros = train.edge_label.new_zeros(negative.size(1))
    label = torch.cat([train.edge_label, zeros])
    return slopes(loss_of(dots(z, edges).view(-1), label), encoder)


def _split_after(nn, d, before):
    split = T.RandomLinkSplit(0.1, 0.2, add_negative_train_samples=False)
    return _trained(nn, split(copy.copy(d))[0])


def _split_before(nn, d, before):
    return _trained(nn, before)


def _perceptron(nn, d, before):
    train = T.RandomLinkSplit(0.1, 0.2)(copy.copy(d))[0]
    encoder, decoder = seeded(nn.SAGEConv, 7, 4), seeded(nn.MLP, [8, 8, 1], norm=None)
    z = encoder(train.x, train.edge_index)
    source, target = train.edge_label_index
    out = decoder(torch.cat([z[source], z[target]], -1)).view(-1)
    return slopes(loss_of(out, train.edge_label), encoder, decoder)


def _distmult(nn, d, before):
    encoder, weight = seeded(nn.RGCNConv, 7, 4, 3, num_bases=2), torch.randn(3, 4)
    weight, kind = torch.nn.Parameter(weight.to(d.x.device)), relations(d)
    z = encoder(d.x, d.edge_index, kind)
    negative = U.negative_sampling(d.edge_index, d.num_nodes)
    ends = d.edge_index, negative
    scores = [(z[e[0]] * weight[kind] * z[e[1]]).sum(1) for e in ends]
    label = torch.cat([torch.ones_like(scores[0]), torch.zeros_like(scores[1])])
    loss = loss_of(torch.cat(scores), label) + z.pow(2).mean() + weight.pow(2).mean()
    return [*slopes(loss, encoder), weight.grad]


class Variational(torch.nn.Module):
    def __init__(self, nn):
        super().__init__()
        self.mu, self.logstd = seeded(nn.GCNConv, 7, 6), nn.GCNConv(7, 6)

    def forward(self, x, edge_index):
        return self.mu(x, edge_index), self.logstd(x, edge_index)


def autoencoder(kind):
    def run(nn, d, before):
        encoder = Variational(nn) if kind == "VGAE" else seeded(nn.GCNConv, 7, 6)
        model = getattr(nn, kind)(encoder)
        split = T.RandomLinkSplit(
            0.1, 0.2, split_labels=True, add_negative_train_samples=False
        )
        train, _, test = split(copy.copy(d))
        z = model.encode(train.x, train.edge_index)
        loss = model.recon_loss(z, train.pos_edge_label_index)
        loss = loss + (model.kl_loss() if kind == "VGAE" else 0)
        found = slopes(loss, model)
        z = z.detach()
        scores = model.test(z, test.pos_edge_label_index, test.neg_edge_label_index)
        return [*found, *scores, model.decoder.forward_all(z)]

    return run


def head(kind):
    def run(nn, d, before):
        model = seeded(getattr(nn, kind), d.num_nodes, 3, 8).double()
        (source, target), kinds = d.edge_index, relations(d)
        found = slopes(model.loss(source, kinds, target), model)
        few = [ids[:4] for ids in (source, kinds, target)]
        scores = model.test(*few, batch_size=32, log=False)
        return [*found, model(source, kinds, target), *scores]

    return run


def _signed(nn, d, before):
    model = seeded(nn.SignedGCN, 7, 8, 2)
    weight = d.edge_attr[:, 0]
    positive, negative = d.edge_index[:, weight > 0], d.edge_index[:, weight <= 0]
    train, test = model.split_edges(positive)
    z = model(d.x, train, negative)
    found = slopes(model.loss(z, train, negative), model)
    return [*found, *model.test(z.detach(), test, negative)]


def _recommended(nn, d, before):
    model = seeded(nn.LightGCN, d.num_nodes, 8, 2).double()
    known = d.edge_index[:, d.edge_index[0] < d.edge_index[1]]
    positive = known[:, torch.randperm(known.size(1))[:20]]
    drawn = torch.randint(0, d.num_nodes, (20,)).to(d.x.device)
    edges = torch.cat([positive, torch.stack([positive[0], drawn])], dim=1)
    high, low = model(d.edge_index, edges).chunk(2)
    loss = model.recommendation_loss(high, low, node_id=edges.unique())
    found = slopes(loss, model)
    with torch.no_grad():
        z = model.get_embedding(d.edge_index)
        scores = z[:30] @ z[30:].t()
        scores[positive[0] % 30, positive[1] % 30] = float("-inf")
    return [*found, scores, model.recommend(d.edge_index, k=3)]


def _by_ogb(nn, d, before):
    evaluator = importlib.import_module("ogb.linkproppred").Evaluator
    z = seeded(nn.GCNConv, 7, 4)(d.x, d.edge_index).detach()
    drawn = torch.randint(0, d.num_nodes, (d.num_edges, 9))
    others = [(z[d.edge_index[0]] * z[drawn[:, k]]).sum(-1) for k in range(9)]
    given = {"y_pred_pos": dots(z, d.edge_index)}
    found = evaluator("ogbl-citation2").eval(
        given | {"y_pred_neg": torch.stack(others, 1)}
    )
    hits = evaluator("ogbl-collab").eval(given | {"y_pred_neg": others[0]})
    return [*found.values(), *hits.values()]


CASES = {
    "split after the cut": _split_after,
    "split before the cut": _split_before,
    "perceptron": _perceptron,
    "distmult": _distmult,
    **{kind: autoencoder(kind) for kind in ("GAE", "VGAE")},
    **{kind: head(kind) for kind in ("DistMult", "ComplEx", "TransE", "RotatE")},
    "signed": _signed,
    "recommended": _recommended,
}
if importlib.util.find_spec("ogb"):
    CASES["OGB's evaluators"] = _by_ogb


def listed(found):
    return [torch.as_tensor(alike.whole(f)) for f in found]


@pytest.mark.parametrize("size", [tiers.rarely(1), 2, tiers.rarely(3)])
@worlds.on()
@alike.in_doubles()
def test_links_are_predicted_as_by_one_process(size):
    data, mesh = GRAPHS["directed"](), worlds.mesh()
    cutter = "empty_rank" if size > 2 else "random"
    seed_everything(8)
    before = T.RandomLinkSplit(0.1, 0.2)(copy.copy(data))[0]
    owner = owners(cutter, data, mesh.size)
    share, halved = (pdc.partition(d, mesh, owner) for d in (data, before))
    for name, case in CASES.items():
        seed_everything(3)
        want = listed(case(torch_geometric.nn, GRAPHS["directed"](), before))
        seed_everything(3)
        got = listed(case(pyg_distcomm.nn, share, halved))
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(
                b, a, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
            )


def drawn():
    mesh = worlds.mesh()
    random.seed(mesh.rank)  # as Python does in each process
    share = pdc.partition(GRAPHS["directed"](), mesh, "random")
    negative = U.negative_sampling(share.edge_index, share.num_nodes)
    train = T.RandomLinkSplit(0.1, 0.2)(copy.copy(share))[0]
    assert train.edge_label_index.size(1) == len(train.edge_label)
    torch.manual_seed(mesh.rank)
    with pytest.raises(ValueError, match="seed_everything"):
        T.RandomLinkSplit(0.1, 0.2)(copy.copy(share))
    return negative.tolist(), train.edge_label_index.full_tensor().tolist()


@pytest.mark.parametrize("size", [2, tiers.rarely(3)])
@worlds.on()
def test_negatives_are_those_of_one_process(size):
    mesh, data = worlds.mesh(), GRAPHS["directed"]()
    share = pdc.partition(data, mesh, "random")
    batch = torch.zeros(data.num_nodes, dtype=torch.long)
    found = []
    for edges in (data.edge_index, share.edge_index):
        random.seed(5)
        mesh.ledger.reset()
        drawn = [
            U.negative_sampling(edges, data.num_nodes, 40),
            U.negative_sampling(edges, data.num_nodes, force_undirected=True),
            U.negative_sampling(edges, (data.num_nodes, data.num_nodes)),
            U.batched_negative_sampling(edges, batch.to(edges.device)),
            U.negative_sampling(edges, data.num_nodes, method="dense"),
        ]
        found.append(drawn)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_negatives_are_the_same_on_all_ranks():
    first, second = worlds.run(drawn, 2)
    assert first == second
