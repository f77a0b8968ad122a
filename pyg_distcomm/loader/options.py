"""The arguments that PyG's loaders do not have, and those that have no use here."""

from __future__ import annotations

import hashlib
import operator
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# arguments of torch_geometric.distributed's loaders that have no meaning here
RPC_ARGUMENTS = (
    "master_addr",
    "master_port",
    "current_ctx",
    "dist_sampler",
    "concurrency",
    "num_rpc_threads",
    "async_sampling",
    "device",
)


@dataclass(frozen=True)
class Extras:
    """The arguments that PyG's loaders do not have; see `DistNeighborLoader`."""

    bulk_size: int | str = "auto"
    seed: int | None = None
    even_batches: str = "pad"
    prefetch: int = 1
    split: bool | str = "auto"

    def __post_init__(self) -> None:
        if self.seed is not None:
            try:
                object.__setattr__(self, "seed", operator.index(self.seed))
            except TypeError:
                raise ValueError(
                    f"seed must be a whole number, got {self.seed!r}"
                ) from None
        whole = isinstance(self.bulk_size, int) and self.bulk_size >= 1
        if not whole and self.bulk_size != "auto":
            raise ValueError(
                f"bulk_size must be 'auto' or at least 1, got {self.bulk_size!r}"
            )
        if self.even_batches not in ("pad", "drop"):
            raise ValueError(
                f"even_batches must be 'pad' or 'drop', got {self.even_batches!r}"
            )
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(
                f"prefetch must be a number of bulks, 0 or more, got {self.prefetch!r}"
            )
        if self.split not in (True, False, "auto"):
            raise ValueError(f"split must be 'auto', True or False, got {self.split!r}")


def unused_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Takes out the arguments of torch_geometric.distributed, and says so."""
    unused = [name for name in RPC_ARGUMENTS if kwargs.get(name) is not None]
    if unused:
        warnings.warn(
            f"{', '.join(unused)}: arguments of torch_geometric.distributed that are not "
            "used here, where ranks are those of torch.distributed; leave them out",
            stacklevel=3,
        )
    return {k: v for k, v in kwargs.items() if k not in RPC_ARGUMENTS}


def digest(inputs: list[Any]) -> str:
    """Returns a hash of lists and options."""
    digest = hashlib.blake2b(digest_size=16)
    for part in inputs:
        if isinstance(part, Tensor):
            part = part.detach().cpu().resolve_conj().resolve_neg().contiguous()
            digest.update(f"{part.dtype}{list(part.shape)}".encode())
            digest.update(part.view(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(part).encode())
    return digest.hexdigest()


def check_mask(data: Any, nodes: Any) -> None:
    """Refuses a mask of seeds that is not as long as there are nodes."""
    name, mask = (
        nodes if isinstance(nodes, tuple) and len(nodes) == 2 else (None, nodes)
    )
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return
    if isinstance(data, tuple):  # stores: PyG asks them for sizes where it needs them
        return
    store = data if name is None else data[name]
    count = store.num_nodes
    if count is not None and mask.shape != (count,):
        raise ValueError(
            f"input_nodes is a mask of shape {list(mask.shape)}, but there are {count} "
            "nodes; give one entry for each, or ids"
        )
