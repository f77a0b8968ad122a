"""Compares plain operands between ranks, when they first meet sharded ones.

An op on sharded tensors takes a plain tensor as the same on all ranks. Parameters are compared
when an op first reads them, and rank 0's are taken; other plain operands of which own rows are
taken are compared by name, shape and type of their first use. See `init(check=...)`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import comparer_of, digest
from pyg_distcomm.comm.failure import needing, watch_of
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Latest
from pyg_distcomm.ops.id_plan import range_error
from pyg_distcomm.process import PROCESS

_KINDS = 8192  # of ops and operands that are remembered
_PLAIN_IDS = (
    "plain ids, or edges, mean the same ids on all ranks; build them from a shared seed "
    "(torch_geometric.seed_everything, as PyG draws negative edges by Python's random, too), "
    "or use a mask, which costs nothing"
)
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(slots=True)
class _Facts:
    """Holds what the ranks of a mesh know of a plain tensor, while it exists."""

    compared: bool = False  # as a parameter
    version: int | None = None  # when an op last read it beside constants
    same: bool | None = None  # on all ranks; None if that is unknown
    wrapper: Any = None  # a reference to the DistributedDataParallel of its gradient


def _facts(mesh: Any) -> Any:
    """Returns the facts of the plain tensors that a mesh knows."""
    if "facts" not in mesh.sharded:
        mesh.sharded["facts"] = WeakTensorKeyDictionary()
    return mesh.sharded["facts"]


def _facts_of(x: Tensor, mesh: Any) -> _Facts:
    known = _facts(mesh)
    if x not in known:
        known[x] = _Facts()
    return known[x]  # type: ignore[no-any-return]


def in_backward() -> bool:
    """Tells whether a backward pass is running."""
    return torch._C._current_graph_task_id() != -1


def _compares(mesh: Any) -> bool:
    """Tells whether operands are compared: on several ranks, but not in a chunk."""
    return mesh.size > 1 and mesh.check != "never" and isinstance(mesh, Mesh)


def _is_new(mesh: Any, kind: Any, always: bool = False) -> bool:
    """Tells whether ranks have not compared what is of a kind, or are to do so always."""
    if not _compares(mesh):
        return False
    known = mesh.sharded.setdefault("compared", Latest(_KINDS))
    return not known.get(kind) or (always and mesh.check == "always")


def compare_plain(x: Tensor, mesh: Any) -> None:
    """Raises on all ranks if a plain operand differs between them; collective at first use.

    One that was compared in the same op, of the same shape and type, stands for it, unless
    `init(check="always")`.
    """
    kind = PROCESS.op, in_backward(), x.dtype, x.shape
    if not _is_new(mesh, kind, always=True):
        return
    mesh.sharded["compared"][kind] = True
    backward = "backward of " if in_backward() else ""
    try:
        with torch.no_grad():
            comparer_of(mesh).check(x.detach(), backward + name_of(PROCESS.op))
    except ValueError as error:
        if not backward:
            raise
        raise ValueError(
            "call torch.manual_seed with the same number on all ranks before the model is "
            "made, and draw alike: the gradient of a plain tensor, such as pooled rows, "
            f"of shape {list(x.shape)} differs between ranks"
        ) from error


def compare_call(mesh: Any, *operands: Any, name: str | None = None) -> None:
    """Raises on all ranks if they are at different ops; collective at first use.

    An op compares what it sends, or selects by, when this rank first meets it with such
    operands. A rank that has met it before does not compare; one that has not then waits
    until its deadline. Nothing is compared in a backward pass, nor the number of rows.
    """
    if mesh.size == 1 or in_backward():
        return
    call = name or PROCESS.op, *[_kind(x) for x in operands]
    if _is_new(mesh, call):
        given = [x for x in operands if isinstance(x, Tensor)]
        told = [f"{x.dtype}{list(x.shape)}".removeprefix("torch.") for x in given]
        comparer_of(mesh).check_call(name or name_of(PROCESS.op), told)
        mesh.sharded["compared"][call] = True


def _kind(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    dim = getattr(x, "dim_", None)
    if dim is None:
        return x.dtype, x.shape
    shape = x.local.shape  # type: ignore[attr-defined]
    return x.dtype, dim, shape[:dim], shape[dim + 1 :]


def compare_weights(args: Any, mesh: Any, func: Any = None) -> None:
    """Compares weights that meet sharded rows, when ops first read them; collective.

    Where parameters differ, rank 0's are taken. Factors of a product that need no gradient are
    frozen weights, or a rank's own parts of weights, as of tensor parallelism: see
    `compare_plain`.

    Raises:
        TypeError: for a weight that torch shards.
        ValueError: on all ranks, for frozen parameters and factors that differ.
    """
    known = _facts(mesh)
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None:
        _note_wrapper(wrapper, mesh)
    for x in args:
        if type(x) not in _PLAIN:
            if isinstance(x, Tensor) and hasattr(x, "device_mesh"):
                raise _sharded_by_torch(type(x).__name__)
            continue
        base = x if x._base is None else x._base
        facts = known.get(base)
        is_factor = func in _PRODUCTS and x.is_floating_point() and not x.requires_grad
        new = facts is None or not facts.compared
        if not (new or is_factor) or in_backward():
            continue
        if new and isinstance(mesh, Mesh) and type(base) in _PLAIN:
            frozen = type(base) is torch.nn.Parameter and not base.requires_grad
            if base.grad_fn is not None and x.requires_grad:
                _compare_computed(base, mesh)
            elif base.is_leaf and (x.requires_grad or frozen):
                _compare_leaf(base, mesh)
        if is_factor:
            with _of_a_weight():
                compare_plain(x, mesh)


def _compare_leaf(leaf: Tensor, mesh: Mesh) -> bool:
    """Takes rank 0's values of a parameter, or compares a frozen one; once.

    Returns whether a parameter differed.
    """
    facts = _facts_of(leaf, mesh)
    if facts.compared:
        return False
    _check_whole(leaf)
    facts.compared = True
    if leaf.requires_grad:
        return comparer_of(mesh).sync_from_rank0(leaf)
    if mesh.check != "never":
        with _of_a_weight():
            comparer_of(mesh).check(leaf.detach(), name_of(PROCESS.op))
    return False


@contextlib.contextmanager
def _of_a_weight() -> Iterator[None]:
    """Adds to the error of a comparison what splits weights."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{error}. If it is a part of a weight, leave out tensor parallelism"
        ) from error


