"""A second device for tests, `spare`, whose memory is the host's: see second_device.cpp."""

from __future__ import annotations

import contextlib
import functools
import shutil

import torch


class _Stream:
    """A stream of the device, whose operations have ended when they return."""

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


class _Module:
    """What torch asks of the module of a device."""

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def _is_in_bad_fork():
        return False

    @staticmethod
    def manual_seed_all(seed):
        pass

    @staticmethod
    def get_amp_supported_dtype():
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def current_stream(device=None):
        return _Stream()

    @staticmethod
    def device(device):
        return contextlib.nullcontext()

    @staticmethod
    def stream(stream):
        return contextlib.nullcontext()


def can_build():
    return shutil.which("c++") is not None and shutil.which("ninja") is not None


@functools.cache
def device():
    """Compiles and registers the device, once in a process; minutes the first time."""
    from pathlib import Path

    from torch.utils.cpp_extension import load

    torch.utils.rename_privateuse1_backend("spare")
    source = Path(__file__).with_suffix(".cpp")
    load("second_device", [str(source)], extra_cflags=["-O0"])
    torch._register_device_module("spare", _Module)
    return torch.device("spare", 0)


def device_of(place):
    """The device that a test calls by the name of a place: "cpu", "cuda" or "spare"."""
    if place == "spare":
        return device()
    return torch.device(place, 0) if place == "cuda" else torch.device(place)
