"""Averages the gradients of what all ranks hold a copy of, once per backward pass.

[Note: meetings] A plain tensor that requires a gradient *meets* row-sharded data where an
operation has both among its operands. Each rank then computes a part of its gradient, and
the mean over ranks is the gradient of one process ([Note: gradients] in `comm/autograd.py`).
A leaf is known from its first meeting on: its whole gradient is averaged, whatever else
it was used for, since terms that every rank repeats are their own mean. A tensor with a
history is averaged through its leaves, where these are found in a few steps and nobody asks
for its own gradient (`torch.autograd.grad`, a hook, `retain_grad`), and at the meeting
otherwise. Results of global reductions need neither.

[Note: order of buckets] Before the first gradient of a backward pass is averaged, ranks
compare, in two words, which leaves it will reach. Gradients travel in buckets of about a
quarter of them, in the reverse order of the leaves' first meetings, each as soon as it and
those before it are full; what a rank has no gradient for counts as zero. So all ranks send
the same buckets in the same order, whatever order gradients come in.

Hooks that a script puts on a leaf see the average: a leaf with hooks of its own, a backward
pass with `create_graph=True`, and `torch.autograd.grad` are averaged one by one, at once.
"""

from __future__ import annotations

import contextlib
import gc
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
SMALLEST = 1 << 14  # bytes of a bucket: below, latency is dearer than what overlaps
_STEPS = 64  # of a tensor's history that are looked through for its leaves


@dataclass(eq=False)
class _Leaf:
    """Holds a leaf that has met row-sharded data: its number among them, and its hook."""

    number: int
    hook: Any = None
    one_by_one: bool = False


@dataclass(eq=False)
class _Bucket:
    """Holds gradients that travel together, side by side in one buffer."""

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
class _Pass:
    """Holds the state of a backward pass under way: what it averages, and how far it is."""

    buckets: list[_Bucket] = field(default_factory=list)
    of: dict[int, _Bucket] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)  # had no gradient before
    sparse: set[int] = field(default_factory=set)
    sent: int = 0
    words: int = 0


