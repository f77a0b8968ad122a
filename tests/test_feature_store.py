"""The feature store: rows by id, wherever they are, and what they cost."""

from dataclasses import dataclass

import numpy as np
import pytest
import tiers
import torch
import worlds
from batches import hetero
from problems import GRAPHS, owners
from torch_geometric.data import TensorAttr
from torch_geometric.data.feature_store import AttrView

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.halo.codecs import Cast, Chain, Plain, Quantise, RangeBits, RowSample
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.loader import DistFeatureStore
from pyg_distcomm.loader.feature_store import Index, out_degrees, top_scoring_ids
from pyg_distcomm.loader.fetch import EDGES

pytestmark = pytest.mark.usefixtures("place")

WORLDS = [(p, c) for p in (1, 2, 3, 4) for c in range(1, p + 1) if p % c == 0]
everywhere = tiers.parametrize(("size", "c"), WORLDS, [(1, 1), (2, 1)])


def in_turn(names, cases, default):
    """Runs every case in every world; by default a few in each, by their places."""
    every = [(*world, *case) for world in WORLDS for case in cases]
    chosen = [(*world, *cases[k]) for world, ks in default.items() for k in ks]
    return tiers.parametrize(("size", "c", *names), every, chosen)


OPS = {"plan": 8, "fetch_ids": 4, "fetch_rows": 1}  # bytes of a word


def channel(c=1):
    """The channel of this world with replication c, kept, with a clean ledger."""
    return worlds.channel(worlds.mesh(), c)


def random_ids(rank, count, total, seed=0):
    g = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, total, (count,), generator=g)


def shared(c, graph="directed", cutter="random"):
    road, data = channel(c), GRAPHS[graph]()
    mesh = worlds.mesh()
    return road, data, pdc.partition(data, mesh, owners(cutter, data, mesh.size))


def edge_owner(data, share):
    return share.edge_index.nodes.partition.owner_of(data.edge_index[1])


# Rows ----------------------------------------------------------------------------------


CUTS = (
    ("random", "directed"),
    ("empty_rank", "tiny"),
    ("lopsided", "star"),
    ("block", "edgeless"),
)


@in_turn(("cutter", "graph"), CUTS, {(1, 1): [0], (2, 1): [1, 3], (4, 2): [0]})
@worlds.on()
def test_rows_are_those_of_the_whole_tensor(size, c, cutter, graph):
    road, data, share = shared(c, graph, cutter)
    n, e, rank = data.num_nodes, data.edge_index.size(1), road.world.rank
    store = DistFeatureStore.from_data(share, road)
    owner = edge_owner(data, share)
    wanted = [
        torch.cat([random_ids(rank, 25, n), torch.tensor([0, n - 1, 0])]),
        torch.empty(0, dtype=torch.int64) if rank % 2 else torch.arange(n),
        torch.full((7,), 3 % n),  # a hub that everybody wants
        torch.arange(n).flip(0).int(),
        store._row_groups[None].index.gid,  # nothing that travels
    ]
    for ids in wanted:
        edges = ids[ids < e].long()
        asked = {None: ids, EDGES: (edges, owner[edges])}
        found = store.fetch(asked)
        for name in ("x", "y", "train_mask"):
            assert torch.equal(found[None][name], data[name][ids.long()]), name
        for name in ("edge_weight", "edge_attr"):
            assert torch.equal(found[EDGES][name], data[name][edges]), name
        pool = store.fetch_unique(asked)[None]
        assert torch.equal(pool.ids, ids.long().unique())
        assert torch.equal(pool.rows["x"][pool.place], data.x[pool.ids])
        assert torch.equal(pool.take(ids.long())["y"], data.y[ids.long()])
    only = {None: wanted[0]} if rank == 0 else {}
    found = store.fetch(only, attrs={None: ["y"]})
    assert list(found) == list(only)
    assert all(list(rows) == ["y"] for rows in found.values())


