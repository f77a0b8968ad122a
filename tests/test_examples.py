"""Every example: one under torchrun, as a visitor would; the others on ranks of our own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import second_device
import tiers
import worlds

import pyg_distcomm

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples/graphs.py"})

# .ci/run has most of them run on one process
ALONE = tiers.rarely(1)

pytest.importorskip("sklearn")


@pytest.fixture(scope="module", autouse=True)
def _no_idle_ranks():
    worlds.only(0)


def run(path, folder, *flags, ranks=None):
    """Runs an example on as many ranks as its first line says, or plainly on one."""
    first = path.read_text().splitlines()[0]
    count = re.fullmatch(
        rf"# torchrun --nproc-per-node (\d+) examples/{path.name}", first
    )
    assert count, first
    return worlds.script(path, ranks or int(count.group(1)), folder, *flags)


def launched(path, folder, *flags):
    """Runs an example under torchrun on two ranks."""
    home = str(Path(pyg_distcomm.__file__).parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
    }
    start = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    done = subprocess.run(
        [sys.executable, *start, str(path), *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


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


DEVICE = {
    "deep_pipeline": ("--layers", "4"),
    "lossy_links": ("--seeds", "1"),
}


def _on_the_second_device(path, folder, *flags):
    os.chdir(folder)
    sys.argv = [str(path), "--device", str(second_device.device()), *flags]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_a_device(path, tmp_path):
    flags = DEVICE.get(path.stem, ())
    given = path, str(tmp_path), "--epochs", "2", *flags
    assert "Traceback" not in worlds.anew(_on_the_second_device, 1, *given)[0]


@pytest.mark.subprocess
@pytest.mark.parametrize("ranks", [ALONE, tiers.rarely(2)])
def test_gcn_ends_in_a_table_of_equals(tmp_path, ranks):
    flags = ("--epochs", "20", "--trace", "epoch.json")
    if ranks == 1:
        shown = run(example("gcn"), tmp_path, *flags, ranks=1)
    else:
        shown = launched(example("gcn"), tmp_path, *flags)
    trace = json.loads((tmp_path / "epoch.json").read_text())
    assert trace["otherData"]["ranks"] == ranks
    single, ours = (
        re.search(
            rf"^{who}.*?\s(0\.\d+)\s+(0\.\d+|[1-9]\.\d+)\s+\S+\s+(\S+)$", shown, re.M
        )
        for who in ("PyG, 1 process", f"pyg_distcomm, {ranks} ranks, 1d")
    )
    assert single.group(1, 2) == ours.group(1, 2)
    assert (ours.group(3) == "0") == (ranks == 1)
    assert float(shown.split("outputs: ")[1]) < 1e-9


@tiers.rare
@pytest.mark.subprocess
def test_sage_resumes_where_it_stopped_on_another_number_of_ranks(tmp_path):
    whole = ("--checkpoint", "whole", "--every", "4", "--epochs", "8")
    again = ("--checkpoint", "again", "--every", "4", "--epochs")
    straight = run(example("sage"), tmp_path, *whole, ranks=1)
    run(example("sage"), tmp_path, *again, "4")
    resumed = run(example("sage"), tmp_path, *again, "8", ranks=1)
    assert "resumed again after epoch 4" in resumed
    assert "epoch 004" not in resumed
    last = [
        float(re.search(r"epoch 008  loss (\S+)", text).group(1))
        for text in (straight, resumed)
    ]
    assert last[0] == pytest.approx(last[1], rel=1e-3)


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_any_layer_equals_pyg(tmp_path, ranks):
    shown = run(example("any_layer"), tmp_path, "--epochs", "2", ranks=ranks)
    differences = re.findall(r"\d\.\de[+-]\d\d", shown)
    assert len(differences) == 4
    assert max(map(float, differences)) < 1e-9


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize("ranks", [ALONE, 4])
def test_grids_count_what_was_priced(tmp_path, ranks):
    shown = run(example("grids"), tmp_path, "--epochs", "1", ranks=ranks)
    rows = re.findall(r"^(\d+ x \d+ x \d+) .*?(\S+) +(\S+) +(\S+)$", shown, re.M)
    assert len(rows) == {1: 2, 4: 12}[ranks]
    assert all(priced == counted for _, priced, counted, _ in rows)
    losses = [float(row[3]) for row in rows]
    assert max(losses) - min(losses) < 1e-4


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_neighbor_loader_shares_its_batches_out(tmp_path, ranks):
    shown = run(example("neighbor_loader"), tmp_path, "--epochs", "3", ranks=ranks)
    assert f"digits, {ranks} ranks, {4 // ranks} batches each" in shown
    rows = re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+) +(\d+) ", shown, re.M)
    assert len(rows) == 3
    assert float(rows[-1][0]) < float(rows[0][0])  # the loss falls
    assert float(rows[-1][2]) > 0.5  # ten classes
    assert {int(row[3]) for row in rows} <= ({200} if ranks == 1 else {72, 128})


def figures(shown, pattern):
    return re.findall(pattern, shown, re.M)


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_partitioned_sampling_says_what_it_costs(tmp_path, ranks):
    flags = ["--epochs", "3"]
    if ranks == 2:
        flags += ["--sample-at", "requester", "--cache", "0.2", "--wire", "fp16"]
    shown = run(example("partitioned_sampling"), tmp_path, *flags, ranks=ranks)
    epoch = r"^ +\d+ +(0\.\d+|1\.\d+) +\S+ +(0\.\d+) +\S+$"
    losses, accuracies = zip(*figures(shown, epoch), strict=True)
    assert len(losses) == 3
    assert float(losses[-1]) < float(losses[0])
    assert float(accuracies[-1]) > 0.5  # ten classes
    held = int(figures(shown, r"rank 0 holds ([\d,]+) of")[0].replace(",", ""))
    assert (held == 1797) == (ranks == 1)
    received = dict(figures(shown, r"^(sample|fetch|train) .* (\S+)$"))
    assert received["train"] == "0"
    assert all((received[k] == "0") == (ranks == 1) for k in ("sample", "fetch"))
    assert bool(figures(shown, "^fetch_rows +fetch:row")) == (ranks == 2)


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize(("ranks", "rule"), [(1, "fastgcn"), (2, "ladies")])
def test_ladies_beside_neighbour_sampling(tmp_path, ranks, rule):
    flags = ("--epochs", "6", "--rule", rule)
    shown = run(example("ladies"), tmp_path, *flags, ranks=ranks)
    row = r"^(\S+) \[\S+ \S+\] +(\S+) +(0\.\d+) +\S+ +(\S+) +\S+$"
    rows = figures(shown, row)
    assert [r[:2] for r in rows] == [
        (rule, "GCN"),
        ("neighbours", "GCN"),
        ("neighbours", "GraphSAGE"),
    ]
    assert all(float(r[2]) > 0.5 for r in rows)
    nodes = [int(r[3].replace(",", "")) for r in rows]
    assert nodes[0] <= 2 * 256 + 2 * 64  # drawn for each layer, and the seeds
    assert nodes[0] < nodes[1]


def link_rows(shown, names):
    """Returns the cells of each setting in the table an example ends in."""
    rows = [re.split(r"  +", line.strip()) for line in shown.splitlines()]
    return {row[0]: row[1:] for row in rows if row[0] in names}


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_varco_sends_what_its_schedules_say(tmp_path, ranks):
    names = "exact", "fixed, 2", "fixed, 8", "fixed, 32", "BNS, a tenth of rows"
    names += "VARCO, slope 5", "VARCO, slope 1", "VARCO, slope 1, first columns"
    shown = run(example("varco"), tmp_path, "--epochs", "12", ranks=ranks)
    rows = link_rows(shown, names)
    assert len(rows) == len(names)
    accuracy = {name: float(row[0]) for name, row in rows.items()}
    assert accuracy["exact"] > 0.8
    if ranks == 1:
        assert set(accuracy.values()) == {accuracy["exact"]}
        assert all(float(row[1]) == 0 for row in rows.values())
        return
    share = {name: float(row[2]) for name, row in rows.items()}
    # columns of an epoch both ways: 128 are coded, 20 and the first of 12 epochs exact,
    # and A X travels twice, exactly, before it is kept
    once = 2 * 64

    def foretold(columns):
        rest = sum(2 * k + 20 for k in columns)
        return (128 + 20 + once + rest) / (12 * (128 + 20) + once)

    for c in (2, 8, 32):
        assert share[f"fixed, {c}"] == pytest.approx(foretold([64 // c] * 11), abs=0.02)
    tenth = foretold([6.4] * 11)
    assert share["BNS, a tenth of rows"] == pytest.approx(tenth, abs=0.02)
    for slope in (5, 1):
        rates = [max(128 - slope * t * 127 / 10, 1) for t in range(1, 12)]
        varco = foretold([max(round(64 / c), 1) for c in rates])
        assert share[f"VARCO, slope {slope}"] == pytest.approx(varco, abs=0.02)
    assert share["VARCO, slope 1, first columns"] == share["VARCO, slope 1"]
    assert accuracy["VARCO, slope 1"] > accuracy["exact"] - 0.05
    assert "exact: the last one" in shown


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize("ranks", [ALONE, 2])
def test_sylvie_sends_one_bit_a_number(tmp_path, ranks):
    names = "exact", "one bit, now", "one bit, late by 1", "one bit, now every 5"
    names += "one bit, the last too", "PipeGCN"
    flags = ("--epochs", "12")
    shown = run(example("sylvie"), tmp_path, *flags, ranks=ranks)
    rows = link_rows(shown, names)
    assert len(rows) == len(names)
    accuracy = {name: float(row[0]) for name, row in rows.items()}
    straight, resumed = map(float, figures(shown, r"on (\S+), resumed (\S+)$")[0])
    assert resumed == straight
    if ranks == 1:
        assert resumed == straight
        assert set(accuracy.values()) == {accuracy["exact"]}
        assert {row[1] for row in rows.values()} == {"0"}
        return
    fewer = {name: float(row[2]) for name, row in rows.items()}
    exact = 4 * (64 + 10)  # bytes of a row in float32, in either direction
    coded = 64 / 8 + 4  # and in one bit, with its bounds
    for name in names[1:4]:
        assert fewer[name] == pytest.approx(exact / (coded + 40), rel=0.01)
    all_coded = exact / (coded + 10 / 8 + 4)
    assert fewer["one bit, the last too"] == pytest.approx(all_coded, rel=0.01)
    assert fewer["PipeGCN"] == 1
    assert abs(accuracy["one bit, now"] - accuracy["exact"]) < 0.05
    assert "stochastic', strict=True), late by 1" in shown


@tiers.rare
@pytest.mark.subprocess
def test_lossy_links_stand_beside_pyg_and_beside_nothing(tmp_path):
    flags = ("--dataset", "generated-600", "--epochs", "12", "--seeds", "1")
    flags += ("--dropout", "0")
    shown = run(example("lossy_links"), tmp_path, *flags, ranks=2)
    row = r"^(\S.*?)  +(\d+\.\d+)  +-  +([+-]\d+\.\d+)  +([+-]\d+\.\d+)  +(\S+)$"
    rows = {name: cells for name, *cells in figures(shown, row)}
    assert len(rows) == 15
    pyg, nothing = float(rows["PyG, 1 process"][0]), float(rows["sending nothing"][0])
    assert rows["sending nothing"][3] == "0.000"
    # the exact link is PyG, but for rounding; a lossy one sends less, unless it is late
    assert abs(float(rows["exact"][1])) < 0.7
    for name, (score, beside_pyg, beside_nothing, share) in rows.items():
        assert float(beside_pyg) == pytest.approx(float(score) - pyg, abs=0.011)
        assert float(beside_nothing) == pytest.approx(float(score) - nothing, abs=0.011)
        if name not in ("PyG, 1 process", "exact", "late (PipeGCN)"):
            assert float(share) < 1, name


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 2)])
def test_deep_pipeline_counts_what_the_formula_says(tmp_path, ranks, stages):
    flags = ("--layers", "4", "--epochs", "2", "--stages", str(stages))
    shown = run(example("deep_pipeline"), tmp_path, *flags, ranks=ranks)
    assert len(re.findall(r"^stage \d  F0 |^stage \d  \.\. ", shown, re.M)) == stages
    row = r"^(\w+.*?)  +(\d x \d) +(\d\.\d+) +(0\.\d+) +\d+ +\S+ +(\S+) +(\S+)$"
    found = figures(shown, row)
    assert [f[:2] for f in found] == [
        ("pipelined", f"{stages} x {ranks // stages}"),
        ("graph parallel", f"1 x {ranks}"),
    ]
    for way, *_, formula, ledger in found:
        said, counted = (int(text.replace(",", "")) for text in (formula, ledger))
        if way == "pipelined" and stages == ranks:
            assert said <= counted <= said + 200  # the loss
        else:  # products send sums where rows would be more
            assert bool(ranks - 1) == bool(counted)
            assert counted <= said + 500
