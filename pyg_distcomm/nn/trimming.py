"""Computes only the rows of a minibatch that are read, where that changes no answer.

[Note: trimming] Of a sampled minibatch a script reads the seeds, the first rows of what a
model returns. Layer k of L needs only the rows that later layers read: R_0, the seeds, for
the last; R_d and the sources of edges into R_d before that. Whether a model may be trimmed so
is observed, for training and evaluation apart. In its first forward pass on a sampled
minibatch all rows are computed, and every operation on what a layer returned is watched
(`LeadingRows`): which layers feed which, and whether each operation works row by row, or
reads the seeds alone. Anything that reads other rows (batch norm in training, a pooling, a
loss of all rows, a hidden layer read beyond the seeds) switches trimming off for the model,
in that mode, and `trimming_of(model)` names it. Otherwise later passes compute the leading
rows alone. Their tensors still have the shape of all rows; an operation that reads others
after all (another branch of the model, say) is given them, computed then from the inputs, and
switches trimming off. Dropout masks are drawn for the rows that are computed: of the same
distribution, from another place of the random stream.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.graph.local_adjacency import LocalAdjacency
from pyg_distcomm.tensor.op_tables import BY_DIM, FACTS, ROWWISE, base_name
from pyg_distcomm.tensor.row_sharded import eager, tree_map

# What is known of a model -------------------------------------------------------------


@dataclass(eq=False)
class Mode:
    """What was observed of a model, in training or in evaluation.

    Args:
        depths: for each call of a layer, how many layers follow it at most; None before
            the first pass.
        blocked: what reads rows that trimming leaves out.
    """

    depths: list[int] | None = None
    blocked: str | None = None


class Trimmer:
    """The hooks of one model, and what they have observed; see [Note: trimming]."""

    def __init__(self) -> None:
        self.modes = {True: Mode(), False: Mode()}

    def begin(self, model: torch.nn.Module, _: Any) -> None:
        """Begins a forward pass; a pass of a model within another's is part of that."""
        if torch.compiler.is_compiling() or torch.jit._trace.is_tracing():
            return
        now = _pass.get()
        if now is None:
            _pass.set(Pass(self.modes[model.training]))
        else:
            now.within += 1

    def end(self, model: torch.nn.Module, _: Any, out: Any) -> None:
        """Ends it, also where it has failed."""
        if torch.compiler.is_compiling() or torch.jit._trace.is_tracing():
            return
        now = _pass.get()
        if now is not None and now.within:
            now.within -= 1
        elif now is not None:
            now.finish()
            _pass.set(None)

    def __deepcopy__(self, memo: Any) -> Trimmer:
        return Trimmer()

    def __reduce__(self) -> Any:
        return Trimmer, ()


class Pass:
    """One forward pass of a model that may be trimmed.

    Args:
        mode: what is known of the model.
    """

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.within = 0  # models under way that are parts of this one
        self.calls: list[frozenset[int]] = []  # those whose rows each call reads

    @property
    def trims(self) -> bool:
        """Whether rows are left out."""
        return self.mode.blocked is None and self.mode.depths is not None

    def finish(self) -> None:
        """Concludes which layers follow which."""
        if self.mode.depths is not None or not self.calls or self.mode.blocked:
            return
        depths = [0] * len(self.calls)
        for call in reversed(range(len(self.calls))):
            for earlier in self.calls[call]:
                depths[earlier] = max(depths[earlier], depths[call] + 1)
        self.mode.depths = depths


_pass: ContextVar[Pass | None] = ContextVar("the forward pass", default=None)


def install(model: torch.nn.Module) -> None:
    """Has a model compute only the rows that are read; see [Note: trimming]."""
    if _trimmer_of(model) is None:
        trimmer = Trimmer()
        model.register_forward_pre_hook(trimmer.begin)
        model.register_forward_hook(trimmer.end, always_call=True)


