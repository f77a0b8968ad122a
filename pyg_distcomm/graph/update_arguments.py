"""Checks the arguments of `update`, and describes the change of a graph spread over ranks."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_distcomm.comm.consistency import sampled_digest
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.subgraphs import rows_of_types
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex

SLACK = 1.05  # of the mean number of nodes: a rank with more takes no new ones


@dataclass(eq=False)
class NodeChange:
    """Describes the change of the nodes of one type (n before, n' new).

    Shapes: gone [r] ids, ascending; owner [n'] of new nodes; added [n', ...] by attribute.
    """

    where: str  # in messages
    before: Rows | None
    total: int
    gone: Tensor
    count: int
    added: dict[str, Tensor]
    owner: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.owner = torch.full((self.count,), -1)

    @property
    def changes(self) -> bool:
        return self.count > 0 or len(self.gone) > 0

    @cached_property
    def stays(self) -> Tensor:
        """Which nodes, old and new ones `[n + n']`, remain in the graph."""
        stays = torch.ones(self.total + self.count, dtype=torch.bool)
        stays[self.gone] = False
        return stays

    @cached_property
    def new_id(self) -> Tensor:
        """The new ids of old and new nodes `[n + n']`; -1 for removed ones."""
        return torch.where(self.stays, self.stays.cumsum(0) - 1, -1)

    @property
    def every_owner(self) -> Tensor:
        """The owners of old and new nodes `[n + n']`; -1 is unknown."""
        if self.before is None or self.before.partition is None:
            return torch.full((self.total + self.count,), -1)
        return torch.cat([self.before.partition.owner.long(), self.owner])

    @cached_property
    def own_new_nodes(self) -> Tensor:
        """The positions of this rank's nodes among the new ones."""
        assert self.before is not None
        return (self.owner == self.before.mesh.rank).nonzero().view(-1)

    @cached_property
    def after(self) -> Rows:
        """The rows after the change."""
        before = self.before
        assert before is not None
        assert before.partition is not None
        if not self.changes:
            return before
        own = torch.cat([before.gid, self.own_new_nodes + self.total])
        parts, version = before.partition.num_parts, before.partition.version
        partition = Partition.from_owner(self.every_owner[self.stays], parts)
        if len(self.gone):
            version = zlib.crc32(self.gone.numpy().tobytes(), version) or 1
        partition = replace(partition, union=before.partition.union, version=version)
        gid = self.new_id[own]
        count = partition.num_nodes
        return Rows(gid[gid >= 0], count, before.mesh, partition, memory=before.memory)


@dataclass(eq=False)
class EdgeChange:
    """Describes the change of the edges of one type (e' new, r removed pairs).

    Shapes: more [2, e'] and gone [2, r] in ids of the graph before; value [e'] of an adj_t.
    """

    where: str
    known: DistEdgeIndex | None
    adj: DistEdgeIndex | None
    more: Tensor
    gone: Tensor
    added: dict[str, Tensor]
    value: Tensor | None

    @property
    def changes(self) -> bool:
        return self.known is None or self.more.size(1) > 0 or self.gone.size(1) > 0

    def ends(self, source: NodeChange, target: NodeChange) -> tuple[Tensor, Tensor]:
        """Returns this rank's old edges `[2, e]` in new ids, and which stay `[e]`."""
        assert self.known is not None
        topology = self.known.topology
        ids = source.new_id[topology.source_gid], target.new_id[topology.target_gid]
        ends = torch.stack(ids)
        stays = (ends >= 0).all(0)
        if self.gone.size(1):
            stays &= ~torch.isin(*self._codes(target))
        return ends, stays

    def _codes(self, target: NodeChange) -> tuple[Tensor, Tensor]:
        """Returns this rank's old edges, and removed edges, encoded as integers."""
        assert self.known is not None
        topology, n = self.known.topology, target.total
        gone = self.gone[0] * n + self.gone[1]
        return topology.source_gid * n + topology.target_gid, gone

    def check_exist(self, target: NodeChange) -> None:
        """Raises for removed edges that do not exist, on the rank that would own them."""
        if not self.gone.size(1):
            return
        assert self.known is not None
        nodes = self.known.nodes
        assert nodes.partition is not None
        own, gone = self._codes(target)
        mine = nodes.partition.owner_of(self.gone[1]) == nodes.mesh.rank
        lost = mine & ~torch.isin(gone, own)
        if bool(lost.any()):
            pair = self.gone[:, lost][:, 0].tolist()
            raise ValueError(
                f"removed_edges{self.where} has the edge {pair}, which the graph does not "
                "have; an edge goes from the first row to the second"
            )


class GraphChange:
    """Describes a checked change of a graph, by node and edge type; None for a Data."""

    def __init__(
        self, data: Data | HeteroData, mesh: Mesh, given: Mapping[str, Any]
    ) -> None:
        self.data, self.mesh = data, mesh
        self.nodes: dict[Any, NodeChange] = {}
        self.edges: dict[Any, EdgeChange] = {}
        by_type = {name: _by_type(data, name, value) for name, value in given.items()}
        rows = rows_of_types(data)
        new, gone = by_type["new_nodes"], by_type["removed_nodes"]
        for kind, store in _by_key(data.node_stores).items():
            self.nodes[kind] = _nodes_of(kind, store, rows.get(kind), new, gone)
        for kind in new:
            if kind not in self.nodes:
                edges = by_type["new_edges"]
                self.nodes[kind] = _new_node_type(data, kind, new[kind], edges, rows)
        new, gone = by_type["new_edges"], by_type["removed_edges"]
        stores = _by_key(data.edge_stores)
        for kind in dict.fromkeys([*stores, *new, *gone]):
            ends = self.ends(kind)
            self.edges[kind] = _edges_of(kind, stores.get(kind), new, gone, *ends)
        self._place(by_type["owner"])

    def ends(self, kind: Any) -> tuple[NodeChange, NodeChange]:
        """Returns the nodes at both ends of the edges of a type."""
        if kind is None:
            return self.nodes[None], self.nodes[None]
        for name in (kind[0], kind[-1]):
            if name not in self.nodes:
                raise ValueError(
                    f"edges of type {kind} need nodes of type {name!r}, but the graph has "
                    f"{list(self.nodes)}; give those of a type that begins by new_nodes"
                )
        return self.nodes[kind[0]], self.nodes[kind[-1]]

    def _place(self, given: Mapping[Any, Any]) -> None:
        """Chooses the owners of new nodes, type by type, the same on all ranks."""
        parts, begin, owners, total = self.mesh.size, {}, [], 0
        for kind in given:
            if kind not in self.nodes:
                raise ValueError(
                    f"owner has {kind!r}, which is no node type; there are {list(self.nodes)}"
                )
        for kind, nodes in self.nodes.items():
            begin[kind], total = total, total + nodes.total + nodes.count
            if given.get(kind) is not None:
                homes = _ids(given[kind], f"owner{nodes.where}", 1)
                wrong = bool(((homes < 0) | (homes >= parts)).any())
                if homes.shape != (nodes.count,) or wrong:
                    raise ValueError(
                        f"owner{nodes.where} must be a rank below {parts} for each of "
                        f"{nodes.count} new nodes, got {homes.tolist()[:8]}"
                    )
                nodes.owner = homes
            owners.append(nodes.every_owner)
        owner, ends = torch.cat(owners), [torch.empty(2, 0, dtype=torch.int64)]
        for kind, edges in self.edges.items():
            first = [0, 0] if kind is None else [begin[kind[0]], begin[kind[-1]]]
            both = edges.more + torch.tensor(first).unsqueeze(1)
            ends += [both, both.flip(0)]
        every = torch.cat(ends, 1)
        for kind, nodes in self.nodes.items():
            first_new = begin[kind] + nodes.total
            if given.get(kind) is None and nodes.count:
                nodes.owner = _chosen(nodes, first_new, owner, every, parts)

    def marks(self) -> dict[str, Any]:
        """Returns digests that must be the same on all ranks."""
        tensors: dict[str, Tensor] = {}
        for nodes in self.nodes.values():
            tensors[f"removed_nodes{nodes.where}"] = nodes.gone
            tensors[f"owner{nodes.where}"] = nodes.owner
            tensors |= {f"new {n}{nodes.where}": x for n, x in nodes.added.items()}
        for edges in self.edges.values():
            tensors[f"new_edges{edges.where}"] = edges.more
            tensors[f"removed_edges{edges.where}"] = edges.gone
            tensors |= {f"new {n}{edges.where}": x for n, x in edges.added.items()}
            if edges.value is not None:
                tensors[f"new adj_t{edges.where}"] = edges.value
        return {
            name: f"{x.dtype} {list(x.shape)}, hash {sampled_digest(x):x}"
            for name, x in tensors.items()
        }

    def mapping(self) -> Any:
        """Returns the new id of each old node, by type of a HeteroData; -1 if removed."""
        ids = {k: nodes.new_id[: nodes.total] for k, nodes in self.nodes.items()}
        return ids if isinstance(self.data, HeteroData) else ids[None]

    def about(self) -> str:
        """Describes the change in one line."""
        nodes, edges = self.nodes.values(), self.edges.values()
        more = sum(n.count for n in nodes), sum(e.more.size(1) for e in edges)
        gone = sum(len(n.gone) for n in nodes)
        return f"added {more[0]} nodes and {more[1]} edges, removed {gone} nodes"


def _by_key(stores: Any) -> dict[Any, Any]:
    """Returns stores by type; None is the type of a Data."""
    return {getattr(store, "_key", None): store for store in stores}


def _by_type(data: Any, name: str, value: Any) -> dict[Any, Any]:
    """Returns an argument by type; None is the type of a Data."""
    if value is None:
        return {}
    if isinstance(data, Data):
        return {None: value}
    of_edges = name.endswith("edges")
    what = "edge" if of_edges else "node"
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{name} of a HeteroData must be a dictionary by {what} type, got a "
            f"{type(value).__name__}"
        )
    found = {}
    for key, one in value.items():
        if one is None:
            continue
        kind = tuple(key.split("__")) if of_edges and isinstance(key, str) else key
        typed = of_edges and isinstance(kind, tuple) and len(kind) == 3
        types = data.edge_types if of_edges else data.node_types
        begins = name in ("new_nodes", "owner") and isinstance(kind, str)
        if not typed and (of_edges or not (kind in types or begins)):
            raise ValueError(
                f"{name} has {key!r}, which is no {what} type; there are {types}"
            )
        if name == "removed_edges" and kind not in data.edge_types:
            raise ValueError(
                f"removed_edges has {key!r}, but there are {data.edge_types}"
            )
        found[kind] = one
    return found


