"""Leaves row-cut tensors, and what runs on them, to eager mode under torch.compile.

Their operations may exchange messages, which no compiled graph may move, drop or repeat. A
compiled model breaks its graph at them: its results are those of eager mode. On ordinary
inputs the layers of this package are traced as PyG's are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._dynamo import config, disable, trace_rules

Kind = TypeVar("Kind", bound=type[torch.Tensor])
Function = TypeVar("Function", bound=Callable[..., Any])

for _path in sorted(Path(__file__).parents[1].iterdir()):
    if _path.stem not in ("__init__", "nn") and _path.stem.isidentifier():
        if _path.suffix == ".py" or (_path / "__init__.py").exists():
            trace_rules.add(f"pyg_distcomm.{_path.stem}")


def eager(kind: Kind) -> Kind:
    """Marks a subclass of Tensor as one that torch.compile does not trace."""
    if hasattr(config, "nontraceable_tensor_subclasses"):
        known = config.nontraceable_tensor_subclasses
        config.nontraceable_tensor_subclasses = known | {kind}
    return kind


def eagerly(function: Function) -> Function:
    """Marks a function that torch.compile does not trace, nor what it calls."""
    return disable(function)  # type: ignore[no-any-return]
