"""Loaders of a graph spread over ranks yield the batches of the whole graph."""

import gc
import re
import time
from functools import partial

import batches
import pytest
import tiers
import torch
import torch.distributed as dist
import worlds
from batches import arguments, graph, hetero, rich, same, share_of, timed_types
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import new_process_grid
from pyg_distcomm.loader import (
    DistFeatureStore,
    DistLayerLoader,
    DistLinkNeighborLoader,
    DistNeighborLoader,
)
from pyg_distcomm.sampling import (
    FastGCN,
    KeyedLayerSampler,
    KeyedNeighborSampler,
    Ladies,
)

pytestmark = pytest.mark.usefixtures("place")

GRIDS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4)]
HERE = {"bulk_size": 3}
THERE = {"sample_at": "requester", "bulk_size": 2}
WHOLE = {"topology": "replicated", "prefetch": 0}
CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
WRITTEN = "paper", "written", "author"


def edges_of(*pairs):
    """Seven nodes, and few edges."""
    ends = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T.contiguous()
    return Data(x=torch.arange(14.0).view(7, 2), edge_index=ends)


FEW = {
    "three edges": partial(edges_of, (1, 0), (3, 0), (5, 2)),
    "no edges": edges_of,
    "one loop": partial(edges_of, (2, 2)),
}


def late_types():
    """Times of targets, and not of all sources; a type without edges or attributes."""
    data = hetero()
    data["paper"].time = torch.arange(40)
    data["late"].num_nodes = 7
    return data


def masked(d):
    return {"input_nodes": d.train_mask}


def of_papers(**options):
    return {"input_nodes": "paper", **options}


EARLY = torch.rand(60, generator=torch.Generator().manual_seed(2))
TIMED = {"input_nodes": torch.arange(60), "time_attr": "edge_time"}
# the graph, and options: those of a graph are a function, of the share where it is `own`
NODES = {
    "own mask": (rich, masked),
    "all": (graph, {"sizes": [4, 3, -1]}),
    "equal seeds": (graph, {"input_nodes": torch.tensor([5, 5, 7, 59])}),
    "a tuple of seeds": (graph, {"input_nodes": (1, 2, 3)}),
    "one batch": (graph, {"batch_size": 64}),
    "dropped": (graph, {"even_batches": "drop"}),
    "replace": (graph, {"replace": True}),
    "disjoint": (graph, {"disjoint": True}),
    "induced": (graph, {"subgraph_type": "induced"}),
    "bidirectional": (graph, {"subgraph_type": "bidirectional"}),
    "weighted": (rich, {"weight_attr": "weight"}),
    "weighted, replace": (rich, {"weight_attr": "weight", "replace": True}),
    "labor": (rich, {"draws": "labor"}),
    "weighted labor": (rich, {"weight_attr": "weight", "draws": "labor"}),
    "node times": (rich, {"time_attr": "time"}),
    "latest": (rich, {"time_attr": "time", "temporal_strategy": "last"}),
    "edge times": (rich, {**TIMED, "input_time": EARLY}),
    "edge times, weighted": (
        rich,
        {**TIMED, "input_time": EARLY + 1, "weight_attr": "weight"},
    ),
    "times, labor": (rich, {"time_attr": "time", "draws": "labor"}),
    "types": (hetero, {"input_nodes": ("paper", torch.arange(30))}),
    "other types": (hetero, {"input_nodes": "author", "sizes": [4, 3, -1]}),
    "sizes of types": (
        hetero,
        of_papers(sizes={CITES: [3, 0], WRITES: [2, 2], WRITTEN: [-1, 4]}),
    ),
    "times of types": (timed_types, of_papers(time_attr="time")),
    "induced types": (hetero, of_papers(subgraph_type="induced")),
    "seeds in a list": (
        late_types,
        {"input_nodes": ["paper", torch.arange(6)], "time_attr": "time"},
    ),
    "a mask of a type": (
        late_types,
        {"input_nodes": ("paper", torch.arange(40) < 6), "time_attr": "time"},
    ),
    "a type without edges": (late_types, {"input_nodes": "late"}),
    "no rows": (lambda: Data(edge_index=graph().edge_index, num_nodes=60), {}),
    "a generator": (
        graph,
        lambda d: {"generator": torch.Generator().manual_seed(5), "seed": None},
    ),
    **{
        f"hops {hops}": (graph, {"sizes": hops})
        for hops in ([0], [2, 0], [0, 2], [2, 0, 2])
    },
    **{name: (make, {}) for name, make in FEW.items()},
    **{f"{k}, induced": (m, {"subgraph_type": "induced"}) for k, m in FEW.items()},
}


