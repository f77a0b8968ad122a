"""Completes the site for MkDocs: its address, its pages in order, notebooks and reports.

Pages are the Markdown files of docs/. Beside them, notebooks become pages under tutorials/,
the reports of benchmarks/ pages under reports/, and REFERENCES, CHANGELOG and CONTRIBUTING
pages under project/. A link that leaves docs/ for a file of the repository leads to that
file's page, if it has one, and otherwise to the repository, if it has a place; until then the
text of such a link stays. A picture that is missing, or on another host, is a warning.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {  # a folder of docs/, and which of its pages come first
    "tutorials": "Tutorials",
    "how-to": "How to",
    "explanation": "Ideas",
    "reference": "Reference",
    "papers": "Papers",
    "reports": "Measured",
    "project": "Project",
}
FIRST = """
index swap-imports coming-from minibatches choose-a-bulk partition-files choose-a-grid gpu
compress-halos deep-models graphs-that-change checkpoints failures clusters count-bytes trace
watch-a-run
tensors grids halo late-halos bulk stages prices
core nn loader sampling links plan ops cli
cagnet varco bulk-sampling gnnpipe sylvie
full_graph partitioned sampling links late pipeline
""".split()
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
    found = (ROOT / "benchmarks/reports").glob("*.png")
    return {f"reports/{path.name}": path for path in sorted(found)}


def titles(pages: list[str]) -> list[Any]:
    """Returns the pages of one folder in order: those of FIRST, then the others by name."""

    def rank(page: str) -> tuple[int, str]:
        stem = Path(page).stem
        return (FIRST.index(stem) if stem in FIRST else len(FIRST), stem)

    return sorted(pages, key=rank)


def navigation(pages: list[str]) -> list[Any]:
    """Returns MkDocs' `nav` for all pages: the first page, then a section a folder."""
    nav: list[Any] = [
        "index.md",
        *titles([p for p in pages if "/" not in p and p != "index.md"]),
    ]
    folders = sorted({page.split("/")[0] for page in pages if "/" in page})
    for folder in [*SECTIONS, *(f for f in folders if f not in SECTIONS)]:
        within = titles([page for page in pages if page.startswith(f"{folder}/")])
        if within:
            nav.append({SECTIONS.get(folder, folder): within})
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
    config.nav = navigation([*written(), *added()])
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
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Turns links to files of the repository into links to their pages, or to the files."""
    place = page.file.src_uri
    made = added()
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
    """Warns of pictures that the site does not have; a strict build then fails."""
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
    return body + f"\n\n{mark}\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    README = ROOT / "README.md"
    README.write_text(readme(README.read_text()))
