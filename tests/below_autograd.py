"""Puts tensors below autograd in place of today's, for all tests that run with it.

    PYG_DISTCOMM_BELOW_AUTOGRAD=1 pytest tests/test_layers.py

A step towards one kind of tensor: the package's own modules do not know of it, since it is set
before they take each other's names.
"""

from __future__ import annotations

import os
from importlib import import_module

WANTED = os.environ.get("PYG_DISTCOMM_BELOW_AUTOGRAD") == "1"


def switch():
    averaging = import_module("pyg_distcomm.comm.gradient_averaging")
    averaging.as_replicated = lambda x, mesh: import_module(
        "pyg_distcomm.sharded.layers"
    ).entered(x, mesh)
    sharded = import_module("pyg_distcomm.sharded")
    edges = import_module("pyg_distcomm.sharded.edges")
    import_module("pyg_distcomm.tensor.dist_tensor").DistTensor = sharded.DistTensor
    import_module("pyg_distcomm.tensor.gradient_scale").from_local = edges.from_local
    gather = import_module("pyg_distcomm.tensor.gather_by_id")
    gather.shard_as = edges.shard_as
    gather.reshard = import_module("pyg_distcomm.sharded.ids").reshard
    edge_index = import_module("pyg_distcomm.graph.edge_index")
    edge_index.DistEdgeIndex = edges.DistEdgeIndex
    edge_index.rows_of_edges = edges.rows_of_edges
    import_module("pyg_distcomm.graph.transforms").register = lambda: None
    chunks = import_module("pyg_distcomm.pipeline.chunk_rows")
    import_module("pyg_distcomm.pipeline.chunk_graph").view_of = chunks.view_of
    import_module("pyg_distcomm.plan.pipelines").LOSS_SUMS = 1
    epoch = import_module("pyg_distcomm.pipeline.epoch").Epoch
    plain_loss = epoch._loss

    def loss(self, data, loss_fn):
        """Hands on P times the gradient of rows, since weights get the mean of ranks."""
        out = plain_loss(self, data, loss_fn)
        self.boundary.outbox.mul_(self.mesh.size)
        return out

    epoch._loss = loss
    # tests ask so of results that are sharded in one kind and plain in the other
    import_module("torch").Tensor.full_tensor = lambda self: self
    switch_layers()


def switch_layers():
    nn = import_module("pyg_distcomm.nn")
    ours, halo = import_module("pyg_distcomm.nn.layers"), "pyg_distcomm.nn.halo_conv"
    new = import_module("pyg_distcomm.sharded.layers")
    old, halo = nn.HaloExecution, import_module(halo)
    halo._run, halo.shard_inputs = new.run_any, new.sharded_inputs_of
    halo.HaloExecution = nn.HaloExecution = new.OnShare
    convert = import_module("pyg_distcomm.nn.convert")
    for module in (nn, ours, import_module("pyg_distcomm.nn.product_layers"), convert):
        for name in ("GCNConv", "GCN2Conv", "SAGEConv"):
            setattr(module, f"Dist{name}", getattr(new, f"Dist{name}"))
            if module is not convert:
                setattr(module, name, getattr(new, f"Dist{name}"))
    for kind in list(vars(ours).values()):
        if isinstance(kind, type) and old in kind.__bases__:
            kind.__bases__ = tuple(
                new.OnShare if base is old else base for base in kind.__bases__
            )
    convert.DISTRIBUTED.clear()
    for name in ("GCNConv", "GCN2Conv", "SAGEConv"):
        convert.DISTRIBUTED[getattr(convert, name)] = getattr(new, f"Dist{name}")
    layers = new.DistGCNConv, new.DistGCN2Conv, new.DistSAGEConv
    convert.LINKED = *layers, convert.HaloConv, new.OnShare
    convert.HaloExecution = new.OnShare


if WANTED:
    switch()
