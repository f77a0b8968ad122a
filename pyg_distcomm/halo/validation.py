"""What a link refuses, and says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pyg_distcomm.halo.codec import Codec

STATE = {
    "epoch",
    "pace",
    "solved",
    "trend",
    "last",
    "active",
    "parts_of",
    "mark",
    "constant",
    "kept",
}

# what a rank says of a call; the greatest holds on all ranks
TRAINS, EVALUATES, RECOMPUTES, REPEATS = range(4)
MODES = 64  # what tells the modes of layers apart, in the same byte
MIXED = (
    "begins a pass in which some layers train on some ranks and evaluate on others; call "
    "model.train() or model.eval() on all ranks alike"
)
PROBLEMS = {
    RECOMPUTES: (
        "was computed again in the backward pass (activation checkpointing), where an "
        "exchange that is coded or late would travel twice; leave the layer out of the "
        "checkpoint, or give it link='exact'"
    ),
    REPEATS: (
        "runs again after its backward pass, in the same epoch of its link; call "
        "link.step() once an epoch, after the optimizer's step"
    ),
}


def check_together(
    codecs: Iterable[Codec | None], switches: bool, exact_eval: bool
) -> None:
    """Raises a ValueError for what does not go together.

    Args:
        codecs: of rows and of gradients.
        switches: whether late epochs and synchronous ones take turns.
        exact_eval: whether evaluation is exact.
    """
    for codec in filter(None, codecs):
        if codec.stateful and switches:
            raise ValueError(
                f"{codec!r} must read all messages in order, which synchronous epochs "
                "between late ones do not; leave out sync_every and adaptive"
            )
        if codec.stateful and not exact_eval:
            raise ValueError(
                f"evaluation would change what {codec!r} remembers of training; use "
                "exact_eval=True"
            )


def check_state(state: Mapping[str, Any], *, schedule: Any, adaptive: Any) -> None:
    """Raises a ValueError for a state that is not of such a link.

    Args:
        state: what was saved.
        schedule, adaptive: what the link has, or None.
    """
    if STATE - state.keys():
        raise ValueError(
            f"the state of a link lacks {sorted(STATE - state.keys())}; give what "
            "link.state_dict() returned"
        )
    for name, mine in (("schedule", schedule), ("adaptive", adaptive)):
        other = state["pace" if name == "schedule" else "trend"]
        if (mine is None) != (other is None):
            raise ValueError(
                f"of two links, the saved one and this, only one has {name}; make it "
                "with the same arguments"
            )
