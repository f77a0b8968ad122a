"""Whether others can write to a folder: what is loaded from it runs.

Numba keeps compiled loops as pickles, so whoever can write to their folder can run code in
the processes that load them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OURS = Path(__file__).resolve().parent


def untrusted_writer(folder: str | Path) -> str | None:
    """Says who else can write to a folder or rename it, if somebody can.

    The user, root, and whoever can write this package's source are trusted. Folders that do
    not exist yet are judged by those above them.
    """
    if not hasattr(os, "getuid"):
        return None  # Windows keeps users' folders apart
    path = Path(os.path.abspath(folder))
    trusted = {0, os.getuid(), OURS.stat().st_uid}
    for place in (path, *path.parents):
        try:
            about = place.stat()
        except OSError:
            continue
        # where names are sticky others add their own, and can not replace ours
        shared = place != path and bool(about.st_mode & stat.S_ISVTX)
        if about.st_uid not in trusted:
            return f"{place} belongs to another user (uid {about.st_uid})"
        if about.st_mode & stat.S_IWOTH and not shared:
            return f"all users can write to {place}"
        if about.st_mode & stat.S_IWGRP and not shared and not _is_own(about.st_gid):
            return f"group {about.st_gid} can write to {place}"
    return None


def _is_own(gid: int) -> bool:
    """Says whether a group is the user's alone, or can write this package's source."""
    source = OURS.stat()
    if gid == 0 or (source.st_gid == gid and source.st_mode & stat.S_IWGRP):
        return True
    import grp
    import pwd

    try:
        name = pwd.getpwuid(os.getuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and not set(group.gr_mem) - {name}
