"""Runs PyG's layers of attention on ordinary tensors by products, where edges are known.

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

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch_geometric.utils import add_self_loops, remove_self_loops

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_products import (
    dots,
    ends_added,
    multiply,
    pair_scores,
    rows_at,
    softmax_of,
    sums_at,
)
from pyg_distcomm.graph.local_adjacency import (
    GroupedEdges,
    LocalAdjacency,
    known,
    looped_edges,
    outside_inference_mode,
)
from pyg_distcomm.nn.layer_context import dtype_of, is_product
from pyg_distcomm.nn.leading_rows import leading
from pyg_distcomm.sharded.dist_tensor import DistTensor

# takes a layer, its edges, sources and targets, and what `_edge_terms` returns; returns
# scores [e, H], and rows [n, H, C]
Scores = Callable[
    [Any, GroupedEdges, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]
]


def is_supported(conv: Any, given: dict[str, Any]) -> bool:
    """Tells whether a layer is PyG's own of a kind above, and its features fit the kernels."""
    kind = _kind(conv)
    if kind is None or conv.node_dim != 0:
        return False
    attr = given.get("edge_attr")
    if given.get("size") is not None or not _reads_attributes(conv, kind, attr):
        return False
    if any(map(is_lazy, conv.parameters())):
        return False
    x = given.get("x")
    parts = [leading(t) for t in (x if isinstance(x, tuple) else (x,))]
    if any(not isinstance(t, Tensor) or t.dim() != 2 for t in parts):
        return False
    plain, biased = _linears(conv, kind)
    dtype = dtype_of((*plain, *biased)[0])
    parts += [] if attr is None else [attr]
    return all(t.dtype == dtype for t in parts) and is_product(
        conv, kind, *plain, biased=biased
    )


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
    for kind in _SCORES:
        if type(conv).forward is vars(kind)["forward"]:
            return kind
    return None


def _linears(conv: Any, kind: type) -> tuple[list[Any], list[Any]]:
    """Returns the linear maps of a layer, those without a bias and those that may have one."""
    if kind is pyg.TransformerConv:
        maps = (
            conv.lin_query,
            conv.lin_key,
            conv.lin_value,
            conv.lin_skip,
            conv.lin_beta,
        )
        plain, biased = [conv.lin_edge], list(maps)
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
    """Keeps the rows of the edges of a share, and of a layer's self-loops, with own edges.

    Args:
        conv: the layer.
        ends: own edges, which `stays` knows.
        edge_index: those of the share.
    """
    adjacency = known(ends)
    assert adjacency is not None
    loops = bool(getattr(conv, "add_self_loops", False))
    if ("rows", loops) not in adjacency.derived:
        if loops:
            nodes = edge_index.topology.nodes.count
            edge_index = remove_self_loops(edge_index)[0]
            edge_index = add_self_loops(edge_index, num_nodes=nodes)[0]
        adjacency.derived["rows", loops] = edge_index.rows


def run(
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
        scores, rows = _SCORES[kind](conv, edges, source, target, terms)
    share = softmax_of(edges, scores)
    if conv.training and conv.dropout:
        loops = bool(getattr(conv, "add_self_loops", False))
        rows_of_edges = adjacency.derived.get(("rows", loops))  # see `note_rows`
        share = _dropped(edges, share, conv.dropout, rows_of_edges)
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


def _dropped(edges: GroupedEdges, share: Tensor, p: float, rows: Rows | None) -> Tensor:
    """Applies dropout in the original order of the edges, as PyG draws it."""
    if edges.inverse is not None:
        share = share.index_select(0, edges.inverse)
    if rows is None:
        share = F.dropout(share, p)
    else:
        spread: Any = F.dropout(DistTensor.from_local(share, rows), p)
        share = spread.to_local()
    return share if edges.order is None else edges.in_order(share)


_FILLS = ("mean", "add")  # of self-loops
_SCORES: dict[type, Scores] = {
    pyg.GATConv: _gat,
    pyg.GATv2Conv: _gatv2,
    pyg.TransformerConv: _transformer,
}
