"""Prints what can be counted of the package's shape: modules, lines, importers, names, state.

    python tests/house_metrics.py [--root FOLDER]

`FOLDER` is a checkout, so that two commits can be compared: this one by default.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def measure(root: Path) -> dict[str, int]:
    """Returns each measure of the package below a checkout, by name."""
    home = root / "pyg_distcomm"
    paths = {
        str(path.relative_to(home).with_suffix("")).replace("/", "."): path
        for path in home.rglob("*.py")
    }
    trees = {name: ast.parse(path.read_text()) for name, path in paths.items()}
    lines = {name: len(path.read_text().splitlines()) for name, path in paths.items()}
    importers = defaultdict(set)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            base = node.module.removeprefix("pyg_distcomm").lstrip(".")
            for alias in node.names if node.module.startswith("pyg_distcomm") else ():
                full = f"{base}.{alias.name}".lstrip(".")
                importers[full if full in paths else base].add(name)
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    rooms = [name for name in paths if name.rpartition(".")[2] != "__init__"]
    single = [n for n in rooms if len(importers[n]) == 1 and lines[n] > 0]
    doors = [
        name
        for name in single
        if set(importers[name])
        & {"__init__", "api", f"{name.rpartition('.')[0]}.__init__"}
    ]
    verbless = [
        name
        for name in rooms
        if (ast.get_docstring(trees[name]) or "").split(" ")[0]
        in ("What", "How", "Where", "Whether", "Who", "A", "The")
    ]
    return {
        "modules": len(paths),
        "lines": sum(lines.values()),
        "modules at the top": sum("." not in name for name in rooms),
        "modules with one importer": len(single),
        "of these, where a public name is imported from": len(doors),
        "lines of the longest module": max(lines.values()),
        "class names of two classes": sum(count > 1 for count in classes.values()),
        "module docstrings that begin with no verb": len(verbless),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=HERE)
    for name, value in measure(parser.parse_args().root).items():
        print(f"{name:46}{value:8,}")


if __name__ == "__main__":
    main()
