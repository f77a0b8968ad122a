"""The bytes of a link are those it foretold, as is the memory it takes beyond the exact one."""

import math

import tiers
import torch
import worlds
from links import LINKS, ONE, build, moved
from problems import grids

import pyg_distcomm as pdc
from pyg_distcomm.halo.codecs import ColumnMask
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.halo.schedule import Linear
from pyg_distcomm.nn import DistGCNConv, DistSAGEConv

LAYERS = DistSAGEConv, DistGCNConv


def priced(name, grid, keep=False, cutter="random", graph="undirected"):
    link = LINKS[name]()
    mesh, share, net = build(grid, link, cutter, graph, DistSAGEConv, keep)
    for t in range(7):
        foretold = link.price().total
        mesh.ledger.reset()
        net.zero_grad()
        loss = net(share.x, share.edge_index).square().sum()
        loss.backward()
        counted, price = moved(mesh), link.price()
        assert price.exact
        assert counted == price.total, (t, counted, price.total)
        if t > 1:
            assert foretold == counted, (t, counted, foretold)
        if t:  # the last call is exact from now on, and keeps nothing
            link.drain()
            assert link.held == price.kept, (t, link.held, price.kept)
        mesh.ledger.reset()
        with torch.no_grad():
            net.eval()(share.x, share.edge_index)
            net.train()
        link.step(float(10 - t))
    assert not link.state.exchanges or "forward" in str(link)


@tiers.cover(("grid", "name"), [(2, 1, 1), (2, 2, 1)], [*LINKS], step=5)
def test_bytes_are_those_foretold(name, grid):
    keep, graph = (False, "undirected") if grid[1] == 1 else (True, "directed")
    worlds.run(priced, math.prod(grid), name, grid, keep, "random", graph)


ODD = ["tiny", "isolated", "edgeless", "star"]


@tiers.cover(("cutter", "graph"), ["empty_rank", "lopsided"], ODD, step=3)
def test_bytes_where_ranks_have_little(graph, cutter):
    worlds.run(priced, 3, "varco late", (3, 1, 1), True, cutter, graph)
    worlds.run(priced, 3, "late by 2 and 1", (1, 3, 1), False, cutter, graph)


@worlds.on(2)
def test_the_price_of_an_epoch_that_has_passed_is_what_it_was():
    link = LinkPolicy(ColumnMask(8.0), Linear(8, 8.0, 1.0), warmup=4, exact_last=False)
    _, share, net = build((2, 1, 1), link, layer=DistSAGEConv)
    prices = []
    for _ in range(5):
        net(share.x, share.edge_index).square().sum().backward()
        prices.append(link.price())
        link.step()
    for t, price in enumerate(prices):
        past = link.price(t)
        assert (past.forward, past.backward) == (price.forward, price.backward), t


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
    worlds.run(trained, 2, LinkPolicy(ONE, late=1), (1, 2, 1), True)
    worlds.run(trained, 2, pdc.Sylvie(), (2, 1, 1), False)


@worlds.on(2)
def test_messages_are_freed_once_read():
    for late in (0, 1):
        link = LinkPolicy(ONE, late=late)
        _, share, net = build((2, 1, 1), link)
        topology = share.edge_index.topology
        coded = link.begin(net, topology.nodes, True).wrap(topology.locals.halo, 0)
        coded.begin(share.x.to_local())()
        inbox = link.state.exchanges[0, 0, 0, 0].buffers[False]
        assert (coded._forward_message.raw is None) == (late == 0)
        assert len(inbox.messages) == late


@tiers.parametrize("size", [2, 3, 4], [2])
def test_every_grid_is_coded(size):
    for grid in grids(size):
        worlds.run(priced, size, "late by 2 and 1", grid, False, "random", "directed")
