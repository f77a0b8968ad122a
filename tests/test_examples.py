"""Every example: one under torchrun, as a visitor would; the others on ranks of our own."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiers
import worlds

import pyg_distcomm

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples/graphs.py"})

pytestmark = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="scikit-learn is not installed"
)


@pytest.fixture(scope="module", autouse=True)
def _no_idle_ranks():
    worlds.only(0)


def run(path, folder, *flags, ranks=None):
    """Runs an example on as many ranks as its first line says, or plainly on one."""
    first, start = (
        path.read_text().splitlines()[0],
        r"# torchrun --nproc-per-node (\d+)",
    )
    count = re.fullmatch(rf"{start} examples/{path.name}", first)
    assert count, first
    return worlds.script(path, ranks or int(count.group(1)), folder, *flags)


def shown_by(*words, folder=None, may_warn=True, **environment):
    """Runs a command as a user does; returns what it prints."""
    home = str(Path(pyg_distcomm.__file__).parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=alone | ours | environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert may_warn or "Warning" not in done.stderr, done.stderr
    return done.stdout


def torchrun(path, *flags, **how):
    """Runs a script under torchrun on two ranks."""
    start = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"
    return shown_by(sys.executable, *start, path, *flags, **how)


def example(name):
    return ROOT / "examples" / f"{name}.py"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_imports_the_package_alone(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 130
    assert any('"--device"' in line for line in lines)
    assert sum("pdc.init(" in line for line in lines) == sum(
        "device=args.device" in line for line in lines
    )
    assert lines[0].startswith("# torchrun --nproc-per-node ")
    assert lines[1].startswith('"""')


FEW = {"deep_pipeline": ("--layers", "4"), "lossy_links": ("--seeds", "1")}


@pytest.mark.subprocess
@tiers.parametrize("path", EXAMPLES, [], ids=lambda path: path.stem)
def test_an_example_runs_on_its_ranks(path, tmp_path):
    assert run(path, tmp_path, "--epochs", "2", *FEW.get(path.stem, ()))


@pytest.mark.subprocess
@pytest.mark.parametrize("ranks", [tiers.rarely(1), tiers.rarely(2)])
def test_gcn_ends_in_a_table_of_equals(tmp_path, ranks):
    flags = ("--epochs", "20", "--trace", "epoch.json")
    if ranks == 1:
        shown = run(example("gcn"), tmp_path, *flags, ranks=1)
    else:
        shown = torchrun(example("gcn"), *flags, folder=tmp_path, may_warn=False)
    trace = json.loads((tmp_path / "epoch.json").read_text())
    assert trace["otherData"]["ranks"] == ranks
    row = r".*?\s(0\.\d+)\s+(0\.\d+|[1-9]\.\d+)\s+\S+\s+(\S+)$"
    single, ours = (
        re.search(rf"^{who}{row}", shown, re.M)
        for who in ("PyG, 1 process", f"pyg_distcomm, {ranks} ranks, 1d")
    )
    assert single.group(1, 2) == ours.group(1, 2)
    assert (ours.group(3) == "0") == (ranks == 1)
    assert float(shown.split("outputs: ")[1]) < 1e-9
