"""Makes the bulks of one epoch of a loader: sampling, assembly, and how many at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory
from torch_geometric.profile import get_data_size

from pyg_distcomm.kernels import threads
from pyg_distcomm.loader.assembly import Assembly
from pyg_distcomm.loader.deal import Numbered

BUDGET = 1 << 29  # bytes of minibatches in flight, if memory allows that much
MOST = 4  # minibatches of an automatic bulk for each thread: more wins nothing


class Producer:
    """Makes the bulks of one epoch.

    What a script has written itself (a transform of the sampler's output, a subclass) runs
    in the thread that asks for minibatches; so does all that is not on the CPU.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._assembly = loader, Assembly(loader, loader._buffers)
        own, ours = loader._customised, self._assembly.threads
        self._late = own or not ours or loader.transform_sampler_output is not None
        self._sample = loader.collate_fn if own else loader._sampled
        self._width = threads.width() if ours and not own else 1
        self._bytes = 0

    def size(self) -> int:
        """Returns the size of the next bulk: as asked, or what the budget holds."""
        asked = self._loader._extras.bulk_size
        if asked != "auto":
            return int(asked)
        if not self._bytes:
            return self._width
        room = min(BUDGET, _free_memory() // 8)
        fits = room // (self._bytes * (self._loader._extras.prefetch + 2))
        return max(self._width, min(MOST * self._width, fits))

    def __call__(self, plan: list[Numbered], stopped: Callable[[], bool]) -> list[Any]:
        """Samples and assembles a bulk, each minibatch on one thread.

        It leaves off between two minibatches once ``stopped()``: nobody wants them.
        """
        outs: list[Any] = [None] * len(plan)
        whole = not self._late and not self._assembly.on_disk

        def sample(k: int) -> None:
            if stopped():
                return
            with threads.limited(1):
                outs[k] = self._sample(plan[k])
                if whole:
                    outs[k] = self._assembled(outs[k], None)

        def assemble(k: int) -> None:
            with threads.limited(1):
                outs[k] = self._assembled(outs[k], pools)

        self._spread(sample, len(plan))
        if stopped():
            return []
        if not whole and not self._late:
            pools = self._assembly.fetch(outs)
            self._spread(assemble, len(plan))
        if not self._bytes and not self._late and outs:
            self._bytes = max(get_data_size(outs[0][0]), 1)
        return outs

    def finish(self, out: Any) -> Any:
        """Does what is left to the thread that asks: the script's own functions."""
        loader = self._loader
        if not self._late:
            data = loader._finished(*out)
        elif loader._customised and loader.filter_per_worker:
            data = out
        else:
            data = loader.filter_fn(out)
        if loader.pin_memory and torch.cuda.is_available():
            return pin_memory(data)
        return data

    def _assembled(self, out: Any, pools: Any) -> tuple[Any, bool | None]:
        return self._assembly(out, pools), getattr(out, "padding", None)

    def _spread(self, work: Any, count: int) -> None:
        with threads.limited(self._width):
            threads.run(work, [(k,) for k in range(count)])


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * BUDGET
