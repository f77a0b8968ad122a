"""Executes notebooks in place, each in a fresh kernel: python notebooks/run.py [--check]

--check executes them, leaves the files as they are, and compares what each cell prints with
what is stored: the same words and columns, and numbers within 2 %; as many figures. Of cells
tagged "times" (clocks and rates) and "noisy" (short training), numbers may be any.
"""

import argparse
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
ANY = {"times", "noisy"}


def execute(notebook):
    """Runs all cells of a notebook in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=1800,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata["language_info"] = {"name": "python"}


def printed(cell):
    """Returns the text that a cell put out, and how many figures."""
    text, figures = [], 0
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        figures += "image/png" in data
        if "image/png" not in data and output.get("name") != "stderr":
            text.append(output.get("text") or data.get("text/plain", ""))
    return " ".join("".join(text).split()), figures


def differences(stored, fresh, anything=False, tolerance=0.02):
    """Returns what differs between two texts: words, or numbers beyond the tolerance."""
    words = [re.sub("-{3,}", "---", NUMBER.sub("#", text)) for text in (stored, fresh)]
    if anything:  # a rate of nothing prints as a dash
        words = [re.sub(r"(?<=\s)-(?=\s)", "#", text) for text in words]
    if words[0] != words[1]:
        return [
            f"prints other words or columns:\n  stored  {stored}\n  now     {fresh}"
        ]
    if anything:
        return []
    told = []
    for a, b in zip(NUMBER.findall(stored), NUMBER.findall(fresh), strict=True):
        values = [float(number.replace(",", "")) for number in (a, b)]
        if not math.isclose(*values, rel_tol=tolerance, abs_tol=1e-6):
            told.append(f"{a} is stored, {b} came now")
    return told


def compare(stored, fresh):
    """Returns what differs between two notebooks, a line for each place."""
    found = []
    for number, (before, after) in enumerate(
        zip(stored.cells, fresh.cells, strict=True)
    ):
        (old, figures), (new, drawn) = printed(before), printed(after)
        told = differences(old, new, bool(ANY & set(before.metadata.get("tags", []))))
        if figures != drawn:
            told.append(f"{figures} figures are stored, {drawn} came now")
        found += [f"cell {number}: {line}" for line in told]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    bad = 0
    for path in arguments.notebooks or sorted(HERE.glob("*.ipynb")):
        start = time.perf_counter()
        fresh = nbformat.read(path, as_version=4)
        execute(fresh)
        found = (
            compare(nbformat.read(path, as_version=4), fresh) if arguments.check else []
        )
        if not arguments.check:
            nbformat.write(fresh, path)
        bad += bool(found)
        seconds = time.perf_counter() - start
        print("\n".join([f"{path.name}: {seconds:.0f} s", *found]), flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
