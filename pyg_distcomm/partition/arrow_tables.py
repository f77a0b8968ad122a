"""Reads edges and attributes: from .npy files, and from text and tables by pyarrow.

Needs pyarrow (`pip install 'pyg-distcomm[arrow]'`). Tables are read a batch of rows at a time.
"""

from __future__ import annotations

import gzip
import importlib
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from tqdm import tqdm

from pyg_distcomm.partition.cutters import CHUNK
from pyg_distcomm.partition.layout import dtype_name, file_name

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
        self.name = self._path = name = str(path)
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
        found = np.fromfile(self._path, self.dtype, count, offset=at)
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


class ArrayFile:
    """Writes a .npy file of known dtype, a piece at a time, anywhere or at its end."""

    def __init__(self, path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
        """Writes the header, and extends the file to its length."""
        self._path, self.dtype = path, np.dtype(dtype).newbyteorder("=")
        self.shape = shape
        with open(path, "wb") as file:
            self._write_header(file)
            self._head = file.tell()
            file.truncate(self._head + math.prod(shape) * self.dtype.itemsize)

    def _write_header(self, file: IO[bytes]) -> None:
        """Writes NumPy's header, which has room for any number of rows."""
        descr = np.lib.format.dtype_to_descr(self.dtype)
        about = {"descr": descr, "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_1_0(file, about)

    def write(self, at: int, array: np.ndarray) -> None:
        """Writes numbers into the flat array, from element `at` on."""
        # opened each time, since a process may open few files; not mapped, since writing to
        # a mapped file on a full disk would kill the process
        with open(self._path, "r+b") as file:
            file.seek(self._head + at * self.dtype.itemsize)
            file.write(np.ascontiguousarray(array, self.dtype).tobytes())

    def append(self, rows: np.ndarray) -> None:
        """Adds rows `[c, ...]` at the end."""
        self.write(math.prod(self.shape), rows)
        self.shape = (self.shape[0] + len(rows), *self.shape[1:])
        with open(self._path, "r+b") as file:
            self._write_header(file)
            assert file.tell() == self._head


class NpyColumn(NpyFile):
    """Reads the rows of a .npy file."""

    def __init__(self, path: str | Path, name: str | None = None) -> None:
        """Reads the header; raises ValueError for an array that a folder cannot hold.

        `name` stands for the path in messages.
        """
        super().__init__(path)
        self.name = name or self.name
        if self.shape:
            torch_name(self.name, self.dtype)
        if self.fortran and min(len(self.shape), 2) == 2:
            raise ValueError(
                f"{self.name}: is in Fortran order, wanted C order; save "
                "np.ascontiguousarray(array)"
            )

    def take(self, start: int, stop: int) -> np.ndarray:
        """Reads the rows start .. stop - 1, `[c, ...]`."""
        width, count = math.prod(self.shape[1:]), stop - start
        flat = self.numbers(start * width, count * width)
        return flat.reshape(self.shape and (count, *self.shape[1:]))

    def rows(self) -> Iterator[np.ndarray]:
        """Yields arrays `[c, ...]` of rows, in order."""
        total, width = (*self.shape, 1)[0], math.prod(self.shape[1:])
        each = max(1, BYTES // max(1, width * self.dtype.itemsize))
        for start in range(0, total, each):
            yield self.take(start, min(start + each, total))


def torch_name(name: str, dtype: np.dtype) -> str:
    """Returns torch's name of a dtype; raises ValueError, naming the file."""
    try:
        return dtype_name(torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype)
    except TypeError:
        raise ValueError(
            f"{name}: holds {dtype}; a partition folder keeps numbers and booleans"
        ) from None


CSV = (".csv", ".tsv", ".txt", ".el", ".edges", ".edgelist")  # or with .gz
ENDINGS = (*CSV, ".parquet", ".arrow", ".feather")
BLOCK = 1 << 20  # bytes of text; pyarrow reads up to 32 blocks ahead
BAD_FILE = (OSError, EOFError, ValueError, TypeError, KeyError, zlib.error)
ROWS = 1 << 16  # rows of a table in memory at once
MOST_ROWS = 1 << 24  # the most edges in memory while their ends are looked up
ENDS = (("src", "dst"), ("source", "target"), ("row", "col"), ("from", "to"))
IDS = ("id", "node_id", "node", "gid")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # with which spreadsheets begin a file
COMMENT = (b"#", b"%", b"")  # how lines begin that are skipped at the top


def ending(path: Path) -> str:
    """Returns the suffix of a name in small letters, that before .gz if it is compressed."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def is_table(path: Path) -> bool:
    """Returns whether a name is that of a table."""
    return ending(path) in ENDINGS


class ArrowTable:
    """Reads the columns of a table in a file.

    Columns hold numbers or booleans, or lists of them of one length, which make a matrix.

    Raises:
        ImportError: if pyarrow is not installed.
        ValueError: naming the file, if it is missing, damaged or has no columns.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._named, self._unnamed = path, True, False
        self._texts: list[str] = []  # columns of a text file that are read as written
        if not path.is_file():
            raise ValueError(f"{path}: missing")
        if not is_table(path):
            raise ValueError(
                f"{path}: a table is a {', '.join(ENDINGS)} file; convert it by pandas, or "
                "give arrays as .npy"
            )
        with self._reading():
            self._schema = self._batches(None, ROWS)[0]

    @property
    def num_rows(self) -> int:
        """Returns the number of rows; of text, it is counted."""
        with self._reading():
            return sum(len(batch) for batch in self._batches(self.names[:1], ROWS)[1])

    def _batches(
        self, columns: list[str] | None, rows: int
    ) -> tuple[Any, Iterator[Any]]:
        """Returns the schema, and an iterator of record batches of some columns."""
        kind = ending(self.path)
        if kind in CSV:
            reader = self._csv(columns)
            return reader.schema, reader
        form = "parquet" if kind == ".parquet" else "feather"
        data = _pyarrow("dataset").dataset(self.path, format=form)
        how = {"batch_size": rows, "batch_readahead": 1, "use_threads": False}

        def batches() -> Iterator[Any]:
            yield from data.to_batches(columns=columns, **how)  # begun once read

        return data.schema, batches()

    def _csv(self, columns: list[str] | None) -> Any:
        """Returns pyarrow's reader of text, a block at a time."""
        csv, skipped, first = _pyarrow("csv"), 0, b""
        packed = self.path.suffix.lower() == ".gz"
        with (gzip.open if packed else open)(self.path, "rb") as file:
            for line in file:
                first = line.removeprefix(BYTE_ORDER_MARK).strip()
                if first[:1] not in COMMENT:
                    break
                skipped += 1
        if first[:1] in COMMENT:  # there are only comments: no edges
            lib: Any = _pyarrow("lib")
            schema = lib.schema([(name, lib.int64()) for name in ENDS[0]])
            return schema.empty_table().to_reader()
        begin = first.decode(errors="replace").lstrip('",;\t ')[:1]
        self._named = not self._unnamed and (begin.isalpha() or begin == "_")
        between = next((c for c in "\t;," if c.encode() in first), " ")
        return csv.open_csv(
            self.path,
            csv.ReadOptions(
                use_threads=False,
                block_size=BLOCK,
                skip_rows=skipped,
                autogenerate_column_names=not self._named,
            ),
            csv.ParseOptions(delimiter=between),
            csv.ConvertOptions(
                include_columns=columns,
                column_types=dict.fromkeys(self._texts, "string"),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Converts errors of pyarrow into ValueErrors that name the file."""
        wrong: Any = _pyarrow("lib").ArrowException
        try:
            yield
        except (wrong, *BAD_FILE) as error:
            if str(error).startswith(str(self.path)):
                raise
            raise ValueError(f"{self.path}: cannot be read: {error}") from None

    @property
    def names(self) -> list[str]:
        """Returns the names of its columns."""
        return [str(name) for name in self._schema.names]

    def _ids(self, columns: list[str], rows: int) -> Iterator[list[Any]]:
        """Yields columns of ids of the next rows; those of a text file as they are written."""
        trim, self._texts = _pyarrow("compute").ascii_trim_whitespace, columns
        for found in self._columns(columns, rows):
            yield [*map(trim, found)] if ending(self.path) in CSV else found

    def _columns(self, columns: list[str], rows: int) -> Iterator[list[Any]]:
        """Yields some columns of the next rows as pyarrow's arrays, without missing values."""
        with self._reading():
            for batch in filter(len, self._batches(columns, rows)[1]):
                found = [batch.column(name) for name in columns]
                for name, column in zip(columns, found, strict=True):
                    if column.null_count:
                        raise ValueError(
                            f"{self.path}: {name!r} has {column.null_count} missing "
                            "values; fill them in"
                        )
                yield found

    def _array(self, name: str, column: Any) -> np.ndarray:
        types, kind = _pyarrow("types"), column.type
        rows, listed = len(column), types.is_fixed_size_list(kind)
        if types.is_list(kind) or types.is_large_list(kind):
            listed = True
            width = np.unique(np.diff(column.offsets.to_numpy()))
            if width.size > 1:
                raise ValueError(
                    f"{self.path}: the lists of {name!r} have {width[0]} to {width[-1]} "
                    "numbers; a matrix has one width"
                )
        if listed:
            column = column.flatten()
            if column.null_count:
                raise ValueError(
                    f"{self.path}: {name!r} has {column.null_count} missing values; fill "
                    "them in"
                )
        array: np.ndarray = column.to_numpy(zero_copy_only=False)
        if array.dtype.kind not in "iufb":
            raise ValueError(
                f"{self.path}: {name!r} holds {column.type}; wanted numbers, booleans, or "
                "lists of them (encode texts and dates as numbers, or drop the column)"
            )
        return array.reshape(rows, -1) if listed else array

    def ends(self) -> tuple[str, str]:
        """Returns the columns of sources and targets: two of `ENDS`, or the only two."""
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
        self, num_nodes: int | None, nodes: NodeNames | None
    ) -> Iterator[np.ndarray]:
        """Yields the ends of edges `[2, c]`, int64, in order, with a progress bar.

        With `nodes`, ends are looked up in the id column of a table of nodes.
        """
        limit = MOST_NODES if num_nodes is None else num_nodes
        if nodes is not None and ending(self.path) in CSV:
            self._check_first_line(nodes)
        bar = tqdm(desc="reading edges", unit=" edges", disable=None, leave=False)
        why = "; ids with gaps are looked up in the column 'id' of a table of nodes"
        with bar:
            for ends in self._node_places(list(self.ends()), nodes or NodeNames()):
                pair = np.stack(ends)
                check_ids(str(self.path), pair, bar.n, limit, f"{why} (--node-table)")
                yield pair
                bar.update(pair.shape[1])

    def _check_first_line(self, nodes: NodeNames) -> None:
        """Takes two ids of nodes for an edge; raises ValueError if one of two words is one."""
        lib, names = _pyarrow("lib"), [name.strip() for name in self.ends()]
        if not self._named or tuple(name.lower() for name in names) in ENDS:
            return
        with suppress(lib.ArrowException):  # texts, where ids are numbers
            known = nodes.find(lib.array(names)) >= 0
            if known.all() and len(self.names) == 2:
                self._unnamed = True
                self._schema = self._batches(None, ROWS)[0]
            elif known.any():
                raise ValueError(
                    f"{self.path}: its first line, {', '.join(names)}, may be an edge of "
                    f"nodes of {nodes.name}, or name columns; put src,dst above it, or "
                    "rename the columns to these"
                )

    def _node_places(
        self, ends: list[str], nodes: NodeNames
    ) -> Iterator[list[np.ndarray]]:
        """Yields the ends of the next edges as indices of nodes."""
        # a lookup reads all names once per batch, so batches are as large as their number
        done, rows = 0, min(max(ROWS, len(nodes.names or ())), MOST_ROWS)
        for columns in self._ids(ends, rows):
            places = []
            for name, column in zip(ends, columns, strict=True):
                with self._reading():
                    place = nodes.find(column)
                missing = np.flatnonzero(place < 0)
                if missing.size:
                    raise ValueError(
                        f"{self.path}: edge {done + int(missing[0])} has in {name!r} the "
                        f"node {column[int(missing[0])].as_py()!r}, {nodes.wanted}"
                    )
                places.append(place)
            done += len(places[0])
            yield places

    def copied(
        self, folder: Path, kind: str, left: Sequence[str | None]
    ) -> dict[str, NpyColumn]:
        """Copies all columns but those `left` out to .npy files; returns them by name."""
        if "" in self.names or (kind == "node" and not self._named):
            raise ValueError(
                f"{self.path}: wanted a name of each column in the first line, got "
                f"{self.names} (pandas: to_csv(path, index=False), or index_label='id')"
            )
        names = [name for name in self.names if name not in left]
        files: dict[str, ArrayFile] = {}
        paths = {name: folder / file_name(kind, name) for name in names}
        for batch in self._columns(names, ROWS) if names else ():
            for name, column in zip(names, batch, strict=True):
                with self._reading():
                    rows = self._array(name, column)
                if name not in files:
                    shape = (0, *rows.shape[1:])
                    files[name] = ArrayFile(paths[name], rows.dtype, shape)
                file = files[name]
                if rows.shape[1:] != file.shape[1:] or rows.dtype != file.dtype:
                    raise ValueError(
                        f"{self.path}: {name}: rows of {list(rows.shape[1:])} {rows.dtype} "
                        f"after those of {list(file.shape[1:])} {file.dtype}"
                    )
                file.append(rows)
        for name in names if not files else ():
            ArrayFile(paths[name], np.float32, (0,))
        return {n: NpyColumn(paths[n], f"{self.path}: {n}") for n in names}

    def node_columns(
        self, folder: Path
    ) -> tuple[dict[str, NpyColumn], NodeNames | None]:
        """Copies the columns of nodes to files, in the order of ids, but for the ids.

        Returns them by name, and ids to look nodes up by, in the order of the rows: None if
        there is no column of ids, or it holds each of 0 .. n - 1. Then an id is the index of a
        node, and if rows are in another order, one whole column at a time is in memory.
        """
        lower = {name.lower(): name for name in self.names}
        id_column = next((lower[name] for name in IDS if name in lower), None)
        columns = self.copied(folder, "node", [id_column])
        found: Any = [] if id_column is None else self._ids([id_column], ROWS)
        parts = [ids for (ids,) in found]
        if not parts:
            return columns, None
        lib, types = _pyarrow("lib"), _pyarrow("types")
        names = lib.chunked_array(parts).combine_chunks()
        if ending(self.path) in CSV:
            with suppress(lib.ArrowException):  # more digits than numbers have
                numbers = _as_written(names, lib.int64())
                names = names if numbers.null_count else numbers
        if types.is_dictionary(names.type):
            names = names.dictionary_decode()
        if str(names.type) == "string_view":  # in which pyarrow looks nothing up
            names = names.cast("string")
        if types.is_integer(names.type):
            ids = names.to_numpy(zero_copy_only=False)
            order = np.argsort(ids, kind="stable")
            in_order = np.arange(ids.size)
            if np.array_equal(ids[order], in_order):
                for name in columns if not np.array_equal(order, in_order) else ():
                    path = folder / file_name("node", name)
                    np.save(path, np.load(path)[order])
                return columns, None
        with self._reading():
            counted = _pyarrow("compute").value_counts(names)
            counts = counted.field("counts").to_numpy(zero_copy_only=False)
        if counts.max(initial=0) > 1:
            name = counted.field("values")[int(counts.argmax())].as_py()
            raise ValueError(
                f"{self.path}: {id_column!r} holds {name!r} {counts.max()} times; give each "
                "node one row"
            )
        return columns, NodeNames(names, f"{id_column!r} of {self.path}")


class NodeNames:
    """Holds the ids of nodes, integers of any size or texts, by the index of the node.

    Attributes:
        names: pyarrow's array `[n]`; None if ids are indices.
        name: the name of the column, for messages.
    """

    def __init__(self, names: Any = None, name: str = "") -> None:
        self.names, self.name = names, name

    def find(self, ids: Any) -> np.ndarray:
        """Returns the index of each id, int64; -1 if it is unknown."""
        compute = _pyarrow("compute")
        index = self.names is None
        ids = _as_written(ids, _pyarrow("lib").int64() if index else self.names.type)
        found = ids if index else compute.index_in(ids, value_set=self.names)
        place: np.ndarray = compute.fill_null(found, -1).to_numpy(zero_copy_only=False)
        return place.astype(np.int64)

    @property
    def wanted(self) -> str:
        """Explains what an id must be that is not found."""
        if self.names is not None:
            return f"which is in no row of {self.name}"
        return (
            "wanted 0 .. n - 1, written as 7, not as 07; ids of another kind are looked up "
            "in the column 'id' of a table of nodes (--node-table)"
        )


def _as_written(ids: Any, kind: Any) -> Any:
    """Returns ids in another type; null for what is no whole number, as 7.5 or the text 07."""
    compute, types = _pyarrow("compute"), _pyarrow("types")
    if types.is_integer(kind) and types.is_floating(ids.type):
        ids = compute.if_else(compute.equal(ids, compute.floor(ids)), ids, None)
    elif types.is_integer(kind) and not types.is_integer(ids.type):
        ids = ids.cast("string")
        plain = compute.match_substring_regex(ids, "^(0|-?[1-9][0-9]*)$")
        ids = compute.if_else(plain, ids, None)
    return ids.cast(kind)


def _pyarrow(name: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{name}")
    except ImportError:
        raise ImportError(
            f"tables ({', '.join(ENDINGS)}) need pyarrow: pip install "
            "'pyg-distcomm[arrow]'"
        ) from None
