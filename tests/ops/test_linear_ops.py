"""linear and grouped_linear: values, gradients, saved tensors, compilation, CUDA graphs and synchronization."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.recipes import (
    BFloat16,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from transformer_plugin.testing.gemm_cases import in_fp8_units, integers, normals, poison_tail
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits, fp8_sums, relative_error
from transformer_plugin.testing.quantize_cases import (
    amax_of,
    columns_of,
    extras,
    rows_for,
    rows_of,
    width_for,
)

NONE = ("none", "none", "none")
RECIPES = {
    "bf16": BFloat16(),
    "current": Float8CurrentScaling(),
    "current-pow2": Float8CurrentScaling(power_of_two_scales=True),
    "row": Float8RowwiseScaling(),
    "row-hybrid": Float8RowwiseScaling(hybrid=True, power_of_two_scales=False),
    "block": Float8BlockScaling(),
    "block-fp32": Float8BlockScaling(power_of_two_scales=False),
    "mx": MXFP8BlockScaling(),
    "mx-square": MXFP8BlockScaling(square_weights=True),
    "nv": NVFP4BlockScaling(stochastic_rounding=False),
    "nv-plain": NVFP4BlockScaling(False, False, False),
    "nv-rows": NVFP4BlockScaling(False, False, row_scaled_activations=True),
    "nv-4over6": NVFP4BlockScaling(False, False, False, four_over_six="mse"),
}
#: Combinations that no recipe uses: E5M2 for gradients or weights of mxfp8, and tiled scales.
OTHERS = {
    "mx-hybrid": ("mxfp8:tiled", "mxfp8:square", "mxfp8:e5m2,tiled"),
    "mx-e5m2": ("mxfp8", "mxfp8:e5m2,tiled", "mxfp8:e5m2"),
    "nv-tiled": ("nvfp4:tiled", "nvfp4:square,tiled", "nvfp4"),
}


def keys(recipe: Recipe) -> tuple[str, str, str]:
    return recipe.input_format, recipe.weight_format, recipe.grad_format


by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
by_any_formats = pytest.mark.parametrize(
    "formats", [NONE, *map(keys, RECIPES.values()), *OTHERS.values()], ids=["none", *RECIPES, *OTHERS]
)
_ops = torch.ops.transformer_plugin
SIZES = (70, 0, 130, 5)
ROWS = 230


def rowwise_values(x: Tensor, key: str) -> Tensor:
    """Returns the values of a matrix or a stack after row-wise quantization to a format, in float64."""
    if key in ("none", "bf16"):
        return (x.bfloat16() if key == "bf16" else x).double()
    more = extras(x, key)
    quantized = reference.quantize(x, key, **rows_of(more))
    return reference.dequantize(*quantized, key, torch.float32, **amax_of(more)).double()


def columnwise_values(x: Tensor, key: str) -> Tensor:
    """Returns the values after column-wise quantization; they are rotated if the format has the Hadamard transform."""
    if key in ("none", "bf16"):
        return rowwise_values(x, key)
    more = extras(x, key)
    quantized = reference.quantize(x, key, **columns_of(more), rowwise=False, columnwise=True)
    back = reference.dequantize(
        *quantized, key, torch.float32, transposed=True, **amax_of(more, transposed=True)
    )
    return back.double()


def wgrad_values(x: Tensor, key: str) -> Tensor:
    """Returns the values that a weight gradient reads: for ``fp8_row``, those before quantization."""
    return x.double() if key.startswith("fp8_row") else columnwise_values(x, key)


def groups(sizes: tuple[int, ...]) -> list[tuple[int, slice]]:
    ends = [sum(sizes[: g + 1]) for g in range(len(sizes))]
    return [(g, slice(end - size, end)) for g, (end, size) in enumerate(zip(ends, sizes, strict=True))]


class Step(NamedTuple):
    """The results of one linear, computed in float64 from the values of its quantized operands."""

    exact: tuple[Tensor, ...]  # output, and gradients of input, weight and bias
    magnitude: tuple[Tensor, ...]  # the same with absolute values
    more: tuple[Tensor | float, ...]  # errors of FP8 tensor cores


def step_fp64(x: Tensor, w: Tensor, bias: Tensor, grad: Tensor, formats: tuple[str, str, str]) -> Step:
    input_key, weight_key, grad_key = formats
    n, k = w.shape
    products = (
        (rowwise_values(x, input_key), rowwise_values(w, weight_key).T),
        (rowwise_values(grad, grad_key), columnwise_values(w, weight_key)),
        (wgrad_values(grad, grad_key).T, wgrad_values(x, input_key)),
    )
    results = []
    for f in (lambda t: t, torch.abs):
        forward, grad_x, grad_w = (f(a) @ f(b) for a, b in products)
        results.append((forward + f(bias.double()), grad_x, grad_w, f(grad.double()).sum(0)))
    units = (
        in_fp8_units(input_key, weight_key, x.dtype, n, k, x.device),
        any(in_fp8_units(grad_key, weight_key, x.dtype, k, over, x.device) for over in (n, None)),
        in_fp8_units(grad_key, input_key, w.dtype, k, None, x.device),
    )
    more = [fp8_sums(a, b) if unit else 0.0 for (a, b), unit in zip(products, units, strict=True)]
    return Step(*results, (*more, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@by_any_formats
@pytest.mark.parametrize("shape", [(9, 16, 24), (140, 33, 200), (257, 130, 136)])
def test_linear_agrees_with_float64(
    shape: tuple[int, int, int], formats: tuple[str, str, str], dtype: torch.dtype, device: torch.device
) -> None:
    m, (n, k) = rows_for(shape[0], *formats), (width_for(width, *formats) for width in shape[1:])
    generator = torch.Generator().manual_seed(0)
    x, w, bias, grad = (normals(s, dtype, device, generator) for s in ((m, k), (n, k), (n,), (m, n)))
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    output = ops.linear(*leaves, *formats)
    assert output.dtype == dtype
    got = (output.detach(), *torch.autograd.grad(output, leaves, grad))
    names = ("output", "grad_input", "grad_weight", "grad_bias")
    expected = step_fp64(x, w, bias, grad, formats)
    for name, g, e, a, terms, more in zip(
        names, got, expected.exact, expected.magnitude, (k, n, m, m), expected.more, strict=True
    ):
        assert_rounded_sum(g, e, a, terms, name, more)
    assert_same_bits(ops.linear(x, w, bias, *formats), got[0], "without a gradient")


@by_recipe
def test_error_of_quantization_is_within_the_tolerance(recipe: Recipe, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (normals(s, torch.float32, device, generator) for s in ((256, 512), (384, 512)))
    bound = Format.parse(recipe.input_format).gemm_tolerance
    error = relative_error(ops.linear(x, w, None, *keys(recipe)), x.double() @ w.double().T)
    assert bound / 20 < error < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@by_any_formats
@pytest.mark.parametrize(("n", "k"), [(24, 40), (130, 264)])
def test_grouped_linear_agrees_with_float64(
    n: int, k: int, formats: tuple[str, str, str], dtype: torch.dtype, device: torch.device
) -> None:
    n, k = width_for(n, *formats), width_for(k, *formats)
    counts, total_rows = tuple(rows_for(size, *formats) for size in SIZES), rows_for(ROWS + 16, *formats)
    generator = torch.Generator().manual_seed(0)
    shapes = ((total_rows, k), (len(SIZES), n, k), (len(SIZES), n), (total_rows,), (total_rows, n))
    x, w, bias, scale, grad = (normals(s, dtype, device, generator) for s in shapes)
    scale = scale.float()
    for tensor in (x, scale, grad):
        poison_tail(tensor, counts)
    sizes = torch.tensor(counts, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias, scale)]
    output = ops.grouped_linear(leaves[0], leaves[1], sizes, leaves[2], leaves[3], *formats)
    grad_x, grad_w, grad_bias, grad_scale = torch.autograd.grad(output, leaves, grad)
    total = sum(counts)
    for tensor in (output, grad_x, grad_scale):
        assert_same_bits(tensor[total:].detach(), torch.zeros_like(tensor[total:]), "tail")
    for g, rows in groups(counts):
        one = scale[rows, None].double()
        exact, magnitude, more = step_fp64(x[rows], w[g], torch.zeros_like(bias[g]), grad[rows], formats)
        scaled = one * bias[g].double()
        assert_rounded_sum(output[rows], exact[0] + scaled, magnitude[0] + scaled.abs(), k, "output", more[0])
        assert_rounded_sum(grad_x[rows], exact[1], magnitude[1], n, "grad_input", more[1])
        assert_rounded_sum(grad_w[g], exact[2], magnitude[2], counts[g], "grad_weight", more[2])
        weighted = grad[rows].double() * one
        assert_rounded_sum(grad_bias[g], weighted.sum(0), weighted.abs().sum(0), counts[g], "grad_bias")
        weighted = grad[rows].double() * bias[g].double()
        assert_rounded_sum(grad_scale[rows], weighted.sum(1), weighted.abs().sum(1), n, "grad_bias_scale")


def test_leading_dimensions(device: torch.device) -> None:
    for shape in ((7,), (2, 7), (2, 3, 7), (2, 0, 7), (2, 1, 3, 7)):
        x = torch.randn(shape, device=device, requires_grad=True)
        w = torch.randn(5, 7, device=device, requires_grad=True)
        b = torch.randn(5, device=device, requires_grad=True)
        expected = torch.nn.functional.linear(x, w, b)
        for formats in (NONE, keys(BFloat16())):
            got = ops.linear(x, w, b, *formats)
            tolerance = {} if formats == NONE else {"rtol": 0.02, "atol": 0.1}
            torch.testing.assert_close(got, expected, **tolerance)
            wanted = torch.autograd.grad(expected.sum(), (x, w, b), retain_graph=True)
            torch.testing.assert_close(torch.autograd.grad(got.sum(), (x, w, b)), wanted, **tolerance)


def test_gradcheck() -> None:
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (5, 4), (5,))]
    assert torch.autograd.gradcheck(ops.linear, leaves)
    assert torch.autograd.gradcheck(ops.linear, leaves[:2])


def saved_bytes(function: Callable[[], Tensor]) -> int:
    """Returns the bytes of the storages that autograd saves for the backward, each counted once."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(saved.values())


