"""Schedules: values at both ends, and in between."""

from __future__ import annotations

import itertools
import math

import pytest

from pyg_distcomm.halo.schedule import Fixed, Linear


def test_linear_is_varcos_formula_with_its_clamp():
    for c_min in (1.0, 1.5):
        for slope in (1, 2, 5, 7):
            s = Linear(300, 128.0, c_min, slope)
            for t in range(300):
                told = max(128 - slope * t * (128 - c_min) / 298, c_min)
                assert s.rate(t) == pytest.approx(told, rel=1e-12)
            end = math.ceil(298 / slope)
            assert s.rate(end) == c_min
            assert s.rate(end - 1) > c_min
    assert Linear(300) == Linear(300, 128.0, 1.0, 5.0)


@pytest.mark.parametrize(
    ("slope", "one", "half"),
    [(1, 0.043, 0.038), (2, 0.521, 0.352), (5, 0.807, 0.540), (7, 0.862, 0.576)],
)
def test_linear_sends_this_share_of_the_numbers(slope, one, half):
    for c_min, share in ((1.0, one), (1.5, half)):
        s = Linear(300, 128.0, c_min, slope)
        mean = sum(1 / s.rate(t) for t in range(300)) / 300
        assert mean == pytest.approx(share, abs=1e-3)


def test_linear_starts_ends_falls_and_stays():
    for epochs in (1, 2, 3, 4, 100):
        for slope in (0.5, 1.0, 3.3):
            s = Linear(epochs, 64.0, 2.0, slope)
            rates = [s.rate(t) for t in range(2 * epochs + 5)]
            assert rates[0] == 64.0
            assert all(a >= b for a, b in itertools.pairwise(rates))
            assert min(rates) >= 2.0
            if slope >= 1 and epochs > 2:
                assert s.rate(epochs - 1) == pytest.approx(2.0)
    assert all(Linear(50, 8.0, 8.0).rate(t) == 8.0 for t in range(50))
    assert Linear(50, slope=0.0).rate(49) == 128.0
    assert Linear(102, 16.0, 1.0, 1.0).rate(50) == pytest.approx(8.5)


def test_fixed():
    assert [Fixed(4.0).rate(t) for t in (0, 7, 10**9)] == [4.0] * 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Fixed(0.5), "1 or more, got c=0.5"),
        (lambda: Linear(10, 2.0, 4.0), "c_max=2.0"),
        (lambda: Linear(0), "1 epoch or more"),
        (lambda: Linear(10, slope=-1.0), "slope is 0 or more"),
        (lambda: Linear(10, float("inf")), "c_max=inf"),
    ],
)
def test_what_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
