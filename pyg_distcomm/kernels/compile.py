"""Compiles loops with Numba, once each, and adds instructions that Numba lacks.

[Note: compiled in its own thread] Numba keeps exceptions that it raises while compiling, with
their tracebacks, and these keep every frame of the caller alive: its graph, its model, its
process groups. So loops are compiled in a thread of their own, whose stack is empty.

[Note: the key of cached code] Numba keys machine code by the time of the loop's source file,
bytecode, argument types, the processor and Numba's version. Here the file's text stands for its
time, so that a package that is installed again finds its code. But the code also contains all
functions that the loop calls, so `SOURCES` adds their modules, and the versions of Python and
llvmlite.

[Note: why write LLVM by hand] A random gather waits for memory, so the product must prefetch
a row well before it is used, and keep its sums in registers meanwhile. Numba has no prefetch,
and spills a loop's sums to memory at each edge. Both are a few LLVM instructions, the same on
every processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import os
import platform
import stat
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import llvmlite
import numba
from filelock import FileLock
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

Array: TypeAlias = Any  # of one dimension, contiguous
# the memory of rows, and the distance between them; and between the heads of a row
Matrix: TypeAlias = tuple[Array, int]
Heads: TypeAlias = tuple[Array, int, int]
Edges: TypeAlias = tuple[Array, Array]  # offsets and columns of a CSR matrix
Builder: TypeAlias = Any  # llvmlite.ir.IRBuilder, which has no types
Emitted = tuple[Any, Callable[..., Any]]
Loop = TypeVar("Loop", bound=Callable[..., Any])

LOCK_TIMEOUT = 120.0  # seconds to wait for another process before compiling as well
PACKAGE = Path(__file__).resolve().parent
LINE = 64  # bytes in a cache line
I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def digest(*versions: str) -> str:
    """Hashes the modules that loops call functions of, and versions of the compiler."""
    found = hashlib.sha256(" ".join(versions).encode())
    folders, this = (PACKAGE, PACKAGE.parent / "partition"), Path(__file__)
    loops = [path for folder in folders for path in sorted(folder.glob("*jit.py"))]
    ops = this.with_name("codec_ops.py")  # whose numbers they hold
    for path in (*loops, this, ops):
        found.update(path.read_bytes())
    return found.hexdigest()


# see [Note: the key of cached code]
SOURCES = digest(platform.python_version(), numba.__version__, llvmlite.__version__)

# Loops --------------------------------------------------------------------------------


def jit(loop: Loop) -> Loop:
    """Declares a loop that is compiled at its first call, and cached on disk.

    If Numba finds no folder that it can write to, or other users can write to that folder,
    the loop is kept in memory only.
    """
    make: Any = njit  # which does not say that it takes `no_cfunc_wrapper`
    compiled = make(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(loop)
    compiled.compile = partial(_compile_in_thread, compiled, compiled.compile)
    try:
        cache = KernelCache(loop)
    except (RuntimeError, OSError):  # no folder, or no file of source
        return cast(Loop, compiled)
    other = untrusted_writer(cache.cache_path)
    if other is None:
        compiled._cache = cache
    else:
        warnings.warn(
            f"compiled loops are not kept, because {other}; set NUMBA_CACHE_DIR to a folder "
            "of your own, which nobody else can write to",
            stacklevel=2,
        )
    return cast(Loop, compiled)


def reordering(loop: Loop) -> Loop:
    """Declares a loop whose sums may be reordered, so that they can be vectorised.

    The order is fixed at compile time, so bits do not depend on threads. It is not cached
    by itself, since its callers contain it.
    """
    compiled: Any = njit(fastmath={"reassoc", "contract"}, error_model="numpy")(loop)
    return cast(Loop, compiled)


def cache_folder(loop: Any) -> str | None:
    """Returns the folder in which Numba caches a compiled loop, if any."""
    return loop.stats.cache_path


def _compile_in_thread(
    loop: Any, make: Callable[..., Any], signature: tuple[Any, ...]
) -> Any:
    """Compiles in a thread of its own; see [Note: compiled in its own thread]."""
    if global_compiler_lock.is_locked():  # by this thread: another loop calls this one
        return make(signature)
    with ThreadPoolExecutor(1) as own:
        try:
            done = own.submit(_compile, loop, make, signature)
        except RuntimeError:  # the interpreter shuts down and starts no more threads
            return _compile(loop, make, signature)
    return done.result()


def _compile(loop: Any, make: Callable[..., Any], signature: tuple[Any, ...]) -> Any:
    folder = cache_folder(loop)
    if folder is not None and loop._cache.has(signature, loop.targetctx):
        return make(signature)  # reads the cache, without waiting for the lock
    with _cache_lock(folder, loop.__name__):
        return make(signature)


@contextlib.contextmanager
def _cache_lock(folder: str | None, name: str) -> Iterator[None]:
    """Holds the file lock of a loop in Numba's cache folder, if one can be made there.

    The first process compiles and writes the cache; the others wait and read it. Nothing is
    locked in a folder that cannot be written to, or on a system without file locks.
    """
    with contextlib.ExitStack() as stack:
        if folder is not None:
            # a lock that is held for too long is a TimeoutError
            with contextlib.suppress(OSError, ValueError, NotImplementedError):
                os.makedirs(folder, exist_ok=True)
                path = os.path.join(folder, f"pyg_distcomm-{name}.lock")
                lock = FileLock(path, LOCK_TIMEOUT, 0o666)
                stack.enter_context(lock.acquire(poll_interval=0.02))
        yield


# The cache on disk --------------------------------------------------------------------


class KernelCache(FunctionCache):
    """Caches machine code on disk, keyed by everything it was made from.

    See [Note: the key of cached code]. Code that cannot be read is compiled again, and code
    that cannot be written is used by this process only.
    """

    def __init__(self, loop: Any) -> None:
        super().__init__(loop)
        text = Path(inspect.getfile(loop)).read_bytes()
        about = self._impl.filename_base, hashlib.sha256(text).digest()
        self._cache_file = _CodeFiles(self._cache_path, *about)

    def has(self, sig: Any, target_context: Any) -> bool:
        """Returns whether there is code for a signature, which is then complete on disk."""
        try:
            index = self._cache_file._load_index()
            return self._index_key(sig, target_context.codegen()) in index
        except Exception:  # a pickle that was cut short may raise anything
            return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns the code for a signature; None if there is none or it is damaged."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a pickle that was cut short may raise anything
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves the code for a signature, or warns that it cannot."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            warnings.warn(
                f"compiled loops are not kept: {self._cache_path}: {error.strerror or error}; "
                "make room there, or set NUMBA_CACHE_DIR to another folder",
                stacklevel=2,
            )

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        return (*super()._index_key(sig, codegen), SOURCES)


class _CodeFiles(IndexDataCacheFile):
    """Writes code before the index that names it.

    Numba writes the index first. If the process is killed in between, the index of a new
    source may name the code of an old one, because file numbers start again. Two processes
    that compile loops which call this one do not hold its lock, so saving has one.
    """

    def save(self, key: Any, data: Any) -> None:
        with _cache_lock(self._cache_path, "to-save"):
            index = self._load_index()
            names = (self._data_name(number) for number in itertools.count(1))
            free = next(name for name in names if name not in index.values())
            name = index.get(key, free)
            self._save_data(name, data)
            if key not in index:
                self._save_index({**index, key: name})


def untrusted_writer(folder: str | Path) -> str | None:
    """Returns who else can write to a folder or rename it; None if nobody can.

    Numba caches compiled loops as pickles, so a user who can write to the folder can run code
    in the processes that load them. This user, root, and users who can write this package's
    source are trusted. For a folder that does not exist yet, the folders above it count.
    """
    if not hasattr(os, "getuid"):
        return None  # Windows keeps users' folders apart
    path = Path(os.path.abspath(folder))
    trusted = {0, os.getuid(), PACKAGE.stat().st_uid}
    for place in (path, *path.parents):
        try:
            about = place.stat()
        except OSError:
            continue
        # in a sticky folder other users can add files, but not replace ours
        shared = place != path and bool(about.st_mode & stat.S_ISVTX)
        if about.st_uid not in trusted:
            return f"{place} belongs to another user (uid {about.st_uid})"
        if about.st_mode & stat.S_IWOTH and not shared:
            return f"all users can write to {place}"
        if about.st_mode & stat.S_IWGRP and not shared and not _is_own(about.st_gid):
            return f"group {about.st_gid} can write to {place}"
    return None


def _is_own(gid: int) -> bool:
    """Returns whether a group has no other user, or can write this package's source."""
    source = PACKAGE.stat()
    if gid == 0 or (source.st_gid == gid and source.st_mode & stat.S_IWGRP):
        return True
    import grp
    import pwd

    try:
        name = pwd.getpwuid(os.getuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and not set(group.gr_mem) - {name}


# Instructions -------------------------------------------------------------------------


def _prefetch_line(typing: Any, x: Any, position: Any) -> Emitted:
    """Prefetches the cache line of ``x[position]``."""

    def emit(context: Any, build: Builder, sig: Any, args: Any) -> Any:
        pointer = _pointer(context, build, sig.args[0], args[0])
        _prefetch(build, build.gep(pointer, [args[1]]), 1)
        return context.get_dummy_value()

    return types.void(x, types.int64), emit


def _reinterpret(typing: Any, value: Any) -> Emitted:
    """Takes the bits of a float as an integer, or those of an integer as a float."""
    kinds: Any = {types.float32: types.int32, types.float64: types.int64}
    kinds |= {integer: number for number, integer in kinds.items()}

    def emit(context: Any, build: Builder, sig: Any, args: Any) -> Any:
        return build.bitcast(args[0], context.get_value_type(sig.return_type))

    return kinds[value](value), emit


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
    heads: Any,
    head: Any,
) -> Emitted:
    """Sums a block of the rows of x that edges begin .. end-1 point to.

        total[at + k] (+)= sum of value[e heads + head] x[col[e] x_ld + offset + k]

    A block is 2**len(width) bytes, known when compiling as the length of a tuple;
    ``value`` and ``heads`` may be None. While it adds edge e it prefetches for edge
    e + ahead, or the last. The sum is taken in the order of edges, from zero if ``fresh``.
    """
    integer, size = types.int64, 2 ** len(width)
    given = (width, total, integer, types.boolean, col, value, integer, integer)
    sig = types.void(*given, x, *[integer] * 4, heads, integer)
    lanes = 8 * size // x.dtype.bitwidth
    weighted, by_head = (not isinstance(t, types.NoneType) for t in (value, heads))

    def emit(context: Any, build: Builder, sig: Any, args: Any) -> Any:
        def pointer(k: int) -> ir.Value:
            return _pointer(context, build, sig.args[k], args[k])

        x, weights = pointer(8), pointer(5) if weighted else None
        columns, origin = pointer(4), build.gep(x, [args[10]])
        block = ir.VectorType(x.type.pointee, lanes)
        target = build.bitcast(build.gep(pointer(1), [args[2]]), block.as_pointer())

        def row_of(edge: ir.Value) -> ir.Value:
            column = build.load(build.gep(columns, [edge]))
            if column.type != I64:
                column = build.zext(column, I64)
            return build.gep(origin, [build.mul(column, args[9])])

        def step(edge: ir.Value, sums: ir.Value) -> ir.Value:
            soon = build.add(edge, args[11])
            within = build.icmp_signed("<", soon, args[12])
            _prefetch(build, row_of(build.select(within, soon, args[12])), size)
            row = _load(build, build.bitcast(row_of(edge), block.as_pointer()))
            if weights is None:
                return build.fadd(sums, row)
            at = build.add(build.mul(edge, args[13]), args[14]) if by_head else edge
            weight = build.load(build.gep(weights, [at]))
            return _multiply_add(build, _spread(build, weight, block), row, sums)

        start = _start(build, args[3], target)
        build.store(
            _loop(build, args[6], args[7], start, step), target, align=_align(target)
        )
        return context.get_dummy_value()

    return sig, emit


