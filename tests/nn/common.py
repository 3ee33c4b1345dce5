"""Shared by the module tests: the recipes, the allowed error of each against FP64, and checks of module state."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from transformer_plugin.formats import Format
from transformer_plugin.recipes import Recipe, recipe_from_name
from transformer_plugin.testing.numerics import assert_same_bits
from transformer_plugin.testing.quantize_cases import width_for


@dataclass(frozen=True)
class Bound:
    """Relative errors (Frobenius norm) of one product of normal values, forward and backward.

    At most what the formats promise, and at least ``low``, which shows that the format was used.
    """

    low: float
    forward: float
    backward: float
    #: whether the gradients of weights are products of quantized operands.
    quantizes_weight_gradient: bool = True

    def least(self, name: str) -> float:
        """The least error of a result of this name."""
        return self.low if self.quantizes_weight_gradient or not name.endswith("weight") else 0.0


def bound_of(recipe: Recipe | None, low: float) -> Bound:
    """Computes the bound from the recipe's formats."""
    if recipe is None:
        return Bound(low, 1e-6, 1e-6)
    keys = (recipe.input_format, recipe.weight_format, recipe.grad_format)
    input, weight, grad = (Format.parse(key).gemm_tolerance for key in keys)
    quantizes_columns = not recipe.input_format.startswith("fp8_row")
    return Bound(low, max(input, weight), max(input, weight, grad), quantizes_columns)


_LOW = {
    "none": 0.0,
    "bf16": 1e-4,
    "fp8_tensor": 1e-2,
    "fp8_row": 1e-2,
    "fp8_block": 1e-2,
    "mxfp8": 1e-2,
    "nvfp4": 5e-2,
}
RECIPES: dict[str, tuple[Recipe | None, Bound]] = {
    name: (recipe_from_name(name), bound_of(recipe_from_name(name), low)) for name, low in _LOW.items()
}


def width_of(name: str, columns: int) -> int:
    """``columns``, rounded up to a width that the recipe's formats support."""
    recipe = RECIPES[name][0]
    return width_for(columns, recipe.input_format) if recipe else columns


def row_unit(name: str) -> int:
    """The multiple that the number of rows (of each group) must be for a backward."""
    recipe = RECIPES[name][0]
    return Format.parse(recipe.input_format).group_multiple if recipe else 1


def rows_of(name: str, rows: int) -> int:
    """``rows``, rounded up to a number for which the recipe has a backward."""
    return -(-rows // row_unit(name)) * row_unit(name)


by_recipe = pytest.mark.parametrize("name", list(RECIPES))


def outputs_and_gradients(
    function: Callable[[dict[str, Tensor]], Tensor], leaves: dict[str, Tensor], grad: Tensor
) -> dict[str, Tensor]:
    """Returns ``function(leaves)`` as "output", and the gradient of each leaf by name, zeros if it has none."""
    output = function(leaves)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad, allow_unused=True)
    named = zip(leaves.items(), gradients, strict=True)
    return {"output": output.detach()} | {
        name: torch.zeros_like(leaf) if gradient is None else gradient for (name, leaf), gradient in named
    }


def in_fp64(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """New leaf tensors with the same values."""
    return {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}


def check_module_state(
    make: Callable[..., torch.nn.Module], call: Callable[[torch.nn.Module], Tensor]
) -> None:
    """Checks deep copies, state dicts and deferred initialization, as for any torch module.

    ``make(**factory)`` builds the module; ``call`` runs it on fixed data.
    """
    module = make()
    expected = call(module)
    before = {key: copy.deepcopy(value) for key, value in vars(module).items() if not key.startswith("_")}
    assert_same_bits(call(copy.deepcopy(module)), expected)
    call(module)
    assert {key: value for key, value in vars(module).items() if not key.startswith("_")} == before

    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert list(state) == list(module.state_dict())

    torch.manual_seed(99)
    fresh = make()
    fresh.load_state_dict(state, strict=True)
    assert_same_bits(call(fresh), expected)

    deferred = make(device="meta")
    assert all(p.is_meta for p in deferred.parameters())
    assert [(n, p.shape, p.dtype) for n, p in deferred.named_parameters()] == [
        (n, p.shape, p.dtype) for n, p in module.named_parameters()
    ]
    deferred.load_state_dict(state, strict=True, assign=True)
    assert_same_bits(call(deferred), expected)

    torch.manual_seed(5)
    direct = make()
    late = make(device="meta").to_empty(device="cpu")
    torch.manual_seed(5)
    for child in late.modules():
        if child is late or not hasattr(late, "reset_parameters"):
            getattr(child, "reset_parameters", lambda: None)()
    for (key, got), (_, wanted) in zip(late.state_dict().items(), direct.state_dict().items(), strict=True):
        assert_same_bits(got, wanted, key)
