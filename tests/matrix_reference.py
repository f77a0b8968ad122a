"""Products of sparse matrices, and draws from their rows, in plain Python.

What the compiled loops and the operations of torch of `kernels.matrix_ops` are compared with.
"""

from __future__ import annotations

import torch
from sample_reference import mix
from torch import Tensor

from pyg_distcomm.kernels.matrix_ops import Csr, value_type

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
MOST = 1 << 62  # sums of integer weights stay below it


def spgemm(
    q: Csr, a: Csr, num_cols: int, diagonal: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rowptr, col, total = [0], [], []
    dtype = value_type(q[2], a[2])
    ends, columns = a[0].tolist(), a[1].tolist()
    for i in range(len(q[0]) - 1):
        row: dict[int, int | float] = {}
        for k in range(int(q[0][i]), int(q[0][i + 1])):
            j = int(q[1][k])
            scale = 1 if q[2] is None else q[2][k].item()
            for e in range(ends[j], ends[j + 1]):
                one = 1 if a[2] is None else a[2][e].item()
                row[columns[e]] = row.get(columns[e], 0) + scale * one
            if diagonal is not None:
                own, one = int(diagonal[0][j]), diagonal[1][j].item()
                row[own] = row.get(own, 0) + scale * one
        col += sorted(row)
        total += [row[c] for c in sorted(row)]
        rowptr.append(len(col))
    return _ids(rowptr), _ids(col), torch.tensor(total, dtype=dtype)


def extract(
    a: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    cols: tuple[Tensor, Tensor],
    own: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    found: list[tuple[int, int, int]] = []
    for i in range(len(rows[1]) - 1):
        wanted = range(int(cols[1][i]), int(cols[1][i + 1]))
        place = {int(cols[0][k]): k for k in wanted}
        for r in range(int(rows[1][i]), int(rows[1][i + 1])):
            j = int(rows[0][r])
            if j < 0:
                continue
            for e in range(int(a[0][j]), int(a[0][j + 1])):
                if int(a[1][e]) in place:
                    found.append((r, place[int(a[1][e])], e))
            if own is not None and int(own[j]) in place:
                found.append((r, place[int(own[j])], -1))
    r, c, e = torch.tensor(found, dtype=torch.int64).view(-1, 3).T.contiguous()
    return r, c, e


def count_positive(rowptr: Tensor, value: Tensor) -> Tensor:
    counts = []
    for low, high in zip(rowptr[:-1].tolist(), rowptr[1:].tolist(), strict=True):
        row = value[low:high].tolist()
        count = -2 if sum(row) >= MOST else sum(w > 0 for w in row)
        counts.append(-1 if min(row, default=0) < 0 else count)
    return _ids(counts)


def draw(
    rowptr: Tensor,
    value: Tensor,
    count: Tensor,
    keys: Tensor,
    ptr: Tensor,
    replace: bool,
) -> tuple[Tensor, Tensor]:
    entries: list[int] = []
    sums: list[int] = []
    for i, (low, high) in enumerate(
        zip(rowptr[:-1].tolist(), rowptr[1:].tolist(), strict=True)
    ):
        weight = value[low:high].tolist()
        args = (int(count[i]), int(keys[i]), int(ptr[i + 1] - ptr[i]), replace)
        picks, lefts = _draw_row(weight, *args)
        entries += [low + pick for pick in picks]
        sums += lefts
    return _ids(entries), _ids(sums)


def weighted_sampler(value: Tensor):
    n = len(value)

    def draw_all(keys: Tensor, ptr: Tensor, replace: bool) -> tuple[Tensor, Tensor]:
        """Draws as from a matrix whose rows are all the same."""
        m = len(keys)
        count = (value > 0).sum().repeat(m)
        rows = torch.arange(m + 1) * n, value.repeat(m)
        entries, sums = draw(*rows, count, keys, ptr, replace)
        return entries % max(n, 1), sums

    return draw_all


def _draw_row(
    weight: list[int], count: int, key: int, draws: int, replace: bool
) -> tuple[list[int], list[int]]:
    left, picks, lefts = sum(weight), [], []
    some = iter([e for e, w in enumerate(weight) if w > 0])
    for j in range(draws):
        goal = (_hash(key, j) * left) >> 64
        pick = next(some) if draws == count and not replace else _first(weight, goal)
        picks.append(pick)
        lefts.append(left)
        if not replace:
            left, weight[pick] = left - weight[pick], 0
    return picks, lefts


def _first(weight: list[int], goal: int) -> int:
    for place, w in enumerate(weight):
        goal -= w
        if goal < 0:
            return place
    raise AssertionError("the goal must be below the sum")


def layer_weights(
    a: Csr, own: Tensor | None, power: int, scale: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    m = len(a[0]) - 1
    total, even = torch.zeros(m, dtype=torch.float64), torch.zeros(m, dtype=torch.int64)
    value, loop = torch.zeros(len(a[1]), dtype=torch.int64), torch.zeros_like(even)
    plain = a[2] is None
    for j in range(m):
        first: dict[int, int] = {}
        summed: dict[int, float] = {}
        edges = range(int(a[0][j]), int(a[0][j + 1]))
        for e in edges:
            c, x = int(a[1][e]), 1.0 if a[2] is None else float(a[2][e])
            first.setdefault(c, e)
            summed[c] = summed.get(c, 0.0) + x
            total[j] += x
        if own is not None:
            c = int(own[j])
            first[c] = -1
            summed[c] = summed.get(c, 0.0) + 1.0
            total[j] += 1.0
        even[j] = _rounded(1.0, float(total[j]), power, scale)
        for c, e in first.items():
            w = _rounded(summed[c], float(total[j]), power, scale)
            if e < 0:
                loop[j] = w
            else:
                value[e] = w
        plain &= all(value[e] == even[j] for e in edges)
        plain &= own is None or bool(loop[j] == even[j])
    if plain:
        return total, even, None, None
    return total, even, value, None if own is None else loop


def _rounded(x: float, total: float, power: int, scale: float) -> int:
    if x <= 0 or total <= 0:
        return 0
    if power == 0:
        return 1
    share = x / total
    return max(1, round(scale * (share * share if power == 2 else x)))


def _hash(key: int, draw: int) -> int:
    return mix(mix(key + _GOLDEN & _WORD) + (draw + 1) * _GOLDEN & _WORD)


def _ids(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
