"""Runs any PyG layer, unchanged, on own rows and the ghost rows it needs: `HaloConv`."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map
from torch_geometric.nn import EGConv, FAConv, MessagePassing

from pyg_distcomm.comm.gradient_averaging import as_replicated
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.topology import OperatorKind
from pyg_distcomm.nn.halo_execution import HaloVisit
from pyg_distcomm.nn.index_guard import LayerTensor, LocalIndexGuard
from pyg_distcomm.nn.layer_context import (
    INDICES,
    LayerContext,
    OwnLink,
    check_given,
    check_link,
    warn_whole_graph,
)
from pyg_distcomm.nn.local_products import run_layer
from pyg_distcomm.nn.message_forms import check_aggregations, layers_of
from pyg_distcomm.nn.patched_functions import MatrixWeights, replaced
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.row_sharded import eagerly


class HaloExecution:
    """Runs the PyG layer that it is mixed into on a graph spread over ranks.

    On ordinary inputs nothing changes. Given the edges of a partition, the layer runs by halo
    exchange, unchanged; see `HaloConv` for shapes, price and errors.

        class MyConv(HaloExecution, torch_geometric.nn.MessagePassing): ...

    is the same as a subclass of `pyg_distcomm.nn.MessagePassing`.
    """

    link: OwnLink = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer, distributed if it is given distributed edges."""
        run: Any = super().__call__  # type: ignore[misc]
        args, kwargs = shard_inputs(args, kwargs, self)
        return _run(self, self.link, run, *args, **kwargs)  # type: ignore[arg-type]


class HaloConv(torch.nn.Module):
    """Runs any PyG layer, unchanged, on a graph spread over ranks.

    A layer that takes a pair of features gets (own and ghost rows, own rows): its input is
    exchanged. For any other layer, the tensors that it passes to `propagate` are exchanged.
    Normalisation by `gcn_norm` is global. Dropout on edges is keyed by the edge, so that
    masks do not depend on the number of ranks. Parameters, their names and the `state_dict`
    are those of the layer.

    Args:
        conv: a `MessagePassing` layer; it is shared, not copied.
        link: the `LinkPolicy` of its rows; "exact", or None for that of the edge_index.
            It applies to the tensors that the layer passes to `propagate`, except those of
            which attention logits are made, which are exact and synchronous; see
            [Note: attention]. So are all tensors of a layer that caches propagated rows
            (`SGConv(cached=True)`).

    On grids other than (P, 1, 1) rows travel between all ranks as on that grid. Layers that
    sum or average rows with weights that are not trained (GINConv, GraphConv, APPNP) are
    computed as products on the grid where `GridMatrix.price`, summed over ranks, is less;
    other layers, and all layers over a coded link, warn once that they are not.

    Shapes (this rank): x `[n_i, F_in]` DistTensor -> `[n_i, F_out]` DistTensor.
    Price: `halo.price(F)` per exchanged tensor of width F, and its transpose backward; or
    `GridMatrix.price(F)`, see above. The ghosts of an argument that does not change travel
    twice over exact links: they are cached from the second use on, unless
    `DistEdgeIndex.with_ordering` says otherwise.

    Raises:
        TypeError: if conv is not a MessagePassing layer, or reads the topology outside
            `propagate`; the message names the layer.
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
        args, kwargs = shard_inputs(args, kwargs, self.conv)
        return _run(self.conv, self.link, self.conv, *args, **kwargs)

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
        """Yields the modules inside the layer; for PyG's explainers, also the layer itself."""
        memo = set() if memo is None else memo
        if _called_by_explainer() and self.conv not in memo:
            memo.add(self.conv)
            yield prefix, self.conv
        yield from super().named_modules(memo, prefix, remove_duplicate)

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


