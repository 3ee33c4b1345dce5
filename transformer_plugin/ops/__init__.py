"""Typed wrappers over ``torch.ops.transformer_plugin``, one file per family."""

from transformer_plugin.ops.activation import swiglu, swiglu_backward
from transformer_plugin.ops.quantize import (
    dequantize,
    grouped_dequantize,
    grouped_quantize,
    grouped_quantize_both,
    grouped_quantize_transposed,
    quantize,
    quantize_both,
    quantize_transposed,
)

__all__ = [
    "dequantize",
    "grouped_dequantize",
    "grouped_quantize",
    "grouped_quantize_both",
    "grouped_quantize_transposed",
    "quantize",
    "quantize_both",
    "quantize_transposed",
    "swiglu",
    "swiglu_backward",
]
