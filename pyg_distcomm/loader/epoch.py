"""Shares the minibatches of an epoch out over the ranks, and tracks an epoch's progress.

[Note: batch sharding] An epoch is a list of batches, numbered 0 .. T-1, the same on all ranks.
Batch t goes to rank t mod P, so that an epoch can go on with another number of ranks
after any round. Lists that the script has split itself stay split: batch i of rank r
then has number i P + r. A batch's number, not its rank, keys its draws.

`Phases` measures sampling, fetching, collating and training.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.comm.ledger import Ledger, format_table
from pyg_distcomm.comm.random import fold, keyed_permutation
from pyg_distcomm.comm.trace import label
from pyg_distcomm.loader.collate import Sent
from pyg_distcomm.process import PROCESS

SAMPLE, FETCH, ASSEMBLE, WAIT, TRAIN = "sample", "fetch", "assemble", "wait", "train"


@dataclass
class Phase:
    """Sums up one phase of an epoch, on this rank.

    Args:
        seconds: spent in it.
        waiting: of them, for other ranks and the network.
        bytes: received in it.
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
    """Sums up the phases of one epoch of a loader, as far as it has come.

    "sample", "fetch" and "assemble" run in threads beside training, so that they add up
    to more than the epoch; "wait" is what the loop waited for the next minibatch, and
    "train" all that it did between two of them. `print(phases)` shows a table.
    """

    by_name: dict[str, Phase] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _left: int | None = None

    @contextmanager
    def timed(self, name: str, ledger: Ledger | None = None) -> Iterator[None]:
        """Adds what a block takes, and what is counted by a ledger of its own meanwhile."""
        begin, before = time.perf_counter_ns(), _travelled(ledger)
        try:
            with label(name):
                yield
        finally:
            after = _travelled(ledger)
            self._add(name, begin, after[0] - before[0], after[1] - before[1])

    def asked(self) -> None:
        """Notes that the loop asks for a minibatch: it has trained until now."""
        if self._left is not None:
            self._add(TRAIN, self._left)

    def given(self, asked: int) -> None:
        """Notes that it has got one, and when it asked, in ns."""
        self._add(WAIT, asked)
        self._left = time.perf_counter_ns()

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
        order = [n for n in (SAMPLE, FETCH, ASSEMBLE, WAIT, TRAIN) if n in self.by_name]
        rows = [
            (name, p.seconds, p.computing, p.waiting, p.bytes)
            for name, p in ((n, self.by_name[n]) for n in order)
        ]
        return format_table(head, rows)


def _travelled(ledger: Ledger | None) -> tuple[float, int]:
    """Returns seconds waited and bytes received."""
    if ledger is None:
        return 0.0, 0
    return ledger.total("seconds"), ledger.bytes()


def plot_phases(runs: Mapping[str, Phases], ax: Any = None) -> Any:
    """Plots a stacked bar of phases for each run, with waiting hatched.

    As the breakdown of epochs in [Tripathy24]; phases overlap in time, so a bar is work and
    not the length of an epoch. Returns matplotlib's axes; needs the extra "plot".
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    ax = plt.subplots()[1] if ax is None else ax
    names = [SAMPLE, FETCH, ASSEMBLE, TRAIN]
    colours = dict(
        zip(names, ("#0072B2", "#D55E00", "#009E73", "#999999"), strict=True)
    )
    for place, phases in enumerate(runs.values()):
        top = 0.0
        for name in names:
            phase = phases[name]
            for seconds, hatch in ((phase.computing, ""), (phase.waiting, "//")):
                if seconds:
                    ax.bar(place, seconds, bottom=top, color=colours[name], hatch=hatch)
                    top += seconds
    ax.set_xticks(range(len(runs)), list(runs))
    ax.set_ylabel("seconds in an epoch, summed over threads")
    marks = [Patch(color=colours[name], label=name) for name in names]
    marks.append(Patch(fill=False, hatch="//", label="waiting for ranks"))
    ax.legend(handles=marks, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return ax


_ORDER, _DRAWS = 0x0D, 0xD4


@dataclass(frozen=True, eq=False)
class Numbered:
    """Describes one minibatch to sample, for the thread or worker that samples it.

    Args:
        positions: of its inputs in the loader's list.
        key: of its draws.
        padding: whether it repeats another batch, to keep the ranks in step.
    """

    positions: NDArray[np.int64]
    key: int
    padding: bool = False


@dataclass(frozen=True)
class BatchSharding:
    """Assigns the batches of an epoch to ranks.

    Args:
        rank: this rank.
        size: the number of ranks.
        split: whether each rank has a list of its own.
        batches: of the epoch; of each rank's own list, if split; none if not known.
        even: "pad" or "drop".
    """

    rank: int
    size: int
    split: bool
    batches: tuple[int, ...]
    even: str

    def rounds(self, start: int) -> int:
        """Returns how many batches each rank gets, from global batch `start` on."""
        if self.split:
            most = max(self.batches) if self.even == "pad" else min(self.batches)
            return max(most - start // self.size, 0)
        left = max(self.batches[0] - start, 0)
        return -(-left // self.size) if self.even == "pad" else left // self.size

    def of_rank(self, start: int) -> Iterator[tuple[int, int, bool]]:
        """Yields this rank's batches: (place in its list, global number, a repeat?)."""
        for i in range(self.rounds(start)):
            if self.split:
                own, t = self.batches[self.rank], start // self.size + i
                spare = t >= own
                t = t % own if spare and own else t
                yield t, t * self.size + self.rank, spare
                continue
            first = start + i * self.size
            t = first + (self.rank - first) % self.size
            spare = t >= self.batches[0]
            t = t % self.batches[0] if spare else t
            yield t, t, spare


