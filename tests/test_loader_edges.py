"""The corners of the loaders: what PyG's scripts may do, and what must not crash."""

from __future__ import annotations

import numpy as np
import pytest
import tiers
import torch
import worlds
from batches import arguments, hetero
from torch.utils.data import RandomSampler
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling, NodeSamplerInput

import pyg_distcomm as pdc
from pyg_distcomm.loader import (
    DistLayerLoader,
    DistLinkNeighborLoader,
    DistNeighborLoader,
)
from pyg_distcomm.loader.batcher import Buffers
from pyg_distcomm.sampling import KeyedNeighborSampler, Ladies

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


def test_an_attribute_called_n_id_is_the_users_own():
    batch = next(iter(loader(graph(n_id=torch.arange(N) + 7))))
    assert torch.equal(2 * (batch.n_id - 7).float(), batch.x[:, 0])


def test_times_of_another_length_are_refused_before_a_kernel_sees_them():
    data = HeteroData()
    data["a"].num_nodes = N
    data["a", "to", "a"].edge_index = graph().edge_index
    for wrong in (E - 1, E + 1, 100 * E):
        data["a", "to", "a"].time = torch.randperm(wrong)
        with pytest.raises(ValueError, match=f"there are {wrong} times for {E} edges"):
            KeyedNeighborSampler(data, [2], time_attr="time")


def test_negatives_drawn_in_a_way_of_their_own():
    class Sevens(NegativeSampling):
        def sample(self, num_samples, endpoint=None, num_nodes=None):
            return torch.full((num_samples,), 7)

    links = DistLinkNeighborLoader(
        graph(), [2], neg_sampling=Sevens("triplet"), batch_size=20
    )
    batch = next(iter(links))
    assert (batch.n_id[batch.dst_neg_index] == 7).all()


@pytest.mark.parametrize("fan_out", [-2, 2**31, 2**62, 1.5])
def test_fan_outs_that_cannot_be(fan_out):
    with pytest.raises(ValueError, match="num_neighbors holds"):
        next(iter(loader(graph(), (fan_out,), replace=True)))


def test_fan_outs_by_type_need_types():
    with pytest.raises(ValueError, match="have no types"):
        next(iter(DistNeighborLoader(graph(), {("a", "to", "b"): [2]}, batch_size=5)))


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

    mine = Mine(
        graph(),
        [2],
        batch_size=20,
        num_workers=workers,
        filter_per_worker=filter_per_worker,
    )
    for batch in mine:
        assert batch.filtered
        assert torch.equal(batch.x[:, 0], 2 * batch.n_id.float())
        assert "touched" in batch if filter_per_worker else True


def test_backward_sampling_with_fan_outs_by_type():
    data = HeteroData()
    data["a"].num_nodes = data["b"].num_nodes = N
    data["a", "to", "b"].edge_index = graph().edge_index
    inputs = NodeSamplerInput(None, torch.arange(10), input_type="a")
    for fan_out in ([-1], {("a", "to", "b"): [-1]}):
        pytest.importorskip("torch_geometric", "2.7")
        sampler = KeyedNeighborSampler(data, fan_out, sample_direction="backward")
        out = sampler.sample_from_nodes(inputs)
        found = out.edge["a", "to", "b"].sort()[0]
        wanted = (data["a", "to", "b"].edge_index[0] < 10).nonzero().view(-1)
        assert torch.equal(found, wanted)


def test_times_beyond_whole_numbers():
    data = graph(time=torch.arange(N))
    late = loader(data, (-1,), time_attr="time", input_time=torch.full((N,), torch.inf))
    early = loader(
        data, (-1,), time_attr="time", input_time=torch.full((N,), -torch.inf)
    )
    assert sum(batch.num_edges for batch in late) == E
    assert sum(batch.num_edges for batch in early) == 0
    with pytest.raises(ValueError, match="NaN"):
        next(
            iter(loader(data, time_attr="time", input_time=torch.full((N,), torch.nan)))
        )


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(N, 3, dtype=torch.cfloat).conj(),
        torch.randn(N, 3, dtype=torch.cfloat).conj().imag,
        torch.randn(3, N).T,
        torch.randn(N, 3).half(),
        torch.randn(N, 3).bfloat16(),
        torch.rand(N, 2, 3) < 0.5,
        torch.randn(N, 0),
        torch.randn(N),
    ],
    ids=[
        "conjugate",
        "negative",
        "strided",
        "half",
        "bfloat16",
        "bool",
        "empty",
        "flat",
    ],
)
def test_features_of_any_kind(x):
    data = graph()
    data.x = x
    for batch in loader(data):
        assert batch.x.dtype == x.dtype
        assert torch.equal(batch.x, x[batch.n_id])


def test_labels_of_a_narrow_type():
    data = graph()
    labels = torch.arange(E).bfloat16()
    links = DistLinkNeighborLoader(data, [2], edge_label=labels, batch_size=E)
    assert torch.equal(next(iter(links)).edge_label, labels)


def test_seeds_are_whole_numbers():
    ids = [b.n_id for b in loader(graph(), seed=np.int64(3))]
    same = [b.n_id for b in loader(graph(), seed=3)]
    assert all(torch.equal(a, b) for a, b in zip(ids, same, strict=True))
    with pytest.raises(ValueError, match="seed must be a whole number"):
        loader(graph(), seed="three")


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


