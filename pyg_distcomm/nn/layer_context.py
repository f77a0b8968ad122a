"""Gathers and checks what a call of a layer is given: edges, link, weights, and PyG's steps."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.data.data import BaseData
from torch_geometric.nn import (
    MaxAggregation,
    MeanAggregation,
    MessagePassing,
    SumAggregation,
)
from torch_geometric.nn.dense.linear import Linear

from pyg_distcomm.comm.consistency import comparer_of
from pyg_distcomm.comm.ledger import dense_words
from pyg_distcomm.comm.mesh import Mesh, latest_mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.topology import Topology
from pyg_distcomm.halo.exchange import LayerExchange
from pyg_distcomm.halo.policy import LinkPolicy, settings_of
from pyg_distcomm.process import PROCESS, tell
from pyg_distcomm.sharded.constants import kept_with, key_of
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edge_methods import EdgeMethods
from pyg_distcomm.sharded.edges import DistEdgeIndex
from pyg_distcomm.sharded.ids import ids_of

OwnLink: TypeAlias = LinkPolicy | Literal["exact"] | None

INDICES = (torch.int64, torch.int32)
STEPS = "propagate message aggregate update message_and_aggregate edge_update".split()
_WHEN = ("pre_hooks", "hooks")


def check_link(link: OwnLink) -> OwnLink:
    """Returns the link of a layer if it is valid.

    Raises:
        TypeError: if a layer cannot take it as its link.
    """
    if link is None or link == "exact" or isinstance(link, LinkPolicy):
        return link
    raise TypeError(
        "link must be a LinkPolicy, such as pdc.Sylvie() or pdc.VARCO(epochs), 'exact', or "
        f"None for that of the edge_index, got {link!r}"
    )


class LayerContext:
    """Holds the edges and the link of one call of a layer; collective the first time.

    Args:
        layer: the layer.
        own: its own link; None for that of the edges.
        edges: the edges that it is given.
        given: the weights of edges that it is given, a key by which products are cached.

    Raises:
        ValueError: on all ranks, if links or settings of the layer differ.
    """

    def __init__(
        self, layer: Any, own: OwnLink, edges: DistEdgeIndex, given: Any = None
    ) -> None:
        self.layer, self.given, self.topology = layer, given, edges._topology
        self.nodes = self.topology.nodes
        if layer.flow != "source_to_target":
            self.topology = self.topology.reversed
        self.link = agreed_link(layer, own, edges._topology)

    @property
    def is_coded(self) -> bool:
        """Whether its exchanges may be coded or late."""
        link = self.link
        return link is not None and link.is_used_on(self.nodes.mesh)

    def exchange(self, x: Any = None, kind: Any = None) -> LayerExchange | None:
        """Returns the exchange of this call by its link policy; None if it is exact.

        Args:
            x: the input whose product with the graph may be cached; None if there is none.
            kind: the kind of that product.
        """
        if self.link is None:
            return None
        stage = None
        if x is not None:
            alive, key = weakref.ref(x), (kind, self.given)

            def stage() -> int:
                now = alive()
                return 0 if now is None else self.topology.constants.stage(now, *key)

        begin, degrees = self.link.begin, self.topology.own_degrees
        training = self.layer.training
        return begin(self.layer, self.nodes, training, stage, degrees=degrees)

    def had_kept(self) -> bool:
        """Tells whether a resumed run had seen the input of this call before it was saved."""
        if not self.is_coded:
            return False
        assert self.link is not None
        trains = self.layer.training and torch.is_grad_enabled()
        return self.link.was_constant(self.layer, trains)

    def note_kept(self, graded: bool) -> None:
        """Tells the link that a product will be cached."""
        if self.link is not None:
            trains = self.layer.training and graded
            self.link.note_cached(self.layer, self.nodes, trains)


def agreed_link(layer: Any, own: OwnLink, topology: Topology) -> LinkPolicy | None:
    """Returns the link of a layer on some edges, compared between ranks at first use."""
    link = topology.link if own is None else own
    topology.read_by(layer, link)
    policy = link if isinstance(link, LinkPolicy) else None
    known, mode = topology.compared.get(layer, (None, None))
    if known is not policy or mode is not layer.training:
        mesh: Any = topology.nodes.mesh
        if isinstance(mesh, Mesh):  # a pipeline compares the links of its stages itself
            kind = {"kind of device": topology.device.type}
            comparer_of(mesh).check_settings(
                layer, policy, lambda: settings_of(policy) | kind
            )
        topology.compared[layer] = policy, layer.training
    return policy


def check_placement(layer: Any, topology: Topology) -> None:
    """Raises, on all ranks, if a parameter of a layer lies elsewhere than its edges.

    Looks at all of them when the layer is first used, and then at the first.

    Raises:
        ValueError: naming the parameter, and both devices.
    """
    first = next(layer.parameters(), None)
    if first is None or (
        layer in topology.compared and first.device == topology.device
    ):
        return
    for name, parameter in layer.named_parameters():
        topology.placed(f"{type(layer).__name__}.{name}", parameter)


def warn_about_grid(layer: Any, topology: Topology, why: str) -> None:
    """Warns once for each kind of layer that rows travel on a grid with more than one axis.

    On rank 0, as a warning and in the log, with the price of both methods. Collective.
    """
    mesh, name = topology.nodes.mesh, type(layer).__name__
    if mesh.grid[1:] == (1, 1) or name in mesh.grid_warned:
        return
    mesh.grid_warned.add(name)
    sides = " x ".join(map(str, mesh.grid))
    text = (
        f"{name} exchanges rows on the grid {sides}, as it would on ({mesh.size}, 1, 1): "
        f"{why}. For each feature, all ranks together receive {topology.row_words:,} numbers "
        "so"
    )
    known = vars(topology).get("product_words")  # known if a product has been planned
    if known is not None:
        text += f", and in a product on the grid, as of GCNConv, {known:,.0f}"
    elif topology.sources is None:
        most = mesh.size * dense_words(topology.nodes.total, 1, mesh.grid)
        text += f", and in a product on the grid, as of GCNConv, at most {most:,.0f}"
    tell(mesh.rank, "%s", text)
    if mesh.rank == 0:
        warnings.warn(f"{text}; pdc.plan prices a model on every grid", stacklevel=2)


def is_product(
    conv: MessagePassing, base: type, *linears: Any, biased: Any = ()
) -> bool:
    """Tells whether a layer computes the matrix product that PyG's class defines.

    It does not if a subclass, a hook or a replaced submodule changes the computation, nor
    under a transform of torch.func, which does not see what is below autograd.

    Args:
        conv: the layer.
        base: PyG's class.
        linears: its transformations of features without bias.
        biased: transformations that may have one.
    """
    kind = type(conv)
    if any(getattr(kind, s) is not getattr(base, s) for s in STEPS[1:]):
        return False
    if not vars(conv).keys().isdisjoint(STEPS) or not propagates_as_pyg(conv):
        return False
    if conv.explain or has_hooks(conv):  # explainers multiply messages by an edge mask
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    named = {"mean": MeanAggregation, "max": MaxAggregation}
    if type(conv.aggr_module) is not named.get(str(conv.aggr), SumAggregation):
        return False
    if any(getattr(lin, "bias", None) is not None for lin in linears):
        return False
    return all(
        type(lin).forward in (Linear.forward, torch.nn.Linear.forward)
        and not is_changed(lin)
        for lin in (*linears, *biased)
        if not is_lazy(lin._parameters.get("weight"))
    )


def dtype_of(lin: torch.nn.Module) -> torch.dtype | None:
    """Returns the type of the weight of a linear map, also of a computed one."""
    first = next(lin.parameters(), None)
    return None if first is None else first.dtype  # None of one that FSDP holds


def has_hooks(conv: MessagePassing) -> bool:
    """Tells whether hooks see or change the steps of a layer."""
    own = vars(conv)
    if any(own.get(f"_{s}_forward_{when}") for s in STEPS for when in _WHEN):
        return True
    return is_changed(conv.aggr_module)


def is_changed(part: torch.nn.Module) -> bool:
    """Tells whether hooks, or a replaced `forward`, see or change what a module computes.

    Hooks of this package, which plan, change nothing.
    """
    own = vars(part)
    hooks = (h for name in _HOOKS for h in own.get(f"_{name}_hooks", {}).values())
    root = __name__.split(".")[0]
    return "forward" in own or any(
        (getattr(hook, "__module__", None) or "").split(".")[0] != root
        for hook in hooks
    )


_HOOKS = "forward", "forward_pre", "backward", "backward_pre"


def propagates_as_pyg(conv: MessagePassing) -> bool:
    """Tells whether no subclass overrides `propagate`."""
    for kind in type(conv).__mro__:
        call = vars(kind).get("propagate")
        if call is not None:
            return kind is MessagePassing or call.__module__ == template_of(kind)
    raise AssertionError("MessagePassing has no propagate")


def template_of(kind: type) -> str:
    """Returns the name of the module that PyG generates for the `propagate` of a class."""
    return "_".join((kind.__module__, kind.__name__, "propagate"))


class Explained:
    """Has explainers' masks applied in subclasses of PyG's layers, too.

    PyG replaces `propagate` by a template that does not apply masks, for each class. Under
    `explain` it takes a class's own template out, but leaves that of a base class in place.
    """

    @property
    def explain(self) -> Any:
        """Whether an explainer multiplies messages by its mask."""
        return MessagePassing.explain.fget(self)  # type: ignore[attr-defined]

    @explain.setter
    def explain(self, explain: bool | None) -> None:
        MessagePassing.explain.fset(self, explain)  # type: ignore[attr-defined]
        if not explain:
            return
        for kind in type(self).__mro__:
            call = vars(kind).get("propagate")
            if call is not None and call.__module__ != template_of(kind):
                vars(self)["propagate"] = call.__get__(self)
                return


def topology_of(edge_index: Any) -> Topology | None:
    """Returns what is planned for the edges of a graph; None for others."""
    return edge_index._topology if isinstance(edge_index, EdgeMethods) else None  # type: ignore[attr-defined]


def sharded_inputs(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a layer, with a whole edge_index beside sharded features cut."""
    values = [*args, *kwargs.values()]
    flat = [x for v in values for x in (v if isinstance(v, (tuple, list)) else (v,))]
    found = [x for x in flat if type(x) is DistTensor]
    _check_rows(values[0] if values else None, found)
    flips = [x for x in found if x._flipped is not None]
    if len(flips) == 1 and _turns(flips[0], found):
        known = _turned(flips[0])
        args = [known if v is flips[0] else v for v in args]
        return args, {k: known if v is flips[0] else v for k, v in kwargs.items()}
    nodes = [x.rows for x in found if x.dim_ == 0 and x.rows.partition is not None]
    if not nodes or any(x.dim_ == 1 for x in found):
        return args, kwargs
    ends = nodes[0], nodes[0]
    for pair in values:
        if isinstance(pair, (tuple, list)) and len(pair) == 2:
            if all(type(x) is DistTensor for x in pair):
                ends = pair[1].rows, pair[0].rows

    def cut(value: Any) -> Any:
        if type(value) is not Tensor:
            return value
        sources = None if ends[1].same_as(ends[0]) else ends[1]
        if value.layout != torch.strided:
            return DistEdgeIndex.of_sparse(value, ends[0], sources)
        pair = value.dim() == 2 and value.size(0) == 2
        if pair and value.dtype in (torch.int64, torch.int32):
            return DistEdgeIndex.cut(value, ends[0], sources)
        return value

    return [cut(v) for v in args], {name: cut(v) for name, v in kwargs.items()}


