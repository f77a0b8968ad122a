"""The planner's pipelines: bytes of an epoch in stages as the ledger counts them."""

from __future__ import annotations

import pytest
import tiers
import torch
import worlds
from pipelines import loss_of, stack_of
from problems import GRAPHS
from torch_geometric.nn import (
    GCNConv,
    MixHopConv,
    ResGatedGraphConv,
    SAGEConv,
    SGConv,
    TAGConv,
)

import pyg_distcomm as pdc
from pyg_distcomm.cli import main
from pyg_distcomm.halo.codecs import Bitmap, Quantise, RowSample
from pyg_distcomm.pipeline.pipeline import hybrid_words, stage_words
from pyg_distcomm.pipeline.schedule import bubble, fewest_chunks
from pyg_distcomm.plan.machine import Wire

SAMPLE = RowSample(10, values=Quantise(1))


def hops():
    torch.manual_seed(0)
    layers = [torch.nn.Dropout(), TAGConv(7, 8), SGConv(8, 8, K=2)]
    layers += [ResGatedGraphConv(8, 6), torch.nn.ReLU(), MixHopConv(6, 4, [0, 1, 2])]
    return [layer.double() for layer in layers]


def trained(stages, name, owner, chunks, link=None):
    """Bytes of an epoch, all told, its messages, and what is kept."""
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(GRAPHS["undirected"](), mesh, owner, link=link)
    stack = hops() if name == "hops" else stack_of(name)
    pipe = pdc.Pipeline(stack, mesh, chunks=chunks)
    pipe(share)
    for _ in range(1 if link is None else 3):
        pipe.train_step(share, loss_of)
        if link is not None:
            link.step()
    mesh.ledger.reset()
    pipe.train_step(share, loss_of)
    ledger = mesh.ledger
    sums = ledger.messages("all_reduce")
    kept = pipe.memory()
    return ledger.bytes(), ledger.messages() - sums, kept["sites"], pipe.balance


@tiers.parametrize(("stages", "ways"), [(2, 1), (4, 1), (2, 2)], [(2, 2)])
def test_bytes_are_those_of_the_ledger(stages, ways):
    data = GRAPHS["undirected"]()
    for name in ("gcn", "gcnii", "jumping", "sage", "hops"):
        plans = pdc.plan(
            data,
            ranks=stages * ways,
            model=hops() if name == "hops" else stack_of(name),
            partition="random",
            pipeline=True,
            dtype=torch.float64,
        )
        one = plans.of((ways, 1, 1), stages=stages)
        owner = pdc.plan(data, [7, 4], ways, partition="random").partition.owner
        counted = worlds.run(trained, stages * ways, stages, name, owner, None)
        assert one.reason is None
        assert tuple(got[0] for got in counted) == one.bytes_by_rank, name
        assert one.total_bytes == sum(one.bytes_by_rank)
        assert max(got[1] for got in counted) <= one.messages
        assert {got[3] for got in counted} == {one.balance}
        assert one.memory > max(got[2] for got in counted)
        assert not one.exact
        assert plans.best.stages == 1


CODED = ["1 bit", "4 bits late", "bf16", Bitmap(), SAMPLE]


@tiers.parametrize("codec", CODED, [])
def test_coded_bytes_are_at_most_those_planned(codec):
    data = GRAPHS["undirected"]()
    for name in ("gcn", "gat"):
        plans = pdc.plan(
            data,
            ranks=4,
            model=stack_of(name),
            partition="random",
            pipeline=True,
            codecs=[codec],
            dtype=torch.float64,
        )
        plain, one = (plans.of((2, 1, 1), stages=2, sized=s) for s in (True, False))
        owner = pdc.plan(data, [7, 4], 2, partition="random").partition.owner
        counted = worlds.run(trained, 4, 2, name, owner, None, one.link)
        pairs = list(zip(counted, one.bytes_by_rank, strict=True))
        assert all(got[0] <= most for got, most in pairs), name
        if isinstance(codec, str):  # what is left is heads of messages
            assert one.total_bytes < 1.25 * sum(got[0] for got in counted)
            if name == "gat":  # attention is exact
                assert one.total_bytes == plain.total_bytes
            else:
                assert one.total_bytes < plain.total_bytes
        assert max(got[1] for got in counted) <= one.messages
        assert one.memory >= plain.memory
        assert not one.sized
        assert not one.exact
        coded = [p for p in (*plans, *plans.refused) if p.codec == one.codec]
        assert {p.grid for p in coded if p.stages > 1} == {(2, 1, 1)}


