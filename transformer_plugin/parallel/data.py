"""Data parallelism for models with sharded experts, based on torch's wrappers.

Every rank computes the mean loss of its own tokens. The gradients are those of the mean of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from transformer_plugin._arguments import typed
from transformer_plugin.parallel._collectives import (
    all_gather_value,
    all_reduce_sum,
    seconds_of,
    torch_collectives,
)
from transformer_plugin.parallel._layer_shards import note_shards
from transformer_plugin.parallel._parameter_shard import shard_of_parameter
from transformer_plugin.parallel._shard_experts import EXPERT_RANKS, Ranks, local
from transformer_plugin.parallel._tensor_slices import slices_of
from transformer_plugin.parallel._wrapping import sharded_modules
from transformer_plugin.tensor._layout import message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: The names for errors.
_DATA_PARALLEL, _FULLY_SHARD = "data_parallel", "fully_shard"


class ExpertDataParallel(DistributedDataParallel):
    """The result of :func:`data_parallel`: a ``DistributedDataParallel`` that reduces experts over their copies."""

    #: whether the last forward ran outside of ``no_sync()``: only then does its backward reduce gradients.
    reduces_experts = True

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Runs the model."""
        if torch.is_grad_enabled():
            self.reduces_experts = self.require_backward_grad_sync
        return super().forward(*inputs, **named)


