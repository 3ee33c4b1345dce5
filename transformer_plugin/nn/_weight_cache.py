"""Quantized weights that layers keep by themselves, and read again until the weight changes (``cache_weights=True``).

A kept copy is that of the present weight if all of this is as it was when the copy was made:

- the parameter, its memory (storage, address, sizes, strides, dtype) and the count of its changes in place;
- the count of the steps of all optimizers of torch: fused kernels change weights without a count of their own. It
  also covers what a training loop writes between a step and the next forward in a way that torch does not count;
- the formats, the dtype to which ``torch.autocast`` casts the weight, and the CUDA stream, as another stream would
  not wait for the copy.

A weight that changes gets a new copy in new memory: backwards of earlier forwards read the old one. Whatever is in
doubt is quantized in the forward, as without a cache: see :func:`_is_keepable` and :meth:`WeightCache.quantized`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

from transformer_plugin import ops
from transformer_plugin.nn._autocast import is_cast
from transformer_plugin.nn.quantized_weight import (
    memory_of,
    outside_of_inference_mode,
    plain,
    version_of,
)
from transformer_plugin.parallel._merged_adapters import watch_merges
from transformer_plugin.parallel._optimizer_steps import CHANGED_BY_GRAPHS, STEPS
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.tensor._layout import parsed

#: The attribute of experts that holds their :class:`WeightCaches`.
WEIGHT_CACHES = "_transformer_plugin_weight_caches"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_state"


def weights_changed() -> None:
    """Tells layers with ``cache_weights`` that weights may have changed in a way that nothing can notice.

    Their next forwards quantize again. Needed if no step of a ``torch.optim.Optimizer`` lies between the last forward
    and the next one, after:

    - a CUDA graph that writes weights was replayed (a captured step of an optimizer is noticed);
    - a kernel of your own, or torch's fused steps called as functions, such as ``torch.optim.sgd.sgd(fused=True)``;
    - writes through ``weight.data``, ``weight.numpy()`` or another tensor over the same memory; so after each step of
      an optimizer that is no ``torch.optim.Optimizer`` and writes like this.

    Takes no argument, as it costs one quantization of each weight, in its next forward.
    """
    STEPS.advance()


class _Kept:
    """A copy, and what it is a copy of.

    Args:
        weights: the parameters themselves, as an address could be that of another one later; none where their memory
            alone is noted.
        call: what else must be the same in a call that reads the copy.
    """

    __slots__ = ("call", "memory", "storages", "tensors", "versions", "weights")

    def __init__(self, weights: tuple[Tensor, ...], call: tuple[Any, ...]) -> None:
        self.weights, self.call = weights, call
        self.memory = [_memory(weight) for weight in weights]
        self.versions = [_version(weight) for weight in weights]
        # These keep the addresses of freed storages from being those of others.
        self.storages = [StorageWeakRef(_tensor_of_memory(weight).untyped_storage()) for weight in weights]
        self.tensors: list[Tensor] | None = None

    def is_of(self, weights: tuple[Tensor, ...]) -> bool:
        """Whether the weights are as they were."""
        is_same = list(map(_version, weights)) == self.versions
        return is_same and list(map(_memory, weights)) == self.memory


class WeightCache:
    """The quantized copy of one weight. Copies and pickles of it are empty."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        # The weight that FSDP2 gathers.
        self._gathered: Tensor | None = None
        STEPS.watch()
        watch_merges()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()

    def clear(self) -> None:
        """Drops the copy."""
        self._kept = self._gathered = None

    def quantized(
        self,
        module: torch.nn.Module,
        weight: Tensor | list[Tensor],
        formats: Sequence[str],
        transposed: bool = False,
    ) -> list[Tensor] | None:
        """What ``ops.quantize_weight`` makes of a weight, now or in an earlier call.

        Args:
            module: the layer that has the weight.
            weight: its parameter, or a list of them.
            formats: of input, weight and gradient.
            transposed: whether the op takes the transposed matrices.

        Returns:
            The tensors; None if the op is to quantize the weight itself: in compiled code, a trace, a CUDA graph that
            is being captured, and where no copy can be kept.
        """
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return None
        if is_in_torch_dispatch_mode() and _is_traced():
            return None
        weights = (weight,) if isinstance(weight, Tensor) else tuple(weight)
        first, stream = weights[0], 0
        if first.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return None
            stream = torch._C._cuda_getCurrentRawStream(first.get_device())
        kept, call = self._kept, (STEPS.count(), stream, transposed, formats, _autocast_dtype(first))
        is_other = kept is None or not _are_same(weights, kept.weights)
        if kept is not None and not is_other and call == kept.call and kept.is_of(weights):
            return kept.tensors
        if is_other and (first is self._gathered or not self._takes(module, weights, formats)):
            return None
        if (
            torch._C._functorch.peek_interpreter_stack() is not None
        ):  # a tensor of torch.func's transform would be kept
            return None
        return self._made(weights, isinstance(weight, list), call)

    def _takes(self, module: torch.nn.Module, weights: tuple[Tensor, ...], formats: Sequence[str]) -> bool:
        """Whether copies of other weights than the last ones may be kept."""
        if not all(_is_keepable(weight) for weight in weights) or _is_as_it_is(weights[0], formats[1]):
            return False
        if _is_gathered(module):
            self._kept, self._gathered = None, weights[0]
            return False
        return True

    def _made(self, weights: tuple[Tensor, ...], is_list: bool, call: tuple[Any, ...]) -> list[Tensor] | None:
        made = _Kept(weights, call)
        # Other memory than before may be other memory in each forward, as of parameters that are offloaded: a copy
        # would keep what they free. It is kept if the next forward has the same.
        stays = self._kept is None or self._kept.memory == made.memory
        self._kept = None  # frees the old copy first
        tensors = _quantize(weights, is_list, call)
        if tensors is None or any(hasattr(weight, CHANGED_BY_GRAPHS) for weight in weights):
            return tensors
        if stays:
            made.tensors = tensors
        else:
            made.weights = ()
        self._kept = made
        return tensors


