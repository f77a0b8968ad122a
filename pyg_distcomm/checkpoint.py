"""Saves checkpoints, whole or not at all, and loads them on any number of ranks."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.collectives import Axis
from pyg_distcomm.comm.consistency import check_alike, naming, on_all_ranks
from pyg_distcomm.comm.mesh import Mesh, given_mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import inputs_of
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn.embedding import sharded_parameters
from pyg_distcomm.nn.replicate import bare, check_module
from pyg_distcomm.partition.atomic import (
    explaining_disk,
    new_folder,
    newest,
    read_whole,
    sha256,
    sync,
    write_whole,
)
from pyg_distcomm.process import tell
from pyg_distcomm.sharded.dist_tensor import DistTensor

MARK = ".pyg_distcomm.json"
# per kind of folder: a file that it must hold, and patterns of all that it may hold
_CONTENTS = {
    "checkpoint": ("state.mesh.pt", (MARK, "state.*.pt", "link.*.pt")),
    "pipeline": ("model.pt", (MARK, "model.pt", "rows*.pt")),
}
_SHARED_DISK_WAIT = 5.0  # seconds until a shared disk shows a folder of another host


@contextlib.contextmanager
def whole_folder(path: str | Path, kind: str, axis: Axis) -> Iterator[Path]:
    """Yields a folder to write in, and renames it to `path` at the end; collective.

    Errors inside must be raised on all ranks. See [Note: whole folders] in
    `partition/atomic.py`.

    Args:
        path: the path of the folder, the same on all ranks, on a disk that they share.
        kind: "checkpoint" or "pipeline"; only a folder of this kind is replaced.
        axis: the ranks.

    Raises:
        ValueError: on all ranks, if ranks give different paths, something else is at
            `path`, or the disk cannot be written.
    """
    place = Path(os.path.realpath(path))
    check_alike({"path": os.path.abspath(path)}, axis)
    aside, first = place, axis.rank == 0
    with contextlib.ExitStack() as made:
        with on_all_ranks(axis), explaining_disk(place):
            if first:
                aside = made.enter_context(_new_folder(place, kind))
        name = str(collectives.broadcast_object(aside.name, axis))
        aside = place.with_name(name)
        collectives.agree(_missing_here(aside), axis)
        yield aside
        with on_all_ranks(axis), explaining_disk(aside):
            if first:
                _seal(aside)
                made.close()


def find(path: str | Path) -> Path:
    """Returns the last folder saved at `path`; a killed save may have left it beside `path`."""
    place = Path(os.path.realpath(path))
    if place.exists():
        return place
    return newest(place) or place


def check_files(folder: Path, *patterns: str) -> None:
    """Raises ValueError, naming the file, if one of a folder differs from the saved one.

    Looks at those files that match a pattern, saved or there now. Price: a second or less for
    each GB.
    """
    mark = folder / MARK
    _check_is_file(mark)
    try:
        sums = dict(json.loads(mark.read_text())["files"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = type(error).__name__
        raise ValueError(
            f"{mark}: damaged, or not written to its end ({why})"
        ) from error
    names = {*sums, *os.listdir(folder)} - {MARK}
    chosen = {n for n in names if any(fnmatch.fnmatch(n, one) for one in patterns)}
    for path in [folder / name for name in sorted(chosen)]:
        _check_is_file(path)
        if path.name not in sums:
            raise ValueError(
                f"{path}: {mark} lists what was saved, and does not name it"
            )
        if sha256(path) != sums[path.name]:
            raise ValueError(f"{path}: altered since it was saved (its sha256 differs)")


def _check_is_file(path: Path) -> None:
    """Raises for a missing file, or something else in its place, such as a named pipe."""
    if not path.is_file():
        found = "not a file" if os.path.lexists(path) else "missing"
        raise ValueError(f"{path}: {found}")


@contextlib.contextmanager
def _new_folder(place: Path, kind: str) -> Iterator[Path]:
    def check() -> None:
        if not _is_ours(place, kind):
            raise ValueError(
                f"save to another path: {place} holds something other than a {kind} of "
                "pyg_distcomm, and would be replaced; or move it away"
            )

    is_whole = partial(_is_ours, kind=kind)
    with new_folder(place, check, is_whole, partial(is_whole, half=True)) as aside:
        (aside / MARK).write_text(json.dumps({"kind": kind}))
        yield aside


def _missing_here(aside: Path) -> str | None:
    """Describes the problem if this rank does not see the folder that rank 0 made."""
    stop = time.monotonic() + _SHARED_DISK_WAIT
    while not (aside / MARK).exists():
        if time.monotonic() > stop:
            return (
                f"save to a disk that all hosts share: {aside.parent} does not show here "
                "what rank 0 has written"
            )
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            os.listdir(aside.parent)  # network file systems look again
    return None


def _is_ours(path: Path, kind: str, half: bool = False) -> bool:
    """Returns whether a folder is of a kind; with `half`, also if it is half written."""
    if not os.path.lexists(path):
        return True
    if not path.is_dir():
        return False
    needed, allowed = _CONTENTS[kind]
    names = os.listdir(path)
    known = all(any(fnmatch.fnmatch(n, one) for one in allowed) for n in names)
    return not names or (known and (half or needed in names or MARK in names))


def _seal(aside: Path) -> None:
    mark = json.loads((aside / MARK).read_text())
    files = sorted(file for file in aside.iterdir() if file.name != MARK)
    mark["files"] = {file.name: sha256(file) for file in files}
    (aside / MARK).write_text(json.dumps(mark))
    for path in (*aside.iterdir(), aside):
        sync(path)


# what parts of a checkpoint hold
_FIELDS: dict[str, set[str]] = {
    "model": set(),
    "mesh": {"seed", "step", "inputs", "random"},
    "optimizer": {"class", "state", "param_groups"},
    "extra": set(),
}

Links: TypeAlias = LinkPolicy | Mapping[Any, LinkPolicy | None] | None


def save_checkpoint(
    path: str | Path,
    mesh: Mesh,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    link: Links = None,
    **extra: Any,
) -> None:
    """Saves a model, its optimizer, the mesh's counters and extra values; collective.

    The folder appears whole or not at all: see [Note: whole folders] in `partition/atomic.py`.
    Row-sharded parameters are gathered, so that any number of ranks can load it. Rank 0 writes
    a file for each of model, optimizer, mesh and extra values, as torch.save does:
    `state.model.pt` holds the model's state_dict.

    Args:
        path: the folder to write, the same on all ranks, on a disk that they share. A
            checkpoint that is there is replaced; a folder with anything else is refused.
        mesh: the ranks; its seed and dropout counter are saved, and the state of torch's
            generator on each rank.
        model: the model, wrapped by `replicate` or not.
        optimizer: its optimizer.
        link: the link of the training, or links by relation as `partition` takes them: each
            rank writes their late rows.
        extra: further values: numbers, strings, tensors, or lists and dicts of them.

    Raises:
        ValueError: on all ranks, if ranks differ in `path`, or the disk is full,
            cannot be written or is not shared.
        TypeError: if an extra value is of another type, or named `keep`.
    """
    if "keep" in extra:  # which would be saved as a value, and the folder replaced
        raise TypeError(
            "leave out keep=, and give each checkpoint to keep its own path"
        )
    mesh, model = given_mesh(mesh, "pdc.save_checkpoint"), bare(model)
    world = mesh.world
    with on_all_ranks(world):
        _check_whole(model, mesh.stage.size)
        _check_optimizer(model, optimizer)
    inputs = {"inputs": inputs_of(mesh).as_text(mesh), "random": _gather_random(mesh)}
    trees = {"model": _model_state(model), "mesh": {**mesh.state_dict(), **inputs}}
    if extra:
        trees["extra"] = extra
    if optimizer is not None:
        trees["optimizer"] = optimizer_state(model, optimizer)
    trees = tree_map(
        lambda v: v.full_tensor() if isinstance(v, DistTensor) else v, trees
    )
    files: dict[str, Any] = {}
    with on_all_ranks(world):
        _check_plain(trees)
        if mesh.rank == 0:
            files = {_file(name): tree for name, tree in trees.items()}
        if link is not None:
            states = {n: one.state_dict() for n, one in _named_links(link).items()}
            files[_link_file(mesh.rank)] = states
    with whole_folder(path, "checkpoint", world) as folder, on_all_ranks(world):
        write_files(folder, files)
    tell(mesh.rank, "saved a checkpoint at %s", path)


def load_checkpoint(
    path: str | Path,
    mesh: Mesh,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    link: Links = None,
    **extra: Any,
) -> dict[str, Any]:
    """Restores what `save_checkpoint` saved, on any number of ranks; collective.

    Args:
        path: the folder.
        mesh: the ranks; its seed and dropout counter are set to the saved ones, and on as
            many ranks the state of torch's generators.
        model: the model to load into.
        optimizer: the optimizer to load into.
        link: the link to load into, made like the saved one, or links by relation with the
            same names. On another number of ranks or another partition, late
            rows are dropped with a warning: the next epoch is synchronous, at the saved place
            in the schedule.
        extra: the further values to read, by name; tensors come to the device of those that
            are given.

    Returns:
        The further values as they were saved.

    Raises:
        ValueError: on all ranks, if the folder is missing, incomplete or does not fit.
            A parameter that does not fit is named, and nothing has changed.
    """
    mesh, model = given_mesh(mesh, "pdc.load_checkpoint"), bare(model)
    world = mesh.world
    with on_all_ranks(world):
        _check_whole(model)
        _check_optimizer(model, optimizer)
    name = str(collectives.broadcast_object(find(path).name, world))
    folder = Path(os.path.realpath(path)).with_name(name)
    parts = ["model", "mesh"] if optimizer is None else ["model", "mesh", "optimizer"]
    own = _model_state(model)
    with on_all_ranks(world), naming(f"cannot load checkpoint {folder}"):
        state = _read(folder, parts, list(extra))
        _check_model(model, own, state["model"])
        if optimizer is not None:
            saved = state["optimizer"]
            _check_saved(model, optimizer, saved)
    if link is not None:
        _load_link(folder, mesh, link)
    set_model_state_dict(model, _own_rows(model, own, state["model"]))
    if optimizer is not None:
        saved["state"] = _own_rows(model, own, saved["state"])
        load_optimizer(model, optimizer, saved)
    mesh.load_state_dict(state["mesh"])
    inputs_of(mesh).expect(state["mesh"]["inputs"])
    _set_random(mesh, state["mesh"]["random"])
    tell(mesh.rank, "loaded the checkpoint at %s", folder)
    return {name: _at(state["extra"][name], like) for name, like in extra.items()}


def _check_whole(model: torch.nn.Module, stages: int = 1) -> None:
    """Raises for a model of which each rank may hold a part, and for what is no model."""
    check_module(model, "a checkpoint")
    if stages > 1 or getattr(type(model), "saves_itself", False):
        raise ValueError(
            f"a checkpoint holds one model that all ranks hold, got a {type(model).__name__} "
            f"(stages: {stages}); a Pipeline has save(path, optimizer) and "
            "load(path, optimizer)"
        )


def _file(part: str) -> str:
    return f"state.{part}.pt"


def _check_plain(trees: dict[str, Any]) -> None:
    """Raises TypeError if a tree holds what is neither a tensor nor read back as data."""
    parts = {name: tree for name, tree in trees.items() if name != "extra"}
    leaves = [
        (name, leaf)
        for name, tree in {**parts, **trees.get("extra", {})}.items()
        for leaf in tree_leaves(tree)
    ]
    for name, leaf in leaves:
        if isinstance(leaf, (Tensor, np.number, np.bool_)):
            continue
        try:
            box = io.BytesIO()
            torch.save(leaf, box)
            box.seek(0)
            torch.load(box, weights_only=True)
        except Exception:
            raise TypeError(
                "save numbers, strings, tensors, or lists and dicts of them: "
                f"{name} holds a {type(leaf).__name__}, which cannot be read back as data"
            ) from None


def _plain(leaf: Any) -> Any:
    """Returns a leaf as it is saved: a number of Python, or a tensor without other memory."""
    if isinstance(leaf, (np.number, np.bool_)):
        return leaf.item()
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach()
    if leaf.layout != torch.strided:
        return leaf
    leaf, own = leaf.as_subclass(Tensor), leaf.numel() * leaf.element_size()
    return leaf.clone() if leaf.untyped_storage().nbytes() > own else leaf


def write_files(folder: Path, files: dict[str, Any]) -> None:
    """Writes values to files of a folder; raises ValueError if the disk cannot store them."""
    with explaining_disk(folder):
        for name, value in files.items():
            write_whole(folder / name, tree_map(_plain, value))


def _read(folder: Path, parts: list[str], extra: list[str]) -> dict[str, Any]:
    """Reads parts of a checkpoint, on the CPU, and its extra values if any are asked for.

    Raises:
        ValueError: naming the folder, if it is damaged, or holds no such part or value.
    """
    wanted = [*parts, "extra"] if extra else parts
    there = {part: folder / _file(part) for part in wanted}
    check_files(folder, *(path.name for path in there.values()))
    has = sorted(path.name.split(".")[1] for path in folder.glob(_file("*")))
    state: dict[str, Any] = {"extra": {}}
    state |= {p: read_whole(path) for p, path in there.items() if p in has}
    for name, tree in state.items():
        if not (isinstance(tree, dict) and _FIELDS[name] <= tree.keys()):
            raise ValueError(f"its {name} is damaged")
    missing = [part for part in parts if part not in state]
    missing += [f"extra.{name}" for name in extra if name not in state["extra"]]
    if missing:
        raise ValueError(
            f"it holds no {missing[0]}, but {', '.join(has) or 'nothing of save_checkpoint'}; "
            "load what was saved"
        )
    return state


def _check_model(
    model: torch.nn.Module, own: dict[str, Any], saved: dict[str, Any]
) -> None:
    """Raises if a model's parameters and buffers are not those that were saved."""
    for name in {**own, **saved}:
        mine: Any = own.get(name)
        if is_lazy(mine) and isinstance(saved.get(name), Tensor):
            continue  # it takes the shape of what is loaded
        there, here = _shape_text(saved.get(name)), _shape_text(own.get(name))
        if there != here:
            raise ValueError(
                f"{name} is {there} in it, and {here} in the {type(model).__name__}; load "
                "into a model made as the saved one was"
            )


