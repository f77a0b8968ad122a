"""Counts the bytes that the minibatches of a loader move between ranks, in one process.

A minibatch is a function of (seed, epoch, its number): it does not depend on the number of
ranks, on c, k, or on where in-edges are drawn. So one process draws the first minibatches of
every rank from the whole graph, once; bytes then follow from the owners of nodes:

    owner       ids asked + their counts + 2 words an in-edge drawn elsewhere, hop by hop
    requester   ids asked + their counts + 2 words an in-edge of each distinct row elsewhere
    features    (4 bytes + the bytes of a row) for each distinct node of a bulk elsewhere

With c copies of a block, "elsewhere" means outside a rank's process row. The words are those of
`RowRequest`, `PartitionedLayerGraph` and `ShardedStore.price`, for all ranks at once. In a
HeteroData nodes are numbered type after type, and each relation has its own rows; a Data is
one type and one relation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.profile import get_data_size

from pyg_distcomm.loader.batch_sharding import BatchSharding
from pyg_distcomm.loader.layer_loader import DistLayerLoader
from pyg_distcomm.loader.neighbor_loader import DistNeighborLoader
from pyg_distcomm.partition.partition import Partition

_COUNT = 8  # bytes of a count


@dataclass(frozen=True, eq=False)
class ProbedHop:
    """Holds the nodes and edges of one relation in one hop, or layer, of a minibatch.

    Shapes: rows [f] the frontier, whose in-edges are sampled; target [e] the targets of the
    sampled edges; cols is the number of columns of a layer.
    """

    rows: Tensor
    target: Tensor
    cols: int = 0


@dataclass(frozen=True, eq=False)
class ProbedBatch:
    """Holds one minibatch of the probe.

    Args:
        hops: by hop, and by relation.
        nodes: ids by type `[m_t]`.
        edges: by relation, ids of edges that have rows, and their targets, `[2, e_r]`.
        numbered: whether a seed node occurs twice: seeds then travel with a number.
    """

    hops: tuple[tuple[ProbedHop, ...], ...]
    nodes: tuple[Tensor, ...]
    edges: tuple[Tensor, ...]
    numbered: bool


@dataclass(frozen=True, eq=False)
class MinibatchProbe:
    """Holds the first minibatches of each rank, and the properties that their bytes depend on.

    Args:
        owner: [n] the rank that owns each node.
        degree: [n] in-edges of each node, by relation.
        colptr, row: the graph by target, for layer-wise samplers; else None.
        batches: by rank, in order.
        rounds: minibatches of a rank in an epoch.
        layered: whether nodes are drawn layer by layer.
        loops: whether each row of the graph has a loop (A + I).
        shared: whether all minibatches draw from one row, which is summed up once.
        disjoint: whether each node travels with its tree.
        drawing: at each hop, the relations that are drawn from: their fan-out is not 0.
        word: bytes of an id.
        weight: bytes of an edge's weight in its row, by relation, 0 without.
        row_bytes: bytes of a node's attributes by type, and of an edge's by relation.
        seconds: seconds to sample a minibatch, on one thread of this process.
        batch_bytes: mean bytes of a minibatch with its features.
    """

    owner: Tensor
    degree: tuple[Tensor, ...]
    colptr: Tensor | None
    row: Tensor | None
    batches: tuple[tuple[ProbedBatch, ...], ...]
    rounds: int
    layered: bool
    loops: bool
    shared: bool
    disjoint: bool
    drawing: tuple[tuple[int, ...], ...]
    word: int
    weight: tuple[int, ...]
    row_bytes: tuple[list[int], list[int]]
    seconds: float
    batch_bytes: float

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.batches)

    @property
    def widths(self) -> list[int]:
        """Bytes of a row of each group: node types, then relations."""
        return [*self.row_bytes[0], *self.row_bytes[1]]

    @property
    def taken(self) -> int:
        """The number of minibatches that were drawn for each rank."""
        return len(self.batches[0])

    @property
    def whole(self) -> bool:
        """Whether the probe is a whole epoch."""
        return self.taken == self.rounds


def probe_loader(
    data: Data | HeteroData, owners: Partition, loader: Mapping[str, Any], most: int
) -> MinibatchProbe:
    """Draws the first `most` minibatches of each rank, on this process.

    Price: `most` times P minibatches sampled, and one of them collated.

    Raises:
        ValueError, TypeError: for arguments that the loader refuses, or that have no price.
    """
    layered = "num_nodes_per_layer" in loader
    kind: Any = DistLayerLoader if layered else DistNeighborLoader
    local = kind(data, **{"seed": 0, **loader, "split": False})
    types, sampler = _Types.of(data), local.neighbor_sampler_in_use
    drawn = _drawn(local, owners.num_parts, most, layered, types)
    batches, rounds, seconds = drawn
    n, every = owners.num_nodes, [store.edge_index for store in types.relations]
    degree = tuple(
        torch.bincount(edges[1] + types.first[kind], minlength=n)
        for edges, (_, kind) in zip(every, types.names, strict=True)
    )
    colptr = row = None
    if layered:
        row = every[0][0][torch.argsort(every[0][1], stable=True)]
        colptr = torch.nn.functional.pad(degree[0].cumsum(0), (1, 0))
    rule: Any = sampler.rule if layered else None
    most_ids = max(n, *(edges.size(1) for edges in every))
    word = 8 if most_ids >= 2**31 else 4
    fan_outs = () if layered else sampler._fan_outs()
    return MinibatchProbe(
        owner=owners.owner_of(torch.arange(n)).long(),
        degree=degree,
        colptr=colptr,
        row=row,
        batches=batches,
        rounds=rounds,
        layered=layered,
        loops=layered and rule.loops,
        shared=layered and rule.shared,
        disjoint=bool(loader.get("disjoint")),
        drawing=tuple(
            tuple(r for r, fan_out in enumerate(hop) if fan_out != 0)
            for hop in zip(*fan_outs, strict=True)
        ),
        word=word,
        weight=tuple(
            _weight_bytes(store, loader.get("weight_attr"), word)
            for store in types.relations
        ),
        row_bytes=_row_bytes(types),
        seconds=seconds,
        batch_bytes=_batch_bytes(local),
    )


@dataclass(frozen=True, eq=False)
class _Types:
    """Holds the node types and relations of a graph, and how their nodes are numbered.

    Args:
        first: the number of the first node of each type, by its name; None of a Data.
        nodes, relations: their stores.
        names: of relations, and the type of their targets.
    """

    first: dict[Any, int]
    nodes: list[Any]
    relations: list[Any]
    names: list[tuple[Any, Any]]

    @staticmethod
    def of(data: Data | HeteroData) -> _Types:
        """Reads the types of a graph."""
        if isinstance(data, Data):
            return _Types({None: 0}, [data], [data], [(None, None)])
        counts = [int(store.num_nodes) for store in data.node_stores]
        first = dict(zip(data.node_types, accumulate(counts, initial=0), strict=False))
        names = [(name, name[2]) for name in data.edge_types]
        return _Types(first, data.node_stores, data.edge_stores, names)


def _drawn(
    local: Any, size: int, most: int, layered: bool, types: _Types
) -> tuple[tuple[tuple[ProbedBatch, ...], ...], int, float]:
    """Draws the first minibatches of each rank.

    Returns:
        them, how many a rank has in an epoch, and the seconds that one took.
    """
    length, batches, spent = local._epoch_plan.length(), [], []
    if not length:
        raise ValueError("the loader has no minibatches to plan for; give it seeds")
    for rank in range(size):
        even = local._loader_options.even_batches
        sharding = BatchSharding(rank, size, False, (length,), even)
        rounds = sharding.rounds(0)
        if not rounds:
            raise ValueError(
                f"{length} minibatches do not give each of {size} ranks one; take fewer "
                "ranks, smaller minibatches, or even_batches='pad'"
            )
        begin = time.process_time()
        plan = local._epoch_plan.batches(local._agreed_seed(), 0, sharding, 0)
        planned = [one for one, _ in zip(plan, range(most), strict=False)]
        if layered:
            outputs = local._sample_planned_bulk(planned)
        else:
            outputs = [local._sample_planned(one) for one in planned]
        spent.append((time.process_time() - begin) / len(outputs))
        batches.append(tuple(_probed(out, layered, types) for out in outputs))
    return tuple(batches), rounds, min(spent)  # the first may have compiled kernels


def _batch_bytes(local: Any) -> float:
    """Returns the bytes of the first minibatch of an epoch, with its features."""
    first = local.collate_fn(next(iter(local._plan())))
    return float(
        get_data_size(first if local.filter_per_worker else local.filter_fn(first))
    )


def _weight_bytes(store: Any, name: str | None, word: int) -> int:
    """Returns the bytes of a weight that travels with its row."""
    if name is None or name not in store:
        return 0
    return max(int(store[name].element_size()), word)


def _row_bytes(types: _Types) -> tuple[list[int], list[int]]:
    """Returns the bytes of a row of all attributes of each node type, and relation."""

    def row_bytes_of(store: Any, belongs: Any) -> int:
        total = 0
        for name, value in store.items():
            if name == "edge_index" or not isinstance(value, Tensor) or not value.dim():
                continue
            if belongs(name) and len(value):
                total += value[:1].numel() * value.element_size()
        return total

    nodes = [row_bytes_of(store, store.is_node_attr) for store in types.nodes]
    return nodes, [row_bytes_of(store, store.is_edge_attr) for store in types.relations]


def _probed(out: Any, layered: bool, types: _Types) -> ProbedBatch:
    def part(value: Any, key: Any) -> Any:
        return value if key is None else value.get(key)

    node = {k: part(out.node, k).long() + at for k, at in types.first.items()}
    counts = {k: [*map(int, part(out.num_sampled_nodes, k))] for k in node}
    by_hop = {k: ids.split(counts[k]) for k, ids in node.items()}
    by_relation, edges = [], []
    for name, kind in types.names:
        ids, col = part(out.edge, name), part(out.col, name)
        target = node[kind][col.long()]
        drawn = target.split([*map(int, part(out.num_sampled_edges, name))])
        columns = map(len, by_hop[kind][1:])
        parts = zip(by_hop[kind], drawn, columns, strict=False)
        by_relation.append([ProbedHop(*hop_parts) for hop_parts in parts])
        real = ids >= 0
        edges.append(torch.stack([ids.long()[real], target[real]]))
    seeds = [hop_parts[0] for hop_parts in by_hop.values() if hop_parts]
    numbered = not layered and any(len(s.unique()) < len(s) for s in seeds)
    hops = tuple(zip(*by_relation, strict=True))
    return ProbedBatch(hops, tuple(node.values()), tuple(edges), numbered)


@dataclass
class Traffic:
    """Sums up the bytes that each rank receives, and the messages that it sends.

    Shapes: sample, fetch [P] bytes, messages of bulks. An epoch also moves, by rank, `fixed`
    bytes to sample, and `refresh` bytes to check whether rows have changed.
    """

    sample: Tensor
    fetch: Tensor
    bulks: int = 0
    fixed: int = 0
    refresh: int = 0
    messages: int = 0


class TrafficModel:
    """Prices a probe for c copies, bulks of k, and one place to draw in-edges."""

    def __init__(self, probe: MinibatchProbe) -> None:
        self.probe = probe
        self._distinct_counts: dict[tuple[int, int], list[Tensor]] = {}

    def price(self, c: int, k: int, place: str) -> Traffic:
        """Returns the traffic of the probe, the counts of its bulks included."""
        probe = self.probe
        traffic = Traffic(
            torch.zeros(probe.size, dtype=torch.int64),
            torch.zeros(probe.size, dtype=torch.int64),
        )
        grid = _Grid(probe.owner, probe.size, c)
        traffic.refresh = _COUNT * (probe.size - 1)
        for first in range(0, probe.taken, k):
            bulk = [own[first : first + k] for own in probe.batches]
            traffic.bulks += 1
            traffic.sample += 2 * _COUNT * (probe.size - 1)  # how large the bulk is
            traffic.messages += probe.size - 1
            traffic.sample += self._sampled(grid, bulk, place, traffic)
            traffic.fetch += self._fetched(grid, bulk, (first, k), traffic)
        # that there is no more
        traffic.fixed = 2 * _COUNT * (probe.size - 1)
        if probe.shared:
            traffic.fixed += self._shared_row(grid)
        return traffic

    def _shared_row(self, grid: _Grid) -> int:
        blocks, n = grid.blocks, len(self.probe.owner)
        return _COUNT * -(-2 * n * (blocks - 1) // blocks)

    # Sampling -------------------------------------------------------------------------

    def _sampled(
        self, grid: _Grid, bulk: list[Any], place: str, traffic: Traffic
    ) -> Tensor:
        probe, k = self.probe, len(bulk[0])
        total = torch.zeros(probe.size, dtype=torch.int64)
        others = grid.blocks - 1
        if not probe.layered and place == "owner":
            total += _COUNT * k * others
            traffic.messages += others
        for hop in range(len(bulk[0][0].hops)):
            parts = [[batch.hops[hop] for batch in own] for own in bulk]
            if probe.layered:
                layer = [[item[0] for item in own] for own in parts]
                total += self._layer(grid, layer, place, traffic)
                continue
            relations = probe.drawing[hop]
            every = [[[item[r] for item in own] for own in parts] for r in relations]
            if place == "owner" and relations:
                numbered = [
                    probe.disjoint or (hop == 0 and any(b.numbered for b in own))
                    for own in bulk
                ]
                joined = [
                    [h for own in column for h in own]
                    for column in zip(*every, strict=True)
                ]
                total += self._hop(grid, joined, numbered, traffic)
            elif place == "requester":
                for r, rows in zip(relations, every, strict=True):
                    total += self._rows(grid, rows, r, traffic)
        return total

    def _hop(
        self, grid: _Grid, parts: list[Any], numbered: Sequence[bool], traffic: Traffic
    ) -> Tensor:
        """Prices one hop of a bulk whose in-edges are drawn at their owner."""
        ids = grid.remote([torch.cat([h.rows for h in own]) for own in parts])
        drawn = grid.remote([torch.cat([h.target for h in own]) for own in parts])
        words = torch.tensor([1 + int(one) for one in numbered])
        requested = grid.requests(words.unsqueeze(1) * ids, "row")
        received = ids.sum(1) + 2 * drawn.sum(1)
        others = grid.blocks - 1
        traffic.messages += 4 * others
        counts = _COUNT * (len(parts[0]) + 2) * others
        return self.probe.word * (requested + received) + counts

    def _rows(
        self, grid: _Grid, parts: list[Any], relation: int, traffic: Traffic
    ) -> Tensor:
        """Prices whole rows of one hop, each once: over the process row, and the column."""
        probe = self.probe
        word, extra = probe.word, probe.weight[relation]
        total = torch.zeros(probe.size, dtype=torch.int64)
        pools, twins = grid.pools(_distinct_rows(parts))
        if grid.c > 1:
            ids = grid.by_twin(twins)
            rows = grid.by_twin(twins, probe.degree[relation])
            total += word * (grid.requests(ids, "col") + ids.sum(1) + 2 * rows.sum(1))
            total += extra * rows.sum(1) + _COUNT * 3 * (grid.c - 1)
            traffic.messages += 4 * (grid.c - 1)
        return total + self._column(grid, pools, relation, traffic)

    def _column(
        self, grid: _Grid, pools: list[Tensor], relation: int, traffic: Traffic
    ) -> Tensor:
        """Prices the distinct rows that a rank brings from its column."""
        probe, others = self.probe, grid.blocks - 1
        ids, rows = (grid.remote(pools), grid.remote(pools, probe.degree[relation]))
        traffic.messages += 4 * others
        words = probe.word * (grid.requests(ids, "row") + ids.sum(1) + 2 * rows.sum(1))
        return words + probe.weight[relation] * rows.sum(1) + _COUNT * 3 * others

    # Layers ---------------------------------------------------------------------------

    def _layer(
        self, grid: _Grid, parts: list[Any], place: str, traffic: Traffic
    ) -> Tensor:
        """Prices the sums and the edges of one layer of a bulk."""
        probe, k = self.probe, len(parts[0])
        total = torch.zeros(probe.size, dtype=torch.int64)
        axis, peers = "row", grid.blocks
        if place == "requester":
            axis, peers = "col", grid.c
            pools, _ = grid.pools(_distinct_rows(parts))
            total += self._column(grid, pools, 0, traffic)
        if peers == 1:
            return total
        word = probe.word
        requested = torch.zeros((probe.size, peers), dtype=torch.int64)
        columns, edges = torch.zeros_like(requested), torch.zeros_like(requested)
        sent = torch.zeros_like(requested)
        for rank, own in enumerate(parts):
            for layer in own:
                peer = grid.server(rank, layer.rows, axis)
                count = torch.bincount(peer, minlength=peers)
                requested[rank] += count
                sent[rank] += (count > 0) * layer.cols
                edges[rank] += torch.bincount(
                    grid.server(rank, layer.target, axis), minlength=peers
                )
                if not probe.shared:
                    columns[rank] += self._columns(layer.rows, peer, peers)
        own_mask = grid.own_mask(axis)
        for table in (requested, columns, edges, sent):
            table.masked_fill_(own_mask, 0)
        words = (
            grid.requests(requested, axis)
            + grid.requests(sent, axis)
            + requested.sum(1)
        )
        words += 2 * edges.sum(1)
        counts = 2 * k + 2
        if not probe.shared:
            words += k * (peers - 1) + columns.sum(1)
            counts += 1
        wide_words = (edges if probe.weight[0] else requested).sum(1)
        wide_words = wide_words + (0 if probe.shared else columns.sum(1))
        traffic.messages += (5 if probe.shared else 7) * (peers - 1)
        return total + word * words + 8 * wide_words + _COUNT * counts * (peers - 1)

    def _columns(self, rows: Tensor, peer: Tensor, peers: int) -> Tensor:
        """Returns the distinct columns of the rows that each peer multiplies."""
        probe = self.probe
        assert probe.colptr is not None
        assert probe.row is not None
        n = len(probe.owner)
        start, size = probe.colptr[rows], probe.degree[0][rows]
        first = torch.nn.functional.pad(size.cumsum(0), (1, 0))[:-1]
        row_of = torch.repeat_interleave(torch.arange(len(rows)), size)
        source = probe.row[torch.arange(len(row_of)) - first[row_of] + start[row_of]]
        keys = peer[row_of] * n + source
        if probe.loops:
            keys = torch.cat([keys, peer * n + rows])
        return torch.bincount(keys.unique() // n, minlength=peers)

    # Features -------------------------------------------------------------------------

    def _fetched(
        self, grid: _Grid, bulk: list[Any], which: tuple[int, int], traffic: Traffic
    ) -> Tensor:
        """Prices the rows of the distinct nodes, and edges, of a bulk."""
        probe, others = self.probe, grid.blocks - 1
        total = torch.zeros(probe.size, dtype=torch.int64)
        groups = sum(map(bool, probe.widths))
        if not groups or not others:
            return total
        if which not in self._distinct_counts:
            self._distinct_counts[which] = self._distinct(bulk)
        for owners, width in zip(
            self._distinct_counts[which], probe.widths, strict=True
        ):
            if width:
                ids = grid.by_block(owners)
                total += 4 * grid.requests(ids, "row") + width * ids.sum(1)
        traffic.messages += 3 * others
        return total + _COUNT * (groups + 1) * others

    def _distinct(self, bulk: list[Any]) -> list[Tensor]:
        """Returns how many distinct rows of each owner a bulk has, [P, P], by group."""
        probe, kinds = self.probe, len(self.probe.row_bytes[0])
        counts = [
            torch.zeros(2 * (probe.size,), dtype=torch.int64) for _ in probe.widths
        ]
        for rank, own in enumerate(bulk):
            for group, width in enumerate(probe.widths):
                if not width:
                    continue
                if group < kinds:
                    node = torch.cat([b.nodes[group] for b in own]).unique()
                else:
                    pairs = [b.edges[group - kinds] for b in own]
                    node = torch.cat(pairs, 1).unique(dim=1)[1]
                owners = probe.owner[node]
                counts[group][rank] = torch.bincount(owners, minlength=probe.size)
        return counts


class _Grid:
    """Locates rows on a grid of P/c x c ranks, in tables [P, peers]."""

    def __init__(self, owner: Tensor, size: int, c: int) -> None:
        self.owner, self.size, self.c = owner, size, c
        self.blocks = size // c
        rank = torch.arange(size)
        self._block, self._twin = rank // c, rank % c

    def own_mask(self, axis: str) -> Tensor:
        """Returns a mask of each rank's own place in a table."""
        peers = self.blocks if axis == "row" else self.c
        own = self._block if axis == "row" else self._twin
        return torch.arange(peers) == own.unsqueeze(1)

    def by_block(self, owners: Tensor) -> Tensor:
        """Sums counts by owner [P, P] to counts by block, without the rank's own block."""
        counts = owners.view(self.size, self.blocks, self.c).sum(2)
        return counts.masked_fill(self.own_mask("row"), 0)

    def remote(self, ids: Sequence[Tensor], weight: Tensor | None = None) -> Tensor:
        """Counts the ids of each rank by the block that has them, without its own block."""
        counts = [_count_by(self.owner[i], self.size, i, weight) for i in ids]
        return self.by_block(torch.stack(counts))

    def requests(self, table: Tensor, axis: str) -> Tensor:
        """Returns the sum of the requests to each rank from others on its axis, [P]."""
        cube = table.view(self.blocks, self.c, -1)
        # by row: rank (b, j) is asked by (i, j) what these want of block b
        counts = cube.sum(0).t() if axis == "row" else cube.sum(1)
        return counts.reshape(-1)

    def server(self, rank: int, ids: Tensor, axis: str) -> Tensor:
        """Returns the peer that has the rows of ids, or fetches them."""
        owner = self.owner[ids]
        block = owner // self.c
        if axis == "row":
            return block
        return torch.where(block == rank // self.c, rank % self.c, owner % self.c)

    def pools(
        self, wanted: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Returns the rows that each rank fetches for its process row, and (ids, peers)."""
        twins = [(ids, self.server(r, ids, "col")) for r, ids in enumerate(wanted)]
        pools = []
        for first in range(0, self.size, self.c):
            line = twins[first : first + self.c]
            ids = torch.cat([i for i, _ in line])
            peer = torch.cat([w for _, w in line])
            pools += [ids[peer == j].unique() for j in range(self.c)]
        return pools, twins

    def by_twin(
        self, twins: Sequence[tuple[Tensor, Tensor]], weight: Tensor | None = None
    ) -> Tensor:
        """Counts the requests of each rank to the others of its process row, [P, c]."""
        rows = [_count_by(peer, self.c, ids, weight) for ids, peer in twins]
        return torch.stack(rows).masked_fill(self.own_mask("col"), 0)


def _count_by(peer: Tensor, size: int, ids: Tensor, weight: Tensor | None) -> Tensor:
    """Counts ids by peer, or sums their weights."""
    # of whole numbers, exact
    weights = None if weight is None else weight[ids].double()
    return torch.bincount(peer, weights, size).long()


def _distinct_rows(parts: list[Any]) -> list[Tensor]:
    """Returns the distinct rows that the hops of each rank need."""
    none = torch.empty(0, dtype=torch.int64)
    return [torch.cat([none, *(h.rows for h in own)]).unique() for own in parts]


def candidates(size: int) -> Iterator[int]:
    """Yields the numbers of copies c that divide `size` ranks."""
    return (c for c in range(1, size + 1) if size % c == 0)
