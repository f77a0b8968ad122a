"""Runs the command `pyg-distcomm report`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pyg_distcomm.partition.folder import read_part
from pyg_distcomm.partition.layout import folder_meta, is_folder
from pyg_distcomm.partition.partition import PartitionReport
from pyg_distcomm.watch.metrics import read_run, write_text
from pyg_distcomm.watch.page import render

MOST_PARTS = 64  # the most parts for which the rows of each pair are counted


def run_report(arguments: argparse.Namespace) -> int:
    """Writes the page; returns 0."""
    run, out = arguments.run, arguments.out
    if not run.exists():
        raise ValueError(f"{run}: does not exist; give the folder of pdc.metrics")
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; give a file, as -o report.html")
    found: dict[str, Any] = {"run": str(run), "out": str(out)}
    title = run.resolve().name
    if run.is_file():
        raise ValueError(
            f"{run}: is a file, not the folder of pdc.metrics; open a file of pdc.trace in "
            "https://ui.perfetto.dev"
        )
    if is_folder(run):
        figures = PartitionReport.from_dict(folder_meta(run)["report"])
        page = render(title, partition=figures, rows=_rows(run))
    else:
        recorded = read_run(run)
        page = render(title, recorded)
        found |= {"epochs": len(recorded.rows), "starts": len(recorded.about["starts"])}
        found |= {"last": recorded.rows[-1] if recorded.rows else None}
    write_text(out, page)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{out}: {len(page.encode()):,} bytes; open it in a browser")
    return 0


def _rows(folder: Path) -> list[list[int]]:
    """Counts the rows that each part of a partition folder sends to each other part."""
    parts = int(folder_meta(folder)["num_parts"])
    if parts > MOST_PARTS:
        return []
    sent = []
    for part in tqdm(range(parts), "counting rows", disable=None, leave=False):
        share = read_part(folder, part, verify="sizes")
        counts = torch.zeros(parts, dtype=torch.int64)
        for source in share.sources():
            owner = share.partition.owner_of(torch.unique(source))
            counts += torch.bincount(owner, minlength=parts)
        counts[part] = 0
        sent.append(counts.tolist())
    return [list(column) for column in zip(*sent, strict=True)]
