"""GridMatrix: one family of distributed sparse-dense products, on a grid of ranks.

[Note: the grid family] With node v owned by rank (i, j, k) of a grid r x s x p, every
rank (i, j, *) holds the block of A whose rows are owned by process row i and whose
columns are owned by process column j. The sparse matrix never moves, and

    Z = fiber' . out' . A_ij . in . fiber (X)

    fiber   all_to_all over the fiber: my rows, all features -> rows of all k, f/p features
    in      halo gather over the row axis: the rows A_ij's nonzero columns need
    out'    halo scatter-add over the col axis: A_ij's nonempty rows go to their owners
    fiber'  the inverse of fiber

(P, 1, 1) is the 1D algorithm of [Tripathy20] Sec. 4.1 in the sparsity-aware form of
[Mukhopadhyay24]; (P/c, c, 1) and (q, q, p) move the words of its 1.5D and 3D algorithms
but keep A in place; (1, 1, P) is the feature split of [Kurt23]. The transpose is the same
steps with row and col exchanged and every local block transposed. Where it is cheaper,
nonzeros of A_ij are multiplied by another rank (see [Note: rows or sums] in `cover.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.price import Price, balanced_split, exchange_price
from pyg_distcomm.kernels import memory
from pyg_distcomm.ops.csr import CSR
from pyg_distcomm.ops.local_blocks import Links, LocalBlocks, Wrap
from pyg_distcomm.ops.overlapped_spmm import OverlappedSpMM


@dataclass(frozen=True, eq=False)
class FiberSplit:
    """All features of own rows <-> a share of the features of the fiber's rows.

    Shapes (this rank k of p): x [n_k, f]  <->  [sum_k n_k, f_k].
    """

    axis: Axis
    rows: tuple[int, ...]

    def split(self, x: Tensor) -> Tensor:
        """Sends away the features of other ranks, receives mine of their rows."""
        p = self.axis.size
        if p == 1:
            return x
        widths = balanced_split(x.size(1), p)
        mine = widths[self.axis.rank]
        send = torch.cat([part.reshape(-1) for part in x.split(widths, 1)])
        out = collectives.all_to_all(
            send,
            [x.size(0) * w for w in widths],
            [n * mine for n in self.rows],
            self.axis,
            "fiber",
            max(self.rows) * widths[0],
        ).wait()
        return out.view(sum(self.rows), mine)

    def join(self, z: Tensor, width: int) -> Tensor:
        """Sends the fiber's rows home, receives all features of mine."""
        p = self.axis.size
        if p == 1:
            return z
        widths = balanced_split(width, p)
        n, mine = self.rows[self.axis.rank], widths[self.axis.rank]
        counts = [n * w for w in widths]
        out = collectives.all_to_all(
            z.reshape(-1),
            [m * mine for m in self.rows],
            counts,
            self.axis,
            "fiber",
            max(self.rows) * widths[0],
        ).wait()
        parts = [
            part.view(n, w) for part, w in zip(out.split(counts), widths, strict=True)
        ]
        return torch.cat(parts, 1)

    def price(self, width: int) -> Price:
        """Returns the price of one `split` and one `join` at `width` features."""
        if self.axis.size == 1:
            return Price()
        k = self.axis.rank
        widths = balanced_split(width, self.axis.size)
        away = [self.rows[k] * w for w in widths]
        back = [n * widths[k] for n in self.rows]
        there = exchange_price(away, back, k, 1)
        return there + exchange_price(back, away, k, 1)

    def width(self, width: int) -> int:
        """Returns how many of `width` features this rank has inside the product."""
        return balanced_split(width, self.axis.size)[self.axis.rank]


