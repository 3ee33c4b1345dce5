"""Optimizers of quantized weights, and of matrices of which each rank has a shard."""

from transformer_plugin.optim._muon import Muon
from transformer_plugin.optim._quantized import MasterWeights, refresh_after

__all__ = ["MasterWeights", "Muon", "refresh_after"]
