"""Runs the tests on other Pythons, on old dependencies, and from an unpacked sdist.

`nox` runs what is installed of Python 3.10 to 3.13, and skips the others by name.
"""

from __future__ import annotations

import re
from pathlib import Path

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
QUICK = ["tests/test_project.py", "tests/test_schedule.py", "tests/test_cutters.py"]
nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False  # they are listed as skipped


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Runs the default tier; `nox -- -k codec` some of it."""
    session.install(".[demo,test]")
    # away from the source, so that the installed package is tested
    session.run(
        "pytest",
        "-n",
        "3",
        "--dist",
        "worksteal",
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )


@nox.session(python="3.10")
def oldest(session: nox.Session) -> None:
    """Runs the default tier with the oldest versions that the metadata allows."""
    text = Path("pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert needed is not None
    floors = re.findall(r'"([\w-]+)>=([\d.]+)"', needed[1])
    session.install(*(f"{name}=={version}.*" for name, version in floors))
    session.install(".[demo,test]")
    session.run("pytest", "-n", "3", "--dist", "worksteal", *session.posargs)


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
