r"""Samples minibatches layer by layer, many at a time, and weighs their edges.

[Note: weights of a sampled layer] The layer of a minibatch has rows v, and columns u drawn
with chances p_u = P_u / sum P. It estimates z_v = sum over u of Ahat[v, u] x_u by the sum
over its columns of Ahat[v, u] f_u x_u, with a factor f_u for each column:

    None            f = 1
    "normalized"    f = 1 / p_u, then each row divided by its sum: [Zou19]'s own code.
                    Biased; rows sum to one, so values stay tame
    "importance"    f = c_u / (s p_u), u drawn c_u times in s draws: unbiased with
                    replacement, biased without
    "debiased"      f = ((sum of P not drawn yet) / P_u + s - k) / s, u being draw k of s:
                    Des Raj's estimator for draws without replacement ([DesRaj56],
                    [Chen22]), which is unbiased

Where a minibatch has taken all that P offers, nothing is estimated: f = 1 and rows are as
they are, whatever the option. Nodes of the batch that are columns anyway have f = 1 for the
unbiased options, whose sums then run over the others; with "normalized" they have 1 / p_u
like all columns, and those with p_u = 0 count as certain (p_u = 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)

from pyg_distcomm import kernels
from pyg_distcomm.comm.random import fold, fresh_seed
from pyg_distcomm.kernels.sample_cpu import check_ids, check_seeds
from pyg_distcomm.sampling.algebra import (
    BulkMatrix,
    BulkNodes,
    Sample,
    SharedRow,
    fixed_point,
    sample,
)
from pyg_distcomm.sampling.layer_graph import (
    MOST_ROWS,
    LayerEdges,
    LayerGraph,
    LocalLayerGraph,
    layer_numbers,
    rows_of_layers,
)
from pyg_distcomm.sampling.neighbor_sampler import explaining_out_of_memory
from pyg_distcomm.sampling.rules import GraphSAGE, Ladies, Rule, UserRule, rule_name

OPTIONS = (None, "normalized", "importance", "debiased")


def check_weights(weights: str | None, replace: bool) -> None:
    """Raises ValueError for unknown weights, or weights that do not fit `replace`."""
    if weights not in OPTIONS:
        raise ValueError(f"weights must be one of {list(OPTIONS)}, got {weights!r}")
    if weights == "debiased" and replace:
        raise ValueError(
            "got weights='debiased' with replace=True, but it is for draws without "
            "replacement; take weights='importance', which is unbiased with replacement"
        )


def edge_weights(
    option: str | None,
    edges: LayerEdges,
    rows: BulkNodes,
    cols: BulkNodes,
    kept: Tensor,
    p: BulkMatrix,
    drawn: Sample,
) -> Tensor:
    """Returns the weight of each edge [E], float32, by one of `OPTIONS`.

    `kept` says which columns would be there without being drawn; `p`, what was drawn from,
    has integers, and one row for each minibatch, or for all.
    """
    if option is None:
        return edges.weight.float()
    weight = edges.weight * factors(option, cols, kept, p, drawn)[edges.col]
    if option == "normalized":
        each = torch.arange(len(rows.id) + 1, device=edges.row.device)
        ptr = torch.searchsorted(edges.row, each)
        whole = drawn.complete[rows.batch][edges.row]
        weight = torch.where(whole, weight, kernels.normalize_rows(ptr, weight))
    return weight.float()


def factors(
    option: str, cols: BulkNodes, kept: Tensor, p: BulkMatrix, drawn: Sample
) -> Tensor:
    """Returns the factor f of each column [total columns], float64."""
    batch = cols.batch
    if option == "normalized":
        found = _normalized(cols, p, drawn)
    else:
        count = len(drawn.drawn)
        each = torch.repeat_interleave(drawn.ptr.diff(), output_size=count)
        value = p.values[drawn.drawn]
        s = drawn.ptr.diff()[each]
        if option == "debiased":
            nth = torch.arange(count, device=each.device) - drawn.ptr[each]
            chance = drawn.left.double() / value.double() + (s - nth - 1)
        else:
            whole = drawn.left[drawn.ptr[each]]  # before the first draw: the sum of P
            chance = whole.double() / value.double()
        step = max(p.num_cols, 1)
        place = torch.searchsorted(
            batch * step + cols.id, each * step + p.col[drawn.drawn]
        )
        found = torch.zeros(len(cols.id), dtype=torch.float64, device=each.device)
        found.index_add_(0, place, chance / s)
        found.masked_fill_(kept, 1.0)
    return found.masked_fill_(drawn.complete[batch], 1.0)


def _normalized(cols: BulkNodes, p: BulkMatrix, drawn: Sample) -> Tensor:
    """Returns 1 / p_u for each column."""
    if p.num_rows == len(cols):
        entry, known = p.find(cols)
    else:  # one row for all
        entry, known = p.find(BulkNodes(cols.id, cols.ptr[[0, -1]]))
    if not p.nnz:
        return torch.ones_like(cols.id, dtype=torch.float64)
    value = torch.where(known, p.values[entry], 0).double()
    begin = drawn.ptr[:-1].clamp(max=max(len(drawn.left) - 1, 0))
    first = drawn.left[begin] if len(drawn.left) else torch.ones_like(begin)
    return torch.where(value > 0, first[cols.batch].double() / value, 1.0)


_CALL = 0x6C617965  # folded into the keys of calls that bring no key


@dataclass
class LayerSamplerOutput(SamplerOutput):
    """Extends `SamplerOutput` by weights of edges.

    Args:
        node, row, col, edge, batch, num_sampled_nodes, num_sampled_edges, orig_row,
        orig_col, metadata: as in PyG's.
        edge_weight: [E] float32, for a layer that takes `edge_weight` (GCNConv with
            `normalize=False, add_self_loops=False`, GraphConv); see `estimators`.
    """

    edge_weight: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True, eq=False)
class _Layer:
    """Holds one layer of a bulk: its columns, and the edges from them to its rows."""

    rows: BulkNodes
    cols: BulkNodes
    edges: LayerEdges
    weight: Tensor


class KeyedLayerSampler(BaseSampler):
    r"""Samples a fixed number of nodes for each layer of a minibatch.

    Layer l has rows R_l and columns C_l: R_0 are the seeds and R_{l+1} = C_l. The columns
    are `num_nodes_per_layer[l]` nodes drawn by the rule for all rows together, and (where
    `keep_batch`) the seeds; the edges are all those of the graph from C_l to R_l. [Zou19],
    in bulk as [Tripathy24] has it: the bits of a minibatch depend on its key alone.

    A minibatch holds each layer's nodes apart, so that an unchanged PyG model computes the
    layered estimate, with `trim_to_layer` or without: `node` is R_0, C_0, C_1, ..., each
    C_l ascending; edges of layer l point from C_l to R_l, by target, then by edge id, and
    the loops that a rule adds (`edge` is -1) last. `num_sampled_nodes` and
    `num_sampled_edges` count by layer, `edge_weight` is as `estimators` says, and
    `metadata` is PyG's (input_id, time).

    A node twice among the seeds has two rows. A layer whose rows have no candidate draws
    nothing. -1 nodes for a layer takes all candidates: then every row is that of the full
    graph, and the minibatches of an epoch add up to its gradient.

    Args:
        data: a Data, or any `LayerGraph` (which brings its rule).
        num_nodes_per_layer: nodes to draw for each layer, the seeds' first; -1 for all.
        rule: a `Rule`, or a function P -> P (see `UserRule`). Default: `Ladies()`.
        weights: None, "normalized", "importance" or "debiased"; see `estimators`.
        replace: whether a node may be drawn again in a layer.
        keep_batch: whether seeds are columns of every layer. Default: as the rule says.
        weight_attr: the name of the edges' weights in data.
        most_rows: the most seeds of a minibatch, or nodes that are drawn for them; sets how
            finely weights are rounded (`layer_graph`). Default: 8192 seeds, and as many nodes
            as are drawn.
        seed: of calls that bring no key (default: taken from torch's generator).
        device: where minibatches are drawn from a Data that lies on the host, and lie: the
            same bits. None for the host.
        pinned: whether the edges stay in pinned host memory, which a CUDA device reads.

    Raises:
        ValueError: for numbers below -1, options that do not fit, seeds out of range,
            and what a rule should not return.
    """

    def __init__(
        self,
        data: Data | LayerGraph,
        num_nodes_per_layer: Sequence[int],
        rule: Rule | Callable[[BulkMatrix], BulkMatrix] | None = None,
        *,
        weights: str | None = "normalized",
        replace: bool = False,
        keep_batch: bool | None = None,
        weight_attr: str | None = None,
        most_rows: int | None = None,
        seed: int | None = None,
        device: torch.device | None = None,
        pinned: bool = False,
    ) -> None:
        super().__init__()
        check_weights(weights, replace)
        numbers = layer_numbers(num_nodes_per_layer)
        self.graph = _graph(data, rule, weight_attr, most_rows, numbers)
        self.rule = self.graph.rule
        if isinstance(self.rule, GraphSAGE):
            raise ValueError(
                "GraphSAGE draws for each node by itself: use KeyedNeighborSampler"
            )
        self.device = device
        if device is not None:
            if not isinstance(self.graph, LocalLayerGraph):
                raise ValueError(
                    f"device={str(device)!r} is for a Data; leave it out, or give one"
                )
            with explaining_out_of_memory(device, pinned, self.graph.arrays):
                self.graph = self.graph.on(device, pinned)
        self.num_nodes_per_layer = numbers
        self.weights, self.replace = weights, replace
        self.keep_batch = self.rule.keeps_batch if keep_batch is None else keep_batch
        self.seed = fresh_seed() if seed is None else seed
        self._calls = itertools.count()
        self._shared: SharedRow | None = None

    def describe(self) -> dict[str, Any]:
        """Returns all options that minibatches depend on, besides graph, seeds and keys."""
        return {
            "num_nodes_per_layer": list(self.num_nodes_per_layer),
            "rule": rule_name(self.rule),
            "weights": self.weights,
            "replace": self.replace,
            "keep_batch": self.keep_batch,
        }

    def sample_from_nodes(self, inputs: NodeSamplerInput) -> LayerSamplerOutput:
        """Samples one minibatch, keyed by `inputs.key` if it has one."""
        return self.sample_bulk([inputs])[0]

    def sample_from_edges(
        self, inputs: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> NoReturn:
        """Raises: layer-wise sampling is around nodes."""
        raise NotImplementedError(
            "layer-wise sampling starts from nodes; for links, use DistLinkNeighborLoader"
        )

    def sample_bulk(
        self, inputs: Sequence[NodeSamplerInput]
    ) -> list[LayerSamplerOutput]:
        """Samples k minibatches in one pass of the algebra for each layer."""
        keys = [self._key(each) for each in inputs]
        batch = BulkNodes.of([check_seeds(each.node) for each in inputs])
        check_ids(batch.id, self.graph.num_nodes, "seeds")
        if self.device is not None:
            batch = batch.to(self.device)
        seed_columns = None
        if self.keep_batch:
            seed_columns = torch.unique(batch.batch * self._step + batch.id)
        layers: list[_Layer] = []
        rows, most = batch, max((len(each.node) for each in inputs), default=0)
        seeds = most if self.keep_batch else 0
        for number, s in enumerate(self.num_nodes_per_layer):
            each = torch.tensor([fold(key, number) for key in keys], dtype=torch.int64)
            layers.append(
                self._layer(rows, seed_columns, s, each.to(batch.id.device), most)
            )
            rows = layers[-1].cols
            most = seeds + (self.graph.num_nodes if s < 0 else s)
        return _outputs(inputs, batch, layers)

    def _layer(
        self,
        rows: BulkNodes,
        seed_columns: Tensor | None,
        s: int,
        keys: Tensor,
        most: int,
    ) -> _Layer:
        """Samples a layer of minibatches, each with `most` rows at most."""
        if most > self.graph.most_rows:  # then count them
            most = int(rows.ptr.diff().max()) if len(rows) else 0
        if most > self.graph.most_rows:
            raise ValueError(
                f"a minibatch has {most} rows in a layer, but weights leave room for "
                f"{self.graph.most_rows}; raise most_rows (in a loader, batch_size), or "
                "take fewer seeds at a time"
            )
        p, drawn = self._draw(rows, s, keys)
        cols, kept = self._columns(drawn.matrix, seed_columns)
        edges = self.graph.extract(rows, cols)
        weight = edge_weights(self.weights, edges, rows, cols, kept, p, drawn)
        return _Layer(rows, cols, edges, weight)

    def _draw(self, rows: BulkNodes, s: int, keys: Tensor) -> tuple[BulkMatrix, Sample]:
        """Returns the integer weights drawn from, and the draws."""
        again = self.replace and s >= 0  # all candidates are each one once
        s = self.graph.num_nodes if s < 0 else s
        if self.rule.shared:
            shared = self._shared_row()
            return shared.p, shared.sample(s, keys, again)
        p = self.rule.judge(self.graph.sums(rows), self.graph.scale)
        p = p.with_value(fixed_point(p))
        return p, sample(p, s, keys, again)

    def _shared_row(self) -> SharedRow:
        if self._shared is None:
            total = self.graph.column_sums()
            n = len(total)
            each, one = (torch.arange(k, device=total.device) for k in (n, 2))
            row = BulkMatrix(one * n, each, total, n, one)
            self._shared = SharedRow(self.rule.judge(row, self.graph.scale))
        return self._shared

    @property
    def _step(self) -> int:
        return max(self.graph.num_nodes, 1)

    def _columns(
        self, drawn: BulkMatrix, seed_columns: Tensor | None
    ) -> tuple[BulkNodes, Tensor]:
        """Returns the columns of each minibatch, and which of them are its seeds.

        Nodes are numbered `minibatch step + id`; `seed_columns` are the seeds, if kept.
        """
        if seed_columns is None:
            cols = BulkNodes(drawn.col, drawn.rowptr)
            return cols, torch.zeros_like(cols.id).bool()
        step = self._step
        every = torch.unique(torch.cat([seed_columns, drawn.row * step + drawn.col]))
        each = torch.arange(drawn.num_rows + 1, device=every.device)
        ptr = torch.searchsorted(every, each * step)
        return BulkNodes(every % step, ptr), torch.isin(every, seed_columns)

    def _key(self, inputs: Any) -> int:
        key: int | None = getattr(inputs, "key", None)
        if key is not None:
            return key
        worker = torch.utils.data.get_worker_info()
        return fold(self.seed, _CALL, worker.seed if worker else 0, next(self._calls))

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the row of a shared rule, which is computed again at its first use."""
        return {**self.__dict__, "_shared": None}


def _outputs(
    inputs: Sequence[NodeSamplerInput], batch: BulkNodes, layers: list[_Layer]
) -> list[LayerSamplerOutput]:
    """Cuts the layers of a bulk into minibatches; see `KeyedLayerSampler`."""
    k = len(inputs)
    nodes = [[seeds] for seeds in batch.split()]
    parts: list[list[tuple[Tensor, ...]]] = [[] for _ in range(k)]
    below = [0] * k  # where the rows of the layer begin in `node`
    for layer in layers:
        ends = torch.searchsorted(layer.edges.row, layer.rows.ptr)
        asked = torch.stack([ends, layer.rows.ptr, layer.cols.ptr])
        bounds, first_row, first_col = asked.tolist()  # the host asks once
        sizes = [b - a for a, b in itertools.pairwise(first_col)]
        for i, cols in enumerate(layer.cols.id.split(sizes)):
            edges, above = slice(bounds[i], bounds[i + 1]), below[i]
            above += first_row[i + 1] - first_row[i]
            source = layer.edges.col[edges] + (above - first_col[i])
            target = layer.edges.row[edges] + (below[i] - first_row[i])
            more = layer.edges.edge[edges], layer.weight[edges]
            parts[i].append((source, target, *more))
            nodes[i].append(cols)
            below[i] = above
    return [_output(*each) for each in zip(inputs, nodes, parts, strict=True)]


def _output(
    inputs: NodeSamplerInput, nodes: list[Tensor], parts: list[tuple[Tensor, ...]]
) -> LayerSamplerOutput:
    row, col, edge, weight = (torch.cat(part) for part in zip(*parts, strict=True))
    return LayerSamplerOutput(
        node=torch.cat(nodes),
        row=row,
        col=col,
        edge=edge,
        num_sampled_nodes=[len(part) for part in nodes],
        num_sampled_edges=[len(part[0]) for part in parts],
        metadata=(inputs.input_id, inputs.time),
        edge_weight=weight,
    )


def _graph(
    data: Data | LayerGraph,
    rule: Rule | Callable[[BulkMatrix], BulkMatrix] | None,
    weight_attr: str | None,
    most_rows: int | None,
    numbers: tuple[int, ...],
) -> LayerGraph:
    if rule is not None and not isinstance(rule, Rule):
        if not callable(rule):
            raise TypeError(f"rule must be a Rule or a function, got {rule!r}")
        rule = UserRule(rule)
    if hasattr(data, "sums") and hasattr(data, "extract"):
        graph: LayerGraph = data
        if weight_attr is not None or most_rows is not None:
            raise ValueError("weight_attr, most_rows are of the graph: give them to it")
        if rule is not None and rule != graph.rule:
            raise ValueError(f"the graph was made for {graph.rule}, not for {rule}")
        return graph
    if most_rows is None:
        n = data.num_nodes if isinstance(data, Data) else None
        most_rows = rows_of_layers(numbers, MOST_ROWS, n or 0)
    return LocalLayerGraph.from_data(data, rule or Ladies(), weight_attr, most_rows)
