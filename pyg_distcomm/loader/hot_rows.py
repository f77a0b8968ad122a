"""Ranks the rows that minibatches need most, which a feature store caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.loader.fetch import EDGES, NODES, Group
from pyg_distcomm.loader.row_group import lengths
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex


def sum_over_out_edges(edge_index: DistEdgeIndex, x: Tensor) -> Tensor:
    """Returns the sum over the out-edges of each source; collective.

        z_u = sum over edges (u, v) of x_v

    Shapes (this rank; n targets, m sources): x `[n]`, return `[m]`.
    Price: a word for each distinct source on another rank.
    """
    local, m = edge_index.topology.locals, len(edge_index.sources)
    part = x.new_zeros(m + local.halo.num_ghosts, 1)
    source, target = local.ends.cpu()
    part.index_add_(0, source, x[target].unsqueeze(1))
    out, ghosts = part[:m].contiguous(), part[m:]
    device = local.ends.device
    arrive = local.halo.begin_transpose(ghosts.to(device))
    return arrive(out.to(device)).squeeze(1).cpu()


def out_degrees(data: Any) -> dict[Group, DistTensor]:
    """Returns the out-degree of each node, float64 `[n_i]` by type; collective."""
    rows = _nodes_by_type(data)
    sums = {
        group: torch.zeros(len(r), dtype=torch.float64) for group, r in rows.items()
    }
    for key, edge_index in _edge_index_by_type(data).items():
        one = torch.ones(len(edge_index.nodes), dtype=torch.float64)
        sums[key[0]] += sum_over_out_edges(edge_index, one)
    return {group: DistTensor.wrap(sums[group], r) for group, r in rows.items()}


def _edge_index_by_type(data: Any) -> dict[Any, DistEdgeIndex]:
    """Returns the edge_index of each edge type; of (None, None) in a homogeneous graph."""
    found = {}
    for part in data.stores:
        edge_index = part.get("edge_index")
        if isinstance(edge_index, DistEdgeIndex):
            found[(NODES, NODES) if part._key is None else part._key] = edge_index
    if not found:
        raise TypeError(
            "got data without a partitioned edge_index, by which nodes are ranked; give a "
            "share from pdc.partition"
        )
    return found


def _nodes_by_type(data: Any) -> dict[Group, Rows]:
    """Returns the row layout of the nodes of each type that has edges."""
    found = {}
    for key, edge_index in _edge_index_by_type(data).items():
        found[key[0]], found[key[-1]] = edge_index.sources, edge_index.nodes
    return found


def top_scoring_ids(score: Tensor, gid: Tensor, count: int, axis: Axis) -> Tensor:
    """Returns the `count` ids with the highest scores over all ranks, ascending; collective.

    Ties go to the lower id, so the result does not depend on the partition.

    Shapes: score `[n_i]` and gid `[n_i]`, ascending; return `[count]`, on every rank.
    Price: at most one id and one score for every id of the group.

    Raises:
        ValueError: on all ranks, if a score is NaN, or there are not n_i.
    """
    problem = None
    if score.shape != gid.shape:
        problem = (
            f"got scores {list(score.shape)}, wanted one for each of the {len(gid)} rows of "
            "this rank; give these, or one for each row of all ranks"
        )
    elif bool(score.isnan().any()):
        problem = "got NaN among the scores, wanted numbers; rank such rows by 0"
    collectives.agree(problem, axis)
    best = torch.sort(score.double(), descending=True, stable=True).indices[:count]
    sizes = lengths(best, axis)
    ids = collectives.all_gather_rows(gid[best], sizes, axis, "build")
    scores = collectives.all_gather_rows(score.double()[best], sizes, axis, "build")
    ids, order = ids.sort()
    top = torch.sort(scores[order], descending=True, stable=True).indices[:count]
    return ids[top].sort().values


def check_names(what: str, given: Any, there: Sequence[Any]) -> None:
    """Raises ValueError, on all ranks alike, for a dictionary with unknown names."""
    unknown = (
        [one for one in given if one not in there] if isinstance(given, Mapping) else []
    )
    if unknown:
        raise ValueError(
            f"got {what} for {unknown}, but there are only {list(there)}; check the names"
        )


def row_scores(
    data: Any, ranking: str | Tensor | Mapping[Group, Tensor]
) -> Mapping[Group, Tensor]:
    """Returns the score of each row, by group, by the ranking of `from_data`; collective."""
    types = data.node_types if isinstance(data, HeteroData) else [NODES]
    if isinstance(ranking, Mapping):
        edges = data.edge_types if isinstance(data, HeteroData) else [EDGES]
        check_names("ranking", ranking, [*types, *edges])
        return ranking
    if not isinstance(ranking, str):
        if types != [NODES]:
            raise ValueError(
                "got one vector of scores as ranking, but nodes have the types "
                f"{types}; give a dictionary with a vector for each"
            )
        return {NODES: ranking}
    if ranking != "degree":
        raise ValueError(
            f"ranking={ranking!r} is not known; choose 'degree', or give scores"
        )
    return out_degrees(data)
