"""Plans the halos and matrices of the edges that a rank owns, and keeps constant products.

[Note: constant inputs] The features of a full-graph script are the same tensor in every
epoch, so A X0 is the same product. At its first use, an input may still turn out to be used
once, such as the output of dropout, and A X0 at the full width would be computed for nothing.
So the first use only records the input, by weak reference, and the second caches its product.

Activation checkpointing recomputes a layer in the backward pass, and both passes must save the
same tensors. So the cache is not used while hooks for saved tensors are active.

A resumed run caches at their first use those inputs that the saved run had seen, so that both
runs round alike. A checkpoint holds a fingerprint of these inputs, of a sample of rows.

Changes of an input are detected by its version counter, which in-place operations increment,
but writes through `x.data` or a shared NumPy array do not. A rank sees its own rows only, so
an input must change on all ranks or on none.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.failure import CHANGED, needing, watch_of
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.halo import Halo, Link
from pyg_distcomm.halo.halo import DEGREES, StagedHalo, exchange, exchange_transpose
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.kernels import memory
from pyg_distcomm.kernels.memory import MemoryCap
from pyg_distcomm.ops.grid_matrix import GridMatrix, LinkWrapper
from pyg_distcomm.ops.grid_plan import EdgeRoute, Edges, GridPlan, build_plan, listed

ORDERS = ("auto", "first", "last")
_SAMPLE = 4096  # rows of a fingerprint


@dataclass(frozen=True)
class MultiplyOrder:
    """Sets the order of the products of A X W in a layer.

    Args:
        order: "first" is (A X) W, "last" is A (X W), "auto" the one that exchanges less.
        keep_inputs: whether A X is kept for an X that does not change.
        repeats: whether it is the same whatever needs gradients.
    """

    order: str = "auto"
    keep_inputs: bool = True
    repeats: bool = False

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {self.order!r}")

    def takes_first(
        self, width_in: int, width_out: int, grads: tuple[bool, bool]
    ) -> bool:
        """Tells whether a layer computes (A X) W instead of A (X W)."""
        grads = (False, False) if self.repeats else grads
        before, after = width_in * (1 + grads[0]), width_out * (1 + grads[1])
        return self.order == "first" or (self.order == "auto" and before <= after)


class ProductCache:
    """Holds the inputs seen by one graph, and its cached products, by kind of product.

    Price: the rows of each cached product, `[n_i, f]`, for the lifetime of its input.
    """

    def __init__(self) -> None:
        # for each live input: kind -> (versions of the inputs, product or None, its version,
        # since a layer may write to it)
        self._products: Any = WeakTensorKeyDictionary()

    def product(
        self,
        kind: Any,
        inputs: tuple[Any, Any],
        multiply: Callable[[], Tensor],
        *,
        cache_now: bool = False,
    ) -> Tensor | None:
        """Returns the product of inputs that were seen before; else records them.

        Args:
            kind: identifies the operator.
            inputs: the features, and the weights of edges or None.
            multiply: computes the product; collective, so all ranks must have seen the
                same inputs as often.
            cache_now: whether to cache at the first use, as in a resumed run.
        """
        x, weight = inputs
        with torch._C.DisableTorchFunctionSubclass():
            fixed = _constant(x) and _constant(weight)
            if not fixed or has_saved_tensors_hooks():
                return None
            kinds = self._products.setdefault(x, {})
            key, now = _key(kind, weight), (_version(x), _version(weight))
            before, product, version = kinds.get(key, (None, None, 0))
        written = product is not None and product._version != version
        all_or_none(before not in (None, now) or written, x.rows.mesh)
        if before != now and isinstance(x.rows.mesh, Mesh):  # not that of a chunk
            seen = inputs_of(x.rows.mesh)
            seen.of.add(self)
            cache_now = seen.note(x, key) or cache_now
        if before != now and not cache_now:
            for old, (state, *_) in list(kinds.items()):
                if _is_stale(old, state, x):
                    del kinds[old]
            kinds[key] = now, None, 0
            return None
        if product is None or before != now or written:
            with torch.inference_mode(False), torch.no_grad():
                product = multiply()  # not an inference tensor
            kinds[key] = now, product, product._version
        kept: Tensor = product
        return kept

    def alive(self) -> Iterator[tuple[str, Any]]:
        """Yields the seen inputs that have not changed, and their kinds of products."""
        for x, kinds in list(self._products.items()):
            for key, (state, *_) in kinds.items():
                if not _is_stale(key, state, x):
                    yield _describe_key(key), x

    def stage(self, x: Any, kind: Any, weight: Any = None) -> int:
        """Returns 1 if an input was seen once, 2 if its product is cached, else 0."""
        found = self._products.get(x, {}).get(_key(kind, weight), (None, None, 0))
        before, product, _ = found
        if before is None or before[0] != _version(x):
            return 0
        return 1 if product is None else 2


class Inputs:
    """Holds the inputs seen by the graphs of a mesh, and those of a loaded checkpoint.

    Price: one all-reduce of a word for each live input when a checkpoint is saved; after a
    checkpoint is loaded, one for each new input until all of its inputs have been seen.
    """

    def __init__(self) -> None:
        self.of: Any = weakref.WeakSet()
        self._first: Any = WeakTensorKeyDictionary()  # when each input was first seen
        self._count = 0
        self._expected: list[list[Any]] = []

    def note(self, x: Any, key: tuple[Any, Any]) -> bool:
        """Records a new input; returns whether a loaded checkpoint had seen it. Collective."""
        self._count += 1
        self._first.setdefault(x, self._count)
        if not self._expected:
            return False
        like = [_describe_key(key), list(x.shape)]
        if not any(one[:2] == like for one in self._expected):
            return False
        found = [*like, _fingerprint(x)]
        if found not in self._expected:
            return False
        self._expected.remove(found)
        return True

    def as_text(self, mesh: Mesh) -> str:
        """Returns the inputs that are in use on all ranks, as text; collective."""
        here = {(self._first[x], name): x for one in self.of for name, x in one.alive()}
        every = collectives.all_gather_object(sorted(map(list, here)), mesh.world)
        both = [one for one in every[0] if all(one in other for other in every)]
        rows = [(name, here[number, name]) for number, name in both]
        return json.dumps([[name, list(x.shape), _fingerprint(x)] for name, x in rows])

    def expect(self, text: str) -> None:
        """Loads the text that `as_text` returned in the saved run."""
        self._expected = json.loads(text) if text else []


def inputs_of(mesh: Mesh) -> Inputs:
    """Returns the `Inputs` of a mesh."""
    if mesh.inputs is None:
        mesh.inputs = Inputs()
    return mesh.inputs  # type: ignore[no-any-return]


def _describe_key(key: tuple[Any, Any]) -> str:
    kind, weight = key
    return f"{kind} {weight is not None}"


def _fingerprint(x: Any) -> int:
    """Returns a hash of sampled rows that does not depend on the partition; collective."""
    rows = x.rows
    some = rows.gid % max(1, rows.total // _SAMPLE) == 0
    local = x.to_local().detach()
    width = math.prod(local.shape[1:])  # -1 is ambiguous without rows
    own = local[some.to(x.device)].reshape(int(some.sum()), width)
    own = own.contiguous().cpu()
    words = torch.zeros(len(own), -(-own.size(1) * own.element_size() // 8) * 8).byte()
    words[:, : own.size(1) * own.element_size()] = own.view(torch.uint8)
    words = words.view(torch.int64)
    by_column = 2 * _mix_bits(torch.arange(words.size(1))) + 1
    by_row = _mix_bits((words * by_column).sum(1)) * (2 * _mix_bits(rows.gid[some]) + 1)
    return int(collectives.all_reduce(by_row.sum().view(1), rows.mesh.control)[0])


def _mix_bits(x: Tensor) -> Tensor:
    x = (x + 1) * -7046029254386353131  # wraps, as hashes do
    return (x ^ (x >> 29)) * -4658895280553007687


def all_or_none(changed: bool, mesh: Mesh, what: str = CHANGED) -> None:
    """Raises if a cached input, or `what`, has changed on some ranks only.

    Collective, in the order of calls; nothing is sent where nothing has changed.
    """
    watch = mesh.world.watch
    if watch is not None and mesh.world.size > 1:
        if changed:
            watch.meet_changed(mesh.stage.rank, mesh.world.size, what)
        else:
            watch.pass_by(mesh.stage.rank)


def _constant(t: Any) -> bool:
    return t is None or not (t.requires_grad or t.is_inference())


def has_saved_tensors_hooks() -> bool:
    """Returns whether hooks for saved tensors are active, as in torch's checkpointing."""
    try:  # which torch refuses where there are any
        with torch.autograd.graph.disable_saved_tensors_hooks("only asked"):
            return False
    except RuntimeError:
        return True


