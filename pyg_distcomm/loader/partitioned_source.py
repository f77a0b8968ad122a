"""Connects a loader to a partitioned graph: its sampler, its features, its process groups."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import ProcessGrid, check_replication, new_process_grid
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.loader.batcher import Attribute, Pools, placeholder_rows
from pyg_distcomm.loader.device_placement import Placement
from pyg_distcomm.loader.epoch import FETCH, SAMPLE
from pyg_distcomm.loader.feature_store import DistFeatureStore, row_cut
from pyg_distcomm.loader.fetch import EDGES, NODES, Fetch, Group
from pyg_distcomm.loader.options import (
    LoaderOptions,
    check_mask,
    checked_ends,
    named_links,
    named_seeds,
    seed_ids,
)
from pyg_distcomm.ops.id_plan import IdPlan, attach_route, plan_ids
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sampling.graph_block import mesh_of
from pyg_distcomm.sampling.graph_source import store_of
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex


class PartitionedSource:
    """Holds a share of a graph for a loader: placeholders for PyG, feature stores, channels.

    All ranks build it together, and raise its errors alike. Its channels are closed when it is
    freed.
    """

    def __init__(
        self,
        data: Data | HeteroData,
        options: LoaderOptions,
        dataloader: dict[str, Any],  # arguments of torch's DataLoader
        **arguments: Any,  # others of the loader, which must be equal on all ranks, too
    ) -> None:
        self.data, self.mesh, self.options = data, mesh_of(data), options
        replication, features = options.replication, options.features
        with on_all_ranks(self.mesh.world):
            c = check_replication(self.mesh, replication)
            if features is not None:
                held = features.channel.replication
                if replication not in (None, held):
                    raise ValueError(
                        f"replication={c}, but the feature store holds {held} copies; "
                        "build it on a channel of that replication, or leave replication out"
                    )
                c = held
        loading = {k: dataloader.get(k) for k in ("batch_size", "shuffle", "drop_last")}
        check_alike(arguments | loading | _comparable(options), self.mesh.world)
        self.sampling: ProcessGrid = new_process_grid(self.mesh, c, SAMPLE)
        self.fetching: ProcessGrid = new_process_grid(self.mesh, c, FETCH)
        for channel in (self.sampling, self.fetching):
            weakref.finalize(self, channel.close)
        self._given_store = features
        self._edges_learned = False  # whether owners of edges are, not just of targets
        with on_all_ranks(self.mesh.world):
            self.embeddings = _rows_of_embeddings(data, options.embedding)
        self.read_rows()

    def read_rows(self) -> None:
        """Reads the rows of the share, and of the store that was given; collective."""
        self._marks = _marks_of(self.data)
        if self._given_store is None:
            found = [_kept_store(self.data, self._marks, self.fetching)]
        else:  # attributes that it lacks come from the share
            rest = _without(self.data, self._given_store)
            found = [self._given_store, DistFeatureStore.from_data(rest, self.fetching)]
        self.stores = [copy.copy(store) for store in found]
        self.placeholder = _with_placeholders(self.data)  # what PyG's loader holds
        self.attributes: list[Attribute] = []  # what is fetched for minibatches
        self._fetches: list[tuple[Fetch, dict[Group, list[str]]]] = []
        for store in self.stores:
            store.channel = self.fetching
            if attrs := self._attributes_of(store):
                self._fetches.append((store.fetcher(attrs), attrs))
        if self._edges_learned:
            self.learn_edge_owners()

    def rows_are_current(self) -> bool:
        """Returns whether the rows are as they were read, on all ranks; collective."""
        same = _same_marks(self._marks, self.data)
        found = collectives.all_gather_counts([int(same)], self.fetching.world)
        return all(one for (one,) in found)

    def fetch(self, outs: Sequence[Any], placement: Placement | None = None) -> Pools:
        """Fetches the distinct rows that a bulk needs, to a device if any; collective.

        One exchange of ids and one of rows for each store.
        """
        groups = {_group_of(a): a for a in self.attributes}
        wanted = {group: self._wanted(a, outs) for group, a in groups.items()}
        found: dict[Any, tuple[Any, Any]] = {}
        for fetch, attrs in self._fetches:
            some = {group: wanted[group] for group in attrs}
            for group, pool in fetch.renewed()(some, placement=placement).items():
                for name in attrs[group]:
                    found[group, name] = pool.find, pool.rows[name]
        return {k: found[_group_of(a), a.name] for k, a in enumerate(self.attributes)}

    def _wanted(self, attribute: Attribute, outs: Sequence[Any]) -> Any:
        none = torch.empty(0, dtype=torch.int64)
        found = [attribute.ids(out) for out in outs]
        if not attribute.of_edges:
            return torch.cat([none, *(ids for ids in found if ids is not None)])
        key, ids, owners = attribute.store, [none], [none]
        edges: DistEdgeIndex = store_of(self.data, key).edge_index
        assert edges.nodes.partition is not None
        for out, e_id in zip(outs, found, strict=True):
            if e_id is not None:
                real = e_id >= 0  # self-loops that a rule adds have no rows
                node = _part(out.node, None if key is None else key[2])
                target = node[_part(out.col, key)[real]]
                ids.append(e_id[real])
                owners.append(edges.nodes.partition.owner_of(target))
        every = torch.cat(ids)
        return every if self._edges_learned else (every, torch.cat(owners))

    def _attributes_of(self, store: DistFeatureStore) -> dict[Any, list[str]]:
        """Returns the attributes to fetch from a store, without those of earlier stores."""
        known = {(_group_of(a), a.name) for a in self.attributes}
        found: dict[Any, list[str]] = {}
        for held in store.get_all_tensor_attrs():
            group, name = held.group_name, held.attr_name
            if (group, name) in known:
                continue
            key, of_edges = (None, True) if group == EDGES else (group, False)
            of_edges = of_edges or isinstance(key, tuple)
            part, out = store_of(self.data, key), store_of(self.placeholder, key)
            edges = part.get("edge_index")
            if of_edges:
                count = edges.edges.total if isinstance(edges, DistEdgeIndex) else None
            else:
                count = _num_nodes(part, edges)
            rows = store.total(group)
            if rows != count:
                raise ValueError(
                    f"got a feature store with {rows} rows of {name!r}, and a graph with "
                    f"{count} {'edges' if of_edges else 'nodes'} there; build both from the "
                    "same graph"
                )
            self.attributes.append(Attribute(key, name, None, of_edges))
            out[name] = placeholder_rows(rows)
            if name == "x" and not of_edges:
                out.pop("num_nodes", None)
            found.setdefault(group, []).append(name)
        return found

    def seeds(self, given: Any, times: Any, sampler: Any) -> Any:
        """Returns seeds as global ids; masks may be row-sharded like the graph; collective.

        If nodes have times, the sampler is given those of all of their type, 8 bytes each.
        """
        with on_all_ranks(self.mesh.world):
            name, ids = named_seeds(self.data, given)
        clocks = None if times is None else "given"
        kinds = {"input_nodes of type": name, "input_time": clocks}
        check_alike(kinds, self.mesh.world)
        ids = self.plain(ids, "input_nodes")
        with on_all_ranks(self.mesh.world):
            ids = seed_ids(ids)
            ids = ids if ids is None else ids.cpu()
            check_mask(ids, store_of(self.data, name).num_nodes)
        if times is None:
            self._give_times([name], sampler)
        if name is None:
            return ids
        return name if ids is None else (name, ids)

    def links(self, given: Any, negatives: Any, sampler: Any) -> tuple[Any, Any]:
        """Returns seed edges by global ids, and the negative sampling; collective.

        Without a list, all edges (of a type) are seeds, in the order of the whole graph: 16
        bytes per edge on every rank. If nodes have times and negative ends are drawn, the
        sampler is given all times, 8 bytes per node.
        """
        with on_all_ranks(self.mesh.world):
            name, ends = named_links(self.data, given)
        check_alike({"edge_label_index of type": name}, self.mesh.world)
        if ends is None:
            ends = store_of(self.data, name).edge_index
        ends = self.plain(ends, "edge_label_index")
        with on_all_ranks(self.mesh.world):
            ends = checked_ends(ends).cpu()
        if isinstance(negatives, NegativeSampling):
            negatives = copy.copy(negatives)
            for side in ("src_weight", "dst_weight"):
                setattr(negatives, side, self.plain(getattr(negatives, side), side))
        if negatives is not None:
            types = [None] if name is None else [name[0], name[-1]]
            self._give_times(types, sampler)
        return ends if name is None else (name, ends), negatives

    def _give_times(self, types: Sequence[Any], sampler: Any) -> None:
        """Gives a sampler the times of all nodes of some types, if it reads any; collective."""
        attr = getattr(sampler, "time_attr", None)
        if attr is None or not hasattr(sampler, "set_node_times"):
            return
        for name in dict.fromkeys(types):
            time = store_of(self.data, name).get(attr)
            if is_rows(time) and time.rows.partition is not None:
                sampler.set_node_times(name, time.full_tensor().cpu())

    def plain(self, values: Any, what: str) -> Any:
        """Returns values, row-sharded or not, as a plain tensor of all nodes; collective."""
        sharded = isinstance(values, (DistTensor, DistEdgeIndex))
        kind = "rows of the share" if sharded else "a tensor, or None"
        kind = "all of its edges" if isinstance(values, DistEdgeIndex) else kind
        check_alike({what: kind}, self.mesh.world)
        return values.full_tensor() if sharded else values

    def learn_edge_owners(self) -> None:
        """Finds the owners of all edges; needed if the target of an edge is not known."""
        for store in self.stores:
            for attribute in self.attributes:
                group = _group_of(attribute)
                if attribute.of_edges and group in store.groups:
                    store.learn_owners(group)
        self._edges_learned = True

    def routes(self, outs: Sequence[Any]) -> list[dict[Any, IdPlan]]:
        """Plans the exchange of embedding rows of each minibatch, by node type; collective.

        One exchange of counts and one of ids, for all minibatches and types of a bulk.
        """
        found: list[dict[Any, IdPlan]] = [{} for _ in outs]
        for key, rows in self.embeddings.items():
            lists = [_part(out.node, key).long() for out in outs]
            plans = plan_ids(lists, rows, self.fetching.world)
            for routes, plan in zip(found, plans, strict=True):
                _ = plan.asked  # computed here, not in the training step
                routes[key] = plan
        return found

    def attach(self, batch: Any, routes: dict[Any, IdPlan]) -> None:
        """Attaches the planned exchanges to the node ids of a minibatch."""
        for key, plan in routes.items():
            ids = store_of(batch, key).get("n_id")
            if isinstance(ids, Tensor) and len(ids) == len(plan.slot):
                attach_route(ids, plan, self.embeddings[key])


def _group_of(attribute: Attribute) -> Group:
    """Returns the group of an attribute in a feature store."""
    if attribute.store is None:
        return EDGES if attribute.of_edges else NODES
    return attribute.store


def _held(data: Any) -> list[tuple[str, DistTensor]]:
    stored = (item for part in data.stores for item in part.items())
    return [(name, value) for name, value in stored if isinstance(value, DistTensor)]


def _writes(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version


def _marks_of(data: Any) -> list[Any]:
    """Returns the identity and version of each attribute, to find out what has changed."""
    with torch._C.DisableTorchFunctionSubclass():
        found = [(name, value, value.to_local()) for name, value in _held(data)]
        return [
            (name, weakref.ref(value), local, _writes(value), _writes(local))
            for name, value, local in found
        ]


def _same_marks(marks: list[Any], data: Any) -> bool:
    """Returns whether attributes are those of the marks, and were not written to since."""
    now = _held(data)
    with torch._C.DisableTorchFunctionSubclass():
        return len(marks) == len(now) and all(
            mark[0] == name
            and mark[1]() is value
            and mark[3:] == (_writes(value), _writes(mark[2]))
            for mark, (name, value) in zip(marks, now, strict=True)
        )


def check_sampled_together(sampler: Any, dataloader: dict[str, Any]) -> None:
    """Raises ValueError for arguments that do not work if all ranks sample together."""
    if sampler is not None:
        raise ValueError(
            "neighbor_sampler was given, but a partitioned graph is sampled by all "
            "ranks together; leave it out"
        )
    if dataloader.get("num_workers", 0):
        raise ValueError(
            f"num_workers={dataloader['num_workers']}: a partitioned graph is sampled "
            "and its rows are fetched by threads of this process, which talk to the "
            "other ranks; leave num_workers out"
        )


def _comparable(options: LoaderOptions) -> dict[str, Any]:
    """Returns options by name, objects by whether they are there, to compare over ranks."""
    types = options.embedding
    types = sorted(types, key=str) if isinstance(types, Mapping) else types is not None
    device = None if options.device is None else torch.device(options.device).type
    given = {"features": options.features is not None, "embedding": types}
    # each rank has a device of its own
    return vars(options) | given | {"device": device}


def _rows_of_embeddings(data: Any, embedding: Any) -> dict[Any, Rows]:
    """Returns the row layout of the embeddings, by node type."""
    if embedding is None:
        return {}
    given = embedding if isinstance(embedding, Mapping) else {None: embedding}
    found = {}
    for key in sorted(given, key=str):  # in one order on all ranks
        one = given[key]
        rows = getattr(one, "rows", None)
        typed = isinstance(data, HeteroData)
        if not isinstance(rows, Rows) or typed != (key is not None):
            raise TypeError(
                "embedding must be a DistEmbedding, or a dictionary of them by node type for "
                f"a HeteroData; got {key!r}: {type(one).__name__}"
            )
        if typed and key not in data.node_types:
            raise ValueError(
                f"embedding has node type {key!r}; there are {data.node_types}"
            )
        nodes = store_of(data, key).num_nodes
        if rows.total != nodes:
            raise ValueError(
                f"got an embedding with {rows.total} rows, and a graph with {nodes} nodes; "
                "build it with num_embeddings=data.num_nodes and like=data"
            )
        found[key] = rows
    return found


def _part(found: Any, key: Any) -> Any:
    return found.get(key) if isinstance(found, dict) else found


def _with_placeholders(data: Data | HeteroData) -> Any:
    """Returns a Data or HeteroData of the whole graph's sizes, with placeholders for edges."""
    # whose lists are in the order of rank 0, as a share's
    placeholder: Any = type(data)()
    for part in data.stores:
        out = store_of(placeholder, part._key)
        for name, value in part.items():
            if name == "num_nodes":
                continue
            if isinstance(value, DistEdgeIndex):
                none = torch.zeros(2, 1, dtype=value.dtype)
                out[name] = none.expand(2, value.edges.total)
            elif not isinstance(value, DistTensor):
                out[name] = value
            elif value.requires_grad:
                raise TypeError(
                    f"'{name}' requires a gradient, but rows that are fetched from other "
                    "ranks carry none; detach it, or learn it: emb = pdc.DistEmbedding"
                    f".from_pretrained(data.{name}, freeze=False), and emb(batch.n_id)"
                )
        nodes = _num_nodes(part, part.get("edge_index"))
        if nodes is not None:
            out.num_nodes = nodes
    return placeholder


