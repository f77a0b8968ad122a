"""The pipeline over stages and rows: the same numbers, and the bytes that were foretold."""

from __future__ import annotations

import os

import pytest
import tiers
import torch
import worlds
from pipelines import STACKS, loss_of, run_plain, stack_of, without_loss
from problems import GRAPHS, owners
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

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
    losses = []
    for _ in range(3):
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
        sent = without_loss(ledger, "messages")
        assert sum(p.messages for p in parts) == sent
        opt.step()
    chunk = kwargs.get("chunks", 1)
    if not isinstance(chunk, int):  # of the whole graph, on every rank
        apart = (chunk[data.edge_index[0]] != chunk[data.edge_index[1]]).double()
        assert pipe.crossing == float(apart.mean() if len(apart) else 0)
    memory = pipe.memory()
    assert memory["sites"] == sum(s.nbytes for s in pipe._run.sites.values())
    assert ("x" in pipe._stage._data) == (mesh.stage.rank == 0)  # others would keep it
    if stages > 1:
        with pytest.raises(ValueError, match="has save"):
            pdc.save_checkpoint("nowhere", mesh, pipe)
    out = pipe(share).full_tensor()
    right = pipe.eval_step(share, lambda out, data: float(loss_of(out, data)))
    return losses, pipe.state_dict(), out, right, pipe.balance


def _chunks(graph, count=5):
    return torch.arange(GRAPHS[graph]().num_nodes) * 7 % count


def _agree(name, shape, options, cutter="random"):
    """Checks that stages and rows give what one rank does."""
    stages, ways = shape
    want = _train(1, name, **options)
    options = {**options, "cutter": cutter}
    found = worlds.run(_train_with, stages * ways, stages, name, options)
    for *got, balance in found:
        assert balance == found[0][-1]
        for mine, theirs in zip(got, want[:4], strict=True):
            torch.testing.assert_close(mine, theirs, **CLOSE)


def _train_with(stages, name, options):
    return _train(stages, name, **options)


@tiers.cover(("name", "shape"), [*STACKS], SHAPES, step=2)
def test_numbers_do_not_depend_on_stages_and_rows(name, shape):
    graph = {"gat": "loops_and_copies", "sage": "isolated"}.get(name, "directed")
    options = {"chunks": _chunks(graph), "graph": graph, "history_refresh": 2}
    if name != "jumping":
        options["dropout"] = 0.3
    _agree(name, shape, options)


@tiers.cover(("name", "shape"), ["gcn", "gat"], SHAPES, step=2)
def test_scaled_gradients_do_not_depend_on_them_either(name, shape):
    options = {"chunks": _chunks("undirected"), "graph": "undirected"}
    options |= {"gradient": "scaled", "recompute": shape[0] == 2, "dropout": 0.2}
    _agree(name, shape, {**options, "order": "fixed"})


ODD = ["tiny", "star", "edgeless"]


@tiers.cover(
    ("cutter", "graph", "shape"),
    ["metis", "lopsided"],
    ODD,
    [(2, 1), (1, 4), (2, 2)],
)
def test_graphs_with_teeth(shape, graph, cutter):
    chunks = min(GRAPHS[graph]().num_nodes, 6)
    options = {"chunks": _chunks(graph, chunks), "graph": graph, "dropout": 0.2}
    cutter = owners(cutter, GRAPHS[graph](), shape[1])
    _agree("gcn", shape, options, cutter)
    options |= {
        "chunks": chunks,
        "cutter": cutter,
    }  # as cut within ranks: other results
    worlds.run(_train_with, shape[0] * shape[1], shape[0], "gcn", options)


def _clipped(stages, most, norm_type):
    data, mesh = GRAPHS["directed"](), worlds.mesh(stages=stages)
    pipe = pdc.Pipeline(stack_of("gcnii"), mesh, chunks=1)
    pipe.train_step(pdc.partition(data, mesh, "random"), loss_of)
    total = pipe.clip_grad_norm_(most, norm_type)
    return total, [p.grad for p in pipe.layers.parameters()]


