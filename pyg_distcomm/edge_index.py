"""DistEdgeIndex: an edge_index whose edges are spread over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_distcomm import indexing
from pyg_distcomm.constants import Constants, Ordering
from pyg_distcomm.exchange.policy import LinkPolicy
from pyg_distcomm.ops.cover import check_halo
from pyg_distcomm.rows import Rows
from pyg_distcomm.rowwise import FACTS, base_name
from pyg_distcomm.tensor import DistTensor
from pyg_distcomm.topology import Topology


class DistEdgeIndex(torch.Tensor):
    """The edges this rank owns, `[2, e_i]`, as node ids of the original graph.

    An edge lives with the owner of its target, in original edge order, and so do its
    attributes. Like PyG's `EdgeIndex` it remembers what is derived from it: the halo,
    the blocks of the grid, the GCN-normalised operator. Everything is planned at the
    first use, collectively, and dropped with the object.

    The rule: *a layer of this package may use it; anything else gets this rank's edges
    from `.to_local()`, or all of them from `.full_tensor()`, or is refused.*
    `edge_index[0]` and `edge_index[1]` are DistTensors of node ids, one row per edge,
    so that `z[edge_index[0]]` fetches the rows of the sources.
    """

    topology: Topology

    @staticmethod
    def build(
        edge_index: Tensor,
        nodes: Rows,
        edges: Rows,
        *,
        oblivious: bool = False,
        sources: Rows | None = None,
    ) -> DistEdgeIndex:
        """Makes this rank's part from its edges, in global ids.

        Args:
            edge_index: `[2, e_i]`, targets owned by this rank, in original order.
            nodes: which nodes are here.
            edges: which edges are here.
            oblivious: exchange whole blocks (all_gather, reduce_scatter), as the
                sparsity-oblivious algorithms of [Tripathy20] do.
            sources: which source nodes are here, if they are of a type of their own;
                such edges can be sampled from, and no layer takes them yet.
        """
        local = edge_index.long().cpu()
        topology = Topology(
            local[0],
            local[1],
            nodes,
            edges,
            "blocks" if oblivious else "auto",
            sources=sources,
        )
        return _wrap(edge_index, topology)

    @staticmethod
    def of(edge_index: Tensor, topology: Topology) -> DistEdgeIndex:
        """Returns edges `[2, e_i]`, in global ids, of which a topology is known."""
        return _wrap(edge_index, topology)

    @property
    def nodes(self) -> Rows:
        """Which nodes are on this rank."""
        return self.topology.nodes

    @property
    def sources(self) -> Rows:
        """Which source nodes are on this rank; `nodes`, unless they have a type."""
        sources = self.topology.sources
        return self.nodes if sources is None else sources

    @property
    def edges(self) -> Rows:
        """Which edges are on this rank."""
        return self.topology.edges

    @property
    def num_nodes_global(self) -> int:
        """The number of nodes of the whole graph."""
        return self.nodes.total

    @property
    def num_edges_global(self) -> int:
        """The number of edges of the whole graph."""
        return self.edges.total

    def matmul(  # type: ignore[override]
        self, x: DistTensor, edge_weight: Any = None
    ) -> DistTensor:
        """Returns, for each own node, the (weighted) sum of `x` over its in-edges.

            z_i = sum over edges e = (j, i) of w_e x_j

        Differentiable in `x` `[n_i, f]` and `edge_weight` `[e_i]`.
        """
        local = self.check_nodes(x, "x")
        weight = self.check_edges(edge_weight, "edge_weight")
        link, wrap = self.topology.link, None
        if link is not None:
            # copies with another link share what is kept, by which they are known
            who, train = self.topology.constants, torch.is_grad_enabled()
            call = link.begin(who, self.nodes, train, name="matmul")
            wrap = None if call is None else call.wrap
        return DistTensor.wrap(self.topology.sum(local, weight, wrap), self.nodes)

    def check_nodes(self, x: Any, name: str) -> Tensor:
        """Returns the local rows of a node tensor, or says what it should have been."""
        self.topology.check_one_kind()
        if not isinstance(x, DistTensor):
            raise TypeError(
                f"{name} is {_kind(x)}, but the edge_index is spread over ranks; pass "
                "data.x of pdc.partition (a DistTensor), or something computed from it"
            )
        if not x.rows.same_as(self.nodes):
            raise ValueError(
                f"{name} has {x.rows}, but the edge_index has nodes {self.nodes}; give "
                "the layer one row for each node"
            )
        return x.to_local()

    def check_edges(self, value: Any, name: str) -> Tensor | None:
        """Returns the local rows of an edge tensor (None stays None)."""
        if value is None:
            return None
        if isinstance(value, DistTensor):
            if not value.rows.same_as(self.edges):
                raise ValueError(
                    f"{name} has {value.rows}, but the edge_index has {self.edges}"
                )
            return value.to_local()
        if isinstance(value, Tensor) and value.size(0) == len(self.edges):
            return value
        raise TypeError(
            f"{name} is {_kind(value)}, which has not one row for each of this rank's "
            f"{len(self.edges)} edges; make it part of the Data before pdc.partition"
        )

    def to_local(self) -> Tensor:
        """Returns this rank's edges as an ordinary tensor of global node ids."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def full_tensor(self) -> Tensor:
        """Returns all edges in original order, on every rank; collective."""
        return indexing.gather_all(self.to_local().t().contiguous(), self.edges).t()

    def oblivious(self) -> DistEdgeIndex:
        """Returns the same edges with sparsity-oblivious exchanges, for comparison."""
        return self.with_halo("blocks")

    def with_halo(self, halo: str = "auto") -> DistEdgeIndex:
        """Returns the same edges, with products that exchange something else.

        All give the same sums. Words are fewest with "cover"; "auto" takes whole blocks
        where they have at most a sixteenth more words than that. Products with weights of
        edges that are learnt send rows. Layers other than products always do.

        Args:
            halo: "rows" sends the rows of features that other ranks need
                ([Mukhopadhyay24]), "sums" partial sums of rows in their place, "cover"
                the fewest of both, pair of ranks by pair ([Zhuang25]), "blocks" whole
                blocks, as sparsity-oblivious algorithms do ([Tripathy20]), "auto" the
                cheaper one of the last two.
        """
        twin = copy.copy(self.topology)
        twin.halo, twin.constants, twin._plans = check_halo(halo), Constants(), {}
        twin.__dict__.pop("reversed", None)
        return _wrap(self.to_local(), twin)

    def with_ordering(
        self, order: str = "auto", *, keep_inputs: bool = True
    ) -> DistEdgeIndex:
        """Returns the same edges, with another way for layers to take A X W apart.

        Plans are shared, products that are kept are not.

        Args:
            order: "first" is (A X) W, "last" is A (X W), "auto" the one that exchanges
                less, forward and backward together.
            keep_inputs: whether the product with an input that does not change (a leaf
                without gradient, the same tensor at the same version) is kept from its
                second use on. It takes the input's memory once more. Not where hooks
                look after saved tensors, as in torch's checkpointing. Such an input may
                change in place, on all ranks or on none; writes to `x.data`, or through
                numpy, are not noticed.
        """
        twin = copy.copy(self.topology)
        twin.ordering, twin.constants = Ordering(order, keep_inputs), Constants()
        return _wrap(self.to_local(), twin)

    def with_link(self, link: LinkPolicy | None) -> DistEdgeIndex:
        """Returns the same edges, with rows of layers that travel by another link.

        Plans and kept products are shared, which are exact. Layers with a link of their own
        go by that.

        Args:
            link: a `LinkPolicy`, as of `pdc.VARCO(...)`; None is exact.
        """
        if link is not None and not isinstance(link, LinkPolicy):
            raise TypeError(
                "link must be a LinkPolicy, such as pdc.Sylvie() or pdc.VARCO(epochs), or "
                f"None for the exact one, got {link!r}"
            )
        twin = copy.copy(self.topology)
        twin.link = link
        return _wrap(self.to_local(), twin)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Lets facts and copies through; refuses what would need other ranks' edges."""
        name = base_name(func)
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("requires_grad=", "grad"):  # what checkpointing asks of inputs
                return func(*args, **(kwargs or {}))
            if name in FACTS and name not in ("new_zeros", "hash"):
                return func(*args, **(kwargs or {}))
            if name in _COPIES and isinstance(args[0], DistEdgeIndex):
                return _moved(args[0], func(*args, **(kwargs or {})))
            if name in FACTS:
                return func(*args, **(kwargs or {}))
        raise TypeError(
            f"{name}() of a DistEdgeIndex would need edges of other ranks; use "
            ".to_local() for this rank's edges (global ids) or .full_tensor() for all"
        )

    def __getitem__(self, key: Any) -> Any:
        if key in (0, 1, -1, -2) and isinstance(key, int):
            return DistTensor.wrap(self.to_local()[key], self.edges)
        raise TypeError(
            f"edge_index[{key!r}] of a DistEdgeIndex: only [0] (sources) and [1] "
            "(targets) are defined; use .to_local() or .full_tensor() for the rest"
        )

    def __iter__(self) -> Iterator[DistTensor]:
        return iter((self[0], self[1]))

    def __deepcopy__(self, memo: dict) -> DistEdgeIndex:
        return _wrap(self.to_local().clone(), self.topology)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_local().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"DistEdgeIndex({self.to_local()}, {len(self.edges)} of "
            f"{self.num_edges_global} edges, {len(self.nodes)} of "
            f"{self.num_nodes_global} nodes, rank {self.nodes.mesh.rank}/"
            f"{self.nodes.mesh.size})"
        )


_COPIES = frozenset("to cpu cuda clone detach contiguous long pin_memory".split())


def _wrap(local: Tensor, topology: Topology) -> DistEdgeIndex:
    out = local.as_subclass(DistEdgeIndex)
    out.topology = topology
    return out


def _moved(before: DistEdgeIndex, after: Tensor) -> DistEdgeIndex:
    if isinstance(after, DistEdgeIndex):
        return after
    return _wrap(after, before.topology.to(after.device))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a plain tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
