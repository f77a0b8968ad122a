"""What mypy knows of three scripts, and how many names there are to know."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import pyg_distcomm as pdc

CACHE = Path(__file__).parents[1] / ".mypy_cache" / "typed"  # torch takes it long
SCRIPTS = sorted((Path(__file__).parent / "typed").glob("*.py"))
# errors of an installed package are not shown, nor are those of a checkout here; what of
# torch the scripts do not reach is not read, which takes most of the time
INSTALLED = """[mypy-pyg_distcomm.*]
ignore_errors = True
[mypy-torch._dynamo.*,torch._inductor.*,torch.export.*,torch.fx.*,torch.onnx.*,torch.ao.*]
follow_imports = skip
[mypy-torch.distributed.*,torch._functorch.*,torch._subclasses.*,sympy.*,numpy.*]
follow_imports = skip
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


@pytest.mark.parametrize(
    "config", [LEFT_OPEN, pytest.param(READ, marks=pytest.mark.exhaustive)]
)
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