def remove(model: torch.nn.Module) -> None:
    """Has a model compute all rows."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Trimmer):
                del hooks[key]
                model._forward_hooks_always_called.pop(key, None)


def _trimmer_of(model: torch.nn.Module) -> Trimmer | None:
    owners = (getattr(h, "__self__", None) for h in model._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Trimmer)), None)


def trimming_of(model: torch.nn.Module) -> str:
    """Says whether a converted model computes only the rows that are read, and why not.

    "on", "off: ..." with what reads other rows, or "not yet known" before its first
    minibatch in the mode (training or evaluation) that it is in.
    """
    trimmer = _trimmer_of(model)
    if trimmer is None:
        return "off: pdc.convert(model, trim=True) switches it on"
    mode = trimmer.modes[model.training]
    if mode.blocked is not None:
        return f"off: {mode.blocked}"
    return "not yet known" if mode.depths is None else "on"


# Rows that a model has computed -------------------------------------------------------


class Deferred:
    """All rows of a tensor whose leading rows are computed: on demand, from its inputs."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._todo: Any = func, args, kwargs, torch.is_grad_enabled()
        self._value: Any = None

    def value(self) -> Any:
        """Computes them once."""
        if self._todo is not None:
            func, args, kwargs, graded = self._todo
            with torch.set_grad_enabled(graded):
                self._value = func(*tree_map(_value, args), **tree_map(_value, kwargs))
            self._todo = None
        return self._value


def _value(item: Any) -> Any:
    return item.value() if isinstance(item, Deferred) else item


@dataclass(eq=False)
class _Origin:
    """Where leading rows come from.

    Args:
        mode: of the model that computed them.
        total: the number of all rows.
        limit: how many of them may be read.
        calls: the calls of layers whose outputs they are made of.
        every: all rows; None if the tensor has them.
    """

    mode: Mode
    total: int
    limit: int
    calls: frozenset[int]
    every: Deferred | None = None


@eager
class LeadingRows(torch.Tensor):
    """The first rows of a tensor `[n, ...]` that a model has computed; reads as all n."""

    origin: _Origin

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})


def _wrap(rows: Tensor, origin: _Origin) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        out = rows.as_subclass(LeadingRows)
    out.origin = origin
    return out


def leading(value: Any) -> Any:
    """Returns the rows that are computed, as an ordinary tensor; anything else as it is."""
    if not isinstance(value, LeadingRows):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def whole(tree: Any, what: str) -> Any:
    """Returns arguments with all rows of them; `what` reads more than leading rows."""

    def every(value: Any) -> Any:
        if not isinstance(value, LeadingRows):
            return value
        origin = value.origin
        if origin.mode.blocked is None:
            origin.mode.blocked = f"{what} reads rows that are not of the seeds"
        return leading(value) if origin.every is None else origin.every.value()

    return tree_map(every, tree)


def refuse(adjacency: LocalAdjacency, what: str) -> None:
    """Switches trimming off for the model under way, if it is run on a minibatch."""
    now = _pass.get()
    if now is not None and adjacency.batch is not None and now.mode.blocked is None:
        now.mode.blocked = f"{what} is not trimmed"


