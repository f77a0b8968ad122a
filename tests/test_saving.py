"""Saves lose nothing: killed at any step, over another's files, on a disk that is full."""

import contextlib
import ctypes
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
import torch
import worlds
from torch_geometric.data import Data
from torch_geometric.nn import GCN

import pyg_distcomm as pdc
from pyg_distcomm import checkpoint as checkpoint_folder
from pyg_distcomm.checkpoint import MARK
from pyg_distcomm.comm import collectives
from pyg_distcomm.partition import atomic
from pyg_distcomm.partition.atomic import sha256
from pyg_distcomm.partition.cutters import cut
from pyg_distcomm.partition.folder import verify_folder, write_folder
from pyg_distcomm.partition.layout import folder_meta

pytestmark = pytest.mark.usefixtures("place")

STATES = [f"state.{part}.pt" for part in ("model", "mesh", "extra")]
STEPS = "open os.rename os.mkdir os.remove os.rmdir shutil.rmtree os.listdir".split()


def model_of(value):
    net = torch.nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.fill_(float(value))
    return net


def save(path, epoch, **options):
    pdc.save_checkpoint(path, pdc.init(), model_of(epoch), epoch=epoch, **options)


def load(path):
    """The epoch of what is loaded, all of which is of that epoch."""
    net = model_of(-1)
    epoch = pdc.load_checkpoint(path, pdc.init(), net, epoch=0)["epoch"]
    assert bool((net.weight == epoch).all())
    return epoch


def killed_at(step, path, epoch, write):
    """Saves in a process that ends at a step of its own on the disk; whether it did."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = [step]

    def count(event, args):
        if event in STEPS and args and path.parent.name in str(args[0]):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        write(path, epoch)
    finally:
        os._exit(0)


def save_pipeline(path, epoch):
    mesh = pdc.init()
    pipe = pdc.Pipeline([model_of(epoch)], mesh, chunks=1)
    pipe.epoch = epoch
    pipe.save(path)


def load_pipeline(path):
    pipe = pdc.Pipeline([model_of(-1)], pdc.init(), chunks=1)
    pipe.load(path)
    (weight, _) = pipe.layers.parameters()
    assert torch.equal(weight, torch.full((2, 2), float(pipe.epoch)))
    return pipe.epoch


def write_parts(path, epoch):
    parts = cut(_graph().edge_index, 2000, epoch, "block")
    write_folder(path, _graph(), parts, force=True)


def read_parts(path):
    if not path.exists():
        with pytest.raises(ValueError, match="a killed writer left it at"):
            folder_meta(path)
        return 1
    assert verify_folder(path) == []
    return folder_meta(path)["num_parts"]


def campaign(folder, exchanged, kind):
    """Kills a save at each of its steps; what was there before, or it, is there after."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # one process, as any script
        del os.environ[name]
    path, steps = folder / "run", 0
    write, read = {
        "checkpoint": (save, load),
        "pipeline": (save_pipeline, load_pipeline),
        "parts": (write_parts, read_parts),
    }[kind]
    if not exchanged:
        atomic._EXCHANGE = -1  # as on a file system that can not
    before = Path(f"{folder}-before") / "run"
    before.parent.mkdir()
    write(before, 1)
    while True:
        for other in path.parent.iterdir():
            shutil.rmtree(other)
        shutil.copytree(before, path)
        if not killed_at(steps, path, 2, write):
            break
        assert read(path) in (1, 2)
        assert path.exists() or not exchanged
        write(path, 3)
        assert read(path) == 3
        assert [p.name for p in path.parent.iterdir()] == ["run"], steps
        steps += 1
    assert read(path) == 2
    return steps


@pytest.mark.place("cpu")
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which CUDA cannot")
@tiers.parametrize(
    ("exchanged", "kind"),
    itertools.product([True, False], ["checkpoint", "pipeline", "parts"]),
    [(False, "checkpoint")],
)
def test_a_save_killed_at_any_step_leaves_the_old_or_the_new_one(
    tmp_path, exchanged, kind
):
    (steps,) = worlds.anew(campaign, 1, tmp_path, exchanged, kind)
    assert steps > 8


def test_nothing_is_replaced_that_was_not_saved_here(tmp_path):
    save(tmp_path / "ckpt", 1)
    for name in ("results/thesis.txt", "file", "ckpt/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("years of work")
        with pytest.raises(ValueError, match="save to another path"):
            save(tmp_path / name.partition("/")[0], 2)
        assert (tmp_path / name).read_text() == "years of work"
    assert load(tmp_path / "ckpt") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt", "file", "results"]
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", 1)
    assert load(tmp_path / "empty") == 1


def test_what_can_not_be_read_back_as_data_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"extra holds a P.*Path"):
        pdc.save_checkpoint(
            tmp_path / "ckpt", pdc.init(), model_of(1), extra={"a": [Path()]}
        )
    with pytest.raises(TypeError, match="give each checkpoint to keep its own path"):
        pdc.save_checkpoint(tmp_path / "ckpt", pdc.init(), model_of(1), keep=3)
    assert not list(tmp_path.iterdir())


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL_PLACE"],)


