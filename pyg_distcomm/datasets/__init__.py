"""Loads graphs by name: PyG's and OGB's data sets, files, and graphs that are generated."""

from pyg_distcomm.datasets.loading import KNOWN as KNOWN
from pyg_distcomm.datasets.loading import digits as digits
from pyg_distcomm.datasets.loading import generated as generated
from pyg_distcomm.datasets.loading import is_known as is_known
from pyg_distcomm.datasets.loading import load_dataset as load_dataset

__all__ = [
    "KNOWN",
    "digits",
    "generated",
    "is_known",
    "load_dataset",
]
