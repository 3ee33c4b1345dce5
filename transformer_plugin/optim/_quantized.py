"""Optimizers of quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from transformer_plugin.nn.quantized_weight import copies_of
from transformer_plugin.parallel._layer_shards import note, note_shards, refuse_replaced
from transformer_plugin.parallel._part_tensor import PartTensor, part_for
from transformer_plugin.parallel._tensor_slices import slices_of
from transformer_plugin.parallel._weight_part import layout_of, part_of
from transformer_plugin.parallel.clip import gradient_of
from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._layout import message

__all__ = ["MasterWeights", "refresh_after"]


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
    parts: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if "quantized_copies" not in parameter.__dict__:
                continue
            for weight in copies_of(parameter):
                if id(weight) not in seen:  # one copy may be of several parameters
                    seen.add(id(weight))
                    if weight.refreshes_itself:
                        parts.append(weight)
                    else:
                        weight.refresh()
    if parts:
        from transformer_plugin.parallel._quantized_part import refresh_together

        refresh_together(parts, None)


class MasterWeights:
    """Trains parameters, quantized ones too, through an optimizer of float32 copies.

    Each step gives the gradients to the copies, the master weights, steps them, and writes them into the parameters:
    ``copy_`` rounds to the dtype of a plain parameter, and quantizes into the memory of a quantized one.

    Args:
        parameters: plain tensors, :class:`~transformer_plugin.tensor.QuantizedTensor` s or
            :class:`~transformer_plugin.tensor.GroupedTensor` s. Master weights start at
            ``get_high_precision_init_val()`` where a parameter has it, else at its present values.
        make: makes the optimizer from the list of the master weights, for example
            ``lambda weights: torch.optim.AdamW(weights, lr=1e-3)``.

    Attributes:
        optimizer: the optimizer.
        master_weights: float32, in the order of the parameters.

    A gradient is ``parameter.main_grad`` where ``parameter.grad_added_to_main_grad`` is True, as ``parameter.grad`` is
    then a tensor without a meaning. Otherwise it is ``parameter.grad``, or ``parameter.main_grad`` where there is none.
    """

    def __init__(self, parameters: Iterable[Tensor], make: Callable[[list[Tensor]], Optimizer]) -> None:
        note_shards()
        self.parameters = [p for p in parameters if p.requires_grad]
        self.master_weights = [_master_of(p) for p in self.parameters]
        self.optimizer = make(self.master_weights)

    @torch.no_grad()
    def step(self) -> None:
        """One step of the optimizer, and its result in the parameters."""
        refuse_replaced(self.parameters)
        grads = [gradient_of(parameter, "MasterWeights") for parameter in self.parameters]
        for grad, master in zip(grads, self.master_weights, strict=True):
            master.grad = None if grad is None else grad.to(master.dtype)
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.master_weights, strict=True):
            if master.grad is not None:
                parameter.copy_(master.detach())
        self.optimizer.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the parameters: ``.grad``, and with zeros ``main_grad``, a framework's buffer."""
        for parameter in self.parameters:
            main_grad = getattr(parameter, "main_grad", None)
            if isinstance(main_grad, Tensor):
                main_grad.detach().zero_()
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer and the master weights. Of parts of weights both are parts, as in the model's."""
        layouts = [layout_of(master) for master in self.master_weights]
        masters = [master.detach() for master in self.master_weights]
        return {
            "optimizer": self.optimizer.state_dict(),
            "master_weights": [
                m if at is None else PartTensor(m, at) for m, at in zip(masters, layouts, strict=True)
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores both, and writes the master weights into the parameters.

        Raises:
            ValueError: another number of master weights, other sizes, or a state that the optimizer refuses. Nothing is
            changed then.
        """
        optimizer, saved = state["optimizer"], list(state["master_weights"])
        if len(saved) == len(self.master_weights):
            saved = [_part_of(weight, self.master_weights[i], i) for i, weight in enumerate(saved)]
        shapes = [list(weight.shape) for weight in saved]
        expected = [list(weight.shape) for weight in self.master_weights]
        if shapes != expected:
            raise ValueError(
                f"transformer_plugin::MasterWeights: argument 'state': expected master weights of sizes {expected}, "
                f"got {shapes}. Load the state of an optimizer of the same parameters."
            )
        self.optimizer.load_state_dict(optimizer)  # raises before it changes anything
        for parameter, master, weight in zip(self.parameters, self.master_weights, saved, strict=True):
            master.copy_(weight)
            parameter.copy_(master.detach())


def _part_of(saved: Tensor, master: Tensor, i: int) -> Tensor:
    """This rank's part of a saved master weight."""
    layout = layout_of(master)
    if layout is not None:
        return part_for(saved, layout, f"master_weights.{i}")
    if isinstance(saved, PartTensor):
        advice = "Load it with torch.distributed.checkpoint into the state of this optimizer"
        expected = "whole master weights, as this optimizer has"
        raise ValueError(message("MasterWeights", f"master_weights.{i}", expected, repr(saved), advice))
    return saved


def _master_of(parameter: Tensor) -> Tensor:
    """A float32 copy of a parameter."""
    value = parameter.detach()
    if isinstance(value, FormatTensor):
        kept = parameter.get_high_precision_init_val()  # type: ignore[attr-defined]
        value = value.dequantize(torch.float32) if kept is None else kept.to(value.device)
    master = value.to(torch.float32, copy=True).requires_grad_()
    note(master, part_of(parameter), slices_of(parameter))
    return master
