"""Plain definitions that compiled kernels are compared with."""

from types import SimpleNamespace

import torch

from pyg_distcomm.kernels.registry import Op


def of(module):
    """Returns the definitions of a module's ops, by name."""
    ops = {n: v for n, v in vars(module).items() if isinstance(v, Op)}
    own = {n: op for n, op in ops.items() if op.__module__ == module.__name__}
    return SimpleNamespace(**{n: op.definition for n, op in own.items()})


def places(gid, ids):
    """Returns where ids [k] stand in ascending, distinct gid [m]; -1 if they do not."""
    if not len(gid):
        return torch.full_like(ids, -1)
    place = torch.searchsorted(gid, ids).clamp_(max=len(gid) - 1)
    return torch.where(gid[place] == ids, place, -1)
