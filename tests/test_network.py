"""Links of a given rate: what they carry, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "network.py"
sys.path.insert(0, str(SCRIPT.parent))

import network  # noqa: E402

REASON = network.missing()


pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(REASON is not None, reason=f"no links here: {REASON}"),
]


def run(*words):
    return subprocess.run(
        [sys.executable, SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def of(mark, place=slice(None)):
    """Ids of the processes whose command has this word, or has it at a place."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words[place]:
            found.append(int(entry.name))
    return found


def gone(mark, seconds=60):
    stop = time.monotonic() + seconds
    while of(mark) and time.monotonic() < stop:
        time.sleep(0.05)
    return not of(mark)


def test_ranks_know_their_places_and_rank_0_is_heard():
    names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME"
    show = f"import os; print(*[os.environ[n] for n in {names.split()}])"
    done = run("--ranks", "3", "--", sys.executable, "-c", show)
    assert done.returncode == 0
    assert done.stdout.split() == ["0", "3", "0", "10.77.0.1", "29500", "eth0"]
    every = run("--ranks", "3", "--all", "--", sys.executable, "-c", show)
    assert [f"{r} 3 {r} 10.77" in every.stdout + every.stderr for r in range(3)]
    assert "--- rank 2 ---\n2 3 2 10.77.0.1" in every.stderr


TALK = """
import json, os, re, socket, subprocess, sys, threading, time
sys.path.insert(0, sys.argv[1])
import network
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address, count = (os.environ["MASTER_ADDR"], 3000), 600_000
if rank == 0:
    server = socket.create_server(address)
    peers = [server.accept()[0] for _ in range(size - 1)]
else:
    while True:
        try:
            peers = [socket.create_connection(address)]
            break
        except OSError:
            time.sleep(0.05)

def take(peer):
    left = count
    while left:
        left -= len(peer.recv(min(left, 1 << 16)))

def turn():  # all ranks but 0 send to 0, which sends to all of them, at the same time
    sends = [threading.Thread(target=p.sendall, args=(bytes(count),)) for p in peers]
    takes = [threading.Thread(target=take, args=(p,)) for p in peers]
    for one in sends + takes:
        one.start()
    for one in sends + takes:
        one.join()

def level():
    for p in peers:
        p.sendall(b"x")
    for p in peers:
        p.recv(1)

def limits():  # of what this rank sends, and of what the switch sends it
    inside = ["nsenter", f"--net=/proc/{os.environ['PDC_SWITCH']}/ns/net", "--"]
    show = ["tc", "qdisc", "show", "dev"]
    ends = [*show, network.END], [*inside, *show, f"port{rank}"]
    said = [subprocess.check_output(end, text=True) for end in ends]
    return [re.findall(r"tbf .*rate (\\S+)", text) for text in said]

found = [limits()]
turn()
level()
network.shape("10mbit")
found.append(limits())
network.shape("bare")
found.append(limits())
level()
turn()
level()
print(json.dumps([found, network.carried()]))
"""


@tiers.parametrize("size", [2, 3], [2])
def test_a_rank_changes_its_rate_both_ways_and_counts_what_comes(size):
    command = [sys.executable, "-c", TALK, str(SCRIPT.parent)]
    done = run(
        "--ranks", str(size), "--rate", "20mbit", "--burst", "32kb", "--", *command
    )
    assert done.returncode == 0, done.stderr
    found, carried = json.loads(done.stdout)
    assert found == [[["20Mbit"]] * 2, [["10Mbit"]] * 2, [[]] * 2]
    moved = 600_000 * (size - 1)
    # two turns, their headers, and what TCP sent again; not what left, too
    assert 2 * moved < carried < 4 * moved


@pytest.mark.exhaustive
def test_the_first_failure_decides_and_ends_the_others():
    fail = "import os, sys, time; r = int(os.environ['RANK']); print('I am', r)\n"
    fail += "time.sleep(900 * (r != 1)); sys.exit(7)"
    done = run("--ranks", "3", "--", sys.executable, "-c", fail)
    assert done.returncode == 7
    assert "--- rank 1 (failed first) ---\nI am 1" in done.stderr
    killed = "import os; os.kill(os.getpid(), 9 if os.environ['RANK'] == '0' else 0)"
    assert run("--", sys.executable, "-c", killed).returncode == 128 + 9


ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@tiers.parametrize("number", ENDS, [signal.SIGKILL])
def test_nothing_is_left_however_it_ends(number):
    mark = f"61{os.getpid()}.{int(number)}"
    spaces = set(namespaces())
    running = subprocess.Popen(
        [sys.executable, SCRIPT, "--ranks", "2", "--", "sleep", mark],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore it, and hand that down
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    stop = time.monotonic() + 60
    while len(of(mark, slice(1, 2))) < 2:  # which are ranks, and end with this process
        assert time.monotonic() < stop
        time.sleep(0.05)
    assert len(set(namespaces()) - spaces) >= 3
    running.send_signal(number)
    said = running.communicate(timeout=300)[1]
    assert running.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in said
    assert gone(mark)
    stop = time.monotonic() + 60
    while set(namespaces()) - spaces and time.monotonic() < stop:
        time.sleep(0.05)
    assert not set(namespaces()) - spaces


def namespaces():
    """The network namespaces that processes are in."""
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            yield os.readlink(entry)
        except OSError:
            continue
