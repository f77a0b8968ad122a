"""Runs PyG's own tests of layers, norms, aggregations, pools and models on ranks.

    python tools/pyg_spread.py CHECKOUT [--ranks 2] [--only GATConv,GraphNorm] [--as-they-are]
        [--write FILE]

CHECKOUT holds PyG's repository, at the tag of the PyG that is installed or the nearest. Its
tests in test/nn are run as they are. Whatever module of PyG's they call, outermost, is called
once more: a converted copy of it (PyG's own class, with --as-they-are), with the same inputs
spread over the ranks. Compared are the outputs and all gradients. Prints, or writes as
docs/pyg-layers.md, which calls of each class work, which are refused and with which words, and
which are wrong. Nothing of PyG is copied here.

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
import platform
import random
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_geometric
from torch.nn.parameter import UninitializedTensorMixin
from torch_geometric.data import Data, HeteroData

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives

FOLDERS = ("conv", "norm", "aggr", "pool", "models")
REFUSALS = (TypeError, ValueError, ImportError, NotImplementedError, IndexError)
NOT_RUN = "not compile and not jit and not traceable"
# the gap of what works, and of what works in float32, as some of PyG computes in any case
PRECISIONS = {torch.float64: (1e-9, 1e-6), torch.float32: (1e-4, 1e-4)}


class Skipped(Exception):
    """Raised for a call whose inputs are not those of one graph: it says why."""


class Spreader:
    """Calls modules once more, with inputs spread over ranks, and keeps what came of it."""

    def __init__(self, mesh, only, most, as_is):
        self.mesh, self.only, self.most, self.as_is = mesh, only, most, as_is
        self.deep = 0
        self.found = collections.defaultdict(collections.Counter)

    def __call__(self, module, *args, **kwargs):
        kind = type(module)
        outermost = not self.deep and kind.__module__.startswith("torch_geometric.nn")
        outermost = outermost and not torch.compiler.is_compiling()
        # a layer that is computed again in a backward pass was judged in the forward pass
        outermost = outermost and torch._C._current_graph_task_id() == -1
        if not outermost or (self.only and kind.__name__ not in self.only):
            return PLAIN(module, *args, **kwargs)
        self.deep += 1
        try:
            if self.found[kind.__name__].total() >= self.most:
                return PLAIN(module, *args, **kwargs)
            given = [tree(cloned, each) for each in (args, kwargs)]
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
            pytest.exit(f"ranks run different tests: {asked}", 3)
        try:
            found = self.verdict(*before)
        except Skipped as why:
            found = f"left out: {why}"
        except Exception as error:
            found = f"ERROR: of the runner: {type(error).__name__}: {str(error)[:150]}"
        every = collectives.all_gather_object(found, self.mesh.world)
        if len({verdict.partition(":")[0] for verdict in every}) > 1:
            return f"ERROR: ranks differ: {every}"
        return every[0]

    def verdict(self, module, state, args, kwargs):
        """How the spread call stands to one on one process, in words."""
        for dtype, gaps in PRECISIONS.items():
            one = self.alike(as_type(copy.deepcopy(module), dtype))
            named = bound(module, args, kwargs)
            given = tree(lambda v, to=dtype: as_type(v, to), named)
            with torch.enable_grad():
                try:
                    generators(state)
                    want = measured(copy.deepcopy(one), leaves(given))
                except Exception as error:
                    if dtype is not torch.float32:  # in which PyG runs it
                        continue
                    raise Skipped(f"PyG's own run with gradients: {error}") from None
                try:
                    spread = leaves(self.spread(given, one))
                except (ValueError, KeyError) as error:
                    why = str(error).partition(":")[0]
                    raise Skipped(f"not the rows of one graph: {why}") from None
                try:
                    twin = copy.deepcopy(one)
                    twin = twin if self.as_is else pdc.convert(twin)
                    generators(state)
                    got = measured(twin, spread)
                except REFUSALS as error:
                    return f"refused: {str(error).splitlines()[0]}"
                except AssertionError as error:
                    raise Skipped("a test that counts rows inside the layer") from error
                except Exception as error:
                    return f"ERROR: {type(error).__name__}: {str(error)[:150]}"
                found = compared(want, got, gaps)
                for ulps in (8, -8, 3, -5) if found.startswith("WRONG") else ():
                    generators(state)
                    moved = tree(lambda v, k=ulps: nudged(v, k), given)
                    again = measured(copy.deepcopy(one), leaves(moved))
                    if compared(want, again, gaps).startswith("WRONG"):
                        raise Skipped(
                            "PyG's own result hangs on the last bits of inputs"
                        )
                return found
        raise AssertionError("there is a last precision")

    def alike(self, module):
        """Gives a module rank 0's values: PyG leaves some parameters as memory was."""
        with torch.no_grad():
            for value in (*module.parameters(), *module.buffers()):
                if not isinstance(value, UninitializedTensorMixin):
                    mine = value if self.mesh.rank == 0 else torch.zeros_like(value)
                    value.copy_(collectives.all_reduce(mine.clone(), self.mesh.world))
        return module

    def spread(self, given, module):
        """The same inputs with rows of nodes, and of edges, spread over ranks."""
        functions = [getattr(v, "__closure__", None) for v in given.values()]
        cells = [cell for closure in functions for cell in closure or ()]
        if any(isinstance(c.cell_contents, torch.Tensor) for c in cells):
            raise Skipped("a function that holds tensors, which are not spread")
        if any(isinstance(v, dict) for v in given.values()):
            return self.of_types(given)
        pairs = {k: v for k, v in given.items() if is_pair(v)}
        if pairs:
            return self.of_two_types(given, pairs)
        edges = given.get("edge_index")
        flat = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
        nodes = [v for k, v in flat.items() if v is not edges and v.dim()]
        if not nodes:
            raise Skipped("no tensor with rows")
        if edges is not None and nodes[0].dim() > 2:
            raise Skipped("a static graph: node features with another dim in front")
        n = len(nodes[0])
        if "x" in flat or hasattr(module, "num_nodes"):  # and not pairs of nodes
            n = len(flat["x"]) if "x" in flat else module.num_nodes
        whole = edges is not None and edges.layout == torch.strided and edges.dim() == 2
        data = Data(num_nodes=n)
        data.edge_index = edges if whole else torch.empty(2, 0, dtype=torch.long)
        count, named = data.edge_index.size(1), {"node": [], "edge": []}
        for name, value in flat.items():
            if value is edges or not value.dim() or value.layout != torch.strided:
                continue
            of_edges = whole and len(value) == count and (count != n or "edge" in name)
            if of_edges or (len(value) == n and (whole or "edge" not in name)):
                data[name] = value
                named["edge" if of_edges else "node"].append(name)
        how = {f"{level}_attrs": names for level, names in named.items()}
        share = pdc.partition(data, self.mesh, self.owners(n), **how)
        names = [*named["node"], *named["edge"], *(["edge_index"] if whole else ())]
        return given | {name: share[name] for name in names}

    def of_two_types(self, given, pairs):
        """Inputs whose sources and targets are nodes of two types."""
        edges = given.get("edge_index")
        if not isinstance(edges, torch.Tensor) or edges.layout != torch.strided:
            raise Skipped("a pair of features, and a sparse adjacency")
        if any(t is not None and t.dim() > 2 for v in pairs.values() for t in v):
            raise Skipped("a static graph: node features with another dim in front")
        counts = []
        for end in (0, 1):
            rows = [len(v[end]) for v in pairs.values() if v[end] is not None]
            known = (given.get("size") or [None] * 2)[end]
            counts.append(rows[0] if rows else known or counts[0])
        data, key = HeteroData(), ("source", "to", "target")
        for end, count in zip(("source", "target"), counts, strict=True):
            data[end].num_nodes = count
        data[key].edge_index = edges
        attrs = []
        for name, v in given.items():
            if isinstance(v, torch.Tensor) and v.dim() and v is not edges:
                if len(v) == edges.size(1):
                    data[key][name] = v
                    attrs.append(name)
        for name, pair in pairs.items():
            for end, value in zip(("source", "target"), pair, strict=True):
                if value is not None:
                    data[end][name] = value
        ends = zip(data.node_types, counts, strict=True)
        owners = {end: self.owners(count) for end, count in ends}
        share = pdc.partition(data, self.mesh, owners)
        out = dict(given, edge_index=share[key].edge_index)
        for name in attrs:
            out[name] = share[key][name]
        for name in pairs:
            out[name] = tuple(share[end].get(name) for end in ("source", "target"))
        return out

    def of_types(self, given):
        """Inputs by the types of nodes and edges, in dictionaries."""
        tables = {k: v for k, v in given.items() if isinstance(v, dict)}
        data, count = HeteroData(), {}
        for name, table in tables.items():
            for key, value in table.items():
                if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                    raise Skipped("a dictionary of something else than tensors")
                data[key][attribute(name, key, value)] = value
                if isinstance(key, str):
                    count[key] = len(value)
        if not data.edge_types or set(data.node_types) - set(count):
            raise Skipped("dictionaries that are no graph")
        for key, n in count.items():
            data[key].num_nodes = n
        owners = {key: self.owners(n) for key, n in count.items()}
        share, out = pdc.partition(data, self.mesh, owners), dict(given)
        for name, table in tables.items():
            out[name] = {k: share[k][attribute(name, k, v)] for k, v in table.items()}
        return out

    def owners(self, n):
        return (torch.arange(n) * 7 + 3) % 5 % self.mesh.size


