"""Event streams: PyG's TGN trains on batches that are cut over ranks as on one process."""

import itertools
import types

import pytest
import tiers
import torch
import torch_geometric.loader
import torch_geometric.nn
import worlds
from alike import whole
from torch_geometric.data import TemporalData
from torch_geometric.nn.models import tgn

import pyg_distcomm as pdc
import pyg_distcomm.loader
import pyg_distcomm.nn

pytestmark = pytest.mark.usefixtures("place")

NODES, EVENTS, BATCH, MSG, DIM, TIME, KEPT = 17, 58, 9, 3, 4, 2, 3  # 58 = 6 * 9 + 4

PYG = types.SimpleNamespace(nn=torch_geometric.nn, loader=torch_geometric.loader)
OURS = types.SimpleNamespace(nn=pyg_distcomm.nn, loader=pyg_distcomm.loader)


def stream(events=EVENTS, nodes=NODES, seed=0):
    """Events with loops, repeats, equal times, busy nodes, and nodes without any."""
    g = torch.Generator().manual_seed(seed)
    src = torch.randint(0, nodes - 3, (events,), generator=g)
    dst = torch.randint(0, nodes - 2, (events,), generator=g)
    src[10:16], dst[12:17] = 4, 4  # more in a batch than are kept, loops among them
    t = torch.randint(0, 40, (events,), generator=g).sort().values
    msg = torch.randn(events, MSG, generator=g, dtype=torch.float64)
    return TemporalData(src, dst, t, msg, y=torch.arange(events) % 2)


class Message(torch.nn.Module):
    """Learns, normalises over all messages, and shares a weight with nobody."""

    def __init__(self):
        super().__init__()
        self.out_channels = 5
        self.lin = torch.nn.Linear(2 * DIM + MSG + TIME, 5)
        self.norm = torch.nn.BatchNorm1d(5, track_running_stats=False)

    def forward(self, z_src, z_dst, raw_msg, t_enc):
        h = self.lin(torch.cat([z_src, z_dst, raw_msg, t_enc], dim=-1))
        return self.norm(h).relu() if len(h) > 1 else h


class Attention(torch.nn.Module):
    def __init__(self, lib, time_enc):
        super().__init__()
        self.time_enc = time_enc
        width = MSG + time_enc.out_channels
        self.conv = lib.nn.TransformerConv(DIM, DIM // 2, heads=2, edge_dim=width)

    def forward(self, x, last_update, edge_index, t, msg):
        rel_t_enc = self.time_enc((last_update[edge_index[0]] - t).to(x.dtype))
        return self.conv(x, edge_index, torch.cat([rel_t_enc, msg], dim=-1))


def full(x):
    return whole(x).detach().clone()


def script(lib, kind, aggregator, events=EVENTS, batch_size=BATCH, cut=None):
    """The loop of PyG's example, and what it computes on the way."""
    torch.manual_seed(3)
    data, seen = stream(events), []
    data = data if cut is None else cut(data)
    halves = data[: 2 * events // 3], data[2 * events // 3 :]
    train_loader, test_loader = (
        lib.loader.TemporalDataLoader(half, batch_size, neg_sampling_ratio=1.0)
        for half in halves
    )
    here = data.msg.device
    neighbor_loader = tgn.LastNeighborLoader(NODES, size=KEPT, device=here)
    message = Message() if kind == "learnt" else tgn.IdentityMessage(MSG, DIM, TIME)
    memory = lib.nn.TGNMemory(NODES, MSG, DIM, TIME, message, aggregator())
    gnn, link_pred = Attention(lib, memory.time_enc), torch.nn.Bilinear(DIM, DIM, 1)
    modules = torch.nn.ModuleList([memory, gnn, link_pred]).double()
    parameters = list(modules.parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    criterion = torch.nn.BCEWithLogitsLoss()
    assoc = torch.empty(NODES, dtype=torch.long, device=here)

    def scores(batch):
        n_id, edge_index, e_id = neighbor_loader(batch.n_id)
        assoc[n_id] = torch.arange(n_id.size(0), device=here)
        z, last_update = memory(n_id)
        seen.extend([n_id, full(edge_index), full(e_id), full(z), full(last_update)])
        z = gnn(z, last_update, edge_index, data.t[e_id], data.msg[e_id])
        pos_out = link_pred(z[assoc[batch.src]], z[assoc[batch.dst]])
        return pos_out, link_pred(z[assoc[batch.src]], z[assoc[batch.neg_dst]])

    def update(batch):
        memory.update_state(batch.src, batch.dst, batch.t, batch.msg)
        neighbor_loader.insert(batch.src, batch.dst)

    for _ in range(2):
        modules.train()
        memory.reset_state()
        neighbor_loader.reset_state()
        for batch in train_loader:
            optimizer.zero_grad()
            pos_out, neg_out = scores(batch)
            loss = criterion(pos_out, torch.ones_like(pos_out))
            loss = loss + criterion(neg_out, torch.zeros_like(neg_out))
            update(batch)
            loss.backward()
            seen.extend(p.grad.clone() for p in parameters if p.grad is not None)
            optimizer.step()
            memory.detach()
            seen.append(loss.detach() * batch.num_events)
        with torch.no_grad():
            modules.eval()
            for batch in test_loader:
                pos_out, neg_out = scores(batch)
                seen.append(full(torch.cat([pos_out, neg_out], dim=0).sigmoid().cpu()))
                update(batch)
        seen.extend([full(memory.memory), full(memory.last_update)])
        seen.append(full(neighbor_loader.e_id))
    return seen


class Scaled(tgn.MeanAggregator):
    """Learns, too."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, msg, index, t, dim_size):
        return self.scale * super().forward(msg, index, t, dim_size)


AGGREGATORS = {"last": tgn.LastAggregator, "mean": tgn.MeanAggregator, "scaled": Scaled}


def _on_ranks(kind, name, sizes, wanted, cut):
    mesh = worlds.mesh()
    how = pdc.partition if cut else None
    found = script(OURS, kind, AGGREGATORS[name], *sizes, how)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    if cut and mesh.size > 1:
        every = stream()
        data = pdc.partition(every)
        assert len(data.msg.to_local()) < EVENTS == len(data.msg) == len(data.src)
        assert torch.equal(data.msg.full_tensor(), every.msg)
        with pytest.raises(TypeError, match="msg is cut already"):
            pdc.partition(data)
        with pytest.raises(ValueError, match="same events on all ranks: give all"):
            pdc.partition(stream(seed=mesh.rank))


SIZES = (58, 9), (300, 150)  # with more events, PyG's sorts are not stable


@tiers.parametrize(
    ("size", "kind", "name", "sizes", "cut"),
    itertools.product(
        [1, 2, 3, 4], ["identity", "learnt"], AGGREGATORS, SIZES, [False, True]
    ),
    [(2, "learnt", "last", SIZES[1], True)],
)
def test_trains_as_one_process(size, kind, name, sizes, cut):
    wanted = script(PYG, kind, AGGREGATORS[name], *sizes)
    worlds.run(_on_ranks, size, kind, name, sizes, wanted, cut)


@worlds.on(2)
def test_refuses_on_all_ranks():
    mesh, data = worlds.mesh(), stream()
    with pytest.raises((ValueError, TypeError), match="all"):
        next(iter(OURS.loader.TemporalDataLoader(data[: 9 + mesh.rank])))