def _shape_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"of shape {list(value.shape)}"
    return "missing" if value is None else f"a {type(value).__name__}"


def _check_saved(model: torch.nn.Module, optimizer: Any, saved: dict[str, Any]) -> None:
    """Raises if an optimizer is of another class than the saved one, or has other groups."""
    groups = _named_groups(model, optimizer)
    pairs = [(f"class {saved['class']}", f"class {type(optimizer).__name__}")]
    pairs += [(f"{len(saved['param_groups'])} groups", f"{len(groups)} groups")]
    for k, (kept, own) in enumerate(zip(saved["param_groups"], groups, strict=False)):
        for name in sorted({*kept["params"]} ^ {*own}):
            saved_as, given = ("not in", "in") if name in own else ("in", "not in")
            pairs.append((f"{name} {saved_as} group {k}", f"{name} {given} group {k}"))
    for one, other in pairs:
        if one != other:
            raise ValueError(
                f"it holds an optimizer with {one}, got one with {other}; make the optimizer "
                "as the saved one was, or leave it out"
            )


def _named_groups(model: torch.nn.Module, optimizer: Any) -> list[list[str]]:
    """Returns the names of the parameters in each group of an optimizer; others are ""."""
    # torch.compile adds to names
    names = {p: n.replace("_orig_mod.", "") for n, p in model.named_parameters()}
    return [
        [names.get(p, "") for p in group["params"]] for group in optimizer.param_groups
    ]


