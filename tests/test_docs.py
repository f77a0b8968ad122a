"""Runs every Python block of the documentation, and checks links, pages and docstrings."""

import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from pathlib import Path

import matplotlib
import pytest
import tiers
import torch
import worlds
from tiers import rarely

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    re.M | re.S,
)
NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")
ONE_RANK = re.compile(r"<!-- one rank: .+ -->\s*$")
ENTRY = re.compile(r"^::: ([\w.]+)$", re.M)
# pages of the default tier, by the number of ranks: `.ci/run docs` runs all of them
SOME = {1: {"index.md"}, 2: set()}
OPTIONAL = {"pyarrow", "tensorboard", "ogb", "lightning", "accelerate", "torchmetrics"}


def blocks(text, size=1):
    """Returns (first line, code) of each Python block that runs on so many ranks."""
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        if match["language"] != "python" or NOT_RUN.search(before):
            continue
        if size > 1 and ONE_RANK.search(before):
            continue
        yield text.count("\n", 0, match.start()) + 2, textwrap.dedent(match["code"])


def run(path, folder, size=1):
    """Runs the blocks of a page in order, in one namespace and a folder.

    Returns the name of a package that one needs and that is missing, if any.
    """
    namespace = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [sys.argv[0]])
        matplotlib.use("Agg")
        dtype = torch.get_default_dtype()
        torch.manual_seed(0)
        try:
            for line, code in blocks(path.read_text(), size):
                # so that errors name the line of the page
                lines = "\n" * (line - 1) + code
                exec(compile(lines, str(path), "exec"), namespace)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            return error.name
        finally:
            torch.set_default_dtype(dtype)
    return None


def name(path):
    return str(path.relative_to(DOCS))


def scripts(size=1):
    with_code = [path for path in PAGES if list(blocks(path.read_text(), size))]
    if size == 1:  # of the reference, each example runs alone, below
        with_code = [
            p for p in with_code if p.parent.name != "reference" or name(p) in SOME[1]
        ]
    return [path if name(path) in SOME[size] else rarely(path) for path in with_code]


@pytest.mark.parametrize("path", scripts(), ids=lambda path: name(path))
def test_the_blocks_of_a_page_run(path, tmp_path):
    if missing := run(path, tmp_path):
        pytest.skip(f"a block of the page needs {missing}")


@pytest.mark.parametrize("path", scripts(2), ids=lambda path: name(path))
def test_the_blocks_of_a_page_run_on_two_ranks(path, tmp_path):
    if missing := worlds.anew(run, 2, path, tmp_path, 2)[0]:
        pytest.skip(f"a block of the page needs {missing}")


def test_pages_that_are_not_run_say_why():
    for path in PAGES:
        text = path.read_text()
        fences = [m for m in FENCE.finditer(text) if m["language"] == "python"]
        told = re.findall("<!-- not run: ", text)
        assert len(fences) == len(list(blocks(text))) + len(told)


# The reference ---------------------------------------------------------------------------


def entries():
    """Returns the text below each entry of the reference, up to the next, by its name."""
    found = {}
    for path in sorted((DOCS / "reference").glob("*.md")):
        parts = ENTRY.split(path.read_text())
        found |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return found


def public():
    """Returns the public names: {id of what it is: one of its names}."""
    pdc = importlib.import_module("pyg_distcomm")
    names = [f"pyg_distcomm.{name}" for name in vars(pdc) if name[0] != "_"]
    for package in ("nn", "loader"):
        ours = importlib.import_module(f"pyg_distcomm.{package}")._OURS
        names += [f"pyg_distcomm.{package}.{name}" for name in ours]
    for package in ("sampling", "halo", "ops", "halo.codecs", "halo.schedule"):
        module = importlib.import_module(f"pyg_distcomm.{package}")
        listed = getattr(module, "__all__", vars(module))
        names += [f"pyg_distcomm.{package}.{one}" for one in listed if one[0] != "_"]
    found = {}
    for dotted in names:
        one = pkgutil.resolve_name(dotted)
        if callable(one) and getattr(one, "__module__", "").startswith("pyg_distcomm"):
            found.setdefault(id(one), dotted)
    return found


def test_every_public_name_has_an_entry():
    told = {id(pkgutil.resolve_name(name)) for name in entries()}
    missing = sorted(name for one, name in public().items() if one not in told)
    assert not missing, f"add `::: NAME` and an example to docs/reference/: {missing}"


