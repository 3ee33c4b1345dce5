"""Modules that may keep a quantized weight for many forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin._arguments import class_name
from transformer_plugin.functional._values import is_quantized
from transformer_plugin.nn._sharded_weight import ShardedWeightMixin
from transformer_plugin.nn.quantized_parameters import tensors_of
from transformer_plugin.nn.quantized_weight import QuantizedWeight
from transformer_plugin.parallel._shard_experts import ExpertShardMixin
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor._layout import message, parsed


class QuantizedWeightMixin(ExpertShardMixin, ShardedWeightMixin):
    """A module that quantizes its weight, in each forward or once for many."""

    recipe: Recipe | None
    _formats: tuple[str, str, str]
    #: The quantized copy that forwards read; None: each forward quantizes the weight.
    quantized_weight: QuantizedWeight | None = None
    #: Whether :func:`transformer_plugin.parallel.shard_` lets ranks exchange quantized parts.
    gathers_quantized: bool = False
    #: The names of the parameters of the weight.
    _weight_names: tuple[str, ...] = ("weight",)

    #: Whether they can in the recipe that was set since then.
    _recipe_allows_exchange: bool = True

    @property
    def exchanges_quantized(self) -> bool:
        """Whether ranks exchange quantized parts. Otherwise values travel, and are quantized after the gather."""
        return self.gathers_quantized and self._recipe_allows_exchange

    def _note_exchange(self) -> None:
        """After a recipe was set on a sharded layer: ranks exchange quantized parts if it quantizes the weight from its
        values, and no block lies on two ranks."""
        if not self.gathers_quantized:
            return
        format, weight = parsed(self._formats[1]), self._any_weight()  # type: ignore[operator]
        side = 1 if format.block is None or weight.dim() > 2 else max(format.block)
        from_values = format.is_quantized and not isinstance(self.recipe, DelayedScaling)
        is_plain = not (format.tiled_scales or format.row_scaled)
        fits = self.weight_parts["weight"].rows.shard_rows % side == 0
        self._recipe_allows_exchange = from_values and is_plain and fits

    def quantize_weights(self, first_micro_batch: bool | Tensor = True) -> None:
        """Quantizes the weight to the recipe's formats for every forward and backward until the next call.

        Call it after each optimizer step, before the first forward. With gradients accumulated over n micro-batches,
        the weight is then quantized once, not n times. Outputs and gradients have the same bits. The copy is
        :attr:`quantized_weight`, a :class:`~transformer_plugin.nn.QuantizedWeight`, which is neither a buffer nor in
        the ``state_dict``. Later calls write into the same memory, so CUDA graphs that use it stay valid, and a CUDA
        graph may contain the call itself. :func:`transformer_plugin.optim.refresh_after` calls it after each step.

        A forward raises an error if the weight has changed since: see :class:`~transformer_plugin.nn.QuantizedWeight`
        for what is noticed. The weight must be a plain tensor. A weight that is gathered for each forward (FSDP) is
        another tensor each time, and so is one that is computed in it (parametrizations, pruning, weight norms), which
        is refused.

        Moving or casting the module (``.to()``) and setting another recipe drop the copy. In a copy of the module whose
        parameters are averaged (``AveragedModel``) the weights change: call :meth:`forget_quantized_weights` there.

        Args:
            first_micro_batch: as for :meth:`~transformer_plugin.nn.QuantizedWeight.refresh`. The first call quantizes
                in any case.

        Raises:
            ValueError: there is no recipe, the recipe quantizes nothing, or it is ``DelayedScaling``, whose scales
                change in each forward; or the weight is computed in each forward.
        """
        self._check_cacheable()
        if is_quantized(self._source_weight()):
            return  # the parameter itself, which quantized_init made
        if self.weight_shard:
            self._quantized_part().refresh(first_micro_batch)
            return
        weight, kept = self._source_weight(), self.quantized_weight
        if kept is not None and kept.is_like(weight, self._formats):
            if not torch.compiler.is_compiling():
                kept.follow(weight)
            kept.refresh(first_micro_batch)
        else:
            self.quantized_weight = QuantizedWeight(weight, self._formats)

    def forget_quantized_weights(self) -> None:
        """Drops the quantized weight: each forward quantizes again."""
        self.quantized_weight = None

    def _source_weight(self) -> Tensor | list[Tensor]:
        """The parameter, or the parameters, of the weight."""
        return self.weight

    def _quantized_weight(self) -> list[Tensor] | None:
        """Returns the quantized weight for the ops of a forward, or None."""
        if self.weight_shard:
            kept = self._quantized_part() if self.exchanges_quantized else None
        else:
            kept = self.quantized_weight
        if kept is None:
            weight = self._parameters.get("weight")
            if type(weight) is Parameter:  # the common case
                return None
            weight = getattr(weight, "_local_tensor", weight)  # of experts over ranks
            return tensors_of(weight) if is_quantized(weight) else None
        if not torch.compiler.is_compiling():  # checking in a graph would recompile for every version
            try:
                kept.check(self._source_weight(), class_name(self))
            except ValueError:
                self._refuse_computed("Call forget_quantized_weights() of this layer")
                raise
        return kept.op_tensors()

    def _quantized_part(self) -> QuantizedWeight:
        """The quantized copy of this rank's part, made when it is first needed."""
        if not self.exchanges_quantized:
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: argument 'weight': expected a weight whose ranks exchange "
                "quantized parts, got one of which values travel, to be quantized after each gather: of "
                "shard_(..., format='none'), a list, BFloat16(), or a recipe whose blocks do not divide the parts. "
                "Leave out quantize_weights(), or shard_ a packed weight with this recipe and without 'format'."
            )
        if self.quantized_weight is None and torch.compiler.is_compiling():
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: argument 'weight': expected a quantized part that exists "
                "before a compiled forward, got none. Call quantize_weights() first, for example after .to()."
            )
        if self.quantized_weight is None:
            from transformer_plugin.parallel._quantized_part import QuantizedPart

            self.quantized_weight = QuantizedPart(self.weight, self._formats, self.weight_parts["weight"])
        return self.quantized_weight

    def _refuse_computed(self, advice: str) -> None:
        """Raises if the weight is another tensor in each forward, of which no copy can be kept."""
        if torch.compiler.is_compiling():
            return
        name = next((name for name in self._weight_names if self._is_computed(name)), None)
        if name is not None:
            expected = "a parameter, whose quantized copy serves many forwards"
            got = "one that is computed in each forward, as parametrizations, pruning and weight norms do"
            raise ValueError(message(class_name(self), name, expected, got, advice)) from None

    def _is_computed(self, name: str) -> bool:
        if isinstance(getattr(type(self), name, None), property):  # parametrizations
            return True
        value = self.__dict__.get(name)
        # torch's older norms and pruning keep what they compute it from as parameters: weight_g, weight_orig.
        return isinstance(value, Tensor) and (
            value.grad_fn is not None or any(key.startswith(f"{name}_") for key in self._parameters)
        )

    def _check_cacheable(self) -> None:
        """Raises if :meth:`quantize_weights` cannot keep a copy."""
        self._refuse_computed("Leave out quantize_weights() for this layer")
        if self._formats[1] != "none" and not isinstance(self.recipe, DelayedScaling):
            return
        raise ValueError(
            f"transformer_plugin::{class_name(self)}: argument 'recipe': expected a recipe that quantizes the "
            f"weight from its current values, got {self.recipe}. Leave out quantize_weights(), or set another recipe."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.forget_quantized_weights()
        return super()._apply(fn, recurse)
