"""Describes the products with the graph, and the sums over ranks, of an epoch of a model.

A copy of the model runs on two nodes and one rank, and records what more ranks would send.
`visited` uses a mesh of its own, so other threads may run meanwhile.
"""

from __future__ import annotations

import copy
import functools
import itertools
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Module
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.nn import GCN2Conv, GCNConv, MessagePassing, SAGEConv

from pyg_distcomm.comm.collectives import Axis, ring_words
from pyg_distcomm.comm.mesh import Mesh, alone
from pyg_distcomm.graph.partition_data import partition
from pyg_distcomm.graph.topology import MultiplyOrder
from pyg_distcomm.nn.halo_conv import HaloConv
from pyg_distcomm.nn.layers import convert
from pyg_distcomm.sharded.agreement import in_backward


class Round(NamedTuple):
    """One halo exchange of a layer.

    Args:
        width: the width of the rows.
        to_owners: whether they travel from ghosts to owners.
        adds: whether the layer reads only their sums.
        kept: whether they are cached, since they do not change.
    """

    width: int
    to_owners: bool
    adds: bool = False
    kept: bool = False


@dataclass
class LayerCall:
    """Records one call of a message passing layer.

    Args:
        conv: the layer.
        width: the width of its input.
        is_feature: whether its input is the features themselves.
        needs_gradient: whether its input needs a gradient.
        rounds: its halo exchanges, forward and backward.
        out: the width of its output.
        multiplies: whether it multiplies rows by a matrix of its own.
    """

    conv: Module
    width: int
    is_feature: bool
    needs_gradient: bool
    rounds: list[Round] = field(default_factory=list)
    out: int = 0
    multiplies: bool = False


class RunRecorder:
    """Records what more ranks would send in a run of a model; layers inside layers are skipped.

    What its mesh tells of is noted for the layer that runs, forward, or backward.
    """

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.stack: list[Module] = []
        self.features: list[Any] = []
        self.sums: list[
            int
        ] = []  # of batch norms, and of gradients that are read at once
        self.summed = 0  # gradients of parameters, in numbers
        self.trained: list[Tensor] = []  # all parameters that train
        self.calls: list[LayerCall] = []
        self.now: Any = None  # the record of the layer that runs
        self.norm: Any = None  # the batch norm that runs

    def watch(self, model: Module) -> None:
        """Follows the modules of a model."""
        for part in model.modules():
            part.register_forward_pre_hook(self._enter, with_kwargs=True)
            part.register_forward_hook(self._leave)

    def _enter(self, module: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        outer = is_layer(module) and not any(map(is_layer, self.stack))
        self.stack.append(module)
        if outer:
            self._set("now", self.begin(module, args, kwargs), (args, kwargs))
        if isinstance(module, BatchNorm1d):
            self._set("norm", module, (args, kwargs))

    def _set(self, name: str, value: Any, given: Any) -> None:
        """Sets what runs, until the gradients of what it is given have come."""

        def left() -> None:  # another may have begun, of which it is the input
            if getattr(self, name) is value:
                setattr(self, name, None)

        setattr(self, name, value)
        _at_gradients(given, left)

    def _leave(self, module: Module, args: tuple[Any, ...], out: Any) -> None:
        self.stack.pop()
        if isinstance(module, BatchNorm1d):
            self.norm = None
            _at_gradients(out, lambda: setattr(self, "norm", module))
        if is_layer(module) and not any(map(is_layer, self.stack)):
            record, self.now = self.now, None
            first = out[0] if isinstance(out, (tuple, list)) else out
            record.out = first.size(-1)
            _at_gradients(out, lambda: setattr(self, "now", record))

    def begin(self, layer: Module, args: tuple[Any, ...], kwargs: Any) -> LayerCall:
        """Records a call of a layer with rows x, which may be a pair."""
        x = args[0] if args else kwargs["x"]
        x = x[0] if isinstance(x, (tuple, list)) else x
        is_feature = any(x is each for each in self.features)
        call = LayerCall(bare(layer), x.size(-1), is_feature, x.requires_grad)
        self.calls.append(call)
        return call

    def note(
        self,
        how: str,
        x: Tensor,
        axis: Axis,
        *,
        known: bool = True,
    ) -> None:
        """Records what more ranks would do with a tensor; see `Axis.observer`.

        Args:
            how, x, axis: what, with which tensor, and where.
            known: whether these are the rows at the sources of edges.
        """
        back = in_backward()
        if axis.name not in ("world", "row") or not (back or self.stack):
            return
        if how in ("rows", "back"):
            if self.now is not None and known:
                adds = axis.name == "row"
                one = Round(x.shape[1:].numel(), how == "back", adds)
                self.now.rounds.append(one)
            elif not back:
                self._miss("rows that {} reads by ids")
        elif how == "sum" and (back or self.norm is not None):
            self.sums.append(x.numel())
        elif how == "parameters":
            self.summed += x.numel()
        elif not back:
            what = "sums over nodes of {}" if how == "sum" else "all rows, read by {}"
            self._miss(what)

    def _miss(self, what: str) -> None:
        self.missing.append(what.format(type(bare(self.stack[-1])).__name__))

    def note_product(self) -> None:
        """Records that a layer multiplies by a matrix of its own."""
        self.now.multiplies = True

    def clear(self) -> None:
        """Clears the records."""
        self.missing, self.sums, self.summed, self.calls = [], [], 0, []
        self.now = self.norm = None


def _at_gradients(values: Any, do: Callable[[], None]) -> None:
    """Calls a function when the gradients of any of some tensors have come."""
    for x in tree_leaves(values):
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda _: do())


