"""Computes on tensors, without autograd: compiled on the CPU, as plain torch elsewhere.

Modules `*_ops` define ops, `*_cpu` and `*_cuda` hold their compiled backends (on the CPU for
float32 and float64 with int32 or int64 indices), and `*_jit` and `*_triton` the loops that
Numba and Triton compile; `registry` picks one. Column indices of `spmm` and `sddmm` are
trusted: they are checked where a matrix is built (`coo_to_csr`, `csr_transpose`), not at each
product.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.kernels.core_ops import (
    coo_to_csr,
    count_ids,
    csr_transpose,
    gather_rows,
    hash_edges,
    keyed_bits,
    keyed_dropout,
    keyed_mask,
    pair_scores,
    pair_scores_grad,
    place_pairs,
    scatter_add_rows,
    sddmm,
    segment_max,
    segment_max_grad,
    segment_softmax,
    segment_softmax_grad,
    spmm,
)
from pyg_distcomm.kernels.matrix_ops import (
    Csr,
    count_positive,
    draw,
    extract,
    normalize_rows,
    spgemm,
    weighted_sampler,
)
from pyg_distcomm.kernels.registry import FLOATS
from pyg_distcomm.kernels.sample_ops import (
    Minibatch,
    Request,
    SampleGraph,
    rank_select_index,
    read_rows,
)

__all__ = [
    "coo_to_csr",
    "count_ids",
    "count_positive",
    "csr_transpose",
    "describe",
    "draw",
    "extract",
    "gather_rows",
    "hash_edges",
    "keyed_bits",
    "keyed_dropout",
    "keyed_mask",
    "layer_weights",
    "minimum_cover",
    "neighbor_sampler",
    "normalize_rows",
    "pair_scores",
    "pair_scores_grad",
    "place_pairs",
    "quantiser",
    "rank_select_index",
    "read_rows",
    "scatter_add_rows",
    "sddmm",
    "segment_max",
    "segment_max_grad",
    "segment_softmax",
    "segment_softmax_grad",
    "spgemm",
    "spmm",
    "warm_up",
    "weighted_sampler",
]


def minimum_cover(ptr: Tensor, to: Tensor, num_right: int) -> tuple[Tensor, Tensor]:
    """Returns a smallest set of vertices of a bipartite graph that touches every edge.

    Of all smallest covers it has the most left vertices, which makes it unique.

    Shapes: ptr [m + 1], to [e], edges from left to right vertices as CSR; returns bool
    [m] and [num_right].
    """
    return _load("core_cpu").minimum_cover(ptr, to, num_right)


def layer_weights(
    a: Csr, own: Tensor | None, power: int, scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Rounds `(A + I)^power` to integers, entry by entry; see `sampling.layer_graph`.

    Parallel edges make one entry of their summed weight x, in row j with sum t_j (taken in
    order, I last; I where `own` [m], its columns, is given). An entry weighs

        w = round(scale (x / t_j)^2), round(scale x) or 1      for power 2, 1 and 0,

    at least 1 where x > 0, and 0 where x = 0. Returns t [m] (float64), the w [m] of one
    edge of weight 1 in each row, and (value [nnz], loop [m]): w on the first edge of each
    entry and 0 on the others, and that of I (None without `own`). The last two are None
    where they are what the w of the row says. All tensors are the host's.
    """
    return _load("matrix_cpu").layer_weights(a, own, power, scale)


def neighbor_sampler(
    graph: SampleGraph, device: torch.device | None = None, pinned: bool = False
) -> Callable[[Request], Minibatch]:
    """Returns a function that draws minibatches of a graph; see `Request`.

    It may be called by several threads at once, and holds 8 bytes per node for each. On a
    device it draws the same minibatches; see `sample_device.DeviceSampler`.
    """
    if device is None:
        return _load("sample_cpu").Sampler(graph)
    return _load("sample_device").DeviceSampler(graph, device, pinned)


def quantiser(
    x: Tensor, index: Tensor | None, bits: int, gid: Tensor | None
) -> Callable[[Tensor, int, Tensor], int] | None:
    """Returns what writes rows like `codec_ops.quantise`, from the same places each time.

    It is called with rows of the shape of `x`, the key of noise for the ids `gid`, and bytes
    to write to. None where there is no such thing: on devices, and for other types.
    """
    fits = type(x) is Tensor and x.is_cpu and x.dtype in FLOATS
    return _load("codec_cpu").Quantiser(x, index, bits, gid) if fits else None


def warm_up() -> None:
    """Compiles the float32 kernels, or loads them from Numba's cache on disk."""
    _load("core_cpu").warm_up()


def describe() -> dict[str, object]:
    """Returns what runs the CPU kernels: version, threads, cache folder, SIMD."""
    return _load("core_cpu").describe()


def _load(module: str) -> Any:
    """Imports a module that imports Numba, which takes a while."""
    return importlib.import_module(f"{__name__}.{module}")
