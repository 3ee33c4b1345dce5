"""norm_linear: the bits of its steps in every format, any subset of its gradients, and float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_grouped_mlp import FORMATS as OF_RECIPES
from tests.ops.test_grouped_mlp import assert_all_same
from tests.ops.test_linear_ops import NONE
from transformer_plugin import ops, reference
from transformer_plugin.formats import Format
from transformer_plugin.testing.cases import Case
from transformer_plugin.testing.gemm_cases import normals
from transformer_plugin.testing.norm_linear_cases import NORMS, norm_linear_arguments, norm_linear_cases
from transformer_plugin.testing.numerics import assert_same_bits, relative_error
from transformer_plugin.testing.quantize_cases import rows_for, width_for

Formats = tuple[str, str, str]
FORMATS: dict[str, Formats] = {
    **OF_RECIPES,
    "block-square": ("fp8_block:square", "fp8_block:square", "fp8_block"),
    "block-aligned": ("fp8_block:aligned", "fp8_block:square", "fp8_block:aligned"),
    "block-nan": ("fp8_block:nan", "fp8_block:square,nan", "fp8_block:nan"),
    "mx-tiled": ("mxfp8:tiled", "mxfp8:square", "mxfp8:e5m2,tiled"),
    "nv-random-input": ("nvfp4:rht,sr", "nvfp4:square", "nvfp4:rht,sr"),
}
ONE_OF_A_FAMILY = {name: FORMATS[name] for name in ("none", "bf16", "current", "row", "block", "mx", "nv")}
NAMES = ("input", "norm_weight", "norm_bias", "weight", "bias")
by_formats = pytest.mark.parametrize("formats", ONE_OF_A_FAMILY.values(), ids=ONE_OF_A_FAMILY.keys())
by_norm = pytest.mark.parametrize("normalization", NORMS)


def steps(
    input: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    normalization: str,
    zero_centered: bool,
    return_normalized: bool = False,
    *formats: str,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns what norm_linear is defined to compute, step by step. Options are those of linear."""
    if normalization == "layer_norm":
        normalized = ops.layer_norm(input, norm_weight, norm_bias, eps, zero_centered)
    else:
        normalized = ops.rms_norm(input, norm_weight, eps, zero_centered)
    output = ops.linear(normalized, weight, bias, *formats, **options)
    return output, normalized if return_normalized else input.new_empty(0)


def leaves_of(arguments: tuple[Any, ...], wanted: tuple[str, ...] = NAMES) -> dict[str, Tensor | None]:
    """Returns new leaves; only those in ``wanted`` require a gradient."""
    return {
        name: None if t is None else t.detach().clone().requires_grad_(name in wanted)
        for name, t in zip(NAMES, arguments[:5], strict=True)
    }


def grad_like(output: Tensor, seed: int = 7) -> Tensor:
    return normals(tuple(output.shape), output.dtype, output.device, torch.Generator().manual_seed(seed))


def run(
    function: Any,
    arguments: tuple[Any, ...],
    formats: Formats,
    wanted: tuple[str, ...] = NAMES,
    return_normalized: bool = False,
) -> dict[str, Tensor]:
    """Returns the outputs, and the gradients that are requested of those arguments that are given."""
    leaves = leaves_of(arguments, wanted)
    torch.manual_seed(5)
    output, normalized = function(*leaves.values(), *arguments[5:], return_normalized, *formats)
    asked = {name: leaf for name, leaf in leaves.items() if leaf is not None and leaf.requires_grad}
    outputs = [out for out in (output, normalized) if out.requires_grad]
    grads = [grad_like(out, seed) for seed, out in enumerate(outputs, 7)]
    gradients = torch.autograd.grad(outputs, list(asked.values()), grads) if asked else ()
    results = {"output": output.detach(), "normalized": normalized.detach()}
    return results | dict(zip(asked, gradients, strict=True))


