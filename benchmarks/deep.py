"""Deep models, and the ways to train them that `pipeline.py` compares."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import spmm as bench
import torch
import torch.nn.functional as F
from communities import load
from sklearn.metrics import roc_auc_score
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import DeepGCNLayer, GCN2Conv, GCNConv, Sequential, SGConv
from torch_geometric.transforms import RandomNodeSplit

import pyg_distcomm as pdc
from pyg_distcomm.pipeline.pipeline import hybrid_words

FEATURES, CLASSES = 128, 16  # of an R-MAT graph; others have at most so many
BASES = "1D, random", "1D, METIS"


@dataclass(frozen=True)
class Direction:
    """One way to train.

    Args:
        name: as the tables call it.
        stages: of layers; with 1, graph parallelism by `pdc.replicate`.
        cutter: of nodes, within a stage.
        planned: on the grid that the planner takes.
        one_bit: halos in one bit, one epoch late.
    """

    name: str
    stages: int = 1
    cutter: str = "metis"
    planned: bool = False
    one_bit: bool = False


@dataclass(frozen=True)
class Case:
    """What is trained, on how many ranks."""

    graph: str
    model: str
    depth: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.graph}, {self.model}, {self.depth} layers, {self.ranks} ranks"


def ways(size: int) -> list[Direction]:
    """Lists the ways that so many ranks can train."""
    found = [Direction(BASES[0], cutter="random"), Direction(BASES[1])]
    found.append(Direction("best grid", planned=True))
    found.append(Direction("pipeline", size))
    if size % 2 == 0 and size > 2:
        found.append(Direction("hybrid, random", size // 2, "random"))
        found.append(Direction("hybrid, METIS", size // 2))
    found.append(Direction("1D, METIS, one bit", one_bit=True))
    if size % 2 == 0 and size > 2:
        half = size // 2
        found.append(Direction("hybrid, random, one bit", half, "random", one_bit=True))
        found.append(Direction("hybrid, METIS, one bit", half, one_bit=True))
    return found


# Graphs and models ------------------------------------------------------------------


def graph(name: str, root: str, degree: int, seed: int = 0) -> Data:
    """Returns an R-MAT graph ("rmat-13") with random features, or a data set by name.

    Labels of an R-MAT graph are those that a random layer gives to features averaged over
    two hops. Wide features are projected on principal directions, so that eight ranks hold
    them.
    """
    if name.startswith("rmat-"):
        row, col, n = bench.rmat(int(name[5:]), degree // 2)
        rng = torch.Generator().manual_seed(seed)
        data = Data(edge_index=torch.stack([row, col]))
        data.x = torch.randn(n, FEATURES, generator=rng)
        torch.manual_seed(seed)
        with torch.no_grad():
            teacher = SGConv(FEATURES, CLASSES, K=2)
            data.y = teacher(data.x, data.edge_index).argmax(-1)
    else:
        data = load(name, root)
        if data.x.size(1) > FEATURES:
            torch.manual_seed(0)
            _, _, v = torch.pca_lowrank(data.x, FEATURES, center=False)
            data.x = data.x @ v
    masks = "train_mask", "val_mask", "test_mask"
    if "train_mask" not in data:
        torch.manual_seed(seed)
        data = RandomNodeSplit(num_val=0.2, num_test=0.2)(data)
    for mask in masks:  # some sets come with several splits
        if data[mask].dim() == 2:
            data[mask] = data[mask][:, seed % data[mask].size(1)].contiguous()
    kept = {name: data[name] for name in ("x", "y", "edge_index", *masks)}
    return Data(**kept)


def stack_of(model: str, data: Data, args: argparse.Namespace, depth: int) -> Any:
    """Makes an ordinary model of PyG."""
    d, drop = args.width, args.dropout if args.accuracy else 0.0
    layers: list[Any] = [(nn.Linear(data.num_features, d), "x -> x")]
    layers += [(nn.ReLU(), "x -> x")]
    names = "x, edge_index -> x"
    if model == "gcnii":  # x_0 goes along to all layers
        layers += [(nn.Identity(), "x -> x_0")]
        names = "x, x_0, edge_index -> x"
    for k in range(1, depth + 1):
        if model == "resgcn":
            inner = GCNConv(d, d), nn.LayerNorm(d), nn.ReLU()
            layers += [(DeepGCNLayer(*inner, block="res+", dropout=drop), names)]
            continue
        if drop:
            layers += [(nn.Dropout(drop), "x -> x")]
        conv = GCN2Conv(d, 0.1, 0.5, k) if model == "gcnii" else GCNConv(d, d)
        layers += [(conv, names), (nn.ReLU(), "x -> x")]
    layers += [(nn.Linear(d, int(data.y.max()) + 1), "x -> x")]
    return Sequential("x, edge_index", layers)


def loss_of(out: Any, data: Any) -> Any:
    return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])


def whole(x: Any) -> torch.Tensor:
    """Returns all rows of a tensor, of a row-sharded one, too."""
    rows: torch.Tensor = x.full_tensor() if isinstance(x, pdc.DistTensor) else x
    return rows


def scores(out: Any, data: Any, auc: bool) -> tuple[float, float]:
    """Returns accuracy, or the area under the ROC of class 1, on validation and test nodes."""
    if auc:
        margin, y = whole(out[:, 1] - out[:, 0]), whole(data.y)
        masks = whole(data.val_mask), whole(data.test_mask)
        one, two = (roc_auc_score(y[mask], margin[mask]) for mask in masks)
        return float(one), float(two)
    hit = out.argmax(-1) == data.y
    return float(hit[data.val_mask].float().mean()), float(
        hit[data.test_mask].float().mean()
    )


# Trainers ---------------------------------------------------------------------------


@dataclass
class Trainer:
    """One way, built on this rank.

    Args:
        mesh: its ranks.
        epoch: trains one, and returns the loss.
        test: returns the score on validation and test nodes.
        formula: bytes of an epoch, of all ranks; None where there is no formula.
        note: what the table says beside it.
    """

    mesh: pdc.Mesh
    epoch: Callable[[], float]
    test: Callable[[], tuple[float, float]]
    formula: float | None
    note: str


def built(
    way: Direction, case: Case, data: Data, args: argparse.Namespace, seed: int = 0
) -> Trainer:
    """Builds one way to train; collective."""
    d, link = args.width, pdc.Sylvie() if way.one_bit else None
    if way.planned:
        widths = [d] * (case.depth + 1)
        mesh = pdc.init(pdc.Auto(data, widths, inputs="trained"), seed=seed)
        share = pdc.partition(data, mesh)
    else:
        mesh = pdc.init(stages=way.stages, seed=seed)
        options: Any = {} if link is None else {"link": link}
        share = pdc.partition(data, mesh, way.cutter, **options)
    torch.manual_seed(seed)
    model = stack_of(case.model, data, args, case.depth)
    weights = sum(p.numel() + 1 for p in model.parameters())
    halo, n = sum(pdc.partition_report(share).halo_rows), int(data.num_nodes or 0)
    formula = 4 * hybrid_words(
        *(n, d, way.stages, mesh.size),
        layers=case.depth,
        replication=halo / n,
        weights=weights,
        shared=int(case.model == "gcnii"),
    )
    make = _pipeline if way.stages > 1 else _replicated
    epoch, test = make(model, mesh, share, link, args)
    if way.planned:
        return Trainer(mesh, epoch, test, None, " x ".join(map(str, mesh.grid)))
    known = None if way.one_bit else formula
    return Trainer(mesh, epoch, test, known, f"alpha {halo / n:.2f}")


def _replicated(
    model: Any, mesh: pdc.Mesh, share: Any, link: Any, args: argparse.Namespace
) -> tuple[Callable, Callable]:
    net = pdc.replicate(pdc.convert(model), mesh)
    opt = torch.optim.Adam(net.parameters(), args.lr)

    def epoch() -> float:
        net.train()
        opt.zero_grad()
        loss = loss_of(net(share.x, share.edge_index), share)
        loss.backward()
        opt.step()
        if link is not None:
            link.step()
        return float(loss.detach())

    def test() -> tuple[float, float]:
        net.eval()
        with torch.no_grad():
            return scores(net(share.x, share.edge_index), share, args.auc)

    return epoch, test


def _pipeline(
    model: Any, mesh: pdc.Mesh, share: Any, link: Any, args: argparse.Namespace
) -> tuple[Callable, Callable]:
    pipe = pdc.Pipeline(
        model,
        mesh,
        chunks=args.chunks * mesh.stage.size,
        order=args.order,
        history_refresh=args.refresh,
        gradient=args.gradient,
    )
    opt = torch.optim.Adam(pipe.parameters(), args.lr)

    def epoch() -> float:
        pipe.train()
        opt.zero_grad()
        loss = pipe.train_step(share, loss_of)
        opt.step()
        if link is not None:
            link.step()
        return float(loss)

    def test() -> tuple[float, float]:
        metric = partial(scores, auc=args.auc)
        return pipe.eval_step(share, metric)  # type: ignore[no-any-return]

    return epoch, test
