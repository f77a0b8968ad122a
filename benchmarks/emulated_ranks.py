"""Trains a GCN as P ranks do over a link, in one process: every rank's messages, one by one.

`EmulatedRanks` holds the rows that each rank wants of each other; `EmulatedLink` exchanges
them by the definition of a link: which message is read in which epoch, by which codec and
key, what is averaged, and what is skipped. It shares the codecs with the package and none
of its buffers, and is what links are tested against (forward and each gradient, to 1e-9).
Halos are of rows (`with_halo("rows")`), in one chunk, on a grid (P, 1, 1).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import pyg_distcomm as pdc
from pyg_distcomm.comm import random
from pyg_distcomm.halo.codec import (
    Codec,
    RngKey,
    packed_bytes,
    unpack,
)
from pyg_distcomm.halo.codecs import ColumnMask, Plain, Quantise
from pyg_distcomm.halo.exchange import Packing, gradient_codec


@dataclass(eq=False)
class EmulatedRanks:
    """Holds a graph cut over ranks: the normalised adjacency, and who wants which rows.

    gid, counts  the rows of all messages `[h]`, by reader, owner and id, and how many each has
    degree       in-degrees of these rows' nodes
    matrix       `[n, n + h]`: own columns for edges within ranks, a ghost's for the others
    """

    size: int
    gid: Tensor
    counts: list[int]
    degree: Tensor
    matrix: Tensor
    transposed: Tensor

    @staticmethod
    def cut(edge_index: Tensor, owner: Tensor, size: int, dtype: Any) -> EmulatedRanks:
        """Cuts edges `[2, e]` by the owners of nodes `[n]`."""
        n = len(owner)
        loops, weight = gcn_norm(edge_index, None, n, dtype=dtype)
        source, target = loops
        away = owner[source] != owner[target]
        pairs = owner[target[away]] * size + owner[source[away]]
        wanted, place = torch.unique(pairs * n + source[away], return_inverse=True)
        column = source.clone()
        column[away] = n + place
        at = torch.stack([target, column])
        matrix = torch.sparse_coo_tensor(at, weight, (n, n + len(wanted))).coalesce()
        counts = torch.bincount(wanted // n, minlength=size * size).tolist()
        gid = wanted % n
        degree = torch.bincount(edge_index[1], minlength=n)[gid]
        both = matrix.to_sparse_csr(), matrix.t().to_sparse_csr()
        return EmulatedRanks(size, gid, counts, degree, *both)

    def send(
        self, codec: Codec, rows: Tensor, key: int, noise: int, sums: bool
    ) -> tuple[Tensor, int]:
        """Returns rows `[h, f]` as they arrive, and the bytes; sums have noise by sender."""
        size = self.size
        told = packed_bytes(codec, self.counts, rows.size(1), rows.dtype)
        total = sum(told)
        if codec == Plain():
            return rows, total
        parts = []
        each = size if sums else size * size  # messages that share their noise
        ends = [0, *itertools.accumulate(self.counts)]
        for sender in range(size * size // each):
            counts = self.counts[sender * each : (sender + 1) * each]
            some = slice(ends[sender * each], ends[(sender + 1) * each])
            if isinstance(codec, Quantise) or codec == ColumnMask(
                getattr(codec, "rate", 1)
            ):
                counts = [sum(counts)]
            own = random.fold(noise, sender) if sums else noise
            ids = self.gid[some], own, self.degree[some]
            out = rows.new_empty(rows[some].shape)
            noisy = RngKey(key, *ids)
            plan = Packing.of(codec, rows[some], counts, noisy)
            sent = plan.write(rows[some], noisy), plan.sizes
            draw = RngKey(key, ids[0], None, ids[2])
            parts.append(unpack(codec, *sent, counts, out, draw))
        return torch.cat(parts), total


@dataclass(eq=False)
class _Way:
    """Holds what one exchange has sent in one direction, by epoch."""

    arrived: dict[int, Tensor] = field(default_factory=dict)
    used: dict[int, tuple[Codec, int]] = field(default_factory=dict)
    since: int = 0
    mean: Tensor | None = None
    last: Tensor | None = None  # rows sent last, as they were
    sent: int = 0  # in which epoch


@dataclass(eq=False)
class EmulatedLink:
    """Exchanges the rows of emulated ranks as a link does; `step` ends an epoch.

    Args:
        ranks: the ranks.
        link: the link, whose codecs and settings are read, and nothing else.
        last: the number of the layer whose exchange is exact.
    """

    ranks: EmulatedRanks
    link: pdc.LinkPolicy
    last: int
    ways: dict[tuple[int, bool], _Way] = field(default_factory=dict)
    bytes: int = 0
    skipped: int = 0

    def step(self, loss: float | None = None) -> None:
        """Ends an epoch."""
        self.link.step(loss)

    def exchange(self, layer: int, x: Tensor) -> Tensor:
        """Returns the ghosts `[h, f]` of rows `[n, f]`, differentiably."""
        return _Exchange.apply(x, self, layer)

    def codec(self) -> Codec:
        """Returns the codec of this epoch, the exact one in an exact first epoch."""
        exact = self.link.epoch == 0 and self.link.exact_last
        return Plain() if exact else self.link.codec_at(self.link.epoch)

    def forward(self, layer: int, rows: Tensor) -> tuple[Tensor, tuple[Codec, int]]:
        """Returns the ghosts to use, and the codec and key of their message."""
        link, t = self.link, self.link.epoch
        if layer == self.last and link.exact_last:
            self.bytes += rows.numel() * rows.element_size()
            return rows, (Plain(), 0)
        key = random.fold(link.seed, t, layer, 0, 0)
        return self._through(layer, False, rows, self.codec(), key, key)

    def backward(
        self, layer: int, sums: Tensor, read: tuple[Codec, int]
    ) -> tuple[Tensor, tuple[Codec, int]]:
        """Returns the sums to use for ghosts' sums `[h, f]`, which answer a message."""
        link, t = self.link, self.link.epoch
        if layer == self.last and link.exact_last:
            self.bytes += sums.numel() * sums.element_size()
            return sums, read
        codec, key = read
        noise = random.fold(key, t, 1)
        chosen = gradient_codec(self.codec(), codec)
        return self._through(layer, True, sums, chosen, key, noise)

    def _through(
        self,
        layer: int,
        backward: bool,
        rows: Tensor,
        codec: Codec,
        key: int,
        noise: int,
    ) -> tuple[Tensor, tuple[Codec, int]]:
        way = self.ways.setdefault((layer, backward), _Way())
        timing, t = self.link.timing, self.link.epoch
        every = timing.sync_every
        now = t < max(timing.warmup, 1) or (every is not None and (t + 1) % every == 0)
        trend = self.link.trend
        now = now or not way.arrived or (trend is not None and trend.synchronous)
        if timing.skip is not None and not now and self._stays(way, rows, backward):
            self.skipped += 1
            return way.arrived[way.sent], way.used[way.sent]
        got, count = self.ranks.send(codec, rows, key, noise, backward)
        self.bytes += count
        way.arrived[t], way.used[t], way.sent = got, (codec, key), t
        way.last, way.since = rows.clone(), t if now else way.since
        late = timing.late if not backward else timing.late_gradients
        late = timing.late if late is None else late
        due = t if now else max(way.since, t - late)
        for old in [e for e in way.arrived if e < due]:
            del way.arrived[old], way.used[old]
        out, g = way.arrived[due], timing.smooth
        g = (
            timing.smooth_gradients
            if backward and timing.smooth_gradients is not None
            else g
        )
        if g and late:
            first = now or way.mean is None
            way.mean = out.clone() if first else g * way.mean + (1 - g) * out
            out = way.mean
        return out, way.used[due]

    def _stays(self, way: _Way, rows: Tensor, backward: bool) -> bool:
        """Tells whether the rows sent last are used again."""
        skip = self.link.timing.skip
        bound = skip.bound_of(backward)
        if not bound or self.link.epoch - way.sent > skip.most:
            return False
        change = (rows.double() - way.last.double()).square().sum()
        return bool(change <= bound**2 * way.last.double().square().sum())


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: EmulatedLink, layer: int) -> Tensor:
        ctx.link, ctx.layer, ctx.shape = link, layer, x.shape
        ghosts, ctx.read = link.forward(layer, x[link.ranks.gid])
        return ghosts

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        rows, _ = ctx.link.backward(ctx.layer, g.contiguous(), ctx.read)
        return (
            g.new_zeros(ctx.shape).index_add_(0, ctx.link.ranks.gid, rows),
            None,
            None,
        )


