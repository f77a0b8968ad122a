"""Saves checkpoints by torch.distributed.checkpoint, and loads them on any number of ranks."""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_flatten, tree_map

from pyg_distcomm.checkpoint.folder import damage, find, whole_folder, write_whole
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh, given_mesh
from pyg_distcomm.graph.product_cache import inputs_of
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn.embedding import DistEmbedding, sharded_parameters
from pyg_distcomm.nn.replicate import bare
from pyg_distcomm.partition.atomic import write_problem
from pyg_distcomm.process import tell
from pyg_distcomm.tensor.dist_tensor import DistTensor

Links: TypeAlias = LinkPolicy | Mapping[Any, LinkPolicy | None] | None


def save_checkpoint(
    path: str | Path,
    mesh: Mesh,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    link: Links = None,
    keep: int = 1,
    **extra: Any,
) -> None:
    """Writes model, optimizer, the mesh's counters and anything extra; collective.

    The folder appears whole or not at all: see [Note: whole folders] in `partition/atomic.py`.
    Row-sharded parameters are gathered, so that any number of ranks can load it. Rank 0 writes.

    Args:
        path: the folder to write, the same on all ranks, on a disk that they share. A
            checkpoint that is there is replaced; a folder with anything else is refused.
        mesh: the ranks; its seed and dropout counter are saved, and the state of torch's
            generator on each rank.
        model: the model, wrapped by `replicate` or not.
        optimizer: its optimizer.
        link: the link of the training, or links by relation as `partition` takes them: each
            rank writes their late and residual rows.
        keep: the number of checkpoints to keep: this one, and earlier ones at `path.1`, ...,
            which `load_checkpoint` reads as well.
        extra: further values: numbers, strings, tensors, or lists and dicts of them.

    Raises:
        ValueError: on all ranks, if ranks differ in `path` or `keep`, or the disk is full,
            cannot be written or is not shared.
        TypeError: if an extra value is of another type.
    """
    mesh = given_mesh(mesh, "pdc.save_checkpoint")
    if mesh.stage.size > 1:
        raise ValueError(
            "save_checkpoint saves one model that all ranks hold, but the mesh has "
            f"{mesh.stage.size} stages; a Pipeline has save(path, optimizer)"
        )
    _check_extra(extra)
    _check_optimizer(bare(model), optimizer)
    state = _state(mesh, bare(model), optimizer, extra)
    # reading the state made dense buffers
    _make_momentum_sparse(bare(model), optimizer)
    state["mesh"]["inputs"] = inputs_of(mesh).as_text(mesh)
    state["mesh"]["nodes"] = _embedding_versions(bare(model))
    state["mesh"]["random"] = _gather_random(mesh)
    with whole_folder(path, "checkpoint", mesh.world, keep) as folder:
        collectives.agree(
            _try_save(folder, state) if mesh.rank == 0 else None, mesh.world
        )
        if link is not None:
            collectives.agree(_try_write(folder / _link_file(mesh), link), mesh.world)
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
    """Restores what `save_checkpoint` wrote, on any number of ranks; collective.

    Args:
        path: the folder.
        mesh: the ranks; its seed and dropout counter are set to the saved ones, and on as
            many ranks the state of torch's generators.
        model: the model to load into.
        optimizer: the optimizer to load into.
        link: the link to load into, made like the saved one, or links by relation with the
            same names. On another number of ranks or another partition, late and residual
            rows are dropped with a warning: the next epoch is synchronous, at the saved place
            in the schedule.
        extra: the further values, with the shapes and types that were saved.

    Returns:
        The further values as they were saved.

    Raises:
        ValueError: on all ranks, if the folder is missing, incomplete or does not fit, or
            holds rows of embeddings for nodes that a `pdc.update` has removed, or had removed.
    """
    mesh, model = given_mesh(mesh, "pdc.load_checkpoint"), bare(model)
    _check_optimizer(model, optimizer)
    state = _state(mesh, model, optimizer, extra)
    folder = _find_folder(path, mesh)
    collectives.agree(_try_load(folder, state), mesh.world)
    if state["mesh"].pop("nodes") != _embedding_versions(model):
        raise ValueError(
            f"checkpoint {folder} holds rows of a DistEmbedding for other nodes: pdc.update "
            "had removed other nodes when it was saved, and ids of nodes differ since; load "
            "it on the graph that it was saved with, and update that"
        )
    if link is not None:
        _load_link(folder, mesh, link)
    shards = sharded_parameters(model)
    saved = _shard_like(state["model"], _model_state(model))
    set_model_state_dict(model, {**saved, **{n: _to_local(saved[n]) for n in shards}})
    if optimizer is not None:
        _fill_optimizer(model, optimizer, state["optimizer"], shards)
    mesh.load_state_dict(state["mesh"])
    inputs_of(mesh).expect(state["mesh"]["inputs"])
    _set_random(mesh, state["mesh"].get("random", {}))
    tell(mesh.rank, "loaded the checkpoint at %s", folder)
    return {name: state["extra"][name] for name in extra}


