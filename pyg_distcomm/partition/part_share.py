"""Extracts, holds and merges parts of a graph, of one type of nodes and edges or of several.

[Note: several types] The nodes of all types are numbered type after type, in the order of the
HeteroData, and so are its edges. The ids of a type are then a contiguous range, and a part that
lists its nodes and edges in ascending order has those of each type side by side. The key of an
attribute names its type and the attribute, as "author,writes,paper,time" does. A Data has one
type of nodes and one of edges, None, and its attributes have their names as keys.
"""

from __future__ import annotations

import copy
import itertools
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_distcomm import kernels
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.partition import (
    Counts,
    Grid,
    Owner,
    Partition,
    PartitionReport,
    check_edge_index,
    pieces,
    plain_edges,
    report,
)

EdgeType = tuple[str, str, str]
NodeOrEdgeType = str | EdgeType
Level = Literal["node", "edge"]
NODE_NAMES = ("x", "y", "pos", "batch")
EDGE_NAMES = ("edge_attr", "edge_weight", "edge_type")
# an attribute has a row per node, per edge, or none
Kind = Literal["node", "edge", "graph"]
OwnersByType = Mapping[str, Partition | Owner]


def ends_of(kind: EdgeType | None) -> tuple[str | None, str | None]:
    """Returns the node types of sources and targets."""
    return (None, None) if kind is None else (kind[0], kind[2])


@dataclass(frozen=True)
class GraphTypes:
    """Holds the types of a graph, and the number of nodes and edges of each type by part.

    nodes  by node type, the nodes of each part; of a Data the type is None
    edges  by edge type, the edges of each part; as well
    halo   by edge type, the distinct sources of each part that other parts own; empty if
           they were not counted
    """

    nodes: dict[Any, Counts]
    edges: dict[Any, Counts]
    halo: dict[Any, Counts] = field(default_factory=dict)

    @property
    def typed(self) -> bool:
        """Returns whether these are the types of a HeteroData, and not of a Data."""
        return None not in self.nodes

    def key(self, kind: NodeOrEdgeType | None, name: str) -> str:
        """Returns the key of an attribute of a type; see [Note: several types]."""
        steps = [] if kind is None else [kind] if isinstance(kind, str) else [*kind]
        quoted = (quote(step, safe=" ") for step in (*steps, name))
        return ",".join(quoted) if self.typed else name

    def split(self, key: str) -> tuple[NodeOrEdgeType | None, str]:
        """Returns the type and the name in a key; raises ValueError for no such key."""
        *steps, name = map(unquote, key.split(",")) if self.typed else [key]
        if not steps:
            return None, name
        if len(steps) == 1:
            return steps[0], name
        if len(steps) != 3:
            raise ValueError(f"{key!r} names no attribute of a node or edge type")
        return (steps[0], steps[1], steps[2]), name

    def of(self, level: Level) -> Mapping[Any, Counts]:
        """Returns the counts of nodes or of edges."""
        return self.nodes if level == "node" else self.edges

    def ranges(self, level: Level) -> dict[Any, tuple[int, int]]:
        """Returns the range [begin, end) of the ids of each type."""
        counts = self.of(level)
        ends = [0, *itertools.accumulate(map(sum, counts.values()))]
        return dict(zip(counts, itertools.pairwise(ends), strict=True))

    def slices(self, level: Level, part: int) -> dict[Any, slice]:
        """Returns the slice of each type in a part's list of nodes or edges."""
        counts = self.of(level)
        ends = [0, *itertools.accumulate(each[part] for each in counts.values())]
        pairs = itertools.pairwise(ends)
        return {kind: slice(*pair) for kind, pair in zip(counts, pairs, strict=True)}

    def merged(self, new_part: list[int], num_parts: int) -> GraphTypes:
        """Returns the counts of fewer parts; `new_part` has the new part of each old one."""

        def summed(counts: Counts) -> Counts:
            totals = [0] * num_parts
            for part, count in zip(new_part, counts, strict=True):
                totals[part] += count
            return tuple(totals)

        return GraphTypes(
            {kind: summed(counts) for kind, counts in self.nodes.items()},
            {kind: summed(counts) for kind, counts in self.edges.items()},
        )


