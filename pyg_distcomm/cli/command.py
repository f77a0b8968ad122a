"""Parses and runs the command `pyg-distcomm`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from pyg_distcomm import kernels
from pyg_distcomm.cli import bench, doctor, plan
from pyg_distcomm.cli.numbers import seed, whole
from pyg_distcomm.datasets import is_known, load_dataset
from pyg_distcomm.partition.cutters import cut, known_methods
from pyg_distcomm.partition.dgl_folder import (
    is_dgl_folder,
    read_dgl_folder,
    read_dgl_partition,
)
from pyg_distcomm.partition.external import partition_files
from pyg_distcomm.partition.folder import PartShare, verify_folder, write_folder
from pyg_distcomm.partition.layout import Meta, folder_meta
from pyg_distcomm.partition.partition import Partition, PartitionReport
from pyg_distcomm.partition.pyg_folder import (
    is_pyg_folder,
    read_pyg_folder,
    read_pyg_partition,
)
from pyg_distcomm.partition.sources import is_source

PARTITIONER = "torch_geometric.distributed.Partitioner"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, 1 for a faulty folder, or 2 for a user's error."""
    try:
        arguments = _parser().parse_args(argv)
        with _cleaning_up():
            code: int = arguments.run(arguments)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"pyg-distcomm: error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"pyg-distcomm: error: not enough memory: {error}", file=sys.stderr)
        return 2
    return code


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """Lets SIGTERM end the command as an error does: what is half written goes."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main one may handle signals
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _terminated(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _parser() -> _Parser:
    parser = _Parser(prog="pyg-distcomm", description="Distributed full-graph training")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    # each command is one function that adds its arguments and sets `run`
    for add in (_add_partition, _add_inspect, _add_plan, _add_doctor, _add_bench):
        add(commands)
    return parser


def _add_partition(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "cut a graph and write its parts to a folder"
    parser = commands.add_parser("partition", help=text, description=text)
    parser.add_argument(
        "dataset",
        help="a data set's name (of PyG's, ogbn-arxiv, digits, generated-N), a .pt file; or "
        "files of any size: an edge list (.txt, .csv, .tsv; .gz), a table (.parquet, "
        ".arrow), .npy, .npz, a folder of OGB's",
    )
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--parts", type=whole(1), required=True, help="how many")
    parser.add_argument(
        "--method",
        choices=known_methods(),
        default="metis",
        help="metis and ldg need all edges in memory, stream only the nodes",
    )
    parser.add_argument(
        "--refine",
        action="store_true",
        help="lower what the busiest rank sends and receives (edges in memory)",
    )
    parser.add_argument(
        "--grid",
        type=whole(1),
        nargs=3,
        metavar=("R", "S", "P"),
        help="the ranks it is for: figures of its blocks, --method permutation or grid",
    )
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--root", default="data", help="where PyG keeps its data sets")
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
        "--node-table", type=Path, help="of the nodes: .parquet, .arrow"
    )
    parser.add_argument(
        "--num-nodes", type=whole(0), help="of files, where ids do not tell"
    )
    parser.add_argument(
        "--undirected", action="store_true", help="edges in files go both ways"
    )
    parser.add_argument("--split", help="which folder of split/ in an OGB-style folder")
    parser.add_argument("--force", action="store_true", help="replace such a folder")
    parser.add_argument(
        "--checksums", action="store_true", help="read all back and compare"
    )
    parser.set_defaults(run=_partition)


def _add_inspect(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "show and check a partition folder; exit with 1 when something is wrong"
    parser = commands.add_parser("inspect", help=text, description=text)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--checksums",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare the contents of every file too",
    )
    parser.set_defaults(run=_inspect)


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("plan", help=plan.TEXT, description=plan.TEXT)
    plan.add_arguments(parser)
    parser.set_defaults(run=plan.run)


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "look at this machine: what is there, what is missing; exit with 1 if needed"
    parser = commands.add_parser("doctor", help=text, description=text)
    parser.set_defaults(run=lambda _: doctor.run())


def _add_bench(commands: argparse._SubParsersAction[_Parser]) -> None:
    text = "time the sparse product and a GCN epoch beside other implementations"
    parser = commands.add_parser("bench", help=text, description=text)
    parser.add_argument(
        "--scale", type=whole(1, 30), default=16, help="2^N nodes, 16 edges each"
    )
    parser.add_argument("--widths", type=whole(1), nargs="+", default=[16, 64, 256])
    parser.add_argument("--threads", type=whole(1), nargs="+", default=[1])
    parser.add_argument("--repeats", type=whole(1), default=5)
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    widths, threads = arguments.widths, arguments.threads
    repeats, scale = arguments.repeats, arguments.scale
    about = ", ".join(f"{name} {value}" for name, value in kernels.describe().items())
    print(f"torch {torch.__version__}; {about}\n\nCSR times dense rows, float32; ")
    print("other columns are times over ours\n")
    print(bench.table(bench.run(widths, threads, scale, repeats)))
    for count in threads:
        print(f"\nAn epoch of a 2-layer GCN, 2^{scale} nodes, {count} thread(s)\n")
        with bench.using_threads(count):
            print(bench.run_gcn(1 << scale, tuple(widths), repeats))
    return 0


def _partition(arguments: argparse.Namespace) -> int:
    if arguments.out.exists() and not arguments.force:
        raise ValueError(f"{arguments.out}: exists already; give --force to replace it")
    in_files = is_source(arguments.dataset) and not is_known(arguments.dataset)
    figures = _from_files(arguments) if in_files else _from_memory(arguments)
    print(figures)
    return _say(verify_folder(arguments.out) if arguments.checksums else [])


def _from_files(arguments: argparse.Namespace) -> PartitionReport:
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
        split=arguments.split,
        node_files=_named_files("--node-file", arguments.node_file),
        edge_files=_named_files("--edge-file", arguments.edge_file),
        node_table=arguments.node_table,
        node_attrs=arguments.node_attr,
        edge_attrs=arguments.edge_attr,
        force=arguments.force,
    )


def _from_memory(arguments: argparse.Namespace) -> PartitionReport:
    only = ("num_nodes", "undirected", "split", "node_file", "edge_file", "node_table")
    given = [f"--{name.replace('_', '-')}" for name in only if getattr(arguments, name)]
    if given:
        raise ValueError(
            f"{', '.join(given)}: for edges in files, not for {arguments.dataset!r}"
        )
    data = load_dataset(arguments.dataset, arguments.root)
    mask = data.get("train_mask")
    partition = cut(
        data.edge_index,
        data.num_nodes,
        arguments.parts,
        arguments.method,
        seed=arguments.seed,
        train_mask=mask if mask is not None and mask.dim() == 1 else None,
        refine=arguments.refine,
        grid=arguments.grid,
    )
    return write_folder(
        arguments.out,
        data,
        partition,
        node_attrs=arguments.node_attr,
        edge_attrs=arguments.edge_attr,
        grid=arguments.grid,
        force=arguments.force,
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


def _inspect(arguments: argparse.Namespace) -> int:
    folder = arguments.folder
    if is_dgl_folder(folder):
        partition = read_dgl_partition(folder)
        return _inspect_foreign(
            "dgl.distributed.partition_graph", folder, partition, read_dgl_folder
        )
    if not folder.is_dir():
        raise ValueError(f"{folder}: is not a folder")
    if is_pyg_folder(folder):
        wrote, partition = PARTITIONER, read_pyg_partition(folder)
        return _inspect_foreign(wrote, folder, partition, read_pyg_folder)
    problems = verify_folder(folder, checksums=arguments.checksums)
    with contextlib.suppress(ValueError):  # then it is the first of the problems
        print("\n".join(_describe(folder_meta(folder))))
    return _say(problems) or _whole(arguments.checksums)


def _inspect_foreign(
    wrote: str,
    folder: Path,
    partition: Partition,
    read: Callable[[Path, int], PartShare],
) -> int:
    """Shows a folder that another library wrote, part by part."""
    print(f"format      {wrote}, homogeneous")
    print(f"partition   {partition}")
    problems = []
    for part in range(partition.num_parts):
        try:
            print(read(folder, part))
        except ValueError as error:
            problems.append(str(error))
    return _say(problems)


def _describe(meta: Meta) -> list[str]:
    lines = [
        f"format      {meta['format']}, version {meta['version']}",
        f"graph       {meta['num_nodes']:,} nodes, {meta['num_edges']:,} edges",
        f"partition   {meta['num_parts']} parts, sha256 {meta['partition'][:16]}",
        f"on disk     {sum(file['bytes'] for file in meta['files'].values()):,} bytes",
    ]
    for name, attr in meta["attributes"].items():
        lines.append(f"{attr['kind']:<11} {name} {attr['dtype']} {attr['shape']}")
    lines += [
        f"value       {name} = {value!r}" for name, value in meta["values"].items()
    ]
    return [*lines, str(PartitionReport.from_dict(meta["report"]))]


def _say(problems: list[str]) -> int:
    for problem in problems:
        print(f"pyg-distcomm: wrong: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _whole(checksums: bool) -> int:
    print("whole       yes" if checksums else "whole       yes (contents not compared)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
