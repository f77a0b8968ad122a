"""Defines what `kernels.sample_cpu.Sampler` draws, in plain torch and Python.

Draws of a node come from a generator of its own,

    s = mix(mix(key ^ mix(t + G)) ^ mix(v + G)),    u_j = (mix(s + (j + 1) G) >>> 11) / 2^53

with mix and G those of `core_ops.keyed_bits`, v the node and t its tree: for disjoint
sampling the place of its seed, otherwise 0, or for a seed how many equal ones came before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyg_distcomm.kernels.sample_ops import (
    Minibatch,
    Relation,
    Request,
    SampleGraph,
    UnweightedNode,
)

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sample(graph: SampleGraph, request: Request) -> Minibatch:
    """Draws one minibatch, a node at a time; see `Request` for what is asked.

    At each hop, for each relation in order, each node that the hop before found first
    draws ``fan_out`` of its in-edges (all if it has fewer, or if -1). Sources not seen
    before become nodes, in the order in which they are found.
    """
    return _Drawing(graph, request).run()


class _Drawing:
    def __init__(self, graph: SampleGraph, request: Request) -> None:
        self.graph, self.request = graph, request
        self.nodes: list[list[tuple[int, int]]] = [[] for _ in graph.sizes]
        self.label: list[dict[tuple[int, int], int]] = [{} for _ in graph.sizes]
        self.edges: list[list[tuple[int, int, int]]] = [[] for _ in graph.relations]

    def run(self) -> Minibatch:
        self._seed()
        ends = [[len(nodes)] for nodes in self.nodes]
        drawn: list[list[int]] = [[] for _ in self.graph.relations]
        for hop in range(self.request.hops):
            for number in range(len(self.graph.relations)):
                end = ends[self.graph.relations[number].target]
                begin = end[hop - 1] if hop else 0
                drawn[number].append(self._expand(number, hop, begin, end[hop]))
            for end, nodes in zip(ends, self.nodes, strict=True):
                end.append(len(nodes))
        if self.request.induced:
            self.edges = [self._induced(r) for r in self.graph.relations]
        return self._result(ends, drawn)

    def _seed(self) -> None:
        """Enters the seeds; the copy of a seed is a node that no edge points to."""
        trees = 0
        for kind, seed in self.request.seeds:
            copies: dict[int, int] = {}
            for place, v in enumerate(seed.tolist()):
                copies[v] = copies.get(v, -1) + 1
                tree = trees + place if self.request.disjoint else copies[v]
                self.label[kind].setdefault((tree, v), len(self.nodes[kind]))
                self.nodes[kind].append((tree, v))
            trees += seed.numel()

    def _expand(self, number: int, hop: int, begin: int, end: int) -> int:
        relation = self.graph.relations[number]
        before = len(self.edges[number])
        for target in range(begin, end):
            tree, v = self.nodes[relation.target][target]
            entries = self._eligible(relation, tree, v)
            fan_out = self.request.fan_outs[number][hop]
            if self.request.latest and fan_out >= 0:
                entries = entries[len(entries) - min(fan_out, len(entries)) :]
            for e in self._draw(number, hop, fan_out, tree, v, entries):
                name = (tree if self.request.disjoint else 0, _source(relation, e))
                nodes, label = self.nodes[relation.source], self.label[relation.source]
                if name not in label:
                    label[name] = len(nodes)
                    nodes.append(name)
                self.edges[number].append((label[name], target, _edge_id(relation, e)))
        return len(self.edges[number]) - before

    def _eligible(self, relation: Relation, tree: int, v: int) -> list[int]:
        """Returns the in-edges of a node that are no later than its tree."""
        entries = range(int(relation.colptr[v]), int(relation.colptr[v + 1]))
        limit, time = self.request.tree_time, self.graph.time[relation.source]
        if limit is None or (relation.time is None and time is None):
            return list(entries)
        if relation.time is not None:
            return [e for e in entries if relation.time[e] <= limit[tree]]
        assert time is not None
        return [e for e in entries if time[_source(relation, e)] <= limit[tree]]

    def _draw(
        self, number: int, hop: int, fan_out: int, tree: int, v: int, entries: list[int]
    ) -> list[int]:
        relation = self.graph.relations[number]
        weight, replace = relation.weight, self.request.replace
        choices = len(entries)
        if weight is not None and fan_out > 0 and choices:
            choices = int((weight[entries] > 0).sum())
            if not choices:
                raise UnweightedNode(number, v)
        if fan_out == 0 or not entries:
            return []
        if fan_out < 0 or (choices <= fan_out and not replace):
            if fan_out < 0 or choices == len(entries):
                return entries
        key = (self.request.key + number * _GOLDEN) % (1 << 63)
        generator = mix(
            mix(key ^ mix(tree + _GOLDEN & _WORD)) ^ mix(v + _GOLDEN & _WORD)
        )
        draws = fan_out if replace else min(fan_out, choices)
        if self.request.labor:
            key = self.request.key + ((hop + 1 << 20) + relation.source) * _GOLDEN
            return _by_source(key % (1 << 63), relation, entries, draws)
        if weight is None:
            return [entries[k] for k in _floyd(generator, len(entries), draws, replace)]
        if replace:
            return _by_running_sum(generator, entries, weight, draws)
        return _by_clocks(generator, relation, entries, draws)

    def _induced(self, relation: Relation) -> list[tuple[int, int, int]]:
        found = []
        for target, (tree, v) in enumerate(self.nodes[relation.target]):
            for e in self._eligible(relation, tree, v):
                name = (tree if self.request.disjoint else 0, _source(relation, e))
                label = self.label[relation.source].get(name)
                if label is not None:
                    found.append((label, target, _edge_id(relation, e)))
        return found

    def _result(self, ends: list[list[int]], drawn: list[list[int]]) -> Minibatch:
        trees = [_vector([tree for tree, _ in nodes]) for nodes in self.nodes]
        edges = [torch.tensor(found).view(-1, 3).long().T for found in self.edges]
        return Minibatch(
            node=[_vector([v for _, v in nodes]) for nodes in self.nodes],
            tree=trees if self.request.disjoint else None,
            edge_index=[found[:2].contiguous() for found in edges],
            edge=[found[2].contiguous() for found in edges],
            nodes_per_hop=[
                [b - a for a, b in zip([0, *end], end, strict=False)] for end in ends
            ],
            edges_per_hop=drawn,
        )


def _floyd(generator: int, size: int, draws: int, replace: bool) -> list[int]:
    """Draws places in 0 .. size-1; without replacement by Floyd's method."""
    picks: list[int] = []
    for k in range(draws):
        top = size if replace else size - draws + k + 1
        pick = int(_uniform(generator, k) * top)
        picks.append(top - 1 if not replace and pick in picks else pick)
    return picks


