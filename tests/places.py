"""Runs tests on a device: shares are sent there, models follow what they are called with.

A test that takes the fixture `place` runs its ranks within `at(place)`. What is made from
ordinary tensors stays with the host, as the numbers of one process that it is held to do.
"""

import contextlib
import functools
import os
import sys
from pathlib import Path
from unittest import mock

import second_device
import torch
import torch.distributed as dist
from torch.nn.parameter import UninitializedTensorMixin
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data.data import BaseData

TESTS = Path(__file__).parent
NOW = "cpu"  # where the test that runs now computes


def prepare():
    """Compiles the second device before autograd starts threads, if tests will use it."""
    if os.environ.get("PYG_DISTCOMM_TEST_PLACE") == "spare":
        second_device.prepare()


def _tensors(value):
    """The tensors in a value, in lists, dictionaries and graphs."""
    if isinstance(value, BaseData):
        value = value.to_dict()
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, BaseData):
            found += _tensors(leaf)
    return found


def _move(module, device):
    """Sends a module to a device; parameters stay those that optimizers know.

    torch's own `to` makes others of those of the second device.
    """
    for kind in (module.parameters, module.buffers):
        for t in kind():
            if t.device not in (device, torch.device("meta")):
                if isinstance(t, UninitializedTensorMixin):
                    there = type(t)(device=device, dtype=t.dtype)
                else:
                    there = t.detach().to(device).requires_grad_(t.requires_grad)
                torch._C._swap_tensor_impl(t, there)
                if t.grad is not None:
                    t.grad = t.grad.to(device)


def _following(call, device, inside):
    """Sends modules where their arguments are, and holds them to answer there."""

    @functools.wraps(call)
    def follow(module, *args, **kwargs):
        found = [] if inside else _tensors([args, kwargs])
        given = {t.device for t in found}
        if device in given:
            _move(module, device)
        elif any(t.is_floating_point() for t in found):  # ids may lie anywhere
            _move(module, torch.device("cpu"))
        inside.append(module)
        try:
            out = call(module, *args, **kwargs)
        finally:
            inside.pop()
        if device in given:
            astray = {str(t.device) for t in _tensors(out)} - {str(device)}
            assert not astray, f"{type(module).__name__} gives tensors on {astray}"
        return out

    return follow


def lacks(text):
    """Tells whether an error says that the second device has no such operation."""
    return NOW == "spare" and "Could not run 'aten::" in text


def home(value):
    """Brings tensors of a device to the host, to be compared."""
    moved = lambda t: t.cpu() if isinstance(t, torch.Tensor) and not t.is_cpu else t  # noqa: E731
    return tree_map(moved, value)


def _comparing(function):
    """Compares on the host what a test gives; the package gets what torch gives."""

    @functools.wraps(function)
    def compare(one, two, *args, **kwargs):
        asks = Path(sys._getframe(1).f_code.co_filename).parent
        places = {t.device for t in _tensors([one, two])}
        if len(places) > 1 and asks == TESTS:
            one, two = home(one), home(two)
        return function(one, two, *args, **kwargs)

    return compare


def _sending(function, device):
    @functools.wraps(function)
    def send(*args, **kwargs):
        return function(*args, **kwargs).to(device)

    return send


def _moving(function, device):
    @functools.wraps(function)
    def convert(*args, **kwargs):
        model = function(*args, **kwargs)
        _move(model, device)
        return model

    return convert


def _placing(init, device):
    @functools.wraps(init)
    def place(self, *args, **kwargs):
        init(self, *args, **kwargs)
        _move(self, device)

    return place


def _replicating(function, device):
    import pyg_distcomm as pdc

    @functools.wraps(function)
    def replicate(model, *args, **kwargs):
        _move(model, device)
        if device.type == "cuda":
            return function(model, *args, **kwargs)
        # DistributedDataParallel has no back end there
        model = pdc.convert(model, trim=False)
        object.__setattr__(model, "module", model)
        mesh = args[0] if args else kwargs.get("mesh")
        if mesh is not None and mesh.size > 1:
            model.register_forward_hook(_averaging(mesh))
        return model

    return replicate


def _averaging(mesh):
    """Averages gradients over the ranks at the end of a backward pass, as DDP does.

    What meets rows of all ranks is averaged by the package.
    """

    from pyg_distcomm.nn.embedding import sharded_parameters

    def average(model):
        apart = sharded_parameters(model)  # their rows are of this rank alone
        for name, p in model.named_parameters():
            if p.requires_grad and name not in apart:
                grad = (
                    torch.zeros_like(p, device="cpu")
                    if p.grad is None
                    else p.grad.cpu()
                )
                dist.all_reduce(grad, group=mesh.data.group)
                p.grad = (grad / mesh.size).to(p.device)

    def arm(model, args, out):
        asked = []

        def ask(grad):
            if not asked:
                asked.append(True)
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: average(model))

        for t in _tensors(out):
            if type(t) is torch.Tensor and t.requires_grad:
                t.register_hook(ask)

    return arm


def _piping(function, device):
    @functools.wraps(function)
    def init(self, layers, *args, **kwargs):
        for layer in layers if isinstance(layers, (list, tuple)) else [layers]:
            layer = layer[0] if isinstance(layer, tuple) else layer
            if isinstance(layer, torch.nn.Module):
                _move(layer, device)
        return function(self, layers, *args, **kwargs)

    return init


@contextlib.contextmanager
def at(place):
    """Has shares and their models lie on a device, and results compared on the host."""
    global NOW
    NOW, outer = place, NOW
    try:
        with _changed(place) if place != "cpu" else contextlib.nullcontext():
            yield
    finally:
        NOW = outer


@contextlib.contextmanager
def _changed(place):
    import pyg_distcomm as pdc

    device = second_device.device_of(place)
    inside = []  # the modules that are called now
    changes = [
        *(
            (kind, "__call__", _following(kind.__call__, device, inside))
            for kind in (torch.nn.Module, pdc.nn.HaloExecution)
        ),
        (pdc, "partition", _sending(pdc.partition, device)),
        (pdc, "load_partition", _sending(pdc.load_partition, device)),
        (pdc, "convert", _moving(pdc.convert, device)),
        (pdc.DistEmbedding, "__init__", _placing(pdc.DistEmbedding.__init__, device)),
        (pdc, "replicate", _replicating(pdc.replicate, device)),
        (pdc.Pipeline, "__init__", _piping(pdc.Pipeline.__init__, device)),
        (torch.testing, "assert_close", _comparing(torch.testing.assert_close)),
        (torch, "equal", _comparing(torch.equal)),
        (torch, "allclose", _comparing(torch.allclose)),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
