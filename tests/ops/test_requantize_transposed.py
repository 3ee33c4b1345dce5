"""requantize_transposed: row-wise to column-wise quantized data, with the bytes of dequantize followed by quantize."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops import nvfp4_oracle
from tests.ops.quantize_oracle import SPECS, assert_all_same, grouped_both_directions, oracle_both
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import FLOAT_DTYPES, Case
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import (
    GROUPED_NV_FORMATS,
    NV_FORMATS,
    amax_of,
    extras,
    grouped_quantize_cases,
    quantize_cases,
    rows_of,
)

OPS = torch.ops.transformer_plugin
CASES = list(quantize_cases())
GROUPED = list(grouped_quantize_cases())


def transposed_data(data: Tensor, used: int) -> Tensor:
    """Returns the transposed data, with zeros in the columns past ``used``."""
    bits = data.cpu().view(torch.uint8).clone()
    bits[..., used:, :] = 0
    return bits.mT.contiguous().view(data.dtype)


def on_cpu(options: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in options.items()}


def amax_and_seed(options: dict[str, Tensor]) -> tuple[Tensor, int | None]:
    """Returns the arguments of the nvfp4 oracle for the second of the two ops."""
    return options["amax_t"], int(options["seed"]) if "seed" in options else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matrix_has_the_bytes_of_the_steps(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    dtype = FLOAT_DTYPES[CASES.index(case) % 3]
    options = extras(input, format)
    data, scale = ops.quantize(input, format, **rows_of(options))
    cpu = on_cpu(options)
    values = reference.dequantize(data.cpu(), scale.cpu(), format, dtype, **amax_of(cpu))
    if format.startswith("fp8_tensor"):
        expected: tuple[Tensor, ...] = transposed_data(data, data.shape[-2]), scale.cpu()
    elif format in nvfp4_oracle.SPECS:
        expected = nvfp4_oracle.quantize_direction(values, nvfp4_oracle.SPECS[format], *amax_and_seed(cpu), 1)
    else:
        expected = oracle_both(values, SPECS[format])[2:]
    assert_all_same(ops.requantize_transposed(data, scale, format, dtype, **options), expected)
    assert_all_same(reference.requantize_transposed(data.cpu(), scale.cpu(), format, dtype, **cpu), expected)


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.name)
def test_groups_have_the_bytes_of_the_steps(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    dtype = FLOAT_DTYPES[GROUPED.index(case) % 3]
    options = extras(input, format, sizes)
    data, scale = ops.quantize(input, format, sizes, **rows_of(options))
    used = int(sizes.sum())
    data.view(torch.uint8)[used:] = 0x5A  # rows past the groups must have no effect
    if "row_scaled" in format:
        options["amax"][used:] = float("nan")
    cpu = on_cpu(options)
    arguments = data.cpu(), scale.cpu(), sizes.cpu()
    values = reference.dequantize(*arguments[:2], format, dtype, arguments[2], **amax_of(cpu))
    if format.startswith("fp8_tensor"):
        expected: tuple[Tensor, ...] = transposed_data(data, used), scale.cpu()
    elif format in nvfp4_oracle.SPECS:
        spec = nvfp4_oracle.SPECS[format]
        expected = nvfp4_oracle.grouped_quantize_direction(
            values, sizes.tolist(), spec, *amax_and_seed(cpu), 1
        )
    else:
        expected = grouped_both_directions(values, sizes.tolist(), SPECS[format])[2:]
    assert_all_same(ops.requantize_transposed(data, scale, format, dtype, sizes, **options), expected)
    meant = reference.requantize_transposed(*arguments[:2], format, dtype, arguments[2], **cpu)
    assert_all_same(meant, expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("format", [key for key in SPECS if not key.startswith("fp8_tensor")])
def test_random_bit_patterns_with_any_scale(format: str, dtype: torch.dtype, device: torch.device) -> None:
    """Random bytes, including NaN and infinity, with random scales, give the bytes of the two ops."""
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
    steps = ops.quantize(ops.dequantize(data, scale, format, dtype), format, rowwise=False, columnwise=True)
    assert_all_same(got, steps)
    assert_all_same(got, ops.requantize_transposed(data.cpu(), scale.cpu(), format, dtype))


AMAXES = [1.0, 2688.0, 1e-45, 1e-38, 3e38, 0.0, float("inf"), float("nan")]


def any_amax(like: Tensor, first: int) -> Tensor:
    """Returns a tensor of the same size with the values above, in turn."""
    values = [AMAXES[(first + i) % len(AMAXES)] for i in range(like.numel())]
    return torch.tensor(values, device=like.device).view(like.shape)


@pytest.mark.parametrize("first", range(len(AMAXES)))
@pytest.mark.parametrize("format", NV_FORMATS)
def test_random_bit_patterns_with_any_scale_and_amax(format: str, first: int, device: torch.device) -> None:
    """For nvfp4: random bytes, including the padding of the scales, with tiny, huge, infinite and NaN amaxes."""
    generator = torch.Generator().manual_seed(first)
    dtype = FLOAT_DTYPES[first % 3]
    input = torch.zeros(144, 272)
    options = extras(input, format)
    data, scale = (
        torch.randint(256, t.shape, generator=generator, dtype=torch.uint8).view(t.dtype)
        for t in ops.quantize(input, format, **rows_of(options))
    )
    options |= {
        "amax": any_amax(options["amax"], first),
        "amax_t": any_amax(options["amax_t"], 5 * first + 1),
    }
    expected = reference.requantize_transposed(data, scale, format, dtype, **options)
    there = {name: value.to(device) for name, value in options.items()}
    got = ops.requantize_transposed(data.to(device), scale.to(device), format, dtype, **there)
    assert_all_same(got, expected)
    assert_all_same(got, ops.requantize_transposed(data, scale, format, dtype, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("format", GROUPED_NV_FORMATS)
def test_partial_blocks_of_groups_on_a_gpu(format: str) -> None:
    """On a GPU the host does not check that sizes are multiples of 16: the result has the bytes of the two ops."""
    sizes = torch.tensor([16, 40, 8, 3, 129, 32], device="cuda")
    input = torch.randn(256, 144, device="cuda")
    options = {"seed": torch.tensor([7], device="cuda")} if "sr" in format else {}
    rows, columns = ((256,), (6, 144)) if "row_scaled" in format else ((6,), (6,))
    amax, amax_t = torch.full(rows, 4.0, device="cuda"), torch.full(columns, 5.0, device="cuda")
    data, scale = ops.quantize(input, format, sizes, amax=amax, **options)
    values = ops.dequantize(data, scale, format, torch.bfloat16, sizes, amax=amax)
    expected = ops.quantize(values, format, sizes, amax_t=amax_t, **options, rowwise=False, columnwise=True)
    got = ops.requantize_transposed(data, scale, format, torch.bfloat16, sizes, amax, amax_t, **options)
    assert_all_same(got, expected)


def test_strided_inputs_give_the_same_bytes(device: torch.device) -> None:
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
    transposed_scale = ops.requantize_transposed(wide, one, "fp8_tensor")[1]
    assert transposed_scale.data_ptr() != one.data_ptr()


def test_strided_nvfp4_inputs_give_the_same_bytes(device: torch.device) -> None:
    """Unaligned data, column-major data, and a strided amax."""
    input = torch.randn(80, 272, device=device)
    for format in ("nvfp4:row_scaled", "nvfp4:rht,tiled"):
        options = extras(input, format)
        data, scale = ops.quantize(input, format, **rows_of(options))
        expected = ops.requantize_transposed(data, scale, format, torch.bfloat16, **options)
        columns = data.view(torch.uint8).T.contiguous().T.view(data.dtype)
        strided = {name: torch.stack([amax, amax], -1)[..., 0] for name, amax in options.items()}
        assert_all_same(
            ops.requantize_transposed(columns, scale, format, torch.bfloat16, **strided), expected
        )
        shifted = []
        for tensor in (data, scale):
            flat = torch.zeros(1 + tensor.numel(), dtype=torch.uint8, device=device)
            flat[1:] = tensor.view(torch.uint8).flatten()
            shifted.append(flat[1:].view(tensor.shape).view(tensor.dtype))
        assert_all_same(ops.requantize_transposed(*shifted, format, torch.bfloat16, **options), expected)


@pytest.mark.parametrize(
    "format", ["fp8_tensor", "fp8_block", "mxfp8:square", "nvfp4:rht,sr", "nvfp4:row_scaled"]
)
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(format: str, device: torch.device) -> None:
    input = torch.randn(80, 96, device=device)
    options = extras(input, format)
    data, scale = ops.quantize(input, format, **rows_of(options))
    opcheck(OPS.requantize_transposed.default, (data, scale, format, torch.bfloat16), options)
    if "square" not in format:
        sizes = torch.tensor([16, 0, 32], device=device)
        options = extras(input, format, sizes)
        data, scale = ops.quantize(input, format, sizes, **rows_of(options))
        arguments = (data, scale, format, torch.float16, sizes)
        opcheck(OPS.requantize_transposed.default, arguments, options)


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4:rht,sr"])
def test_compiles_without_graph_breaks(format: str, device: torch.device) -> None:
    def requantize(
        data: Tensor, scale: Tensor, sizes: Tensor, options: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return ops.requantize_transposed(data, scale, format, torch.bfloat16, sizes, **options)

    input = torch.randn(48, 256, device=device)
    compiled = torch.compile(requantize, fullgraph=True, backend="aot_eager")
    for counts in ([16, 16], [0, 48]):
        sizes = torch.tensor(counts, device=device)
        options = extras(input, format, sizes)
        data, scale = ops.quantize(input, format, sizes, **rows_of(options))
        assert_all_same(compiled(data, scale, sizes, options), requantize(data, scale, sizes, options))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8_block", "nvfp4:rht"])
def test_values_are_not_stored_in_memory(format: str) -> None:
    input = torch.randn(4096, 4096, device="cuda")
    options = extras(input, format)
    data, scale = ops.quantize(input, format, **rows_of(options))
    ops.requantize_transposed(data, scale, format, **options)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = ops.requantize_transposed(data, scale, format, **options)
    made = sum(o.numel() * o.element_size() for o in outputs)
    assert torch.cuda.max_memory_allocated() - before <= made + data.numel() // 64


DATA, SCALE = (t.clone() for t in ops.quantize(torch.ones(4, 64), "fp8_block"))
AMAX, SEED = torch.ones(1), torch.zeros(1, dtype=torch.int64)
NV_DATA, NV_SCALE = (t.clone() for t in ops.quantize(torch.ones(32, 64), "nvfp4", amax=AMAX))


def nv(format: str, sizes: Tensor | None, *options: Tensor | None) -> tuple:
    return NV_DATA, NV_SCALE, format, torch.float32, sizes, *options


def missing(sizes: str, key: str, op: str) -> str:
    return (
        f"expected a float32 tensor of sizes {sizes}, the largest magnitudes that '{key}' scales by, got None. "
        f"Compute it with transformer_plugin.ops.{op} of the matrix that was quantized."
    )


def no_use(key: str, got: str) -> str:
    return f"expected None for '{key}', which has no use for it, got {got} on cpu. Leave it out."


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
        ((DATA, SCALE, "fp8_block", torch.float32, None, AMAX), ValueError,
         f"argument 'amax': {no_use('fp8_block', 'float32[1]')}"),
        ((DATA, AMAX, "fp8_tensor", torch.float32, None, None, AMAX), ValueError,
         f"argument 'amax_t': {no_use('fp8_tensor', 'float32[1]')}"),
        ((DATA, SCALE, "fp8_block", torch.float32, None, None, None, SEED), ValueError,
         f"argument 'seed': {no_use('fp8_block', 'int64[1]')}"),
        (nv("nvfp4", None, AMAX, AMAX, SEED), ValueError,
         f"argument 'seed': {no_use('nvfp4', 'int64[1]')}"),
        (nv("nvfp4", None), ValueError, f"argument 'amax': {missing('[1]', 'nvfp4', 'amax')}"),
        (nv("nvfp4:row_scaled", None, torch.ones(32)), ValueError,
         f"argument 'amax_t': {missing('[64]', 'nvfp4:row_scaled', 'amax and columnwise=True')}"),
        (nv("nvfp4:row_scaled", torch.tensor([16, 16]), torch.ones(32)), ValueError,
         f"argument 'amax_t': {missing('[2, 64]', 'nvfp4:row_scaled', 'amax and columnwise=True')}"),
        (nv("nvfp4", None, torch.ones(2), AMAX), ValueError,
         "argument 'amax': expected sizes [1], the largest magnitudes that 'nvfp4' scales by, got float32[2] on cpu. "
         "Compute it with transformer_plugin.ops.amax of the matrix that was quantized."),
        (nv("nvfp4", None, AMAX, AMAX.double()), TypeError,
         "argument 'amax_t': expected one of the dtypes float32, got float64. Convert it with .to() first."),
        (nv("nvfp4:sr", None, AMAX, AMAX), ValueError,
         "argument 'seed': expected an int64 tensor of size [1], which 'nvfp4:sr' draws its roundings from, got None. "
         "Pass another number in each step, for example of torch.randint."),
        (nv("nvfp4:square", torch.tensor([16, 16]), torch.ones(2), torch.ones(2)), ValueError,
         "argument 'format': expected blocks along a row for a ragged matrix, whose groups do not end on square "
         "blocks, got 'nvfp4:square'. Leave out 'square'."),
        (nv("nvfp4", torch.tensor([8, 24]), torch.ones(2), torch.ones(2)), ValueError,
         "argument 'group_sizes': expected sizes that are multiples of 16, the block of nvfp4 in transposed data, got "
         "8 for group 0. Pad the rows of each group with zeros."),
        ((NV_DATA[:8], NV_SCALE, "nvfp4", torch.float32, None, AMAX, AMAX), ValueError,
         "argument 'data': expected a number of rows that is a multiple of 16, the block of nvfp4 in transposed data, "
         "got float4_e2m1fn_x2[8, 32] on cpu. Pad the matrix with zeros before it is quantized."),
        ((NV_DATA[:, :12], NV_SCALE, "nvfp4", torch.float32, None, AMAX, AMAX), ValueError,
         "argument 'data': expected a last dimension that is a multiple of 8 bytes, the block of nvfp4, got "
         "float4_e2m1fn_x2[32, 12] on cpu. Pass data as the quantize ops return it."),
        ((NV_DATA, NV_SCALE[:, :3], "nvfp4", torch.float32, None, AMAX, AMAX), ValueError,
         "argument 'scale_inv': expected size 4 in dimension 1 (what the format gives data of this size), got "
         "float8_e4m3fn[128, 3] on cpu. Pass tensors whose sizes agree."),
    ],
)  # fmt: skip
def test_errors_have_four_parts(arguments: tuple, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        ops.requantize_transposed(*arguments)
    assert str(caught.value) == f"transformer_plugin::requantize_transposed: {text}"


def test_transposing_fp8_tensor_twice_is_the_identity(device: torch.device) -> None:
    """fp8_tensor is not rounded again, so its scales stay the same and two calls cancel."""
    data, scale = ops.quantize(torch.randn(130, 70, device=device), "fp8_tensor:e5m2")
    once = ops.requantize_transposed(data, scale, "fp8_tensor:e5m2")
    twice = ops.requantize_transposed(*once, "fp8_tensor:e5m2")
    assert_same_bits(twice[0], data)
    assert_same_bits(twice[1], scale)
