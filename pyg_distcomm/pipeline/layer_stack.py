"""Reads a stack of layers and the names of their values, and cuts it into stages.

Its checks raise on all ranks for layers and options that a pipeline cannot run.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import check_alike
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.store import RankError
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn.capped import PADDED
from pyg_distcomm.nn.layers import convert
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex

_CHUNK_NORMS = (
    *(_NormBase, pyg.BatchNorm, pyg.HeteroBatchNorm, pyg.InstanceNorm, pyg.GraphNorm),
    *(pyg.GraphSizeNorm, pyg.PairNorm, pyg.MeanSubtractionNorm, pyg.DiffGroupNorm),
)
_KEPT_EDGES = "_cached_edge_index"  # of layers of which cached=True keeps edges only


@dataclass(frozen=True, eq=False)
class StackLayer:
    """One layer of a stack, named as in its `state_dict`, and the names of its values."""

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def __str__(self) -> str:
        kind = getattr(self.run, "__name__", type(self.run).__name__)
        head = f"{', '.join(self.reads)} -> {', '.join(self.writes)}"
        return f"layer {self.name} ({kind}: {head})"

    def converted(self) -> StackLayer:
        """Returns the layer in its distributed form, without checkpointing and cached edges.

        Else it would exchange rows again as a chunk is recomputed, or keep one chunk's edges.
        """
        if not isinstance(self.run, Module):
            return self
        run: Any = convert(self.run)
        for part in run.modules():
            if isinstance(part, pyg.DeepGCNLayer):
                part.ckpt_grad = False
            if isinstance(part, torch.nn.RNNBase):
                part.register_forward_pre_hook(_with_state, with_kwargs=True)
            if hasattr(part, _KEPT_EDGES):
                part.cached = part._cached_edge_index = part._cached_adj_t = None
                vars(part).pop("first_edges", None)
        return replace(self, run=run)

    @property
    def modules(self) -> list[Module]:
        """The modules in it; none of a function."""
        return list(self.run.modules()) if isinstance(self.run, Module) else []

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of its modules."""
        return list(self.run.parameters()) if isinstance(self.run, Module) else []

    def placeholder(self) -> StackLayer:
        """Returns a layer with the same names that cannot run, for the other stages."""
        return replace(self, run=_run_elsewhere)


def _with_state(rnn: Any, args: Any, kwargs: Any) -> Any:
    """Adds zeros with a row for each sequence, where torch takes plain ones as a state."""
    x = args[0] if len(args) == 1 and not kwargs else None
    if type(x) is not DistTensor or x.dim() != 3 or x.dim_ == rnn.batch_first:
        return None
    x = x.transpose(0, 1) if rnn.batch_first else x
    shape = rnn.num_layers * (1 + rnn.bidirectional), x.size(1)
    cell = x.new_zeros(*shape, rnn.hidden_size)
    out = x.new_zeros(*shape, rnn.proj_size) if rnn.proj_size else cell
    return (args[0], (out, cell) if isinstance(rnn, torch.nn.LSTM) else out), {}


def _run_elsewhere(*args: Any) -> Any:
    raise RuntimeError(
        "this layer belongs to another stage, and cannot run on this rank"
    )


def read_stack(layers: Any) -> list[StackLayer]:
    """Returns the layers of a `Sequential` of PyG or torch, a ModuleList or a list.

    Items are as in `torch_geometric.nn.Sequential`: a layer, or a pair of a layer and a header
    such as `"x, x_0, edge_index -> x"`. A layer without header reads the output of the layer
    before it, and `edge_index` and other arguments of its `forward` by name.

    Raises:
        TypeError, ValueError: if `layers` is no stack of layers, or cannot run on chunks.
    """
    if isinstance(layers, pyg.Sequential):
        found = [
            StackLayer(
                c.name, getattr(layers, c.name), (*c.param_names,), (*c.return_names,)
            )
            for c in layers._children
        ]
    elif isinstance(layers, (torch.nn.ModuleList, torch.nn.Sequential, list, tuple)):
        found = []
        named = getattr(layers, "named_children", None)
        # named_children leaves out a module that comes again
        items = layers._modules.items() if named else enumerate(layers)  # type: ignore[union-attr]
        for name, item in items:
            found.append(_layer(str(name), item, found[-1] if found else None))
    else:
        raise TypeError(
            "Pipeline takes a list of layers (or a Sequential of torch or PyG, or a "
            f"ModuleList), got {type(layers).__name__}, which cannot be cut into stages; "
            "give its layers in the order in which they run"
        )
    if not found:
        raise ValueError(
            "Pipeline got no layers; give it a list with one layer or more"
        )
    for layer in found:
        _check(layer)
    return found


