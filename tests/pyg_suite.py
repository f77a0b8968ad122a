"""Runs PyG's own tests of GCNConv and SAGEConv on this package's layers.

    PYG_CHECKOUT=/path/to/pytorch_geometric python tests/pyg_suite.py

The import is swapped before PyG's test files are read: a subclass of our layer that
goes by PyG's name, so that `str(conv)` matches. Nothing of PyG is copied here; check
out the tag of the PyG that is installed. Exits with 1 if a test fails that is not among
the exceptions, or if an exception passes.
"""

from __future__ import annotations

import collections
import os
import sys
import types
from pathlib import Path

import pytest
import torch_geometric
import torch_geometric.nn as pyg

from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

FILES = (
    "test/nn/conv/test_gcn_conv.py",
    "test/nn/conv/test_sage_conv.py",
    "test/nn/conv/test_static_graph.py",
    "test/nn/models/test_basic_gnn.py",
)
SWAPPED = {"GCNConv": DistGCNConv, "SAGEConv": DistSAGEConv}

# a test that cannot pass, and why
SCRIPT = "TorchScript cannot compile a forward that branches on DistEdgeIndex"
EXCEPTIONS = {
    "test_gcn_conv.py::test_gcn_conv_with_decomposed_layers": SCRIPT,
    "test_basic_gnn.py::test_jit": SCRIPT,
    "test_basic_gnn.py::test_packaging": "it names the modules to package, all of PyG's",
}


class Report:
    """Counts outcomes, and remembers what failed."""

    def __init__(self):
        self.counts = collections.Counter()
        self.failed, self.skipped = {}, {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.split("/")[-1]
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failed[name] = str(report.longrepr).strip().splitlines()[-1]
        if report.skipped:
            self.skipped[name] = str(report.longrepr[-1])


def swap():
    """Puts our layers in PyG's place, under its names."""
    home = sys.modules["swapped_layers"] = types.ModuleType("swapped_layers")
    for name, ours in SWAPPED.items():
        layer = type(name, (ours,), {"__module__": home.__name__})
        for module in (home, pyg, pyg.conv, pyg.models.basic_gnn):
            setattr(module, name, layer)


def main():
    root = os.environ.get("PYG_CHECKOUT")
    if root is None or not (Path(root) / FILES[0]).exists():
        sys.exit("set PYG_CHECKOUT to a checkout of pytorch_geometric")
    swap()
    report = Report()
    files = [str(Path(root) / name) for name in FILES]
    pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={root}", *files], [report])
    bad = {n: why for n, why in report.failed.items() if n not in EXCEPTIONS}
    stale = [n for n in EXCEPTIONS if n not in report.failed]
    print(f"\nPyG {torch_geometric.__version__}, swapped: {dict(report.counts)}")
    for name, why in report.skipped.items():
        print(f"skipped {name}: {why}")
    for name, why in EXCEPTIONS.items():
        print(f"exception {name}: {why}")
    for name, why in bad.items():
        print(f"FAILED {name}: {why}")
    for name in stale:
        print(f"no longer fails: {name}")
    sys.exit(1 if bad or stale else 0)


if __name__ == "__main__":
    main()
