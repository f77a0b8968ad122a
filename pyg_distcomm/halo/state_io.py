"""What a link keeps, as plain numbers and tensors, and back again."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo.codec import Codec, CodecState
from pyg_distcomm.halo.codecs.composed import Chain, Residual
from pyg_distcomm.halo.codecs.mask import ColumnMask, RowSample
from pyg_distcomm.halo.codecs.quantise import Cast, Plain, Quantise
from pyg_distcomm.halo.codecs.sparse import Bitmap, TopK
from pyg_distcomm.halo.schedule import Budget, Fixed, Ramp, RateScheduler
from pyg_distcomm.halo.staleness import Message, StaleBuffer

# ids of rows, and how many of each rank
End: TypeAlias = tuple[torch.Tensor, tuple[int, ...]]

_KNOWN: dict[str, Callable[..., Codec]] = {
    kind.__name__: kind
    for kind in (Plain, Cast, Quantise, ColumnMask, RowSample, Bitmap, TopK, Residual)
}


def spelled(codec: Codec) -> dict[str, Any]:
    """Returns a codec as plain values.

    Raises:
        ValueError: for one that is not of this package.
    """
    if isinstance(codec, Chain):
        return {"kind": "Chain", "codecs": [*map(spelled, (*codec.stages, codec.last))]}
    if type(codec).__name__ not in _KNOWN:
        raise ValueError(f"{codec!r} is not one of the codecs that can be saved")
    fields = {}
    for field in dataclasses.fields(codec):  # type: ignore[arg-type]
        value = getattr(codec, field.name)
        fields[field.name] = spelled(value) if isinstance(value, Codec) else value
    return {"kind": type(codec).__name__, **fields}


def read_codec(state: Mapping[str, Any]) -> Codec:
    """Returns the codec that was spelled."""
    if state["kind"] == "Chain":
        return Chain(*map(read_codec, state["codecs"]))
    fields = {
        name: read_codec(value) if isinstance(value, Mapping) else value
        for name, value in state.items()
        if name != "kind"
    }
    return _KNOWN[state["kind"]](**fields)


def saved_inbox(inbox: StaleBuffer) -> dict[str, Any]:
    """Returns what an exchange keeps, all of it here."""
    assert inbox.shape is not None
    return {
        "messages": [
            {
                "codec": spelled(m.codec),
                "epoch": m.epoch,
                "key": m.key,
                "sizes": list(m.sizes),
                "raw": m.land(),
                "opened": m.opened,
            }
            for m in inbox.messages
        ],
        "sent": None if inbox.sent is None else inbox.sent.last,
        "seen": None if inbox.seen is None else inbox.seen.last,
        "mean": inbox.mean,
        "since": inbox.since,
        "rows": _rows_of(inbox.shape[0]),
        "width": inbox.shape[1],
        "dtype": inbox.shape[2],
    }


def _rows_of(halo: Any) -> list[int]:
    sent, read = (halo.send_gid, halo.send_counts), (halo.ghost_gid, halo.recv_counts)
    return _digests((sent, read))


def _digests(ends: tuple[End, End]) -> list[int]:
    """Returns what tells the rows of an exchange from others, whichever way they go."""
    return sorted(
        zlib.crc32(gid.cpu().numpy().tobytes(), zlib.crc32(str(tuple(counts)).encode()))
        for gid, counts in ends
    )


def check_rows(state: Mapping[str, Any], ends: tuple[End, End], where: str) -> None:
    """Refuses late and residual rows of another exchange than that of these ends.

    Raises:
        ValueError: naming the layer.
    """
    if state["rows"] != _digests(ends):
        raise ValueError(
            f"{where}: the late and residual rows that were saved are not those that travel "
            "now; load them with the edges and halo they were saved with, or call "
            "link.reset() after loading"
        )


def read_inbox(
    state: Mapping[str, Any],
    plan: Any,
    gid: torch.Tensor,
    counts: tuple[int, ...],
    device: torch.device,
) -> StaleBuffer:
    """Returns the inbox that was saved, of an exchange whose rows have these ids."""

    def here(value: Any) -> Any:
        return None if value is None else value.to(device)

    messages = [
        Message(
            read_codec(m["codec"]),
            m["epoch"],
            m["key"],
            gid,
            counts,
            list(m["sizes"]),
            None,
            here(m["raw"]),
            m["opened"],
        )
        for m in state["messages"]
    ]
    sent, seen = (here(state[name]) for name in ("sent", "seen"))
    return StaleBuffer(
        messages,
        None if sent is None else CodecState(sent),
        None if seen is None else CodecState(seen),
        here(state["mean"]),
        (plan, state["width"], state["dtype"]),
        state["since"],
    )


def mark(nodes: Rows) -> dict[str, Any]:
    """Returns what tells one rank of a grid and a partition from others."""
    owners = nodes.partition
    grid = list(nodes.mesh.grid)
    digest = None if owners is None else owners.digest()
    return {"rank": nodes.mesh.rank, "grid": grid, "owners": digest}


def solved(pace: RateScheduler, asked: Any) -> dict[str, float] | None:
    """Returns what was solved for, where a budget was given."""
    if not isinstance(asked, Budget) or isinstance(pace.schedule, Budget):
        return None
    if isinstance(pace.schedule, Ramp):
        return {"slope": pace.schedule.slope, "c_max": pace.schedule.c_max}
    return {"c": pace.rate}


def read_solved(state: Mapping[str, Any] | None, asked: Any) -> Any:
    """Returns the schedule that was solved for."""
    if state is None or not isinstance(asked, Budget):
        return asked
    return (
        Fixed(state["c"]) if "c" in state else dataclasses.replace(asked.ramp, **state)
    )
