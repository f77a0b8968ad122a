"""Shares the minibatches of an epoch out over the ranks, and matches the loaders of all ranks.

[Note: batch sharding] An epoch is a list of batches, numbered 0 .. T-1, the same on all ranks.
Batch t goes to rank t mod P, so that an epoch can go on with another number of ranks
after any round. Lists that the script has split itself stay split: batch i of rank r
then has number i P + r. A batch's number, not its rank, keys its draws.

[Note: notes instead of collectives] PyG scripts build loaders on rank 0 alone, to
evaluate; a collective in a constructor would hang there. So ranks leave notes in the
rendezvous store, and read those of the others when they first need them. The n-th loader of
a kind (its class, batch size and order) on one rank belongs with the n-th of that kind on
the others. Ranks also note which epochs they begin: a rank that has begun one which this
rank began after it built a loader, and has not built that loader, does not share it. The
number of a loader that was not shared is used up: ranks that come to it later take the next.
Ranks that wait for each other at loaders of different kinds raise at once.
"""

from __future__ import annotations

import contextlib
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
from pyg_distcomm.process import PROCESS
from pyg_distcomm.tensor.dist_tensor import DistTensor

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
    """Returns rows of all ranks; collective if they are spread."""
    return values.full_tensor() if isinstance(values, DistTensor) else values


def check_drawn(sampler: ByClass, count: int) -> None:
    """Refuses a sampler of other seeds than a loader has."""
    if len(sampler.weights) != count:
        raise ValueError(
            f"the ImbalancedSampler draws from {len(sampler.weights)} seeds, and the loader "
            f"has {count}; give both the same input_nodes"
        )


def drawn_positions(sampler: ByClass, key: int) -> Tensor:
    """Returns the positions of the seeds of an epoch, by a key; the host draws them."""
    return keyed_choice(key, sampler.weights.cpu(), sampler.num_samples)


PATIENCE = 300.0  # seconds to wait for the notes of other ranks, where there is no mesh
_BEAT = 0.5  # seconds between heartbeats of a rank that others wait for
OWN = (
    "A loader shares its batches out over the ranks, so all have to build it; for a loader "
    "of one rank's own, to evaluate on rank 0 for instance, pass split=False"
)
_DECISION = "decision"
_WITNESSES = 3  # later epochs that show whether a rank has passed a loader by


@dataclass(frozen=True, eq=False)
class World:
    """Describes the ranks of torch's default process group, or a single one."""

    rank: int
    size: int

    @staticmethod
    def now() -> World:
        """Returns the world as it is at this moment."""
        if not dist.is_initialized():
            return World(0, 1)
        return World(dist.get_rank(), dist.get_world_size())