def pairs(d):
    return {"edge_label_index": d.edge_index[:, ::3], "batch_size": 25}


def paired(**options):
    return lambda d: {**pairs(d), **options}


def timed_pairs(d):
    when = d.time[d.edge_index[1, ::3]] + 5
    return {**pairs(d), "edge_label_time": when, "time_attr": "time"}


def timed_typed_pairs(d):
    ends = d[WRITES].edge_index[:, :40]
    when = d["paper"].time[ends[1]] + 20
    given = {"edge_label_index": (WRITES, ends), "edge_label_time": when}
    return {**given, "time_attr": "time", "neg_sampling": TWO}


def weighted_pairs(d):
    source, target = d.x[:, 0].abs(), d.x[:, 1].abs()
    drawn = NegativeSampling("binary", 1.5, src_weight=source, dst_weight=target)
    return {"edge_label_index": d.edge_index, "neg_sampling": drawn, "batch_size": 50}


TWO = NegativeSampling("triplet", 2)
BY_WEIGHT = NegativeSampling("triplet", 2, dst_weight=torch.arange(60) % 3 + 0.5)
LINKS = {
    "pairs": (graph, pairs),
    "all edges": (graph, {"batch_size": 50}),
    "own edges": (
        graph,
        lambda d: {"edge_label_index": d.edge_index, "batch_size": 50},
    ),
    "one edge of other strides": (
        graph,
        lambda d: {"edge_label_index": d.edge_index[:, ::3][:, :1]},
    ),
    "labels": (graph, paired(edge_label=torch.arange(134), neg_sampling="binary")),
    "ratio": (graph, paired(neg_sampling_ratio=1.5)),
    "triplets": (graph, paired(neg_sampling=BY_WEIGHT)),
    "own weights": (graph, weighted_pairs),
    "disjoint": (graph, paired(neg_sampling="binary", disjoint=True)),
    "disjoint triplets": (graph, paired(neg_sampling=TWO, disjoint=True)),
    "bidirectional": (graph, paired(subgraph_type="bidirectional")),
    "times": (rich, timed_pairs),
    "times, negatives": (rich, lambda d: {**timed_pairs(d), "neg_sampling": "binary"}),
    "types": (
        hetero,
        {"edge_label_index": WRITES, "neg_sampling": "binary", "batch_size": 30},
    ),
    "one type": (
        hetero,
        lambda d: {
            "edge_label_index": (CITES, d[CITES].edge_index[:, :30]),
            "neg_sampling": NegativeSampling("triplet", 1),
            "disjoint": True,
        },
    ),
    "times of types": (timed_types, timed_typed_pairs),
}


def halved(p):
    return p.with_value(p.values.sqrt())


class Halved(Ladies):
    """A rule of a script's own; each rank has it at another address."""

    __repr__ = object.__repr__

    def judge(self, p, scale):
        return halved(p)


def of_rule(rule, make=rich, sizes=(6, 9), **options):
    return make, {"rule": rule, "sizes": list(sizes), **options}


LAYERS = {
    "own mask": (rich, lambda d: {**masked(d), "rule": "ladies", "sizes": [6, 9]}),
    "debiased": of_rule("ladies", weights="debiased"),
    "without weights": of_rule(Ladies("cagnet"), weights=None, sizes=(6, 9, -1)),
    "paper": of_rule(Ladies("paper"), weights="debiased"),
    "replace": of_rule(Ladies("paper"), replace=True, weights="importance"),
    "weighted": of_rule(
        Ladies(), weight_attr="weight", weights="importance", replace=True
    ),
    "shared": of_rule(FastGCN(), weights="debiased", sizes=(6, 9, -1)),
    "weighted, shared": of_rule("fastgcn", weight_attr="weight"),
    "a function": of_rule(halved, weight_attr="weight", keep_batch=False),
    "a class": of_rule(Halved()),
    **{
        f"{name}, {rule}": of_rule(rule, make)
        for name, make in FEW.items()
        for rule in ("ladies", "fastgcn")
    },
}


