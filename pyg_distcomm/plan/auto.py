"""Joins a run; `algorithm='auto'` shortlists plans, times them and takes the fastest."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm import mesh as grids
from pyg_distcomm.comm.axis import destroy_groups
from pyg_distcomm.comm.mesh import Grid, Mesh
from pyg_distcomm.graph.partitioning import partition
from pyg_distcomm.nn.product_layers import DistGCNConv, DistSAGEConv
from pyg_distcomm.partition.cutters import (
    check_edge_index,
    check_method,
    cut,
    takes_grid,
)
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.pipeline.schedule import BUBBLE
from pyg_distcomm.plan.calibrate import TrainingRun, calibrate, once
from pyg_distcomm.plan.codecs import Asked, codings
from pyg_distcomm.plan.degree_distribution import RandomGraph
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.planner import check_options, edges_of, plan
from pyg_distcomm.plan.plans import Plan, Plans
from pyg_distcomm.plan.training import (
    INPUTS,
    Training,
    dtype_of,
    training_asked,
)
from pyg_distcomm.process import PROCESS

MOST_ROWS, MOST_DEGREE = 1 << 14, 64  # of a rank, of the matrix that is timed
MOST_WIDTH = 1024  # at which: products of wider rows are hardly faster


def init(
    algorithm: str = "1d",
    *,
    replication: int | None = None,
    grid: Grid | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    timeout: float = 300.0,
    stages: int = 1,
    check: grids.Check = "first",
    data: Data | None = None,
    widths: Sequence[int] | None = None,
    model: torch.nn.Module | None = None,
    layers: str | Sequence[str] = "gcn",
    inputs: str = INPUTS[0],
    method: Any = "metis",
    machine: Machine | None = None,
    memory: float | None = None,
    codecs: Sequence[Asked] = (),
    pipeline: bool = False,
    dtype: torch.dtype | None = None,
) -> Mesh:
    """Joins the run and returns its mesh.

    Works under torchrun, or what else sets RANK and WORLD_SIZE, under `pdc.launch`, in a
    process group that the caller has made, or alone, with none at all.

        mesh = pdc.init("auto", data=dataset[0], widths=[602, 16, 41])
        data = pdc.partition(dataset[0], mesh)      # cut as planned

    "auto" calibrates, plans on rank 0 (see `plan`), times epochs of the best 4 exact plans,
    and takes the fastest; see `shortlist` for when the best plan is taken untimed.
    `partition` follows `mesh.plan`.

    Args:
        algorithm: "1d", "1.5d", "2d", "3d", "feature" (see `resolve_grid`) or "auto".
        replication: c of the 1.5D algorithm.
        grid: an explicit grid `(row, col, fiber)`, instead of a name.
        backend: "gloo", "nccl", or torch's mixed form; chosen by what is there.
        device: where this rank computes; its CUDA device with NCCL, else the CPU.
        seed: of dropout and of everything else that is keyed.
        timeout: seconds a rank waits for others before it raises a RankError: the deadline
            of all waits; torch's own (NCCL, files of checkpoints) end 5 s later.
        stages: of a `Pipeline`; the mesh is that of one of them, of P / stages ranks.
        check: which plain tensors ranks compare as they meet row-sharded ones: parameters once,
            others once per operation and shape ("first"), all ("always"), or "never".
        data, widths, model: for "auto", the whole graph, the same on every rank, and the
            widths of features, hidden layers and output, or the model, which has them.
        layers, inputs, memory, dtype: for "auto", see `plan`.
        codecs, pipeline: for "auto", what else it may take, though it is not exact: links,
            to be handed on as `partition(..., link=mesh.plan.link)`, and stages, with
            `mesh.plan.chunks` and `balance` for `Pipeline`. See `plan`.
        method: for "auto", how the graph is cut, for `partition` too; from seed 0.
        machine: for "auto", the figures, instead of measuring them; nothing is timed.

    `mesh.close()` or `with pdc.init() as mesh:` gives connections back.

    Raises:
        ValueError: if the grid does not fit; the message lists the sizes that do.
    """
    how: Any = {"backend": backend, "device": device, "seed": seed}
    how |= {"check": check, "timeout": timeout}
    given = {"data": data, "widths": widths, "model": model, "machine": machine}
    given |= {"memory": memory, "dtype": dtype, "pipeline": pipeline or None}
    given |= {"codecs": codecs or None, "layers": None if layers == "gcn" else layers}
    given |= {"inputs": None if inputs == INPUTS[0] else inputs}
    given |= {"method": None if str(method) == "metis" else method}
    problem = _misuse(algorithm, (replication, grid, stages), given)
    if algorithm != "auto":
        _refuse(problem)
        how |= {"replication": replication, "grid": grid, "stages": stages}
        return _joined(algorithm, how)
    mesh = grids.init("1d", **how, also={"algorithm": algorithm})
    collectives.agree(problem, mesh.world)
    read: Any = {"widths": widths, "model": model, "layers": layers, "inputs": inputs}
    asked = {"memory": memory, "partition": method, "dtype": dtype}
    asked |= {"codecs": codecs, "pipeline": pipeline, "machine": machine}
    best, owners = _planned(mesh, data, read, asked, how)
    if (best.stages, best.grid) != (1, mesh.grid):
        mesh = grids.init(grid=best.grid, stages=best.stages, **how)
    mesh.plan, mesh.owners = best, owners
    return grids.remember(mesh)


def _joined(algorithm: str, how: dict[str, Any]) -> Mesh:
    """Returns a mesh; warns, once, if it is a second one of the same ranks and grid."""
    before = grids.latest_mesh()
    mesh = grids.init(algorithm, **how)
    if before is None or before.everyone.size == 1 or "again" in PROCESS.warned:
        return mesh
    if before.grid != mesh.grid or before.stage.size != mesh.stage.size:
        return mesh  # grids are compared so
    PROCESS.warned.add("again")
    warnings.warn(
        "pdc.init was called again, and there are two meshes of the same grid now, each with "
        "connections, a ledger and a counter of dropout of its own. Call it once, and hand "
        "its mesh on; or end the first by mesh.close() before the second",
        stacklevel=3,
    )
    return mesh


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ValueError(problem)


def _misuse(
    algorithm: str, shape: tuple[Any, ...], given: dict[str, Any]
) -> str | None:
    """Says what does not go together, if anything."""
    if algorithm != "auto":
        names = [name for name, value in given.items() if value is not None]
        verb = "is" if len(names) == 1 else "are"
        told = f"{', '.join(names)} {verb} for algorithm='auto', got {algorithm!r}"
        return told if names else None
    if shape != (None, None, 1):
        return "algorithm='auto' finds the grid; leave grid, replication and stages out"
    if given["data"] is None or (given["widths"] is None) == (given["model"] is None):
        return (
            "algorithm='auto' plans before it chooses: give the graph as data=..., and "
            "either widths=[features, hidden, ..., output] or model=..."
        )
    return None


def _from_first(mesh: Mesh, work: Callable[[], Any]) -> Any:
    """Returns what rank 0 finds; raises on all ranks, or on none; collective."""
    found, problem, cause = None, None, None
    kind: type[Exception] = ValueError
    if mesh.rank == 0:
        try:
            found = work()
        except Exception as error:
            kinds = (TypeError, ValueError)
            kind = next((k for k in kinds if isinstance(error, k)), RuntimeError)
            problem, cause = str(error) or type(error).__name__, error
    kind = collectives.broadcast_object(kind, mesh.world)
    try:
        collectives.agree(problem, mesh.world, kind)
    except Exception as told:
        raise told from cause
    return collectives.broadcast_object(found, mesh.world)


def _planned(
    mesh: Mesh,
    data: Any,
    read: dict[str, Any],
    asked: dict[str, Any],
    how: dict[str, Any],
) -> tuple[Plan, Partition | None]:
    """Returns the plan to take, and who owns which node, if it says; collective."""
    asked = asked | read
    # what rank 0 was given counts: the others follow it into what is timed
    check = partial(_checked, data, mesh.size, read, asked)
    given, codecs, shape = _from_first(mesh, check)
    collectives.agree(_differing(asked["codecs"], codecs), mesh.world)
    every = codings(asked["codecs"])
    machine = asked["machine"]
    if not given:
        machine = Machine()
        if mesh.size > 1:
            machine = calibrate(mesh, codecs=asked["codecs"], **shape)

    def place(one: Plan) -> int:
        """Returns which of the codings a plan takes; links stay where they are."""
        links = [coding and coding.link for coding in every]
        return links.index(one.link) if one.link in links else codecs.index(one.codec)

    def choose() -> tuple[list[tuple[Plan, int]], np.ndarray | None, Training | None]:
        plans = plan(data, ranks=mesh.size, **asked | {"machine": machine})
        wider = bool(asked["codecs"]) or asked["pipeline"]
        best = plans[0] if wider and len(plans) else plans.best
        owners = _owners(plans, best, data, asked["partition"])
        owner = None if owners is None else owners.owner.numpy()
        if given or wider or owner is None or takes_grid(asked["partition"]):
            near, training = [best], None
        else:
            training = _training(data, read, asked)
            near = shortlist(plans, training, asked["memory"])
        placed = [(replace(one, link=None), place(one)) for one in near]
        return placed, owner, training

    placed, owner, training = _from_first(mesh, choose)
    near = [
        replace(one, link=coding and coding.link)
        for one, coding in ((one, every[at]) for one, at in placed)
    ]
    if owner is None:
        return near[0], None
    owners = Partition.from_owner(owner, mesh.size // near[0].stages)
    if len(near) == 1:
        return near[0], owners
    collectives.agree(_unread(data, owners), mesh.world)
    return fastest(edges_of(data, owners)[0], owners, near, training, how), owners


def _unread(data: Any, owners: Partition) -> str | None:
    """Says what is wrong with this rank's graph, if anything."""
    try:
        edge_index, nodes, _ = edges_of(data, owners)
        check_edge_index(edge_index, nodes)
    except (TypeError, ValueError) as error:
        return f"{error}; give every rank the same data"
    return None


