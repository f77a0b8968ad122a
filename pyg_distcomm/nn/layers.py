"""PyG's message passing layers under their own names, distributed when given a graph's share.

Each is PyG's class with `HaloExecution` before it: the same constructor, parameters and
results; see there for shapes, price and errors. GCNConv, SAGEConv and GCN2Conv are the
layers that multiply on any grid. PyG finds the source of layers by the names of their classes,
so each class is named Dist..., and exported under PyG's name. `convert` makes the layers of a
model distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch_geometric.nn as pyg

from pyg_distcomm.nn import trimming
from pyg_distcomm.nn.halo_conv import HaloConv, HaloExecution
from pyg_distcomm.nn.hetero_layers import DistHANConv, DistHGTConv
from pyg_distcomm.nn.layer_context import OwnLink, check_link, is_spread
from pyg_distcomm.nn.product_layers import DistGCN2Conv, DistGCNConv, DistSAGEConv


class DistAGNNConv(HaloExecution, pyg.AGNNConv): ...


class DistAPPNP(HaloExecution, pyg.APPNP): ...


class DistARMAConv(HaloExecution, pyg.ARMAConv): ...


class DistCGConv(HaloExecution, pyg.CGConv): ...


class DistChebConv(HaloExecution, pyg.ChebConv): ...


class DistClusterGCNConv(HaloExecution, pyg.ClusterGCNConv): ...


class DistDNAConv(HaloExecution, pyg.DNAConv): ...


class DistDynamicEdgeConv(HaloExecution, pyg.DynamicEdgeConv): ...


class DistEGConv(HaloExecution, pyg.EGConv): ...


class DistEdgeConv(HaloExecution, pyg.EdgeConv): ...


class DistFAConv(HaloExecution, pyg.FAConv): ...


class DistFastRGCNConv(HaloExecution, pyg.FastRGCNConv): ...


class DistFeaStConv(HaloExecution, pyg.FeaStConv): ...


class DistFiLMConv(HaloExecution, pyg.FiLMConv): ...


class DistFusedGATConv(HaloExecution, pyg.FusedGATConv): ...


class DistGATConv(HaloExecution, pyg.GATConv): ...


class DistGATv2Conv(HaloExecution, pyg.GATv2Conv): ...


class DistGENConv(HaloExecution, pyg.GENConv): ...


class DistGINConv(HaloExecution, pyg.GINConv): ...


class DistGINEConv(HaloExecution, pyg.GINEConv): ...


class DistGMMConv(HaloExecution, pyg.GMMConv): ...


class DistGatedGraphConv(HaloExecution, pyg.GatedGraphConv): ...


class DistGeneralConv(HaloExecution, pyg.GeneralConv): ...


class DistGraphConv(HaloExecution, pyg.GraphConv): ...


class DistGravNetConv(HaloExecution, pyg.GravNetConv): ...


class DistGroupAddRev(pyg.GroupAddRev):
    """Runs PyG's GroupAddRev, but keeps inputs that are row-sharded, or that NumPy has seen.

    PyG's frees the storage of its inputs, and computes them again in the backward pass. Rows
    of a share may be in use by an exchange, and what NumPy saw, as in a kernel, has to stay.

    Shapes: x `[n_i, F]` -> `[n_i, F]`. Price: that of its layers.
    """

    def _fn_apply(self, args: Any, fn: Any, fn_inverse: Any) -> Any:
        if not is_spread(*args) and args[0].untyped_storage().resizable():
            return super()._fn_apply(args, fn, fn_inverse)
        return fn(*args)

    def _inverse(self, y: Any, *args: Any) -> Any:
        return super()._inverse(y.clone(), *args)  # layers read it before it is freed


class DistHEATConv(HaloExecution, pyg.HEATConv): ...


class DistHypergraphConv(HaloExecution, pyg.HypergraphConv): ...


class DistLEConv(HaloExecution, pyg.LEConv): ...


class DistLGConv(HaloExecution, pyg.LGConv): ...


class DistLabelPropagation(HaloExecution, pyg.LabelPropagation): ...


class DistMFConv(HaloExecution, pyg.MFConv): ...


class DistMeshCNNConv(HaloExecution, pyg.MeshCNNConv): ...


class DistMessagePassing(HaloExecution, pyg.MessagePassing): ...


class DistMixHopConv(HaloExecution, pyg.MixHopConv): ...


class DistNNConv(HaloExecution, pyg.NNConv): ...


class DistPANConv(HaloExecution, pyg.PANConv): ...


class DistPDNConv(HaloExecution, pyg.PDNConv): ...


class DistPNAConv(HaloExecution, pyg.PNAConv): ...


class DistPPFConv(HaloExecution, pyg.PPFConv): ...


class DistPointGNNConv(HaloExecution, pyg.PointGNNConv): ...


class DistPointNetConv(HaloExecution, pyg.PointNetConv): ...


class DistPointTransformerConv(HaloExecution, pyg.PointTransformerConv): ...


class DistRGATConv(HaloExecution, pyg.RGATConv): ...


class DistRGCNConv(HaloExecution, pyg.RGCNConv): ...


class DistResGatedGraphConv(HaloExecution, pyg.ResGatedGraphConv): ...


class DistSGConv(HaloExecution, pyg.SGConv): ...


class DistSSGConv(HaloExecution, pyg.SSGConv): ...


class DistSignedConv(HaloExecution, pyg.SignedConv): ...


class DistSimpleConv(HaloExecution, pyg.SimpleConv): ...


class DistSplineConv(HaloExecution, pyg.SplineConv): ...


class DistSuperGATConv(HaloExecution, pyg.SuperGATConv): ...


class DistTAGConv(HaloExecution, pyg.TAGConv): ...


class DistTransformerConv(HaloExecution, pyg.TransformerConv): ...


class DistWLConvContinuous(HaloExecution, pyg.WLConvContinuous): ...


AGNNConv = DistAGNNConv
APPNP = DistAPPNP
ARMAConv = DistARMAConv
CGConv = DistCGConv
ChebConv = DistChebConv
ClusterGCNConv = DistClusterGCNConv
DNAConv = DistDNAConv
DynamicEdgeConv = DistDynamicEdgeConv
EGConv = DistEGConv
EdgeConv = DistEdgeConv
FAConv = DistFAConv
FastRGCNConv = DistFastRGCNConv
FeaStConv = DistFeaStConv
FiLMConv = DistFiLMConv
FusedGATConv = DistFusedGATConv
GATConv = DistGATConv
GATv2Conv = DistGATv2Conv
GCN2Conv = DistGCN2Conv
GCNConv = DistGCNConv
GENConv = DistGENConv
GINConv = DistGINConv
GINEConv = DistGINEConv
GMMConv = DistGMMConv
GatedGraphConv = DistGatedGraphConv
GeneralConv = DistGeneralConv
GraphConv = DistGraphConv
GravNetConv = DistGravNetConv
GroupAddRev = DistGroupAddRev
HANConv = DistHANConv
HEATConv = DistHEATConv
HGTConv = DistHGTConv
HypergraphConv = DistHypergraphConv
LEConv = DistLEConv
LGConv = DistLGConv
LabelPropagation = DistLabelPropagation
MFConv = DistMFConv
MeshCNNConv = DistMeshCNNConv
MessagePassing = DistMessagePassing
MixHopConv = DistMixHopConv
NNConv = DistNNConv
PANConv = DistPANConv
PDNConv = DistPDNConv
PNAConv = DistPNAConv
PPFConv = DistPPFConv
PointGNNConv = DistPointGNNConv
PointNetConv = DistPointNetConv
PointTransformerConv = DistPointTransformerConv
RGATConv = DistRGATConv
RGCNConv = DistRGCNConv
ResGatedGraphConv = DistResGatedGraphConv
SAGEConv = DistSAGEConv
SGConv = DistSGConv
SSGConv = DistSSGConv
SignedConv = DistSignedConv
SimpleConv = DistSimpleConv
SplineConv = DistSplineConv
SuperGATConv = DistSuperGATConv
TAGConv = DistTAGConv
TransformerConv = DistTransformerConv
WLConvContinuous = DistWLConvContinuous

if not TYPE_CHECKING:  # type checkers read the names above instead
    # the names that a class of this package bears, without its Dist
    __all__ = [
        name
        for name, kind in list(globals().items())
        if getattr(kind, "__name__", "") == f"Dist{name}"
    ]


Model = TypeVar("Model", bound=torch.nn.Module)

DISTRIBUTED: dict[type, type] = {
    pyg.GCNConv: DistGCNConv,
    pyg.GCN2Conv: DistGCN2Conv,
    pyg.GroupAddRev: DistGroupAddRev,
    pyg.HANConv: DistHANConv,
    pyg.HGTConv: DistHGTConv,
    pyg.SAGEConv: DistSAGEConv,
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
    if trim and not isinstance(out, pyg.MessagePassing | HaloConv):
        trimming.install(out)
    return out  # type: ignore[return-value]


class Converted:
    """Converts the layers of a PyG model in its constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _convert_parts(self, {id(self): self})
        trimming.install(self)  # type: ignore[arg-type]


def _convert(module: torch.nn.Module, done: dict[int, Any]) -> torch.nn.Module:
    if id(module) in done:
        return done[id(module)]
    done[id(module)] = out = _distributed_layer(module)
    done[id(out)] = out
    _convert_parts(module, done)
    return out


def _convert_parts(module: Any, done: dict[int, Any]) -> None:
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _convert(child, done)


def _distributed_layer(module: torch.nn.Module) -> torch.nn.Module:
    if isinstance(module, (*DISTRIBUTED.values(), HaloConv, HaloExecution)):
        return module
    if type(module) in DISTRIBUTED:
        module.__class__ = DISTRIBUTED[type(module)]
        return module
    return HaloConv(module) if isinstance(module, pyg.MessagePassing) else module
