"""What a graph must be before a kernel follows its indices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_distcomm.kernels.minibatch import Relation

_LEAST = 1e-300  # of a positive weight


def check_ids(ids: Tensor, size: int, end: str) -> None:
    if not ids.numel():
        return
    low, high = (int(v) for v in ids.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"the {end} nodes of edge_index span {low} .. {high}, but there are {size} "
            f"nodes (0 .. {size - 1}); fix the edges, or num_nodes"
        )


def check_csc(colptr: Tensor, row: Tensor, sizes: tuple[int, int]) -> None:
    """Refuses offsets that a kernel would follow out of bounds."""
    steps = colptr.diff()
    fits = colptr.numel() == sizes[1] + 1 and int(colptr[0]) == 0
    if not fits or int(colptr[-1]) != row.numel() or bool((steps < 0).any()):
        raise ValueError(
            f"the offsets of the CSC matrix must rise from 0 to {row.numel()} edges in "
            f"{sizes[1]} steps, got {colptr.numel() - 1} steps"
        )
    check_ids(row, sizes[0], "source")


def check_times(relation: Relation, node_time: Tensor | None) -> None:
    """Refuses in-edges that do not ascend in time: a search would miss some."""
    time = relation.time
    if time is None and node_time is not None:
        time = node_time[relation.row[:: relation.stride].long()]
    if time is None or time.numel() < 2:
        return
    falls = time[1:] < time[:-1]
    first = relation.colptr[1:-1]
    falls[first[(first > 0) & (first < time.numel())] - 1] = False
    if bool(falls.any()):
        raise ValueError(
            "the edges are said to be sorted, but those of one node do not ascend in "
            "time; sort them by (target, time), or leave is_sorted out"
        )


def times(time: Tensor, name: str) -> Tensor:
    time = torch.as_tensor(time).detach().cpu()
    time = time.squeeze(-1) if time.dim() == 2 else time
    if time.dim() != 1:
        raise ValueError(
            f"'{name}' must hold one number each, got shape {list(time.shape)}"
        )
    if time.is_floating_point():
        if bool(time.isnan().any()):
            raise ValueError(f"'{name}' holds NaN: there is no order to sample by")
        return time.double().contiguous()
    return time.long().contiguous()


def check_weighted(data: Data | HeteroData, name: str) -> None:
    """Refuses a name that no edges have."""
    if not any(name in store for store in data.edge_stores):
        raise ValueError(
            f"no edges have an attribute '{name}' to be weighted by; data has "
            f"{list(data.keys())}"
        )


def weights(weight: Tensor, name: str, whole: bool = True) -> Tensor:
    weight = torch.as_tensor(weight).detach().cpu()
    weight = weight.squeeze(-1) if weight.dim() == 2 else weight
    if weight.dim() != 1:
        raise ValueError(
            f"'{name}' must hold one weight for each edge, got shape {list(weight.shape)}"
        )
    weight = weight if weight.dtype == torch.float64 else weight.float()
    bad = ~weight.isfinite() | (weight < 0)
    if bool(bad.any()):
        where = int(bad.nonzero()[0])
        raise ValueError(
            f"'{name}' holds {float(weight[where])} for edge {where}; weights must be "
            "finite and not negative"
        )
    tiny = (weight > 0) & (weight < _LEAST)  # a draw divides by them
    if bool(tiny.any()):
        raise ValueError(
            f"'{name}' holds {float(weight[tiny][0]):g}; weights must be 0 or at least "
            f"{_LEAST:g}: multiply them all by what they need"
        )
    if not bool(weight.sum(dtype=torch.float64).isfinite()):
        raise ValueError(
            f"the weights in '{name}' add up to infinity; divide them all by the largest"
        )
    if whole and weight.numel() and not bool((weight > 0).any()):
        raise ValueError(f"all weights in '{name}' are zero, so no edge can be drawn")
    return weight.contiguous()
