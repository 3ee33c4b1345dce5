"""Values in torch.compile(fullgraph=True): passed in, made inside, changed, returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import transformer_plugin as tp
from tests.tensor.values import CASES, numbers, quantized, same_bytes, sizes
from transformer_plugin.tensor import GroupedTensor


@pytest.fixture(autouse=True)
def fresh_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.long] if i % 4 else []) for i, case in enumerate(CASES[::2])],
    ids=str,
)
def test_quantized_values(case: Any, device: torch.device) -> None:
    key, kind, (rowwise, columnwise) = case

    def change(value: Any, x: Tensor, group_sizes: Tensor | None) -> Any:
        value.copy_(x)
        made = tp.quantize(x, key, group_sizes=group_sizes, rowwise=rowwise, columnwise=columnwise)
        return made, value.dequantize(torch.float32), made.clone()

    ours, theirs = quantized(case, device), quantized(case, device)
    x, group_sizes = numbers(kind, device, seed=1), sizes(device, kind)
    expected = change(ours, x, group_sizes)
    result = compiled(change)(theirs, x, group_sizes)
    assert (
        same_bytes(ours, theirs) and same_bytes(result[0], expected[0]) and same_bytes(result[2], expected[2])
    )
    assert torch.equal(result[1], expected[1])
    assert result[0].format == expected[0].format and type(result[0]) is type(expected[0])


def test_a_parameter_with_its_gradient(device: torch.device) -> None:
    p = Parameter(GroupedTensor(torch.randn(4, 8, 16, device=device)))

    def product(x: Tensor, p: Any, group_sizes: Tensor) -> Tensor:
        return tp.grouped_gemm(x, p, group_sizes)

    run = compiled(product)
    for rows in (10, 12, 17):
        x = torch.randn(rows, 16, device=device)
        group_sizes = torch.tensor([rows - 8, 0, 5, 1], device=device)
        results: list[Any] = []
        for function in (product, run):
            p.grad = None
            output = function(x, p, group_sizes)
            output.square().sum().backward()
            results.append((output, p.grad))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_step_of_an_optimizer(device: torch.device) -> None:
    data, grads = torch.randn(4, 8, 16, device=device), torch.randn(3, 4, 8, 16, device=device)
    parameters: list[Any] = [Parameter(GroupedTensor(data.clone())), Parameter(GroupedTensor(data.clone()))]
    for i, p in enumerate(parameters):
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, foreach=True)
        # torch itself breaks the graph of a step at its hooks.
        run = torch.compile(optimizer.step, backend="aot_eager") if i else optimizer.step
        for grad in grads:
            p.grad = grad.clone()
            run()
    assert torch.equal(parameters[0].packed(), parameters[1].packed())


def test_views_and_members(device: torch.device) -> None:
    def parts(value: Any) -> Tensor:
        result: Tensor = value[1] + value[2:].packed()[0] + value.unbind()[0] + value.view(-1)[:8]
        return result

    value = GroupedTensor(torch.randn(3, 5, 8, device=device))
    assert torch.equal(compiled(parts)(value), parts(value))
