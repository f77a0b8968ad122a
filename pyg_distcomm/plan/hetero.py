"""Plans training on the full graph of a HeteroData: the bytes of an epoch by edge type.

A copy of the model is run on two nodes of each type and one rank, forward and backward, which
records what each edge type would exchange. The rows are then counted in the real graph.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import HeteroData

from pyg_distcomm.comm.collectives import ring_words
from pyg_distcomm.graph.edge_index import DistEdgeIndex
from pyg_distcomm.graph.partitioning import partition as cut_data
from pyg_distcomm.graph.product_cache import MultiplyOrder, ProductCache
from pyg_distcomm.graph.topology import LocalGraph
from pyg_distcomm.halo.link import Link
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn.convert import convert
from pyg_distcomm.partition.part_share import (
    EdgeType,
    check_hetero,
    cut_hetero,
    types_of,
)
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.codecs import (
    Coding,
    DryCalls,
    DryExchange,
    DryLink,
    Writing,
    links_by_type,
)
from pyg_distcomm.plan.cost import (
    EpochClock,
    ProductPath,
    halo_path,
    kept_bytes,
    link_bytes,
    memory,
    product_path,
    sum_messages,
    writing_of,
)
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.model_profile import Round, bare, is_layer, observed
from pyg_distcomm.plan.plans import Plan, Plans
from pyg_distcomm.plan.traffic import Array, CutEdges
from pyg_distcomm.plan.training import (
    LayerShape,
    ProductShape,
    Training,
    layer_called,
)

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
        coded: whether the relation's link codes what is a product.
    """

    conv: Module
    width: int
    still: bool
    flows: bool
    rounds: list[Round] = field(default_factory=list)
    out: int = 0
    against: bool = False
    read: bool = False
    coded: bool = True


@dataclass(frozen=True, eq=False)
class _RecordingRelation(LocalGraph):
    """Records which rows of one edge type more ranks would exchange."""

    visit: _HeteroVisit
    kind: EdgeType

    def with_ghosts(self, x: Tensor, link: Link | None = None) -> Tensor:
        """Records own rows `x`, and their gradients when they come."""
        return self.visit.note(self.kind, x, link, home=False)

    def with_constant_ghosts(self, x: Any, constants: ProductCache) -> Tensor | None:
        """Records that the rows of features are kept."""
        return self.visit.note_kept(self.kind, x)

    def scatter_to_owners(
        self, ghosts: Tensor, own: Tensor, link: Link | None = None
    ) -> Tensor:
        """Records that sums for ghosts, of which there are none, would be sent."""
        return self.visit.note(self.kind, own, link, home=True)


