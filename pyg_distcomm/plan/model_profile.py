"""A model run dry, on two nodes and one rank: what its layers and sums would send."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from pyg_distcomm.comm import autograd, collectives
from pyg_distcomm.comm.mesh import alone
from pyg_distcomm.graph.partitioning import partition
from pyg_distcomm.graph.topology import LocalGraph
from pyg_distcomm.halo.link import Link
from pyg_distcomm.nn.batch_norm import DistBatchNorm
from pyg_distcomm.nn.convert import convert
from pyg_distcomm.nn.halo_conv import HaloConv
from pyg_distcomm.pipeline.layer_stack import StackLayer, read_stack

Round = tuple[int, bool]


@dataclass
class Visited:
    """One call of a message passing layer.

    Args:
        conv: the layer.
        width: of its input.
        still: whether that is the features themselves.
        flows: whether a gradient goes on to it.
        rounds: its halo exchanges, forward and backward: the width of rows, and whether
            they go from ghosts to owners.
        out: width of its outcome.
        against: whether it fetches rows against the edges, which is not foreseen.
    """

    conv: Module
    width: int
    still: bool
    flows: bool
    rounds: list[Round] = field(default_factory=list)
    out: int = 0
    against: bool = False


class SequentialStack(Module):
    """A stack, as `Pipeline` takes it, run from its first layer to its last."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}  # of the data, beside x
        self._hold(read_stack(layers))

    def _hold(self, stack: list[StackLayer]) -> None:
        self.stack = stack
        self.parts = torch.nn.ModuleList(
            layer.run for layer in stack if isinstance(layer.run, Module)
        )

    def converted(self) -> SequentialStack:
        """Makes its layers distributed, in place."""
        self._hold([layer.converted() for layer in self.stack])
        return self

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        """Runs the stack."""
        known: dict[str, Any] = {"x": x, "edge_index": edge_index, **self.given}
        for layer in self.stack:
            out = layer.run(*(known[name] for name in layer.takes))
            several = out if len(layer.gives) > 1 else (out,)
            known.update(zip(layer.gives, several, strict=True))
        return out


@dataclass(frozen=True, eq=False)
class _Noting(LocalGraph):
    """Edges of one rank, which tell what rows would be fetched if there were more."""

    note: Callable[[Tensor, bool], None]

    def with_ghosts(self, x: Tensor, link: Link | None = None) -> Tensor:
        """Notes own rows `x`, and returns them."""
        self.note(x, False)
        return x

    def scatter_to_owners(
        self, ghosts: Tensor, own: Tensor, link: Link | None = None
    ) -> Tensor:
        """Notes rows of ghosts, of which there are none."""
        self.note(own, True)
        return own


class _Visit:
    """A run under way: the modules that are being called, and what was noted."""

    def __init__(self) -> None:
        self.found: list[Visited] = []
        self.sums: list[str] = []
        self.norms: list[int] = []
        self.stack: list[Module] = []
        self.x: Any = None

    def watch(self, model: Module) -> None:
        """Follows the modules of a model."""
        for part in model.modules():
            part.register_forward_pre_hook(self._enter, with_kwargs=True)
            part.register_forward_hook(self._leave)

    def _enter(self, module: Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if is_layer(module) and not any(map(is_layer, self.stack)):
            given = args[0] if args else kwargs["x"]
            first = given[0] if isinstance(given, (tuple, list)) else given
            how = first.size(-1), first is self.x, first.requires_grad
            self.found.append(Visited(bare(module), *how))
        self.stack.append(module)

    def _leave(self, module: Module, args: tuple[Any, ...], out: Any) -> None:
        self.stack.pop()
        if is_layer(module) and not any(map(is_layer, self.stack)):
            first = out[0] if isinstance(out, (tuple, list)) else out
            self.found[-1].out = first.size(-1)

    def note(self, x: Tensor, home: bool) -> None:
        """Notes rows that would travel, and gradients that would return."""
        ways = (home, not home) if x.requires_grad else (home,)
        self.found[-1].rounds += [(x[0].numel(), way) for way in ways]

    def note_against(self, x: Tensor, home: bool) -> None:
        """Notes that rows would travel against the edges."""
        self.found[-1].against = True

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Notes sums over all nodes: how wide those of batch norms are, of others whose."""

        def noting(begin: Callable[..., Any], counts: bool) -> Callable[..., Any]:
            def noted(x: Tensor, *args: Any) -> Any:
                if not any(isinstance(m, DistBatchNorm) for m in self.stack):
                    self.sums.append(type(bare(self.stack[-1])).__name__)
                elif counts:  # and the same for gradients, if there are any
                    self.norms += [x.numel()] * (1 + x.requires_grad)
                return begin(x, *args)

            return noted

        before = collectives.all_reduce, autograd.all_reduce
        collectives.all_reduce = noting(before[0], counts=False)
        autograd.all_reduce = noting(before[1], counts=True)
        try:
            yield
        finally:
            collectives.all_reduce, autograd.all_reduce = before


def visited(
    model: Module, num_features: int, trained: bool
) -> tuple[list[Visited], list[int], list[str]]:
    """Runs a copy of a model, as it would be distributed, on two nodes and one rank.

    Returns the calls of its layers, the widths of all sums of its batch norms, and the
    names of modules that sum over all nodes in ways that are not foreseen.

    Raises:
        ValueError: if that does not work, with the reason.
    """
    visit, grad = _Visit(), torch.enable_grad()
    try:
        with torch.inference_mode(False), grad, torch.random.fork_rng(devices=[]):
            _run(copy.deepcopy(model).cpu().train(), num_features, trained, visit)
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return visit.found, visit.norms, list(dict.fromkeys(visit.sums))


def _run(model: Module, num_features: int, trained: bool, visit: _Visit) -> None:
    model = model.converted() if isinstance(model, SequentialStack) else convert(model)
    visit.watch(model)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    x = torch.zeros(2, num_features, dtype=dtype)
    data = Data(x=x, edge_index=torch.tensor([[0, 1], [1, 0]]))
    data.edge_weight = torch.ones(2, dtype=dtype)
    mesh = alone((1, 1, 1), 0, torch.device("cpu"))
    share = partition(data, mesh, "block", node_attrs=["x"], edge_attrs=["edge_weight"])
    visit.x = share.x.requires_grad_(trained)
    edges = share.edge_index.topology
    notes = (edges, visit.note), (edges.reversed.topology, visit.note_against)
    for topology, note in notes:
        here = {f.name: getattr(topology.locals, f.name) for f in fields(LocalGraph)}
        topology.locals = _Noting(**here, note=note)
    if isinstance(model, SequentialStack):
        model.given = {"edge_weight": share.edge_weight}
    model(share.x, share.edge_index)  # after which what layers cache is there
    visit.found.clear()
    with visit.summing():
        model(share.x, share.edge_index)


def is_layer(module: Module) -> bool:
    """Says whether a module reads rows of neighbours."""
    return isinstance(module, (MessagePassing, HaloConv))


def bare(module: Module) -> Module:
    """Returns the layer of PyG's itself."""
    return module.conv if isinstance(module, HaloConv) else module
