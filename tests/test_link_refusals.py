"""What a link refuses, on all ranks, and how a run ends."""

import math

import pytest
import torch
import torch_geometric.nn
import worlds
from links import ONE, build, epoch
from problems import GRAPHS, two_types
from torch_geometric.data import HeteroData

import pyg_distcomm as pdc
from pyg_distcomm import nn
from pyg_distcomm.halo.codecs import ColumnMask, Plain
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.halo.schedule import Fixed, Linear
from pyg_distcomm.halo.staleness import Drift
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

# what is refused


def test_what_does_not_go_together_is_refused():
    for options, text in (
        ({"codec": ONE, "schedule": Fixed(2)}, "no rate"),
        ({"codec": ColumnMask(2), "adaptive": True}, "Quantise"),
        ({"codec": ONE, "late": -1}, "number of epochs"),
        ({"codec": ONE, "smooth": 0.5}, "late=0"),
        ({"codec": ONE, "late": 1, "smooth": 1.0}, "in \\[0, 1\\)"),
        ({"codec": ONE, "smooth_gradients": 0.5}, "late=0"),
        ({"codec": ONE, "late": 1, "smooth_gradients": -0.1}, "in \\[0, 1\\)"),
        ({"codec": ONE, "late": 1, "warmup": -1}, "number of epochs"),
        ({"codec": ONE, "late": 1, "skip": Drift(0.1)}, "not both"),
        ({"codec": ONE, "sync_every": 0}, "1 or more"),
        ({"codec": ONE, "late": 1, "sync_every": 2.5}, "number of epochs"),
    ):
        with pytest.raises(ValueError, match=text):
            LinkPolicy(**options)
    for wrong in ({"bound": -1.0}, {"most": 0}, {"gradients": float("nan")}):
        with pytest.raises(ValueError, match="or more"):
            Drift(**wrong)
    with pytest.raises(TypeError, match="skip must be a Drift"):
        LinkPolicy(ONE, skip=0.1)
    with pytest.raises(TypeError, match="Codec"):
        LinkPolicy(1)
    with pytest.raises(ValueError, match="codec 'one bit' is not known"):
        LinkPolicy("one bit")
    with pytest.raises(TypeError, match="LinkPolicy"):
        DistGCNConv(3, 4, link=Plain())
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match="share"):
            pdc.BNS(wrong)
    with pytest.raises(ValueError, match="mask must be"):
        pdc.VARCO(3, mask="suffix")
    for schedule in ("cosine", 0.5):
        with pytest.raises(TypeError, match="must be a Schedule"):
            pdc.VARCO(3, schedule=schedule)
    for given in ({"c_max": 8}, {"c_min": 2}, {"slope": 1}):
        with pytest.raises(ValueError, match="ratios of its own"):
            pdc.VARCO(3, schedule=Fixed(2), **given)


def misused(how):
    """Does what all ranks refuse alike."""
    link = LinkPolicy(ONE, late=1, exact_last=False)
    _, share, net = build((2, 1, 1), link)
    x = share.x.clone().requires_grad_()
    if how == "step":
        epoch(net, share)
        epoch(net, share)
    if how == "checkpoint":
        again = torch.utils.checkpoint.checkpoint
        out = again(net, x, share.edge_index, use_reentrant=False)
        out.sum().backward()
    if how == "again":
        for _ in range(2):
            out = net(x, share.edge_index).sum()
            out.backward(retain_graph=True)
            link.step()
        out.backward()
    if how == "mesh":
        epoch(net, share)
        share = pdc.partition(GRAPHS["tiny"](), worlds.mesh(fresh=True), link=link)
        net(share.x, share.edge_index)


@worlds.on(2)
def test_misuse_is_refused_on_all_ranks():
    for how, text in {
        "step": r"layer \d .DistGCNConv.*link.step\(\) once",
        "checkpoint": "computed again",
        "again": "second backward",
        "mesh": "one for each",
    }.items():
        with pytest.raises(ValueError, match=text):
            misused(how)


def _diverges():
    mesh = pdc.init(timeout=120)
    link = LinkPolicy(ONE, exact_last=False)
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random", link=link)
    if mesh.rank == 1:
        share.x.to_local().fill_(float("nan"))
    conv = DistGCNConv(7, 4).double()
    conv(share.x, share.edge_index).sum().backward()


def test_what_diverged_is_told_on_all_ranks():
    with pytest.raises(ValueError, match=r"layer 0 \(DistGCNConv\).*diverged"):
        pdc.launch(_diverges, 2, timeout=300)


@worlds.on(2)
def test_a_lost_loss_is_told_on_all_ranks_or_none():
    link = pdc.Sylvie(adaptive=True)
    mesh, share, net = build((2, 1, 1), link)
    epoch(net, share)
    link.step(float("nan") if mesh.rank == 1 else 1.0)
    epoch(net, share)
    for lost in (float("nan"), float("inf"), None):  # rank 0's counts
        with pytest.raises(ValueError, match="needs a finite loss"):
            link.step(1.0 if mesh.rank else lost)