def _turns(flip: DistTensor, found: list[DistTensor]) -> bool:
    """Tells whether flipped edges can be planned for: none of the others is of edges."""
    base = flip._flipped
    known = key_of(flip) is not None and base.sources is None
    known = known and not base.chunked and base.nodes.memory is None
    return known and not any(x.rows is flip.rows for x in found if x is not flip)


def _turned(flip: DistTensor) -> DistTensor:
    """Returns flipped edges, moved to the owners of their targets; collective once."""
    base = flip._flipped
    known = vars(base).get("turned")
    if known is None:
        turned = base.reversed
        ends = torch.stack([turned.source_gid, turned.target_gid])
        known = DistEdgeIndex.of(ends.to(flip.device, flip.dtype), turned)
    if known.topology.link is not base.link:
        known = known.with_link(base.link)
    vars(base)["turned"] = known  # with what is planned for it
    return known  # type: ignore[no-any-return]


def linked_edges(values: Any, link: OwnLink) -> list[DistTensor]:
    """Returns edges that are flipped or derived, where a layer, or their graph, has a link.

    Planned, they only say where rows are: the layer runs on what it was given. Collective once.
    """
    found = []
    for v in values:
        if link == "exact" or type(v) is not DistTensor or key_of(v) is None:
            continue
        nodes = v.rows.nodes
        if v._flipped is not None:
            if (link or v._flipped.link) is not None:
                found.append(_turned(v))
        elif v.shape[:-1] == (2,) and v.dtype in INDICES and nodes is not None:
            policy = link or nodes.derived.get("link")
            if policy is not None and nodes.partition is not None:

                def made(v: Any = v, nodes: Any = nodes, policy: Any = policy) -> Any:
                    ends: Any = map(ids_of, v)
                    if any(end.highest >= nodes.count for end in ends):  # of hyperedges
                        return []
                    return [DistEdgeIndex.of_ends(*v).with_link(policy)]

                found += kept_with(v, ("over", id(policy)), made)
    return found


