"""Values as parameters: gradients, hooks, and the node that frameworks look for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import transformer_plugin as tp
from tests.tensor.values import KEYS, numbers, stack
from transformer_plugin import ops
from transformer_plugin.tensor import GroupedTensor


def parameter(device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    return Parameter(GroupedTensor(torch.randn(4, 8, 16, device=device, dtype=dtype)))


def accumulate_node(p: Tensor) -> Any:
    """What Megatron's DistributedDataParallel does to find it."""
    grad_fn: Any = p.expand_as(p).grad_fn
    return grad_fn.next_functions[0][0]


@pytest.mark.parametrize("quantized", [False, True])
def test_expand_as_leads_to_the_node_of_the_parameter(quantized: bool, device: torch.device) -> None:
    p: Any = parameter(device)
    if quantized:
        p = Parameter(tp.quantize(numbers("stack", device), "fp8_block"))
    node = accumulate_node(p)
    assert node.variable is p and type(p.expand_as(p)) is type(p)
    fired = []
    handle = node.register_hook(lambda *_: fired.append(1))
    value = p.expand_as(p)
    numbers_of = value.dequantize() if quantized else value.packed()
    (numbers_of.float() * 3).sum().backward()
    assert fired == [1]
    assert type(p.grad) is Tensor and p.grad.shape == p.shape and p.grad.dtype == p.dtype
    assert bool((p.grad == 3).all())
    handle.remove()
    frozen = p.detach()
    assert frozen.expand_as(frozen).grad_fn is None


def test_gradient_in_another_dtype_is_cast(device: torch.device) -> None:
    p = parameter(device, torch.bfloat16)
    (p.packed().float() * 0.1).sum().backward()
    assert p.grad.dtype == torch.bfloat16 and torch.equal(p.grad, torch.full_like(p.grad, 0.1))


def test_gradient_of_a_product(device: torch.device) -> None:
    data, x = torch.randn(4, 8, 16, device=device), torch.randn(10, 16, device=device)
    group_sizes = torch.tensor([3, 0, 5, 1], device=device)
    p, reference = parameter(device), Parameter(data.clone())
    p.data = data.clone()
    for weight in (p, reference):
        for _ in range(2):  # accumulated
            tp.grouped_gemm(x, weight, group_sizes).square().sum().backward()
    assert reference.grad is not None
    assert type(p.grad) is Tensor and torch.equal(p.grad, reference.grad)


def test_gradients_of_members(device: torch.device) -> None:
    p: Any = parameter(device)
    reference: Any = Parameter(p.packed().detach().clone())
    for weight in (p, reference):
        first, second = weight[1], weight[2:4]
        second = second.packed() if isinstance(second, GroupedTensor) else second
        (first.square().sum() + (second * 2).sum() + torch.stack(weight.unbind()).sum()).backward()
    assert torch.equal(p.grad, reference.grad)


@pytest.mark.parametrize("key", KEYS)
def test_dequantize_passes_the_gradient_through(key: str, device: torch.device) -> None:
    p: Any = Parameter(tp.quantize(numbers("stack", device), key))
    assert p.is_leaf and p.requires_grad
    factor = torch.randn(p.shape, device=device)
    (p.dequantize(torch.float32) * factor).sum().backward()
    assert type(p.grad) is Tensor and torch.equal(p.grad, factor.bfloat16())
    p.grad = None
    (p.dequantize() * factor.bfloat16()).sum().backward()
    assert torch.equal(p.grad, factor.bfloat16())


def test_hooks_of_a_parameter(device: torch.device) -> None:
    p, seen = parameter(device), []
    p.register_hook(lambda grad: seen.append("tensor"))
    p.register_post_accumulate_grad_hook(lambda q: seen.append("post" if q is p else "other"))
    p.packed().sum().backward()
    assert seen == ["tensor", "post"]


def test_attributes_of_a_framework_stay(device: torch.device) -> None:
    p = parameter(device)
    p.main_grad = torch.zeros(p.shape, device=device)
    module = torch.nn.Module()
    module.register_parameter("weight", p)
    first: Any = next(module.parameters())
    assert first.main_grad is p.main_grad
    assert dict(module.named_parameters())["weight"] is p


