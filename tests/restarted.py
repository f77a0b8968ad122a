"""A script for torchrun --max-restarts: resumes, and kills a rank in some attempts."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.nn.functional as F
from faulty import graph, net

import pyg_distcomm as pdc
from pyg_distcomm import nn

EPOCHS = 6


def main(folder, *kills):
    mesh = pdc.init(timeout=60)
    data, model = pdc.partition(graph(), mesh, "random"), net(nn.GCNConv)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    path, begin = os.path.join(folder, "run"), 0
    if os.path.exists(path):
        begin = pdc.load_checkpoint(path, mesh, model, optimizer, epoch=0)["epoch"]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for epoch in range(begin, EPOCHS):
        optimizer.zero_grad()
        out = F.dropout(model(data.x, data.edge_index), 0.2)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        pdc.save_checkpoint(path, mesh, model, optimizer, epoch=epoch + 1)
        if mesh.rank == 1 and kills[attempt : attempt + 1] == (str(epoch),):
            os.kill(os.getpid(), signal.SIGKILL)
    if mesh.rank == 0:
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        print("ENDS", flat.numpy().tobytes().hex(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
