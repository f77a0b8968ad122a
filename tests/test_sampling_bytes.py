"""What travels when a partitioned graph is sampled is what the prices say, to the byte."""

import batches
import pytest
import tiers
import torch
import worlds
from test_partitioned_loader import GRIDS
from torch_geometric.sampler import NodeSamplerInput

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import Price
from pyg_distcomm.comm.random import fold
from pyg_distcomm.sampling import KeyedLayerSampler, KeyedNeighborSampler, Ladies
from pyg_distcomm.sampling.graph_block import read_block
from pyg_distcomm.sampling.partitioned import (
    PartitionedLayerGraph,
    PartitionedNeighborSampler,
)

HOPS = [4, 3, 5]
MORE = [*GRIDS, (6, 2), (6, 3), (8, 4)]


def inputs(n, rank, k=3, b=7):
    """Minibatches of one rank: its first seed twice, its last batch short."""
    for i in range(k):
        g = torch.Generator().manual_seed(100 * rank + i)
        node = torch.randint(n, (b if i < k - 1 else 2,), generator=g)
        node[-1] = node[0]
        given = NodeSamplerInput(torch.arange(len(node)), node)
        given.key = fold(5, rank, i)
        yield given


def request_price(asked, asked_by_others, drawn, id_words=1):
    """The words of a request, as `RowRequest` says."""
    return Price(words=id_words * asked_by_others + asked + 2 * drawn)


def counts_price(segments, ranks, of_draws=False):
    """Its counts."""
    return Price(words=(segments + 1 + of_draws) * (ranks - 1))


class Ranks:
    """Who has what of a graph on a grid, from all ranks' point of view."""

    def __init__(self, data, size, c):
        self.size, self.c = size, c
        self.owner = batches.owners(data.num_nodes, size)
        self.degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)

    def column(self, rank):
        """The other ranks that hold all blocks between them, with this one."""
        return [q for q in range(rank % self.c, self.size, self.c) if q != rank]

    def twins(self, rank):
        """The other ranks that hold the same block."""
        first = rank // self.c * self.c
        return [q for q in range(first, first + self.c) if q != rank]

    def holder(self, rank, gid):
        """Which rank of its column has each row that a rank wants."""
        return self.owner[gid] // self.c * self.c + rank % self.c

    def bringer(self, rank, gid):
        """Which rank of its process row brings each: its own block it has itself."""
        first, column = rank // self.c * self.c, self.owner[gid] % self.c
        own = self.holder(rank, gid) == rank
        return torch.where(own, rank, first + column)

    def pool(self, rank, wanted):
        """The distinct rows that a rank is to bring for its process row."""
        every = [
            wanted[q][self.bringer(q, wanted[q]) == rank]
            for q in [rank, *self.twins(rank)]
        ]
        return torch.cat(every).unique()

    def request(self, rank, wanted, who, others):
        """The price of whole rows, asked of who has them, with others asking too."""
        asked = wanted[rank][who(rank, wanted[rank]) != rank]
        asking = sum(int((who(q, wanted[q]) == rank).sum()) for q in others)
        return request_price(len(asked), asking, int(self.degree[asked].sum()))

    def rows(self, rank, wanted):
        """The price of distinct rows over the process column, pooled already."""
        return self.request(rank, wanted, self.holder, self.column(rank))


def hops(out):
    """The frontier of each hop, and the targets of the edges drawn at it."""
    nodes = out.node.split(out.num_sampled_nodes)
    targets = out.node[out.col].split(out.num_sampled_edges)
    return list(zip(nodes, targets, strict=False))


def owner_price(ranks, rank, found, hop):
    """What a hop brings a rank where in-edges are drawn at their owner."""
    mine = [out[hop] for out in found[rank]]
    asked, drawn = (
        sum(int((ranks.holder(rank, gid) != rank).sum()) for gid in part)
        for part in zip(*mine, strict=True)
    )
    asking = sum(
        int((ranks.holder(q, out[hop][0]) == rank).sum())
        for q in ranks.column(rank)
        for out in found[q]
    )
    words = 2 if hop == 0 else 1  # seeds that are given twice go with a number each
    return request_price(asked, asking, drawn, words)


def requester_price(ranks, rank, found, hop):
    """What it brings in the process column, and in the process row."""
    wanted = {
        q: torch.cat([o[hop][0] for o in outs]).unique() for q, outs in found.items()
    }
    pools = {q: ranks.pool(q, wanted) for q in found}
    row = ranks.rows(rank, pools)
    return row, ranks.request(rank, wanted, ranks.bringer, ranks.twins(rank))


