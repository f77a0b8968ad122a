"""Loads the subgraphs that GraphSAINT samples, with its normalisation of nodes and edges."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NodeSamplerInput
from tqdm import tqdm

from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.random import fold, fresh_seed, keyed_unit
from pyg_distcomm.loader.notes import World
from pyg_distcomm.loader.options import LoaderOptions, ranks_of
from pyg_distcomm.loader.subgraphs import SubgraphLoading
from pyg_distcomm.partition.atomic import keep_file, read_whole

_NORMS, _STEP = 0x6E6F726D, 0x57E9


class SampledSteps:
    """Lists the steps of an epoch, which a loader takes instead of seeds."""

    time = input_type = None

    def __init__(self, loader: GraphSAINTSampler) -> None:
        self._loader, self._steps = loader, loader.num_steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: Any) -> NodeSamplerInput:
        """Draws the nodes of a step by a fresh key."""
        return self._loader.drawn(fresh_seed())

    def digest(self) -> str:
        """Returns a text that identifies the sampler and its arguments."""
        return repr(self._loader)


class GraphSAINTSampler(SubgraphLoading[Data]):
    """Loads the subgraphs that drawn nodes induce ([Zeng20]); base of the classes that draw.

    Takes the arguments of PyG's classes, and draws in distribution what they draw; neither
    torch-sparse nor pyg-lib is needed. The nodes of a step are a function of (seed, epoch,
    number of the step), and step t goes to rank t mod P: `num_steps` is of all ranks
    together. A batch has `n_id` and `e_id`.

    With `sample_coverage` batches have `node_norm` and `edge_norm`, estimated once from
    subgraphs until nodes were drawn `sample_coverage` times each, on the mean:

        node_norm_v = (subgraphs / times v was drawn) / n
        edge_norm_e = (times its source was drawn) / (times e was in a subgraph)

    the second at most 1e4, and 0.1 for edges never met. Every rank estimates the same.

    A share of a graph is drawn from by its edges, so that these are gathered on every rank,
    as `topology="replicated"` says, and rows are fetched from their owners.

    Args:
        data: a Data, or a share of one.
        batch_size: how many nodes, edges or walks are drawn for a subgraph.
        num_steps: subgraphs of an epoch.
        sample_coverage: see above; 0 for no norms.
        save_dir: where norms are kept for another run.
        log: whether to show how far the norms are, on rank 0.
        **kwargs: as in `RandomNodeLoader`.

    Price: of a share, 16 bytes per edge once on every rank; see `DistFeatureStore` for rows.

    Raises:
        ValueError: for a topology other than "replicated", data that has norms already,
            numbers that cannot be, or that differ by rank for a share.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        num_steps: int = 1,
        sample_coverage: int = 0,
        save_dir: str | None = None,
        log: bool = True,
        **kwargs: Any,
    ) -> None:
        world = ranks_of(data)
        numbers = {
            "batch_size": batch_size,
            "num_steps": num_steps,
            "sample_coverage": sample_coverage,
        }
        with on_all_ranks(world):
            for name, value in numbers.items():
                least = int(name == "batch_size")
                if isinstance(value, bool) or not isinstance(value, Integral):
                    raise TypeError(f"{name} must be a whole number, got {value!r}")
                if value < least:
                    raise ValueError(f"{name} must be {least} or more, got {value}")
            if "node_norm" in data or "edge_norm" in data:
                raise ValueError(
                    "data has 'node_norm' or 'edge_norm', which this loader sets; rename them"
                )
            options = LoaderOptions.checked(
                type(self).__qualname__, kwargs.pop("options", None), kwargs
            )
            if options.topology == "partitioned":
                raise ValueError(
                    "topology='partitioned': nodes are drawn by all edges of the graph, so "
                    "that every rank needs them; leave topology out, or use "
                    "ShaDowKHopSampler or ClusterLoader"
                )
        if world is not None:
            check_alike({"numbers": numbers}, world)
            options = replace(options, topology="replicated")
        self.num_steps, self.sample_coverage = num_steps, sample_coverage
        self.save_dir, self.log = save_dir, log
        self._batch_size = batch_size
        self.N, self.E = int(data.num_nodes), int(data.num_edges)
        super().__init__(
            data, [], SampledSteps(self), batch_size=1, options=options, **kwargs
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._batch_size}, {self.num_steps})"

    def drawn(self, key: int) -> NodeSamplerInput:
        """Draws the nodes of a subgraph, as a sampler's input."""
        node = self.sample_nodes(self._batch_size, key).unique()
        inputs = NodeSamplerInput(input_id=node, node=node)
        inputs.key = key
        return inputs

    def sample_nodes(self, batch_size: int, key: int) -> Tensor:
        """Draws nodes [any], some of them more than once, by a key.

        Args:
            batch_size: how many, in the units of the class.
            key: of the draws; see `pyg_distcomm.comm.random`.
        """
        raise NotImplementedError(
            "GraphSAINTSampler is a base class; use GraphSAINTNodeSampler, "
            "GraphSAINTEdgeSampler or GraphSAINTRandomWalkSampler"
        )

    def _seeds_of(self, index: Any) -> Any:
        return self.drawn(index.key)

    def postprocess(self, data: Any, padding: bool | None) -> Any:
        if self.sample_coverage > 0:
            data.node_norm = self._rows("node_norm", data.n_id)
            data.edge_norm = self._rows("edge_norm", data.e_id)
        return super().postprocess(data, padding)

    def _rows(self, name: str, ids: Tensor) -> Tensor:
        values: Tensor = getattr(self, name)
        return (
            values[ids]
            if self.placement is None
            else self.placement.take(name, values, ids)
        )

    # The graph as the sampler holds it: edges by target, then by id -------------------

    @cached_property
    def source(self) -> Tensor:
        """The sources of the edges [E], by target."""
        return self.node_sampler.row.long()

    @cached_property
    def target(self) -> Tensor:
        """The targets of the edges [E], ascending."""
        return torch.repeat_interleave(self.node_sampler.colptr.diff())

    @cached_property
    def out_edges(self) -> tuple[Tensor, Tensor]:
        """Where the out-edges of each node begin [N + 1], and their targets [E]."""
        ptr = torch.zeros(self.N + 1, dtype=torch.int64)
        ptr[1:] = torch.bincount(self.source, minlength=self.N).cumsum(0)
        return ptr, self.target[torch.argsort(self.source, stable=True)]

    # Norms ---------------------------------------------------------------------------

    @property
    def node_norm(self) -> Tensor:
        """The norms of the nodes [N], float32."""
        return self._norms[0]

    @property
    def edge_norm(self) -> Tensor:
        """The norms of the edges [E], by id, float32."""
        return self._norms[1]

    @property
    def _filename(self) -> str:
        return f"{type(self).__name__.lower()}_{self.sample_coverage}.pt"

    @cached_property
    def _norms(self) -> tuple[Tensor, Tensor]:
        path = Path(self.save_dir or "", self._filename)
        if self.save_dir is not None and path.exists():
            node_norm, edge_norm = read_whole(path)
            if (len(node_norm), len(edge_norm)) != (self.N, self.E):
                raise ValueError(
                    f"{path} holds norms of {len(node_norm)} nodes and {len(edge_norm)} "
                    f"edges, and the graph has {self.N} and {self.E}; remove it"
                )
            return node_norm, edge_norm
        found = self._estimated()
        if self.save_dir is not None and World.now().rank == 0:
            keep_file(found, path, "norms of GraphSAINT")
        return found

    def _estimated(self) -> tuple[Tensor, Tensor]:
        self._sharding()  # all ranks have one seed from here on
        key = fold(self._agreed_seed(), _NORMS)
        drawn, met = torch.zeros(self.N), torch.zeros(self.E)
        wanted, subgraphs, nodes = self.N * self.sample_coverage, 0, 0
        quiet = not self.log or World.now().rank > 0
        bar = tqdm(total=wanted, desc="GraphSAINT norms", disable=quiet, leave=False)
        with bar:
            while nodes < wanted:
                for step in range(subgraphs, subgraphs + self.num_steps):
                    out = self._sample(self.drawn(fold(key, step)))
                    drawn[out.node.cpu()] += 1
                    met[out.edge.cpu()] += 1
                    nodes += len(out.node)
                    bar.update(len(out.node))
                subgraphs += self.num_steps
        of_source = torch.empty(self.E)
        of_source[self._edge_ids] = drawn[self.source]
        edge_norm = (of_source / met).clamp_(0, 1e4)
        edge_norm[edge_norm.isnan()] = 0.1
        drawn[drawn == 0] = 0.1
        return subgraphs / drawn / self.N, edge_norm

    @property
    def _edge_ids(self) -> Tensor:
        relation = self.node_sampler._topology.graph.relations[0]
        if relation.stride == 1:
            return torch.arange(self.E)
        ids: Tensor = relation.row[1::2].long()
        return ids


