"""Loaders on several ranks: who gets which batch, evened, resumed, shared."""

import contextlib
import io
import itertools
import math
import os
import pickle
from functools import partial

import numpy as np
import pytest
import tiers
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
import worlds
from alike import whole
from batches import (
    LOADERS,
    all_same,
    graph,
    graph_of,
    hetero,
    made,
    nodes,
    same,
    share_of,
)
from test_saving import Evil, full_after
from torch.utils.data import DistributedSampler, RandomSampler
from torch_geometric.data import Data
from tqdm.auto import tqdm

import pyg_distcomm as pdc
import pyg_distcomm.nn as nn
from pyg_distcomm.comm import collectives
from pyg_distcomm.loader import DistLayerLoader, NeighborLoader, notes, shared
from pyg_distcomm.sampling.rules import UserRule, rule_name


def unmarked(batch):
    if "padding" in batch:
        del batch.padding
    return batch


def contents(batch):
    """What a batch holds, but for how many nodes it says that it has, and its marks."""
    marks = ("num_nodes", "padding")
    for store in batch.stores:
        yield {name: store[name] for name in sorted(store.keys()) if name not in marks}


# Dealing, cut or not, resumed ----------------------------------------------------------


@tiers.parametrize(
    ("size", "kind"),
    itertools.product([1, 2, 3, 4], LOADERS),
    [(2, kind) for kind in ("shadow", "links", "types")],
)
@worlds.on()
def test_batch_t_goes_to_rank_t_mod_p_of_a_whole_graph_and_of_a_share(size, kind):
    mesh, data, make = worlds.mesh(), graph_of(kind), LOADERS[kind]
    alone, share = make(data, seed=3, split=False), share_of(data, mesh)
    dropped = make(data, seed=3, even_batches="drop")
    loaders = make(data, seed=3), make(share, seed=3), dropped
    for _epoch in range(2):
        whole = list(alone)
        for loader in loaders:
            found = list(loader)
            rounds = len(whole) / mesh.size
            rounds = int(rounds) if loader is dropped else math.ceil(rounds)
            assert len(found) == len(loader) == rounds
            for i, batch in enumerate(found):
                t = i * mesh.size + mesh.rank
                padding = getattr(batch, "padding", False)
                assert padding == (t >= len(whole) and mesh.size > 1)
                assert mesh.size > 1 or not hasattr(batch, "padding")
                all_same(contents(batch), contents(whole[t % len(whole)]))
    for given in (data, share):  # a state resumes inside an epoch
        loader, other = make(given, seed=3), make(given, seed=3)
        if len(loader) == 1:  # after its batch the next epoch would begin
            continue
        step = iter(loader)
        next(step)
        other.load_state_dict(loader.state_dict())
        all_same(list(step), list(other))


# Lists that the script has split -------------------------------------------------------


