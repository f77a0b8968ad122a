"""Defines the base class of row-sharded tensors, and the handling of their plain operands.

Plain operands of row-sharded tensors are compared between ranks, or their gradients
averaged, and ranks compare operations before these exchange anything. Operations are
dispatched in `dispatch.py`.

[Note: eager] Under torch.compile, their operations run in eager mode: they may exchange
messages, which no compiled graph may move, drop or repeat. A compiled model breaks its
graph at them: its results are those of eager mode. On ordinary inputs the layers of this
package are traced as PyG's are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._dynamo import config, trace_rules
from typing_extensions import Self

from pyg_distcomm.comm import autograd
from pyg_distcomm.comm.consistency import comparer_of
from pyg_distcomm.comm.failure import watch_of
from pyg_distcomm.comm.gradient_averaging import as_replicated, averager_of
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.kernels.memory import has_saved_tensors_hooks

Kind = TypeVar("Kind", bound=type[torch.Tensor])
Leaf = TypeVar("Leaf")
Function = TypeVar("Function", bound=Callable[..., Any])

for _path in sorted(Path(__file__).parents[1].iterdir()):
    if _path.stem not in ("__init__", "nn") and _path.stem.isidentifier():
        if _path.suffix == ".py" or (_path / "__init__.py").exists():
            trace_rules.add(f"pyg_distcomm.{_path.stem}")


def eager(kind: Kind) -> Kind:
    """Marks a subclass of Tensor as one that torch.compile does not trace."""
    config.nontraceable_tensor_subclasses = config.nontraceable_tensor_subclasses | {
        kind
    }
    return kind


def eagerly(function: Function) -> Function:
    """Marks a function that torch.compile does not trace, nor what it calls."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


HOW_TO_CONVERT = (
    "use .to_local() for this rank's rows or .full_tensor() for all of them "
    "(both return an ordinary tensor)"
)


class RowShardedTensor(torch.Tensor):
    """A tensor of which this rank holds some rows (abstract; see `DistTensor`)."""

    rows: Rows
    # what this mask keeps, at a version of it
    _selection: tuple[int, Rows, Tensor | None]
    # how many rows this mask (or each column) keeps on all ranks
    _counts: tuple[int, Any]
    _ends: int  # its version when it held the ends `[e, 2]` of edges, in node ids
    _is_copy: bool  # of a range of rows: see `getitem.check_writable`
    _inside = False  # a layer
    _spread = True  # over the ranks, and so no plain operand

    @property
    def reads_local(self) -> bool:
        """Whether sizes and plain operands are local, as inside a layer."""
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
    """Indices that implement their own lookup in row-sharded tensors."""

    _spread = True

    def pick(self, x: RowShardedTensor, rest: tuple[Any, ...]) -> Tensor:
        """Returns `x[self, *rest]`."""
        raise NotImplementedError


def version_of(x: Tensor) -> int:
    """Returns the number of in-place changes of a tensor; -1 for inference tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if x.is_inference() else x._version


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to the leaves of arguments; ten times as fast as torch's function."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(fn, value) for value in tree])
    if kind is dict:
        return {key: tree_map(fn, value) for key, value in tree.items()}
    return fn(tree)


def leaves(tree: Any, kind: type[Leaf]) -> list[Leaf]:
    """Returns the leaves of arguments that are instances of a class, in order."""
    found: list[Leaf] = []
    tree_map(lambda v: found.append(v) if isinstance(v, kind) else v, tree)
    return found


def unsupported_op(what: str) -> TypeError:
    """Returns the error of an unsupported operation."""
    return TypeError(
        f"{advice()}{HOW_TO_CONVERT}: {what} is neither row by row nor a reduction over rows, "
        "so a DistTensor does not support it"
    )


def advice() -> str:
    """Returns advice on the PyG layer, transform or utility that is running; else ""."""
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


def called_by_pyg() -> bool:
    """Tells whether the calling code is PyG's, not the user's."""
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
    """Raises if a shard of a tensor would be saved as if it were the whole.

    Raises:
        TypeError: if there are several ranks.
    """
    if ranks > 1:
        raise TypeError(
            "save t.full_tensor(), which all ranks have to call, or t.to_local() for "
            f"{what}: torch.save and pickle would keep a part of a row-sharded tensor alone. "
            "pdc.save_checkpoint saves models and optimizers"
        )


def shard_plain_operand(
    value: Tensor, like: RowShardedTensor | Rows, width: int, name: str
) -> Tensor:
    """Returns this rank's rows of a plain operand of row-sharded tensors.

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
    kind = TooManyDims if more else TypeError
    raise kind(_row_count_error(value, rows, width, name, inside))


