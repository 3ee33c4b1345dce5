"""Everything private of torch that the package uses, in one list: what to look at when a new version of torch comes.

Each name has a test of its own, so that a version that does not have it is seen at once.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.jit._script import call_prepare_scriptable_func_impl
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList

from tests.surface.surface import ROOT
from transformer_plugin import _library

#: What is imported, or read from modules and classes.
NAMES = (
    "torch.Tensor._make_wrapper_subclass",
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._distributed_c10d._resolve_process_group",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._jit_get_all_schemas",
    "torch._C._set_throw_on_mutable_data_ptr",
    "torch._C._will_engine_execute_node",
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._ops.OpOverloadPacket",
    "torch._ops._len_torch_dispatch_stack_pre_dispatch",
    "torch.autograd._unsafe_preserve_version_counter",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch.distributed._composable_state._module_state_mapping",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "torch.distributed.pipelining.stage._PipelineStageBase",
    "torch.distributed.tensor.DTensor._op_dispatcher",
    "torch.distributed.tensor._op_schema.RuntimeSchemaInfo",
    "torch.jit._builtins._register_builtin",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_hooks_with_kwargs",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.nn.modules.module._has_any_global_hook",
    "torch.nn.parallel.DistributedDataParallel._assign_modules_buffers",
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "torch.nn.utils.parametrizations._SpectralNorm",
    "torch.ops._c10d_functional.all_reduce",
    "torch.ops.aten._to_copy",
    "torch.ops.aten._unsafe_view",
    "torch.optim._muon.DEFAULT_A",
    "torch.optim._muon.DEFAULT_B",
    "torch.optim._muon.DEFAULT_C",
    "torch.optim._muon.DEFAULT_NS_STEPS",
    "torch.optim._muon.EPS",
    "torch.optim._muon._adjust_lr",
    "torch.optim._muon._zeropower_via_newtonschulz",
    "torch.optim._muon.muon",
    "torch.optim.optimizer._to_scalar",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    "torch.utils._pytree._register_namedtuple",
)

_MODULE = torch.nn.Linear(1, 1)
_OP = torch.ops.aten.add.Tensor

#: Attributes of torch's objects, and an object or class that has them; None where that is made by a group of ranks.
ATTRIBUTES: dict[str, Any] = {
    "_all_reduce_hook": FSDPParamGroup.__init__.__code__.co_names,
    "_backward_hooks": _MODULE,
    "_backward_pre_hooks": _MODULE,
    "_buffers": _MODULE,
    "_cdata": torch.UntypedStorage,
    "_ddp_params_and_buffers_to_ignore": None,  # of a module, which torch's own method sets
    "_device_types": ProcessGroup,
    "_flatten": DeviceMesh,
    "_forward_hooks": _MODULE,
    "_forward_hooks_always_called": _MODULE,
    "_forward_hooks_with_kwargs": _MODULE,
    "_forward_pre_hooks": _MODULE,
    "_forward_pre_hooks_with_kwargs": _MODULE,
    "_get_backend": ProcessGroup,
    "_get_root_mesh": DeviceMesh,
    "_init_group": torch.optim.Muon,
    "_load_state_dict_pre_hooks": _MODULE,
    "_local_tensor": torch.distributed.tensor.DTensor.__slots__,
    "_module_info": FSDPParam.__init__.__code__.co_names,
    "_modules": _MODULE,
    "_mp_policy": FSDPState.init.__code__.co_names,
    "_non_persistent_buffers_set": _MODULE,
    "_op": _OP,
    "_optimizer_step_post_hooks": torch.optim.SGD([_MODULE.weight], lr=0.1),
    "_overloadname": _OP,
    "_parameters": _MODULE,
    "_prepare_input_fn": ColwiseParallel,
    "_prepare_output_fn": ColwiseParallel,
    "_schema": _OP,
    "_spec": torch.distributed.tensor.DTensor.__slots__,
    "_timeout": torch._C._distributed_c10d.Backend.Options,
    "_version": torch.Tensor,
}

#: Attributes without an underscore, of objects of private classes; and what names them in torch.
PARTS: dict[str, Any] = {
    "force_sum_reduction_for_comms": FSDPParamGroup.__init__.__code__.co_names,
    "fsdp_params": FSDPParamGroup.__init__.__code__.co_names,
    "gradient_divide_factor": FSDPParamGroup.__init__.__code__.co_names,
    "mesh": DataParallelMeshInfo.__annotations__,
    "modules_buffers": DistributedDataParallel._assign_modules_buffers.__code__.co_names,
    "mp_policy": FSDPParam.__init__.__code__.co_names,
    "named_module_buffers": DistributedDataParallel._assign_modules_buffers.__code__.co_names,
    "op_to_schema_info": torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator,
    "parameters_to_ignore": DistributedDataParallel.__init__.__code__.co_names,
    "scale_grads": _PipelineStageBase,
    "sharded_param": FSDPParam.__annotations__,
    "sharding_propagator": torch.distributed.tensor.DTensor._op_dispatcher,
    "submod": _PipelineStageBase.__init__.__code__.co_names,
}

#: Methods and protocols of torch that classes of the package have: torch calls them, with what it passes to its own.
METHODS: dict[str, Any] = {
    "__create_chunk_list__": _Checkpointable,
    "__create_write_items__": _Checkpointable,
    "__get_tensor_shard__": _Checkpointable,
    "__prepare_scriptable__": call_prepare_scriptable_func_impl.__code__.co_names,
    "__tensor_flatten__": torch.distributed.tensor.DTensor,
    "__tensor_unflatten__": torch.distributed.tensor.DTensor,
    "_apply": ParallelStyle,  # and of modules
    "_load_from_state_dict": _MODULE,
    "_save_to_state_dict": _MODULE,
}

#: The first parameters of functions that the package wraps, whose wrappers take them by position.
ARGUMENTS: dict[Any, tuple[str, ...]] = {
    DistributedDataParallel._assign_modules_buffers: ("self",),
    FSDPParamGroup.__init__: ("self", "params", "modules", "mesh_info"),
    ParametrizationList.__init__: ("self", "modules", "original"),
    torch.nn.utils.clip_grad._clip_grads_with_norm_: ("parameters", "max_norm", "total_norm"),
}

#: Headers that are no interface for extensions. csrc/common/torch_version.h has what differs between versions.
HEADERS = (
    *("ATen/EmptyTensor.h", "ATen/MemoryOverlap.h", "ATen/SavedTensorHooks.h", "ATen/cuda/EmptyTensor.h"),
    *("ATen/core/dispatch/Dispatcher.h", "ATen/core/function_schema.h", "ATen/core/stack.h"),
    *("ATen/ops/_grouped_mm.h", "ATen/ops/addmm_cpu_dispatch.h", "ATen/ops/as_strided_native.h"),
    *(
        "ATen/ops/mm_cpu_dispatch.h",
        "c10/core/impl/LocalDispatchKeySet.h",
        "c10/core/impl/TorchDispatchModeTLS.h",
    ),
    *(
        "c10/core/impl/VirtualGuardImpl.h",
        "torch/csrc/autograd/custom_function.h",
        "torch/csrc/autograd/engine.h",
    ),
    *("torch/csrc/autograd/function.h", "torch/csrc/autograd/functions/basic_ops.h"),
    *(
        "torch/csrc/autograd/functions/utils.h",
        "torch/csrc/autograd/graph_task.h",
        "torch/csrc/autograd/variable.h",
    ),
    *("torch/csrc/distributed/c10d/GroupRegistry.hpp", "torch/csrc/distributed/c10d/ProcessGroup.hpp"),
    *("torch/csrc/distributed/c10d/Store.hpp", "torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp"),
)

#: Attributes that are not torch's.
OTHERS = {
    "_apply_gate": "Hugging Face's experts",
    "_asdict": "named tuples",
    "_divided_by_ranks": "a mark on parameters, set by name",
    "_fields": "named tuples",
    "_getframe": "sys",
    "_parameter_layout": "a property of a class in nn",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def trees() -> dict[str, ast.Module]:
    files = sorted((ROOT / "transformer_plugin").rglob("*.py"))
    return {file.stem: ast.parse(file.read_text()) for file in files}


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def own_names() -> set[str]:
    """Modules, functions, classes, arguments, variables and attributes of the package."""
    names = set(trees())
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
                names.add(node.attr)
    return names


def imported(tree: ast.Module) -> dict[str, str]:
    """The names of torch in a module, and what they stand for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            paths = [each for each in node.names if each.name.split(".")[0] == "torch"]
            names |= {each.asname or "torch": each.name if each.asname else "torch" for each in paths}
    return names


