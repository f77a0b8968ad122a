"""Cuts graphs: functions from a graph to a `Partition`.
[Note: what refinement lowers] One product on (P, 1, 1) exchanges, per feature, the rows

    sent(i)     = sum over own v of |parts other than i that own a target of v|
    received(i) = |nodes of other parts that are sources of own edges|

and takes as long as its slowest rank: max over i of max(sent(i), received(i)), because
links carry both ways at once. Backward swaps the two, so both maxima count in every
epoch. [Acer16] and [Deveci15] lower maxima like these beside the total volume, which
[Mukhopadhyay24] found to decide the time of full-graph training.

Single nodes move, greedily, to lower the sum over parts of (sent / B)^k +
(received / B)^k for k = 1, 2, 4 .. 32: the total first, then more and more the maximum.
The largest of all counts never rises, nor do the largest number of rows sent, the largest
of rows received and the total above what they were at first, nor loads above their limits;
so the result is never worse.
"""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyg_distcomm.kernels.core_ops import MAX_INT32
from pyg_distcomm.partition.folder import report
from pyg_distcomm.partition.metrics import (
    capacities,
    fill_empty,
    node_weights,
    part_loads,
    plain_edges,
    train_vector,
)
from pyg_distcomm.partition.metrics import check_edge_index as check_edge_index
from pyg_distcomm.partition.partition import (
    Grid,
    Owner,
    Partition,
    check_grid,
    check_num_parts,
)
from pyg_distcomm.partition.stream import TensorEdges, stream
from pyg_distcomm.process import PROCESS

DOUBLINGS = range(6)  # the exponents are 2^0 .. 2^5
SWEEPS = 4  # over all nodes, with each exponent
BALANCE = 1.05


def refine_partition(
    edge_index: Tensor,
    partition: Partition,
    *,
    train_mask: Tensor | None = None,
    balance: float = BALANCE,
    grid: Grid | None = None,
) -> Partition:
    """Returns a partition whose busiest rank sends and receives less, or the same.

    edge_index [2, num_edges]; directed, repeated and self edges are welcome.
    train_mask [num_nodes], bool; its nodes stay as spread as they are, or better
    balance    most nodes a part may own, over the mean; twice as loose for in-edges and
               train nodes. Where a load is larger before, it may stay as large.
    grid       (r, s, p): the result is taken only if the busiest rank sends and receives
               no more there either (moves are chosen for (P, 1, 1))

    `before` of the result holds the figures of `partition`. The same for the same
    arguments. Time: linear in the edges, times the parts that a node has neighbours in;
    memory: about 24 bytes an edge. See [Note: what refinement lowers].
    """
    check_edge_index(edge_index, partition.num_nodes)
    before = report(edge_index, partition.refined_from(None), train_mask, grid)
    weight = node_weights(edge_index, train_vector(train_mask, partition.num_nodes))
    owner = partition.owner.numpy().astype(np.int64)
    if partition.num_parts > 1 and before.volume > 0:
        owner = _moved(edge_index, owner, partition.num_parts, weight, balance)
    found = Partition.from_owner(owner, partition.num_parts)
    if report(edge_index, found, train_mask, grid).busiest > before.busiest:
        found = partition
    return found.refined_from(before)


def _moved(
    edge_index: Tensor,
    owner: np.ndarray,
    num_parts: int,
    weight: np.ndarray,
    balance: float,
) -> np.ndarray:
    # Numba takes a second to import
    loops: Any = importlib.import_module("pyg_distcomm.partition.refine_jit")
    src, dst = plain_edges(edge_index).cpu().numpy()
    rows = loops.distinct_sources(src, dst, owner.size)
    held = loops.hold(*rows, owner, num_parts)
    load = loops.rows(owner, num_parts, held)
    carried = part_loads(owner, weight, num_parts)
    capacity = np.maximum(capacities(weight, num_parts, balance), carried.max(0))
    # nodes with few neighbours first: they move where many of them make way for a hub
    degree = np.diff(rows[0]) + np.bincount(rows[1], minlength=owner.size)
    order = np.argsort(degree, kind="stable")
    most = int(load[:num_parts].sum())
    first = np.array([load[:num_parts].max(), load[num_parts:].max()])
    for doublings in tqdm(DOUBLINGS, "refining", disable=None, leave=False):
        for _ in range(SWEEPS):
            if not loops.sweep(
                order,
                *rows,
                owner,
                held,
                load,
                weight,
                capacity,
                carried,
                first,
                most,
                doublings,
            ):
                break
    return owner


