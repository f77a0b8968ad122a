"""Partitions a Batch, a TemporalData, a HeteroData, and a Data with an adj_t.

The graphs of a Batch stay whole; a TemporalData is sharded into blocks of events; the share of
a HeteroData, whose nodes and edges have types, is assembled from one part. Edges that an op
on a share returned are planned for.

[Note: rows of a Batch] PyG joins graphs attribute by attribute, and keeps where the rows of
each graph begin. Attributes that begin at the same places have rows of the same things, as
nodes or points; an index such as `edge_index_s` refers to what begins where its ids do, by
`__inc__`. So such a Batch is read as a HeteroData with a type for each of these.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch, Data, HeteroData, TemporalData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import check_alike, naming, sampled_digest
from pyg_distcomm.comm.failure import needing
from pyg_distcomm.comm.ledger import balanced_split
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo.policy import check_link
from pyg_distcomm.kernels.memory import MemoryCap
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.partition.part_share import PartShare, ends_of
from pyg_distcomm.partition.partition import Partition, PartitionReport
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows, local_at
from pyg_distcomm.sharded.edges import DistEdgeIndex

PROCESS.rules["wraps"] |= {EdgeIndex, Index}  # which unwrap the rows that they hold

# Batches and events ------------------------------------------------------------------

UNEVEN = 1.1  # the most work of a rank over the mean at which graphs stay whole


def graph_owners(data: Any, parts: int) -> tuple[Any, float]:
    """Returns a part for each node, the same for a whole graph, and the imbalance.

    The graph with most nodes and edges goes first, each to the part with least of both.

    Args:
        data: a Batch, or what has its `batch` vector in each store of nodes.
        parts: their number.

    Returns:
        Owners `[n]`, of a HeteroData a dictionary of them by node type; and the work of the
        busiest part over the mean.

    Raises:
        ValueError: if there is no batch vector, or it is not one graph for each node.
    """
    stores = data.node_stores
    vectors = {store._key: _graph_of(store) for store in stores}
    count = max((int(v.max()) + 1 for v in vectors.values() if len(v)), default=0)
    work = torch.zeros(count, dtype=torch.int64)
    for vector in vectors.values():
        work += torch.bincount(vector, minlength=count)
    for store in data.edge_stores:
        target = None if store._key is None or stores[0]._key is None else store._key[2]
        ends = store.edge_index[1].cpu()
        work += torch.bincount(vectors[target][ends], minlength=count)
    part, loads = pack_evenly(work, parts)
    owners = {name: part[vector] for name, vector in vectors.items()}
    uneven = max(loads) * parts / max(sum(loads), 1)
    return owners if isinstance(data, HeteroData) else owners[None], uneven


def default_method(data: Any, parts: int) -> Any:
    """Returns owners of whole graphs if these are balanced; else "metis"."""
    if parts == 1 or not isinstance(data, Batch):
        return "metis"
    try:
        if data.num_graphs < parts:
            return "metis"
        owners, uneven = graph_owners(data, parts)
    except ValueError:  # joined without a batch vector
        return "metis"
    return owners if uneven <= UNEVEN else "metis"


def in_given_class(share: Any, data: Any) -> Any:
    """Returns a share in the class of the data: a Batch, or a script's class."""
    if not isinstance(data, Batch):
        if data.__class__ not in (Data, HeteroData):
            # its own would store it
            object.__setattr__(share, "__class__", data.__class__)
        return share
    out: Any = Batch(_base_cls=data.__class__.__bases__[-1])
    for store in share.stores:
        mine, whole = out, data
        if store._key is not None:
            mine, whole = out[store._key], data[store._key]
        for name, value in store.items():
            mine[name] = value
        if hasattr(whole, "_num_nodes"):  # of each graph
            mine._num_nodes = whole._num_nodes
    for name in ("_num_graphs", "_slice_dict", "_inc_dict"):
        if hasattr(data, name):
            setattr(out, name, getattr(data, name))
    return out


