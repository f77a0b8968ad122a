"""PyG's own distributed loader, over RPC, on the parts and the seeds that ours loads.

`torch_geometric.distributed` needs pyg-lib. It is deprecated, and PyG 2.8.1 gives its own
deprecation notice a keyword that does not exist, so that nothing of it can be built: here
the notice is silenced, and nothing else is changed.
"""

from __future__ import annotations

import math
import os
import socket
from typing import Any

import torch
import torch_geometric.distributed as rpc
from loaders import BATCH
from ranks import Case, Found, Task, count, timed
from torch import Tensor
from torch_geometric.distributed import dist_neighbor_loader, dist_neighbor_sampler
from torch_geometric.sampler import NodeSamplerInput

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.partition.folder import read_part
from pyg_distcomm.partition.part_share import PartShare


class Peer:
    """One rank's stores of PyG's kind, and loaders on them."""

    def __init__(self, task: Task, mesh: pdc.Mesh) -> None:
        for module in (dist_neighbor_loader, dist_neighbor_sampler):
            module.warn = lambda *_, **__: None
        # of `launch`, whose store is not the one that RPC opens
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        part = read_part(task.folder, mesh.rank)
        self.fan_out, self.rank, self.size = list(task.fan_out), mesh.rank, mesh.size
        self.stores = _features(part), _edges(part)
        self._world = mesh.world

    def epoch_of(self, case: Case, nodes: Tensor, most: int | None) -> Any:
        """Returns what loads an epoch, or samples the minibatches of one."""
        nodes = nodes if most is None else nodes[: most * BATCH]
        options, port = dict(case.options), _free_port()
        if options.get("num_workers"):
            options["persistent_workers"] = True
        loader = rpc.DistNeighborLoader(
            self.stores,
            self.fan_out,
            master_addr="127.0.0.1",
            master_port=collectives.broadcast_object(port, self._world),
            current_ctx=rpc.DistContext(
                rank=self.rank,
                global_rank=self.rank,
                world_size=self.size,
                global_world_size=self.size,
                group_name="rank",
            ),
            input_nodes=nodes,
            batch_size=BATCH,
            shuffle=True,
            **options,
        )
        if not case.rows:
            return lambda: _sampled(loader.dist_sampler, nodes)
        return lambda: _loaded(loader)


def _loaded(loader: Any) -> Found:
    with timed() as found:
        for batch in loader:
            count(batch, found)
    if loader.num_workers:
        found.work = math.nan  # not of this process alone
    return found


def _sampled(sampler: Any, nodes: Tensor) -> Found:
    """Samples an epoch, as many minibatches at a time as the sampler allows."""
    sampler.init_event_loop()
    with timed() as found:

        def add(out: Any) -> None:  # in the one thread of the sampler's loop
            found.edges += out.row.numel()
            found.nodes += out.node.numel()

        for seeds in nodes[torch.randperm(len(nodes))].split(BATCH):
            inputs = NodeSamplerInput(torch.arange(len(seeds)), seeds)
            sampler.event_loop.add_task(sampler.node_sample(inputs), callback=add)
            found.seeds += len(seeds)
        sampler.event_loop.wait_all()
    return found


def _features(part: PartShare) -> rpc.LocalFeatureStore:
    store = rpc.LocalFeatureStore.from_data(part.node_gid, part.node["x"])
    _place(store, part)
    store.node_feat_pb = store.edge_feat_pb = _owner(part)
    return store


def _edges(part: PartShare) -> rpc.LocalGraphStore:
    n = part.partition.num_nodes
    store = rpc.LocalGraphStore.from_data(part.edge_gid, part.edge_index, n)
    _place(store, part)
    store.node_pb = store.edge_pb = _owner(part)
    return store


def _place(store: Any, part: PartShare) -> None:
    store.num_partitions, store.partition_idx = part.partition.num_parts, part.part
    store.meta = {"is_hetero": False, "num_parts": part.partition.num_parts}


def _owner(part: PartShare) -> Tensor:
    partition = part.partition
    return partition.owner_of(torch.arange(partition.num_nodes)).long()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
