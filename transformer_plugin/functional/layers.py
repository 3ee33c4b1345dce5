"""Differentiable layers, whose operands a recipe quantizes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from transformer_plugin import ops
from transformer_plugin.activations import Activation
from transformer_plugin.formats import Format, resolve
from transformer_plugin.functional._values import (
    Value,
    Values,
    check_matrix,
    constant,
    describe,
    detached,
    launched,
    needed,
    one_matrix,
    optional,
    plain,
    quantized_value,
    refuse,
    rows_of,
    with_groups,
    without_format,
)
from transformer_plugin.functional.quantize import quantize
from transformer_plugin.launch import LaunchOptions
from transformer_plugin.ops._operands import listed
from transformer_plugin.recipes import DelayedScaling, Recipe
from transformer_plugin.tensor import _checks

__all__ = ["grouped_gemm_activation", "grouped_linear", "grouped_mlp", "linear"]

_NO_FORMATS = ("none", "none", "none")


Keys = tuple[str, str, str]


def _on_device(keys: Keys, device: torch.device | None) -> Keys:
    """With a device, the formats of a layer with groups on it. Constant for torch.compile."""
    return keys if device is None else (resolve(keys[0], device), keys[1], resolve(keys[2], device))


def _keys(recipe: Recipe, device: torch.device | None) -> Keys:
    """The formats of input, weight and gradient."""
    return _on_device((recipe.input_format, recipe.weight_format, recipe.grad_format), device)


_cached = cache(_keys)


def _formats(recipe: Recipe | None, op: str, device: torch.device | None = None) -> Keys:
    if recipe is None:
        return _NO_FORMATS
    if isinstance(recipe, DelayedScaling):
        advice = "Use the module of transformer_plugin.nn, which holds its state"
        refuse(op, "recipe", "a recipe whose scales come from current values", str(recipe), advice)
    if not isinstance(recipe, Recipe):
        advice = "Pass for example transformer_plugin.recipes.Float8BlockScaling()"
        refuse(
            op,
            "recipe",
            "a recipe of transformer_plugin.recipes or None",
            describe(recipe),
            advice,
            TypeError,
        )
    # torch's compiler traces what a recipe computes; with cache() it would warn that it does not look into it.
    return _keys(recipe, device) if torch.compiler.is_compiling() else _cached(recipe, device)


def _weights(weight: Values, op: str, argument: str) -> Any:
    """The weights of all groups: one tensor, or a list of matrices."""
    if isinstance(weight, Tensor):
        one_matrix(weight, op, argument, "Pass a stack of matrices, or a list")
        return plain(weight, op, argument)
    return [plain(matrix, op, argument) for matrix in listed(weight, op, argument)]


def linear(
    input: Value, weight: Value, bias: Tensor | None = None, *, recipe: Recipe | None = None
) -> Tensor:
    """``input @ weight.T + bias`` with the operands of forward and backward in the formats of a recipe.

    Args:
        input: ``[..., K]`` float32, bfloat16 or float16.
        weight: ``[N, K]`` in the dtype of ``input``.
        bias: ``[N]``.
        recipe: of :mod:`transformer_plugin.recipes`; None multiplies the operands as they are.

    Returns:
        ``[..., N]`` in the dtype of ``input``. Differentiable.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.linear`; a recipe with a state.
    """
    one_matrix(input, "linear", "input")
    one_matrix(weight, "linear", "weight", "Call packed() on it")
    operands = (plain(input, "linear", "input"), plain(weight, "linear", "weight"))
    return ops.linear(*operands, bias, *_formats(recipe, "linear"))


def grouped_linear(
    input: Value,
    weight: Values,
    group_sizes: Tensor | None = None,
    bias: Value | None = None,
    *,
    bias_scale: Tensor | None = None,
    recipe: Recipe | None = None,
    launch_options: LaunchOptions = LaunchOptions(),  # noqa: B008 immutable
) -> Any:
    """:func:`linear` for each group of rows with the group's own weight and bias.

    Args:
        input: ``[T, K]``, plain or an unquantized ragged :class:`~transformer_plugin.tensor.GroupedTensor`.
        weight: ``[G, N, K]``, plain or an unquantized :class:`~transformer_plugin.tensor.GroupedTensor`; or G matrices
            ``[N, K]``.
        group_sizes: int32 or int64 ``[G]``; None if ``input`` has its own.
        bias: ``[G, N]``, likewise.
        bias_scale: float32 ``[T]``, a factor of the bias for each row.
        recipe: as for :func:`linear`; each group has its own scales.
        launch_options: of the kernels of forward and backward.

    Returns:
        ``[T, N]`` with the groups of ``input``. Differentiable.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.grouped_linear`; group sizes twice or never.
    """
    op = "grouped_linear"
    rows = rows_of(input, group_sizes, op, "input")
    sizes = needed(rows.group_sizes, op, "input")
    data, matrices = plain(rows.values, op, "input"), _weights(weight, op, "weight")
    formats = _formats(recipe, op, data.device)
    output = ops.grouped_linear(
        data,
        matrices,
        sizes,
        optional(bias, op, "bias"),
        bias_scale,
        *formats,
        None,
        *launched(launch_options, op),
    )
    return with_groups(output, rows)


def grouped_mlp(
    input: Value,
    fc1_weight: Values,
    fc2_weight: Values,
    group_sizes: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    fc1_bias: Value | None = None,
    fc2_bias: Value | None = None,
    recipe: Recipe | None = None,
    activation: str | Activation = "swiglu",
    launch_options: LaunchOptions = LaunchOptions(),  # noqa: B008 immutable
) -> Any:
    """``fc2(activation(fc1(input)) * probs)`` for each group of rows with the group's own weights and biases.

    Args:
        input: ``[T, H]``, plain or an unquantized ragged :class:`~transformer_plugin.tensor.GroupedTensor`.
        fc1_weight: ``[G, 2F, H]``, plain or an unquantized :class:`~transformer_plugin.tensor.GroupedTensor`; or G
            matrices ``[2F, H]``. Without a gate F rows.
        fc2_weight: ``[G, H, F]``, likewise.
        group_sizes: int32 or int64 ``[G]``; None if ``input`` has its own.
        probs: float32 ``[T]``, the factor of each row; None for 1.
        fc1_bias, fc2_bias: ``[G, 2F]`` or ``[G, F]``, and ``[G, H]``.
        recipe: as for :func:`linear`.
        activation: the function and the order of the columns of the first product, as for
            :func:`transformer_plugin.ops.activation`.
        launch_options: of the kernels of forward and backward.

    Returns:
        ``[T, H]`` with the groups of ``input``. Differentiable.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.grouped_mlp`; group sizes twice or never.
    """
    op = "grouped_mlp"
    rows = rows_of(input, group_sizes, op, "input")
    sizes = needed(rows.group_sizes, op, "input")
    data = plain(rows.values, op, "input")
    if probs is None:
        check_matrix(data, op, "input", "[T, H]")
        probs = torch.ones(data.shape[0], dtype=torch.float32, device=data.device)
    weights = (_weights(fc1_weight, op, "fc1_weight"), _weights(fc2_weight, op, "fc2_weight"))
    biases = (optional(fc1_bias, op, "fc1_bias"), optional(fc2_bias, op, "fc2_bias"))
    formats = _formats(recipe, op, data.device)
    options: tuple[Any, ...] = (None, None, activation, *launched(launch_options, op))
    return with_groups(ops.grouped_mlp(data, *weights, sizes, probs, *biases, *formats, *options), rows)


def grouped_gemm_activation(
    a: Value,
    b: Value,
    group_sizes: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    bias: Value | None = None,
    format: str | Format | None = None,
    columnwise: bool = False,
    seed: Tensor | None = None,
    activation: str | Activation = "swiglu",
    launch_options: LaunchOptions = LaunchOptions(),  # noqa: B008 immutable
) -> tuple[Any, Any]:
    """The first product of an expert and its activation: ``activation(h, probs)`` of ``h = a_g @ b[g].T + bias[g]``.

    Args:
        a: ``[T, K]``, plain or an unquantized ragged :class:`~transformer_plugin.tensor.GroupedTensor`.
        b: ``[G, 2F, K]``, without a gate ``[G, F, K]``; plain or an unquantized
            :class:`~transformer_plugin.tensor.GroupedTensor`.
        group_sizes: int32 or int64 ``[G]``; None if ``a`` has its own.
        probs: float32 ``[T]``, or None for 1.
        bias: as many columns as ``b`` has rows, ``[G, 2F]``, likewise.
        format: of the result; None for the dtype of ``a``. ``fp8_block`` and ``mxfp8`` leave the epilogue of the
            product quantized.
        columnwise, seed: as for :func:`quantize`, with a format.
        activation: the function and the order of the columns of ``h``.
        launch_options: of the kernel.

    Returns:
        The activation ``[T, F]`` and ``h``, with the groups of ``a``. Differentiable without a format.

    Raises:
        TypeError, ValueError: as :func:`transformer_plugin.ops.grouped_gemm_activation` and
            :func:`transformer_plugin.ops.quantize`; group sizes twice or never; arguments of the quantization without a
            format.
    """
    op = "grouped_gemm_activation"
    rows = rows_of(a, group_sizes, op, "a")
    sizes = needed(rows.group_sizes, op, "a")
    options: tuple[Any, ...] = (activation, True, *launched(launch_options, op))
    if format is None:
        without_format(op, columnwise=columnwise, seed=seed)
        operands = (plain(rows.values, op, "a"), plain(b, op, "b"), sizes, probs, optional(bias, op, "bias"))
        act, h = ops.grouped_gemm_activation(*operands, *options)
        return with_groups(act, rows), with_groups(h, rows)
    facts = _checks.facts_of(op, format)
    data, matrices = constant(rows.values, op, "a"), constant(b, op, "b")
    factors = (detached(probs), detached(optional(bias, op, "bias")))
    if columnwise or not facts.is_in_epilogue:
        act, h = ops.grouped_gemm_activation(data, matrices, sizes, *factors, *options)
        quantized = quantize(act, facts.key, group_sizes=sizes, columnwise=columnwise, seed=seed)
        return quantized, with_groups(h, rows)
    if seed is not None:
        advice = "Leave it out"
        refuse(op, "seed", f"None for '{facts.key}', which rounds to nearest", describe(seed), advice)
    *outputs, h = ops.grouped_gemm_activation_quantize(data, matrices, sizes, facts.key, *factors, *options)
    # One byte for each element, so the shape of the data is that of the values.
    return quantized_value(outputs, facts.key, data, outputs[0].shape, sizes), with_groups(h, rows)
