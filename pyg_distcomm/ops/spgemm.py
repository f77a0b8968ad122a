"""Multiplies a sparse block by a sparse block, by our kernel or by a library."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MappingProxyType

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.ops.csr import CSR, Pattern

EXACT = 1 << 53  # float64 holds every integer up to here


def spgemm(q: CSR, a: CSR, backend: str = "own") -> CSR:
    r"""Multiplies two sparse blocks, `C = Q A`.

    Shapes: q [l, m], a [m, n], return [l, n]; columns ascend and are distinct.

    Back ends:
        own: ours. Sums run in the order of Q's and A's entries, so the bits depend on
            neither threads nor neighbouring rows; integers are exact (int64, which wraps).
            On a device, by operations of torch: the same bits.
        torch: `torch.sparse` (MKL's CSR product where torch has it, otherwise COO).
        torch_sparse: the package torch-sparse.

    The libraries multiply in the type of the values, integers in float64: exactly, or
    not at all. Values None are ones. A product is int64 or, where a value is a float,
    of their common float type. "own" keeps entries that add up to zero; libraries may not.

    Price: linear in products, and a sort of the columns of each row.

    Raises:
        ValueError: for an unknown back end, widths or devices that differ, or integers
            beyond 2^53 where a library multiplies.
        ImportError: if torch-sparse is asked for and not installed.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {list(BACKENDS)}, got {backend!r}")
    if q.pattern.num_cols != a.pattern.shape[0]:
        raise ValueError(
            f"Q has {q.pattern.num_cols} columns, but A has {a.pattern.shape[0]} rows"
        )
    if q.pattern.col.device != a.pattern.col.device:
        raise ValueError(
            f"Q lies on {q.pattern.col.device}, and A on {a.pattern.col.device}; move one "
            "of them, by q.pattern.moved(lambda t: t.to(device)) and its values"
        )
    dtype = _common(q.value, a.value)
    if dtype.is_floating_point or backend == "own":
        return BACKENDS[backend](q, a, dtype)
    return _whole(BACKENDS[backend], q, a)


def _own(q: CSR, a: CSR, dtype: torch.dtype) -> CSR:
    p, o = q.pattern, a.pattern
    left, right = (p.rowptr, p.col, q.value), (o.rowptr, o.col, a.value)
    rowptr, col, value = kernels.spgemm(left, right, o.num_cols)
    return CSR(Pattern(rowptr, col, o.num_cols), value.to(dtype))


def _torch(q: CSR, a: CSR, dtype: torch.dtype) -> CSR:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR tensors a beta
        one, two = _torch_csr(q, dtype), _torch_csr(a, dtype)
        if torch.backends.mkl.is_available() or one.is_cuda:
            c = torch.sparse.mm(one, two)
        else:
            c = torch.sparse.mm(
                one.to_sparse_coo(), two.to_sparse_coo()
            ).to_sparse_csr()
    return _sorted(_rows(c.crow_indices()), c.col_indices(), c.values(), c.shape)


def _torch_sparse(q: CSR, a: CSR, dtype: torch.dtype) -> CSR:
    try:
        from torch_sparse import spspmm
    except ImportError as error:
        raise ImportError(
            "backend='torch_sparse' needs the package torch-sparse, which is not "
            "installed; install it, or use backend='own' or 'torch'"
        ) from error
    l, (m, n) = q.pattern.shape[0], a.pattern.shape
    index, value = spspmm(*_coo(q, dtype), *_coo(a, dtype), l, m, n, coalesced=True)
    return _sorted(index[0], index[1], value, (l, n))


BACKENDS: MappingProxyType[str, Callable[[CSR, CSR, torch.dtype], CSR]]
BACKENDS = MappingProxyType(
    {"own": _own, "torch": _torch, "torch_sparse": _torch_sparse}
)


def _whole(library: Callable[[CSR, CSR, torch.dtype], CSR], q: CSR, a: CSR) -> CSR:
    """Multiplies integers in float64, where that is exact.

    Sums of nonnegative numbers are monotone, and exact up to 2^53: a result below it has
    met no larger number on the way. Signed ones are judged by their absolute values.
    """
    negative = any(v is not None and bool((v < 0).any()) for v in (q.value, a.value))
    c = library(q, a, torch.float64)
    assert c.value is not None
    bound = (
        library(_absolute(q), _absolute(a), torch.float64).value
        if negative
        else c.value
    )
    most = [
        int(v.abs().max())
        for v in (q.value, a.value, bound)
        if v is not None and len(v)
    ]
    if max(most, default=0) >= EXACT:
        raise ValueError(
            f"integers up to {max(most)} are too large for a library that multiplies in "
            "float64, which is exact below 2^53; use backend='own'"
        )
    return CSR(c.pattern, c.value.to(torch.int64))


def _absolute(a: CSR) -> CSR:
    return CSR(a.pattern, None if a.value is None else a.value.abs())


def _common(*values: Tensor | None) -> torch.dtype:
    found = [v.dtype for v in values if v is not None and v.is_floating_point()]
    if not found:
        return torch.int64
    return found[0] if len(found) == 1 else torch.promote_types(*found)


def _torch_csr(a: CSR, dtype: torch.dtype) -> Tensor:
    p = a.pattern
    row, col = _rows(p.rowptr), p.col.long()
    if bool(((col.diff() <= 0) & (row.diff() == 0)).any()):
        # a Pattern may hold equal entries, from which MKL's product crashes
        index, value = torch.stack([row, col]), _filled(a, dtype)
        coo = torch.sparse_coo_tensor(index, value, p.shape, check_invariants=False)
        return coo.coalesce().to_sparse_csr()
    parts = (p.rowptr.long(), col, _filled(a, dtype))
    return torch.sparse_csr_tensor(*parts, p.shape, check_invariants=False)


def _coo(a: CSR, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    p = a.pattern
    return torch.stack([_rows(p.rowptr), p.col.long()]), _filled(a, dtype)


def _filled(a: CSR, dtype: torch.dtype) -> Tensor:
    value = torch.ones(a.pattern.nnz) if a.value is None else a.value
    return value.to(a.pattern.col.device, dtype)


def _rows(rowptr: Tensor) -> Tensor:
    return torch.repeat_interleave(rowptr.diff())


def _sorted(row: Tensor, col: Tensor, value: Tensor, shape: tuple[int, ...]) -> CSR:
    """Builds a CSR from entries in any order, no two of them in one place."""
    order = torch.argsort(row * max(shape[1], 1) + col)
    rowptr = torch.zeros(shape[0] + 1, dtype=torch.int64, device=row.device)
    rowptr[1:] = torch.bincount(row, minlength=shape[0]).cumsum(0)
    return CSR(Pattern(rowptr, col[order], shape[1]), value[order])
