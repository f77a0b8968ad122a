"""Runs the parts of `python benchmarks/cuda.py`, which see, and says on what they ran."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch
import torch_geometric
from device_loaders import minibatches, other_minibatches
from device_report import run_part, run_parts
from one_device import Device, epochs, packing, products, synchronisations

# minutes of each, 37 in all: what does not fit is left out, and the report says so
PARTS = {
    products: 8.0,
    epochs: 11.0,
    synchronisations: 2.0,
    packing: 2.0,
    minibatches: 8.0,
    other_minibatches: 6.0,
}
MINUTES = sum(PARTS.values())


def heading(cuda: bool, smoke: bool) -> str:
    """Says on what it ran, and on what it did not."""
    text = "# On a CUDA device\n"
    if not cuda:
        text += "\nNot run on a CUDA device: nothing here says how fast one is.\n"
    if smoke:
        text += "\nA smoke run on tiny graphs: its figures say nothing.\n"
    name = torch.cuda.get_device_name() if cuda else platform.processor() or "CPU"
    text += (
        f"\n{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"PyG {torch_geometric.__version__}. `python benchmarks/cuda.py`\n"
    )
    return text


def main(about: str = "", arguments: list[str] | None = None) -> int:
    """Measures, and writes the report; returns 1 without CUDA, or if a part failed."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--report", type=Path, help="a file of Markdown")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny graphs, on the CPU too"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="of all parts (%(default).0f)"
    )
    names = [part.__name__ for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, help="these parts")
    for hidden, kind in (("--part", str), ("--into", Path), ("--seconds", float)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    if args.part:
        part = next(each for each in PARTS if each.__name__ == args.part)
        device = Device("cuda" if cuda else "cpu", args.smoke)
        return run_part(part.__name__, part, device, args.into, args.seconds)
    if args.report is None:
        parser.error("--report FILE is missing")
    if not cuda and not args.smoke:
        print("no CUDA device here: nothing was measured, no report was written")
        return 1
    minutes = {
        part.__name__: each * args.minutes / MINUTES
        for part, each in PARTS.items()
        if args.only is None or part.__name__ in args.only
    }
    command = [str(Path(__file__).with_name("cuda.py")), *["--smoke"] * args.smoke]
    return int(not run_parts(command, minutes, heading(cuda, args.smoke), args.report))
