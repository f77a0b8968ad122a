"""Triton's kernels against their definitions: on a device, or in Triton's interpreter.

Without a device the twins of CUDA tensors are called on CPU tensors. `TRITON_INTERPRET=1`
must be set before Triton is imported, which conftest does.
"""

import contextlib
import os
import subprocess
import sys
import traceback
from pathlib import Path

import definitions
import pytest
import tiers
import torch
from test_codec import by_columns, odd_rows, quantised, twin
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_distcomm import kernels
from pyg_distcomm.halo import codecs
from pyg_distcomm.kernels import codec_ops, core_ops, registry
from pyg_distcomm.kernels.registry import Op
from pyg_distcomm.process import PROCESS

pytest.importorskip("triton", reason="Triton is not installed")
from pyg_distcomm.kernels import codec_cuda, core_cuda

reference = definitions.of(core_ops)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = (torch.float32, torch.float64, torch.bfloat16)
WIDTHS = (1, 2, 3, 513, 33, 64, 130, 257, 16)
KEY = 2**62 + 12345
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter
]
if DEVICE.type == "cuda":
    pytestmark.append(pytest.mark.cuda)


@pytest.fixture
def in_order():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def matrix(degrees, n, index=torch.int32, seed=0):
    g = torch.Generator().manual_seed(seed)
    rowptr = torch.tensor([0, *degrees]).cumsum(0).to(index)
    col = torch.randint(n, (int(rowptr[-1]),), generator=g).to(index)
    return rowptr, col


def there(*tensors):
    return [t if t is None else t.to(DEVICE) for t in tensors]


GRAPHS = {
    "plain": [3, 0, 1, 5, 0, 2],
    "no edges": [0, 0],
    "one long row": [0, 4, 90, 0, 1],
    "long rows side by side": [16, 70, 33, 0, 2, 47],
    "no rows": [],
}


