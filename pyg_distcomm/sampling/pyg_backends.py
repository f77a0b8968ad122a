"""Samples with PyG's own compiled libraries, pyg-lib or torch-sparse, as a backend."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch_geometric.typing as installed
from torch import Tensor
from torch_geometric.sampler import HeteroSamplerOutput, NeighborSampler, SamplerOutput
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.utils import remap_keys

from pyg_distcomm.sampling.neighbor_sampler import NEIGHBOR

BACKENDS = ("pyg-lib", "torch-sparse")


class LibrarySampler(NeighborSampler):
    """Samples with PyG's own code, and describes the options that minibatches depend on."""

    backend = ""

    def describe(self) -> dict[str, Any]:
        """Returns all options that minibatches depend on, besides graph, seeds and draws."""
        weights = self.edge_weight
        types = self.edge_types if self.is_hetero else None
        return {
            "backend": self.backend,
            "draws": NEIGHBOR,
            "num_neighbors": self.num_neighbors.get_mapped_values(types),
            "replace": self.replace,
            "subgraph_type": self.subgraph_type.value,
            "disjoint": self.disjoint,
            "weighted": weights is not None,
            "temporal_strategy": self.temporal_strategy if self.is_temporal else None,
        }


class PygLibSampler(LibrarySampler):
    """Samples as PyG does by pyg-lib; refuses induced subgraphs, as PyG does there."""

    backend = "pyg-lib"

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        subgraph_type: SubgraphType | str = SubgraphType.directional,
        directed: bool = True,
        **kwargs: Any,
    ) -> None:
        if not directed or SubgraphType(subgraph_type) == SubgraphType.induced:
            raise ValueError(
                "got subgraph_type='induced' (or directed=False), which pyg-lib does not "
                "support; leave it out, or take backend='torch-sparse' or none"
            )
        super().__init__(data, num_neighbors, subgraph_type, **kwargs)

    def _sample(
        self, seed: Any, seed_time: Any = None, **kwargs: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        out = super()._sample(seed, seed_time, **kwargs)
        if self.disjoint:
            return out
        if not isinstance(seed, dict):
            out.row = _placed(out.row, seed, out.node, self.row, out.edge)
            return out
        for kind, row in out.row.items():
            given, every = seed.get(kind[0]), self.row_dict[self.to_rel_type[kind]]
            if row is not None and given is not None:
                drawn = out.node[kind[0]], every, out.edge[kind]
                out.row[kind] = _placed(row, given, *drawn)
        return out


class TorchSparseSampler(LibrarySampler):
    """Samples as PyG does by torch-sparse, where pyg-lib is installed as well.

    Refuses weights of edges, and disjoint trees, which torch-sparse knows nothing of.
    """

    backend = "torch-sparse"

    def __init__(
        self,
        data: Any,
        num_neighbors: Any,
        disjoint: bool = False,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if weight_attr is not None:
            raise ValueError(
                f"got weight_attr={weight_attr!r}, but torch-sparse draws neighbors "
                "uniformly; leave it out, or take backend='pyg-lib' or none"
            )
        if disjoint or time_attr is not None:
            raise ValueError(
                "got disjoint=True or time_attr, which torch-sparse does not support; leave "
                "them out, or take backend='pyg-lib' or none"
            )
        super().__init__(data, num_neighbors, **kwargs)

    def _sample(
        self, seed: Any, seed_time: Any = None, **kwargs: Any
    ) -> SamplerOutput | HeteroSamplerOutput:
        directed = self.subgraph_type != SubgraphType.induced
        if not isinstance(seed, dict):
            node, row, col, edge = torch.ops.torch_sparse.neighbor_sample(
                self.colptr,
                self.row,
                seed,
                self.num_neighbors.get_mapped_values(),
                self.replace,
                directed,
            )
            row, col = self._turned(row, col)
            return SamplerOutput(node, row, col, edge)
        node, row, col, edge = torch.ops.torch_sparse.hetero_neighbor_sample(
            self.node_types,
            self.edge_types,
            self.colptr_dict,
            self.row_dict,
            seed,
            self.num_neighbors.get_mapped_values(self.edge_types),
            self.num_neighbors.num_hops,
            self.replace,
            directed,
        )
        parts = [remap_keys(part, self.to_edge_type) for part in (row, col, edge)]
        row, col = self._turned(*parts[:2])
        parts = [row, col, parts[2]]
        if self.sample_direction == "backward":
            parts = [remap_keys(part, self.to_restored_edge_type) for part in parts]
        return HeteroSamplerOutput(node, *parts)

    def _turned(self, row: Any, col: Any) -> tuple[Any, Any]:
        return (col, row) if self.sample_direction == "backward" else (row, col)


def _placed(
    ids: Tensor, seed: Tensor, node: Tensor, row: Tensor, edge: Tensor
) -> Tensor:
    """Returns the local ids `[e]` of the sources of edges, corrected for repeated seeds.

    pyg-lib 0.9 lists a seed as often as it is given, but numbers it once, so that the local
    ids `ids` of later nodes are too small by the number of repeats. `edge` are the ids of
    the drawn edges, and `row` the sources of all edges.
    """
    distinct, inverse = seed.unique(return_inverse=True)
    if len(distinct) == len(seed) or torch.equal(node[ids], row[edge]):
        return ids
    every = torch.arange(len(node), dtype=ids.dtype)
    first = every.new_full((len(distinct),), len(node))
    first.scatter_reduce_(0, inverse, every[: len(seed)], "amin")
    return torch.cat([first.sort().values, every[len(seed) :]])[ids]


def library_sampler(backend: str, data: Any, num_neighbors: Any, **options: Any) -> Any:
    """Returns a sampler of PyG's that draws by one of its compiled libraries.

    Takes the arguments of `torch_geometric.sampler.NeighborSampler`. Raises ValueError if there
    is no such backend, it is not installed, or it cannot draw what is asked for.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend must be 'pyg-lib', 'torch-sparse' or None, got {backend!r}"
        )
    draws = options.pop("draws", NEIGHBOR)
    if draws != NEIGHBOR:
        raise ValueError(
            f"backend={backend!r} draws for each node by itself, not by draws={draws!r}; "
            "leave one out"
        )
    found = {
        "pyg-lib": installed.WITH_PYG_LIB,
        "torch-sparse": installed.WITH_TORCH_SPARSE,
    }
    if not found[backend]:
        raise ValueError(
            f"backend={backend!r} needs the package {backend}, which is not installed here "
            "(see PyG's installation guide); without backend, neither is needed"
        )
    warnings.warn(
        f"{backend} draws from a generator of its own: minibatches are not those of other "
        "runs, ranks or bulk sizes, and a state resumes an epoch with other draws",
        stacklevel=5,
    )
    kind = PygLibSampler if backend == "pyg-lib" else TorchSparseSampler
    return kind(data, num_neighbors, **options)
