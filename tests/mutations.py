"""Plants faults of one line in the package, and reports which tests catch each.

    python tests/mutations.py [--report FILE] [-k WORDS] [--jobs N]

Each fault replaces a text that stands once in the package by a wrong one, in a copy, and runs
the tests of the default tier that should notice it. A fault that passes them all is listed as
not caught, and the script ends with an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 400  # seconds for the tests of one fault


@dataclass(frozen=True)
class Mutation:
    """A fault of one line.

    Args:
        name: what is wrong.
        kind: the kind of code.
        old: the text, which stands once in the package.
        new: what takes its place.
        tests: arguments of pytest that select the tests which should fail.
    """

    name: str
    kind: str
    old: str
    new: str
    tests: str

    def file(self, root: Path = ROOT) -> Path:
        """Returns the file that holds the text.

        Raises:
            ValueError: if the text does not stand once in the package.
        """
        texts = {
            p: p.read_text() for p in sorted((root / "pyg_distcomm").rglob("*.py"))
        }
        found = [p for p, text in texts.items() for _ in range(text.count(self.old))]
        if len(found) != 1:
            raise ValueError(
                f"{self.name}: its text stands {len(found)} times in the package, wanted "
                f"once: {self.old!r}"
            )
        return found[0]


MUTATIONS = [
    Mutation(
        "a global sum hands back this rank's gradient alone",
        "adjoint",
        "return all_reduce(g, ctx.axis), None",
        "return g, None",
        "tests/test_tensor.py",
    ),
    Mutation(
        "gradients of an exchange go the same way as the rows",
        "adjoint",
        "return all_to_all(g, recv, send, axis, back), None",
        "return all_to_all(g, send, recv, axis, back), None",
        "tests/test_tensor.py tests/test_layers.py",
    ),
    Mutation(
        "the backward product multiplies by A, not by its transpose",
        "adjoint",
        "mirror = ctx.matrix.transposed",
        "mirror = ctx.matrix",
        "tests/test_products.py",
    ),
    Mutation(
        "gradients of values take rows and ghosts crosswise",
        "adjoint",
        "(g[0], x[1]), (g[1], x[0])",
        "(g[1], x[0]), (g[0], x[1])",
        "tests/test_products.py tests/test_parity.py",
    ),
    Mutation(
        "dropout draws another mask in the backward pass",
        "adjoint",
        "return _KeyedDropout.apply(g.contiguous(), p, gid, key), None",
        "return _KeyedDropout.apply(g.contiguous(), p, gid, key + 1), None",
        "tests/test_dropout.py",
    ),
    Mutation(
        "a pipeline's gradient of history has the wrong sign",
        "adjoint",
        "operator.own.transposed.matmul(self.gradients, out, own.start)",
        "operator.own.transposed.matmul(-self.gradients, out, own.start)",
        "tests/test_pipeline.py tests/test_pipeline_ranks.py",
    ),
    Mutation(
        "parameters are averaged without being divided",
        "gradients",
        "bucket.buffer.div_(self._axis.size)",
        "bucket.buffer.div_(1)",
        "tests/test_averaging.py",
    ),
    Mutation(
        "an average replaces what a leaf had gathered",
        "gradients",
        "p.grad.add_(mean)",
        "p.grad.copy_(mean)",
        "tests/test_averaging.py",
    ),
    Mutation(
        "DDP's buckets are divided twice",
        "gradients",
        "buffer: Tensor = bucket.buffer().div_(state.axis.size)",
        "buffer: Tensor = bucket.buffer().div_(state.axis.size**2)",
        "tests/test_products.py tests/test_averaging.py tests/test_loader_ranks.py",
    ),
    Mutation(
        "an all-reduce is priced at half of what it moves",
        "price",
        "return -(-2 * numel * (size - 1) // size)",
        "return -(-numel * (size - 1) // size)",
        "tests/test_ledger.py tests/test_products.py",
    ),
    Mutation(
        "rows that a rank keeps are priced as received",
        "price",
        "words=(sum(recv_counts) - recv_counts[rank]) * width,",
        "words=sum(recv_counts) * width,",
        "tests/test_ledger.py tests/test_products.py tests/test_cover.py",
    ),
    Mutation(
        "joining the fiber is priced as splitting it",
        "price",
        "return there + exchange_price(back, away, k, 1)",
        "return there + there",
        "tests/test_products.py tests/test_cover.py",
    ),
    Mutation(
        "the planner mistakes rows that come for rows that leave",
        "price",
        "came, went = side.ghosts[:, :, None] * rows, side.lent[:, :, None] * rows",
        "went, came = side.ghosts[:, :, None] * rows, side.lent[:, :, None] * rows",
        "tests/test_plan.py",
    ),
    Mutation(
        "words between stages forget the way back",
        "price",
        "return 2 * (stages - 1) * n * d * (1 + shared)",
        "return (stages - 1) * n * d * (1 + shared)",
        "tests/test_pipeline.py tests/test_pipeline_parts.py",
    ),
    Mutation(
        "a quantised message is said to be a byte longer",
        "price",
        "return codec_ops.message_bytes(rows, width, self.bits, size) if width else 0",
        "return codec_ops.message_bytes(rows, width, self.bits, size) + 1 if width else 0",
        "tests/test_codec.py",
    ),
    Mutation(
        "stochastic rounding is biased by half a level",
        "codec",
        "parts = (t * 2.0**16).round_() + noise_bits(*noise, x.size(1))",
        "parts = (t * 2.0**16).round_() + noise_bits(*noise, x.size(1)) + 2**15",
        "tests/test_code_kernels.py",
    ),
    Mutation(
        "the greatest code is one too small",
        "codec",
        "    top = 2**bits - 1\n    step = _rounded(span / top, up=True)",
        "    top = 2**bits - 2\n    step = _rounded(span / top, up=True)",
        "tests/test_code_kernels.py",
    ),
    Mutation(
        "narrow numbers are cast without their index",
        "codec",
        "return rows_at(x, index).to(self.dtype)",
        "return x[: len(rows_at(x, index))].to(self.dtype)",
        "tests/test_codec.py tests/test_link.py",
    ),
    Mutation(
        "late rows are one epoch later than asked",
        "staleness",
        "return self.messages[max(len(self.messages) - 1 - late, 0)]",
        "return self.messages[max(len(self.messages) - 2 - late, 0)]",
        "tests/test_link_late.py",
    ),
    Mutation(
        "a moving average weighs old and new the wrong way round",
        "staleness",
        "self.mean.mul_(smooth).add_(rows, alpha=1 - smooth)",
        "self.mean.mul_(1 - smooth).add_(rows, alpha=smooth)",
        "tests/test_link_late.py",
    ),
    Mutation(
        "synchronous epochs come one too late",
        "staleness",
        "return every is not None and (epoch + 1) % every == 0",
        "return every is not None and epoch % every == 0",
        "tests/test_link_late.py tests/test_schedule.py",
    ),
    Mutation(
        "a schedule of rates ends two epochs late",
        "staleness",
        "return min(self.slope * epoch / max(self.epochs - 2, 1), 1.0)",
        "return min(self.slope * epoch / max(self.epochs, 1), 1.0)",
        "tests/test_schedule.py",
    ),
    Mutation(
        "targets to be ignored count in the mean of a loss",
        "weights",
        'valid = target != given["ignore_index"]',
        "valid = target == target",
        "tests/test_tensor.py tests/test_whole.py",
    ),
    Mutation(
        "the mean of a weighted loss divides by rows",
        "weights",
        "return weight[target[valid]].sum()",
        "return valid.sum()",
        "tests/test_tensor.py tests/test_whole.py",
    ),
    Mutation(
        "a rank without rows wins a maximum",
        "weights",
        'return info.min if op == "max" else info.max',
        'return info.max if op == "max" else info.min',
        "tests/test_tensor.py tests/test_whole.py",
    ),
    Mutation(
        "improved GCN fills loops with one",
        "weights",
        "fill = 2.0 if improved else 1.0",
        "fill = 1.0",
        "tests/test_parity.py tests/test_layers.py",
    ),
    Mutation(
        "nodes without edges get infinite weights",
        "weights",
        'scale = scale.masked_fill(scale == float("inf"), 0)\n    every',
        "every",
        "tests/test_parity.py tests/test_layers.py tests/test_reviewed.py",
    ),
    Mutation(
        "probabilities of columns are not normalised",
        "sampler",
        "return p.with_value(kernels.normalize_rows(p.rowptr, p.values.double()))",
        "return p.with_value(p.values.double())",
        "tests/test_algebra.py",
    ),
    Mutation(
        "LADIES takes weights as they are, not squared",
        "sampler",
        'return SQUARED if self.definition == "code" else COUNTED',
        'return PLAIN if self.definition == "code" else COUNTED',
        "tests/test_layer_sampler.py tests/test_algebra.py",
    ),
    Mutation(
        "extracted entries take the values of other edges",
        "sampler",
        "value = None if a.value is None else a.value[entry]",
        "value = None if a.value is None else a.value[entry.flip(0)]",
        "tests/test_algebra.py",
    ),
    Mutation(
        "ranks sample the same minibatches with the same draws",
        "sampler",
        "t = first + (self.rank - first) % self.size",
        "t = first + (0 - first) % self.size",
        "tests/test_loader_ranks.py tests/test_loader.py",
    ),
    Mutation(
        "padded lists are as short as the shortest",
        "sampler",
        'most = max(self.batches) if self.even == "pad" else min(self.batches)',
        'most = min(self.batches) if self.even == "pad" else max(self.batches)',
        "tests/test_loader_ranks.py tests/test_loader.py",
    ),
    Mutation(
        "samplers forget the key of their minibatch",
        "sampler",
        'key = getattr(inputs, "key", None)\n        return self._next_key() if key',
        "key = None\n        return self._next_key() if key",
        "tests/test_loader.py tests/test_loader_ranks.py",
    ),
    Mutation(
        "the first parts of a split are not the larger ones",
        "indices",
        "return [small + (i < extra) for i in range(parts)]",
        "return [small + (i >= parts - extra) for i in range(parts)]",
        "tests/test_products.py tests/test_network.py tests/test_cover.py",
    ),
    Mutation(
        "sums for ghosts land one place further",
        "indices",
        "part.index_add_(0, self.source, x[self.target].unsqueeze(1))",
        "part.index_add_(0, self.source, x[self.target.roll(1)].unsqueeze(1))",
        "tests/test_hot.py tests/test_feature_store.py tests/test_partitioned_loader.py",
    ),
    Mutation(
        "a product forgets the ghosts' part",
        "indices",
        "tile.own_ghost.add_matmul(self._ghost, self._z)",
        "tile.own_ghost.add_matmul(self._ghost * 0, self._z)",
        "tests/test_products.py",
    ),
    Mutation(
        "an altered file of a checkpoint is read",
        "errors",
        "if sha256(path) != sums[path.name]:",
        "if len(sums) < 0:",
        "tests/test_saving.py",
    ),
    Mutation(
        "a save replaces whatever stands in its place",
        "errors",
        "return not names or (known and (half or needed in names or MARK in names))",
        "return True",
        "tests/test_saving.py tests/test_checkpoint.py",
    ),
    Mutation(
        "an altered META.json is read",
        "errors",
        'if meta.get("digest") != _digest(meta):',
        'if meta.get("digest") is None:',
        "tests/test_folder.py",
    ),
    Mutation(
        "a problem is raised on the rank that has it alone",
        "errors",
        "    found = all_gather_object(problem, axis)\n",
        "    found = [problem]\n",
        "tests/test_share.py tests/test_failure.py",
    ),
    Mutation(
        "plain tensors that differ between ranks are accepted",
        "errors",
        "differ = [rank for rank, mark in enumerate(marks) if mark != marks[0]]",
        "differ = []",
        "tests/test_whole.py tests/test_reviewed.py tests/test_faults.py tests/test_failure.py",
    ),
    Mutation(
        "loaders that wait for each other wait on",
        "errors",
        'if there in ("", self._where) or self._store.check([str(rank)]):',
        "if True:",
        "tests/test_loader_ranks.py tests/test_loader_life.py",
    ),
    Mutation(
        "a deadline is ten times as long",
        "errors",
        "if time.monotonic() - start > watch.deadline:",
        "if time.monotonic() - start > 10 * watch.deadline:",
        "tests/test_failure.py",
    ),
]


@contextmanager
def planted(mutation: Mutation, where: Path) -> Iterator[Path]:
    """Copies the repository's code into a folder, with the fault in it."""
    for name in ("pyg_distcomm", "tests", "examples", "benchmarks", "notebooks"):
        skipped = shutil.ignore_patterns("__pycache__", "reports")
        shutil.copytree(ROOT / name, where / name, ignore=skipped)
    for path in [*ROOT.glob("*.md"), ROOT / "pyproject.toml"]:
        shutil.copy(path, where / path.name)
    path = mutation.file(where)
    path.write_text(path.read_text().replace(mutation.old, mutation.new))
    yield where


