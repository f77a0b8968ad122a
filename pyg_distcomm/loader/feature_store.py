"""Stores rows sharded over ranks: fetches them by id, caches and prices them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.ledger import Price, balanced_split, exchange_price
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.process_grid import ProcessGrid, new_process_grid
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.loader.fetch import (
    EDGES,
    NODES,
    Fetch,
    FetchedColumn,
    Group,
    Pool,
    Wanted,
    message_bytes,
)
from pyg_distcomm.loader.row_group import (
    RowGroup,
    Wire,
    add_rows,
    fixed_size_codec,
    ids_of,
    learn_owners,
    lengths,
    make_row_group,
    own_rows,
    problem_of,
)
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sampling.row_service import Index
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex

Attrs: TypeAlias = Mapping[Group, Sequence[str]] | None
Rates: TypeAlias = Mapping[Group, Sequence[int]]


_DRAWN = 0xFE7C  # separates the keys of fetched rows from other keys


class DistFeatureStore:
    """Stores rows of features, sharded over the ranks, and returns any of them by id.

    A group is None for the nodes of a graph of one type, `EDGES` for its edges, a node
    type, or an edge type. With P ranks and replication c, block i holds what ranks
    i c .. i c + c - 1 own; a rank fetches from the P/c ranks of its column.

    `fetch` is collective over a column. Ids differ by rank, all other arguments are equal on
    all ranks, and only one thread may call at a time. Methods that add groups and attributes
    are collective over all ranks.

    Price: a distinct row that is neither in the block nor in the cache travels once,
    with its id: 1 - c/P of the rows of random ids.
    Differs from [Tripathy24] in fetching each row of a bulk once.

    Args:
        channel: a ProcessGrid, for a loader in a thread of its own; or a Mesh, from which
            one is opened (`store.channel.close()` closes it).
        wire: how floating-point rows travel: "fp16", "bf16", "int8", a Codec, a link such
            as `Sylvie(late=0)`, a dictionary of these by attribute name, or None for
            uncompressed. The draws of a codec depend on the row alone, so a row is always
            received with the same values. A codec that would not make rows smaller is not
            used.
    """

    def __init__(
        self,
        channel: ProcessGrid | Mesh,
        *,
        wire: Wire | Mapping[str, Wire] = None,
    ) -> None:
        by_name = wire if isinstance(wire, Mapping) else {}
        self._codecs = {name: fixed_size_codec(one) for name, one in by_name.items()}
        self._codec = fixed_size_codec(None if isinstance(wire, Mapping) else wire)
        self.channel = (
            new_process_grid(channel) if isinstance(channel, Mesh) else channel
        )
        self._row_groups: dict[Group, RowGroup] = {}

    # Constructors ---------------------------------------------------------------------

    @classmethod
    def from_data(
        cls,
        data: Any,
        channel: ProcessGrid | Mesh,
        *,
        wire: Wire | Mapping[str, Wire] = None,
        cache: float = 0,
        ranking: str | Tensor | Mapping[Group, Tensor] = "degree",
    ) -> DistFeatureStore:
        """Takes every attribute with a row per node or per edge of a partitioned graph.

        Args:
            data: a Data or HeteroData of `pdc.partition`.
            channel, wire: as above.
            cache: how many rows of nodes of each type every rank caches: a count (int) or a
                fraction (float).
            ranking: which nodes: "degree", those of highest out-degree, which minibatches
                draw most; or a score for each node, in a dictionary if there are node types.

        Raises:
            ValueError: on all ranks, if their attributes differ.
            TypeError: if the data is not a share of `pdc.partition`.
        """
        if not any(_is_share(part) for part in data.stores):
            raise TypeError(
                "got data that is no share; give from_data the share that pdc.partition "
                "returned, or from_replicated a tensor that all ranks hold"
            )
        store = cls(channel, wire=wire)
        found = {
            (group, name): value
            for part in data.stores
            for group, name, value in _row_cut(part)
        }
        names = collectives.all_gather_object(list(found), store.channel.world)
        if any(one != names[0] for one in names):
            raise ValueError(
                f"got different attributes on the ranks: {names}; give all ranks the same"
            )
        check_names("wire", wire, [name for _, name in found])
        for (group, name), value in found.items():
            if group not in store._row_groups:
                rows = value.rows
                store.add_group(group, rows.gid, rows.total, rows.partition)
            store.add(group, name, value.to_local())
        if cache:
            scores = row_scores(data, ranking)
            for group, score in scores.items():
                if group in store._row_groups:
                    store.keep(group, score, cache)
        return store

    @classmethod
    def from_cpu_tensor(
        cls,
        tensor: Tensor | np.ndarray,
        channel: ProcessGrid | Mesh,
        *,
        name: str = "x",
        wire: Wire = None,
    ) -> DistFeatureStore:
        """Joins the parts `[n_q, ...]` that the ranks hold, in rank order; collective."""
        store = cls(channel, wire=wire)
        store._add_ranges(NODES, lengths(tensor, store.channel.world))
        store.add(NODES, name, tensor)
        return store

    @classmethod
    def from_replicated(
        cls,
        tensor: Tensor | np.ndarray,
        channel: ProcessGrid | Mesh,
        *,
        name: str = "x",
        wire: Wire = None,
    ) -> DistFeatureStore:
        """Keeps this rank's block of a tensor `[n, ...]` that all ranks hold."""
        opened = new_process_grid(channel) if isinstance(channel, Mesh) else channel
        rank, sizes = opened.world.rank, balanced_split(len(tensor), opened.world.size)
        part = tensor[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
        return cls.from_cpu_tensor(part, opened, name=name, wire=wire)

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
            values: `[len(gid), ...]`, which may be memory-mapped: with replication 1 it is
                not copied.

        Raises:
            ValueError: on all ranks, if sizes or dtypes do not fit.
        """
        row_group, codec = self._row_group(group), self._codecs.get(name, self._codec)
        add_rows(row_group, name, values, self.channel, codec)
        if len(row_group.cached_gid):
            self._fill_cache(row_group, [name])

    @property
    def attributes(self) -> list[tuple[Group, str]]:
        """Returns the (group, name) of each attribute."""
        return [
            (group, name)
            for group, row_group in self._row_groups.items()
            for name in row_group.values
        ]

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
            fetcher = self.fetcher({row_group.group: names}, exact=True)
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

    def fetch_unique(self, wanted: Wanted, attrs: Attrs = None) -> dict[Group, Pool]:
        """Returns the distinct rows that `fetch` would, not yet in the order of the ids."""
        if not self._row_groups:
            return {}
        wanted, problem = self._checked(wanted)
        return self.fetcher(attrs)(wanted, problem)

    def _checked(self, wanted: Wanted) -> tuple[Wanted, str | None]:
        groups, ranks = list(self._row_groups.values()), self.channel.world.size
        return problem_of(groups, wanted, ranks)

    def fetcher(self, attrs: Attrs = None, exact: bool = False) -> Fetch:
        """Returns a `Fetch` of attributes, widest numbers first so that most are aligned."""
        columns = []
        for number, (group, row_group) in enumerate(self._row_groups.items()):
            for name in row_group.values if attrs is None else attrs.get(group, ()):
                if name not in row_group.values:
                    raise KeyError(
                        f"got attribute {name!r}, but group {group!r} has "
                        f"{list(row_group.values)}; take one of them"
                    )
                key = random.fold(_DRAWN, zlib.crc32(f"{group}.{name}".encode()))
                columns.append(FetchedColumn(number, row_group, name, exact, key))
        columns.sort(key=lambda column: -column.values.element_size())
        return Fetch(self.channel, list(self._row_groups.values()), columns)

    # Price ----------------------------------------------------------------------------

    def travelling(self, wanted: Wanted, attrs: Attrs = None) -> dict[Group, list[int]]:
        """Returns the distinct rows of each group that a fetch would receive from each block.

        Nothing is sent. Raises ValueError for an invalid id.
        """
        asks, problem = self.fetcher(attrs).plan(*self._checked(wanted))
        if problem is not None:
            raise ValueError(problem)
        return {
            group: list(ask.counts)
            for group, ask in zip(self._row_groups, asks, strict=True)
        }

    def price(self, want: Rates, asked: Rates, attrs: Attrs = None) -> dict[str, Price]:
        """Returns the price of one fetch, by operation of the ledger.

            plan        8 bytes per word:  groups + 1 words from each other rank
            fetch_ids   4 (8 above 2^31 ids):  a word for each row asked of this rank
            fetch_rows  1:  the bytes of each row that this rank wants

        Args:
            want: rows of each group from each rank of the column: `travelling` here.
            asked: rows of each group that each rank wants of this one.
            attrs: as for `fetch`.
        """
        fetcher, axis = self.fetcher(attrs), self.channel.row
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

    def _add_ranges(self, group: Group, sizes: Sequence[int]) -> None:
        """Adds a group whose rows are in consecutive ranges, rank by rank."""
        rank, size = self.channel.world.rank, len(sizes)
        start = sum(sizes[:rank])
        gid = torch.arange(start, start + sizes[rank])
        owner = torch.arange(size).repeat_interleave(torch.tensor(sizes))
        self.add_group(group, gid, sum(sizes), Partition.from_owner(owner, size))

    def __repr__(self) -> str:
        there = {
            group: list(row_group.values)
            for group, row_group in self._row_groups.items()
        }
        blocks, c = self.channel.row.size, self.channel.replication
        return f"DistFeatureStore({there}, {blocks} blocks x {c})"


def _is_share(part: Any) -> bool:
    return isinstance(part.get("edge_index"), DistEdgeIndex)


def _row_cut(part: Any) -> Iterator[tuple[Group, str, DistTensor]]:
    """Yields the attributes of one store of a Data that have a row per node or edge."""
    key = part._key
    edges = part.edge_index.edges if _is_share(part) else None
    for name, value in part.items():
        if not is_rows(value) or not value.rows.whole:
            continue
        if isinstance(key, tuple):
            yield key, name, value
        elif value.rows.partition is not None:
            yield (NODES if key is None else key), name, value
        elif edges is not None and value.rows.same_as(edges):
            yield EDGES, name, value


# Which rows are cached -----------------------------------------------------------------


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


def num_cached_rows(size: float, total: int) -> int:
    """Returns the number of rows of a cache whose size is a count, or a fraction of all."""
    whole = isinstance(size, int) and not isinstance(size, bool)
    if whole and size >= 0:
        return min(int(size), total)
    if isinstance(size, float) and 0 <= size <= 1:
        return round(size * total)
    raise ValueError(
        f"cache={size!r} must be a number of rows (an int), or a fraction of all rows "
        "(a float from 0.0 to 1.0); give one of these"
    )


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
