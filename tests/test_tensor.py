"""DistTensor's rule: row by row is local, over nodes is global, the rest raises."""

import copy
import io
import itertools
import math

import alike
import numpy as np
import places
import pytest
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from torch import nn
from torch.utils._pytree import tree_leaves
from torch_geometric import Index
from torch_geometric.nn import HeteroLinear

import pyg_distcomm as pdc

pytestmark = pytest.mark.usefixtures("place")

ranks = tiers.parametrize("size", [1, 2, 3, 4], [3])
CUTS = [(1, "random"), *itertools.product((2, 3, 4), ("random", "empty_rank"))]
MASKED = [(size, "no_train") for size in (3, 4)]  # which matters to masks alone
cuts = tiers.parametrize(("size", "cutter"), CUTS, [CUTS[4]])


def _share(cutter="random"):
    return alike.share_of("undirected", cutter)


def ones(x, *shape):
    """Ones beside rows that may lie on a device."""
    return torch.ones(shape, dtype=torch.float64, device=x.device)


def counted(x, *shape):
    """Ones, twos, threes, ..., row by row."""
    return ones(x, *shape).cumsum(0)


def ids(x, *which):
    return torch.tensor(which, device=x.device)


def _written(x, key, value=3):
    x[key] = value
    return x


def _assigned(x, value):
    x.data = value
    return x * 3