def test_only_tensors_that_gradients_need_are_saved() -> None:
    x, w = torch.randn(256, 128), torch.randn(384, 128)
    elements = {"input": x.numel(), "weight": w.numel()}
    for formats, width, scales in (
        (NONE, 4, {"input": 0, "weight": 0}),
        (keys(Float8CurrentScaling()), 1, {"input": 4, "weight": 4}),
        (keys(Float8BlockScaling()), 1, {"input": 2 * 128 * 4, "weight": 3 * 4 * 4}),
        (keys(MXFP8BlockScaling()), 1, {"input": 128 * 4 * 2, "weight": 128 * 4 * 3}),
    ):
        for frozen, kept in (("weight", "weight"), ("input", "input")):
            a, b = x.clone(), w.clone()
            (a if frozen == "weight" else b).requires_grad_()
            saved = saved_bytes(lambda a=a, b=b, f=formats: ops.linear(a, b, None, *f))
            assert saved == elements[kept] * width + scales[kept], (formats, frozen)
        assert saved_bytes(lambda f=formats: ops.linear(x, w, None, *f)) == 0


def test_only_requested_gradients_are_computed() -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    for wanted, products in (((x,), 1), ((w,), 1), ((x, w), 2)):
        output = ops.linear(x, w)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(output, wanted, torch.ones_like(output))
        assert sum(e.count for e in profile.key_averages() if e.key == "transformer_plugin::gemm") == products


