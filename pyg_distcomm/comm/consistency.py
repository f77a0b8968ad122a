"""Compares replicated tensors and settings between ranks, counts rows, and raises alike.

Comparisons use the mesh's control axis, which has its own process group, so that a rank that
calls a check alone does not receive the data of another exchange.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.serialization import first_difference
from pyg_distcomm.kernels.core_ops import as_bytes

_HASHED_BYTES = 1 << 26  # bytes: a longer tensor is hashed in parts
_ROUNDING = 1.0  # tolerated relative difference of copies, times sqrt(eps) of the dtype
_HASHED_PIECES = 64  # pieces of a longer tensor that are hashed


@contextlib.contextmanager
def on_all_ranks(axis: Axis | None) -> Iterator[None]:
    """Raises an error of one rank in a block on all ranks, at its end; collective.

    Args:
        axis: the ranks; None for this one alone.
    """
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    if axis is not None and axis.size > 1:
        collectives.agree(problem, axis)
    elif problem is not None:
        raise problem


@contextlib.contextmanager
def naming(subject: str) -> Iterator[None]:
    """Begins the message of a TypeError or ValueError of a block with its subject."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"{subject}: {error}") from error


def check_alike(values: Mapping[str, Any], axis: Axis) -> None:
    """Raises ValueError on all ranks if a value differs between them; collective.

    Args:
        values: by the name that a user knows; what is no text is compared by its `repr`.
        axis: the ranks.
    """
    told = {n: v if isinstance(v, str) else repr(v) for n, v in values.items()}
    found = first_difference(collectives.all_gather_object(told, axis))
    if found is not None:
        raise ValueError(found)


def count_rows(here: int, mesh: Mesh) -> int:
    """Returns the sum of a number of rows over the ranks; collective.

    Requests are numbered, so that a rank that makes one alone raises an error instead of
    taking the answer to another rank's next request.

    Price: one all-gather of two words per rank.

    Raises:
        ValueError: if the ranks are not at the same request.
    """
    if mesh.size == 1:
        return here
    axis = mesh.control  # raises for the mesh of a chunk
    mesh.count_requests += 1
    counts = _compare_and_gather(
        _SELECTION, {"number": str(mesh.count_requests)}, here, mesh, axis
    )
    return sum(counts)


_SELECTION = (
    "the length of a selection (len, size or shape of rows that a computed mask keeps)"
)


def _compare_and_gather(
    question: str,
    details: dict[str, str],
    word: int,
    mesh: Mesh,
    axis: Any = None,
    op: str = "plan",
) -> list[int]:
    """Gathers one word of each rank, and checks that all ranks make the same comparison.

    Every exchange over the control axis starts with this one, whose size is fixed: ranks
    at different calls get an error here, where collectives of unequal sizes would abort.

    Args:
        question: the kind of comparison.
        details: values by name that must be the same on all ranks.
        word: the word of this rank.
        mesh: the ranks.
        axis: the axis to exchange over; None is the control axis.
        op: the name in the ledger, and in the error of a rank that waits too long.

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
    found = first_difference([details for _, details in every])
    same = "run the same operations on all ranks in the same order"
    raise ValueError(f"{_ADVICE.get(question, same)}: {found}")


_LAYER, _PARAMETER = "the first use of a layer", "the first use of a parameter"
_BACKWARD = "the end of a backward pass"
_ADVICE = {
    _LAYER: "run the same layers on all ranks in the same order",
    _PARAMETER: "build the same model on all ranks",
    _BACKWARD: "train all ranks alike",
}


def digest(x: Tensor) -> int:
    """Returns a hash of dtype, shape and values of a tensor, in [0, 2^62)."""
    x = x.detach()
    if x.layout != torch.strided:
        parts = [digest(part) for part in _components(x)]
        return digest(torch.tensor([*parts, *x.shape]))
    known = hashlib.blake2b(f"{x.dtype} {tuple(x.shape)}".encode(), digest_size=8)
    if x.numel():
        raw = as_bytes(x.cpu())
        known.update(raw.numpy().data)
    return int.from_bytes(known.digest(), "little") >> 2


def _components(x: Tensor) -> list[Tensor]:
    """Returns the index and value tensors of a sparse tensor."""
    if x.layout == torch.sparse_coo:
        x = x.coalesce()
        return [x.indices(), x.values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x.to_dense()]


def sampled_digest(x: Tensor) -> int:
    """Returns `digest` of a tensor, or of evenly spaced pieces of a long one.

    Price: a second per GB, of at most 64 MiB.
    """
    if (
        x.layout != torch.strided
        or x.numel() * x.element_size() <= _HASHED_BYTES
        or x.dim() == 0
    ):
        return digest(x)
    along = max(range(x.dim()), key=x.size)  # an edge_index [2, e] has only two rows
    length = x.size(along)
    piece = max(
        1, length * _HASHED_BYTES // (x.numel() * x.element_size()) // _HASHED_PIECES
    )
    begins = torch.linspace(0, max(0, length - piece), _HASHED_PIECES).long().tolist()
    marks = [digest(x.narrow(along, at, piece)) for at in begins]
    told = torch.tensor([*marks, *x.shape])
    return digest(told)


def projection(tensors: Sequence[Tensor]) -> tuple[float, float]:
    """Returns the projection of tensors, in any order, on one direction, and their norm."""
    along = square = 0.0
    for t in tensors:
        values = t.detach().coalesce().values() if t.is_sparse else t.detach()
        flat = values.flatten().cpu().double().nan_to_num()
        along += float(flat @ torch.arange(len(flat)).double().cos())
        square += float(flat.square().sum())
    return along, square**0.5


def differing(
    projections: Sequence[Sequence[float]], dtypes: Iterable[torch.dtype]
) -> list[int]:
    """Returns the ranks whose `projection` differs from rank 0's by more than rounding."""
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    first, size = projections[0]
    far = _ROUNDING * eps**0.5 * size
    return [r for r, (along, _) in enumerate(projections) if abs(along - first) > far]


