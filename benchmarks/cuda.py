"""Everything that is to be known of one CUDA device, in one command, under 40 minutes.

    python benchmarks/cuda.py --report benchmarks/reports/cuda.md

It has not run on a CUDA device yet: no report of it exists, and no figure is known.

Parts, each a process of its own that is stopped after its minutes: products with sparse
matrices beside cuSPARSE, PyG's scatter and the compiled scatter, with peak memory and as a
share of the memory's bandwidth; epochs of a full-graph GCN and GraphSAGE on R-MAT graphs, one
of the size of ogbn-products (2.1 million nodes, 126 million edges), beside PyG on edge_index
and on torch.sparse; host synchronisations of a layer; rows written for the wire; minibatches
beside PyG's loader and GraphBolt's, with the phases of an epoch; layer-wise ones and those of
a share. Columns say what others take beside this package, and whether its aim is met. Graphs
are generated, and nothing is downloaded. The report is written as parts go on; a part that
fails, or is stopped, says so, keeps its lines, and the next one runs. Without CUDA nothing is
measured; `--smoke` runs all parts on tiny graphs, on the CPU too, to see that they run.
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
