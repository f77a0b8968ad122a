"""Edges as cutters take them, and what each node adds to the load of its part."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

SLACK = 2.0  # a soft limit is this many times looser than the hard one


def check_edge_index(edge_index: Tensor, num_nodes: int) -> None:
    """Raises unless edge_index is [2, num_edges] integers within 0 .. num_nodes - 1."""
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"edge_index must be a Tensor [2, num_edges], got {type(edge_index)}"
        )
    _check_integers(edge_index)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"edge_index must have shape [2, num_edges], got {list(edge_index.shape)}"
        )
    if num_nodes < 0:
        raise ValueError(f"num_nodes must not be negative, got {num_nodes}")
    if edge_index.size(1) == 0:
        return
    low, high = (int(value) for value in torch.aminmax(plain_edges(edge_index)))
    if low < 0:
        raise ValueError(f"edge_index has the negative node id {low}")
    if high >= num_nodes:
        raise ValueError(
            f"edge_index names node {high}, but the graph has {num_nodes} nodes "
            f"(0 .. {num_nodes - 1}); set data.num_nodes if there are more"
        )


def plain_edges(edge_index: Tensor) -> Tensor:
    """Strips an edge_index of its subclass and its gradient."""
    return edge_index.detach().as_subclass(Tensor)


def train_vector(train_mask: Tensor | None, num_nodes: int) -> np.ndarray:
    """Gives 1 for a train node and 0 for another: int64 [num_nodes]."""
    if train_mask is None:
        return np.zeros(num_nodes, np.int64)
    if train_mask.dtype != torch.bool or list(train_mask.shape) != [num_nodes]:
        raise ValueError(
            f"train_mask must be bool [{num_nodes}], one entry per node, got "
            f"{train_mask.dtype} {list(train_mask.shape)}"
        )
    return plain_edges(train_mask).cpu().numpy().astype(np.int64)


def node_weights(edge_index: Tensor, train: np.ndarray) -> np.ndarray:
    """Gives [n, 3]: what each node adds to the nodes, in-edges and train nodes."""
    target = plain_edges(edge_index[1]).cpu()
    in_degree = torch.bincount(target, minlength=train.size).numpy()
    return np.stack([np.ones_like(train), in_degree, train], axis=1)


def capacities(weight: np.ndarray, num_parts: int, balance: float) -> np.ndarray:
    """Gives the most that a part may carry of each load: nodes, in-edges, train nodes."""
    if not balance >= 1:
        raise ValueError(
            f"balance is the largest part over the mean; got {balance}, give 1 or more"
        )
    mean = weight.sum(0) / num_parts
    loose = 1 + SLACK * (balance - 1)
    capacity: np.ndarray = np.ceil(mean * [1, loose, loose])
    capacity[0] = max(capacity[0], math.floor(mean[0] * balance))
    return capacity


def part_loads(owner: np.ndarray, weight: np.ndarray, num_parts: int) -> np.ndarray:
    """Adds up what each part carries: int64 [num_parts, 3]."""
    columns = [np.bincount(owner, column, num_parts) for column in weight.T]
    return np.stack(columns, axis=1).astype(np.int64)


def fill_empty(owner: np.ndarray, num_parts: int) -> np.ndarray:
    """Gives each empty part one node of the largest part."""
    sizes = np.bincount(owner, minlength=num_parts)
    for part in np.flatnonzero(sizes == 0):
        donor = int(sizes.argmax())
        owner[np.flatnonzero(owner == donor)[-1]] = part
        sizes[donor] -= 1
        sizes[part] += 1
    return owner


def _check_integers(edge_index: Tensor) -> None:
    dtype = edge_index.dtype
    if dtype in (torch.int64, torch.int32):
        return
    what = f"edge_index must be int64 or int32, got {dtype}"
    if dtype.is_floating_point and bool(edge_index.isnan().any()):
        what += " with NaN in it"
    raise TypeError(f"{what}; its entries are node ids")
