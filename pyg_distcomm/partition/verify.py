"""Whether a partition folder is whole: every file, every node, every edge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from pyg_distcomm.partition.folder import (
    PartShare,
    open_part,
    read_partition,
    wrong_ids,
)
from pyg_distcomm.partition.layout import check_file, folder_meta, part_name
from pyg_distcomm.partition.schema import Meta


def verify_folder(folder: str | Path, *, checksums: bool = True) -> list[str]:
    """Lists what is wrong with a partition folder, naming the file; empty when whole.

    Looks at lengths, dtypes and shapes; that the parts own every node once, in
    ascending order, and hold every edge once, with its target; and, on demand, at the
    sha256 of each file. Needs num_edges bytes and a part's indices in memory.
    """
    folder = Path(folder)
    try:
        meta = folder_meta(folder)
    except ValueError as error:
        return [str(error)]
    problems = _wrong_files(folder, meta, checksums)
    return problems or _inconsistencies(folder, meta)


def _wrong_files(folder: Path, meta: Meta, checksums: bool) -> list[str]:
    problems = []
    for name in tqdm(meta["files"], "checking files", disable=None, leave=False):
        try:
            check_file(folder, meta, name, "checksums" if checksums else "sizes")
        except ValueError as error:
            problems.append(str(error))
    return problems


def _inconsistencies(folder: Path, meta: Meta) -> list[str]:
    problems: list[str] = []
    seen = torch.zeros(meta["num_edges"], dtype=torch.bool)
    try:
        if read_partition(folder, meta).digest() != meta["partition"]:
            problems.append(f"{folder / 'owner.npy'}: not the partition of META.json")
        for part in range(meta["num_parts"]):
            share = open_part(folder, meta, part)
            problems += _wrong_part(share, folder / part_name(part), seen)
    except ValueError as error:
        return [*problems, str(error)]
    return problems


def _wrong_part(share: PartShare, here: Path, seen: Tensor) -> Iterator[str]:
    """Yields what is wrong with one part; marks its edges in `seen`."""
    problems = list(wrong_ids(share, here))
    yield from problems
    if not any("out of range" in problem for problem in problems):
        if bool(seen[share.edge_gid].any()):
            yield f"{here / 'edge_gid.npy'}: an edge is held by an earlier part too"
        seen[share.edge_gid] = True
