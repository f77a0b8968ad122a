"""Generates graphs of nested communities with hubs, on which edges matter.

load("communities-170000-1200000", root)     # nodes and edges; or a name of examples/graphs.py
write("folder", 50_000_000, 800_000_000)     # the same law, in files, edge by edge
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch_geometric.data import Data

from pyg_distcomm.partition.arrow_tables import ArrayFile

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from graphs import load_dataset

COMMUNITY = 100  # nodes in the mean
HUB = 2.5  # the exponent of the law of degrees
MIXING = (0.45, 0.15, 0.15, 0.25)  # edges in the community, class, field; anywhere
FIELDS, CLASSES_OF_FIELD = 8, 5
WRONG = 0.1  # nodes whose label is that of another class of their field


def load(name: str, root: str | Path = "data", seed: int = 0) -> Any:
    """Loads a graph by its name: "communities-NODES-EDGES", or as examples/graphs.py does."""
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

    Time and memory: a few sorts of the pairs, about 70 bytes per edge.

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


def write(
    folder: str | Path,
    num_nodes: int,
    num_edges: int,
    seed: int = 0,
    *,
    features: int = 100,
    noise: float = 4.0,
    train: float = 0.1,
) -> int:
    """Writes a graph of the law of `communities` as .npy files; returns its edges.

    edge_index.npy [m, 2] int64: each edge and its reverse, pairs in the order of the ids
    of their first ends, without loops and repeats; x.npy [n, features] float32, y.npy [n]
    int64 and train_mask.npy [n] bool. Ids are shuffled, so that order says nothing of
    communities. The number of edges is within some 1 % of what was asked. Memory: about
    60 bytes per node, and one chunk; not the same draws as `communities`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    n, rng = num_nodes, np.random.default_rng(seed)
    levels = [level.astype(np.int32) for level in _nested(n, rng)]
    theta = np.minimum(rng.pareto(HUB - 1, n) + 1, n**0.5)
    total = np.concatenate([[0.0], np.cumsum(theta)])
    del theta
    bounds = [np.searchsorted(level, np.arange(int(level[-1]) + 2)) for level in levels]
    guide = np.searchsorted(total, np.arange(n + 1) * (total[-1] / n), "right") - 1
    guide = np.minimum(guide, n - 1).astype(np.int32)
    order = rng.permutation(n).astype(np.int32)  # the place of each id
    place = np.empty(n, np.int32)  # the id at each place
    place[order] = np.arange(n, dtype=np.int32)
    law = (np.array(MIXING), total, guide, *levels, *bounds)
    rate = _rate(law, order, place, num_edges)
    written = 0
    writer = ArrayFile(folder / "edge_index.npy", np.int64, (0, 2))
    for pairs in _pairs(law, order, place, rate, seed):
        writer.append(pairs)
        written += len(pairs)
    label = _with_errors([None, *levels[1:]], rng).astype(np.int64)
    np.save(folder / "y.npy", label[order])
    np.save(folder / "train_mask.npy", rng.random(n) < train)
    _write_features(folder / "x.npy", levels[:3], order, features, noise, rng)
    return written


def _rate(law: Any, order: np.ndarray, place: np.ndarray, num_edges: int) -> float:
    """Returns the pairs to draw for each weight, so that num_edges are left without repeats."""
    total = law[1]
    some = order[:400_000]
    share = np.diff(total)[some].sum() / total[-1]  # of all weights: hubs are few
    rate: float = num_edges / 2 / total[-1]
    for _ in range(4):
        kept = sum(len(pairs) for pairs in _pairs(law, some, place, rate, 1))
        rate *= num_edges * share / max(kept, 1)
    return rate


def _pairs(
    law: Any, order: np.ndarray, place: np.ndarray, rate: float, seed: int
) -> Iterator[np.ndarray]:
    """Yields chunks of pairs, each followed by its reverse: ids `[c, 2]`."""
    _seeded(seed)
    out = np.empty((1 << 21, 2), np.int64)
    start = 0
    while start < order.size:
        start, count = _draw(start, order, place, rate, *law, out)
        yield out[:count]


@numba.njit
def _seeded(seed: int) -> None:
    np.random.seed(seed)


@numba.njit
def _draw(
    start, order, place, rate, mixing, total, guide, c0, c1, c2, c3, b0, b1, b2, b3, out
):  # type: ignore[no-untyped-def]
    """Fills `out` with the edges of the nodes from `start` on; returns the next, and edges.

    A node draws the second ends that come after it alone, as many as Poisson's law says for the
    weight that they have, so that no pair is drawn from both of its ends.
    """
    n, filled = order.size, 0
    scale = place.size / total[-1]
    ends = np.empty(out.shape[0] // 2, np.int64)
    for i in range(start, n):
        u = order[i]
        weight = total[u + 1] - total[u]
        count = 0
        for k in range(4):
            level, bound = (c0, c1, c2, c3)[k], (b0, b1, b2, b3)[k]
            first, last = bound[level[u]], bound[level[u] + 1]
            low, high = total[u + 1], total[last]
            mean = 2 * rate * mixing[k] * weight * (high - low) / (high - total[first])
            for _ in range(np.random.poisson(mean)):
                t = low + np.random.random() * (high - low)
                v = guide[min(int(t * scale), place.size)]
                while v + 1 < last and total[v + 1] <= t:
                    v += 1
                if v > u and count < ends.size:
                    ends[count] = v
                    count += 1
        some = np.sort(ends[:count])
        if filled + 2 * count > out.shape[0]:
            return i, filled
        for j in range(count):
            if j == 0 or some[j] != some[j - 1]:
                out[filled, 0] = out[filled + 1, 1] = place[u]
                out[filled, 1] = out[filled + 1, 0] = place[some[j]]
                filled += 2
    return n, filled


def _write_features(
    path: Path,
    levels: list[np.ndarray],
    order: np.ndarray,
    features: int,
    noise: float,
    rng: np.random.Generator,
) -> None:
    """Writes noise and the means of each node's community, class and field, by id."""
    file = ArrayFile(path, np.dtype(np.float32), (order.size, features))
    means = [
        rng.standard_normal((int(level[-1]) + 1, features), np.float32)
        for level in levels
    ]
    for start in range(0, order.size, 1 << 16):
        here = order[start : start + (1 << 16)]
        rows = rng.standard_normal((here.size, features), np.float32) * np.float32(
            noise
        )
        for mean, level in zip(means, levels, strict=True):
            rows += mean[level[here]]
        file.write(start * features, rows)
