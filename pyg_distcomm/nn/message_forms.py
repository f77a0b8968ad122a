"""Names layers whose messages are rows of sources, and weighs messages by values of edges."""

from __future__ import annotations

import dis
import inspect
import itertools
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm.gradient_averaging import meet
from pyg_distcomm.comm.rows import Rows
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
STEPS = "propagate message aggregate update message_and_aggregate edge_update".split()
_WHEN = ("pre_hooks", "hooks")


def has_hooks(conv: MessagePassing) -> bool:
    """Tells whether hooks see or change what a layer does on its way."""
    own = vars(conv)
    if any(own.get(f"_{s}_forward_{when}") for s in STEPS for when in _WHEN):
        return True
    return is_changed(conv.aggr_module)


def is_changed(part: torch.nn.Module) -> bool:
    """Tells whether hooks, or a `forward` of its own, see or change what a module does.

    Hooks of this package, by which it traces and plans, change nothing.
    """
    own = vars(part)
    hooks = (h for name in _HOOKS for h in own.get(f"_{name}_hooks", {}).values())
    root = __name__.split(".")[0]
    return "forward" in own or any(
        (getattr(hook, "__module__", None) or "").split(".")[0] != root
        for hook in hooks
    )


_HOOKS = "forward", "forward_pre", "backward", "backward_pre"


def propagates_as_pyg(conv: MessagePassing) -> bool:
    """Tells whether no subclass has a `propagate` of its own."""
    for kind in type(conv).__mro__:
        call = vars(kind).get("propagate")
        if call is not None:
            return kind is MessagePassing or call.__module__ == _template(kind)
    raise AssertionError("MessagePassing has no propagate")


def _template(kind: type) -> str:
    """Returns the module in which PyG writes the `propagate` of a class."""
    return f"{kind.__module__}_{kind.__name__}_propagate"


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
        and propagates_as_pyg(conv)
        and not (has_hooks(conv) or conv.explain)
        and not any(step in vars(conv) for step in STEPS)
    )


def aggregates_itself(conv: MessagePassing) -> bool:
    """Tells whether code of the user's own aggregates a layer's messages."""
    if type(conv).aggregate is not MessagePassing.aggregate:
        return True
    found = () if conv.aggr_module is None else conv.aggr_module.modules()
    kinds = [type(m).__module__ for m in found if isinstance(m, pyg.Aggregation)]
    return not all(name.startswith("torch_geometric.") for name in kinds)


def check_sizes(kind: type[MessagePassing]) -> None:
    """Refuses what Python does with a number of nodes as with this rank's, without asking it.

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
        for before, here in itertools.pairwise(dis.get_instructions(call)):
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
    """Returns a layer's `propagate` as it is written, which weighs messages by masks.

    PyG replaces it by a template that does not; under `explain` it takes a class's own
    template out, but leaves that of a base class in place.
    """
    for kind in type(conv).__mro__:
        call = vars(kind).get("propagate")
        if call is not None and call.__module__ != _template(kind):
            return call.__get__(conv)
    raise AssertionError("MessagePassing has no propagate")


def mask_messages(
    conv: MessagePassing, messages: Tensor, rows: Rows, edges: Rows
) -> Tensor:
    """Weighs messages by the mask of edges that an explainer gave a layer.

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
    weight = mask.to_local() if here else meet(mask, edges.mesh)
    weight = weight if here else weight[edges.gid_on(weight.device)]
    weight = weight.sigmoid() if conv._apply_sigmoid else weight
    return weigh_messages(conv, messages, weight, rows, edges)


def weighs_messages(conv: MessagePassing, values: Any, of_torch: bool) -> bool:
    """Tells whether a layer weighs messages by the values of a matrix, unasked.

    PyG multiplies by the matrix where a layer has a `message_and_aggregate`, by its values
    too. Layers without weights, as SAGEConv and GINConv, take them away from a SparseTensor of
    torch-sparse, and leave them in matrices of torch.sparse.

    Args:
        conv: the layer.
        values: of the matrix; None of one without, and of edges.
        of_torch: whether it is given a matrix of torch.sparse.
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
    """Multiplies messages by the weights of their edges; loops that were added have 1.

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
    """Returns the layer, and those inside it, behind wrappers of ours as well."""
    found: list[MessagePassing] = []
    for module in conv.modules():
        inner = vars(module).get("_wrapped")
        module = inner[0] if isinstance(inner, list) else module
        if isinstance(module, MessagePassing) and module not in found:
            found.append(module)
    return found
