"""The pipeline over stages and rows: the same numbers, and the bytes that were foretold."""

import functools
import itertools
import os

import pytest
import tiers
import torch
import worlds
from pipelines import STACKS, loss_of, stack_of, without_loss
from problems import GRAPHS, owners
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.nn import DirGNNConv, GCNConv, SAGEConv

import pyg_distcomm as pdc
from pyg_distcomm.pipeline.pipeline import hybrid_words, stage_words

pytestmark = pytest.mark.usefixtures("place")

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SHAPES = [(2, 1), (1, 2), (4, 1), (2, 2)]


def _train(stages, name, graph="directed", dropout=0.0, cutter="random", **kwargs):
    """Losses, state and output after some epochs, whose bytes are as foretold."""
    data = GRAPHS[graph]()
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(data, mesh, cutter)
    stack = stack_of(name, dropout=dropout)
    pipe = pdc.Pipeline(stack, mesh, **kwargs)
    opt = torch.optim.SGD(pipe.parameters(), 0.3)
    pipe(share)
    losses, norms = [], []
    for kind in (1, 2, float("inf")):
        for p in (p for key, p in pipe.named_parameters() if "_edge" in key):
            p.requires_grad_(
                kind != 1
            )  # a rank without edges finds it no gradient, ever
        opt.zero_grad()
        mesh.ledger.reset()
        losses.append(float(pipe.train_step(share, loss_of)))
        price, ledger = pipe.price(), mesh.ledger
        told = [price.stage.words, price.rows.words, price.weights.words]
        assert told == [
            ledger.words("stage", "stage"),
            ledger.words("halo", "world") + ledger.words("halo_reduce", "world"),
            ledger.words("all_reduce", "data"),
        ]
        # what the script's own loss sums over the rows of a stage is not ours, nor what it
        # plans at first
        assert not (losses[1:] and ledger.words("plan", "control"))
        assert price.words == without_loss(ledger)
        assert price.bytes == without_loss(ledger, "bytes")
        parts = (price.stage, price.rows, price.weights, price.loss)
        assert sum(p.messages for p in parts) == without_loss(ledger, "messages")
        norms.append(pipe.clip_grad_norm_(0.3, kind))
        opt.step()
    chunk = kwargs.get("chunks", 1)
    if not isinstance(chunk, int):  # of the whole graph, on every rank
        apart = (chunk[data.edge_index[0]] != chunk[data.edge_index[1]]).double()
        assert pipe.crossing == float(apart.mean() if len(apart) else 0)
    sites = pipe._run.sites.values()
    kept = [t for s in sites for t in (s.mix, s.history, s.gradients) if t is not None]
    assert pipe.memory()["sites"] == sum(t.nbytes for t in kept)
    assert ("x" in pipe._stage._data) == (mesh.stage.rank == 0)  # others would keep it
    for refuse in (pdc.save_checkpoint, pdc.load_checkpoint):
        with pytest.raises(ValueError, match="has save"):
            refuse("nowhere", mesh, pipe)
    out = pipe(share).full_tensor()
    right = pipe.eval_step(share, lambda out, data: float(loss_of(out, data)))
    return losses, norms, pipe.state_dict(), out, right, pipe.balance


def _chunks(graph, count=5):
    return torch.arange(GRAPHS[graph]().num_nodes) * 7 % count


def _agree(name, shape, options, cutter="random"):
    """Checks that stages and rows give what one rank does."""
    stages, ways = shape
    want = _train(1, name, **options)
    run = functools.partial(_train, **options, cutter=cutter)
    found = worlds.run(run, stages * ways, stages, name)
    for *got, balance in found:
        assert balance == found[0][-1]
        for mine, theirs in zip(got, want[:5], strict=True):
            torch.testing.assert_close(mine, theirs, **CLOSE)


@tiers.cover(("name", "shape"), [*STACKS, "gcn scaled", "gat scaled"], SHAPES, step=5)
def test_numbers_do_not_depend_on_stages_and_rows(name, shape):
    name, scaled, _ = name.partition(" scaled")
    graph = {"gat": "loops_and_copies", "sage": "isolated"}.get(name, "directed")
    graph = "undirected" if scaled else graph
    options = {"chunks": _chunks(graph), "graph": graph, "history_refresh": 2}
    options["dropout"] = 0.0 if name == "jumping" else 0.3
    if scaled:
        options |= {"gradient": "scaled", "recompute": shape[0] == 2, "order": "fixed"}
    _agree(name, shape, options)


ODD = ["tiny", "star", "edgeless"]


