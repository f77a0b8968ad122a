"""Holds the latencies, bandwidths and rates from which plans estimate seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

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


@dataclass(frozen=True)
class Wire:
    """Holds the latency and bandwidth of a link.

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
    """Holds the rates of a machine, as stated, from which `plan` estimates seconds.

    Args:
        latency: seconds a message takes beside its bytes.
        bandwidth: bytes a second that a rank sends, and receives at the same time.
        spmm: nonzeros times width a second of a sparse product.
        gemm: multiplications and additions a second of a dense product.
        stream: bytes a second that row by row operations read and write.
        overhead: seconds a layer takes in an epoch beside its work.
        epoch: seconds that an epoch takes beside its layers, for the loss and the optimizer.
        memory: bytes a rank may use; None for no limit.
        sums: the `Wire` of all-reduces, if it differs.
        source: where the figures come from.
        code: bytes of rows per second that a codec encodes, and that it decodes.

    The default is a cluster of commodity machines on Ethernet of 1 Gbit/s.

    Raises:
        ValueError: for rates that are not above 0, and seconds below 0.
    """

    latency: float = 50e-6
    bandwidth: float = 117e6
    spmm: float = 2e9
    gemm: float = 20e9
    stream: float = 5e9
    overhead: float = 0.0
    epoch: float = 0.0
    memory: float | None = None
    sums: Wire | None = None
    source: str = "assumed"
    code: float = 1e9

    def __post_init__(self) -> None:
        for name in ("bandwidth", "spmm", "gemm", "stream", "code"):
            _check_positive(name, getattr(self, name))
        for name in ("latency", "overhead", "epoch"):
            _check_seconds(name, getattr(self, name))
        if self.memory is not None:
            _check_positive("memory", self.memory)

    @staticmethod
    def of_device(name: str) -> Machine:
        """Returns the peak figures of a device and of what connects it, by data sheets.

        No program reaches these peaks, so the seconds of a plan are lower bounds, and its
        ranking is by them. A product is taken to read one row of
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

    @property
    def wire(self) -> Wire:
        """The figures of exchanges."""
        return Wire(self.latency, self.bandwidth)

    @property
    def sum_wire(self) -> Wire:
        """The figures of all-reduces."""
        return self.sums or self.wire

    def multiply_seconds(self, nonzeros: Any, width: Any) -> Any:
        """Returns the seconds of a sparse product."""
        return nonzeros * width / self.spmm

    def linear_seconds(self, rows: Any, width_in: int, width_out: int) -> Any:
        """Returns the seconds of `[rows, width_in] @ [width_in, width_out]`."""
        return 2 * rows * width_in * width_out / self.gemm

    def coding_seconds(self, written: Any, read: Any) -> Any:
        """Returns the seconds in which a codec encodes and decodes these bytes of rows."""
        return (written + read) / self.code

    def __str__(self) -> str:
        lines = [f"machine   {self.source}", f"link      {self.wire} each way"]
        if self.sums is not None:
            lines.append(f"  all-reduce: {self.sums}")
        for name in ("spmm", "gemm"):
            lines.append(f"{name:<9} 1e9/s: {getattr(self, name) / 1e9:.3g}")
        lines.append(
            f"rows      {self.stream / 1e9:.3g} GB/s; {self.overhead * 1e3:.3g} ms per layer, "
            f"{self.epoch * 1e3:.3g} ms per epoch"
        )
        return "\n".join(lines)


def _check_seconds(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds from 0 on, got {value!r}")


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not value > 0 or math.isinf(value):
        raise ValueError(f"{name} must be a number above 0, got {value!r}")
