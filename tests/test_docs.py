"""Runs every Python block of the documentation, and checks links, pages and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path

import matplotlib
import pytest
import torch
from tiers import rarely

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")
ENTRY = re.compile(r"^::: ([\w.]+)$", re.M)
SOME = {"index.md", "reference/nn.md"}  # pages of the default tier


def blocks(text):
    """Returns (first line, code) of each Python block that runs."""
    for match in FENCE.finditer(text):
        if match["language"] != "python" or NOT_RUN.search(text[: match.start()]):
            continue
        yield text.count("\n", 0, match.start()) + 2, textwrap.dedent(match["code"])


def run(path):
    """Runs the blocks of a page in order, in one namespace; returns how many there were."""
    done = 0
    namespace = {"__name__": "__main__"}
    for line, code in blocks(path.read_text()):
        lines = "\n" * (line - 1) + code  # so that errors name the line of the page
        exec(compile(lines, str(path), "exec"), namespace)
        done += 1
    return done


def name(path):
    return str(path.relative_to(DOCS))


def scripts():
    with_code = [path for path in PAGES if list(blocks(path.read_text()))]
    return [
        path if name(path) in SOME else rarely(path) for path in with_code
    ]


@pytest.mark.parametrize("path", scripts(), ids=lambda path: name(path))
def test_the_blocks_of_a_page_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [sys.argv[0]])
    matplotlib.use("Agg")
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        assert run(path) > 0
    finally:
        torch.set_default_dtype(dtype)
