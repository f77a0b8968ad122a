"""CAGNET's own algorithms as baselines that run: 1D, 1.5D, 2D SUMMA and Split-3D.

    python benchmarks/oblivious.py [--graph R-MAT Computers] [--ranks 8] [--widths 602 16 41]

Stages of broadcasts of whole blocks, one block in a buffer at a time, in the order of products
of [Tripathy20] Sec. 4: T = A X, Z = T W; backward S = A^T G, dX = S W^T, dW = X^T S. For
measuring alone: the package trains by `GridMatrix`, in which A never travels. Of a directed
graph A^T is held beside A. Trains two epochs each and prints the bytes that the ledger counts,
the closed formula beside them, and then what the package makes of the same graph, one
difference after another: rows instead of blocks, METIS, refinement (the sparsity-aware
follow-up [Mukhopadhyay24]), the order of products, A X kept, partial sums, cuts by grid.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import spmm as bench
import torch
import torch.nn.functional as F
from communities import load
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import add_remaining_self_loops, degree

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.ledger import balanced_split, format_table

NAMES = ("1d", "1.5d", "2d", "3d")
Coo = tuple[Tensor, Tensor, Tensor]  # rows, columns, values


def side_of(name: str, size: int, c: int = 2) -> tuple[int, int, int]:
    """Returns the grid of an algorithm.

    Raises:
        ValueError: if P is no square (2D), no cube (3D), or c^2 does not divide P (1.5D).
    """
    root = round(size ** (1 / 3)) if name == "3d" else math.isqrt(size)
    fits = {"1d": True, "1.5d": size % (c * c) == 0, "2d": root**2 == size}
    if not fits.get(name, root**3 == size):
        raise ValueError(
            f"{name} of {size} ranks (c = {c}) needs c^2 | P, a square, a cube"
        )
    grids = {"1d": (size, 1, 1), "1.5d": (size // c, c, 1), "2d": (root, root, 1)}
    return grids.get(name, (root, root, root))


def product_words(
    name: str, n: int, m: int, f: int, size: int, c: int = 2, entry: int = 1
) -> float:
    """Returns the mean words that a rank receives in one product A X, X [n, f].

        1D     n f (1 - 1/P)
        1.5D   n f/c (1 - c/P) + 2 (c - 1) n f/P
        2D     (e m + n f)/q (1 - 1/q),                q = sqrt(P)
        3D     (e m + 2 n f)/q^2 (1 - 1/q),            q = cbrt(P)

    of m nonzeros, each of which travels as e words: 1 as [Tripathy20] prints it, 3 (row,
    column, value) as the authors' code does.
    """
    if name == "1d":
        return n * f * (1 - 1 / size)
    if name == "1.5d":
        return n * f / c * (1 - c / size) + 2 * (c - 1) * n * f / size
    q = size ** (1 / 2 if name == "2d" else 1 / 3)
    if name == "2d":
        return (entry * m + n * f) / q * (1 - 1 / q)
    return (entry * m + 2 * n * f) / q**2 * (1 - 1 / q)


def layer_words(
    name: str, n: int, m: int, a: int, b: int, size: int, c: int = 2, entry: int = 1
) -> float:
    """Returns the mean words of a layer of widths a -> b, forward and backward.

    The two products A X [n, a] and A^T G [n, b], and for T W, S W^T and X^T S

        1D, 1.5D   2 a b (1 - c/P)     (a sum of dW over the P/c ranks that differ)
        2D         n (2a + 2b)/q (1 - 1/q) + n a/P (1 - 1/q) + a b (1 - 1/P)
        3D         n (2a + 2b)/q^2 (1 - 1/q) + n a/P (1 - 1/q)
                   + 2 a b/q^2 (1 - 1/q) + a b (1 - 1/q^2)
    """
    words = product_words(name, n, m, a, size, c, entry)
    words += product_words(name, n, m, b, size, c, entry)
    if name in ("1d", "1.5d"):
        return words + 2 * a * b * (1 - (c if name == "1.5d" else 1) / size)
    q = size ** (1 / 2 if name == "2d" else 1 / 3)
    slab = q if name == "2d" else q * q
    words += n * (2 * a + 2 * b) / slab * (1 - 1 / q) + n * a / size * (1 - 1 / q)
    if name == "3d":
        words += 2 * a * b / q**2 * (1 - 1 / q)
    return words + a * b * (1 - 1 / slab**2 if name == "2d" else 1 - 1 / q**2)


# Blocks -----------------------------------------------------------------------------


def ends(total: int, parts: int) -> list[int]:
    """Returns where the parts of a balanced split begin, and the end."""
    return [0, *itertools.accumulate(balanced_split(total, parts))]


def dense_block(coo: Coo, rows: tuple[int, int], cols: tuple[int, int]) -> Coo:
    """Returns the nonzeros of a block, by their place in it."""
    row, col, value = coo
    here = (row >= rows[0]) & (row < rows[1]) & (col >= cols[0]) & (col < cols[1])
    return row[here] - rows[0], col[here] - cols[0], value[here]


def add_product(out: Tensor, block: Coo, x: Tensor) -> None:
    """Adds a sparse block times a dense one."""
    row, col, value = block
    where, shape = torch.stack([row, col]), (out.size(0), x.size(0))
    out += torch.sparse_coo_tensor(where, value, shape, check_invariants=False) @ x


def broadcast(x: Tensor, root: int, counts: int, axis: Axis) -> Tensor:
    """Sends the rows of `x` on one rank of an axis to the others; `counts` is how many."""
    every = [counts if k == root else 0 for k in range(axis.size)]
    own = x if axis.rank == root else x.new_empty((0, *x.shape[1:]))
    return collectives.all_gather_rows(own, every, axis, "broadcast")


def broadcast_block(block: Coo, root: int, axis: Axis) -> Coo:
    """Sends a sparse block as rows of row, column and value: 3 words a nonzero."""
    value = block[2]
    whole = torch.int64 if value.element_size() == 8 else torch.int32
    packed = torch.stack(
        [*(e.to(whole).view(value.dtype) for e in block[:2]), value], 1
    )
    counts = collectives.all_gather_counts([len(value)], axis)[root][0]
    packed = broadcast(packed, root, counts, axis)
    row, col = (packed[:, k].contiguous().view(whole).long() for k in (0, 1))
    return row, col, packed[:, 2].contiguous()


# The algorithms ---------------------------------------------------------------------


class Oblivious(ABC):
    """One algorithm: who holds which block, and how blocks are multiplied.

    Args:
        mesh: of the grid that `side_of` gives.
        coo: the nonzeros of A, all of them on every rank; each keeps its block.
        n: nodes.
    """

    def __init__(self, mesh: pdc.Mesh, coo: Coo, n: int) -> None:
        self.mesh, self.n = mesh, n
        self.i, self.j, self.k = mesh.coordinate
        self.split(coo)

    @abstractmethod
    def split(self, coo: Coo) -> None:
        """Sets `rows`, the rows of X here, and keeps blocks of A and of A^T."""

    def cols(self, width: int) -> tuple[int, int]:
        """Returns the columns of X here: all of them, unless features are split."""
        return 0, width

    def mine(self, x: Tensor) -> Tensor:
        """Returns this rank's block of a whole matrix [n, f]."""
        return x[slice(*self.rows), slice(*self.cols(x.size(1)))].contiguous()

    @abstractmethod
    def multiply(self, x: Tensor, width: int, back: bool = False) -> Tensor:
        """Returns the block of A X, or of A^T X; `width` is that of the whole X."""

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns the block of X W, W on every rank."""
        return x @ weight

    @abstractmethod
    def gradient(self, x: Tensor, s: Tensor, widths: tuple[int, int]) -> Tensor:
        """Returns X^T S on every rank."""

    def whole_rows(self, z: Tensor, width: int) -> Tensor:
        """Returns the rows of Z here at full width, for a softmax."""
        return z


def blocks_of(
    coo: Coo, rows: tuple[int, int], cols: list[tuple[int, int]]
) -> list[Any]:
    """Returns blocks of one process row: of A, and of A^T."""
    turned = (coo[1], coo[0], coo[2])
    return [[dense_block(one, rows, each) for each in cols] for one in (coo, turned)]


class OneD(Oblivious):
    """1D and 1.5D: rank (i, j) multiplies the j-th run of blocks, and replicas add up.

    For c = 1, P stages of a broadcast of X_q over the process column. For c > 1, P/c^2
    stages, and an all-reduce of Z_i over the c ranks that hold it ([Tripathy20] Sec. 4.1,
    4.2).
    """

    def split(self, coo: Coo) -> None:
        r, c, _ = self.mesh.grid
        self.ends = ends(self.n, r)
        self.rows = self.ends[self.i], self.ends[self.i + 1]
        each = r // c
        self.stages = range(self.j * each, (self.j + 1) * each)
        bounds = [(self.ends[q], self.ends[q + 1]) for q in self.stages]
        self.blocks = blocks_of(coo, self.rows, bounds)

    def multiply(self, x: Tensor, width: int, back: bool = False) -> Tensor:
        out = torch.zeros_like(x)
        for q, block in zip(self.stages, self.blocks[back], strict=True):
            count = self.ends[q + 1] - self.ends[q]
            add_product(out, block, broadcast(x, q, count, self.mesh.row))
        return collectives.all_reduce(out, self.mesh.col)

    def gradient(self, x: Tensor, s: Tensor, widths: tuple[int, int]) -> Tensor:
        return collectives.all_reduce(x.t() @ s, self.mesh.row)


class Summa(Oblivious):
    """2D and Split-3D: A_ik travels along process rows, X_kj down process columns.

    Rank (i, j, k) holds piece k of row block i of X, in column block j; and of A's block
    (i, j) the columns of piece k. Each layer k of the grid is a 2D SUMMA, whose partial
    products are added over the fiber ([Tripathy20] Sec. 4.3, 4.4).
    """

    def split(self, coo: Coo) -> None:
        q, _, p = self.mesh.grid
        block = ends(self.n, q)
        self.pieces = []
        for b in range(q):
            inside = ends(block[b + 1] - block[b], p)
            self.pieces.append([block[b] + e for e in inside])
        row = block[self.i], block[self.i + 1]
        at = self.pieces[self.j]
        self.rows = self.piece(self.i)
        self.block_rows = row
        self.blocks = blocks_of(coo, row, [(at[self.k], at[self.k + 1])])

    def piece(self, b: int) -> tuple[int, int]:
        """Returns piece k of row block b."""
        return self.pieces[b][self.k], self.pieces[b][self.k + 1]

    def cols(self, width: int) -> tuple[int, int]:
        at = ends(width, self.mesh.grid[1])
        return at[self.j], at[self.j + 1]

    def multiply(self, x: Tensor, width: int, back: bool = False) -> Tensor:
        own, mesh = self.blocks[back][0], self.mesh
        out = x.new_zeros(self.block_rows[1] - self.block_rows[0], x.size(1))
        for t in range(mesh.grid[0]):
            low, high = self.piece(t)
            block = broadcast_block(own, t, mesh.col)
            add_product(out, block, broadcast(x, t, high - low, mesh.row))
        counts = [b - a for a, b in itertools.pairwise(self.pieces[self.i])]
        here = [counts[self.k]] * len(counts)
        came = collectives.all_to_all(out, counts, here, mesh.fiber, "fiber_sum").wait()
        return came.view(len(counts), counts[self.k], x.size(1)).sum(0)

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        (a, b), axis = weight.shape, self.mesh.col
        at, mine = ends(a, axis.size), slice(*self.cols(b))
        out = x.new_zeros(x.size(0), mine.stop - mine.start)
        for t in range(axis.size):
            # features are columns: a block travels as rows of its transpose
            part = broadcast(x.t().contiguous(), t, at[t + 1] - at[t], axis)
            out += part.t() @ weight[at[t] : at[t + 1], mine]
        return out

    def gradient(self, x: Tensor, s: Tensor, widths: tuple[int, int]) -> Tensor:
        q = self.mesh.grid[0]
        turned = self._exchanged(x.t().contiguous(), widths[0])
        out = s.new_zeros(self._width(widths[0], self.i), s.size(1))
        for t in range(q):
            low, high = self.piece(t)
            left = broadcast(turned.t().contiguous(), t, high - low, self.mesh.col)
            out += left.t() @ broadcast(s, t, high - low, self.mesh.row)
        out = collectives.all_reduce(out, self.mesh.fiber)
        wide = [self._width(widths[1], t) for t in range(q)]
        line = collectives.all_gather_rows(out.t().contiguous(), wide, self.mesh.col)
        tall = [self._width(widths[0], t) for t in range(q)]
        across = line.t().contiguous()
        return collectives.all_gather_rows(across, tall, self.mesh.row)

    def _width(self, width: int, t: int) -> int:
        return balanced_split(width, self.mesh.grid[0])[t]

    def _exchanged(self, x: Tensor, width: int) -> Tensor:
        """Swaps X^T with rank (j, i, k): returns its block [f_i, rows of piece j]."""
        q, _, p = self.mesh.grid
        peer = (self.j * q + self.i) * p + self.k
        low, high = self.piece(self.j)
        counts = [0] * self.mesh.size
        back = list(counts)
        counts[peer], back[peer] = x.numel(), self._width(width, self.i) * (high - low)
        world = self.mesh.world
        came = collectives.all_to_all(
            x.reshape(-1), counts, back, world, "transpose"
        ).wait()
        return came.view(self._width(width, self.i), high - low)

    def whole_rows(self, z: Tensor, width: int) -> Tensor:
        wide = [self._width(width, t) for t in range(self.mesh.grid[0])]
        turned = z.t().contiguous()
        return collectives.all_gather_rows(turned, wide, self.mesh.col).t()


def build(name: str, coo: Coo, n: int, size: int, c: int = 2) -> Oblivious:
    """Returns an algorithm on all ranks; collective."""
    mesh = pdc.init(grid=side_of(name, size, c))
    return (OneD if name in ("1d", "1.5d") else Summa)(mesh, coo, n)


class Layer(torch.autograd.Function):
    """Z = (A X) W on blocks, and both gradients, dX of the first layer too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, algorithm: Oblivious) -> Tensor:
        ctx.algorithm = algorithm
        ctx.save_for_backward(x, weight)
        return algorithm.times(algorithm.multiply(x, weight.size(0)), weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), algorithm = ctx.saved_tensors, ctx.algorithm
        s = algorithm.multiply(g.contiguous(), weight.size(1), back=True)
        gradient = algorithm.gradient(x, s, tuple(weight.shape))
        return algorithm.times(s, weight.t().contiguous()), gradient, None