aten = torch.ops.aten
_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.embedding.default,
    aten.convolution.default,
}


def _check_whole(x: Tensor) -> None:
    """Raises a TypeError on all ranks if FSDP shards a parameter, or frees it after use."""
    if hasattr(x, "_fsdp_flattened"):
        raise _sharded_by_torch("FullyShardedDataParallel")
    home: Any = sys.modules.get("torch.distributed._composable_state")
    states = [] if home is None else home._module_state_mapping
    for module in list(states):  # what fully_shard has met
        sharded = any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
        if sharded and any(p is x for p in module.parameters()):
            raise _sharded_by_torch(type(module).__name__)


def _sharded_by_torch(what: str) -> TypeError:
    return TypeError(
        "leave out FSDP (fully_shard, FullyShardedDataParallel) and tensor parallelism "
        f"({what} here) of a model on a share: its rows are sharded, and its parameters are "
        "whole on every rank. Their gradients are summed without a wrapper"
    )


def _compare_computed(x: Tensor, mesh: Mesh) -> None:
    """Compares a value computed from parameters, and these, when they are first met.

    Where these differ, rank 0's are taken of them, and of all that its gradient needs.
    """
    if not _compares(mesh):
        return
    made: Any = x.grad_fn
    todo, nodes = [made], dict[Any, Any]()
    while todo:
        node = todo.pop()
        if node is None or id(mesh) in node.metadata:
            continue
        node.metadata[id(mesh)] = True  # what is behind it is looked at once
        if len(getattr(node, "of", None) or ()) == 3:
            continue  # what `Placed` takes from a rank's own rows
        nodes[node] = getattr(node, "variable", None)
        todo += [next_node for next_node, _ in node.next_functions]
    leaves = [leaf for leaf in nodes.values() if type(leaf) in _PLAIN]
    weights = [leaf for leaf in leaves if type(leaf) is torch.nn.Parameter]
    kind = PROCESS.op, made.name(), x.shape, x.dtype
    if all(_facts_of(w, mesh).compared for w in weights) and not _is_new(mesh, kind):
        return
    mesh.sharded.setdefault("compared", Latest(_KINDS))[kind] = True
    values, differ = [x], any([_compare_leaf(leaf, mesh) for leaf in leaves])
    for node in nodes if differ else ():
        for name in dir(node):
            if name.startswith(("_saved_", "saved_tensors")):
                with contextlib.suppress(RuntimeError):  # freed, or computed again
                    values += tree_leaves(getattr(node, name))
    for value in values:
        if type(value) in _PLAIN:
            own = value.data if value.layout != torch.sparse_coo else value._values()
            own = own if own.layout == torch.strided else own.values()
            # each number once, where it is expanded
            once = tuple([slice(None if step else 1) for step in own.stride()])
            comparer_of(mesh).sync_from_rank0(own[once])


