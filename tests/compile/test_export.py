"""torch.export and TorchScript of models with the package's ops."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.compile.model import Everything, batch
from tests.nn.common import RECIPES, by_recipe, row_unit
from transformer_plugin.nn import (
    GroupedLinear,
    GroupedMLP,
    LayerNormLinear,
    Linear,
    MoE,
    MoEOutput,
    RouterConfig,
    Routing,
    TopKRouter,
)
from transformer_plugin.testing.numerics import assert_same_bits


#: Each recipe in one of the two modes, which trace the same ops: `make test-long` runs the others, too.
@pytest.mark.parametrize(
    ("name", "strict"),
    [
        pytest.param(
            *(name, strict),
            id=f"{'strict' if strict else 'non-strict'}-{name}",
            marks=[pytest.mark.long] if (i + strict) % 2 else [],
        )
        for strict in (False, True)
        for i, name in enumerate(RECIPES)
    ],
)
def test_export_with_any_number_of_tokens(name: str, strict: bool) -> None:
    torch.manual_seed(0)
    model = Everything(RECIPES[name][0]).eval()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = ({0: tokens}, None, {0: tokens})
    with torch.no_grad():
        program = torch.export.export(model, tuple(batch(24, 0)), dynamic_shapes=shapes, strict=strict)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for count in (24, 7, 130):
            data = batch(count, count)
            for got, expected in zip(loaded(*data), model(*data), strict=True):
                assert_same_bits(got, expected)
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert torch.ops.transformer_plugin.grouped_linear.default in called


MIXTURES = {
    MoEOutput: lambda: MoE(64, 32, 4, 2, router=RouterConfig(aux_loss_coeff=0.1)),
    Routing: lambda: TopKRouter(64, 4, 2),
}


def exported(module: torch.nn.Module) -> torch.export.ExportedProgram:
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    return torch.export.export(module, (torch.randn(16, 64),), dynamic_shapes=({0: tokens},))


@pytest.mark.parametrize("output", list(MIXTURES))
def test_named_outputs_are_saved(output: type[tuple[Tensor, ...]]) -> None:
    module = MIXTURES[output]().eval()
    file = io.BytesIO()
    torch.export.save(exported(module), file)
    file.seek(0)
    loaded, x = torch.export.load(file).module(), torch.randn(24, 64)
    got, expected = loaded(x), module(x)
    assert type(got) is output
    for g, e in zip(got, expected, strict=True):
        assert_same_bits(g.detach(), e.detach())


@pytest.mark.long
def test_ahead_of_time_compiled(tmp_path: Path) -> None:
    module = MIXTURES[MoEOutput]().eval()
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(
            exported(module), package_path=str(tmp_path / "mixture.pt2")
        )
        loaded = torch._inductor.aoti_load_package(package)
        for rows in (16, 24, 100):
            x = torch.randn(rows, 64)
            got = loaded(x)
            assert type(got) is MoEOutput
            for g, e in zip(got, module(x), strict=True):
                torch.testing.assert_close(g, e)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Linear(8, 8),
        lambda: LayerNormLinear(8, 8),
        lambda: GroupedLinear(2, 8, 8),
        lambda: GroupedMLP(2, 8, 8),
        lambda: TopKRouter(8, 4, 2),
        lambda: MoE(8, 8, 4, 2),
    ],
    ids=["Linear", "LayerNormLinear", "GroupedLinear", "GroupedMLP", "TopKRouter", "MoE"],
)
@pytest.mark.parametrize("within", [False, True], ids=["itself", "within another"])
def test_modules_are_not_scripted(make: Callable[[], torch.nn.Module], within: bool) -> None:
    module = make()
    expected = (
        f"transformer_plugin.nn.{type(module).__name__}: expected torch.export, torch.compile or "
        "torch.jit.trace, got torch.jit.script, which does not support the modules of this package."
    )
    with pytest.raises(TypeError, match=re.escape(expected)):
        torch.jit.script(torch.nn.Sequential(module) if within else module)


def half_mlp(x: Tensor, weight: Tensor, sizes: Tensor, probs: Tensor, rows: str, square: str) -> Tensor:
    hidden = torch.ops.transformer_plugin.grouped_linear(x, [weight], sizes, None, None, rows, square, rows)
    return torch.ops.transformer_plugin.activation(hidden, probs)


@by_recipe
def test_script_with_gradient(name: str) -> None:
    recipe, _ = RECIPES[name]
    formats = (recipe.input_format, recipe.weight_format) if recipe else ("none", "none")
    script = torch.jit.script(half_mlp)
    weight = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for seed in range(4):  # TorchScript rewrites a graph after some profiled runs
        x, sizes, probs = batch(24, seed, unit=row_unit(name))
        x.requires_grad_()
        results = []
        for function in (script, half_mlp):
            output = function(x, weight, sizes, probs, *formats)
            results.append([output.detach(), *torch.autograd.grad(output.square().sum(), [x, weight])])
        for got, expected in zip(*results, strict=True):
            assert_same_bits(got, expected)


class Scripted(torch.nn.Module):
    """A module that TorchScript supports."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 32))

    def forward(self, input: Tensor) -> Tensor:
        """A linear layer in FP8 with one scale per tensor."""
        return torch.ops.transformer_plugin.linear(
            input, self.weight, None, "fp8_tensor", "fp8_tensor", "fp8_tensor:e5m2"
        )


def test_scripted_module_saves_and_loads() -> None:
    torch.manual_seed(0)
    module = Scripted()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    input = torch.randn(5, 32, requires_grad=True)
    assert_same_bits(loaded(input).detach(), module(input).detach())
    (got,) = torch.autograd.grad(loaded(input).sum(), input)
    (expected,) = torch.autograd.grad(module(input).sum(), input)
    assert_same_bits(got, expected)
