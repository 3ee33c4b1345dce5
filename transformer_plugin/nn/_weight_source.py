"""Where the products of a layer get the weight from.

    WeightSource    the weight itself, which each forward quantizes
    KeptWeight      the same, quantized again when the weight has changed (``cache_weights``)
    QuantizedCopy   what ``quantize_weights()`` made of it, for many forwards and backwards
    ShardedWeight   all ranks: their shards are all-gathered in the forward, and in the backward again
    ExternalWeight  another runtime, which unshards the weight in each direction

The same kinds as in C++ (``csrc/linear/weight_source.h``), which gets them as the arguments ``quantized_weight`` and
``weight_shard`` of an op. A layer has one source, and another one when its weight comes from elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin._arguments import class_name
from transformer_plugin.functional._values import is_quantized
from transformer_plugin.nn._tracing import is_tracing
from transformer_plugin.nn._weight_cache import WeightCache
from transformer_plugin.nn.quantized_parameters import tensors_of
from transformer_plugin.nn.quantized_weight import QuantizedWeight
from transformer_plugin.parallel._layer_shards import check_shard
from transformer_plugin.parallel._parameter_shard import PARAMETER_SHARD, ParameterShard
from transformer_plugin.parallel._weight_shard import WeightShard
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.tensor._layout import message, parsed

if TYPE_CHECKING:
    from transformer_plugin.nn._recipe import RecipeModule


class WeightSource:
    """The weight itself: a parameter that each forward quantizes, or one that ``quantized_init`` made."""

    #: The quantized copy that forwards read; None: each forward quantizes the weight.
    quantized_weight: QuantizedWeight | None = None
    #: The key of a sharded weight (:mod:`transformer_plugin.ops.sharded`); "" if this rank has all of it.
    weight_shard: str = ""
    #: The same with the parameter's name.
    named_weight_shard: str = ""
    #: Of the parameters that are shards, by their names.
    parameter_shards: Mapping[str, ParameterShard] = MappingProxyType({})
    #: Whether :func:`transformer_plugin.parallel.shard_` lets ranks exchange quantized shards.
    gathers_quantized: bool = False
    #: Whether they do in the present recipe. Otherwise values travel, and are quantized after the gather.
    exchanges_quantized: bool = False
    #: Whether another runtime unshards the weight.
    is_external: bool = False

    def arguments(self, layer: RecipeModule) -> dict[str, Any]:
        """What the op of a forward gets."""
        weight = layer._parameters.get("weight")
        if type(weight) is Parameter:  # the common case
            return {}
        weight = getattr(weight, "_local_tensor", weight)  # of experts over ranks
        return {"quantized_weight": tensors_of(weight)} if is_quantized(weight) else {}

    def shard_key(self, layer: Any) -> str:
        """The argument ``weight_shard`` of the op."""
        return ""

    def quantized_again(self, layer: RecipeModule, first_micro_batch: bool | Tensor) -> WeightSource:
        """The source of a layer after ``quantize_weights()``."""
        weight = layer._source_weight()
        if is_quantized(weight):
            return self  # the parameter itself, which quantized_init made
        return QuantizedCopy(QuantizedWeight(weight, layer._formats), self)

    def without_copy(self) -> WeightSource:
        """The source of a layer after ``forget_quantized_weights()``."""
        return self

    def with_recipe(self, layer: RecipeModule) -> WeightSource:
        """The source of a layer after its recipe was set. A quantized copy stays while the formats are the same."""
        return self

    def of_copy(self, layer: Any) -> WeightSource:
        """The source of a layer that was copied or unpickled, and is itself a copy."""
        return self

    def with_cache(self, caches: bool) -> WeightSource:
        """The source of a layer after its ``cache_weights`` was set. What ranks exchange is not cached here."""
        kind = KeptWeight if caches else WeightSource
        return self if type(self) is kind or type(self) not in (WeightSource, KeptWeight) else kind()

    def weight_replaced(self) -> None:
        """Called when the layer gets another parameter, or loses one."""


class KeptWeight(WeightSource):
    """The weight itself, and its quantized copy, which forwards and backwards read until the weight changes."""

    def __init__(self) -> None:
        self._cache = WeightCache()

    def arguments(self, layer: RecipeModule) -> dict[str, Any]:
        """The tensors of the copy, unless the op is to quantize the weight."""
        found = super().arguments(layer)
        if found or layer._formats[1] == "none" or isinstance(layer._recipe, DelayedScaling):
            return found
        if not all(_is_registered(layer, name) for name in layer._weight_names):
            return found  # what computes the weight would do so twice
        tensors = self._cache.quantized(layer, layer._source_weight(), layer._formats)
        return found if tensors is None else {"quantized_weight": tensors}

    def without_copy(self) -> WeightSource:
        """The same without a copy."""
        return KeptWeight()

    def with_recipe(self, layer: RecipeModule) -> WeightSource:
        """The copy is dropped; the next forward makes another one."""
        return KeptWeight()

    def of_copy(self, layer: Any) -> WeightSource:
        """Copies of a layer have no copy of the weight yet."""
        return KeptWeight()

    def weight_replaced(self) -> None:
        """Drops the copy."""
        self._cache.clear()


class QuantizedCopy(WeightSource):
    """The quantized copy of a weight that stays the same for many forwards and backwards."""

    quantized_weight: QuantizedWeight

    def __init__(self, quantized_weight: QuantizedWeight, own: WeightSource) -> None:
        self.quantized_weight = quantized_weight
        self._own = own.without_copy()

    def arguments(self, layer: RecipeModule) -> dict[str, Any]:
        """The tensors of the copy. Raises if it is not that of the present weight."""
        return {"quantized_weight": _checked_tensors(layer, self.quantized_weight)}

    def quantized_again(self, layer: RecipeModule, first_micro_batch: bool | Tensor) -> WeightSource:
        """The same memory, if the present weight fits into it."""
        weight, kept = layer._source_weight(), self.quantized_weight
        if is_quantized(weight) or not kept.is_like(weight, layer._formats):
            return super().quantized_again(layer, first_micro_batch)
        if not torch.compiler.is_compiling():
            kept.follow(weight)
        kept.refresh(first_micro_batch)
        return self

    def without_copy(self) -> WeightSource:
        """The weight itself."""
        return self._own

    def with_recipe(self, layer: RecipeModule) -> WeightSource:
        """The weight itself, with other formats."""
        return self if self.quantized_weight.formats == tuple(layer._formats) else self._own

    def with_cache(self, caches: bool) -> WeightSource:
        """The copy stays until it is dropped."""
        self._own = self._own.with_cache(caches)
        return self


class ShardedWeight(WeightSource):
    """This rank's shard of the weight, of which ranks exchange values or quantized values.

    Args:
        shard: how it is sharded, with the name of the parameter.
        parameter_shards, gathers_quantized: attributes of the source.
    """

    def __init__(
        self, shard: WeightShard, parameter_shards: Mapping[str, ParameterShard], gathers_quantized: bool
    ) -> None:
        self._take_keys_of(shard)
        self.parameter_shards = parameter_shards
        self.gathers_quantized = self.exchanges_quantized = gathers_quantized
        self.quantized_weight = None

    def _take_keys_of(self, shard: WeightShard) -> None:
        # A name in the constant of a compiled layer would compile each of many equal layers again.
        self._shard, unnamed = shard, replace(shard, name="")
        self.weight_shard, self.named_weight_shard = str(unnamed), str(shard)
        # Of what autocast makes of the weight: such a copy exists for as long as something on this rank needs it, and
        # not as long as on other ranks, so none is gathered early.
        self._of_cast, self._named_of_cast = (
            str(replace(unnamed, param_group=0)),
            str(replace(shard, param_group=0)),
        )

    def arguments(self, layer: RecipeModule) -> dict[str, Any]:
        """The key, and this rank's quantized shard where ranks exchange those."""
        found: dict[str, Any] = {"weight_shard": self.shard_key(layer)}
        if self.exchanges_quantized:
            found["quantized_weight"] = _checked_tensors(layer, self.quantized_shard(layer))
        return found

    def shard_key(self, layer: Any) -> str:
        """The argument of the op. Raises if the parameter is not a shard any more."""
        is_named = not torch.compiler.is_compiling()
        if is_named:
            check_shard(layer, next(iter(self.parameter_shards)), PARAMETER_SHARD)
        if not self.exchanges_quantized and layer._is_weight_cast():
            return self._named_of_cast if is_named else self._of_cast
        return self.named_weight_shard if is_named else self.weight_shard

    def quantized_shard(self, layer: RecipeModule) -> QuantizedWeight:
        """The quantized copy of this rank's shard, made when it is first needed."""
        if not self.exchanges_quantized:
            _refuse_copy_of_shard(layer)
        if self.quantized_weight is None and torch.compiler.is_compiling():
            raise ValueError(
                f"transformer_plugin::{class_name(layer)}: argument 'weight': expected a quantized shard that exists "
                "before a compiled forward, got none. Call quantize_weights() first, for example after .to()."
            )
        if self.quantized_weight is None:
            from transformer_plugin.parallel._quantized_shard import QuantizedShard

            self.quantized_weight = QuantizedShard(
                layer.weight, layer._formats, self.parameter_shards["weight"]
            )
        return self.quantized_weight

    def quantized_again(self, layer: RecipeModule, first_micro_batch: bool | Tensor) -> WeightSource:
        """The same memory. The ranks call it together."""
        self.quantized_shard(layer).refresh(first_micro_batch)
        return self

    def without_copy(self) -> WeightSource:
        """The shard, which the next forward quantizes."""
        self.quantized_weight = None
        return self

    def with_recipe(self, layer: RecipeModule) -> WeightSource:
        """Ranks exchange quantized shards if the recipe quantizes the weight from its values, and no block lies on two
        ranks."""
        if self.quantized_weight is not None and self.quantized_weight.formats != tuple(layer._formats):
            self.quantized_weight = None
        if self.gathers_quantized:
            format, weight = parsed(layer._formats[1]), layer._any_weight()
            side = 1 if format.block is None or weight.dim() > 2 else max(format.block)
            from_values = format.is_quantized and not isinstance(layer.recipe, DelayedScaling)
            is_plain = not (format.tiled_scales or format.row_scaled)
            fits = self.parameter_shards["weight"].shard.shard_rows % side == 0
            self.exchanges_quantized = from_values and is_plain and fits
        return self

    def of_copy(self, layer: Any) -> WeightSource:
        """A copy exists apart from the weights that were sharded together, so it is not gathered ahead with them."""
        source = copy.copy(self)
        source._take_keys_of(replace(self._shard, param_group=0))
        return source


