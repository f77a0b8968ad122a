"""Starts the ranks of a job, each a process that ends as a script does, and says how they end.

Ranks are forked from a server, which has read torch, PyG, the package and a module once. The
module's `run_job(job)` is what a rank does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent


@dataclasses.dataclass
class Ended:
    """How ranks ended; a code and a time are None where a rank was there in the end."""

    codes: list
    printed: list
    said: list  # on stderr
    times: list
    alive: list  # ranks that have left a process of theirs behind

    @property
    def hung(self):
        return None in self.codes and not any(self.codes)


class Nursery:
    """The server of a module, and what it tells of its ranks."""

    def __init__(self, module, *paths):
        paths = [str(HERE.parent), str(HERE.parent / "tests"), *paths]
        paths.append(os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.server = subprocess.Popen(
            [sys.executable, "-u", __file__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"OMP_NUM_THREADS": "1"},
            text=True,
        )
        assert json.loads(self.server.stdout.readline()) == {"ready": True}
        self.numbers = itertools.count()
        self.events, self.lock = {}, threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.server.stdout:
            event = json.loads(line)
            self.events[event["id"]].put(event)

    def start(self, job, env, folder, out):
        """Forks a rank; returns its pid and where its end will be told."""
        with self.lock:
            number = next(self.numbers)
            told = self.events[number] = queue.SimpleQueue()
            rank = {"id": number, "job": job, "env": env}
            rank |= {"folder": str(folder), "out": str(out)}
            self.server.stdin.write(json.dumps(rank) + "\n")
            self.server.stdin.flush()
        return told.get(timeout=60)["pid"], told

    def run(self, job, ranks, folder, outs, limit, grace=None, resume=()):
        """Runs a job on some ranks, or without any in a process that knows of none.

        Args:
            job: what they are to do, as plain data.
            ranks: how many there are.
            folder: where they run.
            outs: another folder, for what they print.
            limit: seconds after which they are ended.
            grace: seconds that the others have, once one has failed.
            resume: ranks that are stopped, and go on once all others have ended.
        """
        import torch.distributed as dist

        # of this process, which outlives them
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        size = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
        size |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
        size |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        running = []
        for rank in range(ranks or 1):
            world = {**size, "RANK": rank, "LOCAL_RANK": rank} if ranks else {}
            env = {name: str(value) for name, value in world.items()}
            running.append(self.start(job, env, folder, outs / str(rank)))
        codes, times = ([None] * len(running) for _ in range(2))
        stop = time.time() + limit
        while None in codes and time.time() < stop:
            for rank, (_, told) in enumerate(running):
                if codes[rank] is None and not told.empty():
                    event = told.get()
                    codes[rank], times[rank] = event["code"], event["time"]
                    if grace is not None and codes[rank]:
                        stop = min(stop, time.time() + grace)
            if None not in (code for r, code in enumerate(codes) if r not in resume):
                for rank in resume:
                    os.kill(running[rank][0], signal.SIGCONT)
                resume = ()
            time.sleep(0.01)
        alive = []
        for rank, (pid, told) in enumerate(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with what it has started
                if codes[rank] is None:
                    told.get(timeout=10)
                else:
                    alive.append(rank)
        texts = [
            [Path(f"{outs / str(rank)}.{kind}").read_text() for kind in ("out", "err")]
            for rank in range(len(running))
        ]
        return Ended(codes, *map(list, zip(*texts, strict=True)), times, alive)

    def close(self):
        self.server.stdin.close()
        self.server.wait(10)


# The server -------------------------------------------------------------------------


def serve():
    """Forks a rank for each line of standard input; says how and when ranks end.

    A rank leaves through here, so that it ends as any script does: with its own exit code,
    the package's hook for exceptions, and `atexit`.
    """
    print(json.dumps({"ready": True}), flush=True)
    text, children = b"", {}
    while True:
        if select.select([0], [], [], 0.01)[0]:
            got = os.read(0, 1 << 16)
            if not got:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                return None
            *lines, text = (text + got).split(b"\n")
            for line in lines:
                rank = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    return become(rank)
                children[pid] = rank["id"]
                print(json.dumps({"id": rank["id"], "pid": pid}), flush=True)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            end = {"id": children.pop(pid), "code": code, "time": time.time()}
            print(json.dumps(end), flush=True)


def become(rank):
    """Makes this process the rank that was asked for, and returns its job."""
    os.setpgid(0, 0)
    files = os.devnull, f"{rank['out']}.out", f"{rank['out']}.err"
    for to, name in enumerate(files):
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if to else os.O_RDONLY
        os.dup2(os.open(name, how), to)
    os.environ.update(rank["env"])
    os.chdir(rank["folder"])
    return rank["job"]


def main():
    import torch

    torch.set_num_threads(1)
    importlib.import_module("warm")
    module = importlib.import_module(sys.argv[1])
    asked = serve()
    if asked is not None:
        module.run_job(asked)


if __name__ == "__main__":
    main()
