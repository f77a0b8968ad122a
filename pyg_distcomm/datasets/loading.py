"""Loads graphs by name or from a file, and generates them."""

from __future__ import annotations

import importlib
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
GENERATED = ("digits", "generated-NODES")

FEATURES = 32
CLASSES = 8
COMMUNITY = 100  # nodes, all of one class


def load_dataset(
    name: str, root: str | Path = "data", seed: int = 0, *, hetero: bool = False
) -> Any:
    """Loads a graph by name or path.

    name  a data set of PyG's, in any case, kept and downloaded below `root`; one of OGB's,
          "ogbn-arxiv", "ogbn-products" or "ogbn-papers100M" (`load_ogb`), below root/ogb;
          either with its root before it, as "path/to/data/Cora", or with the
          folder of its files, as "path/to/data/planetoid/Cora";
          "digits"; "generated-N" for a made-up graph of N nodes; or the path of a .pt file
          that holds a Data, or of an .npz file with edge_index
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
