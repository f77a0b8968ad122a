"""Gives a tensor that is the edge_index of a graph what is known of its edges."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_distcomm.graph.topology import (
    MultiplyOrder,
    OperatorKind,
    ProductCache,
    Topology,
)
from pyg_distcomm.halo.policy import LinkPolicy, check_link
from pyg_distcomm.ops.grid_plan import check_halo
from pyg_distcomm.process import PROCESS

if TYPE_CHECKING:
    from pyg_distcomm.comm.rows import Rows


class EdgeMethods:
    """Adds methods of the edges of a graph, `[2, e]`, sharded by the owners of targets.

    They are those of a graph's `edge_index` while nothing has written to it; on any other
    tensor they raise a TypeError.
    """

    __slots__ = ()

    weight: Any = None  # the values of a sparse adjacency
    looped = False  # whether it is a sparse matrix with self-loops

    @property
    def topology(self) -> Topology:
        """What is planned for these edges."""
        found: Topology | None = self._topology  # type: ignore[attr-defined]
        if found is None:
            raise TypeError(
                f"got {self!r}, wanted the edge_index of a graph of pdc.partition"
            )
        return found

    @property
    def nodes(self) -> Rows:
        """The rows of target nodes on this rank."""
        return self.topology.nodes

    @property
    def sources(self) -> Rows:
        """The rows of source nodes on this rank; `nodes` unless their type differs."""
        return self.topology.source_rows

    @property
    def edges(self) -> Rows:
        """The rows of edges on this rank."""
        return self.topology.edges

    @property
    def of_torch(self) -> bool:
        """Whether these are the nonzeros of a sparse matrix of torch."""
        return self.weight is not None

    def carrying(self, weight: Any, *, matrix: bool = False) -> Any:
        """Returns the same edges as a sparse matrix with weights, or as an edge_index.

        Args:
            weight: `[e]`, sharded or whole; None is an edge_index, or 1 in a matrix.
            matrix: whether it is a matrix in any case.
        """
        return PROCESS.rules["carrying"](self, weight, matrix)

    def with_topology(self, topology: Topology) -> Any:
        """Returns the same edges with another topology."""
        edges: Any = self
        out = type(edges)(edges.local, edges.rows, 1, edges._key)
        out._family, out._key_version = edges._family, edges._key_version
        out._edges_are(topology)
        return out

    def oblivious(self) -> Any:
        """Returns the same edges with sparsity-oblivious exchanges, for comparison."""
        return self.with_halo("blocks")

    def with_halo(self, halo: str = "auto") -> Any:
        """Returns the same edges, with another kind of exchange for products.

        All give the same sums. "cover" moves the fewest words; "auto" takes whole blocks
        if they have at most a sixteenth more words than that. Products with trainable edge
        weights send rows, and so do layers other than products.

        Args:
            halo: "rows" sends the rows of features that other ranks need
                ([Mukhopadhyay24]), "sums" sends partial sums of rows instead, "cover" the
                fewest of both for each pair of ranks ([Zhuang25]), "blocks" sends whole
                blocks, as sparsity-oblivious algorithms do ([Tripathy20]), "auto" takes the
                cheaper one of the last two.
        """
        twin = copy.copy(self.topology)
        twin.halo, twin.constants, twin._plans = check_halo(halo), ProductCache(), {}
        for name in ("reversed", "product_words", "adds_on_grid"):
            twin.__dict__.pop(name, None)
        return self.with_topology(twin)

    def with_ordering(self, order: str = "auto", *, keep_inputs: bool = True) -> Any:
        """Returns the same edges, with another order of products for A X W.

        Plans are shared, cached products are not.

        Args:
            order: "first" is (A X) W, "last" is A (X W), "auto" the one that exchanges
                less, forward and backward together.
            keep_inputs: whether to cache the product with a constant input (a leaf without
                gradient, the same tensor at the same version), or its ghosts in layers of
                one hop, from its second use on; those that other layers read are kept in any
                case. The cache takes the input's memory once more. It is not used while hooks
                for saved tensors are active, as in activation checkpointing.
        """
        twin = copy.copy(self.topology)
        twin.ordering = MultiplyOrder(order, keep_inputs)
        twin.constants = ProductCache()
        return self.with_topology(twin)

    def with_link(self, link: LinkPolicy | None) -> Any:
        """Returns the same edges, with another link policy for layers.

        Plans and cached products are shared, since they are exact. A layer with its own link
        uses that.

        Args:
            link: a `LinkPolicy`, such as `pdc.VARCO(...)`; None is exact.
        """
        check_link(link)
        twin = copy.copy(self.topology)
        twin.link = link
        return self.with_topology(twin)

    def matmul(self, x: Any, edge_weight: Any = None) -> Tensor:
        """Returns, for each node, the (weighted) sum of `x` over its in-edges.

            z_i = sum over edges e = (j, i) of w_e x_j

        Differentiable in `x` `[n, f]` and `edge_weight` `[e]`. The product of any other
        tensor is `torch.matmul`.
        """
        if self._topology is None:  # type: ignore[attr-defined]
            whole: Any = self
            return torch.matmul(whole, x)
        topology, call = self.topology, None
        local = x.to_local().contiguous()
        weight = None if edge_weight is None else edge_weight.to_local()
        link = topology.link
        if link is not None:
            # copies with another link share what is kept, by which they are known
            who, train = topology.constants, torch.is_grad_enabled()
            own = topology.own_degrees
            call = link.begin(who, self.nodes, train, name="matmul", degrees=own)
        matrix = topology.operator(OperatorKind(), weight, local.dtype, call)
        return type(x).from_local(matrix @ local, self.nodes)  # type: ignore[no-any-return]

    __matmul__ = matmul
