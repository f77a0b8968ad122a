"""Caches the CSR form and the hops of ordinary edge_index tensors.

[Note: what a tensor carries] An `edge_index` `[2, e]` of a minibatch is an ordinary tensor.
Its cache is stored under its identity, with the same lifetime. It is valid for one version of
the tensor at one storage: an in-place change drops it (except one that torch does not count, as
through `.data` or NumPy), and a new tensor (`flip`, a mask, `clone`) has none. Only a view of
the first edges, as `trim_to_layer` takes it, shares the cache. The CSR form is computed from
the edges themselves, never inferred from a shape. Edges of a sampler, which also gives the
number of seeds, use it at once. For any other tensor it is built at the second use, since it
costs more than one use saves; but for millions of edges on a device, whose messages PyG would
hold at once, at the first. A PyG `EdgeIndex` has a cache, too; one that is marked as sorted
by target uses it at once.

[Note: device synchronisation] On a device the host waits for facts about the edges: once for an
edge_index, whether its ids are in range and its edges sorted; once for a minibatch, how many
rows each hop reads, all hops together. Nothing else synchronises: the CSR form and its
transpose are built on the device. A loader with `device=` fetches these facts ahead of
training. A cache made on one stream is not used on another, which may run ahead of it, and is
built again there. While a CUDA graph is captured only existing caches are used.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_distcomm import kernels
from pyg_distcomm.kernels import registry
from pyg_distcomm.kernels.core_ops import note_span, offset_dtype
from pyg_distcomm.ops.csr import Pattern
from pyg_distcomm.process import PROCESS

_INDICES = (torch.int64, torch.int32)
_MANY = 1 << 22  # edges on a device whose CSR form is built at the first use
_LATEST = 256  # minibatches among which that of edges on a device is looked for
DEVICES = frozenset({"cpu", "cuda"})  # types of those whose products have kernels


def has_products(t: Tensor) -> bool:
    """Tells whether kernels compute products on the device of a tensor."""
    return t.device.type in DEVICES


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leaves `inference_mode` in a block, so that autograd may save tensors made in it."""
    graded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(graded):
        yield


