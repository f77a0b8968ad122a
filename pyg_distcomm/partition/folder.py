"""Writes and reads a partitioned graph on disk, one folder per part, memory-mapped.

    OUT/META.json          what there is: sizes, attributes, figures, checksums
    OUT/owner.npy          [num_nodes], the part of each node
    OUT/graph__NAME.npy    a tensor of the whole graph
    OUT/part_00000/
        node_gid.npy       [n_i], ascending
        edge_gid.npy       [e_i], ascending: places in the edge_index of the Data
        edge_index.npy     [2, e_i], node ids of the Data
        node__NAME.npy     [n_i, ...], in the order of node_gid
        edge__NAME.npy     [e_i, ...], in the order of edge_gid

An edge and its attributes live with the owner of its target.

`verify_folder` lists what is wrong with one; `report` counts what a partition sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_distcomm.partition.arrays import (
    dtype_name,
    fsync_folder,
    read_array,
    write_array,
)
from pyg_distcomm.partition.attribute_levels import Kind, attribute_kinds
from pyg_distcomm.partition.layout import (
    OWNER,
    Meta,
    Verify,
    check_file,
    check_target,
    file_name,
    folder_meta,
    new_aside,
    part_name,
    put_in_place,
    write_meta,
    written,
)
from pyg_distcomm.partition.metrics import (
    PartitionReport,
    check_edge_index,
    plain_edges,
)
from pyg_distcomm.partition.partition import Grid, Partition, check_grid, owner_dtype

Counts = tuple[int, ...]


def report(
    edge_index: Tensor,
    partition: Partition,
    train_mask: Tensor | None = None,
    grid: Grid | None = None,
) -> PartitionReport:
    """Counts what each part owns, sends and receives, in time linear in the edges.

    edge_index [2, num_edges] and train_mask [num_nodes] (bool) are of the whole graph;
    grid (r, s, p) adds what its blocks hold, send and receive.
    """
    check_edge_index(edge_index, partition.num_nodes)
    plain = plain_edges(edge_index).cpu().numpy()
    home = partition.owner.numpy()[plain[1]]
    # stable sorts of 8- and 16-bit keys are radix sorts, so grouping by part is linear
    order = np.argsort(home, kind="stable")
    count = RowCount(partition, grid)
    start = 0
    for part, edges in enumerate(np.bincount(home, minlength=partition.num_parts)):
        count.add(part, [plain[:, order[start : start + edges]]])
        start += edges
    return count.report(train_mask)


class RowCount:
    """Counts the rows that travel, part after part, from the edges of each part.

    Memory: 25 bytes a node, and a chunk of edges; grids with s > 1: s bytes more for
    each node of one part.
    """

    def __init__(self, partition: Partition, grid: Grid | None = None) -> None:
        """Begins with no edges."""
        parts, n = partition.num_parts, partition.num_nodes
        self._partition = partition
        self._owner = partition.owner.numpy()
        self._grid = check_grid(grid, parts)
        r, s, _ = self._grid
        self._cut = 0
        self._edges = np.zeros(parts, np.int64)
        self._send, self._halo = np.zeros((2, parts), np.int64)
        self._blocks, self._block_send, self._block_halo = np.zeros((3, r, s), np.int64)
        # never cleared: a part, and a process row, reads what it wrote itself
        self._by_part, self._by_row = np.full((2, n), -1, np.int32)
        self._place = np.empty(n, np.int64)
        self._lid = np.empty(n if s > 1 else 0, np.int64)

    def add(self, part: int, chunks: Iterable[np.ndarray]) -> None:
        """Counts the edges `[2, c]` of one part; parts must come in ascending order."""
        _, s, p = self._grid
        sums = np.zeros(0, np.bool_)
        if s > 1:
            gid = self._partition.gids(part).numpy()
            self._lid[gid] = np.arange(gid.size)
            sums = np.zeros(gid.size * s, np.bool_)
        for src, dst in chunks:
            self._edges[part] += src.size
            owner = self._owner[src].astype(np.int64)
            away = src[owner != part]
            self._cut += away.size
            new = self._new(away, self._by_part, part)
            self._halo[part] += new.size
            self._send += np.bincount(self._owner[new], minlength=self._send.size)
            self._add_rows(part // (s * p), src[owner // (s * p) != part // (s * p)])
            self._add_blocks(part, owner // p % s, dst, sums)

    def _new(self, gid: np.ndarray, seen: np.ndarray, stamp: int) -> np.ndarray:
        """Picks the ids that do not bear the stamp yet, each once, and stamps them."""
        gid = gid[seen[gid] != stamp]
        place = np.arange(gid.size)
        self._place[gid] = place
        gid = gid[self._place[gid] == place]
        seen[gid] = stamp
        return gid

    def _add_rows(self, i: int, away: np.ndarray) -> None:
        _, s, p = self._grid
        new = self._owner[self._new(away, self._by_row, i)].astype(np.int64)
        np.add.at(self._block_send, (new // (s * p), new // p % s), 1)
        np.add.at(self._block_halo[i], new // p % s, 1)

    def _add_blocks(
        self, part: int, col: np.ndarray, dst: np.ndarray, sums: np.ndarray
    ) -> None:
        _, s, p = self._grid
        i, j = part // (s * p), part // p % s
        self._blocks[i] += np.bincount(col, minlength=s)
        if s == 1:
            return
        away = col != j
        key = self._lid[dst[away]] * s + col[away]
        key = np.unique(key[~sums[key]])
        sums[key] = True
        self._block_send[i] += np.bincount(key % s, minlength=s)
        self._block_halo[i, j] += key.size

    def report(self, train_mask: Tensor | None = None) -> PartitionReport:
        """Returns the figures of all that was counted."""
        r, s, p = self._grid
        figures = PartitionReport(
            nodes=self._partition.sizes,
            edges=tuple(self._edges.tolist()),
            train=_train(train_mask, self._owner, self._send.size),
            edge_cut=self._cut,
            halo_rows=tuple(self._halo.tolist()),
            send_rows=tuple(self._send.tolist()),
            before=self._partition.before,
        )
        if s * p == 1:
            return figures
        blocks = (self._blocks, self._block_send, self._block_halo)
        flat = (tuple(block.reshape(-1).tolist()) for block in blocks)
        return figures.on_grid((r, s, p), *flat)


def _train(train_mask: Tensor | None, owner: np.ndarray, num_parts: int) -> Counts:
    if train_mask is None:
        return (0,) * num_parts
    mask = train_mask.cpu().numpy()
    if mask.shape != owner.shape or mask.dtype != np.bool_:
        raise ValueError(
            f"train_mask must be bool [{owner.size}], one entry per node, got "
            f"{train_mask.dtype} {list(train_mask.shape)}"
        )
    return tuple(np.bincount(owner[mask], minlength=num_parts).tolist())


@dataclass(frozen=True, eq=False)
class PartShare:
    """One part of a graph, as it lies on disk (n_i nodes, e_i edges).

    node_gid   [n_i] int64, ascending
    edge_gid   [e_i] int64: places in the edge_index of the whole graph
    edge_index [2, e_i] int64, node ids of the whole graph; targets are this part's
    node, edge attributes with a row per own node or edge
    graph      attributes of the whole graph: tensors and plain values
    """

    part: int
    partition: Partition
    num_edges_global: int
    node_gid: Tensor
    edge_gid: Tensor
    edge_index: Tensor
    node: dict[str, Tensor]
    edge: dict[str, Tensor]
    graph: dict[str, Any]

    def __repr__(self) -> str:
        return (
            f"PartShare({self.part}/{self.partition.num_parts}, "
            f"{self.node_gid.numel()} of {self.partition.num_nodes} nodes, "
            f"{self.edge_gid.numel()} of {self.num_edges_global} edges, "
            f"node={list(self.node)}, edge={list(self.edge)}, graph={list(self.graph)})"
        )


def write_folder(
    out: str | Path,
    data: Data,
    partition: Partition,
    *,
    node_attrs: Iterable[str] = (),
    edge_attrs: Iterable[str] = (),
    grid: Grid | None = None,
    force: bool = False,
) -> PartitionReport:
    """Writes every part of `data` into the new folder `out`, or nothing at all.

    All is written beside `out`, flushed, and renamed at the end. `force` replaces an
    earlier partition folder. `grid` (r, s, p) adds figures of its blocks. Needs one
    part in memory next to the graph.
    Raises ValueError for a graph that does not fit the partition, for attributes that
    `attribute_kinds` refuses, and where `out` exists; TypeError for an attribute that
    is neither a dense tensor nor a plain value.
    """
    out = Path(out)
    aside = new_aside(out)
    check_target(out, force)
    kinds = attribute_kinds(data, node_attrs, edge_attrs)
    source = _Source(data, _edges(data, partition), partition, kinds)
    figures = report(source.edge_index, partition, _train_mask(source), grid)
    with written(aside, out):
        aside.mkdir(parents=True)
        _write_all(aside, source, figures)
        put_in_place(aside, out, force)
    return figures


def read_part(
    folder: str | Path, part: int, *, verify: Verify = "checksums", mmap: bool = True
) -> PartShare:
    """Reads one part, and no file of another.

    verify="checksums" reads every byte once and compares it with META.json, at the price
    of a second or less for each GB of the part; "sizes" compares lengths, dtypes and
    shapes, and looks at ids. Raises ValueError, naming the file, for whatever does not agree.
    """
    if verify not in ("sizes", "checksums"):
        raise ValueError(f"verify must be 'sizes' or 'checksums', got {verify!r}")
    folder = Path(folder)
    meta = folder_meta(folder)
    if not 0 <= part < meta["num_parts"]:
        raise ValueError(
            f"{folder}: got part {part}, but its parts are 0 .. {meta['num_parts'] - 1}"
        )
    for name in _files_of(meta, part):
        check_file(folder, meta, name, verify)
    share = open_part(folder, meta, part, mmap)
    for problem in wrong_ids(share, folder / part_name(part)):
        raise ValueError(f"{problem}; write the folder again")
    return share


def wrong_ids(share: PartShare, here: Path) -> Iterator[str]:
    """Yields which ids of a part's nodes and edges contradict the owners of nodes."""
    partition, part = share.partition, share.part
    if not torch.equal(share.node_gid, partition.gids(part)):
        yield f"{here / 'node_gid.npy'}: not the nodes that owner.npy gives to {part}"
    if not _within(share.edge_gid, share.num_edges_global):
        yield f"{here / 'edge_gid.npy'}: an edge id is out of range"
    elif bool((share.edge_gid.diff() <= 0).any()):
        yield f"{here / 'edge_gid.npy'}: edge ids do not ascend"
    if not _within(share.edge_index, partition.num_nodes):
        yield f"{here / 'edge_index.npy'}: a node id is out of range"
    elif bool((partition.owner_of(share.edge_index[1]) != part).any()):
        yield f"{here / 'edge_index.npy'}: a target is owned by another part"


