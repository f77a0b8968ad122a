"""Finds what other packages register by entry points: cutters, codecs, rules of sampling.

A package registers by a name, in its pyproject.toml,

    [project.entry-points."pyg_distcomm.cutters"]
    spectral = "my_package:spectral"

and the name is then known wherever those of this package are, the command line included.
Names of this package come first: one that is registered again is never looked up.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

__all__ = ["CODECS", "CUTTERS", "RULES", "load", "registered"]

CUTTERS = "pyg_distcomm.cutters"
CODECS = "pyg_distcomm.codecs"
RULES = "pyg_distcomm.sampling_rules"


def registered(group: str) -> tuple[str, ...]:
    """Returns the names in a group, sorted; nothing is imported."""
    return tuple(sorted({point.name for point in entry_points(group=group)}))


def load(group: str, name: str) -> Any:
    """Imports what is registered by a name.

    Raises:
        KeyError: if there is none.
        ValueError: if there are two of different packages, or it cannot be imported; it
            names the packages.
    """
    found = {point.value: point for point in entry_points(group=group, name=name)}
    if not found:
        raise KeyError(name)
    if len(found) > 1:
        sources = " and ".join(sorted(_source(point) for point in found.values()))
        raise ValueError(
            f"{name!r} is registered twice in {group}, by {sources}; uninstall one of them"
        )
    (point,) = found.values()
    try:
        return point.load()
    except Exception as error:
        raise ValueError(
            f"{name!r}, registered in {group} by {_source(point)}, cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error


def _source(point: EntryPoint) -> str:
    package = "a package" if point.dist is None else point.dist.name
    return f"{package} ({point.value})"