@dataclass(frozen=True, eq=False)
class GroupedEdges:
    """Holds the edges of a bipartite graph in CSR form, one row for each target.

    Args:
        pattern: sources of the edges of each target, `[num_targets, num_sources]`.
        order: the edge of each nonzero, `[e]`; None if edges are sorted by target.
    """

    pattern: Pattern
    order: Tensor | None
    _prefixes: dict[int, GroupedEdges] = field(default_factory=dict)
    _means: dict[torch.dtype, Tensor] = field(default_factory=dict)
    _ends: dict[int, tuple[int, int | None]] = field(default_factory=dict)

    @staticmethod
    def build(
        edge_index: Tensor, num_sources: int, num_targets: int, checked: bool = False
    ) -> GroupedEdges | None:
        """Returns the CSR form of `edge_index` `[2, e]`; None if an id is out of range.

        A device is asked once, and not at all for edges that are `checked`: known to be in
        range, and perhaps not sorted.
        """
        source, target = edge_index[0], edge_index[1]
        host, count = registry.device_type_of(target) == "cpu", target.numel()
        grouped = not count
        if count and (host or not checked):
            rises = (target[1:] >= target[:-1]).all().to(target.dtype)
            ends = [*source.aminmax(), *target.aminmax(), rises]
            least, most, first, last, rising = torch.stack(ends).tolist()
            if min(least, first) < 0 or most >= num_sources or last >= num_targets:
                return None
            grouped = bool(rising)
        order, kind = None, offset_dtype(count)
        if host:
            rowptr, source, order = kernels.coo_to_csr(target, source, num_targets)
            order = None if grouped else order.long()
        else:
            if not grouped:
                target, order = torch.sort(target, stable=True)
                source = source.index_select(0, order)
            bounds = torch.arange(
                num_targets + 1, device=target.device, dtype=target.dtype
            )
            rowptr = torch.searchsorted(target.contiguous(), bounds).to(kind)
            note_span(rowptr, 0, count)
        col = source.to(kind).contiguous()
        return GroupedEdges(Pattern(rowptr, col, num_sources, not host), order)

    @property
    def num_targets(self) -> int:
        """The number of rows."""
        return self.pattern.shape[0]

    @cached_property
    def num_read(self) -> int:
        """The number of leading source rows that the edges read."""
        col = self.pattern.col
        return int(col.max()) + 1 if col.numel() else 0

    @cached_property
    def inverse(self) -> Tensor | None:
        """The nonzero of each edge; None if the edges are sorted by target."""
        if self.order is None:
            return None
        with outside_inference_mode():
            each = torch.arange(len(self.order), device=self.order.device)
            return torch.empty_like(self.order).scatter_(0, self.order.long(), each)

    @cached_property
    def targets(self) -> Tensor:
        """The target of each nonzero, `[nnz]`."""
        with outside_inference_mode():
            rowptr = self.pattern.rowptr
            rows = torch.arange(
                self.num_targets, dtype=rowptr.dtype, device=rowptr.device
            )
            return rows.repeat_interleave(rowptr.diff(), output_size=self.pattern.nnz)

    @cached_property
    def each(self) -> GroupedEdges:
        """The same targets, each with its own edges as sources, `[num_targets, nnz]`."""
        with outside_inference_mode():
            rowptr, count = self.pattern.rowptr, self.pattern.nnz
            col = torch.arange(count, dtype=rowptr.dtype, device=rowptr.device)
            return GroupedEdges(Pattern(rowptr, col, count), None)

    def prefix(self, rows: int, num_sources: int | None = None) -> GroupedEdges:
        """Returns the edges into the first `rows` targets, from `num_sources` sources."""
        pattern = self.pattern
        width = pattern.num_cols if num_sources is None else num_sources
        if rows >= self.num_targets and width == pattern.num_cols:
            return self
        key = rows * (1 << 32) + width
        if key not in self._prefixes:
            rowptr, (end, reads) = pattern.rowptr[: rows + 1], self._end(rows)
            if not rowptr.is_cpu:  # cuSPARSE takes offsets that own their memory
                rowptr = rowptr.clone()
                note_span(rowptr, 0, end)
            order = None if self.order is None else self.order[:end]
            part = Pattern(rowptr, pattern.col[:end], width, pattern.checked)
            found = self._prefixes[key] = GroupedEdges(part, order)
            if reads is not None:
                vars(found)["num_read"] = reads
        return self._prefixes[key]

    def _end(self, rows: int) -> tuple[int, int | None]:
        """Returns the end of the edges into the first `rows`, and the source rows they read."""
        if rows >= self.num_targets:
            return self.pattern.nnz, vars(self).get("num_read")
        if rows not in self._ends:
            self.ask_device([rows])
        return self._ends[rows]

    def ask_device(self, rows: Sequence[int]) -> None:
        """Asks the device for the ends of edges into several numbers of first rows."""
        index = torch.tensor(rows, device=self.pattern.rowptr.device)
        ends = self.pattern.rowptr.index_select(0, index).tolist()
        self._ends.update((k, (end, None)) for k, end in zip(rows, ends, strict=True))

    def note_prefix(self, rows: int, end: int, reads: int) -> None:
        """Records the end of the edges into the first `rows`, and the rows they read."""
        if rows >= self.num_targets:
            vars(self)["num_read"] = reads
        else:
            self._ends[rows] = end, reads

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors of the CSR form, and of cached prefixes."""
        for edges in (self, *self._prefixes.values()):
            yield from (edges.pattern.rowptr, edges.pattern.col)
            if edges.order is not None:
                yield edges.order

    def in_order(self, values: Tensor) -> Tensor:
        """Returns values of edges `[e, ...]` in the order of the nonzeros."""
        values = values[: self.pattern.nnz] if self.order is None else values
        return values if self.order is None else values.index_select(0, self.order)

    def mean_values(self, dtype: torch.dtype) -> Tensor:
        """Returns 1 / (in-degree of its target) for each nonzero, `[nnz]`."""
        if dtype not in self._means:
            with outside_inference_mode():
                degree = self.pattern.rowptr.diff()
                share = degree.clamp(min=1).to(dtype).reciprocal()
                self._means[dtype] = share.repeat_interleave(
                    degree, output_size=self.pattern.nnz
                )
        return self._means[dtype]


@dataclass(eq=False)
class SampledBatch:
    """Holds the facts of a sampler about the edges of one minibatch, of all types.

    Args:
        sizes: the number of nodes of each type.
        seeds: how many of them, the first, are read of the last layer; absent types none.
        relations: (source type, target type, weak reference to the edge_index).
    """

    sizes: dict[Any, int]
    seeds: dict[Any, int]
    relations: list[tuple[Any, Any, weakref.ref[Tensor]]] = field(default_factory=list)
    _read: list[dict[Any, int]] = field(default_factory=list)

    def rows(self, depth: int) -> dict[Any, int] | None:
        """Returns how many leading rows are read `depth` message passings before the end.

            R_0 = seeds,   R_{d+1} = R_d and the sources of all edges into R_d

        None if an edge_index has been dropped or changed.
        """
        if not self._read:
            self._read.append({kind: self.seeds.get(kind, 0) for kind in self.sizes})
        relations = self._grouped() if len(self._read) <= depth else []
        if relations is None:
            return None
        if any(not edges.pattern.rowptr.is_cpu for _, _, edges in relations):
            PROCESS.hops = max(PROCESS.hops, depth)
            self._prefetch_sizes(relations, depth)
        while len(self._read) <= depth:
            now = self._read[-1]
            following = dict(now)
            for source, target, edges in relations:
                needed = edges.prefix(now[target]).num_read
                following[source] = max(following[source], needed)
            self._read.append(following)
        return self._read[depth]

    def prepare(self, depth: int) -> None:
        """Builds the CSR forms, and computes the rows that are read up to a depth."""
        self.rows(depth)
        self._grouped()

    def known_rows(self, kind: Any) -> list[int]:
        """Returns the leading rows of a type that are read, for each known depth."""
        return sorted({read[kind] for read in self._read})

    def _grouped(self) -> list[tuple[Any, Any, GroupedEdges]] | None:
        """Returns the CSR form of each relation; None if one was dropped or changed."""
        every = []
        for source, target, reference in self.relations:
            edge_index = reference()
            found = None if edge_index is None else known(edge_index)
            if edge_index is None or found is None or found.batch is not self:
                return None
            edges = found.grouped(edge_index, self.sizes[source], self.sizes[target])
            if edges is None:
                return None
            every.append((source, target, edges))
        return every

    def _prefetch_sizes(
        self, relations: list[tuple[Any, Any, GroupedEdges]], depth: int
    ) -> None:
        """Fetches all numbers that `rows` needs from a device at once, up to a depth."""
        like = relations[0][2].pattern.rowptr
        now = {kind: like.new_full((1,), n) for kind, n in self._read[-1].items()}
        reach, asked = [], []
        for _, _, edges in relations:
            most = edges.pattern.col.cummax(0).values + 1
            reach.append(torch.cat([most.new_zeros(1), most]))
        for _ in range(len(self._read) - 1, depth + 1):
            following = dict(now)
            for (source, target, edges), most in zip(relations, reach, strict=True):
                end = edges.pattern.rowptr.index_select(0, now[target])
                last = most.index_select(0, end)
                asked += [now[target], end, last]
                following[source] = torch.maximum(following[source], last)
            now = following
        numbers = torch.cat([t.long() for t in asked]).view(-1, 3).tolist()
        for place, (rows, end, reads) in enumerate(numbers):
            relations[place % len(relations)][2].note_prefix(rows, end, reads)


class LocalAdjacency:
    """Holds the cache of one edge_index; see [Note: what a tensor carries].

    Args:
        signature: the version and storage of the tensor for which the cache is valid.
        batch: the minibatch it was sampled for, if any.
        ends: the types of its sources and targets there.
    """

    def __init__(
        self,
        signature: Any,
        batch: SampledBatch | None = None,
        ends: tuple[Any, Any] = (None, None),
        uses: int = 0,
    ) -> None:
        self.signature, self.batch, self.ends, self.uses = signature, batch, ends, uses
        self.derived: dict[Any, Any] = {}  # by layers: normalised matrices
        self.memory: Any = None  # of the tensor, which no other gets while this is here
        self.stream: int | None = None  # of CUDA, on which all of this was made
        self._grouped: dict[tuple[int, int], GroupedEdges | None] = {}

    @staticmethod
    def of(edges: GroupedEdges) -> LocalAdjacency:
        """Returns a LocalAdjacency with a known CSR form."""
        found = LocalAdjacency(None)
        found._grouped[edges.pattern.num_cols, edges.num_targets] = edges
        return found

    def grouped(
        self, edge_index: Tensor, num_sources: int, num_targets: int
    ) -> GroupedEdges | None:
        """Returns the CSR form of the tensor of this cache, built once."""
        key = num_sources, num_targets
        if key not in self._grouped:
            if _is_captured(edge_index):
                return None
            if not edge_index.is_cpu and self.batch is not None:
                PROCESS.hops = max(PROCESS.hops, 0)
            self.stream = _stream(edge_index)
            with outside_inference_mode():
                self._grouped[key] = GroupedEdges.build(edge_index, *key)
        return self._grouped[key]

    def is_elsewhere(self, edge_index: Tensor) -> bool:
        """Tells whether this cache was made on another CUDA stream than the current one."""
        if self.stream is None or self.stream == _stream(edge_index):
            return False
        return not _is_captured(edge_index)  # whose stream waits for what ran before

    def hand_over(self, edge_index: Tensor) -> None:
        """Makes the current stream wait for the stream on which this cache was made."""
        if self.stream is None:
            return
        self.stream = _stream(edge_index)
        current = torch.cuda.current_stream(edge_index.device)
        for edges in self._grouped.values():
            for t in () if edges is None else edges.tensors():
                t.record_stream(current)


def _stream(t: Tensor) -> int | None:
    """Returns the current CUDA stream of a tensor's device."""
    return int(torch.cuda.current_stream(t.device).cuda_stream) if t.is_cuda else None


