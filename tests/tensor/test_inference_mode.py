"""Values under inference_mode, in which ops that torch makes of others arrive whole, and views are of two kinds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.tensor.values import KEYS, numbers, quantized, sizes, stack
from transformer_plugin.nn import GroupedLinear, quantized_init
from transformer_plugin.recipes import Float8BlockScaling, Recipe
from transformer_plugin.tensor import GroupedTensor, QuantizedTensor

Call = Callable[[Any], Any]
EVERY: dict[str, Call] = {
    "detach": lambda v: v.detach(),
    "expand_as": lambda v: v.expand_as(v),
    "view_as": lambda v: v.view_as(v),
    "to": lambda v: v.to(torch.float16),
    "float": lambda v: v.float(),
    "cpu": lambda v: v.cpu(),
    "clone": lambda v: v.clone(),
    "contiguous": lambda v: v.contiguous(),
    "dequantize": lambda v: v.dequantize(torch.float16),
    "deepcopy": copy.deepcopy,
}
OF_STACKS: dict[str, Call] = {
    "select": lambda v: v[1],
    "unbind": lambda v: v.unbind(),
    "slice": lambda v: v[1:],
    "split": lambda v: v.split(2),
    "chunk": lambda v: v.chunk(2),
    "narrow": lambda v: v.narrow(0, 1, 2),
}
VIEWS = ("detach", "expand_as", "view_as", *OF_STACKS)


def make(kind: str, device: torch.device) -> Any:
    if kind == "plain stack":
        return stack(device)
    if kind == "plain ragged":
        return GroupedTensor(numbers("ragged", device), sizes(device))
    return quantized(("fp8_block", kind, (True, True)), device)


CASES = [
    (kind, name)
    for kind in ("plain stack", "plain ragged", "matrix", "stack", "ragged")
    for name in (*EVERY, *(OF_STACKS if "stack" in kind else ()))
]


def first(result: Any) -> Any:
    return result[0] if isinstance(result, list | tuple) else result


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_calls_give_what_they_give_outside(kind: str, name: str, device: torch.device) -> None:
    call = {**EVERY, **OF_STACKS}[name]
    value = make(kind, device)
    expected = first(call(value))
    with torch.inference_mode():
        got = first(call(value))
        of_new = first(call(make(kind, device)))
    assert type(got) is type(of_new) is type(expected)
    assert (got.shape, got.dtype, got.device) == (expected.shape, expected.dtype, expected.device)
    if isinstance(got, GroupedTensor | QuantizedTensor):
        names = [n for n, _ in expected._buffers.present()]
        assert [n for n, _ in got._buffers.present()] == names
        for (_, a), (_, b) in zip(got._buffers.present(), expected._buffers.present(), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if name in VIEWS:  # as for plain tensors: views of a tensor from outside work in autograd
        assert got.data_ptr() == expected.data_ptr() and not got.is_inference() and of_new.is_inference()


@pytest.mark.parametrize("kind", ["plain stack", "stack"])
def test_unsupported_ops_have_the_same_error(kind: str, device: torch.device) -> None:
    for call in (lambda v: v.mT, lambda v: torch.stack([v, v]), lambda v: v.unsqueeze(0), lambda v: v @ v):
        texts = []
        for mode in (False, True):
            with torch.inference_mode(mode), pytest.raises(ValueError, match="argument 'self'") as error:
                call(make(kind, device))
            texts.append(str(error.value).partition(" of a ")[2])
        assert texts[0] == texts[1]


def test_new_numbers(device: torch.device) -> None:
    for key in KEYS:
        x = numbers("stack", device, 1)
        with torch.inference_mode():
            value = tp.quantize(numbers("stack", device), key, columnwise=True)
            value.copy_(x)
            assert torch.equal(value, tp.quantize(x, key, columnwise=True))
            value.quantize_(GroupedTensor(numbers("stack", device)))
        assert torch.equal(value, tp.quantize(numbers("stack", device), key, columnwise=True))
    with torch.inference_mode():
        plain = stack(device).zero_()
        torch._foreach_add_([plain], 2.0)
        plain.view(-1).mul_(2)
    assert bool((plain.packed() == 4).all())


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()], ids=["none", "fp8_block"])
@pytest.mark.parametrize("parameters", ["packed", "list", "grouped"])
@pytest.mark.parametrize("in_format", [False, True])
def test_layers(recipe: Recipe | None, parameters: Any, in_format: bool, device: torch.device) -> None:
    if in_format and (recipe is None or parameters == "list"):
        return
    x, group_sizes = torch.randn(10, 128, device=device), torch.tensor([3, 0, 5], device=device)
    options: dict[str, Any] = {"recipe": recipe, "parameters": parameters, "device": device}
    if in_format:
        with quantized_init(recipe):
            layer = GroupedLinear(3, 128, 128, **options)
    else:
        layer = GroupedLinear(3, 128, 128, **options)
    expected = layer(x, group_sizes)
    with torch.inference_mode():
        assert torch.equal(layer(x, group_sizes), expected)
        state = layer.state_dict()
    layer.load_state_dict(state)
    assert torch.equal(layer(x, group_sizes), expected)


P = torch.nn.Parameter
#: How an inference tensor is made of ``x``, which was made outside of the mode; called inside of it.
MADE: dict[str, Call] = {
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(x.dtype, copy=True),
    "slice of a clone": lambda x: x.clone()[0:],
    "detached clone": lambda x: x.clone().detach(),
}
#: What is done with it, inside or outside of the mode.
USES: dict[str, Call] = {
    **EVERY,
    **OF_STACKS,
    "view": lambda v: v.view(-1),
    "packed": lambda v: v.detach().packed() if isinstance(v, GroupedTensor) else v.detach(),
    "detached view": lambda v: v.detach().view(-1),
    "detached member": lambda v: v.detach()[0],
    "member of a slice": lambda v: v[1:].detach()[0],
    "alias": lambda v: torch.ops.aten.alias(v),
    "as_strided": lambda v: v.as_strided(v.shape, v.stride()),
    "data": lambda v: v.data.view(-1),
    "detach_": lambda v: v.detach_(),
    "add": lambda v: v + 1,
    "sum": lambda v: v.sum(),
    "parameter": lambda v: P(v, requires_grad=False),
    "packed parameter": lambda v: P(v, requires_grad=False).view(-1),
    "member of a parameter": lambda v: P(v, requires_grad=False)[0],
    "members of a parameter": lambda v: P(v, requires_grad=False).unbind(),
    "parameter with a gradient": lambda v: P(v),
    "parameter of a clone": lambda v: P(v.clone()),
    "requires_grad_": lambda v: v.detach().requires_grad_(),
    "mul_": lambda v: v.mul_(2),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(torch.ones(v.shape, device=v.device)),
    "foreach": lambda v: torch._foreach_add_([v], 1.0),
    "copy of it": lambda v: torch.zeros(v.shape, device=v.device, dtype=v.dtype).copy_(v),
    "zeros_like": lambda v: torch.zeros_like(v),
    "saved for a backward": lambda v: (
        (v * torch.ones(1, device=v.device, requires_grad=True)).sum().backward()
    ),
}
del USES["dequantize"]  # which plain tensors do not have


def outcome(use: Call, v: Any) -> tuple[Any, ...]:
    """Whether it works, and whether the first result is an inference tensor; or the type of the error."""
    try:
        result = first(use(v))
    except Exception as error:
        return ("error", type(error))
    return ("works", result.is_inference() if isinstance(result, torch.Tensor) else None)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("name", USES)
def test_inference_tensors_behave_as_plain_ones(name: str, inside: bool, device: torch.device) -> None:
    for made in MADE:
        outcomes = []
        for x in (stack(device), stack(device).packed()):
            with torch.inference_mode():
                v = MADE[made](x)
            assert v.is_inference()
            with torch.inference_mode(inside):
                outcomes.append(outcome(USES[name], v))
        assert outcomes[0] == outcomes[1], made


@pytest.mark.parametrize("kind", ["matrix", "stack", "ragged"])
def test_quantized_inference_tensors_outside(kind: str, device: torch.device) -> None:
    """Views are inference tensors, copies are not, and a write is refused."""
    value = quantized(("fp8_block", kind, (True, True)), device)
    with torch.inference_mode():
        made = value.clone()
    for name in ("detach", "expand_as", "view_as", *(OF_STACKS if kind == "stack" else ())):
        got = first({**EVERY, **OF_STACKS}[name](made))
        assert got.is_inference() and got.dequantize().isfinite().all()
    parameter = P(made, requires_grad=False)
    assert parameter.is_inference() and torch.equal(parameter.detach(), value)
    assert not made.clone().is_inference() and not copy.deepcopy(made).is_inference()
    for write in (made.quantize_, made.copy_):
        with pytest.raises(RuntimeError, match=r"[Ii]nference"):
            write(torch.zeros(value.shape, device=device))
    assert torch.equal(made, value)


def test_values_over_tensors_of_the_other_mode(device: torch.device) -> None:
    """A value is an inference tensor if its data is one, wherever it is made."""
    x = torch.ones(2, 3, 4, device=device)
    with torch.inference_mode():
        y = x.clone()
        of_x = GroupedTensor(x)
    assert not of_x.is_inference() and GroupedTensor(y).is_inference()
    of_x.mul_(2)
    assert bool((x == 2).all())
