"""TorchScript versions of functions that ``torch.jit.trace`` would record with constants.

A trace records the ops' integer arguments as constants, even those computed from the example's sizes, and does not
support lists of strings. A trace includes TorchScript functions as they are. The functions here are compiled once, in
the first trace.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def is_tracing() -> bool:
    """Whether ``torch.jit.trace`` is recording."""
    return not torch.compiler.is_compiling() and torch.jit.is_tracing()  # type: ignore[attr-defined]


def assign_all(
    indices: Tensor, weights: Tensor, num_experts: int, alignment: int, multiple: int, total_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``ops.assign_weighted_slots`` with capacity for all rows of the actual tokens, not of the example's tokens."""
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _script(_assign_all)(
        indices, weights, num_experts, alignment, multiple, total_experts
    )
    return result


def delayed_scale(state: tuple[Tensor, Tensor, Tensor], rule: tuple[list[str], int, str]) -> Tensor:
    """``ops.delayed_scale`` in TorchScript."""
    result: Tensor = _script(_delayed_scale)(*state, *rule[0], *rule[1:])
    return result


def update_delayed_scale_(state: tuple[Tensor, Tensor, Tensor], rule: tuple[list[str], int, str]) -> Tensor:
    """``ops.update_delayed_scale_`` in TorchScript."""
    result: Tensor = _script(_update_delayed_scale_)(*state, *rule[0], *rule[1:])
    return result


@cache
def _script(function: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit.trace has warned already
        scripted: Callable[..., Any] = torch.jit.script(function)
    return scripted


def _assign_all(
    indices: Tensor, weights: Tensor, num_experts: int, alignment: int, multiple: int, total_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    capacity = indices.numel() + num_experts * (alignment - 1)
    capacity = (capacity + multiple - 1) // multiple * multiple
    return torch.ops.transformer_plugin.assign_weighted_slots(
        indices, weights, 0, num_experts, capacity, alignment, total_experts
    )


def _delayed_scale(
    history: Tensor,
    scale: Tensor,
    amax: Tensor,
    input: str,
    weight: str,
    grad: str,
    margin: int,
    algorithm: str,
) -> Tensor:
    formats = [input, weight, grad]
    return torch.ops.transformer_plugin.delayed_scale(history, scale, amax, formats, margin, algorithm)


def _update_delayed_scale_(
    history: Tensor,
    scale: Tensor,
    amax: Tensor,
    input: str,
    weight: str,
    grad: str,
    margin: int,
    algorithm: str,
) -> Tensor:
    formats = [input, weight, grad]
    return torch.ops.transformer_plugin.update_delayed_scale_(
        history, scale, amax, formats, margin, algorithm
    )