@tiers.parametrize(
    ("stages", "ways"), [(2, 1), (4, 1), (2, 2), (4, 2)], [(2, 1), (2, 2)]
)
def test_widths_alone_give_the_formula(stages, ways):
    n, d, layers, s = 6400, 32, 8, 1
    graph = pdc.RandomGraph(n, 20 * n)
    size = stages * ways
    plans = pdc.plan(graph, [d] * (layers + 1), size, pipeline=True, skips=s)
    one = plans.of((ways, 1, 1), stages=stages)
    between = stage_words(n, d, stages, s) * 4
    assert one.balance == (layers // stages,) * stages
    ghosts = graph.flow((ways, 1, 1), "rows", False).sides.ghost.ghosts.mean() * ways
    weights = layers * (d * d + d)
    words = hybrid_words(
        n,
        d,
        stages,
        ways,
        layers=layers,
        replication=ghosts / n,
        weights=weights,
        shared=s,
    )
    loss = one.total_bytes - words * 4
    # the first layer sends no gradients back; the loss is a few words
    first = ghosts * d * 4
    assert -first <= loss <= 400 * size
    assert one.total_bytes >= between


def test_seconds_have_the_bubble_and_memory_its_share():
    machine = pdc.Machine(latency=0.0, bandwidth=1e18)
    graph = pdc.RandomGraph(6400, 128000)
    widths = [32] * 9
    found = {
        chunks: pdc.plan(
            graph, widths, 4, machine=machine, pipeline=True, chunks=chunks
        ).of((1, 1, 1), stages=4)
        for chunks in (4, 12)
    }
    busy = [one.seconds * (1 - bubble(4, m)) for m, one in found.items()]
    assert busy[0] == pytest.approx(busy[1], rel=1e-6)
    for most in (0.25, 0.5):  # without chunks, the fewest for so large a bubble
        one = pdc.plan(graph, widths, 4, machine=machine, pipeline=True, bubble=most)
        one = one.of((1, 1, 1), stages=4)
        assert one.chunks == fewest_chunks(4, most)
        assert one.to_dict()["bubble"] == one.bubble == bubble(4, one.chunks)
        assert f"{one.chunks} chunks, bubble {bubble(4, one.chunks):.0%}" in one.remark
        idle = one.seconds * (1 - bubble(4, one.chunks))
        assert idle == pytest.approx(busy[0], rel=1e-6)
    with pytest.raises(ValueError, match="bubble must be a number between 0 and 1"):
        pdc.plan(graph, widths, 4, pipeline=True, bubble=1)
    with pytest.raises(ValueError, match="add pipeline=True"):
        pdc.plan(graph, widths, 4, bubble=0.5)
    exact = pdc.plan(graph, widths, 4, pipeline=True, chunks=1).of((1, 1, 1), stages=4)
    assert exact.exact
    kept = 3 * 6400 * 32 * 4 * 8 / 4
    topology = 64 * 128000
    assert kept < found[12].memory - topology < 2 * kept


def test_what_cannot_be_cut_is_refused_with_its_reason():
    data = GRAPHS["undirected"]()
    plans = pdc.plan(data, [7, 6, 4], 8, partition="random", pipeline=True)
    assert "need more than 2 layers" in plans.of((1, 1, 1), stages=8).reason
    assert "rows only" in plans.of((2, 2, 1), stages=2).reason
    assert "rows only" in str(plans)
    ring = torch.stack([torch.arange(50), torch.arange(1, 51) % 50])
    sparse = pdc.plan(ring, [7, 6, 4], 8, partition="block", pipeline=True)
    assert "it loses" in sparse.of((4, 1, 1), stages=2).remark
    assert plans.of((4, 1, 1), stages=2).remark in str(plans)
    many = pdc.plan(data, [7, 6, 4], 2, pipeline=True, chunks=10**6)
    assert "nodes" in many.of((1, 1, 1), stages=2).reason
    owner = torch.arange(data.num_nodes) % 8
    given = pdc.plan(data, [7, 6, 4], 8, partition=owner, pipeline=True)
    assert "owners given are 8" in given.of((4, 1, 1), stages=2).reason
    norm = torch.nn.Sequential(pdc.nn.DistGCNConv(7, 6), torch.nn.BatchNorm1d(6))
    one = pdc.plan(data, ranks=2, model=norm, pipeline=True).of((1, 1, 1), stages=2)
    assert "normalises over all nodes" in one.reason
    layer = GCNConv(7, 7)
    stack = [layer, torch.nn.ReLU(), GCNConv(7, 7), layer]
    one = pdc.plan(data, ranks=2, model=stack, pipeline=True).of((1, 1, 1), stages=2)
    assert "share a parameter" in one.reason
    stack = [SAGEConv(7, 7, aggr="max"), GCNConv(7, 4)]
    varco = pdc.VARCO(6, c_max=4, slope=1)
    plans = pdc.plan(data, ranks=4, model=stack, codecs=[varco], pipeline=True)
    reasons = [one.reason for one in plans.refused if one.link is not None]
    assert any("SAGEConv has aggr='max'" in reason for reason in reasons)
    for wrong in ({"chunks": 0}, {"skips": -1}):
        with pytest.raises(ValueError, match="must be a whole number"):
            pdc.plan(data, [7, 4], 2, pipeline=True, **wrong)
    assert {one.stages for one in pdc.plan(data, [7, 4], 2)} == {1}


def test_a_stack_tells_the_width_and_type_that_edges_alone_do_not():
    data = GRAPHS["undirected"]()
    for name in ("gcnii", "resgcn", "gat"):  # most begin with no layer of PyG's
        found = [
            pdc.plan(graph, ranks=2, model=stack_of(name), partition=way, pipeline=True)
            for graph, way in ((data, "block"), (data.edge_index, [0, 1] * 25))
        ]
        whole, edges = (plans.of((1, 1, 1), stages=2) for plans in found)
        assert edges.total_bytes == whole.total_bytes > 0, edges.reason
        assert not edges.missing
    waits = torch.nn.Sequential(GCNConv(-1, 8), GCNConv(8, 4))
    with pytest.raises(ValueError, match=r"give the graph as a Data with x"):
        pdc.plan(data.edge_index, ranks=2, model=waits, partition=[0, 1] * 25)


def test_deep_models_on_dense_cuts_win():
    graph = pdc.RandomGraph(10**6, 5 * 10**7)
    plans = pdc.plan(graph, [64] * 33, 8, pipeline=True)
    one = plans.of((1, 1, 1), stages=8)
    assert "times fewer" in one.remark
    assert one.bytes < plans.of((8, 1, 1), halo="rows", stages=1).bytes / 2


def test_the_command_takes_pipelines(tmp_path, capsys):
    torch.save(GRAPHS["undirected"](), tmp_path / "graph.pt")
    flags = "--widths 7 6 5 4 --ranks 4 --pipeline --chunks 3 --skips 1".split()
    assert main(["plan", str(tmp_path / "graph.pt"), *flags]) == 0
    out = capsys.readouterr().out
    assert "2 x 2x1x1" in out
    assert "(S-1)(1+s) = 2" in out


def automatic(asked):
    data = GRAPHS["undirected"]()
    widths = [7, 6, 6, 6, 6, 4]
    machine = pdc.Machine(latency=0.0, bandwidth=1e4)
    mesh = pdc.init("auto", data=data, widths=widths, machine=machine, **asked)
    found = pdc.plan(data, widths, 2, machine=machine, **asked)
    taken = mesh.plan
    assert taken.to_dict() == (found[0] if asked else found.best).to_dict()
    share = pdc.partition(data, mesh, link=taken.link)
    assert share.edge_index.nodes.mesh is mesh
    return taken.exact, taken.stages, mesh.stage.size


@pytest.mark.exhaustive
def test_auto_takes_what_is_not_exact_only_when_asked():
    assert worlds.run(automatic, 2, {}) == [(True, 1, 1)] * 2
    assert worlds.run(automatic, 2, {"codecs": ["1 bit"]}) == [(False, 1, 1)] * 2
    assert worlds.run(automatic, 2, {"pipeline": True}) == [(False, 2, 2)] * 2


def cut_for_stages():
    data = GRAPHS["undirected"]()
    slow = {(4, 1): Wire(0.0, 1.0)}  # what four ranks in a row would talk over
    mesh = pdc.init(
        "auto",
        data=data,
        widths=[7] + [4] * 9,
        machine=pdc.Machine(latency=0.0, bandwidth=1e4, lines=slow),
        method="random",
        pipeline=True,
    )
    planned, named = pdc.partition(data, mesh), pdc.partition(data, mesh, "random")
    rows = [share.edge_index.nodes.gid for share in (planned, named)]
    return mesh.plan.stages, mesh.plan.grid, torch.equal(*rows)


def test_stages_are_cut_as_planned():
    assert worlds.run(cut_for_stages, 4) == [(2, (2, 1, 1), True)] * 4
