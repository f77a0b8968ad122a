"""Loaders over time: times and weights, resuming, threads that end, and complaints."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from batches import all_same, check, graph, hetero
from test_loader import WRITES, nodes
from torch_geometric.sampler import NegativeSampling

from pyg_distcomm.loader import (
    DistLayerLoader,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    LoaderOptions,
)

# Times and weights -------------------------------------------------------------------


def timed(of, dtype):
    data = graph()
    g = torch.Generator().manual_seed(9)
    size = data.num_nodes if of == "node" else data.num_edges
    data.clock = torch.randint(8, (size,), generator=g).to(dtype)
    of_edge = data.clock[data.edge_index[0]] if of == "node" else data.clock
    return data, of_edge


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.parametrize("of", ["node", "edge"])
def test_nothing_later_than_its_seed_is_drawn(of, strategy, dtype):
    data, of_edge = timed(of, dtype)
    when = torch.arange(60) % 9 - 1
    loader = nodes(
        data,
        input_nodes=torch.arange(60),
        input_time=when,
        time_attr="clock",
        temporal_strategy=strategy,
    )
    for batch in loader:
        assert torch.equal(batch.seed_time, when[batch.input_id])
        assert torch.equal(batch.batch[:3], torch.arange(3))
        target = batch.edge_index[1]
        begin, hops = 0, zip((3, 2), batch.num_sampled_nodes, strict=False)
        drawn = 0
        for k, count in hops:
            for v in range(begin, begin + count):
                limit = batch.seed_time[batch.batch[v]]
                may = (data.edge_index[1] == batch.n_id[v]) & (of_edge <= limit)
                found = batch.e_id[target == v]
                assert found.unique().numel() == found.numel() == min(k, int(may.sum()))
                assert bool(may[found].all())
                if strategy == "last":
                    best = of_edge[may].sort().values[int(may.sum()) - found.numel() :]
                    assert torch.equal(of_edge[found].sort().values, best)
                drawn += found.numel()
            begin += count
        assert drawn == batch.num_edges


def test_seeds_take_the_time_of_their_nodes():
    data, _ = timed("node", torch.long)
    loader = nodes(data, time_attr="clock")
    every = torch.arange(60)
    given = nodes(data, time_attr="clock", input_nodes=every, input_time=data.clock)
    for batch, other in zip(loader, given, strict=True):
        assert torch.equal(batch.e_id, other.e_id)
        late = data.clock[batch.n_id] > data.clock[batch.input_id][batch.batch]
        assert not late.any()


def test_times_of_links_and_of_types():
    data, _ = timed("node", torch.long)
    when = torch.arange(data.num_edges) % 8
    loader = DistLinkNeighborLoader(
        data,
        [3, 2],
        edge_label_index=data.edge_index,
        edge_label_time=when,
        time_attr="clock",
        neg_sampling="binary",
        batch_size=50,
        options=LoaderOptions(seed=3),
    )
    for batch in loader:
        pairs = batch.edge_label_index.numel()  # the seeds, negative ones too
        assert pairs == 4 * batch.input_id.numel()
        drawn = slice(pairs, None)
        late = data.clock[batch.n_id[drawn]] > when[batch.input_id][batch.batch[drawn]]
        assert not late.any()
        assert late.numel() > 0
    typed = hetero()
    typed["author"].clock = torch.arange(25) % 5
    loader = nodes(
        typed,
        input_nodes=("paper", torch.arange(40)),
        input_time=torch.arange(40) % 6 - 1,
        time_attr="clock",
        shuffle=False,
    )
    for batch in loader:
        limit = batch["paper"].seed_time[batch["author"].batch]
        assert bool((typed["author"].clock[batch["author"].n_id] <= limit).all())


def test_edges_without_weight_are_never_drawn():
    data = graph()
    data.weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1))
    data.weight[::3] = 0
    data.weight[[int((data.edge_index[1] == v).nonzero()[0]) for v in range(56)]] = 1
    into = torch.bincount(data.edge_index[1, data.weight > 0], minlength=60)
    some = torch.bincount(data.edge_index[1], minlength=60)
    assert not bool(((into == 0) & (some > 0)).any())  # a choice for every node
    assert int((data.weight == 0).sum()) > 90
    for replace in (False, True):
        for batch in nodes(data, weight_attr="weight", replace=replace):
            check(data, batch, (3, 2), replace, data.weight > 0)


def test_weights_of_types():
    data = hetero()
    data[WRITES].weight = torch.arange(200.0) % 4
    loader = nodes(data, input_nodes="paper", weight_attr="weight", fan_outs=(2,))
    drawn = torch.cat([batch[WRITES].e_id for batch in loader])
    assert drawn.numel() > 50
    assert bool((data[WRITES].weight[drawn] > 0).all())


# Epochs that go on ---------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_goes_on_where_it_was_left(num_workers):
    made, whole = nodes(), nodes()
    wanted = [list(whole), list(whole), list(whole)]
    list(made)
    run = iter(made)
    for _ in range(4):
        next(run)
    state = made.state_dict()
    later = nodes(seed=99, num_workers=num_workers)
    later.load_state_dict(state)
    assert later.state_dict() == state
    all_same(later, wanted[1][4:])
    all_same(later, wanted[2])
    all_same(run, wanted[1][4:])  # looking at the state changes nothing
    for done in (made, later):
        at_end = done.state_dict()
        assert (at_end["epoch"], at_end["batches"]) == (2 if done is made else 3, 0)


@pytest.mark.parametrize("own", [{}, {"sampler": range(30, 60), "shuffle": False}])
def test_a_state_after_the_last_batch(own):
    made, whole = nodes(**own), nodes(**own)
    for _, _batch in zip(range(len(made)), made, strict=False):
        pass
    state = made.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)
    later = nodes(**own)
    later.load_state_dict(state)
    list(whole)
    all_same(later, whole)


def test_states_that_do_not_fit_are_refused():
    state = nodes().state_dict()
    for other in (nodes(batch_size=8), nodes(input_nodes=torch.arange(9))):
        with pytest.raises(ValueError, match="other inputs, batch size or shuffling"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="'epoch'"):
        nodes().load_state_dict({"seed": 1, "batches": 0, "inputs": ""})
    with pytest.raises(ValueError, match="split over 2 ranks, and this one"):
        nodes().load_state_dict({**state, "ranks": 2})
    for wrong in (None, 3, [], {**state, "made_from": None}, {**state, "batches": -1}):
        with pytest.raises(ValueError, match="not the state of a loader"):
            nodes().load_state_dict(wrong)
    timed, weighed = graph(), graph()
    for name in ("one", "two"):
        timed[name] = torch.zeros(timed.num_nodes, dtype=torch.long)
        weighed[name] = torch.ones(weighed.num_edges)
    for data, option in ((timed, "time_attr"), (weighed, "weight_attr")):
        state = nodes(data, **{option: "one"}).state_dict()
        with pytest.raises(ValueError, match=f"{option}=one, and this one has"):
            nodes(data, **{option: "two"}).load_state_dict(state)
        data.one = data.one + torch.arange(len(data.one)) % 2
        with pytest.raises(ValueError, match="of a loader with values of one="):
            nodes(data, **{option: "one"}).load_state_dict(state)
        state = nodes(data, **{option: "one"}).state_dict()
        data.one = data.one.flip(0)
        with pytest.raises(ValueError, match="of a loader with values of one="):
            nodes(data, **{option: "one"}).load_state_dict(state)


def in_another_order(data):
    """The same edges: other places among those of a node, and so other draws."""
    data.edge_index = data.edge_index.flip(1)
    return data


OTHERS = {
    "num_neighbors=": lambda: nodes(fan_outs=[2, 2]),
    "replace=False": lambda: nodes(replace=True),
    "disjoint=False": lambda: nodes(disjoint=True),
    "subgraph_type=directional": lambda: nodes(subgraph_type="induced"),
    "number of edges=": lambda: nodes(graph(e=399)),
    "edges=": lambda: nodes(graph(seed=8)),
    r"edges=\[": lambda: nodes(in_another_order(graph())),
    "loader=DistNeighborLoader": lambda: DistLayerLoader(
        graph(), [3], batch_size=7, shuffle=True, options=LoaderOptions(seed=1)
    ),
}


@pytest.mark.parametrize("said", OTHERS)
def test_a_state_of_another_loader_is_refused_by_name(said):
    state = nodes().state_dict()
    with pytest.raises(ValueError, match=f"of a loader with {said}"):
        OTHERS[said]().load_state_dict(state)
    nodes(bulk_size=2, prefetch=0).load_state_dict(state)


# Threads -------------------------------------------------------------------------------


def at_work():
    return [t for t in threading.enumerate() if t.name == "pyg_distcomm bulks"]


def gone():
    deadline = time.monotonic() + 60
    while at_work() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not at_work()


def test_the_thread_ends_with_its_loop():
    assert gone()
    for _ in nodes(bulk_size=1):
        assert at_work()
        break
    assert gone()
    with pytest.raises(ZeroDivisionError):
        sum(1 // (b.num_nodes - b.num_nodes) for b in nodes(bulk_size=1))
    assert gone()
    run = iter(nodes(bulk_size=1))
    next(run)
    assert at_work()
    del run
    gc.collect()
    assert gone()
    list(nodes(bulk_size=1))
    assert gone()
    run = iter(nodes(bulk_size=1, prefetch=0))
    next(run)
    assert not at_work()


def test_a_loader_ends_when_it_is_dropped():
    gc.collect()
    gc.disable()  # a cycle would keep its rows, and process groups, until it is found
    try:
        for way in ({}, {"prefetch": 0}):
            loader = nodes(bulk_size=2, **way)
            list(loader)
            alive = weakref.ref(loader)
            del loader
            assert gone()
            assert alive() is None, way
    finally:
        gc.enable()


class OddError(Exception):
    pass


@pytest.mark.parametrize("way", [{}, {"prefetch": 0}, {"bulk_size": 1, "prefetch": 4}])
def test_what_goes_wrong_comes_home(way):
    def fails(batch):
        seen.append(threading.current_thread() is threading.main_thread())
        if len(seen) == 3:
            raise OddError("third")
        return batch

    seen = []
    if not way.get("num_workers"):
        for name in ("transform", "transform_sampler_output"):
            seen.clear()
            with pytest.raises(OddError, match="third"):
                list(nodes(**{name: fails}, **way))
            assert seen == [True] * 3
    loader = nodes(input_nodes=torch.tensor([*range(20), 60]), shuffle=False, **way)
    found = []
    with pytest.raises(ValueError, match=r"span 14 \.\. 60, but there are 60 nodes"):
        found.extend(loader)
    if way.get("bulk_size") == 1:  # those before come out
        assert [batch.input_id[0].item() for batch in found] == [0, 7]
    assert gone()


# Complaints ----------------------------------------------------------------------------


def weighted(*values):
    data = graph()
    data.weight = torch.ones(data.num_edges)
    data.weight[: len(values)] = torch.tensor(values)
    return data


def with_edge(source, target, **kwargs):
    data = graph()
    data.edge_index[:, 7] = torch.tensor([source, target])
    return data


BAD = {
    "fan-out": (lambda: nodes(fan_outs=(2, -2)), "num_neighbors holds -2"),
    "no fan-out": (lambda: nodes(fan_outs=[None]), "num_neighbors holds None"),
    "large fan-out": (lambda: nodes(fan_outs=[2**31]), "below 2\\^31"),
    "large layer": (
        lambda: DistLayerLoader(graph(), [2**63], batch_size=7),
        "below 2\\^63",
    ),
    "seed above": (lambda: nodes(input_nodes=torch.tensor([60])), "0 .. 59"),
    "seed below": (lambda: nodes(input_nodes=torch.tensor([-1])), "span -1 .. -1"),
    "real seeds": (
        lambda: nodes(input_nodes=torch.tensor([1.0])),
        "vector of node ids",
    ),
    "link above": (
        lambda: DistLinkNeighborLoader(
            graph(), [2], edge_label_index=torch.tensor([[1], [60]])
        ),
        "0 .. 59",
    ),
    "nan": (
        lambda: nodes(weighted(1, float("nan")), weight_attr="weight"),
        "holds nan for edge 1",
    ),
    "negative": (lambda: nodes(weighted(-1.0), weight_attr="weight"), "holds -1.0"),
    "zeros": (
        lambda: nodes(weighted(*[0.0] * 400), weight_attr="weight"),
        "all weights in 'weight' are zero",
    ),
    "zeros at a node": (
        lambda: nodes(
            weighted(*(graph().edge_index[1] != 3).float()), weight_attr="weight"
        ),
        "into node 3 are zero",
    ),
    "few weights": (
        lambda: nodes(graph().update({"w": torch.ones(9)}), weight_attr="w"),
        "9 weights for 400 edges",
    ),
    "no such weight": (
        lambda: nodes(weight_attr="w"),
        "no edges have an attribute 'w'",
    ),
    "infinite sum": (
        lambda: nodes(
            graph().update({"w": torch.full((400,), 1e307, dtype=torch.float64)}),
            weight_attr="w",
        ),
        "add up to infinity",
    ),
    "tiny weight": (
        lambda: nodes(
            graph().update({"w": torch.full((400,), 1e-310, dtype=torch.float64)}),
            weight_attr="w",
        ),
        "0 or at least 1e-300",
    ),
    "no such time": (lambda: nodes(time_attr="when"), "'when' is neither"),
    "too many draws": (
        lambda: nodes(fan_outs=[2**31 - 1], replace=True),
        "smaller fan-out, or a smaller batch_size",
    ),
    "fan-out of 33 bits": (lambda: nodes(fan_outs=[2**32]), "holds 4294967296"),
    "complex weights": (
        lambda: nodes(
            graph().update({"w": torch.ones(400, dtype=torch.complex64)}),
            weight_attr="w",
        ),
        "one real number each, got torch.complex64",
    ),
    "edges in a list": (
        lambda: nodes(graph().update({"edge_index": [[0, 1], [1, 2]]})),
        "is a list, wanted a tensor",
    ),
    "time that is nan": (
        lambda: nodes(graph().update({"t": torch.full((60,), np.nan)}), time_attr="t"),
        "NaN",
    ),
    "time of no seed": (
        lambda: nodes(
            graph().update({"t": torch.ones(400)}),
            time_attr="t",
        ),
        "input_time",
    ),
    "not sorted": (lambda: nodes(is_sorted=True), "not sorted by their target"),
    "source above": (lambda: nodes(with_edge(60, 0)), "source nodes .* span 0 .. 60"),
    "target below": (lambda: nodes(with_edge(0, -1)), "target nodes .* span -1"),
    "type": (lambda: nodes(hetero(), input_nodes=("venue", torch.arange(3))), "venue"),
    "fan-outs of types": (
        lambda: DistNeighborLoader(hetero(), {WRITES: [2]}, input_nodes="paper"),
        "cites",
    ),
    "bulk": (lambda: nodes(bulk_size=0), "bulk_size must be"),
    "even": (lambda: nodes(even_batches="cut"), "even_batches must be"),
    "prefetch": (lambda: nodes(prefetch=-1), "prefetch must be"),
    "split": (lambda: nodes(split="no"), "split must be"),
    "no batches": (lambda: nodes(batch_size=None, shuffle=False), "batch_size=None"),
    "mask of another length": (
        lambda: nodes(input_nodes=torch.ones(7).bool()),
        r"mask of shape \[7\], but there are 60 nodes",
    ),
    "mask of layers": (
        lambda: DistLayerLoader(graph(), [2], input_nodes=torch.ones(30).bool()),
        r"a mask of shape \[30\]",
    ),
    "no edge type": (
        lambda: DistLinkNeighborLoader(hetero(), [2], None),
        "is an edge type, or a pair of one",
    ),
    "real links": (
        lambda: DistLinkNeighborLoader(graph(), [2], torch.rand(2, 5)),
        r"must be \[2, k\]",
    ),
    "times of other seeds": (
        lambda: nodes(
            graph().update({"t": torch.arange(60)}),
            input_nodes=[0, 1],
            input_time=torch.arange(5),
            time_attr="t",
        ),
        "input_time must .* of the 2 seeds",
    ),
    "labels of other links": (
        lambda: DistLinkNeighborLoader(graph(), [2], edge_label=torch.ones(401)),
        "edge_label must .* of the 400 seeds",
    ),
    "fan-out that is no list": (
        lambda: DistNeighborLoader(hetero(), 3, input_nodes="paper"),
        "must be a list with a number for each hop",
    ),
    "fan-outs of types, without types": (
        lambda: DistNeighborLoader(graph(), {WRITES: [2]}),
        "have no types",
    ),
    "weights of negatives": (
        lambda: DistLinkNeighborLoader(
            graph(),
            [2],
            neg_sampling=NegativeSampling("binary", src_weight=torch.zeros(60)),
        ),
        "src_weight",
    ),
    "edges that are no ids": (
        lambda: nodes(graph().update({"edge_index": torch.ones(2, 9).bool()})),
        "integer tensor",
    ),
    "seed in words": (lambda: nodes(seed="three"), "seed must be a whole number"),
    "strategy": (
        lambda: nodes(temporal_strategy="first"),
        "temporal_strategy must be",
    ),
}


@pytest.mark.parametrize("which", BAD)
def test_what_cannot_be_is_named(which):
    make, text = BAD[which]
    with pytest.raises((ValueError, KeyError), match=text):
        list(make())


@pytest.mark.parametrize("kind", [DistNeighborLoader, DistLinkNeighborLoader])
def test_an_argument_of_ours_among_those_of_pyg_is_told_where_it_goes(kind):
    for name, value in (("seed", 0), ("bulk_size", 2), ("draws", "labor")):
        said = (
            rf"{kind.__name__}.*'{name}'; did you mean options=LoaderOptions\({name}="
        )
        with pytest.raises(TypeError, match=said):
            kind(graph(), [2], **{name: value})
    with pytest.raises(TypeError, match="'bulk'"):
        kind(graph(), [2], bulk=2)
    with pytest.raises(TypeError, match="must be a LoaderOptions, got dict"):
        kind(graph(), [2], options={"seed": 0})
