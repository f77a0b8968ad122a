"""Defines `DistTensor`, a tensor of the whole's shape whose rows are sharded over the ranks.

[Note: below autograd] A `DistTensor` wraps this rank's rows and has the global shape. Torch's
autograd sees an ordinary tensor of that shape; what it calls, forward and backward alike, are
aten ops, and these are computed by rules (see `rule`) that return the value of the whole:

    row by row           on own rows, without communication
    over the rows        on own rows, then one all-reduce; the result is plain
    by ids               one planned exchange; see `by_id.py`
    anything else        all rows are gathered, and every rank computes the same

A tensor is *plain* if it is an ordinary tensor, equal on all ranks. Since each op returns the
value of the whole, gradients are those of one process, for leaves of either kind.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from numbers import Integral
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch._dynamo import config

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.failure import needing, watch_of
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.kernels.core_ops import offset_dtype
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded.agreement import (
    compare_call,
    compare_plain,
    compare_weights,
    explain,
    in_backward,
    name_of,
)
from pyg_distcomm.sharded.edge_methods import EdgeMethods

Kind = TypeVar("Kind", bound=type)
Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_GRAD: Any = Tensor.grad  # torch's own attributes
_DATA: Any = Tensor.data
_MANY = 1 << 10  # whole numbers whose type is worth an agreement


def eager(kind: Kind) -> Kind:
    """Marks a subclass of Tensor as one that torch.compile does not trace."""
    config.nontraceable_tensor_subclasses = config.nontraceable_tensor_subclasses | {
        kind
    }
    return kind


class ManyRanks:
    """Adds the methods that return the values of all ranks; collective."""

    __slots__ = ()

    full_tensor: Any

    def tolist(self) -> Any:
        """Returns all values as nested lists."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns all values as an array."""
        return self.full_tensor().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.full_tensor().detach().__array__(dtype)


