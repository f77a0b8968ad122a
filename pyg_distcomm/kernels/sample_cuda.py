"""Runs `sample_ops` on CUDA, by kernels in Triton: draws, sums, reads of pinned memory."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_distcomm.kernels import sample_ops
from pyg_distcomm.kernels.core_cuda import mix

BLOCK = 128  # one thread per node: what it has written it reads again
WORDS = 1024
MOST = 8192  # draws of an urn whose entries one program remembers


@triton.jit
def draw_rows(
    stream, size, out, rows, draws, REPLACED: tl.constexpr, BLOCK: tl.constexpr
):
    """Draws places in 0 .. size-1 for BLOCK nodes; see `sample_ops.uniform_picks`."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = r < rows
    generator = tl.load(stream + r, mask=live, other=0).to(tl.uint64)
    count = tl.load(size + r, mask=live, other=1)
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    word = generator
    for k in range(0, draws):
        word += golden
        u = (mix(word) >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16
        top = count if REPLACED else count - draws + k + 1
        pick = (u * top.to(tl.float64)).to(tl.int64)
        if not REPLACED:
            again = pick < 0
            for j in range(0, k):
                again |= tl.load(out + r * draws + j, mask=live, other=-1) == pick
            pick = tl.where(again, top - 1, pick)
        tl.store(out + r * draws + k, pick, mask=live)


@triton.jit
def copy_rows(
    values,
    kept,
    place,
    index,
    out,
    total,
    width,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies rows of `width` words, a word at a time: neighbours read neighbours.

    Where KEPT, row i is row `place[i]` of `kept`, unless that is negative.
    """
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = k < total
    row = tl.load(index + k // width, mask=live, other=0).to(tl.int64)
    if KEPT:
        at = tl.load(place + row, mask=live, other=-1).to(tl.int64)
        near = at >= 0
        word = tl.load(kept + at * width + k % width, mask=live & near, other=0)
        far = tl.load(values + row * width + k % width, mask=live & (at < 0), other=0)
        word = tl.where(near, word, far)
    else:
        word = tl.load(values + row * width + k % width, mask=live, other=0)
    tl.store(out + k, word, mask=live)


@triton.jit
def draw_from_urn(running, low, high, keys, entries, lefts, draws, LANES: tl.constexpr):
    """Draws from one urn; lane k remembers draw k. See `sample_ops.draw_urns`."""
    urn = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(low + urn), tl.load(high + urn)
    base = tl.load(running + begin)
    left = tl.load(running + end) - base
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    word = mix(tl.load(keys + urn).to(tl.uint64) + golden)
    lane = tl.arange(0, LANES).to(tl.int64)
    weight = tl.zeros((LANES,), tl.int64)
    before = tl.full((LANES,), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for k in range(0, draws):
        word += golden
        goal = tl.umulhi(mix(word), left.to(tl.uint64)).to(tl.int64)
        passed = before <= goal
        skipped = tl.sum(tl.where(passed, weight, 0), 0)
        first, last = begin, end
        while first < last:  # LANES + 1 parts at a time
            step = (last - first + LANES - 1) // LANES
            probe = first + lane * step
            total = tl.load(running + probe + 1, mask=probe < last, other=0) - base
            below = (probe < last) & (total <= goal + skipped)
            count = tl.sum(below.to(tl.int64), 0)
            last = tl.minimum(last, first + count * step)
            first = tl.where(count > 0, first + (count - 1) * step + 1, first)
        start = tl.load(running + first)
        mine = tl.load(running + first + 1) - start
        before = tl.where(passed, before, before - mine)
        before = tl.where(lane == k, start - base - skipped, before)
        weight = tl.where(lane == k, mine, weight)
        tl.store(entries + urn * draws + k, first)
        tl.store(lefts + urn * draws + k, left)
        left -= mine


@triton.jit
def sum_rows(ptr, value, out, rows, BLOCK: tl.constexpr):
    """Adds up BLOCK rows, each by one thread, in order."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = r < rows
    place = tl.load(ptr + r, mask=live, other=0)
    end = tl.load(ptr + r + 1, mask=live, other=0)
    total = tl.zeros((BLOCK,), tl.float64)
    for _ in range(0, tl.max(end - place, 0)):
        there = place < end
        one = tl.load(value + place, mask=there, other=0.0)
        total = tl.where(there, total + one, total)
        place += 1
    tl.store(out + r, total, mask=live)


def uniform_picks(streams: Tensor, size: Tensor, draws: int, replaced: bool) -> Tensor:
    """Runs `sample_ops.uniform_picks`, one thread per node."""
    out = torch.empty((len(size), draws), dtype=torch.int64, device=size.device)
    if out.numel():
        draw_rows[(triton.cdiv(len(size), BLOCK),)](
            *(streams.contiguous(), size.contiguous(), out, len(size), draws),
            REPLACED=replaced,
            BLOCK=BLOCK,
            num_warps=BLOCK // 32,
        )
    return out


def draw_urns(
    running: Tensor, low: Tensor, high: Tensor, keys: Tensor, draws: int
) -> tuple[Tensor, Tensor]:
    """Runs `sample_ops.draw_urns`, one program per urn; up to MOST draws."""
    if draws > MOST:
        return sample_ops.draw_urns.definition(running, low, high, keys, draws)
    shape = (2, len(low), draws)
    entries, lefts = torch.empty(shape, dtype=torch.int64, device=low.device)
    if entries.numel():
        lanes = max(triton.next_power_of_2(draws), BLOCK)
        draw_from_urn[(len(low),)](
            *(t.contiguous() for t in (running, low, high, keys)),
            *(entries, lefts, draws),
            LANES=lanes,
            num_warps=min(lanes // 32, 16),
        )
    return entries, lefts


def row_sums(ptr: Tensor, value: Tensor) -> Tensor:
    """Runs `sample_ops.row_sums`, one thread per row."""
    out = torch.empty(len(ptr) - 1, dtype=torch.float64, device=value.device)
    if len(out):
        sum_rows[(triton.cdiv(len(out), BLOCK),)](
            *(ptr.contiguous(), value.contiguous(), out, len(out)),
            BLOCK=BLOCK,
            num_warps=BLOCK // 32,
        )
    return out


def read_rows(
    values: Tensor, index: Tensor, kept: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Runs `sample_ops.read_rows`; by a kernel where the rows are in pinned host memory.

    A pointer to pinned memory is good on CUDA devices, too (unified virtual addresses).
    """
    if values.is_cuda:
        return sample_ops.read_rows.definition(values, index)
    shape = values.shape[1:]
    out = torch.empty((*index.shape, *shape), dtype=values.dtype, device=index.device)
    if not out.numel():
        return out
    size = shape.numel() * values.element_size()
    begin = values.storage_offset() * values.element_size()
    word = next(w for w in (8, 4, 2, 1) if size % w == begin % w == 0)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]
    flat = values.reshape(-1).view(torch.uint8).view(kind)
    near, place = (flat, index) if kept is None else kept
    near = near.reshape(-1).view(torch.uint8).view(kind)
    words = out.view(-1).view(torch.uint8).view(kind)
    copy_rows[(triton.cdiv(len(words), WORDS),)](
        *(flat, near, place, index.contiguous(), words, len(words), size // word),
        KEPT=kept is not None,
        BLOCK=WORDS,
    )
    return out
