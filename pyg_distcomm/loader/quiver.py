"""QuiverFeature: a feature that quiver-feature holds, as an attribute of our store."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class QuiverFeature:
    """Reads rows by id from an object with the interface of quiver-feature's DistTensor.

    That object does its own communication: nothing of it is in our ledger or in our
    price. Put it in a store with `store.put_tensor(QuiverFeature(t), group_name=None,
    attr_name="x", index=None)`; its rows then come with every fetch.

    Args:
        tensor: has `tensor[ids]` `[k, f]` for int64 ids, and `shape` `(n, f)`. It may
            write into the ids it is given, and answer on another device.
        most: rows it can answer at a time: the first size of its buffer.
    """

    def __init__(self, tensor: Any, most: int | None = None) -> None:
        missing = [n for n in ("__getitem__", "shape") if not hasattr(tensor, n)]
        if missing or len(tensor.shape) != 2:
            raise TypeError(
                f"{type(tensor).__name__} does not look like quiver-feature's DistTensor: "
                "it needs tensor[ids], and a shape (rows, width)"
            )
        self._tensor, self._most = tensor, most

    @property
    def shape(self) -> torch.Size:
        """Rows and width of the whole tensor."""
        return torch.Size(self._tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        dtype: torch.dtype = getattr(self._tensor, "dtype", torch.float32)
        return dtype

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Returns rows `[len(ids), f]` on the CPU."""
        out = torch.empty(len(ids), self.shape[1], dtype=self.dtype)
        step = self._most or max(1, len(ids))
        for start in range(0, len(ids), step):
            part = slice(start, start + step)
            out[part] = self._tensor[ids[part].clone()]
        return out
