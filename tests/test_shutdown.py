"""Every wait ends at the deadline, every process soon after, and nothing stays."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm import store as stores
from pyg_distcomm.comm.store import RankError, StoreMailbox

pytestmark = pytest.mark.usefixtures("place")

ROOT = Path(__file__).parents[1]
DEADLINE = 4.0
SOON = 20.0  # seconds from an error to the end of the process: idle, less than 5


def graph():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(200, 8, generator=g)
    edges = torch.randint(0, 200, (2, 1500), generator=g)
    return Data(x=x, edge_index=edges, y=torch.arange(200) % 3)


# Waits ------------------------------------------------------------------------------


def _stops_in_backward():
    """Rank 1 is stopped inside its second backward pass; returns what each waited."""
    mesh = pdc.init(timeout=DEADLINE)
    data = pdc.partition(graph(), mesh, "random")
    conv = pdc.replicate(pdc.nn.DistGCNConv(8, 3), mesh)
    for step in range(3):
        loss = F.cross_entropy(conv(data.x, data.edge_index), data.y)
        if mesh.rank == 1 and step == 1:
            later = f"sleep {2.5 * DEADLINE}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", later])
            loss.register_hook(lambda g: os.kill(os.getpid(), signal.SIGSTOP))
        begin = time.monotonic()
        try:
            loss.backward()
        except RankError as error:
            return str(error), time.monotonic() - begin
    return "no error", 0.0


def test_a_backward_pass_stands_under_the_deadline():
    (told, waited), (_, asleep) = pdc.launch(_stops_in_backward, 2, timeout=120)
    assert f"waited {DEADLINE:.0f} s for all_reduce" in told
    assert waited < min(DEADLINE + SOON, asleep)


class _Cut:
    """A store behind a network that was cut: no answer comes."""

    def __init__(self):
        self.calls, self.mended = 0, threading.Event()

    def get(self, key):
        self.calls += 1
        self.mended.wait()


def test_a_store_that_does_not_answer_is_not_waited_for_twice():
    inner = _Cut()
    store = StoreMailbox(inner, 0.2)
    for _ in range(5):
        with pytest.raises(RankError, match="store does not answer"):
            store.get("key")
    assert inner.calls == 1
    inner.mended.set()
    store._stuck.result()
    inner.mended.clear()
    with pytest.raises(RankError, match="store does not answer"):
        store.get("key")  # it may answer again
    assert inner.calls == 2
    inner.mended.set()


class _Slow:
    """A store of a busy host: each call takes longer than one that may fail."""

    def __init__(self):
        self.inner = torch.distributed.HashStore()

    def __getattr__(self, verb):
        time.sleep(0.2)
        return getattr(self.inner, verb)


def test_a_slow_store_ends_no_wait_within_the_timeout(monkeypatch):
    monkeypatch.setattr(stores, "_CALL_TIMEOUT", 0.02)
    store = StoreMailbox(_Slow(), 60.0)
    assert stores.gather_notes(store, "run", 0, 1, 60.0, "note") == ["note"]
    with pytest.raises(RankError, match="did not come"):
        stores.gather_notes(store, "run", 0, 2, 0.5, "note")


# Meshes -----------------------------------------------------------------------------


def _meshes(count, how):
    """Makes meshes one after another; returns what the process held after some."""
    held = []
    for k in range(count):
        with contextlib.ExitStack() as stack:
            mesh = pdc.init(timeout=60)
            if how == "with":
                stack.enter_context(mesh)
            assert collectives.all_reduce(torch.ones(1), mesh.world).item() == mesh.size
            share = pdc.partition(graph(), mesh, "random")
            share.x.sum()
        if how == "close":
            mesh.close()
            mesh.close()  # once more does nothing
        if k >= 4:
            held.append([len(os.listdir(f"/proc/self/{of}")) for of in ("task", "fd")])
    return held


@pytest.mark.skipif(not worlds.LINUX, reason="counts threads by /proc")
@tiers.parametrize("how", ["close", "with", "collected"], ["collected"])
@pytest.mark.parametrize("count", [14, pytest.param(500, marks=tiers.rare)])
def test_meshes_give_back_their_threads_and_descriptors(count, how):
    for held in pdc.launch(_meshes, 2, count, how, timeout=500):
        first, last = held[0], held[-1]
        assert last[0] <= first[0] + 4
        assert last[1] <= first[1] + 8


def _closed():
    mesh = pdc.init(timeout=60)
    share = pdc.partition(graph(), mesh, "random")
    with mesh as same:
        assert same is mesh
    with pytest.raises(RankError, match=r"closed; make a new one"):
        share.x.sum()
    again = pdc.init(timeout=60)
    assert collectives.all_reduce(torch.ones(1), again.world).item() == 2
    assert again.device_mesh.shape == (2, 1, 1)
    assert again.device_mesh is again.device_mesh
    again.close()
    return len(torch.distributed.distributed_c10d._world.pg_map)


def test_a_closed_mesh_says_so():
    assert pdc.launch(_closed, 2, timeout=120) == [1, 1]


# Launch -----------------------------------------------------------------------------


def _tensors(rows):
    return [torch.full((rows, 30), float(k)) for k in range(40)]


def test_launch_returns_tensors():
    for result in pdc.launch(_tensors, 2, 3000, timeout=120):
        assert [t[0, 0].item() for t in result] == list(range(40))


def _killed():
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_beside_a_worker(over):
    """A process goes on with all that the rank had open, as a worker of a DataLoader does."""
    if os.fork() == 0:
        stop = time.monotonic() + 300
        while not os.path.exists(over) and time.monotonic() < stop:
            time.sleep(0.1)
        os._exit(0)
    _killed()


def test_launch_sees_the_end_of_a_rank_that_its_workers_outlive(tmp_path):
    over = tmp_path / "over"
    try:
        with pytest.raises(RankError, match=r"without an error message \(signal 9"):
            pdc.launch(_killed_beside_a_worker, 1, str(over), timeout=60)
    finally:
        over.touch()


LAUNCHES = """
import os, sys, time
import pyg_distcomm as pdc

