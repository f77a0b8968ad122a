"""Triton's codecs against their definitions, byte for byte; see `test_cuda_kernels`."""

from __future__ import annotations

import definitions
import pytest
import tiers
import torch

from pyg_distcomm.kernels import codec_ops

pytest.importorskip("triton", reason="Triton is not installed")
from pyg_distcomm.kernels import codec_cuda

reference = definitions.of(codec_ops)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEY = 2**62 + 12345
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter


def rows(m, f, dtype):
    """Returns rows with all that is special in a row, as far as there are rows."""
    x = torch.randn(m, f, generator=torch.Generator().manual_seed(m + f)).to(dtype)
    for r, value in enumerate((0.0, -0.0, torch.pi, -1e30, 1e-42)):
        x[2 * r + 1 : 2 * r + 2] = value
    x[4:5] *= 1e-39
    x[6:7] = x[6:7].sign() * 2e38
    x[8:9, :1] = float("nan")
    x[12:13, -1:] = float("-inf")
    return x


def compare(x, index, bits, noise):
    m = len(x) if index is None else len(index)
    size = codec_ops.message_bytes(m, x.size(1), bits, x.element_size())
    want, found = (torch.full((size,), 7, dtype=torch.uint8) for _ in range(2))
    bad = reference.quantise_wide(x, index, bits, noise, want)
    found = found.to(DEVICE)
    at = None if index is None else index.to(DEVICE)
    drawn = None if noise is None else (noise[0], noise[1].to(DEVICE))
    assert codec_cuda.quantise_wide(x.to(DEVICE), at, bits, drawn, found) == bad
    assert torch.equal(found.cpu(), want)
    back = torch.zeros(m, x.size(1), dtype=x.dtype)
    here = back.clone().to(DEVICE)
    reference.dequantise_wide(want, bits, back)
    assert codec_cuda.dequantise_wide(found, bits, here) is here
    torch.testing.assert_close(here.cpu(), back, rtol=0, atol=0, equal_nan=True)


@tiers.cover(
    "f, m, dtype, bits, ids",
    (33, 1, 513, 2, 3, 16, 130),
    (21, 1, 0, 9),
    (torch.float32, torch.float64),
    (1, 2, 4, 8),
    (torch.int64, torch.int32),
    step=24,
)
def test_quantised_rows_have_the_bytes_of_the_cpu(f, m, dtype, bits, ids):
    x = rows(m, f, dtype)
    gid = torch.randint(0, 2**31 - 1, (m,)).to(ids)
    compare(x, None, bits, None)
    compare(x, None, bits, (KEY, gid))
    index = torch.randperm(m)[: m // 2 + 1].to(ids)
    compare(x, index, bits, (KEY, gid[: len(index)]))


def test_tensors_on_cuda_get_these_twins():
    for name in ("quantise_wide", "dequantise_wide"):
        assert getattr(codec_ops, name).twin("cuda") is getattr(codec_cuda, name)
    assert codec_ops.top_columns.twin("cuda") is None