def _own_rows(
    model: torch.nn.Module, own: dict[str, Any], saved: dict[str, Any]
) -> dict[str, Any]:
    """Cuts what is saved of row-sharded parameters, by their names, to this rank's rows."""
    local = sharded_parameters(model)

    def cut(value: Any, name: str) -> Any:
        if not isinstance(value, Tensor) or value.shape != own[name].shape:
            return value
        rows, dense = own[name].rows, value.to_dense() if value.is_sparse else value
        mine = dense[rows.place.to(dense.device)]
        if name not in local:
            return DistTensor.wrap(mine, rows)
        return mine.to_sparse(value.sparse_dim()) if value.is_sparse else mine

    return {
        name: tree_map(lambda v, n=name: cut(v, n), tree)
        if isinstance(own.get(name), DistTensor)
        else tree
        for name, tree in saved.items()
    }


def _at(saved: Any, given: Any) -> Any:
    """Returns a saved value on the device of the value that was given in its place."""
    like = next((v for v in tree_leaves(given) if isinstance(v, Tensor)), None)
    if like is None:
        return saved
    return tree_map(lambda v: v.to(like.device) if isinstance(v, Tensor) else v, saved)


def load_optimizer(
    model: torch.nn.Module, optimizer: Any, saved: dict[str, Any]
) -> None:
    """Loads what `optimizer_state` returned of an optimizer with as many groups."""
    state, whole = saved["state"], optimizer.state_dict()
    whole["state"] = {}
    groups = zip(whole["param_groups"], saved["param_groups"], strict=True)
    for (own, kept), names in zip(groups, _named_groups(model, optimizer), strict=True):
        ours = "params", "param_names"
        options = {k: v for k, v in kept.items() if k not in ours}
        # a learning rate may be a tensor
        own.update({k: _at(v, own.get(k)) for k, v in options.items()})
        numbers = zip(own["params"], names, strict=True)
        whole["state"] |= {k: state[name] for k, name in numbers if name in state}
    optimizer.load_state_dict(whole)


