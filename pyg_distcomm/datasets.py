"""Loads graphs from files, and makes two graphs for a first run.

    data = load_dataset("digits")           # scikit-learn's digits, linked to the most alike
    data = load_dataset("generated-1000")   # made-up communities of 1,000 nodes
    data = load_dataset("graph.pt")         # a Data that torch.save wrote; or an .npz file

A file is read as data: nothing that it names is run.
"""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
from pyg_distcomm.partition.part_share import with_tensors

__all__ = ["digits", "generated", "load_dataset", "load_saved_graph"]

FEATURES = 32
CLASSES = 8
COMMUNITY = 100  # nodes, all of one class


def load_dataset(name: str, seed: int = 0, *, hetero: bool = False) -> Any:
    """Loads a graph from a file, or makes one.

    name   "digits"; "generated-N" for a made-up graph of N nodes; or the path of a .pt file
           that holds a Data, or of an .npz file with edge_index
    seed   of the masks of "digits" and of the generated graph
    hetero whether a .pt file may hold a HeteroData, too

    Raises ValueError for another name, and for a file that holds no graph.
    """
    if Path(name).suffix.lower() in (".pt", ".npz"):
        return _from_file(Path(name), hetero)
    lower = name.lower()
    if lower == "digits":
        return digits(seed)
    if lower.startswith("generated-") and lower[10:].isdecimal():
        return generated(int(lower[10:]), seed)
    raise ValueError(
        f"unknown graph {name!r}; give digits, generated-NODES, or the path of a .pt file (a "
        "Data) or an .npz file (edge_index, x, y, ...): save another data set by "
        "torch.save(dataset[0], 'graph.pt'), and partition edges in other files by "
        "pyg-distcomm partition FILE parts"
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
        **_masks_per_class(y, seed),
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
    group = src * groups // max(num_nodes, 1)
    first, after = (-(-k * num_nodes // groups) for k in (group, group + 1))
    dice = torch.rand(2, src.numel(), generator=rng, dtype=torch.float64)
    dst = torch.where(
        dice[0] < 0.8, first + dice[1] * (after - first), dice[1] * num_nodes
    ).long()
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


def _masks_per_class(y: Tensor, seed: int) -> dict[str, Tensor]:
    """Draws 20 nodes of each class to train with, 500 others to validate; the rest test."""
    order = torch.randperm(y.numel(), generator=torch.Generator().manual_seed(seed))
    train = torch.zeros(y.numel(), dtype=torch.bool)
    for label in y.unique():
        train[order[y[order] == label][:20]] = True
    val = torch.zeros_like(train)
    val[order[~train[order]][:500]] = True
    return {"train_mask": train, "val_mask": val, "test_mask": ~(train | val)}


def _from_file(path: Path, hetero: bool) -> Data | HeteroData:
    if not path.is_file():
        raise ValueError(f"{path}: missing")
    packed = path.suffix.lower() == ".npz"
    data = _from_npz(path) if packed else load_saved_graph(path, hetero)
    if isinstance(data, Data) and data.edge_index is None:
        instead = "; convert its adj_t to one first" if "adj_t" in data else ""
        raise ValueError(f"{path}: has no edge_index [2, num_edges]{instead}")
    return data


def _from_npz(path: Path) -> Data:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        held = {n: array if array.ndim else array.item() for n, array in arrays.items()}
        return with_tensors(Data.from_dict(held))
    except Exception as error:  # NumPy evaluates what headers say
        raise ValueError(f"{path}: cannot be read: {error}") from None


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
