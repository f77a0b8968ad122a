"""Codecs: what arrives, how far off it is, and how many bytes it takes."""

import itertools
import math

import definitions
import pytest
import tiers
import torch

from pyg_distcomm import kernels
from pyg_distcomm.halo.codec import LEVELS, packed_bytes, unpack
from pyg_distcomm.halo.codecs import (
    CODECS,
    Cast,
    Chain,
    ColumnMask,
    DegreeBits,
    Plain,
    Quantise,
    RangeBits,
    RngKey,
    RowSample,
    codec_of,
)
from pyg_distcomm.halo.exchange import Packing
from pyg_distcomm.halo.state import codec_state, read_codec
from pyg_distcomm.kernels import codec_cpu, codec_ops

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BITS = (1, 2, 4, 8)
NEAR = [Quantise(b) for b in BITS]
RANDOM = [Quantise(b, "stochastic") for b in BITS]
MASKS = [
    ColumnMask(4, "prefix"),
    ColumnMask(4, "epoch"),
    ColumnMask(2.5, "epoch", scaled=True),
    ColumnMask(4, "prefix", scaled=True),
    ColumnMask(10**6),
]
CHAINS = [
    Chain(ColumnMask(4), Quantise(1, "stochastic")),
    Chain(ColumnMask(2, scaled=True), Quantise(2, "stochastic")),
    Chain(ColumnMask(3, "prefix"), Cast(torch.float16)),
    Chain(Quantise(4)),
    Chain(ColumnMask(2, scaled=True), ColumnMask(3, "prefix")),
]
CASTS = [Cast(torch.float16), Cast(torch.bfloat16)]
EVERY = [Plain(), *CASTS, *NEAR, *RANDOM, *MASKS, *CHAINS]
GRADED = [*map(DegreeBits, LEVELS), *(RangeBits(b) for b in (1, 1.5, 2, 3.75, 8))]
UNBIASED = [c for c in EVERY if c.unbiased and c.keyed]


def rows(dtype=torch.float32, scale=1.0, m=60, f=33, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, f, generator=g, dtype=torch.float64)
    shift = torch.randn(m, 1, generator=g, dtype=torch.float64) * 10
    return ((x + shift) * scale).to(dtype)


def draw_of(m, key=77, first=0):
    degree = torch.randint(6, (m,), generator=torch.Generator().manual_seed(m))
    return RngKey(key, torch.arange(first, first + m) * 3, None, degree)


def there_and_back(codec, x, out=None, draw=None, index=None):
    m, f = (len(x) if index is None else len(index)), x.size(1)
    draw = draw_of(m) if draw is None else draw
    message = codec.encode(x, draw, index=index)
    assert message.dtype == torch.uint8
    assert message.dim() == 1
    assert len(message) == codec.wire_bytes(m, f, x.dtype)
    out = torch.full((m, f), 7.0, dtype=x.dtype) if out is None else out
    assert codec.decode(message, out, draw) is out
    return out


