"""Provides data, loss and score of node classification, single- and multi-label, for examples.

    data = load_node_data(name)                     # masks in any case
    out = model(data.x, data.edge_index)            # num_outputs(data.y) columns
    loss = node_loss(out[mask], data.y[mask])
    node_score(out[mask], data.y[mask])             # accuracy, or micro F1

for whole graphs, shares and minibatches: y is [n] with classes, or [n, c] with zeros and
ones (multi-label, as Yelp).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch_geometric.data import Data

from pyg_distcomm.datasets.loading import load_dataset, node_labels

__all__ = [
    "load_node_data",
    "node_loss",
    "node_score",
    "num_outputs",
]

SHARES = {"train_mask": 0.6, "val_mask": 0.8, "test_mask": 1.0}  # where none are given


def load_node_data(name: str, root: str | Path = "data", seed: int = 0) -> Data:
    """Loads a graph like `load_dataset`, with labels and masks that are ready for training.

    If a data set has several splits, the first is taken; if it has none, 60, 20 and 20 % of
    the nodes are drawn by `seed`.

    Raises:
        ValueError: as `load_dataset`, and for a graph without x or y.
    """
    data = load_dataset(name, root, seed)
    if data.x is None or data.y is None:
        missing = "x" if data.x is None else "y"
        raise ValueError(
            f"{name}: got no {missing}, but training takes features and labels; add it"
        )
    data.y = node_labels(data.y)
    if data.get("train_mask") is None:
        generator = torch.Generator().manual_seed(seed)
        draw, low = torch.rand(int(data.num_nodes or 0), generator=generator), 0.0
        for mask, high in SHARES.items():
            data[mask], low = (draw >= low) & (draw < high), high
    for mask in SHARES:
        if data.get(mask) is not None and data[mask].dim() > 1:
            data[mask] = data[mask][:, 0].clone()  # the first of several splits
    return data


def num_outputs(y: Any) -> int:
    """Returns the number of output columns of a model; collective for the y of a share."""
    return int(y.size(1)) if y.dim() == 2 else int(y.max()) + 1


def node_loss(out: Any, y: Any) -> Any:
    """Returns the cross entropy of scores [k, c]: softmax, or logistic if multi-label."""
    if y.dim() == 2:
        return F.binary_cross_entropy_with_logits(out, y.to(out.dtype))
    return F.cross_entropy(out, y)


def node_score(out: Any, y: Any) -> float:
    """Returns the accuracy of scores [k, c], or the micro F1 if multi-label.

        F1 = 2 TP / (2 TP + FP + FN)     over all nodes and classes

    Of no rows it is NaN. Collective for row-sharded tensors, and the same on all ranks.
    """
    if y.dim() == 2:
        chosen, wanted = out > 0, y > 0
        hit, all_of = (chosen & wanted).sum(), chosen.sum() + wanted.sum()
        return float(2 * hit / all_of)
    return float((out.argmax(-1) == y).float().mean())
