"""Writes folders that appear whole or not at all, and finds them after a killed save.

[Note: whole folders] A save writes a folder of its own, `.NAME.writing-TOKEN`, beside its
place; the token says which process writes. Once all of it is on the disk it becomes
`.NAME.ready-TOKEN`, which is exchanged with what stands at NAME in one step (`renameat2` of
Linux), so that there is always something. Where the file system can not, what stood there is
renamed first, and a kill between the two steps leaves no NAME; `find` then returns the folder
that is ready, and the next save keeps it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.partition.arrays import (
    beside,
    clear,
    exchange,
    in_state,
    is_over,
    leftovers,
    new_token,
    newest,
    sha256,
    told,
)

MARK = ".pyg_distcomm.json"
# what each kind of folder holds: a file that has to be there, and all that may be
_CONTENTS = {
    "checkpoint": (".metadata", (MARK, ".metadata*", "*.distcp", "link.*.pt")),
    "pipeline": ("model.pt", (MARK, "model.pt", "rows*.pt")),
}
_PATIENCE = 5.0  # seconds in which another host's folder shows on a shared disk


@contextlib.contextmanager
def whole_folder(
    path: str | Path, kind: str, axis: Axis, keep: int = 1
) -> Iterator[Path]:
    """Yields a folder to write in, which then takes its place at `path`; collective.

    What fails inside has to fail on all ranks.

    Args:
        path: where the folder is to be, the same on all ranks and on a disk that they share.
        kind: "checkpoint" or "pipeline"; only a folder of this kind is replaced.
        axis: the ranks.
        keep: how many to keep: the new one at `path`, those before it at `path.1`, ...

    Raises:
        ValueError: on all ranks, if ranks differ, files of others are at `path`, or the disk
            can not be written.
    """
    place = Path(os.path.realpath(path))
    _agree_on(os.path.abspath(path), keep, axis)
    token = str(collectives.broadcast_object(new_token(), axis))
    aside = beside(place, "writing", token)
    first = axis.rank == 0
    collectives.agree(
        _tried(lambda: _begin(place, aside, kind, keep), aside, first), axis
    )
    try:
        collectives.agree(_unseen(aside), axis)
        yield aside
    except BaseException:
        if first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    problem = _tried(lambda: _finish(place, aside, keep), aside, first)
    collectives.agree(problem, axis)


def find(path: str | Path) -> Path:
    """Returns where the folder saved last at `path` is: there, or where a kill has left it."""
    place = Path(os.path.realpath(path))
    if place.exists():
        return place
    return newest(place) or place


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file and waits until it is on the disk."""
    write(path)
    _sync(path)


