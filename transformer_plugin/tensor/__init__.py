"""Value types: tensors that know their own format. Frameworks hold them as they hold any tensor of torch."""

from __future__ import annotations

import torch

from transformer_plugin.tensor import _base, _copies, _elementwise, _views  # noqa: F401  their handlers
from transformer_plugin.tensor.grouped import GroupedTensor
from transformer_plugin.tensor.quantized import QuantizedTensor

__all__ = ["GroupedTensor", "QuantizedTensor"]

torch.serialization.add_safe_globals([GroupedTensor, QuantizedTensor, _base._rebuild])
