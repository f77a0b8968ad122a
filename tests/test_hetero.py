"""The full graph of a HeteroData, spread over ranks: each case equals single-process PyG."""

import copy
import itertools
import math
import warnings

import alike
import numpy as np
import pytest
import second_device
import tiers
import torch
import torch_geometric.nn as pyg
import worlds
from torch_geometric.data import HeteroData

import pyg_distcomm as pdc
import pyg_distcomm.nn as dist
from pyg_distcomm.cli import main
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.folder import read_part, verify_folder, write_folder
from pyg_distcomm.partition.layout import folder_meta, write_meta
from pyg_distcomm.partition.part_share import cut_graph
from pyg_distcomm.partition.partition import Partition, PartitionReport

pytestmark = pytest.mark.usefixtures("place")

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
COUNTS = {"paper": 41, "author": 23, "venue": 6, "field": 1}


def graph(features=True, cites=130):
    """A graph with teeth: an empty relation, few edges, loops, repeats, types of few nodes."""
    g = torch.Generator().manual_seed(1)
    data = HeteroData()
    for name, count in COUNTS.items():
        data[name].num_nodes = count
        if features:
            x = torch.randn(count, 4 + len(name), generator=g, dtype=torch.float64)
            data[name].x = x
    data["paper"].y = torch.randint(0, 3, (COUNTS["paper"],), generator=g)
    data["paper"].train_mask = torch.rand(COUNTS["paper"], generator=g) < 0.6

    def edges(source, target, count):
        ends = COUNTS[source], COUNTS[target]
        return torch.stack([torch.randint(0, n, (count,), generator=g) for n in ends])

    for source, name, target, count in (
        ("paper", "cites", "paper", cites),
        ("author", "writes", "paper", 70),
        ("paper", "written", "author", 70),
        ("paper", "in", "venue", 3),
        ("venue", "of", "paper", 0),
        ("field", "has", "paper", 25),
        ("author", "knows", "field", 9),
    ):
        data[source, name, target].edge_index = edges(source, target, count)
        weight = torch.rand(count, 2, generator=g, dtype=torch.float64)
        data[source, name, target].edge_attr = weight
    return data


def pair(make):
    return lambda data: {kind: make() for kind in data.edge_types}


LAYERS = {
    "sage": lambda nn: nn.SAGEConv((-1, -1), 6),
    "sage max": lambda nn: nn.SAGEConv((-1, -1), 6, aggr="max", normalize=True),
    "gat": lambda nn: nn.GATConv((-1, -1), 3, heads=2, add_self_loops=False),
    "gatv2": lambda nn: nn.GATv2Conv((-1, -1), 6, add_self_loops=False, edge_dim=2),
    "transformer": lambda nn: nn.TransformerConv((-1, -1), 3, heads=2),
    "graph": lambda nn: nn.GraphConv((-1, -1), 6),
    "general": lambda nn: nn.GeneralConv((-1, -1), 6),
    "cluster nodes": lambda nn: nn.LEConv((-1, -1), 6),
}


class Stack(torch.nn.Module):
    def __init__(self, data, kind, aggr, nn):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            pyg.HeteroConv({t: LAYERS[kind](nn) for t in data.edge_types}, aggr=aggr)
            for _ in range(2)
        )
        self.out = torch.nn.LazyLinear(3)
        self.takes_attr = kind == "gatv2"

    def forward(self, x, edge_index, edge_attr):
        more = {"edge_attr_dict": edge_attr} if self.takes_attr else {}
        for layer in self.layers:
            x = {name: h.relu() for name, h in layer(x, edge_index, **more).items()}
        return self.out(x["paper"].flatten(1))


