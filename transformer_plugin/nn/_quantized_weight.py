"""Weights that a module rounds once for many forwards and backwards, instead of in each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from transformer_plugin import ops
from transformer_plugin.recipes import DelayedScaling, Recipe

#: weights of which modules hold what they were rounded to.
_watched = WeakTensorKeyDictionary()


def _count_step(optimizer: Optimizer, *_: Any) -> None:
    """After a step of any optimizer: ``fused=True`` changes parameters and leaves their versions as they are."""
    if torch.compiler.is_compiling():  # a compiled step counts
        return
    for group in optimizer.param_groups:
        increment_version([parameter for parameter in group["params"] if parameter in _watched])


@cache
def _hook_steps() -> None:
    """Once for the process, if any module quantizes its weight."""
    register_optimizer_step_post_hook(_count_step)


def _watch(weight: Tensor) -> None:
    _hook_steps()
    _watched[weight] = True


def _version(weight: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count."""
    return 0 if weight.is_inference() else weight._version


class HoldsQuantizedWeight(torch.nn.Module):
    """A module that multiplies its weight in formats, or what it rounded the weight to beforehand."""

    weight: Tensor
    recipe: Recipe | None
    _formats: tuple[str, str, str]
    #: of the buffers, in the order of ops.quantize_weight; none while each forward rounds the weight.
    _quantized_names: tuple[str, ...] = ()
    #: the weight that was rounded, and its version then.
    _quantized_from: tuple[Tensor, int] | None = None

    def quantize_weights(self) -> None:
        """Rounds the weight to the recipe's formats for every forward and backward until the next call.

        Call it after each optimizer step, before the first forward: with gradients accumulated over n micro-batches
        the weight is then rounded once and not n times. Outputs and gradients have the same bits. What it is rounded
        to, :func:`transformer_plugin.ops.quantize_weight`, is held in buffers ``quantized_weight_0``, ... that are not
        in the ``state_dict``; later calls write into the same memory, so a CUDA graph of a step stays right, and may
        hold the call itself.

        A forward whose weight was changed in place since (an optimizer step, ``load_state_dict``), or is another
        tensor, raises. That is seen in eager code only: compiled code and replays of a CUDA graph take the buffers as
        they are, and so does eager code after changes that autograd does not count (through ``weight.data``, of an
        inference tensor, by a kernel of another library outside of a ``torch.optim.Optimizer``). Call this method
        itself outside of compiled code. A backward whose forward came before this call raises, as for any tensor that
        is changed in place.

        The weight is a plain tensor: one that is gathered for each forward (FSDP) or computed in it (parametrizations)
        is another tensor each time.

        Moves and casts of the module (``.to()``) and another recipe drop the buffers. ``DistributedDataParallel`` sends
        buffers to other ranks in each forward: pass it ``broadcast_buffers=False``.

        Raises:
            ValueError: no recipe, one that rounds nothing, or ``DelayedScaling``, whose scales change in each forward.
        """
        self._check_recipe()
        weight, held = self.weight, self._quantized_from
        if held is not None and (held[0].shape, held[0].device) != (weight.shape, weight.device):
            self.forget_quantized_weights()
        with torch.no_grad():
            if self._quantized_names:
                ops.quantize_weight_out(weight, *self._formats, self._quantized_buffers())
            else:
                for i, tensor in enumerate(ops.quantize_weight(weight, *self._formats)):
                    self.register_buffer(f"quantized_weight_{i}", tensor, persistent=False)
                    self._quantized_names = (*self._quantized_names, f"quantized_weight_{i}")
        self._quantized_from = (weight, _version(weight))
        _watch(weight)

    def forget_quantized_weights(self) -> None:
        """Drops what :meth:`quantize_weights` made: each forward rounds the weight again."""
        for name in self._quantized_names:
            delattr(self, name)
        self._quantized_names = ()
        self._quantized_from = None

    def _quantized_buffers(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._quantized_names]

    def _quantized_weight(self) -> list[Tensor] | None:
        """For the ops of a forward."""
        if not self._quantized_names:
            return None
        if not torch.compiler.is_compiling():  # a graph is not made anew for every version
            self._check_fresh()
        return self._quantized_buffers()

    def _check_fresh(self) -> None:
        assert self._quantized_from is not None
        weight, version = self._quantized_from
        if weight is not self.weight:
            got = "another tensor"
        elif version != _version(weight):
            got = "one that was changed in place since"
        else:
            return
        raise ValueError(
            f"transformer_plugin::{type(self).__name__}: argument 'weight': expected the weight that "
            f"quantize_weights() rounded, got {got}. Call quantize_weights() again after each change of the weight, "
            "or forget_quantized_weights()."
        )

    def _check_recipe(self) -> None:
        if self._formats[1] != "none" and not isinstance(self.recipe, DelayedScaling):
            return
        raise ValueError(
            f"transformer_plugin::{type(self).__name__}: argument 'recipe': expected a recipe that rounds the weight "
            f"by the weight alone, got {self.recipe}. Leave out quantize_weights(), or set another recipe."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.forget_quantized_weights()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, whose weight has versions of its own: how far it is behind, in place of the version."""
        state = self.__dict__.copy()
        if self._quantized_from is not None:
            weight, version = self._quantized_from
            state["_quantized_from"] = (weight, version - _version(weight))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._quantized_from is not None:
            weight, behind = self._quantized_from
            self._quantized_from = (weight, _version(weight) + behind)
            _watch(weight)