def _check_rows(x: Any, values: list[DistTensor]) -> None:
    """Raises for features of other nodes than those of the edges beside them.

    Raises:
        TypeError: for a plain tensor that has a row for none of them.
        ValueError: for a sharded one.
    """
    edges = next(filter(None, map(topology_of, values)), None)
    if edges is None:
        return
    ends = edges.source_rows, edges.nodes
    if edges.sources is not None:
        _check_pair(x, ends)
    parts = x if isinstance(x, (tuple, list)) else (x,)
    others = [v for v in values if v.dim_ == 0 and not any(v is part for part in parts)]
    if any(v.rows is end for v in others for end in ends):
        return  # the features are another argument, of a layer of one's own
    for part in parts:
        plain = not isinstance(part, EdgeMethods)
        if not isinstance(part, Tensor) or part.layout != torch.strided:
            continue
        if not plain and (
            part.dim_ or any(part.rows is end for end in ends)  # type: ignore[attr-defined]
        ):
            continue
        counts = [end.count for end in ends]
        if part.dim() == 0 or any(n in counts for n in part.shape):
            continue
        if plain:
            raise TypeError(
                f"got a plain tensor of {list(part.shape)} beside edges between {counts[1]} "
                "nodes; give a layer data.x of pdc.partition, or of this rank's rows "
                "pdc.from_local(t, like=data.x)"
            )
        raise ValueError(
            f"got a row-sharded tensor of {list(part.shape)} beside edges between "
            f"{counts[1]} nodes; give a layer one row for each node, and pick rows of what "
            "it returns"
        )


