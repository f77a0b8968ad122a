"""Two hosts on one machine: processes in namespaces of their own, joined by a switch.

A host has its own network stack, host name, shared memory (/dev/shm), semaphores and
process ids; its files are those of the machine, as on a cluster's shared disk. Ending its first
process ends all that runs there, at once, as when a host loses power.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

TOOLS = ("ip", "unshare", "nsenter", "mount")
APART = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork")


def missing():
    """Says why hosts cannot be made here, if so."""
    if sys.platform != "linux":
        return f"namespaces are Linux's, and this is {sys.platform}"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found"
    if os.geteuid() != 0:
        return "making namespaces needs root"
    trial = "hostname h && ip link set lo up && mount -t tmpfs none /dev/shm"
    trial += " && mount -t proc none /proc"
    words = ["unshare", *APART, "sh", "-c", trial]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    told = f"namespaces cannot be made: {done.stderr.strip()}"
    return told if done.returncode else None


class Host:
    """A host; `run` starts a command there."""

    def __init__(self, name, number):
        self.name, self.address, self.started = name, f"10.78.0.{number}", []
        self.begin()

    def begin(self):
        """Starts the host, which may have died."""
        pipe = subprocess.PIPE
        start = f"hostname {self.name} && mount -t tmpfs none /dev/shm"
        start += " && mount -t proc none /proc && ip link set lo up && echo && exec cat"
        self.outer = subprocess.Popen(
            ["unshare", *APART, "--kill-child", "sh", "-c", start],
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,
        )
        assert self.outer.stdout.readline() == b"\n", f"{self.name} could not be made"
        children = Path(f"/proc/{self.outer.pid}/task/{self.outer.pid}/children")
        self.first = int(children.read_text().split()[0])

    def join(self, switch, known):
        """Gives the host an interface `eth0` on a switch, and the names of all hosts."""
        here, there = (("netns", str(host.first)) for host in (self, switch))
        link = "ip", "link", "add", "eth0", *here, "type", "veth"
        subprocess.run([*link, "peer", "name", self.name, *there], check=True)
        switch.call("ip", "link", "set", self.name, "master", "bridge", "up")
        self.call("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.call("ip", "link", "set", "eth0", "up")
        # as Debian has it: the own name is a loopback address
        text = f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n{known}"
        words = f"printf %s '{text}' > /dev/shm/hosts"
        self.call("sh", "-c", words + " && mount --bind /dev/shm/hosts /etc/hosts")

    def enter(self, *words):
        """Returns a command as it is to be called to run on this host."""
        spaces = ("--net", "--uts", "--ipc", "--mount", "--pid")
        return ["nsenter", f"--target={self.first}", *spaces, "--", *words]

    def call(self, *words):
        """Runs a command on this host, and returns what it says."""
        done = subprocess.run(
            self.enter(*words), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def run(self, words, log, **env):
        """Starts a command on this host, in the background."""
        names = {"OMP_NUM_THREADS": "1", **env}
        with open(log, "ab") as file:
            started = subprocess.Popen(
                self.enter(*words),
                env={**os.environ, **names},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(started)
        return started

    def die(self):
        """Ends the host and all that runs there, without a word to anybody."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first, signal.SIGKILL)
        self.outer.wait(60)
        for one in self.started:
            one.wait(60)


@contextlib.contextmanager
def pair():
    """Makes two hosts, joined by a switch; `comes_back(host)` starts one that died."""
    with contextlib.ExitStack() as stack:
        made = []
        for number, name in enumerate(("switch", "host-a", "host-b")):
            made.append(Host(name, number))
            stack.callback(made[-1].die)
        switch, *made = made
        switch.call("ip", "link", "add", "bridge", "type", "bridge")
        switch.call("ip", "link", "set", "bridge", "up")
        known = "".join(f"{host.address} {host.name}\n" for host in made)
        for host in made:
            host.join(switch, known)

        def comes_back(host):
            switch.call("sh", "-c", f"ip link del {host.name}; true")
            host.begin()
            host.join(switch, known)

        yield made, comes_back
