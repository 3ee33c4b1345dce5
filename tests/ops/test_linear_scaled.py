"""linear and grouped_linear with delayed scaling: values, gradients, the amaxes of forward and backward, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.tensor import GroupedTensor
from transformer_plugin.testing.delayed_scaling_cases import E4M3, E5M2
from transformer_plugin.testing.gemm_cases import in_fp8_units, normals, poison_tail
from transformer_plugin.testing.numerics import assert_rounded_sum, assert_same_bits, fp8_sums

OPS = torch.ops.transformer_plugin
KEYS = (E4M3, E4M3, E5M2)
SIZES, ROWS = (70, 0, 130, 5), 230
# Powers of two and other numbers; the gradient's scale differs most.
SCALES = (2.0, 3.7, 900.0)


def linear_scaled(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    amax: Tensor | None = None,
    bias: Tensor | None = None,
    *keys: str,
) -> Tensor:
    return ops.linear(input, weight, bias, *keys, scale=scale, amax=amax)


def grouped_linear_scaled(
    input: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    scale: Tensor,
    amax: Tensor | None = None,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    *keys: str,
) -> Tensor:
    return ops.grouped_linear(input, weight, group_sizes, bias, bias_scale, *keys, scale=scale, amax=amax)


def fp8_values(x: Tensor, scale: float | Tensor, key: str) -> Tensor:
    """Returns the float64 values of a tensor after quantization to FP8."""
    one = torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(1)
    return reference.dequantize(*reference.quantize_scaled(x, one, key), key).double()


Three = tuple[Tensor, Tensor, Tensor]


def step_fp64(x: Tensor, w: Tensor, grad: Tensor, scales: Tensor) -> tuple[Three, Three, Three]:
    """Returns the output without bias and the gradients of input and weight, computed in float64 from quantized
    operands; the same from absolute values; and the errors of FP8 tensor cores."""
    a, b, g = (fp8_values(t, s, key) for t, s, key in zip((x, w, grad), scales, KEYS, strict=True))
    factors = ((a, b.T), (g, b), (g.T, a))
    exact, magnitude, errors = (
        tuple(f(*two) for two in factors) for f in (torch.matmul, lambda p, q: p.abs() @ q.abs(), fp8_sums)
    )
    return exact, magnitude, errors  # type: ignore[return-value]


def units_of(
    m: int | None, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float, float]:
    """Returns 1 for each of the three products that FP8 tensor cores compute, and 0 for the others. Grouped
    products have no ``m``."""
    input_key, weight_key, grad_key = KEYS
    dense = m is not None
    return (
        float(in_fp8_units(input_key, weight_key, dtype, n, k, device)),
        float(
            in_fp8_units(grad_key, weight_key, dtype, k, n, device)
            or (dense and in_fp8_units(grad_key, weight_key, dtype, k, None, device))
        ),
        float(in_fp8_units(grad_key, input_key, dtype, k, None, device)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(9, 16, 24), (140, 33, 200), (257, 130, 136)])
def test_linear_scaled_agrees_with_float64(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    x, w, bias, grad = (normals(s, dtype, device, generator) for s in ((m, k), (n, k), (n,), (m, n)))
    grad = grad / 64
    scale = torch.tensor(SCALES, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    amax = torch.tensor([0.0, 100.0, 0.0], device=device)
    output = linear_scaled(*leaves[:2], scale, amax, leaves[2], *KEYS)
    tops = [t.float().abs().amax().item() for t in (x, w, grad)]
    assert amax.tolist() == [tops[0], 100.0, 0.0]
    got = (output.detach(), *torch.autograd.grad(output, leaves, grad))
    assert amax.tolist() == [tops[0], 100.0, tops[2]] and amax._version == 0
    exact, magnitude, errors = step_fp64(x, w, grad, scale)
    units = units_of(m, n, k, dtype, device)
    with_bias = exact[0] + bias.double(), magnitude[0] + bias.double().abs()
    assert_rounded_sum(got[0], *with_bias, k, "output", units[0] * errors[0])
    assert_rounded_sum(got[1], exact[1], magnitude[1], n, "grad_input", units[1] * errors[1])
    assert_rounded_sum(got[2], exact[2], magnitude[2], m, "grad_weight", units[2] * errors[2])
    assert_rounded_sum(got[3], grad.double().sum(0), grad.double().abs().sum(0), m, "grad_bias")
    meant = reference.linear(x, w, bias, scale=scale, input_format=E4M3, weight_format=E4M3)
    assert_rounded_sum(meant, *with_bias, k, "reference")
    assert_same_bits(linear_scaled(x, w, scale, None, bias, *KEYS), got[0], "without a gradient or a state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(24, 40), (130, 264)])
def test_grouped_linear_scaled_agrees_with_float64(
    n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    count, total = len(SIZES), sum(SIZES)
    shapes = ((ROWS, k), (count, n, k), (count, n), (ROWS,), (ROWS, n))
    x, w, bias, row_scale, grad = (normals(s, dtype, device, generator) for s in shapes)
    grad, row_scale = grad / 64, row_scale.float()
    for tensor in (x, row_scale, grad):
        poison_tail(tensor, SIZES)
    sizes = torch.tensor(SIZES, device=device)
    scale = torch.cat([torch.rand(count, generator=generator) * s + s / 2 for s in SCALES]).to(device)
    amax = torch.zeros(3 * count, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias, row_scale)]
    output = grouped_linear_scaled(leaves[0], leaves[1], sizes, scale, amax, leaves[2], leaves[3], *KEYS)
    assert not amax[2 * count :].any()
    grad_x, grad_w, grad_bias, grad_row_scale = torch.autograd.grad(output, leaves, grad)
    for tensor in (output, grad_x, grad_row_scale):
        assert_same_bits(tensor[total:].detach(), torch.zeros_like(tensor[total:]), "tail")
    meant = reference.grouped_linear(
        x, w, sizes, bias, row_scale, scale=scale, input_format=E4M3, weight_format=E4M3
    )
    wanted_amax, begin = torch.zeros(3, count), 0
    units = units_of(None, n, k, dtype, device)
    for g, size in enumerate(SIZES):
        rows, of_group = slice(begin, begin + size), scale[g::count]
        begin += size
        exact, magnitude, errors = step_fp64(x[rows], w[g], grad[rows], of_group)
        added = row_scale[rows, None].double() * bias[g].double()
        for result, more in ((output, units[0] * errors[0]), (meant, 0.0)):
            assert_rounded_sum(result[rows], exact[0] + added, magnitude[0] + added.abs(), k, "output", more)
        assert_rounded_sum(grad_x[rows], exact[1], magnitude[1], n, "grad_input", units[1] * errors[1])
        assert_rounded_sum(grad_w[g], exact[2], magnitude[2], size, "grad_weight", units[2] * errors[2])
        weighted = grad[rows].double() * row_scale[rows, None].double()
        assert_rounded_sum(grad_bias[g], weighted.sum(0), weighted.abs().sum(0), size, "grad_bias")
        for role, tensor in enumerate((x[rows], w[g], grad[rows])):
            wanted_amax[role, g] = tensor.float().abs().amax() if tensor.numel() else 0
    assert_same_bits(amax.cpu(), wanted_amax.flatten(), "amax")


def test_leading_dimensions(device: torch.device) -> None:
    scale = torch.tensor([16.0, 16.0, 16.0], device=device)
    w = torch.randn(5, 8, device=device, requires_grad=True)
    for shape in ((8,), (2, 8), (2, 3, 8), (2, 0, 8)):
        x = torch.randn(shape, device=device, requires_grad=True)
        amax = torch.zeros(3, device=device)
        got = linear_scaled(x, w, scale, amax)
        assert got.shape == (*shape[:-1], 5)
        flat = x.detach().reshape(-1, 8).requires_grad_()
        expected = linear_scaled(flat, w, scale)
        assert_same_bits(got.detach().reshape(-1, 5), expected.detach())
        grads = torch.autograd.grad(got.square().sum(), (x, w))
        wanted = torch.autograd.grad(expected.square().sum(), (flat, w))
        assert_same_bits(grads[0].reshape(-1, 8), wanted[0])
        assert_same_bits(grads[1], wanted[1])


def test_only_requested_gradients_are_computed(device: torch.device) -> None:
    """Requests the gradient of each leaf alone. An amax is collected only for a gradient that is quantized."""
    scale = torch.tensor(SCALES, device=device)
    x, w, b = (torch.randn(s, device=device) for s in ((6, 8), (5, 8), (5,)))
    everything = [t.clone().requires_grad_() for t in (x, w, b)]
    full = torch.autograd.grad(linear_scaled(*everything[:2], scale, None, everything[2]).sum(), everything)
    for i in range(3):
        leaves = [t.clone().requires_grad_(i == j) for j, t in enumerate((x, w, b))]
        amax = torch.zeros(3, device=device)
        output = linear_scaled(*leaves[:2], scale, amax, leaves[2])
        (got,) = torch.autograd.grad(output.sum(), leaves[i])
        assert_same_bits(got, full[i])
        assert (amax[2].item() == 1.0) == (i < 2)
    amax = torch.zeros(3, device=device)
    with torch.no_grad():
        linear_scaled(everything[0], everything[1], scale, amax)
    assert amax[0] > 0 and amax[1] > 0 and amax[2] == 0


def test_two_forwards_before_two_backwards(device: torch.device) -> None:
    """The state may change between a forward and its backward."""
    scale, amax = torch.tensor(SCALES, device=device), torch.zeros(3, device=device)
    history = torch.zeros(4, 3, device=device)
    w = torch.randn(5, 8, device=device, requires_grad=True)
    outputs = []
    for i in range(2):
        now = ops.update_delayed_scale_(history, scale, amax, list(KEYS))
        outputs.append((linear_scaled(torch.ones(3, 8, device=device) * (i + 1), w, now, amax), now))
    for i, (output, now) in enumerate(outputs):
        (got,) = torch.autograd.grad((output * (i + 2)).sum(), w)
        alone = linear_scaled(torch.ones(3, 8, device=device) * (i + 1), w, now)
        assert_same_bits(got, torch.autograd.grad((alone * (i + 2)).sum(), w)[0])
    assert amax.tolist()[2] == 3.0


def layer(device: torch.device | str, grouped: bool = False) -> dict[str, Any]:
    """Returns the arguments of one call."""
    generator = torch.Generator().manual_seed(1)
    roles = 3 * (2 if grouped else 1)
    arguments = {
        "input": torch.randn(6, 8, generator=generator),
        "weight": torch.randn((2, 5, 8) if grouped else (5, 8), generator=generator),
        **({"group_sizes": torch.tensor([2, 3])} if grouped else {}),
        "scale": torch.rand(roles, generator=generator) + 1,
        "amax": torch.zeros(roles),
        "bias": torch.randn((2, 5) if grouped else (5,), generator=generator),
    }
    return {name: tensor.to(device) for name, tensor in arguments.items()}


@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped_linear"])
@pytest.mark.parametrize("wants", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("state", [False, True], ids=["stateless", "state"])
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(grouped: bool, wants: bool, state: bool, device: torch.device) -> None:
    arguments = layer(device, grouped)
    if not state:
        del arguments["amax"]
    for name in ("input", "weight", "bias"):
        arguments[name].requires_grad_(wants)
    op = OPS.grouped_linear.scaled if grouped else OPS.linear.scaled
    opcheck(op, (), arguments)


ARGUMENTS = layer("cpu")
GROUPED = layer("cpu", grouped=True)


@pytest.mark.parametrize(
    ("op", "changed", "error", "text"),
    [
        (ops.linear, {"input": ARGUMENTS["input"].double()}, TypeError,
         "argument 'input': expected one of the dtypes float32, bfloat16, float16, got float64. Convert it with "
         ".to() first."),
        (ops.linear, {"weight": ARGUMENTS["weight"][:, :7]}, ValueError,
         "argument 'weight': expected size 8 in dimension 1 (the last dimension of 'input'), got float32[5, 7] on "
         "cpu. Pass tensors whose sizes agree."),
        (ops.linear, {"scale": torch.ones(2)}, ValueError,
         "argument 'scale': expected at least 3 entries, of which this call has those from 0 on, got float32[2] on "
         "cpu. Pass one for each tensor or group."),
        (ops.linear, {"amax": torch.ones(4)}, ValueError,
         "argument 'amax': expected size 3 in dimension 0 (those of input, weight and gradient, one for each group), "
         "got float32[4] on cpu. Pass tensors whose sizes agree."),
        (ops.linear, {"amax": torch.ones(6)[::2]}, ValueError,
         "argument 'amax': expected a contiguous tensor, got float32[3] on cpu with strides [2]. Call .contiguous() on "
         "it first."),
        (ops.linear, {"grad_format": "fp8_block"}, ValueError,
         "argument 'grad_format': expected fp8_tensor:e4m3 or fp8_tensor:e5m2, without pow2 or eps, got 'fp8_block'. "
         "The scale is given: pow2 and eps are for scales that come from the data."),
        (ops.grouped_linear, {"scale": torch.ones(3)}, ValueError,
         "argument 'scale': expected at least 6 entries, of which this call has those from 0 on, got float32[3] on "
         "cpu. Pass one for each tensor or group."),
        (ops.grouped_linear, {"weight": GROUPED["weight"][0]}, ValueError,
         "argument 'weight': expected 3 dimensions, got float32[5, 8] on cpu. Reshape it first."),
        (ops.grouped_linear, {"group_sizes": torch.tensor([6])}, ValueError,
         "argument 'group_sizes': expected size 2 in dimension 0 (the matrices of 'weight'), got int64[1] on cpu. "
         "Pass tensors whose sizes agree."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wants", [False, True], ids=["plain", "grad"])
def test_errors(
    op: Callable[..., Tensor], changed: dict[str, Any], error: type[Exception], text: str, wants: bool
) -> None:
    arguments = {**(GROUPED if op is ops.grouped_linear else ARGUMENTS), **changed}
    arguments["bias"] = arguments["bias"].clone().requires_grad_(wants)
    amax = arguments["amax"].clone()
    with pytest.raises(error) as caught:
        op(**arguments)
    assert str(caught.value) == f"transformer_plugin::{op.__name__}: {text}"
    assert_same_bits(arguments["amax"], amax)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_value_among_plain_tensors_writes_no_amax(name: str, device: torch.device) -> None:
    """The input would be quantized, and its amax written, before the product refused the value."""
    scale, amax = torch.ones(6, device=device), torch.zeros(6, device=device)
    arguments: dict[str, Any] = {
        "input": torch.ones(32, 64, device=device),
        "weight": torch.ones(2, 48, 64, device=device),
        "group_sizes": torch.tensor([16, 16], device=device),
        "bias": torch.ones(2, 48, device=device),
        "scale": scale,
        "amax": amax,
    }
    keys = dict(zip(("input_format", "weight_format", "grad_format"), KEYS, strict=True))
    OPS.grouped_linear.scaled(**arguments, **keys)
    amax.zero_()
    text = rf"grouped_linear: argument '{name}': expected a plain tensor"
    with pytest.raises(ValueError, match=text):
        OPS.grouped_linear.scaled(**{**arguments, name: GroupedTensor(arguments[name])}, **keys)
    assert not amax.any()


@pytest.mark.parametrize("op", [ops.linear, ops.grouped_linear], ids=["linear", "grouped_linear"])
def test_options_that_delayed_scaling_does_not_have(op: Callable[..., Tensor]) -> None:
    arguments = GROUPED if op is ops.grouped_linear else ARGUMENTS
    buffer = torch.zeros(2, 5, 8) if op is ops.grouped_linear else torch.zeros(5, 8)
    options: dict[str, Any] = {
        "main_grad": buffer,
        "accumulate": False,
        "weight_grad": "zeros",
        "dgrad_out": buffer,
    }
    options |= {"quantized_weight": [buffer], "wgrad_queue": buffer, "save_original_input": True}
    options |= {"sequence_parallel_size": 2} if op is ops.linear else {}
    for name, value in options.items():
        with pytest.raises(
            ValueError, match=rf"^transformer_plugin::{op.__name__}: argument '{name}': expected"
        ):
            op(**{**arguments, name: value})
    without = {name: value for name, value in arguments.items() if name != "scale"}
    with pytest.raises(ValueError, match="argument 'amax': expected None without 'scale', got a tensor"):
        op(**without)


def test_the_op_by_its_name(device: torch.device) -> None:
    """torch chooses the overload by the arguments, and an argument of another type is named in both."""
    arguments = layer(device)
    assert_same_bits(OPS.linear(**arguments), ops.linear(**arguments))
    with pytest.raises(
        TypeError, match=r"^transformer_plugin::linear: argument 'scale': expected a tensor, got 1\.5"
    ):
        OPS.linear(**{**arguments, "scale": 1.5})
    with pytest.raises(
        TypeError, match=r"^transformer_plugin::linear: argument 'bias': expected a tensor or None, got 1"
    ):
        OPS.linear(arguments["input"], arguments["weight"], 1)
