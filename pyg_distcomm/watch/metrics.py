"""Records metrics of each epoch from all ranks, and passes them to writers: `pdc.metrics`.

[Note: run folder] Rank 0 writes a run to a folder, which `pyg-distcomm report` reads:

    RUN/run.json        the ranks and the partition of the last start; when each began
    RUN/metrics.jsonl   one JSON object an epoch, as `metrics.epoch` returns it
    RUN/trace.json.gz   a timeline of some epochs, if `metrics.trace` has written one

An epoch is one line, written at once. A run that resumes from a checkpoint continues in its
folder: readers (`read_run`) skip the lines of an earlier start for the epoch at which the run
resumed and all later ones, and a line that a kill has cut short.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import math
import os
import platform
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.ledger import Entry, Ledger
from pyg_distcomm.comm.mesh import Mesh, given_mesh
from pyg_distcomm.comm.trace import as_json, span, trace
from pyg_distcomm.graph.partition_data import partition_report
from pyg_distcomm.partition.atomic import add_line, explaining_disk, whole_file
from pyg_distcomm.partition.partition import imbalance
from pyg_distcomm.process import tell
from pyg_distcomm.sharded.edges import DistEdgeIndex

LOADER = "loader: "  # begins the names of a loader's phases
RUN, ROWS, TRACE = "run.json", "metrics.jsonl", "trace.json.gz"
RESERVED = "epoch start seconds bytes waits phases imbalance by_rank".split()
Row = dict[str, Any]


class metrics:
    """Records the time, traffic and values of each epoch on all ranks, as one plain dict.

        run = pdc.metrics("runs/gcn", mesh, data=data)
        for epoch in range(200):
            with run.phase("train"):
                loss = train()
            row = run.epoch(epoch, loss=loss, accuracy=test())

    `pyg-distcomm report runs/gcn -o report.html` draws it. Bytes and waits are those of the
    mesh's ledger since the last epoch, without the messages of this class.

    Args:
        folder: the folder in which rank 0 writes the run: run.json has the ranks and the
            partition, metrics.jsonl a line for each epoch, and `trace` adds a
            timeline; None writes nothing. A run that is in the folder already is continued.
        mesh: the ranks; those of the last `pdc.init` if None.
        data: the share that `pdc.partition` returned, for the figures of the partition; on
            all ranks or none.
        loader: a loader of this package, whose phases are recorded, too.
        writers: functions that rank 0 calls with each row: `CSVWriter(path)`,
            `TensorBoardWriter(folder)`, `wandb.log`, or your own. If one fails, it is
            reported by a warning and not called again, and training goes on.

    Raises:
        ValueError, TypeError: on all ranks, if the folder cannot be written, or holds no
            run; if data is no share, or not given on all ranks.

    Price: an all-gather of about a kilobyte a rank and epoch.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        mesh: Mesh | None = None,
        *,
        data: Any = None,
        loader: Any = None,
        writers: Sequence[Callable[[Row], Any]] = (),
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.mesh = given_mesh(mesh, "pdc.metrics")
        self._loader, self._start = loader, 0
        self._axis = replace(self.mesh.everyone, ledger=Ledger(traced=False))
        self._open_run(data)
        self._writers: list[Callable[[Row], Any]] = []
        if self._axis.rank == 0:
            to_folder = [] if self.folder is None else [self._append]
            self._writers = [*to_folder, *writers]
        self._phases: dict[str, float] = {}
        self._inner = 0.0  # seconds of the phases inside the one that is open
        self._before = self.mesh.ledger.snapshot()
        self._clock = time.perf_counter()

    def _open_run(self, data: Any) -> None:
        """Describes the run in its folder, which rank 0 names and writes; collective."""
        mesh, axis = self.mesh, self._axis
        shared = isinstance(getattr(data, "edge_index", None), DistEdgeIndex)
        with on_all_ranks(axis):
            if data is not None and not shared:
                raise TypeError(
                    "pdc.metrics takes as data what pdc.partition(data, mesh) returned, got "
                    f"{type(data).__name__} with a plain edge_index"
                )
        check_alike({"data": "a share" if shared else "none"}, axis)
        # of rank 0, so that `trace` is entered on all ranks, or on none
        named = None if self.folder is None else str(self.folder)
        place = collectives.broadcast_object(named, axis)
        self.folder = None if place is None else Path(place)
        about: Row = {
            "ranks": axis.size,
            "grid": list(mesh.grid),
            "stages": mesh.stage.size,
            "hosts": collectives.all_gather_object(socket.gethostname(), axis),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        if shared:
            about["partition"] = asdict(partition_report(data))
        with on_all_ranks(axis):
            if self.folder is not None and axis.rank == 0:
                with explaining_disk(self.folder):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    starts = [*_read_json(self.folder / RUN).get("starts", [])]
                    self._start = len(starts)
                    starts.append({"time": time.time(), "ranks": axis.size})
                    told = json.dumps({**about, "starts": starts})
                    write_text(self.folder / RUN, told)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block of the script as a phase of this epoch, and marks it in a trace.

        Phases do not overlap: the seconds of a phase inside another count for it alone.
        """
        begin, outer, self._inner = time.perf_counter(), self._inner, 0.0
        try:
            with span("script", str(name)):
                yield
        finally:
            seconds = time.perf_counter() - begin
            own = max(seconds - self._inner, 0.0)
            self._phases[name] = self._phases.get(name, 0.0) + own
            self._inner = outer + seconds

    def trace(self) -> trace:
        """Returns a `pdc.trace` into the folder, to be used by `with` around a few epochs.

        Raises:
            ValueError: if there is no folder.
        """
        if self.folder is None:
            raise ValueError(
                "pdc.metrics(None) has no folder; give one, or use pdc.trace(path, mesh)"
            )
        return trace(self.folder / TRACE, self.mesh)

    def epoch(self, epoch: int, /, **values: Any) -> Row:
        """Ends an epoch and returns its figures, equal on all ranks; collective.

        Args:
            epoch: its number, larger than the last one's of this start; an epoch that is
                trained again after a restart takes the place of the earlier one.
            values: numbers to go with it, `loss=..., accuracy=...`; rank 0's count.

        Returns:
            A dict of plain values:

            epoch, the values, seconds (of the slowest rank);
            bytes: received by all ranks, "total" and of each "operation axis";
            waits: seconds waited for other ranks, "mean" and "most";
            phases: mean seconds of "computing" (all but waiting), "waiting", the script's
                own phases, and a loader's;
            imbalance: the most over the mean of a rank, of "bytes", "waits", "computing";
            by_rank: lists of "bytes", "waits", "seconds", and "phases", a list for each of
                the script's own.

        Raises:
            ValueError, TypeError: on all ranks, for a value of rank 0 that is no number, or
                has a name of these.
        """
        given, problem = {}, None
        try:
            epoch = int(epoch)
            given = {name: _number(name, value) for name, value in values.items()}
        except (ValueError, TypeError) as error:
            problem = isinstance(error, TypeError), str(error)
        now, ledger = time.perf_counter(), self.mesh.ledger.snapshot()
        own_figures = {
            "seconds": now - self._clock,
            "moved": _ledger_difference(self._before, ledger),
            "phases": self._phases | _loader_phases(self._loader),
            "given": given,
            "problem": problem,
            "place": (epoch, self._start),
        }
        ranks = collectives.all_gather_object(own_figures, self._axis)
        if ranks[0]["problem"] is not None:
            is_type, text = ranks[0]["problem"]
            raise (TypeError if is_type else ValueError)(text)
        row = _row(ranks)
        self._write_row(row)
        values_text = ", ".join(f"{name} {row[name]:.4g}" for name in ranks[0]["given"])
        about = row["epoch"], row["seconds"], row["bytes"]["total"], values_text
        tell(self.mesh.everyone.rank, "epoch %d: %.3f s, %d bytes, %s", *about)
        self._phases, self._before = {}, self.mesh.ledger.snapshot()
        self._clock = time.perf_counter()
        return row

    def _write_row(self, row: Row) -> None:
        for write in [*self._writers]:
            try:
                write(row)
            except Exception as error:
                self._writers.remove(write)
                what = getattr(write, "__qualname__", type(write).__name__)
                warnings.warn(
                    f"pdc.metrics: {what} failed and is not called again: {error}",
                    stacklevel=3,
                )

    def _append(self, row: Row) -> None:
        assert self.folder is not None
        add_line(self.folder / ROWS, json.dumps(as_json(row, 4)) + "\n")


def _ledger_difference(
    before: dict[Any, Entry], now: dict[Any, Entry]
) -> dict[str, list[float]]:
    """Returns bytes received and seconds waited since `before`, by "operation axis"."""
    if any(old.calls > now.get(key, Entry()).calls for key, old in before.items()):
        before = {}  # the ledger was reset since
    found = {}
    for (op, axis), entry in now.items():
        old = before.get((op, axis), Entry())
        moved = [entry.bytes - old.bytes, entry.seconds - old.seconds]
        if any(moved):
            found[f"{op} {axis}"] = moved
    return found


def _loader_phases(loader: Any) -> dict[str, float]:
    phases = getattr(loader, "phases", None)
    if phases is None:
        return {}
    known = dict(phases.by_name)  # threads may add to it meanwhile
    return {f"{LOADER}{name}": phase.seconds for name, phase in known.items()}


def _row(ranks: list[Row]) -> Row:
    """Returns the figures of an epoch from those of each rank."""
    bytes_of = [sum(moved[0] for moved in r["moved"].values()) for r in ranks]
    waits = [sum(moved[1] for moved in r["moved"].values()) for r in ranks]
    seconds = [r["seconds"] for r in ranks]
    # threads of a loader wait, too, so that waits may be longer than the epoch
    computing = [max(s - w, 0.0) for s, w in zip(seconds, waits, strict=True)]
    ops = sorted({op for r in ranks for op in r["moved"]})
    moved = {op: sum(r["moved"].get(op, [0])[0] for r in ranks) for op in ops}
    names = dict.fromkeys(name for r in ranks for name in r["phases"])
    phases = {n: [r["phases"].get(n, 0.0) for r in ranks] for n in names}
    own = {n: each for n, each in phases.items() if not n.startswith(LOADER)}
    mean = sum(waits) / len(ranks)
    epoch, start = ranks[0]["place"]
    return {
        "epoch": epoch,
        **ranks[0]["given"],
        "seconds": max(seconds),
        "bytes": {"total": sum(bytes_of), **{op: n for op, n in moved.items() if n}},
        "waits": {"mean": mean, "most": max(waits)},
        "phases": {
            "computing": sum(computing) / len(ranks),
            "waiting": mean,
            **{n: sum(each) / len(ranks) for n, each in phases.items()},
        },
        "imbalance": {
            "bytes": imbalance(bytes_of),
            "waits": imbalance(waits),
            "computing": imbalance(computing),
        },
        "by_rank": {
            "bytes": bytes_of,
            "waits": waits,
            "seconds": seconds,
            "phases": own,
        },
        "start": start,
    }


def _number(name: str, value: Any) -> float | int:
    if name in RESERVED:
        raise ValueError(
            f"{name}= is a figure of pdc.metrics itself; give the value another name"
        )
    if isinstance(value, bool) or not isinstance(value, int):
        try:
            return float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name}={type(value).__name__} is not one number ({error}); give a float"
            ) from None
    return value


def flat(row: Row) -> dict[str, float]:
    """Returns the numbers of a row, keyed as "bytes/total", without those by rank."""
    found: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, dict) and name != "by_rank":
            found |= {f"{name}/{inner}": number for inner, number in value.items()}
        elif isinstance(value, (int, float)):
            found[name] = value
    return found


# Reading ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedRun:
    """Holds a run that was read from a folder of `pdc.metrics`.

    Args:
        about: the ranks, hosts, partition and starts.
        rows: one row per epoch; a later start drops earlier rows from its first epoch on.
        trace: the path of the timeline, if there is one.
    """

    about: Row
    rows: list[Row] = field(default_factory=list)
    trace: Path | None = None


def read_run(folder: str | os.PathLike[str]) -> RecordedRun:
    """Reads a folder that `pdc.metrics` has written; raises ValueError for other files."""
    place = Path(folder)
    if not (place / RUN).is_file():
        raise ValueError(f"{place} holds no {RUN}; give the folder of pdc.metrics")
    found = place / TRACE if (place / TRACE).is_file() else None
    return RecordedRun(_read_json(place / RUN), _read_rows(place), found)


def _read_rows(folder: Path) -> list[Row]:
    """Returns the row of each epoch, of the last start that trained it."""
    rows: list[Row] = []
    path = folder / ROWS
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            number = row["epoch"] = int(row["epoch"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue  # cut short by a kill
        while rows and rows[-1]["epoch"] >= number:
            rows.pop()
        rows.append(row)
    return rows


def _read_json(path: Path) -> Row:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("starts"), list):
        raise ValueError(
            f"{path}: is not what pdc.metrics has written; use another folder"
        )
    return found


def write_text(path: Path, text: str) -> None:
    """Writes a file whole, or not at all; an OSError names it."""
    with whole_file(path) as aside:
        aside.write_text(text)


def is_finite(value: Any) -> bool:
    """Returns whether a value of a row is a finite number."""
    return isinstance(value, (int, float)) and math.isfinite(value)


class CSVWriter:
    """Writes the rows of `pdc.metrics` to a CSV file, one line per epoch; rank 0 writes.

    A run that resumes from a checkpoint replaces the lines of epochs that it repeats. A
    figure that appears later, such as another operation, becomes one more column.

    Args:
        path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._columns: list[str] = []
        self._last = math.inf

    def __call__(self, row: Row) -> None:
        """Writes a row."""
        line: dict[str, Any] = flat(row)
        if self._last < row["epoch"] and set(line) <= set(self._columns):
            add_line(self.path, self._text([line]))
        else:
            lines = [one for one in self._read() if float(one["epoch"]) < row["epoch"]]
            lines.append(line)
            self._columns = list(dict.fromkeys(name for one in lines for name in one))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            head = dict(zip(self._columns, self._columns, strict=True))
            write_text(self.path, self._text([head, *lines]))
        self._last = row["epoch"]

    def _text(self, lines: list[dict[str, Any]]) -> str:
        out = io.StringIO()
        csv.DictWriter(out, self._columns, lineterminator="\n").writerows(lines)
        return out.getvalue()

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with open(self.path, newline="") as file:
            text = file.read()
        # a line that a kill has cut short has no newline, or lacks columns
        read = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        return [one for one in read if one.get("epoch") and None not in one.values()]


class TensorBoardWriter:
    """Writes the rows of `pdc.metrics` as scalars of TensorBoard; rank 0 writes.

    A run that resumes from a checkpoint replaces the points of epochs that it repeats.

    Args:
        folder: the folder for `tensorboard --logdir`.

    Raises:
        ImportError: at the first row, without the package tensorboard.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def __call__(self, row: Row) -> None:
        """Writes a row."""
        if self._writer is None:
            try:
                board: Any = importlib.import_module("torch.utils.tensorboard")
            except ImportError as error:
                raise ImportError(
                    "TensorBoardWriter needs tensorboard: pip install tensorboard"
                ) from error
            # TensorBoard leaves out what an earlier start wrote of this epoch and later
            self._writer = board.SummaryWriter(
                str(self.folder), purge_step=row["epoch"]
            )
        for name, value in flat(row).items():
            if name not in ("epoch", "start"):
                self._writer.add_scalar(name.replace(" ", "_"), value, row["epoch"])
        self._writer.flush()
