"""Writes files and folders atomically, whole or not at all, and deletes only what it wrote.

[Note: whole folders] A writer fills `.NAME.writing-TOKEN` beside NAME; the token names the
process. Once all files are on the disk, the folder is exchanged with NAME in one step
(`renameat2` of Linux), so that NAME always exists. If the file system cannot exchange, the old
folder is renamed to `.NAME.old-TOKEN` first, and a kill between the two steps leaves no NAME;
`newest` then returns the old folder, and the next write puts it back. What an unfinished write
leaves is removed only after its process has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import os
import pickle
import re
import secrets
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch

_FORGOTTEN = 86400.0  # seconds after which another host's unfinished folder is removed
_BEHIND = re.compile(r"\.(writing|old)-(.+)-(\d+)-[0-9a-f]{8}")
_AT_CWD, _EXCHANGE = -100, 2  # arguments of renameat2


@contextlib.contextmanager
def new_folder(
    place: Path,
    check: Callable[[], None],
    is_whole: Callable[[Path], bool],
    is_ours: Callable[[Path], bool],
) -> Iterator[Path]:
    """Yields a folder to write in, and renames it to `place` at the end.

    What was there stays until then. See [Note: whole folders].

    Args:
        place: the path.
        check: raises if what is there must not be replaced.
        is_whole: returns whether a folder was written to its end, and may be put back.
        is_ours: returns whether one is a writer's, maybe half written, and may be removed.
    """
    left = None if os.path.lexists(place) else newest(place, ended=True)
    if left is not None and is_whole(left):
        os.rename(left, place)
    for left, name in leftovers(place).items():
        if _writer_has_ended(left, name) and is_ours(left):
            _remove(left)
    check()
    writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    aside = place.with_name(f".{place.name}.writing-{writer}")
    try:
        aside.mkdir(parents=True)
        yield aside
        check()  # again: another process may have written it meanwhile
        if os.path.lexists(place):
            _remove(_exchange(aside, place))
        else:
            os.rename(aside, place)
        sync(place.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def leftovers(place: Path) -> dict[Path, re.Match[str]]:
    """Returns the writers' folders beside a place, each with what follows the place's name."""
    begin, found = f".{place.name}", {}
    for path in place.parent.glob(f"{glob.escape(begin)}.*-*"):
        name = _BEHIND.fullmatch(path.name.removeprefix(begin))
        if name is not None:
            found[path] = name
    return found


def newest(place: Path, ended: bool = False) -> Path | None:
    """Returns the whole folder that a writer left beside its place, if there is one.

    With `ended`, only those of ended writers count: a running one may be about to rename it.
    """
    left = [
        (_written_at(path), path)
        for path, name in leftovers(place).items()
        if name[1] == "old" and (not ended or _writer_has_ended(path, name))
    ]
    return max(left)[1] if left else None


def _writer_has_ended(left: Path, name: re.Match[str]) -> bool:
    """Returns whether the writer of a folder has ended; after a day on another host, yes."""
    host, process = name[2], int(name[3])
    if host != socket.gethostname():
        return left.exists() and time.time() - _written_at(left) > _FORGOTTEN
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # the process is another user's, and alive
        pass
    return False


def _exchange(aside: Path, place: Path) -> Path:
    """Exchanges two folders, in one step if possible; returns where the old one is."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(aside), os.fsencode(place)
        if libc.renameat2(_AT_CWD, names[0], _AT_CWD, names[1], _EXCHANGE) == 0:
            return aside
    except (OSError, AttributeError):
        pass
    begin = f".{place.name}"
    written = aside.name.removeprefix(f"{begin}.writing-")
    old = aside.with_name(f"{begin}.old-{written}")
    os.rename(place, old)
    try:
        os.rename(aside, place)
    except BaseException:
        os.rename(old, place)
        raise
    return old


def _remove(path: Path) -> None:
    """Removes a folder, or a link but not its target; the next write retries if that fails."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # its writer has just renamed it
        return 0.0


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder if the system can, to the disk."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a path beside `path` to write to; the file there then replaces that at `path`.

    An error of the file names `path`. If the block raises, the old file stays.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield aside
        os.replace(aside, path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(aside)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


class Output:
    """Forwards writes to a file; NumPy and torch lose the error of one that they write to."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write_error: OSError | None = None
        self._file = file

    def write(self, part: Any) -> int:
        try:
            return int(self._file.write(part))
        except OSError as error:
            self.write_error = self.write_error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def torch_save(value: Any, file: IO[bytes]) -> None:
    """Writes a value as torch.save does; raises OSError if the disk cannot store it."""
    output = Output(file)
    try:
        torch.save(value, cast("IO[bytes]", output))
        output.flush()
    except RuntimeError:
        if output.write_error is None:
            raise
        raise output.write_error from None


def write_whole(path: Path, value: Any) -> None:
    """Saves a value in a file, and waits until it is on the disk."""
    with open(path, "wb") as file:
        torch_save(value, file)
    sync(path)


def read_whole(path: Path, mmap: bool = False) -> Any:
    """Reads a value that `write_whole` saved, as data, with its tensors on the CPU.

    Raises:
        ValueError: naming the file, if it cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        why = [*str(error).splitlines(), type(error).__name__][0]
        raise ValueError(
            f"{path}: cannot be read ({why}); remove it, or save it anew"
        ) from error


def keep_file(value: Any, path: Path, what: str) -> None:
    """Saves a value in a file for later runs, whole or not at all; warns if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as aside:
            write_whole(aside, value)
    except OSError as error:
        warnings.warn(
            f"{what} are not kept: {write_problem(error, path)}", stacklevel=2
        )


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    state = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def add_line(path: Path, line: str) -> None:
    """Adds a line to the end of a file, whole or not at all; an OSError names the file.

    A line before it that a kill has cut short is ended first.
    """
    data = line.encode()
    with open(path, "a+b", buffering=0) as file:
        if end := file.tell():
            file.seek(end - 1)
            data = data if file.read(1) == b"\n" else b"\n" + data
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            file.truncate(end)
            raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def explaining_disk(path: Path) -> Iterator[None]:
    """Raises a ValueError, which says what to do, if a file at `path` cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(write_problem(error, path)) from error


def write_problem(error: BaseException, path: Path) -> str:
    """Explains in one line why a file could not be written, and what to do."""
    where = getattr(error, "filename", None) or path
    # the file that is meant, not the one beside it that was to replace it
    where = re.sub(r"/\.([^/]+)\.writing-[^/]+", r"/\1", str(where))
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    reason = reason.splitlines()[0]
    return f"save elsewhere, or make room and allow writing: {where}: {reason}"


def disk_error(folder: Path) -> OSError | None:
    """Tries to write to a folder; returns the error of a disk that is full or read-only."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None
