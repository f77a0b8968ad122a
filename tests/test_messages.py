"""Exchanges over gloo, and through memory of a host: what they must not change."""

import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import tiers
import torch
import torch.distributed as dist
import worlds

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives, failure, messages
from pyg_distcomm.comm.axis import drain_at_exit
from pyg_distcomm.comm.ledger import exchange_price
from pyg_distcomm.comm.store import RankError
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.process import PROCESS

pytestmark = pytest.mark.usefixtures("place")

SIZES = (2, 3, 4, 8)
BIG = collectives._LARGE_MESSAGE // 8  # rows of eight bytes that make much


def _counts(kind, size):
    """Rows from rank i to rank j, as a matrix that all ranks know."""
    g = torch.Generator().manual_seed(size)
    if kind == "nothing":
        return torch.zeros(size, size, dtype=torch.int64)
    if kind == "one way":  # much from lower to higher ranks only
        return torch.ones(size, size).triu(1).long() * (BIG + 5)
    counts = torch.randint(0, 7, (size, size), generator=g)
    if kind == "mixed":  # much, little and nothing side by side
        counts[0, 1:] = BIG + 1
        counts[1:, 0] = BIG + torch.arange(1, size)
        counts[-1] = 0  # a rank that has nothing to send
    return counts


def _row_values(source, target, count, dtype):
    value = torch.arange(count) * 7 + 31 * source + 3 * target
    return (value % 100).to(dtype)


def by_gloo(axis):
    """The axis as if its ranks were on several hosts."""
    return replace(axis, rings=None)


def _exchange(kind, dtype, width, most, rings=True):
    mesh = worlds.mesh()
    axis = mesh.world if rings else by_gloo(mesh.world)
    assert not rings or axis.rings is not None
    counts, me = _counts(kind, mesh.size), mesh.rank
    send, recv = counts[me].tolist(), counts[:, me].tolist()
    parts = [_row_values(me, j, n, dtype) for j, n in enumerate(send)]
    x = torch.cat(parts).unsqueeze(1).expand(-1, width)
    bound = int(counts.max()) if most else None
    mesh.ledger.reset()
    got = collectives.all_to_all(x, send, recv, axis, "halo", bound).wait()
    parts = [_row_values(i, me, n, dtype) for i, n in enumerate(recv)]
    assert torch.equal(got, torch.cat(parts).unsqueeze(1).expand(-1, width))
    price = exchange_price(send, recv, me, width)
    assert mesh.ledger.words() == price.words
    assert mesh.ledger.messages() == price.messages
    assert mesh.ledger.bytes() == price.words * x.element_size()
    assert mesh.ledger.total("sent_bytes") == price.sent * x.element_size()


@tiers.parametrize("size", SIZES, [2, 4])
@pytest.mark.parametrize("kind", ["nothing", "little", "one way", "mixed"])
def test_what_arrives_and_what_it_costs(kind, size):
    for dtype in (torch.float64, torch.int64, torch.uint8, torch.bfloat16):
        for most, rings in itertools.product((True, False), repeat=2):
            worlds.run(_exchange, size, kind, dtype, 1, most, rings)
    worlds.run(_exchange, size, kind, torch.float64, 0, True)


def _several_under_way():
    mesh = worlds.mesh()
    me, size = mesh.rank, mesh.size
    pending = []
    for k in range(6):
        rows = BIG + 3 if k % 2 else 2
        x = torch.full((rows * size,), 100.0 * k + me, dtype=torch.float64)
        counts = [rows] * size
        time.sleep(0.002 * ((me + k) % size))  # now one is late, now the other
        pending.append(collectives.all_to_all(x, counts, counts, mesh.world))
    abandoned = pending.pop(1)
    del abandoned  # as an exception between would do
    for k in (4, 0, 5, 2, 3):
        got = pending[k - (k > 1)].wait().view(size, -1)
        want = 100.0 * k + torch.arange(size, dtype=torch.float64)
        assert torch.equal(got, want.unsqueeze(1).expand_as(got))
    collectives.barrier(mesh.world)
    deadline = time.monotonic() + 60
    while PROCESS.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not PROCESS.messages  # the abandoned one has ended too
    alive = [t for t in threading.enumerate() if t.daemon]
    assert len(alive) <= 16  # threads are used again


@tiers.parametrize("size", [2, 4], [4])
def test_several_exchanges_at_once_end_in_any_order(size):
    for _ in range(3):
        worlds.run(_several_under_way, size)


