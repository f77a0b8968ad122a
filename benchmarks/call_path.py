"""Counts the way of the data: frames, calls and modules between an API and its collectives.

    python benchmarks/call_path.py [--check] [WAY ...]

Prints, for the second forward pass of a `DistGCNConv` on two ranks (with an exact and a coded
link), how many frames of the package are on the stack when a message is first handed over,
how many of its functions were called by then, and in how many of its modules; and the modules
that run between seed nodes and minibatches of a replicated and a partitioned graph. `--check`
ends with an error where a count is above its bound.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

import torch

import pyg_distcomm as pdc

BOUNDS = {
    "exact link": (6, 100, 12),
    "coded link": (7, None, 16),
    "replicated minibatch": (None, None, 12),
    "partitioned minibatch": (None, None, 20),
}
HERE = str(Path(pdc.__file__).parent)


_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


def _module_of(frame) -> str | None:
    """Returns the module of the package that a frame runs, or None."""
    code = frame.f_code
    if not code.co_filename.startswith(HERE) or code.co_name in _COMPREHENSIONS:
        return None
    return code.co_filename[len(HERE) + 1 :]


class Counter:
    """Counts the calls of the package's functions while it is entered.

    Args:
        until_collective: stop at the first function of torch.distributed that is called,
            and keep the stack there.
    """

    def __init__(self, until_collective: bool) -> None:
        self.calls = 0
        self.modules: dict[str, list[str]] = {}  # the functions that ran, in order
        self.stack: list[str] = []
        self._until_collective = until_collective

    def _profile(self, frame, event, _argument) -> None:
        if event != "call" or self.stack:
            return
        module = _module_of(frame)
        path = (
            module,
            frame.f_code.co_name,
            frame.f_back and frame.f_back.f_code.co_name,
        )
        if self._until_collective and path == _THROUGH_MEMORY:
            self._arrive(frame.f_back)
        elif module is not None:
            self.calls += 1
            ran = self.modules.setdefault(module, [])
            if frame.f_code.co_name not in ran:
                ran.append(frame.f_code.co_name)
        elif self._until_collective:
            if (
                frame.f_code.co_filename.endswith("distributed_c10d.py")
                and frame.f_code.co_name in _COLLECTIVES
            ):
                self._arrive(frame)

    def _arrive(self, frame) -> None:
        stack = []
        while frame is not None and frame.f_code.co_name != "_forward":
            if _module_of(frame):
                stack.append(f"{_module_of(frame)}:{frame.f_code.co_name}")
            frame = frame.f_back
        self.stack = stack[::-1]

    def __enter__(self) -> Counter:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_error) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.stack), self.calls, len(self.modules)


_COLLECTIVES = ("all_to_all_single", "isend", "irecv")  # of rows
# their like between ranks of one host
_THROUGH_MEMORY = "comm/messages.py", "begin", "all_to_all"


def _graph(nodes: int = 200):
    from torch_geometric.data import Data

    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(nodes, (2, 8 * nodes), generator=generator)
    x = torch.randn(nodes, 16, generator=generator)
    return Data(x=x, edge_index=edge_index)


def _forward(link):
    from pyg_distcomm.nn import DistGCNConv

    mesh = pdc.init()
    share = pdc.partition(_graph(), mesh, "random", link=link)
    conv = DistGCNConv(16, 8)
    conv(share.x, share.edge_index)
    if link is not None:
        link.step()
        conv(share.x * 1, share.edge_index)
    inputs = iter([share.x * 1 for _ in range(3)])

    def prepare() -> None:
        if link is not None:
            link.step()  # a pass an epoch, as in training

    def work() -> None:
        conv(next(inputs), share.edge_index)

    return _least(work, until_collective=True, before=prepare)


def _least(work, until_collective: bool, before=lambda: None):
    """Returns the least count of three: a machine that is busy or has no caches does more."""
    found = []
    for _ in range(3):
        before()
        with Counter(until_collective) as counter:
            work()
        found.append(counter)
    return min(found, key=lambda counter: (len(counter.modules), counter.calls))


def _minibatch(partitioned: bool):
    from pyg_distcomm.loader import DistNeighborLoader

    mesh = pdc.init()
    data = _graph()
    data = pdc.partition(data, mesh, "random") if partitioned else data
    seeds = torch.arange(200)
    loader = DistNeighborLoader(
        data, num_neighbors=[4, 4], input_nodes=seeds, batch_size=20
    )
    list(loader)
    return _least(lambda: list(loader), until_collective=False)


def count(ways: list[str]) -> dict[str, Counter]:
    """Returns the counts of rank 0 for each way."""
    known = {
        "exact link": lambda: _forward(None),
        "coded link": lambda: _forward(pdc.Sylvie(bits=1, late=0)),
        "replicated minibatch": lambda: _minibatch(False),
        "partitioned minibatch": lambda: _minibatch(True),
    }
    return {name: known[name]() for name in ways}


def over(found: dict[str, Counter]) -> dict[str, tuple[int, int, int]]:
    """Returns the counts of the ways of which one is above its bound."""
    return {
        name: counter.counts
        for name, counter in found.items()
        for n, bound in zip(counter.counts, BOUNDS[name], strict=True)
        if bound is not None and n > bound
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail above the bounds")
    parser.add_argument(
        "--verbose", action="store_true", help="print stacks, and what ran of modules"
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help="; ".join(BOUNDS))
    options = parser.parse_args()
    ways = options.ways or list(BOUNDS)
    if not set(ways) <= BOUNDS.keys():
        parser.error(f"ways are {', '.join(BOUNDS)}, got {ways}")
    found = pdc.launch(count, 2, ways)
    found = found[0] if isinstance(found, list) else found
    print(f"{'':24}{'frames':>8}{'calls':>8}{'modules':>8}")
    for name, counter in found.items():
        shown = [
            f"{n}/{'-' if bound is None else bound}"
            for n, bound in zip(counter.counts, BOUNDS[name], strict=True)
        ]
        print(f"{name:24}" + "".join(f"{text:>8}" for text in shown))
        if options.verbose:
            print("  stack: " + "\n         ".join(counter.stack))
            for module, ran in counter.modules.items():
                print(f"  {module}: {' '.join(ran)}")
    return int(options.check and bool(over(found)))


if __name__ == "__main__":
    sys.exit(main())