class GraphSAINTNodeSampler(GraphSAINTSampler):
    """Draws the sources of `batch_size` random edges; see `GraphSAINTSampler`."""

    def sample_nodes(self, batch_size: int, key: int) -> Tensor:
        """Draws nodes with chances as their out-degrees, with replacement."""
        return self.source[(keyed_unit(key, batch_size) * self.E).long()]


class GraphSAINTEdgeSampler(GraphSAINTSampler):
    """Draws both ends of `batch_size` edges; see `GraphSAINTSampler`.

    Without replacement, an edge from u to v with weight indegree(u) + outdegree(v), as PyG's
    class draws; the weight of [Zeng20] is 1 / degree(u) + 1 / degree(v).
    """

    @cached_property
    def _weight(self) -> Tensor:
        into = torch.bincount(self.target, minlength=self.N)
        out = torch.bincount(self.source, minlength=self.N)
        return (into[self.source] + out[self.target]).double()

    def sample_nodes(self, batch_size: int, key: int) -> Tensor:
        """Draws edges by weight, by exponential keys, and returns their ends."""
        clock = -keyed_unit(key, self.E).log() / (self._weight + 1e-10)
        edge = clock.topk(min(batch_size, self.E), largest=False).indices
        return torch.cat([self.source[edge], self.target[edge]])


