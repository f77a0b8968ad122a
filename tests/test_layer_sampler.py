"""Layer-wise sampling: structure, distributions, weights, blocks."""

import pickle

import problems
import pytest
import tiers
import torch
from batches import same
from chances import likely
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from pyg_distcomm.comm.random import fold
from pyg_distcomm.sampling import (
    BulkMatrix,
    BulkNodes,
    FastGCN,
    GraphSAGE,
    KeyedLayerSampler,
    Ladies,
    LocalLayerGraph,
    UserRule,
    algebra,
)

LONG, REAL = torch.int64, torch.float64
RULES = {
    "code": Ladies(),
    "cagnet": Ladies("cagnet"),
    "paper": Ladies("paper"),
    "fastgcn": FastGCN(),
    "user": UserRule(lambda p: p.with_value(p.value.sqrt())),
    "counted": UserRule(lambda p: p, counted=True, loops=True),
}
GRAPHS = "directed", "loops_and_copies", "isolated", "star", "edgeless"
WEIGHTS = (None, "edge_weight")


def given(nodes, key=0):
    inputs = NodeSamplerInput(None, torch.as_tensor(nodes))
    inputs.key = key
    return inputs


def matrix(data, loops=False, weight=None, dtype=REAL):
    """A[v, u] written out."""
    n = data.num_nodes
    a = torch.zeros(n, n, dtype=dtype)
    one = torch.ones(data.num_edges) if weight is None else data[weight]
    source, target = data.edge_index
    a.index_put_((target, source), one.to(dtype), accumulate=True)
    return a + torch.eye(n, dtype=dtype) if loops else a


def ahat(data, loops=False, weight=None):
    a = matrix(data, loops, weight)
    return a / a.sum(1, keepdim=True).clamp(min=1e-300)


def chances(rule, data, rows, weight=None):
    """The probabilities of a rule by their formulas, from dense matrices."""
    norm = ahat(data, True, weight)[rows]
    count = (matrix(data, False, weight)[rows] > 0).to(REAL).sum(0)
    p = {
        "code": norm.square().sum(0),
        "cagnet": count,
        "paper": count.square(),
        "fastgcn": ahat(data, True, weight).square().sum(0),
        "user": matrix(data, False, weight)[rows].sum(0).sqrt(),
        "counted": (matrix(data, True, weight)[rows] > 0).to(REAL).sum(0),
    }[rule]
    return p / p.sum().clamp(min=1e-300)


def layers(out):
    """Cuts an output into (rows, columns, source place, target place, edge, weight)."""
    nodes = out.node.split(out.num_sampled_nodes)
    begin = [0, *torch.tensor(out.num_sampled_nodes).cumsum(0).tolist()]
    cuts = [t.split(out.num_sampled_edges) for t in (out.row, out.col, out.edge)]
    weights = out.edge_weight.split(out.num_sampled_edges)
    for i in range(len(nodes) - 1):
        source, target = cuts[0][i] - begin[i + 1], cuts[1][i] - begin[i]
        yield nodes[i], nodes[i + 1], source, target, cuts[2][i], weights[i]


# ---------------------------------------------------------------- structure


