"""Joins the ranks of a run at the rendezvous store, and passes notes between them.

Notes need no collectives, so they also reach a rank when another has failed.

[Note: interface] Gloo listens at the address that the host's own name resolves to, unless
GLOO_SOCKET_IFNAME says otherwise. Debian resolves it to 127.0.1.1, where other hosts find
nobody. So where a run has several hosts, each rank takes the interface over which the
rendezvous is reached. On the host of the rendezvous itself that may be the loopback: then it
uses the address at which the other hosts reach it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pyg_distcomm.process import PROCESS

ENDED = (
    "the process groups of this mesh were ended, as by "
    "torch.distributed.destroy_process_group(); call that after the last use of the mesh, "
    "or go on with mesh.close() and a new mesh by pdc.init()"
)
SPARE = 5.0  # seconds after the deadline until torch's own timeouts
_CALL_TIMEOUT = 3.0  # seconds that a call of the store may take which may also fail
_BUSY_WAIT = 0.005  # seconds of waiting without a pause, for notes that compare clocks
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux's ioctl for the address of an interface


class RankError(RuntimeError):
    """Reports that another rank failed, or did not answer before the deadline."""

    # whether a wait timed out: rarely the cause, if another rank has failed
    late = False


class StoreMailbox:
    """Passes notes through the rendezvous store, in calls with a timeout.

    Calls without which a rank cannot go on have the timeout of the user, since a busy host
    may take seconds for one; others end soon, as the network may be cut.

    Args:
        store: the store of torch.
        patience: the timeout of a call in seconds.
    """

    def __init__(self, store: Any, patience: float = _CALL_TIMEOUT) -> None:
        self._store, self._patience = store, patience
        self._stuck: Future[Any] | None = None

    def set(self, key: str, value: str | bytes) -> None:
        """Stores a value."""
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        """Returns a value that is known to be stored."""
        return self._call("get", key)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, and returns its value."""
        return self._call("add", key, amount)

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys are stored."""
        return self._call("check", keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Stores a value if the present one is as expected; returns the value then stored."""
        return self._call("compare_set", key, expected, value)

    def within(self, prefix: str) -> StoreMailbox:
        """Returns the part of this store under a prefix."""
        return StoreMailbox(dist.PrefixStore(prefix, self._store), self._patience)  # type: ignore[attr-defined]

    def patient(self, seconds: float = _CALL_TIMEOUT) -> StoreMailbox:
        """Returns this store with another timeout; its stuck calls do not count here."""
        return StoreMailbox(self._store, seconds)

    def post(self, key: str, note: Any) -> None:
        """Stores a note: a plain value, as JSON."""
        self.set(key, json.dumps(note))

    def read(self, key: str) -> Any:
        """Returns a note that is known to be stored."""
        return json.loads(self.get(key))

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Returns the keys that are not stored yet."""
        return [key for key in keys if not self.check([key])]

    def wait(self, keys: Sequence[str], should_stop: Callable[[float], bool]) -> bool:
        """Waits until all keys are stored, and returns whether they are.

        Args:
            keys: the keys of notes.
            should_stop: called repeatedly with the seconds waited; returns whether to stop.
        """
        begin, pause = time.monotonic(), 1e-4

        def stop() -> bool:
            return should_stop(time.monotonic() - begin)

        while not self._call("check", list(keys), until=stop):
            if time.monotonic() - begin < _BUSY_WAIT:
                continue
            if stop():
                return not self.patient().missing(keys)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return True

    def _call(
        self, verb: str, *args: Any, until: Callable[[], bool] | None = None
    ) -> Any:
        """Calls the store; for longer than its patience, it asks every few seconds `until`."""
        if self._stuck is not None and not self._stuck.done():
            raise self._no_answer(verb)
        answer = _run_in_thread(partial(getattr(self._store, verb), *args))
        patience = self._patience if until is None else _CALL_TIMEOUT
        while not _has_ended(answer, patience):
            if until is None or until():
                self._stuck = answer
                raise self._no_answer(verb)
        return answer.result()

    def _no_answer(self, verb: str) -> RankError:
        return RankError(
            f"the rendezvous store does not answer ({verb} took {self._patience:.0f} s): "
            "the network to the host of rank 0 may be cut, or that host may have stopped"
        )


def _run_in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Calls a function in a thread that does not keep the process; returns its future."""
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer


def _has_ended(answer: Future[Any], timeout: float) -> bool:
    return bool(wait([answer], timeout).done)


def world_size() -> int:
    """Returns the number of ranks, with or without a mesh."""
    return dist.get_world_size() if dist.is_initialized() else 1


def latest_mesh() -> Any:
    """Returns the latest mesh of `init` if it is open and has the present ranks; else None."""
    found = None if PROCESS.mesh is None else PROCESS.mesh()
    if found is None or found.everyone.size != world_size():
        return None
    watch = found.everyone.watch
    return None if watch is not None and watch.closed else found


