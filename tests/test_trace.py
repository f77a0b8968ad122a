"""A trace holds what the ledger counts, shows what overlaps, and opens in viewers."""

from __future__ import annotations

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
from pyg_distcomm.nn import DistGCNConv
from pyg_distcomm.process import PROCESS

pytestmark = pytest.mark.usefixtures("place")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList([DistGCNConv(7, 4), DistGCNConv(4, 3)])

    def forward(self, x, edge_index):
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


def read(path):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        found = json.load(file, parse_constant=pytest.fail)
    check_format(found)
    return found


def check_format(trace):
    """The rules of the trace event format, as viewers hold to them."""
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names, spans, travels = {}, {}, {}
    last = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["tid"] > 0
        if event["ph"] == "M":
            where = (event["name"], event["pid"], event["tid"])
            assert names.setdefault(where, event["args"]) is event["args"]
            continue
        assert event["ts"] >= 0
        assert event["ts"] >= last.get(event["pid"], 0)  # in order, on each rank
        last[event["pid"]] = event["ts"]
        lane = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spans.setdefault(lane, []).append(event)
        else:
            assert event["ph"] in "be"
            travels.setdefault((event["cat"], event["id"]), []).append(event)
    for pid in {event["pid"] for event in events}:
        assert any(k[:2] == ("process_name", pid) for k in names)
    owner = {}
    for pid, tid in spans:
        assert ("thread_name", pid, tid) in names
        assert owner.setdefault(tid, pid) == pid  # Perfetto names threads by id alone
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
        assert not ends or end <= ends[-1], f"{event} sticks out"
        ends.append(end)


def of(trace, rank, ph, cat=None):
    return [
        event
        for event in trace["traceEvents"]
        if event["pid"] == rank
        and event["ph"] == ph
        and cat in (None, event.get("cat"))
    ]


def trained(path, grid):
    mesh = worlds.mesh(grid=grid)
    data = GRAPHS["undirected"]()
    data.y = data.y.long() % 3
    share = pdc.partition(data, mesh, "random")
    torch.manual_seed(0)
    model = pdc.replicate(Net().double(), mesh)
    mesh.ledger.reset()
    with pdc.trace(path, mesh) as run:
        for epoch in range(2):
            with run.span("epoch", number=epoch):
                out = model(share.x, share.edge_index)
                F.cross_entropy(out, share.y).backward()
        with run.span("idle"):
            pass
    assert PROCESS.recorder is None
    return mesh.ledger.snapshot()


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


@tiers.parametrize("size", [1, 2, 3, 4], [1, 4])
def test_events_add_up_to_the_ledger_of_each_rank(size, tmp_path):
    path = tmp_path / ("run.json.gz" if size == 3 else "run.json")
    grid = (2, 1, 2) if size == 4 else (size, 1, 1)
    ledgers = worlds.run(trained, size, path, grid)
    trace = read(path)
    about = trace["otherData"]
    assert about["ranks"] == size
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    for rank, ledger in enumerate(ledgers):
        assert_adds_up(trace, rank, ledger)
        names = Counter(event["name"] for event in of(trace, rank, "X"))
        assert names["epoch"] == 2
        assert names["idle"] == 1
        assert of(trace, rank, "X", "product")


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


def odd_spans(path):
    given = {name: value for name, (value, _) in ABOUT.items()}
    with pdc.trace(path, worlds.mesh()) as run, run.span("odd", **given):
        pass
    with run.span("odd", begin=1, kind=2):
        pass  # nobody records
    module = importlib.import_module("pyg_distcomm.comm.trace")
    with pytest.MonkeyPatch.context() as patch:  # rank 0 alone writes
        patch.setattr(module, "_write", lambda *_: 1 / 0)
        failed = pytest.raises(OSError, match=r"cannot be written: division by zero")
        with failed, pdc.trace(path, worlds.mesh()):
            pass


def test_what_is_no_json_is_written_in_words(tmp_path):
    worlds.run(odd_spans, 2, tmp_path / "run.json")
    trace = read(tmp_path / "run.json")
    for rank in range(2):
        (span,) = [s for s in of(trace, rank, "X") if s["name"] == "odd"]
        assert span["args"] == {name: want for name, (_, want) in ABOUT.items()}


