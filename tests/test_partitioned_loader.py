"""Loaders of a graph spread over ranks yield the batches of the whole graph."""

from __future__ import annotations

import time

import batches
import pytest
import tiers
import torch
import worlds
from test_partitioned_sampling import owners, timed
from torch_geometric.data import HeteroData

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import new_process_grid
from pyg_distcomm.loader import (
    DistFeatureStore,
    DistLayerLoader,
    DistNeighborLoader,
    LoaderOptions,
)
from pyg_distcomm.sampling import KeyedLayerSampler, KeyedNeighborSampler, Ladies

pytestmark = pytest.mark.usefixtures("place")

GRIDS = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)]


def masked():
    data = batches.graph()
    data.train_mask = torch.arange(data.num_nodes) % 3 == 0
    data.name = "a graph-level attribute"
    return data


def weighted():
    data = masked()
    data.weight = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1))
    return data


def cut(data, size):
    if hasattr(data, "node_types"):
        return {
            t: owners(data[t].num_nodes, size, k) for k, t in enumerate(data.node_types)
        }
    return owners(data.num_nodes, size)


def load(size, c, make, nodes, options):
    mesh = worlds.mesh()
    data = make()
    share = pdc.partition(data, mesh, cut(data, size))
    given = {
        "num_neighbors": [3, 2],
        "batch_size": 5,
        "shuffle": True,
        "seed": 11,
        **options,
    }
    plain = {
        k: v
        for k, v in given.items()
        if k not in ("topology", "sample_at", "replication", "bulk_size", "prefetch")
    }
    pick = {"mask": lambda d: d.train_mask, "all": lambda d: None}.get(
        nodes, lambda d: nodes
    )
    whole = DistNeighborLoader(
        data, **batches.arguments(input_nodes=pick(data), **plain)
    )
    part = DistNeighborLoader(
        share, **batches.arguments(input_nodes=pick(share), replication=c, **given)
    )
    batches.equal_epochs(whole, part)


@tiers.parametrize(("size", "c"), GRIDS, [(2, 1)])
def test_batches_are_those_of_the_whole_graph(size, c):
    ways = (
        (masked, "mask", {}),
        (masked, "all", {"sample_at": "requester", "bulk_size": 3}),
        (masked, "mask", {"topology": "replicated", "batch_size": 64}),
        (masked, torch.tensor([5, 5, 7, 59]), {"prefetch": 0}),
        (masked, "mask", {"subgraph_type": "bidirectional", "even_batches": "drop"}),
        (timed, "all", {"time_attr": "time", "batch_size": 16}),
        (timed, "all", {"time_attr": "time", "topology": "replicated"}),
        (batches.hetero, ("paper", torch.arange(30)), {"batch_size": 4}),
        (batches.hetero, "author", {"topology": "replicated"}),
        (weighted, "mask", {"weight_attr": "weight", "draws": "labor"}),
        (timed, "all", {"time_attr": "time", "batch_size": 16, "draws": "labor"}),
    )
    for make, nodes, options in ways[:: 1 if size < 4 else 2]:
        worlds.run(load, size, size, c, make, nodes, options)


def halved(p):
    return p.with_value(p.values.sqrt())


class Halved(Ladies):
    """A rule of a script's own; each rank has it at another address."""

    __repr__ = object.__repr__

    def judge(self, p, scale):
        return halved(p)


def load_layers(size, c, make, rule, options):
    mesh = worlds.mesh()
    data = make()
    if isinstance(rule, Halved):
        kept = [Halved() for _ in range(mesh.rank + 1)]
        rule = kept[-1]
    share = pdc.partition(data, mesh, cut(data, size))
    given = {"batch_size": 5, "shuffle": True, "seed": 11, **options}
    plain = {
        k: v
        for k, v in given.items()
        if k not in ("topology", "sample_at", "bulk_size")
    }
    whole = DistLayerLoader(
        data, [6, 9], rule, **batches.arguments(input_nodes=data.train_mask, **plain)
    )
    part = DistLayerLoader(
        share,
        [6, 9],
        rule,
        share.train_mask,
        **batches.arguments(replication=c, **given),
    )
    for batch in batches.equal_epochs(whole, part):
        loops = batch.e_id < 0
        real = batch.e_id[~loops]
        assert torch.equal(batch.edge_attr[~loops], data.edge_attr[real])
        assert not batch.edge_attr[loops].any()
        assert torch.equal(batch.x, data.x[batch.n_id])
        ends = batch.n_id[batch.edge_index]
        assert torch.equal(ends[:, ~loops], data.edge_index[:, real])
        assert torch.equal(ends[0, loops], ends[1, loops])
        assert len(batch.edge_weight) == batch.num_edges


