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
from transformer_plugin.reference.routing import (
    assign_slots,
    aux_loss,
    count_tokens_per_expert,
    permute,
    permute_backward,
    permute_weights,
    permute_weights_backward,
    router_scores,
    topk_router,
    unpermute,
    unpermute_backward,
)

__all__ = [
    "assign_slots",
    "aux_loss",
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
    "router_scores",
    "swiglu",
    "swiglu_backward",
    "topk_router",
    "unpermute",
    "unpermute_backward",
]
