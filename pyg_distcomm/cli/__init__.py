"""Parses the command `pyg-distcomm`, and runs the module of its subcommand.

Only the standard library is loaded until a subcommand runs: see [Note: late imports].

[Note: late imports] Torch and PyG take seconds to load, and neither `--help` nor a mistyped
name should wait for them. So this module declares the arguments of all subcommands,
looks at names and paths, suggests what was meant, and only then `main` imports the module of
the subcommand by its name.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pyg_distcomm import plugins

__all__ = ["main"]

GRAPHS = ("digits", "generated-NODES")  # what `datasets` makes
TEXT = (".txt", ".csv", ".tsv", ".el", ".edges", ".edgelist", ".gz")
FILES = (*TEXT, ".pt", ".npy", ".npz", ".parquet", ".arrow", ".feather")
SHOWN = 4  # names of a folder in a message
# what a partition, a run of pdc.metrics, and a checkpoint hold
META, PART, RUN, MARK = "META.json", "part_*", "run.json", ".pyg_distcomm.json"


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
        cut = "write one by `pyg-distcomm partition GRAPH parts --parts 2`"
        found = describe(arguments.folder, META, "a partition folder", cut)
        raise ValueError(f"{arguments.folder}: {found}")


def check_report(arguments: argparse.Namespace) -> None:
    """Raises ValueError, saying what the path is, if it is no run, or `out` is a folder."""
    run, out = arguments.run, arguments.out
    if not (run / RUN).is_file():
        record = (
            f"record a run by run = pdc.metrics({str(run)!r}, mesh) and run.epoch(...); a file "
            "of pdc.trace is opened in https://ui.perfetto.dev"
        )
        found = describe(run, RUN, "a folder of pdc.metrics", record)
        raise ValueError(f"{run}: {found}")
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; give a file, as -o report.html")


def describe(path: Path, file: str, wanted: str, advice: str) -> str:
    """Says what is at a path where a folder with a file was wanted, and what to do."""
    if not path.exists():
        return f"does not exist, but should be {wanted}; {advice}"
    if not path.is_dir():
        return f"is a file, not {wanted}; {advice}"
    if (path / RUN).is_file():
        return f"is a run of pdc.metrics; draw it by `pyg-distcomm report {path}`"
    if _holds_parts(path):
        return f"is a partition folder; `pyg-distcomm inspect {path}` shows its figures"
    if (path / MARK).is_file():
        return f"is a checkpoint of pyg_distcomm, not {wanted}; {advice}"
    names = sorted(one.name for one in path.iterdir())
    if not names:
        return f"is an empty folder; {advice}"
    inner = [name for name in names if (path / name / file).is_file()]
    if inner:
        return f"is not {wanted}, but holds one; give {path / inner[0]}"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    held = ", ".join(names[:SHOWN]) + more
    return f"is not {wanted} (no {file}; it holds {held}); {advice}"


def _holds_parts(folder: Path) -> bool:
    return (folder / META).exists() or any(folder.glob(PART))


MOST_SEED = 2**63 - 1


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns an argparse type for whole numbers from `least` to `most`."""
    span = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(
                f"got {text!r}, wanted a whole number {span}"
            )
        return value

    return read


seed = whole_number(0, MOST_SEED)


METHODS = "block, random, ldg, metis, grid, stream"


def method(text: str) -> str:
    """Reads the name of a cutter, of this package or of a plugin."""
    known = [*METHODS.split(", "), *plugins.registered(plugins.CUTTERS)]
    if text not in known:
        near = did_you_mean(text, known)
        raise argparse.ArgumentTypeError(
            f"got {text!r}{near}, wanted one of {', '.join(known)}"
        )
    return text


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as a ValueError, with the nearest name that there is."""

    def add_argument(self, *names: Any, **options: Any) -> Any:
        self.options = [*getattr(self, "options", ()), *map(str, names)]
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        near = self._suggestion(message)
        raise ValueError(f"{message}{near}; see {self.prog} --help")

    def _suggestion(self, message: str) -> str:
        choice = re.match(r".*invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice is not None:
            known = re.findall(r"[\w-]+", choice[2])
            return did_you_mean(choice[1], known)
        options = [name for name in self.options if name.startswith("--")]
        for word in (one.partition("=")[0] for one in self._given):
            name = word.replace("--no-", "--", 1)
            if name[:2] == "--" and not any(one.startswith(name) for one in options):
                near = did_you_mean(word, options)
                return near if word in message else f"; unknown: {word}{near}"
        return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pyg-distcomm`; returns 0, or 1 if it found problems, or 2 for an error."""
    try:
        arguments = _parser().parse_args(argv)
        if arguments.check is not None:
            arguments.check(arguments)
        with _exit_on_sigterm():
            with showing("loading torch"):
                verb = import_module(f"pyg_distcomm.cli.{arguments.module}")
            code: int = getattr(verb, f"run_{arguments.verb}")(arguments)
            sys.stdout.flush()
    except BrokenPipeError:  # as in `--json | head`: the reader has what it wanted
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        full = "not enough memory: " if isinstance(error, MemoryError) else ""
        print(f"pyg-distcomm: error: {full}{error}", file=sys.stderr)
        return 2
    return code