def write_sums(path):
    """Lists the files of a checkpoint as they are now, as anybody who alters them can."""
    mark = json.loads((path / MARK).read_text())
    names = [file.name for file in path.iterdir() if file.name != MARK]
    mark["files"] = {name: sha256(path / name) for name in names}
    (path / MARK).write_text(json.dumps(mark))


def test_a_checkpoint_is_data(tmp_path, monkeypatch):
    path, place = tmp_path / "ckpt", tmp_path / "ran"
    monkeypatch.setenv("EVIL_PLACE", str(place))
    save(path, 1)
    file = tmp_path / "evil.pt"
    torch.save({"epoch": Evil()}, file)
    for name in ("state.model.pt", "state.mesh.pt", "state.extra.pt"):
        good = (path / name).read_bytes()
        for bad in (pickle.dumps(Evil()), file.read_bytes(), b""):
            (path / name).write_bytes(bad)
            write_sums(path)
            with pytest.raises(ValueError, match=f"cannot load checkpoint.*{name}"):
                load(path)
        for other in ({}, [], 5):
            torch.save(other, path / name)
            write_sums(path)
            with pytest.raises(ValueError, match="cannot load checkpoint"):
                load(path)
        (path / name).write_bytes(good)
        write_sums(path)
        assert load(path) == 1
    assert not place.exists()


def test_a_checkpoint_holds_files_only_and_lists_them(tmp_path):
    path = tmp_path / "ckpt"
    for name in ("state.model.pt", "state.extra.pt", MARK):
        save(path, 1)
        good = (path / name).read_bytes()
        (path / name).unlink()
        for make in (os.mkfifo, lambda at: os.symlink("/dev/zero", at)):
            make(path / name)
            with pytest.raises(ValueError, match=f"{name}: not a file"):
                load(path)
            (path / name).unlink()
        with pytest.raises(ValueError, match=f"{name}: missing"):
            load(path)
        (path / name).write_bytes(good)
    for text in ("{}", "[]", "{", "[" * 100_000, '{"files": 5}'):
        (path / MARK).write_text(text)
        with pytest.raises(ValueError, match=r"\.pyg_distcomm\.json"):
            load(path)


def flips(path, files, seed=0):
    """Flips a bit in each of some files of a folder, at many places; yields its name."""
    draw = random.Random(seed)
    for name in files:
        good = (path / name).read_bytes()
        for place in draw.sample(range(len(good)), 12):
            bad = bytearray(good)
            bad[place] ^= 1 << draw.randrange(8)
            (path / name).write_bytes(bad)
            yield name
        (path / name).write_bytes(good)


def test_a_flipped_bit_of_a_checkpoint_is_found(tmp_path):
    path = tmp_path / "ckpt"
    save(path, 1, link=pdc.Sylvie(1))
    names = sorted(file.name for file in path.iterdir())
    assert names == sorted([*STATES, "link.0.pt", MARK])
    for name in flips(path, [n for n in names if n != MARK]):
        with pytest.raises(ValueError, match=f"{name}: altered since it was saved"):
            pdc.load_checkpoint(
                path, pdc.init(), model_of(0), link=pdc.Sylvie(1), epoch=0
            )
    for _ in flips(path, [MARK]):
        with contextlib.suppress(ValueError):
            assert load(path) == 1
    assert load(path) == 1


def test_a_saved_pipeline_misses_nothing_and_a_flipped_bit_is_found(tmp_path):
    pipe = pdc.Pipeline([torch.nn.Linear(16, 2)], pdc.init(), chunks=2)
    share, folder = pdc.partition(_graph(), pipe.mesh), tmp_path / "pipe"
    pipe.train_step(share, lambda out, _: out.sum())
    pipe.save(folder)
    for name in flips(folder, ["model.pt", "rows0-stage0.pt"]):
        with pytest.raises(ValueError, match=f"{name}: altered since it was saved"):
            pipe.load(folder)
    pipe.load(folder)
    whole = torch.load(folder / "model.pt", weights_only=True)
    rows = torch.load(folder / "rows0-stage0.pt", weights_only=True)
    (folder / "rows0-stage0.pt").unlink()
    with pytest.raises(ValueError, match=r"rows0-stage0\.pt: missing"):
        pipe.load(folder)
    wrong = [([1], rows), (dict(whole, epoch="x"), rows), (dict(whole, link=3), rows)]
    wrong += [({k: v for k, v in whole.items() if k != n}, rows) for n in whole]
    wrong += [(whole, {}), (whole, [rows]), (whole, dict(rows, sites={(0, 0): 1}))]
    for model, part in wrong:
        torch.save(model, folder / "model.pt")
        torch.save(part, folder / "rows0-stage0.pt")
        write_sums(folder)
        epoch = pipe.epoch
        with pytest.raises(ValueError, match=r"cannot load the pipeline at .*\.pt"):
            pipe.load(folder)
        assert pipe.epoch == epoch


