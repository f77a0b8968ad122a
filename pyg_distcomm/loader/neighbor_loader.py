"""Loads minibatches of sampled neighbourhoods: of nodes, of links, or layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader
from torch_geometric.loader import NeighborSampler as PyGNeighborSampler
from torch_geometric.loader.neighbor_sampler import EdgeIndex
from torch_geometric.sampler import NegativeSampling, NodeSamplerInput
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.utils.num_nodes import maybe_num_nodes

from pyg_distcomm import plugins
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.random import fold, fresh_seed, keyed_sample
from pyg_distcomm.kernels.sample_ops import spread
from pyg_distcomm.loader.base import BulkLoading, Graph
from pyg_distcomm.loader.options import (
    LoaderOptions,
    checked_links,
    checked_seeds,
    digest,
    ranks_of,
)
from pyg_distcomm.loader.partitioned_source import PartitionedSource
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.sampling.algebra import BulkMatrix
from pyg_distcomm.sampling.graph_block import gathered, read_block
from pyg_distcomm.sampling.layer_graph import MOST_ROWS, layer_numbers, rows_of_layers
from pyg_distcomm.sampling.layer_sampler import KeyedLayerSampler
from pyg_distcomm.sampling.neighbor_sampler import KeyedNeighborSampler, TypedSeeds
from pyg_distcomm.sampling.partitioned import PartitionedLayerGraph
from pyg_distcomm.sampling.rules import FastGCN, Ladies, Rule, UserRule, rule_name
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex

# the arguments of a constructor that say how neighbours are drawn
_DRAWING = (
    "replace subgraph_type disjoint temporal_strategy time_attr weight_attr is_sorted "
    "directed"
).split()


class DistNeighborLoader(BulkLoading[Graph], NeighborLoader):
    r"""Loads minibatches with sampled neighbourhoods, as PyG's `NeighborLoader` does.

    Takes all arguments of PyG's loader and yields the same batches in distribution, with
    neither pyg-lib nor torch-sparse. The content of a batch is a function of (seed,
    epoch, number of the batch): the same for every bulk size, thread count, number of
    workers and of ranks.

    Under a process group, `input_nodes` is the list of all ranks and global batch t goes
    to rank t mod P; lists that differ by rank are taken as split by the script. All
    ranks yield equally many batches.

    With `num_workers=0` minibatches are sampled and their features gathered `bulk_size` at
    a time: in the background, on cores that torch's threads leave idle (`OMP_NUM_THREADS`
    or `torch.set_num_threads` below the number of cores, shared by the ranks of a host);
    where all are in use, when asked for, on as many threads as torch uses. So training
    and loading never have more threads than there are cores; see docs/how-to/threads.md.
    Transforms run in the thread that asks. Features that are mapped from disk (np.memmap)
    are read once for each distinct node of a bulk. With workers, they sample as in PyG.

    Price: no communication but one note of each rank, when first used. Memory: the
    topology once, 8 bytes per edge and 8 per node, 8 bytes per node and thread, and the bulks
    in flight.

    Of a share, from `pdc.partition`, the minibatches are the same, bit for bit, and all
    ranks sample together, each its own: they build the loader together, and take the same
    number of minibatches. Seeds are ids of the whole graph, or the share's own masks.
    Bulks are sampled, and their rows fetched, by threads on process groups of their own.
    Price: see `PartitionedNeighborSampler` and `DistFeatureStore`.

    Args:
        data, num_neighbors, input_nodes, input_time, replace, subgraph_type, disjoint,
        temporal_strategy, time_attr, weight_attr, transform, transform_sampler_output,
        is_sorted, filter_per_worker, neighbor_sampler, directed: as in PyG.
        options: what PyG has no arguments for: seed, bulks, ranks, devices; see
            `LoaderOptions`.
        **kwargs: those of `torch.utils.data.DataLoader`.

    Raises:
        ValueError: for fan-outs below -1, seeds, edges, weights or times that cannot be.

    [Tripathy24] Sec. 4 (bulks), [Hamilton17] Alg. 2 (the rule), [Balin23] ("labor": LABOR-0,
    by sequential Poisson sampling as in its App. A.3).
    """

    def __init__(
        self,
        data: Graph | tuple[FeatureStore, GraphStore],
        num_neighbors: Any,
        input_nodes: Any = None,
        input_time: Any = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable | None = None,
        transform_sampler_output: Callable | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        options: LoaderOptions | None = None,
        **kwargs: Any,
    ) -> None:
        drawing = {name: v for name, v in dict(locals()).items() if name in _DRAWING}
        data = self._begin_init(data, options, kwargs, neighbor_sampler)
        own: Any = {"own_transform": transform_sampler_output is not None}
        graph, neighbor_sampler = self._sampler_of(
            data, num_neighbors, neighbor_sampler, kwargs, drawing, **own
        )
        if self.partitioned_source is None:
            input_nodes = checked_seeds(data, input_nodes)
        else:
            source = self.partitioned_source
            input_time = source.plain(input_time, "input_time")
            input_nodes = source.seeds(input_nodes, input_time, neighbor_sampler)
        super().__init__(
            graph,
            num_neighbors,
            input_nodes=input_nodes,
            input_time=input_time,
            time_attr=time_attr,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **kwargs,
        )
        self.data, inputs = data, self.input_data
        one_hop = isinstance(num_neighbors, (list, tuple)) and [*num_neighbors] == [-1]
        drawn = (kwargs.get(name) for name in ("sampler", "batch_sampler", "shuffle"))
        if one_hop and isinstance(data, Data) and not any(d for d in drawn):
            every = torch.arange(data.num_nodes)
            split = self.options.split == "auto"
            self._reads_layers = split and torch.equal(inputs.node.cpu(), every)
        self._finish_init([inputs.node, inputs.time, inputs.input_type], kwargs)


class DistLinkNeighborLoader(BulkLoading[Graph], LinkNeighborLoader):
    r"""Loads minibatches around edges, as PyG's `LinkNeighborLoader` does.

    What `DistNeighborLoader` says of bulks, draws, ranks and epochs holds here for edges:
    under a process group `edge_label_index` is the list of all ranks. Negative edges are
    keyed as well, so that they too do not depend on workers or ranks.

    Of a share, from `pdc.partition`, the minibatches are the same, bit for bit; seed edges
    are pairs of ids of the whole graph, wherever these nodes are, or the share's own
    `edge_index`. Without a list all edges are seeds, 16 bytes per edge on every rank.

    Args:
        data, num_neighbors, edge_label_index, edge_label, edge_label_time, replace,
        subgraph_type, disjoint, temporal_strategy, neg_sampling, neg_sampling_ratio,
        time_attr, weight_attr, transform, transform_sampler_output, is_sorted,
        filter_per_worker, neighbor_sampler, directed: as in PyG.
        options, **kwargs: as in `DistNeighborLoader`.
    """

    def __init__(
        self,
        data: Graph | tuple[FeatureStore, GraphStore],
        num_neighbors: Any,
        edge_label_index: Any = None,
        edge_label: Any = None,
        edge_label_time: Any = None,
        replace: bool = False,
        subgraph_type: SubgraphType | str = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable | None = None,
        transform_sampler_output: Callable | None = None,
        is_sorted: bool = False,
        filter_per_worker: bool | None = None,
        neighbor_sampler: Any = None,
        directed: bool = True,
        *,
        options: LoaderOptions | None = None,
        **kwargs: Any,
    ) -> None:
        drawing = {name: v for name, v in dict(locals()).items() if name in _DRAWING}
        data = self._begin_init(data, options, kwargs, neighbor_sampler)
        with on_all_ranks(ranks_of(data)):
            if neg_sampling_ratio:  # PyG's old name of it
                neg_sampling = NegativeSampling("binary", neg_sampling_ratio)
            neg_sampling = NegativeSampling.cast(neg_sampling)
        own: Any = {"own_transform": transform_sampler_output is not None}
        name = f"{type(self).__qualname__}, neg_sampling={_named(neg_sampling)}"
        graph, neighbor_sampler = self._sampler_of(
            data, num_neighbors, neighbor_sampler, kwargs, drawing, loader=name, **own
        )
        if self.partitioned_source is None:
            edge_label_index = checked_links(data, edge_label_index)
        else:
            source = self.partitioned_source
            edge_label = source.plain(edge_label, "edge_label")
            edge_label_time = source.plain(edge_label_time, "edge_label_time")
            links = source.links(edge_label_index, neg_sampling, neighbor_sampler)
            edge_label_index, neg_sampling = links
        super().__init__(
            graph,
            num_neighbors,
            edge_label_index=edge_label_index,
            edge_label=edge_label,
            edge_label_time=edge_label_time,
            neg_sampling=neg_sampling,
            time_attr=time_attr,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            neighbor_sampler=neighbor_sampler,
            **kwargs,
        )
        self.data, inputs = data, self.input_data
        listed = [inputs.row, inputs.col, inputs.label, inputs.time, inputs.input_type]
        self._finish_init(listed, kwargs)

    def _sample(self, bulk: list[Any]) -> list[Any]:
        sampler, negatives = self.link_sampler, self.neg_sampling
        if hasattr(sampler, "sample_bulk"):
            found: list[Any] = sampler.sample_bulk(bulk, negatives)
            return found
        return [sampler.sample_from_edges(i, neg_sampling=negatives) for i in bulk]


def _named(negatives: NegativeSampling | None) -> str | None:
    """Describes how negative edges are drawn; weights may be this rank's rows."""
    if negatives is None:
        return None
    weights = negatives.src_weight, negatives.dst_weight
    marks = [
        digest([w])[:8] if type(w) is Tensor else None if w is None else "rows"
        for w in weights
    ]
    more = f", weights {marks}" if any(marks) else ""
    return f"{type(negatives).__name__}({negatives.mode.value!r}, {negatives.amount}{more})"


