"""The format keys that layers pass to the ops, and what they ask of the sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from transformer_plugin.formats import Format
from transformer_plugin.recipes import Recipe

#: The dtypes that the ops quantize.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class RoleFormats(NamedTuple):
    """One format key per operand of a linear layer, in the order of the ops' arguments."""

    input: str = "none"
    weight: str = "none"
    grad: str = "none"


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
