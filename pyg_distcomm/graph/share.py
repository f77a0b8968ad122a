"""Lists the attributes of a share in one order on all ranks, and plans the edges that it gets.

PyG lists `keys()`, `node_attrs()` and `edge_attrs()` from sets of strings, in an order of the
process's hash seed: ranks that sum one attribute after the other would mix them. So a share is
of a subclass of its class that lists attributes as they are stored. Its `__class__` is the
class itself, of which PyG asks the name, and makes new objects.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch_geometric.data.data import BaseData

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows, local_at
from pyg_distcomm.sharded.edges import DistEdgeIndex

Order = list[tuple[Any, list[str]]]  # the attributes of each store, by its key


class _Ordered(BaseData):
    """Lists attributes as they are stored, and makes its copies do so."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leaves out what the class of a script does with its subclasses."""

    def _given_class(self) -> type:
        above = type(self).__mro__
        return above[above.index(_Ordered) + 1]

    def keys(self) -> list[str]:
        """Returns the names of all attributes."""
        return self._as_stored(super().keys())

    def node_attrs(self) -> list[str]:
        """Returns the names of the attributes of nodes."""
        return self._as_stored(super().node_attrs())

    def edge_attrs(self) -> list[str]:
        """Returns the names of the attributes of edges."""
        return self._as_stored(super().edge_attrs())

    def _as_stored(self, names: Iterable[str]) -> list[str]:
        stored = dict.fromkeys(chain.from_iterable(self.stores))
        place = {name: i for i, name in enumerate(stored)}
        return sorted(names, key=lambda name: (place.get(name, len(place)), name))

    def __copy__(self) -> Any:
        return listed_in_order(super().__copy__())

    def __deepcopy__(self, memo: Any) -> Any:
        return listed_in_order(super().__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, args, *rest = super().__reduce_ex__(protocol)
        given = self._given_class()
        return make, tuple(given if one is type(self) else one for one in args), *rest

    __class__ = property(_given_class)  # type: ignore[assignment]


def listed_in_order(data: Any) -> Any:
    """Makes a graph list its attributes as they are stored, and returns it."""
    if isinstance(data, _Ordered):
        return data
    kind: Any = type(data)
    if kind not in PROCESS.ordered:
        names = ("__module__", "__qualname__", "__doc__")
        about = {name: getattr(kind, name) for name in names}
        make: Any = type(kind)
        PROCESS.ordered[kind] = make(kind.__name__, (_Ordered, kind), about)
    object.__setattr__(data, "__class__", PROCESS.ordered[kind])
    return data


def order_of_first_rank(data: Any, mesh: Mesh) -> Order:
    """Returns the types and attributes of rank 0's graph, in their order; collective."""
    stores = data.stores if isinstance(data, BaseData) else []
    order = [(store._key, list(store)) for store in stores]
    found: Order = collectives.broadcast_object(order, mesh.world)
    return found


def arranged(data: Any, order: Order) -> Any:
    """Returns a copy of a graph with its types and attributes in a given order, others last.

    Its lists are in this order.
    """
    if not isinstance(data, BaseData):
        return data
    data = listed_in_order(copy.copy(data))
    stores = {store._key: store for store in data.stores}
    for key, names in order:
        if key not in stores:
            continue
        if key is not None:
            typed = isinstance(key, tuple)
            kinds = data._edge_store_dict if typed else data._node_store_dict
            kinds[key] = kinds.pop(key)
        store = stores[key]
        for name in dict.fromkeys((*names, *store)):
            if name in store:
                store[name] = store.pop(name)
    return data


def with_planned_edges(data: Any) -> Any:
    """Returns a share whose edges are planned for, also those that an op returned.

    They are with the owners of their targets, and so are the attributes that have a row for
    each edge. Collective, if there are such edges.
    """
    out, rows = data, rows_of_types(data)
    for store in data.edge_stores:
        edges, key = store.get("edge_index"), store._key
        if not isinstance(edges, DistTensor) or isinstance(edges, DistEdgeIndex):
            continue
        typed = isinstance(key, tuple)
        source, target = (rows.get(key[0]), rows.get(key[2])) if typed else (None, None)
        target = target if typed else edges.rows.nodes or rows.get(key)
        if target is None or (typed and source is None):
            continue
        if edges.rows.nodes is target and not typed:
            made = DistEdgeIndex.of_ends(edges[0], edges[1])
        else:
            made = DistEdgeIndex.cut(edges.full_tensor(), target, source)
        out = copy.copy(data) if out is data else out
        mine = out[key] if typed else out
        for name, value in store.items():
            if is_rows(value) and store.is_edge_attr(name):
                local = local_at(value, made.edges, 0)
                mine[name] = DistTensor.wrap(local, made.edges)
        mine.edge_index = made
    return out


def rows_of_types(data: Any) -> dict[Any, Rows]:
    """Returns the rows of each node type that an attribute or edge type of the share has."""
    found: dict[Any, Rows] = {}
    for store in data.edge_stores:
        edges = store.get("edge_index", store.get("adj_t"))
        if isinstance(edges, DistEdgeIndex):
            key = store._key if isinstance(store._key, tuple) else (None, None, None)
            found |= {key[0]: edges.sources, key[2]: edges.nodes}
    for store in data.node_stores:
        for value in store.values():
            if is_rows(value) and value.rows.partition is not None:
                found.setdefault(store._key, value.rows)
    return found
