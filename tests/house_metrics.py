"""Prints what can be counted of the package's shape: modules, lines, importers, names, state.

    python tests/house_metrics.py [--root FOLDER] [--modules]

`FOLDER` is a checkout, so that two commits can be compared: this one by default. `--modules`
lists the modules instead, each with the first line of its docstring.
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
    nodes = {name: list(ast.walk(tree)) for name, tree in trees.items()}
    lines = {name: len(path.read_text().splitlines()) for name, path in paths.items()}
    importers = defaultdict(set)
    for name, every in nodes.items():
        for node in every:
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            base = node.module.removeprefix("pyg_distcomm").lstrip(".")
            for alias in node.names if node.module.startswith("pyg_distcomm") else ():
                full = f"{base}.{alias.name}".lstrip(".")
                importers[full if full in paths else base].add(name)
    classes = Counter(
        node.name
        for every in nodes.values()
        for node in every
        if isinstance(node, ast.ClassDef)
    )
    rooms = [name for name in paths if name.rpartition(".")[2] != "__init__"]
    single = [n for n in rooms if len(importers[n]) == 1 and lines[n] > 0]
    inits = {n: {"__init__", "api", f"{n.rpartition('.')[0]}.__init__"} for n in single}
    doors = [name for name in single if importers[name] & inits[name]]
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
        "classes of more than 20 methods or 15 attributes": len(large(nodes)),
        "classes that intercept ops or functions of torch": len(worlds(nodes)),
        "reads of frames, other than for a message": len(reads(nodes, FRAMES)),
        "reads of bytecode or of the garbage collector": len(reads(nodes, CODE)),
        "lines of tests and their helpers": sum(
            len(path.read_text().splitlines())
            for folder in ("tests", "tools")
            for path in (root / folder).glob("*.py")
        ),
        "lines of CONTRIBUTING.md": (root / "CONTRIBUTING.md").read_text().count("\n"),
    }


# where a frame names a line of the script in a warning or an error
MESSAGES = "comm.failure sharded.whole sharded.agreement pipeline.pipeline".split()
FRAMES = {"_getframe", "currentframe", "stack", "f_back", "f_locals"}
CODE = {"__code__", "co_code", "get_objects", "get_referrers", "dis"}


def large(nodes: dict[str, list[ast.AST]]) -> list[str]:
    """Returns the classes that have more than 20 methods, or set more than 15 attributes."""
    found = []
    for name, every in nodes.items():
        for node in every:
            if not isinstance(node, ast.ClassDef):
                continue
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            fields = {one.target.id for one in node.body if _is_field(one)}
            fields |= {
                one.attr
                for one in ast.walk(node)
                if isinstance(one, ast.Attribute)
                and isinstance(one.ctx, ast.Store)
                and isinstance(one.value, ast.Name)
                and one.value.id == "self"
            }
            if len(methods) > 20 or len(fields) > 15:
                found.append(f"{name}.{node.name}")
    return found


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def worlds(nodes: dict[str, list[ast.AST]]) -> list[str]:
    """Returns the functions by which classes intercept ops or functions of torch."""
    return [
        name
        for name, every in nodes.items()
        for node in every
        if isinstance(node, ast.FunctionDef)
        and node.name in ("__torch_function__", "__torch_dispatch__")
    ]


def reads(nodes: dict[str, list[ast.AST]], names: set[str]) -> list[str]:
    """Returns the places, outside of `MESSAGES`, where attributes of these names are read."""
    return [
        f"{name}:{node.lineno}"
        for name, every in nodes.items()
        if name not in MESSAGES
        for node in every
        if (isinstance(node, ast.Attribute) and node.attr in names and _is_python(node))
        or (isinstance(node, ast.Constant) and node.value in names - {"stack", "dis"})
    ]


def _is_python(node: ast.Attribute) -> bool:
    """Tells `inspect.stack` and `dis.dis` from `torch.stack`."""
    if node.attr not in ("stack", "dis"):
        return True
    return isinstance(node.value, ast.Name) and node.value.id in ("inspect", "dis")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=HERE)
    parser.add_argument("--modules", action="store_true", help="list the modules")
    given = parser.parse_args()
    if given.modules:
        for path in sorted((given.root / "pyg_distcomm").rglob("*.py")):
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            name = str(path.relative_to(given.root / "pyg_distcomm"))
            print(f"{name:34}{said.partition(chr(10))[0]}")
        return
    for name, value in measure(given.root).items():
        print(f"{name:50}{value:8,}")


if __name__ == "__main__":
    main()
