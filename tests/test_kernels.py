"""Every kernel against its definition, and against brute force on dense matrices."""

import importlib
import inspect
import itertools
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import definitions
import pytest
import tiers
import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.kernels import compile, core_cpu, core_ops, memory, threads

reference = definitions.of(core_ops)


def agree(name: str, *args, **close):
    """Asserts that a kernel gives what its definition gives, and returns it."""
    found, wanted = (getattr(ops, name)(*args) for ops in (kernels, reference))
    torch.testing.assert_close(found, wanted, **(close or {"rtol": 0, "atol": 0}))
    return found


WIDTHS = [0, 1, 3, 7, 33, 130]
KEY = 2**62 + 12345


def random_graph(m: int, n: int, nnz: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Edges with duplicates, a hub row, a hub column, empty rows and columns."""
    g = torch.Generator().manual_seed(seed)
    row = torch.randint(0, max(m - m // 4, 1), (nnz,), generator=g)
    col = torch.randint(n // 5, n, (nnz,), generator=g)
    row[: nnz // 4], col[nnz // 4 : nnz // 2] = m // 2, n - 1
    return row, col


GRAPHS = {
    "plain": (50, 70, 600),
    "square": (64, 64, 500),
    "no edges": (5, 7, 0),
    "no rows": (0, 7, 0),
    "one": (1, 1, 3),
    "hub": (3, 300, 5000),
}


@pytest.fixture(params=GRAPHS, ids=lambda name: name.replace(" ", "_"))
def graph(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, int, int]:
    m, n, nnz = GRAPHS[request.param]
    return *random_graph(m, n, nnz), m, n


def large_problem(f: int = 40, dtype=torch.float32):
    """Enough work for the pool, with a row that holds a third of the edges."""
    m = n = 4000
    row, col = random_graph(m, n, 60_000, seed=3)
    rowptr, col, perm = kernels.coo_to_csr(row, col, m)
    g = torch.Generator().manual_seed(4)
    value = torch.randn(60_000, generator=g, dtype=dtype)[perm]
    return rowptr, col, value, torch.randn(n, f, generator=g, dtype=dtype)


def dense(row: Tensor, col: Tensor, value: Tensor, m: int, n: int) -> Tensor:
    matrix = torch.zeros(m, n, dtype=torch.float64)
    return matrix.index_put_((row, col), value.double(), accumulate=True)


# --- products -----------------------------------------------------------------


REALS = [torch.float32, torch.float64, torch.bfloat16]


@tiers.cover(("graph", "dtype"), [*GRAPHS], REALS, indirect=["graph"])
def test_products_equal_dense_ones(graph, dtype):
    row, col, m, n = graph
    rowptr, col, perm = kernels.coo_to_csr(row, col, m)
    weights = torch.randn(len(row)).to(dtype)[perm], None
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    close = {"atol": tolerance * 30, "rtol": tolerance}
    for f, value in itertools.product(WIDTHS, weights):
        told = lambda text, f=f: f"of width {f}: {text}"  # noqa: E731
        x, g = torch.randn(n, f).to(dtype), torch.randn(m, f).to(dtype)
        weight = torch.ones(len(row)) if value is None else value
        expected = dense(row[perm], col.long(), weight, m, n) @ x.double()
        for op in (kernels.spmm, reference.spmm):
            out = op(rowptr, col, value, x)
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), expected, **close, msg=told)
        expected = (g.double() @ x.double().t())[row[perm], col.long()]
        for op in (kernels.sddmm, reference.sddmm):
            out = op(rowptr, col, g, x).double()
            torch.testing.assert_close(out, expected, atol=0.05, rtol=0.01, msg=told)


@pytest.mark.parametrize("f", [7, 100])
def test_spmm_accumulates_into_out_and_row_ranges_give_the_bits_of_the_whole(f):
    rowptr, col, value, x = large_problem(f)
    whole = kernels.spmm(rowptr, col, value, x)
    start = torch.randn(len(rowptr) - 1, f)
    out = start.clone()
    assert kernels.spmm(rowptr, col, value, x, out, accumulate=True) is out
    torch.testing.assert_close(out, start + whole, atol=1e-3, rtol=1e-4)
    kernels.spmm(rowptr, col, value, x, out.fill_(torch.nan))
    assert torch.equal(out, whole)
    edges = kernels.sddmm(rowptr, col, whole, x)
    for begin, end in ((0, 1), (17, 900), (2000, 4000), (5, 5)):
        part = rowptr[begin : end + 1]
        found = agree("spmm", part, col, value, x, atol=1e-3, rtol=1e-4)
        assert torch.equal(found, whole[begin:end])
        some = edges[int(part[0]) : int(part[-1])]
        assert torch.equal(kernels.sddmm(part, col, whole[begin:end], x), some)


@pytest.mark.parametrize("f", [5, 100])
def test_strided_rows_and_columns(f):
    rowptr, col, value, x = large_problem(2 * f)
    expected = kernels.spmm(rowptr, col, value, x[:, f:].contiguous())
    wide = torch.zeros(len(rowptr) - 1, 2 * f)
    kernels.spmm(rowptr, col, value, x[:, f:], wide[:, :f])
    assert torch.equal(wide[:, :f], expected)
    assert not wide[:, f:].any()
    tall = torch.zeros(f, len(rowptr) - 1).t()
    assert kernels.spmm(rowptr, col, value, x.t().contiguous().t()[:, f:], tall) is tall
    assert torch.equal(tall, expected)
    row = x[:1, f:].expand(len(x), f)
    assert torch.equal(
        kernels.spmm(rowptr, col, value, row),
        kernels.spmm(rowptr, col, value, row.contiguous()),
    )


@tiers.parametrize("f", [1, 10, 64], [10])
def test_products_of_heads_are_those_of_each_head(f):
    rowptr, col, _, wide = large_problem(4 * f + 2)
    value = torch.randn(len(col), 3)
    own = wide[:, 2:].view(-1, 4, f)[:, :3]
    for x in (own, own.contiguous(), own[:, :1].expand(-1, 3, -1), own.flip(2).mT.mT):
        out = agree("spmm", rowptr, col, value, x, atol=1e-3, rtol=1e-4)
        scores = agree("sddmm", rowptr, col, out, x, atol=1e-2, rtol=1e-4)
        start = torch.ones_like(out)
        more = kernels.spmm(rowptr, col, value, x, start.clone(), accumulate=True)
        torch.testing.assert_close(more, start + out, atol=1e-3, rtol=1e-4)
        for h in range(3):
            alone = kernels.spmm(rowptr, col, value[:, h], x[:, h])
            assert torch.equal(out[:, h], alone)
            alone = kernels.sddmm(rowptr, col, out[:, h], x[:, h])
            torch.testing.assert_close(scores[:, h], alone, atol=1e-3, rtol=1e-5)


@tiers.parametrize("dtype", [torch.float32, torch.float64], [torch.float32])
def test_panels_give_the_same_bits(monkeypatch, dtype):
    rowptr, col, value, x = large_problem(100, dtype)
    start = torch.randn(len(rowptr) - 1, 100, dtype=dtype)
    results = []
    for pay in (False, True):
        monkeypatch.setattr(core_cpu, "_panels_pay", lambda x, edges, pay=pay: pay)
        out = kernels.spmm(rowptr, col, value, x, start.clone(), accumulate=True)
        results.append([kernels.spmm(rowptr, col, value, x), out])
    assert same(*results)


def test_nan_and_inf_travel_along_edges_only():
    rowptr, col, value, x = large_problem(33)
    x[1007], x[1011] = torch.nan, torch.inf
    close = {"equal_nan": True, "atol": 1e-3, "rtol": 1e-4}
    out = agree("spmm", rowptr, col, value, x, **close)
    assert out.isnan().any()
    assert out.isfinite().any()


# --- rows ---------------------------------------------------------------------


@tiers.cover(("f", "index_dtype"), [0, 1, 7, 33, 130], [torch.int32, torch.int64])
def test_gather_and_scatter_rows(f, index_dtype):
    index = torch.randint(0, 40, (3000,)).to(index_dtype)
    x, src = torch.randn(40, f), torch.randn(3000, f)
    assert torch.equal(kernels.gather_rows(x, index), x[index.long()])
    out = torch.full((3000, f + 2), 9.0)
    kernels.gather_rows(x, index, out[:, :f])
    assert torch.equal(out[:, :f], x[index.long()])
    assert (out[:, f:] == 9).all()
    target, expected = x.clone(), x.numpy().copy()
    assert kernels.scatter_add_rows(target, index, src) is target
    for k, row in zip(index.tolist(), src.numpy(), strict=True):  # in order, as defined
        expected[k] += row
    assert torch.equal(target, torch.from_numpy(expected))


def test_gather_and_scatter_of_other_ranks_and_types():
    index = torch.tensor([2, 0, 2])
    for x in (torch.arange(3.0), torch.arange(3), torch.randn(3, 2, 2)):
        assert torch.equal(kernels.gather_rows(x, index), x[index])
        expected = x.clone().index_add_(0, index, x[index])
        found = kernels.scatter_add_rows(x.clone(), index, x[index])
        assert torch.equal(found, expected)


# --- sorting ------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_coo_to_csr_sorts_stably(graph, index_dtype):
    row, col, m, _ = graph
    row, col = row.to(index_dtype), col.to(index_dtype)
    rowptr, col_sorted, perm = agree("coo_to_csr", row, col, m)
    expected = torch.tensor(sorted(range(len(row)), key=row.tolist().__getitem__))
    assert torch.equal(perm, expected.long())
    assert torch.equal(col_sorted.long(), col[perm].long())
    assert (rowptr.dtype, col_sorted.dtype) == (torch.int32, torch.int32)
    assert torch.equal(rowptr.diff().long(), torch.bincount(row.long(), minlength=m))


def test_csr_transpose(graph):
    row, col, m, n = graph
    rowptr, col, _ = kernels.coo_to_csr(row, col, m)
    value = torch.randn(len(col))
    rowptr_t, row_t, perm = agree("csr_transpose", rowptr, col, n)
    there = kernels.spmm(rowptr_t, row_t, value[perm], torch.eye(m))
    back = kernels.spmm(rowptr, col, value, torch.eye(n))
    torch.testing.assert_close(there, back.t())
    for begin, end in zip(rowptr_t.tolist(), rowptr_t[1:].tolist(), strict=False):
        assert (row_t[begin:end].diff() >= 0).all()


def test_csr_transpose_of_a_row_range():
    rowptr, col, _, _ = large_problem()
    _, row_t, perm = agree("csr_transpose", rowptr[10:50], col, 4000)
    low, high = int(rowptr[10]), int(rowptr[49])
    assert torch.equal(perm.sort().values, torch.arange(low, high))
    assert int(row_t.max()) < 39


# --- keyed randomness ---------------------------------------------------------


def keyed_bits_by_hand(key: int, gid: int, c: int) -> int:
    def mix(z: int) -> int:
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
        return z ^ z >> 31

    gamma = 0x9E3779B97F4A7C15
    row = mix(key ^ mix((gid + gamma) % 2**64))
    return mix((row + (c + 1) * gamma) % 2**64) >> 40


@pytest.mark.parametrize("key", [0, 1, KEY, 2**63 - 1])
def test_keyed_bits_are_those_of_the_definition(key):
    gid = torch.tensor([0, 1, 2, 2**31, 2**62, 2**63 - 1])
    expected = [[keyed_bits_by_hand(key, v, c) for c in range(5)] for v in gid.tolist()]
    for op in (kernels, reference):
        bits = op.keyed_bits(key, gid, 5)
        assert bits.tolist() == expected
        assert bits.dtype == torch.int32
    assert torch.equal(kernels.keyed_bits(key, gid[:3].int(), 5), bits[:3])
    for cols in (0, 1, 33):
        agree("keyed_bits", key, torch.randint(0, 2**60, (3000,)), cols)
        assert kernels.keyed_bits(key, gid[:0], cols).shape == (0, cols)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keyed_dropout(p, dtype):
    for shape in ((500, 3, 7), (4,), (4, 0), (0, 3)):
        x, gid = torch.randn(shape).to(dtype), torch.randint(2**40, shape[:1])
        cols = x[:1].numel()
        out = agree("keyed_dropout", x, KEY, gid, p)
        keep = agree("keyed_mask", KEY, gid, cols, p)
        bits = reference.keyed_bits(KEY, gid, cols)
        assert torch.equal(keep, bits >= round(p * 2**24))
        keep = keep.view(shape)
        assert torch.equal(out != 0, keep & (x != 0))
        if p < 1:
            expected = torch.where(keep, x.double() / (1 - p), 0)
            torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-6)
    agree("keyed_dropout", torch.randn(8, 4).to(dtype).t(), 1, torch.arange(4), p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_segments_equal_their_definitions_and_autograd(graph, dtype):
    row, col, m, n = graph
    rowptr, col, _ = kernels.coo_to_csr(row, col, m)
    g = torch.Generator().manual_seed(1)
    values, by = (torch.randn(len(col), 3, generator=g).to(dtype) for _ in range(2))
    x = torch.randint(-2, 3, (n, 9), generator=g).to(dtype)  # with ties, at zero too
    out_by = torch.randn(m, 9, generator=g).to(dtype)
    close = {"rtol": 1e-5, "atol": 1e-5}
    y = agree("segment_softmax", rowptr, values, **close)
    z = agree("segment_max", rowptr, col, x)
    leaf, dense = values.clone().requires_grad_(), x.clone().requires_grad_()
    found = agree("segment_softmax_grad", rowptr, y, by, **close)
    (wanted,) = torch.autograd.grad(reference.segment_softmax(rowptr, leaf), leaf, by)
    torch.testing.assert_close(found, wanted, **close)
    found = agree("segment_max_grad", rowptr, col, x, z, out_by, **close)
    most = reference.segment_max(rowptr, col, dense)
    torch.testing.assert_close(
        found, *torch.autograd.grad(most, dense, out_by), **close
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_of_pairs_equal_their_definition_and_autograd(graph, dtype):
    row, col, m, n = graph
    rowptr, col, _ = kernels.coo_to_csr(row, col, m)
    g = torch.Generator().manual_seed(1)
    sizes = (m, 3, 5), (n, 3, 5), (3, 5), (len(col), 3)
    *given, by = (torch.randn(*size, generator=g).to(dtype) for size in sizes)
    close = {"rtol": 1e-4, "atol": 1e-3}
    agree("pair_scores", rowptr, col, *given, 0.2, **close)
    leaves = [t.clone().requires_grad_() for t in given]
    found = reference.pair_scores(rowptr, col, *leaves, 0.2)
    by_rows, _, by_a = torch.autograd.grad(found, leaves, by)
    for op in (kernels.pair_scores_grad, reference.pair_scores_grad):
        both = op(rowptr, col, *given, 0.2, by, True)
        torch.testing.assert_close(both, (by_rows, by_a), **close)
        assert op(rowptr, col, *given, 0.2, by, False)[1] is None


# --- threads and processes ----------------------------------------------------


def every_op() -> list[Tensor]:
    rowptr, col, value, x = large_problem(100)
    out = kernels.spmm(rowptr, col, value, x)
    gid = torch.arange(len(x))
    return [
        out,
        kernels.spmm(rowptr, col, value, x, out.clone(), accumulate=True),
        kernels.spmm(rowptr, col, None, x[:, :5]),
        kernels.sddmm(rowptr, col, out, x),
        kernels.segment_softmax(rowptr, x[col.long(), :3]),
        kernels.segment_softmax_grad(rowptr, x[col.long(), :3], x[col.long(), 3:6]),
        kernels.segment_max(rowptr, col, x),
        kernels.segment_max_grad(
            rowptr, col, x, kernels.segment_max(rowptr, col, x), out
        ),
        kernels.gather_rows(x, col),
        kernels.scatter_add_rows(x.clone(), col, x[col.long()]),
        *kernels.csr_transpose(rowptr, col, len(x)),
        kernels.keyed_bits(KEY, gid, 9),
        kernels.keyed_dropout(x, KEY, gid, 0.3),
    ]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_same_bits_for_any_number_of_threads(two_threads):
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        results.append(every_op())
    assert all(same(results[0], other) for other in results[1:])


def test_concurrent_callers(two_threads):
    expected = every_op()
    with ThreadPoolExecutor(6) as callers:
        found = [callers.submit(every_op) for _ in range(6)]
        assert all(same(expected, other.result(60)) for other in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_multiplies(two_threads):
    expected = every_op()
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)  # torch's own OpenMP pool does not survive a fork
        threads.width = lambda: 2
        there.send(same(expected, every_op()))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert here.poll(60), "the child hangs"
    assert here.recv() is True
    process.join(10)
    assert process.exitcode == 0


def test_a_piece_that_fails_stops_the_rest(two_threads):
    done = []

    def work(piece: int) -> None:
        if piece == 3:
            raise RuntimeError("piece 3")
        done.append(piece)

    with pytest.raises(RuntimeError, match="piece 3"):
        threads.run(work, [(k,) for k in range(50)])
    threads.run(done.append, [(k,) for k in range(5)])


def test_nested_calls_do_not_lock(two_threads):
    seen = []
    threads.run(
        lambda a: threads.run(lambda b: seen.append((a, b)), [(b,) for b in range(4)]),
        [(a,) for a in range(8)],
    )
    assert len(seen) == 32


@tiers.rare
@pytest.mark.cold
@pytest.mark.subprocess
def test_processes_that_start_cold_together_compile_once(tmp_path):
    code = (
        "import torch; from pyg_distcomm import kernels as k;"
        "r = torch.tensor([0, 1], dtype=torch.int32);"
        "print(k.spmm(r, r[:1], torch.ones(1), torch.full((1, 3), 2.)).sum().item())"
    )
    call, to = [sys.executable, "-c", code], subprocess.PIPE
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ranks = [subprocess.Popen(call, stdout=to, env=env, text=True) for _ in range(3)]
    assert [rank.communicate(timeout=600)[0].strip() for rank in ranks] == ["6.0"] * 3
    kept = [file.name for file in tmp_path.rglob("core_jit.spmm-*.nbc")]
    assert len(kept) == 2  # a block of two columns and one of one: nothing twice
    assert list(tmp_path.rglob("pyg_distcomm-*.lock"))


@pytest.mark.parametrize("name", ["core", "codec"])
def test_compiled_ops_have_the_arguments_of_their_definitions(name):
    module = importlib.import_module(f"pyg_distcomm.kernels.{name}_ops")
    twins = importlib.import_module(f"pyg_distcomm.kernels.{name}_cpu")
    for op, definition in vars(definitions.of(module)).items():
        wanted, found = (
            [(p.name, p.default) for p in inspect.signature(f).parameters.values()]
            for f in (definition, getattr(twins, op))
        )
        assert found == wanted, op


# --- the front door -----------------------------------------------------------


def mistakes():
    """Calls with wrong arguments, and what is said of each."""
    rowptr, col, value, x = large_problem(8)
    few, ends, rows = torch.randn(4, 2), torch.tensor([0, 1, 2]), torch.ones(2, 2, 1)
    spans = "span all 3 edges, from 0 to 3, got 0 to 2"
    three, ids = torch.ones(3, 2), torch.zeros(3).int()
    for bad in (torch.tensor([4]), torch.tensor([0, -1])):
        for op in (kernels, reference):
            yield "4 rows", op.gather_rows, few, bad
            yield "4 rows", op.scatter_add_rows, few, bad, few[: len(bad)]
            yield "4 rows", op.coo_to_csr, bad, bad, 4
    yield "10 rows", kernels.csr_transpose, rowptr, col, 10
    yield "each of the 60000 edges", kernels.spmm, rowptr, col, value[:-1], x
    yield "matrix", kernels.spmm, rowptr, col, value, x[0]
    yield "of the 2 heads", kernels.spmm, rowptr, col, value, x.view(len(x), 2, -1)
    yield "needs the out", kernels.spmm, rowptr, col, value, x, None, True
    yield r"shape \[4000, 8\]", kernels.spmm, rowptr, col, value, x, x[:5]
    yield "one length", kernels.coo_to_csr, col, col[1:], 4000
    yield "key must lie in", kernels.keyed_bits, -1, ends, 1
    for p in (-0.1, 1.1, float("nan")):
        yield "probability", kernels.keyed_dropout, few, 1, torch.arange(4), p
    yield "4 rows", kernels.keyed_dropout, few, 1, ends, 0.5
    yield "one shape", kernels.segment_softmax_grad, ends, few[:2], few[:2, :1]
    yield spans, kernels.segment_softmax, ends, three
    yield spans, kernels.segment_softmax_grad, ends, three, three
    yield spans, kernels.pair_scores, ends, ids, rows, rows, rows[0], 0.2
    wide = torch.ones(2, 3, 1)
    uneven = ends, ids[:2], wide, wide, rows[0], 0.2
    yield r"a \[heads, f\]", kernels.pair_scores, *uneven


def test_mistakes_are_named():
    for told, call, *args in mistakes():
        with pytest.raises((IndexError, ValueError), match=told):
            call(*args)


def test_tensors_that_require_gradients_are_read():
    rowptr, col, value, x = large_problem(8)
    out = kernels.spmm(rowptr, col, value.requires_grad_(), x.requires_grad_())
    assert not out.requires_grad


def test_loops_compile_without_a_cache_folder(monkeypatch):
    def no_folder(loop):
        raise RuntimeError("no locator available")

    monkeypatch.setattr(compile, "KernelCache", no_folder)
    double = compile.jit(lambda x: 2 * x)
    assert compile.cache_folder(double) is None
    assert double(3) == 6


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Writes two modules and calls `outer.run`: (its result, whether from the cache)."""
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def call(constant: int, operator: str) -> tuple[int, bool]:
        (tmp_path / "inner_jit.py").write_text(
            "from pyg_distcomm.kernels.compile import jit\n"
            f"CONSTANT = {constant}\n"
            "@jit\n"
            f"def step(x):\n    return x {operator} CONSTANT\n"
        )
        (tmp_path / "outer_loops.py").write_text(
            "from inner_jit import CONSTANT, step\n"
            "from pyg_distcomm.kernels.compile import jit\n"
            "@jit\n"
            "def run(x):\n    return step(x) + 100 * CONSTANT\n"
        )
        monkeypatch.setattr(compile, "SOURCES", compile.digest())
        for name in ("inner_jit", "outer_loops"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        loops = importlib.import_module("outer_loops")
        result = loops.run(6)
        return result, bool(loops.run.stats.cache_hits)

    monkeypatch.setattr(compile, "PACKAGE", tmp_path)
    return call


def test_cached_code_is_keyed_by_the_sources_that_it_contains(cached):
    assert cached(2, "+") == (208, False)
    assert cached(2, "+") == (208, True)
    assert cached(2, "*") == (212, False)  # another function, which is inlined
    assert cached(3, "*") == (318, False)  # another constant
    assert cached(2, "+") == (208, True)


@tiers.cover(("ending", "left"), ["nbi", "nbc"], [0, 12, 400], step=3)
def test_cached_code_that_is_cut_short_is_compiled_anew(cached, tmp_path, ending, left):
    assert cached(2, "+") == (208, False)
    files = list((tmp_path / "cache").rglob(f"*.{ending}"))
    assert files
    for path in files:
        os.truncate(path, left)
    assert cached(2, "+") == (208, False)
    assert cached(2, "+") == (208, True)


def test_code_that_two_save_at_once_is_kept_apart(tmp_path, monkeypatch):
    save = compile._CodeFiles._save_data

    def late(self, name, data):
        time.sleep(0.2)
        save(self, name, data)

    monkeypatch.setattr(compile._CodeFiles, "_save_data", late)
    files = [compile._CodeFiles(str(tmp_path), "loop", b"text") for _ in range(2)]
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda file, key: file.save(key, key), files, "ab"))
    assert [files[0].load(key) for key in "ab"] == ["a", "b"]