@pytest.mark.parametrize(
    "gid", [[], [0], [3, 4, 5], [0, 1, 2, 3], [9, 10, 11], [1, 4, 9], [0, 2, 3, 11]]
)
def test_ids_are_found_in_a_block_and_beside_it_none_are(gid):
    index = Index(torch.tensor(gid, dtype=torch.int64), 12)
    ids = torch.arange(12).flip(0)
    place, here = index.places(ids.clone())
    assert here.tolist() == [v in gid for v in ids.tolist()]
    assert place.tolist() == [gid.index(v) if v in gid else 0 for v in ids.tolist()]


@everywhere
@worlds.on()
def test_rows_of_every_type_and_width(size, c):
    road = channel(c)
    n, rank = 50, road.world.rank
    whole = {
        "bool": torch.rand(n) < 2,
        "odd": torch.arange(n * 9, dtype=torch.uint8).view(n, 9),
        "half": torch.arange(n * 3).view(n, 3).half(),
        "brain": torch.arange(n * 5).view(n, 5).bfloat16(),
        "deep": torch.arange(n * 6, dtype=torch.float64).view(n, 2, 3),
        "hollow": torch.empty(n, 0),
        "complex": torch.arange(n).to(torch.complex64),
        "int": torch.arange(n, dtype=torch.int16),
    }
    store = DistFeatureStore(road)
    owner = torch.arange(n) * 7 % road.world.size
    gid = (owner == rank).nonzero().view(-1)
    store.add_group("thing", gid, n)
    for name, values in whole.items():
        store.add("thing", name, values[gid])
    store.learn_owners("thing")
    ids = random_ids(rank, 33, n)
    found = store.fetch({"thing": ids})["thing"]
    assert set(found) == set(whole)
    for name, values in whole.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name], values[ids]), name


@everywhere
@worlds.on()
def test_groups_of_a_heterogeneous_graph(size, c):
    road, data = channel(c), hetero()
    share = pdc.partition(data, worlds.mesh(), "random")
    store = DistFeatureStore.from_data(share, road, cache=5)
    writes = ("author", "writes", "paper")
    rank = road.world.rank
    ids = {"paper": random_ids(rank, 30, 40), "author": random_ids(rank, 9, 25)}
    edges = random_ids(rank, 20, 200)
    target = data[writes].edge_index[1]
    owner = share["paper"].x.rows.partition.owner_of(target)
    found = store.fetch({**ids, writes: (edges, owner[edges])})
    for name, one in ids.items():
        assert torch.equal(found[name]["x"], data[name].x[one])
    assert torch.equal(found[writes]["edge_attr"], data[writes].edge_attr[edges])
    # without owners, once they have been looked for
    assert torch.equal(store[writes, "edge_attr", edges], found[writes]["edge_attr"])
    degree = torch.bincount(data[writes].edge_index[0], minlength=25)
    chosen = store._row_groups["author"].cached_gid
    best = torch.sort(degree, descending=True, stable=True).indices[:5]
    assert torch.equal(chosen, best.sort().values)


# Bytes ---------------------------------------------------------------------------------


WAYS = [(None, 0), ("fp16", 0.2), ("int8", 7)]


