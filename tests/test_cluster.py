"""Several hosts: a rank, and a whole host, die under torchrun, and the run goes on."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import hosts
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "elastic.py"
REASON = hosts.missing()
PATHS = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
EVERY, PATIENCE = 5, 300

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.netns,
    pytest.mark.subprocess,
    pytest.mark.skipif(REASON is not None, reason=f"no hosts here: {REASON}"),
]


def start(pair, folder, name, epochs):
    """Starts the run on both hosts; returns torchrun's processes and their logs."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
    words += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "host-a:29400", "--rdzv-id", name]
    words += ["--rdzv-conf", "last_call_timeout=30", str(SCRIPT)]
    words += ["--folder", str(folder), "--cut", "2", "--dataset", "generated-300"]
    words += ["--epochs", str(epochs), "--every", str(EVERY), "--pause", "0.2"]
    logs = [folder.parent / f"{folder.name}.{name}.{host.name}.log" for host in pair]
    # as examples/cluster/torchrun.sh: a host that comes back finds the others
    env = {"PYTHONPATH": PATHS, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    started = [h.run(words, log, **env) for h, log in zip(pair, logs, strict=True)]
    return started, logs


def epoch_of(folder):
    """The last epoch that has been recorded."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["epoch"] if lines else 0


def reach(folder, epoch, started):
    stop = time.monotonic() + PATIENCE
    while epoch_of(folder) < epoch:
        assert time.monotonic() < stop
        assert all(one.poll() is None for one in started)
        time.sleep(0.05)


def kill_rank(host):
    """Kills the rank that runs on a host, and leaves torchrun there."""
    space = os.readlink(f"/proc/{host.first}/ns/pid")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            here = os.readlink(entry / "ns" / "pid") == space
        except OSError:  # it has ended
            continue
        launcher = b"torch.distributed.run" in words
        if here and os.fsencode(SCRIPT) in words and not launcher:
            os.kill(int(entry.name), signal.SIGKILL)
            return
    raise AssertionError("no rank runs there")


def told(log, pattern):
    return re.findall(pattern, log.read_text())


def ended(log):
    (digest,) = told(log, r"sha256 of the parameters (\w+)")
    return digest


def each_on_a_host(pair, folder, text):
    """Runs a script on a rank of each host; returns what they said, and their exit codes."""
    script, started = folder / "script.py", []
    script.write_text(text)
    env = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": pair[0].address, "MASTER_PORT": "29500", "PYTHONPATH": PATHS}
    for rank, host in enumerate(pair):
        log = folder / f"{rank}.log"
        words = [sys.executable, str(script)]
        started.append((host.run(words, log, RANK=str(rank), **env), log))
    codes = [process.wait(PATIENCE) for process, _ in started]
    return [log.read_text() for _, log in started], codes


BLIND = """
import time
import pyg_distcomm as pdc
from pyg_distcomm.comm import store
store._choose_interface = lambda *args: None
begin = time.time()
try:
    mesh = pdc.init(timeout=6)
except pdc.RankError as error:
    print("TOLD", time.time() - begin, error, flush=True)
    raise
"""


def test_hosts_that_cannot_meet_are_told_what_to_set(tmp_path):
    with hosts.pair() as (pair, _):
        said, codes = each_on_a_host(pair, tmp_path, BLIND)
    assert codes == [1, 1]
    for text, host in zip(said, pair, strict=True):
        assert f"{host.name} resolves to 127.0.1.1" in text
        assert "GLOO_SOCKET_IFNAME=eth0" in text
        assert float(text.split("TOLD ")[1].split()[0]) < 6 + 10


def test_a_rank_dies_and_the_run_ends_in_the_same_bits(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with hosts.pair() as (pair, _):
        started, logs = start(pair, straight, "straight", 20)
        assert [one.wait(PATIENCE) for one in started] == [0, 0]
        want = ended(logs[0])
        assert told(logs[0], r"(\d) ranks begin at epoch (\d+)") == [("2", "0")]

        started, logs = start(pair, broken, "broken", 20)
        reach(broken, 2 * EVERY + 2, started)
        kill_rank(pair[1])
        assert [one.wait(PATIENCE) for one in started] == [0, 0]
    begun = told(logs[0], r"(\d) ranks begin at epoch (\d+)")
    assert begun[0] == ("2", "0")
    assert begun[1] == ("2", str(2 * EVERY))
    assert ended(logs[0]) == want


def test_a_host_dies_and_the_run_goes_on_on_the_other(tmp_path):
    folder = tmp_path / "run"
    with hosts.pair() as (pair, _):
        started, logs = start(pair, folder, "run", 25)
        reach(folder, 2 * EVERY + 2, started)
        pair[1].die()
        assert started[0].wait(PATIENCE) == 0
    begun = told(logs[0], r"(\d) ranks begin at epoch (\d+)")
    assert begun == [("2", "0"), ("1", str(2 * EVERY))]
    assert told(logs[0], r"1 ranks ended at epoch 25, accuracy (0\.[89]|1)")
    about = json.loads((folder / "run.json").read_text())
    assert [start["ranks"] for start in about["starts"]] == [2, 1]
    assert about["hosts"] == ["host-a"]


def test_a_host_that_comes_back_is_taken_in_again(tmp_path):
    """As examples/cluster/torchrun.sh starts them; torch's default ends both hosts."""
    folder = tmp_path / "run"
    with hosts.pair() as (pair, comes_back):
        started, logs = start(pair, folder, "run", 2000)
        reach(folder, EVERY + 2, started)
        pair[1].die()
        reach(folder, 2 * EVERY + 2, started[:1])
        comes_back(pair[1])
        start(pair[1:], folder, "run", 2000)
        stop = time.monotonic() + PATIENCE
        while len(begun := told(logs[0], r"(\d) ranks begin at epoch (\d+)")) < 3:
            assert time.monotonic() < stop
            time.sleep(0.1)
    assert [ranks for ranks, _ in begun] == ["2", "1", "2"]