def _split(even, shuffle):
    mesh = worlds.mesh()
    own = torch.arange(60)[mesh.rank :: mesh.size][: 20 - 12 * mesh.rank]
    made = [
        nodes(input_nodes=own, batch_size=4, even_batches=even, shuffle=shuffle)
        for _ in range(2)
    ]
    found = list(made[0])
    all_same(found, made[1])
    padding = [b.get("padding", None) for b in found]
    for k, batch in enumerate(found):
        if batch.get("padding", False):
            repeated = found[k % (len(own) // 4)]
            same(unmarked(batch), unmarked(repeated))
    seeds = torch.cat([b.n_id[: b.batch_size] for b in found])
    return padding, seeds.tolist(), own.tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_split_lists_stay_split_and_come_out_even(shuffle):
    found = worlds.run(_split, 2, "pad", shuffle)
    assert [p for p, _, _ in found] == [[False] * 5, [False] * 2 + [True] * 3]
    for _, seeds, own in found:
        assert set(seeds) == set(own)
        assert sorted(seeds[: len(own)]) == own
    for padding, seeds, own in worlds.run(_split, 2, "drop", shuffle):
        assert len(padding) == 2
        assert set(seeds) <= set(own)


@tiers.parametrize("size", [1, 2, 3], [1, 2])
@worlds.on()
def test_a_distributed_sampler_is_followed(size):
    mesh = worlds.mesh()
    sampler = DistributedSampler(
        range(60), num_replicas=mesh.size, rank=mesh.rank, shuffle=False
    )
    loader = nodes(sampler=sampler, shuffle=False)
    found = list(loader)
    assert len(found) == len(loader)
    seeds = torch.cat([b.input_id for b in found])
    assert torch.equal(seeds, torch.arange(mesh.rank, 60, mesh.size))
    drawn = collectives.all_gather_object(found[0].e_id.tolist(), mesh.world)
    assert all(drawn[0] != other for other in drawn[1:])


@worlds.on(2)
def test_own_batches_come_out_even():
    mesh = worlds.mesh()
    mine = [[5, 7], [6]] if mesh.rank == 0 else [[5, 7]]
    found = list(nodes(batch_sampler=mine, batch_size=1, shuffle=False))
    assert [b.padding for b in found] == [False, mesh.rank > 0]
    drawn = collectives.all_gather_object(found[0].e_id.tolist(), mesh.world)
    assert len(set(map(tuple, drawn))) == 2  # each by a number of its own
    if mesh.rank:
        same(unmarked(found[1]), unmarked(found[0]))


# One rank's own ------------------------------------------------------------------------


def _evaluates_in_front(where):
    """Rank 0 evaluates while the others are at a barrier, or at a loader that comes later."""
    mesh = worlds.mesh()
    dist.barrier()
    found = []
    if mesh.rank == 0:
        patch = pytest.MonkeyPatch()
        patch.setattr(notes, "GRACE", 2.0 if where == "barrier" else 99.0)
        with pytest.warns(UserWarning, match="not all ranks have built the loader"):
            found = [b.input_id for b in nodes(batch_size=8, shuffle=False)]
        patch.undo()
    if where == "barrier":
        dist.barrier()
    later = [b.input_id for b in nodes(batch_size=9) if not b.padding]
    return torch.cat([*found, torch.empty(0).long()]), torch.cat(later)


@pytest.mark.parametrize("where", ["barrier", "loader"])
@tiers.parametrize("size", [2, 3], [2])
def test_rank_0_evaluates_while_others_wait_elsewhere(size, where):
    found = worlds.run(_evaluates_in_front, size, where)
    assert torch.equal(found[0][0], torch.arange(60))
    assert sorted(torch.cat([later for _, later in found]).tolist()) == [*range(60)]


@worlds.on(2, worlds.anew)
def test_a_loader_that_the_others_have_passed_by_is_ones_own():
    mesh, train = worlds.mesh(), nodes(batch_size=5)
    if mesh.rank == 0:
        alone = nodes(batch_size=5)
    assert len(list(train)) == 6
    if mesh.rank != 0:
        return
    with pytest.warns(UserWarning, match="not all ranks have built the loader") as told:
        assert (len(list(alone)), len(list(alone))) == (12, 12)
    assert told[0].filename == __file__  # the line that iterates


@worlds.on(2, worlds.anew)
def test_loaders_that_wait_for_each_other_raise_on_all_ranks():
    mesh = worlds.mesh()
    with pytest.raises(ValueError, match="which wait for each other"):
        list(nodes(batch_size=8 + mesh.rank, split=True))


@worlds.on(3)
def test_a_rank_without_inputs_has_nothing_to_repeat():
    mesh = worlds.mesh()
    mine = torch.arange(10) if mesh.rank else torch.empty(0).long()
    with pytest.raises(ValueError, match=r"got \[0, 2, 2\] batches on the ranks"):
        list(nodes(input_nodes=mine, shuffle=False))
    dropped = nodes(input_nodes=mine, even_batches="drop", shuffle=True)
    assert isinstance(dropped.sampler, RandomSampler) == bool(mesh.rank)
    assert list(dropped) == []


@worlds.on(2, worlds.anew)
def test_a_rank_that_failed_is_not_waited_for():
    mesh = worlds.mesh()
    if mesh.rank:
        mesh.world.watch.report(OSError("no such file"))
        return
    with pytest.raises(OSError, match=r"rank 1 failed .* no such file"):
        list(nodes())


@worlds.on(3)
def test_ranks_that_do_not_come_are_named():
    mesh = worlds.mesh()
    if mesh.rank != 0:
        return
    before, mesh.world.watch.deadline = mesh.world.watch.deadline, 1.0
    said = r"rank\(s\) 1, 2 have not come to DistNeighborLoader.*split=False"
    try:
        with pytest.raises(RuntimeError, match=f"(?s){said}"):
            list(nodes(split=True))
    finally:
        mesh.world.watch.deadline = before


# Seeds ---------------------------------------------------------------------------------


@worlds.on(2)
def test_what_differs_by_rank_is_refused():
    rank = worlds.mesh().rank
    for options, said in (
        ({"seed": rank}, r"different seeds on the ranks, \[0, 1\]"),
        (
            {"input_nodes": torch.arange(9 + rank), "split": True},
            "different inputs on the ranks",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            list(nodes(**options))


def _to_the(power):
    return lambda p: p**power


@worlds.on(2)
def test_rules_that_differ_by_rank_are_refused():
    mesh = worlds.mesh()
    share = pdc.partition(graph(), mesh, "random")
    with pytest.raises(ValueError, match=r"rule.*_to_the"):
        DistLayerLoader(share, [3, 2], _to_the((0.5, 2.0)[mesh.rank]), batch_size=7)
    next(iter(DistLayerLoader(share, [3, 2], _to_the(0.5), batch_size=7)))
    rules = [_to_the(0.5), _to_the(2.0), lambda p: p**0.5, lambda p: p**0.25]
    assert len({rule_name(UserRule(rule)) for rule in rules}) == 4
    assert rule_name(UserRule(_to_the(3.0))) == rule_name(UserRule(_to_the(3.0)))


@worlds.on(2)
def test_without_a_seed_rank_zeros_is_taken():
    mesh = worlds.mesh()
    torch.manual_seed(mesh.rank)
    loader = nodes(seed=None)
    seeds = [k for b in loader if not b.padding for k in b.input_id.tolist()]
    found = collectives.all_gather_object((loader.seed, seeds), mesh.world)
    assert found[0][0] == found[1][0]
    assert sorted(found[0][1] + found[1][1]) == [*range(60)]


# States --------------------------------------------------------------------------------


def _begun():
    worlds.mesh()
    loader = nodes(batch_size=4)
    list(loader)
    for _, _batch in zip(range(4), loader, strict=False):
        pass
    return loader.state_dict()


def _gone_on(state):
    mesh = worlds.mesh()
    alone = nodes(batch_size=4, split=False)
    alone.set_epoch(state["epoch"])
    left = list(alone)[state["batches"] :]
    loader = nodes(batch_size=4, seed=17 if mesh.size == 1 else 1)
    loader.load_state_dict(state)
    numbers = []
    for batch in loader:
        padding = batch.get("padding", False)
        match = [k for k, b in enumerate(left) if torch.equal(b.e_id, batch.e_id)]
        if not padding:
            assert len(match) == 1
            same(unmarked(batch), left[match[0]])
            numbers += match
    rest = list(loader)  # the next epoch is whole
    mine = list(alone)[mesh.rank :: mesh.size]
    all_same([unmarked(b) for b in rest[: len(mine)]], mine)
    return numbers, len(left)


@tiers.parametrize("size", [1, 3], [3])
def test_an_epoch_of_two_ranks_goes_on_with_others(size):
    states = worlds.run(_begun, 2)
    assert states[0] == states[1]
    assert (states[0]["epoch"], states[0]["batches"]) == (1, 8)
    found = worlds.run(_gone_on, size, states[0])
    assert sorted(t for numbers, _ in found for t in numbers) == list(range(7))
    assert {left for _, left in found} == {7}


@worlds.on(2)
def test_split_lists_go_on():
    own = torch.arange(30) + 30 * worlds.mesh().rank
    made, later, whole = (nodes(input_nodes=own, batch_size=5) for _ in range(3))
    for _, _batch in zip(range(2), made, strict=False):
        pass
    state = made.state_dict()
    later.load_state_dict(state)
    all_same(later, list(whole)[2:])
    one = nodes(batch_size=5)
    with pytest.raises(ValueError, match="the script split over 2 ranks"):
        one.load_state_dict({**state, "inputs": one._inputs})


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_loaders_can_be_pickled(size):
    worlds.mesh()
    loader, other = nodes(), nodes()
    list(loader), list(other)
    copy = pickle.loads(pickle.dumps(loader))  # as workers that are spawned get it
    all_same(copy, other)


# One copy of a graph -------------------------------------------------------------------


@pytest.mark.parametrize("typed", [False, True])
@tiers.parametrize("size", [1, 2, 3], [2])
@worlds.on()
def test_one_rank_loads_for_all(tmp_path, size, typed):
    mesh, calls = worlds.mesh(), []
    make, seeds = (hetero, "paper") if typed else (graph, None)

    def load():
        calls.append(mesh.rank)
        return make()

    data = shared(load, tmp_path)
    every = collectives.all_gather_object(calls, mesh.world)
    assert sum(map(len, every)) == 1
    assert os.listdir(tmp_path) == []
    same(data, make())
    both = (nodes(d, input_nodes=seeds, split=False) for d in (data, make()))
    all_same(*both)


class Roads(Data):
    """A graph of a script's own."""


@worlds.on(2)
def test_a_shared_graph_is_read_as_data(tmp_path):
    worlds.mesh()
    os.environ["EVIL_PLACE"] = str(tmp_path / "ran")
    data = graph()
    roads = Roads(**data.to_dict(), told={"a": [1, 2.5, None, True, "b"]})
    got = shared(roads)
    assert type(got) is Roads
    assert got.told == roads.told
    same(got, roads)
    data.more = Evil()
    said = r"the graph holds .*mkdir; shared\(\) passes"
    with pytest.raises(RuntimeError, match=said):
        shared(data)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_a_source_that_is_no_graph_is_told_to_all_ranks(size):
    rank = worlds.mesh().rank
    where = "rank 0: .* " if size > 1 else ""
    for source, said in (
        (None, rf"{where}got NoneType"),
        (5, rf"{where}got int"),
        (lambda: None, "must return a Data or HeteroData"),
        (
            partial(open, "gone"),
            "rank 0 could not .* No such" if size > 1 else "No such",
        ),
    ):
        with pytest.raises((TypeError, RuntimeError, OSError), match=said):
            shared(source if rank == 0 else graph)


@worlds.on(2)
def test_shared_says_that_a_disk_is_full(tmp_path):
    rank = worlds.mesh().rank
    with (
        full_after(4096) if rank == 0 else contextlib.nullcontext(),
        pytest.raises(RuntimeError, match=rf"written to {tmp_path}: .*make room"),
    ):
        shared(graph, folder=tmp_path)
    assert not os.listdir(tmp_path)


@worlds.on(2)
def test_shared_arrays_stay_on_disk(tmp_path):
    mesh, data = worlds.mesh(), graph()
    path = tmp_path / "x.npy"
    if mesh.rank == 0:
        x = np.memmap(path, np.float32, "w+", shape=(60, 5))
        x[:] = data.x.numpy()
        x.flush()
    dist.barrier()
    data.z = np.arange(60)
    data.x = np.memmap(path, np.float32, "r", shape=(60, 5))
    held = shared(lambda: data)
    assert isinstance(held.x, np.memmap)
    for batch in nodes(held, split=False):
        assert torch.equal(batch.z, batch.n_id)
        assert torch.equal(batch.x, graph().x[batch.n_id])


# An epoch begins with its first batch, and PyG's layer-wise inference gets all batches ---


def bar(loader):
    return tqdm(loader, file=io.StringIO())


@tiers.parametrize("kind", LOADERS, slice(0, None, 2))
@tiers.parametrize("size", [1, 2, 3], [2])
@worlds.on()
def test_an_iterator_that_is_not_used_is_no_epoch(size, kind):
    """Iterators that are not used, on some ranks, change nothing."""
    mesh = worlds.mesh()
    loader, other = (LOADERS[kind](graph_of(kind), seed=1) for _ in range(2))
    for epoch in range(2):
        want = list(other)
        iter(loader)
        got = list(bar(loader) if mesh.rank == 0 else loader)
        all_same(got, want)
        assert loader.state_dict()["epoch"] == epoch + 1
    state, before = loader.state_dict(), list(bar(loader))
    loader.load_state_dict(state)
    assert len(iter(loader)) == len(before)
    all_same(list(bar(loader)), before)


def models(lib):
    yield "GCN", lib.GCN(5, 6, 2, 3)
    yield "GraphSAGE", lib.GraphSAGE(5, 6, 1, 3, norm="batch_norm")
    yield "GAT", lib.GAT(5, 6, 3, 4, heads=2, jk="last")


@tiers.parametrize(
    ("size", "cut", "cache"),
    itertools.product([1, 2, 3], [False, True], [False, True]),
    [(2, True, False)],
)
@worlds.on()
def test_inference_gets_all_rows_on_all_ranks(size, cut, cache):
    mesh = worlds.mesh()
    torch.manual_seed(0)
    data = graph()
    given = pdc.partition(data, mesh, "random") if cut else data
    load = made(NeighborLoader, [-1], batch_size=16)
    for lib in (pyg, nn):
        for name, model in models(lib):
            model.eval()
            want = getattr(pyg, name).inference(model, load(data, split=False))
            loader = load(given)
            for _ in range(1 + (name == "GCN")):
                got = model.inference(loader, cache=cache)
                torch.testing.assert_close(whole(got), want)
    rounds = -(-60 // 16)
    assert len(loader) == len(list(loader)) == rounds
    assert len(list(load(given, split=True))) == -(-rounds // mesh.size)


@tiers.parametrize("partitioned", [False, True], [True])
@worlds.on(2, worlds.anew)
def test_a_loader_is_of_inference_on_all_ranks_or_on_none(partitioned):
    mesh = worlds.mesh()
    data = graph()
    seeds = torch.arange(data.num_nodes)
    seeds = seeds if mesh.rank == 0 else seeds[: len(seeds) // 2]
    data = pdc.partition(data, mesh) if partitioned else data
    options = {"input_nodes": seeds, "even_batches": "drop", "batch_size": 9}
    loader = made(NeighborLoader, [-1])(data, **options)
    counts = collectives.all_gather_object(len(list(loader)), mesh.world)
    assert len(set(counts)) == 1
