"""Adapters for other libraries, which they do not import."""

from transformer_plugin.integrations import hf

__all__ = ["hf"]
