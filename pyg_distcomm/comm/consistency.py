"""Compares what every rank holds a copy of, and counts rows over the ranks.

All of it travels over the mesh's control axis, a process group of its own, so that a rank
that asks alone can not be answered by another exchange.
"""

from __future__ import annotations

import gc
import hashlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.serialization import differing

_LONG = 1 << 26  # bytes up to which all of a tensor is hashed
_ROUNDING = 1.0  # of the root of the dtype's rounding: how far processors part copies
_PIECES = 64  # of a longer one


def count_rows(here: int, mesh: Mesh) -> int:
    """Returns the sum of a number of rows over the ranks; collective.

    Each rank also says which of its questions this is: a rank that asks alone, and meets
    another's next question, raises instead of taking the answer to that.

    Price: one all-reduce of three words.

    Raises:
        ValueError: on the ranks that met, if they are not at the same question.
    """
    if mesh.size == 1:
        return here
    axis = mesh.control  # which a chunk's mesh refuses
    mesh.questions += 1
    turn = mesh.questions
    told = collectives.all_reduce(torch.tensor([here, turn, turn * turn]), axis)
    total, turns, squares = (int(v) for v in told)
    if turns != mesh.size * turn or squares != mesh.size * turn * turn:
        raise ValueError(
            f"rank {mesh.rank} asked for the length of a selection (len, size or shape of "
            "rows that a computed mask keeps) that not all ranks asked for; ask on all "
            "ranks, or use .to_local()"
        )
    return total


def digest(x: Tensor) -> int:
    """Returns a hash of dtype, shape and values of a tensor, in [0, 2^62)."""
    x = x.detach()
    if x.layout != torch.strided:
        parts = [digest(part) for part in _parts(x)]
        return digest(torch.tensor([*parts, *x.shape]))
    known = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)}".encode(), digest_size=8)
    if x.numel():
        raw = x.cpu().contiguous().flatten().view(torch.uint8)
        known.update(raw.numpy().data)
    return int.from_bytes(known.digest(), "little") >> 2


def _parts(x: Tensor) -> list[Tensor]:
    """Returns the indices and values that a sparse tensor is made of."""
    if x.layout == torch.sparse_coo:
        x = x.coalesce()
        return [x.indices(), x.values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x.to_dense()]


