"""Loads graphs by name or from a file, and generates them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.datasets
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import to_undirected

from pyg_distcomm.datasets.ogb import OGB, load_ogb, one_at_a_time
from pyg_distcomm.datasets.saved_graph import load_saved_graph
from pyg_distcomm.partition.edge_files import BAD_FILE, check_archive
from pyg_distcomm.partition.layout import META

__all__ = [
    "KNOWN",
    "communities",
    "digits",
    "generated",
    "is_known",
    "load_dataset",
]

# name -> (folder below root, class in torch_geometric.datasets, its name argument)
KNOWN: dict[str, tuple[str, str, str | None]] = {
    "Cora": ("planetoid", "Planetoid", "Cora"),
    "CiteSeer": ("planetoid", "Planetoid", "CiteSeer"),
    "PubMed": ("planetoid", "Planetoid", "PubMed"),
    "Computers": ("amazon", "Amazon", "Computers"),
    "Photo": ("amazon", "Amazon", "Photo"),
    "CS": ("coauthor", "Coauthor", "CS"),
    "Physics": ("coauthor", "Coauthor", "Physics"),
    "DBLP": ("citation_full", "CitationFull", "DBLP"),
    "Reddit": ("reddit", "Reddit", None),
    "Reddit2": ("reddit2", "Reddit2", None),
    "Flickr": ("flickr", "Flickr", None),
    "Yelp": ("yelp", "Yelp", None),
    "Roman-empire": ("heterophilous", "HeterophilousGraphDataset", "Roman-empire"),
    "Amazon-ratings": ("heterophilous", "HeterophilousGraphDataset", "Amazon-ratings"),
    "Minesweeper": ("heterophilous", "HeterophilousGraphDataset", "Minesweeper"),
    "Tolokers": ("heterophilous", "HeterophilousGraphDataset", "Tolokers"),
    "Questions": ("heterophilous", "HeterophilousGraphDataset", "Questions"),
}
GENERATED = ("digits", "generated-NODES", "communities-NODES-EDGES")

FEATURES = 32
CLASSES = 8
COMMUNITY = 100  # nodes, all of one class

# of `communities`
HUB = 2.5  # the exponent of the law of degrees
MIXING = (0.45, 0.15, 0.15, 0.25)  # edges in the community, class, field; anywhere
FIELDS, CLASSES_OF_FIELD = 8, 5
WRONG = 0.1  # nodes whose label is that of another class of their field


def load_dataset(
    name: str, root: str | Path = "data", seed: int = 0, *, hetero: bool = False
) -> Any:
    """Loads a graph by name or path.

    name  a data set of PyG's, in any case, kept and downloaded below `root`; one of OGB's,
          "ogbn-arxiv", "ogbn-products" or "ogbn-papers100M" (`load_ogb`), below root/ogb;
          either with its root before it, as "path/to/data/Cora", or with the
          folder of its files, as "path/to/data/planetoid/Cora";
          "digits"; "generated-N" for a made-up graph of N nodes, and
          "communities-N-M" for a larger one, with hubs, of M edges; or
          the path of a .pt file that holds a Data, or of an .npz file with edge_index
    seed  of the masks of "digits" and of the generated graph
    hetero whether a .pt file may hold a HeteroData, too

    Any number of processes may load the same at once: the first one prepares it.

    Raises ValueError for an unknown name, and for a file that holds no graph.
    """
    if Path(name).suffix in (".pt", ".npz"):
        return _from_file(Path(name), hetero)
    lower = name.lower()
    if lower == "digits":
        return digits(seed)
    if lower.startswith("generated-") and lower[10:].isdecimal():
        return generated(int(lower[10:]), seed)
    if (sizes := re.fullmatch(r"communities-(\d+)-(\d+)", lower)) is not None:
        return communities(int(sizes[1]), int(sizes[2]), seed)
    if len(Path(name).parts) > 1:
        root, lower = Path(name).parent, Path(name).name.lower()
    for known, (folder, kind, argument) in KNOWN.items():
        if known.lower() == lower:
            place = Path(root)
            if place.name == folder:  # data/amazon/Photo, as PyG's files lie
                place = place.parent
            return _from_pyg(known, place / folder, kind, argument)
    for known in OGB:
        if known.lower() == lower:
            return load_ogb(known, Path(root) / "ogb")
    names = ", ".join([*GENERATED, *KNOWN, *OGB])
    raise ValueError(
        f"unknown data set {name!r}; give one of {names}, or the path of a "
        ".pt file (a Data) or an .npz file (edge_index, x, y, ...); partition edges in other "
        "files first, by pyg-distcomm partition FILE parts"
    )


def is_known(name: str) -> bool:
    """Returns whether a name (in any case), or a path that ends in it, is a data set's."""
    known = {"digits", *(known.lower() for known in (*KNOWN, *OGB))}
    return Path(name).name.lower() in known and not (Path(name) / META).exists()


