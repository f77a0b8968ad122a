"""Makes submodules of a PyG package importable under a package of ours.

`from pyg_distcomm.nn.conv.gcn_conv import gcn_norm` is PyG's gcn_norm, and
`from pyg_distcomm.nn.conv import GATConv` is `pyg_distcomm.nn.GATConv`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Mirror(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `ours.sub` where `theirs.sub` exists and our package has no such module."""

    def __init__(self, ours: str, theirs: str) -> None:
        self.ours, self.theirs = ours, theirs

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{self.ours}."):
            return None
        found = importlib.util.find_spec(self._original(name))
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(name, self, is_package=is_package)

    def _original(self, name: str) -> str:
        return self.theirs + name.removeprefix(self.ours)

    def exec_module(self, module: ModuleType) -> None:
        original = importlib.import_module(self._original(module.__name__))
        ours, theirs = sys.modules[self.ours], sys.modules[self.theirs]
        module.__doc__ = original.__doc__

        def get(name: str) -> Any:
            value = getattr(original, name)
            if isinstance(value, ModuleType) and value.__name__ == self._original(
                f"{module.__name__}.{name}"
            ):
                return importlib.import_module(f"{module.__name__}.{name}")
            if not isinstance(value, type):
                return value
            public = value is getattr(theirs, name, None)
            return getattr(ours, name) if public else value

        module.__getattr__ = get  # type: ignore[method-assign]
        public = getattr(original, "__all__", None)
        names = public or [name for name in vars(original) if name[0] != "_"]
        module.__all__ = list(names)  # type: ignore[attr-defined]
        module.__dir__ = lambda: sorted(vars(original))  # type: ignore[method-assign]


def mirror(ours: str, theirs: str) -> None:
    """Makes `theirs.sub` importable as `ours.sub`, where `ours` has no module of the name.

    Args:
        ours, theirs: names of packages.
    """
    sys.meta_path.append(_Mirror(ours, theirs))
