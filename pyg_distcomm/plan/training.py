"""Describes the products with the graph, and the sums over ranks, of an epoch of a model."""

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCN2Conv, GCNConv, SAGEConv

from pyg_distcomm.comm.collectives import ring_words
from pyg_distcomm.graph.product_cache import MultiplyOrder
from pyg_distcomm.plan.model_profile import (
    Round,
    is_layer,
    visited,
)

INPUTS = ("constant", "changing", "trained")
KINDS: dict[str, Any] = {"gcn": GCNConv, "sage": SAGEConv}
LOSS_WORDS = 2  # a mean is a sum and a count


@dataclass(frozen=True)
class LayerShape:
    """One layer: X' = A X W and the like, or rows of X brought to where edges end.

    Args:
        kind: "gcn", "sage" (mean and sum), or "halo": any other, run by `HaloConv`.
        width_in, width_out: features that go in and come out.
        fresh: whether it multiplies by what it computes of its input.
        is_feature: whether its input is the features themselves.
        needs_gradient: whether a gradient goes on to its input.
        trains: whether the weights that an order could put before the product do.
        rounds: of "halo", the rows it exchanges.
    """

    kind: str
    width_in: int
    width_out: int
    fresh: bool
    is_feature: bool
    needs_gradient: bool
    trains: bool
    rounds: tuple[Round, ...] = ()


@dataclass(frozen=True)
class ProductShape:
    """One application of the graph: its width, its direction, and how it travels.

    Args:
        layer: the number of its layer.
        width: features.
        transposed: whether it is one of the backward pass.
        halo: whether rows travel alone, as `HaloConv` has it.
    """

    layer: int
    width: int
    transposed: bool
    halo: bool = False


@dataclass(frozen=True)
class Training:
    """A full-graph epoch: forward, a mean loss, backward, and a sum of gradients.

    Args:
        layers: in order.
        parameters: how many numbers train.
        inputs: "constant" features, "changing" ones (made by dropout, say), or ones that
            are "trained".
        itemsize: bytes of a number.
        norms: how wide each sum of a batch norm is, forward and backward, and each sum of
            a gradient that is read before the pass ends.
        missing: what the model sends beside all this, or may, in words; or nothing.
        summed: how many of `parameters` are summed at the end of a pass.
    """

    layers: tuple[LayerShape, ...]
    parameters: int
    inputs: str = "constant"
    itemsize: int = 4
    norms: tuple[int, ...] = ()
    missing: str = ""
    summed: int = 0

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise ValueError(f"inputs must be one of {INPUTS}, got {self.inputs!r}")
        if not self.layers:
            raise ValueError("an epoch needs at least one layer")

    @property
    def runs_by_halo(self) -> bool:
        """Whether rows of some layer travel as on (P, 1, 1), or may."""
        return any(layer.kind == "halo" for layer in self.layers)

    @property
    def adds_rows(self) -> bool:
        """Whether some layer run by `HaloConv` sums rows, which grids may do."""
        return any(each.adds for one in self.layers for each in one.rounds)

    @property
    def adds_loops(self) -> bool:
        """Whether self-loops join the edges."""
        return any(layer.kind == "gcn" for layer in self.layers)

    def orders(self, ordering: MultiplyOrder) -> tuple[str, ...]:
        """Returns for each layer "kept", "first", "last" or "halo"."""
        return tuple(self._order(i, ordering) for i in range(len(self.layers)))

    def _order(self, number: int, ordering: MultiplyOrder) -> str:
        layer = self.layers[number]
        if layer.kind == "halo":
            return "halo"
        if self._keeps(number, ordering) and ordering.order != "last":
            return "kept"
        return self._multiplied(number, ordering)

    def _multiplied(self, number: int, ordering: MultiplyOrder) -> str:
        """Returns the order of a product that is not kept."""
        layer = self.layers[number]
        grad = layer.needs_gradient
        widths, grads = (layer.width_in, layer.width_out), (grad, grad or layer.trains)
        return "first" if ordering.takes_first(*widths, grads) else "last"

    def _keeps(self, number: int, ordering: MultiplyOrder) -> bool:
        """Whether what a layer reads of its input is kept, which does not change."""
        layer, constant = self.layers[number], self.inputs == "constant"
        kept = layer.is_feature and constant and ordering.keep_inputs
        return kept and not (layer.needs_gradient or layer.fresh)

    def products(
        self,
        ordering: MultiplyOrder,
        *,
        adds_on_grid: bool = False,
        keeps_rows: bool = True,
    ) -> list[ProductShape]:
        """Lists the products of the third epoch or a later one (see `ProductCache`).

        Args:
            ordering: how layers take A X W apart.
            adds_on_grid: whether rows that `HaloConv` sums are products on the grid.
            keeps_rows: whether it keeps rows that do not change.
        """
        found = []
        for i, order in enumerate(self.orders(ordering)):
            layer, halo = self.layers[i], order == "halo"
            if halo:
                for each in layer.rounds:
                    rows = not (each.adds and adds_on_grid)
                    if not (each.kept and keeps_rows and ordering.keep_inputs):
                        way = each.width, each.to_owners, rows
                        found.append(ProductShape(i, *way))
                continue
            if order == "kept":
                continue
            width = layer.width_out if order == "last" else layer.width_in
            found.append(ProductShape(i, width, False))
            if (order == "last" and layer.trains) or layer.needs_gradient:
                found.append(ProductShape(i, width, True))
        return found

    def kept_rows(
        self,
        ordering: MultiplyOrder,
        *,
        adds_on_grid: bool = False,
        keeps_rows: bool = True,
    ) -> int:
        """Returns the width of the ghosts that layers run by `HaloConv` keep, or 0.

        Arguments are those of `products`.
        """
        widths = [0]
        for layer in self.layers if keeps_rows and ordering.keep_inputs else ():
            rows = (r for r in layer.rounds if r.kept)
            widths += [r.width for r in rows if not (r.adds and adds_on_grid)]
        return max(widths)

    def sums(self, size: int) -> dict[str, int]:
        """Returns the bytes a rank receives in all-reduces, by what is summed."""
        item = self.itemsize
        return {
            "parameters": ring_words(self.summed, size) * item,
            "loss": ring_words(LOSS_WORDS, size) * item,
            "norms": sum(ring_words(c, size) * item for c in self.norms),
        }


