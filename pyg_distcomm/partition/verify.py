"""Whether a partition folder is whole: every file, every node, every edge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from pyg_distcomm.partition.folder import PartShare, read_part, read_partition
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
            share = read_part(folder, part, verify="sizes")
            problems += _wrong_part(share, folder / part_name(part), seen)
    except ValueError as error:
        return [*problems, str(error)]
    return problems


def _wrong_part(share: PartShare, here: Path, seen: Tensor) -> Iterator[str]:
    """Yields what is wrong with one part; marks its edges in `seen`."""
    partition, part = share.partition, share.part
    if not torch.equal(share.node_gid, partition.gids(part)):
        yield f"{here / 'node_gid.npy'}: not the nodes that owner.npy gives to {part}"
    yield from _wrong_edge_gids(share, here, seen)
    if not _within(share.edge_index, partition.num_nodes):
        yield f"{here / 'edge_index.npy'}: a node id is out of range"
    elif bool((partition.owner_of(share.edge_index[1]) != part).any()):
        yield f"{here / 'edge_index.npy'}: a target is owned by another part"


def _wrong_edge_gids(share: PartShare, here: Path, seen: Tensor) -> Iterator[str]:
    path, edge_gid = here / "edge_gid.npy", share.edge_gid
    if not _within(edge_gid, seen.numel()):
        yield f"{path}: an edge id is out of range"
        return
    if bool((edge_gid.diff() <= 0).any()):
        yield f"{path}: edge ids do not ascend"
    if bool(seen[edge_gid].any()):
        yield f"{path}: an edge is held by an earlier part too"
    seen[edge_gid] = True


def _within(ids: Tensor, count: int) -> bool:
    if ids.numel() == 0:
        return True
    low, high = torch.aminmax(ids)
    return int(low) >= 0 and int(high) < count
