"""Cuts graphs by libraries that need not be installed, and by functions that users register."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_distcomm import plugins
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.process import PROCESS

Csr = tuple[np.ndarray, np.ndarray]


def kahip(csr: Csr, num_parts: int, *, seed: int, balance: float) -> np.ndarray:
    """Cuts with KaHIP, social-network configuration "eco", which lowers the edge cut.

    Takes links both ways (`symmetric_csr`); evens out nodes alone.

    Raises:
        ValueError: if kahip is not installed, or the links do not fit 32 bits.
    """
    library = _library("kahip", "kahip")
    indptr, indices = csr
    if indices.size > np.iinfo(np.int32).max:
        raise ValueError(
            f"{indices.size} links are too many for kahip, which counts in int32; cut with "
            "method='ldg' or 'stream'"
        )
    nodes, links = [1] * (indptr.size - 1), [1] * indices.size
    # its interface takes lists, which cost about 36 bytes a link meanwhile
    matrix = nodes, indptr.tolist(), links, indices.tolist()
    _, parts = library.kaffpa(
        *matrix, num_parts, balance - 1, True, seed, library.ECOSOCIAL
    )
    return np.array(parts, np.int64)


def mtkahypar(csr: Csr, num_parts: int, *, seed: int, balance: float) -> np.ndarray:
    """Cuts with Mt-KaHyPar, as a hypergraph: lowers the rows that ranks exchange.

    Net v holds v and the nodes that read its row, so that the connectivity objective

        sum over nets of (parts they reach - 1)

    is the number of ghosts, `PartitionReport.volume`, where an edge cut only bounds it.
    Evens out nodes alone. The deterministic configuration, one thread.

    Raises:
        ValueError: if mtkahypar is not installed.
    """
    library = _library("mtkahypar", "mtkahypar")
    if PROCESS.mtkahypar is None:  # it may be initialised once
        PROCESS.mtkahypar = library.initialize(1)
    context = PROCESS.mtkahypar.context_from_preset(library.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(num_parts, balance - 1, library.Objective.KM1)
    context.logging = False
    library.set_seed(seed)
    indptr, indices = csr
    rows = np.split(indices, indptr[1:-1])
    nets = [[v, *row.tolist()] for v, row in enumerate(rows) if row.size]
    graph = PROCESS.mtkahypar.create_hypergraph(
        context, indptr.size - 1, len(nets), nets
    )
    found = graph.partition(context)
    return np.fromiter((found.block_id(v) for v in range(indptr.size - 1)), np.int64)


LIBRARIES: Mapping[str, Callable[..., np.ndarray]] = MappingProxyType(
    {"kahip": kahip, "mtkahypar": mtkahypar}
)


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(
            f"method {name!r} needs {name}: pip install 'pyg-distcomm[{extra}]'; or cut with "
            "method='metis' or 'ldg'"
        ) from None


def registered_cut(
    name: str,
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    *,
    seed: int,
    train_mask: Tensor | None,
) -> Partition:
    """Cuts with a function registered in the group "pyg_distcomm.cutters".

        cutter(edge_index, num_nodes, num_parts, *, seed, train_mask) -> owner

    of edge_index [2, num_edges] int64, and train_mask [num_nodes] bool or None; it returns
    the part of each node [num_nodes], as a tensor, an array or a list.

    Raises:
        ValueError: if it fails, or what it returns is no partition; it names the cutter.
    """
    function = plugins.load(plugins.CUTTERS, name)
    try:
        owner = function(
            edge_index.to(torch.int64),
            num_nodes,
            num_parts,
            seed=seed,
            train_mask=train_mask,
        )
        return Partition.from_owner(torch.as_tensor(owner), num_parts, num_nodes)
    except Exception as error:
        raise ValueError(
            f"the registered cutter {name!r} failed: {type(error).__name__}: {error}"
        ) from error
