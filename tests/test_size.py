"""What the benchmark of size rests on: its graphs, its exponents, its law of minibatches."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import worlds
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput

import pyg_distcomm as pdc
from pyg_distcomm.graph.topology import OperatorKind
from pyg_distcomm.loader import DistNeighborLoader
from pyg_distcomm.ops import grid_plan
from pyg_distcomm.partition import partition as partition_module
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.external import partition_files
from pyg_distcomm.partition.folder import verify_folder, write_folder
from pyg_distcomm.sampling import KeyedNeighborSampler

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import communities
import size
import spmm


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    return folder, communities.write(folder, 5000, 100_000, features=6)


def test_files_of_communities_hold_distinct_pairs_and_their_reverses(written):
    folder, count = written
    edges = np.load(folder / "edge_index.npy")
    assert edges.shape == (count, 2)
    assert abs(count - 100_000) < 3000
    assert (edges[0::2] == edges[1::2, ::-1]).all()
    assert (edges[:, 0] != edges[:, 1]).all()
    assert len(np.unique(edges[:, 0] * 5000 + edges[:, 1])) == count
    assert (np.load(folder / "x.npy").shape, len(np.load(folder / "y.npy"))) == (
        (5000, 6),
        5000,
    )


def test_edges_and_features_follow_the_classes(written):
    folder, _ = written
    edges, label = np.load(folder / "edge_index.npy"), np.load(folder / "y.npy")
    same = (label[edges[:, 0]] == label[edges[:, 1]]).mean()
    assert same > 0.4  # a fortieth by chance; a tenth of the labels are wrong
    degree = np.bincount(edges[:, 0], minlength=5000)
    assert degree.max() > 10 * degree.mean()
    x = np.load(folder / "x.npy")
    means = np.stack([x[label == k].mean(0) for k in range(40)])
    assert means.std() > 0.5


@pytest.mark.subprocess
def test_a_killed_cut_leaves_nothing_and_starts_again(written, tmp_path):
    folder, _ = written
    script = f"""
        import time
        from pyg_distcomm.partition import external
        def slow(self, *args):
            print("written", flush=True)
            time.sleep(60)
        external._Writer._count_rows = slow
        external.partition_files({str(folder / "edge_index.npy")!r},
            {str(tmp_path / "out")!r}, 2, num_nodes=5000)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    partition_files(folder / "edge_index.npy", tmp_path / "out", 2, num_nodes=5000)
    assert verify_folder(tmp_path / "out") == []
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_exponents_are_those_of_powers():
    xs = [1.0, 2.0, 4.0, 8.0]
    assert size.exponent(xs, [3 * x**1.5 for x in xs]) == pytest.approx(1.5)
    assert size.exponent(xs, [0.0, 2.0, 4.0, 8.0]) == pytest.approx(1)
    assert np.isnan(size.exponent(xs, [0.0] * 4))


def test_phases_hold_the_peak_of_what_they_run(monkeypatch):
    read, now = threading.Event(), 10

    def held():
        if now == 40:
            read.set()
        return now

    monkeypatch.setattr(size, "held", held)
    phases = size.Phases()
    with phases.phase("large"):
        now = 40
        assert read.wait(60)
        now = 20
    assert phases.rows["large"]["peak"] == 40
    assert phases.rows["large"]["end"] == 20


def test_the_law_of_minibatches_bounds_what_loaders_fetch():
    row, col, n = spmm.rmat(13)
    data = Data(edge_index=torch.stack([row, col]), num_nodes=n)
    sampler = KeyedNeighborSampler(data, size.FANOUTS, seed=0)
    seeds = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:32]
    found = len(sampler.sample_from_nodes(NodeSamplerInput(None, seeds)).node)
    most = size.loader_rows(pdc.RandomGraph(n, data.num_edges, "rmat"), 32)
    assert found <= 1.1 * most
    assert most <= min(n, 3 * found)


def test_parts_that_are_there_are_not_cut_again(written, tmp_path, monkeypatch):
    folder, count = written
    graph = tmp_path / "graph"
    graph.symlink_to(folder)
    shown = {"partition": {"wall": 1.0, "cpu": 1.0, "peak": 1.0, "end": 1.0}}
    kept = {"rows": shown, "share": 0.25, "edges": count}
    (folder / "stream-3.json").write_text(json.dumps(kept))
    (folder / "stream-3").mkdir()
    monkeypatch.setattr(size, "in_process", None)
    assert size.cut(graph, 3)[1] == kept


def peak_of_plans(edge_index, nodes):
    """Returns the most bytes of tensors for each own edge while a GCN's matrix is made."""
    data = Data(edge_index=edge_index, num_nodes=nodes)
    topology = pdc.partition(data, worlds.mesh(), "random").edge_index.topology
    kind = OperatorKind("gcn", False, True)
    with (
        mock.patch.object(grid_plan, "PIECE", 1 << 12),
        mock.patch.object(partition_module, "PIECE", 1 << 12),
        torch.profiler.profile(profile_memory=True) as seen,
    ):
        topology.operator(kind, None, torch.float32)
    changes = [
        (event.start_ns(), event.nbytes())
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = itertools.accumulate(size for _, size in sorted(changes))
    return max(held) / len(topology.source_gid)


def test_planning_takes_less_than_45_bytes_for_each_edge():
    edge_index = torch.randint(0, 2000, (2, 300_000))
    for peak in worlds.run(peak_of_plans, 2, edge_index, 2000):
        assert 16 < peak < 45


def of_file(path):
    """Bytes of a file that this process holds in memory."""
    held, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            here = words[-1] == str(path)
        elif here and words[0] == "Rss:":
            held += 1024 * int(words[1])
    return held


def kept(out, edges):
    """A rank's loader of a part that is mapped from files."""
    share = pdc.load_partition(out, worlds.mesh(), verify="sizes")
    files = [out / "part_00000" / f"{name}.npy" for name in IDS]
    few = {file: file.stat().st_size / 64 for file in files}
    assert all(of_file(file) <= few[file] for file in files)
    batch = next(iter(DistNeighborLoader(share, [2], batch_size=8)))
    assert torch.equal(batch.n_id[batch.edge_index], edges[:, batch.e_id])
    assert all(of_file(file) <= few[file] for file in files)
    assert int(share.edge_index.topology.source_gid.sum()) == int(edges[0].sum())


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it holds")
def test_passes_over_ids_of_a_part_leave_them_in_their_file(tmp_path):
    n = 1 << 21
    edges = torch.randint(n // 8, (2, n), generator=torch.Generator().manual_seed(0))
    data = Data(edge_index=edges, x=torch.rand(n // 8, 2))
    owners = cut(edges, data.num_nodes, 1, "block")
    write_folder(tmp_path / "parts", data, owners)
    worlds.run(kept, 1, tmp_path / "parts", edges)


IDS = "edge_gid", "edge_index"
