"""Iterates over one epoch of a loader: its batches, shared out, made ahead, and timed.

[Note: batch sharding] An epoch is a list of batches, numbered 0 .. T-1, the same on all ranks.
Rank t mod P loads batch t, so an epoch can be resumed on another number of ranks after any
round. If the script splits the inputs itself, batch i of rank r has number i P + r. A
batch's number, not its rank, keys its draws.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.comm.ledger import Ledger, format_table
from pyg_distcomm.comm.random import fold, keyed_permutation
from pyg_distcomm.loader.notes import StepComparer
from pyg_distcomm.process import PROCESS

_ORDER, _DRAWS = 0x0D, 0xD4
# its batches, and what records its progress, its phases, and steps of optimizers
Epoch: TypeAlias = tuple[Iterator[Any], "Progress", "Phases", StepComparer | None]


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """Describes one minibatch to sample, for the thread or worker that samples it."""

    positions: NDArray[np.int64]  # the positions of its inputs in the loader's list
    key: int  # the key of its draws
    # whether it repeats another batch, so that all ranks have equally many
    padding: bool = False


@dataclass(frozen=True)
class BatchSharding:
    """Assigns the batches of an epoch to ranks."""

    rank: int  # this rank
    size: int  # the number of ranks
    split: bool  # whether each rank has a list of its own
    # the number of batches of the epoch; if split, of each rank's own list; empty if
    # not known
    batches: tuple[int, ...]
    even: str  # how ranks get equally many batches, "pad" or "drop"

    def rounds(self, start: int) -> int:
        """Returns how many batches each rank gets, from global batch `start` on."""
        if self.split:
            most = max(self.batches) if self.even == "pad" else min(self.batches)
            return max(most - start // self.size, 0)
        left = max(self.batches[0] - start, 0)
        return -(-left // self.size) if self.even == "pad" else left // self.size

    def of_rank(self, start: int) -> Iterator[tuple[int, int, bool]]:
        """Yields this rank's batches: (position in its list, global number, is it padding)."""
        for i in range(self.rounds(start)):
            if self.split:
                own, t = self.batches[self.rank], start // self.size + i
                padding = t >= own
                t = t % own if padding and own else t
                yield t, t * self.size + self.rank, padding
                continue
            first = start + i * self.size
            t = first + (self.rank - first) % self.size
            padding = t >= self.batches[0]
            t = t % self.batches[0] if padding else t
            yield t, t, padding


@dataclass(eq=False)
class EpochPlan:
    """Lists the batches of any epoch of a loader, as a function of its seed."""

    count: int  # the number of inputs
    batch_size: int  # the number of inputs of a batch
    shuffle: bool  # whether to shuffle each epoch
    drop_last: bool  # whether to drop a last batch that is not full
    # the script's own batches, an iterable of lists of positions, or None
    batch_sampler: Any = None
    # returns the positions [count] of an epoch, given a key; or None
    draw: Callable[[int], Tensor] | None = None

    def length(self) -> int | None:
        """Returns the number of batches of an epoch; None if a batch_sampler has no length."""
        if self.batch_sampler is not None:
            try:
                return len(self.batch_sampler)
            except (TypeError, ValueError, NotImplementedError):
                return None
        full = self.count / self.batch_size
        return math.floor(full) if self.drop_last else math.ceil(full)

    def batches(
        self, seed: int, epoch: int, sharding: BatchSharding, start: int
    ) -> Iterator[PlannedBatch]:
        """Yields this rank's batches of an epoch, from global batch `start` on."""
        if self.batch_sampler is not None:
            yield from self._from_batch_sampler(seed, epoch, sharding, start)
            return
        order = torch.arange(self.count)
        key = fold(seed, epoch, _ORDER, sharding.rank if sharding.split else 0)
        if self.draw is not None:
            order = self.draw(key)
        elif self.shuffle:
            order = keyed_permutation(key, self.count)
        positions = order.numpy()
        for place, number, padding in sharding.of_rank(start):
            inputs = positions[place * self.batch_size : (place + 1) * self.batch_size]
            yield PlannedBatch(inputs, fold(seed, epoch, _DRAWS, number), padding)

    def _from_batch_sampler(
        self, seed: int, epoch: int, sharding: BatchSharding, start: int
    ) -> Iterator[PlannedBatch]:
        """Yields the script's own batches with their keys, without those before `start`."""
        known = sharding.size > 1 and sharding.batches
        rounds = sharding.rounds(start) if known else None
        i = skipped = start // sharding.size
        lists = (np.asarray(index, dtype=np.int64) for index in self.batch_sampler)
        head = list(islice(lists, 1))
        end = None if rounds is None else skipped + rounds
        for index in islice(chain(head, lists), skipped, end):
            key = fold(seed, epoch, _DRAWS, i * sharding.size + sharding.rank)
            yield PlannedBatch(index, key)
            i += 1
        key = fold(seed, epoch, _DRAWS, sharding.rank)
        (first,) = head or [np.empty(0, np.int64)]
        for _ in range(0 if end is None else end - i):
            yield PlannedBatch(first, key, padding=True)


