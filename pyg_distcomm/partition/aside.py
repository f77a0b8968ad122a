"""Names folders that are written beside their place, and removes what killed writers left.

A writer fills `.NAME.writing-TOKEN`, renames it to `.NAME.ready-TOKEN` once all of it is on the
disk, and exchanges that with what stands at NAME. The token names the writing process, so that
others can tell whether it is still at work.
"""

from __future__ import annotations

import glob
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

_FORGOTTEN = 86400.0  # seconds after which another host's unfinished folder is removed
_PARTS = re.compile(r"(.*)\.(writing|ready|old|removing)-(.+-\d+-[0-9a-f]{8})")
_OWNER = re.compile(r"\.(?:writing|ready|old|removing)-(.+)-(\d+)-[0-9a-f]{8}$")


def new_token() -> str:
    """Returns a name of this process and moment."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


def beside(place: Path, state: str, token: str) -> Path:
    """Names what belongs to a place in a state: "writing", "ready", "old" or "removing"."""
    return place.with_name(f".{place.name}.{state}-{token}")


def in_state(path: Path, state: str) -> Path:
    """Names the same writer's folder in another state."""
    name, _, token = _PARTS.fullmatch(path.name).groups()  # type: ignore[union-attr]
    return path.with_name(f"{name}.{state}-{token}")


def leftovers(place: Path, state: str) -> list[Path]:
    """Returns what writers have beside a place in a state."""
    found = place.parent.glob(f".{glob.escape(place.name)}.{state}-*")
    return [one for one in found if _OWNER.search(one.name)]


def newest(
    place: Path, wanted: Callable[[Path], bool] = lambda left: True
) -> Path | None:
    """Returns the folder that a killed writer left whole where nothing is in its place.

    Args:
        place: where it would be.
        wanted: which it may be; `is_over` for one that is renamed, since that of a writer
            at work is about to get its place.
    """
    for state in ("ready", "old"):
        left = [one for one in leftovers(place, state) if wanted(one)]
        if left:
            return max(left, key=lambda one: one.stat().st_mtime)
    return None


def clear(place: Path, is_ours: Callable[[Path], bool]) -> None:
    """Removes what writers that have ended left beside a place."""
    for state in ("writing", "ready", "old", "removing"):
        for left in leftovers(place, state):
            if is_over(left) and is_ours(left):
                shutil.rmtree(left, ignore_errors=True)


def is_over(left: Path) -> bool:
    """Returns whether the process that wrote a folder has ended, or never will go on."""
    host, pid = _OWNER.findall(left.name)[0]
    if host != socket.gethostname():
        return time.time() - left.stat().st_mtime > _FORGOTTEN
    if pid == str(os.getpid()):
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's, and alive
        pass
    return False
