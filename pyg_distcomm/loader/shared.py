"""Shares one copy of a graph in memory among all ranks of a host."""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import pickle
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage

from pyg_distcomm.comm.serialization import allowing
from pyg_distcomm.kernels.sample_ops import Relation
from pyg_distcomm.loader.notes import Notes, World, next_name
from pyg_distcomm.partition.atomic import torch_save
from pyg_distcomm.sampling.graph_source import read_topology, remember, store_of

CALLING = "All ranks have to call shared(), since one of each host loads the graph"
LOADING = (
    "All ranks have to call shared(), and the one that loads the graph is not done"
)
_SUPPORTED = (
    "shared() passes tensors, numbers, strings, lists and dicts to other ranks: delete other "
    "attributes first, or set them on each rank"
)
_MEMORY = Path("/dev/shm")  # a file system in memory, where there is one


def shared(
    source: Data | HeteroData | Callable[[], Any], folder: str | None = None
) -> Any:
    """Returns a graph that the ranks of one host hold in memory once.

    One rank of each host writes the graph to a file, its edges also in the form that
    the loaders sample from, and all map that file. It has no name (on Linux), so that
    nothing of it stays, however the ranks end. The memory of the host does not grow with
    its ranks if `source` is a function, since then only one rank of a host ever loads the
    graph:

        data = shared(lambda: Planetoid("data", "Cora")[0])

    Alone, it returns the graph as it is. Tensors may be written to; each rank then gets
    a copy of the pages it has changed.

    Args:
        source: a Data or HeteroData, or a function that returns one. All ranks must call.
        folder: where to write (default: memory if there is room, else the temporary
            folder). It has to be on a local disk, and hold the graph.

    Raises:
        TypeError: on all ranks, if a rank gives something else as `source`.
        RuntimeError: if the rank that loads fails; on all ranks, with its message.
        RankError: if it has shown no sign of life for the `timeout` of `pdc.init`. It may
            take longer than that to load.
    """
    world, problem = World.now(), _source_problem(source)
    if world.size == 1:
        if problem is not None:
            raise TypeError(problem)
        return _graph(source)
    hosts = Notes(world, next_name("shared()"))
    hosts.post({"host": socket.gethostname(), "problem": problem})
    notes = hosts.collect("find the ranks of its host", CALLING)
    for rank, note in enumerate(notes):
        if note["problem"] is not None:
            raise TypeError(f"rank {rank}: {note['problem']}")
    names = [note["host"] for note in notes]
    leader = names.index(names[world.rank])
    written, mapped = hosts.at("written"), hosts.at("mapped")
    file: Any = None
    try:
        if leader == world.rank:
            with written.heartbeat():
                file = _written(source, folder, written)
        else:
            written.post({})
        notes = written.collect("get the graph of its host", LOADING)
        _raise_first(notes)
        with _posting_errors(mapped):
            graph = _read(notes[leader]["file"])
            mapped.post({})
        _raise_first(mapped.collect("see its host's graph mapped", CALLING))
        return graph
    finally:
        if file is not None:
            with contextlib.suppress(OSError):  # of what a full disk did not take
                file.close()


