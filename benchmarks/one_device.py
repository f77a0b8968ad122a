"""What is to be known of products, epochs, layers and messages on one CUDA device.

The parts `products`, `epochs`, `synchronisations` and `packing` of `python benchmarks/cuda.py`,
which see. Each adds lines to tables as it measures, with what others take beside what this
package takes, and whether its aim is met.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import spmm as bench
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from device_clock import HEAD, OUT_OF_MEMORY, Device, Found, failure, ratio
from device_report import MET, MISSED, Report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.utils import scatter

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.halo.codec import RngKey, packed_bytes, unpack
from pyg_distcomm.halo.codecs import Cast, Plain, Quantise
from pyg_distcomm.halo.exchange import Packing
from pyg_distcomm.kernels import core_ops
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistAdjacency
from pyg_distcomm.sharded.partial import PartialSum

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
SHARDED = DistTensor, PartialSum, DistAdjacency
OURS = "this package"

# Products ----------------------------------------------------------------------------


def matrices(device: Device) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns makers of rowptr and col: as many nonzeros, in rows of three kinds of lengths."""
    scale, each = (7, 4) if device.smoke else (19, 32)
    n, g = 1 << scale, torch.Generator(device.home).manual_seed(0)

    def drawn(size: int) -> Tensor:
        return torch.randint(n, (size,), generator=g, device=device.home)

    def skewed() -> tuple[Tensor, Tensor, int]:
        return bench.rmat(scale, each // 2, device=device.home)

    def random() -> tuple[Tensor, Tensor, int]:
        return drawn(n * each), drawn(n * each), n

    def even() -> tuple[Tensor, Tensor, int]:
        row = torch.arange(n, device=device.home).repeat_interleave(each)
        return row, drawn(n * each), n

    return {
        "R-MAT, a few long rows": skewed,
        "random, about as long": random,
        "all as long": even,
    }


def products(device: Device, report: Report) -> None:
    """Multiplies matrices of several kinds by rows of several widths.

    The aim is to be never slower than the faster of cuSPARSE and PyG's scatter, with values
    and without. Rates are of the bytes of a matrix, its result, and a row of x for each
    nonzero, as shares of a copy's: they may be above 1 where x fits into the device's cache.
    """
    rate = device.copy_rate()
    report.say(f"A copy moves {rate / 1e9:,.0f} GB/s, read and written.")
    add = report.table(
        "SpMM, float32",
        *("rows", "nonzeros", "width", "values", "by", *HEAD, "of a copy's rate"),
        *("best other's ms / these", "aim: 1"),
    )
    for kind, make in matrices(device).items():
        row, col, n = make()
        order = torch.argsort(row, stable=True)
        row, col = row[order], col[order].int()
        counts = torch.bincount(row, minlength=n)
        rowptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        del order, counts
        value = torch.rand(len(col), device=device.home)
        for width in (16,) if device.smoke else (128, 32, 256):
            x = torch.randn(n, width, device=device.home)
            for given in (value, None):
                if report.over:
                    return
                moved = len(col) * (4 * width + 4 + 4 * (given is not None))
                moved += n * (4 * width + 4)
                about = kind, f"{len(col):,}", width, "no" if given is None else "yes"
                ways = _ways(device, rowptr, col, row, given, x)
                found = {
                    name: device.tried(
                        report, f"{about}, {name}", lambda run=run: device.measure(run)
                    )
                    for name, run in ways.items()
                }
                times = [found[k].seconds for k in OTHERS if found[k].seconds]
                for name, each in found.items():
                    shown = ratio(moved, each.seconds)
                    best = ratio(min(times, default=None), each.seconds)
                    judged = device.aim(best, 1) if name == OURS else ["", ""]
                    add(
                        *about,
                        name,
                        *each.cells,
                        shown / rate if shown else "",
                        *judged,
                    )
            del x


OTHERS = "cuSPARSE by torch", "PyG's scatter"


def _ways(
    device: Device,
    rowptr: Tensor,
    col: Tensor,
    row: Tensor,
    value: Tensor | None,
    x: Tensor,
) -> dict[str, Callable[[], Tensor]]:
    index = col.long()

    def by_scatter() -> Tensor:
        messages = x[index] if value is None else x[index] * value[:, None]
        return scatter(messages, row, 0, len(rowptr) - 1, "sum")

    ways = {
        OURS: lambda: kernels.spmm(rowptr, col, value, x),
        OTHERS[0]: lambda: core_ops.library_spmm(rowptr, col, value, x),
        OTHERS[1]: by_scatter,
    }
    if _has_triton() and (device.cuda or _interprets()):
        from pyg_distcomm.kernels import core_cuda

        def triton_alone() -> Tensor:
            kept, core_cuda.LARGE = core_cuda.LARGE, 10**18
            try:
                return core_cuda.spmm(rowptr, col, value, x)
            finally:
                core_cuda.LARGE = kept

        ways["Triton"] = triton_alone
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
    """Returns an R-MAT graph with features and classes, drawn on the device, on the host."""
    scale, each = (8, 4) if device.smoke else (scale, each)
    row, col, n = bench.rmat(scale, each, device=device.home)
    g = torch.Generator(device.home).manual_seed(1)
    draw: dict[str, Any] = {"generator": g, "device": device.home}
    data = Data(x=torch.randn(n, 100, **draw), edge_index=torch.stack([row, col]))
    data.y = torch.randint(0, 47, (n,), **draw)
    data.train_mask = torch.rand(n, **draw) < 0.1
    return data.cpu()


def epoch(
    model: Any, data: Data, edges: Any, narrow: bool = False
) -> Callable[[], Any]:
    """Returns a step on the whole graph, which returns its loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kind = data.x.device.type

    def run() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=narrow):
            out = model(data.x, edges)
            loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run


KINDS = {"GCN": pyg.GCNConv, "GraphSAGE": pyg.SAGEConv, "GAT": pyg.GATConv}
WHOLE, PLAIN, SPARSE = f"{OURS}, not cut", "PyG, edge_index", "PyG, torch.sparse"


def epochs(device: Device, report: Report) -> None:
    """Trains on the whole graph, on one device: one as large as ogbn-products, and an eighth.

    Of the large one the messages of PyG's layers do not fit on a card of 80 GB. The aim is a
    fifth of the time of PyG on `edge_index`, in a tenth of its memory.

    Each way is measured alone: its graph comes anew from the host, and all is dropped before
    the next. Memory is the peak beside that graph (edges as they are given, rows, classes):
    the model, its optimizer, and all that is kept between steps count. It is that of epochs
    after the first one: what is needed once, to plan, does not count.
    """
    scales = (
        ((18, (False, True)),)
        if device.smoke
        else ((21, (False,)), (18, (False, True)))
    )
    for scale, narrows in scales:
        if report.over:
            break
        report.doing = f"a graph of 2^{scale} nodes"
        data = graph(device, scale, 30)
        report.doing = f"pdc.partition of a graph of 2^{scale} nodes"
        share = pdc.partition(data, pdc.init(device=device.home))
        add = report.table(
            f"an epoch, {data.num_nodes:,} nodes, {data.num_edges:,} edges, {WIDTHS}",
            *("model", "autocast", "by", *HEAD, "PyG's ms / these", "aim: 5"),
            *("PyG's MiB / these", "aim: 10", "torch.sparse's ms / these"),
        )
        there = device.base()
        for narrow in narrows:
            for name in KINDS:
                if report.over:
                    return
                _epochs(device, report, add, name, narrow, data, share, there)
        del data, share
        device.clear()


def _epochs(
    device: Device,
    report: Report,
    add: Callable[..., None],
    name: str,
    narrow: bool,
    data: Data,
    share: Data,
    there: int,
) -> None:
    """Adds the lines of one model; PyG's come first, to which the others are compared."""
    peers: list[Found] = []
    for who in (PLAIN, SPARSE, OURS, WHOLE):
        if who == SPARSE and name == "GAT":  # which makes an edge_index of it
            peers.append(Found())
            continue
        for each in (share, data):
            _forget(each)
        left = device.base() - there
        given = share if who == OURS else data
        found = device.tried(
            report,
            f"{name}, {who}",
            lambda who=who, given=given: _alone(device, name, given, who, narrow),
        )
        peers.append(found)
        judged = _judged(device, found, *peers[:2]) if len(peers) > 2 else [""] * 5
        if left > 1 << 20:  # which the peak is beside, and should not be
            who = f"{who} ({left >> 20} MiB of others were left)"
        add(name, "bf16" if narrow else "float32", who, *found.cells, *judged)


def _alone(device: Device, name: str, data: Data, who: str, narrow: bool) -> Found:
    """Measures epochs on a copy of a graph that goes to the device, and is dropped."""
    given = copy.copy(data).to(device.home)  # what is copied stays on the host
    edges = given.edge_index
    if who == SPARSE:
        edges = _adjacency(given)
        del given.edge_index
    base = device.base()
    torch.manual_seed(0)
    model = Net(KINDS[name], WIDTHS).to(device.home)
    model = pdc.convert(model) if who in (OURS, WHOLE) else model
    return device.measure(epoch(model, given, edges, narrow), 3, base)


def _forget(share: Data) -> None:
    """Drops what rows keep, on the device too, as long as the share on the host lives."""
    if not isinstance(share.x, pdc.DistTensor):
        return
    edges = share.edge_index.topology
    of_values = [t.rows for _, t in share if isinstance(t, pdc.DistTensor)]
    for rows in (edges.nodes, edges.edges, *of_values):
        rows.derived.clear()


def _judged(device: Device, found: Found, plain: Found, sparse: Found) -> list[Any]:
    """Returns ratios to PyG's epoch and memory; what did not fit took more than was free."""
    faster = device.aim(ratio(plain.seconds, found.seconds), 5)
    smaller: list[Any] = ["", ""]
    if not found.why:
        smaller = device.aim(ratio(plain.peak, found.peak), 10)
    if plain.why == OUT_OF_MEMORY and smaller[0]:
        smaller[0] = f"more than {smaller[0]:.1f}"
        if smaller[1] == MISSED:  # for all that is known
            smaller[1] = "not known"
    return [*faster, *smaller, ratio(sparse.seconds, found.seconds) or ""]


def _adjacency(data: Data) -> Tensor:
    """Returns the transposed adjacency, as PyG's layers take one of torch.sparse."""
    order = torch.argsort(data.edge_index[1] * data.num_nodes + data.edge_index[0])
    source, target = data.edge_index[:, order]
    one = torch.ones(len(source), device=data.x.device)
    shape = (data.num_nodes, data.num_nodes)
    return torch.sparse_coo_tensor(
        torch.stack([target, source]), one, shape
    ).to_sparse_csr()


# Waits of the host -------------------------------------------------------------------


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
        sharded = next((kind for kind in types if kind in SHARDED), None)
        if sharded is not None:  # what its rule does on own rows is counted
            with self:
                return sharded.__torch_dispatch__(func, types, args, kwargs)
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
        report.doing = kind.__name__
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
    plain = data.x.clone().requires_grad_()
    for _ in range(2):
        conv(plain, data.edge_index)
    told = _told_by_cuda(device, lambda: conv(plain, data.edge_index).sum())
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
    n, rate = 64 if device.smoke else 1 << 20, device.copy_rate()
    add = report.table(
        f"rows for the wire, {n:,}, as shares of a copy's {rate / 1e9:,.0f} GB/s",
        *("width", "how", "bytes", "ms", "spread", "its rate", "aim: 0.8"),
        "of HBM by data sheet",
    )

    def line(width: int, how: str, way: str, moved: float, run: Callable) -> None:
        found = device.tried(report, f"{how}, {way}", lambda: device.measure(run))
        share = ratio(moved, found.seconds)
        sheet = share / device.sheet if share and device.sheet else ""
        judged = device.aim(share and share / rate, 0.8)
        add(width, how, way, *found.cells[:2], *judged, sheet)

    for width in (16,) if device.smoke else (128, 32, 512):
        x = torch.randn(n, width, device=device.home)
        index = torch.randperm(n, device=device.home)
        pick = lambda x=x, index=index: kernels.gather_rows(x, index)  # noqa: E731
        line(width, "rows picked", "read and written", 2 * x.nbytes, pick)
        for codec in (Plain(), Cast(torch.bfloat16), *map(Quantise, (8, 4, 2, 1))):
            if report.over:
                return
            _coded(device, line, codec, x)


def _coded(device: Device, line: Callable[..., None], codec: Any, x: Tensor) -> None:
    """Adds the lines of a codec: rows are written into a message, and read from it."""
    n, width = x.shape
    key, out = RngKey(12345, torch.arange(n, device=device.home)), x.clone()
    sizes, kept = packed_bytes(codec, [n], width, x.dtype), []

    def write() -> Tensor:
        kept[:] = [Packing.of(codec, x, [n], key).write(x, key)]
        return kept[0]

    def read() -> Tensor:
        return unpack(codec, kept[0], sizes, [n], out, key)

    moved = x.nbytes + sum(sizes)
    line(width, repr(codec), "written", moved, write)
    if kept:  # if writing fails, there is nothing to read
        line(width, repr(codec), "read", moved, read)
