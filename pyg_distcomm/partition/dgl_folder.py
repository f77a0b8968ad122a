"""Reads folders that DGL's `dgl.distributed.partition_graph` wrote, without DGL.

    OUT/NAME.json          sizes, ranges of node and edge ids, the files of each part
    OUT/part0/             graph.dgl, node_feat.dgl, edge_feat.dgl

DGL renumbers nodes and edges so that those of a part are contiguous; parts are read with
these ids. Its features `feat`, `label` and, of edges, `weight` become x, y and edge_weight.

[Note: the format] Files are little-endian: counts are uint64, strings and lists are preceded
by their length. A tensor is a magic number, 8 bytes unused, its device (2 int32), its
number of dims (int32), its dtype (code uint8, bits uint8, lanes uint16), its shape (int64),
the number of bytes of its values (int64), and the values. Graphs begin at byte 4096, as COO,
CSR or CSC. Sources: the comments in DGL's src/graph/serialize, and files of DGL 1.1.3.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.partition.layout import Meta, load_json
from pyg_distcomm.partition.part_share import PartShare, check_ends
from pyg_distcomm.partition.partition import Partition

__all__ = ["dgl_folder_meta", "is_dgl_folder", "read_dgl_folder", "read_dgl_partition"]

TENSORS, GRAPHS, TENSOR = 0xDD5A9FBE3FA2443F, 0xDD2E4FF046B4A13F, 0xDD5E40F096B4A13F
HETERO, META_GRAPH, UNIT = 0xDD589FBE35224ABF, 0xDD3C5FFE20046ABF, 0xDD2E60F0F6B4A127
CSR, COO = 0xDD6CD31205DFF127, 0xDD61FFD305DFF127
BEGIN = 4096  # the offset of graphs in their file
AS_COO, AS_CSR, AS_CSC = 1, 2, 4
MOST_DIMS, MOST_NAME = 16, 1 << 12
KINDS = {0: "i", 1: "u", 2: "f"}
NODE_NAMES = {"feat": "x", "features": "x", "label": "y", "labels": "y"}
EDGE_NAMES = {"feat": "edge_attr", "weight": "edge_weight"}
CONFIG = {"num_parts", "num_nodes", "num_edges", "node_map", "edge_map", "part-0"}


def is_dgl_folder(folder: str | Path) -> bool:
    """Returns whether DGL wrote a folder, or a .json file in it."""
    return bool(_configs(Path(folder)))


def dgl_folder_meta(folder: str | Path) -> tuple[Path, Meta]:
    """Finds and reads the JSON file that describes the parts.

    Raises:
        ValueError: naming the file, if there is none or more than one, if it is damaged,
            or if the graph is heterogeneous or was not renumbered.
    """
    found = _configs(Path(folder))
    if len(found) != 1:
        names = ", ".join(path.name for path, _ in found) or "none"
        raise ValueError(
            f"{folder}: wanted one .json file by DGL's partition_graph, found {names}; "
            "give the path of the file itself"
        )
    path, meta = found[0]
    for name in ("node_map", "edge_map"):
        ranges = meta[name]
        if not isinstance(ranges, dict):
            raise ValueError(
                f"{path}: its {name} is {ranges!r}, not ranges of ids; partition the graph "
                "by a DGL of 0.7 or later, with reshuffle=True"
            )
        if len(ranges) != 1:
            raise ValueError(
                f"{path}: a heterogeneous graph ({name} of {', '.join(ranges)}); only "
                "homogeneous ones are read, so partition dgl.to_homogeneous(g)"
            )
    if type(meta["num_parts"]) is not int or meta["num_parts"] < 1:
        raise ValueError(
            f"{path}: num_parts is {meta['num_parts']!r}, wanted 1 or more"
        )
    return path, meta


def _configs(folder: Path) -> list[tuple[Path, Meta]]:
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else [folder]
    found = []
    for path in paths if folder.is_dir() or folder.suffix == ".json" else []:
        try:
            meta = load_json(path)
        except ValueError:
            continue
        if set(meta) >= CONFIG:
            found.append((path, meta))
    return found


def read_dgl_partition(folder: str | Path) -> Partition:
    """Reads the partition of the nodes; raises ValueError, naming the file, when damaged."""
    path, meta = dgl_folder_meta(folder)
    ends = _id_bounds(path, meta, "node")
    return Partition.from_owner(
        torch.repeat_interleave(ends.diff()), meta["num_parts"], int(ends[-1])
    )


def _id_bounds(path: Path, meta: Meta, kind: str) -> Tensor:
    """Returns the first id of each part, and the end of the last part's ids."""
    (ranges,) = meta[f"{kind}_map"].values()
    total, wanted = meta[f"num_{kind}s"], f"{meta['num_parts']} ranges [begin, end]"
    try:
        pairs = torch.tensor(ranges, dtype=torch.int64).view(meta["num_parts"], 2)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{path}: {kind}_map holds no {wanted}: {ranges!r}") from None
    ends = torch.cat([pairs[:1, 0], pairs[:, 1]])
    fits = torch.equal(ends[:-1], pairs[:, 0]) and bool((ends.diff() >= 0).all())
    if not fits or int(ends[0]) != 0 or int(ends[-1]) != total:
        raise ValueError(
            f"{path}: {kind}_map must hold {wanted} that follow one another, of 0 .. "
            f"{total}; got {ranges!r}"
        )
    return ends


