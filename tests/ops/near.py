"""Float32 arithmetic with an error bound for each value."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**-24  # relative error of one rounding; for numbers below the normal range it is 2**-150 absolute
LARGEST = float(np.finfo(np.float32).max)


class Near:
    """Float32 values stored in float64, and how far the result of another correct order of operations may be from
    each. A value is not ``certain`` if it is so close to the end of the range that it may or may not overflow, or
    if it depends on such a value."""

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
        """Returns the values of a tensor, without an error."""
        return Near(tensor.double().numpy())

    def _rounded(self, value: np.ndarray, error: np.ndarray, certain: np.ndarray) -> Near:
        """Rounds a result. The error grows by half a unit in the last place twice: once for this value and once for
        the other order of operations. Exact are values that are not finite, and values that round to 0 with
        everything within their error."""
        error = np.where(np.isnan(error), 0.0, error)
        exact = ~np.isfinite(value) | (np.abs(value) + error < 2.0**-150)
        error = error + 2 * (UNIT * np.abs(np.where(exact, 0.0, value)) + 2.0**-150)
        return Near(
            np.where(np.isfinite(value) & exact, np.copysign(0.0, value), value),
            np.where(exact, 0.0, error),
            certain,
        )

    def _certain(self, other: Near) -> np.ndarray:
        """A result is certain if both operands are, or if one of them certainly is NaN."""
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
        """Sigmoid with an error of six roundings: up to three for exp, and one each for the sum, quotient and
        product. If exp(x) is subnormal, it may be flushed to 0; if it underflows, it is 0; if exp(-x) is small, the
        result is 1."""
        with np.errstate(over="ignore"):
            value = np.where(self.value < 0, np.exp(self.value), 1.0) / (1 + np.exp(-np.abs(self.value)))
            error = value * (6 * UNIT + np.expm1(np.minimum(self.error, 1.0)))
        flushed, small, one = self.value < -87.3, self.value + self.error < -105, self.value - self.error > 18
        value = np.where(flushed, 0.0, np.where(one, 1.0, value))
        error = np.where(small | one, 0.0, np.where(flushed, 2.0**-125, error))
        return Near(value, error, self.certain)

    def within(self, got: Tensor, name: str) -> None:
        """Asserts that each element is within its bound after rounding to its dtype, and that the bound applies to
        at least three quarters of the elements."""
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
    """Concatenates along the last axis."""
    return Near(*(np.concatenate([getattr(p, a) for p in parts], -1) for a in ("value", "error", "certain")))


def swiglu(gate: Near, linear: Near, prob: Near) -> Near:
    """silu(gate) * linear * prob."""
    return gate * gate.sigmoid() * linear * prob


def swiglu_backward(grad: Near, gate: Near, linear: Near, prob: Near) -> tuple[Near, Near, Near]:
    """Returns the gradients of the gate and of the linear part, and the terms whose sum is the gradient of the
    probability."""
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    slope = sigmoid + silu * (Near(np.ones(1)) + Near(-1 * np.ones(1)) * sigmoid)
    return grad * linear * prob * slope, grad * silu * prob, grad * (silu * linear)


def row_sums(terms: Near) -> Near:
    """Sums up to 128 columns as a binary tree that adds neighbors first."""
    rows, columns = terms.value.shape
    nothing = Near(np.zeros((rows, 128 - columns)))
    sums = concatenated(terms, nothing)
    while sums.value.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    return sums[:, 0]