def _fill_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    shards: Iterable[str],
) -> None:
    """Loads an optimizer; parameters without saved state have none afterwards."""
    current = _optimizer_state(model, optimizer)
    saved_state = {name: current["state"][name] for name in saved["state"]}
    filled = _shard_like(saved, {**current, "state": saved_state})
    every = {**current["state"], **filled["state"]}
    filled["state"] = {n: _to_local(v) if n in shards else v for n, v in every.items()}
    set_optimizer_state_dict(model, optimizer, filled)
    for name, parameter in model.named_parameters():
        if name in current["state"] and name not in saved_state:
            optimizer.state.pop(parameter, None)
    _make_momentum_sparse(model, optimizer)


def _make_momentum_sparse(model: torch.nn.Module, optimizer: Any) -> None:
    """Makes the Nesterov momentum of sparse rows sparse, since torch adds it to gradients."""
    sparse = [
        m.shard for m in model.modules() if isinstance(m, DistEmbedding) and m.sparse
    ]
    for group in [] if optimizer is None else optimizer.param_groups:
        for parameter in group["params"] if group.get("nesterov") else ():
            kept = optimizer.state.get(parameter, {}).get("momentum_buffer")
            dense = kept is not None and not kept.is_sparse
            if dense and any(parameter is p for p in sparse):
                optimizer.state[parameter]["momentum_buffer"] = kept.to_sparse(1)


def _drop_unsaved(state: dict[str, Any], keys: Collection[str]) -> None:
    """Removes from `state` what was not saved.

    That is the optimizer's parameters that had no state, and generators of other ranks.
    """
    random = [key for key in keys if key.startswith("mesh.random.")]
    if len(random) != len(state["mesh"]["random"]):
        state["mesh"]["random"] = {}
    parameter_state = state.get("optimizer", {"state": {}})["state"]
    if not any(key.startswith("optimizer.") for key in keys):
        return  # saved without an optimizer: loading raises
    for name in [*parameter_state]:
        if not any(
            f"optimizer.state.{name}.{key}" in keys for key in parameter_state[name]
        ):
            del parameter_state[name]


def _link_file(mesh: Mesh, rank: int | None = None) -> str:
    return f"link.{mesh.rank if rank is None else rank}.pt"


def _named_links(link: Any) -> dict[str, LinkPolicy]:
    """Returns links keyed by relation, "a__to__b" or "to"; a shared link has its first name."""
    by_name = {"__".join(k) if isinstance(k, tuple) else str(k): link[k] for k in link}
    found: dict[str, LinkPolicy] = {}
    for name, one in sorted(by_name.items()):
        if one is not None and not any(one is other for other in found.values()):
            found[name] = one
    return found


def _link_state(link: Any) -> dict[str, Any]:
    if not isinstance(link, Mapping):
        return link.state_dict()  # type: ignore[no-any-return]
    states = {name: one.state_dict() for name, one in _named_links(link).items()}
    return {"relations": states}


def _links_of(link: Any, state: Any) -> list[tuple[LinkPolicy, dict[str, Any]]]:
    """Pairs links with their saved states.

    Raises:
        ValueError: if the links differ from those that were saved.
    """
    names = list(_named_links(link)) if isinstance(link, Mapping) else None
    saved = list(state["relations"]) if "relations" in state else None
    if names is None or saved is None or set(names) != set(saved):
        if names is None and saved is None:
            return [(link, state)]
        one = "one link of all relations"
        raise ValueError(
            f"saved with {one if saved is None else f'links of {saved}'}, and given "
            f"{one if names is None else f'links of {names}'}: give links as they were saved"
        )
    return [(each, state["relations"][n]) for n, each in _named_links(link).items()]


