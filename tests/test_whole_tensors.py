"""DistTensors read as whole tensors: each case equals plain torch on the whole graph."""

import copy

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.utils as U
import worlds

pytestmark = pytest.mark.usefixtures("place")


def _steps(d):
    mask = torch.zeros(d.num_nodes, dtype=torch.bool)
    mask[:20] = True
    return mask


def _ones(d, *shape):
    return torch.ones(shape, dtype=torch.float64, device=d.x.device)


def _counted(d, count):
    return torch.arange(count, device=d.x.device)


def _perm(d, seed=3):
    return torch.randperm(d.num_nodes, generator=torch.Generator().manual_seed(seed))


def _written(d):
    out = d.x.new_zeros(d.x.size(0), 4)
    out[d.train_mask] = F.one_hot(d.y[d.train_mask], 4).to(out.dtype)
    return out + d.x[:, :4]


def _plain_written(d):
    mask = torch.zeros(d.num_nodes, dtype=torch.bool, device=d.x.device)
    mask[d.x[:, 0] > 0] = True
    return d.x[mask]


def _scatter(reduce):
    def run(d):
        batch = (d.y + d.x[:, 0].gt(0)).long()
        return U.scatter(d.x, batch, 0, reduce=reduce)

    return run


def _over_edges(reduce):
    def run(d):
        source, target = d.edge_index[0], d.edge_index[1]
        return U.scatter(d.x[source], target, 0, d.num_nodes, reduce=reduce)

    return run


SCALARS = {
    "len": lambda d: len(d.x),
    "shape": lambda d: tuple(d.x.shape),
    "size": lambda d: d.x.size(0) + d.y.size(-1),
    "numel": lambda d: d.x.numel(),
    "nodes": lambda d: d.num_nodes,
    "edges": lambda d: (d.num_edges, d.edge_index.size(1), tuple(d.edge_index.shape)),
    "features": lambda d: (d.num_features, d.num_node_features),
    "selection": lambda d: len(d.x[d.train_mask]),
    "computed": lambda d: d.x[d.x[:, 0] > 0].size(0),
    "plain mask": lambda d: d.x[_steps(d)].shape[0],
    "column of masks": lambda d: (
        d.x[torch.stack([d.train_mask, ~d.train_mask], 1)[:, 1]].shape
    ),
    "tolist": lambda d: d.y.tolist(),
    "numpy": lambda d: d.x.detach().cpu().numpy().sum().item(),
    "nonzero": lambda d: d.train_mask.nonzero().view(-1).tolist(),
    "bincount": lambda d: d.y.bincount().tolist(),
    "unique": lambda d: d.y.unique().tolist(),
    "max id": lambda d: int(d.edge_index.max()),
    "undirected": lambda d: d.is_undirected(),
    "self-loops": lambda d: d.has_self_loops(),
}


def _by_id(d):
    out, idx = torch.zeros_like(d.x), _perm(d)[:17]
    out[idx] = d.x[idx] * 2
    return out


