"""Exchanges notes about a loader between the ranks: of what it is, and of what it taught.

[Note: notes instead of collectives] PyG scripts build loaders on rank 0 alone, to
evaluate; a collective in a constructor would hang there. So ranks post notes to the
rendezvous store, and read the notes of the others when they first need them. The n-th loader
of a kind (its class, batch size and order) on one rank is matched with the n-th of that kind
on the others. Ranks also post the epochs that they begin. Say that this rank built loader L,
and then began epoch E. If another rank has begun E and has not built L, then L is not
shared at all: each rank that built it yields all of its batches. The number of an unshared
loader is not used again: ranks that build a loader of that kind later take the next number.
So it is if ranks wait for each other at different loaders, of the one that fewer have built (at
split=True, which waits for all, they raise), and if a rank shows no sign of the loader for
GRACE seconds: it may be in a barrier until this rank has evaluated.

[Note: unaveraged training] Ordinary tensors do not tell which rank's batch they came from, so
a missing average shows where optimizers step. While a loader deals out an epoch, each step
leaves a summary of its gradients. As a rank requests a batch after 1, 2, 4, ... others of the
loader, and at the end of an epoch, it posts a note: for each optimizer that has stepped since,
that summary, and a hash of the parameters. A rank whose optimizers have not been found to
average waits for the notes of the others; the rest only post, so that a rank which trains
something alone waits for nobody's step. Then, of each optimizer that has stepped on all ranks,

    equal gradients                   were averaged, by whatever means: no further comparison
    equal parameters, that changed    were averaged after the step: no further comparison
    equal parameters, as before       say nothing, as a learning rate of 0: compared later
    neither                           each rank trains another model: a ValueError on all

Gradients may differ by rounding, as of a sum in another order on each rank; parameters may
not. Rows of a `DistEmbedding`, and parts of parameters (DTensor, FSDP), are left out.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from pyg_distcomm.comm.consistency import differing, digest, projection
from pyg_distcomm.comm.failure import Wait, script_stacklevel
from pyg_distcomm.comm.mesh import Mesh, latest_mesh
from pyg_distcomm.comm.random import fold
from pyg_distcomm.comm.store import RankError, StoreMailbox
from pyg_distcomm.process import PROCESS

TIMEOUT = 300.0  # seconds to wait for the notes of other ranks, where there is no mesh
GRACE = 15.0  # seconds to wait, unless split=True, for ranks that may never come
_RAISED = "raised at "
_BEAT = 0.5  # seconds between heartbeats of a rank that others wait for
ADVICE = (
    "A loader shards its batches over the ranks, so all ranks have to build it; for a loader "
    "of a single rank, as to evaluate on rank 0, pass options=LoaderOptions(split=False)"
)
_DECISION = "decision"
_LATER_EPOCHS = 3  # how many are checked to find whether a rank has skipped a loader


@dataclass(frozen=True, eq=False)
class World:
    """Describes the ranks of torch's default process group, or a single one."""

    rank: int
    size: int

    @staticmethod
    def now() -> World:
        """Returns the current world."""
        if not dist.is_initialized():
            return World(0, 1)
        return World(dist.get_rank(), dist.get_world_size())


