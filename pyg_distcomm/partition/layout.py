"""Names of the files of a partition folder, and its META.json."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from pyg_distcomm.partition.arrays import exchange, fsync_folder, sha256, told
from pyg_distcomm.partition.aside import (
    beside,
    clear,
    in_state,
    is_over,
    new_token,
    newest,
)
from pyg_distcomm.partition.schema import Meta, problem_of

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
