"""Runs the command `pyg-distcomm`: command.py parses it, other modules run its subcommands."""

from pyg_distcomm.cli.command import main as main

__all__ = [
    "main",
]