def _layer(name: str, item: Any, before: StackLayer | None) -> StackLayer:
    last = before.writes if before is not None else ("x",)
    if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[1], str):
        run, header = item
        sides = [[word.strip() for word in s.split(",")] for s in header.split("->")]
        if len(sides) != 2 or not all(w.isidentifier() for side in sides for w in side):
            raise ValueError(
                f"layer {name} has the header {header!r}; write what it reads and what it "
                "returns, as in 'x, x_0, edge_index -> x'"
            )
        return StackLayer(name, run, tuple(sides[0]), tuple(sides[1]))
    if not isinstance(item, torch.nn.Module):
        raise TypeError(
            f"layer {name} is {type(item).__name__}; give a module, or a pair such as "
            "(module, 'x, edge_index -> x')"
        )
    return StackLayer(name, item, (last[0], *_argument_names(item)[1:]), last[:1])


def _argument_names(module: torch.nn.Module) -> list[str]:
    """Returns the names of the arguments that a layer must be called with."""
    given = inspect.signature(module.forward).parameters.values()
    named = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not named:  # such as DeepGCNLayer, which passes all arguments to its convolution
        inner = getattr(module, "conv", None)
        return _argument_names(inner) if isinstance(inner, torch.nn.Module) else ["x"]
    return [
        p.name for p in named if p.default is p.empty or p.name in ("x", "edge_index")
    ] or ["x"]


def _check(layer: StackLayer) -> None:
    """Raises for a layer that cannot run on chunks of nodes."""
    if not callable(layer.run):
        raise TypeError(
            f"{layer} cannot be called; give a module or a function of tensors"
        )
    for module in layer.modules:
        by_graph = isinstance(module, pyg.LayerNorm) and module.mode == "graph"
        if isinstance(module, _CHUNK_NORMS) or by_graph:
            raise ValueError(
                f"{layer} normalises over all nodes ({type(module).__name__}), but a "
                "pipeline has the nodes of one chunk at a time, with other statistics; use "
                "torch.nn.LayerNorm or PyG's LayerNorm(mode='node'), which normalise each "
                "node, or train without a pipeline"
            )
        if isinstance(module, PADDED):
            raise ValueError(
                f"{layer} pads the messages of each node to the largest degree of the graph "
                f"({type(module).__name__}), which one chunk does not know; use another "
                "aggregation, or train without a pipeline"
            )
        if getattr(module, "cached", False) and not hasattr(module, _KEPT_EDGES):
            raise ValueError(
                f"{layer} keeps the rows of its first call (cached=True), but each chunk has "
                "its own; leave cached out"
            )
    if any(map(is_lazy, layer.parameters)):
        raise ValueError(
            f"{layer} does not know its width yet; give in_channels, so that optimizers "
            "and stages can be made before the first epoch"
        )


def names_crossing(layers: Sequence[StackLayer], place: int) -> tuple[str, ...]:
    """Returns the names that layers before `place` write and layers from `place` on read."""
    if place >= len(layers):
        return layers[-1].writes[:1]
    alive: list[str] = []
    for layer in reversed(layers[place:]):
        alive = [name for name in alive if name not in layer.writes]
        alive += [name for name in layer.reads if name not in alive]
    written = {name for layer in layers[:place] for name in layer.writes}
    result = layers[-1].writes[0]
    if result in written and not any(result in la.writes for la in layers[place:]):
        alive.append(result)
    return tuple(sorted(name for name in set(alive) if name in written))


