"""Plain definitions that compiled kernels are compared with."""

from __future__ import annotations

from itertools import pairwise
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


def minimum_cover(ptr, to, num_right):
    """Returns the smallest vertex cover with the most left vertices, by Konig's theorem."""
    neighbours = [to[a:b].tolist() for a, b in pairwise(ptr.tolist())]
    mate = {}  # of right vertices

    def reached(start):
        """Searches alternating paths: who led to each right vertex, and a free one."""
        led = {}
        queue = [start]
        for u in queue:
            for v in neighbours[u]:
                if v not in led:
                    led[v] = u
                    if v not in mate:
                        return led, v
                    queue.append(mate[v])
        return led, None

    left = torch.ones(len(neighbours), dtype=torch.bool)
    right = torch.zeros(num_right, dtype=torch.bool)
    for start in range(len(neighbours)):
        led, v = reached(start)
        while v is not None:  # turns the path around
            u = led[v]
            before = next((w for w, m in mate.items() if m == u), None)
            mate[v] = u
            v = before if u != start else None
    for start in set(range(len(neighbours))) - set(mate.values()):
        led, _ = reached(start)
        left[[start, *(mate[v] for v in led)]] = False
        right[list(led)] = True
    return left, right