def mark_kept(calls: Sequence[LayerCall], later: Sequence[LayerCall]) -> None:
    """Marks the rounds of an epoch that a later one has no more: their rows are kept."""
    if len(calls) != len(later):
        return
    for call, other in zip(calls, later, strict=True):
        left = list(other.rounds)
        for place, one in enumerate(call.rounds):
            if one in left:
                left.remove(one)
            else:
                call.rounds[place] = one._replace(kept=True)


def visited(
    model: Module, num_features: int, inputs: str
) -> tuple[list[LayerCall], RunRecorder]:
    """Runs a copy of a model, as it would be distributed, on two nodes and one rank.

    Returns the calls of its layers, and the record of the last epoch.

    Raises:
        ValueError: if the model does not run, or calls no layer, with the reason.
    """
    visit, grad = RunRecorder(), torch.enable_grad()
    try:
        with torch.inference_mode(False), grad, torch.random.fork_rng(devices=[]):
            calls = _run(
                copy.deepcopy(model).cpu().train(), num_features, inputs, visit
            )
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run on a graph of two nodes, from which plans "
            f"tell what it sends ({type(error).__name__}: {error}); have it run as "
            "model(x, edge_index), or give widths=[...] and layers=[...] instead"
        ) from error
    if not calls:
        raise ValueError(
            f"{type(model).__name__} calls no message passing layer in model(x, edge_index); "
            "give widths=[...] and layers=[...] instead"
        )
    return calls, visit


def _run(
    model: Module, num_features: int, inputs: str, visit: RunRecorder
) -> list[LayerCall]:
    model = convert(model)
    visit.watch(model)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.zeros(2, num_features, dtype=dtype)
    data = Data(x=x, edge_index=torch.tensor([[0, 1, 1], [1, 0, 0]]))
    mesh = observing_mesh(visit.note)
    share = partition(data, mesh, "block", node_attrs=["x"])
    x = share.x.requires_grad_(inputs == "trained")
    edges = share.edge_index.topology
    vars(edges)["operator"] = telling(edges.operator, visit.note_product)
    calls: list[list[LayerCall]] = []
    for _ in range(3):  # layers fill their caches, then what they read is kept
        visit.clear()
        visit.features = [x + 0 if inputs == "changing" else x]
        outs = tree_leaves(model(*visit.features, share.edge_index))
        for out in outs:
            if isinstance(out, Tensor) and out.requires_grad:
                out.square().sum().backward(retain_graph=True)
        calls.append(visit.calls)
    visit.trained = [p for p in model.parameters() if p.requires_grad]
    mark_kept(calls[1], calls[2])
    return calls[1]


def telling(multiply: Any, tell: Callable[[], None]) -> Any:
    """Returns a function that tells of a call for a matrix of a layer's own, and makes it."""

    def run(*args: Any, **how: Any) -> Any:
        if not how:  # else it sums rows, of which its rounds tell
            tell()
        return multiply(*args, **how)

    return run


def observing_mesh(observer: Callable[..., None]) -> Mesh:
    """Returns a mesh of one rank that tells `observer` what more ranks would send."""
    mesh = alone((1, 1, 1), 0, torch.device("cpu"))
    parts = {f.name: getattr(mesh, f.name) for f in fields(mesh)}
    axes: Any = {
        name: replace(axis, observer=observer)
        for name, axis in parts.items()
        if isinstance(axis, Axis)
    }
    return replace(mesh, **axes)


