"""Products of the graph with inputs that do not change, computed and exchanged once.

[Note: constant inputs] The features of a full-graph script are the same tensor in every
epoch, so A X0 is the same product. Whether an input will come again is not known when it
is first seen: one that dropout has made comes once, and to multiply it at its full width
for nothing would be dear. So an input is remembered, weakly, when it is first seen, and its
product is kept from the second time on.

Activation checkpointing computes a layer again in the backward pass, and takes what that
saves for what the forward pass saved: both must multiply alike, so where hooks look after
saved tensors nothing is remembered and nothing taken from memory.

A resumed run multiplies what the run before it had seen at once, as that would have, so
that both round alike. A checkpoint holds a fingerprint of these inputs, of a sample of rows.

Whether an input has changed is known from its version, which operations in place count up:
not writes that pass them by (`x.data`, arrays of numpy that share its memory). A rank sees
its own rows only, so an input must change on all ranks or on none.
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
from pyg_distcomm.comm.mesh import Mesh

ORDERS = ("auto", "first", "last")
_SAMPLE = 4096  # rows of a fingerprint


@dataclass(frozen=True)
class MultiplyOrder:
    """How a layer takes A X W apart.

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
        """Says whether a layer computes (A X) W, and not A (X W)."""
        before, after = width_in * (1 + grads[0]), width_out * (1 + grads[1])
        return self.order == "first" or (self.order == "auto" and before <= after)


class ProductCache:
    """What one graph has been multiplied with, by input and kind of product.

    Price: the rows of each product that is kept, `[n_i, f]`, for as long as its input lives.
    """

    def __init__(self) -> None:
        # for each input that is alive: kind -> (state of the inputs, product or None, its
        # version: a layer may write to what it is given)
        self._known: Any = WeakTensorKeyDictionary()

    def product(
        self,
        kind: Any,
        inputs: tuple[Any, Any],
        multiply: Callable[[], Tensor],
        *,
        at_once: bool = False,
    ) -> Tensor | None:
        """Returns the product of inputs seen before, or None and remembers them.

        Args:
            kind: tells operators apart.
            inputs: the features, and the weights of edges or None.
            multiply: computes the product; collective, so all ranks must have seen the
                same inputs as often.
            at_once: from the first use on, as where a run goes on that had seen them.
        """
        x, weight = inputs
        with torch._C.DisableTorchFunctionSubclass():  # facts of x, as they are
            if not (_constant(x) and _constant(weight)) or _hooked():
                return None
            kinds = self._known.setdefault(x, {})
            key, now = _key(kind, weight), (x._version, _version(weight))
            before, product, version = kinds.get(key, (None, None, 0))
        written = product is not None and product._version != version
        all_or_none(before not in (None, now) or written, x.rows.mesh)
        if before != now:
            at_once = _note(self, x, key, at_once)
        if before != now and not at_once:
            for old in [k for k, (state, *_) in kinds.items() if _gone(k, state, x)]:
                del kinds[old]
            kinds[key] = now, None, 0
            return None
        if product is None or before != now or written:
            with torch.inference_mode(False), torch.no_grad():
                product = multiply()  # to be trained with, too
            kinds[key] = now, product, product._version
        kept: Tensor = product
        return kept

    def alive(self) -> Iterator[tuple[str, Any]]:
        """Yields the inputs that were seen and have not changed, and the kinds of products."""
        for x, kinds in list(self._known.items()):
            for key, (state, *_) in kinds.items():
                if not _gone(key, state, x):
                    yield _named(key), x

    def stage(self, x: Any, kind: Any, weight: Any = None) -> int:
        """Returns 1 if an input was seen once, 2 if its product is kept, else 0."""
        found = self._known.get(x, {}).get(_key(kind, weight), (None, None, 0))
        before, product, _ = found
        if before is None or before[0] != x._version:
            return 0
        return 1 if product is None else 2


