"""Typed wrappers over ``torch.ops.transformer_plugin``, one file per family."""

from transformer_plugin.ops.activation import swiglu, swiglu_backward
from transformer_plugin.ops.delayed_scaling import (
    delayed_scale,
    grouped_linear_scaled,
    linear_scaled,
    quantize_scaled,
    update_delayed_scale_,
)
from transformer_plugin.ops.expert_parallel import (
    all_gather_text,
    combine,
    combine_backward,
    dispatch,
    dispatch_backward,
    plan,
)
from transformer_plugin.ops.fused import (
    bias_backward_quantize,
    swiglu_backward_quantize,
    swiglu_quantize,
)
from transformer_plugin.ops.gemm import (
    bias_backward,
    check_group_sizes,
    gather_rows_backward,
    gemm,
    grouped_bias_backward,
    grouped_gemm,
    grouped_gemm_wgrad,
)
from transformer_plugin.ops.gemm_out import (
    gemm_out,
    grouped_gemm_out,
    grouped_gemm_wgrad_out,
)
from transformer_plugin.ops.gemm_plan import GroupedGemmPlan, grouped_gemm_plan
from transformer_plugin.ops.gemm_swiglu import (
    grouped_gemm_swiglu,
    grouped_gemm_swiglu_quantize,
)
from transformer_plugin.ops.grouped_mlp import grouped_mlp
from transformer_plugin.ops.linear import grouped_linear, linear, quantize_weight, quantize_weight_out
from transformer_plugin.ops.norm import (
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    layer_norm_quantize,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_quantize,
)
from transformer_plugin.ops.quantize import (
    amax,
    dequantize,
    quantize,
)
from transformer_plugin.ops.quantize_out import (
    amax_list_out,
    quantize_list,
    quantize_out,
    requantize_transposed,
)
from transformer_plugin.ops.routing import (
    assign_slots,
    aux_loss,
    aux_loss_backward,
    count_tokens_per_expert,
    permute,
    permute_backward,
    permute_weights,
    permute_weights_backward,
    router_scores,
    router_scores_backward,
    topk_router,
    topk_router_backward,
    unpermute,
    unpermute_backward,
)

__all__ = [
    "GroupedGemmPlan",
    "all_gather_text",
    "amax",
    "amax_list_out",
    "assign_slots",
    "aux_loss",
    "aux_loss_backward",
    "bias_backward",
    "bias_backward_quantize",
    "check_group_sizes",
    "combine",
    "combine_backward",
    "count_tokens_per_expert",
    "delayed_scale",
    "dequantize",
    "dispatch",
    "dispatch_backward",
    "gather_rows_backward",
    "gemm",
    "gemm_out",
    "grouped_bias_backward",
    "grouped_gemm",
    "grouped_gemm_out",
    "grouped_gemm_plan",
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
    "plan",
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
    "router_scores_backward",
    "swiglu",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_quantize",
    "topk_router",
    "topk_router_backward",
    "unpermute",
    "unpermute_backward",
    "update_delayed_scale_",
]