def default_backend() -> str:
    """Returns NCCL and gloo if each rank of this host has its own device, else gloo."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if dist.is_nccl_available() and here <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def chosen_device(asked: Any) -> torch.device:
    """Returns the device where this rank computes: the given one, or the default.

    "cuda" without an index is the device of LOCAL_RANK; ranks share devices on a host that
    has fewer.

    Raises:
        ValueError: if this process does not see such a device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if asked is None:
        over_nccl = dist.is_initialized() and "nccl" in str(dist.get_backend_config())
        own = over_nccl and count
        return torch.device("cuda", local % count) if own else torch.device("cpu")
    try:
        found = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device must name a device, as 'cuda:0', got {asked!r}"
        ) from error
    if found.type == "cuda" and (found.index or 0) >= count:
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise ValueError(
            f"device={asked!r}: rank {rank}, on {socket.gethostname()}, sees {count} CUDA "
            "devices; give a device that every rank has, or start fewer ranks on a host"
        )
    if found.type == "cuda" and found.index is None:
        launched = "LOCAL_RANK" in os.environ
        return torch.device(
            "cuda", local % count if launched else torch.cuda.current_device()
        )
    return found


def check_launched() -> None:
    """Raises, or warns, if this process would train alone though several ranks seem intended.

    Raises:
        ValueError: if a launcher has started several processes, and RANK, WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT do not tell them of each other.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    counts = {name: _int_from_environment(name) for name in ("WORLD_SIZE", *_LAUNCHERS)}
    several = [name for name, count in counts.items() if count > 1]
    alone = missing and not dist.is_initialized()
    if alone and ("RANK" in os.environ or several):
        shown = [f"{n}={os.environ[n]}" for n in ("RANK", *several) if n in os.environ]
        raise ValueError(
            f"{', '.join(shown)}: several ranks are meant, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so this process would train "
            f"alone. {START}"
        )
    if alone and _int_from_environment("SLURM_NTASKS") > 1:
        warnings.warn(
            f"SLURM_NTASKS={os.environ['SLURM_NTASKS']}, but this process trains alone: "
            f"the script was started without srun and torchrun. {START}",
            stacklevel=5,
        )


# variables by which srun, mpirun and mpiexec give the number of processes
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
START = (
    "Start the script by torchrun --nproc-per-node N script.py (under SLURM, one torchrun "
    "on each node: srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES ...)"
)


def _int_from_environment(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def join(backend: str, timeout: float) -> None:
    """Creates torch's default process group of the ranks that a launcher has started.

    Raises:
        RankError: if some rank has not come after `timeout` seconds, or cannot be reached.
    """
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    patience = timedelta(seconds=timeout)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
    except dist.DistError as error:
        raise RankError(
            f"the ranks have not met at {where} within {timeout:.0f} s: a process ended "
            f"before pdc.init, was not started, or cannot reach {where}. {error}"
        ) from None
    prefix = _new_session(StoreMailbox(store, timeout), rank, size, timeout)
    store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    gather_notes(StoreMailbox(store, timeout), "run", rank, size, timeout)
    if "gloo" in backend:
        _choose_interface(StoreMailbox(store, timeout), rank, size, timeout)
    named = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]
    span = patience + timedelta(seconds=SPARE)
    how = {"store": named, "rank": rank, "world_size": size, "timeout": span}
    _connect(partial(dist.init_process_group, backend, **how), rank, timeout)


def open_group(
    ranks: Sequence[int], backend: str | None, deadline: float
) -> dist.ProcessGroup:
    """Creates a process group; collective over all ranks of the run.

    Raises:
        RankError: if the ranks have not connected by the deadline.
    """
    if not dist.is_initialized():
        raise RankError(ENDED)
    span = timedelta(seconds=deadline + SPARE)
    make = partial(dist.new_group, list(ranks), timeout=span, backend=backend)
    return _connect(make, dist.get_rank(), deadline)


def _connect(function: Callable[[], Any], rank: int, timeout: float) -> Any:
    """Connects ranks within a timeout; an error says what to do."""
    # gloo tries five times, each as long as the timeout
    answer, why = _run_in_thread(function), "Gloo is still trying."
    if _has_ended(answer, timeout):
        try:
            return answer.result()
        except RuntimeError as error:
            why = str(error)
    raise RankError(
        f"rank {rank} could not connect to all others within {timeout:.0f} s: one has "
        f"ended, or its address cannot be reached from here. {_advice()} {why}"
    )


def _new_session(store: StoreMailbox, rank: int, size: int, timeout: float) -> str:
    """Returns a new key prefix for this start of the ranks, the same on all ranks.

    [Note: sessions] After a restart, or after a script has destroyed its groups, the store
    still holds old addresses. Restart counts do not tell starts apart: torchrun counts them
    for each host, and a host that lost no process counts none. So every rank stores a random
    id, rank 0 proposes a name beside the ids that it has seen, and takes it once each rank
    has found its own id there and agreed.

    Raises:
        RankError: if some have not come after `timeout` seconds; it names them.
    """
    base, mark = "pyg_distcomm/start", uuid.uuid4().hex
    marks = [f"{base}/rank/{r}" for r in range(size)]
    seen: list[str] | None = None
    name = ""
    store.post(marks[rank], mark)
    begin = time.monotonic()
    while True:
        if rank == 0 and store.check(marks):
            found = [store.read(key) for key in marks]
            if found != seen:
                seen, name = found, uuid.uuid4().hex
                store.post(f"{base}/proposed", [name, found])
            agreed = [f"{base}/{name}/agreed/{r}" for r in range(1, size)]
            if not agreed or store.check(agreed):
                store.post(f"{base}/{name}/taken", "")
                return f"{base}/{name}"
        elif rank and store.check([f"{base}/proposed"]):
            proposed, found = store.read(f"{base}/proposed")
            if found[rank : rank + 1] == [mark]:
                if proposed != name:
                    name = proposed
                    store.post(f"{base}/{name}/agreed/{rank}", "")
                if store.check([f"{base}/{name}/taken"]):
                    return f"{base}/{name}"
        if time.monotonic() - begin > timeout:
            agreed = [f"{base}/{name}/agreed/{r}" for r in range(1, size)]
            late = store.missing(marks) or (name and store.missing(agreed)) or marks[:1]
            late = [k.rpartition("/")[2] for k in late]
            raise _missing_ranks_error(
                rank, size, timeout, [r for r in late if r != str(rank)]
            )
        time.sleep(0.005 if time.monotonic() - begin < 1 else 0.05)


def _missing_ranks_error(
    rank: int, size: int, timeout: float, late: Sequence[str]
) -> RankError:
    return RankError(
        f"rank {rank} waited {timeout:.0f} s in pdc.init, and rank(s) {', '.join(late)} of "
        f"{size} did not come: their processes ended before, were not started, or are "
        "slow; then raise `timeout`"
    )


def gather_notes(
    store: StoreMailbox, name: str, rank: int, size: int, timeout: float, note: Any = ""
) -> list[Any]:
    """Posts a note, waits for the notes of all ranks, and returns them.

    Raises:
        RankError: if some have not after `timeout` seconds; it names them.
    """
    keys = [f"pyg_distcomm/{name}/{r}" for r in range(size)]
    store.post(keys[rank], note)
    if not store.wait(keys, lambda seconds: seconds > timeout):
        missing = [key.rpartition("/")[2] for key in store.missing(keys)]
        raise _missing_ranks_error(rank, size, timeout, missing)
    return [store.read(key) for key in keys]


def _choose_interface(
    store: StoreMailbox, rank: int, size: int, timeout: float
) -> None:
    """Makes gloo use the interface that reaches the rendezvous: see [Note: interface]."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    mine, there = _route()
    note = {"alone": here >= size, "there": there}
    notes = gather_notes(store, "address", rank, size, timeout, note)
    if all(note["alone"] for note in notes) or _INTERFACE_VARIABLE in os.environ:
        return
    if mine.startswith("127."):
        known = [n["there"] for n in notes if not n["there"].startswith("127.")]
        mine = next(filter(None, known), mine)
    found = _interfaces().get(mine)
    if found is not None:
        os.environ[_INTERFACE_VARIABLE] = found


