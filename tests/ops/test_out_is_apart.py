"""A buffer that overlaps an argument which is read while the buffer is written is refused, and is unchanged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import quantized_arguments, wgrad_arguments
from transformer_plugin.testing.quantize_cases import BOTH

SIZES = (4, 3, 5)
G, T, N, K = len(SIZES), sum(SIZES), 32, 64


def placed_in(out: Tensor, values: Tensor) -> Tensor:
    """Copies ``values`` into the first bytes of ``out``, and returns them as a view."""
    before = out.view(-1).view(torch.uint8)[: values.numel() * values.element_size()].view(values.dtype)
    before.copy_(values.reshape(-1))
    return before.view(values.shape)


#: An op, the arguments it reads by name, and the buffer.
Call = tuple[Callable[..., Any], dict[str, Any], Tensor]


def calls() -> Iterator[tuple[str, Call]]:
    generator = torch.Generator().manual_seed(2)

    def normals(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    sizes, a, b = {"group_sizes": torch.tensor(SIZES)}, normals(T, K), normals(G, N, K)
    factors, one = {"alpha": normals(G), "beta": normals(G)}, {"alpha": normals(1), "beta": normals(1)}
    rows, main_grad, grad = torch.zeros(T, N), torch.zeros(G, N, K), normals(T, N)
    yield "gemm_out", (ops.gemm_out, {"a": a, "b": b[0], **one}, rows)
    more = {**sizes, **factors, "bias": normals(G, N), "bias_scale": normals(T), "rows": torch.arange(T)}
    yield "grouped_gemm_out", (ops.grouped_gemm_out, {"a": a, "b": b, **more}, rows)
    yield "grouped_gemm_out with a list", (ops.grouped_gemm_out, {"a": a, "b": list(b.clone()), **more}, rows)
    more = {**sizes, **factors, "input_rows": torch.arange(T), "grad_rows": torch.arange(T)}
    more["accumulate"] = False
    wgrad_out = ops.grouped_gemm_wgrad_out
    yield "grouped_gemm_wgrad_out", (wgrad_out, {"grad": grad, "input": a, **more}, main_grad)
    more = {**sizes, **factors, "accumulate": False}
    for key in ("fp8_tensor", "fp8_block"):
        square = key + (":square" if key == "fp8_block" else "")
        dense = quantized_arguments(ops.quantize(a, key), ops.quantize(b[0], square), key, square)
        yield f"gemm_out {key}", (ops.gemm_out, dense | one, rows)
        operands = ops.quantize(a, key, sizes["group_sizes"]), ops.quantize(b, square)
        grouped = quantized_arguments(*operands, key, square) | sizes | factors
        yield f"grouped_gemm_out {key}", (ops.grouped_gemm_out, grouped, rows)
        columns = [
            ops.quantize(x, key, sizes["group_sizes"], rowwise=False, columnwise=True) for x in (grad, a)
        ]
        of_weight = wgrad_arguments(columns[0], columns[1], key, key) | more
        yield f"grouped_gemm_wgrad_out {key}", (wgrad_out, of_weight, main_grad)


CALLS = dict(calls())


def with_each_tensor_replaced(
    arguments: dict[str, Any],
) -> Iterator[tuple[Tensor, Callable[[Tensor], dict[str, Any]]]]:
    """Yields each tensor that is read, and a function that returns the arguments with another tensor in its place."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield value, lambda other, name=name: {**arguments, name: other}
        for i, tensor in enumerate(value if isinstance(value, list) else []):
            yield (
                tensor,
                lambda other, name=name, value=value, i=i: {
                    **arguments,
                    name: [*value[:i], other, *value[i + 1 :]],
                },
            )


@pytest.mark.parametrize("name", list(CALLS))
def test_overlapping_buffer_is_refused(name: str) -> None:
    op, read, out = CALLS[name]
    op(**read, out=out)  # with separate memory
    refused = 0
    for value, with_other in with_each_tensor_replaced(read):
        buffer = torch.zeros_like(out)
        if value.numel() * value.element_size() > buffer.numel() * buffer.element_size():
            continue
        own = placed_in(buffer, value)
        before = buffer.clone()
        with pytest.raises(ValueError, match="argument 'out': expected a buffer apart from '"):
            op(**with_other(own), out=buffer)
        assert torch.equal(buffer.view(torch.uint8), before.view(torch.uint8))
        refused += 1
    assert refused >= 2  # others are larger than the buffer


