"""Moves and loads that replace parameters: quantized and grouped parameters keep their types, or an error is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from transformer_plugin.functional._values import described, is_quantized
from transformer_plugin.nn.quantized_parameters import keep_values
from transformer_plugin.parallel._layer_shards import REPLACED
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.tensor._base import Buffers, FormatTensor


def keeping_types(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What ``Module._apply`` calls for each parameter: a function that makes a plain tensor of a value makes a value.

    ``to_empty()`` does, which calls ``torch.empty_like``.
    """

    def apply(tensor: Tensor) -> Tensor:
        applied = fn(tensor)
        if not isinstance(tensor, FormatTensor) or isinstance(applied, FormatTensor):
            return applied
        buffers = Buffers(*(t if t is None else fn(t) for t in tensor._buffers))
        kinds = [[(t.shape, t.dtype) for _, t in b.present()] for b in (tensor._buffers, buffers)]
        value: Tensor = tensor._with(buffers) if kinds[0] == kinds[1] else applied
        return value

    return apply


@contextmanager
def keeping_attributes(module: torch.nn.Module) -> Iterator[None]:
    """Context of a move: values keep what frameworks have set on them, as plain parameters do (``main_grad``, hooks).

    torch exchanges the contents of a value and of the moved one, attributes included.
    """
    parameters: dict[str, Any] = module._parameters
    before = {name: p._attributes() for name, p in parameters.items() if isinstance(p, FormatTensor)}
    yield
    for name, attributes in before.items():
        _restore(parameters[name], attributes)


def _restore(parameter: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if name not in parameter.__dict__ and name != REPLACED:
            setattr(parameter, name, value)
    if not isinstance(parameter, FormatTensor):
        return
    # The dictionaries stay with the parameter; the assignment registers them with its new contents.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        registered = getattr(parameter, hooks, None)
        if registered is not None:
            setattr(parameter, hooks, registered)


def has_other_sizes(module: torch.nn.Module, state: dict[str, Any], prefix: str, errors: list[str]) -> bool:
    """Before ``load_state_dict``: whether it fails for entries of this layer, which then stays as it is.

    torch copies the entries that fit before it raises the error about the others.

    Args:
        module: the layer.
        state, prefix: as torch passes them to the layer.
        errors: what is known to be wrong with the state; entries of other sizes are added in torch's words.
    """
    known = len([text for text in errors if f" for {prefix}" in text])
    if module._load_state_dict_pre_hooks:  # torch calls them later; they may change the entries
        return known > 0
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        value = state.get(prefix + name)
        if own is None or not isinstance(value, Tensor) or value.shape == own.shape:
            continue
        known += 1
        errors.append(
            f"size mismatch for {prefix}{name}: copying a param with shape {value.shape} from checkpoint, the shape "
            f"in current model is {own.shape}."
        )
    return known > 0


def fit_assigned(module: torch.nn.Module, state: dict[str, Any], prefix: str, errors: list[str]) -> list[str]:
    """Before ``load_state_dict(assign=True)``: changes entries of a state into the types of the module's parameters.

    Plain tensors become GroupedTensors over the same memory. Quantized parameters take quantized values of their
    format only, and other parameters none: these entries are removed from the state.

    Returns:
        The keys that were removed, each with an entry in ``errors``.
    """
    refused = []
    for name, parameter in module._parameters.items():
        key = prefix + name
        value = state.get(key)
        if parameter is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
            continue  # torch reports other sizes
        if is_quantized(parameter) or is_quantized(value):
            if _describe(value) != _describe(parameter):
                errors.append(
                    f"'{key}': expected a {_describe(parameter)} with assign=True, got a {_describe(value)}. Load with "
                    "assign=False, which quantizes into the parameter, or make the layer as the saved one was made."
                )
                refused.append(key)
                del state[key]
        elif isinstance(parameter, GroupedTensor) and not isinstance(value, FormatTensor):
            if value.is_contiguous():
                state[key] = GroupedTensor(value.detach())
            else:
                errors.append(
                    f"'{key}': expected a contiguous tensor with assign=True, got strides {list(value.stride())}. "
                    "Make it contiguous, or load with assign=False."
                )
                refused.append(key)
                del state[key]
        elif not isinstance(parameter, FormatTensor) and isinstance(value, GroupedTensor):
            state[key] = value.packed().detach()
    return refused


def _describe(value: Tensor) -> str:
    return described(value) if isinstance(value, FormatTensor) else f"plain tensor {list(value.shape)}"


def after_load(module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
    """After ``load_state_dict``: quantized parameters that keep their initial values keep the loaded ones."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if parameter is not None and is_quantized(parameter) and isinstance(value, Tensor):
            keep_values(parameter, None if is_quantized(value) or value.shape != parameter.shape else value)
