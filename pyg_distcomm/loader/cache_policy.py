"""Ranks nodes by how often minibatches need them, to choose the rows that a cache holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.halo.halo import Halo
from pyg_distcomm.loader.row_group import NODES, Group
from pyg_distcomm.tensor.dist_tensor import DistTensor

Fanouts: TypeAlias = Sequence[int] | Mapping[Any, Sequence[int]]

_LOG_ZERO = -800.0  # its exponential is zero in float64


@dataclass(frozen=True, eq=False)
class Upstream:
    """Sums over the edges that leave each node, of edges kept where they arrive.

        z_u = sum over edges (u, v) of x_v

    Shapes (this rank; e edges, n sources here, k distinct sources of the edges):
        target  [e]  which target here each edge has
        source  [e]  which of the k its source is
        here    [k]  where those owned here are among the n; -1 for the others
        away         which of the k travel, in the order of the halo
    """

    sources: Rows
    num_targets: int
    target: Tensor
    source: Tensor
    here: Tensor
    away: Tensor
    halo: Halo

    @staticmethod
    def build(edge_index: DistEdgeIndex) -> Upstream:
        """Plans the sums; collective."""
        topology, sources = edge_index.topology, edge_index.sources
        mesh, partition = sources.mesh, sources.partition
        assert partition is not None
        gid, source = torch.unique(topology.source_gid, return_inverse=True)
        owner = partition.owner_of(gid)
        own = owner == mesh.rank
        here = torch.searchsorted(sources.gid, gid).masked_fill_(~own, -1)
        away = (~own).nonzero().view(-1)
        away = away[torch.argsort(owner[away], stable=True)]
        counts = torch.bincount(owner[away], minlength=mesh.size).tolist()
        halo = Halo.build(gid[away], counts, sources.gid, mesh.world)
        target = torch.searchsorted(edge_index.nodes.gid, topology.target_gid)
        num_targets = len(edge_index.nodes)
        return Upstream(sources, num_targets, target, source, here, away, halo)

    @property
    def in_degree(self) -> Tensor:
        """Returns the number of edges into each target here."""
        return torch.bincount(self.target, minlength=self.num_targets)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns z `[n]` of x, one number for each target here; collective.

        Price: a word for each distinct source that is elsewhere.
        """
        part = x.new_zeros(len(self.here), 1)
        part.index_add_(0, self.source, x[self.target].unsqueeze(1))
        out = x.new_zeros(len(self.sources), 1)
        out[self.here[self.here >= 0]] = part[self.here >= 0]
        return self.halo.begin_transpose(part[self.away])(out).squeeze(1)


def inclusion_probability(
    data: Any, num_neighbors: Sequence[int], seeds: DistTensor, batch_size: int
) -> DistTensor:
    """Returns the probability that a minibatch holds a node, of one type; collective.

    See `inclusion_probabilities`. Shapes: seeds `[n_i]`, bool; return `[n_i]`, float64.
    """
    return inclusion_probabilities(data, num_neighbors, {NODES: seeds}, batch_size)[
        NODES
    ]


def inclusion_probabilities(
    data: Any,
    num_neighbors: Fanouts,
    seeds: Mapping[Group, DistTensor],
    batch_size: int,
) -> dict[Group, DistTensor]:
    """Returns the probability that a minibatch holds a node, by node type; collective.

        p0_v = batch_size / number of seeds, for seeds
        p_u  = 1 - prod over edges (u, v) of (1 - p'_v min(1, s / degree v)), hop by hop
        P_u  = 1 - prod over hops of (1 - p_u)

    the vertex inclusion probability of [Kaler23], where p' is p of the hop before and s
    its fan-out. Draws count as independent, which they are on a tree; elsewhere it is an
    estimate, and too high for nodes that are reached at two hops and expanded once.

    Args:
        data: a Data or HeteroData of `pdc.partition`.
        num_neighbors: the fan-out of each hop, -1 for all; or these by edge type.
        seeds: which nodes minibatches start from: masks by node type, None for the only.
        batch_size: how many of them one minibatch has.
    """
    edges = {key: Upstream.build(e) for key, e in _edges_of(data).items()}
    missing = (
        set(edges) - set(num_neighbors) if isinstance(num_neighbors, Mapping) else ()
    )
    if missing:
        raise ValueError(
            f"num_neighbors has no fan-outs for the edge types {sorted(missing)}; give a "
            "list for each, of zeros where no edges are drawn"
        )
    rows = _rows_of(data)
    share = _share(seeds, rows, batch_size)
    p = {group: torch.zeros(len(r), dtype=torch.float64) for group, r in rows.items()}
    for group, mask in seeds.items():
        p[group] = mask.to_local().cpu().double() * share
    missed = {group: _log_rest(one) for group, one in p.items()}
    for hop in range(_hops(num_neighbors)):
        rest = {group: torch.zeros_like(one) for group, one in p.items()}
        for key, upstream in edges.items():
            fanouts = num_neighbors
            fanout = (fanouts[key] if isinstance(fanouts, Mapping) else fanouts)[hop]
            drawn = (fanout / upstream.in_degree.clamp(min=1)).clamp_(max=1)
            drawn = drawn if fanout >= 0 else torch.ones_like(drawn)
            rest[key[0]] += upstream(_log_rest(p[key[-1]] * drawn))
        p = {group: -torch.expm1(one) for group, one in rest.items()}
        for group, one in p.items():
            missed[group] += _log_rest(one)
    return {
        group: DistTensor.wrap(-torch.expm1(one), rows[group])
        for group, one in missed.items()
    }


