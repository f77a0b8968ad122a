"""What every rank would load first, loaded once, in the process that ranks are forked from."""

import gc
import sys
from importlib import import_module

sys.path[:] = filter(None, sys.path)  # so that the package is that of pytest's process


def warm():
    for name in ("templates", "pytest", "alike", "tiers", "layers", "links"):
        import_module(name)
    import_module("pyg_distcomm.api")
    names = "torch", "torch_geometric.nn", "pyg_distcomm.nn", "pyg_distcomm.kernels"
    torch, pyg, ours, kernels = map(import_module, names)
    ends, one = torch.zeros(2, 1, dtype=torch.int64), torch.ones(1, 1)
    for lib in (pyg, ours):  # PyG writes code for each kind when one is made
        for kind in ("GCNConv", "SAGEConv", "GATConv", "GraphConv"):
            with torch.no_grad():
                getattr(lib, kind)(1, 1)(one, ends)
    kernels.rank_select_index(ends[0], 1)(ends[0])
    kernels.minimum_cover(torch.tensor([0, 1]), ends[0], 1)
    for index in (torch.int64, torch.int32):
        rowptr, col, _ = kernels.coo_to_csr(*ends.to(index), 1)
        kernels.csr_transpose(rowptr, col, 1)
        for dtype in (torch.float32, torch.float64):
            x = one.to(dtype)
            kernels.gather_rows(x, col), kernels.scatter_add_rows(x, col, x)
            kernels.sddmm(rowptr, col, x, x), kernels.spmm(rowptr, col, None, x)
            kernels.spmm(rowptr, col, x.view(-1), x)


gc.disable()
warm()
gc.freeze()  # all of it stays, so the collectors of ranks need not look at it
gc.enable()
