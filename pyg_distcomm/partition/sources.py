"""Opens a graph in files: its edges, and the attributes beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pyg_distcomm.partition.arrow_tables import ENDINGS as TABLES
from pyg_distcomm.partition.arrow_tables import (
    ArrowTable,
    NodeNames,
    is_table,
)
from pyg_distcomm.partition.edge_files import (
    Column,
    EdgeFile,
    NpyColumn,
    PairWriter,
    with_reverses,
)

__all__ = ["GraphFiles", "is_source", "open_source"]

# ids from here on, if they are 100 times the edges, too, are taken for a mistake
MANY = 10**8


@dataclass
class GraphFiles:
    """Holds a graph whose edges, features and labels stay in files until they are read.

    edges     the edges, in chunks
    num_nodes the number of nodes
    doubled   whether each edge is followed by its reverse
    columns   attributes by name; those of edges have a row per edge in the file, not doubled
    kinds     "node" or "edge", for the columns whose file tells it
    """

    edges: EdgeFile
    num_nodes: int
    doubled: bool = False
    columns: dict[str, Column] = field(default_factory=dict)
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
    """Returns whether a name is that of a file of edges."""
    path = Path(name)
    return path.suffix == ".npy" or is_table(path)


def open_source(
    path: str | Path,
    spool: Path,
    *,
    num_nodes: int | None = None,
    undirected: bool = False,
    node_files: Mapping[str, str | Path] | None = None,
    edge_files: Mapping[str, str | Path] | None = None,
    node_table: str | Path | None = None,
) -> GraphFiles:
    """Opens a graph; a table is read once, into a file of the folder `spool`.

    path        a .npy file of edges, or a table of edges (.csv, .tsv, .txt, .el, .edges;
                .gz; .parquet, .arrow, .feather: `ArrowTable.edges`)
    num_nodes   needed if the files do not tell it and the last nodes have no edges
    undirected  each edge stands for both directions (as OGB's add_inverse_edge)
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
    if not path.is_file():
        raise ValueError(f"{path}: {'is a folder' if path.is_dir() else 'missing'}")
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
    names: NodeNames | None,
) -> GraphFiles:
    """Reads a table, adds reverses and counts nodes, in one pass; or needs none."""
    if is_table(path):
        table = ArrowTable(path)
        pairs, columns = table.edges(num_nodes, names), table.edge_columns()
    elif path.suffix == ".npy":
        edges, columns = EdgeFile(path), {}
        if num_nodes is not None:
            edges.limit(num_nodes)
        if not undirected and num_nodes is not None:
            return GraphFiles(edges, num_nodes)
        pairs = edges.chunks("reading edges")
    else:
        raise ValueError(
            f"{path}: edges are read from .npy, {', '.join(TABLES)} (text also as .gz); of an "
            ".npz file, unpack the arrays (unzip), and give each by its name"
        )
    copied, file, largest = undirected or is_table(path), spool / "edges.npy", -1
    with PairWriter(file) as writer:
        for pair in pairs:
            largest = max(largest, int(pair.max(initial=-1)))
            if copied:
                writer.write(with_reverses(pair.T) if undirected else pair.T)
    if copied:
        edges = EdgeFile(file, pair_rows=True)
    count = _infer_num_nodes(path, largest, edges, num_nodes)
    edges.limit(count)
    found = GraphFiles(edges, count, undirected)
    for name, column in columns.items():
        found.add(name, column, "edge")
    return found


def _infer_num_nodes(
    path: Path, largest: int, edges: EdgeFile, num_nodes: int | None
) -> int:
    """Returns the number of nodes: `num_nodes` if given, otherwise the largest id plus one."""
    if num_nodes is not None:
        return num_nodes
    if largest >= max(MANY, 100 * edges.num_edges):
        raise ValueError(
            f"{path}: {edges.num_edges} edges have ids up to {largest}, and each of 0 .. "
            "the largest is a node; number them without gaps, or say how many there are "
            "(--num-nodes)"
        )
    return largest + 1
