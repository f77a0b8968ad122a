"""Repeats the first pass of a model as later passes run, so that it has their results.

[Note: first pass] The first pass of a model in a mode computes all rows, and shows which are
read ([Note: trimming] in `nn.trimming`). Later passes compute fewer: they draw other dropout
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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data.data import BaseData

from pyg_distcomm.comm.store import RankError
from pyg_distcomm.graph.local_adjacency import is_sampled
from pyg_distcomm.nn.leading_rows import Mode, double
from pyg_distcomm.nn.trees import leaves, version_of

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
    """Holds what the first pass of a model began with, and what it ended in.

    Args:
        model: the model.
        args, kwargs: what its forward is called with.
    """

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