def launched_ranks() -> int:
    """Returns how many ranks the launcher has started, whether they have joined or not."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def next_name(kind: str) -> str:
    """Returns the name of the next loader of a kind, equal on all ranks, and counts it."""
    PROCESS.loaders.append(("built", kind))
    return f"{kind} #{PROCESS.loaders.count(('built', kind))}"


class Notes:
    """Exchanges notes about one loader between the ranks, of which there are several.

    Failures are reported to a mesh of the script, if there is one.
    """

    def __init__(self, world: World, name: str, mesh: Mesh | None = None) -> None:
        mesh = latest_mesh() if mesh is None else mesh
        self._watch = None if mesh is None else mesh.everyone.watch
        self.world, self._loaders_before = world, len(PROCESS.loaders)
        store = StoreMailbox(dist.distributed_c10d._get_default_store(), self._timeout)
        self._common = store.within("pyg_distcomm/loader")
        while self._is_unshared(f"place/{name}"):
            name = next_name(name.rpartition(" #")[0])
        self.name, self._key = name, f"place/{name}"
        self._store = self._common.within(self._key)
        self._waited: Wait | None = None
        self._raised = False  # for a mutual wait

    def _is_unshared(self, key: str) -> bool:
        """Returns whether the ranks have decided that the loader at a key is not shared."""
        decision = f"{key}/{_DECISION}"
        return self._common.check([decision]) and self._common.get(decision) == b"own"

    def post(self, note: dict[str, Any]) -> None:
        """Posts this rank's note, without waiting."""
        self._set_waiting_at("")  # an earlier wait may have ended in an error
        self._store.post(str(self.world.rank), note)

    def at(self, point: str) -> Notes:
        """Returns the notes about one point of the loader's epochs."""
        found = copy.copy(self)
        found._key = f"{self._key}/{point}"
        found._store = self._common.within(found._key)
        return found

    def begin(self, epoch: int) -> None:
        """Posts that this rank begins an epoch of the loader."""
        begun = f"begun/{self.name}/{epoch}"
        PROCESS.loaders.append(("begun", begun))
        self._common.set(f"{begun}/{self.world.rank}", "")

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Sends heartbeats during a slow block that ends by posting this rank's note."""
        stop = threading.Event()

        def beat() -> None:
            count = 0
            with contextlib.suppress(RuntimeError):
                while not stop.wait(_BEAT):
                    count += 1
                    self._store.set(f"alive/{self.world.rank}", str(count))

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @property
    def _timeout(self) -> float:
        return TIMEOUT if self._watch is None else self._watch.deadline

    def collect(self, doing: str, advice: str = ADVICE) -> list[dict[str, Any]]:
        """Waits for the notes of all ranks, and returns them in rank order.

        Raises:
            RankError: if notes are missing after the timeout, with their ranks and what to do.
        """
        timeout = self._timeout

        def enough(late: list[int], waited: float) -> bool:
            self._check_mutual_wait(late)
            return waited > timeout

        missing = self._wait(enough)
        if missing:
            self._store.compare_set(_DECISION, "", "own")
            late = ", ".join(map(str, missing))
            raise RankError(
                f"rank {self.world.rank} waited {timeout:.0f} s to {doing}, but rank(s) "
                f"{late} have not come to {self.name}{self._places()}. {advice}"
            )
        return [self._store.read(str(rank)) for rank in range(self.world.size)]

    def collect_if_shared(self, doing: str) -> list[dict[str, Any]] | None:
        """Like `collect`, but returns None if some ranks have skipped the loader.

        The ranks that have built it then agree that it is not shared.
        """
        grace = min(GRACE, self._timeout / 2)

        def enough(late: list[int], waited: float) -> bool:
            skipped = any(map(self._skipped_loader, late))
            return skipped or waited > grace or self._gives_way(late)

        decision = "own" if self._wait(enough) else "shared"
        if self._store.compare_set(_DECISION, "", decision) == b"own":
            warnings.warn(
                f"not all ranks have built the loader {self.name}, so the ranks that have "
                "each yield all of its batches; pass options=LoaderOptions(split=False) if "
                "that is meant, or build it on all ranks, with split=True if they come late",
                stacklevel=script_stacklevel(),
            )
            return None
        return self.collect(doing)

    def _skipped_loader(self, rank: int) -> bool:
        """Returns whether a rank has begun an epoch that this rank began after this loader."""
        events = PROCESS.loaders[self._loaders_before :]
        later = [key for event, key in events if event == "begun"]
        keys = [f"{key}/{rank}" for key in later[:_LATER_EPOCHS]]
        return any(self._common.check([key]) for key in keys)

    def _wait(self, enough: Callable[[list[int], float], bool]) -> list[int]:
        """Waits for notes until `enough`; returns the ranks whose notes are still missing."""
        if not self._missing():
            return []
        self._set_waiting_at(self._key)
        since, alive = 0.0, ""
        wait: Wait | None = None
        if self._watch is not None:
            here = threading.get_ident()
            wait = self._waited = Wait(self._watch.places, self.name, here)

        def look(seconds: float) -> bool:
            nonlocal since, alive
            missing = self._missing()
            before, alive = alive, self._heartbeats(missing)
            since = since if before == alive else seconds
            try:
                stop = enough(missing, seconds - since)
                if self._watch is not None and not stop:
                    self._watch.raise_reported()  # a rank that failed will not come
                if wait is not None:
                    wait.look(seconds, self._timeout)
            except BaseException:  # at a mutual wait the others are to raise, too
                self._set_waiting_at(_RAISED + self._key if self._raised else "")
                raise
            return stop

        try:
            self._store.wait([str(rank) for rank in range(self.world.size)], look)
        finally:
            if wait is not None:
                wait.end()
        self._set_waiting_at("")
        # a rank that has skipped the loader may have posted its note just before
        return self._missing()

    def _places(self) -> str:
        """Returns where the ranks were during the last wait, in parentheses; or ""."""
        wait = self._waited
        return "" if wait is None else f" ({wait.places.told(wait)})"

    def _missing(self) -> list[int]:
        """Returns the ranks whose notes are not there yet."""
        ranks = range(self.world.size)
        return [int(key) for key in self._store.missing(map(str, ranks))]

    def _set_waiting_at(self, key: str) -> None:
        """Posts the key of the loader that this rank waits at; an empty one for none."""
        self._common.set(f"waiting/{self.world.rank}", key)

    def _check_mutual_wait(self, missing: list[int]) -> None:
        """Raises ValueError if a rank waits for this one at another loader: a deadlock.

        This rank's own key stays posted, so that the other rank raises, too.
        """
        for rank in missing:
            if there := self._waiting_at(rank, True):
                self._raised = True
                here = self._key.removeprefix("place/")
                raise ValueError(
                    f"got {there.removeprefix('place/')} on rank {rank} and {here} on rank "
                    f"{self.world.rank}, which wait for each other; build the same loaders on "
                    f"all ranks, in the same order. {ADVICE}"
                )

    def _gives_way(self, missing: list[int]) -> bool:
        """Returns whether all others wait for this rank, at a loader that more have built.

        Of two that equally many have built, the one of the lowest rank gives way.
        """
        elsewhere = [self._waiting_at(rank) for rank in missing]
        here = self._built(self._key)
        return all(elsewhere) and any(self._built(key) > here for key in elsewhere)

    def _built(self, key: str) -> tuple[int, int]:
        """Returns how many ranks have built the loader at a key, and the first of them."""
        note = self._common.within(key)
        ranks = [rank for rank in range(self.world.size) if note.check([str(rank)])]
        return len(ranks), min(ranks, default=0)

    def _waiting_at(self, rank: int, or_raised: bool = False) -> str:
        """Returns the key of another loader at which a rank waits for this one; or "".

        Or where it raised an error for that, of which it says so until its next loader.
        """
        key = f"waiting/{rank}"
        there = self._common.get(key).decode() if self._common.check([key]) else ""
        if there.startswith(_RAISED):
            there = there.removeprefix(_RAISED) if or_raised else ""
        if there in ("", self._key) or self._store.check([str(rank)]):
            return ""  # it has posted its note meanwhile, and may wait elsewhere now
        built = self._common.within(there).check([str(self.world.rank)])
        return "" if built else there

    def _heartbeats(self, ranks: list[int]) -> str:
        """Returns the latest heartbeats of ranks, as one text."""
        keys = [f"alive/{rank}" for rank in ranks]
        late = self._store.missing(keys)
        return " ".join(k + self._store.get(k).decode() for k in keys if k not in late)


