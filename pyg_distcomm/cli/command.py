"""Parses the command `pyg-distcomm`, and runs the module of its subcommand.

Only the standard library is loaded until a subcommand runs: see [Note: late imports].

[Note: late imports] Torch and PyG take seconds to load, and `--help` should not wait for them.
So this module declares the arguments of all subcommands, `method` imports the cutters when it
reads the name of one, and `main` imports the module of the subcommand by its name.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

MOST_SEED = 2**63 - 1


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns an argparse type for whole numbers from `least` to `most`."""
    end = "" if most is None else f" to {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(
                f"got {text!r}, wanted a whole number from {least}{end or ' on'}"
            )
        return value

    return read


seed = whole_number(0, MOST_SEED)


def method(text: str) -> str:
    """Reads the name of a cutter; the cutters are imported for this, not for `--help`."""
    known: Sequence[str] = import_module(
        "pyg_distcomm.partition.cutters"
    ).known_methods()
    if text not in known:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted one of {', '.join(known)}"
        )
    return text


METHODS = "block, random, ldg, metis, grid, stream"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, or 1 if it found problems, or 2 for an error."""
    try:
        arguments = _parser().parse_args(argv)
        with _exit_on_sigterm():
            verb = import_module(f"pyg_distcomm.cli.{arguments.module}")
            code: int = getattr(verb, arguments.function)(arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"pyg-distcomm: error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"pyg-distcomm: error: not enough memory: {error}", file=sys.stderr)
        return 2
    return code


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the command like an error, so that half-written files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _terminated(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _version() -> str:
    version: str = import_module("pyg_distcomm").__version__
    return version


def _parser() -> _Parser:
    parser = _Parser(prog="pyg-distcomm", description="Distributed full-graph training")
    parser.add_argument(
        "--version", action="version", version=f"pyg-distcomm {_version()}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # each function adds the parser of one subcommand
    verbs = _partition, _inspect, _report, _doctor
    for add in verbs:
        add(commands)
    return parser


def _verb(
    commands: argparse._SubParsersAction[_Parser], name: str, text: str, module: str
) -> _Parser:
    """Adds a subcommand, which the function `run_NAME` of a module of this package runs."""
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON, not text")
    parser.set_defaults(module=module, function=f"run_{name}")
    return parser


def _partition(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "cut a graph and write its parts to a folder"
    parser = _verb(commands, "partition", text, "folders")
    parser.add_argument(
        "dataset",
        help="a data set's name (of PyG's, ogbn-arxiv, digits, generated-N), a .pt or .npz "
        "file; or edges of any number: as text or a table (.txt, .csv, .tsv; .gz; .parquet, "
        ".arrow), or .npy",
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
    parser.add_argument("--root", default="data", help="the folder of PyG's data sets")
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
    parser = _verb(commands, "inspect", text, "folders")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--checksums",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the contents of every file too",
    )


def _report(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "draw a run that pdc.metrics recorded as one HTML page"
    parser = _verb(commands, "report", text, "folders")
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="the folder of pdc.metrics",
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), help="the page to write"
    )


def _doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "check this machine and its packages; exit with 1 if the package cannot run"
    _verb(commands, "doctor", text, "doctor")