LOCAL = {
    "relu": lambda x: x.relu(),
    "operators": lambda x: (2 * x - x / 3 + 1) ** 2 - (-x),
    "compare": lambda x: (x > 0) & ~(x > 1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "clamp": lambda x: x.clamp(min=-0.5, max=0.5),
    "softmax": lambda x: F.softmax(x, dim=-1),
    "log_softmax": lambda x: x.log_softmax(dim=1),
    "argmax": lambda x: x.argmax(-1),
    "max": lambda x: x.max(dim=1).values,
    "sum columns": lambda x: x.sum(-1, keepdim=True),
    "mean columns": lambda x: x.mean(dim=1),
    "std columns": lambda x: x.std(1),
    "norm rows": lambda x: x.norm(p=2, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "layer_norm": lambda x: F.layer_norm(x, (7,)),
    "linear": lambda x: F.linear(x, ones(x, 3, 7)),
    "matmul": lambda x: x @ ones(x, 7, 2),
    "matvec": lambda x: x @ ones(x, 7),
    "view": lambda x: x.view(-1, 7, 1).transpose(1, 2).reshape(-1, 7),
    "view heads": lambda x: x[:, :6].view(-1, 2, 3).sum(-1),
    "flatten": lambda x: x.unsqueeze(1).flatten(1),
    "stack": lambda x: torch.stack([x, x], dim=-1).sum(-1),
    "stacks": lambda x: torch.stack([x, x * 2]).mean(0) + torch.stack([x, -x])[1],
    "sum of a stack": lambda x: x * torch.stack([x, x]).sum(),
    "softmax over a stack": lambda x: (
        torch.stack([x, x**2]).softmax(dim=0) * torch.stack([x.sin(), x])
    ).sum(0),
    "softmax of rows of a stack": lambda x: torch.stack([x, -x]).log_softmax(1)[0],
    "normalize a stack": lambda x: F.normalize(torch.stack([x, x**2]), dim=-1).sum(0),
    "spread of stacks": lambda x: torch.stack([x, x**2, x.tanh()]).std(0),
    "variances of stacks": lambda x: torch.stack([x, x**2]).var(0).mean(),
    "stacks turned": lambda x: torch.stack([x, x**2]).transpose(0, 1) @ ones(x, 7, 2),
    "stacks compared": lambda x: (torch.stack([x, x**2]) > 1).any(0),
    "largest of stacks": lambda x: torch.max(torch.stack([x, x**2]), dim=0).values,
    "columns": lambda x: x[:, 1:3],
    "one column": lambda x: x[:, 0],
    "ellipsis": lambda x: x[..., 2],
    "new axis": lambda x: x[:, 0][:, None],
    "split": lambda x: x.split(3, dim=1)[0],
    "topk": lambda x: x.topk(2, dim=-1).values,
    "dtype": lambda x: (x > 0).to(x.dtype) + x.to(torch.float64),
    "squeeze": lambda x: x[:, :1].squeeze(),
    "one_hot": lambda x: F.one_hot((x[:, 0] > 0).long(), 2),
    "in place": lambda x: x.clone().add_(1).mul_(2),
    "shapes in place": lambda x: (2 * x).unsqueeze_(1).transpose_(0, 1).squeeze_() + x,
    "quantiles of rows": lambda x: x.quantile(0.3, 1),
    "data": lambda x: _assigned(x * 2, x.detach().sin()),
    "data of another type": lambda x: _assigned(x.detach() * 2, x.detach().float()),
    "plain data": lambda x: _assigned(x * 2, counted(x, 50, 7)),
    "cosine": lambda x: F.cosine_similarity(x, x * 2 + 1),
    "gather": lambda x: x.gather(1, x.argmax(-1, keepdim=True)),
    "zeros": lambda x: torch.zeros_like(x) + x,
    "type": lambda x: (x > 0).type(torch.double),
    "linalg norm rows": lambda x: torch.linalg.norm(x, dim=-1),
    "narrow": lambda x: x.narrow(1, 0, 2),
    "column list": lambda x: x[:, [0, 2]],
    "none": lambda x: x + (0.0 if x == None else 1.0),  # noqa: E711
    "dropout 0": lambda x: F.dropout(x, 0.0),
    "eval dropout": lambda x: F.dropout(x, 0.5, training=False),
    "replicated row": lambda x: x * counted(x, 7),
}


def target(x):
    """The clusters that DEC aims at, by the transpose of what rows are divided by."""
    q = x.softmax(1)
    p = q**2 / q.sum(0)
    return (p.t() / p.sum(1)).t()


GLOBAL = {
    "sum": lambda x: x.sum(),
    "sum 0": lambda x: x.sum(0),
    "sum both": lambda x: x.sum(dim=(0, 1), keepdim=True),
    "mean": lambda x: x.mean(),
    "mean 0": lambda x: x.mean(dim=0, keepdim=True),
    "centre": lambda x: x - x.mean(0),
    "std": lambda x: x.std(),
    "std biased": lambda x: x.std(unbiased=False),
    "var 0": lambda x: x.var(0),
    "var correction": lambda x: torch.var(x, dim=0, correction=0),
    "var positional": lambda x: x.var(0, False),
    "var keepdim": lambda x: x.var(0, True, True),
    "std positional": lambda x: x.std((0,), False, True),
    "mean of type": lambda x: (x > 0).type(torch.double).mean(),
    "frobenius": lambda x: torch.linalg.norm(x),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(p=1),
    "norm of type": lambda x: torch.linalg.vector_norm(x.float(), dtype=x.dtype),
    "complex norm": lambda x: torch.complex(x, x.cos()).norm(dim=0),
    "norm inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "norm 0": lambda x: torch.norm(x, dim=0),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(dim=0, keepdim=True),
    "max 0 at": lambda x: x.max(dim=0).indices,
    "argmax 0": lambda x: x.argmax(0),
    "argmax of all": lambda x: x.argmax(),
    "argmin of all": lambda x: torch.argmin(x[:, [3, 1]]),
    "argmin column": lambda x: x[:, 1].argmin(),
    "last dim of a vector": lambda x: x[:, 0].sum(-1),
    "any": lambda x: (x > 2).any(),
    "all": lambda x: (x > -9).all(dim=0),
    "target of DEC": lambda x: F.kl_div(x.log_softmax(1), target(x), reduction="sum"),
    "means of a transpose": lambda x: x.T.mean(1) + x.t()[1].sum(),
    "columns of a transpose": lambda x: x.T.unbind(0)[3] * x.t()[1],
    "vectors in one": lambda x: torch.stack([x[:, :1].flatten(), x[:, 1]]) @ x,
    "vectors turned": lambda x: torch.stack([x[:, 0], x[:, 1]]).T.sum(0),
    "count": lambda x: torch.count_nonzero(x > 0),
    "equal": lambda x: torch.tensor(torch.equal(x, x)),
    "allclose": lambda x: torch.tensor(torch.allclose(x, x + 1)),
}


def _seeded(kind, *args, **kwargs):
    torch.manual_seed(0)
    return kind(*args, **kwargs).double()


DECOMPOSED = {
    "vstack": lambda x: torch.vstack([x, 2 * x]),
    "hstack": lambda x: torch.hstack([x, x[:, :1]]),
    "hstack of vectors": lambda x: torch.hstack([x[:, 0], x[:, 1]]),
    "dstack": lambda x: torch.dstack([x, -x]),
    "column_stack": lambda x: torch.column_stack([x[:, 0], x]),
    "repeat": lambda x: x.repeat(2, 3),
    "repeat both": lambda x: x.repeat_interleave(2, 1).repeat_interleave(2, 0),
    "repeat by numbers": lambda x: x.repeat_interleave(counted(x, 50).long() % 3, 0),
    "movedim": lambda x: x.view(-1, 7, 1).movedim(1, 2),
    "outer": lambda x: torch.outer(x[:, 0], x[:, 1]),
    "outer with columns": lambda x: torch.outer(x[:, 0], ones(x, 2)),
    "dot": lambda x: torch.dot(x[:, 0], x[:, 1]),
    "vector times matrix": lambda x: x[:, 0] @ x,
    "addmv": lambda x: torch.addmv(x[:, 0], x, counted(x, 7), beta=2, alpha=3),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0], [0])),
    "cdist": lambda x: torch.cdist(x, x[:, [1, 0, 2, 3, 4, 5, 6]] + 1),
    "var_mean": lambda x: torch.cat(torch.var_mean(x, 0)),
    "std_mean": lambda x: torch.stack(torch.std_mean(x, dim=1), 1),
    "einsum of rows": lambda x: torch.einsum("nhf,nkf->hk", x[:, None], x[:, None] + 1),
    "einsum to rows": lambda x: torch.einsum("nf,fk->nk", x, counted(x, 7, 2)),
    "ids": lambda x: x[ids(x, 3, 0, 49, 3, 17, -1, 20)],
    "ids of PyG": lambda x: x[Index(x.argmax(1), dim_size=50)],
    "pairs": lambda x: x[:9][ids(x, 3, 0, 3)] * x[10::3][ids(x, 4, 1, 2)],
    "index_fill": lambda x: x.index_fill(0, ids(x, 3, 49), 2.0),
    "index_put": lambda x: torch.index_put(x, (ids(x, 7),), ones(x, 1, 7)),
    "pad": lambda x: F.pad(x, (1, 2), value=3.0),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True, dim=1) * x,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, False),
    "max_pool1d": lambda x: F.max_pool1d(x.unsqueeze(1), 2),
    "threshold": lambda x: F.threshold(x, 0.1, 3.0),
    "expit": lambda x: torch.special.expit(x),
    "singular values": lambda x: torch.linalg.svdvals(x),
    "logsumexp of all": lambda x: x.logsumexp((0, 1)),
    "numbers written": lambda x: torch.index_put(x, (x > 1,), ones(x, 1)),
    "rows by bytes": lambda x: x[(other(x)[:, 0] > 0.5).byte()],
    "stacks cut anew": lambda x: torch.stack([x, -x, x]).view(2, 75, 7),
    "all in one, by a mask": lambda x: x[None][(other(x)[:, 0] > 0)[None]],
    "one row": lambda x: x.select(0, 3),
    "one row written": lambda x: _written(_written(x * 1, ids(x, 5)[0]), np.uint8(9)),
    "columns set": lambda x: _written(cube(x), (3, slice(3), [0]), counted(x, 3, 1)),
    "all written": lambda x: _written(x * 1, ()) + x,
    "rows in one": lambda x: x.unsqueeze(0).expand(2, -1, -1) + x[None],
    "one number": lambda x: x[3, 2],
    "rows one by one": lambda x: sum(row * k for k, row in enumerate(x)),
    "expand": lambda x: x[:, :1].expand(-1, 3),
    "scatter by class": lambda x: (ones(x, 3, 7) * 0).scatter_add_(
        0, x.argmax(1).remainder(3).view(-1, 1).expand(-1, 7), x
    ),
    "correlations": lambda x: torch.corrcoef(x.t()),
    "LSTM cell": lambda x: _seeded(torch.nn.LSTMCell, 7, 7)(x, (x, x + 1))[0],
    "transformer over steps": lambda x: _seeded(
        torch.nn.TransformerEncoderLayer, 2, 1, 4, 0.0, batch_first=True
    )(x[:, :6].view(-1, 3, 2), src_key_padding_mask=counted(x, 50, 3) < 0),
    "ranking loss": lambda x: F.margin_ranking_loss(x[:, 0], x[:, 1], counted(x, 50)),
    "cosine loss": lambda x: F.cosine_embedding_loss(x, x.flip(1), -ones(x, 50)),
}


