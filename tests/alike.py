"""Compares what a share gives with what PyG gives of the whole graph, if it is taken."""

import contextlib
import traceback

import places
import torch
import worlds
from problems import GRAPHS, owners

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives

CLOSE = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": True}


@contextlib.contextmanager
def in_doubles():
    """Has torch make numbers of 64 bits, in a block or in a function that it decorates."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def share_of(graph="directed", cutter="random", grid=None):
    """A graph, and this rank's share of it."""
    torch.manual_seed(0)
    data, mesh = GRAPHS[graph](), worlds.mesh(grid=grid)
    return data, pdc.partition(data, mesh, owners(cutter, data, mesh.size))


def whole(value):
    """All rows of a tensor, or of each in a list."""
    if isinstance(value, (list, tuple)):
        return [whole(v) for v in value]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def same(got, want, what="", **close):
    """Checks that values, or all within them, are those of one process."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor), f"{what}: {got}"
        pair = whole(got).detach(), want.detach()
        torch.testing.assert_close(
            *pair, **(CLOSE | close), msg=lambda text: f"{what}: {text}"
        )
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), what
        for key, value in want.items():
            same(got[key], value, f"{what} {key}", **close)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), what
        for k, pair in enumerate(zip(got, want, strict=True)):
            same(*pair, f"{what} {k}", **close)
    else:
        assert got == want, what


def once(mesh, names, make):
    """Computes a value for each name on one of the ranks, and returns all on all ranks."""
    mine = {
        name: places.home(make(name)) for name in list(names)[mesh.rank :: mesh.size]
    }
    every = collectives.all_gather_object(mine, mesh.world)
    return {name: value for found in every for name, value in found.items()}


def learnt(layer, x, *more):
    """What a layer gives of rows, and all gradients of the sum of its squares."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = layer(x, *more)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def step(function, x, *more):
    """What a function returns of rows, and their gradient by numbers of its shape."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(0)
    out = function(x, *more)
    if isinstance(out, torch.Tensor) and out.requires_grad:
        draw = torch.Generator().manual_seed(1)
        weight = torch.randn(out.shape, generator=draw, dtype=torch.float64)
        (out * weight.to(out.device)).sum().backward()
    return out, x.grad


def failures_of(cases, check):
    """Runs every case on this rank, and returns those that fail, each with its reason."""
    found = {}
    for name, case in cases.items():
        try:
            check(case)
        except Exception:
            text = traceback.format_exc(limit=-6)
            if not places.lacks(text):
                found[name] = text
    return found


def assert_none(found):
    told = {name: text for rank in found for name, text in rank.items()}
    assert not told, "\n".join(f"=== {name}\n{text}" for name, text in told.items())


def check_all(cases, check):
    """Runs every case on this rank, and tells of all that fail."""
    assert_none([failures_of(cases, check)])


def as_pyg_or_refused(run, want, message, kinds=(TypeError,), **close):
    """Checks that `run` returns `want`, or raises an error with a message."""
    try:
        got = run()
    except kinds as error:
        told = str(error)
    else:
        same(got, want, **close)
        return
    assert message in told, told
