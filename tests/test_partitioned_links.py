"""Minibatches around links of a graph spread over ranks are those of the whole graph."""

from __future__ import annotations

import batches
import pytest
import tiers
import torch
import worlds
from test_partitioned_loader import GRIDS, cut
from test_partitioned_sampling import timed, timed_hetero
from torch_geometric.sampler import NegativeSampling

import pyg_distcomm as pdc
from pyg_distcomm.loader import (
    DistLayerLoader,
    DistLinkNeighborLoader,
    DistNeighborLoader,
)

pytestmark = pytest.mark.usefixtures("place")

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def _pairs(data):
    return data.edge_index[:, ::3]


def _weighted():
    return NegativeSampling("triplet", 2, dst_weight=torch.arange(60) % 3 + 0.5)


def _timed_links(data):
    pairs = _pairs(data)
    return {"edge_label_index": pairs, "edge_label_time": data.time[pairs[1]] + 5}


def _timed_types(data):
    pairs = data[WRITES].edge_index[:, :40]
    when = data["paper"].time[pairs[1]] + 20
    return {"edge_label_index": (WRITES, pairs), "edge_label_time": when}


CASES = {
    "pairs": (batches.graph, lambda d: {"edge_label_index": _pairs(d)}),
    "all edges": (batches.graph, lambda d: {"batch_size": 50}),
    "one edge of other strides": (
        batches.graph,
        lambda d: {"edge_label_index": d.edge_index[:, ::3][:, :1]},
    ),
    "own edges": (
        batches.graph,
        lambda d: {"edge_label_index": d.edge_index, "batch_size": 50},
    ),
    "labels": (
        batches.graph,
        lambda d: {
            "edge_label_index": _pairs(d),
            "edge_label": torch.arange(_pairs(d).size(1)),
            "neg_sampling": "binary",
        },
    ),
    "ratio": (
        batches.graph,
        lambda d: {"edge_label_index": _pairs(d), "neg_sampling_ratio": 1.5},
    ),
    "triplets": (
        batches.graph,
        lambda d: {"edge_label_index": _pairs(d), "neg_sampling": _weighted()},
    ),
    "own weights": (
        batches.graph,
        lambda d: {
            "edge_label_index": d.edge_index,
            "neg_sampling": NegativeSampling(
                "binary", 1.5, src_weight=d.x[:, 0].abs(), dst_weight=d.x[:, 1].abs()
            ),
            "batch_size": 50,
        },
    ),
    "disjoint": (
        batches.graph,
        lambda d: {
            "edge_label_index": _pairs(d),
            "neg_sampling": "binary",
            "disjoint": True,
        },
    ),
    "disjoint triplets": (
        batches.graph,
        lambda d: {
            "edge_label_index": _pairs(d),
            "neg_sampling": NegativeSampling("triplet", 2),
            "disjoint": True,
        },
    ),
    "bidirectional": (
        batches.graph,
        lambda d: {"edge_label_index": _pairs(d), "subgraph_type": "bidirectional"},
    ),
    "times": (timed, lambda d: {**_timed_links(d), "time_attr": "time"}),
    "times, negatives": (
        timed,
        lambda d: {**_timed_links(d), "time_attr": "time", "neg_sampling": "binary"},
    ),
    "types": (
        batches.hetero,
        lambda d: {"edge_label_index": WRITES, "neg_sampling": "binary"},
    ),
    "one type": (
        batches.hetero,
        lambda d: {
            "edge_label_index": (CITES, d[CITES].edge_index[:, :30]),
            "neg_sampling": NegativeSampling("triplet", 1),
            "disjoint": True,
        },
    ),
    "times of types": (
        timed_hetero,
        lambda d: {
            **_timed_types(d),
            "time_attr": "time",
            "neg_sampling": NegativeSampling("triplet", 2),
        },
    ),
}


def _compared(size, c, case, place):
    mesh = worlds.mesh()
    make, options = CASES[case]
    data = make()
    share = pdc.partition(data, mesh, cut(data, size))
    given = {"num_neighbors": [3, 2], "batch_size": 7, "shuffle": True, "seed": 11}
    whole = DistLinkNeighborLoader(
        data, **batches.arguments(**{**given, **options(data)})
    )
    own = options(share if case.startswith("own") else data)
    part = DistLinkNeighborLoader(
        share,
        **batches.arguments(**{**given, **own}, replication=c, bulk_size=3, **place),
    )
    batches.equal_epochs(whole, part)


@tiers.cover(
    ("world", "case", "where"),
    GRIDS,
    list(CASES),
    [{}, {"sample_at": "requester"}, {"topology": "replicated"}],
    step=4,
)
def test_links_of_a_share_are_those_of_the_whole_graph(world, case, where):
    size, c = world
    worlds.run(_compared, size, size, c, case, where)


@pytest.mark.parametrize("case", ["a vector", "of one rank", "out of range", "workers"])
@worlds.on(2)
def test_what_is_wrong_is_refused_on_all_ranks(case):
    mesh = worlds.mesh()
    data = batches.graph()
    share = pdc.partition(data, mesh, "block")
    pairs, said = {
        "a vector": (torch.arange(4), r"must be \[2, k\]"),
        "of one rank": (_pairs(data) if mesh.rank else None, "edge_label_index"),
        "out of range": (torch.tensor([[0], [60]]), "there are 60 nodes"),
        "workers": (_pairs(data), "num_workers"),
    }[case]
    workers = 2 * (case == "workers")
    with pytest.raises(ValueError, match=said):
        list(
            DistLinkNeighborLoader(
                share, [2], edge_label_index=pairs, num_workers=workers
            )
        )
    weighted = [
        NegativeSampling("binary", dst_weight=torch.arange(60) + r) for r in (1, 2)
    ]
    for pair in (["binary", None], weighted, ["binary", weighted[0]]):
        with pytest.raises(ValueError, match="neg_sampling=NegativeSampling"):
            DistLinkNeighborLoader(share, [2], neg_sampling=pair[mesh.rank])


ALONE = {
    "workers": ({"num_workers": 2}, "num_workers=2"),
    "topology": ({"topology": "x"}, "topology must be one of"),
    "features": ({"features": 3}, "features must be a DistFeatureStore"),
    "bulks": ({"bulk_size": 0}, "bulk_size must be"),
}


@pytest.mark.parametrize("case", ALONE)
@worlds.on(2)
def test_what_one_rank_alone_has_wrong_is_refused_on_all(case):
    share = pdc.partition(batches.graph(), worlds.mesh(), "block")
    options, said = ALONE[case]
    options = options if worlds.mesh().rank else {}
    kinds = DistNeighborLoader, DistLinkNeighborLoader, DistLayerLoader
    for kind in kinds:
        with pytest.raises((TypeError, ValueError), match=said):
            kind(share, [2, 2], **batches.arguments(batch_size=4, **options))
    with pytest.raises(ValueError, match="num_nodes_per_layer must hold"):
        DistLayerLoader(share, [-2 if worlds.mesh().rank else 2], batch_size=4)
    with pytest.raises(ValueError, match="'foo' is not a valid"):
        DistLinkNeighborLoader(
            share, [2], neg_sampling="foo" if worlds.mesh().rank else None
        )
