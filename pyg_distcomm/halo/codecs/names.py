"""Codecs by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs.plain import Cast, Plain
from pyg_distcomm.halo.codecs.quantise import Quantise

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
        ValueError: for another name; it lists those there are.
    """
    if wire is None:
        return Plain()
    if isinstance(wire, Codec):
        return wire
    if wire not in CODECS:
        raise ValueError(
            f"wire={wire!r} is not known; choose one of {', '.join(CODECS)}, a Codec, or "
            "None to send rows as they are"
        )
    return CODECS[wire]
