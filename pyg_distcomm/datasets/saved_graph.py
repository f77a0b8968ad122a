"""Reads a graph that torch.save wrote, as data: nothing that a file names is run."""

from __future__ import annotations

import pickle
import re
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
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
    if is_archive(path):
        check_saved(path)
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
