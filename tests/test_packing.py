"""Packs messages of codecs between ranks: bytes on the wire are those predicted."""

from __future__ import annotations

import tiers
import torch
import worlds

from pyg_distcomm.comm import collectives
from pyg_distcomm.halo.codec import packed_bytes, unpack
from pyg_distcomm.halo.codecs import (
    Cast,
    Chain,
    ColumnMask,
    Plain,
    Quantise,
    RngKey,
)
from pyg_distcomm.halo.exchange import Packing

F = 21
ONE = Quantise(1, "stochastic")
CODECS = [
    Plain(),
    Cast(torch.bfloat16),
    ONE,
    Quantise(2),
    ColumnMask(4, scaled=True),
    Chain(ColumnMask(3), ONE),
]


def rows(rank):
    """The rows a rank has; the last one has only a few."""
    g = torch.Generator().manual_seed(rank)
    return torch.randn(30, F, generator=g).relu()


def plan(sender, receiver, size):
    """Ids of the rows that go from one rank to another; some pairs have none."""
    if sender == receiver or (sender + 2 * receiver) % 4 == 3:
        return torch.empty(0, dtype=torch.int64)
    g = torch.Generator().manual_seed(100 * sender + receiver)
    return torch.randperm(30, generator=g)[: 5 + 3 * receiver]


def _exchange(size):
    mesh = worlds.mesh()
    axis, rank = mesh.world, mesh.world.rank
    out_ids = [plan(rank, q, size) for q in range(size)]
    in_ids = [plan(q, rank, size) for q in range(size)]
    send, recv = [len(i) for i in out_ids], [len(i) for i in in_ids]
    ghosts = torch.cat([30 * q + i for q, i in enumerate(in_ids)])
    index = torch.cat(out_ids)
    for codec in CODECS:
        for key in range(3):
            x = rows(rank) * (1 + key)
            draw = RngKey(key, 30 * rank + index)
            packing = Packing.of(codec, x, send, draw, index, again=bool(key))
            message, sizes = packing.write(x, draw), packing.sizes
            axis.ledger.reset()
            cuts = packed_bytes(codec, recv, F, x.dtype)
            got = collectives.all_to_all(message, sizes, cuts, axis, "halo").wait()
            assert axis.ledger.bytes("halo") == sum(cuts)
            assert axis.ledger.bytes() == sum(cuts)
            ghost = torch.empty(sum(recv), F)
            unpack(codec, got, cuts, recv, ghost, RngKey(key, ghosts))
            wanted = [rows(q) * (1 + key) for q in range(size)]
            wanted = torch.cat([w[i] for w, i in zip(wanted, in_ids, strict=True)])
            alone = codec.encode(wanted, RngKey(key, ghosts))
            one = codec.decode(alone, torch.empty_like(wanted), RngKey(key, ghosts))
            assert torch.equal(ghost, one)  # whoever sends, whatever beside


@tiers.parametrize("size", [2, 3, 4], [3])
def test_bytes_are_those_foretold_and_rows_do_not_depend_on_ranks(size):
    worlds.run(_exchange, size, size)
