"""Says when each stage computes which chunk in an epoch.

[Note: fill and drain] All chunks go forward through the stages, then the loss is taken of
the whole graph, then all chunks go back in the opposite order, as in [Huang19] Sec. 2.2. An
order that goes back earlier would not be exact: the gradient of a chunk needs those of all
later chunks that read it. Of M + S - 1 turns a stage is idle for S - 1.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

BUBBLE = 0.25  # the share of turns that stages may be idle, where chunks are not given
_LETTERS = {"forward": "F", "backward": "B"}


def bubble(stages: int, chunks: int) -> float:
    """Returns the share of turns in which a stage is idle, (S - 1) / (M + S - 1)."""
    return (stages - 1) / (chunks + stages - 1)


def fewest_chunks(stages: int, most: float = BUBBLE) -> int:
    """Returns the least number of chunks whose bubble is at most `most`.

    M = ceil((S - 1) (1 - b) / b): 3, 9 and 21 for 2, 4 and 8 stages and b = 1 / 4. Of
    one stage it is 1, the full graph.

    Raises:
        ValueError: for a bubble that is no share.
    """
    if isinstance(most, (bool, str)) or not 0 < float(most) < 1:
        raise ValueError(f"bubble must be a number between 0 and 1, got {most!r}")
    return max(1, math.ceil((stages - 1) * (1 - most) / most - 1e-9))


@dataclass(frozen=True)
class ActionSpan:
    """The time span in which a stage computes a chunk, from the start of the epoch."""

    stage: int
    kind: str
    slot: int
    begin: float
    end: float


@dataclass(frozen=True)
class StageSchedule:
    """The schedule of [Note: fill and drain]; `print` draws it.

    Args:
        stages, chunks: how many there are, S and M.
    """

    stages: int
    chunks: int

    @property
    def bubble(self) -> float:
        """The share of turns in which a stage is idle: (S - 1) / (M + S - 1)."""
        return bubble(self.stages, self.chunks)

    def spans(self, forward: float = 1.0, backward: float = 1.0) -> list[ActionSpan]:
        """Returns when each chunk is computed, if transfers take no time.

        Args:
            forward, backward: the time that a chunk takes on a stage.
        """
        last, found = self.chunks - 1, []
        # the last stage goes back from here
        turned = (self.chunks + self.stages - 1) * forward
        for stage, turn in itertools.product(range(self.stages), range(self.chunks)):
            begin = (stage + turn) * forward
            found.append(ActionSpan(stage, "forward", turn, begin, begin + forward))
            begin = turned + (self.stages - 1 - stage + turn) * backward
            back = stage, "backward", last - turn, begin, begin + backward
            found.append(ActionSpan(*back))
        return found

    def __str__(self) -> str:
        width = 1 + len(str(self.chunks - 1))
        turns = 2 * (self.chunks + self.stages - 1)
        rows = [["." * width] * turns for _ in range(self.stages)]
        for span in self.spans():
            name = f"{_LETTERS[span.kind]}{span.slot}"
            rows[span.stage][round(span.begin)] = name.ljust(width)
        lines = [f"stage {stage}  " + " ".join(row) for stage, row in enumerate(rows)]
        return "\n".join(lines) + f"\nbubble {self.bubble:.1%}"
