"""Plans every way to train a graph on a number of ranks, and ranks them by cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, overload

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_distcomm.comm.mesh import ALGORITHMS, Grid, Mesh
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.product_cache import ORDERS, MultiplyOrder
from pyg_distcomm.ops.grid_plan import HALOS
from pyg_distcomm.partition.cutters import cut, takes_grid
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.pipeline.schedule import BUBBLE, fewest_chunks
from pyg_distcomm.plan.arguments import (
    check_hetero_options,
    check_options,
    check_width,
    grid_of,
    ranks_of,
)
from pyg_distcomm.plan.codecs import Asked, Coding, codings
from pyg_distcomm.plan.cost import Cost, adds_on_grid, early_bytes, epoch_cost
from pyg_distcomm.plan.degree_distribution import RandomGraph
from pyg_distcomm.plan.hetero import owners_of_types, plan_hetero
from pyg_distcomm.plan.loaders import LoaderPlans, plan_loader
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.model_profile import SequentialStack, items_of_stack
from pyg_distcomm.plan.pipelines import LayerProfile, items_of
from pyg_distcomm.plan.plans import Plan, Plans, name_of, rejections, show_bytes
from pyg_distcomm.plan.traffic import CutEdges, Flow
from pyg_distcomm.plan.training import (
    Training,
    features_of,
    training_of,
    training_of_model,
)


def training_asked(
    graph: Any,
    widths: Sequence[int] | None,
    model: torch.nn.Module | Sequence[Any] | None,
    layers: str | Sequence[str],
    inputs: str,
    dtype: torch.dtype,
) -> Training:
    """Returns what an epoch of widths, or of a model, multiplies."""
    if (widths is None) == (model is None):
        raise ValueError(
            "plan needs either widths=[features, hidden, ..., output] or model=..."
        )
    if model is not None:
        features = features_asked(graph, model)
        read = training_of_model(_whole(model), features, inputs)
        return replace(read, itemsize=dtype.itemsize)
    assert widths is not None
    read = training_of(widths, layers, inputs=inputs, itemsize=dtype.itemsize)
    check_width(graph, read.layers[0].width_in, inputs)
    return read


def _whole(model: Any) -> torch.nn.Module:
    """Returns a model, or a stack of layers as `Pipeline` takes it as one."""
    return model if isinstance(model, torch.nn.Module) else SequentialStack(model)


def features_asked(graph: Any, model: Any) -> int:
    """Returns the width of the features, which a model tells where the graph does not."""
    given = graph.num_features if isinstance(graph, Data) else 0
    return given or features_of(_whole(model))


def dtype_of(graph: Any, model: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype that features have: as said, or the wider of theirs and the model's."""
    if dtype is not None:
        return dtype
    items = model if isinstance(model, Sequence) else [model]
    parts = (
        p for item in items for p in (item if isinstance(item, tuple) else (item,))
    )
    modules = [p for p in parts if isinstance(p, torch.nn.Module)]
    values = [graph.x] if isinstance(graph, Data) else []
    values += [p for one in modules for p in one.parameters()]
    floats = (v for v in values if isinstance(v, Tensor) and v.is_floating_point())
    found = list(dict.fromkeys(v.dtype for v in floats))
    return functools.reduce(torch.promote_types, found) if found else torch.float32


def edges_of(graph: Any, partition: Any) -> tuple[Tensor, int, Tensor | None]:
    """Returns the edges, the number of nodes, and which are trained on, if known."""
    edge_index = graph.edge_index if isinstance(graph, Data) else graph
    if isinstance(edge_index, DistEdgeIndex):
        raise TypeError(
            "plan takes the whole graph, and this is a rank's share; plan before "
            "pdc.partition"
        )
    if isinstance(graph, Data) and edge_index is None:
        other = (
            " (adj_t is not read: leave ToSparseTensor out)" if "adj_t" in graph else ""
        )
        raise TypeError(f"plan takes data.edge_index, and data has none{other}")
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            "plan takes a torch_geometric.data.Data, an edge_index [2, num_edges] or a "
            f"RandomGraph, got {type(graph).__name__}"
        )
    if isinstance(graph, Data):
        if graph.num_nodes is None:
            raise ValueError("data.num_nodes is not known; set it, or give data.x")
        mask = graph.get("train_mask")
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 1 else None
        return edge_index.cpu(), int(graph.num_nodes), mask
    if isinstance(partition, Partition):
        return edge_index.cpu(), partition.num_nodes, None
    if isinstance(partition, str):
        nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
        return edge_index.cpu(), nodes, None
    return edge_index.cpu(), len(partition), None