def permutation(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    *,
    seed: int = 0,
    grid: Grid | None = None,
) -> Partition:
    """Spreads rows of the matrix over process rows, and columns over process columns.

    In random order within equal degrees, nodes are dealt out to the r process rows by
    falling in-degree, and those of each process row to its s columns by falling
    out-degree, each to the one that has least so far and room for one more. So each
    process row has like nonzeros in its rows, each process column in its columns, and a
    block A_ij about m / (r s); the ranks of one block share out its nodes evenly. Sizes
    differ by one for each of the three steps at most. Without a grid, parts are process
    rows.

    Permuting rows and columns at random, and each in its own way, is the double
    permutation of [Ranjan25]; dealing by degree is ours, and keeps hubs apart too.
    """
    loops: Any = importlib.import_module("pyg_distcomm.partition.ldg_jit")
    r, s, p = check_grid(grid, num_parts)
    degree = [
        np.bincount(ends, minlength=num_nodes)
        for ends in plain_edges(edge_index).cpu().numpy()
    ]
    out, into = degree if degree[0].size else (np.zeros(0, np.int64),) * 2
    mixed = np.random.default_rng(seed).permutation(num_nodes)
    row, col, fiber = np.zeros((3, num_nodes), np.int64)
    loops.deal(_falling(mixed, into), into, np.zeros(r, np.int64), row)
    cols = np.zeros(s, np.int64)
    for i in range(r):
        mine = mixed[row[mixed] == i]
        loops.deal(_falling(mine, out), out, cols, col)
        for j in range(s):
            block = mine[col[mine] == j]
            loops.deal(_falling(block, into), into, np.zeros(p, np.int64), fiber)
    return Partition.from_owner((row * s + col) * p + fiber, num_parts)


def _falling(gid: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return gid[np.argsort(-weight[gid], kind="stable")]


METHODS = ("block", "random", "permutation", "ldg", "metis", "stream")
ORDERS = ("degree", "bfs", "random")
PASSES = 10  # streams over the nodes; the cut stops improving before that
FEW = 16  # nodes a part; below that METIS prints complaints and leaves parts empty

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
    order: str = "degree",
    refine: bool = False,
    grid: Grid | None = None,
) -> Partition:
    """Shares out the nodes of a graph, the same for the same arguments.

    edge_index [2, num_edges], integers; directed, repeated and self edges are welcome.
    method     "block": runs of consecutive nodes; sizes differ by one at most
               "random": as "block", on a random order
               "permutation": `permutation`, for blocks of a grid with like nonzeros
               "ldg": `ldg`, a streaming cutter that needs nothing installed
               "metis": `metis`; without pymetis it warns once and runs "ldg",
               as it does, silently, below 16 nodes a part
               "stream": `stream`, which reads the edges in order and keeps none; for
               edges on a disk (`partition_files`), and where LDG takes too much memory
               or the part of each node, [num_nodes]
    train_mask [num_nodes], bool; "ldg" and "metis" spread its nodes too
    balance    most nodes a part may own, over the mean ("ldg"), or most work ("metis")
    order      of "ldg": "degree" (highest first), "bfs" or "random"
    refine     lower what the busiest rank sends and receives, by `refine`
    grid       (r, s, p) of the ranks, for "permutation" and for `refine`

    No part is empty where there are as many nodes as parts (but in a given vector).
    Raises ValueError or TypeError for an edge_index that `check_edge_index` refuses,
    and ValueError for a method or order that does not exist.
    """
    num_parts = check_num_parts(num_parts)
    check_edge_index(edge_index, num_nodes)
    check_nodes_fit(num_nodes, method, refine)
    grid = check_grid(grid, num_parts)
    if not isinstance(method, str):
        found = Partition.from_owner(method, num_parts, num_nodes)
    elif check_method(method) == "permutation":
        found = permutation(edge_index, num_nodes, num_parts, seed=seed, grid=grid)
    else:
        train = train_vector(train_mask, num_nodes)
        found = _cut(method, edge_index, num_parts, train, seed, balance, order)
    if not refine:
        return found
    limit = max(balance, BALANCE)
    return refine_partition(
        edge_index, found, train_mask=train_mask, balance=limit, grid=grid
    )


