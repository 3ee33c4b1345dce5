"""Cached quantized weights: a module quantizes its weight once for many forwards and backwards."""

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

#: Modules with a cached quantized weight. The set refers weakly to modules, not to weights: torch cannot swap a tensor
#: that has weak references.
_modules_with_cached_weight: WeakSet[QuantizedWeightMixin] = WeakSet()


def _increment_weight_versions(optimizer: Optimizer, *_: Any) -> None:
    """Runs after a step of any optimizer. ``fused=True`` updates parameters without incrementing their versions."""
    if torch.compiler.is_compiling():  # compiled steps increment the versions
        return
    cached = {
        id(holder._quantized_from.weight)
        for holder in list(_modules_with_cached_weight)
        if holder._quantized_from
    }
    for group in optimizer.param_groups:
        increment_version([parameter for parameter in group["params"] if id(parameter) in cached])


@cache
def _register_step_hook() -> None:
    """Registers the optimizer hook, once per process, when the first module caches a quantized weight."""
    register_optimizer_step_post_hook(_increment_weight_versions)


def _local_part(weight: Tensor) -> Tensor:
    """Returns this rank's part of a weight, without a gradient."""
    with torch.no_grad():
        return local(weight)


def _version(weight: Tensor) -> int:
    """Counts the in-place changes of a tensor and of its local part. Inference tensors have no version: 0."""
    if weight.is_inference():
        return 0
    part = _local_part(weight)
    return weight._version + (0 if part is weight else part._version)


class _SourceWeight(NamedTuple):
    """Identifies the weight that was quantized: the tensor, its version, and its memory.

    The memory may be freed and its address reused later; the reference to the storage detects that.
    """

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
        """Whether the tensor has other memory now, as after ``weight.data = other``."""
        part = _local_part(self.weight)
        return self.address != part.data_ptr() or self.storage != StorageWeakRef(part.untyped_storage())


class QuantizedWeightMixin(ExpertShardMixin, PluginModule):
    """A module that quantizes its weight, in each forward or once for many."""

    weight: Tensor
    recipe: Recipe | None
    _formats: tuple[str, str, str]
    #: the result of ops.quantize_weight; empty if each forward quantizes the weight.
    _quantized: tuple[Tensor, ...] = ()
    _quantized_from: _SourceWeight | None = None

    def quantize_weights(self) -> None:
        """Quantizes the weight to the recipe's formats for every forward and backward until the next call.

        Call it after each optimizer step, before the first forward. With gradients accumulated over n micro-batches,
        the weight is then quantized once, not n times. Outputs and gradients have the same bits. The result of
        :func:`transformer_plugin.ops.quantize_weight` is stored in byte buffers ``quantized_weight_0``, ..., which are
        not in the ``state_dict``. Later calls write into the same memory, so CUDA graphs that use it stay valid, and
        a CUDA graph may contain the call itself.

        A forward raises an error if the weight has been changed in place since (an optimizer step,
        ``load_state_dict``), has other memory (``weight.data = other``) or is another tensor. Only eager code checks
        this. Compiled code and replays of a CUDA graph use the buffers unchecked. Eager code does not notice changes
        that autograd does not count: ``weight.data.add_(1)``, changes of an inference tensor, and writes by a kernel
        of another library outside of a ``torch.optim.Optimizer``. Call this method outside of compiled code. As for
        any saved tensor that is changed in place, the backward of an earlier forward raises an error.

        The weight must be a plain tensor. A weight that is gathered for each forward (FSDP) or computed in it
        (parametrizations) is another tensor each time.

        Moving or casting the module (``.to()``) and setting another recipe drop the buffers.
        ``DistributedDataParallel`` broadcasts buffers in each forward, although all ranks have the same bytes;
        ``broadcast_buffers=False`` avoids that. In a copy whose parameters are averaged (``AveragedModel``) the
        weights change: call :meth:`forget_quantized_weights` there.

        Raises:
            ValueError: there is no recipe, the recipe quantizes nothing, or it is ``DelayedScaling``, whose scales
                change in each forward.
        """
        self._check_recipe()
        weight, source = self.weight, self._quantized_from
        if source is not None and source.kind != (weight.shape, weight.device):
            self.forget_quantized_weights()
        with torch.no_grad():
            if self._quantized:
                ops.quantize_weight_out(self.local_weight, *self._formats, list(self._quantized))
            else:
                self._quantized = tuple(ops.quantize_weight(self.local_weight, *self._formats))
                self._register_bytes()
        self._record_source(weight)

    def forget_quantized_weights(self) -> None:
        """Drops the cached quantized weight: each forward quantizes again."""
        for i in range(len(self._quantized)):
            delattr(self, f"quantized_weight_{i}")
        self._quantized = ()
        self._quantized_from = None

    def _register_bytes(self) -> None:
        """Registers the same memory as byte buffers.

        Every collective backend supports bytes. The buffers do not share version counters with the tensors that a
        backward saves, so a broadcast of equal bytes does not invalidate a backward.
        """
        for i, tensor in enumerate(self._quantized):
            self.register_buffer(f"quantized_weight_{i}", tensor.view(torch.uint8).data, persistent=False)

    def _record_source(self, weight: Tensor, versions_behind: int = 0) -> None:
        self._quantized_from = _SourceWeight.of(weight, versions_behind)
        _register_step_hook()
        _modules_with_cached_weight.add(self)

    def _quantized_weight(self) -> list[Tensor] | None:
        """Returns the cached tensors for the ops of a forward, or None."""
        if not self._quantized:
            return None
        if not torch.compiler.is_compiling():  # checking in a graph would recompile for every version
            self._check_fresh()
        return list(self._quantized)

    def _check_fresh(self) -> None:
        assert self._quantized_from is not None
        origin = self._quantized_from
        if origin.weight is not self.weight:
            got = "another tensor"
        elif origin.version != _version(origin.weight):
            got = "one that was changed in place afterwards"
        elif origin.has_new_storage():
            got = "one whose .data was replaced afterwards"
        else:
            return
        raise ValueError(
            f"transformer_plugin::{type(self).__name__}: argument 'weight': expected the weight that "
            f"quantize_weights() quantized, got {got}. Call quantize_weights() again after each change of the weight, "
            "or forget_quantized_weights()."
        )

    def _check_recipe(self) -> None:
        if self._formats[1] != "none" and not isinstance(self.recipe, DelayedScaling):
            return
        raise ValueError(
            f"transformer_plugin::{type(self).__name__}: argument 'recipe': expected a recipe that quantizes the "
            f"weight from its current values, got {self.recipe}. Leave out quantize_weights(), or set another recipe."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.forget_quantized_weights()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: stores by how many versions the cache is outdated, as the copy has other versions."""
        state, origin = self.__dict__.copy(), self._quantized_from
        if origin is not None:
            versions_behind = -1 if origin.has_new_storage() else _version(origin.weight) - origin.version
            state["_quantized_from"] = (origin.weight, versions_behind)
            # Left out of the state, because torch.save requires one dtype per storage.
            names = [f"quantized_weight_{i}" for i in range(len(self._quantized))]
            state["_buffers"] = {name: buffer for name, buffer in self._buffers.items() if name not in names}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if state.get("_quantized_from") is not None:
            weight, versions_behind = state["_quantized_from"]
            self._register_bytes()
            self._record_source(weight, versions_behind)
