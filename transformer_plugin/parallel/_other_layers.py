"""Layers of other libraries, and converted experts, which helpers for sharded weights leave as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from transformer_plugin.formats import Format
from transformer_plugin.tensor._layout import message


def not_sharded(model: torch.nn.Module, filter: Callable[[str, torch.nn.Module], bool] | None) -> str:
    """The layers whose weights ``shard_`` cannot shard, in words; "" if there are none."""
    # Not at the top: modules of nn import this package.
    from transformer_plugin.nn import _left_alone as other
    from transformer_plugin.nn.convert import ConvertedExperts
    from transformer_plugin.nn.embedding import Embedding

    found = []
    for name, layer in model.named_modules():
        is_table = isinstance(layer, torch.nn.Embedding) and not isinstance(layer, Embedding)
        has_weights = isinstance(layer, ConvertedExperts) or other.is_experts(name, layer)
        if (is_table or has_weights or other.is_linear(layer)) and other.chooses(filter, name, layer):
            found.append((name, layer))
    return other.described(model, found)


def not_quantized(model: torch.nn.Module, filter: Callable[[torch.nn.Module, str], bool] | None) -> str:
    """The experts whose weights ``quantize_all_gather`` cannot quantize, in words; "" if there are none."""
    from transformer_plugin.nn import _left_alone as other
    from transformer_plugin.nn.convert import ConvertedExperts

    found = []
    for name, layer in model.named_modules():
        recipe = layer.recipe if isinstance(layer, ConvertedExperts) else None
        has_recipe = recipe is not None and Format.parse(recipe.weight_format).is_quantized
        if (has_recipe or other.is_experts(name, layer)) and other.chooses(filter, layer, name):
            found.append((name, layer))
    return other.described(model, found)


def warn_of(left: str, op: str, argument: str, consequence: str) -> None:
    """The warning of a helper that its user called: what it leaves as it is, and what follows."""
    if left:
        advice = f"{consequence}: leave them out with 'filter' if that is meant"
        text = message(op, argument, "layers of transformer_plugin.nn", left, advice)
        warnings.warn(text, UserWarning, stacklevel=4)  # of the caller of the decorated helper