def _within(ids: Tensor, count: int) -> bool:
    if ids.numel() == 0:
        return True
    low, high = torch.aminmax(ids)
    return int(low) >= 0 and int(high) < count


def _files_of(meta: Meta, part: int) -> list[str]:
    """Lists what a part is read from."""
    names = ["node_gid.npy", "edge_gid.npy", "edge_index.npy"]
    whole = [OWNER]
    for name, attr in meta["attributes"].items():
        of_graph = attr["kind"] == "graph"
        (whole if of_graph else names).append(file_name(attr["kind"], name))
    return [*whole, *(f"{part_name(part)}/{name}" for name in names)]


def open_part(folder: Path, meta: Meta, part: int, mmap: bool = True) -> PartShare:
    """Reads one part without looking at what its ids say."""
    here = folder / part_name(part)
    nodes, edges = meta["report"]["nodes"][part], meta["report"]["edges"][part]
    rows: dict[Kind, dict[str, Tensor]] = {"node": {}, "edge": {}, "graph": {}}
    for name, attr in meta["attributes"].items():
        kind: Kind = attr["kind"]
        count = {"node": nodes, "edge": edges}.get(kind)
        shape = attr["shape"] if count is None else [count, *attr["shape"][1:]]
        path = (folder if count is None else here) / file_name(kind, name)
        rows[kind][name] = read_array(path, attr["dtype"], shape, mmap)
    return PartShare(
        part=part,
        partition=read_partition(folder, meta, mmap),
        num_edges_global=meta["num_edges"],
        node_gid=read_array(here / "node_gid.npy", "int64", [nodes], mmap),
        edge_gid=read_array(here / "edge_gid.npy", "int64", [edges], mmap),
        edge_index=read_array(here / "edge_index.npy", "int64", [2, edges], mmap),
        node=rows["node"],
        edge=rows["edge"],
        graph={**rows["graph"], **meta["values"]},
    )


