"""Codecs that give rows bits of their own, by in-degree or by range."""

from __future__ import annotations

import itertools
import math

import pytest
import tiers
import torch

from pyg_distcomm.halo.codec import LEVELS, RngKey, packed_bytes
from pyg_distcomm.halo.codecs import DegreeBits, Quantise, RangeBits
from pyg_distcomm.halo.state import codec_state, read_codec

pytestmark = pytest.mark.usefixtures("place")

CODECS = [*map(DegreeBits, LEVELS), *(RangeBits(b) for b in (1, 1.5, 2, 3.75, 8))]


def key(m, number=5, first=0):
    g = torch.Generator().manual_seed(m)
    degree = torch.randint(0, 6, (m,), generator=g)
    return RngKey(number, torch.arange(first, first + m) * 7, None, degree)


def rows(m, f, dtype=torch.float64):
    g = torch.Generator().manual_seed(m + f)
    scale = 10.0 ** torch.randn(m, 1, generator=g, dtype=torch.float64)
    return (torch.randn(m, f, generator=g, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_messages_have_the_bytes_of_the_formula_and_arrive(codec, dtype):
    for m, f in ((0, 4), (3, 0), (1, 1), (2, 5), (7, 3), (33, 40), (64, 9)):
        x, draw = rows(m, f, dtype), key(m)
        message = codec.encode(x, draw)
        assert len(message) == codec.wire_bytes(m, f, dtype)
        out = torch.full((m, f), 9.0, dtype=dtype)
        assert codec.decode(message, out, draw) is out
        room = torch.full((len(message) + 5,), 7, dtype=torch.uint8)
        assert torch.equal(codec.encode(x, draw, out=room[3:]), message)
        index = torch.randperm(m)
        again = codec.encode(x[index], draw, index=index.argsort())
        assert torch.equal(again, message)
        if f:
            span = x.double().amax(1) - x.double().amin(1)
            off = (out.double() - x.double()).abs().amax(1)
            assert bool((off <= 1.02 * span + 1e-12).all())


def test_bytes_of_groups_and_of_budgets():
    # quarters of 40 rows of 16 numbers in 1, 2, 4 and 8 bits, four bytes per row
    assert DegreeBits(1).wire_bytes(40, 16) == 10 * 16 * 15 // 8 + 160
    assert DegreeBits(4).wire_bytes(40, 16) == 20 * 16 * 12 // 8 + 160
    assert DegreeBits(8).wire_bytes(40, 16) == Quantise(8).wire_bytes(40, 16)
    assert RangeBits(2).wire_bytes(40, 16) == 10 + 160 + (16 * 80 + 28) // 8
    counts = [0, 3, 40]
    for codec in CODECS:
        want = [codec.wire_bytes(n, 16) if n else 0 for n in counts]
        assert packed_bytes(codec, counts, 16, torch.float32) == want


def test_rows_of_greater_degree_get_more_bits_and_ties_go_by_place():
    degree = torch.tensor([3, 0, 9, 9, 1, 9, 2, 9])
    x, gid = rows(8, 50), torch.arange(8)
    draw = RngKey(1, gid, None, degree)
    out = torch.empty_like(x)
    DegreeBits(1).decode(DegreeBits(1).encode(x, draw), out, draw)
    bits = {1: 1, 4: 1, 6: 2, 0: 2, 2: 4, 3: 4, 5: 8, 7: 8}
    for row, b in bits.items():  # as that row alone in so many bits
        one, alone = x[row : row + 1], RngKey(1, gid[row : row + 1])
        codec, want = Quantise(b, "stochastic"), torch.empty(1, 50, dtype=x.dtype)
        codec.decode(codec.encode(one, alone), want, alone)
        assert torch.equal(out[row], want[0]), (row, b)


@pytest.mark.parametrize("mean", [1, 1.4, 2, 3, 5.2, 8])
def test_no_other_bits_err_less_for_as_many_bytes(mean):
    x = rows(5, 20)
    span = x.amax(1) - x.amin(1)
    level = RangeBits(mean).levels(x)

    def error(levels):
        steps = torch.tensor([2 ** LEVELS[k] - 1 for k in levels], dtype=x.dtype)
        return float((span / steps).square().sum())

    def spent(levels):
        return sum(LEVELS[k] for k in levels)

    chosen = level.tolist()
    assert spent(chosen) <= mean * 5
    assert spent(chosen) > mean * 5 - 4 or chosen == [3] * 5
    for other in itertools.product(range(4), repeat=5):
        if spent(other) <= spent(chosen):
            assert error(other) >= error(chosen) * (1 - 1e-12), other


@tiers.rare
@pytest.mark.parametrize("codec", [DegreeBits(1), RangeBits(1.7)], ids=str)
def test_the_mean_over_keys_is_the_row(codec):
    x, n = rows(6, 8), 1500
    total, square = torch.zeros_like(x), torch.zeros_like(x)
    for number in range(n):
        draw = key(6, number)
        out = torch.empty_like(x)
        codec.decode(codec.encode(x, draw), out, draw)
        total += out
        square += out.square()
    mean = total / n
    variance = (square / n - mean.square()).clamp_min(0) * n / (n - 1)
    if isinstance(codec, RangeBits):
        bits = [LEVELS[k] for k in codec.levels(x)]
    else:
        order = key(6).degree.argsort(stable=True).argsort().tolist()
        bits = [LEVELS[place * 4 // 6] for place in order]
    step = x.amax(1) - x.amin(1)
    step = 1.02 * step / torch.tensor([2**b - 1 for b in bits], dtype=x.dtype)
    # an empirical Bernstein bound for numbers within one step: rare values count as well
    log = math.log(2 * x.numel() / 1e-4)
    seldom = 7 * log / (3 * (n - 1)) * step[:, None]
    assert bool(((mean - x).abs() <= (2 * variance * log / n).sqrt() + seldom).all())


@pytest.mark.parametrize("mean", [1, 1.7, 3.0, 8])
def test_rows_of_a_range_are_written_as_if_alone_in_their_bits(mean):
    x, gid, codec = rows(9, 50), torch.arange(9) * 5, RangeBits(mean)
    draw, out = RngKey(3, gid), torch.empty_like(x)
    codec.decode(codec.encode(x, draw), out, draw)
    for row, k in enumerate(codec.levels(x).tolist()):
        one, alone = x[row : row + 1], RngKey(3, gid[row : row + 1])
        own, want = Quantise(LEVELS[k], "stochastic"), torch.empty(1, 50, dtype=x.dtype)
        own.decode(own.encode(one, alone), want, alone)
        assert torch.equal(out[row], want[0]), (row, k)


def test_constant_rows_arrive_and_what_is_no_number_is_refused():
    for codec in CODECS:
        x = torch.full((6, 9), 0.1, dtype=torch.float64)
        x[::2] = 0.0
        out = torch.empty_like(x)
        assert torch.equal(codec.decode(codec.encode(x, key(6)), out, key(6)), x)
        x[4, 3] = torch.nan
        with pytest.raises(ValueError, match="row 4 of a message holds nan"):
            codec.encode(x, key(6), where="layer 1")
    with pytest.raises(ValueError, match="in-degrees of 6 rows"):
        DegreeBits().encode(x, RngKey(1, torch.arange(6)))
    with pytest.raises(ValueError, match="begins at 1, 2, 4 or 8"):
        DegreeBits(3)
    with pytest.raises(ValueError, match="between 1 and 8"):
        RangeBits(0.5)


@pytest.mark.parametrize("codec", [DegreeBits(2), RangeBits(2.5)], ids=str)
def test_they_can_be_saved(codec):
    assert read_codec(codec_state(codec)) == codec
