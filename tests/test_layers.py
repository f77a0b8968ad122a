"""Every layer of PyG, on ranks, equals itself on one process, or is refused by name."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch_geometric.nn as pyg
import worlds
from layers import AGGREGATIONS, EDGE_ATTRS, EXACT, NOT_LAYERS, REFUSED, F, X, make, problem
from problems import owners

import pyg_distcomm as pdc
from pyg_distcomm import wire
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv, HaloConv

CUTTERS = ("metis", "random", "empty_rank", "lopsided")
TOLERANCE = 1e-9


def _given(data, names):
    found = []
    for name in names:
        value = data.get(name) if name else None
        if name == "stacked":
            value = torch.stack([data.x, data.x0], dim=1)
        found.append(value)
    return found


def _leaves(data, names):
    wanted = [n for n in ("x", "h6", "x0", "pos", *EDGE_ATTRS) if n in names]
    if "stacked" in names:
        wanted += ["x", "x0"]
    return [n for n in wanted if data[n].is_floating_point()]


def step(conv, data, names):
    """One pass there and back: output, and the gradients of everything that has one."""
    leaves = _leaves(data, names)
    for name in leaves:
        data[name] = data[name].clone().requires_grad_()
    out = conv(*_given(data, names))
    found = {"out": out}
    (out.square().sum() + (out * out.sin()).mean()).backward()
    for name in leaves:
        found[f"grad of {name}"] = data[name].grad
    return found


def _everywhere(value, data, mesh):
    if isinstance(value, pdc.DistTensor):
        return value.full_tensor().detach()
    return value


def _parameter_grads(conv, mesh=None):
    for name, p in conv.named_parameters():
        grad = p.grad
        if mesh is not None and grad is not None and mesh.size > 1:
            grad = wire.all_reduce(grad, mesh.world) / mesh.size
        yield f"grad of parameter {name}", grad
    for name, b in conv.named_buffers():
        yield f"buffer {name}", b


def _in_doubles(fn, *args):
    torch.set_default_dtype(torch.float64)
    try:
        return fn(*args)
    finally:
        torch.set_default_dtype(torch.float32)


def parity(build, names, graph, cutter, wrap=HaloConv):
    """Runs a layer on this rank, and asserts every piece equal to PyG's."""
    data = problem(graph)
    single = make(build)
    want = step(single, data, names)
    want.update(_parameter_grads(single))
    mesh = worlds.mesh()
    data = problem(graph)
    share = pdc.partition(
        data, mesh, owners(cutter, data, mesh.size), edge_attrs=EDGE_ATTRS
    )
    conv = wrap(make(build))
    got = step(conv, share, names)
    got.update(_parameter_grads(conv, mesh))
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert (value is None) == (want[name] is None), name
        if value is not None:
            torch.testing.assert_close(
                _everywhere(value, share, mesh),
                want[name].detach(),
                rtol=TOLERANCE,
                atol=TOLERANCE,
                equal_nan=True,
                msg=lambda text, name=name: f"{name} on {graph}: {text}",
            )


def exact(name, graph, cutter):
    build, names = EXACT[name]
    _in_doubles(parity, build, names, graph, cutter)


def refusal(name, graph, cutter):
    build, names, _ = REFUSED[name]
    return _in_doubles(_refusal, build, names, graph, cutter)


def _refusal(build, names, graph, cutter):
    data = problem(graph)
    mesh = worlds.mesh()
    share = pdc.partition(
        data, mesh, owners(cutter, data, mesh.size), edge_attrs=EDGE_ATTRS
    )
    try:
        HaloConv(make(build))(*_given(share, names))
    except (TypeError, ValueError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return "it ran"
