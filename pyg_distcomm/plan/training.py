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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, Module
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.nn import GCN2Conv, GCNConv, MessagePassing, SAGEConv

from pyg_distcomm.comm.collectives import Axis, ring_words
from pyg_distcomm.comm.mesh import Grid, alone
from pyg_distcomm.graph.partition_data import partition
from pyg_distcomm.graph.topology import MultiplyOrder
from pyg_distcomm.nn.halo_conv import HaloConv, HaloExecution
from pyg_distcomm.nn.layers import convert
from pyg_distcomm.sharded.agreement import in_backward
from pyg_distcomm.sharded.constants import key_of
from pyg_distcomm.sharded.dist_tensor import DistTensor

INPUTS = ("constant", "changing", "trained")
KINDS: dict[str, Any] = {"gcn": GCNConv, "sage": SAGEConv}
LOSS_WORDS = 2  # a mean is a sum and a count
DEFAULT_ORDER = MultiplyOrder()


@dataclass(frozen=True)
class ProductShape:
    """One application of the graph: its width, its direction, and how it travels."""

    layer: int  # the number of its layer
    width: int  # features
    transposed: bool  # whether it is one of the backward pass
    # whether rows travel alone, as `HaloConv` has it; else only sums are read
    halo: bool = False
    # whether later epochs take what it brought, which does not change
    kept: bool = False
    constant: bool = False  # whether it brings rows of a constant


@dataclass
class LayerShape:
    """One layer, as an epoch runs it: X' = A X W and the like, or rows of X at their edges."""

    number: int  # its place among the layers
    width_in: int
    width_out: int = 0
    # "gcn" or "sage", which multiply by the matrix of all edges, or any other, run by
    # `HaloConv`
    kind: str = "halo"
    order: str = "halo"  # of A X W: "kept", "first" or "last"; else "halo"
    # its applications of the graph, forward and backward
    products: list[ProductShape] = field(default_factory=list)

    def set_order(self, ordering: MultiplyOrder) -> None:
        """Sets the order in which it multiplies, from its products."""
        if self.kind == "halo":
            return
        if not self.products or self.products[0].kept:
            self.order = "kept"
        else:
            first = self.products[0].width == self.width_in
            self.order = "first" if first and ordering.order != "last" else "last"


class RunRecorder:
    """Records what more ranks would send in a run of a model; layers inside layers are skipped.

    What its mesh tells of is noted for the layer that runs, forward, or backward.
    """

    def __init__(self) -> None:
        self.stack: list[Module] = []
        self.trained: list[Tensor] = []  # all parameters that train
        self.clear()

    def clear(self) -> None:
        """Begins the records of an epoch."""
        self.missing: list[str] = []
        self.against: list[str] = []  # layers that read against the edges
        #: of batch norms, and of gradients that are read at once
        self.sums: list[int] = []
        self.summed = 0  # gradients of parameters, in numbers
        self.layers: list[LayerShape] = []
        self.now: Any = None  # the layer that runs
        self.norm: Any = None  # the batch norm that runs
        self.constant: Any = None  # what the layer that runs is given, if constant

    def watch(self, model: Module) -> None:
        """Follows the modules of a model."""
        for part in model.modules():
            if isinstance(part, HaloExecution):  # which sends rows before its hooks run
                part.__class__ = self._watched(type(part))
            else:
                part.register_forward_pre_hook(self._enter, with_kwargs=True)
                part.register_forward_hook(self._leave)

    def _watched(self, kind: Any) -> type:
        """Returns a class of layers that tells when they begin and end."""

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            self._enter(layer, args, kwargs)
            out = kind.__call__(layer, *args, **kwargs)
            self._leave(layer, args, out)
            return out

        return type(kind.__name__, (kind,), {"__call__": call})

    def _enter(self, module: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        outer = is_layer(module) and not any(map(is_layer, self.stack))
        self.stack.append(module)
        if outer:
            x = args[0] if args else kwargs["x"]  # rows, which may be a pair
            x = x[0] if isinstance(x, (tuple, list)) else x
            same = isinstance(x, DistTensor) and key_of(x) is not None
            self.constant = x.local if same else None
            self.layers.append(LayerShape(len(self.layers), x.size(-1)))
            self._set("now", self.layers[-1], (args, kwargs))
            flips = any(getattr(v, "_flipped", None) is not None for v in args)
            if flips or bare(module).flow != "source_to_target":  # type: ignore[union-attr]
                self.against.append(type(bare(module)).__name__.removeprefix("Dist"))
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
            record.width_out = first.size(-1)
            _at_gradients(out, lambda: setattr(self, "now", record))

    def note(self, how: str, x: Tensor, axis: Axis, *, known: bool = True) -> None:
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
                halo, same = axis.name == "world", self.constant
                same = how == "rows" and same is not None and same.is_set_to(x)
                what = self.now.number, x.shape[1:].numel(), how == "back", halo
                self.now.products.append(ProductShape(*what, constant=same))
            elif not back:
                self._miss("rows that {} reads by ids")
        elif how == "sum" and (back or self.norm is not None):
            self.sums.append(x.numel())
        elif how == "parameters":
            self.summed += x.numel()
        elif not back:
            self._miss(
                "sums over nodes of {}" if how == "sum" else "all rows, read by {}"
            )

    def _miss(self, what: str) -> None:
        name = type(bare(self.stack[-1])).__name__.removeprefix("Dist")
        self.missing.append(what.format(name))

    def note_operator(self) -> None:
        """Records that the layer multiplies by a matrix of all edges."""
        conv = bare(next(filter(is_layer, self.stack)))
        kinds = {**KINDS, "gcn": (GCNConv, GCN2Conv)}
        found = (kind for kind, types in kinds.items() if isinstance(conv, types))
        self.now.kind = next(found, "halo")


def _at_gradients(values: Any, do: Callable[[], None]) -> None:
    """Calls a function when the gradients of any of some tensors have come."""
    for x in tree_leaves(values):
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda _: do())


