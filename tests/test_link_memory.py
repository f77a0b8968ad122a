"""Links never take more memory than the exact one and what they say that they keep."""

from __future__ import annotations

import tiers
import torch
import worlds
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.halo.codecs import (
    Chain,
    ColumnMask,
    Plain,
    Quantise,
)
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn import DistGCNConv

ONE, QUARTER = Quantise(1, "stochastic"), ColumnMask(4)
OPEN = {"exact_last": False}
FEW_BITS = {
    "1 bit": lambda: LinkPolicy(ONE, **OPEN),
    "8 bits": lambda: LinkPolicy(Quantise(8, "nearest"), **OPEN),
    "columns": lambda: LinkPolicy(QUARTER, **OPEN),
    "columns, 1 bit": lambda: LinkPolicy(Chain(QUARTER, ONE), **OPEN),
}
LATE = {
    "1 bit, late": lambda: pdc.Sylvie(exact_last=False),
    "late by 2": lambda: LinkPolicy(QUARTER, late=2, **OPEN),
    "PipeGCN": lambda: pdc.PipeGCN(exact_last=False),
    "smooth": lambda: LinkPolicy(Plain(), late=1, smooth=0.9, **OPEN),
}
LINKS = {**FEW_BITS, **LATE}


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made in it that are alive, and the most there were."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        gone = [key for key, (ref, _) in self.alive.items() if ref.expired()]
        for key in gone:
            del self.alive[key]
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        for storage in (t.untyped_storage() for t in _tensors(out)):
            if storage._cdata not in given:  # no view of what there was
                found = StorageWeakRef(storage), storage.nbytes()
                self.alive.setdefault(storage._cdata, found)
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peaks(names):
    """For the exact link and others: the most bytes of an epoch, what it keeps and sends."""
    mesh, nodes, width = worlds.mesh(), 3000, 64
    rng = torch.Generator().manual_seed(0)
    edges = torch.randint(nodes, (2, 2 * nodes), generator=rng)
    data = Data(x=torch.randn(nodes, width, generator=rng), edge_index=edges)
    found = []
    for link in (None, *[LINKS[name]() for name in names]):
        share = pdc.partition(data, mesh, "block", link=link)
        edge_index = share.edge_index.with_halo("rows").with_ordering(keep_inputs=False)
        conv, x = DistGCNConv(width, width), share.x.detach().requires_grad_()
        kept = message = 0
        for _ in range(5):
            if link is not None:
                price = link.price()
                kept, message = price.kept, max(price.forward, price.backward)
            with Live() as live:
                conv(x, edge_index).sum().backward()
            x.grad = None
            if link is not None:
                link.step()
        found.append((live.most, kept, message))
    return found


@tiers.rare
def test_few_bits_take_less_than_the_exact_link_and_nothing_takes_more_than_it_says():
    for (exact, *_), *rest in worlds.run(peaks, 2, [*LINKS]):
        for name, (most, kept, message) in zip(LINKS, rest, strict=True):
            assert most <= exact + kept + message, name
            if name in FEW_BITS:
                assert most < 0.95 * exact, name
                assert kept == 0
        assert (
            min(
                kept
                for name, (_, kept, _) in zip(LINKS, rest, strict=True)
                if name in LATE
            )
            > 0
        )