@tiers.cover(
    ("norm", "shape"),
    [(2, 0.5), (float("inf"), 0.1), (1, 2)],
    [(1, 2), (3, 1), (2, 2)],
)
def test_gradients_are_clipped_to_the_norm_of_all_stages(shape, norm):
    norm_type, share = norm
    whole = run_plain(stack_of("gcnii"), GRAPHS["directed"]())[2]
    want = [torch.zeros_like(g, requires_grad=True) for g in whole]
    for weight, grad in zip(want, whole, strict=True):
        weight.grad = grad.clone()
    most = share * float(torch.nn.utils.clip_grad_norm_(want, 1e9, norm_type))
    total = torch.nn.utils.clip_grad_norm_(want, most, norm_type)
    stages, ways = shape
    every = worlds.run(_clipped, stages * ways, stages, most, norm_type)
    for told, _ in every:
        torch.testing.assert_close(told, total, **CLOSE)
    for row in range(ways):  # stages lie one behind the other
        got = [grad for _, grads in every[row::ways] for grad in grads]
        for grad, weight in zip(got, want, strict=True):
            torch.testing.assert_close(grad, weight.grad, **CLOSE)


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
    mine = without_loss(ledger)
    mine -= ledger.words("all_reduce", "stage")  # the loss
    ghosts = share.edge_index.topology.locals.halo.num_ghosts
    weights = sum(p.numel() for p in pipe.layers.parameters())
    return mine, ghosts, weights, data.num_nodes, pipe.memory(), pipe.price()


@tiers.cover(("chunks", "shape"), [1, 4], [(1, 1), *SHAPES])
def test_bytes_are_those_of_the_formula(shape, chunks):
    stages, ways = shape
    found = worlds.run(_bytes, stages * ways, stages, chunks)
    words = sum(mine for mine, *_ in found)
    n = found[0][3]
    ghosts = sum(ghosts for _, ghosts, *_ in found) / stages
    weights = sum(weights for _, _, weights, *_ in found) / ways
    want = hybrid_words(
        *(n, 8, stages, ways),
        layers=6,
        replication=ghosts / n,
        weights=round(weights),
    )
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
        options = {"gradient": gradient, "history_refresh": 2}
        options["seed"] = seed
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
    for stages in (2, 1) if ways == 2 else (2, 4):
        used = stages == 2  # the pipeline had trained by itself before
        for losses, state in worlds.run(
            _resumed, stages * ways, stages, *options, False, used
        ):
            assert losses == want[0]
            assert all(torch.equal(state[k], want[1][k]) for k in want[1])
    assert [p.name for p in path.parent.iterdir()] == ["pipe"]


def _elsewhere(stages, path, chunks, others):
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random")
    pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=chunks)
    with pytest.raises(ValueError, match="cannot load the pipeline"):
        pipe.load(path / "nothing")
    pipe.train_step(share, loss_of)
    pipe.save(path / "a")
    other = pdc.Pipeline(stack_of("gcn"), mesh, chunks=others)
    other.load(path / "a")
    with pytest.warns(UserWarning, match="begins anew"):
        other.train_step(share, loss_of)
    with pytest.raises(ValueError, match="no optimizer"):
        other.load(path / "a", torch.optim.SGD(other.parameters(), 0.1))
    return other.epoch


NODES = torch.arange(60)  # of the directed graph


