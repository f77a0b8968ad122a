"""Writes, reads and verifies a partitioned graph on disk, one folder per part.

    OUT/META.json          sizes, attributes, figures, checksums
    OUT/owner.npy          [num_nodes], the part of each node
    OUT/graph__NAME.npy    a tensor of the whole graph
    OUT/part_00000/
        node_gid.npy       [n_i], ascending
        edge_gid.npy       [e_i], ascending: places in the edge_index of the Data
        edge_index.npy     [2, e_i], node ids of the Data
        node__NAME.npy     [n_i, ...], in the order of node_gid
        edge__NAME.npy     [e_i, ...], in the order of edge_gid

An edge and its attributes live with the owner of its target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data
from tqdm import tqdm

from pyg_distcomm.partition.atomic import sync
from pyg_distcomm.partition.layout import (
    OWNER,
    Meta,
    Verify,
    check_file,
    check_target,
    dtype_name,
    file_name,
    folder_meta,
    new_folder,
    part_name,
    read_array,
    write_array,
    write_meta,
)
from pyg_distcomm.partition.partition import (
    Grid,
    Partition,
    PartitionReport,
    out_of_range,
    owner_dtype,
)
from pyg_distcomm.partition.report import report

__all__ = [
    "PartShare",
    "read_part",
    "verify_folder",
    "write_folder",
]

Kind = Literal["node", "edge", "graph"]

STRUCTURE = ("edge_index", "num_nodes")
NODE_NAMES = ("x", "y", "pos", "batch")
EDGE_NAMES = ("edge_attr", "edge_weight", "edge_type")


@dataclass(frozen=True, eq=False)
class PartShare:
    """Holds one part of a graph as it is on disk (n_i nodes, e_i edges).

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


