"""Adapters for other libraries. ``hf`` does not import its library; ``torchtitan`` does, and is imported by name."""

from transformer_plugin.integrations import hf

__all__ = ["hf"]
