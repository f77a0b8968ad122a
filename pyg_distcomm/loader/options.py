"""Holds the options of loaders that PyG lacks, and checks these, seeds and seed edges."""

from __future__ import annotations

import hashlib
import numbers
import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import ImbalancedSampler as ByClass

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import Axis
from pyg_distcomm.comm.random import keyed_choice
from pyg_distcomm.kernels.core_ops import HASH_ODD, as_bytes, hash_sum
from pyg_distcomm.loader.device_placement import PLACES
from pyg_distcomm.loader.feature_store import DistFeatureStore, id_vector
from pyg_distcomm.partition.partition import leave_in_file, pieces
from pyg_distcomm.sampling.graph_block import is_share, mesh_of
from pyg_distcomm.sampling.graph_source import edges_of, store_of
from pyg_distcomm.sampling.neighbor_sampler import NEIGHBOR
from pyg_distcomm.sampling.partitioned import SAMPLE_AT
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex

TOPOLOGIES = ("auto", "partitioned", "replicated")


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Holds the options of loaders beyond PyG's arguments; pass it as `options=`.

        loader = NeighborLoader(data, [10, 5], options=LoaderOptions(seed=0, draws="labor"))

    Loaders check the options when they are built, on all ranks of a share together.

    Args:
        seed: of all draws and of the order of an epoch (default: from torch's generator,
            rank 0's).
        bulk_size: minibatches sampled at a time; "auto" takes 4 for each thread (of a
            share 16), or as many as fit in 1 GiB, or in an eighth of the free memory.
        prefetch: bulks made ahead of the one in use, in the background; 0 samples when
            asked. "auto" takes 1 if a core is idle, or if a bulk waits for other ranks or a
            disk, else 0.
        split: whether to share batches out over the ranks. "auto" does, unless the lists
            differ by rank, or batches are those of layer-wise inference: all neighbours
            in one hop, of all nodes, in order. Each rank then gets all of them, as the next
            layer reads all rows. False is for a loader of one rank's own.
        even_batches: what to do if batches do not come out even: "pad" repeats batches,
            marked by `batch.padding` (set on every batch of several ranks, so that a
            loss can be multiplied by 0), "drop" leaves out at most P - 1 (more, if the
            script has split the lists itself).
        draws: "neighbor", each node draws its neighbours by itself; or "labor", the nodes of
            a hop draw the same ones where they can ([Balin23]): fewer distinct nodes for the
            same fan-out, and what one node draws is distributed as before. Not with
            `replace`.
        topology: of a share: "partitioned" samples it where it lies, "replicated" gathers
            the edges on every rank first, and only rows travel later. "auto" is
            "partitioned".
        replication: of a share: c, how many ranks hold each block of edges and rows
            (default: that of the mesh if its grid is (P/c, c, 1), else 1).
        sample_at: of a share: "owner" or "requester", where in-edges are drawn.
        features: of a share: the `DistFeatureStore` to fetch rows from, with a cache, a
            codec or files on disk (default: one of the share's own rows).
        embedding: of a share: a `DistEmbedding` that the model looks up by `batch.n_id`, or
            a dictionary of them by node type: who has which of its rows is found out with
            the bulk, so that a step moves rows and gradients alone.
        device: where minibatches are sampled, relabelled and their rows gathered, and where
            they lie: the same minibatches as on the host (None), bit for bit, in bulks made
            on a stream of their own while the last one trains. Of a Data or a HeteroData
            that each rank holds whole, on the host; not with workers. A state of one device
            is good on another. Memory there: the topology, 8 bytes per edge more for draws
            by weight, and the rows. A share is sampled on the host, and the device holds
            this rank's rows, and those that `features` keeps.
        graph_on, rows_on: "pinned" to leave the graph, or the rows of nodes and edges, in
            pinned host memory, where a CUDA device reads them by Triton; or "device". Rows
            may also stay where they are, "host", which picks those that travel.
        cache: of pinned rows, how many nodes' (of each type, those that most edges leave) the
            device keeps: a count (int) or a fraction (float).
    """

    seed: int | None = None
    bulk_size: int | str = "auto"
    prefetch: int | str = "auto"
    split: bool | str = "auto"
    even_batches: str = "pad"
    draws: str = NEIGHBOR
    topology: str = "auto"
    replication: int | None = None
    sample_at: str = "owner"
    features: DistFeatureStore | None = None
    embedding: Any = None
    device: Any = None
    graph_on: str = "device"
    rows_on: str = "device"
    cache: float = 0

    @staticmethod
    def checked(
        loader: str, options: LoaderOptions | None, dataloader: dict[str, Any]
    ) -> LoaderOptions:
        """Returns the options of a loader; raises for wrong ones, or those among PyG's."""
        for field in fields(LoaderOptions):
            if field.name in dataloader:
                raise TypeError(
                    f"{loader}.__init__() got an unexpected keyword argument "
                    f"{field.name!r}; did you mean "
                    f"options=LoaderOptions({field.name}={dataloader[field.name]!r})?"
                )
        options = LoaderOptions() if options is None else options
        if not isinstance(options, LoaderOptions):
            raise TypeError(
                f"options must be a LoaderOptions, got {type(options).__name__}; give "
                "options=LoaderOptions(...)"
            )
        options._check()
        if options.seed is None:
            return options
        try:
            return replace(options, seed=operator.index(options.seed))
        except TypeError:
            raise ValueError(
                f"seed must be a whole number, got {options.seed!r}"
            ) from None

    def _check(self) -> None:
        for name, least in {"bulk_size": 1, "prefetch": 0}.items():
            value = getattr(self, name)
            if value != "auto" and not _whole(value, least):
                raise ValueError(
                    f"{name} must be 'auto' or a number, at least {least}, got {value!r}"
                )
        choices = {
            "even_batches": ("pad", "drop"),
            "split": ("auto", True, False),
            "topology": TOPOLOGIES,
            "sample_at": SAMPLE_AT,
            **PLACES,
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if not isinstance(self.features, (DistFeatureStore, type(None))):
            raise TypeError(
                "features must be a DistFeatureStore, got "
                f"{type(self.features).__name__}"
            )

    def are_for_share(self, data: Any) -> bool:
        """Returns whether the data is a share; raises for options that do not fit it."""
        if is_share(data):
            self._check_share()
            return True
        if isinstance(data, (Data, HeteroData)) and any(
            isinstance(value, DistTensor) for s in data.stores for value in s.values()
        ):
            raise ValueError(
                "got a share of pdc.partition without edges to sample; give the whole graph, "
                "or load batches of its rows"
            )
        used = {
            "topology='partitioned'": self.topology == "partitioned",
            f"replication={self.replication}": self.replication is not None,
            "sample_at='requester'": self.sample_at == "requester",
            "features": self.features is not None,
            "embedding": self.embedding is not None,
        }
        asked = [name for name, given in used.items() if given]
        if asked:
            raise ValueError(
                f"{', '.join(asked)} is for a graph spread over the ranks, got a "
                f"{type(data).__name__} that each rank holds whole; pass "
                "data = pyg_distcomm.partition(data, mesh)"
            )
        return False

    def _check_share(self) -> None:
        if self.graph_on == "pinned":
            raise ValueError(
                "got graph_on='pinned', but a partitioned graph is sampled on the hosts of "
                "all ranks; leave graph_on out, or give each rank the whole graph"
            )
        if self.cache:
            raise ValueError(
                f"got cache={self.cache!r}, which is for a graph that each rank holds "
                "whole; for a share give features=DistFeatureStore.from_data(..., cache=N)"
            )
        if self.split is False:
            raise ValueError(
                "split=False is for a loader of one rank's own, but a partitioned graph "
                "is sampled by all ranks together; leave it out"
            )


def _whole(value: Any, least: int) -> bool:
    """Returns whether a value is an integer of Python or NumPy, and large enough."""
    return isinstance(value, numbers.Integral) and int(value) >= least


def ranks_of(data: Any) -> Axis | None:
    """Returns the axis of all ranks of a share; None for a whole graph."""
    return mesh_of(data).world if is_share(data) else None


def digest(inputs: list[Any]) -> str:
    """Returns a hash of lists and options."""
    digest = hashlib.blake2b(digest_size=16)
    for part in inputs:
        if isinstance(part, Tensor):
            part = part.detach().cpu().resolve_conj().resolve_neg()
            digest.update(f"{part.dtype}{list(part.shape)}".encode())
            digest.update(as_bytes(part).numpy().tobytes())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def named_seeds(data: Data | HeteroData, nodes: Any) -> tuple[str | None, Any]:
    """Returns the node type of seeds (None for a Data), and their ids or mask."""
    if isinstance(data, Data):
        if isinstance(nodes, str):
            raise ValueError(
                f"input_nodes={nodes!r} names a node type, but this graph has none; give "
                "ids or a mask"
            )
        return None, nodes
    pair = isinstance(nodes, (tuple, list)) and len(nodes) == 2
    name, ids = nodes if pair else (nodes, None)
    # indexing a HeteroData with an unknown type would add the type
    if isinstance(name, str) and name in data.node_types:
        return name, ids
    got = repr(name) if isinstance(name, str) else type(nodes).__name__
    raise ValueError(
        "seeds of a HeteroData are a node type, or a pair of a node type and ids or a "
        f"mask; the types are {data.node_types}, got {got}"
    )


def seed_ids(nodes: Any) -> Tensor | None:
    """Returns ids or a mask as a tensor, and None unchanged."""
    if nodes is None:
        return None
    wanted = "input_nodes must be a vector of node ids, or a mask of nodes"
    return id_vector(nodes, wanted, masks=True)


def check_mask(ids: Tensor | None, nodes: int | None) -> None:
    """Raises ValueError for a mask of seeds without an entry for each of the nodes."""
    if ids is None or ids.dtype != torch.bool or nodes is None:
        return
    if ids.shape != (nodes,):
        raise ValueError(
            f"input_nodes is a mask of shape {list(ids.shape)}, but there are "
            f"{nodes} nodes; give one entry for each (a share has row-sharded masks), or ids"
        )


def checked_seeds(data: Any, nodes: Any) -> Any:
    """Returns seeds as PyG takes them, ids and masks as tensors; raises for invalid ones."""
    if not isinstance(data, (Data, HeteroData)):
        return nodes  # PyG reads the sizes of stores itself
    name, given = named_seeds(data, nodes)
    ids = seed_ids(given)
    check_mask(ids, store_of(data, name).num_nodes)
    if name is None:
        return ids
    return name if ids is None else (name, ids)


def named_links(data: Data | HeteroData, links: Any) -> tuple[Any, Any]:
    """Returns the edge type of seed edges (None for a Data), and their ends."""
    if isinstance(data, Data):
        return None, links
    typed = isinstance(links, (tuple, list)) and len(links) > 1
    single = typed and all(isinstance(part, str) for part in links)
    name, ends = (links, None) if single or not typed else links
    name = tuple(name) if isinstance(name, list) else name
    known = [t for t in data.edge_types if name in (t, (t[0], t[2]))]
    if not typed or len(known) > 1 or (ends is None and not known):
        raise ValueError(
            "edge_label_index of a HeteroData is an edge type, or a pair of one and "
            f"edges [2, k]; the types are {data.edge_types}, got "
            f"{name if typed else type(links).__name__!r}"
        )
    return name, ends


def checked_ends(ends: Any) -> Tensor:
    """Returns the ends `[2, k]` of edges as a tensor; raises for anything else."""
    try:
        ends = torch.as_tensor(ends)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"edge_label_index must be [2, k], got {ends!r}") from None
    if ends.dim() != 2 or len(ends) != 2 or ends.is_floating_point():
        raise ValueError(
            f"edge_label_index must be [2, k] node ids, got {list(ends.shape)} of "
            f"{ends.dtype}"
        )
    return ends


def checked_links(data: Any, links: Any) -> Any:
    """Returns the edges of a link loader as PyG takes them; raises for invalid ones."""
    if not isinstance(data, (Data, HeteroData)):
        return links
    name, ends = named_links(data, links)
    if ends is None:
        return name
    ends = checked_ends(ends)
    return ends if name is None else (name, ends)


def check_weighted_sampler(sampler: ByClass, count: int) -> None:
    """Raises ValueError if a sampler draws from another number of seeds than a loader has."""
    if len(sampler.weights) != count:
        raise ValueError(
            f"the ImbalancedSampler draws from {len(sampler.weights)} seeds, and the loader "
            f"has {count}; give both the same input_nodes"
        )


def weighted_positions(sampler: ByClass, key: int) -> Tensor:
    """Draws the positions of the seeds of an epoch by a key, on the CPU."""
    return keyed_choice(key, sampler.weights.cpu(), sampler.num_samples)


def check_lengths(inputs: Any) -> None:
    """Raises ValueError unless there is one time, and one label, for each seed."""
    links = not hasattr(inputs, "node")
    count = len(inputs.row if links else inputs.node)
    given = {"edge_label_time" if links else "input_time": inputs.time}
    given |= {"edge_label": inputs.label} if links else {}
    for name, values in given.items():
        if values is not None and len(values) != count:
            raise ValueError(
                f"{name} must have one entry for each of the {count} seeds, in their "
                f"order, got {len(values)}"
            )


def describe_graph(
    data: Any, world: Axis | None, attributes: Iterable[str | None] = ()
) -> dict[str, Any]:
    """Returns the sizes of a graph, and checksums of its edges.

    It also has checksums of `attributes`, names of weights and times. They are equal for a
    share and the whole graph; collective over `world` for a share.
    """
    if not isinstance(data, (Data, HeteroData)):
        return {}
    sums = [_edge_sum(store) for store in data.edge_stores]
    if world is not None:
        parts = collectives.all_gather_counts(sums, world)
        sums = [_wrapped(sum(part)) for part in zip(*parts, strict=True)]
    edges = [store.num_edges for store in data.edge_stores]
    found = {"number of nodes": data.num_nodes, "number of edges": edges, "edges": sums}
    for name in attributes:
        if name is not None:
            values = [store.get(name) for store in data.stores]
            found[f"values of {name}"] = [_value_sum(v, world) for v in values]
    return found


def _value_sum(values: Any, world: Axis | None) -> int:
    """Sums a hash of each value and its position, modulo 2^64."""
    rows = values.rows if isinstance(values, DistTensor) else None
    local = values if rows is None else values.to_local()
    if not isinstance(local, Tensor):
        return 0
    exact = local.double().view(torch.int64) if local.is_floating_point() else local
    exact = exact.reshape(-1).long().cpu() * HASH_ODD[0]
    width = len(exact) // max(len(local), 1)
    first = torch.arange(len(local)) if rows is None else rows.place
    place = (first.unsqueeze(1) * width + torch.arange(width)).reshape(-1)
    found = int(hash_sum(exact, place, HASH_ODD[1]))
    if rows is None or world is None:
        return found
    every = collectives.all_gather_counts([found], world)
    return _wrapped(sum(part[0] for part in every))


def _edge_sum(store: Any) -> int:
    """Sums a hash of each edge and its position, modulo 2^64."""
    edge_index, place = edges_of(store), None
    if isinstance(edge_index, DistEdgeIndex):
        source, target = edge_index.topology.source_gid, edge_index.topology.target_gid
        place = edge_index.edges.place
        of, known, _ = edge_index.edges.derived.get("counted", (None, 0, None))
        if of is source:  # found while the part was loaded
            return _wrapped(known)
    else:
        source, target = edge_index.as_subclass(Tensor)
    # samplers draw positions among a node's edges, so the order of edges matters
    total, begin = 0, 0
    for part, end in zip(pieces(source), pieces(target), strict=True):
        after = begin + len(part)
        at = torch.arange(begin, after) if place is None else place[begin:after]
        total += int(kernels.hash_edges(part.cpu(), end.cpu(), at))
        leave_in_file(at)
        begin = after
    return _wrapped(total)


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
