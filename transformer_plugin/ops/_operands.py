"""How wrappers take tensors that may be one or several, and formats that may be keys."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from transformer_plugin.formats import Format

Tensors = Tensor | Iterable[Tensor]


def listed(tensors: Tensors) -> list[Tensor]:
    """One tensor, or several, as a list."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, Iterable):
        return list(tensors)
    raise TypeError(
        f"transformer_plugin.ops: argument 'tensors': expected a tensor or a sequence of them, got "
        f"{type(tensors).__name__}. Pass a tensor, or a list of tensors."
    )


def matrices(inputs: Iterable[Tensor], op: str) -> list[Tensor]:
    """The inputs of an op that takes many matrices of different sizes."""
    if isinstance(inputs, Iterable) and not isinstance(inputs, Tensor):
        return list(inputs)
    raise TypeError(
        f"transformer_plugin::{op}: argument 'inputs': expected a list of matrices, got {type(inputs).__name__}. "
        "Pass a list; quantize and amax take one matrix or a stack of matrices of one size."
    )


def key_of(format: str | Format, argument: str = "format") -> str:
    """The key of a format."""
    if isinstance(format, str):
        return format
    if isinstance(format, Format):
        return format.key
    raise TypeError(
        f"transformer_plugin.ops: argument '{argument}': expected a format key or a "
        f"transformer_plugin.formats.Format, got {type(format).__name__}. Pass for example 'fp8_block'."
    )


def layer_keys(
    input_format: str | Format, weight_format: str | Format, grad_format: str | Format
) -> tuple[str, str, str]:
    """The keys of the three formats of a layer."""
    return (
        key_of(input_format, "input_format"),
        key_of(weight_format, "weight_format"),
        key_of(grad_format, "grad_format"),
    )


def quantized(
    a_scale: Tensors | None, b_scale: Tensors | None, a_format: str | Format, b_format: str | Format
) -> tuple[list[Tensor] | None, list[Tensor] | None, str, str] | tuple[()]:
    """The scales and formats of two operands, as the ops of products take them; nothing for unquantized ones.

    Arguments that are not passed need not be parsed, which takes a microsecond of host time.
    """
    if a_scale is None and b_scale is None and a_format == "none" and b_format == "none":
        return ()
    return (
        None if a_scale is None else listed(a_scale),
        None if b_scale is None else listed(b_scale),
        key_of(a_format, "a_format"),
        key_of(b_format, "b_format"),
    )