def _edges_in(store: Any) -> tuple[Any, Any]:
    """Returns the edges of a store, and its adj_t, if any."""
    edges, adj = store.get("edge_index"), store.get("adj_t")
    for name, value in store.items():
        if isinstance(value, DistEdgeIndex) and value is not edges and value is not adj:
            raise ValueError(
                f"{name} holds other edges than the edge_index; take it out of the graph "
                "before update"
            )
    if isinstance(edges, DistEdgeIndex) and isinstance(adj, DistEdgeIndex):
        if edges.edges is not adj.edges:
            raise ValueError(
                "edge_index and adj_t hold other edges; take one of both out of the graph "
                "before update"
            )
    known = adj if edges is None else edges
    if not isinstance(known, DistEdgeIndex):
        raise ValueError(
            f"the edges of {getattr(store, '_key', 'the graph')} are not spread over ranks, "
            f"as others are; got {type(known).__name__}"
        )
    return known, adj


def _held(store: Any, own: Rows | None, other: Rows | None) -> dict[str, DistTensor]:
    """Returns the attributes of a store with given rows."""
    found = {}
    for name, value in store.items():
        if not is_rows(value):
            continue
        rows = [r for r in (own, other) if r is not None]
        hit = next((r for r in rows if value.rows is r), None)
        if hit is None:
            hit = next((r for r in rows if value.rows.same_as(r)), None)
        if hit is None:
            raise ValueError(
                f"data.{name} has rows of its own, neither of nodes nor of edges; take it "
                "out of the graph before update"
            )
        if hit is own:
            found[name] = value
    return found


