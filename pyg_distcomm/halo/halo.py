"""Plans the exchange of ghost rows between ranks, once per graph, and runs it exactly.

A `Link` is an exchange with its transpose; `exchange` applies it under autograd.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.ledger import Price, balanced_split, exchange_price
from pyg_distcomm.comm.rows import narrowed
from pyg_distcomm.kernels.memory import MemoryCap

# The exchanges of a product. "ghost": rows over the row axis; "out": partial sums over the col
# axis. For nonzeros that are handed to another rank ([Note: rows or sums]) "sums": partial sums
# over the row axis; "far": rows over the col axis. Others are numbered from len(NAMES).
NAMES = ("ghost", "out", "sums", "far")
DEGREES = 1 << 20  # degrees, which layers may cache; from here on rows of edges
CHUNK_ROWS = 8192  # the least rows of a chunk: smaller ones cost more than they save
MAX_CHUNKS = 4


class Link(abc.ABC):
    """Moves owned rows to the ranks that need them, and sums back (abstract).

    With `H` the 0/1 matrix that selects the ghost rows of every rank:

        begin(x)            ghost = H x
        begin_transpose(g)  x += H^T g

    Every `begin` must be followed by exactly one call of the function it returns. A link is
    silent if nothing travels on any rank of its axis.
    """

    silent: bool

    @property
    @abc.abstractmethod
    def num_ghosts(self) -> int:
        """The number of ghost rows h of this rank."""

    @property
    def is_exact(self) -> bool:
        """Whether rows arrive unchanged and in the same call."""
        return True

    @property
    def parts(self) -> Sequence[Link]:
        """The links that this one consists of, in the order of their ghosts."""
        return (self,)

    @abc.abstractmethod
    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts to send own rows `[n, f]`; the returned call gives ghosts `[h, f]`.

        Ghosts are written to the tensor `into` of that shape, if one is given.
        """

    @abc.abstractmethod
    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        """Starts to send ghost sums `[h, f]`; the returned call adds to own rows `[n, f]`."""

    @abc.abstractmethod
    def price(self, width: int, sums: bool = False) -> Price:
        """Returns the price of one `begin`, or `begin_transpose`, at `width` features."""

    def to(self, device: torch.device) -> Any:
        """Returns the same link, a dataclass, with its indices on another device."""
        held = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        there = tree_map(
            lambda v: v.to(device) if isinstance(v, (Tensor, Link)) else v, held
        )
        return replace(self, **there)  # type: ignore[type-var]


def exchange(x: Tensor, link: Link) -> Tensor:
    """Returns the ghosts of own rows `x`; the gradient sends sums back to them."""
    return _Exchange.apply(x, link)


def exchange_transpose(g: Tensor, out: Tensor, link: Link) -> Tensor:
    """Returns `out` plus the other ranks' sums for own rows."""
    return _ExchangeTranspose.apply(g, out, link)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link, ctx.shape = link, x.shape
        return link.begin(x)()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        _check_twice(ctx.link)
        return exchange_transpose(g, g.new_zeros(ctx.shape), ctx.link), None


class _ExchangeTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, out: Tensor, link: Link) -> Tensor:
        ctx.link = link
        arrive = link.begin_transpose(g.contiguous())
        return arrive(out.clone())

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, None]:
        _check_twice(ctx.link)
        return exchange(x.contiguous(), ctx.link), x, None


def _check_twice(link: Link) -> None:
    """Raises for a double backward pass over a coded or late exchange."""
    if torch.is_grad_enabled() and not link.is_exact:
        raise RuntimeError(
            "differentiate twice over exact exchanges only: create_graph=True reached "
            f"{link}, which is coded or late; use link='exact' for this layer"
        )


