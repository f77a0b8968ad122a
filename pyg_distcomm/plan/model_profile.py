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
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm import random
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.mesh import Mesh, alone
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.partition_data import partition
from pyg_distcomm.graph.product_cache import ProductCache
from pyg_distcomm.graph.topology import LocalGraph, Topology
from pyg_distcomm.halo.halo import Link
from pyg_distcomm.nn.batch_norm import DistBatchNorm
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
        against_edges: whether it fetches rows against the edges, which cannot be priced.
        read: whether its output receives a gradient.
        coded: whether a link codes its products.
    """

    conv: Module
    width: int
    is_feature: bool
    needs_gradient: bool
    rounds: list[Round] = field(default_factory=list)
    out: int = 0
    against_edges: bool = False
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


@dataclass(frozen=True, eq=False)
class RecordingGraph(LocalGraph):
    """Records the rows of these edges that more ranks would exchange.

    Args:
        note: records rows (rows, link, whether they go to owners), and returns them.
        keep: records rows that would be cached if they are features, and returns them then.
    """

    note: Callable[[Tensor, Any, bool], Tensor]
    keep: Callable[[Any], Tensor | None] = field(kw_only=True)

    @staticmethod
    def record(topology: Topology, note: Any, keep: Any) -> None:
        """Replaces the local edges of a topology by recording ones."""
        here = {f.name: getattr(topology.locals, f.name) for f in fields(LocalGraph)}
        topology.locals = RecordingGraph(**here, note=note, keep=keep)

    def with_ghosts(self, x: Tensor, link: Link | None = None) -> Tensor:
        """Records own rows `x`, and returns them."""
        return self.note(x, link, False)

    def with_constant_ghosts(self, x: Any, constants: ProductCache) -> Tensor | None:
        """Records that the rows of features are cached."""
        return self.keep(x)

    def scatter_to_owners(
        self, ghosts: Tensor, own: Tensor, link: Link | None = None
    ) -> Tensor:
        """Records that sums for ghosts would be sent; one rank has no ghosts."""
        return self.note(own, link, True)


class RunRecorder:
    """Records the layers that a run of a model calls; layers inside layers are skipped."""

    def __init__(self) -> None:
        self.sums: list[str] = []
        self.stack: list[Module] = []
        self.features: list[Any] = []
        self.keeps = False  # whether these are the same in every epoch

    def watch(self, model: Module) -> None:
        """Follows the modules of a model."""
        for part in model.modules():
            part.register_forward_pre_hook(self._enter, with_kwargs=True)
            part.register_forward_hook(self._leave)

    def _enter(self, module: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if is_layer(module) and not any(map(is_layer, self.stack)):
            self.begin(module, args, kwargs)
        self.stack.append(module)

    def _leave(self, module: Module, args: tuple[Any, ...], out: Any) -> None:
        self.stack.pop()
        if is_layer(module) and not any(map(is_layer, self.stack)):
            self.end(out[0] if isinstance(out, (tuple, list)) else out)

    def begin(self, layer: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Records the start of a layer call."""
        raise NotImplementedError

    def end(self, out: Any) -> None:
        """Records the output of the call."""
        raise NotImplementedError

    def called(self, layer: Module, x: Any) -> LayerCall:
        """Returns the record of a call with rows x, which may be a pair."""
        x = x[0] if isinstance(x, (tuple, list)) else x
        return LayerCall(bare(layer), x.size(-1), self.is_feature(x), x.requires_grad)

    def is_feature(self, x: Any) -> bool:
        """Returns whether x is a feature tensor of the data."""
        return any(x is each for each in self.features)

    def keep(self, call: LayerCall, x: Any) -> Tensor:
        """Records that rows are cached, and returns those of this rank."""
        rows: Tensor = x.to_local()
        call.rounds.append(Round(rows[0].numel(), False, kept=True))
        return rows


