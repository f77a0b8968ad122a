"""Writes rows of `pdc.metrics` for other programs: CSV files and TensorBoard."""

from __future__ import annotations

import csv
import importlib
import io
import os
from pathlib import Path
from typing import Any

from pyg_distcomm.watch.metrics import Row, flat, write_whole


class CSVWriter:
    """Keeps a CSV file of the rows of `pdc.metrics`, one line an epoch; rank 0 writes.

    A run that goes on from a checkpoint replaces the lines of epochs that it repeats. A
    figure that appears later, an operation say, becomes one more column.

    Args:
        path: the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._columns: list[str] = []
        self._last: float | None = None

    def __call__(self, row: Row) -> None:
        """Writes a row."""
        line: dict[str, Any] = flat(row)
        if self._last is not None and self._last < row["epoch"]:
            if not set(line) - set(self._columns):
                with open(self.path, "a", newline="") as file:
                    file.write(self._text([line]))
                self._last = row["epoch"]
                return
        lines = [one for one in self._read() if float(one["epoch"]) < row["epoch"]]
        lines.append(line)
        self._columns = list(dict.fromkeys(name for one in lines for name in one))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = dict(zip(self._columns, self._columns, strict=True))
        write_whole(self.path, self._text([head, *lines]))
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
        # what a kill has cut short has no end, or no figure in a column
        read = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        return [one for one in read if one.get("epoch") and None not in one.values()]


class TensorBoardWriter:
    """Writes the rows of `pdc.metrics` as scalars of TensorBoard; rank 0 writes.

    A run that goes on from a checkpoint replaces the points of epochs that it repeats.

    Args:
        folder: where `tensorboard --logdir` looks.

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
                    "TensorBoardWriter takes tensorboard: pip install tensorboard"
                ) from error
            # TensorBoard leaves out what an earlier start wrote of this epoch and later
            self._writer = board.SummaryWriter(
                str(self.folder), purge_step=row["epoch"]
            )
        for name, value in flat(row).items():
            if name not in ("epoch", "start"):
                self._writer.add_scalar(name.replace(" ", "_"), value, row["epoch"])
        self._writer.flush()
