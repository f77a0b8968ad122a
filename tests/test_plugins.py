"""A package that registers a cutter, a codec and a rule is known by its names."""

import importlib
import sys

import pytest
import torch
from batches import arguments

import pyg_distcomm as pdc
from pyg_distcomm import plugins
from pyg_distcomm.cli import main
from pyg_distcomm.datasets import generated
from pyg_distcomm.halo.codecs import codec_of, known_codecs
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.loader import DistLayerLoader
from pyg_distcomm.partition.cutters import cut, known_methods
from pyg_distcomm.partition.folder import read_part
from pyg_distcomm.plan.ranks import described

CODE = """
import torch
from pyg_distcomm.halo.codecs import Quantise

def stripes(edge_index, num_nodes, num_parts, *, seed, train_mask):
    return torch.arange(num_nodes) % num_parts

def broken(edge_index, num_nodes, num_parts, *, seed, train_mask):
    return torch.full((num_nodes,), num_parts)

def half_byte():
    return Quantise(4, "stochastic")

def roots(P):
    return P.sqrt()
"""
POINTS = """
[pyg_distcomm.cutters]
stripes = dummy_plugin:stripes
broken = dummy_plugin:broken
gone = dummy_plugin:nowhere
metis = dummy_plugin:broken

[pyg_distcomm.codecs]
half-byte = dummy_plugin:half_byte
no-codec = dummy_plugin:roots

[pyg_distcomm.sampling_rules]
roots = dummy_plugin:roots
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a package for the length of a test, as a wheel would lay it out."""
    site = tmp_path / "site"
    about = site / "dummy_plugin-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "dummy_plugin.py").write_text(CODE)
    told = "Metadata-Version: 2.1\nName: dummy-plugin\nVersion: 1.0\n"
    (about / "METADATA").write_text(told)
    (about / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    yield site
    sys.modules.pop("dummy_plugin", None)


def test_names_are_known_only_where_they_are_installed():
    assert "stripes" not in known_methods()
    with pytest.raises(ValueError, match=r"unknown partition method 'stripes'.*metis"):
        cut(torch.zeros(2, 0, dtype=torch.int64), 4, 2, "stripes")
    with pytest.raises(KeyError):
        plugins.load(plugins.CUTTERS, "stripes")


def test_a_registered_cutter_cuts_from_the_command_line(installed, tmp_path):
    out = str(tmp_path / "parts")
    flags = ["--parts", "3", "--method", "stripes"]
    assert main(["partition", "generated-120", out, *flags]) == 0
    assert torch.equal(read_part(out, 1).node_gid, torch.arange(1, 120, 3))
    asked = {"partition": "stripes", "codecs": ["half-byte"]}
    assert "4 bits" in str(pdc.plan(generated(120), [32, 4, 4], 2, **asked))
    edges = generated(120).edge_index
    assert cut(edges, 120, 2, "metis").num_parts == 2  # the package's own comes first
    with pytest.raises(ValueError, match="registered cutter 'broken' failed: ValueErr"):
        cut(edges, 120, 2, "broken")
    told = r"'gone', registered in pyg_distcomm.cutters by dummy-plugin .*, cannot"
    with pytest.raises(ValueError, match=told):
        cut(edges, 120, 2, "gone")


def test_a_registered_codec_is_known_by_its_name(installed):
    assert "half-byte" in known_codecs()
    assert codec_of("half-byte").bits == 4
    assert LinkPolicy("half-byte").codec.bits == 4
    assert described(LinkPolicy("half-byte"))["codec"] == "4 bits"
    with pytest.raises(ValueError, match="the registered codec 'no-codec' failed"):
        codec_of("no-codec")
    with pytest.raises(ValueError, match=r"codec 'none' is not known.*half-byte"):
        codec_of("none")


def test_a_registered_rule_samples_as_the_function_does(installed):
    data = generated(120)
    options = {"batch_size": 40, "seed": 3, "input_nodes": data.train_mask}
    mine, named = (
        next(iter(DistLayerLoader(data, [8, 8], rule, **arguments(**options))))
        for rule in (lambda P: P.sqrt(), "roots")
    )
    assert torch.equal(mine.n_id, named.n_id)
    with pytest.raises(ValueError, match=r"rule='root'.*ladies, fastgcn, roots"):
        DistLayerLoader(data, [8, 8], "root")
