"""Graphs that change: a share with nodes and edges added or removed is the new graph's."""

from __future__ import annotations

import copy
import itertools

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import torch_geometric.transforms as T
import worlds
from problems import CUTTERS, GRAPHS, owners
from test_hetero import Mixed, Stack, graph
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import subgraph

import pyg_distcomm as pdc
import pyg_distcomm.nn as dist
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.loader import NeighborLoader

pytestmark = pytest.mark.usefixtures("place")

NODES = ("x", "y", "train_mask")
EDGES = ("edge_weight", "edge_attr")


def growth(data, nodes, edges, seed=7):
    """What is appended: loops, copies and edges of old and new nodes among them."""
    g = torch.Generator().manual_seed(seed)
    n = data.num_nodes + nodes
    ends = torch.randint(0, n, (2, edges), generator=g)
    if edges > 4:
        ends[:, 0], ends[:, 1] = ends[:, 2], n - 1  # a copy, and a loop
    more = {"edge_index": ends}
    more["edge_weight"] = torch.rand(edges, generator=g, dtype=torch.float64)
    more["edge_attr"] = torch.randn(edges, 3, generator=g, dtype=torch.float64)
    rows = {
        "x": torch.randn(nodes, 7, generator=g, dtype=torch.float64),
        "y": torch.randint(0, 4, (nodes,), generator=g),
        "train_mask": torch.rand(nodes, generator=g) < 0.7,
    }
    return more, rows


def without(data, more, nodes, pairs):
    """The graph without nodes, and without all copies of some of its old edges, by PyG."""
    gone, old = (
        torch.tensor(pairs).view(-1, 2),
        data.num_edges - len(more["edge_weight"]),
    )
    same = (data.edge_index.t().unsqueeze(1) == gone.unsqueeze(0)).all(-1).any(1)
    same[old:] = False  # those that are new
    keep = torch.ones(data.num_nodes, dtype=torch.bool)
    keep[list(nodes)] = False
    edge_index, stays = data.edge_index[:, ~same], (~same).nonzero().view(-1)
    edge_index, _, mask = subgraph(
        keep, edge_index, relabel_nodes=True, num_nodes=len(keep), return_edge_mask=True
    )
    out = Data(edge_index=edge_index, num_nodes=int(keep.sum()))
    for name in NODES:
        out[name] = data[name][keep]
    for name in EDGES:
        out[name] = data[name][stays[mask]]
    return out


def whole(data, more, rows):
    out = Data(edge_index=torch.cat([data.edge_index, more["edge_index"]], 1))
    for name, new in (*rows.items(), *((n, more[n]) for n in EDGES)):
        out[name] = torch.cat([data[name], new])
    out.num_nodes = data.num_nodes + len(rows["x"])
    return out


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = pyg.GCNConv(7, 6)
        self.second = pyg.GATConv(6, 4, edge_dim=3)

    def forward(self, data):
        x = self.first(data.x, data.edge_index, data.edge_weight).relu()
        return self.second(x, data.edge_index, data.edge_attr)


def numbers(model, data):
    data.x = data.x.clone().requires_grad_()
    out = model(data)
    F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
    full = out.full_tensor() if isinstance(out, pdc.DistTensor) else out
    grad = data.x.grad
    grad = grad.full_tensor() if isinstance(grad, pdc.DistTensor) else grad
    return [full, grad, *(p.grad for p in model.parameters())]


def made():
    torch.manual_seed(2)
    return Net().double()


def same_plans(grown, fresh):
    """Asserts that nothing tells a grown topology from one that is planned anew."""
    for name in ("source_lid", "target_lid", "ghost_gid"):
        assert torch.equal(getattr(grown, name), getattr(fresh, name)), name
    assert grown.num_own == fresh.num_own
    for name in ("send_slot", "send_gid", "ghost_gid"):
        assert torch.equal(getattr(grown.halo, name), getattr(fresh.halo, name)), name
    for name in ("send_counts", "recv_counts", "num_local", "silent", "most"):
        assert getattr(grown.halo, name) == getattr(fresh.halo, name), name