# Steps of optimizers ------------------------------------------------------------------

STEPS = (
    "All ranks take the batches of a loader that shares them out; a rank that stops early "
    "leaves the others waiting"
)


@dataclass(eq=False)
class OptimizerRecord:
    """Holds what is known of one optimizer."""

    # the summary of those of its last step since a comparison; None if none
    gradients: tuple[float, float] | None = None
    parameters: int | None = None  # their hash at the last comparison
    averaged: bool = False  # whether its steps were found to be averaged


class StepComparer:
    """Compares, at some requests of one loader, what the ranks' optimizers have stepped by.

    Args:
        notes: the notes of the loader.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._count = self._compared = 0
        if not PROCESS.watches_steps:
            register_optimizer_step_post_hook(_record)
            PROCESS.watches_steps = True

    def before_batch(self) -> None:
        """Compares the steps so far, if 1, 2, 4, ... batches were yielded."""
        if self._count & (self._count - 1) == 0:
            self._compare()

    def yielded(self) -> None:
        """Counts a batch, on which optimizers may step."""
        self._count += 1
        PROCESS.dealing.add(self)

    def at_end(self) -> None:
        """Compares the steps of an epoch that has ended."""
        self._compare()
        PROCESS.dealing.discard(self)

    def _compare(self) -> None:
        if self._count == self._compared:
            return
        self._compared = self._count
        stepped = _stepped()
        mine = {
            key: (*record.gradients, fold(*map(digest, copies)))
            for key, (record, copies) in stepped.items()
            if record.gradients is not None
        }
        notes = self._notes.at(f"steps/{self._count}")
        notes.post(mine)
        if not mine:
            return
        every = notes.collect("compare its steps", STEPS)
        for key, (record, copies) in stepped.items():
            record.gradients = None
            rows = [note[key] for note in every if key in note]
            if len(rows) == len(every):
                self._conclude(key, record, copies, rows)

    def _conclude(
        self, key: str, record: OptimizerRecord, copies: list[Any], rows: list[Any]
    ) -> None:
        """Concludes from the notes of all ranks whether an optimizer's steps are averaged."""
        kinds = {p.dtype for p in copies}
        gradients = [(along, size) for along, size, _ in rows]
        differ = differing(gradients, kinds)
        before, record.parameters = record.parameters, rows[0][2]
        if not differ:
            record.averaged = any(size for _, size in gradients)
        elif all(row[2] == rows[0][2] for row in rows):
            record.averaged = before not in (None, record.parameters)
        else:
            raise ValueError(
                "average the gradients by model = pdc.replicate(model, mesh), after the model "
                f"is made: ranks {differ} and rank 0 have stepped by other gradients "
                f"({key.split()[0]}, {len(copies)} parameters) on their batches of "
                f"{self._notes.name}, and have other parameters since, so that each rank "
                "trains another model. torch's DistributedDataParallel, accelerate, Lightning "
                "or an all_reduce of the script's own do as well; where parameters are to "
                'differ for a while, pdc.init(check="never") leaves this comparison out'
            )