class NeighborSampler(PyGNeighborSampler):
    """Samples for each layer the neighbours of all nodes so far, as PyG's class does.

    Takes its arguments, and yields its batches (batch_size, n_id, adjs): with sizes of -1
    those of torch-sparse, which is not needed, and otherwise as many neighbours, drawn
    without replacement by torch's generator. A SparseTensor is sampled by torch-sparse.

    As in PyG each rank loads the whole list that it is given. The edges of a share are
    gathered on every rank; with one seed on all ranks all sample alike, so that
    `share.x[n_id]` are the rows of a batch. For batches that are shared out, and for a graph
    that fits no rank, see `DistNeighborLoader`.

    Args:
        edge_index: `[2, E]`, plain or of a share, or an adj_t of torch.sparse or torch-sparse.
        sizes, node_idx, num_nodes, return_e_id, transform, **kwargs: as in PyG.

    Price: of a share, 16 bytes per edge once on every rank.
    """

    def __init__(
        self,
        edge_index: Any,
        sizes: Sequence[int],
        node_idx: Tensor | None = None,
        num_nodes: int | None = None,
        return_e_id: bool = True,
        transform: Callable | None = None,
        **kwargs: Any,
    ) -> None:
        options = num_nodes, return_e_id, transform
        if not isinstance(edge_index, Tensor):
            super().__init__(edge_index, list(sizes), node_idx, *options, **kwargs)
            return
        for name in ("dataset", "collate_fn"):
            kwargs.pop(name, None)
        edges = edge_index
        if isinstance(edges, DistEdgeIndex):
            num_nodes = edges.nodes.total if num_nodes is None else num_nodes
            edges = edges.carrying(None).full_tensor()
        elif edges.layout != torch.strided:
            num_nodes = len(edges) if num_nodes is None else num_nodes
            edges = coo_of(edges)[0]
        edges = edges.as_subclass(Tensor).cpu()
        if isinstance(node_idx, DistTensor):
            node_idx = node_idx.full_tensor()
        mask = node_idx is not None and node_idx.dtype == torch.bool
        if num_nodes is None and mask:
            num_nodes = len(node_idx)  # type: ignore[arg-type]
        elif num_nodes is None:
            listed = edges[0, :0] if node_idx is None else node_idx.view(-1).cpu()
            num_nodes = maybe_num_nodes(torch.cat([edges.view(-1), listed]))
        nodes = torch.arange(num_nodes) if node_idx is None else node_idx.view(-1)
        self.edge_index, self.node_idx, self.num_nodes = edge_index, node_idx, num_nodes
        self.sizes, self.return_e_id, self.transform = list(sizes), *options[1:]
        self.is_sparse_tensor, self.__val__ = False, None
        by_source = edges[0].argsort(stable=True)
        self._order = by_source[edges[1][by_source].argsort(stable=True)]
        data = Data(edge_index=edges[:, self._order], num_nodes=num_nodes)
        self._samplers = {
            size: KeyedNeighborSampler(data, [size]) for size in {*self.sizes}
        }
        ids: Any = (nodes.nonzero().view(-1) if mask else nodes).tolist()
        DataLoader.__init__(self, ids, collate_fn=self.sample, **kwargs)

    def sample(self, batch: Any) -> Any:
        """Returns (batch_size, n_id, adjs) of seeds, the last layer's edges first."""
        if self.is_sparse_tensor:
            return super().sample(batch)
        node, adjs = torch.as_tensor(batch), list[EdgeIndex]()
        count = len(node)
        for size in self.sizes:
            inputs: Any = NodeSamplerInput(input_id=None, node=node)
            inputs.key = fresh_seed()
            out: Any = self._samplers[size].sample_from_nodes(inputs)
            place = torch.argsort(out.col * len(out.node) + out.row, stable=True)
            ends = torch.stack([out.row[place], out.col[place]])
            edge = self._order[out.edge[place]] if self.return_e_id else None
            adjs.append(EdgeIndex(ends, edge, (len(out.node), len(node))))
            node = out.node
        found = count, node, adjs[0] if len(adjs) == 1 else adjs[::-1]
        return found if self.transform is None else self.transform(*found)


