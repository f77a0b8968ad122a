"""Holds this rank's rows of a group of a sharded feature store, and ranks those needed most."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import ProcessGrid
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.consistency import check_alike, naming, on_all_ranks
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo.codecs import Codec, Plain, RngKey, codec_of
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.kernels.core_ops import as_bytes
from pyg_distcomm.loader.batcher import take_rows
from pyg_distcomm.loader.fetch import EDGES, NODES, Group, Wanted, width_of
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sampling.row_service import Index
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex

Values = Tensor | np.ndarray


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class RowGroup:
    """Holds one group: the rows of this rank's block, and cached rows of other blocks.

    Args:
        group: the name of the group.
        index: the ids of the rows in this block.
        own: the ids of the rows that this rank owns, ascending.
        owners: the owner of each id; None if it is not known.
        values: name -> rows `[m, ...]`, in the order of the index.
        codecs: name -> the codec of its rows in messages.
        cached_gid: the ids of the rows that every rank caches, ascending.
        cached: the index of those that are not in this block.
        cached_rows: name -> the rows of that index.
    """

    group: Group
    index: Index
    own: Tensor
    owners: Partition | None
    values: dict[str, Tensor] = field(default_factory=dict)
    codecs: dict[str, Codec] = field(default_factory=dict)
    cached_gid: Tensor = field(default_factory=_no_ids)
    cached: Index = field(default_factory=lambda: Index(_no_ids(), 0))
    cached_rows: dict[str, Tensor] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Returns the number of ids."""
        return self.index.total

    @property
    def names(self) -> list[str]:
        """Returns the names of the attributes."""
        return list(self.values)


def as_rows(values: Any) -> Tensor:
    """Returns rows as a contiguous CPU tensor, without copying memory-mapped files.

    Raises TypeError for anything but a dense tensor or array with rows.
    """
    if isinstance(values, np.ndarray):
        # torch warns of read-only memory, which is only read here
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            values = torch.from_numpy(values)
    if not isinstance(values, Tensor) or values.layout != torch.strided:
        raise TypeError(
            f"got a {type(values).__name__}, wanted a dense tensor or array; convert it"
        )
    if values.dim() == 0:
        raise TypeError("got a single number, wanted rows; give one value for each id")
    return values.detach().cpu().resolve_conj().resolve_neg().contiguous()


Wire: TypeAlias = str | Codec | LinkPolicy | None

_SAFE = 65504.0  # the largest magnitude that every codec can encode
_CHUNK = 1 << 20  # numbers checked at a time


def make_row_group(
    group: Group,
    gid: Tensor,
    total: int,
    owners: Partition | None,
    channel: ProcessGrid,
) -> RowGroup:
    """Makes a group without attributes from the ids that this rank owns; collective.

    Raises:
        ValueError: on all ranks, if ids are missing, repeated or out of order.
    """
    gid, world = gid.detach().cpu().long(), channel.world
    problem = None
    if len(gid) and not bool((gid[1:] > gid[:-1]).all()):
        problem = f"the ids of group {group!r} must ascend"
    elif len(gid) and not 0 <= int(gid[0]) <= int(gid[-1]) < total:
        problem = f"the ids of group {group!r} must lie in [0, {total})"
    sizes = lengths(gid, world)
    if problem is None and sum(sizes) != total:
        problem = f"the ranks own {sizes} rows of group {group!r}, not all {total}"
    collectives.agree(problem, world)
    every = _all_owned(gid, channel)
    return RowGroup(group, Index(every.sort().values, total), gid, owners)


def _all_owned(gid: Tensor, channel: ProcessGrid) -> Tensor:
    """Gathers the ids that the ranks of this block own, rank by rank; collective."""
    counts = lengths(gid, channel.col)
    return collectives.all_gather_rows(gid, counts, channel.col, "build")


def lengths(rows: Tensor | np.ndarray, axis: collectives.Axis) -> list[int]:
    """Returns the number of rows on each rank of an axis; collective."""
    return [count for (count,) in collectives.all_gather_counts([len(rows)], axis)]


