"""Computes only the rows of a minibatch that are read later, with the same results.

[Note: trimming] A script only reads the seed nodes of a sampled minibatch, the first rows of a
model's output. Layer k of L needs only the rows that later layers read: R_0, the seeds, for the
last layer; R_d and the sources of edges into R_d for the layer before. Whether a model can be
trimmed is observed, separately for training and evaluation. Its first forward pass on a sampled
minibatch computes all rows, and tracks every operation on the output of a layer
(`LeadingRows`): which layers feed which, and whether each operation is row-wise, or reads the
seeds only. An operation that reads other rows (batch norm in training, a pooling, a loss over
all rows, a hidden layer read beyond the seeds) switches trimming off for the model in its mode;
`trimming_of(model)` names it. Otherwise passes compute only the leading rows, this first one
too, which is repeated ([Note: first pass]). Their tensors still have the
shape of all rows. If an operation reads other rows after all (as in another branch of the
model), these are then computed from the inputs, and trimming is switched off; it raises if
these inputs have changed in place since, or for the gradient of such rows. Operations that
torch does not report (`torch.jit.script` functions, extensions, `torch.vmap`, `torch.tensor` of
a tensor, collectives of torch.distributed, an autograd.Function that returns its input) need
`pdc.convert(model, trim=False)`. Dropout masks are drawn for the computed rows only: from the
same distribution, but at another position of the random stream.

[Note: first pass] The first pass of a model in a mode computes all rows, and shows which are
read ([Note: trimming]). Later passes compute fewer: they draw other dropout
masks, and round in another way. So that a pass does not depend on how often its model has
run, the first is repeated, trimmed, from the state that it began in: random numbers, buffers,
and numbers that modules hold. Its results have all rows; what reads the seeds alone gets
those of the repeated pass, and the random numbers go on from there. What reads other rows
switches trimming off, for later passes too; it gets the rows as the first pass computed them,
and random numbers go on as after that. Nothing is repeated if the forward changes its
arguments in place, or fails the second time; then the model is not trimmed at all.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch_geometric.data.data import BaseData

from pyg_distcomm.comm.store import RankError
from pyg_distcomm.graph.local_adjacency import LocalAdjacency, is_sampled, known
from pyg_distcomm.graph.topology import has_saved_tensors_hooks
from pyg_distcomm.nn.leading_rows import (
    Deferred,
    LeadingRows,
    Mode,
    Origin,
    deferred,
    double,
    leading,
    leaves,
    version_of,
    whole,
    wrap,
)

_COPIED = 1 << 20  # numbers of a buffer that is copied; a larger one may not change


class RandomState:
    """Holds the states of the generators that a forward pass draws from."""

    def __init__(self, devices: frozenset[torch.device]) -> None:
        self._devices = devices
        self._torch = torch.get_rng_state()
        self._cuda = {d: torch.cuda.get_rng_state(d) for d in devices}
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def now(self) -> RandomState:
        """Returns the present states of the same generators."""
        return RandomState(self._devices)

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.set_rng_state(self._torch)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def is_now(self) -> bool:
        """Tells whether nothing has been drawn from torch's generators since."""
        same = torch.equal(self._torch, torch.get_rng_state())
        return same and all(
            torch.equal(state, torch.cuda.get_rng_state(device))
            for device, state in self._cuda.items()
        )


class ModelState:
    """Holds what a forward pass of a model may change besides its results."""

    def __init__(self, model: torch.nn.Module) -> None:
        devices = frozenset(p.device for p in model.parameters() if p.is_cuda)
        self.random = RandomState(devices)
        self._buffers = [
            (b, version_of(b), b.clone() if b.numel() <= _COPIED else None)
            for b in model.buffers()
        ]
        lazy = any(torch.nn.parameter.is_lazy(p) for p in model.parameters())
        self._numbers = [  # lazy modules take their sizes from a first pass
            (vars(m), {k: v for k, v in vars(m).items() if type(v) in (int, float)})
            for m in (() if lazy else model.modules())
        ]

    @property
    def can_be_restored(self) -> bool:
        """Whether no buffer has changed that was too large to copy."""
        return all(
            kept is not None or version_of(b) == version
            for b, version, kept in self._buffers
        )

    def restore(self) -> None:
        """Sets the model and the generators to this state."""
        self.random.restore()
        with torch.no_grad():
            for buffer, version, kept in self._buffers:
                if version_of(buffer) != version and kept is not None:
                    buffer.copy_(kept)
        for attributes, numbers in self._numbers:
            attributes.update(numbers)


