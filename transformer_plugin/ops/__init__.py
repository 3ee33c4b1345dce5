"""Typed wrappers over ``torch.ops.transformer_plugin``, one file per family."""

from transformer_plugin.ops.activation import swiglu, swiglu_backward

__all__ = ["swiglu", "swiglu_backward"]
