"""How fast rows are written for the wire and read again, beside a copy of them.

    python benchmarks/codecs.py

Prints GB of float32 rows per second, encoding and decoding, the copy taking turns with
them, and what that means for a link: the seconds that a rank spends on both, against
those its message takes at 1 Gbit/s.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from pyg_distcomm.halo.codecs import (
    Cast,
    Chain,
    Codec,
    ColumnMask,
    Plain,
    Quantise,
    RngKey,
)

LINK = 1e9 / 8  # bytes per second
ONE = Quantise(1, "stochastic")
CODECS: dict[str, Codec] = {
    "plain": Plain(),
    "bf16": Cast(torch.bfloat16),
    "1 bit, nearest": Quantise(1),
    "1 bit, stochastic": ONE,
    "2 bits, stochastic": Quantise(2, "stochastic"),
    "4 bits, stochastic": Quantise(4, "stochastic"),
    "8 bits, stochastic": Quantise(8, "stochastic"),
    "8 bits, nearest": Quantise(8),
    "columns 1/4, prefix": ColumnMask(4, "prefix"),
    "columns 1/4, epoch": ColumnMask(4),
    "columns 1/4 then 1 bit": Chain(ColumnMask(4), ONE),
}


def seconds(work, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(codec: Codec, x: torch.Tensor, repeats: int) -> tuple[float, ...]:
    """Returns seconds of a copy, of encoding and of decoding, and the bytes sent."""
    rows, width = x.shape
    y, draw = torch.empty_like(x), RngKey(12345, torch.arange(rows))
    out = torch.empty(codec.wire_bytes(rows, width), dtype=torch.uint8)

    def encode() -> torch.Tensor:
        return codec.encode(x, draw, out=out)

    message = encode()
    codec.decode(message, y, draw)  # compiled, and its memory touched
    copied, written, read = [], [], []
    for _ in range(repeats):
        copied.append(seconds(lambda: y.copy_(x), 1))
        written.append(seconds(encode, 1))
        read.append(seconds(lambda: codec.decode(message, y, draw), 1))
    found = map(statistics.median, (copied, written, read))
    return (*found, float(len(message)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 100, 256, 602])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    head = "threads width codec copy encode decode bytes/plain link/codec plain/all"
    print("| " + " | ".join(head.split()) + " |")
    print("|" + " --- |" * 9)
    for threads in options.threads:
        torch.set_num_threads(threads)
        for width in options.widths:
            rows = options.megabytes * 2**20 // (4 * width)
            g = torch.Generator().manual_seed(1)
            x = torch.randn(rows, width, generator=g)
            for name, codec in CODECS.items():
                copy, write, read, sent = measure(codec, x, options.repeats)
                size = x.numel() * 4
                speeds = [f"{size / t / 1e9:.2f}" for t in (copy, write, read)]
                wire = sent / LINK
                cells = (
                    threads,
                    width,
                    name,
                    *speeds,
                    f"{sent / size:.3f}",
                    f"{wire / (write + read):.2f}",
                    f"{size / LINK / (wire + write + read):.1f}",
                )
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