# seeds of a minibatch that weights are scaled for: at least, and at most with a batch_sampler
_MIN_SEEDS, _MAX_SEEDS = 1 << 13, 1 << 20
RULES = {"ladies": Ladies, "fastgcn": FastGCN}
_HOP = 0x4867


class DistLayerLoader(BulkLoading[Data], NodeLoader):
    r"""Loads minibatches with a fixed number of nodes drawn for each layer.

    Yields ordinary PyG batches, with the rule's `edge_weight` on their edges. The nodes of
    each layer stand apart (`n_id` may repeat), so that an unchanged model of as many layers
    computes the layered estimate; `trim_to_layer` works. Give the weights to a layer that
    takes them, as `GCNConv(..., normalize=False, add_self_loops=False)`. Loops that a rule
    adds (A + I) have `e_id` -1, and zeros for other edge attributes. An `edge_weight` of the
    data gives way to the rule's, which is float32.

    Bulks, keys, ranks, resuming and shares of `pdc.partition` are as in
    `DistNeighborLoader`; a batch is the same bit for bit on any number of ranks, blocks and
    copies, and at the owner or the requester.

    Price: no communication, but for shares; see `PartitionedLayerGraph`. A bulk is one pass
    of sparse algebra for each layer.

    Args:
        data: a Data, or a share of one.
        num_nodes_per_layer: nodes to draw for each layer, the seeds' first; -1 for all.
        rule: "ladies" ([Zou19], as its authors' code has it), "fastgcn" ([Chen18]), a name
            registered in the group "pyg_distcomm.sampling_rules", a `Rule`,
            as `Ladies("paper")`, or a function P -> P, as `lambda P: P.sqrt()` (see
            `UserRule`).
        input_nodes, input_time, transform, transform_sampler_output: as in PyG's
            `NodeLoader`.
        weights: None, "normalized" (as the authors of LADIES have it, and biased, most so
            where seeds are kept), "importance" or "debiased"; see `KeyedLayerSampler`.
        replace: whether a node may be drawn again in a layer.
        keep_batch: whether seeds are columns of every layer (default: as the rule says).
        weight_attr: the name of the edges' weights in data (default: all are 1).
        options, **kwargs: as in `DistNeighborLoader`; without `draws`.

    Raises:
        ValueError, TypeError: on all ranks, for what cannot be.

    [Tripathy24] (LADIES as algebra), [Zou19] Alg. 1.
    """

    _draws_itself = True

    def __init__(
        self,
        data: Any,
        num_nodes_per_layer: Sequence[int],
        rule: str | Rule | Callable[[BulkMatrix], BulkMatrix] = "ladies",
        input_nodes: Any = None,
        input_time: Any = None,
        transform: Callable | None = None,
        transform_sampler_output: Callable | None = None,
        *,
        weights: str | None = "normalized",
        replace: bool = False,
        keep_batch: bool | None = None,
        weight_attr: str | None = None,
        options: LoaderOptions | None = None,
        **kwargs: Any,
    ) -> None:
        data = self._begin_init(data, options, kwargs)
        with on_all_ranks(ranks_of(data)):
            chosen, graph, whole = _rule(rule), data, data
            numbers = layer_numbers(num_nodes_per_layer)
        drawing: dict[str, Any] = {"weights": weights, "replace": replace}
        drawing["keep_batch"] = keep_batch
        if self.is_partitioned:
            self.partitioned_source = source = PartitionedSource(
                data,
                self.options,
                kwargs,
                num_nodes_per_layer=numbers,
                weight_attr=weight_attr,
                rule=rule_name(chosen),
                own_transform=transform_sampler_output is not None,
                loader=type(self).__qualname__,
                **drawing,
            )
            whole = source.placeholder
            input_time = source.plain(input_time, "input_time")
            most = _most_rows(numbers, whole, kwargs)
            graph = _partitioned_graph(source, chosen, weight_attr, most)
        else:
            input_nodes = checked_seeds(data, input_nodes)
            drawing |= self.placement.sampling if self.placement else {}
            most = _most_rows(numbers, data, kwargs)
        local = not isinstance(graph, PartitionedLayerGraph)
        sampler = KeyedLayerSampler(
            graph,
            numbers,
            chosen,
            weight_attr=weight_attr if local else None,
            most_rows=most if local else None,
            seed=self._sampler_seed(kwargs),
            **drawing,
        )
        if self.is_partitioned:
            input_nodes = source.seeds(input_nodes, input_time, sampler)
        super().__init__(
            whole,
            sampler,
            input_nodes=input_nodes,
            input_time=input_time,
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            **kwargs,
        )
        self.data, inputs = data, self.input_data
        listed = [inputs.node, inputs.time, inputs.input_type]
        self._finish_init(listed, kwargs)

    def pyg_filter_fn(self, out: Any) -> Any:
        """Calls PyG's `filter_fn` for edges of which some are self-loops without an id."""
        real = copy.copy(out)
        real.edge = out.edge.clamp(min=0) if self.data.num_edges else None
        batch = super().pyg_filter_fn(real)
        loops = out.edge < 0
        for name, value in batch.items() if bool(loops.any()) else ():
            own = isinstance(value, Tensor) and value.dim() > 0
            if own and batch.is_edge_attr(name) and len(value) == len(loops):
                batch[name] = value.masked_fill(
                    loops.view(-1, *[1] * (value.dim() - 1)), 0
                )
        batch.e_id, batch.edge_weight = out.edge, out.edge_weight
        return batch