def showing(what: str) -> Any:
    """Shows on a terminal what the command does meanwhile, by tqdm; nothing elsewhere."""
    tqdm = import_module("tqdm").tqdm
    return tqdm(desc=what, bar_format="{desc} ...", disable=None, leave=False)


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the command like an error, so that half-written files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _parser() -> _Parser:
    version = import_module("pyg_distcomm").__version__
    parser = _Parser(prog="pyg-distcomm", description="Distributed full-graph training")
    parser.add_argument(
        "--version", action="version", version=f"pyg-distcomm {version}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_partition, _inspect, _report):  # each the parser of one subcommand
        add(commands)
    text = "check this machine and its packages; exit with 1 if the package cannot run"
    _verb(commands, "doctor", text, "doctor")
    return parser


def _verb(
    commands: Any, name: str, text: str, module: str, check: Any = None
) -> _Parser:
    """Adds a subcommand, which the function `run_NAME` of a module of this package runs.

    `check` raises ValueError for arguments that are wrong, before that module is imported.
    """
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON, not text")
    parser.set_defaults(module=module, verb=name, check=check)
    return parser


def _partition(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "cut a graph and write its parts to a folder"
    parser = _verb(commands, "partition", text, "folders", check_partition)
    parser.add_argument(
        "dataset",
        help="a .pt or .npz file of a graph; edges of any number: as text or a table (.txt, "
        ".csv, .tsv; .gz; .parquet, .arrow), or .npy; or, to try it, digits or generated-N",
    )
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument(
        "--parts", type=whole_number(1), required=True, help="the number of parts"
    )
    parser.add_argument(
        "--method",
        type=method,
        metavar="METHOD",
        default="metis",
        help=f"{METHODS}; all but stream need the edges in memory",
    )
    parser.add_argument(
        "--refine",
        action="store_true",
        help="lower the rows that the busiest rank exchanges (edges in memory)",
    )
    parser.add_argument(
        "--grid",
        type=whole_number(1),
        nargs=3,
        metavar=("R", "S", "P"),
        help="the grid of ranks: for figures of its blocks, --method grid",
    )
    parser.add_argument("--seed", type=seed, default=0)
    _add_file_options(parser)
    parser.add_argument(
        "--force", action="store_true", help="replace an existing partition folder"
    )
    parser.add_argument(
        "--checksums", action="store_true", help="read all files back and compare"
    )


def _add_file_options(parser: _Parser) -> None:
    """Adds the options of attributes and of graphs in files."""
    for kind in ("node", "edge"):
        parser.add_argument(
            f"--{kind}-attr",
            action="append",
            default=[],
            metavar="NAME",
            help=f"declare an attribute to be of the {kind}s",
        )
        parser.add_argument(
            f"--{kind}-file",
            action="append",
            default=[],
            metavar="NAME=FILE.npy",
            help=f"add an attribute of the {kind}s from a file",
        )
    parser.add_argument(
        "--node-table", type=Path, help="a table of the nodes: .parquet, .arrow"
    )
    parser.add_argument(
        "--num-nodes",
        type=whole_number(0),
        help="the number of nodes in files, if ids do not tell it",
    )
    parser.add_argument(
        "--undirected",
        action="store_true",
        help="add the reverse of each edge in files",
    )


def _inspect(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "show and check a partition folder; exit with 1 if it is damaged"
    parser = _verb(commands, "inspect", text, "folders", check_inspect)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--checksums",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the contents of every file too",
    )


def _report(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "draw a run that pdc.metrics recorded as one HTML page"
    parser = _verb(commands, "report", text, "folders", check_report)
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the folder of pdc.metrics"
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), help="the page to write"
    )
