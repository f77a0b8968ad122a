"""Times the sparse product and an epoch of a GCN: `python benchmarks/spmm.py`.

Implementations take turns, so that a busy moment slows all of them, and medians are compared:
trust the ratios, not the milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from tqdm import tqdm

from pyg_distcomm import kernels
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.comm.mesh import init
from pyg_distcomm.datasets import generated
from pyg_distcomm.graph.partition_data import partition
from pyg_distcomm.nn.product_layers import DistGCNConv

OURS = "pyg_distcomm"
REUSED = "pyg_distcomm, out given"  # fresh memory costs page faults: see the report
SCATTER = "gather-scatter"
GATHER = "rows read alone"  # no product: index_select of each edge's row
EXTRA = (OURS, REUSED, GATHER)  # not counted among other implementations
MOST_MESSAGE_BYTES = 3 << 30  # gather-scatter is left out if its messages take more

Path = Callable[[], Tensor]


@dataclass(frozen=True)
class Row:
    """The median milliseconds of each path for one width and number of threads."""

    width: int
    threads: int
    milliseconds: dict[str, float]

    def ratio(self, peer: str) -> float:
        """Returns how many times longer ``peer`` takes than we do."""
        return self.milliseconds[peer] / self.milliseconds[OURS]

    @property
    def best(self) -> str:
        """Returns the fastest path that is not ours."""
        peers = {k: t for k, t in self.milliseconds.items() if k not in EXTRA}
        return min(peers, key=peers.__getitem__)


def rmat(
    scale: int,
    edges_per_node: int = 8,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, int]:
    """Draws an R-MAT graph (.57, .19, .19, .05), symmetrised, ids permuted, on a device.

    Returns row and col [2 edges_per_node n], int64, and n = 2**scale. Duplicates
    and self-loops stay. [Chakrabarti04] draws one bit of both ends at a time.
    """
    n, g = 1 << scale, torch.Generator(device).manual_seed(seed)
    row = torch.zeros(n * edges_per_node, dtype=torch.int64, device=device)
    col = torch.zeros_like(row)
    for _ in range(scale):
        u = torch.rand(len(row), generator=g, device=device)
        row = 2 * row + (u >= 0.76)
        col = 2 * col + (((u >= 0.57) & (u < 0.76)) | (u >= 0.95))
    name = torch.randperm(n, generator=g, device=device)
    row, col = name[row], name[col]
    return torch.cat([row, col]), torch.cat([col, row]), n


def problem(scale: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, int]:
    """Returns rowptr, col, weights and n of an R-MAT graph with self-loops."""
    row, col, n = rmat(scale, seed=seed)
    loop = torch.arange(n)
    row, col = torch.cat([row, loop]), torch.cat([col, loop])
    rowptr, col, _ = kernels.coo_to_csr(row, col, n)
    g = torch.Generator().manual_seed(seed + 1)
    return rowptr, col, torch.rand(len(col), generator=g), n


def paths(
    rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor
) -> tuple[dict[str, Path], dict[str, str]]:
    """Returns the implementations of the product, and reasons for those left out."""
    n = len(rowptr) - 1
    narrow, wide = (
        _csr(rowptr, col, value, n),
        _csr(rowptr.long(), col.long(), value, n),
    )
    out = x.new_empty(n, x.size(1))
    found: dict[str, Path] = {
        OURS: lambda: kernels.spmm(rowptr, col, value, x),
        REUSED: lambda: kernels.spmm(rowptr, col, value, x, out),
        "torch.sparse.mm(csr, x, 'sum'), int32": lambda: torch.sparse.mm(
            narrow, x, "sum"
        ),
        "torch.sparse.mm(csr, x, 'sum'), int64": lambda: torch.sparse.mm(
            wide, x, "sum"
        ),
        "csr @ x": lambda: wide @ x,
    }
    missing: dict[str, str] = {}
    _add_torch_sparse(found, missing, (rowptr, col, value, x))
    if len(col) * x.size(1) * x.element_size() <= MOST_MESSAGE_BYTES:
        found[SCATTER] = _gather_scatter(rowptr, col, value, x)
    else:
        missing[SCATTER] = "its messages would not fit in memory"
    message = x.new_empty(0)
    if SCATTER in found:
        message = x.new_empty(len(col), x.size(1))
        found[GATHER] = lambda: torch.index_select(x, 0, col, out=message)
    return found, missing


def measure(
    implementations: dict[str, Path],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns the median milliseconds of each implementation, after one round to warm up."""
    samples: dict[str, list[float]] = {name: [] for name in implementations}
    for round_ in range(repeats + 1):
        for name, multiply in implementations.items():
            if name in (SCATTER, GATHER) and round_ > 3:
                continue
            start = clock()
            multiply()
            if round_:
                samples[name].append(1e3 * (clock() - start))
    return {name: statistics.median(times) for name, times in samples.items()}


