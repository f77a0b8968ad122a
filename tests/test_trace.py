"""A trace holds what the ledger counts, shows what overlaps, and opens in viewers."""

import gzip
import importlib
import json
from collections import Counter

import numpy as np
import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.loader import DistNeighborLoader, LoaderOptions
from pyg_distcomm.nn import GCN, DistGCNConv
from pyg_distcomm.process import PROCESS

pytestmark = pytest.mark.usefixtures("place")


def read(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        found = json.load(file, parse_constant=pytest.fail)
    check_format(found)
    return found


def check_format(trace):
    """The rules of the trace event format, as viewers hold to them."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names, spans, travels, last = {}, {}, {}, {}
    for event in trace["traceEvents"]:
        lane = event["pid"], event["tid"]
        assert isinstance(event["pid"], int)
        assert event["tid"] > 0
        if event["ph"] == "M":
            where = (event["name"], *lane)
            assert names.setdefault(where, event["args"]) is event["args"]
            continue
        assert event["ts"] >= last.get(event["pid"], 0)  # in order, on each rank
        last[event["pid"]] = event["ts"]
        if event["ph"] == "X":
            spans.setdefault(lane, []).append(event)
        else:
            travels.setdefault((event["cat"], event["id"]), []).append(event)
    assert last.keys() <= {pid for name, pid, _ in names if name == "process_name"}
    # Perfetto names threads by id alone
    assert len({tid for _, tid in spans}) == len(spans)
    assert all(("thread_name", *lane) in names for lane in spans)
    for pair in travels.values():
        assert "".join(event["ph"] for event in pair) in ("be", "b")
        assert len({(event["pid"], event["name"]) for event in pair}) == 1
    for lane in spans.values():
        check_nesting(lane)


def check_nesting(lane):
    ends = []
    for event in lane:
        begin = round(event["ts"] * 1000)
        end = begin + round(event["dur"] * 1000)
        while ends and ends[-1] <= begin:
            ends.pop()
        assert not ends or begin <= end <= ends[-1], f"{event} sticks out"
        ends.append(end)


def of(trace, rank, ph, cat=None):
    return [
        event
        for event in trace["traceEvents"]
        if event["pid"] == rank
        and event["ph"] == ph
        and cat in (None, event.get("cat"))
    ]


def assert_adds_up(trace, rank, ledger):
    """The events of a rank are those that its ledger has counted."""
    counts = {}
    for event in of(trace, rank, "b"):
        args = event["args"]
        row = counts.setdefault((args["op"], args["axis"]), Counter())
        row.update({name: args[name] for name in ("words", "bytes", "sent_bytes")})
        row.update(calls=1, messages=args["messages"])
    assert set(counts) == set(ledger)
    for key, entry in ledger.items():
        for name in ("calls", "words", "bytes", "sent_bytes", "messages"):
            assert counts[key][name] == getattr(entry, name), (key, name)


@tiers.parametrize("size", [1, 2, 3, 4], [1, 2])
@worlds.on()
def test_events_add_up_to_the_ledger_of_each_rank(size, tmp_path):
    path = tmp_path / ("run.json.gz" if size == 3 else "run.json")
    mesh = worlds.mesh(grid=(2, 1, 2) if size == 4 else (size, 1, 1))
    data = GRAPHS["undirected"]()
    data.y = data.y.long() % 3
    share = pdc.partition(data, mesh, "random")
    torch.manual_seed(0)
    model = pdc.replicate(GCN(7, 4, 2, 3).double(), mesh)
    mesh.ledger.reset()
    with pdc.trace(path, mesh) as run:
        for epoch in range(2):
            with run.span("epoch", number=epoch):
                out = model(share.x, share.edge_index)
                F.cross_entropy(out, share.y).backward()
        with run.span("idle"):
            pass
    assert PROCESS.recorder is None
    ledger, trace = mesh.ledger.snapshot(), read(path)
    collectives.barrier(mesh.world)
    assert trace["otherData"]["ranks"] == size
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert_adds_up(trace, mesh.rank, ledger)
    names = Counter(event["name"] for event in of(trace, mesh.rank, "X"))
    assert names["epoch"] == 2
    assert names["idle"] == 1
    assert of(trace, mesh.rank, "X", "product")


ABOUT = {
    "number": (np.int64(3), 3),
    "loss": (torch.tensor(0.5), 0.5),
    "nan": (float("nan"), "nan"),
    "rate": (np.float32("inf"), "inf"),
    "x": (torch.ones(2, 3), "Tensor [2, 3]"),
    "sizes": ((1, {"a": {2}}), [1, {"a": "{2}"}]),
    "kind": ("of a span", "of a span"),
    "begin": (None, None),
}


@worlds.on(2)
def test_what_is_no_json_is_written_in_words(tmp_path):
    mesh, path = worlds.mesh(), tmp_path / "run.json"
    given = {name: value for name, (value, _) in ABOUT.items()}
    with pdc.trace(path, mesh) as run, run.span("odd", **given):
        pass
    with run.span("odd", begin=1, kind=2):
        pass  # nobody records
    (span,) = [s for s in of(read(path), mesh.rank, "X") if s["name"] == "odd"]
    assert span["args"] == {name: want for name, (_, want) in ABOUT.items()}
    module = importlib.import_module("pyg_distcomm.comm.trace")
    with pytest.MonkeyPatch.context() as patch:  # rank 0 alone writes
        patch.setattr(module, "_write", lambda *_: 1 / 0)
        failed = pytest.raises(OSError, match=r"cannot be written: division by zero")
        with failed, pdc.trace(path, mesh):
            pass


@worlds.on(2)
def test_stages_of_a_loader_have_lanes_of_their_own(tmp_path):
    mesh = worlds.mesh()
    share = pdc.partition(GRAPHS["undirected"](), mesh, "random")
    options = LoaderOptions(bulk_size=2, seed=0)
    loader = DistNeighborLoader(share, [3, 2], batch_size=4, options=options)
    before = mesh.ledger.bytes()
    with pdc.trace(tmp_path / "run.json", mesh):
        for batch in loader:
            batch.x.sum()
        loader._end_epoch()
    moved, trace = mesh.ledger.bytes() - before, read(tmp_path / "run.json")
    sent, spans = of(trace, mesh.rank, "b"), of(trace, mesh.rank, "X", "loader")
    assert sum(e["args"]["bytes"] for e in sent) == moved > 0
    lanes = {}
    for event in spans:
        lanes.setdefault(event["name"], set()).add(event["tid"])
    assert set(lanes) == {"sample", "fetch", "assemble", "wait", "train"}
    assert lanes["wait"] == lanes["train"]
    assert not lanes["sample"] & (lanes["fetch"] | lanes["train"])
    assert not lanes["fetch"] & lanes["train"]
    fetched = [e["args"].get("bytes", 0) for e in spans if e["name"] == "fetch"]
    assert sum(fetched) == sum(
        e["args"]["bytes"]
        for e in sent
        if e["args"]["axis"].startswith("fetch:") and e["tid"] in lanes["fetch"]
    )


def divided(path, mesh):
    with pdc.trace(path, mesh):
        collectives.barrier(mesh.world)
        return 1 // 0


@pytest.mark.parametrize("size", [1, 2])
@worlds.on()
def test_misuse_raises_on_all_ranks_and_errors_of_a_script_harm_nothing(size, tmp_path):
    mesh = worlds.mesh(fresh=True)
    with pytest.raises(ZeroDivisionError):
        divided(tmp_path / "run.json", mesh)
    assert PROCESS.recorder is None
    for wrong, told in (
        (
            tmp_path / "none" / "run.json",
            "cannot be written: No such file or directory; t",
        ),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(ValueError, match=told):
            pdc.trace(wrong, mesh).__enter__()
    with pdc.trace(tmp_path / "run.json", mesh):  # the mesh is as good as before
        with pytest.raises(ValueError, match="under way"):
            pdc.trace(tmp_path / "other.json", mesh).__enter__()
        collectives.barrier(mesh.world)
    assert PROCESS.recorder is None
    assert not (tmp_path / "other.json").exists()
    if mesh.rank == 0:
        assert "failed" not in read(tmp_path / "run.json")["otherData"]


@worlds.on(2)
def test_torchs_profiler_shows_exchanges_products_and_codecs_by_name(tmp_path):
    mesh, data = worlds.mesh(), GRAPHS["directed"]()
    share = pdc.partition(data, mesh, "random", link=pdc.Sylvie(bits=1, late=0))
    conv, options = DistGCNConv(7, 4).double(), LoaderOptions(seed=0)
    loader = DistNeighborLoader(data, [3, 3], batch_size=8, options=options)
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=every
    ) as found:
        conv(share.x, share.edge_index).sum().backward()
        list(loader)  # which samples in a thread of its own
    path = tmp_path / f"{mesh.rank}.json"
    found.export_chrome_trace(str(path))
    names = {e.get("name", "") for e in json.loads(path.read_text())["traceEvents"]}
    ours = {name for name in names if name.startswith("pyg_distcomm: ")}
    parts = ("halo over row", "wait for", "product", "encode ", "decode ", "sample")
    for part in parts:
        assert any(part in name for name in ours), (part, ours)