def add_rows(
    row_group: RowGroup,
    name: str,
    values: Any,
    channel: ProcessGrid,
    codec: Codec,
) -> None:
    """Adds one attribute to a group, from the rows this rank owns; collective.

    Price: the rows of a block that other ranks of it own, as bytes.

    Raises:
        ValueError, TypeError: on all ranks, if sizes or dtypes do not fit, or a codec
            cannot encode the values.
    """
    with on_all_ranks(channel.world), naming(f"attribute {name!r}"):
        rows = as_rows(values)
        if len(rows) != len(row_group.own):
            raise ValueError(
                f"has {len(rows)} rows, but {len(row_group.own)} ids of group "
                f"{row_group.group!r} are owned here"
            )
    spec = name, rows.dtype, tuple(rows.shape[1:])
    check_alike({"attribute": spec}, channel.world)
    shape = width_of(rows), rows.dtype
    smaller = codec.wire_bytes(1, *shape) < Plain().wire_bytes(1, *shape)
    codec = codec if rows.is_floating_point() and smaller else Plain()
    if not isinstance(codec, Plain):
        collectives.agree(_codec_problem(name, rows, codec), channel.world)
    if channel.col.size > 1:
        counts = lengths(row_group.own, channel.col)
        order = torch.argsort(_all_owned(row_group.own, channel))
        whole, dtype = [sum(counts), *rows.shape[1:]], rows.dtype
        flat = as_bytes(rows).view(len(rows), width_of(rows) * rows.element_size())
        every = collectives.all_gather_rows(flat, counts, channel.col, "build")
        rows = take_rows(every.view(-1).view(dtype).view(whole), order)
    row_group.values[name], row_group.codecs[name] = rows, codec


def fixed_size_codec(wire: Wire) -> Codec:
    """Returns a codec that encodes each row by itself to a fixed size; refuses others."""
    if isinstance(wire, LinkPolicy):
        if wire.timing.is_late or wire.schedule is not None or wire.trend is not None:
            raise ValueError(
                f"got {wire!r}, but rows are fetched once and ahead of training, so a link "
                "cannot be late, nor follow a schedule; give a link without these, or a codec"
            )
        wire = wire.codec
    codec = codec_of(wire)
    if not codec.by_row:
        raise ValueError(
            f"got {codec!r}, which compares or drops rows, but a feature store "
            "encodes each row by itself; choose 'fp16', 'bf16', 'int8' or Quantise(bits)"
        )
    return codec


