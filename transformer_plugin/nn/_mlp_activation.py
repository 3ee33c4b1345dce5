"""The activation of :class:`GroupedMLP`, of what its constructor is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformer_plugin.activations import (
    EXPECTED_KEY,
    INTERLEAVE,
    KEY_ADVICE,
    ORDERS,
    Activation,
    key_of_activation,
)

_OWNER = "transformer_plugin::GroupedMLP"


def chosen_activation(activation: str | Activation, glu_interleave: Any, ffn_hidden: int) -> Activation:
    """The activation in the order of columns that one of the two names. Raises where they name two, or F has not whole
    blocks."""
    key = key_of_activation(activation, "GroupedMLP")
    try:
        chosen = Activation.parse(key)
    except ValueError:
        raise ValueError(
            f"{_OWNER}: argument 'activation': expected {EXPECTED_KEY}, got {key!r}. {KEY_ADVICE}."
        ) from None
    check_interleave(glu_interleave, ffn_hidden)
    if glu_interleave and (not chosen.traits.gated or chosen.interleave not in (0, glu_interleave)):
        raise ValueError(
            f"{_OWNER}: argument 'glu_interleave': expected {chosen.interleave} with the activation {key!r}, got "
            f"{glu_interleave}. Name the order of the rows once."
        )
    chosen = replace(chosen, interleave=glu_interleave) if glu_interleave else chosen
    check_interleave(chosen.interleave, ffn_hidden)
    return chosen


def check_interleave(interleave: Any, ffn_hidden: int) -> None:
    """Raises for an order that is none, or of blocks that F has not whole."""
    is_order = type(interleave) is int and interleave in ORDERS
    if not is_order or (interleave == INTERLEAVE and ffn_hidden % INTERLEAVE):
        raise ValueError(
            f"{_OWNER}: argument 'glu_interleave': expected 0, 1, or 32 with a ffn_hidden that is a "
            f"multiple of 32, got {interleave!r} with ffn_hidden={ffn_hidden}. Reorder the weight's rows, or use 0."
        )
