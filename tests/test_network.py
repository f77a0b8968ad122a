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


def test_a_rank_changes_its_rate_both_ways_and_counts_what_comes():
    size, command = 3, [sys.executable, "-c", TALK, str(SCRIPT.parent)]
    limit = "--rate", "20mbit", "--burst", "32kb"
    done = run("--ranks", str(size), *limit, "--", *command)
    assert done.returncode == 0, done.stderr
    found, carried = json.loads(done.stdout)
    assert found == [[["20Mbit"]] * 2, [["10Mbit"]] * 2, [[]] * 2]
    moved = 600_000 * (size - 1)
    # two turns, their headers, and what TCP sent again; not what left, too
    assert 2 * moved < carried < 4 * moved


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
    # which are ranks, and end with this process
    assert comes(lambda: len(of(mark, slice(1, 2))) == 2)
    assert len(set(namespaces()) - spaces) >= 3
    running.send_signal(number)
    said = running.communicate(timeout=300)[1]
    assert running.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in said
    assert comes(lambda: not of(mark) and not set(namespaces()) - spaces)


def comes(true, seconds=60):
    """Whether something becomes true in time."""
    stop = time.monotonic() + seconds
    while not true() and time.monotonic() < stop:
        time.sleep(0.05)
    return true()


def namespaces():
    """The network namespaces that processes are in."""
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            yield os.readlink(entry)
        except OSError:
            continue
