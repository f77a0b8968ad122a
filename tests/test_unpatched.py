"""Nothing of torch or PyG is another object after the import, a partition and training.

The import compiles nothing and touches no device.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, types
import torch, torch.nn.functional, torch.optim
import torch_geometric.data, torch_geometric.loader, torch_geometric.nn, torch_geometric.utils
import torch_geometric.explain, torch_geometric.transforms

THEIRS = "torch", "torch_geometric"
KINDS = types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod


def known():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in THEIRS and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if isinstance(value, KINDS):
                    found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    for inner, member in list(vars(value).items()):
                        if isinstance(member, KINDS):
                            found[name, key, inner] = member
    return found


before, loaded = known(), set(sys.modules)
import pyg_distcomm.api, pyg_distcomm.cli

# torch_geometric itself may bring numba: what counts is what we add to it
late = {"numba", "triton", "pymetis", "sklearn", "matplotlib"}
late |= {"pyg_distcomm.kernels.core_cpu", "pyg_distcomm.partition.cutters_jit"}
assert not late & set(sys.modules) - loaded, late & set(sys.modules) - loaded
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
import pyg_distcomm as pdc
from pyg_distcomm.loader import NeighborLoader

n = 40
data = torch_geometric.data.Data(
    x=torch.randn(n, 4), edge_index=torch.randint(n, (2, 160)), y=torch.randint(3, (n,))
)
share = pdc.partition(data, pdc.init())
for nn in (torch_geometric.nn, pdc.nn):
    for kind in (nn.GCNConv, nn.GATConv, nn.SAGEConv, nn.TransformerConv):
        conv = kind(4, 3)
        for batch in (share, *NeighborLoader(data, [3], batch_size=20)):
            out = conv(batch.x, batch.edge_index)
            torch.nn.functional.cross_entropy(out, batch.y).backward()
after = known()
changed = [name for name, value in before.items() if after.get(name, value) is not value]
assert len(before) > 10_000 and not changed, changed
model = torch.jit.script(torch_geometric.nn.GCNConv(4, 3))
torch.testing.assert_close(model(data.x, data.edge_index).shape, (n, 3))
assert isinstance(share, torch_geometric.data.Data)
"""


@pytest.mark.subprocess
def test_nothing_of_torch_or_pyg_is_replaced_and_importing_compiles_nothing():
    run = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