@tiers.cover(
    ("cutter", "graph", "shape"),
    ["metis", "lopsided"],
    ODD,
    [(2, 1), (1, 4), (2, 2)],
    step=3,
)
def test_graphs_with_teeth(shape, graph, cutter):
    chunks = min(GRAPHS[graph]().num_nodes, 6)
    options = {"chunks": _chunks(graph, chunks), "graph": graph, "dropout": 0.2}
    cutter = owners(cutter, GRAPHS[graph](), shape[1])
    name = "GATConv" if graph == "star" else "gcn"
    _agree(name, shape, options, cutter)
    # as cut within ranks: other results
    options |= {"chunks": chunks, "cutter": cutter}
    run = functools.partial(_train, **options)
    worlds.run(run, shape[0] * shape[1], shape[0], "gcn")


def _bytes(stages, chunks):
    """Words of all ranks, beside the formula's."""
    data = GRAPHS["undirected"]()
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(data, mesh, "random")
    hidden, layers = 8, 6
    convs = [GCNConv(hidden, hidden) for _ in range(layers)]
    stack = [torch.nn.Linear(7, hidden), *convs, torch.nn.Linear(hidden, 4)]
    pipe = pdc.Pipeline([la.double() for la in stack], mesh, chunks=chunks)
    pipe(share)
    mesh.ledger.reset()
    pipe.train_step(share, lambda out, data: out.square().mean())
    ledger = mesh.ledger
    mine = without_loss(ledger) - ledger.words("all_reduce", "stage")  # the loss
    ghosts = share.edge_index.topology.locals.halo.num_ghosts
    return mine, ghosts, sum(p.numel() + 1 for p in pipe.layers.parameters())


@tiers.cover(("chunks", "shape"), [1, 4], [(1, 1), *SHAPES], step=2)
def test_bytes_are_those_of_the_formula(shape, chunks):
    stages, ways = shape
    found = worlds.run(_bytes, stages * ways, stages, chunks)
    words, ghosts, weights = (sum(each) for each in zip(*found, strict=True))
    n = GRAPHS["undirected"]().num_nodes
    rest = {"replication": ghosts / stages / n, "weights": round(weights / ways)}
    want = hybrid_words(n, 8, stages, ways, layers=6, **rest)
    # a ring moves whole words
    assert abs(words - want) <= stages * ways
    if ways == 1:
        assert words == stage_words(n, 8, stages)


def _resumed(stages, path, gradient, first, used=False):
    """Trains six epochs, or the last three from what was saved; on other stages, too."""
    data = GRAPHS["directed"]()
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(data, mesh, "random")
    losses = []

    def made(seed=None):
        stack = stack_of("gcnii", dropout=0.3)
        options = {"gradient": gradient, "history_refresh": 2, "seed": seed}
        pipe = pdc.Pipeline(stack, mesh, chunks=_chunks("directed"), **options)
        return pipe, torch.optim.Adam(pipe.named_parameters(), 0.02)

    def train(pipe, opt, epochs):
        for _ in range(epochs):
            opt.zero_grad()
            losses.append(float(pipe.train_step(share, loss_of)))
            opt.step()

    if first:
        pipe, opt = made()
        train(pipe, opt, 3)
        pipe.save(path, opt)
        train(pipe, opt, 3)
        return losses[3:], pipe.state_dict()
    pipe, opt = made(seed=7)
    with torch.no_grad():
        for p in pipe.parameters():
            p.zero_()
    if used:
        train(pipe, opt, 5)
        losses.clear()
    pipe.load(path, opt)
    again = path.parent.with_name(f"again{stages}")
    pipe.save(again, opt)  # as it was read, not as the pipeline was before
    pipe.load(again, opt)
    names = [name for name, _ in pipe.named_parameters()]
    assert opt.param_groups[0]["param_names"] == names
    train(pipe, opt, 3)
    return losses, pipe.state_dict()


@tiers.parametrize("gradient", ["surrogate", "scaled"], ["surrogate"])
def test_training_resumes_bit_for_bit_on_any_number_of_stages(gradient, tmp_path):
    ways = 2 if gradient == "scaled" else 1
    path = tmp_path / "deep" / "pipe"
    options = (path, gradient)
    want = worlds.run(_resumed, 2 * ways, 2, *options, True)[0]
    for stages in (2, 1):
        used = stages == 2  # the pipeline had trained by itself before
        for losses, state in worlds.run(
            _resumed, stages * ways, stages, *options, False, used
        ):
            assert losses == want[0]
            assert all(torch.equal(state[k], want[1][k]) for k in want[1])
    assert [p.name for p in path.parent.iterdir()] == ["pipe"]


NODES, EDGES = torch.arange(60), "x, edge_index -> x"  # of the directed graph


