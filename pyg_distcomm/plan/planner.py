"""Plans every grid and link to train a graph on a number of ranks, and ranks them by bytes."""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_distcomm.comm.ledger import balanced_split, format_table
from pyg_distcomm.comm.mesh import ALGORITHMS, Grid, Mesh, named_grid, resolve_grid
from pyg_distcomm.graph.topology import MultiplyOrder
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs import Plain
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.ops.grid_plan import PACKING, check_halo
from pyg_distcomm.partition.cutters import cut, takes_grid
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.ranks import (
    Array,
    CodecLike,
    CutGraph,
    Traffic,
    described,
    epoch_cost,
    links_of,
)
from pyg_distcomm.plan.training import (
    DEFAULT_ORDER,
    ProductShape,
    Training,
    dtype_of,
    training_of,
)
from pyg_distcomm.sharded.edges import DistEdgeIndex

POINTS = 4096  # quantiles of a power law


class DegreeDistribution(abc.ABC):
    """The distribution of the degrees of nodes; in- and out-degrees are equal.

    Degrees are Poisson around means. If nodes are assigned to ranks at random, a node of mean
    degree d has no edge into a fraction q of the nodes with probability exp(-q d).
    """

    @abc.abstractmethod
    def means(self, nodes: int, edges: int) -> tuple[Array, Array]:
        """Returns mean degrees, and how many nodes, or which part of them, each is of."""

    def missing(self, nodes: int, edges: int, share: float) -> float:
        """Returns the part of the nodes without an edge into a share of the nodes."""
        mean, count = self.means(nodes, edges)
        return float((np.exp(-share * mean) * count).sum() / count.sum())


@dataclass(frozen=True)
class Uniform(DegreeDistribution):
    """Draws both ends of every edge uniformly from all nodes."""

    def means(self, nodes: int, edges: int) -> tuple[Array, Array]:
        return np.array([edges / nodes]), np.ones(1)


@dataclass(frozen=True)
class PowerLaw(DegreeDistribution):
    """Mean degrees follow a power law: node k's is proportional to k^(-1 / (exponent - 1)).

    As in the model of [Chung02], without its bound on the largest mean.
    """

    exponent: float = 2.5  # the exponent of the density of degrees, above 2

    def __post_init__(self) -> None:
        if not self.exponent > 2:
            raise ValueError(
                f"a power law of degrees needs an exponent above 2, got {self.exponent}"
            )

    def means(self, nodes: int, edges: int) -> tuple[Array, Array]:
        slope = 1 / (self.exponent - 1)
        # quantiles denser towards the hubs; each stands for the nodes up to the next
        ends = np.unique(np.geomspace(1, nodes + 1, POINTS).round())
        first, last = ends[:-1], ends[1:]
        count = last - first
        mean = ((last - 0.5) ** (1 - slope) - (first - 0.5) ** (1 - slope)) / count
        return mean * (edges / (mean * count).sum()), count


@dataclass(frozen=True)
class RMat(DegreeDistribution):
    """The degrees of the recursive graphs of [Chakrabarti04], ids permuted.

    A node with t ones among the L bits of its id is an end of an edge with probability
    (a+b)^(L-t) (c+d)^t, here the same for both ends, as after symmetrising.
    """

    heavy: float = 0.76  # a + b, the fraction of edges at ids whose bit is zero

    def __post_init__(self) -> None:
        if not 0.5 <= self.heavy < 1:
            raise ValueError(f"heavy must lie in [0.5, 1), got {self.heavy}")

    def means(self, nodes: int, edges: int) -> tuple[Array, Array]:
        bits = max(1, round(math.log2(max(nodes, 2))))
        ones = np.arange(bits + 1)
        chance = self.heavy ** (bits - ones) * (1 - self.heavy) ** ones
        count = np.array([float(math.comb(bits, t)) for t in range(bits + 1)])
        return edges * 2.0**bits / nodes * chance, count


LAWS: dict[str, DegreeDistribution] = {
    "uniform": Uniform(),
    "powerlaw": PowerLaw(),
    "rmat": RMat(),
}