def _by_running_sum(
    generator: int, entries: list[int], weight: Tensor, draws: int
) -> list[int]:
    """Draws with replacement: the first entry whose running sum exceeds u times the sum."""
    running = weight[entries].double().cumsum(0)
    picks = []
    for k in range(draws):
        goal = torch.tensor(_uniform(generator, k) * float(running[-1])).double()
        place = int(torch.searchsorted(running, goal, right=True))
        picks.append(entries[min(place, len(entries) - 1)])
    return picks


def _by_clocks(
    generator: int, relation: Relation, entries: list[int], draws: int
) -> list[int]:
    """Draws without replacement: the entries with the least -log(u) / weight.

    The number u of an edge is keyed by its id.
    """
    assert relation.weight is not None
    clocks = []
    for e in entries:
        weight = float(relation.weight[e])
        if weight > 0:
            u = _uniform(generator, _edge_id(relation, e)) + 2.0**-54
            clocks.append((-math.log(u) / weight, e))
    return [e for _, e in sorted(clocks)[:draws]]


def _by_source(
    key: int, relation: Relation, entries: list[int], draws: int
) -> list[int]:
    """Draws the entries with the least u, or -log(u) / weight.

    The j-th entry from one source has number j of the generator of the source.
    """
    clocks = []
    met: dict[int, int] = {}
    for e in entries:
        source = _source(relation, e)
        weight = 1.0 if relation.weight is None else float(relation.weight[e])
        if weight <= 0:
            continue
        generator = mix(mix(key ^ mix(_GOLDEN)) ^ mix(source + _GOLDEN & _WORD))
        u = _uniform(generator, met.setdefault(source, 0))
        met[source] += 1
        if relation.weight is not None:
            u = -math.log(u + 2.0**-54) / weight
        clocks.append((u, e))
    return [e for _, e in sorted(clocks)[:draws]]


def _source(relation: Relation, e: int) -> int:
    return int(relation.row[e * relation.stride])


def _edge_id(relation: Relation, e: int) -> int:
    return int(relation.row[2 * e + 1]) if relation.stride == 2 else e


def _uniform(generator: int, draw: int) -> float:
    return (mix(generator + (draw + 1) * _GOLDEN & _WORD) >> 11) * 2.0**-53


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def _vector(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
