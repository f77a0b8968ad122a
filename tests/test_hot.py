"""Which nodes minibatches hold most: exact on trees, near the truth elsewhere."""

from __future__ import annotations

import pytest
import tiers
import torch
import worlds
from batches import hetero
from problems import GRAPHS, owners
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

import pyg_distcomm as pdc
from pyg_distcomm.loader.hot_rows import (
    NODES,
    inclusion_probabilities,
    out_degrees,
    top_scoring_ids,
)
from pyg_distcomm.sampling import KeyedNeighborSampler

pytestmark = pytest.mark.usefixtures("place")


def inclusion_probability(data, num_neighbors, seeds, batch_size):
    """The probabilities of the nodes of a graph of one type."""
    return inclusion_probabilities(data, num_neighbors, {NODES: seeds}, batch_size)[
        NODES
    ]


def tree(widths):
    """A root, `widths[0]` children, as many children of each of them as `widths[1]`..."""
    source, target, level, count = [], [], [0], 1
    for width in widths:
        below = []
        for parent in level:
            for _ in range(width):
                source.append(count)
                target.append(parent)
                below.append(count)
                count += 1
        level = below
    mask = torch.zeros(count, dtype=torch.bool)
    mask[0] = True
    edges = torch.tensor([source, target])
    return Data(edge_index=edges, train_mask=mask, x=torch.zeros(count, 1))


def _tree(fanouts, wanted):
    share = pdc.partition(tree([4, 3]), worlds.mesh(), "random")
    found = inclusion_probability(share, fanouts, share.train_mask, 1)
    found = found.full_tensor()
    each = [found[:1], found[1:5], found[5:]]
    for level, value in zip(each, wanted, strict=True):
        torch.testing.assert_close(level, torch.full_like(level, value))
    half = inclusion_probability(share, [-1, -1], share.x[:, 0] == 0, 6).full_tensor()
    assert half[0] == pytest.approx(6 / 17)  # nobody draws the root


@pytest.mark.parametrize("size", [1, 3])
def test_exact_on_a_tree(size):
    for fanouts, wanted in (
        ([2, 1], (1, 1 / 2, 1 / 6)),
        ([1, 2], (1, 1 / 4, 1 / 6)),
        ([-1, 2], (1, 1, 2 / 3)),
        ([9, 9], (1, 1, 1)),
        ([3], (1, 3 / 4, 0)),
    ):
        worlds.run(_tree, size, fanouts, wanted)


def _same(graph, cutter, grid):
    data, mesh = GRAPHS[graph](), worlds.mesh(grid=grid)
    share = pdc.partition(data, mesh, owners(cutter, data, mesh.size))
    found = inclusion_probability(share, [3, 2], share.train_mask, 4)
    degree = out_degrees(share)[None].full_tensor()
    n = data.num_nodes
    assert torch.equal(degree.long(), torch.bincount(data.edge_index[0], minlength=n))
    rows = share.edge_index.nodes
    best = top_scoring_ids(out_degrees(share)[None].to_local(), rows.gid, 5, mesh.world)
    want = torch.sort(degree, descending=True, stable=True).indices[:5]
    assert torch.equal(best, want.sort().values)
    return found.full_tensor()


@tiers.parametrize(
    "graph", ["directed", "star", "isolated", "tiny", "edgeless"], slice(0, None, 3)
)
def test_the_number_of_ranks_does_not_matter(graph):
    alone = worlds.run(_same, 1, graph, "block", (1, 1, 1))[0]
    assert bool(((alone >= 0) & (alone <= 1)).all())
    for size, cutter, grid in (
        (3, "empty_rank", (3, 1, 1)),
        (3, "no_train", (3, 1, 1)),
        (4, "random", (2, 2, 1)),
    ):
        for found in worlds.run(_same, size, graph, cutter, grid):
            torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)


def frequencies(data, fanouts, seeds, batch_size, rounds):
    """How often minibatches of random seeds hold each node, by type."""
    sampler = KeyedNeighborSampler(data, fanouts, seed=5)
    g = torch.Generator().manual_seed(7)
    group, ids = seeds
    count = {}
    for _ in range(rounds):
        node = ids[torch.randperm(len(ids), generator=g)[:batch_size]]
        asked = NodeSamplerInput(input_id=None, node=node, input_type=group)
        out = sampler.sample_from_nodes(asked).node
        for name, one in (out if isinstance(out, dict) else {None: out}).items():
            total = data.num_nodes if name is None else data[name].num_nodes
            count[name] = count.get(name, 0) + torch.bincount(one, minlength=total)
    return {name: one.double() / rounds for name, one in count.items()}


