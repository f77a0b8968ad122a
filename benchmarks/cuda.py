"""Runs one_device.py, and steps aside where torch looks for NVIDIA's package `cuda`.

python benchmarks/cuda.py --report benchmarks/reports/cuda.md

Each script of this folder has the folder on its path, before any package that is installed.
torch imports `cuda.bindings` where it is to be had, and would find this file.
"""

import sys
from pathlib import Path

if __name__ == "cuda":
    elsewhere = (Path(place, "cuda") for place in sys.path)
    __path__ = [str(folder) for folder in elsewhere if folder.is_dir()]
elif __name__ == "__main__":
    import one_device

    sys.exit(one_device.main())
