"""main_grad: the backward adds a weight's gradient to a buffer, or writes over it, and autograd gets what weight_grad
says. Results are those of the layer without a buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.main_grad_runs import BUFFERS, FORMATS, buffers, layer_of, run, stacked
from tests.ops.test_linear_ops import NONE
from transformer_plugin import ops, reference
from transformer_plugin.testing.gemm_cases import normals
from transformer_plugin.testing.numerics import assert_same_bits

NAN = float("nan")
LAYERS = tuple(BUFFERS)
by_layer = pytest.mark.parametrize("name", LAYERS)
by_formats = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS.keys())
SOME = {key: FORMATS[key] for key in ("none", "bf16", "block", "nv")}
by_some_formats = pytest.mark.parametrize("formats", SOME.values(), ids=SOME.keys())


def flat(gradient: Any) -> list[Any]:
    return gradient if isinstance(gradient, list) else [gradient]


def assert_same_elsewhere(name: str, got: Any, plain: Any) -> None:
    """The output and the gradients of everything but the weights."""
    assert_same_bits(got.output, plain.output)
    for place, (a, b) in enumerate(zip(got.gradients, plain.gradients, strict=True)):
        if place not in BUFFERS[name] and b is not None:
            assert_same_bits(a, b, str(place))


def assert_added(buffer: Tensor, gradient: Tensor, before: float, *, exact: bool) -> None:
    """``before`` plus the gradient, in float32 and rounded once."""
    expected = (gradient.float() + before).to(buffer.dtype)
    if exact:
        return assert_same_bits(buffer, expected)
    # The gradient is rounded to its own dtype, and sums are made in another order.
    unit = max(torch.finfo(dtype).eps for dtype in (buffer.dtype, gradient.dtype, torch.float32))
    bound = 4 * unit * (gradient.float().abs().max() + abs(before)).item()
    torch.testing.assert_close(buffer.float(), expected.float(), rtol=2 * unit, atol=bound)


@by_layer
@by_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=["into-fp32", "into-bf16"])
@pytest.mark.parametrize("accumulate", [True, False], ids=["accumulate", "overwrite"])
def test_the_gradient_goes_into_the_buffer(
    name: str,
    formats: tuple[str, str, str],
    dtype: torch.dtype,
    into: torch.dtype,
    accumulate: bool,
    device: torch.device,
) -> None:
    layer = layer_of(name, formats, dtype, device)
    plain = run(layer, formats)
    before = 0.25 if accumulate else NAN
    first: dict[int, Tensor] = {}
    for lists in ((), tuple(BUFFERS[name])) if name != "linear" else ((),):
        for as_list in (False, True) if name != "linear" else (False,):
            given = buffers(name, layer, into, before, as_list=as_list)
            got = run(layer, formats, {**given, "accumulate": accumulate}, lists=lists)
            assert_same_elsewhere(name, got, plain)
            for place, argument in BUFFERS[name].items():
                written, gradient = stacked(given[argument]), plain.gradients[place]
                assert all(w is None for w in flat(got.gradients[place]))
                exact = dtype == into == torch.float32 and not accumulate
                assert_added(written, gradient, 0.25 if accumulate else 0.0, exact=exact)
                assert_same_bits(written, first.setdefault(place, written), argument)


@by_layer
@by_formats
def test_sums_of_two_backwards_are_rounded_once_each(
    name: str, formats: tuple[str, str, str], device: torch.device
) -> None:
    """bfloat16 holds 256 and not 257: what is rounded before it is added is lost."""
    layer = layer_of(name, formats, torch.float32, device)
    plain = run(layer, formats)
    given = buffers(name, layer, torch.bfloat16, 0.25)
    for _ in range(2):
        run(layer, formats, given)
    for place, argument in BUFFERS[name].items():
        gradient = plain.gradients[place].double()
        once = (gradient.float() + 0.25).bfloat16()
        twice = (gradient.float() + once.float()).bfloat16().double()
        # One unit of each rounding, where the order of float32 sums changes it. FP8 tensor cores keep 14 bits of a sum.
        bound = 2**-7 * (twice.abs() + once.double().abs() + gradient.abs())
        if device.type == "cuda" and formats[0].startswith("fp8"):
            bound = bound + 2**-12 * gradient.abs().max()
        assert bool(((given[argument].double() - twice).abs() <= bound).all())


@by_layer
@by_some_formats
@pytest.mark.parametrize("mode", ["none", "empty", "zeros"])
def test_what_autograd_gets(
    name: str, formats: tuple[str, str, str], mode: str, device: torch.device
) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    for lists in ((), tuple(BUFFERS[name])) if name != "linear" else ((),):
        got = run(
            layer, formats, {**buffers(name, layer, torch.float32, 0.0), "weight_grad": mode}, lists=lists
        )
        for place in BUFFERS[name]:
            for gradient, leaf in zip(flat(got.gradients[place]), flat(got.leaves[place]), strict=True):
                if mode == "none":
                    assert gradient is None
                    continue
                assert gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
                assert gradient.device == leaf.device and (mode == "empty" or not gradient.any())


def assert_same_sums(got: Tensor, expected: Tensor) -> None:
    """On a CPU the last bit of a float32 product depends on addresses. Terms that cancel are of the size of 1 to 10."""
    if got.is_cuda:
        return assert_same_bits(got, expected)
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=4 * eps, atol=1e-5)


def strided(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """One flat buffer, and views of it: a matrix for each group whose rows are 8 elements apart, in an order that is
    not that of the groups, with 16 elements between the matrices."""
    groups, n, k = shape
    distance = n * (k + 8) + 16
    flat_buffer = torch.full((groups * distance + 8,), 0.25, dtype=dtype, device=device)
    views = [
        flat_buffer.as_strided((n, k), (k + 8, 1), 8 + distance * (groups - 1 - g)) for g in range(groups)
    ]
    return flat_buffer, views


@by_layer
@by_some_formats
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16], ids=["into-fp32", "into-bf16"])
@pytest.mark.parametrize("accumulate", [True, False], ids=["accumulate", "overwrite"])
def test_views_of_one_flat_buffer(
    name: str, formats: tuple[str, str, str], into: torch.dtype, accumulate: bool, device: torch.device
) -> None:
    """Rows further apart than they are wide; what lies between them stays."""
    layer = layer_of(name, formats, torch.bfloat16, device)
    dense = buffers(name, layer, into, 0.25)
    run(layer, formats, {**dense, "accumulate": accumulate})
    made = {}
    for place, argument in BUFFERS[name].items():
        weight = layer.arguments[place]
        made[argument] = strided(weight.view(-1, *weight.shape[-2:]).shape, into, device)
    views = {argument: each[0] if name == "linear" else each for argument, (_, each) in made.items()}
    run(layer, formats, {**views, "accumulate": accumulate})
    for argument, (whole, each) in made.items():
        assert_same_sums(torch.stack(each).view(dense[argument].shape), dense[argument])
        for view in each:
            view.fill_(0.25)
        assert (whole == 0.25).all()
    if name == "linear":
        return
    for place, argument in BUFFERS[name].items():  # a stack with strided rows and groups
        whole = torch.full(
            (*layer.arguments[place].shape[:2], dense[argument].shape[2] + 8), 0.25, dtype=into
        )
        views[argument] = whole.to(device)[..., :-8]
    run(layer, formats, {**views, "accumulate": accumulate})
    for argument in BUFFERS[name].values():
        assert_same_sums(views[argument].contiguous(), dense[argument])


@by_layer
@by_some_formats
def test_frozen_weights_leave_their_buffers(
    name: str, formats: tuple[str, str, str], device: torch.device
) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    given = buffers(name, layer, torch.float32, NAN)
    got = run(layer, formats, {**given, "accumulate": False}, frozen=lambda place, group: True)
    assert_same_elsewhere(name, got, run(layer, formats))
    for argument in BUFFERS[name].values():
        assert given[argument].isnan().all()


@pytest.mark.parametrize("name", LAYERS[1:])
@pytest.mark.parametrize("as_list", [False, True], ids=["stack", "list"])
@by_some_formats
def test_frozen_matrices_of_a_list_leave_their_buffers(
    name: str, as_list: bool, formats: tuple[str, str, str], device: torch.device
) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    lists = tuple(BUFFERS[name])
    every = buffers(name, layer, torch.float32, NAN)
    run(layer, formats, {**every, "accumulate": False}, lists=lists)
    given = buffers(name, layer, torch.float32, NAN, as_list=as_list)
    options = {**given, "accumulate": False, "weight_grad": "zeros"}
    got = run(layer, formats, options, lists=lists, frozen=lambda place, group: group % 2 == 0)
    plain = run(layer, formats, lists=lists, frozen=lambda place, group: group % 2 == 0)
    for place, argument in BUFFERS[name].items():
        for group, buffer in enumerate(given[argument]):
            frozen = group % 2 == 0
            assert (got.gradients[place][group] is None) == frozen
            assert (plain.gradients[place][group] is None) == frozen
            if frozen:
                assert buffer.isnan().all()
            else:
                assert_same_bits(buffer, every[argument][group], argument)


@by_layer
@by_formats
@pytest.mark.parametrize("accumulate", [True, False], ids=["accumulate", "overwrite"])
def test_no_rows(name: str, formats: tuple[str, str, str], accumulate: bool, device: torch.device) -> None:
    """Without rows in any group a buffer keeps what it holds, or becomes zero whatever it held."""
    layer = layer_of(name, formats, torch.bfloat16, device, (0, 0, 0, 0))
    if name == "linear":
        x, *others = layer.arguments
        layer = layer._replace(arguments=(x[:, :0], *others))
    for as_list in (False, True):
        given = buffers(name, layer, torch.float32, 0.25 if accumulate else NAN, as_list=as_list)
        run(layer, formats, {**given, "accumulate": accumulate})
        for buffer in given.values():
            assert (stacked(buffer) == (0.25 if accumulate else 0.0)).all()


@by_layer
@by_some_formats
def test_two_forwards_before_two_backwards(
    name: str, formats: tuple[str, str, str], device: torch.device
) -> None:
    layer = layer_of(name, formats, torch.bfloat16, device)
    in_turn, together = (buffers(name, layer, torch.float32, 0.25) for _ in range(2))
    for _ in range(2):
        run(layer, formats, in_turn)
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in layer.arguments]
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(layer.function(*leaves, *formats, **together))
    versions = [buffer._version for buffer in together.values()]
    plain = run(layer, formats)
    assert_same_bits(outputs[0].detach(), plain.output)
    for output in outputs:
        generator = torch.Generator().manual_seed(7)
        output.backward(normals(tuple(output.shape), output.dtype, device, generator))
    assert versions == [buffer._version for buffer in together.values()]
    for argument, buffer in together.items():
        assert_same_bits(buffer, in_turn[argument], argument)


@by_layer
def test_a_backward_that_asks_for_other_gradients_writes_nothing(name: str, device: torch.device) -> None:
    layer = layer_of(name, NONE, torch.float32, device)
    given = buffers(name, layer, torch.float32, 0.25)
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in layer.arguments]
    output = layer.function(*leaves, *NONE, **given)
    torch.autograd.grad(output, leaves[0], torch.ones_like(output))
    assert all((buffer == 0.25).all() for buffer in given.values())


@by_layer
def test_the_backward_is_not_differentiable(name: str, device: torch.device) -> None:
    layer = layer_of(name, NONE, torch.float32, device)
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in layer.arguments]
    output = layer.function(*leaves, *NONE, **buffers(name, layer, torch.float32, 0.0))
    [gradient] = torch.autograd.grad(output.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="expected to be differentiated once"):
        gradient.sum().backward()


@pytest.mark.parametrize("as_list", [False, True], ids=["stack", "list"])
def test_float64(as_list: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, grad = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((9, 5), (2, 4, 5), (9, 4))
    )
    sizes = torch.tensor([3, 4])
    expected = torch.stack([grad[:3].T @ x[:3], grad[3:7].T @ x[3:7]]) + 0.25
    main_grad = torch.full_like(weight, 0.25)
    given = list(main_grad) if as_list else main_grad
    ops.grouped_linear(x, weight.requires_grad_(), sizes, main_grad=given).backward(grad)
    torch.testing.assert_close(main_grad, expected, rtol=1e-14, atol=1e-14)
    dense = torch.full((4, 5), 0.25, dtype=torch.float64)
    ops.linear(x, weight[0].detach().requires_grad_(), main_grad=dense).backward(grad)
    torch.testing.assert_close(dense, grad.T @ x + 0.25, rtol=1e-14, atol=1e-14)


@by_layer
@pytest.mark.parametrize("mode", ["none", "zeros"])
@pytest.mark.parametrize("accumulate", [True, False], ids=["accumulate", "overwrite"])
def test_reference_agrees_with_the_op(name: str, mode: str, accumulate: bool, device: torch.device) -> None:
    layer = layer_of(name, NONE, torch.float32, device)
    mine, other = (buffers(name, layer, torch.float32, 0.25) for _ in range(2))
    options = {"accumulate": accumulate, "weight_grad": mode}
    run(layer, (), {**mine, **options})
    got = run(layer, (), {**other, **options}, function=getattr(reference, name))
    for place, argument in BUFFERS[name].items():
        # Sums of float32 in another order: 2**-24 of terms that cancel.
        torch.testing.assert_close(mine[argument], other[argument], rtol=1e-4, atol=1e-4)
        assert (got.gradients[place] is None) == (mode == "none")


# The operands of nvfp4's weight gradient are dequantized first.
MULTIPLIED_AS_THEY_ARE = {key: formats for key, formats in SOME.items() if key != "nv"}


@pytest.mark.gpu
@by_layer
@pytest.mark.parametrize("formats", MULTIPLIED_AS_THEY_ARE.values(), ids=MULTIPLIED_AS_THEY_ARE.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_backward_allocates_nothing_of_the_size_of_a_weight(
    name: str, formats: tuple[str, str, str], dtype: torch.dtype
) -> None:
    n, k, rows, groups = 2048, 2048, 128, 4
    device = torch.device("cuda")
    shape = (n, k) if name == "linear" else (groups, n, k)
    x = torch.randn(rows, k, device=device, dtype=dtype)
    weight = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    second = torch.randn(groups, k, n // 2, device=device, dtype=dtype, requires_grad=True)
    sizes, probs = torch.tensor([32] * groups, device=device), torch.rand(rows, device=device)
    arguments = {
        "linear": (x, weight, None),
        "grouped_linear": (x, weight, sizes, None, None),
        "grouped_mlp": (x, weight, second, sizes, probs, None, None),
    }[name]
    into = {
        argument: torch.zeros(arguments[place].shape, device=device)
        for place, argument in BUFFERS[name].items()
    }
    peaks: dict[bool, int] = {}
    for fused in (
        False,
        True,
        False,
        True,
    ):  # the first backward also allocates the workspace of torch's products
        output = getattr(ops, name)(*arguments, *formats, **(into if fused else {}))
        grad = torch.ones_like(output)
        weight.grad = second.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output.backward(grad)
        peaks[fused] = torch.cuda.max_memory_allocated() - before
    gradient = min(buffer.numel() for buffer in into.values()) * weight.element_size()
    assert peaks[True] <= peaks[False] - 0.9 * gradient
    assert all(buffer.any() for buffer in into.values())
