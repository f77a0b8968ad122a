"""Runs layers on ordinary tensors by compiled SpMM, if the CSR form of edges is known.

Edges are known if a sampler of this package has drawn them, or from the second use of an
edge_index on; see [Note: what a tensor carries] in `graph.local_adjacency`. PyG's layer then
runs unchanged except for its edges: `propagate` of a layer whose messages are rows, weighted
rows or rows with attention is an SpMM. `run_sage` and `run_gcn` also fuse the mean, the
normalisation and the bias. Other layers, and layers with hooks or overridden methods, under
autocast, torch.compile or functorch, run PyG's code.

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
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
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

from pyg_distcomm.comm.rows import Rows
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
    first_edges,
    has_products,
    known,
    looped_edges,
    outside_inference_mode,
    plain_edges,
)
from pyg_distcomm.nn import trimming
from pyg_distcomm.nn.layer_context import (
    STEPS,
    dtype_of,
    has_hooks,
    is_changed,
    is_product,
    propagates_as_pyg,
)
from pyg_distcomm.nn.leading_rows import leading, whole
from pyg_distcomm.nn.message_forms import AGGREGATIONS, MESSAGES, computes_by_row
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


# the layer that runs by products in a thread, and the CSR forms of its edges
_visit: ContextVar[Any] = ContextVar("the layer by products", default=(None, None))
_CHANGING = threading.Lock()


class _Propagate:
    """Stands in for `propagate` of a layer while it runs by products in some thread."""

    def __init__(self, conv: MessagePassing) -> None:
        self.conv, self.original, self.running = conv, conv.propagate, 0

    def __call__(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
        conv, kept = _visit.get()
        found = None
        if conv is self.conv:
            found = _product(conv, kept, edge_index, size, given)
        if found is not None:
            return found
        return self.original(edge_index, size=size, **given)


def _product(
    conv: Any, kept: Any, edge_index: Any, size: Any, given: dict[str, Any]
) -> Any:
    """Returns the result of propagate by a product; None if its form is not known.

    None, too, for edges that a layer makes in each call on a device, which would be asked
    each time.
    """
    name = MESSAGES.get(type(conv).message, "")
    given = {key: value for key, value in given.items() if value is not None}
    if type(edge_index) is not Tensor or set(given) - {"x", name} or name == "":
        return None
    kind = AGGREGATIONS.get(type(conv.aggr_module))
    x, value = given.get("x"), None if name is None else given.get(name)
    source, target = x if isinstance(x, tuple) else (x, x)
    wanted = 3 if name == "alpha" else 2
    if kind is None or not usable(source, value) or source.dim() != wanted:
        return None
    if target is None and size is None:
        return None
    shape = len(source), len(target) if target is not None else size[1]
    if size is not None and tuple(size) != shape:
        return None
    if value is not None:
        value = value if wanted == 3 else value.flatten()
        fits = value.dtype == source.dtype and len(value) == edge_index.size(1)
        if not fits or kind == "max":
            return None
    if id(edge_index) not in kept and not edge_index.is_cpu:
        return None
    if id(edge_index) not in kept:
        found = adjacency_of(edge_index) or LocalAdjacency(None)
        kept[id(edge_index)] = edge_index, found
    edges = kept[id(edge_index)][1].grouped(edge_index, *shape)
    if edges is None:
        return None
    value = None if value is None else edges.in_order(value)
    return aggregate(kind, edges, value, source)


@contextlib.contextmanager
def _running(
    conv: MessagePassing, edge_index: Tensor, adjacency: LocalAdjacency
) -> Iterator[None]:
    """Has a layer run by products in this thread, in a block; others run PyG's code."""
    own: dict[str, Any] = vars(conv)
    with _CHANGING:
        if "propagate" not in own:
            own["propagate"] = _Propagate(conv)
        own["propagate"].running += 1
    before = _visit.set((conv, {id(edge_index): (edge_index, adjacency)}))
    try:
        yield
    finally:
        _visit.reset(before)
        with _CHANGING:
            own["propagate"].running -= 1
            if not own["propagate"].running:
                del own["propagate"]