def call(
    adjacency: LocalAdjacency | None,
    edge_index: Any,
    x: Any,
    compute: Callable[[Any, Any, int | None], Any],
) -> Any:
    """Runs one layer, on the rows that are read.

    Args:
        adjacency: what is kept beside its edges; None if it runs by PyG's path.
        edge_index: the edges.
        x: its features, a tensor or a pair.
        compute: the layer, of sources, targets, and how many targets to compute; None
            computes all, and is the only choice for sources that are not all there.
    """
    source, target = x if isinstance(x, (tuple, list)) else (x, x)
    now = _pass.get()
    batch = None if adjacency is None else adjacency.batch
    tracked = [t for t in (source, target) if isinstance(t, LeadingRows)]
    if now is None or batch is None or adjacency is None or now.mode.blocked:
        if batch is not None and now is None and batch.read_by is not None:
            mode = batch.read_by()
            if mode is not None and mode.blocked is None:
                mode.blocked = "a layer runs outside of its model's forward"
        return _on_all(compute, source, target)
    sizes = [batch.sizes[kind] for kind in adjacency.ends]
    found = [None if t is None else _total(t) for t in (source, target)]
    own = all(t.origin.mode is now.mode for t in tracked)
    if not own or found[0] != sizes[0] or found[1] not in (None, sizes[1]):
        return _on_all(compute, source, target)
    batch.read_by = weakref.ref(now.mode)
    at = len(now.calls)
    now.calls.append(frozenset().union(*(t.origin.calls for t in tracked)))
    first = batch.rows(0)
    if first is None:
        return _on_all(compute, source, target)
    origin = _Origin(now.mode, sizes[1], first[adjacency.ends[1]], frozenset([at]))
    if not now.trims:
        out = compute(leading(source), leading(target), None)
        return _wrap(out, origin) if isinstance(out, Tensor) else out
    rows = _rows_of(now, adjacency, edge_index, at, source, target)
    if rows is None:
        return _on_all(compute, source, target)
    out = compute(leading(source), leading(target), rows)
    args = tuple(map(_deferred, (source, target)))
    origin.every = Deferred(functools.partial(_again, compute), args, {})
    return _wrap(out, origin)


def _again(compute: Callable[..., Any], source: Any, target: Any) -> Any:
    return compute(source, target, None)


def _rows_of(
    now: Pass,
    adjacency: LocalAdjacency,
    edge_index: Any,
    at: int,
    source: Any,
    target: Any,
) -> int | None:
    """Returns how many rows a call computes, if it has what it needs for them."""
    batch, depths = adjacency.batch, now.mode.depths
    assert batch is not None
    assert depths is not None
    reads = batch.rows(depths[at]) if at < len(depths) else None
    sizes = [batch.sizes[kind] for kind in adjacency.ends]
    edges = adjacency.grouped(edge_index, *sizes)
    if reads is None or edges is None:
        return None
    rows = reads[adjacency.ends[1]]
    here = [None if t is None else len(leading(t)) for t in (source, target)]
    needed = edges.prefix(rows).num_read, rows
    enough = all(n is None or n >= k for n, k in zip(here, needed, strict=True))
    return rows if enough else None


def _on_all(compute: Callable[..., Any], source: Any, target: Any) -> Any:
    if target is source:
        source = target = whole(source, "a layer")
    else:
        source, target = whole((source, target), "a layer")
    return compute(source, target, None)


def _total(t: Tensor) -> int:
    return t.origin.total if isinstance(t, LeadingRows) else len(t)


def _deferred(value: Any) -> Any:
    """Returns what all rows of a value are to be computed from."""
    if not isinstance(value, LeadingRows):
        return value
    return value.origin.every or leading(value)


# Operations on them -------------------------------------------------------------------

_SIZES = frozenset("shape size numel nelement nbytes len".split())
_DROPOUTS = frozenset("dropout alpha_dropout rrelu".split())
_ROWWISE = (ROWWISE | _DROPOUTS) - frozenset(
    "gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell bilinear data rand type".split()
)
_OF_WEIGHTS = frozenset("linear embedding prelu matmul mm layer_norm".split())
_JOINS = {"cat": 0, "concat": 0, "concatenate": 0}


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    name = base_name(func)
    if name in FACTS - _SIZES:
        return _plainly(func, args, kwargs)
    if name in _SIZES and isinstance(args[0], LeadingRows):
        return _size(func, name, *args, **kwargs)
    if name in ("getitem", "narrow", "index_select"):
        found = _picked(name, args, kwargs)
        if found is not None:
            return found
    if _by_row(func, name, args, kwargs):
        found = _row_by_row(func, name, args, kwargs)
        if found is not None:
            return found
    every, every_kw = whole((args, kwargs), name)
    out = _plainly(func, every, every_kw)
    if args and isinstance(args[0], LeadingRows) and args[0].origin.every is not None:
        if name == "setitem" or _in_place(func, args, kwargs):
            local = leading(args[0])  # changes with the rows that the operation changed
            local.copy_(every[0][: len(local)])
    return out


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _size(func: Any, name: str, t: LeadingRows, *args: Any, **kwargs: Any) -> Any:
    """Returns sizes as those of all rows."""
    local = leading(t)
    shape = torch.Size([t.origin.total, *local.shape[1:]])
    if name == "len":
        return shape[0]
    if name == "shape":
        return shape
    if name == "size":
        dim = args[0] if args else kwargs.get("dim")
        return shape if dim is None else shape[dim]
    return shape.numel() * (local.element_size() if name == "nbytes" else 1)


