"""Triton's codecs against their definitions, byte for byte; see `test_cuda_kernels`."""

from __future__ import annotations

import contextlib
import traceback

import definitions
import pytest
import tiers
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_distcomm.halo import codecs
from pyg_distcomm.kernels import codec_ops
from pyg_distcomm.kernels.registry import Op
from pyg_distcomm.process import PROCESS

pytest.importorskip("triton", reason="Triton is not installed")
from pyg_distcomm.kernels import codec_cuda

reference = definitions.of(codec_ops)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEY = 2**62 + 12345
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning")
]  # of the interpreter
if DEVICE.type == "cuda":
    pytestmark.append(pytest.mark.cuda)


def rows(m, f, dtype):
    """Returns rows with all that is special in a row, as far as there are rows."""
    x = torch.randn(m, f, generator=torch.Generator().manual_seed(m + f)).to(dtype)
    for r, value in enumerate((0.0, -0.0, torch.pi, -1e30, 1e-42)):
        x[2 * r + 1 : 2 * r + 2] = value
    x[4:5] *= 1e-39
    x[6:7] = x[6:7].sign() * 2e38
    x[10:11], x[10:11, -1:] = 2e36, 3.4e38  # rounded, it leaves the range of float32
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


def same(name, *given):
    """Runs a twin and its definition on the same arguments, and returns what is equal."""
    want = getattr(reference, name)(*given)
    here = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in given]
    found = getattr(codec_cuda, name)(*here)
    if isinstance(want, torch.Tensor):
        assert found.dtype == want.dtype
        assert torch.equal(found.cpu().nan_to_num(7.5), want.nan_to_num(7.5))
    else:
        assert int(found) == want
    return want


SHAPES = ((33, 16), (1, 2), (513, 3), (2, 130), (0, 4), (4, 0))


@tiers.cover(
    "shape, dtype, ids",
    SHAPES,
    codec_ops.REALS,
    (torch.int64, torch.int32),
    step=4,
)
def test_rows_by_columns(shape, dtype, ids):
    (f, m), g = shape, torch.Generator().manual_seed(0)
    x = (torch.randn(m, f, generator=g) * 2).round().to(dtype)
    index = torch.randperm(m, generator=g)[: m // 2 + 1].to(ids)
    for at in (None, index):
        for k in {1, (f + 1) // 2, f} if f else ():
            columns = torch.randperm(f, generator=g)[:k].int()
            y = same("take_columns", x, at, columns) if m else x[:, :k]
            if dtype in codec_ops.FLOATS and m:
                same("put_columns", y, columns, f / k, torch.ones(len(y), f).to(dtype))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_without_gaps(bits):
    for n in (0, 1, 7, 9, 4099):
        x = torch.randint(0, 2**bits, (n,), dtype=torch.uint8)
        same("unpack_bits", same("pack_bits", x, bits), bits, n)


TWINS = [name for name, value in vars(codec_ops).items() if isinstance(value, Op)]


@pytest.mark.parametrize("name", TWINS)
def test_tensors_on_cuda_get_these_twins(name):
    twin = getattr(codec_ops, name).backend("cuda")
    assert twin.__wrapped__ is getattr(codec_cuda, name)


CODECS = [
    codecs.Quantise(1, "stochastic"),
    codecs.Quantise(8),
    codecs.ColumnMask(3, "prefix"),
    codecs.ColumnMask(3, "epoch", scaled=True),
    codecs.RowSample(2.5),
    codecs.DegreeBits(1),
    codecs.Chain(codecs.ColumnMask(2), codecs.Quantise(2, "stochastic")),
]
WAITING = codecs.RangeBits(4)


class Event:
    """An event of a device that has come, or not yet."""

    come = True

    def record(self, stream):
        pass

    def query(self):
        return self.come


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Has the twins of CUDA run for tensors of the CPU, in the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("a stand-in for a device")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    def change():
        for name in TWINS:
            monkeypatch.setitem(
                getattr(codec_ops, name)._backends, "cpu", getattr(codec_cuda, name)
            )

    yield change
    PROCESS.refused.clear()


def passed(codec, x, waits=None):
    """Sends rows twice: what was written and read, and how often the host waited."""
    ids = torch.arange(len(x)) * 3
    draw = codecs.RngKey(KEY, ids, degree=ids % 5)
    found = []
    for k in range(2):
        with waits or contextlib.nullcontext():
            message = codec.encode(x * (k + 1), draw)
            out = torch.full_like(x, 7.0)
            found += [message, codec.decode(message, out, draw)]
    return found


@tiers.parametrize("codec", [*CODECS, WAITING], slice(0, None, 4), ids=repr)
def test_codecs_write_the_bytes_of_the_cpu_and_wait_for_nothing(
    codec, as_on_cuda, monkeypatch
):
    monkeypatch.setattr(Event, "come", False)
    x = torch.randn(21, 33).relu()
    want = passed(codec, x)
    as_on_cuda()
    waits, listed = Waits(), torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: waits.note() or listed(t))
    found = passed(codec, x, waits)
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b)
    # where bits hang on values: once to write a message, and once to read it
    assert len(waits.found) == 4 * (codec == WAITING), waits.found


class Waits(TorchDispatchMode):
    """Records where codecs ask for the value of a tensor."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        asks = name in ("_local_scalar_dense", "nonzero", "_unique2", "bincount")
        if name == "index":
            masks = (torch.bool, torch.uint8)
            asks = any(t is not None and t.dtype in masks for t in args[1])
        if asks:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self):
        """Takes down who asked, but for Triton's interpreter."""
        frames = [f.filename for f in traceback.extract_stack()]
        if not any("triton/runtime" in f for f in frames):
            self.found.append("".join(traceback.format_stack()[-5:-2]))


@tiers.parametrize("codec", [CODECS[1], CODECS[5], CODECS[6]], [CODECS[1]])
def test_a_device_tells_later_what_it_could_not_write(codec, as_on_cuda, monkeypatch):
    as_on_cuda()
    x = torch.randn(21, 33)
    bad = x.clone()
    bad[4, 3] = float("nan")
    draw = codecs.RngKey(KEY, torch.arange(21), degree=torch.arange(21) % 5)

    def send(rows):
        codec.encode(rows, draw, where="conv1")

    monkeypatch.setattr(Event, "come", False)
    send(bad)
    send(x)
    monkeypatch.setattr(Event, "come", True)
    with pytest.raises(ValueError, match=r"conv1: row 4 of a message before this one"):
        send(x)
    send(x)
    send(x)
