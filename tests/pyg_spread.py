"""Runs PyG's own tests of layers, norms, aggregations, pools and models on ranks.

    python tests/pyg_spread.py CHECKOUT [--ranks 2] [--only GATConv,GraphNorm] [--report FILE]

CHECKOUT holds PyG's repository, at the tag of the PyG that is installed or the nearest. Its
tests in test/nn are run as they are. Whatever module of PyG's they call, outermost, is called
once more: a converted copy of it, with the same inputs spread over the ranks. Compared are
the outputs and all gradients. Prints, for each class, which calls work, which are refused
and with which words, and which are wrong. Nothing of PyG is copied here.

Exits with 1 if a call is wrong, or ends in an error that is no refusal.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import inspect
import io
import os
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives

FOLDERS = ("conv", "norm", "aggr", "pool", "models")
REFUSALS = (TypeError, ValueError, ImportError, NotImplementedError, IndexError)
TOLERANCE = 1e-7  # some of PyG computes in float32, whatever its inputs


class Skipped(Exception):
    """A call whose inputs are no rows of one graph: it says why."""


class Spreader:
    """Calls modules once more, with inputs spread over ranks, and keeps what came of it."""

    def __init__(self, mesh, only):
        self.mesh, self.only = mesh, only
        self.deep = 0
        self.found = collections.defaultdict(collections.Counter)

    def __call__(self, module, *args, **kwargs):
        kind = type(module)
        outermost = not self.deep and kind.__module__.startswith("torch_geometric.nn")
        if not outermost or (self.only and kind.__name__ not in self.only):
            return PLAIN(module, *args, **kwargs)
        self.deep += 1
        try:
            given = tree(doubled, args), tree(doubled, kwargs)  # some free their inputs
            before = copy.deepcopy(module), generators(), *given
            try:
                out = PLAIN(module, *args, **kwargs)
            finally:
                after = generators()
            self.found[kind.__name__][self.judged(kind, before)] += 1
            generators(after)
            return out
        finally:
            self.deep -= 1

    def judged(self, kind, before):
        """The verdict of all ranks, which are to have the same one."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        asked = collectives.all_gather_object((test, kind.__name__), self.mesh.world)
        if len(set(asked)) > 1:
            raise SystemExit(f"ranks run different tests: {asked}")
        try:
            found = self.verdict(*before)
        except Skipped as why:
            found = f"left out: {why}"
        every = collectives.all_gather_object(found, self.mesh.world)
        if len({verdict.partition(":")[0] for verdict in every}) > 1:
            return f"ERROR: ranks differ: {every}"
        return every[0]

    def verdict(self, module, state, args, kwargs):
        """How the spread call stands to one on one process, in words."""
        module = doubled(module)
        given = bound(module, args, kwargs)
        with torch.enable_grad():
            generators(state)
            want = measured(copy.deepcopy(module), *leaves(given, kwargs))
            spread = self.spread(given, kwargs)
            try:
                twin = pdc.convert(copy.deepcopy(module))
                generators(state)
                got = measured(twin, *spread)
            except REFUSALS as error:
                return f"refused: {str(error).splitlines()[0][:150]}"
            except Exception as error:
                return f"ERROR: {type(error).__name__}: {str(error)[:150]}"
        return compared(want, got)

    def spread(self, given, kwargs):
        """The same inputs with rows of nodes, and of edges, spread over ranks."""
        edges = given.get("edge_index")
        flat = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
        pair = any(isinstance(v, (tuple, list)) for v in given.values())
        if pair or not flat:
            raise Skipped("a pair of nodes' features, or none")
        nodes = [v for k, v in flat.items() if v is not edges and v.dim()]
        if not nodes:
            raise Skipped("no rows")
        n = len(nodes[0])
        whole = edges is not None and edges.layout == torch.strided and edges.dim() == 2
        data = Data(num_nodes=n)
        data.edge_index = edges if whole else torch.empty(2, 0, dtype=torch.long)
        count, named = data.edge_index.size(1), {"node": [], "edge": []}
        for name, value in flat.items():
            if value is edges or not value.dim() or value.layout != torch.strided:
                continue
            of_edges = whole and len(value) == count and (count != n or "edge" in name)
            if of_edges or len(value) == n:
                data[name] = value
                named["edge" if of_edges else "node"].append(name)
        owner = (torch.arange(n) * 7 + 3) % 5 % self.mesh.size
        share = pdc.partition(
            data, self.mesh, owner, node_attrs=named["node"], edge_attrs=named["edge"]
        )
        out = dict(given)
        for name in (*named["node"], *named["edge"]):
            out[name] = share[name]
        if whole:
            out["edge_index"] = share.edge_index
        return leaves(out, kwargs)


