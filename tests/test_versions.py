"""Versions that are declared, tested and told agree; private APIs are those of their list."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import private_apis
import pytest

from pyg_distcomm.cli import doctor

ROOT = Path(__file__).parents[1]


def numbers(version):
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def table():
    """The table of docs/limits.md: what ran, by the names of its columns."""
    text = (ROOT / "docs/limits.md").read_text().partition("\n## Versions\n")[2]
    rows = [
        line.strip("| \n").split(" | ") for line in re.findall(r"^\|.*", text, re.M)
    ]
    head, _, *rows = rows[:5]
    names = ["what", *(name.strip("| ") for name in head)]
    return {row[0].split(",")[0]: dict(zip(names, row, strict=True)) for row in rows}


def floors():
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)[1]
    return dict(re.findall(r'"([\w-]+)>=([\d.]+)"', needed))


def test_the_table_of_versions_has_what_is_declared():
    runs, least = table(), floors()
    assert list(runs) == ["oldest", "pinned", "newest"]
    for name in ("torch", "torch_geometric", "numba", "numpy"):
        assert f"{runs['oldest'][name]}.".startswith(f"{least[name]}."), name
    pythons = re.findall(r'"(3\.\d+)"', (ROOT / "noxfile.py").read_text())
    pythons.sort(key=numbers)
    assert runs["oldest"]["Python"].startswith(f"{pythons[0]}.")
    assert runs["newest"]["Python"].startswith(f"{pythons[-1]}.")
    readme = (ROOT / "README.md").read_text()
    assert {*re.findall(r"torch==([\d.]+)", readme)} == {runs["pinned"]["torch"]}
    told = f"torch {least['torch']} and PyG {least['torch_geometric']} are the oldest"
    assert told in readme
    last = [runs["newest"][name] for name in ("torch", "torch_geometric")]
    assert f"torch {last[0].removesuffix('.0')} and PyG {last[1]} the newest" in readme


def test_the_doctor_knows_the_floors_and_what_was_tested():
    least = floors()
    for name, floor in doctor.REQUIRED.items():
        assert floor == numbers(least[name]), name
    for name, tested in doctor.TESTED.items():
        assert {*tested} == {run[name] for run in table().values()}, name


def test_every_private_api_is_listed_and_every_listed_one_touched():
    (every, foreign), listed = private_apis.touched(), private_apis.listed()
    unlisted = {name for name in foreign if not any(fits(name, one) for one in listed)}
    idle = {one for one in listed if not any(fits(name, one) for name in every)}
    assert not unlisted, (
        "replace it by a public one, or list it in tests/private_apis.py"
    )
    assert not idle, "take it from tests/private_apis.py"


def fits(name, listed):
    """Tells whether a name of the source is a part of a listed one, or begins its last."""
    last = listed.rpartition(".")[2]
    return name in listed.split(".") or (name.endswith("_") and name in last)


@pytest.mark.parametrize("package", ["torch", "torch_geometric", "numba"])
def test_what_is_installed_has_the_listed_private_apis(package):
    here = numbers(importlib.metadata.version(package))
    for name, (of, first, last) in private_apis.listed().items():
        if of == package:
            if numbers(first) <= here <= numbers(last):
                assert private_apis.has(name), name
            if of in doctor.TESTED:
                assert last == doctor.TESTED[of][-1], name
                assert numbers(first) <= numbers(doctor.TESTED[of][0]), name