def updated(graph, cutter, steps, memory=None):
    mesh = worlds.mesh()
    data = GRAPHS[graph]()
    share = pdc.partition(
        data, mesh, owners(cutter, data, mesh.size), edge_attrs=EDGES, memory=memory
    )
    _ = pdc.convert(made())(share)  # so that there are plans
    for k, (nodes, edges, *gone) in enumerate(steps):
        more, rows = growth(data, nodes, edges, seed=k)
        before, removed = share, {}
        if gone:
            places = [p % max(1, data.num_edges) for p in gone[1]][: data.num_edges]
            pairs = data.edge_index[:, places].t().tolist()
            lost = sorted({v % data.num_nodes for v in gone[0]})
            keep = ~torch.isin(more["edge_index"], torch.tensor(lost)).any(0)
            more = {
                name: x[..., keep] if name == "edge_index" else x[keep]
                for name, x in more.items()
            }
            removed = {
                "removed_nodes": lost,
                "removed_edges": torch.tensor(pairs).view(-1, 2).t(),
            }
        share, ids = pdc.update(
            share, new_edges=more, new_nodes=rows, return_mapping=True, **removed
        )
        assert before.num_nodes == data.num_nodes == len(ids)
        old, data = data, whole(data, more, rows)
        if gone:
            data = without(data, more, lost, pairs)
            assert ids[lost].tolist() == [-1] * len(lost)
        assert torch.equal(data.x[ids[ids >= 0]], old.x[ids >= 0])
    assert share.num_nodes == data.num_nodes
    for name in (*NODES, *EDGES, "edge_index"):
        assert torch.equal(share[name].full_tensor(), data[name]), name
    topology = share.edge_index.topology
    parts = topology.source_gid, topology.target_gid, topology.nodes, topology.edges
    same_plans(topology.locals, Topology(*parts).locals)
    want = numbers(made(), copy.copy(data))
    got = numbers(pdc.convert(made()), share)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


STEPS = [
    [(5, 30), (0, 12, [0, 1, 7], [0, 3]), (4, 0)],
    [(0, 9)],
    [(6, 1), (3, 40), (0, 0, range(4, 9), range(0, 90, 2))],
    [(0, 0, [2], []), (0, 5, [], range(40)), (2, 6, [0, 11], [1, 5])],
]
CASES = list(
    zip(
        itertools.cycle(GRAPHS.keys() - {"negative"}),
        itertools.cycle(CUTTERS),
        itertools.cycle(STEPS),
        [k % 4 + 1 for k in range(24)],
        strict=False,
    )
)


