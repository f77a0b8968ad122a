"""The sparse product against its peers: `pytest benchmarks/test_spmm.py`.

Each benchmark times one path; the last test has them all take turns and prints
ratios, which are what to trust on a machine that does other things as well.
"""

from __future__ import annotations

from functools import cache

import pytest
import spmm as bench
import torch

from pyg_distcomm import kernels

WIDTHS = (16, 32, 64, 128, 256, 512)
NAMES = [
    bench.OURS,
    bench.REUSED,
    "torch.sparse.mm(csr, x, 'sum'), int32",
    "torch.sparse.mm(csr, x, 'sum'), int64",
    "csr @ x",
    "torch-sparse",
    bench.SCATTER,
]
SCALE = 18


@cache
def problem():
    return bench.problem(SCALE)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_spmm(benchmark, name, width, threads):
    rowptr, col, value, n = problem()
    x = torch.randn(n, width)
    ways, missing = bench.paths(rowptr, col, value, x)
    if name in missing:
        pytest.skip(missing[name])
    benchmark.group = f"spmm, width {width}, threads {threads}"
    rounds = 3 if name == bench.SCATTER else 5
    with bench.using_threads(threads):
        out = benchmark.pedantic(ways[name], rounds=rounds, warmup_rounds=1)
    torch.testing.assert_close(
        out, kernels.spmm(rowptr, col, value, x), rtol=1e-3, atol=1e-2
    )


def test_ratios(capsys):
    rows = bench.run(WIDTHS, (1, 2), SCALE, repeats=5)
    with capsys.disabled():
        print("\n\nMedians; other columns are times as long as ours.\n")
        print(bench.table(rows))
    slower = [row for row in rows if row.ratio(row.best) < 0.8]  # a busy machine
    assert not slower, bench.table(slower)
