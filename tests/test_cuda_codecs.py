"""Triton's codecs against their definitions, byte for byte; see `test_cuda_kernels`."""

from __future__ import annotations

import contextlib
import traceback

import pytest
import tiers
import torch
from test_code_kernels import KEY, by_columns, odd_rows, quantised, twin
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_distcomm.halo import codecs
from pyg_distcomm.kernels import codec_ops
from pyg_distcomm.kernels.registry import Op
from pyg_distcomm.process import PROCESS

pytest.importorskip("triton", reason="Triton is not installed")
from pyg_distcomm.kernels import codec_cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning")
]  # of the interpreter
if DEVICE.type == "cuda":
    pytestmark.append(pytest.mark.cuda)


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
    x, gid = odd_rows(m, f, dtype), torch.randint(0, 2**31 - 1, (m,)).to(ids)
    index = torch.randperm(m)[: m // 2 + 1].to(ids)
    for at, noise in (
        (None, None),
        (None, (KEY, gid)),
        (index, (KEY, gid[: len(index)])),
    ):
        quantised(codec_cuda, DEVICE, x, at, bits, noise)


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
    for at in (None, index) if m else ():
        by_columns(codec_cuda, DEVICE, x, at)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_without_gaps(bits):
    for n in (0, 1, 7, 9, 4099):
        x = torch.randint(0, 2**bits, (n,), dtype=torch.uint8)
        packed = twin(codec_cuda, DEVICE, "pack_bits", x, bits)
        twin(codec_cuda, DEVICE, "unpack_bits", packed, bits, n)


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