def read_dgl_folder(folder: str | Path, part: int) -> PartShare:
    """Reads one part, nodes and edges ascending by DGL's ids.

    Raises:
        ValueError: naming the file, if one is missing, damaged or does not fit the others,
            and for a heterogeneous graph.
    """
    path, meta = dgl_folder_meta(folder)
    partition = read_dgl_partition(folder)
    if not 0 <= part < partition.num_parts:
        raise ValueError(
            f"{path}: got part {part}, but its parts are 0 .. {partition.num_parts - 1}"
        )
    files = _files(path, meta, part)
    nodes, edges = _id_bounds(path, meta, "node"), _id_bounds(path, meta, "edge")
    node_gid = torch.arange(int(nodes[part]), int(nodes[part + 1]))
    edge_gid = torch.arange(int(edges[part]), int(edges[part + 1]))
    edge_index = _edges(files["part_graph"], partition, part, edge_gid)
    node = _rows(files["node_feats"], node_gid.numel(), NODE_NAMES)
    edge = _rows(files["edge_feats"], edge_gid.numel(), EDGE_NAMES)
    return PartShare(
        part=part,
        partition=partition,
        num_edges_global=int(edges[-1]),
        node_gid=node_gid,
        edge_gid=edge_gid,
        edge_index=edge_index,
        node=node,
        edge=edge,
        graph={},
    )


def _files(path: Path, meta: Meta, part: int) -> dict[str, Path]:
    """Returns the paths of a part's files, which are in the folder of the JSON file."""
    names, directory = meta.get(f"part-{part}"), path.parent
    files = {}
    for kind in ("part_graph", "node_feats", "edge_feats"):
        name = names.get(kind) if isinstance(names, dict) else None
        if not isinstance(name, str):
            raise ValueError(
                f"{path}: part-{part} names no {kind}; folders for GraphBolt "
                "(use_graphbolt=True) are not read: partition without it"
            )
        files[kind] = directory / name
        if not files[kind].resolve().is_relative_to(directory.resolve()):
            # DGL wrote absolute paths, or paths from its working folder: look beside the JSON
            files[kind] = directory.joinpath(*Path(name).parts[-2:])
    return files


