"""Runs the command `pyg-distcomm plan`."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from pyg_distcomm.cli.numbers import count, seed, whole
from pyg_distcomm.comm.mesh import ALGORITHMS
from pyg_distcomm.datasets import load_dataset
from pyg_distcomm.partition.cutters import METHODS
from pyg_distcomm.partition.folder import read_part
from pyg_distcomm.partition.layout import folder_meta
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.partition.pyg_folder import (
    is_pyg_folder,
    read_pyg_folder,
    read_pyg_partition,
)
from pyg_distcomm.pipeline.schedule import BUBBLE
from pyg_distcomm.plan.degree_distribution import LAWS, RandomGraph
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.planner import plan
from pyg_distcomm.plan.training import INPUTS, KINDS

TEXT = "list every grid and ordering with predicted bytes, seconds and memory, ranked"
UNITS = {
    "bytes": {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    | {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12},
    # as tc writes them: bits, not bytes
    "bytes a second": {"": 1, "kbit": 125, "mbit": 125e3, "gbit": 125e6}
    | {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9},
    "seconds": {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the command takes."""
    parser.add_argument(
        "graph",
        nargs="?",
        help="a data set's name, digits, generated-N, a .pt or .npz file, or a folder of "
        "parts; left out with --nodes and --edges",
    )
    parser.add_argument("--nodes", type=count, help="of a graph known by its size")
    parser.add_argument("--edges", type=count, help="an undirected edge counts twice")
    parser.add_argument("--law", choices=LAWS, default="uniform", help="of its degrees")
    parser.add_argument("--ranks", type=whole(1), help="how many (a folder knows)")
    parser.add_argument(
        "--widths", type=whole(1), nargs="+", required=True, help="as 602 16 41"
    )
    parser.add_argument("--layers", nargs="+", choices=KINDS, default=["gcn"])
    parser.add_argument("--inputs", choices=INPUTS, default=INPUTS[0])
    parser.add_argument("--method", choices=METHODS, default="metis")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--root", default="data", help="where PyG keeps its data sets")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="only its grids")
    parser.add_argument(
        "--codec",
        action="append",
        default=[],
        help="plan for this one too, as '1 bit', 'bf16' or '4 bits late'; may be repeated",
    )
    parser.add_argument("--pipeline", action="store_true", help="layers in stages too")
    parser.add_argument("--chunks", type=whole(1), help="of nodes, through the stages")
    parser.add_argument(
        "--bubble", type=float, default=BUBBLE, help="share of turns stages may be idle"
    )
    parser.add_argument(
        "--skips", type=whole(0), default=0, help="values beside x at borders"
    )
    parser.add_argument("--machine", type=Path, help="figures, saved by Machine.save")
    parser.add_argument("--memory", help="of a rank, as 24GiB")
    parser.add_argument("--bandwidth", help="of a rank's link, as 1gbit or 100MB/s")
    parser.add_argument("--latency", help="of a message, as 50us")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plans; returns 0, or 1 if none can be run."""
    graph, owners = _graph(arguments)
    ranks = arguments.ranks
    if ranks is None and owners is not None:
        ranks = owners.num_parts
    layers = arguments.layers
    found = plan(
        graph,
        arguments.widths,
        ranks,
        layers=layers[0] if len(layers) == 1 else layers,
        inputs=arguments.inputs,
        machine=_machine(arguments),
        partition=arguments.method if owners is None else owners,
        seed=arguments.seed,
        algorithm=arguments.algorithm,
        codecs=arguments.codec,
        pipeline=arguments.pipeline,
        chunks=arguments.chunks,
        bubble=arguments.bubble,
        skips=arguments.skips,
    )
    print(found.to_json() if arguments.json else found)
    return 0 if found else 1


def _graph(arguments: argparse.Namespace) -> tuple[Any, Partition | None]:
    given = arguments.graph, arguments.nodes, arguments.edges
    sizes = [value is not None for value in given[1:]]
    if (given[0] is None) != all(sizes) or (given[0] is not None and any(sizes)):
        raise ValueError("plan takes either a graph, or --nodes N and --edges M")
    if given[0] is None:
        return RandomGraph(arguments.nodes, arguments.edges, arguments.law), None
    if Path(given[0]).is_dir():
        return read_edges(Path(given[0]))
    return load_dataset(given[0], arguments.root), None


def read_edges(folder: Path) -> tuple[Data, Partition]:
    """Returns all edges of a folder of parts, and who owns which node.

    Of the features, only how many there are, of which dtype.
    """
    if is_pyg_folder(folder):
        partition = read_pyg_partition(folder)
        parts = [read_pyg_folder(folder, k) for k in range(partition.num_parts)]
    else:
        count = int(folder_meta(folder)["num_parts"])
        parts = [read_part(folder, part) for part in range(count)]
        partition = parts[0].partition
    data = Data(edge_index=torch.cat([part.edge_index for part in parts], 1))
    data.num_nodes = partition.num_nodes
    x = parts[0].node.get("x")
    if x is not None:
        data.x = x.new_empty(1).expand(partition.num_nodes, *x.shape[1:])
    return data, partition


def _machine(arguments: argparse.Namespace) -> Machine:
    given = {
        "memory": _value(arguments.memory, "bytes", "--memory"),
        "bandwidth": _value(arguments.bandwidth, "bytes a second", "--bandwidth"),
        "latency": _value(arguments.latency, "seconds", "--latency"),
    }
    given = {name: value for name, value in given.items() if value is not None}
    machine = (
        Machine() if arguments.machine is None else Machine.load(arguments.machine)
    )
    if {"bandwidth", "latency"} & set(given):
        machine = replace(
            machine, lines={}, sums=None, source=f"{machine.source}, link given"
        )
    return replace(machine, **given)  # type: ignore[arg-type]


def _value(text: str | None, kind: str, option: str) -> float | None:
    if text is None:
        return None
    units = UNITS[kind]
    match = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-z/]*)", text.lower())
    if match is None or match[2] not in units:
        names = ", ".join(unit for unit in units if unit)
        raise ValueError(
            f"{option}={text!r} is no number of {kind}, with {names}, if any"
        )
    return float(match[1]) * units[match[2]]
