"""A graph that is spread over the ranks, as a loader needs it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data import Data, HeteroData

from pyg_distcomm import wire
from pyg_distcomm.channel import Channel, check_replication, open_channel
from pyg_distcomm.edge_index import DistEdgeIndex
from pyg_distcomm.loader.assembly import Attribute, Pools, hollow_rows
from pyg_distcomm.loader.feature_store import DistFeatureStore
from pyg_distcomm.loader.phases import FETCH, SAMPLE
from pyg_distcomm.loader.shelf import EDGES
from pyg_distcomm.sampling.blocks import mesh_of
from pyg_distcomm.tensor import DistTensor

# Stores of the shares that are alive: loaders for training and evaluation keep one.
_stores: Any = WeakIdKeyDictionary()


class Spread:
    """A share of a graph: its shape for PyG, its rows for a bulk, its channels.

    All ranks build it together. Its channels are closed with it.

    Args:
        data: from `pdc.partition` or `pdc.load_partition`.
        replication: c, how many ranks hold each block; see `open_channel`.
        features: where rows are fetched from (default: a store of the share's own rows).
        arguments: what all ranks have to give alike.

    Raises:
        ValueError, TypeError: on all ranks alike.
    """

    def __init__(
        self,
        data: Data | HeteroData,
        replication: int | None,
        features: DistFeatureStore | None,
        arguments: dict[str, Any],
    ) -> None:
        self.data, self.mesh = data, mesh_of(data)
        problem = None
        try:
            c = check_replication(self.mesh, replication)
            if features is not None:
                c = _check_features(features, c, replication)
        except ValueError as error:
            problem = str(error)
        wire.agree(problem, self.mesh.world)
        _agree_on(arguments, self.mesh.world)
        self.sampling: Channel = open_channel(self.mesh, c, SAMPLE)
        self.fetching: Channel = open_channel(self.mesh, c, FETCH)
        self.close = weakref.finalize(self, _close, self.sampling, self.fetching)
        self.store = self._store_of(features)
        self.hollow, self.attributes = _hollow(data, self.store)
        self._edge_owners_known = False

    def _store_of(self, features: DistFeatureStore | None) -> DistFeatureStore:
        """Returns a store that fetches over this spread's channel."""
        store = features or _kept_store(self.data, self.fetching)
        mine = copy.copy(store)
        mine.channel = self.fetching
        return mine

    def seeds(self, given: Any, times: Any, sampler: Any) -> Any:
        """Returns seeds as ids of the whole graph; masks may be spread like the graph.

        Where nodes have times, the sampler is told those of the seeds.
        """
        name = given if isinstance(given, str) else None
        ids = given
        if isinstance(given, tuple):
            name, ids = given
        ids = self._global(None if isinstance(ids, str) else ids, name)
        told = getattr(sampler, "set_seed_times", None)
        clock = _store(self.data, name).get(getattr(sampler, "time_attr", None))
        if told is not None and times is None and isinstance(clock, DistTensor):
            time = clock.full_tensor().cpu()
            every = torch.arange(len(time))
            every = every if ids is None else every[ids]
            told(name, every, time[every])
        if name is None:
            return ids
        return name if ids is None else (name, ids)

    def _global(self, ids: Any, name: Any) -> Any:
        if isinstance(ids, DistTensor):
            ids = ids.full_tensor()
        if ids is None:
            return None
        ids = torch.as_tensor(ids).cpu()
        count = _store(self.data, name).num_nodes_global
        if ids.dtype == torch.bool and ids.shape != (count,):
            raise ValueError(
                f"input_nodes is a mask of shape {list(ids.shape)}, but the graph has "
                f"{count} nodes; pass the mask of the share (a DistTensor), or ids"
            )
        return ids  # PyG turns a mask into ids, its own way

    def learn_edge_owners(self) -> None:
        """Finds who has which edge; needed where an edge's target is not known."""
        for group in dict.fromkeys(_group(a) for a in self.attributes if a.of_edges):
            self.store.learn_owners(group)
        self._edge_owners_known = True

    def fetch(self, outs: Sequence[Any]) -> Pools:
        """Fetches the distinct rows that a bulk needs, in one exchange; collective."""
        groups: dict[Any, Attribute] = {_group(a): a for a in self.attributes}
        wanted = {group: self._wanted(a, outs) for group, a in groups.items()}
        found = self.store.fetch_unique(wanted)
        pools: Pools = {}
        for k, attribute in enumerate(self.attributes):
            pool = found[_group(attribute)]
            pools[k] = pool.find, pool.rows[attribute.name]
        return pools

    def _wanted(self, attribute: Attribute, outs: Sequence[Any]) -> Any:
        none = torch.empty(0, dtype=torch.int64)
        key = attribute.store
        if not attribute.of_edges:
            return torch.cat([none, *(_part(out.node, key).long() for out in outs)])
        edges: DistEdgeIndex = _store(self.data, key).edge_index
        ids, owners = [none], [none]
        for out in outs:
            e_id = _part(out.edge, key)
            if e_id is None:
                continue
            target = _part(out.node, None if key is None else key[2])
            real = e_id >= 0  # loops that a rule adds have no rows
            ids.append(e_id.long()[real])
            gid = target[_part(out.col, key)[real]]
            assert edges.nodes.partition is not None
            owners.append(edges.nodes.partition.owner_of(gid))
        every = torch.cat(ids)
        return every if self._edge_owners_known else (every, torch.cat(owners))


def _part(found: Any, key: Any) -> Any:
    return found.get(key) if isinstance(found, dict) else found


def _store(data: Any, key: Any) -> Any:
    return data if key is None else data[key]


def _group(attribute: Attribute) -> Any:
    if attribute.store is None:
        return EDGES if attribute.of_edges else None
    return attribute.store


def _hollow(
    data: Data | HeteroData, store: DistFeatureStore
) -> tuple[Any, list[Attribute]]:
    """Returns the whole graph's shape, without its contents, and what it leaves out."""
    hollow: Any = type(data)()
    attributes = []
    held = [(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()]
    for part in data.stores:
        key = getattr(part, "_key", None)
        out = hollow if key is None else hollow[key]
        edges = part.get("edge_index")
        for name, value in part.items():
            if name in ("num_nodes", "num_nodes_global"):
                continue
            if isinstance(value, DistEdgeIndex):
                none = torch.zeros(2, 1, dtype=value.dtype)
                out[name] = none.expand(2, value.num_edges_global)
            elif not isinstance(value, DistTensor):
                out[name] = value
            elif value.requires_grad:
                raise TypeError(
                    f"'{name}' requires a gradient, but rows that are fetched from other "
                    "ranks carry none; detach it, or keep it as a parameter of the model"
                )
        nodes = _num_nodes(part, edges)
        for of_edges, count in ((False, nodes), (True, _num_edges(edges))):
            group = _group(Attribute(key, "", None, of_edges))
            if count is None or (
                of_edges != isinstance(key, tuple) and key is not None
            ):
                continue
            for name in (name for where, name in held if where == group):
                attributes.append(Attribute(key, name, None, of_edges))
                out[name] = hollow_rows(count)
        if nodes is not None and "x" not in out:
            out.num_nodes = nodes
    return hollow, attributes


def _num_edges(edges: Any) -> int | None:
    return edges.num_edges_global if isinstance(edges, DistEdgeIndex) else None


def _num_nodes(part: Any, edges: Any) -> int | None:
    if "num_nodes_global" in part:
        return int(part.num_nodes_global)
    if isinstance(edges, DistEdgeIndex) and not isinstance(
        getattr(part, "_key", None), tuple
    ):
        return edges.num_nodes_global
    return None


def _kept_store(data: Data | HeteroData, channel: Channel) -> DistFeatureStore:
    """Returns a store of the share's rows, built before if they are the same still."""
    anchor = next(s.edge_index for s in data.edge_stores).topology
    values = [
        (name, weakref.ref(value), value._version)
        for part in data.stores
        for name, value in part.items()
        if isinstance(value, DistTensor) and not value.is_inference()
    ]
    kept = _stores.setdefault(anchor, {})
    known = kept.get(channel.replication)
    if known is not None and _same(known[0], values):
        store: DistFeatureStore = known[1]
        return store
    store = DistFeatureStore.from_data(data, channel)
    kept[channel.replication] = values, store
    return store


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        a[0] == b[0] and a[1]() is b[1]() and a[2] == b[2]
        for a, b in zip(before, now, strict=True)
    )


def _close(*channels: Channel) -> None:
    for channel in channels:
        channel.close()


def _check_features(features: DistFeatureStore, c: int, asked: int | None) -> int:
    held = features.channel.replication
    if asked is not None and held != c:
        raise ValueError(
            f"replication={c}, but the feature store holds {held} copies; build it on a "
            "channel of that replication, or leave replication out"
        )
    return held


def _agree_on(arguments: dict[str, Any], world: wire.Axis) -> None:
    told = {name: repr(value) for name, value in arguments.items()}
    every = wire.all_gather_object(told, world)
    for rank, theirs in enumerate(every):
        differ = [name for name in told if theirs.get(name) != every[0].get(name)]
        if differ:
            name = differ[0]
            raise ValueError(
                "a loader of a partitioned graph is built by all ranks alike, but rank "
                f"{rank} has {name}={theirs.get(name)}, and rank 0 {name}="
                f"{every[0].get(name)}; give all ranks the same"
            )
