"""Plans training on the full graph of a HeteroData: the bytes of an epoch by edge type.

A copy of the model is run on two nodes of each type and one rank, forward and backward, which
records what each edge type would exchange. The rows are then counted in the real graph.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import HeteroData

from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.partitioning import partition as cut_data
from pyg_distcomm.graph.product_cache import MultiplyOrder, ProductCache
from pyg_distcomm.graph.topology import LocalGraph
from pyg_distcomm.halo.link import Link
from pyg_distcomm.nn.convert import convert
from pyg_distcomm.partition.hetero import check_hetero, cut_hetero, types_of
from pyg_distcomm.partition.part_share import EdgeType
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.codecs import Writing
from pyg_distcomm.plan.cost import (
    halo_path,
    kept_bytes,
    memory,
    product_path,
    product_seconds,
    sum_messages,
)
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.model_profile import Round, bare, is_layer, observed
from pyg_distcomm.plan.plans import Plan, Plans
from pyg_distcomm.plan.traffic import CutEdges
from pyg_distcomm.plan.training import LayerShape, Training, layer_called

KINDS = {"sage": pyg.SAGEConv, "halo": pyg.GraphConv}


@dataclass
class _RelationCall:
    """Records what one edge type exchanges in one call of a layer.

    Args:
        conv: the layer.
        width: of the rows of its sources.
        still: whether these are the features themselves.
        flows: whether a gradient goes on to them.
        rounds: its halo exchanges: see `Visited`.
        out: width of its outcome.
        read: whether a gradient comes back from the loss.
    """

    conv: Module
    width: int
    still: bool
    flows: bool
    rounds: list[Round] = field(default_factory=list)
    out: int = 0
    against: bool = False
    read: bool = False


@dataclass(frozen=True, eq=False)
class _RecordingRelation(LocalGraph):
    """Records which rows of one edge type more ranks would exchange."""

    visit: _HeteroVisit
    kind: EdgeType

    def with_ghosts(self, x: Tensor, link: Link | None = None) -> Tensor:
        """Records own rows `x`, and their gradients when they come."""
        return self.visit.note(self.kind, x, home=False)

    def with_constant_ghosts(self, x: Any, constants: ProductCache) -> Tensor | None:
        """Records that the rows of features are kept."""
        return self.visit.note_kept(self.kind, x)

    def scatter_to_owners(
        self, ghosts: Tensor, own: Tensor, link: Link | None = None
    ) -> Tensor:
        """Records that sums for ghosts, of which there are none, would be sent."""
        return self.visit.note(self.kind, own, home=True)


class _HeteroVisit:
    """Records what a run of a model exchanges by edge type, and what it sums."""

    def __init__(self) -> None:
        self.calls: list[tuple[EdgeType, _RelationCall]] = []
        self.sums: list[str] = []
        self.stack: list[Module] = []
        self.now: dict[EdgeType, _RelationCall] = {}
        self.features: list[Any] = []
        self.kinds: dict[int, EdgeType] = {}
        self.keeps = False  # whether features are the same in every epoch

    def clear(self) -> None:
        """Forgets what was recorded."""
        self.calls.clear()
        self.sums.clear()

    def watch(self, model: Module) -> None:
        """Follows the modules of a model."""
        for part in model.modules():
            part.register_forward_pre_hook(self._enter, with_kwargs=True)
            part.register_forward_hook(self._leave)

    def _enter(self, module: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if is_layer(module) and not any(map(is_layer, self.stack)):
            self.now = {}
            edges = [
                a for a in (*args, *kwargs.values()) if isinstance(a, DistEdgeIndex)
            ]
            kind = self.kinds.get(id(edges[0].topology)) if edges else None
            if kind is not None:
                given = args[0] if args else kwargs["x"]
                first = given[0] if isinstance(given, (tuple, list)) else given
                self._call(kind, module, first)
        self.stack.append(module)

    def _call(self, kind: EdgeType, module: Module, x: Any) -> _RelationCall:
        still = any(x is each for each in self.features)
        call = _RelationCall(bare(module), x.size(-1), still, x.requires_grad)
        self.now[kind] = call
        self.calls.append((kind, call))
        return call

    def _leave(self, module: Module, args: tuple[Any, ...], out: Any) -> None:
        self.stack.pop()
        if not is_layer(module) or any(map(is_layer, self.stack)):
            return
        first = out[0] if isinstance(out, (tuple, list)) else out
        if not isinstance(first, Tensor):  # a dictionary, of a layer of all relations
            return
        for call in self.now.values():
            call.out = first.size(-1)
            if first.requires_grad:
                first.register_hook(lambda grad, call=call: setattr(call, "read", True))

    def note(self, kind: EdgeType, x: Tensor, home: bool) -> Tensor:
        """Records rows that would be exchanged, and their gradients when they come."""
        call = self._call_of(kind, x)
        call.rounds.append((x[0].numel(), home, False, False))
        if not x.requires_grad:
            return x
        x = x.view_as(x)
        back = x[0].numel(), not home, False, False
        x.register_hook(lambda grad: call.rounds.append(back))
        return x

    def note_kept(self, kind: EdgeType, x: Any) -> Tensor | None:
        """Records that rows of features are kept; returns None for what is computed."""
        if not (self.keeps and any(x is each for each in self.features)):
            return None
        rows: Tensor = x.to_local()
        kept = rows[0].numel(), False, False, True
        self._call_of(kind, x).rounds.append(kept)
        return rows

    def _call_of(self, kind: EdgeType, x: Tensor) -> _RelationCall:
        layer = next(filter(is_layer, self.stack))
        return self.now[kind] if kind in self.now else self._call(kind, layer, x)

    def note_sum(self, x: Tensor, differentiable: bool) -> None:
        """Records a sum over all nodes in a module of the model."""
        if self.stack:
            self.sums.append(type(bare(self.stack[-1])).__name__)


def plan_hetero(
    cutting: tuple[HeteroData, int, Any, int],
    read: tuple[Any, Any, Any, str, torch.dtype | None],
    machine: Machine,
    memory_limit: float | None,
) -> Plans:
    """Plans the one way to train on a HeteroData: rows travel between all ranks.

    Args:
        cutting: the whole graph, the number of ranks, how it is cut, and the seed.
        read: widths, model, layers, inputs and dtype, see `plan`. A model takes x_dict and
            edge_index_dict, or attributes of the graph by the names of its arguments, as
            edge_attr_dict, and returns rows of the type that is trained on, or a dictionary
            with them. Widths are those of `HeteroConv`s of SAGEConv ("sage") or GraphConv
            ("halo"), hidden layers and output, as features have their own.
        machine, memory_limit: see `plan`.

    Raises:
        ValueError: for a model that does not run on two nodes of each type.
    """
    (data, size, method, seed), (widths, model, layers, inputs, dtype) = cutting, read
    check_hetero(data)
    if (model is None) == (widths is None):
        raise ValueError("plan needs either model=... or widths=[hidden, ..., output]")
    if not isinstance(model, (Module, type(None))):
        raise TypeError(
            "the model of a HeteroData is a torch.nn.Module that takes x_dict and "
            f"edge_index_dict, got {type(model).__name__}"
        )
    if model is None:
        kinds = "sage" if layers == "gcn" else layers
        model = _stack_of(data, widths, kinds, dtype or torch.float32)
    owners = method
    if not isinstance(method, Partition):
        owners = cut_hetero(data, size, method, seed)
    if owners.num_parts != size or owners.num_nodes != data.num_nodes:
        raise ValueError(
            f"{owners} does not fit {data.num_nodes} nodes of all types on {size} ranks"
        )
    try:
        grad, random = torch.enable_grad(), torch.random.fork_rng(devices=[])
        with torch.inference_mode(False), grad, random:
            model = copy.deepcopy(model).cpu().train()
            visit, trained, item = _visited(model, data, inputs)
    except Exception as error:
        raise ValueError(
            f"the model does not run on two nodes of each type ({type(error).__name__}: "
            f"{error}); rows that it learns are planned as features, inputs='trained'"
        ) from None
    priced = _Priced(data, owners, machine, item, inputs)
    return priced.plans(visit, trained, memory_limit)


def _stack_of(
    data: HeteroData, widths: Sequence[int], layers: Any, dtype: torch.dtype
) -> Module:
    kinds = [layers] * len(widths) if isinstance(layers, str) else list(layers)
    if len(kinds) != len(widths) or set(kinds) - set(KINDS):
        raise ValueError(
            f"layers of a HeteroData are {', '.join(KINDS)}, one for each of "
            f"widths={list(widths)}; got {layers!r}"
        )
    return _HeteroStack(
        [
            pyg.HeteroConv({t: KINDS[kind]((-1, -1), width) for t in data.edge_types})
            for kind, width in zip(kinds, widths, strict=True)
        ]
    ).to(dtype)


class _HeteroStack(Module):
    """Runs layers of all edge types, with ReLU between them."""

    def __init__(self, layers: list[Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        """Runs the layers."""
        for place, layer in enumerate(self.layers):
            if place:
                x_dict = {name: x.relu() for name, x in x_dict.items()}
            x_dict = layer(x_dict, edge_index_dict)
        return x_dict


def _visited(
    model: Module, data: HeteroData, inputs: str
) -> tuple[_HeteroVisit, int, int]:
    """Runs a model on two nodes of each type; returns also how many numbers it trains."""
    visit, dtype = _HeteroVisit(), None
    floats = [p for p in model.parameters() if not torch.nn.parameter.is_lazy(p)]
    floats = [p for p in floats if p.is_floating_point()]
    dtype = floats[0].dtype if floats else torch.get_default_dtype()
    share = cut_data(_two_of_each(data, dtype), observed(visit.note_sum), "block")
    given = _arguments(model, share)
    model = convert(model)
    with torch.no_grad():  # lazy layers take their widths
        model(*given)
    for store in share.edge_stores:
        topology = store.edge_index.topology
        here = {f.name: getattr(topology.locals, f.name) for f in fields(LocalGraph)}
        topology.locals = _RecordingRelation(**here, visit=visit, kind=store._key)
        visit.kinds[id(topology)] = store._key
    for store in share.node_stores:
        if "x" in store:
            store.x = store.x.requires_grad_(inputs == "trained")
            visit.features.append(store.x)
    visit.keeps = inputs == "constant"
    visit.watch(model)
    for _ in range(2):  # after the first run what layers cache is there
        visit.clear()
        model.zero_grad()
        rows = _trained_on(model(*_arguments(model, share)), data)
        torch.stack([row.to_local().sum() for row in rows]).sum().backward()
    counts = [p.numel() for p in model.parameters() if p.grad is not None]
    return visit, sum(counts), dtype.itemsize


def _two_of_each(data: HeteroData, dtype: torch.dtype) -> HeteroData:
    """Returns two nodes of each type, and two edges, with attributes of the same widths."""
    small = HeteroData()
    for store in data.node_stores:
        small[store._key].num_nodes = 2
        _shrink(store, small[store._key], int(store.num_nodes), dtype)
    for store in data.edge_stores:
        small[store._key].edge_index = torch.tensor([[0, 1], [1, 0]])
        _shrink(store, small[store._key], store.edge_index.size(1), dtype)
    return small


def _shrink(store: Any, small: Any, count: int, dtype: torch.dtype) -> None:
    for name, value in store.items():
        if name not in ("edge_index", "num_nodes") and isinstance(value, Tensor):
            if value.dim() and len(value) == count:
                kind = dtype if value.is_floating_point() else value.dtype
                small[name] = torch.zeros(2, *value.shape[1:], dtype=kind)


def _arguments(model: Module, data: HeteroData) -> list[Any]:
    """Returns what a model takes, by the names of its arguments."""
    found: list[Any] = []
    for name, one in inspect.signature(model.forward).parameters.items():
        if one.default is not one.empty or one.kind in (
            one.VAR_KEYWORD,
            one.VAR_POSITIONAL,
        ):
            break
        attribute = name.removesuffix("_dict")
        if not any(attribute in store for store in data.stores):
            attribute = ("x", "edge_index", attribute)[min(len(found), 2)]
        found.append(data.collect(attribute))
    return found


def _trained_on(out: Any, data: HeteroData) -> list[Any]:
    """Returns the rows that a loss reads: of the types with training nodes, or labels."""
    if not isinstance(out, dict):
        return [out]
    for name in ("train_mask", "y"):
        found = [x for key, x in out.items() if name in data[key] and x is not None]
        if found:
            return found
    return [x for x in out.values() if x is not None]


class _Priced:
    """Prices what a visit has recorded, on a graph and its owners."""

    def __init__(
        self,
        data: HeteroData,
        owners: Partition,
        machine: Machine,
        item: int,
        inputs: str,
    ) -> None:
        self.data, self.owners, self.machine = data, owners, machine
        self.item, self.inputs, self.size = item, inputs, owners.num_parts
        ranges = types_of(data, owners).ranges("node")
        self.owner = {k: owners.owner[begin:end] for k, (begin, end) in ranges.items()}

    def plans(
        self, visit: _HeteroVisit, trained: int, memory_limit: float | None
    ) -> Plans:
        """Returns the plan, in a list of its own."""
        grid = self.size, 1, 1
        exchange, messages, held = np.zeros((3, *grid), np.int64)
        by_type: dict[str, int] = {}
        orders: list[str] = []
        seconds = self.machine.epoch
        for kind in dict.fromkeys(kind for kind, _ in visit.calls):
            calls = [call for other, call in visit.calls if other == kind]
            came, left, took, room, how = self._relation(kind, calls)
            exchange, messages, held = exchange + came, messages + left, held + room
            by_type[" ".join(kind)] = int(came.sum())
            seconds, orders = seconds + took, [*orders, *how]
        shape = LayerShape("halo", 1, 1)
        training = Training((shape,), (trained,), self.inputs, self.item)
        sums = {name: sum(each) for name, each in training.sums(self.size).items()}
        link = self.machine.sum_wire()
        for each in (n for group in training.sums(self.size).values() for n in group):
            seconds += float(link.seconds(sum_messages(self.size), each, each))
        by_rank = tuple(int(n) + sum(sums.values()) for n in exchange.ravel())
        missing = "; ".join(
            f"sums over nodes of {n}" for n in dict.fromkeys(visit.sums)
        )
        plan = Plan(
            grid,
            tuple(dict.fromkeys(orders)),
            bytes_by_rank=by_rank,
            exchange_bytes=int(exchange.max()),
            sum_bytes=sums,
            total_bytes=sum(by_rank),
            messages=int(messages.max()),
            seconds=seconds,
            memory=round(float(held.max())) + 4 * self.item * trained,
            missing=missing,
            relation_bytes=by_type,
        )
        limit = self.machine.memory if memory_limit is None else memory_limit
        if limit is not None and plan.memory > limit:
            plan = replace(
                plan, reason=f"needs {plan.memory:,} bytes a rank of {limit:,}"
            )
        data = self.data
        words = (
            f"{data.num_nodes:,} nodes of {len(data.node_types)} types, "
            f"{data.num_edges:,} edges of {len(data.edge_types)}, {self.size} ranks"
        )
        ranked = (plan,) if plan.reason is None else ()
        refused = () if plan.reason is None else (plan,)
        return Plans(ranked, refused, (), words, self.machine, self.owners)

    def _relation(self, kind: EdgeType, calls: list[_RelationCall]) -> tuple[Any, ...]:
        """Prices all calls of one edge type: bytes, messages, seconds, memory, orders."""
        source, _, target = kind
        edges, owner = self.data[kind].edge_index.cpu().long(), self.owner[target]
        if source != target:
            shift = torch.tensor([[0], [len(self.owner[source])]])
            edges, owner = edges + shift, torch.cat([self.owner[source], owner])
        cut = CutEdges.of(edges, Partition.from_owner(owner, self.size))
        grid, ordering = (self.size, 1, 1), MultiplyOrder()
        shapes = []
        for call in calls:
            call.out = call.out or call.width
            shape = layer_called(call)
            if source != target:  # rows travel, whatever the layer
                shape = replace(shape, kind="halo", rounds=tuple(call.rounds))
            shapes.append(shape)
        training = Training(tuple(shapes), (), self.inputs, self.item)
        orders = training.orders(ordering)
        products = [
            product
            for product in training.products(ordering)
            if product.halo or not product.transposed or calls[product.layer].read
        ]
        flow = cut.flow(grid, "auto", training.adds_loops)
        dtype = {4: torch.float32, 8: torch.float64}.get(self.item, torch.float16)
        writing, halo = Writing(None, dtype, 0), cut.halo_flow
        came, left, took = np.zeros(grid, np.int64), np.zeros(grid, np.int64), 0.0
        for product in products:
            if product.halo:
                path = halo_path(halo, product, writing, grid)
            else:
                path = product_path(flow, product, self.item, writing)
            came = came + path.received
            left = left + sum(move.messages for move in path.moves)
            took += product_seconds(path, flow, self.machine)
        room = memory((flow, halo), training, products, orders, dtype)
        kept = training.kept_rows(ordering) * self.item
        room = room + kept_bytes(halo, kept, grid)
        return came, left, took, room, orders
