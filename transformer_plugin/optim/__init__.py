"""Optimizers of quantized weights."""

from transformer_plugin.optim._quantized import MasterWeights, refresh_after

__all__ = ["MasterWeights", "refresh_after"]
