"""The bytes of a link are those it foretold, and what it keeps is freed."""

from __future__ import annotations

import tiers
import torch
import worlds
from links import LINKS, ONE, build, moved
from problems import grids

import pyg_distcomm as pdc
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

LAYERS = DistSAGEConv, DistGCNConv


def priced(name, grid, keep=False, cutter="random", graph="undirected", sized=True):
    link = LINKS[name]()
    mesh, share, net = build(grid, link, cutter, graph, DistSAGEConv, keep)
    for t in range(7):
        foretold = link.price().total
        mesh.ledger.reset()
        net.zero_grad()
        loss = net(share.x, share.edge_index).square().sum()
        loss.backward()
        counted, price = moved(mesh), link.price()
        assert price.exact or not sized
        if price.exact:
            assert counted == price.total, (t, counted, price.total)
            if t > 1:
                assert foretold == counted, (t, counted, foretold)
        else:
            assert counted <= price.total
        if t:  # the last call is exact from now on, and keeps nothing
            link.drain()
            if price.exact:
                assert link.held == price.kept, (t, link.held, price.kept)
            assert link.held <= price.kept
        mesh.ledger.reset()
        with torch.no_grad():
            net.eval()(share.x, share.edge_index)
            net.train()
        link.step(float(10 - t))
    assert not link.state.exchanges or "forward" in str(link)


@tiers.cover(("grid", "name"), [(4, 1, 1), (2, 2, 1)], [*LINKS], step=5)
def test_bytes_are_those_foretold(name, grid):
    keep, graph = (False, "undirected") if grid[0] == 4 else (True, "directed")
    worlds.run(priced, 4, name, grid, keep, "random", graph, name in LINKS)


ODD = ["tiny", "isolated", "edgeless", "star"]


@tiers.cover(("cutter", "graph"), ["empty_rank", "lopsided"], ODD, step=2)
def test_bytes_where_ranks_have_little(graph, cutter):
    worlds.run(priced, 4, "varco late", (4, 1, 1), True, cutter, graph)
    worlds.run(priced, 4, "late by 2 and 1", (1, 4, 1), False, cutter, graph)


def trained(link, grid, learnt):
    """With weights of edges that are learnt, degrees travel each time; or a kept product."""
    mesh, share, net = build(grid, link, layer=LAYERS[learnt], keep=not learnt)
    weight = [share.edge_weight.clone().requires_grad_()] if learnt else []
    for t in range(4):
        foretold = link.price().total
        mesh.ledger.reset()
        net(share.x, share.edge_index, *weight).square().sum().backward()
        counted = moved(mesh)
        if t:  # the first product plans
            assert foretold == link.price().total == counted
        link.step()
    assert ("degrees" in str(link)) == learnt


def test_bytes_of_weights_that_are_learnt_and_of_a_product_that_is_kept():
    worlds.run(trained, 2, LinkPolicy(ONE, late=1), (2, 1, 1), True)
    worlds.run(trained, 4, LinkPolicy(ONE, late=1), (2, 2, 1), True)
    worlds.run(trained, 2, pdc.Sylvie(), (2, 1, 1), False)


def opened(late):
    link = LinkPolicy(ONE, late=late)
    _, share, net = build((2, 1, 1), link)
    topology = share.edge_index.topology
    call = link.begin(net, topology.nodes, True)
    coded = call.wrap(topology.locals.halo, 0)
    coded.begin(share.x.to_local())()
    inbox = link.state.exchanges[0, 0, 0, 0].buffers[False]
    return coded._forward_message.raw is None, len(inbox.messages)


def test_messages_are_freed_once_read():
    assert worlds.run(opened, 2, 0) == [(True, 0)] * 2
    assert worlds.run(opened, 2, 1) == [(False, 1)] * 2


@tiers.parametrize("size", [2, 3, 4], [3])
def test_every_grid_is_coded(size):
    for grid in grids(size):
        worlds.run(priced, size, "late by 2 and 1", grid, False, "random", "directed")