def _key(kind: Any, weight: Any) -> tuple[Any, Any]:
    # WeakIdRef compares by identity, and a dead one equals nothing but itself
    return kind, None if weight is None else WeakIdRef(weight)


def _version(x: Any) -> int:
    if x is None:
        return 0
    local = getattr(x, "local", x)  # which a script may have written to
    return int(x._version) + (0 if local is x else int(local._version))


def _is_stale(key: tuple[Any, Any], state: tuple[int, int], x: Any) -> bool:
    by = key[1]
    return state[0] != _version(x) or (by is not None and by() is None)


def same_storage(a: Tensor | None, b: Tensor | None) -> bool:
    """Tells whether two tensors are the same rows of one memory."""
    if a is None or b is None:
        return a is b
    # by storage, not by address: tensors of no rows share one, and ranks must agree
    one, other = (
        (t.untyped_storage()._cdata, t.storage_offset(), t.stride()) for t in (a, b)
    )
    return one == other


Kind = TypeVar("Kind", bound=Tensor)


@dataclass(frozen=True, eq=False)
class LocalGraph:
    """Holds own edges in local numbering: own nodes first, then ghosts.

    Shapes (this rank; n own nodes, m own sources, which are the nodes where edges have
    one node type; h ghosts, e own edges):
        make_ends   returns `ends` in the narrowest index type, made anew at each call
        ghost_gid   [h]  grouped by owner, ascending within
        halo        brings the ghosts' rows, over all ranks
        memory      what layers may take; None is without a cap
        most        n + e of the rank where that is most, known with a cap
    """

    make_ends: Callable[[], Tensor]
    ghost_gid: Tensor
    halo: Halo
    num_own: int
    memory: MemoryCap | None = field(default=None, kw_only=True)
    most: int = field(default=0, kw_only=True)

    @cached_property
    def ends(self) -> Tensor:
        """Sources, 0 .. m-1 own, m .. m+h-1 ghosts, and targets, 0 .. n-1: `[2, e]` int64.

        Kept from the first use on, for layers that compute messages; products need none.
        """
        ends = self.make_ends().long()
        return ends if self.memory is None else self.memory.moved(ends)

    @property
    def source_lid(self) -> Tensor:
        """The source of each edge `[e]`."""
        return self.ends[0]

    @property
    def target_lid(self) -> Tensor:
        """The target of each edge `[e]`."""
        return self.ends[1]

    def with_ghosts(self, x: Tensor, link: Link | None = None) -> Tensor:
        """Returns own and ghost rows `[m + h, ...]` of own rows `x`, differentiably.

        Args:
            x: own rows.
            link: the halo, wrapped by the link policy of a layer; None is the exact halo.
        """
        if self.halo.silent:
            return x
        if x.dim() == 1:
            return self.with_ghosts(x.unsqueeze(1), link).squeeze(1)
        if self.memory is not None and link is None:
            staged: Tensor = Ghosted.apply(x, StagedHalo(self.halo, self.memory))
            return staged
        return torch.cat([x, exchange(x, self.halo if link is None else link)])

    def with_constant_ghosts(self, x: Any, constants: ProductCache) -> Tensor | None:
        """Returns the same for a constant input, from the cache.

        Its rows are fetched once, when it is used for the second time; see
        [Note: constant inputs]. Collective.

        Args:
            x: the input, a DistTensor.
            constants: caches the rows `[m + h, ...]` for the lifetime of `x`.

        Returns:
            None if nothing is cached: for other inputs, and within a memory cap.
        """
        if self.halo.silent or self.memory is not None:
            return None
        return constants.product(
            "rows", (x, None), lambda: self.with_ghosts(x.to_local().contiguous())
        )

    def with_ghost_facts(self, x: Tensor, link: Link | None = None) -> Tensor:
        """Returns the same for node values that only depend on the graph."""
        return self.with_ghosts(x, link)


