"""Compares what a share gives with what PyG gives of the whole graph, if it is taken."""

from __future__ import annotations

import contextlib

import torch


@contextlib.contextmanager
def in_doubles():
    """Has torch make numbers of 64 bits, in a block or in a function that it decorates."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def whole(value):
    """All rows of a tensor, or of each in a list."""
    if isinstance(value, (list, tuple)):
        return [whole(v) for v in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def as_pyg_or_refused(run, want, message, kinds=(TypeError,), **close):
    """Checks that `run` returns `want`, or raises an error with a message."""
    try:
        got = run()
    except kinds as error:
        told = str(error)
    else:
        torch.testing.assert_close(
            whole(got), whole(want), **(close or {"rtol": 1e-9, "atol": 1e-9})
        )
        return
    assert message in told, told