def epoch(
    algorithm: Oblivious, x: Tensor, y: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    """Runs forward and backward of a GCN on blocks; returns the output's rows here.

    The loss is the mean cross-entropy over all nodes; `weights` get their whole gradients.
    """
    h = x
    for k, weight in enumerate(weights):
        h = Layer.apply(h, weight, algorithm)
        if k + 1 < len(weights):
            h = h.relu()
    width = weights[-1].size(1)
    with torch.no_grad():
        whole = algorithm.whole_rows(h, width)
        label = y[slice(*algorithm.rows)]
        g = (whole.softmax(1) - F.one_hot(label, width)) / algorithm.n
    h.backward(g[:, slice(*algorithm.cols(width))])
    return whole


# The command ------------------------------------------------------------------------


def gcn_matrix(data: Data) -> Coo:
    """Returns D^-1/2 (A + I) D^-1/2, entry (target, source) for an edge."""
    edges, _ = add_remaining_self_loops(data.edge_index, num_nodes=data.num_nodes)
    scale = degree(edges[1], data.num_nodes).clamp_min(1).rsqrt()
    return edges[1], edges[0], scale[edges[0]] * scale[edges[1]]


def graph(name: str, root: str, width: int, classes: int) -> Data:
    """Returns a graph with random features and labels of given widths."""
    if name == "R-MAT":
        row, col, n = bench.rmat(14, 16)
        edge_index = torch.unique(torch.stack([row, col]), dim=1)
    else:
        found = load(name, root)
        edge_index, n = found.edge_index, found.num_nodes
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=generator)
    return Data(
        x=x,
        y=torch.randint(0, classes, (n,), generator=generator),
        edge_index=edge_index,
    )