def launched() -> int:
    """Returns how many ranks a launcher says it has started, whether joined or not."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@dataclass(frozen=True)
class Place:
    """Names a loader alike on all ranks: by its kind, and its number among these."""

    kind: str
    number: int

    @staticmethod
    def next(kind: str) -> Place:
        """Returns the place of the loader of a kind that is built next."""
        PROCESS.loaders.append(("built", kind))
        return Place(kind, PROCESS.loaders.count(("built", kind)))

    def __str__(self) -> str:
        return f"{self.kind} #{self.number}"


class Notes:
    """Exchanges notes about one loader between the ranks.

    Args:
        world: the ranks, more than one.
        place: of the loader.
        mesh: the ranks as the script knows them, if it does: failures are reported there.
        about: which of several notes of the loader this is.
    """

    def __init__(
        self, world: World, place: Place, mesh: Mesh | None = None, about: str = ""
    ) -> None:
        mesh = latest_mesh() if mesh is None else mesh
        self._watch = None if mesh is None else mesh.everyone.watch
        self.world, self._born = world, len(PROCESS.loaders)
        store = StoreMailbox(dist.distributed_c10d._get_default_store())
        self._common = store.within("pyg_distcomm/loader")
        while self._own(f"place/{place}{about}"):
            place = Place.next(place.kind)
        self._where = f"place/{place}{about}"
        self._store = self._common.within(self._where)
        self.name = str(place)

    def _own(self, key: str) -> bool:
        """Returns whether ranks have settled that the loader there is not shared."""
        decision = f"{key}/{_DECISION}"
        return self._common.check([decision]) and self._common.get(decision) == b"own"

    def leave(self, note: dict[str, Any]) -> None:
        """Leaves this rank's note; does not wait."""
        self._mark("")  # of a wait that ended in an error
        self._store.post(str(self.world.rank), note)

    def begin(self, epoch: int) -> None:
        """Notes that this rank begins an epoch of the loader."""
        begun = f"begun/{self.name}/{epoch}"
        PROCESS.loaders.append(("begun", begun))
        self._common.set(f"{begun}/{self.world.rank}", "")

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Sends heartbeats during a slow block that ends in this rank's note."""
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
    def _patience(self) -> float:
        return PATIENCE if self._watch is None else self._watch.deadline

    def collect(self, doing: str, advice: str = OWN) -> list[dict[str, Any]]:
        """Waits for the notes of all ranks, and returns them in rank order.

        Raises RankError if some have not come in time, naming them and what to do.
        """
        patience = self._patience
        missing = self._wait(lambda late, waited: waited > patience)
        if missing:
            self._store.compare_set(_DECISION, "", "own")
            late = ", ".join(map(str, missing))
            raise RankError(
                f"rank {self.world.rank} waited {patience:.0f} s to {doing}, but rank(s) "
                f"{late} have not come to {self.name}. {advice}"
            )
        return [self._store.read(str(rank)) for rank in range(self.world.size)]

    def collect_if_shared(self, doing: str) -> list[dict[str, Any]] | None:
        """Does as `collect`, or returns None if some ranks have passed the loader by.

        The ranks that have built it then agree that it is each one's own.
        """
        missing = self._wait(
            lambda late, waited: any(map(self._passed, late)) or waited > self._patience
        )
        if not missing or any(map(self._passed, missing)):
            decision = "own" if missing else "shared"
            if self._store.compare_set(_DECISION, "", decision) == b"own":
                warnings.warn(
                    f"not all ranks have built the loader {self.name}, "
                    "so each rank that has yields all of its batches; pass split=False to "
                    "say so",
                    stacklevel=5,
                )
                return None
        return self.collect(doing)

    def _passed(self, rank: int) -> bool:
        """Returns whether a rank has begun an epoch later than this loader."""
        later = [key for what, key in PROCESS.loaders[self._born :] if what == "begun"]
        after = later[:_WITNESSES]
        return any(self._common.check([f"{epoch}/{rank}"]) for epoch in after)

    def _wait(self, enough: Callable[[list[int], float], bool]) -> list[int]:
        """Waits for notes until `enough`; returns the ranks whose notes are missing."""
        if not self._missing():
            return []
        self._mark(self._where)
        since, alive = 0.0, ""

        def look(seconds: float) -> bool:
            nonlocal since, alive
            missing = self._missing()
            self._check_mutual_wait(missing)
            before, alive = alive, self._signs(missing)
            since = since if before == alive else seconds
            try:
                stop = enough(missing, seconds - since)
                if self._watch is not None and not stop:
                    self._watch.look()  # a rank that failed will not come
            except BaseException:
                self._mark("")
                raise
            return stop

        self._store.wait([str(rank) for rank in range(self.world.size)], look)
        self._mark("")
        # one that has passed may have left its note just before
        return self._missing()

    def _missing(self) -> list[int]:
        ranks = range(self.world.size)
        return [int(key) for key in self._store.missing(map(str, ranks))]

    def _mark(self, where: str) -> None:
        """Says what place this rank waits at; nothing if at none."""
        self._common.set(f"waiting/{self.world.rank}", where)

    def _check_mutual_wait(self, missing: list[int]) -> None:
        """Raises if a rank waits for this one elsewhere, so that neither will come.

        The mark of this rank stays, for the other to see.
        """
        for rank in missing:
            key = f"waiting/{rank}"
            there = self._common.get(key).decode() if self._common.check([key]) else ""
            if there in ("", self._where) or self._store.check([str(rank)]):
                continue  # it came meanwhile, and may wait elsewhere since
            if not self._common.within(there).check([str(self.world.rank)]):
                here = self._where.removeprefix("place/")
                raise ValueError(
                    "build the same loaders on all ranks, in the same order: rank "
                    f"{rank} has {there.removeprefix('place/')}, and rank "
                    f"{self.world.rank} has {here}, and each waits for the other. {OWN}"
                )

    def _signs(self, ranks: list[int]) -> str:
        """Returns the heartbeats of ranks that have sent any."""
        keys = [f"alive/{rank}" for rank in ranks]
        late = self._store.missing(keys)
        return " ".join(k + self._store.get(k).decode() for k in keys if k not in late)