class Comparer:
    """Compares replicated tensors between ranks, each time or the first time.

    Args:
        mesh: the ranks, and whether to compare (`Mesh.check`).
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh: Mesh = weakref.proxy(mesh)  # the mesh holds this object
        self._compared_settings: Any = weakref.WeakKeyDictionary()

    def check_settings(
        self, owner: Any, value: Any, get_settings: Callable[[], dict[str, str]]
    ) -> None:
        """Raises on all ranks if the settings of a layer differ between them at first use.

        Also compares the constructor arguments of the layer and of the modules in it. A
        layer is compared again when it is first used in the other mode (training or
        evaluation); without a link, the modes themselves are compared, too.

        Price: one all-gather of two words per rank, once for each owner, value and mode.

        Args:
            owner: the layer.
            value: the object that holds its settings, as its link.
            get_settings: returns these settings by name.
        """
        mesh = self._mesh
        if mesh.size == 1 or mesh.check == "never":
            return
        compared = self._compared_settings.setdefault(owner, [])
        mode = getattr(owner, "training", None) if value is None else None
        if any(value is known and mode == then for known, then in compared):
            return
        compared[:] = [(v, m) for v, m in compared if v is value] + [(value, mode)]
        details = {"type of layer": type(owner).__name__, **get_settings()}
        agrees = value is not None  # ranks of a link agree on the mode by themselves
        details |= _module_settings(owner, not agrees)
        _compare_and_gather(_LAYER, details, 0, mesh, self._unpriced)

    def check_call(self, name: str, operands: Sequence[str]) -> None:
        """Raises on all ranks if they call different operations over all rows; collective.

        Price: one all-gather of two words per rank.
        """
        details = {"operation": f"{name}({', '.join(operands)})"}
        _compare_and_gather(
            "an operation over all rows", details, 0, self._mesh, self._unpriced, name
        )

    @property
    def _unpriced(self) -> Any:
        """The control axis, without the mesh's ledger: prices do not include checks."""
        return replace(self._mesh.control, ledger=self._mesh.checks)

    def check(self, x: Tensor, what: str) -> None:
        """Raises on all ranks if a plain tensor differs between them; collective.

        Price: one all-gather of two words per rank.
        """
        details = {"operation": f"{what}()", "plain tensor": _shape_and_dtype(x)}
        axis = self._unpriced
        question = "a plain tensor beside row-sharded ones"
        marks = _compare_and_gather(question, details, digest(x), self._mesh, axis)
        differ = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
        if differ:
            raise ValueError(
                f"seed the generator of this tensor: {what}() got a plain tensor of shape "
                f"{list(x.shape)} and {x.dtype} beside a row-sharded one, which must have the "
                f"same values on all ranks, but ranks {differ} and rank 0 differ. Call "
                "torch.manual_seed (and the seeds of numpy and random) with the same "
                "number on all ranks, or make rows of this rank row-sharded by "
                "pdc.from_local(t, like=x)"
            )

    def compare_trained(self, leaves: dict[int, Tensor]) -> None:
        """Compares parameters after steps of an optimizer, and counts of dropout; collective.

        Parameters, by their number in the order of first use, that differ by rounding errors
        get rank 0's values; if they differ by more, all ranks raise. Price: one all-reduce of
        two words.
        """
        mark = random.fold(self._mesh.step, *map(digest, leaves.values()))
        if collectives.differ(mark, self._unpriced):
            self._resync_rounded(leaves)

    def _resync_rounded(self, leaves: dict[int, Tensor]) -> None:
        mesh = self._mesh
        details = {
            "parameters with a gradient": str(
                [_shape_and_dtype(x) for x in leaves.values()]
            ),
            "number of masks drawn by dropout": str(mesh.step),
        }
        _compare_and_gather(_BACKWARD, details, 0, mesh)
        marks = collectives.all_gather_counts(
            [*map(digest, leaves.values())], mesh.control
        )
        for place, (number, x) in enumerate(leaves.items()):
            if all(mark[place] == marks[0][place] for mark in marks):
                continue
            mine, first = x.detach(), _of_rank_0(x, mesh)
            gap, size = (first - mine).abs().max(), first.abs().max()
            far = bool(gap > _ROUNDING * torch.finfo(x.dtype).eps ** 0.5 * size)
            if [1] in collectives.all_gather_counts([int(far)], mesh.control):
                ranks = [r for r, m in enumerate(marks) if m != marks[0]]
                raise ValueError(
                    "train all ranks alike: a replicated parameter (number "
                    f"{number} in order of first use, shape {list(x.shape)}) differs "
                    f"between ranks {ranks} and rank 0. Give optimizers the same lr "
                    "and options on all ranks, step on all or on none, and change "
                    "parameters on all alike (reset_parameters() after one manual_seed)"
                )
            with torch.no_grad():
                x.data.copy_(first)
            self._warn_once(
                f"parameters differed between ranks by rounding (number {number} in order "
                f"of first use, by {float(gap):.1e}); rank 0's are taken everywhere"
            )

    def _warn_once(self, text: str) -> None:
        if not self._warned and self._mesh.rank == 0:
            warnings.warn(text, stacklevel=3)
        self._warned = True

    def sync_from_rank0(self, x: Tensor) -> bool:
        """Copies rank 0's values to a parameter, with a warning, if ranks differ; collective.

        Returns whether they did.

        Raises:
            ValueError: if shapes or dtypes differ.
        """
        mesh = self._mesh
        if mesh.check == "never":
            return False
        details = {"shape and dtype of a parameter": _shape_and_dtype(x)}
        marks = _compare_and_gather(_PARAMETER, details, digest(x), mesh)
        if all(mark == marks[0] for mark in marks):
            return False
        with torch.no_grad():
            x.data.copy_(_of_rank_0(x, mesh))
        self._warn_once(
            f"parameters differed between ranks (first one of shape {list(x.shape)}); "
            "rank 0's are taken everywhere. Call torch.manual_seed before the model is "
            "made, so that all ranks draw the same"
        )
        return True

    _warned = False