def _graph_of(store: Any) -> Tensor:
    """Returns the graph `[n]` of each node of a store."""
    vector = store.get("batch")
    if not isinstance(vector, Tensor) or vector.shape != (int(store.num_nodes),):
        raise ValueError(
            "method 'graphs' keeps graphs whole, and needs data.batch, the graph of each "
            f"node, as torch_geometric.data.Batch has it; got {vector!r}"
        )
    if len(vector) and int(vector.min()) < 0:
        raise ValueError(
            f"data.batch has the graph {int(vector.min())}; give 0 or more"
        )
    return vector.cpu().long()


def pack_evenly(work: Tensor, parts: int) -> tuple[Tensor, list[int]]:
    """Assigns pieces of work greedily, the largest first, to the least loaded part."""
    heap = [(0, part) for part in range(parts)]
    owner = torch.empty_like(work)
    for piece in work.argsort(descending=True, stable=True).tolist():
        load, part = heapq.heappop(heap)
        owner[piece] = part
        heapq.heappush(heap, (load + int(work[piece]), part))
    return owner, [load for load, _ in heap]


def shard_events(data: TemporalData, mesh: Mesh) -> TemporalData:
    """Shards events into blocks; attributes with one number per event stay whole.

    So `msg` is a DistTensor, and `src`, `dst` and `t` stay whole, by which all ranks find the
    events of a batch. On one rank all stay whole.

    Raises:
        TypeError: on all ranks, if they are cut already. ValueError: if ranks have others.
    """
    held = {name: x for name, x in data.to_dict().items() if isinstance(x, Tensor)}
    cut = next((name for name, x in held.items() if isinstance(x, DistTensor)), None)
    problem = f"{cut} is cut already; partition takes all events" if cut else None
    collectives.agree(problem, mesh.world, TypeError)
    told = {n: f"{list(x.shape)}, hash {sampled_digest(x):x}" for n, x in held.items()}
    with naming("partition needs the same events on all ranks"):
        check_alike(told, mesh.world)
    if mesh.size == 1:
        return data
    out = copy.copy(data)
    rows = event_rows(data.num_events, mesh)
    for name, value in held.items():
        if value.dim() > 1 and len(value) == rows.total:
            own = value.detach()[rows.gid.to(value.device)]
            out[name] = DistTensor.wrap(own, rows)
    return out


def event_rows(count: int, mesh: Mesh) -> Rows:
    """Returns the rows of equal blocks of events, in order."""
    block = Rows.blocks(count, mesh)
    sizes = torch.tensor(balanced_split(count, mesh.size))
    owner = torch.arange(mesh.size).repeat_interleave(sizes)
    return Rows(block.gid, count, mesh, Partition.from_owner(owner, mesh.size, count))


# Graphs of several types -------------------------------------------------------------


def links_of(link: Any, kinds: Iterable[Any]) -> dict[Any, Any]:
    """Returns the link of each edge type.

    Args:
        link: one for all; or a dictionary of links by edge type, "author__writes__paper", or
            the name of a relation, "writes". Types without one exchange exactly.
        kinds: the edge types of a HeteroData; None is that of a Data.

    Raises:
        TypeError: for what is no link. ValueError: for a name that no edge type has, or two
            that name one edge type.
    """
    kinds = list(kinds)
    several = isinstance(link, Mapping) and None not in kinds
    for one in link.values() if several else [link]:
        check_link(one)
    if not several:
        return dict.fromkeys(kinds, link)
    found: dict[Any, Any] = dict.fromkeys(kinds)
    names: dict[Any, Any] = {}
    for name, one in link.items():
        meant = [kind for kind in found if name in (kind, "__".join(kind), kind[1])]
        if not meant:
            raise ValueError(
                f"link has {name!r}, but the edge types are {list(found)}; name one, or the "
                "relation in its middle"
            )
        for kind in meant:
            if kind in names:
                raise ValueError(
                    f"link gives edge type {kind} two links, by {names[kind]!r} and {name!r}; "
                    "leave one out"
                )
            names[kind], found[kind] = name, one
    return found


