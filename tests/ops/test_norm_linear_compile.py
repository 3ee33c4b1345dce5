"""norm_linear: opcheck, compilation, TorchScript and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.opcheck import opcheck
from tests.ops.test_grouped_mlp import assert_all_same, capture
from tests.ops.test_linear_ops import NONE
from tests.ops.test_norm_linear import (
    FORMATS,
    Formats,
    by_formats,
    by_norm,
    grad_like,
    leaves_of,
    one_case,
    run,
)
from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import normals
from transformer_plugin.testing.norm_linear_cases import NORMS, norm_linear_arguments
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import rows_for, width_for

_op = torch.ops.transformer_plugin.norm_linear.default


@by_formats
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(formats: Formats, requires_grad: bool, device: torch.device) -> None:
    width, columns, rows = width_for(24, *formats), width_for(16, *formats), rows_for(5, *formats)
    for kind, shape in enumerate(((rows, width), (2, rows, width), (0, width))):
        for normalization in NORMS:
            arguments = norm_linear_arguments(
                shape, columns, torch.float32, normalization, device, torch.Generator().manual_seed(1), kind
            )
            leaves = [None if t is None else t.requires_grad_(requires_grad) for t in arguments[:5]]
            opcheck(_op, (*leaves, *arguments[5:], kind == 1, *formats))


@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck_of_operands_that_are_already_bfloat16(device: torch.device) -> None:
    """Below autograd an op must not return one of its arguments, or one tensor two times."""
    arguments = one_case(NONE, device)
    leaves = [t.requires_grad_() for t in arguments[:5]]
    opcheck(_op, (*leaves, *arguments[5:], True, *FORMATS["bf16"]))


@by_formats
@pytest.mark.parametrize("return_normalized", [False, True])
def test_one_graph_serves_any_number_of_rows(
    formats: Formats, return_normalized: bool, device: torch.device
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(*arguments: Any) -> tuple[Tensor, Tensor]:
        return ops.norm_linear(*arguments[:5], 1e-5, *arguments[6:])

    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for rows in (32, 48, 144, 400):
        arguments = one_case(formats, device, shape=(rows, 64), dtype=torch.float32)
        got, expected = (
            run(f, arguments, formats, return_normalized=return_normalized) for f in (compiled, layer)
        )
        assert_all_same(got, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["none", "block"])
def test_compiles_with_its_backward(name: str, device: torch.device) -> None:
    """Forward and backward are in one compiled function; compiled autograd traces the backward."""
    torch._dynamo.reset()
    arguments, formats = one_case(FORMATS[name], device), FORMATS[name]
    leaves = leaves_of(arguments)

    def step() -> None:
        output, normalized = ops.norm_linear(*leaves.values(), *arguments[5:], True, *formats)
        (output.float().square().sum() + normalized.float().sum()).backward()

    gradients = []
    for function in (torch.compile(step, backend="aot_eager"), step):
        with torch._dynamo.config.patch(compiled_autograd=function is not step):
            function()
        gradients.append([leaf.grad for leaf in leaves.values()])
        for leaf in leaves.values():
            leaf.grad = None
    for got, expected in zip(*gradients, strict=True):
        assert_same_bits(got, expected)


def test_torchscript(device: torch.device) -> None:
    def layer(x: Tensor, gamma: Tensor, w: Tensor) -> Tensor:
        output, normalized = torch.ops.transformer_plugin.norm_linear(
            x, gamma, None, w, None, 1e-5, return_normalized=True, input_format="fp8_block",
            weight_format="fp8_block:square", grad_format="fp8_block",
        )  # fmt: skip
        return output + normalized.sum()

    x, gamma, w = (torch.randn(s, device=device, requires_grad=True) for s in ((9, 64), (64,), (24, 64)))
    results = []
    for function in (torch.jit.script(layer), layer):
        output = function(x, gamma, w)
        results.append((output.detach(), *torch.autograd.grad(output.sum(), (x, gamma, w))))
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


@pytest.mark.gpu
@by_norm
@by_formats
def test_graph_replays_with_new_data(formats: Formats, normalization: str) -> None:
    arguments = one_case(formats, torch.device("cuda"), normalization)
    static = [t for t in arguments[:5] if t is not None]
    grad = grad_like(ops.norm_linear(*arguments, False, *formats)[0])

    def step() -> tuple[Tensor, ...]:
        leaves = leaves_of_static()
        output, _ = ops.norm_linear(*leaves, *arguments[5:], False, *formats)
        return (output.detach(), *torch.autograd.grad(output, [x for x in leaves if x is not None], grad))

    def leaves_of_static() -> list[Tensor | None]:
        return [None if t is None else t.detach().requires_grad_() for t in arguments[:5]]

    graph, captured = capture(step)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*static, grad):
            tensor.copy_(normals(tuple(tensor.shape), tensor.dtype, torch.device("cuda"), generator))
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            assert_same_bits(got, expected)


@pytest.mark.gpu
@by_formats
def test_calls_do_not_synchronize(formats: Formats) -> None:
    arguments = one_case(formats, torch.device("cuda"))
    leaves = leaves_of(arguments)
    call: Callable[[], Tensor] = lambda: ops.norm_linear(*leaves.values(), *arguments[5:], False, *formats)[0]  # noqa: E731
    grad = grad_like(call())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(call(), [leaf for leaf in leaves.values() if leaf is not None], grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
