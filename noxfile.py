"""Runs the tests on other Pythons, on old and new dependencies, and from an unpacked sdist.

`nox` runs what is installed of Python 3.10, 3.11 and 3.13, and skips the others by name.
"""

from __future__ import annotations

import re
from pathlib import Path

import nox

PYTHONS = ["3.10", "3.11", "3.13"]
QUICK = ["tests/test_project.py", "tests/test_cutters.py"]
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False  # they are listed as skipped


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Runs the default tier; `nox -- -k codec` some of it."""
    session.install(".[demo,test]")
    default_tier(session)


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """Runs the default tier on the oldest Python, torch, PyG and others that are allowed."""
    text = Path("pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert needed is not None
    floors = re.findall(r'"([\w-]+)>=([\d.]+)"', needed[1])
    session.install(
        *(f"{name}=={version}.*" for name, version in floors), ".[demo,test]"
    )
    default_tier(session)


@nox.session(python="3.11")
def pinned(session: nox.Session) -> None:
    """Runs the default tier on the torch that the README pins."""
    pin = re.search(r"torch==[\d.]+", Path("README.md").read_text())
    assert pin is not None
    session.install(pin[0], ".[demo,test]")
    default_tier(session)


@nox.session(python=PYTHONS[-1])
def newest(session: nox.Session) -> None:
    """Runs the default tier on the newest Python, torch, PyG and others that install."""
    session.install("--upgrade", "--upgrade-strategy", "eager", ".[demo,test]")
    default_tier(session)


def default_tier(session: nox.Session) -> None:
    """Prints what is installed, and runs the default tier on it."""
    session.run("python", "-m", "pip", "list")
    session.run(
        "pytest",
        "-n",
        "3",
        "--dist",
        "worksteal",
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )


@nox.session
def sdist(session: nox.Session) -> None:
    """Builds the sdist, unpacks it elsewhere, and runs a few files of its tests there."""
    session.install("build")
    place = Path(session.create_tmp()).resolve()
    session.run("python", "-m", "build", "--sdist", "--outdir", str(place), ".")
    (archive,) = place.glob("*.tar.gz")
    session.run("python", "-m", "tarfile", "-e", str(archive), str(place))
    source = place / archive.name.removesuffix(".tar.gz")
    session.install(f"{source}[demo,test]")
    with session.chdir(source):
        session.run("pytest", *(session.posargs or QUICK))
