"""Torch's pipeline schedules: weight gradients that are not in ``.grad`` when a schedule ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from transformer_plugin._arguments import class_name, typed
from transformer_plugin.nn._containers import LayerContainer, outermost
from transformer_plugin.nn._recipe import RecipeModule
from transformer_plugin.parallel._shard_experts import local
from transformer_plugin.tensor._layout import message


@typed
def dw_builder(module: torch.nn.Module) -> Callable[[], Callable[[], None]]:
    """What ``torch.distributed.pipelining.PipelineStage`` takes as ``dw_builder`` for a stage's module.

    Schedules with a zero bubble compute the weights' gradients later than those of the inputs. With a ``dw_builder``
    the stage runs whole backwards, in which layers with ``delay_wgrad_compute`` keep the operands of their weight
    gradients, and later, in place of torch's own second backward, ``backward_dw()`` of these layers. Other layers
    compute the gradients of their weights in the backward. In schedules that do not split the backward the gradients
    are the same.

    Args:
        module: of the stage, or one that contains it.

    Raises:
        TypeError: no module.
    """
    if not isinstance(module, torch.nn.Module):
        got = type(module).__name__
        raise TypeError(
            message("dw_builder", "module", "a torch.nn.Module", got, "Pass the module of the stage")
        )

    def compute() -> None:
        for layer in [module] if isinstance(module, RecipeModule | LayerContainer) else outermost(module):
            layer.backward_dw()

    return lambda: compute


def register() -> None:
    """Lets a stage divide ``main_grad`` where it divides ``.grad`` by the number of microbatches (``scale_grads``)."""
    from torch.distributed.pipelining.stage import _PipelineStageBase

    original = _PipelineStageBase.scale_grads

    @functools.wraps(original)
    def scale_grads(stage: Any, grad_scale_factor: int) -> None:
        layers: list[tuple[str, Any]] = []
        if grad_scale_factor != 1:
            found = stage.submod.named_modules()
            layers = [(name, layer) for name, layer in found if isinstance(layer, RecipeModule)]
        for name, layer in layers:
            _check_complete(name, layer)
        original(stage, grad_scale_factor)
        _divide_main_grads([layer for _, layer in layers], grad_scale_factor)

    _PipelineStageBase.scale_grads = scale_grads  # type: ignore[method-assign,assignment]


def _check_complete(name: str, layer: Any) -> None:
    """Raises if a gradient would not be divided, as that of a bias is."""
    if layer.need_backward_dw():
        got = "delay_wgrad_compute=True, and weight gradients that wait for backward_dw()"
        advice = "Pass dw_builder=transformer_plugin.nn.dw_builder(module) to PipelineStage, or scale_grads=False to "
        advice += "the schedule and divide the loss by the number of microbatches"
    elif layer.fuse_wgrad_accumulation and layer._weight_source.is_external:
        got = "fuse_wgrad_accumulation=True with weights of another runtime, which has their gradients"
        advice = "Pass scale_grads=False to the schedule, and divide the loss by the number of microbatches"
    else:
        return
    expected = "gradients that are complete when the schedule divides them by the number of microbatches"
    where = f"'{name}' ({class_name(layer)})" if name else class_name(layer)
    raise ValueError(message("scale_grads", "submod", expected, f"{where} with {got}", advice))


@torch.no_grad()
def _divide_main_grads(layers: list[Any], divisor: int) -> None:
    """Once each, though layers may share a weight."""
    weights = {id(w): w for layer in layers if layer.fuse_wgrad_accumulation for w in layer._weights()}
    for weight in weights.values():
        main_grad = getattr(weight, "main_grad", None)
        if weight.requires_grad and isinstance(main_grad, torch.Tensor):
            local(main_grad).div_(divisor)
