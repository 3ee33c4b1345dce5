"""Module attributes that a user may try to set: the assignment takes effect, or it raises an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from transformer_plugin._arguments import class_name
from transformer_plugin.nn._module import PluginModule
from transformer_plugin.nn._recipe import RecipeModule, RowRules
from transformer_plugin.recipes import Recipe

_NO_RULES = RowRules()


def fixed(name: str, read: Callable[[Any], Any] | None = None) -> Any:
    """A property set by the constructor. Assigning another value later raises, because nothing would follow it.

    With ``read``, the value is computed by ``read(module)`` and not stored.
    """
    key = f"_{name}"

    def get(self: torch.nn.Module) -> Any:
        return getattr(self, key)

    def set(self: torch.nn.Module, value: Any) -> None:
        current = read(self) if read else self.__dict__.setdefault(key, value)
        if current is not value and current != value:
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: attribute '{name}': expected {current!r}, as in the "
                f"constructor, got {value!r}. Make a new layer."
            )

    return property(read or get, set, doc=f"``{name}`` of the constructor. Another value cannot be set.")


def recipe_layers(module: torch.nn.Module) -> Iterator[RecipeModule]:
    """Yields the layers of a module that have a recipe, including those inside wrappers."""
    return (layer for layer in module.modules() if isinstance(layer, RecipeModule))


def quantize_layers(module: torch.nn.Module, first_micro_batch: bool | torch.Tensor) -> None:
    """``quantize_weights()`` of the layers of a module; of none if one of them refuses it."""
    layers = list(recipe_layers(module))
    for layer in layers:
        layer._check_cacheable()
    for layer in layers:
        layer.quantize_weights(first_micro_batch)


def row_rules_in(*modules: torch.nn.Module) -> RowRules:
    """Returns the strictest padding rules that any layer in these modules has for the rows of a group."""
    strictest = _NO_RULES
    for module in modules:
        # A layer with a recipe is the common case; this runs in every forward.
        is_layer = isinstance(module, RecipeModule)
        rules: Any = module._row_rules if is_layer else row_rules_in(*recipe_layers(module))
        if rules != strictest:
            strictest = RowRules(*map(max, strictest, rules))
    return strictest


class SharedRecipeModule(PluginModule):
    """A module that contains layers with recipes. Its ``recipe`` gets and sets the recipe of all of them."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the layers, or None if they have none.

        Setting it sets the recipe of every layer; if one layer rejects it, nothing changes and an error is raised.
        Reading it raises a ValueError if the layers have different recipes.
        """
        recipes = [layer.recipe for layer in recipe_layers(self)]
        if any(recipe != recipes[0] for recipe in recipes):
            names = {
                name: layer.recipe for name, layer in self.named_modules() if isinstance(layer, RecipeModule)
            }
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: attribute 'recipe': expected the same recipe in all "
                f"layers, got {', '.join(f'{name} with {recipe}' for name, recipe in names.items())}. "
                "Read the recipe of each layer."
            )
        return recipes[0] if recipes else None

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        layers = list(recipe_layers(self))
        if not layers and recipe is not None:
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: attribute 'recipe': expected layers that have a "
                f"recipe, got {[type(child).__name__ for child in self.children()]}. Set their formats instead."
            )
        before = [layer.recipe for layer in layers]
        try:
            for layer in layers:
                layer.recipe = recipe
            self._on_recipe_change()
        except Exception:
            for layer, previous in zip(layers, before, strict=True):
                if layer.recipe is not previous:
                    layer.recipe = previous
            raise

    def _on_recipe_change(self) -> None:
        """Called after the recipe of the layers was set. Subclasses update what depends on it, or raise."""