def mark_kept(layers: Sequence[LayerShape], later: Sequence[LayerShape]) -> None:
    """Marks the products of an epoch that a later one has no more: they are kept."""
    if len(layers) != len(later):
        return
    for layer, other in zip(layers, later, strict=True):
        left = list(other.products)
        for place, one in enumerate(layer.products):
            if one in left:
                left.remove(one)
            else:
                layer.products[place] = replace(one, kept=True)


def visited(
    model: Module, num_features: int, inputs: str, ordering: MultiplyOrder
) -> RunRecorder:
    """Runs a copy of a model, as it would be distributed, on two nodes and one rank.

    Returns the record of the last epoch, with the layers of the one before, whose products
    are marked if they are kept.

    Raises:
        ValueError: if the model does not run, or calls no layer, with the reason.
    """
    visit, grad = RunRecorder(), torch.enable_grad()
    try:
        with torch.inference_mode(False), grad, torch.random.fork_rng(devices=[]):
            own = copy.deepcopy(model).cpu().train()
            _run(own, num_features, inputs, ordering, visit)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run on a graph of two nodes, from which plans "
            f"tell what it sends ({type(error).__name__}: {error}); have it run as "
            "model(x, edge_index), or give widths=[...] and layers=[...] instead"
        ) from error
    if not visit.layers:
        raise ValueError(
            f"{type(model).__name__} calls no message passing layer in model(x, edge_index); "
            "give widths=[...] and layers=[...] instead"
        )
    return visit


def _run(
    model: Module,
    num_features: int,
    inputs: str,
    ordering: MultiplyOrder,
    visit: RunRecorder,
) -> None:
    model = convert(model)
    visit.watch(model)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.zeros(2, num_features, dtype=dtype)
    data = Data(x=x, edge_index=torch.tensor([[0, 1, 1], [1, 0, 0]]))
    mesh = alone((1, 1, 1), 0, torch.device("cpu"), visit.note)
    share = partition(data, mesh, "block", node_attrs=["x"])
    x = share.x.requires_grad_(inputs == "trained")
    how = {"keep_inputs": ordering.keep_inputs}
    edge_index = share.edge_index.with_ordering(ordering.order, **how)
    edges = edge_index.topology
    operator = edges.operator

    def told(*args: Any, **how: Any) -> Any:
        visit.note_operator()
        return operator(*args, **how)

    vars(edges)["operator"] = told
    epochs: list[list[LayerShape]] = []
    for _ in range(3):  # layers fill their caches, then what they read is kept
        visit.clear()
        outs = tree_leaves(model(x + 0 if inputs == "changing" else x, edge_index))
        for out in outs:
            if isinstance(out, Tensor) and out.requires_grad:
                out.square().sum().backward(retain_graph=True)
        epochs.append(visit.layers)
    visit.trained = [p for p in model.parameters() if p.requires_grad]
    mark_kept(epochs[1], epochs[2])
    visit.layers = epochs[1]
    for layer in visit.layers:
        layer.set_order(ordering)


def is_layer(module: Module) -> bool:
    """Returns whether a module reads rows of neighbours."""
    return isinstance(module, (MessagePassing, HaloConv))


def bare(module: Module) -> Module:
    """Returns PyG's layer inside a HaloConv, or the module itself."""
    return module.conv if isinstance(module, HaloConv) else module


