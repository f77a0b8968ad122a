"""Plans training on the full graph of a HeteroData: the bytes of an epoch by edge type.

A copy of the model is run on two nodes of each type and one rank, forward and backward, which
records what each edge type would exchange. The rows are then counted in the real graph.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    links_by_type,
)
from pyg_distcomm.plan.cost import Cost, EpochClock, EpochProducts
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.model_profile import (
    RecordingGraph,
    Round,
    RunRecorder,
    Visited,
    bare,
    is_layer,
    observed,
)
from pyg_distcomm.plan.plans import Plan, Plans
from pyg_distcomm.plan.traffic import Array, CutEdges
from pyg_distcomm.plan.training import (
    LayerShape,
    Training,
    layer_called,
)

KINDS = {"sage": pyg.SAGEConv, "halo": pyg.GraphConv}


class _HeteroVisit(RunRecorder):
    """Records what a run of a model exchanges by edge type, and what it sums."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[EdgeType, Visited]] = []
        self.begun = self.calls  # in the first epoch
        self.now: dict[EdgeType, Visited] = {}
        self.kinds: dict[int, EdgeType] = {}
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

    def begin(self, layer: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        self.now = {}
        edges = [a for a in (*args, *kwargs.values()) if isinstance(a, DistEdgeIndex)]
        kind = self.kinds.get(id(edges[0].topology)) if edges else None
        if kind is not None:
            self._call(kind, layer, args[0] if args else kwargs["x"])

    def _call(self, kind: EdgeType, layer: Module, x: Any) -> Visited:
        self.now[kind] = call = self.called(layer, x)
        call.read = False  # until a gradient comes
        self.calls.append((kind, call))
        return call

    def end(self, out: Any) -> None:
        if not isinstance(out, Tensor):  # a dictionary, of a layer of all relations
            return
        for call in self.now.values():
            call.out = out.size(-1)
            if out.requires_grad:
                out.register_hook(lambda grad, call=call: setattr(call, "read", True))

    def note(self, kind: EdgeType, x: Tensor, link: Any, home: bool) -> Tensor:
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
        if self.keeps and self.has(x):
            return self.keep(self._call_of(kind, x), x)
        return None

    def _call_of(self, kind: EdgeType, x: Tensor) -> Visited:
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
    found = [priced.plan(*dry.visited({}), {})]
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
        """Runs three epochs over links; returns the last, and how many numbers it trains.

        Raises:
            ValueError: if that does not work.
        """
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
            notes = partial(visit.note, kind), partial(visit.note_kept, kind)
            RecordingGraph.record(topology, *notes)
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
        links: Mapping[EdgeType, Coding],
        name: str = "plain",
        link: Any = None,
    ) -> Plan:
        """Returns the plan of one link; none are the exact one."""
        grid, by_type, orders = (self.size, 1, 1), dict[str, int](), list[str]()
        clock = EpochClock(grid, self.machine, self.machine.epoch)
        exchange, messages, held = np.zeros((3, *grid), np.int64)
        early = np.zeros(2, np.int64)
        for kind in dict.fromkeys(kind for kind, _ in visit.calls):
            calls = [call for other, call in visit.calls if other == kind]
            found = self._relation(kind, calls, links.get(kind), clock)
            exchange = exchange + found.came
            messages, held = messages + found.left, held + found.room
            early += found.early
            if kind in links and links[kind].early(0) is None:  # exact, all its calls
                calls = [call for other, call in visit.begun if other == kind]
                aside = EpochClock(grid, self.machine, 0.0)
                first = self._relation(kind, calls, None, aside)
                early[0] += first.early[0] - found.early[0]
            by_type[" ".join(kind)] = int(found.came.sum())
            orders += found.orders
        shape = LayerShape("halo", 1, 1)
        training = Training((shape,), (trained,), self.inputs, self.item)
        groups = training.sums(self.size)
        agreements = sum(calls.agreements for calls in visit.links.values())
        if agreements and self.size > 1:
            groups["agreement"] = [ring_words(1, self.size)] * agreements
        clock.add_sums(groups, self.size)
        cost = Cost(
            exchange,
            {name: sum(each) for name, each in groups.items()},
            messages,
            clock.seconds(max((c.synchronous for c in links.values()), default=1.0)),
            held + 4 * self.item * trained,
            (int(early[0]), int(early[1])),
        )
        plan = Plan(
            grid,
            tuple(dict.fromkeys(orders)),
            codec=name,
            **cost.figures(self.size),
            exact=all(coding.exact for coding in links.values()),
            sized=all(coding.sized for coding in links.values()),
            link=link,
            missing="; ".join(
                f"sums over nodes of {n}" for n in dict.fromkeys(visit.sums)
            ),
            relation_bytes=by_type,
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
        calls: list[Visited],
        coding: Coding | None,
        clock: EpochClock,
    ) -> _RelationCost:
        """Prices all calls of one edge type over its link."""
        source, _, target = kind
        cut, ordering, shapes = self._cut(kind), MultiplyOrder(), []
        for call in calls:
            call.out = call.out or call.width
            shape = replace(layer_called(call), coded=call.coded, read=call.read)
            if source != target:  # rows travel, whatever the layer
                shape = replace(shape, kind="halo", rounds=tuple(call.rounds))
            shapes.append(shape)
        training = Training(tuple(shapes), (), self.inputs, self.item)
        flow = cut.flow(clock.grid, "auto", training.adds_loops)
        prices = EpochProducts(
            (flow, flow, cut.halo_flow), training, self.dtype, last=None
        )
        products, orders = training.products(ordering), training.orders(ordering)
        came, left, kept = prices.moved(products, coding, clock)
        room = prices.memory(products, orders, training.kept_rows(ordering)) + kept
        early = np.array(prices.early(ordering, coding))
        return _RelationCost(came, left, room, early, orders)


@dataclass(frozen=True, eq=False)
class _RelationCost:
    """What one edge type costs: bytes, messages, memory, first epochs, and orders."""

    came: Array
    left: Array
    room: Array
    early: Array
    orders: tuple[str, ...]
