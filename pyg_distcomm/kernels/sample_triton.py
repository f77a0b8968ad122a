"""Reads rows of pinned host memory from a device, by a kernel in Triton."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


@triton.jit
def copy_rows(values, index, out, total, width, BLOCK: tl.constexpr):
    """Copies rows of `width` words, a word at a time: neighbours read neighbours."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = k < total
    row = tl.load(index + k // width, mask=live, other=0)
    word = tl.load(values + row * width + k % width, mask=live, other=0)
    tl.store(out + k, word, mask=live)


def read_pinned(values: Tensor, index: Tensor) -> Tensor:
    """Returns rows of a tensor in pinned memory, on the device of the index.

    A pointer to pinned memory is good on CUDA devices, too (unified virtual addresses).
    Shapes: values [n, ...], contiguous; index any, int64; returns [*index.shape, ...].
    """
    shape = values.shape[1:]
    out = torch.empty((*index.shape, *shape), dtype=values.dtype, device=index.device)
    width, total = shape.numel(), out.numel()
    if total:
        given = index.contiguous()
        # of bool, which Triton loads as a bit
        byte = values.dtype == torch.bool
        a, b = (t.view(torch.uint8) if byte else t for t in (values, out))
        copy_rows[(triton.cdiv(total, BLOCK),)](a, given, b, total, width, BLOCK=BLOCK)
    return out
