"""Scripts of examples/ecosystem train as plain loops do, on one process and on two ranks."""

import os
import pickle
import re
import sys
from pathlib import Path

import pytest
import tiers
import torch
from test_examples import shown_by, torchrun
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from graphs import load_node_data, node_loss, num_outputs

pytestmark = pytest.mark.usefixtures("place")

ECOSYSTEM = Path(__file__).parents[1] / "examples" / "ecosystem"
FLAGS = ("--dataset", "generated-300", "--epochs", "3")


def plainly(epochs):
    """The losses of PyG on one process."""
    data = load_node_data("generated-300")
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
    return losses


def python(path, *flags):
    return shown_by(sys.executable, path, *flags, PYTHONPATH=os.pathsep.join(sys.path))


@tiers.rare
@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("needs", "name", "start", "flags"),
    [
        ("lightning", "lightning_training", torchrun, ()),
        ("lightning", "lightning_training", python, ("--devices", "2")),
        ("accelerate", "accelerate_training", torchrun, ()),
        ("accelerate", "accelerate_training", torchrun, ("--accelerator-first",)),
        ("ray.train", "ray_training", python, ()),
    ],
)
def test_trainers_on_the_whole_graph_are_the_plain_loop(needs, name, start, flags):
    """Whoever starts the ranks, and whoever makes their process group."""
    pytest.importorskip(needs, reason="pip install 'pyg-distcomm[ecosystem]' ray")
    shown = start(ECOSYSTEM / f"{name}.py", *FLAGS, *flags)
    (loss,) = re.findall(r"generated-300: loss (?:[\d.]+ to )?([\d.]+),", shown)
    assert float(loss) == pytest.approx(plainly(3)[-1], abs=1e-4)


@tiers.rare
@pytest.mark.subprocess
def test_the_profile_names_our_operations(tmp_path):
    pytest.importorskip("torchmetrics", reason="pip install torchmetrics")
    script, flags = ECOSYSTEM / "metrics_and_profile.py", ("--trace", "profile")
    assert "node_score" in torchrun(script, *FLAGS, *flags, folder=tmp_path)
    for rank in range(2):
        assert "pyg_distcomm: " in (tmp_path / f"profile.{rank}.json").read_text()


def test_the_package_is_pickled_by_its_name():
    """Ray, submitit and others pickle the modules that a user's function uses."""
    assert pickle.loads(pickle.dumps(pdc)) is pdc


@tiers.rare
@pytest.mark.subprocess
def test_parts_and_checkpoints_lie_in_an_object_store(tmp_path):
    pytest.importorskip("fsspec")
    url = f"file://{tmp_path}/run"
    losses = plainly(3)
    for epochs in (2, 3):  # the second run goes on where the first one ended
        flags = (*FLAGS, "--url", url, "--epochs", epochs)  # the last of two wins
        shown = torchrun(ECOSYSTEM / "object_store.py", *flags)
        (loss,) = re.findall(r": loss ([\d.]+)", shown)
        assert float(loss) == pytest.approx(losses[epochs - 1], abs=1e-4)


@pytest.mark.parametrize(
    "path", sorted(ECOSYSTEM.glob("*.py")), ids=lambda path: path.stem
)
def test_a_script_says_how_it_is_started(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 140
    starts = ("torchrun --nproc-per-node 2", "python")
    assert lines[0] in [f"# {one} examples/ecosystem/{path.name}" for one in starts]
