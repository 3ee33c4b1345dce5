"""Checks for torch's data-parallel wrappers, which know neither that ranks hold different experts nor quantized values.

``DistributedDataParallel`` broadcasts rank 0's parameters when it is constructed, and FSDP2 averages gradients over its
own ranks only. Neither consults the module. So the first layer with sharded experts, and the first quantized parameter
that is made while there is a process group, install two checks in the process. One runs when a module is put into a
``DistributedDataParallel`` (torch has a hook for this). The other runs when FSDP2 groups parameters (torch has no hook
for this, so its constructor is wrapped). Adapters and parametrizations are checked in the same way.

The state of delayed scaling is each rank's own. ``DistributedDataParallel`` would overwrite it with rank 0's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from transformer_plugin._torch_versions import fsdp_reduces_in_param_dtype
from transformer_plugin.parallel._adapters import check_adapter
from transformer_plugin.parallel._layer_shards import note_shards
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.parallel._shard_experts import EXPERT_RANKS, ROUTER_RANKS, Ranks
from transformer_plugin.parallel._tensor_slices import TENSOR_PARALLELISM, slices_of
from transformer_plugin.parallel._watching import watch_parametrizations
from transformer_plugin.tensor._base import FormatTensor


def sharded_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Ranks]]:
    """Yields the modules of a model whose own tensors belong to sharded experts, with their names and ranks."""
    for name, module in model.named_modules():
        ranks = getattr(module, EXPERT_RANKS, None)
        if isinstance(ranks, Ranks):
            yield name, module, ranks


@functools.cache
def install_wrapper_checks() -> None:
    """Installs the checks, once per process, when the first layer shards its experts or has quantized parameters."""
    register_module_module_registration_hook(_check_ddp)
    register_module_module_registration_hook(check_adapter)
    watch_parametrizations()
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:  # this build of torch has no FSDP2
        return
    original = FSDPParamGroup.__init__

    @functools.wraps(original)
    def init(self: Any, params: list[Any], modules: Any, mesh_info: Any, *rest: Any, **named: Any) -> None:
        note_shards()
        _check_not_quantized(params)
        ranks = _check_fsdp_group(params, modules, mesh_info.mesh)
        original(self, params, modules, mesh_info, *rest, **named)
        if ranks is not None:
            _average_over_all_ranks(self, mesh_info.mesh, ranks.losses)

    FSDPParamGroup.__init__ = init  # type: ignore[method-assign]


@functools.cache
def keep_rank_buffers() -> None:
    """Once per process: ``DistributedDataParallel`` broadcasts no buffers that are each rank's own, before a forward.

    When it is constructed it broadcasts them as all others. torch asks for names to leave out only then, and would
    leave these out of that, too; so its method that collects buffers before each forward is wrapped.
    """
    original = DistributedDataParallel._assign_modules_buffers

    @functools.wraps(original)
    def assign(self: Any) -> None:
        original(self)
        layers = [module for module in self.module.modules() if getattr(module, "rank_buffers", ())]
        own = {id(layer._buffers.get(name)) for layer in layers for name in layer.rank_buffers}
        every = self.named_module_buffers
        self.named_module_buffers = {name: buffer for name, buffer in every.items() if id(buffer) not in own}
        self.modules_buffers = list(self.named_module_buffers.values())

    DistributedDataParallel._assign_modules_buffers = assign  # type: ignore[method-assign]


def _check_ddp(wrapper: torch.nn.Module, name: str, model: torch.nn.Module | None) -> None:
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or model is None:
        return
    note_shards()
    together = set(dist.get_process_group_ranks(wrapper.process_group))
    for prefix, module in model.named_modules():
        expert_ranks, router_ranks = getattr(module, EXPERT_RANKS, None), getattr(module, ROUTER_RANKS, None)
        for key, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{key}" if prefix else key
            if full in wrapper.parameters_to_ignore:
                continue
            slices = slices_of(parameter)
            own = shard_of_parameter(parameter)
            for held, kind in ((own, "shard_"), (slices, slices.kind if slices else "")):
                if held is not None and len(together.intersection(held.ranks)) > 1:
                    raise _ddp_error(
                        "parameters that are replicated on all ranks",
                        f"'{full}', which {kind} has sharded over the ranks {list(held.ranks)}: rank 0's values would "
                        "overwrite the others",
                        "Pass the process_group of ranks with the same slices"
                        if kind == TENSOR_PARALLELISM
                        else None,
                    )
            if isinstance(expert_ranks, Ranks) and (
                len(together.intersection(expert_ranks.ranks)) > 1 or hasattr(parameter, "to_local")
            ):
                raise _ddp_error(
                    "parameters that are replicated on all ranks",
                    f"'{full}' of experts that are sharded over the ranks {list(expert_ranks.ranks)}: rank 0's values "
                    "would overwrite the others",
                )
            if isinstance(router_ranks, Ranks) and not together.issuperset(router_ranks.ranks):
                raise _ddp_error(
                    "all ranks that hold copies of a parameter",
                    f"the ranks {sorted(together)} for '{full}' of a layer whose experts are sharded over "
                    f"{list(router_ranks.ranks)}: the copies on the other ranks would diverge",
                )


def _ddp_error(expected: str, got: str, advice: str | None = None) -> ValueError:
    own = "Use transformer_plugin.parallel.data_parallel(model) in place of DistributedDataParallel(model)"
    return ValueError(
        f"transformer_plugin::MoE: argument 'module' of DistributedDataParallel: expected {expected}, got {got}. "
        f"{advice or own}."
    )


def _check_not_quantized(params: list[Any]) -> None:
    """Raises if FSDP2 would shard quantized parameters, whose shards have no numbers that an optimizer could step."""
    for parameter in params:
        shard = shard_of_parameter(parameter)
        if shard is not None:
            raise ValueError(
                "transformer_plugin::fully_shard: argument 'module': expected weights that nothing else has sharded, "
                f"got '{shard.name}', sharded by shard_ over the ranks {list(shard.ranks)}. Pass these parameters as "
                "ignored_params, or leave them to fully_shard alone."
            )
        slices = slices_of(parameter)
        if slices is not None:
            raise ValueError(
                "transformer_plugin::fully_shard: argument 'module': expected parameters that no other wrapper has "
                f"sharded, got a slice of sizes {list(parameter.shape)}, which {slices.kind} has over the ranks "
                f"{list(slices.ranks)}: checkpoints would have one slice. Shard these layers with "
                "transformer_plugin.parallel.shard_, or make them tensor parallel with torch's parallelize_module."
            )
        if isinstance(parameter, FormatTensor) and parameter.format.is_quantized:
            raise ValueError(
                "transformer_plugin::fully_shard: argument 'module': expected parameters in high precision, got a "
                f"{parameter._described()}. Make the model without quantized_init, with recipes, and call "
                "transformer_plugin.parallel.quantize_all_gather(model) first: FSDP2 then gathers quantized weights."
            )


def _check_fsdp_group(params: list[Any], modules: Any, mesh: Any) -> Ranks | None:
    """Raises if FSDP2 would group parameters wrongly. Returns the ranks of the group's experts, or None."""
    wanted = {id(parameter) for parameter in params}
    together = set(mesh.mesh.flatten().tolist())
    experts: dict[int, Ranks] = {}
    for root in modules:
        for module in root.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in wanted]
            expert_ranks, router_ranks = (
                getattr(module, EXPERT_RANKS, None),
                getattr(module, ROUTER_RANKS, None),
            )
            if own and isinstance(expert_ranks, Ranks):
                for parameter in own:
                    _check_experts(parameter, expert_ranks, mesh, together)
                    experts[id(parameter)] = expert_ranks
            elif own and isinstance(router_ranks, Ranks) and not together.issuperset(router_ranks.ranks):
                raise _fsdp_error(
                    f"ranks {sorted(together)} for the router of a layer whose experts are sharded over "
                    f"{list(router_ranks.ranks)}: the copies on the other ranks would diverge"
                )
    if experts and len(experts) < len(wanted):
        raise _fsdp_error("sharded experts in one group with other parameters")
    sizes = {len(ranks.ranks): ranks for ranks in experts.values()}
    if len(sizes) > 1:
        raise _fsdp_error(f"experts that are sharded over {sorted(sizes)} ranks in one group")
    return next(iter(sizes.values()), None)