def attribute(name, key, value):
    """The attribute of a `HeteroData` for an input, by the type of its nodes or edges."""
    of_edges = isinstance(key, tuple) and value.dtype == torch.long
    return "edge_index" if of_edges else name


def is_pair(value):
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[0], torch.Tensor)
        and isinstance(value[1], (torch.Tensor, type(None)))
    )


def bound(module, args, kwargs):
    """Arguments by name."""
    found = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    out = {k: v for k, v in found.items() if k not in ("kwargs", "args")}
    if found.get("args"):
        raise Skipped("arguments without names")
    return {**out, **found.get("kwargs", {})}


def leaves(given):
    """The inputs, floating point ones as leaves that want a gradient."""

    def leaf(value):
        return value.detach().clone().requires_grad_() if is_real(value) else value

    return tree(leaf, given)


def is_real(value):
    """Tells whether a value is a dense tensor of floating point numbers."""
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return dense and value.is_floating_point()


def tensors(value, name):
    """The tensors in nested tuples, lists and dictionaries, by name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors(part, f"{name}[{key}]")
    elif isinstance(value, (tuple, list)):
        for k, part in enumerate(value):
            yield from tensors(part, f"{name}[{k}]")
    elif hasattr(value, "node_index"):  # what a pool has selected
        yield from tensors([value.node_index, value.weight], name)
    elif hasattr(value, "edge_index") and hasattr(value, "batch"):
        parts = [value.edge_index, value.edge_attr, value.batch]
        yield from tensors(parts, name)


def measured(module, given):
    """Outputs, and the gradients of parameters and inputs."""
    out = module(**given)
    found, loss = dict(tensors(out, "output")), 0.0
    for part in found.values():
        if part.is_floating_point() and part.requires_grad:
            loss = loss + (part.sin() * 0.7 + part.square() * 0.1).sum()
    if isinstance(loss, torch.Tensor):
        loss.backward()
        wanted = {f"gradient of {k}": p.grad for k, p in module.named_parameters()}
        wanted |= {f"gradient of {k}": v.grad for k, v in tensors(given, "input")}
        found |= {k: g for k, g in wanted.items() if g is not None}
    return {k: whole(v) for k, v in found.items()}


def whole(value):
    value = value.detach()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.to_dense() if value.layout != torch.strided else value


def compared(want, got, gaps):
    """The verdict on outputs and gradients, by the least gap that they are within."""
    if want.keys() != got.keys():
        return f"WRONG: only one has {sorted(want.keys() ^ got.keys())[0]}"
    out = "works"
    for name, a in want.items():
        b = got[name]
        if a.shape != b.shape:
            return f"WRONG: {name} has the shape {list(b.shape)}, not {list(a.shape)}"
        a, b = a.double(), b.double()
        how = [{"rtol": gap, "atol": gap, "equal_nan": True} for gap in gaps]
        near = [torch.allclose(a, b, **each) for each in how]
        if not near[1]:
            return f"WRONG: {name} differs by {float((a - b).abs().max()):.1e}"
        out = out if near[0] else "works to 1e-6"
    return out


def cloned(value):
    """A copy of a tensor, whose storage some layers free."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def nudged(value, ulps):
    """A floating point tensor moved by a few units in the last place."""
    if not is_real(value):
        return value
    steps = torch.linspace(-ulps, ulps, value.numel(), dtype=value.dtype)
    return value * (1 + steps.view(value.shape) * torch.finfo(value.dtype).eps)


