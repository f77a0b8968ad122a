"""Computes on tensors, without autograd: compiled on the CPU, as plain torch elsewhere.

Modules `*_ops` define ops, `*_cpu` and `*_cuda` hold their compiled backends (on the CPU for
float32 and float64 with int32 or int64 indices), and `*_jit` and `*_triton` the loops that
Numba and Triton compile; `registry` picks one. Sampling, and products of two sparse matrices,
are of the CPU alone. Column indices of `spmm` and `sddmm` are trusted: they are checked where a
matrix is built (`coo_to_csr`, `csr_transpose`), not at each product.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pyg_distcomm.kernels.core_ops import (
    coo_to_csr,
    csr_transpose,
    gather_rows,
    keyed_bits,
    keyed_dropout,
    keyed_mask,
    pair_scores,
    pair_scores_grad,
    place_pairs,
    rank_select_index,
    scatter_add_rows,
    sddmm,
    segment_max,
    segment_max_grad,
    segment_softmax,
    segment_softmax_grad,
    spmm,
)

if TYPE_CHECKING:
    from pyg_distcomm.kernels.codec_cpu import quantiser
    from pyg_distcomm.kernels.core_cpu import describe, minimum_cover, warm_up
    from pyg_distcomm.kernels.matrix_cpu import (
        count_positive,
        draw,
        extract,
        layer_weights,
        normalize_rows,
        spgemm,
        weighted_sampler,
    )
    from pyg_distcomm.kernels.sample_cpu import neighbor_sampler

__all__ = [
    "coo_to_csr",
    "count_positive",
    "csr_transpose",
    "describe",
    "draw",
    "extract",
    "gather_rows",
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

# of the CPU alone, by module: these import Numba, which takes a while
_COMPILED = {
    "codec_cpu": "quantiser",
    "core_cpu": "describe minimum_cover warm_up",
    "matrix_cpu": "count_positive draw extract layer_weights normalize_rows spgemm "
    "weighted_sampler",
    "sample_cpu": "neighbor_sampler",
}


def __getattr__(name: str) -> Any:
    """Returns a function that only the CPU has, imported at its first use."""
    for module, names in _COMPILED.items():
        if name in names.split():
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