def run(
    widths: Sequence[int] = (16, 32, 64, 128, 256, 512),
    threads: Sequence[int] = (1, 2),
    scale: int = 18,
    repeats: int = 7,
    dtype: torch.dtype = torch.float32,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Row]:
    """Multiplies an R-MAT graph by features of each width, on each number of threads.

    On a machine that others use, `time.process_time` is the better clock.
    """
    rowptr, col, value, n = problem(scale)
    value, rows = value.to(dtype), []
    for width in tqdm(widths, "products", disable=None, leave=False):
        x = torch.randn(n, width, dtype=dtype)
        implementations, _ = paths(rowptr, col, value, x)
        for count in threads:
            with using_threads(count):
                rows.append(Row(width, count, measure(implementations, repeats, clock)))
        del implementations
    return sorted(rows, key=lambda row: row.threads)


def table(rows: Sequence[Row]) -> str:
    """Formats rows as Markdown: our milliseconds, and ratios of others to them."""
    every = dict.fromkeys(name for row in rows for name in row.milliseconds)
    names = [name for name in every if name != OURS]
    head = ["threads", "width", f"{OURS}, ms", *names, "best other"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        ratios = [
            f"{row.ratio(name):.2f}" if name in row.milliseconds else "–"
            for name in names
        ]
        ours = f"{row.milliseconds[OURS]:.1f}"
        best = f"**{row.ratio(row.best):.2f}**"
        lines.append([str(row.threads), str(row.width), ours, *ratios, best])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Sets the threads of torch, and so of our kernels, to ``count`` inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _csr(rowptr: Tensor, col: Tensor, value: Tensor, n: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR tensors a beta
        return torch.sparse_csr_tensor(rowptr, col, value, (n, n))


def _gather_scatter(rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor) -> Path:
    row = torch.repeat_interleave(rowptr.diff().long())

    def multiply() -> Tensor:
        message = x.index_select(0, col) * value[:, None]
        return x.new_zeros(len(rowptr) - 1, x.size(1)).index_add_(0, row, message)

    return multiply


def _add_torch_sparse(
    found: dict[str, Path], missing: dict[str, str], args: tuple[Tensor, ...]
) -> None:
    rowptr, col, value, x = args
    try:
        from torch_sparse import SparseTensor
    except (ImportError, OSError) as error:
        missing["torch-sparse"] = f"cannot be imported: {error}"
        return
    matrix = SparseTensor(rowptr=rowptr.long(), col=col.long(), value=value)
    found["torch-sparse"] = lambda: matrix.spmm(x)


class Net(torch.nn.Module):
    """Two graph convolutions: in -> hidden -> classes."""

    def __init__(self, conv: type[GCNConv], widths: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv1 = conv(widths[0], widths[1], cached=True)
        self.conv2 = conv(widths[1], widths[2], cached=True)

    def forward(self, data: Data) -> Tensor:
        """Returns a score per class."""
        x = self.conv1(data.x, data.edge_index).relu()
        out: Tensor = self.conv2(x, data.edge_index)
        return out


def epoch(conv: type[GCNConv], data: Data, widths: tuple[int, int, int]) -> Callable:
    """Returns a function that trains one epoch on a Data."""
    torch.manual_seed(0)
    net = Net(conv, widths)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)

    def train() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(data)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def time_gcn(
    num_nodes: int = 50_000, hidden: Sequence[int] = (16, 64, 256), repeats: int = 5
) -> list[dict[str, float]]:
    """Returns the median milliseconds of an epoch, ours and PyG's, for each hidden width.

    The graph is `datasets.generated`; both layers cache the normalised matrix.
    """
    whole = generated(num_nodes)
    share = partition(whole, init())
    rows = []
    for width in tqdm(hidden, "epochs", disable=None, leave=False):
        widths = whole.num_features, width, int(whole.y.max()) + 1
        implementations = {
            "ours": epoch(DistGCNConv, share, widths),
            "pyg": epoch(GCNConv, whole, widths),
        }
        rows.append({"hidden": width, **measure(implementations, repeats)})
    return rows


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON, not text")
    parser.add_argument(
        "--scale", type=int, default=16, help="2^N nodes, 16 edges each"
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    widths, threads = arguments.widths, arguments.threads
    repeats, scale = arguments.repeats, arguments.scale
    about = {"torch": torch.__version__, **kernels.describe()}
    products = run(widths, threads, scale, repeats)
    epochs = {}
    for count in threads:
        with using_threads(count):
            epochs[count] = time_gcn(1 << scale, widths, repeats)
    if arguments.json:
        found = {"about": about, "products": [asdict(row) for row in products]}
        print(json.dumps({**found, "epochs": epochs}, indent=1))
        return
    named = ", ".join(f"{name} {value}" for name, value in about.items())
    print(
        f"{named}\n\nCSR times dense rows, float32; other columns are times over ours"
    )
    print(f"\n{table(products)}")
    for count, rows in epochs.items():
        print(f"\nAn epoch of a 2-layer GCN, 2^{scale} nodes, {count} thread(s)\n")
        lines = [
            (
                r["hidden"],
                *(f"{x:.2f}" for x in (r["ours"], r["pyg"], r["pyg"] / r["ours"])),
            )
            for r in rows
        ]
        print(format_table(("hidden", "ours, ms", "PyG, ms", "PyG / ours"), lines))


if __name__ == "__main__":
    main()
