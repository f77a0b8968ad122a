"""Attributes in files, read in chunks of rows: .npy, members of .npz, lines of .csv."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch

from pyg_distcomm.partition.arrays import dtype_name
from pyg_distcomm.partition.edge_files import (
    BYTE_ORDER_MARK,
    NpyHead,
    Opener,
    opened,
    plain_opener,
    read_rows,
)

BYTES = 1 << 24  # of rows in memory at once
LINES = 1 << 14


class Column(Protocol):
    """An attribute with a row per node or edge, or one of the whole graph."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def rows(self) -> Iterator[np.ndarray]:
        """Yields arrays `[c, ...]` of rows, in order; raises if they are not all."""


class NpyColumn:
    """The rows of a .npy file, or of a member of an .npz file."""

    def __init__(self, name: str, opener: Opener) -> None:
        """Reads the head of the file; raises ValueError for what cannot be kept."""
        head = NpyHead.read(name, opener)
        self.name, self._opener, self._size = name, opener, head.size
        self.dtype, self.shape = head.dtype, head.shape
        if head.shape:
            torch_name(name, head.dtype)
        if head.fortran and min(len(head.shape), 2) == 2:
            raise ValueError(
                f"{name}: lies column by column; save np.ascontiguousarray(array)"
            )

    def rows(self) -> Iterator[np.ndarray]:
        """Yields arrays `[c, ...]` of rows, in order."""
        if not self.shape:
            yield self._whole()
            return
        width = int(np.prod(self.shape[1:]))
        each = max(1, BYTES // max(1, width * self.dtype.itemsize))
        with opened(self.name, self._opener) as file:
            file.seek(self._size)
            for start in range(0, self.shape[0], each):
                count = min(each, self.shape[0] - start)
                flat = read_rows(self.name, file, self.dtype, count * width)
                yield flat.reshape(count, *self.shape[1:])

    def _whole(self) -> np.ndarray:
        with opened(self.name, self._opener) as file:
            file.seek(self._size)
            return read_rows(self.name, file, self.dtype, 1).reshape(())


class TextColumn:
    """The numbers of a .csv file, packed by gzip or not, a row on each line."""

    def __init__(
        self, path: Path, count: int | None, *, real: bool | None = None
    ) -> None:
        """Looks at the first lines.

        count is how many rows there must be, None for any number; real says float32, or
        else whole numbers.
        """
        self.name, self._path, self._count = str(path), path, count
        with opened(self.name, plain_opener(path)) as file:
            first = [line for _, line in self._lines(file, 64)]
        if real is None:
            real = not _fits(first, np.int64)
        self.dtype = np.dtype(np.float32 if real else np.int64)
        width = self._parse(1, first).shape[1] if first else 1
        self.shape: tuple[int, ...] = (count or 0, width)

    def rows(self) -> Iterator[np.ndarray]:
        """Yields arrays `[c, width]` of rows, in order."""
        done = 0
        with opened(self.name, plain_opener(self._path)) as file:
            lines = self._lines(file, None)
            while some := list(islice(lines, LINES)):
                block = self._parse(some[0][0], [line for _, line in some])
                if block.shape[1] != self.shape[1]:
                    raise ValueError(
                        f"{self.name}: line {some[0][0]}: got {block.shape[1]} numbers, "
                        f"wanted {self.shape[1]}"
                    )
                done += len(block)
                yield block
        if self._count is not None and done != self._count:
            raise ValueError(f"{self.name}: has {done} rows, wanted {self._count}")

    @staticmethod
    def _lines(file: IO[bytes], most: int | None) -> Iterator[tuple[int, bytes]]:
        marked = (
            line.removeprefix(BYTE_ORDER_MARK) if at == 1 else line
            for at, line in enumerate(file, 1)
        )
        numbered = ((at, line) for at, line in enumerate(marked, 1) if line.strip())
        return islice(numbered, most)

    def _parse(self, first: int, lines: list[bytes]) -> np.ndarray:
        try:
            return _numbers(lines, self.dtype)
        except ValueError:
            pass
        width = 1 + lines[0].count(b",")
        for at, line in enumerate(lines, first):
            if not _fits([line], self.dtype) or 1 + line.count(b",") != width:
                kind = "numbers" if self.dtype.kind == "f" else "whole numbers"
                got = line.decode(errors="replace").strip()[:80]
                raise ValueError(
                    f"{self.name}: line {at}: got {got!r}, wanted {width} {kind} with "
                    "commas between"
                )
        raise ValueError(f"{self.name}: line {first}: cannot be read")


class ArrayColumn:
    """Rows that are in memory."""

    def __init__(self, name: str, array: np.ndarray) -> None:
        """Takes the array, which is not copied."""
        self.name, self._array = name, array
        self.dtype, self.shape = array.dtype, array.shape

    def rows(self) -> Iterator[np.ndarray]:
        """Yields them all."""
        yield self._array


class RowReader:
    """Takes ranges of rows from a column, each beginning where the last one did or on."""

    def __init__(self, column: Column) -> None:
        """Begins at the first row."""
        self._rows = column.rows()
        self._kept = np.empty((0, *column.shape[1:]), column.dtype)
        self._first = 0

    def take(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows start .. stop - 1."""
        while self._first + len(self._kept) < stop:
            kept = self._kept[max(0, start - self._first) :]
            self._first += len(self._kept) - len(kept)
            self._kept = np.concatenate([kept, next(self._rows)])
        return self._kept[start - self._first : stop - self._first]

    def finish(self) -> None:
        """Reads to the end, so that a file that is too long or damaged is found."""
        for _ in self._rows:
            pass


def torch_name(name: str, dtype: np.dtype) -> str:
    """Gives torch's name of a dtype; raises ValueError, naming the file."""
    try:
        return dtype_name(torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype)
    except TypeError:
        raise ValueError(
            f"{name}: holds {dtype}; a partition folder keeps numbers and booleans"
        ) from None


def _numbers(lines: list[bytes], dtype: np.dtype) -> np.ndarray:
    text = [line.decode() for line in lines]
    return np.loadtxt(text, dtype, delimiter=",", ndmin=2, comments=None)


def _fits(lines: list[bytes], dtype: type | np.dtype) -> bool:
    try:
        _numbers(lines, np.dtype(dtype))
    except ValueError:
        return False
    return True