# name, cutter, refine, halo, order, keep; None: the reference's order of products
OURS = (
    ("rows, random", "random", False, "rows", None, False),
    ("rows, metis", "metis", False, "rows", None, False),
    ("rows, metis, refined", "metis", True, "rows", None, False),
    ("+ order of products", "metis", True, "rows", "auto", False),
    ("+ A X kept", "metis", True, "rows", "auto", True),
    ("+ rows or sums", "metis", True, "auto", "auto", True),
    ("blocks, random, order, A X kept", "random", False, "blocks", "auto", True),
)


def counted(data: Data, widths: list[int], c: int) -> list[tuple[str, str, list[int]]]:
    """Runs on a rank: bytes received in an epoch, by all that fits so many ranks."""
    import full_graph

    torch.set_num_threads(1)
    size, found = pdc.init().size, []
    coo, n = gcn_matrix(data), int(data.num_nodes)
    for name in NAMES:
        try:
            algorithm = build(name, coo, n, size, c)
        except ValueError:
            continue
        torch.manual_seed(0)
        weights = [
            torch.randn(a, b).div(a**0.5).requires_grad_()
            for a, b in itertools.pairwise(widths)
        ]
        x = algorithm.mine(data.x).requires_grad_()
        mesh = algorithm.mesh
        mesh.ledger.reset()
        epoch(algorithm, x, data.y, weights)
        skip = mesh.ledger.bytes("plan")
        grid = "x".join(map(str, mesh.grid))
        found.append((f"CAGNET {name}", grid, [mesh.ledger.bytes() - skip]))
    ways = [(*one, (size, 1, 1)) for one in OURS]
    for grid in (g for g in side_grids(size) if min(g[:2]) > 1):
        if grid[2] == 1:
            ways += [
                (f"rows, {cutter}, refined", cutter, True, "rows", None, False, grid)
                for cutter in ("metis", "grid")
            ]
        ways += [
            (f"all of it, {cutter}, refined", cutter, True, "auto", "auto", True, grid)
            for cutter in ("metis", "grid")
        ]
    for name, cutter, refine, halo, order, keep, grid in ways:
        mesh = pdc.init(grid=grid)
        share = pdc.partition(data, mesh, cutter, refine=refine)
        edges = share.edge_index.with_halo(halo)
        edges = edges.with_ordering(order or "first", keep_inputs=keep)
        torch.manual_seed(0)
        kind = full_graph.NaiveConv if order is None else full_graph.DistGCNConv
        model = pdc.replicate(full_graph.GCN(widths, kind), mesh)
        for _ in range(3):
            mesh.ledger.reset()
            F.cross_entropy(model(share.x, edges), share.y).backward()
        sides = "x".join(map(str, grid))
        found.append((name, sides, [mesh.ledger.bytes()]))
        model = None
    world = pdc.init().world
    every = collectives.all_gather_object([row[2][0] for row in found], world)
    return [(a, g, [r[k] for r in every]) for k, (a, g, _) in enumerate(found)]


