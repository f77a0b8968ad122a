"""Adds and removes nodes and edges of a graph spread over ranks: `update`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.partition_data import count_masks
from pyg_distcomm.graph.subgraphs import agree_same, fully_sharded, union_of_ranks
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.graph.update_arguments import (
    EdgeChange,
    GraphChange,
    NodeChange,
)
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.process import tell
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex, rows_of_edges


def update(
    data: Data | HeteroData,
    *,
    new_edges: Any = None,
    new_nodes: Any = None,
    removed_edges: Any = None,
    removed_nodes: Any = None,
    owner: Any = None,
    return_mapping: bool = False,
) -> Any:
    """Returns this rank's share of a graph with nodes and edges added or removed; collective.

    Every rank passes the same arguments. All ids refer to the graph before the update; the ids
    of new nodes start at `data.num_nodes`. Removed nodes are deleted last, with their edges,
    and the other ids are relabelled in order, as by PyG's `subgraph(relabel_nodes=True)`. New
    edges follow the old ones. The result is the share that `partition` gives for the whole new
    graph with the same owners: no row moves. The given share is unchanged.

    A new node is assigned to the rank that owns most of its neighbours among the new edges, if
    that has at most 1.05 times its share of the nodes of the type, else to the rank with the
    fewest.

    For a HeteroData each argument is a dictionary by node type or edge type. New types are
    allowed: nodes with their attributes, if any, and edges between the types that exist then.
    A new edge type has the link that all others share, if any. New entries of an `adj_t` are a
    sparse matrix, or have their values as "edge_weight"; duplicate entries add up.

    Args:
        data: a share of `partition`, `load_partition` or `update`.
        new_edges: `[2, e']` in ids of nodes, old and new; or a dictionary of that, as
            "edge_index", and `[e', ...]` for each attribute of the edges.
        new_nodes: how many, or a dictionary with `[n', ...]` for each attribute of the nodes.
        removed_edges: `[2, r]` in ids of nodes; removes all copies of an edge, in this
            direction.
        removed_nodes: ids, or a mask `[n]`.
        owner: the owners `[n']` of the new nodes, instead of the rule above.
        return_mapping: whether to return the new ids of old nodes, too.

    Returns:
        The share; with `return_mapping` also `[n]`, by node type for a HeteroData: the new id
        of each old node, -1 if it was removed.

    Price: for the halos of layers, the ids of new and of dropped ghosts, once on each side; the
    positions of removed edges, on all ranks; and a few counts: `mesh.ledger.words("update")`.
    An edge type whose edges and nodes do not change keeps its plans. Products of others are
    planned again at their next use.

    Raises:
        ValueError, TypeError: on all ranks, naming the attribute and what it should be.
    """
    mesh = _mesh_of(data)
    given = {
        "new_edges": new_edges,
        "new_nodes": new_nodes,
        "removed_edges": removed_edges,
        "removed_nodes": removed_nodes,
        "owner": owner,
    }
    problem, change = None, None
    try:
        change = GraphChange(fully_sharded(data), mesh, given)
    except (TypeError, ValueError) as error:
        problem = error
    agree_same(problem, {} if change is None else change.marks(), mesh, "update")
    assert change is not None
    before = mesh.ledger.words("update")
    out = _apply(change)
    words = mesh.ledger.words("update") - before
    tell(mesh.rank, "%s: %d bytes of plans came here", change.about(), 8 * words)
    return (out, change.mapping()) if return_mapping else out


def _mesh_of(data: Any) -> Mesh:
    """Returns the mesh of a share."""
    if isinstance(data, Batch):
        raise TypeError(
            "update takes a graph, not a Batch of several: make a new Batch, and cut it by "
            "pdc.partition"
        )
    if isinstance(data, (Data, HeteroData)):
        for store in data.edge_stores:
            for name in ("edge_index", "adj_t"):
                edges = store.get(name)
                if isinstance(edges, DistEdgeIndex):
                    return edges.nodes.mesh
                if isinstance(edges, DistTensor):  # which an op returned
                    return edges.rows.mesh
    raise TypeError(
        "update takes a Data or HeteroData that pdc.partition returned, with edges; got a "
        f"{type(data).__name__} without; a graph that is not spread is changed before "
        "pdc.partition"
    )


def _apply(change: GraphChange) -> Any:
    """Returns the share after a change; collective."""
    out: Any = copy.copy(change.data)
    for kind, nodes in change.nodes.items():
        if nodes.changes:
            store, before = out if kind is None else out[kind], nodes.before
            assert before is not None
            keep = nodes.stays[before.gid]
            for name, new in nodes.added.items():
                mine = new[nodes.own_new_nodes.to(new.device)]
                old = store[name].to_local() if name in store else mine[:0]
                store[name] = _joined(old, mine, keep, nodes.after, before)
            store.num_nodes = nodes.after.total
            before.note_update()
    for kind, edges in change.edges.items():
        ends = change.ends(kind)
        if edges.changes or any(end.changes for end in ends):
            store = out if kind is None else out[kind]
            _change_edges(change, edges, *ends, store, typed=kind is not None)
    if isinstance(change.data, Data):
        count_masks(out, change.mesh)
    return out


def _change_edges(
    change: GraphChange,
    edges: EdgeChange,
    source: NodeChange,
    target: NodeChange,
    store: Any,
    typed: bool,
) -> None:
    """Writes the edges of a type and their attributes after a change."""
    known, nodes, mesh = edges.known, target.after, change.mesh
    assert nodes.partition is not None
    more = torch.stack(
        [end.new_id[x] for end, x in zip((source, target), edges.more, strict=True)]
    )
    here = (nodes.partition.owner_of(more[1]) == mesh.rank).nonzero().view(-1)
    if known is None:
        like = next(e.known for e in change.edges.values() if e.known is not None)
        place, count = torch.empty(0, dtype=torch.int64), 0
        ends, stays = more[:, :0], torch.empty(0, dtype=torch.bool)
    else:
        like, (place, count) = known, (known.edges.place, known.edges.count)
        ends, stays = edges.ends(source, target)
        if any(x.numel() for x in (source.gone, target.gone, edges.gone)):
            gone = union_of_ranks(place[~stays], mesh, "update")
            place = place[stays]
            place = place - torch.searchsorted(gone, place)
            count -= len(gone)
        known.edges.note_update()
    gid, total = torch.cat([place, count + here]), count + more.size(1)
    if source is target:
        rows = rows_of_edges(gid, total, nodes)
    else:
        rows = Rows(gid, total, mesh, None)
    local = like.to_local()
    ends = torch.cat([ends[:, stays], more[:, here]], 1)
    ends = ends.to(local.device, local.dtype)
    sources = source.after if typed else None
    grown = DistEdgeIndex.build(ends, nodes, rows, sources=sources)
    _plan(change, like.topology, grown.topology, edges, source)
    if edges.adj is None or "edge_index" in store:
        store.edge_index = grown
    for name, new in edges.added.items():
        new = new.to(local.device)
        old = new[:0] if known is None else store[name].to_local()
        mine = new[here.to(new.device)]
        store[name] = _joined(old, mine, stays, rows, nodes)
    if edges.adj is not None:
        weight: Any = edges.adj.weight
        if weight is not None:
            assert edges.value is not None
            new = edges.value.to(local.device)[here.to(local.device)]
            weight = _joined(weight.to_local(), new, stays, rows, nodes)
        looped = (grown.topology.source_gid == grown.topology.target_gid).any()
        found = [int(bool(looped) and source is target)]
        every = collectives.all_gather_counts(found, mesh.world)
        store.adj_t = grown.carrying(
            weight,
            looped=any(row[0] for row in every),
            of_torch=edges.adj.of_torch,
        )


def _plan(
    change: GraphChange,
    before: Topology,
    after: Topology,
    edges: EdgeChange,
    source: NodeChange,
) -> None:
    """Plans changed edges, with the plans that the old ones had; collective."""
    after.halo, after.ordering = before.halo, before.ordering
    if edges.known is not None:
        after.link = before.link
        if "locals" in vars(before):
            old = before.locals.halo
            after.__dict__["locals"] = after.numbered(
                lambda *wanted: _replan(old, source, *wanted)
            )
        return
    every = [
        e.known.topology.link for e in change.edges.values() if e.known is not None
    ]
    if all(link is every[0] for link in every):
        after.link = every[0]


def _joined(
    old: Tensor, new: Tensor, stays: Tensor, rows: Rows, nodes: Rows
) -> DistTensor:
    """Concatenates the rows that stay and the new ones, within the memory cap."""
    whole = torch.cat([old.detach()[stays.to(old.device)], new])
    if nodes.memory is not None:
        nodes.memory.keep(whole)
    return DistTensor.wrap(whole, rows)


def _replan(old: Halo, source: NodeChange, ghost: Tensor, counts: list[int]) -> Halo:
    """Returns the halo of changed edges; only new requests are sent; collective."""
    nodes, axis = source.after, old.axis
    assert old.ghost_gid is not None
    assert old.send_gid is not None
    assert nodes.partition is not None
    known = source.new_id[old.ghost_gid.cpu()]
    known = known[known >= 0]  # their owners know, too, who has been removed
    fresh = ghost[~torch.isin(ghost, known)]
    idle = known[~torch.isin(known, ghost)]
    told, home = torch.cat([fresh, -1 - idle]), torch.cat([fresh, idle])
    home, order = nodes.partition.owner_of(home).sort(stable=True)
    wanted = torch.bincount(home, minlength=axis.size).tolist()
    back = collectives.exchange_counts(wanted, axis)
    came = collectives.all_to_all(told[order], wanted, back, axis, "update").wait()
    who, total = torch.arange(axis.size), max(1, nodes.total)
    sent = source.new_id[old.send_gid.cpu()]
    peer = who.repeat_interleave(torch.tensor(old.send_counts))
    pairs = (peer * total + sent)[sent >= 0]
    first = who.repeat_interleave(torch.tensor(back)) * total
    leave, enter = (first - 1 - came)[came < 0], (first + came)[came >= 0]
    pairs = torch.cat([pairs[~torch.isin(pairs, leave)], enter]).sort().values
    send_counts = torch.bincount(pairs // total, minlength=axis.size).tolist()
    every = collectives.all_gather_counts([max(counts)], axis)
    most = max(row[0] for row in every)
    wants = ghost, counts, pairs % total, send_counts
    return Halo.of_requests(*wants, nodes.gid, axis, most)
