"""What is declared, versioned and typed, and that nothing of torch or PyG is replaced."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import house_metrics
import private_apis
import pytest

import pyg_distcomm
import pyg_distcomm as pdc
from pyg_distcomm.cli import doctor

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = house_metrics.HERE
PACKAGE = ROOT / "pyg_distcomm"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# imported name -> its name on the index, where they differ
DISTRIBUTION = {"sklearn": "scikit-learn", "pyg_lib": None, "torch_sparse": None}
# not on the index, or used where it is there and never asked for: see `doctor`
OPTIONAL = {"pyg_lib", "torch_sparse", "triton"}


def names(requirements):
    return {
        re.match(r"[\w-]+", text)[0].lower().replace("_", "-") for text in requirements
    }


def imported(nodes):
    """Modules that are imported, also by `importlib.import_module("...")`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        if isinstance(node, ast.Call) and node.args:
            first = node.args[0]
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            by_name = called.endswith(("import_module", "_library"))
            if by_name and isinstance(first, ast.Constant):
                yield first.value
            if called.endswith("_pyarrow"):
                yield "pyarrow"


def test_everything_imported_is_declared():
    hard = names(PROJECT["dependencies"])
    extras = {
        name: names(listed) for name, listed in PROJECT["optional-dependencies"].items()
    }
    asked = set().union(*extras.values())
    used = set()
    for module in house_metrics.modules(ROOT).values():
        for name in imported(module.nodes):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in ("pyg_distcomm", *OPTIONAL):
                continue
            used.add((DISTRIBUTION.get(top, top) or top).lower().replace("_", "-"))
    assert used - hard - asked == set()
    # nothing is declared in vain, either
    assert hard - used == set()


def test_dependencies_have_floors_and_no_caps():
    listed = [*PROJECT["dependencies"]]
    for extra in PROJECT["optional-dependencies"].values():
        listed += extra
    floor = r"[\w.\[\]-]+>=[\d.]+(; sys_platform .+)?"
    assert all(re.fullmatch(floor, text) for text in listed), listed


PUBLIC = """cli comm.ledger datasets halo.codec halo.codecs halo.policy halo.schedule loader nn
partition.cutters partition.external
partition.folder partition.partition plugins sampling
sampling.algebra sampling.rules""".split()


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_module_lists_its_names(name):
    module = importlib.import_module(f"pyg_distcomm.{name}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(getattr(module, one) is not None for one in module.__all__)


def test_versions_agree():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (\S+)$", text, re.M)[1] == pyg_distcomm.__version__
    assert re.search(r"^license: (\S+)$", text, re.M)[1] == "MIT"
    assert "License :: OSI Approved :: MIT License" in PROJECT["classifiers"]
    named = re.search(r"^PYTHONS = \[(.*)\]$", (ROOT / "noxfile.py").read_text(), re.M)
    pythons = re.findall(r'"(3\.\d+)"', named[1])
    listed = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c]
    assert pythons == listed


def test_no_host_is_named_before_there_is_one():
    folders = ("pyg_distcomm", "docs", "tests", "benchmarks", "examples", "notebooks")
    files = [path for name in folders for path in (ROOT / name).rglob("*")]
    files += [path for path in ROOT.iterdir() if path.name != ".git"]
    endings = {".py", ".md", ".toml", ".yml", ".cff", ".ipynb", ".svg", ".css", ".json"}
    for path in files:
        if path.is_file() and path.suffix in endings:
            assert "example" + ".org" not in path.read_text(), path
    assert "urls" not in PROJECT or all(map(str.strip, PROJECT["urls"].values()))


def test_the_changelog_tells_of_versions():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.M)
    assert versions[0] == "Unreleased"
    assert versions[1] == pyg_distcomm.__version__
    kinds = "Added Changed Deprecated Removed Fixed Security".split()
    assert {*re.findall(r"^### (.+)$", text, re.M)} <= {*kinds}
    assert len(text.splitlines()) <= 120


def test_files_that_pages_name_are_there():
    for name in ("SECURITY.md", "CONTRIBUTING.md"):
        named = re.findall(r"`([\w/]+/[\w.]+\.py)`", (ROOT / name).read_text())
        for file in named:
            places = (ROOT / file, PACKAGE / file)
            assert any(place.is_file() for place in places), f"{name}: {file}"


