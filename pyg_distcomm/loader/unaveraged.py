"""Raises where ranks train on minibatches of their own, and nothing averages what they learn.

[Note: unaveraged training] Ordinary tensors do not tell which rank's batch they came from, so
a missing average shows where optimizers step. While a loader deals out an epoch, each step
leaves a summary of its gradients. As a rank requests a batch after 1, 2, 4, ... others of the
loader, and at the end of an epoch, it posts a note: for each optimizer that has stepped since,
that summary, and a hash of the parameters. A rank whose optimizers have not been found to
average waits for the notes of the others; the rest only post, so that a rank which trains
something alone waits for nobody's step. Then, of each optimizer that has stepped on all ranks,

    equal gradients                   were averaged, by whatever means: no further comparison
    equal parameters, that changed    were averaged after the step: no further comparison
    equal parameters, as before       say nothing, as a learning rate of 0: compared later
    neither                           each rank trains another model: a ValueError on all

Gradients may differ by rounding, as of a sum in another order on each rank; parameters may
not. Rows of a `DistEmbedding`, and parts of parameters (DTensor, FSDP), are left out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from pyg_distcomm.comm.consistency import differing, digest, projection
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.random import fold
from pyg_distcomm.loader.batch_sharding import Notes
from pyg_distcomm.process import PROCESS

_ADVICE = (
    "All ranks take the batches of a loader that shares them out; a rank that stops early "
    "leaves the others waiting"
)


@dataclass(eq=False)
class OptimizerRecord:
    """Holds what is known of one optimizer.

    Args:
        gradients: the summary of those of its last step since a comparison; None if none.
        parameters: their hash at the last comparison.
        averaged: whether its steps were found to be averaged.
    """

    gradients: tuple[float, float] | None = None
    parameters: int | None = None
    averaged: bool = False


class StepComparer:
    """Compares, at some requests of one loader, what the ranks' optimizers have stepped by.

    Args:
        notes: the notes of the loader.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._count = self._compared = 0
        if not PROCESS.watches_steps:
            register_optimizer_step_post_hook(_record)
            PROCESS.watches_steps = True

    def before_batch(self) -> None:
        """Compares the steps so far, if 1, 2, 4, ... batches were yielded."""
        if self._count & (self._count - 1) == 0:
            self._compare()

    def yielded(self) -> None:
        """Counts a batch, on which optimizers may step."""
        self._count += 1
        PROCESS.dealing.add(self)

    def at_end(self) -> None:
        """Compares the steps of an epoch that has ended."""
        self._compare()
        PROCESS.dealing.discard(self)

    def _compare(self) -> None:
        if self._count == self._compared:
            return
        self._compared = self._count
        stepped = _stepped()
        mine = {
            key: (*record.gradients, fold(*map(digest, copies)))
            for key, (record, copies) in stepped.items()
            if record.gradients is not None
        }
        notes = self._notes.at(f"steps/{self._count}")
        notes.post(mine)
        if not mine:
            return
        every = notes.collect("compare its steps", _ADVICE)
        for key, (record, copies) in stepped.items():
            record.gradients = None
            rows = [note[key] for note in every if key in note]
            if len(rows) == len(every):
                self._conclude(key, record, copies, rows)

    def _conclude(
        self, key: str, record: OptimizerRecord, copies: list[Any], rows: list[Any]
    ) -> None:
        """Concludes from the notes of all ranks whether an optimizer's steps are averaged."""
        kinds = {p.dtype for p in copies}
        gradients = [(along, size) for along, size, _ in rows]
        differ = differing(gradients, kinds)
        before, record.parameters = record.parameters, rows[0][2]
        if not differ:
            record.averaged = any(size for _, size in gradients)
        elif all(row[2] == rows[0][2] for row in rows):
            record.averaged = before not in (None, record.parameters)
        else:
            raise ValueError(
                "average the gradients by model = pdc.replicate(model, mesh), after the model "
                f"is made: ranks {differ} and rank 0 have stepped by other gradients "
                f"({key.split()[0]}, {len(copies)} parameters) on their batches of "
                f"{self._notes.name}, and have other parameters since, so that each rank "
                "trains another model. torch's DistributedDataParallel, accelerate, Lightning "
                "or an all_reduce of the script's own do as well; where parameters are to "
                'differ for a while, pdc.init(check="never") leaves this comparison out'
            )


def _record(optimizer: Any, *_: Any) -> None:
    """Records the gradients of a step, while a loader deals out an epoch to ranks."""
    if not PROCESS.dealing or torch.compiler.is_compiling():
        return
    record = PROCESS.steps.setdefault(optimizer, OptimizerRecord())
    if record.averaged:
        return
    copies = _copies(optimizer)
    if any(p.is_cuda for p in copies) and torch.cuda.is_current_stream_capturing():
        return
    record.gradients = projection([p.grad for p in copies if p.grad is not None])


def _copies(optimizer: Any) -> list[Any]:
    """Returns the parameters of an optimizer of which every rank should hold a copy."""
    return [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if type(p) is torch.nn.Parameter
        and not hasattr(p, "is_shard")
        and not hasattr(p, "_fsdp_flattened")
    ]


def _stepped() -> dict[str, tuple[OptimizerRecord, list[Any]]]:
    """Returns optimizers that have stepped since a comparison, by names equal on all ranks.

    Without those whose parameters are among another's, as of ZeroRedundancyOptimizer.
    """
    found = [
        (optimizer, record, _copies(optimizer))
        for optimizer, record in list(PROCESS.steps.items())
        if record.gradients is not None
    ]
    held = [set(map(id, copies)) for _, _, copies in found]
    names: Counter[str] = Counter()
    stepped = {}
    for own, (optimizer, record, copies) in zip(held, found, strict=True):
        if not own or any(own < other for other in held):
            record.gradients = None
            continue
        shapes = repr([(tuple(p.shape), p.dtype) for p in copies]).encode()
        shape = hashlib.blake2b(shapes, digest_size=8).hexdigest()
        name = f"{type(optimizer).__name__} {shape}"
        names[name] += 1
        stepped[f"{name} {names[name]}"] = record, copies
    return stepped


def step_comparer(notes: Notes, mesh: Mesh | None) -> StepComparer | None:
    """Returns the StepComparer of a loader; None where ranks are not to be compared."""
    if mesh is not None and (mesh.check == "never" or mesh.stage.size > 1):
        return None
    return StepComparer(notes)
