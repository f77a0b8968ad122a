"""Samples minibatches; the samplers behind the loaders can be used by themselves.

Letters: n nodes, E edges, k fan-out, t the number of a minibatch in its epoch. In the
algebra: k minibatches in a bulk, m rows of a stacked matrix, s draws of a row, R rows and C
columns of a layer, v a row and u a column.
"""

from pyg_distcomm.sampling import algebra as algebra
from pyg_distcomm.sampling.algebra import BulkMatrix as BulkMatrix
from pyg_distcomm.sampling.algebra import BulkNodes as BulkNodes
from pyg_distcomm.sampling.algebra import Sample as Sample
from pyg_distcomm.sampling.layer_graph import LayerEdges as LayerEdges
from pyg_distcomm.sampling.layer_graph import LayerGraph as LayerGraph
from pyg_distcomm.sampling.layer_graph import LocalLayerGraph as LocalLayerGraph
from pyg_distcomm.sampling.layer_sampler import KeyedLayerSampler as KeyedLayerSampler
from pyg_distcomm.sampling.layer_sampler import LayerSamplerOutput as LayerSamplerOutput
from pyg_distcomm.sampling.neighbor_sampler import (
    KeyedNeighborSampler as KeyedNeighborSampler,
)
from pyg_distcomm.sampling.partitioned import (
    PartitionedLayerGraph as PartitionedLayerGraph,
)
from pyg_distcomm.sampling.partitioned import (
    PartitionedNeighborSampler as PartitionedNeighborSampler,
)
from pyg_distcomm.sampling.rules import FastGCN as FastGCN
from pyg_distcomm.sampling.rules import GraphSAGE as GraphSAGE
from pyg_distcomm.sampling.rules import Ladies as Ladies
from pyg_distcomm.sampling.rules import Rule as Rule
from pyg_distcomm.sampling.rules import UserRule as UserRule

__all__ = [
    "BulkMatrix",
    "BulkNodes",
    "FastGCN",
    "GraphSAGE",
    "KeyedLayerSampler",
    "KeyedNeighborSampler",
    "Ladies",
    "LayerEdges",
    "LayerGraph",
    "LayerSamplerOutput",
    "LocalLayerGraph",
    "PartitionedLayerGraph",
    "PartitionedNeighborSampler",
    "Rule",
    "Sample",
    "UserRule",
    "algebra",
]
