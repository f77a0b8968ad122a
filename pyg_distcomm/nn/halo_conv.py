"""Runs any PyG layer, unchanged, on a share: `HaloConv`, and `HaloExecution` to mix in.

On a share a layer is PyG's, op by op; see [Note: below autograd] in `sharded/dist_tensor.py`.
Here its arguments are checked, its link takes the place of the exchange of source rows, sums
of rows become products of the grid, a cap on memory cuts it into chunks (`capped.py`), and
layers of PyG that are known to read no more than the two ends of their edges run on own rows
and ghosts.

Layers whose message is a row, or a weighted row, and whose aggregation is a sum or a mean
multiply the matrix of their edges, also of edges that they derive from those of a graph, as
`gcn_norm` does. Over a link the exchange takes the place of `x[ids]` where the layer reads
source rows: in `_index_select`, which `propagate` calls; a link is not its own adjoint. All
else of the layer is PyG's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.failure import needing, watch_of
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.graph.local_adjacency import stays
from pyg_distcomm.graph.topology import OperatorKind, Topology, all_or_none
from pyg_distcomm.halo.halo import DEGREES, NAMES, exchange
from pyg_distcomm.kernels.memory import KEPT_FROM
from pyg_distcomm.nn.capped import within_cap
from pyg_distcomm.nn.layer_context import (
    Explained,
    LayerContext,
    OwnLink,
    agreed_link,
    are_rows_of,
    check_arguments,
    check_flow,
    check_link,
    has_hooks,
    is_changed,
    is_spread,
    linked_edges,
    sharded_inputs,
    topology_of,
    warn_about_grid,
)
from pyg_distcomm.nn.local_products import (
    attends_by_kernels,
    is_one_hop,
    is_relational,
    note_rows,
    run_layer,
    usable,
)
from pyg_distcomm.nn.message_forms import (
    AGGREGATIONS,
    MESSAGES,
    adds_rows,
    check_aggregations,
    computes_by_row,
    is_coded,
    layers_of,
    with_attributes,
)
from pyg_distcomm.sharded.agreement import compare_weights
from pyg_distcomm.sharded.constants import constants_of, kept_with, key_of
from pyg_distcomm.sharded.dist_tensor import DistTensor, Placed
from pyg_distcomm.sharded.edges import DistEdgeIndex, attribute
from pyg_distcomm.sharded.ids import Ids, ids_of
from pyg_distcomm.sharded.partial import all_entered

_MOST = 64  # edges that layers derive from those of a graph, as those of each relation


def adding(conv: Any, topology: Topology) -> AbstractContextManager[None]:
    """Has the layers of a module sum rows by products in a block; collective once."""
    layers = [layer for layer in layers_of(conv) if adds_rows(layer)]
    if not layers:
        warn_about_grid(conv, topology, "it does not sum the rows of its neighbours")
    elif topology.sources is not None:
        warn_about_grid(conv, topology, "edges go between two types of nodes")
        layers = []
    return with_attributes(
        layers, lambda layer: {"propagate": BySum(layer, layer.propagate)}
    )


@dataclass(frozen=True)
class BySum:
    """Propagates a layer by a product where it can, and by `run` elsewhere."""

    layer: Any
    run: Callable[..., Any]

    def __call__(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
        found = self.product(edge_index, given)
        return self.run(edge_index, size=size, **given) if found is None else found()

    def product(self, edge_index: Any, given: dict[str, Any]) -> Any:
        """Returns what computes a product; None if it is none of these edges; collective."""
        layer = self.layer
        name = MESSAGES[type(layer).message]
        given = {key: value for key, value in given.items() if value is not None}
        weight = None if name is None else given.get(name)
        x = given.get("x")
        x = x[0] if isinstance(x, (tuple, list)) and len(x) else x
        topology = None if set(given) - {"x", name} else planned(edge_index)
        if topology is None or layer.flow != "source_to_target":
            return None
        if not _fits(x, weight, topology) or topology.nodes.memory is not None:
            return None
        assert x is not None
        mesh = topology.nodes.mesh
        on_grid = mesh.grid[1:] != (1, 1)
        if topology.is_gridded and not _is_constant(weight):
            why = "its edge weights are learnt, or computed in each run"
            warn_about_grid(layer, topology, why)
            return None
        if on_grid and not topology.adds_on_grid:
            why = "a product on the grid would not send fewer numbers"
            warn_about_grid(layer, topology, why)
            return None
        mean = AGGREGATIONS[type(layer.aggr_module)] == "mean"
        edges = None if weight is None else _values(weight, topology)
        wide = x.dtype if edges is None else torch.promote_types(x.dtype, edges.dtype)

        def multiply() -> DistTensor:
            computed = not _is_constant(weight)
            matrix = topology.operator(OperatorKind(), edges, wide, computed=computed)
            out = matrix @ x.to_local().contiguous()
            if mean:
                out = out / topology.in_degree.clamp(min=1).to(out.dtype).unsqueeze(1)
            return DistTensor.from_local(out, topology.nodes)

        if not topology.ordering.keep_inputs:
            return multiply
        # the same tensor each time: A (A X) is kept, too
        number = None if weight is None else key_of(weight)
        inputs = x, weight if number is None else None
        kind, again = ("sum", mean, x.dtype, number), "kept" in vars(x)
        known: Any = topology.constants.product(kind, inputs, multiply, cache_now=again)
        if known is None:
            return multiply
        vars(known)["kept"] = True
        return lambda: known


def _is_constant(weight: DistTensor | None) -> bool:
    return weight is None or key_of(weight) is not None


def _values(weight: DistTensor, topology: Topology) -> Tensor:
    """Returns the weights of own edges, those of a constant as one tensor while it is kept."""
    number = key_of(weight)
    if number is None:
        return weight.to_local()
    kept = topology.edges.derived.get("values")
    if kept is None or kept[0] != number:
        with torch.inference_mode(False):
            kept = number, weight.local.clone()
        topology.edges.derived["values"] = kept
    return kept[1]  # type: ignore[no-any-return]


def _fits(x: Any, weight: Any, topology: Topology) -> bool:
    if type(x) is not DistTensor or x.dim() != 2 or not x.dtype.is_floating_point:
        return False
    if x.dim_ or topology.sources is not None or x.rows is not topology.nodes:
        return False
    if weight is None:
        return True
    known = type(weight) is DistTensor and weight.dim() == 1
    return known and weight.rows is topology.edges and weight.dtype.is_floating_point


def planned(edge_index: Any) -> Topology | None:
    """Returns the topology of edges, made once for constant ones that a layer derives.

    None where their targets are not those of the graph's edges, or where they are fewer than
    a quarter of the nodes: a matrix takes memory for each node. A graph has `_MOST` that may
    last, none of which makes room for others: a model that goes round more of them would
    plan each of them anew. Collective the first time.
    """
    if type(edge_index) is not DistTensor or edge_index.dim_ != 1:
        return None
    if edge_index._topology is not None:
        return edge_index._topology if edge_index.weight is None else None
    number, rows = key_of(edge_index), edge_index.rows
    nodes = rows.nodes
    if number is None or edge_index.dim() != 2 or nodes is None:
        return None

    def make() -> Topology | None:
        local, partition = edge_index.local, nodes.partition
        away = 1
        there = not local.numel() or int(local.max()) < nodes.count
        if partition is not None and there:
            owner = partition.owner_of(local[1].cpu().long())
            away = int((owner != nodes.mesh.rank).sum())
        both = torch.tensor([away, local.size(1)])
        away, count = collectives.all_reduce(both, nodes.mesh.world).tolist()
        fits = not away and 4 * count >= nodes.count
        return DistEdgeIndex.build(local, nodes, rows)._topology if fits else None

    kept = nodes.derived.setdefault("edges", {})
    lasts = constants_of(nodes.mesh).may_last(number)
    if number in kept or (lasts and len(kept) >= _MOST):
        return kept.get(number)  # type: ignore[no-any-return]
    made: Topology | None = kept_with(edge_index, "planned", make)
    if lasts:
        kept[number] = made
    return made


def exchanging(conv: Any, context: LayerContext) -> AbstractContextManager[None]:
    """Fetches source rows by the link of a layer's call in a block; collective."""
    layers = layers_of(conv)
    if context.is_coded and context.link is not None:
        check_aggregations(layers, context.link)
    call = context.exchange()
    if context.topology.chunked:
        return with_attributes(layers, _ChunkVisit(context).stand_ins)
    visit = _Visit(call, context)
    return with_attributes([] if call is None else layers, visit.stand_ins)