def side_grids(size: int) -> list[tuple[int, int, int]]:
    """Lists grids (r, s, 1) and the cube."""
    flat = [(size // s, s, 1) for s in range(1, size + 1) if size % s == 0]
    root = round(size ** (1 / 3))
    return flat + ([(root,) * 3] if root**3 == size and root > 1 else [])


def main() -> None:
    """Prints a table for each graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graph", nargs="+", default=["R-MAT"])
    parser.add_argument("--root", default="data")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--replication", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=[602, 16, 41])
    args = parser.parse_args()
    for name in args.graph:
        data = graph(name, args.root, args.widths[0], args.widths[-1])
        found = pdc.launch(
            counted, args.ranks, data, args.widths, args.replication, threads=1
        )[0]
        n, m = int(data.num_nodes), len(gcn_matrix(data)[0])
        first = statistics.mean(found[0][2])
        rows = []
        for what, grid, every in found:
            formula = None
            if what.startswith("CAGNET"):
                how = (args.ranks, args.replication, 3)
                pairs = itertools.pairwise(args.widths)
                own = what.split()[1]
                formula = 4 * sum(layer_words(own, n, m, a, b, *how) for a, b in pairs)
                formula = round(formula) / 2**20
            mean = statistics.mean(every)
            rows.append(
                (what, grid, formula, mean / 2**20, max(every) / 2**20, first / mean)
            )
        head = ("way", "grid", "formula, MiB", "counted, mean", "most", "times fewer")
        widths = "-".join(map(str, args.widths))
        print(f"{name}: {n:,} nodes, {m:,} nonzeros, {widths}, {args.ranks} ranks")
        print(format_table(head, rows), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
