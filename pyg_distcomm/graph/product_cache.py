"""Caches products of the graph with constant inputs, which are exchanged once.

[Note: constant inputs] The features of a full-graph script are the same tensor in every
epoch, so A X0 is the same product. At its first use, an input may still turn out to be used
once, such as the output of dropout, and A X0 at the full width would be computed for nothing.
So the first use only records the input, by weak reference, and the second caches its product.

Activation checkpointing recomputes a layer in the backward pass, and both passes must save the
same tensors. So the cache is not used while hooks for saved tensors are active.

A resumed run caches at their first use those inputs that the saved run had seen, so that both
runs round alike. A checkpoint holds a fingerprint of these inputs, of a sample of rows.

Changes of an input are detected by its version counter, which in-place operations increment,
but writes through `x.data` or a shared NumPy array do not. A rank sees its own rows only, so
an input must change on all ranks or on none.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.failure import CHANGED
from pyg_distcomm.comm.mesh import Mesh

ORDERS = ("auto", "first", "last")
_SAMPLE = 4096  # rows of a fingerprint


@dataclass(frozen=True)
class MultiplyOrder:
    """Sets the order of the products of A X W in a layer.

    Args:
        order: "first" is (A X) W, "last" is A (X W), "auto" the one that exchanges less.
        keep_inputs: whether A X is kept for an X that does not change.
    """

    order: str = "auto"
    keep_inputs: bool = True

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {self.order!r}")

    def takes_first(
        self, width_in: int, width_out: int, grads: tuple[bool, bool]
    ) -> bool:
        """Tells whether a layer computes (A X) W instead of A (X W)."""
        before, after = width_in * (1 + grads[0]), width_out * (1 + grads[1])
        return self.order == "first" or (self.order == "auto" and before <= after)


class ProductCache:
    """Holds the inputs seen by one graph, and its cached products, by kind of product.

    Price: the rows of each cached product, `[n_i, f]`, for the lifetime of its input.
    """

    def __init__(self) -> None:
        # for each live input: kind -> (versions of the inputs, product or None, its version,
        # since a layer may write to it)
        self._products: Any = WeakTensorKeyDictionary()

    def product(
        self,
        kind: Any,
        inputs: tuple[Any, Any],
        multiply: Callable[[], Tensor],
        *,
        cache_now: bool = False,
    ) -> Tensor | None:
        """Returns the product of inputs that were seen before; else records them.

        Args:
            kind: identifies the operator.
            inputs: the features, and the weights of edges or None.
            multiply: computes the product; collective, so all ranks must have seen the
                same inputs as often.
            cache_now: whether to cache at the first use, as in a resumed run.
        """
        x, weight = inputs
        with torch._C.DisableTorchFunctionSubclass():
            if not (_constant(x) and _constant(weight)) or _hooked():
                return None
            kinds = self._products.setdefault(x, {})
            key, now = _key(kind, weight), (_version(x), _version(weight))
            before, product, version = kinds.get(key, (None, None, 0))
        written = product is not None and product._version != version
        all_or_none(before not in (None, now) or written, x.rows.mesh)
        if before != now:
            cache_now = _note_new_input(self, x, key, cache_now)
        if before != now and not cache_now:
            for old in [
                k for k, (state, *_) in kinds.items() if _is_stale(k, state, x)
            ]:
                del kinds[old]
            kinds[key] = now, None, 0
            return None
        if product is None or before != now or written:
            with torch.inference_mode(False), torch.no_grad():
                product = multiply()  # not an inference tensor
            kinds[key] = now, product, product._version
        kept: Tensor = product
        return kept

    def alive(self) -> Iterator[tuple[str, Any]]:
        """Yields the seen inputs that have not changed, and their kinds of products."""
        for x, kinds in list(self._products.items()):
            for key, (state, *_) in kinds.items():
                if not _is_stale(key, state, x):
                    yield _describe_key(key), x

    def stage(self, x: Any, kind: Any, weight: Any = None) -> int:
        """Returns 1 if an input was seen once, 2 if its product is cached, else 0."""
        found = self._products.get(x, {}).get(_key(kind, weight), (None, None, 0))
        before, product, _ = found
        if before is None or before[0] != _version(x):
            return 0
        return 1 if product is None else 2


class Inputs:
    """Holds the inputs seen by the graphs of a mesh, and those of a loaded checkpoint.

    Price: one all-reduce of a word for each live input when a checkpoint is saved; after a
    checkpoint is loaded, one for each new input until all of its inputs have been seen.
    """

    def __init__(self) -> None:
        self.of: Any = weakref.WeakSet()
        self._first: Any = WeakTensorKeyDictionary()  # when each input was first seen
        self._count = 0
        self._expected: list[list[Any]] = []

    def note(self, x: Any, key: tuple[Any, Any]) -> bool:
        """Records a new input; returns whether a loaded checkpoint had seen it. Collective."""
        self._count += 1
        self._first.setdefault(x, self._count)
        if not self._expected:
            return False
        like = [_describe_key(key), list(x.shape)]
        if not any(one[:2] == like for one in self._expected):
            return False
        found = [*like, _fingerprint(x)]
        if found not in self._expected:
            return False
        self._expected.remove(found)
        return True

    def as_text(self, mesh: Mesh) -> str:
        """Returns the inputs that are in use on all ranks, as text; collective."""
        here = {(self._first[x], name): x for one in self.of for name, x in one.alive()}
        every = collectives.all_gather_object(sorted(map(list, here)), mesh.world)
        both = [one for one in every[0] if all(one in other for other in every)]
        rows = [(name, here[number, name]) for number, name in both]
        return json.dumps([[name, list(x.shape), _fingerprint(x)] for name, x in rows])

    def expect(self, text: str) -> None:
        """Loads the text that `as_text` returned in the saved run."""
        self._expected = json.loads(text) if text else []


def inputs_of(mesh: Mesh) -> Inputs:
    """Returns the `Inputs` of a mesh."""
    if mesh.inputs is None:
        mesh.inputs = Inputs()
    return mesh.inputs  # type: ignore[no-any-return]


def _note_new_input(constants: ProductCache, x: Any, key: Any, cache_now: bool) -> bool:
    mesh = x.rows.mesh
    if not isinstance(mesh, Mesh):  # the mesh of a chunk
        return cache_now
    inputs = inputs_of(mesh)
    inputs.of.add(constants)
    return inputs.note(x, key) or cache_now


def _describe_key(key: tuple[Any, Any]) -> str:
    kind, weight = key
    return f"{kind} {weight is not None}"


def _fingerprint(x: Any) -> int:
    """Returns a hash of sampled rows that does not depend on the partition; collective."""
    rows = x.rows
    some = rows.gid % max(1, rows.total // _SAMPLE) == 0
    local = x.to_local().detach()
    width = math.prod(local.shape[1:])  # -1 is ambiguous without rows
    own = local[some.to(x.device)].reshape(int(some.sum()), width)
    own = own.contiguous().cpu()
    words = torch.zeros(len(own), -(-own.size(1) * own.element_size() // 8) * 8).byte()
    words[:, : own.size(1) * own.element_size()] = own.view(torch.uint8)
    words = words.view(torch.int64)
    by_column = 2 * _mix_bits(torch.arange(words.size(1))) + 1
    by_row = _mix_bits((words * by_column).sum(1)) * (2 * _mix_bits(rows.gid[some]) + 1)
    return int(collectives.all_reduce(by_row.sum().view(1), rows.mesh.control)[0])


def _mix_bits(x: Tensor) -> Tensor:
    x = (x + 1) * -7046029254386353131  # wraps, as hashes do
    return (x ^ (x >> 29)) * -4658895280553007687


def all_or_none(changed: bool, mesh: Mesh, what: str = CHANGED) -> None:
    """Raises if a cached input, or `what`, has changed on some ranks only.

    Collective, in the order of calls; nothing is sent where nothing has changed.
    """
    watch = mesh.world.watch
    if watch is not None and mesh.world.size > 1:
        if changed:
            watch.meet_changed(mesh.stage.rank, mesh.world.size, what)
        else:
            watch.pass_by(mesh.stage.rank)


def _constant(t: Any) -> bool:
    return t is None or not (t.requires_grad or t.is_inference())


def _hooked() -> bool:
    try:  # torch has no query for it, but refuses to disable hooks that are in use
        with torch.autograd.graph.disable_saved_tensors_hooks("products are looked up"):
            return False
    except RuntimeError:
        return True


def _key(kind: Any, weight: Any) -> tuple[Any, Any]:
    # WeakIdRef compares by identity, and a dead one equals nothing but itself
    return kind, None if weight is None else WeakIdRef(weight)


def _version(x: Any) -> int:
    if x is None:
        return 0
    local = getattr(x, "local", x)  # which a script may have written to
    return int(x._version) + (0 if local is x else int(local._version))


def _is_stale(key: tuple[Any, Any], state: tuple[int, int], x: Any) -> bool:
    by = key[1]
    return state[0] != _version(x) or (by is not None and by() is None)


def same_storage(a: Tensor | None, b: Tensor | None) -> bool:
    """Tells whether two tensors are the same rows of one memory."""
    if a is None or b is None:
        return a is b
    # by storage, not by address: tensors of no rows share one, and ranks must agree
    one, other = (
        (t.untyped_storage()._cdata, t.storage_offset(), t.stride()) for t in (a, b)
    )
    return one == other