class Epochs:
    """Lists the batches of any epoch of a loader, as a function of its seed.

    Args:
        count: number of inputs.
        batch_size: inputs of a batch.
        shuffle: whether each epoch has an order of its own.
        drop_last: whether to leave out a last batch that is not full.
        given: the script's own batches, an iterable of lists of positions, or None.
        draw: returns the positions [count] of an epoch, given a key; or None.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        given: Any = None,
        draw: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.count, self.batch_size, self.shuffle = count, batch_size, shuffle
        self.drop_last, self.given, self.draw = drop_last, given, draw

    def length(self) -> int | None:
        """Returns the number of batches of an epoch, if the script's own have one."""
        if self.given is not None:
            try:
                return len(self.given)
            except (TypeError, ValueError, NotImplementedError):
                return None
        full = self.count / self.batch_size
        return math.floor(full) if self.drop_last else math.ceil(full)

    def batches(
        self, seed: int, epoch: int, sharding: BatchSharding, start: int
    ) -> Iterator[Numbered]:
        """Yields this rank's batches of an epoch, from global batch `start` on."""
        if self.given is not None:
            yield from self._given(seed, epoch, sharding, start)
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
            yield Numbered(inputs, fold(seed, epoch, _DRAWS, number), padding)

    def _given(
        self, seed: int, epoch: int, sharding: BatchSharding, start: int
    ) -> Iterator[Numbered]:
        """Numbers the script's own batches; those before `start` are passed over."""
        rounds = (
            sharding.rounds(start) if sharding.size > 1 and sharding.batches else None
        )
        skipped = start // sharding.size
        first = np.empty(0, np.int64)
        i = skipped
        for place, index in enumerate(self.given):
            if place == 0:
                first = np.asarray(index, dtype=np.int64)
            if place < skipped:
                continue
            if rounds is not None and i - skipped >= rounds:
                return
            key = fold(seed, epoch, _DRAWS, i * sharding.size + sharding.rank)
            yield Numbered(np.asarray(index, dtype=np.int64), key)
            i += 1
        key = fold(seed, epoch, _DRAWS, sharding.rank)
        while rounds is not None and i - skipped < rounds:
            yield Numbered(first, key, padding=True)
            i += 1


@dataclass
class Progress:
    """Records how many batches of the current epoch were yielded."""

    epoch: int
    start: int
    rounds: int = 0
    finished: bool = False


class Positions(Sequence[int]):
    """Stands for the positions of a list, and passes a `Numbered` on to a worker."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return range(self._size)[index]

    def __getitems__(self, index: Any) -> Any:
        return index


class IndexSampler:
    """Yields the batches of the next epoch, as torch's DataLoader asks for them."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Numbered]:
        return self._loader._plan()

    def __len__(self) -> int:
        sharding = self._loader._sharding()
        if sharding.batches:
            return sharding.rounds(0)
        return len(self._loader._epochs.given)  # raises what the script's own raise


class Tracked:
    """Iterates over one epoch, and records its progress and its phases."""

    def __init__(
        self, inner: Iterator[Any], progress: Progress, length: int, phases: Phases
    ) -> None:
        self._inner, self._progress, self._length = inner, progress, length
        self._phases = phases

    def __iter__(self) -> Tracked:
        return self

    def __len__(self) -> int:
        return self._length

    def __next__(self) -> Any:
        self._phases.asked()
        begin = time.perf_counter_ns()
        try:
            batch = next(self._inner)
        except StopIteration:
            self._progress.finished = True
            raise
        self._progress.rounds += 1
        self._phases.given(begin)
        return batch.received() if isinstance(batch, Sent) else batch
