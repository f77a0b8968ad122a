"""Samples bipartite graphs by layer, as PyG's old NeighborSampler, without torch-sparse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import NeighborSampler as PyGNeighborSampler
from torch_geometric.loader.neighbor_sampler import EdgeIndex
from torch_geometric.sampler import NodeSamplerInput

from pyg_distcomm.comm.random import fresh_seed
from pyg_distcomm.ops.csr import coo_of
from pyg_distcomm.sampling.neighbor_sampler import KeyedNeighborSampler
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex


class NeighborSampler(PyGNeighborSampler):
    """Samples for each layer the neighbours of all nodes so far, as PyG's class does.

    Takes its arguments, and yields its batches (batch_size, n_id, adjs): with sizes of -1
    those of torch-sparse, which is not needed, and otherwise as many neighbours, drawn
    without replacement by torch's generator. A SparseTensor is sampled by torch-sparse.

    As in PyG each rank loads the whole list that it is given. The edges of a share are
    gathered on every rank; with one seed on all ranks all sample alike, so that
    `share.x[n_id]` are the rows of a batch. For batches that are shared out, and for a graph
    that fits no rank, see `DistNeighborLoader`.

    Args:
        edge_index: `[2, E]`, plain or of a share, or an adj_t of torch.sparse or torch-sparse.
        sizes, node_idx, num_nodes, return_e_id, transform, **kwargs: as in PyG.

    Price: of a share, 16 bytes per edge once on every rank.
    """

    def __init__(
        self,
        edge_index: Any,
        sizes: Sequence[int],
        node_idx: Tensor | None = None,
        num_nodes: int | None = None,
        return_e_id: bool = True,
        transform: Callable | None = None,
        **kwargs: Any,
    ) -> None:
        options = num_nodes, return_e_id, transform
        if not isinstance(edge_index, Tensor):
            super().__init__(edge_index, list(sizes), node_idx, *options, **kwargs)
            return
        for name in ("dataset", "collate_fn"):
            kwargs.pop(name, None)
        edges = edge_index
        if isinstance(edges, DistEdgeIndex):
            num_nodes = edges.nodes.total if num_nodes is None else num_nodes
            edges = edges.carrying(None).full_tensor()
        elif edges.layout != torch.strided:
            num_nodes = len(edges) if num_nodes is None else num_nodes
            edges = coo_of(edges)[0]
        edges = edges.as_subclass(Tensor).cpu()
        if isinstance(node_idx, DistTensor):
            node_idx = node_idx.full_tensor()
        mask = node_idx is not None and node_idx.dtype == torch.bool
        if num_nodes is None and mask:
            num_nodes = len(node_idx)  # type: ignore[arg-type]
        elif num_nodes is None:
            known = [edges, edges.new_empty(0) if node_idx is None else node_idx.cpu()]
            num_nodes = max(
                (int(ids.max()) + 1 for ids in known if len(ids.view(-1))), default=0
            )
        nodes = torch.arange(num_nodes) if node_idx is None else node_idx.view(-1)
        self.edge_index, self.node_idx, self.num_nodes = edge_index, node_idx, num_nodes
        self.sizes, self.return_e_id, self.transform = list(sizes), *options[1:]
        self.is_sparse_tensor, self.__val__ = False, None
        by_source = edges[0].argsort(stable=True)
        self._order = by_source[edges[1][by_source].argsort(stable=True)]
        data = Data(edge_index=edges[:, self._order], num_nodes=num_nodes)
        self._samplers = {
            size: KeyedNeighborSampler(data, [size]) for size in {*self.sizes}
        }
        ids: Any = (nodes.nonzero().view(-1) if mask else nodes).tolist()
        DataLoader.__init__(self, ids, collate_fn=self.sample, **kwargs)

    def sample(self, batch: Any) -> Any:
        """Returns (batch_size, n_id, adjs) of seeds, the last layer's edges first."""
        if self.is_sparse_tensor:
            return super().sample(batch)
        node, adjs = torch.as_tensor(batch), list[EdgeIndex]()
        count = len(node)
        for size in self.sizes:
            inputs: Any = NodeSamplerInput(input_id=None, node=node)
            inputs.key = fresh_seed()
            out: Any = self._samplers[size].sample_from_nodes(inputs)
            place = torch.argsort(out.col * len(out.node) + out.row, stable=True)
            ends = torch.stack([out.row[place], out.col[place]])
            edge = self._order[out.edge[place]] if self.return_e_id else None
            adjs.append(EdgeIndex(ends, edge, (len(out.node), len(node))))
            node = out.node
        found = count, node, adjs[0] if len(adjs) == 1 else adjs[::-1]
        return found if self.transform is None else self.transform(*found)