def _picked(name: str, args: Any, kwargs: Any) -> Any:
    """Returns rows that a script picks, as an ordinary tensor; None if others are read."""
    t = args[0]
    if not isinstance(t, LeadingRows):
        return None
    local, limit = leading(t), t.origin.limit
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        head = index[0] if index else Ellipsis
        if head is Ellipsis or (isinstance(head, slice) and head == slice(None)):
            if len(index) < 2 or any(_is_array(i) or i is None for i in index[1:]):
                return None
            rest = (slice(None) if head is not Ellipsis else head, *index[1:])
            if head is Ellipsis and len(index) >= local.dim() + 1:
                return None
            return _row_by_row(lambda s: s[rest], "getitem", (t,), {})
        if isinstance(head, slice) and head.step in (None, 1):
            start, stop, _ = head.indices(t.origin.total)
            return local[args[1]] if start >= 0 and stop <= limit else None
        if isinstance(head, int):
            return local[args[1]] if 0 <= head < limit else None
        rows = head
    else:
        if kwargs or args[1] not in (0, -local.dim()):
            return None
        if name == "narrow":
            start, count = args[2:]
            inside = isinstance(start, int) and start >= 0 and start + count <= limit
            return local.narrow(0, start, count) if inside else None
        rows = args[2]
    if not isinstance(rows, Tensor) or isinstance(rows, LeadingRows):
        return None
    if rows.dtype == torch.bool:
        if rows.dim() != 1 or len(rows) != t.origin.total or bool(rows[limit:].any()):
            return None
        if name == "getitem" and isinstance(args[1], tuple):
            return local[(rows[: len(local)], *args[1][1:])]
        return local[rows[: len(local)]]
    if rows.dtype not in (torch.int64, torch.int32) or not rows.numel():
        return None
    low, high = (int(v) for v in rows.aminmax())
    if low < 0 or high >= limit:
        return None
    return local[args[1]] if name == "getitem" else local.index_select(0, rows)


def _is_array(index: Any) -> bool:
    return not isinstance(index, (int, slice)) and index is not Ellipsis


