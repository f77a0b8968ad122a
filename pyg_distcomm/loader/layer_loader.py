"""Loads minibatches with a fixed number of nodes per layer or step: LADIES, FastGCN, HGT."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader

from pyg_distcomm import plugins
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.random import fold, fresh_seed, keyed_sample
from pyg_distcomm.kernels.sample_ops import spread
from pyg_distcomm.loader.base import BulkLoading
from pyg_distcomm.loader.neighbor_loader import DistNeighborLoader
from pyg_distcomm.loader.options import (
    LoaderOptions,
    checked_seeds,
    ranks_of,
    refuse_draws,
)
from pyg_distcomm.loader.partitioned_source import PartitionedSource
from pyg_distcomm.sampling.algebra import BulkMatrix
from pyg_distcomm.sampling.graph_block import gathered, read_block
from pyg_distcomm.sampling.layer_graph import MOST_ROWS, layer_numbers, rows_of_layers
from pyg_distcomm.sampling.layer_sampler import KeyedLayerSampler
from pyg_distcomm.sampling.neighbor_sampler import TypedSeeds
from pyg_distcomm.sampling.partitioned import PartitionedLayerGraph
from pyg_distcomm.sampling.rules import FastGCN, Ladies, Rule, UserRule, rule_name

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
            refuse_draws(self.options, type(self).__name__)
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
        local, seed = not isinstance(graph, PartitionedLayerGraph), self.options.seed
        sampler = KeyedLayerSampler(
            graph,
            numbers,
            chosen,
            weight_attr=weight_attr if local else None,
            most_rows=most if local else None,
            seed=fresh_seed(kwargs.get("generator")) if seed is None else seed,
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
            refuse_draws(options, "HGTLoader")
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

    def _sample(self, inputs: Any) -> Any:
        return super()._sample(self._draw_nodes([inputs])[0])

    def _sample_bulk(self, inputs: list[Any]) -> list[Any]:
        return super()._sample_bulk(self._draw_nodes(inputs))

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
