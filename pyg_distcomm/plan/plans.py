"""Holds plans: the cost of one choice, and a ranked list of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.comm.mesh import ALGORITHMS, Grid, named_grid, resolve_grid
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.machine import Machine

MOST_LINES = 24  # plans that the table shows
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Plan:
    """Describes one way to train, and the costs of an epoch, from the third on.

    Earlier epochs send more: features that do not change, until their products are kept.

    Args:
        grid: (r, s, p).
        orders: of each layer "kept" (A X is kept), "first" ((A X) W), "last" (A (X W)),
            or "halo" (rows are brought to their edges).
        codec: how rows are written on the wire, and by how many epochs they are late.
        bytes_by_rank: received in an epoch, all told; one mean for a law of degrees.
        exchange_bytes: of them in products, on the busiest rank.
        sum_bytes: of them in all-reduces, by what is summed; the same on every rank.
        total_bytes: over all ranks.
        messages: sent in products by the busiest rank.
        seconds: predicted for an epoch.
        memory: bytes on the fullest rank in an epoch, beside the interpreter's; not those
            that cutting the graph and planning its exchanges take before.
        reason: why it is refused; None for one that can be run.
        exact: whether it trains as one process does; if not, rows are rounded, left out or
            late.
        sized: whether bytes are exact; if not, exchanges may be skipped, and they are
            the most there can be.
        missing: what the model sends that bytes leave out, in words; else empty.
        link: what gives this codec to `pdc.partition`; None for the exact link.
    """

    grid: Grid
    orders: tuple[str, ...] = ()
    codec: str = "plain"
    bytes_by_rank: tuple[int, ...] = (0,)
    exchange_bytes: int = 0
    sum_bytes: dict[str, int] = field(default_factory=dict)
    total_bytes: int = 0
    messages: int = 0
    seconds: float = 0.0
    memory: int = 0
    reason: str | None = None
    exact: bool = True
    sized: bool = True
    link: LinkPolicy | None = None
    missing: str = ""

    @property
    def size(self) -> int:
        """The number of ranks."""
        r, s, p = self.grid
        return r * s * p

    @property
    def bytes(self) -> int:
        """Bytes that the busiest rank receives in an epoch, sums of gradients too."""
        return max(self.bytes_by_rank)

    @property
    def algorithm(self) -> str:
        """The name of the grid, as `init` knows it, or "grid"."""
        return name_of(self.grid)

    @property
    def sides(self) -> str:
        """The grid in short, as 4x2x1."""
        return "x".join(map(str, self.grid))

    def __str__(self) -> str:
        sides = self.sides.replace("x", " x ")
        text = f"{self.algorithm} ({sides}), {', '.join(self.orders)}"
        if self.codec != "plain":
            text += f", {self.codec}{'' if self.exact else ' (not exact)'}"
        most = "at least " if self.missing else "" if self.sized else "at most "
        return (
            f"{text}: {most}{show_bytes(self.bytes)} per rank, "
            f"{show_bytes(self.total_bytes)} in all, {self.seconds:.4g} s per epoch, "
            f"{show_bytes(self.memory)} of memory"
        )


@dataclass(frozen=True)
class Rejection:
    """An algorithm that has no grid of this number of ranks, with the reason."""

    algorithm: str
    reason: str


@dataclass(frozen=True, eq=False)
class Plans(Sequence[Plan]):
    """Lists all plans that can be run, the fastest first; `print` shows them as a table.

    Args:
        ranked: what can be run.
        refused: what cannot, each with its reason.
        rejections: names of algorithms without a grid.
        graph: the graph in words.
        machine: the figures for seconds.
        partition: who owns which node, on the fastest grid where that depends on it
            ("grid"); None for a law of degrees.
    """

    ranked: tuple[Plan, ...]
    refused: tuple[Plan, ...]
    rejections: tuple[Rejection, ...]
    graph: str
    machine: Machine
    partition: Partition | None = None

    @property
    def best(self) -> Plan:
        """The exact plan predicted to be the fastest of those that can be run.

        Those that are not exact are ranked among the others: `plans[0]` may be one.

        Raises:
            ValueError: if there is none; the message has the reasons.
        """
        for plan in self.ranked:
            if plan.exact:
                return plan
        reasons = [f"{name_of(p.grid)} {p.grid}: {p.reason}" for p in self.refused]
        reasons += [f"{m.algorithm}: {m.reason}" for m in self.rejections]
        raise ValueError("no plan can be run:\n" + "\n".join(reasons[:MOST_LINES]))

    @overload
    def __getitem__(self, key: int) -> Plan: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, key: int | slice) -> Plan | tuple[Plan, ...]:
        return self.ranked[key]

    def __len__(self) -> int:
        return len(self.ranked)

    def of(self, grid: Grid, **choice: Any) -> Plan:
        """Returns the first plan of a grid, refused or not, with these attributes."""
        for plan in (*self.ranked, *self.refused):
            has = all(getattr(plan, name) == value for name, value in choice.items())
            if plan.grid == tuple(grid) and has:
                return plan
        raise ValueError(f"no plan has grid {tuple(grid)} and {choice}")

    def __str__(self) -> str:
        shown = self.ranked[:MOST_LINES]
        parts = [f"graph     {self.graph}", str(self.machine), "", _table(shown)]
        if len(self.ranked) > len(shown):
            left = len(self.ranked) - len(shown)
            parts.append(f"{left} more are predicted to be slower")
        parts += _legend(shown, self.machine) + _useless_codecs(self.ranked)
        lines = [f"{p.algorithm} {p.grid}, {p.codec}: {p.reason}" for p in self.refused]
        lines += [f"{m.algorithm}: {m.reason}" for m in self.rejections]
        if lines:
            parts += ["", "refused:", *(f"  {line}" for line in lines[:MOST_LINES])]
        if len(lines) > MOST_LINES:
            parts.append(f"  ... {len(lines) - MOST_LINES} more")
        return "\n".join(parts)

    def __repr__(self) -> str:
        best = next((p for p in self.ranked if p.exact), "none can be run")
        return f"Plans({len(self.ranked)} for {self.graph}; best: {best})"


def _table(plans: Sequence[Plan]) -> str:
    head = ("algorithm", "grid", "orders", "codec", "bytes, most", "bytes, all")
    head += ("of products", "messages", "seconds", "memory")  # type: ignore[assignment]
    rows = [
        (
            plan.algorithm,
            plan.sides,
            " ".join(plan.orders),
            f"{plan.codec}{'' if plan.exact else ' *'}",
            *(
                f"{_bound_sign(plan)}{show_bytes(count)}"
                for count in (plan.bytes, plan.total_bytes, plan.exchange_bytes)
            ),
            plan.messages,
            f"{plan.seconds:.4g}",
            show_bytes(plan.memory),
        )
        for plan in plans
    ]
    return format_table(head, rows) if rows else "no plan can be run"


def _bound_sign(plan: Plan) -> str:
    return ">= " if plan.missing else "" if plan.sized else "<= "


def _useless_codecs(ranked: Sequence[Plan]) -> list[str]:
    """Names the codecs whose plans exchange no fewer bytes than a plan without a codec."""
    least: dict[str, float] = {}
    for plan in ranked:
        best = least.get(plan.codec, math.inf)
        least[plan.codec] = min(best, plan.exchange_bytes)
    plain = least.pop("plain", 0.0)
    return [
        f"{name}: no plan sends less than the leanest without it: products of constant inputs "
        "are kept, and the last exchange is exact; take three layers, or exact_last=False"
        for name, count in least.items()
        if 0 < plain <= count
    ]


def _legend(plans: Sequence[Plan], machine: Machine) -> list[str]:
    """Explains the signs of the table."""
    notes = []
    if any(not plan.exact for plan in plans):
        notes.append("* not exact (rounded, left out or late): only when asked for")
    if any(not (plan.sized or plan.missing) for plan in plans):
        notes.append("<= exchanges may be skipped: the most there can be")
    missing = dict.fromkeys(plan.missing for plan in plans if plan.missing)
    notes += [f">= bytes and seconds leave out {words}" for words in missing]
    links = [plan.link for plan in plans if isinstance(plan.link, LinkPolicy)]
    if any(repr(link.codec) not in machine.codes for link in links):
        notes.append(
            f"coding is assumed to go through {machine.code / 1e9:.3g} GB of rows per second, "
            "where calibrate has not measured it"
        )
    return notes


def show_bytes(count: float) -> str:
    """Formats a number of bytes with a unit."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} {UNITS[unit]}" if unit == 0 else f"{value:.4g} {UNITS[unit]}"


def name_of(grid: Grid) -> str:
    """Returns the name `resolve_grid` has for a grid, or "grid"."""
    r, s, p = grid
    if s == p == 1:
        return "1d"
    if r == s == 1:
        return "feature"
    for name in ("2d", "3d"):
        if named_grid(r * s * p, name) == grid:
            return name
    return "1.5d" if p == 1 else "grid"


def rejections(size: int, wanted: str | None) -> tuple[Rejection, ...]:
    """Lists the algorithms that have no grid of `size` ranks."""
    found = []
    for name in ALGORITHMS if wanted is None else (wanted,):
        try:
            resolve_grid(size, name)
        except ValueError as error:
            found.append(Rejection(name, str(error)))
    return tuple(found)