class ExternalWeight(WeightSource):
    """A weight of :func:`transformer_plugin.parallel.attach_distributed_weights`: its key names the layer."""

    is_external = True

    def __init__(self, name: str, weight_shard: str) -> None:
        self.name = name
        self.weight_shard = self.named_weight_shard = weight_shard

    def arguments(self, layer: RecipeModule) -> dict[str, Any]:
        """The key."""
        return {"weight_shard": self.shard_key(layer)}

    def shard_key(self, layer: Any) -> str:
        """The argument of the op. Raises in a trace, which would name a layer of this process."""
        if is_tracing():
            expected = "eager code with a weight that another runtime gathers (attach_distributed_weights)"
            got, advice = "code that torch.jit.trace traces", "Trace a layer with the unsharded weight"
            raise ValueError(message(class_name(layer), "weight", expected, got, advice))
        return self.weight_shard

    def quantized_again(self, layer: RecipeModule, first_micro_batch: bool | Tensor) -> NoReturn:
        """Raises: the runtime decides what it gathers."""
        _refuse_copy_of_shard(layer)

    def of_copy(self, layer: Any) -> WeightSource:
        """A copy of a layer has the key of the other layer."""
        from transformer_plugin.parallel.external import own_key

        return ExternalWeight(self.name, own_key(layer, self.name))


