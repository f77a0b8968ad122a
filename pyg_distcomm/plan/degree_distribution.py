"""Estimates the size of halos in closed form from a graph's degree distribution."""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pyg_distcomm.comm.ledger import balanced_split
from pyg_distcomm.comm.mesh import Grid
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs import Plain
from pyg_distcomm.ops.grid_plan import PACKING
from pyg_distcomm.plan.ranks import Array, Traffic
from pyg_distcomm.plan.training import ProductShape

POINTS = 4096  # quantiles of a power law


class DegreeDistribution(abc.ABC):
    """The distribution of the degrees of nodes; in- and out-degrees are equal.

    If nodes are assigned to ranks at random, a node of d edges has none into a fraction q of
    the nodes with probability (1 - q)^d: the mean over nodes is the generating function
    of the degrees at 1 - q.
    """

    @abc.abstractmethod
    def missing(self, nodes: int, edges: int, share: float) -> float:
        """Returns the mean over nodes of (1 - share)^degree."""


@dataclass(frozen=True)
class Uniform(DegreeDistribution):
    """Draws both ends of every edge uniformly from all nodes: (1 - q/n)^m."""

    def missing(self, nodes: int, edges: int, share: float) -> float:
        return float(_power(share / nodes, edges))


@dataclass(frozen=True)
class PowerLaw(DegreeDistribution):
    """Mean degrees follow a power law: node k's is proportional to k^(-1 / (exponent - 1)).

    Degrees are Poisson around their means. As in the model of [Chung02], without its
    bound on the largest mean.

    Args:
        exponent: the exponent of the density of degrees, above 2.
    """

    exponent: float = 2.5

    def __post_init__(self) -> None:
        if not self.exponent > 2:
            raise ValueError(
                f"a power law of degrees needs an exponent above 2, got {self.exponent}"
            )

    def missing(self, nodes: int, edges: int, share: float) -> float:
        slope = 1 / (self.exponent - 1)
        # quantiles denser towards the hubs; each stands for the nodes up to the next
        ends = np.unique(np.geomspace(1, nodes + 1, POINTS).round())
        first, last = ends[:-1], ends[1:]
        if len(first) == 0:
            return float(np.exp(-share * edges / max(nodes, 1)))
        count = last - first
        mean = ((last - 0.5) ** (1 - slope) - (first - 0.5) ** (1 - slope)) / count
        mean *= edges / (mean * count).sum()
        return float((np.exp(-share * mean) * count).sum() / count.sum())


@dataclass(frozen=True)
class RMat(DegreeDistribution):
    """The degrees of the recursive graphs of [Chakrabarti04], ids permuted.

    A node with t ones among the L bits of its id is an end of an edge with probability
    (a+b)^(L-t) (c+d)^t, here the same for both ends, as after symmetrising.

    Args:
        heavy: a + b, the fraction of edges at ids whose bit is zero.
    """

    heavy: float = 0.76

    def __post_init__(self) -> None:
        if not 0.5 <= self.heavy < 1:
            raise ValueError(f"heavy must lie in [0.5, 1), got {self.heavy}")

    def missing(self, nodes: int, edges: int, share: float) -> float:
        bits = max(1, round(math.log2(max(nodes, 2))))
        scaled = edges * 2.0**bits / nodes  # as many edges per node
        ones = np.arange(bits + 1)
        log_nodes = [
            math.lgamma(bits + 1) - math.lgamma(t + 1) - math.lgamma(bits - t + 1)
            for t in range(bits + 1)
        ]
        part = np.exp(np.array(log_nodes) - bits * math.log(2))
        chance = self.heavy ** (bits - ones) * (1 - self.heavy) ** ones
        return float((part * _power(share * chance, scaled)).sum())


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


def mean_traffic(graph: RandomGraph, grid: Grid, halo: str) -> Traffic:
    """Returns what ranks of a grid exchange in the mean, for a random graph.

        ghosts = n/s (1 - 1/r) (1 - E (1 - 1/r)^d)     over the row axis

    and with r and s exchanged over the col axis; whole blocks have no last factor. Arrays
    have an entry for each rank of a fiber, whose slices of features differ in width.
    """
    (r, s, p), n, size = grid, graph.nodes, math.prod(grid)
    rows = n / s * (1 - 1 / r) * graph.sent(r, halo)
    sums = n / r * (1 - 1 / s) * graph.sent(s, halo)
    ghosts = n * (1 - 1 / size) * graph.sent(size, "rows")
    nodes, edges = np.full(p, n / size), np.full(p, graph.edges / size)

    def exchange(
        product: ProductShape, codec: Codec, dtype: torch.dtype
    ) -> tuple[Array, Array, Array]:
        if product.halo:
            none, widths = np.zeros(p), np.full(p, product.width)
            links = ((ghosts, size - 1),)
            return none, *_coded(links, widths, codec, dtype)
        widths = np.array(balanced_split(product.width, p))
        received, messages = _coded(
            ((rows, r - 1), (sums, s - 1)), widths, codec, dtype
        )
        words = nodes * (p - 1) * widths + nodes * (product.width - widths)
        some = widths > 0
        if p > 1:
            messages = messages + some.sum() - some + some * (p - 1)
        return (p > 1) * words * dtype.itemsize, received, messages

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


def _coded(
    links: Sequence[tuple[float, int]], widths: Array, codec: Codec, dtype: torch.dtype
) -> tuple[Array, Array]:
    """Returns the bytes of rows that a codec writes, and messages, all of which are equal.

    Args:
        links: the rows that each link moves, and its peers.
        widths: the width of rows, for each rank of a fiber.
        codec, dtype: what writes rows, of this type.
    """
    received, messages = np.zeros(len(widths)), np.zeros(len(widths), np.int64)
    for count, peers in links:
        mean = max(round(count / max(peers, 1)), 1)
        each = [codec.wire_bytes(mean, w, dtype) if w else 0 for w in widths.tolist()]
        received = received + count * (np.array(each) / mean)
        messages = messages + peers * (widths > 0)
    return received, messages


def _power(part: Array | float, times: Array | float) -> Array:
    """Returns (1 - part)^times, also if `part` is below the precision of 1 - part."""
    with np.errstate(divide="ignore", invalid="ignore"):
        out: Array = np.exp(np.asarray(times) * np.log1p(-np.asarray(part, np.float64)))
    return np.where(np.asarray(times) == 0, 1.0, out)
