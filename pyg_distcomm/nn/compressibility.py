"""Decides what of a layer under halo exchange may be coded, and what must be exact.

[Note: attention] A softmax over neighbours turns small errors of its logits into large ones
of its weights, and an unbiased code of them into a biased weight. So what logits are made
from travels exactly and now: what a layer gives to `edge_updater`, and the tensors below,
which it compares inside `message`, or all where the aggregation is a softmax. Where these
are a layer's features, nothing is coded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import (
    Aggregation,
    MeanAggregation,
    MultiAggregation,
    SoftmaxAggregation,
    SumAggregation,
)

from pyg_distcomm.halo.codec import nested
from pyg_distcomm.halo.codecs import TopK
from pyg_distcomm.halo.policy import LinkPolicy

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
_LINEAR = (SumAggregation, MeanAggregation)
_CODED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_coded(layer: MessagePassing, verb: str, name: str, value: Tensor) -> bool:
    """Tells whether a tensor that a layer looks up by node may be coded.

    Args:
        layer: the layer.
        verb: "propagate" or "edge_updater".
        name: what the layer calls the tensor.
        value: the tensor.
    """
    if verb != "propagate" or value.dtype not in _CODED:
        return False
    if _is_softmax(layer.aggr_module):
        return False
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    return not any(name in _COMPARED.get(kind, ()) for kind in kinds)


def compares(layers: list[MessagePassing]) -> bool:
    """Tells whether layers make logits of what they read of neighbours."""
    return any(
        type(layer).edge_update is not MessagePassing.edge_update
        or _is_softmax(layer.aggr_module)
        or any(kind.__name__ in _COMPARED for kind in type(layer).__mro__)
        for layer in layers
    )


def check_aggregations(layers: list[MessagePassing], link: LinkPolicy) -> None:
    """Refuses what would take numbers left out for zeros that were sent.

    Raises:
        ValueError: on all ranks, naming the layer.
    """
    if not _leaves_out(link):
        return
    for layer in layers:
        custom = type(layer).aggregate is not MessagePassing.aggregate
        if custom or not _is_linear(layer.aggr_module):
            what = "its own aggregate" if custom else f"aggr={layer.aggr!r}"
            raise ValueError(
                f"{type(layer).__name__} has {what}, where what {link.codec} leaves out, "
                "which is zero or of before, could win; use Quantise, or link='exact' for this "
                "layer"
            )


def _is_linear(aggregation: Aggregation | None) -> bool:
    if isinstance(aggregation, MultiAggregation):
        return all(map(_is_linear, aggregation.aggrs))
    return isinstance(aggregation, _LINEAR)


def _is_softmax(aggregation: Aggregation | None) -> bool:
    if isinstance(aggregation, MultiAggregation):
        return any(map(_is_softmax, aggregation.aggrs))
    return isinstance(aggregation, SoftmaxAggregation)


def _leaves_out(link: LinkPolicy) -> bool:
    codec = link.codec if link.scheduler is None else link.codec.with_rate(2.0)
    return any(one.zero_fills or isinstance(one, TopK) for one in nested(codec))
