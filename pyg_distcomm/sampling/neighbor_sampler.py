"""Samples neighbourhoods like PyG's NeighborSampler, with compiled kernels and keyed draws."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NeighborSampler,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import DataType, NumNeighbors, SubgraphType
from torch_geometric.sampler.neighbor_sampler import edge_sample

from pyg_distcomm import kernels
from pyg_distcomm.comm.failure import needing, watch_of
from pyg_distcomm.comm.random import fold, fresh_seed, keyed_choice, keyed_unit
from pyg_distcomm.comm.store import latest_mesh
from pyg_distcomm.kernels.sample_cpu import check_ids, check_seeds
from pyg_distcomm.kernels.sample_ops import Minibatch, Relation, Request, UnweightedNode
from pyg_distcomm.sampling.graph_source import SampledTopology, Source, read_topology

Output: TypeAlias = SamplerOutput | HeteroSamplerOutput


class KeyedNegatives(NegativeSampling):
    """Draws negative samples as a function of a key and of their order."""

    def __init__(self, like: NegativeSampling, key: int) -> None:
        super().__init__(like.mode, like.amount, like.src_weight, like.dst_weight)
        self.key, self.calls = key, 0

    def sample(
        self, num_samples: int, endpoint: Any = None, num_nodes: int | None = None
    ) -> Tensor:
        """Draws node ids, uniformly or by the weights of the endpoint."""
        weight = self.src_weight if endpoint == "src" else self.dst_weight
        key = fold(self.key, self.calls)
        self.calls += 1
        if weight is None:
            if num_nodes is None:
                raise ValueError(
                    f"cannot draw negatives at the endpoint '{endpoint}' without num_nodes"
                )
            return (keyed_unit(key, num_samples) * num_nodes).long()
        if num_nodes is not None and weight.numel() != num_nodes:
            raise ValueError(
                f"The 'weight' attribute in 'NegativeSampling' needs to match "
                f"the number of nodes {num_nodes} (got {weight.numel()})"
            )
        total = float(weight.sum(dtype=torch.float64))
        if not bool((weight >= 0).all()) or not 0 < total < math.inf:
            raise ValueError(
                f"'{endpoint}_weight' of the negative samples must be finite, not "
                "negative, and not all zero"
            )
        return keyed_choice(key, weight, num_samples)


@dataclass
class TypedSeeds:
    """Holds seeds of several node types, like a `NodeSamplerInput` of one."""

    input_id: Tensor  # the positions of the seeds in the loader's list
    node: dict[Any, Tensor]  # node ids, by node type
    input_type: Any  # the node type whose store gets PyG's attributes of seeds
    time: dict[Any, Tensor] | None = None  # the times of the seeds, by type, or None
    key: int | None = None  # the key of the draws, or None


DRAWS = NEIGHBOR, LABOR = "neighbor", "labor"
_CALL = 0x63616C6C  # folded into the keys of calls without a key


class KeyedNeighborSampler(NeighborSampler):
    """Samples neighbourhoods as `torch_geometric.sampler.NeighborSampler` does.

    Neither pyg-lib nor torch-sparse is needed. All draws of a call come from its key:
    the loaders of this package pass one for each minibatch, as an attribute `key` of
    the sampler's input. Without it the key is the seed and a counter of calls.

    Each node is expanded once, at the hop where it is first seen; edges of weight zero
    are never drawn; `num_sampled_nodes` and `num_sampled_edges` are in hop order. Edge
    ids are those of the data, so `edge_permutation` is None.

    Args:
        data: a Data, a HeteroData or a (FeatureStore, GraphStore).
        num_neighbors: in-edges to draw for each node at each hop, -1 for all; or a
            dictionary of such lists by edge type.
        subgraph_type, replace, disjoint, temporal_strategy, time_attr, weight_attr,
        is_sorted, share_memory, directed, sample_direction: as in PyG.
        draws: "neighbor", each node draws by itself; or "labor", the nodes of a
            hop draw the same sources where they can ([Balin23]): each draws those of
            its in-edges with the least -log(u_s) / w, u_s being one random number of
            source s. What a node draws has one distribution by both.
        seed: of all draws (default: taken from torch's generator).
        device: where to sample, and what is sampled lies; None for the host.
        pinned: whether a device reads the graph from pinned host memory.

    Raises:
        ValueError: for a fan-out below -1, bad ids, weights or times, unknown draws, and for
            "labor" with replacement.
    """

    def __init__(
        self,
        data: Source,
        num_neighbors: Any,
        subgraph_type: SubgraphType | str = "directional",
        replace: bool = False,
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        is_sorted: bool = False,
        share_memory: bool = False,
        directed: bool = True,
        sample_direction: str = "forward",
        *,
        draws: str = "neighbor",
        seed: int | None = None,
        device: torch.device | None = None,
        pinned: bool = False,
    ) -> None:
        # PyG's __init__ sorts the edges differently, and raises without pyg-lib if times or
        # weights are used; all attributes that it would set are set here
        BaseSampler.__init__(self)
        _check_options(sample_direction, temporal_strategy, time_attr, directed)
        self.draws = check_draws(draws, replace)
        self._device = device, pinned
        self.data_type = DataType.from_data(data)
        self.sample_direction = sample_direction
        self.time_attr, self.weight_attr = time_attr, weight_attr
        backward = sample_direction == "backward"
        names: Any = {"time_attr": time_attr, "weight_attr": weight_attr}
        how = {"is_sorted": is_sorted, "backward": backward}
        self._topology = self._read(data, **names, **how)
        # share_memory is ignored: forked workers share pages, others get a copy (below)
        self._draw: Any = None
        self._copy: SampledTopology | None = None  # the copy for other processes
        self._name_types(backward)
        self.perm = None
        self.num_neighbors = _fan_out_lists(num_neighbors)
        kind = subgraph_type if directed else SubgraphType.induced
        self.subgraph_type, self.keep_orig_edges = SubgraphType(kind), False
        self.replace, self.disjoint = replace, disjoint
        self.temporal_strategy = temporal_strategy
        self.seed = fresh_seed() if seed is None else seed
        self._calls = itertools.count()

    def _read(self, data: Source, **options: Any) -> SampledTopology:
        return read_topology(data, **options)

    def _name_types(self, backward: bool) -> None:
        """Sets the attributes of the graph that PyG's methods and its users read."""
        topology, graph = self._topology, self._topology.graph
        self.node_types = topology.node_types
        self.edge_types = topology.edge_types
        hetero = topology.edge_types != [None]
        clocks, relations = _named(self.node_types, graph.time), graph.relations
        edges = _named(self.edge_types, relations)
        node_time = {k: t for k, t in clocks.items() if t is not None}
        edge_time = {k: r.time for k, r in edges.items() if r.time is not None}
        weight = {k: r.weight for k, r in edges.items() if r.weight is not None}
        found = _named(self.node_types, graph.sizes), node_time, edge_time, weight
        names = "num_nodes", "node_time", "edge_time", "edge_weight"
        for name, values in zip(names, found, strict=True):
            setattr(self, name, (values or None) if hetero else values.get(None))
        if not hetero:
            self.colptr = relations[0].colptr
        self.to_backward_edge_type: dict[Any, Any] = {}
        if backward and hetero:
            self.to_backward_edge_type = {k: _reversed(k) for k in self.edge_types}
            self.to_restored_edge_type = {_reversed(k): k for k in self.edge_types}
            self.edge_types = list(self.to_restored_edge_type)
        if hetero:
            self.to_rel_type = {k: "__".join(k) for k in self.edge_types}
            self.to_edge_type = {v: k for k, v in self.to_rel_type.items()}

    @property
    def row(self) -> Tensor:
        """Returns the sources of the edges, by target, as PyG's sampler has them."""
        relation = self._topology.graph.relations[0]
        return relation.row[:: relation.stride]

    @property
    def is_hetero(self) -> bool:
        """Returns whether nodes or edges have types."""
        return self._topology.edge_types != [None]

    def describe(self) -> dict[str, Any]:
        """Returns all options that minibatches depend on, besides graph, seeds and keys."""
        fan_outs = [list(numbers) for numbers in self._fan_outs()]
        return {
            "num_neighbors": fan_outs if self.is_hetero else fan_outs[0],
            "replace": self.replace,
            "draws": self.draws,
            "subgraph_type": self.subgraph_type.value,
            "disjoint": self.disjoint,
            "weight_attr": self.weight_attr,
            "time_attr": self.time_attr,
            "temporal_strategy": self.temporal_strategy if self.is_temporal else None,
        }

    def key_of(self, inputs: Any) -> int:
        """Returns the key of a sampler's input; or the next of a counter."""
        key = getattr(inputs, "key", None)
        return self._next_key() if key is None else key

    def in_edges(
        self, number: int, nodes: Sequence[Tensor]
    ) -> tuple[Relation, Sequence[Tensor]]:
        """Returns a relation with all in-edges of nodes, and the rows of the nodes in it."""
        return self._topology.graph.relations[number], nodes

    @property
    def ends(self) -> list[tuple[int, int]]:
        """Returns the numbers of the source and target type of each relation."""
        return [(r.source, r.target) for r in self._topology.graph.relations]

    def sample_from_nodes(self, inputs: NodeSamplerInput) -> Output:
        """Samples around nodes; see `torch_geometric.sampler.BaseSampler`."""
        return self._sample_all([inputs])[0]

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> Output:
        """Samples around edges, and around negative ones, which are keyed as well."""
        return self._sample_all([inputs], neg_sampling)[0]

    def _sample_all(
        self, bulk: Sequence[Any], neg_sampling: NegativeSampling | None = None
    ) -> list[Output]:
        """Samples some minibatches: plans their requests, draws them, and completes outputs."""
        plans = [self._plan(inputs, neg_sampling) for inputs in bulk]
        drawn = self._draw_all([request for request, _ in plans])
        return [
            self._to_bidirectional(
                finish(self._output(found, inputs.input_type is not None))
            )
            for inputs, found, (_, finish) in zip(bulk, drawn, plans, strict=True)
        ]

    def _plan(
        self, inputs: Any, neg_sampling: NegativeSampling | None
    ) -> tuple[Request, Callable[[Output], Output]]:
        """Returns the request for a minibatch, and a function that completes its output."""
        key = self.key_of(inputs)
        if isinstance(inputs, EdgeSamplerInput):
            seed, time, finish = self._edge_seeds(inputs, key, neg_sampling)
            return self._request(seed, time, key), finish
        seed, time, kind = inputs.node, inputs.time, inputs.input_type
        if kind is not None and not isinstance(seed, dict):
            seed, time = {kind: seed}, None if time is None else {kind: time}

        def complete(out: Output) -> Output:
            out.metadata = inputs.input_id, inputs.time
            return out

        return self._request(seed, time, key), complete

    def _edge_seeds(
        self, inputs: EdgeSamplerInput, key: int, neg_sampling: NegativeSampling | None
    ) -> tuple[Any, Any, Callable[[Output], Output]]:
        """Returns the ends of seed edges, their times, and what adds labels to the output."""
        seeds: list[tuple[Any, Any]] = []
        blank = SimpleNamespace(
            batch=torch.empty(0).long() if inputs.input_type is None else {}
        )

        def record(seed: Any, time: Any) -> Any:
            seeds.append((seed, time))
            return blank

        negatives = neg_sampling  # one with a `sample` of its own is left unchanged
        if negatives and type(negatives).sample is NegativeSampling.sample:
            negatives = KeyedNegatives(negatives, fold(key, 1))
        edge_sample(
            inputs, record, self.num_nodes, self.disjoint, self.node_time, negatives
        )

        def finish(out: Output) -> Output:
            out.metadata = blank.metadata
            if self.disjoint:
                count = len(inputs.row)
                out.batch = tree_map_only(Tensor, lambda t: t % count, out.batch)
            return out

        return *seeds[0], finish

    def _to_bidirectional(self, out: Output) -> Output:
        """Adds reverse edges on the host: of parallel edges, a device keeps any."""
        if self.subgraph_type != SubgraphType.bidirectional:
            return out
        here, home = copy.copy(out), tree_leaves(out.node)[0].device
        for name in ("row", "col", "edge"):
            moved = tree_map_only(Tensor, Tensor.cpu, getattr(out, name))
            setattr(here, name, moved)
        both: Output = here.to_bidirectional(keep_orig_edges=self.keep_orig_edges)
        for name in ("row", "col", "edge", "orig_row", "orig_col"):
            moved = tree_map_only(Tensor, lambda t: t.to(home), getattr(both, name))
            setattr(both, name, moved)
        return both

    def _next_key(self) -> int:
        worker = torch.utils.data.get_worker_info()
        return fold(self.seed, _CALL, worker.seed if worker else 0, next(self._calls))

    def _sample(self, seed: Any, seed_time: Any = None, **_: Any) -> Output:
        """Draws around seeds; PyG's BidirectionalNeighborSampler calls it on its samplers."""
        drawn = self._draw_all([self._request(seed, seed_time, self._next_key())])
        return self._output(drawn[0], isinstance(seed, dict))

    def _request(self, seed: Any, seed_time: Any, key: int) -> Request:
        hetero, temporal = isinstance(seed, dict), self.is_temporal
        seeds = seed if hetero else {None: seed}
        times = seed_time if hetero or seed_time is None else {None: seed_time}
        index = {name: k for k, name in enumerate(self.node_types)}
        for name, ids in seeds.items():
            if name not in index:
                raise ValueError(
                    f"unknown node type {name!r}; there are {self.node_types}"
                )
            what = "seeds" if name is None else f"seeds of type {name!r}"
            size = self._topology.graph.sizes[index[name]]
            check_ids(check_seeds(ids), size, what, " nodes")
        return Request(
            seeds=tuple(
                (index[k], ids.long().contiguous()) for k, ids in seeds.items()
            ),
            fan_outs=self._fan_outs(),
            key=key,
            replace=self.replace,
            disjoint=self.disjoint,
            induced=self.subgraph_type == SubgraphType.induced,
            latest=temporal and self.temporal_strategy == "last",
            tree_time=self._tree_time(seeds, times) if temporal else None,
            labor=self.draws == LABOR,
        )

    def _draw_all(self, requests: Sequence[Request]) -> list[Minibatch]:
        """Draws minibatches from the graph."""
        if self._draw is None:
            graph = self._topology.graph
            held = [t for r in graph.relations for t in (r.colptr, r.row, r.weight)]
            with explaining_out_of_memory(*self._device, held):
                self._draw = kernels.neighbor_sampler(graph, *self._device)
        try:
            return [self._draw(request) for request in requests]
        except UnweightedNode as error:
            edge_type = self._topology.edge_types[error.relation]
            where = "" if edge_type is None else f"edge type {edge_type}: "
            raise ValueError(f"{where}{error}") from None

    def _fan_outs(self) -> tuple[tuple[int, ...], ...]:
        names = self.edge_types if self.is_hetero else None
        found = self._num_neighbors.get_values(names)
        if names is None and isinstance(found, dict):
            raise ValueError(
                "num_neighbors is a dictionary by edge type, but the edges of this graph "
                "have no types; give a list"
            )
        lists = [found] if names is None else [found[name] for name in names]
        for fan_out in itertools.chain.from_iterable(lists):
            try:
                whole = not isinstance(fan_out, bool) and int(fan_out) == fan_out
            except (TypeError, ValueError, OverflowError):
                whole = False
            if not whole or not -1 <= fan_out < 2**31:
                raise ValueError(
                    f"num_neighbors holds {fan_out}; give the number of neighbors to "
                    "draw at each hop, below 2^31, 0 for none, or -1 for all"
                )
        return tuple(tuple(int(k) for k in fan_outs) for fan_outs in lists)

    def _tree_time(
        self, seeds: dict[Any, Tensor], times: dict[Any, Tensor] | None
    ) -> Tensor:
        """Returns the time of each seed: as given, or that of its node."""
        clocks = self._topology.graph.time
        parts = []
        for name, ids in seeds.items():
            clock = clocks[self.node_types.index(name)]
            if times is not None and times.get(name) is not None:
                parts.append(times[name].cpu())
            elif clock is not None:
                parts.append(clock[ids.long()])
            else:
                raise ValueError(
                    f"the seeds{'' if name is None else f' of type {name!r}'} have no time, "
                    "and need one here; pass input_time (or edge_label_time)"
                )
        every = torch.cat(parts)
        if every.is_floating_point() and bool(every.isnan().any()):
            raise ValueError("the times of the seeds hold NaN: nothing comes before it")
        relations = self._topology.graph.relations
        found = [t for t in (*clocks, *(r.time for r in relations)) if t is not None]
        if any(time.is_floating_point() for time in found):
            return every.double().contiguous()
        if every.is_floating_point():
            # for an integer t, t <= x and t <= floor(x) are equivalent; times beyond int64
            # become its limits
            ends = torch.iinfo(torch.int64)
            whole = every.double().floor()
            late, early = whole >= 2.0**63, whole < -(2.0**63)
            every = whole.masked_fill(late | early, 0).long()
            every = every.masked_fill(late, ends.max).masked_fill(early, ends.min)
        return every.long().contiguous()

    def _output(self, found: Minibatch, hetero: bool) -> Output:
        dtype = self._topology.dtype
        if dtype != torch.int64:
            found.node = [t.to(dtype) for t in found.node]
            found.edge_index = [t.to(dtype) for t in found.edge_index]
        row, col = [e[0] for e in found.edge_index], [e[1] for e in found.edge_index]
        if self.sample_direction == "backward":
            row, col = col, row
        of_nodes: dict[str, Any] = {"node": found.node, "batch": found.tree}
        of_edges: dict[str, Any] = {"row": row, "col": col, "edge": found.edge}
        if self.subgraph_type != SubgraphType.induced:
            of_nodes["num_sampled_nodes"] = found.nodes_per_hop
            of_edges["num_sampled_edges"] = found.edges_per_hop
        if not hetero:
            both = of_nodes | of_edges
            alone = {k: None if v is None else v[0] for k, v in both.items()}
            return SamplerOutput(**alone)
        types = (self.node_types, of_nodes), (self._topology.edge_types, of_edges)
        by_type = {
            k: None if v is None else _named(names, v)
            for names, values in types
            for k, v in values.items()
        }
        return HeteroSamplerOutput(**by_type)

    def __getstate__(self) -> dict[str, Any]:
        """Copies the graph for a process that cannot share pages with this one.

        torch moves tensors that it sends to shared memory, while a kernel may be reading
        them, so a copy is sent. The copy is kept, since torch sends it after this returns.
        The lookup tables of the kernels are built again.
        """
        if self._copy is None:
            graph = self._topology.graph
            relations = tuple(
                replace(r, colptr=r.colptr.clone(), row=r.row.clone())
                for r in graph.relations
            )
            self._copy = replace(
                self._topology, graph=replace(graph, relations=relations)
            )
        return {**self.__dict__, "_draw": None, "_topology": self._copy}


def _fan_out_lists(given: Any) -> Any:
    """Returns fan-outs as PyG takes them; raises ValueError unless they are lists."""
    if isinstance(given, (Tensor, np.ndarray)) and given.ndim == 1:
        return given.tolist()
    lists = list(given.values()) if isinstance(given, dict) else [given]
    for one in lists:
        if not isinstance(one, (list, tuple, NumNeighbors)):
            raise ValueError(
                "num_neighbors must be a list with a number for each hop, or a dictionary "
                f"of such lists by edge type, got {one!r}"
            )
    return given


def _check_options(
    sample_direction: str, temporal_strategy: str, time_attr: str | None, directed: bool
) -> None:
    if sample_direction not in ("forward", "backward"):
        raise ValueError(
            f"sample_direction must be 'forward' or 'backward', got {sample_direction!r}"
        )
    if sample_direction == "backward" and time_attr is not None:
        raise NotImplementedError(
            "Temporal Sampling not yet supported for backward sampling"
        )
    if temporal_strategy not in ("uniform", "last"):
        raise ValueError(
            f"temporal_strategy must be 'uniform' or 'last', got {temporal_strategy!r}"
        )
    if not directed:
        warnings.warn(
            "The usage of the 'directed' argument is deprecated. Use "
            "`subgraph_type='induced'` instead.",
            stacklevel=4,
        )


def check_draws(draws: str, replace: bool) -> str:
    """Returns `draws`; raises ValueError if it is unknown or does not fit `replace`."""
    if draws not in DRAWS:
        raise ValueError(f"draws must be one of {DRAWS}, got {draws!r}")
    if draws == LABOR and replace:
        raise ValueError(
            "got draws='labor', which draws without replacement; leave replace out, or take "
            "draws='neighbor'"
        )
    return draws


def _reversed(edge_type: Any) -> Any:
    source, name, target = edge_type
    return target, name, source


def _named(names: list[Any], values: Sequence[Any]) -> dict[Any, Any]:
    return dict(zip(names, values, strict=True))


def explaining_out_of_memory(
    device: torch.device | None, pinned: bool, held: Sequence[Tensor | None]
) -> AbstractContextManager[None]:
    """Raises, if a graph does not fit on a device, with the bytes it needs and what to do."""
    if device is None or pinned:
        return nullcontext()
    size = sum(t.nbytes for t in held if t is not None)
    less = "graph_on='pinned', which the device reads in host memory"
    about = "the graph of a loader", lambda: size, watch_of(latest_mesh()), device
    return needing(*about, instead=(less,))
