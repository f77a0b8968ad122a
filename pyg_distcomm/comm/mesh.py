"""Arranges the ranks as a grid, and holds the seed they share."""

from __future__ import annotations

import gc
import itertools
import math
import os
import socket
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.axis import destroy_groups, exit_on_sigterm, open_axes
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.failure import (
    FailureMonitor,
    install_excepthook,
    start_answering,
)
from pyg_distcomm.comm.ledger import Ledger, Ledgers
from pyg_distcomm.comm.serialization import first_difference
from pyg_distcomm.comm.store import (
    START,
    StoreMailbox,
    check_launched,
    chosen_device,
    default_backend,
    gather_notes,
    join,
    world_size,
)
from pyg_distcomm.comm.store import latest_mesh as latest_mesh
from pyg_distcomm.process import PROCESS, tell

Grid = tuple[int, int, int]
Check = Literal["first", "always", "never"]
ALGORITHMS = ("1d", "1.5d", "2d", "3d", "feature")
AXES = ("row", "col", "fiber")
_AXES = ("stage", *AXES, "world", "data", "control", "everyone")
# seconds to wait for other ranks if this one got an invalid timeout
_DEFAULT_TIMEOUT = 60.0
_MAX_TIMEOUT = 1e7  # seconds, the longest timeout that torch takes
_REMEMBERED = 4096  # dropout calls that a recomputation can repeat


def resolve_grid(
    size: int,
    algorithm: str = "1d",
    replication: int | None = None,
    grid: Grid | None = None,
) -> Grid:
    """Returns the grid `(row, col, fiber)` of an algorithm on `size` ranks.

    With pipeline stages, `size` is the number of ranks of one stage.

    | name    | grid        | fits                                       |
    |---------|-------------|--------------------------------------------|
    | 1d      | (P, 1, 1)   | any P                                      |
    | 1.5d    | (P/c, c, 1) | c = `replication` divides P                |
    | 2d      | (r, s, 1)   | P = r s, r >= s > 1, as square as can be   |
    | 3d      | (q, t, p)   | P = q t p, all above 1, as cubic as can be |
    | feature | (1, 1, P)   | any P; every rank holds the topology       |

    Raises:
        ValueError: if no such grid exists; the message lists sizes that fit.
    """
    if grid is not None:
        return _explicit_grid(size, grid)
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm={algorithm!r} is not known; choose one of {', '.join(ALGORITHMS)}"
        )
    if replication is not None and algorithm != "1.5d":
        raise ValueError(
            f"replication={replication} belongs to algorithm='1.5d', "
            f"got algorithm={algorithm!r}; leave it out, or give grid=(r, s, p)"
        )
    found = named_grid(size, algorithm, replication)
    if found is None:
        raise ValueError(_grid_error(size, algorithm, replication))
    return found


