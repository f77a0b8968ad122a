"""Names the files of a partition folder, and reads and checks its META.json."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import torch

from pyg_distcomm.partition.arrays import (
    beside,
    clear,
    exchange,
    fsync_folder,
    in_state,
    is_over,
    new_token,
    newest,
    sha256,
    told,
)

Meta = dict[str, Any]

_STRUCTURE = ("edge_index", "num_nodes", "num_edges")
_KINDS = ("node", "edge", "graph")
_MOST = 2**53  # a number that JSON keeps
_SUM = re.compile(r"[0-9a-f]{64}")
_BETWEEN = re.compile(r"[/\\]")


def problem_of(meta: Meta) -> str | None:
    """Says which field is missing, mistyped or impossible, if one is."""
    try:
        return next(_problems(meta), None)
    except KeyError as error:
        return f"has no {error.args[0]!r}"


def _problems(meta: Meta) -> Iterator[str]:
    for name in ("num_nodes", "num_edges", "num_parts"):
        if not _is_count(meta[name]):
            yield f"{name} is {meta[name]!r}, wanted a number of at least 0"
    if meta["num_parts"] < 1:
        yield "num_parts is 0, wanted at least 1"
    for name, kind in {"attributes": dict, "values": dict, "partition": str}.items():
        if not isinstance(meta[name], kind):
            yield f"{name} is {meta[name]!r}, wanted a {kind.__name__}"
    for name in ("report", "files"):
        if not isinstance(meta[name], dict):
            yield f"{name} is {meta[name]!r}, wanted a dict"
    yield from _wrong_report(meta)
    for name, value in meta["values"].items():
        if name in _STRUCTURE or name in meta["attributes"]:
            yield f"values.{name} is {str(value)[:80]}, but {name!r} has a file"
    for name, attr in meta["attributes"].items():
        yield from _wrong_attribute(name, attr, meta)
    for name, file in meta["files"].items():
        yield from _wrong_file(name, file)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _wrong_report(meta: Meta) -> Iterator[str]:
    yield from _wrong_counts("report", meta["report"], meta)
    before = meta["report"].get("before")
    if before is not None:
        if not isinstance(before, dict):
            yield f"report.before is {str(before)[:80]}, wanted a dict or null"
            return
        yield from _wrong_counts("report.before", before, meta)
        if before.get("before") is not None:
            yield "report.before has a report before it, wanted null"


def _wrong_counts(where: str, report: dict[str, Any], meta: Meta) -> Iterator[str]:
    parts = meta["num_parts"]
    for name in ("nodes", "edges", "train", "halo_rows", "send_rows"):
        counts = report[name]
        if not _are_counts(counts, parts):
            yield f"{where}.{name} is {str(counts)[:80]}, wanted {parts} counts"
    for name in ("nodes", "edges"):
        total = meta[f"num_{name}"]
        if sum(report[name]) != total:
            yield f"num_{name} is {total}, but {where} has {sum(report[name])}"
    known = {"nodes", "edges", "train", "edge_cut", "halo_rows", "send_rows", "before"}
    known |= {"grid", "blocks", "block_send", "block_halo"}
    if strange := set(report) - known:
        yield f"{where} has the unknown field {min(strange)!r}"
    cut = report["edge_cut"]
    if not _is_count(cut) or cut > meta["num_edges"]:
        yield f"{where}.edge_cut is {cut!r}, wanted at most {meta['num_edges']}"
    grid = report.get("grid", [])
    if grid != [] and not (_are_counts(grid, 3) and math.prod(grid) == parts):
        yield f"{where}.grid is {str(grid)[:80]}, wanted three counts of {parts} parts"
        return
    lengths = {0, grid[0] * grid[1]} if grid else {0}
    for name in ("blocks", "block_send", "block_halo"):
        counts = report.get(name, [])
        if not any(_are_counts(counts, length) for length in lengths):
            yield f"{where}.{name} is {str(counts)[:80]}, wanted {max(lengths)} counts"


def _are_counts(value: Any, length: int) -> bool:
    fits = isinstance(value, list) and len(value) == length
    return fits and all(map(_is_count, value))


def _wrong_attribute(name: str, attr: Any, meta: Meta) -> Iterator[str]:
    if not isinstance(attr, dict):
        yield f"attributes.{name} is {attr!r}, wanted a dict"
    kind, dtype, shape = attr["kind"], attr["dtype"], attr["shape"]
    if kind not in _KINDS:
        yield f"attributes.{name}.kind is {kind!r}, wanted one of {_KINDS}"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        yield f"attributes.{name}.dtype is {dtype!r}, wanted the name of a dtype"
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        yield f"attributes.{name}.shape is {shape!r}, wanted sizes of at least 0"
    rows = {"node": meta["num_nodes"], "edge": meta["num_edges"]}.get(kind)
    if rows is not None and shape[:1] != [rows]:
        yield f"attributes.{name}.shape is {shape}, wanted {rows} rows"


def _wrong_file(name: str, file: Any) -> Iterator[str]:
    steps = _BETWEEN.split(name)
    if any(step in ("", ".", "..") or ":" in step for step in steps):
        yield f"files names {name!r}, which is not inside the folder"
    if not isinstance(file, dict) or not _is_count(file["bytes"]):
        yield f"files.{name}.bytes is wrong: {file!r}"
    if not isinstance(file["sha256"], str) or not _SUM.fullmatch(file["sha256"]):
        yield f"files.{name}.sha256 is wrong: {file['sha256']!r}"


FORMAT = "pyg-distcomm partition"
VERSION = 1
META = "META.json"
OWNER = "owner.npy"

_KNOWN = re.compile(r"META\.json|owner\.npy|part_\d{5,}|graph__.*\.npy")

Verify = Literal["sizes", "checksums"]


def part_name(part: int) -> str:
    """Names the folder of a part."""
    return f"part_{part:05d}"


def file_name(kind: str, name: str) -> str:
    """Names the file of an attribute; odd characters are percent-encoded."""
    return f"{kind}__{quote(name, safe='')}.npy"


def is_folder(folder: str | Path) -> bool:
    """Says whether the folder was written by `write_folder`, in any version."""
    try:
        return bool(load_json(Path(folder) / META).get("format") == FORMAT)
    except ValueError:
        return False


def folder_meta(folder: str | Path) -> Meta:
    """Reads META.json: num_nodes, num_edges, num_parts, attributes, report, files.

    Raises ValueError, naming the file, when it is missing, damaged, altered, of another
    format or version, or holds what no partition has.
    """
    path = Path(folder) / META
    meta = load_json(path)
    if meta.get("format") != FORMAT:
        raise ValueError(f"{path}: not a {FORMAT} (format {meta.get('format')!r})")
    if type(meta.get("version")) is not int or meta["version"] != VERSION:
        raise ValueError(
            f"{path}: version {meta.get('version')!r}, but this package reads version "
            f"{VERSION}; write the folder again with `pyg-distcomm partition`"
        )
    if meta.get("digest") != _digest(meta):
        raise ValueError(f"{path}: altered since it was written (its digest differs)")
    problem = problem_of(meta)
    if problem is not None:
        raise ValueError(
            f"{path}: {problem}; write the folder again with `pyg-distcomm partition`"
        )
    return meta


def check_file(folder: Path, meta: Meta, name: str, verify: Verify) -> None:
    """Raises ValueError unless a file is as long, and holds, what META.json says."""
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
    """Writes META.json, sealed with a digest of itself, and flushes it.

    meta  num_nodes, num_edges, num_parts, partition (its digest), attributes, values,
          report and files
    """
    meta = json.loads(json.dumps({"format": FORMAT, "version": VERSION, **meta}))
    meta["digest"] = _digest(meta)
    with open(out / META, "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(out)


def _digest(meta: Meta) -> str:
    told = {name: value for name, value in meta.items() if name != "digest"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def load_json(path: Path) -> Meta:
    """Reads a JSON object; raises ValueError, naming the file."""
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        last = None if path.parent.exists() else newest(path.parent)
        advice = f"; a killed writer left it at {last}: rename that" if last else ""
        raise ValueError(f"{path}: missing{advice}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not isinstance(meta, dict):
        raise ValueError(f"{path}: holds no object, so it is no partition's")
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
    if not any(out.iterdir()):
        return
    files = load_json(out / META).get("files")
    known = {META, *(files if isinstance(files, dict) else ())}
    for path in out.rglob("*"):
        folder = path.is_dir() and not path.is_symlink()
        if not folder and path.relative_to(out).as_posix() not in known:
            raise ValueError(
                f"{path}: no file of the partition, so {out} is not replaced; move it away"
            )


@contextlib.contextmanager
def written(aside: Path, out: Path) -> Iterator[None]:
    """Removes what was written aside if not all of it could be.

    Raises:
        ValueError: naming the file and the cause, for a disk that is full or read-only.
    """
    try:
        yield
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError):
            raise ValueError(told(error, out)) from error
        raise


def put_in_place(aside: Path, out: Path, force: bool) -> None:
    """Renames a finished folder to `out`; what was there before stays until then."""
    check_target(out, force)  # again: someone else may have written it meanwhile
    ready = in_state(aside, "ready")
    aside.rename(ready)
    try:
        if out.exists():
            exchange(ready, out)
            shutil.rmtree(ready, ignore_errors=True)
        else:
            ready.rename(out)
    except BaseException:
        shutil.rmtree(ready, ignore_errors=True)
        raise
    fsync_folder(out.parent)


def new_aside(out: Path) -> Path:
    """Names where a folder is written, and removes what killed writers have left there."""
    last = None if out.exists() else newest(out, is_over)
    if last is not None and is_folder(last):  # killed between two renames
        last.rename(out)
    clear(
        out,
        lambda left: left.is_dir() and set(os.listdir(left)) <= _WRITTEN | _parts(left),
    )
    return beside(out, "writing", new_token())


_WRITTEN = {META, OWNER, "spool"}


def _parts(folder: Path) -> set[str]:
    return {name for name in os.listdir(folder) if _KNOWN.fullmatch(name)}