def _try_write(path: Path, link: Links) -> str | None:
    try:
        state = _link_state(link)
        write_whole(path, lambda file: torch.save(state, file))
    except (OSError, RuntimeError) as error:
        return write_problem(error, path)
    except ValueError as error:
        return f"cannot write {path}: {error}"
    return None


def _load_link(path: Path, mesh: Mesh, link: Links) -> None:
    """Loads each rank's own file, or rank 0's without its rows if a rank lacks a file."""
    here = (path / _link_file(mesh)).exists()
    whole = all(
        row[0] for row in collectives.all_gather_counts([int(here)], mesh.world)
    )
    file = path / (_link_file(mesh) if whole else _link_file(mesh, 0))
    problem, pairs = damage(path, file.name), []
    collectives.agree(problem, mesh.world)
    try:
        pairs = _links_of(link, torch.load(file, weights_only=True))
        pairs = [(o, s if whole else {**s, "mark": None}) for o, s in pairs]
        for one, state in pairs:
            one.check_state(state)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        problem = f"cannot load the link of checkpoint {path}: {error}"
    collectives.agree(problem, mesh.world)
    for one, state in pairs:
        one.load_state_dict(state)


def _check_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Raises if an optimizer has parameters that are not the model's."""
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


def _check_extra(extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        for leaf in tree_flatten(value)[0]:
            try:
                if not isinstance(leaf, Tensor):
                    box = io.BytesIO()
                    torch.save(leaf, box)
                    torch.load(io.BytesIO(box.getvalue()), weights_only=True)
            except Exception:
                raise TypeError(
                    f"save numbers, strings, tensors, or lists and dicts of them: {name} "
                    f"holds a {type(leaf).__name__}, which can not be read back as data"
                ) from None


def _find_folder(path: str | Path, mesh: Mesh) -> Path:
    """Returns the path of the checkpoint's folder, as rank 0 sees it."""
    name = collectives.broadcast_object(find(path).name, mesh.world)
    return Path(os.path.realpath(path)).with_name(str(name))


def _try_save(folder: Path, state: dict[str, Any]) -> str | None:
    writer = FileSystemWriter(str(folder), sync_files=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no_dist is meant: one process saves
            dcp.save(state, storage_writer=writer, no_dist=True)  # type: ignore[attr-defined]
    except (Exception, CheckpointException) as error:
        cause = next((c for c in _causes(error) if isinstance(c, OSError)), error)
        return write_problem(cause, folder)
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """Returns an error, and the errors that torch's checkpoint wrapped in it."""
    inner = getattr(error, "failures", {}).values()
    return [error, *(wrapped[0] for wrapped in inner)]


def _try_load(folder: Path, state: dict[str, Any]) -> str | None:
    try:
        problem = damage(folder, ".metadata", "*.distcp")
        if problem is not None:
            return f"cannot load checkpoint {folder}: {problem}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader = _MetadataReader(str(folder))
            _drop_unsaved(state, reader.read_metadata().state_dict_metadata)
            dcp.load(  # type: ignore[attr-defined]
                state,
                storage_reader=reader,
                planner=_Planner(),
                no_dist=True,
            )
    except (Exception, CheckpointException) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"cannot load checkpoint {folder}: {lines[-1] if lines else error!r}"
    return None


class _MetadataReader(FileSystemReader):
    """Reads .metadata with a restricted unpickler; torch's reader would unpickle any class."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not metadata.storage_data:
            raise ValueError(
                "its .metadata is not that of a checkpoint; give a folder of save_checkpoint"
            )
        for stored in metadata.storage_data.values():
            name = getattr(stored, "relative_path", None)
            if not isinstance(name, str) or not re.fullmatch(r"[\w.]+\.distcp", name):
                raise ValueError(
                    f"its .metadata names {name!r}, which is no file of it"
                )
        return metadata


class _Planner(DefaultLoadPlanner):
    """Loads objects other than tensors with weights_only=True."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        data = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), data)
        data.seek(0)
        super().load_bytes(read_item, data)


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes that describe tensors in a checkpoint, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        known = (module, name) in _METADATA_CLASSES
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = True
        if not known:
            raise pickle.UnpicklingError(
                f"its .metadata names {module}.{name}, which describes no tensor: it was "
                "not written by save_checkpoint, and nothing of it is run"
            )
        return super().find_class(module, name)


_METADATA_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
            "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
        ).split()
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # of Python 3.13
    ("collections", "OrderedDict"),
}