class Mixed(torch.nn.Module):
    """HGT, or HAN, twice."""

    def __init__(self, data, kind, width, nn):
        super().__init__()
        layer = {"hgt": nn.HGTConv, "han": nn.HANConv}[kind]
        widths = {name: data[name].x.size(1) for name in data.node_types}
        self.first = layer(widths, width, data.metadata(), heads=2)
        self.second = layer(width, 6, data.metadata(), heads=3)
        self.out = torch.nn.Linear(6, 3)

    def forward(self, x, edge_index, edge_attr):
        x = {k: h for k, h in self.first(x, edge_index).items() if h is not None}
        edge_index = {k: e for k, e in edge_index.items() if k[0] in x and k[2] in x}
        return self.out(self.second(x, edge_index)["paper"])


class Plain(torch.nn.Module):
    def __init__(self, nn):
        super().__init__()
        self.first = nn.SAGEConv((-1, -1), 8)
        self.second = nn.GATConv((-1, -1), 3, heads=2, add_self_loops=False)
        self.out = pyg.Linear(-1, 3)

    def forward(self, x, edge_index):
        x = self.first(x, edge_index).relu()
        return self.out(self.second(x, edge_index))


class Lifted(torch.nn.Module):
    def __init__(self, data, aggr, nn):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.lifted = pyg.to_hetero(Plain(nn), data.metadata(), aggr=aggr)

    def forward(self, x, edge_index, edge_attr):
        return self.lifted(x, edge_index)["paper"]


def model_of(data, kind, option, nn=pyg):
    torch.manual_seed(4)
    if kind in ("hgt", "han"):
        model = Mixed(data, kind, option, nn)
    elif kind == "to_hetero":
        model = Lifted(data, option, nn)
    else:
        model = Stack(data, kind, option, nn)
    model = model.double()
    with torch.no_grad():
        torch.manual_seed(5)
        model(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    return model


def train(model, data, link=None, steps=2):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        out = model(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
        mask = data["paper"].train_mask
        loss = torch.nn.functional.cross_entropy(out[mask], data["paper"].y[mask])
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if link is not None:
            link.step()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, grads, out


def equal(kind, option, method, nn, grid=None, place="cpu"):
    device = second_device.device_of(place)
    data = graph()
    want = train(model_of(data, kind, option), data)
    share = pdc.partition(data, worlds.mesh(grid=grid), method).to(device)
    model = model_of(data, kind, option, dist if nn == "swapped" else pyg).to(device)
    got = train(model if nn == "swapped" else pdc.convert(model), share)
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), **CLOSE)
    if kind == "hgt":  # zeros, by which an optimizer with weight decay shrinks weights
        assert got[1].keys() == want[1].keys()
    for name in got[1].keys() | want[1].keys():  # None for what nothing is made of
        none = torch.tensor(0.0).double()
        one, two = (side[1].get(name, none).cpu() for side in (got, want))
        torch.testing.assert_close(*torch.broadcast_tensors(one, two), **CLOSE)
    assert got[2].device == device
    torch.testing.assert_close(got[2].full_tensor().cpu(), want[2], **CLOSE)


CASES = [
    *((kind, "sum") for kind in LAYERS),
    *(("sage", aggr) for aggr in ("mean", "max", "min", "cat")),
    *(("to_hetero", aggr) for aggr in ("sum", "mean", "max")),
    ("hgt", 16),
    ("hgt", 2),  # keys and values narrower than features
    ("han", 8),
]
DEFAULT = [("sage", "mean"), ("hgt", 16), ("han", 8)]


@tiers.parametrize("size", [1, 2, 3, 4], [2])
@tiers.parametrize(("kind", "option"), CASES, DEFAULT)
def test_training_equals_pyg(kind, option, size, place):
    worlds.run(equal, size, kind, option, "random", "converted", None, place)


