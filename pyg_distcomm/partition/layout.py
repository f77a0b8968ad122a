"""Reads and writes the files of a partition folder: arrays, their names and META.json.

Arrays are .npy files, which can be memory-mapped and hold no pickles. META.json holds a digest
of itself; its numbers and paths are checked before they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.partition.atomic import (
    Output,
    explaining_disk,
    new_folder,
    newest,
    sha256,
    sync,
)
from pyg_distcomm.partition.partition import PartitionReport
from pyg_distcomm.process import PROCESS

FORMAT = "pyg-distcomm partition"
VERSION = 1
META = "META.json"
OWNER = "owner.npy"

Meta = dict[str, Any]
Verify = Literal["sizes", "checksums"]

_PART = re.compile(r"part_\d{5,}")
_OWN = re.compile(
    r"META\.json|owner\.npy|graph__[^/]*\.npy|spool/[^/]*\.npy"
    r"|part_\d{5,}/(node_gid|edge_gid|edge_index|(node|edge)__[^/]*)\.npy"
)
_LEVELS = ("node", "edge", "graph")
_MOST = 2**53  # a number that JSON keeps
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def part_name(part: int) -> str:
    """Returns the name of a part's folder."""
    return f"part_{part:05d}"


def file_name(kind: str, name: str) -> str:
    """Returns the name of an attribute's file; special characters are percent-encoded."""
    return f"{kind}__{quote(name, safe=',')}.npy"


def is_folder(folder: str | Path) -> bool:
    """Returns whether `write_folder` wrote the folder, in any version."""
    try:
        return bool(load_json(Path(folder) / META).get("format") == FORMAT)
    except ValueError:
        return False