def _codec_problem(name: str, rows: Tensor, codec: Codec) -> str | None:
    """Returns an error for a row that a codec cannot encode, or None; reads all rows once."""
    rows = rows.flatten(1) if rows.dim() > 1 else rows.unsqueeze(1)
    step = max(_CHUNK // max(rows.size(1), 1), 1)
    for begin in range(0, len(rows) if rows.size(1) else 0, step):
        part = rows[begin : begin + step]
        low, high = part.aminmax()
        if low >= -_SAFE and high <= _SAFE:  # and no NaN
            continue
        bad = _rows_a_codec_spoils(part, codec).nonzero()
        if len(bad):
            row = part[int(bad[0])]
            worst = row[~row.isfinite()][:1].tolist() or [float(row.abs().max())]
            return (
                f"attribute {name!r}: row {begin + int(bad[0])} of this rank holds "
                f"{worst[0]:g}, with which {codec!r} cannot send that row; clean or scale "
                "the values, or send them as they are (wire=None)"
            )
    return None


def _rows_a_codec_spoils(rows: Tensor, codec: Codec) -> Tensor:
    """Marks rows that a codec refuses, or in which infinities or NaN appear or vanish."""
    draw = RngKey(0, torch.arange(len(rows))) if codec.keyed else None
    try:
        back = codec.decode(codec.encode(rows, draw), torch.empty_like(rows), draw)
    except ValueError:  # the codec refuses numbers that are not finite or too large
        size = rows.abs().amax(1)
        size = torch.where(size.isnan(), torch.inf, size)
        return size == size.max()
    fine = back.isfinite() & rows.isfinite() | (back == rows)
    return ~(fine | back.isnan() & rows.isnan()).all(1)


def own_rows(row_group: RowGroup, values: Any) -> Any:
    """Returns this rank's own rows, of values with a row for every id of the group."""
    if len(values) == row_group.total != len(row_group.own):
        return values[row_group.own]
    return values


def learn_owners(row_group: RowGroup, channel: ProcessGrid) -> Partition:
    """Finds the block of every id, once; collective over the blocks.

    Returns a partition over ranks that names the first rank of each block as the owner.
    Price: the ids of all other blocks. It holds one byte per id, up to 256 ranks.
    """
    if row_group.owners is None:
        gid, axis = row_group.index.gid, channel.row
        counts = lengths(gid, axis)
        every = collectives.all_gather_rows(gid, counts, axis, "build")
        block = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        owner = torch.empty(row_group.total, dtype=torch.int64)
        owner[every] = block * channel.replication
        row_group.owners = Partition.from_owner(owner, channel.world.size)
    return row_group.owners


def problem_of(
    row_groups: Sequence[RowGroup], wanted: Wanted, ranks: int
) -> tuple[Wanted, str | None]:
    """Returns what is wanted as vectors of int64, and an error message for what cannot be."""
    groups = {row_group.group: row_group for row_group in row_groups}
    found: dict[Group, Any] = {}
    try:
        for group, asked in wanted.items():
            if group not in groups:
                raise ValueError(
                    f"got group {group!r}, but the store has {list(groups)}; take one of them"
                )
            total, what = groups[group].total, f"ids of group {group!r}"
            ids = found[group] = checked_ids(asked, what, total)
            check_range(ids, total, what)
            if isinstance(asked, tuple):
                owner = torch.as_tensor(asked[1]).cpu().long()
                if owner.shape != ids.shape:
                    raise ValueError(
                        f"owners must be given for each of {len(ids)} ids, got "
                        f"{list(owner.shape)}"
                    )
                check_range(owner, ranks, f"owners of group {group!r}")
                found[group] = ids, owner
    except ValueError as error:
        return {}, str(error)
    return found, None


def ids_of(asked: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Returns the ids of a request, without their owners, on the CPU."""
    ids = asked[0] if isinstance(asked, tuple) else asked
    return torch.as_tensor(ids).cpu()


def checked_ids(asked: Any, what: str, total: int) -> Tensor:
    """Returns ids as a vector of integers, or raises ValueError."""
    wanted = f"{what} must be a vector of integers (or in an index, a mask of {total})"
    try:
        ids = ids_of(asked)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{wanted}, got {asked!r}") from None
    none = ids.shape == (0,)  # an empty list is one of floats
    if not none and (
        ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool
    ):
        raise ValueError(f"{wanted}, got {ids.dtype} {list(ids.shape)}")
    return ids.long()


def check_range(values: Tensor, end: int, what: str) -> None:
    if not len(values):
        return
    low, high = (int(v) for v in torch.aminmax(values))
    if low < 0 or high >= end:
        bad = low if low < 0 else high
        raise ValueError(f"{what} must be in 0 .. {end - 1}, got {bad}")


def sum_over_out_edges(edge_index: DistEdgeIndex, x: Tensor) -> Tensor:
    """Returns the sum over the out-edges of each source; collective.

        z_u = sum over edges (u, v) of x_v

    Shapes (this rank; n targets, m sources): x `[n]`, return `[m]`.
    Price: a word for each distinct source on another rank.
    """
    local, m = edge_index.topology.locals, len(edge_index.sources)
    part = x.new_zeros(m + local.halo.num_ghosts, 1)
    source, target = local.ends.cpu()
    part.index_add_(0, source, x[target].unsqueeze(1))
    out, ghosts = part[:m].contiguous(), part[m:]
    device = local.ends.device
    arrive = local.halo.begin_transpose(ghosts.to(device))
    return arrive(out.to(device)).squeeze(1).cpu()


def out_degrees(data: Any) -> dict[Group, DistTensor]:
    """Returns the out-degree of each node, float64 `[n_i]` by type; collective."""
    rows = _nodes_by_type(data)
    sums = {
        group: torch.zeros(len(r), dtype=torch.float64) for group, r in rows.items()
    }
    for key, edge_index in _edge_index_by_type(data).items():
        one = torch.ones(len(edge_index.nodes), dtype=torch.float64)
        sums[key[0]] += sum_over_out_edges(edge_index, one)
    return {group: DistTensor.wrap(sums[group], r) for group, r in rows.items()}


def _edge_index_by_type(data: Any) -> dict[Any, DistEdgeIndex]:
    """Returns the edge_index of each edge type; of (None, None) in a homogeneous graph."""
    found = {}
    for part in data.stores:
        edge_index = part.get("edge_index")
        if isinstance(edge_index, DistEdgeIndex):
            found[(NODES, NODES) if part._key is None else part._key] = edge_index
    if not found:
        raise TypeError(
            "got data without a partitioned edge_index, by which nodes are ranked; give a "
            "share from pdc.partition"
        )
    return found


def _nodes_by_type(data: Any) -> dict[Group, Rows]:
    """Returns the row layout of the nodes of each type that has edges."""
    found = {}
    for key, edge_index in _edge_index_by_type(data).items():
        found[key[0]], found[key[-1]] = edge_index.sources, edge_index.nodes
    return found


def top_scoring_ids(score: Tensor, gid: Tensor, count: int, axis: Axis) -> Tensor:
    """Returns the `count` ids with the highest scores over all ranks, ascending; collective.

    Ties go to the lower id, so the result does not depend on the partition.

    Shapes: score `[n_i]` and gid `[n_i]`, ascending; return `[count]`, on every rank.
    Price: at most one id and one score for every id of the group.

    Raises:
        ValueError: on all ranks, if a score is NaN, or there are not n_i.
    """
    problem = None
    if score.shape != gid.shape:
        problem = (
            f"got scores {list(score.shape)}, wanted one for each of the {len(gid)} rows of "
            "this rank; give these, or one for each row of all ranks"
        )
    elif bool(score.isnan().any()):
        problem = "got NaN among the scores, wanted numbers; rank such rows by 0"
    collectives.agree(problem, axis)
    best = torch.sort(score.double(), descending=True, stable=True).indices[:count]
    sizes = lengths(best, axis)
    ids = collectives.all_gather_rows(gid[best], sizes, axis, "build")
    scores = collectives.all_gather_rows(score.double()[best], sizes, axis, "build")
    ids, order = ids.sort()
    top = torch.sort(scores[order], descending=True, stable=True).indices[:count]
    return ids[top].sort().values


def check_names(what: str, given: Any, there: Sequence[Any]) -> None:
    """Raises ValueError, on all ranks alike, for a dictionary with unknown names."""
    unknown = (
        [one for one in given if one not in there] if isinstance(given, Mapping) else []
    )
    if unknown:
        raise ValueError(
            f"got {what} for {unknown}, but there are only {list(there)}; check the names"
        )


def row_scores(
    data: Any, ranking: str | Tensor | Mapping[Group, Tensor]
) -> Mapping[Group, Tensor]:
    """Returns the score of each row, by group, by the ranking of `from_data`; collective."""
    types = data.node_types if isinstance(data, HeteroData) else [NODES]
    if isinstance(ranking, Mapping):
        edges = data.edge_types if isinstance(data, HeteroData) else [EDGES]
        check_names("ranking", ranking, [*types, *edges])
        return ranking
    if not isinstance(ranking, str):
        if types != [NODES]:
            raise ValueError(
                "got one vector of scores as ranking, but nodes have the types "
                f"{types}; give a dictionary with a vector for each"
            )
        return {NODES: ranking}
    if ranking != "degree":
        raise ValueError(
            f"ranking={ranking!r} is not known; choose 'degree', or give scores"
        )
    return out_degrees(data)
