"""Defines the epochs in which the rows of an exchange are used, and when it is skipped.

How late rows are kept: [Note: late rows] of `exchange.py`.

[Note: skipped rows] An exchange with a `Drift` is skipped while its rows hardly change. Before
it sends, the ranks of its axis sum over all rows x that they would send, and the rows s that
they sent last,

    drift^2 = sum |x - s|^2 / sum |s|^2

and all of them use the rows sent last again if drift <= bound, unless these get older than
`most` epochs. The sums, and so the decision, are the same on all ranks. The rows in use differ
from the rows of the epoch by at most the bound, relative to their norm, plus the error of the
codec.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Drift:
    """Decides when an exchange is skipped, so that the rows sent last are used again.

    See [Note: skipped rows]. Epochs that are synchronous skip nothing.

    Price: two float64 numbers, all-reduced over the axis, in each epoch in which rows may be
    skipped; a copy of the rows sent last.
    Follows [Peng22], which skips broadcasts of whole blocks while their embeddings are
    within a bound, in the decision; differs in that ranks decide together, on the rows
    that others need, and in skipping gradients by a bound of their own.

    Args:
        bound: the greatest drift of rows that is not sent.
        most: how many epochs old rows may get.
        gradients: the bound for gradients; None is that of rows, and 0 sends them in
            each epoch, without asking.
    """

    bound: float = 0.1
    most: int = 4
    gradients: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("bound", self.bound), ("gradients", self.gradients)):
            if value is not None and not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} is a drift, 0 or more, got {value!r}")
        if not isinstance(self.most, int) or self.most < 1:
            raise ValueError(
                f"most is a number of epochs, 1 or more, got {self.most!r}"
            )

    def bound_of(self, backward: bool) -> float:
        """Returns the bound of rows, or of gradients."""
        own = self.gradients if backward else None
        return self.bound if own is None else own


@dataclass(frozen=True)
class Timing:
    """Sets by how many epochs rows and gradients are late.

    Args:
        late: by how many epochs rows are late.
        late_gradients: by how many epochs gradients are late; None is as late as rows.
        sync_every: epoch e, counted from 0, is synchronous where this divides e + 1, as
            in the authors' code of [Zhang23]; 1 is synchronous throughout.
        smooth: late rows are a moving average g mean + (1 - g) row with this g, as those
            of [Wan22a] may be; synchronous ones begin it anew. None and 0 do not average.
        smooth_gradients: the g of late gradients; None is that of rows.
        warmup: how many epochs are synchronous at first; the first always is.
        skip: when exchanges are skipped; None is never.
    """

    late: int = 0
    late_gradients: int | None = None
    sync_every: int | None = None
    smooth: float | None = None
    smooth_gradients: float | None = None
    warmup: int = 1
    skip: Drift | None = None

    def __post_init__(self) -> None:
        least = {"late": 0, "late_gradients": 0, "sync_every": 1, "warmup": 0}
        for name, fewest in least.items():
            value = getattr(self, name)
            left_out = value is None and name in ("late_gradients", "sync_every")
            if not left_out and (not isinstance(value, int) or value < fewest):
                raise ValueError(
                    f"{name} is a number of epochs, {fewest} or more, got {value!r}"
                )
        ever = max(self.staleness(False), self.staleness(True)) > 0
        for name in ("smooth", "smooth_gradients"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} lies in [0, 1), got {value!r}")
            if value is not None and not ever:
                raise ValueError(f"{name} averages late rows, but late=0; leave it out")
        if self.skip is not None and not isinstance(self.skip, Drift):
            raise TypeError(f"skip must be a Drift, as Drift(0.1), got {self.skip!r}")
        if self.skip is not None and ever:
            raise ValueError(
                "rows that are skipped are used again at once, and cannot be late as well; "
                "give late or skip, not both"
            )

    @property
    def is_late(self) -> bool:
        """Whether rows or gradients of earlier epochs are ever used."""
        late = max(self.staleness(False), self.staleness(True)) > 0
        return late or (self.skips(False) or self.skips(True))

    def staleness(self, backward: bool) -> int:
        """Returns by how many epochs rows, or gradients, are late; 0 is now."""
        if self.sync_every == 1:
            return 0
        if backward and self.late_gradients is not None:
            return self.late_gradients
        return self.late

    def momentum(self, backward: bool) -> float:
        """Returns the g by which late rows, or gradients, are averaged; 0 is not."""
        own = self.smooth_gradients if backward else None
        g = self.smooth if own is None else own
        return g or 0.0 if self.staleness(backward) else 0.0

    def skips(self, backward: bool) -> bool:
        """Tells whether rows, or gradients, may be skipped."""
        skip = None if self.sync_every == 1 else self.skip
        return skip is not None and skip.bound_of(backward) > 0

    def synchronous(self, epoch: int) -> bool:
        """Tells whether an epoch waits for its own rows."""
        if epoch < self.warmup:
            return True
        every = self.sync_every
        return every is not None and (epoch + 1) % every == 0

    def __repr__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in changed)
        return f"Timing({shown})"
