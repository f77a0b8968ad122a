"""Presents an edge_index to a layer that runs on one chunk, in the chunk's own numbering.

[Note: one chunk] To a layer, a chunk is a graph of one rank: its nodes are 0 ..
n_c - 1, and rows of other chunks have the numbers that follow, which only sources have. A layer
reads source rows where `propagate` looks them up, from the sites of [Note: sites]; see
`nn/halo_conv.py`. Where it reads numbers of nodes by `edge_index[0]` itself, as `gcn_norm`
does degrees, they are facts of the graph, the same in all epochs.

Sums over rows are those of the chunk alone in a backward pass, where the pipeline adds up the
gradients of all chunks; in a forward pass they raise, by `ChunkMesh.world`. Nothing has a key
([Note: constants]), so that each pass over a chunk computes the same ops.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm import random
from pyg_distcomm.comm.failure import watch_of
from pyg_distcomm.comm.ledger import Price
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.graph.topology import LocalGraph, OperatorKind, Topology
from pyg_distcomm.halo.halo import Link
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.nn.message_forms import check_aggregations, compares, layers_of
from pyg_distcomm.pipeline.chunks import (
    ChunkPlan,
    HistoryBuffer,
    Operator,
    read_from_site,
)
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded.agreement import name_of
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex
from pyg_distcomm.sharded.ids import LocalRows

# folded into a pipeline's random keys: no others are equal
_KEYED, _PLAIN = 0x919E, 0x919F


@dataclass(eq=False)
class ChunkPass:
    """Holds the state of a pass over the layers: its epoch, layer and mode, and all sites.

    The first pass over the whole graph ("fill") makes the sites. It fixes how many times
    each layer exchanges rows, and how wide the rows are.

    Its mode is "fill" (the whole graph, into sites), "full" (the whole graph, exactly),
    "forward", or "again" (recomputes a chunk whose rows are in place).
    """

    plan: ChunkPlan
    cross: float  # the factor of gradients that cross from chunk to chunk
    seed: int  # of dropout
    link: LinkPolicy | None = None  # among the ranks of a stage; None is exact
    mode: str = "fill"
    epoch: int = 0  # what is being computed
    layer: int = 0
    # the buffer of each exchange, by (layer, number of the exchange)
    sites: dict[tuple[int, int], HistoryBuffer] = field(default_factory=dict)
    # rows that do not change from epoch to epoch (degrees), by (layer, number)
    facts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    before: int = 0  # the number of sites of earlier stages
    all_sites: int = 0  # and of all stages
    readers: list[list[MessagePassing]] = field(default_factory=list)  # by the link
    _exact_reason: str = ""
    _counts: Counter[str] = field(default_factory=Counter)

    def begin_layer(self, layer: int, chunk: int | None) -> None:
        """Starts to count the exchanges and random draws of a layer.

        Draws on plain tensors, such as weights, repeat when the layer is recomputed.
        """
        self.layer, self._exact_reason = layer, ""
        self._counts.clear()
        pass_id = 0 if chunk is None else 1 + chunk
        key = random.fold(self.seed, _PLAIN, self.epoch, layer, pass_id)
        random.seed(key, self.plan.topology.device)

    def set_link(self, link: LinkPolicy | None) -> None:
        """Sets the link that rows travel by; raises if a layer cannot use it."""
        for layers in self.readers:
            self._check_link(layers, link)
        self.link = link

    def read_by(self, layer: Any, own: Any) -> None:
        """Records the layer that reads next, and its link, while sites are made.

        All rows of a site take the same codec, so they are exact if attention depends on any
        of them; see [Note: attention] in `message_forms.py`.
        """
        if self.mode != "fill":
            return
        layers = layers_of(layer)
        self._exact_reason = "attention depends on it" if compares(layers) else ""
        if own == "exact":
            self._exact_reason = "its layer has link='exact'"
            return
        self._check_link(layers, self.link)
        self.readers.append(layers)

    def _check_link(
        self, layers: list[MessagePassing], link: LinkPolicy | None
    ) -> None:
        if link is not None and not link.is_exact and self.plan.mesh.size > 1:
            check_aggregations(layers, link)

    def next_key(self) -> int:
        """Returns the key of the layer's next random draw; recomputing repeats the keys."""
        _, number = self._next("draw")
        return random.fold(self.seed, _KEYED, self.epoch, self.layer, number)

    def read(self, x: Tensor, operator: Operator, chunk: int | None) -> Tensor:
        """Stores rows `[n_c, ...]` in the layer's next site; returns the product's rows."""
        flat, key = _flat(x), self._next("exchange")
        if chunk is None:
            ghosts = self._ghost_rows(flat, key, operator)
            out = operator.ghost.add_matmul(ghosts, operator.own.matmul(flat))
        else:
            again = self.mode == "again"
            out = read_from_site(flat, self._site(flat, key, operator), chunk, again)
        return out.reshape(len(out), *x.shape[1:])

    def gathered(self, x: Tensor, chunk: int | None) -> Tensor:
        """Returns the source rows of a chunk's edges that lie outside the chunk."""
        if chunk is not None:
            return self.read(x, self.plan.gather, chunk)
        ghosts = self._ghost_rows(_flat(x), self._next("exchange"), self.plan.gather)
        return ghosts.reshape(len(ghosts), *x.shape[1:])

    def _site(
        self, x: Tensor, key: tuple[int, int], operator: Operator
    ) -> HistoryBuffer:
        site = self.sites.get(key)
        how = operator, x.dtype, x.size(1)
        if site is None or how != (site.operator, site.mix.dtype, site.mix.size(1)):
            raise TypeError(
                f"layer {key[0]} reads its neighbours more often, or in another way, than "
                "when the pipeline first saw the data, and has history only for what it read "
                "then; let forward read them alike in training and evaluation, and use "
                "torch.autocast around all that it computes, or around none"
            )
        return site

    def _ghost_rows(
        self, x: Tensor, key: tuple[int, int], operator: Operator
    ) -> Tensor:
        """Fetches the rows of all ghosts, sorted by chunk; in mode "fill" a site keeps them."""
        ghosts = self._fetch_ghosts(x)
        if self.mode == "fill":
            made = self.plan, torch.cat([x.detach(), ghosts]), operator, self.cross
            wrap = functools.partial(self._chunk_link, key)
            self.sites[key] = HistoryBuffer(*made, wrap, self._exact_reason)
        return ghosts

    def _chunk_link(self, key: tuple[int, int], chunk: int) -> Link:
        """Returns the link of a chunk's rows at a site, under the policy of this epoch."""
        link = self.plan.links[chunk]
        if self.link is None or self.link.is_exact:
            return link
        place = self.before + list(self.sites).index(key)
        last = 0 < place == self.all_sites - 1  # where it is the only one, it is coded
        call = self.link.begin_chunk(place, f"layer {key[0]}", chunk, last)
        exact_reason = self.sites[key].exact_reason
        return (call.as_exact(exact_reason) if exact_reason else call).wrap(link, 0)

    def _fetch_ghosts(self, x: Tensor) -> Tensor:
        return self.plan.all_chunks.begin(x)()[self.plan.ghost.order]

    def constant_rows_of(self, x: Tensor, chunk: int | None) -> Tensor:
        """Returns what `gathered` does, for rows `[n_c, w]` that are equal in all epochs."""
        key = self._next("fact")
        if chunk is None:
            ghosts = self._fetch_ghosts(x)
            if self.mode == "fill":
                self.facts[key] = torch.cat([x, ghosts])
            return ghosts
        places = self.plan.local_edges(chunk)[1]
        if key not in self.facts:
            raise TypeError(
                f"layer {self.layer} reads more rows outside of `propagate`, such as degrees "
                "or x[edge_index[0]], than when the pipeline first saw the data; let forward "
                "do alike in both modes, and use torch.autocast around all or around none"
            )
        own = self.facts[key][self.plan.own.rows(chunk)]
        if not bool(((own == x) | (x != x)).all()):
            raise TypeError(
                f"layer {key[0]} reads rows of sources outside of `propagate`, such as "
                "degrees or x[edge_index[0]], that change from epoch to epoch (weights of "
                "edges that are learnt, dropped or changed), and those of other chunks are "
                "not known in time; normalise before the pipeline, and read in `propagate`"
            )
        return self.facts[key][places]

    def prices(self) -> list[tuple[Price, int]]:
        """Returns, for each site, what it moves in an epoch without a link, and bytes per word.

        Only messages among the ranks of a stage count here.
        """
        if self.link is not None and not self.link.is_exact:
            return []
        found = []
        for site in self.sites.values():
            total, width = Price(), site.mix.size(1)
            for link in self.plan.links:
                total += link.price(width)
                if site.needs_gradient:
                    total += link.price(width, True)
            found.append((total, site.mix.element_size()))
        return found

    def _next(self, what: str) -> tuple[int, int]:
        """Returns the layer, and the number of its next exchange, fact or draw.

        Raises inside a backward pass, where they cannot be counted.
        """
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a layer of a pipeline was computed again in the backward pass "
                "(activation checkpointing), where it would draw or read what other "
                "layers do; leave the checkpoint out: with recompute=True (the default) "
                "a pipeline computes each chunk again instead of keeping its activations"
            )
        self._counts[what] += 1
        return self.layer, self._counts[what]


