"""Loaders on several ranks: who gets which batch, evened, resumed, shared."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from pathlib import Path

import pytest
import tiers
import torch
import torch.distributed as dist
import worlds
from batches import all_same, arguments, full_disk, graph, hetero, same
from torch.utils.data import DistributedSampler
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.loader import (
    DistLayerLoader,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    notes,
    shared,
)
from pyg_distcomm.sampling.rules import UserRule, rule_name

SIZES = [1, 2, 3, 4]


def nodes(**kwargs):
    kwargs = {"batch_size": 7, "shuffle": True, "seed": 1, **kwargs}
    return DistNeighborLoader(graph(), [3, 2], **arguments(**kwargs))


def links(**kwargs):
    return DistLinkNeighborLoader(
        graph(),
        [3, 2],
        **arguments(neg_sampling="binary", batch_size=60, seed=1, **kwargs),
    )


MAKE = {"nodes": nodes, "links": links}


def unmarked(batch):
    if "padding" in batch:
        del batch.padding
    return batch


# Dealing -------------------------------------------------------------------------------


def _dealt(kind, even):
    rank, size = worlds.mesh().rank, worlds.mesh().size
    alone = MAKE[kind](split=False)
    loader = MAKE[kind](even_batches=even)
    numbers = []
    for _epoch in range(2):
        whole = list(alone)
        total, found = len(whole), list(loader)
        rounds = -(-total // size) if even == "pad" else total // size
        assert len(found) == len(loader) == rounds
        for i, batch in enumerate(found):
            t = i * size + rank
            if size == 1:
                assert "padding" not in batch
            elif even == "pad":
                assert batch.padding == (t >= total)
            same(unmarked(batch), whole[t % total])
            numbers.append(t)
    return numbers, total


@pytest.mark.parametrize("even", ["pad", "drop"])
@pytest.mark.parametrize("kind", MAKE)
@tiers.parametrize("size", SIZES, [2, 3])
def test_batch_t_goes_to_rank_t_mod_p(size, kind, even):
    found = worlds.run(_dealt, size, kind, even)
    total = found[0][1]
    every = sorted(t for numbers, _ in found for t in numbers if t < total)
    full = total if even == "pad" else total - total % size
    assert every == sorted([*range(full)] * 2)
    assert full > total - size


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


def _distributed_sampler():
    mesh = worlds.mesh()
    sampler = DistributedSampler(
        range(60), num_replicas=mesh.size, rank=mesh.rank, shuffle=False
    )
    loader = nodes(sampler=sampler, shuffle=False)
    found = list(loader)
    assert len(found) == len(loader)
    seeds = torch.cat([b.input_id for b in found])
    assert torch.equal(seeds, torch.arange(mesh.rank, 60, mesh.size))
    return found[0].e_id.tolist()


@tiers.parametrize("size", [1, 2, 3], [1, 3])
def test_a_distributed_sampler_is_followed(size):
    found = worlds.run(_distributed_sampler, size)
    assert all(found[0] != other for other in found[1:])


def _own_batches():
    mesh = worlds.mesh()
    mine = [[mesh.rank, 5], [6]] if mesh.rank == 0 else [[mesh.rank, 7]]
    found = list(nodes(batch_sampler=mine, batch_size=1, shuffle=False))
    assert [b.padding for b in found] == [False, mesh.rank > 0]
    if mesh.rank:
        same(unmarked(found[1]), unmarked(found[0]))
    return len(found)


def test_own_batches_come_out_even():
    assert worlds.run(_own_batches, 3) == [2, 2, 2]


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


def _missing():
    mesh = worlds.mesh()
    if mesh.rank != 0:
        return "not built"
    before, mesh.world.watch.deadline = mesh.world.watch.deadline, 1.0
    try:
        with pytest.raises(RuntimeError) as caught:
            list(nodes(split=True))
    finally:
        mesh.world.watch.deadline = before
    return str(caught.value)


def test_ranks_that_do_not_come_are_named():
    said = worlds.run(_missing, 3)[0]
    assert "rank(s) 1, 2 have not come to DistNeighborLoader" in said
    assert "split=False" in said


# Seeds ---------------------------------------------------------------------------------


@worlds.on(2)
def test_seeds_that_differ_by_rank_are_refused():
    mesh = worlds.mesh()
    with pytest.raises(ValueError, match=r"different seeds on the ranks, \[0, 1\]"):
        list(nodes(seed=mesh.rank))


def _to_the(power):
    return lambda p: p**power


def _rules_differ():
    mesh = worlds.mesh()
    share = pdc.partition(graph(), mesh, "random")
    with pytest.raises(ValueError, match=r"rule.*_to_the"):
        DistLayerLoader(share, [3, 2], _to_the((0.5, 2.0)[mesh.rank]), batch_size=7)
    next(iter(DistLayerLoader(share, [3, 2], _to_the(0.5), batch_size=7)))


def test_rules_that_differ_by_rank_are_refused():
    worlds.run(_rules_differ, 2)
    rules = [_to_the(0.5), _to_the(2.0), lambda p: p**0.5, lambda p: p**0.25]
    assert len({rule_name(UserRule(rule)) for rule in rules}) == 4
    assert rule_name(UserRule(_to_the(3.0))) == rule_name(UserRule(_to_the(3.0)))


@worlds.on(2)
def test_one_list_is_asked_for():
    mesh = worlds.mesh()
    with pytest.raises(ValueError, match="different inputs on the ranks"):
        list(nodes(input_nodes=torch.arange(9 + mesh.rank), split=True))


def _rank_zeros_seed():
    torch.manual_seed(worlds.mesh().rank)
    loader = nodes(seed=None)
    seeds = torch.cat([b.input_id for b in loader if not b.padding])
    return loader.seed, seeds


def test_without_a_seed_rank_zeros_is_taken():
    found = worlds.run(_rank_zeros_seed, 2)
    assert found[0][0] == found[1][0]
    seeds = torch.cat([s for _, s in found])
    assert torch.equal(seeds.sort().values, torch.arange(60))


# States --------------------------------------------------------------------------------


def _begun(rounds):
    worlds.mesh()
    loader = nodes(batch_size=4)
    list(loader)
    for _, _batch in zip(range(rounds), loader, strict=False):
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


@pytest.mark.parametrize("size", [1, 3])
def test_an_epoch_of_two_ranks_goes_on_with_others(size):
    states = worlds.run(_begun, 2, 4)
    assert states[0] == states[1]
    assert (states[0]["epoch"], states[0]["batches"]) == (1, 8)
    found = worlds.run(_gone_on, size, states[0])
    assert sorted(t for numbers, _ in found for t in numbers) == list(range(7))
    assert {left for _, left in found} == {7}


@worlds.on(2)
def test_split_lists_go_on():
    mesh = worlds.mesh()
    own = torch.arange(30) + 30 * mesh.rank
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


def _shared(folder, typed):
    mesh = worlds.mesh()
    calls = []

    def load():
        calls.append(1)
        return hetero() if typed else graph()

    data = shared(load, folder)
    same(data, hetero() if typed else graph())
    given = {"input_nodes": "paper"} if typed else {}
    make = {"batch_size": 7, "seed": 2, "split": False, **given}
    found = DistNeighborLoader(data, [3, 2], **arguments(**make))
    all_same(found, DistNeighborLoader(load(), [3, 2], **arguments(**make)))
    dist.barrier() if mesh.size > 1 else None
    left = os.listdir(folder)
    return len(calls) - 1, left


@pytest.mark.parametrize("typed", [False, True])
@tiers.parametrize("size", [1, 2, 3], [1, 3])
def test_one_rank_loads_for_all(tmp_path, size, typed):
    found = worlds.run(_shared, size, str(tmp_path), typed)
    assert sum(calls for calls, _ in found) == 1
    assert all(left == [] for _, left in found)


def _shared_by_default():
    worlds.mesh()
    same(shared(graph()), graph())
    time.sleep(0.2)
    places = {Path("/dev/shm"), Path(tempfile.gettempdir())}
    made = [f for p in places if p.exists() for f in p.glob("pyg_distcomm-*/graph.pt")]
    return [f for f in made if f.stat().st_uid == os.getuid()]


def test_nothing_is_left_behind():
    before = _shared_by_default()
    for left in worlds.run(_shared_by_default, 2):
        assert set(left) <= set(before)


@worlds.on(3)
def test_a_source_that_fails_fails_on_all_ranks():
    worlds.mesh()

    def load():
        raise OSError("no such disk")

    with pytest.raises(
        RuntimeError, match=r"rank 0 could not .* OSError: no such disk"
    ):
        shared(load)


class Roads(Data):
    """A graph of a script's own."""