def _nodes_of(
    kind: Any,
    store: Any,
    rows: Rows | None,
    new: Mapping[Any, Any],
    gone: Mapping[Any, Any],
) -> NodeChange:
    """Returns the change of the nodes of a type."""
    where = "" if kind is None else f"[{kind!r}]"
    total = int(store.num_nodes) if rows is None else rows.total
    other = _edges_in(store)[0].edges if kind is None else None
    given, ids = new.get(kind), _plain(gone.get(kind, torch.empty(0)))
    if ids.dtype == torch.bool:
        if ids.shape != (total,):
            raise ValueError(
                f"removed_nodes{where} is a mask {list(ids.shape)}, but there are {total} "
                "nodes; give a mask of these, or ids"
            )
        ids = ids.nonzero().view(-1)
    ids = _ids(ids, f"removed_nodes{where}", 1).unique()
    _check_range(ids, total, f"removed_nodes{where}")
    count = _count(given, where)
    some = given if isinstance(given, Mapping) else {}
    added = _rows(_held(store, rows, other), some, count, "node", where)
    nodes = NodeChange(where, rows, total, ids, count, added)
    if rows is None and nodes.changes:
        raise ValueError(
            f"data{where} has no attributes and no edges, which would say who owns its "
            "nodes; give it some before pdc.partition"
        )
    return nodes


