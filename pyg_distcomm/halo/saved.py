"""Saves late rows and codecs as plain values and tensors, and reads them back."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo import codecs
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.exchange import Message, StaleBuffer
from pyg_distcomm.halo.halo import Direction


def partition_fingerprint(nodes: Rows) -> dict[str, Any]:
    """Returns the rank, the grid and a digest of the partition, of nodes of all types."""
    owners = nodes.partition
    owners = owners if owners is None or owners.union is None else owners.union
    digest = None if owners is None else owners.digest()
    return {
        "rank": nodes.mesh.rank,
        "grid": list(nodes.mesh.grid),
        "owners": digest,
    }


def codec_state(codec: Codec) -> dict[str, Any]:
    """Returns a codec as plain values.

    Raises:
        ValueError: for a codec that is not of this package.
    """
    kind = type(codec).__name__
    if isinstance(codec, codecs.Chain):
        return {"kind": kind, "codecs": [codec_state(one) for one in codec.inside]}
    if getattr(codecs, kind, None) is not type(codec):
        raise ValueError(f"{codec!r} is not one of the codecs that can be saved")
    fields = {}
    for one in dataclasses.fields(codec):  # type: ignore[arg-type]
        value = getattr(codec, one.name)
        fields[one.name] = codec_state(value) if isinstance(value, Codec) else value
    return {"kind": kind, **fields}


def read_codec(state: Mapping[str, Any]) -> Codec:
    """Returns the codec that `codec_state` saved."""
    if state["kind"] == "Chain":
        return codecs.Chain(*map(read_codec, state["codecs"]))
    fields = {
        name: read_codec(value) if isinstance(value, Mapping) else value
        for name, value in state.items()
        if name != "kind"
    }
    return getattr(codecs, state["kind"])(**fields)


def saved_buffer(buffer: StaleBuffer) -> dict[str, Any]:
    """Returns a buffer without pending messages as plain values and tensors."""
    assert buffer.shape is not None
    halo, width, dtype = buffer.shape
    ends = (halo.send_gid, halo.send_counts), (halo.ghost_gid, halo.recv_counts)
    return {
        "messages": [
            {
                "codec": codec_state(m.codec),
                "epoch": m.epoch,
                "key": m.key,
                "sizes": list(m.sizes),
                "raw": m.wait(),
            }
            for m in buffer.messages
        ],
        "mean": buffer.mean,
        "reference": buffer.reference,
        "since": buffer.since,
        "rows": _digests(*ends),
        "width": width,
        "dtype": dtype,
    }


def read_buffer(
    state: Mapping[str, Any], direction: Direction, where: str
) -> StaleBuffer:
    """Returns the buffer that was saved of an exchange.

    Raises:
        ValueError: if it holds other rows than those of this direction.
    """
    gid, counts = direction.from_gid, direction.from_counts
    if state["rows"] != _digests((direction.gid, direction.counts), (gid, counts)):
        raise ValueError(
            f"{where}: the late rows that were saved are not those that travel "
            "now; load them with the edges and halo they were saved with, or call "
            "link.reset() after loading"
        )

    def to_device(value: Any) -> Any:
        return None if value is None else value.to(gid.device)

    messages = [
        Message(
            read_codec(m["codec"]),
            m["epoch"],
            m["key"],
            direction,
            list(m["sizes"]),
            None,
            to_device(m["raw"]),
        )
        for m in state["messages"]
    ]
    return StaleBuffer(
        messages,
        to_device(state["mean"]),
        (None, state["width"], state["dtype"]),
        state["since"],
        to_device(state.get("reference")),  # older checkpoints have none
    )


def _digests(*ends: tuple[Any, tuple[int, ...]]) -> list[int]:
    """Returns digests of the rows of an exchange, the same for both directions."""
    return sorted(
        zlib.crc32(gid.cpu().numpy().tobytes(), zlib.crc32(str(tuple(counts)).encode()))
        for gid, counts in ends
    )
