"""References of all ops in plain PyTorch: short, slow, and the oracle of the ops' tests."""

from transformer_plugin import _public
from transformer_plugin.reference import (
    activations as _activations,
    connect_gradient as _connect_gradient,
    deferred_wgrad as _deferred_wgrad,
    delayed_scaling as _delayed_scaling,
    fused as _fused,
    gemm as _gemm,
    gemm_activation as _gemm_activation,
    grouped_mlp as _grouped_mlp,
    layer_out as _layer_out,
    norm as _norm,
    norm_linear as _norm_linear,
    quantize as _quantize,
    quantize_out as _quantize_out,
    quantize_weight as _quantize_weight,
    routing as _routing,
)
from transformer_plugin.reference.activations import *
from transformer_plugin.reference.connect_gradient import *
from transformer_plugin.reference.deferred_wgrad import *
from transformer_plugin.reference.delayed_scaling import *
from transformer_plugin.reference.fused import *
from transformer_plugin.reference.gemm import *
from transformer_plugin.reference.gemm_activation import *
from transformer_plugin.reference.grouped_mlp import *
from transformer_plugin.reference.layer_out import *
from transformer_plugin.reference.linear import *
from transformer_plugin.reference.norm import *
from transformer_plugin.reference.norm_linear import *
from transformer_plugin.reference.quantize import *
from transformer_plugin.reference.quantize_out import *
from transformer_plugin.reference.quantize_weight import *
from transformer_plugin.reference.routing import *

# A function may have the name of its module, so modules are imported under other names here.
__all__: list[str] = []
__all__ += _activations.__all__
__all__ += _connect_gradient.__all__
__all__ += _deferred_wgrad.__all__
__all__ += _delayed_scaling.__all__
__all__ += _fused.__all__
__all__ += _gemm.__all__
__all__ += _gemm_activation.__all__
__all__ += _grouped_mlp.__all__
__all__ += _layer_out.__all__
__all__ += _norm.__all__
__all__ += _norm_linear.__all__
__all__ += _quantize.__all__
__all__ += _quantize_out.__all__
__all__ += _quantize_weight.__all__
__all__ += _routing.__all__

_public.only_public_names(__name__)