def _runs_by_products(conv: MessagePassing) -> bool:
    """Tells whether a PyG layer has messages of a known form, or attends to neighbours."""
    kind, own = type(conv), vars(conv)
    if conv.explain or conv.decomposed_layers > 1 or conv.flow != "source_to_target":
        return False
    if has_hooks(conv) or not propagates_as_pyg(conv):
        return False
    if not isinstance(own.get("propagate", None), _Propagate | None):
        return False
    changed = not {*STEPS[1:], "edge_updater"}.isdisjoint(own)
    changed = changed or kind.aggregate is not MessagePassing.aggregate
    if changed or kind.update is not MessagePassing.update:
        return False
    return (
        kind.message in MESSAGES or kind.forward in _PAIRED or kind.forward in _SQUARE
    )


# Layers on ordinary tensors ----------------------------------------------------------


def run_layer(
    conv: MessagePassing, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs `forward` of a layer on ordinary tensors, by products if its edges are known."""
    bound = None
    with contextlib.suppress(TypeError):  # which the layer says better
        bound = inspect.signature(conv.forward).bind(*args, **kwargs)
    given = {} if bound is None else bound.arguments
    edge_index, x = given.get("edge_index"), given.get("x")
    adjacency = None
    if usable() and _runs_by_products(conv):
        edge_index, adjacency = _edges_of(edge_index, x, given)
    if adjacency is None:
        trimming.note_untrimmed(given.get("edge_index"), type(conv).__name__)
        args, kwargs = whole((args, kwargs), f"{type(conv).__name__}")
        return forward(*args, **kwargs)
    assert bound is not None
    assert edge_index is not None
    given["edge_index"] = edge_index

    related = _adds_relations(conv, given, adjacency)
    if related is not None:
        return _add_relations(conv, related, *_pair(x))

    def compute(source: Any, target: Any, rows: int | None) -> Any:
        assert adjacency is not None
        if attends:
            kept = source, target, given.get("edge_attr"), rows
            found = run_attention(conv, adjacency, edge_index, sizes, *kept)
            if found is not None:
                return found
        own, known = dict(given), (edge_index, adjacency)
        square = rows is not None and type(conv).forward in _SQUARE
        own["x"] = source if isinstance(x, Tensor) else (source, target)
        if rows is not None:
            edges = _sampled_edges(adjacency, edge_index)
            assert edges is not None
            edges = edges.prefix(rows, len(source))
            count = edges.pattern.nnz
            known = edge_index[:, :count], LocalAdjacency.of(edges)
            own["x"] = source if square else (source, target[:rows])
            own["edge_index"] = known[0]
            for name in _EDGE_ARGUMENTS & own.keys():
                own[name] = first_edges(edge_index, own[name], count)
        call = inspect.BoundArguments(bound.signature, own)  # type: ignore[arg-type]
        with _running(conv, *known):
            out = forward(*call.args, **call.kwargs)
        return out[:rows] if square else out

    trims = _may_be_trimmed(conv, given, adjacency)
    ends = _pair(x)
    # hooks are called by `forward`
    attends = trims and not is_changed(conv) and is_attention(conv, given)
    sizes = [len(t) for t in ends] if attends else []
    if not isinstance(x, (Tensor, tuple)) or not trims:
        trimming.note_untrimmed(edge_index, type(conv).__name__)
        args, kwargs = whole((bound.args, bound.kwargs), type(conv).__name__)
        with _running(conv, edge_index, adjacency):
            return forward(*args, **kwargs)
    others = [v for name, v in given.items() if name != "x"]
    return trimming.call(adjacency, edge_index, x, compute, _read_by(conv, *others))


def _pair(x: Any) -> Any:
    """Returns the rows of sources and of targets."""
    return x if isinstance(x, (tuple, list)) else (x, x)


def is_relational(conv: Any) -> bool:
    """Tells whether a layer is PyG's RGCNConv, which sums rows by relation."""
    kind = pyg.RGCNConv
    same = type(conv).forward is kind.forward and is_product(conv, kind)
    # not computed each time that it is read
    return same and conv.node_dim == 0 and "weight" in conv._parameters


def _adds_relations(
    conv: Any, given: dict[str, Any], adjacency: LocalAdjacency
) -> GroupedEdges | None:
    """Returns the edges of an RGCNConv, with a row for each target and relation; kept.

    None if it is none, if an edge is of no relation of the layer, if most of these rows would
    be empty, or if their CSR form would be made only once: in a minibatch, and for more types
    of the same edges than `_TYPES`.
    """
    kind: Any = given.get("edge_type")
    source, target = _pair(given.get("x"))
    if not isinstance(kind, Tensor) or kind.is_floating_point() or kind.dim() != 1:
        return None
    if adjacency.batch is not None or not is_relational(conv):
        return None
    if conv.num_blocks is not None:  # one of several weights for parts of a row
        return None
    edge_index = given["edge_index"]
    fits = usable(source, target) and source.dim() == target.dim() == 2
    same_width = fits and source.size(1) == conv.weight.size(1)
    fits = same_width and source.dtype == conv.weight.dtype
    count, shape = conv.num_relations, (len(source), len(target))
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


def _add_relations(
    conv: Any, edges: GroupedEdges, source: Tensor, target: Tensor
) -> Tensor:
    """Runs an RGCNConv: the sums of all relations are one product, which one matrix weighs.

    Shapes: source [n_s, F], target [n, F]; returns [n, F_out].
    """
    weight = conv.weight
    if conv.num_bases is not None:
        weight = conv.comp @ weight.flatten(1)
    weight = weight.reshape(-1, conv.out_channels).t()
    own = None if conv.root is None else conv.root.t()
    kind = AGGREGATIONS[type(conv.aggr_module)]
    if kind == "max":
        most = aggregate(kind, edges, None, source).view(len(target), weight.size(1))
        return linear(most, weight, conv.bias, None if own is None else target, own)
    given = source, target, weight, conv.bias, own
    return multiply_linear(kind, edges, *given, sums_first=True)


def attends_by_kernels(
    conv: Any, source: Tensor, target: Tensor, attr: Tensor | None = None
) -> bool:
    """Tells whether `run_layer` runs a layer of attention by the kernels, on such rows."""
    given = {"x": (source, target), "edge_attr": attr}
    return _runs_by_products(conv) and is_attention(conv, given)


def _may_be_trimmed(
    conv: MessagePassing, given: dict[str, Any], adjacency: LocalAdjacency
) -> bool:
    """Tells whether a layer can compute only the first targets of such arguments."""
    ends, run = _pair(given.get("x")), type(conv).forward
    if run not in _PAIRED and (run not in _SQUARE or ends[0] is not ends[1]):
        return False
    if given.get("size") is not None or ends[1] is None:
        return False
    if given.get("return_attention_weights"):
        return False
    if adjacency.batch is None:
        return True
    of_two_types = adjacency.ends[0] != adjacency.ends[1]
    if of_two_types and getattr(conv, "add_self_loops", False):
        return False  # loops read sources that no edge may have
    edges = _sampled_edges(adjacency, given["edge_index"])
    ordered = edges is not None and edges.order is None
    parts = [*conv.modules()]
    if not ordered or any(is_changed(p) or isinstance(p, _NEED_EDGES) for p in parts):
        return False
    return computes_by_row(conv, draws=True)


def _edges_of(
    edge_index: Any, x: Any, given: dict[str, Any]
) -> tuple[Any, LocalAdjacency | None]:
    """Returns the edge_index of a layer as a tensor, and its `LocalAdjacency`.

    An EdgeIndex stays one where the layer returns it, or where it is of other sizes.
    """
    ends = _pair(x)
    sizes = [len(t) if isinstance(t, Tensor) and t.dim() else None for t in ends]
    plain = plain_edges(edge_index, *sizes)
    returned = given.get("return_attention_weights") is not None
    if type(plain) is not Tensor or (returned and plain is not edge_index):
        return edge_index, None
    if any(isinstance(t, Tensor) and t.device != plain.device for t in ends):
        return edge_index, None
    return plain, adjacency_of(edge_index)


def _read_by(conv: torch.nn.Module, *others: Any) -> list[Any]:
    return [*conv.parameters(), *conv.buffers(), *others]


_EDGE_ARGUMENTS = {"edge_weight", "edge_attr", "edge_type"}


def _forwards_of(names: str) -> set[Any]:
    return {getattr(pyg, f"{name}Conv").forward for name in names.split()}


# layers whose output at a node depends on its in-edges and the rows at their ends alone, and
# which read no more of these in their `forward` than a pair of sources and targets gives
_ON_SHARES = _forwards_of("FiLM GAT GATv2 GIN GMM Graph RGCN ResGatedGraph Transformer")
_PAIRED = _ON_SHARES | _forwards_of("CG Edge GEN GINE LE NN")
# those that, for some rows alone, are given as many targets as sources
_SQUARE = _forwards_of("AGNN ClusterGCN MF PNA")
# aggregations that need an edge, which rows that are read may lack
_NEED_EDGES = pyg.MLPAggregation, pyg.QuantileAggregation, pyg.SortAggregation


def is_one_hop(conv: Any) -> bool:
    """Tells whether `one_hop` runs a layer, also on a rank of a share that has no edges."""
    return type(conv).forward in _ON_SHARES


def _sampled_edges(
    adjacency: LocalAdjacency, edge_index: Tensor
) -> GroupedEdges | None:
    """Returns the CSR form of the edges of a minibatch, with all its nodes."""
    assert adjacency.batch is not None
    sizes, (source, target) = adjacency.batch.sizes, adjacency.ends
    return adjacency.grouped(edge_index, sizes[source], sizes[target])


def run_sage(
    conv: pyg.SAGEConv, forward: Callable[..., Any], x: Any, edge_index: Any, size: Any
) -> Tensor:
    """Runs PyG's SAGEConv on ordinary tensors, as products if its edges are known.

        x'_i = W_1 aggr_{j in N(i)} x_j + b + W_2 x_i

    Shapes: x [n, F_in] or a pair [n_s, F_s], [n_t, F_t]; edge_index [2, e]; returns
    [n, F_out] or [n_t, F_out].
    """
    source, target = _pair(x)
    fits = _fits(conv, pyg.SAGEConv, source, source if target is None else target)
    given, adjacency = edge_index, None
    if fits and (target is not None or size is not None):
        edge_index, adjacency = _edges_of(given, x, {})
    if adjacency is None:
        trimming.note_untrimmed(given, "SAGEConv")

    def compute(source: Tensor, target: Tensor | None, rows: int | None) -> Tensor:
        pair = (source, target) if isinstance(x, (tuple, list)) else source
        if adjacency is None:
            return forward(pair, given, size)
        if rows is None:
            count = size[1] if target is None else len(target)
            if size is not None and tuple(size) != (len(source), count):
                return forward(pair, given, size)
            edges = adjacency.grouped(edge_index, len(source), count)
        else:
            edges = _sampled_edges(adjacency, edge_index)
            edges = None if edges is None else edges.prefix(rows)
        if edges is None:
            return forward(pair, given, size)
        root = target if isinstance(x, (tuple, list)) else source  # one gradient
        with parametrize.cached():  # PyG's code reads each weight once
            return _sage(conv, edges, source, root)

    reads = _read_by(conv, edge_index)
    return trimming.call(adjacency, edge_index, x, compute, reads)


def _sage(
    conv: pyg.SAGEConv, edges: GroupedEdges, source: Tensor, root: Tensor | None
) -> Tensor:
    if conv.project and hasattr(conv, "lin"):
        source = conv.lin(source).relu()
    kind = AGGREGATIONS[type(conv.aggr_module)]
    own = conv.lin_r.weight if conv.root_weight and root is not None else None
    if kind == "max":
        out = conv.lin_l(aggregate(kind, edges, None, source))
        rows = len(out)
        if root is not None and own is not None:
            out = torch.addmm(out, root[:rows], own.t())
    else:
        first = sums_first(edges, source, conv.lin_l.weight)
        weights = conv.lin_l.weight, conv.lin_l.bias, own
        out = multiply_linear(kind, edges, source, root, *weights, sums_first=first)
    return F.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def run_gcn(
    conv: pyg.GCNConv,
    forward: Callable[..., Any],
    x: Any,
    edge_index: Any,
    edge_weight: Any,
) -> Tensor:
    """Runs PyG's GCNConv on ordinary tensors, as a product if its edges are known.

        X' = A X W + b,   A = D^-1/2 (A + I) D^-1/2 of all edges given

    Shapes: x [n, F_in], edge_index [2, e], edge_weight [e] or None; returns [n, F_out].
    """
    fits = isinstance(x, Tensor) and _fits(conv, pyg.GCNConv, x)
    fits = fits and conv.aggr in ("add", "sum") and usable(edge_weight)
    if fits and edge_weight is not None:
        fits = edge_weight.dim() == 1 and edge_weight.dtype == x.dtype
    if not fits or conv.cached:
        return run_layer(conv, forward, x, edge_index, edge_weight)
    given = edge_index
    edge_index, adjacency = _edges_of(given, x, {})

    def compute(source: Tensor, _: Any, rows: int | None) -> Tensor:
        n = len(source)
        if rows is not None:
            assert adjacency is not None
            assert adjacency.batch is not None
            n = adjacency.batch.sizes[adjacency.ends[1]]
        found = None
        if adjacency is not None:
            found = _matrix(conv, adjacency, edge_index, edge_weight, n, source.dtype)
        if found is None:
            return forward(source, given, edge_weight)
        edges, value = found
        if rows is not None:
            edges = edges.prefix(rows)
            value = None if value is None else value[: edges.pattern.nnz]
        weight = conv.lin.weight
        if sums_first(edges, source, weight):
            return linear(multiply(edges, value, source), weight, conv.bias)
        out = multiply(edges, value, linear(source, weight))
        return out if conv.bias is None else out.add_(conv.bias)

    reads = _read_by(conv, edge_index, edge_weight)
    return trimming.call(adjacency, edge_index, x, compute, reads)


def _matrix(
    conv: pyg.GCNConv,
    adjacency: LocalAdjacency,
    edge_index: Tensor,
    weight: Tensor | None,
    n: int,
    dtype: torch.dtype,
) -> tuple[GroupedEdges, Tensor | None] | None:
    """Returns the edges of the layer in CSR form, and their values; cached if possible."""
    if not conv.normalize:
        edges = adjacency.grouped(edge_index, n, n)
        if edges is None or (weight is not None and len(weight) != edge_index.size(1)):
            return None
        return edges, None if weight is None else edges.in_order(weight)
    key = "gcn", conv.improved, conv.add_self_loops, n, dtype
    keeps = weight is None or not (weight.requires_grad or weight.is_inference())
    stamp = None
    if keeps:
        if weight is not None:
            stamp = weight._version, weight.data_ptr(), weight.shape
        kept, of, by, _ = adjacency.derived.get(key, (None, None, None, None))
        if kept is not None and by == stamp and (of is None or of() is weight):
            return kept
    if adjacency.grouped(edge_index, n, n) is None:
        return None
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


def _fits(conv: Any, kind: type, *given: Any) -> bool:
    """Tells whether a layer is PyG's own of a kind, and the rows given fit the kernels."""
    rows = [leading(t) for t in given]
    fits = all(isinstance(t, Tensor) and t.dim() == 2 for t in rows)
    if not fits or not usable(*rows):
        return False
    if conv.decomposed_layers > 1 or conv.flow != "source_to_target":
        return False
    if conv.node_dim != (0 if kind in _SCORES else -2):
        return False
    if any(map(is_lazy, conv.parameters())):
        return False
    plain, biased = _linears(conv, kind)
    return is_product(conv, kind, *plain, biased=biased)


# takes a layer, its edges, sources and targets, and what `_edge_terms` returns; returns
# scores [e, H], and rows [n, H, C]
Pair = tuple[Tensor, Tensor]
Scores = Callable[[Any, GroupedEdges, Pair, Tensor | None], Pair]


def is_attention(conv: Any, given: dict[str, Any]) -> bool:
    """Tells whether a layer is PyG's own of a kind above, and its features fit the kernels."""
    kind, attr = _kind(conv), given.get("edge_attr")
    if kind is None or given.get("size") is not None:
        return False
    ends = _pair(given.get("x"))
    if not _reads_attributes(conv, kind, attr) or not _fits(conv, kind, *ends):
        return False
    plain, biased = _linears(conv, kind)
    rows = [*map(leading, ends), *(() if attr is None else (attr,))]
    dtype = dtype_of((*plain, *biased)[0])
    return usable(*rows) and all(t.dtype == dtype for t in rows)


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
    return not getattr(conv, "add_self_loops", False) or conv.fill_value in _FILLS


def _kind(conv: Any) -> type | None:
    """Returns the class of PyG whose `forward` a layer has, if it is one of those above."""
    run = type(conv).forward
    return next((kind for kind in _SCORES if run is vars(kind)["forward"]), None)


def _linears(conv: Any, kind: type) -> tuple[list[Any], list[Any]]:
    """Returns the linear maps of a layer, those without a bias and those that may have one."""
    if kind is pyg.TransformerConv:
        biased = [conv.lin_query, conv.lin_key, conv.lin_value, conv.lin_skip]
        plain, biased = [conv.lin_edge], [*biased, conv.lin_beta]
    elif kind is pyg.GCNConv:
        plain, biased = [conv.lin], []
    elif kind is pyg.SAGEConv:
        plain = [conv.lin_r] if conv.root_weight else []
        biased = [conv.lin_l, *([conv.lin] if conv.project else [])]
    elif kind is pyg.GATv2Conv:
        plain, biased = [conv.lin_edge], [conv.lin_l, conv.lin_r, conv.res]
    else:
        plain, biased = [*_ends_of(conv), conv.lin_edge], [conv.res]
    given = ([lin for lin in each if lin is not None] for each in (plain, biased))
    return tuple(given)  # type: ignore[return-value]


def _ends_of(conv: Any) -> tuple[Any, Any]:
    """Returns the linear maps of sources and of targets of a GATConv."""
    both = conv.lin is not None
    return (conv.lin, conv.lin) if both else (conv.lin_src, conv.lin_dst)


def _edges_of_layer(
    conv: Any,
    adjacency: LocalAdjacency,
    edge_index: Tensor,
    num_sources: int,
    num_targets: int,
) -> GroupedEdges | None:
    """Returns the edges of a layer in CSR form, with its self-loops; built once."""
    shape = num_sources, num_targets
    plain = adjacency.grouped(edge_index, *shape)
    if plain is None or not getattr(conv, "add_self_loops", False):
        return plain
    key = "loops", *shape
    if key not in adjacency.derived:
        with outside_inference_mode():
            looped, _ = remove_self_loops(edge_index)
            looped, _ = add_self_loops(looped, num_nodes=min(shape))
            adjacency.derived[key] = looped_edges(adjacency, looped, *shape)
    found: GroupedEdges | None = adjacency.derived[key]
    return found


def _edge_terms(
    conv: Any,
    adjacency: LocalAdjacency,
    edges: GroupedEdges,
    edge_index: Tensor,
    attr: Tensor | None,
) -> Tensor | None:
    """Returns attributes of the edges of `_edges_of_layer`, in their order.

    Those of self-loops are as `fill_value` says. For a GATConv it returns the scores that
    they add, `[nnz, H]`.
    """
    if attr is None:
        return None
    attr = attr.unsqueeze(1) if attr.dim() == 1 else attr.flatten(1)
    if _kind(conv) is pyg.GATConv:
        attr = F.linear(attr, _folded(conv.lin_edge.weight, conv.att_edge))
    if not getattr(conv, "add_self_loops", False):
        return edges.in_order(attr)
    count = min(edges.pattern.shape)
    key = "kept", count
    if key not in adjacency.derived:
        with outside_inference_mode():
            kept = (edge_index[0] != edge_index[1]).nonzero().squeeze(1)
            into = edge_index[1].index_select(0, kept)
            degree = torch.bincount(into, minlength=count).clamp(min=1).unsqueeze(1)
            adjacency.derived[key] = kept, into, degree
    kept, into, degree = adjacency.derived[key]
    if len(kept) < len(attr):
        attr = attr.index_select(0, kept)
    loops = sums_at(attr, into, count)
    loops = loops / degree.to(loops.dtype) if conv.fill_value == "mean" else loops
    return edges.in_order(torch.cat([attr, loops]))


def note_rows(conv: Any, ends: Tensor, edge_index: Any) -> None:
    """Keeps the rows of the edges of a share, and of a layer's self-loops, with own edges."""
    adjacency = known(ends)
    assert adjacency is not None
    loops = bool(getattr(conv, "add_self_loops", False))
    if ("rows", loops) not in adjacency.derived:
        if loops:
            nodes = edge_index.topology.nodes.count
            edge_index = remove_self_loops(edge_index)[0]
            edge_index = add_self_loops(edge_index, num_nodes=nodes)[0]
        adjacency.derived["rows", loops] = edge_index.rows


def run_attention(
    conv: Any,
    adjacency: LocalAdjacency,
    edge_index: Tensor,
    sizes: Sequence[int],
    source: Tensor,
    target: Tensor,
    attr: Tensor | None,
    count: int | None,
) -> Tensor | None:
    """Runs the layer, for the first `count` rows of `target`; None if an id is out of range.

    Args:
        conv: the layer.
        adjacency, edge_index: its edges.
        sizes: the numbers of sources and of targets of all edges.
        source, target: rows of sources and targets.
        attr: the attributes of all edges, or None.
        count: how many rows to return; None for all.

    Shapes: source [n, F_s], target [>= m, F_t]; returns [m, H F_out] or [m, F_out].
    """
    every = _edges_of_layer(conv, adjacency, edge_index, *sizes)
    if every is None:
        return None
    terms = _edge_terms(conv, adjacency, every, edge_index, attr)
    edges = every if count is None else every.prefix(count)
    kind = _kind(conv)
    assert kind is not None
    target = target[: edges.num_targets]
    edges = edges.prefix(edges.num_targets, len(source))
    terms = None if terms is None else terms[: edges.pattern.nnz]
    with parametrize.cached():  # PyG's code reads each weight once
        scores, rows = _SCORES[kind](conv, edges, (source, target), terms)
    share = softmax_of(edges, scores)
    if conv.training and conv.dropout:
        loops = bool(getattr(conv, "add_self_loops", False))
        rows_of_edges = adjacency.derived.get(("rows", loops))  # see `note_rows`
        all_edges = every if edges.pattern.nnz == every.pattern.nnz else None
        share = _dropped(all_edges, share, conv.dropout, rows_of_edges)
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


def _gat(conv: Any, edges: GroupedEdges, ends: Pair, terms: Tensor | None) -> Pair:
    source, target = ends
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


def _gatv2(conv: Any, edges: GroupedEdges, ends: Pair, terms: Tensor | None) -> Pair:
    source, target = ends
    rows, of_target = _heads(conv, conv.lin_l(source)), _heads(conv, conv.lin_r(target))
    given = conv.att[0], conv.negative_slope
    if terms is None:
        return pair_scores(edges, of_target, rows, *given), rows
    both = torch.addmm(
        rows_at(rows.flatten(1), edges.pattern.col), terms, conv.lin_edge.weight.t()
    )
    return pair_scores(edges.each, of_target, _heads(conv, both), *given), rows


def _transformer(conv: Any, edges: GroupedEdges, ends: Pair, terms: Any) -> Pair:
    source, target = ends
    query = _heads(conv, conv.lin_query(target)) / math.sqrt(conv.out_channels)
    scores = dots(edges, query, _heads(conv, conv.lin_key(source)))
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


def _dropped(edges: Any, share: Tensor, p: float, rows: Rows | None) -> Tensor:
    """Applies dropout in the original order of all edges, as PyG draws it; None are a part."""
    inverse = None if edges is None else edges.inverse
    share = share if inverse is None else share.index_select(0, inverse)
    spread: Any = share if rows is None else DistTensor.from_local(share, rows)
    spread = F.dropout(spread, p)
    share = spread if rows is None else spread.to_local()
    return share if edges is None else edges.in_order(share)


_FILLS = ("mean", "add")  # of self-loops
_SCORES: dict[type, Scores] = {
    pyg.GATConv: _gat,
    pyg.GATv2Conv: _gatv2,
    pyg.TransformerConv: _transformer,
}
