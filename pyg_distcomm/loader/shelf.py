"""Shelves: what a rank of a feature store holds of one group, and how it gets there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyg_distcomm import wire
from pyg_distcomm.channel import Channel
from pyg_distcomm.exchange.codecs import Codec, Plain
from pyg_distcomm.loader.shards import (
    Index,
    as_rows,
    gather_block,
    on_disk,
    width_of,
)
from pyg_distcomm.partition.partition import Partition

Group: TypeAlias = Any  # None, a node type, an edge type, or EDGES

NODES = None  # the nodes of a graph of one type: PyG's own name for them
EDGES = (None, None)  # its edges: likewise


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class Shelf:
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


def make_shelf(
    group: Group, gid: Tensor, total: int, owners: Partition | None, channel: Channel
) -> Shelf:
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
    sizes = [row[0] for row in wire.all_gather_counts([len(gid)], world)]
    if problem is None and sum(sizes) != total:
        problem = f"the ranks own {sizes} rows of group {group!r}, not all {total}"
    wire.agree(problem, world)
    every = _all_owned(gid, channel)
    return Shelf(group, Index(every.sort().values, total), gid, owners)


def _all_owned(gid: Tensor, channel: Channel) -> Tensor:
    """Returns the ids that the ranks of this block own, rank by rank."""
    counts = _counts(gid, channel)
    return wire.all_gather_rows(gid, counts, channel.col, "build")


def _counts(gid: Tensor, channel: Channel) -> list[int]:
    return [row[0] for row in wire.all_gather_counts([len(gid)], channel.col)]


def add_rows(
    shelf: Shelf,
    name: str,
    values: Any,
    channel: Channel,
    codec: Codec,
    folder: Path | None,
) -> None:
    """Puts one attribute on a shelf, from the rows this rank owns; collective.

    Price: the rows of a block that other ranks of it own, as bytes.

    Raises:
        ValueError, TypeError: on all ranks, if sizes or types do not fit.
    """
    rows, problem = _checked(shelf, name, values)
    spec = None if problem else (name, rows.dtype, tuple(rows.shape[1:]))
    wire.agree(problem, channel.world)
    specs = wire.all_gather_object(spec, channel.world)
    if any(one != specs[0] for one in specs):
        raise ValueError(f"the ranks add attributes that differ: {specs}")
    if channel.col.size > 1:
        counts = _counts(shelf.own, channel)
        order = torch.argsort(_all_owned(shelf.own, channel))
        rows = gather_block(rows, counts, order, channel)
    if folder is not None:
        kind = "nodes" if shelf.group is NODES else str(shelf.group)
        rows = on_disk(rows, folder, kind, name)
    shelf.values[name] = rows
    shape = width_of(rows), rows.dtype
    smaller = codec.wire_bytes(1, *shape) < Plain().wire_bytes(1, *shape)
    shelf.codecs[name] = codec if rows.is_floating_point() and smaller else Plain()


def own_rows(shelf: Shelf, values: Any) -> Any:
    """Returns this rank's own rows of values that have one for every id there is."""
    if len(values) == shelf.total != len(shelf.own):
        return values[shelf.own]
    return values


def _checked(shelf: Shelf, name: str, values: Any) -> tuple[Tensor, str | None]:
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


def learn_owners(shelf: Shelf, channel: Channel) -> Partition:
    """Finds which block holds which id, once; collective over the blocks.

    Returns a partition among ranks, of which each block's first stands for all of it.
    Price: the ids of all other blocks. It holds one byte an id, up to 256 ranks.
    """
    if shelf.owners is None:
        counts = [
            row[0] for row in wire.all_gather_counts([len(shelf.index)], channel.row)
        ]
        every = wire.all_gather_rows(shelf.index.gid, counts, channel.row, "build")
        block = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        owner = torch.empty(shelf.total, dtype=torch.int64)
        owner[every] = block * channel.replication
        shelf.owners = Partition.from_owner(owner, channel.world.size)
    return shelf.owners
