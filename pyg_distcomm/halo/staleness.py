"""Defines the epoch in which the rows of an exchange are used, and buffers them until then.

[Note: late rows] At epoch t an exchange with a staleness of k sends this epoch's rows and uses
those of epoch t - k, which have had k epochs to travel. They are decoded with the codec, rate
and key that encoded them. An exchange is synchronous in its first epoch, and after an epoch
without it (as for gradients of frozen layers); while there are fewer than k earlier messages,
the oldest is used. A synchronous epoch waits for pending messages and uses its own rows, which
are the oldest from then on.

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

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.collectives import Pending
from pyg_distcomm.halo.codec import Codec, RngKey, unpack


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


@dataclass(eq=False)
class Message:
    """Holds the messages that all peers send in one exchange, pending or received.

    Args:
        codec: the codec that wrote them.
        epoch: the epoch of the rows.
        key: the key of their randomness.
        gid: the ids of the rows.
        counts: how many rows come from each peer.
        degree: the in-degrees of the rows, for a codec that is `ranked`.
        sizes: the bytes of each peer's message.
        pending: the collective, until it is waited for.
        raw: the received bytes.
    """

    codec: Codec
    epoch: int
    key: int
    gid: Tensor
    counts: tuple[int, ...]
    degree: Tensor | None
    sizes: list[int]
    pending: Pending | None
    raw: Tensor | None = None

    def wait(self) -> Tensor:
        """Waits for the collective, and returns the bytes."""
        if self.pending is not None:
            self.raw, self.pending = self.pending.wait(), None
        assert self.raw is not None
        return self.raw

    def read(self, out: Tensor) -> Tensor:
        """Decodes the rows into `out` `[rows, f]`."""
        raw = self.wait()
        draw = RngKey(self.key, self.gid, degree=self.degree)
        return unpack(self.codec, raw, self.sizes, self.counts, out, draw)


@dataclass(eq=False)
class StaleBuffer:
    """Keeps the messages of one exchange, in one direction, from epoch to epoch.

    Its bytes, for rows that are k epochs late: k messages, and with `smooth` the mean of the
    rows received.

    Args:
        messages: the last messages, the newest last.
        mean: the moving average.
        shape: the plan, width and type of the rows; the buffer is cleared for others.
        since: the epoch of the first message, or of the last synchronous one.
        reference: a copy of the rows sent last, if exchanges may be skipped.
    """

    messages: list[Message] = field(default_factory=list)
    mean: Tensor | None = None
    shape: tuple[Any, int, torch.dtype] | None = None
    since: int | None = None
    reference: Tensor | None = None

    def bind(self, plan: Any, width: int, dtype: torch.dtype) -> None:
        """Clears the buffer if it holds rows of another plan, width or type."""
        if self.shape is None:
            self.shape = plan, width, dtype
        if self.shape[0] is None:  # restored
            self.shape = plan, *self.shape[1:]
        if self.shape[0] is plan and self.shape[1:] == (width, dtype):
            return
        self.drain()
        self.messages, self.mean = [], None
        self.since = self.reference = None
        self.shape = plan, width, dtype

    def push(self, new: Message, late: int, synchronous: bool) -> Message:
        """Adds a message, and returns the one to read: `late` before it, or the oldest.

        A synchronous message is read at once, and earlier ones are dropped.
        """
        if synchronous:
            self.messages, self.since = [], None
        self.messages.append(new)
        self.since = new.epoch if self.since is None else self.since
        return self.messages[max(len(self.messages) - 1 - late, 0)]

    def trim(self, late: int) -> None:
        """Drops all messages except the last `late`."""
        del self.messages[: max(len(self.messages) - late, 0)]

    def average(self, rows: Tensor, smooth: float, synchronous: bool) -> Tensor:
        """Updates the moving average with rows, and writes it to them in place."""
        if self.mean is None or synchronous:
            self.mean = rows.clone()
        else:
            self.mean.mul_(smooth).add_(rows, alpha=1 - smooth)
        return rows.copy_(self.mean)

    def drift(self, rows: Tensor) -> Tensor:
        """Returns sum |x - s|^2 and sum |s|^2, of these rows and those sent last `[2]`."""
        assert self.reference is not None
        last = self.reference.double()
        change = (rows.double() - last).square().sum()
        return torch.stack([change, last.square().sum()])

    def drain(self) -> None:
        """Waits for pending messages."""
        for message in self.messages:
            message.wait()

    @property
    def held(self) -> int:
        """The bytes in the buffer, those of pending messages included."""
        held = sum(sum(message.sizes) for message in self.messages)
        tensors = [t for t in (self.mean, self.reference) if t is not None]
        return held + sum(t.nbytes for t in tensors)
