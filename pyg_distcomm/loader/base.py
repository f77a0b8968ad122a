"""Adds bulks, keyed draws, sharding over ranks and resuming to PyG's loaders."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import RandomSampler, SequentialSampler, get_worker_info
from torch_geometric.loader import ImbalancedSampler as ByClass

from pyg_distcomm.comm.consistency import on_all_ranks
from pyg_distcomm.comm.failure import script_stacklevel, watch_of
from pyg_distcomm.comm.mesh import latest_mesh
from pyg_distcomm.comm.random import fresh_seed
from pyg_distcomm.graph.local_adjacency import known
from pyg_distcomm.loader.batcher import (
    Batcher,
    attach_sizes,
    edge_index_of,
    holds_matrices,
    reporting,
    with_edges,
)
from pyg_distcomm.loader.device_placement import Placement
from pyg_distcomm.loader.epoch import (
    BatchSharding,
    Epoch,
    EpochPlan,
    IndexSampler,
    PassThroughDataset,
    Phases,
    PlannedBatch,
    PrefetchQueue,
    Progress,
    Tracked,
)
from pyg_distcomm.loader.notes import (
    Notes,
    StepComparer,
    World,
    launched_ranks,
    next_name,
    step_comparer,
)
from pyg_distcomm.loader.options import (
    LoaderOptions,
    check_lengths,
    check_weighted_sampler,
    describe_graph,
    digest,
    ranks_of,
    weighted_positions,
)
from pyg_distcomm.loader.partitioned_source import (
    PartitionedSource,
    check_sampled_together,
)
from pyg_distcomm.sampling.graph_block import gathered
from pyg_distcomm.sampling.neighbor_sampler import NEIGHBOR, KeyedNeighborSampler
from pyg_distcomm.sampling.partitioned import PartitionedNeighborSampler

Graph = TypeVar("Graph")  # a Data or a HeteroData, of the graph and of its minibatches
_PyGLoader: Any = object  # for the type checker: PyG's loader, the next base class


class BulkLoading(Generic[Graph], _PyGLoader):
    """Loads the minibatches of an epoch in bulks: the base of all loaders of this package.

    It is a mixin that comes before one of PyG's loaders in the bases of a class.
    """

    def __init__(self, *args: Any, shuffle: bool | None = None, **kwargs: Any) -> None:
        # `EpochPlan` shuffles; torch's own sampler refuses a rank that has no inputs
        own = any(kwargs.get(k) is not None for k in ("sampler", "batch_sampler"))
        kwargs |= {"shuffle": shuffle} if own else {}
        source = self.partitioned_source
        with on_all_ranks(None if source is None else source.mesh.world):
            super().__init__(*args, **kwargs)
            check_lengths(self.input_data)

    def _begin_init(
        self,
        data: Any,
        options: LoaderOptions | None,
        dataloader: dict[str, Any],
        sampler: Any = None,
    ) -> Any:
        """Checks the options; returns the graph, with an edge_index in place of an adj_t."""
        with on_all_ranks(ranks_of(data := with_edges(data))):
            name = type(self).__qualname__
            with reporting(watch_of(latest_mesh())):  # others raise at their next wait
                options = LoaderOptions.checked(name, options, dataloader)
                self.options, self.placement = options, Placement.of(options)
            if self._draws_itself and options.draws != NEIGHBOR:
                raise ValueError(
                    f"got draws={options.draws!r}, but {name} draws in a way of its own; "
                    "leave it out"
                )
            self.is_partitioned = options.are_for_share(data)
            if self.is_partitioned:
                check_sampled_together(sampler, dataloader)
            elif self.placement is not None:
                self.placement.check(data, sampler, dataloader)
        self.has_matrices = holds_matrices(data)
        return data

    def _sampler_of(
        self,
        data: Any,  # of `_begin_init`
        num_neighbors: Any,  # as the loader got it
        given: Any,  # its `neighbor_sampler`
        dataloader: dict[str, Any],  # torch's arguments
        drawing: dict[str, Any],  # PyG's arguments of a sampler
        **others: Any,  # arguments that must be equal on all ranks of a share
    ) -> tuple[Any, Any]:
        """Returns the graph for PyG's constructor, and the sampler; collective for a share."""
        options, graph = self.options, data
        drawing = drawing | {"draws": options.draws}
        if self.is_partitioned:
            about = {"loader": type(self).__qualname__, "num_neighbors": num_neighbors}
            about |= {**drawing, **others}
            source = PartitionedSource(data, options, dataloader, **about)
            self.partitioned_source, graph = source, source.placeholder
            if drawing["subgraph_type"] == "bidirectional":
                source.learn_edge_owners()  # the target of an edge turned round is its source
            if options.topology != "replicated":
                drawing |= {"channel": source.sampling, "sample_at": options.sample_at}
                drawing |= {"seed": self._sampler_seed(dataloader)}
                return graph, PartitionedNeighborSampler(data, num_neighbors, **drawing)
            names = drawing["time_attr"], drawing["weight_attr"]
            data = gathered(data, [name for name in names if name is not None])
        elif given is not None:
            if options.draws != NEIGHBOR:
                raise ValueError(
                    f"got both draws={options.draws!r} and neighbor_sampler; leave one out"
                )
            return graph, given
        elif self.placement is not None:
            drawing |= self.placement.sampling
        drawing["share_memory"] = dataloader.get("num_workers", 0) > 0
        seed = self._sampler_seed(dataloader)
        return graph, KeyedNeighborSampler(data, num_neighbors, seed=seed, **drawing)

    def _sampler_seed(self, dataloader: dict[str, Any]) -> int:
        """Returns the seed of draws without a key."""
        seed = self.options.seed
        return fresh_seed(dataloader.get("generator")) if seed is None else seed

    def _finish_init(self, inputs: list[Any], dataloader: dict[str, Any]) -> None:
        """Completes PyG's constructor: plans epochs, and posts a note for the other ranks."""
        if self.batch_size is None and dataloader.get("batch_sampler") is None:
            raise ValueError("got batch_size=None, wanted a number of seeds; give one")
        # the epoch before, if spread
        self._previous_epoch: tuple[Any, list[Any]] | None = None
        self.seed, self._epoch, self._start_batch = self.options.seed, 0, 0
        self._progress: Progress | None = None
        # torch stores the bound method, a reference cycle that keeps the loader alive
        self.__dict__.pop("collate_fn", None)
        drawn, count = dataloader.get("sampler"), len(self.dataset)
        own = drawn is not None or dataloader.get("batch_sampler") is not None
        if not own:  # for others that read it
            sampler: Any = SequentialSampler(self.dataset)
            if dataloader.get("shuffle") and count:
                sampler = RandomSampler(self.dataset, generator=self.generator)
            self.__dict__["sampler"] = self.batch_sampler.sampler = sampler
        if isinstance(drawn, ByClass):
            check_weighted_sampler(drawn, count)
            own, inputs = False, [*inputs, drawn.weights, drawn.num_samples]
        self._epoch_plan = EpochPlan(
            count if own or drawn is None else drawn.num_samples,
            self.batch_size or 1,
            bool(dataloader.get("shuffle")),
            bool(self.drop_last),
            self.batch_sampler if own else None,
            None if own or drawn is None else partial(weighted_positions, drawn),
        )
        if self.partitioned_source is not None and self._epoch_plan.length() is None:
            raise ValueError(
                "got a batch_sampler without a length, but all ranks sample a partitioned "
                "graph together, and have to know how many batches there are; give it a "
                "__len__"
            )
        # torch's DataLoader forbids setting it, and would index it one position at a time
        self.__dict__["dataset"] = PassThroughDataset(count)
        options = [self.batch_size, self.drop_last, self._epoch_plan.shuffle]
        self._inputs = digest(inputs + options)
        kind = "{}(batch_size={}, drop_last={}, shuffle={})".format(
            type(self).__qualname__, *options
        )
        self._loader_name = None if self.options.split is False else next_name(kind)
        self._cached_sharding: BatchSharding | None = None
        self._notes: Notes | None = None
        self._steps: StepComparer | None = None
        self._described: dict[str, Any] | None = None
        if self.partitioned_source is not None:  # collective
            self._describe()
        elif self.placement is not None and self.placement.cache:
            self.placement.keep(self.data)
        self._post_note()

    placement: Placement | None = None  # of minibatches on a device; None on the host
    partitioned_source: PartitionedSource | None = None  # of a share, not a whole graph
    _reads_layers = False  # in layer-wise inference, which is not shared out
    _draws_itself = False  # by no option of `draws`
    batch_bytes = 0  # the size of a minibatch, once one was made
    #: the time that each phase of the current or last epoch took; see `Phases`
    phases: Phases = Phases()

    @property
    def neighbor_sampler_in_use(self) -> Any:
        """Returns the sampler, under whichever name PyG's loader stores it."""
        found = getattr(self, "node_sampler", None)
        return getattr(self, "link_sampler", None) if found is None else found

    # Hooks of torch's DataLoader -------------------------------------------------------

    @property
    def _index_sampler(self) -> Any:
        if "_epoch_plan" not in self.__dict__:
            return super()._index_sampler
        return IndexSampler(self._plan, self._length)

    def __iter__(self) -> Iterator[Graph]:
        """Returns the next epoch, or the rest of that of a loaded state.

        It begins with its first batch, so that an iterator which is not used, as tqdm's,
        counts as no epoch, and a rank may make one alone.
        """
        return Tracked(self._begin_epoch, self._rounds_left)

    def _rounds_left(self) -> int:
        sharding = self._sharding()
        return sharding.rounds(self._start_batch) if sharding.batches else 0

    def _length(self) -> int:
        sharding = self._sharding()
        if sharding.batches:
            return sharding.rounds(0)
        return len(self._epoch_plan.batch_sampler)  # may raise: it has no length

    def _begin_epoch(self) -> Epoch:
        sharding = self._sharding()
        self._progress = Progress(self._epoch, self._start_batch, sharding)
        if self._notes is not None and sharding.size > 1:
            self._notes.begin(self._epoch)
            if self._steps is None:
                source = self.partitioned_source
                mesh = latest_mesh() if source is None else source.mesh
                self._steps = step_comparer(self._notes, mesh)
        self.phases = Phases()
        batches = super().__iter__()
        self._epoch, self._start_batch = self._epoch + 1, 0
        steps = self._steps if sharding.size > 1 else None
        return batches, self._progress, self.phases, steps

    def _get_iterator(self) -> Any:
        if self.num_workers:
            return super()._get_iterator()
        self._end_epoch()
        source = self.partitioned_source
        if source is not None and not source.rows_are_current():
            source.read_rows()
        batcher = Batcher(self, self.phases)
        bulks = PrefetchQueue(
            self._plan(),
            batcher.stages(),
            batcher.finish,
            batcher.size,
            batcher.ahead,
            drain=source is not None,
        )
        if source is not None:
            self._previous_epoch = weakref.ref(bulks), bulks.threads
        return bulks

    def _end_epoch(self) -> None:
        """Waits for the threads of the previous epoch, which communicate with other ranks."""
        if self._previous_epoch is None:
            return
        bulks, threads = self._previous_epoch[0](), self._previous_epoch[1]
        if bulks is not None:
            bulks.close()
        for thread in threads:
            thread.join()

    @property
    def overrides_collate(self) -> bool:
        """Returns whether a subclass overrides how minibatches are sampled or collated."""
        own = type(self)
        same = own.filter_fn is BulkLoading.filter_fn
        return not (same and own.collate_fn is BulkLoading.collate_fn)

    def _plan(self) -> Iterator[PlannedBatch]:
        sharding = self._sharding()
        progress = self._progress or Progress(self._epoch, self._start_batch, sharding)
        seed, epoch = self._agreed_seed(), progress.epoch
        return self._epoch_plan.batches(seed, epoch, progress.sharding, progress.start)

    # Hooks of PyG's loaders ------------------------------------------------------------

    def collate_fn(self, index: Any) -> Any:
        """Samples one minibatch: a planned one of an epoch, or one of any list of inputs."""
        out = self.sample_planned(index)
        if not self.filter_per_worker:
            return out
        batch = self.filter_fn(out)
        # only of this loader: a worker of PyG's ZipLoader sends on to the script what it gets
        own = isinstance(index, PlannedBatch) and not self.overrides_collate
        apart = own and get_worker_info() is not None
        return WorkerBatch.pack(batch) if apart else batch

    def filter_fn(self, out: Any) -> Any:
        """Collates a sampler's output with its features, marks padding, and transforms."""
        padding = getattr(out, "padding", None)
        if self.transform_sampler_output is not None:
            out = self.transform_sampler_output(out)
        return self.postprocess(Batcher(self).collate(out), padding)

    def pyg_filter_fn(self, out: Any) -> Any:
        """Calls PyG's own `filter_fn`."""
        return super().filter_fn(out)

    def postprocess(self, data: Any, padding: bool | None) -> Any:
        if padding is not None:
            data.padding = padding
        return data if self.transform is None else self.transform(data)

    def sample_planned(self, index: Any) -> Any:
        if not isinstance(index, PlannedBatch):
            return self._sample([self.input_data[index]])[0]
        return self.sample_planned_bulk([index])[0]

    def sample_planned_bulk(self, plan: list[PlannedBatch]) -> list[Any]:
        outs = self._sample([self._seeds_of(index) for index in plan])
        sharding = self._cached_sharding
        if sharding is not None and sharding.size > 1 and sharding.even == "pad":
            for out, index in zip(outs, plan, strict=True):
                out.padding = index.padding
        return outs

    def _seeds_of(self, index: PlannedBatch) -> Any:
        inputs = self.input_data[torch.from_numpy(index.positions)]
        inputs.key = index.key
        return inputs

    def _sample(self, bulk: list[Any]) -> list[Any]:
        """Samples minibatches, together if the sampler can."""
        sampler = self.neighbor_sampler_in_use
        if hasattr(sampler, "sample_bulk"):
            found: list[Any] = sampler.sample_bulk(bulk)
            return found
        return [sampler.sample_from_nodes(inputs) for inputs in bulk]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out attributes that a worker process cannot pickle and does not need."""
        without = dict.fromkeys(("_notes", "_steps", "_previous_epoch", "phases"))
        return {**self.__dict__, **without}

    # Epochs and ranks ----------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration; without it, epochs are counted."""
        if int(epoch) != self._epoch:  # else go on where a loaded state left it
            self._epoch, self._start_batch = int(epoch), 0
        self._progress = None

    def state_dict(self) -> dict[str, Any]:
        """Returns how far the loader has come: enough to resume inside an epoch.

        It is the same on all ranks that have loaded equally many batches, and can be loaded
        on another number of ranks, unless the script splits its inputs itself.
        """
        sharding, progress = self._sharding(), self._progress
        epoch, batches = self._epoch, self._start_batch
        if progress and not progress.finished and epoch == progress.epoch + 1:
            done = progress.start + progress.rounds * progress.sharding.size
            if not sharding.batches or sharding.rounds(done):
                epoch, batches = progress.epoch, done
        return {
            "seed": self._agreed_seed(),
            "epoch": epoch,
            "batches": batches,
            "inputs": self._inputs,
            "ranks": sharding.size if sharding.split else 0,
            "made_from": self._describe(),
        }

    def _describe(self) -> dict[str, Any]:
        """Returns options and checksums of what its minibatches depend on, besides inputs."""
        if self._described is None:
            describe = getattr(self.neighbor_sampler_in_use, "describe", dict)
            negatives = getattr(self, "neg_sampling", None)
            kind = next(
                c.__name__
                for c in type(self).__mro__
                if c.__module__.startswith("pyg_distcomm.")
            )
            source = self.partitioned_source
            world = None if source is None else source.mesh.world
            made_from: dict[str, Any] = describe()
            names = [made_from.get(of) for of in ("weight_attr", "time_attr")]
            self._described = {
                "loader": kind,
                **made_from,
                "neg_sampling": None if negatives is None else repr(negatives),
                **describe_graph(self.data, world, names),
            }
        return self._described

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes an epoch where `state_dict` left it.

        Raises:
            ValueError: if the state is of another graph, other options or inputs, or of
                lists split over another number of ranks.
        """
        sharding = self._sharding()
        kinds: Any = dict.fromkeys(("seed", "epoch", "batches"), int)
        kinds |= {"inputs": str, "made_from": dict}
        found = state if isinstance(state, dict) else {}
        wrong = [name for name in kinds if type(found.get(name)) is not kinds[name]]
        if wrong or min(found["epoch"], found["batches"]) < 0:
            why = f"{wrong} are missing or wrong" if wrong else "it has numbers below 0"
            raise ValueError(f"not the state of a loader: {why}")
        before, now = state["made_from"], self._describe()
        for name in {**now, **before}:
            if before.get(name) != now.get(name):
                raise ValueError(
                    f"got the state of a loader with {name}={before.get(name)}, and this one "
                    f"has {name}={now.get(name)}; build both with the same graph and arguments"
                )
        if not sharding.split and state["inputs"] != self._inputs:
            raise ValueError(
                "got the state of a loader with other inputs, batch size or shuffling; build "
                "both with the same arguments"
            )
        ranks = sharding.size if sharding.split else 0
        if ranks != state.get("ranks", 0):
            raise ValueError(
                f"got a state of inputs that the script split over {state.get('ranks', 0)} "
                f"ranks, and this one splits them over {ranks} (0 if not at all); split them "
                "in the same way, or give all ranks the same inputs, to resume on any number"
            )
        self.seed, self._epoch = state["seed"], state["epoch"]
        self._start_batch, self._progress = state["batches"], None

    def _post_note(self) -> World:
        """Posts this rank's note about the loader, once a process group is initialised."""
        world = World.now()
        if self._notes is None and world.size > 1 and self._loader_name is not None:
            source = self.partitioned_source
            mesh = latest_mesh() if source is None else source.mesh
            self._notes = Notes(world, self._loader_name, mesh)
            note = {
                "inputs": self._inputs,
                "batches": self._epoch_plan.length(),
                "given": self._epoch_plan.batch_sampler is not None,
                "seed": self._agreed_seed(),
                "asked": self.options.seed,
                "layers": self._reads_layers,
            }
            self._notes.post(note)
        return world

    def _sharding(self) -> BatchSharding:
        """Returns how batches are sharded; the first call may wait for the other ranks."""
        if self._cached_sharding is None:
            world = self._post_note()
            shared = self.options.split is not False
            if world.size == 1 and launched_ranks() > 1 and shared:
                warnings.warn(
                    f"got {launched_ranks()} launched ranks, but no process group: call "
                    "pyg_distcomm.init() or init_process_group() before loading, or each "
                    "rank loads every batch",
                    stacklevel=script_stacklevel(),
                )
            self._cached_sharding = self._sharding_over(world)
        return self._cached_sharding

    def _sharding_over(self, world: World) -> BatchSharding:
        even = self.options.even_batches
        if self._notes is None:
            return self._unsharded(even)
        whole = self.options.split is True
        gather = self._notes.collect if whole else self._notes.collect_if_shared
        notes = gather("share out its batches")
        if notes is None:
            return self._unsharded(even)
        seeds = {note["asked"] for note in notes}
        if len(seeds) > 1:
            raise ValueError(
                f"got different seeds on the ranks, {[n['asked'] for n in notes]}; give all "
                "ranks the same seed"
            )
        self.seed = notes[0]["seed"]
        if all(note["layers"] for note in notes):
            return self._unsharded(even)
        same = len({note["inputs"] for note in notes}) == 1
        split = any(note["given"] for note in notes)
        split = split or (not same and self.options.split == "auto")
        if self.options.split is True and not same:
            raise ValueError(
                "got different inputs on the ranks, but split=True shards one list over them; "
                "give all ranks the same inputs, or leave split out"
            )
        counts = tuple(n["batches"] for n in notes) if split else (notes[0]["batches"],)
        if None in counts:
            counts = ()
        elif 0 in counts and any(counts) and even == "pad":
            raise ValueError(
                f"got {list(counts)} batches on the ranks, and a rank without batches has none "
                "to repeat; give all ranks the whole list, or even_batches='drop'"
            )
        return BatchSharding(world.rank, world.size, split, counts, even)

    def _unsharded(self, even: str) -> BatchSharding:
        length = self._epoch_plan.length()
        return BatchSharding(0, 1, False, () if length is None else (length,), even)

    def _agreed_seed(self) -> int:
        if self.seed is None:
            self.seed = fresh_seed(self.generator)
        return self.seed


