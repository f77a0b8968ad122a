"""State and shutdown of a process: [Note: compiled in its own thread], [Note: exit]."""

import os
import subprocess
import sys

import pytest
import tiers

KEEPS_NOTHING = """
import gc, weakref
import numpy as np
gc.disable()
import torch
from pyg_distcomm import kernels
from pyg_distcomm.partition.cutters import ldg

class Mine: ...

def frame(act):
    mine = Mine()
    act()
    return weakref.ref(mine)

def multiply():
    rowptr, col = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])
    kernels.spmm(rowptr, col, torch.ones(3), torch.ones(2, 3))

def cut():
    ldg(torch.tensor([[0, 1, 2], [1, 2, 0]]), 2, np.ones(3, bool))

for act in (multiply, cut):
    assert frame(act)() is None, act
"""

COMPILES_LATE = """
import threading, time
import torch
from pyg_distcomm import kernels

def multiply():
    time.sleep(1)
    rowptr, col = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])
    print(kernels.spmm(rowptr, col, torch.ones(3), torch.ones(2, 3)).sum())

threading.Thread(target=multiply).start()
"""

ENDS_AT_ONCE = """
import torch
import torch.nn.functional as F
import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.nn import DistGCNConv
from torch_geometric.data import Data

# what a module holds lives until Python ends, and nothing here waits for gloo's threads
mesh = pdc.init(timeout=60)
torch.manual_seed(0)
x, edge_index = torch.rand(50, 8), torch.randint(0, 50, (2, 300))
data = pdc.partition(Data(x=x, edge_index=edge_index, y=torch.arange(50) % 3), mesh)
model = pdc.replicate(DistGCNConv(8, 3), mesh)
for _ in range(3):
    F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
"""


def _run(tmp_path, text, *launcher, cold=True):
    script = tmp_path / "script.py"
    script.write_text(text)
    compiled = {"NUMBA_CACHE_DIR": str(tmp_path)} if cold else {}
    return subprocess.run(
        [sys.executable, *launcher, str(script)],
        env={**os.environ, **compiled, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@tiers.rare
@pytest.mark.cold
@pytest.mark.subprocess
def test_compiling_keeps_no_frame_of_the_caller(tmp_path):
    done = _run(tmp_path, KEEPS_NOTHING)
    assert done.returncode == 0, done.stderr


@tiers.rare
@pytest.mark.cold
@pytest.mark.subprocess
def test_a_thread_may_compile_once_the_script_is_through(tmp_path):
    done = _run(tmp_path, COMPILES_LATE)
    assert "tensor(9.)" in done.stdout, done.stderr


@pytest.mark.subprocess
@pytest.mark.parametrize(
    "last",
    [
        pytest.param("", marks=[tiers.rare, pytest.mark.cold]),
        tiers.rarely(  # nobody waits for it, and one rank is late
            "import time\ntime.sleep(mesh.rank / 20)\n"
            "collectives.all_reduce_begin(torch.ones(1_000_000), mesh.world)\n"
        ),
        tiers.rarely("torch.distributed.destroy_process_group()\n"),
    ],
)
def test_a_script_may_end_with_a_step_of_training(tmp_path, last):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = _run(tmp_path, ENDS_AT_ONCE + last, *launcher, cold=not last)
    assert done.returncode == 0, done.stderr
