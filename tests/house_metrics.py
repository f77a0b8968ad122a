"""Prints what can be counted of the package's shape: modules, lines, classes, names.

    python tests/house_metrics.py [--root FOLDER] [--modules]

`FOLDER` is a checkout, so that two commits can be compared: this one by default. `--modules`
lists the modules instead, each with the first line of its docstring.
"""

import argparse
import ast
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def measure(root: Path) -> dict[str, int]:
    """Returns each measure of the package below a checkout, by name."""
    home = root / "pyg_distcomm"
    trees, lines = {}, {}
    for path in home.rglob("*.py"):
        name = str(path.relative_to(home).with_suffix("")).replace("/", ".")
        lines[name] = len(path.read_text().splitlines())
        trees[name] = ast.parse(path.read_text())
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree)]
    classes = [node for _, node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node.name for _, node in nodes if isinstance(node, ast.FunctionDef)]
    intercept = [
        f for f in functions if f in ("__torch_function__", "__torch_dispatch__")
    ]
    first = [(ast.get_docstring(trees[name]) or "").split(" ")[0] for name in trees]
    tests = [path for name in ("tests", "tools") for path in (root / name).glob("*.py")]
    names = Counter(node.name for node in classes)
    return {
        "modules": len(trees),
        "lines": sum(lines.values()),
        "class names of two classes": sum(count > 1 for count in names.values()),
        "module docstrings that begin with no verb": sum(w in NO_VERBS for w in first),
        "classes of more than 20 methods or 15 attributes": sum(map(is_large, classes)),
        "classes that intercept ops or functions of torch": len(intercept),
        "reads of frames, other than for a message": reads(nodes, FRAMES),
        "reads of bytecode or of the garbage collector": reads(nodes, CODE),
        "lines of tests and their helpers": sum(
            len(path.read_text().splitlines()) for path in tests
        ),
        "lines of CONTRIBUTING.md": (root / "CONTRIBUTING.md").read_text().count("\n"),
    }


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
    fields |= {one.attr for one in stored if ast.unparse(one.value) == "self"}
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
        for path in sorted((given.root / "pyg_distcomm").rglob("*.py")):
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            name = str(path.relative_to(given.root / "pyg_distcomm"))
            print(f"{name:34}{said.partition(chr(10))[0]}")
        return
    for name, value in measure(given.root).items():
        print(f"{name:50}{value:8,}")


if __name__ == "__main__":
    main()
