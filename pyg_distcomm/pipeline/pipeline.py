"""Trains, and saves, layers cut into stages over ranks, through which chunks of nodes stream.

[Note: pipeline] The layers of a deep model are divided into stages, and the nodes of the graph
into chunks, after [Chen23]. Each stage has the edges of the whole graph, and the weights of its
own layers only. Chunk by chunk, rows go from stage to stage. A layer reads neighbour rows of
this epoch if they are computed already, and otherwise those of an earlier epoch (see
[Note: sites] in `chunks.py`). Every row crosses each border between stages once in the
forward pass, and its gradient once in the backward pass, so bytes depend neither on the edges
cut nor on the number of layers.

Symbols: n nodes, d features of a hidden layer, S stages, W ranks of a stage, M chunks, L
exchanges of rows among the ranks of a stage, s tensors that all stages share (GCNII's x_0).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_distcomm.checkpoint import (
    check_files,
    find,
    load_optimizer,
    optimizer_state,
    whole_folder,
    write_files,
)
from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.consistency import naming, on_all_ranks
from pyg_distcomm.comm.failure import script_stacklevel
from pyg_distcomm.comm.ledger import Price
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.partition.atomic import read_whole
from pyg_distcomm.pipeline import layer_stack
from pyg_distcomm.pipeline.chunk_graph import ChunkPass
from pyg_distcomm.pipeline.chunks import GRADIENTS, plan_chunks
from pyg_distcomm.pipeline.epoch import (
    OP,
    Epoch,
    Loss,
    Stage,
    accumulated_gradients,
    broadcast_weights,
    clip_grad_norm_,
    fill,
    forward_all_nodes,
)
from pyg_distcomm.pipeline.layer_stack import (
    StackLayer,
    cut_layers,
    estimated_costs,
    read_stack,
)
from pyg_distcomm.pipeline.schedule import BUBBLE, StageSchedule, bubble, fewest_chunks
from pyg_distcomm.sharded.dist_tensor import DistTensor


def stage_words(n: int, d: int, stages: int, shared: int = 0) -> int:
    """Returns the words that all ranks send between stages in an epoch, after [Chen23]:

    2 (S - 1) n d (1 + s)
    """
    return 2 * (stages - 1) * n * d * (1 + shared)


def hybrid_words(
    n: int,
    d: int,
    stages: int,
    ways: int,
    *,
    layers: int,
    replication: float,
    weights: int,
    shared: int = 0,
) -> float:
    """Returns the words that all ranks send in an epoch, if a stage has several ranks:

        2 (S - 1) n d (1 + s) + 2 L alpha n d + 2 (W - 1) w

    Args:
        n, d, stages, shared: as in `stage_words`.
        ways: the ranks of a stage, W.
        layers: the exchanges of rows in a forward pass, L.
        replication: the ghosts of all ranks of a stage, divided by n, alpha.
        weights: the number of parameters of all layers, and of their tensors, w.
    """
    rows = 2 * layers * replication * n * d
    return stage_words(n, d, stages, shared) + rows + 2 * (ways - 1) * weights


@dataclass(frozen=True)
class EpochPrice:
    """The traffic of this rank in an epoch of training; the ledger counts exactly this.

    Args:
        stage: rows and their gradients, from and to neighbouring stages.
        rows: rows and their gradients, among the ranks of a stage, without a link.
        weights: gradients of weights, among the ranks of a stage.
        loss: the loss, from the last stage to all.
        bytes: all bytes received.
        coded: the bytes of rows that travel by a link; see `LinkPolicy.price`.
    """

    stage: Price
    rows: Price
    weights: Price
    loss: Price
    bytes: int
    coded: int = 0

    @property
    def words(self) -> int:
        """The words received, without those of a link."""
        parts = (self.stage, self.rows, self.weights, self.loss)
        return sum(part.words for part in parts)


def epoch_price(mesh: Mesh, stage: Stage, weights: Sequence[Tensor]) -> EpochPrice:
    """Returns the price of an epoch on this rank; `weights` require gradients."""
    run, axis, own = stage.run, mesh.stage, stage.run.plan.own
    messages = sum(end > begin for begin, end in itertools.pairwise(own.bounds))
    boxes = stage.inbox, None if axis.rank == axis.size - 1 else stage.outbox
    # rows one way, their gradients the other
    ends = ((box.numel(), box.element_size()) for box in boxes if box is not None)
    borders = [(Price(n, n, messages), size) for n, size in ends]
    counts = Counter[torch.dtype]()
    for p in weights:
        counts[p.dtype] += p.numel() + 1  # and whether it has one
    sums = [
        (_all_reduce_price(n, mesh.size), kind.itemsize) for kind, n in counts.items()
    ]
    loss = [(_all_reduce_price(1, axis.size), 8)]
    parts = {"stage": borders, "rows": run.prices(), "weights": sums, "loss": loss}
    moved = sum(price.bytes(item) for part in parts.values() for price, item in part)
    totals = {
        k: sum((price for price, _ in part), Price()) for k, part in parts.items()
    }
    coded = 0 if run.link is None else run.link.price().total
    return EpochPrice(**totals, bytes=moved + coded, coded=coded)


def _all_reduce_price(numel: int, size: int) -> Price:
    words = collectives.ring_words(numel, size)
    return Price(words, words, 2 * (size - 1))


Made = TypeVar("Made")
_ORDER = 0x0DE2  # folded into the random keys of chunk orders: no others are equal
CROSSING = 0.5  # the share of edges between chunks from which on a pipeline warns


class Pipeline(torch.nn.Module):
    """Trains a stack of layers, cut into the stages of a mesh, on chunks of the graph.

        mesh = pdc.init(stages=4)
        data = pdc.partition(dataset[0], mesh)
        pipe = pdc.Pipeline(layers, mesh, chunks=16)
        opt = torch.optim.Adam(pipe.parameters())
        for epoch in range(200):
            opt.zero_grad()
            loss = pipe.train_step(data, lambda out, data: F.cross_entropy(
                out[data.train_mask], data.y[data.train_mask]))
            opt.step()
        out = pipe(data)

    Layers read and write by name, as in PyG's `Sequential`, whose headers are understood:
    with `(lin, "x -> x_0")` and `(GCN2Conv(...), "x, x_0, edge_index -> x")`, `x_0` goes
    along to each stage that reads it. Names that none writes are the data's.

    One chunk trains as the full graph does. With more, neighbours that are computed later
    are read as they were in an earlier epoch, and no gradient goes to them: see `gradient`.
    The results depend on the chunks and their order, not on the number of stages.

    Args:
        layers: a list of layers, a `Sequential` of torch or PyG, or a ModuleList; the same
            on all ranks. Weights start as rank 0's.
        mesh: of `pdc.init(stages=S)`; each stage has the ranks of one mesh of its own
            ("1d"), over which the rows of each chunk are spread (the hybrid), by the link
            of the data, exactly where a layer has link="exact" or attention depends on
            what it reads; between stages rows are exact.
        chunks: how many chunks, or the chunk of each node `[num_nodes]`. METIS cuts them,
            within the ranks of a stage. The fewer, the nearer to the full graph; without,
            the fewest that `bubble` allows.
        bubble: the share of turns that a stage may be idle, where chunks are not given:
            M = (S - 1)(1 - bubble) / bubble, so that 1/4 is 3 (S - 1) chunks.
        history_refresh: for how many epochs history stays as it is, R.
        order: of chunks. "alternating" draws one every other epoch, and reverses it in
            between: of two epochs each edge between chunks is read fresh in one, both ways.
            "shuffled" draws one every epoch, "fixed" takes them as they are numbered.
        gradient: of neighbours whose history was read: "surrogate" drops it, which gives
            exact gradients of what was computed; "scaled" counts those of other chunks that
            are known twice.
        recompute: whether a chunk is computed again in the backward pass, instead of keeping
            what autograd needs of all chunks.
        balance: how many layers each stage has; without, such that each has as many that
            read neighbours, if possible.
        seed: the seed of orders and dropout; the mesh's if None.

    Price: `price()`; 2 (S - 1) n d (1 + s) words per epoch between stages, with s values
    beside x that cross borders, and the hybrid's exchanges.

    Raises:
        ValueError, TypeError: on all ranks: for more stages than layers, chunks without
            nodes, layers that normalise over nodes, and what is no layer.
    """

    saves_itself = True  # see `checkpoint`

    def __init__(
        self,
        layers: Any,
        mesh: Mesh,
        *,
        chunks: int | Tensor | None = None,
        bubble: float = BUBBLE,
        history_refresh: int = 1,
        order: str = "alternating",
        gradient: str = "surrogate",
        recompute: bool = True,
        balance: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(mesh, Mesh):
            raise TypeError(
                f"mesh must be of pdc.init(stages=S), got {type(mesh).__name__}; the order "
                "is Pipeline(layers, mesh)"
            )
        self.mesh, self.epoch, self.recompute = mesh, 0, recompute
        self.order, self.refresh = order, history_refresh
        self._chunks: Any = chunks
        self._seed = mesh.seed if seed is None else seed
        with on_all_ranks(mesh.everyone):
            fewest = fewest_chunks(mesh.stage.size, bubble)
            self._chunks = fewest if chunks is None else chunks
            counts = {"chunks": self._chunks, "history_refresh": history_refresh}
            layer_stack.check_options(mesh, order, counts, self._seed)
            if gradient not in GRADIENTS:
                raise ValueError(
                    f"gradient={gradient!r} must be one of {', '.join(GRADIENTS)}"
                )
            stack = read_stack(layers)
            layer_stack.check_links(stack)
            balance = layer_stack.check_balance(stack, mesh.stage.size, balance)
        self._cross = GRADIENTS[gradient]
        options: dict[str, Any] = {"order": order, "gradient": gradient, **counts}
        options |= {"seed": self._seed, "balance": balance}
        layer_stack.check_same(stack, mesh, options)
        stack = [layer.converted() for layer in stack]
        broadcast_weights(stack, mesh)
        self._run: ChunkPass | None = None
        if balance is None:
            balance = cut_layers(estimated_costs(stack), mesh.stage.size)
        self.balance = tuple(balance)
        self._keep_own_layers(stack)
        self._stage: Stage | None = None
        self._saved: Any = None

    def _keep_own_layers(self, stack: list[StackLayer]) -> None:
        """Keeps the layers of this stage, and drops the others."""
        place = self.mesh.stage.rank
        begin = sum(self.balance[:place])
        end = begin + self.balance[place]
        with on_all_ranks(self.mesh.everyone):
            layer_stack.check_untied(stack, self.balance)
        self.layers = torch.nn.Module()
        for layer in stack[begin:end]:
            if isinstance(layer.run, torch.nn.Module):
                self.layers.add_module(layer.name, layer.run)
        if not any(True for _ in self.layers.parameters()):
            # optimizers refuse to have no parameters, and would on this rank alone
            self.register_parameter("nothing", torch.nn.Parameter(torch.empty(0)))
        self._stack = [
            layer if begin <= k < end else layer.placeholder()
            for k, layer in enumerate(stack)
        ]
        self._layer_range = begin, end

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out history: a copy fills its own by an exact pass at its first use."""
        return {**self.__dict__, "_run": None, "_stage": None}

    # planning

    def _plan(self, data: Data) -> None:
        """Cuts the share into chunks; collective."""
        with on_all_ranks(self.mesh.everyone):
            edge_index = layer_stack.check_share(data, self.mesh)
        plan = plan_chunks(edge_index, self._chunks, self._seed)
        if plan.crossing > CROSSING and self.mesh.everyone.rank == 0:
            warnings.warn(
                f"{plan.crossing:.0%} of the edges lie between the {plan.chunks} chunks; "
                f"above {CROSSING:.0%} chunks were measured to cost accuracy "
                "(docs/papers/gnnpipe.md). Give fewer chunks, or a larger bubble, or "
                "order='shuffled', gradient='scaled', history_refresh=23, which cost less",
                stacklevel=script_stacklevel(),
            )
        self._run = ChunkPass(plan, self._cross, self._seed)

    @torch.inference_mode(False)  # training uses tensors that an evaluation may plan
    def _prepare(self, data: Data) -> Stage:
        """Returns the stage; the first call plans, and fills sites by a pass over the graph."""
        layer_stack.check_alive(self.mesh)
        if self._run is None:
            self._plan(data)
        assert self._run is not None
        topology = self._run.plan.topology
        edge_index = layer_stack.check_planned_data(data, topology)
        if self._run.link is not edge_index.topology.link:
            with on_all_ranks(self.mesh.everyone):
                self._run.set_link(edge_index.topology.link)
        if self._stage is None:
            stage = Stage(self._stack, *self._layer_range, self._run)
            with on_all_ranks(self.mesh.everyone):  # each stage reads its own names
                stage.load_data(data)
            with self._training_mode(False):
                fill(stage, self.mesh)
            if self._saved is not None:
                self._saved.restore(self._run)
                self._saved = None
            self._stage = stage
        with layer_stack.reporting_failure(self.mesh):
            self._stage.load_data(data)
        return self._stage

    @contextlib.contextmanager
    def _training_mode(self, training: bool) -> Iterator[None]:
        before = [(module, module.training) for module in self.modules()]
        self.train(training)
        try:
            yield
        finally:
            for module, was in before:
                module.training = was

    # training and evaluation

    @cached_property
    def schedule(self) -> StageSchedule:
        """When each stage computes which chunk in an epoch."""
        chunks = self._known(self._run).plan.chunks
        return StageSchedule(self.mesh.stage.size, chunks)

    @property
    def crossing(self) -> float:
        """The fraction of edges between chunks, which are read late in one epoch of two."""
        return self._known(self._run).plan.crossing

    def extra_repr(self) -> str:
        """Describes the stages, and the chunks once the pipeline has seen the data."""
        cut = f"stages={self.mesh.stage.size}, balance={list(self.balance)}"
        if self._run is not None:
            plan = self._run.plan
            idle = bubble(self.mesh.stage.size, plan.chunks)
            cut += f", chunks={plan.chunks} ({idle:.1%} bubble, {plan.crossing:.1%} of edges "
            cut += "between)"
        return f"{cut}, order={self.order}, history_refresh={self.refresh}"

    def _known(self, made: Made | None) -> Made:
        if made is None:
            raise ValueError(
                "chunks are not cut yet, nor costs known, since the pipeline has not seen the "
                "data; call pipe(data) or train_step first"
            )
        return made

    def order_of(self, epoch: int) -> list[int]:
        """Returns the order of chunks in an epoch, the same on all ranks."""
        count = self._known(self._run).plan.chunks
        if self.order == "fixed":
            return list(range(count))
        epochs_per_draw = 2 if self.order == "alternating" else 1  # epochs of one draw
        key = random.fold(self._seed, _ORDER, epoch // epochs_per_draw)
        order = [int(c) for c in random.keyed_permutation(key, count)]
        return order[::-1] if epoch % epochs_per_draw else order

    def train_step(self, data: Data, loss_fn: Loss) -> Tensor:
        """Runs one epoch forward and backward; `opt.step()` is the script's.

        Gradients are added to those there are, as by `loss.backward()`.

        Args:
            data: the share of the graph.
            loss_fn: returns the loss of (output, data), the output a DistTensor with a row a
                node; called on the last stage, so penalties go into the optimizer.

        Returns:
            The loss, without gradient, on all ranks.
        """
        stage = self._prepare(data)
        run = stage.run
        if run.link is not None:
            run.link.begin_pipeline(run.plan.topology.nodes)
        run.epoch = self.epoch
        refresh = (self.epoch + 1) % self.refresh == 0
        order = self.order_of(self.epoch)
        epoch = Epoch(self.mesh, stage, order, self.recompute, refresh)
        own = list(self.parameters())
        with (
            accumulated_gradients(self.mesh, own),
            layer_stack.reporting_failure(self.mesh),
        ):
            loss = epoch.run(data, loss_fn)
        self.epoch += 1
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales gradients of all stages down to a norm, as torch.nn.utils' does for one.

        Collective; returns the norm of the gradients of the whole stack, before.
        """
        return clip_grad_norm_(self.layers, self.mesh, max_norm, norm_type)

    def forward(self, data: Data) -> DistTensor:
        """Returns the exact output of the whole graph, without dropout, on every stage.

        Price: the rows that cross borders, and (S - 1) n c words for an output of width c.
        """
        out, stage, axis = *self._run_whole_graph(data), self.mesh.stage
        result = stage.result
        if axis.rank < axis.size - 1:
            out = out.new_empty((len(out), result.width), dtype=result.dtype)
            collectives.receive(out, axis.rank + 1, axis, OP).wait()
        if axis.rank:
            collectives.send(out, axis.rank - 1, axis, OP).wait()
        return _unpack_output(out, stage, data)

    def eval_step(self, data: Data, metric: Callable[[Any, Any], Any]) -> Any:
        """Returns a metric of the exact output of the whole graph, on all ranks.

        Args:
            data: the share of the graph.
            metric: of (output, data), called on the last stage.

        Price: the rows that cross borders, and what `metric` returns.
        """
        out, stage, axis = *self._run_whole_graph(data), self.mesh.stage
        found = None
        with layer_stack.reporting_failure(self.mesh), torch.no_grad():
            if axis.rank == axis.size - 1:
                found = metric(_unpack_output(out, stage, data), data)
            return collectives.all_gather_object(found, axis)[-1]

    def _run_whole_graph(self, data: Data) -> tuple[Tensor, Stage]:
        """Runs the layers on all nodes at once; returns what this stage gives."""
        stage = self._prepare(data)
        stage.run.mode = "full"
        with self._training_mode(False), layer_stack.reporting_failure(self.mesh):
            return forward_all_nodes(stage, self.mesh.stage), stage

    # costs

    def price(self) -> EpochPrice:
        """Returns the traffic of this rank in an epoch of training, once data were seen."""
        free = [p for p in self.layers.parameters() if p.requires_grad]
        return epoch_price(self.mesh, self._known(self._stage), free)

    def memory(self) -> dict[str, int]:
        """Returns the bytes that this rank keeps from epoch to epoch, by purpose.

        The activations of one chunk, or of all chunks without `recompute`, come on top.
        """
        stage = self._known(self._stage)
        sites = sum(site.memory() for site in stage.run.sites.values())
        facts = sum(t.nbytes for t in stage.run.facts.values())
        boxes = (stage.inbox, stage.outbox)
        boundary = sum(box.nbytes for box in boxes if box is not None)
        return {"sites": sites, "facts": facts, "boundary": boundary}

    # saving and loading

    def state_dict(  # type: ignore[override]
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Returns the state of the unsplit stack, on all ranks; collective over stages."""
        state = self.layers.state_dict(keep_vars=keep_vars)
        every = self._merged({name: value.cpu() for name, value in state.items()})
        found: dict[str, Any] = {} if destination is None else destination
        found.update({prefix + name: value for name, value in every.items()})
        return found

    def _merged(self, own: dict[str, Any]) -> dict[str, Any]:
        """Gathers the dicts of all stages, keyed by names of layers, in the order of layers."""
        parts = collectives.all_gather_object(own, self.mesh.stage)
        every = {name: value for part in parts for name, value in part.items()}
        place = {layer.name: k for k, layer in enumerate(self._stack)}
        ordered = sorted(every, key=lambda name: place[name.split(".")[0]])
        return {name: every[name] for name in ordered}

    def load_state_dict(
        self, state_dict: Any, strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes the part of an unsplit stack's state that belongs to this stage; collective.

        Raises:
            RuntimeError: on all ranks, if the part of one stage does not fit.
        """
        others = {layer.name for layer in self._stack}
        others -= dict(self.layers.named_children()).keys()
        own_state = {
            k: v for k, v in state_dict.items() if k.split(".")[0] not in others
        }
        with on_all_ranks(self.mesh.everyone):
            return self.layers.load_state_dict(own_state, strict=strict, assign=assign)

    def save(
        self, path: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Writes weights, optimizer, epoch and history to a folder; collective.

        Where the data have a link, it is written too: between epochs, after `link.step()`.
        The folder appears whole or not at all, and replaces one that was written so.
        """
        axis = self.mesh.everyone
        whole = {"model": self.state_dict(), "epoch": self.epoch, "seed": self._seed}
        whole["optimizer"] = None
        if optimizer is not None:
            own = optimizer_state(self.layers, optimizer)
            whole["optimizer"] = {**own, "state": self._merged(own["state"])}
        with whole_folder(path, "pipeline", axis) as folder, on_all_ranks(axis):
            kept = self._saved or _SavedHistory.of(self._run, self.mesh)
            # a pipeline that was loaded and not used has the rows of all stages
            parts = {} if self._saved and self.mesh.stage.rank else dict(kept.parts)
            if axis.rank == 0:
                parts[_MODEL] = {**whole, "link": kept.link}
            write_files(folder, parts)

    def load(
        self, path: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Reads what `save` wrote, on any number of stages; collective.

        Training goes on bit for bit where the graph is spread and cut into chunks as it
        was; elsewhere history begins anew, with a warning. At the first use the link of the
        data, made as it was, goes where it stood.
        """
        whole: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        path, axis = find(path), self.mesh.everyone
        rows = f"rows{self.mesh.rank}-stage*.pt"
        with on_all_ranks(axis), naming(f"cannot load the pipeline at {path}"):
            check_files(path, _MODEL, rows)
            whole = _read(path / _MODEL, _FIELDS)
            for file in sorted(path.glob(rows)):
                parts[file.name] = _read(file, _ROW_FIELDS)
        self.load_state_dict(whole["model"])
        if optimizer is not None:
            with on_all_ranks(axis):
                saved, count = whole["optimizer"], len(optimizer.param_groups)
                if saved is None or len(saved["param_groups"]) != count:
                    raise ValueError(
                        f"{path} holds no optimizer with {count} groups of parameters; make "
                        "the optimizer as it was when saved, or leave it out"
                    )
                load_optimizer(self.layers, optimizer, saved)
        self.epoch, self._seed = int(whole["epoch"]), int(whole["seed"])
        if self._run is not None:
            self._run.seed = self._seed
        self._stage, self._saved = None, _SavedHistory(parts, whole["link"], path)


def _unpack_output(packed: Tensor, stage: Stage, data: Data) -> DistTensor:
    """Returns the output of the last stage, of which rows are sorted by chunk."""
    edge_index: Any = data.edge_index
    result, rows = stage.result, packed[stage.run.plan.own.place]
    return result.unpack(rows, edge_index.nodes)[result.names[0]]  # type: ignore[no-any-return]


_MODEL = "model.pt"
_FIELDS = {
    "model": dict,
    "optimizer": dict | None,
    "epoch": int,
    "seed": int,
    "link": dict | None,
}
_ROW_FIELDS = {"mark": str, "sites": dict, "link": dict | None}
# the fields of a link's state that differ by rank, empty
_NO_ROWS: dict[str, Any] = {"kept": [], "mark": None, "active": []}


def _read(file: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Reads a saved file, of which rows are mapped; raises ValueError for other fields."""
    saved = read_whole(file, mmap=wanted is _ROW_FIELDS)
    with naming(str(file)):
        _check_fields(saved, wanted)
        if "sites" in wanted:
            sites = saved["sites"]
            _check_fields(sites, dict.fromkeys(sites, Tensor | None))
    return saved  # type: ignore[no-any-return]


def _check_fields(saved: Any, wanted: dict[Any, Any]) -> None:
    """Raises ValueError for the first field that is missing or of another type."""
    held = saved if isinstance(saved, dict) else {}
    for name, kind in wanted.items():
        found = type(held[name]).__name__ if name in held else "missing"
        if found in ("missing", "bool") or not isinstance(held[name], kind):
            raise ValueError(
                f"{name} is {found}, wanted {kind}; save the pipeline anew"
            )


def _layout_hash(run: ChunkPass) -> str:
    """Returns a hash of this rank's nodes and chunks: equal if they are cut in the same way."""
    plan, (n, _) = run.plan, run.plan.counts
    blocks = (*plan.own.bounds, *(n + b for b in plan.ghost.bounds[1:]))
    digest = hashlib.sha256(str((blocks, plan.counts)).encode())
    digest.update(plan.gid.numpy().tobytes())
    return digest.hexdigest()


@dataclass
class _SavedHistory:
    """The history and the link's state, as they are saved.

    Args:
        parts: by names of files, the rows of all stages at this rank's place in a stage.
        link: the state of the data's link, without rows.
        path: the folder that it was loaded from.
    """

    parts: dict[str, Any]
    link: Any
    path: Path | None = None

    @staticmethod
    def of(run: ChunkPass | None, mesh: Mesh) -> _SavedHistory:
        """Returns those of this rank."""
        if run is None:
            return _SavedHistory({}, None)
        state = None if run.link is None else run.link.state_dict()
        sites = {key: site.history for key, site in run.sites.items()}
        part: dict[str, Any] = {"mark": _layout_hash(run), "sites": sites}
        part["link"] = None if state is None else {k: state[k] for k in _NO_ROWS}
        link = None if state is None else {**state, **_NO_ROWS}
        return _SavedHistory({f"rows{mesh.rank}-stage{mesh.stage.rank}.pt": part}, link)

    def restore(self, run: ChunkPass) -> None:
        """Restores the saved history in a pipeline's sites, and the state of its link.

        Rows are restored only if all ranks have the same nodes and chunks as when saved.
        """
        mark, saved = _layout_hash(run), self.parts.values()
        every = {k: v for part in saved for k, v in part["sites"].items()}
        fits = all(part["mark"] == mark for part in saved) and all(
            key in every and _layout(site.history) == _layout(every[key])
            for key, site in run.sites.items()
        )
        replies = collectives.all_gather_object(
            (fits, bool(saved)), run.plan.mesh.everyone
        )
        fits = all(fit for fit, _ in replies)
        if self.link is not None and run.link is not None:
            parts = [part["link"] for part in saved] if fits else []
            run.link.load_state_dict({**self.link, **_merge_link_rows(parts)})
        if not any(some for _, some in replies):
            return  # saved before there were data
        if not fits:
            warnings.warn(
                f"{self.path} holds history of other chunks, or stored in another way; "
                "history begins anew from an exact pass over the graph, late rows of links "
                "as well",
                stacklevel=2,
            )
            return
        for key, site in run.sites.items():
            if site.history is not None:
                site.history.copy_(every[key])
                site.end_epoch(refresh=True)


def _merge_link_rows(parts: list[Any]) -> dict[str, Any]:
    """Returns the rows that the links of all stages kept, of this rank's place in a stage."""
    if not parts:
        return _NO_ROWS
    kept, active = ([one for p in parts for one in p[k]] for k in ("kept", "active"))
    return {"kept": kept, "mark": parts[0]["mark"], "active": active}


def _layout(history: Tensor | None) -> Any:
    return None if history is None else (history.shape, history.dtype)
