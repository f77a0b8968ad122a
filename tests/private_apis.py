"""Lists the private APIs of torch, PyG and Numba that the package touches.

A name here may be gone in the next release, and nobody warns. `LISTED` gives the releases
that have each, and what has it, of those looked at: torch 2.6.0, 2.8.0, 2.11.0, 2.13.0 and
2.15.0, PyG 2.7.0 and 2.8.1, Numba 0.57.1 and 0.68.1. `python tests/private_apis.py` prints the
names that the installed releases lack; `tests/test_project.py` compares the list with the
source.
"""

import ast
import contextlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numba
import torch
from house_metrics import HERE, modules
from torch.distributed.fsdp import _common_utils as fsdp
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import MessagePassing

import pyg_distcomm

LISTED = {
    "torch 2.6.0 to 2.15.0": """
        torch: _foreach_add _foreach_max _foreach_mul _foreach_norm
            _has_compatible_shallow_copy_type
        torch.Tensor: _backward_hooks _base _is_view _nnz _post_accumulate_grad_hooks
            _values _version
        torch.UntypedStorage: _cdata
        torch._C: DisableTorchFunctionSubclass _are_functorch_transforms_active
            _current_graph_task_id _is_any_autocast_enabled _len_torch_dispatch_stack
        torch._C._functorch: is_functorch_wrapped_tensor
        torch._decomp: decomposition_table
        torch._subclasses.fake_tensor: FakeTensor
        torch.autograd.Variable._execution_engine: queue_callback
        torch.autograd.forward_ad: _current_level
        torch.autograd.profiler: _is_profiler_enabled
        torch.distributed.ProcessGroup: _get_backend
        torch.distributed._composable_state: _module_state_mapping
        torch.distributed.distributed_c10d: _get_default_store
        torch.distributed.distributed_c10d._world: pg_map
        torch.nn.Module: _backward_hooks _buffers _forward_hooks
            _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks
            _forward_pre_hooks_with_kwargs _modules _non_persistent_buffers_set _parameters
        torch.nn.Parameter: _fsdp_flattened _is_param
        torch.nn.functional: _threshold
        torch.nn.modules.batchnorm: _BatchNorm _NormBase
        torch.nn.parallel.DistributedDataParallel: _active_ddp_module _module_parameters
            _pre_forward _set_params_and_buffers_to_ignore_for_model
        torch.utils._pytree: tree_leaves tree_map tree_map_only
        torch.utils.data._utils.pin_memory: pin_memory
    """,
    "torch 2.8.0 to 2.15.0": """
        torch._dynamo.config: nontraceable_tensor_subclasses
    """,
    "torch 2.11.0 to 2.15.0": """
        torch: _foreach_powsum
        torch.Tensor: _make_wrapper_subclass
        torch._C: _current_autograd_node _disabled_torch_function_impl
            _dispatch_has_kernel_for_dispatch_key
        torch._dynamo.eval_frame.OptimizedModule: _orig_mod
        torch.nn.Module: _call_impl _wrapped_call_impl
        torch.ops.aten: _adaptive_avg_pool2d _conj _euclidean_dist _fft_c2c _fft_c2r _fft_r2c
            _index_put_impl_ _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex
            _scaled_dot_product_flash_attention_for_cpu
            _linalg_svd _local_scalar_dense _log_softmax _log_softmax_backward_data
            _native_batch_norm_legit _native_batch_norm_legit_functional
            _native_multi_head_attention _prelu_kernel _transformer_encoder_layer_fwd
            _safe_softmax _softmax _softmax_backward_data _sparse_addmm
            _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward _to_copy _trilinear
            _unsafe_view _is_all_true _is_any_true
    """,
    "torch_geometric 2.7.0 to 2.8.1": """
        torch_geometric.data.Batch: _inc_dict _num_graphs _slice_dict
        torch_geometric.data.Data: _store
        torch_geometric.data.FeatureStore: _get_tensor _get_tensor_size _multi_get_tensor
            _put_tensor _remove_tensor _tensor_attr_cls
        torch_geometric.data.HeteroData: _edge_store_dict _node_store_dict
        torch_geometric.data.storage.BaseStorage: _cached_attr _key _num_nodes _parent
        torch_geometric.loader.ClusterData: _permute_data
        torch_geometric.nn.GCNConv: _cached_edge_index
        torch_geometric.nn.MessagePassing: _edge_user_args _index_select
            _propagate_forward_hooks _user_args
        torch_geometric.nn.SGConv: _cached_x
        torch_geometric.nn.SSGConv: _cached_h
        torch_geometric.nn.Sequential: _children
        torch_geometric.nn.models.rev_gnn.InvertibleModule: _fn_apply _inverse
        torch_geometric.sampler.NeighborSampler: _num_neighbors _sample
    """,
    "numba 0.57.1 to 0.68.1": """
        numba.core.caching.FunctionCache: _cache_path _impl _index_key
        numba.core.caching.IndexDataCacheFile: _data_name _load_index _save_data _save_index
        numba.core.dispatcher.Dispatcher: _cache
    """,
}

ROOTS = ("torch", "torch_geometric", "numba", "llvmlite")
PRIVATE = re.compile(r"_[a-zA-Z]\w*(?<!__)")
# private by name, but of Python, of files that others write, endings of names of ours, or
# what torch documents (`_saved_`, autograd notes)
OTHERS = set(
    """
    _ID _SubParsersAction _batch _channels _current_frames _dict _fields _getframe _grad _i _j
    _local _map _mask _replace _saved_
    """.split()
)