def names_from_data(
    layers: Sequence[StackLayer], begin: int, end: int
) -> tuple[str, ...]:
    """Returns the names that layers `begin` to `end` read, and no layer before them writes."""
    written = {name for layer in layers[:begin] for name in layer.writes}
    found: list[str] = []
    for layer in layers[begin:end]:
        found += [n for n in layer.reads if n not in written and n not in found]
        written |= set(layer.writes)
    return tuple(name for name in found if name != "edge_index")


# the cost of a layer that reads no neighbours; one aggregation costs 1 more
_LIGHT = 0.1


def cut_layers(costs: Sequence[float], stages: int) -> list[int]:
    """Returns how many layers each stage gets, so that the slowest stage is as fast as can be.

    Minimises the largest sum of consecutive layers by dynamic programming over (stages,
    layers); of equal ones it takes that with the least sum of squares.
    """
    total = [0.0, *itertools.accumulate(costs)]
    # by the number of layers, the largest sum, the sum of squares and the sizes of stages
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}

    def with_stage(begin: int, end: int) -> tuple[float, float, list[int]]:
        (most, squares, sizes), here = best[begin], total[end] - total[begin]
        return max(most, here), squares + here * here, [*sizes, end - begin]

    for count in range(1, stages + 1):
        best = {
            end: min((with_stage(b, end) for b in best if b < end), key=lambda s: s[:2])
            for end in range(count, len(costs) + 1)
        }
    return best[len(costs)][2]


def estimated_costs(layers: Sequence[StackLayer]) -> list[float]:
    """Returns the relative costs of layers: 1 for each aggregation."""
    return [
        _LIGHT + sum(isinstance(part, MessagePassing) for part in layer.modules)
        for layer in layers
    ]


ORDERS = ("alternating", "shuffled", "fixed")
_FAILURE_WAIT = 10.0  # seconds for all ranks of a stage to fail in the same way


@contextlib.contextmanager
def failing_together(mesh: Mesh) -> Iterator[None]:
    """Raises an error of one rank on the ranks of all stages, as `on_all_ranks` does.

    Ranks of a stage exchange rows inside the block. So a failure of one of them is reported,
    after some seconds, to those that wait for its rows.
    """
    problem, watch = None, mesh.everyone.watch
    before = "" if watch is None else watch.reported_failure()
    try:
        yield
    except Exception as error:
        if watch is None or watch.reported_failure() != before:
            raise
        problem = error
    axis = mesh.everyone
    if problem is not None and watch is not None:
        short_watch = replace(watch, deadline=min(_FAILURE_WAIT, watch.deadline))
        axis = replace(axis, watch=short_watch)
    try:
        collectives.agree(problem, axis)
    except RankError:
        if problem is None or watch is None:
            raise
        watch.report(problem)
        raise problem from None


@contextlib.contextmanager
def reporting_failure(mesh: Mesh) -> Iterator[None]:
    """Reports an error inside the block to the other ranks, which may wait for messages."""
    try:
        yield
    except Exception as error:
        watch = mesh.everyone.watch
        if watch is not None:
            watch.report(error)
            if mesh.stage.size > 1:
                watch.ended = f"{type(error).__name__}: {error}"
        raise


def check_alive(mesh: Mesh) -> None:
    """Raises if a step has failed on this mesh: messages between its stages are lost."""
    watch = mesh.everyone.watch
    if watch is not None and watch.ended:
        raise RankError(
            "a step has failed on this mesh, and messages between its stages are lost; make "
            "mesh, data and pipeline anew, and load what was saved. The step failed with "
            f"{watch.ended}"
        )


def check_same(
    stack: Sequence[StackLayer], mesh: Mesh, options: dict[str, Any]
) -> None:
    """Raises if layers or options differ between ranks; collective."""
    told = {**options, "number of layers": len(stack)}
    for k, layer in enumerate(stack):
        shapes = [tuple(p.shape) for p in layer.parameters]
        told[f"layer {k}"] = f"{layer} {shapes}"
    check_alike(told, mesh.everyone)


