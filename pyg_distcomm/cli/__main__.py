"""Runs the command `pyg-distcomm` as `python -m pyg_distcomm.cli`."""

import sys

from pyg_distcomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
