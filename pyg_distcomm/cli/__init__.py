"""Runs the command `pyg-distcomm`: one module a verb."""

from pyg_distcomm.cli.command import main as main

__all__ = [
    "main",
]
