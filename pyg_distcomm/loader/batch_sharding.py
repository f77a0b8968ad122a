"""Shards the minibatches of an epoch over the ranks, and matches the loaders of all ranks.

[Note: batch sharding] An epoch is a list of batches, numbered 0 .. T-1, the same on all ranks.
Rank t mod P loads batch t, so an epoch can be resumed on another number of ranks after any
round. If the script splits the inputs itself, batch i of rank r has number i P + r. A
batch's number, not its rank, keys its draws.

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
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import ImbalancedSampler as ByClass

from pyg_distcomm.comm.mesh import Mesh, latest_mesh
from pyg_distcomm.comm.random import fold, keyed_choice, keyed_permutation
from pyg_distcomm.comm.store import RankError, StoreMailbox
from pyg_distcomm.comm.whereabouts import Wait
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded.dist_tensor import DistTensor

_ORDER, _DRAWS = 0x0D, 0xD4


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """Describes one minibatch to sample, for the thread or worker that samples it.

    Args:
        positions: the positions of its inputs in the loader's list.
        key: the key of its draws.
        padding: whether it repeats another batch, so that all ranks have equally many.
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
        batches: the number of batches of the epoch; if split, of each rank's own list;
            empty if not known.
        even: how ranks get equally many batches, "pad" or "drop".
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