class Ghosted(torch.autograd.Function):
    """Concatenates own rows and ghosts, which arrive in stages, within the memory cap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: StagedHalo) -> Tensor:
        ctx.link, n = link, len(x)
        shape = n + link.num_ghosts, *x.shape[1:]
        out = link.cap.empty(shape, x.dtype, x.device)
        out[:n] = x
        link.begin(x, out[n:])()
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        own, ghosts = g.split((len(g) - ctx.link.num_ghosts, ctx.link.num_ghosts))
        return exchange_transpose(ghosts, own, ctx.link), None


@dataclass(frozen=True)
class OperatorKind:
    """Identifies a matrix that is derived from the edges.

    Args:
        name: "sum" is `A`, and "gcn" `D^-1/2 (A + I) D^-1/2`.
        improved, add_self_loops: the options of "gcn", as in `GCNConv`.
    """

    name: str = "sum"
    improved: bool = False
    add_self_loops: bool = False

    @property
    def normalize(self) -> bool:
        """Whether values are normalised by degrees."""
        return self.name == "gcn"


@dataclass(eq=False)
class Topology:
    """Holds the edges whose targets this rank owns, and the operators derived from them.

    Args:
        source_gid: `[e]` on the CPU.
        target_gid: `[e]` on the CPU, nodes of this rank.
        nodes: the rows of nodes on this rank.
        edges: the rows of edges on this rank, by position in the original edge_index.
        halo: the kind of exchange of products; see `check_halo`.
        device: the device of operators.
        sources: the rows of sources on this rank, if their type differs from the targets'.
        ordering: the order of products in layers.
        link: the link policy of layers; None is exact.
        compared: the link and mode of each layer that the ranks have compared.
    """

    source_gid: Tensor
    target_gid: Tensor
    nodes: Rows
    edges: Rows
    halo: str = "auto"
    device: torch.device = torch.device("cpu")
    sources: Rows | None = None
    ordering: MultiplyOrder = MultiplyOrder()
    constants: ProductCache = field(default_factory=ProductCache, repr=False)
    link: LinkPolicy | None = field(default=None, repr=False)
    _plans: dict[Any, Any] = field(default_factory=dict, repr=False)
    compared: Any = field(default_factory=weakref.WeakKeyDictionary, repr=False)
    # whether these are the edges of a chunk of a pipeline
    chunked: ClassVar[bool] = False

    def constant_rows(self, x: Any) -> Tensor | None:
        """Returns own and ghost rows of a constant input, if they are cached.

        As `LocalGraph.with_constant_ghosts`; also None if `with_ordering` has switched the
        cache off.
        """
        if not self.ordering.keep_inputs:
            return None
        return self.locals.with_constant_ghosts(x, self.constants)

    def read_by(self, layer: Any, link: Any) -> None:
        """Does nothing; the chunks of a pipeline record here which layer reads next."""

    @property
    def source_rows(self) -> Rows:
        """The rows of source nodes: `nodes` unless their type differs."""
        return self.nodes if self.sources is None else self.sources

    def check_one_node_type(self) -> None:
        """Raises for edges between two node types, whose matrix is not square."""
        if self.sources is not None:
            raise TypeError(
                "this layer multiplies by a square matrix, but the edges go from "
                f"{self.sources.total} nodes of one type to {self.nodes.total} of another; "
                "use a layer that takes a pair (x_source, x_target), such as SAGEConv, "
                "GATConv or GraphConv"
            )

    @cached_property
    def locals(self) -> LocalGraph:
        """Own edges in local numbering, and the halo of their sources; collective."""
        nodes, sources, mesh = self.nodes, self.source_rows, self.nodes.mesh
        ghost, partition = self.all_gid[len(sources) :], sources.partition
        assert partition is not None
        owner = partition.owner_of(ghost)
        counts = torch.bincount(owner, minlength=mesh.size).tolist()
        halo = Halo.build(ghost, counts, sources.gid, mesh.world)
        most = torch.tensor([len(nodes) + len(self.target_gid)])
        if nodes.memory is not None:
            most = collectives.all_reduce(most, mesh.world, "max")
        return LocalGraph(
            partial(_ends_on, self.device, *self._numbering),
            ghost,
            halo.to(self.device),
            len(nodes),
            memory=nodes.memory,
            most=int(most),
        )

    @cached_property
    def all_gid(self) -> Tensor:
        """Ids of own sources, and of ghosts, grouped by owner: in local numbering."""
        partition = self.source_rows.partition
        assert partition is not None
        gid = listed(self.source_gid, self.source_rows.total)
        gid = gid[partition.owner_of(gid) != self.nodes.mesh.rank]
        order = partition.owner_of(gid).argsort(stable=True)
        return torch.cat([self.source_rows.gid, gid[order]])

    @cached_property
    def in_degree(self) -> Tensor:
        """The number of edges into each own node `[n]`, int64."""
        return torch.bincount(self.locals.make_ends()[1], minlength=len(self.nodes))

    @property
    def own_degrees(self) -> Callable[[], Tensor] | None:
        """A function that returns the in-degrees of own sources; None if their type differs."""
        return (lambda: self.in_degree) if self.sources is None else None

    @cached_property
    def reversed(self) -> Topology:
        """The reversed edges, owned by their former sources; collective."""
        sources, mesh = self.source_rows, self.nodes.mesh
        assert sources.partition is not None
        owner = sources.partition.owner_of(self.source_gid)
        slot = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=mesh.size).tolist()
        back = collectives.exchange_counts(counts, mesh.world)
        local = mesh.size == 1
        route = EdgeRoute(mesh.world, slot, tuple(counts), tuple(back), local)
        gid, source, target = (
            route.carry(ids)
            for ids in (self.edges.gid, self.source_gid, self.target_gid)
        )
        order = torch.argsort(gid)
        nodes = self.nodes if self.sources is None else None
        edges = Rows(gid[order], self.edges.total, mesh, None, nodes=nodes)
        return Topology(
            target[order],
            source[order],
            sources,
            edges,
            self.halo,
            self.device,
            None if self.sources is None else self.nodes,
        )

    def sum_plan(self, trainable: bool = False) -> GridPlan:
        """The plan of `sum over in-edges`; collective the first time."""
        return self._planned("sum", trainable, lambda: Edges.among(*self._numbering))

    @property
    def _numbering(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int]:
        """What `Edges.among` numbers own edges by."""
        size = max(self.source_rows.total, self.nodes.total)
        gids = self.source_gid, self.target_gid
        return gids, (self.all_gid, self.nodes.gid), size

    @cached_property
    def row_words(self) -> int:
        """The number of rows that all ranks receive when `HaloConv` fetches; collective."""
        words = torch.tensor([self.locals.halo.price(1).words])
        return int(collectives.all_reduce(words, self.nodes.mesh.world))

    @cached_property
    def product_words(self) -> float:
        """The words per feature that all ranks receive in a product; collective.

        For as many features as the fiber has ranks, or a multiple. The plan of the product is
        kept where that is cheaper than rows.
        """
        mesh, p, known = self.nodes.mesh, self.nodes.mesh.grid[2], set(self._plans)
        words = torch.tensor([self.sum_plan().matrix.price(p).words])
        found = int(collectives.all_reduce(words, mesh.world)) / p
        if self.row_words <= found:
            for key in self._plans.keys() - known:
                del self._plans[key]
        return found

    @property
    def is_gridded(self) -> bool:
        """Whether the grid has several axes, or a dry run prices those that have."""
        mesh = self.nodes.mesh
        return mesh.grid[1:] != (1, 1) or mesh.world.observer is not None

    @cached_property
    def adds_on_grid(self) -> bool:
        """Whether sums of rows are computed as products on a grid with several axes.

        Where they take fewer words than rows that come here, for sums here; collective.
        """
        if self.nodes.mesh.grid[1:] == (1, 1) or self.sources is not None:
            return False
        return self.product_words < self.row_words

    def _planned(
        self, kind: str, trainable: bool, edges: Callable[[], Edges]
    ) -> GridPlan:
        halo = "rows" if trainable and self.halo != "blocks" else self.halo
        key = kind, halo
        if key not in self._plans:
            self.check_one_node_type()
            nodes = self.nodes
            assert nodes.partition is not None
            plan = build_plan(edges(), nodes.partition, nodes.mesh, halo)
            plan = plan.to(self.device)
            if nodes.memory is not None:
                how = nodes.memory, nodes.mesh.world, kind == "sum"
                plan = replace(plan, matrix=plan.matrix.within(*how))
            self._plans[key] = plan
        found: GridPlan = self._plans[key]
        return found

    def operator(
        self,
        kind: OperatorKind,
        weight: Tensor | None,
        dtype: torch.dtype,
        exchange: LinkWrapper | None = None,
        computed: bool = False,
    ) -> GridMatrix:
        """Returns the matrix that a layer multiplies rows with; collective the first time.

        Args:
            kind: the matrix; degrees and self-loops are global.
            weight: the weights of own edges `[e]`; None is 1.
            dtype: the type of the rows.
            exchange: puts other links in place of the exact ones; None is exact.
            computed: whether weights are learnt, or computed in each run: also while no
                gradient is wanted rows travel then, as with learnt ones.
        """
        if weight is None and not kind.normalize:
            return self.sum_plan().matrix.over(exchange)
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            return self._valued(kind, weight, dtype, True, exchange).over(exchange)
        return self._cached_operator(kind, weight, dtype, computed).over(exchange)

    def _valued(
        self,
        kind: OperatorKind,
        weight: Tensor | None,
        dtype: torch.dtype,
        computed: bool,
        exchange: LinkWrapper | None = None,
    ) -> GridMatrix:
        """Returns a matrix with its values, which are learnt where gradients are on."""
        plan = self._looped_plan(kind.add_self_loops, computed)  # before values exist
        if kind.normalize:
            degrees = None
            if exchange is not None:
                degrees = exchange.wrap(self.locals.halo, DEGREES)
            value = self.gcn_norm(weight, kind, dtype, degrees)[1]
        else:
            assert weight is not None
            value = weight.to(dtype)
        if value.requires_grad and torch.is_grad_enabled():
            return plan.with_learnt(value)
        return plan.valued(value.detach())

    def _looped_plan(self, add_self_loops: bool, trainable: bool) -> GridPlan:
        if not add_self_loops:
            return self.sum_plan(trainable)

        def edges() -> Edges:
            found, n = Edges.among(*self._numbering), len(self.nodes)
            places = loop_places(self, found.ends, self.edges)
            looped, _ = _with_loops(found.ends, places, n, None, 1.0)
            return replace(found, ends=looped)

        return self._planned("loops", trainable, edges)

    def gcn_norm(
        self,
        weight: Tensor | None,
        kind: OperatorKind,
        dtype: torch.dtype,
        link: Link | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns own edges with loops, local, and their symmetric normalisation.

        With gradients switched off ends are of the narrowest index type, and are not kept.
        """
        here, kept = self.locals, torch.is_grad_enabled()
        ends = [here.ends if kept else here.make_ends()]  # popped: freed when looped
        return gcn_norm(here, ends.pop(), self.edges, weight, kind, dtype, link)

    def _cached_operator(
        self,
        kind: OperatorKind,
        weight: Tensor | None,
        dtype: torch.dtype,
        computed: bool,
    ) -> GridMatrix:
        """Caches one matrix with fixed values per kind, until these change."""
        key = (kind, dtype, computed)
        known = self._plans.get(key)
        tracked = weight is None or not weight.is_inference()
        version = weight._version if weight is not None and tracked else None
        if known is not None and tracked:
            seen, seen_version, matrix = known
            same = same_storage(seen, weight)
            all_or_none(same and seen_version != version, self.nodes.mesh)
            if same and seen_version == version:
                return matrix  # type: ignore[no-any-return]
        with torch.no_grad(), self._explaining_memory(dtype):
            matrix = self._valued(kind, weight, dtype, computed)
        if self.nodes.memory is not None:
            how = self.nodes.memory, self.nodes.mesh.world, torch.is_grad_enabled()
            matrix = matrix.within(*how)
        elif torch.is_grad_enabled() and not computed:
            _ = matrix.transposed  # now, while there are no activations beside it
        if not computed:  # in every run
            memory.give_back()
        self._plans[key] = (weight, version, matrix)
        return matrix

    def _explaining_memory(self, dtype: torch.dtype) -> Any:
        """Returns a context that explains an out-of-memory error of a matrix."""
        watch = watch_of(self.nodes.mesh)
        each = 2 * (8 + dtype.itemsize)  # a column and a value, and the same by source

        def size() -> int:
            return each * (len(self.edges) + len(self.nodes))

        what = f"a matrix of {len(self.edges):,} edges, and its transpose,"
        return needing(what, size, watch, self.device)

    def placed(self, name: str, x: Kind) -> Kind:
        """Returns a tensor as it is if it is on the device of the edges; else all ranks raise.

        Raises:
            ValueError: naming both devices.
        """
        with torch._C.DisableTorchFunctionSubclass():  # facts of x, as they are
            here, there = self.device, x.device
        alike = here.type == there.type and None in (here.index, there.index)
        if here == there or alike:
            return x
        error = ValueError(
            f"move the model and the data to one device, by .to(mesh.device): {name} lies on "
            f"{there}, and the edges on {here}"
        )
        watch = watch_of(self.nodes.mesh)
        if watch is not None:
            watch.fail(error)
        raise error

    def to(self, device: torch.device) -> Topology:
        """Returns the same edges on another device, where plans are made again."""
        if device == self.device:
            return self
        return Topology(
            self.source_gid,
            self.target_gid,
            self.nodes,
            self.edges,
            self.halo,
            device,
            self.sources,
            self.ordering,
            link=self.link,
        )


