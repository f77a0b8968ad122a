"""Emulates a pipeline's chunks in one process, with old rows and late gradients apart.

A pipeline reads the rows of chunks that come later as they were in an earlier epoch, and drops
their gradients, doubles those it knows, or takes those of the last epoch. Here each may be
chosen by itself, which no pipeline can do: rows that are fresh with gradients that are not
shows what gradients cost, old rows with all gradients what rows cost. Chosen as a pipeline has
them, the losses are a pipeline's (`python benchmarks/emulated_chunks.py` compares them), in
the time of the full graph: all chunks are computed together.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from deep import loss_of, stack_of
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCN2Conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import pyg_distcomm as pdc
from pyg_distcomm import kernels
from pyg_distcomm.datasets import load_dataset

Csr = tuple[Tensor, Tensor, Tensor]


def times(matrix: Csr, x: Tensor) -> Tensor:
    """Returns the product of a square matrix and rows."""
    return kernels.spmm(*matrix, x.contiguous())


@dataclass
class Read:
    """What one layer read, and the gradient of its product, in the last epoch."""

    rows: Tensor | None = None
    gradient: Tensor | None = None


class Product(torch.autograd.Function):
    """The rows of A x whose edges between chunks follow the rules of rows and gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: EmulatedChunks, read: Read) -> Tensor:
        ctx.made = chunks, read
        late = x if chunks.rows == "fresh" or read.rows is None else read.rows
        if read.rows is None or (chunks.epoch + 1) % chunks.refresh == 0:
            read.rows = x.detach()
        return times(chunks.now[0], x) + times(chunks.later[0], late)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        chunks, read = ctx.made
        out = times(chunks.now[1], g)
        late = {"all": g, "late": read.gradient}.get(chunks.gradients)
        if late is not None:
            out += times(chunks.later[1], late)
        read.gradient = g
        return out, None, None


class EmulatedChunks:
    """A GCNII of PyG, trained on all chunks at once.

    Args:
        model: a Sequential of `deep.stack_of("gcnii", ...)`; its layers are replaced.
        data: the whole graph.
        chunk: the chunk of each node.
        rows: "fresh" or "old", of edges from chunks that come later.
        gradients: "all", "dropped" or "late", of the same edges; or "scaled": dropped, and
            those of other edges between chunks count twice.
        refresh: for how many epochs old rows stay as they are.
    """

    def __init__(
        self,
        model: Any,
        data: Data,
        chunk: Tensor,
        rows: str,
        gradients: str,
        refresh: int = 1,
    ) -> None:
        self.model, self.data, self.chunk = model, data, chunk
        self.rows, self.gradients, self.refresh = rows, gradients, refresh
        self.epoch = 0
        edges, weight = gcn_norm(
            data.edge_index, None, data.num_nodes, dtype=data.x.dtype
        )
        turn = torch.argsort(edges[1] * data.num_nodes + edges[0])
        back = torch.argsort(edges[0] * data.num_nodes + edges[1])
        self._sides = [
            (edges[1][turn], edges[0][turn], weight[turn]),
            (edges[0][back], edges[1][back], weight[back]),
        ]
        for layer in model.modules():
            if isinstance(layer, GCN2Conv):
                layer.normalize = False
                layer.propagate = partial(self._product, read=Read())
        self.plan([0] * (int(chunk.max()) + 1))

    def plan(self, order: list[int]) -> None:
        """Takes the order of chunks of an epoch; all at one place: nothing comes late."""
        place = torch.tensor(order).argsort() if any(order) else torch.tensor(order)
        place = place[self.chunk]
        self.now, self.later = [], []
        for side, (row, col, weight) in enumerate(self._sides):
            target, source = (row, col) if side == 0 else (col, row)
            late = place[source] > place[target]
            if side and self.gradients == "scaled":
                apart = self.chunk[source] != self.chunk[target]
                weight = torch.where(apart, 2 * weight, weight)
            for which, kept in ((~late, self.now), (late, self.later)):
                kept.append(self._csr(row[which], col[which], weight[which]))

    def _csr(self, row: Tensor, col: Tensor, weight: Tensor) -> Csr:
        ends = F.pad(torch.bincount(row, minlength=len(self.chunk)).cumsum(0), (1, 0))
        return ends.int(), col.int(), weight

    def _product(
        self, edge_index: Any, *, x: Tensor, read: Read, **more: Any
    ) -> Tensor:
        if self.model.training:
            return Product.apply(x, self, read)
        return times(self.now[0], x)

    def step(self, order: list[int]) -> Tensor:
        """Runs an epoch forward and backward in an order of chunks; returns the loss."""
        self.plan(order)
        out = self.model.train()(self.data.x, self.data.edge_index)
        loss = loss_of(out, self.data)
        loss.backward()
        self.epoch += 1
        return loss.detach()

    @torch.no_grad()
    def output(self) -> Tensor:
        """Returns the exact output of the whole graph."""
        self.plan([0] * (int(self.chunk.max()) + 1))
        return self.model.eval()(self.data.x, self.data.edge_index)


def main() -> None:
    """Compares losses with those of a pipeline, in float64 without dropout."""
    args = argparse.Namespace(width=8, dropout=0.0, accuracy=True)
    mesh, data = pdc.init(), load_dataset("generated-500")
    data.x = data.x.double()
    chunk = torch.arange(data.num_nodes) * 7 % 5
    share = pdc.partition(data, mesh)
    rules = {"surrogate": "dropped", "scaled": "scaled"}
    orders = ("fixed", "shuffled", "alternating")
    for (rule, name), order, refresh in product(rules.items(), orders, (1, 3)):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(stack_of("gcnii", data, args, 6).double())
        how = {"gradient": rule, "order": order, "history_refresh": refresh}
        pipe = pdc.Pipeline(models[0], mesh, chunks=chunk, **how)
        ours = EmulatedChunks(models[1], data, chunk, "old", name, refresh)
        opts = [torch.optim.Adam(m.parameters(), 0.01) for m in models]
        apart = 0.0
        for epoch in range(8):
            for opt in opts:
                opt.zero_grad()
            one = pipe.train_step(share, loss_of)
            other = ours.step(pipe.order_of(epoch))
            apart = max(apart, abs(float(one - other)))
            for opt in opts:
                opt.step()
        print(f"{order:12}{name:8} history of {refresh}: {apart:.1e} apart", flush=True)


if __name__ == "__main__":
    main()
