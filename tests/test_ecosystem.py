"""Scripts of examples/ecosystem train as plain loops do, on one process and on two ranks."""

import argparse
import os
import pickle
import re
import runpy
import sys
from pathlib import Path

import pytest
import tiers
import torch
import worlds
from test_examples import shown_by, torchrun
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from graphs import load_node_data, node_loss, node_score, num_outputs

pytestmark = pytest.mark.usefixtures("place")

ECOSYSTEM = Path(__file__).parents[1] / "examples" / "ecosystem"
ARGS = {"dataset": "generated-300", "epochs": 3, "batch_size": 32}
FLAGS = ("--dataset", "generated-300", "--epochs", "3")


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
    out, masks = model(data.x, data.edge_index), ("val_mask", "test_mask")
    return losses, {m: node_score(out[data[m]], data.y[data[m]]) for m in masks}


def _lightning():
    run = runpy.run_path(str(ECOSYSTEM / "lightning_training.py"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    flags = {"minibatches": False, "devices": ranks}
    model, score = run["fit"](argparse.Namespace(**flags, **ARGS))
    return model.losses, score, model.seeds


def first_and_last(shown):
    """Checks the losses that a script printed."""
    found = re.search(r"loss ([\d.]+) to ([\d.]+)", shown)
    losses, _ = plainly(3)
    assert [*map(float, found.groups())] == pytest.approx(losses[::2], abs=1e-4)


@tiers.rare
@pytest.mark.subprocess
def test_plain_python_lets_lightning_start_the_ranks():
    pytest.importorskip("lightning", reason="pip install 'pyg-distcomm[lightning]'")
    path = ECOSYSTEM / "lightning_training.py"
    first_and_last(shown_by(sys.executable, path, "--devices", "2", *FLAGS))


def test_the_package_is_pickled_by_its_name():
    """Ray, submitit and others pickle the modules that a user's function uses."""
    assert pickle.loads(pickle.dumps(pdc)) is pdc


@tiers.rare
@pytest.mark.subprocess
def test_parts_and_checkpoints_lie_in_an_object_store(tmp_path):
    pytest.importorskip("fsspec")
    url = f"file://{tmp_path}/run"
    losses, _ = plainly(3)
    for epochs in (2, 3):  # the second run goes on where the first one ended
        flags = (*FLAGS, "--url", url, "--epochs", epochs)  # the last of two wins
        shown = torchrun(ECOSYSTEM / "object_store.py", *flags)
        (loss,) = re.findall(r": loss ([\d.]+)", shown)
        assert float(loss) == pytest.approx(losses[epochs - 1], abs=1e-4)


def _launched():
    """Runs under the environment that torchrun gives."""
    import torch.distributed as dist

    if dist.is_initialized():
        told = {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "29500"}
        os.environ.update(told)
    return _lightning()


@tiers.parametrize("ranks", [1, 2], [])
def test_lightning_on_the_whole_graph_is_the_plain_loop(ranks):
    pytest.importorskip("lightning", reason="pip install 'pyg-distcomm[lightning]'")
    want, scores = plainly(3)
    for losses, score, seeds in worlds.run(_launched, ranks):
        assert losses == pytest.approx(want, rel=1e-4)
        assert seeds == []
        assert score == pytest.approx(scores["val_mask"]) or score != score  # on rank 0


@pytest.mark.parametrize(
    "path", sorted(ECOSYSTEM.glob("*.py")), ids=lambda path: path.stem
)
def test_a_script_says_how_it_is_started(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 140
    starts = ("torchrun --nproc-per-node 2", "python")
    assert lines[0] in [f"# {one} examples/ecosystem/{path.name}" for one in starts]
