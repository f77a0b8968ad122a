"""Brings the ranks of a run together, and finds the interface over which they can talk.

[Note: interface] Gloo listens at the address that the host's own name resolves to, unless
GLOO_SOCKET_IFNAME says otherwise. Debian resolves it to 127.0.1.1, where other hosts find
nobody. So where a run has several hosts, each rank takes the interface over which the
rendezvous is reached. On the host of the rendezvous that may seem to be the loopback: then
the address counts at which the other hosts have found it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from pyg_distcomm.comm.failure import ENDED, SPARE, DeadlineStore, RankError, ask

_NAME = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF = 0x8915  # Linux's SIOCGIFADDR


def join(backend: str, timeout: float) -> None:
    """Makes torch's default process group of the ranks that a launcher has started.

    Raises:
        RankError: if some rank has not come after `timeout` seconds, or cannot be reached.
    """
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    wait = timedelta(seconds=timeout)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=wait))  # type: ignore[attr-defined]
    except dist.DistError as error:
        raise RankError(
            f"the ranks have not met at {where} within {timeout:.0f} s: a process ended "
            f"before pdc.init, was not started, or cannot reach {where}. {error}"
        ) from None
    # a store outlives ranks before a restart, and groups that a script has ended, and
    # their addresses are in it
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    joined = f"pyg_distcomm/attempt/{attempt}/rank/{rank}"
    times = DeadlineStore(store).add(joined, 1)
    prefix = f"pyg_distcomm/attempt/{attempt}/{times}"
    store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    arrive(DeadlineStore(store), "run", rank, size, timeout)
    if "gloo" in backend:
        _choose_interface(DeadlineStore(store), rank, size, timeout)
    named = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]
    span = wait + timedelta(seconds=SPARE)
    how = {"store": named, "rank": rank, "world_size": size, "timeout": span}
    _connect(partial(dist.init_process_group, backend, **how), rank, timeout)


def open_group(
    ranks: Sequence[int], backend: str | None, deadline: float
) -> dist.ProcessGroup:
    """Makes a process group; collective over all ranks of the run.

    Raises:
        RankError: if the ranks have not connected by the deadline.
    """
    if not dist.is_initialized():
        raise RankError(ENDED)
    span = timedelta(seconds=deadline + SPARE)
    make = partial(dist.new_group, list(ranks), timeout=span, backend=backend)
    return _connect(make, dist.get_rank(), deadline)


def _connect(act: Callable[[], Any], rank: int, timeout: float) -> Any:
    """Connects ranks; says what to do if that fails, or is not done in time."""
    # gloo tries five times, each as long as the timeout
    answer: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
    threading.Thread(target=ask, args=(act, (), answer), daemon=True).start()
    try:
        done, value = answer.get(timeout=timeout)
    except Empty:
        done, value = False, "Gloo is still trying."
    if done:
        return value
    if not isinstance(value, (str, dist.DistError, RuntimeError)):
        raise value
    raise RankError(
        f"rank {rank} could not connect to all others within {timeout:.0f} s: one has "
        f"ended, or its address cannot be reached from here. {_advice()} {value}"
    )


def arrive(
    store: DeadlineStore,
    name: str,
    rank: int,
    size: int,
    timeout: float,
    note: Any = "",
) -> list[Any]:
    """Waits until all ranks have come to a place, and returns their notes.

    Raises:
        RankError: if some have not after `timeout` seconds; it names them.
    """
    keys = [f"pyg_distcomm/{name}/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(note))
    stop, pause = time.monotonic() + timeout, 0.001
    while not store.check(keys):
        if time.monotonic() > stop:
            missing = [str(r) for r, key in enumerate(keys) if not store.check([key])]
            raise RankError(
                f"rank {rank} waited {timeout:.0f} s in pdc.init, and rank(s) "
                f"{', '.join(missing)} of {size} did not come: their processes ended "
                "before, were not started, or are slow; then raise `timeout`"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return [json.loads(store.get(key)) for key in keys]


def _choose_interface(
    store: DeadlineStore, rank: int, size: int, timeout: float
) -> None:
    """Has gloo use the interface that reaches the rendezvous: see [Note: interface]."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    mine, there = _route()
    note = {"alone": here >= size, "there": there}
    notes = arrive(store, "address", rank, size, timeout, note)
    if all(note["alone"] for note in notes) or _NAME in os.environ:
        return
    if mine.startswith("127."):
        known = [n["there"] for n in notes if not n["there"].startswith("127.")]
        mine = next(filter(None, known), mine)
    found = _interfaces().get(mine)
    if found is not None:
        os.environ[_NAME] = found


def _route() -> tuple[str, str]:
    """Returns the address from which the rendezvous is reached, and its own."""
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
                    told = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, asked)
                    found[socket.inet_ntoa(told[20:24])] = name
    return found


def _advice() -> str:
    """Says over which interface gloo listens, and which to try."""
    others = {a: n for a, n in _interfaces().items() if not a.startswith("127.")}
    best = others.get(_route()[0])
    values = [best] if best else list(others.values())
    listed = " or ".join(f"{_NAME}={value}" for value in values) or f"{_NAME}"
    if _NAME in os.environ:
        now = f"{_NAME}={os.environ[_NAME]} says over which interface"
    else:
        with contextlib.suppress(OSError):
            name = socket.gethostname()
            now = f"{name} resolves to {socket.gethostbyname(name)}, where"
    return f"Of this host, {now} gloo listens; if other hosts cannot reach that, set {listed}."
