"""The parts of the pipeline by themselves: schedule, stages, names, history."""

import itertools
from dataclasses import astuple

import pytest
import torch
from torch import nn
from torch_geometric.nn import BatchNorm, GCN2Conv, GCNConv, GENConv, LayerNorm, SGConv

from pyg_distcomm.comm.mesh import ranks_per_stage
from pyg_distcomm.pipeline.layer_stack import (
    cut_layers,
    names_crossing,
    names_from_data,
    read_stack,
)
from pyg_distcomm.pipeline.pipeline import hybrid_words, stage_words
from pyg_distcomm.pipeline.schedule import StageSchedule, bubble


@pytest.mark.parametrize("stages", range(1, 9))
def test_schedules_are_drawn(stages):
    for chunks in range(1, 10):
        schedule = StageSchedule(stages, chunks)
        assert schedule.bubble == pytest.approx(bubble(stages, chunks))
        spans = {s[:3]: s for s in map(astuple, schedule.spans(1.0, 2.0))}
        assert max(span[-1] for span in spans.values()) == 3 * (chunks + stages - 1)
        for (stage, kind, slot), (*_, begin, end) in spans.items():
            assert end - begin == {"forward": 1.0, "backward": 2.0}[kind]
            before = stage + (-1 if kind == "forward" else 1), kind, slot
            assert before not in spans or spans[before][-1] <= begin
        drawn = str(schedule).splitlines()
        assert len(drawn) == stages + 1
        for line in drawn[:-1]:  # each turn is a chunk, or nothing
            turns = line.split()[2:]
            assert len(turns) == 2 * (chunks + stages - 1)
            assert sum(t.startswith(".") for t in turns) == 2 * (stages - 1)


def test_layers_are_cut_as_well_as_can_be():
    draw = torch.Generator().manual_seed(0)
    for count in range(1, 9):
        costs = torch.rand(count, generator=draw).tolist()
        for stages in range(1, count + 1):
            sizes = cut_layers(costs, stages)
            assert (len(sizes), sum(sizes)) == (stages, count)
            assert min(sizes) >= 1
            every = itertools.combinations(range(1, count), stages - 1)
            best = min(_slowest(costs, (0, *cuts, count)) for cuts in every)
            ends = [0, *itertools.accumulate(sizes)]
            assert _slowest(costs, ends) == pytest.approx(best)
    assert sorted(cut_layers([1.0] * 9, 4)) == [2, 2, 2, 3]


def _slowest(costs, ends):
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


def test_names_are_read_as_in_pyg():
    layers = read_stack(
        [
            (nn.Linear(3, 4), "x -> x_0"),
            (GCN2Conv(4, 0.1), "x_0, x_0, edge_index -> x"),
            nn.ReLU(),
            GCN2Conv(4, 0.1),
            (nn.Linear(4, 2), "x -> y"),
            nn.ReLU(),
        ]
    )
    assert layers[3].reads == ("x", "x_0", "edge_index")
    assert layers[2].reads == ("x",)
    assert (layers[5].reads, layers[5].writes) == (("y",), ("y",))
    found = [names_crossing(layers, k) for k in range(7)]
    assert found == [(), ("x_0",), ("x", "x_0"), ("x", "x_0"), ("x",), ("y",), ("y",)]
    assert names_from_data(layers, 0, 6) == ("x",)
    # what an earlier stage writes comes from there
    assert names_from_data(layers, 2, 6) == ()


@pytest.mark.parametrize(
    ("layers", "kind", "told"),
    [
        ([GCNConv(2, 2), nn.BatchNorm1d(2)], ValueError, "normalises over all nodes"),
        ([BatchNorm(2)], ValueError, "LayerNorm"),
        ([GENConv(2, 2)], ValueError, "BatchNorm1d"),
        ([LayerNorm(2)], ValueError, "mode='node'"),
        ([SGConv(2, 2, cached=True)], ValueError, "cached=True"),
        ([GCNConv(-1, 2)], ValueError, "in_channels"),
        (GCNConv(2, 2), TypeError, "GCNConv, which cannot be cut"),
        ([], ValueError, "no layers"),
        ([nn.ReLU(), 3], TypeError, "layer 1 is int"),
        ([(nn.ReLU(), "x")], ValueError, "header 'x'"),
    ],
)
def test_what_cannot_run_in_chunks_is_refused(layers, kind, told):
    with pytest.raises(kind, match=told):
        read_stack(layers)
    read_stack([GENConv(2, 2, norm=None), LayerNorm(2, mode="node")])


def test_prices_are_those_of_the_paper():
    # Reddit, width 100, 8 stages, one shared tensor: 2.43 GiB
    assert stage_words(232965, 100, 8, 1) * 4 / 2**30 == pytest.approx(2.430, abs=1e-3)
    only = hybrid_words(100, 8, 4, 1, layers=9, replication=0.0, weights=50)
    assert only == stage_words(100, 8, 4)
    both = hybrid_words(100, 8, 1, 2, layers=3, replication=0.5, weights=50)
    assert both == 2 * 3 * 0.5 * 800 + 100
    assert bubble(8, 32) == pytest.approx(0.179, abs=1e-3)


def test_stages_share_out_ranks():
    assert ranks_per_stage(6, 3) == 2
    for stages in (0, 4, 7, 1.5):
        with pytest.raises(ValueError, match=r"\[1, 2, 3, 6\] fit"):
            ranks_per_stage(6, stages)
