"""Completes the site for MkDocs: its address, its pages in order, notebooks and reports.

Pages are the Markdown files of docs/. Beside them, notebooks become pages under tutorials/,
the reports of benchmarks/ pages under reports/, and REFERENCES, CHANGELOG and CONTRIBUTING
pages under project/; each entry of the reference becomes a page of its own. A link that leaves
docs/ for a file of the repository leads to that file's page, if it has one, and otherwise to
the repository, if it has a place; until then the text of such a link stays. A picture that is
missing, or on another host, is a warning.
"""

from __future__ import annotations

import ast
import fnmatch
import logging
import os
import re
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
# tabs of the site: {tab: {group: which pages, in order}}; a page is where it comes first, and
# what no pattern names is in the last tab
TABS = {
    "Get started": {
        "": "index get-started how-it-works",
        "Tutorials": "tutorials/*",
    },
    "Guides": {
        "Train": "how-to/swap-imports how-to/minibatches how-to/coming-from "
        "how-to/heterogeneous-graphs how-to/deep-models how-to/transforms "
        "how-to/graphs-that-change",
        "Scale out": "how-to/partition-files how-to/clusters how-to/gpu "
        "how-to/larger-than-memory how-to/threads",
        "Send less": "how-to/choose-a-grid how-to/compress-halos how-to/choose-a-bulk "
        "how-to/count-bytes",
        "Operate": "how-to/checkpoints how-to/failures how-to/watch-a-run how-to/trace",
        "Connect and extend": "how-to/ecosystem how-to/extend how-to/reproduce how-to/*",
        "Ideas": "explanation/index explanation/tensors explanation/grids "
        "explanation/halo explanation/late-halos explanation/bulk explanation/stages "
        "explanation/prices explanation/*",
    },
    "Papers": {
        "": "papers/index papers/cagnet papers/varco papers/bulk-sampling "
        "papers/gnnpipe papers/sylvie papers/*",
    },
    "API": {
        "": "reference/index",
        "pyg_distcomm": "reference/core reference/core/*",
        "Layers": "reference/nn reference/nn/*",
        "Loaders": "reference/loader reference/loader/*",
        "Samplers": "reference/sampling reference/sampling/*",
        "Links, codecs, schedules": "reference/links reference/links/*",
        "Plans and pipelines": "reference/plan reference/plan/*",
        "Products and halos": "reference/ops reference/ops/*",
        "Command line": "reference/cli reference/*",
    },
    "Benchmarks": {
        "": "reports/index",
        "Full graph": "reports/epoch reports/full_graph reports/hetero reports/spmm "
        "reports/memory reports/size reports/scaling reports/strong_scaling reports/planned",
        "Minibatches": "reports/step reports/sampling reports/partitioned reports/labor "
        "reports/sampling_accuracy",
        "Compressed and late halos": "reports/links reports/accuracy reports/late "
        "reports/codecs reports/network",
        "Deep models": "reports/pipeline reports/training",
        "Devices": "reports/cuda",
        "Partitions": "reports/partitioning",
        "Correctness": "reports/exhaustive reports/mutations reports/faults "
        "reports/tracing pyg-examples pyg-layers reports/*",
    },
    "Project": {
        "": "limits project/contributing project/changelog project/references *"
    },
}
# pages of wide tables, which have the whole width
WIDE = ("reports/", "limits", "pyg-", "how-to/reproduce")
# pages that a search finds by their titles first, and those that it finds after all others
SOONER = ("get-started", "how-to/")
LATER = tuple(
    "index reports/ tutorials/ project/ explanation/ reference/ papers/ pyg-".split()
)
LINK = re.compile(
    r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s#:]+)(#[^)\s]*)?\)"
)
PICTURE = re.compile(r"<img\b[^>]*?\bsrc=[\"']([^\"']*)")
log = logging.getLogger("mkdocs.hooks")
CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]+`", re.M | re.S)


def urls() -> dict[str, str]:
    """Returns the addresses of pyproject.toml's [project.urls]; none until there is a host."""
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[project.urls]\n")[2].split("\n\n")[0]
    return dict(re.findall(r'^(\w+) = "(.*)"', table, re.M))


def added() -> dict[str, Path]:
    """Returns the pages that are made from files outside docs/, by their place in it."""
    pages = {
        f"tutorials/{path.stem}.md": path
        for path in (ROOT / "notebooks").glob("*.ipynb")
    }
    for path in (ROOT / "benchmarks/reports").glob("*.md"):
        pages[f"reports/{path.name}"] = path
    pages["reports/index.md"] = ROOT / "benchmarks/README.md"
    for name in ("REFERENCES", "CHANGELOG", "CONTRIBUTING"):
        pages[f"project/{name.lower()}.md"] = ROOT / f"{name}.md"
    return dict(sorted(pages.items()))


def pictures() -> dict[str, Path]:
    """Returns the pictures of the reports, by their place in docs/."""
    reports = ROOT / "benchmarks/reports"
    found = [*reports.glob("*.png"), *reports.glob("*.svg")]
    return {f"reports/{path.name}": path for path in sorted(found)}


def navigation(pages: list[str]) -> list[Any]:
    """Returns MkDocs' `nav` for all pages: tabs, and in each its pages and groups."""
    left = dict.fromkeys(sorted(pages))
    nav: list[Any] = []
    for tab, groups in TABS.items():
        within: list[Any] = []
        for group, patterns in groups.items():
            found = [
                page
                for pattern in patterns.split()
                for page in fnmatch.filter(left, f"{pattern}.md")
                if page in left and (left.pop(page), True)[1]
            ]
            if found:
                within += [{group: found}] if group else found
        if within:
            nav.append({tab: within})
    return nav


def written() -> list[str]:
    """Returns the Markdown files of docs/, by their place in it."""
    return sorted(
        str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")
    )


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the site's address and its pages."""
    config.site_url = urls().get("Documentation")
    config.repo_url = urls().get("Repository")
    config.nav = navigation([*written(), *added(), *api_pages()])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made from files outside docs/."""
    for place, path in added().items():
        if path.suffix == ".ipynb":
            exporter = MarkdownExporter()
            text, extras = exporter.from_filename(
                str(path), {"unique_key": path.stem, "output_files_dir": path.stem}
            )
            for name, content in extras["outputs"].items():
                files.append(
                    File.generated(config, f"tutorials/{name}", content=content)
                )
        else:
            text = path.read_text()
        files.append(File.generated(config, place, content=text))
    for place, path in pictures().items():
        files.append(File.generated(config, place, content=path.read_bytes()))
    for place, text in api_pages().items():
        if old := files.get_file_from_path(place):
            files.remove(old)
        files.append(File.generated(config, place, content=text))
    content = mathjax().read_bytes()
    files.append(File.generated(config, MATHJAX, content=content))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Turns links to files of the repository into links to their pages, or to the files."""
    place = page.file.src_uri
    made = added()
    if place.startswith(WIDE):
        page.meta.setdefault("hide", ["toc"])
    home = made[place].parent if place in made else (ROOT / "docs" / place).parent
    return with_links(markdown, place, home)


def with_links(markdown: str, place: str, home: Path) -> str:
    """Returns a page with links that hold on the site.

    Args:
        markdown: the text.
        place: the page's place in docs/.
        home: the folder that its links start from.
    """
    pages = {path: to for to, path in {**added(), **pictures()}.items()}
    repository = urls().get("Repository")
    code = [match.span() for match in CODE.finditer(markdown)]

    def replace(match: re.Match[str]) -> str:
        if any(first <= match.start() < end for first, end in code):
            return match[0]
        mark, text, link, anchor = match[1], match[2], match[3], match[4] or ""
        text = LINK.sub(replace, text) if "](" in text else text
        target = Path(os.path.normpath(home / link))
        if target in pages:
            to = os.path.relpath(pages[target], Path(place).parent)
        elif target.is_relative_to(ROOT / "docs") and target != ROOT / "docs":
            to = os.path.relpath(target.relative_to(ROOT / "docs"), Path(place).parent)
        elif target.exists() and target.is_relative_to(ROOT):
            if repository is None and not mark:
                return text
            to = f"{repository}{target.relative_to(ROOT)}" if repository else link
        else:
            to = link
        return f"{mark}[{text}]({to}{anchor})"

    return LINK.sub(replace, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adds what draws formulas, and ranks for a search; warns of pictures that are missing.

    A strict build then fails. The first paragraph of a docstring is left out of a page of
    the reference that begins with it.
    """
    if 'class="arithmatex"' in html:
        script = os.path.relpath(MATHJAX, os.path.dirname(page.file.dest_uri))
        html += f'\n<script async src="{script}"></script>'
    if page.file.src_uri in api_pages() and page.file.src_uri.count("/") > 1:
        html = FIRST_PARAGRAPH.sub(r"\1", html, count=1)
    if page.file.src_uri.startswith(LATER):
        html = re.sub(
            r"<(p|td|th|li|dd|pre)(?=[ >])", r'<\1 data-pagefind-weight="0.1"', html
        )
        html = f'<div data-pagefind-weight="0.1">{html}</div>'
    elif page.file.src_uri.startswith(SOONER):
        html = re.sub(r"<(h[1-3])(?=[ >])", r'<\1 data-pagefind-weight="10"', html)
    there = {file.dest_uri for file in files}
    for problem in picture_problems(html, page.file.dest_uri, there):
        log.warning("%s: %s", page.file.src_uri, problem)
    return html


def picture_problems(html: str, place: str, there: set[str]) -> list[str]:
    """Returns what is wrong with the pictures of a page.

    Args:
        html: the page.
        place: where it lies on the site.
        there: the places of all files of the site.
    """
    problems = []
    for source in PICTURE.findall(html):
        if source.startswith("data:"):
            continue
        path = os.path.normpath(os.path.join(os.path.dirname(place), unquote(source)))
        if "//" in source:
            problems.append(
                f"the picture {source} is on another host; keep it in docs/"
            )
        elif path not in there:
            problems.append(f"the picture {source} is missing")
    return problems


# The reference ---------------------------------------------------------------------------

ENTRY = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.M)
FENCE = re.compile(r"(?:^<!-- .* -->\n)?^```python\n(.*?)^```\n", re.M | re.S)
FIRST_PARAGRAPH = re.compile(
    r'(<div class="doc doc-contents first">\s*)<p>.*?</p>', re.S
)
PREFIX = re.compile(r"^pyg_distcomm\.(?:halo\.|loader\.|ops\.|sampling\.)")
SHORT = {  # names that a script uses -> where they are defined, if not `pyg_distcomm.NAME`
    "pyg_distcomm.graph.partition_data.partition": "pdc.partition",
    "pyg_distcomm.plan.planner.plan": "pdc.plan",
}


@cache
def api_pages() -> dict[str, str]:
    """Returns the pages of the reference: one for each entry, and a table of them.

    An entry is `::: NAME` in docs/reference/, with its example below it. Its page has the
    first sentence of its docstring, the example with all lines that it needs of earlier
    ones, and then the signature and the parameters.
    """
    package = griffe.load(
        "pyg_distcomm", search_paths=[str(ROOT)], resolve_aliases=True
    )
    pages: dict[str, str] = {}
    for path in sorted((ROOT / "docs/reference").glob("*.md")):
        text = path.read_text()
        if len(ENTRY.findall(text)) < 2:
            continue
        head, *parts = ENTRY.split(text)
        setup = [match[1] for match in FENCE.finditer(head)]
        earlier = list(setup)
        table: list[str] = [FENCE.sub("", head)]
        for name, options, below in zip(
            parts[::3], parts[1::3], parts[2::3], strict=True
        ):
            found = package[name.removeprefix("pyg_distcomm.")]
            told = found.docstring.value if found.docstring else ""
            first = told.split("\n\n")[0].replace("\n", " ")
            short = SHORT.get(name) or PREFIX.sub("", name)
            if short.startswith("pyg_distcomm."):
                short = f"pdc.{short.removeprefix('pyg_distcomm.')}"
            example = [match[1] for match in FENCE.finditer(below)]
            lines = [*needed(example[0], earlier), example[0]] if example else []
            stem = short.split(".")[-1]
            folder = path.stem
            if f"reference/{folder}/{stem}.md".lower() in map(str.lower, pages):
                stem += "-class" if found.is_class else "-function"
            pages[f"reference/{folder}/{stem}.md"] = (
                f"# {short}\n\n{first}\n\n```python\n"
                + "\n".join(lines)
                + f"```\n\n::: {name}\n{options}"
            )
            earlier += example
            if table[-1].endswith("|\n"):
                table[-1] += f"| [`{short}`]({folder}/{stem}.md) | {first} |\n"
            else:
                table.append(
                    "\n| name | what it does |\n|---|---|\n"
                    f"| [`{short}`]({folder}/{stem}.md) | {first} |\n"
                )
            if rest := FENCE.sub("", below).strip():
                table.append(f"\n{rest}\n")
        pages[f"reference/{path.name}"] = "".join(table)
    return pages


