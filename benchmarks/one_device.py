"""What is to be known of products, epochs, layers and messages on one CUDA device.

The parts `products`, `epochs`, `synchronisations` and `packing` of `python benchmarks/cuda.py`,
which see: none of them has run on a CUDA device yet. Each adds lines to tables as it measures,
with what others take beside what this package takes, and whether its aim is met.
"""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from device_report import MET, MISSED, Report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.cli import bench
from pyg_distcomm.halo.codec import RngKey, pack, packed_bytes, unpack
from pyg_distcomm.halo.codecs import Cast, Plain, Quantise
from pyg_distcomm.kernels import core_ops
from pyg_distcomm.plan.machine import DEVICES

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
OUT_OF_MEMORY = "out of memory"
# seconds and bytes at the peak; or no seconds, the bytes that did not do, and why not
Found = tuple[float | None, float | None, str]


class Device:
    """Times and weighs what runs on a device; on the CPU only that it runs.

    Args:
        kind: "cuda" or "cpu".
        smoke: whether once is enough.
    """

    def __init__(self, kind: str, smoke: bool) -> None:
        self.home, self.cuda, self.smoke = torch.device(kind), kind == "cuda", smoke
        self.room: int | None = None  # bytes that were free at the last base
        x = torch.ones(1 << (10 if smoke else 28), device=self.home)
        seconds, _ = self.measure(lambda: x.clone())
        self.copy = 2 * x.nbytes / seconds  # bytes per second, read and written
        name = torch.cuda.get_device_name().lower() if self.cuda else ""
        self.sheet = next((DEVICES[k][1] for k in DEVICES if k in name), None)

    def measure(
        self, run: Callable[[], Any], times: int = 10, base: int | None = None
    ) -> tuple[float, float]:
        """Returns the median of seconds, and the bytes at the peak beside what was there.

        What the first run, which is not timed, leaves behind counts among the bytes; what it
        needs only then does not.

        Args:
            run: what is timed.
            times: how often.
            base: the bytes that were there, if not those that are there now.
        """
        times = 1 if self.smoke else times
        base = self.base() if base is None else base
        run()  # compiles, plans, and fills caches
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        took = []
        for _ in range(times):
            start = time.perf_counter()
            out = run()
            self.wait()
            took.append(time.perf_counter() - start)
            del out
        peak = torch.cuda.max_memory_allocated() - base if self.cuda else 0
        return statistics.median(took), peak

    def base(self) -> int:
        """Returns the bytes that are held now, and notes how many are free."""
        self.clear()
        if not self.cuda:
            return 0
        self.room = torch.cuda.mem_get_info()[0]
        return torch.cuda.memory_allocated()

    def wait(self) -> None:
        """Waits for all that the device has to do."""
        if self.cuda:
            torch.cuda.synchronize()

    def wait_here(self) -> None:
        """Waits for what the current stream has to do, and no other."""
        if self.cuda:
            torch.cuda.current_stream().synchronize()

    def tried(self, report: Report, run: Callable[[], Any]) -> Found:
        """Returns seconds and bytes at the peak of what is run, or what stopped it."""
        return self.guarded(report, lambda: self.measure(run))

    def guarded(
        self, report: Report, measured: Callable[[], tuple[float, float]]
    ) -> Found:
        """Returns seconds and bytes at the peak, as measured, or what stopped it."""
        if report.over:
            return None, None, "no time was left"
        self.room = None
        try:
            return *measured(), ""
        except torch.cuda.OutOfMemoryError:
            return None, self.room, OUT_OF_MEMORY
        except Exception as error:  # one way that fails hides no other
            return None, None, failure(error)
        finally:
            self.clear()

    def clear(self) -> None:
        """Gives back memory that nothing holds, cuBLAS's own, which is kept, too."""
        gc.collect()
        if self.cuda:
            self.wait()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def aim(self, found: float | None, least: float) -> list[Any]:
        """Returns a ratio, and whether it is as large as is aimed at where a device tells."""
        if found is None:
            return ["", ""]
        judged = MET if found >= least else MISSED
        return [found, judged if self.cuda and not self.smoke else ""]

    def rates(self, moved: float, seconds: float) -> list[Any]:
        """Returns bytes per second as shares of a copy's, and of the data sheet's."""
        rate = moved / seconds
        return [rate / self.copy, rate / self.sheet if self.sheet else ""]