def _explicit_grid(size: int, grid: Grid) -> Grid:
    if not isinstance(grid, (tuple, list)):
        raise TypeError(
            f"grid={grid!r} must be three sizes (row, col, fiber), such as ({size}, 1, 1)"
        )
    sides = tuple(grid)
    whole = all(isinstance(n, int) and n >= 1 for n in sides)
    if len(sides) != 3 or not whole or math.prod(sides) != size:
        fits = [(r, size // r, 1) for r in range(size, 0, -1) if size % r == 0]
        raise ValueError(
            f"grid={grid} needs three positive sizes (row, col, fiber) whose product is "
            f"the number of ranks, {size}; for instance {', '.join(map(str, fits[:4]))}"
        )
    return sides  # type: ignore[return-value]


def named_grid(size: int, name: str, replication: int | None = None) -> Grid | None:
    """Returns the grid of an algorithm as `resolve_grid` does, or None without one."""
    if name == "1.5d" and replication is not None:
        fits = replication >= 1 and size % replication == 0
        return (size // replication, replication, 1) if fits else None
    sides = [
        (size // (s * p), s, p)
        for p in _divisors(size)
        for s in _divisors(size // p)
        if _FITS[name](size // (s * p), s, p)
    ]
    return min(sides, key=sum, default=None)


_FITS: dict[str, Callable[[int, int, int], bool]] = {
    "1d": lambda r, s, p: s == p == 1,
    "1.5d": lambda r, s, p: r >= s > p == 1,
    "2d": lambda r, s, p: r >= s > p == 1,
    "3d": lambda r, s, p: r >= s >= p > 1,
    "feature": lambda r, s, p: r == s == 1,
}


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _grid_error(size: int, algorithm: str, replication: int | None) -> str:
    top = max(2 * size, 16)
    around = (n for k in range(1, top) for n in (size - k, size + k) if 1 <= n <= top)
    fits = (n for n in around if named_grid(n, algorithm, replication))
    near = sorted(itertools.islice(fits, 6))
    rule = {
        "1.5d": "replication must be at least 1 and divide the number of ranks"
        if replication is not None
        else "the number of ranks must be r * c with r >= c > 1",
        "2d": "the number of ranks must be r * s with r >= s > 1",
        "3d": "the number of ranks must be q * t * p with all three above 1",
    }[algorithm]
    may = f" (on {size} ranks, replication may be {_divisors(size)})"
    also = "" if replication is None else may
    sizes = ", ".join(map(str, near)) or "none"
    alone = f". {START}" if size == 1 else ""
    return (
        f"algorithm={algorithm!r} does not fit {size} ranks: {rule}; "
        f"sizes that work: {sizes}{also}. Or use algorithm='1d', which fits any."
        f"{alone}"
    )


@dataclass(eq=False)
class Mesh:
    """Arranges the ranks of a run in a grid of row x col x fiber.

    Rank `(i s + j) p + k` stands at row `i`, column `j`, fiber `k` of a grid
    `(r, s, p)`. Made by `pdc.init`; passed to `partition` and `replicate`.

    [Note: stages] With S stages, each has a grid of its own, over P / S ranks: ranks
    `s P/S .. (s + 1) P/S - 1` of the run are stage `s`. A mesh describes one stage: `rank`,
    `size`, `world` and the axes of the grid belong to it, and a graph is spread over the
    ranks of a stage, in the same way in all stages. The axis `stage` connects the stages.

    Args:
        grid: the sizes `(r, s, p)` of the three axes.
        seed: the seed of all keyed randomness.
        device: the device where this rank computes by default.
        world: all ranks; further axes are `row`, `col`, `fiber`, and, with their own process
            groups, `data` (the gradients of parameters) and `control` (counts and checks,
            of a few words each).
        check: which replicated tensors are compared between ranks; see `init`.
        stage: the ranks at the same place in their stages (see [Note: stages]); this rank
            alone without stages.
        everyone: the ranks of all stages; `world` where there is one stage.
        ledger: counts what travels.
        rank: this rank, in [0, size); counted within its stage.
        size: the number of ranks; of one stage where there are several.
        checks: counts the comparisons of operations at their first use, which are in no
            price and in no trace.
        step: the number of keyed training calls (dropout) so far.
        count_requests: how many times the ranks have summed the length of a selection.
        plan: the `Plan` that chose the grid, if it was an `Auto` that `init` got.
        owners: the owner of each node in that plan, a Partition.
        compared: the replicated tensors that were compared; see `consistency.Comparer`.
        inputs: the inputs of cached products; see `topology.Inputs`.
        grid_warned: the layers whose warning about the grid has been given.
        sharded: what is kept for row-sharded tensors.
    """

    grid: Grid
    seed: int
    device: torch.device
    world: Axis
    row: Axis
    col: Axis
    fiber: Axis
    data: Axis
    control: Axis
    stage: Axis
    everyone: Axis
    ledger: Ledger
    rank: int = field(init=False)
    size: int = field(init=False)
    checks: Ledger = field(default_factory=partial(Ledger, traced=False), repr=False)
    check: Check = "first"
    step: int = 0
    count_requests: int = 0
    plan: Any = None
    owners: Any = None
    compared: Any = field(default=None, repr=False)
    inputs: Any = field(default=None, repr=False)
    grid_warned: set[str] = field(default_factory=set, repr=False)
    sharded: dict[str, Any] = field(default_factory=dict, repr=False)
    _replay: OrderedDict[int, int] = field(default_factory=OrderedDict, repr=False)
    _finalizer: Any = field(default=None, repr=False)
    _device_mesh: DeviceMesh | None = field(default=None, repr=False)
    # whether sizes of tensors count the rows here: see `chunk_graph.ChunkMesh`
    local_sizes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # plain attributes: layers read them in every call
        self.rank, self.size = self.world.rank, self.world.size

    @property
    def coordinate(self) -> Grid:
        """This rank's place `(i, j, k)` on the grid."""
        return self.row.rank, self.col.rank, self.fiber.rank

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Torch's DeviceMesh of the same grid, None on one rank; collective on first use."""
        if self._device_mesh is None and self.everyone.group is not None:
            shape = {"stage": self.stage.size} if self.stage.size > 1 else {}
            shape |= dict(zip(AXES, self.grid, strict=True))
            self._device_mesh = init_device_mesh(
                self.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape)
            )
        return self._device_mesh

    def close(self) -> None:
        """Ends the mesh's process groups, with their threads and connections; collective.

        Waits for every rank, within the deadline, unless a rank has failed. Data, layers and
        loaders made with the mesh can still be read on this rank, but not communicate. Also
        done at the end of `with pdc.init() as mesh:`. A mesh over gloo that is garbage-
        collected without `close` is closed by the next `pdc.init`.
        """
        watch = self.everyone.watch
        if watch is None or watch.closed:
            return
        try:
            if not watch.failed:
                watch.barrier("mesh.close", 0, self.everyone.size)
        finally:
            watch.abort_groups()  # exchanges that nobody waits for
            watch.closed = True
            made = self._device_mesh
            axes = [getattr(self, name) for name in _AXES]
            destroy_groups(axes, [] if made is None else made.get_all_groups())
            self._device_mesh = None
            if self._finalizer is not None:
                self._finalizer.detach()
            for name in _AXES:  # groups are freed with their last reference
                setattr(
                    self, name, replace(getattr(self, name), group=None, rings=None)
                )

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        watch = self.everyone.watch
        if error is not None and watch is not None:
            watch.fail(error)  # reported before the groups are destroyed
        self.close()

    def gather_ledger(self) -> Ledgers:
        """Returns the ledgers of all ranks; collective.

        `print(...)` shows the sums, and which rank received most.
        The bytes of this call itself are counted after it.
        """
        gathered = collectives.all_gather_object(self.ledger.snapshot(), self.everyone)
        return Ledgers(tuple(Ledger(entries) for entries in gathered))

    def next_key(self) -> int:
        """Returns the key of one more keyed training call, equal on all ranks.

        Inside a backward pass the call is a recomputation (activation checkpointing), and
        gets the key of the call it repeats: checkpointing restores torch's generator, from
        which each call draws a token that identifies it.
        """
        token = int(torch.randint(1 << 62, ()))
        if torch._C._current_graph_task_id() != -1:
            if token not in self._replay:
                raise RuntimeError(
                    "a keyed call (dropout) was recomputed without torch's generator state; "
                    "use torch.utils.checkpoint with preserve_rng_state=True (its default)"
                )
            return random.fold(self.seed, self._replay[token])
        self.step += 1
        self._replay[token] = self.step
        if len(self._replay) > _REMEMBERED:
            self._replay.popitem(last=False)
        return random.fold(self.seed, self.step)

    def is_due(self, number: int) -> bool:
        """Returns whether replicated tensors are compared at the n-th occasion, from 1 on."""
        return self.check == "always" or (
            self.check == "first" and number & (number - 1) == 0
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed and the counter, with which a resumed run repeats the draws."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the seed and the counter of another run, on any number of ranks."""
        self.seed, self.step = int(state["seed"]), int(state["step"])

    def __deepcopy__(self, memo: dict) -> Mesh:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Mesh holds live connections and cannot be pickled; save plain tensors "
            "(.to_local(), .full_tensor()) and make the mesh anew with pdc.init()"
        )

    def __repr__(self) -> str:
        sides = " x ".join(str(n) for n in self.grid)
        at = f", {self.stage}" if self.stage.size > 1 else ""
        return (
            f"Mesh(rank {self.rank}/{self.size}, grid {sides} (row x col x fiber){at})"
        )


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
    check: Check = "first",
    strict: bool = False,
) -> Mesh:
    """Joins the run and returns its mesh, as `pdc.init` does for the name of a grid.

    Args:
        algorithm, replication, grid: see `resolve_grid`; "auto" is "1d", for a plan to come.
        backend, device, seed, timeout, stages, check, strict: see `pdc.init`.

    Raises:
        ValueError: if the grid does not fit; the message lists the sizes that do. On all
            ranks, if a rank lacks its device, or if arguments or the kinds of devices
            differ between them; it names the first that does.
    """
    settings: dict[str, Any] = {"algorithm": algorithm, "grid": grid, "strict": strict}
    settings |= {"replication": replication, "stages": stages, "seed": seed}
    settings |= {"check": check, "timeout": timeout, "backend": backend}
    problem = _argument_error(settings)
    check_launched()
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    patience = _DEFAULT_TIMEOUT if problem else timeout
    if not dist.is_initialized() and launched:
        join(backend or default_backend(), patience)
    sides = (1, 1, 1)
    if problem is None:
        try:
            size = ranks_per_stage(world_size(), stages)
            name = "1d" if algorithm == "auto" else algorithm
            sides = resolve_grid(size, name, replication, grid)
        except (TypeError, ValueError) as error:
            problem = error
    own_device: Any = "none"
    try:
        own_device = chosen_device(device)
    except ValueError as error:
        problem = problem or error
    settings["device"] = getattr(own_device, "type", device)
    watch = None
    if dist.is_initialized():
        watch = _open_failure_monitor(patience, settings, problem)
    if problem is not None:
        raise problem
    if own_device.type == "cuda" and own_device.index is not None:
        torch.cuda.set_device(own_device)
    if watch is None:
        mesh = alone(sides, seed, own_device)
    else:
        mesh = _distributed_mesh((stages, *sides), seed, own_device, watch, check)
    mesh.sharded["strict"] = strict
    at = f"on {socket.gethostname()}, {own_device}"
    over = dist.get_backend() if dist.is_initialized() else "no network"
    tell(mesh.everyone.rank, "%s over %s, %s", mesh, over, at)
    return remember(mesh)


def _argument_error(settings: dict[str, Any]) -> Exception | None:
    """Returns the error of arguments of init that are wrong on any number of ranks."""
    check, seed, timeout = settings["check"], settings["seed"], settings["timeout"]
    if check not in get_args(Check):
        return ValueError(f"check must be one of {get_args(Check)}, got {check!r}")
    if not isinstance(settings["strict"], bool):
        return TypeError(f"strict must be True or False, got {settings['strict']!r}")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        return TypeError(f"seed must be a whole number, got {seed!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        return TypeError(f"timeout must be a number of seconds, got {timeout!r}")
    if not 0 < timeout < _MAX_TIMEOUT:
        return ValueError(
            f"timeout must be above 0 and below {_MAX_TIMEOUT:.0f} seconds, got {timeout!r}: "
            "it is how long a rank waits for the others before it raises"
        )
    return None


def ranks_per_stage(size: int, stages: int) -> int:
    """Returns the number of ranks of each stage, of `size` in all.

    Raises:
        ValueError: if stages do not divide the ranks; the message lists what fits.
    """
    if isinstance(stages, int) and stages >= 1 and size % stages == 0:
        return size // stages
    raise ValueError(
        f"stages={stages!r} must be a whole number that divides the number of ranks, "
        f"{size}: each stage has as many; here {_divisors(size)} fit"
    )


def given_mesh(mesh: Any, call: str) -> Mesh:
    """Returns the mesh given to a function, or that of the last `init` for None.

    Raises:
        ValueError: if there is none.
        TypeError: if something else was given.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is not None:
        raise TypeError(
            f"{call} takes the mesh that pdc.init() returned, got "
            f"{type(mesh).__name__}: mesh = pdc.init(), then {call}(..., mesh)"
        )
    found = latest_mesh()
    if found is None:
        raise ValueError(
            f"{call} needs a mesh, and there is none in use: call mesh = pdc.init() first, "
            f"once, on every rank, and then {call}(..., mesh)"
        )
    return found


def remember(mesh: Mesh) -> Mesh:
    """Makes a mesh the latest one, and returns it."""
    PROCESS.mesh = weakref.ref(mesh)
    return mesh


def alone(grid: Grid, seed: int, device: torch.device, observer: Any = None) -> Mesh:
    """Returns the mesh of a single process, which communicates with no other."""
    ledger = Ledger()
    each: Any = 0, 1, None, ledger, None, observer
    axes: Any = {name: Axis(name, *each) for name in _AXES}
    return Mesh(grid, seed, device, ledger=ledger, **axes)


def _distributed_mesh(
    sides: tuple[int, int, int, int],
    seed: int,
    device: torch.device,
    watch: FailureMonitor,
    check: Check,
) -> Mesh:
    stages, *grid = sides
    install_excepthook()
    exit_on_sigterm()
    start_answering()
    gc.collect()  # what a mesh keeps of its tensors refers to the mesh
    _close_collected()
    axes = _open_axes(stages, tuple(grid), watch)
    meshed: Any = {"ledger": axes["world"].ledger, "check": check, **axes}
    mesh = Mesh(tuple(grid), seed, device, **meshed)  # type: ignore[arg-type]
    # a rank can destroy gloo's groups alone, but NCCL's only with all ranks, in `close`
    if "nccl" not in str(dist.get_backend_config()):
        mesh._finalizer = weakref.finalize(
            mesh, PROCESS.collected.append, tuple(axes.values())
        )
        mesh._finalizer.atexit = False
    return mesh


def _close_collected() -> None:
    """Destroys the groups of garbage-collected meshes, while no other thread makes groups."""
    while PROCESS.collected:
        axes = PROCESS.collected.pop()
        for watch in {axis.watch for axis in axes if axis.watch is not None}:
            watch.abort_groups()
        destroy_groups(axes)


def axis_lines(stages: int, grid: tuple[int, ...]) -> dict[str, list[list[int]]]:
    """Returns the ranks along each line of each axis of a mesh."""
    places = torch.arange(stages * math.prod(grid)).view(stages, *grid)
    whole = places.view(stages, -1).tolist()
    return {
        name: places.movedim(at, -1).reshape(-1, places.size(at)).tolist()
        for at, name in enumerate(("stage", *AXES))
    } | {
        **dict.fromkeys(("world", "data", "control"), whole),
        "everyone": [places.flatten().tolist()],
    }


def _open_axes(
    stages: int, grid: tuple[int, ...], watch: FailureMonitor
) -> dict[str, Axis]:
    """Makes the axes of a mesh, of which one stage is everyone; collective."""
    lines = axis_lines(stages, grid)
    if stages == 1:
        del lines["everyone"]
    axes = open_axes(lines, watch.rank, watch, Ledger(), gloo=("control",))
    axes.setdefault("everyone", axes["world"])
    watch.threads.of.update(axis.group for axis in axes.values() if axis.group)
    return axes


def _open_failure_monitor(
    timeout: float, settings: dict[str, Any], problem: Exception | None
) -> FailureMonitor:
    """Compares settings with the other ranks; raises on all if one is wrong or they differ."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = StoreMailbox(dist.distributed_c10d._get_default_store())
    # meshes are made in the same order on all ranks, so each counts its own
    number = store.patient(timeout).add(f"pyg_distcomm/rank{rank}/meshes", 1)
    shown = {name: repr(value) for name, value in settings.items()}
    if isinstance(settings["grid"], list):
        shown["grid"] = repr(tuple(settings["grid"]))
    wrong = None if problem is None else [type(problem).__name__, str(problem)]
    name = f"mesh/{number}"
    notes = gather_notes(
        store.patient(timeout), name, rank, size, timeout, [shown, wrong]
    )
    found = first_difference([note[0] for note in notes])
    first = next((note[1] for note in notes if note[1]), None)
    if first and found is None:  # the same on all
        raise {"TypeError": TypeError}.get(first[0], ValueError)(first[1])
    if found is not None:
        raise ValueError(found)
    return FailureMonitor(store.within(f"pyg_distcomm/{number}"), rank, size, timeout)
