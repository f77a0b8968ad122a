"""Prefetches bulks of minibatches in threads, and times the phases of an epoch."""

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
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import Ledger, format_table, label
from pyg_distcomm.kernels import threads
from pyg_distcomm.loader.batch_sharding import PlannedBatch, World
from pyg_distcomm.loader.collate import Collator
from pyg_distcomm.loader.device_placement import Placement, SideStream
from pyg_distcomm.process import PROCESS

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
    """Sums up the seconds and bytes of each phase of a loader's epoch so far.

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
            with label(name):
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
        order = [n for n in (SAMPLE, FETCH, ASSEMBLE, WAIT, TRAIN) if n in self.by_name]
        rows = [
            (name, p.seconds, p.computing, p.waiting, p.bytes)
            for name, p in ((n, self.by_name[n]) for n in order)
        ]
        return format_table(head, rows)


def _ledger_totals(ledger: Ledger | None) -> tuple[float, int]:
    """Returns the seconds waited and the bytes received that a ledger has counted."""
    if ledger is None:
        return 0.0, 0
    return ledger.total("seconds"), ledger.bytes()


def plot_phases(runs: Mapping[str, Phases], ax: Any = None) -> Any:
    """Plots a stacked bar of phases for each run, with waiting hatched.

    As the breakdown of epochs in [Tripathy24]. Phases overlap in time, so a bar shows work,
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


_POLL_SECONDS = 0.2  # seconds between looks at whether to stop

Stage = Callable[[list[Any], Callable[[], bool]], list[Any]]