def test_edge_index_that_cannot_be():
    data = graph()
    data.edge_index = data.edge_index > 3
    with pytest.raises(ValueError, match="integer tensor"):
        loader(data)


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
    assert worlds.run(_evaluates_alone, 3) == [(4, 12, 12), 4, 4]


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


def _with_workers():
    pdc.init()
    reference = [batch.n_id.tolist() for batch in loader(graph())]
    found = [batch.n_id.tolist() for batch in loader(graph(), num_workers=2)]
    assert found == reference
    return len(found)


@tiers.rare
def test_ranks_of_launch_may_have_workers():
    assert pdc.launch(_with_workers, 2, threads=1) == [6, 6]


@tiers.rare
def test_workers_may_be_spawned():
    reference = [batch.n_id for batch in loader(graph())]
    spawned = loader(graph(), num_workers=1, multiprocessing_context="spawn")
    for _ in range(2):
        spawned.set_epoch(0)
        found = [batch.n_id for batch in spawned]
        assert all(torch.equal(a, b) for a, b in zip(reference, found, strict=True))


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


def test_memory_is_used_again_only_when_nobody_holds_it():
    buffers = Buffers()
    like = torch.empty(0, 1 << 18)
    first = buffers.empty(like, 3)
    where = first.data_ptr()
    part = first.fill_(1.0)[1:2]  # a view holds it as well
    del first
    second = buffers.empty(like, 3).fill_(2.0)
    assert second.data_ptr() != where
    assert (part == 1).all()
    del part
    assert buffers.empty(like, 3).data_ptr() == where
    assert (second == 2).all()
    bigger = buffers.empty(like, 30)
    assert bigger.shape == (30, 1 << 18)


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(
        ValueError, match=r"mask of shape \[7\], but there are 60 nodes"
    ):
        loader(graph(), input_nodes=torch.ones(7, dtype=torch.bool))
    data = HeteroData()
    data["paper"].x = torch.zeros(9, 2)
    data["paper", "cites", "paper"].edge_index = torch.zeros(2, 3).long()
    with pytest.raises(
        ValueError, match=r"mask of shape \[60\], but there are 9 nodes"
    ):
        loader(data, input_nodes=("paper", torch.ones(60, dtype=torch.bool)))


@pytest.mark.parametrize("given", [("papre", [0]), "papre", None, [0, 1, 2]])
def test_a_type_that_is_not_there_stays_so(given):
    data = hetero()
    types = list(data.node_types)
    with pytest.raises(ValueError, match=r"the types are \['paper', 'author'\], got"):
        DistNeighborLoader(data, [2], input_nodes=given)
    assert data.node_types == types
    found = DistNeighborLoader(data, [2], input_nodes=["paper", torch.arange(3)])
    assert next(iter(found))["paper"].batch_size == 1


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


def test_links_that_are_no_links():
    data, writes = hetero(), ("author", "writes", "paper")
    ends = data[writes].edge_index.tolist()
    assert len(DistLinkNeighborLoader(data, [2], (writes, ends), batch_size=50)) == 4
    for bad in (("author", "write", "paper"), None, torch.tensor(ends)):
        with pytest.raises(ValueError, match="is an edge type, or a pair of one"):
            DistLinkNeighborLoader(data, [2], bad)
    for bad in (torch.rand(2, 5), torch.zeros(3, 5).long(), ("a", "b", "c")):
        with pytest.raises(ValueError, match=r"must be \[2, k\]"):
            DistLinkNeighborLoader(graph(), [2], bad)


def test_times_and_labels_are_one_for_each_seed():
    data, mask = graph(), torch.arange(N) < 5
    data.time = torch.arange(N)
    for times in (data.time, data.time[:4]):
        with pytest.raises(ValueError, match=r"input_time must .* of the 5 seeds"):
            loader(data, input_nodes=mask, input_time=times, time_attr="time")
    for name in ("edge_label", "edge_label_time"):
        clock = {"time_attr": "time"} if name == "edge_label_time" else {}
        with pytest.raises(ValueError, match=f"{name} must .* of the {E} seeds"):
            DistLinkNeighborLoader(
                data, [2], **arguments(**{name: torch.ones(E + 1)}, **clock)
            )


@pytest.mark.parametrize("given", [3, None, "ab", {("paper", "cites", "paper"): 2}])
def test_fan_outs_that_are_no_lists(given):
    with pytest.raises(ValueError, match="must be a list with a number for each hop"):
        DistNeighborLoader(hetero(), given, input_nodes="paper")
    same = DistNeighborLoader(graph(), torch.tensor([2, 2]), input_nodes=[0])
    assert same.node_sampler.num_neighbors.num_hops == 2


def test_numbers_of_numpy_and_masks_of_layers():
    assert len(list(loader(graph(), bulk_size=np.int64(4), prefetch=np.int64(1)))) == 12
    with pytest.raises(ValueError, match=r"a mask of shape \[30\]"):
        DistLayerLoader(graph(), [2], input_nodes=torch.ones(30).bool())
    with pytest.raises(TypeError, match=r"give a rule of it, as Ladies\(\)"):
        DistLayerLoader(graph(), [2], Ladies)
