"""Codecs that give rows bits of their own, by in-degree or by range."""

from __future__ import annotations

import itertools

import pytest
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


def _written_as_if_alone(codec, x, draw, bits):
    """Checks that each row arrives as Quantise brings it alone, in so many bits."""
    out = torch.empty_like(x)
    codec.decode(codec.encode(x, draw), out, draw)
    for row, b in bits.items():
        one, alone = x[row : row + 1], RngKey(draw.key, draw.gid[row : row + 1])
        own, want = Quantise(b, "stochastic"), torch.empty_like(one)
        own.decode(own.encode(one, alone), want, alone)
        assert torch.equal(out[row], want[0]), (row, b)


def test_rows_of_greater_degree_get_more_bits_and_ties_go_by_place():
    degree = torch.tensor([3, 0, 9, 9, 1, 9, 2, 9])
    bits = {1: 1, 4: 1, 6: 2, 0: 2, 2: 4, 3: 4, 5: 8, 7: 8}
    draw = RngKey(1, torch.arange(8), None, degree)
    _written_as_if_alone(DegreeBits(1), rows(8, 50), draw, bits)


@pytest.mark.parametrize("mean", [1, 1.7, 3.0, 8])
def test_rows_of_a_range_are_written_as_if_alone_in_their_bits(mean):
    x, codec = rows(9, 50), RangeBits(mean)
    bits = {row: LEVELS[k] for row, k in enumerate(codec.levels(x).tolist())}
    _written_as_if_alone(codec, x, RngKey(3, torch.arange(9) * 5), bits)


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
