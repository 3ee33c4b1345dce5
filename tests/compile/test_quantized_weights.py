"""A compiled model with cached quantized weights for several micro-batches: one graph for all steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.compile.model import Everything, assert_same, batch, step
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
