"""Partitions a PyG Data: each rank keeps its share, as a Data of row-sharded tensors.

[Note: order of attributes] PyG lists `keys()`, `node_attrs()` and `edge_attrs()` from sets of
strings, in an order of the process's hash seed: ranks that sum one attribute after the other
would mix them. So a share is of a subclass of its class that lists attributes as they are
stored. Its `__class__` is the class itself, of which PyG asks the name, and makes new objects.
"""

from __future__ import annotations

import copy
import hashlib
import random
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, TemporalData
from torch_geometric.data.data import BaseData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import (
    check_alike,
    naming,
    on_all_ranks,
    sampled_digest,
)
from pyg_distcomm.comm.mesh import Mesh, given_mesh
from pyg_distcomm.graph import partition_data_types
from pyg_distcomm.graph.partition_data_types import TypedBatch
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.halo.policy import LinkPolicy, settings_of
from pyg_distcomm.kernels.memory import parse_bytes
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.partition.folder import graph_kinds, read_part
from pyg_distcomm.partition.layout import META, Verify, folder_meta
from pyg_distcomm.partition.part_share import (
    DividedGraph,
    PartShare,
    check_hetero,
    cut_graph,
    merged,
    with_tensors,
)
from pyg_distcomm.partition.partition import (
    Owner,
    Partition,
    PartitionReport,
    as_vector,
)
from pyg_distcomm.process import PROCESS, tell
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex

Graph = TypeVar("Graph", bound=Data | HeteroData | TemporalData)


def partition(
    data: Graph,
    mesh: Mesh | None = None,
    method: Any = None,
    *,
    seed: int = 0,
    refine: bool = False,
    oblivious: bool = False,
    link: LinkPolicy | Mapping[Any, LinkPolicy | None] | None = None,
    memory: int | str | None = None,
    node_attrs: Iterable[str] = (),
    edge_attrs: Iterable[str] = (),
) -> Graph:
    """Partitions a graph over the ranks; returns this rank's share, still a PyG `Data`.

    Every rank passes the same `data`. Rank 0 partitions it, and broadcasts the owners. The
    owner of the target owns an edge and its attributes. Local rows ascend by global id, and
    nodes keep their ids. `keys()`, `node_attrs()` and `edge_attrs()` list in the order of rank
    0's graph, on all ranks. Afterwards Python's random has the same state on all ranks, since
    PyG draws negative edges from it.

    Args:
        data: the whole graph; every attribute with a row per node or per edge is sharded.
            For an `adj_t` (torch.sparse, or torch-sparse's SparseTensor) in place of an
            edge_index, the share has both: an adj_t with weights, and an edge_index
            without. For a HeteroData each edge type has its own edges, owned by the owners
            of their targets; rows travel between all ranks on any grid. For a
            TemporalData, events are sharded into blocks, and other arguments are ignored.
        mesh: the ranks; those of the last `pdc.init` if None.
        method: "metis", "ldg", "random", "grid" (the row and column parts that products on
            the mesh's grid exchange, by METIS), "block", "graphs" (each graph of a PyG
            Batch whole on one rank), the owner of each node, or a Partition; for a
            HeteroData also a dictionary of owners by node type. METIS falls back to "ldg"
            if pymetis is not installed. None is "metis", or the plan of `init(Auto(...))` for
            this graph; for a Batch it is "graphs", unless that gives a rank a tenth more
            than the mean. The share of a Batch is a Batch.
        seed: the seed of the cutter.
        refine: move nodes, starting from the result of `method`, until the busiest rank
            sends and receives fewer rows; the result is never worse.
        oblivious: exchange whole blocks, not rows: the baseline of [Tripathy20].
        link: the link policy of layers, such as `pdc.VARCO(...)`; None is exact. For a
            HeteroData also a dictionary by edge type, or by the name of a relation.
        memory: a cap on the bytes that layers take on a rank, such as "8GiB": larger
            tensors go to files, halos arrive in stages, and messages are computed in chunks
            of targets, twice. Results and bytes are the same. None is without a cap.
        node_attrs, edge_attrs: attributes to shard as node or edge attributes, where sizes
            are ambiguous.

    Raises:
        ValueError, TypeError: on all ranks, naming the attribute and what it should be.
    """
    mesh = given_mesh(mesh, "pdc.partition")
    options = seed, refine, oblivious, link, memory
    order = order_of_first_rank(data, mesh)
    data = arranged(data, order)
    if isinstance(data, TemporalData):
        share = partition_data_types.shard_events(data, mesh)
    elif TypedBatch.fits(data):
        share = _partition_typed_batch(data, mesh, method, *options)
    else:
        attrs = node_attrs, edge_attrs
        share = _partition_graph(data, mesh, method, *options, attrs)
    return arranged(share, order)