def check_flow(conv: Any, topology: Topology) -> None:
    """Raises for edges between two types of nodes, read against their direction.

    PyG then looks for rows of one type among those of the other.

    Raises:
        ValueError: naming the layer, if the types differ in size.
    """
    counts = topology.source_rows.count, topology.nodes.count
    if conv.flow != "source_to_target" and counts[0] != counts[1]:
        raise ValueError(
            f"{type(conv).__name__} has flow={conv.flow!r}, by which PyG takes no edges from "
            f"{counts[0]} nodes of one type to {counts[1]} of another; flip them, "
            "edge_index.flip(0), and leave flow out"
        )


def _check_pair(x: Any, ends: tuple[Rows, Rows]) -> None:
    """Raises for features that are no pair, or are swapped, beside edges between two types.

    Raises:
        TypeError, ValueError: saying how many nodes there are of each type.
    """
    counts = [end.count for end in ends]
    what = f"edges from {counts[0]} nodes of one type to {counts[1]} of another"
    if type(x) is DistTensor:
        raise TypeError(
            f"got one tensor of {list(x.shape)} beside {what}; give a layer that takes one, "
            "such as SAGEConv, GATConv or GraphConv, a pair (x_source, x_target)"
        )
    pair = x if isinstance(x, (tuple, list)) else ()
    shapes = [list(part.shape) for part in pair if type(part) is DistTensor]
    if len(shapes) == 2 and [shape[:1] for shape in shapes] != [[n] for n in counts]:
        raise ValueError(
            f"give a layer a pair (x_source, x_target) with one row for each node: got "
            f"{shapes[0]} and {shapes[1]} beside {what}"
        )