class _ModelRecorder(RunRecorder):
    """Records the layer calls, exchanges and sums of a run of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []
        self.norms: list[int] = []

    def begin(self, layer: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        self.calls.append(self.called(layer, args[0] if args else kwargs["x"]))

    def end(self, out: Any) -> None:
        self.calls[-1].out = out.size(-1)

    def note(self, x: Tensor, link: Any, to_owners: bool, adds: bool = False) -> Tensor:
        """Records rows that would be exchanged, or summed, and their gradients."""
        directions = (to_owners, not to_owners) if x.requires_grad else (to_owners,)
        # summed rows are features if they share the memory of the features
        kept = (
            adds
            and self.keeps
            and x.data_ptr() == self.features[0].to_local().data_ptr()
        )
        width = x[0].numel()
        self.calls[-1].rounds += [Round(width, way, adds, kept) for way in directions]
        return x

    def note_kept(self, x: Any) -> Tensor | None:
        """Records that rows of features are cached; returns None for other rows."""
        return (
            self.keep(self.calls[-1], x) if self.keeps and self.is_feature(x) else None
        )

    def note_against_edges(self, x: Tensor, link: Any, to_owners: bool) -> Tensor:
        """Records that rows would be fetched against the edges."""
        self.calls[-1].against_edges = True
        return x

    def note_sum(self, x: Tensor, differentiable: bool) -> None:
        """Records a sum over all nodes: its width in batch norms, else its module."""
        if not self.stack:
            return
        if not any(isinstance(m, DistBatchNorm) for m in self.stack):
            self.sums.append(type(bare(self.stack[-1])).__name__)
        elif differentiable:  # and the same for gradients, if there are any
            self.norms += [x.numel()] * (1 + x.requires_grad)

    def clear(self) -> None:
        """Clears the records."""
        for records in (self.calls, self.sums, self.norms):
            records.clear()


def visited(
    model: Module, num_features: int, inputs: str
) -> tuple[list[LayerCall], list[int], list[str]]:
    """Runs a copy of a model, as it would be distributed, on two nodes and one rank.

    Returns the calls of its layers, the widths of all sums of its batch norms, and the
    names of other modules that sum over all nodes, which cannot be priced.

    Raises:
        ValueError: if the model does not run, with the reason.
    """
    visit, grad = _ModelRecorder(), torch.enable_grad()
    try:
        with torch.inference_mode(False), grad, torch.random.fork_rng(devices=[]):
            _run(copy.deepcopy(model).cpu().train(), num_features, inputs, visit)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return visit.calls, visit.norms, list(dict.fromkeys(visit.sums))


def _run(model: Module, num_features: int, inputs: str, visit: _ModelRecorder) -> None:
    model = model.converted() if isinstance(model, SequentialStack) else convert(model)
    visit.watch(model)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.zeros(2, num_features, dtype=dtype)
    data = Data(x=x, edge_index=torch.tensor([[0, 1], [1, 0]]))
    data.edge_weight = torch.ones(2, dtype=dtype)
    mesh = observing_mesh(visit.note_sum)
    share = partition(data, mesh, "block", node_attrs=["x"], edge_attrs=["edge_weight"])
    visit.features.append(share.x.requires_grad_(inputs == "trained"))
    visit.keeps = inputs == "constant"
    edges = share.edge_index.topology
    RecordingGraph.record(edges, visit.note, visit.note_kept)
    against_edges = edges.reversed.topology
    RecordingGraph.record(against_edges, visit.note_against_edges, visit.note_kept)
    vars(edges).update(adds_on_grid=True, add_rows=_recording(edges.add_rows, visit))
    if isinstance(model, SequentialStack):
        model.data_inputs = {"edge_weight": share.edge_weight}
    model(share.x, share.edge_index)  # fills the caches of layers
    visit.clear()
    model(share.x, share.edge_index)


def _recording(add_rows: Any, visit: _ModelRecorder) -> Any:
    """Returns a function that records rows, and then adds them up."""

    def run(x: Tensor, *matrix: Any) -> Tensor:
        visit.note(x, None, to_owners=False, adds=True)
        out: Tensor = add_rows(x, *matrix)
        return out

    return run


def observing_mesh(observer: Callable[[Tensor, bool], None]) -> Mesh:
    """Returns a mesh of one rank that reports sums over ranks to `observer`."""
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