def test_what_grew_is_the_share_of_the_new_graph():
    for case in (("directed", "random"), ("isolated", "empty_rank")):
        worlds.run(updated, 2, *case, STEPS[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("graph", "cutter", "steps", "size"), sorted(CASES, key=str))
def test_every_graph_grows(graph, cutter, steps, size):
    worlds.run(updated, size, graph, cutter, steps)


@tiers.parametrize("size", [1, 2, 3], slice(0, 0))
def test_graphs_grow_within_a_memory_cap(size):
    worlds.run(updated, size, "directed", "random", STEPS[0], "4KiB")


def counted():
    mesh = worlds.mesh()
    data = GRAPHS["directed"](400, 2000)
    share = pdc.partition(data, mesh, "random")
    halo = share.edge_index.topology.locals.halo
    more, rows = growth(data, 3, 20)
    mesh.ledger.reset()
    share = pdc.update(share, new_edges=more, new_nodes=rows)
    grown = share.edge_index.topology.locals.halo
    fresh = int(sum(grown.send_counts) - sum(halo.send_counts))
    # of each ghost that is new, the id; nothing of those that were known
    assert mesh.ledger.words("update") == fresh
    gone = data.edge_index[:, ::20]
    less = pdc.update(share, removed_edges=gone)
    idle = int(sum(grown.send_counts))
    idle -= int(sum(less.edge_index.topology.locals.halo.send_counts))
    lost = [len(one.edge_index.edges) for one in (share, less)]
    every = share.num_edges - less.num_edges
    # of each ghost that is needed no more, too, and the places of edges of other ranks
    told = fresh + idle + every - (lost[0] - lost[1])
    assert mesh.ledger.words("update") == told
    return fresh, halo.num_ghosts


def test_only_new_ghosts_are_asked_for():
    for fresh, ghosts in worlds.run(counted, 2):
        assert fresh < 20 < ghosts


def placed():
    mesh = worlds.mesh()
    data = GRAPHS["edgeless"]()
    share = pdc.partition(data, mesh, [0] * 2 + [1] * 10)
    rows = growth(data, 3, 0)[1]
    more = growth(data, 3, 2)[0]
    more["edge_index"] = torch.tensor([[0, 13], [12, 12]])
    share = pdc.update(share, new_edges=more, new_nodes=rows)
    first = share.edge_index.nodes.partition.owner[12:].tolist()
    share = pdc.update(share, new_nodes=rows, owner=[1, 1, 0])
    return first, share.edge_index.nodes.partition.owner[15:].tolist()


def test_new_nodes_join_their_neighbours():
    assert worlds.run(placed, 2) == [([0, 0, 0], [1, 1, 0])] * 2


def refused():
    mesh = worlds.mesh()
    data = GRAPHS["directed"]()
    share = pdc.partition(data, mesh, "random", edge_attrs=EDGES)
    more, rows = growth(data, 2, 5)
    ends, known = more["edge_index"], torch.zeros(60, 60)
    known[data.edge_index[0], data.edge_index[1]] = 1
    lacking = (known == 0).nonzero()[:1].t()
    wrong = [
        ({"new_edges": more["edge_index"]}, "give new_edges a 'edge_attr', [5, 3] of"),
        ({"new_nodes": 2}, "give new_nodes a"),
        ({"new_nodes": rows | {"x": rows["x"].float()}}, "new x must be [2, 7] of"),
        ({"new_nodes": rows | {"z": rows["x"]}}, "new_nodes has 'z', but the nodes"),
        ({"new_nodes": rows | {"x": rows["x"][:1]}}, "as many rows in each attribute"),
        ({"new_edges": more | {"edge_index": torch.tensor([[0], [99]])}}, "must be [1"),
        ({"new_edges": more | {"edge_index": more["edge_index"] + 58}}, "0 .. 59"),
        ({"new_nodes": rows, "owner": [0, 7]}, "owner must be a rank below 2"),
        ({"new_nodes": -1}, "new_nodes must be a number of nodes"),
        ({"removed_nodes": [0, 60]}, "removed_nodes has node 60, but the ids are 0"),
        ({"removed_nodes": torch.tensor([1.0])}, "removed_nodes must be ids [k]"),
        ({"removed_nodes": torch.ones(9).bool()}, "a mask [9], but there are 60"),
        ({"removed_edges": torch.zeros(3, 2).long()}, "removed_edges must be ids [2"),
        ({"removed_edges": torch.tensor([[0], [-1]])}, "removed_edges has node -1"),
        ({"removed_edges": lacking}, "which the graph does not have"),
        (
            {"new_edges": more, "new_nodes": rows, "removed_nodes": ends[0, :1]},
            f"node {int(ends[0, 0])}, which removed_nodes takes away",
        ),
        ({"removed_nodes": [mesh.rank]}, "the same removed_nodes"),
        ({"new_edges": "abc"}, "are tensors, got a str"),
    ]
    if mesh.rank:
        more = more | {"edge_weight": more["edge_weight"] + 1}
    wrong.append(({"new_edges": more, "new_nodes": rows}, "the same new edge_weight"))
    for call, text in wrong:
        with pytest.raises((ValueError, TypeError), match=r".") as error:
            pdc.update(share, **call)
        assert text in str(error.value), (text, str(error.value))
    with pytest.raises(TypeError, match=r"changed before pdc\.partition"):
        pdc.update(data, new_nodes=1)
    return True


def test_mistakes_are_named_on_all_ranks():
    assert all(worlds.run(refused, 2))


def typed_refused():
    mesh, data = worlds.mesh(), graph()
    share = pdc.partition(data, mesh, "random")
    ends = torch.tensor([[0, 1], [2, 3]])
    wrong = [
        ({"new_edges": ends}, "a dictionary by edge type"),
        ({"new_nodes": {"editor": 1}}, "'editor', which is no node type"),
        ({"removed_nodes": {"editor": [1]}}, "'editor', which is no node type"),
        ({"owner": {"editor": [0]}}, "'editor', which is no node type"),
        ({"new_nodes": {"author": 1}}, "new_nodes['author'] a 'x'"),
        ({"new_edges": {("editor", "of", "venue"): ends}}, "nodes of type 'editor'"),
        ({"new_edges": {"cites": ends}}, "'cites', which is no edge type"),
        ({"new_edges": {("paper", "in", "venue"): ends + 4}}, "a 'edge_attr'"),
        ({"new_edges": {BEGUN: ends + 4}}, "has node 6, but the ids are 0 .. 5"),
        ({"removed_edges": {BEGUN: ends}}, "'likes'"),
        ({"removed_nodes": {"field": [1]}}, "removed_nodes['field'] has node 1"),
        ({"owner": {"paper": [0]}}, "for each of 0 new nodes"),
    ]
    for call, text in wrong:
        with pytest.raises(ValueError, match=r".") as error:
            pdc.update(share, **call)
        assert text in str(error.value), (text, str(error.value))
    return True


def test_mistakes_name_the_type():
    assert all(worlds.run(typed_refused, 2))


def stale(folder):
    """Nothing that was made of the graph before goes on unnoticed."""
    mesh, data = worlds.mesh(), GRAPHS["directed"]()
    share = pdc.partition(data, mesh, "random", edge_attrs=EDGES)
    loader = NeighborLoader(share, [3], batch_size=8)
    emb = pdc.DistEmbedding(60, 4, share, dtype=torch.float64)
    model = torch.nn.ModuleDict({"emb": emb})
    assert len(list(loader)) > 0
    pdc.save_checkpoint(folder, mesh, model)
    share.emb = emb.weight.detach()
    rows = {name: share[name].full_tensor()[:2] for name in (*NODES, "emb")}
    homes = share.edge_index.nodes.partition.owner_of(torch.tensor([58, 59]))
    # as many nodes as before, with the same owners: but others
    grown = pdc.update(share, new_nodes=rows, removed_nodes=[58, 59], owner=homes)
    assert grown.num_nodes == 60
    with pytest.raises(RuntimeError, match=r"before pdc\.update"):
        next(iter(loader))
    assert len(list(NeighborLoader(share, [3], batch_size=8))) > 0  # on purpose
    for x in (share.x, emb.weight):
        with pytest.raises(ValueError, match=r"one pdc\.partition or update"):
            dist.SAGEConv(x.size(1), 3).double()(x, grown.edge_index)
    with pytest.raises(ValueError, match=r"before pdc\.update"):
        NeighborLoader(grown, [3], batch_size=8, embedding=emb)
    others = pdc.DistEmbedding.from_pretrained(grown.emb)
    with pytest.raises(ValueError, match="for other nodes"):
        pdc.load_checkpoint(folder, mesh, torch.nn.ModuleDict({"emb": others}))
    more = pdc.update(share, new_nodes=rows)
    with pytest.raises(ValueError, match=r"before pdc\.update"):
        dist.SAGEConv(7, 3).double()(share.x, more.edge_index)
    table = emb.weight.full_tensor()
    emb = pdc.DistEmbedding.from_pretrained(more.emb, freeze=False)
    assert torch.equal(emb.weight.full_tensor(), torch.cat([table, table[:2]]))
    dist.SAGEConv(4, 3).double()(emb.weight, more.edge_index).sum().backward()
    assert emb.shard.grad.shape == emb.shard.shape
    with pytest.raises(ValueError, match="cannot load checkpoint"):
        pdc.load_checkpoint(folder, mesh, torch.nn.ModuleDict({"emb": emb}))
    return True


def test_what_was_made_before_is_refused(tmp_path):
    assert all(worlds.run(stale, 2, str(tmp_path / "run")))


def late_rows():
    """Late rows are dropped by an update: the next epoch is exact, and is saved as such."""
    mesh, data = worlds.mesh(), GRAPHS["undirected"]()
    link = pdc.PipeGCN()
    share = pdc.partition(data, mesh, "random", edge_attrs=EDGES, link=link)
    exact = pdc.partition(data, mesh, "random", edge_attrs=EDGES)
    net = pdc.convert(made())
    for _ in range(3):
        x = share.x * torch.rand(7).double().to(share.x.device)
        net.first(x, share.edge_index).sin().sum().backward()
        link.step()
    given = {
        "removed_edges": data.edge_index[:, ::9],
        "removed_nodes": [3, 4],
    }
    share, exact = (pdc.update(one, **given) for one in (share, exact))
    got = net.first(share.x * 2, share.edge_index)
    want = net.first(exact.x * 2, exact.edge_index)
    torch.testing.assert_close(
        got.full_tensor(), want.full_tensor(), rtol=1e-9, atol=1e-9
    )
    return True


def test_late_rows_do_not_outlive_an_update():
    assert all(worlds.run(late_rows, 2))


class Relational(torch.nn.Module):
    def __init__(self, lib):
        super().__init__()
        self.first, self.second = lib.SAGEConv(7, 6), lib.RGCNConv(6, 4, 2)
        self.norm = lib.BatchNorm(6)

    def forward(self, data):
        x = self.norm(self.first(data.x, data.edge_index)).relu()
        edge_type = (data.edge_attr[:, 0] > 0).long()
        return self.second(x, data.edge_index, edge_type)


def train_on_snapshots(lib, graphs):
    torch.manual_seed(1)
    model = Relational(lib).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for data in graphs:
        for _ in range(2):
            optimizer.zero_grad()
            out = model(data)
            mask = data.train_mask
            loss = F.cross_entropy(out[mask], data.y[mask])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [torch.tensor(losses, dtype=torch.float64), *model.state_dict().values()]


def snapshots():
    """A script that updates its graph between epochs, and one that builds it anew."""
    data, steps = GRAPHS["loops_and_copies"](), []
    graphs = [data]
    for k in range(4):
        more, rows = growth(data, 3, 15, seed=k)
        lost, pairs = [k, 20], data.edge_index[:, k::9]
        keep = ~torch.isin(more["edge_index"], torch.tensor(lost)).any(0)
        more = {
            n: x[:, keep] if n == "edge_index" else x[keep] for n, x in more.items()
        }
        data = without(whole(data, more, rows), more, lost, pairs.t().tolist())
        graphs.append(data)
        steps.append(
            {
                "new_nodes": rows,
                "new_edges": more,
                "removed_nodes": lost,
                "removed_edges": pairs,
            }
        )

    def shares():
        share = pdc.partition(graphs[0], worlds.mesh(), "metis", edge_attrs=EDGES)
        yield share
        for step in steps:
            share = pdc.update(share, **step)
            yield share

    wanted, found = train_on_snapshots(pyg, graphs), train_on_snapshots(dist, shares())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@tiers.parametrize("size", [1, 2, 3, 4], [3])
def test_snapshots_train_as_graphs_that_are_built_anew(size):
    worlds.run(snapshots, size)


# Several types of nodes and edges -------------------------------------------------------

KINDS = [
    ("paper", "cites", "paper"),
    ("author", "writes", "paper"),
    ("venue", "of", "paper"),
    ("field", "has", "paper"),
]
BEGUN = "author", "likes", "venue"


def typed_change(data, seed):
    """New nodes and edges of some types, an edge type that begins, and what goes."""
    g = torch.Generator().manual_seed(seed)
    count = {"paper": 4, "venue": 2, "field": int(seed == 0), "author": 0}
    rows = {}
    for name in ("paper", "venue", "field"):
        width = data[name].x.size(1)
        rows[name] = {
            "x": torch.randn(count[name], width, generator=g, dtype=torch.float64)
        }
    rows["paper"]["y"] = torch.randint(0, 3, (4,), generator=g)
    rows["paper"]["train_mask"] = torch.tensor([True, False, True, True])
    lost = {"paper": torch.tensor([0, 5, 6, 40]), "author": torch.tensor([2])}
    more, pairs = {}, {}
    for kind in (*KINDS, BEGUN):
        ends = []
        for name in (kind[0], kind[2]):
            n = data[name].num_nodes
            ids = torch.randint(0, n + count[name], (9,), generator=g)
            bad = torch.isin(ids, lost.get(name, torch.empty(0).long()))
            ends.append(torch.where(bad, n + count[name] - 1, ids))
        if kind[0] == kind[2]:
            ends[0][:2] = ends[1][:2]  # loops
        ends = torch.stack(ends)
        ends[:, 3] = ends[:, 4]  # a copy
        if kind != KINDS[3]:
            attr = torch.rand(9, 2, generator=g, dtype=torch.float64)
            more[kind] = {"edge_index": ends, "edge_attr": attr}
        if kind in data.edge_types and data[kind].num_edges:
            pairs[kind] = data[kind].edge_index[:, ::17]
    return rows, more, lost, pairs


def typed_after(data, rows, more, lost, pairs):
    """The whole graph afterwards, by hand."""
    out, new_id = HeteroData(), {}
    for name in data.node_types:
        added, n = rows.get(name, {}), data[name].num_nodes
        keep = torch.ones(n + len(added.get("x", ())), dtype=torch.bool)
        keep[lost.get(name, [])] = False
        new_id[name] = torch.where(keep, keep.cumsum(0) - 1, -1)
        out[name].num_nodes = int(keep.sum())
        for key, value in data[name].items():
            if key != "num_nodes":
                every = torch.cat([value, added.get(key, value[:0])])
                out[name][key] = every[keep]
    for kind in dict.fromkeys([*data.edge_types, *more]):
        new = more.get(kind, {"edge_index": torch.empty(2, 0).long()})
        known = kind in data.edge_types
        old = data[kind] if known else {n: v[..., :0] for n, v in new.items()}
        gone = pairs.get(kind, torch.empty(2, 0).long())
        ends = old["edge_index"]
        same = (ends.unsqueeze(2) == gone.unsqueeze(1)).all(0).any(1)
        ends = torch.cat([ends, new["edge_index"]], 1)
        ends = torch.stack([new_id[kind[0]][ends[0]], new_id[kind[2]][ends[1]]])
        keep = (ends >= 0).all(0)
        keep[: len(same)] &= ~same
        out[kind].edge_index = ends[:, keep]
        first = old["edge_attr"] if known else new["edge_attr"][:0]
        attr = torch.cat([first, new.get("edge_attr", first[:0])])
        out[kind].edge_attr = attr[keep]
    return out


def typed_numbers(model, data):
    x = {k: v.clone().requires_grad_() for k, v in data.x_dict.items()}
    out = model(x, data.edge_index_dict, data.edge_attr_dict)
    mask = data["paper"].train_mask
    F.cross_entropy(out[mask], data["paper"].y[mask]).backward()
    found = [out, *(v.grad for v in x.values()), *(p.grad for p in model.parameters())]
    return [v.full_tensor() if isinstance(v, pdc.DistTensor) else v for v in found]


def typed_model(data, kind):
    torch.manual_seed(3)
    model = (
        Mixed(data, "hgt", 8, pyg) if kind == "hgt" else Stack(data, kind, "sum", pyg)
    )
    model = model.double()
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    return model


def typed_owners(data, size, method):
    if method != "empty_rank":
        return method
    counts = {name: data[name].num_nodes for name in data.node_types}
    return {name: torch.arange(n) % max(1, size - 1) for name, n in counts.items()}


def typed(method, kinds, memory=None):
    mesh = worlds.mesh()
    data = graph()
    share = pdc.partition(
        data, mesh, typed_owners(data, mesh.size, method), memory=memory
    )
    for edges in share.edge_index_dict.values():
        _ = edges.topology.locals  # so that there are plans
    for seed in range(2):
        rows, more, lost, pairs = typed_change(data, seed)
        old, kept = share, share["author", "knows", "field"].edge_index
        share, ids = pdc.update(
            share,
            new_nodes=rows,
            new_edges=more,
            removed_nodes=lost,
            removed_edges=pairs,
            return_mapping=True,
        )
        assert old["paper"].num_nodes == data["paper"].num_nodes == len(ids["paper"])
        data = typed_after(data, rows, more, lost, pairs)
        assert (ids["venue"] == torch.arange(len(ids["venue"]))).all()
        assert ids["paper"][[0, 1, 7]].tolist() == [-1, 0, 4]
        assert share["author", "knows", "field"].edge_index is not kept
    for store in data.stores:
        for name, value in store.items():
            mine = share[store._key][name]
            mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
            assert mine == value if name == "num_nodes" else torch.equal(mine, value)
    for edges in share.edge_index_dict.values():
        t = edges.topology
        fresh = Topology(
            t.source_gid, t.target_gid, t.nodes, t.edges, sources=t.sources
        )
        same_plans(t.locals, fresh.locals)
    for kind in kinds:
        model = typed_model(data, kind)
        want = typed_numbers(copy.deepcopy(model), copy.copy(data))
        got = typed_numbers(pdc.convert(model), share)
        for a, b in zip(got, want, strict=True):
            zero = torch.zeros((), dtype=torch.float64)
            pair = torch.broadcast_tensors(*(zero if v is None else v for v in (a, b)))
            torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-9)


