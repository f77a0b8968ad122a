"""Opens a graph in files: its edges, and the attributes beside them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pyg_distcomm.partition.arrow_tables import ENDINGS as TABLES
from pyg_distcomm.partition.arrow_tables import (
    ArrowColumn,
    ArrowTable,
    NodeNames,
    is_table,
)
from pyg_distcomm.partition.edge_files import (
    BAD_FILE,
    ArrayColumn,
    Column,
    EdgeFile,
    NpyColumn,
    PairWriter,
    member_opener,
    with_reverses,
)

__all__ = ["GraphFiles", "is_source", "open_source"]

# ids from here on, if they are 100 times the edges, too, are taken for a mistake
MANY = 10**8
ENDINGS = (".csv.gz", ".csv", ".npy")
MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


@dataclass
class GraphFiles:
    """Holds a graph whose edges, features and labels stay in files until they are read.

    edges     the edges, in chunks
    num_nodes the number of nodes
    doubled   whether each edge is followed by its reverse
    columns   attributes by name; those of edges have a row per edge in the file, not doubled
    values    plain values
    kinds     "node" or "edge", for the columns whose file tells it
    """

    edges: EdgeFile
    num_nodes: int
    doubled: bool = False
    columns: dict[str, Column] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, column: Column, kind: str) -> None:
        """Adds a column, whose name must be free."""
        if name in self.columns or name == "edge_index":
            raise ValueError(
                f"{name}: {column.name} holds it, and so does another file; rename one"
            )
        self.columns[name], self.kinds[name] = column, kind

    def names_of_kind(self, kind: str) -> list[str]:
        """Returns the names of the columns whose file tells that they are of a kind."""
        return [name for name, one in self.kinds.items() if one == kind]

    def edges_in_file(self) -> int:
        """Counts the edges before their reverses were added."""
        if not self.doubled:
            return self.edges.num_edges
        loops = 0
        for src, dst in self.edges.chunks("counting edges"):
            loops += int(np.count_nonzero(src == dst))
        return (self.edges.num_edges - loops) // 2 + loops


def is_source(name: str) -> bool:
    """Returns whether a name is that of a file of edges, or of a folder."""
    path = Path(name)
    return path.suffix in (".npy", ".npz") or is_table(path) or path.is_dir()


def open_source(
    path: str | Path,
    spool: Path,
    *,
    num_nodes: int | None = None,
    undirected: bool = False,
    split: str | None = None,
    node_files: Mapping[str, str | Path] | None = None,
    edge_files: Mapping[str, str | Path] | None = None,
    node_table: str | Path | None = None,
) -> GraphFiles:
    """Opens a graph; a table is read once, into a file of the folder `spool`.

    path        a .npy file of edges, an .npz file with edge_index and attributes, a table
                of edges (.csv, .tsv, .txt, .el, .edges; .gz; .parquet, .arrow, .feather:
                `ArrowTable.edges`), or a folder of OGB's:
                raw/edge.csv.gz, num-node-list, node-feat, node-label, node_year,
                edge-feat, split/NAME/{train,valid,test}; as .csv.gz, .csv or .npy, or
                in raw/data.npz
    num_nodes   needed if the files do not tell it and the last nodes have no edges
    undirected  each edge stands for both directions (as OGB's add_inverse_edge)
    split       which folder of split/, if there are several
    node_files, edge_files  .npy files by the name of the attribute
    node_table  a table (as of edges, with names of columns) with a row for each node, and a
                column for each attribute; in the order of ids, or with ids in a column "id". If
                these are not 0 .. n - 1 (texts, integers with gaps), node k is row k, and
                edges must be in a table, too: their ends are looked up in this column

    Raises ValueError, naming the file, if one is missing, damaged or does not fit the others.
    """
    path = Path(path)
    _check_names(set(node_files or {}), set(edge_files or {}))
    table = None if node_table is None else ArrowTable(Path(node_table))
    names = None if table is None else table.node_names()
    if table is not None and num_nodes is None:
        num_nodes = table.num_rows
    if names is not None and not is_table(path):
        raise ValueError(
            f"{names.name}: these ids are not 0 .. {len(names.names) - 1}, and are looked up "
            f"for edges in tables only; make {path} one (.csv, .parquet, .arrow, .feather)"
        )
    if path.is_dir():
        found = _Folder(path, spool, num_nodes, undirected, split).read()
    elif not path.is_file():
        raise ValueError(f"{path}: missing")
    elif path.suffix == ".npz":
        found = _from_npz(path, spool, num_nodes, undirected)
    else:
        found = _with_edges(path, spool, num_nodes, undirected, names)
    for name, file in {**(node_files or {}), **(edge_files or {})}.items():
        found.columns[name] = NpyColumn(file)
    for name in node_files or {}:
        _check_rows(found.columns[name], found.num_nodes, "nodes")
    for name, column in {} if table is None else table.node_columns().items():
        _check_rows(column, found.num_nodes, "nodes")
        found.add(name, column, "node")
    if not found.num_nodes and num_nodes is None:
        raise ValueError(
            f"{path}: holds no edges, so it does not tell how many nodes there are; say "
            "it (--num-nodes), or give another file"
        )
    return found


def _check_names(node: set[str], edge: set[str]) -> None:
    """Raises for a file named edge_index, and for a name given both for nodes and edges."""
    if "edge_index" in node | edge:
        raise ValueError(
            "edge_index: got a file for it beside the graph, whose edges it would not "
            "replace; give that file as the graph, or its values another name"
        )
    if node & edge:
        raise ValueError(
            f"{min(node & edge)}: got a file of the nodes and one of the edges; give one "
            "of them another name"
        )


def _check_rows(column: Column, count: int, what: str) -> None:
    if not column.shape or column.shape[0] != count:
        why = ""
        if what == "nodes":
            why = " (the largest id of the edges plus one, or --num-nodes)"
        raise ValueError(
            f"{column.name}: has the shape {list(column.shape)}, but there are {count} "
            f"{what}{why}: give a row for each; a mask is bool [{count}]"
        )


def _with_edges(
    path: Path,
    spool: Path,
    num_nodes: int | None,
    undirected: bool,
    names: NodeNames | None = None,
) -> GraphFiles:
    if is_table(path):
        edge_table = ArrowTable(path)
        edges, largest = edge_table.edges(
            spool / "edges.npy", num_nodes=num_nodes, undirected=undirected, nodes=names
        )
        count = _infer_num_nodes(path, largest, edges, num_nodes)
        found = GraphFiles(edges, count, undirected)
        for name, column in edge_table.edge_columns().items():
            found.add(name, column, "edge")
        return found
    if path.suffix != ".npy":
        raise ValueError(
            f"{path}: edges are read from .npy, .npz, {', '.join(TABLES)} (text also as "
            ".gz) or a folder"
        )
    edges = EdgeFile(path)
    return _with_counted_nodes(edges, spool, num_nodes, undirected)


def _with_counted_nodes(
    edges: EdgeFile, spool: Path, num_nodes: int | None, undirected: bool
) -> GraphFiles:
    """Opens edges with their number of nodes; counts nodes and adds reverses in one pass."""
    if num_nodes is not None:
        edges.limit(num_nodes)
    if not undirected and num_nodes is not None:
        return GraphFiles(edges, num_nodes)
    name, largest = edges.name, -1
    if undirected:
        file = spool / "edges.npy"
        with PairWriter(file) as writer:
            for pair in edges.chunks("adding reverse edges"):
                largest = max(largest, int(pair.max()))
                writer.write(with_reverses(pair.T))
        edges = EdgeFile(file, pair_rows=True)
    else:
        for pair in edges.chunks("counting nodes"):
            largest = max(largest, int(pair.max()))
    count = _infer_num_nodes(name, largest, edges, num_nodes)
    edges.limit(count)
    return GraphFiles(edges, count, undirected)


def _infer_num_nodes(
    name: Path | str, largest: int, edges: EdgeFile, num_nodes: int | None
) -> int:
    """Returns the number of nodes: `num_nodes` if given, otherwise the largest id plus one."""
    if num_nodes is not None:
        return num_nodes
    if largest >= max(MANY, 100 * edges.num_edges):
        raise ValueError(
            f"{name}: {edges.num_edges} edges have ids up to {largest}, and each of 0 .. "
            "the largest is a node; number them without gaps, or say how many there are "
            "(--num-nodes)"
        )
    return largest + 1


def _names_in(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except BAD_FILE as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def _members(path: Path) -> dict[str, NpyColumn]:
    """Opens the arrays of an .npz file except edge_index; plain values have no shape."""
    return {
        name.removesuffix(".npy"): NpyColumn(
            f"{path}:{name}", member_opener(path, name)
        )
        for name in _names_in(path)
        if name.endswith(".npy") and name != "edge_index.npy"
    }


def _edges_of_npz(path: Path) -> EdgeFile:
    if "edge_index.npy" not in _names_in(path):
        raise ValueError(f"{path}: has no edge_index [2, num_edges]")
    return EdgeFile(f"{path}:edge_index", member_opener(path, "edge_index.npy"))


def _from_npz(
    path: Path, spool: Path, num_nodes: int | None, undirected: bool
) -> GraphFiles:
    edges, columns = _edges_of_npz(path), _members(path)
    count = columns.pop("num_nodes", None)
    if num_nodes is None and count is not None:
        num_nodes = int(next(count.rows()).reshape(-1)[0])
    for name in ("x", "y", "pos"):
        if num_nodes is None and name in columns and columns[name].shape:
            num_nodes = columns[name].shape[0]
    found = _with_counted_nodes(edges, spool, num_nodes, undirected)
    for name, column in columns.items():
        if column.shape:
            found.columns[name] = column
        else:
            found.values[name] = next(column.rows()).item()
    return found


@dataclass(eq=False)
class _Folder:
    """Reads a folder in OGB's layout, text or binary; raises for heterogeneous graphs."""

    root: Path
    spool: Path
    num_nodes: int | None
    undirected: bool
    split: str | None

    def __post_init__(self) -> None:
        raw = self.root / "raw"
        self.raw = raw if raw.is_dir() else self.root
        archive = self.raw / "data.npz"
        self.archive = archive if archive.is_file() else None
        self.members = {} if self.archive is None else _members(self.archive)

    def read(self) -> GraphFiles:
        if self.num_nodes is None:
            self.num_nodes = self._num_nodes()
        found = self._edges()
        num_edges = found.edges_in_file()
        for name, key, count, is_float in (
            ("x", "node_feat", found.num_nodes, True),
            ("y", "node_label", found.num_nodes, None),
            ("node_year", "node_year", found.num_nodes, None),
            ("edge_attr", "edge_feat", num_edges, True),
        ):
            column = self._column(key, is_float)
            if column is not None:
                _check_rows(column, count, "nodes" if key[:4] == "node" else "edges")
                found.columns[name] = column
        for mask, array in self._masks(found.num_nodes).items():
            found.columns[mask] = ArrayColumn(f"{self.root}: {mask}", array)
        return found

    def _file(self, key: str, *endings: str) -> Path | None:
        """Finds raw/KEY or ROOT/KEY, spelt with "_" or "-"."""
        for folder in (self.raw, self.root):
            for stem in (key, key.replace("_", "-")):
                for ending in endings:
                    path = folder / (stem + ending)
                    if path.is_file():
                        return path
        return None

    def _column(self, key: str, is_float: bool | None) -> Column | None:
        if key in self.members:
            return self.members[key]
        path = self._file(key, ".npy", ".npz", ".csv.gz", ".csv")
        if path is None:
            return None
        if path.suffix != ".npz":
            return _open_column(path, is_float)
        members = _members(path)
        if key not in members:
            raise ValueError(f"{path}: has no {key}, only {', '.join(members)}")
        return members[key]

    def _num_nodes(self) -> int | None:
        counts = None
        if "num_nodes_list" in self.members:
            counts = next(self.members["num_nodes_list"].rows()).reshape(-1)
        path = self._file("num_node_list", ".csv.gz", ".csv")
        if counts is None and path is not None:
            text = _open_column(path, False)
            counts = np.concatenate(list(text.rows())).reshape(-1)
        if counts is not None:
            if len(counts) != 1:
                raise ValueError(
                    f"{path or self.archive}: holds {len(counts)} graphs, wanted one; keep "
                    "each graph in a folder of its own"
                )
            return int(counts[0])
        path = self._file("node_feat", ".npy") or self._file("node_label", ".npy")
        return None if path is None else NpyColumn(path).shape[0]

    def _edges(self) -> GraphFiles:
        if self.archive is not None:
            edges = _edges_of_npz(self.archive)
            return _with_counted_nodes(
                edges, self.spool, self.num_nodes, self.undirected
            )
        path = self._file("edge", ".csv.gz", ".csv", ".npy")
        path = path or self._file("edge_index", ".npy")
        if path is None:
            raise ValueError(
                f"{self.root}: has no edges; wanted raw/edge.csv.gz, raw/edge_index.npy or "
                "raw/data.npz (heterogeneous graphs are not read)"
            )
        return _with_edges(path, self.spool, self.num_nodes, self.undirected)

    def _masks(self, num_nodes: int) -> dict[str, np.ndarray]:
        splits = self.root / "split"
        inner = splits.iterdir() if splits.is_dir() else ()
        names = sorted(path.name for path in inner if path.is_dir())
        if not names and self.split is None:
            return {}
        split = self.split if self.split is not None else names[0]
        if split not in names or (self.split is None and len(names) > 1):
            raise ValueError(
                f"{splits}: holds the splits {', '.join(names) or 'none'}; name one of them "
                f"with split, got {self.split!r}"
            )
        masks = {}
        for part, mask in MASKS.items():
            files = (splits / split / (part + ending) for ending in ENDINGS)
            path = next((file for file in files if file.is_file()), None)
            if path is not None:
                masks[mask] = _mask(path, num_nodes)
        return masks


def _open_column(path: Path, is_float: bool | None) -> Column:
    """Opens a column; `is_float` reads text as float32, False as int64, None as it is."""
    if path.suffix == ".npy":
        return NpyColumn(path)
    numbers = None if is_float is None else "float32" if is_float else "int64"
    return ArrowColumn(ArrowTable(path, False, numbers), None)


def _mask(path: Path, num_nodes: int) -> np.ndarray:
    """Turns a list of node ids into a mask."""
    mask = np.zeros(num_nodes, np.bool_)
    for ids in _open_column(path, False).rows():
        if ids.dtype.kind not in "iu":
            raise ValueError(f"{path}: holds {ids.dtype}, wanted node ids")
        bad = ids[(ids < 0) | (ids >= num_nodes)]
        if bad.size:
            raise ValueError(
                f"{path}: names node {int(bad.reshape(-1)[0])}, but ids are "
                f"0 .. {num_nodes - 1}"
            )
        mask[ids.reshape(-1)] = True
    return mask
