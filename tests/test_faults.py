"""The campaign of faults as tests, by `pytest -m faults`."""

import sys

import faults
import pytest


@pytest.fixture(scope="module")
def campaign():
    if not sys.platform.startswith("linux"):
        pytest.skip("faults are tried by fork and signals, on Linux")
    found = faults.Campaign()
    yield found
    found.nursery.close()


@pytest.mark.faults
@pytest.mark.parametrize("case", faults.cases(), ids=lambda case: case.name)
def test_ranks_end_well(campaign, case):
    outcome = campaign.run(case)
    said = "\n".join(f"--- rank {r} ---\n{text}" for r, text in enumerate(outcome.said))
    assert not outcome.wrong, f"{outcome.wrong}\n{said}"


def test_there_are_as_many_cases_as_promised():
    names = [case.name for case in faults.cases()]
    assert len(names) == len(set(names)) >= 250
