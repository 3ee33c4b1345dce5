"""How wrappers take tensors that may be one or several, and formats that may be keys."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from transformer_plugin.formats import Format

Tensors = Tensor | Iterable[Tensor]


def _wrong(op: str, argument: str, expected: str, got: object, advice: str) -> TypeError:
    return TypeError(
        f"transformer_plugin::{op}: argument '{argument}': expected {expected}, got {type(got).__name__}. {advice}."
    )


def listed(tensors: Tensors, op: str, argument: str) -> list[Tensor]:
    """One tensor, or several, as a list."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, Iterable):
        return list(tensors)
    raise _wrong(
        op, argument, "a tensor or a sequence of tensors", tensors, "Pass a tensor, or a list of tensors"
    )


def listed_or_none(tensors: Tensors | None, op: str, argument: str) -> list[Tensor] | None:
    """The same for an argument that may be left out."""
    return None if tensors is None else listed(tensors, op, argument)


def weights(weight: Tensors, op: str) -> list[Tensor]:
    """A weight to quantize: a sequence of matrices is quantized as the stack of them, also if there is one."""
    tensors = listed(weight, op, "weight")
    one = len(tensors) == 1 and not isinstance(weight, Tensor) and isinstance(tensors[0], Tensor)
    return [tensors[0].unsqueeze(0)] if one and tensors[0].dim() == 2 else tensors


def matrices(inputs: Iterable[Tensor], op: str, argument: str = "inputs") -> list[Tensor]:
    """The inputs of an op that takes many matrices of different sizes."""
    if isinstance(inputs, Iterable) and not isinstance(inputs, Tensor):
        return list(inputs)
    advice = "Pass a list; quantize and amax take one matrix or a stack of matrices of one size"
    raise _wrong(op, argument, "a list of matrices", inputs, advice)


def buffers(out: Iterable[Tensor], op: str) -> list[Tensor]:
    """The tensors that an op writes."""
    if isinstance(out, Iterable) and not isinstance(out, Tensor):
        return list(out)
    raise _wrong(op, "out", "a list of tensors", out, f"Pass what {op.removesuffix('_out')} returns")


def key_of(format: str | Format, op: str, argument: str = "format") -> str:
    """The key of a format."""
    if isinstance(format, str):
        return format
    if isinstance(format, Format):
        return format.key
    expected = "a format key or a transformer_plugin.formats.Format"
    raise _wrong(op, argument, expected, format, "Pass for example 'fp8_block'")


def keys_of(formats: Iterable[str | Format], op: str) -> list[str]:
    """The keys of several formats."""
    if isinstance(formats, Iterable) and not isinstance(formats, str | bytes | Tensor):
        return [key_of(format, op, "formats") for format in formats]
    raise _wrong(op, "formats", "a sequence of formats or keys", formats, "Pass a list of them")


def queue_id(queue: Tensor | int, op: str) -> int:
    """The id of a queue of weight gradients."""
    if isinstance(queue, int) or (isinstance(queue, Tensor) and queue.numel() == 1):
        return int(queue)
    raise _wrong(op, "queue", "a queue or its id", queue, "Pass what new_wgrad_queue() returned")


def are(values: tuple[object, ...], defaults: tuple[object, ...]) -> bool:
    """Whether arguments have their defaults. Those of other types have not; the op names them."""
    try:
        return values == defaults
    except (RuntimeError, ValueError):  # a comparison of tensors or arrays, which has no truth value
        return False


def layer_keys(
    op: str, input_format: str | Format, weight_format: str | Format, grad_format: str | Format
) -> tuple[str, str, str]:
    """The keys of the three formats of a layer."""
    return (
        key_of(input_format, op, "input_format"),
        key_of(weight_format, op, "weight_format"),
        key_of(grad_format, op, "grad_format"),
    )


def quantized(
    op: str,
    a_scale: Tensors | None,
    b_scale: Tensors | None,
    a_format: str | Format,
    b_format: str | Format,
    names: tuple[str, str] = ("a", "b"),
) -> tuple[list[Tensor] | None, list[Tensor] | None, str, str] | tuple[()]:
    """The scales and formats of two operands, as the ops of products take them; nothing for unquantized ones.

    Arguments that are not passed need not be parsed, which takes a microsecond of host time.
    """
    if a_scale is None and b_scale is None and are((a_format, b_format), ("none", "none")):
        return ()
    a, b = names
    return (
        None if a_scale is None else listed(a_scale, op, f"{a}_scale"),
        None if b_scale is None else listed(b_scale, op, f"{b}_scale"),
        key_of(a_format, op, f"{a}_format"),
        key_of(b_format, op, f"{b}_format"),
    )