@tiers.parametrize(
    ("size", "method"),
    [*itertools.product((1, 2, 3, 4), ("random", "empty_rank", "metis"))],
    [(3, "empty_rank")],
)
def test_typed_graphs_change(size, method):
    """Equals what PyG computes on the whole graph that is built anew."""
    kinds = ("sage", "gat", "hgt") if method != "metis" else ("gatv2", "hgt")
    worlds.run(typed, size, method, kinds)


@pytest.mark.exhaustive
def test_typed_graphs_change_within_a_memory_cap():
    worlds.run(typed, 2, "random", ("gat",), "16KiB")


def typed_kept():
    """What does not change keeps its plans, and sends nothing."""
    mesh, data = worlds.mesh(), graph()
    link = pdc.VARCO(4)
    share = pdc.partition(data, mesh, "random", link=link)
    for edges in share.edge_index_dict.values():
        _ = edges.topology.locals
    more = {
        "edge_index": torch.tensor([[0, 3], [1, 2]]),
        "edge_attr": torch.ones(2, 2).double(),
    }
    mesh.ledger.reset()
    after = pdc.update(share, new_edges={("author", "likes", "venue"): more})
    assert mesh.ledger.words("update") == 0
    for kind in share.edge_types:
        assert after[kind].edge_index is share[kind].edge_index
    assert after["paper"].x is share["paper"].x
    assert after["author", "likes", "venue"].edge_index.topology.link is link
    words = pdc.update(share, new_nodes={"field": {"x": torch.ones(1, 9).double()}})
    assert (
        words["paper", "cites", "paper"].edge_index
        is share["paper", "cites", "paper"].edge_index
    )
    assert mesh.ledger.words("update") == 0
    return True