def _new_node_type(
    data: Any,
    kind: Any,
    given: Any,
    edges: Mapping[Any, Any],
    known: Mapping[Any, Rows],
) -> NodeChange:
    """Returns the change that adds a new node type."""
    where, some = f"[{kind!r}]", given if isinstance(given, Mapping) else {}
    if not some and not any(kind in (key[0], key[-1]) for key in edges):
        raise ValueError(
            f"new_nodes has {kind!r}, which is no node type; there are {data.node_types}, and "
            "one that begins has attributes, or new_edges"
        )
    like = next(iter(known.values()))
    assert like.partition is not None
    none = torch.empty(0, dtype=torch.int64)
    nobody = Partition.from_owner(none, like.partition.num_parts)
    nobody = replace(nobody, union=like.partition.union)
    rows = Rows(none, 0, like.mesh, nobody, memory=like.memory)
    device = _edges_in(data.edge_stores[0])[0].device
    added = {name: _plain(value).to(device) for name, value in some.items()}
    return NodeChange(where, rows, 0, none, _count(given, where), added)


def _edges_of(
    kind: Any,
    store: Any,
    new: Mapping[Any, Any],
    gone: Mapping[Any, Any],
    source: NodeChange,
    target: NodeChange,
) -> EdgeChange:
    """Returns the change of the edges of a type."""
    where = "" if kind is None else f"[{kind!r}]"
    known, adj = (None, None) if store is None else _edges_in(store)
    if source.before is None or target.before is None:
        raise ValueError(
            f"new_edges{where}: a node type without attributes and edges does not say who "
            "owns its nodes; give it some before pdc.partition"
        )
    other = source.before if kind is None else None
    held = {} if known is None else _held(store, known.edges, other)
    weight = None if adj is None else adj.weight
    more, given, value = _new_edges(new.get(kind), adj, where)
    if weight is not None and value is None:
        own = given.get("edge_weight") if "edge_weight" in held else None
        value = given.pop("edge_weight", None) if own is None else own
    if weight is not None:
        named = {} if value is None else {"adj_t": value}
        value = _rows({"adj_t": weight}, named, more.size(1), "edge", where)["adj_t"]
    elif value is not None:
        raise ValueError(f"new_edges{where} has values, and the adj_t has none")
    if known is None:  # they begin here
        added = {name: _plain(rows) for name, rows in given.items()}
        for name, rows in added.items():
            if not rows.dim() or len(rows) != more.size(1):
                raise ValueError(
                    f"new {name}{where} must have a row for each of {more.size(1)} edges, "
                    f"got {list(rows.shape)}"
                )
    else:
        added = _rows(held, given, more.size(1), "edge", where)
    pairs = _ids(gone.get(kind, torch.empty(2, 0)), f"removed_edges{where}", 2)
    for side, end in enumerate((source, target)):
        hint = "" if end.count else "; give new nodes by new_nodes"
        _check_range(more[side], end.total + end.count, f"new_edges{where}", hint)
        _check_range(pairs[side], end.total, f"removed_edges{where}")
        lost = more[side][~end.stays[more[side]]]
        if len(lost):
            raise ValueError(
                f"new_edges{where} has node {int(lost[0])}, which removed_nodes takes away; "
                "leave it out of one of both"
            )
    if len(source.gone) or len(target.gone):
        for name, old in {} if store is None else store.items():
            plain = isinstance(old, Tensor) and not isinstance(old, DistEdgeIndex)
            if plain and "index" in name:
                raise ValueError(
                    f"{name}{where} holds ids of nodes, which close up where nodes are "
                    "removed; take it out of the graph, and put it in again by the ids of "
                    "return_mapping=True"
                )
    found = EdgeChange(where, known, adj, more, pairs, added, value)
    found.check_exist(target)
    return found


def _new_edges(
    given: Any, adj: DistEdgeIndex | None, where: str
) -> tuple[Tensor, dict[str, Any], Any]:
    """Returns new edges `[2, e']`, their attributes by name, and values of a sparse matrix."""
    name, value = f"new_edges{where}", None
    rest = dict(given) if isinstance(given, Mapping) else {"edge_index": given}
    more = rest.pop("edge_index", None)
    if more is None:
        more = torch.empty(2, 0)
    sparse = isinstance(more, Tensor) and more.layout != torch.strided
    if sparse or hasattr(more, "coo"):
        if adj is None:
            raise ValueError(f"{name} is a sparse matrix, but the graph has no adj_t")
        more, value = coo_of(more)
    return _ids(more, name, 2), rest, value


