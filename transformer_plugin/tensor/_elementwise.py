"""Ops on the storage of unquantized values, elementwise and collective, and plain tensors of the shape of a value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_plugin.tensor._base import FormatTensor
from transformer_plugin.tensor._checks import bump_versions, check_inference, refuse
from transformer_plugin.tensor._table import HANDLERS, handles, name_of, values_in
from transformer_plugin.tensor.grouped import GroupedTensor


@handles(
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A plain tensor: the states of an optimizer are plain."""
    value = args[0]
    like = torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)
    kwargs.pop("memory_format", None)  # contiguous, as the value is
    if func._schema.name.endswith("_like"):
        kwargs["memory_format"] = torch.contiguous_format
    result: Tensor = func(like, *args[1:], **kwargs)
    return result


# Elementwise ops on the storage of unquantized values.


def unwrapped(argument: Any, func: Any) -> Any:
    """The arguments with unquantized values replaced by their storage, in their shape."""
    if isinstance(argument, FormatTensor):
        if argument.format.is_quantized:
            argument._refuse(
                "self",
                "values in high precision",
                f"{name_of(func)} of a {argument._described()}",
                "Keep values in high precision, change those, and quantize them with copy_()",
            )
        return argument._buffers.rowwise_data
    if isinstance(argument, list | tuple):
        return type(argument)(unwrapped(a, func) for a in argument)
    return argument


def _tail_mask(value: Any) -> Tensor:
    """Which rows of a ragged value lie past its groups: bool ``[T, 1]``."""
    rows = torch.arange(value.shape[0], device=value.device)
    return (rows >= value._buffers.group_sizes.sum())[:, None]


def _is_ragged(value: object) -> bool:
    return isinstance(value, GroupedTensor) and value.is_ragged


def _refuse_ragged(func: Any, value: FormatTensor) -> NoReturn:
    advice = "Call packed(), whose rows past the groups may hold anything"
    got = f"{name_of(func)} of a ragged {value._described()}"
    value._refuse("self", "members whose sizes the host knows", got, advice)


def _check_sources(func: Any, written: Any, sources: Iterable[Any]) -> None:
    """Refuses a ragged value that is read into a tensor without groups, where its rows past the groups would count."""
    for source in sources:
        # Lists are of one length: an element goes into the one at its place.
        for read, target in zip(
            source if isinstance(source, list | tuple) else [source], written, strict=False
        ):
            if _is_ragged(read) and not _is_ragged(target):
                _refuse_ragged(func, read)


def in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the storage itself; of a ragged value only in the rows of its groups."""
    written = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    ragged = [value for value in written if _is_ragged(value)]
    if len(ragged) < len(written) and "copy_" not in func._schema.name:
        _check_sources(func, written, (*args[1:], *kwargs.values()))
    if isinstance(args[0], list | tuple):  # of a single tensor torch checks it
        for value in values_in(written):
            check_inference(value)
    plain = unwrapped(args, func)
    kwargs = {name: unwrapped(value, func) for name, value in kwargs.items()}
    before = [value._buffers.rowwise_data.clone() for value in ragged]
    func(*plain, **kwargs)
    for value, old in zip(ragged, before, strict=True):
        data = value._buffers.rowwise_data
        assert data is not None
        data.copy_(torch.where(_tail_mask(value), old, data))
    values = [value for value in written if isinstance(value, FormatTensor)]
    bump_versions(value.rowwise_data for value in values if value.rowwise_data is not None)
    if isinstance(args[0], list | tuple):  # torch counts the change of a single tensor itself
        bump_versions(values)
    return None if isinstance(args[0], list | tuple) or not func._schema.returns else args[0]


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain result of unquantized values of one size: what optimizers and logs compute of a parameter."""
    for value in values_in(args):
        if _is_ragged(value):
            _refuse_ragged(func, value)
    return func(*unwrapped(args, func), **{name: unwrapped(value, func) for name, value in kwargs.items()})