class TooManyDims(TypeError):
    """A plain operand has too many dims: its columns would align with rows."""


def _row_count_error(
    value: Tensor, rows: Rows, width: int, name: str, inside: bool
) -> str:
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
    """Raises a TypeError if a PyG loader or sampler calls: it needs the whole graph."""
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(_LOADERS):
            raise TypeError(
                f"a loader of PyG ({name}) got the share that pdc.partition returned, but "
                "needs the whole graph: use DistNeighborLoader or another loader of "
                "pyg_distcomm.loader, or pass the graph from before pdc.partition"
            )
        frame = frame.f_back


_LOADERS = ("torch_geometric.loader", "torch_geometric.sampler")


# Operands ----------------------------------------------------------------------------

_LISTED = 32  # operands of which each is compared


def call_local(func: Callable, args: Any, kwargs: Any) -> Any:
    """Calls a torch function on the local tensors.

    If hooks for saved tensors are active, as in checkpointing, operands are unwrapped first:
    hooks may read sizes at any time.
    """
    with torch._C.DisableTorchFunctionSubclass():
        is_in_place = getattr(func, "__name__", "").endswith("_")
        if not is_in_place and has_saved_tensors_hooks():
            args, kwargs = tree_map(local_part, args), tree_map(local_part, kwargs)
        return func(*args, **kwargs)


def local_part(value: Any) -> Any:
    """Returns this rank's rows of a row-sharded tensor; other values unchanged."""
    return value.to_local() if isinstance(value, RowShardedTensor) else value


def all_rows(value: Any) -> Any:
    """Returns all rows of a row-sharded tensor, in order; collective. Others unchanged."""
    if not isinstance(value, RowShardedTensor):
        return value
    return autograd.all_gather(value.to_local(), value.rows.gid, value.rows.mesh.world)


def argument(tree: Any, place: int, name: str) -> Any:
    """Returns a positional or keyword argument of a call; None if it is not given."""
    args, kwargs = tree
    return args[place] if len(args) > place else kwargs.get(name)