def folder_meta(folder: str | Path) -> Meta:
    """Reads META.json: num_nodes, num_edges, num_parts, attributes, report, files.

    Raises ValueError, naming the file, if it is missing, damaged, altered, of another
    format or version, or has values that are impossible in a partition.
    """
    path = Path(folder) / META
    meta = load_json(path)
    if meta.get("format") != FORMAT:
        raise ValueError(f"{path}: not a {FORMAT} (format {meta.get('format')!r})")
    version = meta.get("version")
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path}: version {version!r}, but this package reads version "
            f"{VERSION}; write the folder again with `pyg-distcomm partition`"
        )
    if meta.get("digest") != _digest(meta):
        raise ValueError(f"{path}: altered since it was written (its digest differs)")
    try:
        sound = _is_sound(meta)
    except (AttributeError, KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ValueError(
            f"{path}: has fields that this package does not write, and their digest; write "
            "the folder again with `pyg-distcomm partition`"
        )
    return meta


def _is_sound(meta: Meta) -> bool:
    """Returns whether counts, attributes and files are as they are written, or raises.

    The digest tells damage; this is for a folder whose writer may mean harm. What is read is
    below the folder, and no larger than its files: see `file_name` and `read_array`.
    """
    report, parts = PartitionReport.from_dict(meta["report"]), meta["num_parts"]
    types = meta.get("types", {"nodes": {}, "edges": []})
    by_part = {
        "nodes": [*types["nodes"].values()] or [report.nodes],
        "edges": [each["edges"] for each in types["edges"]] or [report.edges],
        "rows": [each["halo_rows"] for each in types["edges"]],
    }
    by_part["rows"] += [report.train, report.halo_rows, report.send_rows]
    every = [counts for each in by_part.values() for counts in each]
    every += [report.nodes, report.edges]
    numbers = [parts, report.edge_cut, *(n for counts in every for n in counts)]
    sound = all(type(n) is int and 0 <= n < _MOST for n in numbers) and parts > 0
    sound = sound and all(len(counts) == parts for counts in every)
    for name, whole in (("nodes", report.nodes), ("edges", report.edges)):
        sums = tuple(map(sum, zip(*by_part[name], strict=True)))
        sound = sound and sums == whole and sum(sums) == meta[f"num_{name}"]
    for attr in meta["attributes"].values():
        sound = sound and attr["kind"] in _LEVELS and isinstance(attr["shape"], list)
        sound = sound and isinstance(getattr(torch, attr["dtype"]), torch.dtype)
        sound = sound and (attr["kind"] == "graph" or len(attr["shape"]) > 0)
    for file in meta["files"].values():
        sound = sound and type(file["bytes"]) is int and type(file["sha256"]) is str
    return sound and type(meta["partition"]) is str and type(meta["values"]) is dict


def check_file(folder: Path, meta: Meta, name: str, verify: Verify) -> None:
    """Raises ValueError unless a file has the length, if asked the checksum, in META.json."""
    path, want = folder / name, meta["files"].get(name)
    if want is None:
        raise ValueError(f"{folder / META}: files does not name {name!r}")
    if not path.is_file():
        raise ValueError(f"{path}: missing")
    size = path.stat().st_size
    if size != want["bytes"]:
        raise ValueError(f"{path}: {size} bytes, but META.json says {want['bytes']}")
    if verify == "checksums" and sha256(path) != want["sha256"]:
        raise ValueError(f"{path}: altered since it was written (its sha256 differs)")


def write_meta(out: Path, meta: Meta) -> None:
    """Writes META.json with a digest of its content, and flushes it.

    meta  num_nodes, num_edges, num_parts, partition (its digest), attributes, values,
          report and files
    """
    meta = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **meta}))
    meta["digest"] = _digest(meta)
    with open(out / META, "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(out)


def _digest(meta: Meta) -> str:
    sealed = {name: value for name, value in meta.items() if name != "digest"}
    return hashlib.sha256(json.dumps(sealed, sort_keys=True).encode()).hexdigest()


def load_json(path: Path) -> Meta:
    """Reads a JSON object; raises ValueError, naming the file."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        place = path.parent
        left = None if place.exists() else newest(place, ended=True)
        advice = f"; a killed writer left it at {left}: rename that" if left else ""
        raise ValueError(f"{path}: missing{advice}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not isinstance(meta, dict):
        raise ValueError(f"{path}: is not a JSON object, so it belongs to no partition")
    return meta


def check_target(out: Path, force: bool) -> None:
    """Raises unless a partition folder may be written there."""
    if not out.exists():
        return
    if not force:
        raise ValueError(f"{out}: exists already; give another name, or force=True")
    if not out.is_dir() or (any(out.iterdir()) and not is_folder(out)):
        raise ValueError(
            f"{out}: is not a partition folder, so it is not replaced; remove it first"
        )
    for path in foreign_files(out):
        raise ValueError(
            f"{path}: not a file of the partition, so {out} is not replaced; move it away"
        )


def foreign_files(folder: Path) -> Iterator[Path]:
    """Yields files below a partition folder, maybe half written, that are not part of it.

    A file is part of it if META.json lists it or, without a list, by its name.
    """
    try:
        listed = load_json(folder / META).get("files")
    except ValueError:
        listed = None
    names = {META, *listed} if isinstance(listed, dict) else None
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(here, name)
            inner = path.relative_to(folder).as_posix()
            if path.is_dir() and (_PART.fullmatch(inner) or inner == "spool"):
                continue
            if not (_OWN.fullmatch(inner) if names is None else inner in names):
                yield path


@contextlib.contextmanager
def new_partition(out: Path, force: bool) -> Iterator[Path]:
    """Yields a folder to write in, and renames it to `out` at the end.

    Raises:
        ValueError: naming the file and the cause, if the disk is full or read-only, or
            something else is at `out`. An earlier folder at `out` then stays.
    """

    def is_ours(left: Path) -> bool:
        return left.is_dir() and not any(foreign_files(left))

    check = partial(check_target, out, force)
    with explaining_disk(out), new_folder(out, check, is_folder, is_ours) as aside:
        yield aside


def write_array(path: Path, tensor: Tensor) -> None:
    """Writes a tensor; `flush_files` flushes it to the disk."""
    plain = tensor.detach().as_subclass(Tensor).cpu().contiguous()
    array = plain.view(_numpy_dtype(plain.dtype)).numpy()
    with open(path, "wb") as file:
        np.save(Output(file), array, allow_pickle=False)


def flush_files(folder: Path) -> Meta:
    """Flushes all .npy files below a folder; returns their lengths and sha256."""
    files: Meta = {}
    paths = sorted(folder.rglob("*.npy"))
    for path in paths:
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    for parent in {path.parent for path in paths}:
        sync(parent)
    return files


def read_array(
    path: Path, dtype: str, shape: list[int] | tuple[int, ...], ids: bool = False
) -> Tensor:
    """Maps a tensor from a file, which is read on access.

    Writing to a mapped tensor does not change the file; `ids` are not written to, since
    passes over them drop their pages (`leave_in_file`). Raises ValueError, naming
    the file, if it is missing, damaged, or not of this dtype and shape.
    """
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except Exception as error:  # NumPy evaluates the head, and maps what it says
        raise ValueError(f"{path}: cannot be read: {error}") from None
    want = getattr(torch, str(dtype), None)
    if not isinstance(want, torch.dtype):
        raise ValueError(f"{path}: META.json gives it the unknown dtype {dtype!r}")
    on_disk = torch.empty(0, dtype=_numpy_dtype(want)).numpy().dtype
    if list(array.shape) != list(shape) or array.dtype != on_disk:
        raise ValueError(
            f"{path}: holds {array.dtype} {list(array.shape)}, but META.json says "
            f"{dtype} {list(shape)}"
        )
    found = torch.from_numpy(np.asarray(array)).view(want)
    if ids:
        begin = found.untyped_storage().data_ptr()
        PROCESS.in_files.add(begin)
        weakref.finalize(array, PROCESS.in_files.discard, begin)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype without its prefix: "float32", "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _numpy_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in the file: unsigned integers for those that NumPy lacks."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return _BITS[dtype.itemsize]
    return dtype
