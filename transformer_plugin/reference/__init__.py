"""The meaning of every op in plain PyTorch: short, slow, and the oracle of the ops' tests."""

from transformer_plugin.reference.activation import swiglu, swiglu_backward

__all__ = ["swiglu", "swiglu_backward"]