def loaders_of(kind, data, share, options, own, **more):
    """Two loaders of one kind and with the same options: of a graph, and of its share."""
    common = {"batch_size": 7, "shuffle": True, "seed": 11}
    for given, where in ((data, {}), (share, more)):
        found = (
            options if isinstance(options, dict) else options(given if own else data)
        )
        made = {**common, **found, **where}
        sizes = made.pop("sizes", [3, 2])
        if isinstance(made.get("rule"), Halved):
            kept = [Halved() for _ in range(worlds.mesh().rank + 1)]
            made["rule"] = kept[-1]
        yield kind(given, sizes, **arguments(**made))


def compare(kind, cases, c, where, turn):
    """Asserts that a share yields what the graph does; returns the loaders of a turn."""
    known, every = {}, []
    for k, (name, (make, options)) in enumerate([*cases.items()][turn]):
        if make not in known:
            data = make()
            known[make] = data, share_of(data, worlds.mesh())
        own, more = name.startswith("own"), {"replication": c, **where}
        two = list(loaders_of(kind, *known[make], options, own, **more))
        batches.equal_epochs(*two, 2 if k < 2 else 1)
        every.append(two)
    return every


def on_grids(*default):
    """Every case on each grid; by default, a turn of them on each of a few."""
    grids = [(*grid, where) for grid in GRIDS for where in (HERE, THERE, WHOLE)]
    every = [(*grid, slice(None)) for grid in grids]
    names = "size", "c", "where", "turn"
    return tiers.parametrize(names, [*default, *every], slice(len(default)))


FIRST, SECOND = slice(0, None, 2), slice(1, None, 2)
FEWER, OTHERS = slice(2, None, 4), slice(0, None, 4)


@on_grids((2, 1, HERE, SECOND), (2, 1, THERE, FEWER), (2, 2, WHOLE, OTHERS))
@worlds.on()
def test_batches_are_those_of_the_whole_graph(size, c, where, turn):
    compare(DistNeighborLoader, NODES, c, where, turn)


@on_grids((2, 1, HERE, FIRST), (2, 1, THERE, slice(1, None, 4)))
@worlds.on()
def test_links_of_a_share_are_those_of_the_whole_graph(size, c, where, turn):
    compare(DistLinkNeighborLoader, LINKS, c, where, turn)


@on_grids((2, 1, HERE, FIRST), (2, 1, THERE, slice(1, None, 4)))
@worlds.on()
def test_layers_are_those_of_the_whole_graph(size, c, where, turn):
    for two in compare(DistLayerLoader, LAYERS, c, where, turn):
        scales = {loader.neighbor_sampler_in_use.graph.scale for loader in two}
        assert len(scales) == 1


# The life of an epoch ------------------------------------------------------------------


def built(share=None, **options):
    """A share, and a loader of it."""
    share = share_of(rich(), worlds.mesh()) if share is None else share
    given = {"num_neighbors": [3, 2], "batch_size": 4, "seed": 7, "shuffle": True}
    return share, DistNeighborLoader(share, **arguments(**{**given, **options}))


@tiers.parametrize("size", [2, 3], [2])
@tiers.parametrize("prefetch", [0, 1, 2], [1])
@worlds.on()
def test_an_epoch_can_be_left_and_resumed(size, prefetch):
    _, loader = built(bulk_size=size - 1, prefetch=prefetch)
    whole = list(loader)
    for count in (1, 2, 3):
        loader.set_epoch(0)
        for k, batch in enumerate(loader):
            same(batch.n_id, whole[k].n_id)
            if k + 1 == count:
                break
    loader.set_epoch(0)
    left = iter(loader)  # begun, and left where it is
    next(left)
    loader.set_epoch(0)
    steps = iter(loader)
    head = [next(steps), next(steps)]
    _, other = built()
    other.load_state_dict(loader.state_dict())
    tail = list(other)
    batches.all_same(
        [b.to_dict() for b in [*head, *tail]], [b.to_dict() for b in whole]
    )
    if prefetch:
        with pytest.raises(RuntimeError, match="another epoch of the loader has begun"):
            list(zip(loader, loader, strict=True))
    assert len(list(loader)) == len(loader)


@worlds.on(2)
def test_states_of_a_share_are_those_of_the_whole_graph():
    data = rich()
    share = share_of(data, worlds.mesh())
    for name in ({"weight_attr": "weight"}, {"time_attr": "time"}):
        one, two = (
            built(d, **name)[1].state_dict()["made_from"] for d in (data, share)
        )
        assert one == two
        assert any(key.startswith("values of") for key in one)


