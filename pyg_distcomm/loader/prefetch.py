"""Builds bulks of minibatches in threads, ahead of training, and times phases of an epoch."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory
from torch_geometric.profile import get_data_size

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import Ledger, format_table
from pyg_distcomm.comm.trace import label
from pyg_distcomm.kernels import threads
from pyg_distcomm.loader.collate import Collator, Sent
from pyg_distcomm.loader.epoch import Numbered, Progress, World
from pyg_distcomm.loader.placement import Placement, SideStream
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


_SLICE = 0.2  # seconds between looks at whether to stop

Stage = Callable[[list[Any], Callable[[], bool]], list[Any]]


class PrefetchQueue:
    """Yields minibatches in order, made a bulk at a time, each stage in its own thread.

    Dropped, exhausted or interrupted, it stops its threads.

    Args:
        plan: what to make, in order; read by one thread.
        stages: each makes a bulk of what the one before made; the first, of a list from
            the plan. They are also given a function that tells whether to stop.
        finish: applied to each minibatch in the thread that asks for it.
        size: returns how many minibatches the next bulk has; 0 ends the plan.
        ahead: how many bulks may wait behind a stage; 0 works on demand, without threads.
        drain: whether a bulk that has been begun goes through all stages in any case:
            where other ranks take part in them. Only `size` may end the plan early.
    """

    def __init__(
        self,
        plan: Iterator[Any],
        stages: Sequence[Stage],
        finish: Callable[[Any], Any],
        size: Callable[[Callable[[], bool]], int],
        ahead: int,
        drain: bool = False,
    ) -> None:
        self._finish = finish
        self._ready: deque[Any] = deque()
        stop = threading.Event()
        bulks: Iterator[list[Any]] = _cut(plan, lambda: size(stop.is_set))
        before: _Line | None = None
        self.threads: list[threading.Thread] = []
        self._close: Any = None
        if ahead == 0:
            for stage in stages:
                bulks = map(partial(_staged, stage, stop), bulks)
            self._bulks = bulks
            return
        for k, stage in enumerate(stages):
            line = _Line(ahead, stop, drain, last=k == len(stages) - 1)
            thread = threading.Thread(
                target=_run,
                args=(bulks, partial(_staged, stage, stop), before, line),
                name="pyg_distcomm bulks",
                daemon=True,
            )
            self.threads.append(thread)
            bulks, before = iter(line), line
        self._bulks = bulks
        # the threads know the lines, not this object: dropping this ends them
        patience = 5.0 if drain else 30.0  # other ranks may not be there any more
        self._close = weakref.finalize(self, _stop, line, self.threads, patience)
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Stops the threads, after what other ranks take part in."""
        if self._close is not None:
            self._close()

    def __iter__(self) -> PrefetchQueue:
        return self

    def __next__(self) -> Any:
        """Returns the next minibatch, or raises what making it raised."""
        while not self._ready:
            self._ready.extend(next(self._bulks))
        return self._finish(self._ready.popleft())


class _Line:
    """Passes bulks from the thread of one stage to the next."""

    def __init__(
        self, room: int, stop: threading.Event, drain: bool, last: bool
    ) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(room)
        self._stop, self._drain, self._last = stop, drain, last
        self._left = threading.Event()

    def put(self, kind: str, value: Any) -> bool:
        """Waits for room, or for nobody to want it; returns whether to go on."""
        while not self._unwanted():
            try:
                self._queue.put((kind, value), timeout=_SLICE)
                break
            except queue.Full:
                continue
        return self._drain or not self._unwanted()

    def _unwanted(self) -> bool:
        # what is drained goes on to the next stage, whoever has stopped
        through = self._drain and not self._last
        return self._left.is_set() or (self._stop.is_set() and not through)

    def leave(self) -> None:
        """Says that nobody takes any more, and makes room for one who waits."""
        self._left.set()
        self._stop.set()
        ended = RuntimeError(
            "this epoch of the loader has ended, since another one has begun"
        )
        while True:  # whoever puts at this moment may still win
            try:
                self._queue.put_nowait(("error", ended))
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()

    def __iter__(self) -> Iterator[list[Any]]:
        while True:
            try:
                kind, value = self._queue.get(timeout=_SLICE)
            except queue.Empty:  # the stage before has stopped, and said nothing
                if self._stop.is_set() and not self._drain:
                    return
                continue
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value


def _cut(plan: Iterator[Any], size: Callable[[], int]) -> Iterator[list[Any]]:
    while wanted := list(islice(plan, size())):
        yield wanted


def _staged(stage: Stage, stop: threading.Event, bulk: list[Any]) -> list[Any]:
    return stage(bulk, stop.is_set)


