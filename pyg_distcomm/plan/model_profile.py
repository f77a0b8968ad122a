"""Runs a copy of a model on two nodes and one rank, and records what more ranks would send.

`visited` records a model's layers and sums; `items_of_stack` records a stack item by item, as a
pipeline runs it. Both use a mesh of their own, so other threads may run meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Module
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm import random
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.mesh import Mesh, alone
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.partition_data import partition
from pyg_distcomm.nn.convert import convert
from pyg_distcomm.nn.halo_conv import HaloConv
from pyg_distcomm.pipeline.chunk_graph import ChunkPass
from pyg_distcomm.pipeline.chunks import plan_chunks
from pyg_distcomm.pipeline.epoch import Stage, StageTensors, Values
from pyg_distcomm.pipeline.history_buffer import GradientRule
from pyg_distcomm.pipeline.layer_stack import (
    StackLayer,
    check_links,
    estimated_costs,
    names_crossing,
    names_from_data,
    read_stack,
)
from pyg_distcomm.pipeline.warmup import as_leaves
from pyg_distcomm.sharded.agreement import in_backward


class Round(NamedTuple):
    """One halo exchange of a layer.

    Args:
        width: the width of the rows.
        to_owners: whether they travel from ghosts to owners.
        adds: whether the layer reads only their sums.
        kept: whether they are cached, since they do not change.
        coded: whether a link codes them.
    """

    width: int
    to_owners: bool
    adds: bool = False
    kept: bool = False
    coded: bool = True


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
        read: whether its output receives a gradient.
        coded: whether a link codes its products.
    """

    conv: Module
    width: int
    is_feature: bool
    needs_gradient: bool
    rounds: list[Round] = field(default_factory=list)
    out: int = 0
    multiplies: bool = False
    read: bool = True
    coded: bool = True


class SequentialStack(Module):
    """Runs a stack, as `Pipeline` takes it, from its first layer to its last."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.data_inputs: dict[str, Any] = {}  # attributes of the data, beside x
        self._set_stack(read_stack(layers))

    def _set_stack(self, stack: list[StackLayer]) -> None:
        self.stack = stack
        self.parts = torch.nn.ModuleList(
            layer.run for layer in stack if isinstance(layer.run, Module)
        )

    def converted(self) -> SequentialStack:
        """Makes its layers distributed, in place."""
        self._set_stack([layer.converted() for layer in self.stack])
        return self

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        """Runs the stack."""
        values: dict[str, Any] = {"x": x, "edge_index": edge_index, **self.data_inputs}
        for layer in self.stack:
            out = layer.run(*(values[name] for name in layer.reads))
            several = out if len(layer.writes) > 1 else (out,)
            values.update(zip(layer.writes, several, strict=True))
        return out


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
            self.end(record, out[0] if isinstance(out, (tuple, list)) else out)
            _at_gradients(out, lambda: setattr(self, "now", record))

    def begin(self, layer: Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Returns the record of a layer call."""
        raise NotImplementedError

    def end(self, record: Any, out: Any) -> None:
        """Records the output of the call."""
        raise NotImplementedError

    def note_rows(self, record: Any, one: Round, edges: Rows | None) -> None:
        """Records an exchange of rows in a layer."""
        raise NotImplementedError

    def note(
        self,
        how: str,
        x: Tensor,
        axis: Axis,
        *,
        known: bool = True,
        edges: Rows | None = None,
        coded: bool = False,
    ) -> None:
        """Records what more ranks would do with a tensor; see `Axis.observer`.

        Args:
            how, x, axis: what, with which tensor, and where.
            known: whether these are the rows at the sources of edges.
            edges: the edges.
            coded: whether a link codes them.
        """
        back = in_backward()
        if axis.name not in ("world", "row") or not (back or self.stack):
            return
        if how in ("rows", "back"):
            if self.now is not None and known:
                adds = axis.name == "row"
                one = Round(x.shape[1:].numel(), how == "back", adds, coded=coded)
                self.note_rows(self.now, one, edges)
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

    def called(self, layer: Module, x: Any) -> LayerCall:
        """Returns the record of a call with rows x, which may be a pair."""
        x = x[0] if isinstance(x, (tuple, list)) else x
        return LayerCall(bare(layer), x.size(-1), self.is_feature(x), x.requires_grad)

    def is_feature(self, x: Any) -> bool:
        """Returns whether x is a feature tensor of the data."""
        return any(x is each for each in self.features)

    def clear(self) -> None:
        """Clears the records."""
        self.missing, self.sums, self.summed = [], [], 0
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