def _is_captured(t: Tensor) -> bool:
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def looped_edges(
    adjacency: LocalAdjacency, looped: Tensor, num_sources: int, num_targets: int
) -> GroupedEdges:
    """Returns the CSR form of edges in range with added self-loops.

    Of a minibatch on a device it asks once where the edges that each hop reads end.
    """
    edges = GroupedEdges.build(looped, num_sources, num_targets, checked=True)
    assert edges is not None
    batch = adjacency.batch
    rows = [] if batch is None else batch.known_rows(adjacency.ends[1])
    if len(rows) > 1 and not looped.is_cpu:
        edges.ask_device([k for k in rows if k < num_targets])
    return edges


def carry(
    edge_indices: Mapping[tuple[Any, Any, Any], Tensor] | Tensor,
    sizes: Mapping[Any, int],
    seeds: Mapping[Any, int],
) -> None:
    """Attaches the sampler's facts about a minibatch to its edge_index tensors.

    Args:
        edge_indices: `[2, e]`, or one for each (source type, relation, target type).
        sizes: the number of nodes of each type; of the type None if there is one.
        seeds: how many nodes of each type are seeds. They come first.
    """
    batch = SampledBatch(dict(sizes), dict(seeds))
    if isinstance(edge_indices, Tensor):
        edge_indices = {(None, None, None): edge_indices}
    for (source, _, target), edge_index in edge_indices.items():
        if _signature(edge_index) is not None:
            batch.relations.append((source, target, weakref.ref(edge_index)))
            _keep(edge_index, batch, (source, target), 1)


