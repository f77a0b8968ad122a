"""Holds what this process changes while it runs, in one object, and its logger."""

from __future__ import annotations

import collections
import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary


@dataclass(eq=False)
class ProcessState:
    """Lists everything that modules above the kernels keep for the process.

    Args:
        recorder: of the trace under way; None where there is none.
        monitors: the failure monitors of meshes in use.
        answering: the thread that answers where this rank is; None before there are ranks.
        works: collectives begun that perhaps nobody waits for.
        messages: messages under way between two ranks.
        inboxes: what threads without work listen to.
        mesh: refers to the mesh that `init` made last.
        collected: axes of meshes that nobody holds any more, to be closed.
        refused: rows sent from devices that may turn out not to be finite.
        loaders: kinds of loaders built, and keys of epochs begun, in order.
        stores: feature stores made for a share, by its edges.
        topologies: what samplers have built for an edge_index.
        adjacencies: the CSR forms of edge_index tensors that layers have met.
        minibatches: what samplers know of minibatches that may yet move to a device.
        hops: how many hops of a minibatch layers on a device have asked for; -1 before.
        routes: how learnable rows travel to the node ids of a minibatch.
        plain_edges: refers to the edge_index that a layer got last, where it was plain.
        watches_optimizers: whether steps of optimizers are looked at for learnable rows.
        watches_steps: whether steps of optimizers are recorded while loaders deal batches.
        dealing: what compares the steps of loaders whose epochs are under way.
        steps: what is known of optimizers that have stepped in such epochs.
        ordered: the classes of shares, by the class that each lists in order.
        warned: what has been warned of, and is not again.
        in_files: where arrays of ids begin that are mapped from files.
        rules: how tensors that are sharded below autograd compute each op of torch.
        op: the op that they compute now.
    """

    recorder: Any = None
    monitors: Any = field(default_factory=weakref.WeakSet)
    answering: Any = None
    works: set[Any] = field(default_factory=set)
    messages: set[Any] = field(default_factory=set)
    inboxes: list[Any] = field(default_factory=list)
    mesh: Any = None
    collected: list[Any] = field(default_factory=list)
    refused: Any = field(default_factory=collections.deque)
    loaders: list[tuple[str, str]] = field(default_factory=list)
    stores: Any = field(default_factory=WeakIdKeyDictionary)
    topologies: Any = field(default_factory=WeakTensorKeyDictionary)
    adjacencies: Any = field(default_factory=WeakTensorKeyDictionary)
    minibatches: Any = field(default_factory=WeakIdKeyDictionary)
    hops: int = -1
    routes: Any = field(default_factory=WeakTensorKeyDictionary)
    plain_edges: Any = field(default_factory=weakref.WeakKeyDictionary)
    watches_optimizers: bool = False
    watches_steps: bool = False
    dealing: Any = field(default_factory=weakref.WeakSet)
    steps: Any = field(default_factory=weakref.WeakKeyDictionary)
    ordered: dict[Any, Any] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    in_files: set[int] = field(default_factory=set)
    rules: dict[Any, Any] = field(default_factory=dict)
    op: Any = None


PROCESS = ProcessState()
LOG = logging.getLogger("pyg_distcomm")
LOG.addHandler(logging.NullHandler())


def tell(rank: int, text: str, *values: Any) -> None:
    """Logs what happened on a rank: as INFO on rank 0, and as DEBUG on others."""
    LOG.log(logging.DEBUG if rank else logging.INFO, f"rank {rank}: {text}", *values)
