"""Loads data sets of PyG and OGB by name, and scores node classification, for the examples.

    data = load_node_data(name)                     # masks in any case
    out = model(data.x, data.edge_index)            # num_outputs(data.y) columns
    loss = node_loss(out[mask], data.y[mask])
    node_score(out[mask], data.y[mask])             # accuracy, or micro F1

for whole graphs, shares and minibatches: y is [n] with classes, or [n, c] with zeros and
ones (multi-label, as Yelp). Data sets of the Open Graph Benchmark need the package ogb
(`pip install 'pyg-distcomm[ogb]'`), which downloads what is not there; its 1.3.6 cannot read
its own files under torch 2.6 and later by itself, and can here.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.datasets
from filelock import FileLock
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.utils import to_undirected

import pyg_distcomm.datasets
from pyg_distcomm.comm.serialization import allowing
from pyg_distcomm.sharded.dist_tensor import DistTensor

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
# whether edges are made undirected, as OGB's own examples make them
OGB: Mapping[str, bool] = MappingProxyType(
    {"ogbn-arxiv": True, "ogbn-products": False, "ogbn-papers100M": True}
)
MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
# what ogb saves of a graph; the sizes of binary ones are scalars of NumPy
SAVED: list[Any] = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]
SAVED += [
    np.int64(0).__reduce__()[0],
    np.dtype,
    *map(type, map(np.dtype, ("i4", "i8"))),
]


def load_dataset(name: str, root: str | Path = "data", seed: int = 0) -> Any:
    """Loads a graph by name or path.

    name  a data set of PyG's, in any case, kept and downloaded below `root`; one of OGB's,
          "ogbn-arxiv", "ogbn-products" or "ogbn-papers100M" (`load_ogb`), below root/ogb;
          either with its root before it, as "path/to/data/Cora", or with the folder of its
          files, as "path/to/data/planetoid/Cora"; or what the package's own `load_dataset`
          takes: "digits", "generated-N", a .pt or an .npz file
    seed  of the masks of "digits" and of the generated graph

    Any number of processes may load the same at once: the first one prepares it.
    """
    lower, suffix = name.lower(), Path(name).suffix.lower()
    if len(Path(name).parts) > 1 and suffix not in (".pt", ".npz"):
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
    try:
        return pyg_distcomm.datasets.load_dataset(name, seed)
    except ValueError as error:
        if "unknown graph" not in str(error):
            raise
        raise ValueError(f"{error}; or one of {', '.join([*KNOWN, *OGB])}") from None


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


def load_ogb(name: str, root: str | Path) -> Data:
    """Loads "ogbn-arxiv", "ogbn-products" or "ogbn-papers100M" with its own split.

    y is [n] int64, -1 where there is no label; masks are train_mask, val_mask and
    test_mask; edges of the citation graphs go both ways. Files are in `root`/NAME, as the
    package ogb lays them out. Any number of processes may load the same at once.

    ogbn-papers100M takes about 90 GB of memory this way; its files, unpacked, are read a
    chunk at a time by `pyg-distcomm partition edge_index.npy OUT --node-file x=node_feat.npy`.

    Raises:
        ImportError: if ogb is not installed.
        ValueError: if the data set is not there and cannot be downloaded.
    """
    source: Any = _ogb("PygNodePropPredDataset")
    root = Path(root)
    try:
        with one_at_a_time(root, name), allowing(SAVED):
            dataset = source(name, str(root))
            split = dataset.get_idx_split()
    except (OSError, EOFError, SystemExit) as error:  # it asks, and may exit
        raise ValueError(
            f"{name}: not below {root}, and could not be downloaded ({error!r}); run "
            f'`python -c "from ogb.nodeproppred import PygNodePropPredDataset as D; '
            f"D('{name}', '{root}')\"` once where there is a network"
        ) from None
    data: Data = dataset[0]
    data.y = node_labels(data.y)
    data.num_nodes = count = int(data.num_nodes or 0)
    if OGB[name]:
        data.edge_index = to_undirected(data.edge_index, num_nodes=count)
    for part, mask in MASKS.items():
        data[mask] = torch.zeros(count, dtype=torch.bool)
        data[mask][split[part]] = True
    return data


@contextlib.contextmanager
def one_at_a_time(root: Path, name: str) -> Iterator[None]:
    """Lets one process at a time download and process; the others then read its files."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, NotImplementedError):  # read-only
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(root / f".{name}.lock"))
        yield


def node_labels(y: Any) -> Any:
    """Returns labels as [n] int64, -1 for NaN, of OGB's [n, 1]; others unchanged."""
    if y is None or y.dim() != 2 or y.size(1) != 1:
        return y
    flat = y[:, 0]
    return (flat.nan_to_num(-1) if flat.is_floating_point() else flat).long()


def ogb_score(name: str, out: Any, y: Any) -> float:
    """Returns the metric of OGB's Evaluator for scores [k, classes] and labels [k] of a split.

    Of row-sharded tensors all rows are gathered on every rank first, which is collective
    (16 bytes per row), and every rank returns the same.

    Raises:
        ImportError: if ogb is not installed.
        ValueError: for a name that OGB has no node data set of.
    """
    pair = {"y_true": node_labels(y), "y_pred": out.argmax(-1)}
    whole = {
        key: (rows.full_tensor() if isinstance(rows, DistTensor) else rows).view(-1, 1)
        for key, rows in pair.items()
    }
    evaluator: Any = _ogb("Evaluator")(name)
    found: Mapping[str, float] = evaluator.eval(whole)
    return float(found[evaluator.eval_metric])


def _ogb(name: str) -> Any:
    try:
        return getattr(importlib.import_module("ogb.nodeproppred"), name)
    except ImportError:
        raise ImportError(
            "data sets of the Open Graph Benchmark need the package ogb: pip install "
            "'pyg-distcomm[ogb]'"
        ) from None


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
