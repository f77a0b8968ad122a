"""Loaders that sample by PyG's own compiled libraries, where these are installed."""

from __future__ import annotations

from itertools import product

import batches
import pytest
import torch
import torch_geometric.typing as installed
import worlds

import pyg_distcomm as pdc
from pyg_distcomm.loader import DistLinkNeighborLoader, DistNeighborLoader

WRITES = ("author", "writes", "paper")
FOUND = {
    "pyg-lib": installed.WITH_PYG_LIB,
    "torch-sparse": installed.WITH_TORCH_SPARSE,
}


def _weighted():
    data = batches.graph()
    data.weight = data.edge_attr[:, 0].abs()
    return data


CASES = {
    "uniform": lambda **kw: DistNeighborLoader(batches.graph(), [3, 2], **kw),
    "replace": lambda **kw: DistNeighborLoader(
        batches.graph(), [3, 2], replace=True, **kw
    ),
    "repeats": lambda **kw: DistNeighborLoader(
        batches.graph(), [3, 2], input_nodes=torch.tensor([1, 1, 9, 2, 9, 59, 3]), **kw
    ),
    "weights": lambda **kw: DistNeighborLoader(
        _weighted(), [3, 2], weight_attr="weight", **kw
    ),
    "disjoint": lambda **kw: DistNeighborLoader(
        batches.graph(), [3, 2], disjoint=True, **kw
    ),
    "types": lambda **kw: DistNeighborLoader(
        batches.hetero(), [3, 2], input_nodes=("paper", torch.arange(20)), **kw
    ),
    "links": lambda **kw: DistLinkNeighborLoader(
        batches.graph(), [2], edge_label_index=batches.graph().edge_index[:, :30], **kw
    ),
}


REFUSED = [("torch-sparse", "weights"), ("torch-sparse", "disjoint")]  # see below


@pytest.mark.parametrize(
    ("backend", "case"), [p for p in product(FOUND, CASES) if p not in REFUSED]
)
def test_minibatches_are_neighbourhoods(backend, case):
    if not FOUND[backend]:
        pytest.skip(f"{backend} is not installed")
    with pytest.warns(UserWarning, match="generator of its own"):
        loader = CASES[case](backend=backend, batch_size=7)
    ours = CASES[case](batch_size=7)
    found = list(loader)
    assert len(found) == len(ours)
    for batch in found:
        stores = [(batch, batch)]
        data = batches.graph()
        if case == "types":
            data = batches.hetero()
            stores = [(batch[t], batch[t[0]]) for t in batch.edge_types]
        for edges, nodes in stores:
            whole = data if case != "types" else data[edges._key]
            rows = data if case != "types" else data[nodes._key]
            last = batch if case != "types" else batch[edges._key[2]]
            ends = torch.stack(
                [nodes.n_id[edges.edge_index[0]], last.n_id[edges.edge_index[1]]]
            )
            assert torch.equal(ends, whole.edge_index[:, edges.e_id])
            assert torch.equal(nodes.x, rows.x[nodes.n_id])


def _spread():
    share = pdc.partition(batches.graph(), worlds.mesh(), "block")
    with pytest.raises(ValueError, match="one is partitioned; leave it out"):
        DistNeighborLoader(share, [2], backend="pyg-lib")


def test_what_cannot_be_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"'pyg-lib', 'torch-sparse' or None"):
        DistNeighborLoader(batches.graph(), [2], backend="dgl")
    with pytest.raises(ValueError, match="leave one out"):
        DistNeighborLoader(
            batches.graph(), [2], backend="pyg-lib", neighbor_sampler=object()
        )
    monkeypatch.setattr(installed, "WITH_PYG_LIB", True)
    monkeypatch.setattr(installed, "WITH_TORCH_SPARSE", True)
    for backend, options, wrong in [
        ("torch-sparse", {"weight_attr": "weight"}, "draws neighbors uniformly"),
        ("torch-sparse", {"disjoint": True}, "torch-sparse does not support"),
        ("torch-sparse", {"time_attr": "time"}, "torch-sparse does not support"),
        ("pyg-lib", {"subgraph_type": "induced"}, "pyg-lib does not support"),
        ("pyg-lib", {"directed": False}, "pyg-lib does not support"),
    ]:
        with (
            pytest.warns(UserWarning, match="generator of its own"),
            pytest.raises(ValueError, match=wrong),
        ):
            DistNeighborLoader(batches.graph(), [2], backend=backend, **options)
    for name in ("WITH_PYG_LIB", "WITH_TORCH_SPARSE"):
        monkeypatch.setattr(installed, name, False)
    for backend in FOUND:
        with pytest.raises(ValueError, match=f"the package {backend}"):
            DistNeighborLoader(batches.graph(), [2], backend=backend)
    worlds.run(_spread, 2)


@pytest.mark.filterwarnings("ignore:pyg-lib draws from a generator")
def test_a_state_is_refused_by_what_differs(monkeypatch):
    monkeypatch.setattr(installed, "WITH_PYG_LIB", True)
    state = DistNeighborLoader(batches.graph(), [2], backend="pyg-lib").state_dict()
    DistNeighborLoader(batches.graph(), [2], backend="pyg-lib").load_state_dict(state)
    for fan_outs, backend, name in [
        ([3], "pyg-lib", "num_neighbors"),
        ([2], None, "backend"),
    ]:
        other = DistNeighborLoader(batches.graph(), fan_outs, backend=backend)
        with pytest.raises(ValueError, match=f"of a loader with {name}="):
            other.load_state_dict(state)
