"""The ranks that load together, and how they compare notes.

[Note: notes instead of collectives] PyG scripts build loaders on rank 0 alone, to
evaluate; a collective in a constructor would hang there. So ranks leave notes in the
rendezvous store, under the place in the script that builds the loader, and read those
of the others when they first need them. They also note which epochs they begin: a rank
that has begun one which this rank began after it built a loader, and has not built that
loader, has passed its place in the script, and does not share it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pyg_distcomm.comm.failure import DeadlineStore, RankError
from pyg_distcomm.comm.mesh import Mesh, latest_mesh

PATIENCE = 300.0  # seconds to wait for the notes of other ranks, where there is no mesh
_BEAT = 0.5  # seconds between the signs of life of a rank that others wait for
OWN = (
    "A loader shares its batches out over the ranks, so all have to build it; for a loader "
    "of one rank's own, to evaluate on rank 0 for instance, pass split=False"
)
_HOUSE = str(Path(__file__).parents[1])
_DEPTH = 6  # calls of the script that tell one place from another
_WITNESSES = 3  # epochs begun after a loader was built that may tell who passed it
_built: Counter[str] = Counter()  # loaders built at each place
_begun: list[str] = []  # epochs of shared loaders, in the order in which they began


@dataclass(frozen=True, eq=False)
class World:
    """The ranks of torch's default process group, or one."""

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


def place() -> str:
    """Names the line of the script that builds a loader, and how often it has.

    The same on all ranks that run the same script, also if some build other loaders.
    """
    lines: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None and len(lines) < _DEPTH:
        if not frame.f_code.co_filename.startswith(_HOUSE):
            lines.append(
                f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            )
        frame = frame.f_back
    name = " < ".join(lines)
    _built[name] += 1
    return f"{name} #{_built[name]}"


class Notes:
    """What the ranks tell each other about one loader.

    Args:
        world: the ranks.
        name: of the loader, from `place`.
        mesh: the ranks as the script knows them, if it does: who fails is told there.
    """

    def __init__(self, world: World, name: str, mesh: Mesh | None = None) -> None:
        mesh = latest_mesh() if mesh is None else mesh
        self._watch = None if mesh is None else mesh.everyone.watch
        self.world, self.name, self._born = world, name, len(_begun)
        self._store: Any = None
        self._common: Any = None
        if world.size > 1:
            c10d = dist.distributed_c10d
            store = DeadlineStore(c10d._get_default_store())
            self._common = store.within("pyg_distcomm/loader")
            self._store = self._common.within(f"place/{name}")

    def leave(self, note: dict[str, Any]) -> None:
        """Leaves this rank's note; does not wait."""
        if self._store is not None:
            self._store.set(str(self.world.rank), json.dumps(note))

    def begin(self, epoch: int) -> None:
        """Notes that this rank begins an epoch of the loader."""
        if self._common is not None:
            _begun.append(f"begun/{self.name}/{epoch}")
            self._common.set(f"{_begun[-1]}/{self.world.rank}", "")

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Gives signs of life in a block that leads to this rank's note, and may be slow."""
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
            raise RankError(
                f"rank {self.world.rank} waited {patience:.0f} s to {doing}, but rank(s) "
                f"{_listed(missing)} have not come to {self.name.split(' < ')[0]}. {advice}"
            )
        return [json.loads(self._store.get(str(r))) for r in range(self.world.size)]

    def collect_if_shared(self, doing: str) -> list[dict[str, Any]] | None:
        """Does as `collect`, or returns None if some ranks have passed the loader by.

        The ranks that have built it then agree that it is each one's own.
        """
        missing = self._wait(
            lambda late, waited: any(map(self._passed, late)) or waited > self._patience
        )
        if not missing or any(map(self._passed, missing)):
            found = "own" if missing else "shared"
            if self._store.compare_set("decision", "", found) == b"own":
                warnings.warn(
                    f"not all ranks have built the loader of {self.name.split(' < ')[0]}, "
                    "so each rank that has yields all of its batches; pass split=False to "
                    "say so",
                    stacklevel=5,
                )
                return None
        return self.collect(doing)

    def _passed(self, rank: int) -> bool:
        """Tells whether a rank has begun an epoch that comes after this loader."""
        after = _begun[self._born : self._born + _WITNESSES]
        return any(self._common.check([f"{epoch}/{rank}"]) for epoch in after)

    def _wait(self, enough: Callable[[list[int], float], bool]) -> list[int]:
        """Waits for notes until there has been enough of it; returns who is missing."""
        begin, pause, alive = time.monotonic(), 1e-3, ""
        while True:
            ranks = range(self.world.size)
            missing = [r for r in ranks if not self._store.check([str(r)])]
            before, alive = alive, self._signs(missing)
            if before != alive:
                begin = time.monotonic()
            if not missing or enough(missing, time.monotonic() - begin):
                # one that has passed may have left its note just before
                return [r for r in missing if not self._store.check([str(r)])]
            if self._watch is not None:
                self._watch.look()  # a rank that failed will not come
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _signs(self, ranks: list[int]) -> str:
        """Returns the signs of life of ranks that have any."""
        keys = [f"alive/{rank}" for rank in ranks]
        there = [key for key in keys if self._store.check([key])]
        return " ".join(key + self._store.get(key).decode() for key in there)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