def _by_row(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Tells whether an operation computes each row from the same row of its operands."""
    if "out" in kwargs:
        return False
    first = args[0] if args else None
    dim = leading(first).dim() if isinstance(first, LeadingRows) else None
    if name in _JOINS:
        parts = args[0]
        at = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        dims = {p.dim() for p in parts if isinstance(p, Tensor)}
        return isinstance(at, int) and len(dims) == 1 and at % max(dims) != 0
    if name in _OF_WEIGHTS:
        others = [*args[1:], *kwargs.values()]
        if dim is None or any(isinstance(v, LeadingRows) for v in others):
            return False
        if name == "layer_norm":
            return len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) < dim
        if name in ("matmul", "mm"):
            return dim == 2 and len(args) == 2 and args[1].dim() == 2
        return dim >= 2 or name == "embedding"
    if name in _ROWWISE:
        return True
    if name == "batch_norm":
        training = args[5] if len(args) > 5 else kwargs.get("training", False)
        return dim is not None and not training
    if dim is None:
        return False
    if name in BY_DIM:
        place, default = BY_DIM[name]
        at = kwargs.get("dim", args[place] if len(args) > place else default)
        ints = at if isinstance(at, (tuple, list)) else [at]
        return all(isinstance(k, int) and k % dim for k in ints) and bool(ints)
    if name in ("unsqueeze", "squeeze"):
        at = args[1] if len(args) > 1 else kwargs.get("dim")
        dim += name == "unsqueeze"
        return isinstance(at, int) and at % dim != 0
    if name == "flatten":
        at = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
        return at % dim != 0
    if name in ("view", "reshape"):
        shape = _shape_of(args)
        return bool(shape) and all(isinstance(k, int) for k in shape)
    return False


def _shape_of(args: Any) -> Any:
    return args[1] if isinstance(args[1], (tuple, list)) else args[1:]


def _in_place(func: Any, args: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"):
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    code = getattr(func, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    given = dict(zip(names, args, strict=False)).get("inplace", False)
    return bool(given or kwargs.get("inplace", False))


def _row_by_row(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Runs an operation on the rows that are there; None if rows do not fit each other."""
    tracked: list[LeadingRows] = []
    tree_map(lambda v: _collect(v, tracked), (args, kwargs))
    first = tracked[0].origin
    same = all(
        t.origin.mode is first.mode and t.origin.total == first.total for t in tracked
    )
    if not same or len({leading(t).dim() for t in tracked}) > 1:
        return None
    rows = min(len(leading(t)) for t in tracked)
    changes = _in_place(func, args, kwargs)
    if changes:
        target = args[0]
        if not isinstance(target, LeadingRows) or len(leading(target)) > rows:
            return None
    try:
        local_args, local_kwargs = _cut(name, args, kwargs, rows, tracked[0])
    except _UnfitRows:
        return None
    every: Any = None
    if any(t.origin.every is not None for t in tracked):
        todo = functools.partial(_on_copy, func) if changes else func
        every = Deferred(todo, *tree_map(_deferred, (args, kwargs)))
    calls = frozenset().union(*(t.origin.calls for t in tracked))
    limit = min(t.origin.limit for t in tracked)
    origin = _Origin(first.mode, first.total, limit, calls, every)
    out = _plainly(func, local_args, local_kwargs)
    if changes:
        args[0].origin = origin
        return args[0]
    if isinstance(out, Tensor):
        return _wrap(out, origin) if out.dim() and len(out) == rows else None
    parts = [
        _wrap(part, _part(origin, k)) if isinstance(part, Tensor) else part
        for k, part in enumerate(out)
    ]
    return type(out)(parts)


class _UnfitRows(Exception):
    """Operands whose rows do not fit each other."""


def _cut(
    name: str, args: Any, kwargs: Any, rows: int, like: LeadingRows
) -> tuple[Any, Any]:
    """Returns the arguments of an operation, cut to their first `rows` rows."""
    dim, total = leading(like).dim(), like.origin.total
    weights = name in _OF_WEIGHTS or name == "batch_norm"

    def cut(value: Any) -> Any:
        if isinstance(value, LeadingRows):
            return (
                leading(value)[:rows] if len(leading(value)) > rows else leading(value)
            )
        if not isinstance(value, Tensor) or weights or value.dim() < dim:
            return value
        if value.dim() == dim and len(value) == total and total != 1:
            return value[:rows]
        if value.dim() > dim or len(value) != 1:
            raise _UnfitRows
        return value

    local_args, local_kwargs = tree_map(cut, (args, kwargs))
    if name in ("view", "reshape"):
        shape = list(_shape_of(args))
        if shape[0] not in (-1, total) or (-1 in shape[1:] and not rows):
            raise _UnfitRows
        if -1 not in shape[1:]:
            each = torch.Size(shape[1:]).numel()
            if each != local_args[0][:1].numel() and rows:
                raise _UnfitRows
        local_args = local_args[0], [rows, *shape[1:]]
    return local_args, local_kwargs


def _part(origin: _Origin, place: int) -> _Origin:
    """Returns the origin of one of several tensors that an operation returned."""
    every = origin.every
    if every is not None:
        every = Deferred(lambda found: found[place], (every,), {})
    return _Origin(origin.mode, origin.total, origin.limit, origin.calls, every)


def _on_copy(func: Any, first: Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(first.clone(), *args, **kwargs)


def _collect(value: Any, into: list[LeadingRows]) -> Any:
    if isinstance(value, LeadingRows):
        into.append(value)
    return value
