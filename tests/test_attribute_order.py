"""Shares list their attributes in the order of the graph, on all ranks alike."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
import tiers
import torch
import torch_geometric.transforms as T
import worlds
from torch_geometric.data import Batch, Data, HeteroData, TemporalData

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.loader import NeighborLoader, TemporalDataLoader

NAMES = "zeta alpha mid beta omega pi".split()
ENDS = [("b", "of", "a"), ("a", "to", "c"), ("c", "by", "b")]


class Citations(Data):
    def __init_subclass__(cls, **kwargs):
        raise AssertionError("a class below a script's own")

    def keys(self):
        return [name for name in super().keys() if name != "mid"]  # noqa: SIM118


def graph(kind=Data, n=24):
    g = torch.Generator().manual_seed(1)
    data = kind(edge_index=torch.randint(n, (2, 3 * n), generator=g))
    for i, name in enumerate(NAMES):
        data[name] = torch.full((n,), 1.0 + i)
        data[f"edge_{name}"] = torch.full((3 * n,), 1.0 + i)
    data.about, data.num_nodes = "text", n
    return data


def typed(nodes="bca", ends=ENDS):
    data = HeteroData()
    for kind in nodes:
        data[kind].num_nodes = 12
        for i, name in enumerate(NAMES):
            data[kind][name] = torch.full((12,), ord(kind) + float(i))
    for source, relation, target in ends:
        edges = torch.arange(12).repeat(2, 1)
        data[source, relation, target].edge_index = edges
        data[source, relation, target].edge_attr = torch.ones(12, 2)
    return data


def events():
    data = TemporalData(*torch.arange(60).view(3, 20), torch.ones(20, 2))
    for name in NAMES:
        data[name] = torch.ones(20, 2)
    return data


def lists(data):
    names = [data.keys()]
    if not isinstance(data, TemporalData):
        names += [data.node_attrs(), data.edge_attrs()]
    if isinstance(data, HeteroData):
        names += [data.metadata(), list(data.collect("zeta"))]
    return [*names, list(data.to_dict())]


def shares(mesh):
    """Returns shares of each kind of data, and what scripts make of them, by name."""
    plain = pdc.partition(graph(), mesh, "random")
    several = pdc.partition(typed(), mesh, "random")
    found = {"plain": plain, "several": several, "events": pdc.partition(events())}
    found["mine"] = pdc.partition(graph(Citations), mesh, "random")
    batch = Batch.from_data_list([graph(), graph()])
    found["batch"] = pdc.partition(batch, mesh)
    for name, share in list(found.items()):
        found |= {
            f"{name}: clone": share.clone(),
            f"{name}: copy": copy.copy(share),
            f"{name}: to": share.to("cpu"),
        }
    kept = torch.arange(10)
    return found | {
        "part": plain.subgraph(kept),
        "edges": plain.edge_subgraph(kept),
        "types": several.node_type_subgraph(["b", "a"]),
        "joined": several.to_homogeneous(),
        "reversed": T.ToUndirected()(several),
        "slice": found["events"][3:8],
        "sampled": next(iter(NeighborLoader(plain, [2], batch_size=24 // mesh.size))),
        "events of a batch": next(iter(TemporalDataLoader(events(), 8))),
    }


@tiers.parametrize("size", [1, 2, 3], [2])
@worlds.on()
def test_a_share_lists_attributes_in_the_order_of_the_graph(size):
    found = shares(worlds.mesh())
    whole = graph()
    edges = [f"edge_{name}" for name in NAMES]
    for name in ("plain", "plain: clone", "plain: copy", "part", "edges"):
        share = found[name]
        assert share.keys() == list(whole.to_dict()), name
        assert share.node_attrs() == NAMES
        assert share.edge_attrs() == ["edge_index", *edges]
        assert share.__class__ is Data
        assert repr(share).startswith("Data(edge_index=")
    mine = found["mine: clone"]
    assert isinstance(mine, Citations)
    assert mine.__class__ is Citations
    assert mine.keys() == [name for name in whole.to_dict() if name != "mid"]
    assert "mid" not in mine
    assert found["several"].metadata() == typed().metadata()
    assert found["several"].node_attrs() == NAMES
    assert found["events: to"].keys() == list(events().to_dict())
    batch = found["batch: clone"]
    assert batch.__class__ is type(Batch.from_data_list([graph()]))
    assert batch.node_attrs() == [*NAMES, "batch"]
    assert batch.get_example(1).keys()
    again = pickle.loads(pickle.dumps(found["sampled"]))
    assert type(again) is Data
    assert again.edge_index.size(0) == 2
    later = copy.copy(found["plain"])
    later.first, later.second = later.zeta + 1, later.zeta
    assert later.keys()[-2:] == later.node_attrs()[-2:] == ["first", "second"]


@tiers.parametrize("size", [2, 3], [3])
@worlds.on()
def test_a_share_takes_the_order_of_rank_0(size):
    mesh = worlds.mesh()
    first = mesh.rank == 0
    data = graph()
    names = list(data.to_dict()) if first else list(data.to_dict())[::-1]
    share = pdc.partition(Data(**{name: data[name] for name in names}), mesh, "random")
    assert [n for n in share.keys() if n in NAMES] == NAMES  # noqa: SIM118
    assert {n: int(share[n].max()) for n in share.node_attrs()} == dict(
        zip(NAMES, range(1, 7), strict=True)
    )
    several = typed() if first else typed("abc", ENDS[::-1])
    share = pdc.partition(several, mesh, "random")
    assert share.metadata() == typed().metadata()
    assert all(share[kind].zeta.max() == ord(kind) for kind in share.node_types)


def on_ranks_with_hash_seeds():
    mesh = pdc.init(timeout=120)
    torch.manual_seed(0)
    assert len(set(collectives.all_gather_object(hash("x"), mesh.world))) == mesh.size
    for name, share in shares(mesh).items():
        found = lists(share)
        if name == "joined":  # PyG's to_homogeneous takes them from a set
            found = [sorted(each) for each in found]
        every = collectives.all_gather_object(found, mesh.world)
        assert all(other == every[0] for other in every), (name, every)
    share, whole = pdc.partition(graph(), mesh, "random"), graph()
    summed = [*share.node_attrs(), *share.edge_attrs()]
    assert {k: float(share[k].sum()) for k in summed} == {
        k: float(whole[k].sum()) for k in summed
    }
    made = Data(**{k: graph()[k] for k in graph().keys()})  # noqa: SIM118
    made = pdc.partition(made, mesh, "random")
    every = collectives.all_gather_object(lists(made), mesh.world)
    assert all(other == every[0] for other in every), every


@tiers.rare
@pytest.mark.subprocess
@worlds.on(1, worlds.anew)
def test_ranks_whose_strings_hash_apart_list_alike():
    """Rank 1 is a Python of its own: those of a pool are forks, whose strings hash alike."""
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    ranked = {"RANK": "1", "LOCAL_RANK": "1", "PYTHONHASHSEED": seed}
    other = subprocess.Popen(
        [sys.executable, __file__],
        env=os.environ | ranked,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        on_ranks_with_hash_seeds()
        told, _ = other.communicate(timeout=300)
        assert other.returncode == 0, told
    finally:
        other.kill()


if __name__ == "__main__":
    on_ranks_with_hash_seeds()
