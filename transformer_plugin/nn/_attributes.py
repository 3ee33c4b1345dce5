"""Attributes of a module that a user may set: each has its effect, or says that it cannot have one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from transformer_plugin.nn._module import PluginModule
from transformer_plugin.nn._recipe import RowRules, RecipeModule
from transformer_plugin.recipes import Recipe


def fixed(name: str, read: Callable[[Any], Any] | None = None) -> Any:
    """An attribute that the constructor sets, and that nothing would follow afterwards: another value raises.

    With ``read`` the constructor need not set it: that finds the value.
    """
    key = f"_{name}"

    def get(self: torch.nn.Module) -> Any:
        return read(self) if read else getattr(self, key)

    def set(self: torch.nn.Module, value: Any) -> None:
        held = read(self) if read else self.__dict__.setdefault(key, value)
        if held is not value and held != value:
            raise ValueError(
                f"transformer_plugin::{type(self).__name__}: attribute '{name}': expected to stay {held!r}, with "
                f"which the layer was made, got {value!r}. Make a new layer."
            )

    return property(get, set, doc=f"``{name}`` of the constructor. Another value cannot be set.")


def recipe_layers(module: torch.nn.Module) -> Iterator[RecipeModule]:
    """The layers in a module that multiply in the formats of a recipe, those inside of wrappers too."""
    return (layer for layer in module.modules() if isinstance(layer, RecipeModule))


def row_rules_in(*modules: torch.nn.Module) -> RowRules:
    """What the rows of a group are padded to for all the layers in these modules."""
    alignment, multiple = RowRules()
    for module in modules:
        # The first by far the most frequent, and asked in every forward.
        layers = [module] if isinstance(module, RecipeModule) else list(recipe_layers(module))
        for layer in layers:
            alignment = max(alignment, layer._row_rules.alignment)
            multiple = max(multiple, layer._row_rules.multiple)
    return RowRules(alignment, multiple)


class SharedRecipeModule(PluginModule):
    """A module whose layers take recipes, and share one unless they were given others."""

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the layers; None where they have none. To set it sets that of every layer, and raises, with
        nothing changed, if one does not take it. To read it raises a ValueError where the layers' recipes differ: ask
        the layers themselves."""
        recipes = [layer.recipe for layer in recipe_layers(self)]
        if any(recipe != recipes[0] for recipe in recipes):
            names = {
                name: layer.recipe for name, layer in self.named_modules() if isinstance(layer, RecipeModule)
            }
            raise ValueError(
                f"transformer_plugin::{type(self).__name__}: attribute 'recipe': expected layers of one recipe, got "
                f"{', '.join(f'{name} with {recipe}' for name, recipe in names.items())}. Ask each layer for its own."
            )
        return recipes[0] if recipes else None

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        layers = list(recipe_layers(self))
        if not layers and recipe is not None:
            raise ValueError(
                f"transformer_plugin::{type(self).__name__}: attribute 'recipe': expected layers that take a recipe, "
                f"got {[type(child).__name__ for child in self.children()]}. Set that of the layers in their place."
            )
        before = [layer.recipe for layer in layers]
        try:
            for layer in layers:
                layer.recipe = recipe
            self._on_recipe_change()
        except Exception:
            for layer, held in zip(layers, before, strict=True):
                if layer.recipe is not held:
                    layer.recipe = held
            raise

    def _on_recipe_change(self) -> None:
        """What else follows the recipe; raises where it cannot."""
