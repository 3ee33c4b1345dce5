"""Experts sharded over ranks: marks on modules, ``DTensor`` parameters, and access to this rank's shard for the ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_plugin._arguments import class_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: Attributes that hold :class:`Ranks`: of modules with sharded experts, and of a router replicated on these ranks.
EXPERT_RANKS, ROUTER_RANKS = "_expert_ranks", "_router_ranks"


@dataclass(frozen=True)
class Ranks:
    """The ranks over which a layer's experts are sharded, for wrappers such as FSDP2 and DDP."""

    #: global ranks, in the order of their experts.
    ranks: tuple[int, ...]
    group_name: str
    #: the mesh of the parameters; None if the parameters are plain tensors with this rank's experts.
    mesh: DeviceMesh | None
    #: how many of these ranks have tokens of one loss, as those of a tensor-parallel group.
    ranks_per_loss: int = 1

    @property
    def losses(self) -> int:
        """How many losses the gradient of an expert is a sum over."""
        return len(self.ranks) // self.ranks_per_loss

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a ``DTensor``, differentiable; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def check_like(module: Any, name: str, parameter: Any) -> None:
    """Raises for a parameter in place of a ``DTensor`` of experts that is not like it."""
    old, experts = module._parameters.get(name), module._expert_ranks
    if parameter is None or experts is None or not hasattr(old, "to_local"):
        return
    if old.device_mesh.ndim > 1:  # another wrapper's
        return
    given, kept = ((tuple(p.shape), getattr(p, "placements", None)) for p in (parameter, old))
    if given == kept:
        return
    got = f"a {type(parameter).__name__} of sizes {list(given[0])}"
    got += "" if given[1] is None else f" in {given[1]}"
    raise ValueError(
        f"transformer_plugin::{class_name(module)}: argument '{name}': expected a DTensor of sizes "
        f"{list(kept[0])} in {kept[1]}, as the experts are sharded over the ranks "
        f"{list(experts.ranks)}, got {got}. Make it with DTensor.from_local, or copy values into the "
        "parameter."
    )


def has_dtensors(module: Any) -> bool:
    """Whether a module's parameters are ``DTensor`` s of experts."""
    experts: Ranks | None = module._expert_ranks
    return experts is not None and experts.mesh is not None


def local_experts(module: Any, parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter of a module, whose experts may be sharded over ranks."""
    if not has_dtensors(module):
        return parameter
    if not torch.compiler.is_compiling() and not hasattr(parameter, "to_local"):
        raise ValueError(
            f"transformer_plugin::{class_name(module)}: argument 'group': expected DTensor parameters, as the "
            f"experts are sharded over the ranks {list(module._expert_ranks.ranks)}, got a plain tensor: a "
            "data-parallel wrapper has replaced them. Use transformer_plugin.parallel.data_parallel() or "
            "fully_shard(), or make the layer with dtensor=False."
        )
    own: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return own


def draw_uniform(module: Any, parameter: Tensor, bound: float) -> None:
    """Draws initial values. For sharded experts it draws those of all experts, one by one, and keeps this rank's.

    With the same seed on all ranks, all experts differ, copies of an expert are equal, and the generator has the same
    state on all ranks afterwards. On a CPU the values are those of a single process with all experts.
    """
    over, own = module._expert_ranks, local_experts(module, parameter)
    if over is None or (over.mesh is None and parameter.shape[0] == module.num_groups * len(over.ranks)):
        torch.nn.init.uniform_(parameter, -bound, bound)
        return
    if own.is_meta:
        return
    here, first = own.shape[0], _first_expert(parameter, over)
    other = own.new_empty(own.shape[1:])
    for expert in range(module.num_groups * len(over.ranks)):
        mine = first <= expert < first + here
        torch.nn.init.uniform_(own[expert - first] if mine else other, -bound, bound)


def _first_expert(parameter: Tensor, over: Ranks) -> int:
    """Returns the index of this rank's first expert, including FSDP2's sharding over the copies of the experts."""
    place = over.ranks.index(torch.distributed.get_rank())
    if over.mesh is None:
        return place * parameter.shape[0]
    full: Any = parameter
    experts = full.shape[0] // len(over.ranks)
    first = place * experts
    for d, placement in enumerate(full.placements[:-1]):
        if not placement.is_replicate():
            each = -(-experts // full.device_mesh.size(d))
            first += min(full.device_mesh.get_local_rank(d) * each, experts)
    return int(first)


def shard_experts(
    experts: torch.nn.Module,
    router: torch.nn.Module,
    group: ProcessGroup,
    mesh: DeviceMesh | None,
    ranks_per_loss: int = 1,
) -> None:
    """Marks the modules that hold this rank's experts, and the router that chooses among all experts.

    With a mesh over the group's ranks, the experts' parameters become ``DTensor`` s of all experts, ``Shard(0)``,
    without a copy. So do the buffers of delayed scaling in ``state_dict()``, see :func:`_shard_saved_state`.
    ``load_state_dict`` also accepts plain tensors of all experts or of this rank's.
    """
    from transformer_plugin.parallel._sharded_parameter import (  # with DTensor, slow to import
        restore_sharded_class,
        sharded_parameter,
    )

    members = tuple(torch.distributed.get_process_group_ranks(group))
    ranks = Ranks(members, group.group_name, mesh, ranks_per_loss)
    setattr(router, ROUTER_RANKS, ranks)
    for module in experts.modules():
        setattr(module, EXPERT_RANKS, ranks)
        own = list(module.named_parameters(recurse=False))
        if mesh is None or not own:
            continue
        for name, parameter in own:
            full = _as_dtensor(parameter.detach(), mesh, 0)
            module.register_parameter(name, sharded_parameter(full, parameter.requires_grad))
        module.register_state_dict_post_hook(_shard_saved_state)
        module.register_load_state_dict_pre_hook(_localize_loaded_state)
        module.register_load_state_dict_post_hook(restore_sharded_class)


def _as_dtensor(own: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(own, mesh, [Shard(dim)], run_check=False)


def delayed_buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers ``[..., 3 * G]`` of delayed scaling for this rank's G experts."""
    return {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name.startswith("delayed_") and name not in module._non_persistent_buffers_set
    }


def _shard_saved_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """After ``state_dict()``: turns the buffers in it into ``DTensor`` s ``[..., 3, E]``, sharded over the experts."""
    mesh = getattr(module, EXPERT_RANKS).mesh
    for name in delayed_buffers(module):
        own = state[prefix + name].unflatten(-1, (3, -1))
        state[prefix + name] = _as_dtensor(own, mesh, own.dim() - 1)


def _localize_loaded_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before ``load_state_dict``: turns plain parameters into ``DTensor`` s, and buffers into this rank's shard."""
    from torch.distributed.tensor import DTensor

    mesh: Any = getattr(module, EXPERT_RANKS).mesh
    rank, ranks = mesh.get_local_rank(), mesh.size()
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if parameter.device_mesh.ndim > 1:
            continue  # sharded by FSDP2, which checks the value itself
        if value.shape == parameter.shape:
            value = value.chunk(ranks)[rank]
        if value.shape == parameter.to_local().shape:
            state[prefix + name] = _as_dtensor(value.detach(), parameter.device_mesh, 0)
    for name, buffer in delayed_buffers(module).items():
        value = state.get(prefix + name)
        if isinstance(value, DTensor):
            state[prefix + name] = value.to_local().flatten(-2)
        elif isinstance(value, Tensor) and value.shape[-1:] == (buffer.shape[-1] * ranks,):
            state[prefix + name] = value.unflatten(-1, (3, -1)).chunk(ranks, -1)[rank].flatten(-2)
