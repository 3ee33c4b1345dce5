"""Small quantized tensors and products, and whether a device gives the stored checksums of them.

Inputs are made of integers, and need no generator of random numbers. Quantized bytes are the same on every device.
Products round in the order of the hardware, but not here: operands are small integers that every format holds exactly,
so the sums are exact, and the only rounding is that of the output. Where a format holds them not, gradients with NVFP4,
which are rotated and rounded at random, the bound of the format holds.

The functions that make the values take ``ops``, or :mod:`transformer_plugin.reference`, from which the stored checksums
are (``python -m build_tools.doctor_values``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.doctor._stored import STORED
from transformer_plugin.formats import Format
from transformer_plugin.nn import GroupedLinear, Linear
from transformer_plugin.recipes import RECIPES, Recipe, recipe_from_name

#: The formats of the recipes, which quantize.
FORMATS = sorted(
    {
        key
        for recipe in map(recipe_from_name, RECIPES)
        if recipe is not None
        for key in (recipe.input_format, recipe.weight_format, recipe.grad_format)
        if Format.parse(key).is_quantized
    }
)
#: Rows of groups in whole blocks of 16, which NVFP4 requires, and rows past the groups.
SIZES, TAIL = [48, 0, 64, 16], 16
ROWS = sum(SIZES) + TAIL
#: The products: N outputs of K inputs.
N, K = 128, 256
#: Every 16 neighbors of a row or a column have one of the largest magnitude, so that scales are powers of two.
_BLOCK = 16
#: The seed of stochastic rounding.
_SEED = 0x0123456789ABCDEF
#: Magnitudes that NVFP4 holds under such a scale: E2M1, in halves.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)


def checksum(*tensors: Tensor) -> str:
    """Of the bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _drawn(rows: int, columns: int, salt: int, below: int) -> Tensor:
    """Integers from 0 to ``below - 1`` without a pattern: squares modulo a prime."""
    i = torch.arange(rows * columns, dtype=torch.int64) + 7919 * salt
    return (i * i % 65521 * 31 + i) % 65521 % below


