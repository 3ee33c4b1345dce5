"""QuantizedWeight: refreshed by a flag, after an optimizer's step, in a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_plugin as tp
from tests.nn.test_quantized_weights import assert_all_same, by_format, by_module, kept, layers, make, step
from tests.ops.test_grouped_mlp import capture
from transformer_plugin.nn import GroupedLinear, Linear, QuantizedWeight
from transformer_plugin.recipes import Float8BlockScaling, NVFP4BlockScaling

FORMATS = ("fp8_block:e4m3,pow2", "fp8_block:e4m3,pow2,square", "fp8_block:e4m3,pow2")


def test_a_flag_on_the_device(device: torch.device) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 96, 128, device=device))
    quantized = QuantizedWeight(weight, FORMATS)
    before = [t.view(torch.uint8).clone() for t in quantized.tensors]
    with torch.no_grad():
        weight.mul_(1.5)
    for no in (False, torch.zeros(1, device=device), torch.zeros((), dtype=torch.bool, device=device)):
        quantized.refresh(no)
        assert all(
            torch.equal(t.view(torch.uint8), old) for t, old in zip(quantized.tensors, before, strict=True)
        )
    for yes in (True, torch.ones(1, device=device), torch.ones((), dtype=torch.bool, device=device)):
        with torch.no_grad():
            weight.add_(0.25)
        quantized.refresh(yes)
        expected = tp.ops.quantize_weight(weight, *FORMATS)
        for got, wanted in zip(quantized.tensors, expected, strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@by_module
def test_value(kind: str, device: torch.device) -> None:
    module = make(kind, "nvfp4", device)
    module.quantize_weights()
    for layer in layers(module):
        assert layer.quantized_weight is not None
        value: Any = layer.quantized_weight.value
        assert value.shape == layer.weight.shape and value.dtype == layer.weight.dtype
        assert value.rowwise_data is layer.quantized_weight.tensors[0]
        error = (value.dequantize() - layer.weight).norm() / layer.weight.norm()
        assert float(error) < 0.2


@by_module
@by_format
def test_refreshed_after_a_fused_step(kind: str, name: str, device: torch.device) -> None:
    """torch does not count the changes of a fused step."""
    module, plain = make(kind, name, device), make(kind, name, device)
    module.quantize_weights()
    other = make(kind, name, device)
    other.quantize_weights()
    untouched = [t.view(torch.uint8).clone() for t in kept(other)]
    results = []
    for m in (module, plain):
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
        handle = tp.optim.refresh_after(optimizer) if m is module else None
        for seed in range(2):
            found = step(m, name, seed=seed)
            for parameter, gradient in zip(m.parameters(), found[2:], strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        results.append(step(m, name))
        if handle is not None:
            handle.remove()
            before = [t.view(torch.uint8).clone() for t in kept(module)]
            optimizer.step()
            assert all(torch.equal(t.view(torch.uint8), b) for t, b in zip(kept(module), before, strict=True))
    assert_all_same(*results)
    assert all(torch.equal(t.view(torch.uint8), b) for t, b in zip(kept(other), untouched, strict=True))


def test_of_separate_and_grouped_weights(device: torch.device) -> None:
    torch.manual_seed(0)
    packed: Any = GroupedLinear(3, 64, 96, device=device, recipe=NVFP4BlockScaling(stochastic_rounding=False))
    x, sizes = torch.randn(32, 64, device=device), torch.tensor([16, 0, 16], device=device)
    for layout in ("list", "grouped"):
        layer: Any = GroupedLinear(3, 64, 96, device=device, recipe=packed.recipe, parameters=layout)
        layer.load_state_dict(packed.state_dict())
        layer.quantize_weights()
        assert torch.equal(layer(x, sizes), packed(x, sizes))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        tp.optim.refresh_after(optimizer)
        layer(x, sizes).sum().backward()
        optimizer.step()
        plain: Any = GroupedLinear(3, 64, 96, device=device, recipe=packed.recipe)
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x, sizes), plain(x, sizes))
        with torch.no_grad():
            next(layer.parameters()).mul_(2)
        with pytest.raises(ValueError, match="changed in place"):
            layer(x, sizes)


def test_a_weight_of_another_dtype_gets_another_copy() -> None:
    layer = Linear(64, 96, recipe=Float8BlockScaling())
    layer.quantize_weights()
    first: Any = layer.quantized_weight
    assert first.is_like(layer.weight.detach().clone(), first.formats)
    assert not first.is_like(layer.weight.detach().bfloat16(), first.formats)
    layer.weight = torch.nn.Parameter(layer.weight.detach().bfloat16())
    layer.quantize_weights()
    assert layer.quantized_weight is not first and layer.quantized_weight.value.dtype == torch.bfloat16


def test_parameters_with_copies_are_saved() -> None:
    import copy
    import io

    layer = GroupedLinear(3, 64, 96, recipe=Float8BlockScaling())
    layer.quantize_weights()
    file = io.BytesIO()
    torch.save(dict(layer.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["weight"], layer.weight)
    assert list(tp.nn.quantized_weight.copies_of(copy.deepcopy(layer.weight))) == []


def test_wrong_optimizer() -> None:
    with pytest.raises(TypeError, match=r"argument 'optimizer': expected a torch\.optim\.Optimizer, got int"):
        tp.optim.refresh_after(3)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_graph_of_first_and_later_micro_batches() -> None:
    device = torch.device("cuda")
    module, plain = make("GroupedLinear", "fp8_block", device), make("GroupedLinear", "fp8_block", device)
    module.quantize_weights()
    x, sizes = torch.randn(90, 48, device=device), torch.tensor([40, 0, 50], device=device)
    first = torch.ones(1, device=device)

    @torch.no_grad()
    def forward() -> Any:
        module.quantize_weights(first)
        return module(x, sizes)

    graph, output = capture(forward)
    for flag in (1, 0, 0, 1):
        for m in (module, plain):
            with torch.no_grad():
                m.weight.mul_(1.25)
        first.fill_(flag)
        sizes.copy_(torch.tensor([30 + flag, 9, 50 - flag], device=device))
        graph.replay()
        if flag:
            assert torch.equal(output, plain(x, sizes))
            old_weight = plain.weight.detach().clone()
        else:
            saved = plain.weight.detach().clone()
            with torch.no_grad():
                plain.weight.copy_(old_weight)
                assert torch.equal(output, plain(x, sizes))
                plain.weight.copy_(saved)