def report_of_share(data: Data | HeteroData) -> PartitionReport:
    """Returns the figures of the partition of a share, over all types; collective."""
    kinds = [store.get("edge_index") for store in data.edge_stores]
    if not kinds or not all(isinstance(edges, DistEdgeIndex) for edges in kinds):
        raise TypeError(
            "partition_report takes what pdc.partition returned, with edges"
        )
    mine = torch.zeros(6, dtype=torch.int64)
    for edges in kinds:
        here = edges.topology.locals
        away = int((here.source_lid >= len(edges.sources)).sum())
        sent = sum(here.halo.send_counts)
        mine += torch.tensor([0, len(edges.edges), 0, away, here.halo.num_ghosts, sent])
    for store in data.node_stores:
        mask = store.get("train_mask")
        if isinstance(mask, DistTensor) and mask.dim() == 1:
            mine[2] += int(mask.to_local().sum())
    mine[0] = sum(map(len, rows_of_types(data).values()))
    world = kinds[0].nodes.mesh.world
    each = collectives.all_gather_counts(mine.tolist(), world)
    nodes, edges, trains, cut, halo, send = zip(*each, strict=True)
    return PartitionReport(nodes, edges, trains, sum(cut), halo, send)


def assemble(
    share: PartShare,
    mesh: Mesh,
    oblivious: bool,
    links: dict[Any, Any],
    memory: int | str | None = None,
) -> Any:
    """Returns this rank's share: each type's nodes, and the edges into them; collective."""
    types, parts, owners = share.types, share.partition.num_parts, share.partition
    cap = None if memory is None else MemoryCap(memory)
    if cap is not None:
        cap.keep(*share.node.values(), *share.edge.values(), share.edge_index)
    out: Any = HeteroData() if types.typed else Data()
    if "x" in share.node and not types.typed:
        out.x = None  # the first attribute, as PyG prints it
    nodes: dict[Any, Rows] = {}
    places = types.slices("node", share.part)
    for name, (begin, end) in types.ranges("node").items():
        own, gid = owners, share.node_gid
        if types.typed:
            own = Partition.from_owner(owners.owner[begin:end].clone(), parts)
            own = replace(own, union=owners)
            gid = gid[places[name]] - begin
            out[name].num_nodes = end - begin
        nodes[name] = Rows(gid, end - begin, mesh, own, memory=cap)
    rows: dict[Any, Rows] = {}
    places = types.slices("edge", share.part)
    for kind, (begin, end) in types.ranges("edge").items():
        source, target = ends_of(kind)
        gid, ends = share.edge_gid, share.edge_index  # of a Data as they are: in files
        if types.typed:
            first = [[types.ranges("node")[name][0]] for name in (source, target)]
            gid, ends = gid[places[kind]] - begin, ends[:, places[kind]]
            ends = ends - torch.tensor(first, device=ends.device)
        of_nodes = nodes[target] if source == target else None
        edges = Rows(gid, end - begin, mesh, None, nodes=of_nodes)
        how: Any = {"oblivious": oblivious, "sources": nodes[source]}
        made = DistEdgeIndex.build(ends, nodes[target], edges, **how)
        if share.edge_hash is not None and not types.typed:
            read = share.edge_hash, share.in_degree
            edges.derived["counted"] = made.topology.source_gid, *read
        if not types.typed:
            nodes[target].derived["link"] = links[kind]  # of edges that scripts derive
        (out[kind] if types.typed else out).edge_index = made.with_link(links[kind])
        rows[kind] = edges
    for held, spread in ((share.node, nodes), (share.edge, rows), (share.graph, None)):
        for key, value in held.items():
            kind, name = types.split(key)
            part = value if spread is None else DistTensor.wrap(value, spread[kind])
            (out if kind is None else out[kind])[name] = part
    if not types.typed:
        out.num_nodes = owners.num_nodes
    return out


