"""Tests how pyg_examples.py swaps the imports of a script; needs PYG_CHECKOUT."""

import ast
import importlib
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not Path(os.environ.get("PYG_CHECKOUT", "-"), "examples", "gcn.py").exists(),
    reason="PYG_CHECKOUT names no checkout of pytorch_geometric",
)


def test_each_script_loses_pygs_layers_and_loaders_and_gains_a_partition():
    driver = importlib.import_module("pyg_examples")
    root = Path(os.environ["PYG_CHECKOUT"], "examples")
    assert not [row for row in driver.listed(root.parent) if "not sorted" in row]
    for name in (*driver.FULL, *driver.BATCHED, *driver.SPARSE):
        tried = list(driver.attempts(name, (root / f"{name}.py").read_text()))
        assert tried, name
        for _, text in tried:
            imported = {
                node.module
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom)
            }
            assert not imported & {"torch_geometric.nn", "torch_geometric.loader"}
            assert "mesh = pdc.init()" in text
        if driver.GRAPHS.get(name, True) or (name in driver.EDITS and name != "reddit"):
            assert "pdc.partition(" in tried[0][1]