@worlds.on(2)
def test_bytes_are_those_of_the_halos_of_all_relations():
    data, mesh = graph(), worlds.mesh()
    share = pdc.partition(data, mesh, "random")
    kinds = itertools.cycle([pyg.GraphConv, pyg.SAGEConv])
    convs = pair(lambda: next(kinds)((-1, -1), 5))(data)
    layer = pdc.convert(pyg.HeteroConv(convs)).double()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        layer(share.x_dict, share.edge_index_dict)
        mesh.ledger.reset()
        patch.setattr(pyg.Aggregation, "reduce", None)  # kernels add, not PyG's scatter
        layer(share.x_dict, share.edge_index_dict)
    want = 0
    for key, edges in share.edge_index_dict.items():
        here = edges.topology.locals
        ghosts = {*edges.topology.source_gid.tolist()} - {*edges.sources.gid.tolist()}
        assert len(ghosts) == len(here.ghost_gid)  # each row that is needed, once
        width = data[key[0]].x.size(1)
        price = here.halo.price(width).words
        if edges.topology.sources is None:  # a product: the fewest of rows and sums
            price = min(price, edges.topology.sum_plan().matrix.price(width).words)
        want += price
    # what lazy layers plan in their second call apart
    moved = ("halo", "halo_reduce", "all_gather", "reduce_scatter")
    assert sum(map(mesh.ledger.words, moved)) == want > 0


KEPT = {
    "graph": lambda data: pyg.HeteroConv(
        pair(lambda: pyg.GraphConv((-1, -1), 5))(data)
    ),
    "hgt": lambda data: pyg.HGTConv(-1, 24, data.metadata(), heads=2),
}


@tiers.parametrize("size", [2, 3, 4], [2])
@tiers.parametrize("kind", ["graph", "hgt"], ["graph"])
@worlds.on()
def test_features_that_do_not_change_travel_twice(kind, size):
    data, mesh = graph(), worlds.mesh()
    del data["paper", "cites", "paper"]
    share = pdc.partition(data, mesh, "random")
    torch.manual_seed(3)
    model = KEPT[kind](data).double()
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    ours = pdc.convert(copy.deepcopy(model))
    key = "author", "writes", "paper"
    sent = []
    for epoch in range(6):
        if epoch == 3:  # in place, on all ranks
            data["author"].x.mul_(2.0)
            share["author"].x.mul_(2.0)
        if epoch == 5:  # another graph object, that keeps nothing
            other = share[key].edge_index.with_ordering(keep_inputs=False)
            share[key].edge_index = other
        mesh.ledger.reset()
        found = []
        for net, on in ((model, data), (ours, share)):
            net.zero_grad()
            out = net(on.x_dict, on.edge_index_dict)["paper"]
            if on is share:
                sent.append(mesh.ledger.words())
                out = out.full_tensor() if epoch % 2 else out
            out.sin().sum().backward()
            found.append((out, [p.grad for p in net.parameters()]))
        alike.same(found[1], found[0])
    prices = {
        k: e.topology.locals.halo.price(share[k[0]].x.size(1)).words
        for k, e in share.edge_index_dict.items()
    }
    every = sum(prices.values())
    authors = sum(words for k, words in prices.items() if k[0] == "author")
    assert sent[1:] == [every, 0, authors, authors, prices[key]]  # 0: of plans, too


@worlds.on(2)
def test_edges_between_two_types_are_edges():
    data = graph()
    share = pdc.partition(data, worlds.mesh(), "random")
    whole, sides = data["author", "writes", "paper"].edge_index, []
    for d in (share, data):
        edges = d["author", "writes", "paper"].edge_index
        assert edges.shape == whole.shape
        x = d.x_dict["author"], d.x_dict["paper"]
        torch.manual_seed(0)
        layer = dist.SAGEConv((10, 9), 4, aggr="max").double()
        back, looped = dist.SAGEConv((9, 10), 4), dist.GATConv((10, 9), 4)
        wide = dist.GATConv((10, 9), 4, heads=2, add_self_loops=False).double()
        found = {
            "edges": edges,
            "mask": layer(x, edges[:, torch.arange(whole.size(1)) % 3 > 0]),
            "own mask": layer(x, edges[:, edges[1] > 4]),
            "ids": layer(x, edges[:, torch.tensor([3, 1, 8])]),
            "joined": layer(x, torch.cat([edges, edges[:, :5]], 1)),
            "an ordinary edge_index": layer(x, whole.to(edges.device)),
            "back": back.double()(x[::-1], edges.flip(0)),
            "attention": wide(x, edges, return_attention_weights=True),
            "loops": looped.double()(x, edges),  # PyG adds them to the first nodes
            "sizes": [wide(x, edges, size=size) for size in ((23, 41), (None, 41))],
        }
        sides.append(found)
        with pytest.raises(ValueError, match="expected size 40"):  # as PyG says
            wide(x, edges, size=(23, 40))
    alike.same(*sides)
    x = share.x_dict["author"], share.x_dict["paper"]
    edges = share["author", "writes", "paper"].edge_index
    with pytest.raises(ValueError, match="flip them"):  # where PyG says of ids
        dist.GATConv((10, 9), 4, flow="target_to_source").double()(x, edges)


