"""The files for clusters, read by the parsers of what will run them."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from pyg_distcomm.cli import _parser

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "cluster"
GUIDE = ROOT / "docs" / "how-to" / "clusters.md"


def commands(text, first):
    """The commands of a script that begin with a word, as lists of words."""
    joined = text.replace("\\\n", " ")
    found = re.findall(rf"^(?:exec |\s*)({first} .*)$", joined, re.M)
    return [shlex.split(line) for line in found]


def check_elastic(words):
    """Lets examples/elastic.py read its flags."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "elastic.py", *words, "--help"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    known = set(re.findall(r"--[\w-]+", done.stdout))
    assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known


def test_torchrun_takes_its_flags():
    texts = [(FOLDER / "torchrun.sh").read_text(), GUIDE.read_text()]
    found = [words for text in texts for words in commands(text, "torchrun")]
    assert len(found) >= 3
    for words in found:
        flags = [re.sub(r"\$\{(\w+):-(.*?)\}", r"\2", word) for word in words[1:]]
        read = get_args_parser().parse_args(flags)
        assert read.training_script.endswith("elastic.py")
        assert int(read.max_restarts) >= 3
        known = {"join_timeout", "last_call_timeout"}
        given = [one.partition("=")[0] for one in read.rdzv_conf.split(",") if one]
        assert set(given) <= known


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_bash(name):
    path = FOLDER / name
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)
    if name.endswith(".sh"):
        assert path.stat().st_mode & 0o111


def test_the_slurm_script_partitions_and_calls_the_other():
    text = (FOLDER / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.M))
    assert options["ntasks-per-node"] == "1"
    assert {"no-kill", "requeue", "signal"} <= set(options)
    line = re.search(r"pyg-distcomm (partition .*) \$\(\(", text).group(1)
    read = _parser().parse_args([*shlex.split(line), "16"])
    assert (read.out.name, read.parts) == ("parts", 16)
    assert "examples/cluster/torchrun.sh" in text


@pytest.mark.exhaustive
def test_the_manifest_is_a_pytorchjob():
    yaml = pytest.importorskip("yaml")
    claim, cut, job = yaml.safe_load_all((FOLDER / "pytorchjob.yaml").read_text())
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (partition,) = cut["spec"]["template"]["spec"]["containers"]
    read = _parser().parse_args(partition["command"][1:])
    policy, worker = (
        job["spec"]["elasticPolicy"],
        job["spec"]["pytorchReplicaSpecs"]["Worker"],
    )
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    launch = get_args_parser().parse_args(container["command"][1:])
    ranks = int(launch.nproc_per_node) * policy["maxReplicas"]
    assert read.parts == ranks
    volumes = {one["name"] for one in worker["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    assert f"--parts={read.out}" in launch.training_script_args
    check_elastic(launch.training_script_args)


@pytest.mark.exhaustive
def test_the_manifest_is_a_trainjob():
    yaml = pytest.importorskip("yaml")
    claim, cut, job = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text())
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    (partition,) = cut["spec"]["template"]["spec"]["containers"]
    read = _parser().parse_args(partition["command"][1:])
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["kind"] == "TrainJob"
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert trainer["image"] == partition["image"]
    assert read.parts == trainer["numNodes"] * trainer["numProcPerNode"]
    launch = get_args_parser().parse_args(trainer["command"][1:])
    assert f"--parts={read.out}" in launch.training_script_args
    check_elastic(launch.training_script_args)
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (node["name"], container["name"]) == ("node", "node")  # as the runtime's
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == {*volumes}
    claimed = volumes["runs"]["persistentVolumeClaim"]["claimName"]
    assert claimed == claim["metadata"]["name"]


def test_the_image_installs_this_checkout_with_extras_that_there_are():
    text = (FOLDER / "Dockerfile").read_text()
    (home, extras) = re.search(r'"(/opt/\w+)\[([\w,]+)\]"', text).groups()
    assert f"COPY . {home}\n" in text
    project = (ROOT / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.M)
    for name in ("trainjob.yaml", "pytorchjob.yaml"):
        assert f"{home}/examples/elastic.py" in (FOLDER / name).read_text()
        assert "registry.example/pyg-distcomm:latest" in text


def test_the_example_trains_alone(tmp_path, monkeypatch, capsys):
    where = ROOT / "examples" / "elastic.py"
    spec = importlib.util.spec_from_file_location("elastic", where)
    elastic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(elastic)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    flags = ["--folder", str(tmp_path / "run"), "--dataset", "generated-200"]
    digests = []
    for epochs in (
        4,
        8,
        8,
    ):  # a start, one that goes on, and one that has nothing to do
        monkeypatch.setattr(
            sys, "argv", ["elastic.py", *flags, "--epochs", str(epochs), "--every", "2"]
        )
        elastic.main()
        out = capsys.readouterr().out
        digests.append(re.search(r"sha256 of the parameters (\w+)", out).group(1))
    assert "1 ranks begin at epoch 8" in out
    assert digests[1] == digests[2] != digests[0]
    other = [
        w if w != str(tmp_path / "run") else str(tmp_path / "straight") for w in flags
    ]
    monkeypatch.setattr(sys, "argv", ["elastic.py", *other, "--epochs", "8"])
    elastic.main()
    assert f"sha256 of the parameters {digests[1]}" in capsys.readouterr().out
