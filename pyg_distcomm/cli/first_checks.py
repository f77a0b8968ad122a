"""Checks names and paths of a command before torch is loaded, and suggests what was meant."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable
from pathlib import Path

GRAPHS = ("digits", "generated-NODES")  # what `datasets` makes
TEXT = (".txt", ".csv", ".tsv", ".el", ".edges", ".edgelist", ".gz")
FILES = (*TEXT, ".pt", ".npy", ".npz", ".parquet", ".arrow", ".feather")
SHOWN = 4  # names of a folder in a message
# what a partition, a run of pdc.metrics, and a checkpoint hold
META, PART, RUN, MARK = "META.json", "part_*", "run.json", ".pyg_distcomm.json"
KINDS = {"checkpoint": "checkpoint", "pipeline": "saved pipeline"}


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Returns " (did you mean X?)" for the nearest known name, or "" if none is near."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given.lower(), names, n=1)
    return f" (did you mean {names[near[0]]!r}?)" if near else ""


def check_partition(arguments: argparse.Namespace) -> None:
    """Raises ValueError if the graph is unknown, a file is missing, or `out` exists."""
    given = [one.partition("=")[2] for one in arguments.node_file + arguments.edge_file]
    for file in (*given, arguments.node_table):
        if file and not Path(file).is_file():
            raise ValueError(f"{file}: missing")
    if arguments.out.exists() and not arguments.force:
        raise ValueError(f"{arguments.out}: exists already; give --force to replace it")
    name = arguments.dataset
    path = Path(name)
    if path.is_file():
        return
    made = name.lower()
    if made == "digits" or (made.startswith("generated-") and made[10:].isdecimal()):
        return
    if path.is_dir():
        raise ValueError(f"{name}: is a folder; give a file of edges, or a .pt")
    if path.suffix.lower() in FILES:
        raise ValueError(f"{name}: missing; give the path of a file of edges or a .pt")
    raise ValueError(
        f"unknown graph {name!r}{did_you_mean(name, GRAPHS)}; give the path of a file of edges "
        f"(.txt, .csv, .npy, .npz, .parquet) or of a Data (.pt: torch.save(dataset[0], "
        f"'graph.pt')), or one of {', '.join(GRAPHS)}"
    )


def check_inspect(arguments: argparse.Namespace) -> None:
    """Raises ValueError, saying what the path is, if it is no partition folder."""
    if not _holds_parts(arguments.folder):
        raise ValueError(f"{arguments.folder}: {describe(arguments.folder)}")


def check_report(arguments: argparse.Namespace) -> None:
    """Raises ValueError, saying what the path is, if it is no run, or `out` is a folder."""
    run, out = arguments.run, arguments.out
    if not run.exists():
        raise ValueError(f"{run}: does not exist; give the folder of pdc.metrics")
    if run.is_file():
        raise ValueError(
            f"{run}: is a file, not the folder of pdc.metrics; open a file of pdc.trace in "
            "https://ui.perfetto.dev"
        )
    if _holds_parts(run):
        raise ValueError(
            f"{run}: holds parts, not a run; `pyg-distcomm inspect {run}` shows their figures"
        )
    if not (run / RUN).is_file():
        raise ValueError(
            f"{run}: is not a folder of pdc.metrics (it has no {RUN}); record a run by "
            f"run = pdc.metrics({str(run)!r}, mesh) and run.epoch(...)"
        )
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; give a file, as -o report.html")


def describe(path: Path) -> str:
    """Says what is at a path where a partition folder was wanted, and what to do."""
    cut = "; write one by `pyg-distcomm partition GRAPH parts --parts 2`"
    if not path.exists():
        return f"does not exist, but should be a partition folder{cut}"
    if not path.is_dir():
        return f"is a file, not a partition folder{cut}"
    if (path / RUN).is_file():
        return f"is a run of pdc.metrics; draw it by `pyg-distcomm report {path}`"
    mark = path / MARK
    if mark.is_file():
        return f"is a {_kind(mark)} of pyg_distcomm, not a partition folder{cut}"
    names = sorted(one.name for one in path.iterdir())
    if not names:
        return f"is an empty folder{cut}"
    inner = [name for name in names if (path / name / META).is_file()]
    if inner:
        return f"is not a partition folder, but holds one; give {path / inner[0]}"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    held = ", ".join(names[:SHOWN]) + more
    return f"is not a partition folder (no {META}; it holds {held}){cut}"


def _holds_parts(folder: Path) -> bool:
    return (folder / META).exists() or any(folder.glob(PART))


def _kind(mark: Path) -> str:
    try:
        kind = json.loads(mark.read_text()).get("kind")
    except (ValueError, AttributeError, OSError):
        kind = None
    return KINDS.get(kind, "checkpoint")
