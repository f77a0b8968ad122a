"""Partitions a Batch of which no edge_index joins all nodes: pairs of graphs, and point clouds.

[Note: rows of a Batch] PyG joins graphs attribute by attribute, and keeps where the rows of
each graph begin. Attributes that begin at the same places have rows of the same things, as
nodes or points; an index such as `edge_index_s` refers to what begins where its ids do, by
`__inc__`. So such a Batch is read as a HeteroData with a type for each of these.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from pyg_distcomm.graph.partition_data_types import UNEVEN, in_given_class, pack_evenly

Begins = tuple[int, ...]  # where the rows of each graph begin, and where the last ends


class TypedBatch:
    """Reads a Batch as a HeteroData, and joins a share of that; see [Note: rows of a Batch].

    Args:
        batch: a Batch of Data, without edge_index and adj_t.
    """

    def __init__(self, batch: Any) -> None:
        self.batch, self.typed = batch, HeteroData()
        self.types: dict[str, Any] = {}  # of each attribute that has rows
        self._nodes: dict[Begins, str] = {}  # the names of types of nodes
        self._begins = _begins(batch)
        indices = {}
        for name, begin in self._begins.items():
            if (ends := _ends(batch, name)) is not None:
                indices[name] = begin
                source, target = map(self._node_type, ends)
                self._put(name, (source, name, target), "edge_index")
        if isinstance(ptr := batch.get("ptr"), Tensor):
            self._put("batch", self._node_type(tuple(ptr.tolist())))
        for name, begin in self._begins.items():
            if name in indices or batch.__cat_dim__(name, batch[name]) != 0:
                continue
            edges = [other for other in indices if indices[other] == begin]
            if edges and ("edge" in name or begin not in self._nodes):
                alike = max(edges, key=lambda other: _common_ending(other, name))
                self._put(name, self.types[alike])
            elif not _one_each(begin) or name.split("_")[0] in ("x", "pos"):
                self._put(name, self._node_type(begin))
            if name in self.types and f"{name}_batch" in batch:  # by `follow_batch`
                self._put(f"{name}_batch", self.types[name])
        for name in self._names():
            if name not in self.types:
                self.typed[name] = batch[name]

    @staticmethod
    def fits(data: Any) -> bool:
        """Returns whether data is a Batch without edges between all of its nodes."""
        edges = "edge_index", "adj_t", "train_pos_edge_index"
        joined = isinstance(data, Batch) and isinstance(data, Data)
        return joined and all(data.get(name) is None for name in edges)

    def _names(self) -> list[str]:
        return [name for name in self.batch.to_dict() if name in self.batch]

    def _node_type(self, begin: Begins) -> str:
        if begin not in self._nodes:
            self._nodes[begin] = name = f"rows {len(self._nodes)}"
            self.typed[name].num_nodes = begin[-1]
        return self._nodes[begin]

    def _put(self, name: str, kind: Any, stored: str = "") -> None:
        self.types[name] = kind
        self.typed[kind][stored or name] = self.batch[name]

    def owners(self, parts: int) -> Any:
        """Returns the owners of whole graphs, by type; "metis" if these are not balanced."""
        begins = [
            *self._nodes,
            *(self._begins[kind[1]] for kind in self.typed.edge_types),
        ]
        sizes = torch.tensor(begins).view(len(begins), -1).diff()
        owner, loads = pack_evenly(sizes.sum(0), parts)
        if max(loads) * parts > UNEVEN * sum(loads):
            return "metis"
        nodes = zip(self._nodes.values(), sizes, strict=False)
        return {name: owner.repeat_interleave(size) for name, size in nodes}

    def joined(self, share: HeteroData) -> Any:
        """Returns the share of the HeteroData as a Batch."""
        out = Data()
        for name in self._names():
            kind = self.types.get(name)
            edges = isinstance(kind, tuple) and kind[1] == name
            held = share if kind is None else share[kind]
            out[name] = held["edge_index" if edges else name]
        return in_given_class(out, self.batch)


def _begins(batch: Any) -> dict[str, Begins]:
    """Returns where the rows of each graph begin, by attribute."""
    found = {}
    for name, begin in (batch._slice_dict or {}).items():
        joined = isinstance(begin, Tensor) and isinstance(batch.get(name), Tensor)
        if joined and begin.dim() == 1:  # not a sparse matrix
            found[name] = tuple(begin.tolist())
    return found


def _ends(batch: Any, name: str) -> tuple[Begins, Begins] | None:
    """Returns where the sources and targets of an index `[2, k]` begin; None of no index."""
    value = batch[name]
    shaped = value.dim() == 2 and len(value) == 2 and not value.is_floating_point()
    if not shaped or batch.__cat_dim__(name, value) != -1:
        return None
    first = batch._inc_dict[name].reshape(batch.num_graphs, -1)
    last = torch.as_tensor(batch.__inc__(name, value)).reshape(1, -1)
    source, target = torch.cat([first, last]).expand(-1, 2).T.tolist()
    return tuple(source), tuple(target)


def _one_each(begin: Begins) -> bool:
    """Returns whether each graph has one row, as a label has."""
    return begin == tuple(range(len(begin)))


def _common_ending(one: str, other: str) -> int:
    pairs = zip(one[::-1], other[::-1], strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
