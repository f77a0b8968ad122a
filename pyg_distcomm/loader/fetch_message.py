"""Messages of a fetch: which ids are asked of whom, and how rows lie in the answer.

An answer holds, for each rank it goes to, the rows of one attribute after the other:
`counts[group][rank]` rows as their codec writes them, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.halo.codecs import Codec, Plain, RngKey
from pyg_distcomm.loader.block_index import take_rows, width_of, words_of

Counts = Sequence[Sequence[int]]  # rows of each group, for each rank


@dataclass(frozen=True, eq=False)
class FetchedColumn:
    """One attribute that travels.

    Args:
        group: the number of its group.
        name: of the attribute.
        values: the rows here, `[m, ...]`.
        codec: how they are written.
        key: of what that draws, with the ids of rows: a row is always drawn alike.
    """

    group: int
    name: str
    values: Tensor
    codec: Codec
    key: int = 0

    def bytes_of(self, count: int) -> int:
        """Returns the bytes of `count` rows for one rank."""
        return self.codec.wire_bytes(count, width_of(self.values), self.values.dtype)

    def write(self, part: Tensor, place: Tensor, gid: Tensor) -> None:
        """Puts the rows `gid` at `place` `[k]` into a part of a message, `[bytes_of(k)]`."""
        words, count = words_of(self.values), len(place)
        plain = isinstance(self.codec, Plain)
        if plain and part.storage_offset() % words.element_size() == 0:
            kernels.gather_rows(words, place, part.view(words.dtype).view(count, -1))
        else:
            rows = take_rows(self.values, place).view(count, width_of(self.values))
            self.codec.encode(rows, self._draw(gid), out=part, where=self.name)

    def read(self, part: Tensor, out: Tensor, gid: Tensor) -> None:
        """Decodes a part of a message into contiguous rows `gid` `[k, ...]`."""
        flat = out.view(len(out), width_of(self.values))
        self.codec.decode(part, flat, self._draw(gid))

    def _draw(self, gid: Tensor) -> RngKey | None:
        return RngKey(self.key, gid) if self.codec.keyed else None


def pack_ids(parts: Sequence[Sequence[Tensor]], kind: torch.dtype) -> Tensor:
    """Returns ids by rank and within that by group, from `parts[group][rank]`."""
    return torch.cat([p for one in zip(*parts, strict=True) for p in one]).to(kind)


def unpack_ids(ids: Tensor, asked: Counts) -> list[Tensor]:
    """Returns what was asked of each group, rank by rank: the reverse of `pack_ids`."""
    sizes = [count for one in zip(*asked, strict=True) for count in one]
    parts = ids.long().split(sizes)
    return [torch.cat(parts[g :: len(asked)]) for g in range(len(asked))]


def message_bytes(columns: Sequence[FetchedColumn], counts: Counts) -> list[int]:
    """Returns the bytes for each rank."""
    return [
        sum(c.bytes_of(counts[c.group][rank]) for c in columns)
        for rank in range(len(counts[0]))
    ]


def pack_rows(
    columns: Sequence[FetchedColumn],
    places: Sequence[Tensor],
    gids: Sequence[Tensor],
    counts: Counts,
) -> Tensor:
    """Returns the message of the rows `gids[group]` at `places[group]`, rank by rank."""
    out = torch.empty(sum(message_bytes(columns, counts)), dtype=torch.uint8)
    for column, rows, part in _parts(columns, counts):
        group = column.group
        column.write(out[part], places[group][rows], gids[group][rows])
    return out


def unpack_rows(
    message: Tensor,
    columns: Sequence[FetchedColumn],
    counts: Counts,
    gids: Sequence[Tensor],
    out: Sequence[Tensor],
) -> None:
    """Decodes a message into one tensor of rows for each column, rank by rank."""
    place = {id(column): rows for column, rows in zip(columns, out, strict=True)}
    for column, rows, part in _parts(columns, counts):
        column.read(message[part], place[id(column)][rows], gids[column.group][rows])


def _parts(
    columns: Sequence[FetchedColumn], counts: Counts
) -> Iterator[tuple[FetchedColumn, slice, slice]]:
    """Yields each column's rows for each rank, and where they lie in the message."""
    first = [[0, *accumulate(row)] for row in counts]
    at = 0
    for rank in range(len(counts[0])):
        for column in columns:
            begin, end = first[column.group][rank : rank + 2]
            size = column.bytes_of(end - begin)
            if size:
                yield column, slice(begin, end), slice(at, at + size)
            at += size
