"""Plans training on the full graph of a HeteroData: the bytes of an epoch by edge type.

A copy of the model is run on one rank, forward and backward, on a few nodes of each type. This
records the exchanges of each edge type; their rows are then counted in the real graph.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves
from torch_geometric.data import HeteroData

from pyg_distcomm.comm.collectives import ring_words
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.partition_data import partition as cut_data
from pyg_distcomm.graph.product_cache import MultiplyOrder
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
    DryLink,
    links_by_type,
)
from pyg_distcomm.plan.cost import Cost, EpochClock, EpochProducts
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.model_profile import (
    LayerCall,
    Round,
    RunRecorder,
    bare,
    mark_kept,
    observing_mesh,
    telling,
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


@dataclass(eq=False)
class _HeteroCall:
    """Records one call of a layer: what it does with each edge type.

    Args:
        conv: the layer.
        kinds: the types of the edges that it is given.
        calls: its records.
    """

    conv: Module
    kinds: list[EdgeType]
    calls: dict[EdgeType, LayerCall] = field(default_factory=dict)


class _HeteroVisit(RunRecorder):
    """Records the exchanges of a run of a model by edge type, and its sums over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[EdgeType, LayerCall]] = []
        self.first_calls = self.calls  # in the first epoch
        self.kinds: dict[int, EdgeType] = {}  # by the rows of edges
        self.links: dict[int, DryCalls] = {}

    def clear(self) -> None:
        """Clears the records."""
        super().clear()
        self.calls = []
        for calls in self.links.values():
            calls.made.clear()

    def link(self, kind: EdgeType, link: LinkPolicy) -> LinkPolicy:
        """Returns the dry link that stands in for the link of one edge type."""

        def record(coded: bool) -> None:
            if self.now is not None and kind in self.now.calls:
                self.now.calls[kind].coded = coded

        calls = self.links.setdefault(id(link), DryCalls(link.exact_last))
        return DryLink(link, calls, record)

    def begin(
        self, layer: Module, args: tuple[Any, ...], kwargs: Any
    ) -> _HeteroCall | None:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DistEdgeIndex)]
        kinds = [self.kinds[id(x.edges)] for x in given if id(x.edges) in self.kinds]
        if not kinds:
            return None
        record = _HeteroCall(bare(layer), kinds)
        for kind in kinds:
            call = LayerCall(record.conv, 1, False, False)
            if len(kinds) == 1:
                call = self.called(layer, args[0] if args else kwargs["x"])
            call.read = False  # until a gradient comes
            record.calls[kind] = call
            self.calls.append((kind, call))
        return record

    def end(self, record: _HeteroCall | None, out: Any) -> None:
        if record is None or not isinstance(out, Tensor):  # of all relations
            return
        for call in record.calls.values():
            call.out = out.size(-1)
            if out.requires_grad:
                out.register_hook(lambda grad, call=call: setattr(call, "read", True))

    def note_rows(self, record: _HeteroCall, one: Round, edges: Rows | None) -> None:
        kind = self.kinds.get(id(edges))
        for each in record.kinds if kind is None else [kind]:  # all: one for each
            record.calls[each].rounds.append(one)

    def note_product(self, kind: EdgeType) -> None:
        """Records that a layer multiplies by the matrix of its edges."""
        self.now.calls[kind].multiplies = True


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
        ValueError: for a model that does not run on a few nodes of each type.
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
    """Runs copies of a model on a few nodes of each type, and one rank.

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
                f"the model does not run on a few nodes of each type ({type(error).__name__}: "
                f"{error}); rows that it learns are planned as features, inputs='trained'"
            ) from None

    def _visited(
        self, model: Module, links: Mapping[EdgeType, Coding]
    ) -> tuple[_HeteroVisit, int]:
        visit, data = _HeteroVisit(), self.data
        share, lazy = (
            cut_data(_few_of_each(data, self.dtype), mesh, "block")
            for mesh in (observing_mesh(visit.note), observing_mesh(visit.note))
        )
        model = convert(model)
        with torch.no_grad():  # lazy layers take their widths
            model(*_arguments(model, lazy))
        for store in share.edge_stores:
            topology, kind = store.edge_index.topology, store._key
            tell = partial(visit.note_product, kind)
            vars(topology)["operator"] = telling(topology.operator, tell)
            visit.kinds[id(topology.edges)] = kind
            if kind in links:
                topology.link = visit.link(kind, links[kind].link)
        visit.watch(model)
        epochs = [self._epoch(visit, model, share, k) for k in range(3)]
        visit.first_calls, visit.calls = epochs[:2]
        now, later = ([call for _, call in calls] for calls in epochs[1:])
        mark_kept(now, later)  # caches are filled by the third
        return visit, visit.summed

    def _epoch(
        self, visit: _HeteroVisit, model: Module, share: Any, epoch: int
    ) -> list[tuple[EdgeType, LayerCall]]:
        """Trains for one epoch, and returns the calls of layers."""
        visit.clear()
        model.zero_grad()
        for store in share.node_stores:
            if "x" in store:
                changing = self.inputs == "changing"
                x = store.x + 0 if changing else store.x
                store.x = x.requires_grad_(self.inputs == "trained")
        visit.features = [store.x for store in share.node_stores if "x" in store]
        rows = _loss_rows(model(*_arguments(model, share)), self.data)
        torch.stack([row.square().sum() for row in rows]).sum().backward()
        for calls in visit.links.values() if epoch == 0 else ():
            calls.end_first()
        return visit.calls


def _few_of_each(data: HeteroData, dtype: torch.dtype) -> HeteroData:
    """Returns a graph of a few nodes and edges of each type, with attributes as wide.

    No two types have as many, so that the number of rows tells their type.
    """
    small, number = HeteroData(), itertools.count(2)
    for store in data.node_stores:
        small[store._key].num_nodes = few = next(number)
        _copy_attributes(store, small[store._key], int(store.num_nodes), few, dtype)
    for store in data.edge_stores:
        (source, _, target), few = store._key, next(number)
        sides = (torch.arange(few) % small[end].num_nodes for end in (source, target))
        small[store._key].edge_index = torch.stack(list(sides))
        count = store.edge_index.size(1)
        _copy_attributes(store, small[store._key], count, few, dtype)
    return small


def _copy_attributes(
    store: Any, small: Any, count: int, few: int, dtype: torch.dtype
) -> None:
    for name, value in store.items():
        if name not in ("edge_index", "num_nodes") and isinstance(value, Tensor):
            if value.dim() and len(value) == count:
                kind = dtype if value.is_floating_point() else value.dtype
                small[name] = torch.zeros(few, *value.shape[1:], dtype=kind)


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
        norms = tuple(visit.sums)
        training = Training((shape,), (trained,), self.inputs, self.item, norms)
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
            missing="; ".join(dict.fromkeys(visit.missing)),
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
        prices = EpochProducts((flow, cut.halo_flow), training, self.dtype, last=None)
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
