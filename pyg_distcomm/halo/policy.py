"""LinkPolicy: what a user says of a link, and where training with it stands."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo.adaptive import Adaptive, LossTrend, bits_of, with_bits
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs.quantise import Plain
from pyg_distcomm.halo.cost_model import Forecast
from pyg_distcomm.halo.layer_exchange import LayerExchange
from pyg_distcomm.halo.link_cost import LinkPrice
from pyg_distcomm.halo.link_state import LinkState
from pyg_distcomm.halo.schedule import Budget, Plateau, RateScheduler, Schedule
from pyg_distcomm.halo.staleness import Timing
from pyg_distcomm.halo.state_io import mark, read_solved, solved
from pyg_distcomm.halo.validation import (
    EVALUATES,
    PROBLEMS,
    check_state,
    check_together,
)


class LinkPolicy:
    """How rows travel between ranks, and when they arrive: halo x codec x timing.

    Given to `pdc.partition(data, mesh, link=...)`, to `data.edge_index.with_link(...)`, to
    one layer or to `convert`, it holds for all products and exchanges of layers. Own rows
    never travel, fiber steps are exact and now, and one rank ignores it. Call
    `link.step()` once an epoch; `print(link)` tells what was used, and what it costs.

    Exact are: evaluation, unless `exact_eval=False`; the first epoch, which is synchronous,
    and from then on its last exchange, unless `exact_last=False`; the product of inputs
    that do not change, where it is kept (see `DistEdgeIndex.with_ordering`).

    Price: `price()`, bytes of an epoch, forward and backward: what the ledger counts.
    Ranks agree once in a training pass, on one byte, and in each call of an evaluation or
    of a layer that is new: whether one evaluates. More would hold up what is late.
    Memory: the exact link's, `price().kept` (see `StaleBuffer`), and at most the messages of
    one exchange; those of a few bits, and now, take less than the exact link alone.
    Differs from [Cervino24], [Zhang23], [Wan22a] in that its parts are chosen apart, on any
    grid, and in exact evaluation.

    Args:
        codec: how rows are written.
        schedule: the compression ratio of each epoch, for a codec that has a rate.
        late: by how many epochs rows are late.
        late_gradients: by how many gradients are; None is as late as rows.
        sync_every, smooth: when epochs are synchronous, and means of rows; see `Timing`.
        gradient_codec: how gradients are written, if not as the rows they answer. It
            follows the schedule if it has a rate.
        exact_last: whether the last call is exact, of layers that make more than one, and
            the first epoch, which also is under a `Budget`.
        exact_eval: whether evaluation is; if not, it is coded, never late, and exact where
            `exact_last` makes training so, in all calls of that layer.
        adaptive: bits and timing by how the loss falls; True is `Adaptive()`.
        seed: of random columns, rows and rounding.

    Raises:
        ValueError: for what does not go together, with the reason.
    """

    def __init__(
        self,
        codec: Codec,
        schedule: Schedule | None = None,
        *,
        late: int = 0,
        late_gradients: int | None = None,
        sync_every: int | None = None,
        smooth: float | None = None,
        gradient_codec: Codec | None = None,
        exact_last: bool = True,
        exact_eval: bool = True,
        adaptive: bool | Adaptive = False,
        seed: int = 0,
    ) -> None:
        for name, given in (("codec", codec), ("gradient_codec", gradient_codec)):
            if not isinstance(given, Codec) and (given is not None or name == "codec"):
                raise TypeError(f"{name} must be a Codec, as Plain(), got {given!r}")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise TypeError(
                f"schedule must be a Schedule, as Fixed(2), got {schedule!r}"
            )
        self.codec, self.gradient_codec = codec, gradient_codec
        self.timing = Timing(late, late_gradients, sync_every, smooth)
        self.exact_last, self.exact_eval, self.seed = exact_last, exact_eval, seed
        self.pace = None if schedule is None else RateScheduler(schedule)
        self._asked = schedule  # a budget is solved for later
        rule = Adaptive() if adaptive is True else adaptive or None
        self.trend = None if rule is None else LossTrend(rule, bits_of(codec))
        if schedule is not None:
            codec.with_rate(1.0)  # raises for a codec without a rate
        switches = self.timing.switches or self.trend is not None
        check_together((codec, gradient_codec), switches, exact_eval)
        self.epoch = 0
        self.run = LinkState()
        self._written: dict[int, tuple[Codec, Codec | None]] = {}

    # what layers ask

    @property
    def is_exact(self) -> bool:
        """Whether it is the exact link: rows as they are, and now."""
        plain = self.codec == Plain() and self.gradient_codec in (None, Plain())
        return plain and not self.timing.is_late

    def begin(
        self,
        layer: Any,
        nodes: Rows,
        training: bool,
        stage: Callable[[], int] | None = None,
        name: str = "",
    ) -> LayerExchange | None:
        """Returns one call of a layer, or None if it is exact; collective.

        Args:
            layer: whose call it is.
            nodes, training: which nodes are where, and whether the layer trains.
            stage: tells whether its input is kept; see `ProductCache.stage`.
            name: what it is called, if not as its class.
        """
        mesh = nodes.mesh
        if mesh.size == 1 or self.is_exact:
            return None
        self.run.bind(nodes)
        said = self.run.agreed(layer, training and torch.is_grad_enabled())
        if said == EVALUATES:
            place = self.run.place_of(layer)
            if self.exact_eval or (self.run.last or (-1,))[0] == place:
                return None
            return self._call(place, 0, keeps=False)
        place = self.run.place(layer, name)
        if said in PROBLEMS:
            raise ValueError(f"{self.run.where(place)} {PROBLEMS[said]}")
        self.run.train(place, stage, self.epoch)
        number = self.run.next_call(place)
        call = self._call(place, number, keeps=True)
        if (place, number) != self.run.last:
            return call
        # where a run goes on, it is noted once, so that it has its price
        return None if self.run.knows(place, number) else call.whole("the last one")

    def begin_parts(self, nodes: Rows) -> None:
        """Begins an epoch of a pipeline, on the ranks of all its stages; see `part`."""
        if nodes.mesh.size > 1 and not self.is_exact:
            self.run.begin_parts(nodes, self.epoch)

    def part(self, place: int, name: str, number: int, last: bool) -> LayerExchange:
        """Returns the call of a chunk of rows in training, of a link that is not exact.

        Args:
            place: of the site whose rows they are, among those of all stages.
            name: of its layer, in messages.
            number: which chunk.
            last: whether no site comes after it.
        """
        self.run.layers[place] = name
        self.run.made[place, number] = None
        call = self._call(place, number, keeps=True)
        return call.whole("the last one") if last and self.exact_last else call

    def _call(self, place: int, number: int, *, keeps: bool) -> LayerExchange:
        first = self._exact_first and self.epoch == 0 and keeps
        codecs = (Plain(), None) if first else self._at(self.epoch)
        fresh = not keeps or self.synchronous
        own = self.gradient_codec or self.codec
        remembers = self.codec.stateful, own.stateful
        here = {"place": place, "number": number, "epoch": self.epoch}
        how = {"codec": codecs[0], "gradient_codec": codecs[1], "fresh": fresh}
        facts: dict[str, Any] = {**here, **how, "keeps": keeps, "first": first}
        where = self.run.where(place)
        return LayerExchange(
            self.run, self.timing, self.seed, remembers, **facts, where=where
        )

    @property
    def synchronous(self) -> bool:
        """Whether this epoch waits for its own rows."""
        if self.epoch == 0 or self.timing.synchronous(self.epoch):
            return True
        return self.trend is not None and self.trend.synchronous

    def _at(self, epoch: int) -> tuple[Codec, Codec | None]:
        """Returns the codecs of rows and of gradients in an epoch."""
        if epoch not in self._written:
            found = self._made_for(epoch)
            if epoch != self.epoch:
                return found
            self._written[epoch] = found
        return self._written[epoch]

    def _made_for(self, epoch: int) -> tuple[Codec, Codec | None]:
        pace = self.pace
        if pace is None:
            return self._rated(None)
        if self._unsolved:
            return Plain(), None
        now = epoch == self.epoch or isinstance(pace.schedule, Plateau)
        return self._rated(pace.rate if now else pace.schedule.rate(epoch))

    def _rated(self, rate: float | None) -> tuple[Codec, Codec | None]:
        codec, own = self.codec, self.gradient_codec
        if self.trend is not None:
            codec = with_bits(codec, self.trend.bits)
        if rate is None:
            return codec, own
        if own is not None:
            with contextlib.suppress(ValueError):  # one without a rate stays as it is
                own = own.with_rate(rate)
        return codec.with_rate(rate), own

    def keep(self, layer: Any, nodes: Rows, trains: bool) -> None:
        """Remembers that a layer's product is made to be kept, exactly."""
        if nodes.mesh.size > 1:
            self.run.keep(layer, self.epoch if trains else None)

    def had_kept(self, layer: Any, trains: bool) -> bool:
        """Tells whether a layer's input had been seen where this run goes on."""
        place = self.run.place(layer) if trains else self.run.place_of(layer)
        return place in self.run.constant

    # what users ask

    @property
    def settings(self) -> dict[str, str]:
        """How it was made, and its epoch: what has to be the same on all ranks."""
        rule = None if self.trend is None else self.trend.rule
        made = {
            "codec": self.codec,
            "schedule": self._asked,
            "timing": self.timing,
            "gradient_codec": self.gradient_codec,
            "exact_last": self.exact_last,
            "exact_eval": self.exact_eval,
            "adaptive": rule,
            "seed": self.seed,
            "epoch": self.epoch,
        }
        told = {f"link.{name}": repr(value) for name, value in made.items()}
        told = {"link": type(self).__name__, **told}
        return {k: re.sub(r" at 0x[0-9a-f]+", "", v) for k, v in told.items()}

    def step(self, metric: float | Tensor | None = None) -> None:
        """Ends an epoch; on all ranks, after the optimizer's step.

        Args:
            metric: the loss, for `Plateau` schedules and `adaptive` links; rank 0's counts.

        Raises:
            ValueError: if one of these is given none.
        """
        value = None if metric is None else float(torch.as_tensor(metric).detach())
        axis = self.run.axis
        if self.trend is not None or self._goes_by_metric:
            value = value if axis is None else collectives.broadcast_object(value, axis)
            if value is None or not math.isfinite(value):
                raise ValueError(
                    f"this link goes by the loss: link.step(loss), got {value}"
                )
            if self.trend is not None:
                self.trend.look(value)
        self.run.settle(self.exact_last)
        if self.pace is not None:
            budget = self.pace.schedule
            used = self.run.active or self.run.in_parts
            if isinstance(budget, Budget) and used and axis is not None:
                self.pace.solve(self.forecast.bytes_of(axis, budget.ramp.epochs))
            if self._unsolved:
                self.pace.epoch += 1  # nothing travels
            else:
                self.pace.step(value)
        self.epoch += 1
        self.run.made, self.run.met, self.run.answered = {}, set(), set()
        reach = self.timing.staleness(False) + self.timing.staleness(True) + 1
        for epoch in [e for e in self._written if e < self.epoch - reach]:
            del self._written[epoch]

    @property
    def _unsolved(self) -> bool:
        """Whether there is a budget whose rates are not known yet: what travels is exact."""
        return self.pace is not None and isinstance(self.pace.schedule, Budget)

    @property
    def _exact_first(self) -> bool:
        return self.exact_last or isinstance(self._asked, Budget)

    @property
    def _goes_by_metric(self) -> bool:
        return self.pace is not None and isinstance(self.pace.schedule, Plateau)

    @property
    def forecast(self) -> Forecast:
        """What its exchanges will send, as far as is known now."""
        run = self.run
        return Forecast(
            run.records,
            run.inboxes,
            tuple(run.made) if self.epoch == 0 else run.active,
            {place: run.stage_of(place) for place in run.stages},
            run.kept_at,
            {place: first for place, (first, _) in run.began.items()},
            run.last,
            self.timing,
            self._exact_first,
            self._at,
            self._rated,
            self.epoch,
            self.trend is not None and self.trend.synchronous,
            1 if run.nodes is None or run.in_parts else run.nodes.mesh.size,
        )

    def price(self, epoch: int | None = None) -> LinkPrice:
        """Returns what an epoch of training costs this rank, by the exchanges seen so far.

        Args:
            epoch: which one; the one that is under way without it. Of a `Plateau` schedule
                and an `adaptive` link, what is in force now is taken for all to come.
        """
        return self.forecast.price(self.epoch if epoch is None else epoch)

    @property
    def held(self) -> int:
        """The bytes that are kept from epoch to epoch now."""
        return sum(inbox.held for inbox in self.run.inboxes.values())

    def drain(self) -> None:
        """Waits for what is under way."""
        for inbox in self.run.inboxes.values():
            inbox.drain()

    def reset(self) -> None:
        """Drops late and residual rows: the next exchanges are synchronous."""
        self.run.forget()

    def state_dict(self) -> dict[str, Any]:
        """Returns where training stands, with the late and residual rows of this rank.

        Between epochs, after `step()`: an epoch that is saved half done is run again, and
        sends twice, of which a warning tells.
        """
        run, nodes = self.run, self.run.nodes
        return {
            "epoch": self.epoch,
            "pace": None if self.pace is None else self.pace.state_dict(),
            "solved": None if self.pace is None else solved(self.pace, self._asked),
            "trend": None if self.trend is None else self.trend.state_dict(),
            "last": run.last,
            "active": run.active,
            "parts_of": run.parts_of,
            "mark": run.mark if nodes is None or run.restored else mark(nodes),
            "constant": run.constants(),
            "kept": run.kept(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes where another link stood, made with the same arguments.

        Late and residual rows are taken if each rank has its own, of the same partition,
        found out at the first use; otherwise all ranks drop them with a warning, and the
        next epoch is synchronous.

        Raises:
            ValueError: if something is missing; nothing has changed then.
        """
        self.check_state(state)
        nodes = self.run.nodes
        self.run, self._written = LinkState.read(state), {}
        if self.pace is not None:
            self.pace.load_state_dict(state["pace"])
            self.pace.schedule = read_solved(state["solved"], self._asked)
        if self.trend is not None:
            self.trend.load_state_dict(state["trend"])
        self.epoch = int(state["epoch"])
        self.run.nodes = nodes

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises a ValueError for a state that is not of such a link."""
        check_state(state, schedule=self.pace, adaptive=self.trend)

    def __str__(self) -> str:
        """Returns a table of the exchanges seen, with bytes foretold for this epoch."""
        parts = [f"{self!r}"]
        if self.pace is not None:
            parts.append(f"{self.pace}")
        if self.run.records:
            parts.append(f"{self.price()}")
        return "\n".join(parts)

    def __repr__(self) -> str:
        said = [f"{self.codec}"]
        if self.gradient_codec is not None:
            said.append(f"gradient_codec={self.gradient_codec}")
        if self.timing.is_late:
            said.append(f"{self.timing}")
        options = ("exact_last", "exact_eval")
        said += [f"{name}=False" for name in options if not getattr(self, name)]
        return f"LinkPolicy({', '.join(said)})"

    def __deepcopy__(self, memo: dict) -> LinkPolicy:
        return self  # copies of a layer share their link

    def __getstate__(self) -> dict[str, Any]:
        known = {"run", "_written"}
        return {k: v for k, v in self.__dict__.items() if k not in known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, run=LinkState(), _written={})
