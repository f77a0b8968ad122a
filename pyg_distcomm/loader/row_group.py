"""Shelves: what a rank of a feature store holds of one group, and how it gets there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.process_grid import ProcessGrid
from pyg_distcomm.halo.codecs import Codec, Plain, RngKey
from pyg_distcomm.loader.block_index import (
    Index,
    as_rows,
    gather_block,
    on_disk,
    width_of,
)
from pyg_distcomm.partition.partition import Partition

Group: TypeAlias = Any  # None, a node type, an edge type, or EDGES

_SAFE = 65504.0  # what every codec can write
_CHUNK = 1 << 20  # numbers checked at a time

NODES = None  # the nodes of a graph of one type: PyG's own name for them
EDGES = (None, None)  # its edges: likewise


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class RowGroup:
    """One group: the rows of this rank's block, and those of others in the cache.

    Args:
        group: its name.
        index: which rows are here.
        own: ids of the rows that this rank owns itself, in order.
        owners: which rank owns which id; None where nobody has said.
        values: name -> rows `[m, ...]`, in the order of the index.
        codecs: name -> how its rows are written on the wire.
        foreign: name -> somebody else's store of rows, read as `rows[ids]`.
        chosen: ids of the rows that every rank keeps, ascending.
        cached: those of them that are not in this block.
        hot: name -> the rows of those.
    """

    group: Group
    index: Index
    own: Tensor
    owners: Partition | None
    values: dict[str, Tensor] = field(default_factory=dict)
    codecs: dict[str, Codec] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)
    chosen: Tensor = field(default_factory=_no_ids)
    cached: Index = field(default_factory=lambda: Index(_no_ids(), 0))
    hot: dict[str, Tensor] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The number of ids."""
        return self.index.total

    @property
    def names(self) -> list[str]:
        """The attributes there are."""
        return [*self.values, *self.foreign]


def make_row_group(
    group: Group,
    gid: Tensor,
    total: int,
    owners: Partition | None,
    channel: ProcessGrid,
) -> RowGroup:
    """Makes the empty shelf of a group from the ids this rank owns; collective.

    Raises:
        ValueError: on all ranks, if ids are missing, repeated or out of order.
    """
    gid, world = gid.detach().cpu().long(), channel.world
    problem = None
    if len(gid) and not bool((gid[1:] > gid[:-1]).all()):
        problem = f"the ids of group {group!r} must ascend"
    elif len(gid) and not 0 <= int(gid[0]) <= int(gid[-1]) < total:
        problem = f"the ids of group {group!r} must lie in [0, {total})"
    sizes = [row[0] for row in collectives.all_gather_counts([len(gid)], world)]
    if problem is None and sum(sizes) != total:
        problem = f"the ranks own {sizes} rows of group {group!r}, not all {total}"
    collectives.agree(problem, world)
    every = _all_owned(gid, channel)
    return RowGroup(group, Index(every.sort().values, total), gid, owners)


def _all_owned(gid: Tensor, channel: ProcessGrid) -> Tensor:
    """Returns the ids that the ranks of this block own, rank by rank."""
    counts = _counts(gid, channel)
    return collectives.all_gather_rows(gid, counts, channel.col, "build")


def _counts(gid: Tensor, channel: ProcessGrid) -> list[int]:
    return [row[0] for row in collectives.all_gather_counts([len(gid)], channel.col)]


