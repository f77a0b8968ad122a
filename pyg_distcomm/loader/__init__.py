"""Loaders of minibatches, in the place of PyG's."""

from pyg_distcomm.loader.feature_store import (
    DistFeatureStore as DistFeatureStore,
)
from pyg_distcomm.loader.layer_loader import (
    DistLayerLoader as DistLayerLoader,
)
from pyg_distcomm.loader.link_neighbor_loader import (
    DistLinkNeighborLoader as DistLinkNeighborLoader,
)
from pyg_distcomm.loader.neighbor_loader import (
    DistNeighborLoader as DistNeighborLoader,
)
from pyg_distcomm.loader.phases import Phases as Phases
from pyg_distcomm.loader.phases import plot_phases as plot_phases
from pyg_distcomm.loader.shared import shared as shared
