"""Links of a given rate: what they refuse, what they carry, what they leave behind."""

from __future__ import annotations

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


def linked(test):
    """Marks a test that makes network namespaces."""
    reason = f"no links here: {REASON}"
    test = pytest.mark.skipif(REASON is not None, reason=reason)(test)
    return pytest.mark.netns(test)


# What is refused --------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 255])
def test_sizes_that_are_no_network(size):
    with pytest.raises(ValueError, match=f"size={size} ranks: a network has 2 to 254"):
        network.links(size).__enter__()


@pytest.mark.parametrize("rate", ["fast", "", "10", "1gbit/s", "-1mbit"])
def test_rates_that_tc_does_not_know(rate):
    with pytest.raises(ValueError, match="is no rate of tc: write 'bare'"):
        network.links(2, rate).__enter__()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rate": "0gbit"}, "is no rate of tc"),
        ({"burst": "nonsense"}, "is no size of tc"),
        ({"burst": "10b"}, "lets a packet through"),
        ({"burst": "1kb"}, "lets a packet through"),
        ({"latency": "x"}, "is no time of tc"),
    ],
)
def test_queues_that_tc_does_not_know(wrong, words):
    with pytest.raises(ValueError, match=words):
        network.Queue(**{"rate": "1gbit", **wrong})


@pytest.mark.parametrize(
    ("burst", "packet"),
    [
        ("32kb", 16384),
        ("32768", 16384),
        ("256kbit", 16384),
        ("1mb", 65536),
        ("2kb", 1600),
    ],
)
def test_two_packets_fit_in_a_burst(burst, packet):
    assert network.Queue("1gbit", burst).packet == packet


def test_what_is_missing_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert "Linux's, and this is darwin" in network.missing()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "linux")
        patch.setattr("shutil.which", lambda tool: None if tool == "tc" else tool)
        assert network.missing() == "tc not found: install iproute2"
        patch.setattr("shutil.which", lambda tool: tool)
        patch.setattr(os, "geteuid", lambda: 1000)
        assert "needs root: run it with sudo" in network.missing()
        patch.setattr(os, "geteuid", lambda: 0)
        bad = subprocess.CompletedProcess((), 2, "", "Specified qdisc kind is unknown.")
        patch.setattr(subprocess, "run", lambda *args, **kwargs: bad)
        assert "tbf queue cannot be made: Specified qdisc kind" in network.missing()
        with pytest.raises(network.NoNetworkError, match="tbf queue"):
            network.links(2).__enter__()


def test_only_ranks_have_a_link(monkeypatch):
    monkeypatch.delenv("PDC_SWITCH", raising=False)
    for ask in (network.carried, lambda: network.shape("1gbit")):
        with pytest.raises(network.NoNetworkError, match="is no rank"):
            ask()


@pytest.mark.subprocess
def test_the_command_refuses_in_one_line():
    done = run("--rate", "fast", "--", "true")
    assert done.returncode == 1
    assert done.stderr.startswith("no network: rate='fast' is no rate of tc")
    assert "Traceback" not in done.stderr


# What works -------------------------------------------------------------------------


def run(*words):
    return subprocess.run(
        [sys.executable, SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def of(mark):
    """Ids of the processes whose command has this word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in words:
            found.append(int(entry.name))
    return found


def gone(mark, seconds=60):
    stop = time.monotonic() + seconds
    while of(mark) and time.monotonic() < stop:
        time.sleep(0.05)
    return not of(mark)


@linked
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
import os, socket, sys, threading, time
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
    start = time.monotonic()
    sends = [threading.Thread(target=p.sendall, args=(bytes(count),)) for p in peers]
    takes = [threading.Thread(target=take, args=(p,)) for p in peers]
    for one in sends + takes:
        one.start()
    for one in sends + takes:
        one.join()
    return time.monotonic() - start

def level():
    for p in peers:
        p.sendall(b"x")
    for p in peers:
        p.recv(1)

def least():  # of three, as the machine may be busy
    return min([(level(), turn())[1] for _ in range(3)])

slow = least()
level()
network.shape("bare")
fast = least()
if rank == 0:
    print(slow, fast, network.carried())
"""


@linked
@tiers.parametrize(
    ("burst", "packet"), [("32kb", 16384), ("256kb", 65536)], [("32kb", 16384)]
)
def test_links_have_packets_that_fit_in_a_burst(burst, packet):
    look = ("ip", "-details", "link", "show", network.END)
    done = run("--rate", "20mbit", "--burst", burst, "--", *look)
    assert done.returncode == 0, done.stderr
    assert f"gso_max_size {packet} " in done.stdout
    queue = run("--rate", "20mbit", "--burst", burst, "--", "tc", "qdisc", "show")
    assert f"rate 20Mbit burst {burst[:-2]}Kb" in queue.stdout


@pytest.mark.exhaustive  # a rate, on a machine that should do nothing else
@linked
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_sends_and_receives_at_most_the_rate(size):
    command = [sys.executable, "-c", TALK, str(SCRIPT.parent)]
    done = run(
        "--ranks", str(size), "--rate", "20mbit", "--burst", "32kb", "--", *command
    )
    assert done.returncode == 0, done.stderr
    slow, fast, carried = map(float, done.stdout.split())
    moved = 600_000 * (size - 1)
    seconds = moved / 2.5e6
    assert 0.9 * seconds < slow < 2 * seconds  # both ways at once, not in turns
    assert fast < 0.7 * slow
    # six turns, their headers, and what TCP sent again; not what left, too
    assert 6 * moved < carried < 9 * moved


@linked
def test_two_networks_at_once():
    with network.links(2, "1gbit") as one, network.links(2, "1gbit") as two:
        assert not set(one.ranks) & set(two.ranks)
        ping = ("ip", "route", "get", "10.77.0.2")
        assert one.run(ping) == two.run(ping) == 0


@linked
def test_the_first_failure_decides_and_ends_the_others():
    fail = "import os, sys, time; r = int(os.environ['RANK']); print('I am', r)\n"
    fail += "time.sleep(900 * (r != 1)); sys.exit(7)"
    done = run("--ranks", "3", "--", sys.executable, "-c", fail)
    assert done.returncode == 7
    assert "--- rank 1 (failed first) ---\nI am 1" in done.stderr
    killed = "import os; os.kill(os.getpid(), 9 if os.environ['RANK'] == '0' else 0)"
    assert run("--", sys.executable, "-c", killed).returncode == 128 + 9


ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


@linked
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
    while len([p for p in of(mark) if p != running.pid]) < 2:
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


EXCHANGE = """
import time, torch
import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
mesh, rows, best = pdc.init(), 1 << 19, 9.0
x = torch.zeros(rows)
for _ in range(5):
    collectives.barrier(mesh.world)
    time.sleep(0.01 * mesh.rank)  # the later rank used to send before it asked
    start = time.perf_counter()
    collectives.all_to_all(x, [0, rows][:: 1 - 2 * mesh.rank], [0, rows][:: 1 - 2 * mesh.rank],
                    mesh.world).wait()
    collectives.barrier(mesh.world)  # a send ends in this machine's buffers
    best = min(best, time.perf_counter() - start)
if mesh.rank == 0:
    print(4 * rows / best)
"""


@pytest.mark.exhaustive  # a rate, on a machine that should do nothing else
@linked
def test_an_exchange_uses_both_directions_of_a_link_at_once():
    done = run(
        "--rate", "200mbit", "--", sys.executable, "-W", "ignore", "-c", EXCHANGE
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.85 * 200e6 / 8 * 0.9
