"""Writes trees of tensors and plain values by torch.distributed.checkpoint, and reads them.

[Note: trees in a checkpoint] A tree is a nesting of dicts, lists and tuples. Each tensor of it
is saved under NAME and its place, as `optimizer[0]['state']['weight']['exp_avg']`, and the rest
as one plain value under NAME, with None in the places of tensors, and the number of sparse dims
in those of sparse ones. So a tree is read as it was saved, whatever the run has that reads it.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.utils._pytree import keystr, tree_leaves, tree_map_with_path

from pyg_distcomm.checkpoint.folder import damage
from pyg_distcomm.partition.atomic import disk_error, write_problem


def check_plain(trees: dict[str, Any]) -> None:
    """Raises TypeError if a tree holds what is neither a tensor nor read back as data."""
    leaves = ((name, leaf) for name in trees for leaf in tree_leaves(trees[name]))
    for name, leaf in leaves:
        if isinstance(leaf, (Tensor, np.number, np.bool_)):
            continue
        try:
            box = io.BytesIO()
            torch.save(leaf, box)
            box.seek(0)
            torch.load(box, weights_only=True)
        except Exception:
            raise TypeError(
                "save numbers, strings, tensors, or lists and dicts of them: "
                f"{name.removeprefix('extra.')} holds a {type(leaf).__name__}, which can not "
                "be read back as data"
            ) from None


def write_trees(folder: Path, trees: dict[str, Any]) -> str | None:
    """Writes trees into a folder; returns the problem if the disk cannot store them."""
    values: dict[str, Any] = {}
    for name, tree in trees.items():

        def put(path: Any, leaf: Any, name: str = name) -> Any:
            return _put(values, name + keystr(path), leaf)

        values[name] = tree_map_with_path(put, (tree,))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no_dist is meant: one process saves
            dcp.save(  # type: ignore[attr-defined]
                values,
                storage_writer=FileSystemWriter(str(folder), sync_files=True),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                no_dist=True,
            )
    except (Exception, CheckpointException) as error:
        return write_problem(_cause(error, folder), folder)
    return None


def _put(values: dict[str, Any], key: str, leaf: Any) -> Any:
    """Puts a tensor among the values to save; returns what stands for a leaf in its tree."""
    if isinstance(leaf, (np.number, np.bool_)):
        return leaf.item()
    if not isinstance(leaf, Tensor):
        return leaf
    values[key] = leaf.to_dense() if leaf.is_sparse else leaf
    return leaf.sparse_dim() if leaf.is_sparse else None


def _cause(error: BaseException, folder: Path) -> BaseException:
    """Returns the error of the disk, which torch's checkpoint wraps or loses, or the error."""
    inner = [wrapped[0] for wrapped in getattr(error, "failures", {}).values()]
    found = next((one for one in inner if isinstance(one, OSError)), None)
    return found or disk_error(folder) or next(iter(inner), error)


def read_trees(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Reads trees of a folder, their tensors on the CPU.

    Raises:
        ValueError: naming the folder, if it is damaged, or has no tree of a name.
    """
    problem = damage(folder, ".metadata", "*.distcp")
    if problem is not None:
        raise ValueError(f"cannot load checkpoint {folder}: {problem}")
    names = list(names)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = _MetadataReader(str(folder))
            values = _templates(reader.read_metadata(), names)
            dcp.load(  # type: ignore[attr-defined]
                values, storage_reader=reader, planner=_Planner(), no_dist=True
            )
        return {name: _filled(values, name) for name in names}
    except (Exception, CheckpointException) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        why = lines[-1] if lines else repr(error)
        raise ValueError(f"cannot load checkpoint {folder}: {why}") from None


def _templates(metadata: Metadata, names: list[str]) -> dict[str, Any]:
    """Returns what the values of some trees are read into: an empty tensor, or None."""
    found: dict[str, Any] = {}
    saved = metadata.state_dict_metadata
    for name in names:
        if name not in saved:
            has = ", ".join(sorted({key.partition("[")[0] for key in saved}))
            raise ValueError(f"it holds no {name}, but {has}; load what was saved")
    for key, entry in saved.items():
        if key.partition("[")[0] in names:
            found[key] = None
            if isinstance(entry, TensorStorageMetadata):
                found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return found


def _filled(values: dict[str, Any], name: str) -> Any:
    """Returns a tree with its tensors."""

    def fill(path: Any, leaf: Any) -> Any:
        value = values.get(name + keystr(path))
        if value is None:
            return leaf
        return value if leaf is None else value.to_sparse(leaf)

    return tree_map_with_path(fill, values[name])[0]


class _MetadataReader(FileSystemReader):
    """Reads .metadata with a restricted unpickler; torch's reader would unpickle any class."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not metadata.storage_data:
            raise ValueError(
                "its .metadata is not that of a checkpoint; give a folder of save_checkpoint"
            )
        for stored in metadata.storage_data.values():
            name = getattr(stored, "relative_path", None)
            if not isinstance(name, str) or not re.fullmatch(r"[\w.]+\.distcp", name):
                raise ValueError(
                    f"its .metadata names {name!r}, which is no file of it"
                )
        return metadata


class _Planner(DefaultLoadPlanner):
    """Loads what is no tensor with weights_only=True."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes that describe tensors in a checkpoint, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _METADATA_CLASSES
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = True
        if not known:
            raise pickle.UnpicklingError(
                f"its .metadata names {module}.{name}, which describes no tensor: it was "
                "not written by save_checkpoint, and nothing of it is run"
            )
        return super().find_class(module, name)


_METADATA_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
            "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
        ).split()
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # of Python 3.13
    ("collections", "OrderedDict"),
}