def used(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields private attributes as they are read: the object's name, if it is of torch, and the attribute."""
    known = imported(tree)
    yield from (("", path) for path in known.values() if any(map(is_private, path.split("."))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            path, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                path, value = [value.attr, *path], value.value
            owner = known.get(value.id) if isinstance(value, ast.Name) else None
            yield ("object", node.attr) if owner is None else ("", ".".join([owner, *path]))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = getattr(node.args[1], "value", None)
            if node.func.id in ("getattr", "hasattr", "setattr") and isinstance(name, str):
                yield from [("object", name)] if is_private(name) else []


def test_all_are_listed() -> None:
    listed = {*ATTRIBUTES, *OTHERS}
    own = own_names() - listed
    found = {each for tree in trees().values() for each in used(tree)}
    paths = {path for owner, path in found if not owner}
    attributes = {name for owner, name in found if owner} - own
    # Of a path that is listed each beginning is, too.
    assert [
        path for path in sorted(paths) if not any(f"{name}.".startswith(f"{path}.") for name in NAMES)
    ] == []
    assert [name for name in NAMES if not any(f"{name}.".startswith(f"{path}.") for path in paths)] == []
    assert sorted(attributes - listed - {name.rpartition(".")[2] for name in NAMES}) == []
    assert sorted(listed - attributes) == []


@pytest.mark.parametrize("name", NAMES)
def test_torch_has(name: str) -> None:
    path, _, rest = name.partition(".")
    found: Any = importlib.import_module(path)
    for part in rest.split("."):
        path = f"{path}.{part}"
        try:  # a module that its package does not name, too
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
        except ImportError:
            pytest.fail(f"torch {torch.__version__} has no {path}")


@pytest.mark.parametrize("name", [name for name, owner in ATTRIBUTES.items() if owner is not None])
def test_objects_of_torch_have(name: str) -> None:
    assert_has(ATTRIBUTES[name], name)


def assert_has(owner: Any, name: str) -> None:
    assert name in owner if isinstance(owner, tuple | list | dict) else hasattr(owner, name)


@pytest.mark.parametrize("name", PARTS)
def test_private_classes_of_torch_have(name: str) -> None:
    assert_has(PARTS[name], name)
    read = {
        node.attr for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    assert name in read, f"the package does not use {name}: leave it out of the list"


def defined() -> set[str]:
    """The functions and methods of the package."""
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", METHODS)
def test_torch_calls(name: str) -> None:
    assert_has(METHODS[name], name)
    assert name in defined(), f"the package does not define {name}: leave it out of the list"


def test_all_protocols_are_listed() -> None:
    """Those of Python and of torch's public pages are not."""
    python = {name for kind in (object, type, dict, set, int) for name in dir(kind)}
    others = [
        "call",
        "copy",
        "deepcopy",
        "enter",
        "exit",
        "getstate",
        "post_init",
        "setstate",
        "torch_dispatch",
    ]
    python |= {f"__{name}__" for name in others}
    assert sorted(n for n in defined() - python - {*METHODS} if n.startswith("__")) == []


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda function: function.__qualname__)
def test_positions(function: Any) -> None:
    names = ARGUMENTS[function]
    assert tuple(inspect.signature(inspect.unwrap(function)).parameters)[: len(names)] == names


def test_names_in_texts() -> None:
    """What the package recognizes by a name: nodes behind views, and classes that torch derives from those of users."""
    x = torch.ones(2, requires_grad=True)
    assert x.view(2, 1).grad_fn.name() == "ViewBackward0"
    assert x.to(torch.float64).grad_fn.name() == "ToCopyBackward0"
    layer = parametrizations.weight_norm(torch.nn.Linear(2, 2))
    assert type(layer).__module__.startswith("torch.nn.utils.")
    assert FSDPModule.__module__ == "torch.distributed.fsdp"
    kinds = (parametrizations._SpectralNorm, parametrizations._WeightNorm, parametrizations._Orthogonal)
    assert {kind.__module__ for kind in kinds} == {"torch.nn.utils.parametrizations"}
    with pytest.raises(RuntimeError, match=_library._MISMATCH.pattern):
        torch._C._get_operation_overload("transformer_plugin::bias_backward", "")[0]("no tensor")


#: Headers of ATen itself that extensions include.
PUBLIC = (
    "Context.h",
    "Parallel.h",
    "core/List.h",
    "core/Tensor.h",
    "core/grad_mode.h",
    "cuda/CUDAContextLight.h",
)


def is_private_header(name: str) -> bool:
    path = Path(name)
    if path.parts[0] == "ATen" and path.parts[1] != "ops":
        return name.removeprefix("ATen/") not in PUBLIC
    if path.parts[:2] == ("ATen", "ops"):
        return path.stem.startswith("_") or path.stem.endswith(("_dispatch", "_native"))
    return path.parts[:2] == ("torch", "csrc") or "impl" in path.parts


def test_headers() -> None:
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    found = {name for path in files for name in re.findall(r"#include <([^>]+)>", path.read_text())}
    assert sorted(filter(is_private_header, found)) == sorted(HEADERS)
    include = Path(torch.__file__).parent / "include"
    assert [name for name in HEADERS if not (include / name).exists()] == []
