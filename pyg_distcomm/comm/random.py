"""Draws keyed random numbers: functions of (seed, step, global id, column).

[Note: keyed randomness] No generator is advanced, so the number of ranks, the partition
and the order of calls on one rank cannot change a draw. A key is 63 bits folded from
integers with the splitmix64 finaliser ([Steele14] Sec. 3); the bits for one (id, column)
are a hash of the key and the two (`kernels.keyed_bits` is the definition).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyg_distcomm import kernels

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def fold(*parts: int) -> int:
    """Folds integers into one key in [0, 2^63); the order matters."""
    key = 0
    for part in parts:
        key = _mix((key + _GOLDEN) & _MASK ^ _mix(part & _MASK))
    return key >> 1


def fresh_seed(generator: torch.Generator | None = None) -> int:
    """Draws a seed from torch's generator, so that `torch.manual_seed` decides it."""
    return int(torch.randint(1 << 62, (), generator=generator))


@contextlib.contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Restores the state of torch's generators after a block that calls `seed`."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def seed(key: int, device: torch.device) -> None:
    """Seeds torch's generators of the CPU and of one device only.

    Takes a hundredth of the time of `torch.manual_seed`.
    """
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)


_BLOCK = 1 << 22  # entries drawn at a time


def draw_rows(
    draw: Callable[[Tensor], Tensor], like: Tensor, total: int, place: Tensor
) -> Tensor:
    """Returns the rows at `place` of a tensor `[total, ...]` drawn by torch's generator.

    All rows are drawn, a block at a time, so that the generators of all ranks end in the same
    state as that of one process. Price: no message, and on each rank the draws of one process.

    Args:
        draw: returns a random tensor like the one it is given, which it may fill.
        like: rows of the wanted shape, dtype and device.
        total: the number of rows of the whole tensor.
        place: the rows to return `[n]`, ascending, on the CPU.
    """
    width = math.prod(like.shape[1:])
    # the CPU's normal numbers come 16 at a time, and a CUDA kernel's depend on the size
    step = max(16, _BLOCK // max(width, 1) // 16 * 16)
    if like.device.type != "cpu":
        step = total
    starts = [*range(0, max(total - 16, 1), max(step, 1)), total]
    out = torch.empty_like(like)
    for start, stop in itertools.pairwise(starts):
        block = draw(like.new_empty((stop - start, *like.shape[1:])))
        first, last = torch.searchsorted(place, torch.tensor([start, stop])).tolist()
        out[first:last] = block[(place[first:last] - start).to(block.device)]
    return out


def keyed_bits48(key: int, ids: Tensor) -> Tensor:
    """Returns 48 random bits for each id, as int64."""
    bits = kernels.keyed_bits(key, ids, 2).long()
    return bits[:, 0] << 24 | bits[:, 1]


def keyed_sample(key: int, ids: Tensor, weight: Tensor, count: int) -> Tensor:
    """Draws `count` places without replacement by weight, as int64, in the order drawn.

    Takes the places with the least -log(u) / weight ([Efraimidis06]); u is keyed by the id.

    Shapes: ids [m] distinct, weight [m] positive; returns [min(m, count)].
    """
    unit = (keyed_bits48(key, ids).double() + 0.5) * 2.0**-48
    clock = -unit.log() / weight
    return clock.topk(min(count, len(ids)), largest=False).indices


def keyed_unit(key: int, count: int) -> Tensor:
    """Returns `count` uniform float64 numbers in [0, 1), in steps of 2^-48."""
    return keyed_bits48(key, torch.arange(count)).double() * 2.0**-48


def keyed_choice(key: int, weight: Tensor, count: int) -> Tensor:
    """Draws `count` places with replacement, each with chance weight / sum, as int64.

    Draw k takes the first place whose running sum of weights exceeds u_k times the whole.
    """
    running = weight.double().cumsum(0)
    goal = keyed_unit(key, count) * running[-1]
    place = torch.searchsorted(running, goal, right=True)
    return place.clamp_(max=weight.numel() - 1)


def keyed_permutation(key: int, count: int) -> Tensor:
    """Returns 0 .. count-1 sorted by a keyed hash of each."""
    return torch.argsort(keyed_bits48(key, torch.arange(count)), stable=True)


def keyed_uniform(key: int, gid: Tensor, like: Tensor) -> Tensor:
    """Returns uniform numbers in (0, 1) shaped as `like`, one row per global id."""
    columns = math.prod(like.shape[1:])
    bits = kernels.keyed_bits(key, gid, columns)
    uniform = ((bits.to(torch.float64) + 0.5) * 2.0**-24).to(like.dtype)
    top = 1 - torch.finfo(like.dtype).eps / 2  # narrow types round the largest up to 1
    return uniform.clamp_(max=top).view(like.shape)
