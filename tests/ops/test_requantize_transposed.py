"""Data quantized along rows to data along columns: the bytes of dequantize and quantize in turn."""

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


def turned(data: Tensor, used: int) -> Tensor:
    """The same codes, columns past ``used`` 0."""
    codes = data.cpu().view(torch.uint8).clone()
    codes[..., used:, :] = 0
    return codes.mT.contiguous().view(data.dtype)


def on_cpu(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in given.items()}


def after(given: dict[str, Tensor]) -> tuple[Tensor, int | None]:
    """What the oracle of nvfp4 takes of them for the second of the two ops."""
    return given["amax_t"], int(given["seed"]) if "seed" in given else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_matrix(case: Case, device: torch.device) -> None:
    input, format = case.arguments(device)
    dtype = FLOAT_DTYPES[CASES.index(case) % 3]
    given = extras(input, format)
    data, scale = ops.quantize(input, format, **rows_of(given))
    cpu = on_cpu(given)
    values = reference.dequantize(data.cpu(), scale.cpu(), format, dtype, **amax_of(cpu))
    if format.startswith("fp8_tensor"):
        expected: tuple[Tensor, ...] = turned(data, data.shape[-2]), scale.cpu()
    elif format in nvfp4_oracle.SPECS:
        expected = nvfp4_oracle.quantize_direction(values, nvfp4_oracle.SPECS[format], *after(cpu), 1)
    else:
        expected = oracle_both(values, SPECS[format])[2:]
    assert_all_same(ops.requantize_transposed(data, scale, format, dtype, **given), expected)
    assert_all_same(reference.requantize_transposed(data.cpu(), scale.cpu(), format, dtype, **cpu), expected)


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.name)
def test_groups(case: Case, device: torch.device) -> None:
    input, sizes, format = case.arguments(device)
    dtype = FLOAT_DTYPES[GROUPED.index(case) % 3]
    given = extras(input, format, sizes)
    data, scale = ops.quantize(input, format, sizes, **rows_of(given))
    used = int(sizes.sum())
    data.view(torch.uint8)[used:] = 0x5A  # the tail must reach nothing
    if "row_scaled" in format:
        given["amax"][used:] = float("nan")
    cpu = on_cpu(given)
    arguments = data.cpu(), scale.cpu(), sizes.cpu()
    values = reference.dequantize(*arguments[:2], format, dtype, arguments[2], **amax_of(cpu))
    if format.startswith("fp8_tensor"):
        expected: tuple[Tensor, ...] = turned(data, used), scale.cpu()
    elif format in nvfp4_oracle.SPECS:
        spec = nvfp4_oracle.SPECS[format]
        expected = nvfp4_oracle.grouped_quantize_direction(values, sizes.tolist(), spec, *after(cpu), 1)
    else:
        expected = grouped_both_directions(values, sizes.tolist(), SPECS[format])[2:]
    assert_all_same(ops.requantize_transposed(data, scale, format, dtype, sizes, **given), expected)
    meant = reference.requantize_transposed(*arguments[:2], format, dtype, arguments[2], **cpu)
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
    steps = ops.quantize(ops.dequantize(data, scale, format, dtype), format, rowwise=False, columnwise=True)
    assert_all_same(got, steps)
    assert_all_same(got, ops.requantize_transposed(data.cpu(), scale.cpu(), format, dtype))


AMAXES = [1.0, 2688.0, 1e-45, 1e-38, 3e38, 0.0, float("inf"), float("nan")]


def any_amax(like: Tensor, first: int) -> Tensor:
    """Of the same sizes: those above in turn."""
    values = [AMAXES[(first + i) % len(AMAXES)] for i in range(like.numel())]
    return torch.tensor(values, device=like.device).view(like.shape)


@pytest.mark.parametrize("first", range(len(AMAXES)))
@pytest.mark.parametrize("format", NV_FORMATS)
def test_every_code_under_any_scale_and_amax(format: str, first: int, device: torch.device) -> None:
    """Of nvfp4: any bytes, those beside the scales of the matrix too, under amaxes that are tiny, huge or no number."""
    generator = torch.Generator().manual_seed(first)
    dtype = FLOAT_DTYPES[first % 3]
    input = torch.zeros(144, 272)
    given = extras(input, format)
    data, scale = (
        torch.randint(256, t.shape, generator=generator, dtype=torch.uint8).view(t.dtype)
        for t in ops.quantize(input, format, **rows_of(given))
    )
    given |= {"amax": any_amax(given["amax"], first), "amax_t": any_amax(given["amax_t"], 5 * first + 1)}
    expected = reference.requantize_transposed(data, scale, format, dtype, **given)
    there = {name: value.to(device) for name, value in given.items()}
    got = ops.requantize_transposed(data.to(device), scale.to(device), format, dtype, **there)
    assert_all_same(got, expected)
    assert_all_same(got, ops.requantize_transposed(data, scale, format, dtype, **given))