def test_kernels_run_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current device, which may be another."""
    entered, device_of = [], torch.cuda.device_of
    monkeypatch.setattr(registry, "device_type_of", lambda t: "cuda")
    watched = lambda t: entered.append(t) or device_of(t)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_of", watched)
    rowptr, col, x = *matrix(GRAPHS["plain"], 11), torch.ones(11, 4)
    given = there(rowptr, col, x)
    kernels.spmm(*given[:2], None, given[2])
    kernels.keyed_bits(KEY, given[1], 3)
    assert [id(t) for t in entered] == [id(given[0]), id(given[1])]


@tiers.cover(
    "graph, f, dtype, index, weighted",
    list(GRAPHS),
    WIDTHS,
    TYPES,
    (torch.int32, torch.int64),
    (True, False),
    step=4,
)
def test_products(graph, f, dtype, index, weighted, monkeypatch):
    monkeypatch.setattr(core_cuda, "CUT", 8)
    monkeypatch.setattr(core_cuda, "TILE", 2048)
    monkeypatch.setattr(core_cuda, "LARGE", 10**18)
    rowptr, col = matrix(GRAPHS[graph], 11, index)
    x = torch.randn(11, f + 3).to(dtype)[:, 3:]  # rows that are apart
    value = torch.randn(len(col)).to(dtype) if weighted else None
    start = torch.randn(len(rowptr) - 1, f).to(dtype)
    close = {"rtol": 0.02, "atol": 0.1} if dtype == torch.bfloat16 else {}
    loose = close or {"rtol": 1e-4, "atol": 1e-4}
    for begin in (0, len(rowptr) // 2):  # all rows, and the last of them
        part, rows = rowptr[begin:], start[begin:]
        given = there(part, col, value, x)
        want = reference.spmm(part, col, value, x)
        torch.testing.assert_close(core_cuda.spmm(*given).cpu(), want, **close)
        turned = torch.zeros(f, len(rows)).to(dtype).to(DEVICE).t()
        assert core_cuda.spmm(*given, turned) is turned
        torch.testing.assert_close(turned.cpu(), want, **close)
        out = rows.clone().to(DEVICE)
        assert core_cuda.spmm(*given, out, True) is out
        value_of = None if value is None else value.double()
        want = rows.double() + reference.spmm(part, col, value_of, x.double())
        torch.testing.assert_close(out.cpu(), want.to(dtype), **close)
        dots = core_cuda.sddmm(*there(part, col, rows, x)).cpu()
        want = reference.sddmm(part, col, rows.double(), x.double())
        torch.testing.assert_close(dots, want.to(dtype), **loose)


@tiers.parametrize("dtype", TYPES[:2], slice(1), ids=str)
def test_sums_in_the_order_of_the_cpu_have_its_bits(dtype, in_order, monkeypatch):
    monkeypatch.setattr(core_cuda, "CUT", 8)
    rowptr, col = matrix(GRAPHS["long rows side by side"], 11)
    x = torch.randn(11, 33, dtype=dtype)
    start = torch.randn(len(rowptr) - 1, 33, dtype=dtype)
    want = kernels.spmm(rowptr, col, None, x)
    assert torch.equal(core_cuda.spmm(*there(rowptr, col, None, x)).cpu(), want)
    want = kernels.spmm(rowptr, col, None, x, start.clone(), True)
    found = core_cuda.spmm(*there(rowptr, col, None, x, start.clone()), True)
    assert torch.equal(found.cpu(), want)
    src = torch.randn(len(col), 5, dtype=dtype)
    want = kernels.scatter_add_rows(x[:, :5].contiguous(), col, src)
    found = core_cuda.scatter_add_rows(*there(x[:, :5].contiguous(), col, src))
    assert torch.equal(found.cpu(), want)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_what_torch_brings(index):
    rowptr, col = matrix(GRAPHS["plain"], 11, index)
    x, value = torch.randn(11, 8), torch.randn(len(col))
    for given in (None, value):
        want = reference.spmm(rowptr, col, given, x)
        found = core_ops.library_spmm(*there(rowptr, col, given, x)).cpu()
        torch.testing.assert_close(found, want)
        out = torch.ones(6, 8).to(DEVICE)
        core_ops.library_spmm(*there(rowptr, col, given, x), out, True)
        torch.testing.assert_close(out.cpu(), want + 1)
    part = there(rowptr[1:4])[0] if DEVICE.type == "cpu" else rowptr.to(DEVICE)[1:4]
    assert not core_ops.library_fits(part, *there(col, x))
    found = core_ops.spmm.definition(part, *there(col, value, x)).cpu()
    torch.testing.assert_close(found, reference.spmm(rowptr[1:4], col, value, x))
    found = core_ops.gather_rows.definition(*there(x, col)).cpu()
    assert torch.equal(found, x[col.long()])


@tiers.cover("key, index", [KEY, 2**63 - 1, 0], [torch.int64, torch.int32], step=2)
def test_keyed_bits_and_masks(key, index):
    gid = torch.randint(0, 2**31 - 1, (40,)).to(index)
    if index == torch.int64:
        gid[:3] = torch.tensor([2**62, 2**63 - 1, 0])
    for cols in (0, 1, 33):
        found = core_cuda.keyed_bits(key, gid.to(DEVICE), cols).cpu()
        assert torch.equal(found, kernels.keyed_bits(key, gid, cols))
        found = core_cuda.keyed_mask(key, gid.to(DEVICE), cols, 0.3).cpu()
        assert torch.equal(found, kernels.keyed_mask(key, gid, cols, 0.3))


@tiers.cover("dtype, p", TYPES, (0.3, 0.0, 1.0))
def test_keyed_dropout(dtype, p):
    x, gid = torch.randn(50, 3, 7).to(dtype), torch.randint(0, 2**40, (50,))
    found = core_cuda.keyed_dropout(x.to(DEVICE), KEY, gid.to(DEVICE), p).cpu()
    want = kernels.keyed_dropout(x, KEY, gid, p)
    if dtype != torch.bfloat16 or DEVICE.type == "cuda":
        assert torch.equal(found, want)
    else:  # the interpreter cuts bits off where a device rounds to nearest
        assert torch.equal(found == 0, want == 0)
        torch.testing.assert_close(found, want, rtol=2**-7, atol=0.0)


@pytest.mark.exhaustive
def test_every_kernel_compiles_for_sm_80_and_sm_90(tmp_path):
    pytest.importorskip(
        "triton.backends.nvidia", reason="Triton cannot compile for CUDA"
    )
    script = Path(__file__).with_name("compiled_for_cuda.py")
    given = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    given.pop("TRITON_INTERPRET", None)
    run = [sys.executable, str(script)]
    found = subprocess.run(run, env=given, capture_output=True, text=True, timeout=1200)
    assert found.returncode == 0, found.stderr[-4000:]
    assert "spmm_rows" in found.stdout


def test_the_library_multiplies_where_it_was_faster(monkeypatch):
    monkeypatch.setattr(core_cuda, "LARGE", 64)
    even, uneven = torch.arange(0, 320, 32), torch.tensor([0, 256] + [256] * 31 + [288])
    for rowptr, width, valued, wanted in (
        (even, 128, True, True),
        (even, 128, False, False),
        (even, 32, True, False),
        (uneven, 32, False, True),
        (even[:2], 128, True, False),  # too few edges
    ):
        edges = int(rowptr[-1])
        col, value = torch.zeros(edges, dtype=torch.int64), torch.ones(edges)
        given = rowptr.clone(), col, value if valued else None, torch.ones(4, width)
        assert core_cuda.library_wins(*given) == wanted


# Triton's codecs against their definitions, byte for byte; see `test_cuda_kernels` ---


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
    "shape, dtype, ids", SHAPES, codec_ops.REALS, (torch.int64, torch.int32), step=4
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