class Stack(torch.nn.Module):
    """Runs layers in order, with ReLU between them."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Any, edge_index: Any) -> Any:
        """Returns the output of the last layer."""
        for layer in self.layers[:-1]:
            x = layer(x, edge_index).relu()
        return self.layers[-1](x, edge_index)


def training_of(
    widths: Sequence[int],
    layers: str | Sequence[str] = "gcn",
    *,
    inputs: str = "constant",
    itemsize: int = 4,
) -> Training:
    """Returns the training of a stack of layers from their widths.

    Args:
        widths: of the features, the hidden layers, and the output.
        layers: the kind of all layers ("gcn" or "sage"), or of each.
        inputs, itemsize: see `Training`.
    """
    pairs = list(itertools.pairwise(widths))
    if not pairs:
        raise ValueError(
            f"widths={list(widths)} needs at least two: features and output"
        )
    kinds = [layers] * len(pairs) if isinstance(layers, str) else list(layers)
    if len(kinds) != len(pairs):
        raise ValueError(
            f"{len(kinds)} kinds of layers do not fit {len(pairs)} pairs of widths"
        )
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(
                f"layers are {' or '.join(KINDS)}, got {kind!r}; give model=... for others"
            )
    for pair in pairs:
        if not all(isinstance(n, numbers.Integral) and n >= 1 for n in pair):
            raise ValueError(
                "widths must be whole numbers, at least 1, got {!r} and {!r}".format(
                    *pair
                )
            )
    stack = Stack(
        KINDS[kind](int(a), int(b)) for kind, (a, b) in zip(kinds, pairs, strict=True)
    )
    read = training_of_model(stack, int(widths[0]), inputs)
    return replace(read, itemsize=itemsize)


def training_of_model(
    model: torch.nn.Module, num_features: int, inputs: str = "constant"
) -> Training:
    """Reads the layers of a model, in the order in which it calls them.

    A copy of it is run on two nodes, see `visited`.

    Args:
        model: of PyG's layers or ours.
        num_features: of x; what layers of unknown (lazy) width get.
        inputs: see `Training`.

    Raises:
        ValueError: if the model has no layer that reads neighbours, or does not run.
    """
    if not any(map(is_layer, model.modules())):
        raise ValueError(
            f"{type(model).__name__} has no message passing layer to plan for; give "
            "widths=[...]"
        )
    calls, run = visited(model, num_features, inputs)
    trained = sum(p.numel() for p in run.trained)
    return Training(
        tuple(map(layer_from_call, calls)),
        trained,
        inputs,
        run.trained[0].element_size() if run.trained else 4,
        tuple(run.sums),
        "; ".join(dict.fromkeys(run.missing)),
        run.summed or trained,
    )


def num_features_of_model(model: torch.nn.Module) -> int:
    """Returns the width of a model's input: that of the first layer that it holds.

    Raises:
        ValueError: if none tells, or the first waits to be told (lazy).
    """
    names = "in_features", "in_channels", "channels"
    widths = (getattr(part, name, None) for part in model.modules() for name in names)
    first = (w[0] if isinstance(w, (tuple, list)) else w for w in widths)
    width = next((w for w in first if isinstance(w, int)), 0)
    if width > 0:
        return width
    raise ValueError(
        f"the width of the features cannot be read from {type(model).__name__}; give the "
        "graph as a Data with x, or widths=[...]"
    )


def layer_from_call(call: Any) -> LayerShape:
    """Returns the shape of a layer from a recorded call."""
    conv, (kind, fresh) = call.conv, _kind_of(call.conv)
    if not call.multiplies:  # op by op
        kind, fresh = "halo", False
    trained = {name for name, p in conv.named_parameters() if p.requires_grad}
    projects = kind == "sage" and fresh
    needs_gradient = call.needs_gradient or (
        projects and any(n.startswith("lin.") for n in trained)
    )
    return LayerShape(
        kind,
        call.width,
        call.out,
        fresh,
        call.is_feature,
        needs_gradient,
        trains=("lin.weight" if kind == "gcn" else "lin_l.weight") in trained,
        rounds=tuple(call.rounds) if kind == "halo" else (),
    )


def _kind_of(conv: torch.nn.Module) -> tuple[str, bool]:
    """Returns the kind of a layer, and whether its input is computed in any case."""
    aggr = getattr(conv, "aggr", None)
    if getattr(conv, "flow", None) != "source_to_target":
        return "halo", False
    if isinstance(conv, GCNConv) and aggr in ("add", "sum"):
        return "gcn", False
    if isinstance(conv, GCN2Conv) and aggr in ("add", "sum"):  # x_0 comes before it
        return "gcn", True
    if isinstance(conv, SAGEConv) and aggr in ("mean", "sum", "add"):
        return "sage", bool(conv.project)
    return "halo", False


def training_from_options(
    graph: Any,
    widths: Sequence[int] | None,
    model: torch.nn.Module | None,
    layers: str | Sequence[str],
    inputs: str,
    dtype: torch.dtype,
) -> Training:
    """Returns the training that the options of `plan` describe: widths, or a model."""
    if (widths is None) == (model is None):
        raise ValueError(
            "plan needs either widths=[features, hidden, ..., output] or model=..."
        )
    if model is not None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"model is a torch.nn.Module, got {type(model).__name__}; give layers as a "
                "torch_geometric.nn.Sequential"
            )
        features = num_features_of(graph, model)
        read = training_of_model(model, features, inputs)
        return replace(read, itemsize=dtype.itemsize)
    assert widths is not None
    read = training_of(widths, layers, inputs=inputs, itemsize=dtype.itemsize)
    _check_width(graph, read.layers[0].width_in, inputs)
    return read


def num_features_of(graph: Any, model: Any) -> int:
    """Returns the width of the features, which a model tells where the graph does not."""
    given = graph.num_features if isinstance(graph, Data) else 0
    return given or num_features_of_model(model)


def dtype_of(graph: Any, model: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype that features have: as said, or the wider of theirs and the model's."""
    if dtype is not None:
        return dtype
    values = [graph.x] if isinstance(graph, Data) else []
    values += model.parameters() if isinstance(model, torch.nn.Module) else []
    floats = (v for v in values if isinstance(v, Tensor) and v.is_floating_point())
    found = list(dict.fromkeys(v.dtype for v in floats))
    return functools.reduce(torch.promote_types, found) if found else torch.float32


def _check_width(graph: Any, first: int, inputs: str) -> None:
    """Raises if the first width is not that of the features, for constant inputs."""
    x = graph.x if isinstance(graph, Data) else None
    if not isinstance(x, Tensor) or x.dim() != 2 or inputs != "constant":
        return
    if first != x.size(1):
        raise ValueError(
            f"widths begin with {first}, and data.x has {x.size(1)} features; if they go "
            'through something else first, say inputs="changing" (--inputs changing)'
        )