def _ends_on(device: torch.device, *numbering: Any) -> Tensor:
    """Returns own edges in local numbering `[2, e]` on a device; see `Edges.among`."""
    return Edges.among(*numbering).ends.to(device)


def loop_places(graph: Any, ends: Tensor, rows: Rows) -> tuple[Tensor | None, Tensor]:
    """Returns the positions of edges that are not self-loops, None of all, and of loops.

    On a device they are kept with `rows`, since the host waits for them, for one `graph`.
    """
    seen, found = rows.derived.get("loops", (None, None))
    if seen is not graph:
        looped = ends[0] == ends[1]
        loops = looped.nonzero().flatten()
        found = ((~looped).nonzero().flatten() if len(loops) else None), loops
        if not ends.is_cpu:
            rows.derived["loops"] = graph, found
    return found  # type: ignore[no-any-return]


def _with_loops(
    ends: Tensor,
    places: tuple[Tensor | None, Tensor],
    num_own: int,
    weight: Tensor | None,
    fill: float,
) -> tuple[Tensor, Tensor | None]:
    """Implements PyG's `add_remaining_self_loops`, of edges with these `loop_places`."""
    others, loops = places
    added = torch.arange(num_own, device=ends.device, dtype=ends.dtype).expand(2, -1)
    if weight is not None:
        own = weight.new_full((num_own,), fill)
        node, looped = ends[0].index_select(0, loops), weight.index_select(0, loops)
        if not weight.is_cpu:  # of a node's loops the last one counts, as on the CPU
            place = torch.arange(len(node), device=node.device)
            last = place.new_zeros(len(own)).scatter_reduce_(0, node, place, "amax")
            # each has its gradient
            looped = looped.detach()[last[node]] + (looped - looped.detach())
        own[node.long()] = looped
        kept = weight if others is None else weight.index_select(0, others)
        weight = torch.cat([kept, own])
    ends = ends if others is None else ends.index_select(1, others)
    return torch.cat([ends, added], 1), weight


