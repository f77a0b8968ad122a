"""Builds the plans of all ranks of a grid in one process, and asks them for their prices.

[Note: ranks in threads] Each rank is a thread with a mesh of its own, whose axes pass rows in
memory (`Meeting`). The threads run what real ranks run: `Topology` plans the halo and the
matrix, and their `price` is what the ledger will count.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.ledger import Ledger, Price
from pyg_distcomm.comm.mesh import AXES, Grid, Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.halo.codec import Codec, packed_bytes
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.ops.grid_matrix import FiberSplit, Links
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.training import ProductShape

Array = NDArray[Any]
MOST_RANKS = 256  # threads


class Traffic(Protocol):
    """What the ranks of a grid own and exchange; of a degree law, means over ranks.

    Arrays have an entry for each rank, or, of a law, for each rank of a fiber.

    nodes, edges  own nodes and edges
    fiber         own nodes of all ranks of the fiber
    nonzeros      nonzeros that a product multiplies
    rows          rows that a product receives and sends
    ghosts, sent  rows that a layer run by `HaloConv` receives and sends
    adds          whether sums of rows are products; see `Topology.adds_on_grid`
    """

    @property
    def grid(self) -> Grid: ...
    @property
    def nodes(self) -> Array: ...
    @property
    def edges(self) -> Array: ...
    @property
    def fiber(self) -> Array: ...
    @property
    def nonzeros(self) -> Array: ...
    @property
    def rows(self) -> Array: ...
    @property
    def ghosts(self) -> Array: ...
    @property
    def sent(self) -> Array: ...
    @property
    def adds(self) -> bool: ...

    def exchange(
        self, product: ProductShape, codec: Codec, dtype: torch.dtype
    ) -> tuple[Array, Array, Array]:
        """Prices one product, or one exchange of `HaloConv`.

        Returns:
            Bytes received over the fiber, bytes received in what the codec writes, and
            messages sent.
        """


class Meeting:
    """Passes rows between threads, each of which is a rank of an axis."""

    def __init__(self, size: int) -> None:
        self._parts: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def swap(self, rank: int, parts: Sequence[Tensor]) -> list[Tensor]:
        """Gives each rank a part, and returns what each rank gave this one."""
        self._parts[rank] = parts
        self._barrier.wait()
        arrived = [sent[rank] for sent in self._parts]
        self._barrier.wait()
        return arrived

    def abort(self) -> None:
        """Ends the waits of all threads with an error."""
        self._barrier.abort()


def meshes_of(grid: Grid) -> list[Mesh]:
    """Returns the meshes of all ranks of a grid; see [Note: ranks in threads]."""
    size, ledger = math.prod(grid), Ledger()
    places = torch.arange(size).view(1, *grid)
    lines: dict[str, list[list[int]]] = {
        name: places.movedim(at, -1).reshape(-1, places.size(at)).tolist()
        for at, name in enumerate(("stage", *AXES))
    }
    every = [list(range(size))]
    lines |= dict.fromkeys(("world", "data", "control", "everyone"), every)
    axes: list[dict[str, Any]] = [{} for _ in range(size)]
    for name, lists in lines.items():
        for line in lists:
            meeting = Meeting(len(line))
            for place, rank in enumerate(line):
                own = Axis(name, place, len(line), None, ledger, None, meeting=meeting)
                axes[rank][name] = own
    device = torch.device("cpu")
    return [Mesh(grid, 0, device, ledger=ledger, **own) for own in axes]


def on_ranks(meshes: list[Mesh], work: Callable[[Mesh], Any]) -> list[Any]:
    """Runs a function on all ranks, and returns what it returned on each.

    Raises:
        Exception: the first rank's error, once all have ended.
    """

    def run(mesh: Mesh) -> Any:
        try:
            return work(mesh)
        except BaseException:
            for each in meshes:
                for name in ("row", "col", "fiber", "world", "control"):
                    getattr(each, name).meeting.abort()
            raise

    if len(meshes) == 1:
        return [work(meshes[0])]
    # a forked process makes its pool of threads at the first call, which must be alone
    torch.set_num_threads(torch.get_num_threads())
    with ThreadPoolExecutor(len(meshes)) as pool:
        futures = [pool.submit(run, mesh) for mesh in meshes]
    errors = [e for e in (f.exception() for f in futures) if e is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The plans of one rank: what it owns, multiplies and exchanges."""

    nodes: int
    edges: int
    nonzeros: int
    fiber: FiberSplit
    links: Links
    halo: Halo | None
    adds: bool

    def _moves(self, product: ProductShape) -> list[tuple[Any, bool]]:
        """Lists the halos of a product, each with whether sums travel over it."""
        if product.halo:
            return [(self.halo, product.transposed)]
        links = self.links.mirrored if product.transposed else self.links
        ways = (links.ghost, False), (links.far, False), (links.out, True)
        return [
            (part, back)
            for link, back in (*ways, (links.sums, True))
            for part in link.parts
        ]

    def exchange(
        self, product: ProductShape, codec: Codec, dtype: torch.dtype
    ) -> tuple[int, int, int]:
        """Returns the figures of `Traffic.exchange` of this rank."""
        width, fiber = product.width, Price()
        if not product.halo:
            width, fiber = self.fiber.width(width), self.fiber.price(width)
        received, messages = 0, fiber.messages
        for halo, back in self._moves(product):
            ends = halo.recv_counts, halo.send_counts
            come, go = ends[::-1] if back else ends
            received += sum(packed_bytes(codec, come, width, dtype))
            messages += sum(map(bool, go)) if width else 0
        return fiber.bytes(dtype.itemsize), received, messages

    @property
    def rows(self) -> int:
        """The rows that a product receives and sends."""
        halos: list[Any] = [part for link in self.links for part in link.parts]
        return sum(sum(h.recv_counts) + sum(h.send_counts) for h in halos)


