"""What a plan says of a loader: the bytes of the ledger, and a ranking that makes sense."""

from __future__ import annotations

import json

import batches
import pytest
import tiers
import torch
import worlds
from test_partitioned_sampling import owners

import pyg_distcomm as pdc
from pyg_distcomm.cli.command import main
from pyg_distcomm.datasets import generated
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
CHOICES = [
    (1, 1, "owner"),
    (1, 2, "owner"),
    (1, 3, "requester"),
    (2, 2, "requester"),
    (2, 3, "owner"),
]
CHOICES += [(4, 1, "requester"), (3, 2, "requester"), (3, 1, "owner")]
EVERY = (2, 3, 4, 6, 8)
FEW = [(3, ("nodes", "ladies")), (2, ("trees", "fastgcn", "twice"))]


def graph():
    data = batches.graph(n=150, e=1200)
    data.heavy = 0.5 + torch.rand(1200, generator=torch.Generator().manual_seed(0))
    return data


TYPED = {
    "typed": {
        "num_neighbors": [4, 3],
        "batch_size": 4,
        "input_nodes": ("paper", torch.arange(30)),
        "seed": 3,
    },
    "typed trees": {
        "num_neighbors": [3, 2],
        "batch_size": 6,
        "input_nodes": "author",
        "disjoint": True,
        "seed": 1,
    },
    "some relations": {
        "num_neighbors": {
            kind: [2, 3] if kind[0] == "author" else [3, 0]
            for kind in batches.hetero().edge_types
        },
        "batch_size": 5,
        "input_nodes": ("paper", torch.tensor([1, 4, 4, 9, 13, 2, 1, 8])),
        "seed": 2,
    },
}
LOADERS |= TYPED


def by_type(data, owner):
    """Owners of the nodes of each type, of those of all one after the other."""
    found, begin = {}, 0
    for store in data.node_stores:
        found[store._key] = owner[begin : begin + store.num_nodes]
        begin += store.num_nodes
    return found


def counted(size, loaders):
    mesh, data = worlds.mesh(), graph()
    owner = owners(data.num_nodes, size)
    if loaders[0] in TYPED:
        data = batches.hetero()
        owner = by_type(data, owners(data.num_nodes, size))
    share = pdc.partition(data, mesh, owner)
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
    [
        *FEW,
        (3, ("typed", "some relations")),
        *((p, tuple(name for name in LOADERS if name not in TYPED)) for p in EVERY),
        *((p, tuple(TYPED)) for p in EVERY),
    ],
    [*FEW[:1], (3, ("typed", "some relations"))],
)
def test_the_bytes_of_a_plan_are_those_of_the_ledger(size, loaders):
    data = batches.hetero() if loaders[0] in TYPED else graph()
    owner = pdc.Partition.from_owner(owners(data.num_nodes, size), size)
    ledgers = worlds.run(counted, size, size, loaders)
    for name in loaders:
        asked = {**LOADERS[name], "probe": 99}
        plans = pdc.plan(data, ranks=size, partition=owner, loader=asked)
        assert all(plan.exact for plan in plans)
        for key, _ in ledgers[0].items():
            if key[0] != name or key[2] > 16:
                continue
            _, c, k, place = key
            one = pdc.plan(
                data,
                ranks=size,
                partition=owner,
                loader={**asked, "replication": c, "bulk_size": k, "sample_at": place},
            ).best
            for rank, ledger in enumerate(ledgers):
                want = one.sample_by_rank[rank], one.fetch_by_rank[rank]
                assert tuple(ledger[key].values()) == want, (key, rank)


def planned(data=None, ranks=4, **loader):
    asked = {"num_neighbors": [4, 3], "batch_size": 9, "seed": 0, **loader}
    asked = {name: value for name, value in asked.items() if value is not None}
    return pdc.plan(
        graph() if data is None else data, ranks=ranks, partition="block", loader=asked
    )


def test_the_ranking_follows_what_travels():
    plans = planned(probe=99)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    assert plans.best.replication == 4  # where memory does not count
    for k in (1, 2, 4):
        for place in ("owner", "requester"):
            whole, half, own = (plans.of(c, k, place) for c in (1, 2, 4))
            assert whole.memory < half.memory < own.memory
            assert sum(whole.fetch_by_rank) > sum(half.fetch_by_rank)
            more = plans.of(1, 2 * k, place)  # rows are fetched once a bulk
            assert sum(more.fetch_by_rank) < sum(whole.fetch_by_rank)
            assert more.messages < whole.messages
    # a row of eight in-edges is longer than four draws, but goes once a bulk
    assert plans.of(1, 1, "owner").bytes < plans.of(1, 1, "requester").bytes
    every = planned(probe=99, num_neighbors=[-1, -1], bulk_size=5)
    assert every.of(1, 5, "requester").bytes < every.of(1, 5, "owner").bytes