@tiers.cover(("rule", "graph", "weight"), [*RULES], [*GRAPHS], WEIGHTS)
def test_a_layer_is_the_graph_between_its_rows_and_columns(rule, graph, weight):
    data = problems.GRAPHS[graph]()
    if weight and not bool((data.edge_weight > 0).any()):
        return
    sampler = KeyedLayerSampler(
        data, [6, 4, 50], RULES[rule], weights=None, weight_attr=weight
    )
    loops, n = RULES[rule].loops, data.num_nodes
    whole = ahat(data, loops, weight)
    seeds = torch.tensor([2, 0, n - 1, 2])
    out = sampler.sample_from_nodes(given(seeds, 5))
    assert torch.equal(out.node[:4], seeds)
    assert out.num_sampled_nodes[0] == 4
    assert sum(out.num_sampled_nodes) == len(out.node)
    for rows, cols, source, target, edge, share in layers(out):
        assert bool((cols.diff() > 0).all())
        keeps = torch.isin(seeds, cols).all()
        assert keeps or not RULES[rule].keeps_batch
        dense = torch.zeros(len(rows), len(cols), dtype=REAL)
        dense.index_put_((target, source), share.to(REAL), accumulate=True)
        torch.testing.assert_close(dense, whole[rows][:, cols], rtol=1e-6, atol=1e-7)
        real = edge >= 0
        ends = data.edge_index[:, edge[real]]
        assert torch.equal(ends[0], cols[source[real]])
        assert torch.equal(ends[1], rows[target[real]])
        assert torch.equal(cols[source[~real]], rows[target[~real]])
        # every edge of the graph between them is there, once for each copy of its row
        inside = [
            ((data.edge_index[1] == v) & torch.isin(data.edge_index[0], cols)).sum()
            for v in rows
        ]
        assert int(real.sum()) == sum(int(count) for count in inside)
        last = torch.where(real, edge, 1 << 40)
        assert torch.equal(
            torch.argsort(target * (1 << 41) + last), torch.arange(len(edge))
        )


@tiers.cover(("replace", "rule"), [False, True], list(RULES), step=3)
def test_a_minibatch_does_not_depend_on_its_bulk(rule, replace):
    data = problems.directed(n=200, e=1500)
    weights = "importance" if replace else "debiased"
    sampler = KeyedLayerSampler(
        data, [20, 15], RULES[rule], weights=weights, replace=replace
    )
    inputs = [given(torch.arange(i, 200, 20 + i), 100 + i) for i in range(7)]
    inputs.append(given(torch.empty(0, dtype=LONG), 3))
    bulk = sampler.sample_bulk(inputs)
    torch.set_num_threads(3)
    try:
        threaded = sampler.sample_bulk(inputs[::-1])[::-1]
    finally:
        torch.set_num_threads(1)
    twin = (
        pickle.loads(pickle.dumps(sampler))
        if rule != "user" and rule != "counted"
        else sampler
    )
    for one, two, each in zip(bulk, threaded, inputs, strict=True):
        same(one, two)
        same(one, sampler.sample_from_nodes(each))
        same(one, twin.sample_from_nodes(each))
    assert sampler.sample_bulk([]) == []
    assert bulk[-1].num_sampled_edges[0] == 0  # no seeds
    assert RULES[rule].shared or not len(bulk[-1].node)


def test_keys_decide_the_draws():
    data = problems.directed(n=200, e=1500)
    sampler = KeyedLayerSampler(data, [20, 15], seed=4)
    one, other = (sampler.sample_from_nodes(given([0, 1], key)) for key in (1, 2))
    assert not torch.equal(one.node, other.node)
    free = NodeSamplerInput(torch.tensor([7]), torch.tensor([0]), torch.tensor([3]))
    drawn = sampler.sample_from_nodes(free)
    assert not torch.equal(drawn.node, sampler.sample_from_nodes(free).node)
    again = KeyedLayerSampler(data, [20, 15], seed=4).sample_from_nodes(free)
    same(drawn, again)
    assert [t.tolist() for t in drawn.metadata] == [[7], [3]]
    assert sampler.edge_permutation is None


def test_the_batch_is_kept_where_asked():
    data = problems.directed()
    for rule, keep in ((Ladies(), False), (FastGCN(), True)):
        sampler = KeyedLayerSampler(data, [3, 3], rule, keep_batch=keep)
        for _, cols, *_ in layers(sampler.sample_from_nodes(given([1, 2, 3]))):
            assert keep == bool(torch.isin(torch.tensor([1, 2, 3]), cols).all())
            assert keep or len(cols) == 3


