"""Holds what every row-sharded tensor has, without the dispatch of its operations.

[Note: eager] Under torch.compile, their operations run in eager mode: they may exchange
messages, which no compiled graph may move, drop or repeat. A compiled model breaks its
graph at them: its results are those of eager mode. On ordinary inputs the layers of this
package are traced as PyG's are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._dynamo import config, disable, trace_rules
from typing_extensions import Self

from pyg_distcomm.comm.rows import Rows

Kind = TypeVar("Kind", bound=type[torch.Tensor])
Leaf = TypeVar("Leaf")
Function = TypeVar("Function", bound=Callable[..., Any])

for _path in sorted(Path(__file__).parents[1].iterdir()):
    if _path.stem not in ("__init__", "nn") and _path.stem.isidentifier():
        if _path.suffix == ".py" or (_path / "__init__.py").exists():
            trace_rules.add(f"pyg_distcomm.{_path.stem}")


def eager(kind: Kind) -> Kind:
    """Marks a subclass of Tensor as one that torch.compile does not trace."""
    if hasattr(config, "nontraceable_tensor_subclasses"):
        known = config.nontraceable_tensor_subclasses
        config.nontraceable_tensor_subclasses = known | {kind}
    return kind


def eagerly(function: Function) -> Function:
    """Marks a function that torch.compile does not trace, nor what it calls."""
    return disable(function)  # type: ignore[no-any-return]


WAYS_OUT = (
    "use .to_local() for this rank's rows or .full_tensor() for all of them "
    "(both return an ordinary tensor)"
)


class RowShardedTensor(torch.Tensor):
    """A tensor of which this rank holds some rows (abstract; see `DistTensor`)."""

    rows: Rows
    _kept: tuple[int, Rows, Tensor | None]  # what this mask keeps, at a version of it
    _counts: tuple[
        int, Any
    ]  # how many rows this mask (or each column) keeps on all ranks
    _ends: int  # its version when it held the ends `[e, 2]` of edges, in node ids
    _is_copy: bool  # of a range of rows: see `getitem.check_writable`
    _inside = False  # a layer
    _spread = True  # over the ranks, and so no plain operand

    @property
    def reads_local(self) -> bool:
        """Whether sizes and plain operands are this rank's, as inside a layer."""
        return self._inside or self.rows.mesh.local_sizes

    @property
    def holds_ends(self) -> bool:
        """Whether it holds the two ends of edges, whose transpose is an edge_index."""
        found: int | None = vars(self).get("_ends")
        return found is not None and found == version_of(self)

    @holds_ends.setter
    def holds_ends(self, value: bool) -> None:
        self._ends = version_of(self) if value else -2

    @classmethod
    def wrap(cls, local: Tensor, rows: Rows) -> Self:
        """Returns `local` `[len(rows), ...]` as this rank's part of a row-sharded tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            shape = tuple(local.shape)
        if not shape or shape[0] != len(rows):
            raise ValueError(
                f"local tensor of shape {list(shape)} must have one row for each of this "
                f"rank's {len(rows)} rows"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = local.as_subclass(cls)
        out.rows = rows
        return out

    def to_local(self) -> Tensor:
        """Returns this rank's rows as an ordinary tensor, differentiably."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


@eager
class Picker(torch.Tensor):
    """Row numbers that know by themselves which rows of a row-sharded tensor they pick."""

    _spread = True

    def pick(self, x: RowShardedTensor, rest: tuple[Any, ...]) -> Tensor:
        """Returns `x[self, *rest]`."""
        raise NotImplementedError


def version_of(x: Tensor) -> int:
    """Returns how often values were changed in place; -1 where nobody counts."""
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if x.is_inference() else x._version


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to the leaves of arguments: torch's own, but a tenth of its time."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(fn, value) for value in tree])
    if kind is dict:
        return {key: tree_map(fn, value) for key, value in tree.items()}
    return fn(tree)


def leaves(tree: Any, kind: type[Leaf]) -> list[Leaf]:
    """Returns the leaves of arguments that are of a kind, in order."""
    found: list[Leaf] = []
    tree_map(lambda v: found.append(v) if isinstance(v, kind) else v, tree)
    return found


def unsupported_op(what: str) -> TypeError:
    """Returns the error of an operation that the rule cannot decide."""
    return TypeError(
        f"{advice()}{WAYS_OUT}: {what} is neither row by row nor a reduction over rows, so a "
        "DistTensor cannot decide what it means on a spread-out tensor"
    )


