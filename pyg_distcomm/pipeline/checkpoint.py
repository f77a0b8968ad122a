"""Saves and loads a pipeline, to resume bit for bit on any number of stages."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyg_distcomm.checkpoint.folder import check_files, find, whole_folder
from pyg_distcomm.checkpoint.training import (
    load_optimizer,
    optimizer_state,
    write_files,
)
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import naming, on_all_ranks
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.partition.atomic import read_whole
from pyg_distcomm.pipeline.chunk_graph import ChunkPass

_MODEL = "model.pt"
_NONE = type(None)
_FIELDS: dict[str, tuple[type, ...]] = {
    "model": (dict,),
    "optimizer": (dict, _NONE),
    "epoch": (int,),
    "seed": (int,),
    "link": (dict, _NONE),
}
_ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "mark": (str,),
    "sites": (dict,),
    "link": (dict, _NONE),
}
_NO_ROWS: dict[str, Any] = {
    "kept": [],
    "mark": None,
    "active": [],
}  # the fields of a link's state that differ by rank, empty


def state_of(
    pipe: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
) -> dict[str, Any]:
    """Returns the state of all stages, as `torch.nn.Module.state_dict` does; collective."""
    state = pipe.layers.state_dict(keep_vars=keep_vars)
    own = {name: value.cpu() for name, value in state.items()}
    every = merged(own, pipe.mesh, [layer.name for layer in pipe._stack])
    found: dict[str, Any] = {} if destination is None else destination
    found.update({prefix + name: value for name, value in every.items()})
    return found


def merged(own: dict[str, Any], mesh: Mesh, names: Sequence[str]) -> dict[str, Any]:
    """Gathers the dicts of all stages, keyed by names of layers, in the order of layers."""
    parts = collectives.all_gather_object(own, mesh.stage)
    every = {name: value for part in parts for name, value in part.items()}
    place = {name: k for k, name in enumerate(names)}
    return dict(sorted(every.items(), key=lambda item: place[item[0].split(".")[0]]))


def save(pipe: Any, path: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Writes a folder, whole or not at all; collective (see `whole_folder`)."""
    mesh = pipe.mesh
    whole = {"model": pipe.state_dict(), "epoch": pipe.epoch, "seed": pipe._seed}
    whole["optimizer"] = _optimizer_state(pipe, optimizer)
    with (
        whole_folder(path, "pipeline", mesh.everyone) as folder,
        on_all_ranks(mesh.everyone),
    ):
        kept = _current_history(pipe) if pipe._saved is None else pipe._saved
        whole["link"] = kept.link
        # a pipeline that was loaded and not used has the rows of all stages: stage 0 writes
        own = pipe._saved is None or mesh.stage.rank == 0
        parts = dict(kept.parts) if own else {}
        if mesh.everyone.rank == 0:
            parts[_MODEL] = whole
        write_files(folder, parts)


