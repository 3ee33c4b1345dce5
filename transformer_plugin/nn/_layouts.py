"""How the weights and biases of G groups are parameters: packed in one tensor, one by one, or in a GroupedTensor."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_plugin.parallel._watching import watch_parametrizations
from transformer_plugin.tensor import GroupedTensor

#: ``"packed"``: one plain tensor ``weight [G, N, K]``. ``"list"``: ``weight0 [N, K]``, ``weight1``, ... ``"grouped"``:
#: one :class:`~transformer_plugin.tensor.GroupedTensor` ``weight [G, N, K]``. Biases likewise, ``[G, N]`` and ``[N]``.
Layout = Literal["packed", "list", "grouped"]


def checked_layout(layout: Any, module: str) -> Layout:
    """Returns a layout if it is one."""
    if layout in get_args(Layout):
        return layout
    raise ValueError(
        f"transformer_plugin::{module}: argument 'parameters': expected 'packed', 'list' or 'grouped', got {layout!r}. "
        "The default is 'packed'."
    )


def register(module: torch.nn.Module, name: str, layout: Layout, values: Tensor) -> None:
    """Makes the parameters of G members in a layout, from uninitialized values ``[G, ...]``."""
    if layout == "list":
        for i in range(values.shape[0]):
            # Memory of their own, so that they can be saved, moved and freed one by one.
            module.register_parameter(f"{name}{i}", Parameter(torch.empty_like(values[i])))
    else:
        value = GroupedTensor(values) if layout == "grouped" else values
        module.register_parameter(name, Parameter(value))
        if layout == "grouped":
            watch_parametrizations()


def names_of(name: str, layout: Layout, groups: int) -> tuple[str, ...]:
    """The names of the parameters."""
    return tuple(f"{name}{i}" for i in range(groups)) if layout == "list" else (name,)


def convert_state(
    state: dict[str, Any], prefix: str, name: str, layout: Layout, module: torch.nn.Module, errors: list[str]
) -> None:
    """Changes the entries of a state dict into those of a layout, whichever layout they are of.

    Entries that torch has no place for stay as they are, so that it names them: members that are computed from others
    (parametrizations, pruning, weight norms) on one side only.

    Args:
        state, prefix, errors: as torch passes them to the layer.
        name: "weight" or "bias".
        layout: that of the layer.
        module: the layer, of ``num_groups`` members.
    """
    groups: int = module.num_groups  # type: ignore[assignment]
    whole = prefix + name
    pattern = re.compile(re.escape(whole) + r"(\d+)$")
    members = {int(found[1]): key for key in state if (found := pattern.match(key))}
    if members and whole not in state:
        present = {*members, *_computed(state, prefix, name)}
        _convert_members(state, whole, members, present, layout, groups, errors)
    elif layout == "list" and whole in state and not members:
        if any(f"{name}{i}" not in module._parameters for i in range(groups)):
            return
        tensor = _plain(state.pop(whole))
        if tensor.shape[:1] == (groups,):
            state.update({f"{whole}{i}": member for i, member in enumerate(tensor.unbind(0))})
        else:
            sizes = list(tensor.shape)
            errors.append(
                f"size mismatch for {whole}: the state dict has {sizes}, the module {groups} members."
            )


def _computed(state: dict[str, Any], prefix: str, name: str) -> set[int]:
    """The members that the layer of a state dict computes from others: ``weight2_orig``, ``weight2_g``,
    ``parametrizations.weight2.original``."""
    pattern = re.compile(rf"{re.escape(prefix)}(?:{name}(\d+)_|parametrizations\.{name}(\d+)\.)")
    return {int(found[1] or found[2]) for key in state if (found := pattern.match(key))}


def _convert_members(
    state: dict[str, Any],
    whole: str,
    members: dict[int, str],
    present: set[int],
    layout: Layout,
    groups: int,
    errors: list[str],
) -> None:
    """Packs separate members, or leaves them as they are. With other sizes the layer loads none of them.

    ``present``: the members that there are, with those that are computed from others.
    """
    shapes = {tuple(state[key].shape) for key in members.values()}
    has_gaps = layout == "list" and sorted(present) != list(range(len(present)))
    if has_gaps and max(present) < groups:
        return  # a list that lacks a key
    if sorted(present) != list(range(groups)) or len(shapes) != 1:
        errors.append(
            f"size mismatch for {whole}: the state dict has {len(present)} members {whole}{{i}} of sizes "
            f"{sorted(shapes)}, the module {groups} of one size."
        )
    elif layout != "list" and len(members) == groups:
        state[whole] = torch.stack([_plain(state.pop(members[i])) for i in range(groups)])


def _plain(tensor: Any) -> Any:
    """A tensor of a state dict without its type; quantized ones as they are."""
    if not isinstance(tensor, GroupedTensor) or tensor.format.is_quantized:
        return tensor
    return tensor.view(-1).view(tensor.shape).detach()


def plain_state(destination: dict[str, Any], key: str) -> None:
    """Saves a GroupedTensor as the plain tensor over the same memory, which every reader of checkpoints knows."""
    value = destination.get(key)
    if isinstance(value, GroupedTensor):
        destination[key] = _plain(value)


def packed(parameter: Tensor) -> Tensor:
    """The plain tensor of a GroupedTensor, with its gradient; any other tensor unchanged."""
    return parameter.packed() if isinstance(parameter, GroupedTensor) else parameter