# ---------------------------------------------------------- probabilities


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("graph", ["directed", "loops_and_copies", "isolated"])
@pytest.mark.parametrize("rule", RULES)
def test_probabilities_are_those_of_the_formula(rule, graph, weight):
    data = problems.GRAPHS[graph]()
    local = LocalLayerGraph.from_data(data, RULES[rule], weight)
    g = torch.Generator().manual_seed(0)
    rows = BulkNodes.of(
        [torch.randint(data.num_nodes, (size,), generator=g) for size in (9, 1, 20)]
    )
    if RULES[rule].shared:
        row = local.column_sums().double()
        torch.testing.assert_close(row / row.sum(), chances(rule, data, None, weight))
        return
    p = RULES[rule].judge(local.sums(rows), local.scale)
    value = algebra.fixed_point(p)
    assert value.dtype == LONG
    found = algebra.norm(p.with_value(value)).dense()
    for each, row in zip(rows.split(), found, strict=True):
        torch.testing.assert_close(row, chances(rule, data, each, weight))
    # the same as a product of matrices
    a = matrix_of(local)
    textbook = algebra.product(RULES[rule].query(rows, data.num_nodes), a)
    assert torch.equal(textbook.dense(), local.sums(rows).dense())


def matrix_of(graph):
    """The integer matrix of a graph, from sums of single rows."""
    each = BulkNodes.of([torch.tensor([v]) for v in range(graph.num_nodes)])
    return graph.sums(each)


def test_no_weight_vanishes_and_no_sum_overflows():
    # a hub whose square of 1 / degree is below what the scale resolves, beside a leaf
    n = 3000
    leaves = torch.arange(1, n)
    data = Data(edge_index=torch.stack([leaves, torch.zeros_like(leaves)]), num_nodes=n)
    graph = LocalLayerGraph.from_data(data, Ladies(), most_rows=1 << 50)
    assert int(graph.sums(BulkNodes.of([torch.tensor([0])])).value.min()) == 1
    every = BulkNodes.of([torch.arange(n).repeat(50)])
    for most in (1 << 10, 1 << 20, 1 << 30):
        graph = LocalLayerGraph.from_data(data, Ladies(), most_rows=most)
        assert graph.scale * most <= 1 << 60
    assert int(graph.sums(every).value.double().sum()) < 1 << 62


def small(weighted=False):
    """Seven nodes, of which rows {0, 1} have five candidates and a parallel edge."""
    edges = [(2, 0), (3, 0), (3, 1), (4, 1), (4, 1), (5, 1), (0, 2), (5, 3), (6, 4)]
    edges += [(2, 5), (1, 6), (3, 6), (0, 6)]
    weight = torch.arange(len(edges)) % 3 + 1.0
    return Data(
        edge_index=torch.tensor(edges).T.contiguous(), edge_weight=weight, num_nodes=7
    )


def bulk_of(sampler, seeds, count, seed=0):
    return sampler.sample_bulk([given(seeds, fold(seed, i)) for i in range(count)])


@pytest.mark.parametrize(
    "rule", ["code", *map(tiers.rarely, ["cagnet", "paper", "user"]), "fastgcn"]
)
def test_one_draw_at_each_layer_follows_the_formula(rule):
    data = small()
    sampler = KeyedLayerSampler(data, [1, 1], RULES[rule], keep_batch=False)
    seen: dict[int, list[int]] = {}
    first = []
    for out in bulk_of(sampler, [0, 1], 6000):
        one, two = out.node[2:3], out.node[3:]
        first.append(int(one))
        seen.setdefault(int(one), []).append(int(two) if len(two) else -1)
    likely(
        torch.bincount(torch.tensor(first), minlength=7), chances(rule, data, [0, 1])
    )
    for u, found in seen.items():  # the rows of the second layer are what was drawn
        p = chances(rule, data, [u])
        assert (min(found) < 0) == (float(p.sum()) == 0)
        if min(found) >= 0 and int((p > 0).sum()) > 1:
            likely(torch.bincount(torch.tensor(found), minlength=7), p)


# -------------------------------------------------------------- estimators


def estimates(data, rule, s, count, seeds=(0, 1), **options):
    """What the layer of many minibatches computes for fixed features, [count, rows]."""
    sampler = KeyedLayerSampler(data, [s], rule, weight_attr="edge_weight", **options)
    x = torch.tensor([1.0, -2.0, 3.0, 0.5, 4.0, -1.0, 2.0], dtype=REAL)
    found = []
    for out in bulk_of(sampler, list(seeds), count, 5):
        z = torch.zeros(len(seeds), dtype=REAL)
        z.index_add_(0, out.col, out.edge_weight.double() * x[out.node[out.row]])
        found.append(z)
    loops = sampler.rule.loops
    return torch.stack(found), ahat(data, loops, "edge_weight")[list(seeds)] @ x


