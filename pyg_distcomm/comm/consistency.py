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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.serialization import differing
from pyg_distcomm.kernels.core_ops import as_bytes

_LONG = 1 << 26  # bytes up to which all of a tensor is hashed
_ROUNDING = 1.0  # of the root of the dtype's rounding: how far processors part copies
_PIECES = 64  # of a longer one
_CALLS = 4096  # operations that are remembered


def count_rows(here: int, mesh: Mesh) -> int:
    """Returns the sum of a number of rows over the ranks; collective.

    Each rank also names its question by number, so that a rank that asks alone, and meets
    another's next question, raises instead of taking the answer to that.

    Price: one all-gather of two words a rank.

    Raises:
        ValueError: on the ranks that met, if they are not at the same question.
    """
    if mesh.size == 1:
        return here
    axis = mesh.control  # which a chunk's mesh refuses
    mesh.questions += 1
    counts = _exchange(_SELECTION, {"number": str(mesh.questions)}, here, mesh, axis)
    return sum(counts)


_SELECTION = (
    "the length of a selection (len, size or shape of rows that a computed mask keeps)"
)


def _exchange(
    question: str,
    details: dict[str, str],
    word: int,
    mesh: Mesh,
    axis: Any = None,
    op: str = "plan",
) -> list[int]:
    """Returns a word of each rank, all of which have to be at the same question.

    All exchanges over the control axis begin with this one, of one size: ranks that are
    at different calls get an error here, where collectives of unlike sizes would abort.

    Args:
        question: what the ranks compare.
        details: what has to be the same on all ranks, by name.
        word: this rank's.
        mesh: the ranks.
        axis: that they exchange over; None is the control axis.
        op: how the ledger, and a rank that waits in vain, call it.

    Raises:
        ValueError: on all ranks, naming what differs.
    """
    axis = mesh.control if axis is None else axis
    text = repr((question, details)).encode()
    mark = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2
    rows = collectives.all_gather_counts([mark, word], axis, op)
    if all(row[0] == rows[0][0] for row in rows):
        return [row[1] for row in rows]
    every = collectives.all_gather_object([question, details], axis)
    for rank, (other, _) in enumerate(every):
        if other != every[0][0]:
            raise ValueError(
                "run the same operations on all ranks in the same order: rank 0 is at "
                f"{every[0][0]}, and rank {rank} at {other}"
            )
    if question == _SELECTION:
        raise ValueError(
            f"not all ranks asked for {question}; ask on all ranks, or use .to_local()"
        )
    found = differing([details for _, details in every])
    raise ValueError(f"{_ADVICE[question]}: {found}")


_LAYER, _OPERATION = "the first use of a layer", "an operation over all rows"
_PLAIN, _PARAMETER = (
    "a plain tensor beside row-sharded ones",
    "the first use of a parameter",
)
_BACKWARD = "the end of a backward pass"
_ADVICE = {
    _LAYER: "run the same layers on all ranks in the same order",
    _OPERATION: "run the same operations on all ranks in the same order",
    _PLAIN: "run the same operations on all ranks in the same order",
    _PARAMETER: "build the same model on all ranks",
}