OPCHECKED = {
    "none": NONE,
    **{
        name: keys(recipe)
        for name, recipe in RECIPES.items()
        if name in ("bf16", "current", "block", "mx", "nv")
    },
}


@pytest.mark.parametrize("formats", OPCHECKED.values(), ids=OPCHECKED.keys())
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(formats: tuple[str, str, str], requires_grad: bool, device: torch.device) -> None:
    n, k = width_for(16, *formats), width_for(24, *formats)
    rows = rows_for(5, *formats)
    for shape in ((rows, k), (2, rows, k), (0, k)):
        x, w, b = (torch.randn(s, device=device, requires_grad=requires_grad) for s in (shape, (n, k), (n,)))
        opcheck(_ops.linear.default, (x, w, b, *formats))
        opcheck(_ops.linear.default, (x, w, None, *formats))
    for sizes, rows in (((16, 0, 128), 160), ((3, 0, 130), 140), ((0, 0), 16), ((), 16), ((0, 0), 0)):
        if any(count != rows_for(count, *formats) for count in (*sizes, rows)):
            continue
        g = len(sizes)
        shapes = ((rows, k), (g, n, k), (g, n), (rows,))
        x, w, b, scale = (torch.randn(s, device=device, requires_grad=requires_grad) for s in shapes)
        counts = torch.tensor(sizes, device=device, dtype=torch.int64)
        opcheck(_ops.grouped_linear.default, (x, [w], counts, b, scale, *formats))
        opcheck(_ops.grouped_linear.default, (x, [w], counts, None, None, *formats))


