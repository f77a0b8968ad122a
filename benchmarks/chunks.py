"""What chunks cost a deep model in accuracy, by the techniques that mend it.

    python benchmarks/chunks.py --graphs Tolokers --auc --root DIR [--chunks 9 21] [--depth 16]
        [--width 32] [--seeds 3] [--epochs 150] [--ways all|NAME ...] [--json FILE]
    python benchmarks/chunks.py --cosine 20 40 60 --graphs Tolokers --root DIR

Runs on one process: the numbers of a pipeline depend on its chunks and their order, not on
how many stages they stream through (`test_numbers_do_not_depend_on_stages_and_rows`). Of S
stages `Pipeline` takes 3 (S - 1) chunks: 9 for 4 stages, 21 for 8. Beside all ways stand the
full graph (one chunk) and the same without the edges between chunks (*sending nothing*),
which is tested on all edges, as all are. The test score is that at the best validation.
"fresh rows, ..." and "old rows, ..." choose rows and gradients apart (`emulated_chunks.py`).
`--emulate` trains the other ways there, too, all chunks together: as many epochs take the time
of the full graph, and only masks of dropout are others.

`--cosine` instead trains each way, and compares the gradient of the input layer at some
epochs with that of the full graph for the same weights and dropout.

What was found is written to `--json` run by run, and not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from deep import graph, loss_of, scores, stack_of
from emulated_chunks import EmulatedChunks
from torch_geometric.data import Data

import pyg_distcomm as pdc
from pyg_distcomm.comm.ledger import format_table
from pyg_distcomm.partition.cutters import cut

FULL, CUT = "full graph", "no edges between chunks"
# order of chunks, gradients of history, epochs of one history; those of [Chen23] first: all
# three techniques, each left out, each alone, and none, where their code keeps late gradients;
# "late" ones are emulated only
WAYS: dict[str, tuple[str, str, int]] = {
    "paper": ("shuffled", "scaled", 23),
    "paper, fixed order": ("fixed", "scaled", 23),
    "paper, late gradients": ("shuffled", "late", 23),
    "paper, new history": ("shuffled", "scaled", 1),
    "paper, order alone": ("shuffled", "late", 1),
    "paper, gradients alone": ("fixed", "scaled", 1),
    "paper, history alone": ("fixed", "late", 23),
    "paper, none of them": ("fixed", "late", 1),
    "shuffled, dropped": ("shuffled", "surrogate", 1),
    "alternating, dropped": ("alternating", "surrogate", 1),
    "alternating, x2": ("alternating", "scaled", 1),
    "alternating, late": ("alternating", "late", 1),
}
# rows of chunks that come later, and their gradients, as no pipeline has them
EMULATED: dict[str, tuple[Any, ...]] = {
    "fresh rows, gradients dropped": ("fresh", "dropped"),
    "fresh rows, gradients late": ("fresh", "late"),
    "old rows, all gradients": ("old", "all"),
    "old rows, gradients dropped": ("old", "dropped"),  # alternating, dropped
}


def made(
    way: str, data: Data, share: Data, chunks: Any, args: argparse.Namespace, seed: int
) -> pdc.Pipeline:
    """Returns a pipeline of one stage that trains in one of the ways."""
    order, gradient, refresh = WAYS.get(way, ("fixed", "surrogate", 1))
    torch.manual_seed(seed)
    return pdc.Pipeline(
        stack_of(args.model, data, args, args.depth),
        share.edge_index.nodes.mesh,  # type: ignore[union-attr]
        chunks=1 if way in (FULL, CUT) else chunks,
        order=order,
        gradient="surrogate" if gradient == "late" else gradient,
        history_refresh=refresh,
        recompute=False,  # the same numbers, sooner
        seed=seed,
    )


def crossing(data: Data, chunk: torch.Tensor) -> float:
    """Returns the share of edges between chunks."""
    source, target = data.edge_index  # type: ignore[misc]
    return float((chunk[source] != chunk[target]).float().mean())


def within(data: Data, chunk: torch.Tensor) -> Data:
    """Returns the graph without the edges between chunks."""
    source, target = data.edge_index  # type: ignore[misc]
    keep = chunk[source] == chunk[target]
    return Data(**{**data.to_dict(), "edge_index": data.edge_index[:, keep]})  # type: ignore[index]


class OutOfTime(Exception):
    """Ends a run that is saved, and goes on in the next command."""


def steps(
    pipe: pdc.Pipeline,
    share: Data,
    args: argparse.Namespace,
    folder: Path | None = None,
) -> Iterator[tuple[int, float]]:
    """Trains, and yields epochs, from 1 on, and losses.

    With a folder the run is saved there when time is up, and goes on from there.
    """
    opt = torch.optim.Adam(pipe.parameters(), args.lr)
    if folder is not None and folder.exists():
        pipe.load(folder, opt)
    for epoch in range(pipe.epoch + 1, args.epochs + 1):
        if folder is not None and time.monotonic() > args.until:
            pipe.save(folder, opt)
            raise OutOfTime
        pipe.train()
        opt.zero_grad()
        loss = float(pipe.train_step(share, loss_of))
        yield epoch, loss  # gradients are there to be looked at
        opt.step()


def cut_into(data: Data, chunks: int, seed: int, cutter: str = "metis") -> torch.Tensor:
    """Returns the chunk of each node; `Pipeline` cuts by METIS."""
    return cut(data.edge_index, data.num_nodes, chunks, cutter, seed=seed).owner.long()


def trained(
    way: str, name: str, chunks: int, args: argparse.Namespace, seed: int
) -> dict:
    """Trains a way from a seed, and returns its curve and its score."""
    mesh = pdc.init(seed=seed)
    data = graph(name, args.root, 0, seed)
    chunk = cut_into(data, chunks, seed, args.cutter)
    share = whole = pdc.partition(data, mesh)
    if way in EMULATED or (args.emulate and way in WAYS):
        return emulated(way, data, share, chunk, args, seed)
    if way == CUT:
        share = pdc.partition(within(data, chunk), mesh)
    if WAYS.get(way, ("", ""))[1] == "late":
        raise SystemExit(f"{way!r}: late gradients are emulated only; add --emulate")
    pipe = made(way, data, share, chunk, args, seed)
    judge = pipe if share is whole else made(FULL, data, whole, chunk, args, seed)
    curve, folder = args.curve, args.json and args.json.with_suffix(".begun")
    for epoch, loss in steps(pipe, share, args, folder):
        if epoch % args.every == 0:
            if judge is not pipe:
                judge.load_state_dict(pipe.state_dict())
            curve.append(
                (epoch, loss, *judge.eval_step(whole, partial(scores, auc=args.auc)))
            )
    return judged(curve, crossing(data, chunk), args)


def emulated(
    way: str, data: Data, share: Any, chunk: Any, args: argparse.Namespace, seed: int
) -> dict:
    """Does what `trained` does with all chunks together, rows and gradients apart."""
    how = EMULATED.get(way)
    if how is None:
        _, rule, refresh = WAYS[way]
        how = "old", "dropped" if rule == "surrogate" else rule, refresh
    same = way if way in WAYS else "alternating, dropped"
    order = made(same, data, share, chunk, args, seed)
    order(share)  # knows its chunks from here on
    torch.manual_seed(seed)
    model = stack_of(args.model, data, args, args.depth)
    chunks = EmulatedChunks(model, data, chunk, *how)
    opt, curve = torch.optim.Adam(model.parameters(), args.lr), []
    for epoch in range(args.epochs):
        opt.zero_grad()
        loss = float(chunks.step(order.order_of(epoch)))
        opt.step()
        if (epoch + 1) % args.every == 0:
            curve.append((epoch + 1, loss, *scores(chunks.output(), data, args.auc)))
    return judged(curve, crossing(data, chunk), args)


def judged(curve: list[Any], share: float, args: argparse.Namespace) -> dict:
    """Returns the test score at the best validation, of the whole curve and of its half."""
    half = [point for point in curve if point[0] <= args.epochs // 2] or curve[:1]
    best, then = (max(part, key=lambda point: point[2])[3] for part in (curve, half))
    return {"score": best, "half": then, "crossing": share, "curve": curve}


def cosines(
    way: str, name: str, chunks: int, args: argparse.Namespace, seed: int
) -> dict:
    """Trains a way, and returns cosines of the input layer's gradients at some epochs."""
    mesh = pdc.init(seed=seed)
    data = graph(name, args.root, 0, seed)
    share = pdc.partition(data, mesh)
    chunk = cut_into(data, chunks, seed, args.cutter)
    pipe = made(way, data, share, chunk, args, seed)
    exact = made(FULL, data, share, 1, args, seed)
    found = {}
    for epoch, _ in steps(pipe, share, args):
        if epoch not in args.cosine:
            continue
        exact.load_state_dict(pipe.state_dict())
        exact.zero_grad()
        exact.train()
        exact.epoch = epoch - 1  # the same dropout
        exact.train_step(share, loss_of)
        pair = [next(p.parameters()).grad.flatten() for p in (pipe, exact)]  # type: ignore[union-attr]
        found[epoch] = float(F.cosine_similarity(*pair, dim=0))
    return {"cosine": found, "crossing": crossing(data, chunk)}


