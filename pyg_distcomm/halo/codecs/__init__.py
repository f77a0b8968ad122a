"""Writes rows on the wire: plain, rounded, masked, sparse, and compositions of these."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from pyg_distcomm import plugins
from pyg_distcomm.halo.codec import Codec as Codec
from pyg_distcomm.halo.codec import Quantise as Quantise
from pyg_distcomm.halo.codec import RngKey as RngKey
from pyg_distcomm.halo.codecs.quantise import Cast as Cast
from pyg_distcomm.halo.codecs.quantise import DegreeBits as DegreeBits
from pyg_distcomm.halo.codecs.quantise import Plain as Plain
from pyg_distcomm.halo.codecs.quantise import RangeBits as RangeBits
from pyg_distcomm.halo.codecs.sparse import Chain as Chain
from pyg_distcomm.halo.codecs.sparse import ColumnMask as ColumnMask
from pyg_distcomm.halo.codecs.sparse import RowSample as RowSample

__all__ = [
    "CODECS",
    "Cast",
    "Chain",
    "Codec",
    "ColumnMask",
    "DegreeBits",
    "Plain",
    "Quantise",
    "RangeBits",
    "RngKey",
    "RowSample",
    "codec_of",
    "known_codecs",
]

CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "fp16": Cast(torch.float16),
        "bf16": Cast(torch.bfloat16),
        "int8": Quantise(8, strict=False),
    }
)


def known_codecs() -> tuple[str, ...]:
    """Returns the names of all codecs, including those that other packages register."""
    more = plugins.registered(plugins.CODECS)
    return (*CODECS, *(name for name in more if name not in CODECS))


def codec_of(wire: str | Codec | None) -> Codec:
    """Returns the codec of a name; None is `Plain`.

    A name in the entry point group "pyg_distcomm.codecs" must refer to a Codec, or to a
    class or function that returns one when called without arguments.

    Raises:
        ValueError: for an unknown name, listing the known ones, and for a registered one
            that does not give a Codec.
    """
    if wire is None:
        return Plain()
    if isinstance(wire, Codec):
        return wire
    if wire in CODECS:
        return CODECS[wire]
    if wire not in known_codecs():
        raise ValueError(
            f"codec {wire!r} is not known; choose one of {', '.join(known_codecs())}, a "
            "Codec, or Plain() to send rows unchanged"
        )
    found = plugins.load(plugins.CODECS, wire)
    try:
        codec = found if isinstance(found, Codec) else found()
    except Exception as error:
        raise ValueError(
            f"the registered codec {wire!r} failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(codec, Codec):
        raise ValueError(
            f"the registered codec {wire!r} gave {codec!r}; wanted a Codec, or a function "
            "that returns one"
        )
    return codec
