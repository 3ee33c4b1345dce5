"""Gradient clipping by the norm of all gradients, for parameters that may be sharded over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from transformer_plugin._arguments import check_strided, typed
from transformer_plugin.parallel._collectives import all_reduce_max, all_reduce_sum
from transformer_plugin.parallel._group_names import group_named
from transformer_plugin.parallel._layer_shards import note_shards
from transformer_plugin.parallel._parameter_shard import layout_of, shard_of_parameter
from transformer_plugin.parallel._tensor_slices import slices_of
from transformer_plugin.parallel.external import refuse_shards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Names of the groups over which a gradient is sharded; empty for a replicated gradient.
Place = tuple[str, ...]


@typed
@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.nn.Module | Tensor | Iterable[Tensor],
    max_norm: float | Tensor,
    norm_type: float | Literal["inf"] | Tensor = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients in place so that their total norm is at most ``max_norm``.

    Like ``torch.nn.utils.clip_grad_norm_``, for models with parameters that are sharded over ranks: every element of
    the full model counts once. For a ``DTensor`` the placements decide: shards on a ``Shard`` dimension of its mesh are
    added, and copies on a ``Replicate`` dimension count once. Shards of :func:`~transformer_plugin.parallel.shard_`,
    their experts, and slices of tensor-parallel layers are added over their groups. Another plain tensor counts as a
    replicated parameter with an averaged gradient. All ranks call this function with the same parameters in the same
    order, and get the same norm and factor. Communication is enqueued on the device; the host does not wait.

    A gradient is ``parameter.main_grad`` where ``parameter.grad_added_to_main_grad`` is True or where there is no
    ``parameter.grad``; a plain ``main_grad`` of a ``DTensor`` is this rank's shard. A ``DTensor`` with both gradients
    needs the attribute, because its ``.grad`` may be the zeros that torch makes of a missing gradient.

    Args:
        parameters: a module, a tensor or tensors; parameters without a gradient are skipped.
        max_norm: the largest norm, from 0; of a tensor the host does not read it.
        norm_type: p of the p-norm, above 0, or ``inf``.
        error_if_nonfinite: raise an error if the norm is not finite; the host then reads the norm. Otherwise, as in
            torch, a NaN norm makes every gradient NaN, and an infinite norm makes finite gradients 0 and infinite ones
            NaN.

    Returns:
        The norm before clipping, a scalar tensor: float64 if any gradient is float64, otherwise float32.

    Raises:
        ValueError: a wrong ``norm_type`` or ``max_norm``, or gradients whose norm is not known; nothing is scaled then.
        PeerTimeoutError: a rank does not call this.
    """
    order = _checked_order(norm_type)
    _check_largest(max_norm)
    note_shards()
    gradients = _gradients(parameters)  # raises before anything is scaled
    if not gradients:
        return torch.tensor(0.0, dtype=torch.float32)
    refuse_shards("clip_grad_norm_", "parameters", (parameter for parameter, _ in gradients))
    places = _by_place(gradients)
    device = places[next(iter(places))][1][0].device
    powers = [_reduced(tensors, groups, order).to(device) for groups, tensors in places.values()]
    together = torch.stack(powers)
    norm = together.amax() if math.isinf(order) else together.sum() ** (1 / order)
    wide = any(gradient.dtype == torch.float64 for _, gradient in gradients)
    norm = norm if wide else norm.float()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"transformer_plugin::clip_grad_norm_: expected a finite norm of order {order} of the gradients, got "
            f"{norm.item()}. Skip the step, or pass error_if_nonfinite=False."
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for _, tensors in places.values():
        for some in _by_kind(tensors):
            torch._foreach_mul_(some, factor.to(some[0].device))
    return norm


def _check_largest(max_norm: float | Tensor) -> None:
    """Of a tensor the host does not wait for the value."""
    if not isinstance(max_norm, Tensor) and not max_norm >= 0:
        raise ValueError(
            f"transformer_plugin::clip_grad_norm_: argument 'max_norm': expected a number from 0, got {max_norm}. Pass "
            "inf to compute the norm alone."
        )


def _checked_order(norm_type: float | str | Tensor) -> float:
    order = float(norm_type)
    if not order > 0:
        raise ValueError(
            "transformer_plugin::clip_grad_norm_: argument 'norm_type': expected a number above 0, or inf, got "
            f"{order}. Pass 2.0 for the Euclidean norm."
        )
    return order


