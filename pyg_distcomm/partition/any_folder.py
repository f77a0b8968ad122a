"""Opens a folder of parts, whoever wrote it: this package, PyG's Partitioner or DGL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pyg_distcomm.partition.dgl_folder import (
    dgl_folder_meta,
    is_dgl_folder,
    read_dgl_folder,
    read_dgl_partition,
)
from pyg_distcomm.partition.folder import read_part
from pyg_distcomm.partition.layout import META, Verify, folder_meta
from pyg_distcomm.partition.part_share import PartShare
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.partition.pyg_folder import (
    is_pyg_folder,
    read_pyg_folder,
    read_pyg_partition,
)


@dataclass(frozen=True)
class AnyFolder:
    """Tells how the parts of a folder are read.

    Args:
        about: the file that describes them.
        num_parts: how many there are.
        read: reads one, by its number.
        writer: of another library, by its name; None for a folder of this package.
        partition: where another library wrote it; else each part holds it.
    """

    about: Path
    num_parts: int
    read: Callable[[int], PartShare]
    writer: str | None = None
    partition: Partition | None = None


def open_foreign(folder: str | Path) -> AnyFolder | None:
    """Opens a folder, or DGL's .json file, of another library; None if it is none.

    Raises:
        ValueError: naming the file that is damaged.
    """
    place = Path(folder)
    if is_dgl_folder(place):
        writer, partition = "dgl.distributed.partition_graph", read_dgl_partition(place)
        about, of_dgl = dgl_folder_meta(place)[0], partial(read_dgl_folder, place)
        return AnyFolder(about, partition.num_parts, of_dgl, writer, partition)
    if is_pyg_folder(place):
        writer = "torch_geometric.distributed.Partitioner"
        partition, of_pyg = read_pyg_partition(place), partial(read_pyg_folder, place)
        return AnyFolder(place / META, partition.num_parts, of_pyg, writer, partition)
    return None


def open_folder(folder: str | Path, verify: Verify = "checksums") -> AnyFolder:
    """Finds out who wrote a folder; no part is read yet.

    Args:
        folder: the folder, or DGL's .json file.
        verify: as `read_part` has it; of folders of this package.

    Raises:
        ValueError: naming the file that is missing or damaged.
    """
    place, foreign = Path(folder), open_foreign(folder)
    if foreign is not None:
        return foreign
    own = partial(read_part, place, verify=verify)
    return AnyFolder(place / META, int(folder_meta(place)["num_parts"]), own)
