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
)
from transformer_plugin.parallel.data import ExpertDataParallel, data_parallel, fully_shard
from transformer_plugin.parallel.expert import EpConfig, EpContext, EpPlan
from transformer_plugin.parallel.foreign import attach_distributed_weights
from transformer_plugin.parallel.random import RankRandom
from transformer_plugin.parallel.sharded import shard_
from transformer_plugin.parallel.whole import whole_parameters, whole_state_dict, whole_weight

__all__ = [
    "EpBuffer",
    "EpConfig",
    "EpContext",
    "EpPlan",
    "ExpertDataParallel",
    "RankRandom",
    "WeightShard",
    "attach_distributed_weights",
    "clip_grad_norm_",
    "data_parallel",
    "ep_bootstrap",
    "ep_combine",
    "ep_dispatch",
    "ep_finalize",
    "ep_prepare",
    "fully_shard",
    "is_ep_bootstrapped",
    "quantize_all_gather",
    "set_gather_order",
    "shard_",
    "whole_parameters",
    "whole_state_dict",
    "whole_weight",
]
