"""Products of nvfp4 operands and the linear ops on it: the product of the dequantized operands, summed in FP32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from transformer_plugin import ops, reference
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits

_ops = torch.ops.transformer_plugin
PAIRS = (
    ("nvfp4", "nvfp4:square"),
    ("nvfp4:row_scaled", "nvfp4"),
    ("nvfp4:4over6,tiled", "nvfp4:4over6_mse"),
    ("nvfp4", "mxfp8:tiled"),
)
ROLES = (
    ("nvfp4", "nvfp4:square", "nvfp4"),
    ("nvfp4:rht", "nvfp4:square", "nvfp4:rht"),
    ("nvfp4:row_scaled", "nvfp4", "nvfp4"),
    ("nvfp4:4over6", "nvfp4:4over6,tiled", "nvfp4"),
)
by_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)
by_roles = pytest.mark.parametrize("roles", ROLES, ids="-".join)


class Quantized:
    """A matrix along its rows, or with ``transposed`` its columns, and its values in float64."""

    def __init__(self, x: Tensor, key: str, sizes: Tensor | None = None, transposed: bool = False) -> None:
        suffix = "_transposed" if transposed else ""
        self.key, self.amax = key, None
        if key.startswith("nvfp4"):
            self.amax = getattr(ops, f"amax{suffix}")(x, key, sizes)
        quantize = getattr(ops, ("grouped_quantize" if sizes is not None else "quantize") + suffix)
        arguments = (x, key) if sizes is None else (x, sizes, key)
        self.data, self.scale = quantize(*arguments, self.amax)
        given = [t.cpu() for t in (self.data, self.scale)]
        amax = None if self.amax is None else self.amax.cpu()
        self.values: Tensor
        if sizes is None:
            values = reference.dequantize(*given, key, transposed=transposed, amax=amax)
        else:
            values = reference.grouped_dequantize(*given, sizes.cpu(), key, transposed=transposed, amax=amax)
        self.values = values.to(x.device).double()


@by_pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 16, 16), (48, 32, 64), (144, 272, 160)])
def test_gemm_quantized(
    shape: tuple[int, int, int], dtype: torch.dtype, pair: tuple[str, str], device: torch.device
) -> None:
    m, n, k = shape
    n, k = -(-n // 32) * 32, -(-k // 32) * 32
    torch.manual_seed(0)
    a, b = Quantized(torch.randn(m, k, device=device), pair[0]), torch.randn(n, k, device=device)
    bias = torch.randn(n, device=device)
    for transpose_b in (True, False):
        q = Quantized(b if transpose_b else b.T.contiguous(), pair[1])
        values = q.values.T if transpose_b else q.values
        arguments = (a.data, a.scale, q.data, q.scale, *pair, dtype, bias, transpose_b, a.amax, q.amax)
        got = ops.gemm_quantized(*arguments)
        magnitude = a.values.abs() @ values.abs() + bias.double().abs()
        assert_rounded_sum(got, a.values @ values + bias.double(), magnitude, k)
        torch.library.opcheck(
            _ops.gemm_quantized.default,
            arguments,
            test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


@by_pair
def test_grouped_products(pair: tuple[str, str], device: torch.device) -> None:
    sizes = torch.tensor([16, 0, 144, 32], device=device)
    parts = [slice(0, 16), slice(16, 16), slice(16, 160), slice(160, 192)]
    torch.manual_seed(0)
    x, grad = torch.randn(208, 64, device=device), torch.randn(208, 96, device=device)
    weight = torch.randn(4, 96, 64, device=device)
    x[192:] = grad[192:] = float("nan")
    a, b = Quantized(x, pair[0], sizes), Quantized(weight, pair[1])
    got = ops.grouped_gemm_quantized(
        a.data, a.scale, b.data, b.scale, sizes, *pair, torch.float32, a_amax=a.amax, b_amax=b.amax
    )
    for g, rows in enumerate(parts):
        exact, magnitude = a.values[rows] @ b.values[g].T, a.values[rows].abs() @ b.values[g].abs().T
        assert_rounded_sum(got[rows], exact, magnitude, 64)
    assert not got[192:].any()
    if "square" in pair[1]:
        return
    g_t, x_t = Quantized(grad, pair[0], sizes, True), Quantized(x, pair[1], sizes, True)
    arguments = (g_t.data, g_t.scale, x_t.data, x_t.scale, sizes, *pair)
    got = ops.grouped_gemm_wgrad_quantized(*arguments, torch.float32, g_t.amax, x_t.amax)
    out = torch.ones(4, 96, 64, device=device)
    ops.grouped_gemm_wgrad_quantized_out(*arguments, out, True, g_t.amax, x_t.amax)
    for g, rows in enumerate(parts):
        exact = g_t.values[rows].T @ x_t.values[rows]
        magnitude = g_t.values[rows].abs().T @ x_t.values[rows].abs()
        assert_rounded_sum(got[g], exact, magnitude, 144)
        assert_rounded_sum(out[g], exact + 1, magnitude + 1, 145)


@by_roles
def test_linear(roles: tuple[str, str, str], device: torch.device) -> None:
    """The three products of a step; the rotation of both factors of the weight's gradient cancels."""
    torch.manual_seed(0)
    x, w = torch.randn(48, 64, device=device), torch.randn(32, 64, device=device)
    grad = torch.randn(48, 32, device=device)
    x.requires_grad_()
    w.requires_grad_()
    y = ops.linear(x, w, None, *roles)
    y.backward(grad)
    assert x.grad is not None and w.grad is not None
    with torch.no_grad():
        a, b, g = (Quantized(t, key).values for t, key in zip((x, w, grad), roles, strict=True))
        a_t, b_t, g_t = (
            Quantized(t, key, None, True).values for t, key in zip((x, w, grad), roles, strict=True)
        )
    for got, left, right in ((y, a, b.T), (x.grad, g, b_t), (w.grad, g_t.T, a_t)):
        assert_rounded_sum(got.detach(), left @ right, left.abs() @ right.abs(), left.shape[1])
    exact = grad.double().T @ x.detach().double()
    assert float((w.grad - exact).norm() / exact.norm()) < 0.18


