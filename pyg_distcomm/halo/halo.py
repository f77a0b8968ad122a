"""Halo: the exact link. Which rows travel is planned once, from integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.price import Price, exchange_price
from pyg_distcomm.halo.link import Link


@dataclass(frozen=True, eq=False)
class Halo(Link):
    """The exact exchange of rows over one axis.

    Shapes (this rank; n own rows, h ghosts, t rows to send):
        send_slot    [t]   which own rows go out, in order of their destination
        send_counts  how many go to each rank of the axis (none to itself)
        recv_counts  how many come from each rank; their sum is h
        most         the most rows that any rank sends to any other
        send_gid     [t]   ids of the rows that go out
        ghost_gid    [h]   ids of the ghosts, in order

    Price: h f words forward, t f words in the transpose.
    Differs from [Tripathy20] Sec. 4.1 in moving only the rows the sparsity asks for
    ([Mukhopadhyay24]), unless planned from all rows (`dense`).
    """

    axis: Axis
    send_slot: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    num_local: int
    silent: bool
    dense: bool = False
    most: int | None = None
    send_gid: Tensor | None = None
    ghost_gid: Tensor | None = None

    @staticmethod
    def build(
        want_gid: Tensor,
        want_counts: list[int],
        have_gid: Tensor,
        axis: Axis,
        dense: bool = False,
    ) -> Halo:
        """Plans an exchange; collective over the axis.

        Args:
            want_gid: ids of the ghost rows, grouped by the rank that has them.
            want_counts: how many of them each rank of the axis has.
            have_gid: ids of the rows here, in their order in memory.
            axis: the ranks that exchange.
            dense: whole blocks travel, as in sparsity-oblivious products: what is wanted is
                every row of every other rank, in their order.
        """
        send_counts = collectives.exchange_counts(want_counts, axis)
        asked = collectives.all_to_all(
            want_gid, want_counts, send_counts, axis, "plan"
        ).wait()
        asked = asked if axis.size > 1 else asked[:0]
        order = torch.argsort(have_gid)
        slot = (
            order[torch.searchsorted(have_gid[order], asked)] if len(asked) else asked
        )
        every = collectives.all_gather_counts([max(want_counts, default=0)], axis)
        most = max(row[0] for row in every)
        return Halo(
            axis,
            slot,
            tuple(send_counts) if axis.size > 1 else (0,),
            tuple(want_counts),
            len(have_gid),
            silent=most == 0,
            dense=dense,
            most=most,
            send_gid=asked,
            ghost_gid=want_gid,
        )

    @property
    def num_ghosts(self) -> int:
        """The number of rows that arrive here, h."""
        return sum(self.recv_counts)

    def begin(self, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
        """Starts to send own rows; the call returns the ghosts, in planned order."""
        if self.silent:
            empty = x.new_empty((0, *x.shape[1:])) if into is None else into
            return lambda: empty
        flat = None if into is None else into.flatten(1)
        if self.dense:
            pending = collectives.all_gather_begin(
                x.flatten(1), self.recv_counts, self.axis, most=self.most, into=flat
            )
        else:
            rows = kernels.gather_rows(x.flatten(1), self.send_slot)
            plan = self.send_counts, self.recv_counts, self.axis, "halo", self.most
            pending = collectives.all_to_all(rows, *plan, into=flat)
        return lambda: (
            pending.wait().view(-1, *x.shape[1:]) if x.dim() > 2 else (pending.wait())
        )

    def begin_transpose(self, g: Tensor) -> Callable[[Tensor], Tensor]:
        """Starts to send sums for the ghosts; the call adds what came into own rows."""
        if self.silent:
            return lambda out: out
        op = "reduce_scatter" if self.dense else "halo_transpose"
        pending = collectives.all_to_all(
            g.flatten(1), self.recv_counts, self.send_counts, self.axis, op, self.most
        )

        def arrive(out: Tensor) -> Tensor:
            kernels.scatter_add_rows(out.flatten(1), self.send_slot, pending.wait())
            return out

        return arrive

    def price(self, width: int) -> Price:
        """Returns the price of one `begin` at `width` features."""
        return exchange_price(
            self.send_counts, self.recv_counts, self.axis.rank, self._moved(width)
        )

    def price_transpose(self, width: int) -> Price:
        """Returns the price of one `begin_transpose` at `width` features."""
        return exchange_price(
            self.recv_counts, self.send_counts, self.axis.rank, self._moved(width)
        )

    def _moved(self, width: int) -> int:
        return 0 if self.silent else width

    def to(self, device: torch.device) -> Halo:
        """Returns the same plan with its indices on another device."""
        tensors = {
            name: value.to(device)
            for name in ("send_slot", "send_gid", "ghost_gid")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **tensors)

    def __repr__(self) -> str:
        return (
            f"Halo({self.axis.name} {self.axis.rank}/{self.axis.size}, {self.num_local} "
            f"rows, sends {sum(self.send_counts)}, receives {self.num_ghosts})"
        )