def _rule(rule: Any) -> Rule:
    if isinstance(rule, str) and rule not in RULES:
        more = plugins.registered(plugins.RULES)
        if rule not in more:
            raise ValueError(
                f"rule={rule!r} is not known; give one of {', '.join((*RULES, *more))}, a "
                "Rule, or a function P -> P"
            )
        rule = plugins.load(plugins.RULES, rule)
    if isinstance(rule, str):
        return RULES[rule]()
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, type) and issubclass(rule, Rule):
        raise TypeError(f"rule is a class; give a rule of it, as {rule.__name__}()")
    if not callable(rule):
        raise TypeError(f"rule must be a name, a Rule or a function, got {rule!r}")
    return UserRule(rule)


def _most_rows(
    numbers: Sequence[int], data: Any, dataloader: dict[str, Any]
) -> int | None:
    """Returns the most rows of a layer; None if arguments are wrong, which PyG will raise."""
    seeds, own = dataloader.get("batch_size", 1), dataloader.get("batch_sampler")
    if not (isinstance(data, Data) and isinstance(seeds, int)) or not data.num_nodes:
        return None
    if own is not None:  # the number of seeds is not known
        seeds = min(data.num_nodes, _MAX_SEEDS)
    return rows_of_layers(numbers, max(seeds, _MIN_SEEDS), data.num_nodes)


