"""Products of FP8 with a scale for each row: the order that is written down bit for bit, and float64 products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from tests.ops.gemm_oracle import poison
from transformer_plugin import ops, reference
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import (
    GEMM_SHAPES,
    GROUPED_SHAPES,
    GroupedShape,
    group_sizes,
    integers,
    normals,
    poison_tail,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits, fp8_sums
from transformer_plugin.testing.rowwise_cases import grouped_gemm_rowwise_cases, poison_codes, row_codes

pytestmark = pytest.mark.dtypes_in_turn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = list(grouped_gemm_rowwise_cases())
_ops = torch.ops.transformer_plugin
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_output = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def in_fp8_units(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether a Hopper multiplies the codes as they are."""
    if a.device.type != "cuda" or torch.cuda.get_device_capability(a.device)[0] != 9:
        return False
    return dtype == torch.bfloat16 and b.shape[-2] % 8 == 0 and b.shape[-1] % 16 == 0


def assert_product(
    got: Tensor,
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    more: dict[str, Tensor],
    units: bool,
    group: int | None = None,
) -> None:
    """One group's rows; ``more`` has the numbers of all groups, but of bias_scale those of the rows."""
    a64, b64 = (codes.double() * scale.double()[:, None] for codes, scale in (a, b))
    own = {
        name: value if group is None else value[group] for name, value in more.items() if name != "bias_scale"
    }
    alpha = own["alpha"].double() if "alpha" in own else torch.ones((), device=got.device).double()
    added = own["bias"].double() if "bias" in own else torch.zeros((), device=got.device).double()
    if "bias_scale" in more:
        added = added * more["bias_scale"].double()[:, None]
    magnitude = (a64.abs() @ b64.abs().T) * alpha.abs() + added.abs()
    allowed = fp8_sums(a64, b64.T) * alpha.abs() if units else 0.0
    # The scales' product, it times the sum and alpha times that are rounded too.
    assert_rounded_sum(got, (a64 @ b64.T) * alpha + added, magnitude, a64.shape[1] + 4, more=allowed)


