"""Sampling and loading against peers: `pytest benchmarks/test_sampling.py`.

Each benchmark times one competitor; `python benchmarks/sampling.py` has them all take
turns and prints ratios, which are what to trust on a machine that does other things as
well. A graph of 2 million nodes takes part if SAMPLING_LARGE is set, and GraphBolt if
PEER_PYTHON names an interpreter that has it.
"""

from __future__ import annotations

import os
from functools import cache

import loaders
import pytest
import sampling
import spmm as bench
from loaders import BULKS, FAN_OUTS, GRAPHBOLT, OURS, PYG_LIB, TORCH_SPARSE

from pyg_distcomm.loader import LoaderOptions

LARGE = pytest.mark.skipif(
    not os.environ.get("SAMPLING_LARGE"), reason="slow: set SAMPLING_LARGE"
)
ROUNDS = 3
NAMES = (OURS, PYG_LIB, TORCH_SPARSE)

scales = pytest.mark.parametrize("scale", [18, pytest.param(21, marks=LARGE)])
fan_outs = pytest.mark.parametrize("fan_out", FAN_OUTS, ids=str)


@cache
def problem(scale):
    data = loaders.graph(scale)
    return data, loaders.seeds(data)


def need(name):
    reason = loaders.missing(name)
    if reason:
        pytest.skip(reason)


@scales
@fan_outs
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_sampling(benchmark, name, threads, fan_out, scale):
    need(name)
    data, nodes = problem(scale)
    sampler = loaders.loader(name, data, fan_out, nodes).node_sampler
    benchmark.group = f"sampling, scale {scale}, {fan_out}, threads {threads}"
    args = name, sampler, nodes
    with bench.using_threads(threads):
        edges = benchmark.pedantic(loaders.sample, args, rounds=ROUNDS, warmup_rounds=1)
    seconds = benchmark.stats.stats.median
    benchmark.extra_info["seeds/s"] = len(nodes) / seconds
    benchmark.extra_info["edges/s"] = edges / seconds
    ours = loaders.loader(OURS, data, fan_out, nodes).node_sampler
    assert edges == pytest.approx(loaders.sample(OURS, ours, nodes), rel=0.02)


@scales
@fan_outs
@pytest.mark.parametrize(
    ("name", "threads", "workers"),
    [(name, threads, 0) for name in NAMES for threads in (1, 2)]
    + [(name, 2, 2) for name in NAMES[1:]],
)
def test_loader(benchmark, name, threads, workers, fan_out, scale):
    need(name)
    data, nodes = problem(scale)
    batches = loaders.loader(name, data, fan_out, nodes, num_workers=workers)
    benchmark.group = f"loader, scale {scale}, {fan_out}"
    with bench.using_threads(threads):
        loaders.load(name, batches, 2)
        seeds = benchmark.pedantic(loaders.load, (name, batches), rounds=ROUNDS)
    assert seeds == len(nodes)


@scales
@fan_outs
@pytest.mark.parametrize("k", BULKS)
def test_bulk_size(benchmark, k, fan_out, scale):
    data, nodes = problem(scale)
    batches = loaders.loader(
        OURS, data, fan_out, nodes, options=LoaderOptions(bulk_size=k)
    )
    benchmark.group = f"bulk size, scale {scale}, {fan_out}, threads 2"
    with bench.using_threads(2):
        loaders.load(OURS, batches, 2)
        seeds = benchmark.pedantic(loaders.load, (OURS, batches), rounds=ROUNDS)
    assert seeds == len(nodes)


@scales
@fan_outs
def test_phases(capsys, fan_out, scale):
    found = loaders.phases(*problem(scale), fan_out, ROUNDS)
    with capsys.disabled():
        print(f"\n\nscale {scale}\n{sampling.phase_table({fan_out: found})}")
    assert found["edges"] > 0


@scales
def test_first_batch_and_memory(capsys, scale):
    with sampling.on_file(*problem(scale)) as file, capsys.disabled():
        print(f"\n\nscale {scale}\n{sampling.process_table(file)}")


@scales
@fan_outs
def test_graphbolt(capsys, fan_out, scale):
    need(GRAPHBOLT)
    with sampling.on_file(*problem(scale)) as file:
        found = sampling.in_process(GRAPHBOLT, file, fan_out)
    with capsys.disabled():
        print(f"\n\nscale {scale}\n{sampling.graphbolt_table({fan_out: found})}")
    assert found["rows"]
