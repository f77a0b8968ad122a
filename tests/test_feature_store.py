"""The feature store: rows by id, wherever they are, and what they cost."""

from __future__ import annotations

import pytest
import torch
import worlds
from problems import GRAPHS, owners

import pyg_distcomm as pdc
from pyg_distcomm import wire
from pyg_distcomm.channel import open_channel
from pyg_distcomm.loader.feature_store import EDGES, DistFeatureStore

SIZES = (1, 2, 3, 4)
WORLDS = [(p, c) for p in SIZES for c in range(1, p + 1) if p % c == 0]
_CHANNELS = {}


def channel(c):
    """The channel of this world with replication c, kept, with a clean ledger."""
    mesh = worlds.mesh()
    if c not in _CHANNELS:
        _CHANNELS[c] = open_channel(mesh, c)
    return _CHANNELS[c]


def random_ids(rank, count, total, seed=0):
    g = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, total, (count,), generator=g)


def _graph(graph, cutter, c):
    road = channel(c)
    data = GRAPHS[graph]()
    share = pdc.partition(data, worlds.mesh(), owners(cutter, data, road.world.size))
    return data, share, road


def _fetches(graph, cutter, c):
    data, share, road = _graph(graph, cutter, c)
    n, e, rank = data.num_nodes, data.edge_index.size(1), road.world.rank
    store = DistFeatureStore.from_data(share, road)
    owner = share.edge_index.nodes.partition.owner_of(data.edge_index[1])
    wanted = [
        torch.cat([random_ids(rank, 25, n), torch.tensor([0, n - 1, 0])]),
        torch.empty(0, dtype=torch.int64) if rank % 2 else torch.arange(n),
        torch.full((7,), 3 % n),  # a hub that everybody wants
        torch.arange(n).flip(0).int(),
    ]
    for ids in wanted:
        edges = ids[ids < e].long()
        asked = {None: ids, EDGES: (edges, owner[edges])}
        found = store.fetch(asked)
        for name in ("x", "y", "train_mask"):
            assert torch.equal(found[None][name], data[name][ids.long()]), name
        for name in ("edge_weight", "edge_attr"):
            assert torch.equal(found[EDGES][name], data[name][edges]), name
        pool = store.fetch_unique(asked)[None]
        assert torch.equal(pool.ids, ids.long().unique())
        assert torch.equal(pool.rows["x"][pool.place], data.x[pool.ids])
    only = {None: wanted[0]} if rank == 0 else {}
    found = store.fetch(only, attrs={None: ["y"]})
    assert list(found) == list(only)
    assert all(list(rows) == ["y"] for rows in found.values())


@pytest.mark.parametrize(("size", "c"), WORLDS)
def test_rows_are_those_of_the_whole_tensor(size, c):
    cutters = ("random", "empty_rank", "lopsided", "block")
    graphs = ("directed", "tiny", "star", "edgeless")
    for cutter, graph in zip(cutters, graphs, strict=True):
        worlds.run(_fetches, size, graph, cutter, c)


def test_unused():
    assert wire
