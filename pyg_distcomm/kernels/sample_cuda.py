"""Runs `sample_ops` on CUDA, by kernels in Triton: draws, and reads of pinned memory."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_distcomm.kernels import sample_ops
from pyg_distcomm.kernels.core_triton import mix

BLOCK = 128  # one thread a node: what it has written it reads again
WORDS = 1024


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
def copy_rows(values, index, out, total, width, BLOCK: tl.constexpr):
    """Copies rows of `width` words, a word at a time: neighbours read neighbours."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = k < total
    row = tl.load(index + k // width, mask=live, other=0)
    word = tl.load(values + row * width + k % width, mask=live, other=0)
    tl.store(out + k, word, mask=live)


def uniform_picks(streams: Tensor, size: Tensor, draws: int, replaced: bool) -> Tensor:
    """Runs `sample_ops.uniform_picks`, one thread a node."""
    out = torch.empty((len(size), draws), dtype=torch.int64, device=size.device)
    if out.numel():
        with torch.cuda.device_of(size):
            draw_rows[(triton.cdiv(len(size), BLOCK),)](
                *(streams.contiguous(), size.contiguous(), out, len(size), draws),
                REPLACED=replaced,
                BLOCK=BLOCK,
                num_warps=BLOCK // 32,
            )
    return out


def read_rows(values: Tensor, index: Tensor) -> Tensor:
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
    words = out.view(-1).view(torch.uint8).view(kind)
    with torch.cuda.device_of(index):
        copy_rows[(triton.cdiv(len(words), WORDS),)](
            *(flat, index.contiguous(), words, len(words), size // word), BLOCK=WORDS
        )
    return out