CASES = [(name, case) for name, formats in FORMATS.items() for case in norm_linear_cases(formats)]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case.name}" for name, case in CASES])
def test_outputs_and_gradients_have_the_bits_of_the_steps(
    name: str, case: Case, device: torch.device
) -> None:
    arguments, formats = case.arguments(device), FORMATS[name]
    for return_normalized in (False, True):
        got = run(ops.norm_linear, arguments, formats, return_normalized=return_normalized)
        expected = run(steps, arguments, formats, return_normalized=return_normalized)
        assert_all_same(got, expected)
        assert all(t.is_contiguous() for t in got.values())
        torch.manual_seed(5)
        with torch.no_grad():
            plain = ops.norm_linear(*arguments, return_normalized, *formats)
        for t, key in zip(plain, ("output", "normalized"), strict=True):
            assert_same_bits(t, got[key], f"{key} without a gradient")


def one_case(
    formats: Formats,
    device: torch.device,
    normalization: str = "layer_norm",
    shape: tuple[int, int] = (134, 264),
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Any, ...]:
    rows, width, columns = rows_for(shape[0], *formats), *(width_for(n, *formats) for n in (shape[1], 72))
    generator = torch.Generator().manual_seed(1)
    return norm_linear_arguments((rows, width), columns, dtype, normalization, device, generator)


@by_norm
@by_formats
def test_any_subset_of_gradients(formats: Formats, normalization: str, device: torch.device) -> None:
    """Leaves that require gradients: each one, each two, and all; and single gradients of a call where all leaves
    require one."""
    arguments = one_case(formats, device, normalization)
    names = tuple(name for name, leaf in leaves_of(arguments).items() if leaf is not None)
    expected = run(steps, arguments, formats)
    for count in (1, 2, len(names)):
        for wanted in itertools.combinations(names, count):
            got = run(ops.norm_linear, arguments, formats, wanted)
            assert_all_same(got, {name: expected[name] for name in ("output", "normalized", *wanted)})
    leaves = leaves_of(arguments)
    output, _ = ops.norm_linear(*leaves.values(), *arguments[5:], False, *formats)
    for name in names:
        for _ in range(2):  # saved tensors can be used twice
            (gradient,) = torch.autograd.grad(output, leaves[name], grad_like(output), retain_graph=True)
            assert_same_bits(gradient, expected[name], name)


@by_formats
def test_gradients_of_either_output(formats: Formats, device: torch.device) -> None:
    """One output alone: the gradient of the normalized values does not touch the weight."""
    arguments = one_case(formats, device)
    found: list[list[Tensor | None]] = []
    for function in (ops.norm_linear, steps):
        leaves = leaves_of(arguments)
        outputs = function(*leaves.values(), *arguments[5:], True, *formats)
        found.append([])
        for output in outputs:
            asked = [leaf for leaf in leaves.values() if leaf is not None]
            found[-1] += torch.autograd.grad(
                output, asked, grad_like(output), retain_graph=True, allow_unused=True
            )
    assert [gradient is None for gradient in found[0]] == [gradient is None for gradient in found[1]]
    assert sum(gradient is None for gradient in found[0]) == 2  # of weight and bias
    for got, expected in zip(*found, strict=True):
        if expected is not None:
            assert_same_bits(got, expected)


def norm_linear_fp64(leaves: dict[str, Tensor], eps: float, centered: bool, zero_centered: bool) -> Tensor:
    x = leaves["input"]
    x = x - x.mean(-1, keepdim=True) if centered else x
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    x = x * (leaves["norm_weight"] + int(zero_centered))
    if centered:
        x = x + leaves["norm_bias"]
    return x @ leaves["weight"].T + leaves["bias"]


