"""Turns what was sampled into a Data or HeteroData, features gathered by our kernels.

PyG's `filter_fn` decides what a minibatch holds, and in which order. It is run on a
hollow copy of the data, whose tensors have no columns; the rows are then gathered into
the places it made.

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
from pyg_distcomm.loader.placement import Placement
from pyg_distcomm.sampling.neighbor_sampler import KeyedNeighborSampler

WORTH = 1 << 20  # bytes below which fresh memory is as good
SLACK = 1.25  # minibatches vary in size

_probe = [np.empty(0)]
_ALONE = sys.getrefcount(_probe[0])  # references to an array that only a list holds


class Buffers:
    """Arrays whose tensors come and go; any number of threads may take from it.

    It grows to what is in use at a time, and is freed with its owner.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._lock = threading.Lock()

    def empty(self, like: Tensor, rows: int) -> Tensor:
        """Returns an uninitialised matrix [rows, like.size(1)] of the type of `like`."""
        size = rows * like.size(1) * like.element_size()
        if size < WORTH:
            return like.new_empty(rows, like.size(1))
        with self._lock:
            # the array is referred to by the tensor for as long as its memory is
            array = self._unused(size)
            part = torch.from_numpy(array[:size])
        return part.view(like.dtype).view(rows, like.size(1))

    def _unused(self, size: int) -> Any:
        for k in range(len(self._held)):
            if sys.getrefcount(self._held[k]) == _ALONE and self._held[k].size >= size:
                return self._held[k]
        fresh = torch.empty(int(size * SLACK) // 64 * 64 + 64, dtype=torch.uint8)
        # one that nobody uses and that is too small gives way
        self._held = [a for a in self._held if not self._outgrown(a, size)]
        self._held.append(memory.advise(fresh).numpy())
        return self._held[-1]

    @staticmethod
    def _outgrown(array: Any, size: int) -> bool:
        # references: the list, the loop, this call's own, and getrefcount's
        return array.size < size and sys.getrefcount(array) <= _ALONE + 2


_HOLLOW = torch.int8  # of tensors without columns, which PyG puts nowhere itself

# by place in the list of attributes: where the rows of ids are, and the rows
Pools: TypeAlias = dict[int, tuple[Callable[[Tensor], Tensor], Tensor]]


@dataclass(frozen=True, eq=False)
class Attribute:
    """Describes one attribute whose rows the collator gathers.

    Args:
        store: the key of its store in a HeteroData; None in a Data.
        name: its name.
        values: where its rows are; None if with other ranks.
        of_edges: whether it has a row for each edge.
    """

    store: Any
    name: str
    values: Tensor | np.ndarray | None
    of_edges: bool


class Collator:
    """Collates the minibatches of one loader, as its data is now.

    Args:
        loader: a loader of this package.
        buffers: where the memory of features comes from; fresh without it.
    """

    def __init__(self, loader: Any, buffers: Buffers | None = None) -> None:
        self._buffers = buffers
        self._bare = copy.copy(loader)
        self._bare.transform = self._bare.transform_sampler_output = None
        self._rows: list[Attribute] = []
        self._placement: Placement | None = loader.placement
        self._spread: Any = loader.spread
        if self._spread is not None:
            self.threads, self._rows = True, self._spread.attributes
            self._bare.data = self._spread.hollow
            return
        sampler = loader.neighbor_sampler_in_use
        plain = isinstance(loader.data, (Data, HeteroData)) and not loader.data.is_cuda
        ours = isinstance(sampler, KeyedNeighborSampler) or hasattr(
            sampler, "sample_bulk"
        )
        self.threads = plain and ours
        if self.threads:
            self._bare.data = self._hollow(loader.data)

    @property
    def pooled(self) -> bool:
        """Returns whether rows are fetched once for a whole bulk: from disk, or other ranks."""
        return any(not isinstance(rows.values, Tensor) for rows in self._rows)

    def fetch(self, outs: list[Any]) -> Pools:
        """Fetches the distinct rows that a bulk needs; collective if they are spread."""
        if self._spread is not None:
            return self._spread.fetch(outs, self._placement)
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
        """Assembles one minibatch; `pools` is what `fetch` read for its bulk."""
        ends = self._ends(out)
        if ends is None:
            batch = self._bare.pyg_filter_fn(out)
        else:  # PyG would copy them
            batch = self._bare.pyg_filter_fn(_without_ends(out))
            batch.edge_index = ends
        for k, rows in enumerate(self._rows):
            store = batch if rows.store is None else batch[rows.store]
            if not _is_hollow(getattr(store, rows.name, None)):
                continue  # PyG has put something of the minibatch's own in its place
            ids, values = _ids(rows, out), rows.values
            if ids is None:
                continue  # edges without ids: PyG has left the attribute out
            real, every = ids >= 0, ids  # loops that a rule has added have no rows
            ids = ids if bool(real.all()) else ids[real]
            if not isinstance(values, Tensor):
                pools = self.fetch([out]) if pools is None else pools
                find, values = pools[k]
                ids = find(ids)
                if self._placement is not None:  # the pool lies there
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
        _carry(batch, out)
        return batch

    def _put(self, t: Tensor) -> Tensor:
        return t if self._placement is None else self._placement.put(t)

    def _ends(self, out: Any) -> Tensor | None:
        """Returns the edges `[2, e]` of which row and col are the rows, if they are."""
        data, row, col = self._bare.data, out.row, out.col
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

    def _hollow(self, data: Any) -> Any:
        """Returns the data with the attributes gathered here emptied of columns."""
        hollow = copy.copy(data)
        for store, empty in zip(data.stores, hollow.stores, strict=True):
            for name, value in list(store.items()):
                of_nodes = store.is_node_attr(name)
                of_edges = not of_nodes and store.is_edge_attr(name)
                if not (of_nodes or of_edges) or not _has_rows(value):
                    continue
                if data.__cat_dim__(name, value, store) != 0:
                    continue
                self._rows.append(Attribute(store._key, name, value, of_edges))
                empty[name] = self._put(hollow_rows(len(value)))
            edges = store.get("edge_index")
            if self._placement is not None and type(edges) is Tensor:
                empty["edge_index"] = self._placement.shape_of(store._key, edges)
        return hollow


def _without_ends(out: Any) -> Any:
    bare = copy.copy(out)
    bare.row, bare.col = out.row[:0], out.col[:0]
    return bare


def _carry(batch: Any, out: Any) -> None:
    """Notes that the edges of a minibatch are a sampler's; seeds are its first nodes."""
    found = out.num_sampled_nodes
    if not isinstance(batch, HeteroData):
        if isinstance(out.node, Tensor):
            # nobody counts those of links in an induced subgraph: then none is trimmed
            seeds = getattr(batch, "batch_size", 0) if found is None else found[0]
            seeds = min(int(seeds), len(out.node))
            _note(batch, {None: len(out.node)}, {None: seeds})
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
    _note(batch, sizes, seeds)


def _note(batch: Any, sizes: dict[Any, int], seeds: dict[Any, int]) -> None:
    """Notes what a sampler knows of a minibatch, wherever it goes; see `carry`."""
    edges = _carrying(batch)
    if edges is None:
        return
    carry(edges, sizes, seeds)
    every = list(edges.values()) if isinstance(edges, dict) else [edges]
    if every and every[0].is_cpu:
        follow(batch, _carrying, sizes, seeds)
    elif every:
        prepare(every[0])


def _carrying(batch: Any) -> Any:
    """Returns the edges of a minibatch as `carry` takes them; None if it has others."""
    if isinstance(batch, HeteroData):
        edges = batch.collect("edge_index", allow_empty=True)
        return edges if all(isinstance(e, Tensor) for e in edges.values()) else None
    edges = batch.get("edge_index") if isinstance(batch, Data) else None
    return edges if isinstance(edges, Tensor) else None


@dataclass(frozen=True, eq=False)
class Sent:
    """A minibatch on its way from a worker process, with what the sampler knew of it.

    Args:
        batch: the minibatch.
        sizes, seeds: numbers of nodes by type, as `carry` takes them; None if a transform
            has put other edges in the place of the sampler's.
    """

    batch: Any
    sizes: dict[Any, int] | None
    seeds: dict[Any, int]

    @staticmethod
    def of(batch: Any) -> Sent:
        """Returns a minibatch with what its edges carry in this process."""
        edges = _carrying(batch)
        every = edges.values() if isinstance(edges, dict) else [edges]
        found = [None if e is None else known(e) for e in every]
        kept = [None if k is None else k.batch for k in found]
        if not kept or kept[0] is None or any(k is not kept[0] for k in kept):
            return Sent(batch, None, {})
        return Sent(batch, kept[0].sizes, kept[0].seeds)

    def received(self) -> Any:
        """Returns the minibatch; its edges carry what they did in the worker."""
        if self.sizes is not None:
            _note(self.batch, self.sizes, self.seeds)
        return self.batch

    def pin_memory(self) -> Sent:
        """Returns it in pinned memory; called by torch's loader."""
        return Sent(self.batch.pin_memory(), self.sizes, self.seeds)


def hollow_rows(count: int) -> Tensor:
    """Returns a tensor without columns, in the place of one with `count` rows."""
    return torch.empty(count, 0, dtype=_HOLLOW)


def _is_hollow(value: Any) -> bool:
    """Tells whether a value is a row selection of a tensor emptied of columns."""
    if not isinstance(value, Tensor) or value.dim() != 2:
        return False
    return value.dtype == _HOLLOW and value.size(1) == 0


def _has_rows(value: Any) -> bool:
    """Tells whether a value is a dense CPU array whose rows can be copied."""
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
    """Returns which rows of an attribute a minibatch holds, if that is known."""
    found = out.edge if rows.of_edges else out.node
    if rows.store is not None and found is not None:
        found = found.get(rows.store)
    return None if found is None else found.long()


def _gather(values: Tensor, ids: Tensor, buffers: Buffers | None) -> Tensor:
    """Copies rows of any type, as whole words."""
    shape = (ids.numel(), *values.shape[1:])
    size = values[:1].numel() * values.element_size() if len(values) else 0
    if size == 0 or not ids.numel():
        return values.new_empty(shape)
    begin = values.storage_offset() * values.element_size()
    word = next((w for w in (8, 4) if size % w == begin % w == 0), 1)
    kind = {8: torch.float64, 4: torch.float32, 1: torch.uint8}[word]
    if word == 1:
        return values.index_select(0, ids)
    words = memory.as_bytes(values).view(kind).view(len(values), -1)
    fresh = None if buffers is None else buffers.empty(words, ids.numel())
    out = kernels.gather_rows(words, ids, fresh)
    return out.view(torch.uint8).view(values.dtype).view(shape)