@worlds.on(2)
def test_bits_by_degree_are_for_nodes_of_one_type():
    mesh, data = worlds.mesh(), GRAPHS["directed"]()
    link = pdc.Sylvie(8, late=0, by_degree=True, exact_last=False)
    share = pdc.partition(data, mesh, "random", link=link)
    found = share.edge_index.matmul(share.x).full_tensor()
    exact = share.edge_index.with_link(None).matmul(share.x).full_tensor()
    assert not torch.equal(found, exact)
    assert float((found - exact).norm() / exact.norm()) < 0.05
    two = HeteroData()  # more sources than targets, whose degrees are not theirs
    two["a"].x, two["b"].x = torch.ones(30, 3), torch.ones(4, 3)
    ends = torch.stack([torch.arange(30), torch.arange(30) % 4])
    two["a", "to", "b"].edge_index = ends
    share = pdc.partition(two, mesh, "random")
    layer = DistSAGEConv((3, 3), 2, link=link)
    with pytest.raises(ValueError, match="between two types"):
        layer((share["a"].x, share["b"].x), share["a", "to", "b"].edge_index)
    two["b"].x = torch.ones(30, 3)
    share = pdc.partition(two, mesh, "random")
    layer = DistSAGEConv((3, 3), 2, flow="target_to_source", link=LinkPolicy(ONE))
    with pytest.raises(ValueError, match="Conv has flow='target_to_source', and"):
        layer((share["a"].x, share["b"].x), share["a", "to", "b"].edge_index)


class OwnHAN(torch_geometric.nn.HANConv):
    """A layer of a script, which takes edges by type."""


@worlds.on(2)
def test_layers_of_several_edge_index_refuse_links():
    """Layers of several edge_index take no link, and run where there is none."""
    mesh, data = worlds.mesh(), two_types()
    torch.manual_seed(1)
    layer = pdc.convert(OwnHAN(4, 6, data.metadata()))
    want = layer(data.x_dict, data.edge_index_dict)
    share = pdc.partition(data, mesh, "random")
    found = layer(share.x_dict, share.edge_index_dict)
    for name, rows in want.items():
        torch.testing.assert_close(found[name].full_tensor(), rows)
    coded = {k: e.with_link(LinkPolicy(ONE)) for k, e in share.edge_index_dict.items()}
    with pytest.raises(TypeError, match="OwnHAN reads 2 edge_index"):
        layer(share.x_dict, coded)
    edges = pdc.partition(GRAPHS["directed"](), mesh, "random")
    for conv in (
        nn.SignedConv(7, 4, True),
        pdc.convert(torch_geometric.nn.SignedConv(7, 4, True)),
    ):
        conv = conv.double()
        conv(edges.x, edges.edge_index, edges.edge_index)
        conv.link = LinkPolicy(ONE)
        with pytest.raises(TypeError, match="SignedConv reads 2 edge_index"):
            conv(edges.x, edges.edge_index, edges.edge_index)


# Schedules ---------------------------------------------------------------------------


def test_linear_is_varcos_formula_with_its_clamp():
    for c_min in (1.0, 1.5):
        for slope in (1, 2, 5, 7):
            s = Linear(300, 128.0, c_min, slope)
            for t in range(300):
                told = max(128 - slope * t * (128 - c_min) / 298, c_min)
                assert s.rate(t) == pytest.approx(told, rel=1e-12)
            end = math.ceil(298 / slope)
            assert s.rate(end) == c_min
            assert s.rate(end - 1) > c_min
    assert Linear(300) == Linear(300, 128.0, 1.0, 5.0)
    assert [Fixed(4.0).rate(t) for t in (0, 7, 10**9)] == [4.0] * 3


def test_short_and_constant_schedules_start_at_the_top_and_never_rise():
    for epochs in (1, 2, 3, 4):
        rates = [Linear(epochs, 64.0, 2.0, 3.3).rate(t) for t in range(9)]
        assert rates[0] == 64.0
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] == 2.0
    assert all(Linear(50, 8.0, 8.0).rate(t) == 8.0 for t in range(50))
    assert Linear(50, slope=0.0).rate(49) == 128.0


def test_what_is_refused():
    for make, says in (
        (lambda: Fixed(0.5), "1 or more, got c=0.5"),
        (lambda: Linear(10, 2.0, 4.0), "c_max=2.0"),
        (lambda: Linear(0), "1 epoch or more"),
        (lambda: Linear(10, slope=-1.0), "slope is 0 or more"),
        (lambda: Linear(10, float("inf")), "c_max=inf"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
