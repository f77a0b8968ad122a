"""Lets `python -m pyg_distcomm.cli` be the command `pyg-distcomm`."""

import sys

from pyg_distcomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