def _link_file(rank: int) -> str:
    return f"link.{rank}.pt"


_ALL = "one link of all relations"


def _named_links(link: Links) -> dict[str, LinkPolicy]:
    """Returns links keyed by relation, "a__to__b" or "to"; a shared link has its first name."""
    if not isinstance(link, Mapping):
        return {} if link is None else {_ALL: link}
    by_name = {"__".join(k) if isinstance(k, tuple) else str(k): link[k] for k in link}
    found: dict[str, LinkPolicy] = {}
    for name, one in sorted(by_name.items()):
        if one is not None and not any(one is other for other in found.values()):
            found[name] = one
    return found


def _load_link(path: Path, mesh: Mesh, link: Links) -> None:
    """Loads each rank's own file, or rank 0's without its rows if a rank lacks a file.

    Raises:
        ValueError: on all ranks, if the links differ from those that were saved.
    """
    here = (path / _link_file(mesh.rank)).exists()
    whole = [0] not in collectives.all_gather_counts([int(here)], mesh.world)
    file = path / _link_file(mesh.rank if whole else 0)
    with on_all_ranks(mesh.world), naming(f"cannot load the link of checkpoint {path}"):
        check_files(path, file.name)
        states, links = read_whole(file), _named_links(link)
        if states.keys() != links.keys():
            both = states, links
            saved, given = (_ALL if _ALL in n else f"links of {[*n]}" for n in both)
            raise ValueError(
                f"saved with {saved}, and given {given}: give links as they were saved"
            )
        for name, one in links.items():
            states[name] |= {} if whole else {"mark": None}
            one.check_state(states[name])
    for name, one in links.items():
        one.load_state_dict(states[name])


