"""A second device for tests, `spare`, whose memory is the host's: see second_device.cpp."""

import contextlib
import functools
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch

# operations of the device have ended when they return
_STREAM = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
# what torch asks of the module of a device
_MODULE = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    current_stream=lambda device=None: _STREAM,
    device=contextlib.nullcontext,
    stream=contextlib.nullcontext,
)


def can_build():
    return shutil.which("c++") is not None and shutil.which("ninja") is not None


@functools.cache
def device():
    """Compiles and registers the device, once in a process; a minute the first time."""
    torch.utils.rename_privateuse1_backend("spare")
    _load("second_device")
    torch._register_device_module("spare", _MODULE)
    return torch.device("spare", 0)


def prepare():
    """Compiles all of the device, also what torch.autocast does on it."""
    device()
    _load("second_autocast")


def _load(name):
    """Builds one process at a time: torch's own lock outlives a process that was killed."""
    import fcntl

    from torch.utils import cpp_extension

    source = Path(__file__).with_name(f"{name}.cpp")
    root = Path(cpp_extension.get_default_build_root())
    folder = root / f"{name}_{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # freed by the system when its process ends
        (folder / "lock").unlink(missing_ok=True)
        kept, text = folder / "kept.cpp", source.read_text()
        if not kept.exists() or kept.read_text() != text:  # of another checkout
            kept.write_text(text)
        cpp_extension.load(
            name,
            [str(kept)],
            extra_cflags=["-O0"],
            build_directory=str(folder),
            is_python_module=False,
        )


def device_of(place):
    """The device that a test calls by the name of a place: "cpu", "cuda" or "spare"."""
    if place == "spare":
        return device()
    return torch.device(place, 0) if place == "cuda" else torch.device(place)
