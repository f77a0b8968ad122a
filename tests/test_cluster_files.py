"""The files for clusters, read by the parsers of what will run them."""

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
@pytest.mark.parametrize("name", ["pytorchjob.yaml", "trainjob.yaml"])
def test_a_manifest_partitions_and_launches(name):
    """torchrun and examples/elastic.py read their flags, which name the parts."""
    yaml = pytest.importorskip("yaml")
    _, cut, job = yaml.safe_load_all((FOLDER / name).read_text())
    (partition,) = cut["spec"]["template"]["spec"]["containers"]
    read, spec = _parser().parse_args(partition["command"][1:]), job["spec"]
    if name.startswith("train"):
        trainer = spec["trainer"]
        assert trainer["image"] == partition["image"]
        count, command = trainer["numNodes"] * trainer["numProcPerNode"], trainer
    else:
        (command,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
            "containers"
        ]
        count = spec["elasticPolicy"]["maxReplicas"]
    launch = get_args_parser().parse_args(command["command"][1:])
    words = launch.training_script_args
    assert f"--parts={read.out}" in words
    assert read.parts == count * (1 if "train" in name else int(launch.nproc_per_node))
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "elastic.py", *words, "--help"],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    known = set(re.findall(r"--[\w-]+", done.stdout))
    assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known


def test_the_image_installs_extras_that_there_are():
    text = (FOLDER / "Dockerfile").read_text()
    (extras,) = re.search(r'"/opt/\w+\[([\w,]+)\]"', text).groups()
    project = (ROOT / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.M)
