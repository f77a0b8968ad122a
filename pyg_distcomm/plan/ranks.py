"""Builds the plans of all ranks of a grid in one process, and adds up their prices.

[Note: ranks in threads] Each rank is a thread with a mesh of its own, whose axes pass rows in
memory (`Meeting`). The threads run what real ranks run: `Topology` plans the halo and the
matrix, and their `price` is what the ledger will count. Of a link whose rows are late, the
messages that are kept from epoch to epoch count as memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_distcomm.comm.collectives import Axis, ring_words
from pyg_distcomm.comm.ledger import Ledger, Price
from pyg_distcomm.comm.mesh import Grid, Mesh, axis_lines
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.halo.codec import Codec, packed_bytes
from pyg_distcomm.halo.codecs import Cast, Plain, Quantise
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.ops.grid_matrix import FiberSplit, Links
from pyg_distcomm.partition.cutters import check_edge_index
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.training import ProductShape, Training

Array = NDArray[Any]
MOST_RANKS = 256  # threads


@dataclass(frozen=True, eq=False)
class Traffic:
    """Holds what the ranks of a grid own and exchange; of a degree law, means over ranks.

    Arrays have an entry for each rank, or, of a law, for each rank of a fiber.
    """

    grid: Grid
    nodes: Array  # own nodes
    edges: Array  # own edges
    fiber: Array  # own nodes of all ranks of the fiber
    nonzeros: Array  # that a product multiplies
    rows: Array  # that a product receives and sends
    ghosts: Array  # rows that a layer run by `HaloConv` receives
    sent: Array  # rows that it sends
    adds: bool  # whether sums of rows are products; see `Topology.adds_on_grid`
    # prices one product, or one exchange of `HaloConv`: bytes received over the fiber,
    # bytes received in what the codec writes, and messages sent
    exchange: Callable[[ProductShape, Codec, torch.dtype], tuple[Array, Array, Array]]


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
    ledger = Ledger()
    axes: list[dict[str, Any]] = [{} for _ in range(math.prod(grid))]
    for name, lists in axis_lines(1, grid).items():
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


def traffic_of(grid: Grid, ranks: list[RankPlan]) -> Traffic:
    """Returns what all ranks of a grid exchange, by their plans."""

    def exchange(
        product: ProductShape, codec: Codec, dtype: torch.dtype
    ) -> tuple[Array, Array, Array]:
        each = [rank.exchange(product, codec, dtype) for rank in ranks]
        fiber, received, messages = np.array(each, np.int64).T
        return fiber, received, messages

    def each(count: Callable[[RankPlan], int]) -> Array:
        return np.array([count(rank) for rank in ranks])

    return Traffic(
        grid,
        each(lambda rank: rank.nodes),
        each(lambda rank: rank.edges),
        fiber=each(lambda rank: sum(rank.fiber.rows)),
        nonzeros=each(lambda rank: rank.nonzeros),
        rows=each(lambda rank: rank.rows),
        ghosts=each(lambda rank: rank.halo.num_ghosts if rank.halo else 0),
        sent=each(lambda rank: sum(rank.halo.send_counts) if rank.halo else 0),
        adds=ranks[0].adds,
        exchange=exchange,
    )


@dataclass(frozen=True, eq=False)
class CutGraph:
    """A graph whose nodes are assigned to ranks, and the edges of each rank."""

    partition: Partition  # the owner of each node
    # for each rank the places of its edges, sources and targets `[3, e_i]`
    edges: list[tuple[Tensor, Tensor, Tensor]]
    total: int  # the number of edges

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

    def traffic(self, grid: Grid, halo: str, training: Training) -> Traffic:
        """Plans one product on all ranks of a grid, and what layers run by `HaloConv` fetch.

        A grid has as many ranks as parts; `halo` is the rows that travel, see `check_halo`.
        """
        fetches, adds = training.runs_by_halo, training.adds_rows

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

        return traffic_of(grid, on_ranks(meshes_of(grid), plan))


def _derive(topology: Topology, *names: str) -> None:
    """Computes cached properties that are collective.

    Before Python 3.12 all objects share the lock in which a cached property is computed, and
    threads that wait for each other there would never meet.
    """
    for name in names:
        vars(topology)[name] = getattr(Topology, name).func(topology)


CodecLike: TypeAlias = str | Codec | LinkPolicy


def links_of(specs: CodecLike | Sequence[CodecLike]) -> list[LinkPolicy | None]:
    """Returns None for the exact link, followed by each other link, as `LinkPolicy` takes them.

    Raises:
        ValueError, TypeError: for anything else; the message lists the choices.
    """
    if isinstance(specs, (str, Codec, LinkPolicy)):
        specs = (specs,)
    found = [one if isinstance(one, LinkPolicy) else LinkPolicy(one) for one in specs]
    return [None, *(one for one in found if not one.is_exact)]


def described(link: LinkPolicy | None) -> dict[str, Any]:
    """Returns the fields of a plan that describe a link in its present epoch."""
    if link is None:
        return {}
    rows, late = link.codec_at(link.epoch), link.lateness
    name = _codec_name(rows) + (f", late by {late[0]}" if any(late) else "")
    name += f" and {late[1]}" if late[0] != late[1] else ""
    exact = rows == Plain() and not link.timing.is_late
    return {"codec": name, "link": link, "exact": exact}


def _codec_name(codec: Codec) -> str:
    if isinstance(codec, Quantise):
        return "1 bit" if codec.bits == 1 else f"{codec.bits} bits"
    if isinstance(codec, Cast):
        return "bf16" if codec.dtype == torch.bfloat16 else "fp16"
    return "plain" if codec == Plain() else f"{codec}"


def epoch_cost(
    traffic: Traffic, training: Training, link: LinkPolicy | None
) -> dict[str, Any]:
    """Returns the cost of an epoch, as fields of a `Plan`.

    Rows of a coded link are summed on the rank that reads them, and none are cached. None is
    the exact link.
    """
    exact, size = link is None, math.prod(traffic.grid)
    dtype = training.dtype
    products, rows = training.products(traffic.grid, traffic.adds, exact)
    last = len(training.layers) - 1
    exchange, messages, kept = _totals(traffic, products, last, link, dtype)
    sums = training.sums(size)
    if not exact and size > 1:
        sums["agreement"] = ring_words(1, size) * any(
            o != "kept" for o in training.orders
        )
    every = sum(sums.values())
    by_rank = tuple(round(float(n)) + every for n in exchange)
    known = len(by_rank) == size and exchange.dtype.kind == "i"
    mean = (float(exchange.mean()) + every) * size
    memory = kept + _memory(traffic, training, products)
    memory = memory + traffic.ghosts * rows * dtype.itemsize
    return {
        "bytes_by_rank": by_rank if known else (max(by_rank),),
        "exchange_bytes": round(float(exchange.max())),
        "sum_bytes": sums,
        "total_bytes": sum(by_rank) if known else round(mean),
        "messages": round(float(messages.max())),
        "memory": round(float(memory.max())),
    }


def _totals(
    traffic: Traffic,
    products: list[ProductShape],
    last: int,
    link: LinkPolicy | None,
    dtype: torch.dtype,
) -> tuple[Array, Array, Array]:
    """Returns bytes received, messages, and bytes kept by a link; each kind is priced once."""
    total: list[Any] = [0 * traffic.nodes] * 3
    known: dict[Any, tuple[Array, Array, Array]] = {}
    for one in products:
        codec, late = None, 0
        if link is not None and not (link.exact_last and one.layer == last):
            codec, late = link.codec_at(link.epoch), link.lateness[one.transposed]
        key = one.width, one.transposed, one.halo, codec
        if key not in known:
            known[key] = traffic.exchange(one, codec or Plain(), dtype)
        fiber, received, messages = known[key]
        news = fiber + received, messages, late * received
        total = [sum_ + new for sum_, new in zip(total, news, strict=True)]
    exchange, messages, kept = total
    return exchange, messages, kept


def _memory(
    traffic: Traffic, training: Training, products: list[ProductShape]
) -> Array:
    """Returns an estimate of the bytes allocated on each rank at the peak of an epoch.

    topology     ids of own edges and of their ends (24 e), in local numbering (16 e)
    operator     columns, values and edges of the block (12 each), its transpose the same
    features     x, and A X if it is cached; y and masks
    activations  of each layer A X, if it comes first, and its output; a temporary
    gradients    two of the widest at once
    halo         rows received and sent, for the widest product
    parameters   with gradients and the two moments of Adam
    """
    layers, item, p = training.layers, training.dtype.itemsize, traffic.grid[2]
    orders = training.orders
    features = layers[0].width_in * (1 + (orders[0] == "kept")) * item + 9
    saved = sum(
        layer.width_in
        for order, layer in zip(orders, layers, strict=True)
        if order in ("first", "halo")
    )
    outs = [layer.width_out for layer in layers]
    widest = max([*outs, *(layer.width_in for layer in layers[1:])])
    active = (saved + sum(outs) + 3 * outs[-1] + 3 * widest) * item
    wide, fetched = (
        max((one.width for one in products if one.halo == way), default=0)
        for way in (False, True)
    )
    share = -(-wide // p)
    inside = traffic.fiber * share * item * 2 if p > 1 else 0
    halo = np.maximum(
        traffic.rows * share * item + inside,
        (traffic.ghosts + traffic.sent) * fetched * item,
    )
    only = all(one.halo for one in products) and set(orders) == {"halo"}
    looped = traffic.nonzeros + traffic.fiber * training.adds_loops
    block = traffic.edges if only else looped
    held: Array = (
        40 * traffic.edges
        + 24 * block
        + traffic.nodes * (24 + features + active)
        + halo
        + 4 * item * training.parameters
    )
    return held