class _HeteroVisit:
    """Records what a run of a model exchanges by edge type, and what it sums."""

    def __init__(self) -> None:
        self.calls: list[tuple[EdgeType, _RelationCall]] = []
        self.begun = self.calls[:]  # in the first epoch
        self.sums: list[str] = []
        self.stack: list[Module] = []
        self.now: dict[EdgeType, _RelationCall] = {}
        self.features: list[Any] = []
        self.kinds: dict[int, EdgeType] = {}
        self.keeps = False  # whether features are the same in every epoch
        self.links: dict[int, DryCalls] = {}

    def clear(self) -> None:
        """Forgets what was recorded."""
        self.calls = []
        self.sums.clear()
        for calls in self.links.values():
            calls.made.clear()

    def link(self, kind: EdgeType, link: LinkPolicy) -> LinkPolicy:
        """Returns what stands in for the link of one edge type."""

        def tell(coded: bool) -> None:
            if kind in self.now:
                self.now[kind].coded = coded

        calls = self.links.setdefault(id(link), DryCalls(link.exact_last))
        return DryLink(link, calls, tell)

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

    def note(self, kind: EdgeType, x: Tensor, link: Any, *, home: bool) -> Tensor:
        """Records rows that would be exchanged, and their gradients when they come."""
        call, coded = self._call_of(kind, x), isinstance(link, DryExchange)
        coded = coded and link.coded
        call.rounds.append(Round(x[0].numel(), home, coded=coded))
        if not x.requires_grad:
            return x
        x = x.view_as(x)
        back = Round(x[0].numel(), not home, coded=coded)
        x.register_hook(lambda grad: call.rounds.append(back))
        return x

    def note_kept(self, kind: EdgeType, x: Any) -> Tensor | None:
        """Records that rows of features are kept; returns None for what is computed."""
        if not (self.keeps and any(x is each for each in self.features)):
            return None
        rows: Tensor = x.to_local()
        kept = Round(rows[0].numel(), False, kept=True)
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
    codecs: Sequence[Any] = (),
) -> Plans:
    """Plans training on a HeteroData, where rows travel between all ranks, by each link.

    Args:
        cutting: the whole graph, the number of ranks, how it is cut, and the seed.
        read: widths, model, layers, inputs and dtype, see `plan`. A model takes x_dict and
            edge_index_dict, or attributes of the graph by the names of its arguments, as
            edge_attr_dict, and returns rows of the type that is trained on, or a dictionary
            with them. Widths are those of `HeteroConv`s of SAGEConv ("sage") or GraphConv
            ("halo"), hidden layers and output, as features have their own.
        machine, memory_limit: see `plan`.
        codecs: links beside the exact one, as `plan` takes them, or dictionaries of them by
            edge type, as `pdc.partition(link=...)` does.

    Raises:
        ValueError: for a model that does not run on two nodes of each type.
    """
    (data, size, *_), (widths, model, layers, inputs, dtype) = cutting, read
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
    owners = owners_of_types(*cutting)
    dry = _DryRun(model, data, inputs)
    priced = _Priced(data, owners, machine, dry, memory_limit)
    links = links_by_type(codecs, data.edge_types)  # refuses what is none
    found = [priced.plan(*dry.visited({}))]
    for name, given, by_type in links:
        try:
            found.append(priced.plan(*dry.visited(by_type), by_type, name, given))
        except ValueError as error:  # the link fits no layer, or no relation
            how = {"codec": name, "link": given}
            found.append(Plan((size, 1, 1), reason=str(error), **how))
    found.sort(key=lambda one: (one.seconds, one.bytes, not one.exact))
    words = (
        f"{data.num_nodes:,} nodes of {len(data.node_types)} types, "
        f"{data.num_edges:,} edges of {len(data.edge_types)}, {size} ranks"
    )
    ranked = tuple(one for one in found if one.reason is None)
    refused = tuple(one for one in found if one.reason is not None)
    return Plans(ranked, refused, (), words, machine, owners)


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
        for place, layer in enumerate(self.layers):
            if place:
                x_dict = {name: x.relu() for name, x in x_dict.items()}
            x_dict = layer(x_dict, edge_index_dict)
        return x_dict


def owners_of_types(data: HeteroData, size: int, method: Any, seed: int) -> Partition:
    """Returns who owns which node, of all types one after the other."""
    check_hetero(data)
    owners = method
    if not isinstance(method, Partition):
        owners = cut_hetero(data, size, method, seed)
    if owners.num_parts != size or owners.num_nodes != data.num_nodes:
        raise ValueError(
            f"{owners} does not fit {data.num_nodes} nodes of all types on {size} ranks"
        )
    return owners


