"""Whole weights and state dicts of modules of which each rank has parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import typed
from transformer_plugin.parallel._layer_shards import note_shards
from transformer_plugin.parallel._part_tensor import PartTensor, values_of
from transformer_plugin.parallel._tensor_slices import TensorSlices, slices_of
from transformer_plugin.parallel._weight_part import layout_of, part_of
from transformer_plugin.parallel.external import refuse_shards


@typed
def full_weight(parameter: Tensor) -> Tensor:
    """The whole weight ``[N, ...]`` of a part, without padding, on every rank: a copy without a gradient.

    Of sharded weights and of tensor-parallel ones, of quantized ones the values. All ranks that have parts call it. A
    parameter that is not a part is returned as a copy.
    """
    refuse_shards("full_weight", "parameter", [parameter])
    if layout_of(parameter) is None:
        note_shards()
    part, slices = part_of(parameter), slices_of(parameter)
    whole = values_of(parameter.detach())
    if part is not None:
        whole = part.rows.strip(ops.all_gather(whole, part.rows.ranks, part.group_name))
    if slices is not None:
        whole = _joined(whole, slices)
    return whole.clone() if part is None and slices is None else whole


@typed
def full_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """The ``state_dict()`` of a module with whole tensors, as the module would have it on one rank.

    For exports and for readers that know no parts. All ranks call it, and all get all tensors, on the module's device.
    """
    refuse_shards("full_state_dict", "module", module.parameters())
    state: dict[str, Any] = module.state_dict()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state and (part_of(parameter) or slices_of(parameter)):
            state[name] = full_weight(parameter)
    for name, value in state.items():
        if isinstance(value, PartTensor) and value.part_layout.slices is not None:  # of delayed scaling
            state[name] = _joined(value.part, value.part_layout.slices)
    return state


def _joined(own: Tensor, slices: TensorSlices) -> Tensor:
    every = ops.all_gather(own.unsqueeze(0), len(slices.ranks), slices.group)
    return slices.join(every.unbind(0))


@typed
@contextmanager
def initialize_full_params(module: torch.nn.Module) -> Iterator[None]:
    """Context in which layers have whole, uninitialized parameters, of which they keep slices and rows.

    For initial values of your own, which must be those of one model and not the same for each rank::

        torch.manual_seed(0)  # the same on all ranks
        with parallel.initialize_full_params(model):
            model.apply(initialize)

    What ``initialize`` does not set is undefined afterwards, in the layers that have slices or parts of weights.
    Parameters that all tensor-parallel ranks have get the values of the first of them. All ranks call it, before the
    optimizer has a state.
    """
    from transformer_plugin.nn._tensor_parallel import initialize_full_params as of_layer

    made: dict[int, torch.nn.Parameter] = {}
    with ExitStack() as stack:
        for layer in module.modules():
            if getattr(layer, "tensor_slices", None) or getattr(layer, "weight_parts", None):
                stack.enter_context(of_layer(layer, made))  # type: ignore[arg-type]
        yield