@overload
def plan(
    graph: Data | HeteroData,
    *,
    loader: Mapping[str, Any],
    ranks: int | None = None,
    mesh: Mesh | None = None,
    machine: Machine | None = None,
    memory: float | None = None,
    partition: Any = "metis",
    seed: int = 0,
) -> LoaderPlans: ...
@overload
def plan(
    graph: Data | HeteroData | Tensor | RandomGraph,
    widths: Sequence[int] | None = None,
    ranks: int | None = None,
    *,
    mesh: Mesh | None = None,
    model: torch.nn.Module | Sequence[Any] | None = None,
    layers: str | Sequence[str] = "gcn",
    inputs: str = "constant",
    machine: Machine | None = None,
    memory: float | None = None,
    partition: Any = "metis",
    seed: int = 0,
    algorithm: str | None = None,
    grid: Grid | None = None,
    codecs: Sequence[Asked] = (),
    pipeline: bool = False,
    chunks: int | None = None,
    bubble: float = BUBBLE,
    skips: int = 0,
    dtype: torch.dtype | None = None,
) -> Plans: ...
def plan(
    graph: Data | HeteroData | Tensor | RandomGraph,
    widths: Sequence[int] | None = None,
    ranks: int | None = None,
    *,
    mesh: Mesh | None = None,
    model: torch.nn.Module | Sequence[Any] | None = None,
    layers: str | Sequence[str] = "gcn",
    inputs: str = "constant",
    machine: Machine | None = None,
    memory: float | None = None,
    partition: Any = "metis",
    seed: int = 0,
    algorithm: str | None = None,
    grid: Grid | None = None,
    codecs: Sequence[Asked] = (),
    pipeline: bool = False,
    chunks: int | None = None,
    bubble: float = BUBBLE,
    skips: int = 0,
    dtype: torch.dtype | None = None,
    loader: Mapping[str, Any] | None = None,
) -> Plans | LoaderPlans:
    """Lists every grid, ordering, halo and codec for training a graph, with its costs, ranked.

    Nothing is sent, and every rank that calls it gets the same: bytes are those that the
    ledger will count in an epoch of the full graph (a mean loss, `replicate`; from the
    third epoch on, when products of constant inputs are kept); means for a `RandomGraph`.

    Args:
        graph: the whole graph, its edge_index, or a `RandomGraph` by size and law. Of a
            HeteroData plans have the bytes of each edge type (`relation_bytes`); widths
            are then those of hidden layers and the output.
        widths: of the features, the hidden layers and the output, as [602, 16, 41].
        ranks, mesh: how many ranks; a mesh is only counted.
        model: instead of widths, or its layers as `Pipeline` takes them; run on two nodes.
        layers: "gcn", "sage", or "halo" for any other layer of PyG's; or one for each.
        inputs: "constant" features, "changing" ones (input dropout), or "trained".
        machine: from `calibrate`, `Machine.of_device`, or by hand; default gigabit Ethernet.
        memory: bytes a rank may use in an epoch, beside its interpreter; those it takes to
            cut the graph, and to plan exchanges, come before. Default `machine.memory`.
        partition, seed: as `pdc.partition` takes them: a method, owners, or a Partition.
        algorithm, grid: only grids of this name ("1d", "1.5d", "2d", ...), or only this one.
        codecs: beside the exact link, others to plan for: names as "1 bit", "bf16" or
            "4 bits late", Codecs, or LinkPolicys (as they stand: of a schedule, the ratio
            of its present epoch); of a HeteroData also dictionaries of these by edge type,
            as `link=` of `pdc.partition`. Bytes are exact where sizes do not depend on values,
            the most there can be elsewhere. A plan that changes numbers is never `best`.
        pipeline: whether to plan for `Pipeline` too: layers in every number of stages, as
            `init(stages=S)` has them, of 1 rank or more each. Bytes are those of
            `Pipeline.price`. Of widths alone, layers are cut evenly. In stages of several
            ranks rows travel by each of `codecs` too.
        chunks, bubble: as `Pipeline` has them; seconds price the idle turns.
        skips: values beside x that cross all borders (GCNII: 1); a model knows its own.
        dtype: of the features; that of data.x, else of the model, else float32.
        loader: plan its minibatches instead of epochs, of a Data or a HeteroData; see
            `plan_loader`. With it go ranks, mesh, machine, memory (beside the share),
            partition and seed.

    Returns:
        `Plans`: a sequence, the fastest first, with `best` and `refused`; or `LoaderPlans`.

    Price: O(edges) once and O(volume) a grid; a `RandomGraph`, milliseconds a grid.
    """
    staged = pipeline, chunks, bubble, skips
    check_options(machine, memory, staged, (grid, algorithm))
    size = ranks_of(ranks, mesh, partition)
    machine, cutting = machine or Machine(), (graph, size, partition, seed)
    read = widths, model, layers, inputs, dtype
    if isinstance(graph, HeteroData) and loader is None:
        check_hetero_options(pipeline, grid, algorithm, size)
        return plan_hetero(cutting, read, machine, memory, codecs)
    if loader is not None:
        others = widths, model, grid, algorithm, dtype, *codecs, pipeline or None
        return _loader_plans(cutting, others, (loader, machine, memory))
    return _graph_plans(
        cutting, read, staged, (machine, memory, grid, algorithm, codecs)
    )


