"""DistFeatureStore: rows of features spread over ranks, fetched by id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from pyg_distcomm import wire as network
from pyg_distcomm.channel import Channel, open_channel
from pyg_distcomm.exchange.codec import Codec, codec_of
from pyg_distcomm.loader.fetch import Fetch, Pool, Wanted, ids_of
from pyg_distcomm.loader.message import Column
from pyg_distcomm.loader.shelf import (
    EDGES,
    NODES,
    Group,
    Shelf,
    add_rows,
    learn_owners,
    make_shelf,
)
from pyg_distcomm.mesh import Mesh
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.rows import Rows
from pyg_distcomm.tensor import DistTensor

Wire: TypeAlias = str | Codec | None
Attrs: TypeAlias = Mapping[Group, Sequence[str]] | None


class DistFeatureStore(FeatureStore):
    """Rows of named attributes of named groups, sharded over the blocks of a channel.

    A group is None for the nodes of a graph of one type, `EDGES` for its edges, a node
    type, or an edge type. With P ranks and replication c, block i holds what ranks
    i c .. i c + c - 1 own; a rank fetches from the P/c ranks of its column.

    `fetch` is collective over a column, as are `store[group, name, ids]` and
    `get_tensor`: ids differ by rank, the rest does not, and one thread at a time calls.
    What adds to the store is collective over all ranks.

    Price: a distinct row that is neither in the block nor in the cache travels once,
    with its id: 1 - c/P of the rows of random ids.
    Differs from [Tripathy24] in fetching each row of a bulk once.

    Args:
        channel: a Channel, for a loader in a thread of its own; or a Mesh, to open one.
        wire: how floating-point rows travel: "fp16", "bf16", "int8", a Codec, a
            dictionary of these by attribute name, or None: as they are. A codec that
            would not make rows smaller is left out.
        folder: where each rank keeps its rows as mapped files, in a folder of its own;
            in memory without it.
    """

    def __init__(
        self,
        channel: Channel | Mesh,
        *,
        wire: Wire | Mapping[str, Wire] = None,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        by_name = wire if isinstance(wire, Mapping) else {}
        self._codecs = {name: codec_of(one) for name, one in by_name.items()}
        self._codec = codec_of(None if isinstance(wire, Mapping) else wire)
        self.channel = open_channel(channel) if isinstance(channel, Mesh) else channel
        rank = self.channel.world.rank
        self._folder = None if folder is None else Path(folder) / f"rank_{rank:05d}"
        self._shelves: dict[Group, Shelf] = {}

    @classmethod
    def from_data(
        cls,
        data: Any,
        channel: Channel | Mesh,
        *,
        wire: Wire | Mapping[str, Wire] = None,
        folder: str | Path | None = None,
    ) -> DistFeatureStore:
        """Takes every attribute with a row per node or per edge of a partitioned graph.

        Args:
            data: a Data or HeteroData of `pdc.partition`.
            channel, wire, folder: as above.

        Raises:
            ValueError: on all ranks, if their attributes differ.
        """
        store = cls(channel, wire=wire, folder=folder)
        found = {
            (group, name): value
            for part in data.stores
            for group, name, value in _row_cut(part)
        }
        names = network.all_gather_object(list(found), store.channel.world)
        if any(one != names[0] for one in names):
            raise ValueError(f"the ranks hold different attributes: {names}")
        for (group, name), value in found.items():
            if group not in store._shelves:
                store._add_group_of(group, value.rows)
            store.add(group, name, value.to_local())
        return store

    @classmethod
    def from_cpu_tensor(
        cls,
        tensor: Tensor | np.ndarray,
        channel: Channel | Mesh,
        *,
        name: str = "x",
        wire: Wire = None,
        folder: str | Path | None = None,
    ) -> DistFeatureStore:
        """Joins the parts `[n_q, ...]` that the ranks hold, in rank order; collective.

        So does `from_cpu_tensor` of quiver-feature: `store[ids]` and `store.shape` are
        those of its DistTensor.
        """
        store = cls(channel, wire=wire, folder=folder)
        world = store.channel.world
        sizes = [row[0] for row in network.all_gather_counts([len(tensor)], world)]
        start = sum(sizes[: world.rank])
        gid = torch.arange(start, start + len(tensor))
        owner = torch.arange(world.size).repeat_interleave(torch.tensor(sizes))
        owners = Partition.from_owner(owner, world.size)
        store.add_group(NODES, gid, sum(sizes), owners)
        store.add(NODES, name, tensor)
        return store

    @classmethod
    def from_replicated(
        cls,
        tensor: Tensor | np.ndarray,
        channel: Channel | Mesh,
        *,
        name: str = "x",
        wire: Wire = None,
        folder: str | Path | None = None,
    ) -> DistFeatureStore:
        """Keeps this rank's block of a tensor `[n, ...]` that all ranks hold."""
        opened = open_channel(channel) if isinstance(channel, Mesh) else channel
        cut = tensor[_block_of(len(tensor), opened)]
        return cls.from_cpu_tensor(cut, opened, name=name, wire=wire, folder=folder)

    def _add_group_of(self, group: Group, rows: Rows) -> None:
        self.add_group(group, rows.gid, rows.total, rows.partition)

    def add_group(
        self, group: Group, gid: Tensor, total: int, owners: Partition | None = None
    ) -> None:
        """Says which rows of a group each rank owns; collective over all ranks.

        Args:
            group: its name.
            gid: ids of the rows of this rank, ascending.
            total: ids lie in [0, total), each on one rank.
            owners: who owns which id, if that is known.

        Raises:
            ValueError: on all ranks, if ids are missing, repeated or out of order.
        """
        self._shelves[group] = make_shelf(group, gid, total, owners, self.channel)

    def add(self, group: Group, name: str, values: Tensor | np.ndarray) -> None:
        """Adds one attribute from this rank's own rows; collective over all ranks.

        Args:
            group: of `add_group`.
            name: of the attribute.
            values: `[len(gid), ...]`, which may be mapped from a file: with replication
                1 and no `folder` it stays where it is.

        Raises:
            ValueError: on all ranks, if sizes or types do not fit.
        """
        codec = self._codecs.get(name, self._codec)
        add_rows(self._shelf(group), name, values, self.channel, codec, self._folder)

    def learn_owners(self, group: Group) -> Partition:
        """Finds who holds which id of a group, so that ids alone can be asked for.

        Collective over a column the first time; nothing if it is known already.
        """
        return learn_owners(self._shelf(group), self.channel)

    # Fetching -------------------------------------------------------------------------

    def fetch(
        self, wanted: Wanted, attrs: Attrs = None
    ) -> dict[Group, dict[str, Tensor]]:
        """Returns rows by id, in the order of the ids; collective over a column.

        Args:
            wanted: ids `[k]` by group, repeats allowed; with the ranks that own them,
                `(ids, owners)`, where the store does not know (edges). A rank may leave
                out groups that others ask for.
            attrs: which attributes to bring of which group, the same on all ranks; all
                of them by default.

        Returns: rows `[k, ...]` on the CPU, by group and name.

        Raises:
            ValueError: on all ranks of the column, if one asks for a bad id.
        """
        pools = self.fetch_unique(wanted, attrs)
        return {
            group: pools[group].take(ids_of(asked).long())
            for group, asked in wanted.items()
        }

    def fetch_unique(self, wanted: Wanted, attrs: Attrs = None) -> dict[Group, Pool]:
        """Returns the distinct rows that `fetch` would, without laying them out."""
        if not self._shelves:
            return {}
        return self._fetcher(attrs)(wanted)

    def _fetcher(self, attrs: Attrs) -> Fetch:
        """Lists what travels, widest numbers first so that most rows lie aligned."""
        columns = []
        for number, (group, shelf) in enumerate(self._shelves.items()):
            for name in shelf.values if attrs is None else attrs.get(group, ()):
                self._known(group, name)
                if name in shelf.values:
                    values, codec = shelf.values[name], shelf.codecs[name]
                    columns.append(Column(number, name, values, codec))
        columns.sort(key=lambda column: -column.values.element_size())
        return Fetch(self.channel, list(self._shelves.values()), columns)

    def _shelf(self, group: Group) -> Shelf:
        if group not in self._shelves:
            raise KeyError(
                f"no group {group!r} in the store; there are {list(self._shelves)}"
            )
        return self._shelves[group]

    def _known(self, group: Group, name: str) -> Shelf:
        shelf = self._shelf(group)
        if name not in shelf.names:
            raise KeyError(
                f"no attribute {name!r} of group {group!r}; there are {shelf.names}"
            )
        return shelf

    # What PyG asks of a feature store -------------------------------------------------

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise NotImplementedError

    def _get_tensor(self, attr: TensorAttr) -> Any:
        raise NotImplementedError

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise NotImplementedError

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        raise NotImplementedError

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Returns what is in the store."""
        return [
            TensorAttr(group, name)
            for group, shelf in self._shelves.items()
            for name in shelf.names
        ]


def _block_of(total: int, channel: Channel) -> slice:
    rank, size = channel.world.rank, channel.world.size
    return slice(rank * total // size, (rank + 1) * total // size)


def _row_cut(part: Any) -> Iterable[tuple[Group, str, DistTensor]]:
    """Yields the attributes of one store of a Data that have a row per node or edge."""
    key = getattr(part, "_key", None)
    edges = getattr(part.get("edge_index"), "edges", None)
    for name, value in part.items():
        if not isinstance(value, DistTensor) or not value.rows.whole:
            continue
        if isinstance(key, tuple):
            yield key, name, value
        elif value.rows.partition is not None:
            yield (NODES if key is None else key), name, value
        elif edges is not None and value.rows.same_as(edges):
            yield EDGES, name, value