def _flat(x: Tensor) -> Tensor:
    return (x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)).contiguous()


class ChunkMesh:
    """The mesh of a chunk, which holds all rows that its layers know of.

    It refuses reductions over all nodes.
    """

    local_sizes, rank, size, check = True, 0, 1, "never"

    def __init__(self, mesh: Mesh, run: ChunkPass) -> None:
        self.grid, self.run = mesh.grid, run
        self.next_key, self.watch = run.next_key, watch_of(mesh)
        self.sharded: dict[str, Any] = {}

    @property
    def world(self) -> Any:
        """Raises: every reduction reads this axis, and what gathers all rows."""
        raise TypeError(
            f"layer {self.run.layer} of a pipeline takes all nodes at once in "
            f"{name_of(PROCESS.op)}(), but has those of one chunk at a time; reduce in the "
            "loss, which sees all nodes, write rows into x.new_zeros(n, f) and not into "
            "torch.zeros(n, f), or train without a pipeline"
        )

    control = world


class RefusedLink:
    """Stands in place of a chunk's halo, which only sites may use."""

    silent = False

    def __init__(self, num_ghosts: int) -> None:
        self.num_ghosts = num_ghosts

    def __getattr__(self, name: str) -> Any:
        raise TypeError(
            "a layer of a pipeline adds to the sources of edges, of which some lie in other "
            "chunks: it sums over the edges that leave a node, or needs the gradient of "
            "x[edge_index[0]]; read neighbours by the `propagate` of a layer that gets "
            "edge_index as it is, and precompute sums as an attribute of the Data"
        )