def quantize_calls() -> Iterator[tuple[str, tuple[str, dict[str, Tensor], list[Tensor]]]]:
    """Yields calls of quantize_out with four buffers: the format, the arguments it reads, and the buffers it
    writes."""
    generator = torch.Generator().manual_seed(3)
    input, sizes = torch.randn(256, 128, generator=generator), torch.tensor([100, 0, 140])
    noop = {"noop": torch.zeros(1)}
    for key in ("fp8_tensor", "fp8_block", "mxfp8", "nvfp4:sr"):
        more: dict[str, Tensor] = {}
        if key.startswith("nvfp4"):
            more = {"amax": ops.amax(input, key), "amax_t": ops.amax(input, key), "seed": torch.tensor([7])}
        outputs = list(ops.quantize(input, key, **more, columnwise=True))
        yield key, (key, {"input": input, **more, **noop}, outputs)
    outputs = list(ops.quantize(input, "fp8_block", sizes, columnwise=True))
    read = {"input": input, "group_sizes": sizes, **noop}
    yield "grouped fp8_block", ("fp8_block", read, outputs)


QUANTIZE_CALLS = dict(quantize_calls())
BUFFERS = ("out[0]", "out[1]", "out[2]", "out[3]")


@pytest.mark.parametrize("name", list(QUANTIZE_CALLS))
def test_overlapping_buffers_of_quantize_out_are_refused(name: str) -> None:
    key, read, outputs = QUANTIZE_CALLS[name]
    written = dict(zip(BUFFERS, outputs, strict=True))

    def quantize(arguments: dict[str, Tensor]) -> None:
        out = [arguments[name] for name in BUFFERS]
        others = {name: value for name, value in arguments.items() if name not in BUFFERS}
        ops.quantize_out(format=key, out=out, **others, **BOTH)

    quantize({**read, **written})  # with separate memory for each
    everything = {**read, **written}
    refused = 0
    for i, (later, own) in enumerate(everything.items()):
        for earlier, other in list(everything.items())[:i]:
            if later in read or other.nbytes < own.nbytes:
                continue
            shared = other.clone()
            arguments = {**everything, earlier: shared, later: placed_in(shared, own)}
            before = shared.view(-1).view(torch.uint8).clone()
            becomes = "read while it is written" if earlier in read else "written at the same time"
            text = f"argument '{later}': expected a buffer apart from '{earlier}', which is {becomes}, got "
            with pytest.raises(ValueError, match=re.escape(text)):
                quantize(arguments)
            assert torch.equal(shared.view(-1).view(torch.uint8), before)
            refused += 1
    assert refused >= 5


def test_amax_that_overlaps_an_input_is_refused() -> None:
    """Also an amax that the op collects, and amaxes of a list, whose later matrices are read after the first amax
    is written."""
    wide = torch.arange(1.0, 9.0).view(2, 4)
    state = torch.ones(3)
    key = "fp8_tensor:e4m3"
    first_row = wide.view(-1)[:2]
    refused: dict[str, tuple[str, Callable[[], object]]] = {
        "scale": ("amax", lambda: ops.quantize_scaled(wide, state, key, state)),
        "input": ("amax", lambda: ops.quantize_scaled(wide, state, key, wide.view(-1)[4:7], columnwise=True)),
        "inputs": ("amax", lambda: ops.amax_list_out([wide, wide], key, first_row)),
        "inputs ": ("amax_t", lambda: ops.amax_list_out([wide, wide], key, torch.zeros(2), first_row)),
        "scale ": (
            "amax",
            lambda: ops.linear(wide, torch.ones(3, 4), None, *[key] * 3, scale=state, amax=state),
        ),
    }
    before, state_before = wide.clone(), state.clone()
    for other, (buffer, call) in refused.items():
        text = f"argument '{buffer}': expected a buffer apart from '{other.strip()}', which is read while it is written"
        with pytest.raises(ValueError, match=re.escape(text)):
            call()
        assert torch.equal(wide, before) and torch.equal(state, state_before)
