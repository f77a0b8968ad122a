"""Partitions a PyG Data: each rank keeps its share, as a Data of row-sharded tensors."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, TemporalData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import sampled_digest
from pyg_distcomm.comm.mesh import Mesh, given_mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.comm.serialization import first_difference
from pyg_distcomm.graph import partition_data_types
from pyg_distcomm.graph.partition_data_types import TypedBatch
from pyg_distcomm.graph.share import arranged, order_of_first_rank
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.halo.policy import LinkPolicy, link_problem, settings_of
from pyg_distcomm.kernels.memory import MemoryCap, memory_problem
from pyg_distcomm.partition import part_share
from pyg_distcomm.partition.cutters import check_edge_index, cut
from pyg_distcomm.partition.folder import attribute_kinds, read_part
from pyg_distcomm.partition.layout import META, Verify, folder_meta
from pyg_distcomm.partition.part_share import PartShare, merged, part_of
from pyg_distcomm.partition.partition import Owner, Partition, PartitionReport
from pyg_distcomm.process import tell
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex, rows_of_edges

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
    elif isinstance(data, HeteroData):
        share = _partition_hetero(data, mesh, method, *options)
        share = partition_data_types.in_given_class(share, data)
    elif TypedBatch.fits(data):
        share = _partition_typed_batch(data, mesh, method, *options)
    else:
        attrs = node_attrs, edge_attrs
        share = _partition_data(data, mesh, method, *options, attrs)
    return arranged(share, order)


def _partition_typed_batch(data: Any, mesh: Mesh, method: Any, *options: Any) -> Any:
    read = TypedBatch(data)
    if not read.types:  # nothing has rows: all ranks keep it
        _agree_same(partition_data_types.hetero_marks(read.typed, _digest), mesh)
        return data
    if method is None or (isinstance(method, str) and method == "graphs"):
        method = read.owners(mesh.size)
    return read.joined(_partition_hetero(read.typed, mesh, method, *options))


def _partition_data(
    data: Data,
    mesh: Mesh,
    method: Any,
    seed: int,
    refine: bool,
    oblivious: bool,
    link: Any,
    memory: int | str | None,
    attrs: tuple[Iterable[str], Iterable[str]],
) -> Data:
    whole, (data, weight) = data, partition_data_types.from_sparse(data)
    problem = link_problem(link) or memory_problem(memory)
    kinds: dict[str, Any] = {}
    try:
        kinds = _check(data, *attrs)
    except (TypeError, ValueError) as error:
        problem = problem or error
    planned = method is None and not refine and _is_planned(data, mesh)
    if planned and seed and problem is None:
        problem = ValueError(
            "mesh.plan has partitioned this graph already; leave seed out, or give a "
            "method as well"
        )
    collectives.agree(problem, mesh.world)
    flags = {"refine": bool(refine), "oblivious": bool(oblivious), "memory": memory}
    asked = _comparable_arguments(method, link, seed=seed, **flags)
    _agree_same(asked | _digests(data, kinds), mesh)
    _seed_python_random(mesh)
    assert data.edge_index is not None
    name = method if isinstance(method, str) else "owner"
    name = "default" if method is None else name
    if planned:
        owners = mesh.owners
    else:
        owners = _partition_and_broadcast(data, mesh, method, seed, refine)
    with partition_data_types.explaining_memory(data, mesh):
        share = _to_device_of(part_of(data, kinds, owners, mesh.rank), data.edge_index)
    out = _assemble(share, mesh, oblivious, memory)
    out = partition_data_types.in_given_class(out, whole)
    about = mesh.size, name, len(share.node_gid), len(share.edge_gid)
    tell(mesh.rank, "cut into %d parts by %s: %d nodes, %d edges here", *about)
    return partition_data_types.with_sparse(_with_link(out, link), weight)


def _to_device_of(share: PartShare, edge_index: Tensor) -> PartShare:
    """Moves the edges of a share to the device of the given edge_index."""
    return replace(share, edge_index=share.edge_index.to(edge_index.device))


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


def _with_link(share: Any, link: Any) -> Any:
    share.edge_index = share.edge_index.with_link(link)
    return share


def _is_planned(data: Data, mesh: Mesh) -> bool:
    return getattr(mesh.owners, "num_nodes", -1) == getattr(data, "num_nodes", None)


def _partition_hetero(
    data: HeteroData,
    mesh: Mesh,
    method: Any,
    seed: int,
    refine: bool,
    oblivious: bool,
    link: Any,
    memory: int | str | None,
) -> HeteroData:
    owners: Partition | None = None
    problem: Exception | None = memory_problem(memory)
    try:
        links = partition_data_types.links_of(link, data.edge_types)
        partition_data_types.check_not_partitioned(data)
        partition_data_types.check_dense(data)
        part_share.check_hetero(data)
    except (TypeError, ValueError) as error:
        problem = error
    collectives.agree(problem, mesh.world)
    flags = {"refine": bool(refine), "oblivious": bool(oblivious), "memory": memory}
    asked = _comparable_arguments(method, link, seed=seed, **flags)
    _agree_same(asked | partition_data_types.hetero_marks(data, _digest), mesh)
    _seed_python_random(mesh)
    try:
        if mesh.rank == 0:
            how = _cutter(method, data, mesh.size, refine)
            owners = part_share.cut_hetero(data, mesh.size, how, seed, refine)
    except (TypeError, ValueError) as error:
        problem = error
    collectives.agree(problem, mesh.world)
    owners = _broadcast(owners, mesh)
    with partition_data_types.explaining_memory(data, mesh):
        types = part_share.types_of(data, owners)
        share = part_share.part_of_hetero(data, owners, types, mesh.rank)
        for store in data.edge_stores[:1]:
            share = _to_device_of(share, store.edge_index)
    return partition_data_types.assemble_hetero(share, mesh, oblivious, links, memory)


def _broadcast(owners: Partition | None, mesh: Mesh) -> Partition:
    """Returns rank 0's owners on all ranks, and the figures before refinement."""
    if mesh.size > 1:
        found = (owners.owner.numpy(), owners.before) if owners else None
        owner, before = collectives.broadcast_object(found, mesh.world)
        owners = Partition.from_owner(owner, mesh.size).refined_from(before)
    assert owners is not None
    return owners


