"""What products of quantized operands refuse because it would silently be lost or be wrong."""

from __future__ import annotations

import pytest
import torch

from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import quantized_arguments, wgrad_arguments

SIZES = torch.tensor([16, 32])
BOTH = {"rowwise": False, "columnwise": True}


@pytest.mark.parametrize("name", ["bias", "bias_scale"])
@pytest.mark.parametrize("into", [False, True], ids=["fresh", "into a buffer"])
def test_a_bias_that_requires_a_gradient(name: str, into: bool) -> None:
    a, b = (
        ops.quantize(torch.randn(48, 64), "fp8_block", SIZES),
        ops.quantize(torch.randn(2, 32, 64), "fp8_block"),
    )
    given = quantized_arguments(a, b, "fp8_block", "fp8_block") | {"group_sizes": SIZES}
    more = {"bias": torch.zeros(2, 32), "bias_scale": torch.ones(48)}
    more[name].requires_grad_()
    out = torch.full((48, 32), 7.0)
    with pytest.raises(ValueError, match=f"argument '{name}': expected a tensor with requires_grad=False"):
        ops.grouped_gemm_out(**given, **more, out=out) if into else ops.grouped_gemm(**given, **more)
    assert (out == 7).all()
    with torch.no_grad():
        ops.grouped_gemm(**given, **more)


def test_a_dense_bias_that_requires_a_gradient() -> None:
    a, b = ops.quantize(torch.randn(48, 64), "mxfp8"), ops.quantize(torch.randn(32, 64), "mxfp8")
    given = quantized_arguments(a, b, "mxfp8", "mxfp8")
    with pytest.raises(ValueError, match="gemm: argument 'bias': expected a tensor with requires_grad=False"):
        ops.gemm(**given, bias=torch.zeros(32, requires_grad=True))


def test_a_transform_of_one_operand() -> None:
    """It cancels only against that of the other."""
    x, keys = torch.randn(48, 64), ("nvfp4", "nvfp4:rht")
    amaxes = [ops.amax(x, key, SIZES, **BOTH) for key in keys]
    plain, rotated = (
        (*ops.quantize(x, key, SIZES, amax_t=amax, **BOTH), amax)
        for key, amax in zip(keys, amaxes, strict=True)
    )
    for grad, input, formats in ((rotated, plain, keys[::-1]), (plain, rotated, keys)):
        with pytest.raises(
            ValueError, match="argument 'input_format': expected 'rht' if and only if grad_format"
        ):
            ops.grouped_gemm_wgrad(**wgrad_arguments(grad, input, *formats), group_sizes=SIZES)
    ops.grouped_gemm_wgrad(**wgrad_arguments(rotated, rotated, keys[1], keys[1]), group_sizes=SIZES)


def test_formats_and_operands_of_another_kind() -> None:
    x = torch.randn(48, 64)
    for call in (lambda: ops.quantize(x, SIZES, "fp8_row"), lambda: ops.amax(x, None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="argument 'format': expected a format key or a"):
            call()
    with pytest.raises(TypeError, match="expected a tensor or a sequence of them, got float"):
        ops.gemm(x, x, a_scale=1.0, b_scale=x, a_format="mxfp8", b_format="mxfp8")  # type: ignore[arg-type]
