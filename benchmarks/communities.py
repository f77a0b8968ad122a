"""Generates graphs of nested communities with hubs, on which edges matter.

load("communities-170000-1200000", root)     # nodes and edges; other names as load_dataset
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_distcomm.datasets import load_dataset

COMMUNITY = 100  # nodes in the mean
HUB = 2.5  # the exponent of the law of degrees
MIXING = (0.45, 0.15, 0.15, 0.25)  # edges in the community, class, field; anywhere
FIELDS, CLASSES_OF_FIELD = 8, 5
WRONG = 0.1  # nodes whose label is that of another class of their field


def load(name: str, root: str | Path = "data", seed: int = 0) -> Any:
    """Loads a graph by its name: "communities-NODES-EDGES", or as `load_dataset` does."""
    if (sizes := re.fullmatch(r"communities-(\d+)-(\d+)", name)) is not None:
        return communities(int(sizes[1]), int(sizes[2]), seed)
    return load_dataset(name, root, seed)


def communities(
    num_nodes: int,
    num_edges: int,
    seed: int = 0,
    *,
    features: int = 64,
    noise: float = 4.0,
    train: float = 0.1,
) -> Data:
    """Generates a graph of nested communities with hubs, whose classes can be learnt.

    A degree-corrected block model (Karrer, Newman 2011, arXiv:1008.3926) of four levels:
    communities lie in classes, classes in fields. Node v has weight theta_v ~ Pareto(1.5),
    so that degrees follow a power law of exponent 2.5, up to sqrt(n) times the least; the
    sizes of communities follow one too, 100 at the mean. A pair is drawn with its first end
    by theta and its second end, by theta again, in the same community (0.45), class (0.15),
    field (0.15) or anywhere (0.25). A tenth of the labels are wrong: another
    class of the same field.

        x_v = field mean + class mean + community mean + noise * N(0, I),

    means from N(0, I) [features], so that neighbours say more than a node's own row. Ids
    are shuffled.

    Args:
        num_nodes: n.
        num_edges: columns of edge_index, an even number: both directions of each pair,
            without loops and repeats.
        seed: of everything.
        features: width of x, float32.
        noise: of features; the larger, the less a model without edges learns.
        train: share of the nodes in train_mask; half as many are in val_mask, the others
            in test_mask.

    Time and memory: a few sorts of the pairs, about 70 bytes an edge.

    Raises:
        ValueError: if there is no graph of so many nodes and edges, or an odd number.
    """
    pairs, n = num_edges // 2, num_nodes
    if num_edges % 2 or n < 2 * FIELDS * CLASSES_OF_FIELD or pairs > n * (n - 1) // 8:
        raise ValueError(
            f"communities takes at least {2 * FIELDS * CLASSES_OF_FIELD} nodes and an "
            "even number of edges, at most a quarter of all possible ones; got "
            f"{n} and {num_edges}"
        )
    rng = np.random.default_rng(seed)
    levels = _nested(n, rng)  # each node's community, class, field; all one
    theta = np.minimum(rng.pareto(HUB - 1, n) + 1, n**0.5)
    keys = _distinct_pairs(theta, levels, pairs, rng)
    place = rng.permutation(n)  # the id of each node
    ends = place[np.stack(np.divmod(keys, n))]
    edge_index = np.concatenate([ends, ends[::-1]], axis=1)
    label = _with_errors(levels, rng)
    x = rng.standard_normal((n, features), np.float32)
    x *= noise
    for level in levels[:3]:
        mean = rng.standard_normal((int(level[-1]) + 1, features), np.float32)
        for start in range(0, n, 1 << 16):
            x[start : start + (1 << 16)] += mean[level[start : start + (1 << 16)]]
    order = np.argsort(place)  # node i of the Data is row order[i] here
    part = rng.random(n)
    return Data(
        x=torch.from_numpy(x[order]),
        edge_index=torch.from_numpy(edge_index),
        y=torch.from_numpy(label[order]),
        train_mask=torch.from_numpy(part < train),
        val_mask=torch.from_numpy((part >= train) & (part < 1.5 * train)),
        test_mask=torch.from_numpy(part >= 1.5 * train),
    )


def _with_errors(levels: Any, rng: np.random.Generator) -> np.ndarray:
    """Returns the class of each node, some of them another one of the same field."""
    label: np.ndarray = levels[1].astype(np.int64)
    wrong = np.flatnonzero(rng.random(len(label)) < WRONG)
    shift = rng.integers(1, CLASSES_OF_FIELD, wrong.size)
    other = (label[wrong] + shift) % CLASSES_OF_FIELD
    label[wrong] = levels[2][wrong] * CLASSES_OF_FIELD + other
    return label


def _nested(n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the community, class and field of each node, all ascending, and zeros."""
    classes = FIELDS * CLASSES_OF_FIELD
    count = max(classes, n // COMMUNITY)
    weight = rng.pareto(2.0, count) + 0.5
    share = rng.dirichlet(np.full(classes, 4.0))
    of_class = np.sort(rng.choice(classes, count - classes, p=share))
    of_class = np.sort(np.concatenate([of_class, np.arange(classes)]))  # none is empty
    ends = np.rint(np.cumsum(weight) / weight.sum() * (n - count)).astype(np.int64)
    sizes = np.diff(ends, prepend=0) + 1
    community = np.repeat(np.arange(count), sizes)
    label = of_class[community]
    return [community, label, label // CLASSES_OF_FIELD, np.zeros(n, np.int64)]


def _distinct_pairs(
    theta: np.ndarray, levels: list[np.ndarray], pairs: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws u n + v for pairs u < v of nodes, each once."""
    n, total = theta.size, np.concatenate([[0.0], np.cumsum(theta)])
    keys = np.zeros(0, np.int64)
    while keys.size < pairs:
        draws = int(1.1 * (pairs - keys.size)) + 16
        first = np.searchsorted(total, rng.random(draws) * total[-1], "right") - 1
        kind = rng.choice(len(MIXING), draws, p=MIXING)
        second = np.empty(draws, np.int64)
        for k, level in enumerate(levels):
            here = np.flatnonzero(kind == k)
            bound = np.searchsorted(level, np.arange(int(level[-1]) + 2))
            group = level[first[here]]
            low, high = total[bound[group]], total[bound[group + 1]]
            at = np.searchsorted(
                total, low + rng.random(here.size) * (high - low), "right"
            )
            second[here] = np.clip(at - 1, bound[group], bound[group + 1] - 1)
        first = np.minimum(first, n - 1)
        apart = first != second
        low, high = np.minimum(first, second)[apart], np.maximum(first, second)[apart]
        keys = np.sort(np.concatenate([keys, low * n + high]))
        keys = keys[np.diff(keys, prepend=-1) > 0]
    chosen: np.ndarray = rng.choice(keys, pairs, replace=False, shuffle=False)
    return chosen
