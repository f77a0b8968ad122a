"""Codecs: what arrives, how far off it is, and how many bytes it takes."""

from __future__ import annotations

import pytest
import torch

from pyg_distcomm.exchange.codecs import CODECS, Cast, Plain, Quantise, codec_of

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EVERY = [Plain(), *CODECS.values()]


def rows(dtype=torch.float32, scale=1.0, m=60, f=33, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, f, generator=g, dtype=torch.float64)
    shift = torch.randn(m, 1, generator=g, dtype=torch.float64) * 10
    return ((x + shift) * scale).to(dtype)


def there_and_back(codec, x, out=None):
    message = codec.encode(x)
    assert message.dtype == torch.uint8
    assert message.shape == (len(x), codec.row_bytes(x.size(1), x.dtype))
    return codec.decode(message, x.size(1), x.dtype, out)


@pytest.mark.parametrize("codec", EVERY, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shapes_bytes_and_out(codec, dtype):
    for shape in ((0, 5), (4, 0), (1, 1), (3, 7)):
        x = rows(dtype, m=shape[0], f=shape[1])
        y = there_and_back(codec, x)
        assert y.shape == x.shape
        assert y.dtype == dtype
        out = torch.empty_like(x)
        assert there_and_back(codec, x, out) is out
        assert torch.equal(out, y)
    x = rows(dtype)
    cut = codec.encode(x)[20:40]  # a message can be cut by rows
    assert torch.equal(codec.decode(cut, 33, dtype), there_and_back(codec, x)[20:40])


def test_plain_is_exact_for_any_type():
    for dtype in (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64):
        x = rows().to(dtype)
        assert torch.equal(there_and_back(Plain(), x), x)
    odd = torch.tensor([[float("nan"), float("inf"), -0.0]])
    bits = there_and_back(Plain(), odd).view(torch.int32)
    assert torch.equal(bits, odd.view(torch.int32))


@pytest.mark.parametrize(("name", "digits"), [("fp16", 11), ("bf16", 8)])
def test_cast_rounds_to_nearest(name, digits):
    x = rows()
    y = there_and_back(CODECS[name], x)
    floor = 2.0**-25 if name == "fp16" else 0.0
    assert bool(((y - x).abs() <= (x.abs() * 2.0**-digits).clamp(min=floor)).all())
    assert torch.equal(there_and_back(CODECS[name], y), y)


def test_cast_to_fp16_overflows_as_it_says():
    y = there_and_back(Cast(torch.float16), torch.tensor([[7e4, -7e4, 1e-9, 65504.0]]))
    assert y.tolist() == [[float("inf"), float("-inf"), 0.0, 65504.0]]


def meta(codec, x):
    z, step = codec.encode(x)[:, :4].contiguous().view(torch.bfloat16).double().T
    return z.unsqueeze(1), step.unsqueeze(1)


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_quantised_rows_lie_within_half_a_step(dtype, scale):
    x, codec = rows(dtype, scale), Quantise(8)
    z, step = meta(codec, x)
    wide = x.double()
    assert bool((z <= wide).all())
    assert bool((wide <= z + 255 * step * (1 + 1e-9)).all())
    spread = wide.amax(1, keepdim=True) - z
    assert bool(
        (step <= spread / 255 * (1 + 2.0**-7)).all()
    )  # and no wider than needed
    error = (there_and_back(codec, x).double() - wide).abs()
    unit = torch.finfo(dtype).eps * wide.abs().amax()
    assert bool((error <= step / 2 + 2 * unit).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_quantised_narrow_types_add_their_own_rounding(dtype):
    x, codec = rows(dtype), Quantise(8)
    _, step = meta(codec, x)
    error = (there_and_back(codec, x).double() - x.double()).abs()
    unit = torch.finfo(dtype).eps * x.double().abs()
    assert bool((error <= step * 0.51 + unit).all())


def test_quantised_constant_rows():
    for value in (0.0, -0.0, 1.0, -3.5, 2.0**-100, 1e30):
        value = torch.tensor(value).bfloat16().float()
        x = value.expand(1, 9)
        assert torch.equal(there_and_back(Quantise(), x), x)
    for value in (0.1, -3.14159, 1234.567, 1e-30, -7e20):
        x = torch.full((1, 9), value)
        y = there_and_back(Quantise(), x)
        assert float((y - x).abs().max()) <= 1.6e-5 * abs(value)


def test_quantised_minima_that_bf16_holds_are_exact():
    x = rows().abs()
    x[:, 4] = 0.0  # as after ReLU
    assert bool((there_and_back(Quantise(), x)[:, 4] == 0).all())


def test_quantised_rows_that_are_no_numbers_become_nan_alone():
    nan, inf = float("nan"), float("inf")
    bad = torch.tensor([[nan, 1, 2], [inf, 1, 2], [-inf, 1, 2], [-3.4e38, 0, 3e38]])
    good = torch.tensor([[-3e38, 0.0, 3e38]])
    y = there_and_back(Quantise(), torch.cat([bad, good]))
    assert bool(y[:4].isnan().all())
    assert bool(y[4:].isfinite().all())
    assert float((y[4:] - good).abs().max()) <= 6e38 / 255


def test_names():
    assert codec_of(None) == Plain()
    assert codec_of("int8") == Quantise(8)
    assert codec_of(Quantise()) == Quantise(8)
    with pytest.raises(ValueError, match="fp16, bf16, int8"):
        codec_of("int4")
    with pytest.raises(ValueError, match="float16 or"):
        Cast(torch.float32)
    with pytest.raises(ValueError, match="bits=3"):
        Quantise(3)
    assert [c.linear for c in EVERY] == [True, False, False, False]
    assert [c.unbiased for c in EVERY] == [True, False, False, False]