class EpochPlan:
    """Lists the batches of any epoch of a loader, as a function of its seed.

    Args:
        count: the number of inputs.
        batch_size: the number of inputs of a batch.
        shuffle: whether to shuffle each epoch.
        drop_last: whether to drop a last batch that is not full.
        batch_sampler: the script's own batches, an iterable of lists of positions, or None.
        draw: returns the positions [count] of an epoch, given a key; or None.
    """

    def __init__(
        self,
        count: int,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        batch_sampler: Any = None,
        draw: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.count, self.batch_size, self.shuffle = count, batch_size, shuffle
        self.drop_last, self.batch_sampler, self.draw = drop_last, batch_sampler, draw

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
        rounds = (
            sharding.rounds(start) if sharding.size > 1 and sharding.batches else None
        )
        skipped = start // sharding.size
        first = np.empty(0, np.int64)
        i = skipped
        for place, index in enumerate(self.batch_sampler):
            if place == 0:
                first = np.asarray(index, dtype=np.int64)
            if place < skipped:
                continue
            if rounds is not None and i - skipped >= rounds:
                return
            key = fold(seed, epoch, _DRAWS, i * sharding.size + sharding.rank)
            yield PlannedBatch(np.asarray(index, dtype=np.int64), key)
            i += 1
        key = fold(seed, epoch, _DRAWS, sharding.rank)
        while rounds is not None and i - skipped < rounds:
            yield PlannedBatch(first, key, padding=True)
            i += 1


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


class IndexSampler:
    """Yields the batches of the next epoch to torch's DataLoader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[PlannedBatch]:
        return self._loader._plan()

    def __len__(self) -> int:
        sharding = self._loader._sharding()
        if sharding.batches:
            return sharding.rounds(0)
        # may raise: it has no length
        return len(self._loader._epoch_plan.batch_sampler)


class ImbalancedSampler(ByClass):
    """Draws seeds with a chance of 1 / (size of their class), as PyG's sampler does.

    Given as `sampler` to a loader of this package, it draws the list of an epoch as a
    function of (seed, epoch): the same on all ranks, which share out its batches, and
    again where a state resumes. To any other loader it is PyG's own, with torch's generator.

    Args:
        dataset: a Data, a share of one from `pdc.partition` (collective), a list or data set
            of graphs, or classes [n], int64.
        input_nodes: ids or a mask of the seeds of the loader; of a share, also its masks.
        num_samples: draws of an epoch (default: as many as there are seeds).

    Price: of a share, the classes of all nodes once, on every rank.
    """

    def __init__(
        self, dataset: Any, input_nodes: Any = None, num_samples: int | None = None
    ) -> None:
        spread = isinstance(dataset, Data) and isinstance(dataset.get("y"), DistTensor)
        classes = dataset.y if spread else dataset
        super().__init__(_whole(classes), _whole(input_nodes), num_samples)


def _whole(values: Any) -> Any:
    """Returns the rows of all ranks; collective if they are row-sharded."""
    return values.full_tensor() if isinstance(values, DistTensor) else values


def check_weighted_sampler(sampler: ByClass, count: int) -> None:
    """Raises ValueError if a sampler draws from another number of seeds than a loader has."""
    if len(sampler.weights) != count:
        raise ValueError(
            f"the ImbalancedSampler draws from {len(sampler.weights)} seeds, and the loader "
            f"has {count}; give both the same input_nodes"
        )


def weighted_positions(sampler: ByClass, key: int) -> Tensor:
    """Draws the positions of the seeds of an epoch by a key, on the CPU."""
    return keyed_choice(key, sampler.weights.cpu(), sampler.num_samples)


TIMEOUT = 300.0  # seconds to wait for the notes of other ranks, where there is no mesh
GRACE = 15.0  # seconds to wait, unless split=True, for ranks that may never come
_BEAT = 0.5  # seconds between heartbeats of a rank that others wait for
ADVICE = (
    "A loader shards its batches over the ranks, so all ranks have to build it; for a loader "
    "of a single rank, for instance to evaluate on rank 0, pass split=False"
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


@dataclass(frozen=True)
class LoaderId:
    """Identifies a loader on all ranks: its kind, and its number among loaders of the kind."""

    kind: str
    number: int

    @staticmethod
    def next(kind: str) -> LoaderId:
        """Returns the id of the next loader of a kind, and counts it."""
        PROCESS.loaders.append(("built", kind))
        return LoaderId(kind, PROCESS.loaders.count(("built", kind)))

    def __str__(self) -> str:
        return f"{self.kind} #{self.number}"


class Notes:
    """Exchanges notes about one loader between the ranks.

    Args:
        world: the ranks, more than one.
        loader_id: the loader.
        mesh: the mesh of the script, if there is one: failures are reported there.
        about: which of several exchanges of the loader this is.
    """

    def __init__(
        self,
        world: World,
        loader_id: LoaderId,
        mesh: Mesh | None = None,
        about: str = "",
    ) -> None:
        mesh = latest_mesh() if mesh is None else mesh
        self._watch = None if mesh is None else mesh.everyone.watch
        self.world, self._loaders_before = world, len(PROCESS.loaders)
        store = StoreMailbox(dist.distributed_c10d._get_default_store())
        self._common = store.within("pyg_distcomm/loader")
        while self._is_unshared(f"place/{loader_id}{about}"):
            loader_id = LoaderId.next(loader_id.kind)
        self._key = f"place/{loader_id}{about}"
        self._store = self._common.within(self._key)
        self.name = str(loader_id)
        self._waited: Wait | None = None

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
                "each yield all of its batches; pass split=False if that is meant, or "
                "build it on all ranks, if they come late with split=True",
                stacklevel=7,
            )
            return None
        return self.collect(doing)

    def _skipped_loader(self, rank: int) -> bool:
        """Returns whether a rank has begun an epoch that this rank began after this loader."""
        events = PROCESS.loaders[self._loaders_before :]
        later = [key for event, key in events if event == "begun"]
        return any(
            self._common.check([f"{key}/{rank}"]) for key in later[:_LATER_EPOCHS]
        )

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
            except BaseException:
                self._set_waiting_at("")
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
            if there := self._waiting_at(rank):
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

    def _waiting_at(self, rank: int) -> str:
        """Returns the key of another loader at which a rank waits for this one; or ""."""
        key = f"waiting/{rank}"
        there = self._common.get(key).decode() if self._common.check([key]) else ""
        if there in ("", self._key) or self._store.check([str(rank)]):
            return ""  # it has posted its note meanwhile, and may wait elsewhere now
        built = self._common.within(there).check([str(self.world.rank)])
        return "" if built else there

    def _heartbeats(self, ranks: list[int]) -> str:
        """Returns the latest heartbeats of ranks, as one text."""
        keys = [f"alive/{rank}" for rank in ranks]
        late = self._store.missing(keys)
        return " ".join(k + self._store.get(k).decode() for k in keys if k not in late)
