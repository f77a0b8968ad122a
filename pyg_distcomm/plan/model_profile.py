"""Runs a copy of a model on two nodes and one rank, and records what more ranks would send.

`visited` follows a model's layers and sums; `items_of_stack` follows a stack item by item, as a
pipeline runs it. Both observe a mesh of their own, so other threads may run meanwhile.
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
from pyg_distcomm.graph.partitioning import partition
from pyg_distcomm.graph.product_cache import ProductCache
from pyg_distcomm.graph.topology import LocalGraph, Topology
from pyg_distcomm.halo.link import Link
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
    crossing,
    from_data,
    read_stack,
    supposed_costs,
)
from pyg_distcomm.pipeline.warmup import leaves


class Round(NamedTuple):
    """One halo exchange of a layer.

    Args:
        width: of the rows.
        home: whether they go from ghosts to owners.
        adds: whether nothing is read but their sums.
        kept: whether they are kept, as they do not change.
        coded: whether a link codes them.
    """

    width: int
    home: bool
    adds: bool = False
    kept: bool = False
    coded: bool = True


@dataclass
class Visited:
    """Records one call of a message passing layer.

    Args:
        conv: the layer.
        width: of its input.
        still: whether that is the features themselves.
        flows: whether a gradient goes on to it.
        rounds: its halo exchanges, forward and backward.
        out: width of its outcome.
        against: whether it fetches rows against the edges, which is not foreseen.
        read: whether a gradient comes back to its outcome.
        coded: whether a link codes what is a product.
    """

    conv: Module
    width: int
    still: bool
    flows: bool
    rounds: list[Round] = field(default_factory=list)
    out: int = 0
    against: bool = False
    read: bool = True
    coded: bool = True


class SequentialStack(Module):
    """Runs a stack, as `Pipeline` takes it, from its first layer to its last."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}  # of the data, beside x
        self._hold(read_stack(layers))

    def _hold(self, stack: list[StackLayer]) -> None:
        self.stack = stack
        self.parts = torch.nn.ModuleList(
            layer.run for layer in stack if isinstance(layer.run, Module)
        )

    def converted(self) -> SequentialStack:
        """Makes its layers distributed, in place."""
        self._hold([layer.converted() for layer in self.stack])
        return self

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        """Runs the stack."""
        known: dict[str, Any] = {"x": x, "edge_index": edge_index, **self.given}
        for layer in self.stack:
            out = layer.run(*(known[name] for name in layer.takes))
            several = out if len(layer.gives) > 1 else (out,)
            known.update(zip(layer.gives, several, strict=True))
        return out


@dataclass(frozen=True, eq=False)
class RecordingGraph(LocalGraph):
    """Records which rows of these edges more ranks would exchange.

    Args:
        note: is told rows that would be exchanged, by which link, and whether they go home,
            and returns them.
        keep: is told rows that would be kept if they are features, and returns them then.
    """

    note: Callable[[Tensor, Any, bool], Tensor]
    keep: Callable[[Any], Tensor | None] = field(kw_only=True)

    @staticmethod
    def record(topology: Topology, note: Any, keep: Any) -> None:
        """Has the edges of a topology recorded."""
        here = {f.name: getattr(topology.locals, f.name) for f in fields(LocalGraph)}
        topology.locals = RecordingGraph(**here, note=note, keep=keep)

    def with_ghosts(self, x: Tensor, link: Link | None = None) -> Tensor:
        """Records own rows `x`, and returns them."""
        return self.note(x, link, False)

    def with_constant_ghosts(self, x: Any, constants: ProductCache) -> Tensor | None:
        """Records that the rows of features are kept."""
        return self.keep(x)

    def scatter_to_owners(
        self, ghosts: Tensor, own: Tensor, link: Link | None = None
    ) -> Tensor:
        """Records that sums for ghosts, of which there are none, would be sent."""
        return self.note(own, link, True)


class RunRecorder:
    """Records the layers that a run of a model calls, one inside another left out."""

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
        """Hears of a call of a layer."""
        raise NotImplementedError

    def end(self, out: Any) -> None:
        """Hears of its outcome."""
        raise NotImplementedError

    def called(self, layer: Module, x: Any) -> Visited:
        """Returns the record of a call with rows x, of which there may be two."""
        x = x[0] if isinstance(x, (tuple, list)) else x
        return Visited(bare(layer), x.size(-1), self.has(x), x.requires_grad)

    def has(self, x: Any) -> bool:
        """Says whether these are features themselves."""
        return any(x is each for each in self.features)

    def keep(self, call: Visited, x: Any) -> Tensor:
        """Records that rows are kept, and returns those of this rank."""
        rows: Tensor = x.to_local()
        call.rounds.append(Round(rows[0].numel(), False, kept=True))
        return rows


