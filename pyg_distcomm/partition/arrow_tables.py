"""Reads edges and attributes from tables of Apache Arrow: .parquet, .arrow and .feather.

Needs pyarrow (`pip install 'pyg-distcomm[arrow]'`). Tables are read a batch of rows at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from pyg_distcomm.partition.edge_files import (
    MOST_NODES,
    EdgeFile,
    PairWriter,
    both_ways,
    torch_name,
)

ENDINGS = (".parquet", ".arrow", ".feather")
ROWS = 1 << 16  # of a table in memory at once
ENDS = (("src", "dst"), ("source", "target"), ("row", "col"), ("from", "to"))
IDS = ("id", "node_id", "node", "gid")


def is_table(path: Path) -> bool:
    """Returns whether a name is that of a table."""
    return path.suffix.lower() in ENDINGS


class ArrowTable:
    """Reads the columns of a table in a file.

    Columns are numbers or booleans, or lists of them of one length, which make a matrix.

    Raises:
        ImportError: if pyarrow is not installed.
        ValueError: naming the file, if it is missing, damaged or empty of columns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ValueError(f"{path}: missing")
        if not is_table(path):
            raise ValueError(
                f"{path}: a table is a .parquet, .arrow or .feather file; convert it by "
                "pandas.read_csv(...).to_parquet(...), or give arrays as .npy"
            )
        with self._reading():
            if path.suffix.lower() == ".parquet":
                file: Any = _pyarrow("parquet").ParquetFile(path)
                self.num_rows = int(file.metadata.num_rows)
                self._schema = file.schema_arrow
            else:
                data = _pyarrow("dataset").dataset(path, format="feather")
                self.num_rows = int(data.count_rows())
                self._schema = data.schema

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns errors of pyarrow into ValueErrors that name the file."""
        wrong: Any = _pyarrow("lib").ArrowException
        try:
            yield
        except (wrong, OSError, ValueError, TypeError, KeyError) as error:
            if str(error).startswith(str(self.path)):
                raise
            raise ValueError(f"{self.path}: cannot be read: {error}") from None

    @property
    def names(self) -> list[str]:
        """Returns the names of its columns."""
        return [str(name) for name in self._schema.names]

    def batches(self, columns: list[str]) -> Iterator[list[np.ndarray]]:
        """Yields some columns `[c, ...]` of the next rows, in order."""
        with self._reading():
            if self.path.suffix.lower() == ".parquet":
                file: Any = _pyarrow("parquet").ParquetFile(self.path)
                source = file.iter_batches(ROWS, columns=columns)
            else:
                data = _pyarrow("dataset").dataset(self.path, format="feather")
                source = data.to_batches(columns=columns, batch_size=ROWS)
            for batch in source:
                yield [self._array(name, batch.column(name)) for name in columns]

    def _array(self, name: str, column: Any) -> np.ndarray:
        if column.null_count:
            raise ValueError(
                f"{self.path}: {name!r} has {column.null_count} missing values; fill them in"
            )
        types, kind = _pyarrow("types"), column.type
        width = None
        if types.is_list(kind) or types.is_large_list(kind):
            width = np.unique(np.diff(column.offsets.to_numpy()))
            if width.size > 1:
                raise ValueError(
                    f"{self.path}: the lists of {name!r} have {width[0]} to {width[-1]} "
                    "numbers; a matrix has one width"
                )
        if width is not None or types.is_fixed_size_list(kind):
            flat = column.flatten()
            if flat.null_count:
                raise ValueError(f"{self.path}: {name!r} has missing values")
            return self._plain(name, flat).reshape(len(column), -1)
        return self._plain(name, column)

    def _plain(self, name: str, column: Any) -> np.ndarray:
        array: np.ndarray = column.to_numpy(zero_copy_only=False)
        if array.dtype.kind not in "iufb":
            raise ValueError(
                f"{self.path}: {name!r} holds {column.type}; wanted numbers, booleans, or "
                "lists of them (encode texts and dates as numbers, or drop the column)"
            )
        return array

    def ends(self) -> tuple[str, str]:
        """Returns the columns of sources and targets: `ENDS` by name, or the only two."""
        lower = {name.lower(): name for name in self.names}
        for src, dst in ENDS:
            if src in lower and dst in lower:
                return lower[src], lower[dst]
        if len(self.names) == 2:
            return self.names[0], self.names[1]
        wanted = ", ".join(f"{src} and {dst}" for src, dst in ENDS)
        raise ValueError(
            f"{self.path}: edges are in two columns named {wanted}; got "
            f"{', '.join(self.names)}"
        )

    def edges(
        self, out: Path, *, num_nodes: int | None, undirected: bool
    ) -> tuple[EdgeFile, int]:
        """Reads the edges once, into the .npy file `out`; returns it and the largest id.

        With `undirected`, an edge is followed by its reverse, unless it is a self-loop.
        """
        names, largest = list(self.ends()), -1
        limit = MOST_NODES if num_nodes is None else num_nodes
        bar = tqdm(
            desc="reading edges",
            total=self.num_rows,
            unit=" edges",
            disable=None,
            leave=False,
        )
        with bar, PairWriter(out) as writer:
            for ends in self.batches(names):
                for name, ids in zip(names, ends, strict=True):
                    if ids.ndim != 1 or ids.dtype.kind not in "iu":
                        raise ValueError(
                            f"{self.path}: {name!r} holds {ids.dtype}, wanted node ids"
                        )
                    bad = np.flatnonzero((ids < 0) | (ids >= limit))
                    if bad.size:
                        raise ValueError(
                            f"{self.path}: edge {bar.n + int(bad[0])} has the node "
                            f"{ids[bad[0]]}, but ids are 0 .. {limit - 1}"
                        )
                pairs = np.stack(ends, 1).astype(np.int64)
                largest = max(largest, int(pairs.max(initial=-1)))
                writer.write(both_ways(pairs) if undirected else pairs)
                bar.n += len(pairs)
                bar.refresh()
        return EdgeFile(out, tall=True), largest

    def edge_columns(self) -> dict[str, ArrowColumn]:
        """Returns the columns beside the ends of edges, by name."""
        ends = self.ends()
        return {n: ArrowColumn(self, n) for n in self.names if n not in ends}

    def node_columns(self) -> dict[str, ArrowColumn]:
        """Returns the columns beside the ids, by name; rows are brought into their order."""
        lower = {name.lower(): name for name in self.names}
        given = next((lower[name] for name in IDS if name in lower), None)
        order = None if given is None else self._order(given)
        return {n: ArrowColumn(self, n, order) for n in self.names if n != given}

    def _order(self, name: str) -> np.ndarray | None:
        """Returns the row of each node id, or None where rows are in the order of ids."""
        parts = [ids for (ids,) in self.batches([name])]
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        each = np.arange(ids.size)
        if np.array_equal(ids, each):
            return None
        order = np.argsort(ids, kind="stable")
        if not np.array_equal(ids[order], each):
            raise ValueError(
                f"{self.path}: {name!r} must hold each of 0 .. {ids.size - 1} once"
            )
        return order


class ArrowColumn:
    """Reads an attribute from a column of a table; see `edge_files.Column`.

    A table whose rows are in another order than its ids is held whole, a column at a time.
    """

    def __init__(
        self, table: ArrowTable, name: str, order: np.ndarray | None = None
    ) -> None:
        """Reads the first rows, to know dtype and shape."""
        self.name = f"{table.path}: {name}"
        self._table, self._column, self._order = table, name, order
        first = next(table.batches([name]), [np.zeros(0, np.float32)])[0]
        self.dtype = first.dtype
        self.shape: tuple[int, ...] = (table.num_rows, *first.shape[1:])
        torch_name(self.name, self.dtype)

    def rows(self) -> Iterator[np.ndarray]:
        """Yields arrays `[c, ...]` of rows, in order."""
        if self._order is None:
            yield from self._batches()
        else:
            yield np.concatenate(list(self._batches()))[self._order]

    def _batches(self) -> Iterator[np.ndarray]:
        for (rows,) in self._table.batches([self._column]):
            if rows.shape[1:] != self.shape[1:] or rows.dtype != self.dtype:
                raise ValueError(
                    f"{self.name}: rows of {list(rows.shape[1:])} {rows.dtype} after those "
                    f"of {list(self.shape[1:])} {self.dtype}"
                )
            yield rows


def _pyarrow(name: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError:
        raise ImportError(
            "tables (.parquet, .arrow, .feather) need pyarrow: pip install "
            "'pyg-distcomm[arrow]'"
        ) from None
