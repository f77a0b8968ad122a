"""Several hosts: a rank, and a whole host, die under torchrun, and the run goes on."""

from __future__ import annotations

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
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    started = [
        host.run(words, log, PYTHONPATH=paths)
        for host, log in zip(pair, logs, strict=True)
    ]
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


def test_hosts_share_nothing_but_files():
    with hosts.pair() as (one, two):
        assert [host.call("hostname").strip() for host in (one, two)] == [
            one.name,
            two.name,
        ]
        one.call("touch", "/dev/shm/mine")
        assert "mine" not in two.call("ls", "/dev/shm")
        spaces = ("net", "uts", "ipc", "mnt", "pid")
        for space in spaces:
            seen = {
                os.readlink(f"/proc/{host.first}/ns/{space}") for host in (one, two)
            }
            assert len(seen) == 2
        addresses = [host.call("ip", "-br", "addr") for host in (one, two)]
        assert one.address in addresses[0]
        assert one.address not in addresses[1]


def test_a_rank_dies_and_the_run_ends_in_the_same_bits(tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with hosts.pair() as pair:
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
    with hosts.pair() as pair:
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
