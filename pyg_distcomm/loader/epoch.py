"""One epoch of a loader, as torch's DataLoader and the training loop see it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyg_distcomm.loader.batch_sharding import Numbered
from pyg_distcomm.loader.phases import Phases


@dataclass
class Progress:
    """How far the epoch under way has come."""

    epoch: int
    start: int
    rounds: int = 0
    finished: bool = False


class Positions(Sequence[int]):
    """The positions of a list, handed to a worker with what travels beside them."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        return range(self._size)[index]

    def __getitems__(self, index: Any) -> Any:
        return index


class IndexSampler:
    """The batches of the epoch that begins next, as torch's DataLoader asks for them."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Numbered]:
        return self._loader._plan()

    def __len__(self) -> int:
        deal = self._loader._deal()
        if deal.batches:
            return deal.rounds(0)
        return len(self._loader._epochs.given)  # raises what the script's own raise


class Tracked:
    """An iterator over one epoch that tells its loader how far it has come."""

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
        return batch
