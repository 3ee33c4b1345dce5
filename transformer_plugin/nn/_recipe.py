"""Modules with a recipe: the format keys that they pass to the ops, and the state of delayed scaling."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin._arguments import class_name, is_strided
from transformer_plugin.formats import Format, resolve
from transformer_plugin.nn import _tracing
from transformer_plugin.nn._autocast import is_cast
from transformer_plugin.nn._delayed_wgrad import DelayedWgradMixin
from transformer_plugin.nn._main_grad import main_grads, mark_added
from transformer_plugin.nn._parameter_types import (
    after_load,
    fit_assigned,
    has_other_sizes,
    keeping_attributes,
    keeping_types,
)
from transformer_plugin.nn._quantized_weight_mixin import QuantizedWeightMixin
from transformer_plugin.nn.checkpoint import scales_of
from transformer_plugin.nn.quantized_parameters import refused_recipe, watch_quantized
from transformer_plugin.parallel._weight_part import without_set
from transformer_plugin.parallel._wrapping import keep_rank_buffers
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor._base import FormatTensor

#: The state's buffers, in the order of the ops' arguments.
STATE = ("delayed_history", "delayed_scale", "delayed_amax")
#: The dtypes that the ops quantize.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def keep_float32(module: torch.nn.Module, *names: str) -> Iterator[None]:
    """Context for a module's move or cast: the named buffers change their device, but stay float32, bit for bit."""
    before = {name: module._buffers.get(name) for name in names}
    yield
    for name, old in before.items():
        now = module._buffers.get(name)
        if old is not None and now is not None and now.dtype != old.dtype:
            module._buffers[name] = old.to(now.device)


class RoleFormats(NamedTuple):
    """One format key per operand of a linear layer, in the order of the ops' arguments."""

    input: str = "none"
    weight: str = "none"
    grad: str = "none"


