"""Reads a stack of layers and the names of their values, and cuts it into stages.

What a pipeline cannot run is refused, on all ranks alike.
"""

from __future__ import annotations

import contextlib
import inspect
import time
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
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.store import RankError
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn.convert import convert
from pyg_distcomm.nn.halo_conv import HaloConv
from pyg_distcomm.nn.node_chunks import pads
from pyg_distcomm.pipeline.history_buffer import DTYPES

_CHUNK_NORMS = (
    *(_NormBase, pyg.BatchNorm, pyg.HeteroBatchNorm, pyg.InstanceNorm, pyg.GraphNorm),
    *(pyg.GraphSizeNorm, pyg.PairNorm, pyg.MeanSubtractionNorm, pyg.DiffGroupNorm),
)
_KEEPING = (pyg.GCNConv, pyg.GCN2Conv)  # in our form they keep nothing of their own
_NAMED = frozenset(("x", "edge_index"))


@dataclass(frozen=True, eq=False)
class StackLayer:
    """One layer of a stack: what it is called with, and what it leaves.

    Args:
        name: its name in the stack's `state_dict`.
        run: a module, or a function of tensors.
        takes: names of its arguments.
        gives: names of what it returns.
    """

    name: str
    run: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def __str__(self) -> str:
        kind = getattr(self.run, "__name__", type(self.run).__name__)
        head = f"{', '.join(self.takes)} -> {', '.join(self.gives)}"
        return f"layer {self.name} ({kind}: {head})"

    def converted(self) -> StackLayer:
        """Returns the layer in its distributed form, without checkpoints of its own.

        One of those would exchange rows again; a chunk is computed again as a whole.
        """
        if not isinstance(self.run, Module):
            return self
        run = convert(self.run)
        for part in run.modules():
            if isinstance(part, pyg.DeepGCNLayer):
                part.ckpt_grad = False
        return replace(self, run=run)

    def elsewhere(self) -> StackLayer:
        """Returns the layer as the other stages know it: by its names only."""
        return replace(self, run=_elsewhere)


def _elsewhere(*args: Any) -> Any:
    raise RuntimeError("this layer is another stage's")


def read_stack(layers: Any) -> list[StackLayer]:
    """Returns the layers of a `Sequential` of PyG or torch, a ModuleList or a list.

    Items are as in `torch_geometric.nn.Sequential`: a layer, or a pair of one and a header
    such as `"x, x_0, edge_index -> x"`. A layer without header reads what the last one
    wrote, and `edge_index` and others where its `forward` asks for them by name.

    Raises:
        TypeError, ValueError: for what is no stack of layers, or cannot run in chunks.
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
        raise ValueError("Pipeline got no layers")
    for layer in found:
        _check(layer)
    return found


def _layer(name: str, item: Any, before: StackLayer | None) -> StackLayer:
    last = before.gives if before is not None else ("x",)
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
    return StackLayer(name, item, (last[0], *_asked(item)[1:]), last[:1])


def _asked(module: torch.nn.Module) -> list[str]:
    """The names of the arguments that a layer has to be given."""
    given = inspect.signature(module.forward).parameters.values()
    named = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not named:  # as DeepGCNLayer, which hands everything to its convolution
        inner = getattr(module, "conv", None)
        return _asked(inner) if isinstance(inner, torch.nn.Module) else ["x"]
    return [p.name for p in named if p.default is p.empty or p.name in _NAMED] or ["x"]


def _check(layer: StackLayer) -> None:
    """Refuses what cannot run on chunks of nodes."""
    if not callable(layer.run):
        raise TypeError(f"{layer} cannot be called")
    if not isinstance(layer.run, torch.nn.Module):
        return
    for module in layer.run.modules():
        by_graph = isinstance(module, pyg.LayerNorm) and module.mode == "graph"
        if isinstance(module, _CHUNK_NORMS) or by_graph:
            raise ValueError(
                f"{layer} normalises over all nodes ({type(module).__name__}), but a "
                "pipeline has the nodes of one chunk at a time, whose statistics are "
                "others; use torch.nn.LayerNorm or PyG's LayerNorm(mode='node'), which "
                "normalise each node, or train with pdc.replicate"
            )
        if pads(module):
            raise ValueError(
                f"{layer} pads the messages of each node to as many as any node gets "
                f"({type(module).__name__}), which those of one chunk do not tell; use "
                "another aggregation, or train with pdc.replicate"
            )
        if getattr(module, "cached", False) and type(module) not in _KEEPING:
            raise ValueError(
                f"{layer} keeps the edges of its first call (cached=True), and chunks have "
                "others; leave cached out: what is derived from edges is kept anyway"
            )
    if any(is_lazy(p) for p in layer.run.parameters()):
        raise ValueError(
            f"{layer} does not know its width yet; give in_channels, so that optimizers "
            "and stages can be made before the first epoch"
        )


def crossing(layers: Sequence[StackLayer], place: int) -> tuple[str, ...]:
    """Returns the names written before layer `place` and read from it on, in order."""
    if place >= len(layers):
        return layers[-1].gives[:1]
    alive: list[str] = []
    for layer in reversed(layers[place:]):
        alive = [name for name in alive if name not in layer.gives]
        alive += [name for name in layer.takes if name not in alive]
    written = {name for layer in layers[:place] for name in layer.gives}
    result = layers[-1].gives[0]
    if result in written and not any(result in la.gives for la in layers[place:]):
        alive.append(result)
    return tuple(sorted(name for name in set(alive) if name in written))


def from_data(layers: Sequence[StackLayer], begin: int, end: int) -> tuple[str, ...]:
    """Returns the names that layers from `begin` to `end` read and none before writes."""
    written = {name for layer in layers[:begin] for name in layer.gives}
    found: list[str] = []
    for layer in layers[begin:end]:
        found += [n for n in layer.takes if n not in written and n not in found]
        written |= set(layer.gives)
    return tuple(name for name in found if name != "edge_index")


_LIGHT = 0.1  # what a layer that reads no neighbours costs, beside one that does


def cut_layers(costs: Sequence[float], stages: int) -> list[int]:
    """Returns how many layers each stage has, so that the slowest is fastest.

    Least largest sum of consecutive runs, by dynamic programming over (stages, layers);
    of several with the same slowest stage, one whose others are alike.
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    count = len(costs)
    never = (float("inf"), 0.0)
    best = [[never] * (count + 1) for _ in range(stages + 1)]
    where = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0.0)
    for s in range(1, stages + 1):
        for end in range(s, count + 1):
            for begin in range(s - 1, end):
                here, (most, squares) = total[end] - total[begin], best[s - 1][begin]
                found = max(most, here), squares + here * here
                if found < best[s][end]:
                    best[s][end], where[s][end] = found, begin
    sizes, end = [], count
    for s in range(stages, 0, -1):
        sizes.append(end - where[s][end])
        end = where[s][end]
    return sizes[::-1]


