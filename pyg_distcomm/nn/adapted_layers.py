"""Distributes PyG's layers whose code does not run unchanged, such as normalisations.

They compute what PyG's do, from the same parameters; on ordinary inputs they are PyG's.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, degree, remove_self_loops

from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.nn.halo_conv import HaloConv, HaloExecution, shard_inputs
from pyg_distcomm.nn.index_guard import GuardedEdgeIndex
from pyg_distcomm.tensor.row_sharded import RowShardedTensor

Norm = TypeVar("Norm", bound=torch.nn.Module)


class DistBatchNorm(torch.nn.BatchNorm1d):
    """Batch norm with mean and variance over the nodes of all ranks.

        y = (x - mean) / sqrt(var + eps) * weight + bias

    Takes the arguments of `torch.nn.BatchNorm1d`, and is it for an ordinary tensor
    (SyncBatchNorm refuses CPU tensors). Ranks with one row or none are fine.

    Shapes: x `[n_i, C]` DistTensor -> `[n_i, C]`.
    Price: two all-reduces of C words forward and two backward.
    """

    # forward is torch's: F.batch_norm of a DistTensor is global

    @classmethod
    def of(cls, norm: torch.nn.BatchNorm1d) -> DistBatchNorm:
        """Returns the distributed form of a batch norm, sharing its parameters."""
        return _copy_norm(cls, norm)


class InstanceNorm(pyg.InstanceNorm):
    """PyG's InstanceNorm for one graph, with statistics over the nodes of all ranks.

    Takes PyG's arguments, and is PyG's for an ordinary tensor or a `batch` vector.

    Shapes: x `[n, C]`, row-sharded -> `[n, C]`. Price: that of batch norm.
    """

    def forward(self, x: Tensor, batch: Any = None, batch_size: Any = None) -> Tensor:
        """Runs the layer."""
        if not isinstance(x, RowShardedTensor) or batch is not None:
            return super().forward(x, batch, batch_size)
        by_input = self.training or not self.track_running_stats
        kept = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(x, *kept, by_input, self.momentum or 0.0, self.eps)

    @classmethod
    def of(cls, norm: pyg.InstanceNorm) -> InstanceNorm:
        """Returns the distributed form of an instance norm, sharing its parameters."""
        return _copy_norm(cls, norm)


def _copy_norm(kind: type[Norm], norm: torch.nn.Module) -> Norm:
    out = kind.__new__(kind)
    vars(out).update(vars(norm))
    return out


class DistARMAConv(HaloExecution, pyg.ARMAConv):
    """PyG's ARMAConv, its stacks side by side: `[n_i, K, F]` for `[K, n, F]`.

    Shapes: x `[n_i, F_in]` -> `[n_i, F_out]`. Price: `halo.price(K F_out)` a layer.
    """

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Any = None) -> Tensor:
        """Runs the layer."""
        if not isinstance(edge_index, GuardedEdgeIndex):
            return super().forward(x, edge_index, edge_weight)
        edge_index, edge_weight = gcn_norm(
            edge_index,
            edge_weight,
            x.size(0),
            add_self_loops=False,
            flow=self.flow,
            dtype=x.dtype,
        )
        out = x
        for t in range(self.num_layers):
            at = 0 if self.shared_weights else t
            before = 0 if self.shared_weights else t - 1
            out = _multiply_stacks(out, self.weight[before] if t else self.init_weight)
            shape = out.size()
            out = self.propagate(edge_index, x=out.flatten(1), edge_weight=edge_weight)
            root = F.dropout(x, p=self.dropout, training=self.training)
            out = out.view(shape) + _multiply_stacks(root, self.root_weight[at])
            if self.bias is not None:
                out = out + self.bias[at].squeeze(1)
            if self.act is not None:
                out = self.act(out)
        return out.mean(dim=1)


def _multiply_stacks(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x_nk W_k, `[n, K, G]`, of `[n, K, F]` or `[n, F]`, and `[K, F, G]`."""
    rows = "nf" if x.dim() == 2 else "nkf"
    return torch.einsum(f"{rows},kfg->nkg", x, weight)


class DistFastRGCNConv(HaloExecution, pyg.FastRGCNConv):
    """PyG's FastRGCNConv; nodes without features look up their weights by global id."""

    def message(self, x_j: Tensor, edge_type: Tensor, edge_index_j: Tensor) -> Tensor:
        """Returns a message for each edge."""
        # without features, x_j is the sources' ids
        ids = edge_index_j if x_j.is_floating_point() else x_j
        return super().message(x_j, edge_type, ids)


