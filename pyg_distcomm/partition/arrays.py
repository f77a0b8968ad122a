"""Writes tensors as .npy files, without pickles, and folders beside their place.

A writer of a folder fills `.NAME.writing-TOKEN`, renames it to `.NAME.ready-TOKEN` once all of
it is on the disk, and exchanges that with what stands at NAME. The token names the writing
process, so that others can tell whether it is still at work.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import re
import secrets
import shutil
import socket
import struct
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_FORGOTTEN = 86400.0  # seconds after which another host's unfinished folder is removed
_PARTS = re.compile(r"(.*)\.(writing|ready|old|removing)-(.+-\d+-[0-9a-f]{8})")
_OWNER = re.compile(r"\.(?:writing|ready|old|removing)-(.+)-(\d+)-[0-9a-f]{8}$")


def new_token() -> str:
    """Returns a name of this process and moment."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def beside(place: Path, state: str, token: str) -> Path:
    """Names what belongs to a place in a state: "writing", "ready", "old" or "removing"."""
    return place.with_name(f".{place.name}.{state}-{token}")


def in_state(path: Path, state: str) -> Path:
    """Names the same writer's folder in another state."""
    name, _, token = _PARTS.fullmatch(path.name).groups()  # type: ignore[union-attr]
    return path.with_name(f"{name}.{state}-{token}")


def leftovers(place: Path, state: str) -> list[Path]:
    """Returns what writers have beside a place in a state."""
    found = place.parent.glob(f".{glob.escape(place.name)}.{state}-*")
    return [one for one in found if _OWNER.search(one.name)]


def newest(
    place: Path, wanted: Callable[[Path], bool] = lambda left: True
) -> Path | None:
    """Returns the folder that a killed writer left whole where nothing is in its place.

    Args:
        place: where it would be.
        wanted: which it may be; `is_over` for one that is renamed, since that of a writer
            at work is about to get its place.
    """
    for state in ("ready", "old"):
        left = [one for one in leftovers(place, state) if wanted(one)]
        if left:
            return max(left, key=lambda one: one.stat().st_mtime)
    return None


def clear(place: Path, is_ours: Callable[[Path], bool]) -> None:
    """Removes what writers that have ended left beside a place."""
    for state in ("writing", "ready", "old", "removing"):
        for left in leftovers(place, state):
            if is_over(left) and is_ours(left):
                shutil.rmtree(left, ignore_errors=True)


def is_over(left: Path) -> bool:
    """Returns whether the process that wrote a folder has ended, or never will go on."""
    host, pid = _OWNER.findall(left.name)[0]
    if host != socket.gethostname():
        return time.time() - left.stat().st_mtime > _FORGOTTEN
    if pid == str(os.getpid()):
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's, and alive
        pass
    return False


CHUNK = 1 << 20
_AT_CWD, _EXCHANGE = -100, 2  # of renameat2

# what NumPy has no name for is stored as unsigned integers of the same width
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def write_array(path: Path, tensor: Tensor) -> dict[str, str | int]:
    """Writes a tensor, flushed to the disk; returns the file's length and sha256."""
    array = _as_numpy(tensor)
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