@eager
class DistTensor(EdgeMethods, ManyRanks, Tensor):
    """Represents a tensor whose rows are sharded over the ranks, in the shape of the whole.

    Args:
        local: the rows of this rank.
        rows: which rows these are.
        dim: the dimension of `local` that is sharded.
        key: the number of this value among constants; see `constants.py`.

    Shapes: `[..., n, ...]`, of which `local` `[..., n_i, ...]` is on this rank.
    """

    __slots__ = (
        "_copied",
        "_end",
        "_family",
        "_flipped",
        "_kept",
        "_key",
        "_key_version",
        "_root",
        "_topology",
        "dim_",
        "local",
        "rows",
    )
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    local: Tensor
    rows: Rows
    dim_: int
    _key: int | None  # its number among constants, at a version
    _key_version: int
    _end: int | None  # which row of a `[2, e]` it is
    _kept: Any  # what was made of it at a version; see `constants.kept_with`
    _copied: Any  # of a copy where torch has a view, how it was taken: see `take_anew`
    _topology: Any  # what is planned for the edges that it is
    _flipped: Any  # what is planned for the edges of which it is the flip
    _family: Any  # references to the edges with a plan whose memory it shares
    _root: Tensor  # own rows of the tensor that it is a view of

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        rows: Rows,
        dim: int = 0,
        key: int | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> Any:
        """Wraps rows, without autograd; see `from_local`."""
        shape = list(local.shape)
        shape[dim] = rows.count
        if dim == 0 and local.dim() > 1:
            stride = local.stride()
        self = Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=local.dtype, device=local.device
        )
        self.local, self.rows, self.dim_, self._root = local, rows, dim, local
        self._key, self._key_version = key, 0
        self._kept = self._topology = self._flipped = self._family = None
        self._copied, self._end = False, None
        return self

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes one aten op by its rule."""
        try:
            return cls._computed(func, types, args, kwargs)
        except (RuntimeError, MemoryError) as error:  # perhaps on this rank only
            explain(func, args, kwargs, error)

    @classmethod
    def _computed(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            first = first_sharded(args)
            if first is not None and not first.is_inference():
                # views of ordinary tensors are ordinary ones, whose versions are counted
                with torch.inference_mode(False), torch.no_grad():
                    return cls._computed(func, types, args, kwargs)
        rules = PROCESS.rules
        if len(types) > 1 and not rules["wraps"].isdisjoint(types):
            return NotImplemented
        rule = rules.get(func)
        if rule is None:
            rule = rules[func] = rules["default"](func)
        first = args[0]
        if type(first) is not DistTensor:
            first = first_sharded(args)
        if first is not None:
            for a in args:
                for b in a if type(a) is list else (a,):
                    if type(b) is DistTensor and b._copied:
                        take_anew(b)
            PROCESS.op = func
            check_writes(func, args, kwargs or {})
            if first.rows.mesh.size > 1:
                for a in args:
                    if type(a) is not DistTensor and isinstance(a, Tensor):
                        plain = [a for a in args if type(a) is not DistTensor]
                        compare_weights(plain, first.rows.mesh, func)
                        break
        if first is not None and first._key is not None:
            out = rules["constant"](func, rule, args, kwargs or {}, first)
        else:
            out = rule(func, args, kwargs or {})
        if func.is_view and first is not None:
            note_copies(out, func, args, kwargs or {})
        return out

    @staticmethod
    def from_local(local: Tensor, rows: Rows, dim: int = 0) -> DistTensor:
        """Returns this rank's rows as part of a sharded tensor, differentiably."""
        return Placed.apply(local, (rows, dim), (rows, dim, True))

    @staticmethod
    def wrap(local: Tensor, rows: Rows) -> DistTensor:
        """Returns this rank's rows, with the key of a constant if they need no gradient."""
        if local.requires_grad:
            return DistTensor.from_local(local, rows)
        return PROCESS.rules["attribute"](DistTensor(local, rows))  # type: ignore[no-any-return]

    def _edges_are(self, topology: Any, flipped: Any = None) -> None:
        """Keeps what is planned for edges, or those that it flips, until a write to them."""
        self._topology, self._flipped = topology, flipped
        if topology is not None or flipped is not None:
            others = [ref for ref in self._family or () if ref() is not None]
            self._family = self._family or []  # one list of all that share the memory
            self._family[:] = [*others, weakref.ref(self)]

    @property
    def grad(self) -> Any:
        """The gradient, sharded as these rows are.

        Autograd may leave a plain tensor in its place: that of `x.sum()` is 1, expanded.
        """
        g = _GRAD.__get__(self)
        if type(g) is Tensor and g.layout == torch.strided:
            own = g.index_select(self.dim_, self.rows.place_on(g.device))
            g = DistTensor(own, self.rows, self.dim_)
            self.grad = g
        return g

    @grad.setter
    def grad(self, value: Any) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    @property
    def data(self) -> Any:
        """The rows without their history; what is assigned takes their place."""
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(
                f"x.data = value got a {type(value).__name__}, wanted a tensor; write to "
                "rows by x[:] = value"
            )
        if type(value) is not DistTensor:
            PROCESS.op = torch.ops.aten.set_data.default
            own = own_part(value, self.rows, self.dim_)
            value = DistTensor(own, self.rows, self.dim_)
        become(self, value)

    def to_local(self) -> Tensor:
        """Returns this rank's rows as an ordinary tensor, differentiably."""
        return Placed.apply(self, (self.rows, self.dim_, True))

    def full_tensor(self) -> Tensor:
        """Returns all rows, in order, on every rank, differentiably; collective."""
        return Placed.apply(self, None)

    def untyped_storage(self) -> Any:
        """Returns an empty storage to resize: an exchange may be reading that of own rows."""
        return torch.UntypedStorage()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Writes to rows, also to one row and to every k-th, which torch takes as views."""
        first, *rest = (key if isinstance(key, tuple) else (key,)) or (...,)
        if isinstance(first, Integral) and not isinstance(first, bool):  # NumPy's, too
            first = torch.tensor(int(first))
        one = isinstance(first, Tensor) and first.dim() == 0
        if self.dim_ == 0 and one and first.dtype not in (torch.bool, torch.uint8):
            key = (first.view(1), *rest)
            if not all(isinstance(k, (slice, Integral)) for k in rest[1:]):
                i = range(self.size(0))[first]  # torch takes the row first
                key = (slice(i, i + 1), *rest)
        elif self.dim_ == 0 and isinstance(first, slice) and (first.step or 1) != 1:
            key = (torch.arange(self.size(0))[first], *rest)
        both = type(key) is DistTensor and type(value) is DistTensor
        if both and value.dim() <= self.dim() - key.dim() + 1:
            self.index_put_((key,), value)  # torch would take a view of one row
        else:
            super().__setitem__(key, value)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the rows on a device, or of another type; see `torch.Tensor.to`.

        Raises:
            OutOfMemoryError: on all ranks, if they do not fit on this rank's device.
        """
        where, local = kwargs.get("device", (*args, None)[0]), self.local
        named = isinstance(where, (str, int, torch.device))
        place = torch.device(where) if named else local.device
        watch = watch_of(self.rows.mesh)
        with needing("a tensor of rows", lambda: local.nbytes, watch, place):
            return super().to(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistTensor:
        if id(self) not in memo:
            out = DistTensor(self.local.detach().clone(), self.rows, self.dim_)
            out._edges_are(self._topology)
            if self._key is not None and not self.requires_grad:
                PROCESS.rules["attribute"](out)
            if self.requires_grad:
                out.requires_grad_()
            if self.grad is not None:
                out.grad = copy.deepcopy(self.grad, memo)
            out.__dict__.update(copy.deepcopy(vars(self), memo))
            memo[id(self)] = out
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.rows.mesh.size > 1:
            raise TypeError(
                "save t.full_tensor(), which all ranks have to call, or t.to_local() for "
                "this rank's rows: torch.save and pickle would keep a part of a row-sharded "
                "tensor alone. pdc.save_checkpoint saves models and optimizers"
            )
        return self.local.detach().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        mesh = self.rows.mesh
        return (
            f"DistTensor({list(self.shape)} of {str(self.dtype).removeprefix('torch.')}, "
            f"{list(self.local.shape)} on rank {mesh.rank}/{mesh.size}, dim {self.dim_})"
        )


class Placed(torch.autograd.Function):
    """Takes rows from where they are to another place; gradients go the way back.

    A place is None for all rows, in order, on every rank; (rows, dim) for a sharded tensor;
    and (rows, dim, True) for this rank's rows as an ordinary tensor.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, to: Any, of: Any = None) -> Any:
        ctx.to = to
        if type(x) is DistTensor:
            take_anew(x)
        ctx.of = of or ((x.rows, x.dim_) if isinstance(x, DistTensor) else None)
        if to is None:
            return all_rows(x, "full_tensor")
        local = x if of else local_at(x, *to[:2])
        if to[2:]:
            return local.view_as(local)
        return DistTensor(local, *to)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        of = (*ctx.to[:2], True) if ctx.to and ctx.to[2:] else None
        return Placed.apply(g, ctx.of, of), None, None


def is_rows(value: Any) -> TypeGuard[DistTensor]:
    """Tells whether a value has a row per node, edge or another thing, as no edge_index has.

    An edge_index `[2, e]` is row-sharded in its second dimension.
    """
    return isinstance(value, DistTensor) and not value.dim_


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments that an op writes to."""
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [v for v in found if isinstance(v, Tensor)]


def shares_memory(func: Any) -> bool:
    """Tells whether a result of an op may be a view of an operand."""
    return any(r.alias_info is not None for r in func._schema.returns)


def check_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raises on all ranks if an op would write to a copy, of which torch would have a view."""
    if not func._schema.is_mutable:
        return
    written = written_by(func, args, kwargs)
    if any(getattr(value, "_copied", False) for value in written):
        raise RuntimeError(
            f"{name_of(func)}() got a part of a row-sharded tensor of which ranks hold "
            "copies, so that the tensor would not see what is written; write by x[ids] = "
            "value, or clone the part first"
        )


def note_copies(out: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Notes how copies were taken where torch has views; see `take_anew`."""
    x, *how = args
    parts = out if isinstance(out, (list, tuple)) else [out]
    if x._copied is True or not any(getattr(p, "_copied", False) for p in parts):
        return
    # not x itself, whose history they would keep
    base, steps, _ = x._copied or (DistTensor(x.local, x.rows, x.dim_), (), 0)
    version = None if x.is_inference() else x._version
    for i, part in enumerate(parts):
        part._copied = base, (*steps, (func, how, kwargs, i)), version


def take_anew(x: Any) -> None:
    """Takes a copy anew if what torch has a view of was written to since; then collective."""
    base, steps, version = x._copied if type(x._copied) is tuple else (x, (), None)
    if version is None or x._version == version:
        return
    x._copied = base, steps, x._version
    with torch.no_grad():
        for func, how, kwargs, i in steps:
            base = func(base, *how, **kwargs)
            base = base[i] if isinstance(base, (list, tuple)) else base
    for name in ("local", "rows") if type(x) is DistTensor else ("part", "_value"):
        setattr(x, name, getattr(base, name))


def changed(x: DistTensor) -> None:
    """Forgets what was derived from the values of a tensor that an op has written to.

    Counts the write to own rows, too, as autograd does not in here; caches ask for the number.
    """
    for own in {x.local, x._root}:  # by identity
        if not own.is_inference():
            torch.autograd.graph.increment_version(own)
    x._key = x._kept = x._topology = x._flipped = x._end = None
    for ref in x._family or ():
        if (edges := ref()) is not None:
            edges._topology = edges._flipped = None
    carried = vars(x).get("carried")
    if carried is not None:  # to the rows of which it is a copy
        base, where = carried
        base.local.index_copy_(0, where, x.local)
        changed(base)


def become(x: DistTensor, value: DistTensor) -> None:
    """Gives a tensor the shape, type and rows of another one, whose memory both share then."""
    _DATA.__set__(x, value)
    for name in DistTensor.__slots__:
        setattr(x, name, getattr(value, name))
    x._key = None
    x._edges_are(value._topology, value._flipped)
    if not x.requires_grad:  # products of a constant are kept by its version
        torch.autograd.graph.increment_version(x)


def first_sharded(args: Any) -> DistTensor | None:
    """Returns the first sharded operand, also of a list of operands."""
    for a in args:
        for b in a if type(a) is list else (a,):
            if type(b) is DistTensor:
                return b
    return None


def rule(*ops: Any) -> Callable[[Any], Any]:
    """Declares the rule of some aten ops, or what is done under a name.

    An op without an overload, as `aten.sum`, stands for all its overloads but those with out=.
    """

    def keep(function: Any) -> Any:
        for op in ops:
            for each in overloads(op):
                PROCESS.rules[each] = function
        return function

    return keep


def overloads(op: Any) -> list[Any]:
    """Returns the overloads of an op that need no `out`; of an overload, itself."""
    if not hasattr(op, "overloads"):
        return [op]
    found = [getattr(op, name) for name in op.overloads()]
    return [f for f in found if not any(a.is_out for a in f._schema.arguments)]


def own_part(x: Tensor, rows: Rows, dim: int) -> Tensor:
    """Returns own rows of a plain tensor."""
    if x.size(dim) != rows.count:
        raise ValueError(
            f"{name_of(PROCESS.op)}() got a plain tensor of {list(x.shape)} beside a "
            f"row-sharded one of {rows.count} rows: a plain tensor has the rows of all "
            "ranks, the same on each; take own rows by pdc.from_local(t, like=x)"
        )
    if rows.mesh.size == 1 and rows.whole:
        return x
    compare_plain(x, rows.mesh)
    return x.index_select(dim, rows.place_on(x.device))


def local_at(x: Tensor, rows: Rows, dim: int) -> Tensor:
    """Returns the rows that this rank holds of `rows`, of a tensor sharded in any way.

    Collective where `x` is sharded by other rows, or in another dimension.
    """
    if not isinstance(x, DistTensor):
        return own_part(x, rows, dim)
    if x.dim_ == dim:
        if x.rows is rows or x.rows.matches(rows):
            return x.local
        return PROCESS.rules["reshard"](x, rows)  # type: ignore[no-any-return]
    return own_part(all_rows(x, "align"), rows, dim)


def all_rows(x: DistTensor, op: str) -> Tensor:
    """Returns all rows, in order, on every rank; collective, noted as "gather <op>"."""
    local, rows, dim = x.local, x.rows, x.dim_
    if rows.mesh.local_sizes and in_backward():  # a chunk's are all here
        return local.clone()
    axis = rows.mesh.world
    if axis.size == 1:
        if axis.observer is not None:
            axis.observer("gather", local, axis)
        return local.clone(memory_format=torch.contiguous_format)
    compare_call(rows.mesh, x, rows.count, name=op)
    flat = local.movedim(dim, 0).contiguous()
    found = gathered(flat, rows, f"gather {op}")
    return found.movedim(0, dim).contiguous()


def gathered(own: Tensor, rows: Rows, op: str) -> Tensor:
    """Returns all rows of own rows `[n_i, ...]`, in order; collective.

    Many whole numbers travel in the least type that holds them on all ranks.
    """
    sizes, order = _gathered_order(rows)
    axis, kind, sent = rows.mesh.world, own.dtype, own
    if kind == torch.int64 and rows.count * own.shape[1:].numel() > _MANY:
        sent = in_least_type(own, axis)
    sent = sent.view(torch.uint8) if kind == torch.bool else sent
    found = collectives.all_gather_rows(sent, sizes, axis, op=op)
    found = found.view(torch.bool) if kind == torch.bool else found.to(kind)
    return found.index_select(0, order.to(found.device))


def in_least_type(x: Tensor, axis: Any) -> Tensor:
    """Returns numbers in the least type that holds those of all ranks; collective.

    That of numbers that are no counts on some rank is their own.
    """
    counts = (x >= 0) & (x < 1 << 31) & (x == x.round())
    most = int(x.max()) if x.numel() and bool(counts.all()) else -x.numel()
    marks = [row[0] for row in collectives.all_gather_counts([most], axis)]
    if min(marks) < 0:
        return x
    return x.to(torch.uint8 if max(marks) < 1 << 8 else torch.int32)


def _gathered_order(rows: Rows) -> tuple[list[int], Tensor]:
    """Returns how many rows each rank holds, and where each one lies among these; kept."""
    known = rows.derived.get("gathered")
    if known is None:
        every = rows.owners.owner.argsort(stable=True)  # as ranks hold them
        place = torch.arange(len(every), dtype=offset_dtype(len(every)))
        order = torch.empty_like(place)
        order[every] = place
        known = rows.derived["gathered"] = list(rows.owners.sizes), order
    return known  # type: ignore[no-any-return]
