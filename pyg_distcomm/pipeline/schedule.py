"""Schedules the actions of each stage in an epoch.

[Note: fill and drain] All chunks go forward through the stages, then the loss is taken of
the whole graph, then all chunks go back in the opposite order, as in [Huang19] Sec. 2.2. An
order that goes back earlier would not be exact: the gradient of a chunk needs those of all
later chunks that read it. Of M + S - 1 turns a stage is idle for S - 1.

[Note: lanes] Two neighbours have one lane between them, on which messages travel one after
the other, in an order that both ends must have planned alike (with NCCL, one that waits
holds up those behind it). A receive is posted some chunks ahead, so that a message travels
while the chunk before it is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

BUBBLE = 0.25  # the share of turns that stages may be idle, where chunks are not given
AHEAD = 2  # chunks whose messages are awaited while another is computed
_LETTERS = {"forward": "F", "backward": "B", "loss": "L"}


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
class Action:
    """One action of a stage: a computation, or the start or end of a message.

    Args:
        kind: "forward" and "backward" compute; "send" and "send_grad" start to send what
            was computed; "post" and "post_grad" make ready to receive; "receive" and
            "receive_grad" wait for it; "loss" is the last stage's.
        slot: which chunk, by its place in the order of the epoch.
    """

    kind: str
    slot: int = 0

    @property
    def peer(self) -> int:
        """The neighbour of a message: 1 the next stage, -1 the one before; 0 if none."""
        kind = self.kind
        if kind in ("send", "post_grad", "receive_grad"):
            return 1
        return -1 if kind in ("send_grad", "post", "receive") else 0

    def __str__(self) -> str:
        return self.kind if self.kind == "loss" else f"{self.kind} {self.slot}"


@dataclass(frozen=True)
class ActionSpan:
    """The time span of one action of a stage, from the start of the epoch."""

    stage: int
    kind: str
    slot: int
    begin: float
    end: float


@dataclass(frozen=True)
class StageSchedule:
    """The actions of all stages in an epoch; `print` draws them.

    Args:
        stages: for each stage its actions, in order.
        chunks: how many chunks there are, M.
    """

    stages: tuple[tuple[Action, ...], ...]
    chunks: int

    @property
    def bubble(self) -> float:
        """The share of turns in which a stage is idle: (S - 1) / (M + S - 1)."""
        return bubble(len(self.stages), self.chunks)

    def spans(self, forward: float = 1.0, backward: float = 1.0) -> list[ActionSpan]:
        """Returns when each chunk is computed, if transfers take no time.

        Args:
            forward, backward: the time that a chunk takes on a stage.
        """
        stages, chunks = len(self.stages), self.chunks
        turned = (chunks + stages - 1) * forward  # the last stage goes back from here
        found = []
        for stage, slot in itertools.product(range(stages), range(chunks)):
            begin = (stage + slot) * forward
            found.append(ActionSpan(stage, "forward", slot, begin, begin + forward))
        for stage, turn in itertools.product(range(stages), range(chunks)):
            begin, slot = (
                turned + (stages - 1 - stage + turn) * backward,
                chunks - 1 - turn,
            )
            found.append(ActionSpan(stage, "backward", slot, begin, begin + backward))
        return found

    def __str__(self) -> str:
        spans = self.spans()
        width = 1 + len(str(self.chunks - 1))
        turns = round(max(span.end for span in spans))
        lines = []
        for stage in range(len(self.stages)):
            row = ["." * width] * turns
            for span in spans:
                if span.stage == stage:
                    name = f"{_LETTERS[span.kind]}{span.slot}"
                    row[round(span.begin)] = name.ljust(width)
            lines.append(f"stage {stage}  " + " ".join(row))
        return "\n".join(lines) + f"\nbubble {self.bubble:.1%}"


def fill_drain(stages: int, chunks: int, ahead: int = AHEAD) -> StageSchedule:
    """Returns the schedule of [Note: fill and drain].

    Args:
        stages, chunks: how many there are, S and M.
        ahead: for how many chunks ahead receives are posted.
    """
    every = []
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        forward = _pass(range(chunks), "forward", ("", not first, not last), ahead)
        backward = _pass(
            range(chunks)[::-1], "backward", ("_grad", not last, not first), ahead
        )
        every.append((*forward, *([Action("loss")] if last else []), *backward))
    return StageSchedule(tuple(every), chunks)


def _pass(
    slots: range, compute: str, ends: tuple[str, bool, bool], ahead: int
) -> Iterator[Action]:
    """Yields a stage's actions for one pass over all chunks, forward or backward."""
    suffix, receives, sends = ends
    if receives:
        yield from (Action(f"post{suffix}", slot) for slot in slots[:ahead])
    for position, slot in enumerate(slots):
        if receives:
            for later in slots[position + ahead : position + ahead + 1]:
                yield Action(f"post{suffix}", later)
            yield Action(f"receive{suffix}", slot)
        yield Action(compute, slot)
        if sends:
            yield Action(f"send{suffix}", slot)