def _partition_typed_batch(data: Any, mesh: Mesh, method: Any, *options: Any) -> Any:
    read = TypedBatch(data)
    if not read.types:  # nothing has rows: all ranks keep it
        _agree_same(_digests(read.typed, {}), mesh)
        return data
    if method is None or (isinstance(method, str) and method == "graphs"):
        method = read.owners(mesh.size)
    return read.joined(_partition_graph(read.typed, mesh, method, *options))


def _partition_graph(
    data: Data | HeteroData,
    mesh: Mesh,
    method: Any,
    seed: int,
    refine: bool,
    oblivious: bool,
    link: Any,
    memory: int | str | None,
    attrs: tuple[Iterable[str], Iterable[str]] = ((), ()),
) -> Data | HeteroData:
    whole, (data, weight) = data, partition_data_types.from_sparse(data)
    planned = method is None and not refine and _is_planned(data, mesh)
    with on_all_ranks(mesh.world):
        if memory is not None:
            parse_bytes(memory)
        data = _checked(data)
        links = partition_data_types.links_of(link, [s._key for s in data.edge_stores])
        kinds = graph_kinds(data, *attrs)
        if planned and seed:
            raise ValueError(
                "mesh.plan has partitioned this graph already; leave seed out, or give a "
                "method as well"
            )
        flags = {"refine": bool(refine), "oblivious": bool(oblivious), "memory": memory}
        asked = _comparable_arguments(method, link, seed=seed, **flags)
        asked |= _digests(data, kinds)
    _agree_same(asked, mesh)
    _seed_python_random(mesh)
    owners = mesh.owners
    if not planned:
        owners = _partition_and_broadcast(data, mesh, method, seed, refine)
    with partition_data_types.explaining_memory(data, mesh):
        share = DividedGraph(data, owners, kinds).part(mesh.rank)
        for store in data.edge_stores[:1]:
            edges = share.edge_index.to(store.edge_index.device)
            share = replace(share, edge_index=edges)
    out = partition_data_types.assemble(share, mesh, oblivious, links, memory)
    out = partition_data_types.in_given_class(out, whole)
    given = "default" if method is None else "owner"
    name = method if isinstance(method, str) else given
    about = mesh.size, name, len(share.node_gid), len(share.edge_gid)
    tell(mesh.rank, "cut into %d parts by %s: %d nodes, %d edges here", *about)
    return partition_data_types.with_sparse(out, weight)


def _seed_python_random(mesh: Mesh) -> None:
    """Seeds Python's random on all ranks with the state of rank 0.

    PyG draws negative edges by it, and Python seeds it anew in each process; torch's begins
    with one seed. Price: a word of each rank, and 625 where they differ.
    """
    state = random.getstate()
    mark = zlib.crc32(repr(state).encode())
    marks = collectives.all_gather_counts([mark], mesh.world)
    if any(other != marks[0] for other in marks):
        version, words, rest = collectives.broadcast_object(state, mesh.world)
        random.setstate((version, tuple(words), rest))


def _is_planned(data: Any, mesh: Mesh) -> bool:
    planned = getattr(mesh.owners, "num_nodes", -1) == getattr(data, "num_nodes", None)
    return planned and not isinstance(data, HeteroData)


def _broadcast(owners: Partition | None, mesh: Mesh) -> Partition:
    """Returns rank 0's owners on all ranks, and the figures before refinement."""
    if mesh.size > 1:
        found = (owners.owner.numpy(), owners.before) if owners else None
        owner, before = collectives.broadcast_object(found, mesh.world)
        owners = Partition.from_owner(owner, mesh.size).refined_from(before)
    assert owners is not None
    return owners


