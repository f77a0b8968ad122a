"""Matches the loaders of all ranks, and compares their arguments through the c10d store.

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
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pyg_distcomm.comm.mesh import Mesh, latest_mesh
from pyg_distcomm.comm.store import RankError, StoreMailbox
from pyg_distcomm.process import PROCESS

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
        world: the ranks.
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
        self._store: Any = None
        self._common: Any = None
        self._where = ""
        if world.size > 1:
            c10d = dist.distributed_c10d
            store = StoreMailbox(c10d._get_default_store())
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
        if self._store is not None:
            self._mark("")  # of a wait that ended in an error
            self._store.post(str(self.world.rank), note)

    def begin(self, epoch: int) -> None:
        """Notes that this rank begins an epoch of the loader."""
        if self._common is not None:
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

        Raises:
            RankError: if some have not come in time; it names them and what to do.
        """
        patience = self._patience
        missing = self._wait(lambda late, waited: waited > patience)
        if missing:
            self._store.compare_set(_DECISION, "", "own")
            raise RankError(
                f"rank {self.world.rank} waited {patience:.0f} s to {doing}, but rank(s) "
                f"{_listed(missing)} have not come to {self.name}. {advice}"
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
        """Returns the ranks that have not left their notes."""
        ranks = range(self.world.size)
        return [int(key) for key in self._store.missing(map(str, ranks))]

    def _mark(self, where: str) -> None:
        """Says what place this rank waits at; nothing if at none."""
        if self._common is not None:
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


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