def test_what_does_not_change_is_kept():
    assert all(worlds.run(typed_kept, 2))


def begun():
    """Node types begin, with attributes or with edges alone, and change as others do."""
    mesh, data = worlds.mesh(), graph()
    share = pdc.partition(data, mesh, typed_owners(data, mesh.size, "empty_rank"))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2)).double()
    of, by = ("editor", "of", "paper"), ("author", "by", "editor")
    named = ("place", "of", "venue")
    ends = torch.tensor([[0, 4, 4, 2, 3], [7, 7, 0, 40, 1]])
    places = torch.tensor([[0, 1, 0], [5, 5, 2]])
    share, ids = pdc.update(
        share,
        new_nodes={"editor": {"x": x}, "place": 2},
        new_edges={of: ends, by: ends.flip(0) % 5, named: places},
        return_mapping=True,
    )
    assert ids["editor"].tolist() == []
    share = pdc.update(
        share,
        new_nodes={"editor": {"x": x[:2] + 1}},
        new_edges={of: torch.tensor([[6], [3]])},
        removed_nodes={"editor": [2]},
    )
    data["editor"].x = torch.cat([x, x[:2] + 1])[[0, 1, 3, 4, 5, 6]]
    data["place"].num_nodes = 2
    data[of].edge_index = torch.tensor([[0, 3, 3, 2, 5], [7, 7, 0, 1, 3]])
    kept = ends.flip(0)[:, ends[0] != 2] % 5
    data[by].edge_index = torch.stack([kept[0], kept[1] - (kept[1] > 2).long()])
    data[named].edge_index = places
    assert torch.equal(share["editor"].x.full_tensor(), data["editor"].x)
    assert share["place"].num_nodes == 2
    for kind in (of, by, named):
        ours = share[kind].edge_index.full_tensor()
        assert torch.equal(ours, data[kind].edge_index)
    torch.manual_seed(3)
    kinds = [kind for kind in data.edge_types if kind != named]
    model = pyg.HeteroConv({k: pyg.SAGEConv((-1, -1), 4) for k in kinds}).double()
    model(data.x_dict, data.edge_index_dict)  # lazy layers take their widths
    out = []
    for lib, one in ((copy.deepcopy(model), data), (pdc.convert(model), share)):
        x = {
            n: one[n].x.clone().requires_grad_() for n in one.node_types if n != "place"
        }
        found = lib(x, one.edge_index_dict)
        sum(v.sin().sum() for v in found.values()).backward()
        slopes = [v.grad for v in x.values()] + [p.grad for p in lib.parameters()]
        out.append([*found.values(), *slopes])
    for a, b in zip(*out, strict=True):
        b = b.full_tensor() if isinstance(b, pdc.DistTensor) else b
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [2, tiers.rarely(3), tiers.rarely(1)])
def test_node_types_begin(size):
    worlds.run(begun, size)


