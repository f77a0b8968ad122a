"""Reads numbers and names from the command line: argparse types that refuse what is none."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module

MOST_SEED = 2**63 - 1


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
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


def count(text: str) -> int:
    """Reads a number of nodes or edges, which may be written as 1e9."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value < 2**63 and value == int(value)):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted a whole number from 0 on, as 1000000 or 1e6"
        )
    return int(value)


seed = whole(0, MOST_SEED)


def one_of(module: str, name: str) -> Callable[[str], str]:
    """Returns an argparse type for the values that a module lists under a name.

    The module is loaded when a value is read, and not for `--help`. A function of that name
    returns them.
    """

    def read(text: str) -> str:
        known = getattr(import_module(f"pyg_distcomm.{module}"), name)
        known = known() if callable(known) else known
        if text not in known:
            raise argparse.ArgumentTypeError(
                f"got {text!r}, wanted one of {', '.join(known)}"
            )
        return text

    return read
