"""Cuts a PyG HeteroData: a share of a graph whose nodes and edges have types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_index import DistEdgeIndex, rows_of_edges
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.partition.cutters import check_edge_index, cut
from pyg_distcomm.partition.folder import labels_pairs
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.tensor.dist_tensor import DistTensor


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
        if isinstance(edges, DistEdgeIndex):
            raise TypeError("this is a share already; partition takes the whole graph")
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


def hetero_marks(data: HeteroData, mark: Callable[[Any], str]) -> dict[str, Any]:
    """Returns what all ranks must have alike of a graph: a mark of each of its arrays."""
    told: dict[str, Any] = {}
    for store in data.stores:
        for name, value in store.items():
            if not isinstance(value, DistTensor):
                told[f"data[{store._key!r}].{name}"] = mark(value)
    for store in data.node_stores:
        told[f"data[{store._key!r}].num_nodes"] = int(store.num_nodes)
    return told


def cut_hetero(
    data: HeteroData, parts: int, method: Any, seed: int, refine: bool = False
) -> dict[str, Partition]:
    """Shares out the nodes of all types: as one graph, or by a vector for each type.

    As one graph, "ldg" and "metis" spread nodes, in-edges, train nodes, and the nodes of each
    type.
    """
    sizes = {store._key: int(store.num_nodes) for store in data.node_stores}
    if isinstance(method, Mapping):
        if refine:
            raise ValueError(
                "refine=True moves nodes of a graph that is cut here; give the name of a "
                "method, or leave refine out where the owners are given"
            )
        _check_names(method, sizes)
        return {
            name: _given(method[name], parts, count) for name, count in sizes.items()
        }
    if not isinstance(method, str):
        raise TypeError(
            "the owners of a HeteroData are a dictionary of one vector for each node "
            f"type, got {type(method).__name__}"
        )
    begin, total = {}, 0
    for name, count in sizes.items():
        begin[name] = total
        total += count
    edges, train = [torch.empty(2, 0).long()], torch.zeros(total, dtype=torch.bool)
    for store in data.edge_stores:
        source, _, target = store._key
        shift = torch.tensor([[begin[source]], [begin[target]]])
        edges.append(store.edge_index.cpu().long() + shift)
    for store in data.node_stores:
        mask = store.get("train_mask")
        if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 1:
            train[begin[store._key] : begin[store._key] + len(mask)] = mask.cpu()
    mask = train if bool(train.any()) else None
    kinds = torch.arange(len(sizes)).repeat_interleave(torch.tensor([*sizes.values()]))
    whole = cut(
        torch.cat(edges, 1),
        total,
        parts,
        method,
        seed=seed,
        train_mask=mask,
        refine=refine,
        kinds=kinds if len(sizes) > 1 and total else None,
    )
    return {
        name: Partition.from_owner(
            whole.owner[begin[name] : begin[name] + count].clone(), parts, count
        )
        for name, count in sizes.items()
    }


def share_hetero(
    data: HeteroData,
    owners: dict[str, Partition],
    mesh: Mesh,
    oblivious: bool,
    link: LinkPolicy | None,
) -> HeteroData:
    """Returns this rank's share: each type's nodes, and the edges into them."""
    out = HeteroData()
    nodes = {}
    for name, owner in owners.items():
        nodes[name] = Rows(owner.gids(mesh.rank), owner.num_nodes, mesh, owner)
    for store in data.node_stores:
        rows, name = nodes[store._key], store._key
        _fill(store, out[name], rows, int(store.num_nodes))
        out[name].num_nodes = rows.total
    for store in data.edge_stores:
        source, _, target = store._key
        ends = store.edge_index.cpu()
        mine = (owners[target].owner_of(ends[1]) == mesh.rank).nonzero().view(-1)
        edges = Rows(mine, ends.size(1), mesh, None)
        if source == target:
            edges = rows_of_edges(mine, ends.size(1), nodes[target])
        out[store._key].edge_index = DistEdgeIndex.build(
            ends[:, mine].to(store.edge_index.device),
            nodes[target],
            edges,
            oblivious=oblivious,
            sources=nodes[source],
        ).with_link(link)
        _fill(store, out[store._key], edges, ends.size(1))
    for name, value in data._global_store.items():
        out[name] = value
    return out


def broadcast_owners(
    owners: dict[str, Partition] | None, mesh: Mesh
) -> dict[str, Partition]:
    """Returns rank 0's owners on all ranks."""
    if mesh.size > 1:
        plain = {k: p.owner.numpy() for k, p in owners.items()} if owners else None
        found = collectives.broadcast_object(
            plain if mesh.rank == 0 else None, mesh.world
        )
        owners = {k: Partition.from_owner(v, mesh.size) for k, v in found.items()}
    assert owners is not None
    return owners


def _fill(store: Any, out: Any, rows: Rows, count: int) -> None:
    """Cuts the attributes that have a row for each node or edge; passes the others on."""
    for name, value in store.items():
        if name in ("edge_index", "num_nodes"):
            continue
        whole = isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0
        if (
            whole
            and len(value) == count
            and not labels_pairs(store, name)
            and store._parent().__cat_dim__(name, value, store) in (0, -value.ndim)
        ):
            value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            value = value.detach()[rows.gid.to(value.device)]
            out[name] = DistTensor.wrap(value, rows)
        else:
            out[name] = value


def _check_names(method: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    if set(method) != set(sizes):
        raise ValueError(
            f"owners are given for the node types {sorted(method)}, but the graph has "
            f"{sorted(sizes)}; give one vector for each"
        )


def _given(owner: Any, parts: int, count: int) -> Partition:
    if isinstance(owner, Partition):
        if owner.num_parts != parts or owner.num_nodes != count:
            raise ValueError(f"{owner} does not fit {count} nodes on {parts} ranks")
        return owner
    return Partition.from_owner(owner, parts, count)