@in_turn(("form", "cache"), WAYS, {(1, 1): [0], (2, 1): [2], (4, 2): [1]})
@worlds.on()
def test_the_ledger_says_what_the_price_says(size, c, form, cache):
    road, data, share = shared(c)
    n, e, rank = data.num_nodes, data.edge_index.size(1), road.world.rank
    store = DistFeatureStore.from_data(share, road, wire=form, cache=cache)
    owner = edge_owner(data, share)
    for count, attrs in ((40, None), (0, None), (90, {None: ["x", "y"]})):
        ids, edges = random_ids(rank, count, n), random_ids(rank, 2 * count, e, 1)
        wanted = {None: ids, EDGES: (edges, owner[edges])}
        want = store.travelling(wanted, attrs)
        every = collectives.all_gather_object(want, road.row)
        asked = {g: [one[g][road.row.rank] for one in every] for g in want}
        price = store.price(want, asked, attrs)
        ledger = worlds.mesh().ledger
        ledger.reset()
        store.fetch(wanted, attrs)
        for op, word in OPS.items():
            assert ledger.words(op, "row") == price[op].words, op
            assert ledger.bytes(op, "row") == price[op].bytes(word), op
            assert ledger.messages(op, "row") == price[op].messages, op
        assert ledger.bytes() == sum(price[op].bytes(s) for op, s in OPS.items())
        if count == 90:  # the row of x is 7 numbers, of y one of 8 bytes
            width = {None: 7 * 8, "fp16": 7 * 2, "int8": 7 + 4}[form] + 8
            assert price["fetch_rows"].words == width * sum(want[None])
            assert sum(want[EDGES]) == 0