def loaded(path):
    mesh = worlds.mesh()
    data = GRAPHS["undirected"]()
    share = pdc.partition(data, mesh, "random")
    loader = DistNeighborLoader(
        share,
        [3, 2],
        input_nodes=None,
        batch_size=4,
        options=LoaderOptions(bulk_size=2, seed=0),
    )
    before = mesh.ledger.bytes()
    with pdc.trace(path, mesh):
        for batch in loader:
            batch.x.sum()
        loader._end_epoch()
    return mesh.ledger.bytes() - before, mesh.ledger.snapshot()


def test_stages_of_a_loader_have_lanes_of_their_own(tmp_path):
    found = worlds.run(loaded, 2, tmp_path / "run.json")
    trace = read(tmp_path / "run.json")
    for rank, (moved, _) in enumerate(found):
        assert sum(e["args"]["bytes"] for e in of(trace, rank, "b")) == moved > 0
        lanes = {}
        for event in of(trace, rank, "X", "loader"):
            lanes.setdefault(event["name"], set()).add(event["tid"])
        assert set(lanes) == {"sample", "fetch", "assemble", "wait", "train"}
        assert lanes["wait"] == lanes["train"]
        assert not lanes["sample"] & (lanes["fetch"] | lanes["train"])
        assert not lanes["fetch"] & lanes["train"]
        fetched = [e for e in of(trace, rank, "X", "loader") if e["name"] == "fetch"]
        assert sum(e["args"].get("bytes", 0) for e in fetched) == sum(
            e["args"]["bytes"]
            for e in of(trace, rank, "b")
            if e["args"]["axis"].startswith("fetch:") and e["tid"] in lanes["fetch"]
        )


def divided(path, mesh):
    with pdc.trace(path, mesh):
        collectives.barrier(mesh.world)
        return 1 // 0


def failing_alike(path):
    mesh = worlds.mesh(fresh=True)
    with pytest.raises(ZeroDivisionError):
        divided(path, mesh)
    assert PROCESS.recorder is None
    with pdc.trace(path, mesh):  # the mesh is as good as before
        collectives.barrier(mesh.world)
    return True


@pytest.mark.parametrize("size", [1, 3])
def test_an_error_that_a_script_handles_harms_nothing(size, tmp_path):
    assert all(worlds.run(failing_alike, size, tmp_path / "run.json"))
    assert "failed" not in read(tmp_path / "run.json")["otherData"]


def misused(folder):
    mesh = worlds.mesh()
    with pytest.raises(
        ValueError, match="cannot be written: No such file or directory; trace"
    ):
        pdc.trace(folder / "none" / "run.json", mesh).__enter__()
    with pytest.raises(ValueError, match="is a folder"):
        pdc.trace(folder, mesh).__enter__()
    with pdc.trace(folder / "run.json", mesh):
        with pytest.raises(ValueError, match="under way"):
            pdc.trace(folder / "other.json", mesh).__enter__()
        collectives.barrier(mesh.world)
    return PROCESS.recorder is None


@pytest.mark.parametrize("size", [1, 2])
def test_misuse_raises_on_all_ranks(size, tmp_path):
    assert all(worlds.run(misused, size, tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def _profiled(path):
    mesh = worlds.mesh()
    share = pdc.partition(
        GRAPHS["directed"](), mesh, "random", link=pdc.Sylvie(bits=1, late=0)
    )
    conv = DistGCNConv(7, 4).double()
    loader = DistNeighborLoader(
        GRAPHS["directed"](), [3, 3], batch_size=8, options=LoaderOptions(seed=0)
    )
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=every
    ) as found:
        conv(share.x, share.edge_index).sum().backward()
        list(loader)  # which samples in a thread of its own
    if mesh.rank == 0:
        found.export_chrome_trace(path)
    collectives.barrier(mesh.world)


def test_torchs_profiler_shows_exchanges_products_and_codecs_by_name(tmp_path):
    worlds.run(_profiled, 2, str(tmp_path / "run.json"))
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    names = {event["name"] for event in events if "name" in event}
    ours = {name for name in names if name.startswith("pyg_distcomm: ")}
    parts = ("halo over row", "wait for", "product", "encode ", "decode ", "sample")
    for part in parts:
        assert any(part in name for name in ours), (part, ours)
