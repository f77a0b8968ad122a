"""What META.json of a partition folder must hold before anything of it is used."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

Meta = dict[str, Any]

_STRUCTURE = ("edge_index", "num_nodes", "num_edges")
_KINDS = ("node", "edge", "graph")
_MOST = 2**53  # a number that JSON keeps
_SUM = re.compile(r"[0-9a-f]{64}")
_BETWEEN = re.compile(r"[/\\]")


def problem_of(meta: Meta) -> str | None:
    """Says which field is missing, mistyped or impossible, if one is."""
    try:
        return next(_problems(meta), None)
    except KeyError as error:
        return f"has no {error.args[0]!r}"


def _problems(meta: Meta) -> Iterator[str]:
    for name in ("num_nodes", "num_edges", "num_parts"):
        if not _is_count(meta[name]):
            yield f"{name} is {meta[name]!r}, wanted a number of at least 0"
    if meta["num_parts"] < 1:
        yield "num_parts is 0, wanted at least 1"
    for name, kind in {"attributes": dict, "values": dict, "partition": str}.items():
        if not isinstance(meta[name], kind):
            yield f"{name} is {meta[name]!r}, wanted a {kind.__name__}"
    for name in ("report", "files"):
        if not isinstance(meta[name], dict):
            yield f"{name} is {meta[name]!r}, wanted a dict"
    yield from _wrong_report(meta)
    for name, value in meta["values"].items():
        if name in _STRUCTURE or name in meta["attributes"]:
            yield f"values.{name} is {str(value)[:80]}, but {name!r} has a file"
    for name, attr in meta["attributes"].items():
        yield from _wrong_attribute(name, attr, meta)
    for name, file in meta["files"].items():
        yield from _wrong_file(name, file)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _wrong_report(meta: Meta) -> Iterator[str]:
    yield from _wrong_counts("report", meta["report"], meta)
    before = meta["report"].get("before")
    if before is not None:
        if not isinstance(before, dict):
            yield f"report.before is {str(before)[:80]}, wanted a dict or null"
            return
        yield from _wrong_counts("report.before", before, meta)
        if before.get("before") is not None:
            yield "report.before has a report before it, wanted null"


def _wrong_counts(where: str, report: dict[str, Any], meta: Meta) -> Iterator[str]:
    parts = meta["num_parts"]
    for name in ("nodes", "edges", "train", "halo_rows", "send_rows"):
        counts = report[name]
        if not _are_counts(counts, parts):
            yield f"{where}.{name} is {str(counts)[:80]}, wanted {parts} counts"
    for name in ("nodes", "edges"):
        total = meta[f"num_{name}"]
        if sum(report[name]) != total:
            yield f"num_{name} is {total}, but {where} has {sum(report[name])}"
    known = {"nodes", "edges", "train", "edge_cut", "halo_rows", "send_rows", "before"}
    known |= {"grid", "blocks", "block_send", "block_halo"}
    if strange := set(report) - known:
        yield f"{where} has the unknown field {min(strange)!r}"
    cut = report["edge_cut"]
    if not _is_count(cut) or cut > meta["num_edges"]:
        yield f"{where}.edge_cut is {cut!r}, wanted at most {meta['num_edges']}"
    grid = report.get("grid", [])
    if grid != [] and not (_are_counts(grid, 3) and math.prod(grid) == parts):
        yield f"{where}.grid is {str(grid)[:80]}, wanted three counts of {parts} parts"
        return
    lengths = {0, grid[0] * grid[1]} if grid else {0}
    for name in ("blocks", "block_send", "block_halo"):
        counts = report.get(name, [])
        if not any(_are_counts(counts, length) for length in lengths):
            yield f"{where}.{name} is {str(counts)[:80]}, wanted {max(lengths)} counts"


def _are_counts(value: Any, length: int) -> bool:
    fits = isinstance(value, list) and len(value) == length
    return fits and all(map(_is_count, value))


def _wrong_attribute(name: str, attr: Any, meta: Meta) -> Iterator[str]:
    if not isinstance(attr, dict):
        yield f"attributes.{name} is {attr!r}, wanted a dict"
    kind, dtype, shape = attr["kind"], attr["dtype"], attr["shape"]
    if kind not in _KINDS:
        yield f"attributes.{name}.kind is {kind!r}, wanted one of {_KINDS}"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        yield f"attributes.{name}.dtype is {dtype!r}, wanted the name of a dtype"
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        yield f"attributes.{name}.shape is {shape!r}, wanted sizes of at least 0"
    rows = {"node": meta["num_nodes"], "edge": meta["num_edges"]}.get(kind)
    if rows is not None and shape[:1] != [rows]:
        yield f"attributes.{name}.shape is {shape}, wanted {rows} rows"


def _wrong_file(name: str, file: Any) -> Iterator[str]:
    steps = _BETWEEN.split(name)
    if any(step in ("", ".", "..") or ":" in step for step in steps):
        yield f"files names {name!r}, which is not inside the folder"
    if not isinstance(file, dict) or not _is_count(file["bytes"]):
        yield f"files.{name}.bytes is wrong: {file!r}"
    if not isinstance(file["sha256"], str) or not _SUM.fullmatch(file["sha256"]):
        yield f"files.{name}.sha256 is wrong: {file['sha256']!r}"