@worlds.on(3)
def test_what_cannot_be_is_said():
    data, mesh = graph(), worlds.mesh()
    share = pdc.partition(data, mesh, "random")
    edges = share["author", "writes", "paper"].edge_index
    x = share.x_dict["author"], share.x_dict["paper"]
    with pytest.raises(TypeError, match="a pair"):
        dist.GraphConv(10, 4).double()(x[0], edges)
    with pytest.raises(TypeError, match="a pair"):
        dist.GCNConv(10, 4).double()(x[0], edges)
    with pytest.raises(ValueError, match="one row for each node"):
        dist.GraphConv((9, 10), 4).double()(x[::-1], edges)
    mixed = Mixed(data, "hgt", 8, dist).double()
    with pytest.raises(TypeError, match="a dictionary of rows by node type"):
        mixed([share.x_dict["paper"]], share.edge_index_dict, None)
    lacking = {k: v for k, v in share.x_dict.items() if k != "venue"}
    with pytest.raises(ValueError, match="edges are of 'venue' too"):
        mixed(lacking, share.edge_index_dict, None)
    some = {**share.edge_index_dict}
    some["author", "writes", "paper"] = data["author", "writes", "paper"].edge_index
    with pytest.raises(TypeError, match="spread over ranks and others are not"):
        Mixed(data, "hgt", 8, dist).double()(share.x_dict, some, None)
    twice = pdc.partition(data, mesh, "block")
    for kind in ("hgt", "han"):
        model = Mixed(data, kind, 8, dist).double()
        out = model(twice.x_dict, share.edge_index_dict, None)
        alike.same(out, model(data.x_dict, data.edge_index_dict, None))
    few = HeteroData()  # a rank without nodes of either type raises what the others do
    few["a"].x = few["b"].x = torch.ones(2, 3)
    few["a", "to", "b"].edge_index = ends = torch.tensor([[0, 1], [1, 1]])
    owners = {"a": torch.tensor([0, 1]), "b": torch.tensor([1, 0])}
    share = pdc.partition(few, mesh, owners)
    x = share["a"].x, share["b"].x
    edges, plain = share["a", "to", "b"].edge_index, (few["a"].x, few["b"].x)
    for layer in (dist.SAGEConv((3, 3), 4), dist.GATConv((3, 3), 4)):
        got = layer(x[::-1], edges), layer(x, ends)
        alike.same(got, (layer(plain[::-1], ends), layer(plain, ends)))


@tiers.parametrize(
    ("kind", "option", "grid"),
    [
        ("hgt", 6, (1, 2, 1)),
        ("han", 8, (1, 1, 3)),
        ("sage max", "sum", (2, 1, 2)),
        ("gatv2", "mean", (2, 2, 1)),
        ("to_hetero", "sum", (1, 2, 2)),
    ],
    slice(1),
)
def test_on_every_grid_training_equals_pyg(kind, option, grid, place):
    size = math.prod(grid)
    worlds.run(equal, size, kind, option, "random", "converted", grid, place)


class Learnt(torch.nn.Module):
    """Rows that are learnt, for types without features."""

    def __init__(self, tables, data):
        super().__init__()
        self.tables = torch.nn.ModuleDict(tables)
        torch.manual_seed(3)
        self.layers = pyg.HeteroConv(pair(lambda: pyg.SAGEConv((5, 5), 3))(data))

    def forward(self, edge_index):
        of = lambda t: t() if isinstance(t, pdc.DistEmbedding) else t.weight  # noqa: E731
        x = {kind: of(table) for kind, table in self.tables.items()}
        return self.layers(x, edge_index)["paper"]