def test_memory_refuses_copies():
    plans = planned()
    lean = min(plans, key=lambda plan: plan.memory)
    some = pdc.plan(
        graph(),
        ranks=4,
        partition="block",
        memory=lean.memory,
        loader={"num_neighbors": [4, 3], "batch_size": 9, "seed": 0},
    )
    assert len(some) + len(some.refused) == len(plans)
    assert {plan.memory for plan in some} == {lean.memory}
    assert "beside the share" in str(some)
    with pytest.raises(ValueError, match="no plan can be run; the leanest needs"):
        _ = pdc.plan(
            graph(),
            ranks=4,
            partition="block",
            memory=1,
            loader={"num_neighbors": [4], "batch_size": 9},
        ).best


def test_a_probe_is_scaled_to_the_epoch():
    short, whole = planned(probe=2, bulk_size=2), planned(probe=99, bulk_size=2)
    one, other = short.of(1, 2, "owner"), whole.of(1, 2, "owner")
    assert not one.exact
    assert other.exact
    assert one.total_bytes == pytest.approx(other.total_bytes, rel=0.2)
    assert "scaled from a probe" in str(short)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_neighbors": None}, "needs either num_neighbors"),
        ({"num_nodes_per_layer": [3]}, "needs either num_neighbors"),
        ({"time_attr": "t"}, "time_attr='t' changes what travels"),
        ({"replication": 3}, r"must divide 4 ranks: one of \[1, 2, 4\]"),
        ({"bulk_size": 0}, "bulk_size must be 'auto' or at least 1, got 0"),
        ({"sample_at": "home"}, "sample_at must be one of"),
        ({"probe": 0}, "probe must be a whole number from 1 on, got 0"),
        ({"input_nodes": []}, "no minibatches to plan for"),
        ({"input_nodes": [1], "even_batches": "drop"}, "do not give each of 4 ranks"),
    ],
)
def test_what_has_no_price_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        planned(**options)


def test_a_partitioned_topology_is_what_is_priced():
    assert planned(topology="partitioned").best.bytes == planned().best.bytes


def test_a_share_and_a_models_options_are_refused():
    loader = {"num_neighbors": [2], "batch_size": 9}
    with pytest.raises(ValueError, match="leave out widths"):
        pdc.plan(graph(), [5, 4], 2, loader=loader)
    with pytest.raises(TypeError, match="plan before"):
        pdc.plan(pdc.partition(graph(), worlds.mesh()), ranks=1, loader=loader)
    with pytest.raises(TypeError, match="loader is a dictionary"):
        pdc.plan(graph(), ranks=2, loader=[5, 5])
    with pytest.raises(TypeError, match="Data, got Tensor"):
        pdc.plan(graph().edge_index, ranks=2, loader=loader)


def test_the_command_prints_plans_of_a_loader(capsys):
    words = "plan generated-200 --ranks 2 --num-neighbors 3 2 --batch-size 16 --method block"
    assert main(words.split()) == 0
    assert "node-wise, 3 minibatches a rank" in capsys.readouterr().out
    words = "plan generated-200 --ranks 2 --num-nodes-per-layer 9 --rule fastgcn --json"
    assert main([*words.split(), "--method", "block"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["replication"] for one in found["plans"]} == {1, 2}


@pytest.mark.parametrize(
    ("words", "unread"),
    [
        ("--widths 8 4 --batch-size 3 --probe 2", "--batch-size, --probe"),
        ("--num-neighbors 3 2 --layers sage --rule ladies", "--layers, --rule"),
        ("--num-nodes-per-layer 9 --inputs trained", "--inputs"),
    ],
)
def test_the_command_refuses_what_a_plan_would_not_read(words, unread, capsys):
    assert main(["plan", "generated-200", "--ranks", "2", *words.split()]) == 2
    assert f"does not read {unread}: leave it out" in capsys.readouterr().err


def test_the_command_takes_the_training_nodes_of_a_folder(tmp_path, capsys):
    folder = str(tmp_path / "parts")
    assert (
        main(
            ["partition", "generated-200", folder, *"--parts 2 --method block".split()]
        )
        == 0
    )
    words = f"plan {folder} --num-neighbors 3 2 --batch-size 16"
    assert main(words.split()) == 0
    want = generated(200)
    mine = int(max(want.train_mask[:100].sum(), want.train_mask[100:].sum()))
    assert f"node-wise, {-(-mine // 16)} minibatches a rank" in capsys.readouterr().out
    assert main([*words.split(), "--codec", "1 bit"]) == 2
    assert "leave out" in capsys.readouterr().err


def test_bytes_beyond_what_float32_holds_are_whole():
    data = graph()
    data.x = torch.zeros(1, 1 << 18, dtype=torch.float64).expand(150, -1)
    one = planned(data, probe=99, bulk_size=3, replication=1, sample_at="owner").best
    data.x = data.x[:, :1]
    less = planned(data, probe=99, bulk_size=3, replication=1, sample_at="owner").best
    for wide, narrow in zip(one.fetch_by_rank, less.fetch_by_rank, strict=True):
        assert wide > 1 << 26
        assert (wide - narrow) % (8 * ((1 << 18) - 1)) == 0
