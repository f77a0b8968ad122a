"""Keeps the neighbour rows that layers of a pipeline read: of this epoch, and of earlier ones.

[Note: sites] A site is one exchange of one layer. Its buffer `mix` has a row for each own
node and each ghost. While a chunk is computed, `mix` holds rows of this epoch for this chunk
and for the chunks before it, and history for the chunks after it, as in [Chen23]. In the
backward pass chunks come in the opposite order. When a chunk is done, its rows of `mix` are
set back to history: then the next chunk finds `mix` as its forward pass did, and can be
recomputed from its input alone.

[Note: pulled gradients] With A_c the rows of chunk c of the matrix that a site multiplies
by, the gradient of rows j is the sum over chunks c of (A_c^T)_j g_c. A site keeps g of all
chunks in one buffer, and pulls: it multiplies rows j of A^T by g. In the backward pass g has
the gradients of the chunks after j; those before j, which have read j's history, are not
known yet, and in their place g holds zeros. That is "surrogate": autograd's gradients, with
history constant. With "scaled", g_c counts twice for all chunks but c, since an edge between
chunks counts in one of two epochs ([Chen23], for paths with one such edge).

The sums for ghosts of chunk j travel to their owners while j is computed, over the transpose
of the link that brought their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_distcomm.halo.halo import Link
from pyg_distcomm.pipeline.chunks import ChunkPlan, Operator

# by Pipeline's option `gradient`, the factor of g_c for other chunks
GRADIENTS = {"surrogate": 1.0, "scaled": 2.0}


class HistoryBuffer:
    """The buffer of one site: the rows that an exchange of a layer reads, and their history.

    Shapes (this rank; n own nodes, h ghosts): mix [n + h, w], gradients g [r, w], where the
    operator has r rows.

    Args:
        plan: the chunks.
        like: rows of the layer, for their dtype and device, `[*, w]`.
        operator: the matrix that multiplies them.
        cross: the factor of gradients that cross from chunk to chunk, of `GRADIENTS`.
        wrap: returns the link of a chunk in this epoch, if rows are coded or late.
        exact_reason: why rows are exact whatever the link; empty if they may be coded.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        like: Tensor,
        operator: Operator,
        cross: float,
        wrap: Callable[[int], Link] | None = None,
        exact_reason: str = "",
    ) -> None:
        n, h = plan.counts
        self.plan, self.operator, self.cross = plan, operator, cross
        self.mix = like.new_zeros((n + h, like.size(1)))
        self.history = torch.zeros_like(self.mix) if plan.chunks > 1 else None
        self.gradients: Tensor | None = None
        self.needs_gradient, self.exact_reason = False, exact_reason
        self._wrap = wrap
        self._links: dict[int, Link] = {}  # of chunks that have no gradient yet
        # chunks whose history is of this epoch; None outside the backward pass
        self._refreshed: set[int] | None = None

    # the forward pass

    def put(self, x: Tensor, ghosts: Tensor) -> None:
        """Stores the rows of all chunks, also as their history."""
        n = self.plan.counts[0]
        self.mix[:n], self.mix[n:] = x, ghosts
        if self.history is not None:
            self.history.copy_(self.mix)

    def read(self, x: Tensor, chunk: int, again: bool) -> Tensor:
        """Stores the rows of a chunk, and returns its rows of the operator's product.

        Args:
            x: the chunk's rows `[n_c, w]`.
            chunk: which chunk.
            again: whether it is recomputed: its rows are in place, and nothing travels.
        """
        plan, operator, n = self.plan, self.operator, self.plan.counts[0]
        link, arrive = plan.links[chunk], None
        if not again:
            self.mix[plan.own.rows(chunk)] = x
        if not (again or link.silent):
            ghost = plan.ghost.rows(chunk)
            into = self.mix[n + ghost.start : n + ghost.stop]
            if self._wrap is not None:
                link = self._links[chunk] = self._wrap(chunk)
            arrive = link.begin(x, into)
        rows = operator.rows(chunk)
        z = x.new_empty((rows.stop - rows.start, x.size(1)))
        operator.own.matmul(self.mix[:n], z, rows.start)
        if arrive is not None:
            arrived = arrive()
            if arrived.data_ptr() != into.data_ptr():
                into.copy_(arrived)
        return operator.ghost.add_matmul(self.mix[n:], z, rows.start)

    # the backward pass

    def begin_backward(self) -> None:
        """Drops the gradients of the last epoch."""
        self._refreshed = set()
        if self.gradients is not None:
            self.gradients.zero_()

    def pull(self, g: Tensor, chunk: int) -> Tensor:
        """Stores the gradient of a chunk's product, and returns the gradient of its rows."""
        plan, operator, rows = self.plan, self.operator, self.operator.rows(chunk)
        if self.gradients is None:
            self.gradients = g.new_zeros((operator.bounds[-1], g.size(1)))
        self.gradients[rows] = g
        link, arrive = plan.links[chunk], None
        if not link.silent:
            ghost = plan.ghost.rows(chunk)
            sums = g.new_empty((ghost.stop - ghost.start, g.size(1)))
            operator.ghost.transposed.matmul(self.gradients, sums, ghost.start)
            arrive = self._links.pop(chunk, link).begin_transpose(sums)
        own = plan.own.rows(chunk)
        out = g.new_empty((own.stop - own.start, g.size(1)))
        operator.own.transposed.matmul(self.gradients, out, own.start)
        if self.cross != 1:
            self.gradients[rows] *= self.cross
        return out if arrive is None else arrive(out)

    def retire(self, chunk: int, refresh: bool) -> None:
        """Sets a chunk's rows back to history, after its backward pass.

        Args:
            chunk: which chunk.
            refresh: whether its rows of this epoch become its history.
        """
        if self.history is None:
            return
        for rows in self._rows_of(chunk):
            fresh = self.mix[rows].clone() if refresh else None
            self.mix[rows] = self.history[rows]
            if fresh is not None:
                self.history[rows] = fresh
        if refresh:
            assert self._refreshed is not None
            self._refreshed.add(chunk)

    def end_epoch(self, refresh: bool) -> None:
        """Loads the history for the next epoch, once all chunks are retired."""
        self._refreshed = None
        if refresh and self.history is not None:
            self.mix.copy_(self.history)

    def undo(self) -> None:
        """Restores history after an epoch that failed."""
        if self.history is not None:
            for chunk in self._refreshed or ():  # `retire` has put back its rows
                for rows in self._rows_of(chunk):
                    self.history[rows] = self.mix[rows]
        self.end_epoch(refresh=True)

    def _rows_of(self, chunk: int) -> tuple[slice, slice]:
        """Returns where own rows and ghosts of a chunk are in `mix`."""
        n, ghost = self.plan.counts[0], self.plan.ghost.rows(chunk)
        return self.plan.own.rows(chunk), slice(n + ghost.start, n + ghost.stop)

    def memory(self) -> int:
        """Returns the bytes that it takes after the first epoch of training."""
        rows = len(self.mix) + (self.operator.bounds[-1] if self.needs_gradient else 0)
        kept = 0 if self.history is None else self.history.nbytes
        return rows * self.mix.size(1) * self.mix.element_size() + kept

    @property
    def nbytes(self) -> int:
        """The bytes that it takes now."""
        kept = [self.mix, self.gradients, self.history]
        return sum(each.nbytes for each in kept if each is not None)


class _ReadSite(torch.autograd.Function):
    """Multiplies by a chunk's rows of an operator; see [Note: pulled gradients]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, site: HistoryBuffer, chunk: int, again: bool
    ) -> Tensor:
        ctx.made = site, chunk
        return site.read(x, chunk, again)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        site, chunk = ctx.made
        return site.pull(g.contiguous(), chunk), None, None, None


def read_from_site(x: Tensor, site: HistoryBuffer, chunk: int, again: bool) -> Tensor:
    """Returns `site.read(x, chunk, again)`, differentiably."""
    site.needs_gradient |= x.requires_grad and torch.is_grad_enabled()
    out: Tensor = _ReadSite.apply(x, site, chunk, again)
    return out
