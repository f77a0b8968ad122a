"""Hosts a test on several ranks: kept pools of processes, one per world size.

`run(fn, size, *args)` calls `fn(mesh_maker, *args)` on every rank and returns what each
returned. A rank that fails brings home every rank's traceback, and its pool is dropped;
a hard deadline stops one that hangs. One rank runs in this process, with no group.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import io
import math
import multiprocessing
import os
import runpy
import signal
import sys
import time
import traceback
from multiprocessing.connection import wait

import places
import pytest

DEADLINE = 300.0  # to stop what hangs: a busy machine may take long
MANY = 128  # process groups of all ranks of a pool: with more, new ranks take over
LINUX = sys.platform == "linux"
_POOLS: dict = {}


class WorldError(AssertionError):
    """A rank failed or hung; the message holds what each rank said."""


def run(fn, size, *args, deadline=DEADLINE):
    if size == 1:
        with places.at(places.NOW), _where_possible():
            return [places.home(fn(*args))]
    pool = _POOLS.get(size)
    if pool is not None and size * pool.groups > MANY:
        _POOLS.pop(size).close()  # not group by group: failed ones would wait to end
        pool = None
    if pool is None:
        pool = _POOLS[size] = _Pool(size)
    try:
        pool.signal(signal.SIGCONT)
        with _where_possible():
            return pool.run(fn, args, deadline)
    except (WorldError, pytest.skip.Exception):
        _POOLS.pop(size).close()
        raise
    finally:
        pool.signal(signal.SIGSTOP)  # threads of gloo wake a hundred times a second


@contextlib.contextmanager
def _where_possible():
    """Skips a test of which the second device lacks an operation."""
    try:
        yield
    except Exception as error:
        if places.lacks(str(error)):
            pytest.skip("the second device lacks an operation of this test")
        raise


def on(size=None, start=None):
    """Makes a test of what each rank does.

    It has `size` ranks, or as many as it is given by a `size` or a `grid`. `start` is how
    they are started: by `run`, or by `anew`.
    """

    def test_of(body):
        named = _Body(body.__module__, body.__name__)

        @functools.wraps(body)
        def test(**given):
            ranks = size or given.get("size") or math.prod(given["grid"])
            (start or run)(named, ranks, given)

        return test

    return test_of


@dataclasses.dataclass(frozen=True)
class _Body:
    """What ranks do in a test of `on`, which they import by its name."""

    module: str
    name: str

    def __call__(self, given):
        test = getattr(importlib.import_module(self.module), self.name)
        return test.__wrapped__(**given)


def anew(fn, size, *args, deadline=DEADLINE):
    """Runs on new ranks, none of which has asked autograd for a thread of a device yet."""
    pool = _Pool(size)
    try:
        return pool.run(fn, args, deadline)
    finally:
        pool.close()


def script(path, size, folder, *flags):
    """Runs a script on new ranks, as torchrun does; returns what rank 0 printed."""
    pool = _Pool(size)
    try:
        answers = pool.run(_script, (str(path), size, str(folder), flags), 2 * DEADLINE)
    finally:
        pool.close()
    (out, _), *others = answers
    assert not any(text for text, _ in others), others
    assert not any("Warning" in errors for _, errors in answers), answers
    return out


def _script(path, size, folder, flags):
    if size == 1:  # no launcher
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]
    os.chdir(folder)
    sys.argv = [path, *flags]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        runpy.run_path(path, run_name="__main__")
    return out.getvalue(), errors.getvalue()


def rest(size, groups):
    """Closes the pools of more ranks, and those whose ranks have more process groups."""
    for other in [n for n, p in _POOLS.items() if n > size or p.groups > groups]:
        _POOLS.pop(other).close()


def only(size):
    """Closes the pools of other sizes."""
    for other in [n for n in _POOLS if n != size]:
        _POOLS.pop(other).close()


class _Pool:
    def __init__(self, size):
        import torch.distributed as dist

        from pyg_distcomm.comm.launch import context_of_ranks

        context = context_of_ranks("warm")
        self.store = dist.TCPStore(
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
        )
        self.pipes, self.ranks, self.groups = [], [], 0
        for rank in range(size):
            mine, theirs = context.Pipe()
            # no daemon, which may not start workers; `_close_all` ends it
            process = context.Process(
                target=_serve, args=(rank, size, self.store.port, theirs)
            )
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.ranks.append(process)

    def run(self, fn, args, deadline):
        for pipe in self.pipes:
            pipe.send((fn, args, places.NOW))
        answers, stop = {}, time.monotonic() + deadline
        while len(answers) < len(self.pipes) and time.monotonic() < stop:
            left = [p for r, p in enumerate(self.pipes) if r not in answers]
            for pipe in wait(left, timeout=1.0):
                try:
                    *answer, self.groups = pipe.recv()
                    answers[self.pipes.index(pipe)] = answer
                except EOFError:
                    answers[self.pipes.index(pipe)] = (False, "process died")
            if any(not ok for ok, _ in answers.values()):
                stop = min(stop, time.monotonic() + 30)
        missing = [r for r in range(len(self.pipes)) if r not in answers]
        bad = {r: text for r, (ok, text) in answers.items() if not ok}
        if missing or bad:
            story = "\n".join(f"--- rank {r} ---\n{text}" for r, text in bad.items())
            raise WorldError(f"ranks {missing} did not answer\n{story}")
        return [answers[r][1] for r in range(len(self.pipes))]

    def signal(self, number):
        for process in self.ranks:
            if process.is_alive() and LINUX:
                os.kill(process.pid, number)

    def close(self):
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.join(5)


def _serve(rank, size, port, pipe):
    import torch
    import warm  # noqa: F401 - as where ranks are forked

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    multiprocessing.set_start_method(None, force=True)  # as in a script
    places.prepare()
    fresh = torch.initial_seed()
    if LINUX:  # one that is stopped would not see that tests have ended
        die_with_parent = 1
        ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
    while True:
        try:
            fn, args, place = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(fresh)  # whatever ran here before, and on the other ranks
        try:
            with places.at(place):
                found = places.home(fn(*args))
            pipe.send((True, found, _groups()))
        except BaseException:
            pipe.send((False, traceback.format_exc(), _groups()))


_MESHES: dict = {}
_CHANNELS: dict = {}


def _groups():
    """How many process groups this rank has beside the world's; each has three threads."""
    import torch.distributed as dist

    return len(dist.distributed_c10d._world.pg_map) - 1 if dist.is_initialized() else 0


