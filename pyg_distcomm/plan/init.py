"""Makes the mesh of a run: `init`, which for an `Auto` times plans, and takes the fastest."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm import mesh as grids
from pyg_distcomm.comm.consistency import check_alike, naming, on_all_ranks
from pyg_distcomm.comm.mesh import Grid, Mesh
from pyg_distcomm.graph.partition_data import partition
from pyg_distcomm.nn.product_layers import DistGCNConv, DistSAGEConv
from pyg_distcomm.nn.replicate import replicate
from pyg_distcomm.partition.cutters import check_edge_index, takes_grid
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.planner import Plan, Plans, edges_of, plan
from pyg_distcomm.plan.ranks import CodecLike, described, links_of
from pyg_distcomm.plan.training import INPUTS, Stack, Training, training_of
from pyg_distcomm.process import PROCESS


@dataclass(frozen=True, eq=False)
class Auto:
    """Describes a training run, for which `init` plans, times, and chooses the grid.

        mesh = pdc.init(pdc.Auto(whole, widths=[602, 16, 41]))
        data = pdc.partition(whole, mesh)      # cut as planned

    Args:
        data: the whole graph, the same on every rank.
        widths, model: the widths of features, hidden layers and output, or the model.
        layers, inputs, memory, dtype: see `plan`.
        codecs: links that it may take (see `plan`), for `partition(..., link=mesh.plan.link)`.
        method: the method of the partition, also for `partition`; with seed 0.
    """

    data: Any
    widths: Sequence[int] | None = None
    model: torch.nn.Module | None = None
    layers: str | Sequence[str] = "gcn"
    inputs: str = INPUTS[0]
    method: Any = "metis"
    memory: float | None = None
    codecs: Sequence[CodecLike] = ()
    dtype: torch.dtype | None = None


def init(
    algorithm: str | Auto = "1d",
    *,
    replication: int | None = None,
    grid: Grid | None = None,
    backend: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    timeout: float = 300.0,
    stages: int = 1,
    check: grids.Check = "first",
    strict: bool = False,
) -> Mesh:
    """Joins the run and returns its mesh.

    Works under torchrun or another launcher that sets RANK and WORLD_SIZE, under `pdc.launch`,
    in a process group that the caller has made, or in a single process.

        mesh = pdc.init()
        data = pdc.partition(dataset[0], mesh)

    `Auto` plans on rank 0 (see `plan`), times epochs of the 4 exact plans with the fewest
    bytes, and takes the fastest; see `shortlist` for when the first is taken untimed.
    `partition` follows `mesh.plan`.

    Args:
        algorithm: "1d", "1.5d", "2d", "3d" or "feature" (see `resolve_grid`), or an `Auto`.
        replication: c of 1.5D.
        grid: an explicit grid `(row, col, fiber)`, instead of a name.
        backend: "gloo", "nccl", or torch's mixed form; by default chosen by the devices.
        device: the device of this rank; by default a CUDA device with NCCL, else the CPU.
        seed: the seed of dropout and of all other keyed random draws.
        timeout: seconds a rank waits for others before it raises a RankError, which names each
            rank's line of the script, as stderr does after 20 s; torch's waits end 5 s later.
        stages: stages of a `Pipeline`; the mesh is that of one, of P / stages ranks.
        check: which plain tensors ranks compare when they meet row-sharded ones: parameters
            once, others once per operation and shape, and steps on minibatches until they
            are found averaged ("first"), all ("always"), or "never".
        strict: raises where an operation would gather all rows of a tensor on every rank.

    `mesh.close()` or `with pdc.init() as mesh:` closes the connections.

    Raises:
        ValueError: if the grid does not fit; the message lists the sizes that do.
    """
    mesh_options: Any = {"backend": backend, "device": device, "seed": seed}
    mesh_options |= {"check": check, "strict": strict, "timeout": timeout}
    if not isinstance(algorithm, Auto):
        if algorithm == "auto":
            raise ValueError(
                "algorithm='auto' needs a graph to plan for; give "
                "pdc.Auto(data, widths=[features, hidden, ..., output]) instead, or model=..."
            )
        mesh_options |= {"replication": replication, "grid": grid, "stages": stages}
        return _new_mesh(algorithm, mesh_options)
    mesh = grids.init("auto", **mesh_options)
    problem = _option_problem((replication, grid, stages), algorithm)
    collectives.agree(problem, mesh.world)
    best, owners = _choose_plan(mesh, algorithm, mesh_options)
    if best.grid != mesh.grid:
        mesh = grids.init(grid=best.grid, **mesh_options)
    mesh.plan, mesh.owners = best, owners
    return grids.remember(mesh)


def _new_mesh(algorithm: str, mesh_options: dict[str, Any]) -> Mesh:
    """Returns a mesh; warns once if it is a second one with the same ranks and grid."""
    before = grids.latest_mesh()
    mesh = grids.init(algorithm, **mesh_options)
    if before is None or before.everyone.size == 1 or "again" in PROCESS.warned:
        return mesh
    if before.grid != mesh.grid or before.stage.size != mesh.stage.size:
        return mesh  # a script may compare grids
    PROCESS.warned.add("again")
    warnings.warn(
        "pdc.init was called again, and there are two meshes of the same grid now, each with "
        "its own connections, ledger and dropout counter. Call it once, and pass the mesh on; "
        "or end the first by mesh.close() before the second",
        stacklevel=3,
    )
    return mesh


def _option_problem(shape: tuple[Any, ...], auto: Auto) -> str | None:
    """Describes options that do not fit together; returns None if all fit."""
    if shape != (None, None, 1):
        return "pdc.Auto finds the grid; leave grid, replication and stages out"
    if auto.data is None or (auto.widths is None) == (auto.model is None):
        return (
            "pdc.Auto needs a graph to plan for; give it as data, and either "
            "widths=[features, hidden, ..., output] or model"
        )
    return None


def _choose_plan(
    mesh: Mesh, auto: Auto, mesh_options: dict[str, Any]
) -> tuple[Plan, Partition | None]:
    """Returns the plan to train by, and the owners of nodes if it has them; collective."""
    found = None
    # the arguments of rank 0 count: the other ranks time what it chooses
    with on_all_ranks(mesh.world):
        found = _candidates(auto, mesh.size) if mesh.rank == 0 else None
    placed, owner, training = collectives.broadcast_object(found, mesh.world)
    with on_all_ranks(mesh.world):
        links = links_of(auto.codecs)
        names = [described(link)["codec"] for link in links[1:]]
    check_alike({"codecs": names}, mesh.world)
    candidates = [replace(one, link=links[at]) for one, at in placed]
    if owner is None:
        return candidates[0], None
    owners = Partition.from_owner(owner, mesh.size)
    if len(candidates) == 1:
        return candidates[0], owners
    with on_all_ranks(mesh.world), naming("give every rank the same data"):
        edge_index, nodes, _ = edges_of(auto.data, owners)
        check_edge_index(edge_index, nodes)
    best = fastest(edge_index, owners, candidates, training, mesh_options)
    return best, owners


def _candidates(auto: Auto, ranks: int) -> tuple[Any, ...]:
    """Returns the plans to time or to take, the owners of nodes, and the training.

    Plans come without their links, but with their places in the list of codecs.
    """
    data, method = auto.data, auto.method
    options = {f.name: getattr(auto, f.name) for f in fields(auto)}
    del options["data"], options["method"]
    links = links_of(auto.codecs)
    options["codecs"] = links[1:]
    plans = plan(data, ranks=ranks, partition=method, **options)
    inexact = bool(auto.codecs)
    best = plans[0] if inexact and len(plans) else plans.best
    owners = plans.partition  # on the grid of `best`
    owner = None if owners is None else owners.owner.numpy()
    candidates, training = [best], None
    if not inexact and owner is not None and not takes_grid(method):
        training = plans.training
        candidates = shortlist(plans, training, auto.memory)
    placed = [(replace(one, link=None), links.index(one.link)) for one in candidates]
    return placed, owner, training


MOST = 4  # the most plans that are timed
LONGEST = 60.0  # seconds after which a round of epochs is the last
WARM, EPOCHS = 3, 7  # epochs of each plan that warm up, and that are timed
DEFAULT_MEMORY = 8 << 30  # bytes that the timed plans may use together without a limit
DTYPES = torch.float32, torch.float64  # of plans that are timed
LAYERS: dict[str, Any] = {"gcn": DistGCNConv, "sage": DistSAGEConv}


def shortlist(
    plans: Plans, training: Training, memory: float | None = None
) -> list[Plan]:
    """Returns the exact plans with the fewest bytes, to be timed; or only the best one.

    Returns only the best one if the layers are not a plain stack of GCN and SAGE layers.
    `memory` is what a rank may use for all of them together, in bytes.
    """
    best = plans.best
    limit = memory or DEFAULT_MEMORY
    chosen: list[Plan] = []
    if not _is_plain_stack(training):
        return [best]
    for one in plans:
        total = one.memory + sum(other.memory for other in chosen)
        if one.exact and total <= limit:
            chosen.append(one)
    return chosen[:MOST] if best in chosen else [best]


def _is_plain_stack(training: Training) -> bool:
    """Returns whether layers of `LAYERS` alone multiply as those of `training` do."""
    layers = training.layers
    kinds = [layer.kind for layer in layers]
    if training.missing or training.dtype not in DTYPES or {*kinds} - {*LAYERS}:
        return False
    widths = [layers[0].width_in, *(layer.width_out for layer in layers)]
    return training_of(widths, kinds, inputs=training.inputs).layers == layers


def fastest(
    edge_index: Tensor,
    owners: Partition,
    plans: list[Plan],
    training: Training,
    mesh_options: dict[str, Any],
) -> Plan:
    """Trains some epochs of each plan, in turn, and returns the fastest; collective.

    The model is a GCN or GraphSAGE of the widths of `training`. The slowest rank's median
    epoch counts. Meshes, made by `init` with `mesh_options`, are closed afterwards.
    """
    layers = training.layers
    x = torch.ones(1, layers[0].width_in, dtype=training.dtype).expand(
        owners.num_nodes, -1
    )
    y = torch.arange(owners.num_nodes) % layers[-1].width_out
    data = Data(x=x, y=y, edge_index=edge_index)
    runs = [_start_run(data, owners, plan, training, mesh_options) for plan in plans]
    timings: list[list[float]] = [[] for _ in plans]
    meshes = [mesh for mesh, _ in runs]
    off = None if meshes[0].rank == 0 else True
    begin, world = time.perf_counter(), meshes[0].world
    for _ in tqdm(range(WARM + EPOCHS), "timing plans", disable=off, leave=False):
        for (mesh, epoch), seconds in zip(runs, timings, strict=True):
            seconds.append(time_once(epoch, mesh))
        spent = torch.tensor([time.perf_counter() - begin])
        if float(collectives.all_reduce(spent, world, "max")) > LONGEST:
            break
    medians = [statistics.median(each[WARM:] or each[-1:]) for each in timings]
    slowest = torch.tensor(medians, dtype=torch.float64)
    slowest = collectives.all_reduce(slowest, world, "max")
    del epoch, runs  # which use the groups
    for mesh in meshes:
        mesh.close()
    return plans[int(slowest.argmin())]


def _start_run(
    data: Data,
    owners: Partition,
    plan: Plan,
    training: Training,
    mesh_options: dict[str, Any],
) -> tuple[Mesh, Callable[[], None]]:
    """Returns a mesh for one plan, and what trains a model by it, once on all nodes."""
    mesh = grids.init(grid=plan.grid, **mesh_options)
    mesh.plan, mesh.owners = plan, owners
    share: Any = partition(data, mesh).to(mesh.device)
    share.x.requires_grad_(training.inputs == "trained")
    layers = (
        LAYERS[one.kind](int(one.width_in), int(one.width_out))
        for one in training.layers
    )
    # the script's random state must not change
    with torch.random.fork_rng(devices=[]):
        model = replicate(Stack(layers).to(mesh.device, share.x.dtype), mesh)
    optimizer = torch.optim.Adam(model.parameters())

    def epoch() -> None:
        optimizer.zero_grad()
        x = share.x.clone() if training.inputs == "changing" else share.x
        out = model(x, share.edge_index)
        torch.nn.functional.cross_entropy(out, share.y).backward()
        optimizer.step()

    return mesh, epoch


def time_once(work: Callable[[], object], mesh: Mesh) -> float:
    """Returns the seconds of one call of `work`, which all ranks begin together."""
    collectives.barrier(mesh.world)
    _finish(mesh)
    start = time.perf_counter()
    work()
    _finish(mesh)
    return time.perf_counter() - start


def _finish(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