# The tables -------------------------------------------------------------------------


def scored(found: dict[tuple[str, int], list[dict]]) -> str:
    """Returns the scores of all ways on a graph, beside the full graph's."""
    full = (
        statistics.mean(f["score"] for f in found[FULL, 1])
        if (FULL, 1) in found
        else None
    )
    rows = []
    for (way, chunks), runs in found.items():
        each = [run["score"] for run in runs]
        mean = statistics.mean(each)
        spread = statistics.stdev(each) if len(each) > 1 else 0.0
        share = statistics.mean(run["crossing"] for run in runs)
        less = "" if full is None else f"{100 * (mean - full):+.2f}"
        half = statistics.mean(run["half"] for run in runs)
        row = [way, chunks, f"{share:.0%}", f"{mean:.4f}", f"{spread:.4f}", less]
        rows.append([*row, f"{half:.4f}", " ".join(f"{score:.4f}" for score in each)])
    head = ["way", "chunks", "between", "test", "stdev", "points", "half-way", "seeds"]
    return format_table(head, rows)


def aligned(found: dict[tuple[str, int], list[dict]]) -> str:
    """Returns the cosines of all ways on a graph."""
    epochs = next(iter(found.values()))[0]["cosine"]
    rows = []
    for (way, chunks), (run, *_) in found.items():
        row = [way, chunks, f"{run['crossing']:.0%}"]
        rows.append([*row, *(f"{cosine:.2f}" for cosine in run["cosine"].values())])
    return format_table(
        ["way", "chunks", "between", *(f"epoch {e}" for e in epochs)], rows
    )


