"""Runs PyG's own tests on this package's layers and loaders.

    PYG_CHECKOUT=/path/to/pytorch_geometric python tools/pyg_suite.py [layers] [loaders]

The import is swapped before PyG's test files are read: a subclass of our class that
goes by PyG's name, so that `str` matches. Tests that PyG skips without pyg-lib or
torch-sparse are run, since our sampler needs neither. Nothing of PyG is copied here;
check out the tag of the PyG that is installed. Exits with 1 if a test fails that is not
among the exceptions, or if an exception passes.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch_geometric
import torch_geometric.loader
import torch_geometric.nn as pyg
import torch_geometric.sampler
import torch_geometric.testing
import torch_geometric.typing

from pyg_distcomm.loader import DistLinkNeighborLoader, DistNeighborLoader
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv
from pyg_distcomm.sampling import KeyedNeighborSampler

FILES = {
    "layers": (
        "test/nn/conv/test_gcn_conv.py",
        "test/nn/conv/test_sage_conv.py",
        "test/nn/conv/test_static_graph.py",
        "test/nn/models/test_basic_gnn.py",
    ),
    "loaders": (
        "test/loader/test_neighbor_loader.py",
        "test/loader/test_link_neighbor_loader.py",
        "test/sampler/test_sampler_neighbor_sampler.py",
        "test/utils/test_trim_to_layer.py",
    ),
}
LAYERS = {"GCNConv": DistGCNConv, "SAGEConv": DistSAGEConv}
LOADERS = {
    "NeighborLoader": DistNeighborLoader,
    "LinkNeighborLoader": DistLinkNeighborLoader,
    "NeighborSampler": KeyedNeighborSampler,
}

# a test that cannot pass, and why
SCRIPT = "TorchScript cannot compile a forward that branches on DistEdgeIndex"
EXCEPTIONS = {
    "layers": {
        "test_gcn_conv.py::test_gcn_conv_with_decomposed_layers": SCRIPT,
        "test_basic_gnn.py::test_jit": SCRIPT,
        "test_basic_gnn.py::test_packaging": "it names the modules to package, all of PyG's",
    },
    "loaders": {},
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


class Flags:
    """Says, while PyG's test files are read, that samplers are there."""

    NAMES = (
        "WITH_PYG_LIB",
        "WITH_TORCH_SPARSE",
        "WITH_EDGE_TIME_NEIGHBOR_SAMPLE",
        "WITH_WEIGHTED_NEIGHBOR_SAMPLE",
    )

    def pytest_collection(self):
        self.before = {n: getattr(torch_geometric.typing, n) for n in self.NAMES}
        vars(torch_geometric.typing).update(dict.fromkeys(self.NAMES, True))

    def pytest_collection_finish(self):
        vars(torch_geometric.typing).update(self.before)


def swap_layers():
    """Puts our layers in PyG's place, under its names."""
    home = sys.modules["swapped_layers"] = types.ModuleType("swapped_layers")
    for name, ours in LAYERS.items():
        layer = type(name, (ours,), {"__module__": home.__name__})
        for module in (home, pyg, pyg.conv, pyg.models.basic_gnn):
            setattr(module, name, layer)


def swap_loaders():
    """Puts our loaders and sampler in PyG's place, and has their tests run."""
    home = sys.modules["swapped_loaders"] = types.ModuleType("swapped_loaders")
    for name, ours in LOADERS.items():
        swapped = type(name, (ours,), {"__module__": home.__name__})
        setattr(home, name, swapped)
        sampler = torch_geometric.sampler.neighbor_sampler
        module = sampler if name == "NeighborSampler" else torch_geometric.loader
        setattr(module, name, swapped)
    testing, with_package = torch_geometric.testing, torch_geometric.testing.withPackage
    testing.onlyNeighborSampler = lambda test: test
    testing.withPackage = lambda *names: (
        (lambda test: test) if names == ("pyg_lib",) else with_package(*names)
    )


def run(group, root):
    """Runs one group of files; returns whether all is as expected."""
    plugins = [report := Report()]
    if group == "layers":
        swap_layers()
    else:
        swap_loaders()
        plugins.append(Flags())
    files = [str(Path(root) / name) for name in FILES[group]]
    for name in [name for name in files if not Path(name).exists()]:
        print(f"not in this version of PyG: {name}")
        files.remove(name)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={root}"]
    if group == "loaders":
        options += ["-m", "not rag"]  # with those on the karate club, which PyG holds
    pytest.main([*options, *files], plugins)
    expected = EXCEPTIONS[group]
    bad = {n: why for n, why in report.failed.items() if n not in expected}
    stale = [n for n in expected if n not in report.failed]
    print(
        f"\nPyG {torch_geometric.__version__}, {group} swapped: {dict(report.counts)}"
    )
    for name, why in report.skipped.items():
        print(f"skipped {name}: {why}")
    for name, why in expected.items():
        print(f"exception {name}: {why}")
    for name, why in bad.items():
        print(f"FAILED {name}: {why}")
    for name in stale:
        print(f"no longer fails: {name}")
    return not bad and not stale


def main():
    root = os.environ.get("PYG_CHECKOUT")
    if root is None or not (Path(root) / FILES["layers"][0]).exists():
        sys.exit("set PYG_CHECKOUT to a checkout of pytorch_geometric")
    groups = sys.argv[1:] or list(FILES)
    if len(groups) == 1:
        sys.exit(not run(groups[0], root))
    # each group swaps other imports: a process of its own
    runs = [subprocess.run([sys.executable, __file__, group]) for group in groups]
    sys.exit(any(done.returncode for done in runs))


if __name__ == "__main__":
    main()
