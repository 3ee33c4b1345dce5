"""Errors of every op: a refused call raises an error of four parts that names the op, and does not change any byte of
its arguments.

The valid calls of testing/every_op.py run with one argument changed, for all ops of the registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin.testing.every_op import Call, calls, registered

#: Calls that are not repeated.
ONCE = ("all_gather_text", "release_group", "release_wgrad_queue")
#: One rank agrees with itself, and the borders of a region take any tensor.
REFUSE_LITTLE = ("compare_header", "enter_gather_region", "is_symmetric", "leave_gather_region")
CALLS = [call for call in calls() if call.arguments and call.op not in ONCE]
IDS = [f"{call.op}-{call.name}" for call in CALLS]
#: What an op writes, or its backward.
BUFFERS = {
    op: [
        a.name
        for a in schema.arguments
        if (a.alias_info is not None and a.alias_info.is_write) or a.name.endswith(("main_grad", "dgrad_out"))
    ]
    for op, schema in registered().items()
}
ops = torch.ops.transformer_plugin
Change = tuple[str, dict[str, Any]]


def test_every_op_is_in_the_table() -> None:
    assert {call.op for call in calls()} == set(registered())


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_valid_calls_are_accepted(call: Call) -> None:
    call.function(**copied(call.arguments))


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_refused_call_names_its_op_and_writes_nothing(call: Call) -> None:
    tried = refused = 0
    for change, arguments in changes(call):
        if call.op == "rms_norm" and change.endswith(": nested"):
            continue  # for nested tensors, torch's own rms_norm handles the call
        before = bytes_of(arguments)
        tried += 1
        try:
            call.function(**arguments)
        except (ValueError, TypeError) as error:
            refused += 1
            assert re.match(
                rf"transformer_plugin::{call.packet}: argument '[\w\[\]]+': expected .*, got .*\. \S",
                str(error),
                re.DOTALL,
            ), f"{change}: {error}"
            assert_same_bytes(arguments, before, change)
    # Some changes are valid calls.
    assert 4 * refused >= tried or call.op in REFUSE_LITTLE


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_unsuitable_buffers_are_refused(call: Call) -> None:
    for change, arguments in unsuitable_buffers(call):
        before = bytes_of(arguments)
        with pytest.raises((ValueError, TypeError), match=f"^transformer_plugin::{call.packet}: argument '"):
            pytest.fail(f"{change}: {call.function(**arguments)}")
        assert_same_bytes(arguments, before, change)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_negative_views_are_read_as_their_values(call: Call) -> None:
    """An input with the negative bit, whose memory contains the negated values, gives the same results."""
    expected = call.function(**copied(call.arguments))
    outputs_of = BUFFERS[call.op]
    for name, value in call.arguments.items():
        if name in outputs_of or not isinstance(value, Tensor) or value.dtype not in NEGATED:
            continue
        arguments = copied(call.arguments)
        arguments[name] = torch._neg_view(-value)
        assert arguments[name].is_neg()
        same = copied(call.arguments)
        found, wanted = call.function(**arguments), call.function(**same)
        assert_same(found, wanted if expected is not None else None, name)
        for buffer in outputs_of:
            if isinstance(arguments.get(buffer), (Tensor, list)):
                assert_same(arguments[buffer], same[buffer], name)


@pytest.mark.parametrize("sizes", [[16, 0, 32], (16, 0, 32)])
@pytest.mark.parametrize(
    "call", [c for c in CALLS if isinstance(c.arguments.get("group_sizes"), Tensor)], ids=repr
)
def test_list_of_sizes_is_refused(call: Call, sizes: Any) -> None:
    text = f"transformer_plugin::{call.packet}: argument 'group_sizes': expected a tensor"
    with pytest.raises(TypeError, match=re.escape(text)):
        call.function(**{**call.arguments, "group_sizes": sizes})


@pytest.mark.parametrize("wants_grad", [False, True])
@pytest.mark.parametrize("name", ["linear", "norm_linear", "grouped_linear", "grouped_mlp"])
def test_layers_are_named_in_errors_about_rows(name: str, wants_grad: bool) -> None:
    """Also if only the weight gradient needs quantized columns, which requires blocks of 16 rows for nvfp4."""
    [call] = [call for call in CALLS if call.op == name and call.name == "nvfp4"]
    arguments = {k: v for k, v in copied(call.arguments).items() if not k.startswith("quantized")}
    weight = "fc1_weight" if name == "grouped_mlp" else "weight"
    for tensor in flat(arguments[weight]):
        tensor.requires_grad_(wants_grad)
    for own in ("input", "probs", "bias_scale"):
        if own in arguments:
            arguments[own] = arguments[own][:21].detach()
    if "group_sizes" in arguments:
        arguments["group_sizes"] = torch.tensor([5, 0, 16])
    if not wants_grad:
        assert flat(getattr(ops, name)(**arguments))[0].shape[0] == 21
        return
    with pytest.raises(
        ValueError, match=f"^transformer_plugin::{name}: argument 'input': expected a number of rows"
    ):
        getattr(ops, name)(**arguments)


NEGATED = (torch.float32, torch.bfloat16)


def assert_same(found: Any, wanted: Any, name: str) -> None:
    for x, y in zip(flat(found), flat(wanted), strict=True):
        assert torch.equal(raw(x), raw(y)), name


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for item in value for x in flat(item)] if isinstance(value, (list, tuple)) else []


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


def raw(tensor: Tensor) -> Tensor:
    """Returns the bytes of the tensor's storage."""
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        return torch.empty(0, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).clone()  # type: ignore[call-overload]


