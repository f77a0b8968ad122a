"""Stores rows sharded over ranks: fetches them, prices a fetch, and caches the hottest.

The hottest rows are those that minibatches are most likely to need.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.ledger import Price, exchange_price
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.process_grid import ProcessGrid, new_process_grid
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo.codecs import Codec, Plain, codec_of
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.loader.device_placement import Placement
from pyg_distcomm.loader.fetch import (
    Fetch,
    FetchedColumn,
    Pool,
    Wanted,
    ids_of,
    message_bytes,
)
from pyg_distcomm.loader.row_group import (
    NODES,
    Group,
    Index,
    RowGroup,
    add_rows,
    learn_owners,
    lengths,
    make_row_group,
    num_cached_rows,
    own_rows,
)
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex

Fanouts: TypeAlias = Sequence[int] | Mapping[Any, Sequence[int]]

_LOG_ZERO = -800.0  # its exponential is zero in float64


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


def inclusion_probabilities(
    data: Any,
    num_neighbors: Fanouts,
    seeds: Mapping[Group, DistTensor],
    batch_size: int,
) -> dict[Group, DistTensor]:
    """Returns the probability that a minibatch holds a node, by node type; collective.

        p0_v = batch_size / number of seeds, for seeds
        p_u  = 1 - prod over edges (u, v) of (1 - p'_v min(1, s / degree v)), hop by hop
        P_u  = 1 - prod over hops of (1 - p_u)

    the vertex inclusion probability of [Kaler23], where p' is p of the hop before and s
    its fan-out. Draws are taken as independent, which is exact on a tree; otherwise it is an
    estimate, too high for nodes that are reached at two hops and expanded once.

    Args:
        data: a Data or HeteroData of `pdc.partition`.
        num_neighbors: the fan-out of each hop, -1 for all; or these by edge type.
        seeds: masks of the seed nodes, by node type; None is the type of a homogeneous graph.
        batch_size: the number of seeds of a minibatch.
    """
    edges = _edge_index_by_type(data)
    fanouts = num_neighbors
    if not isinstance(fanouts, Mapping):
        fanouts = dict.fromkeys(edges, fanouts)
    if missing := set(edges) - set(fanouts):
        raise ValueError(
            f"got num_neighbors without the edge types {sorted(missing)}; give a list for each "
            "type, of zeros where no edges are drawn"
        )
    rows = _nodes_by_type(data)
    seed_probability = _seed_probability(seeds, rows, batch_size)
    p = {group: torch.zeros(len(r), dtype=torch.float64) for group, r in rows.items()}
    for group, mask in seeds.items():
        p[group] = mask.to_local().cpu().double() * seed_probability
    log_missed = {group: _log_complement(one) for group, one in p.items()}
    for hop in range(max(map(len, fanouts.values()))):
        rest = {group: torch.zeros_like(one) for group, one in p.items()}
        for key, edge_index in edges.items():
            fanout, degree = fanouts[key][hop], edge_index.topology.in_degree.cpu()
            drawn = (fanout / degree.clamp(min=1)).clamp_(max=1)
            drawn = drawn if fanout >= 0 else torch.ones_like(drawn)
            missed = _log_complement(p[key[-1]] * drawn)
            rest[key[0]] += sum_over_out_edges(edge_index, missed)
        p = {group: -torch.expm1(one) for group, one in rest.items()}
        for group, one in p.items():
            log_missed[group] += _log_complement(one)
    return {
        group: DistTensor.wrap(-torch.expm1(one), rows[group])
        for group, one in log_missed.items()
    }


def _seed_probability(
    seeds: Mapping[Group, DistTensor], rows: Mapping[Group, Rows], batch_size: int
) -> float:
    count = torch.zeros(1, dtype=torch.int64)
    for group, mask in seeds.items():
        if group not in rows or not isinstance(mask, DistTensor):
            raise TypeError(
                f"got a {type(mask).__name__} for node type {group!r}; give masks of the share "
                f"from pdc.partition, by node type: {list(rows)}"
            )
        count += mask.to_local().cpu().bool().sum()
    mesh = next(iter(rows.values())).mesh
    return min(1.0, batch_size / max(int(collectives.all_reduce(count, mesh.world)), 1))


def _log_complement(p: Tensor) -> Tensor:
    return torch.log1p(-p).clamp_(min=_LOG_ZERO)


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


Wire: TypeAlias = str | Codec | LinkPolicy | None
Attrs: TypeAlias = Mapping[Group, Sequence[str]] | None
Rates: TypeAlias = Mapping[Group, Sequence[int]]


_UNSET = TensorAttr().index
_DRAWN = 0xFE7C  # separates the keys of fetched rows from other keys


class RowsAttr(TensorAttr):
    """Extends PyG's TensorAttr, which cannot compare an index that is an array."""

    def is_set(self, key: str) -> bool:
        """Returns whether a field is set."""
        return getattr(self, key) is not _UNSET


def _fixed_size_codec(wire: Wire) -> Codec:
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


class ShardedStore(FeatureStore):
    """Stores rows over the blocks of a channel (abstract; see `DistFeatureStore`)."""

    def __init__(
        self,
        channel: ProcessGrid | Mesh,
        *,
        wire: Wire | Mapping[str, Wire] = None,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__(RowsAttr)
        by_name = wire if isinstance(wire, Mapping) else {}
        self._codecs = {name: _fixed_size_codec(one) for name, one in by_name.items()}
        self._codec = _fixed_size_codec(None if isinstance(wire, Mapping) else wire)
        self.channel = (
            new_process_grid(channel) if isinstance(channel, Mesh) else channel
        )
        rank = self.channel.world.rank
        self._folder = None if folder is None else Path(folder) / f"rank_{rank:05d}"
        self._row_groups: dict[Group, RowGroup] = {}

    # Groups and attributes ------------------------------------------------------------

    def add_group(
        self, group: Group, gid: Tensor, total: int, owners: Partition | None = None
    ) -> None:
        """Adds a group, of which each rank owns some rows; collective over all ranks.

        Args:
            group: the name of the group.
            gid: the ids of this rank's rows, ascending.
            total: ids lie in [0, total), each on one rank.
            owners: the owner of each id, if it is known.

        Raises:
            ValueError: on all ranks, if ids are missing, repeated or out of order.
        """
        self._row_groups[group] = make_row_group(
            group, gid, total, owners, self.channel
        )

    def add(self, group: Group, name: str, values: Tensor | np.ndarray) -> None:
        """Adds one attribute from this rank's own rows; collective over all ranks.

        Args:
            group: a group of `add_group`.
            name: the name of the attribute.
            values: `[len(gid), ...]`, which may be memory-mapped: with replication 1 and
                no `folder` it is not copied.

        Raises:
            ValueError: on all ranks, if sizes or dtypes do not fit.
        """
        row_group, codec = self._row_group(group), self._codecs.get(name, self._codec)
        add_rows(row_group, name, values, self.channel, codec, self._folder)
        row_group.external.pop(name, None)
        if len(row_group.cached_gid):
            self._fill_cache(row_group, [name])

    def total(self, group: Group) -> int:
        """Returns the number of rows of a group over all ranks."""
        return self._row_group(group).total

    def learn_owners(self, group: Group) -> Partition:
        """Finds the owners of all ids of a group, so that rows can be fetched by id alone.

        Collective over a column the first time; later calls return what is known.
        """
        return learn_owners(self._row_group(group), self.channel)

    def keep(self, group: Group, score: Tensor | np.ndarray, size: float) -> None:
        """Caches the rows of highest score on every rank; collective over all ranks.

        They are sent once, uncompressed, and replace rows cached before. The choice is the
        same on all ranks and for all partitions.

        Args:
            group: the group of the rows.
            score: the score of each row that this rank owns, or of each row of the group.
            size: the number of rows: a count (int), or a fraction of all (float).
        """
        row_group, world = self._row_group(group), self.channel.world
        count = num_cached_rows(size, row_group.total)
        local = score.to_local() if isinstance(score, DistTensor) else score
        local = own_rows(row_group, torch.as_tensor(local).cpu())
        row_group.cached_gid = top_scoring_ids(local, row_group.own, count, world)
        row_group.cached_rows.clear()
        self._fill_cache(row_group, list(row_group.values))

    def _fill_cache(self, row_group: RowGroup, names: Sequence[str]) -> None:
        """Fetches the cached rows of some attributes; collective over a column."""
        _, here = row_group.index.places(row_group.cached_gid)
        away = row_group.cached_gid[~here]
        row_group.cached = row_group.cached.none()
        self.learn_owners(row_group.group)
        if len(row_group.cached_gid):
            fetcher = self._fetcher({row_group.group: names}, exact=True)
            row_group.cached_rows |= fetcher({row_group.group: away})[
                row_group.group
            ].take(away)
        row_group.cached = Index(away, row_group.total)

    def _row_group(self, group: Group) -> RowGroup:
        if group not in self._row_groups:
            raise KeyError(
                f"got group {group!r}, but the store has {list(self._row_groups)}; take one of "
                "them"
            )
        return self._row_groups[group]

    def _group_with(self, group: Group, name: Any) -> RowGroup:
        """Returns a group, or raises KeyError if it has no such attribute."""
        row_group = self._row_group(group)
        if name not in row_group.names:
            raise KeyError(
                f"got attribute {name!r}, but group {group!r} has {row_group.names}; take one "
                "of them"
            )
        return row_group

    # Fetching -------------------------------------------------------------------------

    def fetch(
        self, wanted: Wanted, attrs: Attrs = None
    ) -> dict[Group, dict[str, Tensor]]:
        """Returns rows by id, in the order of the ids; collective over a column.

        Args:
            wanted: ids `[k]` by group, repeats allowed; or `(ids, owners)` with the ranks
                that own them, if the store does not know these (edges). A rank may leave
                out groups that other ranks fetch.
            attrs: the attributes to fetch of each group, the same on all ranks; by default
                all of them.

        Returns: rows `[k, ...]` on the CPU, by group and name.

        Raises:
            ValueError: on all ranks of the column, if one requests an invalid id.
        """
        pools = self.fetch_unique(wanted, attrs)
        return {
            group: pools[group].take(ids_of(asked).long())
            for group, asked in wanted.items()
        }

    def fetch_unique(
        self, wanted: Wanted, attrs: Attrs = None, placement: Placement | None = None
    ) -> dict[Group, Pool]:
        """Returns the distinct rows that `fetch` would, not yet in the order of the ids.

        With a placement they are on its device. So are, from the first fetch on, this
        rank's own and cached rows, unless `rows_on` says otherwise.
        """
        if not self._row_groups:
            return {}
        pools = replace(self._fetcher(attrs), placement=placement)(wanted)
        for group, pool in pools.items():
            for name, source in self._row_groups[group].external.items():
                if attrs is None or name in attrs.get(group, ()):
                    in_order = torch.empty_like(pool.ids)
                    in_order[pool.place] = pool.ids
                    rows = source[in_order]
                    pool.rows[name] = rows if placement is None else placement.put(rows)
        return pools

    def _fetcher(self, attrs: Attrs, exact: bool = False) -> Fetch:
        """Returns a `Fetch` of attributes, widest numbers first so that most are aligned."""
        columns = []
        for number, (group, row_group) in enumerate(self._row_groups.items()):
            for name in row_group.values if attrs is None else attrs.get(group, ()):
                self._group_with(group, name)
                if name in row_group.values:
                    codec = Plain() if exact else row_group.codecs[name]
                    key = random.fold(
                        _DRAWN, zlib.crc32(f"{row_group.group}.{name}".encode())
                    )
                    columns.append(
                        FetchedColumn(number, name, row_group.values[name], codec, key)
                    )
        columns.sort(key=lambda column: -column.values.element_size())
        return Fetch(self.channel, list(self._row_groups.values()), columns)

    # Price ----------------------------------------------------------------------------

    def travelling(self, wanted: Wanted, attrs: Attrs = None) -> dict[Group, list[int]]:
        """Returns the distinct rows of each group that a fetch would receive from each block.

        Nothing is sent. Raises ValueError for an invalid id.
        """
        asks, problem = self._fetcher(attrs).plan(wanted)
        if problem is not None:
            raise ValueError(problem)
        return {
            group: list(ask.counts)
            for group, ask in zip(self._row_groups, asks, strict=True)
        }

    def price(self, want: Rates, asked: Rates, attrs: Attrs = None) -> dict[str, Price]:
        """Returns the price of one fetch, by operation of the ledger.

            plan        8 bytes a word:  groups + 1 words from each other rank
            fetch_ids   4 (8 above 2^31 ids):  a word for each row asked of this rank
            fetch_rows  1:  the bytes of each row that this rank wants

        Args:
            want: rows of each group from each rank of the column: `travelling` here.
            asked: rows of each group that each rank wants of this one.
            attrs: as for `fetch`.
        """
        fetcher, axis = self._fetcher(attrs), self.channel.row
        none = [0] * axis.size
        wants, asks = (
            [[*rates.get(group, none)] for group in self._row_groups]
            for rates in (want, asked)
        )
        ones = [1] * axis.size
        ids_out, ids_in = (
            [sum(one) for one in zip(*rates, strict=True)] for rates in (wants, asks)
        )
        sent, brought = (message_bytes(fetcher.columns, r) for r in (asks, wants))
        return {
            "plan": exchange_price(ones, ones, axis.rank, len(self._row_groups) + 1),
            "fetch_ids": exchange_price(ids_out, ids_in, axis.rank, 1),
            "fetch_rows": exchange_price(sent, brought, axis.rank, 1),
        }
