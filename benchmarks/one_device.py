"""Everything that is to be known of one CUDA device, in one command, under 40 minutes.

    python benchmarks/cuda.py --report benchmarks/reports/cuda.md

Products with sparse matrices beside cuSPARSE, PyG's scatter and the compiled scatter, with
peak memory and as a share of what a copy moves; epochs of a full-graph GCN and GraphSAGE on
an R-MAT graph of the size of ogbn-products (2.1 million nodes, 126 million edges) beside PyG,
on edge_index and on torch.sparse; host synchronisations of a layer; rows written for the wire;
minibatches beside PyG's loader and, where it is installed, GraphBolt's, layer-wise ones and
those of a share; and where the time of a minibatch goes. Graphs are generated, and nothing is
downloaded. The report is written after each part; a part that fails says why, and the next one
runs. Without CUDA it says so and measures nothing; `--smoke` runs all of it on tiny graphs, on
the CPU too, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import platform
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric
import torch_geometric.loader
import torch_geometric.nn as pyg
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.cli import bench
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.halo.codec import RngKey, pack, packed_bytes, unpack
from pyg_distcomm.halo.codecs import Cast, Plain, Quantise
from pyg_distcomm.kernels import core_ops
from pyg_distcomm.loader import DistLayerLoader, NeighborLoader

Table = tuple[str, list[str], list[list[Any]]]
BACK_TO_HOST = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "equal",
)


class Device:
    """Times and weighs what runs on a device; on the CPU only that it runs.

    Args:
        kind: "cuda" or "cpu".
        smoke: whether once is enough.
    """

    def __init__(self, kind: str, smoke: bool) -> None:
        self.home, self.cuda, self.smoke = torch.device(kind), kind == "cuda", smoke
        x = torch.ones(1 << (10 if smoke else 28), device=self.home)
        seconds, _ = self.measure(lambda: x.clone())
        self.copy = 2 * x.nbytes / seconds  # bytes a second, read and written

    def measure(self, run: Callable[[], Any], times: int = 10) -> tuple[float, float]:
        """Returns the median of seconds, and the bytes at the peak beside what was there."""
        times = 1 if self.smoke else times
        run()  # compiles, plans, and fills caches
        self.wait()
        before = 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        took = []
        for _ in range(times):
            start = time.perf_counter()
            out = run()
            self.wait()
            took.append(time.perf_counter() - start)
            del out
        peak = torch.cuda.max_memory_allocated() - before if self.cuda else 0
        return statistics.median(took), peak

    def wait(self) -> None:
        """Waits for all that the device has to do."""
        if self.cuda:
            torch.cuda.synchronize()

    def tried(self, run: Callable[[], Any], times: int = 10) -> list[Any]:
        """Returns milliseconds and MiB at the peak, or what stopped it."""
        try:
            seconds, peak = self.measure(run, times)
            return [seconds * 1e3, peak / 2**20]
        except torch.cuda.OutOfMemoryError:
            return ["out of memory", ""]
        except Exception as error:  # one way that fails hides no other
            return [f"{type(error).__name__}: {str(error)[:60]}", ""]
        finally:
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()


# Products ----------------------------------------------------------------------------


def products(device: Device) -> Iterator[Table]:
    """Multiplies matrices of several degrees by rows of several widths."""
    scale = 7 if device.smoke else 19
    for degree in (4,) if device.smoke else (8, 50):
        row, col, n = bench.rmat(scale, max(degree // 2, 1))
        rowptr, col, _ = kernels.coo_to_csr(row, col, n)
        row = torch.arange(n).repeat_interleave(rowptr.diff().long())
        rowptr, col, row = (t.to(device.home) for t in (rowptr, col, row))
        value = torch.rand(len(col), device=device.home)
        lines = []
        for width in (16,) if device.smoke else (16, 32, 64, 128, 256, 512):
            x = torch.randn(n, width, device=device.home)
            ways = _ways(device, rowptr, col, row, value, x)
            least = len(col) * (4 * width + 8) + n * (4 * width + 4)
            for name, run in ways.items():
                found = device.tried(run)
                share: Any = ""
                if not isinstance(found[0], str):
                    share = least / (found[0] / 1e3) / device.copy
                lines.append([width, name, *found, share])
            del x
        about = f"SpMM, {n:,} rows, {len(col):,} nonzeros, float32"
        yield about, ["width", "by", "ms", "MiB at peak", "of a copy's rate"], lines


def _ways(
    device: Device, rowptr: Tensor, col: Tensor, row: Tensor, value: Tensor, x: Tensor
) -> dict[str, Callable[[], Tensor]]:
    index = col.long()

    def by_scatter(x: Tensor, value: Tensor) -> Tensor:
        return scatter(x[index] * value[:, None], row, 0, len(rowptr) - 1, "sum")

    ways = {
        "this package": lambda: kernels.spmm(rowptr, col, value, x),
        "this package, no values": lambda: kernels.spmm(rowptr, col, None, x),
        "cuSPARSE by torch": lambda: core_ops.library_spmm(rowptr, col, value, x),
        "PyG's scatter": lambda: by_scatter(x, value),
    }
    if _has_triton() and (device.cuda or _interprets()):
        from pyg_distcomm.kernels import core_cuda

        def triton_alone() -> Tensor:
            kept, core_cuda.LIBRARY_DEGREE = core_cuda.LIBRARY_DEGREE, 10**9
            try:
                return core_cuda.spmm(rowptr, col, value, x)
            finally:
                core_cuda.LIBRARY_DEGREE = kept

        ways["Triton"] = triton_alone
    if device.cuda:
        torch._dynamo.reset()  # past eight shapes it would run what is not compiled
        compiled = torch.compile(by_scatter, dynamic=False)
        ways["compiled scatter"] = lambda: compiled(x, value)
    return ways


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def _interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


# Epochs of a full graph --------------------------------------------------------------


class Net(torch.nn.Module):
    """Layers of one kind, with ReLU between them."""

    def __init__(self, kind: Any, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = torch.nn.ModuleList(kind(a, b) for a, b in pairs)

    def forward(self, x: Any, edges: Any) -> Any:
        for layer in self.layers[:-1]:
            x = layer(x, edges).relu()
        return self.layers[-1](x, edges)


def graph(device: Device, scale: int, each: int) -> Data:
    """Returns an R-MAT graph with features and classes, on the host."""
    scale, each = (8, 4) if device.smoke else (scale, each)
    row, col, n = bench.rmat(scale, each)
    g = torch.Generator().manual_seed(1)
    data = Data(x=torch.randn(n, 100, generator=g), edge_index=torch.stack([row, col]))
    data.y = torch.randint(0, 47, (n,), generator=g)
    data.train_mask = torch.rand(n, generator=g) < 0.1
    return data


def _epoch(model: Any, data: Data, edges: Any, narrow: bool) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kind = data.x.device.type

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=narrow):
            out = model(data.x, edges)
            loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()

    return run


def epochs(device: Device) -> Iterator[Table]:
    """Trains on the whole graph, on one device."""
    data, lines = graph(device, 21, 30), []
    mesh = pdc.init(device=device.home)
    share = pdc.partition(data, mesh).to(device.home)
    data = data.to(device.home)
    widths = (100, 256, 256, 47)
    shape = (data.num_nodes, data.num_nodes)
    order = torch.argsort(data.edge_index[1] * data.num_nodes + data.edge_index[0])
    source, target = data.edge_index[:, order]
    adj = torch.sparse_coo_tensor(
        torch.stack([target, source]),
        torch.ones(len(source), device=device.home),
        shape,
    ).to_sparse_csr()
    del order, source, target
    for name, kind in (("GCN", pyg.GCNConv), ("GraphSAGE", pyg.SAGEConv)):
        for narrow in (False, True):
            for who, given, edges in (
                ("this package", share, share.edge_index),
                ("this package, not cut", data, data.edge_index),
                ("PyG, edge_index", data, data.edge_index),
                ("PyG, torch.sparse", data, adj),
            ):
                torch.manual_seed(0)
                model = Net(kind, widths).to(device.home)
                model = model if who.startswith("PyG") else pdc.convert(model)
                found = device.tried(_epoch(model, given, edges, narrow), 3)
                lines.append([name, "bf16" if narrow else "float32", who, *found])
                del model
    about = (
        f"an epoch, {data.num_nodes:,} nodes, {data.num_edges:,} edges, widths {widths}"
    )
    yield about, ["model", "autocast", "by", "ms", "MiB at peak"], lines


class Synchronisations(TorchDispatchMode):
    """Counts operations for which the host waits for the device.

    Args:
        device: whether what lies on the CPU alone is left out.
    """

    def __init__(self, device: bool = True) -> None:
        super().__init__()
        self.device, self.found = device, []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        there = [t for t in given if not (self.device and t.is_cpu)]
        waits = name in BACK_TO_HOST
        if name == "repeat_interleave":
            waits = kwargs.get("output_size") is None
        if name in ("index", "index_put_", "_index_put_impl_"):  # by a mask
            waits = any(
                isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)
                for t in tree_leaves(args[1])
            )
        if name in ("_to_copy", "copy_"):
            waits = len({t.device.type for t in given}) > 1
        if name == "lift_fresh":  # a list of numbers, made on the device
            waits = not out.is_cpu
        if waits and there:
            self.found.append(name)
        return out


def synchronisations(device: Device) -> Iterator[Table]:
    """Counts, in a layer that has run before, where the host waits for the device."""
    data = graph(device, 12, 8)
    share = pdc.partition(data, pdc.init(device=device.home)).to(device.home)
    data = data.to(device.home)  # whose layers take PyG's path under a mode that counts
    lines = []
    kinds = pyg.GCNConv, pyg.SAGEConv, pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv
    for kind in (*kinds, pyg.GraphConv):
        conv = pdc.convert(kind(100, 64).to(device.home))
        for _ in range(3):
            conv(share.x, share.edge_index).sum().backward()
        with Synchronisations(device.cuda) as mode:
            out = conv(share.x, share.edge_index)
            forward = len(mode.found)
            out.to_local().sum().backward()
        names = ", ".join(sorted(set(mode.found)))
        told = _told_by_cuda(device, lambda c=conv: c(share.x, share.edge_index).sum())
        lines.append([kind.__name__, forward, len(mode.found) - forward, names, told])
        for _ in range(2):
            conv(data.x, data.edge_index)
        told = _told_by_cuda(device, lambda c=conv: c(data.x, data.edge_index).sum())
        lines.append([f"{kind.__name__}, data not cut", "", "", "", told])
    head = ["layer", "forward", "backward", "by", "as CUDA counts"]
    yield "host synchronisations", head, lines


def _told_by_cuda(device: Device, run: Callable[[], Tensor]) -> Any:
    """Returns how many operations of a forward and a backward pass torch saw wait on CUDA."""
    if not device.cuda:
        return ""
    run().backward()
    device.wait()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in told)


# Rows for the wire -------------------------------------------------------------------


def packing(device: Device) -> Iterator[Table]:
    """Picks rows, and writes and reads them by codecs."""
    n, lines = 64 if device.smoke else 1 << 20, []
    for width in (16,) if device.smoke else (32, 128, 512):
        x = torch.randn(n, width, device=device.home)
        index = torch.randperm(n, device=device.home)
        seconds, _ = device.measure(lambda x=x, i=index: kernels.gather_rows(x, i))
        lines.append([width, "rows picked", 2 * x.nbytes / seconds / device.copy, ""])
        for codec in (Plain(), Cast(torch.bfloat16), *map(Quantise, (8, 4, 2, 1))):
            key, out = RngKey(12345, torch.arange(n, device=device.home)), x.clone()
            sizes = packed_bytes(codec, [n], width, x.dtype)

            def write(x: Tensor = x, codec: Any = codec, key: Any = key) -> Tensor:
                return pack(codec, x, [n], key)[0]

            message = write()

            def read(out: Any = out, m: Any = message, c: Any = codec, s: Any = sizes,
                     key: Any = key) -> Tensor:  # fmt: skip
                return unpack(c, m, s, [n], out, key)

            moved = x.nbytes + message.nbytes
            rates = [moved / device.measure(f)[0] / device.copy for f in (write, read)]
            lines.append([width, repr(codec), *rates])
    about = (
        f"rows for the wire, {n:,}, as shares of a copy's {device.copy / 1e9:,.0f} GB/s"
    )
    yield about, ["width", "how", "written", "read"], lines


# Minibatches -------------------------------------------------------------------------


def minibatches(device: Device) -> Iterator[Table]:
    """Draws minibatches and trains on them: the package's loader, and PyG's."""
    data = graph(device, 20, 16)
    fan_out, size = ([3, 2], 16) if device.smoke else ([15, 10, 5], 1024)
    given: dict[str, Any] = {"num_neighbors": fan_out, "batch_size": size}
    given |= {"input_nodes": data.train_mask, "shuffle": True}
    makers: dict[str, Callable[[], Any]] = {
        "this package, on the host": lambda: NeighborLoader(data, **given),
        "PyG, pinned": lambda: torch_geometric.loader.NeighborLoader(
            data, **given, pin_memory=device.cuda, num_workers=0 if device.smoke else 8
        ),
    }
    if device.cuda:
        places = (
            ("on the device", "device", "device"),
            ("graph through UVA", "pinned", "device"),
            ("graph and rows through UVA", "pinned", "pinned"),
        )
        for where, graph_on, rows_on in places:
            place = {"device": "cuda", "graph_on": graph_on, "rows_on": rows_on}
            makers[f"this package, {where}"] = lambda place=place: NeighborLoader(
                data, **given, **place
            )
        place = {"device": "cuda", "rows_on": "pinned", "cache": 0.2}
        makers["this package, a fifth of the rows on the device"] = lambda: (
            NeighborLoader(data, **given, **place)
        )
    lines, phases = _loaded(device, makers, size, len(fan_out))
    lines.append(["GraphBolt on the device", _graphbolt(), ""])
    if not device.cuda:
        missing = "not measured: no CUDA device"
        lines.append(["on the device or through UVA", missing, ""])
    about = f"minibatches of {size}, fan-outs {fan_out}, {data.num_edges:,} edges"
    yield about, ["by", "seeds a second, drawn", "trained on"], lines
    yield "a minibatch, ms", ["by", "waits for it", "copies it", "trains"], phases


def other_minibatches(device: Device) -> Iterator[Table]:
    """Draws minibatches layer by layer, and of a share, for the host and for the device."""
    data = graph(device, 20, 16)
    numbers, size = ([8, 8], 16) if device.smoke else ([2048, 1024, 512], 512)
    fan_out = [3, 2] if device.smoke else [15, 10, 5]
    share = pdc.partition(data, pdc.init(device=device.home))
    given: dict[str, Any] = {"batch_size": size, "shuffle": True}
    places: dict[str, dict[str, Any]] = {"on the host": {}}
    if device.cuda:
        places |= {
            "on the device": {"device": "cuda"},
            "pinned": {"device": "cuda", "rows_on": "pinned"},
        }
    makers: dict[str, Callable[[], Any]] = {}
    for where, place in places.items():
        for rule in ("ladies", "fastgcn"):
            makers[f"{rule}, {where}"] = lambda rule=rule, place=place: DistLayerLoader(
                data, numbers, rule, data.train_mask, **given, **place
            )
        makers[f"share, rows {where}"] = lambda place=place: NeighborLoader(
            share, fan_out, input_nodes=share.train_mask, **given, **place
        )
    lines, phases = _loaded(device, makers, size, len(numbers))
    about = f"minibatches of {size}, {numbers} nodes a layer, or fan-outs {fan_out}"
    yield about, ["by", "seeds a second, drawn", "trained on"], lines
    yield "such a minibatch, ms", ["by", "waits for it", "copies it", "trains"], phases


def _loaded(
    device: Device, makers: dict[str, Callable[[], Any]], size: int, depth: int
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Draws minibatches of each loader alone, and then trains on them.

    Returns seeds a second of both, and phases of training in ms.
    """
    most = 2 if device.smoke else 100
    lines: list[list[Any]] = []
    phases: list[list[Any]] = []
    for name, make in makers.items():
        torch.manual_seed(0)
        model = Net(pyg.SAGEConv, (100, *[256] * (depth - 1), 47))
        model = model.to(device.home)
        model = model if name.startswith("PyG") else pdc.convert(model)
        try:
            loader = make()
            drawn, _ = _epoch_of(device, loader, None, most)
            trained, spent = _epoch_of(device, loader, model, most)
        except Exception as error:  # PyG's needs a library of its own to sample
            lines.append([name, f"{type(error).__name__}: {str(error)[:60]}", ""])
            continue
        lines.append([name, f"{size * drawn:,.0f}", f"{size * trained:,.0f}"])
        phases.append([name, *spent])
    return lines, phases


