"""Runs the command `pyg-distcomm report`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pyg_distcomm.partition.layout import is_folder
from pyg_distcomm.watch.metrics import read_run, write_text
from pyg_distcomm.watch.page import render


def run_report(arguments: argparse.Namespace) -> int:
    """Writes the page; returns 0."""
    run, out = arguments.run, arguments.out
    if not run.exists():
        raise ValueError(f"{run}: does not exist; give the folder of pdc.metrics")
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; give a file, as -o report.html")
    found: dict[str, Any] = {"run": str(run), "out": str(out)}
    if run.is_file():
        raise ValueError(
            f"{run}: is a file, not the folder of pdc.metrics; open a file of pdc.trace in "
            "https://ui.perfetto.dev"
        )
    if is_folder(run):
        raise ValueError(
            f"{run}: holds parts, not a run; `pyg-distcomm inspect {run}` shows their figures"
        )
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
