"""Places the graph and the features of a loader on a device, where minibatches are built."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data, HeteroData

from pyg_distcomm import kernels
from pyg_distcomm.comm.failure import needing, watch_of
from pyg_distcomm.comm.store import latest_mesh
from pyg_distcomm.graph.local_adjacency import hand_over
from pyg_distcomm.sampling.graph_source import edges_of

DEVICE, PINNED, ON_HOST = "device", "pinned", "host"
PLACES = {"graph_on": (DEVICE, PINNED), "rows_on": (DEVICE, PINNED, ON_HOST)}
_LESS_ROWS = (
    "rows_on='pinned', which the device reads in host memory, with cache= for some",
    "rows_on='host', from which those of each minibatch are sent",
)
HOST = frozenset({"cpu"})  # types of devices that use the host's sampler


@dataclass(frozen=True)
class Placement:
    """Describes on which device minibatches are built, and where graph and rows are stored."""

    device: torch.device  # the device of the minibatches
    # whether the graph stays in pinned host memory, which the device reads
    graph_pinned: bool = False
    # where rows of nodes and edges are stored: on the device, in pinned memory, or on
    # the host, which gathers the rows of each minibatch
    rows_on: str = DEVICE
    # how many pinned rows of nodes the device caches, a count or a fraction
    cache: float = 0
    _slots: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _rows: dict[Any, tuple[Tensor, int, Tensor]] = field(
        default_factory=dict, repr=False
    )
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    @staticmethod
    def of(options: Any) -> Placement | None:
        """Checks the `LoaderOptions` of a loader; returns None for the host."""
        device, cache = options.device, options.cache
        graph_on, rows_on = options.graph_on, options.rows_on
        num_cached_rows(cache, 0)
        if cache and rows_on != PINNED:
            raise ValueError(
                f"got cache={cache!r}, which is for rows in pinned memory; give "
                "rows_on='pinned', or for a share "
                "features=DistFeatureStore.from_data(..., cache=...)"
            )
        try:
            found = torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"device must name a device, as 'cuda', got {device!r}"
            ) from error
        pinned = PINNED in (graph_on, rows_on)
        if found.type in HOST:
            if (graph_on, rows_on) != (DEVICE, DEVICE):
                raise ValueError(
                    f"graph_on={graph_on!r}, rows_on={rows_on!r} say what a device reads "
                    f"and where, got device={device!r}; give device='cuda', or leave them "
                    "out"
                )
            return None
        if found.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            index = found.index
            if index is None and count:
                index = torch.cuda.current_device()
            if not count or index >= count:
                raise ValueError(
                    f"device={device!r}: this process sees {count} CUDA devices; leave "
                    "device out to sample on the host"
                )
            found = torch.device("cuda", index)
        if pinned:
            _check_pinned(found)
        return Placement(found, graph_on == PINNED, rows_on, cache)

    def check(self, data: Any, sampler: Any, dataloader: dict[str, Any]) -> None:
        """Raises ValueError for options of a loader that do not work on a device."""
        wrong = None
        if sampler is not None:
            wrong = "neighbor_sampler samples in a way of its own; leave one out"
        elif not isinstance(data, (Data, HeteroData)):
            wrong = (
                "the rows of stores are fetched on the host; give a Data or a HeteroData, "
                "or leave device out"
            )
        elif data.is_cuda:
            wrong = "the data lies on a device; give it on the host, by .cpu()"
        elif dataloader.get("num_workers", 0):
            wrong = (
                f"num_workers={dataloader['num_workers']}: other processes do not share "
                "the graph on a device; leave num_workers out"
            )
        if wrong is not None:
            raise ValueError(f"device={str(self.device)!r}: {wrong}")

    @property
    def sampling(self) -> dict[str, Any]:
        """Returns the arguments of a sampler."""
        return {"device": self.device, "pinned": self.graph_pinned}

    @property
    def cuda(self) -> bool:
        """Returns whether it is a CUDA device, which has streams."""
        return self.device.type == "cuda"

    def rows(self, key: Any, values: Tensor) -> Tensor:
        """Returns an attribute where the device reads it; copied again if it has changed."""
        pinned = self.rows_on == PINNED
        return self._cached(
            key,
            values,
            lambda t: t.contiguous().pin_memory() if pinned else self.put(t),
        )

    def keep(self, data: Data | HeteroData) -> None:
        """Chooses the nodes of each type whose rows are cached: those of highest out-degree.

        Ties go to the lower id. It takes 4 bytes per node on the device.
        """
        degrees = {
            store._key: torch.zeros(store.num_nodes or 0).long()
            for store in data.node_stores
        }
        for store in data.edge_stores:
            degree = degrees[None if store._key is None else store._key[0]]
            degree += torch.bincount(edges_of(store)[0], minlength=len(degree))
        for kind, score in degrees.items():
            order = torch.argsort(score, descending=True, stable=True)
            ids = order[: num_cached_rows(self.cache, len(score))].sort().values
            slot = torch.full((len(score),), -1, dtype=torch.int32)
            slot[ids] = torch.arange(len(ids), dtype=torch.int32)
            self._slots[kind] = ids, self.put(slot)

    def take(
        self, key: Any, values: Tensor, index: Tensor, nodes: bool = False
    ) -> Tensor:
        """Returns rows `index` `[k]` of an attribute on the device.

        `key` is its (store, name), or any other key; rows of nodes may be cached there.
        """
        if self.rows_on == ON_HOST:
            return self.send(values.index_select(0, index.cpu()))
        kept = None
        if nodes and key[0] in self._slots:
            ids, slot = self._slots[key[0]]
            rows = self._cached(
                (*key, "kept"), values, lambda t: self.put(t.index_select(0, ids))
            )
            kept = rows, slot
        return kernels.read_rows(self.rows(key, values), self.send(index), kept)

    def shape_of(self, key: Any, edges: Tensor) -> Tensor:
        """Returns an edge_index of the same shape and largest ids, on the device.

        PyG puts a minibatch's edges on the device of the data's, and reads only the number of
        nodes from these. It takes 16 bytes.
        """

        def last(t: Tensor) -> Tensor:
            ends = t.amax(1, keepdim=True) if t.numel() else t.new_zeros(len(t), 1)
            return self.put(ends).expand(t.shape)

        return self._cached((key, "edge_index"), edges, last)

    def _cached(
        self, key: Any, values: Tensor, make: Callable[[Tensor], Tensor]
    ) -> Tensor:
        with self._lock:
            kept = self._rows.get(key)
            if kept is None or kept[0] is not values or kept[1] != values._version:
                name = (
                    f"{key[1]!r} of a loader" if isinstance(key, tuple) else repr(key)
                )
                with needing(
                    f"rows_on={self.rows_on!r}, {name},",
                    lambda: values.nbytes,
                    watch_of(latest_mesh()),
                    self.device,
                    instead=_LESS_ROWS,
                ):
                    made = make(values.detach())
                kept = self._rows[key] = values, values._version, made
            return kept[2]

    def put(self, t: Tensor) -> Tensor:
        """Returns a tensor on the device."""
        return t.to(self.device)

    def send(self, t: Tensor) -> Tensor:
        """Returns a tensor of a minibatch on the device, without waiting for the copy."""
        if t.device == self.device:
            return t
        if self.cuda and not t.is_pinned():
            t = t.pin_memory()  # torch reuses its memory only after the copy
        return t.to(self.device, non_blocking=True)

    def receive_buffer(self, rows: int, like: Tensor) -> Tensor:
        """Returns an uninitialised host tensor for received rows, pinned for CUDA."""
        shape = (rows, *like.shape[1:])
        return torch.empty(shape, dtype=like.dtype, pin_memory=self.cuda)


def num_cached_rows(size: float, total: int) -> int:
    """Returns the number of rows of a cache whose size is a count, or a fraction of all."""
    whole = isinstance(size, int) and not isinstance(size, bool)
    if whole and size >= 0:
        return min(int(size), total)
    if isinstance(size, float) and 0 <= size <= 1:
        return round(size * total)
    raise ValueError(
        f"cache={size!r} must be a number of rows (an int), or a fraction of all rows "
        "(a float from 0.0 to 1.0); give one of these"
    )


def _check_pinned(device: torch.device) -> None:
    wrong = "" if device.type == "cuda" else f"device={str(device)!r} is no CUDA device"
    if not wrong and importlib.util.find_spec("triton") is None:
        wrong = "Triton is not installed (pip install triton)"
    if wrong:
        raise ValueError(
            f"pinned memory is read by a Triton kernel on CUDA, but {wrong}; leave graph_on "
            "and rows_on out"
        )


class SideStream:
    """Builds minibatches on a CUDA stream of its own, beside the stream of training."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Runs a block on the stream."""
        with torch.cuda.stream(self._stream):
            yield

    def sent(self, outs: list[Any]) -> list[Any]:
        """Pairs each minibatch, or sampler's output, with an event after all work so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return [(out, event) for out in outs]

    def received(self, pending: tuple[Any, Any]) -> Any:
        """Has the current stream wait for a minibatch, and returns it."""
        out, event = pending
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(event)
        for t in tensors_of(out):
            if t.is_cuda:
                t.record_stream(current)
                hand_over(t)
        return out


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a minibatch, of a sampler's output, or of lists and dicts."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, (Data, HeteroData)):
            yield from tensors_of([dict(store) for store in leaf.stores])
        elif hasattr(leaf, "metadata") and hasattr(leaf, "node"):
            yield from tensors_of(vars(leaf))
