"""Loads node data sets of the Open Graph Benchmark, and scores with its Evaluator.

Needs the package ogb (`pip install 'pyg-distcomm[ogb]'`), which downloads what is not there;
its 1.3.6 cannot read its own files under torch 2.6 and later by itself, and can here.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.utils import to_undirected

from pyg_distcomm.comm.serialization import allowing
from pyg_distcomm.sharded.dist_tensor import DistTensor

__all__ = [
    "OGB",
    "load_ogb",
    "node_labels",
    "ogb_score",
]

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

    ogbn-papers100M takes about 90 GB of memory this way; `pyg-distcomm partition
    root/ogbn_papers100M OUT --parts P --undirected` reads its files a chunk at a time.

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
    (16 bytes a row), and every rank returns the same.

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
