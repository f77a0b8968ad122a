"""Sends edge values to the blocks that use them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_distcomm.comm import autograd
from pyg_distcomm.comm.collectives import Axis


@dataclass(frozen=True, eq=False)
class EdgeRoute:
    """Takes edge values from the owners of their targets to the blocks that use them.

    Shapes (this rank; e own edges, b edges of its block): send_slot [sum(send_counts)],
    keep_slot [k], what stays here, ahead of what arrives.
    On (P, 1, 1) owner and block are the same rank, and nothing moves.

    Args:
        axis: over which they travel.
        send_slot, send_counts, recv_counts: which go where, and how many come.
        local: whether nothing moves.
        keep_slot: which stay, if any do.
        then: a route that they take from there.
    """

    axis: Axis
    send_slot: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    local: bool = False
    keep_slot: Tensor | None = None
    then: EdgeRoute | None = None

    def carry(self, value: Tensor) -> Tensor:
        """Returns the block's values `[b]` of own edge values `[e]`, differentiably."""
        moved = value if self.local else self._moved(value)
        return moved if self.then is None else self.then.carry(moved)

    def _moved(self, value: Tensor) -> Tensor:
        rows = value.index_select(0, self.send_slot)
        came = autograd.all_to_all(
            rows, self.send_counts, self.recv_counts, self.axis, "edges"
        )
        if self.keep_slot is None:
            return came
        return torch.cat([value.index_select(0, self.keep_slot), came])

    def to(self, device: torch.device) -> EdgeRoute:
        """Returns the same route with its indices on another device."""
        return replace(
            self,
            send_slot=self.send_slot.to(device),
            keep_slot=None if self.keep_slot is None else self.keep_slot.to(device),
            then=None if self.then is None else self.then.to(device),
        )

    def followed_by(self, then: EdgeRoute | None) -> EdgeRoute:
        """Returns the route that goes on with another."""
        if then is None:
            return self
        after = then if self.then is None else self.then.followed_by(then)
        return replace(self, then=after)