def advice() -> str:
    """Returns what to do instead of a call of PyG's that is running, or an empty text.

    Names the layer, or the transform or utility that the user has called.
    """
    found, frame = "", inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        home, code = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        layer = isinstance(owner, torch.nn.Module) and hasattr(owner, "propagate")
        if layer and not type(owner).__module__.startswith("pyg_distcomm."):
            kind = type(owner).__name__
            return (
                f"take {kind} from pyg_distcomm.nn, or convert the model by "
                "pdc.convert(model): "
            )
        if home.startswith("torch_geometric.nn.to_hetero_with_bases"):
            return (
                "take to_hetero instead of to_hetero_with_bases, which joins all types in one "
                "graph: "
            )
        if home.startswith("torch_geometric.nn.pool.") and owner is not None:
            return (
                f"give {type(owner).__name__} all rows (x.full_tensor(), "
                "edge_index.full_tensor()), if it merges nodes: "
            )
        if home.startswith(_WHOLE_GRAPHS) and not code.startswith("<"):
            name = code
            if home.startswith("torch_geometric.transforms"):
                name = type(owner).__name__
            elif home.startswith("torch_geometric.data"):
                name = f"data.{code}"
            found = f"call {name}() on the whole graph, before pdc.partition: "
        frame = frame.f_back
    return found


def asked_by_library() -> bool:
    """Says whether PyG asked for what is computed now, and no code of the user's."""
    frame, root = inspect.currentframe(), __name__.split(".")[0]
    while frame is not None and root in ("pyg_distcomm", "torch"):
        frame = frame.f_back
        root = (
            "" if frame is None else frame.f_globals.get("__name__", "").split(".")[0]
        )
    return root.startswith("torch_")


_WHOLE_GRAPHS = tuple(
    f"torch_geometric.{part}"
    for part in ("transforms", "utils", "data.data", "data.batch")
)


def check_saved(ranks: int, what: str) -> None:
    """Refuses to save a part of a tensor as if it were the whole.

    Raises:
        TypeError: if there are several ranks.
    """
    if ranks > 1:
        raise TypeError(
            "save t.full_tensor(), which all ranks have to call, or t.to_local() for "
            f"{what}: torch.save and pickle would keep a part of a row-sharded tensor alone. "
            "pdc.save_checkpoint saves models and optimizers"
        )


def fit_plain(
    value: Tensor, like: RowShardedTensor | Rows, width: int, name: str
) -> Tensor:
    """Returns the rows here of a plain operand that meets row-sharded ones.

    A plain tensor holds the rows of all ranks, in the order of their ids: `[n, ...]` beside
    `[n, ...]`, and `[k, ...]` beside a selection of k rows. One row is replicated. In a
    backward pass, and inside a layer, plain tensors are this rank's rows.

    Args:
        value: the operand.
        like: the row-sharded operand, or its rows.
        width: the dims of the row-sharded operands; with fewer, `value` has columns alone.
        name: the operation.

    Raises:
        TypeError: if it has another number of rows.
    """
    rows = like if isinstance(like, Rows) else like.rows
    known = rows.total if rows.whole else vars(rows).get("count", rows.known)
    one = value.dim() == width and value.size(0) == 1
    if value.dim() < width or (one and known != 1):
        return value
    inside = rows.mesh.local_sizes if isinstance(like, Rows) else like.reads_local
    count = value.size(0)
    if value.dim() == width:
        if count == len(rows) and (inside or torch._C._current_graph_task_id() != -1):
            return value
        if rows.whole and count == rows.total:
            return value[rows.gid_on(value.device)]
        if not rows.whole and not inside and count == rows.count:
            return value[rows.place_on(value.device)]
    more = value.dim() > width and torch._C._current_graph_task_id() == -1
    kind = MoreDims if more else TypeError
    raise kind(_misfit(value, rows, width, name, inside))


class MoreDims(TypeError):
    """A plain operand has more dims than row-sharded ones, so that its columns meet rows."""


def _misfit(value: Tensor, rows: Rows, width: int, name: str, inside: bool) -> str:
    count = len(rows) if inside else rows.count
    told = (
        f"{name}() got a plain tensor of shape {list(value.shape)} beside a row-sharded one of "
        f"{count} rows"
    )
    if value.dim() == width and value.size(0) == len(rows) and not inside:
        return (
            "make this rank's rows row-sharded by pdc.from_local(t, like=x): "
            + told
            + f" ({len(rows)} of "
            "them here), and a plain tensor means the rows of all ranks"
        )
    return (
        f"give one row (the same for all) or {count} (in the order of their ids): {told}; "
        "or make it part of the Data before pdc.partition"
    )


def first_sharded(args: Any, kwargs: Any) -> RowShardedTensor:
    """Returns the first row-sharded operand of a call."""
    for value in args:
        if isinstance(value, RowShardedTensor):
            return value
    return leaves((args, kwargs), RowShardedTensor)[0]


def refuse_loader() -> None:
    """Raises a TypeError if a loader or sampler of PyG's asks: it reads whole graphs."""
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_LOADERS):
            raise TypeError(
                f"a loader of PyG ({name}) was given what pdc.partition returned, and reads "
                "whole graphs only: take DistNeighborLoader, or what else pyg_distcomm.loader "
                "has, or give it the graph as it was before pdc.partition"
            )
        frame = frame.f_back


_LOADERS = ("torch_geometric.loader", "torch_geometric.sampler")
