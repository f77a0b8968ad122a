"""Holds the latencies, bandwidths and rates from which plans estimate seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pyg_distcomm.comm.mesh import Grid
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.partition.atomic import sync, whole_file, write_problem

# What data sheets say of devices: bytes, bytes a second of memory, single-precision operations
# a second without tensor cores, and bytes per second each way of NVLink to other devices of a
# host. Sources: NVIDIA's data sheets "A100 80GB Tensor Core GPU" (SXM), "H100 Tensor Core GPU"
# (SXM) and "H200 Tensor Core GPU" (SXM); NVLink's figure there is of both ways together.
DEVICES: Mapping[str, tuple[float, float, float, float]] = MappingProxyType(
    {
        "a100": (80e9, 2.039e12, 19.5e12, 300e9),
        "h100": (80e9, 3.35e12, 67e12, 450e9),
        "h200": (141e9, 4.8e12, 67e12, 450e9),
    }
)
# bytes per second each way of a port: NVIDIA's data sheets of ConnectX-6 (HDR, 200 Gbit/s),
# ConnectX-7 (NDR, 400 Gbit/s) and ConnectX-8 (XDR, 800 Gbit/s)
INFINIBAND: Mapping[str, float] = MappingProxyType(
    {"hdr": 25e9, "ndr": 50e9, "xdr": 100e9}
)

Points = tuple[tuple[int, float], ...]
Line = tuple[int, int]


@dataclass(frozen=True)
class Rate:
    """Interpolates a rate of work by width, linearly between measured points.

    Interpolates the seconds per row by width, which memory and arithmetic make nearly linear;
    beyond the last point the rate is constant.

    Args:
        points: (width, elements a second), widths ascending.
    """

    points: Points

    def __post_init__(self) -> None:
        widths = [w for w, _ in self.points]
        if not widths or widths != sorted(set(widths)) or widths[0] < 1:
            raise ValueError(f"a Rate needs ascending widths, got {widths}")
        for _, rate in self.points:
            _check_positive("a rate", rate)

    def seconds(self, rows: Any, width: Any) -> Any:
        """Returns the seconds for `rows` rows (or nonzeros) of `width` numbers."""
        widths = np.array([w for w, _ in self.points], np.float64)
        each = widths / np.array([rate for _, rate in self.points])
        wide = np.asarray(width, np.float64)
        inside = np.interp(wide, widths, each)
        beyond = np.where(wide > widths[-1], wide / widths[-1], 1.0)
        return np.where(wide > 0, inside * beyond * rows, 0.0)


@dataclass(frozen=True)
class Wire:
    """Holds the latency and bandwidth of one axis.

    Args:
        latency: seconds of a message in addition to its bytes.
        bandwidth: bytes per second in each direction, both at once.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_positive("bandwidth", self.bandwidth)
        _check_seconds("latency", self.latency)

    def seconds(self, messages: Any, sent: Any, received: Any) -> Any:
        """Returns the seconds of one exchange: alpha messages + bytes / beta.

        Both directions run at once, so the larger one counts. Takes numbers of one rank,
        or arrays of many.
        """
        return self.latency * messages + np.maximum(sent, received) / self.bandwidth

    def __str__(self) -> str:
        return f"{self.latency * 1e6:,.0f} us per message, {self.bandwidth / 1e6:,.1f} MB/s"


