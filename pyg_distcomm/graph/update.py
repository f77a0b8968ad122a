"""Appends nodes and edges to a graph that is spread over ranks: `update`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import sampled_digest
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.comm.serialization import differing
from pyg_distcomm.graph.edge_index import DistEdgeIndex, rows_of_edges
from pyg_distcomm.graph.partitioning import count_masks
from pyg_distcomm.graph.topology import LocalGraph, Topology
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.process import tell
from pyg_distcomm.tensor.dist_tensor import DistTensor

SLACK = 1.05  # of the mean number of nodes: a rank with more takes no new ones


def update(
    data: Data,
    *,
    new_edges: Any = None,
    new_nodes: Any = None,
    owner: Any = None,
) -> Data:
    """Returns this rank's share of a graph with nodes and edges appended; collective.

    Every rank gives the same. New nodes get the ids from `data.num_nodes` on, and new edges
    stand behind those there are: the share is what `partition` gives of the whole new graph
    by the same owners, and no row of the old one moves. The share that was given stays as it
    is; loaders and products that were made of it are of the old graph.

    A new node goes to the rank that owns most of its neighbours among the new edges, if that
    has at most 1.05 times its share of the nodes, else to the rank with the fewest nodes.

    Args:
        data: a share of `partition` or `load_partition`.
        new_edges: `[2, e']` in ids of nodes, old and new; or a dictionary of that, as
            "edge_index", and `[e', ...]` for each attribute of the edges.
        new_nodes: how many, or a dictionary with `[n', ...]` for each attribute of the nodes.
        owner: the owners `[n']` of the new nodes, instead of the rule above.

    Price: ids of ghosts that are new, once on each side, and a few counts, where layers have
    exchanged rows before: `mesh.ledger.words("update")`. Plans of products are made again at
    their next use, as `partition`'s are.

    Raises:
        ValueError, TypeError: on all ranks, naming the attribute and what it should be.
    """
    edge_index = getattr(data, "edge_index", None)
    if not isinstance(edge_index, DistEdgeIndex):
        raise TypeError(
            "update takes a Data that pdc.partition returned, with an edge_index; got "
            f"{type(data).__name__} with {type(edge_index).__name__}; a graph that is not "
            "spread is changed before pdc.partition"
        )
    if isinstance(data, Batch):
        raise TypeError(
            "update takes a graph, not a Batch of several: make a new Batch, and cut it by "
            "pdc.partition"
        )
    mesh = edge_index.nodes.mesh
    problem, added = None, None
    try:
        added = _Added.of(data, edge_index, new_edges, new_nodes, owner)
    except (TypeError, ValueError) as error:
        problem = error
    _agree(problem, {} if added is None else added.marks(), mesh)
    assert added is not None
    before = mesh.ledger.words("update")
    out = _appended(data, edge_index, added)
    words = mesh.ledger.words("update") - before
    about = len(added.owner), added.edge_index.size(1), 8 * words
    tell(
        mesh.rank, "appended %d nodes and %d edges: %d bytes of plans came here", *about
    )
    return out


def _agree(problem: Exception | None, marks: dict[str, Any], mesh: Mesh) -> None:
    """Raises the first problem on all ranks, or what they were given that differs."""
    kinds = collectives.all_gather_object(
        type(problem) if problem else None, mesh.world
    )
    kind = next((k for k in kinds if k is not None), ValueError)
    collectives.agree(None if problem is None else str(problem), mesh.world, kind)
    found = differing(collectives.all_gather_object(marks, mesh.world))
    if found is not None:
        raise ValueError(
            f"update needs the same nodes and edges on all ranks: {found}; gather what one "
            "rank alone has seen"
        )


class _Added:
    """What is appended, checked: edges, the owners of new nodes, and rows by attribute."""

    def __init__(
        self,
        edge_index: Tensor,
        owner: Tensor,
        node: dict[str, Tensor],
        edge: dict[str, Tensor],
    ) -> None:
        self.edge_index, self.owner = edge_index, owner
        self.node, self.edge = node, edge

    @staticmethod
    def of(
        data: Data, known: DistEdgeIndex, edges: Any, nodes: Any, owner: Any
    ) -> _Added:
        if known.topology.sources is not None or "adj_t" in data:
            raise TypeError(
                "update takes a graph of one node type, without an adj_t; partition the new "
                "graph instead"
            )
        if not isinstance(edges, (Mapping, Tensor, Sequence, np.ndarray, type(None))):
            raise TypeError(
                "new_edges must be node ids [2, e'], or a dictionary with them as edge_index, "
                f"got {type(edges).__name__}"
            )
        given = edges if isinstance(edges, Mapping) else {"edge_index": edges}
        more = given.get("edge_index")
        more = torch.empty(2, 0, dtype=torch.int64) if more is None else _plain(more)
        if more.dim() != 2 or more.size(0) != 2 or more.is_floating_point():
            raise ValueError(
                f"new_edges must be node ids [2, e'], got {list(more.shape)} of {more.dtype}"
            )
        every = data.to_dict().items()
        held = {name: value for name, value in every if isinstance(value, DistTensor)}
        names: dict[str, list[str]] = {"node": [], "edge": []}
        for name, value in held.items():
            names[_level(name, value.rows, known)].append(name)
        rows_of_edge = {n: v for n, v in given.items() if n != "edge_index"}
        edge = _rows(held, names["edge"], rows_of_edge, more.size(1), "edge")
        rows_of_node = nodes if isinstance(nodes, Mapping) else {}
        count = _count(nodes)
        node = _rows(held, names["node"], rows_of_node, count, "node")
        partition = known.nodes.partition
        assert partition is not None
        try:
            check_edge_index(more, known.nodes.total + count)
        except ValueError as error:
            hint = "set data.num_nodes if there are more"
            text = str(error).replace(hint, "give new ones by new_nodes")
            raise ValueError(f"new_edges: {text}") from None
        if owner is None:
            homes = _owners(partition, more.cpu().long(), count)
        else:
            homes = torch.as_tensor(owner).cpu().long()
            size = partition.num_parts
            if homes.shape != (count,) or bool(((homes < 0) | (homes >= size)).any()):
                raise ValueError(
                    f"owner must be a rank below {size} for each of {count} new nodes, got "
                    f"{homes.tolist()[:8]}"
                )
        return _Added(more.cpu().long(), homes, node, edge)

    def marks(self) -> dict[str, Any]:
        """Returns what all ranks must have alike."""
        tensors = {"new_edges": self.edge_index, "owner": self.owner}
        tensors |= {f"new {name}": x for name, x in (self.node | self.edge).items()}
        return {
            name: f"{x.dtype} {list(x.shape)}, hash {sampled_digest(x):x}"
            for name, x in tensors.items()
        }


def _level(name: str, rows: Rows, known: DistEdgeIndex) -> str:
    """Returns whether an attribute is of the nodes or of the edges."""
    levels = {"node": known.nodes, "edge": known.edges}
    for same in (lambda own: rows is own, rows.same_as):
        for level, own in levels.items():
            if same(own):
                return level
    raise ValueError(
        f"data.{name} has rows of its own, neither of nodes nor of edges; take it out of the "
        "Data before update"
    )


def _plain(value: Any) -> Tensor:
    if isinstance(value, DistEdgeIndex | DistTensor):
        raise TypeError(
            "new edges and nodes are the same plain tensors on all ranks, got a "
            f"{type(value).__name__}; take its full_tensor()"
        )
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return torch.as_tensor(value).detach()


def _count(nodes: Any) -> int:
    """Returns how many nodes are new."""
    if nodes is None:
        return 0
    if isinstance(nodes, Mapping):
        counts = {name: len(_plain(value)) for name, value in nodes.items()}
        if len(set(counts.values())) > 1 or not counts:
            raise ValueError(
                f"new_nodes must have as many rows in each attribute, got {counts}"
            )
        return next(iter(counts.values()))
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 0:
        raise ValueError(
            f"new_nodes must be a number of nodes, or a dictionary of rows, got {nodes!r}"
        )
    return nodes


def _rows(
    held: Mapping[str, DistTensor],
    names: list[str],
    given: Mapping[str, Any],
    count: int,
    level: str,
) -> dict[str, Tensor]:
    """Returns the new rows of each attribute of a level, of its shape and dtype."""
    for name in given:
        if name not in names:
            raise ValueError(
                f"new_{level}s has {name!r}, but the {level}s of the graph have {names}"
            )
    out = {}
    for name in names:
        old = held[name].to_local()
        if name in given:
            rows = _plain(given[name])
        elif count == 0:
            rows = old.new_empty((0, *old.shape[1:]))
        else:
            raise ValueError(
                f"give new_{level}s a {name!r}, {[count, *old.shape[1:]]} of {old.dtype}, "
                f"as the {level}s of the graph have"
            )
        if rows.shape != (count, *old.shape[1:]) or rows.dtype != old.dtype:
            raise ValueError(
                f"new {name} must be {[count, *old.shape[1:]]} of {old.dtype}, got "
                f"{list(rows.shape)} of {rows.dtype}"
            )
        out[name] = rows.to(old.device)
    return out


def _owners(partition: Partition, edges: Tensor, count: int) -> Tensor:
    """Returns the owners of new nodes, the same on all ranks."""
    first, parts = partition.num_nodes, partition.num_parts
    sizes = torch.tensor(list(partition.sizes))
    most = SLACK * (first + count) / parts
    owner = torch.cat([partition.owner.long(), torch.full((count,), -1)])
    ends = torch.cat([edges, edges.flip(0)], 1)
    ends = ends[:, ends[0] >= first]
    ends = ends[:, ends[0].argsort(stable=True)]
    begin = torch.searchsorted(
        ends[0].contiguous(), torch.arange(first, first + count + 1)
    )
    for k in range(count):
        near = owner[ends[1, begin[k] : begin[k + 1]]]
        votes = torch.bincount(near[near >= 0], minlength=parts)
        best = int(votes.argmax())
        if not int(votes[best]) or int(sizes[best]) + 1 > most:
            best = int(sizes.argmin())
        owner[first + k] = best
        sizes[best] += 1
    return owner[first:]


def _appended(data: Data, known: DistEdgeIndex, added: _Added) -> Data:
    """Returns a share with rows appended, and its edges planned as far as they were."""
    old, mesh = known.nodes, known.nodes.mesh
    assert old.partition is not None
    size = mesh.size
    owner = torch.cat([old.partition.owner.long(), added.owner])
    partition = Partition.from_owner(owner, size, len(owner))
    mine = (added.owner == mesh.rank).nonzero().view(-1)
    gid = torch.cat([old.gid, mine + old.total])
    nodes = Rows(gid, len(owner), mesh, partition, memory=old.memory)
    here = (partition.owner_of(added.edge_index[1]) == mesh.rank).nonzero().view(-1)
    count = known.edges.total
    edges = rows_of_edges(
        torch.cat([known.edges.gid, here + count]),
        count + added.edge_index.size(1),
        nodes,
    )
    local = known.to_local()
    more = added.edge_index[:, here].to(local.device, local.dtype)
    grown = DistEdgeIndex.build(torch.cat([local, more], 1), nodes, edges)
    before, after = known.topology, grown.topology
    after.halo, after.ordering, after.link = before.halo, before.ordering, before.link
    planned = "locals" in vars(before)
    if planned:
        after.__dict__["locals"] = _replanned(before, after)
    out = copy.copy(data)
    out.edge_index, out.num_nodes = grown, nodes.total
    for picked, rows, new in ((mine, nodes, added.node), (here, edges, added.edge)):
        for name, value in new.items():
            whole = torch.cat(
                [data[name].to_local().detach(), value[picked.to(value.device)]]
            )
            out[name] = DistTensor.wrap(whole, rows)
            if nodes.memory is not None:
                nodes.memory.keep(whole)
    count_masks(out, mesh)
    return out


def _replanned(before: Topology, after: Topology) -> LocalGraph:
    """Returns the local numbering of grown edges; only new ghosts are asked for; collective."""
    old, nodes, mesh = before.locals, after.nodes, after.nodes.mesh
    partition = nodes.partition
    assert partition is not None
    source = after.source_gid[len(before.source_gid) :]
    target = after.target_gid[len(before.target_gid) :]
    away = partition.owner_of(source) != mesh.rank
    fresh = torch.unique(source[away])
    fresh = fresh[~torch.isin(fresh, old.ghost_gid)]
    ghost = _grouped(torch.cat([old.ghost_gid, fresh]), partition)
    wanted = torch.bincount(partition.owner_of(fresh), minlength=mesh.size).tolist()
    fresh = _grouped(fresh, partition)
    asked_counts = collectives.exchange_counts(wanted, mesh.world)
    asked = collectives.all_to_all(
        fresh, wanted, asked_counts, mesh.world, "update"
    ).wait()
    halo, size = old.halo, mesh.size
    assert halo.send_gid is not None
    ids = torch.cat([halo.send_gid.cpu(), asked])
    who = torch.arange(size)
    repeats = (torch.tensor(counts) for counts in (halo.send_counts, asked_counts))
    peer = torch.cat([who.repeat_interleave(times) for times in repeats])
    order = torch.argsort(peer * nodes.total + ids)
    counts = torch.bincount(partition.owner_of(ghost), minlength=size).tolist()
    most = max(
        row[0] for row in collectives.all_gather_counts([max(counts)], mesh.world)
    )
    sent = torch.bincount(peer, minlength=size).tolist()
    planned = Halo.of_requests(
        ghost, counts, ids[order], sent, nodes.gid, mesh.world, most
    )
    device, n = after.device, len(nodes)
    by_gid = ghost.argsort()
    place = by_gid[torch.searchsorted(ghost[by_gid], old.ghost_gid)]
    moved = torch.cat([torch.arange(old.num_own), n + place])
    lid = torch.empty_like(source)
    lid[~away] = torch.searchsorted(nodes.gid, source[~away])
    lid[away] = n + by_gid[torch.searchsorted(ghost[by_gid], source[away])]
    most_here = torch.tensor([n + len(after.target_gid)])
    if nodes.memory is not None:
        most_here = collectives.all_reduce(most_here, mesh.world, "max")
    return replace(
        old,
        source_lid=torch.cat([moved[old.source_lid.cpu()], lid]).to(device),
        target_lid=torch.cat(
            [old.target_lid.cpu(), torch.searchsorted(nodes.gid, target)]
        ).to(device),
        ghost_gid=ghost,
        halo=planned.to(device),
        num_own=n,
        most=int(most_here),
    )


def _grouped(gid: Tensor, partition: Partition) -> Tensor:
    """Returns ids by their owner, ascending within."""
    gid = gid.sort().values
    return gid[torch.argsort(partition.owner_of(gid), stable=True)]
