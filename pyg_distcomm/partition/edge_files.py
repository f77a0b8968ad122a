"""Reads edges and attributes from .npy and .npz files, in chunks."""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import torch
from tqdm import tqdm

from pyg_distcomm.partition.cutters import CHUNK
from pyg_distcomm.partition.layout import dtype_name

BYTES = 1 << 24  # bytes of attribute rows in memory at once
MOST_NODES = 2**31 - 1
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # with which spreadsheets begin a file
BAD_FILE = (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile)

Opener = Callable[[], IO[bytes]]


def ending(path: Path) -> str:
    """Returns the suffix of a name in small letters, that before .gz if it is compressed."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


@contextlib.contextmanager
def opened(name: str, opener: Opener) -> Iterator[IO[bytes]]:
    """Opens a file for reading; turns errors inside into ValueErrors that name it."""
    try:
        with opener() as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{name}: missing") from None
    except BAD_FILE as error:
        if str(error).startswith(name):
            raise
        raise ValueError(f"{name}: cannot be read: {error}") from None


def plain_opener(path: Path) -> Opener:
    """Returns an opener of a file, through gzip if its name ends in .gz."""
    if path.suffix.lower() == ".gz":
        return lambda: gzip.open(path, "rb")  # type: ignore[return-value]
    return lambda: open(path, "rb")


def member_opener(path: Path, member: str) -> Opener:
    """Returns an opener of a member of an .npz file."""

    def opener() -> IO[bytes]:
        with zipfile.ZipFile(path) as archive:
            file: Any = archive.open(member)
            file.uncompressed_size = archive.getinfo(member).file_size
            return cast(IO[bytes], file)

    return opener


@dataclass(frozen=True)
class NpyHead:
    """Holds the header of a .npy file and its length in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran: bool
    size: int

    @staticmethod
    def read(name: str, opener: Opener) -> NpyHead:
        """Reads the header; raises ValueError, naming the file."""
        with opened(name, opener) as file:
            try:
                version = np.lib.format.read_magic(file)
            except ValueError:
                raise ValueError(
                    f"{name}: is not an .npy file; save the array by numpy.save"
                ) from None
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }.get(version)
            if read is None:
                raise ValueError(f"{name}: .npy version {version} is not known")
            try:
                shape, fortran, dtype = read(file)
            except BAD_FILE:
                raise
            except Exception as error:  # NumPy evaluates what the head says
                raise ValueError(f"{name}: cannot be read: {error}") from None
            header = NpyHead(dtype, shape, fortran, file.tell())
            header.check(name, _length(file))
            return header

    def check(self, name: str, length: int | None) -> None:
        """Raises ValueError unless the array fits a file of this length."""
        if self.dtype.hasobject:
            raise ValueError(f"{name}: holds Python objects; save plain numbers")
        if any(isinstance(size, bool) or size < 0 for size in self.shape):
            raise ValueError(
                f"{name}: its header has the shape {self.shape}, wanted sizes of at least 0; "
                "save the array again by np.save"
            )
        want = self.size + math.prod(self.shape) * self.dtype.itemsize
        if length is not None and length != want:
            raise ValueError(
                f"{name}: has {length} bytes, but its header says {self.dtype} "
                f"{list(self.shape)}, which are {want}; save the array again by np.save"
            )


def _length(file: IO[bytes]) -> int | None:
    """Returns the uncompressed length of a file, None if it is unknown."""
    if isinstance(file, gzip.GzipFile):
        return None
    uncompressed_size: int | None = getattr(file, "uncompressed_size", None)
    return (
        os.fstat(file.fileno()).st_size
        if uncompressed_size is None
        else uncompressed_size
    )


def check_archive(path: Path) -> None:
    """Raises ValueError unless the arrays of an .npz file have the sizes in their headers."""
    with opened(str(path), lambda: open(path, "rb")) as file:
        names = zipfile.ZipFile(file).namelist()
    for name in names:
        if name.endswith(".npy"):
            NpyHead.read(f"{path}: {name}", member_opener(path, name))


class EdgeFile:
    """Reads edges from a .npy file or a member of an .npz file, `[2, m]` or `[m, 2]`.

    Only one chunk is in memory. Ids are compared with the number of nodes as they are
    read. A file with two edges is read as `[2, m]`, unless `pair_rows`.
    """

    def __init__(
        self,
        name: str | Path,
        opener: Opener | None = None,
        pair_rows: bool | None = None,
    ) -> None:
        """Reads the header of the file; raises ValueError unless it holds edges."""
        self.name = name = str(name)
        self._opener = opener or plain_opener(Path(name))
        self.header = header = NpyHead.read(name, self._opener)
        self._nodes = MOST_NODES
        if (
            len(header.shape) != 2
            or 2 not in header.shape
            or header.dtype.kind not in "iu"
        ):
            raise ValueError(
                f"{name}: holds {header.dtype} {list(header.shape)}, but edges are integers "
                "[2, num_edges] or [num_edges, 2]"
            )
        pair_rows = header.shape[0] != 2 if pair_rows is None else pair_rows
        self.num_edges = header.shape[0] if pair_rows else header.shape[1]
        self._paired = pair_rows != header.fortran  # source and target side by side

    def limit(self, num_nodes: int) -> None:
        """Sets the number of nodes, which ids must stay below."""
        self._nodes = num_nodes

    def chunks(self, what: str) -> Iterator[np.ndarray]:
        """Yields arrays `[2, c]`, int64, in order, with a progress bar."""
        bar = tqdm(
            desc=what, total=self.num_edges, unit=" edges", disable=None, leave=False
        )
        dtype = self.header.dtype
        with bar, opened(self.name, self._opener) as file, ExitStack() as stack:
            file.seek(self.header.size)
            files = [file]
            if not self._paired:  # all targets follow all sources
                files.append(stack.enter_context(self._opener()))
                files[1].seek(self.header.size + self.num_edges * dtype.itemsize)
            for start in range(0, self.num_edges, CHUNK):
                count = min(CHUNK, self.num_edges - start)
                each = 2 * count // len(files)
                flat = [read_rows(self.name, end, dtype, each) for end in files]
                pair = flat[0].reshape(count, 2).T if self._paired else np.stack(flat)
                pair = np.array(pair, np.int64, order="C")
                self._check(pair, start)
                yield pair
                bar.update(count)

    def _check(self, pair: np.ndarray, start: int) -> None:
        bad = (pair < 0) | (pair >= self._nodes)
        if not bad.any():
            return
        end, edge = (int(k[0]) for k in np.nonzero(bad))
        found = int(pair[end, edge])
        wanted = f"0 .. {self._nodes - 1}"
        raise ValueError(
            f"{self.name}: edge {start + edge} has the node {found}, but ids are {wanted}"
        )


