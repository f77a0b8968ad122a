"""Defines what codecs compute: a few bits per number, and columns of rows.

Letters: ``m`` rows of ``f`` numbers, ``b`` bits a code, ``k`` numbers kept of a row. The
rows are those of ``x``, or those at ``index`` if it is given. A message is a vector of
bytes; within it codes follow each other without a gap, the first in the lowest
bits of the first byte, and only the last byte may have bits left over.

[Note: one row as a minimum and a step] For a row with lowest and highest number lo, hi,

    z = lo rounded down to bf16,   D = (hi - z) / B rounded up,   B = 2^b - 1

and a number x between them is a code q in 0 .. B that is read as z + q D. Four bytes
lead each row: D, whose sign is free, then z. A row of one and the same number c sets
that sign instead. Its other 31 bits are the first of c, written as 64 bits (as 32, and
then zeros, in float32), and the next 33 bits are its codes, as far as they go. Where
float64 rows have fewer, the last 32 bits of each row come after all codes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_distcomm.kernels.core_ops import keyed_hashes
from pyg_distcomm.kernels.registry import FLOATS, op

META = 4  # bytes that lead a quantised row
FLAG = -(2**15)  # the sign of D, as int16
LEAST = 1e-37  # a step D below which it is left, too
TAIL = 33  # bits of a constant that do not fit in META
WIDEST = 3e38  # a range B D above which float32 is left for float64
MAX_WIDTH = 1 << 20  # columns a keyed choice is made of
REALS = (*FLOATS, torch.float16, torch.bfloat16)
BLOCK = 1 << 16  # numbers of a narrower type that are float32 at a time
Noise = tuple[int, Tensor]  # a key, and the global id of each row [m]


def message_bytes(rows: int, width: int, bits: int, itemsize: int) -> int:
    """Returns the bytes of quantised rows, of numbers of `itemsize` bytes."""
    start = rest_begins(rows, width, bits)
    return start + (META * rows if itemsize == 8 and width * bits < TAIL else 0)


def rest_begins(rows: int, width: int, bits: int) -> int:
    """Returns where the codes end."""
    return META * rows + -(-rows * width * bits // 8)


def wrong_length(got: int, wanted: int) -> str:
    """Returns the error for a message that was cut elsewhere than it was written."""
    return (
        f"a message has {got} bytes, but its header says {wanted}; both ends must cut "
        "messages by `wire_bytes`"
    )


def _check_packed(packed: Tensor, bits: int, count: int) -> None:
    if len(packed) != -(-count * bits // 8):
        raise ValueError(wrong_length(len(packed), -(-count * bits // 8)))


def quantise(
    x: Tensor, index: Tensor | None, bits: int, noise: Noise | None, out: Tensor
) -> int | Tensor:
    """Writes rows as codes, to nearest or, with `noise`, up or down at random.

        t = (x - z) (1/D),   q = round(t)  or  floor((round(2^16 t) + u) / 2^16)

    and not above B, with u the 16 bits of `noise_bits`, so that the mean of z + q D is x
    to 2^-17 D. Four bytes per row, then the codes. A row that has a NaN, an infinity, or no
    z or D in bf16 is written to be read as NaN.

    Rows of float16 and bfloat16 are written as float32, some at a time.

    Shapes: x [n, f]; out as long as `message_bytes` says, uint8.
    Returns the first row that could not be written, or -1: on a device as a tensor, where
    nothing has to wait for it.
    """
    count, width = size_of(x, index)
    wanted = message_bytes(count, width, bits, x.element_size())
    if out.dtype != torch.uint8 or out.shape != (wanted,) or not out.is_contiguous():
        raise ValueError(
            f"out must be {wanted} contiguous bytes, got {list(out.shape)} of {out.dtype}"
        )
    if noise is not None and len(noise[1]) != count:
        raise ValueError(
            f"noise must name each of the {count} rows, got {len(noise[1])}"
        )
    if x.dtype in FLOATS:
        return quantise_wide(x, index, bits, noise, out)
    bad: int | Tensor = -1
    for rows, meta, packed in _blocks(count, x, bits):
        some = x[rows] if index is None else x[index[rows].long()]
        drawn = None if noise is None else (noise[0], noise[1][rows])
        sizes = len(out[meta]), len(out[packed])
        part = out.new_empty(sum(sizes))
        found = quantise(some.float(), None, bits, drawn, part)
        if isinstance(found, Tensor):  # of all rows
            bad = found
        elif isinstance(bad, int) and bad < 0 <= found:
            bad = rows.start + found
        out[meta], out[packed] = part.split(sizes)
    return bad


@op("x", FLOATS)
def quantise_wide(
    x: Tensor, index: Tensor | None, bits: int, noise: Noise | None, out: Tensor
) -> int | Tensor:
    """Writes rows of float32 or float64; see `quantise`."""
    x = _rows(x, index)
    m, f = x.shape
    if not x.numel():
        out.zero_()
        return -1
    low, high = (t + 0.0 for t in torch.aminmax(x, dim=1))  # a zero has no sign here
    end = rest_begins(m, f, bits)
    z, step, word, same, bad = write_bounds(low, high, 2**bits - 1, out, end)
    codes = _codes(x, z, step, 2**bits - 1, noise).clamp_(max=2**bits - 1)
    codes[bad] = 0.0
    codes[same] = _tail(word[same], bits, f).to(codes.dtype)
    out[META * m : end] = pack_bits.definition(codes.to(torch.uint8).view(-1), bits)
    return int(bad.nonzero()[0]) if bool(bad.any()) else -1


def write_bounds(
    low: Tensor, high: Tensor, top: int, out: Tensor, end: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Writes the bounds that lead rows, and from byte `end` on low bits of constant rows.

    Shapes: low and high, the bounds of rows, [m]. Returns z and D, the bits of `low` as
    int64, and whether a row is one and the same number, or cannot be written, [m] each.
    """
    z = rounded_to_bf16(low.double(), up=False)
    step = rounded_to_bf16((high.double() - z.double()) / top, up=True)
    same = (low == high) & high.isfinite()
    bad = ~(same | z.isfinite() & step.isfinite() & high.isfinite())
    word = word_of(low)
    first = step.view(torch.int16).masked_fill(bad, 0)
    second = z.masked_fill(bad, float("nan")).view(torch.int16)
    first = torch.where(same, ((word >> 49) & 0x7FFF | FLAG).to(torch.int16), first)
    second = torch.where(same, (word >> 33).to(torch.int16), second)
    meta = torch.stack([first, second], 1)
    out[: META * len(low)] = meta.view(torch.uint8).view(-1)
    if end < len(out):
        out[end:] = word.masked_fill(~same, 0).to(torch.int32).view(torch.uint8)
    return z, step, word, same, bad


