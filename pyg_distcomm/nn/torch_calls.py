"""Describes calls of torch functions: which work row by row or in place, and their arguments.

A name covers the function in `torch`, in `torch.nn.functional` and on `Tensor`, its in-place
form and its operator (`add`, `add_`, `__add__`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

# elementwise with broadcasting, or acting on the last dims of each row
ROWWISE = frozenset(
    """
    abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2
    atanh bfloat16 bitwise_and bitwise_not bitwise_or bitwise_xor bool byte ceil celu
    char clamp clamp_max clamp_min clip clone conj contiguous copy copysign cos cosh cpu
    cuda data deg2rad detach digamma div divide double elu embedding eq erf erfc erfinv
    exp exp2 expm1 fill float float_power floor floor_divide floordiv fmax fmin fmod frac
    gelu greater greater_equal gt ge half hardshrink hardsigmoid hardswish hardtanh
    heaviside hypot iand idiv ifloordiv igamma ilshift imul int invert ior ipow irshift
    isclose isfinite isinf isnan isneginf isposinf isreal isub ixor iadd itruediv le
    leaky_relu lerp less less_equal lgamma linear log log_sigmoid log10 log1p log2 logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid long lt
    lshift masked_fill maximum minimum mish mod mul multiply mvlgamma nan_to_num ne neg
    negative nextafter not_equal ones_like pin_memory polygamma positive pos pow prelu
    rad2deg radd rdiv real reciprocal relu relu6 remainder rfloordiv
    rlshift rmod rmul ror round rpow rrshift rshift rsqrt rsub rtruediv rxor
    rand type selu sgn short sigmoid sign signbit silu sin sinc sinh softplus softshrink
    softsign sqrt square sub subtract tan tanh tanhshrink threshold to truediv true_divide
    trunc type_as where xlogy xor or and zero zeros_like full_like empty_like
    share_memory _foreach_add _foreach_mul _threshold complex polar expit ndtr ndtri
    log_ndtr entr erfcx i0 i0e i1 i1e gammaln psi xlog1py zeta
    """.split()
)

# operations whose other operands are weights, however many rows they have
WEIGHTED = frozenset(
    """linear embedding prelu gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell
    bilinear""".split()
)
ROWWISE |= WEIGHTED

# a `dim` decides: local unless it names the rows; by the place of dim, and its default
BY_DIM: dict[str, tuple[int, Any]] = {
    name: how
    for how, names in {
        (
            1,
            None,
        ): """sum mean prod amax amin any all var std count_nonzero max min argmax
            argmin median nanmedian nanmean nansum""",
        (2, None): "norm linalg_norm vector_norm quantile nanquantile roll",
        (1, -1): "glu mode sort argsort",
        (2, -1): "diff kthvalue topk",
        (9, -1): "pairwise_distance",
        (1, 0): "unbind",
        (2, 0): "split chunk tensor_split",
        (2, 1): "normalize cosine_similarity",
        (
            1,
            "missing",
        ): """softmax log_softmax softmin cummax cummin logcumsumexp logsumexp
            cumsum cumprod flip gather select narrow unflatten""",
        (2, "missing"): "cross",
    }.items()
    for name in names.split()
}

# sizes: the whole tensor's
SIZES = frozenset("shape size numel nelement nbytes len".split())

# facts about dtype, memory or autograd; nothing to wrap
FACTS = frozenset(
    """
    shape size dim ndim ndimension numel nelement nbytes element_size itemsize dtype device
    layout is_cuda is_cpu is_sparse is_floating_point is_complex is_signed
    is_contiguous is_leaf is_quantized is_meta is_mps is_xpu is_nested is_pinned
    is_shared is_inference is_sparse_csr is_same_size is_mkldnn is_conj is_neg is_tensor
    requires_grad grad_fn retain_grad retains_grad output_nr _version _backward_hooks
    register_post_accumulate_grad_hook stride storage_offset
    data_ptr get_device untyped_storage storage name names has_names len
    _is_view _base hash __hash__ is_storage result_type can_cast new_tensor
    _is_param is_inference_mode_enabled
    _has_compatible_shallow_copy_type data=
    """.split()
)


def base_name(func: Any) -> str:
    """Returns the name of a torch function in the tables above."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
        return f"{name}=" if func.__name__ == "__set__" else str(name)
    if name != "linalg_norm":  # of matrices, unlike Tensor.norm
        name = name.removeprefix("linalg_").removeprefix("special_")
    if name == "requires_grad_":
        return "requires_grad="
    if name == "detach_":  # unlike detach, of this very tensor
        return name
    if name in ("__bool__", "__float__", "__int__", "__index__", "__complex__"):
        return str(name)  # a Python number, not a change of dtype
    if name.startswith("__") and name.endswith("__"):
        return str(name[2:-2])
    return str(name[:-1] if name.endswith("_") and not name.startswith("_") else name)


def is_in_place(func: Any, args: Any, kwargs: Any) -> bool:
    """Tells whether a call writes to its operand: by its name, or by `inplace=True`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"):
        return True
    if name.endswith("_") and not name.endswith("__"):
        return True
    if not any(value is True for value in args):
        return bool(kwargs.get("inplace", False))
    try:
        given = inspect.signature(func).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # of a function in C, which has no `inplace`
        return False
    return bool(given.get("inplace", False))


Leaf = TypeVar("Leaf")


def size_from_shape(
    name: str, shape: Sequence[int], like: Tensor, args: Any, kwargs: Any
) -> Any:
    """Implements shape, size, len, numel and nbytes for a given shape and dtype."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if name == "len" or (name == "size" and dim is not None):
        return shape[dim or 0]
    if name in ("shape", "size"):
        return torch.Size(shape)
    return math.prod(shape) * (like.element_size() if name == "nbytes" else 1)


def version_of(x: Tensor) -> int:
    """Returns the number of in-place changes of a tensor; -1 for inference tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if x.is_inference() else x._version


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `fn` to the leaves of arguments; ten times as fast as torch's function."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(fn, value) for value in tree])
    if kind is dict:
        return {key: tree_map(fn, value) for key, value in tree.items()}
    return fn(tree)


def leaves(tree: Any, kind: type[Leaf]) -> list[Leaf]:
    """Returns the leaves of arguments that are instances of a class, in order."""
    found: list[Leaf] = []
    tree_map(lambda v: found.append(v) if isinstance(v, kind) else v, tree)
    return found