def test_a_changed_weight_is_noticed(device: torch.device) -> None:
    x = torch.randn(10, 16, device=device, requires_grad=True)
    group_sizes = torch.tensor([3, 0, 5, 1], device=device)
    for weight in (parameter(device), stack(device)):
        output = tp.grouped_gemm(x, weight, group_sizes)
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_ragged_values_are_differentiable(device: torch.device) -> None:
    x = torch.randn(80, 32, device=device, requires_grad=True)
    group_sizes = torch.tensor([16, 0, 48], device=device)
    tokens, indices = (
        torch.randn(20, 32, device=device, requires_grad=True),
        torch.arange(20, device=device)[:, None] % 3,
    )
    rows, where = tp.permute(tokens, indices, 3, 24)
    assert type(rows) is GroupedTensor and rows.grad_fn is not None
    output = tp.unpermute(tp.rms_norm(tp.activation(rows), None, 1e-5), where)
    reference_rows, _, slot, source, _ = ops.permute(tokens, indices, 3, 24)
    reference = ops.unpermute(ops.rms_norm(ops.activation(reference_rows), None, 1e-5), slot, source)
    assert torch.equal(output, reference)
    grad = torch.randn_like(output)
    (ours,) = torch.autograd.grad(output, tokens, grad)
    (theirs,) = torch.autograd.grad(reference, tokens, grad)
    assert torch.equal(ours, theirs)
    value = GroupedTensor(x.detach(), group_sizes, requires_grad=True)
    tp.activation(value).packed().sum().backward()
    ops.activation(x).sum().backward()
    assert value.grad is not None and x.grad is not None and torch.equal(value.grad, x.grad)


def test_a_value_over_a_tensor_with_a_gradient(device: torch.device) -> None:
    x = torch.randn(80, 32, device=device, requires_grad=True)
    group_sizes = torch.tensor([16, 0, 48], device=device)
    value = GroupedTensor(x * 2, group_sizes)
    assert value.requires_grad and value.grad_fn is not None and not value.detach().requires_grad
    (value.packed() * 3).sum().backward()
    assert x.grad is not None and bool((x.grad == 6).all())
    stack_of = GroupedTensor(x.view(2, 40, 32))
    assert Parameter(stack_of).is_leaf
    with torch.no_grad():
        assert not GroupedTensor(x, group_sizes).requires_grad


@pytest.mark.parametrize("quantized", [False, True])
def test_torch_finds_the_node_with_view_as(quantized: bool, device: torch.device) -> None:
    """``get_gradient_edge`` views a parameter as itself; hooks of several tensors call it."""
    p: Any = parameter(device)
    if quantized:
        p = Parameter(tp.quantize(numbers("stack", device), "fp8_block"))
    edge = torch.autograd.graph.get_gradient_edge(p)
    assert edge.node.variable is p
    seen: list[Any] = []
    handle = torch.autograd.graph.register_multi_grad_hook((p,), lambda grads: seen.append(grads[0].shape))
    p.dequantize().sum().backward()
    assert seen == [p.shape]
    handle.remove()


def test_a_module_is_converted_while_a_graph_lives(device: torch.device) -> None:
    module = torch.nn.Module()
    module.weight = parameter(device)
    loss = (module.weight * 2).sum()
    module.to(torch.float64)
    assert type(module.weight) is GroupedTensor and module.weight.dtype == torch.float64
    assert loss.requires_grad and module.weight.packed().dtype == torch.float64


READS: tuple[Any, ...] = (
    *(lambda v: v.abs(), lambda v: 1 / v, lambda v: v.reciprocal(), lambda v: torch.linalg.vector_norm(v, 1)),
    *(lambda v: torch.linalg.vector_norm(v, float("inf")), lambda v: torch.amax(v, -1), lambda v: v.var()),
    *(
        lambda v: v.sqrt(),
        lambda v: v.max(dim=-1).values,
        lambda v: torch.maximum(v, v * 0.5),
        lambda v: 2**v,
    ),
)


@pytest.mark.parametrize("i", range(len(READS)))
def test_gradients_of_what_is_read(i: int, device: torch.device) -> None:
    data = torch.rand(4, 8, 16, device=device) + 0.1
    grads = []
    for leaf in (Parameter(GroupedTensor(data.clone())), Parameter(data.clone())):
        READS[i](leaf).square().sum().backward()
        grads.append(leaf.grad)
    assert type(grads[0]) is Tensor and torch.equal(grads[0], grads[1])


def test_a_value_that_is_made_under_no_grad_has_no_history(device: torch.device) -> None:
    weight = Parameter(torch.randn(3, 8, 16, device=device))
    x = torch.randn(10, 16, device=device, requires_grad=True)
    group_sizes = torch.tensor([4, 0, 6], device=device)
    with torch.no_grad():
        value, rows = GroupedTensor(weight), GroupedTensor(x, group_sizes)
    assert value.data_ptr() == weight.data_ptr() and rows.data_ptr() == x.data_ptr()
    for stack_of, ragged in ((value, rows), (value.detach(), rows.detach())):
        results = (
            tp.grouped_linear(ragged, stack_of),
            tp.grouped_gemm(ragged, stack_of),
            tp.activation(ragged),
        )
        for result in (*results, tp.dequantize(stack_of), stack_of.packed(), stack_of[0]):
            assert not result.requires_grad
    p = Parameter(value)
    tp.grouped_linear(rows, p).packed().sum().backward()
    assert p.grad is not None and weight.grad is None and x.grad is None
