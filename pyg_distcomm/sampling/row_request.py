"""An errand: node ids to the ranks that have their rows, and what they answer back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.price import Price
from pyg_distcomm.kernels.minibatch import HopDraw, Relation, UnweightedNode

_NAMED, _TIMED, _FLOAT = 1, 2, 4  # what stands beside the ids of a message


@dataclass(frozen=True, eq=False)
class RowQuery:
    """Nodes whose in-edges in one relation are wanted: a segment of a message.

    Shapes: node [m] gids; name, limit [m] or None, as in `HopDraw`.
    """

    relation: int
    node: Tensor
    name: Tensor | None = None
    limit: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RowReply:
    """In-edges that came back, as rows in the order in which they arrived.

    Shapes: offset [m + 1]; pair [2 t], a source and an edge id each; columns [t] each;
    slot [m], the row of each node in the order of asking.
    """

    offset: Tensor
    pair: Tensor
    columns: tuple[Tensor, ...]
    slot: Tensor


def errand_price(
    asked: int, asked_by_others: int, drawn: int, id_words: int = 1, columns: int = 0
) -> Price:
    """Prices what one errand brings this rank, in words of 4 bytes (8 if ids need them).

        received = id_words asked_by_others + asked + (2 + columns) drawn

    A node asked for is one word, and one more for its tree, two for a time; each is
    answered by a count, and a source and an id for each of its in-edges `drawn`. Nodes
    whose rows lie on this rank count nowhere.
    """
    return Price(words=id_words * asked_by_others + asked + (2 + columns) * drawn)


def counts_price(segments: int, ranks: int) -> Price:
    """Prices the counts of one errand over an axis of `ranks`, in words of 8 bytes.

        received = (segments + 2) (ranks - 1)

    How many nodes come in each segment and what stands beside them, and how long an
    answer is.
    """
    return Price(words=(segments + 2) * (ranks - 1))


class RowRequest:
    """One round over an axis: ids went out when it was made, `reply` brings answers.

    All ranks of the axis give as many segments, for the same relations in the same
    order. Price: see `errand_price` and `counts_price`.

    Args:
        axis: the ranks that ask each other.
        wishes: what this rank wants; a segment may be empty.
        peers: for each wish, which rank of the axis has each node's row.
        word: int32, or int64 where ids need it: the type of all that travels.
    """

    def __init__(
        self,
        axis: Axis,
        wishes: Sequence[RowQuery],
        peers: Sequence[Tensor],
        word: torch.dtype,
    ) -> None:
        self._axis, self._word = axis, word
        sizes = torch.tensor([w.node.numel() for w in wishes], dtype=torch.int64)
        self._first = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        peer = torch.cat([torch.empty(0).long(), *peers])
        segments = len(wishes)
        segment = torch.repeat_interleave(torch.arange(segments), sizes)
        _, _, self._order = kernels.coo_to_csr(peer, peer, axis.size)
        each = torch.bincount(peer * segments + segment, minlength=axis.size * segments)
        self._counts = each.view(axis.size, segments)
        flags = _flags(wishes)
        table = torch.cat([self._counts, torch.full((axis.size, 1), flags)], 1)
        ones = [1] * axis.size
        theirs = collectives.all_to_all(table, ones, ones, axis, "plan", 1).wait()
        message = _packed(wishes, flags, word).index_select(0, self._order)
        sent = self._counts.sum(1) * message.size(1)
        widths = torch.tensor([_width(int(row[-1]), word) for row in theirs])
        coming = theirs[:, :-1].sum(1) * widths
        flat = message.view(-1)
        got = collectives.all_to_all(
            flat, sent.tolist(), coming.tolist(), axis, "frontier"
        )
        parts = got.wait().split(coming.tolist())
        kinds = [w.relation for w in wishes]
        self.received = [
            _unpacked(part, row[:-1].tolist(), int(row[-1]), kinds)
            for part, row in zip(parts, theirs, strict=True)
        ]

    @property
    def sent(self) -> Tensor:
        """How many nodes of each segment were asked of each rank [ranks, segments]."""
        return self._counts

    @property
    def first(self) -> list[int]:
        """Where each segment's nodes begin in the order of asking, and where all end."""
        found: list[int] = self._first.tolist()
        return found

    @property
    def asked(self) -> list[Tensor]:
        """The places, in the order of asking, of the nodes asked of each rank."""
        return list(self._order.split(self._counts.sum(1).tolist()))

    def exchange(self, messages: Sequence[Tensor], op: str = "samples") -> list[Tensor]:
        """Sends a message of words to each rank of the axis; returns those for this one."""
        return self.arrived(messages, op)[0]

    def arrived(
        self, messages: Sequence[Tensor], op: str = "samples"
    ) -> tuple[list[Tensor], Tensor]:
        """Does as `exchange`; returns also all that came from others, in rank order."""
        rank = self._axis.rank
        coming = collectives.exchange_counts([len(m) for m in messages], self._axis)
        own, coming[rank] = messages[rank], 0  # it stays where it is
        away = [own[:0] if i == rank else m for i, m in enumerate(messages)]
        far = collectives.all_to_all_parts(away, coming, self._axis, op).wait()
        found = list(far.split(coming))
        found[rank] = own
        return found, far

    def reply(
        self, messages: Sequence[Tensor], columns: Sequence[torch.dtype] = ()
    ) -> RowReply:
        """Answers every rank by a message from `answer`; returns what they answered.

        Args:
            messages: for each rank of the axis.
            columns: types of what comes with each in-edge beside its pair.
        """
        counts, parts = [], []
        rows = self._counts.sum(1).tolist()
        for part, asked in zip(self.exchange(messages), rows, strict=True):
            counts.append(part[:asked].long())
            total = int(counts[-1].sum())
            words = [2 * total, *(total * _words(c, self._word) for c in columns)]
            parts.append(part[asked:].split(words))
        offset = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
        pair, *rest = (torch.cat(column) for column in zip(*parts, strict=True))
        slot = torch.empty_like(self._order)
        slot[self._order] = torch.arange(len(slot))
        more = tuple(_narrowed(w, c) for w, c in zip(rest, columns, strict=True))
        return RowReply(offset, pair, more, slot)


