"""Ranks that fail on purpose: what they do, and where a fault strikes.

A rank runs a workload: a short script that prints `RESULT` and a hash of what it computed.
A fault strikes one rank at the n-th exchange that it begins, in whatever thread that is:
`kill` (SIGKILL), `stop` (SIGSTOP), `term` (SIGTERM), `raise` (an exception), `leave` (the
script ends early), `slow` (a pause, which is no fault).
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import signal
import sys
import threading
import time

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv, Sequential

import pyg_distcomm as pdc
from pyg_distcomm import nn
from pyg_distcomm.comm.ledger import Ledger
from pyg_distcomm.loader import (
    DistFeatureStore,
    DistLayerLoader,
    DistNeighborLoader,
    LoaderOptions,
    shared,
)

WORKLOADS = {}
TIMEOUT = 4.0  # seconds, of every mesh
INJECTED = "injected on purpose"


def workload(ranks=2, files=(), rank=1, name=None):
    """Registers a workload, its ranks, what may stay in its folder, and whom faults strike."""

    def register(fn):
        WORKLOADS[name or fn.__name__] = fn
        fn.ranks, fn.files, fn.rank = ranks, tuple(files), rank
        return fn

    return register


# What scripts do ---------------------------------------------------------------------


def graph(n=240, f=8, classes=3):
    g = torch.Generator().manual_seed(0)
    edges = torch.randint(0, n, (2, 6 * n), generator=g)
    x = torch.rand(n, f, generator=g, dtype=torch.float64)
    data = Data(x=x, edge_index=edges, y=torch.arange(n) % classes)
    data.train_mask = torch.arange(n) % 2 == 0
    return data


def started(*args, **how):
    return pdc.init(*args, **{"timeout": TIMEOUT, **how})


def shared_out(data=None, mesh=None, method="random", **how):
    """A mesh, and this rank's share of a graph."""
    mesh = started() if mesh is None else mesh
    return mesh, pdc.partition(graph() if data is None else data, mesh, method, **how)


def train(mesh, model, data, epochs=4, step=None, each=None):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        if step is not None:
            step()
        if each is not None:
            each(epoch, optimizer)
    return [*model.parameters(), loss]


def net(layers=nn.GCNConv, width=16, normed=False):
    """Two layers, and between them batch norm or dropout."""
    torch.manual_seed(1)
    one, two, edges = layers(8, width), layers(width, 3), "x, edge_index -> x"
    between = [torch.nn.ReLU(), torch.nn.Dropout(0.3)]
    if normed:
        between = [torch.nn.BatchNorm1d(width), torch.nn.ReLU()]
    return Sequential("x, edge_index", [(one, edges), *between, (two, edges)]).double()


def full_graph(algorithm="1d", layer=nn.GCNConv, link=None, **shape):
    mesh, data = shared_out(mesh=started(algorithm, **shape), link=link)
    return train(mesh, net(layer), data, step=None if link is None else link.step)


LARGEST = functools.partial(nn.SAGEConv, aggr="max")
for ranks, called, given in (
    (2, "gcn", {}),
    (4, "gcn_copied", {"algorithm": "1.5d", "replication": 2}),
    (4, "gcn_on_a_grid", {"algorithm": "2d"}),
    (2, "gcn_by_features", {"algorithm": "feature"}),
    (3, "gat", {"layer": nn.GATConv}),
    (2, "largest_neighbour", {"layer": LARGEST}),
    (2, "varco", {"link": pdc.VARCO(4)}),
    (2, "one_bit_late", {"link": pdc.Sylvie(1)}),
    (2, "some_rows", {"link": pdc.BNS(0.5)}),
):
    workload(ranks, name=called)(functools.partial(full_graph, **given))


@workload()
def batch_norm_and_metrics():
    mesh, data = shared_out()
    model, found = net(nn.SAGEConv, normed=True), []

    def each(epoch, optimizer):
        model.eval()
        with torch.no_grad():
            out = model(data.x, data.edge_index)
            sure = out[out.amax(-1) > 0.4]
            found.append(sure.size(0))
            found.append(float((out.argmax(-1) == data.y).sum() / data.num_nodes))
            found.append(float(out[torch.arange(0, 240, 7)].sum()))
        model.train()

    return [*train(mesh, model, data, each=each), *found]


@workload()
def wrapped_by_ddp():
    mesh, data = shared_out()
    return train(mesh, pdc.replicate(net(), mesh), data)


def staged(chunks, **how):
    mesh, data = shared_out(mesh=started(**how))
    torch.manual_seed(1)
    stack = [GCNConv(8, 8), torch.nn.ReLU(), GCNConv(8, 8), torch.nn.ReLU()]
    stack = [layer.double() for layer in (*stack, GCNConv(8, 3))]
    pipe = pdc.Pipeline(stack, mesh, chunks=chunks)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)

    def cost(out, data):
        return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])

    for _ in range(3):
        optimizer.zero_grad()
        loss = pipe.train_step(data, cost)
        optimizer.step()
    return [*pipe.parameters(), loss]