def read_rows(name: str, file: IO[bytes], dtype: np.dtype, count: int) -> np.ndarray:
    """Reads `count` numbers; raises ValueError, naming the file, if it is too short."""
    want = count * dtype.itemsize
    data = file.read(want)
    if len(data) < want:
        raise ValueError(f"{name}: ends early: {want - len(data)} bytes are missing")
    return np.frombuffer(data, dtype)


def with_reverses(pairs: np.ndarray) -> np.ndarray:
    """Inserts the reverse of each edge `[m, 2]` after it, except for self-loops."""
    doubled = np.repeat(pairs, 2, axis=0)
    doubled[1::2] = pairs[:, ::-1]
    keep = np.ones(len(doubled), np.bool_)
    keep[1::2] = pairs[:, 0] != pairs[:, 1]
    return doubled[keep]


class PairWriter:
    """Writes an .npy file `[m, 2]` whose length is known only at the end."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, 0

    def __enter__(self) -> PairWriter:
        self._file = open(self._path, "wb")
        self._head()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._head()
        self._file.close()

    def _head(self) -> None:
        # written twice, so its length must not depend on the number of rows
        text = repr({"descr": "<i8", "fortran_order": False, "shape": (self._rows, 2)})
        line = text.encode().ljust(117) + b"\n"
        self._file.write(b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line)

    def write(self, pairs: np.ndarray) -> None:
        """Appends pairs `[c, 2]`."""
        self._file.write(np.ascontiguousarray(pairs, "<i8").tobytes())
        self._rows += len(pairs)


class Column(Protocol):
    """Defines an attribute with a row per node or edge, or of the whole graph."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def rows(self) -> Iterator[np.ndarray]:
        """Yields arrays `[c, ...]` of rows, in order; raises if rows are missing."""


class NpyColumn:
    """Reads the rows of a .npy file, or of a member of an .npz file."""

    def __init__(self, name: str | Path, opener: Opener | None = None) -> None:
        """Reads the header; raises ValueError for an array that a folder cannot hold."""
        self.name = name = str(name)
        self._opener = opener or plain_opener(Path(name))
        header = NpyHead.read(name, self._opener)
        self._size = header.size
        self.dtype, self.shape = header.dtype, header.shape
        if header.shape:
            torch_name(name, header.dtype)
        if header.fortran and min(len(header.shape), 2) == 2:
            raise ValueError(
                f"{name}: is in Fortran order, wanted C order; save "
                "np.ascontiguousarray(array)"
            )

    def rows(self) -> Iterator[np.ndarray]:
        """Yields arrays `[c, ...]` of rows, in order."""
        total, width = (*self.shape, 1)[0], int(np.prod(self.shape[1:]))
        each = max(1, BYTES // max(1, width * self.dtype.itemsize))
        with opened(self.name, self._opener) as file:
            file.seek(self._size)
            for start in range(0, total, each):
                count = min(each, total - start)
                flat = read_rows(self.name, file, self.dtype, count * width)
                yield flat.reshape(self.shape and (count, *self.shape[1:]))


class ArrayColumn:
    """Holds rows in memory."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self._array = name, array
        self.dtype, self.shape = array.dtype, array.shape

    def rows(self) -> Iterator[np.ndarray]:
        """Yields them all."""
        yield self._array


class RowReader:
    """Reads ranges of rows from a column, in the order of their first rows."""

    def __init__(self, column: Column) -> None:
        self._rows = column.rows()
        self._rows_held = np.empty((0, *column.shape[1:]), column.dtype)
        self._first = 0

    def take(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows start .. stop - 1."""
        while self._first + len(self._rows_held) < stop:
            held = self._rows_held[max(0, start - self._first) :]
            self._first += len(self._rows_held) - len(held)
            self._rows_held = np.concatenate([held, next(self._rows)])
        return self._rows_held[start - self._first : stop - self._first]

    def finish(self) -> None:
        """Reads to the end, which raises for a file that is too long or damaged."""
        for _ in self._rows:
            pass


def torch_name(name: str, dtype: np.dtype) -> str:
    """Returns torch's name of a dtype; raises ValueError, naming the file."""
    try:
        return dtype_name(torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype)
    except TypeError:
        raise ValueError(
            f"{name}: holds {dtype}; a partition folder keeps numbers and booleans"
        ) from None