def _graph_plans(
    cutting: tuple[Any, int, Any, int],
    read: tuple[Any, Any, Any, str, torch.dtype | None],
    staged: tuple[bool, int | None, float, int],
    how: tuple[Machine, float | None, Any, str | None, Sequence[Asked]],
) -> Plans:
    """Returns the plans of all grids, and of stages."""
    (graph, size, partition, seed), (machine, memory, grid, algorithm, codecs) = (
        cutting,
        how,
    )
    widths, model, layers, inputs, dtype = read
    grid = grid_of(grid, algorithm, size)
    dtype = dtype_of(graph, model, dtype)
    training = training_asked(graph, widths, model, layers, inputs, dtype)
    source, words, owners = _source(*cutting, grid)
    found, links = [], codings(codecs)
    if staged[0]:
        stages = (model, graph, staged), (source, partition, seed)
        found += _pipelines(*stages, training, machine, size, links, dtype)
    grids = _grids(size, algorithm, grid)
    found += _on_grids(grids, cutting, source, training, machine, links, dtype)
    ranked, refused = _ranked(found, training, machine, memory)
    owners = _on_fastest(ranked, cutting, owners)
    names = () if grid is not None else rejections(size, algorithm)
    said = f"{words}, {size} ranks; {_words(training)}"
    return Plans(ranked, refused, names, said, machine, owners)


def _loader_plans(
    cutting: tuple[Any, int, Any, int],
    others: Sequence[Any],
    how: tuple[Mapping[str, Any], Machine, float | None],
) -> LoaderPlans:
    """Returns the plans of a loader, unless there is something that says nothing of it."""
    graph = cutting[0]
    if not isinstance(how[0], Mapping):
        raise TypeError(
            "loader is a dictionary of a loader's arguments, such as "
            f"{{'num_neighbors': [10, 5]}}; got a {type(how[0]).__name__}"
        )
    if any(other is not None for other in others):
        raise ValueError(
            "loader plans minibatches, whatever the model; leave out widths, model, "
            "algorithm, grid, codecs, pipeline and dtype"
        )
    if isinstance(graph, HeteroData):
        if "num_nodes_per_layer" in how[0]:
            raise ValueError(
                "layer-wise loaders take graphs of one node type; give num_neighbors"
            )
        return plan_loader(graph, owners_of_types(*cutting), *how)
    if not isinstance(graph, Data):
        raise TypeError(
            "a loader is planned for a whole torch_geometric.data.Data or HeteroData, got "
            f"{type(graph).__name__}"
        )
    owners = _source(*cutting)[2]
    assert owners is not None
    return plan_loader(graph, owners, *how)


def _on_grids(
    grids: Iterable[Grid],
    cutting: tuple[Any, int, Any, int],
    source: CutEdges | RandomGraph,
    *how: Any,
) -> list[Plan]:
    """Returns the plans of all grids; of a graph that is cut anew for each, if need be."""
    found = []
    for one in grids:
        if takes_grid(cutting[2]):
            source = _source(*cutting, one)[0]
        found += _plans_of(one, source, *how)
    return found


def _on_fastest(
    ranked: tuple[Plan, ...],
    cutting: tuple[Any, int, Any, int],
    owners: Partition | None,
) -> Partition | None:
    """Returns who owns which node on the fastest grid, where the cutter goes by grids."""
    fastest = next((each.grid for each in ranked if each.stages == 1), None)
    if fastest is None or not takes_grid(cutting[2]):
        return owners
    return _source(*cutting, fastest)[2]


