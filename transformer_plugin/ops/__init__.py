"""Typed wrappers over ``torch.ops.transformer_plugin``, one file per family."""

from transformer_plugin.ops import (
    activations as _activations,
    connect_gradient as _connect_gradient,
    deferred_wgrad as _deferred_wgrad,
    delayed_scaling as _delayed_scaling,
    expert_parallel as _expert_parallel,
    fused as _fused,
    gemm as _gemm,
    gemm_out as _gemm_out,
    gemm_plan as _gemm_plan,
    gemm_activation as _gemm_activation,
    grouped_mlp as _grouped_mlp,
    layer_out as _layer_out,
    linear as _linear,
    norm as _norm,
    norm_linear as _norm_linear,
    quantize as _quantize,
    peer_memory as _peer_memory,
    quantize_out as _quantize_out,
    routing as _routing,
    sharded as _sharded,
    slots as _slots,
    tensor_parallel as _tensor_parallel,
)
from transformer_plugin.ops.activations import *
from transformer_plugin.ops.connect_gradient import *
from transformer_plugin.ops.deferred_wgrad import *
from transformer_plugin.ops.delayed_scaling import *
from transformer_plugin.ops.expert_parallel import *
from transformer_plugin.ops.fused import *
from transformer_plugin.ops.gemm import *
from transformer_plugin.ops.gemm_out import *
from transformer_plugin.ops.gemm_plan import *
from transformer_plugin.ops.gemm_activation import *
from transformer_plugin.ops.grouped_mlp import *
from transformer_plugin.ops.layer_out import *
from transformer_plugin.ops.linear import *
from transformer_plugin.ops.norm import *
from transformer_plugin.ops.norm_linear import *
from transformer_plugin.ops.peer_memory import *
from transformer_plugin.ops.quantize import *
from transformer_plugin.ops.quantize_out import *
from transformer_plugin.ops.routing import *
from transformer_plugin.ops.sharded import *
from transformer_plugin.ops.slots import *
from transformer_plugin.ops.tensor_parallel import *

# A function may have the name of its module, so the modules have other names here.
__all__: list[str] = []
__all__ += _activations.__all__
__all__ += _connect_gradient.__all__
__all__ += _deferred_wgrad.__all__
__all__ += _delayed_scaling.__all__
__all__ += _expert_parallel.__all__
__all__ += _fused.__all__
__all__ += _gemm.__all__
__all__ += _gemm_out.__all__
__all__ += _gemm_plan.__all__
__all__ += _gemm_activation.__all__
__all__ += _grouped_mlp.__all__
__all__ += _layer_out.__all__
__all__ += _linear.__all__
__all__ += _norm.__all__
__all__ += _norm_linear.__all__
__all__ += _peer_memory.__all__
__all__ += _quantize.__all__
__all__ += _quantize_out.__all__
__all__ += _routing.__all__
__all__ += _sharded.__all__
__all__ += _slots.__all__
__all__ += _tensor_parallel.__all__
