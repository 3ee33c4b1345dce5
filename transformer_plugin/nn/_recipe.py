"""From a recipe to the format keys that the ops take."""

from __future__ import annotations

from typing import NamedTuple

from transformer_plugin.formats import Format
from transformer_plugin.recipes import Recipe


class RoleFormats(NamedTuple):
    """One format key per operand of a linear layer, in the order of the ops' arguments."""

    input: str = "none"
    weight: str = "none"
    grad: str = "none"


class TakesRecipe:
    """A module with a recipe. The keys are made when the recipe is set, not in every forward."""

    _recipe: Recipe | None
    _formats: RoleFormats

    @property
    def recipe(self) -> Recipe | None:
        """The formats of input, weight and gradient; None for operands as they are. May be replaced."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        self._recipe = recipe
        self._formats = formats_of(recipe)


def formats_of(recipe: Recipe | None) -> RoleFormats:
    """The keys of a recipe; "none" three times when there is no recipe."""
    if recipe is None:
        return RoleFormats()
    return RoleFormats(recipe.input_format, recipe.weight_format, recipe.grad_format)


def row_alignment(recipe: Recipe | None) -> int:
    """To what multiple the GPU's kernels like each group of rows padded."""
    return max(Format.parse(key).alignment for key in formats_of(recipe))
