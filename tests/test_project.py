"""What is declared: dependencies, public names, the version, files of the sdist."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import tiers

import pyg_distcomm

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pyg_distcomm"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# imported name -> its name on the index, where they differ
DISTRIBUTION = {"sklearn": "scikit-learn", "pyg_lib": None, "torch_sparse": None}
# not on the index, or used where it is there and never asked for: see `doctor`
OPTIONAL = {"pyg_lib", "torch_sparse", "triton"}


def names(requirements):
    return {
        re.match(r"[\w-]+", text)[0].lower().replace("_", "-") for text in requirements
    }


def imported(path):
    """Modules that a file imports, also by `importlib.import_module("...")`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        if isinstance(node, ast.Call) and node.args:
            first = node.args[0]
            called = ast.unparse(node.func)
            by_name = called.endswith(("import_module", "_library"))
            if by_name and isinstance(first, ast.Constant):
                yield first.value
            if called.endswith("_pyarrow"):
                yield "pyarrow"


def test_everything_imported_is_declared():
    hard = names(PROJECT["dependencies"])
    extras = {
        name: names(listed) for name, listed in PROJECT["optional-dependencies"].items()
    }
    asked = set().union(*extras.values())
    used = set()
    for path in PACKAGE.rglob("*.py"):
        for module in imported(path):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in ("pyg_distcomm", *OPTIONAL):
                continue
            used.add((DISTRIBUTION.get(top, top) or top).lower().replace("_", "-"))
    assert used - hard - asked == set()
    # nothing is declared in vain, either
    assert hard - used == set()


def test_dependencies_have_floors_and_no_caps():
    listed = [*PROJECT["dependencies"]]
    for extra in PROJECT["optional-dependencies"].values():
        listed += extra
    floor = r"[\w.\[\]-]+>=[\d.]+(; sys_platform .+)?"
    assert all(re.fullmatch(floor, text) for text in listed), listed


PUBLIC = """cli comm.ledger datasets halo.codec halo.codecs halo.policy halo.schedule loader nn
partition.cutters partition.external
partition.folder partition.partition plugins sampling
sampling.algebra sampling.rules""".split()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_lists_its_names(name):
    module = importlib.import_module(f"pyg_distcomm.{name}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(getattr(module, one) is not None for one in module.__all__)


def test_versions_agree():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (\S+)$", text, re.M)[1] == pyg_distcomm.__version__
    assert re.search(r"^license: (\S+)$", text, re.M)[1] == "MIT"
    assert "License :: OSI Approved :: MIT License" in PROJECT["classifiers"]
    named = re.search(r"^PYTHONS = \[(.*)\]$", (ROOT / "noxfile.py").read_text(), re.M)
    pythons = re.findall(r'"(3\.\d+)"', named[1])
    listed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c]
    assert pythons == listed


def test_no_host_is_named_before_there_is_one():
    folders = ("pyg_distcomm", "docs", "tests", "benchmarks", "examples", "notebooks")
    files = [path for name in folders for path in (ROOT / name).rglob("*")]
    files += [path for path in ROOT.iterdir() if path.name != ".git"]
    endings = {".py", ".md", ".toml", ".yml", ".cff", ".ipynb", ".svg", ".css", ".json"}
    for path in files:
        if path.is_file() and path.suffix in endings:
            assert "example" + ".org" not in path.read_text(), path
    assert "urls" not in PROJECT or all(map(str.strip, PROJECT["urls"].values()))


def test_the_changelog_tells_of_versions():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.M)
    assert versions[0] == "Unreleased"
    assert versions[1] == pyg_distcomm.__version__
    kinds = "Added Changed Deprecated Removed Fixed Security".split()
    assert {*re.findall(r"^### (.+)$", text, re.M)} <= {*kinds}
    assert len(text.splitlines()) <= 120


def test_files_that_pages_name_are_there():
    for name in ("SECURITY.md", "CONTRIBUTING.md"):
        named = re.findall(r"`([\w/]+/[\w.]+\.py)`", (ROOT / name).read_text())
        for file in named:
            places = (ROOT / file, PACKAGE / file)
            assert any(place.is_file() for place in places), f"{name}: {file}"


@tiers.rare
@pytest.mark.subprocess
def test_an_sdist_passes_its_own_tests(tmp_path):
    pytest.importorskip("flit_core", reason="pip install flit_core")
    if not (ROOT / ".git").exists():
        pytest.skip("this is an sdist already")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    make = f"from flit_core.buildapi import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", make], cwd=clone, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    files = [
        {p.relative_to(home) for p in (home / "tests").rglob("*")}
        for home in (clone, source)
    ]
    assert files[0] == files[1]
    quick = "test_project test_schedule test_house test_plugins".split()
    quick = [f"tests/{name}.py" for name in quick]
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *quick]
    done = subprocess.run(
        [*run, "-k", "not contributing"],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-3000:]
