"""Makes the edge_index of a graph, a DistTensor `[2, e]`, and its matrix, `DistAdjacency`.

Both are planned for. To torch the matrix is a CSR matrix `[targets, sources]`, as the `adj_t`
of PyG, or the CSC transpose of one. Products with it are those of the graph's edges; its values
and columns are row-sharded, one row for each nonzero. Any other op gets the whole matrix on
every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.rows import Rows, narrowed
from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.ops.csr import coo_of, csr_of
from pyg_distcomm.ops.id_plan import IdPlan
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded import whole
from pyg_distcomm.sharded.agreement import name_of
from pyg_distcomm.sharded.constants import constants_of, key_of, version_of
from pyg_distcomm.sharded.dist_tensor import DistTensor, gathered, local_at, rule
from pyg_distcomm.sharded.edge_methods import EdgeMethods
from pyg_distcomm.sharded.ids import ids_of

_KEPT = 8  # edges, and matrices, whose share was made


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
        out._edges_are(topology)
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

        def made() -> DistTensor:
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
            return DistEdgeIndex.build(local, nodes, edges, sources=sources)

        key = id(edge_index), edge_index._version, id(sources)
        return nodes.latest("cut", _KEPT).made(key, made, edge_index, sources)  # type: ignore[no-any-return]

    @staticmethod
    def of_sparse(adj: Tensor, nodes: Rows, sources: Rows | None = None) -> DistTensor:
        """Shards a sparse (transposed) adjacency `[n, m]`, whole on all ranks.

        Kept with the nodes, so that the same matrix is planned once. `sources` are the m
        nodes of the other type; None for the same.
        """
        n, m = nodes.total, (nodes if sources is None else sources).total
        if adj.shape[:2] != (n, m):  # further dims are those of values
            raise ValueError(
                f"a sparse adjacency of {n} nodes is [{n}, {m}], got {list(adj.shape)}"
            )

        def made() -> Any:
            edge_index, value = coo_of(adj)
            return carrying(DistEdgeIndex.cut(edge_index, nodes, sources), value, True)

        key = id(adj), adj._version, id(sources)
        return nodes.latest("sparse", _KEPT).made(key, made, adj, sources)  # type: ignore[no-any-return]


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


aten = torch.ops.aten


class DistAdjacency(EdgeMethods, Tensor):
    """A sparse matrix whose nonzeros are the edges of a graph.

    Args:
        edge_index: its edges, `[2, e]`; rows of the matrix are targets.
        values: its values, `[e]` or `[e, ...]`, sharded as the edges.
        flipped: whether it is the transpose.
    """

    __slots__ = ("_topology", "_version_made", "edge_index", "flipped", "weight")
    __torch_function__: Any = torch._C._disabled_torch_function_impl
    matmul = Tensor.matmul  # type: ignore[assignment]

    edge_index: DistTensor
    _topology: Topology
    weight: DistTensor
    _version_made: int  # of the values, which an op may write to
    flipped: bool

    @staticmethod
    def __new__(cls, edge_index: DistTensor, values: Any, flipped: bool = False) -> Any:
        """Wraps edges and values."""
        topology = edge_index.topology
        shape = [topology.nodes.total, topology.source_rows.total]
        self = Tensor._make_wrapper_subclass(
            cls,
            [*(reversed(shape) if flipped else shape), *values.shape[1:]],
            dtype=values.dtype,
            device=values.device,
            dispatch_layout=True,
        )
        self.edge_index, self.flipped = edge_index, flipped
        self._topology, self.weight = topology, values
        self._version_made = version_of(values.local)
        return self

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes one aten op by its rule, or on the whole matrix."""
        found = PROCESS.rules.get(("matrix", func))
        out = NotImplemented
        if found is not None and type(args[0]) is DistAdjacency:
            out = found(func, *args, **(kwargs or {}))
        elif func is aten._sparse_addmm.default:
            out = _add_product(*args, **(kwargs or {}))
        if out is NotImplemented and func._schema.is_mutable:
            raise TypeError(
                f"{name_of(func)}() of a sparse matrix of a share would write to a copy; "
                "write to its values, or make another: adj = 2 * adj"
            )
        if out is NotImplemented:
            return whole.apply(func, args, kwargs or {})
        return out

    @property
    def looped(self) -> bool:  # type: ignore[override]
        """Whether an edge begins and ends at one node; collective at the first call."""
        topology = self.topology
        if topology.sources is not None:
            return False
        known = _derived(self)
        if "looped" not in known:
            mine = torch.tensor([(topology.source_gid == topology.target_gid).sum()])
            found = collectives.all_reduce(mine, topology.edges.mesh.world)
            known["looped"] = bool(found)
        return known["looped"]  # type: ignore[no-any-return]

    def with_topology(self, topology: Topology) -> DistAdjacency:
        """Returns the same matrix, whose edges have another topology."""
        ends = self.edge_index.with_topology(topology)
        return DistAdjacency(ends, self.weight, self.flipped)  # type: ignore[no-any-return]

    def to_local(self) -> Tensor:
        """Returns this rank's edges `[2, e_i]`, in global ids."""
        return self.edge_index.local

    def full_tensor(self) -> Tensor:
        """Returns the whole matrix, on every rank; collective."""
        edges, values = self.edge_index.full_tensor(), self.weight.full_tensor()
        size = self.topology.nodes.total, self.topology.source_rows.total
        out = csr_of(edges, values, size)
        return out.t() if self.flipped else out

    def __matmul__(self, x: Any) -> Tensor:  # type: ignore[override]
        return torch.matmul(self, x)  # Tensor's own hides the TypeErrors of rules

    def __deepcopy__(self, memo: dict[int, Any]) -> DistAdjacency:
        return memo.setdefault(id(self), self.clone())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.edges.mesh.size > 1:
            raise TypeError(
                "save adj_t.full_tensor(), which all ranks have to call: torch.save and pickle "
                "would keep a part of a sparse matrix of a share alone"
            )
        return self.full_tensor().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        mesh = self.edges.mesh
        return (
            f"DistAdjacency({list(self.shape)} of {self.edges.count} edges, "
            f"{len(self.edges)} on rank {mesh.rank}/{mesh.size})"
        )


