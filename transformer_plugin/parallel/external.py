"""Weights of another runtime that gathers them and takes their gradients, behind four methods of the parameter."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_plugin._arguments import class_name, typed
from transformer_plugin.formats import Format
from transformer_plugin.functional._values import is_quantized
from transformer_plugin.parallel._parameter_shard import layout_of
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.tensor._base import Buffers
from transformer_plugin.tensor._layout import message

_OP = "attach_distributed_weights"
_MARK = "is_distributed_weight"
_METHODS = (
    "materialize_group_for_forward",
    "materialize_group_for_backward",
    "finalize_group_grads",
    "grad_buffer",
)
_NUMBERS = itertools.count(1)
_LAYERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_library = torch.library.Library("transformer_plugin_external", "DEF")


@typed
def attach_distributed_weights(module: torch.nn.Module) -> list[str]:
    """Lets the layers of a module use weights that another runtime shards, gathers and reduces.

    A parameter ``weight`` with the attribute ``is_distributed_weight = True`` is this rank's shard, ``[S, K]`` of
    ``[N, K]`` or ``[S, N, K]`` of ``[G, N, K]``, and has four methods, those of TransformerEngine's protocol:

    - ``materialize_group_for_forward()`` returns the unsharded weight, before the product of a forward;
    - ``materialize_group_for_backward()`` likewise before the data gradient, also where there is none, so that the
      runtime can prefetch along the order of use;
    - ``grad_buffer()`` returns where the weight gradient is written, of the sizes of the unsharded weight, if
      ``fuse_wgrad_accumulation`` is set; it is written over;
    - ``finalize_group_grads(wgrads)`` gets a list with that gradient and returns what autograd gets for the shard, of
      its sizes, or None. A list of it may take the place of the tensor here and above.

    Of a layer with ``parameters="list"``, the shards are ``weight0 [S, K]``, ``weight1``, ..., and ``weight0`` leads:
    it is marked, and its methods return and take lists of all matrices. ``grad_buffer()`` is called on each weight,
    unless that of ``weight0`` returns a list.

    The unsharded weight may have another dtype than the shard; it is converted to that of the layer's input. It may be
    a :class:`~transformer_plugin.QuantizedTensor`, or of a stack a quantized
    :class:`~transformer_plugin.GroupedTensor`: in the weight format of the layer's recipe its bytes are multiplied as
    they are, otherwise it is dequantized first. For a forward it has rowwise data; for a backward columnwise data, or
    rowwise where both have the same values.

    The backward keeps the shard, and neither the unsharded weight nor a quantized copy. A layer with a recipe quantizes
    unquantized values, and again in the backward.

    Args:
        module: with :class:`~transformer_plugin.nn.Linear`, :class:`~transformer_plugin.nn.LayerNormLinear` or
            :class:`~transformer_plugin.nn.GroupedLinear` (packed, or a list), made for the unsharded weights, with
            shards in place of these.

    Returns:
        The names of the weights. Call it again when parameters have been replaced, as ``.to()`` may do. Eager only.

    Raises:
        TypeError: a marked weight that is no tensor, or has not all methods. ValueError: a marked parameter that is no
        weight of such a layer, or that the layer cannot have. No layer is attached then.
    """
    found: list[tuple[list[str], Any]] = []
    for name, layer in module.named_modules():
        marked, prefix = _marked(layer), f"{name}." if name else ""
        if marked:
            _check(prefix, layer, marked)
            found.append(([prefix + weight for weight in _names(layer)], layer))
    for names, layer in found:
        _attach(names[0], layer)
    return [name for names, _ in found for name in names]


def _marked(layer: torch.nn.Module) -> list[str]:
    """The names of the marked parameters of a layer. That of an adapter is the weight of the layer inside."""
    computed = ("weight",) if _names(layer) else ()
    names = dict.fromkeys((*computed, *layer._parameters))
    return [name for name in names if getattr(getattr(layer, name, None), _MARK, False)]


def _names(layer: Any) -> tuple[str, ...]:
    """The names of the weights of a layer; none of one that cannot have such weights."""
    from transformer_plugin.nn._recipe import RecipeModule

    if not isinstance(layer, RecipeModule):
        return ()
    return getattr(layer, "_weight_names", ("weight",))


def _check(prefix: str, layer: Any, marked: list[str]) -> None:
    """Raises for what a layer cannot have."""
    names, leader = _names(layer), prefix + marked[0]
    for name in marked:
        if name not in names:
            _refuse(prefix + name, "marks on weights of Linear, LayerNormLinear or GroupedLinear", layer)
    if names[0] not in marked:
        _refuse(leader, f"a mark on the first weight of the layer, '{names[0]}'", layer)
    weights = [getattr(layer, name) for name in names]
    lacks = [method for method in _METHODS if not callable(getattr(weights[0], method, None))]
    if lacks or not all(isinstance(weight, Tensor) for weight in weights):
        got = f"'{leader}', a {type(weights[0]).__name__} without {lacks or 'the methods of a tensor'}"
        raise TypeError(
            message(_OP, "module", f"tensors with the methods {list(_METHODS)}", got, "Define them")
        )
    if isinstance(layer.recipe, DelayedScaling):
        _refuse(leader, "recipes without delayed scaling", layer)
    if layer.delay_wgrad_compute or any(layout_of(weight) is not None for weight in weights):
        _refuse(leader, "a layer without delay_wgrad_compute and shard_", layer)
    if any(hasattr(w, "device_mesh") or is_quantized(w) or isinstance(w, GroupedTensor) for w in weights):
        _refuse(leader, "shards that are plain tensors, neither quantized nor grouped nor DTensors", layer)
    like = weights[0]
    dim = 3 if hasattr(layer, "num_groups") and not _is_list(layer) else 2
    if like.dim() != dim or like.shape[-1] != layer.in_features or not like.is_floating_point():
        _refuse(
            leader, f"a shard of {dim} dimensions with {layer.in_features} columns", layer, _described(like)
        )
    for name, weight in zip(names, weights, strict=True):
        if weight.shape != like.shape or weight.dtype != like.dtype or weight.device != like.device:
            _refuse(
                prefix + name,
                f"shards like that of '{leader}', {_described(like)}",
                layer,
                _described(weight),
            )


def _is_list(layer: Any) -> bool:
    return getattr(layer, "parameter_layout", "packed") == "list"


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _attach(name: str, layer: Any) -> None:
    from transformer_plugin.nn._weight_source import ExternalWeight  # nn imports this package

    layer._take_weight_from(ExternalWeight(name, own_key(layer, name)))


def own_key(layer: Any, name: str) -> str:
    """The argument ``weight_shard`` of a layer's ops: how its weight is sharded, and a number by which they find it."""
    number, shard = next(_NUMBERS), getattr(layer, _names(layer)[0])
    _LAYERS[number] = layer
    rows = layer.num_groups if shard.dim() == 3 else layer.out_features
    ranks = max(1, -(-rows // max(1, shard.shape[0])))
    list_option = "list," if _is_list(layer) else ""
    return f"rows={rows},ranks={ranks},{list_option}handle={number},name={name.replace(',', '_')},group="


def _refuse(name: str, expected: str, layer: Any, shard: str = "") -> NoReturn:
    got = f"'{name}' of {class_name(layer)}({layer.extra_repr()})" + (f", {shard}" if shard else "")
    raise ValueError(
        message(_OP, "module", expected, got, f"Leave the attribute {_MARK} out there, or change the layer")
    )


def refuse_shards(op: str, argument: str, parameters: Iterable[Tensor]) -> None:
    """Raises for a shard of another runtime where a function needs what other ranks have, which that runtime knows."""
    shards = {id(shard): text for layer in list(_LAYERS.values()) for shard, text in _shards_of(layer)}
    found = next((shards[id(parameter)] for parameter in parameters if id(parameter) in shards), None)
    if found is not None:
        expected = "parameters of which this rank has all elements, or whose ranks this package knows"
        advice = "Leave these parameters out, and use what the runtime has for its own"
        raise ValueError(message(op, argument, expected, found, advice))


def _shards_of(layer: Any) -> Iterator[tuple[Tensor, str]]:
    """The weights of an attached layer that have fewer rows than the product."""
    for name in _names(layer):
        shard = layer._parameters.get(name)
        rows = layer.num_groups if shard is not None and shard.dim() == 3 else layer.out_features
        if getattr(shard, _MARK, False) and shard.shape[0] < rows:
            of_layer = f"'{name}' of {class_name(layer)}, {shard.shape[0]} of its {rows} rows"
            yield shard, f"{of_layer}, a shard of another runtime (attach_distributed_weights)"


def _weights_of(handle: int) -> tuple[Any, list[Any]]:
    layer = _LAYERS.get(handle)
    weights = [] if layer is None else [getattr(layer, name, None) for name in _names(layer)]
    leader = weights[0] if weights else None
    if not getattr(leader, _MARK, False):
        expected = "the weight that was attached"
        advice = "Call attach_distributed_weights again after parameters were replaced"
        raise ValueError(message(_OP, "weight", expected, f"a {type(leader).__name__}", advice))
    return layer, weights


def _one_each(made: Any, count: int, method: str) -> list[Any]:
    """What a runtime returned for each of its weights."""
    results = [made] if isinstance(made, Tensor) or not isinstance(made, Sequence) else list(made)
    if len(results) == 1 and count > 1 and isinstance(made, Tensor) and made.dim() == 3:
        results = list(made.unbind())  # of a list of matrices, as a stack
    if len(results) != count:
        advice = "Return what belongs to each weight, in their order"
        raise ValueError(message(method, "the result", f"{count} tensors", str(len(results)), advice))
    return results


def _unsharded(made: Any, shards: list[Tensor], layer: Any) -> list[Any]:
    """The checked values: a tensor for each shard, plain or quantized."""
    method = "materialize_group"
    stacks = shards[0].dim() == 3 and not _is_list(layer)
    made = [_replica(value) for value in made] if isinstance(made, list | tuple) else _replica(made)
    if stacks and isinstance(made, list | tuple) and all(isinstance(value, Tensor) for value in made):
        made = made[0] if len(made) == 1 and made[0].dim() == 3 else _stack(list(made))
    results = _one_each(made, len(shards), method)
    rows = layer.num_groups if stacks else layer.out_features
    shape = (rows, *shards[0].shape[1:]) if stacks else (rows, shards[0].shape[-1])
    for value in results:
        if (
            not isinstance(value, Tensor)
            or tuple(value.shape[1:]) != shape[1:]
            or not value.is_floating_point()
        ):
            got = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            expected = f"unsharded weights [N, {', '.join(map(str, shape[1:]))}] of numbers"
            raise ValueError(message(method, "the result", expected, got, "Return the unsharded weight"))
        _check_plain(method, value, shards[0])
        if value.shape[0] != shape[0]:
            expected, got = f"{rows} rows, of the layer", str(list(value.shape))
            raise ValueError(message(method, "the result", expected, got, "Strip the padding"))
    return results


def _replica(value: Any) -> Any:
    """The tensor of a DTensor of which every rank has all elements; any other value unchanged."""
    is_replicated = hasattr(value, "to_local") and all(p.is_replicate() for p in value.placements)
    return value.to_local() if is_replicated else value


def _check_plain(method: str, value: Any, shard: Tensor) -> None:
    """Raises for a result whose memory a product cannot read: of other ranks, on another device, sparse."""
    if hasattr(value, "to_local") or value.device != shard.device or value.layout != torch.strided:
        got = f"a {type(value).__name__} of layout {value.layout} on {value.device}"
        expected = f"plain or quantized tensors on {shard.device}, or DTensors that are replicated"
        advice = "Convert it, for example with .full_tensor()"
        raise ValueError(message(method, "the result", expected, got, advice))


def _stack(matrices: list[Any]) -> Any:
    """Several matrices as one tensor, a copy. Quantized ones keep their bytes."""
    if not all(is_quantized(matrix) for matrix in matrices):
        return torch.stack([m.dequantize() if is_quantized(m) else m for m in matrices])
    if len({(m.format.key, tuple(name for name, _ in m._buffers.present())) for m in matrices}) > 1:
        return torch.stack([m.dequantize() for m in matrices])
    buffers = {
        name: _stack_bytes([getattr(matrix, name) for matrix in matrices])
        for name, _ in matrices[0]._buffers.present()
    }
    first = matrices[0]
    shape = (len(matrices), *first.shape)
    return GroupedTensor._make(Buffers(**buffers), first.format.key, shape, first.dtype)


def _stack_bytes(tensors: list[Tensor]) -> Tensor:
    if tensors[0].shape == (1,):  # a scale or an amax of each matrix
        return torch.cat(tensors)
    if tensors[0].element_size() > 1:
        return torch.stack(tensors)
    return torch.stack([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)


def _serves_both(format: Format) -> bool:
    """Whether the values along rows are those along columns."""
    return format.square_blocks or format.family == "fp8_tensor"


def _one_direction(value: Any, backward: bool) -> tuple[list[Tensor], bool]:
    """The tensors of a quantized weight that a product reads, and whether they are columnwise."""
    rows = (value.rowwise_data, value.scale_inv, value.amax)
    columns = (value.columnwise_data, value.columnwise_scale_inv, value.columnwise_amax)
    columnwise = backward and columns[0] is not None
    if not columnwise and (rows[0] is None or (backward and not _serves_both(value.format))):
        direction = "columnwise" if backward else "rowwise"
        expected = f"{direction} data, for a {'backward' if backward else 'forward'}"
        got, advice = value._described(), "Gather that direction, or return unquantized values"
        raise ValueError(message("materialize_group", "the result", expected, got, advice))
    return [tensor.detach() for tensor in (columns if columnwise else rows) if tensor is not None], columnwise


_library.define(
    "materialize(Tensor[] shards, int handle, str format, bool backward) -> (Tensor[], Tensor[], bool)"
)
_library.define("buffers(Tensor[] shards, int handle, int rows, ScalarType dtype) -> Tensor[]")
_library.define("finalize(Tensor[] unsharded, Tensor[] shards, int handle) -> Tensor[]")


def _materialize(
    shards: list[Tensor], handle: int, format: str, backward: bool
) -> tuple[list[Tensor], list[Tensor], bool]:
    layer, weights = _weights_of(handle)
    leader = weights[0]
    made = leader.materialize_group_for_backward() if backward else leader.materialize_group_for_forward()
    values = _unsharded(made, shards, layer)
    if format != "none" and all(is_quantized(v) and v.format == Format.parse(format) for v in values):
        is_one = len(values) == 1 and values[0].dim() == shards[0].dim()
        return [], *_one_direction(values[0] if is_one else _stack(values), backward)
    plain = [_plain(value, shard) for value, shard in zip(values, shards, strict=True)]
    return plain, [], False


def _plain(value: Any, shard: Tensor) -> Tensor:
    """Values in the dtype of the layer's product; a matrix as a stack of one where the op has one."""
    if is_quantized(value):
        value = value.dequantize()
    elif isinstance(value, GroupedTensor):
        value = value.packed()
    plain: Tensor = value.detach().to(shard.dtype)
    return plain if plain.dim() == shard.dim() else plain.unsqueeze(0)


def _buffers(shards: list[Tensor], handle: int, rows: int, dtype: torch.dtype) -> list[Tensor]:
    layer, weights = _weights_of(handle)
    stacks = shards[0].dim() == 3 and not _is_list(layer)
    shape = (rows, *shards[0].shape[1:]) if stacks else (rows, shards[0].shape[-1])
    if not layer.fuse_wgrad_accumulation:
        made = [torch.empty(shape, dtype=dtype, device=shard.device) for shard in shards]
    else:
        made = _buffers_of(weights)
    for buffer in made:
        if not isinstance(buffer, Tensor) or tuple(buffer.shape) != shape or not buffer.is_contiguous():
            is_tensor = isinstance(buffer, Tensor)
            got = f"{list(buffer.shape)}, strides {buffer.stride()}" if is_tensor else repr(buffer)
            _refuse_buffer(f"a contiguous {list(shape)}", got)
    if len({buffer.data_ptr() for buffer in made}) < len(made) and made[0].numel() > 0:
        _refuse_buffer(f"{len(made)} buffers, one for each weight", "the same memory for several")
    pairs = zip(made, shards, strict=True)
    return [b.detach() if b.dim() == s.dim() else b.detach().unsqueeze(0) for b, s in pairs]


def _buffers_of(weights: list[Any]) -> list[Any]:
    """The runtime's buffers: a list of the first weight, or one of each weight."""
    first = weights[0].grad_buffer()
    if isinstance(first, Sequence) and not isinstance(first, Tensor):
        return _one_each(first, len(weights), "grad_buffer")
    lacks = [
        type(weight).__name__ for weight in weights if not callable(getattr(weight, "grad_buffer", None))
    ]
    if lacks:
        _refuse_buffer(
            "a list, or the method on each weight of the layer", f"one tensor, and a {lacks[0]} without it"
        )
    return [first, *(weight.grad_buffer() for weight in weights[1:])]


def _refuse_buffer(expected: str, got: str) -> NoReturn:
    advice = "Return a buffer for the gradient of each unsharded weight"
    raise ValueError(message("grad_buffer", "the result", expected, got, advice))


def _finalize(unsharded: list[Tensor], shards: list[Tensor], handle: int) -> list[Tensor]:
    layer, weights = _weights_of(handle)
    matrices = [w.squeeze(0) if _is_list(layer) and w.dim() == 3 else w for w in unsharded]
    made = weights[0].finalize_group_grads(matrices)
    results = [None] * len(shards) if made is None else _one_each(made, len(shards), "finalize_group_grads")
    gradients = []
    for result, shard, weight in zip(results, shards, weights, strict=True):
        if result is None:
            gradients.append(torch.empty((), device=shard.device))
            continue
        if not isinstance(result, Tensor) or result.shape != weight.shape:
            advice = "Return the gradient of this rank's shard, a tensor like it, or None"
            got = str(list(result.shape)) if isinstance(result, Tensor) else repr(result)
            raise ValueError(
                message("finalize_group_grads", "the result", str(list(weight.shape)), got, advice)
            )
        result = _replica(result)
        _check_plain("finalize_group_grads", result, shard)
        gradients.append(result.detach().view(shard.shape))
    return gradients


for _name, _function in (("materialize", _materialize), ("buffers", _buffers), ("finalize", _finalize)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
