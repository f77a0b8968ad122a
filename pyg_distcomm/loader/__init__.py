"""Provides every name of `torch_geometric.loader`, with loaders that run on many ranks.

NeighborLoader and LinkNeighborLoader are DistNeighborLoader and DistLinkNeighborLoader;
loaders of subgraphs, NeighborSampler, DataLoader, TemporalDataLoader and ImbalancedSampler are
classes of PyG's names. All else is PyG's own.
"""

from __future__ import annotations

from typing import Any

import torch_geometric.loader as _pyg

from pyg_distcomm.loader.data_loader import DataLoader as DataLoader
from pyg_distcomm.loader.data_loader import ImbalancedSampler as ImbalancedSampler
from pyg_distcomm.loader.data_loader import TemporalDataLoader as TemporalDataLoader
from pyg_distcomm.loader.epoch import Phases as Phases
from pyg_distcomm.loader.feature_store import DistFeatureStore as DistFeatureStore
from pyg_distcomm.loader.neighbor_loader import DistLayerLoader as DistLayerLoader
from pyg_distcomm.loader.neighbor_loader import (
    DistLinkNeighborLoader as DistLinkNeighborLoader,
)
from pyg_distcomm.loader.neighbor_loader import DistNeighborLoader as DistNeighborLoader
from pyg_distcomm.loader.neighbor_loader import HGTLoader as HGTLoader
from pyg_distcomm.loader.neighbor_loader import NeighborSampler as NeighborSampler
from pyg_distcomm.loader.options import LoaderOptions as LoaderOptions
from pyg_distcomm.loader.shared import shared as shared
from pyg_distcomm.loader.subgraphs import ClusterData as ClusterData
from pyg_distcomm.loader.subgraphs import ClusterLoader as ClusterLoader
from pyg_distcomm.loader.subgraphs import GraphSAINTEdgeSampler as GraphSAINTEdgeSampler
from pyg_distcomm.loader.subgraphs import GraphSAINTNodeSampler as GraphSAINTNodeSampler
from pyg_distcomm.loader.subgraphs import (
    GraphSAINTRandomWalkSampler as GraphSAINTRandomWalkSampler,
)
from pyg_distcomm.loader.subgraphs import GraphSAINTSampler as GraphSAINTSampler
from pyg_distcomm.loader.subgraphs import RandomNodeLoader as RandomNodeLoader
from pyg_distcomm.loader.subgraphs import ShaDowKHopSampler as ShaDowKHopSampler
from pyg_distcomm.pyg_mirror import mirror as _mirror

LinkNeighborLoader = DistLinkNeighborLoader
NeighborLoader = DistNeighborLoader

_OURS = """ClusterData ClusterLoader DataLoader DistFeatureStore DistLayerLoader
DistLinkNeighborLoader DistNeighborLoader GraphSAINTEdgeSampler GraphSAINTNodeSampler
GraphSAINTRandomWalkSampler GraphSAINTSampler HGTLoader ImbalancedSampler
LinkNeighborLoader LoaderOptions NeighborLoader NeighborSampler Phases RandomNodeLoader
ShaDowKHopSampler TemporalDataLoader shared""".split()
__all__ = sorted({*_OURS, *_pyg.__all__})
_mirror(__name__, _pyg.__name__)


def __getattr__(name: str) -> Any:
    """Returns any other name of `torch_geometric.loader`: PyG's own."""
    return getattr(_pyg, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
