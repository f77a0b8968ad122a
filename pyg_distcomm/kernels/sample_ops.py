"""Defines ops of sampling: keyed random numbers, draws, sums, lookups of ids, rows by index."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_distcomm.kernels.core_ops import HASH_ODD, _mix, _shift
from pyg_distcomm.kernels.registry import op

GOLDEN = HASH_ODD[0]
UNIT = 2.0**-53  # the grain of uniform numbers


def streams_of(key: int, tree: Tensor, node: Tensor) -> Tensor:
    """Returns the generator of each node in its tree."""
    return _mix(_mix(_mix(tree + GOLDEN) ^ key) ^ _mix(node + GOLDEN))


def uniform(streams: Tensor, draw: Tensor) -> Tensor:
    """Returns numbers of generators, in [0, 1)."""
    return _shift(keyed_hash(streams, draw), 11).double() * UNIT


@op("streams size", dtypes=None)
def uniform_picks(streams: Tensor, size: Tensor, draws: int, replaced: bool) -> Tensor:
    """Draws places in 0 .. size-1; without replacement by Floyd's method ([Bentley87]).

    Shapes: streams [m], size [m], int64; returns [m, draws], int64.
    """
    steps = torch.arange(draws, device=size.device)
    top = size[:, None] if replaced else size[:, None] - draws + steps + 1
    picks = (uniform(streams[:, None], steps) * top).long()
    if replaced:
        return picks
    for k in range(1, draws):
        again = (picks[:, :k] == picks[:, k : k + 1]).any(1)
        picks[:, k] = torch.where(again, top[:, k] - 1, picks[:, k])
    return picks


@op("gid", dtypes=None)
def rank_select_index(gid: Tensor, total: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that finds the positions of ids in ascending, distinct `gid`.

    It takes ids [k] in [0, total) and returns int64 [k], -1 for ids that `gid` lacks. The
    CPU backend holds 12 bytes for each 64 ids below `total`.
    """

    def find(ids: Tensor) -> Tensor:
        ids = ids.long()
        if not len(gid):
            return torch.full_like(ids, -1)
        place = torch.searchsorted(gid.long(), ids).clamp_(max=len(gid) - 1)
        return torch.where(gid[place] == ids, place, -1)

    return find


@op("index", dtypes=None)
def read_rows(
    values: Tensor, index: Tensor, kept: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Returns rows by index, on the device of the index; values may be in pinned host memory.

    Some rows may be cached on the device: `kept` has these rows [h, ...], and the position of
    each row among them, [n] int32, -1 for others.

    Shapes: values [n, ...], contiguous; index any, int64; returns [*index.shape, ...].
    """
    found = values.index_select(0, index.reshape(-1))
    return found.view(*index.shape, *values.shape[1:])


@op("running", dtypes=None)
def draw_urns(
    running: Tensor, low: Tensor, high: Tensor, keys: Tensor, draws: int
) -> tuple[Tensor, Tensor]:
    """Draws entries by integer weights without replacement, as `matrix_ops.draw` does.

    Urn i holds the entries `low[i] .. high[i] - 1`, of which more than `draws` weigh
    something. Shapes: running [nnz + 1], int64, sums of the weights before each entry, which
    may wrap around beyond an urn; low, high, keys [m]. Returns entries, and the weight left
    before each draw, [m, draws] each.

    [Note: no tree] The sums stay as they are. Each entry drawn keeps the weight left before
    its place: those with no more than the goal lie before what is drawn next, so that is the
    first entry whose sum exceeds the goal and their weights.
    """
    base = running[low]
    left = running[high] - base
    steps = torch.arange(draws, device=low.device)
    bits = keyed_hash(hashes(keys)[:, None], steps)
    weight = torch.zeros((len(low), draws), dtype=torch.int64, device=low.device)
    before = torch.full_like(weight, torch.iinfo(torch.int64).max)
    entries, lefts = torch.empty_like(weight), torch.empty_like(weight)
    for k in range(draws):
        goal = share(bits[:, k], left)
        passed = before <= goal[:, None]
        skipped = torch.where(passed, weight, 0).sum(1)
        pick = first_above(running, low, high, goal + skipped)
        start = running[pick]
        mine = running[pick + 1] - start
        before = torch.where(passed, before, before - mine[:, None])
        before[:, k], weight[:, k] = start - base - skipped, mine
        entries[:, k], lefts[:, k] = pick, left
        left = left - mine
    return entries, lefts


@op("value", dtypes=None)
def row_sums(ptr: Tensor, value: Tensor) -> Tensor:
    """Adds up each row of float64 numbers [nnz], one after the other; ptr [m + 1]."""
    place, end = ptr[:-1], ptr[1:]
    total = torch.zeros(len(place), dtype=torch.float64, device=value.device)
    most = int((end - place).max()) if len(place) else 0
    for _ in range(most):
        there = place < end
        one = value[torch.where(there, place, 0)]
        total, place = torch.where(there, total + one, total), place + 1
    return total


def first_above(running: Tensor, low: Tensor, high: Tensor, goal: Tensor) -> Tensor:
    """Returns the first entries from `low` on up to which more than the goal adds up."""
    base, first, last = running[low], low, high
    for _ in range(len(running).bit_length()):
        open_ = first < last
        middle = torch.where(open_, (first + last) // 2, 0)
        above = running[middle + 1] - base > goal
        last = torch.where(open_ & above, middle, last)
        first = torch.where(open_ & ~above, middle + 1, first)
    return first


def hashes(keys: Tensor) -> Tensor:
    """Returns the generators of keys; see `matrix_ops`."""
    return _mix(keys + GOLDEN)


def keyed_hash(streams: Tensor, draw: Tensor) -> Tensor:
    """Returns 64 bits for each draw of a generator, as int64."""
    return _mix(streams + (draw + 1) * GOLDEN)


def share(bits: Tensor, whole: Tensor) -> Tensor:
    """Returns `floor(bits whole / 2^64)`, for 64 bits without a sign and whole in [0, 2^62)."""
    half = (1 << 32) - 1
    top, low = _shift(bits, 32), bits & half
    first = (whole & half) * top + _shift((whole & half) * low, 32)
    second = (whole >> 32) * low + (first & half)
    return (whole >> 32) * top + _shift(first, 32) + _shift(second, 32)


def spread(count: Tensor, total: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the owner of each of `sum(count)` items, its number there, and offsets.

    The host waits for the sum, unless `total` is given.
    """
    ends = count.cumsum(0)
    start = ends - count
    if total is None:
        total = int(ends[-1]) if len(ends) else 0
    each = torch.arange(len(count), device=count.device)
    owner = torch.repeat_interleave(each, count, output_size=total)
    return owner, torch.arange(total, device=count.device) - start[owner], start
