"""Which cases run by default, and which with `-m exhaustive` alone."""

import itertools

import pytest

rare = pytest.mark.exhaustive


def rarely(*values):
    """Marks a case as exhaustive, in a list of others."""
    return pytest.param(*values, marks=rare)


def parametrize(names, cases, default, **options):
    """Makes all cases exhaustive but those by default: some of them, or their places."""
    cases = list(cases)
    if isinstance(default, slice):
        chosen = set(range(len(cases))[default])
    else:
        chosen = {cases.index(case) for case in default}
    several = not isinstance(names, str)
    made = []
    for k, case in enumerate(cases):
        values = case if several else (case,)
        made.append(pytest.param(*values, marks=[] if k in chosen else rare))
    return pytest.mark.parametrize(names, made, **options)


def cover(names, *axes, step=1, **options):
    """Makes the product of axes; by default each value, or each `step`-th, is in one case."""
    most = max(len(axis) for axis in axes)
    chosen = {tuple(k % len(axis) for axis in axes) for k in range(0, most, step)}
    made = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[k] for axis, k in zip(axes, places, strict=True)]
        made.append(pytest.param(*values, marks=[] if places in chosen else rare))
    return pytest.mark.parametrize(names, made, **options)
