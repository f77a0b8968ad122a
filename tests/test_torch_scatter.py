"""torch_scatter's functions over rows of all ranks, and within layers of a user's own.

Where torch_scatter is not installed its operators are stood in for, by their definition.
"""

import contextlib

import alike
import tiers
import torch
import worlds
from problems import owners
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

import pyg_distcomm as pdc

NODES, WIDE, GROUPS = 13, 4, 6
_LIBRARY = torch.library.Library("torch_scatter", "FRAGMENT")


def _extreme(largest):
    """Returns the operator that goes through rows in turn, as torch_scatter does."""

    def run(src, index, dim=-1, out=None, dim_size=None):
        src = src.movedim(dim, 0)
        if index.dim() == 1:
            index = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
        else:
            index = index.movedim(dim, 0)
        size = dim_size if out is None else out.size(dim)
        size = int(index.max()) + 1 if size is None else size
        worst = torch.finfo(src.dtype).min if largest else torch.finfo(src.dtype).max
        best = torch.full((size, *src.shape[1:]), worst, dtype=src.dtype)
        if out is not None:
            best = out.movedim(dim, 0).clone()
        place = torch.full(best.shape, len(src))
        for k, (value, at) in enumerate(zip(src.detach(), index, strict=True)):
            value, at = value[None], at[None]
            old, last = best.gather(0, at), place.gather(0, at)
            wins = value > old if largest else value < old
            best.scatter_(0, at, value.where(wins, old))
            place.scatter_(0, at, last.masked_fill(wins, k))
        rest = torch.zeros_like(best) if out is None else best
        padded = torch.cat([src, src.new_zeros(1, *src.shape[1:])])
        found = torch.where(place < len(src), padded.gather(0, place), rest)
        return found.movedim(0, dim), place.movedim(0, dim)

    return run


def _product(src, index, dim=-1, out=None, dim_size=None):
    index = index.view(-1, 1).expand_as(src) if index.dim() == 1 else index
    size = int(index.max()) + 1 if dim_size is None else dim_size
    return src.new_ones(size, src.size(1)).scatter_reduce(0, index, src, "prod")


def _mean_coo(src, index, out=None, dim_size=None):
    sums = src.new_zeros(dim_size, src.size(1)).index_add(0, index, src)
    return sums / torch.bincount(index, minlength=dim_size).clamp(min=1).view(-1, 1)


def _sum_csr(src, indptr, out=None):
    pairs = zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)
    return torch.stack([src[low:high].sum(0) for low, high in pairs])


with contextlib.suppress(ImportError):
    import torch_scatter  # noqa: F401
if not hasattr(torch.ops.torch_scatter, "scatter_max"):
    ends = "Tensor src, Tensor index, int dim, Tensor? out, int? dim_size"
    _LIBRARY.define(f"scatter_max({ends}) -> (Tensor, Tensor)")
    _LIBRARY.define(f"scatter_min({ends}) -> (Tensor, Tensor)")
    _LIBRARY.define(f"scatter_mul({ends}) -> Tensor")
    ends = "Tensor src, Tensor index, Tensor? out, int? dim_size"
    _LIBRARY.define(f"segment_mean_coo({ends}) -> Tensor")
    _LIBRARY.define("segment_sum_csr(Tensor src, Tensor indptr, Tensor? out) -> Tensor")
    for name, run in {
        "scatter_max": _extreme(True),
        "scatter_min": _extreme(False),
        "scatter_mul": _product,
        "segment_mean_coo": _mean_coo,
        "segment_sum_csr": _sum_csr,
    }.items():
        _LIBRARY.impl(name, run, "CompositeImplicitAutograd")

OPS = torch.ops.torch_scatter
POINTERS = torch.tensor([0, 3, 3, 11, 13])


def softmax(src, index, dim_size=None):
    """Computes as `torch_scatter.scatter_softmax` does."""
    index = index.view(-1, 1).expand_as(src)
    best = OPS.scatter_max(src, index, 0, None, dim_size)[0]
    value = (src - best.gather(0, index)).exp()
    size = dim_size or int(index.max()) + 1
    total = torch.zeros(size, src.size(1), dtype=src.dtype).scatter_add_(
        0, index, value
    )
    return value / total.gather(0, index)