@each_case
@by_output
def test_grouped(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    a, a_scale, b, b_scale, sizes, more = case.arguments(device)
    poison((a.shape[0], b.shape[1]), dtype, device)
    got = ops.grouped_gemm_rowwise(a, a_scale, b, b_scale, sizes, dtype=dtype, **more)
    meant = reference.grouped_gemm_rowwise(a, a_scale, b, b_scale, sizes, dtype=dtype, **more)
    assert got.dtype == dtype
    assert got.shape == (a.shape[0], b.shape[1])
    begin = 0
    for g, size in enumerate(sizes.tolist()):
        rows = slice(begin, begin + size)
        own = dict(more)
        if "bias_scale" in more:
            own["bias_scale"] = more["bias_scale"][rows]
        operands = (a[rows], a_scale[rows]), (b[g], b_scale[g]), own
        assert_product(got[rows], *operands, in_fp8_units(a, b, dtype), g)
        if device.type == "cpu":
            assert_product(meant[rows], *operands, False, g)
        begin += size
    for result in (got, meant):
        assert_same_bits(result[begin:], torch.zeros_like(result[begin:]), "tail")


@by_output
@pytest.mark.parametrize("shape", [*GEMM_SHAPES, (300, 392, 272)], ids=str)
@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_dense(
    element: torch.dtype, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    a = row_codes((m, k), device, generator, element)
    b = row_codes((n, k), device, generator)
    extras = {
        "alpha": normals((1,), torch.float32, device, generator),
        "bias": normals((n,), torch.float16, device, generator),
    }
    units = in_fp8_units(a[0], b[0], dtype)
    for names in ((), ("alpha",), ("bias",), ("alpha", "bias")):
        more = {name: extras[name] for name in names}
        got = ops.gemm_rowwise(*a, *b, dtype=dtype, **more)
        assert got.dtype == dtype
        assert_product(got, a, b, more, units)
        if device.type == "cpu":
            assert_product(reference.gemm_rowwise(*a, *b, dtype=dtype, **more), a, b, more, False)


def in_order(sums: Tensor, a_scale: Tensor, b_scale: Tensor, more: dict[str, Tensor], group: int) -> Tensor:
    """The order that the docstring writes down, in numpy: each step one float32 operation. float64 holds the product
    of the fma exactly."""
    one = np.float32(1)
    x = sums.numpy().astype(np.float32) * (a_scale.numpy()[:, None] * b_scale.numpy())
    if "alpha" in more:
        x = x * more["alpha"].numpy()[group]
    if "bias" in more:
        scale = more["bias_scale"].numpy()[:, None] if "bias_scale" in more else one
        bias = more["bias"].float().numpy()[group]
        x = (x.astype(np.float64) + scale.astype(np.float64) * bias.astype(np.float64)).astype(np.float32)
    return torch.from_numpy(x)


@pytest.mark.parametrize("shape", GROUPED_SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("extra", ["plain", "factors", "bias", "all"])
@by_output
def test_order_of_the_factors(
    dtype: torch.dtype, extra: str, shape: GroupedShape, device: torch.device
) -> None:
    """Small whole codes have exact sums, also in FP8 units, so what follows must be right to the last bit."""
    generator = torch.Generator().manual_seed(0)
    groups = len(shape.sizes)
    a, b = (
        integers(size, torch.float32, CPU, generator, 2).to(E4M3)
        for size in ((shape.rows, shape.k), (groups, shape.n, shape.k))
    )
    a_scale, b_scale = (torch.randn(codes.shape[:-1], generator=generator).exp() for codes in (a, b))
    more: dict[str, Tensor] = {}
    if extra in ("factors", "all"):
        more["alpha"] = normals((groups,), torch.float32, CPU, generator)
    if extra in ("bias", "all"):
        more["bias"] = normals((groups, shape.n), torch.float32, CPU, generator)
    if extra == "all":
        more["bias_scale"] = normals((shape.rows,), torch.float32, CPU, generator)
    expected, begin = torch.zeros(shape.rows, shape.n), 0
    for g, size in enumerate(shape.sizes):
        rows = slice(begin, begin + size)
        own = more | ({"bias_scale": more["bias_scale"][rows]} if "bias_scale" in more else {})
        expected[rows] = in_order(a[rows].double() @ b[g].double().T, a_scale[rows], b_scale[g], own, g)
        begin += size
    poison_codes(a, shape.sizes)
    poison_tail(a_scale, shape.sizes)
    arguments = (t.to(device) for t in (a, a_scale, b, b_scale, group_sizes(shape, CPU)))
    got = ops.grouped_gemm_rowwise(
        *arguments, dtype=dtype, **{name: value.to(device) for name, value in more.items()}
    )
    assert_same_bits(got + 0, expected.to(dtype).to(device) + 0)


def test_operands_that_quantize_gives(device: torch.device) -> None:
    """Rows and weights of any magnitudes come out within what rounding both to E4M3 costs."""
    generator = torch.Generator().manual_seed(0)
    x, w = (normals(size, torch.float32, device, generator) for size in ((70, 256), (2, 64, 256)))
    x, w = (t * 2.0 ** torch.arange(t.shape[-2], device=device).remainder(20)[:, None] for t in (x, w))
    sizes = torch.tensor([30, 33], device=device)
    got = ops.grouped_gemm_rowwise(
        *ops.quantize(x, "fp8_row"), *ops.quantize(w, "fp8_row"), sizes, dtype=torch.float32
    )
    for g, rows in enumerate((slice(0, 30), slice(30, 63))):
        exact, size = x[rows].double() @ w[g].double().T, x[rows].double().square() @ w[g].double().T.square()
        assert ((got[rows] - exact).abs() <= 6 * 2**-4 * 2**0.5 * size.sqrt()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides(dtype: torch.dtype, device: torch.device) -> None:
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([4, 0, 5], device=device)
    a, a_scale = row_codes((11, 64), device, generator)
    b, b_scale = row_codes((3, 16, 64), device, generator)
    expected = ops.grouped_gemm_rowwise(a, a_scale, b, b_scale, sizes, dtype=dtype)
    turned = [t.mT.contiguous().mT for t in (a, b)]
    apart = [torch.stack([t, t], -1)[..., 0] for t in (a_scale, b_scale)]
    got = ops.grouped_gemm_rowwise(turned[0], apart[0], turned[1], apart[1], sizes, dtype=dtype)
    assert_same_bits(got, expected)
    shifted = torch.cat([b_scale.flatten(), b_scale.flatten()])[3 : 3 + b_scale.numel()].view(3, 16)
    got = ops.grouped_gemm_rowwise(a, a_scale, b, shifted, sizes, dtype=dtype)
    meant = reference.grouped_gemm_rowwise(a, a_scale, b, shifted, sizes, dtype=torch.float32)
    assert torch.allclose(got.float(), meant, rtol=0.02, atol=1e-3 * float(meant.abs().max()))


@pytest.mark.parametrize("case", CASES[1::5], ids=lambda case: case.name)
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(case: Case, device: torch.device) -> None:
    *arguments, more = case.arguments(device)
    check = opcheck
    check(_ops.grouped_gemm_rowwise.default, tuple(arguments), more)
    generator = torch.Generator().manual_seed(0)
    dense = (*row_codes((5, 24), device, generator), *row_codes((7, 24), device, generator))
    check(_ops.gemm_rowwise.default, dense, {"dtype": torch.float32})
    check(_ops.gemm_rowwise.default, dense, {"bias": torch.ones(7, device=device)})


def test_compiled(device: torch.device) -> None:
    sizes = torch.tensor([2, 0, 3], device=device)

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ops.quantize(x, "fp8_row"), ops.quantize(w, "fp8_row")
        dense = ops.gemm_rowwise(*a, b[0][0], b[1][0])
        return ops.grouped_gemm_rowwise(*a, *b, sizes), dense

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 9):
        x, w = torch.randn(rows, 32, device=device), torch.randn(3, 16, 32, device=device)
        for got, expected in zip(compiled(x, w), step(x, w), strict=True):
            assert_same_bits(got, expected)


@pytest.mark.gpu
@by_output
def test_graph_follows_sizes_and_data(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([60, 70, 80, 0, 90], device=CUDA)
    operands = (*row_codes((333, 192), CUDA, generator), *row_codes((5, 160, 192), CUDA, generator))
    ops.grouped_gemm_rowwise(*operands, sizes, dtype=dtype)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.grouped_gemm_rowwise(*operands, sizes, dtype=dtype)
    for new in [
        (0, 0, 0, 0, 0),
        (333, 0, 0, 0, 0),
        (1, 2, 3, 5, 7),
        (17, 100, 0, 33, 120),
        (127, 1, 128, 0, 77),
    ]:
        given = (*row_codes((333, 192), CPU, generator), *row_codes((5, 160, 192), CPU, generator))
        for tensor, value in zip((*operands, sizes), (*given, torch.tensor(new)), strict=True):
            tensor.copy_(value)
        captured.fill_(float("nan"))
        graph.replay()
        begin, (a, a_scale, b, b_scale) = 0, operands
        for g, size in enumerate(new):
            rows = slice(begin, begin + size)
            units = in_fp8_units(a, b, dtype)
            assert_product(captured[rows], (a[rows], a_scale[rows]), (b[g], b_scale[g]), {}, units)
            begin += size
        assert_same_bits(captured[begin:], torch.zeros_like(captured[begin:]), "tail")


@pytest.mark.gpu
def test_same_bits_with_any_plan_and_tail() -> None:
    shape = GroupedShape("several tiles", (300, 1, 0, 513, 128, 385), 1400, 776, 208)
    generator = torch.Generator().manual_seed(0)
    a, a_scale = row_codes((shape.rows, shape.k), CUDA, generator)
    b, b_scale = row_codes((6, shape.n, shape.k), CUDA, generator)
    sizes, end = group_sizes(shape, CUDA), sum(shape.sizes)
    expected = ops.grouped_gemm_rowwise(a, a_scale, b, b_scale, sizes)
    for options in ({"max_sms": 2}, {"max_sms": 57}, {"expected_rows": 100}):
        for _ in range(20):
            got = ops.grouped_gemm_rowwise(a, a_scale, b, b_scale, sizes, **options)
            assert_same_bits(got, expected, str(options))
    short = ops.grouped_gemm_rowwise(a[:end], a_scale[:end], b, b_scale, sizes)
    assert_same_bits(short, expected[:end])


@pytest.mark.gpu
def test_no_widened_copies_and_no_host_reads() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("codes are multiplied as they are on a Hopper")
    generator, sizes = torch.Generator().manual_seed(0), torch.full((8,), 15, device=CUDA)
    operands = (*row_codes((128, 1024), CUDA, generator), *row_codes((8, 1024, 1024), CUDA, generator))
    ops.grouped_gemm_rowwise(*operands, sizes)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.grouped_gemm_rowwise(*operands, sizes)
        ops.grouped_gemm_rowwise(*operands, sizes, dtype=torch.float16)  # widened, but not read by the host
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.grouped_gemm_rowwise(*operands, sizes)
    assert torch.cuda.max_memory_allocated() - before < 2 * 1024 * 1024, "a quarter of the codes"


A, AS = torch.zeros(4, 16).to(E4M3), torch.ones(4)
B, BS = torch.zeros(2, 8, 16).to(E4M3), torch.ones(2, 8)
S = torch.tensor([1, 2])
AGREE = "Pass tensors whose sizes agree."


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((A.float(), AS, B, BS, S), {}, TypeError,
         "'a': expected one of the dtypes float8_e4m3fn, float8_e5m2, got float32. Convert it with .to() first."),
        ((A, AS, B.float().to(E5M2), BS, S), {}, TypeError,
         "'b': expected one of the dtypes float8_e4m3fn, got float8_e5m2. Convert it with .to() first."),
        ((A[0], AS, B, BS, S), {}, ValueError,
         "'a': expected 2 dimensions, got float8_e4m3fn[16] on cpu. Reshape it first."),
        ((A, AS, B[0], BS, S), {}, ValueError,
         "'b': expected 3 dimensions, got float8_e4m3fn[8, 16] on cpu. Reshape it first."),
        ((A, AS.double(), B, BS, S), {}, TypeError,
         "'a_scale': expected one of the dtypes float32, got float64. Convert it with .to() first."),
        ((A, AS[:3], B, BS, S), {}, ValueError,
         f"'a_scale': expected size 4 in dimension 0 (one scale for each row of 'a'), got float32[3] on cpu. {AGREE}"),
        ((A, AS[:, None], B, BS, S), {}, ValueError,
         "'a_scale': expected 1 dimensions, got float32[4, 1] on cpu. Reshape it first."),
        ((A, AS, B, BS[:, :7], S), {}, ValueError,
         "'b_scale': expected size 8 in dimension 1 (one scale for each row of 'b'), got float32[2, 7] on cpu. "
         f"{AGREE}"),
        ((A[:, :8], AS, B, BS, S), {}, ValueError,
         "'b': expected size 8 in dimension 2 (the columns of 'a', summed over), got float8_e4m3fn[2, 8, 16] on cpu. "
         f"{AGREE}"),
        ((A, AS, B, BS, S[:1]), {}, ValueError,
         f"'group_sizes': expected size 2 in dimension 0 (the matrices of 'b'), got int64[1] on cpu. {AGREE}"),
        ((A, AS, B, BS, S + 1), {}, ValueError,
         "'group_sizes': expected sizes that sum to at most 4, the rows of the buffer, got a sum of 5 at group 1. "
         "Enlarge the buffer or fix the sizes."),
        ((A, AS, B, BS, S), {"dtype": torch.float64}, TypeError,
         "'dtype': expected one of float32, bfloat16, float16, got float64. Convert the result with .to() instead."),
        ((A, AS, B, BS, S), {"alpha": torch.ones(1)}, ValueError,
         f"'alpha': expected size 2 in dimension 0 (one factor for each product), got float32[1] on cpu. {AGREE}"),
        ((A, AS, B, BS, S), {"bias": torch.ones(8)}, ValueError,
         "'bias': expected 2 dimensions, got float32[8] on cpu. Reshape it first."),
        ((A, AS, B, BS, S), {"bias_scale": AS}, ValueError,
         "'bias_scale': expected no scale without a bias, got float32[4] on cpu. "
         "Pass the bias that it scales, or leave it out."),
        ((A, AS, B, BS, S), {"expected_rows": -2}, ValueError,
         "'expected_rows': expected the rows of all groups together, or -1 for the rows of the buffer, got -2. "
         "Leave it out where it is not known."),
    ],
)  # fmt: skip
def test_errors(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        ops.grouped_gemm_rowwise(*arguments, **options)
    assert str(caught.value) == f"transformer_plugin::grouped_gemm_rowwise: argument {text}"


def test_errors_of_dense() -> None:
    with pytest.raises(ValueError, match=r"gemm_rowwise: argument 'b': expected 2 dimensions"):
        ops.gemm_rowwise(A, AS, B, BS)
    with pytest.raises(ValueError, match=r"gemm_rowwise: argument 'b_scale': expected size 8 in dimension 0"):
        ops.gemm_rowwise(A, AS, B[0], AS)
    with pytest.raises(ValueError, match=r"gemm_rowwise: argument 'bias': expected size 8 in dimension 0"):
        ops.gemm_rowwise(A, AS, B[0], BS[0], bias=AS)


@pytest.mark.gpu
def test_operands_of_another_device() -> None:
    a, a_scale, b, b_scale, sizes = (t.cuda() for t in (A, AS, B, BS, S))
    for i, name in enumerate(("a_scale", "b", "b_scale", "group_sizes")):
        given = [a_scale, b, b_scale, sizes]
        given[i] = given[i].cpu()
        with pytest.raises(ValueError, match=rf"'{name}': expected .* cuda:0"):
            ops.grouped_gemm_rowwise(a, *given)
