"""PyG's message passing layers under their own names, distributed when given a graph's share.

Each is PyG's class with `HaloExecution` before it: the same constructor, parameters and
results; see there for shapes, price and errors. GCNConv, SAGEConv and GCN2Conv are the
layers that multiply on any grid. `convert` makes the layers of a model distributed.

`HeteroConv` and `to_hetero` need no special code: each relation has its own layer, which is
converted like any other. HGT and HAN mix relations within a layer: HGT joins the rows of all
types to one tensor, which would be gathered. So they run on own rows and ghosts of each
relation here. On ordinary inputs they run PyG's code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.inspector import Inspector
from torch_geometric.nn.conv.han_conv import group
from torch_geometric.utils import scatter, softmax

from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import LocalGraph
from pyg_distcomm.halo.exchange import LayerExchange
from pyg_distcomm.halo.halo import NAMES
from pyg_distcomm.nn import trimming
from pyg_distcomm.nn.halo_conv import HaloConv, HaloExecution
from pyg_distcomm.nn.layer_context import (
    LayerContext,
    OwnLink,
    check_link,
    check_placement,
    is_spread,
    warn_about_grid,
)
from pyg_distcomm.nn.product_layers import DistGCN2Conv, DistGCNConv, DistSAGEConv
from pyg_distcomm.nn.replicate import check_module
from pyg_distcomm.sharded.agreement import compare_weights
from pyg_distcomm.sharded.dist_tensor import DistTensor, Placed
from pyg_distcomm.sharded.edges import DistEdgeIndex
from pyg_distcomm.sharded.partial import entered


def _is_distributed(edge_index_dict: Any) -> bool:
    """Tells whether the edges are those of a partition."""
    kinds = {isinstance(e, DistEdgeIndex) for e in edge_index_dict.values()}
    if kinds == {True, False}:
        raise TypeError(
            "some edge types are spread over ranks and others are not: take all of them "
            "from one pdc.partition"
        )
    return kinds == {True}


def _check_rows(layer: Any, x_dict: Any, edge_index_dict: Any) -> dict[str, Any]:
    """Returns the rows of each node type; raises unless they, and weights, fit the edges."""
    for edges in edge_index_dict.values():
        check_placement(layer, edges.topology)
    if not isinstance(x_dict, Mapping):
        raise TypeError(
            "give the layer a dictionary of rows by node type, as data.x_dict; got a "
            f"{type(x_dict).__name__}"
        )
    found = dict(x_dict)
    for (source, _, target), edges in edge_index_dict.items():
        for key, nodes in ((source, edges.sources), (target, edges.nodes)):
            if key not in found:
                raise ValueError(
                    f"x_dict has rows of {sorted(found)}, and edges are of {key!r} too; give "
                    "its rows (pdc.DistEmbedding learns them), or leave these edges out"
                )
            name = f"x_dict[{key!r}]"
            found[key] = _as_nodes(found[key], name, nodes)
            edges.topology.placed(name, found[key])
    compare_weights(list(layer.parameters()), edges.nodes.mesh)
    return found


def _as_nodes(x: Any, name: str, nodes: Rows) -> DistTensor:
    """Returns the rows of some nodes, of which plain ones are sharded.

    Raises:
        TypeError, ValueError: for rows of other nodes, naming them.
    """
    if isinstance(x, Tensor) and x.dim() and x.size(0) == nodes.count:
        same = isinstance(x, DistTensor) and x.dim_ == 0 and x.rows is nodes
        return x if same else Placed.apply(x, (nodes, 0))  # type: ignore[return-value]
    kind = ValueError if isinstance(x, Tensor) else TypeError
    got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
    raise kind(
        f"{name} has one row for each node, as in the data of pdc.partition: wanted "
        f"{nodes.count} rows, got {got}"
    )


class _WithZeroGradients(torch.autograd.Function):
    """Returns x, with gradients of zeros for the other tensors.

    PyG's one propagate of all relations reaches what an output does not depend on, so that
    an optimizer decays those weights too; None would leave them as they are.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:  # type: ignore[override]
        ctx.shapes = [other.shape for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        zero = grad.new_zeros(())
        return grad, *(zero.expand(shape) for shape in ctx.shapes)


class _Relation:
    """The edges of one relation in a run of a layer, and how its rows travel."""

    def __init__(self, layer: Any, key: Any, edges: Any) -> None:
        mesh = edges.nodes.mesh
        name = type(layer).__name__
        if layer.flow != "source_to_target" or layer.aggr != "add":
            raise ValueError(
                f"{name} runs distributed with flow='source_to_target' and aggr='add', got "
                f"{layer.flow!r} and {layer.aggr!r}"
            )
        self.source, _, self.target = key
        self.edges, self.mesh = edges, mesh
        self.here: LocalGraph = edges.topology.locals
        warn_about_grid(layer, edges.topology, "it attends over all in-edges")
        context = LayerContext(layer, layer.link, edges)
        self.exchange: LayerExchange | None = context.exchange()

    def fetched(self, x: Tensor, number: int, exact: str = "") -> Tensor:
        """Returns own and ghost rows `[m + h, ...]` of own sources.

        Args:
            x: own rows `[m, ...]`.
            number: the number of the exchange in the call.
            exact: why they must be exact and prompt whatever the link; "" if they need not.
        """
        call, link = self.exchange, None
        if call is not None:
            call = call.as_exact(exact) if exact else call
            link = call.wrap(self.here.halo, len(NAMES) + number)
        return self.here.with_ghosts(x.contiguous(), link)


class DistHGTConv(HaloExecution, pyg.HGTConv):
    r"""Applies PyG's HGTConv [Hu20] to a HeteroData that is spread over ranks.

        alpha_e = softmax over the in-edges of i, of all relations r:
                  (q_i . K_r k_j) p_r / sqrt(D),     z_i = sum_e alpha_e V_r v_j

    Takes the arguments of `torch_geometric.nn.HGTConv`, and has its `state_dict`.

    Shapes (this rank; types t): x_dict[t] `[n_t, F_t]` DistTensor, edge_index_dict[r]
    `[2, e_r]` DistEdgeIndex -> [t] `[n_t, F_out]` DistTensor.
    Price, of each relation: `halo.price(min(F_t, 2 F_out))`, and its transpose backward:
    features of ghosts travel, or keys and values where these are narrower; features that
    do not change travel twice, and are kept from their second use on. Over a link
    keys are exact, as attention is made from them, and values are coded; features, where
    F_t <= F_out, are fewer words than exact keys, and exact.
    """

    links_relations = True

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        """Runs the layer."""
        if not _is_distributed(edge_index_dict):
            return super().forward(x_dict, edge_index_dict)
        return self._distributed_forward(x_dict, edge_index_dict)

    def _distributed_forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        x_dict = _check_rows(self, x_dict, edge_index_dict)
        mixed = {key: x.rows for key, x in x_dict.items() if key in self.dst_node_types}
        kqv = self.kqv_lin(x_dict)
        scores: dict[str, list[Tensor]] = {key: [] for key in mixed}
        values: dict[str, list[Tensor]] = {key: [] for key in mixed}
        targets: dict[str, list[Tensor]] = {key: [] for key in mixed}
        scales = {
            key: entered(self.p_rel["__".join(key)], edges.nodes.mesh)
            for key, edges in edge_index_dict.items()
        }
        for key, edges in edge_index_dict.items():
            relation = _Relation(self, key, edges)
            score, value = self._messages(key, relation, x_dict, kqv, scales[key])
            scores[relation.target].append(score)
            values[relation.target].append(value)
            targets[relation.target].append(relation.here.target_lid)
        out = {}
        for key, rows in mixed.items():
            if targets[key]:
                index = torch.cat(targets[key])
                alpha = softmax(torch.cat(scores[key]), index, num_nodes=len(rows))
                message = torch.cat(values[key]) * alpha.unsqueeze(-1)
                local = scatter(message, index, 0, len(rows), "sum").flatten(1)
            else:
                local = kqv[key].to_local().new_zeros(len(rows), self.out_channels)
            near = {key} | {source for source, _, target in scales if target == key}
            apart = [z.to_local() for source, z in kqv.items() if source not in near]
            apart += [scale for (*_, target), scale in scales.items() if target != key]
            local = _WithZeroGradients.apply(
                local, *(z for z in apart if z.requires_grad)
            )
            out[key] = DistTensor.from_local(local, rows)
        found = self.out_lin({key: F.gelu(z) for key, z in out.items()})
        for key, z in found.items():
            if z.size(-1) == x_dict[key].size(-1):
                share = self.skip[key].sigmoid()
                z = share * z + (1 - share) * x_dict[key]
            out[key] = z
        return out

    def _messages(
        self, key: Any, relation: _Relation, x_dict: Any, kqv: Any, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the score `[e, H]` and the value `[e, H, D]` of each edge."""
        heads, width = self.heads, self.out_channels
        depth, mesh = width // heads, relation.mesh
        lin, x = self.kqv_lin.lins[relation.source], x_dict[relation.source]
        own = kqv[relation.source].to_local()
        coded = relation.exchange is not None
        if coded and x.size(-1) > width:
            k = relation.fetched(own[:, :width], 0, "attention depends on it")
            v = relation.fetched(own[:, 2 * width :], 1)
        elif x.size(-1) > 2 * width:
            narrow = torch.cat([own[:, :width], own[:, 2 * width :]], 1)
            k, v = relation.fetched(narrow, 0).split(width, 1)
        else:
            local, rows = x.to_local(), None
            if not coded:
                rows = relation.edges.topology.constant_rows(x)
            if rows is None:
                rows = relation.fetched(local, 0, "attention depends on it")
            ghosts = rows[len(local) :]
            ghosts = F.linear(
                ghosts, *(entered(p, mesh) for p in (lin.weight, lin.bias))
            )
            k = torch.cat([own[:, :width], ghosts[:, :width]])
            v = torch.cat([own[:, 2 * width :], ghosts[:, 2 * width :]])
        types, number = len(self.edge_types), self.edge_types_map[key]
        chosen = torch.arange(heads, device=k.device) * types + number
        k, v = (
            torch.einsum(
                "nhd,hdc->nhc", z.view(-1, heads, depth), entered(w, mesh)[chosen]
            )
            for z, w in ((k, self.k_rel.weight), (v, self.v_rel.weight))
        )
        q = kqv[relation.target].to_local()[:, width : 2 * width]
        here = relation.here
        q = q.reshape(-1, heads, depth).index_select(0, here.target_lid)
        score = (q * k.index_select(0, here.source_lid)).sum(-1) * scale
        return score / math.sqrt(depth), v.index_select(0, here.source_lid)


class DistHANConv(HaloExecution, pyg.HANConv):
    r"""Applies PyG's HANConv [Wang19] to a HeteroData that is spread over ranks.

    Attention over the in-edges of each relation, and over relations by their mean scores
    of all nodes, which the ranks sum. Takes the arguments of `torch_geometric.nn.HANConv`,
    and has its `state_dict`.

    Shapes (this rank; types t): x_dict[t] `[n_t, F_t]` DistTensor, edge_index_dict[r]
    `[2, e_r]` DistEdgeIndex -> [t] `[n_t, F_out]` DistTensor, or None for a type without
    in-edges.
    Price: of each relation `halo.price(F_out)` and its transpose backward, and over a
    link H words more, for exact attention; of each type an all-reduce of F_out words a
    relation.
    """

    links_relations = True

    def forward(
        self,
        x_dict: Any,
        edge_index_dict: Any,
        return_semantic_attention_weights: bool = False,
    ) -> Any:
        """Runs the layer."""
        wanted = return_semantic_attention_weights
        if not _is_distributed(edge_index_dict):
            return super().forward(x_dict, edge_index_dict, wanted)
        out, attention = self._distributed_forward(x_dict, edge_index_dict)
        return (out, attention) if wanted else out

    def _distributed_forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        x_dict = _check_rows(self, x_dict, edge_index_dict)
        projected = {key: self.proj[key](x) for key, x in x_dict.items()}
        found: dict[str, list[Any]] = {key: [] for key in x_dict}
        for key, edges in edge_index_dict.items():
            relation = _Relation(self, key, edges)
            local = self._attend(key, relation, projected)
            out = DistTensor.from_local(local, projected[relation.target].rows)
            found[relation.target].append(out.relu())
        attention: dict[str, Any] = {}
        for key, outs in found.items():
            found[key], attention[key] = group(outs, self.q, self.k_lin)
        return found, attention

    def _attend(self, key: Any, relation: _Relation, projected: Any) -> Tensor:
        """Returns the attention-weighted sums of one relation `[n, F_out]`."""
        here, mesh = relation.here, relation.mesh
        shape = -1, self.heads, self.out_channels // self.heads
        name = "__".join(key)
        weight, own_weight = (
            entered(part[name], mesh) for part in (self.lin_src, self.lin_dst)
        )
        x = projected[relation.source].to_local()
        own = projected[relation.target].to_local()
        rows = relation.fetched(x, 0)
        shaped = rows.view(shape)
        if relation.exchange is None:
            alpha = (shaped * weight).sum(-1)
        else:
            alpha = (x.view(shape) * weight).sum(-1)
            alpha = relation.fetched(alpha, 1, "attention depends on it")
        near = (own.view(shape) * own_weight).sum(-1)
        score = alpha.index_select(0, here.source_lid)
        score = score + near.index_select(0, here.target_lid)
        score = F.leaky_relu(score, self.negative_slope)
        score = softmax(score, here.target_lid, num_nodes=here.num_own)
        # dropped by their edges
        score = DistTensor.from_local(score, relation.edges.edges)
        kept: Any = F.dropout(score, self.dropout, self.training)
        kept = kept.to_local().unsqueeze(-1)
        message = shaped.index_select(0, here.source_lid) * kept
        return scatter(message, here.target_lid, 0, here.num_own, "sum").flatten(1)


class DistGroupAddRev(pyg.GroupAddRev):
    """Runs PyG's GroupAddRev, but keeps inputs that are row-sharded, or that NumPy has seen.

    PyG's frees the storage of its inputs, and computes them again in the backward pass. Rows
    of a share may be in use by an exchange, and what NumPy saw, as in a kernel, has to stay.

    Shapes: x `[n_i, F]` -> `[n_i, F]`. Price: that of its layers.
    """

    def _fn_apply(self, args: Any, fn: Any, fn_inverse: Any) -> Any:
        if not is_spread(*args) and args[0].untyped_storage().resizable():
            return super()._fn_apply(args, fn, fn_inverse)
        return fn(*args)

    def _inverse(self, y: Any, *args: Any) -> Any:
        return super()._inverse(y.clone(), *args)  # layers read it before it is freed


class _Inspector(Inspector):
    """Finds the arguments of PyG's steps in the source of its classes, past those made here."""

    def get_source(self, cls: type | None = None) -> str:
        """Returns the source code of a class; a class made here has none."""
        made = cls is not None and _MadeLayer in cls.__bases__
        return "" if made else super().get_source(cls)


class _MadeLayer(HaloExecution):
    """Reads the source of PyG's class where PyG would read that of a class made here."""

    @property
    def inspector(self) -> Inspector:
        """What PyG has found of the steps of the layer."""
        return vars(self)["inspector"]  # type: ignore[no-any-return]

    @inspector.setter
    def inspector(self, found: Inspector) -> None:
        found.__class__ = _Inspector
        vars(self)["inspector"] = found


GCN2Conv, GCNConv, SAGEConv = DistGCN2Conv, DistGCNConv, DistSAGEConv
DISTRIBUTED: dict[type, type]  # by PyG's class

if not TYPE_CHECKING:  # type checkers know the classes above, and the rest as Any
    # A class of each layer, under its own name and under PyG's: those above, and one made of
    # every other. Its name differs, since PyG keeps the source of classes by their names.
    __all__ = [
        name
        for name, kind in vars(pyg).items()
        if isinstance(kind, type)
        and issubclass(kind, (pyg.MessagePassing, pyg.GroupAddRev))
    ]
    for _name in __all__:
        _ours = f"Dist{_name}"
        if _ours not in globals():
            _bases = _MadeLayer, getattr(pyg, _name)
            globals()[_ours] = type(_ours, _bases, {"__module__": __name__})
        globals()[_name] = globals()[_ours]
    DISTRIBUTED = {getattr(pyg, name): globals()[name] for name in __all__}

Model = TypeVar("Model", bound=torch.nn.Module)

LINKED = DistGCNConv, DistGCN2Conv, DistSAGEConv, HaloConv, HaloExecution


def convert(model: Model, link: OwnLink = None, *, trim: bool = True) -> Model:
    """Makes the layers of a model distributed, in place, sharing their parameters.

    A layer of PyG gets the class of its name in `pyg_distcomm.nn`, as DistGCNConv, and a
    script's own `MessagePassing` layer is wrapped in `HaloConv`. Norms, such as BatchNorm1d,
    are over the nodes of all ranks as they are. Names in `state_dict` do not change. Works
    on any module: PyG's `GCN`, `GraphSAGE`, `GAT`, `GIN`, `Sequential`, a custom class, or a
    single layer (whose converted form is returned).

    Args:
        model: the model; its results on ordinary inputs do not change.
        link: the link of its layers, such as `pdc.VARCO(...)`; "exact", or None to keep the
            link of each layer, or that of the edge_index.
        trim: whether to compute, on minibatches of this package's loaders, only the rows
            that are read. Results do not change: a model that reads rows beyond the seeds
            computes all rows. `pdc.nn.trimming_of(model)` returns which applies.
    """
    check_module(model, "pdc.convert")
    done: dict[int, torch.nn.Module] = {}
    out = _convert(model, done)
    if check_link(link) is not None:
        for module in out.modules():
            if isinstance(module, LINKED):
                module.link = link
    trimming.remove(out)
    if trim and not isinstance(out, pyg.MessagePassing | HaloConv):
        trimming.install(out)
    return out  # type: ignore[return-value]


class Converted:
    """Converts the layers of a PyG model in its constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _convert_parts(self, {id(self): self})
        trimming.install(self)  # type: ignore[arg-type]


def _convert(module: torch.nn.Module, done: dict[int, Any]) -> torch.nn.Module:
    if id(module) in done:
        return done[id(module)]
    done[id(module)] = out = _distributed_layer(module)
    done[id(out)] = out
    _convert_parts(module, done)
    return out


def _convert_parts(module: Any, done: dict[int, Any]) -> None:
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _convert(child, done)


def _distributed_layer(module: torch.nn.Module) -> torch.nn.Module:
    if isinstance(module, (*DISTRIBUTED.values(), HaloConv, HaloExecution)):
        return module
    if type(module) in DISTRIBUTED:
        module.__class__ = DISTRIBUTED[type(module)]
        if isinstance(module, _MadeLayer):
            module.inspector = module.inspector  # past the class made here
        return module
    return HaloConv(module) if isinstance(module, pyg.MessagePassing) else module
