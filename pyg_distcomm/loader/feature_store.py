"""Implements PyG's FeatureStore over rows that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData, TensorAttr

from pyg_distcomm.comm import collectives as network
from pyg_distcomm.comm.ledger import balanced_split
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.process_grid import ProcessGrid, new_process_grid
from pyg_distcomm.loader.row_group import EDGES as EDGES
from pyg_distcomm.loader.row_group import NODES as NODES
from pyg_distcomm.loader.row_group import Group, lengths, own_rows
from pyg_distcomm.loader.sharded_feature_store import (
    Fanouts,
    RowsAttr,
    ShardedStore,
    Wire,
    inclusion_probabilities,
    out_degrees,
)
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex


class DistFeatureStore(ShardedStore):
    """Stores rows of named attributes of named groups, sharded over the blocks of a channel.

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
        folder: where each rank stores its rows as memory-mapped files, in a folder of its
            own; None keeps them in memory.
    """

    # Constructors ---------------------------------------------------------------------

    @classmethod
    def from_data(
        cls,
        data: Any,
        channel: ProcessGrid | Mesh,
        *,
        wire: Wire | Mapping[str, Wire] = None,
        folder: str | Path | None = None,
        cache: float = 0,
        ranking: str | Tensor | Mapping[Group, Tensor] = "degree",
        num_neighbors: Fanouts = (),
        seeds: DistTensor | Mapping[Group, DistTensor] | None = None,
        batch_size: int = 1,
    ) -> DistFeatureStore:
        """Takes every attribute with a row per node or per edge of a partitioned graph.

        Args:
            data: a Data or HeteroData of `pdc.partition`.
            channel, wire, folder: as above.
            cache: how many rows of nodes of each type every rank caches: a count (int) or a
                fraction (float).
            ranking: which nodes: "degree", those of highest out-degree; "vip", those most
                probable in a minibatch (`inclusion_probabilities`); or a score for each
                node, in a dictionary if there are node types.
            num_neighbors, seeds, batch_size: of the minibatches, for "vip"; seeds are a
                mask such as `data.train_mask`, or masks by node type.

        Raises:
            ValueError: on all ranks, if their attributes differ.
            TypeError: if the data is not a share of `pdc.partition`.
        """
        if not any(_is_share(part) for part in data.stores):
            raise TypeError(
                "got data that is no share; give from_data the share that pdc.partition "
                "returned, or from_replicated a tensor that all ranks hold"
            )
        store = cls(channel, wire=wire, folder=folder)
        found = {
            (group, name): value
            for part in data.stores
            for group, name, value in _row_cut(part)
        }
        names = network.all_gather_object(list(found), store.channel.world)
        if any(one != names[0] for one in names):
            raise ValueError(
                f"got different attributes on the ranks: {names}; give all ranks the same"
            )
        _check_names("wire", wire, [name for _, name in found])
        for (group, name), value in found.items():
            if group not in store._row_groups:
                rows = value.rows
                store.add_group(group, rows.gid, rows.total, rows.partition)
            store.add(group, name, value.to_local())
        if cache:
            scores = _scores(data, ranking, num_neighbors, seeds, batch_size)
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
        folder: str | Path | None = None,
    ) -> DistFeatureStore:
        """Joins the parts `[n_q, ...]` that the ranks hold, in rank order; collective."""
        store = cls(channel, wire=wire, folder=folder)
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
        folder: str | Path | None = None,
    ) -> DistFeatureStore:
        """Keeps this rank's block of a tensor `[n, ...]` that all ranks hold."""
        opened = new_process_grid(channel) if isinstance(channel, Mesh) else channel
        rank, sizes = opened.world.rank, balanced_split(len(tensor), opened.world.size)
        part = tensor[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
        return cls.from_cpu_tensor(part, opened, name=name, wire=wire, folder=folder)

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
        group, name = self._single()
        dtype: torch.dtype = self._group_with(group, name).source(name).dtype
        return dtype

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
        self.add(group, name, own_rows(row_group, tensor))
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
        left = list(range(len(attrs)))
        while left:
            index: dict[Group, Any] = {}
            for k in left:
                index.setdefault(attrs[k].group_name, attrs[k].index)
            now = [k for k in left if attrs[k].index is index[attrs[k].group_name]]
            names = {
                group: [attrs[k].attr_name for k in now if attrs[k].group_name == group]
                for group in index
            }
            rows = self._read(index, names)
            for k in now:
                found[k] = rows[attrs[k].group_name][attrs[k].attr_name]
            left = [k for k in left if k not in now]
        return found

    def _read(
        self, index: dict[Group, Any], names: dict[Group, list[str]]
    ) -> dict[Group, dict[str, Tensor]]:
        wanted = {}
        for group, asked in index.items():
            for name in names[group]:
                row_group = self._group_with(group, name)
            self.learn_owners(group)
            wanted[group] = _ids(asked, row_group.total)
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
        self._group_with(attr.group_name, attr.attr_name)
        return bool(self.put_tensor(tensor, attr))

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        row_group = self._group_with(attr.group_name, attr.attr_name)
        held = (
            row_group.values,
            row_group.codecs,
            row_group.cached_rows,
        )
        for place in held:
            place.pop(attr.attr_name, None)
        return True

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        total, *rest = self._size(attr.group_name, attr.attr_name)
        if isinstance(attr.index, int):
            return tuple(rest)
        return (len(_ids(attr.index, total)), *rest)

    def _size(self, group: Group, name: Any) -> tuple[int, ...]:
        row_group = self._group_with(group, name)
        return (row_group.total, *row_group.source(name).shape[1:])

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Returns the attributes of the store."""
        return [
            RowsAttr(group, name)
            for group, row_group in self._row_groups.items()
            for name in row_group.names
        ]

    def __repr__(self) -> str:
        there = {
            group: row_group.names for group, row_group in self._row_groups.items()
        }
        blocks, c = self.channel.row.size, self.channel.replication
        return f"DistFeatureStore({there}, {blocks} blocks x {c})"


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


def _check_names(what: str, given: Any, there: Sequence[Any]) -> None:
    """Raises ValueError, on all ranks alike, for a dictionary with unknown names."""
    unknown = (
        [one for one in given if one not in there] if isinstance(given, Mapping) else []
    )
    if unknown:
        raise ValueError(
            f"got {what} for {unknown}, but there are only {list(there)}; check the names"
        )


def _scores(
    data: Any,
    ranking: str | Tensor | Mapping[Group, Tensor],
    num_neighbors: Fanouts,
    seeds: DistTensor | Mapping[Group, DistTensor] | None,
    batch_size: int,
) -> Mapping[Group, Tensor]:
    types = data.node_types if isinstance(data, HeteroData) else [NODES]
    if isinstance(ranking, Mapping):
        edges = data.edge_types if isinstance(data, HeteroData) else [EDGES]
        _check_names("ranking", ranking, [*types, *edges])
        return ranking
    if not isinstance(ranking, str):
        if types != [NODES]:
            raise ValueError(
                "got one vector of scores as ranking, but nodes have the types "
                f"{types}; give a dictionary with a vector for each"
            )
        return {NODES: ranking}
    if ranking == "degree":
        return out_degrees(data)
    if ranking != "vip":
        raise ValueError(
            f"ranking={ranking!r} is not known; choose 'degree' or 'vip', or give scores"
        )
    if seeds is None or not num_neighbors:
        raise ValueError(
            "ranking='vip' needs num_neighbors, seeds (a mask such as data.train_mask) "
            "and batch_size"
        )
    masks = seeds if isinstance(seeds, Mapping) else {NODES: seeds}
    return inclusion_probabilities(data, num_neighbors, masks, batch_size)
