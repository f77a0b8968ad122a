"""Runs PyG's transforms and negative sampling on a share.

Most transforms of PyG run on a share unchanged. Three kinds do not: those that multiply by the
edges, those that need the whole graph, and those that make another graph.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch_geometric.transforms
import torch_geometric.utils
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.explain import AttentionExplainer, PGExplainer
from torch_geometric.transforms.add_positional_encoding import add_node_attr
from torch_geometric.typing import WITH_TORCH_SPARSE
from torch_geometric.utils import coalesce, scatter, sort_edge_index

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph import subgraphs
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.topology import OperatorKind
from pyg_distcomm.tensor import getitem
from pyg_distcomm.tensor.dist_tensor import DistTensor
from pyg_distcomm.tensor.row_sharded import tree_map
from pyg_distcomm.tensor.shape_ops import Stacked

Transform = Callable[..., Any]


def _to_sparse_tensor(self: Any, data: Any) -> Any:
    """Implements ToSparseTensor: makes an adj_t sharded like the edges."""
    for store in data.edge_stores:
        if not isinstance(store.get("edge_index"), DistEdgeIndex):
            continue
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
        looped = bool((edges[0] == edges[1]).any())
        store.adj_t = edges.carrying(weight, looped=looped, of_torch=of_torch)
        if self.remove_edge_index:
            del store["edge_index"]
            store.pop(self.attr or "", None)
    return data


def _sign(self: Any, data: Any) -> Any:
    """Implements SIGN, with a halo exchange of x per hop."""
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
    """Implements FeaturePropagation, with a halo exchange of x per iteration."""
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
    """Implements ToUndirected: reversed edges move to the owners of their new targets."""
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


def _on_all_edges(self: Any, data: Any, forward: Transform) -> Any:
    """Runs PyG's transform on all edges, gathered on every rank; rank 0's result is used.

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


def _metapaths(self: Any, data: Any, forward: Transform) -> Any:
    """Runs PyG's transform on the relations of its paths, gathered on every rank.

    Price: their edges, and weights where these count, on every rank, and the new edges.
    """
    mesh: Any = subgraphs.mesh_of(data)
    whole, edge_types, text = HeteroData(), data.edge_types, None
    named = {data._to_canonical(kind) for path in self.metapaths for kind in path}
    name = type(self).__name__
    if not named.issubset(edge_types):
        raise ValueError(
            f"{name} goes along {sorted(named - set(edge_types))}, but the edge types are "
            f"{edge_types}"
        )
    data = subgraphs.fully_sharded(data)
    for kind in data.node_types:
        whole[kind].num_nodes = data[kind].num_nodes
    for kind in edge_types:
        here = ("edge_index", "edge_weight") if kind in named else ()
        weighted = getattr(self, "weighted", False)
        for key in here[: 1 + weighted]:
            if key in data[kind]:
                whole[kind][key] = data[kind][key].full_tensor()
        if here and getattr(self, "max_sample", 1) is None:
            _merge_equal(whole[kind], max(whole.num_nodes, 1), weighted)
        if kind not in named:
            whole[kind].edge_index = torch.empty(2, 0, dtype=torch.int64)
    twin = copy.copy(self)
    twin.drop_orig_edge_types = twin.drop_unconnected_node_types = False
    try:
        whole = forward(twin, whole)
    except Exception as error:
        text = f"{name}: {type(error).__name__}: {error}"
    collectives.agree(text, mesh.world, RuntimeError)
    data.metapath_dict = whole.metapath_dict
    rows, links = subgraphs.rows_of_types(data), []
    for store in data.edge_stores:
        links += [store.edge_index.topology.link] if "edge_index" in store else []
    for kind in whole.metapath_dict:
        found = whole[kind]
        edges = DistEdgeIndex.cut(found.edge_index, rows[kind[2]], rows[kind[0]])
        link = links[0] if all(each is links[0] for each in links) else None
        data[kind].edge_index = edges.with_link(link)
        if "edge_weight" in found:
            own = found.edge_weight[edges.edges.place_on(edges.device)]
            data[kind].edge_weight = DistTensor.wrap(own, edges.edges)
    kept = self.drop_orig_edge_types, self.keep_same_node_type
    after = vars(sys.modules[type(self).__module__])["postprocess"]
    after(data, edge_types, *kept, self.drop_unconnected_node_types)
    return data