def _checked_tensors(layer: RecipeModule, kept: QuantizedWeight) -> list[Tensor]:
    """The tensors of a quantized copy. Raises if it is not that of the present weight."""
    if not torch.compiler.is_compiling():  # checking in a graph would recompile for every version
        try:
            kept.ensure_current(layer._source_weight(), class_name(layer))
        except ValueError:
            _refuse_computed(layer, "Call forget_quantized_weights() of this layer")
            raise
    return kept.op_tensors()


def _refuse_copy_of_shard(layer: RecipeModule) -> NoReturn:
    raise ValueError(
        f"transformer_plugin::{class_name(layer)}: argument 'weight': expected a weight whose ranks exchange "
        "quantized shards, got one of which values travel, to be quantized after each gather: of "
        "shard_(..., format='none'), a list, BFloat16(), or a recipe whose blocks do not divide the shards. "
        "Leave out quantize_weights(), or shard_ a packed weight with this recipe and without 'format'."
    )


def check_cacheable(layer: RecipeModule) -> None:
    """Raises if ``quantize_weights()`` cannot keep a copy."""
    _refuse_computed(layer, "Leave out quantize_weights() for this layer")
    if layer._formats[1] != "none" and not isinstance(layer.recipe, DelayedScaling):
        return
    raise ValueError(
        f"transformer_plugin::{class_name(layer)}: argument 'recipe': expected a recipe that quantizes the "
        f"weight from its current values, got {layer.recipe}. Leave out quantize_weights(), or set another recipe."
    )


def _refuse_computed(layer: RecipeModule, advice: str) -> None:
    """Raises if the weight is another tensor in each forward, of which no copy can be kept."""
    if torch.compiler.is_compiling():
        return
    name = next((name for name in layer._weight_names if _is_computed(layer, name)), None)
    if name is not None:
        expected = "a parameter, whose quantized copy serves many forwards"
        got = "one that is computed in each forward, as parametrizations, pruning and weight norms do"
        raise ValueError(message(class_name(layer), name, expected, got, advice)) from None


def _is_registered(layer: RecipeModule, name: str) -> bool:
    """Whether the attribute is the parameter of this name. See ``registered`` of ``_module.py``."""
    of_class = layer._class_attributes
    is_hidden = of_class is None or name in of_class or name in layer.__dict__
    return name in layer._parameters and not is_hidden


def _is_computed(layer: RecipeModule, name: str) -> bool:
    if isinstance(getattr(type(layer), name, None), property):  # parametrizations
        return True
    value = layer.__dict__.get(name)
    # torch's older norms and pruning keep what they compute it from as parameters: weight_g, weight_orig.
    return isinstance(value, Tensor) and (
        value.grad_fn is not None or any(key.startswith(f"{name}_") for key in layer._parameters)
    )
