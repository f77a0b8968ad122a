"""Partitions a graph in files, out of core, into a partition folder: `partition_files`.

[Note: out of core] Memory holds what the cutter needs for the nodes, and a chunk. After the
cut, edges are read once more, and each is appended to the files of its part, so that a part's
edges keep their order without a sort; rows of attributes likewise. Rows to exchange are counted
by reading the parts back, one after another.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from pyg_distcomm.partition.arrow_tables import ENDINGS as TABLES
from pyg_distcomm.partition.arrow_tables import (
    ArrayFile,
    ArrowTable,
    EdgeFile,
    NodeNames,
    NpyColumn,
    is_table,
    torch_name,
    with_reverses,
)
from pyg_distcomm.partition.cutters import check_method, check_nodes_fit, cut, stream
from pyg_distcomm.partition.folder import graph_meta, shape_kinds
from pyg_distcomm.partition.layout import (
    OWNER,
    Meta,
    file_name,
    new_folder,
    part_name,
    write_array,
    write_meta,
)
from pyg_distcomm.partition.part_share import Kind
from pyg_distcomm.partition.partition import (
    Grid,
    Owner,
    Partition,
    PartitionReport,
    RowCount,
    check_num_parts,
    group_by_part,
)

__all__ = ["GraphFiles", "is_source", "open_source", "partition_files"]

NEED_NO_EDGES = ("block", "random")


def partition_files(
    source: str | Path,
    out: str | Path,
    num_parts: int,
    method: str | Owner = "stream",
    *,
    seed: int = 0,
    refine: bool = False,
    grid: Grid | None = None,
    num_nodes: int | None = None,
    undirected: bool = False,
    node_files: Mapping[str, str | Path] | None = None,
    edge_files: Mapping[str, str | Path] | None = None,
    node_table: str | Path | None = None,
    node_attrs: Iterable[str] = (),
    edge_attrs: Iterable[str] = (),
    force: bool = False,
) -> PartitionReport:
    """Writes every part of a graph in files into the new folder `out`, or nothing.

    source      see `open_source`, also for num_nodes, undirected, node_files, edge_files
                and node_table
    method      "stream", "block", "random" and given owners take memory for the nodes
                and a chunk; the others, and `refine`, also for all edges (not features)
    grid        (r, s, p) of the ranks, for "grid", `refine` and the figures
    node_attrs, edge_attrs  names of attributes whose sizes do not tell their kind
    force       replaces an earlier partition folder

    Files are written beside `out`, flushed, and renamed at the end. See [Note: out of core].
    Raises ValueError, naming the file and the place in it, and TypeError for owners that are
    no integers.
    """
    out = Path(out)
    num_parts = check_num_parts(num_parts)
    if isinstance(method, str):
        check_method(method)
    with new_folder(out, force) as aside:
        spool = aside / "spool"
        spool.mkdir()
        graph = open_source(
            source,
            spool,
            num_nodes=num_nodes,
            undirected=undirected,
            node_files=node_files,
            edge_files=edge_files,
            node_table=node_table,
        )
        kinds = shape_kinds(
            {name: column.shape for name, column in graph.columns.items()},
            graph.num_nodes,
            graph.edge_rows,
            (*node_attrs, *graph.names_of_kind("node")),
            (*edge_attrs, *(edge_files or ()), *graph.names_of_kind("edge")),
        )
        check_nodes_fit(graph.num_nodes, method, refine)
        partition = _cut(graph, num_parts, method, seed, refine, grid)
        figures = _Writer(aside, graph, partition, kinds).write(grid, spool)
    return figures


def _cut(
    graph: GraphFiles,
    num_parts: int,
    method: str | Owner,
    seed: int,
    refine: bool,
    grid: Grid | None,
) -> Partition:
    if method == "stream" and not refine:
        return stream(graph.edges, graph.num_nodes, num_parts, seed=seed)
    is_named = isinstance(method, str)
    edge_index = torch.empty(2, 0, dtype=torch.int64)
    if refine or (is_named and method not in NEED_NO_EDGES):
        edge_index = torch.empty(2, graph.edges.num_edges, dtype=torch.int64)
        start = 0
        for pair in graph.edges.chunks("reading edges"):
            edge_index[:, start : start + pair.shape[1]] = torch.from_numpy(pair)
            start += pair.shape[1]
    return cut(
        edge_index,
        graph.num_nodes,
        num_parts,
        method,
        seed=seed,
        train_mask=_train_mask(graph),
        refine=refine,
        grid=grid,
    )


def _train_mask(graph: GraphFiles) -> torch.Tensor | None:
    mask = graph.columns.get("train_mask")
    if mask is None or mask.dtype != np.bool_ or mask.shape != (graph.num_nodes,):
        return None
    return torch.from_numpy(mask.take(0, graph.num_nodes))


@dataclass(eq=False)
class _Writer:
    """Writes the parts of one graph into the folder `out`."""

    out: Path
    graph: GraphFiles
    partition: Partition
    kinds: dict[str, Kind]

    def write(self, grid: Grid | None, spool: Path) -> PartitionReport:
        """Writes all files and META.json; returns the figures."""
        partition, out = self.partition, self.out
        write_array(out / OWNER, partition.owner)
        for part in range(partition.num_parts):
            (out / part_name(part)).mkdir()
            gid = out / part_name(part) / "node_gid.npy"
            write_array(gid, partition.gids(part))
        edges = self._edges()
        for name, kind in self.kinds.items():
            column = self.graph.columns[name]
            rows = self._node_rows if kind == "node" else self._edge_rows
            self._scatter(file_name(kind, name), column, rows(name, column))
        of_nodes = self.kinds.get("train_mask") == "node"
        train = _train_mask(self.graph) if of_nodes else None
        figures = self._count_rows(edges, grid, train)
        shutil.rmtree(spool)
        write_meta(out, self._meta(figures))
        return figures

    def _edges(self) -> np.ndarray:
        """Writes the edges of all parts; returns the number of each part's edges."""
        owner, parts = self.partition.owner.numpy(), self.partition.num_parts
        size = np.zeros(parts, np.int64)
        for _, dst in self.graph.edges.chunks("counting the edges of parts"):
            size += np.bincount(owner[dst], minlength=parts)
        gid = self._files("edge_gid.npy", np.int64, [(0,)] * parts)
        ends = self._files("edge_index.npy", np.int64, [(2, int(m)) for m in size])
        start = 0
        for pair in self.graph.edges.chunks("writing edges"):
            for part, here in group_by_part(owner[pair[1]]):
                at, last = gid[part].shape[0], int(size[part])
                gid[part].append(start + here)
                ends[part].write(at, pair[0, here])
                ends[part].write(last + at, pair[1, here])
            start += pair.shape[1]
        return size

    def _scatter(
        self,
        name: str,
        column: NpyColumn,
        pieces: Iterable[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Adds pieces (parts `[c]`, rows `[c, ...]`) to the files of parts, in order."""
        shape = (0, *column.shape[1:])
        files = self._files(name, column.dtype, [shape] * self.partition.num_parts)
        for owner, rows in pieces:
            for part, here in group_by_part(owner):
                files[part].append(rows[here])

    def _node_rows(
        self, name: str, column: NpyColumn
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        owner, start = self.partition.owner.numpy(), 0
        bar = tqdm(desc=name, total=owner.size, unit=" rows", disable=None, leave=False)
        with bar:
            for rows in column.rows():
                yield owner[start : start + len(rows)], rows
                start += len(rows)
                bar.update(len(rows))

    def _edge_rows(
        self, name: str, column: NpyColumn
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        owner = self.partition.owner.numpy()
        for pair, row in self._edges_and_rows(name):
            rows = column.take(int(row[0]), int(row[-1]) + 1)
            yield owner[pair[1]], rows[row - row[0]]

    def _edges_and_rows(self, what: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields chunks of edges, and the row of the file that each edge came from."""
        loops = others = 0
        for pair in self.graph.edges.chunks(what):
            if not self.graph.doubled:
                yield pair, np.arange(others, others + pair.shape[1])
                others += pair.shape[1]
                continue
            # an edge is followed by its reverse, unless it is a self-loop
            loop = pair[0] == pair[1]
            before_loops = loops + np.cumsum(loop) - loop
            before_others = others + np.cumsum(~loop) - ~loop
            yield pair, before_loops + before_others // 2
            loops += int(np.count_nonzero(loop))
            others += int(np.count_nonzero(~loop))

    def _files(
        self, name: str, dtype: Any, shapes: list[tuple[int, ...]]
    ) -> list[ArrayFile]:
        return [
            ArrayFile(self.out / part_name(part) / name, dtype, shape)
            for part, shape in enumerate(shapes)
        ]

    def _count_rows(
        self, size: np.ndarray, grid: Grid | None, train: torch.Tensor | None
    ) -> PartitionReport:
        count = RowCount(self.partition, grid)
        for part in tqdm(range(size.size), "counting rows", disable=None, leave=False):
            file = self.out / part_name(part) / "edge_index.npy"
            if size[part]:
                count.add(part, EdgeFile(file).chunks(f"part {part}"))
        return count.report(train)

    def _meta(self, figures: PartitionReport) -> Meta:
        num_edges = self.graph.edges.num_edges
        attributes = {}
        for name, kind in self.kinds.items():
            column = self.graph.columns[name]
            shape = [*column.shape]
            if kind == "edge":  # an edge and its reverse share a row of the file
                shape[0] = num_edges
            dtype = torch_name(column.name, column.dtype)
            attributes[name] = {"kind": kind, "dtype": dtype, "shape": shape}
        return graph_meta(self.out, self.partition, num_edges, attributes, {}, figures)


# ids from here on, if they are 100 times the edges, too, are taken for a mistake
MANY = 10**8


@dataclass
class GraphFiles:
    """Holds a graph whose edges, features and labels stay in files until they are read.

    edges     the edges, in chunks
    num_nodes the number of nodes
    edge_rows the number of edges in the file, which attributes of edges have rows for
    doubled   whether each of these is followed by its reverse
    columns   attributes by name; those of edges have a row per edge in the file, not doubled
    kinds     "node" or "edge", for the columns whose file tells it
    """

    edges: EdgeFile
    num_nodes: int
    edge_rows: int
    doubled: bool = False
    columns: dict[str, NpyColumn] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, column: NpyColumn, kind: str) -> None:
        """Adds a column, whose name must be free."""
        if name in self.columns or name == "edge_index":
            raise ValueError(
                f"{name}: {column.name} holds it, and so does another file; rename one"
            )
        self.columns[name], self.kinds[name] = column, kind

    def names_of_kind(self, kind: str) -> list[str]:
        """Returns the names of the columns whose file tells that they are of a kind."""
        return [name for name, one in self.kinds.items() if one == kind]


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
    """Opens a graph; tables are copied to .npy files in the folder `spool`.

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
    columns, names = ({}, None) if table is None else table.node_columns(spool)
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
        _check_rows(found.columns[name], found.num_nodes)
    for name, column in columns.items():
        _check_rows(column, found.num_nodes)
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


def _check_rows(column: NpyColumn, count: int) -> None:
    if not column.shape or column.shape[0] != count:
        raise ValueError(
            f"{column.name}: has the shape {list(column.shape)}, but there are {count} nodes "
            "(the largest id of the edges plus one, or --num-nodes): give a row for each; a "
            f"mask is bool [{count}]"
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
        pairs, columns = table.edges(num_nodes, names), table.edge_columns(spool)
    elif path.suffix == ".npy":
        edges, columns = EdgeFile(path), {}
        if num_nodes is not None:
            edges.limit(num_nodes)
        if not undirected and num_nodes is not None:
            return GraphFiles(edges, num_nodes, edges.num_edges)
        pairs = edges.chunks("reading edges")
    else:
        raise ValueError(
            f"{path}: edges are read from .npy, {', '.join(TABLES)} (text also as .gz); of an "
            ".npz file, unpack the arrays (unzip), and give each by its name"
        )
    copied, file = undirected or is_table(path), spool / "edges.npy"
    largest, rows = -1, 0
    writer = ArrayFile(file, np.int64, (0, 2))
    for pair in pairs:
        largest = max(largest, int(pair.max(initial=-1)))
        rows += pair.shape[1]
        if copied:
            writer.append(with_reverses(pair.T) if undirected else pair.T)
    if copied:
        edges = EdgeFile(file, pair_rows=True)
    count = _infer_num_nodes(path, largest, edges, num_nodes)
    edges.limit(count)
    found = GraphFiles(edges, count, rows, undirected)
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
