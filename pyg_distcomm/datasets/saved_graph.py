"""Reads a graph that torch.save wrote, as data: nothing that a file names is run."""

from __future__ import annotations

import pickle
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.batch import DynamicInheritanceGetter
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

from pyg_distcomm.comm.serialization import allowing

_BAD_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
    ValueError,
)


class _Number:
    """Stands for a dtype of NumPy's in a file, of which only a number is made."""

    def __init__(self, name: str, *_: Any) -> None:
        self.dtype = np.dtype(name)
        if self.dtype.kind not in "biufc":
            raise ValueError(
                f"it holds {self.dtype} of NumPy's; save tensors in a Data"
            )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


def _number(kind: _Number, data: bytes) -> Any:
    """Returns a scalar of NumPy's as a number of Python's."""
    return np.frombuffer(data, kind.dtype)[0].item()


def _batch(kind: Any, base: Any) -> Any:
    if kind is not Batch or base not in (Data, HeteroData):
        raise ValueError("it holds a batch of other things than Data")
    return Batch(_base_cls=base)


class _BatchMaker:
    """Stands for PyG's maker of batches, whose instances a file calls."""

    def __new__(cls) -> Callable[[Any, Any], Any]:  # type: ignore[misc]
        return _batch


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
    known: list[Any] = [*_pyg_classes(Data), *_pyg_classes(HeteroData), Batch]
    known += [BaseStorage, GlobalStorage, NodeStorage, EdgeStorage, AttrType]
    known += [DataEdgeAttr, DataTensorAttr, EdgeAttr, TensorAttr, _batch]
    known += [type(Batch(_base_cls=base)) for base in (Data, HeteroData)]
    # a name in the file, and what stands for it
    known += [
        (
            _BatchMaker,
            f"{DynamicInheritanceGetter.__module__}.DynamicInheritanceGetter",
        ),
        (_dict, "collections.defaultdict"),
        (_Number, "numpy.dtype"),
    ]
    known += [(_number, f"numpy.{c}.multiarray.scalar") for c in ("_core", "core")]
    return known


def load_saved_graph(path: Path, hetero: bool) -> Data | HeteroData:
    """Loads a Data, a Batch or, with `hetero`, a HeteroData.

    The file holds one, the dict of one, or what an InMemoryDataset of one graph saves. What
    PyG caches in a graph is left out, and numbers of NumPy's become Python's.

    Raises:
        ValueError: naming the file, if it holds anything else, or is damaged.
    """
    if is_archive(path):
        check_saved(path)
    try:
        with allowing(_known()):
            value = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as err:
        raise ValueError(f"{path}: cannot be read: {_reason(str(err))}") from None
    except Exception as err:  # what unpickling makes of other files
        raise ValueError(
            f"{path}: cannot be read: not saved by torch.save ({type(err).__name__})"
        ) from None
    data = _graph(value)
    if not isinstance(data, (Data, HeteroData) if hetero else Data):
        many = _num_graphs(value)
        found = f"{many} graphs" if many else f"a {type(data).__name__}"
        raise ValueError(
            f"{path}: holds {found}, not a Data; save one graph with "
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


def _num_graphs(value: Any) -> int:
    """Returns the number of graphs of a list, or of what an InMemoryDataset saves."""
    if isinstance(value, list):
        return sum(isinstance(one, (Data, HeteroData)) for one in value)
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        return 0
    if value[1] is None:
        return 1
    slices = value[1] if isinstance(value[1], dict) else {}
    while slices and isinstance(first := next(iter(slices.values())), dict):
        slices = first
    return len(next(iter(slices.values()), ())) - 1 if slices else 0


def _graph(value: Any) -> Any:
    """Returns the graph in a loaded value, or the value."""
    if _num_graphs(value) == 1:
        value = value[0]
    if isinstance(value, dict) and "_global_store" in value:
        return HeteroData.from_dict(value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return Data.from_dict(value)
    return value


def check_saved(path: Path) -> None:
    """Raises if a file of torch.save is damaged or holds TorchScript; torch checks neither.

    Raises:
        ValueError: naming the file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            names = [name.partition("/")[2] for name in archive.namelist()]
        # torch has a reader of its own, which can be given another table of contents
        records = torch._C.PyTorchFileReader(str(path)).get_all_records()
    except _BAD_ARCHIVE as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if sorted(records) != sorted(names):
        raise ValueError(f"{path}: cannot be read: its tables of contents differ")
    if damaged is not None:
        raise ValueError(f"{path}: cannot be read: {damaged} was altered (CRC-32)")
    if any(name == "constants.pkl" or name.startswith("code/") for name in names):
        raise ValueError(
            f"{path}: holds TorchScript, which is a program and is not run; save tensors "
            "with torch.save"
        )


def is_archive(path: Path) -> bool:
    """Returns whether a file is a zip archive, also a damaged one."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True
