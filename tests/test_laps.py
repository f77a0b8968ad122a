"""What is timed on all ranks: by which clock, and how many share a processor."""

from __future__ import annotations

import importlib
from unittest import mock

import pytest
import tiers
import torch
import worlds

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import let_go
from pyg_distcomm.comm.process_grid import new_axis_group
from pyg_distcomm.plan.machine import lines_of

laps = importlib.import_module("pyg_distcomm.plan.timing")
# seconds of each, and of its processor; of a long one on each rank
TOOK = {"spmm": (1.0, 2.0), "epoch": (9.0, 3.0)}
LONG = {0: (4.0, 2.0), 1: (6.0, 2.0)}


def timed(threads):
    mesh = worlds.mesh()
    works = {("spmm", 4): lambda: "spmm", ("epoch", 1): lambda: "epoch"}

    def both(work, there):
        assert there is mesh
        return TOOK.get(work()) or LONG[mesh.rank]

    before = torch.get_num_threads()
    torch.set_num_threads(threads[mesh.rank])
    try:
        with mock.patch.object(laps, "_both", both):
            found = laps.LapTimer(works, lambda: "long", mesh)
            found.run(2)
            found.run(1, 5.0)
            medians = found.medians()
    finally:
        torch.set_num_threads(before)
    return medians, {name: len(took) for name, took in found._found.items()}


@pytest.mark.parametrize("threads", [(1, 1), (1, 2)])
def test_clocks_are_those_of_processors_that_all_ranks_can_read(threads):
    answers = worlds.run(timed, 2, threads)
    assert answers[0] == answers[1]
    medians, times = answers[0]
    if threads == (1, 1):  # times how much longer the long one took, where that is most
        assert medians == {("spmm", 4): 3 * 2.0, ("epoch", 1): 3 * 3.0}
        assert times == {
            ("spmm", 4): 2,
            ("epoch", 1): 9,
        }  # the third time it is too long
    else:
        assert medians == {("spmm", 4): 1.0, ("epoch", 1): 9.0}
        assert times == {("spmm", 4): 3, ("epoch", 1): 9}


def test_what_is_over_soon_counts_the_seconds_of_its_processor():
    mesh = worlds.mesh()
    wall, busy = laps._both(lambda: laps._a_while(lambda: None), mesh)
    assert laps.CROWD <= busy <= wall


def in_line(stages):
    mesh = worlds.mesh(stages=stages)
    everyone = mesh.stage.rank * mesh.size + mesh.rank
    found = {}
    for size, stride in lines_of(mesh.size):
        line = new_axis_group(mesh, size, stride)
        found[size, stride] = [
            row[0] for row in collectives.all_gather_counts([everyone], line)
        ]
        assert found[size, stride][line.rank] == everyone
        if line is not mesh.world:
            let_go([line])
    return found


@tiers.parametrize(
    ("size", "stages"), [(2, 1), (4, 1), (6, 1), (8, 2)], [(2, 1), (4, 1)]
)
def test_lines_are_the_axes_of_grids(size, stages):
    ways = size // stages
    for rank, found in enumerate(worlds.run(in_line, size, stages)):
        assert list(found) == lines_of(ways)
        for (n, stride), line in found.items():
            first = rank // (n * stride) * (n * stride) + rank % stride
            assert line == list(range(first, first + n * stride, stride))
