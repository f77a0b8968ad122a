"""Runs PyG's own tests of loaders on this package's; `pyg_spread.py` runs those of layers.

    PYG_CHECKOUT=/path/to/pytorch_geometric python tools/pyg_suite.py

The import is swapped before PyG's test files are read: a subclass of our class that
goes by PyG's name, so that `str` matches. Tests that PyG skips without pyg-lib or
torch-sparse are run, since our sampler needs neither. Nothing of PyG is copied here;
check out the tag of the PyG that is installed. Exits with 1 if a test fails.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch_geometric
import torch_geometric.loader
import torch_geometric.sampler
import torch_geometric.testing
import torch_geometric.typing

from pyg_distcomm.loader import DistLinkNeighborLoader, DistNeighborLoader
from pyg_distcomm.sampling import KeyedNeighborSampler

FILES = (
    "test/loader/test_neighbor_loader.py",
    "test/loader/test_link_neighbor_loader.py",
    "test/sampler/test_sampler_neighbor_sampler.py",
    "test/utils/test_trim_to_layer.py",
)
LOADERS = {
    "NeighborLoader": DistNeighborLoader,
    "LinkNeighborLoader": DistLinkNeighborLoader,
    "NeighborSampler": KeyedNeighborSampler,
}


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


def run(root):
    """Runs the files, and lists what failed or was skipped; returns pytest's exit code."""
    swap_loaders()
    files = [str(Path(root) / name) for name in FILES]
    for name in [name for name in files if not Path(name).exists()]:
        print(f"not in this version of PyG: {name}")
        files.remove(name)
    print(f"PyG {torch_geometric.__version__}, swapped")
    options = ["-q", "-rfEs", "-p", "no:cacheprovider", f"--rootdir={root}"]
    options += ["-m", "not rag"]  # with those on the karate club, which PyG holds
    return pytest.main([*options, *files], [Flags()])


def main():
    root = os.environ.get("PYG_CHECKOUT")
    if root is None or not (Path(root) / FILES[0]).exists():
        sys.exit("set PYG_CHECKOUT to a checkout of pytorch_geometric")
    sys.exit(run(root))


if __name__ == "__main__":
    main()