def failure(error: Exception) -> str:
    """Returns what a cell says of an error."""
    return f"{type(error).__name__}: {str(error)[:90]}"


def ratio(one: float | None, other: float | None) -> float | None:
    """Returns how many times the other one is, where both are known."""
    return one / other if one and other else None


def shown(found: Found) -> list[Any]:
    """Returns milliseconds, or what stopped it, and MiB at the peak."""
    seconds, peak, why = found
    return [why, ""] if why else [seconds * 1e3, peak / 2**20]


# Products ----------------------------------------------------------------------------

OURS = "this package"


def products(device: Device, report: Report) -> None:
    """Multiplies matrices of several degrees by rows of several widths.

    Rates are of the bytes of a matrix, its result, and a row of x for each nonzero: they may
    be above 1 where x fits into the device's cache. The aim is to be never slower than the
    fastest of cuSPARSE, PyG's scatter and the compiled scatter, with values and without.
    """
    scale = 7 if device.smoke else 19
    for degree in (4,) if device.smoke else (8, 50):
        row, col, n = bench.rmat(scale, max(degree // 2, 1))
        rowptr, col, _ = kernels.coo_to_csr(row, col, n)
        row = torch.arange(n).repeat_interleave(rowptr.diff().long())
        rowptr, col, row = (t.to(device.home) for t in (rowptr, col, row))
        value = torch.rand(len(col), device=device.home)
        add = report.table(
            f"SpMM, {n:,} rows, {len(col):,} nonzeros, float32",
            *("width", "values", "by", "ms", "MiB at peak", "of a copy's rate"),
            *("of HBM by data sheet", "best other's ms / these", "aim: 1"),
        )
        for width in (16,) if device.smoke else (16, 32, 64, 128, 256, 512):
            x = torch.randn(n, width, device=device.home)
            for given in (value, None):
                ways = _ways(device, rowptr, col, row, given, x)
                found = {name: device.tried(report, run) for name, run in ways.items()}
                moved = len(col) * (4 * width + 4 + 4 * (given is not None))
                moved += n * (4 * width + 4)
                others = [
                    found[k][0]
                    for k in found
                    if k not in (OURS, "Triton") and found[k][0]
                ]
                for name, each in found.items():
                    rates = ["", ""] if each[2] else device.rates(moved, each[0])
                    best = ratio(min(others, default=None), each[0])
                    judged = device.aim(best, 1) if name == OURS else ["", ""]
                    kind = "no" if given is None else "yes"
                    add(width, kind, name, *shown(each), *rates, *judged)
            del x


def _ways(
    device: Device,
    rowptr: Tensor,
    col: Tensor,
    row: Tensor,
    value: Tensor | None,
    x: Tensor,
) -> dict[str, Callable[[], Tensor]]:
    index = col.long()

    def by_scatter(x: Tensor, value: Tensor | None) -> Tensor:
        messages = x[index] if value is None else x[index] * value[:, None]
        return scatter(messages, row, 0, len(rowptr) - 1, "sum")

    ways = {
        OURS: lambda: kernels.spmm(rowptr, col, value, x),
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

WIDTHS = 100, 256, 256, 47


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


def epochs(device: Device, report: Report) -> None:
    """Trains on the whole graph, on one device: one as large as ogbn-products, and an eighth.

    Of the large one the messages of PyG's layers do not fit on a card of 80 GB. The aim is a
    fifth of the time of PyG on `edge_index`, in a tenth of its memory.

    Each way is measured alone: its graph comes anew from the host, and all is dropped before
    the next. Memory is the peak beside that graph (edges as they are given, rows, classes):
    the model, its optimizer, and all that is kept between steps count. It is that of epochs
    after the first one: what is needed once, to plan, does not count.
    """
    for scale in (18, 21):
        if not report.over:
            _epochs(device, report, graph(device, scale, 30))
            device.clear()


def _epochs(device: Device, report: Report, data: Data) -> None:
    share = pdc.partition(data, pdc.init(device=device.home))
    there = device.base()
    add = report.table(
        f"an epoch, {data.num_nodes:,} nodes, {data.num_edges:,} edges, widths {WIDTHS}",
        *("model", "autocast", "by", "ms", "MiB at peak", "PyG's ms / these", "aim: 5"),
        *("PyG's MiB / these", "aim: 10", "torch.sparse's ms / these"),
    )
    plain = "PyG, edge_index", lambda: _given(device, data)
    sparse = "PyG, torch.sparse", lambda: _as_matrix(_given(device, data)[0])
    cut = OURS, lambda: _given(device, share)
    whole = "this package, not cut", lambda: _given(device, data)
    for narrow in (False, True):
        for name, kind in (("GCN", pyg.GCNConv), ("GraphSAGE", pyg.SAGEConv)):
            peers: list[Found] = []
            for who, make in (plain, sparse, cut, whole):
                _forget(share)
                left = device.base() - there
                alone = partial(_alone, device, kind, make, who.startswith(OURS))
                found = device.guarded(report, partial(alone, narrow))
                peers.append(found)
                judged = (
                    _judged(device, found, *peers[:2]) if len(peers) > 2 else [""] * 5
                )
                if left > 1 << 20:  # which the peak is beside, and should not be
                    who = f"{who} ({left >> 20} MiB of others were left)"
                kept = "bf16" if narrow else "float32"
                add(name, kept, who, *shown(found), *judged)


def _alone(
    device: Device,
    kind: Any,
    make: Callable[[], tuple[Data, Any]],
    ours: bool,
    narrow: bool,
) -> tuple[float, float]:
    """Measures epochs on a graph that is made for them, and goes with them."""
    given, edges = make()
    base = device.base()
    torch.manual_seed(0)
    model = Net(kind, WIDTHS).to(device.home)
    model = pdc.convert(model) if ours else model
    return device.measure(_epoch(model, given, edges, narrow), 3, base)


def _given(device: Device, data: Data) -> tuple[Data, Any]:
    """Returns a copy of a graph, on the device, and its edges; CUDA has nothing else of it."""
    given = copy.copy(data).to(device.home)  # what is copied stays on the host
    return given, given.edge_index


def _as_matrix(given: Data) -> tuple[Data, Tensor]:
    adj = _adjacency(given)
    del given.edge_index
    return given, adj


def _forget(share: Data) -> None:
    """Drops what rows keep, on the device too, as long as the share on the host lives."""
    edges = share.edge_index.topology
    of_values = [t.rows for _, t in share if isinstance(t, pdc.DistTensor)]
    for rows in (edges.nodes, edges.edges, *of_values):
        rows.derived.clear()
        rows.plans.clear()


def _judged(device: Device, found: Found, plain: Found, sparse: Found) -> list[Any]:
    """Returns ratios to PyG's epoch and memory; what did not fit took more than was free."""
    faster = device.aim(ratio(plain[0], found[0]), 5)
    smaller: list[Any] = ["", ""]
    if not found[2]:
        smaller = device.aim(ratio(plain[1], found[1]), 10)
    if plain[2] == OUT_OF_MEMORY and smaller[0]:
        smaller[0] = f"more than {smaller[0]:.1f}"
        if smaller[1] == MISSED:  # for all that is known
            smaller[1] = "not known"
    return [*faster, *smaller, ratio(sparse[0], found[0]) or ""]


def _adjacency(data: Data) -> Tensor:
    """Returns the transposed adjacency, as PyG's layers take one of torch.sparse."""
    order = torch.argsort(data.edge_index[1] * data.num_nodes + data.edge_index[0])
    source, target = data.edge_index[:, order]
    one = torch.ones(len(source), device=data.x.device)
    shape = (data.num_nodes, data.num_nodes)
    return torch.sparse_coo_tensor(
        torch.stack([target, source]), one, shape
    ).to_sparse_csr()


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


def synchronisations(device: Device, report: Report) -> None:
    """Counts, in a layer that has run before, where the host waits for the device: nowhere."""
    data = graph(device, 12, 8)
    share = pdc.partition(data, pdc.init(device=device.home)).to(device.home)
    data = data.to(device.home)  # whose layers take PyG's path under a mode that counts
    add = report.table(
        "host synchronisations of a layer, forward and backward",
        *("layer", "forward", "backward", "by", "as CUDA counts", "aim: 0"),
    )
    kinds = pyg.GCNConv, pyg.SAGEConv, pyg.GATConv, pyg.GATv2Conv, pyg.TransformerConv
    for kind in (*kinds, pyg.GraphConv, pyg.GINConv, pyg.APPNP):
        if report.over:
            break
        try:
            _waits(device, add, kind, share, data)
        except Exception as error:  # one layer that fails hides no other
            add(kind.__name__, "", "", failure(error), "", "")


def _waits(
    device: Device, add: Callable[..., None], kind: Any, share: Data, data: Data
) -> None:
    """Adds the lines of one layer."""
    made = {pyg.GINConv: lambda: pyg.GINConv(torch.nn.Linear(100, 64))}
    made[pyg.APPNP] = lambda: pyg.APPNP(2, 0.1)
    conv = pdc.convert(made.get(kind, lambda: kind(100, 64))()).to(device.home)
    x = share.x.clone().requires_grad_()
    for _ in range(3):
        conv(x, share.edge_index).sum().backward()
    with Synchronisations(device.cuda) as mode:
        out = conv(x, share.edge_index)
        forward = len(mode.found)
        out.to_local().sum().backward()
    backward, names = len(mode.found) - forward, ", ".join(sorted(set(mode.found)))
    told = _told_by_cuda(device, lambda: conv(x, share.edge_index).sum())
    judged = MISSED if mode.found or told else MET
    add(kind.__name__, forward, backward, names, told, judged if device.cuda else "")
    for _ in range(2):
        conv(data.x, data.edge_index)
    told = _told_by_cuda(device, lambda: conv(data.x, data.edge_index).sum())
    judged = MISSED if told else MET if device.cuda else ""
    add(f"{kind.__name__}, data not cut", "", "", "", told, judged)


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


def packing(device: Device, report: Report) -> None:
    """Picks rows, and writes and reads them by codecs: at 80 % of a copy's rate is the aim."""
    n = 64 if device.smoke else 1 << 20
    add = report.table(
        f"rows for the wire, {n:,}, as shares of a copy's {device.copy / 1e9:,.0f} GB/s",
        *("width", "how", "written", "aim: 0.8", "of HBM by data sheet"),
        *("read", "aim: 0.8", "of HBM by data sheet"),
    )
    for width in (16,) if device.smoke else (32, 128, 512):
        x = torch.randn(n, width, device=device.home)
        index = torch.randperm(n, device=device.home)

        def timed(moved: float, run: Callable[[], Any]) -> list[Any]:
            found = device.tried(report, run)
            if found[2]:
                return [found[2], "", ""]
            share, sheet = device.rates(moved, found[0])
            return [*device.aim(share, 0.8), sheet]

        picked = timed(2 * x.nbytes, lambda x=x, i=index: kernels.gather_rows(x, i))
        add(width, "rows picked", *picked, "", "", "")
        for codec in (Plain(), Cast(torch.bfloat16), *map(Quantise, (8, 4, 2, 1))):
            key, out = RngKey(12345, torch.arange(n, device=device.home)), x.clone()
            sizes = packed_bytes(codec, [n], width, x.dtype)

            def write(x: Tensor = x, codec: Any = codec, key: Any = key) -> Tensor:
                return pack(codec, x, [n], key)[0]

            try:
                message = write()
            except Exception as error:  # one codec that fails hides no other
                add(width, repr(codec), failure(error), *[""] * 5)
                continue

            def read(out: Any = out, m: Any = message, c: Any = codec, s: Any = sizes,
                     key: Any = key) -> Tensor:  # fmt: skip
                return unpack(c, m, s, [n], out, key)

            moved = x.nbytes + message.nbytes
            add(width, repr(codec), *timed(moved, write), *timed(moved, read))
