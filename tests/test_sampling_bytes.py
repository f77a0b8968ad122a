"""What travels when a partitioned graph is sampled is what the prices say, to the byte."""

from __future__ import annotations

import batches
import pytest
import torch
import worlds
from test_partitioned_sampling import GRIDS, channel, inputs, owners

import pyg_distcomm as pdc
from pyg_distcomm.sampling import KeyedLayerSampler, KeyedNeighborSampler, Ladies
from pyg_distcomm.sampling.blocks import read_block
from pyg_distcomm.sampling.errand import errand_price
from pyg_distcomm.sampling.partitioned import PartitionedNeighborSampler
from pyg_distcomm.sampling.partitioned_layers import (
    PartitionedLayerGraph,
    edges_price,
    sums_price,
)

HOPS = [4, 3, 5]


def hops(out):
    """The frontier of each hop, and the targets of the edges drawn at it."""
    nodes = out.node.split(out.num_sampled_nodes)
    targets = out.node[out.col].split(out.num_sampled_edges)
    return list(zip(nodes, targets, strict=False))


def away(block, gid, here):
    return int((block[gid] != here).sum())


def column_of(rank, size, c):
    """The ranks that hold all blocks between them, with this one."""
    return range(rank % c, size, c)


def neighbours(size, c, sample_at):
    mesh = worlds.mesh()
    data, rank = batches.graph(n=300, e=4000), mesh.rank
    owner = owners(data.num_nodes, size)
    block, here = owner // c, rank // c
    whole = KeyedNeighborSampler(data, HOPS, seed=1)
    found = {
        q: [hops(whole.sample_from_nodes(i)) for i in inputs(300, q)]
        for q in range(size)
    }
    degree = torch.bincount(data.edge_index[1], minlength=300)
    share = pdc.partition(data, mesh, owner)
    part = PartitionedNeighborSampler(
        share, HOPS, seed=1, channel=channel(mesh, c), sample_at=sample_at
    )
    mesh.ledger.reset()
    part.sample_bulk(inputs(300, rank))
    others = [q for q in column_of(rank, size, c) if q != rank]
    want = 0
    for hop in range(len(HOPS)):
        mine = [out[hop] for out in found[rank]]
        theirs = {q: [out[hop][0] for out in found[q]] for q in others}
        if sample_at == "owner":
            asked = sum(away(block, node, here) for node, _ in mine)
            drawn = sum(away(block, target, here) for _, target in mine)
            asking = sum(
                int((block[node] == here).sum()) for q in others for node in theirs[q]
            )
        else:  # each distinct row once, and all of it
            rows = torch.cat([node for node, _ in mine]).unique()
            asked = away(block, rows, here)
            drawn = int(degree[rows[block[rows] != here]].sum())
            each = [torch.cat(theirs[q]).unique() for q in others]
            asking = sum(int((block[rows] == here).sum()) for rows in each)
        # seeds that are given twice go with a number each
        words = 2 if hop == 0 and sample_at == "owner" else 1
        want += errand_price(asked, asking, drawn, words).bytes(4)
    got = mesh.ledger.bytes("frontier", "row") + mesh.ledger.bytes("samples", "row")
    assert got == want
    assert mesh.ledger.messages("frontier") <= len(HOPS) * max(len(others), 0)


@pytest.mark.parametrize(("size", "c"), GRIDS)
def test_the_bytes_of_a_hop_at_the_owner(size, c):
    worlds.run(neighbours, size, size, c, "owner")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_bytes_of_a_hop_at_the_requester(size):
    worlds.run(neighbours, size, size, 1, "requester")


def layers(size, c):
    mesh = worlds.mesh()
    data, rank = batches.graph(n=300, e=4000), mesh.rank
    owner = owners(data.num_nodes, size)
    block, here = owner // c, rank // c
    whole = KeyedLayerSampler(data, [20, 30], Ladies("cagnet"), weights=None)
    found = {
        q: [whole.sample_from_nodes(i) for i in inputs(300, q)] for q in range(size)
    }
    share = pdc.partition(data, mesh, owner)
    graph = PartitionedLayerGraph(
        read_block(share, channel(mesh, c)), channel(mesh, c), Ladies("cagnet")
    )
    part = KeyedLayerSampler(graph, [20, 30], weights=None)
    mesh.ledger.reset()
    part.sample_bulk(inputs(300, rank))
    others = [q for q in column_of(rank, size, c) if q != rank]
    source, target = data.edge_index
    want = 0
    for layer in range(2):
        parts = {
            q: [
                (
                    n[layer],
                    n[layer + 1],
                    o.node[o.col].split(o.num_sampled_edges)[layer],
                )
                for o in found[q]
                for n in [o.node.split(o.num_sampled_nodes)]
            ]
            for q in [rank, *others]
        }
        asked = sum(away(block, rows, here) for rows, _, _ in parts[rank])
        asking = [
            [int((block[rows] == here).sum()) for rows, _, _ in parts[q]]
            for q in others
        ]
        columns = 0
        for rows, _, _ in parts[rank]:
            for q in others:
                at = rows[block[rows] == q // c]
                columns += len(source[torch.isin(target, at)].unique())
        batch_count = len(parts[rank]) * len(others)
        want += sums_price(sum(map(sum, asking)), batch_count, columns).bytes(4)
        sent = sum(
            len(cols)
            for q, counts in zip(others, asking, strict=True)
            for (_, cols, _), count in zip(parts[q], counts, strict=True)
            if count
        )
        edges = sum(away(block, ends, here) for _, _, ends in parts[rank])
        want += edges_price(sent, asked, edges).bytes(4)
    ops = ("frontier", "sums", "columns", "edges")
    assert sum(mesh.ledger.bytes(op, "row") for op in ops) == want


@pytest.mark.parametrize(("size", "c"), GRIDS)
def test_the_bytes_of_a_layer(size, c):
    worlds.run(layers, size, size, c)