def supposed_costs(layers: Sequence[StackLayer]) -> list[float]:
    """Returns what layers may cost where nothing was measured: 1 for each aggregation."""
    return [_LIGHT + _aggregations(layer) for layer in layers]


def _aggregations(layer: StackLayer) -> int:
    if not isinstance(layer.run, torch.nn.Module):
        return 0
    kinds = MessagePassing, HaloConv  # which hides the layer that it runs
    return sum(isinstance(part, kinds) for part in layer.run.modules())


def seconds_of(run: Callable[[], object]) -> float:
    """Returns the least seconds of three that something took, once it has been warmed up."""
    run()
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return min(taken)


ORDERS = ("alternating", "shuffled", "fixed")
_PATIENCE = 10.0  # seconds for ranks that compute alike to fail alike
_KINDS = (TypeError, ValueError, NotImplementedError, RuntimeError)


@contextlib.contextmanager
def on_all_ranks(mesh: Mesh, exchanging: bool = False) -> Iterator[None]:
    """Raises on the ranks of all stages what one of them raises inside; collective.

    Args:
        mesh: the ranks.
        exchanging: whether ranks of a stage exchange rows inside: if one fails alone, those
            that wait for its rows are told after some seconds, as by `telling`.
    """
    problem: Exception | None = None
    axis, watch = mesh.everyone, mesh.everyone.watch
    before = watch.reported_failure() if exchanging and watch is not None else ""
    try:
        yield
    except Exception as error:
        if exchanging and watch is not None:
            if watch.reported_failure() != before:
                raise
            soon = replace(watch, deadline=min(_PATIENCE, watch.deadline))
            axis = replace(axis, watch=soon)
        problem = error
    near = next((k for k in _KINDS if isinstance(problem, k)), RuntimeError)
    try:
        kinds = collectives.all_gather_object(near if problem else None, axis)
    except RankError:
        if problem is None or watch is None:
            raise
        watch.report(problem)
        raise problem from None
    kind = next((k for k in kinds if k is not None), ValueError)
    try:
        collectives.agree(
            None if problem is None else str(problem), mesh.everyone, kind
        )
    except kind as told:
        raise told from problem


