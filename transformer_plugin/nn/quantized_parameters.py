"""quantized_init: layers whose weights are parameters in low precision."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin._arguments import typed
from transformer_plugin.formats import Format
from transformer_plugin.functional._values import is_quantized
from transformer_plugin.functional.quantize import quantize
from transformer_plugin.parallel._layer_shards import note_layer
from transformer_plugin.parallel._wrapping import install_wrapper_checks
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor import GroupedTensor


@dataclass
class _Choice:
    recipe: Recipe
    keeps_values: bool
    #: How many weights were quantized.
    made: int = 0


_choice: ContextVar[_Choice | None] = ContextVar("quantized_init", default=None)


@typed
@contextmanager
def quantized_init(recipe: Recipe, *, preserve_high_precision_init_val: bool = False) -> Iterator[None]:
    """Layers of this package that are made in this context have quantized weights as parameters.

    ``Linear``, ``LayerNormLinear``, ``GroupedLinear``, ``GroupedMLP`` and ``MoE`` get the recipe. Their weights are
    :class:`~transformer_plugin.tensor.QuantizedTensor` s, of grouped layers
    :class:`~transformer_plugin.tensor.GroupedTensor` s, in the recipe's weight format, quantized in both directions;
    their nominal dtype is the one that the layer was made with. Forward and backward read them as they are. A gradient
    has the nominal dtype. ``weight.copy_(values)`` quantizes new values into the same memory;
    :class:`transformer_plugin.optim.MasterWeights` trains them. With ``parallel_mode`` each rank quantizes its slices,
    and the ``state_dict`` has their values.

    Args:
        recipe: whose weight format has scales; not ``DelayedScaling``.
        preserve_high_precision_init_val: whether each weight keeps its initial values before they are quantized, on the
            CPU, for the master weights of an optimizer: ``weight.get_high_precision_init_val()``, and
            ``weight.clear_high_precision_init_val()`` when they are not needed any more. ``reset_parameters()``
            replaces them; of a layer on the meta device it makes them.

    Layers of other libraries, also ``torch.nn.Linear``, are made as without the context. If no layer of this package is
    made in it, there is a ``UserWarning`` at its end.

    Raises:
        TypeError: no recipe. ValueError: a recipe whose weights have no scales, or ``DelayedScaling``.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(_error("a recipe of transformer_plugin.recipes", repr(recipe), "Make one"))
    if isinstance(recipe, DelayedScaling) or recipe.weight_format in ("none", "bf16", "bf16:nan"):
        expected = "a recipe that quantizes weights from their current values"
        raise ValueError(_error(expected, str(recipe), "Use for example Float8BlockScaling()"))
    choice = _Choice(recipe, preserve_high_precision_init_val)
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)
    if not choice.made:
        text = (
            "transformer_plugin::quantized_init: expected layers of transformer_plugin.nn in the context, got none, "
            "so that no weight is quantized. Make the model of such layers."
        )
        warnings.warn(text, UserWarning, stacklevel=3)


def chosen_recipe(recipe: Recipe | None) -> Recipe | None:
    """The recipe of a layer that is being made: that of the context, if there is one."""
    choice = _choice.get()
    if choice is None:
        return recipe
    if recipe is not None and recipe != choice.recipe:
        expected = f"None, or {choice.recipe} as quantized_init has it"
        raise ValueError(_error(expected, str(recipe), "Leave out the recipe of the layer"))
    return choice.recipe


def quantize_parameter(module: torch.nn.Module, name: str, key: str) -> None:
    """Replaces a parameter of a layer that was just made by a quantized one, in the context."""
    choice = _choice.get()
    weight = module._parameters[name]
    if choice is None or weight is None:
        return
    choice.made += 1
    quantized = Parameter(quantize(weight.detach(), key, columnwise=True), weight.requires_grad)
    if choice.keeps_values:
        quantized.high_precision_init_val = _kept(weight)  # type: ignore[attr-defined]
    setattr(module, name, quantized)
    watch_quantized()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        install_wrapper_checks()


def watch_quantized() -> None:
    """What computes with a parameter, or changes it, knows of quantized ones: parametrizations, pruning, PEFT."""
    from transformer_plugin.parallel._merged_adapters import watch_merges
    from transformer_plugin.parallel._watching import watch_parametrizations

    watch_parametrizations()
    watch_merges()


def keep_values(parameter: Any, values: Tensor | None) -> None:
    """After other values were quantized into a parameter: they are its initial values too, if it keeps those.

    Args:
        parameter: the quantized parameter.
        values: what was quantized; None if only quantized values are known.
    """
    if "high_precision_init_val" not in parameter.__dict__:
        return
    parameter.clear_high_precision_init_val()
    if values is not None:
        parameter.high_precision_init_val = _kept(values.to(parameter.dtype))


def _kept(values: Tensor) -> Tensor:
    """A copy on the CPU; with ``device="meta"`` a meta tensor, until ``reset_parameters()`` or a load has values."""
    values = values.detach()
    values = values.packed() if isinstance(values, GroupedTensor) else values
    return values if values.is_meta else values.to("cpu", copy=True)


def refused_recipe(module: torch.nn.Module, recipe: Recipe | None) -> str | None:
    """Why a layer with a quantized weight does not take a recipe, as the end of an error; None if it does."""
    weight: Any = module._parameters.get("weight")
    if type(weight) is Parameter or not is_quantized(weight):
        return None
    same = recipe is not None and not isinstance(recipe, DelayedScaling)
    if same and Format.parse(recipe.weight_format) == weight.format:  # type: ignore[union-attr]
        return None
    return (
        f"expected a recipe whose weights are '{weight.format.key}', as the parameter of quantized_init is, got "
        f"{recipe}. Make the layer in quantized_init with that recipe."
    )


@contextmanager
def in_high_precision(module: torch.nn.Module, *names: str, reads: bool = False) -> Iterator[None]:
    """Quantized parameters of these names are unquantized inside, and quantized again afterwards.

    Inside they have any values, or with ``reads`` their own; one whose values are not changed then keeps its bytes.
    """
    quantized: dict[str, Any] = {name: p for name in names if is_quantized(p := module._parameters.get(name))}
    before: dict[str, Tensor] = {}
    for name, parameter in quantized.items():
        if reads:
            before[name] = values = parameter.detach().dequantize()
            values = values.clone()
        else:
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        module._parameters[name] = Parameter(values)
    if quantized:
        note_layer(module)  # slices are slices inside, too
    drawn: dict[str, Tensor] = {}
    try:
        yield
        drawn = {name: module._parameters[name].detach() for name in quantized}  # type: ignore[union-attr]
    finally:
        module._parameters.update(quantized)
    for name, values in drawn.items():
        if name in before and torch.equal(values, before[name]):
            continue
        with torch.no_grad():
            quantized[name].copy_(values)
        keep_values(quantized[name], values)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a quantized weight as the ops take them."""
    rows = (value.rowwise_data, value.scale_inv, value.amax)
    columns = (value.columnwise_data, value.columnwise_scale_inv, value.columnwise_amax)
    return [tensor for tensor in (*rows, *columns) if tensor is not None]


def _error(expected: str, got: str, advice: str) -> str:
    return f"transformer_plugin::quantized_init: argument 'recipe': expected {expected}, got {got}. {advice}."