def weights(x, *shape):
    return counted(x, *shape).sin()


def other(x):
    return x.flip(1).sigmoid()


def cube(x):
    """A matrix [3, 7] for each row."""
    return torch.stack([x, x.sin(), x.exp()], 1)


def square(x):
    """A matrix [3, 3] for each row."""
    return cube(x) @ cube(x).mT


# of each row alone, in ways that torch has a kernel for and that decompose: nothing travels
WITHIN = {
    "prelu": lambda x: F.prelu(x, weights(x, 7)) + F.prelu(x, weights(x, 1)),
    "hardswish": lambda x: F.hardswish(x) + F.hardsigmoid(x) + F.mish(x),
    "distances": lambda x: torch.cdist(x, counted(x, 5, 7)),
    "shrinks": lambda x: F.hardshrink(x) + F.softshrink(x),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, other(x)),
    "bce sum": lambda x: F.binary_cross_entropy_with_logits(
        x, other(x), pos_weight=weights(x, 7).abs(), reduction="sum"
    ),
    "bilinear": lambda x: F.bilinear(x, other(x), weights(x, 5, 7, 7)),
    "cross": lambda x: torch.linalg.cross(x[:, :3], other(x)[:, :3]),
    "cummax, cumsum": lambda x: x.cummax(1)[0] + x.cumsum(1),
    "sort of columns": lambda x: x.sort(1)[0],
    "softmax of nodes": lambda x: x.softmax(0) + x.log_softmax(0),
    "softmax of no columns": lambda x: x[:, :0].softmax(0),
    "nansum": lambda x: x.nansum(),
    "aminmax": lambda x: x + torch.aminmax(x.detach(), dim=1)[0][:, None],
    "largest of rows": lambda x: x.round().max(0)[0] + x.min(0, True)[0],
    "roll, first rows": lambda x: x.roll(1, 1)[:10],
    "rows of stacks": lambda x: torch.stack([x, -x]).flatten(0, 1).view(2, -1, 7).exp(),
    "diagonal": lambda x: (x @ weights(x, 7, 50)).diagonal(),
    "diag": lambda x: (x @ weights(x, 7, 50)).diag(),
    "dist": lambda x: torch.dist(x, other(x)) * torch.allclose(x, x + 1e-9),
    "distribution": lambda x: torch.distributions.Normal(x, x.exp()).log_prob(other(x)),
    "tril, diagonals": lambda x: cube(x).tril().diagonal(-1, 1, 2),
    "diag_embed": lambda x: torch.diag_embed(x),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "complex": lambda x: torch.complex(x, other(x)).abs(),
    "view as complex": lambda x: torch.view_as_complex(x[:, :2].contiguous()).abs(),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "isin": lambda x: torch.isin(x.round(), counted(x, 2)).double(),
    "searchsorted": lambda x: torch.searchsorted(counted(x, 4), x).double(),
    "bucketize": lambda x: torch.bucketize(x, counted(x, 4)).double(),
    "floor division": lambda x: (x.round().long() // 2).double(),
    "average of columns": lambda x: F.avg_pool1d(cube(x), 2),
    "adaptive average": lambda x: F.adaptive_avg_pool1d(cube(x), 2),
    "adaptive maximum": lambda x: F.adaptive_max_pool1d(cube(x), 2),
    "interpolate": lambda x: F.interpolate(cube(x), 8),
    "determinants": lambda x: torch.linalg.det(square(x)),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(square(x)),
    "matrix_exp": lambda x: torch.matrix_exp(square(x) * 0.01),
    "triplet loss": lambda x: F.triplet_margin_loss(x, other(x), other(x).roll(1, -1)),
    "glu": lambda x: F.glu(x[:, :6]),
    "abs_": lambda x: (x * 1).abs_(),
    "columns set": lambda x: _written(x * 1, (slice(None), ids(x, *range(7)) > 4)),
    "numbers by a mask": lambda x: x[x > 0.3] * x.masked_select(x > 0.3).detach(),
    "signals of rows": lambda x: F.conv2d(x[None, None], weights(x, 2, 1, 1, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(*[cube(x)[:, None]] * 3),
    "pairs of ids": lambda x: x[x.argsort(1)[:, :2]] * counted(x, 2, 1),
    "norm of plain rows": lambda x: (
        x * F.batch_norm(weights(x, 50, 7) @ (x.t() @ x), None, None, training=True)
    ),
}


# convolutions and fused cells, of which the second device has none
LACKING = ("convolution", "LSTM cell", "cell")
DRAWN = ("gumbel",)  # from the generator of a device, whose numbers are its own


def _within_reach(table):
    """Cases of a table for which the device of this test has operations."""
    lacking = LACKING if places.NOW == "spare" else ()
    return [case for case in globals()[table].items() if case[0] not in lacking]


def _check_table(table, cutter):
    data, share = _share(cutter)
    ledger = share.x.rows.mesh.ledger
    for name, f in _within_reach(table):
        x = data.x.to(share.x.device) if name in DRAWN else data.x
        ledger.reset()
        got = alike.step(f, share.x)
        assert "gather" not in ledger.table() or table != "WITHIN", name
        alike.same(got, alike.step(f, x), name)


@cuts
@pytest.mark.parametrize("table", ["LOCAL", "GLOBAL", "DECOMPOSED"])
def test_tables(table, size, cutter):
    worlds.run(_check_table, size, table, cutter)


@pytest.mark.place("cpu")
@tiers.parametrize("size", [2, 3], [3])
def test_rows_alone_are_exact_without_a_gather(size):
    worlds.run(_check_table, size, "WITHIN", "empty_rank")


class Steps(nn.LSTM):
    def forward(self, x):
        return super().forward(cube(x))[0][:, -1]


@worlds.on(3)
def test_an_lstm_of_each_row_gathers_none():
    """In float32, for which torch has a fused layer."""
    data, share = _share("empty_rank")
    net = _seeded(Steps, 7, 4, 2, batch_first=True, bidirectional=True).float()
    got, want = (alike.learnt(net, x.float()) for x in (share.x, data.x))
    assert "gather" not in share.x.rows.mesh.ledger.table()
    alike.same(got, want, rtol=1e-4, atol=1e-5)
    for kind in (nn.GRU, nn.LSTM):  # from states that are rows
        net = _seeded(kind, 7, 2, batch_first=True)

        def last(x, net=net):
            first = x.new_zeros(1, len(x), 2)
            return net(cube(x), (first,) * 2 if isinstance(net, nn.LSTM) else first)[0][
                :, -1
            ]

        alike.same(alike.step(last, share.x), alike.step(last, data.x))
    assert "gather add" not in share.x.rows.mesh.ledger.table()


@worlds.on(2)
def test_rows_are_written_to_one_of_a_stack():
    """As fixed-step solvers of differential equations do."""
    data, share = _share("empty_rank")

    def filled(x):
        out = torch.zeros(3, *x.shape, dtype=x.dtype)
        for step in range(3):
            out[step] = x * (step + 1)
        return out[1] * out[2]

    alike.same(alike.step(filled, share.x), alike.step(filled, data.x))


ORDERS = (0, 0.5, -1, 1.5, 3, -math.inf)
NORMS = {
    "norm": lambda x, p: torch.norm(x, p),
    "norm of columns": lambda x, p: x.norm(p, dim=0, keepdim=True),
    "vector norm": lambda x, p: torch.linalg.vector_norm(x, p, dim=(0, 1)),
    "of a column": lambda x, p: torch.linalg.norm(x[:, 0], p),
    "of a selection": lambda x, p: x[x[:, 6] > 0].norm(p, 0),
    "of three dims": lambda x, p: x[:, :6].view(-1, 3, 2).norm(p, (0, 2)),
    "of rows": lambda x, p: torch.norm(x, p, dim=1),
    "normalize": lambda x, p: F.normalize(x, p, dim=0),
}


@ranks
@worlds.on()
def test_norms(size):
    """Compares norms and their gradients where numbers, rows and columns are zero."""
    data, share = _share("empty_rank")
    x = torch.where(data.x > 0, data.x, 0)
    x[:, 2], x[3] = 0, 0
    many = pdc.from_local(x[share.x.rows.gid].to(share.x.device), share.x)
    for (name, f), p in itertools.product(NORMS.items(), ORDERS):
        alike.same(alike.step(f, many, p), alike.step(f, x, p), f"{name}, {p}")
    kinds = {"nuc": torch.norm, 2: torch.linalg.norm, "fro": torch.linalg.norm}
    for order, norm in kinds.items():
        alike.same(norm(share.x, order), norm(data.x, order), order)
    for order in ORDERS:
        assert torch.isnan((share.x + math.nan).norm(order)) == (order != 0), order
        with pytest.raises(RuntimeError, match="floating point"):
            share.x.long().norm(order)


def _apply(x, module):
    return module(x)


MODULES = {
    "attention": (
        lambda: nn.MultiheadAttention(1, 1, batch_first=True),
        lambda x, m: m(*[x.view(-1, 7, 1)] * 3)[0],
    ),
    "steps": (
        lambda: nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True),
        lambda x, m: m(x[:, :6].view(-1, 3, 2)),
    ),
    "convolution": (lambda: nn.Conv1d(1, 2, 3), lambda x, m: m(x.unsqueeze(1))),
    "cell": (lambda: nn.GRUCell(7, 3), _apply),
    "classes": (lambda: HeteroLinear(7, 2, 3), lambda x, m: m(x, x.argmax(1) % 3)),
    "from the end": (lambda: nn.Linear(3, 7), lambda x, m: m.weight[x.argmax(1) - 7]),
    "distances": (lambda: nn.Linear(7, 3), lambda x, m: torch.cdist(x, m.weight)),
    "plain rows": (
        lambda: nn.Linear(2, 50),
        lambda x, m: torch.einsum("nf,nk->fk", x, m.weight),
    ),
    "rows written": (
        lambda: nn.Linear(7, 2),
        lambda x, m: x.index_copy(0, ids(x, 1, 40), m.weight),
    ),
    "all rows in one": (
        lambda: nn.MultiheadAttention(7, 1, batch_first=True),
        lambda x, m: m(*[x[None]] * 3)[0].squeeze(0) + x,
    ),
    "fetched rows": (
        lambda: nn.MultiheadAttention(7, 1),
        lambda x, m: m(*[torch.stack([(x + m.in_proj_bias[:7])[x.argmax(1)], x])] * 3)[
            0
        ].sum(0),
    ),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(7), _apply),
    "BatchNorm": (lambda: pyg.BatchNorm(7), _apply),
    "LayerNorm of a graph": (lambda: pyg.LayerNorm(7, mode="graph"), _apply),
    "LayerNorm of nodes": (lambda: pyg.LayerNorm(7, mode="node"), _apply),
    "LayerNorm": (lambda: nn.LayerNorm(7), _apply),
}