def test_a_disk_without_room_keeps_no_compiled_code(cached, monkeypatch):
    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compile._CodeFiles, "_open_for_write", full)
    with pytest.warns(UserWarning, match="not kept: .*No space left.*NUMBA_CACHE_DIR"):
        assert cached(2, "+") == (208, False)


def test_cached_code_is_keyed_by_sources_and_tools(monkeypatch, tmp_path):
    monkeypatch.setattr(compile, "PACKAGE", tmp_path / "kernels")
    known = {compile.digest("1"), compile.digest("2")}
    for folder in ("kernels", "partition"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "loops_jit.py").write_text("LINE = 128\n")
        known.add(compile.digest("1"))
    assert len(known) == 4


def test_a_cache_that_others_can_write_is_not_read(tmp_path, monkeypatch):
    """Numba's cache is made of pickles: whoever writes there would run code here."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    told = f"because all users can write to {tmp_path}.* a folder of your own"
    with pytest.warns(UserWarning, match=told):
        double = compile.jit(lambda x: 2 * x)
    assert compile.cache_folder(double) is None
    assert double(3) == 6
    assert not list(tmp_path.rglob("*.nb?"))


def test_a_folder_is_judged_by_all_above_it(tmp_path, monkeypatch):
    deep = tmp_path / "a" / "b" / "not yet"
    deep.parent.mkdir(parents=True)
    assert compile.untrusted_writer(deep) is None
    (tmp_path / "a").chmod(0o777)
    assert compile.untrusted_writer(deep) == f"all users can write to {tmp_path / 'a'}"
    (tmp_path / "a").chmod(0o1777)  # as /tmp: others add names, and replace none
    assert compile.untrusted_writer(deep) is None
    assert "all users" in compile.untrusted_writer(tmp_path / "a")
    (tmp_path / "a").chmod(0o775)
    monkeypatch.setattr(compile, "_is_own", lambda _: False)
    assert "group" in compile.untrusted_writer(deep)
    (tmp_path / "a").chmod(0o755)
    if os.getuid() == 0:
        os.chown(tmp_path / "a", 12345, 0)
        assert "another user (uid 12345)" in compile.untrusted_writer(deep)


def test_blocks_return_when_nothing_holds_them():
    blocks = memory.Blocks()
    a, b = blocks.take(3 << 20), blocks.take(3 << 20)
    where = a.data_ptr(), b.data_ptr()
    part = a.view(torch.float32)[5:]  # a view holds the block
    del a
    assert blocks.take(3 << 20).data_ptr() not in where  # and is freed at once
    part.fill_(1)
    del part
    c = blocks.take((3 << 20) - 100)  # the size is rounded up
    assert c.data_ptr() == where[0]
    assert len(c) == (3 << 20) - 100
    del b, c
    blocks.take(16 << 20)
    blocks.take(16 << 20)
    assert blocks._used + blocks._idle <= blocks._most + (16 << 20)
    with pytest.raises(RuntimeError):
        blocks.take(1 << 46)
    assert blocks._most < 1 << 30
    blocks.drop()
    assert blocks._idle == 0
    with torch.inference_mode():
        memory.empty((1 << 9, 1 << 10), torch.float32)
    kept = memory.empty((1 << 9, 1 << 10), torch.float32).requires_grad_()
    kept.mul(2).sum().backward()  # no view, and no inference tensor
    assert torch.equal(kept.grad, torch.full_like(kept, 2))


@pytest.mark.parametrize("func", memory._INTO, ids=str)
def test_what_is_computed_into_blocks_is_what_torch_computes(func):
    x, y = torch.randn(2, 530, 530).requires_grad_().unbind()
    x.data[x.abs() < 0.1] = -0.0
    name = func._schema.name
    more = {
        "aten::threshold_backward": (x, 0),
        "aten::elu_backward": (1.0, 1.0, 1.0, False, x),
        "aten::leaky_relu_backward": (x, 0.2, False),
        "aten::_log_softmax": (1, False),
        "aten::_log_softmax_backward_data": (x.log_softmax(1), 1, x.dtype),
        "aten::mm": (x,),
        "aten::addmm": (x, y),
        "aten::add": (x[0],),
        "aten::mul": (x[:, :1],),
    }.get(name, ())
    with torch.no_grad():
        want, got = func(y, *more), memory.computed(func, y, *more)
        assert torch.equal(want.view(torch.int32), got.view(torch.int32))
        for change in (Tensor.half, Tensor.t, Tensor.double):
            given = [change(t) if isinstance(t, Tensor) else t for t in (y, *more)]
            if all(t.dim() == 2 for t in given if isinstance(t, Tensor)):
                want, got = func(*given), memory.computed(func, *given)
                assert (got.dtype, got.shape) == (want.dtype, want.shape)
                assert torch.equal(got, want)


def test_freed_memory_is_returned():
    if memory.GLIBC is None or not sys.platform.startswith("linux"):
        pytest.skip("no malloc_trim, or no /proc")

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    memory.give_back()
    blocks = [torch.ones(1 << 14) for _ in range(3200)]  # 200 MiB
    kept = blocks[1::2]
    most = resident()
    del blocks
    memory.give_back()
    assert most - resident() >= 80 << 20
    assert all(bool(block.all()) for block in kept)


@pytest.mark.parametrize("total", [1, 63, 64, 65, 5000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.7, 1.0])
def test_places_of_ids(total, share):
    g = torch.Generator().manual_seed(total)
    gid = (torch.rand(total, generator=g) < share).nonzero().view(-1)
    ids = torch.randint(total, (40_000,), generator=g)
    found = kernels.rank_select_index(gid, total)(ids)
    assert torch.equal(found, definitions.places(gid, ids))
    assert torch.equal(
        kernels.rank_select_index(gid, total)(gid), torch.arange(len(gid))
    )
    assert kernels.rank_select_index(gid, total)(ids[:0]).shape == (0,)


# Sizes past 2^31 ----------------------------------------------------------------------

ROWS, WIDTH = 2**22 + 5, 520  # 2^31 numbers and more; only touched rows take memory


@tiers.parametrize("index_dtype", [torch.int32, torch.int64], [torch.int32])
def test_rows_beyond_two_to_the_31_numbers_are_found(index_dtype):
    x = torch.empty(ROWS, WIDTH)
    assert x.numel() > 2**31
    ids = torch.tensor([ROWS - 1, 3, ROWS - 2], dtype=index_dtype)
    values = torch.rand(3, WIDTH)
    x[ids.long()] = values
    assert torch.equal(kernels.gather_rows(x, ids), values)
    rowptr = torch.tensor([0, 2, 2, 3], dtype=index_dtype)
    want = torch.stack([values[0] + values[1], torch.zeros(WIDTH), values[2]])
    assert torch.equal(kernels.spmm(rowptr, ids, None, x), want)
    g = torch.rand(3, WIDTH)
    ends = torch.stack([(g[0] * values[0]).sum(), (g[0] * values[1]).sum()])
    got = kernels.sddmm(rowptr, ids, g, x)
    torch.testing.assert_close(got[:2], ends)
    kernels.scatter_add_rows(x, ids, g)
    assert torch.equal(x[ids.long()], values + g)
