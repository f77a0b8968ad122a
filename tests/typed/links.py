"""Minibatches of links of a graph with types, as a script that a type checker reads."""

from torch_geometric.data.hetero_data import HeteroData
from typing_extensions import reveal_type

import pyg_distcomm as pdc
from pyg_distcomm.loader import HGTLoader, LinkNeighborLoader
from pyg_distcomm.nn import GATConv


def load(whole: HeteroData) -> None:
    share = pdc.partition(whole, pdc.init(pdc.Auto(whole, widths=[8, 4])))
    reveal_type(share)  # HeteroData
    reveal_type(GATConv(16, 4))  # Any
    for batch in LinkNeighborLoader(share, [5], neg_sampling="binary"):
        reveal_type(batch)  # HeteroData
    for drawn in HGTLoader(share, [8, 8], "paper"):
        reveal_type(drawn)  # HeteroData
