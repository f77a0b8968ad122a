"""Which cases run by default, and which with `-m exhaustive` alone.

    python -m pytest -m exhaustive --junitxml runs/exhaustive.xml
    python tests/tiers.py runs/exhaustive.xml >> benchmarks/reports/exhaustive.md

writes a table of what a run found, by file.
"""

from __future__ import annotations

import itertools
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict

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


def report(*paths):
    """Yields the lines of a table: cases of each file by what became of them, in all runs."""
    found = defaultdict(Counter)
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            end = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
            found[case.get("classname").rpartition(".")[2]][end] += 1
    ends = ("passed", "skipped", "failed")
    yield f"| file | {' | '.join(ends)} |\n|---|---|---|---|"
    for name in sorted(found):
        yield f"| {name}.py | {' | '.join(str(found[name][end]) for end in ends)} |"
    every = sum(found.values(), Counter())
    yield f"| all | {' | '.join(f'{every[end]:,}' for end in ends)} |"


if __name__ == "__main__":
    print(*report(*sys.argv[1:]), sep="\n")
