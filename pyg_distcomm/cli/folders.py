"""Runs the commands on folders: `pyg-distcomm partition`, `inspect` and `report`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_geometric.data import HeteroData

from pyg_distcomm.cli import showing
from pyg_distcomm.datasets import load_dataset
from pyg_distcomm.partition.external import is_source, partition_files
from pyg_distcomm.partition.folder import verify_folder, write_folder
from pyg_distcomm.partition.layout import Meta, folder_meta
from pyg_distcomm.partition.part_share import (
    GraphTypes,
    check_hetero,
    cut_graph,
    types_from_meta,
)
from pyg_distcomm.partition.partition import PartitionReport, imbalance
from pyg_distcomm.watch.metrics import read_run, write_text
from pyg_distcomm.watch.page import render


def run_partition(arguments: argparse.Namespace) -> int:
    """Runs the command `pyg-distcomm partition`."""
    out, parts = arguments.out, arguments.parts
    read = _from_files if is_source(arguments.dataset) else _from_memory
    with showing(f"cutting {arguments.dataset} into {parts} parts"):
        figures = read(arguments)
    problems = verify_folder(out) if arguments.checksums else []
    if arguments.json:
        return _as_json(problems, out=str(out), report=asdict(figures))
    print(figures)
    cut = figures.edge_cut / max(sum(figures.edges), 1)
    print(
        f"wrote {out}/ ({parts} part{'s' * (parts > 1)}, {cut:.0%} of edges cut). Next: "
        f"pdc.load_partition({str(out)!r}) in train.py, then torchrun --nproc-per-node "
        f"{parts} train.py"
    )
    return _print_problems(problems)


def _from_files(arguments: argparse.Namespace) -> PartitionReport:
    _refuse(
        arguments,
        ("node_attr", "edge_attr"),
        "whose attributes --node-file and --edge-file name",
    )
    return partition_files(
        arguments.dataset,
        arguments.out,
        arguments.parts,
        arguments.method,
        seed=arguments.seed,
        refine=arguments.refine,
        grid=arguments.grid,
        num_nodes=arguments.num_nodes,
        undirected=arguments.undirected,
        node_files=_named_files("--node-file", arguments.node_file),
        edge_files=_named_files("--edge-file", arguments.edge_file),
        node_table=arguments.node_table,
        force=arguments.force,
    )


def _from_memory(arguments: argparse.Namespace) -> PartitionReport:
    only = ("num_nodes", "undirected", "node_file", "edge_file", "node_table")
    _refuse(arguments, only, "wanted edges in files")
    data = load_dataset(arguments.dataset, hetero=True)
    if isinstance(data, HeteroData):
        check_hetero(data)
    how = arguments.seed, arguments.refine, arguments.grid
    return write_folder(
        arguments.out,
        data,
        cut_graph(data, arguments.parts, arguments.method, *how),
        node_attrs=arguments.node_attr,
        edge_attrs=arguments.edge_attr,
        grid=arguments.grid,
        force=arguments.force,
    )


def _refuse(arguments: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raises ValueError for options that are not for such a graph."""
    given = [f"--{n.replace('_', '-')}" for n in names if getattr(arguments, n)]
    if given:
        raise ValueError(
            f"{', '.join(given)}: got the graph {arguments.dataset!r}, {why}; leave these "
            "options out"
        )


def _named_files(option: str, given: list[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for text in given:
        name, _, file = text.partition("=")
        if not name or not file:
            raise ValueError(f"{option}: got {text!r}, wanted NAME=FILE.npy")
        if name in files:
            raise ValueError(
                f"{option}: got two files for {name!r}, {files[name]} and {file}; leave "
                "one out, or give it another name"
            )
        files[name] = Path(file)
    return files


def run_inspect(arguments: argparse.Namespace) -> int:
    """Runs the command `pyg-distcomm inspect`."""
    folder = arguments.folder
    problems = verify_folder(folder, checksums=arguments.checksums)
    if arguments.json:
        meta: Meta = {}
        with contextlib.suppress(ValueError):
            meta = folder_meta(folder)
        return _as_json(problems, contents_compared=arguments.checksums, **meta)
    with contextlib.suppress(ValueError):  # then it is the first of the problems
        print("\n".join(_describe(folder_meta(folder))))
    if not problems:
        compared = "" if arguments.checksums else " (contents not compared)"
        print(f"whole       yes{compared}")
    return _print_problems(problems)


def _describe(meta: Meta) -> list[str]:
    lines = [
        f"format      {meta['format']}, version {meta['version']}",
        f"graph       {meta['num_nodes']:,} nodes, {meta['num_edges']:,} edges",
        f"partition   {meta['num_parts']} parts, sha256 {meta['partition'][:16]}",
        f"on disk     {sum(file['bytes'] for file in meta['files'].values()):,} bytes",
    ]
    for name, attr in meta["attributes"].items():
        lines.append(f"{attr['kind']:<11} {name} {attr['dtype']} {attr['shape']}")
    types = types_from_meta(meta)
    lines += _describe_types(types) if types.typed else []
    lines += [
        f"value       {name} = {value!r}" for name, value in meta["values"].items()
    ]
    return [*lines, str(PartitionReport.from_dict(meta["report"]))]


def _describe_types(types: GraphTypes) -> Iterator[str]:
    for name, counts in types.nodes.items():
        spread = f"max/mean {imbalance(counts):.3f}"
        yield f"node type   {name}: {sum(counts):,} nodes, {spread}"
    for kind, counts in types.edges.items():
        spread, rows = f"max/mean {imbalance(counts):.3f}", sum(types.halo[kind])
        yield (
            f"edge type   {' '.join(kind)}: {sum(counts):,} edges, {spread}, {rows:,} "
            "halo rows"
        )


def run_report(arguments: argparse.Namespace) -> int:
    """Writes the page; returns 0."""
    run, out = arguments.run, arguments.out
    found: dict[str, Any] = {"run": str(run), "out": str(out)}
    recorded = read_run(run)
    page = render(run.resolve().name, recorded)
    found |= {"epochs": len(recorded.rows), "starts": len(recorded.about["starts"])}
    found |= {"last": recorded.rows[-1] if recorded.rows else None}
    write_text(out, page)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{out}: {len(page.encode()):,} bytes; open it in a browser")
    return 0


def _print_problems(problems: list[str]) -> int:
    for problem in problems:
        print(f"pyg-distcomm: wrong: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _as_json(problems: list[str], **found: Any) -> int:
    print(json.dumps({"whole": not problems, "problems": problems, **found}, indent=1))
    return 1 if problems else 0
