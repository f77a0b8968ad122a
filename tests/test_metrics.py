"""Figures of epochs: what they count, what is kept of them, and what writers write."""

import csv
import json
import pickle

import pytest
import torch
import worlds
from test_saving import full_after

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import Entry, Ledger, Ledgers
from pyg_distcomm.comm.mesh import alone
from pyg_distcomm.datasets import generated
from pyg_distcomm.loader import LoaderOptions
from pyg_distcomm.nn import GCNConv
from pyg_distcomm.watch.metrics import flat, read_run


def lone():
    return alone((1, 1, 1), 0, torch.device("cpu"))


@worlds.on(3)
def test_rows_are_the_ledgers_of_all_ranks(tmp_path):
    mesh = worlds.mesh()
    data = pdc.partition(generated(90), mesh, "block")
    conv = GCNConv(data.num_features, 4)
    run, rows = pdc.metrics(tmp_path / "run", mesh, data=data), []
    mesh.ledger.reset()
    for epoch in range(3):
        with run.phase("train"):
            conv(data.x, data.edge_index).sum().backward()
        before = mesh.ledger.snapshot()
        rows.append(run.epoch(epoch, loss=0.5, rank=mesh.rank))
        assert mesh.ledger.snapshot() == before  # what is its own is not counted
    silent = run.epoch(3)
    assert silent["bytes"] == {"total": 0}
    moved = mesh.gather_ledger().sum
    assert moved.bytes() > 0
    for (op, axis), entry in moved.entries.items():
        counts = [row["bytes"].get(f"{op} {axis}", 0) for row in rows]
        assert sum(counts) == entry.bytes
    for row in rows:
        assert row["bytes"]["total"] == sum(row["by_rank"]["bytes"])
        assert 2 * row["bytes"]["total"] == sum(row["bytes"].values())
        assert row["seconds"] == max(row["by_rank"]["seconds"])
        assert row["waits"]["most"] == max(row["by_rank"]["waits"])
        assert row["phases"]["train"] > 0
        assert row["imbalance"]["bytes"] >= 1
        assert (row["loss"], row["rank"]) == (0.5, 0)
        json.dumps(row)
    for other in collectives.all_gather_object(rows, mesh.world):
        assert other == rows  # equal on all ranks
    found = read_run(tmp_path / "run")
    assert found.rows == [*rows, silent]
    assert found.about["ranks"] == 3
    assert found.about["partition"]["nodes"] == [30, 30, 30]


