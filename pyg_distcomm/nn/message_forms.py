"""Names PyG's layers whose messages are rows of sources, and how they are added up."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn as pyg
from torch_geometric.nn import MessagePassing

AGGREGATIONS: dict[type, str] = {
    pyg.SumAggregation: "sum",
    pyg.MeanAggregation: "mean",
    pyg.MaxAggregation: "max",
}
_ROWS = "GINConv MFConv SAGEConv SignedConv"
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
STEPS = "propagate message aggregate update message_and_aggregate edge_update".split()
_WHEN = ("pre_hooks", "hooks")


def has_hooks(conv: MessagePassing) -> bool:
    """Tells whether hooks see or change what a layer does on its way."""
    own = vars(conv)
    return any(own.get(f"_{s}_forward_{when}") for s in STEPS for when in _WHEN)


def adds_rows(conv: MessagePassing) -> bool:
    """Tells whether a layer sums, or averages, rows of its sources that it may weigh.

    What it propagates is then a product with the graph's matrix. Not where a subclass or a
    hook changes what happens on the way.
    """
    kind = type(conv)
    return (
        MESSAGES.get(kind.message, "alpha") != "alpha"
        and AGGREGATIONS.get(type(conv.aggr_module), "max") != "max"
        and kind.aggregate is MessagePassing.aggregate
        and kind.update is MessagePassing.update
        and conv.node_dim == -2
        and not has_hooks(conv)
        and not any(step in vars(conv) for step in STEPS)
    )