def _rows(path: Path, count: int, names: dict[str, str]) -> dict[str, Tensor]:
    """Reads features by name; the type is dropped from their names."""
    rows: dict[str, Tensor] = {}
    reader = _DglReader(path)
    reader.expect(TENSORS, "features")
    reader.uint64()
    for full, tensor in reader.named_tensors():
        short = full.rpartition("/")[2]
        name = names.get(short, short)
        name = short if name in rows else name
        if tensor.dim() == 0 or tensor.size(0) != count:
            raise ValueError(
                f"{path}: {full!r} has shape {list(tensor.shape)}, but needs {count} rows"
            )
        rows[name] = tensor.bool() if name.endswith("_mask") else tensor
    return rows


def _edges(path: Path, partition: Partition, part: int, edge_gid: Tensor) -> Tensor:
    """Reads the edge_index of a part, ascending by edge id."""
    src, dst, node, edge = _DglReader(path).graph()
    for name, rows, count in (("_ID", node, None), ("_ID", edge, src.numel())):
        if name not in rows or (count is not None and rows[name].numel() != count):
            raise ValueError(f"{path}: has no {name!r} for each of its nodes and edges")
    inner = edge.get("inner_edge", torch.ones_like(src)).bool()
    if inner.shape != src.shape:
        raise ValueError(f"{path}: inner_edge is not one number for each edge")
    gid, order = edge["_ID"][inner].sort()
    if not torch.equal(gid, edge_gid):
        raise ValueError(
            f"{path}: not the edges that edge_map gives to part {part}; graphs that were "
            "not renumbered are not read"
        )
    local = torch.stack([src[inner], dst[inner]])[:, order]
    ids = node["_ID"]
    if local.numel() and not 0 <= int(local.min()) <= int(local.max()) < ids.numel():
        raise ValueError(f"{path}: an edge ends at a node that the part does not list")
    edge_index = ids[local]
    check_ends(edge_index, partition, part, path)
    return edge_index