class _ModelRecorder(RunRecorder):
    """Records the layer calls, exchanges and sums of a run of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []

    def begin(self, layer: Module, args: tuple[Any, ...], kwargs: Any) -> LayerCall:
        self.calls.append(self.called(layer, args[0] if args else kwargs["x"]))
        return self.calls[-1]

    def end(self, record: LayerCall, out: Any) -> None:
        record.out = out.size(-1)

    def note_rows(self, record: LayerCall, one: Round, edges: Rows | None) -> None:
        record.rounds.append(one._replace(coded=True))

    def note_product(self) -> None:
        """Records that a layer multiplies by a matrix of its own."""
        self.now.multiplies = True

    def clear(self) -> None:
        super().clear()
        self.calls = []


def visited(
    model: Module, num_features: int, inputs: str
) -> tuple[list[LayerCall], RunRecorder]:
    """Runs a copy of a model, as it would be distributed, on two nodes and one rank.

    Returns the calls of its layers, and the record of the last epoch.

    Raises:
        ValueError: if the model does not run, with the reason.
    """
    visit, grad = _ModelRecorder(), torch.enable_grad()
    try:
        with torch.inference_mode(False), grad, torch.random.fork_rng(devices=[]):
            calls = _run(
                copy.deepcopy(model).cpu().train(), num_features, inputs, visit
            )
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return calls, visit


def _run(
    model: Module, num_features: int, inputs: str, visit: _ModelRecorder
) -> list[LayerCall]:
    model = model.converted() if isinstance(model, SequentialStack) else convert(model)
    visit.watch(model)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.zeros(2, num_features, dtype=dtype)
    data = Data(x=x, edge_index=torch.tensor([[0, 1, 1], [1, 0, 0]]))
    data.edge_weight = torch.ones(3, dtype=dtype)
    mesh = observing_mesh(visit.note)
    share = partition(data, mesh, "block", node_attrs=["x"], edge_attrs=["edge_weight"])
    x = share.x.requires_grad_(inputs == "trained")
    edges = share.edge_index.topology
    vars(edges)["operator"] = telling(edges.operator, visit.note_product)
    if isinstance(model, SequentialStack):
        model.data_inputs = {"edge_weight": share.edge_weight}
    calls: list[list[LayerCall]] = []
    for _ in range(3):  # layers fill their caches, then what they read is kept
        visit.clear()
        visit.features = [x + 0 if inputs == "changing" else x]
        outs = tree_leaves(model(*visit.features, share.edge_index))
        for out in outs:
            if isinstance(out, Tensor) and out.requires_grad:
                out.square().sum().backward(retain_graph=True)
        calls.append(visit.calls)
    mark_kept(calls[1], calls[2])
    return calls[1]


def telling(multiply: Any, tell: Callable[[], None]) -> Any:
    """Returns a function that tells of a call, and makes it."""

    def run(*args: Any) -> Any:
        tell()
        return multiply(*args)

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


_KNOWN = ("x", "edge_weight")  # attributes of the data


@dataclass(frozen=True)
class Read:
    """Describes one exchange of rows in a forward pass.

    Args:
        width: the width of the rows.
        needs_gradient: whether their gradients travel back.
        gradient_behind: whether they do in all stages but the first.
        exact: whether they are exact and synchronous, whatever the link.
    """

    width: int
    needs_gradient: bool
    gradient_behind: bool = True
    exact: bool = False


@dataclass(frozen=True)
class Item:
    """Describes one item of a stack.

    Args:
        cost: its relative cost, as `Pipeline` estimates.
        reads: its exchanges of neighbour rows.
        dense: the widths of the matrices that it multiplies with.
        parameters: the number of its trainable parameters.
        crossing_width: the elements a node that go on to the next item.
        skips: the number of tensors among them, beside the first.
        border_problem: why they cannot cross to another stage; empty if they can.
        readers: the layers in it that exchange rows by the link.
        layer: the layer, if it is known.
    """

    cost: float
    reads: tuple[Read, ...]
    dense: tuple[tuple[int, int], ...]
    parameters: int
    crossing_width: int
    skips: int
    border_problem: str = ""
    readers: tuple[list[MessagePassing], ...] = ()
    layer: StackLayer | None = None


@torch.inference_mode(False)
def items_of_stack(layers: Any, num_features: int) -> list[Item]:
    """Reads the items of a stack by running a copy of it, as a pipeline does, on two nodes.

    Raises:
        ValueError, TypeError: as `Pipeline` does, if `layers` is no stack of layers, or cannot
            run on chunks.
    """
    stack = [layer.converted() for layer in copy.deepcopy(read_stack(layers))]
    check_links(stack)
    for layer in stack:
        if isinstance(layer.run, torch.nn.Module):
            layer.run.cpu().eval()
    costs, stage = estimated_costs(stack), _stage_of(stack, num_features)
    try:
        with random.apart(torch.device("cpu")):
            return _profile(stack, costs, stage)
    except (ValueError, TypeError, RuntimeError):
        raise
    except Exception as error:  # the script's own layers may raise anything
        message = f"{type(error).__name__}: {error}"
        raise ValueError(f"the stack does not run on two nodes ({message})") from error


def _stage_of(stack: list[StackLayer], num_features: int) -> Stage:
    """Returns a stage of all layers, on two nodes that this process has alone."""
    missing = [
        name for name in names_from_data(stack, 0, len(stack)) if name not in _KNOWN
    ]
    if missing:
        raise ValueError(
            f"the stack reads {', '.join(missing)} of the data, whose width is not known "
            "here; give widths=[...] and skips=... instead of the model"
        )
    dtype = next((p.dtype for one in stack for p in _trained(one)), torch.float32)
    x, weight = torch.zeros(2, num_features, dtype=dtype), torch.ones(3, dtype=dtype)
    data = Data(x, torch.tensor([[0, 1, 1], [1, 0, 0]]), edge_weight=weight)
    share = partition(data, alone((1, 1, 1), 0, torch.device("cpu")), "block")
    plan = plan_chunks(share.edge_index, torch.zeros(2, dtype=torch.long), 0)
    stage = Stage(stack, 0, len(stack), ChunkPass(plan, GradientRule(), None, 0))
    stage.load_data(share)
    return stage


def _profile(stack: list[StackLayer], costs: list[float], stage: Stage) -> list[Item]:
    run, found = stage.run, []
    values, readers = stage.chunk_inputs(None), [0]
    with torch.no_grad():  # makes the sites
        for _ in _run_layers(stage, None, values):
            readers.append(len(run.readers))
    run.mode = "again"
    with torch.enable_grad():
        values = stage.chunk_inputs(0)
        for place in _run_layers(stage, 0, values):
            values.update(
                as_leaves({name: values[name] for name in stack[place].writes})
            )
        gradient_behind = {key: site.needs_gradient for key, site in run.sites.items()}
        for site in run.sites.values():
            site.needs_gradient = False
        values = stage.chunk_inputs(0)
        for place in _run_layers(stage, 0, values):
            names, layer = names_crossing(stack, place + 1), stack[place]
            crossing_width, border_problem = _crossing_width(
                values, names, layer, stage.view(0).nodes
            )
            matrices = [p for p in _trained(layer) if p.dim() == 2]
            reads = tuple(
                Read(
                    site.mix.size(1),
                    site.needs_gradient,
                    gradient_behind[key],
                    bool(site.exact_reason),
                )
                for key, site in run.sites.items()
                if key[0] == place
            )
            found.append(
                Item(
                    costs[place],
                    reads,
                    tuple((p.size(0), p.size(1)) for p in matrices),
                    sum(p.numel() for p in _trained(layer)),
                    crossing_width,
                    len(names) - 1,
                    border_problem,
                    tuple(run.readers[readers[place] : readers[place + 1]]),
                    layer,
                )
            )
    return found


def _run_layers(stage: Stage, chunk: int | None, values: Values) -> Iterator[int]:
    """Runs a stage's layers one by one, and adds their outputs to `values`."""
    for place, layer in enumerate(stage.layers):
        stage.run.begin_layer(place, chunk)
        values.update(stage.call(layer, values))
        yield place


def _crossing_width(
    values: Values, names: Sequence[str], layer: StackLayer, nodes: Rows
) -> tuple[int, str]:
    """Returns the width of the tensors that cross after a layer, or why they cannot."""
    try:
        return StageTensors.of(values, names, str(layer), nodes).width, ""
    except TypeError as error:
        return 0, str(error)


def _trained(layer: StackLayer) -> Sequence[Tensor]:
    if not isinstance(layer.run, torch.nn.Module):
        return ()
    return [p for p in layer.run.parameters() if p.requires_grad]
