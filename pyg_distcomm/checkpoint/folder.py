"""Saves a folder of all ranks whole or not at all, and detects damage in a saved one."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.partition.atomic import (
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

MARK = ".pyg_distcomm.json"
# per kind of folder: a file that it must hold, and patterns of all that it may hold
_CONTENTS = {
    "checkpoint": ("state.mesh.pt", (MARK, "state.*.pt", "link.*.pt")),
    "pipeline": ("model.pt", (MARK, "model.pt", "rows*.pt")),
}
_SHARED_DISK_WAIT = 5.0  # seconds until a shared disk shows a folder of another host


@contextlib.contextmanager
def whole_folder(path: str | Path, kind: str, axis: Axis) -> Iterator[Path]:
    """Yields a folder to write in, and renames it to `path` at the end; collective.

    Errors inside must be raised on all ranks. See [Note: whole folders] in
    `partition/atomic.py`.

    Args:
        path: the path of the folder, the same on all ranks, on a disk that they share.
        kind: "checkpoint" or "pipeline"; only a folder of this kind is replaced.
        axis: the ranks.

    Raises:
        ValueError: on all ranks, if ranks give different paths, something else is at
            `path`, or the disk cannot be written.
    """
    place = Path(os.path.realpath(path))
    check_alike({"path": os.path.abspath(path)}, axis)
    token = str(collectives.broadcast_object(new_token(), axis))
    aside = sibling(place, "writing", token)
    first = axis.rank == 0
    try:
        with on_all_ranks(axis), explaining_disk(aside):
            if first:
                _prepare_folder(place, aside, kind)
        collectives.agree(_missing_here(aside), axis)
        yield aside
        with on_all_ranks(axis), explaining_disk(aside):
            if first:
                _finish_folder(place, aside)
    except BaseException:
        if first:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def find(path: str | Path) -> Path:
    """Returns the last folder saved at `path`; a killed save may have left it beside `path`."""
    place = Path(os.path.realpath(path))
    if place.exists():
        return place
    return newest(place) or place


def check_files(folder: Path, *patterns: str) -> None:
    """Raises ValueError, naming the file, if one of a folder differs from the saved one.

    Args:
        folder: a folder that `whole_folder` wrote.
        patterns: the patterns of files to check, among those saved and those that exist now.

    Price: a second or less for each GB.
    """
    mark = folder / MARK
    _check_is_file(mark)
    try:
        sums = dict(json.loads(mark.read_text())["files"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = type(error).__name__
        raise ValueError(
            f"{mark}: damaged, or not written to its end ({why})"
        ) from error
    names = {*sums, *os.listdir(folder)} - {MARK}
    chosen = {n for n in names if any(fnmatch.fnmatch(n, one) for one in patterns)}
    for path in [folder / name for name in sorted(chosen)]:
        _check_is_file(path)
        if path.name not in sums:
            raise ValueError(
                f"{path}: {mark} lists what was saved, and does not name it"
            )
        if sha256(path) != sums[path.name]:
            raise ValueError(f"{path}: altered since it was saved (its sha256 differs)")


def _check_is_file(path: Path) -> None:
    """Raises for a missing file, or something else in its place, such as a named pipe."""
    if not path.is_file():
        found = "not a file" if os.path.lexists(path) else "missing"
        raise ValueError(f"{path}: {found}")


def _prepare_folder(place: Path, aside: Path, kind: str) -> None:
    if not _is_ours(place, kind):
        raise ValueError(
            f"save to another path: {place} holds something other than a {kind} of "
            "pyg_distcomm, and would be replaced; or move it away"
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    put_back(place, lambda left: _is_ours(left, kind))
    clear(place, lambda left: _is_ours(left, kind, half=True))
    aside.mkdir()
    (aside / MARK).write_text(json.dumps({"kind": kind}))


def _missing_here(aside: Path) -> str | None:
    """Describes the problem if this rank does not see the folder that rank 0 made."""
    stop = time.monotonic() + _SHARED_DISK_WAIT
    while not (aside / MARK).exists():
        if time.monotonic() > stop:
            return (
                f"save to a disk that all hosts share: {aside.parent} does not show here "
                "what rank 0 has written"
            )
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            os.listdir(aside.parent)  # network file systems look again
    return None


def _is_ours(path: Path, kind: str, half: bool = False) -> bool:
    """Returns whether a folder is of a kind; with `half`, also if it is half written."""
    if not os.path.lexists(path):
        return True
    if not path.is_dir():
        return False
    needed, allowed = _CONTENTS[kind]
    names = os.listdir(path)
    known = all(any(fnmatch.fnmatch(n, one) for one in allowed) for n in names)
    return not names or (known and (half or needed in names or MARK in names))


def _finish_folder(place: Path, aside: Path) -> None:
    mark = json.loads((aside / MARK).read_text())
    files = sorted(file for file in aside.iterdir() if file.name != MARK)
    mark["files"] = {file.name: sha256(file) for file in files}
    (aside / MARK).write_text(json.dumps(mark))
    for path in (*aside.iterdir(), aside):
        sync(path)
    put_in_place(aside, place)