@dataclass(frozen=True)
class RandomGraph:
    """Describes a graph by its size and degrees; nodes are assigned to ranks at random.

    Args:
        nodes, edges: the number of nodes and edges; an undirected edge counts twice.
        law: "uniform", "powerlaw", "rmat", or a `DegreeDistribution`.
    """

    nodes: int
    edges: int
    law: str | DegreeDistribution = "uniform"

    def __post_init__(self) -> None:
        for name in ("nodes", "edges"):
            value = getattr(self, name)
            least = 1 if name == "nodes" else 0
            number = isinstance(value, numbers.Real) and math.isfinite(value)
            if not number or value != int(value) or value < least:
                raise ValueError(
                    f"{name} must be a whole number from {least} on, got {value!r}"
                )
            object.__setattr__(self, name, int(value))
        if not isinstance(self.law, DegreeDistribution) and self.law not in LAWS:
            raise ValueError(
                f"law={self.law!r} is not known; give one of {', '.join(LAWS)}, or a "
                "DegreeDistribution"
            )

    def fill(self, parts: int) -> float:
        """Returns the fraction of nodes with an edge into one of `parts` random parts."""
        law = LAWS[self.law] if isinstance(self.law, str) else self.law
        return 1 - law.missing(self.nodes, self.edges, 1 / parts)

    def sent(self, parts: int, halo: str) -> float:
        """Returns the fraction of the rows of a block that travel to one of its parts.

        Whole blocks are sent if "auto" finds them cheaper: see `blocks_are_cheaper`.
        """
        part = 1.0 if parts == 1 or halo == "blocks" else self.fill(parts)
        return 1.0 if halo == "auto" and part * (1 + PACKING) >= 1 else part

    def traffic(self, grid: Grid, halo: str, training: Training) -> Traffic:
        """Returns what ranks of a grid exchange in the mean, for a random graph.

            ghosts = n/s (1 - 1/r) (1 - E (1 - 1/r)^d)     over the row axis

        and with r and s exchanged over the col axis; whole blocks have no last factor. Arrays
        have an entry for each rank of a fiber, whose slices of features differ in width.
        """
        (r, s, p), n, size = grid, self.nodes, math.prod(grid)
        rows = n / s * (1 - 1 / r) * self.sent(r, halo)
        sums = n / r * (1 - 1 / s) * self.sent(s, halo)
        ghosts = n * (1 - 1 / size) * self.sent(size, "rows")
        nodes, edges = np.full(p, n / size), np.full(p, self.edges / size)

        def exchange(
            product: ProductShape, codec: Codec, dtype: torch.dtype
        ) -> tuple[Array, Array, Array]:
            widths, links = np.full(p, product.width), [(ghosts, size - 1)]
            fiber = np.zeros(p)
            if not product.halo:
                widths = np.array(balanced_split(product.width, p))
                links = [(rows, r - 1), (sums, s - 1)]
                words = nodes * (p - 1) * widths + nodes * (product.width - widths)
                fiber = (p > 1) * words * dtype.itemsize
            some = widths > 0
            received, messages = np.zeros(p), np.zeros(p, np.int64)
            for count, peers in links:  # all messages of a link are equal
                mean = max(round(count / max(peers, 1)), 1)
                each = [
                    codec.wire_bytes(mean, w, dtype) if w else 0
                    for w in widths.tolist()
                ]
                received = received + count * (np.array(each) / mean)
                messages = messages + peers * some
            if p > 1 and not product.halo:
                messages = messages + some.sum() - some + some * (p - 1)
            return fiber, received, messages

        shapes = ProductShape(0, p, False), ProductShape(0, 1, False, True)
        priced = (exchange(one, Plain(), torch.float32) for one in shapes)
        added, fetched = (float((fiber + bytes_).mean()) for fiber, bytes_, _ in priced)
        adds = grid[1:] == (1, 1) or added / p < fetched
        return Traffic(
            grid,
            nodes,
            edges,
            fiber=nodes * p,
            nonzeros=edges * p,
            rows=np.full(p, 2 * (rows + sums)),
            ghosts=np.full(p, ghosts),
            sent=np.full(p, ghosts),
            adds=adds,
            exchange=exchange,
        )


