"""What a plan says of a loader: the bytes of the ledger, and a ranking that makes sense."""

from __future__ import annotations

import batches
import tiers
import torch
import worlds
from test_partitioned_sampling import owners

import pyg_distcomm as pdc
from pyg_distcomm.loader import DistLayerLoader, DistNeighborLoader

NODES = {"num_neighbors": [4, 0, 3], "batch_size": 9, "shuffle": True, "seed": 5}
TREES = {
    "num_neighbors": [3, 2],
    "batch_size": 8,
    "seed": 2,
    "disjoint": True,
    "weight_attr": "heavy",
}
TWICE = {
    "num_neighbors": [3, -1],
    "batch_size": 6,
    "input_nodes": [3, 3, 9, 40, 7, 8, 9],
}
LADIES = {"num_nodes_per_layer": [12, 10], "batch_size": 9, "seed": 1}
FASTGCN = {**LADIES, "rule": "fastgcn", "weight_attr": "heavy"}
LOADERS = {
    "nodes": NODES,
    "trees": TREES,
    "twice": TWICE,
    "ladies": LADIES,
    "fastgcn": FASTGCN,
}
CHOICES = [(1, 2, "owner"), (1, 3, "requester"), (2, 2, "requester"), (2, 3, "owner")]
CHOICES += [(4, 1, "requester"), (3, 2, "requester"), (3, 1, "owner")]
FEW = [(4, ("nodes", "ladies")), (3, ("trees", "fastgcn", "twice"))]


def graph():
    data = batches.graph(n=150, e=1200)
    data.heavy = 0.5 + torch.rand(1200, generator=torch.Generator().manual_seed(0))
    return data


def counted(size, loaders):
    mesh, data = worlds.mesh(), graph()
    share = pdc.partition(data, mesh, owners(data.num_nodes, size))
    found = {}
    for name in loaders:
        asked = dict(LOADERS[name])
        kind = DistLayerLoader if "num_nodes_per_layer" in asked else DistNeighborLoader
        for c, k, place in [one for one in CHOICES if size % one[0] == 0]:
            options = {"replication": c, "bulk_size": k, "sample_at": place}
            loader = kind(share, **{"seed": 0, **asked, **options})
            mesh.ledger.reset()
            for _ in loader:
                pass
            loader._end_epoch()
            got = {"sample": 0, "fetch": 0}
            for (_, axis), entry in mesh.ledger.entries.items():
                purpose = axis.split(":")[0]
                if purpose in got:
                    got[purpose] += entry.bytes
            found[name, c, k, place] = got
    return found


@tiers.parametrize(
    ("size", "loaders"),
    [*FEW, *((p, tuple(LOADERS)) for p in (2, 3, 4, 6, 8))],
    FEW,
)
def test_the_bytes_of_a_plan_are_those_of_the_ledger(size, loaders):
    data = graph()
    ledgers = worlds.run(counted, size, size, loaders)
    for name in loaders:
        asked = {**LOADERS[name], "probe": 99}
        plans = pdc.plan(
            data, ranks=size, partition=owners(data.num_nodes, size), loader=asked
        )
        assert all(plan.exact for plan in plans)
        for key, _ in ledgers[0].items():
            if key[0] != name or key[2] > 16:
                continue
            _, c, k, place = key
            one = pdc.plan(
                data,
                ranks=size,
                partition=owners(data.num_nodes, size),
                loader={**asked, "replication": c, "bulk_size": k, "sample_at": place},
            ).best
            for rank, ledger in enumerate(ledgers):
                got = ledger[key]["sample"] + ledger[key]["fetch"]
                assert one.bytes_by_rank[rank] == got, (key, rank, one, ledger[key])