class DistSuperGATConv(HaloExecution, pyg.SuperGATConv):
    """PyG's SuperGATConv, with its self-supervised loss on negative edges in training.

    Price: that of a layer by halo exchange; in training also the rows at both ends of the
    edges that are sampled, and a byte for each that is drawn, where edges are looked up.
    """

    def __call__(
        self, x: Any, edge_index: Any, neg_edge_index: Any = None, batch: Any = None
    ) -> Tensor:
        """Runs the layer."""
        (x, edge_index), _ = shard_inputs((x, edge_index), {}, self)
        spread = isinstance(edge_index, DistEdgeIndex)
        if not spread or not self.training or torch.is_inference_mode_enabled():
            return super().__call__(x, edge_index, neg_edge_index, batch)
        out = super().__call__(x, edge_index)
        h, edge_index = self._prepare(x, edge_index)
        positive = self.positive_sampling(edge_index)
        if neg_edge_index is None:
            neg_edge_index = self.negative_sampling(edge_index, x.size(0), batch)
        found = [self._logits(h, edges) for edges in (positive, neg_edge_index)]
        self.att_x = torch.cat(found, dim=0)
        self.att_y = torch.cat(
            [torch.ones_like(found[0][:, 0]), torch.zeros_like(found[1][:, 0])]
        )
        return out

    def _prepare(self, x: Tensor, edge_index: Any) -> tuple[Tensor, Any]:
        if self.add_self_loops:
            edge_index, _ = remove_self_loops(edge_index)
            edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.lin(x).view(-1, self.heads, self.out_channels), edge_index

    def _logits(self, h: Tensor, edges: Any) -> Tensor:
        return self.get_attention(
            edges[1], h[edges[1]], h[edges[0]], num_nodes=h.size(0), return_logits=True
        )

    def forward(
        self, x: Tensor, edge_index: Any, neg_edge_index: Any = None, batch: Any = None
    ) -> Tensor:
        """Runs the layer; distributed inputs without the self-supervised loss."""
        if not isinstance(edge_index, GuardedEdgeIndex):
            return super().forward(x, edge_index, neg_edge_index, batch)
        h, edge_index = self._prepare(x, edge_index)
        out = self.propagate(edge_index, x=h)
        out = out.flatten(1) if self.concat else out.mean(dim=1)
        return out if self.bias is None else out + self.bias


class DistSignedConv(HaloExecution, pyg.SignedConv):
    r"""PyG's SignedConv, whose positive and negative edges may be two graphs on the same nodes.

    It multiplies each graph with x once, where PyG takes half of x at a time:
    :math:`[W_+ [M_+ x_+, M_- x_-] + W'_+ x_+, W_- [M_+ x_-, M_- x_+] + W'_- x_-]` of
    :math:`x = [x_+, x_-]`, or :math:`[W_+ M_+ x + W'_+ x, W_- M_- x + W'_- x]` if first.

    Shapes: x `[n_i, F_in]` or `[n_i, 2 F_in]` -> `[n_i, 2 F_out]`. Price: the halo of each
    graph, as wide as x.
    """

    def __call__(self, x: Any, pos_edge_index: Any, neg_edge_index: Any) -> Tensor:
        """Runs the layer."""
        given, _ = shard_inputs((x, pos_edge_index, neg_edge_index), {}, self)
        x, *graphs = given
        spread = all(isinstance(edges, DistEdgeIndex) for edges in graphs)
        if not spread or graphs[0].topology is graphs[1].topology:
            return super().__call__(x, *graphs)
        graphs = [g if g.of_torch else g.carrying(None) for g in graphs]
        friends, foes = (
            conv(x, edges) for conv, edges in zip(self._means(), graphs, strict=True)
        )
        own = other = x[1] if isinstance(x, (tuple, list)) else x
        if not self.first_aggr:
            at = self.in_channels
            own, other = own[..., :at], own[..., at:]
            friends, foes = (
                torch.cat([friends[..., :at], foes[..., at:]], dim=-1),
                torch.cat([friends[..., at:], foes[..., :at]], dim=-1),
            )
        friends = self.lin_pos_l(friends) + self.lin_pos_r(own)
        foes = self.lin_neg_l(foes) + self.lin_neg_r(other)
        return torch.cat([friends, foes], dim=-1)

    def _means(self) -> list[HaloConv]:
        """Returns the layers that aggregate over each graph, made once: links have state."""
        if "_kept_means" not in vars(self):
            aggr = self.aggr_module if self.aggr is None else self.aggr
            self._kept_means = [
                HaloConv(pyg.SimpleConv(aggr, flow=self.flow), self.link)
                for _ in range(2)
            ]
        return self._kept_means


