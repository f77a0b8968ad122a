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


def _first_problem(meta: Meta) -> str | None:
    """Describes the first field that is missing, mistyped or impossible, or returns None.

    Its digest tells whether it is as it was written; this is for whoever wrote another digest.
    """
    try:
        for name, value, fits, wanted in _fields(meta):
            if not fits:
                return f"{name} is {repr(value)[:80]}, wanted {wanted}"
    except KeyError as error:
        return f"has no {error.args[0]!r}"
    except (TypeError, AttributeError) as error:
        return f"has a field of another type ({error})"
    return None


def _fields(meta: Meta) -> Iterator[tuple[str, Any, bool, str]]:
    """Yields each field: its name and value, whether it fits, and what is wanted.

    Later ones are looked for where earlier ones fit.
    """
    for name in ("attributes", "values", "partition", "report", "files"):
        kind = str if name == "partition" else dict
        yield name, meta[name], isinstance(meta[name], kind), f"a {kind.__name__}"
    report = meta["report"]
    counts = {name: meta[name] for name in ("num_nodes", "num_edges", "num_parts")}
    for name, count in {**counts, "report.edge_cut": report["edge_cut"]}.items():
        least = int(name == "num_parts")
        fits = _is_count(count) and count >= least
        yield name, count, fits, f"a number of at least {least}"
    types, parts = meta.get("types", {"nodes": {}, "edges": []}), meta["num_parts"]
    by_type = {"nodes": [*types["nodes"].values()], "edges": []}
    by_type["edges"] = [each["edges"] for each in types["edges"]]
    lists = [("types", each["halo_rows"]) for each in types["edges"]]
    lists += [("types", counts) for each in by_type.values() for counts in each]
    for name in ("nodes", "edges", "train", "halo_rows", "send_rows"):
        lists.append((f"report.{name}", report[name]))
    for name, each in lists:
        fits = isinstance(each, list) and len(each) == parts
        yield name, each, fits and all(map(_is_count, each)), f"{parts} counts"
    PartitionReport.from_dict(report)  # raises for other fields, also of one before
    for name, several in by_type.items():
        count, total = meta[f"num_{name}"], sum(report[name])
        yield f"num_{name}", count, count == total, f"{total}, as in the report"
        sums = [*map(sum, zip(*several, strict=True))]
        fits = not several or sums == report[name]
        yield f"sum of types.{name}", sums, fits, f"{report[name]}, as in the report"
    for name, attr in meta["attributes"].items():
        yield from _fields_of_attribute(f"attributes.{name}", attr)
    for name, file in meta["files"].items():
        steps = _SEPARATOR.split(name)
        inside = not any(step in ("", ".", "..") or ":" in step for step in steps)
        yield "a name in files", name, inside, "a path inside the folder"
        fits = isinstance(file, dict) and _is_count(file["bytes"])
        fits = fits and isinstance(file["sha256"], str)
        fits = fits and _SHA256.fullmatch(file["sha256"]) is not None
        yield f"files.{name}", file, fits, "its bytes and sha256"


def _fields_of_attribute(at: str, attr: Any) -> Iterator[tuple[str, Any, bool, str]]:
    yield at, attr, isinstance(attr, dict), "a dict"
    kind, dtype, shape = attr["kind"], attr["dtype"], attr["shape"]
    yield f"{at}.kind", kind, kind in _LEVELS, f"one of {_LEVELS}"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    yield f"{at}.dtype", dtype, isinstance(found, torch.dtype), "the name of a dtype"
    fits = isinstance(shape, list) and all(map(_is_count, shape))
    fits = fits and (kind == "graph" or shape != [])
    yield f"{at}.shape", shape, fits, "sizes of at least 0, one of rows first"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


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