class _ModelRecorder(RunRecorder):
    """Records what a run of a model calls, fetches and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Visited] = []
        self.norms: list[int] = []

    def begin(self, layer: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        self.calls.append(self.called(layer, args[0] if args else kwargs["x"]))

    def end(self, out: Any) -> None:
        self.calls[-1].out = out.size(-1)

    def note(self, x: Tensor, link: Any, home: bool, adds: bool = False) -> Tensor:
        """Records rows that would be exchanged, or summed, and their gradients."""
        ways = (home, not home) if x.requires_grad else (home,)
        # rows that are summed are those of features if these are where they are read
        kept = (
            adds
            and self.keeps
            and x.data_ptr() == self.features[0].to_local().data_ptr()
        )
        width = x[0].numel()
        self.calls[-1].rounds += [Round(width, way, adds, kept) for way in ways]
        return x

    def note_kept(self, x: Any) -> Tensor | None:
        """Records that rows of features are kept; returns None for what is computed."""
        return self.keep(self.calls[-1], x) if self.keeps and self.has(x) else None

    def note_against(self, x: Tensor, link: Any, home: bool) -> Tensor:
        """Records that rows would be fetched against the edges."""
        self.calls[-1].against = True
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
        """Forgets what was recorded."""
        for records in (self.calls, self.sums, self.norms):
            records.clear()


def visited(
    model: Module, num_features: int, inputs: str
) -> tuple[list[Visited], list[int], list[str]]:
    """Runs a copy of a model, as it would be distributed, on two nodes and one rank.

    Returns the calls of its layers, the widths of all sums of its batch norms, and the
    names of modules that sum over all nodes in ways that are not foreseen.

    Raises:
        ValueError: if that does not work, with the reason.
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
    mesh = observed(visit.note_sum)
    share = partition(data, mesh, "block", node_attrs=["x"], edge_attrs=["edge_weight"])
    visit.features.append(share.x.requires_grad_(inputs == "trained"))
    visit.keeps = inputs == "constant"
    edges = share.edge_index.topology
    RecordingGraph.record(edges, visit.note, visit.note_kept)
    against = edges.reversed.topology
    RecordingGraph.record(against, visit.note_against, visit.note_kept)
    vars(edges).update(adds_on_grid=True, add_rows=_recording(edges.add_rows, visit))
    if isinstance(model, SequentialStack):
        model.given = {"edge_weight": share.edge_weight}
    model(share.x, share.edge_index)  # after which what layers cache is there
    visit.clear()
    model(share.x, share.edge_index)


def _recording(add_rows: Any, visit: _ModelRecorder) -> Any:
    """Returns what records rows, and then adds them up."""

    def run(x: Tensor, *matrix: Any) -> Tensor:
        visit.note(x, None, home=False, adds=True)
        out: Tensor = add_rows(x, *matrix)
        return out

    return run


def observed(observer: Callable[[Tensor, bool], None]) -> Mesh:
    """Returns a mesh of one rank that reports what more ranks would sum."""
    mesh = alone((1, 1, 1), 0, torch.device("cpu"))
    parts = {f.name: getattr(mesh, f.name) for f in fields(mesh)}
    axes: Any = {
        name: replace(axis, observer=observer)
        for name, axis in parts.items()
        if isinstance(axis, Axis)
    }
    return replace(mesh, **axes)


def is_layer(module: Module) -> bool:
    """Says whether a module reads rows of neighbours."""
    return isinstance(module, (MessagePassing, HaloConv))


def bare(module: Module) -> Module:
    """Returns the layer of PyG's itself."""
    return module.conv if isinstance(module, HaloConv) else module


_KNOWN = ("x", "edge_weight")  # of the data


@dataclass(frozen=True)
class Read:
    """Describes one exchange of rows in a forward pass.

    Args:
        width: of the rows.
        flows: whether their gradients go back.
        behind: whether they do in all stages but the first, which get what they are of.
        exact: whether they are exact, and now, whatever the link.
    """

    width: int
    flows: bool
    behind: bool = True
    exact: bool = False


