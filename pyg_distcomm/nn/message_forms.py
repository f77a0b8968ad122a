"""Classifies the messages of PyG's layers: rows, weighted rows, or attention.

[Note: attention] A softmax over neighbours turns small errors of its logits into large errors
of its weights, and an unbiased code of logits into biased weights. So the inputs of logits
travel exactly and synchronously: the arguments of `edge_updater`, and the tensors below, from
which a layer makes logits in `message`; all tensors if the aggregation is a softmax. If these
are the features of a layer, none of its exchanges is coded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, MultiAggregation, SoftmaxAggregation

from pyg_distcomm.halo.codec import nested
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn.layer_context import STEPS, has_hooks, propagates_as_pyg

AGGREGATIONS: dict[type, str] = {
    pyg.SumAggregation: "sum",
    pyg.MeanAggregation: "mean",
    pyg.MaxAggregation: "max",
}
_ROWS = "GINConv MFConv RGCNConv SAGEConv SignedConv"
_WEIGHTED = (
    "APPNP ClusterGCNConv GCN2Conv GCNConv GatedGraphConv GraphConv LGConv "
    "MixHopConv SGConv SSGConv SimpleConv TAGConv"
)
# a layer's `message`, and the argument of `propagate` that weighs rows in it
MESSAGES: dict[Any, str | None] = {
    **{getattr(pyg, name).message: None for name in _ROWS.split()},
    **{getattr(pyg, name).message: "edge_weight" for name in _WEIGHTED.split()},
    pyg.ChebConv.message: "norm",
    pyg.GATConv.message: "alpha",
    pyg.GATv2Conv.message: "alpha",
}
# of each layer, the arguments of propagate that its weights of messages come from
_COMPARED = {
    "AGNNConv": {"x_norm"},
    "DNAConv": {"x"},
    "FAConv": {"alpha"},
    "FeaStConv": {"x"},
    "GeneralConv": {"x"},
    "HEATConv": {"x"},
    "PointTransformerConv": {"pos", "alpha"},
    "RGATConv": {"x"},
    "ResGatedGraphConv": {"q"},
    "SuperGATConv": {"x"},
    "TransformerConv": {"key"},
}
_CODED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def adds_rows(conv: MessagePassing) -> bool:
    """Tells whether a layer sums or averages source rows, possibly weighted.

    What it propagates is then a product with the graph's matrix. Not where a subclass or a
    hook changes what happens on the way.
    """
    kind = type(conv)
    return (
        MESSAGES.get(kind.message, "alpha") != "alpha"
        and AGGREGATIONS.get(type(conv.aggr_module), "max") != "max"
        and kind.aggregate is MessagePassing.aggregate
        and kind.update is MessagePassing.update
        and conv.node_dim in (-2, 0)
        and propagates_as_pyg(conv)
        and not (has_hooks(conv) or conv.explain)
        and not any(step in vars(conv) for step in STEPS)
    )


def layers_of(conv: MessagePassing) -> list[MessagePassing]:
    """Returns the layer and the layers inside it, also behind wrappers of this package."""
    found: list[MessagePassing] = []
    for module in conv.modules():
        inner = vars(module).get("_wrapped")
        module = inner[0] if isinstance(inner, list) else module
        if isinstance(module, MessagePassing) and module not in found:
            found.append(module)
    return found


@contextlib.contextmanager
def with_attributes(layers: list[Any], make: Callable[..., Any]) -> Iterator[None]:
    """Has layers use what `make` returns in place of their own attributes, in a block."""
    made = [(vars(layer), make(layer)) for layer in layers]
    before = [{name: own[name] for name in new if name in own} for own, new in made]
    for own, new in made:
        own.update(new)
    try:
        yield
    finally:
        for (own, new), old in zip(made, before, strict=True):
            for name in new:
                del own[name]
            own.update(old)


_KNOWN = frozenset("pyg_distcomm torch_geometric torch".split())


def has_known_steps(module: torch.nn.Module) -> bool:
    """Tells whether the steps of a module are PyG's, torch's or ours, which mix no rows."""
    names = STEPS[1:] if isinstance(module, MessagePassing) else ["forward"]
    found = (str(getattr(module, name).__module__) for name in names)
    return all(name.split(".")[0] in _KNOWN for name in found)


def computes_by_row(conv: MessagePassing, *, draws: bool = False) -> bool:
    """Tells whether the steps and modules of a layer compute each row from its own rows alone.

    With `draws` they may draw numbers for their rows, as dropout does. A function in place of
    a module, or a step of a script's own, may mix rows.
    """
    given = (vars(part).get(name) for part in conv.modules() for name in ("nn", "act"))
    if any(map(callable, given)) or not has_known_steps(conv):
        return False
    parts = [part for part in conv.modules() if part is not conv]
    return all(_is_by_row(part, draws) for part in parts)


def _is_by_row(part: torch.nn.Module, draws: bool) -> bool:
    run = type(part).forward
    if run in (torch.nn.Dropout.forward, pyg.MLP.forward):
        p: Any = part.dropout if isinstance(part, pyg.MLP) else [part.p]
        return draws or not (part.training and any(p))
    if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
        return not part.training and part.running_mean is not None
    if run.__module__ == torch.nn.ReLU.__module__:
        return not isinstance(part, _MIXING)
    if run is torch.nn.LayerNorm.forward:
        return len(part.normalized_shape) == 1  # type: ignore[arg-type]
    return run in _BY_ROW or (
        isinstance(part, pyg.Aggregation) and has_known_steps(part)
    )


_MIXING = (
    *(torch.nn.GLU, torch.nn.LogSoftmax, torch.nn.MultiheadAttention, torch.nn.RReLU),
    *(torch.nn.Softmax, torch.nn.Softmax2d, torch.nn.Softmin),
)
_BY_ROW = {
    *(pyg.BatchNorm.forward, pyg.Linear.forward, pyg.Sequential.forward),
    *(torch.nn.Identity.forward, torch.nn.Linear.forward, torch.nn.Module.forward),
    torch.nn.Sequential.forward,
}


# What may be coded ---------------------------------------------------------------------


def is_coded(layer: MessagePassing, verb: str, name: str, value: Tensor) -> bool:
    """Tells whether a tensor that a layer looks up by node may be sent by a codec."""
    if verb != "propagate" or value.dtype not in _CODED:
        return False
    if _is_softmax(layer.aggr_module):
        return False
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    return not any(name in _COMPARED.get(kind, ()) for kind in kinds)


def compares(layers: list[MessagePassing]) -> bool:
    """Tells whether layers compute attention logits from rows of neighbours."""
    return any(
        type(layer).edge_update is not MessagePassing.edge_update
        or _is_softmax(layer.aggr_module)
        or any(kind.__name__ in _COMPARED for kind in type(layer).__mro__)
        for layer in layers
    )


def check_aggregations(layers: list[MessagePassing], link: LinkPolicy) -> None:
    """Raises for aggregations that would treat omitted numbers as zeros.

    Raises:
        ValueError: on all ranks, naming the layer.
    """
    codec = link.codec if link.schedule is None else link.codec.with_rate(2.0)
    if not any(one.zero_fills for one in nested(codec)):
        return
    for layer in layers:
        custom = type(layer).aggregate is not MessagePassing.aggregate
        if custom or not _is_linear(layer.aggr_module):
            what = "its own aggregate" if custom else f"aggr={layer.aggr!r}"
            raise ValueError(
                f"{type(layer).__name__} has {what}, which could pick a number that "
                f"{link.codec} leaves out (it arrives as zero, or as an old value); use "
                "Quantise, or link='exact' for this layer"
            )


def _is_linear(aggregation: Aggregation | None) -> bool:
    if isinstance(aggregation, MultiAggregation):
        return all(map(_is_linear, aggregation.aggrs))
    return isinstance(aggregation, pyg.SumAggregation | pyg.MeanAggregation)


def _is_softmax(aggregation: Aggregation | None) -> bool:
    if isinstance(aggregation, MultiAggregation):
        return any(map(_is_softmax, aggregation.aggrs))
    return isinstance(aggregation, SoftmaxAggregation)