def read_bounds(
    message: Tensor, rows: int, end: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reads what `write_bounds` wrote.

    Returns z and D in float64, the bits of rows of one number but for those in their codes,
    int64, and which rows these are, [rows] each.
    """
    meta = message[: META * rows].clone().view(torch.int16).view(rows, 2)
    first, second = meta.unbind(1)
    step, z = (t.contiguous().view(torch.bfloat16).double() for t in (first, second))
    word = (first.long() & 0x7FFF) << 49 | (second.long() & 0xFFFF) << 33
    if end < len(message):
        word |= message[end:].clone().view(torch.int32).long() & 0xFFFFFFFF
    return z, step, word, first < 0


def dequantise(message: Tensor, bits: int, out: Tensor) -> Tensor:
    """Reads quantised rows into `out` [m, f], as z + q D.

    The sum is taken in float64 (float32 for narrower types), so that it is rounded once;
    one beyond the range of the type, as D was rounded up, is its greatest number.
    """
    wanted = message_bytes(len(out), out.size(1), bits, out.element_size())
    if len(message) != wanted:
        raise ValueError(wrong_length(len(message), wanted))
    if out.dtype in FLOATS:
        return dequantise_wide(message, bits, out)
    most = torch.finfo(out.dtype).max
    for rows, meta, packed in _blocks(len(out), out, bits):
        part = torch.cat([message[meta], message[packed]])
        wide = torch.empty(out[rows].shape, dtype=torch.float32, device=out.device)
        out[rows] = dequantise(part, bits, wide).clamp_(-most, most).to(out.dtype)
    return out


@op("out", FLOATS)
def dequantise_wide(message: Tensor, bits: int, out: Tensor) -> Tensor:
    """Reads rows into float32 or float64; see `dequantise`."""
    m, f = out.shape
    if not out.numel():
        return out
    end = rest_begins(m, f, bits)
    codes = (
        unpack_bits.definition(message[META * m : end], bits, m * f).view(m, f).long()
    )
    z, step, word, same = read_bounds(message, m, end)
    sums = torch.addcmul(z.unsqueeze(1), codes.double(), step.unsqueeze(1))
    out.copy_(sums.clamp_(max=torch.finfo(out.dtype).max))
    word = word[same] | _joined(codes[same], bits)
    if out.dtype == torch.float32:
        constant = (word >> 32).to(torch.int32).view(torch.float32)
    else:
        constant = word.view(torch.float64)
    out[same] = constant.unsqueeze(1).expand(-1, f)
    return out


def _codes(x: Tensor, z: Tensor, step: Tensor, top: int, noise: Noise | None) -> Tensor:
    """Returns the codes of rows, as float64, before they are cut off at B."""
    inverse = 1.0 / step.double()
    t = (x - z.to(x.dtype)[:, None]).mul_(inverse.to(x.dtype)[:, None]).double()
    far = (step.double() * top > WIDEST) | (step.double() < LEAST)
    t[far] = (x[far].double() - z[far].double()[:, None]) * inverse[far][:, None]
    t = t.nan_to_num_(0.0)  # zero times infinity in rows of one number
    if noise is None:
        return t.round_()
    parts = (t * 2.0**16).round_() + noise_bits(*noise, x.size(1))
    return (parts / 2.0**16).floor_()


def noise_bits(key: int, gid: Tensor, width: int) -> Tensor:
    """Draws 16 random bits for each (key, global id, column), four columns per hash.

        bits[v, c] = h[v, c // 4] >>> 16 (c mod 4)  modulo 2^16

    with h the hashes of `core_ops.keyed_hashes`. Shapes: gid [m]; bits [m, width].
    """
    h = keyed_hashes(key, gid, (width + 3) // 4)
    place = 16 * torch.arange(4, device=gid.device)
    return (h.unsqueeze(2) >> place & 0xFFFF).view(len(gid), -1)[:, :width]


@op("codes", (torch.uint8,))
def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [n] (uint8, below 2^bits) into bytes [ceil(n bits / 8)]."""
    per = 8 // bits
    padded = codes.new_zeros(-(-len(codes) // per) * per)
    padded[: len(codes)] = codes
    place = torch.arange(per, device=codes.device) * bits
    return (padded.view(-1, per).int() << place).sum(1).to(torch.uint8)


@op("packed", (torch.uint8,), check=_check_packed)
def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """Reads the first `count` codes of packed bytes: the reverse of `pack_bits`."""
    place = torch.arange(8 // bits, device=packed.device) * bits
    codes = (packed.int().unsqueeze(1) >> place) & (2**bits - 1)
    return codes.view(-1)[:count].to(torch.uint8)


def keyed_columns(
    key: int, width: int, count: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Chooses `count` of `width` columns, all subsets equally likely.

    Column c has the hash h of (key, c) whose low 20 bits are replaced by c; those of the
    `count` least hashes are chosen, and listed in ascending order.

    Shapes: columns [count], int32. Needs width <= 2^20.
    """
    if not 0 < count <= width <= MAX_WIDTH:
        raise ValueError(
            f"count and width must satisfy 0 < count <= width <= {MAX_WIDTH}, got {count} "
            f"and {width}"
        )
    column = torch.arange(width, device=device)
    nobody = torch.zeros(1, dtype=torch.int64, device=device)
    h = (keyed_hashes(key, nobody, width)[0] >> 1) & ((1 << 63) - MAX_WIDTH) | column
    least = h.sort().values[:count] & (MAX_WIDTH - 1)
    return least.sort().values.to(torch.int32)


@op("x", FLOATS)
def take_columns(x: Tensor, index: Tensor | None, columns: Tensor) -> Tensor:
    """Copies chosen columns: ``out[r, j] = x[r, columns[j]]``.

    Shapes: x [n, f], columns [k], out [m, k].
    """
    return _rows(x, index).index_select(1, columns)


@op("y", FLOATS)
def put_columns(y: Tensor, columns: Tensor, scale: float, out: Tensor) -> Tensor:
    """Puts numbers back where they were taken, times `scale`, among zeros.

    Shapes: y [m, k], columns [k], out [m, f].
    """
    return out.zero_().index_copy_(1, columns.long(), y * scale)


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index.long()]


def rounded_to_bf16(x: Tensor, up: bool) -> Tensor:
    """Rounds float64 to bf16, never below (`up`) or never above."""
    near = x.to(torch.bfloat16)
    beyond = near.double() < x if up else near.double() > x
    end = torch.full_like(near, float("inf") if up else float("-inf"))
    return torch.where(beyond, torch.nextafter(near, end), near)


def word_of(number: Tensor) -> Tensor:
    """Returns the bits of float32 or float64 numbers as the first of an int64."""
    if number.dtype == torch.float64:
        return number.view(torch.int64)
    return number.view(torch.int32).long() << 32


def _tail(word: Tensor, bits: int, width: int) -> Tensor:
    """Cuts the last 33 bits of words into codes [m, width]; zeros follow."""
    codes = torch.zeros(len(word), width, dtype=torch.int64, device=word.device)
    left = (word & ((1 << 33) - 1)) << 7  # 40 bits: whole codes for any number of bits
    for at in range(min(width, -(-33 // bits))):
        codes[:, at] = (left >> (40 - (at + 1) * bits)) & (2**bits - 1)
    return codes


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Joins the codes of `_tail` to the last 33 bits of words."""
    word = torch.zeros(len(codes), dtype=torch.int64, device=codes.device)
    for at in range(min(codes.size(1), -(-33 // bits))):
        word |= codes[:, at] << (40 - (at + 1) * bits)
    return word >> 7


def _blocks(rows: int, x: Tensor, bits: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yields rows, what leads them, and their codes, which fill whole bytes.

    On a device all rows at once: kernels that are begun one by one would wait.
    """
    width, begins = x.size(1), META * rows
    some = 8 * max(BLOCK // (8 * max(width, 1)), 1)
    if x.device.type != "cpu":
        some = max(rows, 1)
    for begin in range(0, rows, some):
        end = min(begin + some, rows)
        first, last = (begins + -(-at * width * bits // 8) for at in (begin, end))
        yield slice(begin, end), slice(META * begin, META * end), slice(first, last)


def size_of(x: Tensor, index: Tensor | None) -> tuple[int, int]:
    """Returns the shape of the rows that are coded."""
    return len(x) if index is None else len(index), x.size(1)
