"""grouped_gemm_activation_quantize: the bytes of the separate steps and of the oracle, extremes, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.gemm_oracle import rows_fp64
from tests.ops.on_gpu import captured, most_memory
from tests.ops.quantize_oracle import SPECS, assert_all_same, grouped_both_directions
from transformer_plugin import ops, reference
from transformer_plugin.activations import Activation
from transformer_plugin.formats import Format
from transformer_plugin.reference.gemm_activation import halves_apart
from transformer_plugin.testing.cases import BLOCK_FORMATS, Case
from transformer_plugin.testing.gemm_activation_cases import grouped_gemm_activation_quantize_cases
from transformer_plugin.testing.gemm_cases import (
    normals,
    poison_tail,
    quantized_arguments,
)
from transformer_plugin.testing.numerics import assert_same_bits

pytestmark = pytest.mark.dtypes_in_turn

EXACT = list(grouped_gemm_activation_quantize_cases())
RANDOM = list(grouped_gemm_activation_quantize_cases(normals))
SIXTEEN_BITS = [case for case in RANDOM if not case.name.startswith("float32")]
_op = torch.ops.transformer_plugin.grouped_gemm_activation_quantize.default


def interleave_halves(h: Tensor, activation: str) -> Tensor:
    """The columns of the gate and of the linear part, in the order of an activation."""
    interleave = Activation.parse(activation).interleave
    return h.unflatten(1, (2, -1, interleave)).transpose(1, 2).flatten(1) if interleave else h


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def steps(
    a: Tensor,
    b: Tensor,
    sizes: Tensor,
    format: str,
    probs: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "swiglu",
) -> tuple[Tensor, ...]:
    """Returns the results of grouped_gemm_activation followed by activation_quantize."""
    _, h = ops.grouped_gemm_activation(a, b, sizes, probs, bias, activation)
    return *ops.activation_quantize(halves_apart(h, activation), format, probs, sizes), h


def oracle(act: Tensor, sizes: Tensor, format: str) -> tuple[Tensor, ...]:
    return grouped_both_directions(act.cpu(), sizes.tolist(), SPECS[format])[:2]


def poison_outputs(outputs: tuple[Tensor, ...]) -> None:
    """Leaves bytes that no result has in the memory that the next outputs of these sizes will probably reuse."""
    for tensor in outputs:
        torch.full((tensor.nbytes,), 0xFF, dtype=torch.uint8, device=tensor.device)


@each(EXACT)
def test_output_agrees_with_the_oracle(case: Case, device: torch.device) -> None:
    """Sums are exact, so h must agree to the last bit. The numpy oracle quantizes SwiGLU of the rounded h."""
    a, b, sizes, format, probs, bias, activation = case.arguments(device)
    h = rows_fp64(a.cpu(), b.cpu(), sizes, None if bias is None else bias.cpu(), None, True).to(a.dtype)
    act = ops.activation(halves_apart(h, activation), None if probs is None else probs.cpu())
    expected = oracle(act, sizes, format)
    *got, kept = ops.grouped_gemm_activation_quantize(a, b, sizes, format, probs, bias, activation)
    assert_same_bits(kept.cpu() + 0, h, "h")
    assert_all_same(tuple(got), expected)


@each(RANDOM)
def test_output_has_the_bytes_of_the_steps(case: Case, device: torch.device) -> None:
    arguments = case.arguments(device)
    expected = steps(*arguments)
    poison_outputs(expected)
    assert_all_same(ops.grouped_gemm_activation_quantize(*arguments), expected)
    poison_outputs(expected[:2])
    *alone, none = ops.grouped_gemm_activation_quantize(*arguments, keep_input=False)
    assert_all_same(tuple(alone), expected[:2])
    assert none.shape == (0, arguments[1].shape[1]) and none.dtype == arguments[0].dtype
    assert_all_same(ops.grouped_gemm_activation_quantize(*arguments, True, 6, 10), expected)


@each(EXACT)
def test_reference_has_the_bytes_of_its_steps(case: Case) -> None:
    a, b, sizes, format, probs, bias, activation = case.arguments()
    act, h = reference.grouped_gemm_activation(a, b, sizes, probs, bias, activation)
    *got, kept = reference.grouped_gemm_activation_quantize(a, b, sizes, format, probs, bias, activation)
    assert_same_bits(kept, h)
    assert_all_same(tuple(got), oracle(act, sizes, format))
    none = reference.grouped_gemm_activation_quantize(a, b, sizes, format, probs, bias, activation, False)[2]
    assert none.shape == (0, b.shape[1])


def special_halves(features: int) -> Tensor:
    """Returns gates and linear parts, one group per kind of value that a scale or its rounding may handle wrongly."""
    generator = torch.Generator().manual_seed(7)
    halves = torch.randn(10, 2, features, generator=generator)
    gate, linear = halves[:, 0], halves[:, 1]
    linear[0] = 0.0
    linear[1] *= 1e-30  # the scale overflows
    linear[2] *= 1e-39
    gate[3], linear[3] = gate[3].abs() + 1, linear[3] * 1e38
    linear[4, 5] = float("nan")
    linear[5, :32] = float("nan")  # a whole block of 32, but not of 128
    linear[6] = float("nan")
    linear[7, features - 1] = float("inf")
    gate[8, 0] = -float("inf")
    linear[9] = 2.0 ** (torch.arange(features) % 60 - 30)  # powers of two
    return halves.flatten(1)


@pytest.mark.parametrize("activation", ["swiglu", "swiglu:interleave=32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("features", [128, 160, 352])
def test_extreme_values(
    features: int, format: str, dtype: torch.dtype, activation: str, device: torch.device
) -> None:
    """The product is zero, so that every row of h is the bias of its group."""
    bias = interleave_halves(special_halves(features), activation).to(device)
    groups = bias.shape[0]
    sizes = torch.full((groups,), 13, device=device)
    a, b = torch.zeros(140, 16, dtype=dtype), torch.zeros(groups, 2 * features, 16, dtype=dtype)
    probs = torch.rand(140, generator=torch.Generator().manual_seed(1))
    probs[::13], probs[1::13], probs[2::13] = float("nan"), float("inf"), 0.0
    arguments = a.to(device), b.to(device), sizes, format, probs.to(device), bias, activation
    act, h = ops.grouped_gemm_activation(*arguments[:3], *arguments[4:])
    got = ops.grouped_gemm_activation_quantize(*arguments)
    assert_all_same(
        got, (*ops.activation_quantize(halves_apart(h, activation), format, probs.to(device), sizes), h)
    )
    assert_all_same(got[:2], oracle(act, sizes, format))


@pytest.mark.parametrize("features", [8, 40, 136, 256 + 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_columns_past_the_last_gate_do_not_affect_scales(
    features: int, dtype: torch.dtype, device: torch.device
) -> None:
    """In a partial tile, columns past the last gate read rows of the weight's linear part, which are large and
    infinite here."""
    generator = torch.Generator().manual_seed(0)
    a, b = (normals(s, dtype, device, generator) / 8 for s in ((70, 64), (2, 2 * features, 64)))
    b[:, features:] *= 64
    a[3, 5], b[1, features + 2, 7] = float("inf"), -float("inf")
    arguments = a, b, torch.tensor([40, 27], device=device), "fp8_block"
    got = ops.grouped_gemm_activation_quantize(*arguments)
    assert_all_same(got, steps(*arguments))
    act, _ = ops.grouped_gemm_activation(*arguments[:3])
    assert_all_same(got[:2], oracle(act, arguments[2], "fp8_block"))


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_strided_inputs_and_format_object(format: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    wide = [normals(s, torch.bfloat16, device, generator) for s in ((12, 64), (2, 32, 128))]
    a, b = wide[0][::2, ::2], wide[1].transpose(1, 2)
    probs, bias = torch.rand(12, generator=generator).to(device)[::2], b[:, :, 0]
    sizes = torch.tensor([3, 2], device=device, dtype=torch.int32)
    got = ops.grouped_gemm_activation_quantize(
        a, b, sizes, Format.parse(format), probs, bias, Activation(interleave=32)
    )
    dense = (
        a.contiguous(),
        b.contiguous(),
        sizes,
        format,
        probs.contiguous(),
        bias.contiguous(),
        "swiglu:interleave=32",
    )
    assert_all_same(got, steps(*dense))


@pytest.mark.usefixtures("schema_checks_take_fp8")
@each([case for i, case in enumerate(EXACT) if case.name.startswith("float32") or i % 5 == 0])
def test_opcheck(case: Case, device: torch.device) -> None:
    arguments = tuple(t.nan_to_num() if isinstance(t, Tensor) else t for t in case.arguments(device))
    opcheck(_op, arguments)
    opcheck(_op, (*arguments, False))
    for i in (0, 1, 4, 5):
        if arguments[i] is not None:
            arguments[i].requires_grad_()
    opcheck(_op, arguments)
    assert not any(output.requires_grad for output in ops.grouped_gemm_activation_quantize(*arguments))


@pytest.mark.parametrize("activation", ["swiglu", "swiglu:interleave=32"])
@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
def test_compiles_without_graph_breaks(format: str, activation: str, device: torch.device) -> None:
    """One graph serves any sizes and numbers of rows, with the bytes of eager mode."""
    torch._dynamo.reset()
    fast = torch.compile(
        ops.grouped_gemm_activation_quantize, fullgraph=True, backend="aot_eager", dynamic=True
    )
    generator = torch.Generator().manual_seed(0)
    for rows, sizes in ((24, (5, 0, 16)), (40, (40, 0, 0)), (17, (0, 3, 9))):
        x, w = (normals(s, torch.bfloat16, device, generator) for s in ((rows, 16), (3, 128, 16)))
        probs = torch.rand(rows, generator=generator).to(device)
        arguments = x, w, torch.tensor(sizes, device=device), format, probs, None, activation
        assert_all_same(fast(*arguments), ops.grouped_gemm_activation_quantize(*arguments))
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["swiglu", "swiglu:interleave=32"])
@pytest.mark.parametrize("format", ["fp8_block", "fp8_block:e5m2,fp32", "mxfp8", "mxfp8:tiled"])
def test_graph_replays_with_new_sizes_and_data(format: str, activation: str) -> None:
    device, rows, features, k = torch.device("cuda"), 700, 160, 136

    def draw(seed: int, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        a, b = (normals(s, torch.bfloat16, device, generator) for s in ((rows, k), (4, 2 * features, k)))
        probs = poison_tail(torch.rand(rows, generator=generator), sizes).to(device)
        return poison_tail(a, sizes), b, torch.tensor(sizes, device=device), probs

    held, made = draw(0, (100, 0, 300, 57)), []
    for keep_input in (True, False):
        made.clear()
        graph = captured(
            lambda keep=keep_input: made.append(
                ops.grouped_gemm_activation_quantize(*held[:3], format, held[3], None, activation, keep)
            )
        )
        outputs = made[-1]
        replays = [(700, 0, 0, 0), (0, 0, 0, 0), (1, 2, 3, 5), (129, 127, 1, 443), (0, 64, 0, 65)]
        for seed, sizes in enumerate(replays, start=1):
            new = draw(seed, sizes)
            for target, source in zip(held, new, strict=True):
                target.copy_(source)
            for tensor in outputs:
                tensor.view(torch.uint8).fill_(0xFF)
            graph.replay()
            expected = steps(*new[:3], format, new[3], None, activation)
            assert_all_same(outputs[: 2 + keep_input], expected[: 2 + keep_input])


@pytest.mark.gpu
@each(SIXTEEN_BITS)
def test_repeated_calls_give_the_same_bytes(case: Case) -> None:
    arguments = case.arguments("cuda")
    for keep_input in (True, False):
        first = ops.grouped_gemm_activation_quantize(*arguments, keep_input)
        for _ in range(20):
            assert_all_same(ops.grouped_gemm_activation_quantize(*arguments, keep_input), first)


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="the kernel is Hopper's"
)
@pytest.mark.parametrize("format", ["fp8_block", "mxfp8"])
@pytest.mark.parametrize("activation", ["swiglu", "swiglu:interleave=32"])
def test_activation_is_not_written_to_memory(format: str, activation: str) -> None:
    """h is not written either if it is not kept. Synchronization is an error."""
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(0)
    rows, features = 4096, 1024
    a, b = (normals(s, torch.bfloat16, device, generator) for s in ((rows, 64), (4, 2 * features, 64)))
    sizes, probs = torch.tensor([1000, 0, 2000, 500], device=device), torch.rand(rows, device=device)
    taken = most_memory(
        lambda: ops.grouped_gemm_activation_quantize(a, b, sizes, format, probs, None, activation, False)
    )
    data_bytes = rows * features
    # The rest is scales, offsets and rounding of the allocator; act would take 2 * data_bytes.
    assert data_bytes <= taken < data_bytes * 1.25


@pytest.mark.gpu
def test_devices_agree_on_exact_products() -> None:
    for case in EXACT[::3]:
        here, there = (ops.grouped_gemm_activation_quantize(*case.arguments(d)) for d in ("cpu", "cuda"))
        for got, expected in zip(there[:2], here[:2], strict=True):
            assert_same_bits(got, expected, case.name)


def quantized_experts(arguments: tuple[Any, ...]) -> Tensor:
    x, w1, sizes, probs, w2 = arguments
    data, scale, _ = ops.grouped_gemm_activation_quantize(x, w1, sizes, "fp8_block", probs, keep_input=False)
    weight = ops.quantize(w2, "fp8_block:square")
    operands_by_name = quantized_arguments((data, scale), weight, "fp8_block", "fp8_block:square")
    return ops.grouped_gemm(**operands_by_name, group_sizes=sizes, dtype=x.dtype)


def test_second_product_uses_the_output(device: torch.device) -> None:
    """The forward of an expert's MLP in fp8_block has the bits of the separate steps."""
    generator = torch.Generator().manual_seed(2)
    shapes = (150, 128), (3, 512, 128), (3, 128, 256)
    x, w1, w2 = (normals(s, torch.bfloat16, device, generator) / 4 for s in shapes)
    sizes, probs = torch.tensor([70, 0, 65], device=device), torch.rand(150, generator=generator).to(device)
    act, _ = ops.grouped_gemm_activation(x, w1, sizes, probs)
    operands = ops.quantize(act, "fp8_block", sizes), ops.quantize(w2, "fp8_block:square")
    operands_by_name = quantized_arguments(*operands, "fp8_block", "fp8_block:square")
    expected = ops.grouped_gemm(**operands_by_name, group_sizes=sizes, dtype=x.dtype)
    assert_same_bits(quantized_experts((x, w1, sizes, probs, w2)), expected)
