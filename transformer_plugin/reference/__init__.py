"""The meaning of every op in plain PyTorch: short, slow, and the oracle of the ops' tests."""

from transformer_plugin.reference.activation import swiglu, swiglu_backward
from transformer_plugin.reference.quantize import (
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
