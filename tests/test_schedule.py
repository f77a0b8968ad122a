"""Schedules: values at both ends, in between, and what a budget buys."""

from __future__ import annotations

import itertools
import math

import pytest
import tiers

from pyg_distcomm.halo.schedule import (
    Budget,
    Cosine,
    Exponential,
    Fixed,
    Linear,
    LinearInRate,
    Plateau,
    RateScheduler,
    Step,
    total_bytes,
)

RAMPS = (Linear, LinearInRate, Exponential, Cosine)


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


@pytest.mark.parametrize("kind", RAMPS)
def test_ramps_start_end_fall_and_stay(kind):
    for epochs in (1, 2, 3, 4, 100):
        for slope in (0.5, 1.0, 3.3):
            s = kind(epochs, 64.0, 2.0, slope)
            rates = [s.rate(t) for t in range(2 * epochs + 5)]
            assert rates[0] == 64.0
            assert all(a >= b for a, b in itertools.pairwise(rates))
            assert min(rates) >= 2.0
            if slope >= 1 and epochs > 2:
                assert s.rate(epochs - 1) == pytest.approx(2.0)
    assert all(kind(50, 8.0, 8.0).rate(t) == 8.0 for t in range(50))
    assert kind(50, slope=0.0).rate(49) == 128.0


def test_shapes_between_the_ends():
    half = {
        Linear: 8.5,
        LinearInRate: 1 / (0.5 / 16 + 0.5),
        Exponential: 4.0,
        Cosine: 8.5,
    }
    for kind, c in half.items():
        assert kind(102, 16.0, 1.0, 1.0).rate(50) == pytest.approx(c)
    assert Cosine(102, 16.0, 1.0).rate(25) == pytest.approx(1 + 15 * (1 + 0.5**0.5) / 2)


def test_fixed_and_step():
    assert [Fixed(4.0).rate(t) for t in (0, 7, 10**9)] == [4.0] * 3
    s = Step(3, 2.0, 16.0, 3.0)
    assert [s.rate(t) for t in range(0, 15, 3)] == [16.0, 8.0, 4.0, 3.0, 3.0]
    assert s.rate(2) == 16.0
    assert s.rate(10**9) == 3.0


def test_plateau_falls_when_the_metric_does_not():
    pace = RateScheduler(
        Plateau(patience=2, factor=2.0, threshold=0.01, c_max=8.0, c_min=1.0)
    )
    for metric in (5.0, 4.0, 3.0, 2.99, 2.985):  # the last two are no progress
        pace.step(metric)
    assert pace.rate == 8.0
    assert pace.step(3.5) == 4.0
    for _ in range(3):
        pace.step(2.999)
    assert pace.rate == 2.0
    assert pace.step(1.0) == 2.0
    for _ in range(30):
        pace.step(1.0)
    assert pace.rate == 1.0
    with pytest.raises(ValueError, match="needs a metric"):
        pace.step()
    with pytest.raises(ValueError, match="same number on all"):
        pace.step(float("nan"))


def bytes_of(widths, rows=1000):
    def of(epoch, rate):
        return sum(rows * 4 * min(max(round(f / rate), 1), f) for f in widths)

    return of


@tiers.parametrize("kind", RAMPS, slice(0, None, 2))
def test_a_budget_is_met_within_one_per_cent(kind):
    for epochs, widths in ((300, (128, 256)), (40, (100, 64, 64)), (1000, (16,))):
        of, ramp = bytes_of(widths), kind(epochs, 100.0, 1.0)
        least = total_bytes(Fixed(100.0), epochs, of)
        most = total_bytes(Fixed(1.0), epochs, of)
        for share in (0.03, 0.1, 0.21, 0.5, 0.9, 0.985, 0.999):
            total = least + share * (most - least)
            found = Budget(total, ramp).solve(of)
            spent = total_bytes(found, epochs, of)
            assert 0.99 * total <= spent <= total, (kind, epochs, share, found)
        assert Budget(2 * most, ramp).solve(of) == Fixed(1.0)
        with pytest.raises(ValueError, match="too small"):
            Budget(0.9 * least, ramp).solve(of)


def test_budget_bytes_may_depend_on_the_epoch():
    def of(epoch, rate):  # the first epoch is exact, the last layer always is
        return 4e6 if epoch == 0 else 1e6 + 3e6 / rate

    found = Budget(5e7, Exponential(20)).solve(of)
    assert total_bytes(found, 20, of) == pytest.approx(5e7, rel=0.01)


def test_pace_steps_saves_and_prints():
    pace = RateScheduler(Linear(10, 16.0, 1.0, 2.0))
    rates = [pace.rate] + [pace.step() for _ in range(9)]
    assert rates == [Linear(10, 16.0, 1.0, 2.0).rate(t) for t in range(10)]
    again = RateScheduler(Linear(10, 16.0, 1.0, 2.0))
    again.load_state_dict(pace.state_dict())
    assert again.rate == pace.rate
    assert again.epoch == 9
    assert "epoch 9: rate 1" in str(again)
    assert "Linear(epochs=10" in str(again)
    with pytest.raises(ValueError, match=r"lacks \['best'"):
        again.load_state_dict({"epoch": 3, "falls": 0, "waited": 0})
    assert again.epoch == 9


def test_a_plateau_resumes_where_it_stood():
    spec = Plateau(patience=1, c_max=8.0)
    one, metrics = RateScheduler(spec), [3.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0]
    for metric in metrics[:4]:
        one.step(metric)
    two = RateScheduler(spec)
    two.load_state_dict(one.state_dict())
    for metric in metrics[4:]:
        assert one.step(metric) == two.step(metric)


def test_a_budget_has_no_rate_before_it_is_solved():
    pace = RateScheduler(Budget(4e6, LinearInRate(50, 32.0)))
    with pytest.raises(ValueError, match="solve"):
        _ = pace.rate
    assert "not solved yet" in str(pace)
    pace.solve(bytes_of((64,), rows=1000))
    assert pace.rate == 32.0
    assert pace.schedule.slope > 0
    plain = RateScheduler(Fixed(3.0))
    plain.solve(bytes_of((64,)))
    assert plain.schedule == Fixed(3.0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Fixed(0.5), "1 or more, got c=0.5"),
        (lambda: Linear(10, 2.0, 4.0), "c_max=2.0"),
        (lambda: Linear(0), "1 epoch or more"),
        (lambda: Cosine(10, slope=-1.0), "slope is 0 or more"),
        (lambda: Linear(10, float("inf")), "c_max=inf"),
        (lambda: Step(0), "every is 1"),
        (lambda: Step(2, 1.0), "factor must be above 1"),
        (lambda: Plateau(patience=-1), "patience is 0"),
        (lambda: Budget(0, Linear(10)), "number of bytes"),
    ],
)
def test_what_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