@pytest.mark.parametrize("sample_at", ["owner", "requester"])
@tiers.parametrize(("size", "c"), MORE, [(2, 1)])
@worlds.on()
def test_the_bytes_of_a_hop(size, c, sample_at):
    mesh = worlds.mesh()
    data, rank = batches.graph(n=300, e=4000), mesh.rank
    ranks = Ranks(data, size, c)
    whole = KeyedNeighborSampler(data, HOPS, seed=1)
    found = {
        q: [hops(whole.sample_from_nodes(i)) for i in inputs(300, q)]
        for q in range(size)
    }
    share = pdc.partition(data, mesh, ranks.owner)
    part = PartitionedNeighborSampler(
        share, HOPS, seed=1, channel=worlds.channel(mesh, c), sample_at=sample_at
    )
    mesh.ledger.reset()
    part.sample_bulk(list(inputs(300, rank)))
    k, others = len(found[rank]), size // c - 1
    want = {"row": 0, "col": 0}
    counts = {"row": 8 * k * others if sample_at == "owner" else 0, "col": 0}
    for hop in range(len(HOPS)):
        if sample_at == "owner":
            want["row"] += owner_price(ranks, rank, found, hop).bytes(4)
            counts["row"] += counts_price(k, size // c, True).bytes(8)
            continue
        row, col = requester_price(ranks, rank, found, hop)
        want["row"] += row.bytes(4)
        want["col"] += col.bytes(4)
        counts["row"] += counts_price(1, size // c).bytes(8)
        counts["col"] += counts_price(1, c).bytes(8)
    ledger = mesh.ledger
    for axis in want:
        got = ledger.bytes("frontier", axis) + ledger.bytes("samples", axis)
        assert got == want[axis]
        assert ledger.bytes("plan", axis) == counts[axis]
    # and nothing else
    assert ledger.bytes() == sum(want.values()) + sum(counts.values())
    assert ledger.messages("frontier", "row") <= len(HOPS) * others
    assert ledger.messages("frontier", "col") <= len(HOPS) * (c - 1)
    if size == c:
        assert sum(want.values()) == 0


def layer_price(ranks, data, rank, parts, who, others):
    """What the rows of a layer, sums and edges bring, where `who` multiplies each row."""
    source, target = data.edge_index
    mine, columns = parts[rank], 0
    asked = sum(int((who(rank, rows) != rank).sum()) for rows, _, _ in mine)
    asking = {
        q: [int((who(q, rows) == rank).sum()) for rows, _, _ in parts[q]]
        for q in others
    }
    for rows, _, _ in mine:
        for q in others:
            at = rows[who(rank, rows) == q]
            columns += len(source[torch.isin(target, at)].unique())
    rows_asked = sum(map(sum, asking.values()))
    sent = sum(
        len(cols)
        for q in others
        for (_, cols, _), count in zip(parts[q], asking[q], strict=True)
        if count
    )
    edges = sum(int((who(rank, ends) != rank).sum()) for _, _, ends in mine)
    # as `PartitionedLayerGraph` says, for words of 4 bytes and edges without weights
    sums = rows_asked + len(mine) * len(others) + 3 * columns
    return Price(words=sums + sent + asked + 2 * edges + 2 * asked)


@tiers.parametrize("sample_at", ["owner", "requester"], ["owner"])
@tiers.parametrize(("size", "c"), MORE, [(4, 2)])
@worlds.on()
def test_the_bytes_of_a_layer(size, c, sample_at):
    mesh = worlds.mesh()
    data, rank = batches.graph(n=300, e=4000), mesh.rank
    ranks = Ranks(data, size, c)
    whole = KeyedLayerSampler(data, [20, 30], Ladies("cagnet"), weights=None)
    found = {
        q: [whole.sample_from_nodes(i) for i in inputs(300, q)] for q in range(size)
    }
    share = pdc.partition(data, mesh, ranks.owner)
    graph = PartitionedLayerGraph(
        read_block(share, worlds.channel(mesh, c)),
        worlds.channel(mesh, c),
        Ladies("cagnet"),
        sample_at=sample_at,
    )
    part = KeyedLayerSampler(graph, [20, 30], weights=None)
    mesh.ledger.reset()
    part.sample_bulk(list(inputs(300, rank)))
    k, want = len(found[rank]), {"row": 0, "col": 0}
    for layer in range(2):
        parts = {
            q: [
                (
                    n[layer],
                    n[layer + 1],
                    o.node[o.col].split(o.num_sampled_edges)[layer],
                )
                for o in outs
                for n in [o.node.split(o.num_sampled_nodes)]
            ]
            for q, outs in found.items()
        }
        if sample_at == "owner":
            who, others, axis = ranks.holder, ranks.column(rank), "row"
        else:  # the rows of A come besides
            who, others, axis = ranks.bringer, ranks.twins(rank), "col"
            wanted = {q: torch.cat([r for r, _, _ in p]) for q, p in parts.items()}
            pools = {q: ranks.pool(q, wanted) for q in parts}
            want["row"] += ranks.rows(rank, pools).bytes(4)
            want["row"] += counts_price(1, size // c).bytes(8)
        want[axis] += layer_price(ranks, data, rank, parts, who, others).bytes(4)
        want[axis] += 8 * (2 * k + 3) * len(others)
    for axis, expected in want.items():
        assert mesh.ledger.bytes(axis=axis) == expected
    assert mesh.ledger.bytes() == sum(want.values())
