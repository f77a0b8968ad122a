"""Schedules the compression ratio c of each epoch, or the bits of a codec by the loss.

A schedule is a value, and c a function of the epoch. A ratio is 1 or more: a codec of rate c
sends about 1/c of the numbers.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from pyg_distcomm.halo.codec import LEVELS, Codec, Quantise, check_rate
from pyg_distcomm.halo.codecs import Chain, DegreeBits

__all__ = ["Adaptive", "Fixed", "Linear", "Schedule"]


class Schedule(abc.ABC):
    """Defines the compression ratio as a function of the epoch (abstract)."""

    @abc.abstractmethod
    def rate(self, epoch: int) -> float:
        """Returns c of one epoch, counted from 0."""


@dataclass(frozen=True)
class Fixed(Schedule):
    """Keeps the same ratio in all epochs.

    Args:
        c: the ratio.
    """

    c: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.c, "c")

    def rate(self, epoch: int) -> float:
        """Returns c."""
        return self.c


@dataclass(frozen=True)
class Linear(Schedule):
    """Lowers the compression ratio c linearly over the epochs, as VARCO does.

        c(t) = max(c_max - slope t (c_max - c_min) / (T - 2), c_min)

    Follows the authors' code for the experiments of [Cervino24]; their scripts end at
    c_min = 1.5, the paper at 1. Most of the ramp has ratios that send almost nothing:
    slope 5 with c_min = 1 saves a fifth of the numbers.

    Args:
        epochs: T, how many there will be; below 3 counts as 3.
        c_max: the ratio at first.
        c_min: the ratio in the end; 1 is exact.
        slope: how often the ramp would fit in T epochs; 0 stays at c_max.
    """

    epochs: int
    c_max: float = 128.0
    c_min: float = 1.0
    slope: float = 5.0

    def __post_init__(self) -> None:
        check_rate(self.c_min, "c_min")
        check_rate(self.c_max, "c_max")
        if self.c_max < self.c_min:
            raise ValueError(
                f"c_max={self.c_max} is the ratio at first and must not be below "
                f"c_min={self.c_min}"
            )
        if self.epochs < 1:
            raise ValueError(f"a schedule has 1 epoch or more, got {self.epochs}")
        if not 0.0 <= self.slope < math.inf:
            raise ValueError(f"slope is 0 or more, got {self.slope}")

    def rate(self, epoch: int) -> float:
        """Returns c(t), never outside [c_min, c_max]."""
        p = min(self.slope * epoch / max(self.epochs - 2, 1), 1.0)
        c = self.c_max - p * (self.c_max - self.c_min)
        return min(max(c, self.c_min), self.c_max)


@dataclass(frozen=True)
class Adaptive:
    """Chooses the number of bits of a link by how the loss develops.

        mean = momentum mean + (1 - momentum) loss,   v = |change of mean|

    Once v has fallen `window` times in a row, training settles: bits double, and exchanges
    become synchronous. Once it has risen as often, bits halve and exchanges are late
    again. Then counting restarts. Rank 0's loss is used.

    Follows the authors' code of the later Sylvie ([Zhang23]), except that they divide v by
    the seconds of an epoch, with which runs could not be repeated.

    Args:
        window: the number of changes in one direction that change the bits.
        momentum: the momentum of the mean.
        least, most: bounds of the bits.
    """

    window: int = 5
    momentum: float = 0.9
    least: int = 1
    most: int = 8

    def __post_init__(self) -> None:
        if self.window < 1 or not 0.0 <= self.momentum < 1.0:
            raise ValueError(
                "window is 1 or more and momentum in [0, 1), got "
                f"{self.window} and {self.momentum}"
            )
        if not {self.least, self.most} <= set(LEVELS) or self.least > self.most:
            raise ValueError(
                f"least and most are among {LEVELS}, got {self.least} and {self.most}"
            )


@dataclass(eq=False)
class LossTrend:
    """Tracks the loss of an `Adaptive` link, its bits, and whether it is synchronous now."""

    rule: Adaptive
    bits: int
    synchronous: bool = False
    mean: float | None = None
    slopes: list[float] = field(default_factory=list)  # |change of mean|, the last ones

    def __post_init__(self) -> None:
        self.bits = min(max(self.bits, self.rule.least), self.rule.most)

    def step(self, loss: float) -> None:
        """Updates the mean and the bits with the loss of an epoch."""
        rule, before = self.rule, self.mean
        if before is None:
            self.mean = loss
            return
        self.mean = rule.momentum * before + (1 - rule.momentum) * loss
        self.slopes = [*self.slopes[-rule.window :], abs(self.mean - before)]
        if len(self.slopes) <= rule.window:
            return
        pairs = list(pairwise(self.slopes))
        if all(a > b for a, b in pairs):
            self.bits, self.synchronous = min(2 * self.bits, rule.most), True
        elif all(a < b for a, b in pairs):
            self.bits, self.synchronous = max(self.bits // 2, rule.least), False
        else:
            return
        self.slopes = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as plain values."""
        progress = {**vars(self), "slopes": list(self.slopes)}
        del progress["rule"]
        return progress

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the progress of another trend."""
        self.bits, self.synchronous = int(state["bits"]), bool(state["synchronous"])
        self.mean, self.slopes = state["mean"], list(state["slopes"])


def bits_of(codec: Codec) -> int:
    """Returns the bits of a codec that quantises.

    Raises:
        ValueError: if it does not.
    """
    last = codec.last if isinstance(codec, Chain) else codec
    if not isinstance(last, (Quantise, DegreeBits)):
        raise ValueError(
            "adaptive=True changes the bits of Quantise(bits) or DegreeBits(bits), which "
            f"{codec!r} is not"
        )
    return last.bits


def with_bits(codec: Codec, bits: int) -> Codec:
    """Returns the same codec with other bits."""
    if isinstance(codec, Chain):
        return Chain(*codec.stages, with_bits(codec.last, bits))
    assert isinstance(codec, (Quantise, DegreeBits))
    return replace(codec, bits=bits)
