"""Optimizers and quantized weights."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from transformer_plugin.nn.quantized_weight import copies_of

__all__ = ["refresh_after"]


def refresh_after(optimizer: Optimizer) -> RemovableHandle:
    """Quantizes the weights of an optimizer again after each of its steps.

    These are the :class:`~transformer_plugin.nn.QuantizedWeight` objects whose weight is a parameter of this optimizer
    at the time of a step, those that modules keep after ``quantize_weights()`` and others. It holds also for an
    optimizer that changes parameters without counting it (``fused=True``), and inside a CUDA graph that captures the
    step. Other optimizers are not affected.

    Args:
        optimizer: any ``torch.optim.Optimizer``.

    Returns:
        A handle; its ``remove()`` undoes the call.

    Raises:
        TypeError: no optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            "transformer_plugin::refresh_after: argument 'optimizer': expected a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}. Call QuantizedWeight.refresh() after its steps."
        )
    return optimizer.register_step_post_hook(_refresh)


def _refresh(optimizer: Optimizer, *_: Any) -> None:
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if "quantized_copies" not in parameter.__dict__:
                continue
            for weight in copies_of(parameter):
                if id(weight) not in seen:  # one copy may be of several parameters
                    seen.add(id(weight))
                    weight.refresh()