PROCESS.rules["wraps"] = {DistAdjacency}  # what computes ops with DistTensors, too


@rule("carrying")
def carrying(edge_index: Any, weight: Any, matrix: bool) -> Any:
    """Implements `EdgeMethods.carrying`."""
    if isinstance(edge_index, DistAdjacency):
        edge_index = edge_index.edge_index
    if weight is None and not matrix:
        return edge_index
    edges, device = edge_index.edges, edge_index.device
    if weight is None:
        weight = torch.ones(edges.count, device=device)
    local = local_at(weight.detach(), edges, 0)
    return DistAdjacency(edge_index, attribute(DistTensor(local, edges)))


def matrix_rule(*ops: Any) -> Any:
    """Declares the rule of some aten ops on a matrix; NotImplemented is the whole's."""
    return rule(*(("matrix", op) for op in ops))


@matrix_rule(torch.ops.prim.layout.default)
def _layout(func: Any, adj: DistAdjacency) -> torch.layout:
    return torch.sparse_csc if adj.flipped else torch.sparse_csr


@matrix_rule(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _same(func: Any, adj: DistAdjacency) -> Any:
    return DistAdjacency(adj.edge_index, adj.weight, adj.flipped)


@matrix_rule(aten.clone.default)
def _clone(func: Any, adj: DistAdjacency, **more: Any) -> Any:
    values = DistTensor(adj.weight.local.clone(), adj.weight.rows)
    return DistAdjacency(adj.edge_index, attribute(values), adj.flipped)


@matrix_rule(aten.t.default, aten.transpose.int)
def _transpose(func: Any, adj: DistAdjacency, *dims: Any) -> Any:
    if adj.dim() != 2 or (dims and dims[0] % 2 == dims[1] % 2):
        return NotImplemented
    return DistAdjacency(adj.edge_index, adj.weight, not adj.flipped)


@matrix_rule(aten._to_copy.default)
def _moved(func: Any, adj: DistAdjacency, **to: Any) -> Any:
    if to.get("layout") not in (None, adj.layout):
        return NotImplemented
    to.pop("layout", None)
    values = func(adj.weight.local, **to)
    topology = adj.topology.to(values.device)
    ends = DistEdgeIndex.of(adj.edge_index.local.to(values.device), topology)
    weight = attribute(DistTensor(values, topology.edges))
    return DistAdjacency(ends, weight, adj.flipped)


@matrix_rule(aten._nnz.default)
def _nnz(func: Any, adj: DistAdjacency) -> int:
    return adj.edges.count


@matrix_rule(aten.values.default)
def _values(func: Any, adj: DistAdjacency) -> Any:
    rows, order, _ = _in_order(adj)
    if order is not None:
        out = DistTensor(adj.weight.local[order], rows)
        out._copied = True
        return out
    values = adj.weight
    written = version_of(values.local) != adj._version_made
    return DistTensor(values.local, rows, 0, None if written else values._key)


@matrix_rule(aten.col_indices.default, aten.row_indices.default)
def _columns(func: Any, adj: DistAdjacency) -> Any:
    known = _derived(adj)
    if "columns" not in known:
        rows, order, starts = _in_order(adj)
        ends = adj.edge_index.local[0]
        found = DistTensor(ends.clone() if order is None else ends[order], rows)
        known["columns"] = attribute(found)
        if order is None and adj.topology.sources is None:
            _keep(found._key, starts.to(adj.device), adj.edge_index)
    return aten.detach.default(known["columns"])


@matrix_rule(aten.crow_indices.default, aten.ccol_indices.default)
def _starts(func: Any, adj: DistAdjacency) -> Tensor:
    return _in_order(adj)[2].to(adj.device).clone()


def _derived(adj: DistAdjacency) -> dict[str, Any]:
    """Returns what is known of the edges of a matrix."""
    return vars(adj.topology).setdefault("matrix", {})  # type: ignore[no-any-return]


def _in_order(adj: DistAdjacency) -> tuple[Rows, Tensor | None, Tensor]:
    """Returns the rows of nonzeros in CSR order, own edges in it, and where rows begin.

    None for edges that are in this order already. Collective at the first call.
    """
    topology = adj.topology
    edges, n, known = topology.edges, topology.nodes.total, _derived(adj)
    if "csr" in known:
        return known["csr"]  # type: ignore[no-any-return]
    source, target = topology.source_gid, topology.target_gid
    own = torch.bincount(target, minlength=n)[topology.nodes.gid]
    counts = gathered(narrowed(own, edges.count), topology.nodes, "all_gather").long()
    start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    order = torch.argsort(source, stable=True)
    order = order[torch.argsort(target[order], stable=True)]
    first = torch.searchsorted(target[order], target[order])
    place = start[target[order]] + torch.arange(len(order)) - first
    moved = torch.tensor([int(not torch.equal(place, edges.place))])
    found: Any = (edges, None, start)
    if int(collectives.all_reduce(moved, edges.mesh.world)):
        of_nodes = topology.nodes if topology.sources is None else None
        rows = Rows(place, edges.count, edges.mesh, None, nodes=of_nodes)
        found = (rows, order.to(adj.device), start)
    known["csr"] = found
    return found  # type: ignore[no-any-return]


@matrix_rule(aten.mm.default, aten.mv.default)
def _product(func: Any, adj: DistAdjacency, x: Any) -> Any:
    if adj.dim() != 2 or isinstance(x, DistAdjacency) or x.layout != torch.strided:
        return NotImplemented
    topology, ends = adj.topology, (adj.nodes, adj.sources)
    into, out_of = reversed(ends) if adj.flipped else ends
    if x.size(0) != out_of.total:
        raise TypeError(
            f"got a tensor of shape {list(x.shape)}, wanted a row for each column of a sparse "
            f"matrix with {out_of.total} nodes there"
        )
    local = local_at(x, out_of, 0)
    flat = local.unsqueeze(1) if local.dim() == 1 else local.contiguous()
    weight = adj.weight.local
    if topology.sources is None:
        matrix = topology.operator(OperatorKind(), weight.detach(), flat.dtype)
        out = (matrix.transposed if adj.flipped else matrix) @ flat
    else:
        out = _between_types(adj, flat, weight.to(flat.dtype).unsqueeze(1))
    return DistTensor(out.squeeze(1) if local.dim() == 1 else out, into)


def _between_types(adj: DistAdjacency, rows: Tensor, weight: Tensor) -> Tensor:
    """Returns own rows of the product by a matrix from one node type to another."""
    target = adj.topology.locals.ends[1]
    if adj.flipped:
        return _exchange(adj).sum(rows[target] * weight)
    read = _exchange(adj).gather(rows) * weight
    return rows.new_zeros(len(adj.nodes), rows.size(1)).index_add_(0, target, read)


def _add_product(start: Any, adj: Any, x: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Implements `beta start + alpha adj x`."""
    if type(adj) is not DistAdjacency:
        return NotImplemented
    out = _product(None, adj, x)
    if out is NotImplemented:
        return out
    out = out if alpha == 1 else out * alpha
    return out if beta == 0 else out + (start if beta == 1 else start * beta)


@matrix_rule(aten._sparse_mm_reduce_impl.default)
def _reduced(func: Any, adj: DistAdjacency, x: Any, reduce: str) -> Any:
    if adj.flipped or adj.dim() != 2:
        return NotImplemented
    if reduce in ("max", "min"):
        return _extreme(adj, x, reduce)
    out = _product(None, adj, x)
    if reduce == "mean":
        out = out / _degree(adj, out)
    return out, torch.empty(0, dtype=torch.int64)


@matrix_rule(aten._sparse_mm_reduce_impl_backward.default)
def _reduced_backward(
    func: Any, adj: Any, grad: Any, x: Any, reduce: str, picked: Any, wanted: Any
) -> Any:
    if wanted[0]:
        raise NotImplementedError(
            f"got a gradient of the values of {adj!r}, which are constant; give a layer "
            "edge_index and edge_weight"
        )
    if reduce in ("max", "min"):
        local = local_at(grad, adj.nodes, 0)
        edge = local_at(picked, adj.nodes, 0)
        count = len(adj.edges)
        rows = local.new_zeros((count + 1, local.size(1)))  # and one for no edge
        rows = rows.scatter_(0, edge, local)[:count] * adj.weight.local.unsqueeze(1)
        return None, DistTensor(_exchange(adj).sum(rows), adj.sources)
    scaled = grad / _degree(adj, grad) if reduce == "mean" else grad
    back = DistAdjacency(adj.edge_index, adj.weight, not adj.flipped)
    return None, _product(None, back, scaled)


def _extreme(adj: DistAdjacency, x: Any, reduce: str) -> Any:
    """Returns maxima or minima of the products of a row, and the first edges of these.

    As torch does: 0 in rows without edges, of which the edge is the number of own edges.
    """
    local = local_at(x, adj.sources, 0).contiguous()
    rows = _exchange(adj).gather(local) * adj.weight.local.unsqueeze(1)
    order = _in_order(adj)[1]
    target, count = adj.topology.locals.ends[1], len(adj.edges)
    shape = len(adj.nodes), rows.size(1)
    place = target.unsqueeze(1).expand_as(rows)
    out = rows.new_zeros(shape).scatter_reduce(
        0, place, rows, f"a{reduce}", include_self=False
    )
    number = torch.arange(count, device=rows.device)
    if order is not None:
        number[order] = number.clone()
    ties = torch.where(rows == out[target], number.unsqueeze(1), count)
    first = ties.new_full(shape, count).scatter_reduce(0, place, ties, "amin")
    if order is not None:
        first = torch.cat([order, order.new_tensor([count])])[first]
    return DistTensor(out, adj.nodes), DistTensor(first, adj.nodes)


def _exchange(adj: DistAdjacency) -> IdPlan:
    """Returns the exchange of the rows of sources; planned at the first use."""
    sources: Any = adj.edge_index[0]
    ids = ids_of(sources)
    assert ids is not None  # which edges have
    return ids.exchange(adj.sources)


def _degree(adj: DistAdjacency, like: Any) -> DistTensor:
    degree = adj.topology.in_degree.clamp(min=1).to(like.dtype).unsqueeze(1)
    return DistTensor(degree, adj.nodes)


@rule(aten.sparse_compressed_tensor.comp_plain_value_size)
def compressed(func: Any, args: Any, kwargs: Any) -> Any:
    """Makes a CSR matrix of sharded columns and values; of others, a whole one."""
    starts, columns, values, shape = args
    fits = kwargs.get("layout") == torch.sparse_csr and type(columns) is DistTensor
    fits = fits and not values.requires_grad and values.dim() == 1
    nodes = columns.rows.nodes if fits else None
    if nodes is None or list(shape) != [nodes.total] * 2 or nodes.partition is None:
        return whole.apply(func, args, kwargs)
    edges = _edges_of(starts, columns, nodes)
    local = local_at(values, columns.rows, 0)
    if edges.edges is not columns.rows:
        local = local_at(DistTensor(local, columns.rows), edges.edges, 0)
    values = DistTensor(local.to(kwargs.get("dtype")), edges.edges)
    return DistAdjacency(edges, attribute(values))


def _edges_of(starts: Any, columns: DistTensor, nodes: Rows) -> DistTensor:
    """Returns the edges of a CSR matrix, kept for columns that do not change."""
    if isinstance(starts, DistTensor):
        starts = starts.full_tensor()
    key = key_of(columns)
    before, found = nodes.latest("edges of matrices", _KEPT).get(key, (None, None))
    if key is not None and before is not None and torch.equal(before, starts):
        return found  # type: ignore[no-any-return]
    target = torch.arange(nodes.total, device=starts.device)
    target = target.repeat_interleave(starts.diff())
    found = DistEdgeIndex.of_ends(columns, target)
    _keep(key, starts, found)
    return found


def _keep(key: int | None, starts: Tensor, edges: DistTensor) -> None:
    if key is not None:
        edges.nodes.latest("edges of matrices", _KEPT)[key] = starts.clone(), edges