def _called_by_explainer() -> bool:
    """Tells whether an explainer of PyG iterates over the modules of a model."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _WALKING:
        frame = frame.f_back
    name = "" if frame is None else str(frame.f_globals.get("__name__"))
    return name.startswith(("torch_geometric.explain.", "torch_geometric.utils.embed"))


_WALKING = ("torch.nn.modules.module", __name__)


def _run(
    conv: MessagePassing, link: OwnLink, forward: Callable, *args: Any, **kwargs: Any
) -> Any:
    if any(isinstance(v, DistEdgeIndex) for v in (*args, *kwargs.values())):
        return through_halo(conv, link, forward, *args, **kwargs)
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    return run_layer(conv, forward, *args, **kwargs)


def shard_inputs(args: Any, kwargs: Any, layer: Any) -> tuple[Any, Any]:
    """Returns the arguments of a layer with a whole graph sharded like row-sharded features.

    A plain `edge_index` `[2, e]` or a sparse adjacency, equal on all ranks, becomes a
    DistEdgeIndex; see `DistEdgeIndex.cut`.

    Raises:
        TypeError: for a Data instead of tensors, and for edges in place of x.
    """
    values = [*args, *kwargs.values()]
    check_given(layer, args, kwargs)
    if any(isinstance(v, DistEdgeIndex) for v in values):
        return args, kwargs
    flat = [x for v in values for x in (v if isinstance(v, (tuple, list)) else (v,))]
    found = [x for x in flat if isinstance(x, DistTensor)]
    found = [x for x in found if x.rows.partition is not None and not x.reads_local]
    if not found:
        if not torch.compiler.is_compiling():
            warn_whole_graph(layer, values)
        return args, kwargs
    rows = found[0].rows, found[0].rows
    for pair in values:  # for two node types
        if isinstance(pair, (tuple, list)) and len(pair) == 2:
            if all(isinstance(x, DistTensor) for x in pair):
                rows = pair[1].rows, pair[0].rows
    nodes, sources = rows
    ends = nodes, None if sources.same_as(nodes) else sources
    spread = [_shard_input(v, *ends) for v in args]
    return spread, {name: _shard_input(v, *ends) for name, v in kwargs.items()}


def _check_square(shape: tuple[int, ...], nodes: Rows) -> None:
    """Raises for a sparse adjacency with another number of nodes."""
    if tuple(shape) != (nodes.total, nodes.total):
        raise ValueError(
            f"a sparse adjacency of {nodes.total} nodes is [{nodes.total}, {nodes.total}], "
            f"got {list(shape)}"
        )


def _shard_input(value: Any, nodes: Rows, sources: Rows | None) -> Any:
    if not isinstance(value, Tensor):
        if not hasattr(value, "coo"):  # not a SparseTensor of torch-sparse
            return value
        _check_square(value.sparse_sizes(), nodes)
        edge_index, weight = coo_of(value)
        return DistEdgeIndex.cut(edge_index, nodes).carrying(weight)
    if value.layout != torch.strided:
        _check_square(value.shape[:2], nodes)  # further dims are those of values
        return DistEdgeIndex.of_sparse(value, nodes)
    pair = value.dim() == 2 and value.size(0) == 2 and value.dtype in INDICES
    if pair and not isinstance(value, (DistTensor, LocalIndexGuard)):
        return DistEdgeIndex.cut(value, nodes, sources)
    return value


@eagerly
def through_halo(
    conv: MessagePassing,
    link: OwnLink,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs `forward` of `conv`, and fetches ghosts where the layer reads source nodes."""
    bound = inspect.signature(conv.forward).bind(*args, **kwargs)
    given = bound.arguments
    extra = given.get("kwargs", {}) if "kwargs" not in kwargs else {}
    edge_index = _edge_index(conv, given)
    _check(conv, edge_index, given)
    if edge_index.weight is not None:
        edge_index.check_loops(conv)
        _apply_edge_weight(conv, edge_index.weight, given)
    carry = _attribute_route(conv, edge_index)
    values: Any = edge_index.weight
    if values is not None:
        values = _oriented_values("edge_weight", values, edge_index, carry)
    # rows that the layer caches must be exact
    link = "exact" if any(map(_keeps_rows, layers_of(conv))) else link
    context = LayerContext.of(conv, link, edge_index)
    at_work = context.is_coded
    if at_work and context.link is not None:
        check_aggregations(layers_of(conv), context.link)
    # attention weights that are returned, and masks of all edges, exclude chunks
    whole = given.get("return_attention_weights") is not None or bool(conv.explain)
    keeps = edge_index.topology.ordering.keep_inputs
    how = context.topology, context.exchange(), at_work, whole, keeps
    visit = HaloVisit(conv, *how, values, edge_index.of_torch)
    mesh = edge_index.nodes.mesh
    spilling, explaining = edge_index.nodes.spilling, visit.explaining_memory(given)
    with spilling(), visit.explaining_memory(given):
        for where in (given, extra):
            for name, value in list(where.items()):
                if where is given and name == "kwargs" and extra:
                    continue
                where[name] = _argument(conv, name, value, edge_index, visit, carry)
    try:
        with _replicating(conv, mesh), spilling(), visit.running(), explaining:
            out = forward(*bound.args, **bound.kwargs)
    except TypeError as error:
        if visit.context.layer in str(error):
            raise
        raise TypeError(f"{visit.context.layer}, run distributed: {error}") from error
    return tree_map(visit.wrap_output, out)


