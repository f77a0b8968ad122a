"""Writes, reads and verifies partition folders, one folder per part.

    OUT/META.json          sizes, attributes, figures, checksums
    OUT/owner.npy          [num_nodes], the part of each node
    OUT/graph__NAME.npy    a tensor of the whole graph
    OUT/part_00000/
        node_gid.npy       [n_i], ascending
        edge_gid.npy       [e_i], ascending: columns of the Data's edge_index
        edge_index.npy     [2, e_i], node ids of the Data
        node__NAME.npy     [n_i, ...], in the order of node_gid
        edge__NAME.npy     [e_i, ...], in the order of edge_gid

An edge and its attributes belong to the owner of its target. For a HeteroData, nodes and edges
are those of all types, and META.json counts them by type: see [Note: several types] in
`partition/part_share.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from tqdm import tqdm

from pyg_distcomm.partition.layout import (
    OWNER,
    Meta,
    Verify,
    check_file,
    check_target,
    dtype_name,
    file_name,
    flush_files,
    folder_meta,
    new_partition,
    part_name,
    read_array,
    write_array,
    write_meta,
)
from pyg_distcomm.partition.part_share import (
    NODE_NAMES,
    DividedGraph,
    Kind,
    OwnersByType,
    PartShare,
    batch_kind,
    check_hetero,
    has_rows,
    labels_own_index,
    owners_of_all,
    read_ids,
    types_from_meta,
    types_to_meta,
    with_tensors,
)
from pyg_distcomm.partition.partition import (
    Grid,
    Partition,
    PartitionReport,
    out_of_range,
    owner_dtype,
)

__all__ = ["read_part", "verify_folder", "write_folder"]

STRUCTURE = ("edge_index", "num_nodes")


def write_folder(
    out: str | Path,
    data: Data | HeteroData,
    partition: Partition | OwnersByType,
    *,
    node_attrs: Iterable[str] = (),
    edge_attrs: Iterable[str] = (),
    grid: Grid | None = None,
    force: bool = False,
) -> PartitionReport:
    """Writes every part of `data` into the new folder `out`, or nothing at all.

    Files are written beside `out`, flushed, and renamed at the end. `force` replaces an
    earlier partition folder. `grid` (r, s, p) adds figures of its blocks. For a HeteroData,
    `partition` has the owners by node type, or of all nodes, as `cut_graph` returns them.
    Needs memory for one part beside the graph.
    Raises ValueError if the graph does not fit the partition, `attribute_kinds` refuses an
    attribute, or `out` exists; TypeError for an attribute that is neither a dense tensor nor
    a plain value.
    """
    out = Path(out)
    check_target(out, force)
    data = with_tensors(data)
    if isinstance(data, HeteroData):
        declared = [*node_attrs, *edge_attrs]
        if declared or grid is not None:
            what = "node_attrs and edge_attrs are" if declared else "grid is"
            raise ValueError(
                f"{what} for a Data; a HeteroData stores attributes by type, and exchanges "
                "its rows on (P, 1, 1): leave them out"
            )
        check_hetero(data)
    elif data.edge_index is None:
        raise ValueError(
            "data.edge_index is missing; convert adj_t to edge_index first"
        )
    partition = _owners(data, partition)
    graph = DividedGraph(data, partition, graph_kinds(data, node_attrs, edge_attrs))
    figures = graph.report(grid)
    with new_partition(out, force) as aside:
        _write_all(aside, graph, figures)
    return figures


def _owners(data: Data | HeteroData, partition: Partition | OwnersByType) -> Partition:
    """Returns the owners of all nodes; raises for those of another graph."""
    if isinstance(data, HeteroData) and not isinstance(partition, Partition):
        known = [own for own in partition.values() if isinstance(own, Partition)]
        if known:
            partition = owners_of_all(data, known[0].num_parts, partition)
    if not isinstance(partition, Partition):
        wanted = "are a dictionary of a Partition for each node type"
        typed = isinstance(data, HeteroData)
        raise TypeError(
            f"the owners of a {type(data).__name__} {wanted if typed else 'are a Partition'}, "
            f"got {partition!r}; build them with Partition.from_owner or cut"
        )
    count = sum(int(store.num_nodes or 0) for store in data.node_stores)
    if partition.num_nodes != count:
        raise ValueError(
            f"the graph has {count} nodes, the partition {partition.num_nodes}; cut this "
            "graph, or set num_nodes"
        )
    return partition


def read_part(
    folder: str | Path, part: int, *, verify: Verify = "checksums"
) -> PartShare:
    """Reads one part, and no file of another.

    verify="checksums" compares the checksum of each file with META.json, which takes a
    second or less for each GB of the part; "sizes" compares lengths, dtypes and shapes.
    Both check that the ids fit the partition. Raises ValueError, naming the file, if
    something does not match.
    """
    if verify not in ("sizes", "checksums"):
        raise ValueError(f"verify must be 'sizes' or 'checksums', got {verify!r}")
    folder = Path(folder)
    meta = folder_meta(folder)
    if not 0 <= part < meta["num_parts"]:
        raise ValueError(
            f"{folder}: got part {part}, but its parts are 0 .. {meta['num_parts'] - 1}"
        )
    off = True if part or verify == "sizes" else None  # only the first rank shows a bar
    for name in tqdm(
        _part_files(meta, part), "checking files", disable=off, leave=False
    ):
        check_file(folder, meta, name, verify)
    share = _read(folder, meta, part)
    problems, share = read_ids(share, folder / part_name(part))
    if problems:
        raise ValueError(f"{problems[0]}; write the folder again")
    return share


def _part_files(meta: Meta, part: int) -> list[str]:
    names = ["node_gid.npy", "edge_gid.npy", "edge_index.npy"]
    whole = [OWNER]
    for name, attr in meta["attributes"].items():
        of_graph = attr["kind"] == "graph"
        (whole if of_graph else names).append(file_name(attr["kind"], name))
    return [*whole, *(f"{part_name(part)}/{name}" for name in names)]


def _read(folder: Path, meta: Meta, part: int) -> PartShare:
    here = folder / part_name(part)
    nodes, edges = meta["report"]["nodes"][part], meta["report"]["edges"][part]
    types = types_from_meta(meta)
    rows: dict[Kind, dict[str, Tensor]] = {"node": {}, "edge": {}, "graph": {}}
    for name, attr in meta["attributes"].items():
        kind: Kind = attr["kind"]
        count = None
        if kind != "graph":
            count = types.of(kind)[types.split(name)[0]][part]
        shape = attr["shape"] if count is None else [count, *attr["shape"][1:]]
        path = (folder if count is None else here) / file_name(kind, name)
        rows[kind][name] = read_array(path, attr["dtype"], shape)
    return PartShare(
        part=part,
        partition=_read_partition(folder, meta),
        num_edges_global=meta["num_edges"],
        node_gid=read_array(here / "node_gid.npy", "int64", [nodes]),
        edge_gid=read_array(here / "edge_gid.npy", "int64", [edges], ids=True),
        edge_index=read_array(here / "edge_index.npy", "int64", [2, edges], ids=True),
        node=rows["node"],
        edge=rows["edge"],
        graph={**rows["graph"], **meta["values"]},
        types=types,
    )


def _read_partition(folder: Path, meta: Meta) -> Partition:
    """Reads the partition of the nodes; raises ValueError, naming the file, when damaged."""
    path, num_parts = folder / OWNER, meta["num_parts"]
    dtype = dtype_name(owner_dtype(num_parts))
    owner = read_array(path, dtype, [meta["num_nodes"]])
    try:
        partition = Partition.from_owner(owner, num_parts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if list(partition.sizes) != meta["report"]["nodes"]:
        raise ValueError(f"{path}: its parts are not as large as META.json says")
    return partition.refined_from(PartitionReport.from_dict(meta["report"]).before)


def verify_folder(folder: str | Path, *, checksums: bool = True) -> list[str]:
    """Lists the problems of a partition folder, each with its file; empty if it is whole.

    Checks lengths, dtypes and shapes; that the parts own every node once, in ascending
    order, and hold every edge once, with its target; and, if asked, the sha256 of each
    file. Needs memory for num_edges bytes and for the indices of a part.
    """
    folder = Path(folder)
    try:
        meta = folder_meta(folder)
    except ValueError as error:
        return [str(error)]
    problems = []
    parts = (_part_files(meta, part) for part in range(meta["num_parts"]))
    names = dict.fromkeys(name for part in parts for name in part)
    for name in tqdm(names, "checking files", disable=None, leave=False):
        try:
            check_file(folder, meta, name, "checksums" if checksums else "sizes")
        except ValueError as error:
            problems.append(str(error))
    return problems or _content_problems(folder, meta)


def _content_problems(folder: Path, meta: Meta) -> list[str]:
    problems: list[str] = []
    parts = [folder / part_name(part) for part in range(meta["num_parts"])]
    held = sum((here / "edge_gid.npy").stat().st_size for here in parts)
    if meta["num_edges"] > held:  # bytes, of which an id takes some
        told = f"edge ids of {held} bytes, but META.json says {meta['num_edges']} edges"
        return [f"{folder / 'part_*' / 'edge_gid.npy'}: {told}"]
    seen = torch.zeros(meta["num_edges"], dtype=torch.bool)
    for part, here in enumerate(parts):
        try:
            share = _read(folder, meta, part)
            if not part and share.partition.digest() != meta["partition"]:
                problems.append(
                    f"{folder / 'owner.npy'}: not the partition of META.json"
                )
            problems += read_ids(share, here)[0]
        except ValueError as error:
            problems.append(str(error))
            continue
        if out_of_range(share.edge_gid, seen.numel()) is not None:
            continue
        if bool(seen[share.edge_gid].any()):
            problems.append(
                f"{here / 'edge_gid.npy'}: an edge is held by an earlier part too"
            )
        seen[share.edge_gid] = True
    return problems


def _write_all(out: Path, graph: DividedGraph, figures: PartitionReport) -> None:
    partition, types = graph.partition, graph.types
    write_array(out / OWNER, partition.owner)
    attributes: Meta = {}
    values: Meta = {}
    for part in tqdm(range(partition.num_parts), "writing parts", disable=None):
        share = graph.part(part)
        if not part:
            attributes, values = _describe(share)
            for name, attr in attributes.items():
                if attr["kind"] == "graph":
                    tensor = _dense(name, share.graph[name])
                    write_array(out / file_name("graph", name), tensor)
        _write_part(out, share)
    several = {"types": types_to_meta(types)} if types.typed else {}
    described = attributes, values, figures
    meta = graph_meta(out, partition, sum(figures.edges), *described)
    write_meta(out, several | meta)


def graph_meta(
    out: Path,
    partition: Partition,
    num_edges: int,
    attributes: Meta,
    values: Meta,
    figures: PartitionReport,
) -> Meta:
    """Flushes the files of a graph; returns the content of META.json, for `write_meta`."""
    return {
        "num_nodes": partition.num_nodes,
        "num_edges": num_edges,
        "num_parts": partition.num_parts,
        "partition": partition.digest(),
        "attributes": attributes,
        "values": values,
        "report": asdict(figures),
        "files": flush_files(out),
    }


def _write_part(out: Path, share: PartShare) -> None:
    folder = out / part_name(share.part)
    folder.mkdir()
    arrays = {
        "node_gid.npy": share.node_gid,
        "edge_gid.npy": share.edge_gid,
        "edge_index.npy": share.edge_index.to(torch.int64),
        **{file_name("node", name): rows for name, rows in share.node.items()},
        **{file_name("edge", name): rows for name, rows in share.edge.items()},
    }
    for name, array in arrays.items():
        write_array(folder / name, _dense(name, array))


def _describe(share: PartShare) -> tuple[Meta, Meta]:
    """Sorts attributes into arrays (kind, dtype and shape) and plain values."""
    attributes: Meta = {}
    values: Meta = {}
    types = share.types
    kinds: tuple[Kind, ...] = ("node", "edge", "graph")
    for kind in kinds:
        for name, value in getattr(share, kind).items():
            if _is_plain(value):
                values[name] = value
                continue
            tensor = _dense(name, value)
            dtype, shape = dtype_name(tensor.dtype), list(tensor.shape)
            if kind != "graph":
                shape[0] = sum(types.of(kind)[types.split(name)[0]])
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


def graph_kinds(
    data: Data | HeteroData,
    node_attrs: Iterable[str] = (),
    edge_attrs: Iterable[str] = (),
) -> dict[tuple[Any, str], Kind]:
    """Returns the kind of each attribute, by the key of its store and its name."""
    if isinstance(data, Data):
        kinds = attribute_kinds(data, node_attrs, edge_attrs)
        return {(None, name): kind for name, kind in kinds.items()}
    found: dict[tuple[Any, str], Kind] = {}
    counts: dict[Any, dict[Kind, int]] = {
        **{s._key: {"node": int(s.num_nodes or 0)} for s in data.node_stores},
        **{s._key: {"edge": s.edge_index.size(1)} for s in data.edge_stores},
    }
    for store in data.stores:
        count = counts.get(store._key)
        for name in [n for n in store if count is None or n not in STRUCTURE]:
            kind = _attribute_kind(data, store, name, None, count) if count else "graph"
            found[store._key, name] = kind
    return found


def attribute_kinds(
    data: Data, node_attrs: Iterable[str] = (), edge_attrs: Iterable[str] = ()
) -> dict[str, Kind]:
    """Returns the kind of each attribute of `data`, without edge_index and num_nodes.

    A tensor is of the nodes or of the edges if its first dimension has their
    number and is the one that PyG would concatenate; all others are of the graph. If there
    are as many nodes as edges, names decide: those with "edge" in them against x, y, pos,
    batch and *_mask. Labels of another index, such as edge_label of edge_label_index, are of
    the graph. Names in node_attrs and edge_attrs are as declared. In a PyG Batch, the way
    in which graphs were joined decides first.

    Raises ValueError for a name that these rules do not decide, for a declared name that is
    absent or does not fit, and for x, a *_mask, edge_attr, edge_weight or edge_type that
    fits neither the nodes nor the edges.
    """
    declared: dict[str, Kind] = dict.fromkeys(node_attrs or (), "node")
    for name in edge_attrs or ():
        if name in declared:
            raise ValueError(f"{name!r} is declared both in node_attrs and edge_attrs")
        declared[name] = "edge"
    for name in declared:
        if name not in data or name in STRUCTURE:
            raise ValueError(f"{name!r} is declared, but is no attribute of {data}")
    counts: dict[Kind, int] = {"node": int(data.num_nodes or 0), "edge": data.num_edges}
    return {
        name: _attribute_kind(data, data, name, declared.get(name), counts)
        for name in data.to_dict()  # data.keys() has no fixed order
        if name not in STRUCTURE and name in data  # a Batch adds _num_nodes
    }


def _attribute_kind(
    data: Any, store: Any, name: str, declared: Kind | None, counts: dict[Kind, int]
) -> Kind:
    """Returns the kind of an attribute of a store, where there are as many of each kind."""
    length = _length(data, store, name)
    declared = declared or batch_kind(data, store, name)
    # whatever its length
    by_name = name == "ptr" or name.endswith("_ptr") or labels_own_index(store, name)
    if declared == "graph" or (declared is None and by_name):
        return "graph"
    if declared is not None:
        if length != counts.get(declared):
            raise ValueError(
                f"{name!r} is declared as an attribute of the {declared}s, of which "
                f"there are {counts.get(declared)}, but {_shape_text(store[name])}"
            )
        return declared
    fits = [kind for kind, count in counts.items() if count == length]
    if len(fits) == 1:
        return fits[0]
    if fits and "edge" in name:
        return "edge"
    if fits and (name in NODE_NAMES or name.endswith("_mask")):
        return "node"
    if fits:
        raise ValueError(
            f"{name!r} could be of the nodes or of the edges, of which there are {length} "
            f"each; say which with node_attrs=[{name!r}] or edge_attrs=[{name!r}]"
        )
    if length is not None and has_rows(name):
        wanted = " and ".join(f"{count} {kind}s" for kind, count in counts.items())
        of = f" of {store._key!r}" if store is not data else ""
        raise ValueError(
            f"{name!r} does not fit the {wanted}{of}: {_shape_text(store[name])}; make it as "
            "long, or rename it to keep it as it is"
        )
    return "graph"


def _length(data: Any, store: Any, name: str) -> int | None:
    """Returns the length of the dimension that PyG concatenates, if it is the first."""
    value = store[name]
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    dim = data.__cat_dim__(name, value, *(() if store is data else (store,)))
    if not isinstance(dim, int) or dim % value.dim() != 0:
        return None
    return int(value.shape[0])


def _shape_text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"it is {value!r}" if shape is None else f"its shape is {list(shape)}"
