"""Memory of plans, by own edges, and of parts that stay in their files."""

import itertools
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import worlds
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.graph.topology import OperatorKind
from pyg_distcomm.loader import DistNeighborLoader
from pyg_distcomm.ops import grid_plan
from pyg_distcomm.partition import partition as partition_module
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.folder import write_folder


@worlds.on(2)
def test_planning_takes_less_than_45_bytes_for_each_edge():
    """Of tensors, for each own edge, while a GCN's matrix is made."""
    data = Data(edge_index=torch.randint(0, 2000, (2, 300_000)), num_nodes=2000)
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
    assert 16 < max(held) / len(topology.source_gid) < 45


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
