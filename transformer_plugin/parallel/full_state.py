"""Full weights and state dicts of modules of which each rank has shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import typed
from transformer_plugin.parallel._layer_shards import note_shards
from transformer_plugin.parallel._parameter_shard import layout_of, shard_of_parameter
from transformer_plugin.parallel._shard_tensor import ShardTensor, values_of
from transformer_plugin.parallel._tensor_slices import TensorSlices, slices_of
from transformer_plugin.parallel.external import refuse_shards


@typed
def full_weight(parameter: Tensor) -> Tensor:
    """The full weight ``[N, ...]`` of a shard, without padding, on every rank: a copy without a gradient.

    Of sharded weights and of tensor-parallel ones, of quantized ones the values. All ranks that have shards call it. A
    parameter that is not a shard is returned as a copy.
    """
    refuse_shards("full_weight", "parameter", [parameter])
    if layout_of(parameter) is None:
        note_shards()
    shard, slices = shard_of_parameter(parameter), slices_of(parameter)
    full = values_of(parameter.detach())
    if shard is not None:
        full = shard.shard.unpadded(ops.all_gather(full, len(shard.ranks), shard.group_name))
    if slices is not None:
        full = _joined(full, slices)
    return full.clone() if shard is None and slices is None else full


@typed
def full_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """The ``state_dict()`` of a module with full tensors, as the module would have it on one rank.

    For exports and for readers that know no shards. All ranks call it, and all get all tensors, on the module's device.
    """
    refuse_shards("full_state_dict", "module", module.parameters())
    state: dict[str, Any] = module.state_dict()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state and (shard_of_parameter(parameter) or slices_of(parameter)):
            state[name] = full_weight(parameter)
    for name, value in state.items():
        if isinstance(value, ShardTensor) and value.shard_layout.slices is not None:  # of delayed scaling
            state[name] = _joined(value.local, value.shard_layout.slices)
    return state


def _joined(own: Tensor, slices: TensorSlices) -> Tensor:
    every = ops.all_gather(own.unsqueeze(0), len(slices.ranks), slices.group)
    return slices.join(every.unbind(0))


@typed
@contextmanager
def initialize_full_params(module: torch.nn.Module) -> Iterator[None]:
    """Context in which layers have full, uninitialized parameters, of which they keep slices and rows.

    For initial values of your own, which must be those of one model and not the same for each rank::

        torch.manual_seed(0)  # the same on all ranks
        with parallel.initialize_full_params(model):
            model.apply(initialize)

    What ``initialize`` does not set is undefined afterwards, in the layers that have slices or shards of weights.
    Parameters that all tensor-parallel ranks have get the values of the first of them. All ranks call it, before the
    optimizer has a state.
    """
    from transformer_plugin.nn._tensor_parallel import initialize_full_params as of_layer

    made: dict[int, torch.nn.Parameter] = {}
    with ExitStack() as stack:
        for layer in module.modules():
            if getattr(layer, "tensor_slices", None) or getattr(layer, "parameter_shards", None):
                stack.enter_context(of_layer(layer, made))  # type: ignore[arg-type]
        yield
