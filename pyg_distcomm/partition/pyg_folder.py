"""Reads folders that PyG's `torch_geometric.distributed.Partitioner` wrote (PyG 2.5 on).

They hold x, edge_attr and time, under the node ids of the original graph. PyG does not write
y, masks and other attributes, so these must come from another file. A HeteroData is read by
type.
"""

from __future__ import annotations

import collections
import pickle
import struct
import types
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.partition.layout import META, Meta, load_json
from pyg_distcomm.partition.part_share import (
    EdgeType,
    GraphTypes,
    PartShare,
    attribute_key,
    check_ends,
    id_problems,
)
from pyg_distcomm.partition.partition import Partition

__all__ = ["is_pyg_folder", "pyg_folder_meta", "read_pyg_folder", "read_pyg_partition"]

# edge_feats.pt is a defaultdict, which torch refuses to fill with weights_only=True; so
# it is unpickled with these names and no others
_NAMES = {
    ("__builtin__", "dict"): dict,  # of a defaultdict, as pickles of protocol 2 name it
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
}
_BAD_PICKLE = (pickle.UnpicklingError, RuntimeError, TypeError, ValueError)
_BAD_ZIP = (zipfile.BadZipFile, zlib.error)
_BAD_VALUES = (RuntimeError, OSError, ValueError, struct.error)


class _Unpickler(pickle.Unpickler):
    """Unpickles tensors and dicts of tensors; raises for all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is refused")
        return _NAMES[module, name]


_TENSORS_ONLY = types.SimpleNamespace(Unpickler=_Unpickler, __name__="tensors_only")


def is_pyg_folder(folder: str | Path) -> bool:
    """Returns whether PyG's Partitioner wrote this folder."""
    folder = Path(folder)
    try:
        meta = load_json(folder / META)
    except ValueError:
        return False
    return "is_hetero" in meta and "num_parts" in meta and "format" not in meta


def pyg_folder_meta(folder: str | Path) -> Meta:
    """Reads PyG's META.json.

    Raises ValueError, naming the file, when it is missing or damaged.
    """
    path = Path(folder) / META
    meta = load_json(path)
    if not is_pyg_folder(folder) or not isinstance(meta["num_parts"], int):
        raise ValueError(f"{path}: not one that PyG's Partitioner wrote")
    if meta["is_hetero"]:
        names = meta.get("node_types"), meta.get("edge_types")
        found: list[list[Any]] = [n if isinstance(n, list) else [None] for n in names]
        nodes, edges = found
        kinds = [[name] for name in nodes] + edges
        steps = [step for kind in kinds for step in (kind or [None])]
        # names are those of files, which are below the folder
        known = all(isinstance(s, str) and Path(s).name == s for s in steps)
        known = known and all(isinstance(k, list) and len(k) == 3 for k in edges)
        if not known or not {k[e] for k in edges for e in (0, 2)} <= set(nodes):
            raise ValueError(f"{path}: its node_types and edge_types are {names}")
    return meta