def gcn_norm(
    here: LocalGraph,
    edge_index: Tensor,
    rows: Rows,
    weight: Tensor | None,
    kind: OperatorKind,
    dtype: torch.dtype,
    link: Link | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalises own edges symmetrically, as PyG's `gcn_norm` does on one process.

        w'_e = d_source^-1/2 w_e d_target^-1/2,   d_v = sum of w over edges into v

    Shapes: edge_index [2, e] in local numbering, of the edges `rows`, weight [e], return
    [2, e'], [e'].
    Price: one word per ghost, for its degree, over `link` if it is given.
    """
    fill = 2.0 if kind.improved else 1.0
    if kind.add_self_loops:
        places = loop_places(here, edge_index, rows)
        edge_index, weight = _with_loops(edge_index, places, here.num_own, weight, fill)
    if weight is None:
        weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
    degree = weight.new_zeros(here.num_own).index_add(0, edge_index[1], weight)
    scale = degree.pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0)
    every = here.with_ghost_facts(scale.unsqueeze(1), link).squeeze(1)
    if torch.is_grad_enabled():
        return edge_index, every[edge_index[0]] * weight * scale[edge_index[1]]
    value = every.index_select(0, edge_index[0]).mul_(weight)
    return edge_index, value.mul_(scale.index_select(0, edge_index[1]))