def keeps_rows(layer: Any) -> bool:
    """Tells whether a layer caches propagated rows, as SGConv and SSGConv may."""
    names = vars(layer)
    return bool(names.get("cached")) and ("_cached_x" in names or "_cached_h" in names)


class _Visit:
    """Holds one call of a layer: which rows it has fetched."""

    def __init__(self, call: Any, context: LayerContext) -> None:
        self.call, self.context = call, context
        self.now: tuple[str, dict[str, Any]] = "", {}
        self.coded = self.moved = 0  # exchanges of rows of nodes, and of edges
        self.fetched: list[tuple[Any, Any, Tensor]] = []

    def stand_ins(self, layer: Any) -> dict[str, Callable[..., Any]]:
        """Returns what takes the place of methods of a layer."""
        plain = layer._index_select

        def noting(verb: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def call(edge_index: Any, size: Any = None, **given: Any) -> Any:
                edge_index, given = self.at_sums(layer, edge_index, given)
                self.now = verb, given
                return run(edge_index, size=size, **given)

            return call

        return {
            "propagate": noting("propagate", layer.propagate),
            "edge_updater": noting("edge_updater", layer.edge_updater),
            "_index_select": lambda src, index: self.select(layer, plain, src, index),
        }

    def at_sums(self, layer: Any, edge_index: Any, given: Any) -> tuple[Any, Any]:
        """Returns edges, and the rows given for each, where they lie over a link.

        That is with the owners of what they are summed to, so that rows travel: no codec
        writes sums. Collective once for edges that do not change.
        """
        into = int(layer.flow == "source_to_target")
        if type(edge_index) is not DistTensor or edge_index.dim_ != 1:
            return edge_index, given
        end: Any = edge_index[into]
        ids, rows, nodes = ids_of(end), edge_index.rows, self.context.topology.nodes
        if ids is None or ids.highest >= nodes.count:  # not of nodes
            return edge_index, given
        if ids.exchange(nodes).halo.silent:
            return edge_index, given
        there, places = kept_with(
            edge_index, ("at", into), lambda: _moved(layer, edge_index)
        )

        def at(v: Any) -> Any:
            if type(v) is not DistTensor or v.dim_ or v.rows is not rows:
                return v
            if key_of(v) is None:  # computed in each run
                plan = places.exchange(rows)
                self.moved += 1
                how = DEGREES + self.moved, "edges lie with the owners of sums"
                table = self.exchanged(v.to_local(), plan.halo, *how)
                return DistTensor.from_local(table[plan.slot], there.rows)
            kind, to = ("at", id(there.rows)), (there.rows, 0)
            return kept_with(v, kind, lambda: attribute(Placed.apply(v, to)))

        return there, tree_map(at, given)

    def select(
        self, layer: Any, plain: Callable[..., Tensor], src: Any, index: Any
    ) -> Tensor:
        """Returns the rows of `src` at ids, those of other ranks over the link."""
        spread = type(src) is DistTensor and type(index) is DistTensor
        of_nodes = spread and src.dim_ == layer.node_dim % src.dim()
        ids = ids_of(index) if of_nodes else None
        place = None if ids is None else self.place(src, ids)
        if ids is None or place is None:
            return plain(src, index)
        halo, slot = place
        known = [t for x, of, t in self.fetched if x is src and of is halo]
        table = known[0] if known else self.table(layer, src, halo)
        found = DistTensor.from_local(table.index_select(0, slot), ids.rows)
        return found.movedim(0, src.dim_) if src.dim_ else found

    def place(self, src: Any, ids: Any) -> Any:
        """Returns the halo of rows at ids, and where they lie among own rows and ghosts."""
        plan = ids.exchange(src.rows)
        return None if plan is None or plan.halo.silent else (plan.halo, plan.slot)

    def table(self, layer: Any, src: Any, halo: Any) -> Tensor:
        """Returns own rows and ghosts, whose first dimension is that of the rows."""
        verb, given = self.now
        name = next((k for k, v in given.items() if _holds(v, src)), "")
        local = src.to_local().movedim(src.dim_, 0).contiguous()
        coded = is_coded(layer, verb, name, local)
        how = len(NAMES) + self.coded, "" if coded else "attention depends on it"
        table, self.coded = self.exchanged(local, halo, *how), self.coded + 1
        if not coded:
            self.fetched.append((src, halo, table))
        return table

    def exchanged(self, local: Tensor, halo: Any, number: int, exact: str) -> Tensor:
        """Returns own rows and ghosts, over the link, or exactly for a reason."""
        call = self.call.as_exact(exact) if exact else self.call
        link = call.wrap(halo, number)
        flat = local.unsqueeze(1) if local.dim() == 1 else local
        table = torch.cat([flat, exchange(flat, link)])
        return table.squeeze(1) if local.dim() == 1 else table


def _moved(layer: Any, edge_index: DistTensor) -> tuple[DistTensor, Ids]:
    """Returns edges with the owners of what they are summed to, and where they were.

    Collective.
    """
    if edge_index.rows.nodes is None:
        raise ValueError(
            f"{type(layer).__name__} has flow={layer.flow!r}, and edges between two types of "
            "nodes, which it reads against their direction: no link codes that; turn them "
            "around before pdc.partition, and leave flow out, or set link='exact' for it"
        )
    source, target = edge_index
    if layer.flow == "source_to_target":
        found: Any = DistEdgeIndex.of_ends(source, target)
    else:
        found = DistEdgeIndex.of_ends(target, source).flip(0)
    return found, Ids(found.rows.place_on(found.device), found.rows)


class _ChunkVisit(_Visit):
    """Reads source rows of a chunk of a pipeline, each once; see `pipeline/chunk_graph.py`."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(None, context)
        self.here = context.topology.locals

    def at_sums(self, layer: Any, edge_index: Any, given: Any) -> tuple[Any, Any]:
        return edge_index, given

    def place(self, src: Any, ids: Any) -> Any:
        return None if ids.end != 0 else (None, ids.local)

    def table(self, layer: Any, src: Any, halo: Any) -> Tensor:
        table = self.here.with_ghosts(src.to_local().movedim(src.dim_, 0).contiguous())
        self.fetched.append((src, None, table))
        return table


def _holds(value: Any, src: Any) -> bool:
    return value is src or (
        isinstance(value, (tuple, list)) and any(v is src for v in value)
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_on_share(
    conv: Any, link: OwnLink, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs `run`, the forward of a layer, on a share, over its link if it has one."""
    args, kwargs = sharded_inputs(args, kwargs)
    values = (*args, *kwargs.values())
    edges: Any = [v for v in values if topology_of(v) is not None]
    edges = edges or linked_edges(values, link)
    if len(edges) != 1:
        return run(*args, **kwargs)
    topology = edges[0].topology
    if is_one_hop(conv) and (link in (None, "exact") or topology.chunked):
        run = one_hop(conv, run)
    check_flow(conv, topology)
    run = _explaining_memory(conv, run, topology)
    exact = link in (None, "exact") and topology.link is None
    if exact and not topology.chunked:
        agreed_link(conv, "exact", topology)
    # products step below autograd, which a transform of torch.func would not see
    transformed = torch._C._are_functorch_transforms_active()
    if exact and (transformed or edges[0].of_torch):
        return run(*args, **kwargs)
    if exact and not topology.chunked:
        how: Any = contextlib.nullcontext()
        if topology.nodes.memory is not None:
            how = within_cap(conv, topology, args, kwargs)
        elif not _adds_relations(conv, topology, (*args, *kwargs.values())):
            how = adding(conv, topology)
        with how:
            return run(*args, **kwargs)
    if edges[0].of_torch:
        raise TypeError(
            f"give {type(conv).__name__} an edge_index, or no link: rows that are multiplied "
            "by a sparse matrix are not sent over links"
        )
    if any(map(keeps_rows, layers_of(conv))):
        link = "exact"  # what it keeps must be exact
    context = LayerContext(conv, link, edges[0])
    if not exact:
        why = "its link encodes rows, which are summed on the rank that receives them"
        warn_about_grid(conv, topology, why)
    with exchanging(conv, context):
        return run(*args, **kwargs)


def _explaining_memory(
    conv: Any, run: Callable[..., Any], topology: Topology
) -> Callable[..., Any]:
    """Returns a call of `run` that explains an out-of-memory error of a layer."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except (RuntimeError, MemoryError):
            given = [x for x in tree_leaves((args, kwargs)) if type(x) is DistTensor]
            widest = max((x.local[:1].nbytes for x in given if not x.dim_), default=8)
            nodes, count = topology.nodes, len(topology.edges)
            rows = count + len(topology.locals.ghost_gid) + len(nodes)
            name = type(conv).__name__
            what = f"{name}, with messages of {count:,} edges and its halo,"
            watch = watch_of(nodes.mesh)
            with needing(what, lambda: rows * widest, watch, topology.device):
                raise

    return call


def run_any(
    conv: Any, link: OwnLink, run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs `run`, a layer of any kind, on a share, a minibatch or a whole graph."""
    check_arguments(conv, args, kwargs)
    _check_edges_of_link(conv, link, (*args, *kwargs.values()))
    if is_spread(*args, *kwargs.values()):
        return run_on_share(conv, link, run, *args, **kwargs)
    if torch.compiler.is_compiling():
        return run(*args, **kwargs)
    return run_layer(conv, run, *args, **kwargs)


def _check_edges_of_link(conv: Any, link: OwnLink, values: Any) -> None:
    """Raises for a link of a layer of several edge_index, over which rows do not travel.

    Raises:
        TypeError: naming the layer.
    """
    if link == "exact" or getattr(conv, "links_relations", False):
        return
    edges = [v for v in tree_leaves(values) if topology_of(v) is not None]
    alone = any(topology_of(v) is not None for v in values) and len(edges) == 1
    linked = link is not None or any(e.topology.link is not None for e in edges)
    if edges and linked and not alone:
        raise TypeError(
            f"{type(conv).__name__} reads {len(edges)} edge_index, whose rows do not travel "
            "over a link: set link='exact' for it (or edge_index.with_link(None)), or take a "
            "layer of one edge_index, in a HeteroConv for several types"
        )


class HaloExecution(Explained):
    """Runs a PyG layer on a share over its link, and elsewhere by compiled products.

    On a share the layer is PyG's, op by op; see `DistTensor`.

        class MyConv(HaloExecution, torch_geometric.nn.MessagePassing): ...
    """

    link: OwnLink = None
    links_relations = False  # whether it exchanges rows of each relation over its link

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer, with its hooks."""
        run: Any = super().__call__  # type: ignore[misc]
        return run_any(self, self.link, run, *args, **kwargs)


class HaloConv(torch.nn.Module):
    """Runs any PyG layer, unchanged, on a graph that is spread over ranks.

    On a share the layer is PyG's, op by op, and runs without this wrapper, too. The wrapper
    adds a link, products for sums of rows, and a memory cap. A layer known to read no more
    than the two ends of its edges gets (own and ghost rows, own rows) of its input. Dropout
    on edges is keyed by the edge, so that masks do not depend on the number of ranks.
    Parameters, their names and the `state_dict` are those of the layer.

    Args:
        conv: a `MessagePassing` layer; it is shared, not copied.
        link: the `LinkPolicy` of its rows; "exact", or None for that of the edge_index.
            It applies to the tensors that the layer passes to `propagate`, except those of
            which attention logits are made, which are exact and synchronous; see
            [Note: attention]. So are all tensors of a layer that caches propagated rows
            (`SGConv(cached=True)`).

    Layers that sum or average rows with weights that do not change (GINConv, GraphConv,
    APPNP) are computed as products. On grids other than (P, 1, 1) they are where
    `GridMatrix.price`, summed over ranks, is less; the rows of other layers, and of all
    layers over a coded link, travel between all ranks as on (P, 1, 1), with a warning.

    Shapes (this rank): x `[n_i, F_in]` DistTensor -> `[n_i, F_out]` DistTensor.
    Price: `halo.price(F)` per exchanged tensor of width F, and its transpose backward; of a
    product `GridMatrix.price(F)`. The ghosts of an argument that does not change travel
    twice over exact links: they are cached from the second use on, unless
    `DistEdgeIndex.with_ordering` says otherwise.

    Raises:
        TypeError: if conv is not a MessagePassing layer.
        ValueError: over a link that leaves out numbers, if the aggregation is not a sum or
            a mean.
    """

    def __init__(self, conv: MessagePassing, link: OwnLink = None) -> None:
        super().__init__()
        if not isinstance(conv, MessagePassing):
            raise TypeError(
                f"HaloConv wraps a MessagePassing layer of PyG, got {type(conv).__name__}"
            )
        self.link = check_link(link)
        self._wrapped = [conv]  # in a list, so that it is not registered as a submodule
        self._share()

    def _share(self) -> None:
        """Shares parameters, buffers, submodules and the mode with the layer."""
        conv = self.conv
        self._parameters, self._buffers = conv._parameters, conv._buffers
        self._modules = conv._modules
        self._non_persistent_buffers_set = conv._non_persistent_buffers_set
        self.training = conv.training

    @property
    def conv(self) -> MessagePassing:
        """The wrapped layer."""
        return self._wrapped[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer with its own arguments."""
        self.conv.training = self.training
        return run_any(self.conv, self.link, self.conv, *args, **kwargs)

    def train(self, mode: bool = True) -> HaloConv:
        """Sets the mode of the layer and of its submodules."""
        super().train(mode)
        self.conv.training = mode
        return self

    def named_modules(
        self,
        memo: set[torch.nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yields the modules inside the layer, and the layer itself, which explainers mask."""
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if remove_duplicate and self.conv not in memo:
            memo.add(self.conv)
            yield f"{prefix}.conv" if prefix else "conv", self.conv

    def reset_parameters(self) -> None:
        """Resets the layer's parameters."""
        self.conv.reset_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()  # a copy shares state with its copy of the layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_wrapped":
                raise
            return getattr(self.conv, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if "_wrapped" in own and name not in own:  # the layer reads its own
            setattr(self.conv, name, value)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"HaloConv({self.conv})"


def one_hop(conv: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a layer on own rows and ghosts, of which each travels once.

    What travels is the input, `[h, F_in]`; that of a constant input once. Where a product
    adds rows, a small layer runs on own rows and these sums. One whose modules mix rows, one
    with a link, or with dropout of attention that no kernel computes, runs op by op.
    """

    def on_own_rows(x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        topology = topology_of(edge_index)
        values = (*args, *kwargs.values())
        weighted = topology is not None and edge_index.weight is not None
        if topology is None or weighted or not _runs_there(conv, topology, x, values):
            return run(x, edge_index, *args, **kwargs)
        by = _adder(conv, topology, x)
        if by is not None:
            given = dict(zip(("edge_weight",), args, strict=False)) | kwargs
            add = by.product(edge_index, {"x": x, **given})
            if add is None:
                return run(x, edge_index, *args, **kwargs)
            sums = add().to_local()
            summed = {"propagate": lambda *_, **__: sums}
            with on_ranks(conv, topology), with_attributes([conv], lambda _: summed):
                out = run(x.to_local(), edge_index, *args, **kwargs)
            return DistTensor.from_local(out, topology.nodes)
        ends = stays(topology.locals.ends)
        if getattr(conv, "dropout", 0.0) > 0 and conv.training:
            note_rows(conv, ends, edge_index)
        source, target = x if isinstance(x, (tuple, list)) else (x, x)
        own, table = target.to_local(), topology.constant_rows(source)
        if table is None:
            rows = source.to_local().contiguous()
            table = topology.locals.with_ghosts(rows)
            own = rows if source is target else own
        args, kwargs = tree_map(
            lambda v: v.to_local() if type(v) is DistTensor else v, (args, kwargs)
        )
        with on_ranks(conv, topology):
            out = run_layer(conv, run, (table, own), ends, *args, **kwargs)
        return DistTensor.from_local(out, topology.nodes)

    return on_own_rows


def _runs_there(conv: Any, topology: Topology, x: Any, values: Any) -> bool:
    """Tells whether a layer may run on own rows and ghosts."""
    link = topology.link is None and getattr(conv, "link", None) in (None, "exact")
    drops = getattr(conv, "dropout", 0.0) > 0
    mesh, in_chunks = topology.nodes.mesh, topology.nodes.memory is not None
    if not link or in_chunks or (drops and topology.chunked):
        return False
    hooked = has_hooks(conv) or any(map(is_changed, conv.modules()))  # by all rows
    if isinstance(mesh, Mesh):
        known = mesh.sharded.setdefault("hooked layers", weakref.WeakSet())
        all_or_none(hooked != (conv in known), mesh, _HOOKED)
        (known.add if hooked else known.discard)(conv)
    if conv.flow != "source_to_target" or conv.explain or hooked:
        return False
    if torch._C._are_functorch_transforms_active():  # which would not see what is below
        return False
    replaced = not isinstance(vars(conv).get("propagate"), BySum | None)
    if replaced and not topology.chunked:
        return False
    # op by op, large results go to kept blocks, which saves more than Python costs
    small = type(x) is DistTensor and x.nbytes < mesh.size * KEPT_FROM
    if not small and _adder(conv, topology, x) is not None:
        return False
    if any(map(is_lazy, conv.parameters())) or not computes_by_row(conv):
        return False
    pair = x if isinstance(x, (tuple, list)) else (x, x)
    if len(pair) != 2 or any(type(one) is not DistTensor for one in pair):
        return False
    if topology.sources is not None:
        if pair[0] is pair[1] or getattr(conv, "add_self_loops", False):
            return False
    source, target = pair
    fits = are_rows_of(source, topology) and source.dim() == target.dim() == 2
    fits = fits and target.dim_ == 0 and target.rows is topology.nodes
    given = [v for v in values if v is not None]
    fits = fits and all(
        type(v) is DistTensor and v.dim_ == 0 and v.rows is topology.edges
        for v in given
    )
    # on a rank without edges PyG's GATConv reads none of these, nor their weights
    leaves_out = given and getattr(conv, "att_edge", None) is not None
    if fits and (leaves_out or (drops and conv.training)):
        local = (v.local for v in (source, target, *given))
        fits = len(given) < 2 and attends_by_kernels(conv, *local)
    return fits


def _adder(conv: Any, topology: Topology, x: Any) -> BySum | None:
    """Returns what adds the rows that a layer reads, unprojected ones, if a product does."""
    by = vars(conv).get("propagate")
    if topology.sources is not None or getattr(conv, "project", False):
        return None
    known = isinstance(by, BySum) and not _adds_relations(conv, topology, (x,))
    return by if known else None


@contextlib.contextmanager
def on_ranks(conv: Any, topology: Topology) -> Iterator[None]:
    """Has a layer compute on own rows in a block: its gradients are parts of sums."""
    mesh, params = topology.nodes.mesh, list(conv.parameters())
    if mesh.size > 1:
        compare_weights(params, mesh)
    found = dict(zip(map(id, params), all_entered(params, mesh), strict=True))
    held = [(part._parameters, dict(part._parameters)) for part in conv.modules()]
    try:
        for own, before in held:
            own.update({name: found.get(id(p)) for name, p in before.items()})
        yield
    finally:
        for own, before in held:
            own.update(before)


def _adds_relations(conv: Any, topology: Topology, values: Any) -> bool:
    """Tells whether a layer sums the rows of all relations at once, from one exchange."""
    rows = [v[0] if isinstance(v, (tuple, list)) else v for v in values]
    return (
        topology.nodes.mesh.grid[1:] == (1, 1)
        and is_relational(conv)
        and not is_changed(conv)
        and usable()
        and any(type(x) is DistTensor and x.dtype == conv.weight.dtype for x in rows)
    )


_HOOKED = (
    "register hooks of a layer, and of the modules in it, on all ranks or on none: some ranks "
    "alone have hooks there, or a forward of their own, and would run the layer otherwise"
)
