"""Executes notebooks in place, each in a fresh kernel: python notebooks/run.py [--check]

--check executes them and leaves the files as they are.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(path, check):
    """Runs one notebook in an empty folder, and writes its outputs unless checking."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata["language_info"] = {"name": "python"}
    if not check:
        nbformat.write(notebook, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    for path in arguments.notebooks or sorted(HERE.glob("*.ipynb")):
        start = time.perf_counter()
        execute(path.resolve(), arguments.check)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