MOST_LINES = 24  # plans that the table shows
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class Plan:
    """Describes one way to train, and the costs of an epoch, from the third on.

    Earlier epochs send more: features that do not change, until their products are kept.

    Args:
        grid: (r, s, p).
        orders: of each layer "kept" (A X is kept), "first" ((A X) W), "last" (A (X W)),
            or "halo" (rows are brought to their edges).
        codec: how rows are written on the wire, and by how many epochs they are late.
        bytes_by_rank: received in an epoch, all told; one mean for a law of degrees.
        exchange_bytes: of them in products, on the busiest rank.
        sum_bytes: of them in all-reduces, by what is summed; the same on every rank.
        total_bytes: over all ranks.
        messages: sent in products by the busiest rank.
        memory: bytes on the fullest rank in an epoch, beside the interpreter's; not those
            that cutting the graph and planning its exchanges take before.
        reason: why it is refused; None for one that can be run.
        exact: whether it trains as one process does; if not, rows are rounded, left out or
            late.
        missing: what the model sends that bytes leave out, in words; else empty.
        link: what gives this codec to `pdc.partition`; None for the exact link.
    """

    grid: Grid
    orders: tuple[str, ...] = ()
    codec: str = "plain"
    bytes_by_rank: tuple[int, ...] = (0,)
    exchange_bytes: int = 0
    sum_bytes: dict[str, int] = field(default_factory=dict)
    total_bytes: int = 0
    messages: int = 0
    memory: int = 0
    reason: str | None = None
    exact: bool = True
    link: LinkPolicy | None = None
    missing: str = ""

    @property
    def size(self) -> int:
        """The number of ranks."""
        r, s, p = self.grid
        return r * s * p

    @property
    def bytes(self) -> int:
        """Bytes that the busiest rank receives in an epoch, sums of gradients too."""
        return max(self.bytes_by_rank)

    @property
    def algorithm(self) -> str:
        """The name of the grid, as `init` knows it, or "grid"."""
        return name_of(self.grid)

    @property
    def sides(self) -> str:
        """The grid in short, as 4x2x1."""
        return "x".join(map(str, self.grid))

    def __str__(self) -> str:
        sides = self.sides.replace("x", " x ")
        text = f"{self.algorithm} ({sides}), {', '.join(self.orders)}"
        if self.codec != "plain":
            text += f", {self.codec}{'' if self.exact else ' (not exact)'}"
        most = "at least " if self.missing else ""
        return (
            f"{text}: {most}{show_bytes(self.bytes)} per rank, "
            f"{show_bytes(self.total_bytes)} in all, {show_bytes(self.memory)} of memory"
        )


@dataclass(frozen=True, eq=False)
class Plans(Sequence[Plan]):
    """Lists all plans that can be run, the fewest bytes first; `print` shows a table.

    Args:
        ranked: what can be run.
        refused: what cannot, each with its reason.
        graph: the graph in words.
        training: what an epoch of the model does.
        partition: who owns which node, on the first grid where that depends on it
            ("grid"); None for a law of degrees.
    """

    ranked: tuple[Plan, ...]
    refused: tuple[Plan, ...]
    graph: str
    training: Training
    partition: Partition | None = None

    @property
    def best(self) -> Plan:
        """The exact plan of those that can be run whose busiest rank receives least.

        Those that are not exact are ranked among the others: `plans[0]` may be one.

        Raises:
            ValueError: if there is none; the message has the reasons.
        """
        for plan in self.ranked:
            if plan.exact:
                return plan
        reasons = [f"{name_of(p.grid)} {p.grid}: {p.reason}" for p in self.refused]
        raise ValueError("no plan can be run:\n" + "\n".join(reasons[:MOST_LINES]))

    @overload
    def __getitem__(self, key: int) -> Plan: ...
    @overload
    def __getitem__(self, key: slice) -> tuple[Plan, ...]: ...
    def __getitem__(self, key: int | slice) -> Plan | tuple[Plan, ...]:
        return self.ranked[key]

    def __len__(self) -> int:
        return len(self.ranked)

    def of(self, grid: Grid, **choice: Any) -> Plan:
        """Returns the first plan of a grid, refused or not, with these attributes."""
        for plan in (*self.ranked, *self.refused):
            has = all(getattr(plan, name) == value for name, value in choice.items())
            if plan.grid == tuple(grid) and has:
                return plan
        raise ValueError(f"no plan has grid {tuple(grid)} and {choice}")

    def __str__(self) -> str:
        shown = self.ranked[:MOST_LINES]
        parts = [f"graph  {self.graph}", "", _table(shown)]
        if len(self.ranked) > len(shown):
            parts.append(f"{len(self.ranked) - len(shown)} more receive more")
        parts += _legend(shown)
        lines = [f"{p.algorithm} {p.grid}, {p.codec}: {p.reason}" for p in self.refused]
        if lines:
            parts += ["", "refused:", *(f"  {line}" for line in lines[:MOST_LINES])]
        if len(lines) > MOST_LINES:
            parts.append(f"  ... {len(lines) - MOST_LINES} more")
        return "\n".join(parts)

    def __repr__(self) -> str:
        best = next((p for p in self.ranked if p.exact), "none can be run")
        return f"Plans({len(self.ranked)} for {self.graph}; best: {best})"