def read_pyg_partition(folder: str | Path) -> Partition:
    """Reads the partition of the nodes; raises ValueError, naming the file, when damaged."""
    folder = Path(folder)
    meta = pyg_folder_meta(folder)
    if meta["is_hetero"]:
        maps = [_owners(folder, "node", name, meta) for name in meta["node_types"]]
        owner = torch.cat([torch.empty(0, dtype=torch.int64), *maps])
        return Partition.from_owner(owner, meta["num_parts"])
    path = folder / "node_map.pt"
    try:
        return Partition.from_owner(_tensor(_load(path), path), meta["num_parts"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _owners(folder: Path, level: str, name: str, meta: Meta) -> Tensor:
    """Reads the part of each node or edge of a type."""
    path = folder / f"{level}_map" / f"{name}.pt"
    try:
        found = Partition.from_owner(_tensor(_load(path), path), meta["num_parts"])
    except (TypeError, ValueError) as error:
        text = str(error)
        raise ValueError(text if str(path) in text else f"{path}: {text}") from None
    return found.owner.long()


def read_pyg_folder(folder: str | Path, part: int) -> PartShare:
    """Reads one part, nodes ascending by id and edges in their original order.

    Raises ValueError, naming the file, if one is missing, damaged or does not fit the others.
    """
    folder = Path(folder)
    meta, partition = pyg_folder_meta(folder), read_pyg_partition(folder)
    if not 0 <= part < partition.num_parts:
        raise ValueError(
            f"{folder}: got part {part}, but its parts are 0 .. "
            f"{partition.num_parts - 1}"
        )
    if meta["is_hetero"]:
        return _typed_part(folder, meta, partition, part)
    here = folder / f"part_{part}"
    node_gid, node = _nodes(here / "node_feats.pt", partition, part)
    edge_map = _tensor(_load(folder / "edge_map.pt"), folder / "edge_map.pt")
    edge_gid, edge_index, order = _edges(here / "graph.pt", partition, part)
    if not torch.equal(edge_gid, (edge_map == part).nonzero().view(-1)):
        raise ValueError(
            f"{here / 'graph.pt'}: not the edges that edge_map.pt gives it"
        )
    return PartShare(
        part=part,
        partition=partition,
        num_edges_global=edge_map.numel(),
        node_gid=node_gid,
        edge_gid=edge_gid,
        edge_index=edge_index,
        node=node,
        edge=_edge_attrs(here / "edge_feats.pt", edge_gid, order),
        graph={},
    )


def _typed_part(folder: Path, meta: Meta, partition: Partition, part: int) -> PartShare:
    """Reads one part of a HeteroData; PyG also numbers its ids type after type."""
    kinds: list[EdgeType] = [(a, b, c) for a, b, c in meta["edge_types"]]
    owners: dict[Any, Tensor] = {
        **{n: _owners(folder, "node", n, meta) for n in meta["node_types"]},
        **{k: _owners(folder, "edge", "__".join(k), meta) for k in kinds},
    }
    counts = {
        k: tuple(torch.bincount(owner, minlength=partition.num_parts).tolist())
        for k, owner in owners.items()
    }
    types = GraphTypes(
        {name: counts[name] for name in meta["node_types"]},
        {kind: counts[kind] for kind in kinds},
    )
    here = folder / f"part_{part}"
    node = _typed_nodes(here / "node_feats.pt", types, owners, part)
    edge_gid, edge_index, edge = _typed_edges(here, types, owners, part)
    share = PartShare(
        part=part,
        partition=partition,
        num_edges_global=sum(map(sum, types.edges.values())),
        node_gid=partition.gids(part),
        edge_gid=edge_gid,
        edge_index=edge_index,
        node=node,
        edge=edge,
        graph={},
        types=types,
    )
    for problem in id_problems(share, here, ("node_feats.pt", "graph.pt", "graph.pt")):
        raise ValueError(problem)
    return share


def _typed_nodes(
    path: Path, types: GraphTypes, owners: dict[Any, Tensor], part: int
) -> dict[str, Tensor]:
    """Reads the rows of the nodes of each type, ascending by id."""
    node: dict[str, Tensor] = {}
    found = _load(path)
    for name, (begin, _) in types.ranges("node").items():
        file = _of_type(found, name, path)
        gid, order = _entry(file, "global_id", path).sort()
        if not torch.equal(gid - begin, (owners[name] == part).nonzero().view(-1)):
            raise ValueError(
                f"{path}: not the nodes that node_map gives to part {part}"
            )
        rows = _feats(file, order, path)
        if "time" in file:  # every part has the times of all nodes of the type
            rows["time"] = _rows(file, "time", gid - begin, len(owners[name]), path)
        node |= {attribute_key(name, key): value for key, value in rows.items()}
    return node


def _typed_edges(
    here: Path, types: GraphTypes, owners: dict[Any, Tensor], part: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Reads ids, ends and rows of the edges of each type, ascending by id."""
    path, rows_path = here / "graph.pt", here / "edge_feats.pt"
    graph, found = _load(path), _load(rows_path)
    edge: dict[str, Tensor] = {}
    first = {name: begin for name, (begin, _) in types.ranges("node").items()}
    gids, ends = [torch.empty(0).long()], [torch.empty(2, 0).long()]
    for kind, (begin, _) in types.ranges("edge").items():
        file = _of_type(graph, kind, path)
        gid, order = _entry(file, "edge_id", path).sort()
        if not torch.equal(gid - begin, (owners[kind] == part).nonzero().view(-1)):
            raise ValueError(
                f"{path}: not the edges that edge_map gives to part {part}"
            )
        pair = [_rows(file, end, order, len(order), path) for end in ("row", "col")]
        gids.append(gid)
        ends.append(
            torch.stack(pair) + torch.tensor([[first[kind[k]]] for k in (0, 2)])
        )
        feats = found.get(kind, {}) if isinstance(found, dict) else {}
        rows = _feats(feats, order, rows_path)
        if "edge_time" in feats:
            rows["edge_time"] = _rows(feats, "edge_time", order, len(order), rows_path)
        edge |= {attribute_key(kind, key): value for key, value in rows.items()}
    return torch.cat(gids), torch.cat(ends, 1), edge


def _of_type(file: Any, kind: Any, path: Path) -> dict[str, Any]:
    if not isinstance(file, dict) or not isinstance(file.get(kind), dict):
        raise ValueError(f"{path}: has nothing of the type {kind!r}")
    return file[kind]  # type: ignore[no-any-return]


def _nodes(
    path: Path, partition: Partition, part: int
) -> tuple[Tensor, dict[str, Tensor]]:
    file = _load(path)
    node_gid, order = _entry(file, "global_id", path).sort()
    if not torch.equal(node_gid, partition.gids(part)):
        raise ValueError(f"{path}: not the nodes that node_map.pt gives to part {part}")
    rows = _feats(file, order, path)
    if "time" in file:  # every part has the times of all nodes
        rows["time"] = _rows(file, "time", node_gid, partition.num_nodes, path)
    return node_gid, rows


def _edges(
    path: Path, partition: Partition, part: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reads edge ids and ends, ascending by id, and the order that sorts the file."""
    file = _load(path)
    edge_gid, order = _entry(file, "edge_id", path).sort()
    pair = [_rows(file, end, order, order.numel(), path) for end in ("row", "col")]
    edge_index = torch.stack(pair)
    check_ends(edge_index, partition, part, path)
    return edge_gid, edge_index, order


def _edge_attrs(path: Path, edge_gid: Tensor, order: Tensor) -> dict[str, Tensor]:
    file = _load(path)
    if "global_id" in file:
        edge_ids = _rows(file, "global_id", order, order.numel(), path)
        if not torch.equal(edge_ids, edge_gid):
            raise ValueError(f"{path}: not of the edges of graph.pt")
    rows = _feats(file, order, path)
    if "edge_time" in file:
        rows["edge_time"] = _rows(file, "edge_time", order, order.numel(), path)
    return rows


def _feats(file: dict[str, Any], order: Tensor, path: Path) -> dict[str, Tensor]:
    feats = file.get("feats") or {}
    return {
        name: _rows(feats, name, order, order.numel(), path)
        for name, rows in feats.items()
        if rows is not None
    }


def _rows(
    file: dict[str, Any], name: str, order: Tensor, count: int, path: Path
) -> Tensor:
    rows = _entry(file, name, path)
    if rows.dim() == 0 or rows.size(0) != count:
        raise ValueError(
            f"{path}: {name!r} has shape {list(rows.shape)}, but needs {count} rows"
        )
    return rows[order]


def _entry(file: dict[str, Any], name: str, path: Path) -> Tensor:
    if not isinstance(file, dict) or name not in file:
        raise ValueError(
            f"{path}: has no {name!r}, so PyG's Partitioner did not write it"
        )
    return _tensor(file[name], path)


def _tensor(value: Any, path: Path) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{path}: holds a {type(value).__name__}, not a tensor")
    return value


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path}: missing")
    if not is_archive(path):  # torch's formats before 1.6 are not worth a risk
        raise ValueError(
            f"{path}: cannot be read: truncated, or not saved by torch.save"
        )
    check_saved(path)
    try:
        if path.name == "edge_feats.pt":
            return torch.load(path, "cpu", _TENSORS_ONLY, weights_only=False)
        return torch.load(path, "cpu", weights_only=True)
    except (OSError, EOFError, KeyError, AttributeError, *_BAD_PICKLE) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: cannot be read: {reason}") from None


def check_saved(path: Path) -> None:
    """Raises if a file of torch.save is damaged or holds TorchScript; torch checks neither.

    Raises:
        ValueError: naming the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            names = [name.partition("/")[2] for name in archive.namelist()]
        # torch has a reader of its own, which can be given another table of contents
        records = torch._C.PyTorchFileReader(str(path)).get_all_records()
    except (*_BAD_ZIP, EOFError, NotImplementedError, *_BAD_VALUES) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if sorted(records) != sorted(names):
        raise ValueError(f"{path}: cannot be read: its tables of contents differ")
    if damaged is not None:
        raise ValueError(f"{path}: cannot be read: {damaged} was altered (CRC-32)")
    if any(name == "constants.pkl" or name.startswith("code/") for name in names):
        raise ValueError(
            f"{path}: holds TorchScript, which is a program and is not run; save tensors "
            "with torch.save"
        )


def is_archive(path: Path) -> bool:
    """Returns whether a file is a zip archive, also a damaged one."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True
