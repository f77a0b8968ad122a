"""Makes minibatches, a bulk at a time: samples them, fetches their rows, and collates them.

PyG's `filter_fn` decides what a minibatch holds, and in which order. It runs on a copy of
the data with placeholders, tensors without columns, instead of features; rows of features
are then gathered in their place.

[Note: fresh pages] Features of a minibatch take tens of megabytes. The system zeroes each
fresh page before it is written, under one lock for all threads of a process: with two
threads that takes longer than the copy itself. So memory of dropped minibatches is reused.

[Note: cores] Bulks are built ahead on cores that the training threads leave idle, so
that there are never more threads than cores. If no core is idle, bulks are built when
requested, on all training threads, which wait meanwhile. Bulks that wait themselves, for
messages of other ranks or for a disk, are built ahead in any case.

Edges may be an `adj_t` of torch.sparse, which PyG's loaders do not take: the values of the
matrix travel as an attribute of its edges, whose name has its layout, and are put together
again in each minibatch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory
from torch_geometric.data import Data, HeteroData
from torch_geometric.index import index2ptr

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.graph.local_adjacency import carry, follow, prepare
from pyg_distcomm.graph.partition_data_types import with_planned_edges
from pyg_distcomm.kernels import memory, sample_cpu, threads
from pyg_distcomm.loader.device_placement import Placement, SideStream
from pyg_distcomm.loader.epoch import (
    ASSEMBLE,
    FETCH,
    SAMPLE,
    Phases,
    PlannedBatch,
    Stage,
)
from pyg_distcomm.loader.notes import World
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.sampling.neighbor_sampler import KeyedNeighborSampler
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex

_NAME = "values of adj_t in "
_BESIDE = " beside edge_index"  # which the graph has, and so has a minibatch


def with_edges(data: Any) -> Any:
    """Returns a graph with an edge_index in place of each adj_t of torch.sparse.

    Its edges are in the order of the matrix, by target and source.

    Raises:
        TypeError: for other compressed matrices of rows, of which torch selects none.
        ValueError: for a share with rows of an edge_index whose edges are not those of adj_t.
    """
    if not isinstance(data, (Data, HeteroData)):
        return data
    data = with_planned_edges(data)
    for store in _stores_of_rows(data):
        for name, value in store.items():
            if name != "adj_t" and isinstance(value, Tensor):
                _check_rows(store, name, value)
    if not any(map(_holds, data.edge_stores)):
        return data
    out = copy.copy(data)
    for store in filter(_holds, out.edge_stores):
        adj, layout = store.pop("adj_t"), "torch.sparse_csr"
        beside = _BESIDE if "edge_index" in store else ""
        if isinstance(adj, DistEdgeIndex):
            _check_same_edges(store, adj)
            store.edge_index = adj.carrying(None)
            values: Any = adj.weight
            if values is None:
                kind = torch.get_default_dtype()
                ones = adj.to_local().new_ones(len(adj.edges), dtype=kind)
                values = DistTensor.wrap(ones, adj.edges)
        else:
            layout = str(adj.layout)
            store.edge_index, values = coo_of(adj)
        store[_NAME + layout + beside] = values
    return out


def _stores_of_rows(data: Any) -> list[Any]:
    """Returns the stores of nodes and edges, without that of a HeteroData as a whole."""
    return [s for s in data.stores if s._key is not None or isinstance(data, Data)]


def _check_rows(store: Any, name: str, value: Tensor) -> None:
    if value.layout in (torch.strided, torch.sparse_coo):
        return
    if store.is_node_attr(name) or store.is_edge_attr(name):
        raise TypeError(
            f"{name!r} is {value.layout}, of which torch selects no rows; give "
            f"{name}.to_sparse_coo(), or {name}.to_dense()"
        )


def _check_same_edges(store: Any, adj: DistEdgeIndex) -> None:
    edges = store.get("edge_index")
    if edges is None or edges.topology is adj.topology:
        return
    for name, value in store.items():
        if is_rows(value) and value.rows is edges.edges:
            raise ValueError(
                f"{name!r} has a row for each edge of edge_index, and adj_t, by which a loader "
                f"samples, has them in another order; leave adj_t or {name!r} out"
            )


def _holds(store: Any) -> bool:
    adj = store.get("adj_t")
    return isinstance(adj, Tensor) and (
        adj.layout != torch.strided or isinstance(adj, DistEdgeIndex)
    )


def holds_matrices(data: Any) -> bool:
    """Returns whether a graph of `with_edges` had an adj_t of torch.sparse."""
    stores = data.edge_stores if isinstance(data, (Data, HeteroData)) else ()
    return any(name.startswith(_NAME) for store in stores for name in store)


def with_matrices(batch: Any) -> Any:
    """Puts the adj_t of torch.sparse together again in a minibatch of `with_edges`."""
    for store in batch.edge_stores:
        for name in [name for name in store if name.startswith(_NAME)]:
            sizes = store.size()
            source, target = store.edge_index
            order = torch.argsort(target * max(sizes[0], 1) + source, stable=True)
            store.adj_t = torch.sparse_csr_tensor(
                index2ptr(target[order], sizes[1]),
                source[order],
                store.pop(name)[order],
                (sizes[1], sizes[0]),
                check_invariants=False,
            )
            if not name.endswith(_BESIDE):
                del store.edge_index
            layout = name.removeprefix(_NAME).removesuffix(_BESIDE)
            if layout in ("torch.sparse_coo", "torch.sparse_csc"):
                kind = getattr(torch, layout.removeprefix("torch."))
                store.adj_t = store.adj_t.to_sparse(layout=kind)
    return batch


BUDGET = 1 << 30  # bytes of minibatches in flight, if that much memory is free
MAX_PER_THREAD = 4  # minibatches of an automatic bulk per thread: more is not faster
FIRST_PARTITIONED = 4  # minibatches of the first bulk of a partitioned graph
MAX_PARTITIONED = 16  # minibatches of its automatic bulks, which cost messages

_PLACEHOLDER_DTYPE = torch.int8  # of tensors without columns; PyG itself makes none

# by index of the attribute: a function from ids to positions in the pool, and its rows
Pools: TypeAlias = dict[int, tuple[Callable[[Tensor], Tensor], Tensor]]


def take_rows(values: Tensor, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns `values[ids]` `[k, ...]` on the CPU, in contiguous `out` if given."""
    if out is None and len(ids) * values[:1].nbytes >= memory.KEPT_FROM:
        out = memory.empty_rows(values, len(ids))
    elif out is None:
        out = values.new_empty((len(ids), *values.shape[1:]))
    sample_cpu.take_rows(values, ids, out)
    return out