def _merge_equal(store: Any, count: int, weighted: bool) -> None:
    """Merges duplicate edges and sums their weights or counts; torch may crash on them."""
    edges, weight = store.edge_index, store.get("edge_weight")
    if weighted and weight is None:
        weight = torch.ones(edges.size(1), device=edges.device)
    once, weight = coalesce(edges, weight, count)
    if once.size(1) < edges.size(1):
        store.edge_index = once
        if weight is not None:
            store.edge_weight = weight


def _index_to_mask(self: Any, data: Any, forward: Transform) -> Any:
    """Implements IndexToMask, after the ranks have compared the ids."""
    mesh: Any = subgraphs.mesh_of(data)
    told = {}
    for store in data.stores:
        for name, value in store.items():
            plain = isinstance(value, Tensor) and not getattr(value, "_spread", False)
            if plain and name.endswith("_index"):
                told[f"{store._key or ''} {name}".strip()] = subgraphs.mark(value)
    subgraphs.agree_same(None, told, mesh, "IndexToMask")
    return forward(self, data)


def _run_pyg_code(self: Any, data: Any, forward: Transform) -> Any:
    """Runs PyG's own code, after the ranks have compared the settings."""
    return forward(self, data)


_RUN: dict[str, Transform] = {
    "ToSparseTensor": _to_sparse_tensor,
    "SIGN": _sign,
    "FeaturePropagation": _propagate_features,
    "AddRandomWalkPE": _on_all_edges,
    "AddLaplacianEigenvectorPE": _on_all_edges,
    "LaplacianLambdaMax": _on_all_edges,
    "ToUndirected": _to_undirected,
    "RemoveIsolatedNodes": lambda self, data: subgraphs.with_edges(data),
    "AddMetaPaths": _metapaths,
    "AddRandomMetaPaths": _metapaths,
    "IndexToMask": _index_to_mask,
}
# these take PyG's forward
_AROUND = (_on_all_edges, _to_undirected, _metapaths, _index_to_mask, _run_pyg_code)

_PYG = "torch_geometric."
# what these hold are other transforms, or nothing that they compute with
_LEFT = "BaseTransform Compose ComposeFilters ToDevice".split()

# these make another graph, or a dense matrix of the graph
_REFUSED = """ToDense TwoHop LineGraph GDC RootedEgoNets RootedRWSubgraph VirtualNode HalfHop
Pad SVDFeatureReduction KNNGraph RadiusGraph AddGPSE
GridSampling Delaunay FixedPoints SamplePoints ToSLIC FaceToEdge GenerateMeshNormals
PointPairFeatures NormalizeRotation""".split()


def _refuse(self: Any, data: Any) -> Any:
    name = type(self).__name__
    raise TypeError(
        f"apply {name} to the whole graph, before pdc.partition (pre_transform, or "
        f"transform of the data set): it makes another graph, or reads all rows at once, and "
        f"was given this rank's share"
    )


def _run_on_shares(forward: Transform, run: Transform) -> Transform:
    """Makes a transform's forward call `run` on shares, and PyG's code otherwise."""

    @functools.wraps(forward)
    def run_either(self: Any, data: Any) -> Any:
        mesh = subgraphs.mesh_of(data)
        if mesh is None:
            return forward(self, data)
        if run is not _refuse:
            name = type(self).__name__
            subgraphs.agree_same(None, _settings(self), mesh, name)
        return run(self, data, forward) if run in _AROUND else run(self, data)

    return run_either


def _settings(transform: Any) -> dict[str, str]:
    """Returns the name of a transform and its comparable arguments.

    Not what a user's own class keeps beside them, which ranks may keep apart.
    """
    told = {"transform": type(transform).__name__}
    of_pyg = (k for k in type(transform).__mro__ if k.__module__.startswith(_PYG))
    arguments = inspect.signature(next(of_pyg)).parameters
    for name, value in vars(transform).items():
        if name not in arguments:
            continue
        kind = type(value)
        told[name] = kind.__name__
        if kind in (bool, int, float, str, list, tuple, type(None)):
            told[name] = repr(value)
        elif kind is Tensor:
            told[name] = f"{value.dtype} {list(value.shape)}"
    return told


