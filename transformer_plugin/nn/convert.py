"""convert: a model of another library computes its linear layers and experts with the kernels of this one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from transformer_plugin._arguments import typed
from transformer_plugin.nn._experts import (
    ConvertedExperts,
    converted_class,
    not_computed,
    not_one_op,
    refuse_delayed,
)
from transformer_plugin.nn._formats import formats_of, width_multiple
from transformer_plugin.nn._left_alone import chooses, is_experts, is_linear, left_alone
from transformer_plugin.nn._module import PluginModule
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.nn.linear import Linear
from transformer_plugin.nn.quantized_parameters import refused_recipe
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor._layout import message

__all__ = ["ConvertedExperts", "Explained", "Explanation", "convert", "explain"]


@typed
def convert(
    model: torch.nn.Module,
    recipe: Recipe | None = None,
    filter: Callable[[torch.nn.Module, str], bool] | None = None,
    *,
    cache_weights: bool | None = None,
) -> torch.nn.Module:
    """Makes layers of a model compute with this package, in place. Parameters stay the same objects: nothing is copied.

    Every ``torch.nn.Linear`` becomes a :class:`Linear` with the recipe, and experts of Hugging Face models, of every
    class that transformers decorates with ``use_experts_implementation``, become :class:`ConvertedExperts`. Modules of
    this package get the recipe. Names of parameters, the ``state_dict``, hooks and references to the modules stay as
    they are. :func:`explain` says what becomes of each module.

    Other modules are left as they are. For each class of those that multiply by weights of their own there is one
    ``UserWarning`` with their number: experts of other classes, subclasses of ``torch.nn.Linear``, quantized linear
    layers, ``Conv1D`` of Hugging Face, ``torch.nn.MultiheadAttention`` and recurrent layers. There is also one if no
    layer is converted. Routers, embeddings, convolutions and norms are left without a word, and so is what ``filter``
    leaves out. Experts that are a list of modules are converted layer by layer.

    In evaluation torch runs a ``torch.nn.TransformerEncoderLayer`` as one fused kernel, which reads weights and no
    recipe. With converted layers in it, it calls them as in training, and takes no nested tensors. Where a layer is put
    into one in another way, call ``torch.backends.mha.set_fastpath_enabled(False)``. Other modules that read the weight
    of a layer, and do not call the layer, compute without its recipe.

    Args:
        model: any module.
        recipe: of :mod:`transformer_plugin.recipes`; None changes no number format.
        filter: called with a module and its name; the module is converted where it returns True. For example
            ``lambda module, name: name != "lm_head"``. None converts all. It is also called with the modules that a
            warning would name, and silences it where it returns False.
        cache_weights: of the layers and experts, see :attr:`Linear.cache_weights`; None leaves it as it is.

    Returns:
        The model.

    Raises:
        TypeError: no module, no recipe. ValueError: a layer whose widths the recipe does not take, or whose forward was
        replaced on the instance; experts with ``DelayedScaling``. No layer is converted then.
    """
    _check_types(model, recipe)
    kinds = [(name, module, _kind(module)) for name, module in model.named_modules()]
    convertible = [(name, module, kind) for name, module, kind in kinds if kind is not None]
    chosen = [each for each in convertible if filter is None or filter(each[1], each[0])]
    for name, module, kind in chosen:
        _check(name, module, kind, recipe)
    for _, module, kind in chosen:
        if kind is not RecipeModule:
            module.__class__ = kind
        module.recipe = recipe
        module.cache_weights = module.cache_weights if cache_weights is None else cache_weights
    _keep_from_fused_kernel(model)
    for text in _left_as_they_are(kinds, filter):
        warnings.warn(text, UserWarning, stacklevel=3)  # of the caller of the decorated function
    if not chosen:
        got = f"a filter that takes none of {len(convertible)}" if filter and convertible else "none"
        text = "Nothing is converted: pass a model with such layers, or another filter"
        text = message("convert", "model", "layers that can be converted", got, text)
        warnings.warn(text, UserWarning, stacklevel=3)  # of the caller of the decorated function
    return model


def _check_types(model: Any, recipe: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        _refuse("model", "a torch.nn.Module", type(model).__name__, "Pass the model", TypeError)
    if recipe is not None and not isinstance(recipe, Recipe):
        advice = "Make one, or call transformer_plugin.recipes.recipe_from_name()"
        _refuse("recipe", "a recipe of transformer_plugin.recipes or None", repr(recipe), advice, TypeError)


class Explained(NamedTuple):
    """What becomes of one module."""

    #: in the model; "" of the model itself.
    name: str
    #: the name of its class.
    kind: str
    #: ``"converted"``, ``"left"``, or ``"refused"``: :func:`convert` raises, and leaves the whole model as it is.
    what: Literal["converted", "left", "refused"]
    #: how it is computed, or why not.
    reason: str


class Explanation(tuple[Explained, ...]):
    """A row for each module that multiplies by weights of its own. Printed, a line for each."""

    def __str__(self) -> str:
        columns = zip(*self, strict=True)
        widths = [max(map(len, column)) for column in columns]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in self)
        return "\n".join(lines) or "no module that multiplies by weights of its own"


@typed
def explain(model: torch.nn.Module, recipe: Recipe | None = None) -> Explanation:
    """Lists what :func:`convert` makes of each module of a model with a recipe, and what it leaves and why.

    Changes nothing. Also ``convert.explain``. Of experts it says whether one op computes them, as in :class:`MoE`, or
    their own functions run between two grouped products; the same holds for
    ``experts_implementation="transformer_plugin"`` (:mod:`transformer_plugin.integrations.hf`).

    Returns:
        A tuple of rows ``(name, kind, what, reason)``, which prints as a table.
    """
    found = ((name, module, _explained(name, module, recipe)) for name, module in model.named_modules())
    return Explanation(Explained(name, type(module).__name__, *row) for name, module, row in found if row)


def _explained(name: str, module: torch.nn.Module, recipe: Recipe | None) -> tuple[Any, str] | None:
    kind = _kind(module)
    if kind is None:
        if is_experts(name, module):
            return "left", f"experts: {_not_converted(module)}"
        text = "a linear layer of another class than torch.nn.Linear"
        return ("left", text) if is_linear(module) else None
    try:
        _check(name, module, kind, recipe)
    except ValueError as error:
        return "refused", str(error)
    if kind is RecipeModule and not isinstance(module, ConvertedExperts):
        return "converted", "a layer of this package, gets the recipe"
    if kind is Linear:
        return "converted", "a linear layer"
    own = not_one_op(module)
    how = f"their own functions between two products: {own}" if own else "one op"
    return "converted", f"experts, {how}"


def _keep_from_fused_kernel(model: torch.nn.Module) -> None:
    """Encoder layers of torch call the layers of this package in them, in evaluation too.

    torch asks these attributes whether its kernel has what a layer computes; nothing else reads them.
    """
    changed: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer) and _has_own(module):
            module.activation_relu_or_gelu = 0  # an activation that the kernel does not have
            changed.add(module)
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoder) and not changed.isdisjoint(module.layers):
            module.use_nested_tensor = False  # it would make nested tensors, which the kernel alone takes


def _has_own(module: torch.nn.Module) -> bool:
    return any(isinstance(part, PluginModule) for part in module.modules())


def _left_as_they_are(
    kinds: list[tuple[str, torch.nn.Module, Any]], filter: Callable[[torch.nn.Module, str], bool] | None
) -> Iterator[str]:
    """A text for each class of modules that are not converted, although they multiply by weights of their own."""
    others = [(name, module) for name, module, kind in kinds if kind is None]
    for expected, found in (
        (
            "experts of a class that transformers decorates with use_experts_implementation, in 16 or 32 bits",
            [o for o in others if is_experts(*o)],
        ),
        ("linear layers of the class torch.nn.Linear itself", [o for o in others if is_linear(o[1])]),
    ):
        found = [(name, module) for name, module in found if chooses(filter, module, name)]
        for left in left_alone(found):
            advice = (
                "They stay as they are, without the recipe: leave them out with 'filter' if that is meant"
            )
            yield message("convert", "model", expected, str(left), advice)


def _kind(module: torch.nn.Module) -> type[Any] | None:
    """What a module becomes; RecipeModule for those that have a recipe already; None for those that stay."""
    if type(module) is torch.nn.Linear:
        return Linear
    if isinstance(module, RecipeModule | ConvertedExperts):
        return RecipeModule
    return None if _not_converted(module) else converted_class(module)


def _not_converted(module: torch.nn.Module) -> str:
    """Why experts are not converted; "" if they are."""
    wrapped = "a wrapper such as fully_shard has changed its class: convert the model first"
    return not_computed(module) or ("" if "forward" in vars(type(module)) else wrapped)


def _check(name: str, module: torch.nn.Module, kind: type[Any], recipe: Recipe | None) -> None:
    """Raises if a layer cannot be converted."""
    where = f" of layer '{name}'" if name else ""
    if "forward" in module.__dict__:
        advice = "Remove what replaced it first, or leave the layer out with 'filter'"
        _refuse("model", f"the forward of {type(module).__name__}{where}", "one that was replaced", advice)
    text = refused_recipe(module, recipe)
    if text:
        raise ValueError(f"transformer_plugin::convert: argument 'recipe': {text} It is layer '{name}'.")
    multiple = max(width_multiple(key) for key in formats_of(recipe))
    are_experts = issubclass(kind, ConvertedExperts) or isinstance(module, ConvertedExperts)
    matrices = 3 if are_experts else 2  # dimensions; biases of experts have two
    for weight in (p for _, p in module.named_parameters(recurse=False) if p.dim() >= matrices):
        if any(width % multiple for width in weight.shape[-2:]):
            expected = f"widths{where} that are multiples of {multiple}, as {recipe} needs"
            _refuse("recipe", expected, list(weight.shape), "Leave the layer out with 'filter'")
    if isinstance(recipe, DelayedScaling) and are_experts:
        refuse_delayed("convert", recipe, where)


def _refuse(
    argument: str, expected: str, got: object, advice: str, error: type[Exception] = ValueError
) -> NoReturn:
    raise error(message("convert", argument, expected, str(got), advice))


# The package has the function under the name of this module, so that `nn.convert.explain` has to be its attribute.
convert.explain = explain  # type: ignore[attr-defined]