def from_whole():
    """Attributes that a share has whole, as PyG's ToUndirected leaves weights, change too."""
    mesh, data = worlds.mesh(), GRAPHS["loops_and_copies"]()
    del data.edge_attr
    share = T.ToUndirected()(pdc.partition(data, mesh, "random"))
    data = T.ToUndirected()(data)
    share.rank_of = torch.arange(24) * 2
    assert not isinstance(share.edge_weight, pdc.DistTensor)
    rows = {name: share[name].full_tensor()[:2] for name in ("x", "y", "train_mask")}
    rows["rank_of"] = torch.tensor([1, 3])
    more = {"edge_index": torch.tensor([[0, 24], [25, 3]])}
    more["edge_weight"] = torch.tensor([0.25, 4.0]).double()
    with pytest.raises(ValueError, match="give new_edges a 'edge_weight'"):
        pdc.update(share, new_edges=more["edge_index"] % 9)
    gone = data.edge_index[:, :3]
    grown = pdc.update(
        share, new_nodes=rows, new_edges=more, removed_edges=gone, removed_nodes=[5]
    )
    keep = torch.ones(data.num_edges, dtype=torch.bool)
    keep[:3] = False
    keep &= (data.edge_index != 5).all(0)
    weight = torch.cat([data.edge_weight[keep], more["edge_weight"]])
    got = grown.edge_weight.full_tensor()  # equal edges are summed in another order
    torch.testing.assert_close(got, weight, rtol=1e-14, atol=1e-14)
    ranks = torch.cat([torch.arange(24) * 2, torch.tensor([1, 3])])
    assert torch.equal(grown.rank_of.full_tensor(), ranks[torch.arange(26) != 5])