def _replicating(conv: MessagePassing, mesh: Mesh) -> contextlib.ExitStack:
    """Returns a context in which weights of a layer are registered as replicated.

    Otherwise those that work on local tensors alone would be missed. Weights are parameters,
    those of lazy modules once their shapes are known, and tensors in their place, as computed
    ones.
    """
    stack = contextlib.ExitStack()
    for module in conv.modules():
        if any(map(is_lazy, module._parameters.values())):
            hook = module.register_forward_pre_hook(_replicate_hook(mesh))
            stack.callback(hook.remove)
            continue
        for store in (module._parameters, module._buffers, vars(module)):
            for name, value in list(store.items()):
                averaged = as_replicated(value, mesh)
                if averaged is not value:  # of a long history
                    stack.enter_context(replaced(store, name, averaged))
    return stack


def _replicate_hook(mesh: Mesh) -> Callable[..., None]:
    def before(module: torch.nn.Module, _: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and not is_lazy(parameter):
                as_replicated(parameter, mesh)

    return before


def _apply_edge_weight(
    conv: MessagePassing, weight: DistTensor, given: dict[str, Any]
) -> None:
    """Gives a layer the values of a sparse adjacency, as PyG does."""
    if isinstance(conv, EGConv):
        spread = {"std"} if "symnorm" in conv.aggregators else {"std", "var"}
        if spread & {*conv.aggregators}:
            raise TypeError(
                "give EGConv(aggregators=['std', ...]) an edge_index: of a sparse adjacency "
                "PyG takes another standard deviation"
            )
    if isinstance(conv, FAConv) and conv.normalize:  # computes its own weights
        if not bool((weight == 1).all()):
            raise TypeError(
                "give FAConv an edge_index: its normalisation has no weights"
            )
        return
    names = inspect.signature(conv.forward).parameters
    for name in ("edge_weight", "edge_type") if weight.dim() == 1 else ("edge_attr",):
        if name in names and given.get(name) is None:
            given[name] = weight


def _keeps_rows(layer: MessagePassing) -> bool:
    """Tells whether a layer caches propagated rows, as SGConv and SSGConv may."""
    names = vars(layer)
    return bool(names.get("cached")) and ("_cached_x" in names or "_cached_h" in names)


def _edge_index(conv: MessagePassing, given: dict[str, Any]) -> DistEdgeIndex:
    found = [v for v in given.values() if isinstance(v, DistEdgeIndex)]
    if len({id(v.topology) for v in found}) != 1:
        raise TypeError(
            f"{type(conv).__name__} got {len(found)} edge_indexes; a layer runs "
            "distributed on one edge_index of pdc.partition"
        )
    return found[0]


def _check(
    conv: MessagePassing, edge_index: DistEdgeIndex, given: dict[str, Any]
) -> None:
    name = type(conv).__name__
    if conv.decomposed_layers > 1:
        raise ValueError(
            f"{name} has decomposed_layers={conv.decomposed_layers}; leave it out, or cap "
            "memory by pdc.partition(..., memory='8GiB'), which runs layers in chunks"
        )
    two_types = edge_index.topology.sources is not None
    if two_types and conv.flow != "source_to_target":
        raise ValueError(
            f"{name} has flow={conv.flow!r}, by which PyG takes no edges between two node "
            "types; flip them, edge_index.flip(0), and leave flow out"
        )
    if two_types and vars(conv).get("add_self_loops"):
        raise ValueError(
            f"set add_self_loops=False of {name}: its edges go from one node type to "
            "another, where no edge is a loop"
        )
    size = given.get("size")
    if size is not None:
        nodes = [edge_index.sources.total, edge_index.nodes.total]
        pair = isinstance(size, (tuple, list)) and len(size) == 2
        if not pair or any(
            said is not None and said != count
            for said, count in zip(size, nodes, strict=True)
        ):
            raise ValueError(
                f"{name} got size={size}, but its edges go from {nodes[0]} nodes to "
                f"{nodes[1]}; leave size out"
            )
        given["size"] = None  # edges hold their numbers of nodes


def _attribute_route(
    conv: MessagePassing, edge_index: DistEdgeIndex
) -> Callable[[DistTensor], DistTensor]:
    """Returns a function that moves edge attributes to the owners of message targets."""
    if conv.flow == "source_to_target":
        return lambda value: value
    back = edge_index.topology.reversed

    def carry(value: DistTensor) -> DistTensor:
        return LayerTensor.wrap(back.carry(value.to_local()), back.topology.edges)

    return carry


def _argument(
    conv: MessagePassing,
    name: str,
    value: Any,
    edge_index: DistEdgeIndex,
    visit: HaloVisit,
    carry: Callable[[DistTensor], DistTensor],
) -> Any:
    """Returns the value that the layer gets for one of its arguments."""
    if isinstance(value, DistEdgeIndex):
        return visit.edges
    if isinstance(value, (tuple, list)) and any(
        isinstance(v, DistTensor) for v in value
    ):
        # to PyG's templates a pair is (sources, targets) of messages, whatever the flow
        ends = visit.sources, visit.nodes
        source, target = (
            None
            if part is None
            else visit.argument(
                edge_index.as_nodes(part, f"{name}[{k}]", ends[k]), ends[k]
            )
            for k, part in enumerate(value)
        )
        if source is None or visit.source == 1 or visit.late:
            return source, target
        return visit.ghosted(source), target
    mesh = edge_index.nodes.mesh
    if not isinstance(value, Tensor) or value.dim() == 0:
        return tree_map(lambda v: as_replicated(v, mesh), value)
    if _has_row_per_edge(name, value, edge_index):
        return _oriented_values(name, value, edge_index, carry)
    if not isinstance(value, DistTensor) and name != "x":
        return as_replicated(value, mesh)
    if visit.sources is not visit.nodes:
        raise TypeError(
            f"give {type(conv).__name__} a pair ({name}_source, {name}_target): its edges "
            "go from one node type to another"
        )
    value = visit.argument(edge_index.as_nodes(value, name), visit.nodes)
    # a pair is (where edges start, where they end), so only one way can be ghosted early
    early = visit.source == 0 and not visit.late and _takes_pair(conv, name)
    return (visit.ghosted(value), value) if early else value


def _oriented_values(
    name: str,
    value: Tensor,
    edge_index: DistEdgeIndex,
    carry: Callable[[DistTensor], DistTensor],
) -> DistTensor:
    """Returns edge values in the direction of messages."""
    local = edge_index.check_edges(value, name)
    assert local is not None
    given = LayerTensor.wrap(local, edge_index.edges)
    out = carry(given)
    if out is given and isinstance(value, DistTensor) and local.is_leaf:
        MatrixWeights.mark(out, OperatorKind(), local)
    return out


def _has_row_per_edge(name: str, value: Tensor, edge_index: DistEdgeIndex) -> bool:
    """Tells whether a tensor has a row per edge; the same on all ranks."""
    if not isinstance(value, DistTensor):
        return name.startswith("edge")
    if value.rows is edge_index.edges or value.rows is edge_index.nodes:
        return value.rows is edge_index.edges
    if edge_index.edges.total != edge_index.nodes.total:
        return value.rows.total == edge_index.edges.total
    return name.startswith("edge")


def _takes_pair(conv: MessagePassing, name: str) -> bool:
    if getattr(conv, "combine_root", None) == "self_loop":  # for one node type
        return False
    parameter = inspect.signature(conv.forward).parameters.get(name)
    hint = str(parameter.annotation) if parameter is not None else ""
    return "Tuple" in hint or "Pair" in hint or "tuple" in hint