def _check_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Raises if an optimizer has parameters that are not the model's."""
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"a checkpoint takes one optimizer of the model, got {type(optimizer).__name__}; "
            "give others by their state_dict(), as second=second.state_dict()"
        )
    groups = [] if optimizer is None else optimizer.param_groups
    own_ids = {id(p) for p in model.parameters()}
    for number, group in enumerate(groups):
        unknown = [p for p in group["params"] if id(p) not in own_ids]
        if unknown:
            raise ValueError(
                f"give the optimizer of this model: {len(unknown)} of the parameters in "
                f"its group {number} (first of shape {list(unknown[0].shape)}) are not "
                f"the {type(model).__name__}'s"
            )


def _gather_random(mesh: Mesh) -> list[list[Tensor]]:
    """Returns the states of torch's generators, of each rank; collective."""
    states = [torch.get_rng_state()]
    if mesh.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(mesh.device))
    every = [
        collectives.all_gather_rows(state.unsqueeze(0), [1] * mesh.size, mesh.control)
        for state in states
    ]
    return [[kind[rank] for kind in every] for rank in range(mesh.size)]


def _set_random(mesh: Mesh, saved: list[list[Tensor]]) -> None:
    """Sets torch's generators to the saved states of this rank, on as many ranks."""
    if len(saved) == mesh.size:
        host, *device = saved[mesh.rank]
        torch.set_rng_state(host)
        if device and mesh.device.type == "cuda":
            torch.cuda.set_rng_state(device[0], mesh.device)


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Returns a model's state, with the rows of `DistEmbedding` as DistTensors."""
    state: dict[str, Any] = get_model_state_dict(model)
    for name, rows in sharded_parameters(model).items():
        state[name] = DistTensor.wrap(state[name], rows)
    return state


def optimizer_state(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Returns an optimizer's state by names of parameters; collective for row-sharded ones."""
    whole, shards = optimizer.state_dict(), sharded_parameters(model)
    sizes = {name: p.shape for name, p in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for own, names in zip(
        whole["param_groups"], _named_groups(model, optimizer), strict=True
    ):
        groups.append({**own, "params": names})
        numbers = zip(own["params"], names, strict=True)
        state |= {n: whole["state"][k] for k, n in numbers if k in whole["state"]}
    for name in [n for n in shards if n in state]:
        for key, value in state[name].items():
            if isinstance(value, Tensor) and value.dim() and value.shape != sizes[name]:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key} {list(value.shape)} for "
                    f"{name}, which would differ between ranks; take an optimizer whose "
                    "state has the shape of the table, such as Adam or Adagrad"
                )
    for name in [n for n in shards if n in state]:
        state[name] = tree_map(lambda v, n=name: _whole(v, shards[n]), state[name])
    return {"class": type(optimizer).__name__, "state": state, "param_groups": groups}


def _whole(value: Any, rows: Rows) -> Any:
    """Gathers a value that an optimizer keeps for rows; collective."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    dense = value.to_dense() if value.is_sparse else value
    whole = DistTensor.wrap(dense, rows).full_tensor()
    return whole.to_sparse(value.sparse_dim()) if value.is_sparse else whole
