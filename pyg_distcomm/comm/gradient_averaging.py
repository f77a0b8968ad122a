"""Averages the gradients of replicated tensors over the ranks, once per backward pass.

[Note: replicated operands] Where an operation has a plain tensor that requires a gradient
beside row-sharded data, each rank computes a part of its gradient, and the mean over ranks is
the gradient of one process ([Note: gradients] in `comm/autograd.py`). A leaf is registered
when such an operation first uses it. From then on its whole gradient is averaged, whatever
else uses it, since terms that every rank repeats are their own mean. A tensor with a history
is averaged through its leaves if these are found in a few steps and nobody asks for its own
gradient (`torch.autograd.grad`, a hook, `retain_grad`); otherwise where it is used. Results
of global reductions need neither.

[Note: order of buckets] Before the first gradient of a backward pass is averaged, ranks
compare, in two words, which leaves it will reach. Gradients travel in buckets of about a
quarter of them, in the reverse order in which leaves were registered, each bucket as soon as
it and those before it are full; a missing gradient counts as zero. So all ranks send the
same buckets in the same order, in whatever order gradients arrive.

Hooks that a script puts on a leaf see the average: a leaf with hooks of its own, a backward
pass with `create_graph=True`, and `torch.autograd.grad` are averaged one by one, at once.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_distcomm.comm import autograd, collectives, random
from pyg_distcomm.comm.consistency import comparer_of, digest
from pyg_distcomm.comm.mesh import Mesh

BUCKETS = 4
MIN_BUCKET_BYTES = 1 << 14  # in smaller buckets latency outweighs the overlap
_MAX_HISTORY = 64  # nodes of a tensor's history that are searched for its leaves


@dataclass(eq=False)
class _LeafState:
    """Holds the state of a registered leaf: its number, and its hook."""

    number: int
    hook: Any = None
    one_by_one: bool = False


@dataclass(eq=False)
class _Bucket:
    """Holds gradients that are all-reduced together, in one buffer."""

    leaves: list[Tensor]
    buffer: Tensor
    missing: int
    pending: Any = None

    @staticmethod
    def of(leaves: list[Tensor], arriving: set[int]) -> _Bucket:
        size = sum(p.numel() for p in leaves)
        missing = sum(id(p) in arriving for p in leaves)
        return _Bucket(leaves, leaves[0].new_zeros(size), missing)

    def slot(self, leaf: Tensor) -> Tensor:
        before = 0
        for p in self.leaves:
            if p is leaf:
                break
            before += p.numel()
        return self.buffer[before : before + leaf.numel()].view(leaf.shape)


@dataclass(eq=False)
class _BackwardPass:
    """Holds the state of a running backward pass: its buckets, and how many are sent."""

    buckets: list[_Bucket] = field(default_factory=list)
    of: dict[int, _Bucket] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)  # had no gradient before
    sparse: set[int] = field(default_factory=set)
    sent: int = 0
    words: int = 0


class Averager:
    """Averages gradients over the ranks of a mesh; see the notes of this file.

    Price: an all-reduce of two words per backward pass that reaches registered leaves, and one
    of their gradients, in pieces. The registration of a leaf costs an all-gather of a hash and
    a shape. In passes 2, 4, 8 and so on (`check="always"`: in
    all) the two words hold a hash of the leaves, too, and from the first pass on one of other
    parameters that it reaches: a second per GB, and no more bytes.

    Args:
        mesh: the ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = weakref.ref(mesh)  # the mesh holds this object
        self._axis, self._control = mesh.data, mesh.control
        self._leaves: Any = WeakTensorKeyDictionary()
        self._leaves_by_number: list[weakref.ref[Tensor]] = []
        self._averaged_copies: Any = WeakTensorKeyDictionary()
        self._hooked_intermediates: Any = WeakTensorKeyDictionary()
        self._frozen: Any = WeakTensorKeyDictionary()
        self._delegated: Any = WeakTensorKeyDictionary()
        self._running_passes: dict[int, _BackwardPass] = {}
        self._paused = self._num_passes = 0

    @property
    def is_orphaned(self) -> bool:
        """Returns whether the mesh was garbage-collected; a graph may still hold hooks."""
        return self._mesh() is None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Switches averaging off in a block, which averages gradients itself."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def delegate(self, leaf: Tensor, wrapper: Any) -> None:
        """Leaves the gradient of a parameter to a wrapper (DDP) whenever that is armed."""
        self._delegated[leaf] = weakref.ref(wrapper)

    def register(self, x: Tensor) -> Tensor:
        """Registers a plain tensor whose gradient is to be averaged; returns the one to use.

        It is x itself, or a copy whose backward pass averages, if its leaves are not found.

        Args:
            x: a tensor that requires a gradient; the same on all ranks.
        """
        if x.is_leaf:
            self._register_leaf(x)
            return x
        version, averaged = self._averaged_copies.get(x, (None, None))
        if averaged is not None and version == x._version and averaged.requires_grad:
            return averaged  # type: ignore[no-any-return]
        leaves = _leaves_of(x)
        if leaves is None:
            averaged = _Average.apply(x, self)
            self._averaged_copies[x] = x._version, averaged
            return averaged  # type: ignore[no-any-return]
        for leaf in leaves:
            self._register_leaf(leaf)
        if leaves and x not in self._hooked_intermediates:
            self._hooked_intermediates[x] = True
            _hook_intermediate(x, leaves[0], self)
        return x

    def on_intermediate_gradient(
        self, x: Tensor | None, leaf: Any, g: Tensor
    ) -> Tensor | None:
        """Averages the gradient of a tensor with a history, if the script asks for it.

        Args:
            x: a registered tensor; None if only autograd still holds it.
            leaf: the autograd node of one of its leaves.
            g: the gradient of x, complete on this rank.
        """
        if self._paused:
            return None
        requested = x is not None and (
            x.retains_grad or len(x._backward_hooks or ()) > 1
        )
        if not requested:
            try:  # not on to the leaf: torch.autograd.grad of x
                requested = not torch._C._will_engine_execute_node(leaf)
            except RuntimeError:  # of the leaf, and of x perhaps
                requested = True
        return self.mean(g) if requested else None

    def compare_frozen(self, x: Tensor) -> None:
        """Compares a frozen parameter between ranks once, and takes rank 0's values."""
        if x not in self._frozen and x not in self._leaves:
            self._sync_from_rank0(x)
            self._frozen[x] = True

    def _sync_from_rank0(self, x: Tensor) -> None:
        mesh = self._mesh()
        if mesh is not None:
            comparer_of(mesh).sync_from_rank0(x)

    def _register_leaf(self, x: Tensor) -> None:
        leaf = self._leaves.get(x)
        if leaf is None:
            _check_whole(x)
            if x not in self._delegated:  # a wrapper has compared it
                self._sync_from_rank0(x)
            leaf = self._leaves[x] = _LeafState(len(self._leaves_by_number))
            self._leaves_by_number.append(weakref.ref(x))
        if leaf.hook is None and x.requires_grad:
            leaf.hook = _hook_leaf(x, self)

    def mean(self, g: Tensor) -> Tensor:
        """Returns the mean of a gradient over the ranks, differentiably if it is."""
        if g.layout != torch.strided:
            return self._sparse_mean(g)
        if g.requires_grad and torch.is_grad_enabled():
            return autograd.all_reduce(g / self._axis.size, self._axis)
        return collectives.all_reduce(g.detach() / self._axis.size, self._axis)

    def _sparse_mean(self, g: Tensor) -> Tensor:
        g = g.coalesce()
        counts = [
            r[0] for r in collectives.all_gather_counts([g._nnz()], self._control)
        ]
        index = collectives.all_gather_rows(
            g.indices().t().contiguous(), counts, self._axis
        )
        value = collectives.all_gather_rows(
            g.values() / self._axis.size, counts, self._axis
        )
        return torch.sparse_coo_tensor(index.t(), value, g.shape).coalesce()

    def on_leaf_gradient(self, x: Tensor, g: Tensor) -> Tensor | None:
        """Adds the gradient of a leaf to its bucket; returns what to accumulate instead."""
        if self._paused or self._is_averaged_by_wrapper(x):
            return None
        task_id = torch._C._current_graph_task_id()
        running = self._running_passes.get(task_id)
        if running is None:
            running = self._running_passes[task_id] = self._begin_pass(task_id)
        bucket = running.of.get(id(x))
        if bucket is None:
            return self.mean(g)
        if g.layout != torch.strided:  # later passes know it
            self._leaves[x].one_by_one = True
            running.sparse.add(id(x))
            return self.mean(g)
        bucket.slot(x).copy_(g.detach())
        bucket.missing -= 1
        self._send_full_buckets(running)
        if x.grad is not None:
            return torch.zeros_like(g)
        running.fresh.add(id(x))  # accumulated as it is, and overwritten by the mean
        return None

    def _is_averaged_by_wrapper(self, x: Tensor) -> bool:
        ref = self._delegated.get(x)
        wrapper = None if ref is None else ref()
        return wrapper is not None and wrapper.armed

    def _begin_pass(self, task_id: int) -> _BackwardPass:
        """Agrees with the other ranks on the leaves that this backward pass will reach."""
        found = [(k, ref()) for k, ref in enumerate(self._leaves_by_number)]
        leaves = {k: x for k, x in found if x is not None and x.requires_grad}
        marks = {k: reach for k, x in leaves.items() if (reach := self._how_reached(x))}
        due = self._is_due()
        copies = (
            {k: leaves[k] for k in sorted(marks)}
            if due and self._num_passes > 1
            else {}
        )
        alone = self._unsharded_parameters() if due else None
        every = self._agree_on_reached(marks, len(found), copies, alone)
        running = _BackwardPass()
        bulk = [leaves[k] for k in sorted(every, reverse=True) if every[k] == 1]
        arriving = {id(leaves[k]) for k in marks}
        for part in _split_into_buckets(bulk):
            bucket = _Bucket.of(part, arriving)
            running.buckets.append(bucket)
            running.of.update({id(p): bucket for p in part})
        torch.autograd.Variable._execution_engine.queue_callback(  # type: ignore[attr-defined]
            lambda: self._finish_pass(task_id)
        )
        return running

    def _how_reached(self, x: Tensor) -> int:
        """Returns 0 if the pass does not reach a leaf, 2 if it is averaged alone, else 1."""
        if self._is_averaged_by_wrapper(x):
            return 0
        node = torch.autograd.graph.get_gradient_edge(x).node
        try:
            if not torch._C._will_engine_execute_node(node):
                return 0
        except RuntimeError:  # torch.autograd.grad of it, where no gradient accumulates
            return 2
        post = getattr(x, "_post_accumulate_grad_hooks", None)
        alone = len(x._backward_hooks or ()) > 1 or post or torch.is_grad_enabled()
        alone = alone or self._leaves[x].one_by_one
        return 2 if alone else 1

    def _is_due(self) -> bool:
        """Counts a pass, and returns whether ranks compare replicated tensors in it."""
        mesh = self._mesh()
        self._num_passes += 1
        return mesh is not None and mesh.is_due(self._num_passes)

    def _unsharded_parameters(self) -> list[Tensor]:
        """Returns the parameters that this pass reaches, but no row-sharded operation uses.

        They work on values that are the same on all ranks, as a head does on pooled rows, and
        get the same gradients there without an average.
        """
        every = [p for p in gc.get_objects() if type(p) is torch.nn.Parameter]
        return [
            p
            for p in every
            if p.requires_grad
            and p not in self._leaves
            and p not in self._delegated
            and not hasattr(p, "is_shard")
            and self._will_reach(p)
        ]

    @staticmethod
    def _will_reach(x: Tensor) -> bool:
        try:
            node = torch.autograd.graph.get_gradient_edge(x).node
            return bool(torch._C._will_engine_execute_node(node))
        except RuntimeError:  # torch.autograd.grad of it
            return False

    def _agree_on_reached(
        self,
        marks: dict[int, int],
        known: int,
        copies: dict[int, Tensor],
        alone: list[Tensor] | None,
    ) -> dict[int, int]:
        """Returns the leaves that any rank reaches, and compares copies of them; collective."""
        flat = [part for k in sorted(marks) for part in (k, marks[k])]
        others = [len(alone), sum(map(digest, alone))] if alone else []  # in any order
        mark = random.fold(*flat, *map(digest, copies.values()), *others)
        if not collectives.differ(mark, self._control):
            return marks
        mesh = self._mesh()
        if copies and mesh is not None:
            comparer_of(mesh).resync_rounded(copies)
        if alone is not None and mesh is not None:
            comparer_of(mesh).check_unsharded(alone)
        mine = [marks.get(k, 0) for k in range(known)]
        every = collectives.all_gather_counts(mine, self._control)
        kinds = [{row[k] for row in every} for k in range(known)]
        # sent alone on one rank is sent alone on all; ranks that do not reach it cannot join
        bad = [k for k, kind in enumerate(kinds) if kind >= {0, 2}]
        if bad:
            ranks = [r for r, row in enumerate(every) if row[bad[0]]]
            raise RuntimeError(
                "reach the same parameters on all ranks: a backward pass (with hooks, "
                "create_graph=True, or torch.autograd.grad) reaches parameter number "
                f"{bad[0]} in order of first use on ranks {ranks} alone; multiply what "
                "is not used there by 0"
            )
        return {k: max(kind) for k, kind in enumerate(kinds) if max(kind)}

    def _send_full_buckets(self, running: _BackwardPass) -> None:
        """Starts the all-reduce of full buckets, in order."""
        while (
            running.sent < len(running.buckets)
            and running.buckets[running.sent].missing <= 0
        ):
            bucket = running.buckets[running.sent]
            if not running.sent:
                self._axis.ledger.event("begin", "gradients")
            bucket.buffer.div_(self._axis.size)
            bucket.pending = collectives.all_reduce_begin(
                bucket.buffer, self._axis, before=running.words
            )
            running.words += bucket.buffer.numel()
            running.sent += 1

    def _finish_pass(self, task_id: int) -> None:
        """Writes the averages to `.grad`, in place of this rank's gradients."""
        running = self._running_passes.pop(task_id)
        for bucket in running.buckets:
            bucket.missing = 0
        self._send_full_buckets(running)
        for bucket in running.buckets:
            bucket.buffer = bucket.pending.wait()
            for p in bucket.leaves:
                if id(p) not in running.sparse:
                    self._write(p, bucket.slot(p), id(p) in running.fresh)

    def _write(self, p: Tensor, mean: Tensor, fresh: bool) -> None:
        with torch.no_grad():
            if p.grad is None:
                p.grad = mean.clone()
            elif fresh:
                p.grad.copy_(mean)
            else:
                p.grad.add_(mean)