@dataclass(frozen=True)
class Machine:
    """Holds the rates of a machine, measured or stated, from which `plan` estimates seconds.

    Args:
        latency: seconds a message takes beside its bytes.
        bandwidth: bytes a second that a rank sends, and receives at the same time.
        spmm: nonzeros times width a second of a sparse product, or a `Rate`.
        gemm: multiplications and additions a second of a dense product, or a `Rate` by
            its narrower width.
        stream: bytes a second that row by row operations read and write.
        overhead: seconds a layer takes in an epoch beside its work.
        epoch: seconds that an epoch takes beside its layers, for the loss and the optimizer.
        memory: bytes a rank may use; None for no limit.
        lines: the `Wire` of each axis that was measured, by (size, stride): the number of
            its ranks, and how far apart they are; other axes have `latency`, `bandwidth`.
        sums: the `Wire` of all-reduces, if it differs.
        code: bytes of rows per second that a codec encodes, and that it decodes.
        codes: the same of codecs that were measured, (encodes, decodes) by `repr`.
        source: where the figures come from.

    The default is a cluster of commodity machines on Ethernet of 1 Gbit/s.
    """

    latency: float = 50e-6
    bandwidth: float = 117e6
    spmm: Rate | float = 2e9
    gemm: Rate | float = 20e9
    stream: float = 5e9
    overhead: float = 0.0
    epoch: float = 0.0
    memory: float | None = None
    lines: Mapping[Line, Wire] = field(default_factory=dict)
    sums: Wire | None = None
    source: str = "assumed"
    code: float = 1e9
    codes: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("spmm", "gemm"):
            value = getattr(self, name)
            if not isinstance(value, Rate):
                object.__setattr__(self, name, Rate(((1, value),)))
        for name in ("bandwidth", "stream", "code"):
            _check_positive(name, getattr(self, name))
        for name in ("latency", "overhead", "epoch"):
            _check_seconds(name, getattr(self, name))
        if self.memory is not None:
            _check_positive("memory", self.memory)
        object.__setattr__(self, "lines", MappingProxyType(dict(self.lines)))
        for name, both in self.codes.items():
            if not isinstance(both, Sequence) or len(both) != 2:
                raise ValueError(f"codes[{name!r}] is (writes, reads), got {both!r}")
        rates = {name: (float(a), float(b)) for name, (a, b) in self.codes.items()}
        for name, both in rates.items():
            for one in both:
                _check_positive(f"the rate of {name}", one)
        object.__setattr__(self, "codes", MappingProxyType(rates))

    @staticmethod
    def of_device(name: str) -> Machine:
        """Returns the peak figures of a device and of what connects it, by data sheets.

        No program reaches these peaks, so the seconds of a plan are lower bounds, and its
        ranking is by them; `calibrate` measures. A product is taken to read one row of
        float32 from memory for each nonzero; a message to take 10 us, which is assumed.

        Args:
            name: "a100", "h100" or "h200", linked by NVLink; or one device a host, linked
                by InfiniBand, as "h100/ndr": "hdr", "ndr" or "xdr".

        Raises:
            ValueError: for other names, with those that there are.
        """
        device, _, link = name.lower().partition("/")
        if device not in DEVICES or (link not in INFINIBAND and "/" in name):
            raise ValueError(
                f"device must be one of {', '.join(DEVICES)}, alone (linked by NVLink) or "
                f"followed by one of {', '.join('/' + k for k in INFINIBAND)} (one per host, "
                f"linked by InfiniBand), got {name!r}"
            )
        memory, stream, operations, nvlink = DEVICES[device]
        return Machine(
            latency=10e-6,
            bandwidth=INFINIBAND[link] if link else nvlink,
            spmm=stream / 4,
            gemm=operations,
            stream=stream,
            memory=memory,
            code=stream / 4,
            source=f"peaks of data sheets: {name.lower()}",
        )

    def wire(self, axis: str, grid: Grid) -> Wire:
        """Returns the figures of an axis of a grid."""
        r, s, p = grid
        lines = {
            "row": (r, s * p),
            "col": (s, p),
            "fiber": (p, 1),
            "world": (r * s * p, 1),
        }
        return self.lines.get(lines[axis], Wire(self.latency, self.bandwidth))

    def sum_wire(self) -> Wire:
        """Returns the figures of all-reduces."""
        return self.sums or Wire(self.latency, self.bandwidth)

    def multiply_seconds(self, nonzeros: Any, width: Any) -> Any:
        """Returns the seconds of a sparse product."""
        assert isinstance(self.spmm, Rate)
        return self.spmm.seconds(nonzeros, width)

    def linear_seconds(self, rows: Any, width_in: int, width_out: int) -> Any:
        """Returns the seconds of `[rows, width_in] @ [width_in, width_out]`."""
        assert isinstance(self.gemm, Rate)
        narrow, wide = sorted((width_in, width_out))
        return self.gemm.seconds(2 * wide * rows, narrow)

    def coding_seconds(self, codec: Codec, written: Any, read: Any) -> Any:
        """Returns the seconds in which a codec encodes and decodes these bytes of rows."""
        writes, reads = self.codes.get(repr(codec), (self.code, self.code))
        return written / writes + read / reads

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as `from_dict` takes them."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("spmm", "gemm"):
            plain[name] = [list(point) for point in plain[name].points]
        plain["lines"] = [[*line, *astuple(wire)] for line, wire in self.lines.items()]
        plain["codes"] = {name: list(both) for name, both in self.codes.items()}
        plain["sums"] = None if self.sums is None else astuple(self.sums)
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Machine:
        """Builds a machine from the result of `to_dict`."""
        values: dict[str, Any] = dict(plain)
        for name in ("spmm", "gemm"):
            values[name] = Rate(tuple((w, r) for w, r in values[name]))
        values["lines"] = {
            (size, stride): Wire(*wire) for size, stride, *wire in values["lines"]
        }
        if values["sums"] is not None:
            values["sums"] = Wire(*values["sums"])
        return Machine(**values)

    def save(self, path: str | Path) -> None:
        """Writes the figures as JSON, whole or not at all, and waits for the disk.

        Raises:
            ValueError: naming the file, if it cannot be written; an older one stays.
        """
        path = Path(path)
        try:
            with whole_file(path) as aside:
                aside.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
                sync(aside)
        except OSError as error:
            raise ValueError(write_problem(error, path)) from error

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Reads what `save` wrote.

        Raises:
            ValueError: naming the file, if it holds something else.
        """
        try:
            return Machine.from_dict(json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{path}: holds no machine: {error!r}") from None

    def __str__(self) -> str:
        lines = [
            f"machine   {self.source}",
            f"link      {Wire(self.latency, self.bandwidth)} each way",
        ]
        for (size, stride), wire in self.lines.items():
            lines.append(f"  {size} ranks, {stride} apart: {wire}")
        if self.sums is not None:
            lines.append(f"  all-reduce: {self.sums}")
        for name in ("spmm", "gemm"):
            rate = getattr(self, name)
            each = ", ".join(f"{r / 1e9:.3g} at width {w}" for w, r in rate.points)
            lines.append(f"{name:<9} 1e9/s: {each}")
        lines.append(
            f"rows      {self.stream / 1e9:.3g} GB/s; {self.overhead * 1e3:.3g} ms per layer, "
            f"{self.epoch * 1e3:.3g} ms per epoch"
        )
        for name, (writes, reads) in self.codes.items():
            both = f"writes {writes / 1e9:.3g} GB/s, reads {reads / 1e9:.3g}"
            lines.append(f"codec     {name}: {both}")
        return "\n".join(lines)


def lines_of(size: int) -> list[Line]:
    """Lists the (size, stride) of all axes of two ranks or more in grids of `size` ranks."""
    sides = [d for d in range(2, size + 1) if size % d == 0]
    return [
        (d, k) for d in sides for k in range(1, size // d + 1) if size // d % k == 0
    ]


def _check_seconds(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds from 0 on, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not value > 0 or math.isinf(value):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
