"""The campaign of faults as tests: all of it by `pytest -m faults`, a few by default."""

import sys

import faults
import pytest

BY_DEFAULT = {"training from two threads"}


def chosen():
    """Returns all cases, those that do not run by default with a mark."""
    return [
        pytest.param(
            case,
            id=case.name,
            marks=() if case.name in BY_DEFAULT else pytest.mark.faults,
        )
        for case in faults.cases()
    ]


@pytest.fixture(scope="module")
def campaign():
    if not sys.platform.startswith("linux"):
        pytest.skip("faults are tried by fork and signals, on Linux")
    found = faults.Campaign()
    yield found
    found.nursery.close()


@pytest.mark.parametrize("case", chosen())
def test_ranks_end_well(campaign, case):
    outcome = campaign.run(case)
    said = "\n".join(f"--- rank {r} ---\n{text}" for r, text in enumerate(outcome.said))
    assert not outcome.wrong, f"{outcome.wrong}\n{said}"


def test_there_are_as_many_cases_as_promised():
    names = [case.name for case in faults.cases()]
    assert len(names) == len(set(names)) >= 250
    assert set(names) >= BY_DEFAULT