class _Average(torch.autograd.Function):
    """Returns its input, and averages the gradient over the ranks at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, averager: Averager) -> Tensor:
        ctx.averager = averager
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.averager.mean(g), None


@dataclass(eq=False)
class _Hook:
    """Passes the gradient of a leaf to an averager."""

    leaf: weakref.ref[Tensor]
    averager: Averager

    def __call__(self, g: Tensor) -> Tensor | None:
        leaf = self.leaf()
        if leaf is None or g is None:
            return None
        return self.averager.on_leaf_gradient(leaf, g)


def _hook_leaf(x: Tensor, averager: Averager) -> Any:
    """Hooks an averager to a leaf, and removes the hooks of meshes that are gone."""
    hooks: Any = x._backward_hooks or {}
    for key, hook in list(hooks.items()):
        if isinstance(hook, _Hook) and hook.averager.is_orphaned:
            del hooks[key]
    return _register_hook_first(x, _Hook(weakref.ref(x), averager))


def _register_hook_first(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Registers a hook on a tensor, ahead of those of the script."""
    with torch._C.DisableTorchFunctionSubclass():
        handle = x.register_hook(hook)
    hooks: Any = x._backward_hooks
    for key in [k for k in hooks or () if k != handle.id]:
        hooks[key] = hooks.pop(key)  # behind ours, where autograd looks: in the dict
    return handle