def _note_wrapper(wrapper: Any, mesh: Mesh) -> None:
    """Notes whose gradients DistributedDataParallel reads: those of all its parameters."""
    for parameter in wrapper.parameters():
        facts = _facts_of(parameter, mesh)
        if facts.wrapper is not None and facts.wrapper() is wrapper:
            return  # noted before
        facts.wrapper = weakref.ref(wrapper)


def is_wrapped(leaf: Tensor, mesh: Mesh) -> bool:
    """Tells whether DistributedDataParallel reads the gradient of a parameter."""
    return _facts_of(leaf, mesh).wrapper is not None


def is_averaged(leaf: Tensor, mesh: Mesh) -> bool:
    """Tells whether a wrapper of `replicate` averages the gradient in this backward pass."""
    wrapper = _facts_of(leaf, mesh).wrapper
    return wrapper is not None and bool(getattr(wrapper(), "armed", False))


def is_same(x: Tensor, mesh: Any) -> bool:
    """Tells whether a plain tensor is known to be the same on all ranks; collective when new.

    What a rank alone finds would not do: of a table in new memory, of which a few rows were
    written, the others differ between ranks, or happen to agree. A tensor that was the same
    remains so, as all ranks write alike.

    Price: two words of each rank.
    """
    if mesh.size == 1:
        return True
    facts = _facts_of(x, mesh)
    if facts.same is None and mesh.check != "never":
        facts.same = _is_alike(x, mesh.world)
    return bool(facts.same)


def _marks(x: Tensor, axis: Any) -> list[tuple[int, ...]]:
    """Returns the length and the hash of a tensor of each rank; collective."""
    return [*map(tuple, collectives.all_gather_counts([x.numel(), digest(x)], axis))]


def _is_alike(x: Tensor, axis: Any) -> bool:
    return len(set(_marks(x, axis))) == 1


def note_same(x: Any, mesh: Any) -> None:
    """Notes that an op on sharded tensors has given all ranks the same plain tensor."""
    if type(x) is Tensor and mesh.size > 1:
        _facts_of(x, mesh).same = True


