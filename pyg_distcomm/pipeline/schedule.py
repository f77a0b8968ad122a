"""Schedules the actions of each stage in an epoch, and checks their order.

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
    """The time span of one action of a stage, in seconds from the start of the epoch."""

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
        cost = {"forward": forward, "backward": backward}
        return [
            ActionSpan(
                stage, action.kind, action.slot, begin, begin + cost[action.kind]
            )
            for stage, action, begin in _run(self, cost)
            if action.kind in cost
        ]

    def table(self) -> str:
        """Returns the actions of each stage, a line for each."""
        return "\n".join(
            f"stage {s}: " + ", ".join(map(str, actions))
            for s, actions in enumerate(self.stages)
        )

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


def schedule_of(stages: int, chunks: int) -> StageSchedule:
    """Returns the schedule of `fill_drain`, verified."""
    schedule = fill_drain(stages, chunks)
    verify(schedule)
    return schedule


def verify(schedule: StageSchedule) -> None:
    """Checks that a schedule can be carried out; see [Note: lanes].

    Raises:
        ValueError: if a stage computes something twice, never, or before its inputs have
            arrived; if messages are not received in the order they are sent; or if stages
            wait for each other in a cycle.
    """
    for stage, actions in enumerate(schedule.stages):
        _check_reads(schedule, stage, actions)
    _run(schedule, {})


def _check_reads(
    schedule: StageSchedule, stage: int, actions: tuple[Action, ...]
) -> None:
    """Checks that a stage does every action once, and after those it depends on."""
    done: set[Action] = set()
    for action in actions:
        for before in _prerequisites(schedule, stage, action):
            if before not in done:
                raise ValueError(
                    f"stage {stage} would {action} before it could {before}"
                )
        if action in done:
            raise ValueError(f"stage {stage} would {action} twice")
        done.add(action)
    last = Action("backward", 0)
    if last not in done:
        raise ValueError(f"stage {stage} would end before it could {last}")


def _prerequisites(schedule: StageSchedule, stage: int, action: Action) -> list[Action]:
    """Returns the actions that must come before an action in its stage."""
    slot, end = action.slot, schedule.chunks - 1
    first, last = stage == 0, stage == len(schedule.stages) - 1
    if action.kind == "forward":
        earlier = [Action("forward", slot - 1)] if slot else []
        return earlier + ([] if first else [Action("receive", slot)])
    if action.kind == "backward":  # history is put back chunk by chunk, the last first
        later = Action("backward", slot + 1) if slot < end else Action("forward", end)
        return [later, Action("loss") if last else Action("receive_grad", slot)]
    plain = {
        "receive": "post",
        "receive_grad": "post_grad",
        "send": "forward",
        "send_grad": "backward",
    }
    if action.kind == "loss":
        return [Action("forward", end)]
    return [Action(plain[action.kind], slot)] if action.kind in plain else []


def _run(
    schedule: StageSchedule, cost: dict[str, float]
) -> list[tuple[int, Action, float]]:
    """Simulates a schedule; returns (stage, action, start time) in order within each stage."""
    stages = schedule.stages
    lanes: dict[tuple[int, int], list[tuple[str, int, float]]] = {}
    arrived: dict[tuple[int, Action], float] = {}
    position, clock = [0] * len(stages), [0.0] * len(stages)
    events: list[tuple[int, Action, float]] = []
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(stages):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                if action.kind.startswith("receive"):
                    if (stage, action) not in arrived:
                        break
                    clock[stage] = max(clock[stage], arrived[stage, action])
                elif action.peer:
                    lane = lanes.setdefault((stage, stage + action.peer), [])
                    lane.append((action.kind, action.slot, clock[stage]))
                    _deliver(lanes, stage, stage + action.peer, arrived)
                events.append((stage, action, clock[stage]))
                clock[stage] += cost.get(action.kind, 0.0)
                position[stage] += 1
                moved = True
    waiting = [
        f"stage {s} at {actions[position[s]]!s}"
        for s, actions in enumerate(stages)
        if position[s] < len(actions)
    ]
    if waiting:
        raise ValueError(
            f"stages would wait for ever: {', '.join(waiting)}; order their actions so that "
            "each send meets its post"
        )
    left = [f"{kind} {slot}" for lane in lanes.values() for kind, slot, _ in lane]
    if left:
        raise ValueError(
            f"no stage answers to {', '.join(left)}; plan a post for each send, and a send "
            "for each post"
        )
    return events


def _deliver(
    lanes: dict[tuple[int, int], list[tuple[str, int, float]]],
    here: int,
    peer: int,
    arrived: dict[tuple[int, Action], float],
) -> None:
    """Matches the first messages at both ends of a lane, as long as there are any."""
    own_lane, peer_lane = lanes[here, peer], lanes.setdefault((peer, here), [])
    while own_lane and peer_lane:
        (kind, slot, time), (other_kind, other_slot, peer_time) = (
            own_lane[0],
            peer_lane[0],
        )
        pair = {kind, other_kind}
        if slot != other_slot or pair not in (
            {"send", "post"},
            {"send_grad", "post_grad"},
        ):
            raise ValueError(
                f"stage {here} would {kind} {slot} while stage {peer} would {other_kind} "
                f"{other_slot}: both ends of a lane must plan the same order"
            )
        to = here if kind.startswith("post") else peer
        suffix = "_grad" if kind.endswith("_grad") else ""
        arrived[to, Action(f"receive{suffix}", slot)] = max(time, peer_time)
        del own_lane[0], peer_lane[0]
