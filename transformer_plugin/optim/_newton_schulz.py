"""Orthogonalization by Newton-Schulz iterations: torch's of a matrix, and the same of each matrix of a stack."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz


def orthogonalized(
    update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The bfloat16 result of a matrix ``[N, K]``, or of each matrix of a stack ``[G, N, K]``."""
    if update.dim() == 2:
        return _zeropower_via_newtonschulz(update, coefficients, steps, eps)
    a, b, c = coefficients
    tall = update.shape[1] > update.shape[2]
    x = update.bfloat16()
    if tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