def _with_largest(values: Tensor, rows: int, columns: int, largest: int) -> Tensor:
    """As a matrix, in which one of every 16 neighbors is the largest, of either sign."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    sign = 1 - 2 * ((i // _BLOCK + j // _BLOCK) % 2)
    return torch.where((5 * i + j) % _BLOCK == 3, sign * largest, values.view(rows, columns))


def integers(rows: int, columns: int, salt: int) -> Tensor:
    """From -7 to 7: three bits, which FP8 holds under a scale of a power of two."""
    return _with_largest(_drawn(rows, columns, salt, 15) - 7, rows, columns, 7)


def quarters(rows: int, columns: int, salt: int) -> Tensor:
    """Four times the values that NVFP4 holds exactly: the amax is 21, 7/8 of a power of two times its largest, 6."""
    drawn = _drawn(rows, columns, salt, 15)
    values = torch.tensor(_E2M1)[drawn % 8] * torch.where(drawn < 8, 1, -1)
    return 7 * _with_largest(values, rows, columns, _E2M1[-1])


def wide_values(dtype: torch.dtype, has_groups: bool, columns: int = 288) -> Tensor:
    """Values of many magnitudes, with zeros of both signs. The last of groups has extreme and subnormal ones."""
    values = (_drawn(ROWS, columns, 1, 511) - 255).view(ROWS, columns).double()
    exponents = (torch.arange(ROWS)[:, None] * 7 + torch.arange(columns) // 32 * 5) % 24 - 12
    if has_groups:
        last = sum(SIZES[:-1])
        exponents[last:] = (torch.arange(ROWS - last)[:, None] * 37 % 240) - 138
    values = torch.where(values == 0, -0.0, values) * 2.0 ** exponents.double()
    values[40] = 0.0
    return values.to(dtype)


def quantized(device: torch.device, implementation: ModuleType = ops) -> Iterator[tuple[str, str]]:
    """Checksums of each format: of a matrix and of groups, along rows and along columns."""
    sizes = torch.tensor(SIZES, device=device)
    for key in FORMATS:
        format = Format.parse(key)
        for dtype in (torch.bfloat16, torch.float32):
            for name, group_sizes in (("matrix", None), ("groups", sizes)):
                if name == "groups" and format.square_blocks:
                    continue  # groups would have to end where a block does
                input = wide_values(dtype, name == "groups").to(device)
                columnwise = name == "matrix" or format.traits.has_group_columns
                of_both: dict[str, Any] = {"columnwise": columnwise}
                if format.needs_amax:
                    of_both["amax"], of_both["amax_t"] = implementation.amax(
                        input, key, group_sizes, columnwise=True
                    )
                if format.stochastic_rounding:
                    of_both["seed"] = torch.tensor([_SEED], device=device)
                made = implementation.quantize(input, key, group_sizes, **of_both)
                yield f"{key} {name} {str(dtype).removeprefix('torch.')}", checksum(*made)


def operands(exact_in_nvfp4: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers: input, weights of the groups, gradient, and bias. The second half of the input's columns is twice as
    large."""
    make = quarters if exact_in_nvfp4 else integers
    input = make(ROWS, K, 2) * (1 if exact_in_nvfp4 else 1 + (torch.arange(K) >= K // 2).long())
    weight = torch.stack([make(N, K, 3 + group) for group in range(len(SIZES))])
    bias = _drawn(len(SIZES), N, 11, 15).view(len(SIZES), N) - 7
    return input, weight, make(ROWS, N, 10), bias


#: The tensors of a product, in the order in which their checksums are stored.
RESULTS = ("output", "input.grad", "weight.grad", "bias.grad")


def of_layer(layer: Any, device: torch.device, exact_in_nvfp4: bool) -> tuple[Tensor, ...]:
    """The tensors of a forward and backward of a layer with such operands."""
    scale = 0.25 if exact_in_nvfp4 else 1.0
    input, weight, grad, bias = ((x * scale).to(device, torch.bfloat16) for x in operands(exact_in_nvfp4))
    is_grouped = isinstance(layer, GroupedLinear)
    with torch.no_grad():
        layer.weight.copy_(weight if is_grouped else weight[0])
        layer.bias.copy_(bias if is_grouped else bias[0])
    input.requires_grad_()
    output = layer(input, torch.tensor(SIZES, device=device)) if is_grouped else layer(input)
    output.backward(grad)
    grads: list[Any] = [input.grad, layer.weight.grad, layer.bias.grad]
    return output, *grads


def layers(recipe: Recipe | None, device: torch.device) -> Iterator[tuple[str, Any]]:
    """The layers with the names of their checksums."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "recipe": recipe}
    yield "linear", Linear(K, N, **options)
    yield "grouped_linear", GroupedLinear(len(SIZES), K, N, **options)


def _error(got: Tensor, exact: Tensor) -> float:
    """``||got - exact|| / ||exact||``, which is infinite for a NaN."""
    error = float((got.double() - exact.double()).norm() / exact.double().norm())
    return error if error == error else float("inf")


def _exact_gradients(is_grouped: bool) -> tuple[Tensor, Tensor]:
    """Of input and weight, in float64."""
    input, weight, grad, _ = ((x / 4).double() for x in operands(True))
    if not is_grouped:
        return grad @ weight[0], grad.T @ input
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    rows = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    of_input = torch.cat([grad[r] @ w for r, w in zip(rows, weight, strict=True)] + [input[ends[-1] :] * 0])
    return of_input, torch.stack([grad[r].T @ input[r] for r in rows])


def products(name: str, device: torch.device) -> Iterator[tuple[str, str, str]]:
    """What is compared of a recipe's layers: the name, what came, and what was expected."""
    recipe = recipe_from_name(name)
    is_nvfp4 = name == "nvfp4"
    for layer_name, layer in layers(recipe, device):
        stored = f"{'quarters' if is_nvfp4 else 'integers'} {layer_name}"
        made = of_layer(layer, device, is_nvfp4)
        for result, tensor in zip(RESULTS, made, strict=True):
            if is_nvfp4 and result in ("input.grad", "weight.grad"):
                exact = _exact_gradients(layer_name == "grouped_linear")[result == "weight.grad"]
                assert recipe is not None
                bound, error = Format.parse(recipe.grad_format).gemm_tolerance, _error(tensor.cpu(), exact)
                expected = f"an error below {bound:.2f}"
                got = expected if error < bound else f"an error of {error:.2f}"
            else:
                got, expected = checksum(tensor), STORED[f"{stored} {result}"]
            yield f"{layer_name} {result}", got, expected


def wrong_bytes(device: torch.device) -> dict[str, Any]:
    """Which formats have other bytes on a device than the stored ones, and how many checksums were compared."""
    made = dict(quantized(device))
    wrong = [[name, got, STORED[name]] for name, got in made.items() if got != STORED[name]]
    return {"compared": len(made), "wrong": wrong}


def wrong_products(device: torch.device) -> dict[str, Any]:
    """The same of the products of all recipes."""
    made = [
        (f"{name} {of}", got, expected) for name in RECIPES for of, got, expected in products(name, device)
    ]
    return {"compared": len(made), "wrong": [each for each in made if each[1] != each[2]]}