def types_to_meta(types: GraphTypes) -> dict[str, Any]:
    """Returns the entry of META.json that describes the types of a HeteroData."""
    edges = [
        {"type": [*kind], "edges": [*counts], "halo_rows": [*types.halo[kind]]}
        for kind, counts in types.edges.items()
    ]
    return {"nodes": {kind: [*n] for kind, n in types.nodes.items()}, "edges": edges}


def types_from_meta(meta: Mapping[str, Any]) -> GraphTypes:
    """Reads the types from a checked META.json."""
    names = "nodes", "edges", "halo_rows"
    if "types" not in meta:
        return GraphTypes(*({None: tuple(meta["report"][name])} for name in names))
    nodes, edges = meta["types"]["nodes"], meta["types"]["edges"]

    def by_type(what: str) -> dict[EdgeType, Counts]:
        return {tuple(each["type"]): tuple(each[what]) for each in edges}

    by_node = {kind: tuple(counts) for kind, counts in nodes.items()}
    return GraphTypes(by_node, *map(by_type, names[1:]))


@dataclass(frozen=True, eq=False)
class PartShare:
    """Holds one part of a graph as it is stored on disk (n_i nodes, e_i edges).

    node_gid   [n_i] int64, ascending
    edge_gid   [e_i] int64: columns of the whole graph's edge_index
    edge_index [2, e_i] int64, node ids of the whole graph; targets are this part's
    node, edge attributes with a row per own node or edge
    graph      attributes of the whole graph: tensors and plain values
    types      its types, by which ids and keys are ordered: see [Note: several types]
    edge_hash  the hash of its edges that `read_ids` found; None if they were not read
    in_degree  [n_i] int32, the edges into each node that it counted; None likewise
    """

    part: int
    partition: Partition
    num_edges_global: int
    node_gid: Tensor
    edge_gid: Tensor
    edge_index: Tensor
    node: dict[str, Tensor]
    edge: dict[str, Tensor]
    graph: dict[str, Any]
    types: GraphTypes
    edge_hash: int | None = None
    in_degree: Tensor | None = None

    def gid_of(self, level: Level, key: str) -> Tensor:
        """Returns the ids of the nodes or edges to which an attribute's rows belong."""
        gid = self.node_gid if level == "node" else self.edge_gid
        return gid[self.types.slices(level, self.part)[self.types.split(key)[0]]]

    def __repr__(self) -> str:
        kinds = ""
        if self.types.typed:
            kinds = f"{len(self.types.nodes)} node types, {len(self.types.edges)} edge types, "
        return (
            f"PartShare({self.part}/{self.partition.num_parts}, {kinds}"
            f"{self.node_gid.numel()} of {self.partition.num_nodes} nodes, "
            f"{self.edge_gid.numel()} of {self.num_edges_global} edges, "
            f"node={list(self.node)}, edge={list(self.edge)}, graph={list(self.graph)})"
        )


