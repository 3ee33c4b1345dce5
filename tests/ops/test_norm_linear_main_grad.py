"""norm_linear whose weight gradient goes into a buffer: the bits of linear's after the norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_norm_linear import FORMATS, by_norm, grad_like, one_case, steps
from transformer_plugin import ops
from transformer_plugin.testing.numerics import assert_same_bits

INTO = [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)]


@by_norm
@pytest.mark.parametrize("into", INTO, ids=str)
@pytest.mark.parametrize("name", list(FORMATS))
def test_same_bits_as_the_steps(name: str, into: Any, normalization: str, device: torch.device) -> None:
    formats = FORMATS[name]
    keys = dict(zip(("input_format", "weight_format", "grad_format"), formats, strict=True))
    dtype, accumulate = into
    arguments = one_case(formats, device, normalization)
    results = []
    for op in (ops.norm_linear, steps):
        leaves = [t.detach().clone().requires_grad_() if isinstance(t, Tensor) else t for t in arguments]
        fill = 0.25 if accumulate else float("nan")
        flat = torch.full((leaves[3].shape[0], leaves[3].shape[1] + 3), fill, device=device, dtype=dtype)
        main_grad = flat[:, : leaves[3].shape[1]]  # strided rows
        torch.manual_seed(0)  # stochastic rounding draws in the forward and in the backward
        output, _ = op(*leaves, main_grad=main_grad, accumulate=accumulate, weight_grad="zeros", **keys)
        output.backward(grad_like(output))
        assert leaves[3].grad is not None and not bool(leaves[3].grad.any())
        assert bool((flat[:, leaves[3].shape[1] :].isnan() if not accumulate else flat[:, -3:] == 0.25).all())
        results.append([output, main_grad, *(t.grad for t in leaves if isinstance(t, Tensor))])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)


def test_frozen_weights_and_refusals(device: torch.device) -> None:
    arguments: list[Any] = list(one_case(FORMATS["block"], device))
    weight = arguments[3]
    main_grad = torch.full(weight.shape, 0.25, device=device)
    arguments[0] = arguments[0].detach().requires_grad_()
    ops.norm_linear(*arguments, main_grad=main_grad)[0].sum().backward()
    assert bool((main_grad == 0.25).all())
    wrong: list[dict[str, Any]] = [
        {"main_grad": main_grad[:-1]},
        {"main_grad": main_grad.half()},
        {"main_grad": weight},
        {"main_grad": main_grad, "weight_grad": "ones"},
        {"accumulate": False},
    ]
    for options in wrong:
        with pytest.raises(
            (TypeError, ValueError), match=r"transformer_plugin::norm_linear: argument '\w+': expected"
        ):
            ops.norm_linear(*arguments, **options)
    assert bool((main_grad == 0.25).all())


@by_norm
def test_compiled(normalization: str, device: torch.device) -> None:
    torch._dynamo.reset()
    formats = FORMATS["block"]
    arguments = one_case(formats, device, normalization)
    results = []

    def layer(*leaves: Any, main_grad: Tensor) -> Tensor:
        return ops.norm_linear(*leaves, False, *formats, main_grad=main_grad, weight_grad="empty")[0]

    for op in (layer, torch.compile(layer, fullgraph=True)):
        leaves = [t.detach().clone().requires_grad_() if isinstance(t, Tensor) else t for t in arguments]
        main_grad = torch.full(leaves[3].shape, 0.25, device=device)
        outputs = [op(*leaves, main_grad=main_grad) for _ in range(2)]  # two forwards before two backwards
        for output in outputs:
            output.sum().backward()
        results.append([*outputs, main_grad, leaves[0].grad])
    for got, expected in zip(*results, strict=True):
        assert_same_bits(got, expected)