@dataclass(frozen=True, eq=False)
class GridMatrix:
    """A row-cut sparse matrix times row-cut features, on any grid of ranks.

    Shapes (this rank, n_i own rows): x [n_i, f] -> [n_i, f].

    Price: `price(f)` words and messages, exactly what the ledger counts; at most
    `price.dense_words`. One rank moves nothing.
    See [Note: the grid family] for the algorithm and its sources.
    """

    tile: LocalBlocks
    links: Links
    fiber: FiberSplit

    def matmul(
        self, x: Tensor, value: Tensor | None = None, *, index: Any = None
    ) -> Tensor:
        """Returns `A x`, differentiable in x and in `value`.

        Args:
            x: own rows `[n_i, f]`.
            value: trainable values of this rank's block, instead of the fixed ones;
                for matrices planned with halo="rows" or "blocks".
            index: which of them each nonzero of the blocks takes.
        """
        out: Tensor = _Product.apply(x, value, index, self)
        return out

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.matmul(x)

    @cached_property
    def transposed(self) -> GridMatrix:
        """The transpose: the same steps in a mirror."""
        return GridMatrix(self.tile.transposed, self.links.mirrored, self.fiber)

    def over(self, wrap: Wrap | None) -> GridMatrix:
        """Returns the same matrix over other links; fiber steps stay as they are."""
        if wrap is None:
            return self
        return GridMatrix(self.tile, self.links.wrapped(wrap), self.fiber)

    def price(self, width: int) -> Price:
        """Returns what one product costs this rank at `width` features."""
        share = self.fiber.width(width)
        return self.fiber.price(width) + self.links.price(share)

    def apply(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the product, and the own and ghost rows it multiplied by."""
        own = self.fiber.split(x)
        memory.make_room(self._traffic(own))
        product = OverlappedSpMM(
            self.tile, self.links, own, self.fiber.axis.ledger.event
        )
        z, ghost = product.run()
        return self.fiber.join(z, x.size(1)), own, ghost

    def _traffic(self, own: Tensor) -> int:
        """Returns the bytes that a product takes beside its input, on the CPU."""
        if own.is_cuda:
            return 0
        rows, cols = self.tile.out_ghost.pattern.shape
        more = self.tile.sum_own.pattern.shape[0] + self.tile.own_far.pattern.shape[1]
        return own.nbytes + (rows + cols + more) * own.size(1) * own.element_size()

    def to(self, device: torch.device) -> GridMatrix:
        """Returns the same matrix on another device."""
        blocks = (
            CSR(b.pattern.to(device), None if b.value is None else b.value.to(device))
            for b in self.tile.blocks
        )
        return GridMatrix(LocalBlocks(*blocks), self.links.to(device), self.fiber)

    def gather(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Returns own and ghost rows as `apply` would multiply by them."""
        own = self.fiber.split(g)
        return own, self.links.ghost.begin(own)()

    def __repr__(self) -> str:
        n = sum(block.pattern.nnz for block in self.tile.blocks)
        return (
            f"GridMatrix({n} nonzeros here, in: {self.links.ghost}, "
            f"out: {self.links.out})"
        )


def value_gradient(
    tile: LocalBlocks, index: tuple[Tensor, ...], like: Tensor, g: Any, x: Any
) -> Tensor:
    """Returns dLoss/dvalue: for each nonzero the dot of its row's g and column's x.

    Args:
        tile: the blocks; no nonzeros were handed to other ranks.
        index: which value each nonzero took.
        like: the values; the gradient has their shape.
        g: the gradient's own and out rows.
        x: the input's own and ghost rows.
    """
    sides = [(g[0], x[0]), (g[0], x[1]), (g[1], x[0]), (g[1], x[1])]
    out = torch.zeros_like(like)
    for block, i, (rows, cols) in zip(tile.blocks[:4], index, sides, strict=False):
        if block.pattern.nnz:
            out.index_add_(0, i, block.value_gradient(rows, cols).to(out.dtype))
    return out


def _check_twice(matrix: GridMatrix, learnt: bool) -> None:
    """Refuses second derivatives that are not those of a linear map."""
    if learnt or not matrix.links.is_exact:
        what = "values of edges that are learnt" if learnt else "a coded or late link"
        raise RuntimeError(
            f"differentiate once, or detach edge weights: create_graph=True met {what} in a "
            "distributed product, whose second derivative is not known"
        )


class _Product(torch.autograd.Function):
    """Z = A X; dX = A^T dZ; dvalue_e = <dZ_row(e), X_col(e)>."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor | None, index: Any, matrix: GridMatrix
    ) -> Tensor:
        if value is not None:
            tile = matrix.tile.with_values(value, index)
            matrix = GridMatrix(tile, matrix.links, matrix.fiber)
        z, own, ghost = matrix.apply(x)
        ctx.matrix, ctx.index = matrix, index
        if value is not None and ctx.needs_input_grad[1]:
            ctx.save_for_backward(value, own, ghost)
        return z

    @staticmethod
    def backward(
        ctx: Any, g: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        g = g.contiguous()
        mirror = ctx.matrix.transposed
        if torch.is_grad_enabled():
            _check_twice(ctx.matrix, ctx.needs_input_grad[1])
            return _Product.apply(g, None, None, mirror), None, None, None
        gx, rows = None, None
        if ctx.needs_input_grad[0]:
            gx, *found = mirror.apply(g)
            rows = tuple(found)
        if not ctx.needs_input_grad[1]:
            return gx, None, None, None
        value, *cols = ctx.saved_tensors
        rows = rows or mirror.gather(g)
        tile = ctx.matrix.tile
        return gx, value_gradient(tile, ctx.index, value, rows, cols), None, None