def describe_type(value: Any) -> str:
    """Describes a value that was given instead of a row-sharded tensor."""
    if isinstance(value, Tensor):
        return f"a plain tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def replicate_operands(
    x: RowShardedTensor, name: str, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Returns the operands of an operation with `x`, with plain tensors as replicated ones.

    Outside layers, plain tensors without gradient are compared between ranks, depending on
    `Mesh.check`. Inside layers, plain tensors with a history are local.
    """
    mesh, inside = x.rows.mesh, x.reads_local
    if not isinstance(mesh, Mesh):
        return args, kwargs

    def replicate(value: Any) -> Any:
        if not isinstance(value, Tensor) or getattr(type(value), "_spread", False):
            return value
        if value.requires_grad:
            return value if inside and not value.is_leaf else as_replicated(value, mesh)
        if not inside and type(value) in (Tensor, torch.nn.Parameter) and checks:
            if isinstance(value, torch.nn.Parameter):
                averager_of(mesh).compare_frozen(value)
            else:
                comparer_of(mesh).check(value, name)
        return value

    checks = torch._C._current_graph_task_id() == -1
    # it may hold anything, as out may
    if name == "setitem" and not isinstance(args[0], RowShardedTensor):
        return (args[0], *tree_map(replicate, args[1:])), kwargs
    if name == "getitem" and _relabels(args[0]):
        return (args[0], *tree_map(replicate, args[1:])), kwargs
    kept = {"out": kwargs["out"]} if "out" in kwargs else {}
    args, kwargs = tree_map(
        replicate, (args, {k: kwargs[k] for k in kwargs if k != "out"})
    )
    return args, {**kwargs, **kept}


def _relabels(table: Any) -> bool:
    """Tells whether a table may renumber nodes, with values for some of them only.

    As in `assoc = torch.empty(n); assoc[n_id] = torch.arange(len(n_id))`.
    """
    return (
        not isinstance(table, RowShardedTensor)
        and table.dim() == 1
        and table.dtype == torch.int64
    )


def compare_operation(name: str, x: RowShardedTensor, operands: Any = ()) -> None:
    """Compares an operation over all rows between ranks, before it exchanges anything.

    Nothing is compared in a backward pass; see `Comparer.check_call` for the rest.
    """
    mesh = x.rows.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1 or mesh.check == "never":
        return
    if torch._C._current_graph_task_id() == -1:
        inside = x.reads_local  # where plain operands may be this rank's
        comparer_of(mesh).check_call(
            name, () if inside else _describe_for_ranks(operands)
        )


def _describe_for_ranks(value: Any) -> Any:
    """Returns a hashable description of an operand that is the same on all ranks."""
    if isinstance(value, (tuple, list)):
        if len(value) > _LISTED:
            return f"{len(value)} values"
        return tuple([_describe_for_ranks(v) for v in value])
    if isinstance(value, dict):
        return tuple([f"{k}={_describe_for_ranks(v)}" for k, v in value.items()])
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = value.shape, str(value.dtype).removeprefix("torch.")
        if isinstance(value, RowShardedTensor):
            rows = value.rows
            count = str(rows.total) if rows.whole else "?"
            return f"{dtype}[{', '.join([count, *map(str, shape[1:])])}]"
        if getattr(type(value), "_spread", False):  # its shape is this rank's
            return f"{dtype} {type(value).__name__}"
        return f"{dtype}[{', '.join(map(str, shape))}]"
    value = getattr(value, "total", value)  # of a number of rows inside a layer
    if value is None or isinstance(value, (bool, int, float, str, slice, torch.dtype)):
        return repr(value)
    return type(value).__name__


def check_devices(func: Callable, args: Any, kwargs: Any, error: Exception) -> None:
    """Raises on all ranks if torch failed because operands are on different devices.

    Raises:
        ValueError: naming the operands, and their devices.
    """
    found = leaves((args, kwargs), Tensor)
    with torch._C.DisableTorchFunctionSubclass():
        where = {str(t.device): t for t in found if t.dim()}
    if len(where) < 2 or not re.search("device|meta tensor", str(error)):
        return
    said = [f"{_describe_operand(t)} lies on {device}" for device, t in where.items()]
    wrong = ValueError(
        f"move the model and the data to one device, by .to(mesh.device): in "
        f"{getattr(func, '__name__', func)}(), {', and '.join(said)}"
    )
    mesh = next(t for t in found if isinstance(t, RowShardedTensor)).rows.mesh
    watch = watch_of(mesh)
    if watch is not None:
        watch.fail(wrong)
    raise wrong from error


def _describe_operand(t: Tensor) -> str:
    """Names a tensor: as a parameter or buffer of a calling module, or by its shape."""
    frame, name = inspect.currentframe(), ""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            own = (*module.named_parameters(), *module.named_buffers())
            name = next(
                (f"{type(module).__name__}.{n}" for n, p in own if p is t), name
            )
        frame = frame.f_back
    return name or _describe_for_ranks(t)


def compare_plain(x: RowShardedTensor, value: Any, name: str) -> None:
    """Compares a plain tensor that selects, or is written to, rows of `x` between ranks."""
    mesh = x.rows.mesh
    if not isinstance(mesh, Mesh) or mesh.size == 1 or x.reads_local:
        return
    plain = isinstance(value, Tensor) and not getattr(type(value), "_spread", False)
    if plain and torch._C._current_graph_task_id() == -1:
        comparer_of(mesh).check(value.detach(), name)