def _epoch_of(
    device: Device, loader: Any, model: torch.nn.Module | None, most: int
) -> tuple[float, list[float]]:
    """Returns minibatches a second, the first apart, and the ms of each phase of one.

    Without a model they are brought to the device, and no more.
    """
    optimizer = None if model is None else torch.optim.Adam(model.parameters())
    spent, count = [0.0, 0.0, 0.0], 0
    batches = iter(loader)
    next(batches)
    while count < most:
        times = [time.perf_counter()]
        batch = next(batches, None)
        if batch is None:
            break
        times.append(time.perf_counter())
        batch = batch.to(device.home, non_blocking=True)
        device.wait()
        times.append(time.perf_counter())
        if model is not None and optimizer is not None:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            device.wait()
        times.append(time.perf_counter())
        for k, (before, after) in enumerate(itertools.pairwise(times)):
            spent[k] += after - before
        count += 1
    return count / max(sum(spent), 1e-9), [s * 1e3 / max(count, 1) for s in spent]


def _graphbolt() -> str:
    try:
        import dgl.graphbolt  # noqa: F401
    except Exception as error:  # its libraries do not load beside every torch
        return f"not measured: {type(error).__name__}"
    return "not measured: see benchmarks/graphbolt.py"


# The report --------------------------------------------------------------------------

