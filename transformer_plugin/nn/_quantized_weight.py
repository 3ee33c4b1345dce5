"""Weights that a module quantizes once for many forwards and backwards, instead of in each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from transformer_plugin import ops
from transformer_plugin.nn._module import PluginModule
from transformer_plugin.parallel._shard_experts import ExpertShardMixin, local
from transformer_plugin.recipes import DelayedScaling, Recipe

#: Modules that hold what their weight was rounded to. No weight is referred to weakly: torch swaps no such tensor.
_modules_with_cached_weight: WeakSet[QuantizedWeightMixin] = WeakSet()


def _increment_weight_versions(optimizer: Optimizer, *_: Any) -> None:
    """After a step of any optimizer: ``fused=True`` changes parameters and leaves their versions as they are."""
    if torch.compiler.is_compiling():  # a compiled step counts
        return
    held = {id(holder._quantized_from.weight) for holder in list(_modules_with_cached_weight) if holder._quantized_from}
    for group in optimizer.param_groups:
        increment_version([parameter for parameter in group["params"] if id(parameter) in held])


@cache
def _register_step_hook() -> None:
    """Once for the process, if any module quantizes its weight."""
    register_optimizer_step_post_hook(_increment_weight_versions)


def _local_part(weight: Tensor) -> Tensor:
    """What of a weight lies on this rank."""
    with torch.no_grad():
        return local(weight)


def _version(weight: Tensor) -> int:
    """How often a tensor, or the part of it that is here, was changed in place; inference tensors do not count."""
    if weight.is_inference():
        return 0
    part = _local_part(weight)
    return weight._version + (0 if part is weight else part._version)


class _SourceWeight(NamedTuple):
    """What was rounded: a tensor, its version, and where its values lay. The memory may be freed meanwhile; an address
    that is used again is told by the storage, which is another."""

    weight: Tensor
    version: int
    kind: tuple[torch.Size, torch.device]
    storage: StorageWeakRef
    address: int

    @staticmethod
    def of(weight: Tensor, versions_behind: int = 0) -> _SourceWeight:
        kind, part = (weight.shape, weight.device), _local_part(weight)
        storage = StorageWeakRef(part.untyped_storage())
        return _SourceWeight(weight, _version(weight) - versions_behind, kind, storage, part.data_ptr())

    def has_new_storage(self) -> bool:
        """Whether the tensor has other memory: ``weight.data = other``."""
        part = _local_part(self.weight)
        return self.address != part.data_ptr() or self.storage != StorageWeakRef(part.untyped_storage())


class QuantizedWeightMixin(ExpertShardMixin, PluginModule):
    """A module that quantizes its weight, in each forward or once for many."""

    weight: Tensor
    recipe: Recipe | None
    _formats: tuple[str, str, str]
    #: what ops.quantize_weight gave; nothing while each forward rounds the weight.
    _quantized: tuple[Tensor, ...] = ()
    _quantized_from: _SourceWeight | None = None

    def quantize_weights(self) -> None:
        """Quantizes the weight to the recipe's formats for every forward and backward until the next call.

        Call it after each optimizer step, before the first forward: with gradients accumulated over n micro-batches
        the weight is then quantized once and not n times. Outputs and gradients have the same bits. The result of
        :func:`transformer_plugin.ops.quantize_weight` is kept in byte buffers ``quantized_weight_0``, ..., which are
        not in the ``state_dict``; later calls write into the same memory, so a CUDA graph of a step stays valid, and
        may contain the call itself.

        A forward raises if its weight was changed in place since (an optimizer step, ``load_state_dict``), has other
        memory (``weight.data = other``) or is another tensor. Only eager code checks: compiled code and replays of a
        CUDA graph use the buffers unchecked, and so does eager code after changes that autograd does not count
        (``weight.data.add_(1)``, of an inference tensor, by a kernel of another library outside of a
        ``torch.optim.Optimizer``). Call this method itself outside of compiled code. The backward of an earlier forward
        raises, as for any tensor that is changed in place.

        The weight must be a plain tensor: one that is gathered for each forward (FSDP) or computed in it
        (parametrizations) is another tensor each time.

        Moves and casts of the module (``.to()``) and another recipe drop the buffers. ``DistributedDataParallel``
        broadcasts buffers in each forward, although all ranks have these bytes already: ``broadcast_buffers=False``
        avoids that. In a copy whose parameters are averaged (``AveragedModel``) the weights change: call
        :meth:`forget_quantized_weights` there.

        Raises:
            ValueError: no recipe, one that quantizes nothing, or ``DelayedScaling``, whose scales change in each
                forward.
        """
        self._check_recipe()
        weight, held = self.weight, self._quantized_from
        if held is not None and held.kind != (weight.shape, weight.device):
            self.forget_quantized_weights()
        with torch.no_grad():
            if self._quantized:
                ops.quantize_weight_out(self.local_weight, *self._formats, list(self._quantized))
            else:
                self._quantized = tuple(ops.quantize_weight(self.local_weight, *self._formats))
                self._register_bytes()
        self._record_source(weight)

    def forget_quantized_weights(self) -> None:
        """Drops the quantized weight: each forward quantizes again."""
        for i in range(len(self._quantized)):
            delattr(self, f"quantized_weight_{i}")
        self._quantized = ()
        self._quantized_from = None

    def _register_bytes(self) -> None:
        """The same memory as buffers: bytes, which every backend of collectives sends, and without the versions of what
        a backward keeps, which a broadcast of equal bytes does not change."""
        for i, tensor in enumerate(self._quantized):
            self.register_buffer(f"quantized_weight_{i}", tensor.view(torch.uint8).data, persistent=False)

    def _record_source(self, weight: Tensor, versions_behind: int = 0) -> None:
        self._quantized_from = _SourceWeight.of(weight, versions_behind)
        _register_step_hook()
        _modules_with_cached_weight.add(self)

    def _quantized_weight(self) -> list[Tensor] | None:
        """For the ops of a forward."""
        if not self._quantized:
            return None
        if not torch.compiler.is_compiling():  # a graph is not made anew for every version
            self._check_fresh()
        return list(self._quantized)

    def _check_fresh(self) -> None:
        assert self._quantized_from is not None
        origin = self._quantized_from
        if origin.weight is not self.weight:
            got = "another tensor"
        elif origin.version != _version(origin.weight):
            got = "one that was changed in place since"
        elif origin.has_new_storage():
            got = "one whose data is another tensor's since"
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
        """For copies, whose weight has versions of its own: how far it is versions_behind, in place of its origin."""
        state, origin = self.__dict__.copy(), self._quantized_from
        if origin is not None:
            versions_behind = -1 if origin.has_new_storage() else _version(origin.weight) - origin.version
            state["_quantized_from"] = (origin.weight, versions_behind)
            names = [
                f"quantized_weight_{i}" for i in range(len(self._quantized))
            ]  # torch.save takes one dtype
            state["_buffers"] = {name: held for name, held in self._buffers.items() if name not in names}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state.get("_quantized_from") is not None:
            weight, versions_behind = state["_quantized_from"]
            self._register_bytes()
            self._record_source(weight, versions_behind)
