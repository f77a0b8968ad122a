"""Passes messages between ranks: by gloo, and through memory that the ranks of a host share.

[Note: rings] Gloo hands each message to a thread, which sends it over a socket, also to a rank
of the same host: four small ones take longer than an epoch of a small graph. So where all ranks
of an axis are on one host, each rank has memory with a ring for each rank that it sends to.
The sender copies a message into the ring, and then describes it: where it is, and its bytes.
The receiver copies it out, in the order of sending. Stores of a processor are seen in their
order, as x86 promises; elsewhere gloo sends. A sender does not wait: what is larger than a ring
goes by gloo, as both ends know, and what finds no room goes by gloo, as its description says.
A rank holds a lock on its memory, which the system releases when the process ends, and marks it
when it gives up, so that nobody waits for its messages: see [Note: failure]. Ranks in network
namespaces of their own count as hosts of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.comm.failure import FailureMonitor
from pyg_distcomm.comm.store import gather_notes
from pyg_distcomm.process import PROCESS

with contextlib.suppress(ImportError):  # not on Windows, where gloo sends
    import fcntl

_NO_TIMEOUT = timedelta(days=30)  # the waiting rank aborts messages at its deadline
_THREAD_TIMEOUT = 5.0  # seconds for a waiting thread to return on a busy machine
AWAKE = 0.001  # seconds, before a wait sleeps: to wake takes as long as a small message
try:  # both release the GIL, unlike os.sched_yield
    give_way: Callable[[], object] = ctypes.CDLL(None).sched_yield
    _system_call: Callable[..., int] = ctypes.CDLL(None).syscall
except (OSError, TypeError, AttributeError):
    give_way = os.getpid  # as good as nothing

_TAG = 0x9D0E  # of messages that found no room in a ring
_RING, _MEMORY = 1 << 24, 1 << 25  # most bytes of a ring, and of all rings of a rank
_DESCRIBED = 1024  # messages of a ring that may be under way
_SENT, _TAKEN, _FIRST = 0, 8, 16  # words of a ring: counts, each on a line of its own
_HEAD = 8 * (_FIRST + 2 * _DESCRIBED)  # bytes before the messages
_MARKS = 4096  # bytes of a rank's memory before its rings: a mark, and a token
_LINE = 64  # bytes of a line of the cache
_LOOK = 0.02  # seconds of waiting between looks whether a rank has ended
_FUTEX, _WAIT, _WAKE = 202, 0, 1  # Linux's call on x86-64, and what it does


class Messages:
    """Groups point-to-point messages under way, with the methods of `Work` that are used.

    Args:
        works: the work that torch returned for each message.
        kept: the buffers, which must live until all works are done.
    """

    def __init__(self, works: Sequence[dist.Work], kept: Any) -> None:
        self._works = works
        self._kept = kept if works else None
        self._done = threading.Event()
        self._error: Exception | None = None
        if not works:
            self._done.set()
            return
        PROCESS.messages.add(self)
        _idle_waiter().put(self)

    def is_completed(self) -> bool:
        """Returns whether all messages are done, or one has failed."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all of them.

        Raises:
            RuntimeError: if the transport broke, or after `timeout`; the messages go on then.
        """
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"messages are still under way after {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def run(self) -> None:
        """Waits for one message after the other; runs in a waiter thread."""
        try:
            for work in self._works:
                work.wait(_NO_TIMEOUT)
        except Exception as error:
            self._error = error.with_traceback(None)
        PROCESS.messages.discard(self)
        # release torch's objects before anyone sees completion: the process may exit next
        self._works, self._kept = (), None
        self._done.set()

    def abort(self) -> None:
        """Ends the wait by breaking the connections of the group."""
        # the waiter thread waits in this order: it must be the first work that times out
        for work in self._works[:1]:
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                self._done.wait(_THREAD_TIMEOUT)


def _idle_waiter() -> SimpleQueue[Messages]:
    try:
        return PROCESS.inboxes.pop()
    except IndexError:
        inbox: SimpleQueue[Messages] = SimpleQueue()
        # a daemon: a process that exits early must not wait for messages that never arrive
        threading.Thread(target=_run_waiter, args=(inbox,), daemon=True).start()
        return inbox


def _run_waiter(inbox: SimpleQueue[Messages]) -> None:
    while True:
        inbox.get().run()
        PROCESS.inboxes.append(inbox)


# Memory of a host --------------------------------------------------------------------


Bytes = NDArray[np.uint8]


class Memory:
    """Maps the memory of a rank, in which it sends: its own, or that of another rank.

    Args:
        fd: an open file.
        size: its bytes.
        token: what it holds, unless it is another file by now; 0 if nothing yet.
    """

    def __init__(self, fd: int, size: int, token: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False
        if os.fstat(fd).st_size != size:
            raise OSError("the memory of a rank is another one's")
        self.map = mmap.mmap(fd, size)
        self.marks = np.frombuffer(self.map, np.int64, 2)
        if token and self.marks[1] != token:
            raise OSError("the memory of a rank is another one's")

    @classmethod
    def new(cls, size: int, token: int) -> Memory:
        """Makes the memory of this rank, and locks it while the process lives."""
        fd = os.memfd_create("pyg_distcomm")
        os.truncate(fd, size)
        made = cls(fd, size, 0)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        made.marks[1] = token
        return made

    def give_up(self) -> None:
        """Marks that this rank sends no more."""
        self.marks[0] = 1

    def has_ended(self) -> bool:
        """Returns whether the rank of this memory has ended, or given up."""
        if self.marks[0]:
            return True
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError:
            return False
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1)
        return True


class Ring:
    """Holds messages from one rank to another, each of which has an object of its own.

    Args:
        memory: that of the sender.
        place: which ring of it.
        room: the bytes of a ring.
    """

    def __init__(self, memory: Memory, place: int, room: int) -> None:
        begin = _MARKS + place * (_HEAD + room)
        self.memory, self.room = memory, room
        self._words = np.frombuffer(memory.map, np.int64, _HEAD // 8, begin)
        self._bytes = np.frombuffer(memory.map, np.uint8, room, begin + _HEAD)
        self._sent = ctypes.c_void_p(self._words[_SENT:].ctypes.data)
        self._count = 0  # messages that this end has sent, or taken
        self._under_way: deque[tuple[int, int, int]] = deque()  # number, begin, end

    def is_full(self) -> bool:
        """Returns whether no more messages can be described."""
        return self._count - int(self._words[_TAKEN]) >= _DESCRIBED

    def put(self, message: Bytes) -> bool:
        """Sends bytes; returns whether they found room."""
        taken = int(self._words[_TAKEN])
        while self._under_way and self._under_way[0][0] < taken:
            self._under_way.popleft()
        size = len(message)
        begin = self._find(-(-size // _LINE) * _LINE)
        if begin >= 0:
            self._bytes[begin : begin + size] = message
        at = _FIRST + 2 * (self._count % _DESCRIBED)
        self._words[at], self._words[at + 1] = begin, size
        self._count += 1
        self._words[_SENT] = self._count
        _system_call(_FUTEX, self._sent, _WAKE, 1, None, None, 0)
        return begin >= 0

    def _find(self, size: int) -> int:
        """Returns where so many bytes are free, which are then taken; -1 if nowhere."""
        begin, end = 0, self.room
        if self._under_way:
            first, (_, last, begin) = self._under_way[0][1], self._under_way[-1]
            if last < first:
                end = first
            elif begin + size > end:
                begin, end = 0, first
        if begin + size > end:
            return -1
        self._under_way.append((self._count, begin, begin + size))
        return begin

    def has_message(self) -> bool:
        """Returns whether a message is here that was not taken."""
        return int(self._words[_SENT]) > self._count

    def sleep(self, seconds: float) -> None:
        """Sleeps until a message comes, or for so long."""
        span = (ctypes.c_long * 2)(0, int(seconds * 1e9))
        count = ctypes.c_uint32(self._count)
        _system_call(_FUTEX, self._sent, _WAIT, count, span, None, 0)

    def take(self, into: Bytes) -> bool:
        """Receives the next message; returns whether it was in the ring, and not by gloo.

        Raises:
            ValueError: if it is of another size.
        """
        at = _FIRST + 2 * (self._count % _DESCRIBED)
        begin, size = int(self._words[at]), int(self._words[at + 1])
        if size != len(into):
            raise ValueError(
                f"a message of {size} bytes came where {len(into)} were awaited: run the "
                "same operations on all ranks in the same order"
            )
        if begin >= 0:
            into[:] = self._bytes[begin : begin + size]
        self._count += 1
        self._words[_TAKEN] = self._count
        return begin >= 0


class Rings:
    """Sends and receives over an axis whose ranks are on one host: see [Note: rings].

    Args:
        group: the process group of the axis, for what finds no room.
        sends, receives: the rings to and from each other rank, by its place on the axis.
        room: the most bytes of a message.
        patience: seconds for which a rank may take no messages.
    """

    def __init__(
        self,
        group: Any,
        sends: Mapping[int, Ring],
        receives: Mapping[int, Ring],
        room: int,
        patience: float,
    ) -> None:
        self.group, self.room, self._patience = group, room, patience
        self._sends, self._receives = sends, receives
        self._lock = threading.RLock()
        self._awaited: dict[int, deque[tuple[Delivery, Bytes]]] = {
            i: deque() for i in receives
        }

    def begin(
        self,
        places: Sequence[Tensor],
        parts: Sequence[Tensor],
        by_gloo: Messages | None = None,
        finish: Callable[[], object] | None = None,
    ) -> Delivery:
        """Starts to exchange a tensor with each other rank; a large one goes as if empty.

        Messages of no bytes are sent, so that an exchange ends for all ranks or for none.

        Args:
            places: what to receive into; contiguous.
            parts: what to send.
            by_gloo: the messages of more than `room` bytes.
            finish: called once all have come.

        Raises:
            RuntimeError: if a rank has given up, or takes no messages.
        """
        rings = (*self._sends.values(), *self._receives.values())
        if any(ring.memory.marks[0] for ring in rings):
            raise RuntimeError("a rank of this host has ended")
        work = Delivery(self, by_gloo, finish)
        with self._lock:
            self.advance()
            for i, ring in self._sends.items():
                work.left += 1
                self._awaited[i].append((work, self._bytes_of(places[i])))
                self._wait_for_place(ring, self._receives[i])
                part = self._bytes_of(parts[i].resolve_conj().resolve_neg())
                if not ring.put(part):
                    work.add(dist.isend, part, i)
        return work

    def _wait_for_place(self, ring: Ring, back: Ring) -> None:
        stop = time.monotonic() + self._patience
        while ring.is_full():
            self.advance()
            time.sleep(AWAKE)
            if back.memory.has_ended() or time.monotonic() > stop:
                raise RuntimeError("a rank of this host takes no messages")

    def _bytes_of(self, x: Tensor) -> Bytes:
        # the stride of one number may be anything, which `view` does not take
        assert x.is_contiguous()
        count = x.numel() if x.nbytes <= self.room else 0
        flat = x.detach().as_strided((count,), (1,)).view(torch.uint8)
        return flat.numpy()  # which inference mode does not protect

    def advance(self) -> None:
        """Takes the messages that have come."""
        with self._lock:
            for i, queue in self._awaited.items():
                while queue and self._receives[i].has_message():
                    work, place = queue.popleft()
                    try:
                        if not self._receives[i].take(place):
                            work.add(dist.irecv, place, i)
                    except (RuntimeError, ValueError) as error:
                        work.error = error
                    work.left -= 1

    def give_up(self) -> None:
        """Tells the other ranks that this one sends no more."""
        for ring in self._sends.values():
            ring.memory.give_up()

    def sleep(self, work: Delivery, seconds: float) -> bool:
        """Sleeps for so long, or until a message comes; returns whether one cannot."""
        pairs = [(self._receives[i], [*queue]) for i, queue in self._awaited.items()]
        awaited = [ring for ring, queue in pairs if any(w is work for w, _ in queue)]
        for ring in awaited[:1]:
            ring.sleep(seconds)
        return any(ring.memory.has_ended() for ring in awaited)


class Delivery:
    """Represents an exchange through rings, with the methods of `Work` that are used."""

    def __init__(
        self,
        rings: Rings,
        by_gloo: Messages | None,
        finish: Callable[[], object] | None,
    ) -> None:
        self._rings, self._finish = rings, finish
        self._by_gloo = [] if by_gloo is None else [by_gloo]
        self.left = 0
        self.error: Exception | None = None

    def add(self, begin: Any, message: Bytes, peer: int) -> None:
        """Starts to send, or to receive, by gloo what found no room in a ring."""
        group, tensor = self._rings.group, torch.from_numpy(message)
        work = begin(tensor, dist.get_global_rank(group, peer), group, _TAG)
        self._by_gloo.append(Messages([work], tensor))

    def is_completed(self) -> bool:
        """Returns whether all messages have come, or one cannot."""
        if self.left:
            self._rings.advance()
        return self.error is not None or (
            not self.left and all(one.is_completed() for one in self._by_gloo)
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all of them.

        Raises:
            RuntimeError: if a rank has ended that should send, or after `timeout`.
            ValueError: if a message of another size has come.
        """
        stop = time.monotonic() + (timeout or _NO_TIMEOUT).total_seconds()
        while not self.is_completed():
            if time.monotonic() > stop:
                raise RuntimeError(f"messages are still under way after {timeout}")
            for one in () if self.left else self._by_gloo:
                with contextlib.suppress(RuntimeError):
                    one.wait(timedelta(seconds=_LOOK))
            if self.left and self._rings.sleep(self, _LOOK) and not self.is_completed():
                self.error = RuntimeError("a rank of this host has ended")
        if self.error is not None:
            raise self.error
        for one in self._by_gloo:
            one.wait()
        finish, self._by_gloo, self._finish = self._finish, [], None
        if finish is not None:
            finish()
        return True


