"""Reads the edges of PyG's data objects into the CSC form that sampling kernels take."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import (
    Data,
    FeatureStore,
    GraphStore,
    HeteroData,
    remote_backend_utils,
)
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.data.storage import EdgeStorage
from torch_geometric.utils import to_edge_index

from pyg_distcomm.comm.consistency import naming
from pyg_distcomm.kernels.sample_cpu import check_ids
from pyg_distcomm.kernels.sample_ops import Relation, SampleGraph
from pyg_distcomm.ops.csr import sorted_pairs
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sampling.algebra import offsets
from pyg_distcomm.sharded.edges import DistEdgeIndex

MIN_WEIGHT = 1e-300  # of a positive weight


def check_times(relation: Relation, node_time: Tensor | None) -> None:
    """Raises ValueError for in-edges that do not ascend in time: a search would miss some."""
    time = relation.time
    if time is None and node_time is not None:
        time = node_time[relation.row[:: relation.stride].long()]
    if time is None or time.numel() < 2:
        return
    falls = time[1:] < time[:-1]
    first = relation.colptr[1:-1]
    falls[first[(first > 0) & (first < time.numel())] - 1] = False
    if bool(falls.any()):
        raise ValueError(
            "got is_sorted=True, but the in-edges of a node do not ascend in time; sort the "
            "edges by (target, time), or leave is_sorted out"
        )


def _real_vector(values: Any, name: str) -> Tensor:
    """Returns times or weights as a vector of real numbers."""
    try:
        values = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        kind = type(values).__name__
        raise ValueError(f"'{name}' must hold numbers, got a {kind}") from None
    values = values.squeeze(-1) if values.dim() == 2 else values
    if values.dim() != 1 or values.is_complex():
        got = f"{values.dtype} of shape {list(values.shape)}"
        raise ValueError(f"'{name}' must hold one real number each, got {got}")
    return values


def read_times(time: Tensor, name: str) -> Tensor:
    """Returns times as a contiguous vector, int64 or float64; raises ValueError for NaN."""
    time = _real_vector(time, name)
    if time.is_floating_point():
        if bool(time.isnan().any()):
            raise ValueError(f"'{name}' holds NaN: there is no order to sample by")
        return time.double().contiguous()
    return time.long().contiguous()


def check_names(
    data: Data | HeteroData, time_attr: str | None, weight_attr: str | None
) -> None:
    """Raises, on all ranks alike, for names of no attribute, or of nodes and edges both."""
    if weight_attr is not None and not any(weight_attr in s for s in data.edge_stores):
        there = list(data.keys())
        raise ValueError(
            f"no edges have an attribute '{weight_attr}'; data has {there}"
        )
    if time_attr is None:
        return
    places = [time_attr in store for store in data.stores]
    if not any(places):
        raise ValueError(
            f"The time attribute '{time_attr}' is neither a node-level or edge-level "
            f"attribute; data has {list(data.keys())}"
        )
    if isinstance(data, HeteroData):
        ends = [
            any(time_attr in s for s in stores)
            for stores in (data.node_stores, data.edge_stores)
        ]
        if all(ends):
            raise ValueError(
                f"The time attribute '{time_attr}' holds both node-level and edge-level "
                "information"
            )


def read_weights(weight: Tensor, name: str, whole: bool = True) -> Tensor:
    """Returns weights as a contiguous vector, float32 or float64.

    Raises ValueError for weights that are negative, not finite or too small to divide by,
    and, if they are those of the `whole` graph, if all are zero.
    """
    weight = _real_vector(weight, name)
    weight = weight if weight.dtype == torch.float64 else weight.float()
    bad = ~weight.isfinite() | (weight < 0)
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        got = f"{float(weight[where])} for edge {where}"
        raise ValueError(f"'{name}' holds {got}; weights are finite and not negative")
    tiny = (weight > 0) & (weight < MIN_WEIGHT)  # a draw divides by them
    if bool(tiny.any()):
        raise ValueError(
            f"'{name}' holds {float(weight[tiny][0]):g}; weights must be 0 or at least "
            f"{MIN_WEIGHT:g}: multiply them all by what they need"
        )
    if not bool(weight.sum(dtype=torch.float64).isfinite()):
        raise ValueError(f"weights in '{name}' add up to infinity; divide them all")
    if whole and weight.numel() and not bool((weight > 0).any()):
        raise ValueError(f"all weights in '{name}' are zero, so no edge can be drawn")
    return weight.contiguous()


def _times(features: FeatureStore, name: str | None) -> dict[Any, Tensor]:
    """Returns the times of nodes, or of edges, by type."""
    if name is None:
        return {}
    attrs = [
        copy.copy(a) for a in features.get_all_tensor_attrs() if a.attr_name == name
    ]
    for attr in attrs:
        attr.index = None  # all of it
    found = {
        a.group_name: read_times(t, name)
        for a, t in zip(attrs, features.multi_get_tensor(attrs), strict=True)
    }
    of_nodes = {isinstance(group, str) for group in found}
    if not found or (len(of_nodes) > 1 and None not in found):
        raise ValueError(
            f"time attribute '{name}' must be of node types or of edge types, and of one "
            f"kind only; the feature store has it for {list(found)}"
        )
    return found


Source: TypeAlias = Data | HeteroData | tuple[FeatureStore, GraphStore]
EdgeType = tuple[str, str, str]

# `PROCESS.topologies` caches the relations of edge tensors that are alive, so that loaders
# for training and evaluation share one copy: a list of (options, relation) for each tensor.
# torch's version counter shows edits in place, but not edits through a NumPy array.


@dataclass(frozen=True, eq=False)
class SampledTopology:
    """Holds a graph in the form of the sampling kernels, and the names of its types."""

    graph: SampleGraph  # the graph of the kernels
    # names, in the order of `graph.sizes`; `[None]` if homogeneous
    node_types: list[Any]
    # names, in the order of `graph.relations`, as edges point in the data
    edge_types: list[Any]
    dtype: torch.dtype  # of the ids in the data, and so of those in a minibatch


def read_topology(
    data: Source,
    *,
    time_attr: str | None = None,
    weight_attr: str | None = None,
    is_sorted: bool = False,
    backward: bool = False,
) -> SampledTopology:
    """Reads a graph, with its times and weights if their names are given.

    Price: linear in edges; the result is cached as long as the `edge_index` is alive.

    Raises:
        ValueError: if an attribute is missing or ambiguous, a weight is negative or not
            finite, an id is out of range, or edges are not sorted as `is_sorted` claims.
    """
    if isinstance(data, (Data, HeteroData)):
        _check_whole(data)
        check_names(data, time_attr, weight_attr)
        times = _times_of(data, time_attr)
        return _from_data(data, *times, weight_attr, is_sorted, backward)
    if isinstance(data, tuple) and len(data) == 2:
        return _from_stores(data, time_attr, weight_attr, backward)
    raise TypeError(
        f"got a {type(data).__name__}, wanted a Data, a HeteroData or a pair (FeatureStore, "
        "GraphStore); convert it"
    )


def edges_of(store: Any) -> Tensor:
    """Returns the sources and targets `[2, E]` of a store, also of a sparse matrix."""
    if "edge_index" in store:
        found: Tensor = store.edge_index
        return found
    if "adj_t" in store or "adj" in store:
        adj_t = store.adj_t if "adj_t" in store else store.adj.t()
        return to_edge_index(adj_t)[0].flip(0)
    if isinstance(store, EdgeStorage):  # whose edges have a misspelt name
        raise ValueError(
            f"an edge type holds {sorted(store.keys())}, and no edges; set its edge_index"
        )
    return torch.empty(2, 0, dtype=torch.int64)


def _check_offsets(ids: Tensor, ptr: Tensor, count: int) -> None:
    """Raises ValueError for the offsets of a compressed matrix that do not fit its ids."""
    fits = ptr.numel() == count + 1 and int(ptr[0]) == 0
    if not fits or int(ptr[-1]) != ids.numel() or bool((ptr.diff() < 0).any()):
        raise ValueError(
            f"got {ptr.numel()} offsets of a compressed matrix, wanted {count + 1}, ascending "
            f"from 0 to {ids.numel()} edges; fix them, or num_nodes"
        )


def _check_whole(data: Data | HeteroData) -> None:
    """Raises for a share, and for an edge_index that is no tensor."""
    for store in data.edge_stores:
        edge_index = store.get("edge_index")
        if edge_index is not None and not isinstance(edge_index, Tensor):
            kind = type(edge_index).__name__
            wanted = "a tensor [2, E]; use torch.tensor(edge_index)"
            raise ValueError(f"edge_index is a {kind}, wanted {wanted}")
        if isinstance(store.get("edge_index"), DistEdgeIndex):
            raise TypeError(
                "this graph is a share of pdc.partition, which is sampled by all ranks "
                "together, around nodes: by DistNeighborLoader or DistLayerLoader; for "
                "anything else, pass the whole graph"
            )


def remember(
    edge_index: Tensor,
    data: Data | HeteroData,
    edge_type: EdgeType | None,
    relation: Relation,
) -> None:
    """Caches a relation that was built from an `edge_index` of this graph."""
    sizes = tuple(_size(store_of(data, end).num_nodes) for end in ends_of(edge_type))
    plain = replace(relation, source=0, target=0)
    PROCESS.topologies.setdefault(edge_index, []).append(
        ((edge_index._version, sizes, False, False), plain)
    )


def _from_data(
    data: Data | HeteroData,
    node_time: dict[Any, Tensor],
    edge_time: dict[Any, Tensor],
    weight_attr: str | None,
    is_sorted: bool,
    backward: bool,
) -> SampledTopology:
    node_types, edge_types = [None], [None]
    if isinstance(data, HeteroData):
        node_types, edge_types = data.metadata()
    index = {name: k for k, name in enumerate(node_types)}
    sizes = tuple(_size(store_of(data, name).num_nodes) for name in node_types)
    relations = []
    for edge_type in edge_types:
        source, target = ends_of(edge_type)
        store = store_of(data, edge_type)
        with naming_edge_type(edge_type):
            weight = None if weight_attr is None else store.get(weight_attr)
            weight = None if weight is None else read_weights(weight, str(weight_attr))
            times = node_time.get(source), edge_time.get(edge_type)
            ends = sizes[index[source]], sizes[index[target]]
            relation = _relation(store, ends, *times, weight, is_sorted, backward)
            if backward:
                source, target = target, source
            relations.append(
                replace(relation, source=index[source], target=index[target])
            )
    clocks = tuple(node_time.get(name) for name in node_types)
    ids = [store_of(data, edge_type).get("edge_index") for edge_type in edge_types]
    narrow = bool(ids) and all(e is not None and e.dtype == torch.int32 for e in ids)
    dtype = torch.int32 if narrow else torch.int64
    graph = SampleGraph(sizes, tuple(relations), clocks)
    return SampledTopology(graph, node_types, edge_types, dtype)


def store_of(data: Any, key: Any) -> Any:
    """Returns the store of a type; the data itself where there are none."""
    return data if key is None else data[key]


def ends_of(edge_type: EdgeType | None) -> tuple[Any, Any]:
    return (None, None) if edge_type is None else (edge_type[0], edge_type[2])


def _times_of(
    data: Data | HeteroData, name: str | None
) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
    """Returns the times of nodes and of edges, by type."""
    if name is None:
        return {}, {}
    nodes, edges = data.node_stores, data.edge_stores
    if isinstance(data, Data):  # both of which are its one store
        nodes, edges = (nodes, []) if data.is_node_attr(name) else ([], edges)
    by_node, by_edge = (
        {s._key: read_times(s[name], name) for s in stores if name in s}
        for stores in (nodes, edges)
    )
    return by_node, by_edge


def _from_stores(
    stores: tuple[FeatureStore, GraphStore],
    time_attr: str | None,
    weight_attr: str | None,
    backward: bool,
) -> SampledTopology:
    """Reads a graph of stores, with times by the rules of PyG's own sampler."""
    if weight_attr is not None:
        raise NotImplementedError(
            "'weight_attr' is not supported for (FeatureStore, GraphStore) inputs, whose "
            "edges have no attributes; pass a Data or HeteroData"
        )
    features, store = stores
    edge_attrs = store.get_all_edge_attrs()
    for attr in edge_attrs:
        by_target, size = attr.layout == EdgeLayout.CSC, attr.size
        if attr.layout != EdgeLayout.COO and size is not None:
            ends = store.get_edge_index(attr)
            ids, ptr = ends if by_target else ends[::-1]
            with naming_edge_type(attr.edge_type):
                _check_offsets(ids, ptr, size[1 if by_target else 0])
        if time_attr is None:
            continue
        if attr.layout == EdgeLayout.CSR or not attr.is_sorted:
            raise ValueError(
                "Temporal sampling from a GraphStore requires edges in COO or CSC layout, "
                "sorted by destination, and by time within the edges of a node"
            )
    edge_types = list(dict.fromkeys(attr.edge_type for attr in edge_attrs))
    times = _times(features, time_attr)
    row, col, _ = store.coo()
    if edge_types == [None]:
        ends = torch.stack([row, col]).long()
        data: Any = Data(edge_index=ends, num_nodes=max(edge_attrs[0].size))
        if len(times) > 1:
            raise ValueError(f"more than one group has times: {list(times)}")
        found = {None: next(iter(times.values()))} if times else {}
        # PyG takes an attribute named 'time' as times of nodes, any other as times of edges
        node_time, edge_time = (found, {}) if time_attr == "time" else ({}, found)
    else:
        data = HeteroData()
        names = [a.group_name for a in features.get_all_tensor_attrs()]
        names = [name for name in names if isinstance(name, str)]
        names += [end for s, _, t in edge_types for end in (s, t)]
        for name in dict.fromkeys(names):
            data[name].num_nodes = remote_backend_utils.num_nodes(*stores, name)
        for key in edge_types:
            data[key].edge_index = torch.stack([row[key], col[key]]).long()
        node_time = edge_time = times
    return _from_data(data, node_time, edge_time, None, False, backward)