def _checked(data: Any) -> Any:
    """Returns a graph of tensors; raises for one that cannot be partitioned."""
    if not isinstance(data, (Data, HeteroData)):
        raise TypeError(
            "partition takes a torch_geometric.data.Data or HeteroData, got "
            f"{type(data).__name__}; pass dataset[0]"
        )
    for store in data.edge_stores:
        if isinstance(store.get("edge_index"), DistEdgeIndex):
            raise TypeError("this is a share already; partition takes the whole graph")
    data = with_tensors(data)
    if isinstance(data, Data):
        edge_index = data.edge_index
        if not isinstance(edge_index, Tensor):
            raise TypeError(
                "give the Data an edge_index [2, num_edges], or an adj_t: its edge_index is "
                f"{type(edge_index).__name__}"
            )
        if data.num_nodes is None:
            raise ValueError("data.num_nodes is not known; set it, or give data.x")
        check_edge_index(edge_index, int(data.num_nodes))
    if isinstance(data, HeteroData):
        check_hetero(data)
    return data


def _digests(data: Data | HeteroData, kinds: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns a hash of each attribute, and its kind, which ranks must have alike."""
    told: dict[str, Any] = {}
    for store in data.stores:
        of = "data" if store._key is None else f"data[{store._key!r}]"
        told |= {f"{of}.{name}": _digest(value) for name, value in store.items()}
        names = (name for key, name in kinds if key == store._key)
        told |= {f"level of {of}.{n}": kinds[store._key, n] for n in names}
    for store in data.node_stores:
        of = "data" if store._key is None else f"data[{store._key!r}]"
        told[f"{of}.num_nodes"] = int(store.num_nodes)
    return told


def _digest(value: Any) -> str:
    """Returns the dtype, shape and (sampled) hash of an array as text.

    Numbers, strings and lists of them stand for themselves, other objects for their type.
    """
    if isinstance(value, DistTensor) or not isinstance(value, (Tensor, np.ndarray)):
        plain = isinstance(
            value, (bool, int, float, complex, str, list, tuple, type(None))
        )
        return repr(value) if plain else type(value).__name__
    x = torch.as_tensor(value).detach()
    kind = str(x.dtype).removeprefix("torch.")
    place = "" if x.is_cpu else f" on {x.device.type}"
    return f"{kind} {list(x.shape)}{place}, hash {sampled_digest(x):x}"


def _agree_same(
    settings: Mapping[str, Any], mesh: Mesh, name: str = "partition"
) -> None:
    """Raises on all ranks if they were given different arguments."""
    with naming(f"{name} needs the same graph and arguments on all ranks"):
        check_alike(settings, mesh.world)


def _comparable_arguments(method: Any, link: Any, **more: Any) -> dict[str, Any]:
    """Returns the arguments of `partition` that can be compared."""
    methods = method if isinstance(method, Mapping) else {"": method}
    links = link if isinstance(link, Mapping) else {"": link}
    told = {
        f"method{k and f'[{k!r}]'}": _digest_of_method(v) for k, v in methods.items()
    }
    for of, one in links.items():
        told |= {f"{n}{of and ' of '}{of}": v for n, v in settings_of(one).items()}
    return {**told, **more}


def _digest_of_method(method: Any) -> str:
    """Returns the name of a method, or a hash of given owners."""
    if isinstance(method, Partition):
        method = method.owner
    return _digest(as_vector(method) if isinstance(method, list) else method)


def _cutter(method: Any, data: Any, parts: int, refine: bool) -> Any:
    """Returns the cutter or owners that None or "graphs" stands for."""
    if method is None:
        return "metis" if refine else partition_data_types.default_method(data, parts)
    if isinstance(method, str) and method == "graphs":
        return partition_data_types.graph_owners(data, parts)[0]
    return method


def _partition_and_broadcast(
    data: Data,
    mesh: Mesh,
    method: str | Owner | Partition | None,
    seed: int,
    refine: bool,
) -> Partition:
    owners = None
    with on_all_ranks(mesh.world):
        if mesh.rank == 0:
            how = _cutter(method, data, mesh.size, refine)
            owners = cut_graph(data, mesh.size, how, seed, refine, mesh.grid)
    return _broadcast(owners, mesh)


def partition_report(data: Data | HeteroData) -> PartitionReport:
    """Reports the sizes of all parts and the rows that they exchange; collective.

    Edge cut, halo rows, the busiest sender, imbalance, `bytes(width)` of one exchange,
    the nonzeros, sent and received rows of the blocks of the mesh's grid, and the figures
    before refinement, if any. For a HeteroData, rows are summed over edge types, which are
    exchanged one by one.
    """
    if isinstance(data, HeteroData):
        return partition_data_types.report_of_share(data)
    edge_index = data.edge_index
    if not isinstance(edge_index, DistEdgeIndex):
        raise TypeError("partition_report takes what pdc.partition returned")
    topology, mesh = edge_index.topology, edge_index.nodes.mesh
    figures = partition_data_types.report_of_share(data)
    owners = topology.nodes.partition
    figures = replace(figures, before=None if owners is None else owners.before)
    blocks = _block_figures(topology, mesh)
    return figures.on_grid(mesh.grid, *blocks) if blocks else figures


def _block_figures(topology: Topology, mesh: Mesh) -> list[tuple[int, ...]]:
    """Counts nonzeros, rows sent and rows received of each block; collective on grids.

    The ids of the rows that a process row needs go to their owners, who count them.
    """
    (r, s, p), partition = mesh.grid, topology.nodes.partition
    if s * p == 1 or partition is None:
        return []
    i, j = mesh.rank // (s * p), mesh.rank // p % s
    nonzeros, sent, got = torch.zeros(3, r, s, dtype=torch.int64)
    owner = partition.owner_of(topology.source_gid)
    col = owner // p % s
    nonzeros[i] += torch.bincount(col, minlength=s)
    sums = torch.unique((topology.target_gid * s + col)[col != j]) % s
    sent[i] += torch.bincount(sums, minlength=s)
    got[i, j] += len(sums)
    away = torch.unique(topology.source_gid[owner // (s * p) != i])
    home, order = partition.owner_of(away).sort(stable=True)
    counts = torch.bincount(home, minlength=mesh.size).tolist()
    back = collectives.exchange_counts(counts, mesh.world)
    asked = collectives.all_to_all(away[order], counts, back, mesh.world, "plan").wait()
    row = torch.arange(mesh.size).repeat_interleave(torch.tensor(back)) // (s * p)
    rows = torch.unique(asked * r + row) % r
    sent[i, j] += len(rows)
    got[:, j] += torch.bincount(rows, minlength=r)
    flat = torch.cat([each.flatten() for each in (nonzeros, sent, got)])
    every = collectives.all_gather_counts(flat.tolist(), mesh.world)
    total = torch.tensor(every).sum(0).view(3, -1).tolist()
    return [tuple(each) for each in total]


def load_partition(
    folder: str | Path,
    mesh: Mesh | None = None,
    *,
    verify: Verify = "checksums",
    oblivious: bool = False,
    link: LinkPolicy | Mapping[Any, LinkPolicy | None] | None = None,
    memory: int | str | None = None,
    merge: bool = False,
) -> Any:
    """Loads this rank's share of a graph from a partition folder, and no other part.

    It is a Data, or a HeteroData where the folder holds nodes and edges of several types.

    With `merge`, a run goes on with fewer ranks than there are parts: rank k of P reads the
    parts from floor(k N / P) to floor((k + 1) N / P) - 1 of N, in whose order they were cut.

    Args:
        folder: written by `pyg-distcomm partition` or `write_folder`.
        mesh: the ranks, as many as the folder has parts, or fewer with `merge`; those of
            the last `pdc.init` if None.
        verify: "checksums" reads every byte of the share first and compares it with what
            was written, at a second or less for each GB; "sizes" compares lengths, dtypes
            and shapes, and reads rows when they are used.
        oblivious, link, memory: see `partition`. Rows and edges stay in the folder's files,
            of which the system reads the pages that are used, cap or not.
        merge: lets a rank read several parts; they are then in memory, not mapped.

    Raises:
        ValueError: on all ranks, naming the file that is missing, altered or truncated,
            or both numbers if the folder is for another number of ranks.
    """
    mesh = given_mesh(mesh, "pdc.load_partition")
    with on_all_ranks(mesh.world):
        if memory is not None:
            parse_bytes(memory)
        with partition_data_types.explaining_memory(Path(folder), mesh):
            try:
                share = _read_share(Path(folder), verify, mesh, merge)
                meta = (Path(folder) / META).read_bytes()
            except OSError as error:
                raise ValueError(f"cannot read {folder}: {error}") from error
        links = partition_data_types.links_of(link, share.types.edges)
    owners = {META: hashlib.sha256(meta).hexdigest()}
    owners["owners of nodes"] = _digest(share.partition.owner)
    counts = {"number of edges": share.num_edges_global, **owners}
    levels = {"node": share.node, "edge": share.edge}
    names = {f"{level} attributes": sorted(held) for level, held in levels.items()}
    plain = {f"data.{name}": _digest(value) for name, value in share.graph.items()}
    flags = {"oblivious": bool(oblivious), "merge": bool(merge), "memory": memory}
    asked = _comparable_arguments(None, link, **flags)
    _agree_same(asked | counts | names | plain, mesh, "load_partition")
    _seed_python_random(mesh)
    tell(mesh.rank, "read %r of %s", share, folder)
    out = partition_data_types.assemble(share, mesh, oblivious, links, memory)
    return arranged(out, order_of_first_rank(out, mesh))


def _read_share(folder: Path, verify: Verify, mesh: Mesh, merge: bool) -> PartShare:
    count = folder_meta(folder)["num_parts"]
    _check_parts(folder, count, mesh, merge)
    begin, end = (k * count // mesh.size for k in (mesh.rank, mesh.rank + 1))
    parts = [read_part(folder, k, verify=verify) for k in range(begin, end)]
    return merged(parts, mesh.size)


def _check_parts(folder: Path, parts: int, mesh: Mesh, merge: bool) -> None:
    if parts == mesh.size or (merge and parts > mesh.size):
        return
    start = f"start {parts} ranks (torchrun --nproc-per-node {parts} script.py)"
    fewer = (
        ", or let a rank read several parts by merge=True" if parts > mesh.size else ""
    )
    raise ValueError(
        f"{folder} holds {parts} parts, but there are {mesh.size} ranks; {start}, or "
        f"partition again with --parts {mesh.size}{fewer}"
    )


Order = list[tuple[Any, list[str]]]  # the attributes of each store, by its key


class _Ordered(BaseData):
    """Lists attributes as they are stored, and makes its copies do so."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leaves out what the class of a script does with its subclasses."""

    def _given_class(self) -> type:
        above = type(self).__mro__
        return above[above.index(_Ordered) + 1]

    def keys(self) -> list[str]:
        """Returns the names of all attributes."""
        return self._as_stored(super().keys())

    def node_attrs(self) -> list[str]:
        """Returns the names of the attributes of nodes."""
        return self._as_stored(super().node_attrs())

    def edge_attrs(self) -> list[str]:
        """Returns the names of the attributes of edges."""
        return self._as_stored(super().edge_attrs())

    def _as_stored(self, names: Iterable[str]) -> list[str]:
        stored = dict.fromkeys(chain.from_iterable(self.stores))
        place = {name: i for i, name in enumerate(stored)}
        return sorted(names, key=lambda name: (place.get(name, len(place)), name))

    def __copy__(self) -> Any:
        return listed_in_order(super().__copy__())

    def __deepcopy__(self, memo: Any) -> Any:
        return listed_in_order(super().__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, args, *rest = super().__reduce_ex__(protocol)
        given = self._given_class()
        return make, tuple(given if one is type(self) else one for one in args), *rest

    __class__ = property(_given_class)  # type: ignore[assignment]


def listed_in_order(data: Any) -> Any:
    """Makes a graph list its attributes as they are stored, and returns it."""
    if isinstance(data, _Ordered):
        return data
    kind: Any = type(data)
    if kind not in PROCESS.ordered:
        names = ("__module__", "__qualname__", "__doc__")
        about = {name: getattr(kind, name) for name in names}
        make: Any = type(kind)
        PROCESS.ordered[kind] = make(kind.__name__, (_Ordered, kind), about)
    object.__setattr__(data, "__class__", PROCESS.ordered[kind])
    return data


def order_of_first_rank(data: Any, mesh: Mesh) -> Order:
    """Returns the types and attributes of rank 0's graph, in their order; collective."""
    stores = data.stores if isinstance(data, BaseData) else []
    order = [(store._key, list(store)) for store in stores]
    found: Order = collectives.broadcast_object(order, mesh.world)
    return found


def arranged(data: Any, order: Order) -> Any:
    """Returns a copy of a graph with its types and attributes in a given order, others last.

    Its lists are in this order.
    """
    if not isinstance(data, BaseData):
        return data
    data = listed_in_order(copy.copy(data))
    stores = {store._key: store for store in data.stores}
    for key, names in order:
        if key not in stores:
            continue
        if key is not None:
            typed = isinstance(key, tuple)
            kinds = data._edge_store_dict if typed else data._node_store_dict
            kinds[key] = kinds.pop(key)
        store = stores[key]
        for name in dict.fromkeys((*names, *store)):
            if name in store:
                store[name] = store.pop(name)
    return data