def ranks_of(x):
    return torch.argsort(torch.argsort(x)).double()


def correlation(a, b):
    return float(torch.corrcoef(torch.stack([ranks_of(a), ranks_of(b)]))[0, 1])


def skewed(n=300, e=2400, seed=2):
    """Sources are drawn as a power law: few nodes are in most neighbourhoods."""
    g = torch.Generator().manual_seed(seed)
    source = (torch.rand(e, generator=g) ** 3 * n).long()
    target = torch.randint(n, (e,), generator=g)
    mask = torch.rand(n, generator=g) < 0.3
    ends = torch.stack([torch.randperm(n, generator=g)[source], target])
    return Data(edge_index=ends, x=torch.zeros(n, 1), train_mask=mask)


def test_near_what_the_sampler_does():
    data = skewed()
    share = pdc.partition(data, pdc.init(), "block")
    estimate = inclusion_probability(share, [4, 3], share.train_mask, 6).to_local()
    seeds = data.train_mask.nonzero().view(-1)
    seen = frequencies(data, [4, 3], (None, seeds), 6, 4000)[None]
    assert correlation(estimate, seen) > 0.98
    assert float((estimate - seen).abs().max()) < 0.08
    # what a cache of a tenth of the nodes is worth: hits, by each ranking
    degree = out_degrees(share)[None].to_local()
    hits = {}
    for name, score in (("vip", estimate), ("degree", degree), ("truth", seen)):
        best = top_scoring_ids(score, torch.arange(300), 30, pdc.init().world)
        hits[name] = float(seen[best].sum() / seen.sum())
    assert hits["truth"] >= hits["vip"] > hits["degree"] > 0.1
    assert hits["vip"] > 0.98 * hits["truth"]


@tiers.rare
def test_near_what_the_sampler_does_with_types():
    data = hetero()
    data["paper"].train_mask = torch.arange(40) % 2 == 0
    share = pdc.partition(data, pdc.init(), "block")
    fanouts = {key: [2, 1] for key in data.edge_types}
    found = inclusion_probabilities(
        share, fanouts, {"paper": share["paper"].train_mask}, 2
    )
    seeds = data["paper"].train_mask.nonzero().view(-1)
    seen = frequencies(data, fanouts, ("paper", seeds), 2, 3000)
    for name in ("paper", "author"):
        assert correlation(found[name].to_local(), seen[name]) > 0.9, name
        assert float((found[name].to_local() - seen[name]).abs().max()) < 0.1


def _two_types():
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.zeros(2, 1), torch.zeros(5, 1)
    ends = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]])
    data["author", "writes", "paper"].edge_index = ends
    data["paper"].mask = torch.tensor([True, False])
    share = pdc.partition(data, worlds.mesh(), "random")
    found = inclusion_probabilities(share, [3], {"paper": share["paper"].mask}, 1)
    assert found["paper"].full_tensor().tolist() == [1.0, 0.0]
    want = torch.tensor([0.75] * 4 + [0.0], dtype=torch.float64)
    torch.testing.assert_close(found["author"].full_tensor(), want)
    with pytest.raises(TypeError, match="by node type"):
        inclusion_probabilities(share, [3], {"who": share["paper"].mask}, 1)


@pytest.mark.parametrize("size", [1, 3])
def test_exact_between_types(size):
    worlds.run(_two_types, size)


def test_a_graph_that_is_not_partitioned_is_refused():
    with pytest.raises(TypeError, match=r"give a share from pdc\.partition"):
        out_degrees(GRAPHS["star"]())


def test_fan_outs_of_types_that_are_missing():
    data = hetero()
    data["paper"].train_mask = torch.arange(40) % 2 == 0
    share = pdc.partition(data, pdc.init(), "block")
    some, seeds = {data.edge_types[0]: [2]}, {"paper": share["paper"].train_mask}
    with pytest.raises(ValueError, match=r"without the edge types .*'writes'"):
        inclusion_probabilities(share, some, seeds, 2)
