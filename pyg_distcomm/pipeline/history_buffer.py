"""Keeps the rows that a layer reads of its neighbours: of this epoch, and of earlier ones.

[Note: sites] Whatever a layer multiplies or gathers, it hands its rows to a site, which has
room for the rows of all own nodes and ghosts, `mix`. While a chunk is computed, that holds
rows of this epoch for itself and for the chunks before it, and history for those after it:
so [Chen23] reads neighbours. Backward, chunks come in the opposite order. When one is done
its rows of `mix` are put back to history, so that the next one finds `mix` as its forward
pass did, and can be computed again from its input alone.

[Note: pulled gradients] With A_c the rows of chunk c of the matrix that a site multiplies
by, the gradient of rows j is the sum over chunks c of (A_c^T)_j g_c. A site keeps g, all
chunks' together, and pulls: rows j of A^T times g. Going back, g holds the gradients of the
chunks after j; those before j, which have read j's history, are not there yet. So

    zeros there            gradients are those of autograd with history constant
    last epoch's there     "stale" gradients, in their place
    damped each epoch      between the two
    g_c times two, once chunk c has pulled for itself: "scaled", as an edge between chunks
                           counts in one of two epochs ([Chen23], of one such edge a path)

The sum for ghosts of chunk j goes to the ranks that own them while j is computed, over the
same link, transposed, that brought their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_distcomm.halo.halo import Link
from pyg_distcomm.kernels import codec_ops
from pyg_distcomm.pipeline.chunks import ChunkPlan, Operator

DTYPES = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8)
_BITS = 8


class History:
    """Rows in blocks, each written and read as a whole.

    As int8, a row is 256 levels between its least and its greatest number, which are kept
    in bf16 (see `codec_reference.quantise`); rounding is to nearest.

    Args:
        bounds: where blocks end, from 0.
        like: a tensor of the rows' type and device, `[*, w]`.
        dtype: how they are kept; None as they are.
        path: a file to map, instead of memory.

    Price: `nbytes`, at most 4 bytes a row more than its numbers take.
    """

    def __init__(
        self,
        bounds: tuple[int, ...],
        like: Tensor,
        dtype: torch.dtype | None = None,
        path: Path | None = None,
    ) -> None:
        self._bounds = bounds
        coded = dtype is torch.int8 and like.is_floating_point()
        kind = like.dtype if dtype is None or not like.is_floating_point() else dtype
        width = like.size(1)
        if coded:
            sizes = [b - a for a, b in pairwise(bounds)]
            item = max(like.element_size(), 4)  # codes are of float32 and float64
            ends = [codec_ops.message_bytes(n, width, _BITS, item) for n in sizes]
            self._ends: list[int] | None = [0]
            for size in ends:
                self._ends.append(self._ends[-1] + size)
            self.kept = _empty(self._ends[-1], torch.uint8, like.device, path)
        else:
            self._ends = None
            numbers = _empty(bounds[-1] * width, kind, like.device, path)
            self.kept = numbers.view(bounds[-1], width)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return self.kept.nbytes

    def store(self, block: int, x: Tensor) -> None:
        """Writes the rows of a block."""
        if self._ends is None:
            rows = self._rows(block).copy_(x)
            if rows.dtype is torch.float16 and not bool(rows.isfinite().all()):
                raise _not_finite("float16")
        elif x.numel():
            message = self.kept[self._ends[block] : self._ends[block + 1]]
            bad = codec_ops.quantise(x, None, _BITS, None, message)
            if bad >= 0:
                raise _not_finite("int8")

    def load(self, block: int, out: Tensor) -> None:
        """Reads the rows of a block."""
        if self._ends is None:
            out.copy_(self._rows(block))
        elif out.numel():
            message = self.kept[self._ends[block] : self._ends[block + 1]]
            codec_ops.dequantise(message, _BITS, out)

    def _rows(self, block: int) -> Tensor:
        return self.kept[self._bounds[block] : self._bounds[block + 1]]


def _not_finite(kind: str) -> ValueError:
    return ValueError(
        f"a row of history is not finite as {kind}, and cannot be kept; lower the learning "
        "rate, or use history_dtype=torch.bfloat16"
    )


def _empty(
    count: int, dtype: torch.dtype, device: torch.device, path: Path | None
) -> Tensor:
    if path is None or not count:
        return torch.zeros(count, dtype=dtype, device=device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # another history may be mapped from it, and keeps it
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype)


GRADIENTS = ("surrogate", "scaled", "stale", "damped")


@dataclass(frozen=True)
class GradientRule:
    """What becomes of gradients that cross from chunk to chunk; see the note above.

    Args:
        keep: what is left of last epoch's g: nothing (0), all of it (1), or a part.
        cross: what g_c is multiplied by for other chunks.
    """

    keep: float = 0.0
    cross: float = 1.0

    @staticmethod
    def of(gradient: str, damping: float) -> GradientRule:
        """Returns the rule of a name."""
        if gradient not in GRADIENTS:
            raise ValueError(
                f"gradient={gradient!r} must be one of {', '.join(GRADIENTS)}"
            )
        if not isinstance(damping, (int, float)) or not 0 <= damping <= 1:
            raise ValueError(f"damping={damping!r} must be a number between 0 and 1")
        keep = {"stale": 1.0, "damped": damping}.get(gradient, 0.0)
        return GradientRule(keep, 2.0 if gradient == "scaled" else 1.0)


class HistoryBuffer:
    """The rows that one exchange of one layer reads, and their history.

    Shapes (this rank; n own nodes, h ghosts): mix [n + h, w], gradients g [r, w], where the
    operator has r rows.

    Args:
        plan: the chunks.
        like: rows as they come `[*, w]`.
        operator: what reads them.
        rule: of gradients.
        keep: makes a history for blocks and rows like those given; None without.
        wrap: what the link of a chunk becomes in an epoch, for rows that are coded or late.
        exactly: why they are not, whatever the link; nothing if they may be.
    """

    def __init__(
        self,
        plan: ChunkPlan,
        like: Tensor,
        operator: Operator,
        rule: GradientRule,
        keep: Callable[[tuple[int, ...], Tensor], History] | None,
        wrap: Callable[[int], Link] | None = None,
        exactly: str = "",
    ) -> None:
        n, h = plan.counts
        self.plan, self.operator, self.rule = plan, operator, rule
        self.mix = like.new_zeros((n + h, like.size(1)))
        self.history = None
        if keep is not None and plan.chunks > 1:
            self.history = keep(plan.blocks, self.mix)
        self.gradients: Tensor | None = None
        self.flows, self.exactly = False, exactly
        self._wrap = wrap
        self._links: dict[int, Link] = {}  # of chunks that have no gradient yet
        # blocks whose history is this epoch's; None while no gradient has come
        self._renewed: set[int] | None = None

    # the forward pass

    def put(self, x: Tensor, ghosts: Tensor) -> None:
        """Takes the rows of all chunks, and their history."""
        n = self.plan.counts[0]
        self.mix[:n], self.mix[n:] = x, ghosts
        if self.history is not None:
            for block, rows in self._blocks():
                self.history.store(block, rows)
            self._load()

    def read(self, x: Tensor, chunk: int, again: bool) -> Tensor:
        """Takes the rows of a chunk, and returns its rows of the operator's product.

        Args:
            x: the chunk's rows `[n_c, w]`.
            chunk: which chunk.
            again: whether it is computed again: all is in place, and nothing travels.
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
        """Drops, or damps, the gradients of the last epoch."""
        self._renewed = set()
        if self.gradients is not None and self.rule.keep == 0:
            self.gradients.zero_()
        elif self.gradients is not None and self.rule.keep != 1:
            self.gradients.mul_(self.rule.keep)

    def pull(self, g: Tensor, chunk: int) -> Tensor:
        """Takes the gradient of a chunk's product, and returns that of its rows."""
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
        if self.rule.cross != 1:
            self.gradients[rows] *= self.rule.cross
        return out if arrive is None else arrive(out)

    def retire(self, chunk: int, refresh: bool) -> None:
        """Puts history back in a chunk's place, once it needs no more computing.

        Args:
            chunk: which chunk.
            refresh: whether its rows of this epoch become its history.
        """
        if self.history is None:
            return
        n, (own, ghost) = self.plan.counts[0], (self.plan.own, self.plan.ghost)
        places = slice(n + ghost.bounds[chunk], n + ghost.bounds[chunk + 1])
        for block, rows in (
            (chunk, self.mix[own.rows(chunk)]),
            (self.plan.chunks + chunk, self.mix[places]),
        ):
            fresh = rows.clone() if refresh else rows
            self.history.load(block, rows)
            if refresh:
                assert self._renewed is not None
                self._renewed.add(block)
                self.history.store(block, fresh)

    def end_epoch(self, refresh: bool) -> None:
        """Reads the history of the next epoch, once all chunks are retired."""
        self._renewed = None
        if refresh:
            self._load()

    def undo(self) -> None:
        """Puts history back after an epoch that failed, int8 within one of its levels.

        If it failed in the backward pass, gradients of the epoch before are forgotten.
        """
        renewed = self._renewed
        if renewed is not None:
            self.gradients = None
        if renewed and self.history is not None:
            for block, rows in self._blocks():
                if block in renewed:  # `retire` has put back its rows
                    self.history.store(block, rows)
        self.end_epoch(refresh=True)

    def _load(self) -> None:
        if self.history is not None:
            for block, rows in self._blocks():
                self.history.load(block, rows)

    def _blocks(self) -> list[tuple[int, Tensor]]:
        pairs = pairwise(self.plan.blocks)
        return [(k, self.mix[a:b]) for k, (a, b) in enumerate(pairs)]

    def memory(self) -> int:
        """Returns the bytes that it will have taken after an epoch."""
        rows = len(self.mix) + (self.operator.bounds[-1] if self.flows else 0)
        kept = 0 if self.history is None else self.history.nbytes
        return rows * self.mix.size(1) * self.mix.element_size() + kept

    @property
    def nbytes(self) -> int:
        """The bytes that it has taken."""
        kept = [self.mix, self.gradients, self.history]
        return sum(each.nbytes for each in kept if each is not None)


class _Read(torch.autograd.Function):
    """Rows of a product with a chunk's part of an operator; see [Note: pulled gradients]."""

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


def read_site(x: Tensor, site: HistoryBuffer, chunk: int, again: bool) -> Tensor:
    """`site.read`, differentiably."""
    site.flows |= x.requires_grad and torch.is_grad_enabled()
    out: Tensor = _Read.apply(x, site, chunk, again)
    return out
