"""Parcels: the messages for all peers of an exchange, one after the other.

Both ends know the rows each peer sends and takes, so both know where its message begins
and ends; where sizes depend on values the sender tells them first, `HEADER` bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pyg_distcomm.halo.codec import HEADER, Codec, CodecState, RngKey


def parcel_bytes(
    codec: Codec, counts: Sequence[int], width: int, dtype: torch.dtype
) -> list[int]:
    """Returns the bytes of the message for each peer: the most, if not `codec.sized`.

        bytes[q] = codec.wire_bytes(counts[q], width, dtype)

    No rows make no message.
    """
    return [codec.wire_bytes(count, width, dtype) if count else 0 for count in counts]


def header_bytes(codec: Codec, peers: int) -> int:
    """Returns what telling the sizes of messages to other ranks takes."""
    return 0 if codec.sized else HEADER * peers


def pack(
    codec: Codec,
    x: Tensor,
    counts: Sequence[int],
    draw: RngKey | None = None,
    *,
    index: Tensor | None = None,
    state: CodecState | None = None,
    where: str = "",
) -> tuple[Tensor, list[int]]:
    """Writes the rows for each peer; returns the messages side by side, and their sizes.

    Args:
        codec: how rows are written.
        x: rows `[n, f]`.
        counts: how many rows go to each peer.
        draw: of all the rows, in order.
        index: which rows of x are sent, in order of peers `[sum(counts)]`; all of them
            without it.
        state: of all the rows, for codecs that are `stateful`.
        where: which layer this is, for errors.

    Raises:
        ValueError: if rows cannot be written. Codecs with a state may have updated that
            of earlier peers, so reset it on both ends.
    """
    room = parcel_bytes(codec, counts, x.size(1), x.dtype)
    out = torch.empty(
        sum(room) if codec.sized else 0, dtype=torch.uint8, device=x.device
    )
    parts, at = [], 0
    for (begin, end), size in zip(_ranges(counts), room, strict=True):
        if not size:
            parts.append(out[:0])
            continue
        rows = (x[begin:end], None) if index is None else (x, index[begin:end])
        message = codec.encode(
            rows[0],
            None if draw is None else draw.part(begin, end),
            index=rows[1],
            out=out[at : at + size] if codec.sized else None,
            state=None if state is None else state.part(begin, end),
            where=where,
        )
        parts.append(message)
        at += len(message)
    return (out if codec.sized else torch.cat(parts)), [len(part) for part in parts]


def unpack(
    codec: Codec,
    messages: Tensor,
    sizes: Sequence[int],
    counts: Sequence[int],
    out: Tensor,
    draw: RngKey | None = None,
    *,
    state: CodecState | None = None,
) -> Tensor:
    """Reads the messages of all peers into `out` `[sum(counts), f]`, and returns it.

    Args:
        codec: how rows were written.
        messages: side by side, of `sizes` bytes.
        sizes: those of `parcel_bytes`, or what came ahead if not `codec.sized`.
        counts: how many rows come from each peer.
        out: the operator's input, or a part of it.
        draw, state: as in `pack`, of the rows in the order they arrive.
    """
    cuts = zip(_ranges(counts), _ranges(sizes), strict=True)
    for (begin, end), (first, last) in cuts:
        if end > begin:
            codec.decode(
                messages[first:last],
                out[begin:end],
                None if draw is None else draw.part(begin, end),
                state=None if state is None else state.part(begin, end),
            )
    return out


def _ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *accumulate(counts)]))