@contextmanager
def reporting(watch: Any) -> Iterator[None]:
    """Reports an error of a block to the other ranks, which may wait for this one."""
    try:
        yield
    except BaseException as error:
        if watch is not None:
            watch.report(error)
        raise


@dataclass(frozen=True, eq=False)
class Attribute:
    """Describes one attribute whose rows are gathered for a minibatch."""

    store: Any  # the key of its store in a HeteroData; None in a Data
    name: str  # the name of the attribute
    values: Tensor | np.ndarray | None  # its rows; None if they are sharded over ranks
    of_edges: bool  # whether it has a row for each edge, not for each node

    def ids(self, out: Any) -> Tensor | None:
        """Returns the nodes or edges of a sampler's output that have its rows, if known."""
        found = out.edge if self.of_edges else out.node
        if self.store is not None and found is not None:
            found = found.get(self.store)
        return None if found is None else found.long()


class Batcher:
    """Makes the minibatches of a loader, and chooses the size of its bulks.

    The script's own code (a transform of the sampler's output, a subclass) runs in the
    thread that requests minibatches; so does all work that is not on the CPU.

    A minibatch is sampled and collated in one stage, on one thread, unless minibatches are
    sampled together or their rows come from other ranks: then there are two stages, one
    that samples a bulk, and one that fetches its rows and collates it. Without phases, to time
    stages in, it collates single minibatches only.
    """

    def __init__(self, loader: Any, phases: Phases | None = None) -> None:
        self._loader, self._phases = loader, phases or Phases()
        self._place: Placement | None = loader.placement
        self._source, self._attributes = loader.partitioned_source, list[Attribute]()
        source = self._source
        self._watch = None if source is None else source.sampling.world.watch
        sampler = loader.neighbor_sampler_in_use
        self._own = loader.overrides_collate
        bulks = hasattr(sampler, "sample_bulk")
        self._together = bulks and not self._own
        ours = bulks or isinstance(sampler, KeyedNeighborSampler)
        self._shell = copy.copy(loader)  # PyG's methods run on it
        self._shell.transform = self._shell.transform_sampler_output = None
        if self._source is not None:
            ours, self._attributes = True, self._source.attributes
            self._shell.data = self._source.placeholder
        elif not isinstance(loader.data, (Data, HeteroData)) or loader.data.is_cuda:
            ours = False
        elif ours:
            self._shell.data = self._with_placeholders(loader.data)
        self._late = (
            self._own or not ours or loader.transform_sampler_output is not None
        )
        #: whether rows are fetched once per bulk: from disk, or from other ranks
        self.pooled = any(not isinstance(a.values, Tensor) for a in self._attributes)
        self._side: SideStream | None = None
        on_cuda = self._place is not None and self._place.cuda
        waits = self._source is not None or self.pooled or on_cuda
        option, idle = loader.options.prefetch, threads.spare(World.now().size)
        #: how many bulks are made before they are requested
        self.ahead = int(idle > 0 or waits) if option == "auto" else int(option)
        # on a device, one thread puts the work on its stream
        self.width = threads.width() if ours and not self._own and not on_cuda else 1
        if self.ahead:
            self.width = max(1, min(self.width, idle))

    def stages(self) -> list[Stage]:
        """Returns the functions that make a bulk, in order."""
        stages: list[Stage] = [self._make]
        if self._together or self._source is not None:
            stages = [self._sample] if self._late else [self._sample, self._assemble]
        if self._place is not None and self._place.cuda:
            self._side = SideStream(self._place.device)
        return [self._guarded(stage, stage is stages[-1]) for stage in stages]

    def _guarded(self, stage: Stage, last: bool) -> Stage:
        """Has a stage report its errors, and work on a stream of its own on a device."""
        side = self._side

        def work(bulk: list[Any], stopped: Callable[[], bool]) -> list[Any]:
            with reporting(self._watch), nullcontext() if side is None else side.use():
                found = stage(bulk, stopped)
                return side.sent(found) if side is not None and last else found

        return work

    # Plan -----------------------------------------------------------------------------

    def size(self, stopped: Callable[[], bool]) -> int:
        """Returns the size of the next bulk: the option of the loader, or what fits a budget.

        For a partitioned graph, all ranks agree on it; 0 ends the epoch.
        """
        option = self._loader.options.bulk_size
        fits = int(option) if option != "auto" else self._size_for_budget()
        if self._source is None:
            return fits
        world = self._source.sampling.world
        sizes = collectives.all_gather_counts([int(stopped()), fits], world)
        gone = [rank for rank, (stop, _) in enumerate(sizes) if stop]
        if gone and world.rank not in gone:
            if world.watch is not None:
                world.watch.wait_for_report()  # it may have failed, and report why
            raise RuntimeError(
                f"rank(s) {', '.join(map(str, gone))} stopped in the middle of an epoch, "
                f"and rank {world.rank} did not; all ranks sample a partitioned graph "
                "together, so take the same number of minibatches on all ranks"
            )
        return 0 if gone else min(fits for _, fits in sizes)

    def _size_for_budget(self) -> int:
        most = MAX_PER_THREAD * self.width
        if self._together or self._source is not None:
            most = max(most, MAX_PARTITIONED)
        size = self._loader.batch_bytes
        if not size:  # the size of a minibatch is known after the first bulk
            least = 0 if self._source is None else FIRST_PARTITIONED
            return max(self.width, least)
        free = memory.available(None if self._place is None else self._place.device)
        budget = BUDGET if free is None else min(BUDGET, free // 8)
        # besides the waiting bulks: one in use, one being built, and the rows fetched for it
        others = 2 if self._source is None else 3
        return max(self.width, min(most, budget // (size * (self.ahead + others))))

    # Sample ---------------------------------------------------------------------------

    def _each(
        self,
        work: Callable[[Any], Any],
        bulk: list[Any],
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Any]:
        """Works on each part of a bulk on one thread; ends early once ``stopped()``."""
        found: list[Any] = [None] * len(bulk)

        def one(k: int) -> None:
            if not stopped():
                with threads.limited(1):
                    found[k] = work(bulk[k])

        with threads.limited(self.width):
            threads.run(one, [(k,) for k in range(len(bulk))])
        return [] if stopped() else found

    def _make(self, plan: list[PlannedBatch], stopped: Callable[[], bool]) -> list[Any]:
        """Samples and collates a bulk, each minibatch on one thread."""
        whole = not self._late and not self.pooled

        def make(index: PlannedBatch) -> Any:
            out = self._draw(index)
            return self._finished(out) if whole else out

        with self._phases.timed(SAMPLE):  # and assembly, if in one go
            outs = self._each(make, plan, stopped)
        if whole:
            self._record_bytes(outs)
        return outs if whole or self._late else self._assemble(outs, stopped)

    def _sample(self, plan: list[PlannedBatch], _: Callable[[], bool]) -> list[Any]:
        """Samples a bulk whole: other ranks take part."""
        source = self._source
        ledger = None if source is None else source.sampling.world.ledger
        with self._phases.timed(SAMPLE, ledger):
            if not self._together:
                return self._each(self._draw, plan)
            with threads.limited(self.width):
                return list(self._loader.sample_planned_bulk(plan))

    def _draw(self, index: PlannedBatch) -> Any:
        loader = self._loader
        return (loader.collate_fn if self._own else loader.sample_planned)(index)

    # Fetch ----------------------------------------------------------------------------

    def _assemble(self, outs: list[Any], stopped: Callable[[], bool]) -> list[Any]:
        """Fetches the rows of a bulk, and collates its minibatches on several threads."""
        source = self._source
        ledger = None if source is None else source.fetching.world.ledger
        with self._phases.timed(FETCH, ledger), threads.limited(self.width):
            pools = self.fetch(outs)
            routes: list[dict[Any, Any]] = [{}] * len(outs)
            if self._source is not None and self._source.embeddings:
                routes = self._source.routes(outs)
        if stopped():
            return []

        def assemble(part: tuple[Any, Any]) -> tuple[Any, bool | None]:
            found = self._finished(part[0], pools)
            if part[1]:
                self._source.attach(found[0], part[1])
            return found

        with self._phases.timed(ASSEMBLE):
            bulk = list(zip(outs, routes, strict=True))
            found = self._each(assemble, bulk)
        self._record_bytes(found)
        return found

    def fetch(self, outs: list[Any]) -> Pools:
        """Fetches the distinct rows that a bulk needs; collective if they are sharded."""
        pools: Pools = {}
        if self._source is not None:
            pools = self._source.fetch(outs, self._place)
            return pools
        for k, attribute in enumerate(self._attributes):
            if isinstance(attribute.values, np.ndarray):
                found = [attribute.ids(out) for out in outs]
                ids = [i[i >= 0] for i in found if i is not None]
                none = torch.empty(0, dtype=torch.int64)
                wanted = torch.cat(ids).unique() if ids else self._put(none)
                taken = np.take(attribute.values, wanted.cpu().numpy(), axis=0)
                read = self._put(torch.from_numpy(taken))
                pools[k] = partial(torch.searchsorted, wanted), read
        return pools

    def _put(self, t: Tensor) -> Tensor:
        return t if self._place is None else self._place.put(t)

    # Collate --------------------------------------------------------------------------

    def collate(self, out: Any, pools: Pools | None = None) -> Any:
        """Collates one minibatch, with the rows that `fetch` read for its bulk, if any."""
        ends = self._shared_edge_index(out)
        if ends is None:
            batch = self._shell.pyg_filter_fn(out)
        else:  # PyG would copy them
            bare = copy.copy(out)
            bare.row, bare.col = out.row[:0], out.col[:0]
            batch = self._shell.pyg_filter_fn(bare)
            batch.edge_index = ends
        if pools is None and self.pooled:
            pools = self.fetch([out])
        for k, attribute in enumerate(self._attributes):
            store = batch if attribute.store is None else batch[attribute.store]
            # else PyG has set an attribute of this name itself, or left it out
            if _is_placeholder(getattr(store, attribute.name, None)):
                ids = attribute.ids(out)
                if ids is not None:
                    store[attribute.name] = self._rows(k, ids, pools)
        if self._place is not None:
            batch = batch.apply(self._place.send)
        if self._loader.has_matrices:
            batch = with_matrices(batch)
        _record_sampled_sizes(batch, out)
        return batch

    def _rows(self, k: int, ids: Tensor, pools: Pools | None) -> Tensor:
        """Returns the rows of an attribute; zeros for an id of -1, a loop that a rule adds."""
        attribute, place = self._attributes[k], self._place
        values, every, real = attribute.values, ids, None
        if attribute.of_edges and bool((ids < 0).any()):
            real = ids >= 0
            ids = ids[real]
        if not isinstance(values, Tensor):
            assert pools is not None
            find, values = pools[k]
            ids = find(ids)
            if place is not None:  # the pool is on the device
                found = kernels.read_rows(values, place.send(ids))
            else:
                found = take_rows(values, ids)
        elif place is not None:
            key = attribute.store, attribute.name
            found = place.take(key, values, ids, not attribute.of_edges)
        else:
            found = take_rows(values, ids)
        if real is not None:
            zeros = found.new_zeros(len(every), *found.shape[1:])
            found = zeros.index_put_((real.to(found.device),), found)
        return found

    def _shared_edge_index(self, out: Any) -> Tensor | None:
        """Returns the tensor `[2, e]` whose rows are row and col, if there is one."""
        data, row, col = self._shell.data, out.row, out.col
        if not isinstance(data, Data) or "adj_t" in data or "edge_index" not in data:
            return None
        if not isinstance(row, Tensor) or data.edge_index.device != row.device:
            return None
        whole = row._base
        if whole is None or whole is not col._base or whole.shape != (2, len(row)):
            return None
        first, step = whole.data_ptr(), len(row) * row.element_size()
        alike = whole.is_contiguous() and len(col) == len(row)
        alike = alike and (row.data_ptr(), col.data_ptr()) == (first, first + step)
        return whole if alike else None

    def _with_placeholders(self, data: Any) -> Any:
        """Returns a copy of the data with placeholders for the attributes gathered here."""
        result = copy.copy(data)
        both = _stores_of_rows(data), _stores_of_rows(result)
        for store, empty in zip(*both, strict=True):
            for name, value in list(store.items()):
                of_nodes = store.is_node_attr(name)
                of_edges = not of_nodes and store.is_edge_attr(name)
                if not (of_nodes or of_edges) or not _has_rows(value):
                    continue
                if data.__cat_dim__(name, value, store) != 0:
                    continue
                self._attributes.append(Attribute(store._key, name, value, of_edges))
                empty[name] = self._put(placeholder_rows(len(value)))
            edges = store.get("edge_index")
            if self._place is not None and type(edges) is Tensor:
                empty["edge_index"] = self._place.shape_of(store._key, edges)
        return result

    # In the thread that iterates ------------------------------------------------------

    def finish(self, out: Any) -> Any:
        """Completes a minibatch in the thread that iterates, where the script's code runs."""
        if self._side is not None:
            out = self._side.received(out)
        loader = self._loader
        with reporting(self._watch):
            if not self._late:
                data = loader.postprocess(*out)
            elif self._own and loader.filter_per_worker:
                data = out
            else:
                data = loader.filter_fn(out)
        pinned = loader.pin_memory and self._place is None
        return pin_memory(data) if pinned and torch.cuda.is_available() else data

    def _finished(
        self, out: Any, pools: Pools | None = None
    ) -> tuple[Any, bool | None]:
        return self.collate(out, pools), getattr(out, "padding", None)

    def _record_bytes(self, found: list[Any]) -> None:
        """Records the bytes of the first minibatch; later epochs use it, too."""
        if self._loader.batch_bytes or not found:
            return
        total, stores = 0, found[0][0].stores
        for value in (value for store in stores for value in store.values()):
            if isinstance(value, Tensor):  # of sparse matrices, their values
                dense = value.layout == torch.strided
                numbers = value.numel() if dense else value._nnz()
                total += numbers * value.element_size()
        self._loader.batch_bytes = max(total, 1)


def _record_sampled_sizes(batch: Any, out: Any) -> None:
    """Records the numbers of nodes and seeds of a minibatch; its first nodes are the seeds."""
    found = out.num_sampled_nodes
    if not isinstance(batch, HeteroData):
        if isinstance(out.node, Tensor):
            # PyG does not count the seeds of links in an induced subgraph: trim none then
            seeds = getattr(batch, "batch_size", 0) if found is None else found[0]
            seeds = min(int(seeds), len(out.node))
            attach_sizes(batch, {None: len(out.node)}, {None: seeds})
        return
    sizes = {kind: len(out.node.get(kind, ())) for kind in batch.node_types}
    if found is not None:
        seeds = {kind: int(counts[0]) for kind, counts in found.items() if len(counts)}
    else:
        seeds = {
            kind: min(int(batch[kind].batch_size), sizes[kind])
            for kind in batch.node_types
            if "batch_size" in batch[kind]
        }
    attach_sizes(batch, sizes, seeds)


def attach_sizes(batch: Any, sizes: dict[Any, int], seeds: dict[Any, int]) -> None:
    """Attaches the sampled sizes to a minibatch's edges, also on a device; see `carry`."""
    edges = edge_index_of(batch)
    if edges is None:
        return
    carry(edges, sizes, seeds)
    every = list(edges.values()) if isinstance(edges, dict) else [edges]
    if every and every[0].is_cpu:
        follow(batch, edge_index_of, sizes, seeds)
    elif every:
        prepare(every[0])


def edge_index_of(batch: Any) -> Any:
    """Returns the edge_index of a minibatch, or one by type; None if it has no tensors."""
    if isinstance(batch, HeteroData):
        edges = batch.collect("edge_index", allow_empty=True)
        return edges if all(isinstance(e, Tensor) for e in edges.values()) else None
    edges = batch.get("edge_index") if isinstance(batch, Data) else None
    return edges if isinstance(edges, Tensor) else None


def placeholder_rows(count: int) -> Tensor:
    """Returns a tensor without columns that stands for one with `count` rows."""
    return torch.empty(count, 0, dtype=_PLACEHOLDER_DTYPE)


def _is_placeholder(value: Any) -> bool:
    """Returns whether a value is a placeholder, or a selection of its rows."""
    if not isinstance(value, Tensor) or value.dim() != 2:
        return False
    return value.dtype == _PLACEHOLDER_DTYPE and value.size(1) == 0


def _has_rows(value: Any) -> bool:
    """Returns whether a value is a dense CPU array whose rows can be copied."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "biuf"
    return (
        type(value) in (Tensor, torch.nn.Parameter)
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.dim() > 0
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
    )