def test_whole_attributes_are_cut_and_change():
    worlds.run(from_whole, 2)


# Edges in an adj_t ----------------------------------------------------------------------


def in_adj(size_of_step):
    mesh = worlds.mesh()
    plain = GRAPHS["loops_and_copies"]().coalesce()
    n = plain.num_nodes
    g = torch.Generator().manual_seed(3)
    values = torch.rand(plain.num_edges, generator=g, dtype=torch.float64) + 0.1
    adj = torch.sparse_coo_tensor(plain.edge_index.flip(0), values, (n, n)).coalesce()
    data = Data(x=plain.x, y=plain.y, train_mask=plain.train_mask, adj_t=adj)
    share = pdc.partition(data, mesh, "random")
    torch.manual_seed(1)
    model = (
        pyg.GCNConv(7, 4, normalize=False).double(),
        pyg.GCNConv(7, 4, add_self_loops=False).double(),
    )
    nets = pdc.convert(copy.deepcopy(torch.nn.ModuleList(model)))
    _ = nets[1](share.x, share.adj_t)
    more, rows = growth(plain, 3, 8, seed=size_of_step)
    del more["edge_attr"]
    ends = more["edge_index"].unique(dim=1)
    known = plain.edge_index.t().unsqueeze(1) == ends.t().unsqueeze(0)
    ends = ends[:, ~known.all(-1).any(0)]  # entries that are not there yet
    fresh = torch.arange(ends.size(1)).double() + 0.5
    new = torch.sparse_coo_tensor(ends.flip(0), fresh, (n + 3, n + 3)).coalesce()
    gone = plain.edge_index[:, :7]
    lost = [int(v) for v in range(n) if v not in ends][:2]
    for given in (new, {"edge_index": ends, "edge_weight": fresh}):
        grown, ids = pdc.update(
            share,
            new_edges=given,
            new_nodes=rows,
            removed_edges=gone,
            removed_nodes=lost,
            return_mapping=True,
        )
        dense = torch.zeros(n + 3, n + 3).double()
        dense[:n, :n] = adj.to_dense()
        dense[gone[1], gone[0]] = 0
        dense += new.to_dense()
        keep = torch.ones(n + 3, dtype=torch.bool)
        keep[lost] = False
        whole_adj = dense[keep][:, keep].to_sparse()
        x = torch.cat([plain.x, rows["x"]])[keep]
        assert torch.equal(grown.x.full_tensor(), x)
        assert int((ids < 0).sum()) == len(lost)
        for ours, theirs in zip(nets, model, strict=True):
            one, two = grown.x.clone().requires_grad_(), x.clone().requires_grad_()
            got, want = ours(one, grown.adj_t), theirs(two, whole_adj)
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-9, atol=1e-9)
            got.sin().sum().backward()
            want.sin().sum().backward()
            grad = one.grad.full_tensor()
            torch.testing.assert_close(grad, two.grad, rtol=1e-9, atol=1e-9)
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9)
            ours.zero_grad()
            theirs.zero_grad()
    alone = T.ToSparseTensor(attr="edge_weight")(
        pdc.partition(
            Data(x=plain.x, edge_index=plain.edge_index, edge_weight=values),
            mesh,
            "random",
        )
    )
    assert alone.edge_index is None
    given = {"edge_index": ends, "edge_weight": fresh}
    alone = pdc.update(
        alone,
        new_edges=given,
        new_nodes={"x": rows["x"]},
        removed_edges=gone,
        removed_nodes=lost,
    )
    got = nets[0](alone.x, alone.adj_t).full_tensor()
    torch.testing.assert_close(got, model[0](x, whole_adj), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="give new_edges a 'adj_t'"):
        pdc.update(share, new_edges=ends[:, :1])
    adj = torch.sparse_coo_tensor(torch.tensor([[1, 2], [0, 1]]), torch.ones(2), (3, 3))
    share = pdc.partition(Data(x=plain.x[:3], adj_t=adj.coalesce().double()), mesh)
    loop = torch.sparse_coo_tensor(torch.tensor([[2], [2]]), torch.ones(1), (3, 3))
    grown = pdc.update(share, new_edges=loop.coalesce().double())
    assert grown.adj_t.looped  # on all ranks, though one has the loop
    gcn = pdc.convert(pyg.GCNConv(7, 4).double())
    ends = torch.tensor([[1, 2, 2], [0, 1, 2]])
    adj = torch.sparse_coo_tensor(ends, torch.ones(3).double(), (3, 3))
    want = gcn(plain.x[:3], adj.coalesce().to_sparse_csr())
    alike.as_pyg_or_refused(
        lambda: gcn(grown.x, grown.adj_t), want, "add_self_loops=False"
    )


@tiers.parametrize("size", [1, 2, 3, 4], [2])
def test_edges_of_an_adj_change(size):
    worlds.run(in_adj, size, 3)