def follow(
    minibatch: Any,
    edges_of: Callable[[Any], Mapping[tuple[Any, Any, Any], Tensor] | Tensor | None],
    sizes: Mapping[Any, int],
    seeds: Mapping[Any, int],
) -> None:
    """Attaches the caches to the edges of a minibatch again after `.to(device)`."""
    PROCESS.minibatches[minibatch] = edges_of, sizes, seeds


def _followed(edge_index: Tensor) -> LocalAdjacency | None:
    """Returns the cache of edges that moved with one of the latest minibatches."""
    # in one step: a loader's thread adds others meanwhile
    kept = list(PROCESS.minibatches.data.items())
    for reference, (edges_of, *rest) in kept[: -_LATEST - 1 : -1]:
        minibatch = reference()
        edges = None if minibatch is None else edges_of(minibatch)
        each = edges.values() if isinstance(edges, Mapping) else [edges]
        if edges is not None and any(t is edge_index for t in each):
            carry(edges, *rest)
            return known(edge_index)
    return None


def prepare(edge_index: Any) -> None:
    """Fetches from a device, ahead of training, the numbers that layers have used before."""
    found = known(edge_index) if isinstance(edge_index, Tensor) else None
    if found is None or found.batch is None or edge_index.is_cpu or PROCESS.hops < 0:
        return
    found.batch.prepare(PROCESS.hops)


