"""Plans training on the full graph of a HeteroData: the bytes of an epoch by edge type.

A copy of the model is run on one rank, forward and backward, on two nodes of each type. This
records the exchanges of each edge type; their rows are then counted in the real graph.
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
from pyg_distcomm.graph.partition_data import partition as cut_data
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
    LayerCall,
    RecordingGraph,
    Round,
    RunRecorder,
    bare,
    is_layer,
    observing_mesh,
)
from pyg_distcomm.plan.plans import Plan, Plans
from pyg_distcomm.plan.traffic import Array, CutEdges
from pyg_distcomm.plan.training import (
    LayerShape,
    Training,
    layer_from_call,
)
from pyg_distcomm.sharded.edges import DistEdgeIndex

KINDS = {"sage": pyg.SAGEConv, "halo": pyg.GraphConv}


class _HeteroVisit(RunRecorder):
    """Records the exchanges of a run of a model by edge type, and its sums over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[EdgeType, LayerCall]] = []
        self.first_calls = self.calls  # in the first epoch
        self.current: dict[EdgeType, LayerCall] = {}
        self.kinds: dict[int, EdgeType] = {}
        self.links: dict[int, DryCalls] = {}

    def clear(self) -> None:
        """Clears the records."""
        self.calls = []
        self.sums.clear()
        for calls in self.links.values():
            calls.made.clear()

    def link(self, kind: EdgeType, link: LinkPolicy) -> LinkPolicy:
        """Returns the dry link that stands in for the link of one edge type."""

        def record(coded: bool) -> None:
            if kind in self.current:
                self.current[kind].coded = coded

        calls = self.links.setdefault(id(link), DryCalls(link.exact_last))
        return DryLink(link, calls, record)

    def begin(self, layer: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        self.current = {}
        edges = [a for a in (*args, *kwargs.values()) if isinstance(a, DistEdgeIndex)]
        kind = self.kinds.get(id(edges[0].topology)) if edges else None
        if kind is not None:
            self._record_call(kind, layer, args[0] if args else kwargs["x"])

    def _record_call(self, kind: EdgeType, layer: Module, x: Any) -> LayerCall:
        self.current[kind] = call = self.called(layer, x)
        call.read = False  # until a gradient comes
        self.calls.append((kind, call))
        return call

    def end(self, out: Any) -> None:
        if not isinstance(out, Tensor):  # a dictionary, of a layer of all relations
            return
        for call in self.current.values():
            call.out = out.size(-1)
            if out.requires_grad:
                out.register_hook(lambda grad, call=call: setattr(call, "read", True))

    def note(self, kind: EdgeType, x: Tensor, link: Any, to_owners: bool) -> Tensor:
        """Records an exchange of rows, and in the backward pass that of their gradients."""
        call, coded = self._current_call(kind, x), isinstance(link, DryExchange)
        coded = coded and link.coded
        call.rounds.append(Round(x[0].numel(), to_owners, coded=coded))
        if not x.requires_grad:
            return x
        x = x.view_as(x)
        backward_round = Round(x[0].numel(), not to_owners, coded=coded)
        x.register_hook(lambda grad: call.rounds.append(backward_round))
        return x

    def note_kept(self, kind: EdgeType, x: Any) -> Tensor | None:
        """Records that rows of features are cached; returns None for other rows."""
        if self.keeps and self.is_feature(x):
            return self.keep(self._current_call(kind, x), x)
        return None

    def _current_call(self, kind: EdgeType, x: Tensor) -> LayerCall:
        layer = next(filter(is_layer, self.stack))
        return (
            self.current[kind]
            if kind in self.current
            else self._record_call(kind, layer, x)
        )

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
    """Plans training on a HeteroData over each link; rows travel on (P, 1, 1).

    Args:
        cutting: the whole graph, the number of ranks, the partition, and the seed.
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
    priced = _HeteroCost(data, owners, machine, dry, memory_limit)
    links = links_by_type(codecs, data.edge_types)  # raises for values that are no link
    found = [priced.plan(*dry.visited({}), {})]
    for name, given, by_type in links:
        try:
            found.append(priced.plan(*dry.visited(by_type), by_type, name, given))
        except ValueError as error:  # the link fits no layer, or no relation
            how = {"codec": name, "link": given}
            found.append(Plan((size, 1, 1), reason=str(error), **how))
    found.sort(key=lambda plan: (plan.seconds, plan.bytes, not plan.exact))
    words = (
        f"{data.num_nodes:,} nodes of {len(data.node_types)} types, "
        f"{data.num_edges:,} edges of {len(data.edge_types)}, {size} ranks"
    )
    ranked = tuple(plan for plan in found if plan.reason is None)
    refused = tuple(plan for plan in found if plan.reason is not None)
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
    """Returns the owners of the nodes of all types, type after type."""
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
        """Runs three epochs over links; returns the records, and the number of parameters.

        Raises:
            ValueError: if the model does not run.
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
        mesh = observing_mesh(visit.note_sum)
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
        for epoch in range(3):  # caches are filled by the third
            visit.clear()
            model.zero_grad()
            rows = _loss_rows(model(*_arguments(model, share)), data)
            torch.stack([row.to_local().sum() for row in rows]).sum().backward()
            if epoch == 0:
                visit.first_calls = visit.calls
                for calls in visit.links.values():
                    calls.end_first()
        return visit, sum(p.numel() for p in model.parameters() if p.grad is not None)


def _two_of_each(data: HeteroData, dtype: torch.dtype) -> HeteroData:
    """Returns a graph of two nodes and two edges of each type, with attributes as wide."""
    small = HeteroData()
    for store in data.node_stores:
        small[store._key].num_nodes = 2
        _copy_attributes(store, small[store._key], int(store.num_nodes), dtype)
    for store in data.edge_stores:
        small[store._key].edge_index = torch.tensor([[0, 1], [1, 0]])
        _copy_attributes(store, small[store._key], store.edge_index.size(1), dtype)
    return small


def _copy_attributes(store: Any, small: Any, count: int, dtype: torch.dtype) -> None:
    for name, value in store.items():
        if name not in ("edge_index", "num_nodes") and isinstance(value, Tensor):
            if value.dim() and len(value) == count:
                kind = dtype if value.is_floating_point() else value.dtype
                small[name] = torch.zeros(2, *value.shape[1:], dtype=kind)


def _arguments(model: Module, data: HeteroData) -> list[Any]:
    """Returns the arguments of a model's forward, by their names."""
    found: list[Any] = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            break
        attribute = name.removesuffix("_dict")
        if not any(attribute in store for store in data.stores):
            attribute = ("x", "edge_index", attribute)[min(len(found), 2)]
        found.append(data.collect(attribute))
    return found


def _loss_rows(out: Any, data: HeteroData) -> list[Any]:
    """Returns the output rows that a loss reads: of types with training nodes, or labels."""
    if not isinstance(out, dict):
        return [out]
    for name in ("train_mask", "y"):
        found = [x for key, x in out.items() if name in data[key] and x is not None]
        if found:
            return found
    return [x for x in out.values() if x is not None]


class _HeteroCost:
    """Prices the records of dry runs, on a graph and its owners."""

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
        """Returns the plan of one link; empty `links` are the exact one."""
        grid, by_type, orders = (self.size, 1, 1), dict[str, int](), list[str]()
        clock = EpochClock(grid, self.machine, self.machine.epoch)
        exchange, messages, held = np.zeros((3, *grid), np.int64)
        early = np.zeros(2, np.int64)
        for kind in dict.fromkeys(kind for kind, _ in visit.calls):
            calls = [call for other, call in visit.calls if other == kind]
            found = self._relation(kind, calls, links.get(kind), clock)
            exchange = exchange + found.received
            messages, held = messages + found.messages, held + found.memory
            early += found.early
            # exact, all its calls
            if kind in links and links[kind].in_epoch(0) is None:
                calls = [call for other, call in visit.first_calls if other == kind]
                aside = EpochClock(grid, self.machine, 0.0)
                first = self._relation(kind, calls, None, aside)
                early[0] += first.early[0] - found.early[0]
            by_type[" ".join(kind)] = int(found.received.sum())
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
        """Returns the edges of one type; nodes of its source and target type are joined."""
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
        calls: list[LayerCall],
        coding: Coding | None,
        clock: EpochClock,
    ) -> _RelationCost:
        """Prices all calls of one edge type over its link."""
        source, _, target = kind
        cut, ordering, shapes = self._cut(kind), MultiplyOrder(), []
        for call in calls:
            call.out = call.out or call.width
            shape = replace(layer_from_call(call), coded=call.coded, read=call.read)
            if source != target:  # rows travel, whatever the layer
                shape = replace(shape, kind="halo", rounds=tuple(call.rounds))
            shapes.append(shape)
        training = Training(tuple(shapes), (), self.inputs, self.item)
        flow = cut.flow(clock.grid, "auto", training.adds_loops)
        prices = EpochProducts(
            (flow, flow, cut.halo_flow), training, self.dtype, last=None
        )
        products, orders = training.products(ordering), training.orders(ordering)
        received, messages, kept = prices.totals(products, coding, clock)
        memory = prices.memory(products, orders, training.kept_rows(ordering)) + kept
        early = np.array(prices.early_bytes(ordering, coding))
        return _RelationCost(received, messages, memory, early, orders)


@dataclass(frozen=True, eq=False)
class _RelationCost:
    """The cost of one edge type: bytes, messages, memory, first epochs, and orders."""

    received: Array
    messages: Array
    memory: Array
    early: Array
    orders: tuple[str, ...]
