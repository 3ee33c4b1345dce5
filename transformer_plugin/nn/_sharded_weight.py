"""Modules whose parameters may be parts of whole ones: sharded weights and tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.nn._module import PluginModule
from transformer_plugin.parallel._tensor_slices import TensorSlices
from transformer_plugin.parallel._weight_part import as_copy, mark


class ShardedWeightMixin(PluginModule):
    """A module whose ``weight`` :func:`transformer_plugin.parallel.shard_` can shard, and whose parameters may be one
    rank's slices under tensor parallelism."""

    #: The key of a sharded weight (:mod:`transformer_plugin.ops.sharded`); "" if it is whole.
    weight_shard: str = ""
    #: The same with the parameter's name.
    named_weight_shard: str = ""
    #: Whether another runtime gathers the weight, see :func:`~transformer_plugin.parallel.attach_distributed_weights`.
    is_gathered_elsewhere: bool = False
    #: What the weight is a part of, a ``WeightPart``; None if it is whole.
    weight_part: Any = None
    #: Of the parameters that are slices, by their names.
    tensor_slices: Mapping[str, TensorSlices] = MappingProxyType({})

    def _shard_key(self) -> str:
        """The argument of the ops. Compiled code has no name in it, so that one graph serves equal layers.

        Nor has it 'async' with ``main_grad``: compiled code may pass a copy of the buffer, and read it before an
        asynchronous sum has arrived.
        """
        if not torch.compiler.is_compiling():
            return self.named_weight_shard
        if getattr(self, "fuse_wgrad_accumulation", False):
            return self.weight_shard.replace("async,", "", 1)
        return self.weight_shard

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.weight_part is not None or self.tensor_slices:
            as_copy(self)
        if self.tensor_parallel is not None:
            from transformer_plugin.nn._tensor_parallel import check_group

            check_group(self.tensor_parallel)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        applied = super()._apply(fn, recurse)
        if self.weight_part is not None or self.tensor_slices:
            mark(self)
        return applied