def _relation(
    store: Any,
    sizes: tuple[int, int],
    node_time: Tensor | None,
    edge_time: Tensor | None,
    weight: Tensor | None,
    is_sorted: bool,
    backward: bool,
) -> Relation:
    """Returns the relation of one store; sources and targets are swapped if backward."""
    _check_length("source nodes", sizes[0], "times", node_time)
    edge_index = edges_of(store)
    # checked before edges are sorted by time: a kernel follows that order
    _check_length("edges", edge_index.size(-1), "times", edge_time)
    built_for = (sizes, is_sorted, backward, node_time, edge_time)
    relation = _from_edges(edge_index, *built_for)
    _check_length("edges", relation.num_edges, "weights", weight)
    if weight is not None or edge_time is not None:
        order = relation.row[1::2].long() if relation.stride == 2 else slice(None)
        relation = replace(
            relation,
            weight=None if weight is None else weight[order].clone(),
            time=None if edge_time is None else edge_time[order].clone(),
        )
    if is_sorted:
        check_times(relation, node_time)
    return relation


def _from_edges(
    edge_index: Tensor,
    sizes: tuple[int, int],
    is_sorted: bool,
    backward: bool,
    node_time: Tensor | None,
    edge_time: Tensor | None,
) -> Relation:
    """Builds the relation of an edge_index, or returns the cached one."""
    clock = edge_time if node_time is None else node_time
    kept = clock is None and not edge_index.is_inference()  # that has no version
    memo = (edge_index._version if kept else 0, sizes, is_sorted, backward)
    if kept:
        for made_for, relation in PROCESS.topologies.get(edge_index, ()):
            if made_for == memo:
                return relation
    edges = edge_index.detach().cpu()
    if isinstance(edges, EdgeIndex):
        edges = edges.as_tensor()
    whole = not (edges.is_floating_point() or edges.is_complex())
    if edges.dim() != 2 or edges.size(0) != 2 or not whole or edges.dtype == torch.bool:
        raise ValueError(
            f"edge_index must be an integer tensor [2, E], got {list(edges.shape)} of "
            f"{edges.dtype}"
        )
    source, target = edges[1 if backward else 0], edges[0 if backward else 1]
    source_size, target_size = sizes[::-1] if backward else sizes
    ends = (source, source_size, "source"), (target, target_size, "target")
    for ids, size, end in ends:
        what, do = f"the {end} nodes of edge_index", "; fix the edges, or num_nodes"
        check_ids(ids, size, what, " nodes", do)
    colptr = offsets(torch.bincount(target, minlength=target_size))
    kind = torch.int32 if max(*sizes, target.numel()) < 2**31 else torch.int64
    if is_sorted:
        if target.numel() and bool((target[1:] < target[:-1]).any()):
            raise ValueError(
                "is_sorted=True, but the edges are not sorted by their "
                f"{'source' if backward else 'target'}; sort them, or leave is_sorted out"
            )
        # checked ids, which the script may change
        row = source.to(kind, copy=True).contiguous()
        relation = Relation(0, 0, colptr, row, 1)
    else:
        when = edge_time if node_time is None else node_time[edges[0].long()]
        order = None if when is None else torch.argsort(when, stable=True)
        pair = sorted_pairs(source, target, None, order, colptr, kind)
        relation = Relation(0, 0, colptr, pair, 2)
    if kept:
        known = PROCESS.topologies.get(edge_index, ())
        known = [one for one in known if one[0][0] == memo[0]]  # of this version
        PROCESS.topologies[edge_index] = [*known, (memo, relation)]
    return relation


def _check_length(of: str, count: int, name: str, values: Tensor | None) -> None:
    if values is not None and values.numel() != count:
        raise ValueError(f"there are {values.numel()} {name} for {count} {of}")


def _size(n: int | None) -> int:
    if n is None:
        raise ValueError("the number of nodes is unknown; set data.num_nodes")
    return int(n)


@contextmanager
def naming_edge_type(edge_type: EdgeType | None) -> Iterator[None]:
    """Adds the edge type to an error of a block."""
    with naming(f"edge type {edge_type}") if edge_type else nullcontext():
        yield