def _hook_intermediate(x: Tensor, leaf: Tensor, averager: Averager) -> None:
    """Hooks an averager to a tensor with a history."""
    tensor = weakref.ref(x)
    node = torch.autograd.graph.get_gradient_edge(leaf).node

    def average(g: Tensor) -> Tensor | None:
        return averager.on_intermediate_gradient(tensor(), node, g)

    _register_hook_first(x, average)


def _split_into_buckets(leaves: list[Tensor]) -> list[list[Tensor]]:
    """Splits leaves into buckets, each of one dtype and device."""
    total = sum(p.numel() * p.element_size() for p in leaves)
    limit = max(total / BUCKETS, MIN_BUCKET_BYTES)
    parts: list[list[Tensor]] = []
    size, kind = 0.0, None
    for p in leaves:
        if not parts or kind != (p.dtype, p.device) or size >= limit:
            parts.append([])
            size, kind = 0.0, (p.dtype, p.device)
        parts[-1].append(p)
        size += p.numel() * p.element_size()
    return parts


def _leaves_of(x: Tensor) -> list[Tensor] | None:
    """Returns the leaves of a tensor's history, up to global sums; None if it is too long."""
    node: Any = x.grad_fn
    queue: list[Any] = [node]
    seen: set[Any] = {node}
    leaves: list[Tensor] = []
    while queue:
        node = queue.pop()
        if len(seen) > _MAX_HISTORY:
            return None
        if isinstance(node, autograd.SUMMED):
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
            continue
        for after, _ in () if node is None else node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                queue.append(after)
    return leaves


