"""The recipe of a model's experts as a configuration of transformers keeps it: JSON, under one key."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch

from transformer_plugin import recipes
from transformer_plugin.recipes import RECIPES, Recipe

#: The attribute of a model's configuration that holds the recipe of its experts; ``save_pretrained`` saves it.
KEY = "transformer_plugin_recipe"


def recipe_of(experts: Any) -> Recipe | None:
    """The recipe of an experts module, which its configuration keeps."""
    return _recipe(getattr(getattr(experts, "config", None), KEY, None))


def saved(recipe: Recipe | None) -> str | dict[str, Any] | None:
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