def _plain(value: Any) -> Tensor:
    if isinstance(value, DistEdgeIndex | DistTensor):
        raise TypeError(
            "new and removed edges and nodes are the same plain tensors on all ranks, got a "
            f"{type(value).__name__}; take its full_tensor()"
        )
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    try:
        return torch.as_tensor(value).detach()
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(
            f"new and removed edges and nodes are tensors, got a {type(value).__name__}"
        ) from None


def _ids(value: Any, name: str, dim: int) -> Tensor:
    """Returns ids `[k]`, or pairs of them `[2, k]`, as int64 on the CPU."""
    ids = _plain(value).cpu()
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    fits = ids.dim() == dim and (dim == 1 or ids.size(0) == 2)
    if not fits or not (whole or not ids.numel()):
        shape = "[k]" if dim == 1 else "[2, e']"
        raise ValueError(
            f"{name} must be ids {shape}, got {list(ids.shape)} of {ids.dtype}"
        )
    return ids.long().contiguous()


def _check_range(ids: Tensor, count: int, name: str, hint: str = "") -> None:
    bad = ids[(ids < 0) | (ids >= count)]
    if len(bad):
        raise ValueError(
            f"{name} has node {int(bad[0])}, but the ids are 0 .. {count - 1}{hint}"
        )


def _count(nodes: Any, where: str) -> int:
    """Returns how many nodes are new."""
    if nodes is None:
        return 0
    if isinstance(nodes, Mapping):
        every = {name: _plain(value) for name, value in nodes.items()}
        counts = {name: len(x) if x.dim() else 0 for name, x in every.items()}
        if len(set(counts.values())) > 1 or not counts:
            raise ValueError(
                f"new_nodes{where} must have as many rows in each attribute, got {counts}"
            )
        return next(iter(counts.values()))
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 0:
        raise ValueError(
            f"new_nodes{where} must be a number of nodes, or a dictionary of rows, got "
            f"{nodes!r}"
        )
    return nodes


def _rows(
    held: Mapping[str, Any],
    given: Mapping[str, Any],
    count: int,
    level: str,
    where: str,
) -> dict[str, Tensor]:
    """Returns the new rows of each attribute of a level, of its shape and dtype."""
    for name in given:
        if name not in held:
            raise ValueError(
                f"new_{level}s{where} has {name!r}, but the {level}s of the graph have "
                f"{list(held)}"
            )
    out = {}
    for name, value in held.items():
        old = value.to_local()
        if name in given:
            rows = _plain(given[name])
        elif count == 0:
            rows = old.new_empty((0, *old.shape[1:]))
        else:
            raise ValueError(
                f"give new_{level}s{where} a {name!r}, {[count, *old.shape[1:]]} of "
                f"{old.dtype}, as the {level}s of the graph have"
            )
        if rows.shape != (count, *old.shape[1:]) or rows.dtype != old.dtype:
            raise ValueError(
                f"new {name}{where} must be {[count, *old.shape[1:]]} of {old.dtype}, got "
                f"{list(rows.shape)} of {rows.dtype}"
            )
        out[name] = rows.to(old.device)
    return out


def _chosen(
    nodes: NodeChange, first: int, owner: Tensor, ends: Tensor, parts: int
) -> Tensor:
    """Returns the owners of the new nodes of a type, and writes them to those of all types.

    Args:
        nodes: the nodes of the type.
        first: the number of the first new one, where nodes are numbered type after type.
        owner: the owners of nodes of all types; -1 is not known yet.
        ends: new edges of all types, in both directions.
        parts: how many ranks there are.
    """
    old = owner[first - nodes.total : first][nodes.stays[: nodes.total]]
    sizes = torch.bincount(old, minlength=parts)
    most = SLACK * (len(old) + nodes.count) / parts
    ends = ends[:, (ends[0] >= first) & (ends[0] < first + nodes.count)]
    ends = ends[:, ends[0].argsort(stable=True)]
    places = torch.arange(first, first + nodes.count + 1)
    begin = torch.searchsorted(ends[0].contiguous(), places)
    for k in range(nodes.count):
        near = owner[ends[1, begin[k] : begin[k + 1]]]
        votes = torch.bincount(near[near >= 0], minlength=parts)
        best = int(votes.argmax())
        if not int(votes[best]) or int(sizes[best]) + 1 > most:
            best = int(sizes.argmin())
        owner[first + k] = best
        sizes[best] += 1
    return owner[first : first + nodes.count]