@tiers.parametrize(("size", "c"), GRIDS, [(2, 1)])
def test_layers_are_those_of_the_whole_graph(size, c):
    for rule, options in (
        ("ladies", {}),
        ("ladies", {"sample_at": "requester", "weights": "debiased"}),
        ("fastgcn", {"bulk_size": 2}),
        (halved, {"topology": "replicated"}),
        (Halved(), {"prefetch": 0}),
        (Ladies("paper"), {"prefetch": 0, "replace": True, "weights": "importance"}),
    ):
        worlds.run(load_layers, size, size, c, masked, rule, options)


# The life of an epoch ------------------------------------------------------------------


def built(size, c=1, data=None, **options):
    mesh = worlds.mesh()
    data = masked() if data is None else data
    share = pdc.partition(data, mesh, cut(data, size))
    given = {"num_neighbors": [3, 2], "batch_size": 4, "seed": 7, "shuffle": True}
    return share, DistNeighborLoader(
        share, **batches.arguments(replication=c, **{**given, **options})
    )


def stop_early(size, bulk_size, prefetch):
    _, loader = built(size, bulk_size=bulk_size, prefetch=prefetch)
    whole = list(loader)
    for count in (1, 2, 3):
        loader.set_epoch(0)
        for k, batch in enumerate(loader):
            batches.same(batch.n_id, whole[k].n_id)
            if k + 1 == count:
                break
    loader.set_epoch(0)
    left = iter(loader)  # begun, and left where it is
    next(left)
    loader.set_epoch(0)
    again = list(loader)
    assert len(again) == len(whole)
    for one, two in zip(again, whole, strict=True):
        batches.same(one.x, two.x)


@tiers.parametrize("prefetch", [0, 1, 2], [1])
def test_an_epoch_can_be_left(prefetch):
    worlds.run(stop_early, 2, 2, 1, prefetch)
    worlds.run(stop_early, 3, 3, 2, prefetch)


@worlds.on(2)
def test_an_epoch_can_be_resumed():
    size = 2
    _, loader = built(size)
    whole = list(loader)
    loader.set_epoch(0)
    steps = iter(loader)
    head = [next(steps), next(steps)]
    state = loader.state_dict()
    _, other = built(size)
    other.load_state_dict(state)
    tail = list(other)
    assert len(head) + len(tail) == len(whole)
    for one, two in zip([*head, *tail], whole, strict=True):
        batches.same(one.n_id, two.n_id)

    data = masked()
    data.heavy = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1))
    data.when = torch.arange(data.num_nodes)
    share = pdc.partition(data, worlds.mesh(), owners(data.num_nodes, size))
    for name in ({"weight_attr": "heavy"}, {"time_attr": "when"}):
        one, two = (
            DistNeighborLoader(
                d, [2], **batches.arguments(seed=1, **name)
            ).state_dict()["made_from"]
            for d in (data, share)
        )
        assert one == two
        assert any(key.startswith("values of") for key in one)


def uneven(size):
    mesh = worlds.mesh(fresh=True)
    data = masked()
    share = pdc.partition(data, mesh, owners(data.num_nodes, size))
    loader = DistNeighborLoader(
        share,
        num_neighbors=[3],
        batch_size=1,
        options=LoaderOptions(bulk_size=1, seed=7),
    )
    if mesh.rank == 0:
        for _ in loader:
            break
        return "stopped"
    try:
        for _ in loader:
            pass
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_stops_alone_ends_the_others():
    zero, one = worlds.run(uneven, 2, 2)
    assert zero == "stopped"
    assert "rank(s) 0 stopped in the middle of an epoch" in one


@pytest.mark.parametrize("prefetch", [0, 1])
@worlds.on(2)
def test_an_error_on_one_rank_ends_all_of_them(prefetch):
    size = 2
    mesh = worlds.mesh(fresh=True)
    data = masked()
    data.weight = torch.ones(data.num_edges)
    into = data.edge_index[1] == 3  # all edges into one node
    data.weight[into] = 0
    cutter = owners(data.num_nodes, size)
    cutter[3] = 0
    share = pdc.partition(data, mesh, cutter)
    loader = DistNeighborLoader(
        share,
        num_neighbors=[2],
        input_nodes=torch.arange(8),
        batch_size=1,
        weight_attr="weight",
        options=LoaderOptions(prefetch=prefetch, bulk_size=1),
    )
    with pytest.raises(ValueError, match="all edges into node 3 are zero"):
        list(loader)


