"""The page of a run: what is on it, and how it looks in a browser, light and dark."""

import contextlib
import json
import re
import sys
import xml.etree.ElementTree as ET
from statistics import median

import pytest
import torch
import worlds

import pyg_distcomm as pdc
from pyg_distcomm.cli import main
from pyg_distcomm.comm.mesh import alone
from pyg_distcomm.datasets import generated
from pyg_distcomm.nn import GCNConv
from pyg_distcomm.watch.metrics import RecordedRun
from pyg_distcomm.watch.page import render, with_unit

SECTIONS = (
    "Bytes by epoch and operation",
    "Waits by rank",
    "Phases",
    "Loss by epoch",
    "Accuracy by epoch",
)


def recorded(folder):
    """Runs on a rank: trains a little, and records it with a timeline."""
    mesh = worlds.mesh()
    data = pdc.partition(generated(300), mesh, "block")
    torch.manual_seed(0)
    convs = torch.nn.ModuleList([GCNConv(data.num_features, 8), GCNConv(8, 8)])
    run = pdc.metrics(folder, mesh, data=data)
    for epoch in range(4):
        traced = run.trace() if epoch == 2 else contextlib.nullcontext()
        with traced, run.phase("train"):
            out = convs[1](convs[0](data.x, data.edge_index).relu(), data.edge_index)
            loss = out.square().mean()
            loss.backward()
        run.epoch(epoch, loss=float(loss), accuracy=1 - 0.5 ** (epoch + 1))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "gcn <1>"
    worlds.run(recorded, 3, str(folder))
    return folder


@pytest.fixture(scope="module")
def page(run):
    out = run.parent / "report.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    return out


def charts(text):
    return [ET.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, re.S)]


def test_the_page_is_whole_and_by_itself(page):
    text = page.read_text()
    headings = re.findall(r"<h[12][^>]*>(.*?)</h[12]>", text)
    assert headings[0] == "gcn &lt;1&gt;"
    assert [name for name in SECTIONS if name not in headings] == []
    for tag in ("html", "body", "section", "table", "tr", "td", "p"):
        assert len(re.findall(f"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag
    # no other file, no network
    assert not re.findall(r'\b(?:src|href)="(?!#)|http|<script', text)
    assert len(charts(text)) == 5
    assert "trace.json.gz is a timeline" in text


def cells(text, section):
    """Returns the cells of the table of a section, by line."""
    (table,) = re.findall(
        rf"<h2>{section}</h2>(?:(?!</section>).)*<table>(.*?)</table>", text, re.S
    )
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in table.split("<tr>")]
    return {line[0]: line[1:] for line in lines if line}


def words(text):
    """Returns the texts of all charts."""
    return [one.text.strip() for svg in charts(text) for one in svg.iter("text")]


def test_charts_show_what_was_recorded(run, page):
    rows = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    text = page.read_text()
    halo = [row["bytes"]["halo row"] for row in rows]
    shown = cells(text, "Bytes by epoch and operation")["halo row"]
    assert shown == [with_unit(median(halo), "B"), with_unit(sum(halo), "B")]
    assert "The last is 0.9375." in text
    waits = median(row["by_rank"]["waits"][2] for row in rows[1:])
    assert f"rank 2, waits {with_unit(waits, 's')}" in words(text)
    train = median(row["phases"]["train"] for row in rows[1:])
    assert f"train {with_unit(train, 's')}" in words(text)


def epochs(computing, waits, phases=()):
    """Returns the rows of three epochs of ranks that compute and wait so long."""
    seconds = [a + b for a, b in zip(computing, waits, strict=True)]
    ranks, mean = len(seconds), sum(computing) / len(seconds)
    row = {
        "seconds": max(seconds),
        "bytes": {"total": 400, "halo row": 300, "sum column": 100},
        "phases": {"computing": mean, "waiting": sum(waits) / ranks, **dict(phases)},
        "by_rank": {"bytes": [100] * ranks, "waits": waits, "seconds": seconds},
        "start": 0,
    }
    return [{"epoch": k, **row} for k in range(3)]


def first_words(recorded, **about):
    starts = [{"ranks": len(recorded[0]["by_rank"]["waits"]), "time": 0}]
    base = {"starts": starts, "grid": [1], "stages": 1, "torch": "", **about}
    text = render("run", RecordedRun(base, recorded))
    return re.search(r'<p class="verdict">(.*?)</p>', text)[1]


def test_the_first_sentence_says_which_rank_is_slow_and_why():
    slow = epochs([1.0, 3.0], [2.0, 0.0], {"train": 2.0, "test": 1.0}.items())
    figures = {"nodes": [5, 5], "edges": [10, 30], "train": [0, 0], "edge_cut": 4}
    figures |= {"halo_rows": [2, 2], "send_rows": [2, 2]}
    text = first_words(slow, partition=figures)
    assert text.startswith(
        "Rank 1 is slow: it computes 3 s of an epoch, 1.50 times the mean, and has 1.50 "
        "times the mean of edges; ranks wait 33% of an epoch. "
    )
    assert text.endswith(
        "75% of bytes are those of halo row. The longest phase is train, 2 s."
    )
    figures |= {"edges": [20, 20]}
    text = first_words(slow, partition=figures, hosts=["a", "b"])
    assert "no more nodes, edges and rows to exchange" in text
    assert "(look at its host, b)" in text
    for row in slow:
        row["by_rank"]["phases"] = {"train": [2.0, 1.8], "read": [0.0, 1.2]}
    text = first_words(slow, partition=figures)
    assert "times the mean, and spends 600 ms more than the mean in read; ranks" in text
    assert first_words(epochs([2.0, 2.1], [0.1, 0.0])).startswith("No rank is slow")


def test_without_matplotlib_it_says_what_to_install(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(run), "-o", str(tmp_path / "p.html")]) == 2
    assert "pip install 'pyg-distcomm[plot]'" in capsys.readouterr().err