@dataclass(frozen=True, eq=False)
class WorkerBatch:
    """Holds a minibatch that a worker process sends, with the sizes that the sampler knows."""

    batch: Any
    # numbers of nodes by type, as `carry` takes them; None if a transform has replaced
    # the edges
    sizes: dict[Any, int] | None
    seeds: dict[Any, int]

    @staticmethod
    def pack(batch: Any) -> WorkerBatch:
        """Packs a minibatch with the sizes attached to its edges in this process."""
        edges = edge_index_of(batch)
        every = edges.values() if isinstance(edges, dict) else [edges]
        found = [None if e is None else known(e) for e in every]
        kept = [None if k is None else k.batch for k in found]
        if not kept or kept[0] is None or any(k is not kept[0] for k in kept):
            return WorkerBatch(batch, None, {})
        return WorkerBatch(batch, kept[0].sizes, kept[0].seeds)

    def unpack(self) -> Any:
        """Returns the minibatch, with the sizes attached to its edges again."""
        if self.sizes is not None:
            attach_sizes(self.batch, self.sizes, self.seeds)
        return self.batch

    def pin_memory(self) -> WorkerBatch:
        """Returns the batch in pinned memory; torch's DataLoader calls this."""
        return WorkerBatch(self.batch.pin_memory(), self.sizes, self.seeds)
