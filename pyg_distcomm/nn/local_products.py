"""Runs layers on ordinary tensors by compiled SpMM, if the CSR form of edges is known.

Edges are known if a sampler of this package has drawn them, or from the second use of an
edge_index on; see [Note: what a tensor carries] in `graph.local_adjacency`. PyG's layer then
runs unchanged except for its edges: `propagate` of a layer whose messages are rows, weighted
rows or rows with attention is an SpMM. Layers of `_KERNELS` are run as a whole, which also
fuses means, normalisation and bias. Other layers, and layers with hooks or overridden methods,
under autocast, torch.compile or functorch, run PyG's code.

Layers of attention:

    X'_i = sum_j a_ij W x_j,   a_ij = softmax_j(s_ij)

    GATConv          s_ij = LeakyReLU(<u, W x_j> + <v, W x_i>)    [Velickovic18] Eq. 1-4
    GATv2Conv        s_ij = <a, LeakyReLU(W x_j + V x_i)>         [Brody22] Eq. 7
    TransformerConv  s_ij = <Q x_i, K x_j> / sqrt(C)              [Shi21] Sec. 3.1

PyG computes `<u, W x>` from the transformed rows of all nodes; here it is `<W^T u, x>`, a
product with a matrix of as many columns as there are heads. So is the score of a GATConv's
edge attributes e; a TransformerConv takes `<E^T Q x_i, e_ij>` and `E sum_j a_ij e_ij`, so that
no attribute is transformed for each edge. Scores are computed edge by edge: no row is copied
for each edge, except by a GATv2Conv with edge attributes. Of targets only the rows that are
computed are transformed, and self-loops are added once for an edge_index.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.autograd import forward_ad
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_distcomm.graph.edge_products import (
    aggregate,
    dots,
    ends_added,
    linear,
    multiply,
    multiply_linear,
    pair_scores,
    rows_at,
    softmax_of,
    sums_at,
    sums_first,
)
from pyg_distcomm.graph.local_adjacency import (
    GroupedEdges,
    LocalAdjacency,
    adjacency_of,
    has_products,
    known,
    looped_edges,
    outside_inference_mode,
    plain_edges,
)
from pyg_distcomm.nn import trimming
from pyg_distcomm.nn.layer_context import (
    dtype_of,
    is_changed,
    is_product,
    linears_of,
    runs_as_pyg,
)
from pyg_distcomm.nn.leading_rows import leading, total_of, whole
from pyg_distcomm.nn.message_forms import (
    AGGREGATIONS,
    MESSAGES,
    computes_by_row,
    propagated,
)
from pyg_distcomm.sharded.dist_tensor import DistTensor

_FLOATS = (torch.float32, torch.float64)
_TYPES = 4  # types of the same edges, of which an RGCNConv keeps the CSR form

# When it applies ---------------------------------------------------------------------


def usable(*tensors: Any) -> bool:
    """Tells whether the kernels can replace PyG's operations on these tensors."""
    if torch.compiler.is_compiling() or is_tracing():
        return False
    if torch._C._is_any_autocast_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    if forward_ad._current_level >= 0:
        return False
    given = [t for t in tensors if t is not None]
    return all(map(_is_plain, given)) and len({t.device for t in given}) < 2


def _is_plain(t: Any) -> bool:
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and has_products(t)
        and t.layout == torch.strided
        and t.dtype in _FLOATS
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
    )