def _route() -> tuple[str, str]:
    """Returns this host's address on the way to the rendezvous, and the rendezvous' address."""
    with contextlib.suppress(OSError, KeyError):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        there = socket.getaddrinfo(host, port, socket.AF_INET)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing
            return probe.getsockname()[0], str(there[0])
    return "", ""


def _interfaces() -> dict[str, str]:
    """Returns this host's interfaces by address, on Linux."""
    found: dict[str, str] = {}
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                asked = struct.pack("256s", name.encode()[:15])
                with contextlib.suppress(OSError):  # it has no address
                    reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)
                    found[socket.inet_ntoa(reply[20:24])] = name
    return found


def _advice() -> str:
    """Returns advice on the interface over which gloo listens."""
    others = {a: n for a, n in _interfaces().items() if not a.startswith("127.")}
    best = others.get(_route()[0])
    values = [best] if best else list(others.values())
    listed = (
        " or ".join(f"{_INTERFACE_VARIABLE}={value}" for value in values)
        or f"{_INTERFACE_VARIABLE}"
    )
    if _INTERFACE_VARIABLE in os.environ:
        chosen = os.environ[_INTERFACE_VARIABLE]
        now = f"{_INTERFACE_VARIABLE}={chosen} makes gloo listen on that interface"
    else:
        with contextlib.suppress(OSError):
            name = socket.gethostname()
            now = f"{name} resolves to {socket.gethostbyname(name)}, where gloo listens"
    return f"Here {now}; if other hosts cannot reach it, set {listed}."