@dataclass(frozen=True)
class Training:
    """A full-graph epoch: forward, a mean loss, backward, and a sum of gradients."""

    layers: tuple[LayerShape, ...]  # in order
    parameters: int  # how many numbers train
    # "constant" features, "changing" ones (made by dropout, say), or ones that are
    # "trained"
    inputs: str = "constant"
    dtype: torch.dtype = torch.float32  # of the features, and of what travels
    # how wide each sum of a batch norm is, forward and backward, and each sum of a
    # gradient that is read before the pass ends
    norms: tuple[int, ...] = ()
    # what the model sends beside all this, or may, in words; or nothing
    missing: str = ""
    against: str = ""  # what it sends over a link against the edges, which may differ
    summed: int = 0  # how many of `parameters` are summed at the end of a pass

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS:
            raise ValueError(f"inputs must be one of {INPUTS}, got {self.inputs!r}")
        if not self.layers:
            raise ValueError("an epoch needs at least one layer")

    def uncounted(self, over_a_link: bool) -> str:
        """Returns what the model sends, or may, beside what a plan counts."""
        more = self.against if over_a_link else ""
        return "; ".join(filter(None, (self.missing, more)))

    @property
    def runs_by_halo(self) -> bool:
        """Whether rows of some layer travel as on (P, 1, 1), or may."""
        return any(layer.kind == "halo" for layer in self.layers)

    @property
    def adds_rows(self) -> bool:
        """Whether some layer run by `HaloConv` sums rows, which grids may do."""
        some = (layer.products for layer in self.layers if layer.kind == "halo")
        return any(not one.halo for one in itertools.chain(*some))

    @property
    def adds_loops(self) -> bool:
        """Whether self-loops join the edges."""
        return any(layer.kind == "gcn" for layer in self.layers)

    @property
    def orders(self) -> tuple[str, ...]:
        """The order of each layer."""
        return tuple(layer.order for layer in self.layers)

    def products(
        self, grid: Grid, adds: bool, exact: bool
    ) -> tuple[list[ProductShape], int]:
        """Returns the products of the third epoch or a later one, and how wide kept ghosts are.

        Args:
            grid: the ranks.
            adds: whether sums of rows that `HaloConv` reads are products.
            exact: whether the link is; else `HaloConv` sums and keeps no rows.
        """
        found, widths = [], [0]
        for layer in self.layers:
            by_halo = layer.kind == "halo" and not (adds and exact)
            gridded = grid[1:] != (1, 1)
            for one in layer.products:
                halo = one.halo or by_halo
                # sums that run op by op keep a constant's ghosts, but none of its sums
                op_by_op = gridded and by_halo and not one.halo
                kept = one.constant if op_by_op else one.kept
                if not kept or (halo and not exact):
                    found.append(replace(one, halo=halo))
                elif halo:
                    widths.append(one.width)
        return found, max(widths)

    def sums(self, size: int) -> dict[str, int]:
        """Returns the bytes a rank receives in all-reduces, by what is summed."""
        item = self.dtype.itemsize
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


def stack_of(widths: Sequence[int], layers: str | Sequence[str]) -> Stack:
    """Returns a stack of layers by name, all of one kind or each of its own."""
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
    for a, b in pairs:
        if not all(isinstance(n, numbers.Integral) and n >= 1 for n in (a, b)):
            raise ValueError(
                f"widths must be whole numbers, at least 1, got {a!r} and {b!r}"
            )
    return Stack(
        KINDS[kind](int(a), int(b)) for kind, (a, b) in zip(kinds, pairs, strict=True)
    )


def training_of(
    widths: Sequence[int] | None = None,
    layers: str | Sequence[str] = "gcn",
    *,
    model: Module | None = None,
    graph: Any = None,
    inputs: str = "constant",
    dtype: torch.dtype = torch.float32,
    ordering: MultiplyOrder = DEFAULT_ORDER,
) -> Training:
    """Returns the training that the options of `plan` describe: by widths, or by a model.

    A copy of the model is run on two nodes, see `visited`.

    Raises:
        ValueError: if options do not fit, the model has no layer that reads neighbours, or
            it does not run.
    """
    if (widths is None) == (model is None):
        raise ValueError(
            "plan needs either widths=[features, hidden, ..., output] or model=..."
        )
    if widths is not None:
        model = stack_of(widths, layers)
        _check_width(graph, widths[0], inputs)
        features = int(widths[0])
    elif not isinstance(model, Module):
        raise TypeError(
            f"model is a torch.nn.Module, got {type(model).__name__}; give layers as a "
            "torch_geometric.nn.Sequential"
        )
    else:
        features = graph.num_features if isinstance(graph, Data) else 0
        features = features or num_features_of_model(model)
    assert model is not None
    if not any(map(is_layer, model.modules())):
        raise ValueError(
            f"{type(model).__name__} has no message passing layer to plan for; give "
            "widths=[...]"
        )
    run = visited(model, features, inputs, ordering)
    trained = sum(p.numel() for p in run.trained)
    return Training(
        tuple(run.layers),
        trained,
        inputs,
        dtype,
        tuple(run.sums),
        "; ".join(dict.fromkeys(run.missing)),
        "".join(f"rows that {one} reads against the edges" for one in run.against[:1]),
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