def _of_rank_0(x: Tensor, mesh: Mesh) -> Tensor:
    """Returns rank 0's values of a tensor; collective."""
    mine = x.detach()
    mine = mine if mesh.rank == 0 else torch.zeros_like(mine)
    return collectives.all_reduce(mine, mesh.data)


def _shape_and_dtype(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}".replace("torch.", "")


def _module_settings(owner: Any, modes: bool) -> dict[str, str]:
    """Returns the constructor arguments of a layer's modules by name, and their modes."""
    if not isinstance(owner, torch.nn.Module):
        return {}
    settings = {}
    for path, module in owner.named_modules():
        of = f" of {path}" if path else ""
        if modes:
            settings[f"training{of}"] = repr(module.training)
        given = vars(module)
        for kind in type(module).__mro__[:-1]:
            made = vars(kind).get("__init__", object.__init__)
            for name in inspect.signature(made).parameters:
                if isinstance(given.get(name), (bool, int, float, str)):
                    settings[f"{name}{of}"] = repr(given[name])
    return settings


def comparer_of(mesh: Mesh) -> Comparer:
    """Returns the `Comparer` of a mesh."""
    if mesh.compared is None:
        mesh.compared = Comparer(mesh)
    return mesh.compared  # type: ignore[no-any-return]