def mesh(algorithm="1d", grid=None, replication=None, stages=1, fresh=False, **kwargs):
    """A mesh of this world, kept between tests, with a clean ledger."""
    import pyg_distcomm as pdc
    from pyg_distcomm.comm import mesh as grids

    key = (algorithm, grid, replication, stages)
    watch = _MESHES[key].world.watch if key in _MESHES else None
    # a failure of all ranks alike, in a test before
    failed = watch is not None and watch.reported_failure()
    if fresh or failed or key not in _MESHES:
        shape = {"grid": grid, "replication": replication, "stages": stages}
        made = pdc.init(algorithm, timeout=180, **shape, **kwargs)
        if fresh:
            return made
        _MESHES[key] = made
    kept = grids.remember(_MESHES[key])  # as if just made
    kept.ledger.reset()
    kept.seed, kept.step, kept.inputs = 0, 0, None
    return kept


def channel(mesh, c):
    """A channel of a kept mesh, kept as long as it is."""
    from pyg_distcomm.comm.axis import new_process_grid

    if (mesh, c) not in _CHANNELS:
        _CHANNELS[mesh, c] = new_process_grid(mesh, c)
    return _CHANNELS[mesh, c]


@atexit.register
def _close_all():
    for pool in _POOLS.values():
        pool.close()