@worlds.on(2)
def test_types_without_features_learn_rows():
    data, mesh = graph(features=False), worlds.mesh()
    torch.manual_seed(3)
    plain = {
        k: torch.nn.Embedding(n, 5, dtype=torch.float64) for k, n in COUNTS.items()
    }
    alone = Learnt(plain, data).double()
    share = pdc.partition(data, mesh, "random")
    tables = {}
    for name, count in COUNTS.items():
        made = pdc.DistEmbedding(count, 5, like=share[name], dtype=torch.float64)
        with torch.no_grad():
            made.shard.copy_(plain[name].weight[made.rows.gid])
        tables[name] = made
    together = pdc.convert(Learnt(tables, data).double())
    for model, given in ((alone, data), (together, share)):
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            opt.zero_grad()
            out = model(given.edge_index_dict)
            torch.nn.functional.cross_entropy(out, given["paper"].y).backward()
            opt.step()
    for name, table in tables.items():
        alike.same(table.shard, plain[name].weight[table.rows.gid])


@pytest.mark.parametrize("method", ["ldg", "metis"])
def test_a_cut_spreads_the_nodes_of_each_type(method):
    g = torch.Generator().manual_seed(0)
    counts = torch.tensor([2000, 300, 120])
    kinds = torch.arange(3).repeat_interleave(counts)
    edges = torch.randint(0, 2420, (2, 12_000), generator=g)
    edges[1, :4000] = torch.randint(2300, 2420, (4000,), generator=g)
    found = cut(edges, 2420, 4, method, kinds=kinds)
    for kind, count in enumerate(counts.tolist()):
        here = torch.bincount(torch.as_tensor(found.owner)[kinds == kind], minlength=4)
        assert int(here.max()) <= 1.15 * count / 4 + 1, (method, kind, here)


def parts_of(folder, data, parts, method="metis"):
    owners = cut_graph(data, parts, method)
    return write_folder(folder, data, owners), owners


def in_parts(share):
    """What this rank has of each attribute, by name."""
    stores = share.stores
    return {
        (s._key, k): v.to_local() if hasattr(v, "to_local") else v
        for s in stores
        for k, v in s.items()
    }