@dataclass(frozen=True)
class Item:
    """Describes one item of a stack.

    Args:
        cost: beside others, as `Pipeline` supposes.
        reads: what it reads of neighbours.
        dense: widths of the matrices that it multiplies with.
        parameters: how many train.
        carried: numbers a node that go on to the next item.
        skips: values among them, beside the first.
        stuck: why they cannot go to another stage; nothing if they can.
        readers: the layers in it that read by the link.
        layer: itself, where it is known.
    """

    cost: float
    reads: tuple[Read, ...]
    dense: tuple[tuple[int, int], ...]
    parameters: int
    carried: int
    skips: int
    stuck: str = ""
    readers: tuple[list[MessagePassing], ...] = ()
    layer: StackLayer | None = None


@torch.inference_mode(False)
def items_of_stack(layers: Any, num_features: int) -> list[Item]:
    """Reads the items of a stack by running a copy of it, as a pipeline does, on two nodes.

    Raises:
        ValueError, TypeError: as `Pipeline` does, for what is no stack, or cannot run in
            chunks.
    """
    stack = [layer.converted() for layer in copy.deepcopy(read_stack(layers))]
    check_links(stack)
    for layer in stack:
        if isinstance(layer.run, torch.nn.Module):
            layer.run.cpu().eval()
    costs, stage = supposed_costs(stack), _stage_of(stack, num_features)
    try:
        with random.apart(torch.device("cpu")):
            return _profiled(stack, costs, stage)
    except (ValueError, TypeError, RuntimeError):
        raise
    except Exception as error:  # of layers of the script's own
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"the stack does not run on two nodes ({told})") from error


def _stage_of(stack: list[StackLayer], num_features: int) -> Stage:
    """Returns a stage of all layers, on two nodes that this process has alone."""
    missing = [name for name in from_data(stack, 0, len(stack)) if name not in _KNOWN]
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
    stage.look_at(share)
    return stage


def _profiled(stack: list[StackLayer], costs: list[float], stage: Stage) -> list[Item]:
    run, found = stage.run, []
    known, readers = stage.given(None), [0]
    with torch.no_grad():  # makes the sites
        for _ in _passed(stage, None, known):
            readers.append(len(run.readers))
    run.mode = "again"
    with torch.enable_grad():
        known = stage.given(0)
        for place in _passed(stage, 0, known):
            known.update(leaves({name: known[name] for name in stack[place].gives}))
        behind = {key: site.flows for key, site in run.sites.items()}
        for site in run.sites.values():
            site.flows = False
        known = stage.given(0)
        for place in _passed(stage, 0, known):
            names, layer = crossing(stack, place + 1), stack[place]
            carried, stuck = _carried(known, names, layer, stage.view(0).nodes)
            matrices = [p for p in _trained(layer) if p.dim() == 2]
            reads = tuple(
                Read(site.mix.size(1), site.flows, behind[key], bool(site.exactly))
                for key, site in run.sites.items()
                if key[0] == place
            )
            found.append(
                Item(
                    costs[place],
                    reads,
                    tuple((p.size(0), p.size(1)) for p in matrices),
                    sum(p.numel() for p in _trained(layer)),
                    carried,
                    len(names) - 1,
                    stuck,
                    tuple(run.readers[readers[place] : readers[place + 1]]),
                    layer,
                )
            )
    return found


def _passed(stage: Stage, chunk: int | None, known: Values) -> Iterator[int]:
    """Runs a stage's layers one by one, and puts down what they return."""
    for place, layer in enumerate(stage.layers):
        stage.run.begin_layer(place, chunk)
        known.update(stage.call(layer, known))
        yield place


def _carried(
    known: Values, names: Sequence[str], layer: StackLayer, nodes: Rows
) -> tuple[int, str]:
    """Returns the width of what crosses behind a layer, or why nothing can."""
    try:
        return StageTensors.of(known, names, str(layer), nodes).width, ""
    except TypeError as error:
        return 0, str(error)


def _trained(layer: StackLayer) -> Sequence[Tensor]:
    if not isinstance(layer.run, torch.nn.Module):
        return ()
    return [p for p in layer.run.parameters() if p.requires_grad]