@cuts
@worlds.on()
def test_modules_learn_of_all_nodes(size, cutter):
    """Compares outputs, gradients and running statistics of modules."""
    data, share = _share(cutter)
    for name, (make, call) in _within_reach("MODULES"):
        found = []
        for x in (data.x, share.x):
            module = _seeded(make).to(x.device)
            trained = alike.step(call, x, module)
            kept = [*module.buffers()]
            evaluated = call(x, module.eval()) if kept else None
            grads = [p.grad for p in module.parameters()]
            found.append([trained, grads, kept, evaluated])
        alike.same(found[1], found[0], name)


LOSSES = {
    "cross entropy": lambda x, y, m: F.cross_entropy(x[m], y[m]),
    "sum": lambda x, y, m: F.cross_entropy(x, y, reduction="sum"),
    "none": lambda x, y, m: F.cross_entropy(x, y, reduction="none").mean(),
    "weights": lambda x, y, m: F.cross_entropy(x, y, counted(x, 7)),
    "ignore": lambda x, y, m: F.cross_entropy(x, y, ignore_index=2),
    "smoothing": lambda x, y, m: F.cross_entropy(x[m], y[m], label_smoothing=0.1),
    "probabilities": lambda x, y, m: F.cross_entropy(x, F.softmax(x.detach(), -1)),
    "nll": lambda x, y, m: F.nll_loss(F.log_softmax(x, -1)[m], y[m]),
    "mse": lambda x, y, m: F.mse_loss(x[m], x[m].detach() + 1),
    "mse of no rows": lambda x, y, m: (
        F.mse_loss(x[m & ~m], x[m & ~m].detach()).nan_to_num() + x.sum()
    ),
    "mse plain": lambda x, y, m: F.mse_loss(x, ones(x, 50, 7)),
    "l1": lambda x, y, m: F.l1_loss(x, x.detach() * 2),
    "bce": lambda x, y, m: F.binary_cross_entropy_with_logits(
        x[:, 0], (y > 1).double()
    ),
    "bce pos": lambda x, y, m: F.binary_cross_entropy_with_logits(
        x[:, 0], (y > 1).double(), pos_weight=ones(x) * 3
    ),
    "kl": lambda x, y, m: F.kl_div(
        F.log_softmax(x, -1), F.softmax(x.detach(), -1), reduction="batchmean"
    ),
    "weighted mse": lambda x, y, m: F.mse_loss(
        x, x.detach() + 1, weight=counted(x, 7).expand(50, 7)
    ),
    "weighted huber": lambda x, y, m: F.huber_loss(
        x, x.detach() + 1, delta=0.5, weight=counted(x, 7).expand(50, 7)
    ),
    "weighted l1": lambda x, y, m: F.l1_loss(
        x, x.detach() * 2, weight=counted(x, 7).expand(50, 7)
    ),
    "l1 of a selection": lambda x, y, m: F.l1_loss(
        x[m], x[m].detach() * 2, weight=x[m].detach().abs(), reduction="sum"
    ),
    "l1 of each": lambda x, y, m: F.l1_loss(
        x, x.detach() * 2, reduction="none", weight=x.detach().abs()
    ).mean(),
    "l1 by rows that learn": lambda x, y, m: F.l1_loss(
        ones(x, 50, 7), ones(x, 50, 7) + 3, weight=x.square() * y.view(-1, 1)
    ),
    "mse by rows learnt": lambda x, y, m: F.mse_loss(x, x + y[:, None], weight=x**2),
    "module": lambda x, y, m: torch.nn.CrossEntropyLoss()(x[m], y[m]),
    "margin": lambda x, y, m: F.multi_margin_loss(x, y),
    "penalty": lambda x, y, m: (
        F.mse_loss(x, torch.zeros_like(x)) + 0.1 * x.square().sum()
    ),
}


