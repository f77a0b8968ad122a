"""Partitions a graph in files, out of core, into a partition folder: `partition_files`.

[Note: out of core] Memory holds what the cutter needs for the nodes, and a chunk. After the
cut, edges are read once more, and each is appended to the files of its part, so that a part's
edges keep their order without a sort; rows of attributes likewise. Rows to exchange are counted
by reading the parts back, one after another.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from pyg_distcomm.partition.folder import graph_meta
from pyg_distcomm.partition.layout import (
    OWNER,
    Meta,
    file_name,
    new_partition,
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

__all__ = ["is_source", "partition_files"]

NEED_NO_EDGES = ("block", "random")
HELD = "edge_index", "adj_t", "num_nodes"  # names that no attribute in a file may have
# ids from here on, if they are 100 times the edges, too, are taken for a mistake
MANY = 10**8


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
    force: bool = False,
) -> PartitionReport:
    """Writes every part of a graph in files into the new folder `out`, or nothing.

    source      a .npy file of edges, or a table of edges (.csv, .tsv, .txt, .el, .edges;
                .gz; .parquet, .arrow, .feather: `ArrowTable.edges`)
    method      "stream", "block", "random" and given owners take memory for the nodes
                and a chunk; the others, and `refine`, also for all edges (not features)
    grid        (r, s, p) of the ranks, for "grid", `refine` and the figures
    num_nodes   needed if the files do not tell it and the last nodes have no edges
    undirected  each edge stands for both directions (as OGB's add_inverse_edge)
    node_files, edge_files  .npy files by the name of the attribute
    node_table  a table (as of edges, with names of columns) with a row for each node, and a
                column for each attribute; in the order of ids, or with ids in a column "id". If
                these are not 0 .. n - 1 (texts, integers with gaps), node k is row k, and
                edges must be in a table, too: their ends are looked up in this column
    force       replaces an earlier partition folder

    Files are written beside `out`, flushed, and renamed at the end. See [Note: out of core].
    Raises ValueError, naming the file and the place in it, and TypeError for owners that are
    no integers.
    """
    out = Path(out)
    num_parts = check_num_parts(num_parts)
    if isinstance(method, str):
        check_method(method)
    columns = _Columns()
    columns.add("node", node_files or {})
    columns.add("edge", edge_files or {})
    with new_partition(out, force) as aside:
        spool = aside / "spool"
        spool.mkdir()
        graph = _open(Path(source), spool, num_nodes, undirected, columns, node_table)
        check_nodes_fit(graph.num_nodes, method, refine)
        partition = _cut(graph, num_parts, method, seed, refine, grid)
        figures = _Writer(aside, graph, partition).write(grid)
        shutil.rmtree(spool)
        write_meta(aside, _meta(aside, graph, partition, figures))
    return figures


def _cut(
    graph: _GraphFiles,
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
        train_mask=graph.train_mask(),
        refine=refine,
        grid=grid,
    )


class _Columns(dict[str, tuple[Kind, NpyColumn]]):
    """Holds attributes in files by name, each of the nodes or of the edges."""

    def add(self, kind: Kind, files: Mapping[str, Any]) -> None:
        """Adds columns, or .npy files of them, whose names must be free."""
        for name, file in files.items():
            column = file if isinstance(file, NpyColumn) else None
            if name in self or name in HELD:
                other = "what a Data holds" if name in HELD else self[name][1].name
                raise ValueError(
                    f"{name}: got a file for it, {column.name if column else file}, beside "
                    f"{other}; give it another name, or leave one out"
                )
            self[name] = kind, column or NpyColumn(file)

    def check_rows(self, num_nodes: int, num_edges: int) -> None:
        """Raises ValueError for a column without a row for each node, or edge in the file."""
        for kind, column in self.values():
            count = num_nodes if kind == "node" else num_edges
            if column.shape[:1] != (count,):
                raise ValueError(
                    f"{column.name}: has the shape {list(column.shape)}, but there are "
                    f"{count} {kind}s (nodes: the largest id of the edges plus one, or "
                    f"--num-nodes): give a row for each; a mask is bool [{count}]"
                )


@dataclass
class _GraphFiles:
    """Holds a graph whose edges, features and labels stay in files until they are read.

    edges     the edges, in chunks
    num_nodes the number of nodes
    edge_rows the number of edges in the file, which attributes of edges have rows for
    doubled   whether each of these is followed by its reverse, unless it is a self-loop
    columns   the attributes
    """

    edges: EdgeFile
    num_nodes: int
    edge_rows: int
    doubled: bool
    columns: _Columns

    def of(self, kind: Kind) -> dict[str, NpyColumn]:
        """Returns the columns of nodes or of edges."""
        return {name: column for name, (k, column) in self.columns.items() if k == kind}

    def train_mask(self) -> torch.Tensor | None:
        """Returns the attribute train_mask of the nodes, if there is one."""
        mask = self.of("node").get("train_mask")
        if mask is None or mask.dtype != np.bool_ or mask.shape != (self.num_nodes,):
            return None
        return torch.from_numpy(mask.take(0, self.num_nodes))


class _Writer:
    """Writes the parts of one graph into the folder `out`."""

    def __init__(self, out: Path, graph: _GraphFiles, partition: Partition) -> None:
        self.out, self.graph, self.partition = out, graph, partition
        self.owner = partition.owner.numpy()
        self.folders = [out / part_name(part) for part in range(partition.num_parts)]

    def write(self, grid: Grid | None) -> PartitionReport:
        """Writes all files but META.json; returns the figures."""
        write_array(self.out / OWNER, self.partition.owner)
        for part, folder in enumerate(self.folders):
            folder.mkdir()
            write_array(folder / "node_gid.npy", self.partition.gids(part))
        for name, column in self.graph.of("node").items():
            self._write_rows(name, column)
        size, count = self._write_edges(), RowCount(self.partition, grid)
        for part in tqdm(range(len(size)), "counting rows", disable=None, leave=False):
            if size[part]:
                file = EdgeFile(self.folders[part] / "edge_index.npy")
                count.add(part, file.chunks(f"part {part}"))
        return count.report(self.graph.train_mask())

    def _write_rows(self, name: str, column: NpyColumn) -> None:
        files, start = self._files(file_name("node", name), column.dtype, column), 0
        total = self.owner.size
        bar = tqdm(desc=name, total=total, unit=" rows", disable=None, leave=False)
        with bar:
            for rows in column.rows():
                owner = self.owner[start : start + len(rows)]
                for part, here in group_by_part(owner):
                    files[part].append(rows[here])
                start += len(rows)
                bar.update(len(rows))

    def _write_edges(self) -> np.ndarray:
        """Writes the edges of all parts, and their attributes; returns each part's number."""
        graph, owner = self.graph, self.owner
        size = np.zeros(len(self.folders), np.int64)
        for _, dst in graph.edges.chunks("counting the edges of parts"):
            size += np.bincount(owner[dst], minlength=size.size)
        gid = self._files("edge_gid.npy", np.int64)
        ends = [
            ArrayFile(folder / "edge_index.npy", np.int64, (2, int(m)))
            for folder, m in zip(self.folders, size, strict=True)
        ]
        columns = graph.of("edge")
        files = {
            name: self._files(file_name("edge", name), column.dtype, column)
            for name, column in columns.items()
        }
        start = 0
        for pair, row in self._edges_and_rows():
            first, last = int(row[0]), int(row[-1]) + 1
            held = {n: column.take(first, last) for n, column in columns.items()}
            for part, here in group_by_part(owner[pair[1]]):
                at = gid[part].shape[0]
                gid[part].append(start + here)
                ends[part].write(at, pair[0, here])
                ends[part].write(int(size[part]) + at, pair[1, here])
                for name, rows in held.items():
                    files[name][part].append(rows[row[here] - first])
            start += pair.shape[1]
        return size

    def _edges_and_rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields chunks of edges, and the row of the file that each edge came from."""
        rows = others = 0
        for pair in self.graph.edges.chunks("writing edges"):
            new = np.ones(pair.shape[1], np.bool_)
            if self.graph.doubled:
                loop = pair[0] == pair[1]
                place = others + np.cumsum(~loop)
                others, new = int(place[-1]), loop | (place % 2 == 1)
            yield pair, rows + np.cumsum(new) - 1
            rows += int(np.count_nonzero(new))

    def _files(
        self, name: str, dtype: Any, column: NpyColumn | None = None
    ) -> list[ArrayFile]:
        """Makes a file without rows in each part, for rows as those of a column."""
        shape = (0,) if column is None else (0, *column.shape[1:])
        return [ArrayFile(folder / name, dtype, shape) for folder in self.folders]


def _meta(
    out: Path, graph: _GraphFiles, partition: Partition, figures: PartitionReport
) -> Meta:
    num_edges, attributes = graph.edges.num_edges, {}
    for name, (kind, column) in graph.columns.items():
        # an edge and its reverse share a row of the file
        count = num_edges if kind == "edge" else graph.num_nodes
        shape, dtype = [count, *column.shape[1:]], torch_name(column.name, column.dtype)
        attributes[name] = {"kind": kind, "dtype": dtype, "shape": shape}
    return graph_meta(out, partition, num_edges, attributes, {}, figures)


def is_source(name: str) -> bool:
    """Returns whether a name is that of a file of edges."""
    path = Path(name)
    return path.suffix == ".npy" or is_table(path)


def _open(
    path: Path,
    spool: Path,
    num_nodes: int | None,
    undirected: bool,
    columns: _Columns,
    node_table: str | Path | None,
) -> _GraphFiles:
    """Opens a graph; tables are copied to .npy files in the folder `spool`."""
    names = None
    if node_table is not None:
        table = ArrowTable(Path(node_table))
        of_table, names = table.node_columns(spool)
        columns.add("node", of_table)
        num_nodes = table.num_rows if num_nodes is None else num_nodes
    if names is not None and not is_table(path):
        raise ValueError(
            f"{names.name}: these ids are not 0 .. {len(names.names) - 1}, and are looked up "
            f"for edges in tables only; make {path} one (.csv, .parquet, .arrow, .feather)"
        )
    if not path.is_file():
        raise ValueError(f"{path}: {'is a folder' if path.is_dir() else 'missing'}")
    found = _with_edges(path, spool, num_nodes, undirected, columns, names)
    columns.check_rows(found.num_nodes, found.edge_rows)
    if not found.num_nodes and num_nodes is None:
        raise ValueError(
            f"{path}: holds no edges, so it does not tell how many nodes there are; say "
            "it (--num-nodes), or give another file"
        )
    return found


def _with_edges(
    path: Path,
    spool: Path,
    num_nodes: int | None,
    undirected: bool,
    columns: _Columns,
    names: NodeNames | None,
) -> _GraphFiles:
    """Reads a table, adds reverses and counts nodes, in one pass; or needs none."""
    if is_table(path):
        table = ArrowTable(path)
        pairs = table.edges(num_nodes, names)
        columns.add("edge", table.copied(spool, "edge", table.ends()))
    elif path.suffix == ".npy":
        edges = EdgeFile(path)
        if num_nodes is not None:
            edges.limit(num_nodes)
        if not undirected and num_nodes is not None:
            return _GraphFiles(edges, num_nodes, edges.num_edges, False, columns)
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
    count = largest + 1 if num_nodes is None else num_nodes
    if num_nodes is None and largest >= max(MANY, 100 * edges.num_edges):
        raise ValueError(
            f"{path}: {edges.num_edges} edges have ids up to {largest}, and each of 0 .. "
            "the largest is a node; number them without gaps, or say how many there are "
            "(--num-nodes)"
        )
    edges.limit(count)
    return _GraphFiles(edges, count, rows, undirected, columns)
