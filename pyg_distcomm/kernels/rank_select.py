"""Where ids stand in a sorted list: a bit for each id there could be, and counts.

`reference.places` is the definition. Memory: 12 bytes for 64 ids in [0, total), whether
they are in the list or not; a lookup touches two lines of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_distcomm.kernels import rank_select_jit as loops
from pyg_distcomm.kernels import threads
from pyg_distcomm.kernels.compile import ready

GRAIN = 1 << 14  # lookups that are worth a thread


class RankSelect:
    """The places of ascending, distinct ids in [0, total), for fast lookups."""

    def __init__(self, gid: Tensor, total: int) -> None:
        words = torch.zeros(total // 64 + 1, dtype=torch.int64)
        kind = torch.int32 if len(gid) < 2**31 else torch.int64
        counts = torch.zeros(total // 64 + 1, dtype=kind)
        self._bits = words.numpy().view("uint64"), counts.numpy()
        ready(loops.mark, (gid.long().contiguous().numpy(), *self._bits))()

    def __call__(self, ids: Tensor) -> Tensor:
        """Returns the place of each id [k], -1 for those that are not in the list."""
        ids = ids.long().contiguous()
        out = torch.empty_like(ids)
        find = ready(loops.find, (*self._bits, ids.numpy(), out.numpy()), integers=2)
        threads.run_split(find, len(ids), GRAIN)
        return out
