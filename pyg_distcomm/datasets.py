"""Loads graphs by name or from a file, generates them, and scores node classification.

Data sets of the Open Graph Benchmark need the package ogb (`pip install 'pyg-distcomm[ogb]'`),
which downloads what is not there; its 1.3.6 cannot read its own files under torch 2.6 and later
by itself, and can here. A file is read as data: nothing that it names is run.

    data = load_node_data(name)                     # masks in any case
    out = model(data.x, data.edge_index)            # num_outputs(data.y) columns
    loss = node_loss(out[mask], data.y[mask])
    node_score(out[mask], data.y[mask])             # accuracy, or micro F1

for whole graphs, shares and minibatches: y is [n] with classes, or [n, c] with zeros and
ones (multi-label, as Yelp).
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch_geometric.datasets
from filelock import FileLock
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.feature_store import TensorAttr
from torch_geometric.data.graph_store import EdgeAttr
from torch_geometric.data.storage import (
    AttrType,
    BaseStorage,
    EdgeStorage,
    GlobalStorage,
    NodeStorage,
)
from torch_geometric.utils import to_undirected

from pyg_distcomm.comm.serialization import allowing
from pyg_distcomm.sharded.dist_tensor import DistTensor

__all__ = [
    "KNOWN",
    "OGB",
    "digits",
    "generated",
    "load_dataset",
    "load_node_data",
    "load_ogb",
    "load_saved_graph",
    "node_labels",
    "node_loss",
    "node_score",
    "num_outputs",
    "ogb_score",
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
    if Path(name).suffix.lower() in (".pt", ".npz"):
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
    data = (
        _from_npz(path)
        if path.suffix.lower() == ".npz"
        else load_saved_graph(path, hetero)
    )
    if isinstance(data, Data) and data.edge_index is None:
        instead = "; convert its adj_t to one first" if "adj_t" in data else ""
        raise ValueError(f"{path}: has no edge_index [2, num_edges]{instead}")
    return data


def _from_npz(path: Path) -> Data:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # NumPy evaluates what headers say
        raise ValueError(f"{path}: cannot be read: {error}") from None
    values = {
        name: torch.from_numpy(array) if array.ndim else array.item()
        for name, array in arrays.items()
    }
    return Data.from_dict(values)


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


def _dict(*_: Any) -> dict[Any, Any]:
    """Returns an empty dict in the place of a defaultdict, which torch does not fill."""
    return {}


def _pyg_classes(base: Any) -> list[Any]:
    """Returns a class of PyG's, and PyG's own subclasses of it.

    Those of shares have the names of their class, but are not found under them.
    """
    below = [c for child in base.__subclasses__() for c in _pyg_classes(child)]
    return [
        c
        for c in (base, *below)
        if c.__module__.startswith("torch_geometric.")
        and vars(sys.modules[c.__module__]).get(c.__qualname__) is c
    ]


def _known() -> list[Any]:
    """Lists what a saved graph may name, besides tensors and plain values."""
    known: list[Any] = [*_pyg_classes(Data), *_pyg_classes(HeteroData)]
    known += [BaseStorage, GlobalStorage, NodeStorage, EdgeStorage, AttrType]
    known += [DataEdgeAttr, DataTensorAttr, EdgeAttr, TensorAttr]
    return [*known, (_dict, "collections.defaultdict")]  # and a name it stands for


def load_saved_graph(path: Path, hetero: bool) -> Data | HeteroData:
    """Loads a Data or, with `hetero`, a HeteroData; what PyG caches in it is left out.

    Raises:
        ValueError: naming the file, if it holds anything else, or is damaged.
    """
    try:
        with allowing(_known()):
            data = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as err:
        raise ValueError(f"{path}: cannot be read: {_reason(str(err))}") from None
    except Exception as err:  # what unpickling makes of other files
        raise ValueError(
            f"{path}: cannot be read: not saved by torch.save ({type(err).__name__})"
        ) from None
    if not isinstance(data, (Data, HeteroData) if hetero else Data):
        raise ValueError(
            f"{path}: holds a {type(data).__name__}, not a Data; save one graph with "
            "torch.save(data, path)"
        )
    for store in data.stores:
        store.__dict__.pop("_cached_attr", None)
    return data


def _reason(text: str) -> str:
    """Returns why torch cannot read a file, in one line."""
    if (found := re.search(r"GLOBAL (\S+)", text)) is not None:
        return f"it holds {found[1]}, which is not read; save tensors in a Data"
    if (found := re.search(r"WeightsUnpickler error:\s+(.+)", text)) is not None:
        return found[1].strip()
    lines = [line.strip() for line in text.splitlines() or ["empty"]]
    return next((line for line in lines if "Unsupported" in line), lines[0])


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
