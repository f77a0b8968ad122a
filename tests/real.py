"""Real graphs from ../shared/data as plain Data files, prepared once per test session."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch_geometric.data import Data

SHARED = Path(__file__).parents[2] / "shared" / "data"


@cache
def path(name):
    """The path of a .pt file with x, y, edge_index and masks of a real graph."""
    folder = Path(tempfile.mkdtemp(prefix="pyg_distcomm_real_"))
    data = _load(name, folder)
    keep = Data(x=data.x, y=data.y, edge_index=data.edge_index)
    g = torch.Generator().manual_seed(0)
    draw = torch.rand(data.num_nodes, generator=g)
    for mask, low, high in (("train", 0, 0.3), ("val", 0.3, 0.5), ("test", 0.5, 1.1)):
        given = data.get(f"{mask}_mask")
        made = (draw >= low) & (draw < high)
        keep[f"{mask}_mask"] = given if given is not None and given.dim() == 1 else made
    torch.save(keep.to_dict(), folder / f"{name}.pt")
    return str(folder / f"{name}.pt")


def _load(name, folder):
    from torch_geometric import datasets

    room, make = {
        "Cora": ("planetoid", lambda r: datasets.Planetoid(r, "Cora")),
        "CiteSeer": ("planetoid", lambda r: datasets.Planetoid(r, "CiteSeer")),
        "Computers": ("amazon", lambda r: datasets.Amazon(r, "Computers")),
        "CS": ("coauthor", lambda r: datasets.Coauthor(r, "CS")),
        "tolokers": (
            "heterophilous",
            lambda r: datasets.HeterophilousGraphDataset(r, "tolokers"),
        ),
    }[name]
    shutil.copytree(SHARED / room, folder / room)
    return make(str(folder / room))[0]


def read(file, dtype=torch.float64):
    data = Data(**torch.load(file, weights_only=True))
    data.x = data.x.to(dtype)
    return data
