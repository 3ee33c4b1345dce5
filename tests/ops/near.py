"""Float32 arithmetic that carries a bound of its error."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**-24  # relative, of one rounding; 2**-150 absolute, below the normal numbers
LARGEST = float(np.finfo(np.float32).max)


class Near:
    """Float32 values in float64, and how far each may be from what another way of computing it gives. Not ``certain``
    is one that lies so near to an end of the range that it may leave it or not, and what comes of such a one."""

    def __init__(self, value: np.ndarray, error: np.ndarray | float = 0.0, certain: np.ndarray | bool = True):
        with np.errstate(over="ignore"):
            self.value = np.asarray(value, np.float64).astype(np.float32).astype(np.float64)
        self.error = np.broadcast_to(np.asarray(error, np.float64), self.value.shape).copy()
        ends = np.abs(self.value) + self.error >= LARGEST
        both = (
            (self.error > 0) & ends & (np.abs(np.nan_to_num(value, nan=0.0)) - self.error <= 1.01 * LARGEST)
        )
        self.certain = np.broadcast_to(certain, self.value.shape) & ~both

    @staticmethod
    def of(tensor: Tensor) -> Near:
        """Without an error."""
        return Near(tensor.double().numpy())

    def _rounded(self, value: np.ndarray, error: np.ndarray, certain: np.ndarray) -> Near:
        """Twice half a unit in the last place: once for this value, once for the other way's. Exact are 0, what rounds
        to it with all that is near, and what is not finite."""
        error = np.where(np.isnan(error), 0.0, error)
        exact = ~np.isfinite(value) | (np.abs(value) + error < 2.0**-150)
        error = error + 2 * (UNIT * np.abs(np.where(exact, 0.0, value)) + 2.0**-150)
        return Near(
            np.where(np.isfinite(value) & exact, np.copysign(0.0, value), value),
            np.where(exact, 0.0, error),
            certain,
        )

    def _certain(self, other: Near) -> np.ndarray:
        """NaN is NaN in any company."""
        nan = [one.certain & np.isnan(one.value) for one in (self, other)]
        return (self.certain & other.certain) | nan[0] | nan[1]

    def __mul__(self, other: Near) -> Near:
        with np.errstate(invalid="ignore", over="ignore"):
            value = self.value * other.value
            parts = (
                self.error * np.abs(other.value),
                other.error * np.abs(self.value),
                self.error * other.error,
            )
            error = sum(np.where(np.isnan(part), 0.0, part) for part in parts)
        certain = self._certain(other)
        for one, infinite in ((self, other), (other, self)):  # 0 * inf, or inf, or -inf
            certain = certain & ~(
                (np.abs(one.value) <= one.error) & (one.error > 0) & np.isinf(infinite.value)
            )
        return self._rounded(value, error, certain)

    def __add__(self, other: Near) -> Near:
        with np.errstate(invalid="ignore"):
            value = self.value + other.value
        return self._rounded(value, self.error + other.error, self._certain(other))

    def __getitem__(self, index: object) -> Near:
        return Near(self.value[index], self.error[index], self.certain[index])

    def sigmoid(self) -> Near:
        """Within six roundings: of exp, which may be 3, of a sum, a quotient and a product. Where exp(x) is no normal
        number it may be 0, and it is where it is no number of float32; the sum with 1 is 1 where it is small."""
        with np.errstate(over="ignore"):
            value = np.where(self.value < 0, np.exp(self.value), 1.0) / (1 + np.exp(-np.abs(self.value)))
            error = value * (6 * UNIT + np.expm1(np.minimum(self.error, 1.0)))
        flushed, small, one = self.value < -87.3, self.value + self.error < -105, self.value - self.error > 18
        value = np.where(flushed, 0.0, np.where(one, 1.0, value))
        error = np.where(small | one, 0.0, np.where(flushed, 2.0**-125, error))
        return Near(value, error, self.certain)

    def within(self, got: Tensor, name: str) -> None:
        """Each element is one of these rounded to its dtype; the bound decides at least three of four."""
        certain = torch.from_numpy(np.ascontiguousarray(self.certain))
        with np.errstate(invalid="ignore"):
            ends = [torch.from_numpy(np.asarray(self.value + s * self.error)).to(got.dtype) for s in (-1, 1)]
        assert got.shape == certain.shape, f"{name}: {list(got.shape)}, expected {list(certain.shape)}"
        good = (ends[0] <= got) & (got <= ends[1]) | (got.isnan() & ends[0].isnan())
        bad = (~good & certain).nonzero()
        assert bad.numel() == 0, (
            f"{name}: {bad.shape[0]} elements, first {bad[0].tolist()}: {got[tuple(bad[0])].item()}, "
            f"expected {ends[0][tuple(bad[0])].item()} to {ends[1][tuple(bad[0])].item()}"
        )
        assert int((~certain).sum()) <= max(2, certain.numel() // 4), f"{name}: the bound decides too few"


def concatenated(*parts: Near) -> Near:
    """Along the last axis."""
    return Near(*(np.concatenate([getattr(p, a) for p in parts], -1) for a in ("value", "error", "certain")))


def swiglu(gate: Near, linear: Near, prob: Near) -> Near:
    """silu(gate) * linear * prob."""
    return gate * gate.sigmoid() * linear * prob


def swiglu_backward(grad: Near, gate: Near, linear: Near, prob: Near) -> tuple[Near, Near, Near]:
    """Gradients of the gate and the linear part, and the terms of the probability's."""
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    slope = sigmoid + silu * (Near(np.ones(1)) + Near(-1 * np.ones(1)) * sigmoid)
    return grad * linear * prob * slope, grad * silu * prob, grad * (silu * linear)


def row_sums(terms: Near) -> Near:
    """Of up to 128 columns: of neighbours, then of these."""
    rows, columns = terms.value.shape
    nothing = Near(np.zeros((rows, 128 - columns)))
    sums = concatenated(terms, nothing)
    while sums.value.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]
