"""Draws seeds by class, with replacement, as one list that all ranks share out."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import ImbalancedSampler as ByClass

from pyg_distcomm.comm.random import keyed_choice
from pyg_distcomm.tensor.dist_tensor import DistTensor


class ImbalancedSampler(ByClass):
    """Draws seeds with a chance of 1 / (size of their class), as PyG's sampler does.

    Given as `sampler` to a loader of this package, it draws the list of an epoch as a
    function of (seed, epoch): the same on all ranks, which share out its batches, and
    again where a state resumes. To any other loader it is PyG's own, with torch's generator.

    Args:
        dataset: a Data, a share of one from `pdc.partition` (collective), a list or data set
            of graphs, or classes [n], int64.
        input_nodes: ids or a mask of the seeds of the loader; of a share, also its masks.
        num_samples: draws of an epoch (default: as many as there are seeds).

    Price: of a share, the classes of all nodes once, on every rank.
    """

    def __init__(
        self,
        dataset: Any,
        input_nodes: Any = None,
        num_samples: int | None = None,
    ) -> None:
        spread = isinstance(dataset, Data) and isinstance(dataset.get("y"), DistTensor)
        classes = dataset.y if spread else dataset
        super().__init__(_whole(classes), _whole(input_nodes), num_samples)


def _whole(values: Any) -> Any:
    """Returns rows of all ranks; collective if they are spread."""
    return values.full_tensor() if isinstance(values, DistTensor) else values


def check_drawn(sampler: ByClass, count: int) -> None:
    """Refuses a sampler of other seeds than a loader has."""
    if len(sampler.weights) != count:
        raise ValueError(
            f"the ImbalancedSampler draws from {len(sampler.weights)} seeds, and the loader "
            f"has {count}; give both the same input_nodes"
        )


def drawn_positions(sampler: ByClass, key: int) -> Tensor:
    """Returns the positions of the seeds of an epoch, by a key; the host draws them."""
    return keyed_choice(key, sampler.weights.cpu(), sampler.num_samples)
