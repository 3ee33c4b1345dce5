"""A compiled model with cached quantized weights for several micro-batches: one graph for all steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.compile.model import Everything, assert_same, batch, step
from tests.nn.delayed_layers import batch as layer_batch
from tests.nn.delayed_layers import make as make_layer
from transformer_plugin.formats import Format
from transformer_plugin.recipes import recipe_from_name

STEPS, MICRO_BATCHES = 3, 2


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def quantize(model: Everything) -> None:
    for module in (model.linear, model.grouped, model.mlp, model.moe.experts):
        module.quantize_weights()


def make(name: str, device: torch.device) -> Everything:
    torch.manual_seed(0)
    return Everything(recipe_from_name(name), device=device)


@pytest.mark.parametrize(
    ("name", "backend"), [("fp8_block", "inductor"), ("mxfp8", "aot_eager"), ("fp8_tensor", "aot_eager")]
)
def test_a_training_loop(name: str, backend: str, device: torch.device) -> None:
    """Compared with the same model in eager code, which quantizes its weights in every forward."""
    model, plain = make(name, device), make(name, device)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    unit = Format.parse(model.linear.recipe.input_format).group_multiple
    for number in range(STEPS):
        quantize(model)
        for micro_batch in range(MICRO_BATCHES):
            data = batch(48, MICRO_BATCHES * number + micro_batch, device, unit)
            got, expected = step(compiled, data), step(plain, data)
            assert_same(got, expected, 0.0 if backend == "aot_eager" else 1e-5)
        with torch.no_grad():
            for parameters in zip(model.named_parameters(), plain.parameters(), strict=True):
                (name_of, mine), theirs = parameters
                for parameter in (mine, theirs):
                    parameter.sub_(0.1 * expected[f"grad of {name_of}"])
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match="changed in place"):
        step(model, data)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "GroupedLinear", "GroupedLinear list"])
def test_refresh_in_compiled_code(kind: str, name: str, backend: str, device: torch.device) -> None:
    """With a flag on the device: 1 quantizes the weights that were changed since, 0 keeps the bytes."""
    torch._dynamo.reset()
    layer, plain = (make_layer(kind, name, device=device) for _ in range(2))
    layer.quantize_weights()

    def forward(flag: torch.Tensor, *inputs: Any) -> Any:
        layer.quantize_weights(flag)
        return layer(*inputs)

    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    data = layer_batch(kind, name, 0, device)
    for number, first in enumerate((1.0, 0.0, 1.0)):
        if first:
            with torch.no_grad():
                for parameter in (*layer.parameters(), *plain.parameters()):
                    parameter.mul_(1.5)
        results = []
        for function in (lambda *x, first=first: compiled(torch.tensor([first], device=device), *x), plain):
            torch.manual_seed(number)
            inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in data[:-1]]
            output = function(*inputs)
            output.backward(data[-1])
            results.append([output.detach(), *(p.grad for p in (layer, plain)[len(results)].parameters())])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        layer.zero_grad()
        plain.zero_grad()
