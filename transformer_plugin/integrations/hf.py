"""Hugging Face transformers: the name ``"transformer_plugin"`` for the experts of its models.

Importing this module registers it, and so does importing the package. Then this is all::

    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="transformer_plugin")

or ``model.set_experts_implementation("transformer_plugin")``. Every experts class that transformers decorates with
``use_experts_implementation`` is computed, by its flags. Parameters, state dicts and hooks stay as they are.

transformers is not imported: what it imports first registers the name.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import recipes
from transformer_plugin._arguments import typed
from transformer_plugin._on_import import on_import
from transformer_plugin.nn._experts import ConvertedExperts, not_computed, refuse_delayed, run_experts
from transformer_plugin.recipes import RECIPES, DelayedScaling, Recipe
from transformer_plugin.tensor._layout import message

__all__ = ["NAME", "experts_forward", "set_recipe"]

#: What ``experts_implementation`` takes.
NAME = "transformer_plugin"
#: The attribute of a model's configuration that holds the recipe of its experts; ``save_pretrained`` saves it.
_KEY = "transformer_plugin_recipe"
_REGISTRY = "transformers.integrations.moe"


def experts_forward(
    self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of an experts module of transformers, as its registry calls it.

    Args:
        self: the module. One op computes it, without a copy of the tokens, if it has the form of
            :class:`transformer_plugin.nn.MoE`; else its own functions run between two grouped products. See
            ``transformer_plugin.nn.convert.explain``.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, K]``; -1 and ``num_experts`` name no expert.
        top_k_weights: ``[T, K]``.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``. Differentiable in all but the indices.
    """
    value = getattr(getattr(self, "config", None), _KEY, None)
    return run_experts(self, hidden_states, top_k_index, top_k_weights, _recipe(value))


@typed
def set_recipe(model: torch.nn.Module, recipe: Recipe | None) -> torch.nn.Module:
    """Sets the recipe of the experts of a model whose implementation is ``"transformer_plugin"``.

    It is kept in the model's configuration under one key, ``transformer_plugin_recipe``, which ``save_pretrained``
    saves and ``from_pretrained`` reads. Other implementations do not read it. State dicts do not have it.

    Args:
        model: a model of transformers, or a part of it.
        recipe: of :mod:`transformer_plugin.recipes`, but not ``DelayedScaling``; None for the products as they are.

    Returns:
        The model.

    Raises:
        TypeError: no recipe. ValueError: ``DelayedScaling``; a model without experts of transformers.
    """
    if recipe is not None and not isinstance(recipe, Recipe):
        advice = "Make one, or call transformer_plugin.recipes.recipe_from_name()"
        expected = "a recipe of transformer_plugin.recipes or None"
        raise TypeError(message("set_recipe", "recipe", expected, repr(recipe), advice))
    if isinstance(recipe, DelayedScaling):
        refuse_delayed("set_recipe", recipe)
    found = [module for module in model.modules() if _is_computed(module)]
    if not found:
        expected = "a model with experts of transformers that are computed here"
        advice = "Call transformer_plugin.nn.convert.explain() to see what it has"
        raise ValueError(message("set_recipe", "model", expected, type(model).__name__, advice))
    value = _saved(recipe)
    for module in found:
        setattr(module.config, _KEY, value)
    return model


def _is_computed(module: Any) -> bool:
    if isinstance(module, ConvertedExperts) or not hasattr(module, "config"):
        return False
    return hasattr(type(module), "_apply_gate") and not not_computed(module)


def _saved(recipe: Recipe | None) -> str | dict[str, Any] | None:
    """A recipe as JSON can keep it: its name, or its class and its arguments."""
    for name, each in RECIPES.items():
        if type(each) is type(recipe) and each == recipe:
            return None if recipe is None else name
    assert recipe is not None
    return {"class": type(recipe).__name__, **dataclasses.asdict(recipe)}


def _recipe(value: Any) -> Recipe | None:
    """The recipe of what a configuration keeps."""
    if value is None:
        return None
    if isinstance(value, str):
        return RECIPES[value] if value in RECIPES else recipes.recipe_from_name(value)  # which raises
    items = tuple(value.items())
    # torch's compiler warns of a cache, into which it does not look.
    return _made(items) if torch.compiler.is_compiling() else _cached(items)


def _made(items: tuple[tuple[str, Any], ...]) -> Recipe:
    arguments = dict(items)
    recipe: Recipe = getattr(recipes, arguments.pop("class"))(**arguments)
    return recipe


_cached = cache(_made)


def _register() -> None:
    sys.modules[_REGISTRY].ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


on_import(_REGISTRY, _register)