def check_share(data: Any, mesh: Mesh) -> DistEdgeIndex:
    """Returns the edges of a share; raises if `data` is no share of this mesh."""
    edge_index = getattr(data, "edge_index", None)
    if not isinstance(edge_index, DistEdgeIndex):
        raise TypeError(
            f"a pipeline trains on a share of pdc.partition(data, mesh), got "
            f"{type(data).__name__} with an edge_index of {type(edge_index).__name__}"
        )
    if edge_index.nodes.mesh is not mesh:
        raise ValueError(
            f"the Data is spread over {edge_index.nodes.mesh}, the pipeline over {mesh}; "
            "partition it over the mesh of the pipeline"
        )
    link = edge_index.topology.link
    if link is not None and not link.exact_eval:
        raise ValueError(
            "a pipeline evaluates exactly, in one pass over the whole graph, but its data "
            "have a link with exact_eval=False; make the link without that option"
        )
    return edge_index


def check_planned_data(data: Any, topology: Topology) -> DistEdgeIndex:
    """Returns the edges of a share; raises if the pipeline was planned for others."""
    edge_index = data.edge_index
    if not isinstance(edge_index, DistEdgeIndex) or (
        edge_index.topology.source_gid is not topology.source_gid
    ):
        raise ValueError(
            "this Data is not the one that the pipeline was planned for; make another "
            "Pipeline for another graph"
        )
    return edge_index


def check_untied(stack: Sequence[StackLayer], balance: Sequence[int]) -> None:
    """Raises if layers of two stages share a parameter."""
    stage_of: dict[int, tuple[int, StackLayer]] = {}
    stages = [s for s, count in enumerate(balance) for _ in range(count)]
    for stage, layer in zip(stages, stack, strict=True):
        for parameter in layer.parameters:
            first_stage, first = stage_of.setdefault(id(parameter), (stage, layer))
            if first_stage != stage:
                raise ValueError(
                    f"{first} and {layer} share a parameter, but are in stages "
                    f"{first_stage} and {stage}; give balance=[...] so that both are in one"
                )


def check_links(stack: Sequence[StackLayer]) -> None:
    """Raises if a layer has a link: the link of the data holds for all its exchanges."""
    for layer in stack:
        links = (getattr(part, "link", None) for part in layer.modules)
        if any(isinstance(link, LinkPolicy) for link in links):
            raise ValueError(
                f"{layer} has a link of its own, but a pipeline exchanges chunk by chunk; "
                "give the link to pdc.partition(data, mesh, link=...), and leave it out of "
                "the layer, or give that link='exact'"
            )


def check_options(mesh: Mesh, order: str, whole: dict[str, Any], seed: Any) -> None:
    """Raises for values that are no valid options of a Pipeline.

    `whole` has those, by name, that must be whole numbers if they are numbers.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}")
    for name, value in whole.items():
        if name == "chunks" and not isinstance(value, (int, float, str)):
            continue  # the chunk of each node
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    if not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    if mesh.grid[1:] != (1, 1):
        raise ValueError(
            f"the stages of a pipeline have rows only, but the mesh is {mesh.grid}; use "
            "pdc.init('1d', stages=S)"
        )


def check_balance(
    stack: Sequence[StackLayer], stages: int, balance: Any
) -> list[int] | None:
    """Returns `balance` as a list; raises if it does not give each stage a layer or more."""
    if stages > len(stack):
        raise ValueError(
            f"there are {stages} stages and {len(stack)} layers; a stage has at least one: "
            f"give stages={len(stack)} or fewer to pdc.init, or more layers"
        )
    if balance is None:
        return None
    given = list(balance) if isinstance(balance, Iterable) else []
    fits = len(given) == stages and sum(given) == len(stack)
    if not fits or any(n < 1 or n != int(n) for n in given):
        raise ValueError(
            f"balance={balance} must give each of {stages} stages one layer or more, as a "
            f"list of numbers, and {len(stack)} in all"
        )
    return [int(n) for n in given]