def _ranked(
    found: list[Plan], training: Training, machine: Machine, memory: float | None
) -> tuple[tuple[Plan, ...], tuple[Plan, ...]]:
    """Returns what can be run, the fastest first, and what cannot."""
    limit = machine.memory if memory is None else memory
    known = (replace(each, missing=training.missing) for each in found)
    judged = sorted((_judged(each, limit) for each in known), key=_merit)
    refused = tuple(p for p in judged if p.reason is not None)
    return tuple(p for p in judged if p.reason is None), refused


def _pipelines(
    read: tuple[Any, Any, tuple[bool, int | None, float, int]],
    cutting: tuple[CutEdges | RandomGraph, Any, int],
    training: Training,
    machine: Machine,
    size: int,
    links: list[Coding | None],
    dtype: torch.dtype,
) -> list[Plan]:
    """Returns the plans of all numbers of stages."""
    (model, graph, staged), (source, partition, seed) = read, cutting
    _, chunks, most, skips = staged
    fewest_chunks(1, most)  # refuses what is no share
    for name, value, least in (("chunks", chunks, 1), ("skips", skips, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(
                f"{name} must be a whole number from {least} on: {value!r}"
            )

    def share(ways: int) -> Flow:
        if isinstance(source, RandomGraph):
            return source.flow((ways, 1, 1), "rows", False)
        if ways == source.size:
            return source.halo_flow
        if ways > 1 and not isinstance(partition, str):
            raise ValueError(
                f"a stage has {ways} ranks, and the owners given are {source.size}; plan "
                "with the name of a method"
            )
        method = "block" if ways == 1 else partition
        cut_again = _source(graph, ways, method, seed)[0]
        assert isinstance(cut_again, CutEdges)
        return cut_again.halo_flow

    if model is None:
        items = items_of(training, skips)
    else:
        try:
            items = items_of_stack(model, features_asked(graph, model))
        except (ValueError, TypeError, RuntimeError) as error:
            sizes = (d for d in range(2, size + 1) if size % d == 0)
            return [Plan((size // d, 1, 1), stages=d, reason=str(error)) for d in sizes]
    nodes = source.nodes if isinstance(source, RandomGraph) else len(source.owner)
    deep = LayerProfile(
        items, training, cache(share), nodes, chunks, machine, links, dtype, most
    )
    return deep.plans(size)


def _source(
    graph: Any, size: int, partition: Any, seed: int, grid: Grid | None = None
) -> tuple[CutEdges | RandomGraph, str, Partition | None]:
    """Returns what flows are counted from, what it is, and who owns which node."""
    if isinstance(graph, RandomGraph):
        words = f"{graph.nodes:,} nodes, {graph.edges:,} edges, law {graph.law}"
        return graph, words, None
    edge_index, nodes, mask = edges_of(graph, partition)
    if isinstance(partition, Partition):
        owners = partition
    else:
        how: Any = {"seed": seed, "train_mask": mask, "grid": grid}
        owners = cut(edge_index, nodes, size, partition, **how)
    if owners.num_parts != size or owners.num_nodes != nodes:
        raise ValueError(
            f"{owners} does not fit a graph of {nodes} nodes on {size} ranks; cut the graph "
            f"into {size} parts"
        )
    words = f"{nodes:,} nodes, {edge_index.size(1):,} edges"
    return CutEdges.of(edge_index, owners), words, owners


def _grids(size: int, algorithm: str | None, grid: Grid | None) -> Iterable[Grid]:
    if grid is not None:
        return [grid]
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm={algorithm!r} is not known; choose one of {', '.join(ALGORITHMS)}"
        )
    sides = [d for d in range(1, size + 1) if size % d == 0]
    every = [
        (r, s, size // (r * s)) for r in sides for s in sides if size % (r * s) == 0
    ]
    if algorithm is None:
        return every
    return [one for one in every if _fits(one, algorithm)]


def _fits(grid: Grid, algorithm: str) -> bool:
    # every (P/c, c, 1) is a 1.5D grid for c of its own, those of other names too
    if algorithm == "1.5d":
        return grid[2] == 1 and grid[1] > 1
    return name_of(grid) == algorithm


def _plans_of(
    grid: Grid,
    source: CutEdges | RandomGraph,
    training: Training,
    machine: Machine,
    links: list[Coding | None],
    dtype: torch.dtype,
) -> list[Plan]:
    """Returns the plans of one grid, one for each different way to train on it."""
    found = []
    for halo in _halos(grid, source, training):
        flow = source.flow(grid, halo, training.adds_loops)
        back = flow
        if training.goes_back and isinstance(source, CutEdges):
            back = source.turned.flow(grid, halo, training.adds_loops)
        ghosts = _ghosts(source, grid) if training.runs_by_halo else flow
        adds = training.adds_rows and adds_on_grid(flow, ghosts, dtype)
        seen: set[tuple[tuple[str, ...], bool]] = set()
        for ordering in _orderings():
            orders = training.orders(ordering)
            kind = orders, training.kept_rows(ordering) > 0
            if kind in seen:
                continue
            coded = [] if orders in {order for order, _ in seen} else links[1:]
            seen.add(kind)
            for link in (None, *coded):
                # rows of a coded link are summed here, and none are kept
                exact = link is None
                how: Any = {"adds_on_grid": adds and exact, "keeps_rows": exact}
                products = training.products(ordering, **how)
                kept = training.kept_rows(ordering, **how)
                flows, ways = (flow, back, ghosts), (products, orders, kept)
                cost = epoch_cost(flows, training, ways, link, dtype, machine)
                one = _plan(grid, ordering, orders, halo, link, cost)
                early = early_bytes(flows, training, (ordering, how), dtype, link)
                agreed = one.size * one.sum_bytes.get("agreement", 0)
                early = early[0] + agreed, early[1] + agreed
                found.append(replace(one, early_bytes=early))
    return found


def _ghosts(source: CutEdges | RandomGraph, grid: Grid) -> Flow:
    if isinstance(source, CutEdges):
        return source.halo_flow
    return source.flow((math.prod(grid), 1, 1), "rows", False)


def _halos(
    grid: Grid, source: CutEdges | RandomGraph, training: Training
) -> tuple[str, ...]:
    """Lists what may travel: all there is, but for laws of degrees and for one way."""
    if isinstance(source, RandomGraph):
        return ("rows", "blocks") if grid[:2] != (1, 1) else ("rows",)
    products = any(each.kind != "halo" for each in training.layers)
    products = products or (training.adds_rows and grid[1:] != (1, 1))
    return HALOS if grid[:2] != (1, 1) and products else HALOS[:1]


def _orderings() -> list[MultiplyOrder]:
    names = ("auto", *(name for name in ORDERS if name != "auto"))
    return [MultiplyOrder(order, keep) for order in names for keep in (True, False)]


def _plan(
    grid: Grid,
    ordering: MultiplyOrder,
    orders: tuple[str, ...],
    halo: str,
    link: Coding | None,
    cost: Cost,
) -> Plan:
    size = grid[0] * grid[1] * grid[2]
    sums = sum(cost.sums.values())
    by_rank = tuple(round(float(n)) + sums for n in cost.exchange.ravel())
    every = len(by_rank) == size
    total = (
        sum(by_rank) if every else round((float(cost.exchange.mean()) + sums) * size)
    )
    return Plan(
        grid,
        orders,
        ordering,
        halo,
        "plain" if link is None else link.name,
        by_rank if every else (max(by_rank),),
        round(float(cost.exchange.max())),
        cost.sums,
        total,
        round(float(cost.messages.max())),
        cost.seconds,
        round(float(cost.memory.max())),
        exact=link is None or link.exact,
        sized=link is None or link.sized,
        link=None if link is None else link.link,
    )


def _judged(found: Plan, limit: float | None) -> Plan:
    """Gives a plan that does not fit its reason."""
    if found.reason is not None or limit is None or found.memory <= limit:
        return found
    need, may = show_bytes(found.memory), show_bytes(limit)
    return replace(found, reason=f"needs {need} a rank, and may use {may}")


def _merit(found: Plan) -> tuple[Any, ...]:
    """Fastest first; of equals the one with fewer bytes, then the simplest."""
    r, s, p = found.grid
    halo = HALOS.index(found.halo)
    return found.seconds, found.bytes, not found.exact, halo, found.memory, s * p, p, -r


def _words(training: Training) -> str:
    widths = [training.layers[0].width_in, *(one.width_out for one in training.layers)]
    kinds = [one.kind for one in training.layers]
    names = kinds[0] if len(set(kinds)) == 1 else "-".join(kinds)
    return f"{names} {'-'.join(map(str, widths))}, {training.inputs} inputs"