@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck_of_operands_that_are_already_bfloat16(device: torch.device) -> None:
    """Below autograd an op must not return one of its arguments."""
    x, w, stack = (
        torch.randn(s, device=device, dtype=torch.bfloat16, requires_grad=True)
        for s in ((4, 8), (6, 8), (2, 6, 8))
    )
    formats = keys(BFloat16())
    opcheck(_ops.linear.default, (x, w, None, *formats))
    sizes = torch.tensor([1, 2], device=device)
    opcheck(_ops.grouped_linear.default, (x, [stack], sizes, None, None, *formats))


def training_step(formats: tuple[str, str, str]) -> Callable[..., Tensor]:
    def step(x: Tensor, w: Tensor, sizes: Tensor, bias: Tensor, head: Tensor) -> Tensor:
        hidden = ops.grouped_linear(x, w, sizes, bias, None, *formats)
        return ops.linear(hidden, head, None, *formats).square().mean()

    return step


def step_leaves(formats: tuple[str, str, str], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Returns the input, weight, bias and head of a training step."""
    k, n, out = (width_for(width, *formats) for width in (16, 8, 4))
    shapes = ((4 * rows_for(10, *formats), k), (3, n, k), (3, n), (out, n))
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("formats", OPCHECKED.values(), ids=OPCHECKED.keys())
def test_one_graph_serves_any_group_sizes(formats: tuple[str, str, str], device: torch.device) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = training_step(formats)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    leaves = step_leaves(formats, torch.float32, device)
    for sizes in ((1, 2, 1), (0, 1, 0), (4, 0, 0)):
        counts = torch.tensor(sizes, device=device) * rows_for(10, *formats)
        arguments = (leaves[0], leaves[1], counts, leaves[2], leaves[3])
        got = torch.autograd.grad(compiled(*arguments), leaves)
        for g, expected in zip(got, torch.autograd.grad(step(*arguments), leaves), strict=True):
            torch.testing.assert_close(g, expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("formats", OPCHECKED.values(), ids=OPCHECKED.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_replays_with_new_sizes_and_data(formats: tuple[str, str, str], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cuda")
    shapes = ((352, 64), (3, 32, 64), (3, 32), (352, 32))
    x, w, bias, grad = (normals(s, dtype, device, generator) for s in shapes)
    sizes = torch.tensor([96, 48, 160], device=device)
    main_grad = torch.zeros(3, 32, 64, device=device)

    def step() -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, w, bias)]
        output = ops.grouped_linear(leaves[0], leaves[1], sizes, leaves[2], None, *formats)
        ops.grouped_gemm_wgrad_out(grad, x, sizes, main_grad)
        return (output.detach(), *torch.autograd.grad(output, leaves, grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for new in ((0, 300, 0), (1, 0, 129), (0, 0, 0), (100, 100, 100)):
        new = tuple(rows_for(size, *formats) for size in new)
        sizes.copy_(torch.tensor(new))
        for tensor in (x, w, bias, grad):
            tensor.copy_(normals(tuple(tensor.shape), dtype, device, generator))
        poison_tail(x, new)
        poison_tail(grad, new)
        main_grad.fill_(1.0)
        graph.replay()
        added = main_grad.clone()
        main_grad.fill_(1.0)
        for g, expected in zip(captured, step(), strict=True):
            assert_same_bits(g, expected)
        assert_same_bits(added, main_grad)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", OPCHECKED.values(), ids=OPCHECKED.keys())
def test_calls_do_not_synchronize(formats: tuple[str, str, str]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        leaves = step_leaves(formats, dtype, torch.device("cuda"))
        counts = torch.tensor([1, 0, 2], device="cuda") * rows_for(10, *formats)
        out = torch.zeros(leaves[1].shape, device="cuda")
        grad = torch.ones(leaves[0].shape[0], out.shape[1], device="cuda", dtype=dtype)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = training_step(formats)(leaves[0], leaves[1], counts, leaves[2], leaves[3])
            torch.autograd.grad(loss, leaves)
            ops.grouped_gemm_wgrad_out(grad, leaves[0].detach(), counts, out)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_repeated_calls_give_the_same_bits(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    x = normals((500, 72), torch.bfloat16, device, generator)
    w = normals((3, 40, 72), torch.bfloat16, device, generator)
    sizes = torch.tensor([1, 300, 150], device=device)
    bias = integers((3, 40), torch.float32, device, generator)
    first = ops.grouped_linear(x, w, sizes, bias)
    for _ in range(3):
        assert_same_bits(ops.grouped_linear(x, w, sizes, bias), first)