class GraphSAINTRandomWalkSampler(GraphSAINTSampler):
    """Draws the nodes of `batch_size` random walks; see `GraphSAINTSampler`.

    A walk starts at any node, follows out-edges, and stays where there are none.

    Args:
        data, batch_size, num_steps, sample_coverage, save_dir, log, **kwargs: as there.
        walk_length: how many steps a walk has.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        walk_length: int,
        num_steps: int = 1,
        sample_coverage: int = 0,
        save_dir: str | None = None,
        log: bool = True,
        **kwargs: Any,
    ) -> None:
        self.walk_length = walk_length
        super().__init__(
            data, batch_size, num_steps, sample_coverage, save_dir, log, **kwargs
        )

    def __repr__(self) -> str:
        size, steps = self._batch_size, self.num_steps
        return f"{type(self).__name__}({size}, {self.walk_length}, {steps})"

    @property
    def _filename(self) -> str:
        name = type(self).__name__.lower()
        return f"{name}_{self.walk_length}_{self.sample_coverage}.pt"

    def sample_nodes(self, batch_size: int, key: int) -> Tensor:
        """Draws the nodes of walks, with their starts."""
        ptr, target = self.out_edges
        node = (keyed_unit(key, batch_size) * self.N).long()
        found = [node]
        for step in range(self.walk_length):
            begin, degree = ptr[node], ptr[node + 1] - ptr[node]
            unit = keyed_unit(fold(key, _STEP, step), batch_size)
            place = begin + (unit * degree).long()
            ends = target[place.clamp(max=max(self.E - 1, 0))] if self.E else node
            node = torch.where(degree > 0, ends, node)
            found.append(node)
        return torch.cat(found)
