"""The compiled sampler where rows are long, nodes many, and weights zero."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
import torch
from batches import same

from pyg_distcomm.kernels import sample_jit
from pyg_distcomm.kernels.sample_cpu import Sampler
from pyg_distcomm.kernels.sample_device import DeviceSampler
from pyg_distcomm.kernels.sample_ops import (
    Relation,
    Request,
    SampleGraph,
    UnweightedNode,
)

CPU = torch.device("cpu")
NORESERVE = 0x4000  # of Linux; named by mmap from Python 3.13 on


def relation(
    source, target, sizes, edges, seed, pairs, dtype, weighted=False, timed=()
):
    """A random relation, its in-edges by (target, time, id)."""
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(sizes[source], (edges,), generator=g)
    dst = (torch.rand(edges, generator=g) ** 2 * sizes[target]).long()
    time = torch.randint(10, (edges,), generator=g)
    if "node" in timed:
        time = node_time(sizes[source])[src]
    order = torch.argsort(time, stable=True) if timed else torch.arange(edges)
    order = order[torch.argsort(dst[order], stable=True)]
    colptr = torch.zeros(sizes[target] + 1, dtype=torch.int64)
    colptr[1:] = torch.bincount(dst, minlength=sizes[target]).cumsum(0)
    row = torch.stack([src[order], order], 1).flatten() if pairs else src[order]
    weight = None
    if weighted:
        weight = torch.rand(edges, generator=g)
        weight[torch.rand(edges, generator=g) < 0.3] = 0
        weight[colptr[:-1][colptr.diff() > 0]] = 0.5  # a choice for every node
    return Relation(
        source,
        target,
        colptr,
        row.to(dtype),
        2 if pairs else 1,
        weight,
        time[order] if "edge" in timed else None,
    )


def node_time(size):
    return torch.arange(size) % 10


def graph(hetero=False, **kwargs):
    sizes = (40, 25, 3) if hetero else (60,)
    ends = [(0, 0), (0, 1), (1, 0), (2, 1), (1, 2)] if hetero else [(0, 0)]
    relations = tuple(
        relation(s, t, sizes, 400 if s != 2 else 30, 7 + k, **kwargs)
        for k, (s, t) in enumerate(ends)
    )
    timed = "node" in kwargs.get("timed", ())
    return SampleGraph(
        sizes, relations, tuple(node_time(n) if timed else None for n in sizes)
    )


def request(g, fan_out=(4, 3, 2), key=5, **kwargs):
    seeds = [(0, torch.tensor([3, 11, 3, 0, 59 % g.sizes[0], 3]))]
    if len(g.sizes) > 1:
        seeds.append((1, torch.tensor([2, 24])))
    if kwargs.pop("timed", False):
        kwargs["tree_time"] = torch.arange(sum(len(s) for _, s in seeds)) + 2
        kwargs["disjoint"] = True
    return Request(tuple(seeds), (tuple(fan_out),) * len(g.relations), key, **kwargs)


def test_many_draws_and_many_nodes():
    ends = torch.tensor([0, 3000] + [3000] * 59)
    star = Relation(0, 0, ends, torch.arange(3000) % 60, 1)
    star = SampleGraph((60,), (star,), (None,))
    for fan_out in (47, 48, 49, 700, 2999, 3000):
        wanted = Request(((0, torch.tensor([0])),), ((fan_out,),), 3)
        ours = Sampler(star)(wanted)
        same(ours, DeviceSampler(star, CPU)(wanted))
        assert ours.edge[0].unique().numel() == fan_out
    g = graph(pairs=True, dtype=torch.int32)
    seeds = ((0, torch.arange(60).repeat(40)),)  # the table of nodes grows
    wanted = Request(seeds, ((5, 5, 5),), 3, disjoint=True)
    same(Sampler(g)(wanted), DeviceSampler(g, CPU)(wanted))


def test_unweighted_node_is_named():
    colptr, row = torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1])
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0])
    g = SampleGraph((2,), (Relation(0, 0, colptr, row, 1, weight),), (None,))
    for draw in (Sampler(g), DeviceSampler(g, CPU)):
        with pytest.raises(UnweightedNode, match="into node 1 are zero"):
            draw(Request(((0, torch.tensor([0])),), ((2, 1),), 3))
        assert (
            draw(Request(((0, torch.tensor([1])),), ((-1,),), 3)).edge[0].numel() == 2
        )


def untouched(count, values, at):
    """Returns `count` int64 on pages that nothing has touched, but for values `at`."""
    pages = mmap.mmap(-1, 8 * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    out = np.frombuffer(pages, np.int64)
    out[at : at + len(values)] = values
    return out


@pytest.mark.skipif(sys.platform != "linux", reason="reserves 70 GB of addresses")
def test_a_frontier_of_more_than_2_to_31_nodes():
    size, draws, nodes = 100, 80, 3  # so many draws that a table finds repeats
    found = []
    for at in (0, 2**31):
        columns = [[7, 8, 9], [0] * nodes, [size] * nodes, [0, draws, 2 * draws, 240]]
        node, low, high, start = (untouched(at + 4, c, at) for c in columns)
        ends = np.array([at, at + nodes])
        out, keys = np.empty(nodes * draws, np.int64), np.array([0, 5], np.uint64)
        sample_jit.draw(keys, ends, node, None, low, high, start, False, out, 0, 1, 2)
        assert all(len(set(row)) == draws for row in out.reshape(nodes, draws))
        found.append(out)
    assert np.array_equal(*found)
