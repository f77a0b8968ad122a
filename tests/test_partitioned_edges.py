"""The corners of loading a partitioned graph: odd graphs, odd uses, and what must end."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace

import batches
import pytest
import tiers
import torch
import torch.distributed as dist
import worlds
from test_partitioned_loader import built, cut, masked
from test_partitioned_sampling import timed
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm.axis import new_process_grid
from pyg_distcomm.loader import (
    DistFeatureStore,
    DistLayerLoader,
    DistNeighborLoader,
    LoaderOptions,
)

pytestmark = pytest.mark.usefixtures("place")


def alike(data, share, kind=DistNeighborLoader, fan_outs=(2, 2), **options):
    """Asserts that a share yields what the whole graph does."""
    options = {"batch_size": 3, "seed": 5, **options}
    whole = {k: v for k, v in options.items() if k not in ("sample_at", "replication")}
    one = kind(data, list(fan_outs), **batches.arguments(**whole))
    two = kind(share, list(fan_outs), **batches.arguments(**options))
    batches.equal_epochs(one, two, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "c"), [(2, 1), tiers.rarely(2, 2), tiers.rarely(3, 1)]
)
@worlds.on()
def test_blocks_without_edges(size, c):
    mesh = worlds.mesh()
    x = torch.arange(14.0).view(7, 2)
    for ends in ([[1, 3, 5], [0, 0, 2]], [[], []], [[2], [2]]):
        data = Data(x=x, edge_index=torch.tensor(ends, dtype=torch.int64))
        share = pdc.partition(data, mesh, torch.arange(7) % size)
        for sample_at in ("owner", "requester"):
            alike(data, share, replication=c, sample_at=sample_at)
            for rule in ("ladies", "fastgcn"):
                alike(
                    data,
                    share,
                    DistLayerLoader,
                    rule=rule,
                    replication=c,
                    sample_at=sample_at,
                )
        alike(data, share, subgraph_type="induced", replication=c)


@worlds.on(2)
def test_hops_that_draw_nothing():
    size = 2
    mesh = worlds.mesh()
    data = masked()
    share = pdc.partition(data, mesh, cut(data, size))
    for fan_outs in ([0], [2, 0], [0, 2], [2, 0, 2]):
        for sample_at in ("owner", "requester"):
            alike(data, share, fan_outs=fan_outs, sample_at=sample_at)


def unweighted(batch):
    batch.pop("weight", None)  # of other edges than those of an altered number
    return batch


@tiers.rare
@worlds.on(2)
def test_ids_that_need_eight_bytes():
    size = 2
    mesh = worlds.mesh()
    data = timed()
    for weight in (data.weight, data.weight.double()):
        data.weight = weight
        share = pdc.partition(data, mesh, cut(data, size))
        topology = share.edge_index.topology
        topology.edges = replace(topology.edges, total=2**31 + 10)  # ids need 8 bytes
        del share.edge_attr, share.edge_time, share.y
        plain = Data(
            x=data.x, edge_index=data.edge_index, weight=weight, time=data.time
        )
        for sample_at, c in itertools.product(("owner", "requester"), (1, size)):
            common = {"sample_at": sample_at, "replication": c, "transform": unweighted}
            for kind in (DistNeighborLoader, DistLayerLoader):
                alike(plain, share, kind, weight_attr="weight", **common)


class Endless:
    """Batches of a script that does not say how many."""

    def __iter__(self):
        yield from ([0, 1], [2, 3])


@worlds.on(2)
def test_what_cannot_be_is_refused_at_construction():
    size = 2
    mesh = worlds.mesh()
    data = batches.hetero()
    share = pdc.partition(data, mesh, cut(data, size))
    with pytest.raises(ValueError, match="no edges have an attribute 'heavy'"):
        DistNeighborLoader(share, [2], input_nodes="paper", weight_attr="heavy")
    plain = masked()
    share = pdc.partition(plain, mesh, cut(plain, size))
    with pytest.raises(ValueError, match="without a length"):
        DistNeighborLoader(share, [2], batch_sampler=Endless())
    short = DistFeatureStore.from_replicated(torch.zeros(50, 3), new_process_grid(mesh))
    with pytest.raises(ValueError, match="50 rows of 'x', and a graph with 60"):
        DistNeighborLoader(share, [2], options=LoaderOptions(features=short))


@worlds.on(2)
def test_one_epoch_at_a_time():
    size = 2
    _, loader = built(size)
    with pytest.raises(RuntimeError, match="another epoch of the loader has begun"):
        list(zip(loader, loader, strict=True))
    assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("c", [1, 2])
@worlds.on(2)
def test_rows_that_change_are_seen_at_the_next_epoch(c):
    size = 2
    share, loader = built(size, c)
    data = masked()
    list(loader)
    for turn in range(3):
        loader.set_epoch(0)
        if turn == 1:
            share.x.to_local().add_(1.0)
        if turn == 2:
            share.x = share.x * 2.0
        want = data.x + (turn > 0)
        want = want * 2 if turn == 2 else want
        for batch in loader:
            assert torch.equal(batch.x, want[batch.n_id])


@worlds.on(2)
def test_what_happens_on_one_rank_is_known_to_all():
    size = 2
    mesh = worlds.mesh()
    share, loader = built(size)
    list(loader)
    if mesh.rank == 0:
        share.x.to_local()[0] = 7.0
    later = DistNeighborLoader(share, [2], batch_size=9, options=LoaderOptions(seed=1))
    first = int(share.edge_index.nodes.partition.gids(0)[0])
    for batch in later:
        assert bool((batch.x[batch.n_id == first] == 7.0).all())
    odd = timed()
    share = pdc.partition(odd, mesh, cut(odd, size))
    if mesh.rank == 0:
        share.time = share.time.double()
        share.time.to_local()[0] = float("nan")
    else:
        share.time = share.time.double()
    with pytest.raises(ValueError, match="holds NaN"):
        DistNeighborLoader(share, [2], time_attr="time")
    share = pdc.partition(odd, mesh, cut(odd, size))
    with pytest.raises(ValueError, match="do not ascend"):
        DistNeighborLoader(share, [2], time_attr="time", is_sorted=True)


@worlds.on(2)
def test_loaders_leave_no_process_groups_behind():
    size = 2
    share, loader = built(size)
    list(loader)
    gc.collect()  # groups of the tests before
    groups = len(dist.distributed_c10d._world.pg_map)
    for _ in range(4):
        other = DistNeighborLoader(share, [2], batch_size=9)
        list(other)
        del other
    gc.collect()
    assert len(dist.distributed_c10d._world.pg_map) <= groups


@worlds.on(2)
def test_phases_do_not_depend_on_the_ledger_of_the_mesh():
    size = 2
    mesh = worlds.mesh()
    _, loader = built(size, bulk_size=1, batch_size=2)
    for k, _ in enumerate(loader):
        if k == 2:
            mesh.ledger.reset()
    for name in ("sample", "fetch"):
        assert loader.phases[name].bytes > 0
        assert loader.phases[name].waiting >= 0
    assert "sample" in str(loader.phases)
