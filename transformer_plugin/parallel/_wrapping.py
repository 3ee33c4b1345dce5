"""Makes torch's wrappers, which treat parameters as replicated or as shards of one tensor, aware of experts.

``DistributedDataParallel`` sends rank 0's parameters to the others when it is made, and FSDP2 averages gradients over
its own ranks only. Neither asks the module. So the first layer whose experts are spread over ranks adds two checks to
the process: one where a module is put into a ``DistributedDataParallel`` (torch has a hook for that), and one where
FSDP2 groups parameters (torch has none there, so its constructor is wrapped).
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

from transformer_plugin.parallel._spread import COPIES_OVER, EXPERTS_OVER, Ranks


def spread_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, Ranks]]:
    """The modules below a model whose own tensors belong to experts that are spread over ranks."""
    for name, module in model.named_modules():
        ranks = getattr(module, EXPERTS_OVER, None)
        if isinstance(ranks, Ranks):
            yield name, module, ranks


@functools.cache
def know_spread_experts() -> None:
    """Once for the process, when the first layer spreads its experts."""
    register_module_module_registration_hook(_before_data_parallel)
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:  # a build of torch without it
        return
    original = FSDPParamGroup.__init__

    @functools.wraps(original)
    def init(self: Any, params: list[Any], modules: Any, mesh_info: Any, *rest: Any, **named: Any) -> None:
        ranks = _check_sharded(params, modules, mesh_info.mesh)
        original(self, params, modules, mesh_info, *rest, **named)
        if ranks is not None:
            _divide_by_all(self, mesh_info.mesh, len(ranks.ranks))

    FSDPParamGroup.__init__ = init  # type: ignore[method-assign]


def _before_data_parallel(wrapper: torch.nn.Module, name: str, model: torch.nn.Module | None) -> None:
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or model is None:
        return
    together = set(dist.get_process_group_ranks(wrapper.process_group))
    for prefix, module in model.named_modules():
        spread, copies = getattr(module, EXPERTS_OVER, None), getattr(module, COPIES_OVER, None)
        for key, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{key}" if prefix else key
            if full in wrapper.parameters_to_ignore:
                continue
            if isinstance(spread, Ranks) and (
                len(together.intersection(spread.ranks)) > 1 or hasattr(parameter, "to_local")
            ):
                raise _refusal_of_copies(
                    "parameters that are copies on every rank",
                    f"'{full}', of experts that are spread over the ranks {list(spread.ranks)}: rank 0's would "
                    "overwrite the others",
                )
            if isinstance(copies, Ranks) and not together.issuperset(copies.ranks):
                raise _refusal_of_copies(
                    "all ranks with copies of a parameter",
                    f"the ranks {sorted(together)} for '{full}' of a layer whose experts are spread over "
                    f"{list(copies.ranks)}: its copies there would drift apart",
                )


def _refusal_of_copies(expected: str, got: str) -> ValueError:
    return ValueError(
        f"transformer_plugin::MoE: argument 'module' of DistributedDataParallel: expected {expected}, got {got}. Use "
        "transformer_plugin.parallel.data_parallel(model) in place of DistributedDataParallel(model)."
    )


def _check_sharded(params: list[Any], modules: Any, mesh: Any) -> Ranks | None:
    """Refuses a group of FSDP2 that cannot be right, by name; the ranks of the experts in it, if there are any."""
    wanted = {id(parameter) for parameter in params}
    together = set(mesh.mesh.flatten().tolist())
    experts: dict[int, Ranks] = {}
    for root in modules:
        for module in root.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in wanted]
            spread, copies = getattr(module, EXPERTS_OVER, None), getattr(module, COPIES_OVER, None)
            if own and isinstance(spread, Ranks):
                for parameter in own:
                    _check_experts(parameter, spread, mesh, together)
                    experts[id(parameter)] = spread
            elif own and isinstance(copies, Ranks) and not together.issuperset(copies.ranks):
                raise _refusal(
                    f"ranks {sorted(together)} for the router of a layer whose experts are spread over "
                    f"{list(copies.ranks)}: its copies there would drift apart"
                )
    if experts and len(experts) < len(wanted):
        raise _refusal("experts that are spread over ranks in one group with other parameters")
    sizes = {len(ranks.ranks): ranks for ranks in experts.values()}
    if len(sizes) > 1:
        raise _refusal(f"experts that are spread over {sorted(sizes)} ranks in one group")
    return next(iter(sizes.values()), None)


def _check_experts(parameter: Tensor, ranks: Ranks, mesh: Any, together: set[int]) -> None:
    shared = sorted(together.intersection(ranks.ranks))
    if len(shared) > 1:
        raise _refusal(
            f"the ranks {shared}, over which the experts are spread already: they hold different ones"
        )
    spec = getattr(parameter, "_spec", None)
    if spec is None:
        return
    root = mesh._get_root_mesh()
    if spec.mesh._get_root_mesh() == root and spec.mesh.mesh_dim_names and mesh.mesh_dim_names:
        return
    # FSDP2 wants both to be parts of one mesh. The layer was given a group: is it a dimension of that mesh?
    for name in root.mesh_dim_names or ():
        if root[name].get_group().group_name == ranks.group_name:
            # Anew: specs are shared with other tensors by caches.
            parameter._spec = replace(spec, mesh=root[name])  # type: ignore[attr-defined]
            return
    raise _refusal(
        f"{mesh}, which is no part of one mesh together with the experts' ranks {list(ranks.ranks)}"
    )


def _divide_by_all(group: Any, mesh: Any, ranks: int) -> None:
    """The experts' gradients are sums over their own ranks, and become means over these and the mesh's."""
    shards = mesh.get_group(mesh.ndim - 1).size()
    policy, first = group.mp_policy, group.fsdp_params[0].sharded_param
    if mesh.size() == 1 and (policy.reduce_dtype or policy.param_dtype or first.dtype) == torch.float16:
        group._all_reduce_hook = lambda gradient: gradient.div_(
            ranks
        )  # torch would divide by the factor twice
        return
    group.gradient_divide_factor = float(mesh.size() * ranks)
    if shards > 1 and dist.get_backend(mesh.get_group(mesh.ndim - 1)) == "gloo":
        group.force_sum_reduction_for_comms = True  # Gloo cannot scale while it sums


def _refusal(got: str) -> ValueError:
    return ValueError(
        "transformer_plugin::MoE: argument 'mesh' of fully_shard: expected experts sharded by themselves, over the "
        "ranks that hold the same experts, and everything else over all ranks, "
        f"got {got}. Use transformer_plugin.parallel.fully_shard(model, mesh) with the mesh of (copies, experts), or "
        "fully_shard(moe.experts, mesh=mesh['copies']) before fully_shard(model)."
    )
