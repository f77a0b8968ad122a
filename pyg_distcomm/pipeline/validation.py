"""Refuses what a pipeline cannot run, on all ranks alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.failure import RankError
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.pipeline.history_buffer import DTYPES
from pyg_distcomm.pipeline.layer_stack import StackLayer

ORDERS = ("shuffled", "fixed")
_PATIENCE = 10.0  # seconds for ranks that compute alike to fail alike
_KINDS = (TypeError, ValueError, NotImplementedError, RuntimeError)


@contextlib.contextmanager
def on_all_ranks(mesh: Mesh, exchanging: bool = False) -> Iterator[None]:
    """Raises on the ranks of all stages what one of them raises inside; collective.

    Args:
        mesh: the ranks.
        exchanging: whether ranks of a stage exchange rows inside: if one fails alone, those
            that wait for its rows are told after some seconds, as by `telling`.
    """
    problem: Exception | None = None
    axis, watch = mesh.everyone, mesh.everyone.watch
    before = watch.note() if exchanging and watch is not None else ""
    try:
        yield
    except Exception as error:
        if exchanging and watch is not None:
            if watch.note() != before:
                raise
            soon = replace(watch, deadline=min(_PATIENCE, watch.deadline))
            axis = replace(axis, watch=soon)
        problem = error
    near = next((k for k in _KINDS if isinstance(problem, k)), RuntimeError)
    try:
        kinds = collectives.all_gather_object(near if problem else None, axis)
    except RankError:
        if problem is None or watch is None:
            raise
        watch.report(problem)
        raise problem from None
    kind = next((k for k in kinds if k is not None), ValueError)
    try:
        collectives.agree(
            None if problem is None else str(problem), mesh.everyone, kind
        )
    except kind as told:
        raise told from problem


@contextlib.contextmanager
def telling(mesh: Mesh) -> Iterator[None]:
    """Lets the other ranks know if this one fails: they wait for what will not come."""
    try:
        yield
    except Exception as error:
        watch = mesh.everyone.watch
        if watch is not None:
            watch.report(error)
            if mesh.stage.size > 1:
                watch.ended = f"{type(error).__name__}: {error}"
        raise


def check_alive(mesh: Mesh) -> None:
    """Refuses a mesh whose stages were torn from a step, and wait for one another."""
    watch = mesh.everyone.watch
    if watch is not None and watch.ended:
        raise RankError(
            "a step has failed on this mesh, and what its stages sent one another is lost; "
            "make mesh, data and pipeline anew, and load what was saved. It failed with "
            f"{watch.ended}"
        )


def check_same(
    stack: Sequence[StackLayer], mesh: Mesh, options: dict[str, Any]
) -> None:
    """Refuses layers and options that differ between ranks."""
    told = [f"{name}={value}" for name, value in options.items()]
    told += [_told(layer) for layer in stack]
    every = collectives.all_gather_object(told, mesh.everyone)
    differ = [rank for rank, other in enumerate(every) if other != every[0]]
    if differ:
        pairs = zip(every[0], every[differ[0]], strict=False)
        first = next(
            (f"{a}, and there {b}" for a, b in pairs if a != b), "their number"
        )
        raise ValueError(
            "Pipeline needs the same layers and options on all ranks, but ranks "
            f"{differ} have others than rank 0: {first}"
        )


def _told(layer: StackLayer) -> str:
    run = layer.run
    parameters = run.parameters() if isinstance(run, torch.nn.Module) else ()
    return f"{layer} {[tuple(p.shape) for p in parameters]}"


def check_share(data: Any, mesh: Mesh) -> DistEdgeIndex:
    """Returns the edges of a share, or says what it should have been."""
    edge_index = getattr(data, "edge_index", None)
    if not isinstance(edge_index, DistEdgeIndex):
        raise TypeError(
            f"a pipeline trains on a share of pdc.partition(data, mesh), got "
            f"{type(data).__name__} with an edge_index of {type(edge_index).__name__}"
        )
    if edge_index.nodes.mesh is not mesh:
        raise ValueError(
            f"the Data is spread over {edge_index.nodes.mesh}, the pipeline over {mesh}; "
            "partition it over the mesh of the pipeline"
        )
    link = edge_index.topology.link
    if link is not None and not link.exact_eval:
        raise ValueError(
            "a pipeline evaluates exactly, in one pass over the whole graph, but its data "
            "have a link with exact_eval=False; make the link without"
        )
    return edge_index


def check_known(data: Any, topology: Topology) -> DistEdgeIndex:
    """Returns the edges of a share, if they are those that a pipeline was planned for."""
    edge_index = data.edge_index
    if not isinstance(edge_index, DistEdgeIndex) or (
        edge_index.topology.source_gid is not topology.source_gid
    ):
        raise ValueError(
            "this Data is not the one that the pipeline was planned for; make another "
            "Pipeline for another graph"
        )
    return edge_index


def check_untied(stack: Sequence[StackLayer], balance: Sequence[int]) -> None:
    """Refuses a parameter of two stages."""
    homes: dict[int, tuple[int, StackLayer]] = {}
    stages = [s for s, count in enumerate(balance) for _ in range(count)]
    for stage, layer in zip(stages, stack, strict=True):
        if not isinstance(layer.run, torch.nn.Module):
            continue
        for parameter in layer.run.parameters():
            home, first = homes.setdefault(id(parameter), (stage, layer))
            if home != stage:
                raise ValueError(
                    f"{first} and {layer} share a parameter, but are in stages {home} and "
                    f"{stage}; give balance=[...] so that both are in one"
                )


def check_links(stack: Sequence[StackLayer]) -> None:
    """Refuses a link of a layer: that of the data holds for all exchanges of a stage."""
    for layer in stack:
        parts = layer.run.modules() if isinstance(layer.run, torch.nn.Module) else ()
        if any(isinstance(getattr(part, "link", None), LinkPolicy) for part in parts):
            raise ValueError(
                f"{layer} has a link of its own, but a pipeline exchanges chunk by chunk; "
                "give the link to pdc.partition(data, mesh, link=...), and leave it out of "
                "the layer, or give that link='exact'"
            )


def check_options(
    mesh: Mesh, order: str, whole: dict[str, Any], seed: Any, history_dtype: Any
) -> None:
    """Refuses options that mean nothing.

    Args:
        mesh: the ranks.
        order: of chunks.
        whole: by name, what must be a whole number if it is a number.
        seed: of what is drawn.
        history_dtype: how history is kept.
    """
    if order not in ORDERS:
        raise ValueError(f"order={order!r} must be one of {', '.join(ORDERS)}")
    for name, value in whole.items():
        if name == "chunks" and not isinstance(value, (int, float, str)):
            continue  # the chunk of each node
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    if not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    if history_dtype not in DTYPES:
        raise ValueError(
            f"history_dtype must be one of {', '.join(map(str, DTYPES))}, got "
            f"{history_dtype}"
        )
    if mesh.grid[1:] != (1, 1):
        raise ValueError(
            f"the stages of a pipeline have rows only, but the mesh is {mesh.grid}; use "
            "pdc.init('1d', stages=S)"
        )


def check_balance(
    stack: Sequence[StackLayer], stages: int, balance: Any
) -> list[int] | None:
    """Refuses more stages than layers, and layers that do not add up."""
    if stages > len(stack):
        raise ValueError(
            f"there are {stages} stages and {len(stack)} layers; a stage has at least one: "
            f"give stages={len(stack)} or fewer to pdc.init, or more layers"
        )
    if balance is None:
        return None
    given = list(balance) if isinstance(balance, Iterable) else []
    fits = len(given) == stages and sum(given) == len(stack)
    if not fits or any(n < 1 or n != int(n) for n in given):
        raise ValueError(
            f"balance={balance} must give each of {stages} stages one layer or more, as a "
            f"list of numbers, and {len(stack)} in all"
        )
    return [int(n) for n in given]