def damage(folder: Path, *patterns: str) -> str | None:
    """Says how files of a folder differ from what was saved, if they do.

    Args:
        folder: written by `whole_folder`.
        patterns: which files: those that were saved, and those that are there now.

    Price: a second or less for each GB.
    """
    mark = folder / MARK
    if not mark.is_file():
        return _no_file(mark)
    try:
        sums = dict(json.loads(mark.read_text())["files"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = type(error).__name__
        return f"{mark}: damaged, or not written to its end ({why})"
    names = {*sums, *os.listdir(folder)} - {MARK}
    asked = {n for n in names if any(fnmatch.fnmatch(n, one) for one in patterns)}
    for path in [folder / name for name in sorted(asked)]:
        if not path.is_file():
            return _no_file(path)
        if path.name not in sums:
            return f"{path}: {mark} lists what was saved, and does not name it"
        if sha256(path) != sums[path.name]:
            return f"{path}: altered since it was saved (its sha256 differs)"
    return None


def _no_file(path: Path) -> str:
    """Says what is in the place of a file: nothing, or, say, a pipe, which has no end."""
    return f"{path}: {'not a file' if os.path.lexists(path) else 'missing'}"


def _agree_on(path: str, keep: int, axis: Axis) -> None:
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise ValueError(f"keep must be a whole number of at least 1, got {keep!r}")
    every = collectives.all_gather_object([path, keep], axis)
    for rank, given in enumerate(every):
        for name, mine, its in zip(("path", "keep"), every[0], given, strict=True):
            if mine != its:
                raise ValueError(
                    f"save with the same {name} on all ranks: rank 0 got {mine!r}, rank "
                    f"{rank} got {its!r}"
                )


def _tried(act: Callable[[], None], aside: Path, here: bool) -> str | None:
    if not here:
        return None
    try:
        act()
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        return told(error, aside)
    except ValueError as error:
        return str(error)
    return None


def _begin(place: Path, aside: Path, kind: str, keep: int) -> None:
    kept = [_kept(place, k) for k in range(1, keep)]
    for there in (place, *kept):
        if not _is_ours(there, kind):
            raise ValueError(
                f"save to another path: {there} holds what is not a {kind} of pyg_distcomm, "
                "and would be replaced; or move it away"
            )
    place.parent.mkdir(parents=True, exist_ok=True)
    _clear(place, kind, keep)
    aside.mkdir()
    (aside / MARK).write_text(json.dumps({"kind": kind}))


def _unseen(aside: Path) -> str | None:
    """Says if this rank does not see the folder that rank 0 has made."""
    stop = time.monotonic() + _PATIENCE
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
    """Says whether a folder is of a kind, or half of one that was being removed."""
    if not os.path.lexists(path):
        return True
    if not path.is_dir():
        return False
    needed, allowed = _CONTENTS[kind]
    names = os.listdir(path)
    known = all(any(fnmatch.fnmatch(n, one) for one in allowed) for n in names)
    return not names or (known and (half or needed in names or MARK in names))


def _kept(place: Path, number: int) -> Path:
    return place.with_name(f"{place.name}.{number}")


def _clear(place: Path, kind: str, keep: int) -> None:
    """Takes away what killed saves have left, but the last whole folder.

    Of a save that was killed before what it replaced had its number, that gets it now.
    """
    last = None if place.exists() else newest(place, is_over)
    if last is not None:
        os.rename(last, place)
        os.rename(place, _free(place))
    replaced = [one for state in ("ready", "old") for one in leftovers(place, state)]
    for left in replaced if keep > 1 else []:
        if is_over(left) and _is_ours(left, kind) and _is_older(left, place):
            _move(left, _kept(place, 1), left)
    clear(place, lambda left: _is_ours(left, kind, half=True))


def _is_older(left: Path, place: Path) -> bool:
    """Says whether a whole folder was written before the one that is in its place."""
    marks = [folder / MARK for folder in (left, place)]
    if not all(mark.is_file() for mark in marks) or damage(left, "*") is not None:
        return False
    return marks[0].stat().st_mtime_ns < marks[1].stat().st_mtime_ns


def _free(place: Path) -> Path:
    """Returns the first number that no folder has, and says that it is taken."""
    number = 1
    while os.path.lexists(_kept(place, number)):
        number += 1
    free = _kept(place, number)
    warnings.warn(
        f"a save to {place} was killed; the last whole one is now at {free}",
        stacklevel=2,
    )
    return free


def _finish(place: Path, aside: Path, keep: int) -> None:
    mark = json.loads((aside / MARK).read_text())
    files = sorted(file for file in aside.iterdir() if file.name != MARK)
    mark["files"] = {file.name: sha256(file) for file in files}
    (aside / MARK).write_text(json.dumps(mark))
    for file in aside.iterdir():
        _sync(file)
    _sync(aside)
    ready = in_state(aside, "ready")
    os.rename(aside, ready)
    if not os.path.lexists(place):
        os.rename(ready, place)
    else:
        for number in range(keep - 1, 1, -1):
            _move(_kept(place, number - 1), _kept(place, number), ready)
        exchange(ready, place)
        if keep > 1:
            _move(ready, _kept(place, 1), ready)
        else:
            shutil.rmtree(ready)
    _sync(place.parent)


def _move(source: Path, target: Path, ready: Path) -> None:
    """Renames a folder; one in its way is removed under a name of its own."""
    if source.exists():
        if target.exists():
            removed = in_state(ready, "removing")
            os.rename(target, removed)
            os.rename(source, target)
            shutil.rmtree(removed)
        else:
            os.rename(source, target)


def _sync(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