def digest(x: Tensor) -> int:
    """Returns a hash of dtype, shape and values of a tensor, in [0, 2^62)."""
    x = x.detach()
    if x.layout != torch.strided:
        parts = [digest(part) for part in _parts(x)]
        return digest(torch.tensor([*parts, *x.shape]))
    known = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)}".encode(), digest_size=8)
    if x.numel():
        raw = as_bytes(x.cpu())
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
    along = max(range(x.dim()), key=x.size)  # an edge_index [2, e] has but two rows
    length = x.size(along)
    piece = max(1, length * _LONG // (x.numel() * x.element_size()) // _PIECES)
    begins = torch.linspace(0, max(0, length - piece), _PIECES).long().tolist()
    marks = [digest(x.narrow(along, at, piece)) for at in begins]
    told = torch.tensor([*marks, *x.shape])
    return digest(told)


class Comparer:
    """Compares replicated tensors between ranks, each time or the first time.

    Args:
        mesh: the ranks, and whether to compare (`Mesh.check`).
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh: Mesh = weakref.proxy(mesh)  # which has this
        self._kinds: set[Any] = set()
        self._seen: Any = WeakTensorKeyDictionary()
        self._given: Any = weakref.WeakKeyDictionary()
        self._calls: set[Any] = set()

    def check_given(
        self, owner: Any, value: Any, told: Callable[[], dict[str, str]]
    ) -> None:
        """Raises on all ranks if they gave a layer, when first used, other settings.

        Compares what the constructors of the layer, and of modules in it, were given, too.
        A layer is compared again when it is first used in the other mode, of training
        and evaluation; without a link, modes are compared, too.

        Price: one all-gather of two words a rank, once for each owner, value and mode.

        Args:
            owner: the layer.
            value: what it was given.
            told: returns the settings of that, by name.

        Raises:
            ValueError: naming what differs, and both values.
        """
        mesh = self._mesh
        if mesh.size == 1 or mesh.check == "never":
            return
        compared = self._given.setdefault(owner, [])
        mode = getattr(owner, "training", None) if value is None else None
        if any(value is known and mode == then for known, then in compared):
            return
        compared[:] = [(v, m) for v, m in compared if v is value] + [(value, mode)]
        details = {"type of layer": type(owner).__name__, **told()}
        agrees = value is not None  # a link has ranks agree on who evaluates
        _exchange(_LAYER, details | _settings_in(owner, not agrees), 0, mesh)

    def check_call(self, name: str, operands: Any) -> None:
        """Raises on all ranks if they do not call an operation over all rows alike.

        Compares an operation when this rank first sees it with such operands. A rank that
        has seen it before does not compare: one that has not then waits for its deadline.

        Price: one all-gather of two words a rank, once for each call.

        Args:
            name: the operation.
            operands: what describes them, the same on all ranks.

        Raises:
            ValueError: naming the operations.
        """
        if self._mesh.check == "never" or (name, operands) in self._calls:
            return
        if len(self._calls) >= _CALLS:  # of loops over scalars; on all ranks alike
            self._calls.clear()
        self._calls.add((name, operands))
        shown = ", ".join(map(str, operands))
        details = {"operation": f"{name}({shown})"}
        # apart from the mesh's ledger, whose first epoch has its price, too
        axis = replace(self._mesh.control, ledger=self._mesh.checks)
        _exchange(_OPERATION, details, 0, self._mesh, axis, name)

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
        details = {"operation": f"{what}()", "plain tensor": _kind_of(x)}
        marks = _exchange(_PLAIN, details, digest(x), mesh)
        differ = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        if differ:
            raise ValueError(
                f"seed what draws this tensor: {what}() got a plain tensor of shape "
                f"{list(x.shape)} and {x.dtype} beside a row-sharded one, which means the same "
                f"values on all ranks, but ranks {differ} hold others than rank 0. Call "
                "torch.manual_seed (and the seeds of numpy and random) with the same "
                "number on all ranks, or make rows of this rank row-sharded by "
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
        sizes = _exchange(_BACKWARD, {}, len(told), mesh)
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
                    "parameters on all alike (reset_parameters() after one manual_seed)"
                )
            with torch.no_grad():
                x.data.copy_(first)
            self._say_once(
                f"parameters parted between ranks by rounding (number {number} in order "
                f"of first use, by {float(gap):.1e}); rank 0's are taken everywhere"
            )

    def check_alone(self, params: list[Tensor]) -> None:
        """Raises on all ranks if parameters that no row-sharded data meets differ; collective.

        Each is projected on one direction, so that they may come in any order, and those that
        rounding has parted pass.

        Args:
            params: what this rank's pass reaches.

        Raises:
            ValueError: saying what to do.
        """
        mesh = self._mesh
        _exchange(_BACKWARD, {}, len(params), mesh)
        flat = [p.detach().flatten().double().cpu() for p in params]
        along = sum(float(p @ torch.arange(len(p)).double().cos()) for p in flat)
        size = sum(float(p.square().sum()) for p in flat) ** 0.5
        told = (sorted(map(_kind_of, params)), along, size)
        every = collectives.all_gather_object(told, mesh.control)
        eps = max((torch.finfo(p.dtype).eps for p in params), default=0.0)
        kinds, first, _ = every[0]
        differ = [
            rank
            for rank, (other, found, _) in enumerate(every)
            if other != kinds or abs(found - first) > _ROUNDING * eps**0.5 * every[0][2]
        ]
        if differ:
            raise ValueError(
                "call torch.manual_seed with the same number on all ranks before the model "
                "is made: parameters that work on values which all ranks have alike, such as "
                f"pooled ones, are others on ranks {differ} than on rank 0 ({len(params)} "
                f"here: {', '.join(sorted(map(_kind_of, params))[:4])}). Draw and step alike "
                "on all ranks; what works on .to_local() rows is for pdc.replicate"
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
        details = {"shape and dtype of a parameter": _kind_of(x)}
        marks = _exchange(_PARAMETER, details, digest(x), mesh)
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


def _kind_of(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}".replace("torch.", "")


def _settings_in(owner: Any, modes: bool) -> dict[str, str]:
    """Returns what the constructors of a layer's modules were given, and their modes."""
    if not isinstance(owner, torch.nn.Module):
        return {}
    settings = {}
    for path, module in owner.named_modules():
        of = f" of {path}" if path else ""
        if modes:
            settings[f"training{of}"] = repr(module.training)
        given = vars(module)
        for kind in type(module).__mro__[:-1]:
            code = getattr(vars(kind).get("__init__"), "__code__", None)
            count = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
            for name in () if code is None else code.co_varnames[1:count]:
                if isinstance(given.get(name), (bool, int, float, str)):
                    settings[f"{name}{of}"] = repr(given[name])
    return settings


def _options_of(leaves: list[Tensor]) -> dict[str, str]:
    """Returns the options of the optimizers that train some leaves, by name."""
    known = {id(leaf) for leaf in leaves}
    made = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
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
