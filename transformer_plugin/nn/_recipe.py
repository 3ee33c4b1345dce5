"""From a recipe to the format keys that the ops take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformer_plugin.recipes import Recipe


class RoleFormats(NamedTuple):
    """One format key per operand of a linear layer, in the order of the ops' arguments."""

    input: str = "none"
    weight: str = "none"
    grad: str = "none"


def formats_of(recipe: Recipe | None) -> RoleFormats:
    """The keys of a recipe; "none" three times, operands as they are, when there is no recipe."""
    if recipe is None:
        return RoleFormats()
    return RoleFormats(recipe.input_format, recipe.weight_format, recipe.grad_format)