def told(loader, count=None):
    """What ends the epoch of a loader."""
    try:
        for k, _ in enumerate(loader, 1):
            if k == count:
                return "stopped"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _ends(how, prefetch):
    mesh = worlds.mesh(fresh=True)
    seen = []

    def transform(batch):
        seen.append(batch)
        if mesh.rank == 1 and len(seen) == 3:
            raise KeyError("nothing of that name")
        return batch

    options = {"batch_size": 2, "bulk_size": 2, "prefetch": prefetch}
    if how == "stops":
        _, loader = built(**{**options, "bulk_size": 1})
        return told(loader, 1 if mesh.rank == 0 else None)
    if how == "weights":  # of all edges into one node, which rank 0 has
        data = rich()
        data.weight = (data.edge_index[1] != 3).float()
        seeds = {"input_nodes": torch.arange(8), "weight_attr": "weight"}
        owner = torch.arange(60) % 3 // 2
        return told(built(pdc.partition(data, mesh, owner), **options, **seeds)[1])
    return told(built(**options, **{how: transform})[1])


NAMED = "KeyError: 'nothing of that name'"


@tiers.parametrize(
    ("how", "prefetch", "other", "one"),
    [
        ("stops", 1, "stopped", r"rank\(s\) 0 stopped in the middle of an epoch"),
        *(("weights", k, *["all edges into node 3 are zero"] * 2) for k in (0, 1)),
        *(("transform", k, NAMED, NAMED) for k in (0, 1)),
        *(("transform_sampler_output", k, NAMED, NAMED) for k in (0, 1)),
    ],
    slice(0, None, 2),
)
def test_what_ends_an_epoch_on_one_rank_ends_it_on_all(how, prefetch, other, one):
    found = worlds.run(_ends, 2, how, prefetch)
    for said, wanted in zip(found, (other, one), strict=True):
        assert re.search(wanted, said), said


@tiers.parametrize("prefetch", [0, 1], [1])
@worlds.on(2)
def test_loaders_leave_no_process_groups_behind(prefetch):
    share, loader = built(prefetch=prefetch)
    list(loader)
    gc.collect()  # groups of the tests before
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(4):
        list(built(share, batch_size=9)[1])
    gc.collect()
    assert len(dist.distributed_c10d._world.pg_map) <= groups


@worlds.on(2)
def test_sampling_and_fetching_run_ahead_of_training_and_not_too_far():
    mesh = worlds.mesh()
    _, loader = built(batch_size=2, bulk_size=1)
    steps = iter(loader)
    next(steps)

    def travelled(op, axis):
        entry = mesh.ledger.entries.get((op, axis))
        return entry.calls if entry else 0

    def fetched():
        return travelled("fetch_rows", "fetch:row")

    def sampled():  # in two hops each
        return travelled("frontier", "sample:row") // 2

    deadline = time.monotonic() + 60
    # the loop has taken one batch: the second is fetched, the third is sampled
    while time.monotonic() < deadline and (fetched() < 2 or sampled() < 3):
        time.sleep(0.01)
    assert fetched() >= 2
    assert sampled() >= 3
    time.sleep(0.5)
    # and no more than may wait: in use, waiting, held by each stage, between them
    assert fetched() <= 3
    assert sampled() <= 5
    for k, _ in enumerate(steps):  # training talks at its own pace, in its own groups
        time.sleep(0.002 * ((k + mesh.rank) % 3))
        total = collectives.all_reduce(torch.ones(3), mesh.world)
        assert total.tolist() == [2] * 3
    names = {"sample", "fetch", "assemble", "wait", "train"}
    assert names == set(loader.phases.by_name)
    assert loader.phases["fetch"].bytes == mesh.ledger.total("bytes", axis="fetch:row")
    for k, _ in enumerate(loader):
        if k == 2:
            mesh.ledger.reset()  # phases do not depend on it
    assert all(loader.phases[name].bytes > 0 for name in ("sample", "fetch"))
    assert "sample" in str(loader.phases)


# Rows ----------------------------------------------------------------------------------