def _check_whole(x: Tensor) -> None:
    """Raises if torch shards a parameter, or frees it after use, as FSDP does.

    Raises:
        TypeError: naming what shards it.
    """
    frame = inspect.currentframe()
    found: list[type] = [type(x)]
    while frame is not None:
        found.append(type(frame.f_locals.get("self")))
        frame = frame.f_back
    for kind in (base for one in found for base in one.__mro__):
        if kind.__module__.startswith(
            ("torch.distributed.fsdp", "torch.distributed.tensor")
        ):
            raise TypeError(
                "leave out FSDP (fully_shard, FullyShardedDataParallel) and tensor parallelism "
                f"({kind.__name__} here) of a model on a share: its rows are sharded, and its "
                "parameters are whole on every rank. Their gradients are averaged without a "
                "wrapper"
            )


def averager_of(mesh: Mesh) -> Averager:
    """Returns the `Averager` of a mesh."""
    if mesh.averager is None:
        mesh.averager = Averager(mesh)
    return mesh.averager  # type: ignore[no-any-return]


def as_replicated(x: Any, mesh: Any) -> Any:
    """Returns a replicated operand of row-sharded data, with its gradient averaged over ranks.

    Other values, and tensors that require no gradient, are returned as they are.
    """
    if not isinstance(mesh, Mesh) or mesh.world.size == 1:
        return x
    plain = isinstance(x, Tensor) and not getattr(type(x), "_spread", False)
    if plain and x.requires_grad:
        check_transforms()
        return averager_of(mesh).register(x)
    return x


def check_transforms() -> None:
    """Raises inside torch.func and torch.vmap; see `refuse_transforms`."""
    if torch._C._functorch.maybe_current_level() is not None:
        refuse_transforms()


def refuse_transforms() -> None:
    """Raises the error of torch.func and torch.vmap, which would use this rank's rows alone.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        "torch.func (grad, vjp, jvp, jacrev, hessian) and torch.vmap do not ask row-sharded "
        "tensors, and would take this rank's rows for all of them: use loss.backward(), "
        "torch.autograd.grad, or torch.autograd.functional.vjp and hvp; or compute with "
        "ordinary tensors alone (x.full_tensor() has all rows)"
    )


def refuse_export() -> None:
    """Raises the error of torch.export, which would use this rank's rows alone.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        "give torch.export ordinary tensors, such as those of the data before "
        "pdc.partition: of a share it would take this rank's rows for all of them"
    )
