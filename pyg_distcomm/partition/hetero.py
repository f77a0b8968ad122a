"""Cuts a HeteroData as one graph of all its types, and takes one part of it.

See [Note: several types] in `partition/part_share.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_distcomm.partition.cutters import check_edge_index, cut
from pyg_distcomm.partition.part_share import (
    GraphTypes,
    PartShare,
    attribute_key,
    batch_kind,
    labels_pairs,
)
from pyg_distcomm.partition.partition import Counts, Owner, Partition, PartitionReport
from pyg_distcomm.partition.report import report

OwnersByType = Mapping[str, Partition | Owner]


def check_hetero(data: HeteroData) -> None:
    """Refuses a graph that cannot be shared out, naming the type."""
    if not data.node_stores:
        raise ValueError("the HeteroData has no nodes of any type")
    for store in data.node_stores:
        if store.num_nodes is None:
            raise ValueError(
                f"node type {store._key!r}: num_nodes is not known; set it"
            )
    for store in data.edge_stores:
        source, _, target = store._key
        edges = store.get("edge_index")
        if not isinstance(edges, Tensor):
            raise TypeError(
                f"edge type {store._key}: edge_index is {type(edges).__name__}; partition "
                "needs the [2, num_edges] tensor"
            )
        sizes = [int(data[end].num_nodes) for end in (source, target)]
        try:
            check_edge_index(edges, max(sizes))
            for end in (0, 1):
                check_edge_index(edges[end].expand(2, -1), sizes[end])
        except (TypeError, ValueError) as error:
            raise type(error)(f"edge type {store._key}: {error}") from None


def cut_hetero(
    data: HeteroData, parts: int, method: Any, seed: int = 0, refine: bool = False
) -> Partition:
    """Shares out the nodes of all types: as one graph, or by a vector for each type.

    As one graph, "ldg" and "metis" spread nodes, in-edges, train nodes, and the nodes of each
    type.

    Args:
        data: the whole graph.
        parts: how many there will be.
        method: the name of a cutter, or the owners of the nodes by node type.
        seed: of the cutter.
        refine: whether to move nodes until the busiest part exchanges fewer rows.

    Returns:
        The owners of all nodes, type after type.
    """
    if isinstance(method, Mapping):
        if refine:
            raise ValueError(
                "refine=True moves nodes of a graph that is cut here; give the name of a "
                "method, or leave refine out where the owners are given"
            )
        return owners_of_all(data, parts, method)
    if not isinstance(method, str):
        raise TypeError(
            "the owners of a HeteroData are a dictionary of one vector for each node "
            f"type, got {type(method).__name__}"
        )
    sizes = [int(store.num_nodes) for store in data.node_stores]
    several = len(sizes) > 1 and any(sizes)
    kinds, train = torch.arange(len(sizes)), train_mask_of_all(data)
    return cut(
        edges_of_all(data),
        sum(sizes),
        parts,
        method,
        seed=seed,
        train_mask=train if bool(train.any()) else None,
        refine=refine,
        kinds=kinds.repeat_interleave(torch.tensor(sizes)) if several else None,
    )


def owners_of_all(data: HeteroData, parts: int, owners: OwnersByType) -> Partition:
    """Joins the owners that are given by node type."""
    sizes = {store._key: int(store.num_nodes) for store in data.node_stores}
    if set(owners) != set(sizes):
        raise ValueError(
            f"owners are given for the node types {sorted(owners)}, but the graph has "
            f"{sorted(sizes)}; give one vector for each"
        )
    found = []
    for name, count in sizes.items():
        own = owners[name]
        if not isinstance(own, Partition):
            own = Partition.from_owner(own, parts, count)
        if own.num_parts != parts or own.num_nodes != count:
            raise ValueError(f"{own} does not fit {count} nodes on {parts} ranks")
        found.append(own.owner)
    return Partition.from_owner(torch.cat(found), parts, sum(sizes.values()))


def edges_of_all(data: HeteroData) -> Tensor:
    """Returns the edges of all types, between nodes that are numbered type after type."""
    begin = _begins(data)
    edges = [torch.empty(2, 0).long()]
    for store in data.edge_stores:
        source, _, target = store._key
        shift = torch.tensor([[begin[source]], [begin[target]]])
        edges.append(store.edge_index.cpu().long() + shift)
    return torch.cat(edges, 1)


def train_mask_of_all(data: HeteroData) -> Tensor:
    """Returns the training nodes of all types."""
    masks = [torch.empty(0, dtype=torch.bool)]
    for store in data.node_stores:
        mask, count = store.get("train_mask"), int(store.num_nodes)
        known = isinstance(mask, Tensor) and mask.dtype == torch.bool
        known = known and mask.shape == (count,)
        masks.append(mask.cpu() if known else torch.zeros(count, dtype=torch.bool))
    return torch.cat(masks)


def types_of(data: HeteroData, partition: Partition) -> GraphTypes:
    """Counts what each part owns of each type."""
    parts, begin, nodes = partition.num_parts, _begins(data), {}
    for store in data.node_stores:
        first = begin[store._key]
        own = partition.owner[first : first + int(store.num_nodes)].long()
        nodes[store._key] = _counts(own, parts)
    edges = {
        store._key: _counts(_home(store, begin, partition), parts)
        for store in data.edge_stores
    }
    return GraphTypes(nodes, edges)


def part_of_hetero(
    data: HeteroData, partition: Partition, types: GraphTypes, part: int
) -> PartShare:
    """Takes one part of a HeteroData: its nodes of each type, and the edges into them."""
    rows: dict[str, dict[str, Any]] = {"node": {}, "edge": {}, "graph": {}}
    begin, node_gid = _begins(data), partition.gids(part)
    for store in data.node_stores:
        first = begin[store._key]
        gid = node_gid[types.slices("node", part)[store._key]] - first
        _take(store, gid, int(store.num_nodes), "node", rows)
    edge_gid, ends = [torch.empty(0).long()], [torch.empty(2, 0).long()]
    for store in data.edge_stores:
        source, _, target = store._key
        mine = (_home(store, begin, partition) == part).nonzero().view(-1)
        shift = torch.tensor([[begin[source]], [begin[target]]])
        edge_gid.append(mine + types.ranges("edge")[store._key][0])
        ends.append(store.edge_index.cpu()[:, mine].long() + shift)
        _take(store, mine, store.edge_index.size(1), "edge", rows)
    for name, value in data._global_store.items():
        rows["graph"][attribute_key(None, name)] = value
    return PartShare(
        part=part,
        partition=partition,
        num_edges_global=sum(map(sum, types.edges.values())),
        node_gid=node_gid,
        edge_gid=torch.cat(edge_gid),
        edge_index=torch.cat(ends, 1),
        node=rows["node"],
        edge=rows["edge"],
        graph=rows["graph"],
        types=types,
    )


def report_of_hetero(
    data: HeteroData, partition: Partition
) -> tuple[PartitionReport, GraphTypes]:
    """Counts what parts own and exchange, where each edge type has an exchange of its own.

    A node that is a source of two edge types travels for each.
    """
    types, halo, begin = types_of(data, partition), {}, _begins(data)
    sums = torch.zeros(3, partition.num_parts, dtype=torch.int64)
    for store in data.edge_stores:
        source, _, target = store._key
        shift = torch.tensor([[begin[source]], [begin[target]]])
        one = report(store.edge_index.cpu().long() + shift, partition)
        halo[store._key] = one.halo_rows
        cut_here = (one.edge_cut,) + (0,) * (partition.num_parts - 1)
        sums += torch.tensor([one.halo_rows, one.send_rows, cut_here])
    figures = report(torch.empty(2, 0).long(), partition, train_mask_of_all(data))
    edges = [0] * partition.num_parts
    for counts in types.edges.values():
        edges = [a + b for a, b in zip(edges, counts, strict=True)]
    received, sent, away = (tuple(each) for each in sums.tolist())
    figures = replace(
        figures,
        edges=tuple(edges),
        edge_cut=away[0],
        halo_rows=received,
        send_rows=sent,
    )
    return figures, replace(types, halo=halo)


def _take(
    store: Any, gid: Tensor, count: int, level: str, rows: dict[str, dict[str, Any]]
) -> None:
    """Takes the rows of nodes or edges of a type, and passes on what has none."""
    for name, value in store.items():
        if name in ("edge_index", "num_nodes"):
            continue
        whole = isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0
        if (
            whole
            and len(value) == count
            and not labels_pairs(store, name)
            and name != "ptr"
            and not name.endswith("_ptr")
            and batch_kind(store._parent(), store, name) != "graph"
            and store._parent().__cat_dim__(name, value, store) in (0, -value.ndim)
        ):
            value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            value = value.detach()[gid.to(value.device)]
            rows[level][attribute_key(store._key, name)] = value
        else:
            rows["graph"][attribute_key(store._key, name)] = value


def _begins(data: HeteroData) -> dict[str, int]:
    """Returns the number of the first node of each type."""
    begin, total = {}, 0
    for store in data.node_stores:
        begin[store._key] = total
        total += int(store.num_nodes)
    return begin


def _home(store: Any, begin: dict[str, int], partition: Partition) -> Tensor:
    """Returns the part of each edge of a type: that of its target."""
    return partition.owner_of(store.edge_index[1].cpu().long() + begin[store._key[2]])


def _counts(home: Tensor, parts: int) -> Counts:
    return tuple(torch.bincount(home, minlength=parts).tolist())
