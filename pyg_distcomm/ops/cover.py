"""Which side of a block travels: rows of features, or sums; chosen by a vertex cover.

[Note: rows or sums] Rank a needs, from rank b, the product of a block B with b's rows. A
nonzero B[v, u] is paid for by the row x_u travelling to a, or by the partial sum of row v,
which b computes, travelling to a; one row or sum pays for all nonzeros of its column or
row. The fewest words are a minimum vertex cover of the bipartite graph of B's nonzeros
([Zhuang25] Sec. IV), by Konig's theorem as many as a maximum matching has edges: never
more than B's nonempty columns, or its nonempty rows. Nonzeros whose row is in the cover,
and whose column is not, are handed to b once, when the product is planned. Backward, sums
travel where rows did and rows where sums did: as many words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis

HALOS = ("auto", "cover", "rows", "sums", "blocks")
PACKING = 1 / 16  # the price of picking a row into a message, in rows sent


def check_halo(halo: str) -> str:
    """Returns a known way to exchange, or says which there are.

    "rows" sends the rows that nonzeros need, "sums" partial sums in their place, "cover"
    the fewest of both; "blocks" sends whole blocks; "auto" is "cover", or "blocks" where
    they are cheaper (see `blocks_pay`).
    """
    if halo not in HALOS:
        raise ValueError(f"halo must be one of {HALOS}, got {halo!r}")
    return halo


def offloaded_nonzeros(
    near: Tensor, far: Tensor, peer: Tensor, halo: str
) -> tuple[Tensor, int]:
    """Tells which nonzeros are handed to the other rank, and how many words that leaves.

    Args:
        near: of each nonzero, what travels if it stays: its column (or, where sums are
            what usually travels, its row).
        far: what travels if it is handed over.
        peer: the rank that it is shared with.
        halo: see `check_halo`.

    Shapes: near, far, peer [e] -> bool [e], words a feature.
    """
    if not len(near):
        return torch.zeros(0, dtype=torch.bool), 0
    left, near_slot = torch.unique(near, return_inverse=True)
    if halo in ("rows", "blocks"):
        return torch.zeros(len(near), dtype=torch.bool), len(left)
    pair, far_slot = torch.unique(peer * (far.max() + 1) + far, return_inverse=True)
    if halo == "sums":
        return torch.ones(len(near), dtype=torch.bool), len(pair)
    ptr, to, _ = kernels.coo_to_csr(near_slot, far_slot, len(left))
    near_in, far_in = kernels.minimum_cover(ptr, to, len(pair))
    return ~near_in[near_slot], int(near_in.sum() + far_in.sum())


def blocks_pay(words: int, own: int, axis: Axis, halo: str) -> bool:
    """Tells, on all ranks of an axis alike, whether whole blocks are sent; collective.

    They cost no picking: they pay where every rank's halo, with its picking, is as dear
    as the blocks of the others.
    """
    if halo != "auto" or axis.size == 1:
        return halo == "blocks"
    rows = collectives.all_gather_counts([words, own], axis)
    every = sum(own for _, own in rows)
    return every > 0 and all(
        words * (1 + PACKING) >= every - own for words, own in rows
    )