def compute(folder):
    open(f"{folder}/rank{os.getpid()}", "w").close()
    while True:
        time.sleep(0.05)

if __name__ == "__main__":
    pdc.launch(compute, 2, sys.argv[1])
"""


@pytest.mark.subprocess
@tiers.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], [])
def test_ranks_end_with_their_launcher(tmp_path, number):
    mark = f"PDC_ENDS_{os.getpid()}_{int(number)}"
    (tmp_path / "launches.py").write_text(LAUNCHES)
    (tmp_path / "out").mkdir()
    launcher = subprocess.Popen(
        [sys.executable, tmp_path / "launches.py", tmp_path / "out"],
        env={**os.environ, mark: "1", "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    stop = time.monotonic() + 120
    while len(list((tmp_path / "out").iterdir())) < 2 and time.monotonic() < stop:
        time.sleep(0.05)
    launcher.send_signal(number)
    launcher.wait(60)
    stop = time.monotonic() + 15
    while marked(mark) and time.monotonic() < stop:
        time.sleep(0.05)
    assert not marked(mark)  # neither ranks nor helpers


def marked(mark):
    """Ids of the processes that have this in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


# Signals ----------------------------------------------------------------------------


def _preempted(number, who, stages):
    mesh = pdc.init(timeout=60, stages=stages)
    before = signal.getsignal(number)
    saved, step = [], 0
    preempted = pdc.on_preempt(lambda: saved.append(step))
    try:
        for step in range(9):
            if step == 3 and mesh.everyone.rank in who:
                os.kill(os.getpid(), number)
            preempted()
    except SystemExit as end:
        code = end.code
    assert signal.getsignal(number) == before
    return saved, code


@tiers.cover(
    ("number", "who"),
    [signal.SIGTERM, signal.SIGINT],
    [([1], 1), ([0, 1], 1), ([0], 2)],
    step=3,
)
def test_all_ranks_save_at_the_same_step(number, who):
    who, stages = who
    found = pdc.launch(_preempted, 2, number, who, stages, timeout=120)
    assert found == [([3], 128 + number)] * 2


def test_one_process_saves_too_and_closes_nothing():
    with pdc.init() as mesh:
        assert (mesh.device_mesh, mesh.size) == (None, 1)
    saved = []
    preempted = pdc.on_preempt(lambda: saved.append(1))
    preempted()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        preempted()
    assert saved == [1]


@pytest.fixture
def heard():
    """Has SIGINT do what it does to a script: a shell's "&" lets it be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_the_same_signal_again_ends_at_once(capsys):
    preempted = pdc.on_preempt(lambda: None)
    os.kill(os.getpid(), signal.SIGINT)
    assert "SIGINT again ends at once" in capsys.readouterr().err
    os.kill(os.getpid(), signal.SIGINT)  # an echo: a terminal and a launcher both send
    preempted._signal_time -= 2.0
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _terminated(folder):
    mesh = pdc.init(timeout=60)
    try:
        with pdc.trace(f"{folder}/trace.json"):
            for step in range(200):
                collectives.barrier(mesh.world)
                if step == 5 and mesh.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
    finally:
        Path(folder, f"cleaned{mesh.rank}").touch()


def test_sigterm_runs_a_scripts_own_cleanup(tmp_path):
    with pytest.raises(SystemExit, match="143"):
        pdc.launch(_terminated, 2, str(tmp_path), timeout=60)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("cleaned0", "cleaned1", "rank0.trace.json", "rank1.trace.json")
    }


# The end of a script: [Note: compiled in its own thread], [Note: exit] ----------------

KEEPS_NOTHING = """
import gc, threading, time, weakref
gc.disable()
import torch
from pyg_distcomm import kernels
from pyg_distcomm.partition import cutters

class Mine: ...

def frame(act):
    mine = Mine()
    act()
    return weakref.ref(mine)

rowptr, col = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])

def multiply():
    kernels.spmm(rowptr, col, torch.ones(3), torch.ones(2, 3))

def cut():
    cutters.cut(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3, 2, "ldg")

for act in (multiply, cut):
    assert frame(act)() is None, act

def late():
    time.sleep(1)
    half = torch.ones(3, dtype=torch.float64)
    print(kernels.spmm(rowptr, col, half, torch.ones(2, 3, dtype=torch.float64)).sum())

threading.Thread(target=late).start()
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


LAUNCHER = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"


def _ran(tmp_path, text, *launcher, cold=True):
    script = tmp_path / "script.py"
    script.write_text(text)
    compiled = {"NUMBA_CACHE_DIR": str(tmp_path)} if cold else {}
    return subprocess.run(
        [sys.executable, *launcher, str(script)],
        env={**os.environ, **compiled, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@tiers.rare
@pytest.mark.cold
@pytest.mark.subprocess
def test_compiling_keeps_no_frame_and_may_begin_once_the_script_is_through(tmp_path):
    done = _ran(tmp_path, KEEPS_NOTHING)
    assert done.returncode == 0, done.stderr
    assert "tensor(9., dtype=torch.float64)" in done.stdout, done.stderr


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
    done = _ran(tmp_path, ENDS_AT_ONCE + last, *LAUNCHER, cold=not last)
    assert done.returncode == 0, done.stderr
