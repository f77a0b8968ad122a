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
steps with row and col exchanged and every local block transposed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import wire
from pyg_distcomm.exchange.link import Link
from pyg_distcomm.kernels import memory
from pyg_distcomm.ops.csr import CSR
from pyg_distcomm.price import Price, balanced_split, exchange_price
from pyg_distcomm.wire import Axis


@dataclass(frozen=True, eq=False)
class Tile:
    """A_ij in four blocks: (own | out) rows x (own | ghost) columns.

    Own rows and columns belong to ranks (i, j, *); out rows to other process columns,
    ghost columns to other process rows.
    """

    own_own: CSR
    own_ghost: CSR
    out_own: CSR
    out_ghost: CSR

    @cached_property
    def transposed(self) -> Tile:
        """The four blocks of the transpose: out rows become ghost columns."""
        return Tile(
            self.own_own.transposed,
            self.out_own.transposed,
            self.own_ghost.transposed,
            self.out_ghost.transposed,
        )

    @property
    def blocks(self) -> tuple[CSR, CSR, CSR, CSR]:
        """The four blocks, in the order of their edges in `EdgeRoute` values."""
        return self.own_own, self.own_ghost, self.out_own, self.out_ghost

    def with_values(self, value: Tensor, index: tuple[Tensor, ...]) -> Tile:
        """Returns the same patterns with the values `value[index]` on them."""
        pairs = zip(self.blocks, index, strict=True)
        return Tile(
            *(CSR(block.pattern, value.index_select(0, i)) for block, i in pairs)
        )


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
        out = wire.all_to_all(
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
        out = wire.all_to_all(
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

    tile: Tile
    link_in: Link
    link_out: Link
    fiber: FiberSplit

    def matmul(
        self, x: Tensor, value: Tensor | None = None, *, index: Any = None
    ) -> Tensor:
        """Returns `A x`, differentiable in x and in `value`.

        Args:
            x: own rows `[n_i, f]`.
            value: trainable values of this rank's block, instead of the fixed ones.
            index: which of them each nonzero of the four blocks takes.
        """
        out: Tensor = _Product.apply(x, value, index, self)
        return out

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.matmul(x)

    @cached_property
    def transposed(self) -> GridMatrix:
        """The transpose: the same steps in a mirror."""
        return GridMatrix(self.tile.transposed, self.link_out, self.link_in, self.fiber)

    def price(self, width: int) -> Price:
        """Returns what one product costs this rank at `width` features."""
        share = self.fiber.width(width)
        return (
            self.fiber.price(width)
            + self.link_in.price(share)
            + self.link_out.price_transpose(share)
        )

    def apply(
        self, x: Tensor, tile: Tile | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the product, and the own and ghost rows it multiplied by."""
        tile = tile or self.tile
        note = self.fiber.axis.ledger.event
        own = self.fiber.split(x)
        memory.make_room(self._traffic(own))
        arrive = self.link_in.begin(own)
        note("begin", "in")
        out = tile.out_own.matmul(own)
        z = tile.own_own.matmul(own)
        note("multiply", "own")
        ghost = arrive()
        note("arrive", "in")
        tile.out_ghost.add_matmul(ghost, out)
        deliver = self.link_out.begin_transpose(out)
        note("begin", "out")
        tile.own_ghost.add_matmul(ghost, z)
        note("multiply", "ghost")
        deliver(z)
        note("arrive", "out")
        return self.fiber.join(z, x.size(1)), own, ghost

    def _traffic(self, own: Tensor) -> int:
        """Returns the bytes that a product takes beside its input, on the CPU."""
        if own.is_cuda:
            return 0
        rows, cols = self.tile.out_ghost.pattern.shape
        return own.nbytes + (rows + cols) * own.size(1) * own.element_size()

    def to(self, device: torch.device) -> GridMatrix:
        """Returns the same matrix on another device."""
        blocks = (
            CSR(b.pattern.to(device), None if b.value is None else b.value.to(device))
            for b in self.tile.blocks
        )
        return GridMatrix(
            Tile(*blocks), self.link_in.to(device), self.link_out.to(device), self.fiber
        )

    def gather(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Returns own and ghost rows as `apply` would multiply by them."""
        own = self.fiber.split(g)
        return own, self.link_in.begin(own)()

    def __repr__(self) -> str:
        n = sum(block.pattern.nnz for block in self.tile.blocks)
        return (
            f"GridMatrix({n} nonzeros here, in: {self.link_in}, out: {self.link_out})"
        )


def value_gradient(
    tile: Tile, index: tuple[Tensor, ...], like: Tensor, g: Any, x: Any
) -> Tensor:
    """Returns dLoss/dvalue: for each nonzero the dot of its row's g and column's x.

    Args:
        tile: the four blocks.
        index: which value each nonzero took.
        like: the values; the gradient has their shape.
        g: the gradient's own and out rows.
        x: the input's own and ghost rows.
    """
    sides = [(g[0], x[0]), (g[0], x[1]), (g[1], x[0]), (g[1], x[1])]
    out = torch.zeros_like(like)
    for block, i, (rows, cols) in zip(tile.blocks, index, sides, strict=True):
        if block.pattern.nnz:
            out.index_add_(0, i, block.value_gradient(rows, cols).to(out.dtype))
    return out


class _Product(torch.autograd.Function):
    """Z = A X; dX = A^T dZ; dvalue_e = <dZ_row(e), X_col(e)>."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor | None, index: Any, matrix: GridMatrix
    ) -> Tensor:
        tile = matrix.tile if value is None else matrix.tile.with_values(value, index)
        z, own, ghost = matrix.apply(x, tile)
        ctx.matrix, ctx.tile, ctx.index = matrix, tile, index
        if value is not None and ctx.needs_input_grad[1]:
            ctx.save_for_backward(value, own, ghost)
        return z

    @staticmethod
    def backward(
        ctx: Any, g: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        g = g.contiguous()
        mirror = GridMatrix(
            ctx.tile.transposed,
            ctx.matrix.link_out,
            ctx.matrix.link_in,
            ctx.matrix.fiber,
        )
        gx, rows = None, None
        if ctx.needs_input_grad[0]:
            gx, *found = mirror.apply(g)
            rows = tuple(found)
        if not ctx.needs_input_grad[1]:
            return gx, None, None, None
        value, *cols = ctx.saved_tensors
        rows = rows or mirror.gather(g)
        return gx, value_gradient(ctx.tile, ctx.index, value, rows, cols), None, None
