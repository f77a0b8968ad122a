"""Collates a sampler's output into a Data or HeteroData, with features gathered by kernels.

PyG's `filter_fn` decides what a minibatch holds, and in which order. It runs on a copy of
the data with placeholders, tensors without columns, instead of features; rows of features
are then gathered in their place.

[Note: fresh pages] Features of a minibatch take tens of megabytes. The system zeroes each
fresh page before it is written, under one lock for all threads of a process: with two
threads that takes longer than the copy itself. So memory of dropped minibatches is reused.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_distcomm import kernels
from pyg_distcomm.graph.local_adjacency import carry, follow, known, prepare
from pyg_distcomm.kernels import memory
from pyg_distcomm.kernels.core_ops import word_dtype, words_of
from pyg_distcomm.loader.device_placement import Placement
from pyg_distcomm.loader.sparse_adjacency import with_matrices
from pyg_distcomm.sampling.neighbor_sampler import KeyedNeighborSampler

REUSE_FROM = 1 << 20  # bytes of features from which reusing memory pays
SLACK = 1.25  # factor on the size to allocate, since minibatches vary in size

_probe = [np.empty(0)]
_ALONE = sys.getrefcount(_probe[0])  # references to an array that only a list holds


class Buffers:
    """Reuses the memory of dropped tensors for new ones. Thread-safe.

    It grows to the memory that is in use at one time, and is freed with its owner.
    """

    def __init__(self) -> None:
        self._arrays: list[Any] = []
        self._lock = threading.Lock()

    def empty(self, like: Tensor, rows: int) -> Tensor:
        """Returns an uninitialised matrix [rows, like.size(1)] of the type of `like`."""
        size = rows * like.size(1) * like.element_size()
        if size < REUSE_FROM:
            return like.new_empty(rows, like.size(1))
        with self._lock:
            # the tensor refers to the array as long as it lives
            array = self._free_array(size)
            part = torch.from_numpy(array[:size])
        return part.view(like.dtype).view(rows, like.size(1))

    def _free_array(self, size: int) -> Any:
        """Returns an unused array of at least `size` bytes, a new one if there is none."""
        for k in range(len(self._arrays)):
            if (
                sys.getrefcount(self._arrays[k]) == _ALONE
                and self._arrays[k].size >= size
            ):
                return self._arrays[k]
        fresh = torch.empty(int(size * SLACK) // 64 * 64 + 64, dtype=torch.uint8)
        # drops unused arrays that are too small
        self._arrays = [a for a in self._arrays if not self._is_too_small(a, size)]
        self._arrays.append(memory.advise(fresh).numpy())
        return self._arrays[-1]

    @staticmethod
    def _is_too_small(array: Any, size: int) -> bool:
        # references: by the list, the loop, this call, and getrefcount
        return array.size < size and sys.getrefcount(array) <= _ALONE + 2


_PLACEHOLDER_DTYPE = torch.int8  # of tensors without columns; PyG itself makes none

# by index of the attribute: a function from ids to positions in the pool, and its rows
Pools: TypeAlias = dict[int, tuple[Callable[[Tensor], Tensor], Tensor]]


@dataclass(frozen=True, eq=False)
class Attribute:
    """Describes one attribute whose rows the collator gathers.

    Args:
        store: the key of its store in a HeteroData; None in a Data.
        name: the name of the attribute.
        values: its rows; None if they are sharded over ranks.
        of_edges: whether it has a row for each edge, not for each node.
    """

    store: Any
    name: str
    values: Tensor | np.ndarray | None
    of_edges: bool


class Collator:
    """Collates minibatches of a loader, from its data when this object is made.

    Args:
        loader: a loader of this package.
        buffers: provides the memory of features; None allocates it each time.
    """

    def __init__(self, loader: Any, buffers: Buffers | None = None) -> None:
        self._buffers = buffers
        self._loader = copy.copy(loader)
        self._loader.transform = self._loader.transform_sampler_output = None
        self._rows: list[Attribute] = []
        self._placement: Placement | None = loader.placement
        self._source: Any = loader.partitioned_source
        if self._source is not None:
            self.thread_safe, self._rows = True, self._source.attributes
            self._loader.data = self._source.placeholder
            return
        sampler = loader.neighbor_sampler_in_use
        plain = isinstance(loader.data, (Data, HeteroData)) and not loader.data.is_cuda
        ours = isinstance(sampler, KeyedNeighborSampler) or hasattr(
            sampler, "sample_bulk"
        )
        self.thread_safe = plain and ours
        if self.thread_safe:
            self._loader.data = self._with_placeholders(loader.data)

    @property
    def pooled(self) -> bool:
        """Returns whether rows are fetched once per bulk: from disk, or from other ranks."""
        return any(not isinstance(rows.values, Tensor) for rows in self._rows)

    def fetch(self, outs: list[Any]) -> Pools:
        """Fetches the distinct rows that a bulk needs; collective if they are sharded."""
        if self._source is not None:
            return self._source.fetch(outs, self._placement)
        pools: Pools = {}
        for k, rows in enumerate(self._rows):
            if isinstance(rows.values, np.ndarray):
                found = [_ids(rows, out) for out in outs]
                ids = [i[i >= 0] for i in found if i is not None]
                none = torch.empty(0, dtype=torch.int64)
                wanted = torch.cat(ids).unique() if ids else self._put(none)
                taken = np.take(rows.values, wanted.cpu().numpy(), axis=0)
                read = self._put(torch.from_numpy(taken))
                pools[k] = partial(torch.searchsorted, wanted), read
        return pools

    def __call__(self, out: Any, pools: Pools | None = None) -> Any:
        """Collates one minibatch, with the rows that `fetch` read for its bulk, if any."""
        ends = self._shared_edge_index(out)
        if ends is None:
            batch = self._loader.pyg_filter_fn(out)
        else:  # PyG would copy them
            batch = self._loader.pyg_filter_fn(_without_edges(out))
            batch.edge_index = ends
        for k, rows in enumerate(self._rows):
            store = batch if rows.store is None else batch[rows.store]
            if not _is_placeholder(getattr(store, rows.name, None)):
                continue  # PyG has set an attribute of this name itself
            ids, values = _ids(rows, out), rows.values
            if ids is None:
                continue  # edges without ids: PyG leaves the attribute out
            real, every = ids >= 0, ids  # self-loops that a rule adds have no rows
            ids = ids if bool(real.all()) else ids[real]
            if not isinstance(values, Tensor):
                pools = self.fetch([out]) if pools is None else pools
                find, values = pools[k]
                ids = find(ids)
                if self._placement is not None:  # the pool is on the device
                    found = kernels.read_rows(values, self._placement.send(ids))
                else:
                    found = _gather(values, ids, self._buffers)
            elif self._placement is not None:
                key = rows.store, rows.name
                found = self._placement.take(key, values, ids, not rows.of_edges)
            else:
                found = _gather(values, ids, self._buffers)
            if len(found) < len(every):
                found = found.new_zeros(len(every), *found.shape[1:]).index_put_(
                    (real.to(found.device),), found
                )
            store[rows.name] = found
        if self._placement is not None:
            batch = batch.apply(self._placement.send)
        if self._loader.has_matrices:
            batch = with_matrices(batch)
        _record_sampled_sizes(batch, out)
        return batch

    def _put(self, t: Tensor) -> Tensor:
        return t if self._placement is None else self._placement.put(t)

    def _shared_edge_index(self, out: Any) -> Tensor | None:
        """Returns the tensor `[2, e]` whose rows are row and col, if there is one."""
        data, row, col = self._loader.data, out.row, out.col
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
        for store, empty in zip(data.stores, result.stores, strict=True):
            for name, value in list(store.items()):
                of_nodes = store.is_node_attr(name)
                of_edges = not of_nodes and store.is_edge_attr(name)
                if not (of_nodes or of_edges) or not _has_rows(value):
                    continue
                if data.__cat_dim__(name, value, store) != 0:
                    continue
                self._rows.append(Attribute(store._key, name, value, of_edges))
                empty[name] = self._put(placeholder_rows(len(value)))
            edges = store.get("edge_index")
            if self._placement is not None and type(edges) is Tensor:
                empty["edge_index"] = self._placement.shape_of(store._key, edges)
        return result


def _without_edges(out: Any) -> Any:
    bare = copy.copy(out)
    bare.row, bare.col = out.row[:0], out.col[:0]
    return bare


def _record_sampled_sizes(batch: Any, out: Any) -> None:
    """Records the numbers of nodes and seeds of a minibatch; its first nodes are the seeds."""
    found = out.num_sampled_nodes
    if not isinstance(batch, HeteroData):
        if isinstance(out.node, Tensor):
            # PyG does not count the seeds of links in an induced subgraph: trim none then
            seeds = getattr(batch, "batch_size", 0) if found is None else found[0]
            seeds = min(int(seeds), len(out.node))
            _attach_sizes(batch, {None: len(out.node)}, {None: seeds})
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
    _attach_sizes(batch, sizes, seeds)


def _attach_sizes(batch: Any, sizes: dict[Any, int], seeds: dict[Any, int]) -> None:
    """Attaches the sampled sizes to a minibatch's edges, also on a device; see `carry`."""
    edges = _edge_index_of(batch)
    if edges is None:
        return
    carry(edges, sizes, seeds)
    every = list(edges.values()) if isinstance(edges, dict) else [edges]
    if every and every[0].is_cpu:
        follow(batch, _edge_index_of, sizes, seeds)
    elif every:
        prepare(every[0])