# Versions that are declared, tested and told agree; private APIs are those of their list ---


def numbers(version):
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def table():
    """The table of docs/limits.md: what ran, by the names of its columns."""
    text = (ROOT / "docs/limits.md").read_text().partition("\n## Versions\n")[2]
    rows = [
        line.strip("| \n").split(" | ") for line in re.findall(r"^\|.*", text, re.M)
    ]
    head, _, *rows = rows[:5]
    names = ["what", *(name.strip("| ") for name in head)]
    return {row[0].split(",")[0]: dict(zip(names, row, strict=True)) for row in rows}


def floors():
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)[1]
    return dict(re.findall(r'"([\w-]+)>=([\d.]+)"', needed))


def test_the_table_of_versions_has_what_is_declared():
    runs, least = table(), floors()
    assert list(runs) == ["oldest", "pinned", "newest"]
    for name in ("torch", "torch_geometric", "numba", "numpy"):
        assert f"{runs['oldest'][name]}.".startswith(f"{least[name]}."), name
    pythons = re.findall(r'"(3\.\d+)"', (ROOT / "noxfile.py").read_text())
    pythons.sort(key=numbers)
    assert runs["oldest"]["Python"].startswith(f"{pythons[0]}.")
    assert runs["newest"]["Python"].startswith(f"{pythons[-1]}.")
    readme = (ROOT / "README.md").read_text()
    assert {*re.findall(r"torch==([\d.]+)", readme)} == {runs["pinned"]["torch"]}
    told = f"torch {least['torch']} and PyG {least['torch_geometric']} are the oldest"
    assert told in readme
    last = [runs["newest"][name] for name in ("torch", "torch_geometric")]
    assert f"torch {last[0].removesuffix('.0')} and PyG {last[1]} the newest" in readme


def test_the_doctor_knows_the_floors_and_what_was_tested():
    least = floors()
    for name, floor in doctor.REQUIRED.items():
        assert floor == numbers(least[name]), name
    for name, tested in doctor.TESTED.items():
        assert {*tested} == {run[name] for run in table().values()}, name


def test_every_private_api_is_listed_and_every_listed_one_touched():
    (every, foreign), listed = private_apis.touched(), private_apis.listed()
    unlisted = {name for name in foreign if not any(fits(name, one) for one in listed)}
    idle = {one for one in listed if not any(fits(name, one) for name in every)}
    assert not unlisted, (
        "replace it by a public one, or list it in tests/private_apis.py"
    )
    assert not idle, "take it from tests/private_apis.py"


def fits(name, listed):
    """Tells whether a name of the source is a part of a listed one, or begins its last."""
    last = listed.rpartition(".")[2]
    return name in listed.split(".") or (name.endswith("_") and name in last)


@pytest.mark.parametrize("package", ["torch", "torch_geometric", "numba"])
def test_what_is_installed_has_the_listed_private_apis(package):
    here = numbers(version(package))
    for name, (of, first, last) in private_apis.listed().items():
        if of == package:
            if numbers(first) <= here <= numbers(last):
                assert private_apis.has(name), name
            if of in doctor.TESTED:
                assert last == doctor.TESTED[of][-1], name
                assert numbers(first) <= numbers(doctor.TESTED[of][0]), name


# What mypy knows of three scripts, and how many names there are to know --------------

