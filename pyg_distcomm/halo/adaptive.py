"""Adaptive: bits and timing by how the loss falls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs.composed import Chain
from pyg_distcomm.halo.codecs.quantise import Quantise

BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Adaptive:
    """When a link should have more bits, or fewer.

        mean = momentum mean + (1 - momentum) loss,   v = |change of mean|

    Once v has fallen `window` times in a row, training settles: bits double, and exchanges
    become synchronous. Once it has risen as often, bits halve and exchanges are late
    again. Rank 0's loss counts, and counting begins anew.

    As in the authors' code of the later Sylvie ([Zhang23]), but for v, which they divide by
    the seconds of an epoch: those would make a run differ from its repetition.

    Args:
        window: how many changes in one direction decide.
        momentum: of the mean.
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
        if not {self.least, self.most} <= set(BITS) or self.least > self.most:
            raise ValueError(
                f"least and most are among {BITS}, got {self.least} and {self.most}"
            )


@dataclass(eq=False)
class LossTrend:
    """Where an `Adaptive` link stands.

    Args:
        rule: how it goes on.
        bits: of its codec, within bounds.
        synchronous: whether its exchanges are.
        mean: of the loss.
        slopes: |change of mean| of the last epochs.
    """

    rule: Adaptive
    bits: int
    synchronous: bool = False
    mean: float | None = None
    slopes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bits = min(max(self.bits, self.rule.least), self.rule.most)

    def look(self, loss: float) -> None:
        """Takes in the loss of an epoch."""
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
        """Returns where it stands, in plain numbers."""
        return {
            "bits": self.bits,
            "synchronous": self.synchronous,
            "mean": self.mean,
            "slopes": list(self.slopes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes where another stood."""
        self.bits, self.synchronous = int(state["bits"]), bool(state["synchronous"])
        self.mean, self.slopes = state["mean"], list(state["slopes"])


def bits_of(codec: Codec) -> int:
    """Returns the bits of a codec that quantises.

    Raises:
        ValueError: if it does not.
    """
    last = codec.last if isinstance(codec, Chain) else codec
    if not isinstance(last, Quantise):
        raise ValueError(
            f"adaptive=True changes the bits of Quantise(bits), which {codec!r} is not"
        )
    return last.bits


def with_bits(codec: Codec, bits: int) -> Codec:
    """Returns the same codec with other bits."""
    if isinstance(codec, Chain):
        return Chain(*codec.stages, with_bits(codec.last, bits))
    assert isinstance(codec, Quantise)
    return replace(codec, bits=bits)
