import gc
import os
import sys
from pathlib import Path

import pytest
import torch

gc.disable()  # until tests are collected: what is imported and collected stays
sys.path.insert(0, str(Path(__file__).parent))
# ranks are processes: the pools' ranks import the tests by name, and share two cores
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
if not torch.cuda.is_available():  # Triton's kernels then run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

import places  # noqa: E402 - Triton reads the environment when it is imported
import templates  # noqa: E402, F401 - keeps what PyG compiles for each class of layers

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="module", autouse=True)
def _few_idle_ranks():
    """Ends large and worn pools: even idle, they take processors from what comes next."""
    yield
    if "worlds" in sys.modules:
        sys.modules["worlds"].rest(size=4, groups=16)


def pytest_addoption(parser):
    parser.addoption(
        "--place",
        choices=["cpu", "cuda", "second"],
        help="where tests compute that take the fixture `place`: the CPU, and CUDA where "
        "there is one, by default; `second` is the device of tests/second_device.py",
    )


def pytest_configure(config):
    if config.getoption("--place") == "second":
        os.environ["PYG_DISTCOMM_TEST_PLACE"] = "spare"
        places.prepare()


def pytest_unconfigure():
    if (
        "PYTEST_XDIST_WORKER" not in os.environ
    ):  # where it takes seconds, and nobody reads
        gc.unfreeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Has the garbage collector pass over what is imported and collected, which stays."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_generate_tests(metafunc):
    if "place" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--place")
        known = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        known = {"second": ["spare"], None: known}.get(asked, [asked])
        mark = metafunc.definition.get_closest_marker("place")
        found = [each for each in known if mark is None or each in mark.args]
        cuda = pytest.param("cuda", marks=pytest.mark.cuda)
        found = [cuda if each == "cuda" else each for each in found]
        metafunc.parametrize("place", found, indirect=True)


@pytest.fixture
def place(request):
    """Where ranks compute what is compared with one process: on CUDA, too, if it is there."""
    places.NOW = request.param
    yield request.param
    places.NOW = "cpu"


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))
        if item.get_closest_marker("data") and not SHARED.exists():
            item.add_marker(pytest.mark.skip(reason=f"no real graphs at {SHARED}"))
