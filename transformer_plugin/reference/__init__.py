"""The meaning of every op in plain PyTorch: short, slow, and the oracle of the ops' tests."""

from transformer_plugin.reference.activation import swiglu, swiglu_backward
from transformer_plugin.reference.delayed_scaling import (
    delayed_scale,
    grouped_linear_scaled,
    linear_scaled,
    quantize_scaled,
    update_delayed_scale_,
)
from transformer_plugin.reference.fused import (
    bias_backward_quantize,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from transformer_plugin.reference.gemm import (
    bias_backward,
    gather_rows_backward,
    gemm,
    gemm_out,
    grouped_bias_backward,
    grouped_gemm,
    grouped_gemm_out,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_out,
    grouped_linear,
    linear,
)
from transformer_plugin.reference.gemm_swiglu import (
    grouped_gemm_swiglu,
    grouped_gemm_swiglu_quantize,
)
from transformer_plugin.reference.grouped_mlp import grouped_mlp
from transformer_plugin.reference.norm import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    layer_norm_quantize,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_quantize,
)
from transformer_plugin.reference.quantize import (
    amax,
    dequantize,
    quantize,
)
from transformer_plugin.reference.quantize_out import (
    amax_list_out,
    quantize_list,
    quantize_out,
    requantize_transposed,
)
from transformer_plugin.reference.quantize_weight import quantize_weight, quantize_weight_out
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
    "amax",
    "amax_list_out",
    "assign_slots",
    "aux_loss",
    "bias_backward",
    "bias_backward_quantize",
    "count_tokens_per_expert",
    "delayed_scale",
    "dequantize",
    "gather_rows_backward",
    "gemm",
    "gemm_out",
    "grouped_bias_backward",
    "grouped_gemm",
    "grouped_gemm_out",
    "grouped_gemm_swiglu",
    "grouped_gemm_swiglu_quantize",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_out",
    "grouped_linear",
    "grouped_linear_scaled",
    "grouped_mlp",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "layer_norm_quantize",
    "linear",
    "linear_scaled",
    "permute",
    "permute_backward",
    "permute_weights",
    "permute_weights_backward",
    "quantize",
    "quantize_list",
    "quantize_out",
    "quantize_scaled",
    "quantize_weight",
    "quantize_weight_out",
    "requantize_transposed",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "rms_norm_quantize",
    "router_scores",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_quantize",
    "topk_router",
    "unpermute",
    "unpermute_backward",
    "update_delayed_scale_",
]
