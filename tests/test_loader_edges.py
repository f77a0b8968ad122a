"""The corners of the loaders: what PyG's scripts may do, and what must not crash."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import worlds
from batches import arguments
from torch.utils.data import RandomSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput, neighbor_sampler

from pyg_distcomm.loader import (
    DistLayerLoader,
    DistLinkNeighborLoader,
    DistNeighborLoader,
)
from pyg_distcomm.sampling import KeyedNeighborSampler

N, E = 60, 400


def graph(**more):
    g = torch.Generator().manual_seed(0)
    edges = torch.randint(N, (2, E), generator=g)
    return Data(x=torch.arange(N * 2.0).view(N, 2), edge_index=edges, **more)


def loader(data, fan_out=(3, 2), **kwargs):
    kwargs = {"batch_size": 5, "seed": 1, **kwargs}
    return DistNeighborLoader(data, list(fan_out), **arguments(**kwargs))


def test_what_pyg_says_of_a_batch_wins_over_attributes_of_the_same_name():
    data = graph(edge_label=torch.arange(E) + 1000)
    links = DistLinkNeighborLoader(
        data,
        [2],
        edge_label_index=data.edge_index[:, :40],
        edge_label=torch.arange(40),
        batch_size=10,
    )
    labels = torch.cat([batch.edge_label for batch in links])
    assert torch.equal(labels, torch.arange(40))
    named = graph(input_id=torch.arange(N) + 500, batch=torch.zeros(N).long())
    batch = next(iter(loader(named)))
    assert batch.input_id.tolist() == [0, 1, 2, 3, 4]
    assert batch.batch is None


def test_times_of_another_length_are_refused_before_a_kernel_sees_them():
    data = HeteroData()
    data["a"].num_nodes = N
    data["a", "to", "a"].edge_index = graph().edge_index
    for wrong in (E - 1, E + 1, 100 * E):
        data["a", "to", "a"].time = torch.randperm(wrong)
        with pytest.raises(ValueError, match=f"there are {wrong} times for {E} edges"):
            KeyedNeighborSampler(data, [2], time_attr="time")


def test_edits_of_the_data_do_not_reach_a_loader_that_is_built():
    data = graph()
    order = data.edge_index[1].argsort(stable=True)
    data.edge_index = data.edge_index[:, order].contiguous()
    ours = loader(data, is_sorted=True)
    before = [batch.n_id for batch in ours]
    data.edge_index[0] = 10**12
    ours.set_epoch(0)
    after = [batch.n_id for batch in ours]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(ValueError, match="source nodes"):
        loader(data, is_sorted=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("filter_per_worker", [True, False])
def test_methods_of_a_subclass_are_called(workers, filter_per_worker):
    class Mine(DistNeighborLoader):
        def collate_fn(self, index):
            out = super().collate_fn(index)
            out.touched = True
            return out

        def filter_fn(self, out):
            data = super().filter_fn(out)
            data.filtered = True
            return data

    ways = {"num_workers": workers, "filter_per_worker": filter_per_worker}
    for batch in Mine(graph(), [2], batch_size=20, **ways):
        assert batch.filtered
        assert torch.equal(batch.x[:, 0], 2 * batch.n_id.float())
        assert "touched" in batch if filter_per_worker else True


def test_backward_sampling_with_fan_outs_by_type():
    data = HeteroData()
    data["a"].num_nodes = data["b"].num_nodes = N
    data["a", "to", "b"].edge_index = graph().edge_index
    inputs = NodeSamplerInput(None, torch.arange(10), input_type="a")
    for fan_out in ([-1], {("a", "to", "b"): [-1]}):
        sampler = KeyedNeighborSampler(data, fan_out, sample_direction="backward")
        found = sampler.sample_from_nodes(inputs).edge["a", "to", "b"].sort()[0]
        wanted = (data["a", "to", "b"].edge_index[0] < 10).nonzero().view(-1)
        assert torch.equal(found, wanted)


def test_pyg_samples_in_both_directions_by_ours(monkeypatch):
    monkeypatch.setattr(neighbor_sampler, "NeighborSampler", KeyedNeighborSampler)
    both = neighbor_sampler.BidirectionalNeighborSampler(graph(), [-1])
    out = both.sample_from_nodes(NodeSamplerInput(None, torch.arange(10)))
    wanted = (graph().edge_index < 10).any(0).nonzero().view(-1)
    assert torch.equal(out.edge.unique(), wanted)


def test_times_beyond_whole_numbers():
    def edges(time):
        seeds, data = torch.full((N,), time), graph(time=torch.arange(N))
        ours = loader(data, (-1,), time_attr="time", input_time=seeds)
        return sum(batch.num_edges for batch in ours)

    assert (edges(torch.inf), edges(-torch.inf)) == (E, 0)
    with pytest.raises(ValueError, match="NaN"):
        edges(torch.nan)


def test_a_loaded_state_outlives_set_epoch():
    ours = loader(graph(), shuffle=True)
    batches = iter(ours)
    next(batches), next(batches)
    state = ours.state_dict()
    left = [batch.n_id for batch in batches]
    again = loader(graph(), shuffle=True)
    next(iter(again))  # an epoch begun before does not count
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.set_epoch(state["epoch"])
    found = [batch.n_id for batch in again]
    assert all(torch.equal(a, b) for a, b in zip(left, found, strict=True))
    again.set_epoch(7)
    assert (again.state_dict()["epoch"], again.state_dict()["batches"]) == (7, 0)


# Ranks ---------------------------------------------------------------------------------


def _evaluates_alone():
    mesh = worlds.mesh()
    data = graph()
    train = loader(data)
    if mesh.rank == 0:
        alone = loader(data)
    steps = len(list(train))
    if mesh.rank != 0:
        return steps
    with pytest.warns(UserWarning, match="not all ranks have built the loader") as told:
        counts = len(list(alone)), len(list(alone))
    assert told[0].filename == __file__  # the line that iterates
    return steps, *counts


def test_a_loader_that_the_others_have_passed_by_is_ones_own():
    assert worlds.anew(_evaluates_alone, 3) == [(4, 12, 12), 4, 4]


def _others_of_one_kind():
    mesh = worlds.mesh()
    with pytest.raises(ValueError, match="which wait for each other"):
        list(loader(graph(), batch_size=8 + mesh.rank, split=True))


def test_loaders_that_wait_for_each_other_raise_on_all_ranks():
    worlds.anew(_others_of_one_kind, 2)  # ranks that count their loaders apart


def _without_inputs():
    mesh = worlds.mesh()
    mine = torch.arange(10) if mesh.rank else torch.empty(0).long()
    with pytest.raises(ValueError, match=r"got \[0, 2, 2\] batches on the ranks"):
        list(loader(graph(), input_nodes=mine))
    dropped = loader(graph(), input_nodes=mine, even_batches="drop", shuffle=True)
    assert isinstance(dropped.sampler, RandomSampler) == bool(mesh.rank)
    return len(list(dropped))


def _comes_too_late():
    mesh = worlds.mesh(fresh=True)
    if mesh.rank:
        mesh.world.watch.report(OSError("no such file"))
        return "failed"
    with pytest.raises(OSError, match=r"rank 1 failed .* no such file"):
        list(loader(graph()))
    return "heard"


def test_a_rank_that_failed_is_not_waited_for():
    assert worlds.anew(_comes_too_late, 2) == ["heard", "failed"]


def test_a_rank_without_inputs_has_nothing_to_repeat():
    assert worlds.run(_without_inputs, 3) == [0, 0, 0]


def _arrays(folder):
    from pyg_distcomm.loader import shared

    worlds.mesh()
    data = graph(z=np.arange(N))
    data.x = np.memmap(f"{folder}/x.npy", np.float32, "r", shape=(N, 2))
    held = shared(lambda: data)
    assert isinstance(held.x, np.memmap)
    batch = next(iter(loader(held, split=False)))
    assert torch.equal(batch.z, batch.n_id)
    return batch.x.tolist()


def test_shared_arrays_stay_on_disk(tmp_path):
    x = np.memmap(tmp_path / "x.npy", np.float32, "w+", shape=(N, 2))
    x[:] = graph().x.numpy()
    x.flush()
    found = worlds.run(_arrays, 2, str(tmp_path))
    assert found[0] == found[1]
    assert found[0][0] == [0.0, 1.0]


@pytest.mark.parametrize("made", [np.array, list])
def test_masks_and_ids_that_are_no_tensors(made):
    mask = made([k < 4 for k in range(N)])
    for kind in (DistNeighborLoader, DistLayerLoader):
        (batch,) = kind(graph(), [2], input_nodes=mask, batch_size=9)
        assert batch.n_id[:4].tolist() == [0, 1, 2, 3]
        for bad in ([1.5], [[1, 2]], {1}):
            with pytest.raises(ValueError, match="vector of node ids, or a mask"):
                kind(graph(), [2], input_nodes=bad)
        assert not len(kind(graph(), [2], input_nodes=[]))
