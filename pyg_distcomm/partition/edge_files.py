"""Reads edges and attributes from .npy files, in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tqdm import tqdm

from pyg_distcomm.partition.cutters import CHUNK
from pyg_distcomm.partition.layout import dtype_name

BYTES = 1 << 24  # bytes of attribute rows in memory at once
MOST_NODES = 2**31 - 1


class NpyFile:
    """Reads the numbers of a .npy file from any place on.

    Args:
        path: the file.

    Attributes:
        name: the path, for messages.
        dtype, shape: of the array.
        fortran: whether its order is Fortran's, and not C's.

    Raises:
        ValueError: naming the file, if it is missing, is no .npy file, holds Python objects,
            or is not as long as its header says.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = name = str(path)
        try:
            # maps the file, to read no more than its header
            array: np.memmap = np.lib.format.open_memmap(path, mode="r")
            length = Path(path).stat().st_size
        except FileNotFoundError:
            raise ValueError(f"{name}: missing") from None
        except Exception as error:  # NumPy evaluates what the header says
            raise ValueError(
                f"{name}: cannot be read: {error}; save the array again by np.save"
            ) from None
        self.dtype, self.shape, self._head = array.dtype, array.shape, array.offset
        self.fortran = not array.flags.c_contiguous
        if length != self._head + array.nbytes:
            raise ValueError(
                f"{name}: has {length} bytes, but its header says {self.dtype} "
                f"{list(self.shape)}, which are {self._head + array.nbytes}; save the array "
                "again by np.save"
            )

    def numbers(self, start: int, count: int) -> np.ndarray:
        """Reads `count` numbers from number `start` on, in the order of the file."""
        at = self._head + start * self.dtype.itemsize
        found = np.fromfile(self.name, self.dtype, count, offset=at)
        if len(found) < count:
            raise ValueError(f"{self.name}: ends early: it was cut since it was opened")
        return found


class EdgeFile(NpyFile):
    """Reads edges from a .npy file, `[2, m]` or `[m, 2]`.

    Only one chunk is in memory. Ids are compared with the number of nodes as they are
    read. A file with two edges is read as `[2, m]`, unless `pair_rows`.
    """

    def __init__(self, path: str | Path, pair_rows: bool | None = None) -> None:
        """Reads the header of the file; raises ValueError unless it holds edges."""
        super().__init__(path)
        self._nodes, shape = MOST_NODES, self.shape
        if len(shape) != 2 or 2 not in shape or self.dtype.kind not in "iu":
            raise ValueError(
                f"{self.name}: holds {self.dtype} {list(shape)}, but edges are integers "
                "[2, num_edges] or [num_edges, 2]"
            )
        pair_rows = shape[0] != 2 if pair_rows is None else pair_rows
        self.num_edges = shape[0] if pair_rows else shape[1]
        self._paired = pair_rows != self.fortran  # source and target side by side

    def limit(self, num_nodes: int) -> None:
        """Sets the number of nodes, which ids must stay below."""
        self._nodes = num_nodes

    def chunks(self, what: str) -> Iterator[np.ndarray]:
        """Yields arrays `[2, c]`, int64, in order, with a progress bar."""
        bar = tqdm(
            desc=what, total=self.num_edges, unit=" edges", disable=None, leave=False
        )
        with bar:
            for start in range(0, self.num_edges, CHUNK):
                count = min(CHUNK, self.num_edges - start)
                if self._paired:
                    pair = self.numbers(2 * start, 2 * count).reshape(count, 2).T
                else:  # all targets follow all sources
                    ends = start, self.num_edges + start
                    pair = np.stack([self.numbers(end, count) for end in ends])
                pair = np.array(pair, np.int64, order="C")
                check_ids(self.name, pair, start, self._nodes)
                yield pair
                bar.update(count)


def check_ids(
    name: str, pair: np.ndarray, start: int, limit: int, why: str = ""
) -> None:
    """Raises ValueError for an id out of range in edges `[2, c]` from number `start` on."""
    bad = (pair < 0) | (pair >= limit)
    if bad.any():
        end, edge = (int(k[0]) for k in np.nonzero(bad))
        raise ValueError(
            f"{name}: edge {start + edge} has the node {pair[end, edge]}, but ids are 0 .. "
            f"{limit - 1}{why}"
        )


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


class NpyColumn(NpyFile):
    """Reads the rows of a .npy file."""

    def __init__(self, path: str | Path) -> None:
        """Reads the header; raises ValueError for an array that a folder cannot hold."""
        super().__init__(path)
        if self.shape:
            torch_name(self.name, self.dtype)
        if self.fortran and min(len(self.shape), 2) == 2:
            raise ValueError(
                f"{self.name}: is in Fortran order, wanted C order; save "
                "np.ascontiguousarray(array)"
            )

    def rows(self) -> Iterator[np.ndarray]:
        """Yields arrays `[c, ...]` of rows, in order."""
        total, width = (*self.shape, 1)[0], int(np.prod(self.shape[1:]))
        each = max(1, BYTES // max(1, width * self.dtype.itemsize))
        for start in range(0, total, each):
            count = min(each, total - start)
            flat = self.numbers(start * width, count * width)
            yield flat.reshape(self.shape and (count, *self.shape[1:]))


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
