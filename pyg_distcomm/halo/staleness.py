"""Timing: when the rows of an exchange arrive, and what is kept until then.

[Note: late rows] At epoch t an exchange late by k sends this epoch's rows and goes on with
those of epoch t - k, which have had k epochs to travel. They are read by the codec, at
the rate and with the key they were written with. An exchange that is new is synchronous,
and so is one that an epoch went without, as of gradients where layers were frozen; until
there are k earlier messages the oldest is used. In a synchronous epoch what is under way is
waited for, and the rows of this epoch are used, which are the oldest from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm.collectives import Pending
from pyg_distcomm.halo.codec import Codec, CodecState, RngKey, unpack


@dataclass(frozen=True)
class Timing:
    """How late rows and gradients are.

    Args:
        late: by how many epochs rows are late.
        late_gradients: by how many gradients are; None is as late as rows.
        sync_every: epoch e, counted from 0, is synchronous where this divides e + 1, as
            in the authors' code of [Zhang23]; 1 is synchronous throughout.
        smooth: late rows are a moving average g mean + (1 - g) row with this g, as those
            of [Wan22a] may be; synchronous ones begin it anew.
    """

    late: int = 0
    late_gradients: int | None = None
    sync_every: int | None = None
    smooth: float | None = None

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
        if self.smooth is not None and not 0.0 <= self.smooth < 1.0:
            raise ValueError(f"smooth lies in [0, 1), got {self.smooth!r}")
        if self.smooth is not None and not self.is_late:
            raise ValueError("smooth averages late rows, but late=0; leave it out")

    @property
    def is_late(self) -> bool:
        """Whether anything ever is."""
        return max(self.staleness(False), self.staleness(True)) > 0

    @property
    def switches(self) -> bool:
        """Whether late epochs and synchronous ones take turns."""
        return self.sync_every not in (None, 1) and self.is_late

    def staleness(self, backward: bool) -> int:
        """Returns by how many epochs rows, or gradients, are late; 0 is now."""
        if self.sync_every == 1:
            return 0
        if backward and self.late_gradients is not None:
            return self.late_gradients
        return self.late

    def synchronous(self, epoch: int) -> bool:
        """Tells whether an epoch waits for its own rows."""
        every = self.sync_every
        return every is not None and (epoch + 1) % every == 0


@dataclass(eq=False)
class Message:
    """What comes from all peers in one exchange: under way, or here.

    Args:
        codec: how it is written.
        epoch: of its rows.
        key: what it was drawn with.
        gid: the ids of its rows.
        counts: how many rows come from each peer.
        sizes: the bytes of each peer's message.
        pending: its exchange.
    """

    codec: Codec
    epoch: int
    key: int
    gid: Tensor
    counts: tuple[int, ...]
    sizes: list[int]
    pending: Pending | None
    raw: Tensor | None = None
    opened: bool = False

    def land(self) -> Tensor:
        """Waits until it is here, and returns its bytes."""
        if self.pending is not None:
            self.raw, self.pending = self.pending.wait(), None
        assert self.raw is not None
        return self.raw

    def read(self, out: Tensor, state: CodecState | None) -> Tensor:
        """Reads it into `out` `[rows, f]`; a state takes its part once."""
        raw = self.land()
        if state is not None and self.opened:
            return out.copy_(state.last)
        self.opened = True
        draw = RngKey(self.key, self.gid)
        return unpack(self.codec, raw, self.sizes, self.counts, out, draw, state=state)


@dataclass(eq=False)
class StaleBuffer:
    """What one exchange keeps, in one direction, from epoch to epoch.

    Its bytes, for k epochs of lateness:

        stateless  k messages
        stateful   k messages, and the rows that were last sent and last read
        smooth     and the mean of the rows read

    Args:
        messages: the last ones, the newest last.
        sent, seen: the states of what is sent, and of what is read.
        mean: the moving average.
        shape: of the rows: their plan, width and type; other rows begin anew.
        since: the epoch of the first message, or of the last synchronous one.
    """

    messages: list[Message] = field(default_factory=list)
    sent: CodecState | None = None
    seen: CodecState | None = None
    mean: Tensor | None = None
    shape: tuple[Any, int, torch.dtype] | None = None
    since: int | None = None

    def meet(self, plan: Any, width: int, dtype: torch.dtype) -> None:
        """Begins anew if what is kept is of other rows, on all ranks alike."""
        if self.shape is None:
            self.shape = plan, width, dtype
        if self.shape[0] is None:  # restored
            self.shape = plan, *self.shape[1:]
        if self.shape[0] is plan and self.shape[1:] == (width, dtype):
            return
        self.drain()
        self.messages, self.sent, self.seen, self.mean = [], None, None, None
        self.since = None
        self.shape = plan, width, dtype

    def take(self, new: Message, late: int, fresh: bool) -> Message:
        """Adds a message, and returns the one to read: `late` before it, or the oldest.

        A fresh one is read itself, and those before it are never read again.
        """
        if fresh:
            self.messages, self.since = [], None
        self.messages.append(new)
        self.since = new.epoch if self.since is None else self.since
        return self.messages[max(len(self.messages) - 1 - late, 0)]

    def trim(self, late: int) -> None:
        """Forgets what is not needed any more by an exchange late by so many epochs."""
        del self.messages[: max(len(self.messages) - late, 0)]

    def average(self, rows: Tensor, smooth: float, fresh: bool) -> Tensor:
        """Returns the moving average in place of rows, which it takes in."""
        if self.mean is None or fresh:
            self.mean = rows.clone()
        else:
            self.mean.mul_(smooth).add_(rows, alpha=1 - smooth)
        return rows.copy_(self.mean)

    def drain(self) -> None:
        """Waits for what is under way."""
        for message in self.messages:
            message.land()

    @property
    def held(self) -> int:
        """The bytes that are kept; those under way are counted as they will be."""
        kept = sum(sum(message.sizes) for message in self.messages)
        tensors = [s.last for s in (self.sent, self.seen) if s is not None]
        tensors += [] if self.mean is None else [self.mean]
        return kept + sum(t.nbytes for t in tensors)
