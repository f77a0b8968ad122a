r"""The weights of a sampled layer: how what was drawn stands in for what was not.

The layer of a minibatch has rows v, columns u that were drawn with chances p_u = P_u / sum
P, and wants z_v = sum over u of Ahat[v, u] x_u. It computes the sum over its columns of
Ahat[v, u] f_u x_u, with a factor f_u for each column:

    None            f = 1
    "normalized"    f = 1 / p_u, then each row divided by its sum: [Zou19]'s own code.
                    Biased; rows sum to one, so values stay tame
    "importance"    f = c_u / (s p_u), u drawn c_u times in s draws: unbiased with
                    replacement, biased without
    "debiased"      f = ((sum of P not drawn yet) / P_u + s - k) / s, u being draw k of s:
                    Des Raj's estimator for draws without replacement ([DesRaj56],
                    [Chen22]), which is unbiased

Where a minibatch has taken all that P offers, nothing is estimated: f = 1 and rows are as
they are, whatever the option. Nodes of the batch that are columns anyway have f = 1 for the
unbiased options, whose sums then run over the others; with "normalized" they have 1 / p_u
like all columns, and those with p_u = 0 count as certain (p_u = 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.sampling.algebra import Sample
from pyg_distcomm.sampling.bulk_matrix import BulkMatrix, BulkNodes, offsets
from pyg_distcomm.sampling.layer_graph import LayerEdges

OPTIONS = (None, "normalized", "importance", "debiased")


def check_weights(weights: str | None, replace: bool) -> None:
    """Refuses options that say nothing."""
    if weights not in OPTIONS:
        raise ValueError(f"weights must be one of {list(OPTIONS)}, got {weights!r}")
    if weights == "debiased" and replace:
        raise ValueError(
            "weights='debiased' is for draws without replacement; with replacement, "
            "weights='importance' is unbiased"
        )


def edge_weights(
    option: str | None,
    edges: LayerEdges,
    rows: BulkNodes,
    cols: BulkNodes,
    kept: Tensor,
    p: BulkMatrix,
    drawn: Sample,
) -> Tensor:
    """Returns the weight of each edge [E], float32.

    Args:
        option: one of `OPTIONS`.
        edges: between rows and columns.
        rows: of all minibatches.
        cols: of all minibatches.
        kept: [total columns] whether a column would be there without being drawn.
        p: what was drawn from, integers; one row for each minibatch, or for all.
        drawn: the draws.
    """
    if option is None:
        return edges.weight.float()
    weight = edges.weight * factors(option, cols, kept, p, drawn)[edges.col]
    if option == "normalized":
        ptr = offsets(torch.bincount(edges.row, minlength=len(rows.id)))
        whole = drawn.complete[rows.batch][edges.row]
        weight = torch.where(whole, weight, kernels.normalize_rows(ptr, weight))
    return weight.float()


def factors(
    option: str, cols: BulkNodes, kept: Tensor, p: BulkMatrix, drawn: Sample
) -> Tensor:
    """Returns the factor f of each column [total columns], float64."""
    batch = cols.batch
    if option == "normalized":
        found = _normalized(cols, p, drawn)
    else:
        each = torch.repeat_interleave(drawn.ptr.diff())
        value = p.values[drawn.drawn]
        s = drawn.ptr.diff()[each]
        if option == "debiased":
            nth = torch.arange(len(each)) - drawn.ptr[each]
            chance = drawn.left.double() / value.double() + (s - nth - 1)
        else:
            whole = drawn.left[drawn.ptr[each]]  # before the first draw: the sum of P
            chance = whole.double() / value.double()
        step = max(p.num_cols, 1)
        place = torch.searchsorted(
            batch * step + cols.id, each * step + p.col[drawn.drawn]
        )
        found = torch.zeros(len(cols.id), dtype=torch.float64)
        found.index_add_(0, place, chance / s)
        found.masked_fill_(kept, 1.0)
    return found.masked_fill_(drawn.complete[batch], 1.0)


def _normalized(cols: BulkNodes, p: BulkMatrix, drawn: Sample) -> Tensor:
    """Returns 1 / p_u for each column."""
    if p.num_rows == len(cols):
        entry, known = p.find(cols)
    else:  # one row for all
        entry, known = p.find(BulkNodes(cols.id, torch.tensor([0, len(cols.id)])))
    if not p.nnz:
        return torch.ones(len(cols.id), dtype=torch.float64)
    value = torch.where(known, p.values[entry], 0).double()
    begin = drawn.ptr[:-1].clamp(max=max(len(drawn.left) - 1, 0))
    first = drawn.left[begin] if len(drawn.left) else torch.ones_like(begin)
    return torch.where(value > 0, first[cols.batch].double() / value, 1.0)