def _gradients(parameters: torch.nn.Module | Tensor | Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The parameters that have a gradient, with it."""
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    once = {id(parameter): parameter for parameter in parameters}
    found = ((parameter, gradient_of(parameter, "clip_grad_norm_")) for parameter in once.values())
    gradients = [(parameter, gradient) for parameter, gradient in found if gradient is not None]
    for _, gradient in gradients:
        check_strided("clip_grad_norm_", "parameters", gradient)
    return gradients


def gradient_of(parameter: Any, op: str) -> Tensor | None:
    """The gradient of a parameter, wherever the backward has left it.

    With ``grad_added_to_main_grad`` a ``.grad`` is a tensor without a meaning.

    Args:
        parameter: the parameter.
        op: the name for errors.
    """
    main_grad = getattr(parameter, "main_grad", None)
    added = getattr(parameter, "grad_added_to_main_grad", None)
    has_both = isinstance(main_grad, Tensor) and parameter.grad is not None
    if has_both and added is None and hasattr(parameter, "to_local"):
        raise ValueError(
            f"transformer_plugin::{op}: argument 'parameters': expected 'grad_added_to_main_grad' on a DTensor that "
            f"has both .grad and main_grad, got none on one of sizes {list(parameter.shape)}. Set it to False before "
            "the first forward; layers that add to main_grad then set it to True."
        )
    if not isinstance(main_grad, Tensor) or not (added or parameter.grad is None):
        grad: Tensor | None = parameter.grad
        return grad
    main_grad = main_grad.detach()
    if not hasattr(parameter, "to_local") or hasattr(main_grad, "to_local"):
        return main_grad
    from torch.distributed.tensor import DTensor

    sizes = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(
        main_grad, parameter.device_mesh, parameter.placements, run_check=False, **sizes
    )


def _by_place(
    gradients: list[tuple[Tensor, Tensor]],
) -> dict[Place, tuple[list[ProcessGroup], list[Tensor]]]:
    """This rank's shards of the gradients, by the groups over which they are sharded."""
    places: dict[Place, tuple[list[ProcessGroup], list[Tensor]]] = {}
    known: dict[tuple[str, int], ProcessGroup] = {}
    for parameter, gradient in gradients:
        groups, shard = _groups_and_shard(parameter, gradient, known)
        place = tuple(group.group_name for group in groups)
        places.setdefault(place, (groups, []))[1].append(shard)
    return places


def _groups_and_shard(
    parameter: Tensor, gradient: Tensor, known: dict[tuple[str, int], ProcessGroup]
) -> tuple[list[ProcessGroup], Tensor]:
    """Returns the groups over which a gradient is sharded, and this rank's shard of it.

    ``known``: groups by their names and this process's ranks in them, to which it adds.
    """
    if not hasattr(gradient, "to_local"):
        layout_of(parameter)  # raises if a full weight has taken the place of a shard
        shard, slices = shard_of_parameter(parameter), slices_of(parameter)  # padding is zeros
        places: list[tuple[str, int]] = [] if shard is None else [(shard.group.group_name, shard.rank)]
        places += [] if slices is None else [(slices.group_name, slices.rank)]
        for place in places:
            if place not in known:
                known[place] = group_named("clip_grad_norm_", *place)
        return [known[place] for place in places], gradient
    from torch.distributed.tensor import Replicate

    of_mesh: Any = gradient
    if any(placement.is_partial() for placement in of_mesh.placements):
        raise ValueError(
            "transformer_plugin::clip_grad_norm_: argument 'parameters': expected gradients without Partial "
            f"placements, got a DTensor with the placements {of_mesh.placements}. Redistribute Partial gradients first."
        )
    dimensions = [d for d, placement in enumerate(of_mesh.placements) if not isinstance(placement, Replicate)]
    mesh = of_mesh.device_mesh
    return [mesh.get_group(d) for d in dimensions if mesh.size(d) > 1], of_mesh.to_local()


def _reduced(tensors: list[Tensor], groups: list[ProcessGroup], p: float) -> Tensor:
    """Returns the sum of the elements' p-th powers over all ranks of the groups, or for p = inf the largest element."""
    norms = [norm for some in _by_kind(tensors) for norm in _norms(some, p)]
    together = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])
    is_largest = math.isinf(p)
    found = together.amax() if is_largest else (together**p).sum()
    all_reduce = all_reduce_max if is_largest else all_reduce_sum
    for group in groups:
        found = all_reduce("clip_grad_norm_", "norms", _on_device_of(found, group), group)
    return found


def _norms(tensors: list[Tensor], p: float) -> list[Tensor]:
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    filled = [tensor for tensor in tensors if tensor.numel()]  # an empty tensor has no largest element
    if not filled:
        return [torch.zeros((), dtype=wide, device=tensors[0].device)]
    return list(torch._foreach_norm(filled, p, dtype=wide))


def _by_kind(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Splits tensors into lists of one device and dtype each, as torch's ``_foreach`` ops require."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def _on_device_of(value: Tensor, group: ProcessGroup) -> Tensor:
    """Moves a value to the group's device type: offloaded gradients are on the CPU, while the group may be NCCL."""
    if value.device.type == "cpu" and dist.get_backend(group) == "nccl":
        return value.to(torch.device("cuda", torch.cuda.current_device()))
    return value
