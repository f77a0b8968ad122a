"""Compiles each loop once, also when several processes start together.

[Note: compiled apart] Numba keeps the exceptions that it meets while it compiles, with
their tracebacks, and these hold every frame below: the caller's graph, its model, its
process groups. So loops are compiled in a thread of their own, below which nothing lies.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, TypeVar, cast

import numba

from pyg_distcomm.kernels.core_jit import jit

Loop = TypeVar("Loop", bound=Callable[..., Any])
PATIENCE = 120.0  # seconds to wait for another process before compiling as well

Signature = tuple[Any, ...]
_known: set[tuple[int, Signature]] = set()


def ready(loop: Any, args: tuple[Any, ...], integers: int = 0) -> Callable[..., Any]:
    """Binds ``args`` to a loop that is compiled for them and ``integers`` more."""
    key = (id(loop), tuple(_kind(arg) for arg in args))
    if key not in _known:
        types = [numba.typeof(arg) for arg in args] + [numba.int64] * integers
        _compile_apart(loop, tuple(types))
        _known.add(key)
    return partial(loop, *args)


def entry(loop: Loop) -> Loop:
    """Declares a loop for Python to call, not for other loops: see `ready`."""
    compiled = jit(loop)

    @wraps(loop)
    def call(*args: Any) -> Any:
        types = tuple(numba.typeof(arg) for arg in args)
        if (id(compiled), types) not in _known:
            _compile_apart(compiled, types)
            _known.add((id(compiled), types))
        return compiled(*args)

    return cast(Loop, call)


def _compile_apart(loop: Any, types: tuple[Any, ...]) -> None:
    """Compiles in a thread of its own; see [Note: compiled apart]."""
    with ThreadPoolExecutor(1) as own:
        try:
            done = own.submit(_compile, loop, types)
        except RuntimeError:  # Python begins to end, and no thread begins any more
            return _compile(loop, types)
    return done.result()


def _compile(loop: Any, types: tuple[Any, ...]) -> None:
    with _alone(cache_folder(loop)):
        loop.compile(types)


def cache_folder(loop: Any) -> str | None:
    """Returns where Numba keeps a compiled loop on disk, if it does."""
    folder: str | None = loop.stats.cache_path
    return folder


def _kind(arg: Any) -> object:
    """Returns what the compiled type of an argument depends on."""
    return getattr(arg, "dtype", None) or (
        len(arg) if isinstance(arg, tuple) else type(arg)
    )


@contextlib.contextmanager
def _alone(folder: str | None) -> Iterator[None]:
    """Holds a file lock in Numba's cache folder, where there is one to hold.

    The first process compiles and writes the cache; the others wait and read it.
    A folder that cannot be written, or a system without file locks, waits for nobody.
    """
    file = _lock_file(folder)
    if file is None:
        yield
        return
    try:
        _lock(file)
        yield
    finally:
        os.close(file)


def _lock_file(folder: str | None) -> int | None:
    if folder is None:
        return None
    try:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, "pyg_distcomm.lock")
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except (OSError, ValueError):
        return None


def _lock(file: int) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return
