"""Expert parallelism over a group of ranks, sharded weights, tensor parallelism, and data parallelism around them."""

from transformer_plugin.parallel._gather_order import set_gather_order
from transformer_plugin.parallel._quantized_gather import quantize_all_gather
from transformer_plugin.parallel._weight_shard import WeightShard
from transformer_plugin.parallel.clip import clip_grad_norm_
from transformer_plugin.parallel.compat.transformer_engine import (
    EpBuffer,
    ep_bootstrap,
    ep_combine,
    ep_dispatch,
    ep_finalize,
    ep_prepare,
    is_ep_bootstrapped,
    is_symm_backed,
    release_symm_mem_pool,
    symm_mem_alloc,
)
from transformer_plugin.parallel.data import ExpertDataParallel, data_parallel, fully_shard
from transformer_plugin.parallel.expert import EpConfig, EpContext, EpPlan
from transformer_plugin.parallel.external import attach_distributed_weights
from transformer_plugin.parallel.full_state import full_state_dict, full_weight, initialize_full_params
from transformer_plugin.parallel.random import TensorParallelRNG
from transformer_plugin.parallel.sharded import shard_
from transformer_plugin.parallel.symmetric import SymmetricPool

__all__ = [
    "EpBuffer",
    "EpConfig",
    "EpContext",
    "EpPlan",
    "ExpertDataParallel",
    "SymmetricPool",
    "TensorParallelRNG",
    "WeightShard",
    "attach_distributed_weights",
    "clip_grad_norm_",
    "data_parallel",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "full_state_dict",
    "full_weight",
    "fully_shard",
    "initialize_full_params",
    "is_ep_bootstrapped",
    "is_symm_backed",
    "quantize_all_gather",
    "release_symm_mem_pool",
    "set_gather_order",
    "shard_",
    "symm_mem_alloc",
]