@tiers.parametrize(("size", "cutter"), CUTS + MASKED, [CUTS[4], MASKED[0]])
@worlds.on()
def test_losses_are_global_means(size, cutter):
    data, share = _share(cutter)
    for name, f in LOSSES.items():
        got = alike.step(f, share.x, share.y, share.train_mask)
        alike.same(got, alike.step(f, data.x, data.y, data.train_mask), name)


AS_TORCH = {
    "by a plain matrix": lambda x: _by_a_plain_matrix(x),
    "parts after writes": lambda x: _parts_after_writes(x),
    "flatten": lambda x: x.flatten(),
    "view": lambda x: x.view(-1),
    "stack": lambda x: torch.stack([x, x]).cumsum(1),
    "pairs": lambda x: x[x[:, :2] > 0, ids(x, 0, 1)],
    "columns by a mask": lambda x: x.T.index_put((counted(x, 7, 50) > 4,), ones(x, 1)),
    "broadcast loss": lambda x: F.mse_loss(x[:, :1], x[:, 0]),
    "out": lambda x: torch.add(x, x, out=ones(x, 50, 7)),
    "row-sharded table": lambda x: F.embedding((x[:, 0] > 0).long(), x),
    "einsum": lambda x: torch.einsum("nf,mf->nm", x, x),
    "repeated inside": lambda x: torch.einsum("nn->n", x),
    "groups": lambda x: F.group_norm(x.t()[None, :6], 2),
    "rows as channels": lambda x: F.avg_pool1d(x, 2),
    "pad of rows": lambda x: F.pad(x, (0, 0, 1, 1)),
    "columns for rows": lambda x: torch.outer(ones(x, 3), x[:, 0]),
    "a mask of each row": lambda x: F.scaled_dot_product_attention(
        *[x.view(-1, 1, 7, 1)] * 3, attn_mask=ones(x, 50, 1, 7, 7)
    ),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "item": lambda x: x[:, 0].item(),
    "bool": lambda x: bool(x),
    "float": lambda x: float(x),
    "rows meet columns": lambda x: x * x[:, 0],
    "wrong plain": lambda x: x + ones(x, 13, 7),
    "one row and a plain one": lambda x: torch.cat([x[3:4], ones(x, 1, 2)], 1),
    "one row and several": lambda x: x[3:4] - ones(x, 5, 7),
    "one row in a stack": lambda x: torch.stack([ones(x, 1, 7), x[3:4]]),
    "one row beside all": lambda x: torch.cat([x, ones(x, 1, 2)], 1),
    "other rows in a stack": lambda x: torch.stack([x, x[:20]]),
    "other count": lambda x: torch.einsum("nf,nk->fk", x, ones(x, 51, 2)),
    "other mask": lambda x: x[x[:, 0] > 0] + x[x[:, 0] > 1],
}


