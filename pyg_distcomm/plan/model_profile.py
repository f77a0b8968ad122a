"""Runs a copy of a model on two nodes and one rank, and records what more ranks would send.

`visited` uses a mesh of its own, so other threads may run meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Module
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.mesh import Mesh, alone
from pyg_distcomm.graph.partition_data import partition
from pyg_distcomm.nn.halo_conv import HaloConv
from pyg_distcomm.nn.layers import convert
from pyg_distcomm.sharded.agreement import in_backward


class Round(NamedTuple):
    """One halo exchange of a layer.

    Args:
        width: the width of the rows.
        to_owners: whether they travel from ghosts to owners.
        adds: whether the layer reads only their sums.
        kept: whether they are cached, since they do not change.
    """

    width: int
    to_owners: bool
    adds: bool = False
    kept: bool = False


@dataclass
class LayerCall:
    """Records one call of a message passing layer.

    Args:
        conv: the layer.
        width: the width of its input.
        is_feature: whether its input is the features themselves.
        needs_gradient: whether its input needs a gradient.
        rounds: its halo exchanges, forward and backward.
        out: the width of its output.
        multiplies: whether it multiplies rows by a matrix of its own.
    """

    conv: Module
    width: int
    is_feature: bool
    needs_gradient: bool
    rounds: list[Round] = field(default_factory=list)
    out: int = 0
    multiplies: bool = False


class RunRecorder:
    """Records what more ranks would send in a run of a model; layers inside layers are skipped.

    What its mesh tells of is noted for the layer that runs, forward, or backward.
    """

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.stack: list[Module] = []
        self.features: list[Any] = []
        self.sums: list[
            int
        ] = []  # of batch norms, and of gradients that are read at once
        self.summed = 0  # gradients of parameters, in numbers
        self.trained: list[Tensor] = []  # all parameters that train
        self.calls: list[LayerCall] = []
        self.now: Any = None  # the record of the layer that runs
        self.norm: Any = None  # the batch norm that runs

    def watch(self, model: Module) -> None:
        """Follows the modules of a model."""
        for part in model.modules():
            part.register_forward_pre_hook(self._enter, with_kwargs=True)
            part.register_forward_hook(self._leave)

    def _enter(self, module: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        outer = is_layer(module) and not any(map(is_layer, self.stack))
        self.stack.append(module)
        if outer:
            self._set("now", self.begin(module, args, kwargs), (args, kwargs))
        if isinstance(module, BatchNorm1d):
            self._set("norm", module, (args, kwargs))

    def _set(self, name: str, value: Any, given: Any) -> None:
        """Sets what runs, until the gradients of what it is given have come."""

        def left() -> None:  # another may have begun, of which it is the input
            if getattr(self, name) is value:
                setattr(self, name, None)

        setattr(self, name, value)
        _at_gradients(given, left)

    def _leave(self, module: Module, args: tuple[Any, ...], out: Any) -> None:
        self.stack.pop()
        if isinstance(module, BatchNorm1d):
            self.norm = None
            _at_gradients(out, lambda: setattr(self, "norm", module))
        if is_layer(module) and not any(map(is_layer, self.stack)):
            record, self.now = self.now, None
            first = out[0] if isinstance(out, (tuple, list)) else out
            record.out = first.size(-1)
            _at_gradients(out, lambda: setattr(self, "now", record))

    def begin(self, layer: Module, args: tuple[Any, ...], kwargs: Any) -> LayerCall:
        """Records a call of a layer with rows x, which may be a pair."""
        x = args[0] if args else kwargs["x"]
        x = x[0] if isinstance(x, (tuple, list)) else x
        is_feature = any(x is each for each in self.features)
        call = LayerCall(bare(layer), x.size(-1), is_feature, x.requires_grad)
        self.calls.append(call)
        return call

    def note(
        self,
        how: str,
        x: Tensor,
        axis: Axis,
        *,
        known: bool = True,
    ) -> None:
        """Records what more ranks would do with a tensor; see `Axis.observer`.

        Args:
            how, x, axis: what, with which tensor, and where.
            known: whether these are the rows at the sources of edges.
        """
        back = in_backward()
        if axis.name not in ("world", "row") or not (back or self.stack):
            return
        if how in ("rows", "back"):
            if self.now is not None and known:
                adds = axis.name == "row"
                one = Round(x.shape[1:].numel(), how == "back", adds)
                self.now.rounds.append(one)
            elif not back:
                self._miss("rows that {} reads by ids")
        elif how == "sum" and (back or self.norm is not None):
            self.sums.append(x.numel())
        elif how == "parameters":
            self.summed += x.numel()
        elif not back:
            what = "sums over nodes of {}" if how == "sum" else "all rows, read by {}"
            self._miss(what)

    def _miss(self, what: str) -> None:
        self.missing.append(what.format(type(bare(self.stack[-1])).__name__))

    def note_product(self) -> None:
        """Records that a layer multiplies by a matrix of its own."""
        self.now.multiplies = True

    def clear(self) -> None:
        """Clears the records."""
        self.missing, self.sums, self.summed, self.calls = [], [], 0, []
        self.now = self.norm = None


def _at_gradients(values: Any, do: Callable[[], None]) -> None:
    """Calls a function when the gradients of any of some tensors have come."""
    for x in tree_leaves(values):
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda _: do())


def mark_kept(calls: Sequence[LayerCall], later: Sequence[LayerCall]) -> None:
    """Marks the rounds of an epoch that a later one has no more: their rows are kept."""
    if len(calls) != len(later):
        return
    for call, other in zip(calls, later, strict=True):
        left = list(other.rounds)
        for place, one in enumerate(call.rounds):
            if one in left:
                left.remove(one)
            else:
                call.rounds[place] = one._replace(kept=True)


def visited(
    model: Module, num_features: int, inputs: str
) -> tuple[list[LayerCall], RunRecorder]:
    """Runs a copy of a model, as it would be distributed, on two nodes and one rank.

    Returns the calls of its layers, and the record of the last epoch.

    Raises:
        ValueError: if the model does not run, or calls no layer, with the reason.
    """
    visit, grad = RunRecorder(), torch.enable_grad()
    try:
        with torch.inference_mode(False), grad, torch.random.fork_rng(devices=[]):
            calls = _run(
                copy.deepcopy(model).cpu().train(), num_features, inputs, visit
            )
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run on a graph of two nodes, from which plans "
            f"tell what it sends ({type(error).__name__}: {error}); have it run as "
            "model(x, edge_index), or give widths=[...] and layers=[...] instead"
        ) from error
    if not calls:
        raise ValueError(
            f"{type(model).__name__} calls no message passing layer in model(x, edge_index); "
            "give widths=[...] and layers=[...] instead"
        )
    return calls, visit


def _run(
    model: Module, num_features: int, inputs: str, visit: RunRecorder
) -> list[LayerCall]:
    model = convert(model)
    visit.watch(model)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.zeros(2, num_features, dtype=dtype)
    data = Data(x=x, edge_index=torch.tensor([[0, 1, 1], [1, 0, 0]]))
    mesh = observing_mesh(visit.note)
    share = partition(data, mesh, "block", node_attrs=["x"])
    x = share.x.requires_grad_(inputs == "trained")
    edges = share.edge_index.topology
    vars(edges)["operator"] = telling(edges.operator, visit.note_product)
    calls: list[list[LayerCall]] = []
    for _ in range(3):  # layers fill their caches, then what they read is kept
        visit.clear()
        visit.features = [x + 0 if inputs == "changing" else x]
        outs = tree_leaves(model(*visit.features, share.edge_index))
        for out in outs:
            if isinstance(out, Tensor) and out.requires_grad:
                out.square().sum().backward(retain_graph=True)
        calls.append(visit.calls)
    visit.trained = [p for p in model.parameters() if p.requires_grad]
    mark_kept(calls[1], calls[2])
    return calls[1]


def telling(multiply: Any, tell: Callable[[], None]) -> Any:
    """Returns a function that tells of a call for a matrix of a layer's own, and makes it."""

    def run(*args: Any, **how: Any) -> Any:
        if not how:  # else it sums rows, of which its rounds tell
            tell()
        return multiply(*args, **how)

    return run


def observing_mesh(observer: Callable[..., None]) -> Mesh:
    """Returns a mesh of one rank that tells `observer` what more ranks would send."""
    mesh = alone((1, 1, 1), 0, torch.device("cpu"))
    parts = {f.name: getattr(mesh, f.name) for f in fields(mesh)}
    axes: Any = {
        name: replace(axis, observer=observer)
        for name, axis in parts.items()
        if isinstance(axis, Axis)
    }
    return replace(mesh, **axes)


def is_layer(module: Module) -> bool:
    """Returns whether a module reads rows of neighbours."""
    return isinstance(module, (MessagePassing, HaloConv))


def bare(module: Module) -> Module:
    """Returns PyG's layer inside a HaloConv, or the module itself."""
    return module.conv if isinstance(module, HaloConv) else module