def check_edges(name: str, value: Any, topology: Topology | None) -> None:
    """Raises for an argument that lacks a row for each edge.

    Raises:
        TypeError: for a plain tensor.
        ValueError: for a sharded one.
    """
    if topology is None or value is None or value.size(0) == topology.edges.count:
        return
    plain = not isinstance(value, EdgeMethods)
    kind = TypeError if plain else ValueError
    raise kind(
        f"{name} has the shape {list(value.shape)}, wanted a row for each of "
        f"{topology.edges.count} edges; set it in the data before pdc.partition, which then "
        "shards it"
    )


def is_spread(*values: Any) -> bool:
    """Tells whether any argument of a layer is sharded."""
    return any(
        isinstance(x, EdgeMethods)
        for v in values
        for x in (v if isinstance(v, (tuple, list)) else (v,))
    )


def are_rows_of(x: Any, topology: Topology | None) -> bool:
    """Tells whether a tensor has the rows of the sources of some edges."""
    nodes = None if topology is None else topology.source_rows
    return type(x) is DistTensor and x.dim_ == 0 and x.rows is nodes


def check_arguments(layer: Any, args: Any, kwargs: Any) -> None:
    """Checks what a layer is given, and warns of a whole graph on each rank.

    Raises:
        TypeError: for a Data in place of tensors, and for edges in the place of x.
        ValueError: on all ranks, if the layer or an argument lies elsewhere than the edges,
            naming the parameter or the argument, and both devices.
    """
    values, name = [*args, *kwargs.values()], type(layer).__name__
    every = [x for v in values for x in (v.values() if isinstance(v, dict) else (v,))]
    topology = next(filter(None, map(topology_of, every)), None)
    if any(isinstance(v, BaseData) for v in values):
        raise TypeError(
            f"{name} takes tensors, got a Data: call it with data.x and data.edge_index, of "
            "the data that pdc.partition(data, mesh) returned"
        )
    if topology is None:
        plain = not any(isinstance(v, DistTensor) for v in values)
        if plain and not torch.compiler.is_compiling():
            warn_whole_graph(layer, values)
        return
    forward = getattr(layer, "conv", layer).forward
    if args and topology_of(args[0]) is not None:
        names = list(inspect.signature(forward).parameters)
        if names[:1] == ["x"]:
            raise TypeError(
                f"{name} takes ({', '.join(names[:3])}), but got the edge_index as x: give "
                "it x first"
            )
    check_placement(layer, topology)
    if all(not isinstance(x, Tensor) or x.device == topology.device for x in every):
        return
    bound = inspect.signature(forward).bind(*args, **kwargs).arguments
    for what, value in bound.items():
        parts = value.items() if isinstance(value, dict) else ()
        for key, x in ((what, value), *((f"{what}[{k!r}]", x) for k, x in parts)):
            if isinstance(x, Tensor):
                topology.placed(key, x)


def warn_whole_graph(layer: Any, values: list[Any]) -> None:
    """Warns once if each of several ranks seems to train on the same whole graph.

    A layer has then seen one plain edge_index twice in training (each minibatch has its own),
    and no loader of this package exists.
    """
    mesh = latest_mesh() if torch.is_grad_enabled() and layer.training else None
    if mesh is None or mesh.size == 1 or "whole" in PROCESS.warned:
        return
    tensors = [v for v in values if type(v) is Tensor]
    pairs = [v for v in tensors if v.dtype in INDICES and v.shape[:1] == (2,)]
    if not pairs or PROCESS.loaders:
        return
    seen = PROCESS.plain_edges.get(layer)
    PROCESS.plain_edges[layer] = weakref.ref(pairs[0])
    if seen is not None and seen() is pairs[0]:
        PROCESS.warned.add("whole")
        warnings.warn(
            f"each of {mesh.size} ranks gives {type(layer).__name__} a plain edge_index of "
            f"{pairs[0].size(1):,} edges repeatedly: if that is the whole graph, every "
            "rank computes all of it, and nothing is shared out. Take the tensors of "
            "pdc.partition(data, mesh), or minibatches of pyg_distcomm.loader",
            stacklevel=5,
        )
