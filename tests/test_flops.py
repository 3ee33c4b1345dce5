"""FlopCounterMode counts the operations of each product once, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tests.nn.common import RECIPES
from transformer_plugin import ops
from transformer_plugin.nn import GroupedLinear, GroupedMLP, Linear, MoE
from transformer_plugin.recipes import DelayedScaling
from transformer_plugin.testing.gemm_cases import quantized_arguments, wgrad_arguments

T, N, K, G = 64, 96, 128, 3
SIZES = torch.tensor([16, 0, 32])  # group sizes in a buffer of T rows, all of which count
INDEX = torch.arange(T) % 5  # rows of a matrix, one for each row of the buffer
FP8, NVFP4 = "fp8_block:e4m3", "nvfp4"
PRODUCT = 2 * T * N * K


def counted(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def of(*sizes: int) -> Tensor:
    return torch.randn(*sizes)


def rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    return ops.quantize(x, "fp8_row")


def pair(format: str, *sizes: int) -> tuple[Tensor, Tensor]:
    return ops.quantize(of(*sizes), format, amax=amax_of(format, of(*sizes)))


def amax_of(format: str, x: Tensor) -> Tensor | None:
    return ops.amax(x, format) if format == NVFP4 else None


def quantized(out: bool, grouped: bool, lists: bool = False, format: str = FP8) -> None:
    left, right = of(T, K), of(G, N, K) if grouped else of(N, K)
    amaxes = [amax_of(format, left), amax_of(format, right)]
    a, b = ops.quantize(left, format, None, amaxes[0]), ops.quantize(right, format, None, amaxes[1])
    stack = (list(b[0]), list(b[1])) if lists else (*b, amaxes[1])
    given = quantized_arguments((*a, amaxes[0]), stack, format, format)
    given |= {"group_sizes": SIZES} if grouped else {}
    if out:
        (ops.grouped_gemm_out if grouped else ops.gemm_out)(**given, out=of(T, N))
    else:
        (ops.grouped_gemm if grouped else ops.gemm)(**given)


def of_rows(grouped: bool) -> None:
    given = quantized_arguments(rowwise(of(T, K)), rowwise(of(G, N, K)), "fp8_row", "fp8_row")
    if grouped:
        ops.grouped_gemm(**given, group_sizes=SIZES)
    else:
        ops.gemm(**given | {"b": given["b"][0], "b_scale": given["b_scale"][0][0]})


def weight_gradient_quantized(out: bool, format: str = FP8) -> None:
    grad, input = (
        ops.quantize(x, format, SIZES, rowwise=False, columnwise=True) for x in (of(T, N), of(T, K))
    )
    given = wgrad_arguments(grad, input, format, format) | {"group_sizes": SIZES}
    if out:
        ops.grouped_gemm_wgrad_out(**given, out=of(G, N, K))
    else:
        ops.grouped_gemm_wgrad(**given)


def scaled(name: str) -> None:
    grouped = name.startswith("grouped")
    weight, scale = of(G, N, K) if grouped else of(N, K), torch.ones(3 * G if grouped else 3)
    sizes = (SIZES,) if grouped else ()
    getattr(ops, name)(of(T, K), weight, *sizes, scale=scale, amax=torch.zeros_like(scale))


TABLE: dict[str, tuple[Callable[[], object], int]] = {
    "gemm": (lambda: ops.gemm(of(T, K), of(N, K)), PRODUCT),
    "gemm_out": (lambda: ops.gemm_out(of(T, K), of(K, N), of(T, N), transpose_b=False), PRODUCT),
    "gemm of blocks": (lambda: quantized(False, False), PRODUCT),
    "gemm_out of nvfp4": (lambda: quantized(True, False, format=NVFP4), PRODUCT),
    "gemm of rows": (lambda: of_rows(False), PRODUCT),
    "grouped_gemm": (lambda: ops.grouped_gemm(of(T, K), of(G, N, K), SIZES), PRODUCT),
    "grouped_gemm_out": (lambda: ops.grouped_gemm_out(of(T, K), of(G, N, K), SIZES, of(T, N)), PRODUCT),
    "grouped_gemm of a list": (lambda: ops.grouped_gemm(of(T, K), list(of(G, N, K)), SIZES), PRODUCT),
    "grouped_gemm of blocks": (lambda: quantized(False, True), PRODUCT),
    "grouped_gemm_out of blocks": (lambda: quantized(True, True), PRODUCT),
    "grouped_gemm of a list of blocks": (lambda: quantized(False, True, True), PRODUCT),
    "grouped_gemm of rows": (lambda: of_rows(True), PRODUCT),
    "grouped_gemm_wgrad": (lambda: ops.grouped_gemm_wgrad(of(T, N), of(T, K), SIZES), PRODUCT),
    "grouped_gemm_wgrad_out": (
        lambda: ops.grouped_gemm_wgrad_out(of(T, N), of(T, K), SIZES, of(G, N, K)),
        PRODUCT,
    ),
    "grouped_gemm_wgrad_out of a list": (
        lambda: ops.grouped_gemm_wgrad_out(of(T, N), of(T, K), SIZES, list(of(G, N, K))),
        PRODUCT,
    ),
    "grouped_gemm_wgrad of indexed rows": (
        lambda: ops.grouped_gemm_wgrad(of(5, N), of(7, K), SIZES, input_rows=INDEX, grad_rows=INDEX),
        PRODUCT,
    ),
    "grouped_gemm_wgrad_out of indexed rows": (
        lambda: ops.grouped_gemm_wgrad_out(of(5, N), of(T, K), SIZES, of(G, N, K), grad_rows=INDEX),
        PRODUCT,
    ),
    "grouped_gemm_wgrad of blocks": (lambda: weight_gradient_quantized(False), PRODUCT),
    "grouped_gemm_wgrad_out of blocks": (
        lambda: weight_gradient_quantized(True, FP8 + ",aligned"),
        PRODUCT,
    ),
    "grouped_gemm_activation": (lambda: ops.grouped_gemm_activation(of(T, K), of(G, N, K), SIZES), PRODUCT),
    "grouped_gemm_activation_quantize": (
        lambda: ops.grouped_gemm_activation_quantize(of(T, K).bfloat16(), of(G, N, K).bfloat16(), SIZES, FP8),
        PRODUCT,
    ),
    "linear": (lambda: ops.linear(of(2, T // 2, K), of(N, K), of(N)), PRODUCT),
    "linear of delayed scaling": (lambda: scaled("linear"), PRODUCT),
    "norm_linear": (
        lambda: ops.norm_linear(of(2, T // 2, K), of(K), None, of(N, K), of(N), 1e-5),
        PRODUCT,
    ),
    "grouped_linear": (lambda: ops.grouped_linear(of(T, K), of(G, N, K), SIZES, of(G, N)), PRODUCT),
    "grouped_linear of delayed scaling": (lambda: scaled("grouped_linear"), PRODUCT),
    "grouped_mlp": (
        lambda: ops.grouped_mlp(of(T, K), of(G, 2 * N, K), of(G, K, N), SIZES, torch.rand(T)),
        3 * PRODUCT,
    ),
    "linear_out": (lambda: ops.linear_out(of(T, K), of(N, K), of(T, N)), PRODUCT),
    "router_logits": (lambda: ops.router_logits(of(T, K), of(N, K)), PRODUCT),
    "router_logits_with_tokens": (lambda: ops.router_logits_with_tokens(of(T, K), of(N, K)), PRODUCT),
    "router_logits_backward": (
        lambda: ops.router_logits_backward(of(T, N), of(T, K).bfloat16(), of(N, K).bfloat16()),
        2 * PRODUCT,
    ),
    "router_logits_backward of one": (
        lambda: ops.router_logits_backward(of(T, N), of(T, K), of(N, K), for_weight=False),
        PRODUCT,
    ),
    "grouped_linear_out": (
        lambda: ops.grouped_linear_out(of(T, K), of(G, N, K), SIZES, of(T, N)),
        PRODUCT,
    ),
    "grouped_mlp_out": (
        lambda: ops.grouped_mlp_out(of(T, K), of(G, 2 * N, K), of(G, K, N), SIZES, torch.rand(T), of(T, K)),
        3 * PRODUCT,
    ),
}


def test_every_product_is_in_the_table() -> None:
    names = {
        schema.name.removeprefix("transformer_plugin::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("transformer_plugin::")
    }
    products = {name for name in names if re.search("gemm|linear|mlp|router_logits", name)} - {
        "grouped_gemm_plan"
    }
    assert products == {name.split(" of ")[0] for name in TABLE}
    registered = {op.__name__ for op in flop_registry if "transformer_plugin" in str(op)}
    assert registered == products


@pytest.mark.parametrize("name", list(TABLE))
def test_one_call(name: str) -> None:
    call, expected = TABLE[name]
    assert counted(call) == expected


ALL_RECIPES = {name: recipe for name, (recipe, _) in RECIPES.items()} | {"fp8_delayed": DelayedScaling()}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "and backward"])
@pytest.mark.parametrize("name", list(ALL_RECIPES))
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear", "GroupedMLP", "layers of GroupedMLP", "MoE"])
def test_modules(kind: str, name: str, backward: bool) -> None:
    """A backward has two products for each product of the forward."""
    recipe, x = ALL_RECIPES[name], of(T, K).requires_grad_(backward)
    expected = PRODUCT
    if kind == "Linear":
        module, arguments = Linear(K, N, recipe=recipe), (x.view(2, T // 2, K),)
    elif kind == "GroupedLinear":
        module, arguments = GroupedLinear(G, K, N, recipe=recipe), (x, SIZES)
    elif kind == "MoE":
        module, arguments = MoE(K, N, 4, 1, recipe=recipe), (x,)
        rows = T + (4 * 15 + 4) // 16 * 16 if name == "nvfp4" else T
        expected = 3 * 2 * rows * N * K + 2 * T * K * 4
    else:
        module, arguments = GroupedMLP(G, K, N, recipe=recipe), (x, SIZES, torch.rand(T))
        expected = 3 * PRODUCT
        if kind != "GroupedMLP":
            module.fc1.register_forward_hook(lambda *_: None)

    def run() -> None:
        output = module(*arguments)
        output = output if isinstance(output, Tensor) else output.output
        if backward:
            output.sum().backward()

    with torch.set_grad_enabled(backward):
        assert counted(run) == (3 if backward else 1) * expected


def test_as_torch_counts_its_own() -> None:
    x = of(T, K).requires_grad_()
    results = [
        counted(lambda module=module: module(x).sum().backward())
        for module in (torch.nn.Linear(K, N), Linear(K, N))
    ]
    assert results[0] == results[1] == 3 * PRODUCT
