"""Machine: what ranks compute with and talk over, in seconds; measured, or given by hand."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pyg_distcomm.mesh import Grid

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Rate:
    """Work a second as a function of width: straight lines between measured points.

    Lines run through seconds a row against width, as memory and arithmetic have it;
    beyond the last point the rate stays what it was there.

    Args:
        points: (width, numbers a second), widths ascending.
    """

    points: Points

    def __post_init__(self) -> None:
        widths = [w for w, _ in self.points]
        if not widths or widths != sorted(set(widths)) or widths[0] < 1:
            raise ValueError(f"a Rate needs ascending widths, got {widths}")
        for _, rate in self.points:
            _check_positive("a rate", rate)

    def seconds(self, rows: Any, width: Any) -> Any:
        """Returns the seconds for so many rows (or nonzeros) of so many numbers."""
        widths = np.array([w for w, _ in self.points], np.float64)
        each = widths / np.array([rate for _, rate in self.points])
        wide = np.asarray(width, np.float64)
        inside = np.interp(wide, widths, each)
        beyond = np.where(wide > widths[-1], wide / widths[-1], 1.0)
        return np.where(wide > 0, inside * beyond * rows, 0.0)


@dataclass(frozen=True)
class Wire:
    """One axis: seconds a message takes to begin, bytes a second each way at once."""

    latency: float
    bandwidth: float

    def seconds(self, messages: Any, sent: Any, received: Any) -> Any:
        """Returns the seconds of one exchange: alpha messages + bytes / beta.

        Both ways run at once, so the fuller one counts.
        """
        return self.latency * messages + np.maximum(sent, received) / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """The figures from which `plan` predicts seconds.

    Args:
        latency: seconds a message takes beside its bytes.
        bandwidth: bytes a second that a rank sends, and receives at the same time.
        spmm: nonzeros times width a second of a sparse product, or a `Rate`.
        gemm: multiplications and additions a second of a dense product, or a `Rate` by
            its narrower width.
        stream: bytes a second that row by row operations read and write.
        overhead: seconds a layer takes in an epoch beside its work.
        memory: bytes a rank may use; None for no limit.
        axes: `Wire`s of single axes ("row", "col", "fiber", "world") on `grid`.
        grid: the grid that `axes` were measured on; other grids take the first two.
        source: where the figures come from.

    The default is a cluster of commodity machines on Ethernet of 1 Gbit/s.
    """

    latency: float = 50e-6
    bandwidth: float = 117e6
    spmm: Rate | float = 1e9
    gemm: Rate | float = 20e9
    stream: float = 5e9
    overhead: float = 0.0
    memory: float | None = None
    axes: Mapping[str, Wire] = field(default_factory=dict)
    grid: Grid | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        for name in ("spmm", "gemm"):
            value = getattr(self, name)
            if not isinstance(value, Rate):
                object.__setattr__(self, name, Rate(((1, value),)))
        for name in ("bandwidth", "stream"):
            _check_positive(name, getattr(self, name))
        for name in ("latency", "overhead"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0 seconds, got {value!r}")
        if self.memory is not None:
            _check_positive("memory", self.memory)
        object.__setattr__(self, "axes", MappingProxyType(dict(self.axes)))

    def wire(self, axis: str, grid: Grid) -> Wire:
        """Returns the figures of an axis of a grid."""
        if axis in self.axes and (axis == "world" or grid == self.grid):
            return self.axes[axis]
        return Wire(self.latency, self.bandwidth)

    def multiply_seconds(self, nonzeros: Any, width: Any) -> Any:
        """Returns the seconds of a sparse product."""
        assert isinstance(self.spmm, Rate)
        return self.spmm.seconds(nonzeros, width)

    def linear_seconds(self, rows: Any, width_in: int, width_out: int) -> Any:
        """Returns the seconds of `[rows, width_in] @ [width_in, width_out]`."""
        assert isinstance(self.gemm, Rate)
        narrow, wide = sorted((width_in, width_out))
        return self.gemm.seconds(2 * wide * rows, narrow)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as `from_dict` takes them."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("spmm", "gemm"):
            plain[name] = [list(point) for point in plain[name].points]
        plain["axes"] = {name: asdict(wire) for name, wire in self.axes.items()}
        plain["grid"] = None if self.grid is None else list(self.grid)
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Machine:
        """Makes a machine of what `to_dict` returned."""
        if not isinstance(plain, Mapping):
            raise ValueError(f"a machine is a mapping, got {type(plain).__name__}")
        known = {f.name for f in fields(Machine)}
        strange = sorted(set(plain) - known)
        if strange:
            raise ValueError(f"a machine has no {', '.join(strange)}")
        values = dict(plain)
        for name in ("spmm", "gemm"):
            if isinstance(values.get(name), Sequence):
                values[name] = Rate(tuple((int(w), float(r)) for w, r in values[name]))
        axes = values.get("axes") or {}
        values["axes"] = {name: Wire(**wire) for name, wire in axes.items()}
        if values.get("grid") is not None:
            r, s, p = values["grid"]
            values["grid"] = (r, s, p)
        return Machine(**values)

    def save(self, path: str | Path) -> None:
        """Writes the figures as JSON, whole or not at all."""
        path = Path(path)
        aside = path.with_name(f"{path.name}.part{os.getpid()}")
        aside.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        aside.replace(path)

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Reads what `save` wrote.

        Raises:
            ValueError: naming the file, if it holds something else.
        """
        try:
            return Machine.from_dict(json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: holds no machine: {error}") from None

    def __str__(self) -> str:
        lines = [
            f"machine   {self.source}",
            f"link      {self.latency * 1e6:,.0f} us a message, "
            f"{self.bandwidth / 1e6:,.1f} MB/s each way",
        ]
        for name, wire in self.axes.items():
            lines.append(
                f"  {name:<7} {wire.latency * 1e6:,.0f} us, {wire.bandwidth / 1e6:,.1f} MB/s"
            )
        for name in ("spmm", "gemm"):
            rate = getattr(self, name)
            each = ", ".join(f"{r / 1e9:.3g} at width {w}" for w, r in rate.points)
            lines.append(f"{name:<9} 1e9/s: {each}")
        lines.append(
            f"rows      {self.stream / 1e9:.3g} GB/s; {self.overhead * 1e3:.3g} ms a layer"
        )
        return "\n".join(lines)


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not value > 0 or math.isinf(value):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