def tree(fn, value):
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(tree(fn, v) for v in value)
    if isinstance(value, dict):
        return {k: tree(fn, v) for k, v in value.items()}
    return fn(value)


def as_type(value, dtype):
    """A module without dropout, or a copy of a tensor, in a floating point type."""
    if isinstance(value, torch.nn.Module):
        for part in value.modules():  # masks are drawn in another way
            masks = isinstance(part, torch.nn.modules.dropout._DropoutNd)
            for name in [n for n in vars(part) if "drop" in n or (masks and n == "p")]:
                rate = vars(part)[name]
                if isinstance(rate, float):
                    setattr(part, name, 0.0)
                elif isinstance(rate, list):
                    setattr(part, name, [0.0] * len(rate))
        return value.to(dtype)
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().to(dtype)
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


def rank_main(checkout, only, most, as_is, files):
    """Runs the tests on one rank; what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = pdc.init(timeout=300.0)
    spreader = Spreader(mesh, only, most, as_is)
    call = lambda module, *args, **kwargs: spreader(module, *args, **kwargs)  # noqa: E731
    torch.nn.Module.__call__ = call
    sys.path.insert(0, str(checkout))
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", NOT_RUN]
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as own, quiet:
        options += ["--basetemp", own, "--rootdir", str(checkout)]
        pytest.main([*options, *files])
    torch.nn.Module.__call__ = PLAIN
    return {kind: dict(counts) for kind, counts in spreader.found.items()}


def run(root, options, files, ranks):
    """What was found in files; where ranks die, their files are run in halves again."""
    try:
        yield from pdc.launch(rank_main, ranks, root, *options, files)[0].items()
    except Exception as error:
        if len(files) == 1:
            name = Path(files[0]).stem
            yield name, {f"ERROR: ranks died: {str(error).splitlines()[0]}": 1}
            return
        half = len(files) // 2
        yield from run(root, options, files[:half], ranks)
        yield from run(root, options, files[half:], ranks)


def summed(counts):
    """How many calls work, are refused, are left out, or are bad."""
    out = collections.Counter()
    for verdict, times in counts.items():
        out[verdict.partition(":")[0]] += times
    return out


def table(found, ranks, most, as_is):
    """The page: a section for each folder, a row for each class, and then the reasons."""
    every = sum((summed(c) for kinds in found.values() for c in kinds.values()), ADD)
    bad = sum(n for word, n in every.items() if word.isupper())
    how, flag = ("as it is", " --as-they-are") if as_is else ("converted", "")
    slack, refused, left = (every[k] for k in ("works to 1e-6", "refused", "left out"))
    yield f"""# PyG's own tests of layers on ranks