@dataclass(frozen=True)
class _Propagate:
    """Propagates a layer by products of a known form, and as PyG does elsewhere.

    Args:
        conv: the layer.
        kept: edges that it has multiplied by in this call, by identity.
    """

    conv: Any
    kept: dict[int, tuple[Tensor, LocalAdjacency]]

    def __call__(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
        found = self._product(edge_index, size, given)
        if found is not None:
            return found
        return type(self.conv).propagate(self.conv, edge_index, size=size, **given)

    def _product(self, edge_index: Any, size: Any, given: dict[str, Any]) -> Any:
        """Returns the result by a product; None if its form is not known.

        None, too, for edges that a layer makes in each call on a device, which would be
        asked each time.
        """
        x, value, known = propagated(self.conv, given)
        source, _ = _pair(x)
        kind = AGGREGATIONS.get(type(self.conv.aggr_module))
        wanted = 3 if MESSAGES.get(type(self.conv).message) == "alpha" else 2
        if not known or kind is None or type(edge_index) is not Tensor:
            return None
        if not usable(source, value) or source.dim() != wanted:
            return None
        shape = _sizes(x, size)
        if shape is None:
            return None
        if value is not None:
            value = value if wanted == 3 else value.flatten()
            fits = value.dtype == source.dtype and len(value) == edge_index.size(1)
            if not fits or kind == "max":
                return None
        if id(edge_index) not in self.kept:
            if not edge_index.is_cpu:
                return None
            found = adjacency_of(edge_index) or LocalAdjacency(None)
            self.kept[id(edge_index)] = edge_index, found
        edges = self.kept[id(edge_index)][1].grouped(edge_index, *shape)
        if edges is None:
            return None
        value = None if value is None else edges.in_order(value)
        return aggregate(kind, edges, value, source)


def _pair(x: Any) -> Any:
    """Returns the rows of sources and of targets."""
    return x if isinstance(x, (tuple, list)) else (x, x)


def _sizes(x: Any, size: Any) -> Any:
    """Returns the numbers of sources and targets; None if they are not as `size` says."""
    source, target = _pair(x)
    if target is None and size is None:
        return None
    found = total_of(source), size[1] if target is None else total_of(target)
    return found if size is None or tuple(size) == found else None


@contextlib.contextmanager
def _running(
    conv: MessagePassing, edge_index: Tensor, adjacency: LocalAdjacency
) -> Iterator[None]:
    """Has a layer run by products in a block; another thread's call gives the same results."""
    own: dict[str, Any] = vars(conv)
    own["propagate"] = _Propagate(conv, {id(edge_index): (edge_index, adjacency)})
    try:
        yield
    finally:
        own.pop("propagate", None)


def _runs_by_products(conv: MessagePassing) -> bool:
    """Tells whether a PyG layer has messages of a known form, or attends to neighbours."""
    kind, own = type(conv), vars(conv)
    if conv.decomposed_layers > 1 or conv.flow != "source_to_target":
        return False
    if not runs_as_pyg(conv) or "edge_updater" in own:
        return False
    if not isinstance(own.get("propagate"), _Propagate | None):
        return False
    return kind.message in MESSAGES or kind.message is pyg.TransformerConv.message


# Layers on ordinary tensors ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a layer, once its edges are known; computes it by a kernel, or by its steps.

    Args:
        conv, forward: the layer, and what runs it.
        bound: its arguments.
        adjacency, edge_index: its edges.
        kernel: computes the layer as a whole; None if none does.
    """

    conv: Any
    forward: Callable[..., Any]
    bound: inspect.BoundArguments
    adjacency: LocalAdjacency
    edge_index: Tensor
    kernel: Kernel | None

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """The numbers of sources and of targets of all edges."""
        given = self.bound.arguments
        return _sizes(given["x"], given.get("size"))  # type: ignore[no-any-return]

    def __call__(self, source: Tensor, target: Any, rows: int | None) -> Any:
        """Returns the output at the first `rows` targets; at all of them for None."""
        if self.kernel is not None:
            with parametrize.cached():  # PyG's code reads each weight once
                found = self.kernel(self, source, target, rows)
            if found is not None:
                return found
        assert rows is None
        return self.by_steps({"x": source if target is source else (source, target)})

    def by_steps(self, own: dict[str, Any]) -> Any:
        """Runs the layer as PyG wrote it, except for products in place of `propagate`."""
        given = self.bound.arguments | own
        call = inspect.BoundArguments(self.bound.signature, given)  # type: ignore[arg-type]
        with _running(self.conv, self.edge_index, self.adjacency):
            return self.forward(*call.args, **call.kwargs)

    def edges(self, count: int | None = None) -> GroupedEdges | None:
        """Returns the CSR form of edges, into the first `count` targets if not None."""
        found = self.adjacency.grouped(self.edge_index, *self.sizes)
        return found if found is None or count is None else found.prefix(count)

    def values(self, edges: GroupedEdges) -> Tensor | None:
        """Returns the weights of edges in their order; None without."""
        weight = self.bound.arguments.get("edge_weight")
        return None if weight is None else edges.in_order(weight)


# takes a call, sources, targets, and how many targets to compute; returns None for edges or
# types of edges that it does not multiply by
Kernel = Callable[[_Call, Tensor, Any, int | None], Tensor | None]


def run_layer(
    conv: MessagePassing, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs `forward` of a layer on ordinary tensors, by products if its edges are known."""
    name = type(conv).__name__.removeprefix("Dist")
    bound = _bind_arguments(conv, args, kwargs)
    given = {} if bound is None else bound.arguments
    edge_index: Any = given.get("edge_index")
    adjacency = kernel = None
    if usable() and _runs_by_products(conv):
        kernel = _kernel_of(conv, forward, given)
        edge_index, adjacency = _edges_of(edge_index, given)
    if bound is None or adjacency is None:
        trimming.note_untrimmed(edge_index, name)
        args, kwargs = whole((args, kwargs), name)
        return forward(*args, **kwargs)
    given["edge_index"] = edge_index
    call = _Call(conv, forward, bound, adjacency, edge_index, kernel)
    if _takes_first(call):
        others = (value for key, value in given.items() if key != "x")
        reads = *conv.parameters(), *conv.buffers(), *others
        return trimming.call(adjacency, edge_index, given["x"], call, reads)
    trimming.note_untrimmed(edge_index, name)
    given.update(whole(given, name))
    if kernel is None:
        return call.by_steps({})
    source, target = _pair(given["x"])
    return call(source, target, None)


def is_relational(conv: Any) -> bool:
    """Tells whether a layer is PyG's RGCNConv, which sums rows by relation."""
    kind = pyg.RGCNConv
    same = type(conv).forward is kind.forward and is_product(conv, kind)
    # not computed each time that it is read
    return same and conv.node_dim == 0 and "weight" in conv._parameters


def _edges_by_relation(call: _Call, source: Tensor) -> GroupedEdges | None:
    """Returns the edges of an RGCNConv, with a row for each target and relation; kept.

    None if an edge is of no relation of the layer, if most of these rows would be empty, or if
    their CSR form would be made only once: in a minibatch, and for more types of the same
    edges than `_TYPES`.
    """
    conv, adjacency, edge_index = call.conv, call.adjacency, call.edge_index
    kind: Any = call.bound.arguments.get("edge_type")
    if not isinstance(kind, Tensor) or kind.is_floating_point() or kind.dim() != 1:
        return None
    # one of several weights for parts of a row
    if adjacency.batch is not None or conv.num_blocks is not None:
        return None
    fits = source.size(1) == conv.weight.size(1) and source.dtype == conv.weight.dtype
    count, shape = conv.num_relations, call.sizes
    if not fits or not count * shape[1] / 4 <= len(kind) == edge_index.size(1):
        return None
    key = "relations", count, *shape
    stamp = kind.data_ptr(), kind._version, kind.stride()
    known = adjacency.derived.setdefault(key, {})
    if stamp not in known and len(known) < _TYPES:
        with outside_inference_mode():
            kept = None
            if not len(kind) or (int(kind.min()) >= 0 and int(kind.max()) < count):
                rows = edge_index[1].long() * count + kind
                ends = torch.stack([edge_index[0].long(), rows])
                kept = GroupedEdges.build(ends, shape[0], shape[1] * count)
        known[stamp] = kept, kind.untyped_storage()
    return known.get(stamp, (None,))[0]  # type: ignore[no-any-return]


def _relations(call: _Call, source: Tensor, target: Tensor, _: Any) -> Tensor | None:
    """Runs an RGCNConv: the sums of all relations are one product, which one matrix weighs.

    Shapes: source [n_s, F], target [n, F]; returns [n, F_out].
    """
    conv, edges = call.conv, _edges_by_relation(call, source)
    if edges is None:
        return None
    weight = conv.weight
    if conv.num_bases is not None:
        weight = conv.comp @ weight.flatten(1)
    weight = weight.reshape(-1, conv.out_channels).t()
    own = None if conv.root is None else conv.root.t()
    kind = AGGREGATIONS[type(conv.aggr_module)]
    if kind == "max":
        most = aggregate(kind, edges, None, source).view(len(target), weight.size(1))
        return linear(most, weight, conv.bias, target, own)
    given = source, target, weight, conv.bias, own
    return multiply_linear(kind, edges, *given, sums_first=True)


def attends_by_kernels(
    conv: Any, source: Tensor, target: Tensor, attr: Tensor | None = None
) -> bool:
    """Tells whether `run_layer` runs a layer of attention by the kernels, on such rows."""
    given = {"x": (source, target), "edge_attr": attr}
    return _runs_by_products(conv) and _kernel_of(conv, None, given) is not None


def _takes_first(call: _Call) -> bool:
    """Tells whether a layer can compute only the first targets."""
    if call.kernel is not _gin or call.adjacency.batch is None:
        return call.kernel not in (None, _relations)
    parts = (part for part in call.conv.modules() if part is not call.conv)
    return not any(map(is_changed, parts)) and computes_by_row(call.conv, draws=True)


def _edges_of(
    edge_index: Any, given: dict[str, Any]
) -> tuple[Any, LocalAdjacency | None]:
    """Returns the edge_index of a layer as a tensor, and its `LocalAdjacency`.

    An EdgeIndex stays one where the layer returns it, or where it is of other sizes.
    """
    ends = _pair(given.get("x"))
    sizes = [len(t) if isinstance(t, Tensor) and t.dim() else None for t in ends]
    plain = plain_edges(edge_index, *sizes)
    returned = given.get("return_attention_weights") is not None
    if type(plain) is not Tensor or (returned and plain is not edge_index):
        return edge_index, None
    if any(isinstance(t, Tensor) and t.device != plain.device for t in ends):
        return edge_index, None
    return plain, adjacency_of(edge_index)


def _bind_arguments(conv: Any, args: Any, kwargs: Any) -> inspect.BoundArguments | None:
    try:
        return inspect.signature(conv.forward).bind(*args, **kwargs)
    except TypeError:  # which the layer says better
        return None


# Kernels -----------------------------------------------------------------------------


def _sage(
    call: _Call, source: Tensor, root: Tensor | None, count: int | None
) -> Tensor | None:
    """Runs PyG's SAGEConv or GraphConv.

        x'_i = W_1 aggr_{j in N(i)} w_ij x_j + b + W_2 x_i

    Shapes: source [n_s, F_s], root [>= m, F_t] or None; returns [m, F_out].
    """
    conv, edges = call.conv, call.edges(count)
    if edges is None:
        return None
    if isinstance(conv, pyg.GraphConv):
        lin, own = conv.lin_rel, conv.lin_root
    else:
        lin, own = conv.lin_l, conv.lin_r if conv.root_weight else None
        if conv.project and hasattr(conv, "lin"):
            source = conv.lin(source).relu()
    kind, value = AGGREGATIONS[type(conv.aggr_module)], call.values(edges)
    root = None if own is None else root
    root_weight = None if own is None or root is None else own.weight
    if kind == "max" or value is not None:
        sums = aggregate(kind, edges, value, source)
        root = None if root is None else root[: len(sums)]
        out = linear(sums, lin.weight, lin.bias, root, root_weight)
    else:
        first = sums_first(edges, source, lin.weight)
        weights = lin.weight, lin.bias, root_weight
        out = multiply_linear(kind, edges, source, root, *weights, sums_first=first)
    return F.normalize(out, p=2.0, dim=-1) if getattr(conv, "normalize", False) else out


def _gin(
    call: _Call, source: Tensor, root: Tensor | None, count: int | None
) -> Tensor | None:
    """Runs PyG's GINConv.

        x'_i = h((1 + eps) x_i + aggr_{j in N(i)} x_j)

    Shapes: source [n_s, F], root [>= m, F] or None; returns [m, F_out].
    """
    conv, edges = call.conv, call.edges(count)
    if edges is None:
        return None
    out = aggregate(AGGREGATIONS[type(conv.aggr_module)], edges, None, source)
    out = out if root is None else out + (1 + conv.eps) * root[: len(out)]
    return conv.nn(out)  # type: ignore[no-any-return]


def _gcn(call: _Call, x: Tensor, _: Any, count: int | None) -> Tensor | None:
    """Runs PyG's GCNConv.

        X' = A X W + b,   A = D^-1/2 (A + I) D^-1/2 of all edges given

    Shapes: x [n, F_in]; returns [m, F_out].
    """
    conv, found = call.conv, _matrix(call, x.dtype)
    if found is None:
        return None
    edges, value = found
    if count is not None:
        edges = edges.prefix(count)
        value = None if value is None else value[: edges.pattern.nnz]
    weight = conv.lin.weight
    if sums_first(edges, x, weight):
        return linear(multiply(edges, value, x), weight, conv.bias)
    out = multiply(edges, value, linear(x, weight))
    return out if conv.bias is None else out.add_(conv.bias)


def _matrix(
    call: _Call, dtype: torch.dtype
) -> tuple[GroupedEdges, Tensor | None] | None:
    """Returns the edges of a GCNConv in CSR form, and their values; cached if possible."""
    conv, adjacency, edge_index = call.conv, call.adjacency, call.edge_index
    weight, n = call.bound.arguments.get("edge_weight"), call.sizes[1]
    plain = call.edges()
    if plain is None or not conv.normalize:
        return None if plain is None else (plain, call.values(plain))
    key = "gcn", conv.improved, conv.add_self_loops, n, dtype
    keeps = weight is None or not (weight.requires_grad or weight.is_inference())
    stamp = None
    if keeps:
        if weight is not None:
            stamp = weight._version, weight.data_ptr(), weight.shape
        kept, of, by, _ = adjacency.derived.get(key, (None, None, None, None))
        if kept is not None and by == stamp and (of is None or of() is weight):
            return kept
    with outside_inference_mode():
        looped, value = gcn_norm(
            edge_index, weight, n, conv.improved, conv.add_self_loops, conv.flow, dtype
        )
        edges = looped_edges(adjacency, looped, n, n)
        found = edges, edges.in_order(value)
    if keeps:
        of = memory = None
        if weight is not None:
            of, memory = weakref.ref(weight), weight.untyped_storage()
        adjacency.derived[key] = found, of, stamp, memory
    return found


def _kernel_of(conv: Any, forward: Any, given: dict[str, Any]) -> Kernel | None:
    """Returns what computes a layer as a whole.

    None unless it is PyG's own, and fits the rows and the values of edges that it is given.
    """
    kind, ends = _kind(conv, forward), _pair(given.get("x"))
    if kind is None or len(ends) != 2 or ends[0] is None:
        return None
    rows = [leading(t) for t in ends if t is not None]
    weight, attr = given.get("edge_weight"), given.get("edge_attr")
    fits = all(isinstance(t, Tensor) and t.dim() == 2 for t in rows)
    if not fits or not usable(*rows, weight, attr):
        return None
    heads = kind in _SCORES
    if conv.node_dim != (0 if heads or kind is pyg.RGCNConv else -2):
        return None
    if _sizes(ends, given.get("size")) is None or any(map(is_lazy, conv.parameters())):
        return None
    if weight is not None and not _weighs(conv, weight, given["edge_index"], rows[0]):
        return None
    if kind is pyg.GCNConv:
        fits = conv.aggr in ("add", "sum") and not conv.cached
        fits = fits and isinstance(given["x"], Tensor)
    elif kind is pyg.RGCNConv:
        fits = len(rows) == 2 and "weight" in conv._parameters
    elif heads:
        dtype = dtype_of(next(lin for each in linears_of(conv, kind) for lin in each))
        fits = _reads_attributes(conv, kind, attr) and len(rows) == 2
        fits = fits and all(t.dtype == dtype for t in (*rows, attr) if t is not None)
        fits = fits and given.get("return_attention_weights") is None
    fits = fits and is_product(conv, kind)
    return _KERNELS[kind] if fits else None


def _weighs(conv: Any, weight: Tensor, edge_index: Any, x: Tensor) -> bool:
    """Tells whether there is a weight for each edge, of the kind of the rows."""
    known = isinstance(edge_index, Tensor) and edge_index.layout == torch.strided
    fits = known and weight.shape == edge_index.shape[1:] and weight.dtype == x.dtype
    return fits and type(conv.aggr_module) is not pyg.MaxAggregation


def _reads_attributes(conv: Any, kind: type, attr: Any) -> bool:
    """Tells whether a layer's edge attributes, or their absence, fit `_edge_terms`."""
    if attr is None or conv.lin_edge is None:
        needed = kind is pyg.TransformerConv and conv.lin_edge is not None
        return attr is None and not needed
    if type(attr) is not Tensor or attr.dim() > 2:
        return False
    if attr.dim() == 1 and kind is pyg.TransformerConv:
        return False
    # what a self-loop gets must be linear in the attributes
    return not _adds_loops(conv) or conv.fill_value in _FILLS


def _kind(conv: Any, forward: Any) -> type | None:
    """Returns the class of PyG with a kernel whose `forward` is run, and no hook of it."""
    run = getattr(forward, "__func__", None)
    for kind in _KERNELS:
        if run is kind.forward:
            return kind
        if type(conv).forward is kind.forward:
            return None if is_changed(conv) else kind
    return None


def _ends_of(conv: Any) -> tuple[Any, Any]:
    """Returns the linear maps of sources and of targets of a GATConv."""
    both = conv.lin is not None
    return (conv.lin, conv.lin) if both else (conv.lin_src, conv.lin_dst)


def _looped(call: _Call) -> GroupedEdges | None:
    """Returns the edges of a layer in CSR form, with its self-loops; built once."""
    plain, kept = call.edges(), call.adjacency.derived
    if plain is None or not _adds_loops(call.conv):
        return plain
    key = "loops", *call.sizes
    if key not in kept:
        with outside_inference_mode():
            looped, _ = remove_self_loops(call.edge_index)
            looped, _ = add_self_loops(looped, num_nodes=min(call.sizes))
            kept[key] = looped_edges(call.adjacency, looped, *call.sizes)
    found: GroupedEdges | None = kept[key]
    return found


def _edge_terms(call: _Call, edges: GroupedEdges) -> Tensor | None:
    """Returns attributes of the edges of `_looped`, in their order.

    Those of self-loops are as `fill_value` says. For a GATConv it returns the scores that
    they add, `[nnz, H]`.
    """
    conv, kept, edge_index = call.conv, call.adjacency.derived, call.edge_index
    attr = call.bound.arguments.get("edge_attr")
    if attr is None:
        return None
    attr = attr.unsqueeze(1) if attr.dim() == 1 else attr.flatten(1)
    if isinstance(conv, pyg.GATConv):
        attr = F.linear(attr, _folded(conv.lin_edge.weight, conv.att_edge))
    if not _adds_loops(conv):
        return edges.in_order(attr)
    count = min(edges.pattern.shape)
    key = "kept", count
    if key not in kept:
        with outside_inference_mode():
            stay = (edge_index[0] != edge_index[1]).nonzero().squeeze(1)
            into = edge_index[1].index_select(0, stay)
            degree = torch.bincount(into, minlength=count).clamp(min=1).unsqueeze(1)
            kept[key] = stay, into, degree
    stay, into, degree = kept[key]
    if len(stay) < len(attr):
        attr = attr.index_select(0, stay)
    loops = sums_at(attr, into, count)
    loops = loops / degree.to(loops.dtype) if conv.fill_value == "mean" else loops
    return edges.in_order(torch.cat([attr, loops]))


def note_rows(conv: Any, ends: Tensor, edge_index: Any) -> None:
    """Keeps the rows of the edges of a share, and of a layer's self-loops, with own edges."""
    adjacency = known(ends)
    assert adjacency is not None
    loops = _adds_loops(conv)
    if ("rows", loops) not in adjacency.derived:
        if loops:
            nodes = edge_index.topology.nodes.count
            edge_index = remove_self_loops(edge_index)[0]
            edge_index = add_self_loops(edge_index, num_nodes=nodes)[0]
        adjacency.derived["rows", loops] = edge_index.rows


def _attention(
    call: _Call, source: Tensor, target: Tensor, count: int | None
) -> Tensor | None:
    """Runs a layer of attention.

    Shapes: source [n, F_s], target [>= m, F_t]; returns [m, H F_out] or [m, F_out].
    """
    conv, every = call.conv, _looped(call)
    if every is None:
        return None
    kind, terms = _kind(conv, call.forward), _edge_terms(call, every)
    assert kind is not None
    count = every.num_targets if count is None else count
    edges = every.prefix(count, len(source))
    target = target[:count]
    terms = None if terms is None else terms[: edges.pattern.nnz]
    scores, rows = _SCORES[kind](conv, edges, source, target, terms)
    share = softmax_of(edges, scores)
    if conv.training and conv.dropout:
        if edges is every:
            share = _dropped(call, edges, share)
        else:
            share = F.dropout(share, conv.dropout)
    out = multiply(edges, share, rows)
    if terms is not None and kind is pyg.TransformerConv:
        sums = multiply(edges.each, share, _for_heads(conv, terms))
        out = out + torch.einsum("mhd,hcd->mhc", sums, _of_edges(conv))
    out = out.flatten(1) if conv.concat else out.mean(1)
    if kind is pyg.TransformerConv:
        return _skipped(conv, out, target)
    if conv.res is not None:
        out = out + conv.res(target)
    return out if conv.bias is None else out + conv.bias


def _heads(conv: Any, rows: Tensor) -> Tensor:
    return rows.view(-1, conv.heads, conv.out_channels)


def _for_heads(conv: Any, attr: Tensor) -> Tensor:
    return attr.unsqueeze(1).expand(-1, conv.heads, -1)


def _of_edges(conv: Any) -> Tensor:
    """Returns what transforms edge attributes, for each head, `[H, C, D]`."""
    weight: Tensor = conv.lin_edge.weight
    return weight.view(conv.heads, conv.out_channels, -1)


def _gat(
    conv: Any,
    edges: GroupedEdges,
    source: Tensor,
    target: Tensor,
    terms: Tensor | None,
) -> tuple[Tensor, Tensor]:
    of_source, of_target = _ends_of(conv)
    scores = ends_added(
        edges,
        F.linear(source, _folded(of_source.weight, conv.att_src)),
        F.linear(target, _folded(of_target.weight, conv.att_dst)),
    )
    scores = scores if terms is None else scores + terms
    scores = F.leaky_relu(scores, conv.negative_slope)
    return scores, _heads(conv, of_source(source))


def _folded(weight: Tensor, attention: Tensor) -> Tensor:
    """Returns `W^T u` of each head, `[H, F]`, for W [H C, F] and u [1, H, C]."""
    heads, width = attention.shape[1:]
    return torch.einsum("hcf,hc->hf", weight.view(heads, width, -1), attention[0])


def _gatv2(
    conv: Any,
    edges: GroupedEdges,
    source: Tensor,
    target: Tensor,
    terms: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, of_target = _heads(conv, conv.lin_l(source)), _heads(conv, conv.lin_r(target))
    given = conv.att[0], conv.negative_slope
    if terms is None:
        return pair_scores(edges, of_target, rows, *given), rows
    both = torch.addmm(
        rows_at(rows.flatten(1), edges.pattern.col), terms, conv.lin_edge.weight.t()
    )
    return pair_scores(edges.each, of_target, _heads(conv, both), *given), rows


def _transformer(
    conv: Any,
    edges: GroupedEdges,
    source: Tensor,
    target: Tensor,
    terms: Tensor | None,
) -> tuple[Tensor, Tensor]:
    query, key = (
        _heads(conv, conv.lin_query(target)),
        _heads(conv, conv.lin_key(source)),
    )
    query = query / math.sqrt(conv.out_channels)
    scores = dots(edges, query, key)
    if terms is not None:
        query = torch.einsum("mhc,hcd->mhd", query, _of_edges(conv))
        scores = scores + dots(edges.each, query, _for_heads(conv, terms))
    return scores, _heads(conv, conv.lin_value(source))


def _skipped(conv: Any, out: Tensor, target: Tensor) -> Tensor:
    """Adds a target's own row to a TransformerConv's sum, or mixes both."""
    if not conv.root_weight:
        return out
    own = conv.lin_skip(target)
    if conv.lin_beta is None:
        return out + own
    beta = conv.lin_beta(torch.cat([out, own, out - own], dim=-1)).sigmoid()
    return beta * own + (1 - beta) * out


def _dropped(call: _Call, edges: GroupedEdges, share: Tensor) -> Tensor:
    """Applies dropout in the original order of all edges, as PyG draws it."""
    conv = call.conv
    if edges.inverse is not None:
        share = share.index_select(0, edges.inverse)
    rows = call.adjacency.derived.get(("rows", _adds_loops(conv)))  # see `note_rows`
    if rows is None:
        share = F.dropout(share, conv.dropout)
    else:
        spread: Any = F.dropout(DistTensor.from_local(share, rows), conv.dropout)
        share = spread.to_local()
    return edges.in_order(share)


def _adds_loops(conv: Any) -> bool:
    return bool(getattr(conv, "add_self_loops", False))


_FILLS = ("mean", "add")  # of self-loops
# of a layer, its edges, sources, targets, and what `_edge_terms` returns: scores [e, H], and
# rows [n, H, C]
_SCORES: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    pyg.GATConv: _gat,
    pyg.GATv2Conv: _gatv2,
    pyg.TransformerConv: _transformer,
}
_KERNELS: dict[Any, Kernel] = {
    pyg.GCNConv: _gcn,
    pyg.GINConv: _gin,
    pyg.GraphConv: _sage,
    pyg.RGCNConv: _relations,
    pyg.SAGEConv: _sage,
    **dict.fromkeys(_SCORES, _attention),
}
