"""Defines the codec, the compression rate and the staleness of the rows of a link."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.comm.store import world_size
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs import Plain, codec_of
from pyg_distcomm.halo.cost import LinkCostModel, LinkPrice
from pyg_distcomm.halo.exchange import LayerExchange
from pyg_distcomm.halo.schedule import (
    Adaptive,
    LossTrend,
    Schedule,
    bits_of,
    with_bits,
)
from pyg_distcomm.halo.staleness import Drift, Timing
from pyg_distcomm.halo.state import LayerState, LinkState, LinkUse

__all__ = ["LinkPolicy"]

_STATE_KEYS = frozenset(
    "epoch pace trend last active parts_of mark constant kept".split()
)


class LinkPolicy(LinkUse):
    """Defines how rows travel between ranks, and when they are used.

    Given to `pdc.partition(data, mesh, link=...)`, to `data.edge_index.with_link(...)`, to
    one layer or to `convert`, it applies to all products and exchanges of layers. Own rows
    never travel, fiber steps are exact and synchronous, and one rank ignores it. Call
    `link.step()` once per epoch; `print(link)` shows the exchanges and their bytes.

    Some exchanges are exact: those of an evaluation, unless `exact_eval=False`; of the
    first epoch, which is synchronous, and from then on its last exchange, unless
    `exact_last=False`; and of the product of constant inputs, where it is cached (see
    `DistEdgeIndex.with_ordering`).

    Price: `price()`, bytes of an epoch, forward and backward, as the ledger counts them.
    Ranks agree on one byte once in a training pass, and in each call of an evaluation or
    of a new layer: whether one evaluates. More would delay late exchanges.
    Memory: the exact link's, `price().kept` (see `StaleBuffer`), and at most the messages of
    one exchange; synchronous messages of a few bits take less than the exact link alone.
    Differs from [Cervino24], [Zhang23], [Wan22a] in that codec and timing are chosen
    independently, on any grid, and in exact evaluation.

    Args:
        codec: the codec of rows, or its name, as "bf16" (`codecs.known_codecs`).
        schedule: the compression ratio of each epoch, for a codec that has a rate.
        late: by how many epochs rows are late.
        late_gradients: by how many gradients are late; None is as late as rows.
        sync_every, warmup: which epochs are synchronous; see `Timing`.
        smooth, smooth_gradients: moving averages of late rows and gradients; see `Timing`.
        skip: skips exchanges of what has hardly changed; see `Drift`.
        exact_last: makes the last call exact, of layers that make more than one, and the
            first epoch.
        exact_eval: makes evaluation exact; otherwise it is coded, never late, and exact
            where `exact_last` makes training so, in all calls of that layer.
        adaptive: sets bits and timing by the loss; True is `Adaptive()`.
        seed: the seed of random columns, rows and rounding.

    Raises:
        ValueError: for arguments that contradict each other.
    """

    def __init__(
        self,
        codec: Codec | str,
        schedule: Schedule | None = None,
        *,
        late: int = 0,
        late_gradients: int | None = None,
        sync_every: int | None = None,
        smooth: float | None = None,
        smooth_gradients: float | None = None,
        warmup: int = 1,
        skip: Drift | None = None,
        exact_last: bool = True,
        exact_eval: bool = True,
        adaptive: bool | Adaptive = False,
        seed: int = 0,
    ) -> None:
        codec = codec_of(codec) if isinstance(codec, str) else codec
        if not isinstance(codec, Codec):
            raise TypeError(
                "codec must be a Codec, as Plain(), or its name, as 'bf16', got "
                f"{codec!r}"
            )
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(
                f"schedule must be a Schedule, as Fixed(2), got {schedule!r}"
            )
        self.codec = codec
        means = smooth, smooth_gradients
        self.timing = timing = Timing(
            late, late_gradients, sync_every, *means, warmup, skip
        )
        self.is_exact = codec == Plain() and not timing.is_late
        self.lateness = timing.staleness(False), timing.staleness(True)
        self.skipping = timing.skips(False), timing.skips(True)
        self.exact_last, self.exact_eval, self.seed = exact_last, exact_eval, seed
        self.schedule = schedule
        rule = Adaptive() if adaptive is True else adaptive or None
        self.trend = None if rule is None else LossTrend(rule, bits_of(codec))
        if schedule is not None:
            codec.with_rate(1.0)  # raises for a codec without a rate
        self.epoch = 0
        self.state = LinkState()
        self._codecs_by_epoch: dict[int, Codec] = {}
        self._warned = False
        self._begin_epoch()

    def begin_pipeline(self, nodes: Rows) -> None:
        """Begins an epoch of a pipeline, on the ranks of all its stages; see `begin_chunk`.

        Raises:
            ValueError: for a link that skips, or needs in-degrees: chunks support neither.
        """
        if self.timing.skip or self.codec.ranked:
            raise ValueError(
                f"{self!r} skips exchanges or needs in-degrees, which chunks of a pipeline do "
                "not support; leave out skip, and use Quantise or RangeBits for DegreeBits"
            )
        if nodes.mesh.size > 1 and not self.is_exact:
            self.state.begin_pipeline(nodes, self.epoch)

    def begin_chunk(
        self, boundary: int, name: str, number: int, last: bool
    ) -> LayerExchange:
        """Returns the exchange of a chunk of rows in training; the link must not be exact.

        Args:
            boundary: the number of the layer boundary, counted over all stages.
            name: the name of its layer in messages.
            number: the number of the chunk.
            last: whether it is the last boundary.
        """
        self.state.layers.setdefault(boundary, LayerState(name)).name = name
        self.state.calls[boundary, number] = None
        call = self._layer_exchange((boundary, number), trains=True)
        return call.as_exact("the last one") if last and self.exact_last else call

    def _begin_epoch(self) -> None:
        """Decides what layers ask for in the epoch in progress."""
        self._codec = self.codec_at(self.epoch)
        self._synchronous = self.is_synchronous(self.epoch)

    def is_synchronous(self, epoch: int) -> bool:
        """Tells whether an epoch uses its own rows; with `adaptive` by the loss so far."""
        if epoch == 0 or self.timing.synchronous(epoch):
            return True
        return self.trend is not None and self.trend.synchronous

    def codec_at(self, epoch: int) -> Codec:
        """Returns the codec of an epoch: of rows, and of the gradients that answer them."""
        if epoch in self._codecs_by_epoch:
            return self._codecs_by_epoch[epoch]
        codec = self.codec
        if self.trend is not None:
            codec = with_bits(codec, self.trend.bits)
        if self.schedule is not None:
            codec = codec.with_rate(self.schedule.rate(epoch))
        if epoch == self.epoch:
            self._codecs_by_epoch[epoch] = codec
        return codec

    @property
    def settings(self) -> dict[str, str]:
        """The arguments and the epoch of the link, which must be the same on all ranks."""
        made = {
            "codec": self.codec,
            "schedule": self.schedule,
            "timing": self.timing,
            "exact_last": self.exact_last,
            "exact_eval": self.exact_eval,
            "adaptive": None if self.trend is None else self.trend.rule,
            "seed": self.seed,
            "epoch": self.epoch,
        }
        named = {f"link.{name}": repr(value) for name, value in made.items()}
        named = {"link": type(self).__name__, **named}
        return {k: re.sub(r" at 0x[0-9a-f]+", "", v) for k, v in named.items()}

    def step(self, metric: float | Tensor | None = None) -> None:
        """Ends an epoch; on all ranks, after the optimizer's step.

        Args:
            metric: the loss, for `adaptive` links; rank 0's counts.

        Raises:
            ValueError: if such a link gets no metric.
        """
        value = None if metric is None else float(torch.as_tensor(metric).detach())
        state, axis = self.state, self.state.axis
        if self.trend is not None:
            value = value if axis is None else collectives.broadcast_object(value, axis)
            if value is None or not math.isfinite(value):
                raise ValueError(
                    f"this link needs a finite loss: call link.step(loss), got {value}"
                )
            self.trend.step(value)
        self._warn_unused()
        state.end_epoch(self.exact_last)
        self.epoch += 1
        skip = self.timing.skip
        reach = self.timing.staleness(False) + self.timing.staleness(True) + 1
        reach += 0 if skip is None else 2 * skip.most
        for epoch in [e for e in self._codecs_by_epoch if e < self.epoch - reach]:
            del self._codecs_by_epoch[epoch]
        self._begin_epoch()

    def _warn_unused(self) -> None:
        """Warns once if no exchange of this or a later epoch is coded or late."""
        if self.is_exact or self._warned or world_size() == 1:
            return
        if told := self.state.why_unused(self.epoch):
            self._warned = True
            warnings.warn(f"{self!r} is configured but not used: {told}", stacklevel=3)

    def price(self, epoch: int | None = None) -> LinkPrice:
        """Returns the price of a training epoch on this rank, from the exchanges so far.

        Args:
            epoch: the epoch; by default the one in progress. Later epochs of an `adaptive`
                link are priced at the current bits.
        """
        epoch = self.epoch if epoch is None else epoch
        return LinkCostModel.of(self).price(epoch)

    def staleness(self, epoch: int | None = None) -> int:
        """Returns by how many epochs the oldest rows or gradients of an epoch are late.

        0 in synchronous epochs; with `skip` that of the last epoch that is over. For a
        learning rate that is divided by it, as in [Zhang16]:

            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + link.staleness()))

        whose `step()` comes after `link.step()`.

        Args:
            epoch: by default the one in progress.
        """
        epoch = self.epoch if epoch is None else epoch
        if self.timing.skip is not None:
            sent = [b.messages[-1].epoch for *_, b in self.state.buffers if b.messages]
            return max(self.epoch - 1 - min(sent, default=epoch), 0)
        model = LinkCostModel.of(self)
        ends = (model.oldest(epoch, self.timing.staleness(b)) for b in (False, True))
        return max(epoch - end for end in ends)

    @property
    def held(self) -> int:
        """The bytes of all buffers that are kept between epochs."""
        return sum(buffer.held for _, _, buffer in self.state.buffers)

    def drain(self) -> None:
        """Waits for pending messages."""
        for _, _, buffer in self.state.buffers:
            buffer.drain()

    def reset(self) -> None:
        """Drops late rows, so that the next exchanges are synchronous."""
        self.state.reset()

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of training, with the late rows of this rank.

        Save between epochs, after `step()`: a run that is saved within an epoch repeats it
        after a restart, and sends its rows twice; a warning is given.
        """
        trend = self.trend
        return {
            "epoch": self.epoch,
            "pace": None if self.schedule is None else repr(self.schedule),
            "trend": None if trend is None else trend.state_dict(),
            **self.state.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the progress of a link made with the same arguments.

        Late rows are used if each rank has its own, of the same partition,
        which is checked at the first use; otherwise all ranks drop them with a warning,
        and the next epoch is synchronous.

        Raises:
            ValueError: if a key is missing; nothing has changed then.
        """
        self.check_state(state)
        nodes = self.state.nodes
        self.state, self._codecs_by_epoch = LinkState.read(state), {}
        if self.trend is not None:
            self.trend.load_state_dict(state["trend"])
        self.epoch = int(state["epoch"])
        self.state.nodes = nodes
        self._begin_epoch()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises a ValueError for a state that does not belong to such a link."""
        if _STATE_KEYS - state.keys():
            raise ValueError(
                f"the state of a link lacks {sorted(_STATE_KEYS - state.keys())}; give what "
                "link.state_dict() returned"
            )
        pairs = ("schedule", self.schedule, "pace"), ("adaptive", self.trend, "trend")
        for name, own, key in pairs:
            if (own is None) != (state[key] is None):
                raise ValueError(
                    f"only one of the saved link and this one has {name}; make this one with "
                    "the same arguments"
                )

    def __str__(self) -> str:
        """Returns a table of the exchanges so far, with their bytes in this epoch."""
        parts = [f"{self!r}"]
        if self.schedule is not None:
            rate = self.schedule.rate(self.epoch)
            parts.append(f"{self.schedule}, epoch {self.epoch}: rate {rate:.4g}")
        if self.state.exchanges:
            parts.append(f"{self.price()}")
        return "\n".join(parts)

    def __repr__(self) -> str:
        shown = [f"{self.codec}"]
        if self.timing.is_late:
            shown.append(f"{self.timing}")
        options = ("exact_last", "exact_eval")
        shown += [f"{name}=False" for name in options if not getattr(self, name)]
        return f"LinkPolicy({', '.join(shown)})"

    def __deepcopy__(self, memo: dict) -> LinkPolicy:
        return self  # copies of a layer share their link

    def __getstate__(self) -> dict[str, Any]:
        bound = {"state", "_codecs_by_epoch", "_warned"}
        return {k: v for k, v in self.__dict__.items() if k not in bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            state, state=LinkState(), _codecs_by_epoch={}, _warned=False
        )


def check_link(link: Any) -> None:
    """Raises TypeError for an object that cannot be a link."""
    if link is not None and not isinstance(link, LinkPolicy):
        raise TypeError(
            "link must be a LinkPolicy, such as pdc.Sylvie(), pdc.VARCO(epochs) or "
            f"pdc.LinkPolicy('bf16'), or None for the exact one, got {link!r}; links by "
            "relation are for a HeteroData"
        )


def settings_of(link: LinkPolicy | None) -> dict[str, str]:
    """Returns the settings of a link by name, which must be the same on all ranks."""
    return {"link": "exact"} if link is None else link.settings