@tiers.cover(("dtype", "codec"), FLOATS, [*EVERY, *GRADED], step=3, ids=str)
def test_shapes_bytes_and_out(codec, dtype):
    for m, f in ((0, 5), (4, 0), (1, 1), (3, 7), (5, 1), (9, 33)):
        x = rows(dtype, m=m, f=f)
        y = there_and_back(codec, x)
        wide = torch.full((m, f + 3), 7.0, dtype=dtype)
        assert torch.equal(there_and_back(codec, x, wide[:, 1 : f + 1]), y)
        assert bool((wide[:, :1] == 7).all())
        assert bool((wide[:, f + 1 :] == 7).all())
        index = torch.randperm(m)[: m // 2 + 1]
        chosen = there_and_back(codec, x, index=index)
        assert torch.equal(chosen, there_and_back(codec, x[index]))
        turned = x.t().contiguous().t()
        assert torch.equal(there_and_back(codec, turned), y)
        room = torch.full((codec.wire_bytes(m, f, dtype) + 9,), 5, dtype=torch.uint8)
        begin = codec.encode(x, draw_of(m), out=room[2:])
        assert torch.equal(begin, codec.encode(x, draw_of(m)))
        assert begin.numel() == 0 or begin.data_ptr() == room.data_ptr() + 2


@pytest.mark.parametrize("codec", [c for c in EVERY if c.keyed], ids=str)
def test_a_row_is_written_alike_wherever_it_lies(codec):
    x, at = rows(m=60, f=32), torch.tensor([7, 3, 59, 20])
    gid = torch.arange(60) + 1000
    whole = there_and_back(codec, x, draw=RngKey(5, gid))
    part = there_and_back(codec, x[at], draw=RngKey(5, gid[at]))
    assert torch.equal(part, whole[at])
    other = there_and_back(codec, x, draw=RngKey(6, gid))
    assert not torch.equal(other, whole)
    with pytest.raises(ValueError, match="give draw=RngKey"):
        codec.encode(x)
    with pytest.raises(ValueError, match="got 4 ids for 60 rows"):
        codec.encode(x, RngKey(5, gid[at]))


DRAWN = [Quantise(1, "stochastic"), ColumnMask(2.5, "epoch", scaled=True)]


@tiers.parametrize("codec", UNBIASED, DRAWN, ids=str)
@tiers.parametrize("scale", [1e-8, 1.0, 1e4], [1.0])
def test_unbiased_both_ways_within_four_standard_errors(codec, scale):
    m, f, draws = 6, 24, 600
    x, gid = rows(torch.float64, scale, m, f), torch.arange(m) * 3
    x[0] = 2.5 * scale
    x[1, 3:] = 0.0
    # rows, and gradients: the columns of the same key, rounded by another
    for shift, y in ((0, x), (10**6, x.flip(0))):
        errors = torch.stack(
            [
                there_and_back(codec, y, draw=RngKey(key, gid, noise=key + shift)) - y
                for key in range(draws)
            ]
        )
        error = errors.pow(2).mean(0).sqrt() / math.sqrt(draws)
        # what is rounded away once in thousands of draws has no normal mean
        slack = 6 / draws * errors.abs().amax((0, 2))[:, None]
        far = (errors.mean(0).abs() - slack) / error.clamp(min=1e-300)
        # of 16,000 means one is beyond 4 by chance, of 1,700,000 one beyond 5
        assert int((far > 4).sum()) <= 1
        assert float(far.max()) < 5
        assert float(slack.max()) > 0
    if isinstance(codec, Quantise):  # and the variance is that of the formula
        z, step = meta(codec, y)
        part = ((y - z) / step) % 1
        wanted = (step**2 * part * (1 - part)).sum(1)
        square = errors.square().sum(2).mean(0)[wanted > 0]
        assert len(square) >= 4
        torch.testing.assert_close(square, wanted[wanted > 0], rtol=0.05, atol=0)


ROWS = [RowSample(4.0), RowSample(3.0, scaled=False, values=ColumnMask(2))]


@pytest.mark.parametrize("codec", [*(c for c in EVERY if c.linear), *ROWS], ids=str)
def test_linear_codecs_are_linear_and_pass_the_dot_product_test(codec):
    x, y = rows(torch.float64, seed=1), rows(torch.float64, seed=2)
    draw = draw_of(len(x), 9)

    def c(rows):
        return there_and_back(codec, rows, draw=draw)

    assert torch.allclose(c(x + 2 * y), c(x) + 2 * c(y), rtol=1e-12, atol=1e-12)
    # what arrives of a gradient is what the transpose makes of it
    left, right = float((c(x) * y).sum()), float((x * c(y)).sum())
    assert left == pytest.approx(right, rel=1e-12)


def test_rows_are_scaled_by_how_many_travel():
    x, codec = rows(torch.float64), RowSample(4.0)
    sent = there_and_back(codec, x, draw=draw_of(len(x), 9))
    kept = sent.any(1)
    assert torch.allclose(sent[kept], x[kept] * len(x) / codec.kept(len(x)))


def test_a_chain_passes_gradients_through_its_mask_alone():
    mask = ColumnMask(4, scaled=True)
    chain, g = Chain(mask, Quantise(1, "stochastic")), rows()
    draw = draw_of(len(g), 5)
    sent = there_and_back(chain, g, draw=RngKey(5, draw.gid, noise=8))
    assert torch.equal(sent != 0, there_and_back(mask, g, draw=draw) != 0)


# Plain and Cast -----------------------------------------------------------------------


def test_plain_is_exact_for_any_type():
    for dtype in (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64):
        x = rows().to(dtype)
        message = Plain().encode(x)
        assert len(message) == x.numel() * dtype.itemsize
        assert torch.equal(Plain().decode(message, torch.empty_like(x)), x)
    odd = torch.tensor([[float("nan"), float("inf"), -0.0]])
    bits = there_and_back(Plain(), odd).view(torch.int32)
    assert torch.equal(bits, odd.view(torch.int32))
    with pytest.raises(ValueError, match="both ends must cut"):
        Plain().decode(message[:-1], torch.empty_like(x))


@pytest.mark.parametrize(("name", "digits"), [("fp16", 11), ("bf16", 8)])
def test_cast_rounds_to_nearest(name, digits):
    x = rows()
    y = there_and_back(CODECS[name], x)
    floor = 2.0**-25 if name == "fp16" else 0.0
    assert bool(((y - x).abs() <= (x.abs() * 2.0**-digits).clamp(min=floor)).all())
    assert torch.equal(there_and_back(CODECS[name], y), y)


# Quantise -----------------------------------------------------------------------------


def meta(codec, x):
    """Minimum and step of rows that are not constant, as they are sent."""
    message = codec.encode(x, draw_of(len(x)))[: 4 * len(x)]
    step, z = message.clone().view(torch.bfloat16).double().view(-1, 2).t()
    return z.unsqueeze(1), step.unsqueeze(1)


SCALES = [1e-30, 1e-8, 1.0, 1e4, 1e30]


@tiers.cover(("codec", "dtype", "scale"), [*NEAR, *RANDOM], FLOATS[:2], SCALES, ids=str)
def test_quantised_rows_lie_within_half_a_step(codec, dtype, scale):
    x, top = rows(dtype, scale), 2**codec.bits - 1
    z, step = meta(codec, x)
    wide = x.double()
    assert bool((z <= wide).all())
    assert bool((wide <= z + top * step * (1 + 1e-9)).all())
    spread = (wide.amax(1, keepdim=True) - z) / top
    assert bool((step <= spread * (1 + 2.0**-7)).all())  # and no wider than needed
    error = (there_and_back(codec, x).double() - wide).abs()
    unit = torch.finfo(dtype).eps * wide.abs().amax()
    assert bool((error <= step / (1 if codec.keyed else 2) + 2 * unit).all())


@pytest.mark.parametrize("codec", [*NEAR, *RANDOM], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_constant_and_zero_rows_are_exact(codec, dtype):
    values = (0.0, -0.0, 1.0, -3.5, 0.1, -3.14159, 1234.567, 1e-8, 6e4, 2.0**-24)
    for f in (1, 2, 3, 9, 33, 100):
        x = torch.tensor(values, dtype=torch.float64).to(dtype)[:, None].repeat(1, f)
        x = torch.cat([x, rows(dtype, m=5, f=f), x])
        y = there_and_back(codec, x)
        assert torch.equal(y[:10], x[:10])
        assert torch.equal(y[15:], x[15:])
    for value in (1e30, -7e20, 1e-40, 3.4e38):
        x = torch.full((3, 40), value, dtype=torch.float64)
        assert torch.equal(there_and_back(codec, x), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantised_numbers_near_the_greatest_stay_numbers(dtype):
    most = min(torch.finfo(dtype).max, 3.2e38)
    x = torch.tensor([[-1.0, 0.3, 0.99], [0.98, 1.0, 0.985], [0.5, 1.0, 0.7]]).double()
    x = (x * most).to(dtype)
    for codec in (*NEAR[1:], *RANDOM[1:]):
        assert bool(there_and_back(codec, x).isfinite().all())


NAN, INF = float("nan"), float("inf")
BAD = [[NAN, 1, 2], [INF, 1, 2], [-INF, 1, 2], [-3.4e38, 0, 3e38]]


@pytest.mark.parametrize("bits", BITS)
def test_quantised_rows_that_are_no_numbers_are_refused(bits):
    good = torch.tensor([[-1e38, 0.0, 1.0]])
    for row in BAD:
        x = torch.cat([good, torch.tensor([row])])
        for codec in (Quantise(bits), Quantise(bits, "stochastic")):
            with pytest.raises(ValueError, match=r"conv2, forward: row 1 of .* holds"):
                codec.encode(x, draw_of(2), where="conv2, forward")
        y = there_and_back(Quantise(bits, strict=False), x)
        assert bool(y[1].isnan().all())
        assert bool(y[0].isfinite().all())


# Masks, chains -----------------------------------------------------------


def test_rate_one_is_exact_and_takes_the_bytes_of_plain():
    x = rows()
    for pick in ("prefix", "epoch"):
        for codec in (ColumnMask(1, pick), ColumnMask(1.004, pick, scaled=True)):
            assert torch.equal(codec.encode(x, draw_of(60)), Plain().encode(x))
            assert torch.equal(there_and_back(codec, x), x)


def test_a_prefix_keeps_the_first_columns_and_at_least_one():
    x = rows(f=10)
    y = there_and_back(ColumnMask(3, "prefix"), x)
    assert torch.equal(y[:, :3], x[:, :3])
    assert not y[:, 3:].any()
    y = there_and_back(ColumnMask(128, "prefix", scaled=True), x)
    assert torch.equal(y[:, 0], x[:, 0] * 10)
    assert ColumnMask(128).wire_bytes(7, 100) == 28


@pytest.mark.parametrize("codec", [m for m in MASKS if m.scaled], ids=str)
def test_a_scaled_mask_multiplies_by_its_width_over_what_it_keeps(codec):
    x = rows(torch.float64)
    y = there_and_back(codec, x)
    kept = (y != 0).sum(1, keepdim=True)
    assert len((y != 0).unique(dim=0)) == 1  # rows of a message share their columns
    assert kept.unique().tolist() == [codec.kept(x.size(1))]
    assert codec.kept(33) * codec.rate != 33  # a rate is met as nearly as may be
    torch.testing.assert_close(y, torch.where(y != 0, x * 33 / kept, 0.0))


def test_bytes_of_chains():
    one = Chain(ColumnMask(4), Quantise(1, "stochastic"))
    assert one.wire_bytes(10, 100) == 40 + -(-250 // 8)
    assert one.with_rate(10).wire_bytes(10, 100) == 40 + -(-100 // 8)
    halves = Chain(ColumnMask(2), Cast(torch.bfloat16))
    assert halves.wire_bytes(10, 100) == 1000


# Bits of their own, by in-degree or by range ------------------------------------------

ON_PLACES = pytest.mark.usefixtures("place")


def test_bytes_of_groups_and_of_budgets():
    # quarters of 40 rows of 16 numbers in 1, 2, 4 and 8 bits, four bytes per row
    assert DegreeBits(1).wire_bytes(40, 16) == 10 * 16 * 15 // 8 + 160
    assert DegreeBits(1).wire_bytes(7, 16) == 2 + 8 + 16 + 32 + 28  # of 1, 2, 2, 2 rows
    assert DegreeBits(4).wire_bytes(40, 16) == 20 * 16 * 12 // 8 + 160
    assert DegreeBits(8).wire_bytes(40, 16) == Quantise(8).wire_bytes(40, 16)
    assert RangeBits(2).wire_bytes(40, 16) == 10 + 160 + (16 * 80 + 28) // 8


def _written_as_if_alone(codec, x, draw, bits):
    """Checks that each row arrives as Quantise brings it alone, in so many bits."""
    out = torch.empty_like(x)
    codec.decode(codec.encode(x, draw), out, draw)
    for row, b in bits.items():
        one, alone = x[row : row + 1], RngKey(draw.key, draw.gid[row : row + 1])
        own, want = Quantise(b, "stochastic"), torch.empty_like(one)
        own.decode(own.encode(one, alone), want, alone)
        assert torch.equal(out[row], want[0]), (row, b)


@ON_PLACES
def test_rows_of_greater_degree_get_more_bits_and_ties_go_by_place():
    degree = torch.tensor([3, 0, 9, 9, 1, 9, 2, 9])
    bits = {1: 1, 4: 1, 6: 2, 0: 2, 2: 4, 3: 4, 5: 8, 7: 8}
    draw = RngKey(1, torch.arange(8), None, degree)
    _written_as_if_alone(DegreeBits(1), rows(torch.float64, m=8), draw, bits)


@ON_PLACES
@pytest.mark.parametrize("mean", [1, 1.7, 3.0, 8])
def test_rows_of_a_range_are_written_as_if_alone_in_their_bits(mean):
    x, codec = rows(torch.float64, m=9), RangeBits(mean)
    bits = {row: LEVELS[k] for row, k in enumerate(codec.levels(x).tolist())}
    _written_as_if_alone(codec, x, RngKey(3, torch.arange(9) * 5), bits)


@ON_PLACES
@pytest.mark.parametrize("mean", [1, 1.4, 2, 3, 5.2, 8])
def test_no_other_bits_err_less_for_as_many_bytes(mean):
    x = rows(torch.float64, m=5)
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
    for codec in GRADED:
        x = torch.full((6, 9), 0.1, dtype=torch.float64)
        x[::2] = 0.0
        out = torch.empty_like(x)
        assert torch.equal(
            codec.decode(codec.encode(x, draw_of(6)), out, draw_of(6)), x
        )
        x[4, 3] = torch.nan
        with pytest.raises(ValueError, match="row 4 of a message holds nan"):
            codec.encode(x, draw_of(6), where="layer 1")
    with pytest.raises(ValueError, match="in-degrees of 6 rows"):
        DegreeBits().encode(x, RngKey(1, torch.arange(6)))


# Parcels ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [*EVERY, *GRADED], ids=str)
def test_messages_are_split_alike_on_both_ends(codec):
    n, f, counts = 50, 19, [7, 0, 13, 1]
    x = rows(m=n, f=f).relu()
    index = torch.randint(0, n, (sum(counts),))
    draw = draw_of(sum(counts))
    before = torch.get_rng_state()
    plan = Packing.of(codec, x, counts, draw, index)
    message, sizes = plan.write(x, draw), plan.sizes
    assert message.dtype == torch.uint8
    assert len(message) == sum(sizes)
    assert sizes == packed_bytes(codec, counts, f, x.dtype)
    out = torch.full((sum(counts) + 2, f), 7.0)
    got = unpack(codec, message, sizes, counts, out[1:-1], draw)
    assert bool((out[[0, -1]] == 7).all())
    plain = Packing.of(codec, x[index], counts, draw).write(x[index], draw)
    assert torch.equal(plain, message)
    # a peer gets what it would get alone
    alone = there_and_back(codec, x[index[7:20]], draw=draw.part(7, 20))
    assert torch.equal(got[7:20], alone)
    assert torch.equal(torch.get_rng_state(), before)


# Names and flags ----------------------------------------------------------------------


def test_names_and_bad_arguments():
    assert codec_of(None) == Plain()
    assert codec_of("int8") == Quantise(8, strict=False)
    assert codec_of(Quantise()) == Quantise(8)
    for make, says in (
        (lambda: codec_of("int4"), "fp16, bf16, int8"),
        (lambda: Cast(torch.float32), "float16 or"),
        (lambda: Quantise(3), "bits=3"),
        (lambda: Quantise(1, "up"), "rounding='up'"),
        (lambda: DegreeBits(3), "begins at 1, 2, 4 or 8"),
        (lambda: RangeBits(0.5), "between 1 and 8"),
        (lambda: Quantise(1).with_rate(3), "no rate to schedule"),
        (Chain, "needs a codec"),
        (lambda: Chain(Quantise(1), ColumnMask(4)), "comes last in a Chain"),
        (lambda: Chain(ColumnMask(4), RowSample(4)).with_rate(3), "has 2"),
        (lambda: ColumnMask(0.5), "rate=0.5"),
        (lambda: ColumnMask(NAN), "rate=nan"),
        (lambda: ColumnMask(2, "random"), "pick='random'"),
    ):
        with pytest.raises(ValueError, match=says):
            make()


def test_flags_and_what_is_saved():
    linear = [Plain(), *MASKS, CHAINS[4]]
    assert [c for c in EVERY if c.linear] == linear
    scaled = [c for c in MASKS if c.scaled and c.keyed]
    unbiased = [Plain(), *RANDOM, *scaled, CHAINS[1]]
    assert [c for c in EVERY if c.unbiased] == unbiased
    assert len(set(EVERY)) == len(EVERY)  # codecs are values
    for codec in (*EVERY, *GRADED):
        assert read_codec(codec_state(codec)) == codec


# Kernels of codecs -------------------------------------------------------------------

reference = definitions.of(codec_ops)
SHAPES = [(1, 1), (9, 1), (3, 7), (8, 8), (19, 33), (64, 100), (41, 256)]
KEY = 2**62 + 12345
LOOPED = (torch.float32, torch.float64)
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


@tiers.cover(("random", "bits", "dtype"), [False, True], BITS, LOOPED, ids=str)
def test_quantise(bits, dtype, random):
    for m, f in SHAPES:
        for index in (None, torch.randperm(m)[: m // 2 + 1]):
            noise = (KEY, gids(m if index is None else len(index))) if random else None
            quantised(codec_cpu, "cpu", odd_rows(m, f, dtype), index, bits, noise)


@pytest.mark.parametrize("dtype", LOOPED, ids=str)
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


@pytest.mark.parametrize("bits", BITS)
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


@pytest.mark.parametrize("dtype", LOOPED, ids=str)
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
