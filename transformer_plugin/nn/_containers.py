"""Modules of layers: what they have in common with their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from transformer_plugin._arguments import class_name
from transformer_plugin.launch import LaunchOptions, checked
from transformer_plugin.nn._formats import RowRules
from transformer_plugin.nn._module import PluginModule
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.nn._weight_source import check_cacheable
from transformer_plugin.nn._wgrad_destination import checked_hook
from transformer_plugin.nn.grouped_linear import GroupedLinear
from transformer_plugin.recipes import Recipe

_NO_RULES = RowRules()


def recipe_layers(module: torch.nn.Module) -> Iterator[RecipeModule]:
    """Yields the layers of a module that have a recipe, including those inside wrappers."""
    return (layer for layer in module.modules() if isinstance(layer, RecipeModule))


def quantize_layers(module: torch.nn.Module, first_micro_batch: bool | torch.Tensor) -> None:
    """``quantize_weights()`` of the layers of a module; of none if one of them refuses it."""
    layers = list(recipe_layers(module))
    for layer in layers:
        check_cacheable(layer)
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


class LayerContainer(PluginModule):
    """A module of layers with recipes. What is set on it is set on all of them: ``recipe``, ``launch_options``,
    ``cache_weights`` and ``delay_wgrad_compute``. ``backward_dw()`` calls that of each."""

    #: What :meth:`backward_dw` calls at its end.
    _wgrad_hooks: tuple[Callable[[], Any], ...] = ()

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

    @property
    def launch_options(self) -> LaunchOptions:
        """The launch options of the grouped layers. Setting them sets those of every layer; reading them raises a
        ValueError if the layers have different ones."""
        found = {layer.launch_options for layer in self.modules() if isinstance(layer, GroupedLinear)}
        if len(found) > 1:
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: attribute 'launch_options': expected the same in all "
                f"layers, got {sorted(found)}. Read those of each layer."
            )
        return found.pop() if found else LaunchOptions()

    @launch_options.setter
    def launch_options(self, options: LaunchOptions) -> None:
        checked(options, class_name(self))
        for layer in self.modules():
            if isinstance(layer, GroupedLinear):
                layer.launch_options = options

    @property
    def cache_weights(self) -> bool:
        """Whether the layers keep their quantized weights, as :attr:`Linear.cache_weights` says.

        Setting it sets that of each layer. Reading it raises a ValueError if the layers differ.
        """
        return self._of_all("cache_weights", list(recipe_layers(self)))

    @cache_weights.setter
    def cache_weights(self, caches: bool) -> None:
        for layer in recipe_layers(self):
            layer.cache_weights = caches

    def _of_all(self, name: str, layers: list[Any]) -> bool:
        """A flag that the layers have in common."""
        found = {getattr(layer, name) for layer in layers}
        if len(found) > 1:
            raise ValueError(
                f"transformer_plugin::{class_name(self)}: attribute '{name}': expected the same in "
                "all layers, got both. Read that of each layer."
            )
        return found == {True}

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether the backward leaves the weights' gradients to :meth:`backward_dw`.

        Setting it sets that of each layer. Reading it raises a ValueError if the layers differ.
        """
        return self._of_all("delay_wgrad_compute", list(outermost(self)))

    @delay_wgrad_compute.setter
    def delay_wgrad_compute(self, delay: bool) -> None:
        for layer in outermost(self):
            layer.delay_wgrad_compute = delay

    def need_backward_dw(self) -> bool:
        """Whether weight gradients of any layer wait for :meth:`backward_dw`."""
        return any(layer.need_backward_dw() for layer in outermost(self))

    def backward_dw(self) -> None:
        """Calls :meth:`GroupedLinear.backward_dw` of the layers, then the hooks. Does nothing if no gradient waits."""
        if not self.need_backward_dw():
            return
        for layer in outermost(self):
            layer.backward_dw()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """As :meth:`GroupedLinear.register_wgrad_accumulation_and_reduce_hooks`, for the layers together."""
        self._wgrad_hooks = (*self._wgrad_hooks, checked_hook(self, hook))


def outermost(module: torch.nn.Module) -> Iterator[RecipeModule | LayerContainer]:
    """The modules with ``backward_dw()`` inside a module, without those inside them."""
    for child in module.children():
        if isinstance(child, RecipeModule | LayerContainer):
            yield child
        else:
            yield from outermost(child)
