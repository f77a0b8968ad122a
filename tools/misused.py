"""Misuses: what ranks do that they must not, and what all of them must say.

A case is a function that every rank runs. `says` is a pattern in the words of all ranks, which
all end with an error; without it, all ranks end well, with the same result.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

from faulty import TIMEOUT, graph, net, plain_net, train

CASES = {}
LATE = rf"waited {TIMEOUT:.0f} s"


def case(says=None, ranks=2, files=(), codes=None):
    """Registers a misuse.

    Args:
        says: what all ranks that fail say.
        ranks: how many there are.
        files: what may stay in their folder.
        codes: their exit codes; by default 1 if they say something, else 0.
    """

    def register(fn):
        fn.says, fn.ranks, fn.files, fn.codes = says, ranks, tuple(files), codes
        CASES[fn.__name__] = fn
        return fn

    return register


def me():
    return int(os.environ["RANK"])


def started(*args, **how):
    import pyg_distcomm as pdc

    return pdc.init(*args, **{"timeout": TIMEOUT, **how})


def shared_out(data=None, mesh=None, **how):
    import pyg_distcomm as pdc

    mesh = started() if mesh is None else mesh
    data = graph() if data is None else data
    return mesh, pdc.partition(data, mesh, how.pop("method", "random"), **how)


def trained(layer="GCNConv", **how):
    from pyg_distcomm import nn

    mesh, data = shared_out(**how)
    link = how.get("link")
    step = None if link is None else link.step
    return train(mesh, net(getattr(nn, layer)), data, step=step)


def differs(name, first, second, where="init"):
    """Makes a case of an argument that differs between ranks."""

    def run():
        value = first() if me() == 0 else second()
        if where == "init":
            started(**{name: value})
        elif where == "partition":
            trained(**{name: value})
        elif where == "loader":
            loaded(**{name: value})
        else:
            from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

            mesh = started()
            options = LoaderOptions(seed=0, split=True)
            how = {"batch_size": 16, name: value, "options": options}
            for _ in DistNeighborLoader(graph(), [4, 4], **how):
                assert mesh.size == 2

    run.__name__ = f"{name} differs in {where}"
    case(
        says=rf"same {name}(\.\w+)?: "
        if where != "replicated loader"
        else rf"got .*{name}=.* on rank [01],? and .*{name}=.* on rank [01]"
    )(run)


# What must agree ---------------------------------------------------------------------

differs("seed", lambda: 0, lambda: 1)
differs("timeout", lambda: 4.0, lambda: 5.0)
differs("check", lambda: "first", lambda: "always")
differs("strict", lambda: False, lambda: True)
differs("grid", lambda: (2, 1, 1), lambda: (1, 1, 2))
differs("stages", lambda: 1, lambda: 2)
differs("algorithm", lambda: "1d", lambda: "feature")


def changed(name, place=(1, 3)):
    def run():
        data = graph()
        if me() == 1:
            data[name][place if data[name].dim() > 1 else 3] = 1
            data[name] = data[name].clone()
        trained(data=data)

    run.__name__ = f"{name} of the data differs"
    case(says=rf"same data.{name}: ")(run)


for attribute in ("x", "y", "train_mask", "edge_index"):
    changed(attribute)


def link(name, *args, **how):
    def make():
        import pyg_distcomm as pdc

        return getattr(pdc, name)(*args, **how)

    return make


def no_link():
    return None


for k, pair in enumerate(
    (
        (link("Sylvie", 2), link("Sylvie", 1)),
        (link("Sylvie"), no_link),
        (link("VARCO", 10), link("VARCO", 20)),
        (link("VARCO", 10), link("BNS", 0.5)),
        (link("BNS", 0.5), link("BNS", 0.25)),
        (link("PipeGCN"), link("PipeGCN", smooth=0.9)),
        (link("Sylvie", late=1), link("Sylvie", late=0)),
    )
):
    differs("link", *pair, "partition")
    CASES[f"link {k} differs"] = CASES.pop("link differs in partition")
differs("method", lambda: "random", lambda: "block", "partition")
differs("method", lambda: "random", lambda: "metiss", "partition")
CASES["a method is not known on one rank"] = CASES.pop("method differs in partition")
differs("method", lambda: "random", lambda: "block", "partition")


@case(says="same level of data.z: it is node on rank 0, and edge on rank 1")
def levels_differ():
    import torch

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


@case(says="'near' is torch.sparse_coo, and ranks hold dense rows")
def a_sparse_attribute():
    import torch

    data = graph()
    value = torch.ones(data.edge_index.size(1))
    data.near = torch.sparse_coo_tensor(data.edge_index, value, (240, 240))
    shared_out(data=data)


def typed():
    import torch
    from torch_geometric.data import HeteroData

    draw = torch.Generator().manual_seed(0)
    data = HeteroData()
    data["a"].x = torch.randn(50, 3, generator=draw)
    data["a", "to", "a"].edge_index = torch.randint(0, 50, (2, 200), generator=draw)
    return data


@case(says="same method: it is random on rank 0, and block on rank 1")
def methods_of_typed_graphs_differ():
    shared_out(data=typed(), method=["random", "block"][me()])


@case(says=r"same method\['a'\]: ")
def owners_of_typed_graphs_differ():
    import torch

    owner = torch.arange(50) % 2
    shared_out(data=typed(), method={"a": owner.flip(0) if me() else owner})


@case(says="same META.json: ", files=("p0", "p1"))
def folders_differ():
    import pyg_distcomm as pdc
    from pyg_distcomm.partition.cutters import cut
    from pyg_distcomm.partition.folder import write_folder

    mesh, data = started(), graph()
    data.x[3] += me()
    parts = cut(data.edge_index, 240, 2, "random")
    write_folder(f"p{me()}", data, parts)
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
    from pyg_distcomm import nn

    mesh, data = shared_out()
    train(mesh, net(nn.GCNConv, 16 + 8 * me()), data)


@case(says=rf"{LATE}|differ|order|other")
def one_model_has_another_layer():
    from pyg_distcomm import nn

    mesh, data = shared_out()
    train(mesh, net(nn.SAGEConv if me() else nn.GCNConv), data)


@case(says="Give optimizers the same lr")
def learning_rates_differ():
    import torch
    import torch.nn.functional as F

    from pyg_distcomm import nn

    _mesh, data = shared_out(mesh=started(check="always"))
    model = net(nn.GCNConv)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + 0.1 * me())
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
        optimizer.step()


@case(says=LATE, codes=(1, 0))
def one_rank_skips_a_pass():
    _mesh, data = shared_out()
    for _ in range(3 - me()):
        data.x.relu().sum()  # that of a constant is computed once
    time.sleep(2 * TIMEOUT)


@case(says=rf"{LATE}|lost another rank|left", codes=(1, 0))
def one_rank_skips_backward():
    from pyg_distcomm import nn

    _mesh, data = shared_out()
    model = net(nn.GCNConv)
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


@case(says="seed the generator of this tensor")
def plain_tensors_differ():
    import torch

    _mesh, data = shared_out()
    torch.manual_seed(me())
    (data.x[:, 0] + torch.rand(240)).sum()


@case(says="from_local|rows")
def a_tensor_of_local_rows():
    import torch

    _mesh, data = shared_out()
    (data.x[:, 0] + torch.ones(len(data.x.to_local()))).sum()


# Operations that differ between ranks --------------------------------------------------

ALIKE = "all ranks in the same order"


def operations(name, first, second, says=ALIKE, **how):
    """Makes a case of ranks that call different things with `torch`, the package and x."""

    def run():
        import torch

        import pyg_distcomm as pdc

        _mesh, data = shared_out(mesh=started(**how))
        x = data.x.detach()
        (first if me() == 0 else second)(torch, pdc, x)
        (x + 1).sum()  # scripts go on

    run.__name__ = name
    case(says=says)(run)


def rows_of(columns, dtype):
    def make(torch, pdc, x):
        rows = torch.ones(len(x.to_local()), columns, dtype=getattr(torch, dtype))
        pdc.from_local(rows, like=x).full_tensor()

    return make


def rows_kept(first):
    def mask(torch):
        return torch.arange(240) % 2 == first

    return mask


def smoothed(amount):
    def loss(torch, _pdc, x):
        y = x.argmax(-1)
        torch.nn.functional.cross_entropy(x, y, label_smoothing=amount)

    return loss


def dropped(training):
    return lambda torch, _pdc, x: torch.nn.functional.dropout(x, training=training)


operations("sums differ", lambda _t, _p, x: x.sum(0), lambda _t, _p, x: x.sum())
operations(
    "a sum and a maximum", lambda _t, _p, x: x.sum(0), lambda _t, _p, x: x.max(0)
)
operations(
    "ids and all rows",
    lambda torch, _p, x: x[torch.arange(5)],
    lambda _t, _p, x: x.full_tensor(),
)
operations(
    "a sum and the length of a selection",
    lambda _t, _p, x: x.sum(),
    lambda _t, _p, x: len(x[x[:, 0] > 0.5]),
)
operations("rows of other widths", rows_of(3, "float32"), rows_of(4, "float32"))
operations("rows of another dtype", rows_of(3, "float32"), rows_of(3, "float64"))
operations("rows of whole numbers", rows_of(3, "float32"), rows_of(3, "int32"))
operations("label smoothing differs", smoothed(0.0), smoothed(0.1))
operations("one rank drops", dropped(True), dropped(False))
for checked in ("first", "always"):
    operations(
        f"masks differ, compared {checked}",
        lambda torch, _p, x: x[rows_kept(0)(torch)].sum(),
        lambda torch, _p, x: x[rows_kept(1)(torch)].sum(),
        says="seed the generator of this tensor",
        check=checked,
    )
operations(
    "masks of what is written differ",
    lambda torch, _p, x: x.__setitem__(rows_kept(0)(torch), 0),
    lambda torch, _p, x: x.__setitem__(rows_kept(1)(torch), 0),
    says="seed the generator of this tensor",
)
operations(
    "written values differ",
    lambda torch, _p, x: x.__setitem__(rows_kept(0)(torch), torch.zeros(x.shape[1])),
    lambda torch, _p, x: x.__setitem__(rows_kept(0)(torch), torch.ones(x.shape[1])),
    says="seed the generator of this tensor",
)


def layers_differ(name, layer, first, second, says):
    """Makes a case of a layer whose constructor got other arguments on one rank."""

    def run():
        from pyg_distcomm import nn

        _mesh, data = shared_out()
        conv = getattr(nn, layer)(data.num_features, 8, **(second if me() else first))
        conv.double()(data.x, data.edge_index)

    run.__name__ = name
    case(says=says)(run)


for setting, layer, value, other, more in (
    ("add_self_loops", "GCNConv", True, False, {}),
    ("normalize", "GCNConv", True, False, {"add_self_loops": False}),
    ("aggr", "SAGEConv", "mean", "max", {}),
    ("negative_slope", "GATConv", 0.2, 0.1, {}),
    ("dropout", "GATConv", 0.5, 0.4, {}),
):
    layers_differ(
        f"{setting} of {layer} differs",
        layer,
        {setting: value, **more},
        {setting: other, **more},
        rf"same {setting}: it is .* on rank 0, and .* on rank 1|{ALIKE}",
    )


@case(says="same training: it is True on rank 0, and False on rank 1")
def one_rank_evaluates():
    from pyg_distcomm import nn

    _mesh, data = shared_out()
    conv = nn.GCNConv(data.num_features, 8).to(data.x.dtype)
    conv.train(me() == 0)
    conv(data.x, data.edge_index)


@case(says=LATE)
def one_rank_evaluates_later():
    from pyg_distcomm import nn

    _mesh, data = shared_out()
    conv = nn.GCNConv(data.num_features, 8).to(data.x.dtype)
    conv(data.x, data.edge_index)
    conv.train(me() == 0)
    conv(data.x, data.edge_index)


@case(says="link must be a LinkPolicy")
def a_link_of_a_layer_by_name():
    from pyg_distcomm import nn

    nn.GCNConv(8, 8, link="fast")


# Values that are no values ------------------------------------------------------------


def refused(where, says, **how):
    def run():
        if where == "init":
            started(**how)
        elif where == "partition":
            shared_out(**how)
        else:
            loaded(**how)

    run.__name__ = f"{where}: " + ", ".join(f"{k}={v!r}" for k, v in how.items())
    case(says=says)(run)


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


def loaded(**how):
    from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

    _mesh, data = shared_out()
    options = LoaderOptions(seed=how.pop("seed", 0))
    how = {"num_neighbors": [4, 4], "batch_size": 16, "options": options, **how}
    return sum(batch.num_nodes for batch in DistNeighborLoader(data, **how))


for wrong in ([4, -2], [4, 1.5], [True, 4], "44", [-7]):
    refused("loader", "num_neighbors|fan-out", num_neighbors=wrong)
for wrong in (0, -1, 1.5):
    refused("loader", "batch_size", batch_size=wrong)
refused("loader", "input_nodes|240", input_nodes=[0, 240])
differs("num_neighbors", lambda: [4, 4], lambda: [4, 3], "loader")
differs("batch_size", lambda: 16, lambda: 8, "loader")
differs("batch_size", lambda: 16, lambda: 8, "replicated loader")
differs("seed", lambda: 0, lambda: 1, "loader")
differs("replace", lambda: False, lambda: True, "loader")


@case()
def two_meshes_in_a_layer():
    import torch

    from pyg_distcomm import nn

    _, one = shared_out()
    _, two = shared_out(method="block")
    model = net(nn.GCNConv).eval()
    found = model(one.x, two.edge_index).full_tensor()
    torch.testing.assert_close(found, model(one.x, one.edge_index).full_tensor())


@case(says="closed")
def a_mesh_that_was_closed():
    mesh, data = shared_out()
    mesh.close()
    data.x.sum()


@case()
def a_second_mesh():
    _mesh, data = shared_out()
    first = float(data.x.sum())
    _, again = shared_out()
    assert float(again.x.sum()) == first == float(data.x.sum())
    return first


@case(says="thread")
def training_from_two_threads():
    from pyg_distcomm import nn

    mesh, data = shared_out()
    errors = []

    def work():
        try:
            train(mesh, net(nn.GCNConv), data)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# Loaders ------------------------------------------------------------------------------


@case(says=rf"{LATE}|stop|lost another rank|left")
def one_rank_breaks_off_its_loader():
    import torch

    from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

    _mesh, data = shared_out()
    loader = DistNeighborLoader(
        data, [4, 4], batch_size=8, options=LoaderOptions(seed=0, bulk_size=1)
    )
    for number, batch in enumerate(loader):
        if me() == 1 and number == 1:
            break
        assert torch.isfinite(batch.x).all()
    data.x.sum()
    time.sleep(2 * TIMEOUT)
    data.x.sum()


@case(says=rf"{LATE}|lost another rank|left")
def one_rank_builds_a_loader():
    from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

    _mesh, data = shared_out()
    if me() == 0:
        next(
            iter(
                DistNeighborLoader(
                    data, [4, 4], batch_size=8, options=LoaderOptions(seed=0)
                )
            )
        )
    else:
        time.sleep(2 * TIMEOUT)
        data.x.sum()


@case()
def ranks_have_unlike_many_seeds():
    from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

    _mesh, data = shared_out()
    seeds = list(range(40 if me() else 3))
    loader = DistNeighborLoader(
        data, [4, 4], input_nodes=seeds, batch_size=4, options=LoaderOptions(seed=0)
    )
    return len(list(loader)) > 0


@case()
def everybody_breaks():
    import pyg_distcomm as pdc
    from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

    mesh, data = shared_out()
    model = pdc.replicate(plain_net(), mesh)
    for batch in DistNeighborLoader(
        data, [4, 4], batch_size=8, options=LoaderOptions(seed=0)
    ):
        model(batch.x.float(), batch.edge_index).sum().backward()
        break
    return float(data.x.sum())


# Files --------------------------------------------------------------------------------


def saved(path, **how):
    import pyg_distcomm as pdc
    from pyg_distcomm import nn

    mesh, data = shared_out()
    model = net(nn.GCNConv)
    train(mesh, model, data, 1)
    pdc.save_checkpoint(path, mesh, model, **how)
    return mesh, model


@case(says="path|run0", files=())
def paths_differ():
    saved(f"run{me()}")


@case(
    says="save to another path: .* holds something other than a checkpoint",
    files=("run",),
)
def a_folder_of_someone_else():
    os.makedirs("run", exist_ok=True)
    with open("run/thesis.txt", "w") as file:
        file.write("years of work")
    with contextlib.suppress(Exception):
        saved("run")
        os._exit(9)
    assert os.path.exists("run/thesis.txt")
    saved("run")


@case(says="run", files=("run",))
def a_file_in_the_way():
    with open("run", "w") as file:
        file.write("notes")
    saved("run")


@case(says="nowhere", files=())
def a_checkpoint_that_is_not_there():
    import pyg_distcomm as pdc
    from pyg_distcomm import nn

    pdc.load_checkpoint("nowhere", started(), net(nn.GCNConv))


@case(says="shape|size|match", files=("run",))
def a_checkpoint_of_another_model():
    import pyg_distcomm as pdc
    from pyg_distcomm import nn

    mesh, _ = saved("run")
    pdc.load_checkpoint("run", mesh, net(nn.GCNConv, 32))


@case(says=rf"{LATE}|lost another rank", files=())
def one_rank_saves():
    import pyg_distcomm as pdc
    from pyg_distcomm import nn

    mesh, data = shared_out()
    model = net(nn.GCNConv)
    train(mesh, model, data, 1)
    if me() == 0:
        pdc.save_checkpoint("run", mesh, model)
    time.sleep(2 * TIMEOUT)
    data.x.sum()


OWN_TRACES = tuple(f"rank{rank}.run.json" for rank in range(4))


@case(says=rf"{LATE}|lost another rank", files=OWN_TRACES)
def one_rank_traces():
    import pyg_distcomm as pdc

    mesh, data = shared_out()
    if me() == 0:
        with pdc.trace("run.json", mesh):
            data.x.sum()
    else:
        data.x.sum()
        time.sleep(2 * TIMEOUT)
        data.x.sum()


@case(says="in the block", files=OWN_TRACES)
def an_error_in_a_trace_on_all_ranks():
    import pyg_distcomm as pdc

    mesh, data = shared_out()
    with pdc.trace("run.json", mesh):
        data.x.sum()
        raise KeyError("in the block")


@case(says="in the block", files=OWN_TRACES, ranks=4)
def an_error_in_a_trace_on_one_rank():
    import pyg_distcomm as pdc
    from pyg_distcomm import nn

    mesh, data = shared_out()
    model = net(nn.GATConv)
    with pdc.trace("run.json", mesh):
        model(data.x, data.edge_index).sum()
        if me() == 1:
            raise KeyError("in the block")
        train(mesh, model, data)


@case(says="same path: it is run0.json on rank 0, and run1.json on rank 1")
def traces_to_paths_that_differ():
    import pyg_distcomm as pdc

    mesh, data = shared_out()
    with pdc.trace(f"run{me()}.json", mesh):
        data.x.sum()


@case(says="link must be", files=("p0", "p1"))
def a_link_by_name_for_a_folder():
    import torch

    import pyg_distcomm as pdc
    from pyg_distcomm.partition.folder import write_folder

    mesh, data = started(), graph()
    parts = pdc.Partition.from_owner(torch.arange(data.num_nodes) % 2, 2)
    write_folder(f"p{me()}", data, parts)
    pdc.load_partition(f"p{me()}", mesh, link="fast")


@case(says="link")
def a_link_by_name_for_converted_layers():
    import pyg_distcomm as pdc
    from pyg_distcomm import nn

    shared_out()
    pdc.nn.convert(net(nn.GCNConv), link="fast")


# Ranks that do not come, and signals ------------------------------------------------


@case(says="process groups of this mesh were ended")
def groups_are_destroyed_before_a_call():
    import torch

    _mesh, data = shared_out()
    data.x.sum()
    torch.distributed.destroy_process_group()
    data.x.mean()


@case(says="process groups of this mesh were ended")
def groups_are_destroyed_before_a_loader():
    import torch

    from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions

    _mesh, data = shared_out()
    torch.distributed.destroy_process_group()
    next(
        iter(
            DistNeighborLoader(
                data, [4, 4], batch_size=8, options=LoaderOptions(seed=0)
            )
        )
    )


@case()
def a_run_joins_anew_after_its_groups_are_destroyed():
    import torch

    mesh, data = shared_out()
    data.x.sum()
    torch.distributed.destroy_process_group()
    mesh.close()
    _mesh, data = shared_out()
    return float(data.x.sum())


@case(says="giving up|rank 1 had come to its end, or called sys.exit")
def one_rank_gives_up():
    import sys

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


@case(codes=(143, 143), files=("last",))
def one_rank_is_told_to_end():
    preempted_by(signal.SIGTERM, 1)


@case(codes=(130, 130), files=("last",))
def all_ranks_are_interrupted():
    preempted_by(signal.SIGINT, 0, 1)


def preempted_by(number, *ranks):
    import pyg_distcomm as pdc
    from pyg_distcomm import nn

    mesh, data = shared_out()
    model = net(nn.GCNConv)
    check = pdc.on_preempt(lambda: pdc.save_checkpoint("last", mesh, model))

    def each(epoch, optimizer):
        if epoch == 2 and me() in ranks:
            os.kill(os.getpid(), number)
        check()

    train(mesh, model, data, epochs=20, each=each)


@case(says="main thread", codes=(1, 1))
def on_preempt_in_a_thread():
    import pyg_distcomm as pdc

    mesh, errors = started(), []

    def work():
        try:
            pdc.on_preempt(print, mesh)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise errors[0]


@case()
def a_script_ends_the_process_group_itself():
    import torch.distributed as dist

    mesh, data = shared_out()
    found = float(data.x.sum())
    del data
    mesh.close()
    dist.destroy_process_group()
    return found


def differing_links(own):
    import pyg_distcomm as pdc
    from pyg_distcomm import nn

    mesh, data = shared_out()
    link = pdc.Sylvie() if me() else None
    if own:
        nn.DistSAGEConv(8, 3, link=link)(data.x.float(), data.edge_index)
    data.edge_index = data.edge_index.with_link(link)
    train(mesh, net(nn.GCNConv), data)


@case(says="same link.*on rank 0, and.*on rank 1")
def links_of_edges_differ():
    differing_links(own=False)


@case(says="same link.*on rank 0, and.*on rank 1")
def links_of_layers_differ():
    differing_links(own=True)


@case(says="holds nan")
def features_are_not_numbers():
    import pyg_distcomm as pdc
    from pyg_distcomm import nn

    data = graph()
    data.x[3, 2] = float("nan")
    mesh, data = shared_out(data=data)
    link = pdc.Sylvie(exact_last=False)
    data.edge_index = data.edge_index.with_link(link)
    train(mesh, net(nn.GCNConv), data, step=link.step)


@case(says="BatchNorm|batch norm")
def batch_norm_in_a_pipeline():
    staged(stack=lambda layers, torch: [layers[0], torch.nn.BatchNorm1d(8), layers[1]])


@case(says="layers|stages")
def more_stages_than_layers():
    staged(stack=lambda layers, torch: layers[:1])


@case(says="chunks")
def chunks_differ():
    staged(chunks=2 + me())


@case(says="chunks")
def no_chunks():
    staged(chunks=0)


def staged(stack=None, chunks=4):
    import torch
    import torch.nn.functional as F
    from torch_geometric.nn import GCNConv

    import pyg_distcomm as pdc

    mesh, data = shared_out(mesh=started(stages=2))
    layers = [GCNConv(8, 8).double(), GCNConv(8, 3).double()]
    layers = layers if stack is None else stack(layers, torch)
    pipe = pdc.Pipeline(layers, mesh, chunks=chunks)
    pipe.train_step(data, lambda out, data: F.cross_entropy(out, data.y))
