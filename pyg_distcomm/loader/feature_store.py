"""Stores rows sharded over ranks behind PyG's FeatureStore: fetches, caches and prices them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, HeteroData, TensorAttr

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import ProcessGrid, new_process_grid
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.consistency import check_alike, naming, on_all_ranks
from pyg_distcomm.comm.ledger import Price, balanced_split, exchange_price
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.halo.codecs import Codec, Plain, RngKey, codec_of
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.kernels.core_ops import as_bytes
from pyg_distcomm.loader.batcher import take_rows
from pyg_distcomm.loader.device_placement import num_cached_rows
from pyg_distcomm.loader.fetch import (
    EDGES,
    NODES,
    Column,
    Fetch,
    Group,
    Pool,
    RowGroup,
    Wanted,
    message_bytes,
)
from pyg_distcomm.partition.partition import Partition, out_of_range
from pyg_distcomm.sampling.row_service import Index
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex


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


def lengths(rows: Tensor | np.ndarray, axis: collectives.Axis) -> list[int]:
    """Returns the number of rows on each rank of an axis; collective."""
    return [count for (count,) in collectives.all_gather_counts([len(rows)], axis)]


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


def ids_of(asked: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Returns the ids of a request, without their owners, on the CPU."""
    ids = asked[0] if isinstance(asked, tuple) else asked
    return torch.as_tensor(ids).cpu()


def id_vector(given: Any, wanted: str, masks: bool = False) -> Tensor:
    """Returns ids as a vector, or a mask where there may be one; or raises ValueError."""
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{wanted}, got {given!r}") from None
    if ids.shape == (0,) and (ids.is_floating_point() or not masks):  # an empty list
        return ids.long()
    whole = not (ids.is_floating_point() or ids.is_complex())
    if ids.dim() != 1 or not whole or (ids.dtype == torch.bool and not masks):
        raise ValueError(f"{wanted}, got {list(ids.shape)} of {ids.dtype}")
    return ids


def check_range(values: Tensor, end: int, what: str) -> None:
    if (bad := out_of_range(values, end)) is not None:
        raise ValueError(f"{what} must be in 0 .. {end - 1}, got {bad}")


def out_degrees(data: Any) -> dict[Group, DistTensor]:
    """Returns the out-degree of each node, float64 `[n_i]` by type; collective."""
    found: dict[Group, Any] = {}
    for part in filter(_is_share, data.stores):
        edges = part.edge_index
        key = (NODES, NODES) if part._key is None else part._key
        for group, rows in ((key[0], edges.sources), (key[-1], edges.nodes)):
            none = torch.zeros(len(rows), dtype=torch.float64)
            found.setdefault(group, DistTensor.wrap(none, rows))
        one = torch.ones(len(edges.edges), dtype=torch.float64)
        one = DistTensor.wrap(one, edges.edges)
        found[key[0]] = found[key[0]].scatter_add(0, edges[0].cpu(), one)
    if not found:
        raise TypeError(
            "got data without a partitioned edge_index, by which nodes are ranked; give a "
            "share from pdc.partition"
        )
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
    names = given if isinstance(given, Mapping) else ()
    unknown = [one for one in names if one not in there]
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


Attrs: TypeAlias = Mapping[Group, Sequence[str]] | None
Rates: TypeAlias = Mapping[Group, Sequence[int]]


_UNSET = TensorAttr().index


class RowsAttr(TensorAttr):
    """Extends PyG's TensorAttr, which cannot compare an index that is an array."""

    def is_set(self, key: str) -> bool:
        """Returns whether a field is set."""
        return getattr(self, key) is not _UNSET