_IN_PLACE = (
    *(
        "add_",
        "sub_",
        "mul_",
        "div_",
        "addcmul_",
        "addcdiv_",
        "lerp_",
        "neg_",
        "abs_",
        "sqrt_",
        "rsqrt_",
        "pow_",
    ),
    *(
        "reciprocal_",
        "exp_",
        "sign_",
        "erfinv_",
        "clamp_",
        "clamp_min_",
        "clamp_max_",
        "nan_to_num_",
        "masked_fill_",
    ),
    *("zero_", "fill_", "normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_"),
)
_FOREACH = (
    "add",
    "sub",
    "mul",
    "div",
    "addcmul",
    "addcdiv",
    "lerp",
    "neg",
    "abs",
    "sqrt",
    "reciprocal",
    "pow",
    "sign",
)
_FOREACH_IN_PLACE = (*_FOREACH, "exp", "zero", "clamp_min", "clamp_max", "maximum", "minimum", "copy")
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_SCALER = ("_amp_foreach_non_finite_check_and_unscale_",)
_READ = (
    *("add", "sub", "mul", "div", "rsub", "neg", "abs", "pow", "sqrt", "lerp", "sign", "maximum", "minimum"),
    *("sgn", "reciprocal"),  # gradients of others
    *("sum", "mean", "amax", "amin", "max", "min", "norm", "linalg_vector_norm", "var", "std"),
    *("isnan", "isfinite", "isinf", "eq", "ne", "lt", "le", "gt", "ge", "all", "any", "count_nonzero"),
    *(f"_foreach_{name}" for name in (*_FOREACH, "norm", "maximum", "minimum")),
)
handles(*_IN_PLACE, *(f"_foreach_{name}_" for name in _FOREACH_IN_PLACE), *_FUSED, *_SCALER)(in_place)
handles(*_READ)(_read)


#: The weights of layers, and the arguments that hold their quantized data.
_QUANTIZED_WEIGHTS = {
    "weight": "quantized_weight",
    "fc1_weight": "quantized_fc1_weight",
    "fc2_weight": "quantized_fc2_weight",
}


def _in_layer(func: Any, name: str, argument: Any, given: dict[str, Any]) -> Any:
    """A weight of a layer as the op below autograd takes it: of a quantized one the op reads another argument."""
    if isinstance(argument, list | tuple):
        return type(argument)(_in_layer(func, name, a, given) for a in argument)
    if not isinstance(argument, FormatTensor):
        return argument
    if not argument.format.is_quantized:
        return argument.rowwise_data
    data = _QUANTIZED_WEIGHTS.get(name)
    if data is None or given.get(data) is None:
        _refuse_in_layer(func, name, argument, data)
    return torch.empty((), dtype=argument.dtype, device=argument.device).expand(argument.shape)


def _refuse_in_layer(func: Any, name: str, argument: FormatTensor, data: str | None) -> NoReturn:
    op = func._schema.name.partition("::")[2]
    expected = "a tensor" if data is None else f"a tensor, or a quantized value whose buffers are '{data}'"
    advice = "Call dequantize() on it" if data is None else f"Pass '{data}', or call dequantize() on it"
    refuse(op, name, expected, argument._described(), advice)


def _layer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    plain = {name: _in_layer(func, name, value, given) for name, value in given.items()}
    return func(*(plain[name] for name in names[: len(args)]), **{name: plain[name] for name in kwargs})


HANDLERS.update(
    {
        f"transformer_plugin::{name}": _layer
        for name in (
            *("linear", "norm_linear", "grouped_linear", "grouped_mlp"),
            *("linear_out", "grouped_linear_out", "grouped_mlp_out"),
        )
    }
)


def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the storage of unquantized values: what torch.distributed does to parameters."""
    return func(*unwrapped(args, func), **{name: unwrapped(value, func) for name, value in kwargs.items()})


HANDLERS.update(
    {f"c10d::{name}": _collective for name in ("broadcast_", "allreduce_", "allgather_", "_allgather_base_")}
)
