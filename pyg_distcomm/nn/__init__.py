"""Layers: every name of `torch_geometric.nn`, distributed when given a graph's share.

A script moves by replacing the module's name. Message passing layers are PyG's classes with
`HaloExecution` before them (`layers.py`), models are PyG's with their layers converted,
and everything else (norms, aggregations, `Linear`, `global_mean_pool`) is PyG's own, since
DistTensors behave as whole tensors. On ordinary inputs everything runs PyG's code.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from types import ModuleType as _ModuleType
from typing import Any

import torch
import torch_geometric.nn as _pyg

from pyg_distcomm.nn import layers as _layers
from pyg_distcomm.nn.embedding import DistEmbedding as DistEmbedding
from pyg_distcomm.nn.halo_conv import HaloConv as HaloConv
from pyg_distcomm.nn.halo_conv import HaloExecution as HaloExecution
from pyg_distcomm.nn.layers import *  # noqa: F403
from pyg_distcomm.nn.layers import DISTRIBUTED as _DISTRIBUTED
from pyg_distcomm.nn.layers import Converted as _Converted
from pyg_distcomm.nn.layers import convert as convert
from pyg_distcomm.nn.product_layers import DistGCN2Conv as DistGCN2Conv
from pyg_distcomm.nn.product_layers import DistGCNConv as DistGCNConv
from pyg_distcomm.nn.product_layers import DistSAGEConv as DistSAGEConv
from pyg_distcomm.nn.replicate import replicate as replicate
from pyg_distcomm.nn.trimming import trimming_of as trimming_of
from pyg_distcomm.pyg_mirror import mirror as _mirror

_OURS = (
    "convert replicate HaloConv HaloExecution DistEmbedding DistGCNConv "
    "DistGCN2Conv DistSAGEConv trimming_of"
).split()
_WITH_LAYERS = ("torch_geometric.nn.models.", "torch_geometric.nn.pool.")
_THEIRS = [name for name in dir(_pyg) if name[0] != "_"]
__all__ = sorted({*_OURS, *vars(_layers)["__all__"], *_THEIRS})
_mirror(__name__, _pyg.__name__)


def __getattr__(name: str) -> Any:
    """Returns a name of `torch_geometric.nn`; a model class gets its layers converted."""
    found = getattr(_pyg, name)
    if isinstance(found, _ModuleType):
        return _import_module(f"{__name__}.{name}")
    is_model = isinstance(found, type) and issubclass(found, torch.nn.Module)
    if is_model and found.__module__.startswith(_WITH_LAYERS):
        told = {"__module__": __name__, "__doc__": found.__doc__}
        found = type(name, (_Converted, _DISTRIBUTED.get(found, found)), told)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