def needed(code: str, earlier: list[str]) -> list[str]:
    """Returns which blocks define names that the code uses, and the first, in order."""
    kept, names = [], _names(code)[0]
    for at in range(len(earlier) - 1, -1, -1):
        used, made = _names(earlier[at])
        if at == 0 or names & made:
            kept.append(earlier[at])
            names = (names - made) | used
    return kept[::-1]


def _names(code: str) -> tuple[set[str], set[str]]:
    """Returns the names that a block reads, and those that it defines."""
    used, made = set(), set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (made if isinstance(node.ctx, ast.Store) else used).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            made |= {(a.asname or a.name).split(".")[0] for a in node.names}
    return used - made | {
        name for name in used & made if _reads_first(code, name)
    }, made


def _reads_first(code: str, name: str) -> bool:
    """Returns whether a block reads a name in a line before it defines it."""
    lines: dict[type, int] = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and node.id == name:
            kind = type(node.ctx)
            lines[kind] = min(node.lineno, lines.get(kind, node.lineno))
    return lines.get(ast.Load, 1 << 30) <= lines.get(ast.Store, -1)


# Formulas --------------------------------------------------------------------------------

MATHJAX = "assets/mathjax.js"


def mathjax() -> Path:
    """Returns the one file of MathJax that draws formulas, of an installed package."""
    files = distribution("django-static-mathjax").files or []
    (file,) = (one for one in files if str(one).endswith("/es5/tex-svg.js"))
    return Path(str(file.locate()))