CASES = {
    "division by nodes": lambda d: d.x.sum() / d.num_nodes,
    "division by len": lambda d: d.x.sum() / len(d.y),
    "sum loss": lambda d: F.cross_entropy(d.x, d.y, reduction="sum") / d.num_nodes,
    "arange": lambda d: d.x[torch.arange(d.num_nodes // 3)],
    "randperm": lambda d: d.x[_perm(d)[:17]],
    "new zeros": _written,
    "into plain": _plain_written,
    "zeros": lambda d: d.x + 0 * _ones(d, d.num_nodes, 1),
    "ones for selection": lambda d: (
        d.x[d.train_mask] * _counted(d, int(d.train_mask.sum())).view(-1, 1)
    ),
    "cat rows": lambda d: torch.cat([d.x[d.train_mask], d.x[:9], _ones(d, 3, 7)]),
    "columns meet rows": lambda d: d.x[:, 0] * _counted(d, 3).view(-1, 1),
    "one column meets rows": lambda d: d.x * _ones(d, 1, 1, 1),
    "row": lambda d: d.x[5] + d.x[-1],
    "list": lambda d: d.x[[4, 4, 0]],
    "entries": lambda d: d.x[torch.arange(d.num_nodes), d.y],
    "some entries": lambda d: d.x[[4, 0, 4], [1, 3, 1]],
    "one column each": lambda d: d.x[
        torch.arange(d.num_nodes), torch.arange(d.num_nodes) % 7
    ],
    "product": lambda d: U.scatter(
        d.x.tanh() + 1.5, d.y, 0, int(d.y.max()) + 1, reduce="mul"
    ),
    "product of edges": lambda d: U.scatter(
        d.x[d.edge_index[0]].tanh() + 1.5, d.edge_index[1], 0, d.num_nodes, reduce="mul"
    ),
    "segments": lambda d: U.segment(
        d.x, torch.tensor([0, 9, 40, d.num_nodes], device=d.x.device), "max"
    ),
    "picked twice": lambda d: d.x[d.y > 0][d.train_mask[d.y > 0]],
    "ids of a selection": lambda d: d.x[d.y > 0][[3, 0, 3]],
    "range of a selection": lambda d: d.x[d.y > 0][2:9],
    "permuted": lambda d: d.x[_perm(d)] * d.x,
    "rows written by id": _by_id,
    "outer": lambda d: d.x @ d.x.t(),
    "T": lambda d: torch.matmul(d.x, d.x.T).sigmoid().sum(1),
    "plain times rows": lambda d: _ones(d, 3, d.num_nodes) @ d.x,
    "topk": lambda d: d.x[:, 0].topk(7).values,
    "cumsum": lambda d: d.x.cumsum(0),
    "logsumexp": lambda d: d.x.logsumexp(0),
    "masked write": lambda d: d.x.clone().masked_fill(~d.train_mask.view(-1, 1), 0),
    "in place ids": lambda d: _set_ids(d.x.clone()),
    "ids of edges": lambda d: d.x[d.edge_index[0]] * d.x[d.edge_index[1]],
    "edges stacked": lambda d: (
        torch.stack([d.edge_index[0], d.edge_index[1] + 1]) * 0.5
    ),
    "masked edges": lambda d: d.x[d.edge_index[:, d.edge_weight > 0.5][0]],
    "degree": lambda d: U.degree(d.edge_index[0], d.num_nodes) * d.x[:, 0],
    "degree in": lambda d: U.degree(d.edge_index[1], d.num_nodes) * d.x[:, 0],
    "plain whole masked": lambda d: (
        _perm(d).double().to(d.x.device)[d.train_mask] * d.x[d.train_mask][:, 0]
    ),
    "softmax by target": lambda d: U.softmax(
        d.x[d.edge_index[0]][:, 0], d.edge_index[1], num_nodes=d.num_nodes
    ),
    **{f"scatter {r}": _scatter(r) for r in ("sum", "mean", "max", "min")},
    **{f"edges {r}": _over_edges(r) for r in ("sum", "mean", "max", "min")},
}


def _set_ids(x):
    x[torch.tensor([3, 50, 7])] = 2.0
    x[4] = torch.arange(7.0, dtype=x.dtype, device=x.device)
    return x * 1


@tiers.parametrize("size", [1, 2, 3], [1, 3])
@worlds.on()
def test_sizes_are_the_whole_graphs(size):
    data, share = alike.share_of()

    def check(case):
        assert case(share) == case(data)

    alike.check_all(SCALARS, check)


@pytest.mark.parametrize(
    ("size", "graph", "cutter"),
    [
        tiers.rarely(1, "directed", "block"),
        tiers.rarely(2, "directed", "random"),
        (3, "directed", "empty_rank"),
    ],
)
@worlds.on()
def test_values_and_gradients_are_those_of_one_process(size, graph, cutter):
    data, share = alike.share_of(graph, cutter)

    def check(case):
        def of(x, d):
            d = copy.copy(d)
            d.x = x
            return case(d)

        got, want = alike.step(of, share.x, share), alike.step(of, data.x, data)
        assert want[0].shape == got[0].shape
        alike.same(got, want)

    alike.check_all(CASES, check)