def _training(data: Any, read: dict[str, Any], asked: dict[str, Any]) -> Training:
    dtype = dtype_of(data, read["model"], asked["dtype"])
    return training_asked(data, dtype=dtype, **read)


def _differing(codecs: Sequence[Asked], there: list[str]) -> str | None:
    """Says how codecs differ from those that rank 0 times, if they do."""
    try:
        mine = _names(codecs)
    except (TypeError, ValueError) as error:
        return str(error)
    if mine == there:
        return None
    return f"codecs are {mine[1:]}, and on rank 0 {there[1:]}; give all ranks the same"


def _names(codecs: Sequence[Asked]) -> list[str]:
    return ["plain" if one is None else one.name for one in codings(codecs)]


def _checked(
    data: Any, size: int, read: dict[str, Any], asked: dict[str, Any]
) -> tuple[bool, list[str], dict[str, Any]]:
    """Returns whether a machine is given, the codings' names, and what to calibrate for.

    What can be refused before anything is timed, is.
    """
    machine, method = asked["machine"], asked["partition"]
    stages = asked["pipeline"], None, BUBBLE, 0
    check_options(machine, asked["memory"], stages, (None, None))
    codecs = _names(asked["codecs"])
    if isinstance(method, str):
        check_method(method)
    if isinstance(data, RandomGraph):
        nodes, edges = data.nodes, data.edges
    else:
        edge_index, nodes, _ = edges_of(data, method)
        check_edge_index(edge_index, nodes)
        edges = edge_index.size(1)
    training = _training(data, read, asked)
    widths = {int(n) for one in training.layers for n in (one.width_in, one.width_out)}
    shape = {
        "widths": sorted({min(n, MOST_WIDTH) for n in widths}),
        "rows": min(max(1, nodes // size), MOST_ROWS),
        "degree": min(max(1, edges // max(1, nodes)), MOST_DEGREE),
    }
    return machine is not None, codecs, shape


def _owners(plans: Plans, best: Plan, data: Any, method: Any) -> Partition | None:
    """Returns who owns which node in a plan; of stages, in each of them alike."""
    if plans.partition is None or not (best.stages > 1 or takes_grid(method)):
        return plans.partition
    edge_index, nodes, mask = edges_of(data, method)
    ways = best.size // best.stages
    method = "block" if ways == 1 else method
    return cut(edge_index, nodes, ways, method, train_mask=mask, grid=best.grid)


MOST = 4  # plans that are timed
LONGEST = 5.0  # seconds of an epoch, as estimated, beyond which none is timed
WARM, EPOCHS = 3, 7  # epochs of each that do not count, and that do
ROOM = 8 << 30  # bytes that they may use together, where no limit is given
DTYPES = {4: torch.float32, 8: torch.float64}  # by bytes of a number
LAYERS: dict[str, Any] = {"gcn": DistGCNConv, "sage": DistSAGEConv}


def shortlist(
    plans: Plans, training: Training, memory: float | None = None
) -> list[Plan]:
    """Returns the best few exact plans by the model, to be timed; or the best one alone.

    It is alone where layers are not plain GCN and SAGE layers that follow one another, and
    where its epochs are estimated to take longer than `LONGEST`.

    Args:
        plans: all there are.
        training: what they train.
        memory: bytes a rank may use, for all of them together.
    """
    best = plans.best
    limit = memory or plans.machine.memory or ROOM
    chosen: dict[tuple[Grid, int, float], Plan] = {}  # halos that send the same are one
    if best.stages > 1 or best.seconds > LONGEST or not _plain(training):
        return [best]
    for one in plans:
        total = one.memory + sum(other.memory for other in chosen.values())
        key = one.grid, one.bytes, one.seconds
        usable = one.exact and one.stages == 1 and one.seconds <= LONGEST
        if usable and key not in chosen and total <= limit:
            chosen[key] = one
    return list(chosen.values())[:MOST] if best in chosen.values() else [best]


def _plain(training: Training) -> bool:
    """Returns whether layers of `LAYERS` multiply what `training` does."""
    layers = training.layers
    pairs = itertools.pairwise(layers)
    follow = all(one.width_out == other.width_in for one, other in pairs)
    usual = (
        layer.kind in LAYERS
        and layer.trains
        and not (layer.against or layer.fresh)
        and layer.still in (None, i == 0)
        and layer.flows in (None, i > 0 or training.inputs == "trained")
        for i, layer in enumerate(layers)
    )
    known = not training.missing and training.itemsize in DTYPES
    return follow and known and all(usual)


def fastest(
    edge_index: Tensor,
    owners: Partition,
    plans: list[Plan],
    training: Training,
    how: dict[str, Any],
) -> Plan:
    """Trains some epochs of each plan, in turn, and returns the fastest; collective.

    The model is a GCN or GraphSAGE of the widths of `training`. The slowest rank's median
    epoch counts.

    Args:
        edge_index: of the whole graph.
        owners: the partition of its nodes.
        plans: two or more, see `shortlist`.
        training: plain, see `shortlist`.
        how: arguments of `init` for their meshes, which are closed afterwards.
    """
    layers = training.layers
    dtype = DTYPES[training.itemsize]
    x = torch.ones(1, layers[0].width_in, dtype=dtype).expand(owners.num_nodes, -1)
    y = torch.arange(owners.num_nodes) % layers[-1].width_out
    data = Data(x=x, y=y, edge_index=edge_index)
    runs = [_begun(data, owners, plan, training, how) for plan in plans]
    took: list[list[float]] = [[] for _ in plans]
    off = None if runs[0].mesh.rank == 0 else True
    for _ in tqdm(range(WARM + EPOCHS), "timing plans", disable=off, leave=False):
        for run, seconds in zip(runs, took, strict=True):
            seconds.append(once(run.epoch, run.mesh))
    medians = [statistics.median(seconds[WARM:]) for seconds in took]
    slowest = torch.tensor(medians, dtype=torch.float64)
    slowest = collectives.all_reduce(slowest, runs[0].mesh.world, "max")
    meshes = [run.mesh for run in runs]
    del run, runs  # which use the groups
    for mesh in meshes:
        collectives.barrier(mesh.world)
        axes = (getattr(mesh, name) for name in grids.AXES)
        destroy_groups((mesh.world, mesh.data, *axes))
    return plans[int(slowest.argmin())]


def _begun(
    data: Data, owners: Partition, plan: Plan, training: Training, how: dict[str, Any]
) -> TrainingRun:
    """Returns what trains a model as one plan has it, on a mesh of its own."""
    mesh = grids.init(grid=plan.grid, **how)
    mesh.plan, mesh.owners = plan, owners
    share = partition(data, mesh).to(mesh.device)
    share.x.requires_grad_(training.wants_gradient(0))
    layers = (
        LAYERS[one.kind](int(one.width_in), int(one.width_out))
        for one in training.layers
    )
    # the script's own draws stay as they are
    with torch.random.fork_rng(devices=[]):
        return TrainingRun(share, layers, mesh, training.inputs == "changing")