def _run(
    bulks: Iterator[list[Any]],
    work: Callable[[list[Any]], list[Any]],
    before: _Line | None,
    line: _Line,
) -> None:
    """Fills a line, from the plan or the line before; what goes wrong is put in it too."""
    try:
        for bulk in bulks:
            if not line.put("bulk", work(bulk)):
                return
        line.put("end", None)
    except BaseException as error:
        line.put("error", error)
        if before is not None:
            before.leave()


def _stop(line: _Line, threads: list[threading.Thread], patience: float) -> None:
    line.leave()
    # a collector may run this in a helper that a thread itself is waiting for
    if threading.current_thread() is threading.main_thread():
        for thread in threads:
            thread.join(timeout=patience)


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


BUDGET = 1 << 30  # bytes of minibatches in flight, if memory allows that much
MOST = 4  # minibatches of an automatic bulk for each thread: more wins nothing
FIRST_SPREAD = 4  # minibatches of the first bulk where each bulk costs messages
MOST_SPREAD = 16  # where each bulk costs messages, more of them do


class BulkBuilder:
    """Builds the bulks of one epoch: samples, fetches, collates, and chooses their size.

    What a script has written itself (a transform of the sampler's output, a subclass) runs
    in the thread that asks for minibatches; so does all that is not on the CPU.

    Minibatches are sampled and assembled in one go, each on one thread, unless they are
    sampled together or their rows come from other ranks: then a bulk is sampled, and
    fetched and assembled, in two stages.

    [Note: cores] Bulks are built ahead on cores that the threads of training leave idle,
    so that together they are never more than the cores. Where none is left, they are
    built when asked for, on all threads of training, which wait meanwhile. What waits
    itself, for messages of other ranks or for a disk, is begun ahead in any case.
    """

    def __init__(self, loader: Any, phases: Phases) -> None:
        self._phases = phases
        self._loader, self._assembly = loader, Collator(loader, loader._buffers)
        self._spread = loader.spread
        own, ours = loader._customised, self._assembly.threads
        self._late = own or not ours or loader.transform_sampler_output is not None
        self._sample = loader.collate_fn if own else loader._sampled
        together = hasattr(loader.neighbor_sampler_in_use, "sample_bulk")
        self._together = together and not own
        self._alone = together and own  # each minibatch is collective: one at a time
        asked = loader._loader_options.prefetch
        idle = threads.spare(World.now().size)
        waits = self._spread is not None or self._assembly.pooled
        place: Placement | None = loader.placement
        self._side = SideStream(place.device) if place and place.cuda else None
        waits = waits or self._side is not None
        self.ahead = int(idle > 0 or waits) if asked == "auto" else int(asked)
        # work on a device is put on the stream of one thread
        several = ours and not own and self._side is None
        self._width = threads.width() if several else 1
        if self.ahead:
            self._width = max(1, min(self._width, idle))

    def stages(self) -> list[Stage]:
        """Returns what makes a bulk, one function after the other."""
        two = self._together or self._spread is not None
        stages: list[Stage] = [self._whole]
        if two and self._late:
            stages = [self._sampled]
        elif two:
            stages = [self._sampled, self._assembled]
        if self._spread is not None:
            stages = [self._reporting(stage) for stage in stages]
        if self._side is not None:
            last = len(stages) - 1
            stages = [
                self._streamed(self._side, stage, k == last)
                for k, stage in enumerate(stages)
            ]
        return stages

    @staticmethod
    def _streamed(side: SideStream, stage: Stage, last: bool) -> Stage:
        def work(bulk: list[Any], stopped: Callable[[], bool]) -> list[Any]:
            with side.use():
                found = stage(bulk, stopped)
                return side.sent(found) if last else found

        return work

    def size(self, stopped: Callable[[], bool]) -> int:
        """Returns the size of the next bulk: as asked, or what the budget holds.

        For a partitioned graph, all ranks agree on it; 0 ends the epoch.
        """
        asked = self._loader._loader_options.bulk_size
        fits = int(asked) if asked != "auto" else self._fitting()
        if self._spread is None:
            return fits
        world = self._spread.sampling.world
        sizes = collectives.all_gather_counts([int(stopped()), fits], world)
        gone = [rank for rank, (stop, _) in enumerate(sizes) if stop]
        if gone and world.rank not in gone:
            if world.watch is not None:
                world.watch.listen()  # it may have failed, and say why next
            raise RuntimeError(
                f"rank(s) {', '.join(map(str, gone))} stopped in the middle of an epoch, "
                f"and rank {world.rank} did not; all ranks sample a partitioned graph "
                "together, so all have to take the same number of minibatches"
            )
        return 0 if gone else min(fits for _, fits in sizes)

    def _fitting(self) -> int:
        most = MOST * self._width
        if self._together or self._spread is not None:
            most = max(most, MOST_SPREAD)
        size = self._loader.batch_bytes
        if not size:  # how large a minibatch is shows after the first bulk
            least = 0 if self._spread is None else FIRST_SPREAD
            return max(self._width, least)
        place = self._loader.placement
        free = None if place is None else place.free_memory()
        room = min(BUDGET, (_free_memory() if free is None else free) // 8)
        # beside those that wait: one in use, one in the making, and the rows for it
        beside = 2 if self._spread is None else 3
        fits = room // (size * (self.ahead + beside))
        return max(self._width, min(most, fits))

    # Stages: a bulk for a bulk --------------------------------------------------------

    def _whole(self, plan: list[Numbered], stopped: Callable[[], bool]) -> list[Any]:
        """Samples and assembles a bulk, each minibatch on one thread.

        It leaves off between two minibatches once ``stopped()``: nobody wants them.
        """
        outs: list[Any] = [None] * len(plan)
        whole = not self._late and not self._assembly.pooled

        def sample(k: int) -> None:
            if stopped():
                return
            with threads.limited(1):
                outs[k] = self._sample(plan[k])
                if whole:
                    outs[k] = self._joined(outs[k], None)

        with self._phases.timed(SAMPLE):  # and assembly, if in one go
            self._spread_out(sample, len(plan))
        if stopped():
            return []
        if whole:
            self._weigh(outs)
        if whole or self._late:
            return outs
        return self._assembled(outs, stopped)

    def _sampled(self, plan: list[Numbered], stopped: Callable[[], bool]) -> list[Any]:
        with self._phases.timed(SAMPLE, self._ledger(SAMPLE)):
            return self._drawn(plan)

    def _drawn(self, plan: list[Numbered]) -> list[Any]:
        if self._together:
            with threads.limited(self._width):
                return list(self._loader._sampled_bulk(plan))
        outs: list[Any] = [None] * len(plan)

        def sample(k: int) -> None:
            with threads.limited(1):
                outs[k] = self._sample(plan[k])

        if self._alone:
            for k in range(len(plan)):
                sample(k)
        else:
            self._spread_out(sample, len(plan))
        return outs

    def _assembled(self, outs: list[Any], stopped: Callable[[], bool]) -> list[Any]:
        """Fetches the rows of a bulk, and assembles its minibatches over threads."""
        with (
            self._phases.timed(FETCH, self._ledger(FETCH)),
            threads.limited(self._width),
        ):
            pools = self._assembly.fetch(outs)
            routes = [] if self._spread is None else self._spread.routes(outs)
        found: list[Any] = [None] * len(outs)

        def assemble(k: int) -> None:
            with threads.limited(1):
                found[k] = self._joined(outs[k], pools)
                if routes:
                    self._spread.attach(found[k][0], routes[k])

        if stopped():
            return []
        with self._phases.timed(ASSEMBLE):
            self._spread_out(assemble, len(outs))
        self._weigh(found)
        return found

    def _reporting(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that also reports its errors to the other ranks."""

        def reporting(*args: Any) -> Any:
            try:
                return work(*args)
            except BaseException as error:
                watch = self._spread.sampling.world.watch
                if watch is not None:
                    watch.report(error)
                raise

        return reporting

    def _ledger(self, purpose: str) -> Ledger | None:
        spread = self._spread
        if spread is None:
            return None
        channel = spread.sampling if purpose == SAMPLE else spread.fetching
        found: Ledger = channel.world.ledger
        return found

    def finish(self, out: Any) -> Any:
        """Runs the script's own functions, in the thread that iterates."""
        if self._side is not None:
            out = self._side.received(out)
        end = (
            self._finished if self._spread is None else self._reporting(self._finished)
        )
        return end(
            out
        )  # not kept: the builder would hold itself, and loaders never end

    def _finished(self, out: Any) -> Any:
        loader = self._loader
        if not self._late:
            data = loader._finished(*out)
        elif loader._customised and loader.filter_per_worker:
            data = out
        else:
            data = loader.filter_fn(out)
        pinned = loader.pin_memory and loader.placement is None
        if pinned and torch.cuda.is_available():
            return pin_memory(data)
        return data

    def _joined(self, out: Any, pools: Any) -> tuple[Any, bool | None]:
        return self._assembly(out, pools), getattr(out, "padding", None)

    def _weigh(self, found: list[Any]) -> None:
        """Notes how large a minibatch is, once one is known: later epochs know it too."""
        if not self._loader.batch_bytes and found:
            self._loader.batch_bytes = max(get_data_size(found[0][0]), 1)

    def _spread_out(self, work: Any, count: int) -> None:
        with threads.limited(self._width):
            threads.run(work, [(k,) for k in range(count)])


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * BUDGET