def check_written(args: Any, mesh: Any) -> None:
    """Raises on all ranks if a plain tensor that an op reads was written on some ranks only.

    What is kept for its content would be found on the others alone. Nothing is sent where
    nobody has written, or where all ranks have met what it holds: each operand comes with a
    function that tells whether that is new to this rank.
    """
    for x, is_new in args:
        facts = _facts_of(x, mesh)
        before, facts.version = facts.version, x._version
        differs = facts.same is False or mesh.check == "never"
        if before in (None, x._version) or differs or not is_new(x):
            pass_by(mesh)
            continue
        name, where = name_of(PROCESS.op), _described(x)
        told = (
            f"write to {where} ({str(x.dtype).removeprefix('torch.')}), which {name}() reads "
            "beside row-sharded tensors, on all ranks alike or on none: some ranks alone have "
            "written to it"
        )
        with _comparing(told, mesh):
            # of a table in new memory, rows that nobody reads may differ
            facts.same = _is_alike(x, mesh.control)


def pass_by(mesh: Any) -> None:
    """Notes that this rank found what it would have compared otherwise."""
    watch = watch_of(mesh) if isinstance(mesh, Mesh) else None  # not of a chunk
    if watch is not None:
        watch.pass_by(mesh.stage.rank)


def _comparing(what: str, mesh: Any) -> Any:
    watch = watch_of(mesh) if isinstance(mesh, Mesh) else None
    if watch is None:
        return contextlib.nullcontext()
    return watch.comparing(what, mesh.stage.rank)


def compare_ids(ids: Tensor, count: int, mesh: Any) -> None:
    """Raises on all ranks if plain ids differ between ranks, or are out of range; collective.

    Price: two words of each rank.
    """
    flat = ids.detach().reshape(-1).cpu().long()
    told = (
        f"{_PLAIN_IDS}; those of shape {list(ids.shape)} that {name_of(PROCESS.op)}() got are "
        "others than before on some ranks only"
    )
    with _comparing(told, mesh):
        marks = _marks(flat, mesh.control)
    if len(set(marks)) > 1:
        raise ValueError(
            f"{_PLAIN_IDS}, but the ranks gave lists that differ (lengths "
            f"{[length for length, _ in marks]})"
        )
    if (problem := range_error(flat, count)) is not None:
        raise IndexError(problem)


def explain(op: Any, args: Any, kwargs: Any, error: Exception) -> NoReturn:
    """Raises on all ranks if an op lacked memory, or has operands on different devices.

    Raises:
        OutOfMemoryError, MemoryError: naming the op, its bytes, and what needs less.
        ValueError: naming the operands, and their devices.
    """
    found = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    where = {str(t.device): t for t in found if t.dim()}
    rows: Any = next(t for t in found if hasattr(t, "rows"))
    watch = watch_of(rows.rows.mesh)
    if len(where) < 2 or not re.search("device|meta tensor", str(error)):
        own = [getattr(t, "local", t) for t in found]
        what = f"{name_of(op)}() of {_described(rows)}"
        size = 2 * sum(t.numel() * t.element_size() for t in own)
        with needing(what, lambda: size, watch, rows.device):
            raise error
    said = [f"{_described(t)} lies on {device}" for device, t in where.items()]
    wrong = ValueError(
        "move the model and the data to one device, by .to(mesh.device): in "
        f"{name_of(op)}(), {', and '.join(said)}"
    )
    if watch is not None:
        watch.fail(wrong)
    raise wrong from error


def _described(t: Tensor) -> str:
    """Names a tensor: as a parameter or buffer of a calling module, or by its shape."""
    frame, base = inspect.currentframe(), t if t._base is None else t._base
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            own = (*module.named_parameters(), *module.named_buffers())
            for name, p in own:
                if p is base:
                    return f"{type(module).__name__}.{name}"
        frame = frame.f_back
    return f"a tensor {list(t.shape)}"


def name_of(op: Any) -> str:
    """Returns the name of an aten op as torch's users know it."""
    return "a layer" if op is None else str(op._schema.name).removeprefix("aten::")