def bytes_of(arguments: dict[str, Any]) -> dict[str, list[Tensor]]:
    return {name: [raw(x.detach()) for x in flat(value)] for name, value in arguments.items()}


def assert_same_bytes(arguments: dict[str, Any], before: dict[str, list[Tensor]], change: str) -> None:
    for name, bytes_before in before.items():
        for x, y in zip(flat(arguments[name]), bytes_before, strict=True):
            assert torch.equal(raw(x.detach()), y), f"{change}: '{name}' was written"


def unsupported_layouts(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields replacements of a tensor: another dtype, device, shape or layout, and sizes that do not fit."""
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
    yield "dtype", torch.zeros(tensor.shape, dtype=other)
    yield "int8", torch.zeros(tensor.shape, dtype=torch.int8)
    yield "meta", torch.empty_like(tensor, device="meta")
    yield "a dimension more", tensor[None]
    yield "sparse", torch.ones(2, 2).to_sparse()
    yield "nested", torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    if tensor.dim() > 0:
        yield "a dimension less", tensor.select(0, 0).clone() if tensor.shape[0] else tensor.flatten()
    for d in range(tensor.dim()):
        sizes = list(tensor.shape)
        sizes[d] += 1
        grown = torch.zeros(sizes, dtype=torch.uint8 if tensor.element_size() == 1 else tensor.dtype)
        yield f"size {d}", grown.view(tensor.dtype)
        sizes[d] = 0
        yield f"no size {d}", torch.empty(sizes, dtype=tensor.dtype)
    if tensor.dtype in (torch.int32, torch.int64):
        for value in (-1, 17, 2**30, torch.iinfo(tensor.dtype).max):
            yield f"all {value}", torch.full_like(tensor, value)


def changes(call: Call) -> Iterator[Change]:
    """Yields the arguments with one of them changed, and a description of the change."""
    for name, value in call.arguments.items():
        others: list[tuple[str, Any]] = []
        if isinstance(value, Tensor):
            others = list(unsupported_layouts(value))
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):
            others = [("no last", value[:-1]), ("one more", [*value, value[0].clone()])]
            others += [
                (f"first {what}", [other, *value[1:]]) for what, other in unsupported_layouts(value[0])
            ]
        elif isinstance(value, str) and name != "group_name" and name != "text":
            others = [
                (text, text) for text in ("", "no such thing", "fp8_block:square", "nvfp4:rht", "mxfp8")
            ]
        elif isinstance(value, int) and not isinstance(value, bool) and name != "timeout_ms":
            others = [(str(number), number) for number in (-1, 2**31, 2**62)]
        for what, other in others:
            if name in BIG_MEMORY and isinstance(other, int) and other > 0:
                continue
            yield f"{name}: {what}", {**copied(call.arguments), name: other}


#: Sizes of outputs: large values would fail in the allocator.
BIG_MEMORY = {"capacity", "num_rows", "num_tokens", "tokens", "num_experts", "max_tokens", "hidden_size"}


def unsuitable_buffers(call: Call) -> Iterator[Change]:
    """Yields calls whose buffer requires a gradient, has the negative bit, or overlaps another argument."""
    for name in BUFFERS[call.op]:
        value_of_buffer = call.arguments.get(name)
        if value_of_buffer is None:
            continue
        place: Callable[[Tensor], Any] = lambda x: x  # noqa: E731
        if isinstance(value_of_buffer, list):
            rest = value_of_buffer[1:]
            place = lambda x, rest=rest: [x, *copied(rest)]  # noqa: E731
        buffer = flat(value_of_buffer)[0]
        if buffer.dtype in (torch.float32, torch.bfloat16):
            yield (
                f"{name}: gradient",
                {**copied(call.arguments), name: place(buffer.clone().requires_grad_())},
            )
            yield (
                f"{name}: negative",
                {**copied(call.arguments), name: place(torch._neg_view(buffer.clone()))},
            )
        for other, value in call.arguments.items():
            for x in flat(value)[:1]:
                overlap = overlapping(buffer, x) if other != name else None
                if overlap is None:
                    continue
                arguments = {**copied(call.arguments), name: place(overlap[0])}
                arguments[other] = [overlap[1], *copied(value[1:])] if isinstance(value, list) else overlap[1]
                yield f"{name} in the memory of {other}", arguments


def overlapping(buffer: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns both tensors in one storage: the smaller one is in the first bytes of the larger one, which keeps its
    values."""
    if buffer.numel() == 0 or other.numel() == 0:
        return None
    size = max(buffer.nbytes, other.nbytes)
    memory = torch.zeros(size, dtype=torch.uint8)
    source = other if other.nbytes >= buffer.nbytes else buffer
    memory[: source.nbytes] = source.contiguous().view(-1).view(torch.uint8)
    memory[: other.nbytes] = other.contiguous().view(-1).view(torch.uint8)
    first, second = (memory[: x.nbytes].view(x.dtype).view(x.shape) for x in (buffer, other))
    return first, second


def test_negative_views_of_quantized_data_are_refused() -> None:
    data, scale = ops.quantize(torch.randn(16, 32), "mxfp8")[:2]
    for wrong in ((torch._neg_view(data), scale), (data, torch._neg_view(scale))):
        with pytest.raises(
            ValueError, match=r"^transformer_plugin::dequantize: argument '\w+': expected quantized v"
        ):
            ops.dequantize(*wrong, "mxfp8", torch.float32)


def test_slots_with_too_many_columns_are_refused() -> None:
    slot = torch.empty(0, 2**40, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"^transformer_plugin::dispatch_backward: argument 'slot': expected at m"
    ):
        ops.dispatch_backward(None, torch.randn(8), slot, 0, 32, torch.float32, True, True, "", 1000)