@dataclass
class Progress:
    """Records how many batches of the current epoch were yielded."""

    epoch: int
    start: int
    sharding: BatchSharding
    rounds: int = 0
    finished: bool = False


class PassThroughDataset(Sequence[int]):
    """Replaces the dataset of torch's DataLoader: it returns the indices it is given.

    So a `PlannedBatch` reaches the worker that samples it.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return range(self._size)[index]

    def __getitems__(self, index: Any) -> Any:
        return index


@dataclass(frozen=True, eq=False)
class IndexSampler:
    """Yields the batches of the next epoch to torch's DataLoader."""

    plan: Callable[[], Iterator[PlannedBatch]]  # lists the batches of this rank
    length: Callable[[], int]  # returns how many there are, or raises TypeError

    def __iter__(self) -> Iterator[PlannedBatch]:
        return self.plan()

    def __len__(self) -> int:
        return self.length()


SAMPLE, FETCH, ASSEMBLE, WAIT, TRAIN = "sample", "fetch", "assemble", "wait", "train"


@dataclass
class Phase:
    """Sums up one phase of an epoch on this rank.

    Args:
        seconds: the time spent in the phase.
        waiting: the part of it that was spent waiting for other ranks and the network.
        bytes: the bytes received in the phase.
    """

    seconds: float = 0.0
    waiting: float = 0.0
    bytes: int = 0

    @property
    def computing(self) -> float:
        """Seconds that were not spent waiting for other ranks."""
        return max(self.seconds - self.waiting, 0.0)


@dataclass(eq=False)
class Phases:
    """Sums up the phases of one epoch of a loader, up to now.

    "sample", "fetch" and "assemble" run in threads beside training, so that they add up
    to more than the epoch; "wait" is what the loop waited for the next minibatch, and
    "train" all that it did between two of them. `print(phases)` shows a table.
    """

    by_name: dict[str, Phase] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _train_begin: int | None = None

    @contextmanager
    def timed(self, name: str, ledger: Ledger | None = None) -> Iterator[None]:
        """Adds the time of a block to a phase, and what `ledger` counts meanwhile."""
        begin, before = time.perf_counter_ns(), _ledger_totals(ledger)
        try:
            with torch.profiler.record_function(f"pyg_distcomm: {name}"):
                yield
        finally:
            after = _ledger_totals(ledger)
            self._add(name, begin, after[0] - before[0], after[1] - before[1])

    def training_ended(self) -> None:
        """Adds the time since the last minibatch to "train": the loop requests the next."""
        if self._train_begin is not None:
            self._add(TRAIN, self._train_begin)

    def waiting_ended(self, begin: int) -> None:
        """Adds the time since `begin`, in ns, to "wait": the loop receives a minibatch."""
        self._add(WAIT, begin)
        self._train_begin = time.perf_counter_ns()

    def _add(self, name: str, begin: int, waiting: float = 0.0, bytes: int = 0) -> None:
        with self._lock:
            phase = self.by_name.setdefault(name, Phase())
            phase.seconds += (time.perf_counter_ns() - begin) / 1e9
            phase.waiting += waiting
            phase.bytes += bytes
        if (recorder := PROCESS.recorder) is not None:
            about = {"bytes": bytes} if bytes else {}
            recorder.add("loader", name, begin, **about)

    def __getitem__(self, name: str) -> Phase:
        return self.by_name.get(name, Phase())

    def __str__(self) -> str:
        head = ("phase", "seconds", "computing", "waiting for ranks", "bytes received")
        names = (SAMPLE, FETCH, ASSEMBLE, WAIT, TRAIN)
        found = [(n, self.by_name[n]) for n in names if n in self.by_name]
        rows = [(n, p.seconds, p.computing, p.waiting, p.bytes) for n, p in found]
        return format_table(head, rows)


def _ledger_totals(ledger: Ledger | None) -> tuple[float, int]:
    """Returns the seconds waited and the bytes received that a ledger has counted."""
    if ledger is None:
        return 0.0, 0
    return ledger.total("seconds"), ledger.bytes()


_POLL_SECONDS = 0.2  # seconds between looks at whether anyone reads on

Stage = Callable[[list[Any], Callable[[], bool]], list[Any]]