class DistLabelPropagation(HaloExecution, pyg.LabelPropagation):
    """PyG's LabelPropagation; its mask may be a mask of all nodes, or ids."""

    def __call__(
        self,
        y: Any,
        edge_index: Any,
        mask: Any = None,
        edge_weight: Any = None,
        post_step: Any = None,
    ) -> Tensor:
        """Runs the propagation."""
        (y, edge_index), _ = shard_inputs((y, edge_index), {}, self)
        if isinstance(edge_index, DistEdgeIndex):
            carried = None if edge_weight is not None else edge_index.weight
            if carried is not None and not bool((carried == 1).all()):
                raise TypeError(
                    "give LabelPropagation its edge_weight: PyG normalises weights that "
                    "an adjacency carries, or not, by the kind of that"
                )
            if y.dtype == torch.long and y.size(0) == y.numel():
                y = F.one_hot(y.view(-1)).to(torch.get_default_dtype())
            if mask is not None:
                known = torch.zeros_like(y)
                known[mask] = y[mask]
                y, mask = known, None
            if carried is not None:
                edge_index = edge_index.carrying(None)
        return super().__call__(y, edge_index, mask, edge_weight, post_step)


class DistGroupAddRev(pyg.GroupAddRev):
    """PyG's GroupAddRev, which keeps row-sharded activations instead of inverting them.

    PyG's frees the storage of its inputs, and computes them again in the backward pass.
    Those of row-sharded tensors may be in use by an exchange.

    Shapes: x `[n_i, F]` -> `[n_i, F]`. Price: that of its layers.
    """

    def _fn_apply(self, args: Any, fn: Any, fn_inverse: Any) -> Any:
        if not any(isinstance(x, RowShardedTensor) for x in args):
            return super()._fn_apply(args, fn, fn_inverse)
        out = fn(*args)
        return out[0] if isinstance(out, tuple) and len(out) == 1 else out


class DistMFConv(HaloExecution, pyg.MFConv):
    """PyG's MFConv, which applies a weight matrix per in-degree.

    Shapes: x `[n_i, F_in]` -> `[n_i, F_out]`. Price: `halo.price(F_in)`.
    """

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """Runs the layer."""
        if not isinstance(edge_index, GuardedEdgeIndex):
            return super().forward(x, edge_index, size)
        pair = (x, x) if isinstance(x, Tensor) else x
        h = self.propagate(edge_index, x=pair, size=size)
        end = 1 if self.flow == "source_to_target" else 0
        count = degree(edge_index[end], h.size(0), dtype=torch.long)
        count = count.clamp(max=self.max_degree)
        out = torch.zeros_like(h[:, :1]).repeat(1, self.out_channels)
        for k, (lin_l, lin_r) in enumerate(zip(self.lins_l, self.lins_r, strict=True)):
            mask = count == k
            rows = lin_l(h[mask])
            out[mask] = rows if pair[1] is None else rows + lin_r(pair[1][mask])
        return out


class DistLPFormer(pyg.LPFormer):
    """PyG's LPFormer; every rank scores the same pairs of nodes.

    Shapes: batch `[2, k]`, x `[n_i, F]`, edge_index `[2, e_i]`, ppr_matrix `[n, n]` -> `[k]`,
    the same on all ranks. Price: that of its layers; then the rows of all nodes and both ends
    of all edges, to all ranks.
    """

    def forward(
        self, batch: Tensor, x: Tensor, edge_index: Any, ppr_matrix: Tensor
    ) -> Tensor:
        """Scores pairs of nodes."""
        if not isinstance(edge_index, DistEdgeIndex):
            return super().forward(batch, x, edge_index, ppr_matrix)
        rows = super().propagate(x, edge_index).unsqueeze(0)[0]
        edges = edge_index.full_tensor()
        return super().forward(batch, _Propagated(rows), edges, ppr_matrix)  # type: ignore[arg-type]

    def propagate(self, x: Tensor, adj: Any) -> Tensor:
        """Runs the layers, unless it is given their output."""
        return x.rows if isinstance(x, _Propagated) else super().propagate(x, adj)


class _Propagated:
    """Holds all rows of the output of an LPFormer's layers."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.device = rows, rows.device


REWRITTEN: dict[type, type] = {
    pyg.ARMAConv: DistARMAConv,
    pyg.FastRGCNConv: DistFastRGCNConv,
    pyg.GroupAddRev: DistGroupAddRev,
    pyg.LabelPropagation: DistLabelPropagation,
    pyg.LPFormer: DistLPFormer,
    pyg.MFConv: DistMFConv,
    pyg.SignedConv: DistSignedConv,
    pyg.SuperGATConv: DistSuperGATConv,
}