def _start(build: Builder, fresh: ir.Value, target: ir.Value) -> ir.Value:
    """Returns zeros if ``fresh``, otherwise the block at ``target``."""
    zeros = ir.Constant(target.type.pointee, None)
    before = build.block
    with build.if_then(build.not_(fresh)):
        found, inside = _load(build, target), build.block
    start = build.phi(zeros.type)
    start.add_incoming(zeros, before)
    start.add_incoming(found, inside)
    return start


def _loop(
    build: Builder,
    begin: ir.Value,
    end: ir.Value,
    start: ir.Value,
    step: Callable[[ir.Value, ir.Value], ir.Value],
) -> ir.Value:
    """Folds ``step`` over begin .. end-1, with the carried value in registers."""
    before, body = build.block, build.append_basic_block()
    after = build.append_basic_block()
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
    """Returns a b + c, rounded once if the processor has a fused multiply-add."""
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
    """Returns the bytes of one number: the alignment that every row has."""
    kind = getattr(pointer, "type", pointer).pointee
    return 4 if kind.element == ir.FloatType() else 8


def _pointer(context: Any, build: Builder, kind: Any, array: Any) -> ir.Value:
    return context.make_array(kind)(context, build, array).data


prefetch: Any = intrinsic(_prefetch_line)
reinterpret: Any = intrinsic(_reinterpret)
sum_block: Any = intrinsic(_sum_block)