@pytest.mark.parametrize(
    ("chunks", "others"),
    [(3, 4), pytest.param(NODES % 3, NODES // 20, id="other nodes")],
)
def test_history_of_other_chunks_is_not_taken(chunks, others, tmp_path):
    assert worlds.run(_elsewhere, 2, 2, tmp_path, chunks, others) == [2, 2]


class _Broken(torch.nn.Module):
    def forward(self, x, edge_index):
        return x[edge_index[0].to_local()]


class _Edges(torch.nn.Module):
    def forward(self, x, edge_attr):
        return x * 2, edge_attr * 2


def _mistakes(stages):
    mesh = worlds.mesh(stages=stages)
    share = pdc.partition(GRAPHS["directed"](), mesh, "random")
    told = []

    def tell(act):
        try:
            act()
        except (TypeError, ValueError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")

    tied = torch.nn.Linear(7, 7)
    for layers, options in (
        ([torch.nn.Linear(7, 4)], {}),
        (stack_of("gcn"), {"chunks": 0}),
        ([GCNConv(7, 4), torch.nn.BatchNorm1d(4)], {}),
        ([tied, tied], {"balance": [1, 1]}),
        ([torch.nn.Linear(7, 7 + mesh.stage.rank), torch.nn.ReLU()], {}),
        (stack_of("gcn"), {"balance": [6, 2]}),
        (stack_of("gcn"), {"balance": [3.5, 3.5]}),
        (stack_of("gcn"), {"chunks": 4 + mesh.stage.rank}),
        (stack_of("gcn"), {"history_refresh": 1 + mesh.everyone.rank}),
        (stack_of("gcn"), {"balance": [3, 4] if mesh.stage.rank else [4, 3]}),
    ):
        tell(
            lambda layers=layers, options=options: pdc.Pipeline(layers, mesh, **options)
        )
    header = "x, edge_attr -> x, edge_attr"
    for layers, options in (
        ([GCNConv(7, 4), _Broken()], {}),
        ([GCNConv(7, 4), torch.nn.ReLU()], {"chunks": 61}),
        ([(_Edges(), header), (_Edges(), header)], {}),
        ([GCNConv(7, 4), torch.nn.ReLU()], {"chunks": torch.arange(60) // 20 * 2}),
    ):
        for layer in layers:
            (layer[0] if isinstance(layer, tuple) else layer).double()
        pipe = pdc.Pipeline(layers, mesh, **options)
        tell(lambda pipe=pipe: pipe.train_step(share, loss_of))
    pipe = pdc.Pipeline(stack_of("gcn"), mesh, chunks=3)
    state = pipe.state_dict()
    tell(lambda: pipe.load_state_dict({**state, "0.bias": state["0.bias"][:1]}))
    tell(lambda: pipe.load_state_dict({**state, "97.bias": state["0.bias"]}))
    share.x = share.x.requires_grad_()  # only the first stage reads it
    tell(lambda: pipe.train_step(share, loss_of))
    return told


def test_mistakes_are_told_on_all_ranks():
    want = [
        "there are 2 stages and 1 layers",
        "chunks must be a whole number",
        "normalises over all nodes",
        "share a parameter",
        "the same layer 0: it is layer 0 (Linear",
        "each of 2 stages",
        "each of 2 stages",
        "the same chunks: it is 4 on rank 0, and 5 on rank",
        "the same history_refresh: it is 1 on rank 0, and 2 on rank",
        "the same balance: it is [4, 3] on rank 0, and [3, 4] on rank",
        "layer 1|_Broken|moves rows|mean|numbers",
        "graph has 60",
        "edge_attr, after layer 0 (_Edges: x, edge_attr -> x, edge_attr), has a row for",
        "chunks [1, 3] of 5 have no node",
        "size mismatch for 0.bias",
        'Unexpected key(s) in state_dict: "97.bias"',
        "requires a gradient",
    ]
    for size, stages in ((2, 2), (4, 2)):
        for told in worlds.run(_mistakes, size, stages):
            assert len(told) == len(want)
            for text, parts in zip(told, want, strict=True):
                assert any(part in text for part in parts.split("|")), text


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


def _refused(stages):
    """What is refused once all is planned, by one stage alone or by all."""
    found = []
    for how in ("metric", "data", "dtype"):
        mesh = worlds.mesh(stages=stages, fresh=True)
        data = GRAPHS["directed"]()
        share = pdc.partition(Data(data.x.float(), data.edge_index), mesh)
        layers = [GCNConv(7, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)]
        pipe = pdc.Pipeline(layers, mesh, chunks=3, balance=[2, 1])
        pipe.train_step(share, _mean)
        with pytest.raises((TypeError, ValueError)) as told:  # noqa: PT012
            if how == "metric":
                pipe.eval_step(share, lambda out, data: lambda: None)
            if how == "data":
                share.x = share.x[torch.arange(60) < 9]
            with torch.autocast(share.x.device.type, torch.bfloat16):
                pipe.train_step(share, _mean)
        found.append(str(told.value))
    return found


def _mean(out, data):
    return out.float().mean()


def test_what_one_stage_runs_into_is_heard_of_on_all():
    for metric, data, dtype in worlds.run(_refused, 2, 2):
        assert "send numbers" in metric
        assert "layers of a pipeline read rows of the nodes or" in data
        assert "torch.autocast around all" in dtype
    worlds.only(0)


def _mixed(stages):
    """Foretold and counted bytes of an epoch whose rows are narrower than its weights."""
    mesh, data = worlds.mesh(stages=stages), GRAPHS["directed"]()
    share = pdc.partition(Data(data.x.float(), data.edge_index), mesh, "random")
    layers = [GCNConv(7, 8), torch.nn.Linear(8, 8), GCNConv(8, 4), GCNConv(4, 8)]
    pipe = pdc.Pipeline(layers, mesh, chunks=3)
    with torch.autocast(share.x.device.type, torch.bfloat16):
        pipe(share)
        mesh.ledger.reset()
        pipe.train_step(share, lambda out, data: out.float().square().mean())
    return pipe.price().bytes, without_loss(mesh.ledger, "bytes")


@tiers.parametrize("shape", [(1, 2), (2, 2)], [(2, 2)])
def test_bytes_are_those_of_each_type(shape):
    for told, counted in worlds.run(_mixed, shape[0] * shape[1], shape[0]):
        assert told == counted > 0


def test_a_stage_that_dies_leaves_no_one_waiting():
    # those that are left say so while the pool waits for them
    with pytest.raises(worlds.WorldError, match=r"ranks \[\] did not answer") as told:
        worlds.run(_failing, 3, 3, 1, "die")
    assert str(told.value).count("process died") == 1
