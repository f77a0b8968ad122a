"""Takes parts of a graph that is spread over ranks, and joins its types: `data.subgraph`"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.comm.serialization import first_difference
from pyg_distcomm.graph.attribute_order import listed_in_order
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex, rows_of_edges, shard_as


def mesh_of(data: Any) -> Mesh | None:
    """Returns the mesh of a share; None for a graph without row-sharded tensors."""
    for store in getattr(data, "stores", ()):
        for value in store.values():
            if isinstance(value, DistEdgeIndex):
                return value.nodes.mesh
            if isinstance(value, DistTensor):
                return value.rows.mesh
    return None


def agree(problem: Exception | None, mesh: Mesh) -> None:
    """Raises the first problem of any rank on all ranks."""
    kinds = collectives.all_gather_object(
        type(problem) if problem else None, mesh.world
    )
    kind = next((k for k in kinds if k is not None), ValueError)
    collectives.agree(None if problem is None else str(problem), mesh.world, kind)


def agree_same(
    problem: Exception | None, settings: Mapping[str, Any], mesh: Mesh, name: str
) -> None:
    """Raises the first problem, or the first difference between ranks, on all ranks."""
    agree(problem, mesh)
    found = first_difference(collectives.all_gather_object(settings, mesh.world))
    if found is not None:
        raise ValueError(
            f"{name} needs the same arguments on all ranks: {found}; gather what one "
            "rank alone has seen"
        )


def union_of_ranks(places: Tensor, mesh: Mesh, op: str) -> Tensor:
    """Returns the sorted numbers of all ranks on every rank; collective."""
    sizes = [row[0] for row in collectives.all_gather_counts([len(places)], mesh.world)]
    every = collectives.all_gather_rows(places, sizes, mesh.world, op=op)
    return every.sort().values


def fully_sharded(data: Any) -> Any:
    """Returns a share with all edges and attributes sharded, also those that were whole.

    A script may have set some, and what sums over equal edges returns whole ones.
    """
    out = listed_in_order(copy.copy(with_planned_edges(data)))
    rows = rows_of_types(out)
    for store in out.stores:
        key = getattr(store, "_key", None)
        known = store.get("edge_index", store.get("adj_t"))
        source, target = (key[0], key[2]) if isinstance(key, tuple) else (key, key)
        plain = isinstance(known, Tensor) and not isinstance(known, DistEdgeIndex)
        if plain and "edge_index" in store and target in rows and source in rows:
            typed = isinstance(key, tuple)
            sources = rows[source] if typed else None
            known = store["edge_index"] = DistEdgeIndex.cut(
                known, rows[target], sources
            )
        for name, value in list(store.items()):
            plain = isinstance(value, Tensor) and not hasattr(value, "to_local")
            if not plain or "index" in name or not value.dim():
                continue
            own: Rows | None = None
            if hasattr(store, "is_edge_attr") and store.is_edge_attr(name):
                own = known.edges if isinstance(known, DistEdgeIndex) else None
            elif hasattr(store, "is_node_attr") and store.is_node_attr(name):
                own = rows.get(key)
            if own is not None and len(value) == own.count:
                store[name] = DistTensor.wrap(value[own.place_on(value.device)], own)
    return out


def with_planned_edges(data: Any) -> Any:
    """Returns a share whose edges are planned for, also those that an op returned.

    They are with the owners of their targets, and so are the attributes that have a row for
    each edge. Collective, if there are such edges.
    """
    out, rows = data, rows_of_types(data)
    for store in data.edge_stores:
        edges, key = store.get("edge_index"), store._key
        if not isinstance(edges, DistTensor) or isinstance(edges, DistEdgeIndex):
            continue
        typed = isinstance(key, tuple)
        source, target = (rows.get(key[0]), rows.get(key[2])) if typed else (None, None)
        target = target if typed else edges.rows.nodes or rows.get(key)
        if target is None or (typed and source is None):
            continue
        if edges.rows.nodes is target and not typed:
            made = DistEdgeIndex.of_ends(edges[0], edges[1])
        else:
            made = DistEdgeIndex.cut(edges.full_tensor(), target, source)
        out = copy.copy(data) if out is data else out
        mine = out[key] if typed else out
        for name, value in store.items():
            if is_rows(value) and store.is_edge_attr(name):
                local = shard_as(value, made.edges)
                assert local is not None  # of as many rows as there are edges
                mine[name] = DistTensor.wrap(local, made.edges)
        mine.edge_index = made
    return out


def rows_of_types(data: Any) -> dict[Any, Rows]:
    """Returns the rows of each node type that an attribute or edge type of the share has."""
    found: dict[Any, Rows] = {}
    for store in data.edge_stores:
        edges = store.get("edge_index", store.get("adj_t"))
        if isinstance(edges, DistEdgeIndex):
            key = store._key if isinstance(store._key, tuple) else (None, None, None)
            found |= {key[0]: edges.sources, key[2]: edges.nodes}
    for store in data.node_stores:
        for value in store.values():
            if is_rows(value) and value.rows.partition is not None:
                found.setdefault(store._key, value.rows)
    return found


def induced(data: Any, subset: Any) -> Any:
    """Returns the induced subgraph of nodes as a share, as `data.subgraph`; collective.

    A node, and the edges into it, stay with their owner: the share is what `pdc.partition`
    gives of PyG's subgraph by the same owners.

    Args:
        data: a share.
        subset: ids or a mask of nodes, row-sharded or the same on all ranks; of a HeteroData a
            dictionary of them by node type. Types that it lacks keep all nodes.

    Price: a byte for each node of the types with a mask, all-reduced; a word for each id that
    is row-sharded. Halos of edges whose ends change are planned again at their next use.

    Raises:
        ValueError, TypeError: on all ranks, naming the type and what it should be.
    """
    mesh = mesh_of(data)
    assert mesh is not None
    subsets: dict[Any, Any] = {}
    settings, problem = {}, None
    try:
        given = subset if isinstance(data, HeteroData) else {None: subset}
        if not isinstance(given, Mapping):
            raise TypeError(
                "subgraph of a HeteroData takes a dictionary of ids or masks by node type; got "
                f"a {type(subset).__name__}"
            )
        subsets = {kind: _checked(data, kind, each) for kind, each in given.items()}
        settings = {_named(kind): mark(each) for kind, each in subsets.items()}
    except (TypeError, ValueError) as error:
        problem = error
    agree_same(problem, settings, mesh, "subgraph")
    data = fully_sharded(data)
    rows = rows_of_types(data)
    masks = {k: each for k, each in subsets.items() if each.dtype == torch.bool}
    picks = {k: each for k, each in subsets.items() if k not in masks}
    for kind, each in picks.items():
        ids = each.full_tensor() if isinstance(each, DistTensor) else each
        picks[kind] = ids.cpu().long()
    picks |= _kept(masks, rows, mesh)
    _check_ids(data, picks)
    return _picked(data, rows, picks)


def with_edges(data: Any) -> Any:
    """Returns the share without isolated nodes, as RemoveIsolatedNodes; collective.

    Price: a byte for each node of each type, all-reduced.
    """
    mesh = mesh_of(data)
    assert mesh is not None
    data = fully_sharded(data)
    rows = rows_of_types(data)
    ends: dict[Any, list[Tensor]] = {store._key: [] for store in data.node_stores}
    for store in data.edge_stores:
        edges = store.get("edge_index")
        if isinstance(edges, DistEdgeIndex):
            key = store._key if isinstance(store._key, tuple) else (None, None, None)
            ends[key[0]].append(edges.topology.source_gid)
            ends[key[2]].append(edges.topology.target_gid)
    met = {}
    for kind, parts in ends.items():
        met[kind] = torch.zeros(_count(data, kind), dtype=torch.bool)
        for part in parts:
            met[kind][part] = True
    return _picked(data, rows, _kept_by_any_rank(met, mesh))


def homogeneous(forward: Any, data: HeteroData, *args: Any, **kwargs: Any) -> Data:
    """Returns the share of PyG's `data.to_homogeneous`, with types in sequence.

    PyG's own code joins the rows of this rank, whose ids follow. No node changes its owner.

    Price: none. Halos are planned anew at their first use.

    Raises:
        TypeError: on all ranks, if nothing says who owns the nodes of a type.
    """
    mesh = mesh_of(data)
    assert mesh is not None
    data = fully_sharded(data)
    rows, here = rows_of_types(data), copy.copy(data)
    unknown = [store._key for store in data.node_stores if store._key not in rows]
    if unknown or any("edge_label_index" in store for store in data.edge_stores):
        raise TypeError(
            "call to_homogeneous() before pdc.partition: "
            + (f"nothing says who owns the nodes of {unknown}" if unknown else "")
            + ("" if unknown else "edge_label_index holds edges besides the graph's")
        )
    nodes, edges = _joined(data, rows, mesh)
    for store in here.stores:
        for name, value in store.items():
            if isinstance(value, (DistTensor, DistEdgeIndex)):
                store[name] = value.to_local()
    for kind in data.node_types:
        here[kind].num_nodes = len(rows[kind])
    out: Data = forward(here, *args, **kwargs)
    of_edges = {name for store in data.edge_stores for name in store} | {"edge_type"}
    of_nodes = {name for store in data.node_stores for name in store} | {"node_type"}
    for name, value in list(out.items()):
        if not isinstance(value, Tensor) or name in data._global_store:
            continue
        many = edges is not None and len(value) == len(edges.edges)
        if name == "edge_index":
            out.edge_index = edges
        elif name in of_edges and edges is not None and many:
            out[name] = DistTensor.wrap(value, edges.edges)
        elif name in of_nodes:
            out[name] = DistTensor.wrap(value, nodes)
    if "num_nodes" in out:
        out.num_nodes = nodes.total
    return listed_in_order(out)


def _joined(
    data: HeteroData, rows: dict[Any, Rows], mesh: Mesh
) -> tuple[Rows, DistEdgeIndex | None]:
    """Returns the nodes of all types in sequence, and the edges, if any."""
    first, total = {}, 0
    for kind in data.node_types:
        first[kind], total = total, total + rows[kind].total
    owner = torch.cat([_partition(rows[kind]).owner for kind in data.node_types])
    gid = torch.cat([first[kind] + rows[kind].gid for kind in data.node_types])
    nodes = Rows(gid, total, mesh, Partition.from_owner(owner, mesh.size))
    ends, places, links, count = [], [], [], 0
    for store in data.edge_stores:
        edges = store.get("edge_index")
        if isinstance(edges, DistEdgeIndex):
            source, _, target = store._key
            start = torch.tensor([[first[source]], [first[target]]])
            ends.append(edges.to_local() + start.to(edges.device))
            places.append(count + edges.edges.place)
            links.append(edges.topology.link)
            count += edges.edges.count
    if not ends:
        return nodes, None
    all_edges = rows_of_edges(torch.cat(places), count, nodes)
    made = DistEdgeIndex.build(torch.cat(ends, 1), nodes, all_edges)
    same = all(link is links[0] for link in links)
    return nodes, made.with_link(links[0] if same else None)


def _named(kind: Any) -> str:
    return "subset" if kind is None else f"subset[{kind!r}]"


def _count(data: Any, kind: Any) -> int:
    store = data if kind is None else data[kind]
    return int(store.num_nodes)


def _checked(data: Any, kind: Any, value: Any) -> Tensor:
    """Returns valid ids or a valid mask of nodes; raises for others."""
    if kind is not None and kind not in data.node_types:
        raise ValueError(
            f"subgraph got nodes of {kind!r}, but the node types are {data.node_types}"
        )
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value)
    number = not (value.is_floating_point() or value.is_complex())
    if value.dim() != 1 or not number or isinstance(value, DistEdgeIndex):
        raise TypeError(
            f"give {_named(kind)} ids [k] or a mask [n] of nodes; got {value.dtype} of "
            f"{value.dim()} dims"
        )
    rows = value.rows if isinstance(value, DistTensor) else None
    if value.dtype == torch.bool and (rows is None or rows.whole):
        count = len(value) if rows is None else rows.total
        if count != _count(data, kind):
            raise ValueError(
                f"{_named(kind)} is a mask [{count}], but there are {_count(data, kind)} "
                "nodes; give a mask of these, or ids"
            )
    return value


def check_selection(data: Any, name: str, asked: Any) -> None:
    """Raises for a selection that differs between ranks, or matches no edge.

    Args:
        data: a share.
        name: the name of PyG's method.
        asked: its arguments: ids or a mask of edges, a dictionary of these by edge type, or a
            list of types.

    Price: three notes of each rank.

    Raises:
        ValueError, TypeError: on all ranks.
    """
    mesh = mesh_of(data)
    assert mesh is not None
    settings, problem = {}, None
    try:
        for value in asked:
            if name != "edge_subgraph":  # types
                settings["types"] = repr(sorted(map(str, value)))
                continue
            given = value if isinstance(value, Mapping) else {None: value}
            for kind, subset in given.items():
                what = _named(kind)
                edges = data if kind is None else _edges_of(data, kind)
                settings[what] = mark(
                    _checked_edges(int(edges.num_edges), what, subset)
                )
    except (TypeError, ValueError) as error:
        problem = error
    agree_same(problem, settings, mesh, name)


def _edges_of(data: Any, kind: Any) -> Any:
    """Returns the edges of an existing type; indexing would create a missing one."""
    try:
        name = data._to_canonical(kind)
    except (AttributeError, KeyError, IndexError):
        name = kind
    if name not in data.edge_types:
        raise ValueError(f"subset names {kind!r}; the edge types are {data.edge_types}")
    return data[name]


def _checked_edges(count: int, what: str, subset: Any) -> Tensor:
    """Returns valid ids or a valid mask of `count` edges; raises for others."""
    if (
        not isinstance(subset, Tensor)
        or subset.dim() != 1
        or subset.dtype not in _PICKS
    ):
        got = type(subset).__name__
        if isinstance(subset, Tensor):
            got = f"{subset.dtype} of {subset.dim()} dims"
        raise TypeError(f"{what} takes ids [k] or a mask [e] of edges; got {got}")
    rows = subset.rows if isinstance(subset, DistTensor) else None
    if subset.dtype == torch.bool and (rows is None or rows.whole):
        length = len(subset) if rows is None else rows.total
        if length != count:
            raise ValueError(
                f"{what} is a mask [{length}], but there are {count} edges; give a mask of "
                "these, or ids"
            )
    elif rows is None and subset.numel() and subset.dtype != torch.bool:
        low, high = int(subset.min()), int(subset.max())
        if low < -count or high >= count:
            raise ValueError(
                f"{what} has the id {low if low < -count else high}, but the edges are "
                f"0 .. {count - 1}"
            )
    return subset


_PICKS = (torch.bool, torch.int64, torch.int32)


def mark(value: Tensor) -> str:
    """Returns a description of a subset that must be the same on all ranks."""
    if isinstance(value, DistTensor):
        return (
            f"row-sharded {value.dtype}, {'all' if value.rows.whole else 'some'} rows"
        )
    data = value.detach().cpu().numpy()
    return f"{value.dtype} {list(value.shape)}, hash {zlib.crc32(data.tobytes()):x}"


def _kept(
    masks: dict[Any, Tensor], rows: dict[Any, Rows], mesh: Mesh
) -> dict[Any, Tensor]:
    """Returns the ids selected by masks, on all ranks."""
    spread = {}
    for kind, mask in masks.items():
        if isinstance(mask, DistTensor):
            local = shard_as(mask, rows[kind]) if kind in rows else None
            if local is None:
                raise ValueError(
                    f"{_named(kind)} is a mask of other rows than the nodes"
                )
            spread[kind] = torch.zeros(rows[kind].total, dtype=torch.bool)
            spread[kind][rows[kind].gid] = local.cpu()
    found = _kept_by_any_rank(spread, mesh)
    return {
        k: found[k] if k in found else mask.cpu().nonzero().view(-1)
        for k, mask in masks.items()
    }


def _kept_by_any_rank(masks: dict[Any, Tensor], mesh: Mesh) -> dict[Any, Tensor]:
    """Returns the ids selected by the mask of any rank, on all ranks; collective."""
    if not masks:
        return {}
    flat = torch.cat(list(masks.values())).to(torch.uint8)
    every = collectives.all_reduce(flat, mesh.world, "max")
    parts = every.split([len(mask) for mask in masks.values()])
    return {k: v.nonzero().view(-1) for k, v in zip(masks, parts, strict=True)}


def _check_ids(data: Any, picks: dict[Any, Tensor]) -> None:
    """Raises for ids out of range; ids are the same on all ranks."""
    for kind, ids in picks.items():
        n = _count(data, kind)
        wrong = ids[(ids < 0) | (ids >= n)]
        if len(wrong):
            raise ValueError(
                f"{_named(kind)} has the id {int(wrong[0])}, but the nodes are 0 .. {n - 1}"
            )


def _partition(rows: Rows) -> Partition:
    assert rows.partition is not None
    return rows.partition


def _picked(data: Any, rows: dict[Any, Rows], picks: dict[Any, Tensor]) -> Any:
    """Returns the share of selected nodes, given as ids `[n']` in their new order."""
    out, after, new_id = copy.copy(data), {}, {}
    for store in data.node_stores:
        kind, n = store._key, _count(data, store._key)
        before, pick = rows.get(kind), picks.get(kind, torch.arange(n))
        new_id[kind] = torch.full((n,), -1)
        new_id[kind][pick] = torch.arange(len(pick))
        mine = out if kind is None else out[kind]
        if before is not None:
            same = torch.equal(pick, torch.arange(n))
            now = after[kind] = before if same else _renumbered(before, pick)
            place = torch.searchsorted(before.gid, pick[now.gid])
            _copy_attributes(store, mine, before, place, now)
        if "num_nodes" in store:
            mine.num_nodes = len(pick)
        for name, value in store.items():
            if isinstance(value, (np.ndarray, list, tuple)) and store.is_node_attr(
                name
            ):
                mine[name] = _select_items(value, pick)
    for store in data.edge_stores:
        key = store._key if isinstance(store._key, tuple) else (None, None, None)
        mine = out if store._key is None else out[store._key]
        for name in ("edge_index", "adj_t"):
            edges = store.get(name)
            if isinstance(edges, DistEdgeIndex):
                begin, end = ((new_id[k], after[k]) for k in (key[0], key[2]))
                cut, keep = _edges_between(edges, begin, end, store._key is not None)
                place = keep.nonzero().view(-1)
                mine[name] = cut
                _copy_attributes(store, mine, edges.edges, place, cut.edges)
    return out


def _select_items(value: Any, pick: Tensor) -> Any:
    if isinstance(value, np.ndarray):
        return value[pick.numpy()]
    return type(value)(value[k] for k in pick.tolist())


def _copy_attributes(
    store: Any, out: Any, before: Rows, place: Tensor, after: Rows
) -> None:
    """Copies the attributes with given rows to another store, at the selected places."""
    for name, value in store.items():
        if is_rows(value) and value.rows.matches(before):
            local = value.to_local()[place.to(value.device)]
            if after.memory is not None:
                after.memory.keep(local)
            out[name] = DistTensor.wrap(local, after)


def _renumbered(rows: Rows, pick: Tensor) -> Rows:
    """Returns the rows of selected nodes, in their new order."""
    before = _partition(rows)
    owner = before.owner[pick]
    version = zlib.crc32(pick.numpy().tobytes(), before.version) or 1
    partition = replace(
        Partition.from_owner(owner, before.num_parts),
        union=before.union,
        version=version,
    )
    gid = (owner == rows.mesh.rank).nonzero().view(-1)
    return Rows(gid, len(pick), rows.mesh, partition, memory=rows.memory)


def _edges_between(
    edges: DistEdgeIndex,
    source: tuple[Tensor, Rows],
    target: tuple[Tensor, Rows],
    typed: bool,
) -> tuple[DistEdgeIndex, Tensor]:
    """Returns the edges between selected nodes, and their local positions.

    Args:
        edges: the old edges.
        source, target: new ids of the nodes of each end, -1 of those that go, and their rows.
        typed: whether the graph has several types of edges.
    """
    before, like = edges.topology, edges.to_local()
    (source_id, sources), (target_id, targets) = source, target
    if sources is edges.sources and targets is edges.nodes:
        return edges, torch.ones(len(edges.edges), dtype=torch.bool)
    ends = torch.stack([source_id[before.source_gid], target_id[before.target_gid]])
    keep = (ends >= 0).all(0)
    kept = edges.edges.select(keep)
    if edges.edges.nodes is not None:
        kept = replace(kept, nodes=targets)
    local = ends[:, keep].to(like.device, like.dtype)
    out = DistEdgeIndex.build(local, targets, kept, sources=sources if typed else None)
    after = out.topology
    after.halo, after.ordering, after.link = before.halo, before.ordering, before.link
    weight = edges.weight
    if weight is not None:
        weight = DistTensor.wrap(weight.to_local()[keep.to(like.device)], kept)
    if weight is not None or edges.of_torch or edges.looped:
        out = out.carrying(weight, looped=edges.looped, of_torch=edges.of_torch)
    return out, keep