PARTS = products, epochs, synchronisations, packing, minibatches, other_minibatches


def heading(device: Device, smoke: bool) -> list[str]:
    """Says on what it ran."""
    name = (
        torch.cuda.get_device_name() if device.cuda else platform.processor() or "CPU"
    )
    what = "# On a CUDA device\n"
    if smoke:
        what += "\nA smoke run on tiny graphs: its figures say nothing.\n"
    return [
        what,
        f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"PyG {torch_geometric.__version__}; a copy on the device moves "
        f"{device.copy / 1e9:,.0f} GB/s, read and written. `python benchmarks/cuda.py`\n",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measures, and writes the report; returns 1 without CUDA, or if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, required=True, help="a file of Markdown")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny graphs, on the CPU too"
    )
    parser.add_argument(
        "--minutes", type=float, default=38, help="begin no part after so many"
    )
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not args.smoke:
        print("no CUDA device here: nothing was measured, no report was written")
        return 1
    device = Device("cuda" if torch.cuda.is_available() else "cpu", args.smoke)
    text, failed, start = heading(device, args.smoke), False, time.monotonic()
    for part in PARTS:
        if time.monotonic() - start > 60 * args.minutes:
            text.append(f"## {part.__name__}\n\nNot begun: no time was left.\n")
            continue
        try:
            for about, head, lines in part(device):
                text.append(f"## {about}\n\n```\n{format_table(head, lines)}\n```\n")
                args.report.write_text("\n".join(text))
        except Exception:
            failed = True
            text.append(
                f"## {part.__name__}\n\nFailed:\n\n```\n{traceback.format_exc()}```\n"
            )
            args.report.write_text("\n".join(text))
        gc.collect()
        if device.cuda:
            torch.cuda.empty_cache()
    text.append(f"{(time.monotonic() - start) / 60:.1f} minutes in all.\n")
    args.report.write_text("\n".join(text))
    return int(failed)
