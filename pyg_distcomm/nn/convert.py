"""Makes every message passing layer of a model distributed."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch_geometric.nn as pyg
from torch_geometric.nn import GCN2Conv, GCNConv, MessagePassing, SAGEConv

from pyg_distcomm.nn import trimming
from pyg_distcomm.nn.halo_conv import HaloConv, HaloExecution
from pyg_distcomm.nn.hetero_layers import DistHANConv, DistHGTConv
from pyg_distcomm.nn.layer_context import OwnLink, check_link
from pyg_distcomm.nn.layers import DistGroupAddRev
from pyg_distcomm.nn.product_layers import DistGCN2Conv, DistGCNConv, DistSAGEConv

Model = TypeVar("Model", bound=torch.nn.Module)

DISTRIBUTED: dict[type, type] = {
    GCNConv: DistGCNConv,
    GCN2Conv: DistGCN2Conv,
    pyg.GroupAddRev: DistGroupAddRev,
    pyg.HANConv: DistHANConv,
    pyg.HGTConv: DistHGTConv,
    SAGEConv: DistSAGEConv,
}


LINKED = DistGCNConv, DistGCN2Conv, DistSAGEConv, HaloConv, HaloExecution


def convert(model: Model, link: OwnLink = None, *, trim: bool = True) -> Model:
    """Makes the layers of a model distributed, in place, sharing their parameters.

    GCNConv, GCN2Conv and SAGEConv become DistGCNConv, DistGCN2Conv and DistSAGEConv, and
    every other `MessagePassing` layer is wrapped in `HaloConv`. Norms, such as BatchNorm1d,
    are over the nodes of all ranks as they are. Names in `state_dict` do not change. Works
    on any module: PyG's `GCN`, `GraphSAGE`, `GAT`, `GIN`, `Sequential`, a custom class, or a
    single layer (whose converted form is returned).

    Args:
        model: the model; its results on ordinary inputs do not change.
        link: the link of its layers, such as `pdc.VARCO(...)`; "exact", or None to keep the
            link of each layer, or that of the edge_index.
        trim: whether to compute, on minibatches of this package's loaders, only the rows
            that are read. Results do not change: a model that reads rows beyond the seeds
            computes all rows. `pdc.nn.trimming_of(model)` returns which applies.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"convert takes a model, a torch.nn.Module, got {type(model).__name__}"
            + (
                "; to partition a graph, call pdc.partition(data, mesh)"
                * hasattr(model, "stores")
            )
        )
    done: dict[int, torch.nn.Module] = {}
    out = _convert(model, done)
    if check_link(link) is not None:
        for module in out.modules():
            if isinstance(module, LINKED):
                module.link = link
    trimming.remove(out)
    if trim and not isinstance(out, MessagePassing | HaloConv):
        trimming.install(out)
    return out  # type: ignore[return-value]


class Converted:
    """Converts the layers of a PyG model in its constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        done: dict[int, Any] = {id(self): self}
        for name, child in list(self._modules.items()):  # type: ignore[attr-defined]
            if child is not None:
                self._modules[name] = _convert(child, done)  # type: ignore[attr-defined]
        trimming.install(self)  # type: ignore[arg-type]


def _convert(module: torch.nn.Module, done: dict[int, Any]) -> torch.nn.Module:
    if id(module) in done:
        return done[id(module)]
    done[id(module)] = out = _distributed_layer(module)
    done[id(out)] = out
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _convert(child, done)
    return out


def _distributed_layer(module: torch.nn.Module) -> torch.nn.Module:
    ours = *DISTRIBUTED.values(), HaloConv, HaloExecution
    if isinstance(module, ours):
        return module
    if type(module) in DISTRIBUTED:
        module.__class__ = DISTRIBUTED[type(module)]
        return module
    return HaloConv(module) if isinstance(module, MessagePassing) else module
