"""race: of plans that are predicted to be about as fast, the one that is, by training each.

Plans within a quarter of the best one, four at most and as many as fit together, train ten to
24 epochs each, as many as ten seconds allow; the first three do not count. None does where an
epoch takes more than five seconds, where features are no float32 or float64, and where layers
are other than GCN and SAGE, one after the other.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm import mesh as grids
from pyg_distcomm.comm.axis import let_go
from pyg_distcomm.comm.mesh import Grid, Mesh
from pyg_distcomm.graph.partitioning import partition
from pyg_distcomm.nn.gcn_conv import DistGCNConv
from pyg_distcomm.nn.replicate import replicate
from pyg_distcomm.nn.sage_conv import DistSAGEConv
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.plans import Plan, Plans
from pyg_distcomm.plan.timing import once
from pyg_distcomm.plan.training import Training

NEAR = 1.25  # times the best plan's seconds; predictions err by less than as much
MOST = 4  # plans that are trained
LONGEST = 5.0  # seconds of an epoch, as planned, beyond which none is
WARM = 3  # epochs of each that do not count
LEAST, ROUNDS = 7, 21  # epochs of each that do, as many as
SPAN = 10.0  # seconds allow, as planned
UNSAID = 8 << 30  # bytes that they may use together, where nothing else is said
DTYPES = {4: torch.float32, 8: torch.float64}  # by bytes of a number
LAYERS: dict[str, Any] = {"gcn": DistGCNConv, "sage": DistSAGEConv}


def rivals(plans: Plans, training: Training, memory: float | None = None) -> list[Plan]:
    """Lists the plans that come near the best one, it first; it alone where none can be told.

    That is where layers are not plain GCN and SAGE layers that follow one another.

    Args:
        plans: all there are.
        training: what they train.
        memory: bytes a rank may use, for all of them together.
    """
    best = plans.best
    limit = memory or plans.machine.memory or UNSAID
    found: dict[tuple[Grid, int, float], Plan] = {}  # halos that send the same are one
    if best.stages > 1 or best.seconds > LONGEST or not _plain(training):
        return [best]
    for one in plans:
        near = one.exact and one.stages == 1 and one.seconds <= NEAR * best.seconds
        total = one.memory + sum(other.memory for other in found.values())
        key = one.grid, one.bytes, one.seconds
        if near and key not in found and total <= limit:
            found[key] = one
    return list(found.values())[:MOST] if best in found.values() else [best]


def _plain(training: Training) -> bool:
    """Whether a model of `_Model` multiplies what `training` does."""
    layers = training.layers
    pairs = itertools.pairwise(layers)
    follow = all(one.width_out == other.width_in for one, other in pairs)
    usual = (
        layer.kind in LAYERS
        and layer.trains
        and not (layer.against or layer.fresh)
        and layer.still in (None, i == 0)
        and layer.flows in (None, i > 0 or training.inputs == "trained")
        for i, layer in enumerate(layers)
    )
    known = not training.missing and training.itemsize in DTYPES
    return follow and known and all(usual)


def race(
    edge_index: Tensor,
    owners: Partition,
    plans: list[Plan],
    training: Training,
    how: dict[str, Any],
) -> Plan:
    """Returns the plan whose epochs are the shortest; collective.

    All train in turn, one epoch each, a GCN or GraphSAGE of as many features as `training`
    has; medians of the slowest rank count.

    Args:
        edge_index: of the whole graph.
        owners: who has which node.
        plans: two or more.
        training: plain, see `rivals`.
        how: arguments of `init` for their meshes, which end with the race.
    """
    layers = training.layers
    dtype = DTYPES[training.itemsize]
    x = torch.ones(1, layers[0].width_in, dtype=dtype).expand(owners.num_nodes, -1)
    y = torch.arange(owners.num_nodes) % layers[-1].width_out
    data = Data(x=x, y=y, edge_index=edge_index)
    runs = [_Run(data, owners, plan, training, how) for plan in plans]
    took: list[list[float]] = [[] for _ in plans]
    rounds = min(max(LEAST, int(SPAN / sum(plan.seconds for plan in plans))), ROUNDS)
    for _ in range(WARM + rounds):
        for run, seconds in zip(runs, took, strict=True):
            seconds.append(once(run.epoch, run.mesh))
    late = torch.tensor([seconds[WARM:] for seconds in took], dtype=torch.float64)
    every = collectives.all_reduce(late, runs[0].mesh.world, "max")
    fastest = plans[int(every.median(dim=1).values.argmin())]
    for run in runs:
        run.end()
    return fastest


class _Run:
    """A plan that trains."""

    def __init__(
        self,
        data: Data,
        owners: Partition,
        plan: Plan,
        training: Training,
        how: dict[str, Any],
    ) -> None:
        self.mesh: Mesh = grids.init(grid=plan.grid, **how)
        self.mesh.plan, self.mesh.owners = plan, owners
        self._share = partition(data, self.mesh).to(self.mesh.device)
        self._share.x.requires_grad_(training.wants_gradient(0))
        self._changing = training.inputs == "changing"
        with torch.random.fork_rng(
            devices=[]
        ):  # the script's own draws stay as they are
            model = _Model(training).to(self.mesh.device, data.x.dtype)  # type: ignore[union-attr]
        self._model = replicate(model, self.mesh)
        self._optimizer = torch.optim.Adam(self._model.parameters())

    def epoch(self) -> None:
        """Trains once on all nodes."""
        self._optimizer.zero_grad()
        x = self._share.x.clone() if self._changing else self._share.x
        out = self._model(x, self._share.edge_index)
        torch.nn.functional.cross_entropy(out, self._share.y).backward()
        self._optimizer.step()

    def end(self) -> None:
        """Lets the process groups go."""
        collectives.barrier(self.mesh.world)
        del self._model, self._optimizer, self._share
        axes = (
            self.mesh.world,
            self.mesh.data,
            *(getattr(self.mesh, a) for a in grids.AXES),
        )
        let_go(axes)


class _Model(torch.nn.Module):
    """Layers as a plan has them."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(
            LAYERS[one.kind](int(one.width_in), int(one.width_out))
            for one in training.layers
        )

    def forward(self, x: Any, edge_index: Any) -> Any:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
        return self.convs[-1](x, edge_index)
