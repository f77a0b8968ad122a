"""Schedules the compression ratio c of each epoch, or the bits of a codec by the loss.

A schedule is a value, and c a function of the epoch; a `RateScheduler` counts epochs. A
ratio is 1 or more: a codec of rate c sends about 1/c of the numbers.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs.composed import Chain
from pyg_distcomm.halo.codecs.quantise import LEVELS, DegreeBits, Quantise

__all__ = [
    "Adaptive",
    "Budget",
    "Cosine",
    "Exponential",
    "Fixed",
    "Linear",
    "LinearInRate",
    "Plateau",
    "Ramp",
    "RateScheduler",
    "Schedule",
    "Step",
]

BytesOf = Callable[[int, float], float]  # (epoch, rate) -> bytes of that epoch
WITHIN = 0.01  # the share of its budget that a schedule may leave


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
        _check_ratio("c", self.c)

    def rate(self, epoch: int) -> float:
        """Returns c."""
        return self.c


@dataclass(frozen=True)
class Ramp(Schedule):
    """Lowers the ratio from c_max to c_min, and keeps it there (abstract).

        p(t) = min(slope t / (T - 2), 1)

    is the progress at epoch t of T; the ramp ends at t = (T - 2) / slope. T below 3
    counts as 3.

    Args:
        epochs: T, how many there will be.
        c_max: the ratio at first.
        c_min: the ratio in the end; 1 is exact.
        slope: how often the ramp would fit in T epochs; 0 stays at c_max.
    """

    epochs: int
    c_max: float = 128.0
    c_min: float = 1.0
    slope: float = 1.0

    def __post_init__(self) -> None:
        _check_ratio("c_min", self.c_min)
        _check_ratio("c_max", self.c_max)
        if self.c_max < self.c_min:
            raise ValueError(
                f"c_max={self.c_max} is the ratio at first and must not be below "
                f"c_min={self.c_min}"
            )
        if self.epochs < 1:
            raise ValueError(f"a schedule has 1 epoch or more, got {self.epochs}")
        if not 0.0 <= self.slope < math.inf:
            raise ValueError(f"slope is 0 or more, got {self.slope}")

    def progress(self, epoch: int) -> float:
        """Returns p(t), in [0, 1]."""
        return min(self.slope * epoch / max(self.epochs - 2, 1), 1.0)

    @abc.abstractmethod
    def at(self, p: float) -> float:
        """Returns c at a progress of p."""

    def rate(self, epoch: int) -> float:
        """Returns c(t), never outside [c_min, c_max]."""
        return min(max(self.at(self.progress(epoch)), self.c_min), self.c_max)


@dataclass(frozen=True)
class Linear(Ramp):
    """Lowers c linearly, as VARCO does.

        c(t) = max(c_max - slope t (c_max - c_min) / (T - 2), c_min)

    Follows the authors' code for the experiments of [Cervino24]; their scripts end at
    c_min = 1.5, the paper at 1. Most of the ramp has ratios that send almost nothing:
    slope 5 with c_min = 1 saves a fifth of the numbers.
    """

    slope: float = 5.0

    def at(self, p: float) -> float:
        """Returns c_max - p (c_max - c_min)."""
        return self.c_max - p * (self.c_max - self.c_min)


@dataclass(frozen=True)
class LinearInRate(Ramp):
    """Raises 1/c, the share of the numbers that is sent, linearly."""

    def at(self, p: float) -> float:
        """Returns 1 / ((1 - p) / c_max + p / c_min)."""
        return 1.0 / ((1.0 - p) / self.c_max + p / self.c_min)


@dataclass(frozen=True)
class Exponential(Ramp):
    """Divides the ratio by the same factor each epoch."""

    def at(self, p: float) -> float:
        """Returns c_max (c_min / c_max)^p."""
        return self.c_max * (self.c_min / self.c_max) ** p


@dataclass(frozen=True)
class Cosine(Ramp):
    """Lowers the ratio by half a cosine wave from c_max to c_min."""

    def at(self, p: float) -> float:
        """Returns c_min + (c_max - c_min) (1 + cos pi p) / 2."""
        wave = (1.0 + math.cos(math.pi * p)) / 2
        return self.c_min + (self.c_max - self.c_min) * wave


@dataclass(frozen=True)
class Step(Schedule):
    """Divides the ratio by a factor every few epochs.

        c(t) = max(c_max / factor^floor(t / every), c_min)

    Args:
        every: epochs between two steps.
        factor: the divisor of c.
        c_max, c_min: the ratio at first, and in the end.
    """

    every: int
    factor: float = 2.0
    c_max: float = 128.0
    c_min: float = 1.0

    def __post_init__(self) -> None:
        _check_fall(self.c_max, self.c_min, self.factor)
        if self.every < 1:
            raise ValueError(f"every is 1 epoch or more, got {self.every}")

    def rate(self, epoch: int) -> float:
        """Returns c(t)."""
        return _fallen(self.c_max, self.c_min, self.factor, epoch // self.every)


@dataclass(frozen=True)
class Plateau(Schedule):
    """Divides the ratio by a factor when a metric has stopped falling.

    The metric has stopped when for more than `patience` epochs it has not fallen below its
    best by `threshold` of the best's magnitude. All ranks must give the same metric to
    `RateScheduler.step`, as a loss over all nodes.

    Args:
        patience: the number of epochs without progress that are accepted.
        factor: the divisor of c.
        threshold: the least relative decrease that is progress.
        c_max, c_min: the ratio at first, and in the end.
    """

    patience: int = 5
    factor: float = 2.0
    threshold: float = 1e-3
    c_max: float = 128.0
    c_min: float = 1.0

    def __post_init__(self) -> None:
        _check_fall(self.c_max, self.c_min, self.factor)
        if self.patience < 0 or not 0.0 <= self.threshold < 1.0:
            raise ValueError(
                "patience is 0 or more and threshold in [0, 1), got "
                f"{self.patience} and {self.threshold}"
            )

    def rate(self, epoch: int) -> float:
        """Returns c before any step down: the others depend on the metric."""
        return self.c_max

    def at(self, falls: int) -> float:
        """Returns c after some steps down."""
        return _fallen(self.c_max, self.c_min, self.factor, falls)

    def better(self, metric: float, best: float) -> bool:
        """Tells whether a metric is progress over the best so far."""
        return best == math.inf or metric < best - self.threshold * abs(best)


@dataclass(frozen=True)
class Budget(Schedule):
    """Solves for the slope of a ramp that sends the given bytes in all epochs.

    `solve` finds it by bisection: a steeper ramp sends more. The solution stays within the
    budget, and meets it to 1 % where whole columns allow that: where no slope does, c_max
    is lowered as well. A product of constant inputs counts once, though an evaluation may
    compute it, so that rates do not depend on evaluations.

    Args:
        total: bytes of all epochs together.
        ramp: the ramp, with its epochs and bounds; its slope is not used.
    """

    total: float
    ramp: Ramp

    def __post_init__(self) -> None:
        if not 0.0 < self.total < math.inf:
            raise ValueError(f"a budget is a number of bytes, got {self.total}")

    def rate(self, epoch: int) -> float:
        """Raises: rates are not known before `solve`."""
        raise ValueError(
            f"{self!r} has no rates yet: solve(bytes_of) finds them from the bytes of an "
            "epoch at a rate"
        )

    def solve(self, bytes_of: BytesOf) -> Schedule:
        """Returns the ramp that spends the budget.

        A budget that c_min does not use up gives `Fixed(c_min)`.

        Args:
            bytes_of: bytes of an epoch at a rate, `(epoch, rate) -> bytes`; they must not
                rise with the rate.

        Raises:
            ValueError: if c_max throughout is already more.
        """
        ramp, exact = self.ramp, Fixed(self.ramp.c_min)

        def spent(schedule: Schedule) -> float:
            return total_bytes(schedule, ramp.epochs, bytes_of)

        def within(start: float, end: float, make: Callable[[float], Ramp]) -> Ramp:
            """Bisects between a value within the budget and one that may not be."""
            if spent(make(end)) <= self.total:
                return make(end)
            while abs(end - start) > 1e-12 * max(abs(end), abs(start)):
                middle = (start + end) / 2
                if spent(make(middle)) <= self.total:
                    start = middle
                else:
                    end = middle
            return make(start)

        flat = replace(ramp, slope=0.0)
        if spent(flat) > self.total:
            raise ValueError(
                f"a budget of {self.total:.6g} bytes is too small: {ramp.epochs} epochs at "
                f"c_max={ramp.c_max:g} take {spent(flat):.6g}; raise c_max or the budget"
            )
        if spent(exact) <= self.total:
            return exact
        best = within(0.0, float(ramp.epochs), lambda a: replace(ramp, slope=a))
        if spent(best) < (1 - WITHIN) * self.total:
            best = within(ramp.c_max, ramp.c_min, lambda c: replace(best, c_max=c))
        return best


@dataclass(eq=False)
class RateScheduler:
    """Tracks a schedule: `rate` is the ratio now, and `step()` ends an epoch.

    Args:
        schedule: the schedule.
        epoch: the epoch of the rate in use.
        falls, best, waited: for `Plateau`: steps down, best metric, epochs without progress.
    """

    schedule: Schedule
    epoch: int = 0
    falls: int = 0
    best: float = field(default=math.inf, repr=False)
    waited: int = field(default=0, repr=False)
    given: Schedule = field(init=False, repr=False)  # a `Budget` before it is solved

    def __post_init__(self) -> None:
        self.given = self.schedule

    @property
    def rate(self) -> float:
        """The compression ratio now."""
        if isinstance(self.schedule, Plateau):
            return self.schedule.at(self.falls)
        return self.schedule.rate(self.epoch)

    def step(self, metric: float | None = None) -> float:
        """Ends an epoch, and returns the ratio of the next.

        Raises:
            ValueError: if a `Plateau` is given no metric, or one that is no number.
        """
        if isinstance(self.schedule, Plateau):
            self._measure(self.schedule, metric)
        self.epoch += 1
        return self.rate

    def _measure(self, plateau: Plateau, metric: float | None) -> None:
        if metric is None or math.isnan(metric):
            raise ValueError(
                f"{plateau!r} needs a metric: step(metric=loss), the same number on all "
                f"ranks; got {metric}"
            )
        if plateau.better(float(metric), self.best):
            self.best, self.waited = float(metric), 0
            return
        self.waited += 1
        if self.waited > plateau.patience:
            self.falls, self.waited = self.falls + 1, 0

    def solve(self, bytes_of: BytesOf) -> None:
        """Solves a `Budget`; other schedules do not change."""
        if isinstance(self.schedule, Budget):
            self.schedule = self.schedule.solve(bytes_of)

    @property
    def solution(self) -> dict[str, float] | None:
        """What was solved for, if a budget was given and is solved."""
        if not isinstance(self.given, Budget) or isinstance(self.schedule, Budget):
            return None
        if isinstance(self.schedule, Ramp):
            return {"slope": self.schedule.slope, "c_max": self.schedule.c_max}
        return {"c": self.rate}

    def load_solution(self, solution: Mapping[str, float] | None) -> None:
        """Restores the schedule that was solved for."""
        self.schedule = self.given
        if solution is not None and isinstance(self.given, Budget):
            ramp: Any = self.given.ramp
            fixed = "c" in solution
            self.schedule = Fixed(**solution) if fixed else replace(ramp, **solution)

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as plain numbers."""
        return {
            "epoch": self.epoch,
            "falls": self.falls,
            "best": self.best,
            "waited": self.waited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the progress of another scheduler.

        Raises:
            ValueError: if something is missing; nothing has changed then.
        """
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise ValueError(
                f"the state of a schedule has {sorted(self.state_dict())}, but this one "
                f"lacks {sorted(missing)}"
            )
        self.epoch, self.falls = int(state["epoch"]), int(state["falls"])
        self.best, self.waited = float(state["best"]), int(state["waited"])

    def __str__(self) -> str:
        try:
            now = f"rate {self.rate:.4g}"
        except ValueError:
            now = "not solved yet"
        return f"{self.schedule}, epoch {self.epoch}: {now}"


@dataclass(frozen=True)
class Adaptive:
    """Sets when a link uses more bits, or fewer, by its loss.

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
    """Tracks the loss of an `Adaptive` link, and its bits.

    Args:
        rule: the rule by which bits change.
        bits: the bits of its codec, within bounds.
        synchronous: whether its exchanges are synchronous.
        mean: the mean loss.
        slopes: |change of mean| of the last epochs.
    """

    rule: Adaptive
    bits: int
    synchronous: bool = False
    mean: float | None = None
    slopes: list[float] = field(default_factory=list)

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
        return {
            "bits": self.bits,
            "synchronous": self.synchronous,
            "mean": self.mean,
            "slopes": list(self.slopes),
        }

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


def total_bytes(schedule: Schedule, epochs: int, bytes_of: BytesOf) -> float:
    """Returns the bytes that a schedule sends in all epochs."""
    return math.fsum(bytes_of(t, schedule.rate(t)) for t in range(epochs))


def _fallen(c_max: float, c_min: float, factor: float, falls: int) -> float:
    # beyond this many the power could overflow, and c has reached c_min before
    enough = math.ceil(math.log(c_max / c_min) / math.log(factor)) + 1
    return max(c_max / factor ** min(falls, enough), c_min)


def _check_ratio(name: str, c: float) -> None:
    if not 1.0 <= c < math.inf:
        raise ValueError(f"a compression ratio is 1 or more, got {name}={c}")


def _check_fall(c_max: float, c_min: float, factor: float) -> None:
    _check_ratio("c_min", c_min)
    _check_ratio("c_max", c_max)
    if c_max < c_min or not 1.0 < factor < math.inf:
        raise ValueError(
            f"a ratio falls from c_max={c_max} to c_min={c_min} by factor={factor}: c_max "
            "must not be below c_min, and factor must be above 1"
        )