def _squares(x):
    return x.square().sum()


def _parts_after_writes(x):
    """Parts of rows, of which torch has views, after each write to the rows."""
    x, found = x.detach().clone(), []
    parts = x[3], x[::2], x.diagonal(), x.unbind(0)[2], x[3][2:5], x[::3][:, 1].detach()
    writes = x.add_, lambda n: x[:5].mul_(n), x.detach().sub_
    for n, write in enumerate(writes, 2):
        write(n)
        x[:, 1].contiguous().zero_()  # a copy
        found += [[part * 1 for part in parts], parts[1].sum(0)]
    return found


def _by_a_plain_matrix(x):
    """The gradient of maxima, in torch's kernel, by a matrix that all ranks hold."""
    x = x.detach().requires_grad_()
    some = torch.arange(500, device=x.device).view(10, 50) % 7 < 2
    adj = some.to(x).to_sparse_csr()
    return torch.autograd.grad(torch.sparse.mm(adj, x, "amax").square().sum(), x)


TRANSFORMED = {
    "grad": lambda x: torch.func.grad(_squares)(x),
    "grad by another": lambda x: torch.func.grad(lambda w: (x @ w).sum())(ones(x, 7)),
    "vjp": lambda x: torch.func.vjp(_squares, x)[1](ones(x)),
    "jvp": lambda x: torch.func.jvp(_squares, (x,), (x,)),
    "jacrev": lambda x: torch.func.jacrev(_squares)(x),
    "jvp of a row": lambda x: torch.func.jvp(
        lambda x: x[3][1:3] * x[:, :2], (x,), (x,)
    ),
    "jvp beside constants": lambda x: torch.func.jvp(
        lambda w: (x / 2 * w + x - w * x.exp()).softmax(1), (x,), (x.cos(),)
    ),
    "jvp of norms": lambda x: torch.func.jvp(
        lambda w: F.batch_norm(F.layer_norm(w, (7,)) * x, None, None, training=True),
        (x,),
        (x.cos(),),
    ),
    "jacfwd": lambda x: torch.func.jacfwd(lambda w: (x @ w).tanh().sum(0))(ones(x, 7)),
    "hessian": lambda x: torch.func.hessian(
        lambda w: F.cross_entropy(x @ w, (x[:, 0] > 0).long())
    )(ones(x, 7, 2)),
    "vmap": lambda x: torch.vmap(_squares)(x),
    "vmap of another": lambda x: torch.vmap(lambda w: (x @ w).sum())(ones(x, 1, 7)),
    "layer": lambda x: torch.func.grad(
        lambda p: torch.func.functional_call(_linear(x), p, (x,)).sum()
    )(dict(_linear(x).named_parameters())),
}