@dataclass(frozen=True, eq=False)
class Direction:
    """Describes one direction of a halo: rows to the ranks that need them, or sums back.

    Shapes: index, gid [sum(counts)] rows that are sent; from_gid [sum(from_counts)] rows
    that arrive. Without an index all rows are sent, in order. For codecs that are `ranked`,
    degree and from_degree are the in-degrees of these rows' nodes.
    """

    axis: Axis
    index: Tensor | None
    gid: Tensor
    counts: tuple[int, ...]
    from_gid: Tensor
    from_counts: tuple[int, ...]
    most: int
    degree: Tensor | None = None
    from_degree: Tensor | None = None

    @cached_property
    def plans(self) -> Any:
        """Returns what is planned for the messages of an exchange, while it exists."""
        return weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Halo(Link):
    """Exchanges rows between the ranks of one axis, exactly.

    Shapes (this rank; n own rows, h ghosts, t rows to send):
        send_slot    [t]   own rows to send, in order of their destination
        send_counts  rows sent to each rank of the axis (none to itself)
        recv_counts  rows received from each rank; their sum is h
        most         the most rows that any rank sends to any other
        send_gid     [t]   ids of the rows sent
        ghost_gid    [h]   ids of the ghosts, in order

    Price: h f words forward, t f words in the transpose.
    Differs from [Tripathy20] Sec. 4.1 in moving only the rows that nonzeros need
    ([Mukhopadhyay24]), unless it is planned for all rows (`dense`).
    """

    axis: Axis
    send_slot: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    num_local: int
    silent: bool
    dense: bool = False
    most: int | None = None
    send_gid: Tensor | None = None
    ghost_gid: Tensor | None = None

    @staticmethod
    def build(
        want_gid: Tensor,
        want_counts: list[int],
        have_gid: Tensor,
        axis: Axis,
        dense: bool = False,
    ) -> Halo:
        """Plans an exchange; collective over the axis.

        Args:
            want_gid: ids of the ghost rows, grouped by their owner.
            want_counts: how many of them each rank of the axis owns.
            have_gid: ids of own rows, in their order in memory.
            axis: the ranks that exchange.
            dense: moves whole blocks, as sparsity-oblivious products do; `want_gid` then
                holds all rows of all other ranks, in order.

        Raises:
            ValueError: if another rank requests a row that this rank does not own.
        """
        send_counts = collectives.exchange_counts(want_counts, axis)
        last = int(want_gid.max()) if len(want_gid) else 0
        told = [max(want_counts, default=0), last]
        gathered = collectives.all_gather_counts(told, axis)
        sent = narrowed(want_gid, max(row[1] for row in gathered) + 1)
        counts = want_counts, send_counts
        asked = collectives.all_to_all(sent, *counts, axis, "plan").wait().long()
        most = max(row[0] for row in gathered)
        planned = want_gid, want_counts, asked, send_counts, have_gid, axis, most
        return Halo.of_requests(*planned, dense=dense)

    @staticmethod
    def of_requests(
        want_gid: Tensor,
        want_counts: Sequence[int],
        asked: Tensor,
        send_counts: Sequence[int],
        have_gid: Tensor,
        axis: Axis,
        most: int,
        dense: bool = False,
    ) -> Halo:
        """Plans an exchange from requests that have been exchanged; sends nothing.

        Args:
            want_gid, want_counts, have_gid, axis, dense: as in `build`.
            asked: ids that other ranks request of this rank, in order of rank.
            send_counts: how many ids each rank requests.
            most: the most ids that any rank requests of any other.

        Raises:
            ValueError: if another rank requests a row that this rank does not own.
        """
        asked = asked if axis.size > 1 else asked[:0]
        return Halo(
            axis,
            _slots(asked, have_gid, axis),
            tuple(send_counts) if axis.size > 1 else (0,),
            tuple(want_counts),
            len(have_gid),
            silent=most == 0 and axis.observer is None,
            dense=dense,
            most=most,
            send_gid=asked,
            ghost_gid=want_gid,
        )

    @property
    def num_ghosts(self) -> int:
        return sum(self.recv_counts)

    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        self.tell("rows", x)
        if self.silent or self.axis.observer is not None:
            empty = x.new_empty((0, *x.shape[1:])) if into is None else into
            return lambda: empty
        flat = None if into is None else into.flatten(1)
        counts, axis, most = self.recv_counts, self.axis, self.most
        if self.dense:
            rows: Any = collectives.copies(x.flatten(1), counts, axis)
            op, sent = "all_gather", None
        else:
            rows = kernels.gather_rows(x.flatten(1), self.send_slot)
            op, sent = "halo", self.send_counts
        pending = collectives.all_to_all(rows, sent, counts, axis, op, most, into=flat)
        return lambda: (
            pending.wait().view(-1, *x.shape[1:]) if x.dim() > 2 else pending.wait()
        )

    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        self.tell("back", g)
        if self.silent or self.axis.observer is not None:
            return lambda out: out
        op, block = "halo_reduce", None
        if self.dense:
            op, counts = "reduce_scatter", (self.recv_counts, self.num_local)
            block = collectives.reduce_scatter_begin(g.flatten(1), *counts, self.axis)
        pending = block or collectives.all_to_all(
            g.flatten(1), self.recv_counts, self.send_counts, self.axis, op, self.most
        )

        def arrive(out: Tensor) -> Tensor:
            flat, sums = out.flatten(1), pending.wait().to(out.dtype)
            if block is None:
                kernels.scatter_add_rows(flat, self.send_slot, sums)
            else:
                flat.add_(sums)
            return out

        return arrive

    def tell(self, how: str, x: Tensor) -> None:
        """Tells a dry run that rows would travel; see `Axis.observer`."""
        if self.axis.observer is not None and not self.silent:
            self.axis.observer(how, x, self.axis)

    def degrees(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the in-degrees of rows that are sent, and of ghosts; collective.

        Args:
            own: the in-degrees of own rows `[n]`, int64; counted as "plan" in the ledger.
        """
        sent = own[self.send_slot]
        counts = self.send_counts, self.recv_counts, self.axis
        return sent, collectives.all_to_all(sent, *counts, "plan").wait()

    @cached_property
    def directions(self) -> tuple[Direction, Direction]:
        """The direction of rows to the ranks that need them, and that of sums back."""
        assert self.send_gid is not None
        assert self.ghost_gid is not None
        rows = self.send_gid, self.send_counts
        ghosts = self.ghost_gid, self.recv_counts
        most = self.most or 0
        return (
            Direction(self.axis, self.send_slot, *rows, *ghosts, most),
            Direction(self.axis, None, *ghosts, *rows, most),
        )

    def price(self, width: int, sums: bool = False) -> Price:
        counts = self.send_counts, self.recv_counts
        counts = counts[::-1] if sums else counts
        return exchange_price(*counts, self.axis.rank, 0 if self.silent else width)

    def __repr__(self) -> str:
        return (
            f"Halo({self.axis.name} {self.axis.rank}/{self.axis.size}, {self.num_local} "
            f"rows, sends {sum(self.send_counts)}, receives {self.num_ghosts})"
        )


def _slots(asked: Tensor, have_gid: Tensor, axis: Axis) -> Tensor:
    """Returns the local positions of rows with the given ids."""
    if not len(asked):
        return asked
    ascends = bool((have_gid.diff() > 0).all())
    order = None if ascends else torch.argsort(have_gid)
    have_gid = have_gid if order is None else have_gid[order]
    place = torch.searchsorted(have_gid, asked)
    known = torch.cat([have_gid, have_gid.new_full((1,), -1)])[place] == asked
    if not known.all():
        raise ValueError(
            f"rank {axis.rank} of axis {axis.name} was asked for row "
            f"{int(asked[~known][0])}, which it does not hold: ranks planned from "
            "different partitions; give all of them the same graph and owners"
        )
    return place if order is None else order[place]


@dataclass(frozen=True, eq=False)
class ChunkedHalo(Link):
    """Splits an exchange into chunks, so that one travels while the next is computed.

    Its ghosts are those of its chunks, one after another.

    Price: the words of the whole, and each chunk's messages.
    """

    chunks: tuple[Link, ...]
    silent: bool = False

    @property
    def parts(self) -> Sequence[Link]:
        return self.chunks

    @property
    def is_exact(self) -> bool:
        return all(chunk.is_exact for chunk in self.chunks)

    @property
    def num_ghosts(self) -> int:
        return sum(chunk.num_ghosts for chunk in self.chunks)

    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        if into is None:
            into = x.new_empty((self.num_ghosts, *x.shape[1:]))
        pairs = zip(self.chunks, into.split(self._sizes), strict=True)
        arrivals = [chunk.begin(x, part) for chunk, part in pairs]

        def arrive() -> Tensor:
            for arrive_chunk in arrivals:
                arrive_chunk()
            return into

        return arrive

    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        pairs = zip(self.chunks, g.split(self._sizes), strict=True)
        arrivals = [chunk.begin_transpose(part) for chunk, part in pairs]

        def arrive(out: Tensor) -> Tensor:
            for arrive_chunk in arrivals:
                arrive_chunk(out)
            return out

        return arrive

    @property
    def _sizes(self) -> list[int]:
        return [chunk.num_ghosts for chunk in self.chunks]

    def price(self, width: int, sums: bool = False) -> Price:
        return sum((chunk.price(width, sums) for chunk in self.chunks), Price())

    def __repr__(self) -> str:
        return f"ChunkedHalo({', '.join(map(repr, self.chunks))})"


@dataclass(frozen=True, eq=False)
class StagedHalo(Link):
    """Splits an exact exchange into consecutive stages, each within a memory cap.

    Each stage moves an equal share of the rows between each two ranks. Ghosts that exceed a
    stage arrive in a memory-mapped file.

    Price: the words of the whole, and the messages of each stage. The number of stages is
    computed for elements of 8 bytes.
    """

    halo: Halo
    cap: MemoryCap

    @property
    def silent(self) -> bool:  # type: ignore[override]
        return self.halo.silent

    @property
    def num_ghosts(self) -> int:
        return self.halo.num_ghosts

    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        if into is None:
            shape = self.num_ghosts, *x.shape[1:]
            into = self.cap.empty(shape, x.dtype, x.device)
        ghosts = into
        for part, places in self._stages(x.shape[1:].numel()):
            arrived = part.begin(x)()
            for place, rows in zip(
                places, arrived.split(part.recv_counts), strict=True
            ):
                ghosts[place] = rows
        return lambda: ghosts

    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        def arrive(out: Tensor) -> Tensor:
            for part, places in self._stages(g.shape[1:].numel()):
                part.begin_transpose(torch.cat([g[place] for place in places]))(out)
            return out

        return arrive

    def _stages(self, width: int) -> Iterator[tuple[Halo, list[slice]]]:
        """Yields the exchange of each stage, and the places of its ghosts, rank by rank.

        All ranks take the same number of stages, computed from `Halo.most`.
        """
        halo = self.halo
        most = halo.most or 0
        peers = max(halo.axis.size - 1, 1)
        count = max(-(-most * peers * width * 8 // self.cap.stage), 1)
        count = min(count, max(most, 1))
        for k in range(count):
            sent = _shares(halo.send_counts, count, k)
            arrived = _shares(halo.recv_counts, count, k)
            slots = [halo.send_slot[place] for place in sent]
            part = replace(
                halo,
                send_slot=torch.cat(slots),
                send_counts=tuple(len(slot) for slot in slots),
                recv_counts=tuple(place.stop - place.start for place in arrived),
                most=balanced_split(most, count)[k],
                send_gid=None,
                ghost_gid=None,
            )
            yield part, arrived

    def price(self, width: int, sums: bool = False) -> Price:
        parts = [part.price(width, sums) for part, _ in self._stages(width)]
        return sum(parts, Price())


def _shares(counts: Sequence[int], parts: int, k: int) -> list[slice]:
    """Returns part k of each block of rows, for consecutive blocks of these lengths."""
    out, first = [], 0
    for count in counts:
        sizes = balanced_split(count, parts)
        begin = first + sum(sizes[:k])
        out.append(slice(begin, begin + sizes[k]))
        first += count
    return out


def plan_link(
    want_gid: Tensor,
    want_counts: list[int],
    have_gid: Tensor,
    axis: Axis,
    dense: bool = False,
) -> tuple[Link, Tensor]:
    """Plans a halo, in chunks if it is large; returns it and the ghosts' ids in order.

    Collective over the axis, whose ranks take the same number of chunks. Arguments are
    those of `Halo.build`.
    """
    most = max(row[0] for row in collectives.all_gather_counts([len(want_gid)], axis))
    count = 1 if dense else min(max(most // CHUNK_ROWS, 1), MAX_CHUNKS)
    if count == 1:
        halo = Halo.build(want_gid, want_counts, have_gid, axis, dense)
        return halo, want_gid
    blocks = want_gid.split(want_counts)
    cut = [block.split(balanced_split(len(block), count)) for block in blocks]
    chunks, order = [], []
    for parts in zip(*cut, strict=True):
        gid = torch.cat(parts)
        chunks.append(Halo.build(gid, [len(p) for p in parts], have_gid, axis))
        order.append(gid)
    return ChunkedHalo(tuple(chunks)), torch.cat(order)
