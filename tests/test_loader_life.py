"""Loaders over time: times and weights, resuming, threads that end, and complaints."""

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest
import tiers
import torch
from batches import all_same, check, graph, hetero, ids, links, made, nodes
from test_loader import WRITES
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NegativeSampling

from pyg_distcomm.loader import (
    DistLayerLoader,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    LoaderOptions,
)
from pyg_distcomm.loader.batcher import Batcher
from pyg_distcomm.loader.epoch import Phases

# Times and weights -------------------------------------------------------------------


def timed(of, dtype):
    data = graph()
    g = torch.Generator().manual_seed(9)
    size = data.num_nodes if of == "node" else data.num_edges
    data.clock = torch.randint(8, (size,), generator=g).to(dtype)
    of_edge = data.clock[data.edge_index[0]] if of == "node" else data.clock
    return data, of_edge


@tiers.cover(
    ("of", "strategy", "dtype"),
    ["node", "edge"],
    ["uniform", "last"],
    [torch.long, torch.float32],
)
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
    loader = links(data, edge_label_time=when, time_attr="clock", neg_sampling="binary")
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


def test_times_beyond_whole_numbers():
    data, _ = timed("node", torch.long)
    seeds = {"input_nodes": torch.arange(60), "time_attr": "clock"}
    for when, count in ((torch.inf, 400), (-torch.inf, 0)):
        loader = nodes(data, (-1,), input_time=torch.full((60,), when), **seeds)
        assert len(ids(loader)) == count
    with pytest.raises(ValueError, match="NaN"):
        list(nodes(data, input_time=torch.full((60,), torch.nan), **seeds))


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
    loader, whole = nodes(**own), nodes(**own)
    for _, _batch in zip(range(len(loader)), loader, strict=False):
        pass
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)
    later = nodes(**own)
    later.load_state_dict(state)
    list(whole)
    all_same(later, whole)


def test_a_loaded_state_outlives_set_epoch():
    loader, again = nodes(), nodes()
    steps = iter(loader)
    next(steps), next(steps)
    state = loader.state_dict()
    next(iter(again))  # an epoch begun before does not count
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.set_epoch(state["epoch"])
    all_same(again, steps)
    again.set_epoch(7)
    assert (again.state_dict()["epoch"], again.state_dict()["batches"]) == (7, 0)


def test_states_that_do_not_fit_are_refused():
    state = nodes().state_dict()
    for other in (nodes(batch_size=8), nodes(input_nodes=torch.arange(9))):
        with pytest.raises(ValueError, match="other inputs, batch size or shuffling"):
            other.load_state_dict(state)
    no_state = None, 3, [], {**state, "made_from": None}, {**state, "batches": -1}
    for wrong, told in (
        ({"seed": 1, "batches": 0, "inputs": ""}, "'epoch'"),
        ({**state, "ranks": 2}, "split over 2 ranks, and this one"),
        *((wrong, "not the state of a loader") for wrong in no_state),
    ):
        with pytest.raises(ValueError, match=told):
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
    "draws=neighbor": lambda: nodes(draws="labor"),
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