@pytest.mark.parametrize(
    ("chunks", "others"),
    [(3, 4), pytest.param(NODES % 3, NODES // 20, id="other nodes")],
)
@worlds.on(2)
def test_history_of_other_chunks_is_not_taken(chunks, others, tmp_path):
    mesh = worlds.mesh(stages=2)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random")
    pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=chunks)
    with pytest.raises(ValueError, match="cannot load the pipeline"):
        pipe.load(tmp_path / "nothing")
    pipe.train_step(share, loss_of)
    pipe.save(tmp_path / "a")
    other = pdc.Pipeline(stack_of("gcn"), mesh, chunks=others)
    other.load(tmp_path / "a")
    with pytest.warns(UserWarning, match="begins anew"):
        other.train_step(share, loss_of)
    with pytest.raises(ValueError, match="no optimizer"):
        other.load(tmp_path / "a", torch.optim.SGD(other.parameters(), 0.1))
    assert other.epoch == 2


class _Fickle(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SAGEConv(7, 7, aggr="sum"), GCNConv(7, 7)

    def forward(self, x, edge_index):
        return (self.first if self.training else self.second)(x, edge_index)


class _Checkpointed(torch.nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x, edge_index):
        edges = [edge_index] if isinstance(self.inner, GCNConv) else []
        return x + checkpoint(self.inner, x, *edges, use_reentrant=self.reentrant)


def _checkpointed(reentrant, drops):
    inner = torch.nn.Dropout(0.5) if drops else GCNConv(7, 7)
    return [GCNConv(7, 7), _Checkpointed(inner, reentrant), GCNConv(7, 4)]


def _mistakes(mesh):
    """What is told of stacks and options, on one stage and on several."""
    gcn, relu, stages = None, torch.nn.ReLU(), mesh.stage.size
    tied, header = torch.nn.Linear(7, 7), "x, edge_attr -> x, edge_attr"
    broken = (lambda x, e: x[e[0].to_local()]), EDGES
    by_hand = (lambda x, e: torch.zeros_like(x).index_add(0, e[1], x[e[0]])), EDGES
    every = [
        ("chunks must be a whole number above 0", gcn, {"chunks": 0}),
        ("chunks must be a whole number", gcn, {"chunks": "4"}),
        ("graph has 60", gcn, {"chunks": 61}),
        (r"chunks \[1, 3\] of 5 have no node", gcn, {"chunks": NODES // 20 * 2}),
        ("each of the 60 nodes", gcn, {"chunks": torch.zeros(3)}),
        ("history_refresh", gcn, {"history_refresh": 0}),
        ("history_refresh", gcn, {"history_refresh": None}),
        ("alternating, shuffled, fixed", gcn, {"order": "any"}),
        ("bubble must be a number between 0 and 1", gcn, {"bubble": 0}),
        ("bubble must be a number between 0 and 1", gcn, {"bubble": "x"}),
        ("surrogate, scaled", gcn, {"gradient": "none"}),
        ("seed must be a whole number", gcn, {"seed": 1.5}),
        (f"balance=3 must give each of {stages} stages", gcn, {"balance": 3}),
        (f"each of {stages} stages", gcn, {"balance": [6, 2]}),
        (f"each of {stages} stages", gcn, {"balance": [3.5] * stages}),
        (
            r"layer 0 of .* at once in mean\(",
            [(lambda x: x - x.mean(0), "x -> x"), relu],
            {},
        ),
        ("turns edges around", [DirGNNConv(GCNConv(7, 7)), relu], {"chunks": 2}),
        ("reads z", [(torch.nn.ReLU(), "z -> x"), relu], {}),
        ("pads .*LSTMAggregation", [SAGEConv(7, 4, aggr="lstm"), relu], {"chunks": 3}),
        ("normalises over all nodes", [GCNConv(7, 4), torch.nn.BatchNorm1d(4)], {}),
        ("layer 1|moves rows|mean|numbers", [GCNConv(7, 4), broken], {}),
    ]
    if stages == 1:  # while a chunk is computed
        spectral = spectral_norm(torch.nn.Linear(7, 4))
        twice = itertools.product([True, False], repeat=2)
        again = [("leave the checkpoint out", _checkpointed(*how)) for how in twice]
        again += [("recompute=False", [spectral]), ("another way", [_Fickle()])]
        again += [("sources of edges", [tied, by_hand])]
        return every + [(told, layers, {"chunks": 3}) for told, layers in again]
    here, edges = mesh.stage.rank, [(lambda x, e: (x * 2, e * 2), header)] * 2
    row = r"edge_attr, after layer 0 \(<lambda>: x, .* -> x, edge_attr\), has a row"
    rank = {"history_refresh": 1 + mesh.everyone.rank}
    return [
        *every,
        ("there are 2 stages and 1 layers", [torch.nn.Linear(7, 4)], {}),
        ("share a parameter", [tied, tied], {"balance": [1, 1]}),
        (row, edges, {}),
        ("same layer 0: it is layer 0", [torch.nn.Linear(7, 7 + here), relu], {}),
        ("same chunks: it is 4 on rank 0, and 5 on rank", gcn, {"chunks": 4 + here}),
        ("same history_refresh: it is 1 on rank 0, and 2 on rank", gcn, rank),
        (r"same balance: it is \[4, 3\]", gcn, {"balance": [4 - here, 3 + here]}),
    ]


@tiers.parametrize(("size", "stages"), [(1, 1), (2, 2), (4, 2)], [(1, 1), (2, 2)])
@worlds.on()
def test_mistakes_are_told_on_all_ranks(size, stages):
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random")
    for told, layers, options in _mistakes(mesh):
        layers = layers or stack_of("gcn")
        for layer in layers:
            layer = layer[0] if isinstance(layer, tuple) else layer
            if isinstance(layer, torch.nn.Module):
                layer.double()
        with pytest.raises((TypeError, ValueError, RuntimeError), match=told) as caught:
            pdc.Pipeline(layers, mesh, **options).train_step(share, loss_of)
        if "layer 0 of" in told:  # the trace leads to where it happened
            assert size > 1 or "x - x.mean(0)" in str(caught.getrepr())
    pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=3)
    state = pipe.state_dict()
    for told, wrong in (
        ("size mismatch for 0.bias", {"0.bias": state["0.bias"][:1]}),
        (r'Unexpected key\(s\) in state_dict: "97.bias"', {"97.bias": state["0.bias"]}),
    ):
        with pytest.raises((ValueError, RuntimeError), match=told):
            pipe.load_state_dict({**state, **wrong})
    share.x = share.x.requires_grad_()  # only the first stage reads it
    with pytest.raises(ValueError, match="requires a gradient"):
        pipe.train_step(share, loss_of)


def _failing(stages, where, how):
    mesh = worlds.mesh(stages=stages, fresh=True)
    share = pdc.partition(GRAPHS["directed"](), mesh)
    pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=4)
    first = pipe.train_step(share, loss_of)
    calls = 0

    def fail(module, inputs):
        nonlocal calls
        calls += 1
        if calls == 3:
            if how == "die":
                os._exit(3)
            raise ValueError("this layer is out of order")

    if mesh.everyone.rank == where:
        next(pipe.layers.children()).register_forward_pre_hook(fail)
    told = []
    for _ in range(2):
        try:
            pipe.train_step(share, loss_of)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    if how == "die":
        return told
    mesh = worlds.mesh(stages=stages, fresh=True)  # as the second error says
    share = pdc.partition(GRAPHS["directed"](), mesh)
    anew = pdc.Pipeline(stack_of("gcn"), mesh, chunks=4)
    assert anew.train_step(share, loss_of) == first  # no message is left of before
    return told


@tiers.parametrize("where", [1, 3], [1])
def test_a_stage_that_fails_is_heard_of_on_all(where):
    for text, again in worlds.run(_failing, 4, 4, where, "raise"):
        assert "this layer is out of order" in text
        assert "make mesh, data and pipeline anew" in again
    worlds.only(0)  # the meshes of these ranks have heard of a failure


def _mean(out, data):
    return out.float().mean()


@worlds.on(4)
def test_bytes_are_those_of_each_type():
    """Of an epoch whose rows are narrower than its weights."""
    mesh, data = worlds.mesh(stages=2), GRAPHS["directed"]()
    share = pdc.partition(Data(data.x.float(), data.edge_index), mesh, "random")
    layers = [GCNConv(7, 8), torch.nn.Linear(8, 8), GCNConv(8, 4), GCNConv(4, 8)]
    pipe = pdc.Pipeline(layers, mesh, chunks=3)
    with torch.autocast(share.x.device.type, torch.bfloat16):
        pipe(share)
        mesh.ledger.reset()
        pipe.train_step(share, _mean)
    assert pipe.price().bytes == without_loss(mesh.ledger, "bytes") > 0


def test_a_stage_that_dies_leaves_no_one_waiting():
    # those that are left say so while the pool waits for them
    with pytest.raises(worlds.WorldError, match=r"ranks \[\] did not answer") as told:
        worlds.run(_failing, 3, 3, 1, "die")
    assert str(told.value).count("process died") == 1