def beyond(x, batch):
    out = torch.linspace(-1, 1, GROUPS * WIDE, dtype=x.dtype)
    out = out.view(GROUPS, WIDE).clone()
    return OPS.scatter_max(x, batch, 0, out, None)[0]


CASES = {
    "max": lambda x, batch: OPS.scatter_max(x, batch, 0, None, GROUPS)[0],
    "min": lambda x, batch: OPS.scatter_min(x, batch, 0, None, None)[0],
    "which": lambda x, batch: OPS.scatter_max(x, batch, 0, None, GROUPS)[1],
    "ties": lambda x, batch: OPS.scatter_max(x.round(), batch, 0, None, GROUPS)[1],
    "beyond": beyond,
    "mul": lambda x, batch: OPS.scatter_mul(x, batch, 0, None, GROUPS),
    "within": lambda x, batch: OPS.scatter_max(
        x, torch.tensor([0, 1, 0, 1]).expand(NODES, -1), 1, None, 2
    )[0],
    "not numbers": lambda x, batch: OPS.scatter_max(
        torch.where(batch.view(-1, 1) == 1, float("nan"), x), batch, 0, None, GROUPS
    )[0],
    "own width": lambda x, batch: OPS.scatter_min(
        x, torch.tensor([0, 1, 0, 1]).expand(NODES, -1), 1, None, None
    )[0],
    "softmax": softmax,
    "whole index": lambda x, batch: OPS.scatter_min(
        x, torch.arange(NODES) // 4, 0, None, None
    )[0],
    "whole values": lambda x, batch: (
        OPS.scatter_max(torch.arange(NODES).double(), batch, 0, None, GROUPS)[0]
        * x.sum()
    ),
    "coo": lambda x, batch: OPS.segment_mean_coo(x, batch, None, GROUPS),
    "csr": lambda x, batch: OPS.segment_sum_csr(x, POINTERS, None),
}


class Own(MessagePassing):
    """A layer that aggregates by torch_scatter, as layers of its time do."""

    def __init__(self, how):
        super().__init__(aggr=None)
        self.how = how
        self.lin = torch.nn.Linear(WIDE, WIDE).double()

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j, index, dim_size):
        if self.how == "softmax":
            return x_j * softmax(x_j, index, dim_size)
        return x_j

    def aggregate(self, inputs, index, dim_size):
        if self.how == "mul":
            return OPS.scatter_mul(inputs, index, 0, None, dim_size)
        if self.how == "softmax":
            index = index.view(-1, 1).expand_as(inputs)
            return torch.zeros(dim_size, WIDE, dtype=inputs.dtype).scatter_add_(
                0, index, inputs
            )
        return OPS.scatter_max(inputs, index, 0, None, dim_size)[0]


def data():
    generator = torch.Generator().manual_seed(0)
    return Data(
        x=torch.randn(NODES, WIDE, generator=generator, dtype=torch.float64),
        edge_index=torch.randint(NODES, (2, 30), generator=generator),
        batch=(torch.arange(NODES) // 3).where(torch.arange(NODES) < 9, 4),
    )


@tiers.parametrize("size", [2, 3], [2])
@worlds.on()
def test_all_ranks_reduce_as_one_process(size):
    plain = data()
    mesh = pdc.init()
    share = pdc.partition(plain, mesh, owners("empty_rank", plain, size))
    for name, case in CASES.items():
        x, ours = plain.x.clone().requires_grad_(), share.x.detach().requires_grad_()
        want, got = case(x, plain.batch), case(ours, share.batch)
        alike.same(got, want, name)
        if want.is_floating_point():
            want.sin().sum().backward()
            got.sin().sum().backward()
            alike.same(ours.grad, x.grad, name)
    for how in ("max", "mul", "softmax"):
        torch.manual_seed(1)
        layer = Own(how)
        converted = pdc.convert(layer)
        want = alike.learnt(layer, plain.x, plain.edge_index)
        alike.same(alike.learnt(converted, share.x, share.edge_index), want, how)
    mesh.close()