def key_of(run: str, name: str, args: argparse.Namespace, *which: Any) -> str:
    """Returns what a run is known by in the file of those found."""
    how = args.model, args.depth, args.width, args.lr, args.dropout, args.epochs
    how = (*how, args.cutter, *(["emulated"] if args.emulate else []))
    return "|".join(map(str, (run, name, *how, *which)))


def compute(
    key: str, kept: dict[str, Any], args: argparse.Namespace, run: Any, *which: Any
) -> bool:
    """Runs what `key` names, and keeps it; returns whether it came to its end."""
    begun = kept.get("begun", {"key": key, "curve": []})
    if begun["key"] != key or time.monotonic() > args.until:
        return False  # one run at a time is begun
    way, name, chunks, seed = which
    args.curve = begun["curve"]
    try:
        kept[key] = run(way, name, chunks, args, seed)
        kept.pop("begun", None)
        print(key, kept[key].get("score"), kept[key].get("cosine"), flush=True)
    except OutOfTime:
        kept["begun"] = begun
    if args.json:
        args.json.write_text(json.dumps(kept))
        if key in kept:
            shutil.rmtree(args.json.with_suffix(".begun"), ignore_errors=True)
    return key in kept


def main() -> None:
    """Runs what has not been, and prints a table for each graph."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", nargs="+", default=["digits"])
    parser.add_argument("--root", default="data", help="where data sets are")
    parser.add_argument("--model", default="gcnii")
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--chunks", type=int, nargs="+", default=[9, 21])
    parser.add_argument("--cutter", default="metis", help="random: most edges between")
    known = "all", FULL, CUT, *WAYS, *EMULATED
    parser.add_argument("--ways", nargs="+", default=["all"], choices=known)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--every", type=int, default=10, help="epochs between tests")
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--auc", action="store_true", help="scored, of two classes")
    parser.add_argument("--cosine", type=int, nargs="+", default=[], metavar="EPOCH")
    parser.add_argument("--emulate", action="store_true", help="all chunks together")
    parser.add_argument("--json", type=Path, help="what was found, kept and read")
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="0: only show --json"
    )
    args = parser.parse_args()
    args.accuracy = True  # dropout, in `deep.stack_of`
    if args.cosine:
        args.epochs, args.seeds = max(args.cosine), 1
    torch.set_num_threads(1)
    kept: dict[str, Any] = {}
    if args.json and args.json.exists():
        kept = json.loads(args.json.read_text())
    ways = [FULL, CUT, *WAYS] if "all" in args.ways else args.ways
    if args.cosine:
        ways = [way for way in ways if way not in (FULL, CUT)]
    run = cosines if args.cosine else trained
    args.until = time.monotonic() + 60 * args.minutes
    for name in args.graphs:
        found: dict[tuple[str, int], list[dict]] = {}
        for seed, chunks, way in product(range(args.seeds), args.chunks, ways):
            one = way, 1 if way == FULL else chunks
            key = key_of(run.__name__, name, args, *one, seed)
            if way == FULL and chunks != args.chunks[0]:
                continue
            if key not in kept and not compute(
                key, kept, args, run, way, name, one[1], seed
            ):
                continue
            found.setdefault(one, []).append(kept[key])
        how = f"{args.model}, {args.depth} layers of {args.width}, {args.epochs} epochs"
        table = aligned(found) if args.cosine else scored(found)
        print(f"\n{name}, {how}, rate {args.lr}\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