def bound(module, args, kwargs):
    """Arguments by name."""
    found = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    return {
        **{k: v for k, v in found.items() if k != "kwargs"},
        **found.get("kwargs", {}),
    }


def leaves(given, _):
    """The inputs, floating point ones as leaves that want a gradient."""

    def leaf(value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if value.layout != torch.strided:
            return value
        return value.detach().clone().requires_grad_()

    return ({k: leaf(v) for k, v in given.items()},)


def measured(module, given):
    """Outputs, and the gradients of parameters and inputs."""
    out = module(**given)
    found = {}
    parts = out if isinstance(out, (tuple, list)) else (out,)
    parts = [p for p in parts if isinstance(p, torch.Tensor)]
    loss = 0.0
    for k, part in enumerate(parts):
        found[f"output {k}"] = part
        if part.is_floating_point() and part.requires_grad:
            loss = loss + (part.sin() * 0.7 + part.square() * 0.1).sum()
    if isinstance(loss, torch.Tensor):
        loss.backward()
        wanted = {f"gradient of {k}": p.grad for k, p in module.named_parameters()}
        for k, v in given.items():
            if isinstance(v, torch.Tensor) and v.requires_grad:
                wanted[f"gradient of input {k}"] = v.grad
        found |= {k: g for k, g in wanted.items() if g is not None}
    return {k: whole(v) for k, v in found.items()}


def whole(value):
    value = value.detach()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.to_dense() if value.layout != torch.strided else value


def compared(want, got):
    if want.keys() != got.keys():
        return f"WRONG: only one has {sorted(want.keys() ^ got.keys())[0]}"
    for name, a in want.items():
        b = got[name]
        if a.shape != b.shape:
            return f"WRONG: {name} has the shape {list(b.shape)}, not {list(a.shape)}"
        if not torch.allclose(
            a.double(), b.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
        ):
            gap = float((a.double() - b.double()).abs().max())
            return f"WRONG: {name} differs by {gap:.1e}"
    return "works"


def tree(fn, value):
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(tree(fn, v) for v in value)
    if isinstance(value, dict):
        return {k: tree(fn, v) for k, v in value.items()}
    return fn(value)


def doubled(value):
    if isinstance(value, torch.nn.Module):
        for part in value.modules():  # masks are drawn in another way
            for name in [n for n in vars(part) if "drop" in n or n == "p"]:
                rate = vars(part)[name]
                if isinstance(rate, float):
                    setattr(part, name, 0.0)
                elif isinstance(rate, list):
                    setattr(part, name, [0.0] * len(rate))
        return value.double()
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().double()
    return value


def generators(state=None):
    """The state of torch's, numpy's and Python's generators; sets it, if given."""
    if state is None:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
    return state


PLAIN = torch.nn.Module.__call__


def rank_main(checkout, only, folders):
    """Runs the tests on one rank; what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = pdc.init(timeout=30.0)
    spreader = Spreader(mesh, only)
    torch.nn.Module.__call__ = lambda module, *args, **kwargs: spreader(
        module, *args, **kwargs
    )
    files = [str(Path(checkout, "test", "nn", name)) for name in folders]  # or files
    sys.path.insert(0, str(checkout))
    with contextlib.redirect_stdout(io.StringIO()):
        options = [
            "-q",
            "-x",
            "--maxfail=10000",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
        ]
        pytest.main([*options, "--rootdir", str(checkout), *files])
    torch.nn.Module.__call__ = PLAIN
    return {kind: dict(counts) for kind, counts in spreader.found.items()}


def table(found):
    counts = collections.Counter()
    for kind in sorted(found):
        verdicts = collections.Counter()
        for verdict, times in found[kind].items():
            verdicts[verdict.partition(":")[0]] += times
        counts.update(verdicts)
        told = ", ".join(f"{word} {times}" for word, times in sorted(verdicts.items()))
        yield f"{kind:<28} {told}"
        for verdict, times in sorted(found[kind].items()):
            if verdict != "works":
                yield f"{'':<28}   {times} x {verdict}"
    yield ""
    yield ", ".join(f"{word} {times}" for word, times in sorted(counts.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", help="PyG's repository")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="names of classes")
    parser.add_argument("--folders", default=",".join(FOLDERS))
    parser.add_argument("--report", help="a file for the table")
    args = parser.parse_args()
    only = {name for name in args.only.split(",") if name}
    os.environ["OMP_NUM_THREADS"] = "1"
    run = (str(Path(args.checkout).resolve()), only, args.folders.split(","))
    found = pdc.launch(rank_main, args.ranks, *run)[0]
    lines = list(table(found))
    print("\n".join(lines))
    if args.report:
        Path(args.report).write_text("\n".join(lines) + "\n")
    bad = [
        v for verdicts in found.values() for v in verdicts if v.split(":")[0].isupper()
    ]
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