def _edge_index_of(batch: Any) -> Any:
    """Returns the edge_index of a minibatch, or one by type; None if it has no tensors."""
    if isinstance(batch, HeteroData):
        edges = batch.collect("edge_index", allow_empty=True)
        return edges if all(isinstance(e, Tensor) for e in edges.values()) else None
    edges = batch.get("edge_index") if isinstance(batch, Data) else None
    return edges if isinstance(edges, Tensor) else None


@dataclass(frozen=True, eq=False)
class WorkerBatch:
    """Holds a minibatch that a worker process sends, with the sizes that the sampler knows.

    Args:
        batch: the minibatch.
        sizes, seeds: numbers of nodes by type, as `carry` takes them; None if a transform
            has replaced the edges.
    """

    batch: Any
    sizes: dict[Any, int] | None
    seeds: dict[Any, int]

    @staticmethod
    def pack(batch: Any) -> WorkerBatch:
        """Packs a minibatch with the sizes attached to its edges in this process."""
        edges = _edge_index_of(batch)
        every = edges.values() if isinstance(edges, dict) else [edges]
        found = [None if e is None else known(e) for e in every]
        kept = [None if k is None else k.batch for k in found]
        if not kept or kept[0] is None or any(k is not kept[0] for k in kept):
            return WorkerBatch(batch, None, {})
        return WorkerBatch(batch, kept[0].sizes, kept[0].seeds)

    def unpack(self) -> Any:
        """Returns the minibatch, with the sizes attached to its edges again."""
        if self.sizes is not None:
            _attach_sizes(self.batch, self.sizes, self.seeds)
        return self.batch

    def pin_memory(self) -> WorkerBatch:
        """Returns the batch in pinned memory; torch's DataLoader calls this."""
        return WorkerBatch(self.batch.pin_memory(), self.sizes, self.seeds)


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


def _ids(rows: Attribute, out: Any) -> Tensor | None:
    """Returns the ids of the nodes or edges that an attribute has rows of; None if unknown."""
    found = out.edge if rows.of_edges else out.node
    if rows.store is not None and found is not None:
        found = found.get(rows.store)
    return None if found is None else found.long()


def _gather(values: Tensor, ids: Tensor, buffers: Buffers | None) -> Tensor:
    """Copies rows of any dtype, as whole words."""
    shape = (ids.numel(), *values.shape[1:])
    if not values.numel() or not ids.numel():
        return values.new_empty(shape)
    if word_dtype(values) == torch.uint8:  # whose copies are slower, byte by byte
        return values.index_select(0, ids)
    words = words_of(values)
    fresh = None if buffers is None else buffers.empty(words, ids.numel())
    out = kernels.gather_rows(words, ids, fresh)
    return out.view(torch.uint8).view(values.dtype).view(shape)