def read_partition(folder: Path, meta: Meta, mmap: bool = True) -> Partition:
    """Reads who owns which node; raises ValueError, naming the file, when damaged."""
    path, num_parts = folder / OWNER, meta["num_parts"]
    dtype = dtype_name(owner_dtype(num_parts))
    owner = read_array(path, dtype, [meta["num_nodes"]], mmap)
    try:
        partition = Partition.from_owner(owner, num_parts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if list(partition.sizes) != meta["report"]["nodes"]:
        raise ValueError(f"{path}: its parts are not as large as META.json says")
    return partition.refined_from(PartitionReport.from_dict(meta["report"]).before)


@dataclass(frozen=True, eq=False)
class _Source:
    data: Data
    edge_index: Tensor
    partition: Partition
    kinds: dict[str, Kind]


def _write_all(out: Path, source: _Source, figures: PartitionReport) -> None:
    partition = source.partition
    attributes, values = _describe(source.data, source.kinds)
    files = {OWNER: write_array(out / OWNER, partition.owner)}
    for name, attr in attributes.items():
        if attr["kind"] == "graph":
            file = file_name("graph", name)
            files[file] = write_array(out / file, torch.as_tensor(source.data[name]))
    home = partition.owner[source.edge_index[1].long()]
    for part in tqdm(range(partition.num_parts), "writing parts", disable=None):
        files |= _write_part(out, source, home, part)
    write_meta(
        out,
        {
            "num_nodes": partition.num_nodes,
            "num_edges": source.edge_index.size(1),
            "num_parts": partition.num_parts,
            "partition": partition.digest(),
            "attributes": attributes,
            "values": values,
            "report": asdict(figures),
            "files": files,
        },
    )


def _write_part(
    out: Path, source: _Source, home: Tensor, part: int
) -> dict[str, dict[str, str | int]]:
    folder = part_name(part)
    (out / folder).mkdir()
    node_gid = source.partition.gids(part)
    edge_gid = (home == part).nonzero().view(-1)
    files = {}

    def write(name: str, tensor: Tensor) -> None:
        files[f"{folder}/{name}"] = write_array(out / folder / name, tensor)

    write("node_gid.npy", node_gid)
    write("edge_gid.npy", edge_gid)
    write("edge_index.npy", source.edge_index[:, edge_gid].to(torch.int64))
    for name, kind in source.kinds.items():
        if kind != "graph":
            rows = torch.as_tensor(source.data[name])
            gid = node_gid if kind == "node" else edge_gid
            write(file_name(kind, name), rows[gid.to(rows.device)])
    fsync_folder(out / folder)
    return files


def _describe(data: Data, kinds: dict[str, Kind]) -> tuple[Meta, Meta]:
    """Sorts attributes into arrays (kind, dtype and shape) and plain values."""
    attributes: Meta = {}
    values: Meta = {}
    for name, kind in kinds.items():
        value = data[name]
        if _is_plain(value):
            values[name] = value
            continue
        tensor = _dense(name, value)
        attributes[name] = {
            "kind": kind,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
        }
    return attributes, values


def _dense(name: str, value: Any) -> Tensor:
    try:
        tensor: Tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise _not_dense(name, value) from None
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise _not_dense(name, value)
    return tensor


def _not_dense(name: str, value: Any) -> TypeError:
    return TypeError(
        f"attribute {name!r} is a {type(value).__name__}; a partition folder keeps "
        "dense tensors, str, int, float, bool, and lists and dicts of them; "
        "delete or convert it first"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(entry) for entry in value)
    if isinstance(value, dict):
        names = all(isinstance(name, str) for name in value)
        return names and all(_is_plain(entry) for entry in value.values())
    return value is None or type(value) in (str, int, float, bool)


def _edges(data: Data, partition: Partition) -> Tensor:
    if int(data.num_nodes or 0) != partition.num_nodes:
        raise ValueError(
            f"the graph has {data.num_nodes} nodes, the partition "
            f"{partition.num_nodes}; cut this graph, or set data.num_nodes"
        )
    if data.edge_index is None:
        raise ValueError(
            "data.edge_index is missing; convert adj_t to edge_index first"
        )
    edge_index: Tensor = data.edge_index
    return edge_index.detach().as_subclass(Tensor).cpu()


def _train_mask(source: _Source) -> Tensor | None:
    if source.kinds.get("train_mask") != "node":
        return None
    mask = torch.as_tensor(source.data["train_mask"])
    return mask if mask.dim() == 1 and mask.dtype == torch.bool else None


def verify_folder(folder: str | Path, *, checksums: bool = True) -> list[str]:
    """Lists what is wrong with a partition folder, naming the file; empty when whole.

    Looks at lengths, dtypes and shapes; that the parts own every node once, in
    ascending order, and hold every edge once, with its target; and, on demand, at the
    sha256 of each file. Needs num_edges bytes and a part's indices in memory.
    """
    folder = Path(folder)
    try:
        meta = folder_meta(folder)
    except ValueError as error:
        return [str(error)]
    problems = _wrong_files(folder, meta, checksums)
    return problems or _inconsistencies(folder, meta)


def _wrong_files(folder: Path, meta: Meta, checksums: bool) -> list[str]:
    problems = []
    for name in tqdm(meta["files"], "checking files", disable=None, leave=False):
        try:
            check_file(folder, meta, name, "checksums" if checksums else "sizes")
        except ValueError as error:
            problems.append(str(error))
    return problems


def _inconsistencies(folder: Path, meta: Meta) -> list[str]:
    problems: list[str] = []
    seen = torch.zeros(meta["num_edges"], dtype=torch.bool)
    try:
        if read_partition(folder, meta).digest() != meta["partition"]:
            problems.append(f"{folder / 'owner.npy'}: not the partition of META.json")
        for part in range(meta["num_parts"]):
            share = open_part(folder, meta, part)
            problems += _wrong_part(share, folder / part_name(part), seen)
    except ValueError as error:
        return [*problems, str(error)]
    return problems


def _wrong_part(share: PartShare, here: Path, seen: Tensor) -> Iterator[str]:
    """Yields what is wrong with one part; marks its edges in `seen`."""
    problems = list(wrong_ids(share, here))
    yield from problems
    if not any("out of range" in problem for problem in problems):
        if bool(seen[share.edge_gid].any()):
            yield f"{here / 'edge_gid.npy'}: an edge is held by an earlier part too"
        seen[share.edge_gid] = True