@tiers.parametrize(("size", "c"), [(1, 1), (2, 1), (2, 2)], slice(1, 2))
@worlds.on()
def test_rows_come_from_the_store_that_is_given(size, c):
    data, road = rich(), new_process_grid(worlds.mesh(), c)
    share, plain = built(replication=c)
    plain = list(plain)
    store = DistFeatureStore.from_data(share, road, cache=0.3)
    more = torch.arange(data.num_nodes * 3.0).view(-1, 3)
    store.add(None, "more", more[share.edge_index.nodes.gid])
    for one, two in zip(plain, built(share, features=store)[1], strict=True):
        same(one.x, two.x)
        same(one.edge_attr, two.edge_attr)
        same(two.more, more[two.n_id])
    _, loader = built(share, features=store)
    store.remove_tensor(None, "more", None)
    store.put_tensor(more + 1, None, "more", None)
    for batch in loader:  # takes what the store has now
        same(batch.more, more[batch.n_id] + 1)
    lossy = DistFeatureStore.from_data(share, road, wire="int8")
    for one, two in zip(plain, built(share, features=lossy)[1], strict=True):
        same(one.y, two.y)
        assert (one.x - two.x).abs().max() < 0.05
    share.x.requires_grad_()
    with pytest.raises(TypeError, match="requires a gradient"):
        built(share)


@tiers.parametrize("c", [1, 2], [1])
@worlds.on(2)
def test_rows_that_change_are_seen_at_the_next_epoch(c):
    share, loader = built(replication=c)
    want = rich().x
    for turn in ("as they were", "changed", "replaced", "changed on one rank"):
        for batch in loader:
            assert torch.equal(batch.x, want[batch.n_id])
        if turn == "as they were":
            share.x.to_local().add_(1.0)
            want = want + 1
        if turn == "changed":
            share.x = share.x * 2.0
            want = want * 2
        if turn == "replaced":
            want[share.edge_index.nodes.partition.gids(0)[0]] = 7.0
            if worlds.mesh().rank == 0:
                share.x.to_local()[0] = 7.0


# Refusals ------------------------------------------------------------------------------


class Endless:
    """Batches of a script that does not say how many."""

    def __iter__(self):
        yield from ([0, 1], [2, 3])


KINDS = DistNeighborLoader, DistLinkNeighborLoader, DistLayerLoader
ALL_WRONG = (
    (KINDS, {"topology": "shared"}, "topology must be one of"),
    (KINDS, {"num_workers": 2}, "num_workers=2"),
    (KINDS, {"bulk_size": 0}, "bulk_size must be"),
    (KINDS, {"features": {}}, "features must be a DistFeatureStore"),
    (KINDS, {"sample_at": "home"}, "sample_at must be one of"),
    (KINDS, {"replication": 3}, "may be one of"),
    (KINDS, {"split": False}, "split=False"),
    (KINDS, {"weight_attr": "heavy"}, "no edges have an attribute 'heavy'"),
    (KINDS, {"weight_attr": "edge_index"}, "no row for each edge of the share"),
    (KINDS[:1], {"input_nodes": torch.ones(3).bool()}, "is a mask of shape"),
    (KINDS[:1], {"input_nodes": "paper"}, "names a node type"),
    (KINDS[:1], {"time_attr": "when"}, "neither a node-level or edge-level"),
    (KINDS[:1], {"batch_sampler": Endless(), "batch_size": 1}, "without a length"),
    (KINDS[:1], {"time_attr": "time", "is_sorted": True}, "do not ascend"),
    (KINDS[1:2], {"edge_label_index": torch.arange(4)}, r"must be \[2, k\]"),
    (KINDS[1:2], {"edge_label_index": torch.rand(2, 5)}, r"must be \[2, k\]"),
    (KINDS[1:2], {"edge_label_index": torch.tensor([[0], [60]])}, "there are 60 nodes"),
)
# on rank 1 only, with what the other rank has
BY_TARGET = [
    NegativeSampling("binary", dst_weight=torch.arange(60) + r) for r in (1, 2)
]
ONE_WRONG = (
    *((kinds, {}, options, said) for kinds, options, said in ALL_WRONG[:4]),
    (KINDS, {}, {"foo": 1}, r"rank 1: .*'foo'"),
    (KINDS[:2], {}, {"num_neighbors": [3]}, "the same num_neighbors"),
    (KINDS, {}, {"seed": 1}, "same seed: it is 0 on rank 0, and 1 on rank 1"),
    (KINDS[:1], {}, {"input_nodes": object()}, "vector of node ids"),
    (
        KINDS[:1],
        {"input_nodes": torch.arange(2), "batch_size": 1},
        {"input_nodes": torch.empty(0).long()},
        r"got \[2, 0\] batches on the ranks",
    ),
    (
        KINDS[:1],
        {"input_nodes": torch.arange(2)},
        masked,
        r"the same input_nodes: it is .* and rows of the share on rank 1",
    ),
    (KINDS[1:2], {}, {"edge_label_index": graph().edge_index}, "edge_label_index"),
    (KINDS[1:2], {}, {"neg_sampling": "foo"}, "'foo' is not a valid"),
    (
        KINDS[1:2],
        {"neg_sampling": "binary"},
        {"neg_sampling": None},
        "neg_sampling=NegativeSampling",
    ),
    *(
        (
            KINDS[1:2],
            {"neg_sampling": one},
            {"neg_sampling": BY_TARGET[0]},
            "neg_sampling=NegativeSampling",
        )
        for one in ("binary", BY_TARGET[1])
    ),
    (KINDS[2:], {}, {"num_nodes_per_layer": [-2]}, "num_nodes_per_layer must hold"),
)


