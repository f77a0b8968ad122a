"""The sampler of devices draws the minibatches of the CPU's, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import tiers
import torch
from test_sample_kernels import graph, request, same

from pyg_distcomm.kernels.minibatch import Minibatch, UnweightedNode
from pyg_distcomm.kernels.sample_cpu import Sampler
from pyg_distcomm.kernels.sample_device import DeviceSampler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def on_host(found):
    lists = found.node, found.tree, found.edge_index, found.edge
    moved = [t if t is None else [a.cpu() for a in t] for t in lists]
    return Minibatch(*moved, found.nodes_per_hop, found.edges_per_hop)


def equal(g, wanted, device="cpu", pinned=False):
    sampler = DeviceSampler(g, torch.device(device), pinned)
    found = sampler(wanted)
    assert all(t.device.type == device for t in [*found.node, *found.edge_index])
    same(on_host(found), Sampler(g)(wanted))


RULES = {
    "plain": {},
    "replace": {"replace": True},
    "weighted": {"weighted": True},
    "weighted, replace": {"weighted": True, "replace": True},
    "labor": {"labor": True},
    "weighted labor": {"weighted": True, "labor": True},
}


@pytest.mark.parametrize("device", DEVICES)
@tiers.parametrize(
    ("hetero", "rule", "timed", "latest", "disjoint", "induced", "table"),
    [
        case
        for case in itertools.product(
            [False, True],
            RULES,
            [(), ("node",), ("edge",)],
            *[[False, True]] * 4,
        )
        if case[2] or not case[3]
    ],
    slice(0, None, 9),
)
def test_device_equals_cpu(
    hetero, rule, timed, latest, disjoint, induced, table, device, monkeypatch
):
    if not table:
        monkeypatch.setattr("pyg_distcomm.kernels.sample_device.TABLE", 0)
    options = dict(RULES[rule])
    weighted = options.pop("weighted", False)
    for pairs, dtype in ((True, torch.int32), (False, torch.int64)):
        g = graph(hetero, pairs=pairs, dtype=dtype, weighted=weighted, timed=timed)
        for key, fan_out in enumerate([(4, 3, 2), (-1, 2), (0, 5), (60, 1), (1,)]):
            wanted = request(
                g,
                fan_out,
                2**62 + key,
                disjoint=disjoint,
                induced=induced,
                timed=bool(timed),
                latest=latest,
                **options,
            )
            try:
                theirs = Sampler(g)(wanted)
            except UnweightedNode as error:
                with pytest.raises(UnweightedNode) as found:
                    DeviceSampler(g, torch.device(device))(wanted)
                assert str(found.value) == str(error)
                assert found.value.relation == error.relation
                continue
            found = DeviceSampler(g, torch.device(device))(wanted)
            same(on_host(found), theirs)