def test_an_empty_run_is_drawn_and_what_is_no_run_is_told(tmp_path, run, capsys):
    out, empty, parts = (tmp_path / name for name in ("p.html", "empty", "parts"))
    pdc.metrics(empty, alone((1, 1, 1), 0, torch.device("cpu")))
    capsys.readouterr()
    assert main(["report", str(empty), "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == 0
    assert "Nothing recorded yet" in out.read_text()
    cut = ("partition", "generated-90", str(parts), "--parts", "3", "--method", "block")
    assert main([*cut]) == 0
    for name, to, words in (
        (tmp_path / "nowhere", "p", "does not exist"),
        (tmp_path, "p", "is not a folder of pdc.metrics"),
        (run / "trace.json.gz", "p", "https://ui.perfetto.dev"),
        (parts, "p", "pyg-distcomm inspect"),
        (run, "", "is a folder; give a file"),
    ):
        assert main(["report", str(name), "-o", str(tmp_path / to)]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_numbers_are_shown_with_units():
    for number, text in ((0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e6, "2 MB")):
        assert with_unit(number, "B") == text
    assert [with_unit(s, "s") for s in (0, 2.5, 0.0125)] == ["0 s", "2.5 s", "12.5 ms"]
    assert with_unit(12, "") == "12"


def resumed(folder, epochs):
    """Runs on a rank: records some epochs, of a run that may have been begun before."""
    mesh = worlds.mesh()
    data = pdc.partition(generated(60), mesh, "block")
    run = pdc.metrics(folder, mesh, data=data)
    for epoch in epochs:
        run.epoch(epoch, loss=1 / (1 + epoch))


def test_a_restart_is_marked_where_the_run_went_on(tmp_path):
    folder, out = tmp_path / "run", tmp_path / "page.html"
    worlds.run(resumed, 3, str(folder), range(5))
    worlds.run(resumed, 2, str(folder), range(3, 6))  # from the checkpoint of epoch 2
    assert main(["report", str(folder), "-o", str(out)]) == 0
    text = out.read_text()
    assert "A broken line is a restart: after epoch 2, on 2 ranks." in text
    assert "3 → 2 ranks" in text
