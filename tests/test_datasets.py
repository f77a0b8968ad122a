"""Graphs in files: those that were used before they were saved, and what is refused."""

import os

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.explain import Explanation

from pyg_distcomm.datasets import load_dataset
from pyg_distcomm.graph.partition_data import listed_in_order


def graph(**values):
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 10, (2, 30), generator=draw)
    x = torch.rand(10, 3, generator=draw)
    return Data(x=x, edge_index=edges, y=torch.arange(10) % 3, **values)


def typed_graph():
    data = HeteroData()
    data["a"].x, data["b"].x = torch.rand(4, 2), torch.rand(5, 2)
    data["a", "to", "b"].edge_index = torch.tensor([[0, 1, 3], [4, 0, 2]])
    return data


def after(data, *used):
    for call in used:
        call(data)
    return data


def lookups(data):
    return data.node_attrs(), data.edge_attrs(), data.get_all_edge_attrs()


def sorted_edges(data):
    data.edge_index = EdgeIndex(data.edge_index, sparse_size=(10, 10)).sort_by("col")[0]
    data.edge_index.fill_cache_()


class Collected(InMemoryDataset):
    def __init__(self, graphs):
        super().__init__()
        self.data, self.slices = self.collate(graphs)

    def as_saved(self):
        return self._data.to_dict(), self.slices, type(self._data)


USED = {
    "looked up": lambda: after(graph(), lookups),
    "undirected": lambda: T.ToUndirected()(graph()),
    "split": lambda: T.RandomLinkSplit()(graph())[0],
    "typed": lambda: after(typed_graph(), lookups),
    "undirected, typed": lambda: after(T.ToUndirected()(typed_graph()), lookups),
    "of a batch": lambda: after(Batch.from_data_list([graph(), graph()])[1], lookups),
    "of a data set": lambda: after(Collected([graph(), graph()])[1], lookups),
    "sorted": lambda: after(graph(), sorted_edges, lookups),
    "ego nets": lambda: T.RootedEgoNets(1)(graph()),
    "explanation": lambda: Explanation(**graph().to_dict(), node_mask=torch.ones(10)),
}


@pytest.mark.parametrize("name", USED)
def test_a_graph_that_was_used_before_it_was_saved_is_read(tmp_path, name):
    path, data = tmp_path / "graph.pt", USED[name]()
    torch.save(data, path)
    # classes of their own
    shares = [listed_in_order(graph()), listed_in_order(typed_graph())]
    allowed = set(torch.serialization.get_safe_globals())
    found = load_dataset(str(path), hetero=True)
    assert set(torch.serialization.get_safe_globals()) == allowed
    assert type(found) is type(data)
    assert type(found) not in map(type, shares)
    for store in found.stores:
        other = store._key if store._key is None else data[store._key]
        other = data._store if isinstance(data, Data) else other
        if other is None:
            other = data._global_store
        assert list(store) == list(other)
        for key, value in other.items():
            assert torch.equal(store[key], value), key
    assert lookups(found)[:2] == lookups(data)[:2]


class Evil:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def test_a_graph_in_a_file_is_data(tmp_path):
    path, ran = tmp_path / "graph.pt", tmp_path / "ran"
    bad = {
        "holds os.mkdir|holds posix.mkdir": Evil(os.mkdir, str(ran)),
        "holds pathlib": tmp_path,
        "holds .*Evil, which is not read": Evil,
        "holds numpy.*scalar, which is not read": np.float64(1),
        "holds numpy.*_reconstruct": np.arange(3),
    }
    for match, value in bad.items():
        torch.save(graph(value=value), path)
        with pytest.raises(ValueError, match=match) as error:
            load_dataset(str(path))
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    assert not ran.exists()


def test_what_is_no_graph_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown graph 'Cora'.*torch\.save\(dataset"):
        load_dataset("Cora")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(Data(x=torch.ones(3, 1)), tmp_path / "points.pt")
    np.savez(tmp_path / "points.npz", x=np.ones(3))
    (tmp_path / "bad.pt").write_bytes(b"nonsense")
    (tmp_path / "text.pt").write_bytes(b"hello")
    (tmp_path / "bad.npz").write_bytes(b"nonsense")
    np.savez(tmp_path / "pickle.npz", edge_index=np.array([{}], dtype=object))
    np.savez(tmp_path / "texts.npz", edge_index=np.zeros((2, 1)), z=np.array(["a"]))
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "program.pt")
    for name, words in (
        ("list.pt", "holds a list, not a Data"),
        ("points.pt", "has no edge_index"),
        ("points.npz", "has no edge_index"),
        ("bad.pt", "cannot be read"),
        ("text.pt", "cannot be read: not saved by torch.save"),
        ("bad.npz", "cannot be read"),
        ("program.pt", "cannot be read"),
        ("texts.npz", "cannot be read: data.z is an array of <U1, wanted numbers"),
        ("pickle.npz", "cannot be read: Object arrays"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {words}"):
            load_dataset(str(tmp_path / name))
