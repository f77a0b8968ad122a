"""PyG's message passing layers under their own names, distributed when given a graph's share.

Each is PyG's class with `HaloExecution` before it: the same constructor, parameters and
results; see there for shapes, price and errors. GCNConv, SAGEConv and GCN2Conv are the
layers that multiply on any grid. PyG reads the source of layers by the names of their
classes, so a class has a name of its own, Dist..., beside the one it is imported by.
"""

from __future__ import annotations

import torch_geometric.nn as pyg

from pyg_distcomm.nn.adapted_layers import DistARMAConv as ARMAConv
from pyg_distcomm.nn.adapted_layers import DistFastRGCNConv as FastRGCNConv
from pyg_distcomm.nn.adapted_layers import DistGroupAddRev as GroupAddRev
from pyg_distcomm.nn.adapted_layers import DistLabelPropagation as LabelPropagation
from pyg_distcomm.nn.adapted_layers import DistMFConv as MFConv
from pyg_distcomm.nn.adapted_layers import DistSignedConv as SignedConv
from pyg_distcomm.nn.adapted_layers import DistSuperGATConv as SuperGATConv
from pyg_distcomm.nn.gcn2_conv import DistGCN2Conv as GCN2Conv
from pyg_distcomm.nn.gcn_conv import DistGCNConv as GCNConv
from pyg_distcomm.nn.halo_conv import HaloExecution
from pyg_distcomm.nn.hetero_layers import DistHANConv as HANConv
from pyg_distcomm.nn.hetero_layers import DistHGTConv as HGTConv
from pyg_distcomm.nn.sage_conv import DistSAGEConv as SAGEConv

__all__ = [
    "APPNP",
    "AGNNConv",
    "ARMAConv",
    "CGConv",
    "ChebConv",
    "ClusterGCNConv",
    "DNAConv",
    "DynamicEdgeConv",
    "EGConv",
    "EdgeConv",
    "FAConv",
    "FastRGCNConv",
    "FeaStConv",
    "FiLMConv",
    "FusedGATConv",
    "GATConv",
    "GATv2Conv",
    "GCN2Conv",
    "GCNConv",
    "GENConv",
    "GINConv",
    "GINEConv",
    "GMMConv",
    "GatedGraphConv",
    "GeneralConv",
    "GraphConv",
    "GravNetConv",
    "GroupAddRev",
    "HANConv",
    "HEATConv",
    "HGTConv",
    "HypergraphConv",
    "LEConv",
    "LGConv",
    "LabelPropagation",
    "MFConv",
    "MeshCNNConv",
    "MessagePassing",
    "MixHopConv",
    "NNConv",
    "PANConv",
    "PDNConv",
    "PNAConv",
    "PPFConv",
    "PointGNNConv",
    "PointNetConv",
    "PointTransformerConv",
    "RGATConv",
    "RGCNConv",
    "ResGatedGraphConv",
    "SAGEConv",
    "SGConv",
    "SSGConv",
    "SignedConv",
    "SimpleConv",
    "SplineConv",
    "SuperGATConv",
    "TAGConv",
    "TransformerConv",
    "WLConvContinuous",
]


class DistAGNNConv(HaloExecution, pyg.AGNNConv):
    pass


class DistAPPNP(HaloExecution, pyg.APPNP):
    pass


class DistCGConv(HaloExecution, pyg.CGConv):
    pass


class DistChebConv(HaloExecution, pyg.ChebConv):
    pass


class DistClusterGCNConv(HaloExecution, pyg.ClusterGCNConv):
    pass


class DistDNAConv(HaloExecution, pyg.DNAConv):
    pass


class DistDynamicEdgeConv(HaloExecution, pyg.DynamicEdgeConv):
    pass


class DistEGConv(HaloExecution, pyg.EGConv):
    pass


class DistEdgeConv(HaloExecution, pyg.EdgeConv):
    pass


class DistFAConv(HaloExecution, pyg.FAConv):
    pass


class DistFeaStConv(HaloExecution, pyg.FeaStConv):
    pass


class DistFiLMConv(HaloExecution, pyg.FiLMConv):
    pass


class DistFusedGATConv(HaloExecution, pyg.FusedGATConv):
    pass


