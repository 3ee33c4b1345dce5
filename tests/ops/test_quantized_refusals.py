"""Products of quantized operands refuse arguments whose gradient would be lost or whose result would be wrong."""

from __future__ import annotations

import pytest
import torch

from transformer_plugin import ops
from transformer_plugin.testing.gemm_cases import quantized_arguments, wgrad_arguments

SIZES = torch.tensor([16, 32])
BOTH = {"rowwise": False, "columnwise": True}


@pytest.mark.parametrize("name", ["bias", "bias_scale"])
@pytest.mark.parametrize("into_buffer", [False, True], ids=["new result", "into a buffer"])
def test_bias_that_requires_a_gradient_is_refused(name: str, into_buffer: bool) -> None:
    a, b = (
        ops.quantize(torch.randn(48, 64), "fp8_block", SIZES),
        ops.quantize(torch.randn(2, 32, 64), "fp8_block"),
    )
    arguments = quantized_arguments(a, b, "fp8_block", "fp8_block") | {"group_sizes": SIZES}
    more = {"bias": torch.zeros(2, 32), "bias_scale": torch.ones(48)}
    more[name].requires_grad_()
    out = torch.full((48, 32), 7.0)
    with pytest.raises(ValueError, match=f"argument '{name}': expected a tensor with requires_grad=False"):
        ops.grouped_gemm_out(**arguments, **more, out=out) if into_buffer else ops.grouped_gemm(
            **arguments, **more
        )
    assert (out == 7).all()
    with torch.no_grad():
        ops.grouped_gemm(**arguments, **more)


def test_dense_bias_that_requires_a_gradient_is_refused() -> None:
    a, b = ops.quantize(torch.randn(48, 64), "mxfp8"), ops.quantize(torch.randn(32, 64), "mxfp8")
    arguments = quantized_arguments(a, b, "mxfp8", "mxfp8")
    with pytest.raises(ValueError, match="gemm: argument 'bias': expected a tensor with requires_grad=False"):
        ops.gemm(**arguments, bias=torch.zeros(32, requires_grad=True))


def test_transform_of_one_operand_is_refused() -> None:
    """The transform cancels only if both operands have it."""
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


def test_formats_and_operands_of_wrong_types_are_refused() -> None:
    x = torch.randn(48, 64)
    for call in (lambda: ops.quantize(x, SIZES, "fp8_row"), lambda: ops.amax(x, None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="argument 'format': expected a format key or a"):
            call()
    with pytest.raises(TypeError, match="expected a tensor or a sequence of tensors, got float"):
        ops.gemm(x, x, a_scale=1.0, b_scale=x, a_format="mxfp8", b_format="mxfp8")  # type: ignore[arg-type]