@worlds.on(2)
def test_ranks_that_save_to_different_places_are_told(tmp_path):
    mesh = worlds.mesh()
    with pytest.raises(ValueError, match="all ranks the same path: it is"):
        pdc.save_checkpoint(tmp_path / f"ckpt{mesh.rank}", mesh, model_of(1))
    assert not list(tmp_path.iterdir())


def _apart(folder):
    """Saves where rank 1 sees a disk of its own, as hosts without a shared one do."""
    mesh = pdc.init(timeout=60)
    if mesh.rank == 1:
        unshared = ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
        mounts = (["--make-rprivate", "/"], ["-t", "tmpfs", "none", folder])
        unshared = unshared and not any(
            subprocess.run(["mount", *mount], check=False).returncode
            for mount in mounts
        )
    else:
        unshared = True
    if not all(collectives.all_gather_object(unshared, mesh.world)):
        return None
    checkpoint_folder._SHARED_DISK_WAIT = 1.0
    try:
        pdc.save_checkpoint(f"{folder}/run", mesh, torch.nn.Linear(2, 2))
    except ValueError as error:
        return str(error), os.listdir(folder)
    return "saved", []


def test_hosts_without_a_shared_disk_are_told_when_they_save(tmp_path):
    found = pdc.launch(_apart, 2, str(tmp_path), timeout=60)
    if None in found:
        pytest.skip("mount namespaces need root")
    for text, left in found:
        assert "rank 1: save to a disk that all hosts share" in text
        assert not left
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def full_after(size):
    """Lets no file of this process grow beyond some bytes, as if the disk were full."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@worlds.on(2)
def test_a_disk_without_room_is_named_and_what_was_there_stays(tmp_path):
    mesh, path, net = worlds.mesh(), tmp_path / "ckpt", model_of(0)
    pdc.save_checkpoint(path, mesh, model_of(1), epoch=1)
    full = pytest.raises(ValueError, match=r"make room.*/ckpt: File too large$")
    with full_after(2000), full:
        pdc.save_checkpoint(path, mesh, torch.nn.Linear(50, 50), epoch=2)
    assert pdc.load_checkpoint(path, mesh, net, epoch=0) == {"epoch": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


@pytest.fixture
def disk(tmp_path, where):
    """A place on a disk of 64 KiB, that can be written or not, or below a file."""
    home = tmp_path / "disk"
    if where == "below a file":
        home.write_text("mine")
        yield home / "out"
        return
    home.mkdir()
    options = "size=64k" + ",ro" * (where == "read-only")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(home)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk takes root")
    yield home / "out"
    subprocess.run(["umount", "-l", home], check=True)


def _graph():
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 2000, (2, 9000), generator=draw)
    return Data(x=torch.rand(2000, 16, generator=draw), edge_index=edges)


def _long_link(folder):
    mesh, link = worlds.mesh(), pdc.PipeGCN()
    share = pdc.partition(_graph(), mesh, link=link)
    net = pdc.convert(GCN(16, 64, 3, 2))
    for _ in range(2):
        net(share.x, share.edge_index).sum().backward()
        link.step()
    pdc.save_checkpoint(folder, mesh, torch.nn.Linear(2, 2), link=link)


def _long_trace(file):
    with pdc.trace(file, worlds.mesh()) as run:
        (Path(file).parent / "rest").write_bytes(bytes(60000))
        for number in range(4000):
            with run.span(f"{number * 7919 % 10007} {number}"):
                pass


def _wide():
    return torch.nn.Linear(200, 200)


WRITERS = {
    "checkpoint": lambda p: pdc.save_checkpoint(p, worlds.mesh(), _wide()),
    "link": _long_link,
    "pipeline": lambda p: pdc.Pipeline([_wide()], worlds.mesh(), chunks=1).save(p),
    "trace": _long_trace,
    "parts": lambda p: write_parts(p, 2),
}


@tiers.parametrize("where", ["full", "read-only", "below a file"], ["full"])
@tiers.parametrize("size", [1, 2], [2])
@worlds.on()
def test_a_disk_that_takes_nothing_is_named_in_one_line(size, disk, where):
    why = {"full": "No space left", "read-only": "Read-only", "below a file": ""}[where]
    mesh = worlds.mesh()
    for name, write in WRITERS.items():
        # a link on one rank keeps no rows, and one process writes parts
        if (name != "link" or size > 1) and (name != "parts" or mesh.rank == 0):
            with pytest.raises((ValueError, OSError)) as error:
                write(f"{disk}-{name}")
            text = str(error.value)
            assert "\n" not in text, (name, text)
            assert str(disk.parent) in text, (name, text)
            assert why in text, (name, text)
            assert "writing-" not in text, (name, text)
        collectives.all_gather_object(0, mesh.world)
    if where == "full":
        files = [p.name for p in disk.parent.rglob("*") if p.is_file()]
        assert files == ["rest"]
        assert not [p for p in disk.parent.rglob(".*")]