def _record(optimizer: Any, *_: Any) -> None:
    """Records the gradients of a step, while a loader deals out an epoch to ranks."""
    if not PROCESS.dealing or torch.compiler.is_compiling():
        return
    record = PROCESS.steps.setdefault(optimizer, OptimizerRecord())
    if record.averaged:
        return
    copies = _copies(optimizer)
    if any(p.is_cuda for p in copies) and torch.cuda.is_current_stream_capturing():
        return
    record.gradients = projection([p.grad for p in copies if p.grad is not None])


def _copies(optimizer: Any) -> list[Any]:
    """Returns the parameters of an optimizer of which every rank should hold a copy."""
    return [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if type(p) is torch.nn.Parameter
        and not hasattr(p, "is_shard")
        and not hasattr(p, "_fsdp_flattened")
    ]


def _stepped() -> dict[str, tuple[OptimizerRecord, list[Any]]]:
    """Returns optimizers that have stepped since a comparison, by names equal on all ranks.

    Without those whose parameters are among another's, as of ZeroRedundancyOptimizer.
    """
    found = [
        (optimizer, record, _copies(optimizer))
        for optimizer, record in list(PROCESS.steps.items())
        if record.gradients is not None
    ]
    held = [set(map(id, copies)) for _, _, copies in found]
    names: Counter[str] = Counter()
    stepped = {}
    for own, (optimizer, record, copies) in zip(held, found, strict=True):
        if not own or any(own < other for other in held):
            record.gradients = None
            continue
        shapes = repr([(tuple(p.shape), p.dtype) for p in copies]).encode()
        shape = hashlib.blake2b(shapes, digest_size=8).hexdigest()
        name = f"{type(optimizer).__name__} {shape}"
        names[name] += 1
        stepped[f"{name} {names[name]}"] = record, copies
    return stepped


def step_comparer(notes: Notes, mesh: Mesh | None) -> StepComparer | None:
    """Returns the StepComparer of a loader; None where ranks are not to be compared."""
    if mesh is not None and (mesh.check == "never" or mesh.stage.size > 1):
        return None
    return StepComparer(notes)
