"""Launch options and the order of gate and linear part, from the modules to the ops."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_plugin import formats, ops
from transformer_plugin.nn import GroupedLinear, GroupedMLP, LaunchOptions, MoE
from transformer_plugin.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
)
from transformer_plugin.testing.numerics import assert_same_bits, relative_error

GROUPS, HIDDEN, FEATURES = 3, 64, 96
SIZES = (40, 0, 25)
RECIPES: list[Recipe | None] = [
    None,
    Float8BlockScaling(),
    Float8RowwiseScaling(),
    MXFP8BlockScaling(),
    DelayedScaling(),
]
by_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=["none", "block", "row", "mx", "delayed"])


class LaunchesOf(TorchDispatchMode):
    """Collects (name, max_sms, expected_rows) of every grouped GEMM that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        names = [argument.name for argument in func._schema.arguments]
        if func.namespace == "transformer_plugin" and func._opname.startswith("grouped_gemm"):
            values = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.launches.append((func._opname, values.get("max_sms", 0), values.get("expected_rows", -1)))
        return func(*args, **(kwargs or {}))


def step(module: torch.nn.Module, device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    """Output and gradients of one forward and backward."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(SIZES) + 7, HIDDEN, generator=generator).to(device).requires_grad_()
    probs = torch.rand(len(rows), generator=generator).to(device).requires_grad_()
    sizes = torch.tensor(SIZES, device=device)
    output = module(rows, sizes, probs) if isinstance(module, GroupedMLP) else module(rows, sizes)
    grad = torch.randn(output.shape, generator=generator).to(device)
    leaves = [rows, *([probs] if isinstance(module, GroupedMLP) else []), *module.parameters()]
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


@by_recipe
@pytest.mark.parametrize("kind", [GroupedLinear, GroupedMLP])
def test_every_product_gets_them(kind: type, recipe: Recipe | None) -> None:
    torch.manual_seed(0)
    module = kind(GROUPS, HIDDEN, FEATURES, recipe=recipe, launch_options=LaunchOptions(4, 65))
    assert module.launch_options == LaunchOptions(4, 65)
    products = {"GroupedLinear": 3, "GroupedMLP": 6}[kind.__name__]
    with LaunchesOf() as calls:
        expected = step(module, torch.device("cpu"))
    assert len(calls.launches) == products
    assert {launch[1:] for launch in calls.launches} == {(4, 65)}
    module.launch_options = LaunchOptions()
    with LaunchesOf() as calls:
        got = step(module, torch.device("cpu"))
    assert {launch[1:] for launch in calls.launches} == {(0, -1)}
    if not isinstance(recipe, DelayedScaling):  # whose scales are others in the next step
        for a, b in zip(got, expected, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("recipe", RECIPES[:4], ids=["none", "block", "row", "mx"])
def test_results_do_not_depend_on_them(recipe: Recipe | None, device: torch.device) -> None:
    torch.manual_seed(0)
    module = GroupedMLP(GROUPS, HIDDEN, FEATURES, True, device=device, recipe=recipe)
    expected = step(module, device)
    for options in (LaunchOptions(max_sms=8), LaunchOptions(expected_rows=65), LaunchOptions(2, 65)):
        module.launch_options = options
        for a, b in zip(step(module, device), expected, strict=True):
            assert_same_bits(a, b)


def test_layers_with_different_options_run_apart() -> None:
    module = GroupedMLP(GROUPS, HIDDEN, FEATURES)
    module.fc2.launch_options = LaunchOptions(expected_rows=65)
    with LaunchesOf() as calls:
        step(module, torch.device("cpu"))
    assert {launch[1:] for launch in calls.launches} == {(0, -1), (0, 65)}


def test_moe_passes_them() -> None:
    options = LaunchOptions(max_sms=6)
    layer = MoE(64, 32, 4, 2, glu_interleave=32, launch_options=options)
    assert layer.experts.launch_options == options and layer.experts.glu_interleave == 32
    with LaunchesOf() as calls:
        layer(torch.randn(5, 64)).output.sum().backward()
    assert {launch[1:] for launch in calls.launches} == {(6, -1)}
    layer.launch_options = LaunchOptions(expected_rows=3)
    assert layer.experts.fc1.launch_options == layer.launch_options == LaunchOptions(expected_rows=3)
    layer.experts.fc2.launch_options = LaunchOptions()
    with pytest.raises(ValueError, match="attribute 'launch_options': expected the same in all layers"):
        _ = layer.launch_options
    with pytest.raises(ValueError, match="attribute 'glu_interleave'"):
        layer.glu_interleave = 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (LaunchOptions(max_sms=-1), ValueError),
        (LaunchOptions(expected_rows=-2), ValueError),
        (LaunchOptions(10**30), ValueError),
        (LaunchOptions(1.5), TypeError),  # type: ignore[arg-type]
        ((1, 2), TypeError),
        (None, TypeError),
    ],
)
def test_wrong_options_are_refused_when_they_are_set(options: LaunchOptions, error: type[Exception]) -> None:
    match = "attribute 'launch_options': expected LaunchOptions with integers"
    for kind in (GroupedLinear, GroupedMLP):
        with pytest.raises(error, match=match):
            kind(GROUPS, HIDDEN, FEATURES, launch_options=options)
        module = kind(GROUPS, HIDDEN, FEATURES)
        with pytest.raises(error, match=match):
            module.launch_options = options
        assert module.launch_options == LaunchOptions()
    with pytest.raises(
        ValueError, match="grouped_linear: argument 'max_sms': expected a number of multiprocessors"
    ):
        ops.grouped_linear(torch.ones(2, 4), torch.ones(1, 4, 4), torch.tensor([2]), max_sms=-1)


def test_sizes_may_be_a_list() -> None:
    rows, probs = torch.randn(65, HIDDEN), torch.rand(65)
    for recipe in (None, DelayedScaling()):
        module = GroupedMLP(GROUPS, HIDDEN, FEATURES, recipe=recipe).eval()
        assert_same_bits(module(rows, list(SIZES), probs), module(rows, torch.tensor(SIZES), probs))


@pytest.mark.parametrize("recipe", RECIPES[:4], ids=["none", "block", "row", "mx"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("hook", [False, True], ids=["one op", "layers"])
def test_interleaved_weights(recipe: Recipe | None, bias: bool, hook: bool, device: torch.device) -> None:
    """The same numbers as with the gate first, from reordered parameters, up to the order of sums and blocks."""
    torch.manual_seed(0)
    plain = GroupedMLP(GROUPS, HIDDEN, FEATURES, bias, device=device, recipe=recipe)
    module = GroupedMLP(GROUPS, HIDDEN, FEATURES, bias, device=device, recipe=recipe, glu_interleave=32)

    def interleaved(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)

    state = plain.state_dict()
    for name in ("fc1.weight", "fc1.bias"):
        if name in state:
            state[name] = interleaved(state[name])
    module.load_state_dict(state)
    if hook:
        for one in (plain, module):
            one.fc1.register_forward_hook(lambda *_: None)
    expected, got = step(plain, device), step(module, device)
    names = ["output", "rows", "probs", *(name for name, _ in module.named_parameters())]
    limit = 1e-5 if recipe is None else 2 * formats.Format.parse(recipe.grad_format).gemm_tolerance
    for name, a, b in zip(names, got, expected, strict=True):
        b = interleaved(b) if name.startswith("fc1") else b
        assert relative_error(a, b) <= limit, name
        if name == "output" and (recipe is None or recipe.input_format.startswith(("fp8_row", "mxfp8"))):
            assert_same_bits(a, b, name)  # every output feature has its own sums and scales
    assert relative_error(step(plain, device, seed=1)[0], expected[0]) > 0.5


def test_interleave_is_checked() -> None:
    with pytest.raises(
        ValueError, match="argument 'glu_interleave': expected 0, 1, or 32 with a ffn_hidden that is a"
    ):
        GroupedMLP(GROUPS, HIDDEN, 40, glu_interleave=32)
    module = GroupedMLP(GROUPS, HIDDEN, FEATURES, glu_interleave=32)
    with pytest.raises(ValueError, match="attribute 'glu_interleave'"):
        module.glu_interleave = 0


def test_formats_on_a_cpu_are_those_of_the_recipe() -> None:
    for key in ("none", "bf16", "fp8_block", "fp8_tensor:e5m2", "mxfp8", "nvfp4", "fp8_row"):
        assert formats.resolve(key, "cpu") == key


@pytest.mark.gpu
def test_groups_are_aligned_on_hopper() -> None:
    capability = torch.cuda.get_device_capability()
    aligned = ",aligned" if capability == (9, 0) else ""
    assert formats.resolve("fp8_block", "cuda") == (
        "fp8_block:e4m3,pow2" + aligned if aligned else "fp8_block"
    )
    assert formats.resolve("mxfp8", "cuda") == "mxfp8"
    layer = GroupedLinear(2, 64, 64, recipe=Float8BlockScaling())
    assert layer._formats.input == "fp8_block:e4m3,pow2"
    layer.cuda()
    assert layer._formats.input == "fp8_block:e4m3,pow2" + aligned
    assert layer._formats.weight == "fp8_block:e4m3,pow2,square"
    assert layer.cpu()._formats.input == "fp8_block:e4m3,pow2"
