"""Functions over plain, quantized and grouped tensors. They choose the op beneath, and its scales go with the values.

Each is a name of the package too: ``transformer_plugin.quantize``. The ops themselves, of plain tensors and for every
tracer, are in :mod:`transformer_plugin.ops`.
"""

from transformer_plugin.functional.activations import activation, activation_backward, bias_backward
from transformer_plugin.functional.gemm import gemm, gemm_wgrad, grouped_gemm, grouped_gemm_wgrad
from transformer_plugin.functional.layers import grouped_gemm_activation, grouped_linear, grouped_mlp, linear
from transformer_plugin.functional.norm import layer_norm, rms_norm
from transformer_plugin.functional.quantize import dequantize, quantize, with_columnwise
from transformer_plugin.functional.routing import Permutation, permute, topk_router, unpermute

__all__ = [
    "Permutation",
    "activation",
    "activation_backward",
    "bias_backward",
    "dequantize",
    "gemm",
    "gemm_wgrad",
    "grouped_gemm",
    "grouped_gemm_activation",
    "grouped_gemm_wgrad",
    "grouped_linear",
    "grouped_mlp",
    "layer_norm",
    "linear",
    "permute",
    "quantize",
    "rms_norm",
    "topk_router",
    "unpermute",
    "with_columnwise",
]