def explaining_memory(data: Any, mesh: Mesh) -> Any:
    """Returns a context that explains an out-of-memory error while a share is made."""

    def size() -> int:
        if isinstance(data, Path):
            files = [data] if data.is_file() else data.rglob("*")
            return sum(f.stat().st_size for f in files if f.is_file()) // mesh.size
        held = [v for store in data.stores for v in store.values()]
        return sum(v.nbytes for v in held if isinstance(v, Tensor)) // mesh.size

    edges = [] if isinstance(data, Path) else data.edge_stores
    device = edges[0].edge_index.device if edges else torch.device("cpu")
    return needing("a rank's share of the graph", size, mesh.world.watch, device)


# Data with an adj_t ------------------------------------------------------------------


def from_sparse(data: Any) -> tuple[Any, Tensor | None]:
    """Returns a Data with an edge_index in place of its adj_t, and the adj_t's values."""
    if not isinstance(data, Data) or data.edge_index is not None:
        return data, None
    value, count, sparse = None, data.num_nodes, data.get("adj_t")
    edge_index = data.get("train_pos_edge_index")  # as PyG splits edges
    if sparse is not None:
        edge_index, value = coo_of(sparse)
        value = torch.empty(0) if value is None else value
    data = copy.copy(data)
    data.pop("adj_t", None)
    data.edge_index, data.num_nodes = edge_index, count
    return data, value


def with_sparse(share: Data, weight: Tensor | None) -> Data:
    """Adds the adj_t of the whole graph to a share."""
    if weight is not None:
        edges: Any = share.edge_index
        share.adj_t = edges.carrying(weight if len(weight) else None, matrix=True)
    return share


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
            # unless each graph has one row, as a label has
            elif begin != (*range(len(begin)),) or name.split("_")[0] in ("x", "pos"):
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


def _common_ending(one: str, other: str) -> int:
    pairs = zip(one[::-1], other[::-1], strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def with_planned_edges(data: Any) -> Any:
    """Returns a share whose edges are planned for, also those that an op returned.

    They are with the owners of their targets, and so are the attributes that have a row for
    each edge. Collective, if there are such edges.
    """
    out, rows = data, rows_of_types(data)
    for store in data.edge_stores:
        edges, key = store.get("edge_index"), store._key
        if not isinstance(edges, DistTensor) or isinstance(edges, DistEdgeIndex):
            continue
        typed = isinstance(key, tuple)
        source, target = (rows.get(key[0]), rows.get(key[2])) if typed else (None, None)
        target = target if typed else edges.rows.nodes or rows.get(key)
        if target is None or (typed and source is None):
            continue
        if edges.rows.nodes is target and not typed:
            made = DistEdgeIndex.of_ends(edges[0], edges[1])
        else:
            made = DistEdgeIndex.cut(edges.full_tensor(), target, source)
        out = copy.copy(data) if out is data else out
        mine = out[key] if typed else out
        for name, value in store.items():
            if is_rows(value) and store.is_edge_attr(name):
                local = local_at(value, made.edges, 0)
                mine[name] = DistTensor.wrap(local, made.edges)
        mine.edge_index = made
    return out


def rows_of_types(data: Any) -> dict[Any, Rows]:
    """Returns the rows of each node type that an attribute or edge type of the share has."""
    found: dict[Any, Rows] = {}
    for store in data.edge_stores:
        edges = store.get("edge_index", store.get("adj_t"))
        if isinstance(edges, DistEdgeIndex):
            key = store._key if isinstance(store._key, tuple) else (None, None, None)
            found |= {key[0]: edges.sources, key[2]: edges.nodes}
    for store in data.node_stores:
        for value in store.values():
            if is_rows(value) and value.rows.partition is not None:
                found.setdefault(store._key, value.rows)
    return found