class Strange:
    def __reduce__(self):
        return os.mkdir, (os.environ["STRANGE_PLACE"],)


def _shared_as_data(place):
    worlds.mesh()
    os.environ["STRANGE_PLACE"] = place
    data = graph()
    roads = Roads(**data.to_dict(), told={"a": [1, 2.5, None, True, "b"]})
    got = shared(roads)
    assert type(got) is Roads
    assert got.told == roads.told
    same(got, roads)
    data.more = Strange()
    with pytest.raises(
        RuntimeError, match=r"the graph holds .*mkdir; shared\(\) passes"
    ):
        shared(data)
    return os.path.exists(place)


def test_a_shared_graph_is_read_as_data(tmp_path):
    assert worlds.run(_shared_as_data, 2, str(tmp_path / "ran")) == [False, False]


def _shared_from_nothing():
    rank = worlds.mesh().rank
    for source in (None, 5):
        with pytest.raises(TypeError, match=rf"rank 0: .* got {type(source).__name__}"):
            shared(source if rank == 0 else graph)
    with pytest.raises(
        RuntimeError, match="must return a Data or HeteroData, got None"
    ):
        shared(lambda: None)


def test_shared_needs_a_graph():
    worlds.run(_shared_from_nothing, 2)
    with pytest.raises(TypeError, match="got NoneType"):
        shared(None)
    with pytest.raises(TypeError, match="must return a Data"):
        shared(lambda: None)


def _shared_on_a_full_disk(folder):
    rank = worlds.mesh().rank
    with (
        full_disk(4096 if rank == 0 else None),
        pytest.raises(RuntimeError, match=rf"written to {folder}: .*make room"),
    ):
        shared(graph, folder=folder)
    assert not os.listdir(folder)


def test_shared_says_that_a_disk_is_full(tmp_path):
    worlds.run(_shared_on_a_full_disk, 2, str(tmp_path))