def transformed(prefetch, own):
    mesh = worlds.mesh(fresh=True)
    share, seen = pdc.partition(masked(), mesh, owners(60, 2)), []

    def transform(batch):
        seen.append(batch)
        if mesh.rank == 1 and len(seen) == 3:
            raise KeyError("nothing of that name")
        return batch

    name = "transform_sampler_output" if own else "transform"
    options = {"batch_size": 2, "bulk_size": 2, "prefetch": prefetch, name: transform}
    try:
        for _ in DistNeighborLoader(share, [2], **batches.arguments(**options)):
            pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("prefetch", "own"), [(0, False), (1, False), (0, True), (1, True)]
)
def test_a_transform_that_fails_on_one_rank_raises_on_all(prefetch, own):
    other, failed = worlds.run(transformed, 2, prefetch, own)
    assert failed == "KeyError: 'nothing of that name'"
    assert "rank 1 failed with KeyError: 'nothing of that name'" in other


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_wrong_use_is_refused_on_all_ranks(size):
    mesh = worlds.mesh()
    data = masked()
    share = pdc.partition(data, mesh, owners(data.num_nodes, size))

    def load(graph=share, **options):
        return DistNeighborLoader(
            graph, **batches.arguments(**{"num_neighbors": [2], **options})
        )

    with pytest.raises(ValueError, match="topology must be one of"):
        load(topology="shared")
    with pytest.raises(ValueError, match="sample_at must be one of"):
        load(sample_at="home")
    with pytest.raises(ValueError, match="may be one of"):
        load(replication=size + 1)
    with pytest.raises(ValueError, match="num_workers=2"):
        load(num_workers=2)
    with pytest.raises(ValueError, match="split=False"):
        load(split=False)
    with pytest.raises(ValueError, match="is a mask of shape"):
        load(input_nodes=share.train_mask.to_local()[:3])
    with pytest.raises(ValueError, match="each rank holds whole"):
        load(data, topology="partitioned")
    with pytest.raises(ValueError, match="neither a node-level or edge-level"):
        load(time_attr="when")
    with pytest.raises(ValueError, match="no edges have an attribute 'heavy'"):
        load(weight_attr="heavy")
    with pytest.raises(ValueError, match="no row for each edge of the share"):
        load(weight_attr="edge_index")
    if size > 1:
        with pytest.raises(ValueError, match="the same num_neighbors"):
            load(num_neighbors=[2 + mesh.rank])
        with pytest.raises(
            ValueError, match="same seed: it is 0 on rank 0, and 1 on rank 1"
        ):
            load(seed=mesh.rank)


@pytest.mark.parametrize(("size", "c"), [(1, 1), (2, 1), (2, 2)])
@worlds.on()
def test_rows_come_from_the_store_that_is_given(size, c):
    mesh = worlds.mesh()
    data = masked()
    share = pdc.partition(data, mesh, cut(data, size))
    options = {"num_neighbors": [3, 2], "batch_size": 6, "seed": 3}
    plain = list(
        DistNeighborLoader(share, **batches.arguments(replication=c, **options))
    )
    store = DistFeatureStore.from_data(
        share,
        new_process_grid(mesh, c),
        cache=0.3,
    )
    more = torch.arange(data.num_nodes * 3.0).view(-1, 3)
    mine = share.edge_index.nodes.gid
    store.add(None, "more", more[mine])
    mesh.ledger.reset()
    cached = list(
        DistNeighborLoader(share, **batches.arguments(features=store, **options))
    )
    for one, two in zip(plain, cached, strict=True):
        batches.same(one.x, two.x)
        batches.same(one.edge_attr, two.edge_attr)
        batches.same(two.more, more[two.n_id])
    lossy = DistFeatureStore.from_data(share, new_process_grid(mesh, c), wire="int8")
    for one, two in zip(
        plain,
        DistNeighborLoader(share, **batches.arguments(features=lossy, **options)),
        strict=True,
    ):
        batches.same(one.y, two.y)
        assert (one.x - two.x).abs().max() < 0.05
    with pytest.raises(TypeError, match="must be a DistFeatureStore"):
        DistNeighborLoader(share, **batches.arguments(features={}, **options))
    share.x.requires_grad_()
    with pytest.raises(TypeError, match="requires a gradient"):
        DistNeighborLoader(share, **batches.arguments(**options))


@worlds.on(2)
def test_a_share_is_refused_where_a_whole_graph_is_needed():
    size = 2
    mesh = worlds.mesh()
    data = masked()
    share = pdc.partition(data, mesh, owners(data.num_nodes, size))
    for make in (
        lambda: KeyedNeighborSampler(share, [2]),
        lambda: KeyedLayerSampler(share, [2]),
    ):
        with pytest.raises(TypeError, match=r"share of pdc\.partition"):
            make()