**{every["works"] + slack:,} of PyG's own calls of its layers work on {ranks} ranks
({slack:,} of them to 1e-6), {refused:,} are refused, {bad:,} are wrong; {left:,} are left
out.**

    python tools/pyg_spread.py CHECKOUT{flag} --write docs/pyg-layers.md

Python {platform.python_version()}, torch {torch.__version__}, torch_geometric
{torch_geometric.__version__}, {ranks} ranks. Each module that PyG's tests in `test/nn` call is
called again, {how}, with the same inputs spread over the ranks: features, edges and their
attributes by `pdc.partition`, and pairs of features and dictionaries as a `HeteroData`. At most
{most} calls of a class are taken in a run. Tests of `torch.compile` and TorchScript are not
run.

- *Works*: all outputs, and all gradients of parameters and inputs, equal those of one process
  to 1e-9 in float64, or to 1e-4 where PyG accepts only float32.
- *To 1e-6*: the same in float64, where PyG computes in float32 in between.
- *Refused*: an error on all ranks.
- *Left out*: the inputs are not those of one graph."""
    for folder, kinds in found.items():
        yield f"""
## {folder}

| class | works | to 1e-6 | refused | left out | wrong |
|---|---|---|---|---|---|"""
        for kind in sorted(k for k in kinds if kinds[k]):
            n = summed(kinds[kind])
            wrong = sum(times for word, times in n.items() if word.isupper())
            words = ("works", "works to 1e-6", "refused", "left out")
            row = (*(n[word] for word in words), wrong)
            yield f"| {kind} | " + " | ".join(str(x or "") for x in row) + " |"
        reasons = [
            f"- `{kind}`, {times} {verdict.strip()}"
            for kind in sorted(kinds)
            for verdict, times in sorted(kinds[kind].items())
            if not verdict.startswith("works")
        ]
        if reasons:
            yield ""
            yield from reasons


ADD = collections.Counter()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("checkout", help="PyG's repository")
    add("--ranks", type=int, default=2)
    add("--only", default="", help="names of classes")
    add("--most", type=int, default=100, help="calls of a class")
    add("--as-they-are", action="store_true", help="PyG's classes, not converted")
    add("--folders", default=",".join(FOLDERS), help="or files of them")
    add("--write", help="a file for the page")
    args = parser.parse_args()
    only = {name for name in args.only.split(",") if name}
    os.environ["OMP_NUM_THREADS"] = "1"
    found, root = {}, Path(args.checkout).resolve()
    options = only, args.most, args.as_they_are
    for folder in args.folders.split(","):
        place = root / "test" / "nn" / folder
        files = sorted(map(str, place.rglob("test_*.py"))) or [str(place)]
        found[folder] = collections.defaultdict(collections.Counter)
        for kind, counts in run(str(root), options, files, args.ranks):
            found[folder][kind].update(counts)
        lines = list(table(found, args.ranks, args.most, args.as_they_are))
        if args.write:
            Path(args.write).write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    kinds = [counts for kinds in found.values() for counts in kinds.values()]
    sys.exit(any(v.partition(":")[0].isupper() for counts in kinds for v in counts))


if __name__ == "__main__":
    main()