@workload()
def pipeline():
    return staged(4, stages=2)


@workload(ranks=4)
def hybrid():
    return staged(4, stages=2)


def plain_net():
    return net(SAGEConv).float()


def neighbors(data, batch_size=16, **how):
    """A loader of minibatches of two hops."""
    options = LoaderOptions(seed=how.pop("seed", 0), **how.pop("options", {}))
    how = {"num_neighbors": [4, 4], **how}
    return DistNeighborLoader(data, batch_size=batch_size, options=options, **how)


def minibatches(mesh, loader):
    model = pdc.replicate(plain_net(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            out = model(batch.x.float(), batch.edge_index)[: batch.batch_size]
            (F.cross_entropy(out, batch.y[: batch.batch_size])).backward()
            optimizer.step()
    return list(model.parameters())


@workload()
def partitioned_loader():
    mesh, data = shared_out()
    return minibatches(mesh, neighbors(data, shuffle=True, options={"bulk_size": 2}))


@workload()
def replicated_loader():
    mesh = started()
    return minibatches(mesh, neighbors(graph(), shuffle=True))


@workload()
def layerwise_loader():
    mesh, data = shared_out()
    how = {"rule": "ladies", "batch_size": 16, "options": LoaderOptions(seed=0)}
    return minibatches(mesh, DistLayerLoader(data, [24, 24], **how))


@workload()
def feature_store():
    mesh, data = shared_out()
    store = DistFeatureStore.from_data(data, mesh, cache=0.1)
    found = []
    for step in range(6):
        ids = torch.arange(step + mesh.rank, 240, 5)
        found.append(store.fetch({None: ids})[None]["x"])
    return found


@workload(files=("run",))
def checkpoints():
    (mesh, data), model = shared_out(), net()

    def each(epoch, optimizer):
        pdc.save_checkpoint("run", mesh, model, optimizer, epoch=epoch)
        pdc.load_checkpoint("run", mesh, model, optimizer)

    return train(mesh, model, data, each=each, epochs=3)


@workload(files=("run.json", *(f"rank{rank}.run.json" for rank in range(4))))
def traced():
    mesh, data = shared_out()
    with pdc.trace("run.json", mesh):
        return train(mesh, net(), data)


@workload()
def planned():
    data = graph()
    mesh = started(pdc.Auto(data, widths=[8, 16, 3]))
    train(mesh, net(), pdc.partition(data, mesh))
    return []  # the plan depends on what was measured


def graph_in_steps():
    """Makes a graph; a fault may strike between its steps."""
    nothing = dict.fromkeys(("words", "bytes", "sent_bytes", "messages"), 0)
    for _ in range(4):
        Ledger().note("load", "none", **nothing)
    return graph()


@workload(rank=0)
def one_copy_a_host():
    mesh, data = started(), shared(graph_in_steps)
    mesh.everyone.watch.barrier("the end", 0, mesh.size)
    return [data.x.sum()]


@workload()
def gathered():
    _mesh, data = shared_out()
    found = []
    for _ in range(3):
        found += [data.x.sort(0).values, data.x.mean(0), data.x.std()]
        found += [data.x[torch.randperm(240)].full_tensor().sum(), data.y.bincount()]
        found += [torch.tensor(data.x[data.x.sum(1) > 4].shape)]
    return found


# Where a fault strikes --------------------------------------------------------------


def arm(how, rank, at):
    """Makes a fault strike this process at its n-th exchange; counts exchanges."""
    note, state = Ledger.note, {"count": 0}

    def counted(self, *args, **kwargs):
        if self.parent is None:
            state["count"] += 1
            if state["count"] == at and rank == int(os.environ["RANK"]):
                print(f"STRUCK {time.time()}", file=sys.stderr, flush=True)
                strike(how, threading.current_thread() is threading.main_thread())
        return note(self, *args, **kwargs)

    Ledger.note = counted
    return state


def strike(how, main):
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
    if how in numbers:
        os.kill(os.getpid(), numbers[how])
    elif how == "raise":
        raise ValueError(INJECTED)
    elif how == "leave" and not main:
        os._exit(7)
    elif how == "leave":
        raise SystemExit(0)
    elif how == "slow":
        time.sleep(1.0)


def hashed(found):
    total = hashlib.sha256()
    for value in found:
        value = value.to_local() if hasattr(value, "to_local") else value
        value = torch.as_tensor(value).detach().double().contiguous()
        total.update(value.numpy().tobytes())
    return total.hexdigest()[:16]


def run_job(case):
    """Runs one rank of a case: a workload with a fault, or a function of `misused`."""
    atexit.register(print, "CLEANED", flush=True)
    if "workload" in case:
        state = arm(case["how"], case["rank"], case["at"])
        print("RESULT", hashed(WORKLOADS[case["workload"]]()), flush=True)
        print("COUNT", state["count"], flush=True)
        return
    import misused

    print("RESULT", misused.CASES[case["misuse"]]() or "", flush=True)
