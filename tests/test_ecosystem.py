"""Scripts of examples/ecosystem train as plain loops do, on one process and on two ranks."""

from __future__ import annotations

import argparse
import os
import runpy
from pathlib import Path

import pytest
import tiers
import torch
import worlds
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm.datasets import (
    load_node_data,
    node_loss,
    node_score,
    num_outputs,
)

pytestmark = pytest.mark.usefixtures("place")

ECOSYSTEM = Path(__file__).parents[1] / "examples" / "ecosystem"
ARGS = {"dataset": "generated-300", "epochs": 3, "batch_size": 32}


def plainly(epochs):
    """The losses of PyG on one process."""
    data = load_node_data(ARGS["dataset"])
    torch.manual_seed(0)
    model = GraphSAGE(data.num_features, 32, 2, num_outputs(data.y))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(epochs):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = node_loss(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    out = model(data.x, data.edge_index)
    return losses, {
        m: node_score(out[data[m]], data.y[data[m]]) for m in ("val_mask", "test_mask")
    }


def _lightning(minibatches):
    run = runpy.run_path(str(ECOSYSTEM / "lightning_training.py"))
    model, score = run["fit"](argparse.Namespace(minibatches=minibatches, **ARGS))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return model.losses, score, model.seeds, weights


def _accelerate(minibatches):
    run = runpy.run_path(str(ECOSYSTEM / "accelerate_training.py"))
    return run["fit"](argparse.Namespace(minibatches=minibatches, **ARGS))


def on_ranks(function, ranks, minibatches):
    return worlds.run(_launched, ranks, function.__name__, minibatches)


def _launched(name, minibatches):
    """Runs under the environment that torchrun gives."""
    import torch.distributed as dist

    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        told |= {"GROUP_RANK": 0, "LOCAL_WORLD_SIZE": size, "TORCHELASTIC_RUN_ID": "x"}
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
        os.environ.update({key: str(value) for key, value in told.items()})
    return globals()[name](minibatches)


@tiers.rare
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_on_the_whole_graph_is_the_plain_loop(ranks):
    pytest.importorskip("lightning", reason="pip install 'pyg-distcomm[lightning]'")
    want, scores = plainly(3)
    for losses, score, seeds, _ in on_ranks(_lightning, ranks, False):
        assert losses == pytest.approx(want, rel=1e-4)
        assert seeds == []
        assert score == pytest.approx(scores["val_mask"]) or score != score  # on rank 0


@tiers.rare
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_takes_each_seed_once_in_an_epoch(ranks):
    pytest.importorskip("lightning", reason="pip install 'pyg-distcomm[lightning]'")
    found = on_ranks(_lightning, ranks, True)
    train = load_node_data(ARGS["dataset"]).train_mask.nonzero().view(-1)
    seeds = sorted(seed for one in found for seed in one[2])
    assert seeds == sorted([*range(len(train))] * 3) or seeds == sorted(
        train.tolist() * 3
    )
    assert all(torch.equal(one[3], found[0][3]) for one in found)  # one model


@pytest.mark.parametrize("ranks", [tiers.rarely(1), 2])
def test_accelerate_on_the_whole_graph_is_the_plain_loop(ranks):
    pytest.importorskip("accelerate", reason="pip install accelerate")
    want, scores = plainly(3)
    for losses, score in on_ranks(_accelerate, ranks, False):
        assert losses == pytest.approx(want, rel=1e-4)
        assert score == pytest.approx(scores["test_mask"], abs=0.02)


@tiers.rare
@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_learns_from_minibatches(ranks):
    pytest.importorskip("accelerate", reason="pip install accelerate")
    found = on_ranks(_accelerate, ranks, True)
    assert {score for _, score in found} == {found[0][1]}
    assert len({len(losses) for losses, _ in found}) == 1
    assert found[0][1] > 0.3  # eight classes


def _measured(_):
    run = runpy.run_path(str(ECOSYSTEM / "metrics_and_profile.py"))
    whole = load_node_data(ARGS["dataset"])
    whole.test_mask[150:] = False
    owner = (torch.arange(300) >= 150).long()  # rank 1 has no test nodes
    share = pdc.partition(whole, worlds.mesh(), owner)
    torch.manual_seed(0)
    model = pdc.convert(GraphSAGE(share.num_features, 32, 2, num_outputs(share.y)))
    single = run["measure"](model, pdc.partition(whole, worlds.mesh(), "random"), "")
    return run["measure"](model, share, "ogbn-arxiv"), single


@pytest.mark.exhaustive
def test_torchmetrics_adds_up_each_ranks_rows_once():
    metrics = pytest.importorskip("sklearn.metrics")
    pytest.importorskip("torchmetrics", reason="pip install torchmetrics")
    pytest.importorskip("ogb", reason="pip install 'pyg-distcomm[ogb]'")
    whole = load_node_data(ARGS["dataset"])
    whole.test_mask[150:] = False
    torch.manual_seed(0)
    model = GraphSAGE(whole.num_features, 32, 2, num_outputs(whole.y))
    out = model(whole.x, whole.edge_index)[whole.test_mask].detach()
    y = whole.y[whole.test_mask].numpy()
    want = {
        "accuracy": metrics.accuracy_score(y, out.argmax(-1)),
        "macro F1": metrics.f1_score(y, out.argmax(-1), average="macro"),
        "AUROC": metrics.roc_auc_score(
            y, out.softmax(-1).double().numpy(), multi_class="ovr"
        )
        if len(set(y.tolist())) == out.shape[1]
        else None,
    }
    for found, again in on_ranks(_measured, 2, False):
        for name, value in want.items():
            if value is not None:
                assert found[name] == pytest.approx(value, rel=1e-4), name
                assert again[name] == pytest.approx(value, rel=1e-4), name
        assert found["node_score"] == pytest.approx(want["accuracy"], rel=1e-4)
        assert found["OGB's Evaluator"] == pytest.approx(want["accuracy"], rel=1e-4)


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_profile_names_our_operations(tmp_path, ranks):
    pytest.importorskip("torchmetrics", reason="pip install torchmetrics")
    flags = ("--epochs", "2", "--trace", "profile")  # of nodes of all classes
    shown = worlds.script(ECOSYSTEM / "metrics_and_profile.py", ranks, tmp_path, *flags)
    assert "node_score" in shown
    for rank in range(ranks):
        trace = (tmp_path / f"profile.{rank}.json").read_text()
        assert "pyg_distcomm: " in trace


@pytest.mark.parametrize(
    "path", sorted(ECOSYSTEM.glob("*.py")), ids=lambda path: path.stem
)
def test_a_script_says_how_it_is_started(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 120
    assert lines[0] == f"# torchrun --nproc-per-node 2 examples/ecosystem/{path.name}"
