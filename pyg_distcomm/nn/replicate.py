"""Replicates a model by DistributedDataParallel, with its bytes counted."""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis, Pending, guarded
from pyg_distcomm.comm.consistency import comparer_of
from pyg_distcomm.comm.mesh import Mesh, given_mesh
from pyg_distcomm.nn.embedding import sharded_parameters
from pyg_distcomm.sharded.dist_tensor import DistTensor

BUCKETS = 4
_TRANSPORT = re.compile(r"gloo|nccl|\b(pair|peer)\b|connect|time[d ]*out", re.I)
_FIRST_BUCKET = 1 << 20  # bytes
SMALLEST = 1 / 64  # MB of a bucket: below, a message's latency is dearer than its bytes


class _Transparent:
    """Forwards attributes to the wrapped module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


class Alone(_Transparent, torch.nn.Module):
    """Stands in for DDP on one rank: holds the model as `.module`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.module(*args, **kwargs)


class Replicated(_Transparent, DistributedDataParallel):
    """Extends DistributedDataParallel: shows its module's attributes, and can be copied.

    A copy is replicated anew, which is collective; a pickled one is the module, in `Alone`.
    Where the module's own methods are called instead of this one, gradients are those
    without DDP.
    """

    armed = False  # whether DDP averages the gradients of the next backward pass
    # whether DDP makes new buckets in the next; None at first
    regroups: bool | None = None

    def __init__(
        self, module: torch.nn.Module, mesh: Mesh, options: dict[str, Any]
    ) -> None:
        self._made = mesh, options
        self._wait_for_all_ranks()
        super().__init__(module, process_group=mesh.data.group, **options)
        self._bucket_bytes, self._num_passes = self.bucket_bytes_cap, 0
        # torch.compile cuts graphs by this, and refuses less than DDP's own first bucket
        self.bucket_bytes_cap = max(self.bucket_bytes_cap, _FIRST_BUCKET)
        self._ready: list[Tensor] = []  # in the order of the first pass
        self._hooks = [
            p.register_hook(partial(_note, self._ready, p))
            for p in module.parameters()
            if p.requires_grad and p.is_leaf
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        if self.regroups and torch.is_grad_enabled():
            self.regroups = False
            self._wait_for_all_ranks()
        self.armed = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._ready.clear()
        return super().forward(*args, **kwargs)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        mesh, _ = self._made
        try:  # DDP sends buckets and buffers in here, and checks its own use
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            lost = _TRANSPORT.search(str(error)) or isinstance(error, dist.DistError)
            if not lost and not (mesh.data.watch and mesh.data.watch.failed):
                raise
            with guarded(mesh.data, "replicate"):
                raise

    def on_gradients_ready(self) -> None:
        """Records that all gradients of a backward pass are ready."""
        self.armed = False
        self._num_passes += 1
        if self.regroups is None:  # in the order of the first, unless it may change
            self.regroups = self.static_graph or not self.find_unused_parameters
            for hook in self._hooks:
                hook.remove()

    def compare_parameters(self) -> None:
        """Raises on all ranks if parameters differ, in passes 2, 4, 8, ...; collective.

        As parameters without a wrapper are compared, see `Comparer.compare_trained`.
        """
        mesh, _ = self._made
        if self._num_passes < 2 or not mesh.is_due(self._num_passes):
            return
        copies = {
            k: p
            for k, p in enumerate(self.module.parameters())
            if p.requires_grad
            and not hasattr(p, "is_shard")
            and not isinstance(p, DistTensor)  # of which each rank has its own rows
        }
        comparer_of(mesh).compare_trained(copies)

    def next_buckets(self, parameters: list[Tensor]) -> list[list[int]]:
        """Returns the buckets that DDP will make after the first pass; collective.

        In the first pass DDP has one bucket a dtype. On three ranks and more, a sum rounds
        by the place of a gradient in its bucket, so that a run that goes on from a
        checkpoint would have other bits than a straight one, past its first pass there.

        Returns:
            For each bucket, numbers of parameters in the given list.
        """
        mesh, _ = self._made
        places = {id(p): place for place, p in enumerate(parameters)}
        order = [places[id(p)] for p in self._ready if id(p) in places]
        if len(order) != len(parameters):  # some came in other ways
            return [list(range(len(parameters)))]
        axis = replace(mesh.control, ledger=mesh.checks)
        order = collectives.all_gather_counts(order, axis)[0]
        buckets: list[list[int]] = [[]]
        size = 0
        for place in order:
            buckets[-1].append(place)
            size += parameters[place].numel() * parameters[place].element_size()
            if size >= self._bucket_bytes:
                buckets.append([])
                size = 0
        return [bucket for bucket in buckets if bucket]

    def _wait_for_all_ranks(self) -> None:
        """Waits for all ranks before steps in which DDP would wait without our deadline."""
        mesh, _ = self._made
        if mesh.data.watch is not None:
            mesh.data.watch.barrier("replicate", mesh.stage.rank, mesh.size)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        mesh, options = self._made
        return replicate(copy.deepcopy(self.module, memo), mesh, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Alone, (self.module,)


def _note(ready: list[Tensor], p: Tensor, grad: Tensor) -> None:
    """Notes that the gradient of a parameter has come."""
    ready.append(p)


def replicate(
    model: torch.nn.Module, mesh: Mesh | None = None, **kwargs: Any
) -> torch.nn.Module:
    """Returns the model with equal parameters on all ranks and averaged gradients.

    Full-graph training needs no wrapper: gradients of parameters used with row-sharded data
    are those of one process on every rank (see [Note: gradients] in `sharded/partial.py`).
    Training on minibatches, and parameters that are only used with `.to_local()` rows, need
    it. This is torch's DistributedDataParallel in its own process group: parameters start with
    rank 0's values, and gradients are averaged during the backward pass, in buckets of about a
    quarter of them (DDP's default of 25 MB holds all of most graph models, so that nothing
    would overlap). The average of gradients that are whole on every rank is the same.
    Row-sharded parameters (`DistEmbedding`) stay with their rank. On one rank the wrapper only
    adds `.module`.

    Args:
        model: the model, on this rank's device.
        mesh: the ranks; those of the last `pdc.init` if None.
        kwargs: further arguments of DistributedDataParallel.

    Raises:
        TypeError: for a graph, which belongs in `pdc.partition`, or another object that is not
            a model.
        ValueError: if the backend does not support the device of the parameters; and in a
            backward pass, if parameters differ, as with learning rates that do.

    Price: one all-reduce of all parameters per backward pass. In passes 2, 4, 8 and so on
    ranks compare parameters, as those of a model without a wrapper: a second per GB.
    """
    check_module(model, "pdc.replicate")
    mesh = given_mesh(mesh, "pdc.replicate")
    cut = [n for n, p in model.named_parameters() if isinstance(p, DistTensor)]
    cut += sharded_parameters(model)
    if cut:
        # DDP's name for the root's
        cut += [f".{name}" for name in cut if "." not in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, cut)
    free = [
        p for name, p in model.named_parameters() if p.requires_grad and name not in cut
    ]
    if mesh.size == 1 or not free:
        return Alone(model)
    kwargs.setdefault("broadcast_buffers", False)
    megabytes = sum(p.numel() * p.element_size() for p in free) / 2**20
    # at most DDP's default
    kwargs.setdefault("bucket_cap_mb", min(max(megabytes / BUCKETS, SMALLEST), 25.0))
    with warnings.catch_warnings():
        # torch 2.13 renames it, and older ones do not know the new name
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
        out = Replicated(model, mesh, kwargs)
    out.register_comm_hook(_Averager(mesh.data, out), _average)
    return out


def check_module(model: Any, call: str) -> None:
    """Raises TypeError for what is given to a function in the place of a model."""
    if not isinstance(model, torch.nn.Module):
        graph = hasattr(model, "edge_index") or hasattr(model, "edge_stores")
        raise TypeError(
            f"{call} takes a model, a torch.nn.Module, got {type(model).__name__}"
            + "; to partition a graph, call pdc.partition(data, mesh)" * graph
        )


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model that `replicate` wrapped, or the model itself."""
    if isinstance(model, (Alone, DistributedDataParallel)):
        return model.module  # type: ignore[return-value]
    return model


class _Averager:
    """Holds the axis, excluded from copying and pickling, and the number of words sent."""

    def __init__(self, axis: Axis, wrapper: Replicated) -> None:
        self.axis, self.wrapper = axis, weakref.proxy(wrapper)
        self.left = 0
        self.under_way: list[tuple[Pending, Tensor, Any]] = []

    def finish(self) -> None:
        """Waits for the sums at the end of a backward pass, before DDP does."""
        under_way, self.under_way = self.under_way, []
        for pending, buffer, future in under_way:
            pending.wait()
            if future is not None:
                future.set_result(buffer)
        self.wrapper.compare_parameters()

    def sum_as_later(self, bucket: Any) -> None:
        """Sums a bucket of the first pass in the pieces of all later passes."""
        gradients = [g.as_strided((g.numel(),), (1,)) for g in bucket.gradients()]
        for places in self.wrapper.next_buckets(bucket.parameters()):
            piece = torch.cat([gradients[place] for place in places])
            pending, _ = collectives.all_reduce_future(piece, self.axis, self.left)
            self.left += piece.numel()
            pending.wait()
            parts = piece.split([gradients[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                gradients[place].copy_(part)


def _average(state, bucket):  # type: ignore[no-untyped-def] # DDP reads annotations
    """Averages one bucket of gradients over the ranks, and counts it."""
    state.axis.ledger.event("begin", "gradients")
    buffer: Tensor = bucket.buffer().div_(state.axis.size)
    wrapper = state.wrapper
    later = wrapper.static_graph or not wrapper.find_unused_parameters
    if wrapper.regroups is None and later:
        state.sum_as_later(bucket)
        if bucket.is_last():
            state.left = 0
            wrapper.on_gradients_ready()
        devices: Any = [buffer.device] if buffer.is_cuda else None
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done
    pending, future = collectives.all_reduce_future(buffer, state.axis, state.left)
    # a thread of gloo must keep nothing of Python's, which may end first: [Note: exit]
    own: Any = None if buffer.is_cuda else torch.futures.Future()
    state.under_way.append((pending, buffer, own))
    state.left = 0 if bucket.is_last() else state.left + buffer.numel()
    if bucket.is_last():  # all gradients have come
        state.wrapper.on_gradients_ready()
        # DDP puts its own callback behind this one
        torch.autograd.Variable._execution_engine.queue_callback(state.finish)
    return own or future.then(lambda f: f.value()[0])
