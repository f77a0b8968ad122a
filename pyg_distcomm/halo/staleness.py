"""Defines the epochs in which the rows of an exchange are used; see [Note: late rows]."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Timing:
    """Sets by how many epochs rows and gradients are late.

    Args:
        late: by how many epochs rows are late.
        late_gradients: by how many epochs gradients are late; None is as late as rows.
        sync_every: epoch e, counted from 0, is synchronous where this divides e + 1, as
            in the authors' code of [Zhang23]; 1 is synchronous throughout.
        warmup: how many epochs are synchronous at first; the first always is.
    """

    late: int = 0
    late_gradients: int | None = None
    sync_every: int | None = None
    warmup: int = 1

    def __post_init__(self) -> None:
        for name in ("late", "late_gradients"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} is a number of epochs, got {value!r}")
        every = self.sync_every
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ValueError(
                f"sync_every is a number of epochs, 1 or more, got {every!r}; None for never"
            )
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"warmup is a number of epochs, got {self.warmup!r}")

    @property
    def is_late(self) -> bool:
        """Whether rows or gradients of earlier epochs are ever used."""
        return max(self.staleness(False), self.staleness(True)) > 0

    def staleness(self, backward: bool) -> int:
        """Returns by how many epochs rows, or gradients, are late; 0 is now."""
        if self.sync_every == 1:
            return 0
        if backward and self.late_gradients is not None:
            return self.late_gradients
        return self.late

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
