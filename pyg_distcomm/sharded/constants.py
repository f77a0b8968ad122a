"""Computes constant structure once: self-loops, degrees, masks of types, normalisations.

[Note: constants] A layer of PyG derives the same tensors from the same edge_index in each
forward pass. Whole numbers and masks of a share, and numbers of one column, have a *key*; an
op whose operands all have one is computed once, and its result has a key, too, made of the
op and theirs. Plain operands of the same kind are known by their content. So the second epoch
finds the very ids of the first one, with the exchange that was planned for them.

What an op writes to loses its key, by torch's own version counter, as do its views, unless
what is written is constant, too. What is kept is handed out as a copy. The cache is the
mesh's, and keeps the latest results. What follows from a plain operand that was met once, as
the mask of `dropout_edge`, is kept until some later ones were met: it may never come again.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Latest
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded.agreement import check_written, is_same, note_same
from pyg_distcomm.sharded.dist_tensor import DistTensor, changed, rule, shares_memory

_KEPT = 96  # results
_KEPT_MADE = 128  # what is made of lists of ids, and of masks
_KEPT_WITH = 16  # of one tensor that is no constant
_NUMBERED = 1 << 14  # descriptions
_KEPT_PLAIN = 32  # plain operands
_KEPT_ONCE = 16  # plain operands that were met once, with what follows from them
_KEPT_BEHIND = 1 << 9  # numbers of what follows from one of them


class ByContent:
    """Keeps what was made of plain tensors, which it knows by their content.

    The latest ones are kept. One on a device that it has met is known without being read, for
    which the host would wait.
    """

    def __init__(self, most: int) -> None:
        self._most, self._next = most, 0  # the place of what is looked for first
        self._kept: list[tuple[Tensor, tuple[Any]]] = []  # what was made, boxed
        self._met: Any = WeakTensorKeyDictionary()  # what was made, at a version

    def find(self, x: Tensor) -> int | None:
        """Returns the place of what was made of a tensor of the same content, or None."""
        met = None if x.is_cpu else self._met.get(x)
        if met is not None and met[0] == version_of(x):
            for k, (_, made) in enumerate(self._kept):  # as on all ranks
                if made is met[1]:
                    return k
        count = len(self._kept)
        for at in range(self._next, self._next + count):  # mostly as in the last epoch
            other = self._kept[at % count][0]
            if (
                other.shape == x.shape
                and other.dtype == x.dtype
                and other.device == x.device
                and torch.equal(_bits(other), _bits(x))
            ):
                return at % count
        return None

    def get(self, x: Tensor) -> Any:
        """Returns what was made of a tensor of the same content, or None.

        It becomes the latest one, so that ranks that ask alike forget alike.
        """
        k = self.find(x)
        if k is None:
            return None
        self._kept.append(self._kept.pop(k))
        self._next = k  # what was behind it
        self._meet(x, self._kept[-1][1])
        return self._kept[-1][1][0]

    def put(self, x: Tensor, made: Any) -> Any:
        """Keeps what was made of a tensor, and returns it."""
        box = (made,)
        self._kept.append((x.detach().clone(), box))
        if len(self._kept) > self._most:
            del self._kept[0]
        self._meet(x, box)
        return made

    def _meet(self, x: Tensor, box: tuple[Any]) -> None:
        if not (x.is_cpu or x.is_inference()):  # whose versions are not counted
            self._met[x] = version_of(x), box


def _bits(x: Tensor) -> Tensor:
    """Returns the bits of numbers, of which 0.0 has others than -0.0, and NaN equals itself."""
    if x.is_complex():
        return _bits(torch.view_as_real(x))
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return x.view(kinds[x.element_size()]) if x.is_floating_point() else x


class Constants:
    """Numbers constant values, and keeps what was computed from them."""

    def __init__(self) -> None:
        self._count = itertools.count(1)  # loaders number rows in threads of their own
        self._numbers = Latest(_NUMBERED)
        self._plain = ByContent(_KEPT_PLAIN)
        self.results = Latest(_KEPT)  # by number
        self.made = Latest(_KEPT_MADE)  # by kind and number; see `kept_with`
        self.writes: Any = WeakTensorKeyDictionary()  # to rows, by their version before
        # plain operands that were met once, by number, with numbers of what follows
        self._once: OrderedDict[int, tuple[TensorWeakRef, list[int]]] = OrderedDict()
        self._origin: dict[int, int] = {}  # the latest of them, by what follows

    def number_of(self, what: Any, *operands: int) -> int:
        """Returns the number of what is computed from numbered operands, always the same."""
        found: int | None = self._numbers.get(what)
        if found is None:
            found = self._numbers[what] = self.next_number()
            origin = max((self._origin.get(n, 0) for n in operands), default=0)
            if origin:
                self._origin[found] = origin
                numbers = self._once[origin][1]
                numbers.append(found)
                if len(numbers) > _KEPT_BEHIND:
                    del self._origin[numbers.pop(1)]
        return found

    def may_last(self, number: int) -> bool:
        """Tells whether nothing that was met only once is behind a number."""
        return number not in self._origin

    def next_number(self) -> int:
        """Returns a number that no value has had: that of a value that nothing describes."""
        return next(self._count)

    def is_new(self, x: Tensor) -> bool:
        """Tells whether no plain tensor of this content is known."""
        return self._plain.find(x) is None

    def number_of_plain(self, x: Tensor) -> int:
        """Returns the number of a plain tensor, known by its content."""
        number: int | None = self._plain.get(x)
        if number is None:
            number = self._plain.put(x, self.next_number())
            self._once[number] = TensorWeakRef(x), [number]
            self._origin[number] = number
            if len(self._once) > _KEPT_ONCE:
                self._forget(next(iter(self._once)))
        elif number in self._once and self._once[number][0]() is not x:
            for each in self._once.pop(number)[1]:  # another of the same content
                del self._origin[each]
        return number

    def _forget(self, origin: int) -> None:
        """Drops what follows from a plain operand, until it is met again."""
        numbers = {*self._once.pop(origin)[1]}
        for number in numbers:
            del self._origin[number]
            if number in self.results:  # `pop` of Python 3.10 would raise
                del self.results[number]
        for key in [key for key in self.made if key[1] in numbers]:
            del self.made[key]


def constants_of(mesh: Mesh) -> Constants:
    """Returns the constants of a mesh."""
    found = mesh.sharded.get("constants")
    if found is None:
        found = mesh.sharded["constants"] = Constants()
    return found  # type: ignore[no-any-return]


def is_structure(x: Tensor) -> bool:
    """Tells whether a tensor may be a constant: whole numbers, or one number per row."""
    if x.requires_grad:
        return False
    # a float of shape [n] or [n, 1]
    return not x.dtype.is_floating_point or x.numel() == max(x.shape, default=1)


def key_of(x: DistTensor) -> int | None:
    """Returns the key of a tensor while nothing but constants has been written to it."""
    if x._key is None or x.requires_grad:
        return None
    while x._key_version != version_of(x):
        known = constants_of(x.rows.mesh)
        write = known.writes.get(_counted(x), {}).get(x._key_version)
        if write is None:
            return None
        number = known.number_of((x._key, write), x._key, write)
        x._key, x._key_version = number, x._key_version + 1
    return x._key


def _counted(x: DistTensor) -> Tensor:
    """Returns the tensor whose counter of writes is that of its views."""
    return x if x._base is None else x._base


def kept_with(x: DistTensor, kind: Any, make: Callable[[], Any]) -> Any:
    """Returns what was made of a tensor; kept with it until an op writes to it.

    What is made of a constant is kept by its key: the next epoch finds it.
    """
    key = key_of(x)
    if key is not None:
        kept, kind = constants_of(x.rows.mesh).made, (kind, key)
    else:
        version = version_of(x)
        if x._kept is None or x._kept[0] != version:
            x._kept = version, Latest(_KEPT_WITH)
        kept = x._kept[1]
    if kind not in kept:
        kept[kind] = make()
    return kept[kind]


class _NotConstant(Exception):
    pass


def _described(value: Any, known: Constants, numbers: list[int]) -> Any:
    """Describes an operand, and adds the numbers of constants in it."""
    if isinstance(value, Tensor):
        if type(value) is DistTensor:
            key = key_of(value)
            if key is None:
                raise _NotConstant
            numbers.append(key)
            edges: Any = value._topology or value._flipped
            return key if edges is None else (key, id(edges.link))  # a flip's, too
        if type(value) is not Tensor or not is_structure(value):
            raise _NotConstant
        numbers.append(known.number_of_plain(value))
        return numbers[-1]
    if isinstance(value, (list, tuple)):
        return tuple(_described(v, known, numbers) for v in value)
    if isinstance(value, (bool, int, float, complex)):
        return type(value), repr(value)  # 1 == 1.0, and 0.0 == -0.0
    return value


def description(func: Any, args: Any, kwargs: Any, known: Constants) -> int | None:
    """Returns the number of an op on constants; None if an operand is none."""
    numbers: list[int] = []
    try:
        parts = _described((args, tuple(kwargs.items())), known, numbers)
        return known.number_of((func, *parts), *numbers)
    except (_NotConstant, TypeError):
        return None


@rule("constant")
def compute(func: Any, rule: Any, args: Any, kwargs: Any, first: DistTensor) -> Any:
    """Computes an op whose first sharded operand is constant; see [Note: constants]."""
    known, mesh, kinds = constants_of(first.rows.mesh), first.rows.mesh, PROCESS.rules
    kind = kinds.get(("kind", func))
    if kind is None:
        kind = kinds["kind", func] = _kind(func)
    if kind == "unkept" or (
        kind == "in place" and not _is_known_write(func, args, kwargs)
    ):
        return rule(func, args, kwargs)
    if kind == "same":
        number = key_of(first)
    else:
        if len(args) > 1 and mesh.size > 1:
            _check_written(func, args, known, mesh)
        reads_all = func not in _PICKING or _are_same(func, args, mesh)
        number = description(func, args, kwargs, known) if reads_all else None
    if kind == "in place":
        out = _write(func, rule, args, kwargs, number, known)
        note_same(out, mesh)
        return out
    if number is not None and kind == "result" and number in known.results:
        several, held = known.results[number]
        made = [_again(each) for each in held]
        return made[0] if several is None else several(made)
    out = rule(func, args, kwargs)
    if number is None:
        return out
    several = type(out) if type(out) in (tuple, list) else None
    parts = [out] if several is None else out
    if kind != "result":
        shares = kind == "view" or func in _ALIASES
        _number(parts, number, known, version_of(first) if shares else None)
    elif all(isinstance(p, Tensor) and is_structure(p) for p in parts):
        _number(parts, number, known)
        known.results[number] = several, [_held(p) for p in parts]
    return out


def _number(parts: Any, number: int, known: Constants, version: Any = None) -> None:
    """Gives the results of an op on constants their keys, at a version, or at their own."""
    for i, part in enumerate(parts):
        if type(part) is DistTensor:
            key = known.number_of((number, i), number) if len(parts) > 1 else number
            part._key = key
            part._key_version = version_of(part) if version is None else version


def _check_written(func: Any, args: Any, known: Constants, mesh: Any) -> None:
    """Raises on all ranks if one alone has written to a plain operand that is read."""
    read = args[1:] if func._schema.is_mutable else args
    flat = [t for a in read for t in (a if type(a) is list else (a,))]
    plain = [t for t in flat if type(t) is Tensor and t.dim() and is_structure(t)]
    if plain and isinstance(mesh, Mesh):
        check_written([(t, known.is_new) for t in plain if not t.is_inference()], mesh)


def _are_same(func: Any, args: Any, mesh: Mesh) -> bool:
    """Tells whether plain tables, of which an op may read a part, are the same on all ranks."""
    read = args[1:] if func is aten.where.self else args[:1]  # others are read whole
    tables = [t for t in read if type(t) is Tensor and t.dim() and is_structure(t)]
    return all([is_same(t, mesh) for t in tables])  # each is compared


def _held(part: Tensor) -> Any:
    if type(part) is not DistTensor:
        return part.detach().clone()
    edges = part._topology, part._flipped
    return (part.local.clone(), part.rows, part.dim_, part._key), edges


def _again(held: Any) -> Tensor:
    if isinstance(held, Tensor):
        return held.clone()
    (local, *how), edges = held
    out = DistTensor(local.clone(), *how)  # an op may write to it
    out._edges_are(*edges)
    out._key_version = version_of(out)
    return out


def _is_known_write(func: Any, args: Any, kwargs: Any) -> bool:
    """Tells whether an op adds to its first operand, or writes to sharded rows.

    What a plain operand holds before any other write may be new memory, which differs
    between ranks; and `out=` is no operand.
    """
    kind = type(args[0])
    return "out" not in kwargs and (
        kind is DistTensor or (kind is Tensor and func in _ADDING)
    )


def _write(
    func: Any, rule: Any, args: Any, kwargs: Any, number: int | None, known: Constants
) -> Any:
    """Writes what was written before, or what the op writes, which is kept then."""
    target, held = args[0], known.results.get(number)
    sharded = type(target) is DistTensor
    own = target.local if sharded else target
    if held is None:
        rule(func, args, kwargs)
        if number is not None:
            known.results[number] = own.detach().clone()
    else:
        own.copy_(held)
        if sharded:
            changed(target)
    if sharded and number is not None:
        version = version_of(target)
        known.writes.setdefault(_counted(target), {})[version] = number
        target._key, target._key_version = number, version + 1
    return target


def version_of(x: Tensor) -> int:
    """Returns how often an op has written to a tensor; -1 for inference tensors.

    Not to its own rows, `x.to_local()`: what one rank alone notices, others would wait for.
    """
    return -1 if x.is_inference() else x._version


aten = torch.ops.aten
_ADDING = {
    aten.scatter_add_.default,
    aten.scatter_reduce_.two,
    aten.index_add_.default,
    aten.index_reduce_.default,
}
_PICKING = {  # which may leave rows of a plain operand unread
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.take.default,
    aten.embedding.default,
    aten.masked_select.default,
    aten.where.self,
}
_ALIASES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
_KINDS = {
    "same": {aten.clone.default, *_ALIASES},
    "new": {
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
    },
    "unkept": {
        aten.new_empty.default,
        aten.empty_like.default,
        aten.new_empty_strided.default,
        aten._local_scalar_dense.default,
        aten.equal.default,
    },
}
_UNKEPT = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}


def _kind(func: Any) -> str:
    """Tells what becomes of the result of an op on constants."""
    for kind, ops in _KINDS.items():
        if func in ops:
            return kind
    # batch norms write to their statistics unsaid
    if not _UNKEPT.isdisjoint(func.tags) or "batch_norm" in func._schema.name:
        return "unkept"
    if func._schema.is_mutable:
        return "in place"
    return "view" if shares_memory(func) else "result"