class Averager:
    """Averages gradients over the ranks of a mesh; see the notes of this file.

    Price: an all-reduce of two words per backward pass that reaches leaves that have met
    row-sharded data, and one of their gradients, in pieces. The first meeting of a leaf costs
    an all-gather of a hash and a shape. In passes 2, 4, 8 and so on (`check="always"`: in
    all) the two words hold a hash of the leaves, too, and from the first pass on one of other
    parameters that it reaches: a second per GB, and no more bytes.

    Args:
        mesh: the ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = weakref.ref(mesh)  # which has this
        self._axis, self._control = mesh.data, mesh.control
        self._leaves: Any = WeakTensorKeyDictionary()
        self._order: list[weakref.ref[Tensor]] = []
        self._met: Any = WeakTensorKeyDictionary()
        self._watched: Any = WeakTensorKeyDictionary()
        self._frozen: Any = WeakTensorKeyDictionary()
        self._elsewhere: Any = WeakTensorKeyDictionary()
        self._passes: dict[int, _Pass] = {}
        self._paused = self._begun = 0

    @property
    def mesh_is_gone(self) -> bool:
        """Returns whether the mesh was collected; a graph may still have its gradients."""
        return self._mesh() is None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves gradients as they are in a block, which averages them itself."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def averaged_by(self, leaf: Tensor, wrapper: Any) -> None:
        """Leaves a parameter to a wrapper (DDP) whenever that is armed."""
        self._elsewhere[leaf] = weakref.ref(wrapper)

    def meet(self, x: Tensor) -> Tensor:
        """Returns a plain tensor as it has to meet row-sharded data.

        Args:
            x: requires a gradient; the same on all ranks.
        """
        if x.is_leaf:
            self._register(x)
            return x
        version, met = self._met.get(x, (None, None))
        if met is not None and version == x._version and met.requires_grad:
            return met  # type: ignore[no-any-return]
        leaves = _leaves_of(x)
        if leaves is None:
            met = _Average.apply(x, self)
            self._met[x] = x._version, met
            return met  # type: ignore[no-any-return]
        for leaf in leaves:
            self._register(leaf)
        if leaves and x not in self._watched:
            self._watched[x] = True
            _watched(x, leaves[0], self)
        return x

    def passed(self, x: Tensor | None, leaf: Any, g: Tensor) -> Tensor | None:
        """Takes a gradient on its way to leaves; averages it where it is asked for.

        Args:
            x: has met row-sharded data; None if only autograd remembers it.
            leaf: the node of one of its leaves.
            g: the gradient of x, complete on this rank.
        """
        if self._paused:
            return None
        asked = x is not None and (x.retains_grad or len(x._backward_hooks or ()) > 1)
        if not asked:
            try:  # not on to the leaf: torch.autograd.grad of x
                asked = not torch._C._will_engine_execute_node(leaf)
            except RuntimeError:  # of the leaf, and of x perhaps
                asked = True
        return self.mean(g) if asked else None

    def know(self, x: Tensor) -> None:
        """Compares a frozen parameter between ranks, once; rank 0's is taken."""
        if x not in self._frozen and x not in self._leaves:
            self._equalise(x)
            self._frozen[x] = True

    def _equalise(self, x: Tensor) -> None:
        mesh = self._mesh()
        if mesh is not None:
            comparer_of(mesh).equalise(x)

    def _register(self, x: Tensor) -> None:
        leaf = self._leaves.get(x)
        if leaf is None:
            if x not in self._elsewhere:  # a wrapper has seen to it
                self._equalise(x)
            leaf = self._leaves[x] = _Leaf(len(self._order))
            self._order.append(weakref.ref(x))
        if leaf.hook is None and x.requires_grad:
            leaf.hook = _hooked(x, self)

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

    def arrived(self, x: Tensor, g: Tensor) -> Tensor | None:
        """Takes a gradient that is complete on this rank; returns what stands for it."""
        if self._paused or self._left_to_wrapper(x):
            return None
        task = torch._C._current_graph_task_id()
        run = self._passes.get(task)
        if run is None:
            run = self._passes[task] = self._begin(task)
        bucket = run.of.get(id(x))
        if bucket is None:
            return self.mean(g)
        if g.layout != torch.strided:  # known from the first time on
            self._leaves[x].one_by_one = True
            run.sparse.add(id(x))
            return self.mean(g)
        bucket.slot(x).copy_(g.detach())
        bucket.missing -= 1
        self._send(run)
        if x.grad is not None:
            return torch.zeros_like(g)
        run.fresh.add(id(x))  # taken as it is, and written over when the mean is there
        return None

    def _left_to_wrapper(self, x: Tensor) -> bool:
        ref = self._elsewhere.get(x)
        wrapper = None if ref is None else ref()
        return wrapper is not None and wrapper.armed

    def _begin(self, task: int) -> _Pass:
        """Agrees with the other ranks on what this backward pass will reach."""
        found = [(k, ref()) for k, ref in enumerate(self._order)]
        leaves = {k: x for k, x in found if x is not None and x.requires_grad}
        marks = {k: how for k, x in leaves.items() if (how := self._reached(x))}
        due = self._is_due()
        copies = (
            {k: leaves[k] for k in sorted(marks)} if due and self._begun > 1 else {}
        )
        alone = self._alone() if due else None
        every = self._union(marks, len(found), copies, alone)
        run = _Pass()
        bulk = [leaves[k] for k in sorted(every, reverse=True) if every[k] == 1]
        arriving = {id(leaves[k]) for k in marks}
        for part in _parts(bulk):
            bucket = _Bucket.of(part, arriving)
            run.buckets.append(bucket)
            run.of.update({id(p): bucket for p in part})
        torch.autograd.Variable._execution_engine.queue_callback(  # type: ignore[attr-defined]
            lambda: self._finish(task)
        )
        return run

    def _reached(self, x: Tensor) -> int:
        """Returns 0 if this pass does not reach a leaf, 1 if it does, 2 if one by one."""
        if self._left_to_wrapper(x):
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
        """Counts a pass, and returns whether ranks compare what they hold copies of in it."""
        mesh = self._mesh()
        self._begun += 1
        now = self._begun & (self._begun - 1) == 0
        check = "never" if mesh is None else mesh.check
        return check == "always" or (check == "first" and now)

    def _alone(self) -> list[Tensor]:
        """Returns the parameters that this pass reaches, and that no row-sharded data has met.

        They work on what is the same on all ranks, as a head does on pooled values, and
        get the same gradients there without an average.
        """
        every = [p for p in gc.get_objects() if type(p) is torch.nn.Parameter]
        return [
            p
            for p in every
            if p.requires_grad
            and p not in self._leaves
            and p not in self._elsewhere
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

    def _union(
        self,
        marks: dict[int, int],
        known: int,
        copies: dict[int, Tensor],
        alone: list[Tensor] | None,
    ) -> dict[int, int]:
        """Returns which leaves any rank reaches; compares copies; collective."""
        flat = [part for k in sorted(marks) for part in (k, marks[k])]
        others = [len(alone), sum(map(digest, alone))] if alone else []  # in any order
        mark = random.fold(*flat, *map(digest, copies.values()), *others)
        told = torch.tensor([mark, -mark])
        high, low = collectives.all_reduce(told, self._control, "max").tolist()
        if high == -low:
            return marks
        mesh = self._mesh()
        if copies and mesh is not None:
            comparer_of(mesh).realign(copies)
        if alone is not None and mesh is not None:
            comparer_of(mesh).check_alone(alone)
        mine = [marks.get(k, 0) for k in range(known)]
        every = collectives.all_gather_counts(mine, self._control)
        kinds = [{row[k] for row in every} for k in range(known)]
        # one by one on one rank is one by one on all; a leaf that is not reached has no turn
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

    def _send(self, run: _Pass) -> None:
        """Starts to sum the buckets that are full, none before those ahead of it."""
        while run.sent < len(run.buckets) and run.buckets[run.sent].missing <= 0:
            bucket = run.buckets[run.sent]
            if not run.sent:
                self._axis.ledger.event("begin", "gradients")
            bucket.buffer.div_(self._axis.size)
            bucket.pending = collectives.all_reduce_begin(
                bucket.buffer, self._axis, before=run.words
            )
            run.words += bucket.buffer.numel()
            run.sent += 1

    def _finish(self, task: int) -> None:
        """Writes the averages where the backward pass has put this rank's parts."""
        run = self._passes.pop(task)
        for bucket in run.buckets:
            bucket.missing = 0
        self._send(run)
        for bucket in run.buckets:
            bucket.buffer = bucket.pending.wait()
            for p in bucket.leaves:
                if id(p) not in run.sparse:
                    self._write(p, bucket.slot(p), id(p) in run.fresh)

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
    """Has an averager see the gradient of a leaf, as long as a graph may hold the leaf."""

    leaf: weakref.ref[Tensor]
    averager: Averager

    def __call__(self, g: Tensor) -> Tensor | None:
        leaf = self.leaf()
        if leaf is None or g is None:
            return None
        return self.averager.arrived(leaf, g)


def _hooked(x: Tensor, averager: Averager) -> Any:
    """Has the averager see the gradient of a leaf, in place of those of meshes that went."""
    hooks: Any = x._backward_hooks or {}
    for key, hook in list(hooks.items()):
        if isinstance(hook, _Hook) and hook.averager.mesh_is_gone:
            del hooks[key]
    return _first_hook(x, _Hook(weakref.ref(x), averager))


def _first_hook(x: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Puts a hook on a tensor, ahead of those that the script has put there."""
    with torch._C.DisableTorchFunctionSubclass():
        handle = x.register_hook(hook)
    hooks: Any = x._backward_hooks
    for key in [k for k in hooks or () if k != handle.id]:
        hooks[key] = hooks.pop(key)  # behind ours, where autograd looks: in the dict
    return handle


def _watched(x: Tensor, leaf: Tensor, averager: Averager) -> None:
    """Has the averager see gradients of a tensor with a history."""
    tensor = weakref.ref(x)
    node = torch.autograd.graph.get_gradient_edge(leaf).node

    def average(g: Tensor) -> Tensor | None:
        return averager.passed(tensor(), node, g)

    _first_hook(x, average)


def _parts(leaves: list[Tensor]) -> list[list[Tensor]]:
    """Cuts leaves into buckets, each of one dtype and device."""
    total = sum(p.numel() * p.element_size() for p in leaves)
    limit = max(total / BUCKETS, SMALLEST)
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
    """Returns the leaves of a tensor's history, up to global sums; None if it is long."""
    node: Any = x.grad_fn
    queue: list[Any] = [node]
    seen: set[Any] = {node}
    leaves: list[Tensor] = []
    while queue:
        node = queue.pop()
        if len(seen) > _STEPS:
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


def averager_of(mesh: Mesh) -> Averager:
    """Returns what averages gradients for a mesh."""
    if mesh.averager is None:
        mesh.averager = Averager(mesh)
    return mesh.averager  # type: ignore[no-any-return]


def meet(x: Any, mesh: Any) -> Any:
    """Returns a plain tensor as it has to meet row-sharded data; others as they are.

    Tells the ranks of a mesh that its gradient has to be averaged, if it has one.
    """
    if not isinstance(mesh, Mesh) or mesh.world.size == 1:
        return x
    plain = isinstance(x, Tensor) and not getattr(type(x), "_spread", False)
    if plain and x.requires_grad:
        check_transforms()
        return averager_of(mesh).meet(x)
    return x


def check_transforms() -> None:
    """Refuses to go on inside torch.func and torch.vmap; see `refuse_transforms`."""
    if torch._C._functorch.maybe_current_level() is not None:
        refuse_transforms()


def refuse_transforms() -> None:
    """Refuses what torch.func and torch.vmap make of a function: they take this rank's rows.

    Raises:
        TypeError: always.
    """
    raise TypeError(
        "torch.func (grad, vjp, jvp, jacrev, hessian) and torch.vmap do not ask row-sharded "
        "tensors, and would take this rank's rows for all of them: use loss.backward(), "
        "torch.autograd.grad, or torch.autograd.functional.vjp and hvp; or compute with "
        "ordinary tensors alone (x.full_tensor() has all rows)"
    )
