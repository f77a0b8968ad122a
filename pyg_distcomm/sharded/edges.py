"""Makes the edge_index of a graph, a DistTensor `[2, e]` whose edges are planned for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded.constants import constants_of, version_of
from pyg_distcomm.sharded.dist_tensor import DistTensor, local_at, rule
from pyg_distcomm.sharded.edge_methods import EdgeMethods

_KEPT = 8  # edges, and sparse adjacencies, of which each rank has made its share


class _OfGraph(type(Tensor)):  # type: ignore[misc]
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, EdgeMethods) and value._topology is not None  # type: ignore[attr-defined]


class DistEdgeIndex(DistTensor, metaclass=_OfGraph):
    """Represents the edges of a graph `[2, e]`, each on the rank that owns its target.

    Values are node ids of the whole graph, in the order of the original edge_index. What an
    op makes of it is an ordinary DistTensor. `isinstance` tells whether a tensor is one.
    """

    __slots__ = ()

    @staticmethod
    def build(
        edge_index: Tensor,
        nodes: Rows,
        edges: Rows,
        *,
        oblivious: bool = False,
        sources: Rows | None = None,
    ) -> DistTensor:
        """Makes an edge_index of this rank's edges.

        Args:
            edge_index: `[2, e_i]`, targets owned by this rank, in original order.
            nodes: the rows of nodes on this rank.
            edges: the rows of edges on this rank.
            oblivious: exchange whole blocks (all_gather, reduce_scatter), as the
                sparsity-oblivious algorithms of [Tripathy20] do.
            sources: the rows of source nodes here, if of another type.
        """
        local = edge_index.long().cpu()
        halo = "blocks" if oblivious else "auto"
        own, device = None if sources is nodes else sources, edge_index.device
        topology = Topology(local[0], local[1], nodes, edges, halo, device, own)
        return DistEdgeIndex.of(edge_index, topology)

    @staticmethod
    def of(edge_index: Tensor, topology: Topology) -> DistTensor:
        """Returns edges `[2, e_i]` with a known topology."""
        note_space(topology.nodes)
        note_space(topology.source_rows)
        topology.edges.derived["ends"] = topology.nodes, topology.source_rows
        out = attribute(DistTensor(edge_index.contiguous(), topology.edges, 1))
        out._topology = topology
        return out

    @staticmethod
    def of_ends(source: Any, target: Any) -> DistTensor:
        """Makes edges of sharded node ids, moved to the owners of their targets; collective.

        Args:
            source: `[e]`, with any sharding; or all sources, on every rank.
            target: as `source`.
        """
        like = source if isinstance(source, DistTensor) else target
        rows, nodes = like.rows, like.rows.nodes
        assert nodes is not None
        assert nodes.partition is not None
        ends = torch.stack([local_at(end, rows, 0) for end in (source, target)])
        owner = nodes.partition.owner_of(ends[1].cpu().long())
        away = int((owner != nodes.mesh.rank).sum())
        if not int(collectives.all_reduce(torch.tensor([away]), nodes.mesh.world)):
            return DistEdgeIndex.build(ends, nodes, rows)
        counts = torch.bincount(owner, minlength=nodes.mesh.size).tolist()
        back = collectives.exchange_counts(counts, nodes.mesh.world)
        order = owner.argsort()
        packed = torch.cat([ends.cpu().long().t(), rows.place.unsqueeze(1)], 1)[order]
        came = collectives.all_to_all(
            packed, counts, back, nodes.mesh.world, "edges"
        ).wait()
        came = came[came[:, 2].argsort()]
        edges = Rows(came[:, 2], rows.count, nodes.mesh, None, nodes=nodes)
        local = came[:, :2].t().contiguous().to(ends.device, ends.dtype)
        return DistEdgeIndex.build(local, nodes, edges)

    @staticmethod
    def cut(edge_index: Tensor, nodes: Rows, sources: Rows | None = None) -> DistTensor:
        """Shards a whole `edge_index` `[2, e]`, which is the same on all ranks.

        Kept with the nodes, so that the same tensor is planned once.

        Args:
            edge_index: the edges.
            nodes: the rows of targets on this rank.
            sources: the rows of sources on this rank, if their type differs.
        """
        key = id(edge_index), edge_index._version, id(sources)
        kept = nodes.latest("cut", _KEPT)
        if key in kept:
            return kept[key][0]  # type: ignore[no-any-return]
        if sources is None:
            check_edge_index(edge_index, nodes.total)
        else:
            check_edge_index(edge_index[0].expand(2, -1), sources.total)
            check_edge_index(edge_index[1].expand(2, -1), nodes.total)
        assert nodes.partition is not None
        owner = nodes.partition.owner_of(edge_index[1].cpu().long())
        mine = (owner == nodes.mesh.rank).nonzero().view(-1)
        of_nodes = nodes if sources is None else None
        edges = Rows(mine, edge_index.size(1), nodes.mesh, None, nodes=of_nodes)
        local = edge_index[:, mine.to(edge_index.device)]
        made = DistEdgeIndex.build(local, nodes, edges, sources=sources)
        kept[key] = made, edge_index, sources
        return made

    @staticmethod
    def of_sparse(adj: Tensor, nodes: Rows) -> DistTensor:
        """Shards a sparse (transposed) adjacency `[n, n]`, whole on all ranks.

        Kept with the nodes, so that the same matrix is planned once.
        """
        kept, key = nodes.latest("sparse", _KEPT), (id(adj), adj._version)
        if key in kept:
            return kept[key][0]  # type: ignore[no-any-return]
        n = nodes.total
        if adj.shape[:2] != (n, n):  # further dims are those of values
            raise ValueError(
                f"a sparse adjacency of {n} nodes is [{n}, {n}], got {list(adj.shape)}"
            )
        edge_index, value = coo_of(adj)
        made = PROCESS.rules["carrying"](
            DistEdgeIndex.cut(edge_index, nodes), value, True
        )
        kept[key] = made, adj
        return made  # type: ignore[no-any-return]


@rule("edges")
def same_edges(edge_index: DistTensor, topology: Topology) -> DistTensor:
    """Returns the same edges with another topology."""
    out = DistTensor(edge_index.local, edge_index.rows, 1, edge_index._key)
    out._topology, out._key_version = topology, edge_index._key_version
    return out


@rule("from_local")
def from_local(t: Tensor, like: Any) -> DistTensor:
    """Makes a tensor of this rank's rows that is sharded as `like` is; differentiable."""
    if type(like) is not DistTensor or not isinstance(t, Tensor):
        raise TypeError(
            "from_local(t, like=x) takes this rank's rows and a row-sharded tensor, such as "
            f"data.x of pdc.partition; got {type(t).__name__} and {type(like).__name__}"
        )
    problem = None
    if t.dim() <= like.dim_ or t.size(like.dim_) != like.local.size(like.dim_):
        problem = (
            f"from_local got {list(t.shape)}, wanted {like.local.size(like.dim_)} rows, as "
            "like.to_local() has"
        )
    collectives.agree(problem, like.rows.mesh.world, ValueError)
    return DistTensor.from_local(t, like.rows, like.dim_)


@rule("attribute")
def attribute(x: DistTensor) -> DistTensor:
    """Gives an attribute of a graph a key; see [Note: constants] in `constants.py`."""
    if x.rows.mesh.local_sizes:  # a chunk's values differ from pass to pass
        return x
    if x.rows.nodes is None and x.dim_ == 0 and x.rows.partition is not None:
        note_space(x.rows)
    x._key, x._key_version = constants_of(x.rows.mesh).next_number(), version_of(x)
    return x


def note_space(rows: Rows) -> None:
    """Notes the rows that a new tensor with as many rows has: of several the latest."""
    rows.mesh.sharded.setdefault("spaces", {})[rows.count] = rows


def rows_of_edges(gid: Tensor, total: int, nodes: Rows) -> Rows:
    """Returns the rows of edges with given positions in the whole edge_index."""
    return Rows(gid, total, nodes.mesh, None, nodes=nodes)
