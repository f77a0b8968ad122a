"""RowSample: some rows of each message, chosen by a key that both ends have."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import random
from pyg_distcomm.halo.codec import (
    Codec,
    CodecState,
    RngKey,
    count_of,
    drawn,
)
from pyg_distcomm.halo.codecs.plain import Plain, rows_at

_SALT = 0x5A  # a row is chosen by another hash than its columns


@dataclass(frozen=True)
class RowSample(Codec):
    """Sends k of the m rows of each message; the others arrive as zeros.

        x' = s M x,   M diagonal with k ones,   k = min(max(round(m / rate), 1), m)

    with s = m / k if `scaled`, else 1: unbiased, with E |x' - x|^2 = (m/k - 1) |x|^2. The
    k rows are those whose ids have the smallest hashes of the draw's key, so both ends
    know them and no byte is spent on it. Rate 1 sends rows as they are, bit for bit.

    Price: what `values` takes for k rows.
    Differs from the boundary node sampling of [Wan22] Alg. 1 in that no list of what was
    chosen travels.

    Args:
        rate: the compression ratio c >= 1, 1 / p in the paper; a schedule may set another.
        scaled: whether what is sent is scaled up, which makes it unbiased.
        values: how the rows that travel are written.
    """

    rate: float
    scaled: bool = True
    values: Codec = field(default_factory=Plain)

    def __post_init__(self) -> None:
        if not 1.0 <= self.rate < float("inf"):
            raise ValueError(f"a compression rate is 1 or more, got rate={self.rate!r}")
        if self.values.stateful:
            raise ValueError(
                f"RowSample sends other rows each time, so {self.values!r} has nothing to "
                "remember; put it around: Residual(RowSample(rate, scaled=False))"
            )

    @property
    def linear(self) -> bool:
        """For each draw, it is as far as its values are."""
        return self.values.linear

    @property
    def unbiased(self) -> bool:
        """Scaled, it is as far as its values are."""
        return self.scaled and self.values.unbiased

    @property
    def sized(self) -> bool:
        """As how its values are written."""
        return self.values.sized

    @property
    def keyed(self) -> bool:
        """It is."""
        return True

    @property
    def zero_fills(self) -> bool:
        """It is, beyond rate 1."""
        return self.rate > 1.0 or self.values.zero_fills

    @property
    def inside(self) -> tuple[Codec, ...]:
        """How its values are written."""
        return (self.values,)

    def with_rate(self, rate: float) -> RowSample:
        """Returns the same codec at another rate."""
        return replace(self, rate=rate)

    def kept(self, rows: int) -> int:
        """Returns how many rows of a message are sent."""
        return min(max(round(rows / self.rate), 1), rows)

    def wire_bytes(
        self, rows: int, width: int, dtype: torch.dtype = torch.float32
    ) -> int:
        """Returns what the values of k rows take."""
        return self.values.wire_bytes(self.kept(rows), width, dtype)

    def encode(
        self,
        x: Tensor,
        draw: RngKey | None = None,
        *,
        index: Tensor | None = None,
        out: Tensor | None = None,
        state: CodecState | None = None,
        where: str = "",
    ) -> Tensor:
        """Writes the chosen rows, unscaled."""
        rows = count_of(x, index)
        draw = drawn(self, draw, rows)
        if self.kept(rows) < rows:
            chosen = self._chosen(draw)
            index = chosen if index is None else index[chosen]
            draw = RngKey(draw.key, draw.gid[chosen], draw.noise)
        return self.values.encode(x, draw, index=index, out=out, where=where)

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        draw: RngKey | None = None,
        *,
        state: CodecState | None = None,
    ) -> Tensor:
        """Puts the rows where they were, scaled, and zeros elsewhere."""
        rows = len(out)
        draw = drawn(self, draw, rows)
        count = self.kept(rows)
        if count == rows:
            return self.values.decode(message, out, draw)
        chosen = self._chosen(draw)
        few = out.new_empty(count, out.size(1))
        self.values.decode(message, few, RngKey(draw.key, draw.gid[chosen], draw.noise))
        if self.scaled:
            few.mul_(rows / count)
        return out.zero_().index_copy_(0, chosen, few)

    def adjoint(self, g: Tensor, draw: RngKey | None = None) -> Tensor:
        """Returns s M g, as its values have it."""
        rows = len(g)
        draw = drawn(self, draw, rows)
        if self.kept(rows) == rows:
            return self.values.adjoint(g, draw)
        chosen = self._chosen(draw)
        inner = RngKey(draw.key, draw.gid[chosen], draw.noise)
        few = self.values.adjoint(rows_at(g, chosen), inner)
        scale = rows / len(chosen) if self.scaled else 1.0
        return torch.zeros_like(g).index_copy_(0, chosen, few * scale)

    def _chosen(self, draw: RngKey) -> Tensor:
        """Returns the places of the rows that are sent, ascending `[k]`."""
        bits = kernels.keyed_bits(random.fold(draw.key, _SALT), draw.gid, 2).long()
        order = torch.argsort(bits[:, 0] << 24 | bits[:, 1], stable=True)
        return order[: self.kept(len(order))].sort().values