class FirstPass:
    """Holds what the first pass of a model began with, and what it ended in."""

    def __init__(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._before: ModelState | None = ModelState(model)
        self._given: Any = _shallow(list(args)), _shallow(kwargs)
        self._versions = [(t, version_of(t)) for t in leaves((args, kwargs), Tensor)]
        self._full: RandomState | None = None  # as if all passes were untrimmed
        self._trimmed: RandomState | None = None  # as it is, after the repeated pass
        self.was_read = False  # the rows of the repeated pass

    def repeat(self, model: torch.nn.Module, mode: Mode, out: Any) -> Any:
        """Runs the pass again, and returns its results; see [Note: first pass].

        The caller makes it trimmed.
        """
        before, self._before = self._before, None
        (args, kwargs), self._given = self._given, None
        changed = any(version_of(t) != version for t, version in self._versions)
        self._versions = []
        assert before is not None
        if changed or not before.can_be_restored:
            mode.block("its forward changes its arguments, or a large buffer, in place")
            return out
        after = ModelState(model)
        before.restore()
        try:
            again = model.forward(*args, **kwargs)
        except RankError:
            raise
        except Exception as error:
            mode.block(f"its forward does not run twice ({error})")
            again = None
        if mode.blocked is not None:
            after.restore()
            return out
        self._full, self._trimmed = after.random, after.random.now()
        mode.first = self
        return double(out, again, self)

    def run_both(self, full: Callable[[], Any], trimmed: Callable[[], Any]) -> Any:
        """Runs an operation on all rows and on leading ones, each with its random numbers."""
        assert self._full is not None
        assert self._trimmed is not None
        if not self._trimmed.is_now():
            self._full = self._trimmed = self._trimmed.now()
        again = trimmed()
        self._trimmed = self._trimmed.now()
        self._full.restore()
        out = full()
        self._full = self._full.now()
        self._trimmed.restore()
        return out, again

    def undo(self) -> None:
        """Goes on with random numbers as after an untrimmed pass."""
        if self._full is not None and self._trimmed is not None:
            if self._trimmed.is_now():
                self._full.restore()
            self._full = self._trimmed = None


def _shallow(value: Any) -> Any:
    """Returns a copy of containers and data objects, with the same tensors."""
    if isinstance(value, BaseData):
        return copy.copy(value)
    if type(value) in (list, tuple):
        return type(value)(map(_shallow, value))
    if type(value) is dict:
        return {key: _shallow(part) for key, part in value.items()}
    return value


def reads_minibatch(args: Any, kwargs: Any) -> bool:
    """Tells whether a call gets edges that a sampler of this package has drawn."""
    edges = [t for t in leaves((args, kwargs), Tensor) if type(t) is Tensor]
    for value in (*args, *kwargs.values()):
        if isinstance(value, BaseData):
            edges += [store.get("edge_index") for store in value.edge_stores]
    return any(is_sampled(t) for t in edges)


# What is known of a model -------------------------------------------------------------


class Trimmer:
    """Holds the hooks of one model, and their observations; see [Note: trimming]."""

    def __init__(self) -> None:
        self.modes = {True: Mode(), False: Mode()}

    def begin(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Begins a forward pass, unless the model is a submodule of one that is running."""
        if torch.compiler.is_compiling() or is_tracing():
            return
        now = _pass.get()
        if now is not None and now.contains(model):
            now.within += 1
            return
        mode = self.modes[model.training]
        if _is_replayed() or (model.training and not torch.is_grad_enabled()):
            mode = Mode(blocked="runs under checkpointing, or without gradients")
        elif any(part._backward_hooks for part in model.modules()):
            mode.block("a backward hook reads all rows")
        mode.rewritten.clear()
        mode.first = None
        begun = Pass(mode, model, now)
        unknown = mode.depths is None and mode.blocked is None
        if unknown and reads_minibatch(args, kwargs):
            begun.first = FirstPass(model, args, kwargs)
        _pass.set(begun)

    def end(self, model: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Ends the forward pass; a failed one concludes nothing."""
        if torch.compiler.is_compiling() or is_tracing():
            return None
        now = _pass.get()
        if now is None:
            return None
        if now.within:
            now.within -= 1
            return None
        if out is not None:
            now.finish()
        if out is not None and now.first is not None and now.trims:
            _pass.set(Pass(now.mode, model, now.outer))
            try:
                out = now.first.repeat(model, now.mode, out)
            finally:
                _pass.set(now.outer)
            return out
        _pass.set(now.outer)
        return None

    def __deepcopy__(self, memo: Any) -> Trimmer:
        return Trimmer()

    def __reduce__(self) -> Any:
        return Trimmer, ()


class Pass:
    """Holds the state of one forward pass of a model that may be trimmed."""

    def __init__(self, mode: Mode, model: torch.nn.Module, outer: Pass | None) -> None:
        self._model = weakref.ref(model)
        if outer is not None and outer._model() is model:
            outer = outer.outer  # an interrupt has left it behind
        self.mode = mode
        self.outer: Pass | None = outer
        self.graded = torch.is_grad_enabled()
        self.within = 0  # models under way that are parts of this one
        self.calls: list[frozenset[int]] = []  # those whose rows each call reads
        self.untrimmed: str | None = None  # a layer that computes all rows
        self.first: FirstPass | None = None  # what it began with, if it is the first

    def contains(self, model: torch.nn.Module) -> bool:
        """Tells whether a model is a submodule of the running one."""
        whole = self._model()
        return (
            model is not whole and whole is not None and model in set(whole.modules())
        )

    @property
    def trims(self) -> bool:
        """Whether rows are left out."""
        return self.mode.blocked is None and self.mode.depths is not None

    def finish(self) -> None:
        """Concludes which layers follow which."""
        if not self.calls and self.untrimmed is not None:
            self.mode.block(f"{self.untrimmed} is not trimmed")
        if self.mode.depths is not None or not self.calls or self.mode.blocked:
            return
        depths = [0] * len(self.calls)
        for call in reversed(range(len(self.calls))):
            for earlier in self.calls[call]:
                depths[earlier] = max(depths[earlier], depths[call] + 1)
        self.mode.depths = depths


def _is_replayed() -> bool:
    """Tells whether the forward pass is, or will be, recomputed in the backward pass."""
    return has_saved_tensors_hooks() or torch._C._current_graph_task_id() != -1


_pass: ContextVar[Pass | None] = ContextVar("the forward pass", default=None)


def install(model: torch.nn.Module) -> None:
    """Makes a model compute only the rows that are read; see [Note: trimming]."""
    if _trimmer_of(model) is None:
        trimmer = Trimmer()
        model.register_forward_pre_hook(trimmer.begin, with_kwargs=True)
        model.register_forward_hook(trimmer.end, always_call=True, with_kwargs=True)


def remove(model: torch.nn.Module) -> None:
    """Makes a model compute all rows."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Trimmer):
                del hooks[key]
                model._forward_hooks_always_called.pop(key, None)
                model._forward_hooks_with_kwargs.pop(key, None)
                model._forward_pre_hooks_with_kwargs.pop(key, None)


def _trimmer_of(model: torch.nn.Module) -> Trimmer | None:
    owners = (getattr(h, "__self__", None) for h in model._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Trimmer)), None)


def trimming_of(model: torch.nn.Module) -> str:
    """Returns whether a converted model computes only the rows that are read, and why not.

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


# Layers ------------------------------------------------------------------------------


def note_untrimmed(edge_index: Any, what: str) -> None:
    """Records that a layer computes all rows of a minibatch.

    A model of such layers alone is not trimmed; among others the rest may be.
    """
    now = _pass.get()
    if now is not None and isinstance(edge_index, Tensor):
        found = known(edge_index)
        if found is not None and found.batch is not None:
            now.untrimmed = what


def call(
    adjacency: LocalAdjacency | None,
    edge_index: Any,
    x: Any,
    compute: Callable[[Any, Any, int | None], Any],
    reads: Iterable[Any] = (),
) -> Any:
    """Runs one layer on the rows that are read.

    Args:
        adjacency: the cache of its edges; None if it runs PyG's code.
        edge_index: the edges.
        x: its features, a tensor or a pair.
        compute: the layer, of sources, targets, and how many targets to compute; None
            computes all, and is the only choice for sources that are not all there.
        reads: tensors that `compute` reads besides.
    """
    source, target = x if isinstance(x, (tuple, list)) else (x, x)
    now = _pass.get()
    batch = None if adjacency is None else adjacency.batch
    tracked = [t for t in (source, target) if isinstance(t, LeadingRows)]
    if now is not None and (_is_replayed() or torch.is_grad_enabled() != now.graded):
        now.mode.block("a layer runs under checkpointing")
    if now is None or batch is None or adjacency is None or now.mode.blocked:
        return _on_all(compute, source, target)
    sizes = [batch.sizes[kind] for kind in adjacency.ends]
    found = [None if t is None else _total(t) for t in (source, target)]
    own = all(t.origin.mode is now.mode for t in tracked)
    if not own or found[0] != sizes[0] or found[1] not in (None, sizes[1]):
        return _on_all(compute, source, target)
    at = len(now.calls)
    now.calls.append(frozenset().union(*(t.origin.calls for t in tracked)))
    first = batch.rows(0)
    if first is None:
        return _on_all(compute, source, target)
    origin = Origin(now.mode, sizes[1], first[adjacency.ends[1]], frozenset([at]))
    if not now.trims:
        out = compute(leading(source), leading(target), None)
        return wrap(out, origin) if isinstance(out, Tensor) else out
    rows = _rows_of(now, adjacency, edge_index, at, source, target)
    if rows is None:
        return _on_all(compute, source, target)
    out = compute(leading(source), leading(target), rows)
    args = tuple(map(deferred, (source, target)))
    origin.every = Deferred(
        lambda *ends: compute(ends[0], ends[1], None), args, {}, reads
    )
    return wrap(out, origin)


def _rows_of(
    now: Pass,
    adjacency: LocalAdjacency,
    edge_index: Any,
    at: int,
    source: Any,
    target: Any,
) -> int | None:
    """Returns the number of rows that a call computes; None if it has to compute all."""
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