class _Product(torch.autograd.Function):
    """Multiplies by a fixed sparse matrix; backward by its transpose."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.transposed @ g


def product(ranks: EmulatedRanks, x: Tensor, ghosts: Tensor) -> Tensor:
    """Returns the normalised adjacency times rows and ghosts."""
    return _Product.apply(ranks.matrix, ranks.transposed, torch.cat([x, ghosts]))


class EmulatedGCN(torch.nn.Module):
    """A GCN of given widths, with the parameters of as many `GCNConv`.

    Args:
        widths: of the layers.
        dropout: between layers.
        keep: whether A X is computed once, exactly, from the second epoch on.
    """

    def __init__(self, widths: list[int], dropout: float = 0.0, keep: bool = True):
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.lins = torch.nn.ModuleList(pdc.nn.DistGCNConv(a, b) for a, b in pairs)
        self.dropout, self.keep = dropout, keep
        self.kept: dict[int, Tensor] = {}

    def forward(
        self, x: Tensor, ranks: EmulatedRanks, link: EmulatedLink | None = None
    ) -> Tensor:
        """Returns the outcome; without a link exactly."""
        for number, layer in enumerate(self.lins):
            weight, bias = layer.lin.weight, layer.bias
            if number:
                x = F.dropout(x.relu(), self.dropout, self.training)
            first = number == 0 or weight.size(0) >= weight.size(1)
            if not first:
                x = x @ weight.t()
            if self.keep and number == 0 and (link is None or link.link.epoch):
                known = id(ranks)
                if known not in self.kept:
                    self.kept[known] = product(ranks, x, x[ranks.gid])
                z = self.kept[known]
            else:
                ghosts = x[ranks.gid] if link is None else link.exchange(number, x)
                z = product(ranks, x, ghosts)
            x = F.linear(z, weight, bias) if first else z + bias
        return x