class ArrayFile:
    """A .npy file of known dtype and shape that is written a piece at a time."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        """Writes its head, and makes it as long as it will be."""
        self._path, self._dtype = path, np.dtype(dtype).newbyteorder("=")
        with open(path, "wb") as file:
            np.lib.format.write_array_header_1_0(
                file,
                {
                    "descr": np.lib.format.dtype_to_descr(self._dtype),
                    "fortran_order": False,
                    "shape": shape,
                },
            )
            self._head = file.tell()
            file.truncate(self._head + int(np.prod(shape)) * self._dtype.itemsize)

    def write(self, at: int, array: np.ndarray) -> None:
        """Writes numbers, the first of them to the place `at` of the flat array."""
        # opened each time: there are two files a part, and a process may hold few
        with open(self._path, "r+b") as file:
            file.seek(self._head + at * self._dtype.itemsize)
            file.write(np.ascontiguousarray(array, self._dtype).tobytes())


def flush_files(folder: Path) -> dict[str, dict[str, str | int]]:
    """Flushes all .npy files below a folder; returns their lengths and sha256."""
    files: dict[str, dict[str, str | int]] = {}
    for path in sorted(folder.rglob("*.npy")):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    for inner in {path.parent for path in folder.rglob("*.npy")}:
        fsync_folder(inner)
    return files


def read_array(
    path: Path, dtype: str, shape: list[int] | tuple[int, ...], mmap: bool = True
) -> Tensor:
    """Reads a tensor; with `mmap`, pages come from the file when they are touched.

    A mapped tensor may be written to: the file does not change. Raises ValueError,
    naming the file, when it is missing, damaged, or not of this dtype and shape.
    """
    try:
        array = np.load(path, mmap_mode="c" if mmap else None, allow_pickle=False)
    except Exception as error:  # NumPy evaluates the head, and maps what it says
        raise ValueError(f"{path}: cannot be read: {error}") from None
    want = torch_dtype(dtype, path)
    if list(array.shape) != list(shape) or array.dtype != _stored(want):
        raise ValueError(
            f"{path}: holds {array.dtype} {list(array.shape)}, but META.json says "
            f"{dtype} {list(shape)}"
        )
    return torch.from_numpy(np.asarray(array)).view(want)


def dtype_name(dtype: torch.dtype) -> str:
    """Names a dtype without its prefix: "float32", "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str, path: Path) -> torch.dtype:
    """Finds a dtype by name; raises ValueError, naming the file, for an unknown one."""
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{path}: META.json gives it the unknown dtype {name!r}")
    return dtype


def sha256(path: Path) -> str:
    """Hashes a file."""
    state = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            state.update(chunk)
    return state.hexdigest()


def told(error: BaseException, path: Path) -> str:
    """Says why a file could not be written, and what to do."""
    where = getattr(error, "filename", None) or path
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"save elsewhere, or make room and allow writing: {where}: {reason}"


def exchange(ready: Path, place: Path) -> None:
    """Lets two folders change places, in one step where the system can."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(ready), os.fsencode(place)
        if libc.renameat2(_AT_CWD, names[0], _AT_CWD, names[1], _EXCHANGE) == 0:
            return
    except (OSError, AttributeError):
        pass
    old = in_state(ready, "old")
    os.rename(place, old)
    try:
        os.rename(ready, place)
    except BaseException:
        os.rename(old, place)
        raise
    os.rename(old, ready)


def fsync_folder(path: Path) -> None:
    """Makes the names in a folder last, where the system can (Windows cannot)."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _stored(dtype: torch.dtype) -> np.dtype:
    empty = torch.empty(0, dtype=dtype)
    try:
        return np.dtype(empty.numpy().dtype)
    except TypeError:
        return np.dtype(BITS[empty.element_size()])


def _as_numpy(tensor: Tensor) -> np.ndarray:
    plain = tensor.detach().as_subclass(Tensor).cpu().contiguous()
    stored = _stored(plain.dtype)
    if plain.numel() == 0:
        return np.empty(tuple(plain.shape), stored)
    try:
        return plain.numpy()
    except TypeError:
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits: np.ndarray = plain.view(width[plain.element_size()]).numpy()
        return bits.view(stored)


_BAD_ZIP = (zipfile.BadZipFile, zlib.error)
_BAD_VALUES = (RuntimeError, OSError, ValueError, struct.error)


def check_saved(path: Path) -> None:
    """Refuses a file of torch.save that is damaged, or a program; torch looks at neither.

    Raises:
        ValueError: naming the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            names = [name.partition("/")[2] for name in archive.namelist()]
        # torch has a reader of its own, which can be given another table of contents
        records = torch._C.PyTorchFileReader(str(path)).get_all_records()
    except (*_BAD_ZIP, EOFError, NotImplementedError, *_BAD_VALUES) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if sorted(records) != sorted(names):
        raise ValueError(f"{path}: cannot be read: its tables of contents differ")
    if damaged is not None:
        raise ValueError(f"{path}: cannot be read: {damaged} was altered (CRC-32)")
    if any(name == "constants.pkl" or name.startswith("code/") for name in names):
        raise ValueError(
            f"{path}: holds TorchScript, which is a program and is not run; save tensors "
            "with torch.save"
        )


def is_archive(path: Path) -> bool:
    """Returns whether a file is a zip archive, also a damaged one."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True
