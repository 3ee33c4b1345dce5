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
from transformer_plugin.ops.routing import (
    assign_slots,
    count_tokens_per_expert,
    permute,
    permute_backward,
    permute_weights,
    permute_weights_backward,
    unpermute,
    unpermute_backward,
)

__all__ = [
    "assign_slots",
    "count_tokens_per_expert",
    "dequantize",
    "grouped_dequantize",
    "grouped_quantize",
    "grouped_quantize_both",
    "grouped_quantize_transposed",
    "permute",
    "permute_backward",
    "permute_weights",
    "permute_weights_backward",
    "quantize",
    "quantize_both",
    "quantize_transposed",
    "swiglu",
    "swiglu_backward",
    "unpermute",
    "unpermute_backward",
]