def _without(data: Data | HeteroData, store: DistFeatureStore) -> Any:
    """Returns a share without the attributes that a store has."""
    rest: Any = copy.copy(data)
    held = {(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()}
    for part in rest.stores:
        for group, name, _ in list(row_cut(part)):
            if (group, name) in held:
                del part[name]
    return rest


def _num_nodes(part: Any, edges: Any) -> int | None:
    if "num_nodes" in part:
        return int(part.num_nodes)
    typed = isinstance(part._key, tuple)
    return None if typed or not isinstance(edges, DistEdgeIndex) else edges.nodes.total


def _kept_store(
    data: Data | HeteroData, marks: list[Any], channel: ProcessGrid
) -> DistFeatureStore:
    """Returns a store of the share's rows, reused if all ranks have one; collective."""
    anchor = next(s.edge_index for s in data.edge_stores).topology
    kept = PROCESS.stores.setdefault(anchor, {})  # as long as the share is alive
    known = kept.get(channel.replication)  # loaders to train and to evaluate share it
    same = known is not None and _same_marks(known[0], data)
    if all(one for (one,) in collectives.all_gather_counts([int(same)], channel.world)):
        store: DistFeatureStore = known[1]
        return store
    store = DistFeatureStore.from_data(data, channel)
    kept[channel.replication] = marks, store
    return store
