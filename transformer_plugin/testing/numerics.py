"""Error measures. Quantized bytes must be equal; floats are compared in units of their own precision."""

from __future__ import annotations

import torch
from torch import Tensor


def element_bytes(tensor: Tensor) -> Tensor:
    """The bytes of each element, on the CPU: ``[numel, bytes]``."""
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).reshape(-1, tensor.element_size())


def _element(tensor: Tensor, index: int) -> str:
    """Formats one element; torch cannot print packed 4-bit floats."""
    if tensor.dtype == torch.float4_e2m1fn_x2:
        return "two E2M1 elements"
    return repr(tensor.detach().cpu().reshape(-1)[index])


def assert_same_bits(got: Tensor, expected: Tensor, name: str = "output") -> None:
    """Same shape, dtype and bytes; the error names the first element that differs."""
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{name}: dtype {got.dtype}, expected {expected.dtype}"
    if got.numel() == 0:
        return
    got_bytes, expected_bytes = element_bytes(got), element_bytes(expected)
    different = (got_bytes != expected_bytes).any(1).nonzero()
    if different.numel():
        flat = int(different[0])
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
        raise AssertionError(
            f"{name}: {different.shape[0]} of {got.numel()} elements differ, first at {where}: "
            f"got {_element(got, flat)} (bytes {got_bytes[flat].tolist()}), "
            f"expected {_element(expected, flat)} (bytes {expected_bytes[flat].tolist()})"
        )


def relative_error(got: Tensor, expected: Tensor) -> float:
    """``||got - expected|| / ||expected||`` in float64; inf if there is a NaN, so that no bound accepts it."""
    difference = (got.double() - expected.double()).norm()
    scale = expected.double().norm()
    error = float(difference / scale) if float(scale) > 0 else float(difference)
    return error if error == error else float("inf")


def assert_close_in_ulp(
    got: Tensor, expected: Tensor, ulp: float, floor: float = 0.0, name: str = "output"
) -> None:
    """Asserts that every element is within ``ulp`` units in the last place (of ``got``'s dtype, at ``expected``).

    ``floor`` is an absolute error that is always allowed, for sums whose terms cancel.
    """
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if got.numel() == 0:
        return
    epsilon = torch.finfo(got.dtype).eps
    bound = expected.double().abs() * epsilon * ulp + floor + torch.finfo(got.dtype).tiny
    error = (got.double() - expected.double()).abs()
    bad = ~(error <= bound) & ~((got.double() == expected.double()) | (got.isnan() & expected.isnan()))
    assert not bad.any(), (
        f"{name}: {int(bad.sum())} of {got.numel()} elements further than {ulp} ulp, worst "
        f"{float((error / bound)[bad].max()):.3g} times the bound"
    )


def fp8_sums(a: Tensor, b: Tensor) -> Tensor:
    """Bounds the error of Hopper's FP8 tensor cores in ``a @ b``, for E4M3 values of either sign stored in float64.

    A tensor core instruction adds 32 products to the partial sum of up to 128 products, and truncates each of these
    terms at about 2**-13 of the largest. Except for rare elements the largest term, a product or the partial sum, is
    below ``2 * r``, where ``r`` is the root of the sum of the products' squares. So there are 132 errors of up to
    ``u = 2**-12 * r`` and of either sign, each with a standard deviation of ``u / sqrt(12)``. Six standard deviations
    of their sum are ``20 * u``. When such sums of 128 products are added, ``r`` and the errors grow in the same way.
    """
    return 20 * 2.0**-12 * (a.square() @ b.square()).sqrt()


def assert_rounded_sum(
    got: Tensor,
    exact: Tensor,
    magnitude: Tensor,
    terms: int | Tensor,
    name: str = "output",
    more: Tensor | float = 0.0,
) -> None:
    """Asserts that ``got`` is an FP32 sum of ``terms`` products, rounded once.

    The bound is half a unit in the last place of ``got``, plus the error of the sum, at most ``terms * 2**-24`` of
    ``magnitude``, the sum of the products' absolute values (Higham, "Accuracy and Stability of Numerical Algorithms",
    2002, section 3.1), plus ``more`` if the sum is not purely FP32 (:func:`fp8_sums`). ``exact`` and ``magnitude`` are
    float64.
    """
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    info = torch.finfo(got.dtype)
    rounding = (exact.abs() + more) * info.eps / 2
    bound = rounding + 1.01 * (terms + 2) * 2.0**-24 * magnitude + more + info.smallest_normal * info.eps
    error = (got.double() - exact).abs()
    bad = ~(error <= bound)
    assert not bad.any(), (
        f"{name}: {int(bad.sum())} of {got.numel()} elements are not the sum rounded once, worst "
        f"{float((error / bound)[bad].max()):.3g} times the bound"
    )