def open_rings(
    groups: Mapping[str, tuple[Sequence[int], Any]], watch: FailureMonitor
) -> dict[str, Rings]:
    """Returns the rings of each axis whose ranks are on one host; collective.

    Args:
        groups: the ranks of each axis of this rank, and their process group.
        watch: has the store where ranks leave notes, and their deadline.
    """
    rank, deadline = watch.rank, watch.deadline
    store = watch.store.patient(deadline)
    number = store.add(f"rings/{rank}", 1)  # alike on all ranks
    slots: list[Any] = [
        [name, r] for name, (line, _) in groups.items() for r in line if r != rank
    ]
    room = min(_RING, _MEMORY // max(len(slots), 1)) // _MARKS * _MARKS
    total = _MARKS + len(slots) * (_HEAD + room)
    own, token = None, secrets.randbits(62) + 1
    host = _host()
    if host and slots:
        with contextlib.suppress(OSError):
            own = Memory.new(total, token)
    note: dict[str, Any] = {"pid": os.getpid(), "size": total, "token": token}
    note |= {"host": own and host, "fd": own and own.fd, "slots": slots, "room": room}
    at, name = (rank, watch.size, deadline), f"rings/{number}"
    notes = gather_notes(store, name, *at, note)
    opened: dict[int, Memory] = {}
    for r in {r for _, r in slots} if own else ():
        with contextlib.suppress(OSError):
            if notes[r]["host"] == host:
                fd = os.open(f"/proc/{notes[r]['pid']}/fd/{notes[r]['fd']}", os.O_RDWR)
                opened[r] = Memory(fd, notes[r]["size"], notes[r]["token"])
    here = [name for name, (line, _) in groups.items() if {*line} <= {rank, *opened}]
    here = here if own else []
    every = gather_notes(store, f"{name}/opened", *at, here)
    room = min(note["room"] for note in notes)
    found = {}
    for name, (line, group) in groups.items():
        if own is None or not all(name in every[r] for r in line):
            continue
        place = line.index(rank)
        sends, receives = {}, {}
        for i in [(place + k) % len(line) for k in range(1, len(line))]:
            r = line[i]
            sends[i] = Ring(own, slots.index([name, r]), room)
            receives[i] = Ring(opened[r], notes[r]["slots"].index([name, rank]), room)
        found[name] = Rings(group, sends, receives, room, deadline)
    return found


def _host() -> str:
    """Returns a name of this host, whose memory ranks can share; "" if they cannot."""
    if platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    except OSError:
        return ""
    return " ".join([boot, *spaces])