def answer(
    relations: Sequence[Relation],
    asks: Sequence[tuple[int, HopDraw]],
    sampler: Any,
    word: torch.dtype,
    whole: bool = False,
) -> Tensor:
    """Draws what one rank asks for, and writes the message that answers it.

    How many in-edges each node has comes first, then the pairs of all, then the columns.

    Args:
        relations: where the rows are.
        asks: (relation, ask), relations ascending.
        sampler: draws from rows and writes pairs (`kernels.neighbor_sampler`).
        word: the type of the message.
        whole: whether weights and times of the in-edges go with them.
    """
    found = []
    for number, ask in asks:
        try:
            start, entry, _ = sampler.draw_rows(relations[number], None, ask, _fresh)
        except UnweightedNode as error:
            raise UnweightedNode(number, error.node) from None
        found.append((relations[number], torch.from_numpy(start).diff(), entry))
    columns = [
        _widened(column[torch.from_numpy(entry)], word)
        for relation, _, entry in found
        for column in (columns_of(relation) if whole else [])
    ]
    heads = [count for _, count, _ in found]
    draws = sum(len(entry) for _, _, entry in found)
    sizes = [*map(len, heads), 2 * draws, *map(len, columns)]
    words = torch.empty(sum(sizes), dtype=word)
    parts = words.split(sizes)
    at = sum(map(len, heads))
    for count, part in zip(heads, parts, strict=False):
        part.copy_(count)
    for column, part in zip(columns, parts[len(heads) + 1 :], strict=True):
        part.copy_(column)
    for relation, _, entry in found:
        sampler.write_pairs(relation, entry, words, at)
        at += 2 * len(entry)
    return words


def columns_of(relation: Relation) -> list[Tensor]:
    """Returns what an in-edge has beside its pair: a weight, a time."""
    return [c for c in (relation.weight, relation.time) if c is not None]


def _widened(column: Tensor, word: torch.dtype) -> Tensor:
    """Writes numbers as words; float32 becomes float64 where words have eight bytes."""
    narrow = column.element_size() < word.itemsize
    return (column.double() if narrow else column).view(word)


def _narrowed(words: Tensor, kind: torch.dtype) -> Tensor:
    """Reads what `_widened` wrote."""
    wide = torch.float64 if kind.itemsize < words.element_size() else kind
    return words.clone().view(wide).to(kind)


def _fresh(total: int) -> tuple[NDArray[np.int64], int]:
    return np.empty(total, np.int64), 0


def _flags(wishes: Sequence[RowQuery]) -> int:
    named = any(w.name is not None for w in wishes)
    limits = [w.limit for w in wishes if w.limit is not None]
    floats = any(limit.is_floating_point() for limit in limits)
    return _NAMED * named + _TIMED * bool(limits) + _FLOAT * floats


def _words(kind: torch.dtype, word: torch.dtype) -> int:
    return max(kind.itemsize // word.itemsize, 1)


def _width(flags: int, word: torch.dtype) -> int:
    timed = _words(torch.int64, word) if flags & _TIMED else 0
    return 1 + bool(flags & _NAMED) + timed


def _packed(wishes: Sequence[RowQuery], flags: int, word: torch.dtype) -> Tensor:
    """Writes ids, and what goes with them, as rows of words [m, width]."""
    none = torch.empty(0).long()
    columns = [torch.cat([none, *(w.node for w in wishes)]).to(word).unsqueeze(1)]
    if flags & _NAMED:
        names = [torch.zeros_like(w.node) if w.name is None else w.name for w in wishes]
        columns.append(torch.cat([none, *names]).to(word).unsqueeze(1))
    if flags & _TIMED:
        kind = torch.float64 if flags & _FLOAT else torch.int64
        limits = [
            torch.zeros(len(w.node), dtype=kind)
            if w.limit is None
            else w.limit.to(kind)
            for w in wishes
        ]
        every = torch.cat([none.to(kind), *limits])
        columns.append(every.view(word).view(len(every), -1))
    return torch.cat(columns, 1)


def _unpacked(
    part: Tensor, counts: Sequence[int], flags: int, kinds: Sequence[int]
) -> list[RowQuery]:
    """Reads what `_packed` wrote, for one rank, as its wishes."""
    rows = part.view(sum(counts), -1) if len(part) else part.view(0, 1)
    none: list[Tensor | None] = [None] * len(counts)
    nodes = rows[:, 0].long().split(list(counts))
    names, limits = list(none), list(none)
    if flags & _NAMED and len(part):
        names = list(rows[:, 1].long().split(list(counts)))
    if flags & _TIMED and len(part):
        kind = torch.float64 if flags & _FLOAT else torch.int64
        raw = rows[:, 1 + bool(flags & _NAMED) :].contiguous().view(kind)
        limits = list(raw.view(-1).split(list(counts)))
    return [
        RowQuery(*segment) for segment in zip(kinds, nodes, names, limits, strict=True)
    ]