def from_folder(folder, merge):
    data, mesh = in_folder(), worlds.mesh()
    owners = cut_graph(data, 3 if merge else mesh.size, "metis")
    share = pdc.load_partition(folder, mesh, merge=merge)
    if merge:
        home = torch.arange(3) * mesh.size // 3
        cuts = [k * 3 // mesh.size for k in range(1, mesh.size)]
        home = torch.bucketize(torch.arange(3), torch.tensor(cuts), right=True)
        owners = Partition.from_owner(home[owners.owner.long()], mesh.size)
    begin, by_type = 0, {}
    for name in data.node_types:
        by_type[name] = owners.owner[begin : begin + data[name].num_nodes]
        begin += data[name].num_nodes
    again = pdc.partition(data, mesh, by_type)
    assert share.metadata() == again.metadata()
    alike.same(in_parts(share), in_parts(again), rtol=0, atol=0)
    if not merge:
        report = folder_meta(folder)["report"]
        assert pdc.partition_report(share) == PartitionReport.from_dict(report)
    want = train(model_of(data, "hgt", 8), data)
    got = train(pdc.convert(model_of(data, "hgt", 8)), share)
    alike.same(torch.tensor(got[0]), torch.tensor(want[0]))
    alike.same(got[2], want[2])


def in_folder():
    """What a folder keeps: odd names, arrays, plain values, labels of pairs."""
    data = graph()
    data["author"].age = torch.arange(COUNTS["author"]).numpy()
    data["author"]["a,b/c %"] = torch.rand(COUNTS["author"], 0)
    data["author", "knows", "field"].edge_label_index = torch.tensor([[0, 1], [0, 0]])
    data["author", "knows", "field"].edge_label = torch.tensor([1.0, 0.0])
    data["paper"].names, data.year = ["x", "y"], 2024
    data.prior = torch.tensor([0.5, 0.5])
    return data


@tiers.parametrize(
    ("parts", "size", "merge"),
    [(2, 2, False), (3, 3, False), (3, 2, True), (3, 1, True), (1, 1, False)],
    slice(2, 3),
)
def test_each_rank_reads_its_part_of_a_folder(tmp_path, parts, size, merge):
    figures, owners = parts_of(tmp_path / "out", in_folder(), parts)
    assert verify_folder(tmp_path / "out") == []
    assert sum(figures.nodes) == sum(COUNTS.values())
    assert figures.nodes == owners.sizes
    worlds.run(from_folder, size, str(tmp_path / "out"), merge)


def test_a_damaged_folder_of_types_is_refused(tmp_path):
    out, part = tmp_path / "out", tmp_path / "out" / "part_00001"
    parts_of(out, in_folder(), 2)
    meta = folder_meta(out)
    for change in (
        lambda types: types["nodes"].pop("field"),
        lambda types: types["edges"][0].update(edges=[1, 1]),
        lambda types: types["nodes"].update(paper=[40, "1"]),
        lambda types: types["edges"].append(types["edges"][0]),
        lambda types: types.update(edges=3),
    ):
        wrong = copy.deepcopy(meta)
        change(wrong["types"])
        write_meta(out, wrong)
        with pytest.raises(ValueError, match="has fields that this package does not"):
            read_part(out, 0)
    write_meta(out, meta)
    ids = np.load(part / "edge_index.npy")
    writes = read_part(out, 1).types.slices("edge", 1)["author", "writes", "paper"]
    ids[0, writes.start] = 0  # a paper, not an author
    np.save(part / "edge_index.npy", ids)
    with pytest.raises(ValueError, match=r"author.writes.paper has an end"):
        read_part(out, 1, verify="sizes")
    with pytest.raises(ValueError, match="for a Data"):
        write_folder(
            out, graph(), cut_graph(graph(), 2, "ldg"), grid=(2, 1, 1), force=True
        )


def test_the_command_cuts_and_shows_a_heterodata(tmp_path, capsys):
    torch.save(graph(), tmp_path / "graph.pt")
    out = str(tmp_path / "out")
    given = ["partition", str(tmp_path / "graph.pt"), out, "--parts", "2"]
    assert main(given) == 0
    capsys.readouterr()
    assert main(["inspect", out]) == 0
    shown = capsys.readouterr().out
    assert "node type   paper: 41 nodes" in shown
    assert "edge type   venue of paper: 0 edges, max/mean 1.000, 0 halo rows" in shown


@tiers.parametrize(("kind", "option"), [("hgt", 2), ("sage", "sum")], slice(0, 1))
@worlds.on(2)
def test_relations_go_by_links_of_their_own(kind, option):
    data, mesh = graph(), worlds.mesh()
    few = pdc.LinkPolicy(pdc.halo.codecs.Quantise(2), exact_last=False)
    link = {"cites": few, ("author", "writes", "paper"): few, "paper__in__venue": None}
    sent = {}
    for name, given in (("exact", None), ("some", link), ("all", few)):
        share = pdc.partition(data, mesh, "random", link=given)
        model = pdc.convert(model_of(data, kind, option))
        mesh.ledger.reset()
        losses = train(model, share, few)[0]
        assert all(math.isfinite(loss) for loss in losses)
        sent[name] = mesh.ledger.bytes()
    assert sent["all"] < sent["some"] < sent["exact"]
    for wrong, words in (
        ({"likes": few}, "the edge types are"),
        ({"cites": few, ("paper", "cites", "paper"): few}, "two links"),
        ({"cites": "1 bit"}, "must be a LinkPolicy"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            pdc.partition(data, mesh, "random", link=wrong)
