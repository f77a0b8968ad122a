"""Joins the lines of a docstring that name several arguments at once, for mkdocstrings.

Args:
        data, num_neighbors, input_nodes, replace,
        disjoint: as in PyG.

is one entry with one line of names.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMES = re.compile(
    r"^( +)((?:\*{0,2}\w+, )*\*{0,2}\w+,)\n +(?=(?:\*{0,2}\w+, )*\*{0,2}\w+[,:])", re.M
)


class JoinLists(griffe.Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Joins lines of names, of every object that has a docstring."""
        if obj.docstring is None:
            return
        text, count = obj.docstring.value, 1
        while count:
            text, count = NAMES.subn(r"\1\2 ", text)
        obj.docstring.value = text
