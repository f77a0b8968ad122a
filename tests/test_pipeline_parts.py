"""The parts of the pipeline by themselves: schedule, stages, names, history."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch_geometric.nn import (
    BatchNorm,
    GCN2Conv,
    GCNConv,
    GENConv,
    LayerNorm,
    SGConv,
)

from pyg_distcomm.comm.mesh import ranks_per_stage
from pyg_distcomm.pipeline.layer_stack import (
    cut_layers,
    names_crossing,
    names_from_data,
    read_stack,
)
from pyg_distcomm.pipeline.pipeline import hybrid_words, stage_words
from pyg_distcomm.pipeline.schedule import (
    Action,
    ActionSpan,
    bubble,
    fill_drain,
)


def carried_out(schedule, forward, backward):
    """When each chunk is computed, if transfers take no time; asserts that no stage hangs."""
    cost = {"forward": forward, "backward": backward}
    left = [list(actions) for actions in schedule.stages]
    clock, spans, lanes, arrived = [0.0] * len(left), set(), defaultdict(list), {}
    moving = True
    while moving:
        moving = False
        for stage, actions in enumerate(left):
            while actions:
                action = actions[0]
                if action.kind.startswith("receive"):
                    if (stage, action) not in arrived:
                        break
                    clock[stage] = max(clock[stage], arrived[stage, action])
                elif action.peer:
                    begun = action.kind.removesuffix("_grad"), action, clock[stage]
                    lanes[stage, stage + action.peer].append(begun)
                    meet(lanes, stage, stage + action.peer, arrived)
                actions.pop(0)
                end = clock[stage] + cost.get(action.kind, 0.0)
                if action.kind in cost:
                    span = stage, action.kind, action.slot, clock[stage], end
                    spans.add(ActionSpan(*span))
                clock[stage], moving = end, True
    assert not any(left), f"stages would wait for ever: {left}"
    assert not any(lanes.values())
    return spans


def meet(lanes, here, there, arrived):
    """Has the first messages at both ends of a lane meet: a send and its post."""
    ends = lanes[here, there], lanes[there, here]
    while all(ends):
        (one, mine, began), (other, theirs, began_there) = (end.pop(0) for end in ends)
        assert {one, other} == {"send", "post"}
        assert mine.slot == theirs.slot
        assert mine.kind.endswith("_grad") == theirs.kind.endswith("_grad")
        to, post = (here, mine) if one == "post" else (there, theirs)
        receive = Action(post.kind.replace("post", "receive"), post.slot)
        arrived[to, receive] = max(began, began_there)


@pytest.mark.parametrize("stages", range(1, 9))
def test_schedules_are_carried_out(stages):
    for chunks, ahead in itertools.product(range(1, 10), range(0, 4)):
        schedule = fill_drain(stages, chunks, ahead)
        assert schedule.bubble == pytest.approx(bubble(stages, chunks))
        assert set(schedule.spans(1.0, 2.0)) == carried_out(schedule, 1.0, 2.0)
        ends = [span.end for span in schedule.spans(1.0, 2.0)]
        assert max(ends) == 3 * (chunks + stages - 1)
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
            assert len(sizes) == stages
            assert sum(sizes) == count
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
    assert (
        names_from_data(layers, 2, 6) == ()
    )  # what an earlier stage writes comes from there


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
    read_stack([GCNConv(2, 2, cached=True)])


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
