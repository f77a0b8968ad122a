"""Compiles each loop once, also when several processes start together.

[Note: compiled apart] Numba keeps the exceptions that it meets while it compiles, with
their tracebacks, and these hold every frame below: the caller's graph, its model, its
process groups. So loops are compiled in a thread of their own, below which nothing lies.

[Note: who may write the cache] Numba keeps compiled loops as pickles, so whoever can write to
their folder can run code in the processes that load them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numba
from numba import njit

from pyg_distcomm.kernels.state import KERNELS

Loop = TypeVar("Loop", bound=Callable[..., Any])
PATIENCE = 120.0  # seconds to wait for another process before compiling as well

Array: TypeAlias = Any  # of one dimension, contiguous
OURS = Path(__file__).resolve().parent

Signature = tuple[Any, ...]


def jit(loop: Loop) -> Loop:
    """Declares a loop that is compiled at its first call, and kept on disk.

    Where Numba finds no folder it may write to, or others can write to that folder, the
    loop is kept in memory only. What is kept is used again while the loop's own file and
    all kernels, which it may contain, are as they were: see `_sources`.
    """
    plain: Any = njit(nogil=True, error_model="numpy")(loop)
    try:
        kept: Any = njit(nogil=True, cache=True, error_model="numpy")(loop)
        other = untrusted_writer(kept.stats.cache_path)
        index = kept._cache._cache_file
        index._source_stamp = (index._source_stamp, SOURCES)
    except (RuntimeError, AttributeError):
        return cast(Loop, plain)
    if other is not None:
        warnings.warn(
            f"compiled loops are not kept, because {other}; set NUMBA_CACHE_DIR to a folder "
            "of your own, which nobody else can write to",
            stacklevel=2,
        )
        return cast(Loop, plain)
    return cast(Loop, kept)


def reordering(loop: Loop) -> Loop:
    """Declares a loop whose sums may be taken in another order, so in vectors.

    The order is fixed when compiling: bits do not depend on threads. Never cached
    on its own, since its callers contain it.
    """
    compiled: Any = njit(fastmath={"reassoc", "contract"}, error_model="numpy")(loop)
    return cast(Loop, compiled)


def _sources() -> str:
    """Returns a hash of the source of all kernels.

    Numba looks at the file of a loop alone, not at those of the loops that it contains.
    """
    known = hashlib.blake2b(digest_size=16)
    for path in sorted(OURS.glob("*.py")):
        known.update(path.read_bytes())
    return known.hexdigest()


SOURCES = _sources()


def ready(loop: Any, args: tuple[Any, ...], integers: int = 0) -> Callable[..., Any]:
    """Binds ``args`` to a loop that is compiled for them and ``integers`` more."""
    key = (id(loop), tuple(_kind(arg) for arg in args))
    if key not in KERNELS.compiled:
        types = [numba.typeof(arg) for arg in args] + [numba.int64] * integers
        _compile_apart(loop, tuple(types))
        KERNELS.compiled.add(key)
    return partial(loop, *args)


def entry(loop: Loop) -> Loop:
    """Declares a loop for Python to call, not for other loops: see `ready`."""
    compiled = jit(loop)

    @wraps(loop)
    def call(*args: Any) -> Any:
        types = tuple(numba.typeof(arg) for arg in args)
        if (id(compiled), types) not in KERNELS.compiled:
            _compile_apart(compiled, types)
            KERNELS.compiled.add((id(compiled), types))
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


def untrusted_writer(folder: str | Path) -> str | None:
    """Says who else can write to a folder or rename it, if somebody can.

    The user, root, and whoever can write this package's source are trusted. Folders that do
    not exist yet are judged by those above them.
    """
    if not hasattr(os, "getuid"):
        return None  # Windows keeps users' folders apart
    path = Path(os.path.abspath(folder))
    trusted = {0, os.getuid(), OURS.stat().st_uid}
    for place in (path, *path.parents):
        try:
            about = place.stat()
        except OSError:
            continue
        # where names are sticky others add their own, and can not replace ours
        shared = place != path and bool(about.st_mode & stat.S_ISVTX)
        if about.st_uid not in trusted:
            return f"{place} belongs to another user (uid {about.st_uid})"
        if about.st_mode & stat.S_IWOTH and not shared:
            return f"all users can write to {place}"
        if about.st_mode & stat.S_IWGRP and not shared and not _is_own(about.st_gid):
            return f"group {about.st_gid} can write to {place}"
    return None


def _is_own(gid: int) -> bool:
    """Says whether a group is the user's alone, or can write this package's source."""
    source = OURS.stat()
    if gid == 0 or (source.st_gid == gid and source.st_mode & stat.S_IWGRP):
        return True
    import grp
    import pwd

    try:
        name = pwd.getpwuid(os.getuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and not set(group.gr_mem) - {name}