class PrefetchQueue:
    """Yields minibatches in order, built a bulk at a time, each stage in its own thread.

    Its threads stop when it is exhausted, dropped or interrupted.

    Args:
        plan: the minibatches to build, in order; read by one thread.
        stages: functions that turn the bulk of the previous stage (the first: a list from
            the plan) into a bulk. They are also given a function that returns whether to stop.
        finish: applied to each minibatch in the thread that requests it.
        size: returns the size of the next bulk; 0 ends the plan.
        ahead: how many bulks may wait after a stage; 0 builds on demand, without threads.
        drain: whether a bulk that was started goes through all stages in any case, because
            other ranks take part in them. Then only `size` may end the plan early.
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
        upstream: _StageQueue | None = None
        self.threads: list[threading.Thread] = []
        self._close: Any = None
        if ahead == 0:
            for stage in stages:
                bulks = map(partial(_staged, stage, stop), bulks)
            self._bulks = bulks
            return
        for k, stage in enumerate(stages):
            output = _StageQueue(ahead, stop, drain, last=k == len(stages) - 1)
            thread = threading.Thread(
                target=_run,
                args=(bulks, partial(_staged, stage, stop), upstream, output),
                name="pyg_distcomm bulks",
                daemon=True,
            )
            self.threads.append(thread)
            bulks, upstream = iter(output), output
        self._bulks = bulks
        # the threads refer to the queues, not to this object: dropping it ends them
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


class _StageQueue:
    """Passes bulks from the thread of one stage to the next."""

    def __init__(
        self, capacity: int, stop: threading.Event, drain: bool, last: bool
    ) -> None:
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(capacity)
        self._stop, self._drain, self._last = stop, drain, last
        self._closed = threading.Event()

    def put(self, kind: str, value: Any) -> bool:
        """Waits for a free slot, or until nobody reads on; returns whether to go on."""
        while not self._abandoned():
            try:
                self._queue.put((kind, value), timeout=_POLL_SECONDS)
                break
            except queue.Full:
                continue
        return self._drain or not self._abandoned()

    def _abandoned(self) -> bool:
        # bulks that are drained go on to the next stage, even after a stop
        through = self._drain and not self._last
        return self._closed.is_set() or (self._stop.is_set() and not through)

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
        while True:
            try:
                kind, value = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                # the previous stage may have stopped without an end mark
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
    upstream: _StageQueue | None,
    output: _StageQueue,
) -> None:
    """Fills an output queue from the plan or the previous stage; errors go into it, too."""
    try:
        for bulk in bulks:
            if not output.put("bulk", work(bulk)):
                return
        output.put("end", None)
    except BaseException as error:
        output.put("error", error)
        if upstream is not None:
            upstream.close()


def _stop(output: _StageQueue, threads: list[threading.Thread], timeout: float) -> None:
    output.close()
    # the garbage collector may run this in a thread that one of these threads waits for
    if threading.current_thread() is threading.main_thread():
        for thread in threads:
            thread.join(timeout=timeout)


BUDGET = 1 << 30  # bytes of minibatches in flight, if that much memory is free
MAX_PER_THREAD = 4  # minibatches of an automatic bulk per thread: more is not faster
FIRST_PARTITIONED = 4  # minibatches of the first bulk of a partitioned graph
MAX_PARTITIONED = 16  # minibatches of its automatic bulks, which cost messages


class BulkBuilder:
    """Builds the bulks of one epoch: samples, fetches, collates, and chooses their size.

    The script's own code (a transform of the sampler's output, a subclass) runs in the
    thread that requests minibatches; so does all work that is not on the CPU.

    A minibatch is sampled and collated in one stage, on one thread, unless minibatches are
    sampled together or their rows come from other ranks: then there are two stages, one
    that samples a bulk, and one that fetches its rows and collates it.

    [Note: cores] Bulks are built ahead on cores that the training threads leave idle, so
    that there are never more threads than cores. If no core is idle, bulks are built when
    requested, on all training threads, which wait meanwhile. Bulks that wait themselves, for
    messages of other ranks or for a disk, are built ahead in any case.
    """

    def __init__(self, loader: Any, phases: Phases) -> None:
        self._phases = phases
        self._loader, self._collator = loader, Collator(loader, loader._buffers)
        self._source = loader.partitioned_source
        own, ours = loader._overrides_collate, self._collator.thread_safe
        self._collates_late = (
            own or not ours or loader.transform_sampler_output is not None
        )
        self._sample = loader.collate_fn if own else loader._sample_planned
        together = hasattr(loader.neighbor_sampler_in_use, "sample_bulk")
        self._samples_bulks = together and not own
        # each minibatch is collective: one at a time
        self._one_at_a_time = together and own
        option = loader.options.prefetch
        idle = threads.spare(World.now().size)
        waits = self._source is not None or self._collator.pooled
        place: Placement | None = loader.placement
        self._side_stream = SideStream(place.device) if place and place.cuda else None
        waits = waits or self._side_stream is not None
        self.ahead = int(idle > 0 or waits) if option == "auto" else int(option)
        # on a device, one thread puts the work on its stream
        several = ours and not own and self._side_stream is None
        self._width = threads.width() if several else 1
        if self.ahead:
            self._width = max(1, min(self._width, idle))

    def stages(self) -> list[Stage]:
        """Returns the functions that build a bulk, in order."""
        two = self._samples_bulks or self._source is not None
        stages: list[Stage] = [self._sample_and_assemble]
        if two and self._collates_late:
            stages = [self._sample_bulk]
        elif two:
            stages = [self._sample_bulk, self._assemble]
        if self._source is not None:
            stages = [self._reporting_errors(stage) for stage in stages]
        if self._side_stream is not None:
            last = len(stages) - 1
            stages = [
                self._on_side_stream(self._side_stream, stage, k == last)
                for k, stage in enumerate(stages)
            ]
        return stages

    @staticmethod
    def _on_side_stream(side: SideStream, stage: Stage, last: bool) -> Stage:
        def work(bulk: list[Any], stopped: Callable[[], bool]) -> list[Any]:
            with side.use():
                found = stage(bulk, stopped)
                return side.sent(found) if last else found

        return work

    def size(self, stopped: Callable[[], bool]) -> int:
        """Returns the size of the next bulk: the option of the loader, or what fits a budget.

        For a partitioned graph, all ranks agree on it; 0 ends the epoch.
        """
        option = self._loader.options.bulk_size
        fits = int(option) if option != "auto" else self._bulk_size_for_budget()
        if self._source is None:
            return fits
        world = self._source.sampling.world
        sizes = collectives.all_gather_counts([int(stopped()), fits], world)
        gone = [rank for rank, (stop, _) in enumerate(sizes) if stop]
        if gone and world.rank not in gone:
            if world.watch is not None:
                world.watch.wait_for_report()  # it may have failed, and report why
            raise RuntimeError(
                f"rank(s) {', '.join(map(str, gone))} stopped in the middle of an epoch, "
                f"and rank {world.rank} did not; all ranks sample a partitioned graph "
                "together, so take the same number of minibatches on all ranks"
            )
        return 0 if gone else min(fits for _, fits in sizes)

    def _bulk_size_for_budget(self) -> int:
        most = MAX_PER_THREAD * self._width
        if self._samples_bulks or self._source is not None:
            most = max(most, MAX_PARTITIONED)
        size = self._loader.batch_bytes
        if not size:  # the size of a minibatch is known after the first bulk
            least = 0 if self._source is None else FIRST_PARTITIONED
            return max(self._width, least)
        place = self._loader.placement
        free = None if place is None else place.free_memory()
        budget = min(BUDGET, (_free_memory() if free is None else free) // 8)
        # besides the waiting bulks: one in use, one being built, and the rows fetched for it
        others = 2 if self._source is None else 3
        fits = budget // (size * (self.ahead + others))
        return max(self._width, min(most, fits))

    # Stages: a bulk for a bulk --------------------------------------------------------

    def _sample_and_assemble(
        self, plan: list[PlannedBatch], stopped: Callable[[], bool]
    ) -> list[Any]:
        """Samples and assembles a bulk, each minibatch on one thread.

        It ends between two minibatches once ``stopped()`` returns True.
        """
        outs: list[Any] = [None] * len(plan)
        whole = not self._collates_late and not self._collator.pooled

        def sample(k: int) -> None:
            if stopped():
                return
            with threads.limited(1):
                outs[k] = self._sample(plan[k])
                if whole:
                    outs[k] = self._collate(outs[k], None)

        with self._phases.timed(SAMPLE):  # and assembly, if in one go
            self._run_on_threads(sample, len(plan))
        if stopped():
            return []
        if whole:
            self._record_batch_bytes(outs)
        if whole or self._collates_late:
            return outs
        return self._assemble(outs, stopped)

    def _sample_bulk(
        self, plan: list[PlannedBatch], stopped: Callable[[], bool]
    ) -> list[Any]:
        with self._phases.timed(SAMPLE, self._ledger(SAMPLE)):
            return self._draw_samples(plan)

    def _draw_samples(self, plan: list[PlannedBatch]) -> list[Any]:
        if self._samples_bulks:
            with threads.limited(self._width):
                return list(self._loader._sample_planned_bulk(plan))
        outs: list[Any] = [None] * len(plan)

        def sample(k: int) -> None:
            with threads.limited(1):
                outs[k] = self._sample(plan[k])

        if self._one_at_a_time:
            for k in range(len(plan)):
                sample(k)
        else:
            self._run_on_threads(sample, len(plan))
        return outs

    def _assemble(self, outs: list[Any], stopped: Callable[[], bool]) -> list[Any]:
        """Fetches the rows of a bulk, and collates its minibatches on several threads."""
        with (
            self._phases.timed(FETCH, self._ledger(FETCH)),
            threads.limited(self._width),
        ):
            pools = self._collator.fetch(outs)
            routes = [] if self._source is None else self._source.routes(outs)
        found: list[Any] = [None] * len(outs)

        def assemble(k: int) -> None:
            with threads.limited(1):
                found[k] = self._collate(outs[k], pools)
                if routes:
                    self._source.attach(found[k][0], routes[k])

        if stopped():
            return []
        with self._phases.timed(ASSEMBLE):
            self._run_on_threads(assemble, len(outs))
        self._record_batch_bytes(found)
        return found

    def _reporting_errors(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that it reports its errors to the other ranks."""

        def reporting(*args: Any) -> Any:
            try:
                return work(*args)
            except BaseException as error:
                watch = self._source.sampling.world.watch
                if watch is not None:
                    watch.report(error)
                raise

        return reporting

    def _ledger(self, purpose: str) -> Ledger | None:
        source = self._source
        if source is None:
            return None
        channel = source.sampling if purpose == SAMPLE else source.fetching
        found: Ledger = channel.world.ledger
        return found

    def finish(self, out: Any) -> Any:
        """Completes a minibatch in the thread that iterates, where the script's code runs."""
        if self._side_stream is not None:
            out = self._side_stream.received(out)
        if self._source is None:
            return self._complete(out)
        # not stored: the builder would refer to itself, and loaders would never be freed
        return self._reporting_errors(self._complete)(out)

    def _complete(self, out: Any) -> Any:
        loader = self._loader
        if not self._collates_late:
            data = loader._postprocess(*out)
        elif loader._overrides_collate and loader.filter_per_worker:
            data = out
        else:
            data = loader.filter_fn(out)
        pinned = loader.pin_memory and loader.placement is None
        if pinned and torch.cuda.is_available():
            return pin_memory(data)
        return data

    def _collate(self, out: Any, pools: Any) -> tuple[Any, bool | None]:
        return self._collator(out, pools), getattr(out, "padding", None)

    def _record_batch_bytes(self, found: list[Any]) -> None:
        """Records the size of the first minibatch; later epochs use it, too."""
        if not self._loader.batch_bytes and found:
            self._loader.batch_bytes = max(_bytes_of(found[0][0]), 1)

    def _run_on_threads(self, work: Any, count: int) -> None:
        with threads.limited(self._width):
            threads.run(work, [(k,) for k in range(count)])


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * BUDGET


def _bytes_of(batch: Any) -> int:
    """Returns the bytes of the numbers in a minibatch; of sparse matrices, of their values."""
    total = 0
    for value in (value for store in batch.stores for value in store.values()):
        if isinstance(value, Tensor):
            rest = value.numel() if value.layout == torch.strided else value._nnz()
            total += rest * value.element_size()
    return total