class _DryRun:
    """Runs copies of a model on two nodes of each type, and one rank.

    Args:
        model, inputs: see `plan`.
        data: the whole graph.
    """

    def __init__(self, model: Module, data: HeteroData, inputs: str) -> None:
        floats = [p for p in model.parameters() if not torch.nn.parameter.is_lazy(p)]
        floats = [p for p in floats if p.is_floating_point()]
        self.dtype = floats[0].dtype if floats else torch.get_default_dtype()
        self.model, self.data, self.inputs = model, data, inputs

    def visited(self, links: Mapping[EdgeType, Coding]) -> tuple[_HeteroVisit, int]:
        """Runs three epochs over links; returns the last, and how many numbers it trains."""
        try:
            grad, random = torch.enable_grad(), torch.random.fork_rng(devices=[])
            with torch.inference_mode(False), grad, random:
                return self._visited(copy.deepcopy(self.model).cpu().train(), links)
        except Exception as error:
            if links and isinstance(error, ValueError):  # which ranks would raise, too
                raise
            raise ValueError(
                f"the model does not run on two nodes of each type ({type(error).__name__}: "
                f"{error}); rows that it learns are planned as features, inputs='trained'"
            ) from None

    def _visited(
        self, model: Module, links: Mapping[EdgeType, Coding]
    ) -> tuple[_HeteroVisit, int]:
        visit, data = _HeteroVisit(), self.data
        mesh = observed(visit.note_sum)
        share = cut_data(_two_of_each(data, self.dtype), mesh, "block")
        given = _arguments(model, share)
        model = convert(model)
        with torch.no_grad():  # lazy layers take their widths
            model(*given)
        for store in share.edge_stores:
            topology, kind = store.edge_index.topology, store._key
            here = {
                f.name: getattr(topology.locals, f.name) for f in fields(LocalGraph)
            }
            topology.locals = _RecordingRelation(**here, visit=visit, kind=kind)
            topology.constants = ProductCache()  # of what that pass has seen
            visit.kinds[id(topology)] = kind
            if kind in links:
                topology.link = visit.link(kind, links[kind].link)
        for store in share.node_stores:
            if "x" in store:
                store.x = store.x.requires_grad_(self.inputs == "trained")
                visit.features.append(store.x)
        visit.keeps = self.inputs == "constant"
        visit.watch(model)
        for epoch in range(3):  # by the third what is kept is there
            visit.clear()
            model.zero_grad()
            rows = _trained_on(model(*_arguments(model, share)), data)
            torch.stack([row.to_local().sum() for row in rows]).sum().backward()
            if epoch == 0:
                visit.begun = visit.calls
                for calls in visit.links.values():
                    calls.end_first()
        return visit, sum(p.numel() for p in model.parameters() if p.grad is not None)


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
    """Prices what dry runs have recorded, on a graph and its owners."""

    def __init__(
        self,
        data: HeteroData,
        owners: Partition,
        machine: Machine,
        dry: _DryRun,
        memory_limit: float | None,
    ) -> None:
        self.data, self.owners, self.machine = data, owners, machine
        self.item, self.inputs, self.size = (
            dry.dtype.itemsize,
            dry.inputs,
            owners.num_parts,
        )
        self.dtype = dry.dtype
        self.limit = machine.memory if memory_limit is None else memory_limit
        ranges = types_of(data, owners).ranges("node")
        self.owner = {k: owners.owner[begin:end] for k, (begin, end) in ranges.items()}
        self._cuts: dict[EdgeType, CutEdges] = {}

    def plan(
        self,
        visit: _HeteroVisit,
        trained: int,
        links: Mapping[EdgeType, Coding] | None = None,
        name: str = "plain",
        link: Any = None,
    ) -> Plan:
        """Returns the plan of one link; none are the exact one."""
        grid, links = (self.size, 1, 1), links or {}
        exchange, messages, held = np.zeros((3, *grid), np.int64)
        by_type: dict[str, int] = {}
        orders: list[str] = []
        early, clock = np.zeros(2, np.int64), None
        for kind in dict.fromkeys(kind for kind, _ in visit.calls):
            calls = [call for other, call in visit.calls if other == kind]
            found = self._relation(kind, calls, links.get(kind), clock)
            clock = found.clock
            exchange = exchange + found.came
            messages, held = messages + found.left, held + found.room
            early = early + found.early
            if kind in links and links[kind].early(0) is None:  # exact, all its calls
                calls = [call for other, call in visit.begun if other == kind]
                first = self._relation(kind, calls, None, None)
                early[0] += first.early[0] - found.early[0]
            by_type[" ".join(kind)] = int(found.came.sum())
            orders += found.orders
        shape = LayerShape("halo", 1, 1)
        training = Training((shape,), (trained,), self.inputs, self.item)
        groups = training.sums(self.size)
        agreements = sum(calls.agreements for calls in visit.links.values())
        if agreements and self.size > 1:
            groups["agreement"] = [ring_words(1, self.size)] * agreements
        sums = {name: sum(each) for name, each in groups.items()}
        wire, waited = self.machine.sum_wire(), self.machine.epoch
        for each in (n for group in groups.values() for n in group):
            waited += float(wire.seconds(sum_messages(self.size), each, each))
        often = [coding.synchronous for coding in links.values()]
        products = 0.0 if clock is None else clock.seconds(max(often, default=1.0))
        by_rank = tuple(int(n) + sum(sums.values()) for n in exchange.ravel())
        missing = "; ".join(
            f"sums over nodes of {n}" for n in dict.fromkeys(visit.sums)
        )
        rest = self.size * sum(sums.values())
        plan = Plan(
            grid,
            tuple(dict.fromkeys(orders)),
            codec=name,
            bytes_by_rank=by_rank,
            exchange_bytes=int(exchange.max()),
            sum_bytes=sums,
            total_bytes=sum(by_rank),
            messages=int(messages.max()),
            seconds=waited + products,
            memory=round(float(held.max())) + 4 * self.item * trained,
            exact=all(coding.exact for coding in links.values()),
            sized=all(coding.sized for coding in links.values()),
            link=link,
            missing=missing,
            relation_bytes=by_type,
            early_bytes=tuple(int(n) + rest for n in early),
        )
        if self.limit is not None and plan.memory > self.limit:
            need = f"needs {plan.memory:,} bytes a rank of {self.limit:,}"
            plan = replace(plan, reason=need)
        return plan

    def _cut(self, kind: EdgeType) -> CutEdges:
        """Returns the edges of one type, over the nodes of its two types as one."""
        if kind not in self._cuts:
            source, _, target = kind
            edges, owner = self.data[kind].edge_index.cpu().long(), self.owner[target]
            if source != target:
                shift = torch.tensor([[0], [len(self.owner[source])]])
                edges, owner = edges + shift, torch.cat([self.owner[source], owner])
            owners = Partition.from_owner(owner, self.size)
            self._cuts[kind] = CutEdges.of(edges, owners)
        return self._cuts[kind]

    def _relation(
        self,
        kind: EdgeType,
        calls: list[_RelationCall],
        coding: Coding | None,
        clock: EpochClock | None,
    ) -> _RelationCost:
        """Prices all calls of one edge type over its link."""
        source, _, target = kind
        cut, grid, ordering = self._cut(kind), (self.size, 1, 1), MultiplyOrder()
        shapes = []
        for call in calls:
            call.out = call.out or call.width
            shape = replace(layer_called(call), coded=call.coded)
            if source != target:  # rows travel, whatever the layer
                shape = replace(shape, kind="halo", rounds=tuple(call.rounds))
            shapes.append(shape)
        training = Training(tuple(shapes), (), self.inputs, self.item)
        orders = training.orders(ordering)

        def products(**how: Any) -> list[ProductShape]:
            return [
                one
                for one in training.products(ordering, **how)
                if one.halo or not one.transposed or calls[one.layer].read
            ]

        flow, halo = cut.flow(grid, "auto", training.adds_loops), cut.halo_flow
        clock = clock or EpochClock(flow, self.machine, 0.0)

        def path(product: ProductShape, writing: Writing) -> ProductPath:
            if product.halo:
                return halo_path(halo, product, writing, grid)
            return product_path(flow, product, self.item, writing)

        came, left, kept = (np.zeros(grid, np.int64) for _ in range(3))
        steady, uses = products(), dict[Any, int]()
        for product in steady:
            writing = writing_of(coding, product, None, self.dtype)
            found = path(product, writing)
            came = came + found.received
            left = left + sum(move.messages for move in found.moves)
            clock.add(found, writing.late)
            if coding is not None and writing.codec is not None:
                kept = kept + link_bytes(found, writing, coding, product.transposed)
        early = [
            sum(
                int(path(one, writing_of(now, one, None, self.dtype)).received.sum())
                for one in products(uses=uses)
            )
            for now in (coding and coding.early(epoch) for epoch in range(2))
        ]
        room = memory((flow, halo), training, steady, orders, self.dtype) + kept
        room = room + kept_bytes(halo, training.kept_rows(ordering) * self.item, grid)
        return _RelationCost(came, left, room, np.array(early), orders, clock)


@dataclass(frozen=True, eq=False)
class _RelationCost:
    """What one edge type costs: bytes, messages, memory, first epochs, orders, seconds."""

    came: Array
    left: Array
    room: Array
    early: Array
    orders: tuple[str, ...]
    clock: EpochClock
