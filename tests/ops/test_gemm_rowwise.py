"""Products in fp8_row, whose rows have one scale each: equal bits in the documented order of operations, and
float64 products."""

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
    quantized_arguments,
)
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits, fp8_sums
from transformer_plugin.testing.rowwise_cases import (
    grouped_gemm_rowwise_cases,
    poison_quantized_tail,
    rowwise_quantized,
)

pytestmark = pytest.mark.dtypes_in_turn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = list(grouped_gemm_rowwise_cases())
_ops = torch.ops.transformer_plugin


def operands(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, sizes: Tensor | None = None, **more: Any
) -> dict[str, Any]:
    """Returns the arguments of a product, by name."""
    key = "fp8_row:e5m2" if a.dtype == E5M2 else "fp8_row"
    arguments = quantized_arguments((a, a_scale), (b, b_scale), key, "fp8_row") | more
    return arguments if sizes is None else arguments | {"group_sizes": sizes}


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_output = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def in_fp8_units(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Whether Hopper multiplies the FP8 data without dequantizing it."""
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
    """Compares the rows of one group. ``more`` has the factors of all groups, except that ``bias_scale`` is that of
    these rows."""
    a64, b64 = (data.double() * scale.double()[:, None] for data, scale in (a, b))
    own = {
        name: value if group is None else value[group] for name, value in more.items() if name != "bias_scale"
    }
    alpha = own["alpha"].double() if "alpha" in own else torch.ones((), device=got.device).double()
    added = own["bias"].double() if "bias" in own else torch.zeros((), device=got.device).double()
    if "bias_scale" in more:
        added = added * more["bias_scale"].double()[:, None]
    magnitude = (a64.abs() @ b64.abs().T) * alpha.abs() + added.abs()
    allowed = fp8_sums(a64, b64.T) * alpha.abs() if units else 0.0
    # The product of the scales, its product with the sum, and the product with alpha are rounded too.
    assert_rounded_sum(got, (a64 @ b64.T) * alpha + added, magnitude, a64.shape[1] + 4, more=allowed)


@each_case
@by_output
def test_grouped_product_agrees_with_float64(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    a, a_scale, b, b_scale, sizes, more = case.arguments(device)
    poison((a.shape[0], b.shape[1]), dtype, device)
    got = ops.grouped_gemm(**operands(a, a_scale, b, b_scale, sizes, dtype=dtype, **more))
    meant = reference.grouped_gemm(**operands(a, a_scale, b, b_scale, sizes, dtype=dtype, **more))
    assert got.dtype == dtype
    assert got.shape == (a.shape[0], b.shape[1])
    begin = 0
    for g, size in enumerate(sizes.tolist()):
        rows = slice(begin, begin + size)
        own = dict(more)
        if "bias_scale" in more:
            own["bias_scale"] = more["bias_scale"][rows]
        of_group = (a[rows], a_scale[rows]), (b[g], b_scale[g]), own
        assert_product(got[rows], *of_group, in_fp8_units(a, b, dtype), g)
        if device.type == "cpu":
            assert_product(meant[rows], *of_group, False, g)
        begin += size
    for result in (got, meant):
        assert_same_bits(result[begin:], torch.zeros_like(result[begin:]), "tail")


@by_output
@pytest.mark.parametrize("shape", [*GEMM_SHAPES, (300, 392, 272)], ids=str)
@pytest.mark.parametrize("element", [E4M3, E5M2])
def test_dense_product_agrees_with_float64(
    element: torch.dtype, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    a = rowwise_quantized((m, k), device, generator, element)
    b = rowwise_quantized((n, k), device, generator)
    extras = {
        "alpha": normals((1,), torch.float32, device, generator),
        "bias": normals((n,), torch.float16, device, generator),
    }
    units = in_fp8_units(a[0], b[0], dtype)
    for names in ((), ("alpha",), ("bias",), ("alpha", "bias")):
        more = {name: extras[name] for name in names}
        got = ops.gemm(**operands(*a, *b, dtype=dtype, **more))
        assert got.dtype == dtype
        assert_product(got, a, b, more, units)
        if device.type == "cpu":
            assert_product(reference.gemm(**operands(*a, *b, dtype=dtype, **more)), a, b, more, False)


@by_output
@pytest.mark.parametrize("shape", [*GROUPED_SHAPES[:9], GROUPED_SHAPES[14]], ids=lambda shape: shape.name)
@pytest.mark.parametrize("with_beta", [False, True])
def test_exact_sums_into_a_buffer(
    with_beta: bool, shape: GroupedShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Sums of whole numbers are exact with power-of-two scales, so there is one rounding. A beta of 0 does not read
    the buffer."""
    generator, groups = torch.Generator().manual_seed(0), len(shape.sizes)
    a, b = (
        integers(size, torch.float32, CPU, generator, 2).to(E4M3)
        for size in ((shape.rows, shape.k), (groups, shape.n, shape.k))
    )
    a_scale, b_scale = (2.0 ** torch.randint(-2, 3, t.shape[:-1], generator=generator) for t in (a, b))
    bias = integers((groups, shape.n), torch.float32, CPU, generator)
    beta = torch.tensor([0.5, 0.0, 2.0, 1.0])[torch.arange(groups) % 4] if with_beta else None
    before = integers((shape.rows, shape.n), torch.float32, CPU, generator).to(dtype)
    expected = before.clone() if with_beta else torch.zeros_like(before)
    begin = 0
    for g, size in enumerate(shape.sizes):
        rows = slice(begin, begin + size)
        values = (a[rows].double() * a_scale[rows, None].double()) @ (
            b[g].double() * b_scale[g, :, None].double()
        ).T
        added = 0.0 if beta is None else before[rows].double() * float(beta[g])
        expected[rows] = (values + bias[g].double() + added).to(dtype)
        if beta is not None and beta[g] == 0:
            before[rows] = float("nan")
        begin += size
    tensors = (t.to(device) for t in (a, a_scale, b, b_scale, group_sizes(shape, CPU)))
    arguments = operands(*tensors, bias=bias.to(device), beta=None if beta is None else beta.to(device))
    wide = torch.full((shape.rows, shape.n + 8), 7.0, dtype=dtype, device=device)
    for out in (torch.empty_like(before, device=device), wide[:, : shape.n]):
        out.copy_(before)
        version = out._version
        ops.grouped_gemm_out(**arguments, out=out)
        assert out._version == version
        assert_same_bits(out + 0, expected.to(device) + 0)
    assert (wide[:, shape.n :] == 7.0).all()
    if groups > 0:
        matrices = {
            "b": list(arguments["b"].view(torch.uint8).clone().view(E4M3)),
            "b_scale": list(arguments["b_scale"][0]),
        }
        out = before.clone().to(device)
        ops.grouped_gemm_out(**arguments | matrices, out=out)
        assert_same_bits(out + 0, expected.to(device) + 0, "a list")
    if groups == 1 and begin == shape.rows:
        dense = {name: value for name, value in arguments.items() if name != "group_sizes"}
        dense |= {"b": arguments["b"][0], "b_scale": arguments["b_scale"][0][0], "bias": arguments["bias"][0]}
        out = before.clone().to(device)
        ops.gemm_out(**dense, out=out)
        assert_same_bits(out + 0, expected.to(device) + 0, "dense")


def in_documented_order(
    sums: Tensor, a_scale: Tensor, b_scale: Tensor, more: dict[str, Tensor], group: int
) -> Tensor:
    """Computes the documented order of operations in numpy, each step one float32 operation. float64 represents the
    product inside the fma exactly."""
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
    """Small whole numbers have exact sums, also in FP8 tensor cores, so the remaining steps must agree to the last
    bit."""
    generator = torch.Generator().manual_seed(0)
    groups = len(shape.sizes)
    a, b = (
        integers(size, torch.float32, CPU, generator, 2).to(E4M3)
        for size in ((shape.rows, shape.k), (groups, shape.n, shape.k))
    )
    a_scale, b_scale = (torch.randn(data.shape[:-1], generator=generator).exp() for data in (a, b))
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
        expected[rows] = in_documented_order(
            a[rows].double() @ b[g].double().T, a_scale[rows], b_scale[g], own, g
        )
        begin += size
    poison_quantized_tail(a, shape.sizes)
    poison_tail(a_scale, shape.sizes)
    arguments = (t.to(device) for t in (a, a_scale, b, b_scale, group_sizes(shape, CPU)))
    arguments = operands(*arguments, dtype=dtype, **{name: value.to(device) for name, value in more.items()})
    got = ops.grouped_gemm(**arguments)
    assert_same_bits(got + 0, expected.to(dtype).to(device) + 0)


def test_error_of_quantized_operands(device: torch.device) -> None:
    """For rows and weights of any magnitude, the error is at most that of rounding both operands to E4M3."""
    generator = torch.Generator().manual_seed(0)
    x, w = (normals(size, torch.float32, device, generator) for size in ((70, 256), (2, 64, 256)))
    x, w = (t * 2.0 ** torch.arange(t.shape[-2], device=device).remainder(20)[:, None] for t in (x, w))
    sizes = torch.tensor([30, 33], device=device)
    quantized = *ops.quantize(x, "fp8_row"), *ops.quantize(w, "fp8_row")
    got = ops.grouped_gemm(**operands(*quantized, sizes, dtype=torch.float32))
    for g, rows in enumerate((slice(0, 30), slice(30, 63))):
        exact, size = x[rows].double() @ w[g].double().T, x[rows].double().square() @ w[g].double().T.square()
        assert ((got[rows] - exact).abs() <= 6 * 2**-4 * 2**0.5 * size.sqrt()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_operands_give_the_same_bits(dtype: torch.dtype, device: torch.device) -> None:
    generator, sizes = torch.Generator().manual_seed(0), torch.tensor([4, 0, 5], device=device)
    a, a_scale = rowwise_quantized((11, 64), device, generator)
    b, b_scale = rowwise_quantized((3, 16, 64), device, generator)
    expected = ops.grouped_gemm(**operands(a, a_scale, b, b_scale, sizes, dtype=dtype))
    column_major = [t.mT.contiguous().mT for t in (a, b)]
    apart = [torch.stack([t, t], -1)[..., 0] for t in (a_scale, b_scale)]
    got = ops.grouped_gemm(
        **operands(column_major[0], apart[0], column_major[1], apart[1], sizes, dtype=dtype)
    )
    assert_same_bits(got, expected)
    shifted = torch.cat([b_scale.flatten(), b_scale.flatten()])[3 : 3 + b_scale.numel()].view(3, 16)
    got = ops.grouped_gemm(**operands(a, a_scale, b, shifted, sizes, dtype=dtype))
    meant = reference.grouped_gemm(**operands(a, a_scale, b, shifted, sizes, dtype=torch.float32))
    assert torch.allclose(got.float(), meant, rtol=0.02, atol=1e-3 * float(meant.abs().max()))


@pytest.mark.parametrize("case", CASES[1::5], ids=lambda case: case.name)
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(case: Case, device: torch.device) -> None:
    *arguments, more = case.arguments(device)
    arguments = operands(*arguments, **more)
    opcheck(_ops.grouped_gemm.default, (), arguments | {"b": [arguments["b"]]})
    generator = torch.Generator().manual_seed(0)
    dense = (*rowwise_quantized((5, 24), device, generator), *rowwise_quantized((7, 24), device, generator))
    opcheck(_ops.gemm.default, (), operands(*dense, dtype=torch.float32))
    opcheck(_ops.gemm.default, (), operands(*dense, bias=torch.ones(7, device=device)))
    out = torch.ones(5, 7, device=device)
    opcheck(_ops.gemm_out.default, (), operands(*dense, out=out, beta=torch.ones(1, device=device)))


def test_compiled(device: torch.device) -> None:
    sizes = torch.tensor([2, 0, 3], device=device)

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ops.quantize(x, "fp8_row"), ops.quantize(w, "fp8_row")
        dense = ops.gemm(**operands(*a, b[0][0], b[1][0]))
        return ops.grouped_gemm(**operands(*a, *b, sizes)), dense

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (6, 9):
        x, w = torch.randn(rows, 32, device=device), torch.randn(3, 16, 32, device=device)
        for got, expected in zip(compiled(x, w), step(x, w), strict=True):
            assert_same_bits(got, expected)


@pytest.mark.gpu
@by_output
def test_graph_replays_with_new_sizes_and_data(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([60, 70, 80, 0, 90], device=CUDA)
    added = (
        *rowwise_quantized((333, 192), CUDA, generator),
        *rowwise_quantized((5, 160, 192), CUDA, generator),
    )
    ops.grouped_gemm(**operands(*added, sizes, dtype=dtype))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.grouped_gemm(**operands(*added, sizes, dtype=dtype))
    for new in [
        (0, 0, 0, 0, 0),
        (333, 0, 0, 0, 0),
        (1, 2, 3, 5, 7),
        (17, 100, 0, 33, 120),
        (127, 1, 128, 0, 77),
    ]:
        arguments = (
            *rowwise_quantized((333, 192), CPU, generator),
            *rowwise_quantized((5, 160, 192), CPU, generator),
        )
        for tensor, value in zip((*added, sizes), (*arguments, torch.tensor(new)), strict=True):
            tensor.copy_(value)
        captured.fill_(float("nan"))
        graph.replay()
        begin, (a, a_scale, b, b_scale) = 0, added
        for g, size in enumerate(new):
            rows = slice(begin, begin + size)
            units = in_fp8_units(a, b, dtype)
            assert_product(captured[rows], (a[rows], a_scale[rows]), (b[g], b_scale[g]), {}, units)
            begin += size
        assert_same_bits(captured[begin:], torch.zeros_like(captured[begin:]), "tail")


@pytest.mark.gpu
def test_bits_do_not_depend_on_launch_options_or_tail() -> None:
    shape = GroupedShape("several tiles", (300, 1, 0, 513, 128, 385), 1400, 776, 208)
    generator = torch.Generator().manual_seed(0)
    a, a_scale = rowwise_quantized((shape.rows, shape.k), CUDA, generator)
    b, b_scale = rowwise_quantized((6, shape.n, shape.k), CUDA, generator)
    sizes, end = group_sizes(shape, CUDA), sum(shape.sizes)
    expected = ops.grouped_gemm(**operands(a, a_scale, b, b_scale, sizes))
    for options in ({"max_sms": 2}, {"max_sms": 57}, {"expected_rows": 100}):
        for _ in range(20):
            got = ops.grouped_gemm(**operands(a, a_scale, b, b_scale, sizes, **options))
            assert_same_bits(got, expected, str(options))
    short = ops.grouped_gemm(**operands(a[:end], a_scale[:end], b, b_scale, sizes))
    assert_same_bits(short, expected[:end])


@pytest.mark.gpu
def test_no_dequantized_copies_and_no_synchronization() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper multiplies FP8 data without dequantizing it")
    generator, sizes = torch.Generator().manual_seed(0), torch.full((8,), 15, device=CUDA)
    arguments = operands(
        *rowwise_quantized((128, 1024), CUDA, generator),
        *rowwise_quantized((8, 1024, 1024), CUDA, generator),
        sizes,
    )
    ops.grouped_gemm(**arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.grouped_gemm(**arguments)
        ops.grouped_gemm(**arguments, dtype=torch.float16)  # dequantizes, also without synchronization
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.grouped_gemm(**arguments)
    assert torch.cuda.max_memory_allocated() - before < 2 * 1024 * 1024, "a quarter of the quantized data"
