"""Kernels of codecs: compiled ones write the bytes of their definition."""

from __future__ import annotations

import itertools

import definitions
import pytest
import tiers
import torch

from pyg_distcomm import kernels
from pyg_distcomm.kernels import codec_cpu, codec_ops

reference = definitions.of(codec_ops)
SHAPES = [(1, 1), (9, 1), (3, 7), (8, 8), (19, 33), (64, 100), (41, 256)]
KEY = 2**62 + 12345
FLOATS = (torch.float32, torch.float64)
nan, inf = float("nan"), float("inf")


def odd_rows(m, f, dtype, seed=0):
    """Rows of all magnitudes, zeros, constants, and some that hold no number."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, f, generator=g, dtype=torch.float64)
    kinds = (1.0, 1e-8, 1e4, 1e-30, 3e37, 1e-42, -0.0, nan)
    x *= torch.tensor([kinds[k % len(kinds)] for k in range(m)]).double()[:, None]
    x[8:9], x[9:10], x[15:16] = 3.14159, -0.1, x[:1].sign() * 2e38
    x[10:11, :1], x[11:12, -1:] = inf, -inf
    x[12:13, : f // 2] = 0.0
    x[13:14, :1], x[13:14, -1:] = -3e38, 3e38  # too wide for one bit in bf16
    x[14:15], x[14:15, -1:] = 2e36, 3.4e38  # rounded, it leaves the range of float32
    return x.to(dtype)


def gids(m, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 10**12, (m,), generator=g)


def same_bits(a, b):
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def quantised(twins, place, x, index, bits, noise):
    """Asserts that compiled loops write and read the bytes of their definitions."""
    (m, f), (at, drawn) = x.shape, (index, noise)
    if index is not None:
        m, at = len(index), index.to(place)
    if noise is not None:
        drawn = noise[0], noise[1].to(place)
    size = codec_ops.message_bytes(m, f, bits, x.element_size())
    want, found = (torch.full((size,), 9, dtype=torch.uint8) for _ in range(2))
    found = found.to(place)
    bad = reference.quantise_wide(x, index, bits, noise, want)
    assert twins.quantise_wide(x.to(place), at, bits, drawn, found) == bad
    assert torch.equal(found.cpu(), want)
    back = torch.full((m, f), 7.0, dtype=x.dtype)
    here = back.clone().to(place)
    reference.dequantise_wide(want, bits, back)
    assert twins.dequantise_wide(found, bits, here) is here
    assert same_bits(here.cpu(), back)


def twin(twins, place, name, *given):
    """Runs a compiled loop and its definition, and returns what both give."""
    want = getattr(reference, name)(*given)
    here = [t.to(place) if isinstance(t, torch.Tensor) else t for t in given]
    found = getattr(twins, name)(*here)
    assert found.dtype == want.dtype
    assert same_bits(found.cpu(), want)
    return want


def by_columns(twins, place, x, index):
    """Takes some columns of rows, and puts them back."""
    f = x.size(1)
    for k in {1, (f + 1) // 2, f} if f else ():
        columns = torch.randperm(f, generator=torch.Generator().manual_seed(k))[
            :k
        ].int()
        y = twin(twins, place, "take_columns", x, index, columns)
        if x.dtype in codec_ops.FLOATS:
            out = torch.full((len(y), f), 7.0, dtype=x.dtype)
            twin(twins, place, "put_columns", y, columns, 1.7, out)


@tiers.parametrize(
    ("random", "bits", "dtype"),
    itertools.product([False, True], [1, 2, 4, 8], FLOATS),
    slice(0, None, 3),
    ids=str,
)
def test_quantise(bits, dtype, random):
    for m, f in SHAPES:
        for index in (None, torch.randperm(m)[: m // 2 + 1]):
            noise = (KEY, gids(m if index is None else len(index))) if random else None
            quantised(codec_cpu, "cpu", odd_rows(m, f, dtype), index, bits, noise)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_from_the_same_places_are_written_as_others(dtype):
    for m, f in ((41, 7), (3000, 40)):
        for index, gid in itertools.product((None, torch.randperm(m)[:9]), (0, 1)):
            count = m if index is None else len(index)
            ids = gids(count) if gid else None
            write = kernels.quantiser(odd_rows(m, f, dtype), index, 2, ids)
            for seed in range(3):
                x = odd_rows(f, m, dtype, seed).t() if seed else odd_rows(m, f, dtype)
                noise = None if ids is None else (KEY + seed, ids)
                size = codec_ops.message_bytes(count, f, 2, dtype.itemsize)
                outs = torch.full((2, size), 9, dtype=torch.uint8)
                bad = codec_ops.quantise(x, index, 2, noise, outs[0])
                assert write(x, KEY + seed, outs[1]) == bad
                assert torch.equal(*outs)
            with pytest.raises(IndexError, match=f"rows of {m} were planned, got 2"):
                write(x[:2], KEY, outs[1])
    assert kernels.quantiser(torch.ones(2, 2).half(), None, 2, None) is None
    with pytest.raises(IndexError, match=r"index spans 5 \.\. 5"):
        kernels.quantiser(torch.ones(2, 2), torch.tensor([5]), 2, None)


def test_quantise_on_threads_at_an_odd_place_in_memory(two_threads):
    m, f = 4001, 51
    x, gid = odd_rows(m, 2 * f, torch.float32)[:, 1 : f + 1], gids(m)
    for bits in (1, 2, 4, 8):
        size = codec_ops.message_bytes(m, f, bits, 4)
        big = torch.zeros(size + 16, dtype=torch.uint8)
        part = big[3 : 3 + size]
        wanted = torch.empty(size, dtype=torch.uint8)
        reference.quantise_wide(x, None, bits, (KEY, gid), wanted)
        codec_ops.quantise(x, None, bits, (KEY, gid), part)
        assert torch.equal(part, wanted)
        assert not big[:3].any()
        assert not big[3 + size :].any()
        wide = torch.full((m, f + 5), 7.0)
        codec_ops.dequantise(part, bits, wide[:, 2 : 2 + f])  # rows that are apart
        rows = reference.dequantise_wide(wanted, bits, torch.empty(m, f))
        assert same_bits(wide[:, 2 : 2 + f], rows)
        assert bool((wide[:, :2] == 7).all())
        assert bool((wide[:, 2 + f :] == 7).all())
        turned = torch.empty(f, m).t()
        assert same_bits(codec_ops.dequantise(part, bits, turned), rows)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_pack_bits(bits):
    for n in (0, 1, 7, 8, 9, 1000, 1003):
        x = torch.randint(0, 2**bits, (n,), dtype=torch.uint8)
        packed = reference.pack_bits(x, bits)
        assert len(packed) == -(-n * bits // 8)
        assert torch.equal(packed, codec_ops.pack_bits(x, bits))
        for op in (reference.unpack_bits, codec_ops.unpack_bits):
            assert torch.equal(op(packed, bits, n), x)
    with pytest.raises(ValueError, match="its header says"):
        codec_ops.unpack_bits(packed, bits, 5)


def test_keyed_columns():
    for width, count in ((1, 1), (7, 3), (100, 100), (256, 10), (33, 1)):
        found = codec_ops.keyed_columns(KEY, width, count)
        assert bool((found.diff() > 0).all())
        assert int(found.min()) >= 0
        assert int(found.max()) < width
        assert len(found) == count
    drawn = [codec_ops.keyed_columns(key, 256, 10) for key in (KEY, KEY, KEY + 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with pytest.raises(ValueError, match="0 < count"):
        codec_ops.keyed_columns(KEY, 5, 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_columns_taken_and_put(dtype, two_threads):
    for m, f in (*SHAPES, (3000, 40)):
        for index in (None, torch.randperm(m)[: m // 2 + 1]):
            by_columns(codec_ops, "cpu", odd_rows(m, f, dtype), index)


def test_noise_is_uniform_and_its_columns_are_independent():
    bits = codec_ops.noise_bits(KEY, torch.arange(20_000), 5).double() / 2.0**16
    assert bits.mean(0) == pytest.approx([0.5] * 5, abs=4 * (1 / 12 / 20_000) ** 0.5)
    together = torch.corrcoef(bits.t()) - torch.eye(5)
    assert float(together.abs().max()) < 4 / 20_000**0.5


def test_bad_arguments():
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="out must be 20 contiguous bytes"):
        codec_ops.quantise(x, None, 1, None, torch.empty(21, dtype=torch.uint8))
    out = torch.empty(20, dtype=torch.uint8)
    with pytest.raises(ValueError, match="each of the 4 rows, got 3"):
        codec_ops.quantise(x, None, 1, (0, torch.arange(3)), out)
    with pytest.raises(IndexError, match="there are 4 rows"):
        codec_ops.take_columns(x, torch.tensor([4]), torch.zeros(1).int())
    with pytest.raises(ValueError, match="has 21 bytes, but its header says 20"):
        codec_ops.dequantise(torch.empty(21, dtype=torch.uint8), 1, x)