def _partitioned_graph(
    source: PartitionedSource,
    rule: Rule,
    weight_attr: str | None,
    most_rows: int | None,
) -> Any:
    """Returns the graph that the sampler of a share multiplies; collective."""
    if source.options.topology == "replicated":
        return gathered(source.data, [] if weight_attr is None else [weight_attr])
    block = read_block(source.data, source.sampling, weight_attr=weight_attr)
    if len(block.topology.graph.relations) != 1 or block.topology.node_types != [None]:
        raise TypeError(
            "layer-wise sampling takes a graph of one node type; for a HeteroData, see "
            "DistNeighborLoader"
        )
    return PartitionedLayerGraph(
        block,
        source.sampling,
        rule,
        sample_at=source.options.sample_at,
        most_rows=MOST_ROWS if most_rows is None else most_rows,
    )


class HGTLoader(DistNeighborLoader[HeteroData]):
    """Loads minibatches with a fixed number of nodes of each type per step ([Hu20] Alg. 1).

    As PyG's class, whose arguments it takes; torch-sparse is not needed. A node not yet
    drawn has the budget

        b_u = sum over edges u -> v, v drawn, of 1 / (in-edges of v of this type),

    and a step draws `num_samples` nodes of a type, without replacement, with chances as
    b_u^2; the batch has all edges between its nodes, the seeds first. PyG's class takes 50
    random in-edges of a node that has more, here all count.

    Ranks, bulks, keys and states are as in `DistNeighborLoader`; of a share, batches are
    those of the whole graph, bit for bit.

    Args:
        data: a HeteroData, or a share of one.
        num_samples: nodes to draw at each step, for each type or by type.
        input_nodes, is_sorted, transform, transform_sampler_output, filter_per_worker: as in
            PyG.
        options, **kwargs: as in `DistNeighborLoader`; without `draws`.

    Price: of a share, all in-edges of each node drawn, once per bulk and step.

    Raises:
        TypeError: for a graph without node types.
        ValueError: for numbers below 0, or an unknown node type; and if ranks ask for
            different numbers.
    """

    _draws_itself = True

    def __init__(
        self,
        data: Any,
        num_samples: Sequence[int] | dict[str, Sequence[int]],
        input_nodes: Any,
        is_sorted: bool = False,
        transform: Callable | None = None,
        transform_sampler_output: Callable | None = None,
        filter_per_worker: bool | None = None,
        *,
        options: LoaderOptions | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(data, HeteroData):
            raise TypeError(
                "HGTLoader takes a HeteroData, or a share of one, got "
                f"{type(data).__name__}; for one node type, see DistLayerLoader"
            )
        with on_all_ranks(ranks_of(data)):
            if kwargs.get("neighbor_sampler") is not None:
                raise ValueError(
                    "HGTLoader draws by budgets alone; leave neighbor_sampler out"
                )
            self.num_samples = _numbers(num_samples, list(data.node_types))
        super().__init__(
            data,
            [],
            input_nodes=input_nodes,
            is_sorted=is_sorted,
            subgraph_type="induced",
            transform=transform,
            transform_sampler_output=transform_sampler_output,
            filter_per_worker=filter_per_worker,
            options=options,
            **kwargs,
        )
        source = self.partitioned_source
        if source is not None:  # else ranks would wait for exchanges that never come
            check_alike({"num_samples": self.num_samples}, source.mesh.world)

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "num_samples": self.num_samples}

    def _sample(self, bulk: list[Any]) -> list[Any]:
        return super()._sample(self._draw_nodes(bulk))

    def _draw_nodes(self, bulk: Sequence[Any]) -> list[TypedSeeds]:
        """Draws the nodes of each minibatch; collective for a share."""
        sampler = self.node_sampler
        types, ends = sampler.node_types, sampler.ends
        budgets = [
            _Budgets(types, inputs.input_type, inputs.node, sampler.key_of(inputs))
            for inputs in bulk
        ]
        for hop in range(max((len(n) for n in self.num_samples.values()), default=0)):
            for number, (source, target) in enumerate(ends):
                nodes = [budget.fresh[types[target]] for budget in budgets]
                relation, places = sampler.in_edges(number, nodes)
                row = relation.row[:: relation.stride]
                for budget, place in zip(budgets, places, strict=True):
                    budget.add(types[source], relation.colptr, row, place)
            for budget in budgets:
                budget.step(hop, self.num_samples)
        return [
            TypedSeeds(inputs.input_id, b.node, inputs.input_type, inputs.time, b.key)
            for inputs, b in zip(bulk, budgets, strict=True)
        ]