UNBIASED = [
    ("importance", True, rule, keep)
    for rule in ("code", "cagnet", "fastgcn", "user")
    for keep in (False, True)
]
UNBIASED += [("debiased", False, *case[2:]) for case in UNBIASED]


@tiers.parametrize(("weights", "replace", "rule", "keep"), UNBIASED, UNBIASED[::12])
def test_unbiased_estimates(weights, replace, rule, keep):
    options = {"weights": weights, "replace": replace, "keep_batch": keep}
    for s in (2, 3):
        found, wanted = estimates(small(), RULES[rule], s, 2000, **options)
        spread = found.std(0) / len(found) ** 0.5
        z_scores = (found.mean(0) - wanted) / spread.clamp(min=1e-12)
        assert float(z_scores.abs().max()) < 4.5


def test_debiased_and_importance_weights_by_hand():
    rows = BulkNodes.of([torch.tensor([0, 1])])
    samplers = [
        KeyedLayerSampler(small(), [3], weights=one, keep_batch=False)
        for one in (None, "debiased", "importance")
    ]
    outs = [s.sample_from_nodes(given([0, 1], 11)) for s in samplers]
    p = samplers[0].graph.sums(rows)
    drawn = algebra.sample(p, 3, torch.tensor([fold(11, 0)]))
    chance = p.value.double() / float(p.value.sum())
    gone, beta, alpha = 0.0, torch.zeros(7), torch.zeros(7)
    for k, e in enumerate(drawn.drawn.tolist()):
        beta[p.col[e]] = ((1 - gone) / chance[e] + 3 - (k + 1)) / 3
        alpha[p.col[e]] = 1 / (3 * chance[e])
        gone += float(chance[e])
    for out, factor in zip(outs[1:], (beta, alpha), strict=True):
        assert torch.equal(out.node, outs[0].node)
        wanted = outs[0].edge_weight * factor[out.node[out.row]]
        torch.testing.assert_close(out.edge_weight, wanted)


def test_normalized_weights_are_those_of_the_authors_code():
    data = problems.directed(n=200, e=1500)
    sampler = KeyedLayerSampler(data, [12, 15])  # fewer than there are candidates
    out = sampler.sample_from_nodes(given([3, 1, 150], 2))
    whole = ahat(data, True)
    for rows, cols, source, target, _, weight in layers(out):
        part = whole[rows]
        p = part.square().sum(0)
        part = part[:, cols] / (p / p.sum())[cols].clamp(min=1e-300)
        part = part / part.sum(1, keepdim=True).clamp(min=1e-300)
        dense = torch.zeros_like(part)
        dense.index_put_((target, source), weight.to(REAL), accumulate=True)
        torch.testing.assert_close(dense, part, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule",
    [
        lambda p: p.sqrt(),
        lambda p: p**0.5,
        lambda p: 0.5 * p.sqrt() + p.pow(0.5) / 2,
        lambda p: p.map(torch.sqrt),
    ],
    ids=["method", "power", "sum", "map"],
)
def test_a_rule_is_a_function_of_p(rule):
    wanted = UserRule(lambda p: p.with_value(p.values.sqrt()))
    one, other = (
        KeyedLayerSampler(small(), [2], each).sample_from_nodes(given([2, 6], 3))
        for each in (wanted, UserRule(rule))
    )
    assert torch.equal(one.node, other.node)
    torch.testing.assert_close(one.edge_weight, other.edge_weight)


def test_a_kept_node_without_probability_counts_as_certain():
    rule = UserRule(lambda p: p.with_value(torch.where(p.col == 0, 0.0, p.value)))
    sampler = KeyedLayerSampler(small(), [2], rule, weights="normalized")
    out = sampler.sample_from_nodes(given([2, 6], 3))  # 0 points to both
    assert bool(out.edge_weight.isfinite().all())
    importance = KeyedLayerSampler(
        small(), [1], rule, weights="importance", replace=True
    )
    for one in bulk_of(importance, [0, 2], 20):
        assert float(one.edge_weight[one.node[one.row] == 0]) == 1.0