def is_layer(module: Module) -> bool:
    """Returns whether a module reads rows of neighbours."""
    return isinstance(module, (MessagePassing, HaloConv))


def bare(module: Module) -> Module:
    """Returns PyG's layer inside a HaloConv, or the module itself."""
    return module.conv if isinstance(module, HaloConv) else module


INPUTS = ("constant", "changing", "trained")
KINDS: dict[str, Any] = {"gcn": GCNConv, "sage": SAGEConv}
LOSS_WORDS = 2  # a mean is a sum and a count


@dataclass(frozen=True)
class LayerShape:
    """One layer: X' = A X W and the like, or rows of X brought to where edges end.

    Args:
        kind: "gcn", "sage" (mean and sum), or "halo": any other, run by `HaloConv`.
        width_in, width_out: features that go in and come out.
        fresh: whether it multiplies by what it computes of its input.
        is_feature: whether its input is the features themselves.
        needs_gradient: whether a gradient goes on to its input.
        trains: whether the weights that an order could put before the product do.
        rounds: of "halo", the rows it exchanges.
    """

    kind: str
    width_in: int
    width_out: int
    fresh: bool
    is_feature: bool
    needs_gradient: bool
    trains: bool
    rounds: tuple[Round, ...] = ()


@dataclass(frozen=True)
class ProductShape:
    """One application of the graph: its width, its direction, and how it travels.

    Args:
        layer: the number of its layer.
        width: features.
        transposed: whether it is one of the backward pass.
        halo: whether rows travel alone, as `HaloConv` has it.
    """

    layer: int
    width: int
    transposed: bool
    halo: bool = False


@dataclass(frozen=True)
class Training:
    """A full-graph epoch: forward, a mean loss, backward, and a sum of gradients.

    Args:
        layers: in order.
        parameters: how many numbers train.
        inputs: "constant" features, "changing" ones (made by dropout, say), or ones that
            are "trained".
        itemsize: bytes of a number.
        norms: how wide each sum of a batch norm is, forward and backward, and each sum of
            a gradient that is read before the pass ends.
        missing: what the model sends beside all this, or may, in words; or nothing.
        summed: how many of `parameters` are summed at the end of a pass.
    """

    layers: tuple[LayerShape, ...]
    parameters: int
    inputs: str = "constant"
    itemsize: int = 4
    norms: tuple[int, ...] = ()
    missing: str = ""
    summed: int = 0

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise ValueError(f"inputs must be one of {INPUTS}, got {self.inputs!r}")
        if not self.layers:
            raise ValueError("an epoch needs at least one layer")

    @property
    def runs_by_halo(self) -> bool:
        """Whether rows of some layer travel as on (P, 1, 1), or may."""
        return any(layer.kind == "halo" for layer in self.layers)

    @property
    def adds_rows(self) -> bool:
        """Whether some layer run by `HaloConv` sums rows, which grids may do."""
        return any(each.adds for one in self.layers for each in one.rounds)

    @property
    def adds_loops(self) -> bool:
        """Whether self-loops join the edges."""
        return any(layer.kind == "gcn" for layer in self.layers)

    def orders(self, ordering: MultiplyOrder) -> tuple[str, ...]:
        """Returns for each layer "kept", "first", "last" or "halo"."""
        return tuple(self._order(i, ordering) for i in range(len(self.layers)))

    def _order(self, number: int, ordering: MultiplyOrder) -> str:
        layer = self.layers[number]
        if layer.kind == "halo":
            return "halo"
        if self._keeps(number, ordering) and ordering.order != "last":
            return "kept"
        return self._multiplied(number, ordering)

    def _multiplied(self, number: int, ordering: MultiplyOrder) -> str:
        """Returns the order of a product that is not kept."""
        layer = self.layers[number]
        grad = layer.needs_gradient
        widths, grads = (layer.width_in, layer.width_out), (grad, grad or layer.trains)
        return "first" if ordering.takes_first(*widths, grads) else "last"

    def _keeps(self, number: int, ordering: MultiplyOrder) -> bool:
        """Whether what a layer reads of its input is kept, which does not change."""
        layer, constant = self.layers[number], self.inputs == "constant"
        kept = layer.is_feature and constant and ordering.keep_inputs
        return kept and not (layer.needs_gradient or layer.fresh)

    def products(
        self,
        ordering: MultiplyOrder,
        *,
        adds_on_grid: bool = False,
        keeps_rows: bool = True,
    ) -> list[ProductShape]:
        """Lists the products of the third epoch or a later one (see `ProductCache`).

        Args:
            ordering: how layers take A X W apart.
            adds_on_grid: whether rows that `HaloConv` sums are products on the grid.
            keeps_rows: whether it keeps rows that do not change.
        """
        found = []
        for i, order in enumerate(self.orders(ordering)):
            layer, halo = self.layers[i], order == "halo"
            if halo:
                for each in layer.rounds:
                    rows = not (each.adds and adds_on_grid)
                    if not (each.kept and keeps_rows and ordering.keep_inputs):
                        way = each.width, each.to_owners, rows
                        found.append(ProductShape(i, *way))
                continue
            if order == "kept":
                continue
            width = layer.width_out if order == "last" else layer.width_in
            found.append(ProductShape(i, width, False))
            if (order == "last" and layer.trains) or layer.needs_gradient:
                found.append(ProductShape(i, width, True))
        return found

    def kept_rows(
        self,
        ordering: MultiplyOrder,
        *,
        adds_on_grid: bool = False,
        keeps_rows: bool = True,
    ) -> int:
        """Returns the width of the ghosts that layers run by `HaloConv` keep, or 0.

        Arguments are those of `products`.
        """
        widths = [0]
        for layer in self.layers if keeps_rows and ordering.keep_inputs else ():
            rows = (r for r in layer.rounds if r.kept)
            widths += [r.width for r in rows if not (r.adds and adds_on_grid)]
        return max(widths)

    def sums(self, size: int) -> dict[str, int]:
        """Returns the bytes a rank receives in all-reduces, by what is summed."""
        item = self.itemsize
        return {
            "parameters": ring_words(self.summed, size) * item,
            "loss": ring_words(LOSS_WORDS, size) * item,
            "norms": sum(ring_words(c, size) * item for c in self.norms),
        }