def outcome(mutation: Mutation) -> tuple[str, float]:
    """Returns the first test that fails with the fault, or nothing, and the seconds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place, planted(mutation, Path(place)) as copy:
        env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        try:
            run = subprocess.run(
                [*command, *mutation.tests.split()],
                cwd=copy,
                env=env,
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return "", time.monotonic() - begin
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.M)
        return found.group(1) if found else "", time.monotonic() - begin


def main() -> int:
    """Runs the chosen faults; returns 1 if any was not caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", help="a file for the table")
    parser.add_argument("-k", default="", help="faults whose names hold this")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    chosen = [one for one in MUTATIONS if re.search(asked.k, one.name)]
    rows, missed = [], 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for one, (test, seconds) in zip(chosen, pool.map(outcome, chosen), strict=True):
            missed += not test
            file = one.file().relative_to(ROOT / "pyg_distcomm")
            caught = f"`{test.removeprefix('tests/')}`" if test else "not caught"
            rows.append(f"| {one.name} | {one.kind} | {file} | {caught} |")
            print(f"{seconds:5.0f} s  {one.name}: {caught}", flush=True)
    print(f"{len(chosen)} faults, {missed} not caught")
    if asked.report:
        head = ["| fault | kind | file | caught by |", "|---|---|---|---|"]
        told = f"{len(chosen)} faults, {missed} not caught.\n\n"
        Path(asked.report).write_text(
            "# Faults that the default tests catch\n\n"
            "`python tests/mutations.py --report benchmarks/reports/mutations.md`\n\n"
            + told
            + "\n".join([*head, *rows])
            + "\n"
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