def check_nodes_fit(num_nodes: int, method: Any, refine: bool) -> None:
    """Refuses a graph whose node ids the compiled cutters cannot hold."""
    if num_nodes > MAX_INT32 and (refine or method in ("ldg", "metis", "stream")):
        what = "refine=True" if refine else f"method {method!r}"
        raise ValueError(
            f"{what} holds ids of nodes in 32 bits, and takes at most {MAX_INT32} nodes, "
            f'got {num_nodes}; use "block" or "random" without refine, or give the part '
            "of each node"
        )


def check_method(method: str) -> str:
    """Returns the name of a method, or raises those there are."""
    if method not in METHODS:
        raise ValueError(
            f"unknown partition method {method!r}; give one of {', '.join(METHODS)}, "
            "or the part of each node"
        )
    return method


def takes_grid(method: Any) -> bool:
    """Says whether a method cuts differently for each grid of as many ranks."""
    return isinstance(method, str) and method == "permutation"


def _cut(
    method: str,
    edge_index: Tensor,
    num_parts: int,
    train: np.ndarray,
    seed: int,
    balance: float,
    order: str,
) -> Partition:
    num_nodes = train.size
    if method == "random":
        return _random(num_nodes, num_parts, seed)
    if method == "block" or num_parts == 1 or num_nodes <= num_parts:
        return _block(num_nodes, num_parts)
    if method == "stream":
        edges = TensorEdges(edge_index)
        return stream(edges, num_nodes, num_parts, seed=seed, balance=balance)
    enough = edge_index.size(1) > 0 and num_nodes >= FEW * num_parts
    if method == "metis" and enough and _pymetis() is not None:
        return metis(edge_index, num_parts, train, seed=seed, balance=balance)
    return ldg(edge_index, num_parts, train, seed=seed, balance=balance, order=order)


def ldg(
    edge_index: Tensor,
    num_parts: int,
    train: np.ndarray,
    *,
    seed: int = 0,
    balance: float = 1.03,
    order: str = "degree",
) -> Partition:
    """Streams the nodes, placing each with its neighbours where there is room.

        part(v) = argmax_p |N(v) in p| * room(p),   room = min_c 1 - load_c(p) / cap_c

    over three loads c: nodes (never above max(ceil(n/P), balance * n/P)), in-edges and
    train nodes (above their caps only where no other part has a neighbour or room).
    Streams again from the last pass's parts, keeps the best, then moves single nodes
    while the cut falls. Time: linear in nodes and edges, a pass.

    "Linear Deterministic Greedy" of [Stanton12], restreamed as "reLDG" of
    [Nishimura13]; the in-edge and train loads, and the moves at the end, are ours.
    """
    loops: Any = _loops()
    num_nodes = train.size
    csr = symmetric_csr(edge_index, num_nodes)
    weight = node_weights(edge_index, train)
    capacity = capacities(weight, num_parts, balance)
    load = np.zeros((num_parts, loops.LOADS), np.int64)
    walk = _order(order, csr, seed)
    owner = np.full(num_nodes, -1, np.int64)
    best, best_cut = owner, math.inf
    for _ in tqdm(range(PASSES), "ldg", disable=None, leave=False):
        loops.stream(walk, *csr, weight, capacity, owner, load)
        size = loops.cut_size(*csr, owner)
        if size >= best_cut:
            break
        best, best_cut = owner.copy(), size
    _settle(best, walk, csr, weight, capacity, num_parts)
    return Partition.from_owner(fill_empty(best, num_parts), num_parts)


