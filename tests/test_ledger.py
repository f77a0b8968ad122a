"""The ledger as a table and as a plot, of one rank and of all."""

from __future__ import annotations

import pickle

import pytest
import torch
import worlds

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import Entry, Ledger, Ledgers


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
    assert (
        head == "operation axis calls words bytes messages seconds MB/s share".split()
    )
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