def _table(plans: Sequence[Plan]) -> str:
    head = ("algorithm", "grid", "orders", "codec", "bytes, most", "bytes, all")
    head += ("of products", "messages", "memory")  # type: ignore[assignment]
    rows = [
        (
            plan.algorithm,
            plan.sides,
            " ".join(plan.orders),
            f"{plan.codec}{'' if plan.exact else ' *'}",
            *(
                f"{'>= ' if plan.missing else ''}{show_bytes(count)}"
                for count in (plan.bytes, plan.total_bytes, plan.exchange_bytes)
            ),
            plan.messages,
            show_bytes(plan.memory),
        )
        for plan in plans
    ]
    return format_table(head, rows) if rows else "no plan can be run"


def _legend(plans: Sequence[Plan]) -> list[str]:
    """Explains the signs of the table."""
    notes = []
    if any(not plan.exact for plan in plans):
        notes.append("* not exact (rounded, left out or late): only when asked for")
    missing = dict.fromkeys(plan.missing for plan in plans if plan.missing)
    return [*notes, *(f">= bytes leave out {words}" for words in missing)]


def show_bytes(count: float) -> str:
    """Formats a number of bytes with a unit."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:,.0f} {UNITS[unit]}" if unit == 0 else f"{value:.4g} {UNITS[unit]}"


def name_of(grid: Grid) -> str:
    """Returns the name `resolve_grid` has for a grid, or "grid"."""
    known = ("1d", "feature", "2d", "3d")
    names = (n for n in known if named_grid(math.prod(grid), n) == grid)
    return next(names, "1.5d" if grid[2] == 1 else "grid")


def plan(
    graph: Data | Tensor | RandomGraph,
    widths: Sequence[int] | None = None,
    ranks: int | None = None,
    *,
    mesh: Mesh | None = None,
    model: torch.nn.Module | None = None,
    layers: str | Sequence[str] = "gcn",
    inputs: str = "constant",
    memory: float | None = None,
    partition: Any = "metis",
    seed: int = 0,
    algorithm: str | None = None,
    grid: Grid | None = None,
    codecs: Sequence[CodecLike] = (),
    dtype: torch.dtype | None = None,
    halo: str = "auto",
    ordering: MultiplyOrder = DEFAULT_ORDER,
) -> Plans:
    """Lists every grid and link for training a graph, with its costs, ranked.

    Nothing is sent, and every rank that calls it gets the same: bytes are those that the
    ledger will count in an epoch of the full graph (a mean loss, `replicate`; from the
    third epoch on, when products of constant inputs are kept); means for a `RandomGraph`.

    Args:
        graph: the whole graph, its edge_index, or a `RandomGraph` (size, degree law).
        widths: of the features, the hidden layers and the output, as [602, 16, 41].
        ranks, mesh: how many ranks; of a mesh only their number is used.
        model: instead of widths: of PyG's layers or ours; it is run on two nodes.
        layers: "gcn" or "sage", or one for each layer.
        inputs: "constant" features, "changing" ones (input dropout), or "trained".
        memory: bytes a rank may use in an epoch, beside its interpreter; those it takes to
            cut the graph, and to plan exchanges, come before. None is without a limit.
        partition, seed: as `pdc.partition` takes them: a method, owners, or a Partition.
        algorithm, grid: only grids of this name ("1d", "1.5d", "2d", ...), or only this one.
        codecs: beside the exact link, others to plan for: LinkPolicys (as they stand: of a
            schedule, the ratio of its present epoch), or Codecs and names, as LinkPolicy
            takes them. A plan that changes numbers is never `best`.
        dtype: of the features; that of data.x, else of the model, else float32.
        halo, ordering: what travels, and the order of products, as
            `DistEdgeIndex.with_halo` and `with_ordering` set them.

    Returns:
        `Plans`: a sequence, the fewest bytes first, with `best` and `refused`.

    Price: for a real graph, what its ranks take together to plan their products, on each
    grid, in threads of this process; a `RandomGraph`, milliseconds a grid.
    """
    _check_memory_option(memory)
    size = _ranks_of(ranks, mesh, partition)
    cutting = graph, size, partition, seed
    grid = _grid_of(grid, algorithm, size)
    read: Any = {"model": model, "graph": graph, "inputs": inputs, "ordering": ordering}
    training = training_of(widths, layers, dtype=dtype_of(graph, model, dtype), **read)
    source, description, owners = _source(*cutting, grid)
    links = links_of(codecs)
    check_halo(halo)
    found = []
    for each in _grids(size, algorithm, grid):
        if takes_grid(partition):
            source = _source(*cutting, each)[0]
        traffic = source.traffic(each, halo, training)
        for link in links:
            cost: Any = epoch_cost(traffic, training, link)
            cost |= {"reason": _refusal(cost["memory"], memory), **described(link)}
            cost["missing"] = training.uncounted(over_a_link=link is not None)
            found.append(Plan(each, training.orders, **cost))
    found.sort(key=_sort_key)
    ranked = tuple(one for one in found if one.reason is None)
    if ranked and takes_grid(partition):
        owners = _source(*cutting, ranked[0].grid)[2]
    return Plans(
        ranked,
        tuple(one for one in found if one.reason is not None),
        f"{description}, {size} ranks; {_describe_training(training)}",
        training,
        owners,
    )


def edges_of(graph: Any, partition: Any) -> tuple[Tensor, int, Tensor | None]:
    """Returns the edges, the number of nodes, and the train mask, if known."""
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
        nodes = partition.num_nodes
    elif isinstance(partition, str):
        nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
    else:
        nodes = len(partition)
    return edge_index.cpu(), nodes, None


def _source(
    graph: Any, size: int, partition: Any, seed: int, grid: Grid | None = None
) -> tuple[CutGraph | RandomGraph, str, Partition | None]:
    """Returns the cut graph, its description, and the owners of nodes."""
    if isinstance(graph, RandomGraph):
        description = f"{graph.nodes:,} nodes, {graph.edges:,} edges, law {graph.law}"
        return graph, description, None
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
    description = f"{nodes:,} nodes, {edge_index.size(1):,} edges"
    return CutGraph.of(edge_index, owners), description, owners


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
    if algorithm == "1.5d":
        # every (P/c, c, 1) is one for c of its own, those of other names too
        found = [one for one in every if one[2] == 1 and one[1] > 1]
    else:
        found = [one for one in every if name_of(one) == algorithm]
    if not found:
        resolve_grid(size, algorithm)  # raises, naming the sizes that work
    return found


def _refusal(need: int, limit: float | None) -> str | None:
    """Returns why a plan is refused that needs more memory than the limit; else None."""
    if limit is None or need <= limit:
        return None
    return f"needs {show_bytes(need)} a rank, and may use {show_bytes(limit)}"


def _sort_key(found: Plan) -> tuple[Any, ...]:
    """Sorts the fewest bytes first; of equal ones the fewest messages, then the simplest."""
    r, s, p = found.grid
    return found.bytes, found.messages, not found.exact, found.memory, s * p, p, -r


def _describe_training(training: Training) -> str:
    widths = [training.layers[0].width_in, *(one.width_out for one in training.layers)]
    kinds = [one.kind for one in training.layers]
    names = kinds[0] if len(set(kinds)) == 1 else "-".join(kinds)
    return f"{names} {'-'.join(map(str, widths))}, {training.inputs} inputs"


def _ranks_of(ranks: Any, mesh: Mesh | None, partition: Any) -> int:
    """Returns the number of ranks to plan for."""
    if ranks is None:
        if mesh is not None:
            return mesh.size
        if isinstance(partition, Partition):
            return partition.num_parts
        raise ValueError(
            "plan needs ranks=P (--ranks P), or the mesh whose ranks it is for"
        )
    whole = isinstance(ranks, numbers.Integral) and not isinstance(ranks, bool)
    if not whole or ranks < 1:
        raise ValueError(f"ranks must be a whole number above 0, got {ranks!r}")
    if mesh is not None and mesh.size != ranks:
        raise ValueError(
            f"ranks={ranks}, but the mesh has {mesh.size}; give one of them"
        )
    return int(ranks)


def _grid_of(grid: Any, algorithm: str | None, size: int) -> Grid | None:
    """Returns the checked grid if one is given, otherwise None."""
    if grid is not None and algorithm is not None:
        raise ValueError(
            f"grid={grid!r} and algorithm={algorithm!r} both choose the grids; give one of "
            "them"
        )
    return None if grid is None else resolve_grid(size, grid=grid)


def _check_memory_option(memory: Any) -> None:
    number = isinstance(memory, numbers.Real) and not isinstance(memory, bool)
    if memory is not None and not number:
        raise TypeError(
            f"memory must be a number of bytes, as 24 * 2**30, got {memory!r}"
        )
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be a number of bytes above 0, got {memory!r}")
