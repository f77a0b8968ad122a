"""Prints what can be counted of the package's shape: modules, lines, classes, names.

    python tests/house_metrics.py [--root FOLDER] [--modules]

`FOLDER` is a checkout, so that two commits can be compared: this one by default. `--modules`
lists the modules instead, each with the first line of its docstring.
"""

import argparse
import ast
import gc
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]


class Module(NamedTuple):
    """A module: its file, its syntax tree, and all nodes of that."""

    path: Path
    tree: ast.Module
    nodes: list[ast.AST]


@cache
def modules(root: Path) -> dict[str, Module]:
    """Returns every module of the package below a checkout, by its name in the package."""
    home, found, collects = root / "pyg_distcomm", {}, gc.isenabled()
    gc.disable()  # which would look at all trees, again and again
    for path in sorted(home.rglob("*.py")):
        parts = path.relative_to(home).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and parts[1:] else parts)
        tree = ast.parse(path.read_text())
        found[name] = Module(path, tree, list(ast.walk(tree)))
    if collects:
        gc.enable()
    return found


def measure(root: Path) -> dict[str, int]:
    """Returns each measure of the package below a checkout, by name."""
    every = modules(root)
    nodes = [(name, node) for name, module in every.items() for node in module.nodes]
    classes = [node for _, node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node.name for _, node in nodes if isinstance(node, ast.FunctionDef)]
    intercept = [
        f for f in functions if f in ("__torch_function__", "__torch_dispatch__")
    ]
    first = [(ast.get_docstring(m.tree) or "").split(" ")[0] for m in every.values()]
    tests = [path for name in ("tests", "tools") for path in (root / name).glob("*.py")]
    names = Counter(node.name for node in classes)
    return {
        "modules": len(every),
        "lines": sum(map(lines, (m.path for m in every.values()))),
        "class names of two classes": sum(count > 1 for count in names.values()),
        "module docstrings that begin with no verb": sum(w in NO_VERBS for w in first),
        "classes of more than 20 methods or 15 attributes": sum(map(is_large, classes)),
        "classes that intercept ops or functions of torch": len(intercept),
        "reads of frames, other than for a message": reads(nodes, FRAMES),
        "reads of bytecode or of the garbage collector": reads(nodes, CODE),
        "lines of tests and their helpers": sum(map(lines, tests)),
        "lines of CONTRIBUTING.md": (root / "CONTRIBUTING.md").read_text().count("\n"),
    }


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


# where a frame names a line of the script in a warning or an error
MESSAGES = "comm.failure sharded.whole sharded.agreement pipeline.pipeline".split()
FRAMES = {"_getframe", "currentframe", "stack", "f_back", "f_locals"}
CODE = {"__code__", "co_code", "get_objects", "get_referrers", "dis"}
NO_VERBS = ("What", "How", "Where", "Whether", "Who", "A", "The")
Nodes = list[tuple[str, ast.AST]]


def is_large(node: ast.ClassDef) -> bool:
    """Tells whether a class has more than 20 methods, or sets more than 15 attributes."""
    methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    fields = {
        ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)
    }
    stored = [one for one in ast.walk(node) if isinstance(one, ast.Attribute)]
    stored = [one for one in stored if isinstance(one.ctx, ast.Store)]
    fields |= {one.attr for one in stored if getattr(one.value, "id", "") == "self"}
    return len(methods) > 20 or len(fields) > 15


def reads(nodes: Nodes, names: set[str]) -> int:
    """Counts the reads, outside of `MESSAGES`, of attributes of these names."""
    read = 0
    for name, node in nodes:
        if name in MESSAGES:
            continue
        if isinstance(node, ast.Attribute) and node.attr in names:
            # inspect.stack and dis.dis, not torch.stack
            of_torch = node.attr in ("stack", "dis")
            read += not of_torch or ast.unparse(node.value) in ("inspect", "dis")
        if isinstance(node, ast.Constant):
            read += node.value in names - {"stack", "dis"}
    return read


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=HERE)
    parser.add_argument("--modules", action="store_true", help="list the modules")
    given = parser.parse_args()
    if given.modules:
        for name, module in modules(given.root).items():
            said = ast.get_docstring(module.tree) or ""
            print(f"{name:34}{said.partition(chr(10))[0]}")
        return
    for name, value in measure(given.root).items():
        print(f"{name:50}{value:8,}")


if __name__ == "__main__":
    main()
