"""Modules whose parameters may be parts of whole ones: sharded weights and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin._arguments import class_name
from transformer_plugin.nn._module import PluginModule
from transformer_plugin.nn._tracing import is_tracing
from transformer_plugin.parallel import _layer_shards
from transformer_plugin.parallel._tensor_slices import TENSOR_SLICES, TensorSlices
from transformer_plugin.parallel._weight_part import WEIGHT_PART, WeightPart, layout_of, without_set
from transformer_plugin.tensor._layout import message


class ShardedWeightMixin(PluginModule):
    """A module whose ``weight`` :func:`transformer_plugin.parallel.shard_` can shard, and whose parameters may be one
    rank's slices under tensor parallelism."""

    #: The key of a sharded weight (:mod:`transformer_plugin.ops.sharded`); "" if it is whole.
    weight_shard: str = ""
    #: The same with the parameter's name.
    named_weight_shard: str = ""
    #: Whether another runtime gathers the weight, see :func:`~transformer_plugin.parallel.attach_distributed_weights`.
    is_gathered_elsewhere: bool = False
    #: Of the weights that are parts, by the names of the parameters.
    weight_parts: Mapping[str, WeightPart] = MappingProxyType({})
    #: Of the parameters that are slices, by their names.
    tensor_slices: Mapping[str, TensorSlices] = MappingProxyType({})
    #: Whether the parameters are full ones, for initial values; this rank's shards follow.
    has_full_parameters: bool = False

    def _shard_key(self) -> str:
        """The argument of the ops. Compiled code has no name in it, so that one graph serves equal layers."""
        if torch.compiler.is_compiling():
            return self.weight_shard
        for name in self.weight_parts:
            self._check_shard(name, WEIGHT_PART)
            break
        if self.is_gathered_elsewhere and is_tracing():  # a trace would name a layer of this process
            expected = "eager code with a weight that another runtime gathers (attach_distributed_weights)"
            advice = "Trace a layer with the unsharded weight"
            raise ValueError(
                message(class_name(self), "weight", expected, "code that torch.jit.trace traces", advice)
            )
        return self.named_weight_shard

    def _check_shard(self, name: str = "weight", attribute: str = TENSOR_SLICES) -> None:
        """In eager forwards: notes the shards again after ``swap_tensors``. Raises if there is a full weight now, which
        ``swap_tensors`` or ``weight.data = full`` put there."""
        if torch.compiler.is_compiling():
            return
        parameter = self._parameters.get(name)
        if parameter is None:
            return
        known = parameter.__dict__.get(attribute)
        if known is None:
            _layer_shards.note_layer(self)
        elif parameter.shape[known.dim] == known.local_size:
            return
        layout_of(parameter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.weight_parts or self.tensor_slices:
            _layer_shards.note_layer(self)  # copies of parameters have no attributes
            # The copy exists apart from the weights that were sharded together, so it is not gathered ahead with them.
            self.weight_shard = without_set(self.weight_shard)
            self.named_weight_shard = without_set(self.named_weight_shard)
        if self.is_gathered_elsewhere:
            from transformer_plugin.parallel.external import give_handle

            give_handle(self)
        if self.tensor_parallel is not None:
            from transformer_plugin.nn._tensor_parallel import check_group

            check_group(self.tensor_parallel)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """As in torch, which calls it for assignments. A shard or slice may be replaced by one of the same sizes.

        Raises:
            ValueError: another tensor, such as the full weight, in place of a shard.
        """
        _layer_shards.register(self, name, param, super().register_parameter)

    def __delattr__(self, name: str) -> None:
        if name in self._parameters and (name in self.weight_parts or name in self.tensor_slices):
            _layer_shards.refuse_deletion(self, name)
        super().__delattr__(name)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        with _layer_shards.keeping_ties(self):
            super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if not (self.weight_parts or self.tensor_slices):
            return super()._apply(fn, recurse)
        with _layer_shards.noting_conversion(self):
            return super()._apply(fn, recurse)
