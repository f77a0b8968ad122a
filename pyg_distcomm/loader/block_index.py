"""Shards: the rows of one group of a feature store that are on this rank."""

from __future__ import annotations

import contextlib
import math
import os
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm import kernels
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.process_grid import ProcessGrid
from pyg_distcomm.partition.arrays import dtype_name, read_array, write_array
from pyg_distcomm.partition.layout import file_name

Values = Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class Index:
    """Which ids are in a block, and where.

    Args:
        gid: ids of the rows here, `[m]`, ascending.
        total: ids lie in [0, total).
    """

    gid: Tensor
    total: int

    def __len__(self) -> int:
        return len(self.gid)

    def none(self) -> Index:
        """Returns the index of no ids."""
        return Index(self.gid[:0], self.total)

    @cached_property
    def _find(self) -> Callable[[Tensor], Tensor]:
        return kernels.rank_select_index(self.gid, self.total)

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where ids stand, `[k]`, and whether they do; elsewhere the place is 0."""
        if not len(self.gid):
            return torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        first, last = int(self.gid[0]), int(self.gid[-1])
        if last - first + 1 == len(self.gid):
            place = ids - first
            here = (place >= 0) & (place < len(self.gid))
        else:
            place = self._find(ids)
            here = place >= 0
        return place.masked_fill_(~here, 0), here


def width_of(values: Tensor) -> int:
    """Returns the numbers of one row."""
    return math.prod(values.shape[1:])


def words_of(values: Tensor) -> Tensor:
    """Returns contiguous rows as whole words, `[m, w]`: what kernels copy fastest."""
    size, begin = values.element_size(), values.storage_offset()
    width = width_of(values) * size
    word = next(w for w in (8, 4, 1) if width % w == begin * size % w == 0)
    kind = {8: torch.float64, 4: torch.float32, 1: torch.uint8}[word]
    return _as_words(values, kind)


def _as_words(values: Tensor, kind: torch.dtype) -> Tensor:
    # flat first: the stride of a single row may be anything
    width = width_of(values) * values.element_size() // kind.itemsize
    return values.view(-1).view(torch.uint8).view(kind).view(len(values), width)


def take_rows(values: Tensor, place: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns `values[place]` `[k, ...]`, in contiguous `out` if given."""
    if out is None:
        out = values.new_empty((len(place), *values.shape[1:]))
    if out.numel():
        words = words_of(values)
        kernels.gather_rows(words, place, _as_words(out, words.dtype))
    return out


def gather_block(
    values: Tensor, counts: list[int], order: Tensor | None, channel: ProcessGrid
) -> Tensor:
    """Returns the rows of a block from what its c ranks own; collective over them.

    Shapes: values `[counts[rank], ...]`, order `[m]` sorts the ranks' rows by id
    (None leaves them), return `[m, ...]`.
    Price: (m - counts[rank]) rows, as bytes.
    """
    if len(counts) == 1:
        return values if order is None else take_rows(values, order)
    flat = values.contiguous().view(len(values), width_of(values)).view(torch.uint8)
    every = collectives.all_gather_rows(flat, counts, channel.col, "build")
    every = every.view(-1).view(values.dtype).view(sum(counts), *values.shape[1:])
    return every if order is None else take_rows(every, order)


def as_rows(values: Any) -> Tensor:
    """Returns rows as a contiguous tensor on the CPU; a mapped file stays one.

    Raises:
        TypeError: unless they are a dense tensor or array of numbers with rows.
    """
    if isinstance(values, np.ndarray):
        with (
            warnings.catch_warnings()
        ):  # of memory that may not be written: nobody does
            warnings.simplefilter("ignore", UserWarning)
            values = torch.from_numpy(values)
    if not isinstance(values, Tensor) or values.layout != torch.strided:
        raise TypeError(
            f"an attribute must be a dense tensor or array, got {type(values).__name__}"
        )
    if values.dim() == 0:
        raise TypeError("an attribute must have rows, got a single number")
    return values.detach().cpu().contiguous()


def on_disk(
    values: Tensor, folder: Path, kind: str, name: str, channel: ProcessGrid
) -> Tensor:
    """Writes rows to a .npy file, aside and renamed, and maps them; collective.

    Raises:
        ValueError: on all ranks, if one cannot write its file; none then replaces its own.
    """
    path = folder / file_name(kind, name)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    problem = None
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_array(aside, values)
        except OSError as error:
            problem = _unwritten(path, error)
        collectives.agree(problem, channel.world)
        try:
            os.replace(aside, path)
        except OSError as error:
            problem = _unwritten(path, error)
        collectives.agree(problem, channel.world)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    return read_array(path, dtype_name(values.dtype), list(values.shape))


def _unwritten(path: Path, error: OSError) -> str:
    return (
        f"the feature store cannot write its rows to {path}: {error.strerror or error}; make "
        "room or allow writing there, give another folder, or leave folder out"
    )