def merged(parts: list[PartShare], num_parts: int) -> PartShare:
    """Joins parts that follow one another into one of fewer, even ones: see `load_partition`.

    Rows ascend by node id, and edges by their place in the whole graph, as in one part.

    Args:
        parts: those from floor(k N / P) to floor((k + 1) N / P) - 1 of N, for some k.
        num_parts: P.

    Raises:
        ValueError: if one part has rows of another name, width or dtype than the first.
    """
    first = parts[0]
    for other in parts[1:]:
        _check_alike(first, other)
    before = first.partition.num_parts
    if num_parts == before:
        return first
    place = torch.arange(before)
    cuts = torch.tensor([k * before // num_parts for k in range(1, num_parts)])
    home = torch.bucketize(place, cuts, right=True) if num_parts > 1 else 0 * place
    owner = home[first.partition.owner.long()]
    node, node_order = torch.cat([part.node_gid for part in parts]).sort()
    edge, edge_order = torch.cat([part.edge_gid for part in parts]).sort()

    def rows(kind: str, order: Tensor) -> dict[str, Tensor]:
        held = [getattr(part, kind) for part in parts]
        return {n: torch.cat([each[n] for each in held])[order] for n in held[0]}

    return PartShare(
        part=int(home[first.part]),
        partition=Partition.from_owner(owner, num_parts, first.partition.num_nodes),
        num_edges_global=first.num_edges_global,
        node_gid=node,
        edge_gid=edge,
        edge_index=torch.cat([part.edge_index for part in parts], 1)[:, edge_order],
        node=rows("node", node_order),
        edge=rows("edge", edge_order),
        graph=first.graph,
    )


def _check_alike(first: PartShare, other: PartShare) -> None:
    for kind in ("node", "edge"):
        one, two = (
            {n: f"{list(rows.shape[1:])} {rows.dtype}" for n, rows in held.items()}
            for held in (getattr(first, kind), getattr(other, kind))
        )
        if one != two:
            raise ValueError(
                f"parts {first.part} and {other.part} cannot be merged: their {kind} rows "
                f"are {one} and {two}"
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
    check_target(out, force)
    kinds = attribute_kinds(data, node_attrs, edge_attrs)
    source = _Source(data, _edges(data, partition), partition, kinds)
    figures = report(source.edge_index, partition, _train_mask(source), grid)
    with new_folder(out, force) as aside:
        _write_all(aside, source, figures)
    return figures


def read_part(
    folder: str | Path, part: int, *, verify: Verify = "checksums", mmap: bool = True
) -> PartShare:
    """Reads one part, and no file of another.

    verify="checksums" reads every byte once and compares it with META.json, at the price
    of a second or less for each GB of the part; "sizes" compares lengths, dtypes and
    shapes. Both read the ids, which have to fit the partition. Raises ValueError, naming
    the file, for whatever does not agree.
    """
    if verify not in ("sizes", "checksums"):
        raise ValueError(f"verify must be 'sizes' or 'checksums', got {verify!r}")
    folder = Path(folder)
    meta = folder_meta(folder)
    if not 0 <= part < meta["num_parts"]:
        raise ValueError(
            f"{folder}: got part {part}, but its parts are 0 .. {meta['num_parts'] - 1}"
        )
    off = True if part or verify == "sizes" else None  # the first rank has a bar
    for name in tqdm(_files_of(meta, part), "checking files", disable=off, leave=False):
        check_file(folder, meta, name, verify)
    share = _read(folder, meta, part, mmap)
    for problem in _wrong_ids(share, folder / part_name(part)):
        raise ValueError(f"{problem}; write the folder again")
    return share


def _files_of(meta: Meta, part: int) -> list[str]:
    """Lists the files that a part is read from."""
    names = ["node_gid.npy", "edge_gid.npy", "edge_index.npy"]
    whole = [OWNER]
    for name, attr in meta["attributes"].items():
        of_graph = attr["kind"] == "graph"
        (whole if of_graph else names).append(file_name(attr["kind"], name))
    return [*whole, *(f"{part_name(part)}/{name}" for name in names)]


def _read(folder: Path, meta: Meta, part: int, mmap: bool = True) -> PartShare:
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
        partition=_read_partition(folder, meta, mmap),
        num_edges_global=meta["num_edges"],
        node_gid=read_array(here / "node_gid.npy", "int64", [nodes], mmap),
        edge_gid=read_array(here / "edge_gid.npy", "int64", [edges], mmap),
        edge_index=read_array(here / "edge_index.npy", "int64", [2, edges], mmap),
        node=rows["node"],
        edge=rows["edge"],
        graph={**rows["graph"], **meta["values"]},
    )


def _read_partition(folder: Path, meta: Meta, mmap: bool = True) -> Partition:
    """Reads the partition of the nodes; raises ValueError, naming the file, when damaged."""
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


def verify_folder(folder: str | Path, *, checksums: bool = True) -> list[str]:
    """Lists the faults of a partition folder, each naming a file; none if it is whole.

    Looks at lengths, dtypes and shapes; that the parts own every node once, in
    ascending order, and hold every edge once, with its target; and, on demand, at the
    sha256 of each file. Needs num_edges bytes and a part's indices in memory.
    """
    folder = Path(folder)
    try:
        meta = folder_meta(folder)
    except ValueError as error:
        return [str(error)]
    problems = []
    for name in tqdm(meta["files"], "checking files", disable=None, leave=False):
        try:
            check_file(folder, meta, name, "checksums" if checksums else "sizes")
        except ValueError as error:
            problems.append(str(error))
    return problems or _inconsistencies(folder, meta)


def _inconsistencies(folder: Path, meta: Meta) -> list[str]:
    problems: list[str] = []
    seen = torch.zeros(meta["num_edges"], dtype=torch.bool)
    try:
        if _read_partition(folder, meta).digest() != meta["partition"]:
            problems.append(f"{folder / 'owner.npy'}: not the partition of META.json")
        for part in range(meta["num_parts"]):
            share, here = _read(folder, meta, part), folder / part_name(part)
            problems += _wrong_ids(share, here)
            if out_of_range(share.edge_gid, seen.numel()) is not None:
                continue
            if bool(seen[share.edge_gid].any()):
                problems.append(
                    f"{here / 'edge_gid.npy'}: an edge is held by an earlier part too"
                )
            seen[share.edge_gid] = True
    except ValueError as error:
        return [*problems, str(error)]
    return problems


def _wrong_ids(share: PartShare, here: Path) -> Iterator[str]:
    """Yields the faults in the ids of one part, each naming a file below `here`."""
    partition, part = share.partition, share.part
    if not torch.equal(share.node_gid, partition.gids(part)):
        yield f"{here / 'node_gid.npy'}: not the nodes that owner.npy gives to {part}"
    if out_of_range(share.edge_gid, share.num_edges_global) is not None:
        yield f"{here / 'edge_gid.npy'}: an edge id is out of range"
    elif bool((share.edge_gid.diff() <= 0).any()):
        yield f"{here / 'edge_gid.npy'}: edge ids do not ascend"
    if out_of_range(share.edge_index, partition.num_nodes) is not None:
        yield f"{here / 'edge_index.npy'}: a node id is out of range"
    elif bool((partition.owner_of(share.edge_index[1]) != part).any()):
        yield f"{here / 'edge_index.npy'}: a target is owned by another part"


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
    num_edges = source.edge_index.size(1)
    meta = graph_meta(partition, num_edges, attributes, values, figures, files)
    write_meta(out, meta)


def graph_meta(
    partition: Partition,
    num_edges: int,
    attributes: Meta,
    values: Meta,
    figures: PartitionReport,
    files: Meta,
) -> Meta:
    """Returns what META.json says of a graph, for `write_meta`."""
    return {
        "num_nodes": partition.num_nodes,
        "num_edges": num_edges,
        "num_parts": partition.num_parts,
        "partition": partition.digest(),
        "attributes": attributes,
        "values": values,
        "report": asdict(figures),
        "files": files,
    }


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
    sync(out / folder)
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
        dtype, shape = dtype_name(tensor.dtype), list(tensor.shape)
        attributes[name] = {"kind": kind, "dtype": dtype, "shape": shape}
    return attributes, values


def _dense(name: str, value: Any) -> Tensor:
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        tensor: Tensor = torch.as_tensor(value)
        if tensor.layout == torch.strided and not tensor.is_quantized:
            return tensor
    raise TypeError(
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


def attribute_kinds(
    data: Data, node_attrs: Iterable[str] = (), edge_attrs: Iterable[str] = ()
) -> dict[str, Kind]:
    """Sorts the attributes of `data`, edge_index and num_nodes apart, into kinds.

    A tensor or array is of the nodes or of the edges when its first dimension is as
    long and is the one that PyG would concatenate; all else is of the graph. Where the
    graph has as many nodes as edges, names decide: those with "edge" in them against
    x, y, pos, batch and *_mask. What labels the pairs of another index, as edge_label does
    those of edge_label_index, is of the graph. The names in node_attrs and edge_attrs are
    as declared. Of a PyG Batch, the way in which graphs were joined decides first.

    Raises ValueError for a name that nothing decides, for a declared one that is absent
    or does not fit, and for x, a *_mask, edge_attr, edge_weight or edge_type that fits
    neither.
    """
    declared: dict[str, Kind] = dict.fromkeys(node_attrs or (), "node")
    for name in edge_attrs or ():
        if name in declared:
            raise ValueError(f"{name!r} is declared both in node_attrs and edge_attrs")
        declared[name] = "edge"
    for name in declared:
        if name not in data or name in STRUCTURE:
            raise ValueError(f"{name!r} is declared, but is no attribute of {data}")
    return {
        name: _kind(data, name, declared.get(name) or batch_kind(data, data, name))
        for name in data.to_dict()  # data.keys() has no fixed order
        if name not in STRUCTURE
    }


def shape_kinds(
    shapes: Mapping[str, tuple[int, ...]],
    num_nodes: int,
    num_edges: int,
    node_attrs: Iterable[str] = (),
    edge_attrs: Iterable[str] = (),
) -> dict[str, Kind]:
    """Sorts attributes of known shapes into kinds, as `attribute_kinds` does."""
    data = Data(edge_index=torch.empty(2, num_edges, device="meta"))
    data.num_nodes = num_nodes
    for name, shape in shapes.items():
        data[name] = torch.empty(shape, device="meta")
    return attribute_kinds(data, node_attrs, edge_attrs)


def _kind(data: Data, name: str, declared: Kind | None) -> Kind:
    length = _length(data, name)
    nodes, edges = int(data.num_nodes or 0), data.num_edges
    if declared == "graph" or name == "ptr" or name.endswith("_ptr"):
        return "graph"
    if declared is not None:
        want = nodes if declared == "node" else edges
        if length != want:
            raise ValueError(
                f"{name!r} is declared as an attribute of the {declared}s, of which "
                f"there are {want}, but {_what(data[name])}"
            )
        return declared
    if labels_pairs(data, name):
        return "graph"
    if length == nodes == edges:
        if "edge" in name:
            return "edge"
        if name in NODE_NAMES or name.endswith("_mask"):
            return "node"
        raise ValueError(
            f"{name!r} could be of the nodes or of the edges, of which there are {nodes} "
            f"each; say which with node_attrs=[{name!r}] or edge_attrs=[{name!r}]"
        )
    if length == nodes:
        return "node"
    if length == edges:
        return "edge"
    must_fit = name in ("x", *EDGE_NAMES) or name.endswith("_mask")
    if length is not None and must_fit:
        raise ValueError(
            f"{name!r} fits neither the {nodes} nodes nor the {edges} edges: "
            f"{_what(data[name])}; make it as long, or rename it to keep it as it is"
        )
    return "graph"


def batch_kind(data: Any, store: Any, name: str) -> Kind | None:
    """Returns whose rows an attribute of a PyG Batch has, or None where that is not known.

    Args:
        data: the Batch; of anything else nothing is known.
        store: the Batch, or one of its stores.
        name: that of the attribute, which PyG joined graph after graph.
    """
    every = getattr(data, "_slice_dict", {}) if isinstance(data, Batch) else {}
    key = getattr(store, "_key", None)
    slices = every if key is None else every.get(key, {})
    found, value = slices.get(name), store[name]
    if not isinstance(found, Tensor) or found.dim() != 1 or not hasattr(value, "shape"):
        return None
    if not len(value.shape) or len(value) != int(found[-1]):
        return None  # it has been replaced since
    own: dict[Kind, Any] = {"node": store.get("ptr"), "edge": slices.get("edge_index")}
    fits = [k for k, v in own.items() if v is not None and torch.equal(found, v.cpu())]
    single = torch.equal(found, torch.arange(len(found)))  # a row for each graph
    if len(fits) > 1 and not (single and name not in (*NODE_NAMES, *EDGE_NAMES)):
        return None
    return fits[0] if len(fits) == 1 else "graph"


def labels_pairs(store: Any, name: str) -> bool:
    """Tells whether an attribute has a row for each column of its own `[2, k]` index.

    Args:
        store: a Data, or one of its stores.
        name: that of the attribute, as edge_label, beside which is edge_label_index.
    """
    index = f"{name}_index"
    if index not in store or index in STRUCTURE:
        return False
    shape, own = (tuple(getattr(store[key], "shape", ())) for key in (index, name))
    return len(shape) == 2 and shape[0] == 2 and own[:1] == shape[1:]


def _length(data: Data, name: str) -> int | None:
    """Returns the length of the dimension that PyG concatenates, if it is the first."""
    value = data[name]
    if not isinstance(value, (Tensor, np.ndarray)) or value.ndim == 0:
        return None
    dim = data.__cat_dim__(name, value)
    if not isinstance(dim, int) or dim % value.ndim != 0:
        return None
    return int(value.shape[0])


def _what(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"it is {value!r}" if shape is None else f"its shape is {list(shape)}"
