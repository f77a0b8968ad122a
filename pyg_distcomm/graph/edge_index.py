"""Defines `DistEdgeIndex`, an edge_index whose edges are sharded over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import autograd, collectives
from pyg_distcomm.comm.consistency import comparer_of
from pyg_distcomm.comm.gradient_averaging import as_replicated
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.product_cache import MultiplyOrder, ProductCache
from pyg_distcomm.graph.topology import OperatorKind, Topology
from pyg_distcomm.halo.policy import LinkPolicy, link_problem
from pyg_distcomm.ops.csr import coo_of, csr_of
from pyg_distcomm.ops.grid_plan import check_halo
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.tensor import getitem, op_tables
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.gather_by_id import cached_plan, shard_as
from pyg_distcomm.tensor.op_tables import FACTS, NEW, SIZES, base_name
from pyg_distcomm.tensor.row_sharded import (
    advice,
    check_saved,
    describe_type,
    eager,
    refuse_loader,
    tree_map,
)
from pyg_distcomm.tensor.shape_ops import joined
from pyg_distcomm.tensor.sizes import size_from_shape


@eager
class DistEdgeIndex(torch.Tensor):
    """The edges this rank owns, `[2, e_i]`, as node ids of the original graph.

    The owner of the target owns an edge and its attributes, in original edge order. Like
    PyG's `EdgeIndex` it caches what is derived from it: the halo, the blocks of the grid,
    the GCN-normalised operator. These are planned at the first use, collectively, and have
    the lifetime of the object.

    It behaves as the whole edge_index: `shape` is `[2, e]`, and `edge_index[0]` and
    `edge_index[1]` are DistTensors of node ids, one row per edge, so that
    `z[edge_index[0]]` fetches the rows of the sources. `edge_index[:, mask]`,
    `torch.cat([edge_index, loops], 1)`, `edge_index.flip(0)` and `torch.stack` of sources
    and targets return a DistEdgeIndex again; other operations gather all edges, or raise a
    TypeError. `.to_local()` returns this rank's edges.
    """

    topology: Topology
    _spread = True
    weight: DistTensor | None = None  # of a sparse adjacency's values
    looped = False  # whether the sparse adjacency has self-loops
    of_torch = False  # whether it is a matrix of torch.sparse; see `weighs_messages`
    __matmul__ = DistTensor.__matmul__  # raises TypeErrors: see `tells_errors`

    @staticmethod
    def build(
        edge_index: Tensor,
        nodes: Rows,
        edges: Rows,
        *,
        oblivious: bool = False,
        sources: Rows | None = None,
    ) -> DistEdgeIndex:
        """Makes a DistEdgeIndex of this rank's edges, in global ids.

        Args:
            edge_index: `[2, e_i]`, targets owned by this rank, in original order.
            nodes: the rows of nodes on this rank.
            edges: the rows of edges on this rank.
            oblivious: exchange whole blocks (all_gather, reduce_scatter), as the
                sparsity-oblivious algorithms of [Tripathy20] do.
            sources: the rows of source nodes here, if of another type: layers take pairs then.
        """
        local = edge_index.long().cpu()
        halo = "blocks" if oblivious else "auto"
        own, device = None if sources is nodes else sources, edge_index.device
        topology = Topology(local[0], local[1], nodes, edges, halo, device, own)
        return _wrap(edge_index, topology)

    @staticmethod
    def of_ends(source: DistTensor, target: DistTensor) -> DistEdgeIndex:
        """Makes edges of row-sharded node ids, and moves them to the owners of their targets.

        Args:
            source: `[e]`, with any sharding; or all sources, on every rank.
            target: as `source`.

        Collective; edges that are on the right rank keep their rows.
        """
        both = source, target
        like = next(end for end in both if isinstance(end, DistTensor))
        rows = like.rows
        nodes, found = rows.nodes, [_shard_end(end, rows) for end in both]
        if nodes is None or nodes.partition is None or any(f is None for f in found):
            raise TypeError(
                "edges are stacked from as many sources as targets, that come from an "
                f"edge_index of pdc.partition; got {' and '.join(map(describe_type, both))}"
            )
        ends: Tensor = torch.stack([end.to(like.dtype) for end in found])
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
        edges = rows_of_edges(came[:, 2], rows.count, nodes)
        local = came[:, :2].t().contiguous().to(ends.device, ends.dtype)
        return DistEdgeIndex.build(local, nodes, edges)

    @staticmethod
    def cut(
        edge_index: Tensor, nodes: Rows, sources: Rows | None = None
    ) -> DistEdgeIndex:
        """Shards a whole `edge_index` `[2, e]`, which is the same on all ranks.

        Cached with the nodes, so that the same tensor is planned once.

        Args:
            edge_index: the edges.
            nodes: the rows of targets on this rank.
            sources: the rows of sources on this rank, if their type differs.
        """

        def build() -> DistEdgeIndex:
            if sources is None:
                check_edge_index(edge_index, nodes.total)
            else:
                check_edge_index(edge_index[0].expand(2, -1), sources.total)
                check_edge_index(edge_index[1].expand(2, -1), nodes.total)
            assert nodes.partition is not None
            getitem.check_replicated_ids(edge_index.reshape(-1), nodes)
            owner = nodes.partition.owner_of(edge_index[1].cpu().long())
            mine = (owner == nodes.mesh.rank).nonzero().view(-1)
            if sources is None:
                edges = rows_of_edges(mine, edge_index.size(1), nodes)
            else:
                edges = Rows(mine, edge_index.size(1), nodes.mesh, None)
            local = edge_index[:, mine.to(edge_index.device)]
            return DistEdgeIndex.build(local, nodes, edges, sources=sources)

        found: DistEdgeIndex = cached_plan(edge_index, nodes, build)
        return found if found.topology.sources is sources else build()

    def carrying(
        self, weight: Any, *, looped: bool | None = None, of_torch: bool = False
    ) -> DistEdgeIndex:
        """Returns the same edges with sharded weights, whole weights `[e]`, or None."""
        own: Any = self.check_edges(weight, "weight")
        weight = None if own is None else DistTensor.wrap(own, self.edges)
        like = None if weight is None else self
        out = _wrap(self.to_local(), self.topology, weight, like)
        if looped is not None:
            out.looped, out.of_torch = looped, of_torch
        return out

    def check_loops(self, layer: torch.nn.Module) -> None:
        """Raises for a sparse adjacency with self-loops if a layer adds self-loops."""
        if self.looped and getattr(layer, "add_self_loops", False):
            raise TypeError(
                f"give {type(layer).__name__} an edge_index, or add_self_loops=False: PyG "
                "adds loops to a sparse adjacency that has some in another way"
            )

    @staticmethod
    def of_sparse(adj: Tensor, nodes: Rows) -> DistEdgeIndex:
        """Makes edges of a sparse (transposed) adjacency `[n, n]`, whole on all ranks.

        Its rows are targets, as in PyG's `adj_t`; its values are the weights. Kept with
        the nodes, so that the same tensor is planned once.
        """
        plans, key = nodes.plans, ("sparse", id(adj))
        ends, value = coo_of(adj)
        if key not in plans or plans[key][0] is not adj:
            plans[key] = adj, ends
        looped = bool((ends[0] == ends[1]).any())
        found = DistEdgeIndex.cut(plans[key][1], nodes)
        return found.carrying(value, looped=looped, of_torch=True)

    @staticmethod
    def of(edge_index: Tensor, topology: Topology) -> DistEdgeIndex:
        """Returns edges `[2, e_i]`, in global ids, with a known topology."""
        return _wrap(edge_index, topology)

    @property
    def nodes(self) -> Rows:
        """The rows of target nodes on this rank."""
        return self.topology.nodes

    @property
    def sources(self) -> Rows:
        """The rows of source nodes on this rank; `nodes` unless their type differs."""
        return self.topology.source_rows

    @property
    def edges(self) -> Rows:
        """The rows of edges on this rank."""
        return self.topology.edges

    def matmul(  # type: ignore[override]
        self, x: DistTensor, edge_weight: Any = None
    ) -> DistTensor:
        """Returns, for each own node, the (weighted) sum of `x` over its in-edges.

            z_i = sum over edges e = (j, i) of w_e x_j

        Differentiable in `x` `[n_i, f]` and `edge_weight` `[e_i]`.
        """
        local = self.check_nodes(x, "x")
        weight, call = self.check_edges(edge_weight, "edge_weight"), None
        if (link := self.topology.link) is not None:
            # copies with another link share what is kept, by which they are known
            who, train = self.topology.constants, torch.is_grad_enabled()
            own = self.topology.own_degrees
            call = link.begin(who, self.nodes, train, name="matmul", degrees=own)
        matrix = self.topology.operator(OperatorKind(), weight, local.dtype, call)
        return DistTensor.wrap(matrix @ local, self.nodes)

    def check_nodes(self, x: Any, name: str, nodes: Rows | None = None) -> Tensor:
        """Returns the local rows of a node tensor; raises for other tensors."""
        local = self.as_nodes(x, name, nodes).to_local()
        return local.contiguous()  # products round by strides

    def as_nodes(self, x: Any, name: str, nodes: Rows | None = None) -> DistTensor:
        """Returns a row-sharded node tensor; shards an ordinary one `[n, ...]`.

        Args:
            x: the tensor.
            name: its name, for messages.
            nodes: the rows it must have; None for the nodes of a graph with one node type.
        """
        if nodes is None:
            self.topology.check_one_node_type()
            nodes = self.nodes
        whole = isinstance(x, Tensor) and not isinstance(x, DistTensor) and x.dim()
        if whole and x.size(0) == nodes.total:
            mesh = nodes.mesh
            if not x.requires_grad and isinstance(mesh, Mesh) and mesh.size > 1:
                comparer_of(mesh).check(x, name)
            x = as_replicated(x, mesh)
            x = DistTensor.wrap(x[nodes.gid_on(x.device)], nodes)
        if not isinstance(x, DistTensor):
            raise TypeError(
                f"pass data.x of pdc.partition as {name} (a DistTensor), or something "
                f"computed from it: it is {describe_type(x)}, but the edge_index is spread "
                f"over ranks, with {nodes.total} nodes"
            )
        if x.rows is not nodes and not x.rows.same_as(nodes):
            if x.rows.whole and x.rows.total == nodes.total:
                raise ValueError(
                    f"take {name} and the edge_index from one pdc.partition or update: they "
                    "are spread over the ranks in two ways, by two partitions or meshes"
                )
            raise ValueError(
                f"give the layer one row for each node: {name} has {x.rows}, but the "
                f"edge_index has nodes {nodes}"
            )
        return self.topology.placed(name, x)

    def check_edges(self, value: Any, name: str) -> Tensor | None:
        """Returns the local rows of an edge tensor (None stays None)."""
        if value is None and name == "edge_weight" and self.weight is not None:
            value = self.weight
        if value is None:
            return None
        edges = self.edges
        if isinstance(value, DistTensor):
            found = shard_as(value, edges)
            if found is not None:
                return self.topology.placed(name, found)
            raise ValueError(f"{name} has {value.rows}, but the edge_index has {edges}")
        if isinstance(value, Tensor) and value.dim() and value.size(0) == edges.count:
            value = as_replicated(value, edges.mesh)
            return self.topology.placed(name, value[edges.place_on(value.device)])
        raise TypeError(
            f"give {name} one row for each of the {edges.count} edges: it is "
            f"{describe_type(value)}; make it part of the Data before pdc.partition"
        )

    def to_local(self) -> Tensor:
        """Returns this rank's edges as an ordinary tensor of global node ids."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def full_tensor(self) -> Tensor:
        """Returns all edges in original order, on every rank; collective."""
        local, world = self.to_local().t().contiguous(), self.nodes.mesh.world
        return autograd.all_gather(local, self.edges.gid, world).t().contiguous()

    def oblivious(self) -> DistEdgeIndex:
        """Returns the same edges with sparsity-oblivious exchanges, for comparison."""
        return self.with_halo("blocks")

    def with_halo(self, halo: str = "auto") -> DistEdgeIndex:
        """Returns the same edges, with another kind of exchange for products.

        All give the same sums. "cover" moves the fewest words; "auto" takes whole blocks
        if they have at most a sixteenth more words than that. Products with trainable edge
        weights send rows, and so do layers other than products.

        Args:
            halo: "rows" sends the rows of features that other ranks need
                ([Mukhopadhyay24]), "sums" sends partial sums of rows instead, "cover" the
                fewest of both for each pair of ranks ([Zhuang25]), "blocks" sends whole
                blocks, as sparsity-oblivious algorithms do ([Tripathy20]), "auto" takes the
                cheaper one of the last two.
        """
        twin = copy.copy(self.topology)
        twin.halo, twin.constants, twin._plans = check_halo(halo), ProductCache(), {}
        for name in ("reversed", "product_words", "adds_on_grid"):
            twin.__dict__.pop(name, None)
        return _wrap(self.to_local(), twin, self.weight, self)

    def with_ordering(
        self, order: str = "auto", *, keep_inputs: bool = True
    ) -> DistEdgeIndex:
        """Returns the same edges, with another order of products for A X W.

        Plans are shared, cached products are not.

        Args:
            order: "first" is (A X) W, "last" is A (X W), "auto" the one that exchanges
                less, forward and backward together.
            keep_inputs: whether to cache the product with a constant input (a leaf without
                gradient, the same tensor at the same version), or its ghosts in layers that
                run by halo exchange, from its second use on. The cache takes the input's
                memory once more. It is not used while hooks for saved tensors are active,
                as in activation checkpointing. Such an input may change in place, on all
                ranks or on none; writes to `x.data`, or through NumPy, are not detected.
        """
        twin = copy.copy(self.topology)
        twin.ordering = MultiplyOrder(order, keep_inputs)
        twin.constants = ProductCache()
        return _wrap(self.to_local(), twin, self.weight, self)

    def with_link(self, link: LinkPolicy | None) -> DistEdgeIndex:
        """Returns the same edges, with another link policy for layers.

        Plans and cached products are shared, since they are exact. A layer with its own link
        uses that.

        Args:
            link: a `LinkPolicy`, such as `pdc.VARCO(...)`; None is exact.
        """
        problem = link_problem(link)
        if problem is not None:
            raise problem
        twin = copy.copy(self.topology)
        twin.link = link
        return _wrap(self.to_local(), twin, self.weight, self)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Dispatches one torch function on edges; raises for unsupported ones."""
        name, kwargs = base_name(func), kwargs or {}
        if name in SIZES:
            return _size(args[0], name, args, kwargs)
        if name == "layout" and args[0].of_torch:
            return torch.sparse_csr
        with torch._C.DisableTorchFunctionSubclass():
            if name in FACTS or name in ("requires_grad=", "grad"):
                return func(*args, **kwargs)
            if name in _COPIES and isinstance(args[0], DistEdgeIndex):
                return _copied_to(args[0], func(*args, **kwargs))
            if name in NEW:  # of the dtype and device
                return getattr(args[0].to_local(), name)(*args[1:], **kwargs)
        first = args[0] if args else None
        matrix = name in op_tables.OF_MATRICES and getattr(first, "of_torch", False)
        if name in _MADE and not matrix:
            return _MADE[name](*args, **kwargs)
        written = isinstance(first, DistEdgeIndex) and getitem.writes(func)
        if (name in op_tables.ON_ALL_EDGES or matrix) and not written:
            return func(*tree_map(_all_edges, args), **tree_map(_all_edges, kwargs))
        raise _unsupported_error(name)

    def __getitem__(self, key: Any) -> Any:
        if type(key) is int and -2 <= key < 2:
            return DistTensor.wrap(self.to_local()[key], self.edges)
        row, column = (
            key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))
        )
        if isinstance(row, (list, Tensor)) and column == slice(None):
            order = torch.as_tensor(row).tolist()
            if order in ([0, 1], [1, 0]):
                return self if order == [0, 1] else _flip(self, 0)
        if row is Ellipsis or row == slice(None):
            return self._columns(column)
        if type(row) is int and row is not key:
            return self[row][column]
        raise _unsupported_error(f"edge_index[{key!r}]")

    def _columns(self, key: Any) -> Any:
        """Returns the edges of a key, in its order."""
        if isinstance(key, slice) and key == slice(None):
            return self
        if isinstance(key, slice) and (key.step or 1) > 0:
            whole = torch.zeros(self.edges.count, dtype=torch.bool)
            whole[key], key = True, whole
        if type(key) is int:
            return torch.stack([self[0][key], self[1][key]])
        if isinstance(key, Tensor) and key.dtype == torch.bool:
            picked = DistTensor.wrap(self.to_local().t(), self.edges)[key]
            local = picked.to_local().t().contiguous()
            sources = self.topology.sources
            return DistEdgeIndex.build(local, self.nodes, picked.rows, sources=sources)
        if isinstance(key, DistTensor) and self.topology.sources is None:
            return DistEdgeIndex.of_ends(self[0][key], self[1][key])
        ids = getitem.replicated_ids(_all_edges(key), self.edges)
        whole = self.full_tensor()[:, ids].contiguous()
        return DistEdgeIndex.cut(whole, self.nodes, self.topology.sources)

    def __iter__(self) -> Iterator[DistTensor]:
        return iter((self[0], self[1]))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Returns all edges as an array, on every rank; collective."""
        found = self.full_tensor().numpy()
        return found if dtype is None else found.astype(dtype)

    def __deepcopy__(self, memo: dict) -> DistEdgeIndex:
        return _wrap(self.to_local().clone(), self.topology, self.weight, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        check_saved(self.nodes.mesh.size, "this rank's edges")
        return self.to_local().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        mesh, edges = self.nodes.mesh, self.edges
        count = edges.total if edges.whole else vars(edges).get("count", "?")
        return (
            f"DistEdgeIndex([2, {count}] on {self.nodes.total} nodes, {len(edges)} edges and "
            f"{len(self.nodes)} nodes on rank {mesh.rank}/{mesh.size}: {self.to_local()})"
        )


def rows_of_edges(gid: Tensor, total: int, nodes: Rows) -> Rows:
    """Returns the rows of edges with given positions in the whole edge_index.

    Args:
        gid: the ids of this rank, ascending.
        total: the number of edges on all ranks.
        nodes: the nodes that they are between.
    """
    stacked = DistEdgeIndex.of_ends
    return Rows(gid, total, nodes.mesh, None, nodes=nodes, stacked=stacked)


_COPIES = frozenset("to cpu cuda clone detach contiguous long pin_memory".split())


def _unsupported_error(name: str) -> TypeError:
    """Returns the error of an unsupported operation on edges, with advice."""
    return TypeError(
        f"{advice()}{name}() of a DistEdgeIndex would need edges of other ranks; use "
        ".to_local() for this rank's edges (global ids) or .full_tensor() for all"
    )


def _size(x: DistEdgeIndex, name: str, args: Any, kwargs: Any) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not x.of_torch and (name == "len" or (name == "size" and dim in (0, -2))):
        return 2  # without asking for the number of edges
    shape = (x.nodes.total, x.sources.total) if x.of_torch else (2, x.edges.count)
    return size_from_shape(name, shape, x, args, kwargs)


def _all_edges(value: Any) -> Any:
    if isinstance(value, DistEdgeIndex) and value.of_torch:
        shape = value.nodes.total, value.sources.total
        return csr_of(value.full_tensor(), _all_edges(value.weight), shape)
    spread = isinstance(value, (DistEdgeIndex, DistTensor))
    return value.full_tensor() if spread else value


def _cat(tensors: Any, dim: int = 0, **more: Any) -> Any:
    """Implements torch.cat along the edges."""
    if "out" in more:  # PyG's collation gives it, even as None
        refuse_loader()
    if any(value is not None for value in more.values()):
        raise _unsupported_error("cat with out=")
    first = next(t for t in tensors if isinstance(t, DistEdgeIndex))
    if dim % 2 != 1:
        raise _unsupported_error("cat")
    if first.sources is not first.nodes:
        whole = torch.cat([_all_edges(t) for t in tensors], 1)
        return DistEdgeIndex.cut(whole, first.nodes, first.sources)
    parts = [
        t if isinstance(t, DistEdgeIndex) else DistEdgeIndex.cut(t, first.nodes)
        for t in tensors
    ]
    ends = [joined([part[k] for part in parts]) for k in (0, 1)]
    rows = rows_of_edges(ends[0].rows.gid, ends[0].rows.total, first.nodes)
    local = torch.stack([e.to_local() for e in ends])
    return DistEdgeIndex.build(local, first.nodes, rows)


def _flip(x: DistEdgeIndex, *dims: Any, **kwargs: Any) -> Any:
    """Implements flip over the two ends, which reverses the edges."""
    dim = kwargs.get("dims", dims[0] if dims else 0)
    if dim not in (0, -2, [0], (0,)):
        raise _unsupported_error("flip")
    if x.topology.sources is not None:
        return DistEdgeIndex.cut(x.full_tensor().flip(0), x.sources, x.nodes)
    return DistEdgeIndex.of_ends(x[1], x[0])


def _transpose(x: DistEdgeIndex, *dims: Any, **kwargs: Any) -> DistTensor:
    """Implements the transpose: a row `[source, target]` for each edge."""
    out = DistTensor.wrap(x.to_local().t(), x.edges)
    out.holds_ends = True
    return out


def _getitem(x: Any, key: Any) -> Any:
    """Implements `x[key]`, where x or the key is, or holds, edges."""
    if isinstance(key, DistEdgeIndex):
        return getitem.at_edges(x, key)
    return x[key if isinstance(x, DistEdgeIndex) else tree_map(_all_edges, key)]


def _setitem(x: Any, key: Any, value: Any) -> None:
    """Implements `x[key] = value` for an ordinary tensor, on all ranks."""
    if isinstance(x, (DistEdgeIndex, DistTensor)):
        raise _unsupported_error("setitem")
    x[tree_map(_all_edges, key)] = _all_edges(value)


def _make_extreme(op: str) -> Callable[..., Any]:
    def found(x: DistEdgeIndex, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            raise _unsupported_error(op)
        pick = torch.maximum if op == "max" else torch.minimum
        return pick(getattr(x[0], op)(), getattr(x[1], op)())

    return found


def _product(x: Any, y: Any, reduce: str = "sum") -> Any:
    if isinstance(x, DistEdgeIndex):
        if reduce != "sum":
            return torch.sparse.mm(_all_edges(x), _all_edges(y), reduce)
        return x.matmul(y) if y.dim() > 1 else x.matmul(y.unsqueeze(1)).squeeze(1)
    raise _unsupported_error("matmul")


_MADE: dict[str, Callable[..., Any]] = {
    "getitem": _getitem,
    "setitem": _setitem,
    "unbind": lambda x, dim=0: (x[0], x[1]),
    "select": lambda x, dim, index: x[index],
    "format": lambda x, spec: format(repr(x), spec),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "flip": _flip,
    "narrow": lambda x, dim, start, length: x[
        (slice(None),) * (dim % 2) + (getitem.span(x.size(dim), start, length),)
    ],
    **dict.fromkeys(("matmul", "mm", "mv", "_sparse_mm"), _product),
    **dict.fromkeys(op_tables.TURNED, _transpose),
    **{op: _make_extreme(op) for op in ("max", "min")},
}


def _wrap(
    local: Tensor, topology: Topology, weight: Any = None, like: Any = None
) -> DistEdgeIndex:
    out = local.as_subclass(DistEdgeIndex)
    out.topology, out.weight = topology, weight
    if like is not None:
        out.looped, out.of_torch = like.looped, like.of_torch
    return out


def _copied_to(before: DistEdgeIndex, after: Tensor) -> DistEdgeIndex:
    if isinstance(after, DistEdgeIndex):
        return after
    if (weight := before.weight) is not None:  # of which torch makes a plain one here
        weight = DistTensor.wrap(weight.to_local().to(after.device), weight.rows)
    return _wrap(after, before.topology.to(after.device), weight, before)


def _shard_end(end: Tensor, rows: Rows) -> Any:
    """Returns this rank's rows of sources or targets; None if the number differs."""
    if isinstance(end, DistTensor):
        return shard_as(end, rows)
    return end[rows.place_on(end.device)] if len(end) == rows.count else None