class WeightCaches:
    """The caches of a module with several weights, by their names."""

    def __init__(self) -> None:
        self._caches: dict[str, WeightCache] = {}
        STEPS.watch()

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCaches, ()

    def of(self, name: str) -> WeightCache:
        """That of one weight."""
        found = self._caches.get(name)
        if found is None:
            found = self._caches[name] = WeightCache()
        return found


def _autocast_dtype(weight: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts a weight; None if it leaves it as it is."""
    device = "cuda" if weight.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device) or not is_cast(weight):
        return None
    return torch.get_autocast_dtype(device)


def _are_same(weights: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return len(weights) == len(others) and all(map(is_, weights, others))


def _tensor_of_memory(weight: Tensor) -> Tensor:
    if type(weight) is Parameter:  # the common case
        return weight
    local: Tensor | None = getattr(weight, "_local_tensor", None)
    return memory_of(weight) if local is None else local


def _memory(weight: Tensor) -> tuple[Any, ...]:
    own = _tensor_of_memory(weight)
    return own.data_ptr(), own.untyped_storage()._cdata, own.dtype, own.shape, own.stride()


def _version(weight: Tensor) -> int | tuple[int, int]:
    if weight.is_inference():
        return -1  # not counted: such a weight is not kept
    if type(weight) is Parameter:
        return weight._version
    local: Tensor | None = getattr(weight, "_local_tensor", None)
    return version_of(weight) if local is None else (weight._version, local._version)


def _is_keepable(weight: Tensor) -> bool:
    """Whether a weight is a parameter whose memory is this process's own. Others are computed in each forward
    (parametrizations, pruning, weight norms), given to ``torch.func.functional_call``, or of a class that may compute
    what it holds."""
    if not isinstance(weight, Parameter) or weight.is_inference():
        return False
    own = getattr(weight, "_local_tensor", weight)
    is_grouped = isinstance(own, GroupedTensor) and not own.format.is_quantized
    if not is_grouped and type(own) not in (Parameter, Tensor):
        return False
    if own.is_meta or own.numel() == 0 or own.is_inference():
        return False
    return own.is_cuda or not _tensor_of_memory(weight).is_shared()


def _is_as_it_is(weight: Tensor, key: str) -> bool:
    """Whether the format takes a weight without changing it, or changes it at random."""
    format = parsed(key)
    is_plain = not format.is_quantized and not format.nonfinite_is_nan
    return format.stochastic_rounding or (is_plain and weight.dtype == torch.bfloat16)


def _is_traced() -> bool:
    """Whether tensors have no values, or a trace would record a copy as a constant. Other modes only look on."""
    if _len_torch_dispatch_stack_pre_dispatch() > 0:
        return True
    modes: Any = _get_current_dispatch_mode_stack()
    return any(mode.is_infra_mode() for mode in modes)


def _is_gathered(module: torch.nn.Module) -> bool:
    """Whether FSDP2 gathers parameters of a module for each forward. A copy would keep the memory that it frees, and
    FSDP2 does not count what it writes."""
    if _FSDP not in sys.modules:
        return False
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        # One group of parameters, or a list of them.
        for found in vars(reference() or object).values():
            for group in found if isinstance(found, list) else [found]:
                if any(_has_parameter_of(module, each) for each in getattr(group, "fsdp_params", ())):
                    return True
    return False


def _has_parameter_of(module: torch.nn.Module, parameter: Any) -> bool:
    info = parameter._module_info
    return info.module is module or any(shared is module for shared in info.shared_modules)


def _outside_of_modes() -> AbstractContextManager[Any]:
    """Selective checkpointing would find another sequence of ops in a recomputation that quantizes no weight."""
    return _disable_current_modes() if is_in_torch_dispatch_mode() else nullcontext()


def _quantize(weights: tuple[Tensor, ...], is_list: bool, call: tuple[Any, ...]) -> list[Tensor] | None:
    _, _, transposed, formats, dtype = call
    with torch.no_grad(), outside_of_inference_mode(), _outside_of_modes():
        values = [plain(weight) for weight in weights]
        if dtype is not None:
            values = [value.to(dtype) for value in values]
        if transposed:
            values = [value.transpose(-2, -1) for value in values]
        try:
            return ops.quantize_weight(values if is_list else values[0], *formats)
        except (TypeError, ValueError):  # the op of the layer raises it, in its own name
            return None
