"""Leaves row-cut tensors, and this package's own code, to eager mode under torch.compile.

Their operations may exchange messages, which no compiled graph may move, drop or repeat. A
compiled model breaks its graph at them: its results are those of eager mode.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch._dynamo import config, trace_rules

Kind = TypeVar("Kind", bound=type[torch.Tensor])

trace_rules.add("pyg_distcomm")


def eager(kind: Kind) -> Kind:
    """Marks a subclass of Tensor as one that torch.compile does not trace."""
    if hasattr(config, "nontraceable_tensor_subclasses"):
        known = config.nontraceable_tensor_subclasses
        config.nontraceable_tensor_subclasses = known | {kind}
    return kind
