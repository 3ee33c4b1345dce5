"""``nonfinite="nan"``: NaN and infinity in an operand reach outputs, gradients and an unmodified loss scaler."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.opcheck import opcheck
from transformer_plugin import ops, reference
from transformer_plugin.nn import GroupedLinear, GroupedMLP, Linear, MoE
from transformer_plugin.recipes import (
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    recipe_from_name,
)
from transformer_plugin.testing.numerics import assert_same_bits

NAMES = ("bf16", "fp8_tensor", "fp8_row", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
KINDS = ("Linear", "GroupedLinear", "GroupedMLP")
GROUPS, ROWS, TAIL, WIDTH = 3, 96, 16, 64
by_name = pytest.mark.parametrize("name", NAMES)
by_kind = pytest.mark.parametrize("kind", KINDS)


def recipe_of(name: str, **fields: object) -> Recipe:
    recipe = recipe_from_name(name)
    assert recipe is not None
    return replace(recipe, **{"nonfinite": "nan", **fields})  # type: ignore[arg-type]


def make(kind: str, recipe: Recipe, device: torch.device | str = "cpu") -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "Linear":
        return Linear(WIDTH, WIDTH, device=device, recipe=recipe)
    if kind == "GroupedLinear":
        return GroupedLinear(GROUPS, WIDTH, WIDTH, device=device, recipe=recipe)
    return GroupedMLP(GROUPS, WIDTH, WIDTH, True, device=device, recipe=recipe)


def batch(kind: str, device: torch.device | str = "cpu") -> list[Tensor]:
    """Rows past the groups are NaN, which must not affect anything."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS + TAIL, WIDTH, generator=generator)
    if kind == "Linear":
        return [x.to(device)]
    x[ROWS:] = float("nan")
    arguments = [x, torch.tensor([32, 0, 64])]
    if kind == "GroupedMLP":
        arguments.append(torch.rand(ROWS + TAIL, generator=generator))
    return [argument.to(device) for argument in arguments]