class Stack(torch.nn.Module):
    """Runs layers in order, with ReLU between them."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Any, edge_index: Any) -> Any:
        """Returns the output of the last layer."""
        for layer in self.layers[:-1]:
            x = layer(x, edge_index).relu()
        return self.layers[-1](x, edge_index)


def training_of(
    widths: Sequence[int],
    layers: str | Sequence[str] = "gcn",
    *,
    inputs: str = "constant",
    itemsize: int = 4,
) -> Training:
    """Returns the training of a stack of layers from their widths.

    Args:
        widths: of the features, the hidden layers, and the output.
        layers: the kind of all layers ("gcn" or "sage"), or of each.
        inputs, itemsize: see `Training`.
    """
    pairs = list(itertools.pairwise(widths))
    if not pairs:
        raise ValueError(
            f"widths={list(widths)} needs at least two: features and output"
        )
    kinds = [layers] * len(pairs) if isinstance(layers, str) else list(layers)
    if len(kinds) != len(pairs):
        raise ValueError(
            f"{len(kinds)} kinds of layers do not fit {len(pairs)} pairs of widths"
        )
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(
                f"layers are {' or '.join(KINDS)}, got {kind!r}; give model=... for others"
            )
    for pair in pairs:
        if not all(isinstance(n, numbers.Integral) and n >= 1 for n in pair):
            raise ValueError(
                "widths must be whole numbers, at least 1, got {!r} and {!r}".format(
                    *pair
                )
            )
    stack = Stack(
        KINDS[kind](int(a), int(b)) for kind, (a, b) in zip(kinds, pairs, strict=True)
    )
    read = training_of_model(stack, int(widths[0]), inputs)
    return replace(read, itemsize=itemsize)


def training_of_model(
    model: torch.nn.Module, num_features: int, inputs: str = "constant"
) -> Training:
    """Reads the layers of a model, in the order in which it calls them.

    A copy of it is run on two nodes, see `visited`.

    Args:
        model: of PyG's layers or ours.
        num_features: of x; what layers of unknown (lazy) width get.
        inputs: see `Training`.

    Raises:
        ValueError: if the model has no layer that reads neighbours, or does not run.
    """
    if not any(map(is_layer, model.modules())):
        raise ValueError(
            f"{type(model).__name__} has no message passing layer to plan for; give "
            "widths=[...]"
        )
    calls, run = visited(model, num_features, inputs)
    trained = sum(p.numel() for p in run.trained)
    return Training(
        tuple(map(layer_from_call, calls)),
        trained,
        inputs,
        run.trained[0].element_size() if run.trained else 4,
        tuple(run.sums),
        "; ".join(dict.fromkeys(run.missing)),
        run.summed or trained,
    )


def num_features_of_model(model: torch.nn.Module) -> int:
    """Returns the width of a model's input: that of the first layer that it holds.

    Raises:
        ValueError: if none tells, or the first waits to be told (lazy).
    """
    names = "in_features", "in_channels", "channels"
    widths = (getattr(part, name, None) for part in model.modules() for name in names)
    first = (w[0] if isinstance(w, (tuple, list)) else w for w in widths)
    width = next((w for w in first if isinstance(w, int)), 0)
    if width > 0:
        return width
    raise ValueError(
        f"the width of the features cannot be read from {type(model).__name__}; give the "
        "graph as a Data with x, or widths=[...]"
    )


def layer_from_call(call: Any) -> LayerShape:
    """Returns the shape of a layer from a recorded call."""
    conv, (kind, fresh) = call.conv, _kind_of(call.conv)
    if not call.multiplies:  # op by op
        kind, fresh = "halo", False
    trained = {name for name, p in conv.named_parameters() if p.requires_grad}
    projects = kind == "sage" and fresh
    needs_gradient = call.needs_gradient or (
        projects and any(n.startswith("lin.") for n in trained)
    )
    return LayerShape(
        kind,
        call.width,
        call.out,
        fresh,
        call.is_feature,
        needs_gradient,
        trains=("lin.weight" if kind == "gcn" else "lin_l.weight") in trained,
        rounds=tuple(call.rounds) if kind == "halo" else (),
    )


def _kind_of(conv: torch.nn.Module) -> tuple[str, bool]:
    """Returns the kind of a layer, and whether its input is computed in any case."""
    aggr = getattr(conv, "aggr", None)
    if getattr(conv, "flow", None) != "source_to_target":
        return "halo", False
    if isinstance(conv, GCNConv) and aggr in ("add", "sum"):
        return "gcn", False
    if isinstance(conv, GCN2Conv) and aggr in ("add", "sum"):  # x_0 comes before it
        return "gcn", True
    if isinstance(conv, SAGEConv) and aggr in ("mean", "sum", "add"):
        return "sage", bool(conv.project)
    return "halo", False


def training_from_options(
    graph: Any,
    widths: Sequence[int] | None,
    model: torch.nn.Module | None,
    layers: str | Sequence[str],
    inputs: str,
    dtype: torch.dtype,
) -> Training:
    """Returns the training that the options of `plan` describe: widths, or a model."""
    if (widths is None) == (model is None):
        raise ValueError(
            "plan needs either widths=[features, hidden, ..., output] or model=..."
        )
    if model is not None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"model is a torch.nn.Module, got {type(model).__name__}; give layers as a "
                "torch_geometric.nn.Sequential"
            )
        features = num_features_of(graph, model)
        read = training_of_model(model, features, inputs)
        return replace(read, itemsize=dtype.itemsize)
    assert widths is not None
    read = training_of(widths, layers, inputs=inputs, itemsize=dtype.itemsize)
    _check_width(graph, read.layers[0].width_in, inputs)
    return read


def num_features_of(graph: Any, model: Any) -> int:
    """Returns the width of the features, which a model tells where the graph does not."""
    given = graph.num_features if isinstance(graph, Data) else 0
    return given or num_features_of_model(model)


def dtype_of(graph: Any, model: Any, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype that features have: as said, or the wider of theirs and the model's."""
    if dtype is not None:
        return dtype
    values = [graph.x] if isinstance(graph, Data) else []
    values += model.parameters() if isinstance(model, torch.nn.Module) else []
    floats = (v for v in values if isinstance(v, Tensor) and v.is_floating_point())
    found = list(dict.fromkeys(v.dtype for v in floats))
    return functools.reduce(torch.promote_types, found) if found else torch.float32


def _check_width(graph: Any, first: int, inputs: str) -> None:
    """Raises if the first width is not that of the features, for constant inputs."""
    x = graph.x if isinstance(graph, Data) else None
    if not isinstance(x, Tensor) or x.dim() != 2 or inputs != "constant":
        return
    if first != x.size(1):
        raise ValueError(
            f"widths begin with {first}, and data.x has {x.size(1)} features; if they go "
            'through something else first, say inputs="changing" (--inputs changing)'
        )