def digits(seed: int = 0) -> Data:
    """Links each of scikit-learn's 1,797 handwritten digits to the 10 most alike.

    x [1797, 64] in 0 .. 1, y [1797] in 0 .. 9, edges both ways, and masks: 20 nodes of
    each class to train, 500 to validate, the rest to test. Needs scikit-learn.
    """
    try:
        sources: Any = importlib.import_module("sklearn.datasets")
        neighbors: Any = importlib.import_module("sklearn.neighbors")
    except ImportError:
        raise ImportError(
            "'digits' needs scikit-learn: pip install 'pyg-distcomm[demo]'"
        ) from None
    pixels, label = sources.load_digits(return_X_y=True)
    near = neighbors.kneighbors_graph(pixels, n_neighbors=10).tocoo()
    pairs = torch.from_numpy(np.stack([near.col, near.row]).astype(np.int64))
    y = torch.from_numpy(label.astype(np.int64))
    return Data(
        x=torch.from_numpy(pixels.astype(np.float32) / 16),
        edge_index=to_undirected(pairs, num_nodes=len(label)),
        y=y,
        **_masks_per_class(y, 20, 500, seed),
    )


def generated(num_nodes: int, seed: int = 0, degree: int = 10) -> Data:
    """Generates a graph of communities, in shuffled order, whose classes can be learnt.

    Each node draws degree / 2 partners, four of five in its own community of about 100;
    all of a community share a class. x [n, 32] is the mean of the class plus noise.
    edge_index holds both directions, no loops and no repeats; the masks are 50, 25 and
    25 % of the nodes. Time: linear, but for a sort of the edges.
    """
    rng = torch.Generator().manual_seed(seed)
    groups = max(1, num_nodes // COMMUNITY)
    place = torch.randperm(num_nodes, generator=rng)  # node i, in order of community
    src = torch.arange(num_nodes).repeat_interleave(max(1, degree // 2))
    first, size = _bounds(src * groups // max(num_nodes, 1), groups, num_nodes)
    dice = torch.rand(2, src.numel(), generator=rng, dtype=torch.float64)
    dst = torch.where(dice[0] < 0.8, first + dice[1] * size, dice[1] * num_nodes).long()
    pairs = place[torch.stack([src, dst])]
    pairs = pairs[:, pairs[0] != pairs[1]]
    class_of = torch.randint(CLASSES, (groups,), generator=rng)
    y = torch.empty_like(place)
    y[place] = class_of[torch.arange(num_nodes) * groups // max(num_nodes, 1)]
    mean = torch.randn(CLASSES, FEATURES, generator=rng)
    part = torch.rand(num_nodes, generator=rng)
    return Data(
        x=mean[y] + 2 * torch.randn(num_nodes, FEATURES, generator=rng),
        edge_index=to_undirected(pairs, num_nodes=num_nodes),
        y=y,
        train_mask=part < 0.5,
        val_mask=(part >= 0.5) & (part < 0.75),
        test_mask=part >= 0.75,
    )


def _with_errors(levels: Any, rng: np.random.Generator) -> np.ndarray:
    """Returns the class of each node, some of them another one of the same field."""
    label: np.ndarray = levels[1].astype(np.int64)
    wrong = np.flatnonzero(rng.random(len(label)) < WRONG)
    shift = rng.integers(1, CLASSES_OF_FIELD, wrong.size)
    other = (label[wrong] + shift) % CLASSES_OF_FIELD
    label[wrong] = levels[2][wrong] * CLASSES_OF_FIELD + other
    return label


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

    A degree-corrected block model [Karrer11] of four levels: communities lie in classes,
    classes in fields. Node v has weight theta_v ~ Pareto(1.5), so that degrees follow a
    power law of exponent 2.5, up to sqrt(n) times the least; the sizes of communities
    follow one too, 100 at the mean. A pair is drawn with its first end by theta and its
    second end, by theta again, in the same community (0.45), class (0.15), field (0.15) or
    anywhere (0.25). A tenth of the labels are wrong: another class of the same field.

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


def _bounds(group: Tensor, groups: int, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Returns the first node and the size of each node's community, before shuffling."""
    first = -(-group * num_nodes // groups)
    after = -(-(group + 1) * num_nodes // groups)
    return first, after - first


def _masks_per_class(
    y: Tensor, each: int, num_val: int, seed: int
) -> dict[str, Tensor]:
    order = torch.randperm(y.numel(), generator=torch.Generator().manual_seed(seed))
    train = torch.zeros(y.numel(), dtype=torch.bool)
    for label in y.unique():
        train[order[y[order] == label][:each]] = True
    val = torch.zeros_like(train)
    val[order[~train[order]][:num_val]] = True
    return {"train_mask": train, "val_mask": val, "test_mask": ~(train | val)}


def _from_pyg(name: str, root: Path, kind: str, argument: str | None) -> Data:
    source: Any = getattr(torch_geometric.datasets, kind)
    try:
        with one_at_a_time(root, name):
            dataset = source(str(root), argument) if argument else source(str(root))
    except OSError as error:
        raise ValueError(
            f"{name}: not below {root}, and could not be downloaded: {error}"
        ) from None
    data: Data = dataset[0]
    return data


def _from_file(path: Path, hetero: bool) -> Data | HeteroData:
    if not path.is_file():
        raise ValueError(f"{path}: missing")
    data = _from_npz(path) if path.suffix == ".npz" else load_saved_graph(path, hetero)
    if isinstance(data, Data) and data.edge_index is None:
        instead = "; convert its adj_t to one first" if "adj_t" in data else ""
        raise ValueError(f"{path}: has no edge_index [2, num_edges]{instead}")
    return data


def _from_npz(path: Path) -> Data:
    check_archive(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (*BAD_FILE, MemoryError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    values = {
        name: torch.from_numpy(array) if array.ndim else array.item()
        for name, array in arrays.items()
    }
    return Data.from_dict(values)