@by_norm
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_results_agree_with_float64(
    name: str, zero_centered: bool, normalization: str, device: torch.device
) -> None:
    formats = FORMATS[name]
    arguments = one_case(formats, device, normalization, dtype=torch.float32)
    arguments = (*arguments[:7], zero_centered)
    got = run(ops.norm_linear, arguments, formats)
    leaves = {
        key: leaf.detach().double().requires_grad_()
        for key, leaf in leaves_of(arguments).items()
        if leaf is not None
    }
    output = norm_linear_fp64(leaves, arguments[5], normalization == "layer_norm", zero_centered)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad_like(got["output"]).double())
    one = 2e-6 if name == "none" else max(Format.parse(key).gemm_tolerance for key in formats)
    for key, expected in zip(("output", *leaves), (output.detach(), *gradients), strict=True):
        error = relative_error(got[key], expected)
        # The gradient of the norm subtracts means, which makes the product's errors a larger part of the result.
        assert error < (one if key in ("output", "weight", "bias") else 2 * one), f"{key}: {error:.3g}"
        if key == "output" and name != "none":
            assert error > one / 20, f"{key}: {error:.3g}, too exact for the format"


@by_norm
def test_reference_agrees_with_the_op(normalization: str, device: torch.device) -> None:
    for return_normalized in (False, True):
        arguments = one_case(NONE, device, normalization, dtype=torch.float32)
        got = ops.norm_linear(*arguments, return_normalized)
        for g, e in zip(got, reference.norm_linear(*arguments, return_normalized), strict=True):
            # Sums of K terms of the size of the result, in float32 and in another order.
            torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-5)


@by_norm
@pytest.mark.parametrize("name", ["none", "current", "row", "block", "block-nan", "mx", "nv-plain"])
def test_nan_and_infinities_go_as_in_the_steps(name: str, normalization: str, device: torch.device) -> None:
    formats = FORMATS[name]
    input, *rest = one_case(formats, device, normalization)
    for value in (float("nan"), float("inf"), 1e38):
        changed = input.clone()
        changed[3, 5] = value
        got, expected = (run(f, (changed, *rest), formats) for f in (ops.norm_linear, steps))
        for key, tensor in expected.items():
            assert torch.equal(got[key].isnan(), tensor.isnan()), key
            assert_same_bits(got[key].nan_to_num(nan=7.0), tensor.nan_to_num(nan=7.0), key)
        assert value == 1e38 or name.startswith("nv") or expected["output"][3].isnan().all()


def test_strided_inputs_give_the_same_bits(device: torch.device) -> None:
    formats = FORMATS["block"]
    arguments = list(one_case(formats, device))
    expected = run(ops.norm_linear, tuple(arguments), formats)
    for i in range(5):
        arguments[i] = torch.stack([arguments[i], arguments[i]], -1)[..., 0]
        assert not arguments[i].is_contiguous()
    leaves = [t.detach().requires_grad_() for t in arguments[:5]]
    output, _ = ops.norm_linear(*leaves, *arguments[5:], False, *formats)
    assert_same_bits(output.detach(), expected["output"])
    one = torch.ones((), device=device, dtype=output.dtype).expand(output.shape)  # stride 0
    for got, same in zip(
        torch.autograd.grad(output, leaves, one, retain_graph=True),
        torch.autograd.grad(output, leaves, one.contiguous()),
        strict=True,
    ):
        assert_same_bits(got, same)


@pytest.mark.parametrize("name", [name for name in ONE_OF_A_FAMILY if name != "none"])
def test_a_quantized_weight_is_read_instead_of_the_weight(name: str, device: torch.device) -> None:
    formats = FORMATS[name]
    arguments = one_case(formats, device)
    quantized = ops.quantize_weight(arguments[3], *formats)

    def cached(input: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor, *more: Any) -> Any:
        unread = torch.full_like(weight, float("nan")).requires_grad_(weight.requires_grad)
        leaves.append(unread)
        return ops.norm_linear(input, norm_weight, norm_bias, unread, *more, quantized)

    leaves: list[Tensor] = []
    others = tuple(name for name in NAMES if name != "weight")
    assert_all_same(run(cached, arguments, formats, others), run(steps, arguments, formats, others))
    expected = run(steps, arguments, formats)
    output, _ = cached(*leaves_of(arguments).values(), *arguments[5:], False, *formats)
    (gradient,) = torch.autograd.grad(output, leaves[-1], grad_like(output))
    assert_same_bits(gradient, expected["weight"])