class DistFeatureStore(FeatureStore):
    """Stores rows of features, sharded over the ranks, and returns any of them by id.

    A group is None for the nodes of a graph of one type, `EDGES` for its edges, a node
    type, or an edge type. With P ranks and replication c, block i holds what ranks
    i c .. i c + c - 1 own; a rank fetches from the P/c ranks of its column.

    `fetch` is collective over a column, as is all that reads rows in PyG's way:
    `store[group, name, ids]`, `get_tensor`; `store[ids]` where there is one attribute.
    Ids differ by rank, all other arguments are equal on all ranks, and only one thread may
    call at a time. An index of None means all rows, in order. Methods that add or remove
    attributes are collective over all ranks.

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
        self, channel: ProcessGrid | Mesh, *, wire: Wire | Mapping[str, Wire] = None
    ) -> None:
        super().__init__(RowsAttr)
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
            for group, name, value in row_cut(part)
        }
        check_alike({"attributes": list(found)}, store.channel.world)
        check_names("wire", wire, [name for _, name in found])
        for (group, name), value in found.items():
            if group not in store._row_groups:
                store._add_group_like(group, value)
            store.add(group, name, value.to_local())
        if cache:
            for group, score in row_scores(data, ranking).items():
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
        """Joins the parts `[n_q, ...]` that the ranks hold, in rank order; collective.

        That is what quiver-feature's DistTensor does; its `tensor[ids]` and `shape` are
        there too.
        """
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
        gid, world = gid.detach().cpu().long(), self.channel.world
        problem = None
        if len(gid) and not bool((gid[1:] > gid[:-1]).all()):
            problem = f"the ids of group {group!r} must ascend"
        elif len(gid) and not 0 <= int(gid[0]) <= int(gid[-1]) < total:
            problem = f"the ids of group {group!r} must lie in [0, {total})"
        sizes = lengths(gid, world)
        if problem is None and sum(sizes) != total:
            problem = f"the ranks own {sizes} rows of group {group!r}, not all {total}"
        collectives.agree(problem, world)
        every = self._in_block(gid).sort().values
        self._row_groups[group] = RowGroup(group, Index(every, total), gid, owners)

    def _in_block(self, rows: Tensor) -> Tensor:
        """Gathers the rows that the ranks of this block own, rank by rank; collective."""
        axis = self.channel.col
        return collectives.all_gather_rows(rows, lengths(rows, axis), axis, "build")

    def add(self, group: Group, name: str, values: Tensor | np.ndarray) -> None:
        """Adds one attribute from this rank's own rows; collective over all ranks.

        Args:
            group: a group of `add_group`.
            name: the name of the attribute.
            values: `[len(gid), ...]`, which may be memory-mapped: with replication 1 it is
                not copied.

        Price: the rows of a block that other ranks of it own, as bytes.

        Raises:
            ValueError: on all ranks, if sizes or dtypes do not fit.
        """
        row_group, codec = self._row_group(group), self._codecs.get(name, self._codec)
        own, world = row_group.own, self.channel.world
        with on_all_ranks(world), naming(f"attribute {name!r}"):
            rows = as_rows(values)
            if len(rows) != len(own):
                raise ValueError(
                    f"has {len(rows)} rows, but {len(own)} ids of group {group!r} are "
                    "owned here"
                )
        check_alike({"attribute": (name, rows.dtype, tuple(rows.shape[1:]))}, world)
        shape = math.prod(rows.shape[1:]), rows.dtype
        smaller = codec.wire_bytes(1, *shape) < Plain().wire_bytes(1, *shape)
        codec = codec if rows.is_floating_point() and smaller else Plain()
        if not isinstance(codec, Plain):
            collectives.agree(_codec_problem(name, rows, codec), world)
        if self.channel.col.size > 1:
            order = torch.argsort(self._in_block(own))
            flat = as_bytes(rows).view(len(rows), shape[0] * rows.element_size())
            every = self._in_block(flat).view(-1).view(rows.dtype)
            rows = take_rows(every.view(len(order), *rows.shape[1:]), order)
        row_group.columns[name] = Column(row_group, name, rows, codec)
        if len(row_group.cached_gid):
            self._fill_cache(row_group, [name])

    @property
    def groups(self) -> list[Group]:
        """Returns the groups of the store."""
        return list(self._row_groups)

    def total(self, group: Group) -> int:
        """Returns the number of rows of a group over all ranks."""
        return self._row_group(group).index.total

    def learn_owners(self, group: Group) -> Partition:
        """Finds the owners of all ids of a group, so that rows can be fetched by id alone.

        Collective over a column the first time; later calls return what is known.
        Returns a partition over ranks that names the first rank of each block as the owner.
        Price: the ids of all other blocks. It holds one byte per id, up to 256 ranks.
        """
        row_group, axis = self._row_group(group), self.channel.row
        if row_group.owners is None:
            gid = row_group.index.gid
            counts = lengths(gid, axis)
            every = collectives.all_gather_rows(gid, counts, axis, "build")
            block = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            owner = torch.empty(row_group.index.total, dtype=torch.int64)
            owner[every] = block * self.channel.replication
            row_group.owners = Partition.from_owner(owner, self.channel.world.size)
        return row_group.owners

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
        count = num_cached_rows(size, row_group.index.total)
        local = score.to_local() if isinstance(score, DistTensor) else score
        local = _own_rows(row_group, torch.as_tensor(local).cpu())
        row_group.cached_gid = top_scoring_ids(local, row_group.own, count, world)
        for column in row_group.columns.values():
            column.cached = None
        self._fill_cache(row_group, list(row_group.columns))

    def _fill_cache(self, row_group: RowGroup, names: Sequence[str]) -> None:
        """Fetches the cached rows of some attributes; collective over a column."""
        _, here = row_group.index.places(row_group.cached_gid)
        away = row_group.cached_gid[~here]
        row_group.cached = Index(away[:0], 0)
        self.learn_owners(row_group.group)
        if len(row_group.cached_gid):
            fetcher = self.fetcher({row_group.group: names})
            exact = [replace(c, codec=Plain()) for c in fetcher.columns]
            pools = replace(fetcher, columns=exact)({row_group.group: away})
            for name, rows in pools[row_group.group].take(away).items():
                row_group.columns[name].cached = rows
        row_group.cached = Index(away, row_group.index.total)

    def _row_group(self, group: Group) -> RowGroup:
        if group not in self._row_groups:
            raise KeyError(
                f"got group {group!r}, but the store has {list(self._row_groups)}; take one of "
                "them"
            )
        return self._row_groups[group]

    def _column(self, group: Group, name: Any) -> Column:
        """Returns an attribute, or raises KeyError if there is none."""
        columns = self._row_group(group).columns
        if name not in columns:
            raise KeyError(
                f"got attribute {name!r}, but group {group!r} has {list(columns)}; take one of "
                "them"
            )
        return columns[name]

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
        return self.fetcher(attrs)(*self._checked(wanted))

    def _checked(self, wanted: Wanted) -> tuple[Wanted, str | None]:
        """Returns what is wanted as vectors of int64, and an error for what cannot be."""
        found: dict[Group, Any] = {}
        try:
            for group, asked in wanted.items():
                what, total = f"ids of group {group!r}", self.total(group)
                given, owner = asked if isinstance(asked, tuple) else (asked, None)
                must = f"a vector of integers (or in an index, a mask of {total})"
                ids = id_vector(given, f"{what} must be {must}").cpu().long()
                found[group] = ids
                check_range(ids, total, what)
                if owner is not None:
                    owner = torch.as_tensor(owner).cpu().long()
                    if owner.shape != ids.shape:
                        raise ValueError(
                            f"owners must be given for each of {len(ids)} ids, got "
                            f"{list(owner.shape)}"
                        )
                    size = self.channel.world.size
                    check_range(owner, size, f"owners of group {group!r}")
                    found[group] = ids, owner
        except (KeyError, ValueError) as error:
            return {}, str(error.args[0])
        return found, None

    def fetcher(self, attrs: Attrs = None) -> Fetch:
        """Returns a `Fetch` of attributes, widest numbers first so that most are aligned."""
        columns = [
            self._column(group, name)
            for group, row_group in self._row_groups.items()
            for name in (row_group.columns if attrs is None else attrs.get(group, ()))
        ]
        columns = list(dict.fromkeys(columns))  # each once, if asked for twice
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
        return {group.group: list(ask.counts) for group, ask in asks.items()}

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
        columns, axis = self.fetcher(attrs).columns, self.channel.row
        ones, none = [1] * axis.size, [0] * axis.size

        def sizes(rates: Rates) -> tuple[list[int], list[int]]:
            by_group = {
                g: [*rates.get(g.group, none)] for g in self._row_groups.values()
            }
            ids = [sum(one) for one in zip(*by_group.values(), strict=True)]
            return ids, message_bytes(columns, by_group, axis.size)

        (ids_out, brought), (ids_in, sent) = sizes(want), sizes(asked)
        return {
            "plan": exchange_price(ones, ones, axis.rank, len(self._row_groups) + 1),
            "fetch_ids": exchange_price(ids_out, ids_in, axis.rank, 1),
            "fetch_rows": exchange_price(sent, brought, axis.rank, 1),
        }

    # A tensor of rows, where there is one attribute -----------------------------------

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (Tensor, np.ndarray, slice, list)):
            return self.get_tensor(*self._single(), key)
        return super().__getitem__(key)

    @property
    def shape(self) -> torch.Size:
        """Returns the shape of all rows of the only attribute."""
        return torch.Size(self._size(*self._single()))

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the only attribute."""
        return self._column(*self._single()).values.dtype

    def size(self, dim: int) -> int:
        """Returns one size of the shape."""
        return self.shape[dim]

    def _single(self) -> tuple[Group, str]:
        there = [(a.group_name, a.attr_name) for a in self.get_all_tensor_attrs()]
        if len(there) != 1:
            raise ValueError(
                f"got a store with the attributes {there}, but it is one tensor only with one "
                "attribute; use store[group, name, ids]"
            )
        return there[0]

    # PyG's interface of a feature store -----------------------------------------------

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        group, name = attr.group_name, attr.attr_name
        if attr.index is not None:
            raise ValueError(
                "got part of an attribute, but a store takes whole attributes; give index=None"
            )
        if group not in self._row_groups:
            self._add_group_like(group, tensor)
        row_group = self._row_group(group)
        if isinstance(tensor, DistTensor):
            tensor = tensor.to_local()
        self.add(group, name, _own_rows(row_group, tensor))
        return True

    def _add_group_like(self, group: Group, tensor: Any) -> None:
        """Adds the group of a first attribute: with its rows, or in equal blocks."""
        if isinstance(tensor, DistTensor):
            rows = tensor.rows
            self.add_group(group, rows.gid, rows.total, rows.partition)
            return
        size = self.channel.world.size
        self._add_ranges(group, balanced_split(tensor.shape[0], size))

    def _add_ranges(self, group: Group, sizes: Sequence[int]) -> None:
        """Adds a group whose rows are in consecutive ranges, rank by rank."""
        rank, size = self.channel.world.rank, len(sizes)
        start = sum(sizes[:rank])
        gid = torch.arange(start, start + sizes[rank])
        owner = torch.arange(size).repeat_interleave(torch.tensor(sizes))
        self.add_group(group, gid, sum(sizes), Partition.from_owner(owner, size))

    def _get_tensor(self, attr: TensorAttr) -> Any:
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Any]:
        """Reads attributes in one fetch for each set of ids of a group."""
        found: list[Any] = [None] * len(attrs)
        left = dict(enumerate(attrs))
        while left:
            index: dict[Group, Any] = {}
            names: dict[Group, list[str]] = {}
            some = {}
            for k, attr in left.items():
                if attr.index is index.setdefault(attr.group_name, attr.index):
                    names.setdefault(attr.group_name, []).append(attr.attr_name)
                    some[k] = attr
            rows = self._read(index, names)
            for k, attr in some.items():
                found[k] = rows[attr.group_name][attr.attr_name]
                del left[k]
        return found

    def _read(
        self, index: dict[Group, Any], names: dict[Group, list[str]]
    ) -> dict[Group, dict[str, Tensor]]:
        wanted = {}
        for group, asked in index.items():
            for name in names[group]:
                total = self._column(group, name).group.index.total
            self.learn_owners(group)
            wanted[group] = _ids(asked, total)
        rows = self.fetch(wanted, names)
        for group, asked in index.items():
            if isinstance(asked, int):  # one row, without its dimension
                rows[group] = {name: value[0] for name, value in rows[group].items()}
            elif isinstance(asked, Tensor) and not asked.is_cpu:
                rows[group] = {n: v.to(asked.device) for n, v in rows[group].items()}
        return rows

    def update_tensor(self, tensor: Any, *args: Any, **kwargs: Any) -> bool:
        """Replaces the values of an attribute; on an error it keeps its old values."""
        attr = self._tensor_attr_cls.cast(*args, **kwargs)
        self._column(attr.group_name, attr.attr_name)
        return bool(self.put_tensor(tensor, attr))

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        column = self._column(attr.group_name, attr.attr_name)
        del column.group.columns[column.name]
        return True

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        total, *rest = self._size(attr.group_name, attr.attr_name)
        if isinstance(attr.index, int):
            return tuple(rest)
        return (len(_ids(attr.index, total)), *rest)

    def _size(self, group: Group, name: Any) -> tuple[int, ...]:
        column = self._column(group, name)
        return (column.group.index.total, *column.values.shape[1:])

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Returns the attributes of the store."""
        return [
            RowsAttr(group, name)
            for group, row_group in self._row_groups.items()
            for name in row_group.columns
        ]

    def __repr__(self) -> str:
        there = {group: list(rows.columns) for group, rows in self._row_groups.items()}
        blocks, c = self.channel.row.size, self.channel.replication
        return f"DistFeatureStore({there}, {blocks} blocks x {c})"


def _own_rows(row_group: RowGroup, values: Any) -> Any:
    """Returns this rank's own rows, of values with a row for every id of the group."""
    if len(values) == row_group.index.total != len(row_group.own):
        return values[row_group.own]
    return values


def _ids(index: Any, total: int) -> Any:
    """Returns the ids of an index of PyG's; all ids for None."""
    if index is None:
        return torch.arange(total)
    if isinstance(index, int):
        return torch.tensor([index])
    if isinstance(index, slice):
        return torch.arange(total)[index]
    try:
        ids = torch.as_tensor(index)
    except (TypeError, ValueError):
        return index  # refused later, on all ranks together
    mask = ids.dtype == torch.bool and ids.shape == (total,)  # others are refused later
    return ids.nonzero().view(-1) if mask else ids


def _is_share(part: Any) -> bool:
    return isinstance(part.get("edge_index"), DistEdgeIndex)


def row_cut(part: Any) -> Iterator[tuple[Group, str, DistTensor]]:
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
