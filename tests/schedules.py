"""Checks that a schedule of a pipeline's stages can be carried out, by simulating it."""

from __future__ import annotations

from pyg_distcomm.pipeline.schedule import Action, ActionSpan, StageSchedule


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


def simulated(
    schedule: StageSchedule, forward: float, backward: float
) -> set[ActionSpan]:
    """Returns when each chunk is computed, if transfers take no time."""
    cost = {"forward": forward, "backward": backward}
    return {
        ActionSpan(stage, action.kind, action.slot, begin, begin + cost[action.kind])
        for stage, action, begin in _run(schedule, cost)
        if action.kind in cost
    }