def load(pipe: Any, path: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Loads a folder that `save` wrote; collective."""
    whole: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    path = find(path)
    rows, axis = f"rows{pipe.mesh.rank}-stage*.pt", pipe.mesh.everyone
    with on_all_ranks(axis), naming(f"cannot load the pipeline at {path}"):
        check_files(path, _MODEL, rows)
        whole = _read(path / _MODEL, _FIELDS)
        for file in sorted(path.glob(rows)):
            parts[file.name] = _read(file, _ROW_FIELDS)
    pipe.load_state_dict(whole["model"])
    with on_all_ranks(axis):
        if optimizer is not None:
            _load_optimizer(pipe, optimizer, whole["optimizer"], path)
    pipe.epoch, pipe._seed = int(whole["epoch"]), int(whole["seed"])
    if pipe._run is not None:
        pipe._run.seed = pipe._seed
    pipe._stage, pipe._saved = None, _SavedHistory(parts, whole["link"], path)


def _read(file: Path, wanted: dict[str, tuple[type, ...]]) -> dict[str, Any]:
    """Reads a saved file, of which rows are mapped; raises ValueError for other fields."""
    saved = read_whole(file, mmap=wanted is _ROW_FIELDS)
    with naming(str(file)):
        _check_fields(saved, wanted)
        if "sites" in wanted:
            sites = saved["sites"]
            _check_fields(sites, dict.fromkeys(sites, (torch.Tensor, _NONE)))
    return saved  # type: ignore[no-any-return]


def _check_fields(saved: Any, wanted: dict[Any, tuple[type, ...]]) -> None:
    """Raises ValueError for the first field that is missing or of another type."""
    if not isinstance(saved, dict):
        raise ValueError(
            f"got a {type(saved).__name__}, wanted a dict of {', '.join(map(str, wanted))}"
        )
    for name, kinds in wanted.items():
        if name not in saved:
            raise ValueError(f"holds no {name}; save the pipeline anew")
        if not isinstance(saved[name], kinds) or isinstance(saved[name], bool):
            kind, one = type(saved[name]).__name__, kinds[0].__name__
            raise ValueError(
                f"{name} is a {kind}, wanted a {one}; save the pipeline anew"
            )


def _current_history(pipe: Any) -> _SavedHistory:
    """Returns the history and the link's state of this rank."""
    run, mesh = pipe._run, pipe.mesh
    if run is None:
        return _SavedHistory({}, None)
    state = None if run.link is None else run.link.state_dict()
    sites = {key: site.history for key, site in run.sites.items()}
    part: dict[str, Any] = {"mark": _layout_hash(run), "sites": sites}
    part["link"] = None if state is None else {k: state[k] for k in _NO_ROWS}
    link = None if state is None else {**state, **_NO_ROWS}
    return _SavedHistory({f"rows{mesh.rank}-stage{mesh.stage.rank}.pt": part}, link)


def _layout_hash(run: ChunkPass) -> str:
    """Returns a hash of this rank's nodes and chunks: equal if they are cut in the same way."""
    plan = run.plan
    digest = hashlib.sha256(str((plan.blocks, plan.counts)).encode())
    digest.update(plan.gid.numpy().tobytes())
    return digest.hexdigest()


@dataclass
class _SavedHistory:
    """The history and the link's state, as they are saved.

    Args:
        parts: by names of files, the rows of all stages at this rank's place in a stage.
        link: the state of the data's link, without rows.
        path: the folder that it was loaded from.
    """

    parts: dict[str, Any]
    link: Any
    path: Path | None = None

    def restore(self, run: ChunkPass) -> None:
        """Restores the saved history in a pipeline's sites, and the state of its link.

        Rows are restored only if all ranks have the same nodes and chunks as when saved.
        """
        mark, saved = _layout_hash(run), self.parts.values()
        every = {k: v for part in saved for k, v in part["sites"].items()}
        fits = all(part["mark"] == mark for part in saved) and all(
            key in every and _same_layout(site.history, every[key])
            for key, site in run.sites.items()
        )
        replies = collectives.all_gather_object(
            (fits, bool(saved)), run.plan.mesh.everyone
        )
        fits = all(fit for fit, _ in replies)
        if self.link is not None and run.link is not None:
            parts = [part["link"] for part in saved] if fits else []
            run.link.load_state_dict({**self.link, **_merge_link_rows(parts)})
        if not any(some for _, some in replies):
            return  # saved before there were data
        if not fits:
            warnings.warn(
                f"{self.path} holds history of other chunks, or stored in another way; "
                "history begins anew from an exact pass over the graph, late rows of links "
                "as well",
                stacklevel=2,
            )
            return
        for key, site in run.sites.items():
            if site.history is not None:
                site.history.copy_(every[key])
                site.end_epoch(refresh=True)


def _merge_link_rows(parts: list[Any]) -> dict[str, Any]:
    """Returns the rows that the links of all stages kept, of this rank's place in a stage."""
    if not parts:
        return _NO_ROWS
    kept, active = ([one for p in parts for one in p[k]] for k in ("kept", "active"))
    return {"kept": kept, "mark": parts[0]["mark"], "active": active}


def _same_layout(history: Any, kept: Any) -> bool:
    if history is None or kept is None:
        return history is None and kept is None
    return history.shape == kept.shape and history.dtype == kept.dtype


def _optimizer_state(pipe: Any, optimizer: Any) -> Any:
    """Returns the state of an optimizer, by names of parameters, of all stages."""
    if optimizer is None:
        return None
    own, layers = optimizer_state(pipe.layers, optimizer), pipe._stack
    every = merged(own["state"], pipe.mesh, [layer.name for layer in layers])
    return {**own, "state": every}


def _load_optimizer(pipe: Any, optimizer: Any, saved: Any, path: Path) -> None:
    if saved is None or len(saved["param_groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"{path} holds no optimizer with {len(optimizer.param_groups)} groups of "
            "parameters; make the optimizer as it was when saved, or leave it out"
        )
    load_optimizer(pipe.layers, optimizer, saved)
