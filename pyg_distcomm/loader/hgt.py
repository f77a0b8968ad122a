"""Loads minibatches of typed nodes that are drawn by their budgets, as HGT does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.random import fold, keyed_race
from pyg_distcomm.loader.neighbor_loader import DistNeighborLoader
from pyg_distcomm.loader.partitioned_source import alike, ranks_of
from pyg_distcomm.sampling.neighbor_sampler import TypedSeeds

_HOP = 0x4867


class HGTLoader(DistNeighborLoader):
    """Loads as many nodes of each type at each step as asked for ([Hu20] Alg. 1).

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
        **kwargs: those of `torch.utils.data.DataLoader`, and bulk_size, seed, even_batches,
            prefetch, split, topology, replication, sample_at, features and embedding of
            `DistNeighborLoader`.

    Price: of a share, all in-edges of each node drawn, once a bulk and step.

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
        **kwargs: Any,
    ) -> None:
        if not isinstance(data, HeteroData):
            raise TypeError(
                "HGTLoader takes a HeteroData, or a share of one, got "
                f"{type(data).__name__}; for one node type, see DistLayerLoader"
            )
        with alike(ranks_of(data)):
            given = [
                name
                for name in ("neighbor_sampler", "backend", "draws", "rule")
                if kwargs.get(name)
            ]
            if given:
                raise ValueError(
                    f"HGTLoader draws by budgets alone; leave {', '.join(given)} out"
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
            **kwargs,
        )
        if self.spread is not None:  # or some would wait for the exchanges of others
            every = collectives.all_gather_object(
                repr(self.num_samples), self.spread.mesh.world
            )
            if len(set(every)) > 1:
                raise ValueError(
                    f"num_samples differs by rank: {every}; give all the same"
                )

    def _describe(self) -> dict[str, Any]:
        return {**super()._describe(), "num_samples": self.num_samples}

    def _sample(self, inputs: Any) -> Any:
        return super()._sample(self._drawn([inputs])[0])

    def _sample_bulk(self, inputs: list[Any]) -> list[Any]:
        return super()._sample_bulk(self._drawn(inputs))

    def _drawn(self, bulk: Sequence[Any]) -> list[TypedSeeds]:
        """Returns the nodes of each minibatch; of a share, collective."""
        sampler = self.node_sampler
        types, ends = sampler.node_types, sampler.ends
        drawings = [
            _Budgets(types, inputs.input_type, inputs.node, sampler.key_of(inputs))
            for inputs in bulk
        ]
        for hop in range(max((len(n) for n in self.num_samples.values()), default=0)):
            for number, (source, target) in enumerate(ends):
                nodes = [d.fresh[types[target]] for d in drawings]
                relation, places = sampler.in_edges(number, nodes)
                row = relation.row[:: relation.stride]
                for drawing, place in zip(drawings, places, strict=True):
                    drawing.add(types[source], relation.colptr, row, place)
            for drawing in drawings:
                drawing.step(hop, self.num_samples)
        return [
            TypedSeeds(inputs.input_id, d.node, inputs.input_type, inputs.time, d.key)
            for inputs, d in zip(bulk, drawings, strict=True)
        ]


class _Budgets:
    """Holds the nodes of one minibatch while it grows, and the budgets of others.

    Attributes:
        node: by type, the nodes drawn, in order.
        fresh: by type, those of the last step.
    """

    def __init__(self, types: list[str], seeds: str, ids: Tensor, key: int) -> None:
        none = torch.empty(0, dtype=torch.int64)
        self.node = {name: ids.long() if name == seeds else none for name in types}
        self.fresh, self.key = dict(self.node), key
        self._known: dict[str, list[tuple[Tensor, Tensor]]] = {n: [] for n in types}

    def add(self, name: str, colptr: Tensor, row: Tensor, place: Tensor) -> None:
        """Adds to the budgets of the sources, of type `name`, of in-edges of some rows."""
        begin, count = colptr[place], colptr[place + 1] - colptr[place]
        within = torch.arange(int(count.sum())) - torch.repeat_interleave(
            count.cumsum(0) - count, count
        )
        source = row[torch.repeat_interleave(begin, count) + within].long()
        share = torch.repeat_interleave(1.0 / count.double(), count)
        self._known[name].append((source, share))

    def step(self, hop: int, numbers: dict[str, list[int]]) -> None:
        """Draws the nodes of a step."""
        for number, name in enumerate(self.node):
            asked = numbers[name][hop] if hop < len(numbers[name]) else 0
            node, budget = self._budget(name)
            key = fold(self.key, _HOP, hop, number)
            drawn = node[keyed_race(key, node, budget.square(), asked)]
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
    """Returns how many nodes of each type to draw at each step."""
    named = given if isinstance(given, dict) else dict.fromkeys(types, given)
    unknown = sorted(set(named) - set(types))
    if unknown:
        raise ValueError(f"num_samples has {unknown}; the node types are {types}")
    found = {name: [int(n) for n in named.get(name, ())] for name in types}
    if any(n < 0 for numbers in found.values() for n in numbers):
        raise ValueError(f"num_samples must be 0 or more, got {given!r}")
    return found
