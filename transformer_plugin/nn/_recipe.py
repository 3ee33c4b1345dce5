"""Layers with a weight and a recipe: where the weight comes from, where its gradient goes, and in which formats."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from transformer_plugin._arguments import class_name
from transformer_plugin.formats import resolve
from transformer_plugin.nn._autocast import is_cast
from transformer_plugin.nn._delayed_scaling import STATE, keep_float32, keep_state
from transformer_plugin.nn._formats import RoleFormats, RowRules, formats_of, row_rules, width_multiple
from transformer_plugin.nn._module import registered
from transformer_plugin.nn._parameter_types import (
    after_load,
    fit_assigned,
    has_other_sizes,
    keeping_attributes,
    keeping_types,
)
from transformer_plugin.nn._shardable import ShardableModule
from transformer_plugin.nn._weight_source import check_cacheable
from transformer_plugin.nn._wgrad_destination import WgradDestination, checked_hook
from transformer_plugin.nn.quantized_parameters import refused_recipe, watch_quantized
from transformer_plugin.nn.quantized_weight import QuantizedWeight
from transformer_plugin.parallel._shard_experts import local_experts
from transformer_plugin.parallel._wrapping import keep_rank_buffers
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor._base import FormatTensor


class RecipeModule(ShardableModule):
    """A layer with a weight and a recipe.

    A forward passes to its op the operands, ``_formats``, and :meth:`_weight_arguments`. Those are of two objects: the
    :class:`WeightSource`, where the weight comes from, and the :class:`WgradDestination`, where its gradient goes. What
    changes either (``quantize_weights()``, ``shard_()``, ``fuse_wgrad_accumulation``, ...) gives the layer another one.

    The format keys are computed when the recipe is set, not in every forward. With
    :class:`~transformer_plugin.recipes.DelayedScaling` it has the buffers ``delayed_scale [n]``, ``delayed_amax [n]``
    and ``delayed_history [H, n]`` (:mod:`._delayed_scaling`), float32 even if the module is cast.
    """

    weight: Tensor
    delayed_history: Tensor
    delayed_scale: Tensor
    delayed_amax: Tensor
    _recipe: Recipe | None
    _formats: RoleFormats
    _row_rules: RowRules
    #: Where the backward puts the gradient of the weight.
    _wgrad_destination: WgradDestination = WgradDestination()
    #: What :meth:`backward_dw` calls at its end.
    _wgrad_hooks: tuple[Callable[[], Any], ...] = ()
    #: The names of the parameters of the weight.
    _weight_names: tuple[str, ...] = ("weight",)
    #: buffers that ``DistributedDataParallel`` does not overwrite with rank 0's before each forward.
    rank_buffers: tuple[str, ...] = STATE
    #: whether the backward keeps the input itself and quantizes it again.
    save_original_input: bool = False
    #: whether the forward leaves out the bias and returns it.
    return_bias: bool = False
    _cache_weights: bool = False

    @property
    def recipe(self) -> Recipe | None:
        """The formats of input, weight and gradient; None for unchanged operands.

        It may be replaced. The state of delayed scaling is created with the first ``DelayedScaling`` and dropped with
        another recipe; it is kept while the history length is the same. Cached quantized weights are kept while the
        formats are the same. A layer of ``quantized_init`` takes only recipes with the format of its weight.
        """
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"transformer_plugin.nn.{class_name(self)}: argument 'recipe': expected a recipe of "
                f"transformer_plugin.recipes or None, got {recipe!r}. Construct one, or call "
                "transformer_plugin.recipes.recipe_from_name() with a name."
            )
        formats = self._formats_here(recipe)
        text = refused_recipe(self, recipe)
        if text:
            raise ValueError(f"transformer_plugin::{class_name(self)}: argument 'recipe': {text}")
        self._check_widths(recipe, formats)
        self._recipe = recipe
        self._formats = formats
        self._row_rules = row_rules(formats)
        self._take_weight_from(self._weight_source.with_recipe(self))
        keep_state(self)

    def _weight_arguments(self) -> dict[str, Any]:
        """What the op of a forward gets: where the weight comes from, and where its gradient goes."""
        options = self._weight_source.arguments(self)
        destination = self._wgrad_destination
        if destination.into_main_grad or destination.is_delayed:
            options.update(destination.arguments(self))
        if self.save_original_input:
            options["save_original_input"] = self._saves_original_input()
        return options

    # --- where the weight comes from

    @property
    def quantized_weight(self) -> QuantizedWeight | None:
        """The quantized copy that forwards read; None: each forward quantizes the weight."""
        return self._weight_source.quantized_weight

    @property
    def cache_weights(self) -> bool:
        """Whether the layer keeps its quantized weight, and reads it again until the weight changes.

        May be set at any time. Outputs and gradients have the same bits. In eager code a weight is then quantized once
        for all micro-batches between two steps of an optimizer, and for recomputations. Compiled code, traces and CUDA
        graphs quantize in each forward, and so does a layer whose weight FSDP2 gathers or something computes. What
        changes weights without a trace is in :func:`~transformer_plugin.nn.weights_changed`. The copy is neither in
        the ``state_dict`` nor in copies of the module. Without effect where the recipe is None or ``DelayedScaling``,
        while there is a copy of :meth:`quantize_weights`, and on weights that ranks gather from shards.
        """
        return self._cache_weights

    @cache_weights.setter
    def cache_weights(self, caches: bool) -> None:
        self._cache_weights = bool(caches)
        self._take_weight_from(self._weight_source.with_cache(self._cache_weights))

    @property
    def gathers_quantized(self) -> bool:
        """Whether :func:`transformer_plugin.parallel.shard_` lets ranks exchange quantized shards."""
        return self._weight_source.gathers_quantized

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
        check_cacheable(self)
        self._take_weight_from(self._weight_source.quantized_again(self, first_micro_batch))

    def forget_quantized_weights(self) -> None:
        """Drops the quantized weight: each forward quantizes again."""
        self._take_weight_from(self._weight_source.without_copy())

    def _source_weight(self) -> Tensor | list[Tensor]:
        """The parameter, or the parameters, of the weight."""
        weight: Tensor = registered(self, self._parameters, "weight")
        return weight

    def _weights(self) -> list[Tensor]:
        weight = self._source_weight()
        return [weight] if isinstance(weight, Tensor) else list(weight)

    def _any_weight(self) -> Tensor:
        """A tensor with the device of the weight and the last two dimensions of its sizes."""
        return self.weight

    def _is_weight_cast(self) -> bool:
        return is_cast(self._any_weight())

    def _local(self, parameter: Tensor) -> Tensor:
        """This rank's shard of a parameter of experts."""
        return local_experts(self, parameter)

    # --- where its gradient goes

    @property
    def fuse_wgrad_accumulation(self) -> bool:
        """Whether the backward adds the weight's gradient to ``main_grad``. May be set at any time."""
        return self._wgrad_destination.into_main_grad

    @fuse_wgrad_accumulation.setter
    def fuse_wgrad_accumulation(self, fuse: bool) -> None:
        old = self._wgrad_destination
        if bool(fuse) != old.into_main_grad:
            self._wgrad_destination = WgradDestination(bool(fuse), old.is_delayed, old.queue)

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether a backward leaves the weight's gradient to :meth:`backward_dw`. May be set at any time."""
        return self._wgrad_destination.is_delayed

    @delay_wgrad_compute.setter
    def delay_wgrad_compute(self, delay: bool) -> None:
        old = self._wgrad_destination
        if bool(delay) != old.is_delayed:
            self._wgrad_destination = WgradDestination(old.into_main_grad, bool(delay), old.queue)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for :meth:`backward_dw`."""
        return self._wgrad_destination.waiting > 0

    def backward_dw(self) -> None:
        """Computes the weight gradients of all backwards since the last call, in their order, then calls the hooks.

        The gradients are added to ``main_grad``, with ``fuse_wgrad_accumulation``, or to ``.grad``. Does nothing if
        none waits. Runs on the current stream, which must wait for that of the backward if it is another one.
        """
        if not self.need_backward_dw():
            return
        self._wgrad_destination.compute(self)
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Registers what :meth:`backward_dw` calls, without arguments, once the gradients are complete.

        Frameworks reduce the gradients over ranks in it, because the hooks of autograd ran before they were computed.
        """
        self._wgrad_hooks = (*self._wgrad_hooks, checked_hook(self, hook))

    def _saves_original_input(self) -> bool:
        if not isinstance(self._recipe, DelayedScaling):
            return True
        raise ValueError(
            f"transformer_plugin::{class_name(self)}: argument 'recipe': expected save_original_input=False with "
            "DelayedScaling, whose scales have changed by the backward, got True. Leave it out."
        )

    # --- formats

    def _formats_here(self, recipe: Recipe | None) -> RoleFormats:
        """The recipe's formats on the device of the weight. The scales of delayed scaling have a fixed layout."""
        formats = formats_of(recipe)
        if recipe is None or isinstance(recipe, DelayedScaling):
            return formats
        device = self._any_weight().device
        return RoleFormats(resolve(formats.input, device), formats.weight, resolve(formats.grad, device))

    def _resolve_formats(self) -> None:
        """Called after the weight may have moved to another device."""
        self._formats = self._formats_here(self._recipe)

    def _check_widths(self, recipe: Recipe | None, formats: RoleFormats) -> None:
        """Raises if the recipe's blocks do not divide the weight's widths, because every forward would raise.

        For a recipe that is set later it only warns, because the weight may be replaced next.
        """
        block = max(width_multiple(key) for key in formats)
        for name, width in zip(
            ("in_features", "out_features"), reversed(self._any_weight().shape[-2:]), strict=False
        ):
            if width % block == 0:
                continue
            text = (
                f"transformer_plugin.nn.{class_name(self)}: argument 'recipe': expected one that supports "
                f"{name}={width}, got {recipe}, which needs a multiple of {block}. Use for example "
                f"{name}={-(-width // block) * block}, or a recipe of another format."
            )
            if "_recipe" not in self.__dict__:
                raise ValueError(text)
            warnings.warn(text, UserWarning, stacklevel=4)

    def _extra_options(self) -> str:
        """What ``extra_repr`` says of the weight's gradient and of the bias."""
        text = ", fuse_wgrad_accumulation=True" if self.fuse_wgrad_accumulation else ""
        text += ", delay_wgrad_compute=True" if self.delay_wgrad_compute else ""
        text += ", save_original_input=True" if self.save_original_input else ""
        text += ", cache_weights=True" if self.cache_weights else ""
        text += f", weight_shard={self.weight_shard!r}" if self.weight_shard else ""
        text += "" if self.tensor_parallel is None else str(self.tensor_parallel)
        return text + (", return_bias=True" if self.return_bias else "")

    if TYPE_CHECKING:  # every subclass defines it

        def reset_parameters(self) -> None: ...

    # --- what torch calls

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        metadata, _, missing, _, errors = arguments
        if has_other_sizes(self, state_dict, prefix, errors):
            return  # torch raises the error
        assigns = metadata.get("assign_to_params_buffers", False)
        refused = fit_assigned(self, state_dict, prefix, errors) if assigns else []
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        missing[:] = [key for key in missing if key not in refused]
        after_load(self, state_dict, prefix)
        self._resolve_formats()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if STATE[0] in self._buffers:
            keep_rank_buffers()
        if isinstance(self._parameters.get("weight"), FormatTensor):
            watch_quantized()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with keep_float32(self, *STATE), keeping_attributes(self):
            super()._apply(keeping_types(fn), recurse)
        self._resolve_formats()
        return self