@worlds.on(2)
def test_sampling_and_fetching_run_ahead_of_training_and_not_too_far():
    size = 2
    mesh = worlds.mesh()
    _, loader = built(size, batch_size=2, bulk_size=1, num_neighbors=[3, 2])
    steps = iter(loader)
    next(steps)
    calls = {}

    def travelled(op, axis):
        entry = mesh.ledger.entries.get((op, axis))
        calls[op] = entry.calls if entry else 0
        return calls[op]

    deadline = time.monotonic() + 60
    # the loop has taken one batch: the second is fetched, the third is sampled
    while time.monotonic() < deadline and (
        travelled("fetch_rows", "fetch:row") < 2
        or travelled("frontier", "sample:row") < 3 * 2
    ):
        time.sleep(0.01)
    assert calls["fetch_rows"] >= 2
    assert calls["frontier"] >= 3 * 2
    time.sleep(0.5)
    # and no more than may wait: in use, waiting, held by each stage, between them
    assert travelled("fetch_rows", "fetch:row") <= 3
    assert travelled("frontier", "sample:row") <= 5 * 2
    for k, _ in enumerate(steps):  # training talks at its own pace, in its own groups
        time.sleep(0.002 * ((k + mesh.rank) % 3))
        total = collectives.all_reduce(torch.ones(3), mesh.world)
        assert total.tolist() == [size] * 3
    assert {"sample", "fetch", "assemble", "wait", "train"} == set(
        loader.phases.by_name
    )
    assert loader.phases["fetch"].bytes == mesh.ledger.total("bytes", axis="fetch:row")


@worlds.on(2)
def test_what_one_rank_cannot_build_is_told_to_all():
    mesh = worlds.mesh()
    share = pdc.partition(masked(), mesh, owners(60, 2))
    none, some = torch.empty(0).long(), torch.arange(2)
    odd = mesh.rank == 1
    seeds = {"input_nodes": none if odd else some, "batch_size": 1, "shuffle": True}
    assert not list(
        DistNeighborLoader(
            share, [2], **batches.arguments(even_batches="drop", **seeds)
        )
    )
    with pytest.raises(ValueError, match=r"got \[2, 0\] batches on the ranks"):
        list(DistNeighborLoader(share, [2], **batches.arguments(**seeds)))
    with pytest.raises(TypeError, match=r"rank 1: .*'foo'"):
        DistNeighborLoader(
            share, [2], **batches.arguments(**({"foo": 1} if odd else {}))
        )
    with pytest.raises(ValueError, match="vector of node ids"):
        DistNeighborLoader(share, [2], input_nodes=object() if odd else some)
    with pytest.raises(
        ValueError,
        match=r"the same input_nodes: it is .* and rows of the share on rank 1",
    ):
        DistNeighborLoader(share, [2], input_nodes=share.train_mask if odd else some)


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_seeds_are_named_as_on_a_whole_graph(size):
    mesh = worlds.mesh()
    data, size = batches.hetero(), mesh.size
    data["paper"].time = torch.arange(40)  # of targets, and not of all sources
    data["late"].num_nodes = 7  # neither edges nor attributes
    share = pdc.partition(data, mesh, cut(data, size))
    options = {"batch_size": 4, "seed": 1, "split": True}
    for given in (["paper", torch.arange(6)], ("paper", torch.arange(40) < 6), "late"):
        some = {**options, "input_nodes": given}
        for more in ({}, {"time_attr": "time"} if given != "late" else {}):
            one = DistNeighborLoader(share, [2, 2], **batches.arguments(**some, **more))
            two = DistNeighborLoader(data, [2, 2], **batches.arguments(**some, **more))
            batches.all_same(list(one), list(two))
    types = list(share.node_types)
    for given in (None, torch.ones(40).bool(), "papre", ("papre", torch.arange(3))):
        with pytest.raises(ValueError, match="seeds of a HeteroData are a node type"):
            DistNeighborLoader(share, [2], input_nodes=given)
    assert share.node_types == types
    plain = pdc.partition(masked(), mesh, owners(60, size))
    for given in ((1, 2), (1, 2, 3)):
        found = DistNeighborLoader(
            plain, [2], input_nodes=given, options=LoaderOptions(split=True)
        )
        assert found.input_data.node.tolist() == list(given)
    with pytest.raises(ValueError, match="names a node type"):
        DistNeighborLoader(plain, [2], input_nodes="paper")
    bare = HeteroData()
    bare["a"].x = torch.zeros(5, 1)
    share = pdc.partition(bare, mesh, {"a": torch.arange(5) % size})
    with pytest.raises(ValueError, match="without edges to sample"):
        DistNeighborLoader(share, [2], input_nodes="a")


def test_edges_that_were_not_cut_are_named():
    graph = HeteroData()
    graph["a"].x, graph["b"].x = torch.randn(6, 2), torch.randn(4, 2)
    pairs = torch.tensor([[0, 5, 2], [3, 1, 0]])
    graph["a", "to", "b"].edge_index = pairs
    share = pdc.partition(graph, worlds.mesh())
    share["a", "new", "b"].edge_index = pairs
    with pytest.raises(TypeError, match=r"'new', 'b'.*before pdc\.partition"):
        DistNeighborLoader(share, [2], input_nodes="b")