def metis(
    edge_index: Tensor,
    num_parts: int,
    train: np.ndarray,
    *,
    seed: int = 0,
    balance: float = 1.03,
) -> Partition:
    """Cuts with METIS the graph made undirected, without loops and repeated edges.

    pymetis takes one weight a node, so METIS evens out 1 / n + in_degree(v) / m; then
    single nodes move to bring each load of `ldg` under its cap, where another part has
    room for all of them. Sizes stay less even than with `ldg`. Needs pymetis.
    """
    pymetis: Any = _pymetis()
    dtype = pymetis.zero_copy_dtype()
    csr = symmetric_csr(edge_index, train.size)
    if max(csr[1].size, 20 * train.size) > np.iinfo(dtype).max:
        raise ValueError(
            f"{train.size} nodes and {csr[1].size} links are too many for pymetis, "
            f"which counts in {np.dtype(dtype)}; cut with method='ldg'"
        )
    weight = node_weights(edge_index, train)
    mean = np.maximum(weight.mean(0), 1 / train.size)
    work = (weight / mean)[:, :2].sum(1)
    _, parts = pymetis.part_graph(
        num_parts,
        adjacency=pymetis.CSRAdjacency(*(array.astype(dtype) for array in csr)),
        vweights=np.maximum(1, np.rint(10 * work)).astype(dtype),
        options=pymetis.Options(seed=seed, ufactor=max(1, round(1000 * (balance - 1)))),
        recursive=False,
    )
    owner = np.array(parts, np.int64)
    capacity = capacities(weight, num_parts, balance)
    _settle(owner, _order("degree", csr, seed), csr, weight, capacity, num_parts)
    return Partition.from_owner(fill_empty(owner, num_parts), num_parts)


def symmetric_csr(edge_index: Tensor, num_nodes: int) -> Csr:
    """Gives indptr [n + 1] and sorted indices of A + A^T, loops and repeats dropped."""
    src, dst = plain_edges(edge_index).cpu().to(torch.int64).contiguous().numpy()
    pair: Csr = _loops().symmetric_csr(src, dst, num_nodes)
    return pair


def _block(num_nodes: int, num_parts: int) -> Partition:
    return Partition.from_owner(_runs(num_nodes, num_parts), num_parts)


def _random(num_nodes: int, num_parts: int, seed: int) -> Partition:
    owner = np.random.default_rng(seed).permutation(_runs(num_nodes, num_parts))
    return Partition.from_owner(owner, num_parts)


def _runs(num_nodes: int, num_parts: int) -> np.ndarray:
    each, more = divmod(num_nodes, num_parts)
    sizes = np.full(num_parts, each)
    sizes[:more] += 1
    return np.repeat(np.arange(num_parts), sizes)


def _order(order: str, csr: Csr, seed: int) -> np.ndarray:
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; give one of {', '.join(ORDERS)}")
    indptr, indices = csr
    roots = np.random.default_rng(seed).permutation(indptr.size - 1)
    if order == "random":
        return roots
    if order == "degree":
        return roots[np.argsort(-np.diff(indptr)[roots], kind="stable")]
    walk: np.ndarray = _loops().bfs_order(indptr, indices, roots)
    return walk


def _settle(
    owner: np.ndarray,
    walk: np.ndarray,
    csr: Csr,
    weight: np.ndarray,
    capacity: np.ndarray,
    num_parts: int,
) -> None:
    """Moves single nodes, in place: first down to the caps, then to lower the cut."""
    loops: Any = _loops()
    load = part_loads(owner, weight, num_parts)
    loss, most = 0, int(np.diff(csr[0]).max())
    light_first = walk[::-1].copy()
    while loss <= 2 * most and (load > capacity).any():
        loops.rebalance(light_first, *csr, weight, capacity, owner, load, loss)
        loss = 2 * loss + 1
    for _ in range(PASSES):
        if loops.refine(walk, *csr, weight, capacity, owner, load) == 0:
            break


def _loops() -> Any:
    # Numba takes a second to import, and only this cutter needs it
    return importlib.import_module("pyg_distcomm.partition.ldg_jit")


def _pymetis() -> Any:
    try:
        return importlib.import_module("pymetis")
    except ImportError:
        if PROCESS.without_metis:
            return None
        PROCESS.without_metis = True
        warnings.warn(
            "pymetis is not installed, so partition method 'metis' falls back to "
            "'ldg', whose cuts are larger; pip install 'pyg-distcomm[metis]'",
            stacklevel=3,
        )
        return None