@pytest.mark.gpu
@pytest.mark.parametrize("format", GROUPED_NV_FORMATS)
def test_groups_of_broken_blocks_on_a_gpu(format: str) -> None:
    """Nobody sees there that sizes are no multiples of 16: as the two ops in turn."""
    sizes = torch.tensor([16, 40, 8, 3, 129, 32], device="cuda")
    input = torch.randn(256, 144, device="cuda")
    given = {"seed": torch.tensor([7], device="cuda")} if "sr" in format else {}
    lines, columns = ((256,), (6, 144)) if "row_scaled" in format else ((6,), (6,))
    amax, amax_t = torch.full(lines, 4.0, device="cuda"), torch.full(columns, 5.0, device="cuda")
    data, scale = ops.quantize(input, format, sizes, amax=amax, **given)
    values = ops.dequantize(data, scale, format, torch.bfloat16, sizes, amax=amax)
    expected = ops.quantize(values, format, sizes, amax_t=amax_t, **given, rowwise=False, columnwise=True)
    got = ops.requantize_transposed(data, scale, format, torch.bfloat16, sizes, amax, amax_t, **given)
    assert_all_same(got, expected)


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


def test_inputs_of_nvfp4_of_any_strides(device: torch.device) -> None:
    """Bytes that begin anywhere, columns that lie together, every other amax."""
    input = torch.randn(80, 272, device=device)
    for format in ("nvfp4:row_scaled", "nvfp4:rht,tiled"):
        given = extras(input, format)
        data, scale = ops.quantize(input, format, **rows_of(given))
        expected = ops.requantize_transposed(data, scale, format, torch.bfloat16, **given)
        columns = data.view(torch.uint8).T.contiguous().T.view(data.dtype)
        apart = {name: torch.stack([amax, amax], -1)[..., 0] for name, amax in given.items()}
        assert_all_same(ops.requantize_transposed(columns, scale, format, torch.bfloat16, **apart), expected)
        shifted = []
        for tensor in (data, scale):
            flat = torch.zeros(1 + tensor.numel(), dtype=torch.uint8, device=device)
            flat[1:] = tensor.view(torch.uint8).flatten()
            shifted.append(flat[1:].view(tensor.shape).view(tensor.dtype))
        assert_all_same(ops.requantize_transposed(*shifted, format, torch.bfloat16, **given), expected)


@pytest.mark.parametrize(
    "format", ["fp8_tensor", "fp8_block", "mxfp8:square", "nvfp4:rht,sr", "nvfp4:row_scaled"]
)
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(format: str, device: torch.device) -> None:
    input = torch.randn(80, 96, device=device)
    given = extras(input, format)
    data, scale = ops.quantize(input, format, **rows_of(given))
    opcheck(OPS.requantize_transposed.default, (data, scale, format, torch.bfloat16), given)
    if "square" not in format:
        sizes = torch.tensor([16, 0, 32], device=device)
        given = extras(input, format, sizes)
        data, scale = ops.quantize(input, format, sizes, **rows_of(given))
        arguments = (data, scale, format, torch.float16, sizes)
        opcheck(OPS.requantize_transposed.default, arguments, given)


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4:rht,sr"])
def test_compiles_whole(format: str, device: torch.device) -> None:
    def turn(data: Tensor, scale: Tensor, sizes: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return ops.requantize_transposed(data, scale, format, torch.bfloat16, sizes, **given)

    input = torch.randn(48, 256, device=device)
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    for counts in ([16, 16], [0, 48]):
        sizes = torch.tensor(counts, device=device)
        given = extras(input, format, sizes)
        data, scale = ops.quantize(input, format, sizes, **rows_of(given))
        assert_all_same(compiled(data, scale, sizes, given), turn(data, scale, sizes, given))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["fp8_block", "nvfp4:rht"])
def test_no_tensor_of_the_values(format: str) -> None:
    input = torch.randn(4096, 4096, device="cuda")
    given = extras(input, format)
    data, scale = ops.quantize(input, format, **rows_of(given))
    ops.requantize_transposed(data, scale, format, **given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = ops.requantize_transposed(data, scale, format, **given)
    made = sum(o.numel() * o.element_size() for o in outputs)
    assert torch.cuda.max_memory_allocated() - before <= made + data.numel() // 64


DATA, SCALE = (t.clone() for t in ops.quantize(torch.ones(4, 64), "fp8_block"))
AMAX, SEED = torch.ones(1), torch.zeros(1, dtype=torch.int64)
NV_DATA, NV_SCALE = (t.clone() for t in ops.quantize(torch.ones(32, 64), "nvfp4", amax=AMAX))


def nv(format: str, sizes: Tensor | None, *given: Tensor | None) -> tuple:
    return NV_DATA, NV_SCALE, format, torch.float32, sizes, *given


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


def test_scales_stay_beside_their_bytes(device: torch.device) -> None:
    """fp8_tensor: nothing is rounded again, so turning twice is nothing."""
    data, scale = ops.quantize(torch.randn(130, 70, device=device), "fp8_tensor:e5m2")
    once = ops.requantize_transposed(data, scale, "fp8_tensor:e5m2")
    twice = ops.requantize_transposed(*once, "fp8_tensor:e5m2")
    assert_same_bits(twice[0], data)
    assert_same_bits(twice[1], scale)