@cache
def objects() -> dict[str, Any]:
    """An object of each class whose private names a module here may have, too."""
    data, hetero = Data(x=torch.ones(2, 1)), HeteroData()
    hetero["a"].x, hetero["a"].num_nodes = torch.ones(2, 1), 2
    batch, typed = Batch.from_data_list([data]), Batch.from_data_list([hetero])
    typed["a"].node_attrs()  # which are kept
    flat = torch.nn.Parameter(torch.ones(1))
    fsdp._set_fsdp_flattened(flat)
    return {
        "torch.Tensor": torch.ones(1),
        "torch.nn.Module": torch.nn.Module(),
        "torch.nn.Parameter": flat,
        "torch_geometric.data.Batch": batch,
        "torch_geometric.data.storage.GlobalStorage": batch._store,
        "torch_geometric.data.HeteroData": hetero,
        "torch_geometric.data.FeatureStore": hetero,
        "torch_geometric.data.storage.BaseStorage": typed["a"],
        "torch_geometric.nn.MessagePassing": MessagePassing(),
        "numba.core.dispatcher.Dispatcher": numba.njit(names_of),
    }


def touched() -> tuple[set[str], set[str]]:
    """The private names in the source, and those of them that are not the package's own."""
    theirs = {name for one in objects().values() for name in names_of(one)}
    of_modules = vars(objects()["torch.nn.Module"])  # which subclasses set, too
    defined = {name: _defined(m.nodes) for name, m in modules(HERE).items()}
    ours = set().union(*defined.values())
    every, foreign = set[str](), set(_overridden())
    for name, module in modules(HERE).items():
        own, names = defined[name] - {*of_modules}, set(_named(module.nodes))
        foreign |= {n for n in names if n in theirs - own or n not in ours}
        every |= names
    return every | foreign, foreign - OTHERS


def _defined(nodes: list[ast.AST]) -> set[str]:
    """The names that a module gives to what it defines, or sets on objects."""
    names = set[str]()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.arg):
            names.add(node.arg)
        if isinstance(getattr(node, "ctx", None), ast.Store):
            names.add(getattr(node, "attr", None) or getattr(node, "id", ""))
    return names


def names_of(value: Any) -> set[str]:
    return {*dir(value), *getattr(value, "__dict__", {})}


def _named(nodes: list[ast.AST]) -> Iterator[str]:
    """The private names that a module reads, imports, or has in strings."""
    notes = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield from filter(PRIVATE.fullmatch, [node.attr])
        if isinstance(node, ast.Import | ast.ImportFrom):
            for a in node.names:
                yield from filter(PRIVATE.fullmatch, a.name.split("."))
            yield from filter(
                PRIVATE.fullmatch, (getattr(node, "module", "") or "").split(".")
            )
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = re.findall(r"(?<![\w{}.])_[a-zA-Z]\w*", node.value)
            yield from filter(PRIVATE.fullmatch, words if node not in notes else ())


def _overridden() -> Iterator[str]:
    """The private methods of others that a class of ours defines anew."""
    for kind in _classes():
        for name in filter(PRIVATE.fullmatch, vars(kind)):
            for base in kind.__mro__[1:]:
                if base.__module__.split(".")[0] in ROOTS and name in vars(base):
                    if getattr(vars(kind)[name], "__module__", "") == kind.__module__:
                        yield name


def _classes() -> set[type]:
    kinds = set[type]()
    for module in pkgutil.walk_packages(pyg_distcomm.__path__, "pyg_distcomm."):
        last = module.name.rpartition(".")[2]
        if last == "__main__" or last.endswith(("_cuda", "_triton")):
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and kind.__module__ == module.name:
                kinds.add(kind)
    return kinds


def has(name: str) -> bool:
    """Tells whether the installed releases have a listed name."""
    owner, _, last = name.rpartition(".")
    if hasattr(objects().get(owner), last):
        return True
    parts, value = name.split("."), None
    for length in range(1, len(parts) + 1):
        before = value
        with contextlib.suppress(ImportError):
            value = importlib.import_module(".".join(parts[:length]))
        if before is not None and value is before:
            for part in parts[length - 1 : -1]:
                value = getattr(value, part, None)
            return hasattr(value, last) or _is_set_by(value, last)
    return False


def _is_set_by(kind: Any, name: str) -> bool:
    """Tells whether the source of a class sets an attribute of its objects."""
    kinds = getattr(kind, "__mro__", ())
    theirs = [k for k in kinds if k.__module__.split(".")[0] in ROOTS]
    return any(re.search(rf"\.{name}\b.* = ", inspect.getsource(k)) for k in theirs)


def listed() -> dict[str, tuple[str, str, str]]:
    """The package of each listed name, and the first and last release that have it."""
    found = {}
    for span, names in LISTED.items():
        of, first, _, last = span.split()
        for line in re.sub(r"\n {12}", " ", names).split("\n"):
            owner, _, its = line.strip().partition(": ")
            found |= {f"{owner}.{name}": (of, first, last) for name in its.split()}
    return found


if __name__ == "__main__":
    print(*(name for name in listed() if not has(name)), sep="\n")
