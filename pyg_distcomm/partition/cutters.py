"""Cuts graphs into partitions, and lowers the rows that the slowest rank exchanges.

[Note: cutting a stream] Edges are read in any order and not stored, so that the state of a
node must fit a fixed number of words. There are three kinds of pass:

1. count degrees;
2. join the ends of edges into clusters: the end in the smaller cluster moves to the larger,
   as in [Hollocou17] with three words per node, and with a limit on the size of clusters as in
   the first phase of [Mayer22]; then pack clusters into parts, the largest first;
3. let clusters, and then single nodes, vote: each counts its neighbours in its own part, and
   those in other parts in SLOTS slots by the rule of [Misra82], whose counts are never too
   high. Then half of them, drawn anew each time, move to the part with most votes that has
   room. The best result of all passes is kept.

A table of votes for all parts would be n P words; LDG needs the neighbours of a node at
once, which edges on a disk do not give.

[Note: what refinement lowers] One product on (P, 1, 1) exchanges, per feature, the rows

    sent(i)     = sum over own v of |parts other than i that own a target of v|
    received(i) = |nodes of other parts that are sources of own edges|

and takes as long as its slowest rank: max over i of max(sent(i), received(i)), because
links carry both directions at once. The backward pass swaps the two, so both maxima count in
every epoch. [Acer16] and [Deveci15] lower such maxima beside the total volume; according to
[Mukhopadhyay24] they decide the time of full-graph training.

Single nodes move, greedily, to lower the sum over parts of (sent / B)^k +
(received / B)^k for k = 1, 2, 4 .. 32: the total first, then more and more the maximum.
The largest count never rises. The most rows sent, the most rows received and the total never
exceed their first values, nor loads their limits; so the result is never worse.

On a grid (r, s, p) rows and partial sums travel (next note). Row parts are refined as r parts
of the graph, and column parts as s parts of the reversed graph; of both refined, either one,
and moves for (P, 1, 1), the best on the grid is taken.

[Note: what a grid exchanges] With node v on rank (i, j, k), block A_ij needs the rows of
x of process column j that process row i does not own, and the partial sums of process row
i go to the columns that own them. In one product, rows and sums of width f/p:

    rows = sum over u of |process rows other than u's that own a target of u|
    sums = sum over v of |process columns other than v's that own a source of v|

The first depends on the row parts of nodes only, the second on their column parts only, and
both must give blocks of similar size. A cut into P parts in arbitrary order lowers neither,
since the s parts of a process row need not be close. So nodes are cut into r row parts (the
P/c parts of [Mukhopadhyay24]), and each of these into s column parts; column parts of
different rows are then matched by the edges between them. Or they are cut into s parts first.
The ranks of a fiber divide the nodes of their block in any way: it does not change what they
exchange.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyg_distcomm import plugins
from pyg_distcomm.kernels.core_ops import MAX_INT32
from pyg_distcomm.partition.partition import (
    Grid,
    Owner,
    Partition,
    capacities,
    check_edge_index,
    check_grid,
    check_num_parts,
    fill_empty,
    node_weights,
    part_loads,
    plain_edges,
    report,
    train_vector,
)
from pyg_distcomm.process import PROCESS

__all__ = [
    "METHODS",
    "check_edge_index",
    "check_method",
    "check_nodes_fit",
    "cut",
    "known_methods",
    "ldg",
    "metis",
    "stream",
    "symmetric_csr",
    "takes_grid",
]

METHODS = ("block", "random", "ldg", "metis", "grid", "stream")
PASSES = 10  # streams over the nodes; the cut stops improving before that
FEW = 16  # nodes per part; METIS prints complaints and leaves parts empty below that
CHUNK = 1 << 18  # edges in memory at once
SLOTS = 8  # the most parts whose votes a node counts
SHARE = 1 / 32  # the largest size of a cluster, as a fraction of a part
CLUSTER_PASSES = 4
NODE_PASSES = 8
NARROW = 2**31  # counts below it take four bytes
# passes end once one cuts more than this fraction of the last one's edges
ENOUGH = 0.998

Csr = tuple[np.ndarray, np.ndarray]


def cut(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    method: str | Owner = "metis",
    *,
    seed: int = 0,
    train_mask: Tensor | None = None,
    balance: float = 1.03,
    refine: bool = False,
    grid: Grid | None = None,
    kinds: Tensor | None = None,
) -> Partition:
    """Partitions the nodes of a graph; the same arguments give the same result.

    edge_index [2, num_edges], integers; edges may be directed, repeated, or self-loops.
    method     "block": runs of consecutive nodes; sizes differ by one at most
               "random": "block" on a random order of the nodes
               "ldg": `ldg`, a streaming cutter that needs nothing installed
               "metis": `metis`; without pymetis it warns once and runs "ldg"; with fewer
               than 16 nodes per part it runs "ldg" without a warning
               "grid": `grid_cut`, METIS (or "ldg") into the row and column parts that
               products on `grid` exchange; "metis" where s = p = 1
               "stream": `stream`, which reads the edges in order and keeps none; for
               edges on a disk (`partition_files`), and where LDG takes too much memory
               or the name of a registered cutter (`registered_cut`)
               or the part of each node, [num_nodes]
    train_mask [num_nodes], bool; "ldg" and "metis" spread its nodes too
    balance    the most nodes ("ldg"), or most work ("metis"), of a part, over the mean
    refine     whether `refine_partition` lowers the rows that the busiest rank exchanges
    grid       (r, s, p) of the ranks, for "grid" and for `refine`
    kinds      [num_nodes], the number of each node's type; "ldg" and "metis" spread the nodes
               of each type, too

    No part is empty if there are at least as many nodes as parts, except in a given vector.
    Raises ValueError or TypeError for an edge_index that `check_edge_index` refuses,
    and ValueError for a method that does not exist.
    """
    num_parts = check_num_parts(num_parts)
    check_edge_index(edge_index, num_nodes)
    check_nodes_fit(num_nodes, method, refine)
    grid = check_grid(grid, num_parts)
    if not isinstance(method, str):
        result = Partition.from_owner(method, num_parts, num_nodes)
    elif check_method(method) == "grid" and grid[1] * grid[2] > 1:
        train = train_vector(train_mask, num_nodes)

        def parts(edges: Tensor, many: int, train: np.ndarray) -> Partition:
            return _cut("metis", edges, many, train, seed, balance)

        result = grid_cut(edge_index, train, grid, parts)
    elif method not in METHODS:
        result = registered_cut(
            method, edge_index, num_nodes, num_parts, seed=seed, train_mask=train_mask
        )
    else:
        train = train_vector(train_mask, num_nodes)
        method = "metis" if method == "grid" else method
        loads = train
        if kinds is not None:  # the nodes of each type, too
            each = np.eye(int(kinds.max()) + 1, dtype=np.int64)
            loads = np.column_stack([train, each[kinds.cpu().numpy()]])
        result = _cut(method, edge_index, num_parts, loads, seed, balance)
    if not refine:
        return result
    limit = max(balance, BALANCE)
    return refine_partition(
        edge_index, result, train_mask=train_mask, balance=limit, grid=grid
    )


def check_nodes_fit(num_nodes: int, method: Any, refine: bool) -> None:
    """Raises for a graph with more nodes than the compiled cutters can number."""
    compiled = ("ldg", "metis", "grid", "stream")
    if num_nodes > MAX_INT32 and (
        refine or (isinstance(method, str) and method in compiled)
    ):
        what = "refine=True" if refine else f"method {method!r}"
        raise ValueError(
            f"{what} holds ids of nodes in 32 bits, and takes at most {MAX_INT32} nodes, "
            f'got {num_nodes}; use "block" or "random" without refine, or give the part '
            "of each node"
        )


def check_method(method: str) -> str:
    """Returns the name of a method; raises ValueError, listing them, if there is none."""
    if method not in METHODS and method not in known_methods():
        raise ValueError(
            f"unknown partition method {method!r}; give one of "
            f"{', '.join(known_methods())}, or the part of each node"
        )
    return method


def known_methods() -> tuple[str, ...]:
    """Returns the names of all methods, those that other packages register included."""
    names = plugins.registered(plugins.CUTTERS)
    return (*METHODS, *(name for name in names if name not in METHODS))


def takes_grid(method: Any) -> bool:
    """Returns whether the result of a method depends on the grid of ranks."""
    return isinstance(method, str) and method == "grid"


def _cut(
    method: str,
    edge_index: Tensor,
    num_parts: int,
    train: np.ndarray,
    seed: int,
    balance: float,
) -> Partition:
    num_nodes = len(train)
    if method == "random":
        owner = _block_owner(num_nodes, num_parts)
        owner = np.random.default_rng(seed).permutation(owner)
        return Partition.from_owner(owner, num_parts)
    if method == "block" or num_parts == 1 or num_nodes <= num_parts:
        return Partition.from_owner(_block_owner(num_nodes, num_parts), num_parts)
    if method == "stream":
        edges = TensorEdges(edge_index)
        return stream(edges, num_nodes, num_parts, seed=seed, balance=balance)
    csr, weight = symmetric_csr(edge_index, num_nodes), node_weights(edge_index, train)
    capacity = capacities(weight, num_parts, balance)
    # by falling degree, those of equal degree in random order
    shuffled = np.random.default_rng(seed).permutation(num_nodes)
    visit_order = shuffled[np.argsort(-np.diff(csr[0])[shuffled], kind="stable")]
    enough = edge_index.size(1) > 0 and num_nodes >= FEW * num_parts
    if method == "metis" and enough and _pymetis() is not None:
        owner = metis(csr, weight, num_parts, seed, balance)
    else:
        owner = ldg(csr, weight, capacity, num_parts, visit_order)
    _improve(owner, visit_order, csr, weight, capacity, num_parts)
    return Partition.from_owner(fill_empty(owner, num_parts), num_parts)


def ldg(
    csr: Csr,
    weight: np.ndarray,
    capacity: np.ndarray,
    num_parts: int,
    visit_order: np.ndarray,
) -> np.ndarray:
    """Streams nodes by degree, each to the part with most of its neighbours and room.

        part(v) = argmax_p |N(v) in p| * free(p),   free = min_c 1 - load_c(p) / cap_c

    over loads c: nodes (never above max(ceil(n/P), balance * n/P)), in-edges, train nodes,
    and nodes of each type (above their caps only if no other part has a neighbour or
    room).
    Repeats from the parts of the last pass, and keeps the best. Then single nodes move
    while the cut falls (`_improve`). Time: linear in nodes and edges, for each pass.

    "Linear Deterministic Greedy" of [Stanton12], restreamed as "reLDG" of
    [Nishimura13]; the in-edge and train loads, and the moves at the end, are ours.
    """
    loops = jit_loops()
    loads = weight, capacity, np.zeros((num_parts, weight.shape[1]), np.int64)
    owner = np.full(len(weight), -1, np.int64)
    best, best_cut = owner, math.inf
    for _ in tqdm(range(PASSES), "ldg", disable=None, leave=False):
        loops.ldg(visit_order, csr, loads, owner)
        size = loops.cut_size(*csr, owner)
        if size >= best_cut:
            break
        best, best_cut = owner.copy(), size
    return best


def metis(
    csr: Csr, weight: np.ndarray, num_parts: int, seed: int, balance: float
) -> np.ndarray:
    """Cuts with METIS the undirected graph, without loops and repeats.

    pymetis takes one weight a node, so METIS balances 1 / n + in_degree(v) / m; then
    single nodes move to bring each load of `ldg` under its cap, train nodes before others.
    Sizes are less even than with `ldg`. Needs pymetis.
    """
    pymetis: Any = _pymetis()
    dtype = pymetis.zero_copy_dtype()
    if max(csr[1].size, 20 * len(weight)) > np.iinfo(dtype).max:
        raise ValueError(
            f"{len(weight)} nodes and {csr[1].size} links are too many for pymetis, "
            f"which counts in {np.dtype(dtype)}; cut with method='ldg'"
        )
    mean = np.maximum(weight.mean(0), 1 / len(weight))
    work = (weight / mean)[:, :2].sum(1)
    _, parts = pymetis.part_graph(
        num_parts,
        adjacency=pymetis.CSRAdjacency(*(array.astype(dtype) for array in csr)),
        vweights=np.maximum(1, np.rint(10 * work)).astype(dtype),
        options=pymetis.Options(seed=seed, ufactor=max(1, round(1000 * (balance - 1)))),
        recursive=False,
    )
    return np.array(parts, np.int64)


def symmetric_csr(edge_index: Tensor, num_nodes: int) -> Csr:
    """Returns indptr [n + 1] and sorted indices of A + A^T, loops and repeats dropped."""
    src, dst = plain_edges(edge_index).cpu().to(torch.int64).contiguous().numpy()
    pair: Csr = jit_loops().distinct_sources(src, dst, num_nodes, True)
    return pair


def _block_owner(num_nodes: int, num_parts: int) -> np.ndarray:
    parts = np.arange(num_parts)
    return np.repeat(parts, num_nodes // num_parts + (parts < num_nodes % num_parts))


def _improve(
    owner: np.ndarray,
    visit_order: np.ndarray,
    csr: Csr,
    weight: np.ndarray,
    capacity: np.ndarray,
    num_parts: int,
) -> None:
    """Moves single nodes, in place: first until loads are below caps, then to lower the cut.

    Where train nodes, or nodes of a type, find no room in parts that are full of others, they
    move first, and others after them.
    """
    loops = jit_loops()
    load = part_loads(owner, weight, num_parts)
    most = int(np.diff(csr[0]).max())
    lightest_first = visit_order[::-1].copy()

    def rebalance(limit: np.ndarray) -> None:
        max_loss = 0
        while max_loss <= 2 * most and (load > limit).any():
            loops.improve(lightest_first, csr, (weight, limit, load), owner, max_loss)
            max_loss = 2 * max_loss + 1

    def excess() -> float:
        return float((load - capacity)[:, 2:].clip(min=0).sum())

    rebalance(capacity)
    before = math.inf
    while 0 < excess() < before:
        before = excess()
        rebalance(np.concatenate([load.sum(0)[:2], capacity[2:]]))
        rebalance(capacity)
    for _ in range(PASSES):
        if not loops.improve(visit_order, csr, (weight, capacity, load), owner, -1):
            break


def _pymetis() -> Any:
    try:
        return importlib.import_module("pymetis")
    except ImportError:
        if "pymetis" not in PROCESS.warned:
            PROCESS.warned.add("pymetis")
            warnings.warn(
                "pymetis is not installed, so partition method 'metis' falls back to "
                "'ldg', whose cuts are larger; pip install 'pyg-distcomm[metis]'",
                stacklevel=3,
            )
        return None


def registered_cut(
    name: str,
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    *,
    seed: int,
    train_mask: Tensor | None,
) -> Partition:
    """Cuts with a function registered in the group "pyg_distcomm.cutters".

        cutter(edge_index, num_nodes, num_parts, *, seed, train_mask) -> owner

    of edge_index [2, num_edges] int64, and train_mask [num_nodes] bool or None; it returns
    the part of each node [num_nodes], as a tensor, an array or a list.

    Raises:
        ValueError: naming the cutter, if it fails or returns no partition.
    """
    function = plugins.load(plugins.CUTTERS, name)
    try:
        owner = function(
            edge_index.to(torch.int64),
            num_nodes,
            num_parts,
            seed=seed,
            train_mask=train_mask,
        )
        return Partition.from_owner(torch.as_tensor(owner), num_parts, num_nodes)
    except Exception as error:
        raise ValueError(
            f"the registered cutter {name!r} failed: {type(error).__name__}: {error}"
        ) from error


class TensorEdges:
    """Reads the edges of an edge_index in memory, or mapped from a file."""

    def __init__(self, edge_index: Tensor) -> None:
        self._edges = plain_edges(edge_index).cpu().numpy()
        self.num_edges = int(self._edges.shape[1])

    def chunks(self, what: str) -> Iterator[np.ndarray]:
        """Yields arrays `[2, c]`, int64, in order; ignores `what`, the label of a bar."""
        for start in range(0, self.num_edges, CHUNK):
            yield self._edges[:, start : start + CHUNK].astype(np.int64)


def stream(
    edges: Any, num_nodes: int, num_parts: int, *, seed: int = 0, balance: float = 1.03
) -> Partition:
    """Partitions the nodes of a graph whose edges may exceed the memory.

    edges  as `TensorEdges` has them: their number, and chunks that are read repeatedly

    No part owns more than max(ceil(n/P), balance n/P) nodes, nor, where there is room
    for all, more in-edges than its share times 1 + 2 (balance - 1). Deterministic for a
    given order of edges. Memory: about (50 + 6 min(P, SLOTS)) bytes per node below 2**30
    edges, and a chunk of edges; reads the edges up to 4 + CLUSTER_PASSES + NODE_PASSES times.
    See [Note: cutting a stream].
    """
    capacity = capacities(np.array([[num_nodes, edges.num_edges]]), num_parts, balance)
    if num_nodes <= num_parts:
        return Partition.from_owner(np.arange(num_nodes), num_parts)
    return _StreamCut(edges, num_nodes, num_parts, seed, capacity).run()


class _StreamCut:
    """Runs the streaming cutter once, and holds the state that its passes share."""

    def __init__(
        self,
        edges: Any,
        num_nodes: int,
        num_parts: int,
        seed: int,
        capacity: np.ndarray,
    ) -> None:
        self.edges, self.n, self.parts, self.seed = edges, num_nodes, num_parts, seed
        self.loops = jit_loops()
        # the largest counts are sums of degrees: at most twice the edges
        largest = max(num_nodes, 2 * edges.num_edges)
        self.dtype: Any = np.int32 if largest < NARROW else np.int64
        self.weight = np.ones((num_nodes, 2), self.dtype)
        self.weight[:, 1] = 0
        self.load = np.zeros((num_parts, 2), np.int64)
        self.room = capacity, self.load

    def run(self) -> Partition:
        cluster_of, weight = self._clusters()
        ids = np.flatnonzero(weight[:, 0])
        share = (weight[ids] / np.maximum(weight[ids].sum(0), 1)).sum(1)
        cluster_part = np.full(self.n, -1, np.int32)
        largest = ids[np.argsort(-share, kind="stable")]
        self.loops.pack(largest, (weight, *self.room), cluster_part)
        if (cluster_part[ids] >= 0).all():
            cluster_part = self._vote(
                ids, cluster_part, weight, cluster_of, CLUSTER_PASSES
            )
        owner = cluster_part[cluster_of]
        del cluster_of, weight, cluster_part
        unplaced = np.flatnonzero(owner < 0)
        self.loops.pack(unplaced, (self.weight, *self.room), owner)
        nodes = np.arange(self.n, dtype=self.dtype)
        owner = self._vote(nodes, owner, self.weight, None, NODE_PASSES)
        return Partition.from_owner(fill_empty(owner, self.parts), self.parts)

    def _clusters(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cluster of each node, and the nodes and in-edges in each."""
        degree = np.zeros(self.n, self.dtype)
        for src, dst in self.edges.chunks("counting degrees"):
            self.loops.count_degrees(src, dst, degree, self.weight)
        degree += self.weight[:, 1]
        cluster_of, volume = np.arange(self.n, dtype=self.dtype), degree.copy()
        size = np.ones(self.n, self.dtype)
        share = SHARE / self.parts
        most = np.array([degree.sum() * share, max(1, self.n * share)])
        for src, dst in self.edges.chunks("clustering"):
            self.loops.cluster(src, dst, degree, cluster_of, volume, size, most)
        del degree, volume
        weight = np.zeros((self.n, 2), self.dtype)
        weight[:, 0] = size
        np.add.at(weight[:, 1], cluster_of, self.weight[:, 1])
        return cluster_of, weight

    def _vote(
        self,
        ids: np.ndarray,
        owner: np.ndarray,
        weight: np.ndarray,
        cluster_of: np.ndarray | None,
        passes: int,
    ) -> np.ndarray:
        """Moves nodes, or clusters if `cluster_of` is given; returns the best owners."""
        label = "moving nodes" if cluster_of is None else "moving clusters"
        slots = min(self.parts, SLOTS)
        part_dtype: Any = np.int16 if self.parts <= 2**15 else np.int32
        votes = own, _, count = (
            np.zeros(self.n, np.int32),
            np.zeros((self.n, slots), part_dtype),
            np.zeros((self.n, slots), np.int32),
        )
        self.load[:] = 0
        np.add.at(self.load, owner[ids], weight[ids])
        best, least = owner, np.inf
        for k in range(passes + 1):
            own[:], count[:] = 0, 0
            cut = 0
            for src, dst in self.edges.chunks(label):
                if cluster_of is not None:
                    src, dst = cluster_of[src], cluster_of[dst]
                cut += self.loops.vote(src, dst, owner, votes)
            last = k == passes or cut > ENOUGH * least
            if cut < least:
                best, least = owner.copy(), cut
            if last:
                break
            rng = np.random.default_rng((self.seed, k))
            half = rng.permutation(ids)[: -(-ids.size // 2)]
            self.loops.move(half, owner, votes, (weight, *self.room))
        self.load[:] = 0
        np.add.at(self.load, best[ids], weight[ids])
        return best


def jit_loops() -> Any:
    """Returns the compiled loops: Numba takes a second to import, and only cutters need it."""
    return importlib.import_module("pyg_distcomm.partition.cutters_jit")


DOUBLINGS = range(6)  # the exponents are 2^0 .. 2^5
SWEEPS = 4  # over all nodes, with each exponent
BALANCE = 1.05
MATCHES = 3  # sweeps in which each part is matched anew with all others

Cutter = Callable[[Tensor, int, np.ndarray], Partition]


def refine_partition(
    edge_index: Tensor,
    partition: Partition,
    *,
    train_mask: Tensor | None = None,
    balance: float = BALANCE,
    grid: Grid | None = None,
) -> Partition:
    """Returns a partition whose busiest rank sends and receives less, or the same.

    edge_index [2, num_edges]; edges may be directed, repeated, or self-loops.
    train_mask [num_nodes], bool; train nodes stay as balanced as they are, or better
    balance    the most nodes that a part may own, over the mean; twice as loose for in-edges
               and train nodes. A load that is larger before may stay as large.
    grid       (r, s, p): row and column parts are refined, and the result is taken only
               if the busiest rank sends and receives no more there

    `before` of the result holds the figures of `partition`. Deterministic. Time: linear in
    the edges, times the parts that a node has neighbours in;
    memory: about 24 bytes per edge. See [Note: what refinement lowers].
    """
    check_edge_index(edge_index, partition.num_nodes)
    before = report(edge_index, partition.refined_from(None), train_mask, grid)
    weight = node_weights(edge_index, train_vector(train_mask, partition.num_nodes))
    owner = partition.owner.numpy().astype(np.int64)
    sides = check_grid(grid, partition.num_parts)
    candidates = [partition]
    if partition.num_parts > 1 and before.volume > 0:
        candidates += [
            Partition.from_owner(each, partition.num_parts)
            for each in _candidates(edge_index, owner, sides, weight, balance)
        ]
    costs = [report(edge_index, each, train_mask, grid).busiest for each in candidates]
    # of equals the last: moves for (P, 1, 1), which may have lowered the total
    found = min(zip(costs, range(0, -len(candidates), -1), candidates, strict=True))[2]
    return found.refined_from(before)


def _candidates(
    edge_index: Tensor,
    owner: np.ndarray,
    grid: Grid,
    weight: np.ndarray,
    balance: float,
) -> list[np.ndarray]:
    """Returns owners with fewer rows to exchange, whose loads are within their limits."""
    r, s, p = grid
    parts = r * s * p
    found: list[np.ndarray] = []
    if s * p > 1:
        row, col = owner // (s * p), owner // p % s
        rows = _refine_moves(edge_index, row.copy(), r, weight, balance)
        cols = _refine_moves(edge_index.flip(0), col.copy(), s, weight, balance)
        part_load = part_loads(owner, weight, parts)
        limit = np.maximum(capacities(weight, parts, balance), part_load.max(0))
        for i, j in ((rows, cols), (rows, col), (row, cols)):
            each = (i * s + j) * p + owner % p
            if (part_loads(each, weight, parts) <= limit).all():
                found.append(each)
    return [*found, _refine_moves(edge_index, owner.copy(), parts, weight, balance)]


def _refine_moves(
    edge_index: Tensor,
    owner: np.ndarray,
    num_parts: int,
    weight: np.ndarray,
    balance: float,
) -> np.ndarray:
    if num_parts == 1:
        return owner
    loops = jit_loops()
    src, dst = plain_edges(edge_index).cpu().numpy()
    rows = loops.distinct_sources(src, dst, owner.size, False)
    readers = loops.list_readers(rows, owner, num_parts)
    load = loops.rows(owner, num_parts, readers)
    part_load = part_loads(owner, weight, num_parts)
    capacity = np.maximum(capacities(weight, num_parts, balance), part_load.max(0))
    # nodes with few neighbours first: many of them together can free a hub
    degree = np.diff(rows[0]) + np.bincount(rows[1], minlength=owner.size)
    order = np.argsort(degree, kind="stable")
    max_volume = int(load[:num_parts].sum())
    start_limit = np.array([load[:num_parts].max(), load[num_parts:].max()])
    loads = weight, capacity, part_load
    state = rows, owner, readers, load, loads, start_limit, max_volume
    for doublings in tqdm(DOUBLINGS, "refining", disable=None, leave=False):
        for _ in range(SWEEPS):
            if not loops.sweep(order, *state, doublings):
                break
    return owner


def grid_cut(
    edge_index: Tensor, train: np.ndarray, grid: Grid, cutter: Cutter
) -> Partition:
    """Cuts into row and column parts; see [Note: what a grid exchanges].

    Tries three cuts: rows first, columns first, and P/p parts at once. Takes the one whose
    busiest rank exchanges least on the grid; of equal ones, the one that sends least in all.

    Args:
        edge_index: `[2, num_edges]`.
        train: 1 for each train node `[num_nodes]`.
        grid: (r, s, p).
        cutter: cuts a graph into a number of parts, given its train nodes.
    """
    r, s, p = grid
    ends = plain_edges(edge_index).cpu().numpy()
    plain = cutter(edge_index, r * s, train).owner.numpy().astype(np.int64)
    candidates = [plain]
    if min(r, s) > 1:
        row, col = _cut_twice(ends, train, (r, s), cutter)
        candidates.append(row * s + col)
        col, row = _cut_twice(ends, train, (s, r), cutter)
        candidates.append(row * s + col)

    def cost(block: np.ndarray) -> tuple[int, int]:
        partition = Partition.from_owner(block, r * s)
        figures = report(edge_index, partition, None, (r, s, 1))
        return figures.busiest, sum(figures.block_halo or figures.halo_rows)

    block = candidates[0] if len(candidates) == 1 else min(candidates, key=cost)
    degree = np.bincount(ends[1], minlength=train.size)
    fiber = np.zeros(train.size, np.int64)
    if p > 1:
        for each in range(r * s):
            gid = np.flatnonzero(block == each)
            falling = gid[np.argsort(-degree[gid], kind="stable")]
            jit_loops().deal(falling, degree, np.zeros(p, np.int64), fiber)
    return Partition.from_owner(fill_empty(block * p + fiber, r * s * p), r * s * p)


def _cut_twice(
    ends: np.ndarray, train: np.ndarray, sides: tuple[int, int], cutter: Cutter
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts into outer parts, and each into inner parts; returns both parts of each node."""
    num_outer, num_inner = sides
    first = cutter(torch.from_numpy(ends), num_outer, train)
    outer = first.owner.numpy().astype(np.int64)
    inner = np.zeros(train.size, np.int64)
    lid = np.zeros(train.size, np.int64)
    same_outer = outer[ends[0]] == outer[ends[1]]
    for part in range(num_outer):
        gid = np.flatnonzero(outer == part)
        lid[gid] = np.arange(gid.size)
        inside = same_outer & (outer[ends[1]] == part)
        edges = torch.from_numpy(lid[ends[:, inside]])
        inner[gid] = cutter(edges, num_inner, train[gid]).owner.numpy()
    return outer, _match_inner_parts(ends[:, ~same_outer], outer, inner, sides)


def _match_inner_parts(
    ends: np.ndarray, outer: np.ndarray, inner: np.ndarray, sides: tuple[int, int]
) -> np.ndarray:
    """Renumbers the inner parts of each outer part, so that many edges join equal numbers."""
    num_outer, num_inner = sides
    inner_id = outer * num_inner + inner
    key = inner_id[ends[0]] * (num_outer * num_inner) + inner_id[ends[1]]
    joining = np.bincount(key, minlength=(num_outer * num_inner) ** 2)
    num_joining = joining.reshape((num_outer, num_inner) * 2)
    num_joining = num_joining + num_joining.transpose(2, 3, 0, 1)
    number = np.tile(np.arange(num_inner), (num_outer, 1))
    for sweep_number in range(MATCHES):
        for part in range(num_outer):
            # edges of each inner part with each number, in the parts numbered so far
            seen = part if sweep_number == 0 else num_outer
            others = [k for k in range(seen) if k != part]
            gains = np.zeros((num_inner, num_inner), np.int64)
            for k in others:
                gains[:, number[k]] += num_joining[part, :, k]
            number[part] = _assign_greedily(gains)
    found: np.ndarray = number[outer, inner]
    return found


def _assign_greedily(gains: np.ndarray) -> np.ndarray:
    """Assigns rows to columns, one each, the largest gains first."""
    num_inner = len(gains)
    found = np.full(num_inner, -1, np.int64)
    free = np.ones(num_inner, bool)
    for place in np.argsort(-gains, axis=None, kind="stable"):
        row, col = divmod(int(place), num_inner)
        if found[row] < 0 and free[col]:
            found[row], free[col] = col, False
    return found
