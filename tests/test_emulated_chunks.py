"""Pipelines beside chunks that are computed all together: the emulation of `chunks.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import tiers
import torch

import pyg_distcomm as pdc
from pyg_distcomm.datasets import load_dataset

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from deep import loss_of, stack_of
from emulated_chunks import EmulatedChunks

RULES = {"surrogate": "dropped", "scaled": "scaled"}


@pytest.mark.filterwarnings("ignore:.*between the 5 chunks:UserWarning")
@tiers.cover(
    ("rule", "order", "refresh"),
    [*RULES],
    ["fixed", "shuffled", "alternating"],
    [2, 1],
    step=2,
)
def test_all_chunks_together_train_as_one_after_another(rule, order, refresh):
    how = argparse.Namespace(width=4, dropout=0.0, accuracy=True)
    mesh, data = pdc.init(), load_dataset("generated-200")
    data.x = data.x.double()
    chunk = torch.arange(data.num_nodes) * 7 % 5
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(stack_of("gcnii", data, how, 3).double())
    options = {"gradient": rule, "order": order, "history_refresh": refresh}
    pipe = pdc.Pipeline(models[0], mesh, chunks=chunk, **options)
    ours = EmulatedChunks(models[1], data, chunk, "old", RULES[rule], refresh)
    share = pdc.partition(data, mesh)
    opts = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    for epoch in range(5):
        for opt in opts:
            opt.zero_grad()
        loss = pipe.train_step(share, loss_of)
        assert abs(float(loss - ours.step(pipe.order_of(epoch)))) < 1e-12
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        for opt in opts:
            opt.step()