@tiers.parametrize("size", [2, 3, 4], [3])
@worlds.on()
def test_receives_come_before_sends_of_much(size):
    mesh, said = worlds.mesh(), []
    me = mesh.rank

    def spy(name):
        real = getattr(dist, name)
        noted = lambda rows: said.append((name, rows.numel() >= BIG))  # noqa: E731
        begin = lambda rows, *args: noted(rows) or real(rows, *args)  # noqa: E731
        return mock.patch.object(dist, name, begin)

    send = recv = [0 if j == me else BIG if (me + j) % 2 else 4 for j in range(size)]
    with spy("isend"), spy("irecv"):
        x, axis = torch.zeros(sum(send), dtype=torch.float64), by_gloo(mesh.world)
        collectives.all_to_all(x, send, recv, axis).wait()
        collectives.barrier(mesh.world)
        first_send = [name for name, _ in said].index("isend")
        assert said[0] == ("irecv", True)
        # nothing much is asked for once sending has begun
        assert ("irecv", True) not in said[first_send:]
        calls, x = len(said), torch.zeros(size * 4, dtype=torch.float64)
        collectives.all_to_all(x, [4] * size, [4] * size, axis, most=4).wait()
    assert len(said) == calls  # what all know to be small is one collective


@pytest.mark.parametrize("size", [2, 4])
@worlds.on()
def test_what_finds_no_room_in_memory_goes_by_gloo(size):
    """Begins more than a ring has room for, then waits; and messages larger than a ring."""
    mesh = worlds.mesh()
    axis, size = mesh.world, mesh.size
    room, pending = axis.rings.room // 8, []
    for k, rows in enumerate(
        (room // 2 + 1, 3, room // 3, room + 1, 0, room, 5, 2 * room)
    ):
        x = torch.full((rows * size,), 10.0 * k + mesh.rank, dtype=torch.float64)
        pending.append(collectives.all_to_all(x, [rows] * size, [rows] * size, axis))
        pending.append(collectives.all_reduce_begin(x[: rows // 4], axis))
    for k, (rows, summed) in enumerate(zip(pending[::2], pending[1::2], strict=True)):
        want = 10.0 * k + torch.arange(size, dtype=torch.float64)
        got = rows.wait().view(size, -1)
        assert torch.equal(got, want.unsqueeze(1).expand_as(got))
        assert bool((summed.wait() == want.sum()).all())
    collectives.barrier(axis)


@worlds.on(2)
def test_more_may_be_under_way_than_a_ring_describes():
    mesh = worlds.mesh()
    ones = [1] * mesh.size
    pending = []
    for k in range(messages._DESCRIBED + 76):
        with torch.inference_mode(k % 2 == 0):  # a place may be an inference tensor
            x = torch.full((mesh.size,), 2.0 * k + mesh.rank)
            pending.append(collectives.all_to_all(x, ones, ones, mesh.world))
    for k, one in enumerate(pending):
        assert one.wait().tolist() == [2.0 * k + i for i in range(mesh.size)]


def test_messages_of_each_kind_have_a_tag():
    assert len({collectives._TAG, messages._TAG, failure._ABORT_TAG}) == 3


def _forks():
    """A process that a rank forks, and that ends as a script does, ends no exchange."""
    mesh = pdc.init(timeout=60)
    under_way = collectives.all_reduce_begin(torch.ones(1 << 18), mesh.data)
    if mesh.rank == 0 and (child := os.fork()) == 0:
        with contextlib.suppress(SystemExit), mesh:
            with pytest.raises(RankError, match="a process that a rank forks"):
                collectives.barrier(mesh.world)
            sys.exit()
        drain_at_exit()
        os._exit(0)
    if mesh.rank == 0:
        assert os.waitpid(child, 0)[1] == 0
    assert under_way.wait().tolist() == [2.0] * (1 << 18)
    return float(collectives.all_reduce(torch.ones(1), mesh.world))


def test_a_forked_process_is_no_rank():
    assert pdc.launch(_forks, 2, timeout=100) == [2.0, 2.0]


def _other_sizes():
    mesh = pdc.init(timeout=30)
    x = torch.zeros(2 * (3 + mesh.rank))
    counts = [3 + mesh.rank] * 2
    collectives.all_to_all(x, counts, counts, mesh.world).wait()


def test_ranks_at_other_operations_are_told_so():
    with pytest.raises(ValueError, match=r"bytes came where \d+ were awaited: run the"):
        pdc.launch(_other_sizes, 2, timeout=100)


def _much(mesh, axis=None):
    x = torch.zeros(BIG * mesh.size, dtype=torch.float64)
    counts = [BIG] * mesh.size
    return collectives.all_to_all(x, counts, counts, axis or mesh.world, "halo")


def _asks_for_another_row():
    mesh = pdc.init(timeout=120)
    have = torch.arange(4) * 2 + mesh.rank
    # rank 1 has odd rows only
    want, counts = ([1, 2], [0, 2]) if mesh.rank == 0 else ([0, 6], [2, 0])
    Halo.build(torch.tensor(want), counts, have, mesh.world)


def test_rows_of_others_are_not_sent_as_own():
    with pytest.raises(ValueError, match="asked for row 2, which it does not hold"):
        pdc.launch(_asks_for_another_row, 2, timeout=300)


def _leaves(absent):
    """What rank 0 exchanges with another has arrived, with the absent rank it has not."""
    mesh = pdc.init(timeout=120)
    pending = None
    if mesh.rank != absent:
        pending = _much(mesh, by_gloo(mesh.world))
    collectives.barrier(mesh.data)
    if mesh.rank == 0:
        assert isinstance(pending.work, messages.Messages)
        time.sleep(1.0)
        pending.work.abort()
        assert pending.work.is_completed()
        assert not PROCESS.messages
    collectives.barrier(mesh.data)


@tiers.parametrize("absent", [1, 2], [2])
def test_a_process_that_leaves_keeps_no_thread_waiting(absent):
    pdc.launch(_leaves, 3, absent, timeout=300)


@worlds.on(3)
def test_what_has_left_is_freed_before_the_wait():
    """What has left is freed, long before what comes is waited for."""
    mesh = worlds.mesh()
    counts = [BIG * (rank != mesh.rank) for rank in range(mesh.size)]
    x = torch.ones(sum(counts), dtype=torch.float64)
    gone = weakref.ref(x)
    parts = list(x.split(counts))
    pending = collectives.all_to_all(parts, None, counts, mesh.world, "halo")
    alive = [weakref.ref(part) for part in parts]
    del x, parts
    stop = time.monotonic() + 60
    while time.monotonic() < stop and any(part() is not None for part in alive):
        time.sleep(0.01)
    assert gone() is None
    assert not any(part() is not None for part in alive)
    assert pending.wait().sum() == sum(counts)


def _past_two_to_the_31():
    """Sends messages of more bytes than 32 bits count, each in one of our collectives."""
    mesh, count = pdc.init(timeout=120), 2**31 + 16
    x = torch.zeros(count, dtype=torch.uint8)
    x[-3:] = mesh.rank + 1
    ends = []
    send, recv = ([0, count], [0, 0]) if mesh.rank == 0 else ([0, 0], [count, 0])
    rows = x if mesh.rank == 0 else x[:0]
    got = collectives.all_to_all(rows, send, recv, mesh.world).wait()
    ends.append((len(got), got[-3:].tolist()))
    rows = x if mesh.rank else x[-5:]
    got = collectives.all_gather_rows(rows, [5, count], mesh.world)
    ends.append((len(got), got[2:5].tolist() + got[-3:].tolist()))
    got = collectives.all_reduce(x, mesh.world)
    ends.append((len(got), got[-3:].tolist()))
    return ends, mesh.ledger.bytes()


@tiers.rare
def test_messages_may_be_longer_than_32_bits_count():
    count = 2**31 + 16
    (first, sent), (second, received) = pdc.launch(_past_two_to_the_31, 2, timeout=300)
    summed = (count, [3, 3, 3])
    gathered = (count + 5, [1, 1, 1, 2, 2, 2])
    assert first == [(0, []), gathered, summed]
    assert second == [(count, [1, 1, 1]), gathered, summed]
    assert sent == 2 * count
    assert received == 2 * count + 5


@pytest.mark.place("cpu")
@worlds.on(2)
def test_an_exchange_of_one_tensor_is_never_a_gather():
    mesh = worlds.mesh()
    rows = torch.arange(4.0).view(4, 1) + 10 * mesh.rank  # two for each, and oneself
    with mock.patch.object(collectives, "_uses_nccl", return_value=True):
        got = collectives.all_to_all(rows, [2, 2], [2, 2], mesh.world).wait()
    wanted = [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]][mesh.rank]
    assert got.view(-1).tolist() == wanted
