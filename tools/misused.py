"""Misuses: what ranks do that they must not, and what all of them must say.

A case is a function that every rank runs. `says` is a pattern in the words of all ranks, which
all end with an error; without it, all ranks end well, with the same result.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
import torch.distributed as dist
from faulty import TIMEOUT, graph, neighbors, net, shared_out, started, train
from torch_geometric.data import HeteroData

import pyg_distcomm as pdc
from pyg_distcomm import nn
from pyg_distcomm.partition.folder import write_folder

CASES = {}
LATE = rf"waited {TIMEOUT:.0f} s"


def case(says=None, ranks=2, files=(), codes=None, name=None):
    """Registers a misuse.

    Args:
        says: what all ranks that fail say.
        ranks: how many there are.
        files: what may stay in their folder.
        codes: their exit codes; by default 1 if they say something, else 0.
        name: of the case; by default its function's.
    """

    def register(fn):
        fn.says, fn.ranks, fn.files, fn.codes = says, ranks, tuple(files), codes
        CASES[name or fn.__name__] = fn
        return fn

    return register


def me():
    return int(os.environ["RANK"])


def trained(**how):
    mesh, data = shared_out(**how)
    link = how.get("link")
    return train(mesh, net(), data, step=None if link is None else link.step)


def loaded(**how):
    _mesh, data = shared_out()
    return sum(batch.num_nodes for batch in neighbors(data, **how))


def loaded_from_all(**how):
    started()
    for _ in neighbors(graph(), options={"split": True}, **how):
        pass


PLACES = {
    "init": started,
    "partition": trained,
    "loader": loaded,
    "replicated loader": loaded_from_all,
}


def differs(name, first, second, where="init", says=None, called=None):
    """Makes a case of an argument that differs between ranks."""
    says = says or rf"same {name}(\.\w+)?: "

    @case(says=says, name=called or f"{name} differs in {where}")
    def run():
        PLACES[where](**{name: second if me() else first})


# What must agree ---------------------------------------------------------------------

differs("seed", 0, 1)
differs("timeout", 4.0, 5.0)
differs("check", "first", "always")
differs("strict", False, True)
differs("grid", (2, 1, 1), (1, 1, 2))
differs("stages", 1, 2)
differs("algorithm", "1d", "feature")


def changed(name, place=(1, 3)):
    @case(says=rf"same data.{name}: ", name=f"{name} of the data differs")
    def run():
        data = graph()
        if me() == 1:
            data[name][place if data[name].dim() > 1 else 3] = 1
            data[name] = data[name].clone()
        trained(data=data)


for attribute in ("x", "y", "train_mask", "edge_index"):
    changed(attribute)
for k, pair in enumerate(
    (
        (pdc.Sylvie(2), pdc.Sylvie(1)),
        (pdc.Sylvie(), None),
        (pdc.VARCO(10), pdc.VARCO(20)),
        (pdc.VARCO(10), pdc.BNS(0.5)),
        (pdc.BNS(0.5), pdc.BNS(0.25)),
        (pdc.PipeGCN(), pdc.PipeGCN(smooth=0.9)),
        (pdc.Sylvie(late=1), pdc.Sylvie(late=0)),
    )
):
    differs("link", *pair, "partition", called=f"link {k} differs")
unknown = "a method is not known on one rank"
differs("method", "random", "metiss", "partition", called=unknown)
differs("method", "random", "block", "partition")


@case(says="same level of data.z: it is node on rank 0, and edge on rank 1")
def levels_differ():
    data = graph()
    data.edge_index = data.edge_index[:, :240]
    data.z = torch.arange(240.0)
    names = {"edge_attrs" if me() else "node_attrs": ["z"]}
    shared_out(data=data, **names)


@case(says="same data.kinds: it is 3 on rank 0, and 4 on rank 1")
def plain_values_differ():
    data = graph()
    data.kinds = 3 + me()
    shared_out(data=data)


def typed():
    data = HeteroData()
    data["a"].x = torch.rand(20, 3, generator=torch.Generator().manual_seed(0))
    data["a", "to", "a"].edge_index = torch.arange(40).view(2, 20) % 20
    return data


@case(says="same method: it is random on rank 0, and block on rank 1")
def methods_of_typed_graphs_differ():
    shared_out(data=typed(), method=["random", "block"][me()])


@case(says=r"same method\['a'\]: ")
def owners_of_typed_graphs_differ():
    owner = torch.arange(20) % 2
    shared_out(data=typed(), method={"a": owner.flip(0) if me() else owner})


PARTS = pdc.Partition.from_owner(torch.arange(240) % 2, 2)


@case(says="same META.json: ", files=("p0", "p1"))
def folders_differ():
    mesh, data = started(), graph()
    data.x[3] += me()
    write_folder(f"p{me()}", data, PARTS)
    pdc.load_partition(f"p{me()}", mesh)


@case(says=r"\[240, 8\].*\[241, 8\]")
def one_rank_has_a_node_more():
    trained(data=graph(240 + me()))


@case(says="float|dtype")
def one_rank_has_float32():
    data = graph()
    data.x = data.x.float() if me() else data.x
    trained(data=data)


@case(says="out_channels: it is 16 on rank 0, and 24 on rank 1")
def one_model_is_wider():
    mesh, data = shared_out()
    train(mesh, net(width=16 + 8 * me()), data)


@case(says=rf"{LATE}|differ|order|other")
def one_model_has_another_layer():
    mesh, data = shared_out()
    train(mesh, net(nn.SAGEConv if me() else nn.GCNConv), data)


@case(says=LATE, codes=(1, 0))
def one_rank_skips_a_pass():
    _mesh, data = shared_out()
    for _ in range(3 - me()):
        data.x.relu().sum()  # that of a constant is computed once
    time.sleep(2 * TIMEOUT)


@case(says=rf"{LATE}|lost another rank|left", codes=(1, 0))
def one_rank_skips_backward():
    _mesh, data = shared_out()
    model = net()
    loss = model(data.x, data.edge_index).sum()
    if me() == 0:
        loss.backward()
        return
    time.sleep(2 * TIMEOUT)


@case(says=rf"{LATE}|lost another rank")
def one_rank_asks_for_all_rows():
    _mesh, data = shared_out()
    if me() == 0:
        data.x.full_tensor()
    time.sleep(2 * TIMEOUT)
    data.x.sum()


@case()
def one_rank_prints():
    _mesh, data = shared_out()
    some = data.x[data.x[:, 0] > 0.5]
    if me() == 0:
        print(data, data.x, data.edge_index, some, len(some))
    return float(data.x.sum())


# Layers -------------------------------------------------------------------------------


@case(says=LATE)
def one_rank_evaluates_later():
    _mesh, data = shared_out()
    conv = nn.GCNConv(data.num_features, 8).to(data.x.dtype)
    conv(data.x, data.edge_index)
    conv.train(me() == 0)
    conv(data.x, data.edge_index)


# Values that are no values ------------------------------------------------------------


def refused(where, says, **how):
    called = f"{where}: " + ", ".join(f"{k}={v!r}" for k, v in how.items())
    place = shared_out if where == "partition" else PLACES[where]
    case(says=says, name=called)(lambda: place(**how))


for wrong in (0, -1, 0.0, float("nan"), True, "5"):
    refused("init", "timeout", timeout=wrong)
for wrong in ((3, 1, 1), (-2, -1, 1), (2, 1), "2d", 3, 0, 1.5):
    refused("init", "grid|ranks", grid=wrong)
for wrong in (0, 3, -2):
    refused("init", "stages", stages=wrong)
refused("init", "replication", algorithm="1.5d", replication=3)
refused("init", "algorithm|4d", algorithm="4d")
refused("init", "check", check="sometimes")
refused("init", "seed", seed="zero")
refused("partition", "metiss", method="metiss")
refused("partition", "link", link="sylvie")
for wrong in ([4, -2], [4, 1.5], [True, 4], "44", [-7]):
    refused("loader", "num_neighbors|fan-out", num_neighbors=wrong)
for wrong in (0, -1, 1.5):
    refused("loader", "batch_size", batch_size=wrong)
refused("loader", "input_nodes|240", input_nodes=[0, 240])
differs("num_neighbors", [4, 4], [4, 3], "loader")
differs("batch_size", 16, 8, "loader")
told = "got .*batch_size=.* on rank [01],? and .*batch_size=.* on rank [01]"
differs("batch_size", 16, 8, "replicated loader", says=told)
differs("seed", 0, 1, "loader")
differs("replace", False, True, "loader")


@case()
def two_meshes_in_a_layer():
    _, one = shared_out()
    _, two = shared_out(method="block")
    model = net().eval()
    found = model(one.x, two.edge_index).full_tensor()
    torch.testing.assert_close(found, model(one.x, one.edge_index).full_tensor())


def in_threads(count, call):
    """Calls in threads beside the main one, and raises the error that comes first."""
    with ThreadPoolExecutor(count) as pool:
        for done in as_completed([pool.submit(call) for _ in range(count)]):
            done.result()


@case(says="thread")
def training_from_two_threads():
    mesh, data = shared_out()
    in_threads(2, lambda: train(mesh, net(), data))


# Loaders ------------------------------------------------------------------------------


@case(says=rf"{LATE}|lost another rank|left")
def one_rank_builds_a_loader():
    _mesh, data = shared_out()
    if me() == 0:
        next(iter(neighbors(data)))
    else:
        time.sleep(2 * TIMEOUT)
        data.x.sum()


@case()
def ranks_have_unlike_many_seeds():
    _mesh, data = shared_out()
    seeds = list(range(40 if me() else 3))
    return len(list(neighbors(data, 4, input_nodes=seeds))) > 0


# Files --------------------------------------------------------------------------------


@case(says=rf"{LATE}|lost another rank")
def one_rank_saves():
    mesh, data = shared_out()
    model = net()
    train(mesh, model, data, 1)
    if me() == 0:
        pdc.save_checkpoint("run", mesh, model)
    time.sleep(2 * TIMEOUT)
    data.x.sum()


OWN_TRACES = tuple(f"rank{rank}.run.json" for rank in range(4))


@case(says=rf"{LATE}|lost another rank", files=OWN_TRACES)
def one_rank_traces():
    mesh, data = shared_out()
    if me() == 0:
        with pdc.trace("run.json", mesh):
            data.x.sum()
    else:
        data.x.sum()
        time.sleep(2 * TIMEOUT)
        data.x.sum()


@case(says="same path: it is run0.json on rank 0, and run1.json on rank 1")
def traces_to_paths_that_differ():
    mesh, data = shared_out()
    with pdc.trace(f"run{me()}.json", mesh):
        data.x.sum()


@case(says="link must be", files=("p0", "p1"))
def a_link_by_name_for_a_folder():
    mesh, data = started(), graph()
    write_folder(f"p{me()}", data, PARTS)
    pdc.load_partition(f"p{me()}", mesh, link="fast")


@case(says="link")
def a_link_by_name_for_converted_layers():
    shared_out()
    pdc.nn.convert(net(), link="fast")


# Ranks that do not come, and signals ------------------------------------------------


@case(says="process groups of this mesh were ended")
def groups_are_destroyed_before_a_call():
    _mesh, data = shared_out()
    data.x.sum()
    torch.distributed.destroy_process_group()
    data.x.mean()


@case(says="process groups of this mesh were ended")
def groups_are_destroyed_before_a_loader():
    _mesh, data = shared_out()
    torch.distributed.destroy_process_group()
    next(iter(neighbors(data)))


@case()
def a_run_joins_anew_after_its_groups_are_destroyed():
    mesh, data = shared_out()
    data.x.sum()
    torch.distributed.destroy_process_group()
    mesh.close()
    _mesh, data = shared_out()
    return float(data.x.sum())


@case(says="giving up|rank 1 had come to its end, or called sys.exit")
def one_rank_gives_up():
    _mesh, data = shared_out()
    data.x.sum()
    if me() == 1:
        sys.exit("giving up")
    data.x.mean()


@case(codes=(7, 7))
def all_ranks_exit_with_a_code_of_their_own():
    _mesh, data = shared_out()
    data.x.sum()
    raise SystemExit(7)


@case(says=r"no \\udcff \\x00 name|no .*name")
def an_error_that_cannot_be_encoded():
    _mesh, data = shared_out()
    if me() == 1:
        raise ValueError("no \udcff \x00 name")
    data.x.sum()


@case(says="did not come|have not met|lost another", codes=(1, 3))
def one_rank_ends_before_init():
    if me() == 1:
        raise SystemExit(3)
    started()


@case(says=rf"did not come|{LATE}|could not connect")
def one_rank_comes_late():
    time.sleep(2.5 * TIMEOUT if me() else 0)
    started()


@case(says="main thread", codes=(1, 1))
def on_preempt_in_a_thread():
    mesh = started()
    in_threads(1, lambda: pdc.on_preempt(print, mesh))


@case()
def a_script_ends_the_process_group_itself():
    mesh, data = shared_out()
    found = float(data.x.sum())
    del data
    mesh.close()
    dist.destroy_process_group()
    return found


def links_differ(own):
    mesh, data = shared_out()
    link = pdc.Sylvie() if me() else None
    if own:
        nn.DistSAGEConv(8, 3, link=link)(data.x.float(), data.edge_index)
    data.edge_index = data.edge_index.with_link(link)
    train(mesh, net(), data)


for owner in ("edges", "layers"):
    here = case("same link.*on rank 0, and.*on rank 1", name=f"links_of_{owner}_differ")
    here(functools.partial(links_differ, own=owner == "layers"))


@case(says="holds nan")
def features_are_not_numbers():
    data = graph()
    data.x[3, 2] = float("nan")
    mesh, data = shared_out(data=data)
    link = pdc.Sylvie(exact_last=False)
    data.edge_index = data.edge_index.with_link(link)
    train(mesh, net(), data, step=link.step)