class Inputs:
    """Which inputs the graphs of a mesh have been multiplied with, and a checkpoint's were.

    Price: one all-reduce of a word for each input that is alive, when it is saved; after
    that was loaded, of one for each new input until all of the checkpoint's have come.
    """

    def __init__(self) -> None:
        self.of: Any = weakref.WeakSet()
        self._first: Any = WeakTensorKeyDictionary()  # when each input was first seen
        self._count = 0
        self._expected: list[list[Any]] = []

    def note(self, x: Any, key: tuple[Any, Any]) -> bool:
        """Notes a new input; says if a checkpoint's run had seen it. Collective."""
        self._count += 1
        self._first.setdefault(x, self._count)
        if not self._expected:
            return False
        like = [_named(key), list(x.shape)]
        if not any(one[:2] == like for one in self._expected):
            return False
        found = [*like, _fingerprint(x)]
        if found not in self._expected:
            return False
        self._expected.remove(found)
        return True

    def told(self, mesh: Mesh) -> str:
        """Returns the inputs that are alive on all ranks, as text; collective."""
        here = {(self._first[x], name): x for one in self.of for name, x in one.alive()}
        every = collectives.all_gather_object(sorted(map(list, here)), mesh.world)
        both = [one for one in every[0] if all(one in other for other in every)]
        rows = [(name, here[number, name]) for number, name in both]
        return json.dumps([[name, list(x.shape), _fingerprint(x)] for name, x in rows])

    def expect(self, text: str) -> None:
        """Takes what `told` returned in the run before."""
        self._expected = json.loads(text) if text else []


def inputs_of(mesh: Mesh) -> Inputs:
    """Returns what is known of the inputs of a mesh."""
    if mesh.inputs is None:
        mesh.inputs = Inputs()
    return mesh.inputs  # type: ignore[no-any-return]


def _note(constants: ProductCache, x: Any, key: Any, at_once: bool) -> bool:
    mesh = x.rows.mesh
    if not isinstance(mesh, Mesh):  # that of a chunk
        return at_once
    inputs = inputs_of(mesh)
    inputs.of.add(constants)
    return inputs.note(x, key) or at_once


def _named(key: tuple[Any, Any]) -> str:
    kind, weight = key
    return f"{kind} {weight is not None}"


def _fingerprint(x: Any) -> int:
    """Returns a hash of a sample of rows, the same however they are spread; collective."""
    rows = x.rows
    some = rows.gid % max(1, rows.total // _SAMPLE) == 0
    local = x.to_local().detach()
    width = math.prod(local.shape[1:])  # which -1 is not, where no row is here
    own = local[some.to(x.device)].reshape(int(some.sum()), width)
    own = own.contiguous().cpu()
    words = torch.zeros(len(own), -(-own.size(1) * own.element_size() // 8) * 8).byte()
    words[:, : own.size(1) * own.element_size()] = own.view(torch.uint8)
    words = words.view(torch.int64)
    by_column = 2 * _mixed(torch.arange(words.size(1))) + 1
    by_row = _mixed((words * by_column).sum(1)) * (2 * _mixed(rows.gid[some]) + 1)
    return int(collectives.all_reduce(by_row.sum().view(1), rows.mesh.control)[0])


def _mixed(x: Tensor) -> Tensor:
    x = (x + 1) * -7046029254386353131  # wraps, as hashes do
    return (x ^ (x >> 29)) * -4658895280553007687


def all_or_none(changed: bool, mesh: Mesh) -> None:
    """Raises if something that is remembered has changed in place on some ranks only.

    Collective, in the order of calls; nothing is sent where nothing has changed.
    """
    watch = mesh.world.watch
    if watch is not None and mesh.world.size > 1:
        watch.all_or_none(changed, mesh.stage.rank, mesh.world.size)


def _constant(t: Any) -> bool:
    return t is None or not (t.requires_grad or t.is_inference())


def _hooked() -> bool:
    try:  # torch has no question for it, but will not disable hooks that are in use
        with torch.autograd.graph.disable_saved_tensors_hooks("products are looked up"):
            return False
    except RuntimeError:
        return True


def _key(kind: Any, weight: Any) -> tuple[Any, Any]:
    # WeakIdRef compares by identity, and a dead one equals nothing but itself
    return kind, None if weight is None else WeakIdRef(weight)


def _version(weight: Any) -> int:
    return 0 if weight is None else int(weight._version)


def _gone(key: tuple[Any, Any], state: tuple[int, int], x: Any) -> bool:
    by = key[1]
    return state[0] != x._version or (by is not None and by() is None)
