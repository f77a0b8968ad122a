"""Runs PyG's transforms on a share: those whose own code would read other ranks' rows.

Most transforms of PyG run on a share as they are. Three kinds do not: some are products with
the edges, some look at the whole graph at once, and some make another graph of it.
"""

from __future__ import annotations

import copy
import functools
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch_geometric.transforms
import torch_geometric.utils
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms.add_positional_encoding import add_node_attr
from torch_geometric.typing import WITH_TORCH_SPARSE
from torch_geometric.utils import coalesce, scatter, sort_edge_index

from pyg_distcomm.comm import collectives
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.topology import OperatorKind
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.shape_ops import Stacked

Transform = Callable[..., Any]


def _share_of(data: Any) -> Any:
    """Returns some tensor of a graph that is spread over ranks, or None."""
    for store in getattr(data, "stores", ()):
        for value in store.values():
            if isinstance(value, (DistEdgeIndex, DistTensor)):
                return value
    return None


def _to_sparse_tensor(self: Any, data: Any) -> Any:
    """Makes edges an adj_t that is cut as they are."""
    for store in data.edge_stores:
        if not isinstance(store.get("edge_index"), DistEdgeIndex):
            continue
        if store.edge_index.sources is store.edge_index.nodes:  # in PyG's order
            kept = ("edge_index", "edge_label", "edge_label_index")
            names = [k for k in store if k not in kept and store.is_edge_attr(k)]
            values = [store[name] for name in names]
            edges, values = sort_edge_index(store.edge_index, values, sort_by_row=False)
            store.update({"edge_index": edges, **dict(zip(names, values, strict=True))})
        edges, weight = store.edge_index, store.get(self.attr or "")
        of_torch = self.layout is not None or not WITH_TORCH_SPARSE
        if of_torch:  # which has each edge once
            count = max(edges.nodes.total, edges.sources.total)
            edges, weight = coalesce(edges, weight, count, sort_by_row=False)
        store.adj_t = edges.carrying(weight)
        store.adj_t.looped = bool((edges[0] == edges[1]).any())
        store.adj_t.of_torch = of_torch
        if self.remove_edge_index:
            del store["edge_index"]
            store.pop(self.attr or "", None)
    return data


def _sign(self: Any, data: Any) -> Any:
    """Multiplies by the normalised adjacency: a halo of x for each hop."""
    edges = data.edge_index.with_link(None)
    row, col = edges
    weight = data.edge_weight
    if weight is None:
        ones = torch.ones(len(edges.edges), device=edges.device)
        weight = DistTensor.wrap(ones, edges.edges)
    degree = scatter(weight, col, dim_size=data.num_nodes, reduce="sum")
    scale = degree.pow_(-0.5)
    scale.masked_fill_(scale == float("inf"), 0)
    weight = scale[row] * weight * scale[col]
    x = data.x
    for hop in range(1, self.K + 1):
        x = data[f"x{hop}"] = edges.matmul(x, weight)
    return data


def _propagate_features(self: Any, data: Any) -> Any:
    """Fills in missing features by products: a halo of x for each iteration."""
    edges, weight = data.get("edge_index"), data.edge_attr
    if edges is None:
        edges, weight = data.adj_t, data.adj_t.weight
    elif "edge_weight" in data:
        weight = data.edge_weight
    if data.x.shape != self.missing_mask.shape or (
        weight is not None and weight.dim() > 1
    ):
        raise ValueError(
            f"give FeaturePropagation a mask of the shape {list(data.x.shape)} of data.x and "
            f"one weight for each edge; got a mask {list(self.missing_mask.shape)} and "
            + ("no weights" if weight is None else f"weights {list(weight.shape)}")
        )
    if weight is None and "edge_index" in data:  # PyG's matrix has each edge once
        edges = coalesce(edges)
    local = edges.check_edges(weight, "edge_weight")
    matrix = edges.topology.operator(OperatorKind("gcn"), local, data.x.dtype)
    missing = self.missing_mask.to(data.x.device)
    x: Any = torch.where(missing, 0.0, data.x).to(data.x.dtype)
    out = x
    for _ in range(self.num_iterations):
        own = DistTensor.wrap(matrix @ out.to_local(), edges.nodes)
        out = torch.where(missing, own, x)
    data.x = out
    return data


def _to_undirected(self: Any, data: Any, forward: Transform) -> Any:
    """Cuts reversed edges between two node types by what are their targets now."""
    rows: dict[str, Any] = {}
    data = forward(self, data)
    for store in data.edge_stores:
        edges = store.get("edge_index")
        if isinstance(edges, DistEdgeIndex) and isinstance(store._key, tuple):
            source, _, target = store._key
            rows |= {source: edges.sources, target: edges.nodes}
    for store in data.edge_stores:
        if isinstance(store.get("edge_index"), Stacked):
            source, _, target = store._key
            ends = torch.stack([end.full_tensor() for end in store.edge_index])
            store.edge_index = DistEdgeIndex.cut(ends, rows[target], rows[source])
    return data