@contextlib.contextmanager
def telling(mesh: Mesh) -> Iterator[None]:
    """Lets the other ranks know if this one fails: they wait for what will not come."""
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
    """Refuses a mesh whose stages were torn from a step, and wait for one another."""
    watch = mesh.everyone.watch
    if watch is not None and watch.ended:
        raise RankError(
            "a step has failed on this mesh, and what its stages sent one another is lost; "
            "make mesh, data and pipeline anew, and load what was saved. It failed with "
            f"{watch.ended}"
        )


def check_same(
    stack: Sequence[StackLayer], mesh: Mesh, options: dict[str, Any]
) -> None:
    """Refuses layers and options that differ between ranks."""
    told = [f"{name}={value}" for name, value in options.items()]
    told += [_told(layer) for layer in stack]
    every = collectives.all_gather_object(told, mesh.everyone)
    differ = [rank for rank, other in enumerate(every) if other != every[0]]
    if differ:
        pairs = zip(every[0], every[differ[0]], strict=False)
        first = next(
            (f"{a}, and there {b}" for a, b in pairs if a != b), "their number"
        )
        raise ValueError(
            "Pipeline needs the same layers and options on all ranks, but ranks "
            f"{differ} have others than rank 0: {first}"
        )


def _told(layer: StackLayer) -> str:
    run = layer.run
    parameters = run.parameters() if isinstance(run, torch.nn.Module) else ()
    return f"{layer} {[tuple(p.shape) for p in parameters]}"


def check_share(data: Any, mesh: Mesh) -> DistEdgeIndex:
    """Returns the edges of a share, or says what it should have been."""
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
            "have a link with exact_eval=False; make the link without"
        )
    return edge_index


def updates_of(edge_index: DistEdgeIndex) -> int:
    """Returns how often `pdc.update` has replaced these edges, or their nodes."""
    return edge_index.nodes.updates + edge_index.edges.updates


def check_known(data: Any, topology: Topology, updates: int) -> DistEdgeIndex:
    """Returns the edges of a share, if they are those that a pipeline was planned for.

    Args:
        data: the share.
        topology: of the edges that were planned for.
        updates: how often they had been updated by then.
    """
    edge_index = data.edge_index
    if not isinstance(edge_index, DistEdgeIndex) or (
        edge_index.topology.source_gid is not topology.source_gid
    ):
        raise ValueError(
            "this Data is not the one that the pipeline was planned for; make another "
            "Pipeline for another graph"
        )
    if updates_of(edge_index) != updates:
        raise RuntimeError(
            "this pipeline was planned for the graph as it was before pdc.update; make a "
            "Pipeline of the share that update returned"
        )
    return edge_index


def check_untied(stack: Sequence[StackLayer], balance: Sequence[int]) -> None:
    """Refuses a parameter of two stages."""
    homes: dict[int, tuple[int, StackLayer]] = {}
    stages = [s for s, count in enumerate(balance) for _ in range(count)]
    for stage, layer in zip(stages, stack, strict=True):
        if not isinstance(layer.run, torch.nn.Module):
            continue
        for parameter in layer.run.parameters():
            home, first = homes.setdefault(id(parameter), (stage, layer))
            if home != stage:
                raise ValueError(
                    f"{first} and {layer} share a parameter, but are in stages {home} and "
                    f"{stage}; give balance=[...] so that both are in one"
                )


def check_links(stack: Sequence[StackLayer]) -> None:
    """Refuses a link of a layer: that of the data holds for all exchanges of a stage."""
    for layer in stack:
        parts = layer.run.modules() if isinstance(layer.run, torch.nn.Module) else ()
        if any(isinstance(getattr(part, "link", None), LinkPolicy) for part in parts):
            raise ValueError(
                f"{layer} has a link of its own, but a pipeline exchanges chunk by chunk; "
                "give the link to pdc.partition(data, mesh, link=...), and leave it out of "
                "the layer, or give that link='exact'"
            )


def check_options(
    mesh: Mesh, order: str, whole: dict[str, Any], seed: Any, history_dtype: Any
) -> None:
    """Refuses options that mean nothing.

    Args:
        mesh: the ranks.
        order: of chunks.
        whole: by name, what must be a whole number if it is a number.
        seed: of what is drawn.
        history_dtype: how history is kept.
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
    if history_dtype not in DTYPES:
        raise ValueError(
            f"history_dtype must be one of {', '.join(map(str, DTYPES))}, got "
            f"{history_dtype}"
        )
    if mesh.grid[1:] != (1, 1):
        raise ValueError(
            f"the stages of a pipeline have rows only, but the mesh is {mesh.grid}; use "
            "pdc.init('1d', stages=S)"
        )


def check_balance(
    stack: Sequence[StackLayer], stages: int, balance: Any
) -> list[int] | None:
    """Refuses more stages than layers, and layers that do not add up."""
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