def _share(
    seeds: Mapping[Group, DistTensor], rows: Mapping[Group, Rows], batch_size: int
) -> float:
    count = torch.zeros(1, dtype=torch.int64)
    for group, mask in seeds.items():
        if group not in rows or not isinstance(mask, DistTensor):
            raise TypeError(
                f"seeds must be masks of pdc.partition by node type, {list(rows)}; got "
                f"{type(mask).__name__} for {group!r}"
            )
        count += mask.to_local().cpu().bool().sum()
    mesh = next(iter(rows.values())).mesh
    return min(1.0, batch_size / max(int(collectives.all_reduce(count, mesh.world)), 1))


def _hops(num_neighbors: Fanouts) -> int:
    if isinstance(num_neighbors, Mapping):
        return max(len(one) for one in num_neighbors.values())
    return len(num_neighbors)


def _log_rest(p: Tensor) -> Tensor:
    return torch.log1p(-p).clamp_(min=_LOG_ZERO)


def out_degrees(data: Any) -> dict[Group, DistTensor]:
    """Returns how many edges leave each node, float64 `[n_i]` by type; collective."""
    rows = _rows_of(data)
    sums = {
        group: torch.zeros(len(r), dtype=torch.float64) for group, r in rows.items()
    }
    for key, edge_index in _edges_of(data).items():
        one = torch.ones(len(edge_index.nodes), dtype=torch.float64)
        sums[key[0]] += Upstream.build(edge_index)(one)
    return {group: DistTensor.wrap(sums[group], r) for group, r in rows.items()}


def _edges_of(data: Any) -> dict[Any, DistEdgeIndex]:
    """Returns edges by edge type; by (None, None) where there is one."""
    found = {}
    for part in data.stores:
        edge_index = part.get("edge_index")
        if isinstance(edge_index, DistEdgeIndex):
            key = getattr(part, "_key", None)
            found[(NODES, NODES) if key is None else key] = edge_index
    if not found:
        raise TypeError(
            "nodes are ranked by the edges of a graph of pdc.partition, and this has none"
        )
    return found


def _rows_of(data: Any) -> dict[Group, Rows]:
    """Returns which nodes are here of each type that has edges."""
    found = {}
    for key, edge_index in _edges_of(data).items():
        found[key[0]], found[key[-1]] = edge_index.sources, edge_index.nodes
    return found


def hottest(score: Tensor, gid: Tensor, count: int, axis: Axis) -> Tensor:
    """Returns the `count` ids of the highest scores of all ranks, ascending; collective.

    Ties go to the lower id, so the choice does not depend on who owns what.

    Shapes: score `[n_i]` and gid `[n_i]`, ascending; return `[count]`, on every rank.
    Price: at most one id and one score for every id there is.

    Raises:
        ValueError: on all ranks, if a score is not a number, or there are not n_i.
    """
    problem = None
    if score.shape != gid.shape:
        problem = (
            f"a score for each of {len(gid)} rows here is wanted (or for each there is), "
            f"got {list(score.shape)}"
        )
    elif bool(score.isnan().any()):
        problem = "scores must be numbers, got NaN"
    collectives.agree(problem, axis)
    best = torch.sort(score.double(), descending=True, stable=True).indices[:count]
    sizes = [row[0] for row in collectives.all_gather_counts([len(best)], axis)]
    ids = collectives.all_gather_rows(gid[best], sizes, axis, "build")
    scores = collectives.all_gather_rows(score.double()[best], sizes, axis, "build")
    ids, order = ids.sort()
    top = torch.sort(scores[order], descending=True, stable=True).indices[:count]
    return ids[top].sort().values


def rows_kept(size: float, total: int) -> int:
    """Returns how many rows a cache size means: a count, or a fraction of all.

    Raises:
        ValueError: unless it is a whole number of rows, or a fraction in [0, 1].
    """
    whole = isinstance(size, int) and not isinstance(size, bool)
    if whole and size >= 0:
        return min(int(size), total)
    if isinstance(size, float) and 0 <= size <= 1:
        return round(size * total)
    raise ValueError(
        f"cache={size!r} must be a number of rows (an int), or a fraction of all rows "
        "(a float from 0.0 to 1.0)"
    )