@pytest.fixture
def machine(monkeypatch):
    """Sets the cores of this process, torch's threads, and the ranks of its host."""
    before = torch.get_num_threads()

    def set_up(cores, used, ranks=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        torch.set_num_threads(used)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    yield set_up
    torch.set_num_threads(before)


# cores, torch's threads, ranks; prefetch, and on how many threads bulks are built
CASES = [
    (1, 1, None, "auto", 0, 1),
    (1, 2, None, "auto", 0, 2),
    (2, 2, None, "auto", 0, 2),
    (2, 1, None, "auto", 1, 1),
    (8, 2, None, "auto", 1, 2),
    (8, 6, None, "auto", 1, 2),
    (8, 2, 2, "auto", 1, 2),
    (8, 2, 4, "auto", 0, 2),
    (8, 2, 16, "auto", 0, 2),
    (2, 2, None, 1, 1, 1),
    (8, 2, None, 3, 3, 2),
    (8, 2, None, 0, 0, 2),
]


@pytest.mark.parametrize("case", CASES)
def test_bulks_are_built_on_idle_cores(case, machine):
    cores, used, ranks, prefetch, ahead, width = case
    machine(cores, used, ranks)
    bulk = Batcher(nodes(prefetch=prefetch), Phases())
    assert (bulk.ahead, bulk.width) == (ahead, width)
    if prefetch == "auto" and used <= cores // (ranks or 1):
        assert used + ahead * width <= cores // (ranks or 1)


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


def having(**rows):
    """A graph with more rows."""
    return graph().update(rows)


def weighing(values):
    """Options that give weights to a graph whose edges have them."""
    return {"data": having(w=torch.as_tensor(values)), "weight_attr": "w"}


def with_edge(source, target):
    data = graph()
    data.edge_index[:, 7] = torch.tensor([source, target])
    return {"data": data}


def with_times(count):
    data = HeteroData()
    data["a"].num_nodes = 60
    data["a", "to", "a"].edge_index = graph().edge_index
    data["a", "to", "a"].time = torch.randperm(count)
    return {"data": data, "time_attr": "time", "input_nodes": "a"}


layers = made(DistLayerLoader, batch_size=7)
ONES = torch.ones(400)
OF_TYPES = {"data": hetero(), "input_nodes": "paper"}
BAD = {
    nodes: (
        ({"fan_outs": (2, -2)}, "num_neighbors holds -2"),
        ({"fan_outs": [None]}, "num_neighbors holds None"),
        ({"fan_outs": [2**31]}, "below 2\\^31"),
        ({"fan_outs": [2**32]}, "holds 4294967296"),
        (
            {"fan_outs": [2**31 - 1], "replace": True},
            "fan-out, or a smaller batch_size",
        ),
        ({"data": hetero(), "input_nodes": ("venue", torch.arange(3))}, "venue"),
        ({"input_nodes": torch.tensor([60])}, "0 .. 59"),
        ({"input_nodes": torch.tensor([-1])}, "span -1 .. -1"),
        ({"input_nodes": torch.tensor([1.0])}, "vector of node ids"),
        (
            {"input_nodes": torch.ones(7).bool()},
            r"mask of shape \[7\], but there are 60",
        ),
        (weighing([1, torch.nan, *[1.0] * 398]), "holds nan for edge 1"),
        (weighing(-ONES), "holds -1.0"),
        (weighing(0 * ONES), "all weights in 'w' are zero"),
        (weighing((graph().edge_index[1] != 3).float()), "into node 3 are zero"),
        (weighing(ONES[:9]), "9 weights for 400 edges"),
        (weighing(1e307 * ONES.double()), "add up to infinity"),
        (weighing(1e-310 * ONES.double()), "0 or at least 1e-300"),
        (
            weighing(ONES.to(torch.complex64)),
            "one real number each, got torch.complex64",
        ),
        ({"data": having(t=torch.full((60,), np.nan)), "time_attr": "t"}, "NaN"),
        ({"data": having(t=ONES), "time_attr": "t"}, "input_time"),
        (
            {
                "data": having(t=torch.arange(60)),
                "input_nodes": [0, 1],
                "input_time": torch.arange(5),
                "time_attr": "t",
            },
            "input_time must .* of the 2 seeds",
        ),
        *(
            (with_times(k), f"there are {k} times for 400 edges")
            for k in (399, 401, 40_000)
        ),
        ({"temporal_strategy": "first"}, "temporal_strategy must be"),
        ({"data": having(edge_index=[[0, 1], [1, 2]])}, "is a list, wanted a tensor"),
        ({"data": having(edge_index=torch.ones(2, 9).bool())}, "integer tensor"),
        ({"is_sorted": True}, "not sorted by their target"),
        (with_edge(60, 0), "source nodes .* span 0 .. 60"),
        (with_edge(0, -1), "target nodes .* span -1"),
        ({"even_batches": "cut"}, "even_batches must be"),
        ({"prefetch": -1}, "prefetch must be"),
        ({"split": "no"}, "split must be"),
        ({"batch_size": None, "shuffle": False}, "batch_size=None"),
        ({"seed": "three"}, "seed must be a whole number"),
        ({"draws": "ladies"}, "draws must be one of"),
        ({"draws": "labor", "replace": True}, "without replacement"),
    ),
    made(DistNeighborLoader): (
        ({**OF_TYPES, "num_neighbors": {WRITES: [2]}}, "cites"),
        ({**OF_TYPES, "num_neighbors": 3}, "must be a list with a number for each hop"),
        ({"data": graph(), "num_neighbors": {WRITES: [2]}}, "have no types"),
    ),
    links: (
        ({"data": hetero()}, "is an edge type, or a pair of one"),
        ({"edge_label": torch.ones(401)}, "edge_label must .* of the 400 seeds"),
        (
            {"neg_sampling": NegativeSampling("binary", src_weight=torch.zeros(60))},
            "src_weight",
        ),
    ),
    layers: (
        ({"data": graph(), "num_nodes_per_layer": [2**63]}, "below 2\\^63"),
        (
            {
                "data": graph(),
                "num_nodes_per_layer": [2],
                "input_nodes": torch.ones(30).bool(),
            },
            r"a mask of shape \[30\]",
        ),
    ),
}


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [(make, *case) for make, cases in BAD.items() for case in cases],
)
def test_what_cannot_be_is_named(make, options, said):
    with pytest.raises((ValueError, KeyError), match=said):
        list(make(**options))


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