class PrefetchQueue:
    """Yields minibatches in order, built a bulk at a time, each stage in its own thread.

    Its threads stop when it is exhausted, dropped or interrupted. A stage turns the bulk of the
    one before (the first: a list from the plan) into a bulk, and is also given a function that
    returns whether to stop.
    """

    def __init__(
        self,
        plan: Iterator[Any],  # the minibatches to build, in order
        stages: Sequence[Stage],
        finish: Callable[[Any], Any],  # of a minibatch, in the thread that asks for it
        size: Callable[[Callable[[], bool]], int],  # of the next bulk; 0 ends the plan
        ahead: int,  # how many bulks may wait after a stage; 0 takes no threads
        # whether a bulk that was started goes through all stages in any case, because
        # other ranks take part in them; then only `size` may end the plan early
        drain: bool = False,
    ) -> None:
        self._finish = finish
        self._ready: deque[Any] = deque()
        stop = threading.Event()
        self._bulks: Iterator[list[Any]] = _cut(plan, size, stop, drain)
        self.threads: list[threading.Thread] = []
        self._close: Any = None
        output: _Ahead | None = None
        for stage in stages:
            self._bulks = map(stage, self._bulks, repeat(stop.is_set))
            if ahead:
                output = _Ahead(self._bulks, ahead, stop, output)
                self._bulks = iter(output)
                self.threads.append(output.thread)
        if output is not None:
            # the threads refer to the stages, not to this object: dropping it ends them
            timeout = 5.0 if drain else 30.0  # other ranks may have gone
            self._close = weakref.finalize(self, _stop, output, self.threads, timeout)
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Stops the threads, after bulks that other ranks take part in."""
        if self._close is not None:
            self._close()

    def __iter__(self) -> PrefetchQueue:
        return self

    def __next__(self) -> Any:
        """Returns the next minibatch, or raises the error of building it."""
        while not self._ready:
            self._ready.extend(next(self._bulks))
        return self._finish(self._ready.popleft())


class _Ahead:
    """Makes bulks in a thread of its own, so many ahead of who reads them.

    It ends with the bulks, or with an error, which the reader raises.
    """

    def __init__(
        self,
        bulks: Iterator[list[Any]],
        capacity: int,
        stop: threading.Event,
        upstream: _Ahead | None,
    ) -> None:
        self._bulks, self._upstream = bulks, upstream
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(capacity)
        self._stop, self._closed = stop, threading.Event()
        name = "pyg_distcomm bulks"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            for bulk in self._bulks:
                self._put("bulk", bulk)
            self._put("end")
        except BaseException as error:
            self._put("error", error)
            if self._upstream is not None:
                self._upstream.close()

    def _put(self, kind: str, value: Any = None) -> None:
        """Waits for a free slot, or until nobody reads on."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put((kind, value), timeout=_POLL_SECONDS)
                return

    def close(self) -> None:
        """Ends reading, frees a slot for a waiting writer, and raises in a waiting reader."""
        self._closed.set()
        self._stop.set()
        ended = RuntimeError(
            "got a request for a minibatch of an epoch that has ended, because another epoch "
            "of the loader has begun; iterate over one epoch at a time"
        )
        while True:  # a writer may still fill the slot first
            try:
                self._queue.put_nowait(("error", ended))
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()

    def __iter__(self) -> Iterator[list[Any]]:
        while (item := self._queue.get())[0] != "end":
            if item[0] == "error":
                raise item[1]
            yield item[1]


def _cut(
    plan: Iterator[Any],
    size: Callable[[Callable[[], bool]], int],
    stop: threading.Event,
    drain: bool,
) -> Iterator[list[Any]]:
    """Yields bulks of the plan; after a stop none, or where ranks agree, until `size` says."""
    while drain or not stop.is_set():
        if not (wanted := list(islice(plan, size(stop.is_set)))):
            return
        yield wanted


def _stop(output: _Ahead, threads: list[threading.Thread], timeout: float) -> None:
    output.close()
    # the garbage collector may run this in a thread that one of these threads waits for
    if threading.current_thread() is threading.main_thread():
        for thread in threads:
            thread.join(timeout=timeout)


class Tracked:
    """Iterates over one epoch, which begins with its first batch, and records how it goes."""

    def __init__(self, begin: Callable[[], Epoch], length: Callable[[], int]) -> None:
        self._begin, self._length = begin, length
        self._begun: Epoch | None = None

    def __iter__(self) -> Tracked:
        return self

    def __len__(self) -> int:
        return self._length()

    def __next__(self) -> Any:
        if self._begun is None:
            count = self._length()
            self._length = lambda: count
            self._begun = self._begin()
        batches, progress, phases, steps = self._begun
        phases.training_ended()
        if steps is not None:
            steps.before_batch()
        begin = time.perf_counter_ns()
        try:
            batch = next(batches)
        except StopIteration:
            progress.finished = True
            if steps is not None:
                steps.at_end()
            raise
        progress.rounds += 1
        if steps is not None:
            steps.yielded()
        phases.waiting_ended(begin)
        return batch.unpack() if hasattr(batch, "unpack") else batch
