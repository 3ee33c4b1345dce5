"""Grouped products with lists of quantized matrices: float64 products, the bits of the stack, and no copies of
quantized data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.on_gpu import most_memory
from tests.ops.test_gemm_quantized import (
    PAIRS,
    Operand,
    by_output,
    fitted,
    operand,
    ragged,
    ragged_cases,
    values,
)
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import (
    GROUPED_SHAPES,
    GroupedShape,
    apart,
    group_sizes,
    in_fp8_units,
    normals,
    poison_tail,
    quantized_arguments,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits, fp8_sums

pytestmark = pytest.mark.dtypes_in_turn

CUDA = torch.device("cuda")
_ops = torch.ops.transformer_plugin
SHAPES = [shape for shape in GROUPED_SHAPES if shape.name not in ("no-groups", "257-groups", "1100-groups")]


def matrices(stack: Tensor, key: str) -> list[Operand]:
    """Quantizes each matrix of a stack separately, in separate memory."""
    return [operand(matrix, key) for matrix in apart(stack)]


def lists(b: list[Operand]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    return [m.data for m in b], [m.scale for m in b], [m.amax for m in b if m.amax is not None]


def arguments_of(a: Operand, b: list[Operand], formats: tuple[str, str], **more: Any) -> dict[str, Any]:
    return quantized_arguments(a, lists(b), *formats) | more


def stacked(tensors: list[Tensor]) -> Tensor:
    """Stacks tensors; torch.stack does not support 4-bit floats."""
    dtype = tensors[0].dtype
    return torch.stack([t.view(torch.uint8) if t.element_size() == 1 else t for t in tensors]).view(dtype)


def product_of_stack(a: Operand, b: list[Operand], formats: tuple[str, str], **more: Any) -> Tensor:
    """Returns the product with the same bytes as one stack."""
    data, scale = (stacked(part) for part in lists(b)[:2])
    per_tensor = formats[1].startswith("fp8_tensor")
    amax = None
    if b[0].amax is not None:
        amax = stacked([m.amax for m in b if m.amax is not None])
        amax = amax if "row_scaled" in formats[1] else amax.flatten()
    stack = data, scale.flatten() if per_tensor else scale, amax
    return ops.grouped_gemm(**quantized_arguments(a, stack, *formats), **more)


@ragged_cases(SHAPES)
@by_output
def test_list_agrees_with_float64_and_the_stack(
    shape: GroupedShape, dtype: torch.dtype, formats: tuple[str, str], device: torch.device
) -> None:
    shape = fitted(shape, formats)
    units = in_fp8_units(*formats, dtype, shape.n, shape.k, device)
    generator = torch.Generator().manual_seed(1)
    a, _, a_values, _ = ragged(shape, shape.k, formats[0], device, 0)
    sizes = group_sizes(shape, device)
    bias = normals((len(shape.sizes), shape.n), dtype, device, generator)
    scale = poison_tail(normals((shape.rows,), torch.float32, device, generator), shape.sizes)
    for transpose_b, extra in ((True, (bias, scale)), (False, (None, None)), (True, (None, None))):
        b_shape = (shape.n, shape.k) if transpose_b else (shape.k, shape.n)
        b = matrices(normals((len(shape.sizes), *b_shape), torch.float32, device, generator), formats[1])
        more = {"group_sizes": sizes, "bias": extra[0], "bias_scale": extra[1]}
        more |= {"transpose_b": transpose_b, "dtype": dtype}
        got = ops.grouped_gemm(**arguments_of(a, b, formats, **more))
        assert_same_bits(got, product_of_stack(a, b, formats, **more), "product with the stack")
        into = torch.full_like(got, float("nan"))
        del more["dtype"]
        ops.grouped_gemm_out(**arguments_of(a, b, formats, **more, out=into))
        assert_same_bits(into, got, "into a buffer")
        begin = 0
        for g, (rows, size) in enumerate(zip(a_values, shape.sizes, strict=True)):
            own = values(b[g], formats[1])
            own = own.T if transpose_b else own
            added = torch.zeros((), dtype=torch.float64, device=device)
            if extra[0] is not None:
                added = scale[begin : begin + size, None].double() * bias[g].double()
            magnitude = rows.abs() @ own.abs() + added.abs()
            more = fp8_sums(rows, own) if units and transpose_b else 0.0
            exact = rows @ own + added
            assert_rounded_sum(got[begin : begin + size], exact, magnitude, shape.k, more=more)
            begin += size
        assert_same_bits(got[begin:], torch.zeros_like(got[begin:]), "tail")


def layouts(b: list[Operand]) -> dict[str, list[Tensor]]:
    """Returns the same quantized data: adjacent, with gaps, transposed, and at unaligned addresses."""
    bytes = stacked([m.data for m in b]).view(torch.uint8)
    dtype = b[0].data.dtype
    gaps = torch.full((bytes.shape[0], bytes.shape[1] + 3, bytes.shape[2]), 0x7F, dtype=torch.uint8)
    gaps = gaps.to(bytes.device)
    gaps[:, : bytes.shape[1]] = bytes
    odd = torch.empty(bytes.shape[0], bytes[0].numel() + 1, dtype=torch.uint8, device=bytes.device)
    odd[:, 1:] = bytes.flatten(1)
    whole = {
        "stack": list(bytes),
        "gaps": list(gaps[:, : bytes.shape[1]]),
        "transposed": [matrix.T.contiguous().T for matrix in bytes],
        "unaligned": [row[1:].view(bytes.shape[1:]) for row in odd],
    }
    return {name: [matrix.view(dtype) for matrix in tensors] for name, tensors in whole.items()}


@pytest.mark.parametrize(
    "formats",
    [PAIRS[0], PAIRS[3], ("mxfp8", "mxfp8"), ("mxfp8:tiled", "mxfp8:e5m2,tiled"), ("nvfp4", "nvfp4")],
    ids=str,
)
def test_quantized_data_at_any_address(formats: tuple[str, str], device: torch.device) -> None:
    shape = fitted(GroupedShape("", (130, 0, 7, 64), 210, 136, 160), formats)
    generator, sizes = torch.Generator().manual_seed(1), group_sizes(shape, device)
    a, _, _, _ = ragged(shape, shape.k, formats[0], device, 0)
    b = matrices(normals((4, shape.n, shape.k), torch.float32, device, generator), formats[1])
    alpha = normals((4,), torch.float32, device, generator)
    arguments = arguments_of(a, b, formats, group_sizes=sizes, alpha=alpha)
    expected = ops.grouped_gemm(**arguments)
    for name, data in layouts(b).items():
        got = ops.grouped_gemm(**{**arguments, "b": data})
        assert_same_bits(got, expected, name)


@pytest.mark.parametrize("formats", PAIRS[::3] + PAIRS[-2:], ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(formats: tuple[str, str], device: torch.device) -> None:
    shape = fitted(GROUPED_SHAPES[3], formats)
    a, _, _, _ = ragged(shape, shape.k, formats[0], device, 0)
    b = matrices(torch.randn(len(shape.sizes), shape.n, shape.k, device=device), formats[1])
    arguments = arguments_of(a, b, formats, group_sizes=group_sizes(shape, device))
    opcheck(_ops.grouped_gemm.default, (), arguments)


@pytest.mark.parametrize("key", ["fp8_tensor", "nvfp4"])
def test_compiled(key: str, device: torch.device) -> None:
    sizes = torch.tensor([2, 0, 3], device=device)

    def step(x: Tensor, weights: list[Tensor]) -> Tensor:
        amax = [ops.amax(w, key) for w in weights] if key == "nvfp4" else None
        whole = torch.cat(amax) if amax else None
        x_amax = ops.amax(x, key, sizes) if amax else None
        rows = ops.quantize(x, key, sizes, x_amax)
        b = tuple(list(t) for t in zip(*ops.quantize_list(weights, key, whole), strict=True))
        arguments = quantized_arguments((*rows, x_amax), (*b, amax), key, key)
        return ops.grouped_gemm(**arguments, group_sizes=sizes, dtype=torch.float32)

    weights = [torch.randn(16, 32, device=device) for _ in range(3)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (6, 9):
        x = torch.randn(rows, 32, device=device)
        assert_same_bits(compiled(x, weights), step(x, weights))


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [("fp8_block", "fp8_block:square"), ("fp8_tensor", "fp8_tensor")])
def test_graph_replays_with_new_sizes_and_data(formats: tuple[str, str]) -> None:
    shape = GroupedShape("", (60, 70, 80, 0, 90), 333, 160, 192)
    generator, sizes = torch.Generator().manual_seed(0), group_sizes(shape, CUDA)
    a, _, _, _ = ragged(shape, shape.k, formats[0], CUDA, 0)
    b = matrices(normals((5, shape.n, shape.k), torch.float32, CUDA, generator), formats[1])

    def product() -> Tensor:
        return ops.grouped_gemm(**arguments_of(a, b, formats, group_sizes=sizes))

    product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
    for seed, new in enumerate([(0, 0, 0, 0, 0), (333, 0, 0, 0, 0), (1, 2, 3, 5, 7), (127, 1, 128, 0, 77)]):
        changed = GroupedShape("", new, 333, 160, 192)
        sizes.copy_(torch.tensor(new))
        other, _, _, _ = ragged(changed, shape.k, formats[0], CUDA, seed + 1)
        weights = matrices(normals((5, shape.n, shape.k), torch.float32, CUDA, generator), formats[1])
        for target, arguments in zip((a, *b), (other, *weights), strict=True):
            target.data.copy_(arguments.data)
            target.scale.copy_(arguments.scale)
        captured.fill_(float("nan"))
        graph.replay()
        assert_same_bits(captured, product_of_stack(other, weights, formats, group_sizes=sizes), str(new))


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [("fp8_block", "fp8_block:square"), ("fp8_tensor", "fp8_tensor")])
def test_no_copies_of_quantized_data_and_no_synchronization(formats: tuple[str, str]) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper multiplies FP8 data without dequantizing it")
    shape = GroupedShape("", (15,) * 8, 128, 1024, 1024)
    a, _, _, _ = ragged(shape, shape.k, formats[0], CUDA, 0)
    b = matrices(torch.randn(8, shape.n, shape.k, device=CUDA), formats[1])
    arguments = arguments_of(a, b, formats, group_sizes=group_sizes(shape, CUDA))
    taken = most_memory(lambda: ops.grouped_gemm(**arguments))
    assert taken < 2 * 1024 * 1024, "a quarter of the quantized data"


KEY = "fp8_block"
SIZES = torch.tensor([1, 2])
X = ops.quantize(torch.randn(4, 130), KEY, SIZES)
W, WS = map(list, zip(*ops.quantize_list([torch.randn(5, 130) for _ in range(2)], KEY), strict=True))
T = [
    list(t)
    for t in zip(*ops.quantize_list([torch.randn(5, 130) for _ in range(2)], "fp8_tensor"), strict=True)
]
N = [
    list(t)
    for t in zip(
        *ops.quantize_list([torch.randn(5, 144) for _ in range(2)], "nvfp4", torch.ones(2)), strict=True
    )
]
AGREE = "Pass tensors whose sizes agree."


@pytest.mark.parametrize(
    ("b", "b_scale", "sizes", "key", "more", "error", "text"),
    [
        ([], [], SIZES, KEY, {}, ValueError,
         "'b': expected 1 to 1024 matrices, as many as a launch takes addresses, got 0 of them. "
         "Pass more groups than that as one tensor."),
        (W, WS[:1], SIZES, KEY, {}, ValueError,
         "'b_scale': expected scale_inv of each matrix, 2 tensors for 'fp8_block', got 1. "
         "Pass what the operand was quantized to."),
        (W, [WS[0], WS[1][:1]], SIZES, KEY, {}, ValueError,
         "'b_scale[1]': expected size 2 in dimension 0 (what the format gives data of this size), "
         f"got float32[1, 8] on cpu. {AGREE}"),
        (W, [WS[0][:1], WS[1]], SIZES, KEY, {}, ValueError,
         "'b_scale[0]': expected size 2 in dimension 0 (what the format gives data of this size), "
         f"got float32[1, 8] on cpu. {AGREE}"),
        (W, [WS[0], WS[1].double()], SIZES, KEY, {}, TypeError,
         "'b_scale[1]': expected one of the dtypes float32, got float64. Convert it with .to() first."),
        ([W[0], W[1][:4]], WS, SIZES, KEY, {}, ValueError,
         "'b[1]': expected size 5 in dimension 0 (that of 'b[0]'), got float8_e4m3fn[4, 130] on cpu. " + AGREE),
        (W, WS, SIZES, KEY + ":e5m2", {}, TypeError,
         "'b[0]': expected one of the dtypes float8_e5m2, got float8_e4m3fn. Convert it with .to() first."),
        (W, WS, torch.tensor([1, 2, 1]), KEY, {}, ValueError,
         f"'group_sizes': expected size 2 in dimension 0 (the matrices of 'b'), got int64[3] on cpu. {AGREE}"),
        (W, WS, torch.tensor([3, 2]), KEY, {}, ValueError,
         "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 5 at group 1. "
         "Enlarge the buffer or fix the sizes."),
        (W, WS, SIZES, KEY, {"transpose_b": False}, ValueError,
         "'b[0]': expected size 130 in dimension 0 (the columns of 'a', summed over), got float8_e4m3fn[5, 130] on "
         f"cpu. {AGREE}"),
        (T[0], [*T[1], torch.ones(1), torch.ones(1)], SIZES, "fp8_tensor", {}, ValueError,
         "'b_scale': expected scale_inv of each matrix, 2 tensors for 'fp8_tensor', got 4. "
         "Pass what the operand was quantized to."),
        (N[0], N[1], SIZES, "nvfp4", {}, ValueError,
         "'b_scale': expected scale_inv of each matrix, then amax of each matrix, 4 tensors for 'nvfp4', got 2. "
         "Pass what the operand was quantized to."),
        (N[0], [*N[1], torch.ones(1), torch.ones(2)], SIZES, "nvfp4", {}, ValueError,
         "'b_scale[3]': expected sizes [1], the largest magnitudes that 'nvfp4' scales by, got float32[2] on cpu. "
         "Compute it with transformer_plugin.ops.amax."),
        (*T, SIZES, "fp8_tensor", {"alpha": torch.ones(3)}, ValueError,
         f"'alpha': expected size 2 in dimension 0 (one factor for each product), got float32[3] on cpu. {AGREE}"),
        (W, WS, SIZES, "bf16", {}, ValueError,
         "'b_format': expected a format with scales, fp8_tensor, fp8_row, fp8_block, mxfp8 or nvfp4, got 'bf16'. "
         "Use the unquantized tensor, or convert it with .to()."),
    ],
)  # fmt: skip
def test_errors(
    b: list[Tensor],
    b_scale: list[Tensor],
    sizes: Tensor,
    key: str,
    more: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error) as caught:
        ops.grouped_gemm(**quantized_arguments(X, (b, b_scale), KEY, key), group_sizes=sizes, **more)
    assert str(caught.value) == f"transformer_plugin::grouped_gemm: argument {text}"
