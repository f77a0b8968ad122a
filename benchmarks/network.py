"""A network to measure on: ranks in namespaces, joined by links of a given rate.

    sudo python benchmarks/network.py --ranks 4 --rate 1gbit -- python script.py [...]

Runs a command once per rank, each in a network namespace of its own. A pair of virtual
interfaces joins every namespace to a bridge, in one more namespace, and tc's tbf queue
limits what both ends of the pair send: no rank sends or receives faster than the rate.
"bare" leaves the links as they are. After a pause tbf lets a burst through at once, as no
wire would; no packet is longer than half a burst, so that 32kb are enough. Rank 0's output
passes through, the others' is shown if the command fails (or with --all); the exit status
is that of the first rank to fail.

No name is left on the machine that a later run could trip over: a namespace lives as long
as the process that holds it, and that ends with this one, however this one ends. Ranks
also end with it. Needs root, Linux, iproute2 and util-linux; says what is missing.

From Python, and from inside a rank:

    with network.links(2, "1gbit") as net:
        status = net.run([sys.executable, "script.py"])

    network.shape("100mbit")    # on every rank; barrier before and after
    network.carried()           # bytes that have arrived at this rank, headers included
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BARE = "bare"
BURST, LATENCY = "256kb", "50ms"  # of the queue: what may leave at once, and wait
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
TOOLS |= {"nsenter": "util-linux", "setpriv": "util-linux"}
END, PORT = "eth0", 29500  # the interface of a rank; each run has its own, so fixed
PACKET = 1600  # bytes, headers included
LONGEST = 1 << 16  # bytes that TCP hands to a queue as one packet
MOST = 254  # ranks that fit in one /24
_RATE = re.compile(r"\d+(\.\d+)?([kmgt]i?)?(bit|bps)", re.IGNORECASE)
_SIZE = re.compile(r"[1-9]\d*(\.\d+)?([kmg]?b|[kmg](bit)?)?", re.IGNORECASE)
_TIME = re.compile(r"[1-9]\d*(\.\d+)?(s|secs?|ms|msecs?|us|usecs?)", re.IGNORECASE)
_GRACE = 5.0  # seconds the other ranks have to tell why they end


class NoNetworkError(RuntimeError):
    """Links cannot be made here; the message says why, and what to do."""


@dataclass(frozen=True)
class Queue:
    """How tbf limits a link: at most `rate`, `burst` at once, waiting up to `latency`."""

    rate: str
    burst: str = BURST
    latency: str = LATENCY

    def __post_init__(self) -> None:
        some = _RATE.fullmatch(self.rate) and re.search("[1-9]", self.rate)
        if self.rate != BARE and not some:
            raise ValueError(
                f"rate={self.rate!r} is no rate of tc: write 'bare', or a number and a "
                "unit, as in '1gbit', '100mbit', '12.5mbps'"
            )
        if not _SIZE.fullmatch(self.burst) or self._burst_bytes < PACKET:
            raise ValueError(
                f"burst={self.burst!r} is no size of tc that lets a packet through: write "
                "a number and a unit, as in '256kb', '1mb'"
            )
        if not _TIME.fullmatch(self.latency):
            raise ValueError(
                f"latency={self.latency!r} is no time of tc: write a number and a unit, as "
                "in '50ms', '200us'"
            )

    @property
    def packet(self) -> int:
        """Bytes of the longest packet: two fit in a burst, or one in a short one."""
        return max(PACKET, min(LONGEST, self._burst_bytes // 2))

    @property
    def _burst_bytes(self) -> int:
        size = self.burst.lower()
        power = 1 + "kmg".find(size.rstrip("bit")[-1])
        number = float(size.rstrip("kmgbit")) * 1024**power
        return int(number / (8 if "i" in size else 1))

    def apply(self, end: str, *, inside: int | None = None) -> None:
        """Limits what an interface sends, here or in the namespace of a process."""
        if self.rate == BARE:
            # a queue that is there for certain is what can be taken away
            call("tc", "qdisc", "replace", "dev", end, "root", "pfifo", inside=inside)
            call("tc", "qdisc", "del", "dev", end, "root", inside=inside)
            return
        limits = "rate", self.rate, "burst", self.burst, "latency", self.latency
        here = "dev", end, "root"
        call("tc", "qdisc", "replace", *here, "tbf", *limits, inside=inside)


def call(*words: str, inside: int | None = None) -> None:
    """Runs a command, in a process's network namespace if given; raises what it said."""
    prefix = () if inside is None else _entering(inside)
    done = subprocess.run(
        [*prefix, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise RuntimeError(f"{' '.join(words)}: {said}")


def _entering(pid: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{pid}/ns/net", "--")


def missing() -> str | None:
    """Says why links cannot be made here, if so."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        packages = sorted({TOOLS[tool] for tool in absent})
        return f"{', '.join(absent)} not found: install {' and '.join(packages)}"
    if os.geteuid() != 0:
        return "making network namespaces needs root: run it with sudo"
    trial = ("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root")
    trial += ("tbf", "rate", "1gbit", "burst", BURST, "latency", LATENCY)
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"a namespace with a tbf queue cannot be made: {done.stderr.strip()}"
    return None


# Inside a rank ----------------------------------------------------------------------


def shape(rate: str) -> None:
    """Gives this rank's link another rate, both ways; for use inside a rank."""
    switch = _switch()
    queue = Queue(rate, *os.environ["PDC_QUEUE"].split())
    queue.apply(END)
    queue.apply(f"port{os.environ['RANK']}", inside=switch)


def carried() -> int:
    """Returns the bytes that have come to this rank: headers and repeats, too."""
    _switch()
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    found = dict(line.split(":") for line in lines if ":" in line)
    return int({name.strip(): of for name, of in found.items()}[END].split()[0])


def _switch() -> int:
    if "PDC_SWITCH" not in os.environ:
        raise NoNetworkError("this process is no rank that network.links has started")
    return int(os.environ["PDC_SWITCH"])


# Around the ranks -------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """P namespaces and the bridge that joins them; made by `links`.

    Args:
        ranks: ids of the processes that hold the ranks' namespaces.
        switch: id of the process that holds the bridge's.
        queue: that of the links.
    """

    ranks: tuple[int, ...]
    switch: int
    queue: Queue

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        show_all: bool = False,
    ) -> int:
        """Runs a command on every rank; returns the status of the first that failed, or 0.

        Args:
            command: the program and its arguments.
            env: variables to add to this process's own.
            show_all: shows the output of every rank at the end, not of rank 0 alone.
        """
        with contextlib.ExitStack() as stack:
            said = [stack.enter_context(tempfile.TemporaryFile()) for _ in self.ranks]
            running: list[subprocess.Popen] = []
            stack.callback(_end, running)
            for rank in range(len(self.ranks)):
                output = None if rank == 0 else said[rank]
                running.append(self._started(rank, command, env or {}, output))
            failed = _first_failed(running)
            _end(running)
            for rank, output in enumerate(said[1:], start=1):
                if show_all or failed is not None:
                    _show(rank, output, failed == rank)
        return 0 if failed is None else _status(running[failed])

    def _started(
        self,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        output: IO[bytes] | None,
    ) -> subprocess.Popen:
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(self.ranks)),
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": END,
            "PDC_SWITCH": str(self.switch),
            "PDC_QUEUE": f"{self.queue.burst} {self.queue.latency}",
        }
        # a rank ends when this process does, even if it is killed
        guarded = ("setpriv", "--pdeathsig", "KILL", "--", *command)
        return subprocess.Popen(
            [*_entering(self.ranks[rank]), *guarded],
            env={"OMP_NUM_THREADS": "1", **os.environ, **env, **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # its children are ended along with it
        )


@contextlib.contextmanager
def links(
    size: int, rate: str = BARE, burst: str = BURST, latency: str = LATENCY
) -> Iterator[Network]:
    """Joins `size` new namespaces by links of a rate, inside the block.

    Args:
        size: P, from 2 to 254.
        rate: as tc writes it ("1gbit", "100mbit"), or "bare" for no limit.
        burst: the bytes that may leave at once.
        latency: how long a packet may wait in the queue before it is dropped.

    Raises:
        ValueError: if the arguments make no sense.
        NoNetworkError: if links cannot be made here.
    """
    if not 2 <= size <= MOST:
        raise ValueError(f"size={size} ranks: a network has 2 to {MOST} of them")
    queue = Queue(rate, burst, latency)
    reason = missing()
    if reason is not None:
        raise NoNetworkError(reason)
    with contextlib.ExitStack() as stack:
        switch, *ranks = [stack.enter_context(_namespace()) for _ in range(size + 1)]
        call("ip", "link", "add", "bridge", "type", "bridge", inside=switch)
        call("ip", "link", "set", "bridge", "up", inside=switch)
        for rank, space in enumerate(ranks):
            _join(rank, space, switch, queue.packet)
            if rate != BARE:
                queue.apply(END, inside=space)
                queue.apply(f"port{rank}", inside=switch)
        yield Network(tuple(ranks), switch, queue)


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    # cat ends when its input does, so when this process ends; what it echoes shows
    # that unshare is done
    pipe = subprocess.PIPE
    with subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=pipe, stdout=pipe, start_new_session=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        if holder.stdout.readline() != b"\n":
            raise NoNetworkError("a network namespace could not be made")
        yield holder.pid


def _join(rank: int, space: int, switch: int, packet: int) -> None:
    port = f"port{rank}"
    peer = "type", "veth", "peer", "name", port, "netns", str(switch)
    call("ip", "link", "add", END, "netns", str(space), *peer)
    call("ip", "link", "set", END, "gso_max_size", str(packet), inside=space)
    call("ip", "addr", "add", f"{_address(rank)}/24", "dev", END, inside=space)
    call("ip", "link", "set", END, "up", inside=space)
    call("ip", "link", "set", "lo", "up", inside=space)
    call("ip", "link", "set", port, "master", "bridge", "up", inside=switch)


def _address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _first_failed(running: Sequence[subprocess.Popen]) -> int | None:
    """Waits for all; once one has failed, only as long as the others may need to tell."""
    failed, stop = None, float("inf")
    while any(one.poll() is None for one in running) and time.monotonic() < stop:
        if failed is None:
            bad = [rank for rank, one in enumerate(running) if one.poll()]
            if bad:
                failed, stop = bad[0], time.monotonic() + _GRACE
        time.sleep(0.02)
    bad = [rank for rank, one in enumerate(running) if one.poll()]
    return failed if failed is not None else next(iter(bad), None)


def _end(running: Sequence[subprocess.Popen]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for one in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, number)
        stop = time.monotonic() + 2.0
        while any(one.poll() is None for one in running) and time.monotonic() < stop:
            time.sleep(0.02)


def _status(ended: subprocess.Popen) -> int:
    code = ended.returncode
    return 128 - code if code < 0 else code  # as a shell says it of a signal


def _show(rank: int, output: IO[bytes], failed: bool) -> None:
    output.seek(0)
    text = output.read().decode(errors="replace").rstrip()
    print(f"--- rank {rank}{' (failed first)' if failed else ''} ---", file=sys.stderr)
    print(text, file=sys.stderr, flush=True)


def _terminated(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def main() -> None:
    """Runs the command that is given on ranks joined by links."""
    parser = argparse.ArgumentParser(
        description="Runs a command on ranks joined by links of a given rate."
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="as tc writes it, or 'bare'")
    parser.add_argument("--burst", default=BURST)
    parser.add_argument("--latency", default=LATENCY)
    parser.add_argument("--all", action="store_true", help="shows every rank's output")
    parser.add_argument("command", nargs="+", help="the command, after --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminated)
    try:
        with links(args.ranks, args.rate, args.burst, args.latency) as net:
            sys.exit(net.run(args.command, show_all=args.all))
    except (ValueError, RuntimeError) as error:  # what tc refuses, too
        sys.exit(f"no network: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
