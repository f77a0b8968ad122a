"""Fetches the source rows of a layer over its link, coded or late.

A link is not its own adjoint, so that it takes the place of the exchange in `x[ids]` where
the layer reads source rows: in `_index_select`, which `propagate` calls. All else is PyG's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.halo.halo import NAMES, exchange
from pyg_distcomm.nn.layer_context import LayerContext
from pyg_distcomm.nn.message_forms import check_aggregations, is_coded, layers_of
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.ids import ids_of


@contextlib.contextmanager
def exchanging(conv: Any, context: LayerContext) -> Iterator[None]:
    """Fetches source rows by the link of a layer's call in a block; collective."""
    layers = layers_of(conv)
    if context.is_coded and context.link is not None:
        check_aggregations(layers, context.link)
    call = context.exchange()
    if call is None and not context.topology.chunked:
        yield
        return
    visit = _ChunkVisit(context) if context.topology.chunked else _Visit(call)
    for layer in layers:
        vars(layer).update(visit.stand_ins(layer))
    try:
        yield
    finally:
        for layer in layers:
            for name in _STAND_INS:
                vars(layer).pop(name, None)


def keeps_rows(layer: Any) -> bool:
    """Tells whether a layer caches propagated rows, as SGConv and SSGConv may."""
    names = vars(layer)
    return bool(names.get("cached")) and ("_cached_x" in names or "_cached_h" in names)


_STAND_INS = "propagate", "edge_updater", "_index_select"


class _Visit:
    """Holds one call of a layer: which rows it has fetched."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.now: tuple[str, dict[str, Any]] = "", {}
        self.coded = 0
        self.fetched: list[tuple[Any, Any, Tensor]] = []

    def stand_ins(self, layer: Any) -> dict[str, Callable[..., Any]]:
        """Returns what takes the place of methods of a layer."""
        plain = layer._index_select

        def noting(verb: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def call(edge_index: Any, size: Any = None, **given: Any) -> Any:
                self.now = verb, given
                return run(edge_index, size=size, **given)

            return call

        return {
            "propagate": noting("propagate", layer.propagate),
            "edge_updater": noting("edge_updater", layer.edge_updater),
            "_index_select": lambda src, index: self.select(layer, plain, src, index),
        }

    def select(
        self, layer: Any, plain: Callable[..., Tensor], src: Any, index: Any
    ) -> Tensor:
        """Returns the rows of `src` at ids, those of other ranks over the link."""
        spread = type(src) is DistTensor and type(index) is DistTensor
        ids = ids_of(index) if spread and src.dim_ == 0 else None
        plan = None if ids is None else ids.exchange(src.rows)
        if plan is None or plan.halo.silent:
            return plain(src, index)
        assert ids is not None
        table = self._table(layer, src, plan)
        return DistTensor.from_local(table.index_select(0, plan.slot), ids.rows)

    def _table(self, layer: Any, src: Any, plan: Any) -> Tensor:
        """Returns own rows and ghosts."""
        for known, of, table in self.fetched:
            if known is src and of is plan.halo:
                return table
        verb, given = self.now
        name = next((k for k, v in given.items() if _holds(v, src)), "")
        local = src.to_local().contiguous()
        coded = is_coded(layer, verb, name, local)
        call = self.call if coded else self.call.as_exact("attention depends on it")
        link = call.wrap(plan.halo, len(NAMES) + self.coded)
        self.coded += 1
        flat = local.unsqueeze(1) if local.dim() == 1 else local
        table = torch.cat([flat, exchange(flat, link)])
        table = table.squeeze(1) if local.dim() == 1 else table
        if not coded:
            self.fetched.append((src, plan.halo, table))
        return table


class _ChunkVisit(_Visit):
    """Reads source rows of a chunk of a pipeline, each once; see `pipeline/chunk_graph.py`."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__(None)
        self.here = context.topology.locals

    def select(
        self, layer: Any, plain: Callable[..., Tensor], src: Any, index: Any
    ) -> Tensor:
        """Returns the rows of `src` at ids, those of other chunks from a site."""
        spread = type(src) is DistTensor and type(index) is DistTensor
        ids = ids_of(index) if spread and src.dim_ == 0 else None
        if ids is None or ids.end != 0:
            return plain(src, index)
        table = self._table(layer, src, None)
        return DistTensor.from_local(table.index_select(0, ids.local), ids.rows)

    def _table(self, layer: Any, src: Any, plan: Any) -> Tensor:
        for known, _, table in self.fetched:
            if known is src:
                return table
        table = self.here.with_ghosts(src.to_local().contiguous())
        self.fetched.append((src, None, table))
        return table


def _holds(value: Any, src: Any) -> bool:
    return value is src or (
        isinstance(value, (tuple, list)) and any(v is src for v in value)
    )
