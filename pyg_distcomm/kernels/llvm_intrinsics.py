"""Adds two vector instructions that Numba does not offer: a prefetch and a block sum.

[Note: why write LLVM by hand] A random gather waits for memory, so the product
must ask for a row well before it needs it, and must keep its sums in registers
meanwhile. Numba has no prefetch, and spills a loop's sums to memory at each edge.
Both are a few LLVM instructions, the same on every processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE = 64  # bytes in a cache line

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
Builder: TypeAlias = Any  # llvmlite.ir.IRBuilder, which has no types
Emitted = tuple[Any, Callable[..., Any]]


def _prefetch_line(typing: Any, x: Any, position: Any) -> Emitted:
    """Asks for the cache line of ``x[position]``, without waiting for it."""

    def emit(context: Any, build: Builder, sig: Any, args: Any) -> Any:
        pointer = _pointer(context, build, sig.args[0], args[0])
        _prefetch(build, build.gep(pointer, [args[1]]), 1)
        return context.get_dummy_value()

    return types.void(x, types.int64), emit


def _sum_block(
    typing: Any,
    width: Any,
    total: Any,
    at: Any,
    fresh: Any,
    col: Any,
    value: Any,
    begin: Any,
    end: Any,
    x: Any,
    x_ld: Any,
    offset: Any,
    ahead: Any,
    last: Any,
) -> Emitted:
    """Sums a block of the rows of x that edges begin .. end-1 point to.

        total[at + k] (+)= sum of value[e] x[col[e] x_ld + offset + k]

    A block is 2**len(width) bytes, known when compiling as the length of a tuple;
    ``value`` may be None. While it adds edge e it prefetches for edge e + ahead, or
    the last. The sum is taken in the order of edges, from zero if ``fresh``.
    """
    integer, size = types.int64, 2 ** len(width)
    head = (width, total, integer, types.boolean, col, value, integer, integer)
    sig = types.void(*head, x, integer, integer, integer, integer)
    lanes = 8 * size // x.dtype.bitwidth
    weighted = not isinstance(value, types.NoneType)

    def emit(context: Any, build: Builder, sig: Any, args: Any) -> Any:
        def pointer(k: int) -> ir.Value:
            return _pointer(context, build, sig.args[k], args[k])

        x, weights = pointer(8), pointer(5) if weighted else None
        rows = _Rows(build, x, args[9], pointer(4), args[10])
        block = ir.VectorType(x.type.pointee, lanes)
        home = build.bitcast(build.gep(pointer(1), [args[2]]), block.as_pointer())

        def step(edge: ir.Value, sums: ir.Value) -> ir.Value:
            soon = build.add(edge, args[11])
            within = build.icmp_signed("<", soon, args[12])
            _prefetch(build, rows.at(build.select(within, soon, args[12])), size)
            row = _load(build, build.bitcast(rows.at(edge), block.as_pointer()))
            if weights is None:
                return build.fadd(sums, row)
            weight = build.load(build.gep(weights, [edge]))
            return _multiply_add(build, _spread(build, weight, block), row, sums)

        start = _start(build, args[3], home)
        build.store(
            _loop(build, args[6], args[7], start, step), home, align=_align(home)
        )
        return context.get_dummy_value()

    return sig, emit


def _start(build: Builder, fresh: ir.Value, home: ir.Value) -> ir.Value:
    """Returns zeros, or what lies at ``home``, which is then read."""
    zeros = ir.Constant(home.type.pointee, None)
    before = build.block
    with build.if_then(build.not_(fresh)):
        found, inside = _load(build, home), build.block
    start = build.phi(zeros.type)
    start.add_incoming(zeros, before)
    start.add_incoming(found, inside)
    return start


class _Rows:
    """Where the block of the row that an edge points to begins."""

    def __init__(
        self, build: Builder, x: ir.Value, ld: ir.Value, col: ir.Value, offset: ir.Value
    ) -> None:
        self.build, self.ld, self.col = build, ld, col
        self.origin = build.gep(x, [offset])

    def at(self, edge: ir.Value) -> ir.Value:
        build = self.build
        column = build.load(build.gep(self.col, [edge]))
        if column.type != I64:
            column = build.zext(column, I64)
        return build.gep(self.origin, [build.mul(column, self.ld)])


def _loop(
    build: Builder,
    begin: ir.Value,
    end: ir.Value,
    start: ir.Value,
    step: Callable[[ir.Value, ir.Value], ir.Value],
) -> ir.Value:
    """Folds ``step`` over begin .. end-1, the carried value staying in registers."""
    before, body, after = (
        build.block,
        build.append_basic_block(),
        build.append_basic_block(),
    )
    build.cbranch(build.icmp_signed("<", begin, end), body, after)
    build.position_at_end(body)
    index, carried = build.phi(I64), build.phi(start.type)
    folded = step(index, carried)
    following = build.add(index, I64(1), flags=["nsw"])
    index.add_incoming(begin, before)
    index.add_incoming(following, body)
    carried.add_incoming(start, before)
    carried.add_incoming(folded, body)
    build.cbranch(build.icmp_signed("<", following, end), body, after)
    build.position_at_end(after)
    result = build.phi(start.type)
    result.add_incoming(start, before)
    result.add_incoming(folded, body)
    return result


def _prefetch(build: Builder, pointer: ir.Value, size: int) -> None:
    """Prefetches the lines of ``size`` bytes, for reading, into every cache."""
    base = build.bitcast(pointer, I8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [base.type, I32, I32, I32])
    name = "llvm.prefetch.p0i8"
    call = cgutils.get_or_insert_function(build.module, kind, name)
    for byte in range(0, size, LINE):
        build.call(call, [build.gep(base, [I64(byte)]), I32(0), I32(3), I32(1)])


def _multiply_add(build: Builder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Returns a b + c, rounded once where the processor can."""
    kind = a.type
    bits = 8 * _align(kind.as_pointer())
    name = f"llvm.fmuladd.v{kind.count}f{bits}"
    signature = ir.FunctionType(kind, [kind, kind, kind])
    call = cgutils.get_or_insert_function(build.module, signature, name)
    return build.call(call, [a, b, c])


def _spread(build: Builder, number: ir.Value, kind: ir.VectorType) -> ir.Value:
    nothing = ir.Constant(kind, ir.Undefined)
    first = build.insert_element(nothing, number, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return build.shuffle_vector(first, nothing, zeros)


def _load(build: Builder, pointer: ir.Value) -> ir.Value:
    return build.load(pointer, align=_align(pointer))


def _align(pointer: ir.Value | ir.PointerType) -> int:
    """Returns the bytes of one number: all the alignment a row is sure to have."""
    kind = getattr(pointer, "type", pointer).pointee
    return 4 if kind.element == ir.FloatType() else 8


def _pointer(context: Any, build: Builder, kind: Any, array: Any) -> ir.Value:
    return context.make_array(kind)(context, build, array).data


prefetch: Any = intrinsic(_prefetch_line)
sum_block: Any = intrinsic(_sum_block)