def refuses(kinds, given, options, said):
    """Asserts that no kind of loader can be made, or gone through."""
    for kind in kinds:
        sizes = "num_nodes_per_layer" if kind is DistLayerLoader else "num_neighbors"
        made = {sizes: [2, 2], "batch_size": 4, "seed": 0, **options}
        with pytest.raises((TypeError, ValueError), match=said):
            list(kind(given, **arguments(**made)))


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_what_is_wrong_is_refused_on_all_ranks(size):
    mesh, data = worlds.mesh(), rich()
    share = share_of(data, mesh)
    for kinds, options, said in ALL_WRONG:
        refuses(kinds, share, options, said)
    refuses(KINDS, data, {"topology": "partitioned"}, "each rank holds whole")
    short = DistFeatureStore.from_replicated(torch.zeros(50, 3), new_process_grid(mesh))
    said = "50 rows of 'x', and a graph with 60"
    refuses(KINDS[:1], share, {"features": short}, said)
    typed = share_of(hetero(), mesh)
    types, said = list(typed.node_types), "seeds of a HeteroData are a node type"
    for seeds in (None, torch.ones(40).bool(), "papre", ("papre", torch.arange(3))):
        refuses(KINDS[:1], typed, {"input_nodes": seeds}, said)
    assert typed.node_types == types
    said = "no edges have an attribute 'heavy'"
    refuses(KINDS[:1], typed, of_papers(weight_attr="heavy"), said)
    bare = HeteroData()
    bare["a"].x = torch.zeros(5, 1)
    bare = share_of(bare, mesh)
    refuses(KINDS[:1], bare, {"input_nodes": "a"}, "without edges to sample")
    for sampler in (KeyedNeighborSampler, KeyedLayerSampler):
        with pytest.raises(TypeError, match=r"share of pdc\.partition"):
            sampler(share, [2])


@worlds.on(2)
def test_what_one_rank_alone_has_wrong_is_refused_on_all():
    rank, data = worlds.mesh().rank, rich()
    share = share_of(data, worlds.mesh())
    for kinds, options, of_one, said in ONE_WRONG:
        of_one = of_one(share) if callable(of_one) else of_one
        refuses(kinds, share, {**options, **(of_one if rank else {})}, said)
    none = torch.empty(0).long() if rank else torch.arange(2)
    dropped = {"input_nodes": none, "batch_size": 1, "even_batches": "drop"}
    assert not list(built(share, **dropped)[1])
    share.time = share.time.double()
    if rank == 0:
        share.time.to_local()[0] = float("nan")
    refuses(KINDS[:1], share, {"time_attr": "time"}, "holds NaN")


def test_edges_that_were_not_cut_are_named():
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(6, 2), torch.randn(4, 2)
    ends = torch.tensor([[0, 5, 2], [3, 1, 0]])
    data["a", "to", "b"].edge_index = ends
    share = pdc.partition(data, worlds.mesh())
    share["a", "new", "b"].edge_index = ends
    with pytest.raises(TypeError, match=r"'new', 'b'.*before pdc\.partition"):
        DistNeighborLoader(share, [2], input_nodes="b")
