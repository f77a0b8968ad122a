"""What every rank would load first, loaded once, in the process that ranks are forked from."""

import gc
from importlib import import_module


def warm():
    import_module("templates")  # keeps what PyG compiles for each class of layers
    torch, pyg = import_module("torch"), import_module("torch_geometric.nn")
    import_module("pyg_distcomm.api")
    kernels = import_module("pyg_distcomm.kernels")
    pyg.GCNConv(1, 1), pyg.SAGEConv(1, 1)  # PyG writes their code when they are made
    rowptr, col = torch.tensor([0, 1]), torch.tensor([0])
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(1, 1, dtype=dtype)
        kernels.gather_rows(x, col)
        kernels.spmm(rowptr, col, x.view(-1), x)


gc.disable()
warm()
gc.freeze()  # all of it stays, so the collectors of ranks need not look at it
gc.enable()
