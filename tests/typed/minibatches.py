"""Minibatches of nodes, as a script that a type checker reads."""

import torch
from torch_geometric.data.data import Data
from typing_extensions import reveal_type

import pyg_distcomm as pdc
from pyg_distcomm.loader import (
    ClusterData,
    ClusterLoader,
    DistLayerLoader,
    LoaderOptions,
    NeighborLoader,
)
from pyg_distcomm.nn import SAGEConv


def load(whole: Data, conv: torch.nn.Module) -> None:
    share = pdc.partition(whole, pdc.init())
    options = LoaderOptions(seed=0, draws="labor")
    loader = NeighborLoader(share, [10, 5], batch_size=8, options=options)
    for batch in loader:
        reveal_type(batch)  # Data
        conv(batch.x, batch.edge_index)
    for part in ClusterLoader(ClusterData(whole, 4), batch_size=2):
        reveal_type(part)  # Data
    for layered in DistLayerLoader(whole, [8, 8], "ladies"):
        reveal_type(layered)  # Data
    reveal_type(SAGEConv(16, 4))  # DistSAGEConv
    loader.load_state_dict(loader.state_dict())
