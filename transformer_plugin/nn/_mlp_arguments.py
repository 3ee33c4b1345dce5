"""The arguments of the op of :class:`GroupedMLP`, made of those of the ops of its layers and of the maps of a plan."""

from __future__ import annotations

from typing import Any

from transformer_plugin.nn._slots import Slots, SlotsOfRanks

#: What the one op has for each weight, by its name in the op of a layer.
_OF_FC1 = {
    "quantized_weight": "quantized_fc1_weight",
    "main_grad": "fc1_main_grad",
    "wgrad_queue": "fc1_wgrad_queue",
}
_OF_FC2 = {
    "quantized_weight": "quantized_fc2_weight",
    "main_grad": "fc2_main_grad",
    "wgrad_queue": "fc2_wgrad_queue",
}


def of_both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the one op for the weights, made of those of the layers' own ops.

    Raises if it cannot treat the gradients of both weights: their flags differ. A weight may need no gradient.
    """
    needed = [own for own in (second, first) if own.get("main_grad") is not None]
    flags = [{name: own[name] for name in ("accumulate", "weight_grad")} for own in needed]
    if len(flags) == 2 and flags[0] != flags[1]:
        raise ValueError(
            "transformer_plugin::GroupedMLP: argument 'weight': expected the same 'overwrite_main_grad', "
            "'grad_added_to_main_grad' and 'zero_out_wgrad' on the weights of both layers, got different ones. "
            "Set the attributes on all, or on none."
        )
    options = {_OF_FC2.get(name, name): value for name, value in second.items()}
    # A shard's key names fc1.
    options.update({_OF_FC1.get(name, name): value for name, value in first.items()})
    if flags:
        options.update(flags[0])
    return options


def of_slots(slots: Slots | SlotsOfRanks | None) -> dict[str, Any]:
    """The arguments of the one op for the rows of tokens."""
    if slots is None:
        return {}
    maps: dict[str, Any] = {"slot": slots.slot, "source": slots.source}
    if isinstance(slots, SlotsOfRanks):
        maps.update(over_ranks=True, group_name=slots.group_name, timeout_ms=slots.timeout_ms)
        maps.update(received=slots.received, position=slots.position)
    return maps
