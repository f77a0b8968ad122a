"""Trains PyTorch Geometric models on graphs that are spread over processes.

Letters in docstrings: n nodes, n_i own rows of rank i, e edges, h ghosts (rows of other
ranks needed here), f features, P ranks, a grid r x s x p of them (row, col, fiber),
c copies (replication), L layers. A `gid` is a node's row in the user's Data, a `lid`
its place on this rank; ghosts come after own rows.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyg_distcomm.api import *  # noqa: F403

__version__ = "0.1.0"
# ruff: noqa: F405
__all__ = [  # as in `api`
    "BNS",
    "SANCUS",
    "VARCO",
    "Auto",
    "CSVWriter",
    "DistEdgeIndex",
    "DistEmbedding",
    "DistTensor",
    "Ledger",
    "LinkPolicy",
    "Mesh",
    "Partition",
    "PartitionReport",
    "PipeGCN",
    "Pipeline",
    "Plan",
    "Plans",
    "RandomGraph",
    "RankError",
    "Rows",
    "Sylvie",
    "TensorBoardWriter",
    "clip_grad_norm_",
    "convert",
    "from_local",
    "init",
    "launch",
    "load_checkpoint",
    "load_partition",
    "metrics",
    "on_preempt",
    "partition",
    "partition_report",
    "plan",
    "replicate",
    "save_checkpoint",
    "trace",
]


class _Package(ModuleType):
    """Loads public names at their first use, so that `pyg-distcomm --help` need not."""

    def __getattr__(self, name: str) -> Any:
        if name in __all__:
            api = import_module("pyg_distcomm.api")
            self.__dict__.update({each: getattr(api, each) for each in __all__})
            return self.__dict__[name]
        if not name.startswith("_") and find_spec(f"pyg_distcomm.{name}"):
            return import_module(f"pyg_distcomm.{name}")
        raise AttributeError(f"module 'pyg_distcomm' has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # Python sets `partition` and `plan` to the packages when it imports those
        if name not in __all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        # or cloudpickle, which pickles functions of __main__, would copy the module
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