@by_roles
def test_grouped_linear_equals_linear_of_each_group(
    roles: tuple[str, str, str], device: torch.device
) -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([32, 0, 144], device=device)
    x = torch.randn(192, 64, device=device, requires_grad=True)
    w = torch.randn(3, 32, 64, device=device, requires_grad=True)
    grad = torch.randn(192, 32, device=device)
    y = ops.grouped_linear(x, w, sizes, None, None, *roles)
    y.backward(grad)
    assert x.grad is not None and w.grad is not None
    for g, rows in ((0, slice(0, 32)), (2, slice(32, 176))):
        xg, wg = (t.detach().clone().requires_grad_() for t in (x[rows], w[g]))
        one = ops.linear(xg, wg, None, *roles)
        one.backward(grad[rows])
        for got, expected in ((y[rows], one), (x.grad[rows], xg.grad), (w.grad[g], wg.grad)):
            assert expected is not None
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    assert not y[176:].any() and not x.grad[176:].any() and not w.grad[1].any()


def test_stochastic_gradients_follow_the_generator(device: torch.device) -> None:
    x = torch.randn(32, 64, device=device, requires_grad=True)
    w = torch.randn(48, 64, device=device)
    grad = torch.randn(32, 48, device=device)

    def gradient(seed: int) -> Tensor:
        torch.manual_seed(seed)
        y = ops.linear(x, w, None, "nvfp4", "nvfp4:square", "nvfp4:sr")
        return torch.autograd.grad(y, x, grad)[0]

    first = gradient(1)
    assert_same_bits(gradient(1), first)
    assert not torch.equal(gradient(2), first)
    exact = torch.autograd.grad(ops.linear(x, w, None, "nvfp4", "nvfp4:square", "nvfp4"), x, grad)[0]
    mean = torch.stack([gradient(seed) for seed in range(64)]).mean(0)
    assert float((mean - exact).norm()) < float((first - exact).norm())


def test_compiles_whole(device: torch.device) -> None:
    roles = ("nvfp4:rht", "nvfp4:square", "nvfp4:rht,sr")

    def step(x: Tensor, w: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        dense = ops.linear(x, w[0], None, *roles)
        return dense, ops.grouped_linear(x, w, sizes, None, None, *roles)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    w = torch.randn(2, 32, 64, device=device, requires_grad=True)
    for rows in (48, 160):
        x = torch.randn(rows, 64, device=device, requires_grad=True)
        sizes = torch.tensor([16, rows - 32], device=device)
        outputs = compiled(x, w, sizes)
        for got, expected in zip(outputs, step(x, w, sizes), strict=True):
            assert_same_bits(got, expected)
        sum(output.sum() for output in outputs).backward()
        assert x.grad is not None and x.grad.isfinite().all() and x.grad.any()
