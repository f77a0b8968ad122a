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
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm.partition.atomic import (
    Output,
    clear,
    explaining_disk,
    new_token,
    newest,
    put_back,
    put_in_place,
    sha256,
    sibling,
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
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEPARATOR = re.compile(r"[/\\]")
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
    problem = _first_problem(meta)
    if problem is not None:
        raise ValueError(
            f"{path}: {problem}; write the folder again with `pyg-distcomm partition`"
        )
    return meta


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
def new_folder(out: Path, force: bool) -> Iterator[Path]:
    """Yields a folder to write in, and renames it to `out` at the end.

    Raises:
        ValueError: naming the file and the cause, if the disk is full or read-only, or
            something else is at `out`. An earlier folder at `out` then stays.
    """
    put_back(out, is_folder)
    clear(out, lambda left: left.is_dir() and not any(foreign_files(left)))
    check_target(out, force)
    aside = sibling(out, "writing", new_token())
    try:
        with explaining_disk(out):
            aside.mkdir(parents=True)
            yield aside
            # again: another process may have written it meanwhile
            check_target(out, force)
            put_in_place(aside, out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _first_problem(meta: Meta) -> str | None:
    """Describes the first field that is missing, mistyped or impossible, or returns None.

    Its digest tells whether it is as it was written; this is for whoever wrote another digest.
    """
    try:
        return next(_problems(meta), None)
    except KeyError as error:
        return f"has no {error.args[0]!r}"
    except (TypeError, AttributeError) as error:
        return f"has a field of another type ({error})"


def _problems(meta: Meta) -> Iterator[str]:
    for name in ("num_nodes", "num_edges", "num_parts"):
        if not _is_count(meta[name]):
            yield f"{name} is {meta[name]!r}, wanted a number of at least 0"
    if meta["num_parts"] < 1:
        yield "num_parts is 0, wanted at least 1"
    for name in ("attributes", "values", "partition", "report", "files"):
        kind = str if name == "partition" else dict
        if not isinstance(meta[name], kind):
            yield f"{name} is {meta[name]!r}, wanted a {kind.__name__}"
    report, parts = meta["report"], meta["num_parts"]
    for name in ("nodes", "edges", "train", "halo_rows", "send_rows"):
        if not _are_counts(report[name], parts):
            yield f"report.{name} is {str(report[name])[:80]}, wanted {parts} counts"
    if not _is_count(report["edge_cut"]):
        yield f"report.edge_cut is {report['edge_cut']!r}, wanted a number of at least 0"
    PartitionReport.from_dict(report)  # raises for other fields, also of one before
    for name in ("nodes", "edges"):
        if sum(report[name]) != meta[f"num_{name}"]:
            yield f"num_{name} is {meta[f'num_{name}']}, but report has {sum(report[name])}"
    types = meta.get("types", {"nodes": {}, "edges": []})
    for counts in (
        *types["nodes"].values(),
        *(each[what] for each in types["edges"] for what in ("edges", "halo_rows")),
    ):
        if not _are_counts(counts, parts):
            yield f"types has {str(counts)[:80]}, wanted {parts} counts"
    for name, several in (
        ("nodes", types["nodes"].values()),
        ("edges", [each["edges"] for each in types["edges"]]),
    ):
        if several and [*map(sum, zip(*several, strict=True))] != report[name]:
            yield f"types have other {name} than the report, {report[name]}"
    for name, attr in meta["attributes"].items():
        yield from _attribute_problems(name, attr)
    for name, file in meta["files"].items():
        yield from _file_problems(name, file)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _are_counts(value: Any, length: int) -> bool:
    fits = isinstance(value, list) and len(value) == length
    return fits and all(map(_is_count, value))


def _attribute_problems(name: str, attr: Any) -> Iterator[str]:
    if not isinstance(attr, dict):
        yield f"attributes.{name} is {attr!r}, wanted a dict"
    kind, dtype, shape = attr["kind"], attr["dtype"], attr["shape"]
    if kind not in _LEVELS:
        yield f"attributes.{name}.kind is {kind!r}, wanted one of {_LEVELS}"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        yield f"attributes.{name}.dtype is {dtype!r}, wanted the name of a dtype"
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        yield f"attributes.{name}.shape is {shape!r}, wanted sizes of at least 0"
    if kind != "graph" and not shape:
        yield f"attributes.{name}.shape is {shape}, wanted a number of rows"


def _file_problems(name: str, file: Any) -> Iterator[str]:
    steps = _SEPARATOR.split(name)
    if any(step in ("", ".", "..") or ":" in step for step in steps):
        yield f"files names {name!r}, which is not inside the folder"
    if not isinstance(file, dict) or not _is_count(file["bytes"]):
        yield f"files.{name}.bytes is wrong: {file!r}"
    if not isinstance(file["sha256"], str) or not _SHA256.fullmatch(file["sha256"]):
        yield f"files.{name}.sha256 is wrong: {file['sha256']!r}"


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
    path: Path,
    dtype: str,
    shape: list[int] | tuple[int, ...],
    mmap: bool = True,
    ids: bool = False,
) -> Tensor:
    """Reads a tensor; with `mmap`, it is mapped from the file, which is read on access.

    Writing to a mapped tensor does not change the file; `ids` are not written to, since
    passes over them drop their pages (`leave_in_file`). Raises ValueError, naming
    the file, if it is missing, damaged, or not of this dtype and shape.
    """
    try:
        array = np.load(path, mmap_mode="c" if mmap else None, allow_pickle=False)
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
    if ids and mmap:
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