@tiers.cover(
    ("rule", "option", "weight"),
    [*RULES],
    [None, "normalized", "importance", "debiased"],
    WEIGHTS,
)
def test_of_all_candidates_no_weight_is_an_estimate(rule, option, weight):
    data = problems.loops_and_copies()
    sampler = KeyedLayerSampler(
        data, [-1, data.num_nodes], RULES[rule], weights=option, weight_attr=weight
    )
    out = sampler.sample_from_nodes(given([5, 3, 0], 1))
    plain = KeyedLayerSampler(
        data, [-1, -1], RULES[rule], weights=None, weight_attr=weight
    )
    same(out, plain.sample_from_nodes(given([5, 3, 0], 1)))  # to the last bit


# ------------------------------------------------------------------ errors


def test_errors():
    data = small()
    huge = Data(edge_index=torch.tensor([[1, 2], [0, 0]]), num_nodes=3)
    huge.weight = torch.full((2,), 1e308, dtype=REAL)
    graph = LocalLayerGraph.from_data(data, Ladies())
    debiased = {"weights": "debiased", "replace": True}
    for said, of, options in (
        (r"-1 for all nodes, got \[3, -2\]", data, {"num_nodes_per_layer": [3, -2]}),
        ("must hold a whole number", data, {"num_nodes_per_layer": []}),
        ("must hold a whole number", data, {"num_nodes_per_layer": [1.5]}),
        (r"weights must be one of .* got 'x'", data, {"weights": "x"}),
        ("'debiased' with replace=True", data, debiased),
        ("use KeyedNeighborSampler", data, {"rule": GraphSAGE()}),
        ("a Rule or a function, got 3", data, {"rule": 3}),
        ("takes a Data, got HeteroData", HeteroData(), {}),
        (r"was made for Ladies.*, not for FastGCN", graph, {"rule": FastGCN()}),
        ("weight_attr, most_rows are of the graph", graph, {"weight_attr": "w"}),
        ("add up to infinity", huge, {"weight_attr": "weight"}),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            KeyedLayerSampler(of, **{"num_nodes_per_layer": [1], **options})
    sampler = KeyedLayerSampler(data, [1, 1], most_rows=4)
    for said, seeds in (
        (r"seeds span 0 \.\. 7, but there are 7", [0, 7]),
        ("seeds must be a vector of node ids", [0.5, 1.0]),
        (r"5 rows in a layer, .* room for 4; raise", [0, 1, 2, 3, 4]),
    ):
        with pytest.raises(ValueError, match=said):
            sampler.sample_from_nodes(given(seeds))
    with pytest.raises(NotImplementedError, match="DistLinkNeighborLoader"):
        sampler.sample_from_edges(None)
    with pytest.raises(ValueError, match="'code', 'cagnet' or 'paper', got 'x'"):
        Ladies("x")


TOLD = r"P.with_value\(P.values.sqrt\(\)\)"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda p: p + 1, TOLD),
        (lambda p: p - 1, TOLD),
        (lambda p: p**0, TOLD),
        (lambda p: p.exp(), TOLD),
        (lambda p: p.values.sqrt(), TOLD),
        (lambda p: p.value, "got Tensor"),
        (lambda p: p.with_value(p.value[1:]), "got 3 values"),
        (
            lambda p: BulkMatrix(p.rowptr, p.col + 1, p.value, 8, p.batch_ptr),
            "got others from a rule",
        ),
        (lambda p: p.with_value(-p.value), "holds -1.0 in column 2"),
        (lambda p: p.with_value(p.value / 0), "holds inf in column 2"),
        (lambda p: p.with_value(p.value * float("nan")), "holds nan in column 2"),
    ],
)
def test_rules_of_ones_own_are_checked(function, why):
    sampler = KeyedLayerSampler(small(), [1], function)
    with pytest.raises((TypeError, ValueError), match=why):
        sampler.sample_from_nodes(given([0, 1]))
