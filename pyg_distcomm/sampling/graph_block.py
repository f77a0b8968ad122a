"""Reads the block of a partitioned graph that a rank samples from, or gathers all edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import ProcessGrid
from pyg_distcomm.comm.consistency import on_all_ranks
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.kernels import memory
from pyg_distcomm.kernels.sample_ops import Relation, SampleGraph
from pyg_distcomm.ops.csr import sorted_pairs
from pyg_distcomm.ops.id_plan import IdPlan
from pyg_distcomm.partition.partition import PIECE, Partition, pieces
from pyg_distcomm.sampling.graph_source import (
    SampledTopology,
    check_names,
    check_times,
    ends_of,
    naming_edge_type,
    read_times,
    read_weights,
    store_of,
)
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex


@dataclass(frozen=True, eq=False)
class GraphBlock:
    """Holds the nodes of one block of a 1.5D grid, and the edges into them.

    Rank q of P holds block q // c: the nodes of all ranks q' with q' // c = q // c.
    """

    # type names, and the relations of this block: row i of a relation belongs to node
    # `node_gid[t][i]` of its target type; sources and edges are global ids
    topology: SampledTopology
    node_gid: tuple[Tensor, ...]  # by type, the nodes of the block, ascending
    partitions: tuple[Partition, ...]  # by type, the owner of each node


def is_share(data: Any) -> bool:
    """Returns whether a graph is a share, as `pdc.partition` returns it."""
    if not isinstance(data, (Data, HeteroData)):
        return False
    return any(
        isinstance(store.get("edge_index"), DistEdgeIndex) for store in data.edge_stores
    )


def mesh_of(data: Data | HeteroData) -> Mesh:
    """Returns the ranks that a share belongs to.

    Raises TypeError if some edges are cut over ranks and others are not.
    """
    edges = [s for s in data.edge_stores if "edge_index" in s]
    for store in edges:
        if not isinstance(store.edge_index, DistEdgeIndex):
            key = store._key
            what = "edge_index" if key is None else f"data[{key!r}].edge_index"
            raise TypeError(
                f"{what} is a {type(store.edge_index).__name__}, and other edges are cut over "
                "ranks: put it into the graph before pdc.partition"
            )
    mesh: Mesh = edges[0].edge_index.nodes.mesh
    return mesh


def gathered(data: Data | HeteroData, names: list[str]) -> Any:
    """Returns the edges of a share on every rank, and a few attributes; collective."""
    whole: Any = type(data)()
    for part in data.stores:
        out = store_of(whole, part._key)
        if "num_nodes" in part:
            out.num_nodes = part.num_nodes
        for name, value in part.items():
            if isinstance(value, DistEdgeIndex):
                out[name] = value.full_tensor().contiguous()
            elif isinstance(value, DistTensor) and name in names:
                out[name] = torch.as_tensor(value.full_tensor())
    return whole


def read_block(
    data: Data | HeteroData,
    channel: ProcessGrid,
    *,
    time_attr: str | None = None,
    weight_attr: str | None = None,
    is_sorted: bool = False,
) -> GraphBlock:
    """Gathers the block of this rank from the shares of its members; collective.

    Price: each of the c members receives the edges of the others, 24 bytes each, and
    with times of nodes one exchange of an id and a time for each edge.

    Raises:
        ValueError: on all ranks, if an attribute is missing, or a weight or time wrong.
    """
    mesh = mesh_of(data)
    check_names(data, time_attr, weight_attr)
    stores = {store._key: store for store in data.edge_stores}
    node_types = [None] if isinstance(data, Data) else list(data.node_types)
    index = {name: k for k, name in enumerate(node_types)}
    rows: dict[Any, Any] = {}
    for key, store in stores.items():
        source, target = ends_of(key)
        rows[source], rows[target] = store.edge_index.sources, store.edge_index.nodes
    for name in node_types:  # types without edges
        if name not in rows:
            held = [v.rows for v in data[name].values() if is_rows(v)]
            rows[name] = held[0] if held else _blocks(data[name], mesh)
    partitions = tuple(rows[name].partition for name in node_types)
    node_gid = tuple(_block_nodes(p, channel) for p in partitions)
    relations = []
    for key in stores:
        kinds = index[ends_of(key)[0]], index[ends_of(key)[1]]
        own = _own_edges(data, key, time_attr, weight_attr, mesh, is_sorted)
        relations.append(_relation(own, kinds, node_gid, channel, rows))
    with on_all_ranks(mesh.world):
        for name, relation in zip(stores, relations, strict=True):
            with naming_edge_type(name):
                check_times(relation, None)
    sizes = tuple(p.num_nodes for p in partitions)
    graph = SampleGraph(sizes, tuple(relations), (None,) * len(sizes))
    dtypes = {store.edge_index.dtype for store in stores.values()}
    dtype = torch.int32 if dtypes == {torch.int32} else torch.int64
    topology = SampledTopology(graph, node_types, list(stores), dtype)
    return GraphBlock(topology, node_gid, partitions)


def _blocks(store: Any, mesh: Mesh) -> Rows:
    """Assigns nodes to ranks in equal blocks, for a type without edges and attributes."""
    n = int(store.num_nodes)
    owner = torch.arange(n) * mesh.size // max(n, 1)
    partition = Partition.from_owner(owner, mesh.size, n)
    return Rows(partition.gids(mesh.rank), n, mesh, partition)


@dataclass(frozen=True, eq=False)
class _Edges:
    """Holds edges by id, with the weights and times that sampling needs."""

    gid: Tensor
    source: Tensor
    target: Tensor
    total: int
    weight: Tensor | None
    time: Tensor | None
    sort_by_time: bool
    in_degree: Tensor | None = None  # of this rank's nodes, if it is known


def _own_edges(
    data: Any,
    key: Any,
    time_attr: str | None,
    weight_attr: str | None,
    mesh: Mesh,
    is_sorted: bool,
) -> _Edges:
    """Reads the edges that this rank owns; if a rank finds an error, all ranks raise it."""
    store = store_of(data, key)
    edges: DistEdgeIndex = store.edge_index
    topology = edges.topology
    weight = time = clock = None
    # of the sources, if nodes have times
    node_time = store_of(data, ends_of(key)[0]).get(str(time_attr))
    if time_attr is None or not is_rows(node_time) or node_time.rows.partition is None:
        node_time = None
    with on_all_ranks(mesh.world), naming_edge_type(key):
        if node_time is not None:
            clock = read_times(node_time.to_local(), str(time_attr))
        if weight_attr is not None and (key is None or weight_attr in store):
            weight = _attribute(store, weight_attr, len(edges.edges))
            weight = read_weights(weight, weight_attr, whole=False)
        if time_attr is not None and node_time is None and time_attr in store:
            time = read_times(_attribute(store, time_attr, len(edges.edges)), time_attr)
    if weight is not None:
        some = torch.tensor([int(bool((weight > 0).any())), int(not edges.edges.total)])
        if not bool(collectives.all_reduce(some, mesh.world, "max").any()):
            raise ValueError(
                f"all weights in '{weight_attr}' are zero, so no edge can be drawn"
            )
    if node_time is not None and clock is not None:
        time = IdPlan.build(topology.source_gid, node_time.rows).gather(clock)
    of, _, degree = edges.edges.derived.get("counted", (None, 0, None))
    return _Edges(
        edges.edges.gid,
        topology.source_gid,
        topology.target_gid,
        edges.edges.total,
        weight,
        time,
        time is not None and not is_sorted,
        degree if of is topology.source_gid else None,
    )


def _attribute(store: Any, name: str, count: int) -> Tensor:
    value = store.get(name)
    if not is_rows(value) or len(value.rows) != count:
        raise ValueError(
            f"got '{name}', which has no row for each edge of the share; make it part of the "
            "Data before pdc.partition"
        )
    return value.to_local()


def _block_nodes(partition: Partition, channel: ProcessGrid) -> Tensor:
    gids = [partition.gids(rank) for rank in channel.members(channel.block)]
    return gids[0] if len(gids) == 1 else torch.cat(gids).sort().values


def _relation(
    own: _Edges,
    kinds: tuple[int, int],
    node_gid: tuple[Tensor, ...],
    channel: ProcessGrid,
    rows: dict[Any, Any],
) -> Relation:
    """Sorts the edges of a block by target, and by id, or time and id, within one."""
    edges = _shared_by_members(own, channel)
    nodes = node_gid[kinds[1]]
    most = max(1, *(r.total for r in rows.values()))
    find = kernels.rank_select_index(nodes, most)
    degree = edges.in_degree
    if degree is None:
        degree = memory.advise(torch.empty(len(nodes), dtype=torch.int64)).zero_()
        for part in pieces(edges.target):
            kernels.count_ids(find(part), degree)
    colptr = torch.nn.functional.pad(degree.cumsum(0), (1, 0))
    order = None
    if edges.sort_by_time and edges.time is not None:
        order = torch.argsort(edges.time, stable=True)
    kind = torch.int32 if max(most, edges.total) < 2**31 else torch.int64
    valued = edges.weight is not None or edges.time is not None
    gid = None if valued else edges.gid  # positions, by which values are sorted
    ends = edges.source, edges.target
    pair = sorted_pairs(*ends, gid, order, colptr, kind, find)
    if not valued:
        return Relation(*kinds, colptr, pair, 2, None, None)
    slot = pair[1::2]
    weight, time = (
        None if t is None else t.index_select(0, slot)
        for t in (edges.weight, edges.time)
    )
    for part in slot.split(PIECE):  # becomes the id of the edge
        part.copy_(edges.gid.index_select(0, part))
    return Relation(*kinds, colptr, pair, 2, weight, time)


def _shared_by_members(own: _Edges, channel: ProcessGrid) -> _Edges:
    """Returns the edges of all members of the block, in ascending id."""
    if channel.col.size == 1:
        return own
    counts = collectives.all_gather_counts([len(own.gid)], channel.col)
    sizes = [count for (count,) in counts]
    every: Any = {
        name: collectives.all_gather_rows(t, sizes, channel.col, op="topology")
        for name, t in vars(own).items()
        if isinstance(t, Tensor) and name != "in_degree"
    }
    order = torch.argsort(every["gid"])
    every = {name: t[order] for name, t in every.items()}
    return replace(own, in_degree=None, **every)