def _linear(x):
    return torch.nn.Linear(7, 2, dtype=x.dtype, device=x.device)


def _as_torch(x, f):
    """What a function returns, or the error that it raises."""
    torch.manual_seed(1)
    try:
        return f(x)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return error


@tiers.parametrize("size", [1, 2, 3], [3])
@worlds.on()
def test_what_needs_all_rows_is_that_of_one_process(size):
    data, share = _share()
    for name, f in (AS_TORCH | TRANSFORMED).items():
        want, got = _as_torch(data.x, f), _as_torch(share.x, f)
        if isinstance(want, Exception):
            assert isinstance(got, Exception), name
            continue
        assert not isinstance(got, Exception), (name, got)
        alike.same(tree_leaves(got), tree_leaves(want), name)
    for x in (share.x, data.x):
        with pytest.raises(RuntimeError, match="number of dimensions"):
            torch.cat([x[:, 0], ones(x, 2, 7)])


@ranks
@worlds.on()
def test_a_selection_stays_where_it_is(size):
    """Rows of distinct ids stay where they are, forward and backward."""
    data, share = _share()
    idx = torch.tensor([7, 3, -1, 21, 4], device=data.x.device)
    x, w = share.x.detach().requires_grad_(), data.x.clone().requires_grad_()
    mesh = x.rows.mesh
    first, want = x[idx], w[idx]
    assert len(first.to_local()) == int(torch.isin(idx % 50, x.rows.gid).sum())
    mesh.ledger.reset()
    again = x[idx.int()] if mesh.size == 1 else x[idx]
    (first * again * data.x[idx]).sum().backward()
    sent = {op for op, _ in mesh.ledger.entries}
    assert sent <= {"all_reduce", "plan"}, sent  # of the sum, and a comparison
    (want * want * data.x[idx]).sum().backward()
    alike.same([first, x.grad], [want, w.grad])
    y = share.x[idx] + share.x[idx.flip(0)]  # of other owners
    alike.same(y, data.x[idx] + data.x[idx.flip(0)])
    twice = torch.cat([idx, idx[:2]])
    assert len(share.x[twice].to_local()) <= -(-len(twice) // mesh.size)


@ranks
@worlds.on()
def test_masks_cost_nothing_and_full_tensors_are_in_order(size):
    data, share = _share("empty_rank")
    names = ("x", "edge_index", "edge_attr")
    alike.same([share[n] for n in names], [data[n] for n in names], rtol=0, atol=0)
    hits = [(d.x.argmax(-1) == d.y)[d.train_mask].float().mean() for d in (share, data)]
    alike.same(*hits)
    nothing = share.x[torch.zeros(50, dtype=torch.bool)]
    assert float(torch.cat([nothing[:, 0], nothing[:, 1], torch.ones(3)]).sum()) == 3.0
    assert torch.isnan(nothing.mean())
    written = []
    for d in (share, data):
        written.append(d.x.clone())
        written[-1][d.train_mask] = 0.0
        written[-1][:, 1] = 5.0
    alike.same(*written, rtol=0, atol=0)
    ledger = share.x.rows.mesh.ledger
    ledger.reset()
    repr(share.x), repr(share), share.x.shape, share.x.numel()
    share.x[share.train_mask]
    assert ledger.words() == 0


@ranks
@worlds.on()
def test_a_share_is_a_data(size):
    data, share = _share()
    assert f"x=[{share.num_nodes}, 7]" in str(share)
    assert isinstance(share.to("cpu").edge_index, pdc.DistEdgeIndex)
    for twin in (copy.deepcopy(share), share.clone()):
        alike.same(twin.x, data.x)
        alike.same(twin.edge_index.matmul(twin.x), share.edge_index.matmul(share.x))
    for part, there in ((share.x, data.x), (share.edge_index, data.edge_index)):
        buffer = io.BytesIO()
        if share.x.rows.mesh.size > 1:
            with pytest.raises(TypeError, match=r"save t.full_tensor\(\), which all"):
                torch.save(part, buffer)
            continue
        torch.save({"it": part}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)["it"]
        assert type(loaded) is torch.Tensor
        assert torch.equal(loaded, there)
    alike.same(share.edge_index.flip(1), data.edge_index.flip(1))
    with pytest.raises(TypeError, match="live connections"):
        torch.save(share.x.rows.mesh, io.BytesIO())
    learnt = []
    for x in (share.x, data.x):
        table = torch.nn.Parameter(x.clone())
        assert isinstance(table, type(x))
        table.square().mean().backward()
        torch.optim.Adam([table], lr=0.1).step()
        learnt.append([table, table.grad])
    alike.same(*learnt)


@ranks
@worlds.on()
def test_noise_is_that_of_one_process(size):
    """Draws of every kind are those of one process, and leave its generator behind."""
    data, share = _share()
    draws = [
        lambda x: torch.randn_like(x[:, 0] > 0, dtype=x.dtype),
        torch.randn_like,
        torch.rand_like,
        lambda x: torch.randn_like(x[:, :1]).float(),
        lambda x: torch.randint_like(x, 7),
        lambda x: torch.zeros_like(x).normal_(1, 2),
        lambda x: torch.zeros_like(x).uniform_(-1, 1),
        lambda x: torch.zeros_like(x).exponential_(),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: torch.zeros_like(x).float().bernoulli_(x[:, :1].sigmoid()),
        lambda x: torch.zeros_like(x).bernoulli_(weights(x, 7).abs()),
    ]
    ledger = share.x.rows.mesh.ledger
    ledger.reset()
    for draw in draws:
        torch.manual_seed(3)
        want = draw(data.x.to(share.x.device)), torch.rand(3)
        torch.manual_seed(3)
        got = draw(share.x), torch.rand(3)
        assert "gather bern" not in ledger.table()
        alike.same(got, want, rtol=0, atol=0)
    assert torch.randn_like(share.x, requires_grad=True).requires_grad
    # masks are drawn by key: entries are kept, or those of SELU at minus infinity
    low, p = -1.7580993408473766, 0.4
    got = F.alpha_dropout(share.x, p, True).full_tensor().cpu()
    scale = ((1 - p) * (1 + p * low**2)) ** -0.5
    kept, dropped = (
        scale * (v - p * low) for v in (data.x, torch.full_like(data.x, low))
    )
    lost = torch.isclose(got, dropped)
    torch.testing.assert_close(got, torch.where(lost, dropped, kept))
    assert 0.2 < lost.double().mean() < 0.6


@ranks
@worlds.on()
def test_gradients_by_hand(size):
    data, share = _share()
    found = []
    for x in (share.x, data.x):
        x = x.detach().clone().requires_grad_()
        h = x.tanh()
        h.retain_grad()
        out = h.square().mean()
        slopes = torch.autograd.grad(out, [x, h], retain_graph=True)
        out.backward()
        leaf = torch.zeros_like(x, requires_grad=True)
        leaf.sum().backward()
        found.append([slopes, [g.norm() for g in slopes], h.grad, leaf.grad])
        tied = x.detach().round().requires_grad_()
        for extreme in (torch.amax, torch.amin):
            for dims in ((0,), (0, 1)):
                most = extreme(tied, dims)
                (slope,) = torch.autograd.grad(most.sum(), tied)
                assert int((slope != 0).sum()) > most.numel()  # some are shared
                found[-1] += [most, slope]
    alike.same(*found)
    with torch.inference_mode():
        positive = share.x[share.y == 1]
    alike.same(positive, data.x[data.y == 1])
    other = data.clone()
    other.x = data.x.clone().requires_grad_()
    assert not pdc.partition(other, share.x.rows.mesh, "random").x.requires_grad
    with pytest.raises(NotImplementedError, match="Long"):  # as torch says
        torch.rand_like(share.y)
    (other.x * data.x).square().mean().backward()
    gid = share.x.rows.gid
    mine = data.x[gid].to(share.x.device).requires_grad_()
    (pdc.from_local(mine, like=share.x) * share.x).square().mean().backward()
    alike.same(mine.grad, other.x.grad[gid])