def _replace_function(original: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """Replaces a function of PyG by `run`, which gets the original as first argument.

    torch.jit.script reads the original's source, and its names in the globals of what it gets.
    """

    def run_either(*args: Any, **kwargs: Any) -> Any:
        return run(original, *args, **kwargs)

    scope, cells = original.__globals__, run_either.__closure__
    placed = types.FunctionType(run_either.__code__, scope, None, None, cells)
    return functools.wraps(original)(placed)


def _whole_entries(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes `coalesce` return all edges: torch's sparse tensors are whole on every rank."""
    return tree_map(_whole, original(*args, **kwargs))


def _whole(value: Any) -> Any:
    spread = isinstance(value, (DistEdgeIndex, DistTensor))
    return value.full_tensor() if spread else value


def _masked_edges(original: Any, src: Any, dim: int, mask: Tensor) -> Any:
    """Makes `mask_select` keep edges on their ranks."""
    if isinstance(src, DistEdgeIndex) and dim % 2:
        return src[:, mask]
    return original(src, dim, mask)


def _method(original: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """Makes a method of Data or HeteroData call `run` with the original on shares."""

    @functools.wraps(original)
    def run_either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if subgraphs.mesh_of(self) is None:
            return original(self, *args, **kwargs)
        return run(original, self, *args, **kwargs)

    return run_either


def _selection(original: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Selects edges or types of a share, after the ranks have compared the selection."""
    args = tuple(list(a) if isinstance(a, Iterator) else a for a in args)
    subgraphs.check_selection(data, original.__name__, (*args, *kwargs.values()))
    return original(data, *args, **kwargs)


def _subgraph(original: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    return subgraphs.induced(data, *args, *kwargs.values())


def _example(original: Any, data: Any, idx: Any) -> Any:
    """Gathers one graph of a batch on every rank.

    Raises:
        ValueError: on all ranks, if they ask for different graphs.
    """
    mesh: Any = subgraphs.mesh_of(data)
    asked = collectives.all_gather_counts([int(idx)], mesh.world)
    if any(other != asked[0] for other in asked):
        raise ValueError(
            "get_example gives one graph to all ranks, which asked for the graphs "
            f"{[number for (number,) in asked]}: ask for one after the other on all of them"
        )
    return _gathered(original(data, idx))


def _examples(original: Any, data: Any) -> Any:
    """Gathers the batch once, and returns the list of its graphs on every rank."""
    return original(_gathered(copy.copy(data)))


def _gathered(data: Any) -> Any:
    """Gathers the row-sharded tensors of a graph on every rank; collective."""
    for store in data.stores:
        for name, value in list(store.items()):
            store[name] = _whole(value)
    return data


def _refuse_explainer(
    forward: Any, self: Any, model: Any, x: Any, edge_index: Any, **kwargs: Any
) -> Any:
    """Makes AttentionExplainer raise for shares: its hooks see only this rank's edges."""
    given = edge_index.values() if isinstance(edge_index, dict) else [edge_index]
    if any(isinstance(value, DistEdgeIndex) for value in given):
        raise TypeError(
            "AttentionExplainer reads the attention of this rank's edges alone: give it "
            "x.full_tensor() and edge_index.full_tensor(), which the model takes as well, "
            "or explain by GNNExplainer or PGExplainer"
        )
    return forward(self, model, x, edge_index, **kwargs)


def _embeddings(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes `get_embeddings` return the outputs of layers, not their inner tensors."""
    return [
        DistTensor.wrap(x.to_local(), x.rows) if isinstance(x, DistTensor) else x
        for x in original(*args, **kwargs)
    ]


# Negative edges: candidates are alike on all ranks, and owners look them up ------------


class _EdgeCodes(DistTensor):
    """Holds edges encoded as integers, among which `negative_sampling` looks up candidates."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Returns itself: lookups run where the edges are."""
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """Returns an object that implements `numpy.isin`."""
        return _LazyEdgeArray(self)


class _LazyEdgeArray:
    """Represents all edges of a graph as a numpy array that no rank holds.

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
        """Looks up candidates where the edges are; gathers all edges for other functions."""
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


def _encode_edges(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes `edge_index_to_vector` return edges that stay with their owners."""
    codes, population = original(*args, **kwargs)
    if isinstance(codes, DistTensor):
        codes = _EdgeCodes.wrap(codes.to_local(), codes.rows)
    return codes, population


def _structured_sampling(
    original: Any,
    edge_index: Any,
    num_nodes: int | None = None,
    contains_neg_self_loops: bool = True,
) -> Any:
    """Makes `structured_negative_sampling` look up candidates at the owners of edges."""
    loops = contains_neg_self_loops
    if not isinstance(edge_index, DistEdgeIndex):
        return original(edge_index, num_nodes, loops)
    n = int(edge_index.max()) + 1 if num_nodes is None else num_nodes
    told = {"num_nodes": n, "contains_neg_self_loops": bool(loops)}
    mesh = edge_index.nodes.mesh
    subgraphs.agree_same(None, told, mesh, "structured_negative_sampling")
    found = _negative_ends(edge_index, edge_index.to_local().cpu(), n, loops)
    out = DistTensor.wrap(found.to(edge_index.device), edge_index.edges)
    return edge_index[0], edge_index[1], out


def _negative_ends(edges: DistEdgeIndex, ends: Tensor, n: int, loops: bool) -> Tensor:
    """Returns a negative target for each edge `[2, e_i]` of this rank, as PyG draws it.

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
        getitem.check_replicated_ids(drawn, nodes)
        at = torch.searchsorted(rest, place).clamp(max=len(rest) - 1)
        mine = (rest[at] == place).nonzero().view(-1)
        out[mine] = drawn[at[mine]]
        hit = _pairs_held(ends[0][mine], out[mine], pairs, n, nodes)
        if not loops:
            hit |= ends[0][mine] == out[mine]
        rest = subgraphs.union_of_ranks(place[mine][hit], mesh, "edges")
    return out


def _pairs_held(
    source: Tensor, target: Tensor, pairs: Tensor, n: int, nodes: Rows
) -> Tensor:
    """Returns which pairs `[k]` are edges of any rank; collective."""
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


def register() -> None:
    """Registers the implementations of this module with PyG."""
    for kind in (Data, HeteroData):
        kind.subgraph = _method(kind.subgraph, _subgraph)  # type: ignore[method-assign]
        for name in ("edge_subgraph", "node_type_subgraph", "edge_type_subgraph"):
            if hasattr(kind, name):
                setattr(kind, name, _method(getattr(kind, name), _selection))
    batch: Any = Batch
    batch.get_example = _method(batch.get_example, _example)
    batch.to_data_list = _method(batch.to_data_list, _examples)
    hetero: Any = HeteroData
    hetero.to_homogeneous = _method(hetero.to_homogeneous, subgraphs.homogeneous)
    explainer: Any = AttentionExplainer
    explainer.forward = _replace_function(explainer.forward, _refuse_explainer)
    utils = torch_geometric.utils
    for scopes, name, stand_in in (
        ([utils.negative_sampling], "edge_index_to_vector", _encode_edges),
        ([utils.to_torch_coo_tensor], "coalesce", _whole_entries),
        ([utils.mask_select, utils, HeteroData], "mask_select", _masked_edges),
        (
            [utils.negative_sampling, utils],
            "structured_negative_sampling",
            _structured_sampling,
        ),
        ([utils, utils.get_embeddings, PGExplainer], "get_embeddings", _embeddings),
    ):
        for scope in scopes:
            module = vars(sys.modules[getattr(scope, "__module__", scope.__name__)])
            module[name] = _replace_function(module[name], stand_in)
    every = vars(torch_geometric.transforms)
    for name in every["__all__"]:
        if name not in _LEFT and hasattr(every[name], "forward"):
            run = _refuse if name in _REFUSED else _RUN.get(name, _run_pyg_code)
            every[name].forward = _run_on_shares(every[name].forward, run)
