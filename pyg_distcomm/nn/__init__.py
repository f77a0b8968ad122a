"""Layers: PyG's own, distributed when they are given a DistEdgeIndex."""

from pyg_distcomm.nn.convert import convert as convert
from pyg_distcomm.nn.gcn2_conv import DistGCN2Conv as DistGCN2Conv
from pyg_distcomm.nn.gcn_conv import DistGCNConv as DistGCNConv
from pyg_distcomm.nn.halo_conv import HaloConv as HaloConv
from pyg_distcomm.nn.norm import DistBatchNorm as DistBatchNorm
from pyg_distcomm.nn.replicate import replicate as replicate
from pyg_distcomm.nn.sage_conv import DistSAGEConv as DistSAGEConv
