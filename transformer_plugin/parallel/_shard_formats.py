"""What the ranks exchange of a weight that is sharded over them: values, or data that each has quantized."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.recipes import DelayedScaling


def formats_of(layer: Any) -> tuple[str, str, str]:
    """The format keys of a layer; of an embedding those of none."""
    formats: tuple[str, str, str] = getattr(layer, "_formats", ("none", "none", "none"))
    return formats


def sends_values(layer: Any, is_of_list: bool) -> bool:
    """Whether values travel whatever the recipe is: they are quantized after the gather.

    Of delayed scaling the amax that is collected is that of the full weight, so all ranks have the same scale of it.
    """
    return is_of_list or isinstance(getattr(layer, "recipe", None), DelayedScaling)


def align_of(layer: Any, weight: Tensor, is_of_list: bool, quantizes: bool) -> int:
    """The rows of a weight that must be on one rank. ``quantizes``: ranks quantize their shards."""
    from transformer_plugin.nn._formats import width_multiple  # not at the top: nn imports this package

    if is_of_list:  # the op takes no shard that the formats would not divide
        return max(width_multiple(key) for key in formats_of(layer))
    block = Format.parse(formats_of(layer)[1]).block
    return max(block) if quantizes and block is not None and weight.dim() == 2 else 1