def sampled_digest(x: Tensor) -> int:
    """Returns `digest` of a tensor, or of pieces all over it where it is long.

    Price: a second per GB, of at most 64 MiB.
    """
    if (
        x.layout != torch.strided
        or x.numel() * x.element_size() <= _LONG
        or x.dim() == 0
    ):
        return digest(x)
    rows = x.size(0)
    piece = max(1, rows * _LONG // (x.numel() * x.element_size()) // _PIECES)
    begins = torch.linspace(0, max(0, rows - piece), _PIECES).long().tolist()
    marks = [digest(x[at : at + piece]) for at in begins]
    told = torch.tensor([*marks, *x.shape])
    return digest(told)


class Comparer:
    """Compares replicated tensors between ranks, each time or the first time.

    Args:
        mesh: the ranks, and whether to compare (`Mesh.check`).
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._kinds: set[Any] = set()
        self._seen: Any = WeakTensorKeyDictionary()
        self._given: Any = weakref.WeakKeyDictionary()

    def check_given(
        self, owner: Any, value: Any, told: Callable[[], dict[str, str]]
    ) -> None:
        """Raises on all ranks if they gave an object, when first used, other settings.

        Price: one all-gather of a word a rank, once for each owner and value.

        Args:
            owner: what was given the value, such as a layer.
            value: what it was given.
            told: returns the settings of that, by name.

        Raises:
            ValueError: naming what differs, and both values.
        """
        mesh = self._mesh
        if mesh.size == 1 or mesh.check == "never":
            return
        if owner in self._given and self._given[owner] is value:
            return
        self._given[owner] = value
        mine = {"type of layer": type(owner).__name__, **told()}
        mark = hashlib.blake2b(repr(mine).encode(), digest_size=8).digest()
        marks = collectives.all_gather_counts(
            [int.from_bytes(mark, "little") >> 2], mesh.control
        )
        if any(mark != marks[0] for mark in marks):
            found = differing(collectives.all_gather_object(mine, mesh.control))
            raise ValueError(
                f"run the same layers on all ranks in the same order: {found}"
            )

    def check(self, x: Tensor, what: str) -> None:
        """Raises on all ranks if a plain tensor differs between them; collective.

        Args:
            x: the tensor, without gradient.
            what: what it is used in.

        Raises:
            ValueError: naming the operation and the ranks.
        """
        mesh = self._mesh
        kind = what, tuple(x.shape), x.dtype
        if mesh.check == "first":
            if kind in self._kinds:
                return
        elif mesh.check == "never" or self._seen.get(x) == _version(x):
            return
        self._kinds.add(kind)
        if mesh.check == "always":
            self._seen[x] = _version(x)
        marks = collectives.all_gather_counts([digest(x)], mesh.control)
        differ = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        if differ:
            raise ValueError(
                f"seed what draws this tensor: {what}() got a plain tensor of shape "
                f"{list(x.shape)} and {x.dtype} beside a row-cut one, which means the same "
                f"values on all ranks, but ranks {differ} hold others than rank 0. Call "
                "torch.manual_seed (and the seeds of numpy and random) with the same "
                "number on all ranks, or make rows of this rank row-cut by "
                "pdc.from_local(t, like=x)"
            )

    def realign(self, leaves: dict[int, Tensor]) -> None:
        """Gives parameters rank 0's values where rounding has parted them; collective.

        Args:
            leaves: parameters, by their number in the order of first use.

        Raises:
            ValueError: where more than rounding has; on all ranks.
        """
        mesh = self._mesh
        told = [
            len(leaves),
            *(part for k, x in leaves.items() for part in (k, digest(x))),
        ]
        sizes = collectives.all_gather_counts([len(told)], mesh.control)
        if any(size != sizes[0] for size in sizes):
            return  # passes reach unlike leaves, which is told elsewhere
        marks = collectives.all_gather_counts(told, mesh.control)
        numbers = list(leaves)
        if any(mark[1::2] != numbers for mark in marks):
            return
        for place, (number, x) in enumerate(leaves.items()):
            if all(mark[2 + 2 * place] == marks[0][2 + 2 * place] for mark in marks):
                continue
            mine = x.detach()
            first = collectives.all_reduce(
                mine if mesh.rank == 0 else torch.zeros_like(mine), mesh.data
            )
            gap, size = (first - mine).abs().max(), first.abs().max()
            far = bool(gap > _ROUNDING * torch.finfo(x.dtype).eps ** 0.5 * size)
            if any(
                row[0]
                for row in collectives.all_gather_counts([int(far)], mesh.control)
            ):
                ranks = [r for r, m in enumerate(marks) if m != marks[0]]
                options = _options_of(list(leaves.values()))
                found = differing(collectives.all_gather_object(options, mesh.control))
                if found is not None:
                    raise ValueError(found)
                raise ValueError(
                    "train all ranks alike: a parameter that they hold copies of (number "
                    f"{number} in order of first use, shape {list(x.shape)}) has other "
                    f"values on ranks {ranks} than on rank 0. Give optimizers the same lr "
                    "and options on all ranks, step on all or on none, and change "
                    "parameters on all alike"
                )
            with torch.no_grad():
                x.data.copy_(first)
            self._say_once(
                f"parameters parted between ranks by rounding (number {number} in order "
                f"of first use, by {float(gap):.1e}); rank 0's are taken everywhere"
            )

    def _say_once(self, text: str) -> None:
        if not self._told and self._mesh.rank == 0:
            warnings.warn(text, stacklevel=3)
        self._told = True

    def equalise(self, x: Tensor) -> None:
        """Gives a parameter rank 0's values where ranks differ, and says so; collective.

        Raises:
            ValueError: if shapes or dtypes differ.
        """
        mesh = self._mesh
        if mesh.check == "never":
            return
        shape = [x.dim(), *x.shape, *([0] * (8 - x.dim()))][:9]
        marks = collectives.all_gather_counts(
            [digest(x), *shape, x.element_size()], mesh.control
        )
        if any(mark[1:] != marks[0][1:] for mark in marks):
            shapes = [mark[2 : 2 + mark[1]] for mark in marks]
            raise ValueError(
                "build the same model on all ranks: a parameter has the shapes "
                f"{shapes} (rank by rank), or dtypes that differ"
            )
        if all(mark == marks[0] for mark in marks):
            return
        first = collectives.all_reduce(
            x.detach() if mesh.rank == 0 else torch.zeros_like(x.detach()), mesh.data
        )
        with torch.no_grad():
            x.data.copy_(first)
        self._say_once(
            f"parameters differed between ranks (first one of shape {list(x.shape)}); "
            "rank 0's are taken everywhere. Call torch.manual_seed before the model is "
            "made, so that all ranks draw the same"
        )

    _told = False


def _options_of(leaves: list[Tensor]) -> dict[str, str]:
    """Returns the options of the optimizers that train some leaves, by name."""
    known = {id(leaf) for leaf in leaves}
    made = [o for o in gc.get_objects() if isinstance(o, torch.optim.Optimizer)]
    groups = [
        (f"{type(optimizer).__name__}'s", group)
        for optimizer in made
        for group in optimizer.param_groups
        if known & {id(p) for p in group["params"]}
    ]
    counts: dict[str, int] = {}
    options = {}
    for name, group in groups:
        number = counts[name] = counts.get(name, -1) + 1
        of = f" of group {number}" if number else ""
        for key, value in group.items():
            if key != "params":
                options[f"{name} {key}{of}"] = repr(value)
    return options


def comparer_of(mesh: Mesh) -> Comparer:
    """Returns what compares replicated tensors for a mesh."""
    if mesh.compared is None:
        mesh.compared = Comparer(mesh)
    return mesh.compared  # type: ignore[no-any-return]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else int(x._version)