@pytest.mark.parametrize("dotted", sorted(entries()))
def test_an_entry_has_a_docstring_and_an_example(dotted):
    one, below = pkgutil.resolve_name(dotted), entries()[dotted]
    text = inspect.getdoc(one) or ""
    assert text, f"{dotted} has no docstring"
    assert list(blocks(below)), f"{dotted} has no example below it"
    call = one.__init__ if inspect.isclass(one) and "__init__" in vars(one) else one
    if not inspect.isfunction(call) or "Args:" not in text:
        return
    given = {
        name: parameter
        for name, parameter in inspect.signature(call).parameters.items()
        if name[0] != "_" and name not in PASSED_ON
    }
    untold = [name for name in given if not re.search(rf"\b{name}\b", text)]
    assert not untold, f"{dotted} does not say what these are: {untold}"
    if call.__module__.startswith("pyg_distcomm"):
        untyped = [n for n, p in given.items() if p.annotation is p.empty]
        assert not untyped, f"{dotted} does not say the types of {untyped}"


# what is handed on to PyG, or made by the package itself
PASSED_ON = {"self", "cls", "args", "kwargs", "options"}


# Links -----------------------------------------------------------------------------------


def test_links_of_readme_are_made_from_one_base():
    hooks = _hooks()
    text = (ROOT / "README.md").read_text()
    assert text == hooks.readme(text), "run python docs/hooks.py"
    made = {*hooks.written(), *hooks.added()}
    for label in hooks.LABEL.findall(text.split("<!-- links: ")[0]):
        assert f"{label}.md" in made or (DOCS / label).is_file(), label
    assert not re.findall(r"\]\((?!https?://)", text), "breaks off the repository"


def test_the_text_for_the_index_has_no_link_that_breaks_there():
    hooks = _hooks()
    text = (ROOT / "PYPI.md").read_text()
    made = hooks.for_index((ROOT / "README.md").read_text())
    assert text == made, "run python docs/hooks.py"
    assert not re.findall(r"\]\((?!https?://)|^\[.*\]: (?!https?://)|<img", text, re.M)
    assert 'readme = "PYPI.md"' in (ROOT / "pyproject.toml").read_text()


def test_every_picture_of_a_page_is_a_file():
    hooks = _hooks()
    pages = {path: path.parent for path in PAGES}
    pages |= {p: p.parent for p in hooks.added().values() if p.suffix == ".md"}
    for path, home in pages.items():
        text = path.read_text()
        for picture in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", text):
            assert "//" not in picture, f"{path}: {picture}"
            assert (home / picture).is_file(), f"{path}: {picture}"


def test_every_page_is_in_the_navigation():
    hooks = _hooks()
    pages = [*hooks.written(), *hooks.added()]
    nav = hooks.navigation(pages)
    assert sorted(leaves(nav)) == sorted(pages)
    assert next(iter(nav[0].values()))[0] == "index.md"


def leaves(nav):
    """Returns the pages of MkDocs' `nav`, whatever tab and group they are in."""
    if isinstance(nav, str):
        return [nav]
    within = nav.values() if isinstance(nav, dict) else nav
    return [page for one in within for page in leaves(one)]


@tiers.rare
def test_every_entry_of_the_reference_has_a_page_that_begins_with_its_example():
    hooks = _hooks()
    pages = [text for place, text in hooks.api_pages().items() if place.count("/") > 1]
    names = [re.search(r"^::: ([\w.]+)$", text, re.M)[1] for text in pages]
    assert sorted(names) == sorted(n for n in entries() if n != "pyg_distcomm.cli.main")
    for text in pages:
        title, sentence, example, *_ = text.split("\n\n")
        assert title.startswith("# ")
        assert sentence.endswith(".")
        assert example.startswith("```python\n")
        (code,) = (code for _, code in blocks(text))
        compile(code, title, "exec")


@tiers.parametrize("part", range(4), [])  # so that two processes share them
def test_every_example_of_the_reference_runs_alone(part, tmp_path):
    for number, (place, text) in enumerate(_hooks().api_pages().items()):
        if place.count("/") > 1 and number % 4 == part:
            folder = tmp_path / str(number)
            folder.mkdir()
            page = folder / "page.md"
            page.write_text(text)
            run(page, folder)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def _hooks():
    pytest.importorskip("nbconvert")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        return importlib.import_module("hooks")
