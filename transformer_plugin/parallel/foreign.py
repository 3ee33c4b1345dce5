"""Weights of another runtime that gathers them and takes their gradients, behind four methods of the parameter."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_plugin.parallel._weight_part import layout_of
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.tensor._layout import message

_OP = "attach_distributed_weights"
_METHODS = (
    "materialize_group_for_forward",
    "materialize_group_for_backward",
    "finalize_group_grads",
    "grad_buffer",
)
_NUMBERS = itertools.count(1)
_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_library = torch.library.Library("transformer_plugin_foreign", "DEF")


def attach_distributed_weights(module: torch.nn.Module) -> list[str]:
    """Lets the layers of a module use weights that another runtime shards, gathers and reduces.

    A parameter ``weight`` with the attribute ``is_distributed_weight = True`` is this rank's part, ``[S, K]`` of
    ``[N, K]`` or ``[S, N, K]`` of ``[G, N, K]``, and has four methods, those of TransformerEngine's protocol:

    - ``materialize_group_for_forward()`` returns the whole weight, before the product of a forward;
    - ``materialize_group_for_backward()`` likewise before the data gradient, also where there is none, so that the
      runtime can prefetch along the order of use;
    - ``grad_buffer()`` returns where the weight gradient is written, of the sizes of the whole weight, if
      ``fuse_wgrad_accumulation`` is set; it is written over;
    - ``finalize_group_grads(wgrads)`` gets that gradient and returns what autograd gets for the part, of its sizes, or
      None. A list may take the place of one tensor in arguments and results.

    The backward keeps the part, and neither the whole weight nor a quantized copy. A layer with a recipe quantizes what
    it gets, and again in the backward.

    Args:
        module: with :class:`~transformer_plugin.nn.Linear`, :class:`~transformer_plugin.nn.LayerNormLinear` or packed
            :class:`~transformer_plugin.nn.GroupedLinear`, made for the whole weights, with parts in place of these.

    Returns:
        The names of the weights. Call it again when parameters have been replaced, as ``.to()`` may do. Eager only.

    Raises:
        TypeError: a marked weight that is no tensor, or has not all methods. ValueError: a layer that cannot have one.
    """
    from transformer_plugin.nn._recipe import RecipeModule

    found = []
    for name, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if not getattr(weight, "is_distributed_weight", False):
            continue
        full = f"{name}.weight" if name else "weight"
        missing = [method for method in _METHODS if not callable(getattr(weight, method, None))]
        if not isinstance(weight, Tensor) or missing:
            got = f"'{full}', a {type(weight).__name__} without {missing or 'the methods of a tensor'}"
            text = message(_OP, "module", f"tensors with the methods {list(_METHODS)}", got, "Define them")
            raise TypeError(text)
        if not isinstance(layer, RecipeModule) or layer.delay_wgrad_compute or layout_of(weight) is not None:
            _refuse(
                full, "Linear, LayerNormLinear or GroupedLinear without delay_wgrad_compute or shard_", layer
            )
        if isinstance(layer.recipe, DelayedScaling):
            _refuse(full, "recipes without delayed scaling", layer)
        found.append((full, layer, weight))
    for full, layer, weight in found:
        _attach(full, layer, weight)
    return [full for full, _, _ in found]


def _attach(name: str, layer: Any, weight: Any) -> None:
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    whole = layer.num_groups if weight.dim() == 3 else layer.out_features
    ranks = max(1, -(-whole // max(1, weight.shape[0])))
    key = f"rows={whole},ranks={ranks},handle={number},name={name.replace(',', '_')},group="
    layer.weight_shard = layer.named_weight_shard = key
    layer.gathers_quantized, layer.is_gathered_elsewhere = False, True
    layer.forget_quantized_weights()


def _refuse(name: str, expected: str, layer: Any) -> NoReturn:
    got = f"'{name}' of {type(layer).__name__}({layer.extra_repr()})"
    raise ValueError(
        message(_OP, "module", expected, got, "Leave the attribute is_distributed_weight out there")
    )


def _weight_of(handle: int) -> tuple[Any, Any]:
    layer = _LAYERS.get(handle)
    weight = None if layer is None else layer.weight
    if not getattr(weight, "is_distributed_weight", False):
        expected = "the weight that was attached"
        advice = "Call attach_distributed_weights again after parameters were replaced"
        raise ValueError(message(_OP, "weight", expected, f"a {type(weight).__name__}", advice))
    return layer, weight


def _one(value: Any, part: Tensor) -> Tensor:
    """One tensor of what a runtime returns; a list of experts becomes a stack, which is a copy."""
    if isinstance(value, Sequence) and not isinstance(value, Tensor):
        value = value[0] if len(value) == 1 and value[0].dim() == part.dim() else torch.stack(list(value))
    if not isinstance(value, Tensor) or value.shape[1:] != part.shape[1:] or value.dtype != part.dtype:
        got = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        expected = f"whole weights [N, {', '.join(map(str, part.shape[1:]))}] of {part.dtype}"
        advice = "Return the whole weight in the dtype of the part"
        raise ValueError(message("materialize_group", "the result", expected, got, advice))
    return value.detach()


_library.define("materialize(Tensor part, int handle, bool backward) -> Tensor")
_library.define("buffer(Tensor part, int handle, int rows, ScalarType dtype) -> Tensor")
_library.define("finalize(Tensor whole, Tensor part, int handle) -> Tensor")


def _materialize(part: Tensor, handle: int, backward: bool) -> Tensor:
    layer, weight = _weight_of(handle)
    made = weight.materialize_group_for_backward() if backward else weight.materialize_group_for_forward()
    whole = _one(made, part)
    rows = layer.num_groups if part.dim() == 3 else layer.out_features
    if whole.shape[0] != rows:
        advice = "Strip the padding"
        got = str(list(whole.shape))
        raise ValueError(
            message("materialize_group", "the result", f"{rows} rows, of the layer", got, advice)
        )
    return whole


def _buffer(part: Tensor, handle: int, rows: int, dtype: torch.dtype) -> Tensor:
    layer, weight = _weight_of(handle)
    shape = (rows, *part.shape[1:])
    if not layer.fuse_wgrad_accumulation:
        return torch.empty(shape, dtype=dtype, device=part.device)
    buffer: Tensor = weight.grad_buffer()
    if tuple(buffer.shape) != shape or not buffer.is_contiguous():
        advice = "Return a buffer for the gradient of the whole weight"
        got = f"{list(buffer.shape)}, strides {buffer.stride()}"
        raise ValueError(message("grad_buffer", "the result", f"a contiguous {list(shape)}", got, advice))
    return buffer.detach()


def _finalize(whole: Tensor, part: Tensor, handle: int) -> Tensor:
    _, weight = _weight_of(handle)
    made = weight.finalize_group_grads([whole])
    if isinstance(made, Sequence) and not isinstance(made, Tensor):
        made = made[0] if made else None
    if made is None:
        return torch.empty((), device=part.device)
    if made.shape != part.shape:
        advice = "Return the gradient of this rank's part, a tensor like it, or None"
        got = str(list(made.shape))
        raise ValueError(message("finalize_group_grads", "the result", str(list(part.shape)), got, advice))
    gradient: Tensor = made.detach()
    return gradient


for _name, _function in (("materialize", _materialize), ("buffer", _buffer), ("finalize", _finalize)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
