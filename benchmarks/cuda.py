"""What decides most about one CUDA device, in eight minutes or in four.

    python benchmarks/cuda.py --minutes 8 --report benchmarks/reports/cuda.md

Parts, in the order of what they decide: (a) the package imports, and 60 tests; (b) products
with sparse matrices beside cuSPARSE and PyG's scatter; (c) epochs of GCN, GraphSAGE and GAT on
a graph of the size of ogbn-products, 2.1 million nodes and 126 million edges, beside PyG; (d)
an epoch of minibatches by phases, beside PyG's loader; (e) host synchronisations of a layer;
(f) rows written for the wire; (g) two ranks on the device over gloo, and one over NCCL. With
fewer than six minutes, (a) to (c) run. Graphs are generated, and nothing is downloaded.

Each part is a process of its own, which has its share of the time that is left. It writes each
line into the report when it has it, so that a run that is cut anywhere leaves a report; a part
that fails, or is stopped, says so, and the next one runs. Without CUDA nothing is measured;
`--smoke` runs all parts on tiny graphs, on the CPU too, to see that they run.
"""

import sys
from pathlib import Path

if (
    __name__ == "cuda"
):  # torch looks for NVIDIA's package of this name, and finds this file
    elsewhere = (Path(place, "cuda") for place in sys.path)
    __path__ = [str(folder) for folder in elsewhere if folder.is_dir()]
elif __name__ == "__main__":
    import device_parts

    sys.exit(device_parts.main(__doc__.splitlines()[0]))