def _check(
    data: Data, node_attrs: Iterable[str], edge_attrs: Iterable[str]
) -> dict[str, Any]:
    if not isinstance(data, Data):
        raise TypeError(
            "partition takes a torch_geometric.data.Data or HeteroData, got "
            f"{type(data).__name__}; pass dataset[0]"
        )
    edge_index = data.edge_index
    if isinstance(edge_index, DistEdgeIndex):
        raise TypeError("this Data is a share already; partition takes the whole graph")
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            "give the Data an edge_index [2, num_edges], or an adj_t: its edge_index is "
            f"{type(edge_index).__name__}"
        )
    if data.num_nodes is None:
        raise ValueError("data.num_nodes is not known; set it, or give data.x")
    check_edge_index(edge_index, int(data.num_nodes))
    partition_data_types.check_dense(data)
    return dict(attribute_kinds(data, node_attrs, edge_attrs))


def _digests(data: Data, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a hash of each attribute that must be the same on all ranks."""
    edges = data.edge_index
    assert edges is not None
    marks = {f"data.{name}": _digest(data[name]) for name in kinds}
    levels = {f"level of data.{name}": kind for name, kind in kinds.items()}
    own = {"data.num_nodes": data.num_nodes, "data.edge_index": _digest(edges)}
    return own | levels | marks


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
    """Raises on all ranks if they were given different arguments.

    Raises:
        ValueError: on all ranks, naming what differs, and both values.
    """
    found = first_difference(collectives.all_gather_object(settings, mesh.world))
    if found is not None:
        raise ValueError(
            f"{name} needs the same graph and arguments on all ranks: {found}; seed what "
            "generates the graph, or load it from one file"
        )


def _comparable_arguments(method: Any, link: Any, **more: Any) -> dict[str, Any]:
    """Returns the arguments of `partition` that can be compared."""
    if isinstance(method, Mapping):
        methods = {
            f"method[{name!r}]": _digest_of_method(each)
            for name, each in method.items()
        }
    else:
        methods = {"method": _digest_of_method(method)}
    links = {"": link} if not isinstance(link, Mapping) else link
    settings = {
        f"{name}{of and ' of '}{of}": value
        for of, one in links.items()
        for name, value in settings_of(one).items()
    }
    return {**methods, **settings, **more}


def _digest_of_method(method: Any) -> str:
    """Returns the name of a method, or a hash of given owners."""
    if isinstance(method, Partition):
        method = method.owner
    if isinstance(method, (Tensor, np.ndarray, list)):
        return _digest(torch.as_tensor(method))
    return (
        str(method)
        if method is None or isinstance(method, str)
        else type(method).__name__
    )


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
    owners, problem = None, None
    try:
        if isinstance(method, Partition):
            nodes, parts = method.num_nodes, method.num_parts
            if (nodes, parts) != (data.num_nodes, mesh.size):
                raise ValueError(
                    f"{method} does not fit {data.num_nodes} nodes on {mesh.size} ranks"
                )
        if mesh.rank == 0:
            method = _cutter(method, data, mesh.size, refine)
            owners = _cut(data, mesh, method, seed, refine)
    except (TypeError, ValueError) as error:
        problem = error
    collectives.agree(problem, mesh.world)
    return _broadcast(owners, mesh)


def _cut(
    data: Data, mesh: Mesh, method: str | Owner | Partition, seed: int, refine: bool
) -> Partition:
    if isinstance(method, Partition):
        if not refine:
            return method
        method = method.owner
    mask = data.get("train_mask")
    assert data.edge_index is not None
    return cut(
        data.edge_index.cpu(),
        int(data.num_nodes or 0),
        mesh.size,
        method,
        seed=seed,
        train_mask=mask if isinstance(mask, Tensor) and mask.dim() == 1 else None,
        refine=refine,
        grid=mesh.grid,
    )


def _assemble(
    share: PartShare, mesh: Mesh, oblivious: bool, memory: int | str | None
) -> Data:
    owners, cap = share.partition, None if memory is None else MemoryCap(memory)
    if cap is not None:
        cap.keep(*share.node.values(), *share.edge.values(), share.edge_index)
    nodes = Rows(share.node_gid, owners.num_nodes, mesh, owners, memory=cap)
    edges = rows_of_edges(share.edge_gid, share.num_edges_global, nodes)
    out = Data()
    if share.node.get("x") is not None:
        out.x = DistTensor.wrap(share.node["x"], nodes)
    out.edge_index = DistEdgeIndex.build(
        share.edge_index, nodes, edges, oblivious=oblivious
    )
    if share.edge_hash is not None:
        edges.derived["hash"] = out.edge_index.topology.source_gid, share.edge_hash
    for name, value in share.node.items():
        out[name] = DistTensor.wrap(value, nodes)
    for name, value in share.edge.items():
        out[name] = DistTensor.wrap(value, edges)
    for name, value in share.graph.items():
        out[name] = value
    out.num_nodes = nodes.total
    return out


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
    figures, owners = (
        partition_data_types.report_of_share(data),
        topology.nodes.partition,
    )
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
    share, problem = None, None
    try:
        with partition_data_types.explaining_memory(Path(folder), mesh):
            share = _read_share(Path(folder), verify, mesh, merge)
        meta = (Path(folder) / META).read_bytes()
        kinds = None if share.types is None else share.types.edges
        if kinds is not None:
            links = partition_data_types.links_of(link, kinds)
        elif (wrong := link_problem(link)) is not None:
            raise wrong
    except (TypeError, ValueError, OSError) as error:
        problem = error if isinstance(error, (TypeError, ValueError)) else None
        problem = problem or ValueError(f"cannot read {folder}: {error}")
    collectives.agree(memory_problem(memory) or problem, mesh.world)
    assert share is not None
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
    if share.types is None:
        out = _with_link(_assemble(share, mesh, oblivious, memory), link)
    else:
        options = mesh, oblivious, links, memory
        out = partition_data_types.assemble_hetero(share, *options)
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
