"""Writes rows on the wire: plain, rounded, masked, sparse, and compositions of these."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from pyg_distcomm.halo.codec import Codec as Codec
from pyg_distcomm.halo.codec import CodecState as CodecState
from pyg_distcomm.halo.codec import RngKey as RngKey
from pyg_distcomm.halo.codec import fresh_state as fresh_state
from pyg_distcomm.halo.codecs.composed import Chain as Chain
from pyg_distcomm.halo.codecs.composed import Residual as Residual
from pyg_distcomm.halo.codecs.graded import DegreeBits as DegreeBits
from pyg_distcomm.halo.codecs.graded import RangeBits as RangeBits
from pyg_distcomm.halo.codecs.mask import ColumnMask as ColumnMask
from pyg_distcomm.halo.codecs.mask import RowSample as RowSample
from pyg_distcomm.halo.codecs.quantise import Cast as Cast
from pyg_distcomm.halo.codecs.quantise import Plain as Plain
from pyg_distcomm.halo.codecs.quantise import Quantise as Quantise
from pyg_distcomm.halo.codecs.sparse import Bitmap as Bitmap
from pyg_distcomm.halo.codecs.sparse import TopK as TopK

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "fp16": Cast(torch.float16),
        "bf16": Cast(torch.bfloat16),
        "int8": Quantise(8, strict=False),
    }
)


def codec_of(wire: str | Codec | None) -> Codec:
    """Returns the codec of a name; None is `Plain`.

    Raises:
        ValueError: for an unknown name; it lists the known ones.
    """
    if wire is None:
        return Plain()
    if isinstance(wire, Codec):
        return wire
    if wire not in CODECS:
        raise ValueError(
            f"wire={wire!r} is not known; choose one of {', '.join(CODECS)}, a Codec, or "
            "None to send rows unchanged"
        )
    return CODECS[wire]