@typed
def data_parallel(
    model: torch.nn.Module, *, process_group: ProcessGroup | None = None, **options: Any
) -> ExpertDataParallel:
    """Wraps a model with ``DistributedDataParallel``, with correct gradients for sharded experts.

    After a backward every gradient is that of the mean of all R ranks' losses. ``DistributedDataParallel`` averages the
    parameters that are replicated on all ranks. The gradient of an expert contains the tokens of all ranks of the
    experts' group; it is divided by the size of that group. If several ranks hold the same expert, it is also averaged
    over them. Weights that :func:`~transformer_plugin.parallel.shard_` has sharded are averaged over the ranks that
    have the same shard, and slices of tensor parallelism over those that have the same slices. Tensor-parallel ranks
    have one loss together. ``no_sync()`` works as usual. When the model is wrapped, the first of the ranks that hold
    the same experts or shards broadcasts them to the others, and rank 0 broadcasts everything else.

    Args:
        model: any, with :class:`~transformer_plugin.nn.MoE` layers made with a ``group`` or a ``mesh``, sharded
            weights, or tensor-parallel layers.
        process_group: all ranks that train; None for the world. The experts of every layer are sharded over all of
            them, or over subgroups of equal size.
        options: options of ``DistributedDataParallel``, such as ``device_ids``.

    Raises:
        ValueError: experts or shards that are distributed in another way than above; nothing is changed then.
        PeerTimeoutError: a rank does not call this; in a backward, a rank does not take part in a sum over copies.

    Buffers of experts, such as the scales of delayed scaling, are not synchronized.
    """
    if process_group is None and not dist.is_initialized():
        expected, got = "a process group, or that of all ranks", "none before init_process_group"
        raise ValueError(message("data_parallel", "process_group", expected, got, "Call it first"))
    everyone = process_group if process_group is not None else dist.group.WORLD
    assert everyone is not None
    mine: dict[str, tuple[torch.nn.Module, Ranks]] = {
        prefix: (module, ranks) for prefix, module, ranks in sharded_modules(model)
    }
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    for prefix, (module, _) in mine.items():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        ignored += [f"{prefix}.{name}" if prefix else name for name, _ in tensors]
    note_shards()
    every = model.named_parameters(remove_duplicate=False)  # layers may share a parameter
    shards = {name: p for name, p in every if shard_of_parameter(p) or slices_of(p)}
    ignored += shards
    copies, same = _groups(everyone, mine, list(shards.values()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    with torch_collectives(_DATA_PARALLEL, "parameters", everyone):
        wrapped = ExpertDataParallel(model, process_group=process_group, **options)
        for module, ranks in mine.values():
            for parameter in module.parameters(recurse=False):
                if shard_of_parameter(parameter) is None and slices_of(parameter) is None:
                    _average(wrapped, parameter, copies[ranks.ranks], divide_by=ranks.losses)
        owners = _owners(mine)
        for parameter in {id(p): p for p in shards.values()}.values():
            shard, ranks_of_experts = shard_of_parameter(parameter), owners.get(id(parameter))
            divide_by = 1 if shard is None or shard.shard.mean else len(shard.ranks)
            divide_by *= 1 if ranks_of_experts is None else ranks_of_experts.losses
            _average(wrapped, parameter, same[_sharded_over(parameter, owners)], divide_by)
    return wrapped


Experts = dict[str, tuple[torch.nn.Module, Ranks]]
Groups = dict[Any, "ProcessGroup | None"]


def _owners(experts: Experts) -> dict[int, Ranks]:
    """The ranks of the experts to which a parameter belongs, by its id."""
    return {id(p): ranks for module, ranks in experts.values() for p in module.parameters(recurse=False)}


def _sharded_over(parameter: Tensor, owners: dict[int, Ranks]) -> tuple[Any, ...]:
    """The ranks over which a parameter is sharded: its slices, its rows, and the experts to which it belongs."""
    over = (slices_of(parameter), shard_of_parameter(parameter), owners.get(id(parameter)))
    return tuple(None if each is None else each.ranks for each in over)


def _groups(everyone: ProcessGroup, experts: Experts, shards: list[Tensor]) -> tuple[Groups, Groups]:
    """The groups of ranks that have the same as this one: of experts, by their ranks, and of shards, by all ranks over
    which they are sharded. None where no other rank has the same."""
    owners, places = _owners(experts), {}
    for parameter in shards:
        shard, slices, ranks = shard_of_parameter(parameter), slices_of(parameter), owners.get(id(parameter))
        own = None if ranks is None else ranks.ranks.index(dist.get_rank())
        place = (None if slices is None else slices.rank, None if shard is None else shard.rank, own)
        places[_sharded_over(parameter, owners)] = place
    of_experts = {ranks.ranks: ranks for _, ranks in experts.values()}
    mine = (list(of_experts), list(places.values()))
    every = all_gather_value(_DATA_PARALLEL, "places", mine, everyone)
    counts = [tuple(len(each) for each in other) for other in every]
    if any(count != counts[0] for count in counts):
        raise ValueError(
            "transformer_plugin::data_parallel: argument 'model': expected the same layers on all ranks, got layers "
            f"whose experts and weights are sharded in {counts} ways. Make the same model everywhere."
        )
    with torch_collectives(_DATA_PARALLEL, "groups", everyone):
        copies = {
            ranks: _group_of_copies(everyone, ranks, [other[0][i] for other in every])
            for i, ranks in enumerate(of_experts)
        }
        same = {
            over: _group_of_same(everyone, place, [other[1][i] for other in every])
            for i, (over, place) in enumerate(places.items())
        }
    return copies, same


def _group_of_same(everyone: ProcessGroup, place: Any, places: list[Any]) -> ProcessGroup | None:
    """Returns the group of the ranks at the same place, which have the same shard; None if there is no other."""
    world = dist.get_process_group_ranks(everyone)
    members: dict[Any, list[int]] = {}
    for rank, other in zip(world, places, strict=True):
        members.setdefault(other, []).append(rank)
    if len({len(ranks) for ranks in members.values()}) > 1:  # on all ranks, which have the same places
        raise ValueError(
            "transformer_plugin::data_parallel: argument 'process_group': expected as many copies of each shard, got "
            f"the ranks {world} with shards over {places}. Pass the group of all ranks that train."
        )
    if len(members[place]) == 1:
        return None
    if len(members) == 1:
        return everyone
    return _new_group(members[place], [members[each] for each in sorted(members, key=str)], everyone)


def _group_of_copies(
    everyone: ProcessGroup, ranks: tuple[int, ...], places: list[tuple[int, ...]]
) -> ProcessGroup | None:
    """Returns the group of the ranks that hold the same experts as this one; None if there is no other."""
    world = dist.get_process_group_ranks(everyone)
    place, count = ranks.index(dist.get_rank()), len(ranks)
    # All ranks have the same places, so that all of them raise, or none.
    if any(len(other) != count or not set(other) <= set(world) for other in places) or len(world) % count:
        raise ValueError(
            "transformer_plugin::data_parallel: argument 'process_group': expected experts that are sharded over all "
            f"of its ranks, or over subgroups of equal size, got the ranks {world} with experts sharded over {places}. "
            "Pass the group of all ranks that train."
        )
    if len(world) == count:
        return None
    copies: list[list[int]] = [[] for _ in range(count)]
    for rank, other in zip(world, places, strict=True):
        copies[other.index(rank)].append(rank)
    return _new_group(copies[place], copies, everyone)


def _new_group(own: list[int], all_of_them: list[list[int]], everyone: ProcessGroup) -> ProcessGroup:
    """The group of some ranks, made by all of them, with the same timeout."""
    timeout = timedelta(seconds=seconds_of(everyone))
    if everyone.size() < dist.get_world_size():
        group: ProcessGroup = dist.new_group(own, timeout, use_local_synchronization=True)
        return group
    # Not with local synchronization: torch then derives the name of a group from how many groups the process has, and
    # ranks that are members of different numbers of groups would wait for each other under different names.
    made = [dist.new_group(each, timeout) for each in all_of_them]
    return made[all_of_them.index(own)]


def _average(
    wrapped: ExpertDataParallel, parameter: Tensor, copies: ProcessGroup | None, divide_by: int
) -> None:
    if copies is not None:
        first = min(dist.get_process_group_ranks(copies))
        dist.broadcast(local(parameter.detach()), first, group=copies)
    if not parameter.requires_grad:
        return
    if divide_by > 1:
        parameter.register_hook(_divide_by(divide_by))
    if copies is None:
        return
    size = copies.size()

    def average(changed: Tensor) -> None:
        if wrapped.reduces_experts and changed.grad is not None:
            gradient = local(changed.grad.detach())
            gradient.copy_(all_reduce_sum(_DATA_PARALLEL, "gradients", gradient, copies)).div_(size)

    parameter.register_post_accumulate_grad_hook(average)


def _divide_by(ranks: int) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient / ranks


@typed
def fully_shard(module: torch.nn.Module, mesh: DeviceMesh, **options: Any) -> torch.nn.Module:
    """Shards a module with FSDP2's ``fully_shard``, with correct gradients for sharded experts.

    After a backward every gradient is that of the mean of all ranks' losses. Experts are sharded further over the ranks
    that hold the same experts, everything else over all ranks of the mesh. Like torch's function, call it for the
    blocks of a model first and for the model last.

    Args:
        module: contains :class:`~transformer_plugin.nn.MoE` layers, or none.
        mesh: all ranks. Either a mesh of two named dimensions, one of them the experts' (the layers were made with
            ``mesh=mesh["experts"]``, or with its group). Or a mesh of one dimension over which the experts are sharded:
            they are then not sharded further, and their gradients are divided by its size.
        options: options of torch's ``fully_shard``, for experts and everything else.

    Returns:
        The module, changed in place.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp import fully_shard as shard

    ignored: set[torch.nn.Parameter] = set(options.pop("ignored_params", None) or ())
    for experts, ranks in _roots_of_experts(module):
        copies = _mesh_of_copies(mesh, ranks)
        if copies is None:
            ignored.update(experts.parameters())
            _divide_once(experts, ranks)
        elif not any(isinstance(each, FSDPModule) for each in experts.modules()):
            shard(experts, mesh=copies, **options)
    if getattr(module, EXPERT_RANKS, None) is None:
        everyone = mesh
        if mesh.ndim > 1:
            with torch_collectives(_FULLY_SHARD, "groups", None):
                everyone = mesh._flatten()
        shard(module, mesh=everyone, ignored_params=ignored or None, **options)
    return module


def _roots_of_experts(module: torch.nn.Module) -> list[tuple[torch.nn.Module, Ranks]]:
    """Returns the outermost modules whose parameters all belong to sharded experts, with their ranks."""
    ranks = getattr(module, EXPERT_RANKS, None)
    if isinstance(ranks, Ranks):
        return [(module, ranks)]
    return [found for child in module.children() for found in _roots_of_experts(child)]


def _mesh_of_copies(mesh: DeviceMesh, ranks: Ranks) -> DeviceMesh | None:
    """Returns the mesh dimension that is not the experts'; None if the experts are sharded over the whole mesh."""
    if mesh.ndim == 1 and set(mesh.mesh.flatten().tolist()) == set(ranks.ranks):
        return None
    names = mesh.mesh_dim_names or ()
    others = [n for n in names if set(mesh[n].mesh.flatten().tolist()) != set(ranks.ranks)]
    if mesh.ndim != 2 or len(others) != 1:
        raise ValueError(
            "transformer_plugin::fully_shard: argument 'mesh': expected a mesh of all ranks, with two named "
            f"dimensions, one of them the ranks {list(ranks.ranks)} over which the experts are sharded, or with one "
            f"dimension of exactly these ranks, got {mesh}. Make it with init_device_mesh(device, (copies, "
            f'{len(ranks.ranks)}), mesh_dim_names=("copies", "experts")), and the layers with mesh=mesh["experts"].'
        )
    return mesh[others[0]]


def _divide_once(experts: torch.nn.Module, ranks: Ranks) -> None:
    for parameter in experts.parameters():
        if parameter.requires_grad and not getattr(parameter, "_divided_by_ranks", False):
            parameter.register_hook(_divide_by(ranks.losses))
            parameter._divided_by_ranks = True  # type: ignore[attr-defined]