CACHE = Path(__file__).parents[1] / ".mypy_cache" / "typed"  # torch takes it long
SCRIPTS = sorted((Path(__file__).parent / "typed").glob("*.py"))
# errors of an installed package are not shown, nor are those of a checkout here; most of
# torch, which the scripts do not name, is not read, which takes most of the time
INSTALLED = """[mypy-pyg_distcomm.*]
ignore_errors = True
[mypy-torch.*,numba.*,llvmlite.*,numpy.*,sympy.*,filelock.*,asyncio.*,unittest.*]
follow_imports = skip
follow_imports_for_stubs = True
[mypy-torch,torch._C.*,torch._tensor,torch.nn,torch.nn.functional,torch.nn.parameter]
follow_imports = normal
[mypy-torch.nn.modules,torch.nn.modules.module,torch.optim,torch.optim.*]
follow_imports = normal
"""
# PyG has no py.typed: a strict script leaves its types open, or has mypy infer them
LEFT_OPEN = """[mypy]
strict = True
untyped_calls_exclude = torch
[mypy-torch_geometric.*]
ignore_missing_imports = True
"""
READ = """[mypy]
strict = True
untyped_calls_exclude = torch
follow_untyped_imports = True
disable_error_code = abstract, arg-type
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [LEFT_OPEN, READ])
def test_a_strict_script_is_typed(config, tmp_path):
    api = pytest.importorskip("mypy.api")
    ini = tmp_path / "mypy.ini"
    ini.write_text(config + INSTALLED)
    files = [str(script) for script in SCRIPTS]
    cache = ["--cache-dir", str(CACHE / str(config is READ))]
    said, wrong, _ = api.run(["--config-file", str(ini), *cache, *files])
    assert " error: " not in said + wrong, said + wrong
    found = re.findall(r"(\w+)\.py:(\d+): note: Revealed type is \"(.*)\"", said)
    wanted = [
        (script.stem, str(number), name)
        for script in SCRIPTS
        for number, line in enumerate(script.read_text().splitlines(), 1)
        for name in re.findall(r"reveal_type\(.*\)  # (\w+)", line)
    ]
    assert len(found) == len(wanted) == 11
    for (*at, kind), (*there, name) in zip(sorted(found), sorted(wanted), strict=True):
        opened = config is LEFT_OPEN and name in ("Data", "HeteroData")
        assert at == there
        assert re.split(r"[.\[]", kind)[-1] == ("Any" if opened else name)


def test_names_and_arguments_fit_a_screen():
    assert len(pdc.__all__) <= 45
    assert len(inspect.signature(pdc.init).parameters) <= 10


# Nothing of torch or PyG is another object after the import, a partition and training ---

SCRIPT = """
import sys, types
import torch, torch.nn.functional, torch.optim
import torch_geometric.data, torch_geometric.loader, torch_geometric.nn, torch_geometric.utils
import torch_geometric.explain, torch_geometric.transforms

THEIRS = "torch", "torch_geometric"
KINDS = types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod


def known():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in THEIRS and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if isinstance(value, KINDS):
                    found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    for inner, member in list(vars(value).items()):
                        if isinstance(member, KINDS):
                            found[name, key, inner] = member
    return found


before, loaded = known(), set(sys.modules)
import pyg_distcomm.api, pyg_distcomm.cli

# torch_geometric itself may bring numba: what counts is what we add to it
late = {"numba", "triton", "pymetis", "sklearn", "matplotlib"}
late |= {"pyg_distcomm.kernels.core_cpu", "pyg_distcomm.partition.cutters_jit"}
assert not late & set(sys.modules) - loaded, late & set(sys.modules) - loaded
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
import pyg_distcomm as pdc
from pyg_distcomm.loader import NeighborLoader

n = 40
data = torch_geometric.data.Data(
    x=torch.randn(n, 4), edge_index=torch.randint(n, (2, 160)), y=torch.randint(3, (n,))
)
share = pdc.partition(data, pdc.init())
for kind in (pdc.nn.GCNConv, pdc.nn.GATConv, torch_geometric.nn.GATConv):
    conv = kind(4, 3)
    for batch in (share, *NeighborLoader(data, [3], batch_size=20)):
        out = conv(batch.x, batch.edge_index)
        torch.nn.functional.cross_entropy(out, batch.y).backward()
after = known()
changed = [name for name, value in before.items() if after.get(name, value) is not value]
assert len(before) > 10_000 and not changed, changed
layer = torch.jit.script(torch_geometric.nn.SAGEConv(4, 3))
assert layer(data.x, data.edge_index).shape == (n, 3)
assert isinstance(share, torch_geometric.data.Data)
"""


@pytest.mark.subprocess
def test_nothing_of_torch_or_pyg_is_replaced_and_importing_compiles_nothing():
    run = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
