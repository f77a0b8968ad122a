"""Draws negative edges of a graph that is spread: candidates are alike, owners look them up."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.subgraphs import agree_same, of_all_ranks
from pyg_distcomm.tensor import getitem
from pyg_distcomm.tensor.dist_tensor import DistTensor


class _EdgeCodes(DistTensor):
    """The edges of a graph as numbers, in which `negative_sampling` looks up candidates."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Stays where it is: it is looked up there."""
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """Returns what `numpy.isin` asks."""
        return _HeldEdges(self)


class _HeldEdges:
    """Stands for all edges of a graph, as an array of numpy that no rank holds.

    Every rank has the same candidates, looks them up in its own edges, and the ranks combine
    what they found. Price of `isin`: an all-reduce of a byte for each candidate, and a word of
    each rank.
    """

    def __init__(self, codes: DistTensor) -> None:
        self._codes = codes

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Returns all edges, on every rank; collective."""
        return self._codes.__array__(dtype, copy)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Looks candidates up where the edges are; gathers them for other functions."""
        if func is np.isin and len(args) == 2 and args[1] is self and not kwargs:
            return self._isin(np.asarray(args[0]))
        args = [np.asarray(arg) if arg is self else arg for arg in args]
        return func(*args, **kwargs)

    def _isin(self, candidates: Any) -> Any:
        mesh = self._codes.rows.mesh
        mark = zlib.crc32(np.ascontiguousarray(candidates).tobytes())
        marks = collectives.all_gather_counts([mark, candidates.size], mesh.world)
        if any(other != marks[0] for other in marks):
            raise ValueError(
                "negative edges are drawn by Python's random, whose state differs between "
                "ranks: seed all ranks alike, torch_geometric.seed_everything(seed)"
            )
        own = self._codes.to_local().detach().cpu().numpy()
        found = torch.from_numpy(np.isin(candidates, own)).to(torch.uint8)
        return collectives.all_reduce(found, mesh.world, "max").bool().numpy()


def coded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes PyG's `edge_index_to_vector` return edges that stay with their owners."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        codes, population = original(*args, **kwargs)
        if isinstance(codes, DistTensor):
            codes = _EdgeCodes.wrap(codes.to_local(), codes.rows)
        return codes, population

    return run


def structured(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `structured_negative_sampling` ask the owners of edges for its candidates."""

    @functools.wraps(original)
    def run(
        edge_index: Any,
        num_nodes: int | None = None,
        contains_neg_self_loops: bool = True,
    ) -> Any:
        if not isinstance(edge_index, DistEdgeIndex):
            return original(edge_index, num_nodes, contains_neg_self_loops)
        n = int(edge_index.max()) + 1 if num_nodes is None else num_nodes
        told = {
            "num_nodes": n,
            "contains_neg_self_loops": bool(contains_neg_self_loops),
        }
        agree_same(None, told, edge_index.nodes.mesh, "structured_negative_sampling")
        ends = edge_index.to_local().cpu()
        found = _negative_ends(edge_index, ends, n, contains_neg_self_loops)
        out = DistTensor.wrap(found.to(edge_index.device), edge_index.edges)
        return edge_index[0], edge_index[1], out

    return run


def _negative_ends(edges: DistEdgeIndex, ends: Tensor, n: int, loops: bool) -> Tensor:
    """Returns a target that each edge `[2, e_i]` of this rank has not, as PyG draws it.

    All ranks draw alike for all edges. A candidate (i, k) is looked up in the edges that the
    owner of k holds.

    Price of a round: a word for each candidate that another rank looks up, a byte back, and
    the places of those that are edges, on every rank.
    """
    nodes, place, mesh = edges.nodes, edges.edges.place, edges.nodes.mesh
    pairs = ends[0] * n + ends[1]
    rest = torch.arange(edges.edges.count)
    out = torch.empty_like(ends[0])
    while len(rest):
        drawn = torch.randint(n, (len(rest),), dtype=torch.long)
        getitem.check_same(drawn, nodes)
        at = torch.searchsorted(rest, place).clamp(max=len(rest) - 1)
        mine = (rest[at] == place).nonzero().view(-1)
        out[mine] = drawn[at[mine]]
        hit = _held(ends[0][mine], out[mine], pairs, n, nodes)
        if not loops:
            hit |= ends[0][mine] == out[mine]
        rest = of_all_ranks(place[mine][hit], mesh, "edges")
    return out


def _held(source: Tensor, target: Tensor, pairs: Tensor, n: int, nodes: Rows) -> Tensor:
    """Returns which pairs `[k]` are edges of any rank, `pairs` being those of this one."""
    world, known = nodes.mesh.world, nodes.partition
    assert known is not None
    owner = torch.where(target < nodes.total, known.owner_of(target % nodes.total), 0)
    order = owner.argsort(stable=True)
    counts = torch.bincount(owner, minlength=world.size).tolist()
    back = collectives.exchange_counts(counts, world)
    code = (source * n + target)[order]
    asked = collectives.all_to_all(code, counts, back, world, "edges").wait()
    answer = torch.isin(asked, pairs).to(torch.uint8)
    came = collectives.all_to_all(answer, back, counts, world, "edges").wait()
    out = torch.empty(len(order), dtype=torch.bool)
    out[order] = came.bool()
    return out