def merged(parts: list[PartShare], num_parts: int) -> PartShare:
    """Merges consecutive parts into one of `num_parts` parts: see `load_partition`.

    As in any part, rows ascend by node id, and edges by edge id.

    Args:
        parts: the parts from floor(k N / P) to floor((k + 1) N / P) - 1 of N, for some k.
        num_parts: the new number of parts, P.
    """
    first = parts[0]
    before = first.partition.num_parts
    if num_parts == before:
        return first
    place = torch.arange(before)
    cuts = torch.tensor([k * before // num_parts for k in range(1, num_parts)])
    new_part = torch.bucketize(place, cuts, right=True) if num_parts > 1 else 0 * place
    owner = new_part[first.partition.owner.long()]
    edge_gid, edge_order = torch.cat([part.edge_gid for part in parts]).sort()

    def rows(level: Level) -> dict[str, Tensor]:
        found = {}
        for key in getattr(first, level):
            order = torch.cat([part.gid_of(level, key) for part in parts]).argsort()
            held = [getattr(part, level)[key] for part in parts]
            found[key] = torch.cat(held)[order]
        return found

    return PartShare(
        part=int(new_part[first.part]),
        partition=Partition.from_owner(owner, num_parts, first.partition.num_nodes),
        num_edges_global=first.num_edges_global,
        node_gid=torch.cat([part.node_gid for part in parts]).sort()[0],
        edge_gid=edge_gid,
        edge_index=torch.cat([part.edge_index for part in parts], 1)[:, edge_order],
        node=rows("node"),
        edge=rows("edge"),
        graph=first.graph,
        types=first.types.merged(new_part.tolist(), num_parts),
    )


def labels_own_index(store: Any, name: str) -> bool:
    """Returns whether an attribute has a row for each column of its own `[2, k]` index.

    An example is edge_label with edge_label_index, in a Data or one of its stores.
    """
    index = f"{name}_index"
    if index not in store or index in ("edge_index", "num_nodes"):
        return False
    shape, own = (tuple(getattr(store[key], "shape", ())) for key in (index, name))
    return len(shape) == 2 and shape[0] == 2 and own[:1] == shape[1:]


def batch_kind(data: Any, store: Any, name: str) -> Kind | None:
    """Returns the kind of an attribute of a PyG Batch, or None if it is not known.

    `store` is the Batch, or one of its stores. The kind follows from the way in which PyG
    joined the attribute, graph after graph; it is not known for data that are no Batch.
    """
    try:
        every = data._slice_dict or {}
    except (AttributeError, KeyError):  # no Batch
        return None
    key = getattr(store, "_key", None)
    slices = every if key is None else every.get(key, {})
    found, value = slices.get(name), store[name]
    if not isinstance(found, Tensor) or found.dim() != 1 or not hasattr(value, "shape"):
        return None
    if not len(value.shape) or len(value) != int(found[-1]):
        return None  # it has been replaced since
    own: dict[Kind, Any] = {"node": store.get("ptr"), "edge": slices.get("edge_index")}
    fits = [k for k, v in own.items() if v is not None and torch.equal(found, v.cpu())]
    single = torch.equal(found, torch.arange(len(found)))  # a row for each graph
    if len(fits) > 1 and not (single and name not in (*NODE_NAMES, *EDGE_NAMES)):
        return "edge" if "edge" in name else "node"  # as PyG's `is_node_attr`
    return fits[0] if len(fits) == 1 else "graph"


def read_ids(share: PartShare, here: Path) -> tuple[list[str], PartShare]:
    """Checks the ids of a part, hashes its edges and counts its in-degrees, in one pass.

    Returns the problems, each with its file below `here`, and the share with the rest.
    """
    names = "node_gid.npy", "edge_gid.npy", "edge_index.npy"
    nodes, edges, ends = (here / name for name in names)
    found, total, last = {}, 0, share.edge_gid[:0]
    own, count = share.partition.gids(share.part), share.partition.num_nodes
    if not torch.equal(share.node_gid, own):
        found[nodes] = f"not the nodes that owner.npy gives to {share.part}"
    into = kernels.memory.advise(torch.empty(count, dtype=torch.int32)).zero_()
    arrays = share.edge_gid, *share.edge_index
    for gid, source, target in zip(*map(pieces, arrays), strict=True):
        if not _within(gid, share.num_edges_global):
            found.setdefault(edges, "an edge id is out of range")
        elif not bool((torch.cat([last, gid[:-1]]) < gid[1 - len(last) :]).all()):
            found.setdefault(edges, "edge ids do not ascend")
        if not (_within(source, count) and _within(target, count)):
            found[ends] = "a node id is out of range"
            break
        kernels.count_ids(target, into)
        total += int(kernels.hash_edges(source, target, gid))
        last = gid[-1:].clone()
    degree = into[own]
    if ends not in found and int(degree.sum()) != len(share.edge_gid):
        found[ends] = "a target is owned by another part"
    problems = [f"{file}: {problem}" for file, problem in found.items()]
    if share.types.typed and ends not in found:
        problems += _type_problems(share, edges, ends)
    return problems, replace(share, edge_hash=total, in_degree=degree)


def _within(ids: Tensor, count: int) -> bool:
    if not len(ids):
        return True
    low, high = torch.aminmax(ids)  # `out_of_range` would drop the piece from memory
    return int(low) >= 0 and int(high) < count


def _type_problems(share: PartShare, edges: Path, file: Path) -> Iterator[str]:
    """Yields a problem for each edge type with edges or ends of another type."""
    types = share.types
    nodes, ids = types.ranges("node"), types.ranges("edge")
    for kind, place in types.slices("edge", share.part).items():
        name, gid = ".".join(kind), share.edge_gid[place]
        if bool(((gid < ids[kind][0]) | (gid >= ids[kind][1])).any()):
            yield f"{edges}: an edge of {name} is of another type"
        for end, of_type in enumerate((kind[0], kind[2])):
            begin, after = nodes[of_type]
            ends = share.edge_index[end, place]
            if bool(((ends < begin) | (ends >= after)).any()):
                yield (f"{file}: an edge of {name} has an end that is no {of_type}")


class DividedGraph:
    """Divides a graph in memory into the parts of a partition.

    Args:
        data: a Data, or a HeteroData that `check_hetero` accepts.
        partition: the owners of its nodes, type after type.
        kinds: the kind of each attribute, by the key of its store and its name.

    Attributes:
        types: the nodes and edges of each type, by part.
    """

    def __init__(
        self,
        data: Data | HeteroData,
        partition: Partition,
        kinds: Mapping[tuple[Any, str], Kind],
    ) -> None:
        self.partition, self._data, self._kinds = partition, data, kinds
        self._begin, self._edge_owner = _first_ids(data), {}
        for store in data.edge_stores:
            ends = _numbered(store, self._begin)
            check_edge_index(ends, partition.num_nodes)
            self._edge_owner[store._key] = partition.owner[ends[1].long()]
        ranges = itertools.pairwise([*self._begin.values(), partition.num_nodes])
        of_nodes = (partition.owner[slice(*pair)] for pair in ranges)
        nodes = dict(zip(self._begin, of_nodes, strict=True))
        parts = partition.num_parts
        counts = (
            {key: Partition.from_owner(own, parts).sizes for key, own in owners.items()}
            for owners in (nodes, self._edge_owner)
        )
        self.types = GraphTypes(*counts)

    def part(self, part: int) -> PartShare:
        """Extracts one part: its nodes of each type, and the edges into them."""
        types, node_gid = self.types, self.partition.gids(part)
        ids: dict[Any, Tensor] = {}
        for key, place in types.slices("node", part).items():
            ids["node", key] = node_gid[place] - self._begin[key]
        edge_gid, ends = [torch.empty(0).long()], [torch.empty(2, 0).long()]
        for store in self._data.edge_stores:
            own = (self._edge_owner[store._key] == part).nonzero().view(-1)
            ids["edge", store._key] = own
            edge_gid.append(own + types.ranges("edge")[store._key][0])
            ends.append(_numbered(store, self._begin, own))
        rows: dict[str, Any] = {"node": {}, "edge": {}, "graph": {}}
        stores = {store._key: store for store in self._data.stores}
        for (key, name), kind in self._kinds.items():
            value = stores[key][name]
            if kind != "graph":
                value = value.detach()[ids[kind, key].to(value.device)]
            rows[kind][types.key(key, name)] = value
        return PartShare(
            part=part,
            partition=self.partition,
            num_edges_global=sum(map(sum, types.edges.values())),
            node_gid=node_gid,
            edge_gid=edge_gid[-1] if len(edge_gid) == 2 else torch.cat(edge_gid),
            edge_index=ends[-1] if len(ends) == 2 else torch.cat(ends, 1),
            **rows,
            types=types,
        )

    def report(self, grid: Grid | None = None) -> PartitionReport:
        """Counts the rows that parts own and exchange, with one exchange for each edge type.

        A node that is a source of two edge types counts in both exchanges.
        """
        train, each = train_mask_of_all(self._data), {}
        for store in self._data.edge_stores:
            ends = _numbered(store, self._begin)
            each[store._key] = report(ends, self.partition, train, grid)
        self.types = replace(
            self.types, halo={key: one.halo_rows for key, one in each.items()}
        )
        if len(each) == 1:
            return next(iter(each.values()))
        figures = report(torch.empty(2, 0).long(), self.partition, train, grid)
        sums: dict[str, Any] = {
            name: tuple(map(sum, zip(*counts, strict=True)))
            for name in ("edges", "halo_rows", "send_rows")
            if (counts := [getattr(one, name) for one in each.values()])
        }
        cut_edges = sum(one.edge_cut for one in each.values())
        return replace(figures, edge_cut=cut_edges, **sums)


def with_tensors(data: Any) -> Any:
    """Returns a graph of which NumPy's arrays are tensors.

    Raises:
        TypeError: for a sparse tensor, of which ranks would hold rows, an array that is no
            numbers, and numbers in a list where rows of nodes or edges are wanted. Other
            lists stay whole on all ranks.
    """
    data = copy.copy(data)
    for store in data.stores:
        of = "data" if store._key is None else f"data[{store._key!r}]"
        for name, value in list(store.items()):
            if isinstance(value, np.ndarray):
                store[name] = _tensor(f"{of}.{name}", value)
            elif isinstance(value, Tensor) and value.layout != torch.strided:
                raise TypeError(
                    f"{of}.{name} is {value.layout}, wanted a dense tensor: its to_dense(), "
                    "or, of edges, an edge_index (or, of a Data, an adj_t in its place)"
                )
            elif _lists_rows(data, store, name, value):
                raise TypeError(
                    f"{of}.{name} is a {type(value).__name__}, wanted a tensor with a row for "
                    "each node or edge: torch.tensor of it; or rename it to keep it as it is"
                )
    return data


def _tensor(name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"{name} is an array of {array.dtype}, wanted numbers or booleans; delete or "
            "convert it, or, to have it whole on all ranks, give it as a list"
        )
    array = np.asanyarray(array, array.dtype.newbyteorder("="), order="C")
    if array.flags.writeable:
        return torch.from_numpy(array)
    if isinstance(array.base, mmap.mmap) and getattr(array, "filename", None):
        at = array.offset, array.shape  # of the file, which writing does not change
        return torch.from_numpy(np.memmap(array.filename, array.dtype, "c", *at))
    return torch.from_numpy(array.copy())


def _lists_rows(data: Any, store: Any, name: str, value: Any) -> bool:
    """Returns whether a list of numbers has the name of what has rows."""
    first = value
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    whole = store._key is None and isinstance(data, HeteroData)
    if whole or first is value or not isinstance(first, (int, float, Tensor)):
        return False
    count = getattr(store, "num_nodes", None)
    return has_rows(name) or (name in NODE_NAMES and len(value) == count)


def has_rows(name: str) -> bool:
    """Returns whether the name of an attribute is that of one with rows."""
    return name in ("x", *EDGE_NAMES) or name.endswith("_mask")


def check_hetero(data: HeteroData) -> None:
    """Raises for a HeteroData that cannot be partitioned, naming the type."""
    if not data.node_stores:
        raise ValueError(
            "the HeteroData has no nodes of any type; give it a store with num_nodes or x"
        )
    for store in data.node_stores:
        if store.num_nodes is None:
            raise ValueError(
                f"node type {store._key!r}: num_nodes is not known; set "
                f"data[{store._key!r}].num_nodes"
            )
    for store in data.edge_stores:
        source, _, target = store._key
        edges = store.get("edge_index")
        if not isinstance(edges, Tensor):
            raise TypeError(
                f"edge type {store._key}: edge_index is {type(edges).__name__}, wanted a "
                "tensor [2, num_edges], also in place of an adj_t"
            )
        if missing := {source, target} - {*data.node_types}:
            raise ValueError(
                f"edge type {store._key}: the graph has no node type {missing.pop()!r}, but "
                f"{data.node_types}; give it num_nodes or x"
            )
        sizes = [int(data[end].num_nodes) for end in (source, target)]
        try:
            check_edge_index(edges, max(sizes))
            for end in (0, 1):
                check_edge_index(edges[end].expand(2, -1), sizes[end])
        except (TypeError, ValueError) as error:
            raise type(error)(f"edge type {store._key}: {error}") from None


def cut_graph(
    data: Data | HeteroData,
    parts: int,
    method: Any,
    seed: int = 0,
    refine: bool = False,
    grid: Grid | None = None,
) -> Partition:
    """Partitions the nodes of all types: as one graph, or by the owners that are given.

    As one graph, "ldg" and "metis" balance nodes, in-edges, train nodes, and the nodes of each
    type.

    Args:
        data: a Data, or a HeteroData that `check_hetero` accepts.
        parts: their number.
        method: the name of a cutter; the owners of the nodes of a Data, or a Partition of them;
            or the owners of a HeteroData by node type.
        seed, refine: see `cut`.
        grid: as there, of a Data.

    Returns:
        The owners of all nodes, type after type.
    """
    typed = isinstance(data, HeteroData)
    if isinstance(method, Mapping) and typed:
        if refine:
            raise ValueError(
                "refine=True improves a cut by a method, but got owners by node type; give "
                "the name of a method, or leave refine out"
            )
        return owners_of_all(data, parts, method)
    if not isinstance(method, str) and typed:
        raise TypeError(
            "the owners of a HeteroData are a dictionary of one vector for each node "
            f"type, got {type(method).__name__}"
        )
    sizes = [int(store.num_nodes) for store in data.node_stores]
    if isinstance(method, Partition):
        if (method.num_nodes, method.num_parts) != (sum(sizes), parts):
            raise ValueError(
                f"{method} does not fit {sum(sizes)} nodes on {parts} ranks; cut this graph"
            )
        if not refine:
            return method
        method = method.owner
    several = len(sizes) > 1 and any(sizes)
    kinds, train = torch.arange(len(sizes)), train_mask_of_all(data)
    return cut(
        edges_of_all(data),
        sum(sizes),
        parts,
        method,
        seed=seed,
        train_mask=train if bool(train.any()) else None,
        refine=refine,
        grid=None if typed else grid,
        kinds=kinds.repeat_interleave(torch.tensor(sizes)) if several else None,
    )


def owners_of_all(data: HeteroData, parts: int, owners: OwnersByType) -> Partition:
    """Joins the owners that are given by node type."""
    sizes = {store._key: int(store.num_nodes) for store in data.node_stores}
    if set(owners) != set(sizes):
        raise ValueError(
            f"owners are given for the node types {sorted(owners)}, but the graph has "
            f"{sorted(sizes)}; give one vector for each"
        )
    found = []
    for name, count in sizes.items():
        own = owners[name]
        if not isinstance(own, Partition):
            own = Partition.from_owner(own, parts, count)
        if own.num_parts != parts or own.num_nodes != count:
            raise ValueError(
                f"owners of node type {name!r} are {own}, wanted {count} nodes on {parts} "
                "parts; give one owner for each node"
            )
        found.append(own.owner)
    return Partition.from_owner(torch.cat(found), parts, sum(sizes.values()))


def edges_of_all(data: Data | HeteroData) -> Tensor:
    """Returns the edges of all types, between nodes that are numbered type after type."""
    begin = _first_ids(data)
    edges = [_numbered(store, begin) for store in data.edge_stores]
    if len(edges) == 1:
        return edges[0]
    return torch.cat([torch.empty(2, 0).long(), *edges], 1)


def train_mask_of_all(data: Data | HeteroData) -> Tensor:
    """Returns the training nodes of all types."""
    masks = [torch.empty(0, dtype=torch.bool)]
    for store in data.node_stores:
        mask, count = store.get("train_mask"), int(store.num_nodes)
        known = isinstance(mask, Tensor) and mask.dtype == torch.bool
        known = known and mask.shape == (count,)
        masks.append(mask.cpu() if known else torch.zeros(count, dtype=torch.bool))
    return torch.cat(masks)


def _first_ids(data: Data | HeteroData) -> dict[Any, int]:
    """Returns the id of the first node of each type."""
    sizes = (int(store.num_nodes) for store in data.node_stores)
    begins = itertools.accumulate(sizes, initial=0)
    return {s._key: first for s, first in zip(data.node_stores, begins, strict=False)}


def _numbered(store: Any, begin: dict[Any, int], own: Tensor | None = None) -> Tensor:
    """Returns edges of a type, or `own`, between nodes that are numbered type after type."""
    edges = plain_edges(store.edge_index).cpu()
    edges = edges if own is None else edges[:, own]
    if store._key is None:
        return edges
    source, _, target = store._key
    return edges.long() + torch.tensor([[begin[source]], [begin[target]]])