class RecipeModule(QuantizedWeightMixin, DelayedWgradMixin):
    """A module with a weight and a recipe. The format keys are computed when the recipe is set, not in every forward.

    With :class:`~transformer_plugin.recipes.DelayedScaling` it has the buffers ``delayed_scale [n]``,
    ``delayed_amax [n]`` and ``delayed_history [H, n]``, float32 even if the module is cast. They hold the values of
    the input, then of the weight, then of the gradient; each of the three has one entry per matrix of the weight.
    """

    weight: Tensor
    delayed_history: Tensor
    delayed_scale: Tensor
    delayed_amax: Tensor
    _recipe: Recipe | None
    _formats: RoleFormats
    _row_rules: RowRules
    #: buffers that ``DistributedDataParallel`` does not overwrite with rank 0's before each forward.
    rank_buffers: tuple[str, ...] = STATE
    #: whether the backward adds the weight's gradient to ``main_grad``.
    fuse_wgrad_accumulation: bool = False
    #: whether the backward keeps the input itself and quantizes it again.
    save_original_input: bool = False
    #: whether the forward leaves out the bias and returns it.
    return_bias: bool = False

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
        if self.quantized_weight is not None and self.quantized_weight.formats != tuple(formats):
            self.forget_quantized_weights()
        self._recipe = recipe
        self._formats = formats
        self._row_rules = row_rules(formats)
        self._note_exchange()
        self._make_state()

    def _formats_here(self, recipe: Recipe | None) -> RoleFormats:
        """The recipe's formats on the device of the weight. The scales of delayed scaling have a fixed layout."""
        formats = formats_of(recipe)
        if recipe is None or isinstance(recipe, DelayedScaling):
            return formats
        device = self._any_weight().device
        return RoleFormats(resolve(formats.input, device), formats.weight, resolve(formats.grad, device))

    def _main_grad(self) -> tuple[Any, ...]:
        """The arguments of a layer's op for a weight gradient that goes into ``main_grad``; none if it does not."""
        if not self.fuse_wgrad_accumulation:
            return ()
        if isinstance(self._recipe, DelayedScaling):
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: argument 'recipe': expected fuse_wgrad_accumulation=False "
                "with DelayedScaling, got True. Use another recipe, for example Float8CurrentScaling()."
            )
        buffers, *rest = main_grads(class_name(self), self._weights())
        if not isinstance(self._source_weight(), Tensor):
            return buffers, *rest
        return buffers if buffers is None else buffers[0], *rest

    def _weight_gradient(self) -> dict[str, Any]:
        """The arguments of a layer's op that say where and when the weight's gradient is computed."""
        if not (
            self.fuse_wgrad_accumulation
            or self._delays_wgrad
            or self.save_original_input
            or self.weight_shard
        ):
            return {}  # the common case, in every forward
        queue, names = self._wgrad_queue(), ("main_grad", "accumulate", "weight_grad")
        buffers = () if self.is_gathered_elsewhere else self._main_grad()
        arguments: dict[str, Any] = dict(zip(names, buffers, strict=False))
        if self.save_original_input:
            arguments["save_original_input"] = self._saves_original_input()
        if self.weight_shard:
            arguments["weight_shard"] = self._shard_key()
        return arguments if queue is None else {**arguments, "wgrad_queue": queue}

    def _shard_key(self) -> str:
        """Of what autocast makes of a weight, it is without the set of the weights: such a copy exists for as long as
        something on this rank needs it, and not as long as on other ranks, so none is gathered early."""
        key = super()._shard_key()
        return (
            without_set(key) if key and not self.exchanges_quantized and is_cast(self._any_weight()) else key
        )

    def _saves_original_input(self) -> bool:
        if not isinstance(self._recipe, DelayedScaling):
            return True
        raise ValueError(
            f"transformer_plugin::{class_name(self)}: argument 'recipe': expected save_original_input=False with "
            "DelayedScaling, whose scales have changed by the backward, got True. Leave it out."
        )

    def _op_took(self, arguments: dict[str, Any]) -> None:
        """Called with what :meth:`_weight_gradient` returned, once the layer's op has accepted the call."""
        if arguments and arguments.get("weight_grad", "none") != "none":
            mark_added(self._weights())

    def _extra_options(self) -> str:
        """What ``extra_repr`` says of the weight's gradient and of the bias."""
        text = ", fuse_wgrad_accumulation=True" if self.fuse_wgrad_accumulation else ""
        text += ", delay_wgrad_compute=True" if self.delay_wgrad_compute else ""
        text += ", save_original_input=True" if self.save_original_input else ""
        text += f", weight_shard={self.weight_shard!r}" if self.weight_shard else ""
        text += "" if self.tensor_parallel is None else str(self.tensor_parallel)
        return text + (", return_bias=True" if self.return_bias else "")

    def _any_weight(self) -> Tensor:
        """A tensor with the device of the weight and the last two dimensions of its sizes."""
        return self.weight

    def _resolve_formats(self) -> None:
        """Called after the weight may have moved to another device."""
        self._formats = self._formats_here(self._recipe)

    if TYPE_CHECKING:  # every subclass defines it

        def reset_parameters(self) -> None: ...

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

    def _make_state(self) -> None:
        recipe, history = self._recipe, self._buffers.get(STATE[0])
        if isinstance(recipe, DelayedScaling):
            if history is None or history.shape[0] != recipe.amax_history_len:
                self._register_state(recipe)
        elif history is not None:
            for name in STATE:
                delattr(self, name)

    def _register_state(self, recipe: DelayedScaling) -> None:
        weight = self._local(self._any_weight().detach())
        part = self.weight_parts.get("weight")
        tensors = 3 * ((weight.shape[0] if part is None else part.rows.rows) if weight.dim() == 3 else 1)
        sizes = ((recipe.amax_history_len, tensors), (tensors,), (tensors,))
        for name, size in zip(STATE, sizes, strict=True):
            self.register_buffer(name, torch.empty(size, dtype=torch.float32, device=weight.device))
        keep_rank_buffers()
        self._reset_state()

    def _reset_state(self) -> None:
        if STATE[0] in self._buffers:
            torch.nn.init.zeros_(self.delayed_history)
            torch.nn.init.ones_(self.delayed_scale)
            torch.nn.init.zeros_(self.delayed_amax)

    def _op_accepts(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the op will accept the input and the parameters. If not, the op raises the error."""
        if not is_strided(input) or not is_strided(weight):
            return False
        part = self.weight_parts.get("weight")
        rows = weight.shape[:-1] if part is None else (part.rows.rows, *weight.shape[1:-1])
        if bias is not None and (
            bias.shape != rows or bias.device != weight.device or bias.dtype not in (*DTYPES, torch.float64)
        ):
            return False
        fits = input.dim() > 0 and input.shape[-1] == weight.shape[-1] and weight.dtype in DTYPES
        return fits and input.dtype == weight.dtype and input.device == weight.device

    def _delayed_scales(self, recipe: DelayedScaling, takes: bool) -> Tensor:
        """Returns the scales for this call, from the amaxes of earlier calls.

        In training this updates the state. The state must not change if the op is going to reject the call.
        """
        if not takes:
            return self.delayed_scale
        if torch.compiler.is_compiling():
            return self._next_scales(recipe)
        return scales_of(self, lambda: self._next_scales(recipe))

    def _next_scales(self, recipe: DelayedScaling) -> Tensor:
        state = (self.delayed_history, self.delayed_scale, self.delayed_amax)
        rule = (list(self._formats), recipe.margin, recipe.amax_compute_algo)
        if _tracing.is_tracing():
            update = _tracing.update_delayed_scale_ if self.training else _tracing.delayed_scale
            return update(state, rule)
        if self.training:
            return ops.update_delayed_scale_(*state, *rule, str(recipe.amax_group))
        return self.delayed_scale.clone() if recipe.amax_group else ops.delayed_scale(*state, *rule)

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


def formats_of(recipe: Recipe | None) -> RoleFormats:
    """Returns the keys of a recipe: "none" three times if there is no recipe."""
    if recipe is None:
        return RoleFormats()
    return RoleFormats(recipe.input_format, recipe.weight_format, recipe.grad_format)


def width_multiple(key: str) -> int:
    """Returns the number of which a product's widths must be a multiple if an operand has this format."""
    format = Format.parse(key)
    return format.block[1] if format.block and format.family in ("mxfp8", "nvfp4") else 1


class RowRules(NamedTuple):
    """How the rows of each group are padded."""

    #: the preferred alignment of the GPU's kernels.
    alignment: int = 1
    #: required multiple, because a backward quantizes along the rows.
    multiple: int = 1


def row_rules(formats: RoleFormats) -> RowRules:
    """Returns the padding rules of a layer with these formats."""
    parsed = [Format.parse(key) for key in formats]
    return RowRules(
        max(format.alignment for format in parsed), max(format.group_multiple for format in parsed)
    )
