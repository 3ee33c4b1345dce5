"""Modules whose parameters may be shards: of a weight that ranks share, of tensor parallelism, of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from transformer_plugin.nn._module import PluginModule
from transformer_plugin.nn._weight_source import WeightSource
from transformer_plugin.parallel import _layer_shards
from transformer_plugin.parallel._parameter_shard import ParameterShard
from transformer_plugin.parallel._shard_experts import Ranks, check_like, has_dtensors
from transformer_plugin.parallel._tensor_slices import TENSOR_SLICES, TensorSlices


class ShardableModule(PluginModule):
    """A module with a ``weight``, which comes from a :class:`WeightSource`, and whose parameters may be shards."""

    #: Where the forward gets the weight from.
    _weight_source: WeightSource = WeightSource()
    #: Of the parameters that are one rank's slices under tensor parallelism, by their names.
    tensor_slices: Mapping[str, TensorSlices] = MappingProxyType({})
    #: The ranks over which experts are sharded.
    _expert_ranks: Ranks | None = None
    #: Whether the parameters are full ones, for initial values; this rank's shards follow.
    has_full_parameters: bool = False

    @property
    def weight_shard(self) -> str:
        """The key of a sharded weight (:mod:`transformer_plugin.ops.sharded`); "" if this rank has all of it."""
        return self._weight_source.weight_shard

    @property
    def named_weight_shard(self) -> str:
        """The same with the parameter's name."""
        return self._weight_source.named_weight_shard

    @property
    def parameter_shards(self) -> Mapping[str, ParameterShard]:
        """Of the parameters that :func:`transformer_plugin.parallel.shard_` has sharded, by their names."""
        return self._weight_source.parameter_shards

    def _take_weight_from(self, source: WeightSource) -> None:
        if source is not self._weight_source:
            self._weight_source = source

    def _is_weight_cast(self) -> bool:
        """Whether autocast makes another tensor of the weight in a forward."""
        return False

    def _check_slices(self) -> None:
        """In eager forwards: as for a sharded weight (:func:`_layer_shards.check_shard`)."""
        _layer_shards.check_shard(self, "weight", TENSOR_SLICES)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.parameter_shards or self.tensor_slices:
            _layer_shards.note_layer(self)  # copies of parameters have no attributes
        self._take_weight_from(self._weight_source.of_copy(self))
        if self.tensor_parallel is not None:
            from transformer_plugin.nn._tensor_parallel import check_group

            check_group(self.tensor_parallel)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """As in torch, which calls it for assignments. A shard or slice may be replaced by one of the same sizes, a
        ``DTensor`` of experts by one like it.

        Raises:
            ValueError: another tensor, such as the full weight, in place of a shard.
        """
        check_like(self, name, param)
        self._weight_source.weight_replaced()
        _layer_shards.register(self, name, param, super().register_parameter)
        if self._expert_ranks is not None and hasattr(param, "to_local"):
            from transformer_plugin.parallel._sharded_parameter import restore_sharded_class

            restore_sharded_class(self)

    def __delattr__(self, name: str) -> None:
        if name in self._parameters and (name in self.parameter_shards or name in self.tensor_slices):
            _layer_shards.refuse_deletion(self, name)
        self._weight_source.weight_replaced()
        super().__delattr__(name)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        with _layer_shards.keeping_ties(self):
            super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._take_weight_from(self._weight_source.without_copy())
        with ExitStack() as contexts:
            if has_dtensors(self):
                from transformer_plugin.parallel._sharded_parameter import as_dtensors

                contexts.enter_context(as_dtensors(self))
            if self.parameter_shards or self.tensor_slices:
                contexts.enter_context(_layer_shards.noting_conversion(self))
            return super()._apply(fn, recurse)
