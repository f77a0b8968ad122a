"""Compiles every kernel in Triton for sm_80 and sm_90, without a device; run as a script.

The twins for CUDA are called on CPU tensors, with launches that compile and compute nothing.
It prints the kernels that were compiled, and fails where one is never launched.
"""

import importlib
import itertools
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import pyg_distcomm

TARGETS = [GPUTarget("cuda", number, 32) for number in (80, 90)]
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
compiled = {}


def compile_only(kernel, *args, grid, warmup, **kwargs):
    """Stands in for `JITFunction.run`: compiles what would be launched."""
    names = [p.name for p in kernel.params]
    given = dict(zip(names, args, strict=False))
    given.update({k: kwargs.pop(k) for k in names if k in kwargs})
    signature, constants, attributes = {}, {}, {}
    for place, p in enumerate(kernel.params):
        value = given[p.name]
        if p.is_constexpr or (type(value) is int and value == 1):
            signature[p.name], constants[(place,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            kind, aligned = POINTERS[value.dtype], value.data_ptr() % 16 == 0
        else:
            assert type(value) is int, (kernel, p.name, value)
            kind, aligned = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
        signature[p.name] = kind
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    key = (kernel.fn.__name__, *map(str, (signature, constants, attributes, kwargs)))
    if key not in compiled:
        for target in TARGETS:
            source = ASTSource(kernel, signature, constants, attributes)
            made = triton.compile(source, target=target, options=kwargs)
            assert made.asm["ptx"], key
        compiled[key] = kernel


def products(core):
    rowptr, col = torch.tensor([0, 3, 3, 40]), torch.randint(5, (40,))
    core.CUT, core.LARGE = 8, 10**18
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    forms = [(dtype, torch.int32, 100) for dtype in kinds]
    for dtype, index, f in (*forms, (torch.float32, torch.int64, 1)):
        matrix, x = (rowptr.to(index), col.to(index)), torch.randn(5, f).to(dtype)
        out = torch.zeros(3, f, dtype=dtype)
        for value in (None, torch.randn(40).to(dtype)):
            core.spmm(*matrix, value, x)
            core.spmm(*matrix, value, x, out, True)
        core.sddmm(*matrix, out, x)
        core.keyed_dropout(x, 7, torch.arange(5, dtype=index), 0.5)
    torch.use_deterministic_algorithms(True)
    core.spmm(rowptr, col, None, torch.randn(5, 100))
    core.scatter_add_rows(torch.zeros(5, 8), col, torch.randn(40, 8))
    torch.use_deterministic_algorithms(False)
    core.keyed_bits(2**62, torch.arange(5), 33)
    core.keyed_mask(2**62, torch.arange(5), 33, 0.5)


def codecs(codec, ops):
    ids = torch.arange(7)
    for bits, dtype, f in itertools.product((1, 2, 4, 8), ops.FLOATS, (100,)):
        x = torch.randn(7, f, dtype=dtype)
        out = torch.zeros(
            ops.message_bytes(7, f, bits, dtype.itemsize), dtype=torch.uint8
        )
        for at, noise in itertools.product((None, ids.int()), (None, (7, ids))):
            codec.quantise_wide(x, at, bits, noise, out)
        codec.dequantise_wide(out, bits, torch.empty_like(x))
    for bits in (1, 2, 4, 8):
        packed = codec.pack_bits(torch.zeros(100, dtype=torch.uint8), bits)
        codec.unpack_bits(packed, bits, 100)
    for dtype, at, f in itertools.product(ops.REALS, (None, ids), (2, 4096)):
        x, columns = torch.randn(7, f).to(dtype), torch.arange(2, dtype=torch.int32)
        y = codec.take_columns(x, at, columns)
        codec.put_columns(y, columns, 1.5, x)


def samples(sample):
    for replaced in (True, False):
        sample.uniform_picks(torch.arange(9), torch.arange(9) + 9, 4, replaced)
    for draws in (5, 512, 8192):
        urns = (torch.arange(9), *torch.arange(6).view(3, 2))
        sample.draw_urns(*urns, draws)
    sample.row_sums(torch.arange(9), torch.zeros(9, dtype=torch.float64))
    dtypes = torch.float64, torch.float32, torch.int8
    for dtype, f in itertools.product(dtypes, (3, 8)):
        rows = torch.zeros(9, f, dtype=dtype)
        for kept in (None, (rows[:2], torch.zeros(9, dtype=torch.int32))):
            sample.read_rows(rows, torch.arange(4), kept)


def kernels():
    """Returns the kernels and functions in Triton of the whole package, by name."""
    root, found = Path(pyg_distcomm.__file__).parent, {}
    for path in sorted(root.rglob("*.py")):
        if "import triton\n" in path.read_text():
            name = ".".join(
                ("pyg_distcomm", *path.relative_to(root).with_suffix("").parts)
            )
            members = vars(importlib.import_module(name)).values()
            found.update(
                {k.fn.__name__: k for k in members if isinstance(k, JITFunction)}
            )
    return found


def main():
    JITFunction.run = compile_only
    torch.empty = torch.zeros  # numbers that kernels have not counted
    from pyg_distcomm.kernels import codec_cuda, codec_ops, core_cuda, sample_cuda

    products(core_cuda)
    codecs(codec_cuda, codec_ops)
    samples(sample_cuda)
    used, every = {key[0] for key in compiled}, kernels()
    print(f"{len(compiled)} forms of {len(used)} kernels: {', '.join(sorted(used))}")
    before = set()
    while before != used:  # and the functions that they call
        before = set(used)
        for name in before:
            used |= {other for other in every if f"{other}(" in every[name].src}
    assert used == set(every), sorted(set(every) - used)


if __name__ == "__main__":
    main()