def _check_experts(parameter: Tensor, ranks: Ranks, mesh: Any, together: set[int]) -> None:
    shared = sorted(together.intersection(ranks.ranks))
    if len(shared) > 1:
        raise _fsdp_error(
            f"the ranks {shared}, over which the experts are already sharded: they hold different experts"
        )
    spec = getattr(parameter, "_spec", None)
    if spec is None:
        return
    root = mesh._get_root_mesh()
    if spec.mesh._get_root_mesh() == root and spec.mesh.mesh_dim_names and mesh.mesh_dim_names:
        return
    # FSDP2 requires both meshes to be parts of one. For a layer made with a group, look for the mesh dimension that is
    # this group.
    for name in root.mesh_dim_names or ():
        if root[name].get_group().group_name == ranks.group_name:
            # A new spec, because torch's caches share specs between tensors.
            parameter._spec = replace(spec, mesh=root[name])  # type: ignore[attr-defined]
            return
    raise _fsdp_error(f"{mesh}, which is not part of the same mesh as the experts' ranks {list(ranks.ranks)}")


def _average_over_all_ranks(group: Any, mesh: Any, ranks: int) -> None:
    """Makes the experts' gradients, which are sums over the experts' ranks, means over these and the mesh's ranks."""
    shards = mesh.get_group(mesh.ndim - 1).size()
    policy, first = group.fsdp_params[0].mp_policy, group.fsdp_params[0].sharded_param
    in_param_dtype = fsdp_reduces_in_param_dtype(torch.__version__)
    dtype = policy.reduce_dtype or (policy.param_dtype if in_param_dtype else None) or first.dtype
    if mesh.size() == 1 and dtype == torch.float16:
        group._all_reduce_hook = lambda gradient: gradient.div_(
            ranks
        )  # torch would divide by gradient_divide_factor twice
        return
    group.gradient_divide_factor = float(mesh.size() * ranks)
    if shards > 1 and dist.get_backend(mesh.get_group(mesh.ndim - 1)) == "gloo":
        group.force_sum_reduction_for_comms = True  # Gloo has no averaging reduction


def _fsdp_error(got: str) -> ValueError:
    return ValueError(
        "transformer_plugin::MoE: argument 'mesh' of fully_shard: expected experts in their own FSDP group, over the "
        "ranks that hold the same experts, and everything else over all ranks, "
        f"got {got}. Use transformer_plugin.parallel.fully_shard(model, mesh) with the mesh of (copies, experts), or "
        "fully_shard(moe.experts, mesh=mesh['copies']) before fully_shard(model)."
    )