def _state(
    mesh: Mesh, model: torch.nn.Module, optimizer: Any, extra: dict[str, Any]
) -> dict[str, Any]:
    state = {
        "model": _gather_full(_model_state(model)),
        "mesh": {
            **mesh.state_dict(),
            "inputs": "",
            "nodes": "",
            "random": _named_random(
                [t for _ in range(mesh.size) for t in _random_states(mesh)]
            ),
        },
        "extra": _gather_full(extra),
    }
    if optimizer is not None:
        state["optimizer"] = _gather_full(_optimizer_state(model, optimizer))
    return state


def _random_states(mesh: Mesh) -> list[Tensor]:
    """Returns the states of torch's generators that this rank draws from."""
    states = [torch.get_rng_state()]
    if mesh.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(mesh.device))
    return states


def _named_random(states: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns states of all ranks by name: those of rank 0 come first."""
    return {str(place): state for place, state in enumerate(states)}


def _gather_random(mesh: Mesh) -> dict[str, Tensor]:
    """Returns the states of all ranks; collective."""
    every = [
        collectives.all_gather_rows(state.unsqueeze(0), [1] * mesh.size, mesh.control)
        for state in _random_states(mesh)
    ]
    return _named_random([kind[rank] for rank in range(mesh.size) for kind in every])


def _set_random(mesh: Mesh, saved: Mapping[str, Tensor]) -> None:
    """Sets torch's generators to the saved states of this rank, if there are any."""
    kinds = len(saved) // mesh.size
    mine = [saved[str(mesh.rank * kinds + kind)] for kind in range(kinds)]
    if mine:
        torch.set_rng_state(mine[0])
    if len(mine) > 1:
        torch.cuda.set_rng_state(mine[1], mesh.device)


def _embedding_versions(model: torch.nn.Module) -> str:
    """Returns the graph versions of a model's embeddings, if nodes have been removed."""
    every = sharded_parameters(model).items()
    owners = {name: rows.partition for name, rows in every}
    return repr(
        {n: p.version for n, p in owners.items() if p is not None and p.version}
    )


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    """Returns a model's state, with the rows of `DistEmbedding` as DistTensors."""
    state: dict[str, Any] = get_model_state_dict(model)
    for name, rows in sharded_parameters(model).items():
        state[name] = DistTensor.wrap(state[name], rows)
    return state


def _optimizer_state(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Returns an optimizer's state, with its values for rows as DistTensors."""
    if isinstance(optimizer, torch.optim.SparseAdam) and not optimizer.state:
        _init_sparse_state(optimizer)
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    sizes = {name: p.shape for name, p in model.named_parameters()}
    for name, rows in sharded_parameters(model).items():
        # the optimizer's own goes on as it is
        kept = dict(found["state"].get(name, {}))
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.dim():
                if value.shape != sizes[name]:
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {key} {list(value.shape)} for "
                        f"{name}, which would differ between ranks; take an optimizer whose "
                        "state has the shape of the table, such as Adam or Adagrad"
                    )
                value = value.to_dense() if value.is_sparse else value
                kept[key] = DistTensor.wrap(value, rows)
        if kept:
            found["state"][name] = kept
    return found


def _init_sparse_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the zero state of an optimizer that takes sparse gradients only."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.grad is not None for p in parameters):
        return
    for p in parameters:
        p.grad = torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64),
            p.new_empty((0, *p.shape[1:])),
            p.shape,
            device=p.device,
            check_invariants=False,
        )
    optimizer.step()
    for p in parameters:
        optimizer.state[p]["step"] = 0
    optimizer.zero_grad(set_to_none=True)


def _to_local(tree: Any) -> Any:
    return tree_map(lambda v: v.to_local() if isinstance(v, DistTensor) else v, tree)


def _gather_full(tree: Any) -> Any:
    return tree_map(lambda v: v.full_tensor() if isinstance(v, DistTensor) else v, tree)


def _shard_like(saved: Any, current: Any) -> Any:
    """Cuts saved tensors to this rank's rows if the running model's are row-sharded."""

    def cut(value: Any, like: Any) -> Any:
        if isinstance(like, DistTensor):
            return DistTensor.wrap(value[like.rows.place], like.rows)
        return value

    return tree_map(cut, saved, current)
