"""Classifies the messages of PyG's layers: rows, weighted rows, or attention.

[Note: attention] A softmax over neighbours turns small errors of its logits into large errors
of its weights, and an unbiased code of logits into biased weights. So the inputs of logits
travel exactly and synchronously: the arguments of `edge_updater`, and the tensors below, from
which a layer makes logits in `message`; all tensors if the aggregation is a softmax. If these
are the features of a layer, none of its exchanges is coded.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, MultiAggregation, SoftmaxAggregation

from pyg_distcomm.comm.gradient_averaging import as_replicated
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo.codec import nested
from pyg_distcomm.halo.codecs import TopK
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn.layer_context import (
    STEPS,
    has_hooks,
    propagates_as_pyg,
    template_of,
)
from pyg_distcomm.tensor.dist_tensor import DistTensor

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
        and conv.node_dim == -2
        and propagates_as_pyg(conv)
        and not (has_hooks(conv) or conv.explain)
        and not any(step in vars(conv) for step in STEPS)
    )


def aggregates_itself(conv: MessagePassing) -> bool:
    """Tells whether user code aggregates the messages of a layer."""
    if type(conv).aggregate is not MessagePassing.aggregate:
        return True
    found = () if conv.aggr_module is None else conv.aggr_module.modules()
    kinds = [type(m).__module__ for m in found if isinstance(m, pyg.Aggregation)]
    return not all(name.startswith("torch_geometric.") for name in kinds)


def check_sizes(kind: type[MessagePassing]) -> None:
    """Raises for code in which Python would use a number of nodes as the local one.

    That is `range(size_i)`, `math.log(size_i)`, and `1.0 / size_i`, a float on the left, by
    the code of the steps of a layer; a number that has got another name passes.

    Raises:
        TypeError: on all ranks.
    """
    for step in STEPS:
        call = inspect.unwrap(getattr(kind, step))
        own = not (call.__module__ or "").startswith("torch_geometric.")
        if not own or not inspect.isfunction(call):
            continue
        if not _COUNTS.intersection(call.__code__.co_varnames):
            continue
        steps = [s for s in dis.get_instructions(call) if s.opname != "PUSH_NULL"]
        for before, here in itertools.pairwise(steps):
            name = here.argval if here.opname.startswith("LOAD_FAST") else None
            what = before.argval
            if name in _COUNTS and (isinstance(what, float) or what in _BLIND):
                raise TypeError(
                    f"{kind.__name__}.{step} has {what} before {name}, which Python takes for "
                    "this rank's number alone; write the size on the left, or "
                    f"torch.tensor({name}), and no loop over nodes"
                )


_COUNTS = frozenset("size_i size_j dim_size".split())
_BLIND = frozenset("range log log2 log10 log1p".split())


def untemplated(conv: MessagePassing) -> Any:
    """Returns a layer's untemplated `propagate`, which applies explainers' masks.

    PyG replaces it by a template that does not; under `explain` it takes a class's own
    template out, but leaves that of a base class in place.
    """
    for kind in type(conv).__mro__:
        call = vars(kind).get("propagate")
        if call is not None and call.__module__ != template_of(kind):
            return call.__get__(conv)
    raise AssertionError("MessagePassing has no propagate")


def mask_messages(
    conv: MessagePassing, messages: Tensor, rows: Rows, edges: Rows
) -> Tensor:
    """Multiplies messages by the edge mask that an explainer gave a layer.

    As `MessagePassing.explain_message` does: message e is multiplied by mask[e], or by its
    sigmoid; those of loops that the layer added stay as they are.

    Args:
        conv: has the mask, `[E]` of all edges in the order of the edge_index that was cut,
            or this rank's rows of it.
        messages: `[m, ...]` of this rank.
        rows: their edges; ids from E on are loops that the layer added.
        edges: the edges of this rank, without them.

    Raises:
        ValueError: if there is no mask, or one of other edges.
    """
    mask: Any = conv._edge_mask
    name, known = type(conv).__name__, isinstance(mask, Tensor)
    if not known:
        raise ValueError(
            f"{name} has explain=True and no mask of edges, but {mask!r}; let an Explainer "
            "of torch_geometric.explain set it"
        )
    here = isinstance(mask, DistTensor)
    if not (mask.rows.same_as(edges) if here else len(mask) == edges.total):
        raise ValueError(
            f"the mask that explains {name} has shape {list(mask.shape)}; give one value for "
            f"each of {edges.total} edges, the same on every rank"
        )
    weight = mask.to_local() if here else as_replicated(mask, edges.mesh)
    weight = weight if here else weight[edges.gid_on(weight.device)]
    weight = weight.sigmoid() if conv._apply_sigmoid else weight
    return weigh_messages(conv, messages, weight, rows, edges)


def weighs_messages(conv: MessagePassing, values: Any, of_torch: bool) -> bool:
    """Tells whether PyG implicitly weighs messages by the values of a sparse adjacency.

    PyG multiplies by the matrix where a layer has a `message_and_aggregate`, by its values
    too. Layers without weights, as SAGEConv and GINConv, take them away from a SparseTensor of
    torch-sparse, and leave them in matrices of torch.sparse.
    """
    if values is None or not conv.fuse or conv.explain:
        return False
    kind = type(conv)
    if "edge_weight" in inspect.signature(kind.message).parameters:
        return False  # which has them as weights
    if isinstance(conv, pyg.EGConv):
        return "symnorm" not in conv.aggregators
    return of_torch or "set_value" not in kind.message_and_aggregate.__code__.co_names


def weigh_messages(
    conv: MessagePassing, messages: Tensor, weight: Tensor, rows: Rows, edges: Rows
) -> Tensor:
    """Multiplies messages by the weights of their edges; added self-loops have weight 1.

    Args:
        conv: the layer.
        messages: `[m, ...]` of this rank, nodes in the layer's dim.
        weight: `[e_i]` of this rank's edges.
        rows: the edges of the messages; ids from E on are loops that the layer added.
        edges: the edges of this rank.
    """
    if rows is not edges:
        gid = rows.gid_on(messages.device)
        place = torch.searchsorted(edges.gid_on(gid.device), gid)
        place = place.where(gid < edges.total, len(weight))
        weight = torch.cat([weight, weight.new_ones(1)])[place]
    size = [1] * messages.dim()
    size[conv.node_dim] = -1
    return messages * weight.view(size)


def layers_of(conv: MessagePassing) -> list[MessagePassing]:
    """Returns the layer and the layers inside it, also behind wrappers of this package."""
    found: list[MessagePassing] = []
    for module in conv.modules():
        inner = vars(module).get("_wrapped")
        module = inner[0] if isinstance(inner, list) else module
        if isinstance(module, MessagePassing) and module not in found:
            found.append(module)
    return found


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
    if not _omits_numbers(link):
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
    return isinstance(aggregation, pyg.SumAggregation | pyg.MeanAggregation)


def _is_softmax(aggregation: Aggregation | None) -> bool:
    if isinstance(aggregation, MultiAggregation):
        return any(map(_is_softmax, aggregation.aggrs))
    return isinstance(aggregation, SoftmaxAggregation)


def _omits_numbers(link: LinkPolicy) -> bool:
    codec = link.codec if link.scheduler is None else link.codec.with_rate(2.0)
    return any(one.zero_fills or isinstance(one, TopK) for one in nested(codec))