def hand_over(t: Tensor) -> None:
    """Makes the current stream use the cache of a tensor; see `LocalAdjacency`."""
    found: LocalAdjacency | None = PROCESS.adjacencies.get(t)
    if found is not None:
        found.hand_over(t)


def _keep(edge_index: Tensor, *args: Any, **kwargs: Any) -> LocalAdjacency:
    found = LocalAdjacency(_signature(edge_index), *args, **kwargs)
    found.memory = edge_index.untyped_storage()
    PROCESS.adjacencies[edge_index] = found
    return found


def stays(edge_index: Tensor) -> Tensor:
    """Returns edges that will not change, whose CSR form layers use from the first time on."""
    if _signature(edge_index) is not None and known(edge_index) is None:
        _keep(edge_index, uses=1)
    return edge_index


def known(edge_index: Tensor) -> LocalAdjacency | None:
    """Returns the cache of a tensor if the tensor has not changed since; else None."""
    found: LocalAdjacency | None = PROCESS.adjacencies.get(edge_index)
    if found is None or found.signature != _signature(edge_index):
        return None
    return None if found.is_elsewhere(edge_index) else found


def is_sampled(edge_index: Any) -> bool:
    """Tells whether a sampler of this package has drawn these edges."""
    edge_index = plain_edges(edge_index)
    if _signature(edge_index) is None:
        return False
    found = known(edge_index)
    if found is None and not edge_index.is_cpu:
        found = _followed(edge_index)
    return found is not None and found.batch is not None


def plain_edges(edge_index: Any, *sizes: int | None) -> Any:
    """Returns the tensor inside a PyG EdgeIndex; other values unchanged.

    Args:
        edge_index: the edges.
        sizes: the numbers of sources and targets, where known; an EdgeIndex that is of
            others is returned as it is.
    """
    if type(edge_index) is not EdgeIndex:
        return edge_index
    pairs = zip(edge_index.sparse_size(), sizes, strict=False)
    fits = all(None in (own, given) or own == given for own, given in pairs)
    return edge_index.as_tensor() if fits else edge_index


def adjacency_of(edge_index: Any) -> LocalAdjacency | None:
    """Counts a use of an edge_index; returns its cache from the second use on.

    None for anything but a `[2, e]` tensor of integers, or an EdgeIndex of one, on the CPU
    or on CUDA.
    """
    owner, edge_index = edge_index, plain_edges(edge_index)
    signature = _signature(edge_index)
    if signature is None:
        return None
    grouped = False
    if owner is not edge_index:  # a change by way of it counts on it alone
        grouped, signature = owner.is_sorted_by_col, (owner._version, *signature)
    found: LocalAdjacency | None = PROCESS.adjacencies.get(owner)
    if found is None and not edge_index.is_cpu:
        found = _followed(edge_index)
    changed = found is None or found.signature != signature
    if found is None or changed or found.is_elsewhere(edge_index):
        # of many edges on a device, PyG's messages may not fit
        many = not edge_index.is_cpu and edge_index.size(1) >= _MANY
        at_once = grouped or many or _first_edges_of(edge_index) is not None
        found = LocalAdjacency(signature, uses=int(at_once))
        found.memory = edge_index.untyped_storage()
        PROCESS.adjacencies[owner] = found
    found.uses += 1
    return found if found.uses > 1 else None


def _first_edges_of(edge_index: Tensor) -> LocalAdjacency | None:
    """Returns the cache of the tensor of whose first edges this one is a view."""
    whole = edge_index._base
    if whole is None or edge_index.data_ptr() != whole.data_ptr():
        return None
    same = whole.dim() == 2 and edge_index.stride() == whole.stride()
    found = known(whole) if same else None
    return found if found is not None and found.batch is not None else None


def _signature(edge_index: Any) -> Any:
    """Returns the version and storage of an edge_index; None for other tensors."""
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
        return None
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        return None
    if edge_index.dtype not in _INDICES or not has_products(edge_index):
        return None
    if edge_index.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(
        edge_index
    ):
        return None
    place = edge_index.data_ptr(), edge_index.size(1), edge_index.stride()
    return edge_index._version, place


def first_edges(edge_index: Tensor, edges: Sequence[Any] | Tensor, count: int) -> Any:
    """Returns the first `count` rows of values per edge; other values unchanged."""
    if isinstance(edges, Tensor) and edges.dim() and len(edges) == edge_index.size(1):
        return edges[:count]
    return edges