def _remove_isolated(self: Any, data: Any, forward: Transform) -> Any:
    """Removes nodes of one type; those of several have no numbering that is cut."""
    return _refuse(self, data) if isinstance(data, HeteroData) else forward(self, data)


def _on_all_edges(self: Any, data: Any, forward: Transform) -> Any:
    """Runs PyG's transform on all edges, gathered on every rank; rank 0's answer counts.

    What solves for eigenvalues begins at random, and would answer each rank otherwise.

    Price: the edges and their weights, on every rank, and the answer.
    """
    share: Any = data.edge_index
    world = share.nodes.mesh.world
    whole = Data(num_nodes=data.num_nodes)
    for name in ("edge_index", "edge_weight", "edge_attr"):
        value: Any = data.get(name)
        if isinstance(value, (DistEdgeIndex, DistTensor)):
            whole[name] = value.full_tensor()
    twin, problem = copy.copy(self), None
    twin.attr_name = "found"
    try:
        whole = forward(twin, whole)
    except Exception as error:
        problem = f"{type(self).__name__}: {type(error).__name__}: {error}"
    collectives.agree(problem, world, RuntimeError)
    if hasattr(whole, "lambda_max"):
        data.lambda_max = collectives.broadcast_object(whole.lambda_max, world)
        return data
    found: Tensor = collectives.broadcast_object(whole.found.contiguous(), world)
    own = found[share.nodes.gid].to(share.device)
    return add_node_attr(data, DistTensor.wrap(own, share.nodes), self.attr_name)


_RUN: dict[str, Transform] = {
    "ToSparseTensor": _to_sparse_tensor,
    "SIGN": _sign,
    "FeaturePropagation": _propagate_features,
    "AddRandomWalkPE": _on_all_edges,
    "AddLaplacianEigenvectorPE": _on_all_edges,
    "LaplacianLambdaMax": _on_all_edges,
    "ToUndirected": _to_undirected,
    "RemoveIsolatedNodes": _remove_isolated,
}
_AROUND = (_on_all_edges, _to_undirected, _remove_isolated)  # take PyG's forward

# these make another graph, or a dense matrix of the graph
_REFUSED = """ToDense TwoHop LineGraph GDC RootedEgoNets RootedRWSubgraph VirtualNode HalfHop
Pad SVDFeatureReduction KNNGraph RadiusGraph AddMetaPaths AddRandomMetaPaths AddGPSE
GridSampling Delaunay FixedPoints SamplePoints ToSLIC FaceToEdge GenerateMeshNormals
PointPairFeatures NormalizeRotation""".split()


def _refuse(self: Any, data: Any) -> Any:
    name = type(self).__name__
    raise TypeError(
        f"apply {name} to the whole graph, before pdc.partition (pre_transform, or "
        f"transform of the data set): it makes another graph, or reads all rows at once, and "
        f"was given this rank's share"
    )


def _of_shares(forward: Transform, run: Transform) -> Transform:
    """Makes a transform's forward run `run` on shares, and be as it was elsewhere."""

    @functools.wraps(forward)
    def either(self: Any, data: Any) -> Any:
        if _share_of(data) is None:
            return forward(self, data)
        return run(self, data, forward) if run in _AROUND else run(self, data)

    return either


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


def _coded_edges(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes PyG's `edge_index_to_vector` return edges that stay with their owners."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        codes, population = original(*args, **kwargs)
        if isinstance(codes, DistTensor):
            codes = _EdgeCodes.wrap(codes.to_local(), codes.rows)
        return codes, population

    return run


def register() -> None:
    """Has PyG's transforms and `negative_sampling` run on shares as this module says."""
    sampling = vars(sys.modules[torch_geometric.utils.negative_sampling.__module__])
    name = "edge_index_to_vector"
    sampling[name] = _coded_edges(sampling[name])
    for name in (*_RUN, *_REFUSED):
        kind = getattr(torch_geometric.transforms, name, None)
        if kind is not None:  # PyG's versions differ
            kind.forward = _of_shares(kind.forward, _RUN.get(name, _refuse))


def from_sparse(data: Any) -> tuple[Any, Tensor | None]:
    """Returns a Data with an edge_index in the place of its adj_t, and what that holds."""
    if not isinstance(data, Data) or data.edge_index is not None:
        return data, None
    value, count, sparse = None, data.num_nodes, data.get("adj_t")
    edge_index = data.get("train_pos_edge_index")  # as PyG splits edges
    if sparse is not None:
        edge_index, value = coo_of(sparse)
        value = torch.empty(0) if value is None else value
    data = copy.copy(data)
    data.pop("adj_t", None)
    data.edge_index, data.num_nodes = edge_index, count
    return data, value


def with_sparse(share: Data, weight: Tensor | None, looped: bool, whole: Any) -> Data:
    """Gives a share the adj_t that its data, the whole graph, had."""
    if weight is not None:
        edges: Any = share.edge_index
        share.adj_t = edges.carrying(weight if len(weight) else None)
        share.adj_t.looped = looped
        share.adj_t.of_torch = isinstance(whole.get("adj_t"), Tensor)
    return share