@dataclass(frozen=True)
class _OnDisk:
    """Describes a memory-mapped array of the graph; each rank maps its file itself."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @staticmethod
    def of(array: np.ndarray) -> _OnDisk | torch.Tensor:
        """Returns the description of a mapped array; an array in memory as a tensor."""
        whole = isinstance(array.base, mmap.mmap)  # and not a slice of a mapped array
        if isinstance(array, np.memmap) and whole and array.flags.c_contiguous:
            return _OnDisk(
                str(array.filename), array.dtype.str, array.shape, array.offset
            )
        return torch.from_numpy(np.ascontiguousarray(array))

    def open(self) -> np.ndarray:
        """Maps the array, for reading."""
        return np.memmap(self.file, self.dtype, "r", self.offset, self.shape)


def _source_problem(source: Any) -> str | None:
    """Returns an error message for a source that is no graph and no function, or None."""
    if isinstance(source, (Data, HeteroData)) or callable(source):
        return None
    return (
        "shared takes a Data or HeteroData, or a function that returns one, got "
        f"{type(source).__name__}; pass dataset[0], or lambda: dataset[0]"
    )


def _graph(source: Any) -> Any:
    """Returns the graph, loaded if the source is a function (a Data is callable, too)."""
    graph = source if isinstance(source, (Data, HeteroData)) else source()
    if not isinstance(graph, (Data, HeteroData)):
        raise TypeError(
            "the function given to shared must return a Data or HeteroData, got "
            f"{type(graph).__name__}; return dataset[0]"
        )
    return graph


def _save(graph: Any, file: Any, folder: str) -> None:
    """Writes a graph; raises OSError with the folder and what to do if that fails."""
    try:
        torch_save(graph, file)
    except OSError as error:
        raise OSError(
            f"the graph cannot be written to {folder}: {error.strerror or error}; make room "
            "there, or give shared(..., folder=...) a local disk that holds the graph"
        ) from None


@contextlib.contextmanager
def _posting_errors(notes: Notes) -> Iterator[None]:
    """Posts the error of a block that else ends by posting this rank's note."""
    try:
        yield
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = found[1] if found else str(error).splitlines()[0]
        notes.post({"error": f"the graph holds {what}; {_SUPPORTED}"})
    except Exception as error:
        notes.post({"error": f"{type(error).__name__}: {error}"})


def _written(source: Any, folder: str | None, notes: Notes) -> Any:
    """Writes the graph and its topology, and posts the path of the file, or the error."""
    file = None
    with _posting_errors(notes):
        data = copy.copy(_graph(source))
        for store in data.stores:
            for name, value in list(store.items()):
                if isinstance(value, np.ndarray):
                    store[name] = _OnDisk.of(value)
        topology = read_topology(data)
        relations = list(
            zip(topology.edge_types, topology.graph.relations, strict=True)
        )
        folder = folder or _memory_folder(data) or tempfile.gettempdir()
        file, path = _unnamed_file(folder)
        _save((data, relations), file, folder)
        notes.post({"file": path})
    return file


def _unnamed_file(folder: str) -> tuple[Any, str]:
    """Opens an unnamed file, which ends with this process; returns a path to open it by."""
    if hasattr(os, "O_TMPFILE"):
        with contextlib.suppress(OSError):  # a file system that has no such files
            number = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            return os.fdopen(number, "w+b"), f"/proc/{os.getpid()}/fd/{number}"
    file = tempfile.NamedTemporaryFile(prefix="pyg_distcomm-", dir=folder)  # noqa: SIM115
    return file, file.name


def _raise_first(notes: list[dict[str, Any]]) -> None:
    """Raises the error of one rank on all ranks."""
    for rank, note in enumerate(notes):
        if "error" in note:
            raise RuntimeError(f"rank {rank} could not load the graph: {note['error']}")


def _read(file: str) -> Any:
    """Maps the graph in a file."""
    known = [*_classes(Data), *_classes(HeteroData), *_classes(BaseStorage)]
    known += [DataTensorAttr, DataEdgeAttr, Relation, _OnDisk]
    with allowing(known):
        data, relations = torch.load(file, mmap=True, weights_only=True)
    for store in data.stores:
        for name, value in list(store.items()):
            if isinstance(value, _OnDisk):
                store[name] = value.open()
    for edge_type, relation in relations:
        store = store_of(data, edge_type)
        if "edge_index" in store:
            remember(store.edge_index, data, edge_type, relation)
    return data


def _classes(base: Any) -> list[Any]:
    """Returns a class and its subclasses."""
    return [base, *(c for below in base.__subclasses__() for c in _classes(below))]


def _memory_folder(data: Data | HeteroData) -> str | None:
    """Returns the folder in memory if the graph fits in it four times; otherwise None."""
    size = sum(
        v.numel() * v.element_size()
        for store in data.stores
        for v in store.values()
        if isinstance(v, torch.Tensor)
    )
    try:
        return str(_MEMORY) if 4 * size < shutil.disk_usage(_MEMORY).free else None
    except OSError:
        return None