@dataclass(frozen=True, eq=False)
class ChunkLocals(LocalGraph):
    """Edges of a chunk in its own numbering: its nodes, then those of other chunks."""

    run: ChunkPass
    chunk: int | None

    def with_ghosts(self, x: Tensor, link: Any = None) -> Tensor:
        """Returns own rows and those of other chunks, of this epoch or from history."""
        return torch.cat([x, self.run.gathered(x, self.chunk)])

    def with_ghost_facts(self, x: Tensor, link: Any = None) -> Tensor:
        """Returns what `with_ghosts` does, for rows that never change."""
        return torch.cat([x, self.run.constant_rows_of(x, self.chunk)])


class ChunkTopology(Topology):
    """The edges into a chunk's nodes; products are those of its rows of the matrix.

    Rows travel over the links of the plan's chunks, whatever link a layer would use.
    """

    chunked = True

    def __init__(self, run: ChunkPass, chunk: int | None) -> None:
        plan, whole = run.plan, run.plan.topology
        mesh: Any = ChunkMesh(plan.mesh, run)
        own, edge = slice(0, plan.counts[0]), slice(0, len(plan.edge.order))
        if chunk is not None:
            own, edge = plan.own.rows(chunk), plan.edge.rows(chunk)
        order = plan.edge.order.cpu()[edge]
        nodes = LocalRows.of(plan.gid[own], whole.nodes.total, mesh)
        super().__init__(
            plan.edges[0, edge],
            plan.edges[1, edge],
            nodes,
            LocalRows.of(whole.edges.gid[order], whole.edges.total, mesh, nodes),
            device=whole.device,
            ordering=replace(whole.ordering, keep_inputs=False, repeats=True),
        )
        self.run, self.chunk = run, chunk
        self.whole = plan.chunks == plan.mesh.size == 1  # without rows elsewhere
        if not self.whole:
            nodes.derived["topology"] = self

    @cached_property
    def locals(self) -> ChunkLocals:  # type: ignore[override]
        """Edges in the chunk's own numbering."""
        plan, chunk, own = self.run.plan, self.chunk, len(self.nodes)
        if chunk is None:
            ends, ghost = plan.ends, plan.gid[own:]
        else:
            ends, places = plan.local_edges(chunk)
            ghost = plan.gid[places.cpu()]
        closed: Any = RefusedLink(len(ghost))
        return ChunkLocals(lambda: ends, ghost, closed, own, self.run, chunk)

    @property
    def reversed(self) -> Any:  # type: ignore[override]
        """Raises where the edges that leave a chunk's nodes lie in other chunks."""
        if self.whole:
            return self
        raise TypeError(
            f"layer {self.run.layer} of a pipeline turns edges around (by "
            "flow='target_to_source' or edge_index.flip([0]), as DirGNNConv does), and those "
            "that leave a node lie in other chunks; turn the edges around before "
            "pdc.partition, or train without a pipeline"
        )

    def read_by(self, layer: Any, own: Any) -> None:
        """Records the layer that reads next, and its link."""
        self.run.read_by(layer, own)

    def operator(  # type: ignore[override]
        self,
        kind: OperatorKind,
        weight: Tensor | None,
        dtype: torch.dtype,
        exchange: Any = None,
    ) -> ChunkMatrix:
        """Returns the chunk's rows of a matrix, degrees taken over the whole graph."""
        run, plan, chunk, here = self.run, self.run.plan, self.chunk, self.locals
        if weight is None:
            planned = plan.gcn(kind, dtype) if kind.normalize else plan.sum
            return ChunkMatrix(lambda x: run.read(x, planned, chunk))
        edges = here.ends
        if kind.normalize:
            edges, weight = self.gcn_norm(weight, kind, dtype)

        def multiply(x: Tensor) -> Tensor:
            values = weight.to(x.dtype).unsqueeze(1)
            message = values * here.with_ghosts(x).index_select(0, edges[0])
            return torch.zeros_like(x).index_add(0, edges[1], message)

        return ChunkMatrix(multiply)


@dataclass(frozen=True, eq=False)
class ChunkMatrix:
    """Multiplies the rows that a chunk reads by its rows of a matrix."""

    multiply: Callable[[Tensor], Tensor]

    def __matmul__(self, x: Tensor) -> Tensor:
        """Returns the product for each node of the chunk."""
        return self.multiply(x)


def view_of(run: ChunkPass, chunk: int | None) -> DistTensor:
    """Returns the edges of a chunk, or of all chunks in order if `chunk` is None."""
    topology = ChunkTopology(run, chunk)
    return DistEdgeIndex.of(topology.locals.ends, topology)