@dataclass(frozen=True, eq=False)
class PlannedTraffic:
    """What all ranks of a grid exchange, by their plans; see `Traffic`."""

    grid: Grid
    ranks: list[RankPlan]

    @cached_property
    def nodes(self) -> Array:
        """Own nodes."""
        return np.array([rank.nodes for rank in self.ranks])

    @cached_property
    def edges(self) -> Array:
        """Own edges."""
        return np.array([rank.edges for rank in self.ranks])

    @cached_property
    def fiber(self) -> Array:
        """Own nodes of all ranks of the fiber."""
        return np.array([sum(rank.fiber.rows) for rank in self.ranks])

    @cached_property
    def nonzeros(self) -> Array:
        """Nonzeros that a product multiplies."""
        return np.array([rank.nonzeros for rank in self.ranks])

    @cached_property
    def rows(self) -> Array:
        """Rows that a product receives and sends."""
        return np.array([rank.rows for rank in self.ranks])

    @cached_property
    def ghosts(self) -> Array:
        """Rows that a layer run by `HaloConv` receives."""
        return np.array(
            [rank.halo.num_ghosts if rank.halo else 0 for rank in self.ranks]
        )

    @cached_property
    def sent(self) -> Array:
        """Rows that such a layer sends."""
        halos = [rank.halo for rank in self.ranks]
        return np.array([sum(halo.send_counts) if halo else 0 for halo in halos])

    @property
    def adds(self) -> bool:
        """Whether sums of rows are products."""
        return self.ranks[0].adds

    def exchange(
        self, product: ProductShape, codec: Codec, dtype: torch.dtype
    ) -> tuple[Array, Array, Array]:
        """Prices one product, or one exchange of `HaloConv`, on each rank."""
        each = [rank.exchange(product, codec, dtype) for rank in self.ranks]
        fiber, received, messages = np.array(each, np.int64).T
        return fiber, received, messages


@dataclass(frozen=True, eq=False)
class CutGraph:
    """A graph whose nodes are assigned to ranks, and the edges of each rank.

    Args:
        partition: the owner of each node.
        edges: for each rank the places of its edges, sources and targets `[3, e_i]`.
        total: the number of edges.
    """

    partition: Partition
    edges: list[tuple[Tensor, Tensor, Tensor]]
    total: int

    @staticmethod
    def of(edge_index: Tensor, partition: Partition) -> CutGraph:
        """Gives each edge to the owner of its target.

        Raises:
            ValueError: for more ranks than a process can play.
        """
        parts = partition.num_parts
        if parts > MOST_RANKS:
            raise ValueError(
                f"a real graph is planned for at most {MOST_RANKS} ranks, got {parts}; "
                "plan a RandomGraph of its nodes, edges and degree distribution"
            )
        check_edge_index(edge_index, partition.num_nodes)
        source, target = edge_index.detach().as_subclass(Tensor).cpu().long()
        owner = partition.owner_of(target)
        order = torch.argsort(owner, stable=True)
        sizes = torch.bincount(owner, minlength=parts).tolist()
        split = order.split(sizes)
        edges = [(at, source[at], target[at]) for at in split]
        return CutGraph(partition, edges, len(source))

    def traffic(
        self, grid: Grid, halo: str, fetches: bool, adds: bool
    ) -> PlannedTraffic:
        """Plans one product on a grid, on all ranks.

        Args:
            grid: as many ranks as parts.
            halo: the rows that travel; see `check_halo` in `ops/grid_plan.py`.
            fetches: whether some layer is run by `HaloConv`.
            adds: whether such a layer sums rows.
        """

        def plan(mesh: Mesh) -> RankPlan:
            nodes = self.partition.gids(mesh.rank)
            rows = Rows(nodes, self.partition.num_nodes, mesh, self.partition)
            place, source, target = self.edges[mesh.rank]
            edges = Rows(place, self.total, mesh, None)
            topology = Topology(source, target, rows, edges, halo)
            matrix = topology.sum_plan().matrix
            added = adds and grid[1:] != (1, 1)
            if fetches:
                _derive(topology, "locals")
            if added:
                _derive(topology, "row_words", "product_words")
            return RankPlan(
                len(nodes),
                len(place),
                sum(block.pattern.nnz for block in matrix.tile.blocks),
                matrix.fiber,
                matrix.links,
                topology.locals.halo if fetches else None,
                topology.adds_on_grid if added else adds,
            )

        return PlannedTraffic(grid, on_ranks(meshes_of(grid), plan))


def _derive(topology: Topology, *names: str) -> None:
    """Computes cached properties that are collective.

    Before Python 3.12 all objects share the lock in which a cached property is computed, and
    threads that wait for each other there would never meet.
    """
    for name in names:
        vars(topology)[name] = getattr(Topology, name).func(topology)
