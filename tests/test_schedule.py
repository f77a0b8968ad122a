"""Schedules: values at both ends, and in between."""

from __future__ import annotations

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
    assert [Fixed(4.0).rate(t) for t in (0, 7, 10**9)] == [4.0] * 3


def test_short_and_constant_schedules_start_at_the_top_and_never_rise():
    for epochs in (1, 2, 3, 4):
        rates = [Linear(epochs, 64.0, 2.0, 3.3).rate(t) for t in range(9)]
        assert rates[0] == 64.0
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] == 2.0
    assert all(Linear(50, 8.0, 8.0).rate(t) == 8.0 for t in range(50))
    assert Linear(50, slope=0.0).rate(49) == 128.0


def test_what_is_refused():
    for make, says in (
        (lambda: Fixed(0.5), "1 or more, got c=0.5"),
        (lambda: Linear(10, 2.0, 4.0), "c_max=2.0"),
        (lambda: Linear(0), "1 epoch or more"),
        (lambda: Linear(10, slope=-1.0), "slope is 0 or more"),
        (lambda: Linear(10, float("inf")), "c_max=inf"),
    ):
        with pytest.raises(ValueError, match=says):
            make()
