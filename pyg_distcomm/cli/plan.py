"""Runs the command `pyg-distcomm plan`."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from pyg_distcomm.datasets import is_known, load_dataset
from pyg_distcomm.partition.folder import open_folder
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.plan.degree_distribution import RandomGraph
from pyg_distcomm.plan.machine import Machine
from pyg_distcomm.plan.planner import plan

UNITS = {
    "bytes": {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    | {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12},
    # as tc writes them: bits, not bytes
    "bytes a second": {"": 1, "kbit": 125, "mbit": 125e3, "gbit": 125e6}
    | {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9},
    "seconds": {"": 1, "s": 1, "ms": 1e-3, "us": 1e-6},
}


def run_plan(arguments: argparse.Namespace) -> int:
    """Prints the plans; returns 0, or 1 if none can be run."""
    graph, owners = _graph(arguments)
    ranks = arguments.ranks
    if ranks is None and owners is not None:
        ranks = owners.num_parts
    layers = arguments.layers or ["gcn"]
    plans = plan(
        graph,
        ranks=ranks,
        machine=_machine(arguments),
        partition=arguments.method if owners is None else owners,
        seed=arguments.seed,
        widths=arguments.widths,
        layers=layers[0] if len(layers) == 1 else layers,
        inputs=arguments.inputs or "constant",
        algorithm=arguments.algorithm,
        codecs=arguments.codec,
    )
    print(plans.to_json() if arguments.json else plans)
    return 0 if plans else 1


def _graph(arguments: argparse.Namespace) -> tuple[Any, Partition | None]:
    values = arguments.graph, arguments.nodes, arguments.edges
    sizes = [value is not None for value in values[1:]]
    if (values[0] is None) != all(sizes) or (values[0] is not None and any(sizes)):
        raise ValueError("give plan either a graph, or --nodes N and --edges M")
    if values[0] is None:
        return RandomGraph(arguments.nodes, arguments.edges, arguments.law), None
    parts = Path(values[0]).is_dir() and not is_known(values[0])
    if parts:
        return read_edges(Path(values[0]))
    return load_dataset(values[0], arguments.root), None


def read_edges(folder: Path) -> tuple[Data, Partition]:
    """Returns all edges of a partition folder, and the owners of nodes.

    The graph has x of the right shape and dtype, without its values, and train_mask if known.
    """
    opened = open_folder(folder)
    parts = [opened.read(part) for part in range(opened.num_parts)]
    partition = parts[0].partition
    if parts[0].types is not None:
        raise ValueError(f"{folder}: holds several node types; plan takes one")
    data = Data(edge_index=torch.cat([part.edge_index for part in parts], 1))
    data.num_nodes = partition.num_nodes
    x = parts[0].node.get("x")
    if x is not None:
        data.x = x.new_empty(1).expand(partition.num_nodes, *x.shape[1:])
    if all("train_mask" in part.node for part in parts):
        rows = torch.cat([part.node["train_mask"] for part in parts])
        gid = torch.cat([part.node_gid for part in parts])
        data.train_mask = torch.empty_like(rows)
        data.train_mask[gid] = rows
    return data, partition


def _machine(arguments: argparse.Namespace) -> Machine:
    values = {
        "memory": _parse_value(arguments.memory, "bytes", "--memory"),
        "bandwidth": _parse_value(arguments.bandwidth, "bytes a second", "--bandwidth"),
        "latency": _parse_value(arguments.latency, "seconds", "--latency"),
    }
    values = {name: value for name, value in values.items() if value is not None}
    machine = Machine()
    if arguments.machine is not None:
        if arguments.device is not None:
            raise ValueError(
                "plan takes --machine, which was measured, or --device, whose figures are a "
                "data sheet's: leave one out"
            )
        machine = Machine.load(arguments.machine)
    elif arguments.device is not None:
        machine = Machine.of_device(arguments.device)
    if {"bandwidth", "latency"} & set(values):
        machine = replace(
            machine, lines={}, sums=None, source=f"{machine.source}, link given"
        )
    return replace(machine, **values)  # type: ignore[arg-type]


def _parse_value(text: str | None, kind: str, option: str) -> float | None:
    if text is None:
        return None
    units = UNITS[kind]
    match = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([a-z/]*)", text.lower())
    if match is None or match[2] not in units:
        names = ", ".join(unit for unit in units if unit)
        raise ValueError(
            f"{option}={text!r} must be a number of {kind}, with or without one of "
            f"the units {names}"
        )
    return float(match[1]) * units[match[2]]
