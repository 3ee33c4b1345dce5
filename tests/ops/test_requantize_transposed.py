"""Data quantized along rows to data along columns: the bytes of dequantize and quantize_transposed in turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.quantize_oracle import SPECS, assert_all_same, grouped_quantize_both, oracle_both
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import grouped_quantize_cases, quantize_cases

OPS = torch.ops.transformer_plugin
CASES = [case for case in quantize_cases() if "nvfp4" not in case.name]
GROUPED = [case for case in grouped_quantize_cases() if "nvfp4" not in case.name]


def turned(data: Tensor, used: int) -> Tensor:
    """The same codes, columns past ``used`` 0."""
    codes = data.cpu().view(torch.uint8).clone()
    codes[..., used:, :] = 0
    return codes.mT.contiguous().view(data.dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_matrix(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    dtype = FLOAT_DTYPES[CASES.index(case) % 3]
    data, scale = ops.quantize(input, format)
    if format.startswith("fp8_tensor"):
        expected: tuple[Tensor, ...] = turned(data, data.shape[-2]), scale.cpu()
    else:
        values = reference.dequantize(data.cpu(), scale.cpu(), format, dtype)
        expected = oracle_both(values, SPECS[format])[2:]
    assert_all_same(ops.requantize_transposed(data, scale, format, dtype), expected)
    assert_all_same(reference.requantize_transposed(data.cpu(), scale.cpu(), format, dtype), expected)


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.name)
def test_groups(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    dtype = FLOAT_DTYPES[GROUPED.index(case) % 3]
    data, scale = ops.grouped_quantize(input, sizes, format)
    used = int(sizes.sum())
    data.view(torch.uint8)[used:] = 0x5A  # the tail must reach nothing
    on_cpu = data.cpu(), scale.cpu(), sizes.cpu()
    if format.startswith("fp8_tensor"):
        expected: tuple[Tensor, ...] = turned(data, used), scale.cpu()
    else:
        values = reference.grouped_dequantize(*on_cpu, format, dtype)
        expected = grouped_quantize_both(values, sizes.tolist(), SPECS[format])[2:]
    assert_all_same(ops.requantize_transposed(data, scale, format, dtype, sizes), expected)
    meant = reference.requantize_transposed(*on_cpu[:2], format, dtype, on_cpu[2])
    assert_all_same(meant, expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("format", [key for key in SPECS if not key.startswith("fp8_tensor")])
def test_every_code_under_any_scale(format: str, dtype: torch.dtype, device: torch.device) -> None:
    """Bytes that no matrix gave, NaN and infinity among them, under any scales: as the two ops in turn."""
    generator = torch.Generator().manual_seed(5)
    data, scale = ops.quantize(torch.zeros(300, 416), format)
    data = torch.randint(256, data.shape, generator=generator, dtype=torch.uint8).view(data.dtype)
    if scale.dtype == torch.float32:
        scale = torch.exp2(torch.randint(-140, 120, scale.shape, generator=generator).float())
        scale *= 1 + torch.rand(scale.shape, generator=generator)
    else:
        scale = torch.randint(256, scale.shape, generator=generator, dtype=torch.uint8).view(scale.dtype)
    data, scale = data.to(device), scale.to(device)
    got = ops.requantize_transposed(data, scale, format, dtype)
    steps = ops.quantize_transposed(ops.dequantize(data, scale, format, dtype), format)
    assert_all_same(got, steps)
    assert_all_same(got, ops.requantize_transposed(data.cpu(), scale.cpu(), format, dtype))


def test_inputs_of_any_strides(device: torch.device) -> None:
    wide, scale = ops.quantize(torch.randn(70, 256, device=device), "fp8_block:square")
    columns = wide.T.contiguous().T
    for format in ("fp8_block:square", "fp8_tensor"):
        one = scale if format != "fp8_tensor" else torch.ones(1, device=device)
        expected = ops.requantize_transposed(wide, one, format, torch.bfloat16)
        assert_all_same(ops.requantize_transposed(columns, one, format, torch.bfloat16), expected)
        flat = torch.zeros(1 + wide.numel(), dtype=torch.uint8, device=device)
        flat[1:] = wide.view(torch.uint8).flatten()
        shifted = flat[1:].view(70, 256).view(wide.dtype)
        assert_all_same(ops.requantize_transposed(shifted, one, format, torch.bfloat16), expected)
    turned_scale = ops.requantize_transposed(wide, one, "fp8_tensor")[1]
    assert turned_scale.data_ptr() != one.data_ptr()


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_block", "mxfp8:square"])
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(format: str, device: torch.device) -> None:
    data, scale = ops.quantize(torch.randn(70, 96, device=device), format)
    torch.library.opcheck(OPS.requantize_transposed.default, (data, scale, format, torch.bfloat16))
    if "square" not in format:
        sizes = torch.tensor([20, 0, 30], device=device)
        data, scale = ops.grouped_quantize(torch.randn(70, 96, device=device), sizes, format)
        arguments = (data, scale, format, torch.float16, sizes)
        torch.library.opcheck(OPS.requantize_transposed.default, arguments)


def test_compiles_whole(device: torch.device) -> None:
    def turn(data: Tensor, scale: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        return ops.requantize_transposed(data, scale, "fp8_block", torch.bfloat16, sizes)

    data, scale = ops.quantize(torch.randn(40, 256, device=device), "fp8_block")
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    for counts in ([10, 20], [0, 40]):
        sizes = torch.tensor(counts, device=device)
        assert_all_same(compiled(data, scale, sizes), turn(data, scale, sizes))


@pytest.mark.gpu
def test_no_tensor_of_the_values() -> None:
    data, scale = ops.quantize(torch.randn(4096, 4096, device="cuda"), "fp8_block")
    ops.requantize_transposed(data, scale, "fp8_block")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = ops.requantize_transposed(data, scale, "fp8_block")
    made = sum(o.numel() * o.element_size() for o in outputs)
    assert torch.cuda.max_memory_allocated() - before <= made + data.numel() // 64


DATA, SCALE = (t.clone() for t in ops.quantize(torch.ones(4, 64), "fp8_block"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((DATA, SCALE[:, :3], "fp8_block"), ValueError,
         "argument 'scale_inv': expected size 4 in dimension 1 (what the format gives data of this size), got "
         "float32[1, 3] on cpu. Pass tensors whose sizes agree."),
        ((DATA.float(), SCALE, "fp8_block"), TypeError,
         "argument 'data': expected one of the dtypes float8_e4m3fn, got float32. Convert it with .to() first."),
        ((DATA, SCALE, "mxfp8"), TypeError,
         "argument 'scale_inv': expected one of the dtypes float8_e8m0fnu, got float32. Convert it with .to() first."),
        ((DATA[:, :40], SCALE, "mxfp8"), ValueError,
         "argument 'data': expected a last dimension that is a multiple of 32, the block of mxfp8, got "
         "float8_e4m3fn[4, 40] on cpu. Pass data as the quantize ops return it."),
        ((DATA, SCALE, "fp8_block", torch.float64), TypeError,
         "argument 'dtype': expected one of the dtypes float32, bfloat16, float16, got float64. It is that of the "
         "values between the two formats."),
        ((DATA, SCALE, "fp8_block:square", torch.float32, torch.tensor([4])), ValueError,
         "argument 'format': expected blocks along a row for a ragged matrix, whose groups do not end on square "
         "blocks, got 'fp8_block:square'. Leave out 'square'."),
        ((DATA, SCALE, "fp8_block", torch.float32, torch.tensor([5])), ValueError,
         "argument 'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 5 at "
         "group 0. Enlarge the buffer or fix the sizes."),
    ],
)  # fmt: skip
def test_errors_have_four_parts(arguments: tuple, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        ops.requantize_transposed(*arguments)
    assert str(caught.value) == f"transformer_plugin::requantize_transposed: {text}"


def test_scales_stay_beside_their_bytes(device: torch.device) -> None:
    """fp8_tensor: nothing is rounded again, so turning twice is nothing."""
    data, scale = ops.quantize(torch.randn(130, 70, device=device), "fp8_tensor:e5m2")
    once = ops.requantize_transposed(data, scale, "fp8_tensor:e5m2")
    twice = ops.requantize_transposed(*once, "fp8_tensor:e5m2")
    assert_same_bits(twice[0], data)
    assert_same_bits(twice[1], scale)