@tiers.parametrize(("size", "c"), WORLDS, [(4, 2)])
@worlds.on()
def test_traffic_falls_with_replication_and_the_cache(size, c):
    road = channel(c)
    n, f = 480, 16
    x = torch.arange(n * f, dtype=torch.float32).view(n, f)
    store = DistFeatureStore.from_replicated(x, road)
    world, ledger = road.world, worlds.mesh().ledger

    def travelled(ids):
        ledger.reset()
        assert torch.equal(store[ids], x[ids])
        return ledger.bytes("fetch_rows") / (4 * f)

    every = torch.arange(n)
    assert travelled(every) == n - n * c // world.size
    ids = random_ids(world.rank, 300, n)
    share = travelled(ids) / len(ids.unique())
    assert abs(share - (1 - c / world.size)) < 0.12
    # with a cache: the rows that are neither in the block nor in it
    score = torch.rand(n, generator=torch.Generator().manual_seed(1))
    store.keep(None, score, 0.25)
    hot = score.sort(descending=True).indices[: n // 4]
    block = every[every // (n // world.size) // c == road.block]
    known = torch.cat([hot, block])
    assert travelled(every) == n - len(known.unique())
    assert travelled(ids) == int((~torch.isin(ids.unique(), known)).sum())
    store.keep(None, score, 0)
    assert travelled(every) == n - n * c // world.size
    store.keep(None, score, 1.0)
    assert travelled(every) == 0


# The cache -----------------------------------------------------------------------------


@in_turn(
    ["ranking"], [("degree",), ("given",)], {(1, 1): [0], (2, 1): [1], (4, 2): [0]}
)
@worlds.on()
def test_the_cache_is_the_same_on_all_ranks(size, c, ranking):
    road, data, share = shared(c, "star")
    n, rank = data.num_nodes, road.world.rank
    given = torch.arange(n).float() if ranking == "given" else ranking
    store = DistFeatureStore.from_data(
        share, road, cache=0.2, ranking=given, wire="int8"
    )
    row_group = store._row_groups[None]
    assert len(row_group.cached_gid) == round(0.2 * n)
    if ranking != "given":
        assert row_group.cached_gid[0] == 0  # the hub
    assert not torch.isin(row_group.cached.gid, row_group.index.gid).any()
    known = torch.cat([row_group.cached_gid, row_group.index.gid]).unique()
    x = store.fetch({None: known})[None]["x"]
    assert torch.equal(x, data.x[known])  # kept as they are, whatever the wire
    late = torch.arange(n * 2.0).view(n, 2)
    store.put_tensor(late, None, "late", None)  # what comes later is kept too
    assert torch.equal(store.fetch({None: known})[None]["late"], late[known])
    store.update_tensor(late + 1, None, "late", None)  # and so is what takes its place
    assert torch.equal(store.fetch({None: known})[None]["late"], late[known] + 1)
    store.fetch({None: random_ids(rank, 20, n)})
    kept = row_group.cached_gid.tolist()
    every = collectives.all_gather_object(kept, road.world)
    assert every == [kept] * size
    assert ranking == "degree" or kept == list(range(32, 40))


FOUR = tiers.rarely(4, "random", (2, 2, 1))


@tiers.parametrize(
    "graph", ["directed", "star", "isolated", "tiny", "edgeless"], slice(0, None, 3)
)
@pytest.mark.parametrize(
    ("size", "cutter", "grid"),
    [(1, "block", (1, 1, 1)), (3, "empty_rank", (3, 1, 1)), FOUR],
)
@worlds.on()
def test_hot_rows_are_those_of_highest_out_degree(graph, size, cutter, grid):
    data, mesh = GRAPHS[graph](), worlds.mesh(grid=grid)
    share = pdc.partition(data, mesh, owners(cutter, data, mesh.size))
    degree = out_degrees(share)[None].full_tensor()
    n = data.num_nodes
    assert torch.equal(degree.long(), torch.bincount(data.edge_index[0], minlength=n))
    rows = share.edge_index.nodes
    best = top_scoring_ids(out_degrees(share)[None].to_local(), rows.gid, 5, mesh.world)
    want = torch.sort(degree, descending=True, stable=True).indices[:5]
    assert torch.equal(best, want.sort().values)


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_what_makes_no_sense_is_refused(size):
    road, _, share = shared(1)
    typed, star = pdc.partition(hetero(), worlds.mesh(), "block"), GRAPHS["star"]()
    few, papers = torch.zeros(5), {"papr": torch.zeros(40)}
    for data, options, said in (
        (star, {}, "from_replicated"),
        (share, {"wire": "zip"}, "fp16, bf16, int8"),
        (share, {"wire": {"X": "fp16"}}, r"got wire for \['X'\]"),
        (share, {"cache": 3, "ranking": "hubs"}, "choose 'degree', or give scores"),
        (share, {"cache": 3, "ranking": few}, r"got scores \[5\]"),
        (share, {"cache": 3, "ranking": torch.full((60,), torch.nan)}, "got NaN"),
        (typed, {"cache": 3, "ranking": few}, "a dictionary with a vector for each"),
        (typed, {"cache": 3, "ranking": papers}, r"got ranking for \['papr'\]"),
        *((share, {"cache": k}, "number of rows") for k in (-1, 1.5, True, "0.5")),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            DistFeatureStore.from_data(data, road, **options)
    with pytest.raises(TypeError, match=r"give a share from pdc\.partition"):
        out_degrees(star)


# Codecs --------------------------------------------------------------------------------


FORMS = [("fp16",), ("bf16",), ("int8",)]


@in_turn(["form"], FORMS, {(2, 1): [0, 1, 2]})
@worlds.on()
def test_rows_on_the_wire_are_coded(size, c, form):
    road, data, share = shared(c)
    store = DistFeatureStore.from_data(share, road, wire=form)
    ids = torch.arange(data.num_nodes)
    found = store.fetch({None: ids})[None]
    for name in ("y", "train_mask"):
        assert torch.equal(found[name], data[name])
    here = store._row_groups[None].index.gid
    assert torch.equal(found["x"][here], data.x[here])
    error = (found["x"] - data.x).abs()
    low, high = data.x.amin(1, keepdim=True), data.x.amax(1, keepdim=True)
    bound = {
        "fp16": data.x.abs() * 2.0**-11,
        "bf16": data.x.abs() * 2.0**-8,
        "int8": (high - low + low.abs() / 128) / 510 * 1.01,
    }[form]
    assert bool((error <= bound).all())
    if c < road.world.size:
        assert float(error.sum()) > 0


def test_which_attributes_are_coded():
    store = DistFeatureStore(channel(), wire={"x": "int8", "w": Quantise()})
    store.add_group(None, torch.arange(4), 4)
    store.add(None, "x", torch.rand(4, 3))
    store.add(None, "z", torch.rand(4, 3))  # nobody asked
    store.add(None, "w", torch.rand(4))  # 5 bytes in place of 4
    codecs = {k: c.codec for k, c in store._row_groups[None].columns.items()}
    assert codecs == {"x": Quantise(strict=False), "z": Plain(), "w": Plain()}


@pytest.mark.parametrize("form", ["fp16", "bf16", "int8", Quantise(4, "stochastic")])
def test_values_that_a_codec_cannot_send_are_refused(form):
    nan, inf = float("nan"), float("inf")
    fine = {"fp16": (nan, inf, 6e4), "bf16": (nan, inf, 1e6)}.get(form, (1e6,))
    for value in (nan, inf, 6e4, 1e6, -3.4e38):
        x = torch.rand(4, 32)
        x[2, 3] = value
        if value in fine or abs(value) < 1e5:
            DistFeatureStore.from_replicated(x, channel(), wire=form)
            continue
        told = r"'x': row 2 .* holds (nan|inf|[13]\S+), with"
        with pytest.raises(ValueError, match=told):
            DistFeatureStore.from_replicated(x, channel(), wire=form)
    every = torch.full((4, 32), inf)  # would be NaN between bounds
    if form not in ("fp16", "bf16"):
        with pytest.raises(ValueError, match=r"row 0 .* holds inf, with"):
            DistFeatureStore.from_replicated(every, channel(), wire=form)


@dataclass(frozen=True)
class Compared(Quantise):
    """A codec that would write rows by what is beside them."""

    by_row = False


@pytest.mark.parametrize(
    "link",
    [
        pdc.PipeGCN(),
        pdc.VARCO(9),
        pdc.Sylvie(late=0, adaptive=True),
        pdc.BNS(0.5),
        LinkPolicy(Chain(Cast(torch.bfloat16), RowSample(4))),
        RangeBits(2),
        Compared(1),
    ],
)
def test_links_that_rows_cannot_be_fetched_by(link):
    with pytest.raises(ValueError, match=r"late, nor follow|compares or drops"):
        DistFeatureStore(channel(), wire=link)


# PyG's contract ------------------------------------------------------------------------


@everywhere
@worlds.on()
def test_what_pyg_asks_of_a_feature_store(size, c):
    road, data, share = shared(c)
    n, rank = data.num_nodes, road.world.rank
    store = DistFeatureStore.from_data(share, road)
    ids = random_ids(rank, 20, n)
    for group, name, index, given in (
        *((None, "x", ids, given) for given in (ids, ids.numpy(), ids.int())),
        (None, "y", data.train_mask, data.train_mask),
        (None, "x", 5, 5),
        (None, "x", slice(None), None),
        (EDGES, "edge_attr", slice(None), None),
        (EDGES, "edge_attr", ids, ids),
    ):
        assert torch.equal(store[group, name, given], data[name][index])
    assert torch.equal(store.get_tensor(None, "x", index=ids.tolist()), data.x[ids])
    named = {"group_name": None, "attr_name": "y", "index": slice(3, 40, 2)}
    assert torch.equal(store.get_tensor(**named), data.y[3:40:2])
    as_array = store.get_tensor(None, "x", ids.numpy(), convert_type=True)
    assert isinstance(as_array, np.ndarray)
    # one exchange for what is read together
    attrs = [TensorAttr(None, "x", ids), TensorAttr(None, "y", ids)]
    attrs += [TensorAttr(EDGES, "edge_weight", ids), TensorAttr(None, "y", ids.flip(0))]
    ledger = worlds.mesh().ledger
    ledger.reset()
    found = store.multi_get_tensor(attrs)
    wanted = data.x[ids], data.y[ids], data.edge_weight[ids], data.y[ids.flip(0)]
    assert all(map(torch.equal, found, wanted))
    assert len(found) == len(wanted)
    twice = store.multi_get_tensor([attrs[1], attrs[3]])
    assert all(map(torch.equal, twice, wanted[1::2]))
    assert ledger.total("calls", "fetch_rows") == (4 if road.row.size > 1 else 0)
    # views, sizes, names
    assert isinstance(store[None, "x"], AttrView)
    assert torch.equal(store[None, "x"][ids], data.x[ids])
    assert torch.equal(store.view(group_name=None).x[ids], data.x[ids])
    assert store.get_tensor_size(None, "x") == (n, 7)
    assert store.get_tensor_size(None, "x", ids) == (20, 7)
    names = {(a.group_name, a.attr_name) for a in store.get_all_tensor_attrs()}
    assert names == {
        *((None, name) for name in ("x", "y", "train_mask")),
        *((EDGES, name) for name in ("edge_weight", "edge_attr")),
    }
    assert not store.get_all_tensor_attrs()[0].is_set("index")
    assert "'x'" in repr(store)
    assert f"{road.row.size} blocks x {c}" in repr(store)


@everywhere
@worlds.on()
def test_putting_and_removing(size, c):
    road, data, share = shared(c, cutter="empty_rank")
    n, rank = data.num_nodes, road.world.rank
    store = DistFeatureStore(road)
    assert store.put_tensor(share.x, None, "x", None)  # a DistTensor
    assert store.put_tensor(data.y, None, "y", None)  # rows of all ranks
    own = share.x.rows.gid
    store[None, "z", None] = data.train_mask[own].numpy()  # this rank's own
    assert store.put_tensor(torch.arange(31), "other", "id", None)  # in equal blocks
    ids = random_ids(rank, 20, n)
    for name, whole in (("x", data.x), ("y", data.y), ("z", data.train_mask)):
        assert torch.equal(store[None, name, ids], whole[ids])
    assert store["other", "id", ids % 31].tolist() == (ids % 31).tolist()
    store.update_tensor(data.y + 1, None, "y", None)
    assert torch.equal(store[None, "y", ids], data.y[ids] + 1)
    with pytest.raises(ValueError, match=f"{n + 1} rows, but"):
        store.update_tensor(torch.zeros(n + 1), None, "y", None)
    with pytest.raises(ValueError, match="whole attributes"):
        store.update_tensor(data.y, None, "y", ids)
    assert torch.equal(store[None, "y", ids], data.y[ids] + 1)  # it is as it was
    assert store.remove_tensor(None, "y", None)
    del store[None, "z"]
    for missing in ((None, "y"), ("who", "x")):
        with pytest.raises(KeyError, match="take one of them"):
            store.get_tensor(*missing, ids)
        with pytest.raises(KeyError, match="take one of them"):
            store.get_tensor_size(*missing)
    with pytest.raises(ValueError, match="whole attributes"):
        store.put_tensor(data.y, None, "y", ids)
    with pytest.raises(ValueError, match="one tensor only with one attribute"):
        _ = store[ids]


# Mistakes ------------------------------------------------------------------------------


@everywhere
@worlds.on()
def test_mistakes_are_told_to_all_ranks(size, c):
    road, data, share = shared(c)
    n, rank, alone = data.num_nodes, road.world.rank, road.row.size == 1
    store = DistFeatureStore.from_data(share, road)
    fine, last = torch.arange(5), road.world.size - 1
    for bad, text in (
        (torch.tensor([3, n]), f"0 .. {n - 1}, got {n}"),
        (torch.tensor([-1]), "got -1"),
        (torch.tensor([1.0]), "vector of integers"),
        (torch.tensor([[1]]), "vector of integers"),
        ((fine, torch.full((5,), 9)), "owners of group None must be in"),
        ((fine, fine[:2]), "each of 5 ids"),
    ):
        wrong = rank // c == last // c  # the ranks of one block
        if wrong or not alone:
            with pytest.raises(ValueError, match=text):
                store.fetch({None: bad if wrong else fine})
        found = store.fetch({None: fine})  # and life goes on
        assert torch.equal(found[None]["x"], data.x[:5])
    if rank == last or not alone:
        with pytest.raises(ValueError, match="got group 'who', but the store has"):
            store.fetch({"who": fine} if rank // c == last // c else {})
    if not alone:
        with pytest.raises(ValueError, match="same `attrs`"):
            store.fetch({None: fine}, attrs={None: ["x" if road.block else "y"]})
    if rank // c == last // c or not alone:
        mask = torch.ones(n - 3 * (rank // c == last // c)).bool()
        with pytest.raises(ValueError, match=f"a mask of {n}"):
            _ = store[None, "x", mask]
        with pytest.raises(ValueError, match=r"vector of integers .*got \['a'\]"):
            _ = store[None, "x", ["a"] if rank // c == last // c else fine]
        assert not len(store[None, "x", []])
    with pytest.raises(ValueError, match="whose owners are not known"):
        store.fetch({EDGES: fine})
    with pytest.raises(KeyError, match="got attribute 'u', but group"):
        store.fetch({None: fine}, attrs={None: ["u"]})


@everywhere
@worlds.on()
def test_rows_that_do_not_fit(size, c):
    road, n = channel(c), 12
    rank, size = road.world.rank, road.world.size
    mine = torch.arange(n)[rank::size]
    for gid, text in (
        (mine.flip(0) if rank == 0 else mine, "must ascend"),
        (mine[1:] if rank == 0 else mine, "not all 12"),
        (mine + n if rank == 0 else mine, r"must lie in \[0, 12\)"),
    ):
        with pytest.raises(ValueError, match=text):
            DistFeatureStore(road).add_group("g", gid, n)
    store = DistFeatureStore(road)
    store.add_group("g", mine, n)
    odd = rank == size - 1
    for values, text in (
        (torch.zeros(len(mine) + odd), f"{len(mine) + 1} rows, but"),
        ("xy" if odd else torch.zeros(len(mine)), "got a str, wanted a dense tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            store.add("g", "x", values)
    if size > 1:
        with pytest.raises(ValueError, match="the same attribute: it is"):
            store.add("g", "x", torch.zeros(len(mine), 3 + odd))


@worlds.on(3)
def test_an_owner_that_has_not_what_is_asked_of_it():
    mesh = pdc.init(timeout=120)  # its own: what happens here, it does not survive
    data = GRAPHS["directed"]()
    share = pdc.partition(data, mesh, "random")
    store = DistFeatureStore.from_data(share, mesh)
    owner = edge_owner(data, share)
    wrong = (owner + 1) % 3 if mesh.rank == 1 else owner
    edges = (owner == 2).nonzero().view(-1)  # of rank 2, said to be rank 0's
    told = r"as the owner of id .* but its row is not there"
    with pytest.raises(ValueError, match=told):
        store.fetch({EDGES: (edges, wrong[edges])})


@worlds.on(2)
def test_rows_that_cannot_be_written_are_told_to_those_who_wait():
    mesh = pdc.init(timeout=120)
    x = torch.arange(80.0).view(20, 4)
    store = DistFeatureStore.from_replicated(x, mesh, wire=Quantise(8))
    if mesh.rank == 1:  # changed since they were checked
        store._row_groups[None].columns["x"].values[:, 1] = float("nan")
    with pytest.raises(ValueError, match=r"x: row 0 of a message holds nan"):
        store[torch.arange(20)]


@everywhere
@worlds.on()
def test_a_store_of_one_attribute_is_a_tensor(size, c):
    road, data, _ = shared(c)
    n, rank = data.num_nodes, road.world.rank
    x = data.x.float()
    ours = DistFeatureStore.from_replicated(x, road)
    ids = random_ids(rank, 30, n)
    assert torch.equal(ours[ids], x[ids])
    assert list(ours.shape) == [n, 7]
    assert (ours.size(0), ours.size(1), ours.dtype) == (n, 7, torch.float32)
    parts = DistFeatureStore.from_cpu_tensor(x[: 10 + rank], road)
    sizes = [10 + r for r in range(road.world.size)]
    whole = torch.cat([x[:k] for k in sizes])
    assert list(parts.shape) == list(whole.shape)
    assert torch.equal(parts[:], whole)