# The README ------------------------------------------------------------------------------

LABEL = re.compile(r"\]\[([\w./-]+)\]")


def readme(text: str) -> str:
    """Returns README with the addresses of its links: `[text][page]`, made from one base.

    A label is a page's place in docs/ without its ".md", or that of a picture. Until there is
    a base, links lead to the files of the repository.
    """
    body = text.split("\n<!-- links: ")[0].rstrip()
    base, files = urls().get("Documentation"), added()
    lines = []
    for label in dict.fromkeys(LABEL.findall(body)):
        page = label.removesuffix("index")
        link = f"{base}{page}" + ("" if "." in label or page != label else "/")
        if base is None:
            name = label if "." in label else f"{label}.md"
            path = files.get(name, ROOT / "docs" / name)
            link = path.relative_to(ROOT).as_posix()
        lines.append(f"[{label}]: {link}")
    mark = "<!-- links: written by python docs/hooks.py, from pyproject.toml -->"
    return body + f"\n\n{mark}\n" + "\n".join(lines) + "\n"


def for_index(text: str) -> str:
    """Returns README as a package index shows it, PYPI.md: with absolute links, or none."""
    if urls().get("Documentation"):
        return text
    body = text.split("\n<!-- links: ")[0].rstrip() + "\n"
    body = re.sub(r"!\[[^\]]*\]\[[^\]]*\]\n\n\*.*?\*\n\n", "", body, flags=re.S)
    body = re.sub(r"\s\(\[[^\]]*\]\[[^\]]*\]\)", "", body)
    body = re.sub(r"\[([^\]]*)\]\[[^\]]*\]", r"\1", body)
    return re.sub(r"<!-- .*? -->\n", "", body)


if __name__ == "__main__":
    README = ROOT / "README.md"
    README.write_text(readme(README.read_text()))
    (ROOT / "PYPI.md").write_text(for_index(README.read_text()))