class DistGATConv(HaloExecution, pyg.GATConv):
    pass


class DistGATv2Conv(HaloExecution, pyg.GATv2Conv):
    pass


class DistGENConv(HaloExecution, pyg.GENConv):
    pass


class DistGINConv(HaloExecution, pyg.GINConv):
    pass


class DistGINEConv(HaloExecution, pyg.GINEConv):
    pass


class DistGMMConv(HaloExecution, pyg.GMMConv):
    pass


class DistGatedGraphConv(HaloExecution, pyg.GatedGraphConv):
    pass


class DistGeneralConv(HaloExecution, pyg.GeneralConv):
    pass


class DistGraphConv(HaloExecution, pyg.GraphConv):
    pass


class DistGravNetConv(HaloExecution, pyg.GravNetConv):
    pass


class DistHEATConv(HaloExecution, pyg.HEATConv):
    pass


class DistHypergraphConv(HaloExecution, pyg.HypergraphConv):
    pass


class DistLEConv(HaloExecution, pyg.LEConv):
    pass


class DistLGConv(HaloExecution, pyg.LGConv):
    pass


class DistMeshCNNConv(HaloExecution, pyg.MeshCNNConv):
    pass


class DistMessagePassing(HaloExecution, pyg.MessagePassing):
    pass


class DistMixHopConv(HaloExecution, pyg.MixHopConv):
    pass


class DistNNConv(HaloExecution, pyg.NNConv):
    pass


class DistPANConv(HaloExecution, pyg.PANConv):
    pass


class DistPDNConv(HaloExecution, pyg.PDNConv):
    pass


class DistPNAConv(HaloExecution, pyg.PNAConv):
    pass


class DistPPFConv(HaloExecution, pyg.PPFConv):
    pass


class DistPointGNNConv(HaloExecution, pyg.PointGNNConv):
    pass


class DistPointNetConv(HaloExecution, pyg.PointNetConv):
    pass


class DistPointTransformerConv(HaloExecution, pyg.PointTransformerConv):
    pass


class DistRGATConv(HaloExecution, pyg.RGATConv):
    pass


class DistRGCNConv(HaloExecution, pyg.RGCNConv):
    pass


class DistResGatedGraphConv(HaloExecution, pyg.ResGatedGraphConv):
    pass


class DistSGConv(HaloExecution, pyg.SGConv):
    pass


class DistSSGConv(HaloExecution, pyg.SSGConv):
    pass


class DistSimpleConv(HaloExecution, pyg.SimpleConv):
    pass


class DistSplineConv(HaloExecution, pyg.SplineConv):
    pass


class DistTAGConv(HaloExecution, pyg.TAGConv):
    pass


class DistTransformerConv(HaloExecution, pyg.TransformerConv):
    pass


class DistWLConvContinuous(HaloExecution, pyg.WLConvContinuous):
    pass


AGNNConv = DistAGNNConv
APPNP = DistAPPNP
CGConv = DistCGConv
ChebConv = DistChebConv
ClusterGCNConv = DistClusterGCNConv
DNAConv = DistDNAConv
DynamicEdgeConv = DistDynamicEdgeConv
EGConv = DistEGConv
EdgeConv = DistEdgeConv
FAConv = DistFAConv
FeaStConv = DistFeaStConv
FiLMConv = DistFiLMConv
FusedGATConv = DistFusedGATConv
GATConv = DistGATConv
GATv2Conv = DistGATv2Conv
GENConv = DistGENConv
GINConv = DistGINConv
GINEConv = DistGINEConv
GMMConv = DistGMMConv
GatedGraphConv = DistGatedGraphConv
GeneralConv = DistGeneralConv
GraphConv = DistGraphConv
GravNetConv = DistGravNetConv
HEATConv = DistHEATConv
HypergraphConv = DistHypergraphConv
LEConv = DistLEConv
LGConv = DistLGConv
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
SGConv = DistSGConv
SSGConv = DistSSGConv
SimpleConv = DistSimpleConv
SplineConv = DistSplineConv
TAGConv = DistTAGConv
TransformerConv = DistTransformerConv
WLConvContinuous = DistWLConvContinuous
