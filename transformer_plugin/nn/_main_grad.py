"""Weight gradients that go into ``param.main_grad``, as frameworks in the style of Megatron keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_plugin.parallel._shard_experts import local


def main_grads(layer: str, parameters: Sequence[Tensor]) -> tuple[list[Tensor] | None, bool, str]:
    """What the ops take for the weights of a layer: buffers, whether to add to them, and the gradient for autograd.

    Reads what frameworks put on a parameter:

    - ``main_grad``, or ``get_main_grad()`` where the parameter has ``__fsdp_param__``: the buffer;
    - ``overwrite_main_grad``: True writes over it;
    - ``grad_added_to_main_grad``: where it exists, autograd gets a gradient that the framework discards: uninitialized,
      or zeros where ``zero_out_wgrad`` is True. Otherwise autograd gets none. :func:`mark_added` sets it to True after
      the op, so that a call that the op refuses leaves it as it is.

    Nothing is read where no gradient is computed.
    """
    if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in parameters):
        return None, True, "none"
    buffers = main_grad_buffers(layer, parameters)
    overwrite = _same(layer, parameters, "overwrite_main_grad")
    marked = _same(layer, parameters, "grad_added_to_main_grad", exists=True)
    if not marked:
        return buffers, not overwrite, "none"
    zeros = _same(layer, parameters, "zero_out_wgrad")
    return buffers, not overwrite, "zeros" if zeros else "empty"


def mark_added(parameters: Sequence[Tensor]) -> None:
    """Tells frameworks that the backward adds the gradients to ``main_grad``."""
    for parameter in parameters:
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def main_grad_buffers(layer: str, parameters: Sequence[Tensor]) -> list[Tensor]:
    """The buffers alone."""
    return [_buffer(layer, parameter) for parameter in parameters]


def _buffer(layer: str, parameter: Any) -> Tensor:
    if hasattr(parameter, "__fsdp_param__") and hasattr(parameter, "get_main_grad"):
        parameter.main_grad = parameter.get_main_grad()
    main_grad = getattr(parameter, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        got = "none" if main_grad is None else type(main_grad).__name__
        advice = "Set it on every weight before the forward, or leave fuse_wgrad_accumulation out"
        _refuse(layer, "weight", "a parameter with a tensor 'main_grad'", got, advice)
    return local(main_grad)


def _same(layer: str, parameters: Sequence[Any], name: str, exists: bool = False) -> bool:
    """A flag that all weights of a layer have in common."""
    if exists:
        values = {hasattr(parameter, name) for parameter in parameters}
    else:
        values = {bool(getattr(parameter, name, False)) for parameter in parameters}
    if len(values) > 1:
        advice = "One product computes all of their gradients: set the attribute on all, or on none"
        _refuse(layer, "weight", f"the same '{name}' on all weights of the layer", "several", advice)
    return values == {True}


def _refuse(layer: str, argument: str, expected: str, got: str, advice: str) -> NoReturn:
    raise ValueError(
        f"transformer_plugin::{layer}: argument '{argument}': expected {expected}, got {got}. {advice}."
    )