class _DglReader:
    """Reads numbers, strings and tensors from a file, in order, with bounds checked."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        try:
            with open(path, "rb") as file:
                size = path.stat().st_size
                if not size:
                    raise ValueError(f"{path}: is empty")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ValueError(f"{path}: missing") from None
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error}") from None

    def take(self, count: int) -> bytes:
        """Returns the next bytes."""
        self._check_remaining(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def _check_remaining(self, count: int) -> None:
        if not 0 <= count <= len(self.data) - self.at:
            raise ValueError(
                f"{self.path}: ends early, or is damaged: {count} bytes are wanted at "
                f"{self.at} of {len(self.data)}"
            )

    def unpack(self, form: str) -> tuple[Any, ...]:
        """Returns the next numbers, by a format of `struct`, little-endian."""
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def uint64(self) -> int:
        """Returns the next count."""
        (value,) = self.unpack("Q")
        return int(value)

    def expect(self, magic: int, what: str) -> None:
        """Reads a magic number; raises ValueError if it is another one."""
        got = self.uint64()
        if got != magic:
            raise ValueError(
                f"{self.path}: no {what} by DGL at byte {self.at - 8}: got {got:x}, wanted "
                f"{magic:x}"
            )

    def string(self) -> str:
        """Returns the next string."""
        size = self.uint64()
        if size > MOST_NAME:
            raise ValueError(
                f"{self.path}: a name of {size} bytes: the file is damaged"
            )
        return self.take(size).decode("utf-8", "replace")

    def tensor(self) -> Tensor:
        """Returns the next tensor, copied."""
        self.expect(TENSOR, "tensor")
        dims, code, bits, lanes = self.unpack("8x8xiBBH")
        if not 0 <= dims <= MOST_DIMS or lanes != 1 or code not in KINDS or bits % 8:
            raise ValueError(
                f"{self.path}: a tensor of {dims} dims and dtype ({code}, {bits}, {lanes}) "
                f"at byte {self.at}: not read, or damaged"
            )
        *shape, size = self.unpack(f"{dims}qq")
        try:
            dtype = np.dtype(f"<{KINDS[code]}{bits // 8}")
        except TypeError as error:
            raise ValueError(f"{self.path}: {error}") from None
        if min(shape, default=0) < 0 or size != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{self.path}: a tensor of shape {shape} and {dtype} has {size} bytes"
            )
        values = np.frombuffer(self.take(size), dtype).reshape(shape).copy()
        try:
            return torch.from_numpy(values)
        except TypeError as error:
            raise ValueError(f"{self.path}: {error}") from None

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Returns the next list of names and tensors."""
        return [(self.string(), self.tensor()) for _ in range(self._count())]

    def _count(self) -> int:
        count = self.uint64()
        self._check_remaining(count)  # an item has a byte at least
        return count

    def graph(self) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Returns the sources, targets, node data and edge data of the first graph."""
        self.expect(GRAPHS, "graphs")
        version, kind, count = self.unpack("QQQ")
        if (version, count) != (2, 1):
            raise ValueError(
                f"{self.path}: version {version} with {count} graphs; wanted version 2, one "
                f"graph (kind {kind})"
            )
        self.at = BEGIN
        self.at = self.uint64()  # after labels
        self.expect(HETERO, "graph")
        self._meta_graph()
        if self._count() != 1:
            raise ValueError(f"{self.path}: holds several types of edges")
        src, dst = self._unit_graph()
        self.take(8 * self._count())  # numbers of nodes
        rows = []
        for what in ("nodes", "edges"):
            if self._count() != 1:
                raise ValueError(f"{self.path}: holds several types of {what}")
            rows.append(dict(self.named_tensors()))
        return src, dst, rows[0], rows[1]

    def _meta_graph(self) -> None:
        self.expect(META_GRAPH, "graph of types")
        self._matrix(CSR, 1)

    def _matrix(self, magic: int, flags: int) -> tuple[Tensor, Tensor, Tensor]:
        """Reads a sparse matrix: sizes, three tensors, and what is sorted."""
        self.expect(magic, "matrix")
        self.take(16)
        found = self.tensor(), self.tensor(), self.tensor()
        self.take(flags)
        return found

    def _unit_graph(self) -> tuple[Tensor, Tensor]:
        self.expect(UNIT, "edges")
        saved, _ = self.unpack("QQ")
        # a bit mask of formats; up to DGL 0.5 the number of one format
        forms = saved & 0xFFFFFFFF if saved >> 32 else 1 << (saved - 1) if saved else 0
        found = None
        for form in (AS_COO, AS_CSR, AS_CSC):
            if forms & form:
                self._meta_graph()
                coo = form == AS_COO
                first, second, order = self._matrix(
                    COO if coo else CSR, 2 if coo else 1
                )
                found = found or self._edge_ends(form, first, second, order)
        if found is None:
            raise ValueError(
                f"{self.path}: its edges are saved in no known format, wanted COO, CSR or CSC; "
                "partition the graph by DGL 0.7 or later"
            )
        return found

    def _edge_ends(
        self, form: int, first: Tensor, second: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns sources and targets in the order of edge ids."""
        if form != AS_COO:
            sizes = first.diff()
            if first.dim() != 1 or not first.numel() or bool((sizes < 0).any()):
                raise ValueError(f"{self.path}: the offsets of its rows do not ascend")
            first = torch.repeat_interleave(sizes)
        if first.shape != second.shape or first.dim() != 1:
            raise ValueError(
                f"{self.path}: {first.numel()} sources, but {second.numel()} targets"
            )
        if form == AS_CSC:
            first, second = second, first
        first, second = first.long(), second.long()
        if not order.numel():  # in the order of ids already
            return first, second
        inverse = order.long().argsort()
        if order.shape != first.shape or not torch.equal(
            order.long()[inverse], torch.arange(first.numel())
        ):
            raise ValueError(f"{self.path}: edge ids are not 0 .. {first.numel() - 1}")
        return first[inverse], second[inverse]
