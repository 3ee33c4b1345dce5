"""Modules with plain parameters and ordinary state dicts. A recipe selects the number formats of their products."""

from transformer_plugin.launch import LaunchOptions
from transformer_plugin.nn._pipelining import dw_builder
from transformer_plugin.nn._slots import Slots, SlotsOfRanks
from transformer_plugin.nn._weight_cache import weights_changed
from transformer_plugin.nn.convert import convert
from transformer_plugin.nn.delayed import reduce_amax
from transformer_plugin.nn.embedding import Embedding
from transformer_plugin.nn.grouped_linear import GroupedLinear
from transformer_plugin.nn.grouped_mlp import GroupedMLP
from transformer_plugin.nn.layer_norm_linear import LayerNormLinear
from transformer_plugin.nn.linear import Linear
from transformer_plugin.nn.moe import MoE, MoEOutput
from transformer_plugin.nn.norms import LayerNorm, RMSNorm
from transformer_plugin.nn.quantized_parameters import quantized_init
from transformer_plugin.nn.quantized_weight import QuantizedWeight
from transformer_plugin.nn.router import RouterConfig, Routing, TopKRouter
from transformer_plugin.parallel.token_dispatcher import DispatchConfig

__all__ = [
    "DispatchConfig",
    "Embedding",
    "GroupedLinear",
    "GroupedMLP",
    "LaunchOptions",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "MoE",
    "MoEOutput",
    "QuantizedWeight",
    "RMSNorm",
    "RouterConfig",
    "Routing",
    "Slots",
    "SlotsOfRanks",
    "TopKRouter",
    "convert",
    "dw_builder",
    "quantized_init",
    "reduce_amax",
    "weights_changed",
]