def add_rows(
    shelf: RowGroup,
    name: str,
    values: Any,
    channel: ProcessGrid,
    codec: Codec,
    folder: Path | None,
) -> None:
    """Puts one attribute on a shelf, from the rows this rank owns; collective.

    Price: the rows of a block that other ranks of it own, as bytes.

    Raises:
        ValueError, TypeError: on all ranks, if sizes or types do not fit, a codec cannot
            send what is in the rows, or a rank cannot write its file.
    """
    rows, problem = _checked(shelf, name, values)
    spec = None if problem else (name, rows.dtype, tuple(rows.shape[1:]))
    collectives.agree(problem, channel.world)
    specs = collectives.all_gather_object(spec, channel.world)
    if any(one != specs[0] for one in specs):
        raise ValueError(f"the ranks add attributes that differ: {specs}")
    shape = width_of(rows), rows.dtype
    smaller = codec.wire_bytes(1, *shape) < Plain().wire_bytes(1, *shape)
    codec = codec if rows.is_floating_point() and smaller else Plain()
    if not isinstance(codec, Plain):
        collectives.agree(_unwritable(name, rows, codec), channel.world)
    if channel.col.size > 1:
        counts = _counts(shelf.own, channel)
        order = torch.argsort(_all_owned(shelf.own, channel))
        rows = gather_block(rows, counts, order, channel)
    if folder is not None:
        kind = "nodes" if shelf.group is NODES else str(shelf.group)
        rows = on_disk(rows, folder, kind, name, channel)
    shelf.values[name], shelf.codecs[name] = rows, codec


def _unwritable(name: str, rows: Tensor, codec: Codec) -> str | None:
    """Says which row a codec would spoil; reads all of them once."""
    rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    step = max(_CHUNK // max(rows.size(1), 1), 1)
    for begin in range(0, len(rows) if rows.size(1) else 0, step):
        part = rows[begin : begin + step]
        low, high = part.aminmax()
        if low >= -_SAFE and high <= _SAFE:  # and no NaN
            continue
        bad = _lost(part, codec).nonzero()
        if len(bad):
            row = part[int(bad[0])]
            worst = row[~row.isfinite()][:1].tolist() or [float(row.abs().max())]
            return (
                f"attribute {name!r}: row {begin + int(bad[0])} of this rank holds "
                f"{worst[0]:g}, with which {codec!r} cannot send that row; clean or scale "
                "the values, or send them as they are (wire=None)"
            )
    return None


def _lost(rows: Tensor, codec: Codec) -> Tensor:
    """Tells which rows a codec refuses, or where it makes or takes infinities or NaN."""
    draw = RngKey(0, torch.arange(len(rows))) if codec.keyed else None
    try:
        back = codec.decode(codec.encode(rows, draw), torch.empty_like(rows), draw)
    except ValueError:  # for what is not finite, or the largest
        size = rows.abs().amax(1)
        size = torch.where(size.isnan(), torch.inf, size)
        return size == size.max()
    fine = back.isfinite() & rows.isfinite() | (back == rows)
    return ~(fine | back.isnan() & rows.isnan()).all(1)


def own_rows(shelf: RowGroup, values: Any) -> Any:
    """Returns this rank's own rows of values that have one for every id there is."""
    if len(values) == shelf.total != len(shelf.own):
        return values[shelf.own]
    return values


def _checked(shelf: RowGroup, name: str, values: Any) -> tuple[Tensor, str | None]:
    try:
        rows = as_rows(values)
    except TypeError as error:
        return torch.empty(0), f"attribute {name!r}: {error}"
    if len(rows) == len(shelf.own):
        return rows, None
    return rows, (
        f"attribute {name!r} of group {shelf.group!r} has {len(rows)} rows, but "
        f"{len(shelf.own)} ids are owned here"
    )


def learn_owners(shelf: RowGroup, channel: ProcessGrid) -> Partition:
    """Finds which block holds which id, once; collective over the blocks.

    Returns a partition among ranks, of which each block's first stands for all of it.
    Price: the ids of all other blocks. It holds one byte an id, up to 256 ranks.
    """
    if shelf.owners is None:
        counts = [
            row[0]
            for row in collectives.all_gather_counts([len(shelf.index)], channel.row)
        ]
        every = collectives.all_gather_rows(
            shelf.index.gid, counts, channel.row, "build"
        )
        block = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        owner = torch.empty(shelf.total, dtype=torch.int64)
        owner[every] = block * channel.replication
        shelf.owners = Partition.from_owner(owner, channel.world.size)
    return shelf.owners