def test_a_run_goes_on_in_its_folder(tmp_path):
    folder, mesh = tmp_path / "run", lone()
    first = pdc.metrics(folder, mesh, writers=[pdc.CSVWriter(tmp_path / "a.csv")])
    for epoch in range(6):
        first.epoch(epoch, loss=epoch)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 6, "lo')  # a kill, half way
    again = pdc.metrics(folder, mesh, writers=[pdc.CSVWriter(tmp_path / "a.csv")])
    for epoch in (4, 5):
        again.epoch(epoch, loss=10 + epoch, accuracy=0.5)
    run = read_run(folder)
    assert [row["epoch"] for row in run.rows] == [0, 1, 2, 3, 4, 5]
    assert [row["loss"] for row in run.rows] == [0, 1, 2, 3, 14, 15]
    assert [row["start"] for row in run.rows] == [0, 0, 0, 0, 1, 1]
    assert [start["ranks"] for start in run.about["starts"]] == [1, 1]
    with open(tmp_path / "a.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["loss"]) for line in lines] == [0, 1, 2, 3, 14, 15]
    assert [line["accuracy"] for line in lines] == ["", "", "", "", "0.5", "0.5"]
    assert {"bytes/total", "waits/most", "phases/computing"} <= set(lines[0])


def test_writers_get_rows_and_one_that_fails_is_left_out(tmp_path):
    seen = []

    def fails(row):
        raise OSError("full")

    run = pdc.metrics(None, lone(), writers=[fails, seen.append])
    with pytest.warns(UserWarning, match=r"fails failed and is not called again: full"):
        run.epoch(0, loss=torch.tensor(2.0, requires_grad=True))
    run.epoch(1)
    assert [row["epoch"] for row in seen] == [0, 1]
    assert flat(seen[0])["loss"] == 2.0
    assert flat(seen[0])["bytes/total"] == 0
    assert not [name for name in flat(seen[0]) if "by_rank" in name]


def test_tensorboard_reads_the_scalars(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for epochs in (range(3), range(1, 4)):  # the second start repeats two epochs
        run = pdc.metrics(None, lone(), writers=[pdc.TensorBoardWriter(tmp_path)])
        for epoch in epochs:
            run.epoch(epoch, loss=1.5 * epoch)
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(0, 0), (1, 1.5), (2, 3), (3, 4.5)]
    assert "bytes/total" in events.Tags()["scalars"]


def test_all_ranks_see_what_rank_0_is_given(tmp_path):
    pdc.metrics(tmp_path / "run", lone())  # an earlier start
    first, second = worlds.run(alike, 2, str(tmp_path / "run"))
    assert first == second
    assert (first["epoch"], first["start"], first["loss"]) == (0, 1, 2.0)


def alike(folder):
    """What a rank that is given other things than rank 0 sees."""
    mesh = worlds.mesh()
    data = pdc.partition(generated(40), mesh, "block")
    one = mesh.rank == 1
    for wrong, told in (
        (generated(20), "rank 1: .*got Data with a plain edge_index"),
        (None, "none on rank 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            pdc.metrics(None, mesh, data=wrong if one else data)
    run = pdc.metrics(None if one else folder, mesh)
    with pytest.raises(TypeError, match="loss=str is not one number"):
        run.epoch(0, loss=1.0 if one else "much")
    with run.trace():
        return run.epoch(7 if one else 0, loss=None if one else 2.0)


def test_a_csv_file_drops_a_line_that_was_cut_short(tmp_path):
    path = tmp_path / "a.csv"
    for cut in ("1,3.0", "1,3.0,4."):
        path.write_text(f'epoch,"a,b",c\n0,1.0,2.0\n{cut}')
        pdc.CSVWriter(path)({"epoch": 2, "a,b": 5.0, "c": 6.0})
        assert path.read_text() == 'epoch,"a,b",c\n0,1.0,2.0\n2,5.0,6.0\n'


def test_a_line_that_a_full_disk_cuts_short_is_told(tmp_path):
    run = pdc.metrics(tmp_path, lone())
    run.epoch(0, loss=1.0)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with (
        full_after(size + 10),
        pytest.warns(UserWarning, match=r"No space left on device.*metrics\.jsonl"),
    ):
        run.epoch(1, loss=1.0)
    again = pdc.metrics(tmp_path, lone())
    again.epoch(2, loss=1.0)
    assert [row["epoch"] for row in read_run(tmp_path).rows] == [0, 2]


def test_what_is_no_figure_is_refused(tmp_path):
    run = pdc.metrics(None, lone())
    with pytest.raises(ValueError, match=r"bytes= is a figure of pdc.metrics itself"):
        run.epoch(0, bytes=3)
    with pytest.raises(TypeError, match="loss=Tensor is not one number"):
        run.epoch(0, loss=torch.ones(3))
    with pytest.raises(TypeError, match=r"what pdc.partition"):
        pdc.metrics(None, lone(), data=generated(20))
    with pytest.raises(ValueError, match=r"pdc.metrics\(None\) has no folder"):
        run.trace()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"save elsewhere, .*file: File exists"):
        pdc.metrics(tmp_path / "file", lone())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("[]")
    with pytest.raises(ValueError, match=r"is not what pdc.metrics has written"):
        pdc.metrics(tmp_path / "other", lone())


def test_phases_of_a_loader_are_those_it_shows():
    from pyg_distcomm.loader import DistNeighborLoader

    loader = DistNeighborLoader(
        generated(80), [3], batch_size=20, options=LoaderOptions(split=False)
    )
    run = pdc.metrics(None, lone(), loader=loader)
    assert len(list(loader)) == 4
    row = run.epoch(0)
    for name, phase in loader.phases.by_name.items():
        assert row["phases"][f"loader: {name}"] == pytest.approx(phase.seconds)
    assert "loader: sample" in row["phases"]


# The ledger as a table and as a plot, of one rank and of all -------------------------


def ledger(times=1):
    out = Ledger()
    for op, axis, size in (("halo", "row", 6), ("halo", "col", 2), ("sum", "data", 8)):
        count = size * times
        out.note(
            op, axis, words=count, bytes=8 * count, sent_bytes=0, messages=3 * times
        )
    out.waited("halo", "row", 2e-3)
    return out


def cells(table):
    return [line.split() for line in table.splitlines()]


def test_a_table_has_shares_rates_and_a_total():
    head, _, *rows = cells(str(ledger(1000)))
    names = "operation axis calls words bytes messages seconds MB/s share"
    assert head == names.split()
    assert rows == [
        ["halo", "col", "1", "2,000", "16,000", "3,000", "0", "-", "12.5%"],
        ["halo", "row", "1", "6,000", "48,000", "3,000", "0.002", "24", "37.5%"],
        ["sum", "data", "1", "8,000", "64,000", "3,000", "0", "-", "50.0%"],
        ["total", "3", "16,000", "128,000", "9,000", "0.002", "-", "100.0%"],
    ]


def test_large_counts_are_short_unless_asked_for():
    big = ledger(1_000_000)
    total = str(big).splitlines()[-1]
    assert "128 M" in total
    assert "9,000,000" in total
    assert "128,000,000" in big.table(exact=True)
    assert "1.28 G" in str(ledger(10_000_000))


def test_a_table_of_nothing():
    assert cells(str(Ledger()))[-1] == ["total", "0", "0", "0", "0", "0", "-", "-"]
    empty = Ledgers((Ledger(), Ledger()))
    assert cells(str(empty))[-1][0] == "total"
    assert empty.sum == Ledger()


@pytest.mark.parametrize("size", [1, 3])
@worlds.on()
def test_all_ranks_gather_what_each_has_counted(size):
    mesh = worlds.mesh()
    x = torch.ones(mesh.rank + 1, 3)
    counts = [rank + 1 for rank in range(mesh.size)]
    collectives.all_gather_rows(x, counts, mesh.world)
    mine = mesh.ledger.snapshot()
    found = pickle.loads(pickle.dumps(mesh.gather_ledger()))
    assert mesh.gather_ledger().sum.bytes("plan") or size == 1  # counted, later
    every = collectives.all_gather_object(mine, mesh.world)
    assert [rank.entries for rank in found.ranks] == every
    entries = [e for mine in every for e in mine.values()]
    assert found.sum.bytes() == sum(e.bytes for e in entries)
    assert found.sum.messages() == sum(e.messages for e in entries)
    if size == 3:  # rank 0 lacks 2 + 3 rows of 3 words, rank 1 1 + 3, rank 2 1 + 2
        assert [rank.bytes() for rank in found.ranks] == [60, 48, 36]
        head, _, row, _ = cells(str(found))
        told = row[head.index("bytes") : head.index("slowest")]
        assert told == ["144", "6", "60", "0", "1.25"]


def test_sums_over_ranks():
    both = Ledgers((ledger(1), ledger(3))).sum
    assert both.entries["halo", "row"] == Entry(2, 24, 192, 0, 12, 4e-3)