class _Budgets:
    """Draws the nodes of one minibatch step by step, by the budgets of their neighbours.

    Attributes:
        node: by type, the nodes drawn, in order.
        fresh: by type, the nodes drawn at the last step.
    """

    def __init__(self, types: list[str], seeds: str, ids: Tensor, key: int) -> None:
        none = torch.empty(0, dtype=torch.int64)
        self.node = {name: ids.long() if name == seeds else none for name in types}
        self.fresh, self.key = dict(self.node), key
        self._known: dict[str, list[tuple[Tensor, Tensor]]] = {n: [] for n in types}

    def add(self, name: str, colptr: Tensor, row: Tensor, place: Tensor) -> None:
        """Adds the in-edges of rows `place` to the budgets of their sources, of type `name`."""
        begin, count = colptr[place], colptr[place + 1] - colptr[place]
        target, within, _ = spread(count)
        source = row[begin[target] + within].long()
        share = (1.0 / count.double())[target]
        self._known[name].append((source, share))

    def step(self, hop: int, numbers: dict[str, list[int]]) -> None:
        """Draws the nodes of a step."""
        for number, name in enumerate(self.node):
            count = numbers[name][hop] if hop < len(numbers[name]) else 0
            node, budget = self._budget(name)
            key = fold(self.key, _HOP, hop, number)
            drawn = node[keyed_sample(key, node, budget.square(), count)]
            self.fresh[name] = drawn
            self.node[name] = torch.cat([self.node[name], drawn])

    def _budget(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns the nodes with a budget, ascending, and their budgets, float64."""
        if not self._known[name]:
            return torch.empty(0, dtype=torch.int64), torch.empty(0).double()
        source, share = (
            torch.cat(part) for part in zip(*self._known[name], strict=True)
        )
        node, where = torch.unique(source, return_inverse=True)
        budget = torch.zeros(len(node), dtype=torch.float64)
        budget.index_add_(0, where, share)
        self._known[name] = [(node, budget)]
        left = ~torch.isin(node, self.node[name])
        return node[left], budget[left]


def _numbers(given: Any, types: list[str]) -> dict[str, list[int]]:
    """Returns the number of nodes of each type to draw at each step."""
    named = given if isinstance(given, dict) else dict.fromkeys(types, given)
    unknown = sorted(set(named) - set(types))
    if unknown:
        raise ValueError(f"num_samples has {unknown}; the node types are {types}")
    found = {name: [int(n) for n in named.get(name, ())] for name in types}
    if any(n < 0 for numbers in found.values() for n in numbers):
        raise ValueError(f"num_samples must be 0 or more, got {given!r}")
    return found
