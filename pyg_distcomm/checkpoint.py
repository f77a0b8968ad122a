"""Checkpoints through torch.distributed.checkpoint, loadable on any number of ranks."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map

from pyg_distcomm import wire
from pyg_distcomm.exchange.policy import LinkPolicy
from pyg_distcomm.mesh import Mesh
from pyg_distcomm.nn.replicate import bare
from pyg_distcomm.tensor import DistTensor


def save_checkpoint(
    path: str | Path,
    mesh: Mesh,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    link: LinkPolicy | None = None,
    **extra: Any,
) -> None:
    """Writes model, optimizer, the mesh's counters and anything extra; collective.

    The folder appears whole or not at all: it is written aside and renamed. Row-cut
    parameters are gathered, so that any number of ranks can load it.

    Args:
        path: the folder to write; one that is there is replaced.
        mesh: the ranks; its seed and dropout counter are saved.
        model: the model, wrapped by `replicate` or not.
        optimizer: its optimizer.
        link: the link it trains with: each rank writes its late and residual rows.
        extra: further values: numbers, tensors, or state_dicts of them.
    """
    if mesh.stage.size > 1:
        raise ValueError(
            "save_checkpoint saves one model that all ranks hold, but the mesh has "
            f"{mesh.stage.size} stages; a Pipeline has save(path, optimizer)"
        )
    path = Path(path)
    state = _state(mesh, bare(model), optimizer, extra)
    aside = path.with_name(f".{path.name}.writing")
    problem = _try_clear(aside) if mesh.rank == 0 else None
    wire.agree(problem, mesh.world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process without a group is meant
        dcp.save(state, checkpoint_id=aside)  # type: ignore[attr-defined]
    if link is not None:
        wire.agree(_try_write(aside / _link_file(mesh), link), mesh.world)
    if mesh.rank == 0:
        _put_in_place(aside, path)
    wire.barrier(mesh.world)


def load_checkpoint(
    path: str | Path,
    mesh: Mesh,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    link: LinkPolicy | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Restores what `save_checkpoint` wrote, on any number of ranks; collective.

    Args:
        path: the folder.
        mesh: the ranks; takes the saved seed and dropout counter.
        model: the model to fill.
        optimizer: the optimizer to fill.
        link: the link to set, made as the one that was saved. On other ranks or another
            partition late and residual rows are dropped with a warning: the next epoch is
            synchronous, at the place in the schedule that was saved.
        extra: the further values, as they were given (their shapes and types).

    Returns:
        The further values as they were saved.

    Raises:
        ValueError: on all ranks, if the folder is missing, incomplete or does not fit.
    """
    model = bare(model)
    state = _state(mesh, model, optimizer, extra)
    problem = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=Path(path))  # type: ignore[attr-defined]
    except (Exception, CheckpointException) as error:
        said = [line for line in str(error).splitlines() if line.strip()]
        problem = f"cannot load checkpoint {path}: {said[-1] if said else error!r}"
    wire.agree(problem, mesh.world)
    if link is not None:
        _load_link(Path(path), mesh, link)
    set_model_state_dict(model, _cut_like(state["model"], get_model_state_dict(model)))
    if optimizer is not None:
        now = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, _cut_like(state["optimizer"], now))
    mesh.load_state_dict(state["mesh"])
    return {name: state["extra"][name] for name in extra}


def _link_file(mesh: Mesh, rank: int | None = None) -> str:
    return f"link.{mesh.rank if rank is None else rank}.pt"


def _try_write(path: Path, link: LinkPolicy) -> str | None:
    try:
        torch.save(link.state_dict(), path)
    except (OSError, ValueError) as error:
        return f"cannot write {path}: {error}"
    return None


def _load_link(path: Path, mesh: Mesh, link: LinkPolicy) -> None:
    """Gives each rank its own part, or rank 0's without the rows if one lacks a part."""
    here = (path / _link_file(mesh)).exists()
    whole = all(row[0] for row in wire.all_gather_counts([int(here)], mesh.world))
    file = path / (_link_file(mesh) if whole else _link_file(mesh, 0))
    problem, state = None, {}
    try:
        state = torch.load(file, weights_only=True)
        state = state if whole else {**state, "mark": None}
        link.check_state(state)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        problem = f"cannot load the link of checkpoint {path}: {error}"
    wire.agree(problem, mesh.world)
    link.load_state_dict(state)


def _put_in_place(aside: Path, path: Path) -> None:
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
    os.replace(aside, path)
    shutil.rmtree(old, ignore_errors=True)


def _try_clear(path: Path) -> str | None:
    try:
        if path.exists():
            shutil.rmtree(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot write a checkpoint beside {path}: {error}"
    return None


def _state(
    mesh: Mesh, model: torch.nn.Module, optimizer: Any, extra: dict[str, Any]
) -> dict[str, Any]:
    state = {
        "model": _whole(get_model_state_dict(model)),
        "mesh": mesh.state_dict(),
        "extra": _whole(extra),
    }
    if optimizer is not None:
        state["optimizer"] = _whole(get_optimizer_state_dict(model, optimizer))
    return state


def _whole(tree: Any) -> Any:
    return tree_map(lambda v: v.full_tensor() if isinstance(v, DistTensor) else v, tree)


def _cut_like(saved: Any, now: Any) -> Any:
    """Gives each rank its rows of what is row-cut in the running model."""

    def cut(value: Any, like: Any) -> Any:
        if isinstance(like, DistTensor):
            return DistTensor.wrap(value[like.rows.gid], like.rows)
        return value

    return tree_map(cut, saved, now)