def step(module: torch.nn.Module, arguments: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(2)
    arguments = [arguments[0].clone().requires_grad_(), *arguments[1:]]
    output = module(*arguments)
    parameters = dict(module.named_parameters())
    gradients = torch.autograd.grad(output, [arguments[0], *parameters.values()], grad)
    return {"output": output.detach(), **dict(zip(["input", *parameters], gradients, strict=True))}


def gradient(kind: str, device: torch.device | str = "cpu") -> Tensor:
    grad = torch.randn(ROWS + TAIL, WIDTH, generator=torch.Generator().manual_seed(3))
    if kind != "Linear":
        grad[ROWS:] = float("nan")
    return grad.to(device)


def in_use(kind: str, name: str, value: Tensor) -> Tensor:
    """The rows that belong to groups, and the weights of groups with rows."""
    if kind == "Linear":
        return value
    if name in ("output", "input"):
        assert not value[ROWS:].any(), f"{name} past the groups"
        return value[:ROWS]
    return value[[0, 2]]


@by_kind
@by_name
def test_finite_operands_keep_their_bits(kind: str, name: str, device: torch.device) -> None:
    arguments, grad = batch(kind, device), gradient(kind, device)
    expected = step(make(kind, recipe_of(name, nonfinite="round"), device), arguments, grad)
    got = step(make(kind, recipe_of(name), device), arguments, grad)
    for key, value in expected.items():
        assert value.isfinite().all() if kind == "Linear" else in_use(kind, key, value).isfinite().all()
        assert_same_bits(got[key], value, key)


@by_kind
@by_name
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_each_operand(kind: str, name: str, where: str, value: float, device: torch.device) -> None:
    module, arguments, grad = make(kind, recipe_of(name), device), batch(kind, device), gradient(kind, device)
    layer = module.fc1 if isinstance(module, GroupedMLP) else module
    of_weight = "fc1.weight" if isinstance(module, GroupedMLP) else "weight"
    with torch.no_grad():
        if where == "input":
            arguments[0][70, 3] = value
        elif where == "weight":
            layer.weight.view(-1)[-5] = value
        else:
            grad[70, 3] = value
    got = step(module, arguments, grad)
    through = {
        "input": ["output", of_weight],
        "weight": ["output", "input"],
        "gradient": ["input", of_weight],
    }
    affected = list(got) if kind == "GroupedMLP" and where != "gradient" else through[where]
    for key, result in got.items():
        used = in_use(kind, key, result)
        if key in affected and "bias" not in key:
            assert used.isnan().all(), key
        elif key == "output" or (kind != "GroupedMLP" and "bias" not in key):
            assert used.isfinite().all(), key


@by_name
def test_an_activation_that_overflows(name: str, device: torch.device) -> None:
    """An overflow between the two products of GroupedMLP, which is not visible to the caller."""
    module, arguments, grad = make("GroupedMLP", recipe_of(name), device), batch("GroupedMLP", device), None
    assert isinstance(module, GroupedMLP)
    with torch.no_grad():
        module.fc1.bias[0] = 1e30
    output = module(*arguments, *([] if grad is None else [grad]))
    assert output[:ROWS].isnan().all() and not output[ROWS:].any()


@by_name
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear", "GroupedMLP"])
def test_cached_quantized_weights(kind: str, name: str, device: torch.device) -> None:
    if name == "fp8_delayed":
        pytest.skip("delayed scaling caches no weights")
    module, arguments, grad = make(kind, recipe_of(name), device), batch(kind, device), gradient(kind, device)
    expected = step(module, arguments, grad)
    module.quantize_weights()
    for key, value in step(module, arguments, grad).items():
        assert_same_bits(value, expected[key], key)
    with torch.no_grad():
        next(iter(module.parameters())).view(-1)[-5] = float("nan")
    for _ in range(2):  # new cache buffers first, then the same buffers again
        module.quantize_weights()
        got = step(module, arguments, grad)
        assert in_use(kind, "output", got["output"]).isnan().all()
        assert in_use(kind, "input", got["input"]).isnan().all()
        module.forget_quantized_weights()


@by_name
@pytest.mark.parametrize("kind", [*KINDS, "MoE"])
def test_an_unmodified_loss_scaler_skips_the_step(kind: str, name: str) -> None:
    """A gradient overflows after the layer; the NaN is the scaler's only information."""
    torch.manual_seed(0)
    if kind == "MoE":
        module: torch.nn.Module = MoE(WIDTH, WIDTH, 4, 2, recipe=recipe_of(name))
    else:
        module = make(kind, recipe_of(name))
    optimizer = torch.optim.SGD([p for n, p in module.named_parameters() if "bias" not in n], lr=0.1)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**10)
    arguments = batch(kind) if kind != "MoE" else [torch.randn(ROWS, WIDTH)]
    for overflows in (False, True, False):
        before, scale = copy.deepcopy([p.detach() for p in module.parameters()]), scaler.get_scale()
        optimizer.zero_grad()
        output = module(*arguments)
        output = output[0] if kind == "MoE" else output
        grad = torch.randn(output.shape) * 1e-3
        if overflows:
            grad[40, 1] = float("inf")
        scaler.scale(output).backward(grad)
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(p, b) for p, b in zip(module.parameters(), before, strict=True))
        assert changed == (not overflows)
        assert scaler.get_scale() == (scale / 2 if overflows else scale)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("kind", "name"), [("Linear", "fp8_tensor"), ("GroupedMLP", "mxfp8"), ("Linear", "fp8_delayed")]
)
def test_compiled(kind: str, name: str, device: torch.device) -> None:
    module, plain = make(kind, recipe_of(name), device), make(kind, recipe_of(name), device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for bad in (False, True):
        arguments, grad = batch(kind, device), gradient(kind, device)
        if bad:
            grad[5, 5] = float("inf")
        torch.manual_seed(2)
        x = arguments[0].clone().requires_grad_()
        output = compiled(x, *arguments[1:])
        got = torch.autograd.grad(output, [x, *module.parameters()], grad)
        expected = step(plain, arguments, grad)
        for a, b in zip([output.detach(), *got], expected.values(), strict=True):
            assert_same_bits(a, b)
        assert bad == bool(in_use(kind, "input", got[0]).isnan().all())


@by_name
def test_bytes_are_the_same(name: str) -> None:
    recipe, plain = recipe_of(name), recipe_of(name, nonfinite="round")
    assert recipe.input_format.endswith("nan") and "nan" not in plain.input_format
    if name in ("bf16", "nvfp4"):
        return
    x = torch.randn(64, 64)
    x[3, 4], x[5, 6] = float("nan"), float("inf")
    for a, b in ((recipe.input_format, plain.input_format), (recipe.grad_format, plain.grad_format)):
        for got, expected in zip(
            ops.quantize(x, a, columnwise=True), ops.quantize(x, b, columnwise=True), strict=True
        ):
            assert_same_bits(got.view(torch.uint8), expected.view(torch.uint8))


@by_name
@pytest.mark.usefixtures("schema_checks_take_fp8")
def test_opcheck(name: str, device: torch.device) -> None:
    recipe = recipe_of(name, **({"stochastic_rounding": False} if name == "nvfp4" else {}))
    keys = (recipe.input_format, recipe.weight_format, recipe.grad_format)
    w, stack = (torch.randn(s, device=device, requires_grad=True) for s in ((32, 64), (2, 32, 64)))
    x, sizes = torch.randn(48, 64, device=device, requires_grad=True), torch.tensor([16, 16], device=device)
    _ops = torch.ops.transformer_plugin
    if name == "fp8_delayed":
        opcheck(_ops.linear.scaled, (x, w, torch.ones(3, device=device), None, None, *keys))
        opcheck(
            _ops.grouped_linear.scaled,
            (x, stack, sizes, torch.ones(6, device=device), None, None, None, *keys),
        )
        return
    opcheck(_ops.linear.default, (x, w, None, *keys))
    opcheck(_ops.grouped_linear.default, (x, [stack], sizes, None, None, *keys))
    given = [t.cpu() for t in ops.quantize_weight(w.detach(), *keys)]
    columns = len(given) > {"bf16": 1, "nvfp4": 3}.get(name, 2)
    with torch.no_grad():
        w[3, 5] = float("inf")
    marked = reference.quantize_weight(w.detach().cpu(), *keys, columns=columns)
    for got, expected in zip(ops.quantize_weight(w.detach(), *keys), marked, strict=True):
        if got.dtype in (torch.float32, torch.float8_e8m0fnu, torch.bfloat16):
            assert got.float().isnan().all() and expected.float().isnan().all()
        else:
            assert_same_bits(got.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_choices() -> None:
    with pytest.raises(ValueError) as caught:
        MXFP8BlockScaling(nonfinite="zero")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "transformer_plugin.MXFP8BlockScaling: argument 'nonfinite': expected 'round' or 'nan', got 'zero'. "
        "The default is 'round'."
    )
    assert Recipe(nonfinite="nan").input_format == "none"
    assert NVFP4BlockScaling() == NVFP4BlockScaling(nonfinite="round")
